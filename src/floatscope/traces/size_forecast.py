"""The exact size of a run before it starts, and what to change if it is too large.

Bytes are counted from the tables the recorder uses, so a forecast equals the arrays that the run will store. Every
field except `matrix` grows linearly with the number of keys: for texts of different lengths, give the mean.

    size = forecast(level="heads", samples=100, steps=32, layers=32, heads=32, keys=800, regions=8, commits=32)
    print(size)                # a table with a line per field
    size.check("8GiB")         # UserError: … Use level="summary" (5.95 GiB), or …
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from floatscope.errors import UserError
from floatscope.files.sizes import format_size, parse_size
from floatscope.schema import EXPERT_FIELDS, FIELDS, GROUPS, LEVELS, RANKS, check_fields, fields_at_level
from floatscope.traces.trace_fields import COORDS, OPTIONAL_FIELDS, TRACE_FIELDS, stored_axes

DEFAULT_BUDGET = 8 * 1024**3


def forecast(
    *,
    level: str | None = None,
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
    experts: int = 0,
) -> Forecast:
    """Return the size of a run that stores a level (default "summary") or the named `fields`.

    Args:
        samples, steps, layers, heads, regions: their numbers.
        keys: the width of the widest canvas that a forward sees.
        commits: tokens written per sample.
        queries: the most rows watched at a step; default: all keys.
        groups: query groups.
        visibilities: attention masks that differ between layers.
        positions: the length of the canvas after the last step; default: `keys`; one more if the canvas grew.
        influence: whether the influence is stored too.
        experts: the experts of a token, if they are stored too.

    Returns:
        The size, field by field: `size.total`, `print(size)`, `size.check("1GiB")`.

    Example:
        size = fs.forecast(samples=3, steps=16, layers=8, heads=8, keys=40, regions=0, commits=16)
        print(size)
        size.check("1GiB")
    """
    if level is not None and fields is not None:
        raise UserError(f'give level="{level}" or the fields ({", ".join(fields)}), not both')
    level = None if fields is not None else level or "summary"
    field_names = check_fields(tuple(fields)) if fields is not None else fields_at_level(level or "summary")
    if experts:
        field_names = tuple(dict.fromkeys((*field_names, *EXPERT_FIELDS)))
    sizes = {axis: len(names) for axis, names in COORDS.items()}
    sizes |= {"step": steps, "layer": layers, "head": heads, "group": groups, "key": keys, "rank": RANKS}
    sizes |= {"region": regions, "key_region": regions, "commit": commits, "visibility": visibilities}
    sizes |= {"expert_rank": experts}
    sizes |= {"query": keys if queries is None else queries, "position": keys if positions is None else positions}
    for axis, size in {"sample": samples, **sizes}.items():
        if size < 0:
            raise UserError(f"a run cannot have {size} {axis}s; give 0 or more")
    return Forecast(level, field_names, samples, sizes, influence)


@dataclass(frozen=True)
class Forecast:
    """The bytes of a run's arrays. `sizes` gives the length of each axis; a file adds a few kilobytes of metadata."""

    level: str | None
    names: tuple[str, ...]
    samples: int
    sizes: Mapping[str, int]
    influence: bool = False

    @property
    def bytes(self) -> dict[str, int]:
        """Field → bytes over all samples, including the arrays of the canvas (tokens, states, commits, …)."""
        return {
            name: self.samples * math.prod(size for _, size in shape) * np.dtype(dtype).itemsize
            for name, dtype, shape in self._arrays()
        }

    @property
    def total(self) -> int:
        """All bytes of the run."""
        return sum(self.bytes.values())

    def check(self, budget: int | str = DEFAULT_BUDGET) -> None:
        """Raise a `UserError` if the run does not fit the budget, with a setting that does."""
        limit = parse_size(budget)
        if self.total <= limit:
            return
        setting = f'level="{self.level}"' if self.level else f"fields {', '.join(self.names)}"
        largest = max(self.bytes, key=self.bytes.__getitem__)
        raise UserError(
            f"{setting} needs {format_size(self.total)} for {self.samples} samples, most of it '{largest}'; the budget "
            f"is {format_size(limit)}. {self._remedy(limit)}"
        )

    def __str__(self) -> str:
        """A table with a line per field, largest first; the arrays of the canvas share one line."""
        lines = [("field", "axes", "type", "per sample", f"{self.samples} samples")]
        sizes, canvas, share = self.bytes, 0, max(self.samples, 1)
        for name, dtype, shape in sorted(self._arrays(), key=lambda a: -sizes[a[0]]):
            if name in TRACE_FIELDS:
                canvas += sizes[name]
                continue
            axes = " × ".join(f"{axis} {size}" for axis, size in shape)
            lines.append((name, axes, dtype, format_size(sizes[name] // share), format_size(sizes[name])))
        lines.append(("canvas", "tokens, states, commits, …", "", format_size(canvas // share), format_size(canvas)))
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
        """The smallest change that fits: a lower level, else fewer samples, else fewer steps, else a larger budget."""
        lower_levels = LEVELS[: LEVELS.index(self.level)] if self.level else ()
        lower = [self._with_level(level) for level in reversed(lower_levels)]
        raised = f"raise the budget, budget={math.ceil(self.total / 1024**3)}GiB"
        for other in lower:
            if other.total <= limit:
                return f'Use level="{other.level}" ({format_size(other.total)}), or {raised}'
        fits = [(other, limit // replace(other, samples=1).total) for other in (self, *lower)]
        fits = [(other, samples) for other, samples in fits if samples >= 1]
        if fits:
            choices = (f'level="{o.level}" with samples={n}' if o is not self else f"samples={n}" for o, n in fits)
            return f"Use {', or '.join(choices)}, or {raised}"
        smallest = replace(lower[-1] if lower else self, samples=1)
        steps = smallest._max_steps(limit)
        if steps:
            level = f'level="{smallest.level}", ' if smallest.level != self.level else ""
            return f"Not even one sample fits: use {level}samples=1 and steps={steps}, or {raised}"
        return f"Not even one step of one sample fits: {raised}"

    def _with_level(self, level: str) -> Forecast:
        experts = (name for name in self.names if name in EXPERT_FIELDS)
        return replace(self, level=level, names=(*fields_at_level(level), *experts))

    def _max_steps(self, limit: int) -> int:
        """The most steps that fit; the size is a constant plus an equal part per step."""
        constant = replace(self, sizes={**self.sizes, "step": 0}).total
        return max(0, limit - constant) * self.sizes["step"] // max(1, self.total - constant)
