"""Toy models of a few lines, and decoding with them: logits depend only on a sample's tokens."""

from __future__ import annotations

import math

import torch

from floatscope.canvas import CanvasState, Commits, Step, build_canvas
from floatscope.sampling import denoise
from floatscope.sampling.settings import resolve_sampling
from floatscope.schema import Paradigm, State

MASK, VOCABULARY = 19, 20


def random_model(seed: int, never_mask: bool = True):
    """Every logit depends on all tokens of its sample, but not on the sample's place in the batch."""
    noise = torch.Generator().manual_seed(seed)
    table = torch.randn(64, VOCABULARY, VOCABULARY, generator=noise)

    def forward(canvas: CanvasState, rows: slice) -> torch.Tensor:
        logits = torch.full((*canvas.tokens.shape, VOCABULARY), torch.nan)  # padding is never read
        for b, (tokens, valid) in enumerate(zip(canvas.tokens, canvas.valid, strict=True)):
            own = tokens[valid]
            at = torch.arange(len(own))
            mixture = table[at, own].sum(0) / len(own) ** 0.5
            logits[b, valid] = table[(at + 7) % 64, own] * 1.5 + mixture + table[(at + 23) % 64, 0]
        if never_mask:
            logits[..., MASK] = -100.0
        return logits[:, rows]

    return forward


def fixed_model(logits: torch.Tensor):
    """The same logits [position, vocabulary], or [step, position, vocabulary], whatever the canvas."""

    def forward(canvas: CanvasState, rows: slice) -> torch.Tensor:
        now = logits if logits.ndim == 2 else logits[min(canvas.step, len(logits) - 1)]
        return now[rows].expand(len(canvas.tokens), -1, -1)

    return forward


def fill(forward, prompts, *, mask_id=MASK, suffix=(), regions=None, samples=None, **given) -> list[Step]:
    """Run `denoise` to the end; other keywords are settings."""
    own = {k: given.pop(k) for k in ("shift", "end_ids", "unguided", "target_ids") if k in given}
    sampling = resolve_sampling(Paradigm.MDM, given.pop("preset", None), **given)
    canvas = build_canvas(prompts, sampling.new_tokens, mask_id, suffix=suffix, regions=regions)
    own |= {"samples": samples, "suffix": len(suffix)}
    return list(denoise(forward, canvas, sampling, mask_id=mask_id, **own))


def positions(steps: list[Step], sample: int = 0) -> list[list[int]]:
    """The positions that each step commits in one sample."""
    return [step.commits.position[step.commits.sample == sample].tolist() for step in steps]


def select_sample(commits: Commits, sample: int) -> Commits:
    mine = commits.sample == sample
    return Commits(*(getattr(commits, n)[mine] for n in ("sample", "position", "row", "token", "confidence")))


def compute_logits(forward, tokens: list[int], step: int = 0) -> list[list[float]]:
    """The logits of every row of one canvas, as Python floats."""
    ids = torch.tensor([tokens])
    canvas = CanvasState(ids, torch.full_like(ids, int(State.PROMPT)), step=step)
    rows: list[list[float]] = forward(canvas, slice(0, len(tokens)))[0].tolist()
    return rows


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    exps = [math.exp(x - top) for x in logits]
    return [e / sum(exps) for e in exps]


def best(scores: dict[int, float], n: int) -> list[int]:
    """The n keys with the largest scores, ties by key, in order."""
    return sorted(sorted(scores, key=lambda p: (-scores[p], p))[:n])
