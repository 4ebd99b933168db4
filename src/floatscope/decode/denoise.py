"""Denoising: at each step commit the masked positions the model is most confident of.

    canvas = canvas_of([prompt_ids], new_tokens=16, mask_id=mask)
    for step in denoise(model.forward, canvas, mask_id=mask, steps=16):
        step.commits

The rule is LLaDA's low-confidence remasking at temperature 0 in one block: confidence is the fp32 probability of the
argmax, and a row with M masks commits ⌊M/steps⌋ a step, the first M mod steps steps one more. Rows are counted each on
its own, so a batch commits what its samples would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from floatscope.decode.step import Step
from floatscope.errors import UserError
from floatscope.values import CanvasState, Commits, Regions, State

Forward = Callable[[CanvasState], Float[Tensor, "batch position vocabulary"]]


def canvas_of(
    prompts: Sequence[Sequence[int]], new_tokens: int, mask_id: int, *, regions: Regions | None = None
) -> CanvasState:
    """Prompts of any lengths, each followed by `new_tokens` masks, left-padded to one batch."""
    if not prompts or new_tokens < 1:
        raise UserError(f"a canvas needs at least one prompt and one new token, got {len(prompts)} and {new_tokens}")
    length = max(len(p) for p in prompts) + new_tokens
    tokens = torch.full((len(prompts), length), mask_id)
    states = torch.full((len(prompts), length), int(State.PAD))
    for b, prompt in enumerate(prompts):
        start = length - new_tokens - len(prompt)
        tokens[b, start : start + len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        states[b, start:] = State.PROMPT
        states[b, start:][tokens[b, start:] == mask_id] = State.MASKED  # a mask in the prompt is infilling
    if regions is not None and regions.member is not None and regions.member.shape[:2] != tokens.shape:
        given, canvases = tuple(regions.member.shape), tuple(tokens.shape)
        raise UserError(
            f"the regions are for {given[0]} canvases of {given[1]} positions, and there are {canvases[0]} of"
            f" {canvases[1]}: count them over prompt and new tokens, from the first position of the left-padded batch"
        )
    return CanvasState(tokens, states, regions=Regions() if regions is None else regions)


def denoise(forward: Forward, canvas: CanvasState, *, mask_id: int, steps: int, shift: bool = False) -> Iterator[Step]:
    """One `Step` per forward, until `steps` are done; `shift` when row p decides position p + 1."""
    if steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}")
    masks = canvas.masked.sum(-1)
    for step in range(steps):
        canvas = replace(canvas, step=step)
        share = masks // steps + (step < masks % steps)
        commits = _most_confident(forward(canvas), canvas, share, shift)
        tokens, states = canvas.tokens.clone(), canvas.states.clone()
        tokens[commits.sample, commits.position] = commits.token
        states[(tokens != mask_id) & canvas.masked] = int(State.COMMITTED)  # a committed mask is a mask still
        after = replace(canvas, tokens=tokens, states=states)
        yield Step(canvas, after, commits)
        canvas = after


def _most_confident(logits: Tensor, canvas: CanvasState, share: Tensor, shift: bool) -> Commits:
    rows = _predicting_rows(canvas, shift)
    if shift:
        logits = logits[torch.arange(len(rows), device=rows.device)[:, None], rows]
    confidence, token = logits.float().softmax(-1).max(-1)
    ranked = torch.where(canvas.masked, confidence, -1.0).sort(dim=-1, descending=True, stable=True).indices
    share = share.minimum(canvas.masked.sum(-1))
    picked = torch.arange(ranked.shape[1], device=ranked.device) < share[:, None]
    sample, rank = picked.nonzero(as_tuple=True)
    position = ranked[sample, rank]
    chosen = sample, position
    return Commits(sample, position, rows[chosen], token[chosen], confidence[chosen])


def _predicting_rows(canvas: CanvasState, shift: bool) -> Int[Tensor, "batch position"]:
    """The row that decides each position. A shifted sample's first has none before it: its own stands in (Dream)."""
    at = torch.arange(canvas.tokens.shape[1], device=canvas.tokens.device).expand_as(canvas.tokens)
    return (at - 1).maximum(canvas.valid.int().argmax(-1, keepdim=True)) if shift else at
