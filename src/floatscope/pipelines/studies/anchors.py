"""Anchors hidden, and anchors held in their place.

sinks(asked, counts=(1, 5))          # the first, the first five; random and mid-rank keys in their place
pin(asked)                           # their mass moved to those of the first step, or of the first layer
"""

from __future__ import annotations

from dataclasses import replace

from floatscope.errors import UserError
from floatscope.interventions.arm import BASELINE, Condition, build_conditions
from floatscope.pipelines.studies.plan import StudyInput, StudyPlan, against, number
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress import points
from floatscope.tasks.stress.point import Choice, whole

MASKED = (1, 5, 10)
PINNED = (1, 5)
DISTRACTORS = 4


def sinks(asked: StudyInput, *, counts: Choice = None, draws: Choice = 3) -> StudyPlan:
    """The k anchors of every head hidden; as many random keys, and as many of middling lift."""
    arms, times = [Condition(BASELINE, value=0.0)], number("draws", draws)
    for k in whole("counts", counts, MASKED, least=1):
        edits, name = f"mask_anchors(k={k})", f"anchors-{k}"
        _, middle = build_conditions(edits, "middle", name=name, value=float(k))
        arms += against(edits, name, ("anchors", "random"), times, k)
        arms.append(replace(middle, name=f"middle-{k}", control_of="", series="middle"))  # not among the random ones
    return StudyPlan({"": list(asked.samples)}, arms, [])


def pin(asked: StudyInput, *, counts: Choice = None, draws: Choice = 1) -> StudyPlan:
    """What the k anchors get goes to those of the first step, or of the first layer; as control, what random keys get.

    The questions are asked as they are, among distractors, and with the gold passage at other places.
    """
    conditions, told = _conditions(asked)
    arms, times = [Condition(BASELINE, value=0.0)], number("draws", draws)
    for k in whole("counts", counts, PINNED, least=1):
        arms += against(f"pin(k={k})", f"step-0-{k}", ("to step 0", "random to step 0"), times, k)
        arms += against(f"pin(k={k}, layer=0)", f"layer-0-{k}", ("to layer 0", "random to layer 0"), times, k)
    return StudyPlan(conditions, arms, told)


def _conditions(asked: StudyInput) -> tuple[dict[str, list[Sample]], list[str]]:
    """The same samples in every condition; a condition that fewer than half of them can take is left out."""
    found: dict[str, dict[str, Sample]] = {"reading": {sample.id: sample for sample in asked.samples}}
    told = []
    for kind, options in (
        ("noise", {"distractors": "counterfactual", "counts": DISTRACTORS, "lengths": "growing"}),
        ("noise", {"distractors": "random", "counts": DISTRACTORS, "lengths": "growing"}),
        ("position", {}),
    ):
        names = [str(options["distractors"])] if options else ["gold-first", "gold-middle", "gold-last"]
        try:
            made = points(kind, asked.samples, seed=asked.seed, **options)
        except UserError as error:
            told.append(f"without {', '.join(names)}: {error}")
            continue
        able, count = len(made[0].samples), len(asked.samples)
        if 2 * able < count:
            told.append(f"without {', '.join(names)}: only {able} of {count} samples can be asked so")
            continue
        placed = [point for point in made if point.value is not None]
        chosen = placed if options else [placed[0], placed[len(placed) // 2], placed[-1]]
        for name, point in zip(names, chosen, strict=True):
            found[name] = {sample.id: sample for sample in point.samples}
    shared = [sample.id for sample in asked.samples if all(sample.id in some for some in found.values())]
    if not shared:
        raise UserError("no sample can be asked in every condition of pin; give more samples")
    if left := len(asked.samples) - len(shared):
        told.append(f"{left} of {len(asked.samples)} samples cannot take part in every condition, so they are in none")
    return {name: [some[id] for id in shared] for name, some in found.items()}, told
