"""Autoregressive decoding: every step appends one token, decided by the last row.

    forward = model.cached()
    for step in autoregress(forward, canvas_of([prompt_ids], 16, None), resolve_sampling("arm", new_tokens=16)):
        step.commits

A sample that has ended stands still; its row is filled with its last token until the others are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from floatscope.canvas import CanvasState, Commits, Forward, Step, crop_regions
from floatscope.sampling.noise import step_keys
from floatscope.sampling.proposal import draw
from floatscope.sampling.settings import Sampling
from floatscope.schema import State


def autoregress(
    forward: Forward,
    canvas: CanvasState,
    how: Sampling,
    *,
    end_ids: Sequence[int] = (),
    samples: Sequence[str] | None = None,
    forced: Int[Tensor, "batch new"] | None = None,
) -> Iterator[Step]:
    """One `Step` per token until every sample has ended or has all its new tokens.

    The canvas is the prompts; its regions may already be those of the full length. `forced`: the new tokens, written
    instead of the drawn ones; confidences are then theirs, in the distribution that is judged (by default the softmax
    of the logits).
    """
    device, regions = canvas.tokens.device, canvas.regions
    names = [str(b) for b in range(len(canvas.tokens))] if samples is None else samples
    first = canvas.valid.int().argmax(-1)
    ends = torch.tensor(end_ids, dtype=torch.long, device=device)
    active = torch.ones(len(canvas.tokens), dtype=torch.bool, device=device)
    for step in range(how.new_tokens):
        with torch.no_grad():
            length = canvas.tokens.shape[1]
            before = replace(canvas, step=step, active=active, regions=crop_regions(regions, length))
            logits = forward(before, slice(length - 1, length))[:, 0]
            keys = step_keys(how.seed, names, step, "token").to(device)
            token, log_p = draw(logits, how, tuple(end_ids), keys, length - first)
            token = torch.where(active, token if forced is None else forced[:, step], canvas.tokens[:, -1])
            probability = log_p.gather(-1, token[:, None])[:, 0].exp()
            sample = active.nonzero()[:, 0]
            at = torch.full_like(sample, length)
            commits = Commits(sample, at, at - 1, token[sample], probability[sample])
            canvas = replace(
                before,
                tokens=torch.cat([canvas.tokens, token[:, None]], 1),
                states=torch.cat([canvas.states, torch.full_like(token[:, None], int(State.COMMITTED))], 1),
                regions=crop_regions(regions, length + 1),
            )
            active = active & ~torch.isin(token, ends) if how.stop else active
            done = not bool(active.any())
        yield Step(before, canvas, commits)
        if done:
            return
