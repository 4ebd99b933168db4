"""Samplers: the rules that choose which masked positions a step commits. One table, one row per published rule.

    sampler = SAMPLERS["threshold"]
    score = sampler.score(candidates)                       # [candidate], from each candidate's distribution
    commit = sampler.select(step_candidates, tau=0.9)       # [batch, position], True where the step commits

A candidate is a masked position of the current block; LLaDA's rules rank the masks that earlier blocks left with them.
The `pace` of a sampler says who decides how many positions a step commits: the `schedule`, the sampler itself
(`adaptive`, at least one per step), the sampler with the schedule as a `fallback`, or the sampler with the schedule as
the `minimum`. Ties go to the earlier position.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.errors import UserError

MAX_CALIBRATED_SCORE = 10.0  # PC-Sampler clips its calibrated confidence here


@dataclass(frozen=True)
class Candidates:
    """Masked positions that a step may commit, with their distributions and proposed tokens."""

    log_p: Float[Tensor, "candidate vocabulary"]
    token: Int[Tensor, " candidate"]
    block_offset: Int[Tensor, " candidate"]  # distance from the start of the block

    @property
    def probability(self) -> Float[Tensor, " candidate"]:
        """The probability of each candidate's token."""
        return self.log_p.gather(-1, self.token[:, None])[:, 0].exp()


@dataclass(frozen=True)
class StepCandidates:
    """All candidates of a step on the grid of the canvas; `score` is −inf where a position is not eligible."""

    eligible: Bool[Tensor, "batch position"]
    score: Float[Tensor, "batch position"]
    commit_count: Int[Tensor, " batch"]  # how many positions the schedule commits
    commit_probability: Float[Tensor, " batch"]  # the share of masks that the step's time uncovers
    steps_in_block: Int[Tensor, " batch"]  # steps already taken in the current block
    uniform_noise: Float[Tensor, "batch position"]
    max_kl: Float[Tensor, "batch position"]  # largest KL(now ‖ previous step) over the sampler's `history`


ScoreRule = Callable[..., Tensor]
SelectRule = Callable[..., Tensor]


def score_probability(candidates: Candidates) -> Tensor:
    """Score by the probability of the token."""
    return candidates.probability


def score_margin(candidates: Candidates) -> Tensor:
    """Score by p₁ − p₂, the lead of the most likely token over the second."""
    first, second = candidates.log_p.topk(2, dim=-1).values.exp().unbind(-1)
    return first - second


def score_negative_entropy(candidates: Candidates) -> Tensor:
    """Score by Σ p log p; a filtered token (log p = −inf) contributes nothing."""
    entropy: Tensor = torch.special.entr(candidates.log_p.exp()).sum(-1)
    return -entropy


def score_calibrated(candidates: Candidates, decay: float, background: str) -> Tensor:
    """Score by −p·log f with f the token's frequency in ordinary text; decays with distance from the block's start."""
    table = _load_surprisal(background, Path(background).stat().st_mtime_ns, candidates.log_p.shape[-1])
    surprisal = table.to(candidates.log_p.device)[candidates.token]
    calibrated = (candidates.probability * surprisal).clamp_max(MAX_CALIBRATED_SCORE)
    return calibrated * (-decay * candidates.block_offset).exp()


def select_top(candidates: StepCandidates) -> Tensor:
    """Select the `commit_count` best positions of each sample."""
    return (_rank_scores(candidates.score) < candidates.commit_count[:, None]) & candidates.eligible


def select_by_chance(candidates: StepCandidates) -> Tensor:
    """Select each position independently with the step's probability."""
    return (candidates.uniform_noise < candidates.commit_probability[:, None]) & candidates.eligible


def select_above_threshold(candidates: StepCandidates, tau: float) -> Tensor:
    """Select all positions with a score of at least `tau`, and always the best one."""
    return candidates.eligible & ((candidates.score >= tau) | (_rank_scores(candidates.score) == 0))


def select_confident(candidates: StepCandidates, tau: float) -> Tensor:
    """Select all positions with a score above `tau` if they are at least `commit_count`, else the best of them."""
    confident = candidates.eligible & (candidates.score > tau)
    is_enough = confident.sum(-1) >= candidates.commit_count
    return torch.where(is_enough[:, None], confident, select_top(candidates))


def select_by_factor(candidates: StepCandidates, factor: float) -> Tensor:
    """Select the largest n with (n + 1)(1 − c_n) < factor, where c_n is the n-th largest confidence."""
    return _select_longest_prefix(candidates, lambda c, n: (n + 1) * (1 - c) < factor)


def select_by_entropy_bound(candidates: StepCandidates, gamma: float) -> Tensor:
    """Select the largest n, in order of entropy, whose entropies without the largest sum to at most `gamma`."""
    return _select_longest_prefix(candidates, lambda minus_h, n: (-minus_h).cumsum(-1) + minus_h <= gamma)


def select_stable(candidates: StepCandidates, confidence: float, kl: float, history: int) -> Tensor:
    """Select all confident positions whose distribution has stopped moving; if there are none, the top ones."""
    confident = candidates.eligible & (candidates.score > confidence)
    stable = confident & (candidates.max_kl < kl) & (candidates.steps_in_block >= history - 1)[:, None]
    return torch.where(stable.any(-1, keepdim=True), stable, select_top(candidates))


