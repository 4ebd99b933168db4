"""Denoising: a canvas with masks is filled over several forwards, by any rule of `SAMPLERS`, block after block.

    canvas = canvas_of([prompt_ids], new_tokens=16, mask_id=mask)
    for step in denoise(model.forward, canvas, resolve_sampling("mdm", new_tokens=16), mask_id=mask):
        step.commits

Every sample counts its own masks, blocks and steps, so a batch commits what its samples would alone. One that has
nothing left to fill stands still until the others are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.canvas import CanvasState, Commits, Forward, Step
from floatscope.sampling.blocks import Blocks
from floatscope.sampling.drift import Drift
from floatscope.sampling.noise import gumbel, step_keys, uniform
from floatscope.sampling.proposal import draw
from floatscope.sampling.samplers import SAMPLERS, Candidates, StepCandidates
from floatscope.sampling.settings import Sampling
from floatscope.schema import State

CHUNK = 2**25
"""Logits are turned into probabilities this many at a time: a vocabulary is wide, fp32 copies of it are large."""


def denoise(
    forward: Forward,
    canvas: CanvasState,
    how: Sampling,
    *,
    mask_id: int,
    shift: bool = False,
    end_ids: Sequence[int] = (),
    samples: Sequence[str] | None = None,
    suffix: int = 0,
    unguided: Forward | None = None,
    forced: Int[Tensor, "batch new"] | None = None,
) -> Iterator[Step]:
    """One `Step` per forward until nothing is masked.

    `shift`: row p decides position p + 1. `end_ids`: eos, then other tokens that end a text. `samples` name the rows
    for their randomness. `suffix`: how many positions stand behind the new tokens. `unguided` runs the second forward
    of classifier-free guidance (default: `forward` does).

    `forced`: the new tokens. The model's own proposals decide when each position is committed, as without it; what is
    written there is the forced token, and its confidence is the probability it has in the distribution that is judged
    (by default the softmax of the logits).
    """
    names = [str(b) for b in range(len(canvas.tokens))] if samples is None else samples
    laid = None if forced is None else _laid(forced, canvas, suffix)
    loop = _Denoiser(forward, unguided or forward, how, mask_id, shift, tuple(end_ids), names, laid)
    history = how.arguments.get("history")
    drift = None if history is None else Drift(canvas.tokens, history)
    blocks = Blocks(canvas, how, suffix)
    for step in count():
        with torch.no_grad():
            if not any(blocks.active):
                return
            before = replace(canvas, step=step, block=blocks.bounds(), active=blocks.active_rows())
            commits = loop.commit(before, blocks, drift)
            tokens, states = before.tokens.clone(), before.states.clone()
            tokens[commits.sample, commits.position] = commits.token
            states[(tokens != mask_id) & before.masked] = int(State.COMMITTED)  # a committed mask is a mask still
            canvas = replace(before, tokens=tokens, states=states)
            blocks.advance(canvas, end_ids if how.stop else ())
        yield Step(before, canvas, commits)


def _laid(forced: Tensor, canvas: CanvasState, suffix: int) -> Int[Tensor, "batch position"]:
    """The forced tokens at their positions in the canvas."""
    laid, stop = canvas.tokens.clone(), canvas.tokens.shape[1] - suffix
    laid[:, stop - forced.shape[1] : stop] = forced
    return laid


@dataclass(frozen=True)
class _Places:
    """The candidates of a step: masked positions, and which of them lie in the block their sample is filling."""

    eligible: Bool[Tensor, "batch position"]
    sample: Int[Tensor, " candidate"]
    position: Int[Tensor, " candidate"]
    row: Int[Tensor, " candidate"]  # the predicting row
    own: Int[Tensor, " candidate"]  # the position counted from the sample's own start, so padding changes nothing
    offset: Int[Tensor, " candidate"]  # the position counted from the start of the block

    def grid(self, values: Tensor, elsewhere: float) -> Float[Tensor, "batch position"]:
        out = torch.full(self.eligible.shape, elsewhere, dtype=values.dtype, device=values.device)
        out[self.sample, self.position] = values
        return torch.where(self.eligible, out, elsewhere)


@dataclass(frozen=True)
class _Denoiser:
    """What stays the same from step to step."""

    forward: Forward
    unguided: Forward
    how: Sampling
    mask_id: int
    shift: bool
    end_ids: tuple[int, ...]
    samples: Sequence[str]
    forced: Int[Tensor, "batch position"] | None

    def commit(self, canvas: CanvasState, blocks: Blocks, drift: Drift | None) -> Commits:
        """One forward, and what the rule commits of it."""
        how, rule = self.how, SAMPLERS[self.how.sampler]
        places = self._places(canvas, blocks)
        logits = self._logits(canvas, places)
        keys = self._keys(canvas, "token")[places.sample]
        parts, distributions = [], []
        for at in torch.arange(len(logits), device=logits.device).split(max(1, CHUNK // logits.shape[-1])):
            token, log_p = draw(logits[at], how, self.end_ids, keys[at], places.own[at])
            these = Candidates(log_p, token, places.offset[at])
            score = rule.score(these, **{name: how.arguments[name] for name in rule.scored_by})
            if self.forced is not None:
                these = replace(these, token=self.forced[places.sample[at], places.position[at]])
            parts.append((these.token, these.probability, score))
            distributions += [log_p] if drift else []
        token, probability, score = (torch.cat(part) for part in zip(*parts, strict=True))
        moved = drift.since(torch.cat(distributions), places.sample, places.position) if drift else score

        keys = self._keys(canvas, "order")[places.sample]
        chances = uniform(keys, places.own)
        if how.sampler == "random":
            score = chances.float()
        if how.order_temperature:
            score = (score - score.max()) / how.order_temperature + gumbel(keys, places.own).float()
        look = StepCandidates(
            places.eligible,
            places.grid(score, -torch.inf),
            blocks.share(),
            blocks.chance(),
            blocks.steps_done(),
            places.grid(chances, 1.0),
            places.grid(moved, torch.inf),
        )
        picked = rule.pick(look, **{name: how.arguments[name] for name in rule.arguments})
        chosen = picked[places.sample, places.position]
        where = places.sample[chosen], places.position[chosen], places.row[chosen]
        return Commits(*where, token[chosen], probability[chosen])

    def _places(self, canvas: CanvasState, blocks: Blocks) -> _Places:
        assert canvas.block is not None
        assert canvas.active is not None
        eligible = blocks.eligible(canvas)
        # A rule that looks back needs the later blocks too: their past counts when their turn comes.
        read = canvas.masked & canvas.active[:, None] if "history" in self.how.arguments else eligible
        sample, position = read.nonzero(as_tuple=True)
        first = canvas.valid.int().argmax(-1)[sample]
        # A shifted sample's first position has no row before it: its own stands in (Dream).
        row = (position - 1).maximum(first) if self.shift else position
        offset = (position - canvas.block[sample, 0]).clamp_min(0)
        return _Places(eligible, sample, position, row, position - first, offset)

    def _logits(self, canvas: CanvasState, places: _Places) -> Float[Tensor, "candidate vocabulary"]:
        first, last = torch.stack([places.row.min(), places.row.max()]).tolist()
        rows, at = slice(first, last + 1), (places.sample, places.row - first)
        if not self.how.guidance:
            return self.forward(canvas, rows)[at]
        # The unguided pass comes first: a forward that is watched stays open until its commits are known.
        without = canvas.tokens.masked_fill(canvas.states == State.PROMPT, self.mask_id)
        unconditional = self.unguided(replace(canvas, tokens=without), rows)[at].float()
        conditional = self.forward(canvas, rows)[at].float()
        return unconditional + (self.how.guidance + 1) * (conditional - unconditional)

    def _keys(self, canvas: CanvasState, purpose: str) -> Int[Tensor, " batch"]:
        return step_keys(self.how.seed, self.samples, canvas.step, purpose).to(canvas.tokens.device)
