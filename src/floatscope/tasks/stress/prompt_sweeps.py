"""Sweeps that change the prompt and leave the samples as they are: placement of the question, shots, extra masks.

sweep_query(pool)                       # before, after, both, middle
sweep_shots(pool, counts=(0, 4))        # shots-0, shots-4; the shots are drawn when the prompts are built
sweep_masks(pool, counts=(0, 16))       # masks-0, masks-16, filler-0, filler-16
"""

from __future__ import annotations

from floatscope.tasks.stress.options import OptionValue, parse_counts, parse_names
from floatscope.tasks.stress.point import Point
from floatscope.tasks.stress.requirements import HAS_PASSAGE, Requirement, select_samples
from floatscope.tasks.stress.sample_pool import SamplePool

PLACEMENTS = {
    "before": "the question before the passages",
    "after": "the question after the passages",
    "both": "the question before and after the passages",
    "middle": "the question in the middle of the passages",
}
SHOTS = (0, 1, 2, 4, 8)
MASKS = (0, 8, 16, 32, 64, 128)
FILLER = " ."

HAS_TWO_PASSAGES = Requirement(
    "two passages or more", "choose other placements than middle", lambda sample: len(sample.passages) > 1
)


def sweep_query(pool: SamplePool, *, placements: OptionValue = None) -> list[Point]:
    """Place the question before, after, around or between the passages."""
    names = parse_names("placement", placements, PLACEMENTS)
    requirement = HAS_TWO_PASSAGES if "middle" in names else HAS_PASSAGE
    samples = tuple(select_samples("query", pool.samples, [requirement]))
    return [Point(name, None, samples, placement=name, series=name, note=PLACEMENTS[name]) for name in names]


def sweep_shots(pool: SamplePool, *, counts: OptionValue = None) -> list[Point]:
    """Put 0, 1, 2, … solved examples before the question."""
    return [
        Point(f"shots-{count}", count, pool.samples, shots=count, series="shots", note=f"{count} shots")
        for count in parse_counts("counts", counts, SHOTS)
    ]


def sweep_masks(pool: SamplePool, *, counts: OptionValue = None) -> list[Point]:
    """Put extra masks after the answer; as a control, put the filler text there as often."""
    sizes = parse_counts("counts", counts, MASKS)
    masks = [
        Point(f"masks-{n}", n, pool.samples, extra_masks=n, series="masks", note=f"{n} extra masks") for n in sizes
    ]
    controls = [
        Point(f"filler-{n}", n, pool.samples, filler=FILLER * n, series="filler", note=f"{n} × {FILLER!r} for masks")
        for n in sizes
    ]
    return [*masks, *controls]
