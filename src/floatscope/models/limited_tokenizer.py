"""The tokenizer of an untrusted checkpoint: its rules and its chat template run in a child process with limits.

    tokenizer = LimitedTokenizer(hf_tokenizer, "LLaDA-8B")
    tokenizer.encode("What floats?", chat=True)                 # a UserError if the template does not end

Each call has its own limits, because a template or a rule may wait for one special text. A call costs some 0.1 ms more
than in this process; the child starts with the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from floatscope.errors import UserError
from floatscope.models.chat_template import Messages
from floatscope.models.limited_process import LimitedProcess, LimitExceeded
from floatscope.models.tokenizer import ModelTokenizer

REMEDY = "use another checkpoint, or give token ids"


class LimitedTokenizer(ModelTokenizer):
    """A `ModelTokenizer` whose work on texts and token ids is limited in time and memory."""

    def __init__(self, tokenizer: Any, name: str = "the tokenizer", has_separator: bool = False) -> None:
        super().__init__(tokenizer, name, has_separator)
        self._process = LimitedProcess(partial(_call, ModelTokenizer(tokenizer, name, has_separator)))

    def __getstate__(self) -> dict[str, Any]:
        return {"hf": self.hf, "_name": self._name, "_has_separator": self._has_separator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state.values())  # type: ignore[misc]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens, with spaces as they are."""
        text: str = self._request("decode", list(map(int, ids)))
        return text

    def render(self, prompt: str | Messages) -> str:
        """Return the conversation of a prompt, as the chat template writes it."""
        try:
            text: str = self._process.request(["render", [prompt if isinstance(prompt, str) else list(prompt)], {}])
        except LimitExceeded as error:
            raise UserError(f"the chat template of {self._name} failed ({error}); encode with chat=False") from error
        except TypeError as error:
            raise UserError(f"messages must hold texts, numbers, lists and objects only ({error})") from error
        return text

    def tokenize(self, text: str, **options: bool) -> dict[str, Any]:
        """Return the tokenizer's `input_ids`, and `offset_mapping` if the options ask for it."""
        encoding: dict[str, Any] = self._request("tokenize", text, **options)
        if "offset_mapping" in encoding:
            encoding["offset_mapping"] = [(start, stop) for start, stop in encoding["offset_mapping"]]
        return encoding

    def text_pieces(self, ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text of those before it."""
        pieces: list[str] = self._request("text_pieces", list(map(int, ids)))
        return pieces

    def _request(self, method: str, argument: Any, **options: bool) -> Any:
        try:
            return self._process.request([method, [argument], options])
        except LimitExceeded as error:
            raise UserError(f"the tokenizer of {self._name} cannot read this text ({error}); {REMEDY}") from error


def _call(tokenizer: ModelTokenizer, request: list[Any]) -> Any:
    method, arguments, options = request
    return getattr(tokenizer, method)(*arguments, **options)
