"""Chat templates, rendered with limits: a template is a program in the checkpoint, and may not end.

render_chat(hf_tokenizer, "What floats?", "LLaDA-8B")      # "<|startoftext|><|start_header_id|>user…"
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from floatscope.errors import LIBRARY_ERRORS, UserError, summarize_error

Messages = Sequence[Mapping[str, str]]

MAX_SECONDS = 5.0
MAX_CHARACTERS = 4_000_000  # a much longer text would crash the tokenizer, and the process with it


def render_chat(hf_tokenizer: Any, prompt: str | Messages, name: str) -> str:
    """Return the conversation of a prompt, or of a list of messages, up to where the answer begins.

    `name` names the tokenizer in error messages.
    """
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if not messages or any({"role", "content"} - m.keys() for m in messages):
        raise UserError("messages must be a list such as [{'role': 'user', 'content': '…'}], with at least one entry")
    try:
        _refuse_powers(hf_tokenizer.chat_template)
        with _limit_time(MAX_SECONDS):
            text: str = hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it wrote {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    except _TimeoutError:
        raise UserError(
            f"the chat template of {name} did not end within {MAX_SECONDS:.0f} s; encode with chat=False"
        ) from None
    except (TemplateError, MemoryError, SyntaxError, *LIBRARY_ERRORS) as error:  # RecursionError is a RuntimeError
        raise UserError(
            f"the chat template of {name} failed ({summarize_error(error)}); encode with chat=False"
        ) from error
    return text


def _refuse_powers(template: object) -> None:
    """Refuse `**` as an operator: a power is one operation that nothing can stop, and (10**7)**(10**7) takes hours."""
    from jinja2 import Environment

    if not isinstance(template, str):
        return
    previous = ""
    for _, kind, value in Environment().lex(template):
        if kind == "operator" and value == "**" and previous not in ("(", ","):  # after these it unpacks arguments
            raise ValueError("it uses the power operator **")
        previous = previous if kind == "whitespace" else value


class _TimeoutError(BaseException):
    """Not an Exception, so that no handler of the template swallows it."""


@contextmanager
def _limit_time(seconds: float) -> Iterator[None]:
    """Stop Python code inside the block after some time; works in every thread, unlike an alarm."""
    deadline = time.monotonic() + seconds

    def check_deadline(frame: FrameType, event: str, arg: Any) -> Any:
        if time.monotonic() > deadline:
            raise _TimeoutError
        return check_deadline

    previous = sys.gettrace()
    sys.settrace(check_deadline)
    try:
        yield
    finally:
        sys.settrace(previous)
