"""Which masked positions a step commits: one table, a row per published rule.

    rule = SAMPLERS["threshold"]
    rule.score(...)                       # one number per candidate, from its distribution
    rule.pick(look, tau=0.9)              # [batch, position]: what to commit

A candidate is a masked position of the block being filled. A rule's *pace* is the `schedule`'s, or its `own` (at least
one a step), or its own with the schedule as `fallback`. Ties go to the earlier position.
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

LARGEST_SURPRISE = 10.0  # PC-Sampler clips its calibrated confidence here


@dataclass(frozen=True)
class Candidates:
    """Masked positions a step may commit, with their distributions and the token each would become."""

    log_p: Float[Tensor, "candidate vocabulary"]
    token: Int[Tensor, " candidate"]
    offset: Int[Tensor, " candidate"]  # from the start of the block

    @property
    def probability(self) -> Float[Tensor, " candidate"]:
        return self.log_p.gather(-1, self.token[:, None])[:, 0].exp()


@dataclass(frozen=True)
class StepCandidates:
    """All candidates of a step at their places; `score` is −inf elsewhere."""

    eligible: Bool[Tensor, "batch position"]
    score: Float[Tensor, "batch position"]
    share: Int[Tensor, " batch"]  # how many the schedule commits
    chance: Float[Tensor, " batch"]  # the part of the masks that the step's time uncovers
    steps_done: Int[Tensor, " batch"]  # inside the block
    uniform: Float[Tensor, "batch position"]
    drift: Float[Tensor, "batch position"]  # largest KL(now ‖ the step before) over the steps a rule looks back


Score = Callable[..., Tensor]
Pick = Callable[..., Tensor]


def probability(these: Candidates) -> Tensor:
    return these.probability


def margin(these: Candidates) -> Tensor:
    """p₁ − p₂."""
    first, second = these.log_p.topk(2, dim=-1).values.exp().unbind(-1)
    return first - second


def negative_entropy(these: Candidates) -> Tensor:
    """Σ p log p; a token that was filtered out (log p = −inf) adds nothing."""
    entropy: Tensor = torch.special.entr(these.log_p.exp()).sum(-1)
    return -entropy


def calibrated(these: Candidates, decay: float, background: str) -> Tensor:
    """−p·log f, f the token's frequency in ordinary text, falling with the distance from the block's start."""
    table = _surprise(background, Path(background).stat().st_mtime_ns, these.log_p.shape[-1])
    surprise = table.to(these.log_p.device)[these.token]
    return (these.probability * surprise).clamp_max(LARGEST_SURPRISE) * (-decay * these.offset).exp()


def top(look: StepCandidates) -> Tensor:
    """The `share` best."""
    return (_rank(look.score) < look.share[:, None]) & look.eligible


def by_chance(look: StepCandidates) -> Tensor:
    """Each on its own, with the step's probability."""
    return (look.uniform < look.chance[:, None]) & look.eligible


def at_least(look: StepCandidates, tau: float) -> Tensor:
    return look.eligible & ((look.score >= tau) | (_rank(look.score) == 0))


def by_factor(look: StepCandidates, factor: float) -> Tensor:
    """The most n for which (n + 1)(1 − c_n) < factor, c_n the n-th largest confidence."""
    return _longest(look, lambda c, n: (n + 1) * (1 - c) < factor)


def bounded(look: StepCandidates, gamma: float) -> Tensor:
    """The most n, by increasing entropy, for which the entropies but for the largest add up to at most gamma."""
    return _longest(look, lambda minus_h, n: (-minus_h).cumsum(-1) + minus_h <= gamma)


def settled(look: StepCandidates, confidence: float, kl: float, history: int) -> Tensor:
    """All that are confident and whose distribution has come to rest; where none is, the `share` best."""
    sure = look.eligible & (look.score > confidence) & (look.drift < kl) & (look.steps_done >= history - 1)[:, None]
    return torch.where(sure.any(-1, keepdim=True), sure, top(look))


@dataclass(frozen=True)
class Rule:
    says: str
    pick: Pick = top
    score: Score = probability
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of pick
    scored_by: Mapping[str, Any] = field(default_factory=dict)  # arguments of score
    pace: str = "schedule"  # schedule | own | fallback


SAMPLERS: dict[str, Rule] = {
    "confidence": Rule("the most probable first (LLaDA low_confidence, Dream maskgit_plus)"),
    "margin": Rule("the largest lead of the first over the second token first (Dream topk_margin)", score=margin),
    "entropy": Rule("the lowest entropy first (Dream entropy)", score=negative_entropy),
    "random": Rule("in random order (LLaDA random)"),
    "origin": Rule("each with the probability the step's time gives (Dream origin)", pick=by_chance),
    "pc": Rule(
        "confidence calibrated by a token's frequency in ordinary text, earlier positions first (PC-Sampler)",
        score=calibrated,
        scored_by={"decay": 0.25, "background": None},
    ),
    "threshold": Rule("all at least tau probable (Fast-dLLM)", pick=at_least, arguments={"tau": 0.9}, pace="own"),
    "factor": Rule(
        "the more at once the surer they are (Fast-dLLM)", pick=by_factor, arguments={"factor": 1.0}, pace="own"
    ),
    "eb": Rule(
        "as many as a bound on their joint entropy allows (EB-Sampler)",
        pick=bounded,
        score=negative_entropy,
        arguments={"gamma": 0.01},
        pace="own",
    ),
    "klass": Rule(
        "all that are confident and have come to rest, else by confidence (KLASS)",
        pick=settled,
        arguments={"confidence": 0.6, "kl": 0.015, "history": 2},
        pace="fallback",
    ),
}


def _rank(score: Tensor) -> Tensor:
    """0 for the best of a row, 1 for the next, …; equal scores by position."""
    order = score.sort(dim=-1, descending=True, stable=True).indices
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )


def _longest(look: StepCandidates, allowed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The best n of each row, n the largest for which `allowed(sorted scores, n)` holds from 1 to n; at least one."""
    best = look.score.sort(dim=-1, descending=True, stable=True).values
    n = torch.arange(1, best.shape[1] + 1, device=best.device)
    count = allowed(best, n).long().cumprod(-1).sum(-1).clamp_min(1)
    return (_rank(look.score) < count[:, None]) & look.eligible


def token_counts(path: str | None) -> dict[int, float]:
    """How often tokens occur in ordinary text, from a JSON file {token id: count}.

    PC-Sampler's own files, {"num_token": …, "p_baseline_dict": {…}}, are read too.
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
        raise UserError(f"{path} is no table of token counts ({{token id: count}}): {error}") from error
    if not counts or min(counts) < 0 or not all(0 < count < math.inf for count in counts.values()):
        raise UserError(f"{path} has no counts, or some that are not above 0; leave such tokens out")
    return counts


@cache
def _surprise(path: str, changed: int, vocabulary: int) -> Tensor:
    """−log f of every token; one the table does not name counts as seen once."""
    counts = token_counts(path)
    if max(counts) >= vocabulary:
        raise UserError(f"{path} counts token {max(counts)}, and the model has {vocabulary}: it is another tokenizer's")
    seen = torch.ones(vocabulary, dtype=torch.float64)
    seen[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.float64)
    return -(seen / sum(counts.values()) + 1e-9).log().float()
