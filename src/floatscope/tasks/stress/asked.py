"""What is done around the samples, which stay as they are: the place of the question, examples, extra masks.

query(source)                       # before, after, both, middle
shots(source, counts=(0, 4))        # shots-0, shots-4; who asks draws the examples
masks(source, counts=(0, 16))       # masks-0, masks-16, filler-0, filler-16
"""

from __future__ import annotations

from floatscope.tasks.stress.draw import Source
from floatscope.tasks.stress.point import Choice, Need, Point, able, chosen, whole

PLACEMENTS = {
    "before": "the question before the passages",
    "after": "the question after the passages",
    "both": "the question before and after the passages",
    "middle": "the question in the middle of the passages",
}
SHOTS = (0, 1, 2, 4, 8)
MASKS = (0, 8, 16, 32, 64, 128)
FILLER = " ."

PASSAGE = Need("a passage", 'give "passages"', lambda sample: bool(sample.passages))
TWO = Need("two passages or more", "choose other placements than middle", lambda sample: len(sample.passages) > 1)


def query(source: Source, *, placements: Choice = None) -> list[Point]:
    """The question at each of its places."""
    names = chosen("placement", placements, PLACEMENTS)
    samples = tuple(able("query", source.samples, [TWO if "middle" in names else PASSAGE]))
    return [Point(name, None, samples, placement=name, series=name, note=PLACEMENTS[name]) for name in names]


def shots(source: Source, *, counts: Choice = None) -> list[Point]:
    """So many answered examples before the question."""
    return [
        Point(f"shots-{count}", count, source.samples, shots=count, series="shots", note=f"{count} examples")
        for count in whole("counts", counts, SHOTS)
    ]


def masks(source: Source, *, counts: Choice = None) -> list[Point]:
    """So many masks more than the answer needs, and as control the filler as often."""
    sizes = whole("counts", counts, MASKS)
    more = [
        Point(f"masks-{n}", n, source.samples, extra_masks=n, series="masks", note=f"{n} extra masks") for n in sizes
    ]
    control = [
        Point(f"filler-{n}", n, source.samples, filler=FILLER * n, series="filler", note=f"{n} × {FILLER!r} for masks")
        for n in sizes
    ]
    return [*more, *control]
