"""What the layers of a step have in common, prepared once per visibility.

Most layers share one mask. So the group weights, the received attention under uniform attention and the region
membership are computed for the first layer with a mask; every other layer adds only a few kernel launches.

    plan = build_plan(visibility, canvas, regions=True, entropy=True)
    plan.baseline(commits).uniform                   # [batch, group, key]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.canvas import CanvasState, Commits, Groups
from floatscope.capture.key_stats import QueryRows
from floatscope.capture.reduction_spec import ReductionSpec, entropy_row_weights
from floatscope.capture.visibility import Visibility
from floatscope.errors import UserError
from floatscope.schema import MIN_VISIBLE_ROWS


@dataclass(frozen=True)
class Baseline:
    """Uniform attention per group and key: what lift divides by.

    count         n_g, the number of rows in each group
    uniform       received attention under uniform attention, mean scale
    visible_rows  how many rows of the group see the key
    eligible      whether enough rows see the key for its lift to be ranked
    """

    count: Float[Tensor, "batch group"]
    uniform: Float[Tensor, "batch group key"]
    visible_rows: Float[Tensor, "batch group key"]
    eligible: Bool[Tensor, "batch group key"]


@dataclass(frozen=True)
class Plan:
    """The inputs of the reductions that layers with the same visibility share.

    spec         its columns are the groups, then the regions
    first_key    0, or the first key after left padding
    member       the positions of each region
    pool         averages over the positions of a region
    region_rows  the number of query rows in each region
    """

    visibility: Visibility
    groups: Float[Tensor, "batch query group"]
    spec: ReductionSpec
    rows: QueryRows
    first_key: Int[Tensor, " batch"]
    member: Float[Tensor, "batch key region"] | None
    pool: Float[Tensor, "batch region key"] | None
    region_rows: Float[Tensor, "batch region"] | None

    @cached_property
    def baseline_before_commits(self) -> Baseline:
        """The baseline of the groups that are known before the commits: all but `predicting`."""
        return build_baseline(self.visibility, self.groups)

    def baseline(self, commits: Commits) -> Baseline:
        """The baseline of all four groups, once the predicting rows are known (no commits: an empty group)."""
        known, visibility = self.baseline_before_commits, self.visibility
        if not len(commits):
            fill = {"uniform": torch.nan, "visible_rows": 0, "eligible": False}
            padded = {name: F.pad(getattr(known, name), (0, 0, 0, 1), value=value) for name, value in fill.items()}
            return Baseline(F.pad(known.count, (0, 1)), **padded)
        weights = torch.zeros_like(self.groups[..., :1])
        sample, row = commits.sample.to(weights.device), commits.row.to(weights.device)
        index = (sample, row - (visibility.keys - visibility.queries), torch.zeros_like(row))
        weights.index_put_(index, weights.new_ones(()), accumulate=True)  # a row that decides two commits counts twice
        predicting = build_baseline(visibility, weights)
        return Baseline(
            torch.cat([known.count, predicting.count], 1),
            torch.cat([known.uniform, predicting.uniform], 1),
            torch.cat([known.visible_rows, predicting.visible_rows], 1),
            torch.cat([known.eligible, predicting.eligible], 1),
        )


def build_plan(visibility: Visibility, canvas: CanvasState, *, regions: bool, entropy: bool) -> Plan:
    """Prepare the plan of all layers of a step with this visibility; `regions` and `entropy` say what is needed."""
    if visibility.differs_by_head:
        raise UserError(
            "the attention mask shows different keys to different heads, so uniform attention and lift would differ by"
            " head, which floatscope does not capture; use one mask for all heads, or an additive bias that hides the"
            " same keys in every head"
        )
    first = visibility.keys - visibility.queries  # the query rows are the last positions of the canvas
    valid = canvas.valid[:, first:]
    weights = Groups.from_canvas(canvas).weights[:, first:]
    if not visibility.structure.is_known:  # a row that sees nothing has no attention to count
        sees_keys = (visibility.count_visible_keys(weights.device) > 0).any(1)
        valid, weights = valid & sees_keys, weights * sees_keys[..., None]
    is_counted = canvas.valid.clone()
    is_counted[:, first:] = valid
    member = pool = region_rows = None
    columns = [weights]
    if regions and canvas.regions.member is not None:
        member = (canvas.regions.member.to(weights.device) & is_counted[..., None]).float()
        pool = member.transpose(1, 2) / member.sum(1)[..., None]
        region_rows = member[:, first:].sum(1)
        columns.append(member[:, first:])
    entropy_weights = None
    if entropy:
        visible_keys = visibility.count_visible_keys(weights.device).mean(1).expand(len(valid), -1)
        entropy_weights = entropy_row_weights(valid, visible_keys)
    spec = ReductionSpec(torch.cat(columns, -1).contiguous(), entropy_weights, is_binary=True)
    rows, first_key = QueryRows.from_valid(valid), canvas.valid.int().argmax(-1)
    return Plan(visibility, weights, spec, rows, first_key, member, pool, region_rows)


def build_baseline(visibility: Visibility, weights: Float[Tensor, "batch query group"]) -> Baseline:
    """The baseline of groups. A key is eligible if min(16, n_g) rows of the group see it; an empty group gives NaN."""
    count = weights.sum(1)
    visible_rows = visibility.column_sum(weights).mean(1).transpose(1, 2)
    minimum = count.clamp(1, MIN_VISIBLE_ROWS)[..., None]
    uniform = visibility.uniform_received(weights) / count[..., None]
    return Baseline(count, uniform, visible_rows, visible_rows >= minimum)


def can_share_plan(a: Visibility, b: Visibility) -> bool:
    """Whether two layers may share a plan. Masks and rules are compared by identity: comparing values costs T²."""
    if a is b:
        return True
    has_tensors = any(v.mask is not None or v.rule is not None or v.valid is not None for v in (a, b))
    return not has_tensors and a == b
