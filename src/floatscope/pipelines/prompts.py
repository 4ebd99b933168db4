"""What a person gives as prompts → token ids, refused with a reason where a model cannot take them.

token_ids(model, "What floats?")                                 # one text, through the chat template if there is one
token_ids(model, [[1, 2, 3], [4, 5]])                            # two prompts, as they are
token_ids(model, [{"role": "user", "content": "What floats?"}])  # one conversation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floatscope.errors import UserError
from floatscope.models.model import Model

Prompt = str | Sequence[int] | Mapping[str, str] | Sequence[Mapping[str, str]]
KINDS = "a prompt is a text, a list of token ids or a list of messages"


def token_ids(model: Model, prompts: Prompt | Sequence[Prompt], chat: bool | None = None) -> list[list[int]]:
    """One list of ids per prompt. `chat` None: texts go through the chat template if the model has one."""
    return [_encoded(model, prompt, chat) for prompt in several(prompts)]


def several(prompts: Any) -> list[Any]:
    """A single prompt (a text, a list of token ids, a list of messages) or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return [[prompts]]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__len__"):
        raise UserError(f"{KINDS}, got {_brief(prompts)}")
    items = list(prompts)
    single = items and all(isinstance(item, Mapping) or _is_token(item) for item in items)
    return [items] if single else items


def uses_template(model: Model, chat: bool | None) -> bool:
    """Whether texts go through the chat template."""
    has = model.tokenizer is not None and model.tokenizer.has_template
    if chat and not has:
        raise UserError(f"{model.spec.name} has no chat template; leave `chat` out")
    return has if chat is None else chat


def check(model: Model, prompts: Sequence[Sequence[int]], new_tokens: int, infill: bool) -> None:
    """Refuse what the model cannot decode: unknown tokens, too long a canvas, masks nobody asked to be filled."""
    spec, vocabulary = model.spec, model.vocabulary
    suffix = len(model.tokenizer.suffix) if model.tokenizer is not None else 0
    for number, prompt in enumerate(prompts):
        for token in prompt:
            if not 0 <= token < vocabulary:
                raise UserError(f"token {token} is not in {spec.name}'s vocabulary, 0 … {vocabulary - 1}")
        length = len(prompt) + new_tokens + (suffix if spec.paradigm == "mdm" else 0)
        if spec.context is not None and length > spec.context:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens and {new_tokens} new ones are asked for: {length}, and"
                f" {spec.name} was trained for {spec.context}; shorten it by {length - spec.context}"
            )
        masks = sum(token == spec.mask_id for token in prompt)
        if masks and not infill:
            raise UserError(
                f"prompt {number} contains the mask token ({spec.mask_id}) {masks} times; to have those places filled"
                " say infill=True (--infill), else take them out"
            )
        if not masks and not new_tokens:
            raise UserError(f"prompt {number} has no mask to fill and no new tokens are asked for; give new_tokens")
        if infill and spec.paradigm == "arm":
            raise UserError(f"{spec.name} is autoregressive: it only appends, and cannot fill masks inside a prompt")
        if not prompt and spec.paradigm == "arm":
            raise UserError(f"prompt {number} is empty, and an autoregressive model needs a token to begin with")


def forced_ids(model: Model, forced: Any) -> list[list[int]]:
    """A list of token ids per prompt, all of them tokens that can be written."""
    if not hasattr(forced, "__len__") or not len(forced):
        raise UserError(f"forced is a list of token ids for each prompt, got {_brief(forced)}")
    return [written_ids(model, row, f"forced text {number}") for number, row in enumerate(forced)]


def written_ids(model: Model, row: Any, name: str) -> list[int]:
    """Token ids that can be written: known ones, and no mask."""
    if _is_token(row) or not hasattr(row, "__len__") or not all(map(_is_token, row)):
        raise UserError(f"{name} must be a list of token ids, got {_brief(row)}")
    for token in row:
        if not 0 <= token < model.vocabulary:
            raise UserError(
                f"token {token} of {name} is not in {model.spec.name}'s vocabulary, 0 … {model.vocabulary - 1}"
            )
        if token == model.spec.mask_id:
            raise UserError(f"{name} contains the mask token ({token}); take it out")
    return [int(token) for token in row]


def check_forced(forced: Sequence[Sequence[int]], prompts: int, new_tokens: int) -> None:
    """One text for each prompt, all as long as the answer."""
    if len(forced) != prompts:
        raise UserError(f"{len(forced)} forced texts for {prompts} prompts; give one for each")
    for number, row in enumerate(forced):
        if len(row) != new_tokens:
            raise UserError(
                f"forced text {number} has {len(row)} tokens and {new_tokens} new ones are asked for; give as many"
            )


def _encoded(model: Model, prompt: Any, chat: bool | None) -> list[int]:
    if isinstance(prompt, bytes) or not hasattr(prompt, "__len__"):
        raise UserError(f"{KINDS}, got {_brief(prompt)}")
    messages = not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(part, Mapping) for part in prompt)
    if isinstance(prompt, str) or messages:
        if model.tokenizer is None:
            raise UserError(f"{model.spec.name} has no tokenizer: give prompts as lists of token ids")
        if messages and (chat is False or not model.tokenizer.has_template):
            why = "chat=False was said" if chat is False else f"{model.spec.name} has none"
            raise UserError(f"messages go through a chat template, and {why}; give the text itself")
        if isinstance(prompt, str) and not _is_text(prompt):
            raise UserError("the prompt is no valid text: it holds bytes that are not UTF-8")
        return model.tokenizer.encode(prompt, chat=messages or uses_template(model, chat))
    for token in prompt:
        if not _is_token(token):
            raise UserError(f"{KINDS}; {_brief(token)} is no token id")
    return [int(token) for token in prompt]


def _is_text(prompt: str) -> bool:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def _is_token(item: Any) -> bool:
    """An int, or what numpy and torch make of one."""
    return not isinstance(item, bool | str | float | Mapping) and hasattr(item, "__index__") and not _shaped(item)


def _shaped(item: Any) -> bool:
    return getattr(item, "ndim", 0) > 0
