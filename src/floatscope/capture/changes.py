"""What an intervention does to one attention call, as tensors; exact, and never a [T, T] matrix.

    bias    numbers added to the scores of keys, for each head, in the rows that are chosen; −inf hides a key from every
            row but its own, so that no row is ever empty
    sink    an extra key with this score and a value of zero
    move    what a row gives to one key goes to another that it sees, or is spread over all it sees
    silent  heads whose output is zero

In that order: scores are biased, the softmax is taken with the extra key, mass moves, heads fall silent. `attend`
computes it with the model's own kernel: biases are further dimensions of q and k, so that their product is the sum of
both; what a row has of its own hidden key, of the sink and of moved mass is put in afterwards, from its log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.capture.visibility import HIDDEN

NOWHERE = -1
"""No key: a rank for which there is none."""


@dataclass(frozen=True)
class Bias:
    keys: Float[Tensor, "batch h key"]  # h: the heads, or 1 for all of them
    queries: Bool[Tensor, "batch query"] | None = None  # None: every row
    hides: bool = False  # holds -inf


@dataclass(frozen=True)
class Move:
    source: Int[Tensor, "batch head rank"]  # all different in a head, or NOWHERE
    target: Int[Tensor, "batch head rank"] | None = None  # None: over all keys the row sees
    queries: Bool[Tensor, "batch query"] | None = None


@dataclass(frozen=True)
class Changes:
    biases: tuple[Bias, ...] = ()
    sink: Float[Tensor, " head"] | None = None  # -inf: none in this head
    moves: tuple[Move, ...] = ()
    silent: Bool[Tensor, " head"] | None = None

    @property
    def rows_differ(self) -> bool:
        """Whether attention itself is another; silent heads attend as before."""
        return bool(self.biases or self.moves or self.sink is not None)

    def cut(self, b: int, rows: slice, keys: slice) -> Changes:
        """Those of one sample, on the queries and keys that remain of it."""
        one = slice(b, b + 1)
        biases = tuple(replace(x, keys=x.keys[one, :, keys], queries=_some(x.queries, one, rows)) for x in self.biases)
        moves = tuple(
            Move(
                _inside(x.source[one], keys),
                None if x.target is None else _inside(x.target[one], keys),
                _some(x.queries, one, rows),
            )
            for x in self.moves
        )
        return replace(self, biases=biases, moves=moves)

    def rows_from(self, first: int) -> Changes:
        """Those of the queries from `first` on."""
        every, later = slice(None), slice(first, None)
        return replace(
            self,
            biases=tuple(replace(x, queries=_some(x.queries, every, later)) for x in self.biases),
            moves=tuple(replace(x, queries=_some(x.queries, every, later)) for x in self.moves),
        )

    def add_biases(
        self,
        x: Float[Tensor, "head row key"],
        at: Int[Tensor, " row"],
        keys: slice,
        stands: Int[Tensor, " row"],
        unit: float = 1.0,
        heads: slice = slice(None),
        b: int | Int[Tensor, " row"] = 0,
    ) -> None:
        """To the scores of rows `at` on `keys`, in place; row i's own key is `stands[i]`. `unit`: what 1 is there. `b`:
        the sample they are of, or one for each."""
        own = (stands - keys.start)[None, :, None].expand(len(x), -1, 1)
        inside = (own >= 0) & (own < x.shape[-1])
        own = own.clamp(0, x.shape[-1] - 1)
        for bias in self.biases:
            number = (_of(bias.keys, b, heads)[..., keys] * unit).clamp_min(HIDDEN)  # [h, row|1, key]
            chosen = None if bias.queries is None else bias.queries[b, at, None].to(x.dtype)
            before = x.gather(-1, own) if bias.hides else None
            if chosen is None:
                x += number
            else:
                x.addcmul_(chosen, number)
            if before is not None:  # a row's own key is not hidden from it
                hidden = (number.expand(len(x), x.shape[1], -1).gather(-1, own) <= HIDDEN) & inside
                x.scatter_(-1, own, torch.where(hidden, before, x.gather(-1, own)))

    def move_mass(
        self,
        p: Float[Tensor, "head row key"],
        at: Int[Tensor, " row"],
        keys: slice,
        seen: Bool[Tensor, "h row key"] | None,
        heads: slice = slice(None),
        b: int | Int[Tensor, " row"] = 0,
    ) -> None:
        """What rows `at` give to the keys of `keys`, in place; `seen`: which of those they see (None: all)."""
        masses = [self._mass(move, p, at, keys, seen, heads, b) for move in self.moves]  # all of what was there before
        for move, (mass, source) in zip(self.moves, masses, strict=True):
            p.scatter_add_(-1, source, -mass)
            if move.target is None:
                share = mass.sum(-1, keepdim=True)
                p += share / p.shape[-1] if seen is None else share * seen / seen.sum(-1, keepdim=True).clamp_min(1)
            else:
                target = (_of(move.target, b, heads) - keys.start).clamp(0, p.shape[-1] - 1)
                p.scatter_add_(-1, target.expand_as(mass), mass)

    def _mass(
        self, move: Move, p: Tensor, at: Tensor, keys: slice, seen: Tensor | None, heads: slice, b: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """What goes from each source, [head, row, rank], and where that is in `p`."""
        width = p.shape[-1]
        source = _of(move.source, b, heads) - keys.start  # [head, row|1, rank]
        goes = (source >= 0) & (source < width)
        if move.target is not None:
            target = _of(move.target, b, heads) - keys.start
            goes = goes & (target >= 0) & (target < width)
        source = source.clamp(0, width - 1).expand(-1, p.shape[1], -1)
        mass = p.gather(-1, source) * goes
        if move.target is not None and seen is not None:
            place = target.clamp(0, width - 1).expand_as(source)
            mass = mass * seen.expand(len(p), -1, -1).gather(-1, place)
        if move.queries is not None:
            mass = mass * move.queries[b, at, None]
        return mass, source

    def kept(self, lse: Float[Tensor, "*batch head row"], heads: slice = slice(None)) -> Tensor | None:
        """What is left to the keys where an extra one takes its share; None without."""
        if self.sink is None:
            return None
        sink = self.sink[heads, None]
        return torch.where(sink > -torch.inf, torch.sigmoid(lse - sink), 1.0)


def _some(queries: Tensor | None, samples: slice, rows: slice) -> Tensor | None:
    return None if queries is None else queries[samples, rows]


def _inside(at: Tensor, keys: slice) -> Tensor:
    """Counted from the first of `keys`; NOWHERE where it is none of them."""
    there: Tensor = at - keys.start
    return there.masked_fill((there < 0) | (there >= keys.stop - keys.start), NOWHERE)


def _of(x: Tensor, b: int | Tensor, heads: slice) -> Tensor:
    """What is a sample's, or each row's own sample's, [h, row|1, …]; some heads of what may be the same for all."""
    own = x[b].transpose(0, 1) if isinstance(b, Tensor) else x[b][:, None]
    return own if len(own) == 1 else own[heads]
