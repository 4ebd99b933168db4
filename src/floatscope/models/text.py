"""Words ↔ token ids: a checkpoint's own tokenizer, opened without its code.

    text = open_text(Path("LLaDA-8B-Instruct"))
    ids = text.encode("What floats?", chat=True)     # through the chat template, which holds the bos itself
    text.decode(ids), text.pieces(ids)               # one string; one string per token
    text.locate("What floats?", chat=True).covers    # the same ids, and which characters each of them stands for

A folder without tokenizer files gives None, and prompts are then token ids.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from floatscope.errors import LIBRARY_ERRORS, UserError, is_rust_error, printable, reason
from floatscope.models.files import read_json
from floatscope.models.quiet import quiet

Messages = Sequence[Mapping[str, str]]

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
TEMPLATE = "chat_template.jinja"
ASIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>")
TEMPLATE_SECONDS = 5.0  # a chat template is a program, and may not end
TEMPLATE_LENGTH = 4_000_000  # characters; the tokenizer would die of a much longer text, and the process with it
ORDINARY = frozenset([9, 10, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)])
"""Bytes that texts are made of: printable characters in UTF-8. SmolLM2 has no tokens for some of the others."""
BROKEN = "\ufffd"  # what an unfinished character decodes to
PLACE = "floatscope-puts-the-prompt-here"  # rendered once, to see what a chat template writes around a prompt


@dataclass(frozen=True)
class Located:
    """A prompt as token ids, and what each token stands for: [start, stop) in the characters of the prompt.

    Space around a token's other characters does not count; a token of spaces alone stands for them. A special token
    stands for nothing (None), what a chat template writes lies below 0 or beyond the prompt's end. `covers` is None
    where nobody knows: a tokenizer without offsets, or a template that changes the prompt.
    """

    ids: list[int]
    covers: list[tuple[int, int] | None] | None


class ModelTokenizer:
    """A fast tokenizer of transformers, and what the rest of floatscope asks of it."""

    def __init__(self, tokenizer: Any, name: str = "the tokenizer", separator: bool = False) -> None:
        self._tokenizer, self._name, self._separator = tokenizer, name, separator

    def __repr__(self) -> str:
        template = "with a" if self.has_template else "without a"
        return f"Text({self._name}: {len(self._vocabulary):,} tokens, {template} chat template)"

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
            return self._open_ended(self._read(prompt)["input_ids"])
        ids: list[int] = self._read(self._conversation(prompt), add_special_tokens=False)["input_ids"]
        return ids

    def locate(self, prompt: str, chat: bool = False) -> Located:
        """The ids `encode` gives, and the characters of the prompt that each of them stands for."""
        if not getattr(self._tokenizer, "is_fast", False):
            return Located(self.encode(prompt, chat), None)
        text = self._conversation(prompt) if chat else prompt
        read = self._read(text, add_special_tokens=not chat, return_offsets_mapping=True)
        ids = read["input_ids"] if chat else self._open_ended(read["input_ids"])
        found = self._inside(text) if chat else (0, len(text))
        if found is None or (inner := text[slice(*found)]).strip() != prompt.strip() or inner not in prompt:
            return Located(ids, None)
        spans = self._spans(ids, read["offset_mapping"], text)
        return Located(ids, [span and _within(prompt, inner, found[0], span) for span in spans])

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

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text."""
        return self._special

    @cached_property
    def lacking_bytes(self) -> frozenset[int]:
        """Of a byte-level tokenizer without a token for the unknown, the bytes it would silently drop."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or getattr(backend.model, "unk_token", None) is not None:
            return frozenset()
        if "ByteLevel" not in repr(backend.pre_tokenizer):
            return frozenset()
        return frozenset(byte for byte, name in _byte_names().items() if name not in self._vocabulary)

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

    def _read(self, text: str, **how: bool) -> Mapping[str, Any]:
        """The tokenizer's answer: `input_ids`, and `offset_mapping` if that was asked for."""
        if self.lacking_bytes and self.lacking_bytes.intersection(text.encode(errors="ignore")):
            lost = next(c for c in text if self.lacking_bytes.intersection(c.encode(errors="ignore")))
            raise UserError(f"the tokenizer of {self._name} has no token for {lost!r}; take it out of the text")
        try:
            read: Mapping[str, Any] = self._tokenizer(text, verbose=False, **how)
        except BaseException as error:
            if is_rust_error(error) or isinstance(
                error, (TypeError, ValueError)
            ):  # no valid text, or its own rules loop
                raise UserError(f"the tokenizer of {self._name} cannot read this text ({reason(error)})") from error
            raise
        return read

    def _open_ended(self, ids: list[int]) -> list[int]:
        """Without what the tokenizer puts after a text: the answer comes there."""
        end = len(ids) - len(self._trailing)
        return ids[:end] if tuple(ids[end:]) == self._trailing else ids

    def _spans(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str
    ) -> Iterator[tuple[int, int] | None]:
        """The characters of the text each token stands for, without the space around them."""
        before = 0
        for token, (start, stop) in zip(ids, offsets, strict=False):  # what follows the text has offsets and no id here
            if start == stop:  # some byte-level tokenizers leave leading space out, and so a token of spaces is empty
                start = min(before, stop)
            before = max(before, stop)
            said = text[start:stop].strip()
            named = token in self._special and said == self._tokens.get(token)  # the unknown token stands for its word
            first = text.index(said, start) if said else start
            yield None if named or start == stop else (first, first + len(said) if said else stop)

    def _inside(self, text: str) -> tuple[int, int] | None:
        """Where the prompt stands in a conversation of it alone; None if the template does not say."""
        before, place, after = self._around
        start, stop = len(before), len(text) - len(after)
        known = place and start <= stop and text.startswith(before) and text.endswith(after)
        return (start, stop) if known else None

    def _conversation(self, prompt: str | Messages) -> str:
        """The text a prompt or a list of messages becomes, up to where the answer begins."""
        if not self.has_template:
            raise UserError(f"{self._name} has no chat template; encode with chat=False")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if not messages or any({"role", "content"} - m.keys() for m in messages):
            raise UserError("messages are [{'role': 'user', 'content': '…'}, …], at least one of them")
        return self._render(messages)

    def _render(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            _refuse_powers(self._tokenizer.chat_template)
            with _at_most(TEMPLATE_SECONDS):
                text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            if len(text) > TEMPLATE_LENGTH:
                raise ValueError(f"it wrote {len(text):,} characters, of which {TEMPLATE_LENGTH:,} are allowed")
        except _Endless:
            raise UserError(
                f"the chat template of {self._name} did not end within {TEMPLATE_SECONDS:.0f} s; encode with chat=False"
            ) from None
        except (TemplateError, MemoryError, SyntaxError, *LIBRARY_ERRORS) as error:  # RecursionError is a RuntimeError
            raise UserError(
                f"the chat template of {self._name} failed ({reason(error)}); encode with chat=False"
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
    def _around(self) -> tuple[str, str, str]:
        """What the chat template writes before a prompt, the prompt's place, and what it writes after."""
        text = self._conversation(PLACE)
        return text.partition(PLACE) if text.count(PLACE) == 1 else (text, "", "")

    @cached_property
    def _trailing(self) -> tuple[int, ...]:
        """What the tokenizer puts after a text by itself."""
        bare = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self._tokenizer("a")["input_ids"]
        for i in range(len(whole) - len(bare) + 1):
            if whole[i : i + len(bare)] == bare:
                return tuple(whole[i + len(bare) :])
        return ()


def _within(prompt: str, inner: str, start: int, span: tuple[int, int]) -> tuple[int, int]:
    """A span of a conversation, counted in the prompt, of which `inner` begins at `start` of the conversation."""
    stop, lead = start + len(inner), prompt.index(inner)

    def at(character: int) -> int:
        if character < start:
            return character - start
        return character - start + lead if character < stop else character - stop + len(prompt)

    return at(span[0]), at(span[1] - 1) + 1


def open_text(folder: Path, separator: bool = False, trust_remote_code: bool = False) -> ModelTokenizer | None:
    """The tokenizer of a checkpoint folder; None if it has no tokenizer files."""
    there = [name for name in VOCABULARIES if (folder / name).is_file()]
    if not there:
        return None
    settings = {name: read_json(folder / name) for name in ASIDE if (folder / name).is_file()}
    about = settings.get("tokenizer_config.json", {})
    if trust_remote_code:
        refuse_foreign_code(folder / "tokenizer_config.json", about.get("auto_map"))
    kind = _tokenizer_class(there, about.get("tokenizer_class"))
    try:
        if (folder / TEMPLATE).is_file():
            (folder / TEMPLATE).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{folder / TEMPLATE} is damaged ({reason(error)}); fetch it again") from error
    try:
        with quiet():
            tokenizer = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise UserError(f"{folder / there[0]} cannot be read without another package ({reason(error)})") from error
    except BaseException as error:
        if isinstance(error, PermissionError) or not (
            is_rust_error(error) or isinstance(error, (OSError, *LIBRARY_ERRORS))
        ):
            raise
        if about.get("auto_map") and not trust_remote_code and kind.__name__ == "AutoTokenizer":
            raise UserError(f"{folder / there[0]} is read by code of its own, which is not run") from error
        if _is_sound(folder / there[0]):
            raise UserError(f"{folder / 'tokenizer_config.json'} does not fit ({reason(error)})") from error
        raise UserError(f"{folder / there[0]} is damaged ({reason(error)}); fetch it again") from error
    text = ModelTokenizer(tokenizer, name=str(folder), separator=separator)
    check_text(text, folder / there[0], _declared(folder / there[0], about))
    return text


def refuse_foreign_code(file: Path, auto_map: object) -> None:
    """Trust in a checkpoint's code is none in that of another repository, which "org/name--module.Class" fetches."""
    named = auto_map.values() if isinstance(auto_map, dict) else []
    for name in (n for value in named for n in (value if isinstance(value, list) else [value])):
        if name is not None and (not isinstance(name, str) or "--" in name):
            raise UserError(f"{file} asks for code that is not in its folder ({printable(name)}), which is not run")


def _declared(file: Path, about: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The tokens added to a vocabulary and the ids they are meant to have."""
    added = read_json(file).get("added_tokens") or [] if file.name == "tokenizer.json" else []
    try:
        decoder = (about.get("added_tokens_decoder") or {}).items()
        return [(t["content"], int(i)) for i, t in decoder] + [(t["content"], int(t["id"])) for t in added]
    except LIBRARY_ERRORS as error:
        raise UserError(f"{file} is damaged (its added tokens: {reason(error)}); fetch it again") from error


def check_text(text: ModelTokenizer, file: Path, declared: Sequence[tuple[str, int]] = ()) -> None:
    """A tokenizer that opens may still be wrong: a vocabulary cut short moves every added token to another id, and a
    byte without a token would be left out of every text."""
    wrong = [f"{t} should be {i} and is {text.id_of(t)}" for t, i in declared if text.id_of(t) != i]
    if not wrong and (lacking := text.lacking_bytes & ORDINARY):
        wrong = [f"{len(lacking)} bytes of ordinary text have no token"]
    if not wrong and not text.encode("a"):
        wrong = ["it has no tokens for a text"]
    if wrong:
        raise UserError(f"{file} is damaged ({printable(wrong[0])}); fetch it again")


def _byte_names() -> dict[int, str]:
    """GPT-2's alphabet: what a byte is called in a byte-level vocabulary; those that cannot be printed in order from
    U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _is_sound(file: Path) -> bool:
    """Whether the vocabulary itself opens, so that the settings beside it are wrong."""
    from tokenizers import Tokenizer

    try:
        return file.name == "tokenizer.json" and Tokenizer.from_file(str(file)) is not None
    except BaseException as error:
        if is_rust_error(error) or isinstance(error, LIBRARY_ERRORS):
            return False
        raise


def _tokenizer_class(there: Sequence[str], named: object) -> Any:
    """tokenizer.json is read as it is, whatever class its config names. Dream's own class is Qwen2's."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

    if "tokenizer.json" in there:
        return PreTrainedTokenizerFast
    if named in ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"):
        return Qwen2Tokenizer
    return AutoTokenizer


def _refuse_powers(template: object) -> None:
    """A power is one operation of the interpreter, which nobody can stop: 10**7 to the 10**7 takes hours."""
    from jinja2 import Environment

    if not isinstance(template, str):
        return
    before = ""
    for _, kind, value in Environment().lex(template):
        if kind == "operator" and value == "**" and before not in ("(", ","):  # there it hands on arguments
            raise ValueError("it asks for a power")
        before = before if kind == "whitespace" else value


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
