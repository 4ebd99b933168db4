"""Words ↔ token ids: a checkpoint's own tokenizer, opened without its code.

    text = open_text(Path("LLaDA-8B-Instruct"))
    ids = text.encode("What floats?", chat=True)     # through the chat template, which holds the bos itself
    text.decode(ids), text.pieces(ids)               # one string; one string per token

A folder without tokenizer files gives None, and prompts are then token ids.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from floatscope.errors import UserError
from floatscope.models.files import first_line, read_json
from floatscope.models.quiet import quiet

Messages = Sequence[Mapping[str, str]]

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
ASIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>")
TEMPLATE_SECONDS = 5.0  # a chat template is a program, and may not end
BROKEN = "\ufffd"  # what an unfinished character decodes to


class Text:
    """A fast tokenizer of transformers, and what the rest of floatscope asks of it."""

    def __init__(self, tokenizer: Any, name: str = "the tokenizer", separator: bool = False) -> None:
        self._tokenizer, self._name, self._separator = tokenizer, name, separator

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def suffix(self) -> tuple[int, ...]:
        """Tokens that must follow the answer: an encoder's separator, else none."""
        return self._trailing if self._separator else ()

    def encode(self, prompt: str | Messages, chat: bool = False) -> list[int]:
        """Token ids of a text, or of a conversation through the chat template, ready to be continued."""
        if not chat:
            if not isinstance(prompt, str):
                raise UserError(
                    "messages are encoded through the chat template; set chat=True, or give the text itself"
                )
            ids: list[int] = self._tokenizer(prompt, verbose=False)["input_ids"]
            end = len(ids) - len(self._trailing)
            return ids[:end] if tuple(ids[end:]) == self._trailing else ids
        if not self.has_template:
            raise UserError(f"{self._name} has no chat template; encode with chat=False")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if not messages or any({"role", "content"} - m.keys() for m in messages):
            raise UserError("messages are [{'role': 'user', 'content': '…'}, …], at least one of them")
        encoded: list[int] = self._tokenizer(self._render(messages), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens left out, spaces as they are."""
        text: str = self._tokenizer.decode(
            self._known(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """A string per token; joined they show the text. Special tokens by name, ids without a token as `<id>`, and a
        character spread over several tokens at the last of them."""
        shown: list[str] = []
        run: list[int] = []
        for i in ids:
            if i in self._special or i not in self._tokens:
                shown += [*self._plain(run), self._tokens.get(i, f"<{i}>")]
                run = []
            else:
                run.append(i)
        return shown + self._plain(run)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its exact name."""
        found: int | None = self._vocabulary.get(token)
        return found

    def name_of(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokens.get(token_id)

    @property
    def mask_id(self) -> int | None:
        return self._named("mask")

    @property
    def bos_id(self) -> int | None:
        return self._named("bos")

    @property
    def eos_id(self) -> int | None:
        return self._named("eos") if self._named("eos") is not None or not self._separator else self._named("sep")

    @property
    def eot_id(self) -> int | None:
        return next((i for i in map(self.id_of, END_OF_TURN) if i is not None), None)

    @property
    def pad_id(self) -> int | None:
        return self._named("pad")

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self._tokens, default=-1) + 1

    def _named(self, kind: str) -> int | None:
        token = getattr(self._tokenizer, f"{kind}_token", None)
        return None if token is None else self.id_of(str(token))

    def _known(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self._tokens]

    def _plain(self, ids: list[int]) -> list[str]:
        """Each token as what it adds to the text of those before it; a character that is not whole yet waits."""
        shown: list[str] = []
        start, whole, said = 0, 0, ""  # ids[start:whole] end on whole characters; `said` is what was shown since start
        for i in range(len(ids)):
            text: str = self._tokenizer.decode(ids[start : i + 1], clean_up_tokenization_spaces=False)
            ready = text if i + 1 == len(ids) else text.rstrip(BROKEN)
            grows = ready.startswith(said)  # not where a decoder takes back a space it wrote
            shown.append(ready[len(said) :] if grows else self._tokenizer.decode([ids[i]]))
            said = ready
            if ready == text:  # a clean cut; the token before it stays in view, for the space it may want
                start, whole = whole, i + 1
                said = self._tokenizer.decode(ids[start:whole], clean_up_tokenization_spaces=False)
        return shown

    def _render(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            with _at_most(TEMPLATE_SECONDS):
                text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except _Endless:
            raise UserError(
                f"the chat template of {self._name} did not end within {TEMPLATE_SECONDS:.0f} s; encode with chat=False"
            ) from None
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"the chat template of {self._name} failed ({first_line(error)}); encode with chat=False"
            ) from error
        return text

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {i: token for token, i in self._vocabulary.items()}

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        return frozenset(i for i, token in added.items() if token.special) | frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def _trailing(self) -> tuple[int, ...]:
        """What the tokenizer puts after a text by itself."""
        bare = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self._tokenizer("a")["input_ids"]
        for i in range(len(whole) - len(bare) + 1):
            if whole[i : i + len(bare)] == bare:
                return tuple(whole[i + len(bare) :])
        return ()


def open_text(folder: Path, separator: bool = False, trust_remote_code: bool = False) -> Text | None:
    """The tokenizer of a checkpoint folder; None if it has no tokenizer files."""
    there = [name for name in VOCABULARIES if (folder / name).is_file()]
    if not there:
        return None
    settings = {name: read_json(folder / name) for name in ASIDE if (folder / name).is_file()}
    about = settings.get("tokenizer_config.json", {})
    kind = _tokenizer_class(there, about.get("tokenizer_class"))
    try:
        with quiet():
            tokenizer = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
            text = Text(tokenizer, name=str(folder), separator=separator)
            _check_ids(text, about.get("added_tokens_decoder") or {})
    except ImportError as error:
        raise UserError(f"{folder / there[0]} cannot be read without another package ({first_line(error)})") from error
    except BaseException as error:
        # The tokenizers library raises plain Exceptions, and its Rust code panics as a BaseException.
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise UserError(f"{folder / there[0]} is damaged ({first_line(error)}); fetch it again") from error
    return text


def _check_ids(text: Text, declared: Mapping[str, Mapping[str, Any]]) -> None:
    """A tokenizer that opens may still be wrong: a vocabulary cut short moves every added token to another id."""
    for i, token in declared.items():
        if text.id_of(token["content"]) != int(i):
            raise ValueError(f"{token['content']} should be {i} and is {text.id_of(token['content'])}")
    if not text.encode("a"):
        raise ValueError("it has no tokens for a text")


def _tokenizer_class(there: Sequence[str], named: object) -> Any:
    """tokenizer.json is read as it is, whatever class its config names. Dream's own class is Qwen2's."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

    if "tokenizer.json" in there:
        return PreTrainedTokenizerFast
    if named in ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"):
        return Qwen2Tokenizer
    return AutoTokenizer


class _Endless(BaseException):
    """Not an Exception, so that nothing on the way swallows it."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Stop Python code that runs longer; works in every thread, unlike an alarm."""
    until = time.monotonic() + seconds

    def watch(frame: FrameType, event: str, arg: Any) -> Any:
        if time.monotonic() > until:
            raise _Endless
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
