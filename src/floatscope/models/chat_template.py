"""Chat templates, rendered by transformers.

render_chat(hf_tokenizer, "What floats?", "LLaDA-8B")      # "<|startoftext|><|start_header_id|>user…"

A template is a program in the checkpoint, and may not end: `limited_tokenizer.py` runs it with limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floatscope.errors import LIBRARY_ERRORS, UserError, summarize_error

Messages = Sequence[Mapping[str, str]]

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
        text: str = hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it wrote {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    except (TemplateError, MemoryError, SyntaxError, *LIBRARY_ERRORS) as error:  # RecursionError is a RuntimeError
        raise UserError(
            f"the chat template of {name} failed ({summarize_error(error)}); encode with chat=False"
        ) from error
    return text
