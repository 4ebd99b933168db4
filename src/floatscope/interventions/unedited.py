"""The attention of a call before its edits: what each key receives, and how much of it an edit moves.

    unedited = UneditedCall(call, spec)              # spec: all rows that are not padding, as one group
    unedited.received()                              # [batch, head, key], summed over rows
    unedited.hidden(queries)                         # the same without the own row of each key
    unedited.moved(source, target, queries)          # [batch]: the mass that a move moves

Nothing of size [T, T] is built: received attention is a reduction, and a move reads a few keys at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.capture.attention import AttentionCall, AttentionResult, full_precision
from floatscope.capture.backends import reduce_attention
from floatscope.capture.edit_tensors import NO_KEY, EditTensors
from floatscope.capture.edited_attention import attend_with_edits
from floatscope.capture.reduction_spec import ReductionSpec

RANKS_AT_ONCE = 64
"""The ranks of a move that are read at a time."""


@dataclass
class UneditedCall:
    """One attention call before its edits. What it computes is stored, so that several edits share it."""

    call: AttentionCall
    spec: ReductionSpec  # one group of all rows that are not padding
    _received: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)  # by the id of `queries`

    def __post_init__(self) -> None:
        self.call = replace(self.call, edits=None)

    @property
    def rows(self) -> Bool[Tensor, "batch query"]:
        """The rows that are not padding."""
        return self.spec.weights[..., 0] > 0

    def reduce(self, spec: ReductionSpec) -> Float[Tensor, "batch head key"]:
        """The attention that each key receives from the group of a spec."""
        with torch.no_grad(), full_precision():
            return reduce_attention(self.call, self._result.lse, spec).received[:, :, 0]

    def received(self, queries: Bool[Tensor, "batch query"] | None = None) -> Float[Tensor, "batch head key"]:
        """The attention that each key receives from the rows of `queries`; None: from all rows."""
        if id(queries) not in self._received:
            spec = self.spec
            if queries is not None:
                spec = ReductionSpec((queries & self.rows)[..., None].float(), is_binary=True)
            self._received[id(queries)] = queries, self.reduce(spec)  # a reference, so that its id is not reused
        return self._received[id(queries)][1]

    def hidden(self, queries: Bool[Tensor, "batch query"] | None = None) -> Float[Tensor, "batch head key"]:
        """What hiding each key moves: the attention it receives, except from its own row."""
        own = self._own if queries is None else self._own * queries[:, None]
        received = self.received(queries).clone()
        first = self.call.visibility.offset
        received[:, :, first : first + own.shape[-1]] -= own
        return received.clamp_min(0.0)

    def moved(
        self,
        source: Int[Tensor, "batch head rank"],
        target: Int[Tensor, "batch head rank"] | None,
        queries: Bool[Tensor, "batch query"] | None = None,
    ) -> Float[Tensor, " batch"]:
        """The mass that goes from each source to its target, summed over rows, heads and ranks.

        A row moves it only if it sees the target; without targets it is spread.
        """
        see, total = self.call.visibility, torch.zeros(len(source), device=source.device, dtype=torch.float64)
        counted = self.rows if queries is None else self.rows & queries
        for start in range(0, source.shape[-1], RANKS_AT_ONCE):
            keys = source[..., start : start + RANKS_AT_ONCE]
            moves = (keys != NO_KEY)[:, :, None] & see.can_see(keys.clamp_min(0)) & counted[:, None, :, None]
            if target is not None:
                to = target[..., start : start + RANKS_AT_ONCE]
                moves = moves & ((to != NO_KEY) & (to != keys))[:, :, None] & see.can_see(to.clamp_min(0))
            mass = (self._scores(keys.clamp_min(0)) - self._lse[..., None]).exp()
            total += torch.where(moves, mass, 0.0).double().sum((1, 2, 3))
        return total

    @cached_property
    def _result(self) -> AttentionResult:
        with torch.no_grad(), full_precision():
            return attend_with_edits(self.call)

    @cached_property
    def _lse(self) -> Float[Tensor, "batch head query"]:
        """The log-sum-exp of each row, also where the kernel does not return it."""
        if self._result.lse is not None:
            return self._result.lse.float()
        with torch.no_grad(), full_precision():
            lse = attend_with_edits(replace(self.call, edits=EditTensors())).lse
        assert lse is not None
        return lse.float()

    @cached_property
    def _own(self) -> Float[Tensor, "batch head query"]:
        """The attention of each row to the key at its own position."""
        call, see = self.call, self.call.visibility
        keys = slice(see.offset, see.offset + see.queries)
        key = call.key[:, :, keys].repeat_interleave(call.repeats, 1).float()
        score = (call.query.float() * key).sum(-1) * call.scaling
        if see.mask is not None and see.mask.is_floating_point():
            score = score + see.mask[:, :, :, keys].diagonal(dim1=-2, dim2=-1).float()
        if (sees_own := see.can_see_own_key(score.device)) is not None:
            score = score.masked_fill(~sees_own, -torch.inf)
        return (score - self._lse).exp() * self.rows[:, None]

    def _scores(self, keys: Int[Tensor, "batch head rank"]) -> Float[Tensor, "batch head query rank"]:
        """The scores of every row for a few keys of each head."""
        call, mask = self.call, self.call.visibility.mask
        key = call.key.repeat_interleave(call.repeats, 1)
        key = key.gather(2, keys[..., None].expand(*keys.shape, key.shape[-1])).float()
        with full_precision():
            scores: Tensor = call.query.float() @ key.mT * call.scaling
        if mask is not None and mask.is_floating_point():
            index = keys[:, :, None].expand(-1, -1, scores.shape[2], -1)
            scores = scores + mask.expand(*scores.shape[:3], -1).gather(-1, index).float()
        return scores
