"""Text ↔ token ids: a transformers tokenizer behind the interface that the rest of floatscope uses.

tokenizer = open_tokenizer(Path("LLaDA-8B-Instruct"))              # in tokenizer_files.py
ids = tokenizer.encode("What floats?", chat=True)                  # with the chat template
tokenizer.decode(ids), tokenizer.pieces(ids)                       # one string; one string per token
tokenizer.encode_with_offsets("What floats?", chat=True).offsets   # the characters that each token covers
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from floatscope.errors import UserError, is_rust_error, summarize_error
from floatscope.models.chat_template import Messages, render_chat

END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|role_end|>")
REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete character decodes to
PLACEHOLDER = "floatscope-puts-the-prompt-here"  # rendered once, to see what a chat template writes around a prompt


@dataclass(frozen=True)
class PromptEncoding:
    """The token ids of a prompt, and the characters of the prompt each token covers.

    An offset is [start, stop). Space around the other characters of a token does not count; a token of spaces alone
    covers them. A special token covers nothing (None). What a chat template writes lies below 0 or beyond the end of
    the prompt. `offsets` is None if they are unknown: the tokenizer has no offsets, or the template changes the prompt.
    """

    ids: list[int]
    offsets: list[tuple[int, int] | None] | None


class ModelTokenizer:
    """A transformers tokenizer with the methods that floatscope needs.

    Attributes:
        hf: the transformers tokenizer itself.
    """

    def __init__(self, tokenizer: Any, name: str = "the tokenizer", has_separator: bool = False) -> None:
        self.hf, self._name, self._has_separator = tokenizer, name, has_separator

    def __repr__(self) -> str:
        template = "with a" if self.has_chat_template else "without a"
        return f"ModelTokenizer({self._name}: {len(self._vocabulary):,} tokens, {template} chat template)"

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts can be encoded with `chat=True`."""
        return bool(self.hf.chat_template)

    @property
    def suffix(self) -> tuple[int, ...]:
        """Tokens that must follow the answer: the separator of an encoder, otherwise none."""
        return self._trailing_ids if self._has_separator else ()

    def encode(self, prompt: str | Messages, chat: bool = False) -> list[int]:
        """Return the token ids of a text, or of a conversation with the chat template, ready to be continued."""
        if not chat:
            if not isinstance(prompt, str):
                raise UserError("messages need the chat template; set chat=True, or give a string")
            return self._remove_trailing(self.tokenize(prompt)["input_ids"])
        ids: list[int] = self.tokenize(self.render(prompt), add_special_tokens=False)["input_ids"]
        return ids

    def encode_with_offsets(self, prompt: str, chat: bool = False) -> PromptEncoding:
        """Return the ids of `encode`, and the characters of the prompt each of them covers."""
        if not getattr(self.hf, "is_fast", False):
            return PromptEncoding(self.encode(prompt, chat), None)
        text = self.render(prompt) if chat else prompt
        encoding = self.tokenize(text, add_special_tokens=not chat, return_offsets_mapping=True)
        ids = encoding["input_ids"] if chat else self._remove_trailing(encoding["input_ids"])
        span = self._prompt_span(text) if chat else (0, len(text))
        if span is None or (inner := text[slice(*span)]).strip() != prompt.strip() or inner not in prompt:
            return PromptEncoding(ids, None)
        offsets = self._text_offsets(ids, encoding["offset_mapping"], text)
        return PromptEncoding(ids, [offset and _to_prompt(prompt, inner, span[0], offset) for offset in offsets])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens, with spaces as they are."""
        known = [i for i in ids if i in self._tokens]
        text: str = self.hf.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return one string per token; joined, they show the text.

        Special tokens appear by name and ids without a token as `<id>`. A character that spans several tokens appears
        at the last of them.
        """
        pieces: list[str] = []
        run: list[int] = []
        for i in ids:
            if i in self._special or i not in self._tokens:
                pieces += [*self.text_pieces(run), self._tokens.get(i, f"<{i}>")]
                run = []
            else:
                run.append(i)
        return pieces + self.text_pieces(run)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its exact name."""
        return self._vocabulary.get(token)

    def id_to_token(self, token_id: int | None) -> str | None:
        """Return the name of a token by its id."""
        return None if token_id is None else self._tokens.get(token_id)

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token."""
        return self._role_id("mask")

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text."""
        return self._role_id("bos")

    @property
    def eos_id(self) -> int | None:
        """The id of the token that ends a text; the separator if an encoder has no other."""
        eos = self._role_id("eos")
        return eos if eos is not None or not self._has_separator else self._role_id("sep")

    @property
    def eot_id(self) -> int | None:
        """The id of the token that ends a turn of a conversation."""
        return next((i for i in map(self.token_to_id, END_OF_TURN) if i is not None), None)

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token."""
        return self._role_id("pad")

    @property
    def size(self) -> int:
        """The largest id plus one."""
        return max(self._tokens, default=-1) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of tokens that are not text."""
        return self._special

    @cached_property
    def missing_bytes(self) -> frozenset[int]:
        """The bytes that a byte-level tokenizer without an unknown token would silently drop."""
        backend = getattr(self.hf, "backend_tokenizer", None)
        if backend is None or getattr(backend.model, "unk_token", None) is not None:
            return frozenset()
        if "ByteLevel" not in repr(backend.pre_tokenizer):
            return frozenset()
        return frozenset(byte for byte, name in byte_level_alphabet().items() if name not in self._vocabulary)

    @property
    def shared_id(self) -> tuple[str, str, int] | None:
        """Two tokens with one id, and the id; None if every token has its own."""
        pairs = ((token, self._tokens[i], i) for token, i in self._vocabulary.items())
        return next((pair for pair in pairs if pair[0] != pair[1]), None)

    def _role_id(self, role: str) -> int | None:
        token = getattr(self.hf, f"{role}_token", None)
        return None if token is None else self.token_to_id(str(token))

    def text_pieces(self, ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text of those before it; an incomplete character waits for its end."""
        pieces: list[str] = []
        start, stop, shown = 0, 0, ""  # ids[start:stop] end on a complete character; `shown` is the text since start
        for i in range(len(ids)):
            text: str = self.hf.decode(ids[start : i + 1], clean_up_tokenization_spaces=False)
            complete = text if i + 1 == len(ids) else text.rstrip(REPLACEMENT_CHARACTER)
            extends = complete.startswith(shown)  # not where a decoder removes a space it wrote before
            pieces.append(complete[len(shown) :] if extends else self.hf.decode([ids[i]]))
            shown = complete
            if complete == text:  # a clean cut; the token before it stays in view, for the space it may add
                start, stop = stop, i + 1
                shown = self.hf.decode(ids[start:stop], clean_up_tokenization_spaces=False)
        return pieces

    def tokenize(self, text: str, **options: bool) -> dict[str, Any]:
        """Return the tokenizer's `input_ids`, and `offset_mapping` if the options ask for it."""
        if self.missing_bytes and self.missing_bytes.intersection(text.encode(errors="ignore")):
            character = next(c for c in text if self.missing_bytes.intersection(c.encode(errors="ignore")))
            raise UserError(f"the tokenizer of {self._name} has no token for {character!r}; remove it from the text")
        try:
            encoding = self.hf(text, verbose=False, **options)
        except BaseException as error:
            # The text is not valid Unicode, or the tokenizer's own rules loop.
            if is_rust_error(error) or isinstance(error, (TypeError, ValueError)):
                raise UserError(
                    f"the tokenizer of {self._name} cannot read this text ({summarize_error(error)})"
                ) from error
            raise
        return {name: encoding[name] for name in ("input_ids", "offset_mapping") if name in encoding}

    def _remove_trailing(self, ids: list[int]) -> list[int]:
        """Drop what the tokenizer adds after a text: the answer goes there."""
        end = len(ids) - len(self._trailing_ids)
        return ids[:end] if tuple(ids[end:]) == self._trailing_ids else ids

    def _text_offsets(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str
    ) -> Iterator[tuple[int, int] | None]:
        """Yield the characters of the text each token covers, without the space around them."""
        end = 0
        for token, (start, stop) in zip(ids, offsets, strict=False):  # trailing tokens have offsets but no id here
            if start == stop:  # some byte-level tokenizers leave out leading space, so a token of spaces looks empty
                start = min(end, stop)
            end = max(end, stop)
            word = text[start:stop].strip()
            is_special = token in self._special and word == self._tokens.get(token)  # an unknown token covers its word
            first = text.index(word, start) if word else start
            yield None if is_special or start == stop else (first, first + len(word) if word else stop)

    def _prompt_span(self, text: str) -> tuple[int, int] | None:
        """Return where the prompt is in a conversation of that prompt alone; None if the template hides it."""
        before, placeholder, after = self._chat_frame
        start, stop = len(before), len(text) - len(after)
        is_known = placeholder and start <= stop and text.startswith(before) and text.endswith(after)
        return (start, stop) if is_known else None

    def render(self, prompt: str | Messages) -> str:
        """Return the conversation of a prompt, as the chat template writes it."""
        if not self.has_chat_template:
            raise UserError(f"{self._name} has no chat template; encode with chat=False")
        return render_chat(self.hf, prompt, self._name)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.hf.get_vocab()
        return vocabulary

    @cached_property
    def _tokens(self) -> dict[int, str]:
        return {i: token for token, i in self._vocabulary.items()}

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.hf.added_tokens_decoder
        return frozenset(i for i, token in added.items() if token.special) | frozenset(self.hf.all_special_ids)

    @cached_property
    def _chat_frame(self) -> tuple[str, str, str]:
        """What the chat template writes before a prompt, the placeholder, and what it writes after."""
        text = self.render(PLACEHOLDER)
        return text.partition(PLACEHOLDER) if text.count(PLACEHOLDER) == 1 else (text, "", "")

    @cached_property
    def _trailing_ids(self) -> tuple[int, ...]:
        """What the tokenizer adds after a text."""
        bare = self.tokenize("a", add_special_tokens=False)["input_ids"]
        full = self.tokenize("a")["input_ids"]
        for i in range(len(full) - len(bare) + 1):
            if full[i : i + len(bare)] == bare:
                return tuple(full[i + len(bare) :])
        return ()


def _to_prompt(prompt: str, inner: str, start: int, span: tuple[int, int]) -> tuple[int, int]:
    """Translate a span of a conversation to one of the prompt, whose part `inner` begins at `start` of it."""
    stop, lead = start + len(inner), prompt.index(inner)

    def translate(character: int) -> int:
        if character < start:
            return character - start
        return character - start + lead if character < stop else character - stop + len(prompt)

    return translate(span[0]), translate(span[1] - 1) + 1


def byte_level_alphabet() -> dict[int, str]:
    """Return GPT-2's name for each byte: printable bytes are themselves, the others follow from U+0100."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