@dataclass(frozen=True)
class Sampler:
    """A row of `SAMPLERS`: how candidates are scored, and which of them a step commits."""

    description: str
    select: SelectRule = select_top
    score: ScoreRule = score_probability
    select_arguments: Mapping[str, Any] = field(default_factory=dict)  # defaults
    score_arguments: Mapping[str, Any] = field(default_factory=dict)  # defaults
    editing_arguments: Mapping[str, Any] = field(default_factory=dict)  # defaults
    pace: str = "schedule"  # schedule | adaptive | fallback | minimum
    ranks_earlier_blocks: bool = (
        False  # whether masks that an earlier block left (the model predicted the mask) compete
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the sampler with their defaults."""
        return {**self.select_arguments, **self.score_arguments, **self.editing_arguments}


SAMPLERS: dict[str, Sampler] = {
    "confidence": Sampler(
        "the most probable token first (LLaDA low_confidence, Dream maskgit_plus)", ranks_earlier_blocks=True
    ),
    "margin": Sampler("the largest lead over the second token first (Dream topk_margin)", score=score_margin),
    "entropy": Sampler("the lowest entropy first (Dream entropy)", score=score_negative_entropy),
    "random": Sampler("in random order (LLaDA random)", ranks_earlier_blocks=True),
    "origin": Sampler("each with the probability of the step's time (Dream origin)", select=select_by_chance),
    "pc": Sampler(
        "confidence calibrated by the token's frequency in ordinary text, earlier positions first (PC-Sampler)",
        score=score_calibrated,
        score_arguments={"decay": 0.25, "background": None},
    ),
    "threshold": Sampler(
        "all with a probability of at least tau (Fast-dLLM)",
        select=select_above_threshold,
        select_arguments={"tau": 0.9},
        pace="adaptive",
    ),
    "dynamic": Sampler(
        "all with a probability above tau, at least as many as the schedule says; may overwrite them (LLaDA2, SDAR)",
        select=select_confident,
        select_arguments={"tau": 0.95},
        editing_arguments={"editing": None, "extra_steps": 16},
        pace="minimum",
    ),
    "factor": Sampler(
        "more at once the more confident they are (Fast-dLLM)",
        select=select_by_factor,
        select_arguments={"factor": 1.0},
        pace="adaptive",
    ),
    "eb": Sampler(
        "as many as a bound on their joint entropy allows (EB-Sampler)",
        select=select_by_entropy_bound,
        score=score_negative_entropy,
        select_arguments={"gamma": 0.01},
        pace="adaptive",
    ),
    "klass": Sampler(
        "all that are confident and stable, else by confidence (KLASS)",
        select=select_stable,
        select_arguments={"confidence": 0.6, "kl": 0.015, "history": 2},
        pace="fallback",
    ),
}


def _rank_scores(score: Tensor) -> Tensor:
    """Rank the positions of each row: 0 is the best; equal scores go by position."""
    order = score.sort(dim=-1, descending=True, stable=True).indices
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )


def _select_longest_prefix(candidates: StepCandidates, is_allowed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Select the best n of each row: the largest n with `is_allowed(sorted scores, m)` for all m ≤ n, at least one."""
    best = candidates.score.sort(dim=-1, descending=True, stable=True).values
    n = torch.arange(1, best.shape[1] + 1, device=best.device)
    count = is_allowed(best, n).long().cumprod(-1).sum(-1).clamp_min(1)
    return (_rank_scores(candidates.score) < count[:, None]) & candidates.eligible


def load_token_counts(path: str | None) -> dict[int, float]:
    """Load how often tokens occur in ordinary text from a JSON file {token id: count}.

    PC-Sampler's own files, {"num_token": …, "p_baseline_dict": {…}}, are accepted too.
    """
    if not isinstance(path, str):
        raise UserError(
            "sampler 'pc' needs a table of token counts in ordinary text, a JSON file {token id: count}:"
            ' pc(background="counts.json")'
        )
    try:
        table = json.loads(Path(path).read_bytes())
        counts = {int(token): float(count) for token, count in table.get("p_baseline_dict", table).items()}
    except OSError as error:
        raise UserError(f"cannot read the token counts {path}: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{path} is not a valid table of token counts; expected {{token id: count}}: {error}"
        ) from error
    if not counts or min(counts) < 0 or not all(0 < count < math.inf for count in counts.values()):
        raise UserError(f"{path} has no counts, or counts that are not above 0; leave such tokens out")
    return counts


@cache
def _load_surprisal(path: str, modified: int, vocabulary: int) -> Tensor:
    """−log f of every token; a token that is missing from the table counts as one occurrence."""
    counts = load_token_counts(path)
    if max(counts) >= vocabulary:
        raise UserError(
            f"{path} counts token {max(counts)}, but the model has {vocabulary} tokens; use its own tokenizer's counts"
        )
    occurrences = torch.ones(vocabulary, dtype=torch.float64)
    occurrences[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.float64)
    return -(occurrences / sum(counts.values()) + 1e-9).log().float()
