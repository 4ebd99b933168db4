"""The progress of each sample of a batch: its block, its step in the block, and how many positions a step commits.

    blocks = Blocks(canvas, sampling, suffix=0)
    while any(blocks.active):
        blocks.bounds(), blocks.commit_counts()       # [batch, 2], [batch]
        ...
        blocks.advance(canvas, end_ids)

Each sample is counted on its own: what it commits does not depend on the rest of the batch.
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
    """The block of each row of the batch, the step inside it, and the number of masks the block began with."""

    def __init__(self, canvas: CanvasState, sampling: Sampling, suffix: int) -> None:
        self.sampling, self.pace = sampling, SAMPLERS[sampling.sampler].pace
        stop = canvas.tokens.shape[1] - suffix
        self.start, self.stop = stop - sampling.new_tokens, stop  # of the new tokens
        self.block_length = sampling.block or sampling.new_tokens
        if not sampling.new_tokens:  # infilling only: one block, the whole canvas
            self.start, self.stop, self.block_length = 0, canvas.tokens.shape[1], canvas.tokens.shape[1]
        self.device = canvas.tokens.device
        rows = len(canvas.tokens)
        self.block, self.step, self.has_ended = [0] * rows, [0] * rows, [False] * rows
        self.masks_left = self._count_masks(canvas)
        self.initial_masks = [left[0] for left in self.masks_left]
        self._skip_finished_blocks()

    @property
    def active(self) -> list[bool]:
        """Whether each sample still has a block to fill."""
        return [block < self.sampling.blocks for block in self.block]

    def active_rows(self) -> Bool[Tensor, " batch"]:
        """`active` as a tensor."""
        return torch.tensor(self.active, device=self.device)

    def bounds(self) -> Int[Tensor, "batch 2"]:
        """[start, stop) of the block that each sample is filling; (−1, −1) once it is done."""
        length = self.block_length
        starts = [self.start + block * length if on else -1 for block, on in self._rows()]
        stops = [min(self.start + (block + 1) * length, self.stop) if on else -1 for block, on in self._rows()]
        return torch.tensor([starts, stops], device=self.device).T

    def eligible_positions(self, canvas: CanvasState) -> Bool[Tensor, "batch position"]:
        """The masks of the current block, with those that earlier blocks left if the sampler ranks them too.

        Masks in the prompt belong to the first block.
        """
        position = torch.arange(canvas.tokens.shape[1], device=self.device)
        start, stop = self.bounds().where(self.active_rows()[:, None], 0).split(1, -1)
        eligible: Tensor = canvas.masked & (position < stop)
        if SAMPLERS[self.sampling.sampler].ranks_earlier_blocks:
            return eligible
        in_block: Tensor = (position >= start) | ((position < self.start) & (start == self.start))
        return eligible & in_block

    def commit_counts(self) -> Int[Tensor, " batch"]:
        """How many positions the schedule commits in each sample."""
        counts = [self._commit_count(row) if on else 0 for row, (_, on) in enumerate(self._rows())]
        return torch.tensor(counts, device=self.device)

    def commit_probabilities(self) -> Float[Tensor, " batch"]:
        """The share of masks that the step's time uncovers in each sample."""
        shares = [float(self._uncovered_share(row)) if on else 0.0 for row, (_, on) in enumerate(self._rows())]
        return torch.tensor(shares, device=self.device)

    def steps_in_block(self) -> Int[Tensor, " batch"]:
        """How many steps each sample has taken in its current block."""
        return torch.tensor(self.step, device=self.device)

    def advance(self, canvas: CanvasState, end_ids: Sequence[int]) -> None:
        """Finish a step: move each sample to its next step, its next block, or its end."""
        self.masks_left = self._count_masks(canvas)
        self.step = [step + 1 for step in self.step]
        if end_ids:
            no_mask_before = canvas.masked[:, : self.stop].cumsum(-1) == 0
            is_end = torch.isin(canvas.tokens[:, : self.stop], torch.tensor(end_ids, device=self.device))
            self.has_ended = (is_end & no_mask_before)[:, self.start :].any(-1).tolist()
        self._skip_finished_blocks()

    def _rows(self) -> list[tuple[int, bool]]:
        return list(zip(self.block, self.active, strict=True))

    def _planned_steps(self, row: int) -> int:
        """The number of steps of the sample's block: its part of `sampling.steps`, else one per mask."""
        return self.sampling.steps // self.sampling.blocks if self.sampling.steps else self.initial_masks[row]

    def _commit_count(self, row: int) -> int:
        now, steps = self.step[row], self._planned_steps(row)
        if self.sampling.schedule == "time":
            left = self.masks_left[row][self.block[row]]
            return left if now >= steps - 1 else int(torch.tensor(float(left)) * self._uncovered_share(row))
        count, remainder = divmod(self.initial_masks[row], steps)
        return count + (now < remainder)

    def _uncovered_share(self, row: int) -> Tensor:
        """1 − t'/t in fp32, as Dream computes it: rounding decides when M·(1 − t'/t) reaches a whole number."""
        steps, now = self._planned_steps(row), self.step[row]
        t = torch.linspace(1, self.sampling.eps, steps + 1)
        return torch.ones(()) if now >= steps - 1 else 1 - t[now + 1] / t[now]

    def _count_masks(self, canvas: CanvasState) -> list[list[int]]:
        """The masks left, [row][block]."""
        masked = canvas.masked.long()
        by_block = masked[:, self.start : self.stop].reshape(len(masked), self.sampling.blocks, -1).sum(-1)
        by_block[:, 0] += masked[:, : self.start].sum(-1)
        counts: list[list[int]] = by_block.tolist()
        return counts

    def _skip_finished_blocks(self) -> None:
        """A block is over when it has no mask left, or no steps: a model may commit the mask token."""
        for row, left in enumerate(self.masks_left):
            if self.has_ended[row]:
                self.block[row] = self.sampling.blocks
            while self.block[row] < self.sampling.blocks:
                adaptive_limit = self.initial_masks[row] if self.pace != "schedule" else 0  # at least one per step
                limit = max(adaptive_limit, self._planned_steps(row) if self.pace != "adaptive" else 0)
                if left[self.block[row]] and self.step[row] < limit:
                    break
                self.block[row] += 1
                self.step[row] = 0
                self.initial_masks[row] = left[self.block[row]] if self.block[row] < self.sampling.blocks else 0
