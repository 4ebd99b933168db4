"""Prompts for a model: texts, messages and samples become token ids, with the tokens of each region.

encode_prompts(model, "What floats?")                       # token ids of raw prompts, one list for each
config = PromptConfig(load_template("default"), passages=5, shots=2)
items, notes = build_items(model, samples, config, chat=None, new_tokens=8, seed=0)    # cut to the model's context
items[0].ids, items[0].tokens["gold"]                       # token ids; positions of the gold passages in them
batch_regions(items, plan_layout(model, new_tokens=8))       # the regions of the left-padded batch
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from floatscope.canvas import Regions
from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.pipelines.canvas_layout import CanvasLayout, plan_layout
from floatscope.schema import Paradigm
from floatscope.tasks.fit import CountTokens, fit_sample
from floatscope.tasks.regions import Prompt, find_region_tokens
from floatscope.tasks.sample import Sample
from floatscope.tasks.template import Template, load_template

RawPrompt = str | Sequence[int] | Mapping[str, str] | Sequence[Mapping[str, str]]
"""A text, a list of token ids, one chat message, or a list of messages."""

PassageChoice = int | str
"""Which passages of a sample to show: a number (its gold ones first), `gold` (only those) or `all`."""

RAW_PROMPTS = "a prompt is a text, a list of token ids or a list of messages"


@dataclass(frozen=True)
class PromptItem:
    """A sample with its prompt and token ids."""

    sample: Sample
    prompt: Prompt
    ids: list[int]
    tokens: dict[str, list[int]]  # region → positions in `ids`


@dataclass(frozen=True)
class PromptConfig:
    """How questions become prompts: template, passages, shots, and what follows the answer."""

    template: Template
    passages: PassageChoice = "all"
    shots: int = 0
    placement: str | None = None  # of the question relative to the passages: before, after, both, middle
    extra_masks: int = 0  # masks after the answer; they are never filled
    filler: str = ""  # a text after the answer
    attention: bool = False  # measure the attention of predicting rows to gold and other passages

    @property
    def as_json(self) -> dict[str, Any]:
        """The settings as they are stored in a run."""
        return {
            "template": self.template.name,
            "template_sha256": self.template.sha256,
            "passages": self.passages,
            "shots": self.shots,
            "placement": self.placement,
            "extra_masks": self.extra_masks,
            "filler": self.filler,
            "attention": self.attention,
        }

    def build_prompt(self, sample: Sample, shots: Sequence[Sample]) -> Prompt:
        """Write the sample's prompt, with `shots` as solved examples before it."""
        return self.template.prompt(sample, shots, self.placement)

    def suffix_ids(self, model: Model) -> list[int]:
        """The token ids after the answer: the extra masks, then the filler text."""
        filler = require_tokenizer(model).encode(self.filler, chat=False) if self.filler else []
        return [*([model.spec.mask_id or 0] * self.extra_masks), *filler]

    def plan_layout(self, model: Model, new_tokens: int) -> CanvasLayout:
        """The layout of the canvases that these settings give."""
        return plan_layout(model, new_tokens, self.suffix_ids(model))


# Samples


def build_items(
    model: Model, samples: Sequence[Sample], config: PromptConfig, chat: bool | None, new_tokens: int, seed: int
) -> tuple[list[PromptItem], list[str]]:
    """Build the prompts of all samples and cut them to the model's context.

    A prompt that is too long loses whole shots and passages (`tasks.fit`). Shots are other samples, drawn by `seed`.
    Returns the items and notes about what was cut.
    """
    layout = config.plan_layout(model, new_tokens)
    shots, room = _draw_all_shots(samples, config.shots, seed), _prompt_room(model, layout)
    count_tokens, shown, cut = _token_counter(model, config, chat), list(samples), 0
    if room is not None:
        for at, sample in enumerate(samples):
            fitted = fit_sample(sample, shots[sample.id], room, count_tokens)
            shown[at], shots[sample.id] = fitted.sample, fitted.shots
            cut += fitted.dropped > 0
    notes = [f"{cut} of {len(samples)} prompts exceeded {room} tokens and lost passages or shots"] if cut else []
    items = encode_samples(model, shown, chat, layout, lambda sample: config.build_prompt(sample, shots[sample.id]))
    return items, notes


