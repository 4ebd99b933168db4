"""How large a run will be, exactly, before it starts; and what to type if that is too large.

Bytes are counted from the same tables the recorder stores by, so a forecast equals the arrays it foretells. Every field
but `matrix` grows evenly with the number of keys: for texts of different lengths, give the mean.

    size = forecast(keep="heads", samples=100, steps=32, layers=32, heads=32, keys=800, regions=8, commits=32)
    print(size)                # a table, field by field
    size.check("8GiB")         # UserError: … Use keep="summary" (5.95 GiB), or …
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from floatscope.errors import UserError
from floatscope.files.sizes import format_size, parse_size
from floatscope.schema import FIELDS, GROUPS, LEVELS, RANKS, check_fields, fields_at_level
from floatscope.traces.layout import COORDS, OPTIONAL_FIELDS, TRACE_FIELDS, stored_axes

BUDGET = 8 * 1024**3


def forecast(
    *,
    keep: str | None = None,
    fields: tuple[str, ...] | None = None,
    samples: int,
    steps: int,
    layers: int,
    heads: int,
    keys: int,
    regions: int,
    commits: int,
    queries: int | None = None,
    groups: int = len(GROUPS),
    visibilities: int = 1,
    positions: int | None = None,
    influence: bool = False,
) -> Forecast:
    """The size of a run that keeps a level (default `summary`) or the named `fields`.

    `keys` is the widest canvas a forward sees, `commits` the tokens written per sample, `queries` the most rows watched
    at a step (default: all keys), `positions` the canvas after the last step (default: `keys`; one more if it grew),
    `influence` whether it is kept too.
    """
    if keep is not None and fields is not None:
        raise UserError(f'give keep="{keep}" or the fields ({", ".join(fields)}), not both')
    level = None if fields is not None else keep or "summary"
    names = check_fields(tuple(fields)) if fields is not None else fields_at_level(keep or "summary")
    sizes = {axis: len(along) for axis, along in COORDS.items()}
    sizes |= {"step": steps, "layer": layers, "head": heads, "group": groups, "key": keys, "rank": RANKS}
    sizes |= {"region": regions, "key_region": regions, "commit": commits, "visibility": visibilities}
    sizes |= {"query": keys if queries is None else queries, "position": keys if positions is None else positions}
    for axis, size in {"sample": samples, **sizes}.items():
        if size < 0:
            raise UserError(f"a run cannot have {size} {axis}s; give 0 or more")
    return Forecast(level, names, samples, sizes, influence)


@dataclass(frozen=True)
class Forecast:
    """Bytes of a run's arrays. `sizes` gives the length of each axis; a file adds a few kilobytes of names to them."""

    keep: str | None
    names: tuple[str, ...]
    samples: int
    sizes: Mapping[str, int]
    influence: bool = False

    @property
    def bytes(self) -> dict[str, int]:
        """Field → bytes over all samples; the trace's own arrays (tokens, states, commits, …) among them."""
        return {
            name: self.samples * math.prod(size for _, size in shape) * np.dtype(dtype).itemsize
            for name, dtype, shape in self._arrays()
        }

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def check(self, budget: int | str = BUDGET) -> None:
        """Refuse a run that does not fit, naming the setting that would."""
        limit = parse_size(budget)
        if self.total <= limit:
            return
        what = f'keep="{self.keep}"' if self.keep else f"fields {', '.join(self.names)}"
        largest = max(self.bytes, key=self.bytes.__getitem__)
        raise UserError(
            f"{what} needs {format_size(self.total)} for {self.samples} samples, most of it '{largest}'; the budget "
            f"is {format_size(limit)}. {self._remedy(limit)}"
        )

    def __str__(self) -> str:
        """A table with a line per field, largest first; the small arrays every trace has are one line."""
        lines = [("field", "axes", "type", "a sample", f"{self.samples} samples")]
        each, own = self.bytes, 0
        for name, dtype, shape in sorted(self._arrays(), key=lambda a: -each[a[0]]):
            if name in TRACE_FIELDS:
                own += each[name]
                continue
            axes = " × ".join(f"{axis} {size}" for axis, size in shape)
            lines.append((name, axes, dtype, format_size(each[name] // max(self.samples, 1)), format_size(each[name])))
        share = max(self.samples, 1)
        lines.append(("canvas", "tokens, states, commits, …", "", format_size(own // share), format_size(own)))
        lines.append(("total", "", "", format_size(self.total // share), format_size(self.total)))
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        return "\n".join(
            "  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        )

    def _arrays(self) -> Iterator[tuple[str, str, list[tuple[str, int]]]]:
        """(name, type, [(axis, length), …]) of every array of one sample."""
        for name, f in TRACE_FIELDS.items():
            yield name, f.dtype, [(axis, self.sizes[axis]) for axis in f.axes]
        for name in self.names:
            axes = stored_axes(name, FIELDS[name].axes)
            yield name, FIELDS[name].dtype, [(axis, self.sizes[axis]) for axis in axes]
        for name, f in OPTIONAL_FIELDS.items() if self.influence else ():
            yield name, f.dtype, [(axis, self.sizes[axis]) for axis in f.axes]

    def _remedy(self, limit: int) -> str:
        """The gentlest change that fits: a lower keep level, else fewer samples, else fewer steps, else a budget."""
        lower = [self._at(level) for level in reversed(LEVELS[: LEVELS.index(self.keep)])] if self.keep else []
        raised = f"raise the budget, budget={math.ceil(self.total / 1024**3)}GiB"
        for other in lower:
            if other.total <= limit:
                return f'Use keep="{other.keep}" ({format_size(other.total)}), or {raised}'
        fits = [(other, limit // replace(other, samples=1).total) for other in (self, *lower)]
        fits = [(other, samples) for other, samples in fits if samples >= 1]
        if fits:
            choices = (f'keep="{o.keep}" with samples={n}' if o is not self else f"samples={n}" for o, n in fits)
            return f"Use {', or '.join(choices)}, or {raised}"
        least = replace(lower[-1] if lower else self, samples=1)
        steps = least._steps_within(limit)
        if steps:
            level = f'keep="{least.keep}", ' if least.keep != self.keep else ""
            return f"Not even one sample fits: use {level}samples=1 and steps={steps}, or {raised}"
        return f"Not even one step of one sample fits: {raised}"

    def _at(self, level: str) -> Forecast:
        return replace(self, keep=level, names=fields_at_level(level))

    def _steps_within(self, limit: int) -> int:
        """The most steps that fit; size is a constant plus an equal part for each step."""
        without = replace(self, sizes={**self.sizes, "step": 0}).total
        return max(0, limit - without) * self.sizes["step"] // max(1, self.total - without)
