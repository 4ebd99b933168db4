"""Prompts of any lengths as one batch of canvases.

canvas_of([[5, 6, 7], [8]], new_tokens=4, mask_id=99)       # [2, 7], left-padded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from floatscope.errors import UserError
from floatscope.values import CanvasState, Regions, State


def canvas_of(
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    mask_id: int | None,
    *,
    suffix: Sequence[int] = (),
    regions: Regions | None = None,
    pad_id: int = 0,
) -> CanvasState:
    """Each prompt, `new_tokens` masks and the suffix, padded on the left. Without a mask id only the prompts.

    A mask in a prompt is infilling: it is filled like the others. Regions are counted over prompt, new tokens and
    suffix.
    """
    if not prompts or min(map(len, prompts)) + new_tokens < 1:
        raise UserError(f"a canvas needs at least one prompt and one token, got {len(prompts)} prompts")
    tail = [] if mask_id is None else [mask_id] * new_tokens + list(suffix)
    length = max(len(p) for p in prompts) + len(tail)
    tokens = torch.full((len(prompts), length), pad_id)
    states = torch.full((len(prompts), length), int(State.PAD))
    for b, prompt in enumerate(prompts):
        start = length - len(prompt) - len(tail)
        tokens[b, start:] = torch.tensor([*prompt, *tail], dtype=torch.long)
        states[b, start:] = State.PROMPT
        if mask_id is not None:
            states[b, start:][tokens[b, start:] == mask_id] = State.MASKED
    regions = Regions() if regions is None else regions
    full = length + (new_tokens if mask_id is None else 0)
    if regions.member is not None and regions.member.shape[:2] != (len(prompts), full):
        given = tuple(regions.member.shape)
        raise UserError(
            f"the regions are for {given[0]} canvases of {given[1]} positions, and there are {len(prompts)} of"
            f" {full}: count them over prompt and new tokens, from the first position of the left-padded batch"
        )
    return CanvasState(tokens, states, regions=regions)


def first_positions(regions: Regions, length: int) -> Regions:
    """The regions of a canvas that has not grown to its full length yet."""
    return regions if regions.member is None else replace(regions, member=regions.member[:, :length])