def find_too_long(
    model: Model, samples: Sequence[Sample], config: PromptConfig, chat: bool | None, new_tokens: int, seed: int
) -> set[str]:
    """Return the ids of the samples whose full prompt exceeds the model's context."""
    shots = _draw_all_shots(samples, config.shots, seed)
    room = _prompt_room(model, config.plan_layout(model, new_tokens))
    count_tokens = _token_counter(model, config, chat)
    return set() if room is None else {s.id for s in samples if count_tokens(s, shots[s.id]) > room}


def encode_samples(
    model: Model,
    samples: Sequence[Sample | str],
    chat: bool | None,
    layout: CanvasLayout,
    build_prompt: Callable[[Sample], Prompt] | None = None,
) -> list[PromptItem]:
    """Encode samples, and texts as they are, without cutting any of them.

    `build_prompt` writes the prompt of a sample; None: the default template. A text becomes the sample `prompt-1`,
    `prompt-2`, … with the region `prompt`. An error names the sample that the model cannot take.
    """
    tokenizer, use_chat, items = require_tokenizer(model), uses_chat_template(model, chat), []
    build_prompt = build_prompt or load_template().prompt
    for number, source in enumerate(samples, 1):
        sample = Sample(f"prompt-{number}", source, ()) if isinstance(source, str) else source
        prompt = Prompt.from_text(source) if isinstance(source, str) else build_prompt(source)
        if not prompt.text.strip():
            raise UserError(f"sample '{sample.id}' is empty; give it some text")
        located = tokenizer.encode_with_offsets(prompt.text, chat=use_chat)
        tokens = {} if located.offsets is None else find_region_tokens(prompt, located.offsets)
        if located.ids and located.ids[0] == model.spec.bos_id:
            tokens = {name: [i for i in positions if i] for name, positions in tokens.items()} | {"bos": [0]}
        items.append(PromptItem(sample, prompt, located.ids, tokens))
        _check_item(model, items[-1], layout)
    return items


def choose_passages(sample: Sample, passages: PassageChoice) -> Sample:
    """Return the sample with `passages` of its passages, in their order: the gold ones, then the first others."""
    if passages == "all":
        return sample
    if passages == "gold":
        return replace(sample, passages=tuple(p for p in sample.passages if p.gold))
    if not isinstance(passages, int) or passages < 0:
        raise UserError(f"passages must be a number, gold or all, got {passages!r}")
    gold = [i for i, p in enumerate(sample.passages) if p.gold][:passages]
    others = [i for i, p in enumerate(sample.passages) if not p.gold][: passages - len(gold)]
    return replace(sample, passages=tuple(sample.passages[i] for i in sorted([*gold, *others])))


def batch_regions(items: Sequence[PromptItem], layout: CanvasLayout, extra_regions: Sequence[str] = ()) -> Regions:
    """Return the regions of a left-padded batch.

    The region `answer` is the new tokens. `extra_regions` are names that must exist even if no item has them.
    """
    width = max(len(item.ids) for item in items)
    batch_spans = []
    for item in items:
        pad = width - len(item.ids)
        spans = {name: list[tuple[int, int]]() for name in extra_regions}
        spans |= {name: [(pad + i, pad + i + 1) for i in tokens] for name, tokens in item.tokens.items()}
        if layout.suffix:
            spans.setdefault("template", []).append(layout.suffix_span(width))
        batch_spans.append({**spans, "answer": [layout.answer_span(width)]})
    return Regions.from_spans(batch_spans, layout.suffix_span(width)[1])


# Raw prompts


