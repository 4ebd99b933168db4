"""Questions as a model reads them: token ids, the tokens of each region, and which of them share a batch.

items = as_items(model, samples, chat=None, new_tokens=8)       # refused by name if the model cannot take one
for batch in batches(model, items, most=8): ...                 # of like length, the longest first
regions_of(batch, new=8, suffix=0)                              # of a batch, which is padded on the left
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import groupby

from floatscope.canvas import Regions
from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.models.place import one_thread
from floatscope.models.text import ModelTokenizer
from floatscope.pipelines import prompts
from floatscope.tasks.prompt import Prompt, bare, prompt_of, tokens_of
from floatscope.tasks.sample import Sample

BATCH = {"cuda": 32}
SMALL_BATCH = 8  # elsewhere
SMALL_MODEL = 20_000_000
"""Parameters; on a CPU a smaller one computes on one thread: where others work too, threads wait for each other."""


@dataclass(frozen=True)
class PromptItem:
    """A sample as a model reads it."""

    sample: Sample
    prompt: Prompt
    ids: list[int]
    tokens: dict[str, list[int]]  # region → positions in `ids`


def encode_samples(
    model: Model,
    samples: Sequence[Sample | str],
    chat: bool | None,
    new_tokens: int,
    write: Callable[[Sample], Prompt] = prompt_of,
) -> list[PromptItem]:
    """The samples as token ids, and where their regions are; refused by name if the model cannot take one."""
    text, template, items = require_tokenizer(model), prompts.uses_template(model, chat), []
    for number, given in enumerate(samples, 1):
        sample = Sample(f"prompt-{number}", given, ()) if isinstance(given, str) else given
        prompt = bare(given) if isinstance(given, str) else write(given)
        if not prompt.text.strip():
            raise UserError(f"sample '{sample.id}' is empty; give it some text")
        located = text.locate(prompt.text, chat=template)
        tokens = {} if located.covers is None else tokens_of(prompt, located.covers)
        if located.ids and located.ids[0] == model.spec.bos_id:
            tokens = {name: [i for i in at if i] for name, at in tokens.items()} | {"bos": [0]}
        items.append(PromptItem(sample, prompt, located.ids, tokens))
        _check(model, items[-1], new_tokens)
    return items


def require_tokenizer(model: Model) -> ModelTokenizer:
    """The model's tokenizer; refused if it has none."""
    if model.tokenizer is None:
        raise UserError(f"{model.spec.name} has no tokenizer, so it cannot be asked in words; see fs.decode")
    return model.tokenizer


def batch_regions(items: Sequence[PromptItem], new: int, suffix: int, also: Sequence[str] = ()) -> Regions:
    """The regions of a batch, which is padded on the left; `answer` is the new tokens. `also` are regions of other
    samples, which are there by name."""
    width = max(len(item.ids) for item in items)
    spans = []
    for item in items:
        pad = width - len(item.ids)
        found = {name: list[tuple[int, int]]() for name in also}
        found |= {name: [(pad + i, pad + i + 1) for i in tokens] for name, tokens in item.tokens.items()}
        if suffix:
            found.setdefault("template", []).append((width + new, width + new + suffix))
        spans.append({**found, "answer": [(width, width + new)]})
    return Regions.from_spans(spans, width + new + suffix)


def batches(model: Model, items: Sequence[PromptItem], most: int | None = None) -> list[list[PromptItem]]:
    """Those of like length together, the longest first; of one length only, where the model cannot be padded."""
    if most is not None and most < 1:
        raise UserError(f"a batch must hold at least 1 sample, got {most}")
    size = most or BATCH.get(model.device.type, SMALL_BATCH)
    order = sorted(items, key=lambda item: -len(item.ids))
    groups = [order]
    if not _pads(model):
        groups = [list(alike) for _, alike in groupby(order, key=lambda item: len(item.ids))]
    return [group[start : start + size] for group in groups for start in range(0, len(group), size)]


def threads_for(model: Model) -> AbstractContextManager[None]:
    small = model.device.type == "cpu" and sum(p.numel() for p in model.module.parameters()) < SMALL_MODEL
    return one_thread() if small else nullcontext()


def _check(model: Model, item: PromptItem, new_tokens: int) -> None:
    """What `decode` would refuse, by the sample's name instead of its number."""
    try:
        prompts.check(model, [item.ids], new_tokens, infill=False)
    except UserError as error:
        raise UserError(str(error).replace("prompt 0", f"sample '{item.sample.id}'", 1)) from error


def _pads(model: Model) -> bool:
    """Whether samples of several lengths may share a batch."""
    return model.spec.padding and "position_ids" in signature(model.module.forward).parameters
