"""Prompts that share a forward: which samples form a batch, and how many threads compute it.

with limit_threads(model):
    for batch in make_batches(model, items, max_size=8):     # similar lengths together, the longest first
        fs.decode(model, [item.ids for item in batch], new_tokens=8)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from itertools import groupby

from floatscope.errors import UserError
from floatscope.models.device import use_one_thread
from floatscope.models.model import Model
from floatscope.pipelines.prompting import PromptItem

BATCH_SIZES = {"cuda": 32}
DEFAULT_BATCH_SIZE = 8
SMALL_MODEL = 20_000_000
"""Parameters. On a CPU a smaller model runs on one thread: beside other processes its threads wait for each other."""


def make_batches(model: Model, items: Sequence[PromptItem], max_size: int | None = None) -> list[list[PromptItem]]:
    """Split the items into batches of similar length, the longest first.

    A batch holds at most `max_size` items (None: a default for the device). If the model cannot be padded, all prompts
    of a batch have the same length.
    """
    if max_size is not None and max_size < 1:
        raise UserError(f"a batch must hold at least 1 sample, got {max_size}")
    size = max_size or BATCH_SIZES.get(model.device.type, DEFAULT_BATCH_SIZE)
    ordered = sorted(items, key=lambda item: -len(item.ids))
    groups = [ordered]
    if not _can_pad(model):
        groups = [list(group) for _, group in groupby(ordered, key=lambda item: len(item.ids))]
    return [group[start : start + size] for group in groups for start in range(0, len(group), size)]


def limit_threads(model: Model) -> AbstractContextManager[None]:
    """Return a context that computes a small model on one CPU thread, and leaves a large one alone."""
    is_small = model.device.type == "cpu" and sum(p.numel() for p in model.module.parameters()) < SMALL_MODEL
    return use_one_thread() if is_small else nullcontext()


def _can_pad(model: Model) -> bool:
    """Whether prompts of different lengths may share a batch."""
    return model.spec.supports_padding and "position_ids" in signature(model.module.forward).parameters
