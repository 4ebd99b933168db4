"""Where each sample of a batch is: its block, the step inside it, and how many positions that step commits.

    blocks = Blocks(canvas, how, suffix=0)
    while any(blocks.active):
        blocks.bounds(), blocks.share()       # [batch, 2], [batch]
        ...
        blocks.advance(canvas, end_ids)

Samples are counted each on its own: what one commits does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.canvas import CanvasState
from floatscope.sampling.samplers import SAMPLERS
from floatscope.sampling.settings import Sampling


class Blocks:
    """Where each row of the batch is: its block, the step inside it, the masks the block began with."""

    def __init__(self, canvas: CanvasState, how: Sampling, suffix: int) -> None:
        self.how, self.pace = how, SAMPLERS[how.sampler].pace
        stop = canvas.tokens.shape[1] - suffix
        self.start, self.stop, self.width = stop - how.new_tokens, stop, how.block or how.new_tokens
        if not how.new_tokens:  # infilling alone: one block, the whole canvas
            self.start, self.stop, self.width = 0, canvas.tokens.shape[1], canvas.tokens.shape[1]
        self.device = canvas.tokens.device
        rows = len(canvas.tokens)
        self.block, self.step, self.ended = [0] * rows, [0] * rows, [False] * rows
        self.left = self._masks(canvas)
        self.masks = [left[0] for left in self.left]
        self._move_on()

    @property
    def active(self) -> list[bool]:
        return [b < self.how.blocks for b in self.block]

    def active_rows(self) -> Bool[Tensor, " batch"]:
        return torch.tensor(self.active, device=self.device)

    def bounds(self) -> Int[Tensor, "batch 2"]:
        """[start, stop) of the block each sample is filling; (−1, −1) once it is done."""
        starts = [self.start + b * self.width if on else -1 for b, on in self._rows()]
        stops = [min(self.start + (b + 1) * self.width, self.stop) if on else -1 for b, on in self._rows()]
        return torch.tensor([starts, stops], device=self.device).T

    def eligible(self, canvas: CanvasState) -> Bool[Tensor, "batch position"]:
        """The masks of the block; those in the prompt are filled with the first."""
        at = torch.arange(canvas.tokens.shape[1], device=self.device)
        start, stop = self.bounds().where(self.active_rows()[:, None], 0).split(1, -1)
        here: Tensor = (at >= start) | ((at < self.start) & (start == self.start))
        eligible: Tensor = canvas.masked & (at < stop) & here
        return eligible

    def share(self) -> Int[Tensor, " batch"]:
        """How many positions the schedule commits in each sample."""
        shares = [self._share(row) if on else 0 for row, (_, on) in enumerate(self._rows())]
        return torch.tensor(shares, device=self.device)

    def chance(self) -> Float[Tensor, " batch"]:
        """The part of the masks that the step's time uncovers."""
        chances = [float(self._time(row)) if on else 0.0 for row, (_, on) in enumerate(self._rows())]
        return torch.tensor(chances, device=self.device)

    def steps_done(self) -> Int[Tensor, " batch"]:
        """Inside the block."""
        return torch.tensor(self.step, device=self.device)

    def advance(self, canvas: CanvasState, end_ids: Sequence[int]) -> None:
        """The step is done: the next step, the next block, or the end."""
        self.left = self._masks(canvas)
        self.step = [step + 1 for step in self.step]
        if end_ids:
            whole = canvas.masked[:, : self.stop].cumsum(-1) == 0  # no mask here or before
            ends = torch.isin(canvas.tokens[:, : self.stop], torch.tensor(end_ids, device=self.device)) & whole
            self.ended = ends[:, self.start :].any(-1).tolist()
        self._move_on()

    def _rows(self) -> list[tuple[int, bool]]:
        return list(zip(self.block, self.active, strict=True))

    def _steps(self, row: int) -> int:
        """How many steps the schedule of the sample's block has: its part of those asked for, else one per mask."""
        return self.how.steps // self.how.blocks if self.how.steps else self.masks[row]

    def _share(self, row: int) -> int:
        now, steps = self.step[row], self._steps(row)
        if self.how.schedule == "time":
            left = self.left[row][self.block[row]]
            return left if now >= steps - 1 else int(torch.tensor(float(left)) * self._time(row))
        share, more = divmod(self.masks[row], steps)
        return share + (now < more)

    def _time(self, row: int) -> Tensor:
        """1 − t'/t in fp32, as Dream computes it: rounding decides when M·(1 − t'/t) reaches a whole number."""
        steps, now = self._steps(row), self.step[row]
        t = torch.linspace(1, self.how.eps, steps + 1)
        return torch.ones(()) if now >= steps - 1 else 1 - t[now + 1] / t[now]

    def _masks(self, canvas: CanvasState) -> list[list[int]]:
        """Masks left, [row][block]."""
        masked = canvas.masked.long()
        answer = masked[:, self.start : self.stop].reshape(len(masked), self.how.blocks, -1).sum(-1)
        answer[:, 0] += masked[:, : self.start].sum(-1)
        counts: list[list[int]] = answer.tolist()
        return counts

    def _move_on(self) -> None:
        """A block is over when nothing in it is masked, or when its steps are: a model may commit the mask itself."""
        for row, left in enumerate(self.left):
            if self.ended[row]:
                self.block[row] = self.how.blocks
            while self.block[row] < self.how.blocks:
                own = self.masks[row] if self.pace != "schedule" else 0  # at least one a step
                limit = max(own, self._steps(row) if self.pace != "own" else 0)
                if left[self.block[row]] and self.step[row] < limit:
                    break
                self.block[row] += 1
                self.step[row] = 0
                self.masks[row] = left[self.block[row]] if self.block[row] < self.how.blocks else 0
