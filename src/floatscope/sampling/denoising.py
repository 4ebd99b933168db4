"""Denoising: fill the masks of a canvas over several forwards, block after block, by any rule of `SAMPLERS`.

    canvas = build_canvas([prompt_ids], new_tokens=16, mask_id=mask_id)
    for step in denoise(model.forward, canvas, resolve_sampling(Paradigm.MDM, new_tokens=16), mask_id=mask_id):
        step.commits

Every sample counts its own masks, blocks and steps, so a batch commits exactly what its samples commit alone. A sample
with nothing left to fill stays unchanged until the others are done.
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
from floatscope.sampling.proposal import propose_tokens
from floatscope.sampling.randomness import gumbel, step_keys, uniform
from floatscope.sampling.samplers import SAMPLERS, Candidates, StepCandidates
from floatscope.sampling.settings import Sampling
from floatscope.schema import State

MAX_LOGITS_PER_CHUNK = 2**25
"""Logits are turned into probabilities in chunks of this size: fp32 copies of a wide vocabulary are large."""


def denoise(
    forward: Forward,
    canvas: CanvasState,
    sampling: Sampling,
    *,
    mask_id: int,
    shift: bool = False,
    end_ids: Sequence[int] = (),
    samples: Sequence[str] | None = None,
    suffix: int = 0,
    block_size: int | None = None,
    unguided: Forward | None = None,
    target_ids: Int[Tensor, "batch new"] | None = None,
) -> Iterator[Step]:
    """Yield one `Step` per forward until nothing is masked.

    Args:
        forward: returns the logits of the requested rows.
        canvas: the prompts, the masks to fill, and the suffix.
        sampling: the settings, from `resolve_sampling`.
        mask_id: the mask token.
        shift: row p predicts position p + 1 (Dream) instead of position p (LLaDA).
        end_ids: eos first, then other tokens that end a text.
        samples: names of the rows; they key the randomness. The default is "0", "1", …
        suffix: the number of positions after the new tokens.
        block_size: of the attention of a block-causal model. Blocks then count from the first token of each sample,
            they are filled to their end, and a forward sees nothing after the block that is being filled.
        unguided: runs the second forward of classifier-free guidance; the default is `forward`.
        target_ids: the new tokens, for teacher forcing. The model's own proposals decide when a position is committed,
            as without it; the target token is written, and its confidence is its probability in the distribution of
            `sampling.confidence_from` (by default the softmax of the logits).
    """
    names = [str(b) for b in range(len(canvas.tokens))] if samples is None else samples
    targets = None if target_ids is None else _place_targets(target_ids, canvas, suffix)
    loop = _Denoiser(forward, unguided or forward, sampling, mask_id, shift, tuple(end_ids), names, targets)
    history = sampling.arguments.get("history")
    kl_history = None if history is None else KLHistory(canvas.tokens, history)
    blocks = Blocks(canvas, sampling, suffix, block_size=block_size, shift=shift)
    for step in count():
        with torch.no_grad():
            # 1. Look up the block that each sample is filling; stop when all samples are done.
            if not any(blocks.active):
                return
            before = blocks.crop(canvas, step)
            # 2. Run one forward, propose tokens, and choose what to commit.
            commits = loop.choose_commits(before, blocks, kl_history)
            # 3. Write the commits into a copy of the canvas.
            tokens, states = canvas.tokens.clone(), canvas.states.clone()
            tokens[commits.sample, commits.position] = commits.token
            states[(tokens != mask_id) & canvas.masked] = int(State.COMMITTED)  # a committed mask token stays masked
            canvas = replace(canvas, tokens=tokens, states=states)
            done = Step(before, blocks.crop(canvas, step), commits)
            # 4. Move each sample to its next step, its next block, or its end.
            is_edited = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
            is_edited[commits.sample[done.is_edit]] = True
            blocks.advance(canvas, end_ids if sampling.stop else (), is_edited.tolist())
        yield done


def _place_targets(target_ids: Tensor, canvas: CanvasState, suffix: int) -> Int[Tensor, "batch position"]:
    """The target tokens at their positions in the canvas."""
    targets, stop = canvas.tokens.clone(), canvas.tokens.shape[1] - suffix
    targets[:, stop - target_ids.shape[1] : stop] = target_ids
    return targets


@dataclass(frozen=True)
class _CandidatePositions:
    """The positions a step reads: masked ones, and committed ones that it may overwrite."""

    eligible: Bool[Tensor, "batch position"]  # masks of the block that their sample is filling
    editable: Bool[Tensor, "batch position"]
    sample: Int[Tensor, " candidate"]
    position: Int[Tensor, " candidate"]
    row: Int[Tensor, " candidate"]  # the predicting row
    unpadded: Int[Tensor, " candidate"]  # the position counted from the sample's first token: padding changes nothing
    block_offset: Int[Tensor, " candidate"]  # the position counted from the start of the block

    def to_grid(self, values: Tensor, fill: float) -> Float[Tensor, "batch position"]:
        """One value per candidate → [batch, position], with `fill` where a position is not eligible."""
        grid = torch.full(self.eligible.shape, fill, dtype=values.dtype, device=values.device)
        grid[self.sample, self.position] = values
        return torch.where(self.eligible, grid, fill)


@dataclass(frozen=True)
class _Denoiser:
    """What stays the same from step to step."""

    forward: Forward
    unguided: Forward
    sampling: Sampling
    mask_id: int
    shift: bool
    end_ids: tuple[int, ...]
    samples: Sequence[str]
    targets: Int[Tensor, "batch position"] | None

    def choose_commits(self, canvas: CanvasState, blocks: Blocks, kl_history: KLHistory | None) -> Commits:
        """Run one forward and return what the sampler commits."""
        sampling, sampler = self.sampling, SAMPLERS[self.sampling.sampler]
        # 1. Find the candidates and run the model on them.
        positions = self._find_candidates(canvas, blocks)
        logits = self._run_forward(canvas, positions)
        # 2. Propose a token for each candidate, and score it.
        token, probability, score, max_kl = self._score_candidates(canvas, positions, logits, kl_history)
        # 3. Randomise the order if the settings say so.
        keys = self._keys(canvas, "order")[positions.sample]
        noise = uniform(keys, positions.unpadded)
        if sampling.sampler == "random":
            score = noise.float()
        if sampling.order_temperature:
            score = (score - score.max()) / sampling.order_temperature
            score = score + gumbel(keys, positions.unpadded).float()
        # 4. Select the positions to commit.
        candidates = StepCandidates(
            eligible=positions.eligible,
            score=positions.to_grid(score, -torch.inf),
            commit_count=blocks.commit_counts(),
            commit_probability=blocks.commit_probabilities(),
            steps_in_block=blocks.steps_in_block(),
            uniform_noise=positions.to_grid(noise, 1.0),
            max_kl=positions.to_grid(max_kl, torch.inf),
        )
        grid = sampler.select(candidates, **{name: sampling.arguments[name] for name in sampler.select_arguments})
        # 5. Add the committed positions that the step overwrites.
        if blocks.editing is not None:
            current = canvas.tokens[positions.sample, positions.position]
            differs = (token != current) & (token != self.mask_id) & (probability > blocks.editing)
            grid[positions.sample, positions.position] |= (
                positions.editable[positions.sample, positions.position] & differs
            )
        chosen = grid[positions.sample, positions.position]
        where = positions.sample[chosen], positions.position[chosen], positions.row[chosen]
        return Commits(*where, token[chosen], probability[chosen])

    def _find_candidates(self, canvas: CanvasState, blocks: Blocks) -> _CandidatePositions:
        assert canvas.block is not None
        eligible, editable = blocks.eligible_positions(canvas), blocks.editable_positions(canvas)
        # A sampler with a history reads the later blocks too: their past counts when their turn comes.
        read = blocks.open_positions(canvas) if "history" in self.sampling.arguments else eligible | editable
        sample, position = read.nonzero(as_tuple=True)
        first = canvas.valid.int().argmax(-1)[sample]
        # The first position of a shifted sample has no row before it: its own row predicts it (Dream).
        row = (position - 1).maximum(first) if self.shift else position
        block_offset = (position - canvas.block[sample, 0]).clamp_min(0)
        return _CandidatePositions(eligible, editable, sample, position, row, position - first, block_offset)

    def _run_forward(
        self, canvas: CanvasState, positions: _CandidatePositions
    ) -> Float[Tensor, "candidate vocabulary"]:
        first, last = torch.stack([positions.row.min(), positions.row.max()]).tolist()
        rows, index = slice(first, last + 1), (positions.sample, positions.row - first)
        if not self.sampling.guidance:
            return self.forward(canvas, rows)[index]
        # The unguided pass comes first: a watched forward stays open until its commits are known.
        masked_prompt = canvas.tokens.masked_fill(canvas.states == State.PROMPT, self.mask_id)
        unconditional = self.unguided(replace(canvas, tokens=masked_prompt), rows)[index].float()
        conditional = self.forward(canvas, rows)[index].float()
        return unconditional + (self.sampling.guidance + 1) * (conditional - unconditional)

    def _score_candidates(
        self, canvas: CanvasState, positions: _CandidatePositions, logits: Tensor, kl_history: KLHistory | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The token, its probability, the sampler's score and the recent KL of each candidate, all [candidate]."""
        sampling, sampler = self.sampling, SAMPLERS[self.sampling.sampler]
        score_arguments = {name: sampling.arguments[name] for name in sampler.score_arguments}
        keys = self._keys(canvas, "token")[positions.sample]
        parts, distributions = [], []
        chunk_size = max(1, MAX_LOGITS_PER_CHUNK // logits.shape[-1])
        for chunk in torch.arange(len(logits), device=logits.device).split(chunk_size):
            unpadded, offset = positions.unpadded[chunk], positions.block_offset[chunk]
            token, log_p = propose_tokens(logits[chunk], sampling, self.end_ids, keys[chunk], unpadded)
            candidates = Candidates(log_p, token, offset)
            score = sampler.score(candidates, **score_arguments)
            if self.targets is not None:  # the proposal decides the order, the target is written
                target = self.targets[positions.sample[chunk], positions.position[chunk]]
                target = target.where(target != self.mask_id, token)  # a block ends after the last target
                candidates = replace(candidates, token=target)
            parts.append((candidates.token, candidates.probability, score))
            distributions += [log_p] if kl_history else []
        token, probability, score = (torch.cat(part) for part in zip(*parts, strict=True))
        if kl_history is None:
            return token, probability, score, score  # no sampler without a history reads the KL
        return (
            token,
            probability,
            score,
            kl_history.update(torch.cat(distributions), positions.sample, positions.position),
        )

    def _keys(self, canvas: CanvasState, purpose: str) -> Int[Tensor, " batch"]:
        return step_keys(self.sampling.seed, self.samples, canvas.step, purpose).to(canvas.tokens.device)


class KLHistory:
    """How far each position's distribution moved over the last steps, KL(now ‖ previous step), for `klass`.

    It stores the distributions of one step, as large as the logits of the masked positions, in fp32.
    """

    def __init__(self, tokens: Int[Tensor, "batch position"], history: int) -> None:
        self._kl = torch.full((history, *tokens.shape), torch.inf, device=tokens.device)  # the latest step first
        self._row = torch.full_like(tokens, -1)  # a position's row in `_previous`; −1 if it has none
        self._previous: Tensor | None = None

    def update(
        self,
        log_p: Float[Tensor, "candidate vocabulary"],
        sample: Int[Tensor, " candidate"],
        position: Int[Tensor, " candidate"],
    ) -> Float[Tensor, " candidate"]:
        """Add a step and return the largest KL of the last `history` steps; inf before there are that many."""
        latest = torch.full_like(self._kl[0], torch.inf)
        if self._previous is not None:
            row = self._row[sample, position]
            p = log_p.exp()
            kl = torch.where(p > 0, p * (log_p - self._previous[row]), 0.0).sum(-1)
            latest[sample, position] = torch.where(row >= 0, kl, torch.inf)
        self._kl = torch.cat([latest[None], self._kl[:-1]])
        self._row.fill_(-1)
        self._row[sample, position] = torch.arange(len(sample), device=sample.device)
        self._previous = log_p
        return self._kl[:, sample, position].amax(0)
