"""What a step's layers have in common: prepared once per visibility, read by every layer that has it.

Most layers share one mask, so group weights, expectations under uniform attention and region membership are made when
the first of them is met; a layer then adds a handful of kernel launches of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.canvas import CanvasState, Commits, Groups
from floatscope.capture.ask import ReductionSpec, row_mean
from floatscope.capture.columns import Rows
from floatscope.capture.visibility import Visibility
from floatscope.errors import UserError
from floatscope.schema import MIN_VISIBLE_ROWS


@dataclass(frozen=True)
class Expected:
    """Per group and key: what uniform attention would receive (mean scale), and whether a detector may look there."""

    count: Float[Tensor, "batch group"]  # n_g
    uniform: Float[Tensor, "batch group key"]
    seen: Float[Tensor, "batch group key"]
    eligible: Bool[Tensor, "batch group key"]


@dataclass(frozen=True)
class Plan:
    visible: Visibility
    groups: Float[Tensor, "batch query group"]
    ask: ReductionSpec  # columns: the groups, then the regions
    rows: Rows
    first_key: Int[Tensor, " batch"]  # 0, or the first after left padding
    member: Float[Tensor, "batch key region"] | None
    pool: Float[Tensor, "batch region key"] | None  # averages over the positions of a region
    rows_in: Float[Tensor, "batch region"] | None  # query rows in each region

    @cached_property
    def so_far(self) -> Expected:
        """Of the groups that are known before the commits are."""
        return expectation(self.visible, self.groups)

    def expected(self, commits: Commits) -> Expected:
        """Of all four groups, now that the predicting rows are known (none: an empty group)."""
        g, see = self.so_far, self.visible
        if not len(commits):
            pads = {"uniform": torch.nan, "seen": 0, "eligible": False}
            more_of = {name: F.pad(getattr(g, name), (0, 0, 0, 1), value=value) for name, value in pads.items()}
            return Expected(F.pad(g.count, (0, 1)), **more_of)
        weights = torch.zeros_like(self.groups[..., :1])
        sample, row = commits.sample.to(weights.device), commits.row.to(weights.device)
        at = (sample, row - (see.keys - see.queries), torch.zeros_like(row))
        weights.index_put_(at, weights.new_ones(()), accumulate=True)  # a row that decided two commits counts twice
        more = expectation(see, weights)
        return Expected(
            torch.cat([g.count, more.count], 1),
            torch.cat([g.uniform, more.uniform], 1),
            torch.cat([g.seen, more.seen], 1),
            torch.cat([g.eligible, more.eligible], 1),
        )


def plan_for(see: Visibility, canvas: CanvasState, *, regions: bool, entropy: bool) -> Plan:
    if see.differs_by_head:
        raise UserError(
            "the attention mask shows other keys to other heads, so that uniform attention and lift differ by head too,"
            " which is not captured; use one mask for all heads, or an additive bias that hides the same keys"
        )
    first = see.keys - see.queries  # the query rows are the last positions of the canvas
    valid = canvas.valid[:, first:]
    weights = Groups.from_canvas(canvas).weights[:, first:]
    if see.kind in ("mask", "rule"):  # a row that sees nothing has no attention to count
        sees = (see.seen_keys(weights.device) > 0).any(1)
        valid, weights = valid & sees, weights * sees[..., None]
    counted = canvas.valid.clone()
    counted[:, first:] = valid
    member = pool = rows_in = None
    columns = [weights]
    if regions and canvas.regions.member is not None:
        inside = canvas.regions.member.to(weights.device) & counted[..., None]
        member = inside.float()
        pool = member.transpose(1, 2) / member.sum(1)[..., None]
        rows_in = member[:, first:].sum(1)
        columns.append(member[:, first:])
    e = None
    if entropy:
        e = row_mean(valid, see.seen_keys(weights.device).mean(1).expand(len(valid), -1))
    ask = ReductionSpec(torch.cat(columns, -1).contiguous(), e, memberships=True)
    return Plan(see, weights, ask, Rows.of(valid), canvas.valid.int().argmax(-1), member, pool, rows_in)


def expectation(see: Visibility, weights: Float[Tensor, "batch query group"]) -> Expected:
    """A key is eligible if min(16, n_g) rows of the group see it. An empty group expects NaN: it has no rows."""
    count = weights.sum(1)
    seen = see.column_sum(weights).mean(1).transpose(1, 2)
    need = count.clamp(1, MIN_VISIBLE_ROWS)[..., None]
    return Expected(count, see.uniform(weights) / count[..., None], seen, seen >= need)


def same(a: Visibility, b: Visibility) -> bool:
    """Whether two layers may share a plan. Masks and rules are compared by identity: telling them apart costs T²."""
    if a is b:
        return True
    plain = all(v.mask is None and v.rule is None and v.valid is None for v in (a, b))
    return plain and a == b
