"""Autoregressive decoding: every step appends one token, predicted by the last row.

    forward = model.cached_forward()
    sampling = resolve_sampling(Paradigm.ARM, new_tokens=16)
    for step in autoregress(forward, build_canvas([prompt_ids], 16, None), sampling):
        step.commits

A sample that has ended stays in the batch; its row is filled with its last token until the others are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from floatscope.canvas import CanvasState, Commits, Forward, Step, crop_regions
from floatscope.sampling.proposal import propose_tokens
from floatscope.sampling.randomness import step_keys
from floatscope.sampling.settings import Sampling
from floatscope.schema import State


def autoregress(
    forward: Forward,
    canvas: CanvasState,
    sampling: Sampling,
    *,
    end_ids: Sequence[int] = (),
    samples: Sequence[str] | None = None,
    target_ids: Int[Tensor, "batch new"] | None = None,
) -> Iterator[Step]:
    """Yield one `Step` per token until every sample has ended or has all its new tokens.

    Args:
        forward: returns the logits of the requested rows; only the last row is requested.
        canvas: the prompts; its regions may already be those of the full length.
        sampling: the settings, from `resolve_sampling`.
        end_ids: eos first, then other tokens that end a text.
        samples: names of the rows; they key the randomness. The default is "0", "1", …
        target_ids: the new tokens, for teacher forcing. They are written instead of the sampled ones; a confidence is
            then the target's probability in the distribution of `sampling.confidence_from` (by default the softmax of
            the logits).
    """
    device, regions = canvas.tokens.device, canvas.regions
    names = [str(b) for b in range(len(canvas.tokens))] if samples is None else samples
    first = canvas.valid.int().argmax(-1)
    ends = torch.tensor(end_ids, dtype=torch.long, device=device)
    active = torch.ones(len(canvas.tokens), dtype=torch.bool, device=device)
    for step in range(sampling.new_tokens):
        with torch.no_grad():
            # 1. Run the model on the canvas; the last row predicts the next token.
            length = canvas.tokens.shape[1]
            before = replace(canvas, step=step, active=active, regions=crop_regions(regions, length))
            logits = forward(before, slice(length - 1, length))[:, 0]  # (B, vocabulary)
            # 2. Sample the token; a finished sample repeats its last one.
            keys = step_keys(sampling.seed, names, step, "token").to(device)
            token, log_p = propose_tokens(logits, sampling, tuple(end_ids), keys, length - first)
            token = token if target_ids is None else target_ids[:, step]
            token = torch.where(active, token, canvas.tokens[:, -1])
            probability = log_p.gather(-1, token[:, None])[:, 0].exp()
            # 3. Commit it in the samples that are still active.
            sample = active.nonzero()[:, 0]
            position = torch.full_like(sample, length)
            commits = Commits(sample, position, position - 1, token[sample], probability[sample])
            # 4. Append it to the canvas.
            canvas = replace(
                before,
                tokens=torch.cat([canvas.tokens, token[:, None]], 1),
                states=torch.cat([canvas.states, torch.full_like(token[:, None], int(State.COMMITTED))], 1),
                regions=crop_regions(regions, length + 1),
            )
            # 5. End the samples that have produced an end token.
            active = active & ~torch.isin(token, ends) if sampling.stop else active
            is_done = not bool(active.any())
        yield Step(before, canvas, commits)
        if is_done:
            return
