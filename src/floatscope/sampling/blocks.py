"""The progress of each sample of a batch: its block, its step in the block, and how many positions a step commits.

    blocks = Blocks(canvas, sampling)
    while any(blocks.active):
        before = blocks.crop(canvas, step)            # what the forward sees
        blocks.bounds(), blocks.commit_counts()       # [batch, 2], [batch]
        ...
        blocks.advance(canvas, end_ids, is_edited)

Each sample has its own list of blocks and is counted on its own: what it commits does not depend on the rest of the
batch. The blocks of a model with full attention divide the new tokens. Those of a block-causal model count from the
sample's first token, so the first one with masks begins with the end of the prompt; a forward sees nothing after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.canvas import CanvasState, crop_regions
from floatscope.sampling.samplers import SAMPLERS
from floatscope.sampling.settings import Sampling
from floatscope.schema import State


@dataclass(frozen=True)
class Block:
    """A stretch of one canvas that is filled before the next one begins."""

    start: int
    stop: int
    lowest: int  # masks from here to `stop` belong to it: those of the prompt are the first block's
    visible: int  # the end of what a forward sees while it is filled
    scheduled: int  # how many positions the schedule divides among the steps


def divide_new_tokens(canvas: CanvasState, sampling: Sampling, suffix: int) -> list[list[Block]]:
    """The blocks of a model with full attention, the same in each sample: they divide the new tokens evenly."""
    width = canvas.tokens.shape[1]
    stop = width - suffix
    start, size = stop - sampling.new_tokens, sampling.block or sampling.new_tokens
    if not sampling.new_tokens:  # infilling only: one block, the whole canvas
        start, stop, size = 0, width, width
    starts = range(start, stop, size)
    lowest = [0, *starts[1:]]
    masks = torch.stack([canvas.masked[:, a : b + size].sum(-1) for a, b in zip(lowest, starts, strict=True)], 1)
    return [
        [Block(b, b + size, a, width, n) for a, b, n in zip(lowest, starts, row, strict=True)] for row in masks.tolist()
    ]


def divide_samples(canvas: CanvasState, sampling: Sampling, block_size: int, shift: bool) -> list[list[Block]]:
    """The blocks of a block-causal model, counted from each sample's first token.

    `sampling.block` divides the blocks of the attention further. If row p predicts p + 1, the first position of a block
    of the attention is a block of its own: the last row of the block before it, which is finished, predicts it.
    """
    size, rows = sampling.block or block_size, []
    for valid in canvas.valid:
        first, count = int(valid.int().argmax()), int(valid.sum())
        edges = {*range(0, count, size), *(range(block_size + 1, count, block_size) if shift else ())}
        bounds = sorted(edges)
        rows.append(
            [
                Block(first + a, first + b, first + a, first + min(count, (a // block_size + 1) * block_size), b - a)
                for a, b in zip(bounds, [*bounds[1:], count], strict=True)
            ]
        )
    return rows


class Blocks:
    """The block of each row of the batch, the step inside it, and the masks left.

    Args:
        canvas: the first canvas.
        sampling: the settings.
        suffix: how many positions follow the new tokens.
        block_size: of the attention of a block-causal model; None: full attention.
        shift: row p predicts position p + 1.
    """

    def __init__(
        self,
        canvas: CanvasState,
        sampling: Sampling,
        suffix: int = 0,
        *,
        block_size: int | None = None,
        shift: bool = False,
    ) -> None:
        self.sampling, self.sampler = sampling, SAMPLERS[sampling.sampler]
        self.device, rows = canvas.tokens.device, len(canvas.tokens)
        self.editing: float | None = sampling.arguments.get("editing")
        self.answer = slice(canvas.tokens.shape[1] - suffix - sampling.new_tokens, canvas.tokens.shape[1] - suffix)
        self.is_block_causal = block_size is not None
        if block_size is None:
            self.blocks = divide_new_tokens(canvas, sampling, suffix)
            self.steps = sampling.steps and sampling.steps // sampling.blocks  # of each block
        else:
            self.blocks = divide_samples(canvas, sampling, block_size, shift)
            self.steps = sampling.steps
        self.block, self.step, self.extra_steps = [0] * rows, [0] * rows, [0] * rows
        self.is_stable, self.has_ended = [False] * rows, [False] * rows
        self.visible = [blocks[-1].visible for blocks in self.blocks]
        self.masks_left = self._count_masks(canvas)
        self._skip_finished_blocks()

    @property
    def active(self) -> list[bool]:
        """Whether each sample still has a block to fill."""
        return [number < len(blocks) for number, blocks in zip(self.block, self.blocks, strict=True)]

    def active_rows(self) -> Bool[Tensor, " batch"]:
        """`active` as a tensor."""
        return torch.tensor(self.active, device=self.device)

    def bounds(self) -> Int[Tensor, "batch 2"]:
        """[start, stop) of the block that each sample is filling; (−1, −1) once it is done."""
        return torch.tensor([(-1, -1) if b is None else (b.start, b.stop) for b in self._current()], device=self.device)

    def crop(self, canvas: CanvasState, step: int) -> CanvasState:
        """The canvas that the forward of a step sees: later blocks of a block-causal model are not in the input."""
        width = max(self.visible)
        position = torch.arange(width, device=self.device)
        is_visible = position < torch.tensor(self.visible, device=self.device)[:, None]
        return replace(
            canvas,
            tokens=canvas.tokens[:, :width],
            states=canvas.states[:, :width].where(is_visible, int(State.PAD)),
            regions=crop_regions(canvas.regions, width),
            step=step,
            block=self.bounds(),
            active=self.active_rows(),
        )

    def eligible_positions(self, canvas: CanvasState) -> Bool[Tensor, "batch position"]:
        """The masks of the current block, with those that earlier blocks left if the sampler ranks them too.

        Masks in the prompt of a model with full attention belong to the first block.
        """
        ranks_all = self.sampler.ranks_earlier_blocks and not self.is_block_causal
        spans = [(0, 0) if b is None else (0 if ranks_all else b.lowest, b.stop) for b in self._current()]
        return canvas.masked & self._within(spans, canvas)

    def open_positions(self, canvas: CanvasState) -> Bool[Tensor, "batch position"]:
        """The masks that are eligible now or later; masks that earlier blocks of a block-causal model left stay."""
        spans = [(0, 0) if b is None else (b.lowest if self.is_block_causal else 0, b.visible) for b in self._current()]
        return canvas.masked & self._within(spans, canvas)

    def editable_positions(self, canvas: CanvasState) -> Bool[Tensor, "batch position"]:
        """The committed positions of the current block, which a sampler with token editing may overwrite."""
        spans = [(0, 0) if b is None or self.editing is None else (b.lowest, b.stop) for b in self._current()]
        return (canvas.states == State.COMMITTED) & self._within(spans, canvas)

    def commit_counts(self) -> Int[Tensor, " batch"]:
        """How many positions the schedule commits in each sample."""
        counts = [0 if b is None else self._commit_count(row, b) for row, b in enumerate(self._current())]
        return torch.tensor(counts, device=self.device)

    def commit_probabilities(self) -> Float[Tensor, " batch"]:
        """The share of masks that the step's time uncovers in each sample."""
        shares = [0.0 if b is None else float(self._uncovered_share(row, b)) for row, b in enumerate(self._current())]
        return torch.tensor(shares, device=self.device)

    def steps_in_block(self) -> Int[Tensor, " batch"]:
        """How many steps each sample has taken in its current block."""
        return torch.tensor(self.step, device=self.device)

    def advance(self, canvas: CanvasState, end_ids: Sequence[int], is_edited: Sequence[bool]) -> None:
        """Finish a step: move each sample to its next step, its next block, or its end.

        Args:
            canvas: all positions, after the commits of the step.
            end_ids: tokens that end a text; none if the samples do not stop.
            is_edited: whether the step has overwritten a committed token, for each sample.
        """
        for row, block in enumerate(self._current()):
            had_masks = block is not None and self.masks_left[row][self.block[row]] > 0
            self.extra_steps[row] += not had_masks
            self.is_stable[row] = not had_masks and not is_edited[row]
        self.masks_left = self._count_masks(canvas)
        self.step = [step + 1 for step in self.step]
        if end_ids:
            self.has_ended = self._find_ended(canvas, torch.tensor(end_ids, device=self.device))
        self._skip_finished_blocks()

    def _current(self) -> list[Block | None]:
        """The block that each sample is filling; None once it is done."""
        return [
            blocks[number] if number < len(blocks) else None
            for number, blocks in zip(self.block, self.blocks, strict=True)
        ]

    def _within(self, spans: Sequence[tuple[int, int]], canvas: CanvasState) -> Bool[Tensor, "batch position"]:
        """Whether each position lies in the span of its sample."""
        position = torch.arange(canvas.tokens.shape[1], device=self.device)
        start, stop = torch.tensor(spans, device=self.device).T[..., None]
        within: Tensor = (position >= start) & (position < stop)
        return within

    def _planned_steps(self, block: Block) -> int:
        """The number of steps of a block: its part of `sampling.steps`, else one per position."""
        return self.steps or block.scheduled

    def _commit_count(self, row: int, block: Block) -> int:
        now, steps = self.step[row], self._planned_steps(block)
        if self.sampling.schedule == "time":
            left = self.masks_left[row][self.block[row]]
            return left if now >= steps - 1 else int(torch.tensor(float(left)) * self._uncovered_share(row, block))
        count, remainder = divmod(block.scheduled, steps)
        return count + (now < remainder)

    def _uncovered_share(self, row: int, block: Block) -> Tensor:
        """1 − t'/t in fp32, as Dream computes it: rounding decides when M·(1 − t'/t) reaches a whole number."""
        steps, now = self._planned_steps(block), self.step[row]
        t = torch.linspace(1, self.sampling.eps, steps + 1)
        return torch.ones(()) if now >= steps - 1 else 1 - t[now + 1] / t[now]

    def _count_masks(self, canvas: CanvasState) -> list[list[int]]:
        """The masks left, [row][block]."""
        until = torch.nn.functional.pad(canvas.masked.long().cumsum(-1), (1, 0)).tolist()
        return [[n[b.stop] - n[b.lowest] for b in blocks] for n, blocks in zip(until, self.blocks, strict=True)]

    def _find_ended(self, canvas: CanvasState, end_ids: Tensor) -> list[bool]:
        """Whether each sample has an end token: with no mask before it, or in blocks, which are filled first, any."""
        is_end = torch.isin(canvas.tokens, end_ids)
        if self.is_block_causal:
            return (is_end & (canvas.states == State.COMMITTED)).any(-1).tolist()
        no_mask_before = canvas.masked.cumsum(-1) == 0
        return (is_end & no_mask_before)[:, self.answer].any(-1).tolist()

    def _skip_finished_blocks(self) -> None:
        for row, blocks in enumerate(self.blocks):
            ends_now = self.has_ended[row] and not self.is_block_causal  # in blocks, a sample ends with its block
            while self.block[row] < len(blocks) and (ends_now or self._is_over(row, blocks[self.block[row]])):
                self.block[row] = len(blocks) if self.has_ended[row] else self.block[row] + 1
                self.step[row], self.extra_steps[row], self.is_stable[row] = 0, 0, False
            if self.block[row] < len(blocks):
                self.visible[row] = blocks[self.block[row]].visible

    def _is_over(self, row: int, block: Block) -> bool:
        """A block is over when it has no mask left, or no steps: a model may commit the mask token.

        With token editing, steps without masks follow until one of them changes nothing.
        """
        if not self.masks_left[row][self.block[row]]:
            is_edited = self.editing is not None and self.step[row] > 0
            return (
                not is_edited or self.is_stable[row] or self.extra_steps[row] >= self.sampling.arguments["extra_steps"]
            )
        limits = {"adaptive": block.scheduled, "fallback": max(block.scheduled, self._planned_steps(block))}
        return self.step[row] >= limits.get(self.sampler.pace, self._planned_steps(block))
