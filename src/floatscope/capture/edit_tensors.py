"""The edits of an intervention as tensors of one attention call.

    bias          numbers added to the scores of keys, per head, in the selected rows; -inf hides a key from every row
                  except its own, so that no row is ever empty
    sink          an extra key with this score and a value of zero
    move          the mass a row gives to one key goes to another key that it sees, or is spread over all keys it sees
    silent_heads  heads whose output is zero

They apply in this order: scores are biased, the softmax includes the sink, mass moves, heads are silenced. All of it is
exact and never builds a [T, T] matrix. `edited_attention.attend_with_edits` runs a call with its edits:

    edits = EditTensors(biases=(BiasTensors(torch.full((1, 1, 512), 2.0)),))
    attend_with_edits(replace(call, edits=edits))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.capture.visibility import HIDDEN_SCORE

NO_KEY = -1
"""Marks a rank without a key."""


@dataclass(frozen=True)
class BiasTensors:
    """Numbers to add to the scores of keys; `h` is the number of heads, or 1 for all heads."""

    keys: Float[Tensor, "batch h key"]
    queries: Bool[Tensor, "batch query"] | None = None  # the rows that get it; None: every row
    hides_keys: bool = False  # `keys` contains -inf


@dataclass(frozen=True)
class MoveTensors:
    """Mass to move from each source to its target, rank by rank."""

    source: Int[Tensor, "batch head rank"]  # distinct within a head, or NO_KEY
    target: Int[Tensor, "batch head rank"] | None = None  # None: spread over all keys the row sees
    queries: Bool[Tensor, "batch query"] | None = None  # the rows whose mass moves; None: every row


@dataclass(frozen=True)
class EditTensors:
    """All edits of one attention call."""

    biases: tuple[BiasTensors, ...] = ()
    sink: Float[Tensor, " head"] | None = None  # -inf: no sink in this head
    moves: tuple[MoveTensors, ...] = ()
    silent_heads: Bool[Tensor, " head"] | None = None

    @property
    def changes_attention(self) -> bool:
        """Whether the attention matrix changes. Silent heads attend as before."""
        return bool(self.biases or self.moves or self.sink is not None)

    def crop(self, b: int, rows: slice, keys: slice) -> EditTensors:
        """The edits of sample `b`, restricted to these query rows and keys."""
        one = slice(b, b + 1)
        biases = tuple(
            replace(x, keys=x.keys[one, :, keys], queries=_slice_queries(x.queries, one, rows)) for x in self.biases
        )
        moves = tuple(
            MoveTensors(
                _shift_keys(x.source[one], keys),
                None if x.target is None else _shift_keys(x.target[one], keys),
                _slice_queries(x.queries, one, rows),
            )
            for x in self.moves
        )
        return replace(self, biases=biases, moves=moves)

    def rows_from(self, first: int) -> EditTensors:
        """The edits of the query rows from `first` on."""
        batch, later = slice(None), slice(first, None)
        return replace(
            self,
            biases=tuple(replace(x, queries=_slice_queries(x.queries, batch, later)) for x in self.biases),
            moves=tuple(replace(x, queries=_slice_queries(x.queries, batch, later)) for x in self.moves),
        )

    def add_biases(
        self,
        scores: Float[Tensor, "head row key"],
        rows: Int[Tensor, " row"],
        keys: slice,
        own_keys: Int[Tensor, " row"],
        unit: float = 1.0,
        heads: slice = slice(None),
        b: int | Int[Tensor, " row"] = 0,
    ) -> None:
        """Add the biases to a block of scores, in place.

        rows      the query index of each row of the block
        keys      the keys of the block
        own_keys  the key index at which each row stands; a bias never hides it from that row
        unit      the factor of the scores (log2 e where they are in base 2)
        b         the sample of the block, or the sample of each row
        """
        own = (own_keys - keys.start)[None, :, None].expand(len(scores), -1, 1)
        is_inside = (own >= 0) & (own < scores.shape[-1])
        own = own.clamp(0, scores.shape[-1] - 1)
        for bias in self.biases:
            number = (_select(bias.keys, b, heads)[..., keys] * unit).clamp_min(HIDDEN_SCORE)  # [h, row|1, key]
            selected = None if bias.queries is None else bias.queries[b, rows, None].to(scores.dtype)
            before = scores.gather(-1, own) if bias.hides_keys else None
            if selected is None:
                scores += number
            else:
                scores.addcmul_(selected, number)
            if before is not None:
                is_hidden = number.expand(len(scores), scores.shape[1], -1).gather(-1, own) <= HIDDEN_SCORE
                scores.scatter_(-1, own, torch.where(is_hidden & is_inside, before, scores.gather(-1, own)))

    def move_mass(
        self,
        p: Float[Tensor, "head row key"],
        rows: Int[Tensor, " row"],
        keys: slice,
        visible: Bool[Tensor, "h row key"] | None,
        heads: slice = slice(None),
        b: int | Int[Tensor, " row"] = 0,
    ) -> None:
        """Move probability mass within a block, in place; `visible` says which keys a row sees (None: all).

        The other arguments are those of `add_biases`.
        """
        # All masses are read before any of them moves.
        masses = [self._read_mass(move, p, rows, keys, visible, heads, b) for move in self.moves]
        for move, (mass, source) in zip(self.moves, masses, strict=True):
            p.scatter_add_(-1, source, -mass)
            if move.target is None:
                total = mass.sum(-1, keepdim=True)
                if visible is None:
                    p += total / p.shape[-1]
                else:
                    p += total * visible / visible.sum(-1, keepdim=True).clamp_min(1)
            else:
                target = (_select(move.target, b, heads) - keys.start).clamp(0, p.shape[-1] - 1)
                p.scatter_add_(-1, target.expand_as(mass), mass)

    def _read_mass(
        self,
        move: MoveTensors,
        p: Tensor,
        rows: Tensor,
        keys: slice,
        visible: Tensor | None,
        heads: slice,
        b: int | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The mass that leaves each source, [head, row, rank], and the index of the source in `p`."""
        width = p.shape[-1]
        source = _select(move.source, b, heads) - keys.start  # [head, row|1, rank]
        moves = (source >= 0) & (source < width)
        if move.target is not None:
            target = _select(move.target, b, heads) - keys.start
            moves = moves & (target >= 0) & (target < width)
        source = source.clamp(0, width - 1).expand(-1, p.shape[1], -1)
        mass = p.gather(-1, source) * moves
        if move.target is not None and visible is not None:
            index = target.clamp(0, width - 1).expand_as(source)
            mass = mass * visible.expand(len(p), -1, -1).gather(-1, index)
        if move.queries is not None:
            mass = mass * move.queries[b, rows, None]
        return mass, source

    def share_beside_sink(self, lse: Float[Tensor, "*batch head row"], heads: slice = slice(None)) -> Tensor | None:
        """The share of each row that the sink leaves to the real keys; None without a sink."""
        if self.sink is None:
            return None
        sink = self.sink[heads, None]
        return torch.where(sink > -torch.inf, torch.sigmoid(lse - sink), 1.0)


def _slice_queries(queries: Tensor | None, samples: slice, rows: slice) -> Tensor | None:
    return None if queries is None else queries[samples, rows]


def _shift_keys(index: Tensor, keys: slice) -> Tensor:
    """Key indices counted from the start of `keys`; NO_KEY outside of it."""
    shifted: Tensor = index - keys.start
    return shifted.masked_fill((shifted < 0) | (shifted >= keys.stop - keys.start), NO_KEY)


def _select(x: Tensor, b: int | Tensor, heads: slice) -> Tensor:
    """Select the sample of the block, or of each row, and the heads: [h, row|1, …]; a head axis of 1 stays."""
    own = x[b].transpose(0, 1) if isinstance(b, Tensor) else x[b][:, None]
    return own if len(own) == 1 else own[heads]