def encode_prompts(model: Model, prompts: RawPrompt | Sequence[RawPrompt], chat: bool | None = None) -> list[list[int]]:
    """Encode one prompt or several: texts, lists of token ids, or conversations.

    `chat` None sends texts through the chat template if the model has one.
    """
    return [_encode_prompt(model, prompt, chat) for prompt in list_prompts(prompts)]


def list_prompts(prompts: Any) -> list[Any]:
    """Return one prompt (a text, a list of token ids, a list of messages) or several as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return [[prompts]]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__len__"):
        raise UserError(f"{RAW_PROMPTS}, got {_shorten(prompts)}")
    items = list(prompts)
    is_single = items and all(isinstance(item, Mapping) or _is_token(item) for item in items)
    return [items] if is_single else items


def uses_chat_template(model: Model, chat: bool | None) -> bool:
    """Whether texts go through the chat template; `chat` None: if the model has one."""
    has_template = model.tokenizer is not None and model.tokenizer.has_chat_template
    if chat and not has_template:
        raise UserError(f"{model.spec.name} has no chat template; leave `chat` out")
    return has_template if chat is None else chat


def require_tokenizer(model: Model) -> ModelTokenizer:
    """Return the model's tokenizer; raise UserError if it has none."""
    if model.tokenizer is None:
        raise UserError(
            f"{model.spec.name} has no tokenizer, so it cannot read text; fs.decode takes prompts as token ids"
        )
    return model.tokenizer


def check_prompts(model: Model, prompts: Sequence[Sequence[int]], layout: CanvasLayout, infill: bool) -> None:
    """Raise UserError if the model cannot decode a prompt: unknown tokens, too long, or unexpected masks."""
    spec, vocabulary = model.spec, model.vocab_size
    for number, prompt in enumerate(prompts):
        for token in prompt:
            if not 0 <= token < vocabulary:
                raise UserError(f"token {token} is not in {spec.name}'s vocabulary, 0 … {vocabulary - 1}")
        length = layout.length(len(prompt))
        if spec.context is not None and length > spec.context:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, with {length - len(prompt)} after it {length}, and"
                f" {spec.name} was trained for {spec.context}; shorten it by {length - spec.context}"
            )
        masks = sum(token == spec.mask_id for token in prompt)
        if masks and not infill:
            raise UserError(
                f"prompt {number} contains the mask token ({spec.mask_id}) {masks} times; give infill=True"
                " to fill these positions, or remove them"
            )
        if not masks and not layout.new_tokens:
            raise UserError(f"prompt {number} has no mask to fill and new_tokens is 0; give new_tokens")
        if infill and spec.paradigm is Paradigm.ARM:
            raise UserError(f"{spec.name} is autoregressive: it only appends, and cannot fill masks inside a prompt")
        if not prompt and spec.paradigm is Paradigm.ARM:
            raise UserError(f"prompt {number} is empty, and an autoregressive model needs a first token")


# Target answers: token ids a model is scored on or forced to write


def parse_target_ids(model: Model, target_ids: Any) -> list[list[int]]:
    """Return the target token ids of each prompt as lists; raise UserError if one cannot be written."""
    if not hasattr(target_ids, "__len__") or not len(target_ids):
        raise UserError(f"target_ids must be a list of token ids for each prompt, got {_shorten(target_ids)}")
    return [parse_token_ids(model, row, f"target_ids[{number}]") for number, row in enumerate(target_ids)]


def parse_token_ids(model: Model, row: Any, name: str) -> list[int]:
    """Return `row` as a list of token ids that can be written: in the vocabulary, and no mask."""
    if _is_token(row) or not hasattr(row, "__len__") or not all(map(_is_token, row)):
        raise UserError(f"{name} must be a list of token ids, got {_shorten(row)}")
    for token in row:
        if not 0 <= token < model.vocab_size:
            raise UserError(
                f"token {token} of {name} is not in {model.spec.name}'s vocabulary, 0 … {model.vocab_size - 1}"
            )
        if token == model.spec.mask_id:
            raise UserError(f"{name} contains the mask token ({token}); remove it")
    return [int(token) for token in row]


