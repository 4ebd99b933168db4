"""Heads without their output: those that retrieve against others of their layers, and every one alone.

heads(asked, counts=(2, 5))          # found on the first samples, zeroed while the others are asked
dormant(asked)                       # an arm for each head of the model
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from floatscope.analysis.look import trace_views
from floatscope.analysis.retrieval import retrieval
from floatscope.capture.watcher import Watch
from floatscope.errors import UserError
from floatscope.interventions.arm import BASELINE, Condition
from floatscope.interventions.checks import shape_of
from floatscope.interventions.recipes import parse_edits
from floatscope.pipelines.studies.plan import StudyInput, StudyPlan, against, number
from floatscope.pipelines.trace import plan_trace
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress.point import Choice, chosen, one, whole
from floatscope.traces import open_run

ZEROED = (2, 5, 10, 20, 50, 100)
FEWEST = 8
"""Samples that heads are found on, or a third of all, if that is more."""
TRACED = "traced"
SCORES = ("wu_set", "wu_count", "active", "mass")

Head = tuple[int, int]  # layer, head


def heads(asked: StudyInput, *, counts: Choice = None, draws: Choice = 3, score: Choice = "wu_set") -> StudyPlan:
    """The K heads that retrieve most, zeroed; as control as many others of the same layers."""
    wanted, times = whole("counts", counts, ZEROED, least=1), number("draws", draws)
    by = one("score", chosen("score", score, SCORES))
    first, others = _apart(asked.samples)
    ranked = ranked_heads(asked, first, by)
    order = [(layer, head) for layer, head in zip(ranked["layer"], ranked["head"], strict=True)]
    width = max(head for _, head in order) + 1
    told = [f"heads are found on {len(first)} samples, by {by}, and the {len(others)} others are asked"]
    copying = int((ranked[by] > 0).sum())
    able = [k for k in wanted if k <= len(order) and _most(order[:k]) <= width // 2]
    if not able:
        raise UserError(
            f"the first {wanted[0]} heads are more than half of a layer of {asked.model.spec.name}, so that too few are"
            " left for a control; give smaller counts"
        )
    if len(able) < len(wanted):
        rest = ", ".join(str(k) for k in wanted if k not in able)
        told.append(f"without {rest} heads: they would be more than half of a layer, and too few left for a control")
    if copying < able[-1]:
        told.append(f"only {copying} heads have any {by}; behind them stand those with most mass on the evidence")
    arms = [Condition(BASELINE, value=0.0)]
    for k in able:
        pairs, lines = f"zero_heads(pairs={order[:k]})", ("retrieval heads", "random heads")
        arms += against(pairs, f"heads-{k}", lines, times, k, width)
    return StudyPlan({"": others}, arms, told)


def ranked_heads(asked: StudyInput, samples: Sequence[Sample], by: str) -> pd.DataFrame:
    """A row per head, the most retrieving first; of equals that with more mass on the evidence."""
    items = asked.posed(samples)
    prompts = {item.sample.id: item.prompt for item in items}
    settings = {name: value for name, value in asked.settings.items() if name != "prompt"}
    tracing = plan_trace(
        asked.model,
        [item.sample for item in items],
        asked.out / TRACED,
        watch=Watch(fields=("row_key", "row_regions", "uniform")),
        write=lambda sample: prompts[sample.id],
        seed=asked.seed,
        **settings,
    )
    for _ in tracing:
        pass
    table = pd.concat(retrieval(look) for look in trace_views(open_run(tracing.path)))
    scores = list(dict.fromkeys((by, "mass")))
    means = table.groupby(["layer", "head"])[scores].mean().fillna(0.0).reset_index()
    return means.sort_values(scores, ascending=False, kind="stable").astype({"layer": int, "head": int})


def dormant(asked: StudyInput, *, layers: Choice = None) -> StudyPlan:
    """Every head zeroed alone, of all layers or of some."""
    depth, width = shape_of(asked.model)
    if depth is None or width is None:
        raise UserError(f"{asked.model.spec.name} does not tell how many layers and heads it has; see zero_heads")
    arms = [Condition(BASELINE)]
    for layer in whole("layers", layers, range(depth)):
        for head in range(width):
            edits = parse_edits(f"zero_heads(pairs=[({layer}, {head})])")
            arms.append(Condition(f"head-{layer}-{head}", edits, value=float(head), series=f"layer {layer}"))
    return StudyPlan({"": list(asked.samples)}, arms, [])


def _apart(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Those that heads are found on, the first that have evidence, and those that are asked."""
    able = [sample for sample in samples if any(passage.evidence for passage in sample.passages)]
    count = max(FEWEST, len(samples) // 3)
    found = able[:count]
    others = [sample for sample in samples if sample not in found]
    if len(found) < FEWEST or not others:
        raise UserError(
            f"heads are found on {FEWEST} samples with evidence or more and tried on others, and of"
            f" {len(samples)} samples {len(able)} have evidence; give more"
        )
    return found, others


def _most(some: Sequence[Head]) -> int:
    """How many of them are in one layer, at most."""
    return max(Counter(layer for layer, _ in some).values())