def check_target_ids(target_ids: Sequence[Sequence[int]], prompts: int, new_tokens: int) -> None:
    """Raise UserError unless there are targets for each prompt, all `new_tokens` long."""
    if len(target_ids) != prompts:
        raise UserError(f"target_ids has {len(target_ids)} lists for {prompts} prompts; give one for each prompt")
    for number, row in enumerate(target_ids):
        if len(row) != new_tokens:
            raise UserError(f"target_ids[{number}] has {len(row)} tokens and new_tokens is {new_tokens}; give as many")


def _check_item(model: Model, item: PromptItem, layout: CanvasLayout) -> None:
    """Check one item; the error names the sample instead of the prompt's number."""
    try:
        check_prompts(model, [item.ids], layout, infill=False)
    except UserError as error:
        raise UserError(str(error).replace("prompt 0", f"sample '{item.sample.id}'", 1)) from error


def _prompt_room(model: Model, layout: CanvasLayout) -> int | None:
    """How many tokens a prompt may have; None if the model's context is unknown."""
    return None if model.spec.context is None else layout.longest_prompt(model.spec.context)


def _token_counter(model: Model, config: PromptConfig, chat: bool | None) -> CountTokens:
    tokenizer, use_chat = require_tokenizer(model), uses_chat_template(model, chat)
    return lambda sample, shots: len(tokenizer.encode(config.build_prompt(sample, shots).text, chat=use_chat))


def _draw_all_shots(samples: Sequence[Sample], count: int, seed: int) -> dict[str, list[Sample]]:
    return {sample.id: _draw_shots(sample, samples, count, seed) for sample in samples}


def _draw_shots(sample: Sample, samples: Sequence[Sample], count: int, seed: int) -> list[Sample]:
    """Draw `count` other samples with answers; they show their gold passages if `sample` has passages."""
    if not count:
        return []
    others = [other for other in samples if other.id != sample.id and other.answers]
    if count > len(others):
        raise UserError(
            f"{count} shots need {count} other samples with an answer, and there are {len(others)} besides"
            f" '{sample.id}'; give fewer shots or more samples"
        )
    shots = random.Random(f"{seed} {sample.id}").sample(others, count)
    passages: PassageChoice = "gold" if sample.passages else 0
    return [choose_passages(shot, passages) for shot in shots]


def _encode_prompt(model: Model, prompt: Any, chat: bool | None) -> list[int]:
    if isinstance(prompt, bytes) or not hasattr(prompt, "__len__"):
        raise UserError(f"{RAW_PROMPTS}, got {_shorten(prompt)}")
    is_chat = not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(part, Mapping) for part in prompt)
    if isinstance(prompt, str) or is_chat:
        if model.tokenizer is None:
            raise UserError(f"{model.spec.name} has no tokenizer: give prompts as lists of token ids")
        if is_chat and (chat is False or not model.tokenizer.has_chat_template):
            reason = "chat is False" if chat is False else f"{model.spec.name} has none"
            raise UserError(f"messages need a chat template, and {reason}; give the text itself")
        if isinstance(prompt, str) and not _is_text(prompt):
            raise UserError("the prompt is not valid text: it contains bytes that are not UTF-8")
        return model.tokenizer.encode(prompt, chat=is_chat or uses_chat_template(model, chat))
    for token in prompt:
        if not _is_token(token):
            raise UserError(f"{RAW_PROMPTS}; {_shorten(token)} is not a token id")
    return [int(token) for token in prompt]


def _is_text(prompt: str) -> bool:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shorten(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def _is_token(item: Any) -> bool:
    """Whether the value is an int, or a numpy or torch scalar of one."""
    is_number = not isinstance(item, bool | str | float | Mapping) and hasattr(item, "__index__")
    return is_number and getattr(item, "ndim", 0) == 0
