"""`study`: experiments with a name. Each plans its samples, conditions and controls, and summarises what it finds.

    table = study("sinks", ["twin:arm", "twin:mdm"], samples, "runs/sinks", new_tokens=8)

    for job in study_jobs("sinks", StudyInput(model, samples, Path("runs/sinks/mdm")), counts=(1, 5)): run_job(job)
    plan = plan_study("sinks", StudyInput(model, samples, Path("runs/sinks/mdm")), counts=(1, 5))
    plan.subsets, plan.conditions, plan.notes        # what `plan_intervention` takes, and what is left out
    STUDIES["sinks"].summarise(table)                # a sentence per model

| study | edits | control |
|---|---|---|
| `sinks` | the k anchors of every head masked, also by type | random keys: equal mass, equal count; middle rank |
| `pin` | attention of anchors moved to those of the first step or layer | the same for random keys |
| `heads` | the K strongest retrieval heads zeroed | as many other heads of the same layers |
| `dormant` | every head zeroed alone | none; heads with no effect on the loss are dormant |
| `blank` | each region of the prompt hidden in turn | as many random positions |
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.experiments import effects
from floatscope.analysis.retrieval_heads import retrieval
from floatscope.analysis.studies import STUDIES
from floatscope.analysis.trace_view import trace_views
from floatscope.capture.watcher import Watch
from floatscope.errors import UserError, unknown_choice
from floatscope.files.atomic import explain_write_errors
from floatscope.interventions.checks import count_layers_and_heads
from floatscope.interventions.conditions import BASELINE, BOTH, Condition, build_conditions
from floatscope.interventions.key_selection import EVIDENCE
from floatscope.interventions.recipes import parse_edits
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.pipelines.folders import model_folders
from floatscope.pipelines.intervene import plan_intervention
from floatscope.pipelines.job import Event, Job, Note, run_job
from floatscope.pipelines.prompting import PromptConfig, PromptItem, build_items
from floatscope.pipelines.trace import plan_trace
from floatscope.reports.page import write_page
from floatscope.reports.study_report import build_study_report
from floatscope.sampling.settings import resolve_sampling
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress import build_points
from floatscope.tasks.stress.options import OptionValue, parse_counts, parse_names, require_one
from floatscope.tasks.template import load_template
from floatscope.traces import open_run

MASK_COUNTS = (1, 5, 10)
PIN_COUNTS = (1, 5)
TYPE_COUNT = 5
"""The number of anchors of which the conditions by type edit some."""
MASK_TYPES = ("first", "structural", "evidence", "all but evidence")
PIN_TYPES = ("structural", "evidence", "all")
NO_TYPES = "none"
READING = "reading"
"""The subset of `pin` with the samples as given."""
PIN_DISTRACTORS = 4
HEAD_COUNTS = (2, 5, 10, 20, 50, 100)
HEAD_SCORES = ("wu_set", "wu_count", "active", "mass")
MIN_HEAD_SAMPLES = 8
"""Retrieval heads are found on at least this many samples, or on a third of all if that is more."""
HEAD_TRACES = "traced"
COMMON_REGIONS = ("bos", "template", "question", "gold", "evidence")

Head = tuple[int, int]  # layer, head


def study(
    name: str,
    models: Model | str | Sequence[Model | str],
    samples: Sequence[Sample],
    out: str | Path,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    on_event: Callable[[Event], None] | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """Run a study on one model or several, and write the effects and the report.

    Args:
        name: sinks, pin, heads, dormant or blank.
        models: Models from `fs.load`, or their names, which are loaded one after the other.
        samples: The questions.
        out: The folder, with a subfolder per model. An interrupted study resumes.
        options: The options of the study, such as `{"counts": (1, 5), "draws": 3}`.
        seed: The seed of whatever is drawn.
        on_event: Called with each event of the jobs (`floatscope.pipelines.job`).
        **settings: The settings of `plan_evaluation`.

    Returns:
        A row per model, subset and condition, as `floatscope.analysis.experiments.effects` defines it.

    Example:
        samples = fs.read_samples("twin:reading-1", limit=2)
        options = {"counts": 1, "draws": 1}
        table = fs.study("sinks", "twin:arm", samples, "runs/sinks", options=options, new_tokens=4)
        table[["condition", "acc", "acc_effect"]]
    """
    check_study(name, options or {})
    listed = [models] if isinstance(models, Model | str) else list(models)
    paths, notes = model_folders(listed, Path(out)), dict[str, list[str]]()
    for entry, path in zip(listed, paths, strict=True):
        model = load(entry) if isinstance(entry, str) else entry
        notes[model.spec.name] = own_notes = list[str]()
        for job in study_jobs(name, StudyInput(model, tuple(samples), path, seed, settings), **(options or {})):
            for event in job:
                own_notes += [event.text] if isinstance(event, Note) else []
                if on_event is not None:
                    on_event(event)
    return write_study_results(name, paths, Path(out), notes)


def write_study_results(
    name: str, paths: Sequence[Path], out: Path, notes: Mapping[str, Sequence[str]]
) -> pd.DataFrame:
    """Write `effects.csv` and `report.html` of a finished study into `out`, and return the effects."""
    table = effects(paths)
    with explain_write_errors("the table", out / "effects.csv"):
        table.to_csv(out / "effects.csv", index=False)
    write_page(build_study_report(name, paths, notes), out / "report.html")
    return table


@dataclass(frozen=True)
class StudyInput:
    """What a study is planned from."""

    model: Model
    samples: tuple[Sample, ...]
    out: Path  # the folder of this model
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # of `plan_evaluation`

    def build_items(self, samples: Sequence[Sample]) -> list[PromptItem]:
        """The samples as the model will read them."""
        settings = self.settings
        given = {name: settings.get(name) for name in ("preset", "sampling", "new_tokens")}
        sampling = resolve_sampling(
            self.model.spec.paradigm,
            block_size=self.model.spec.block_size,
            canvas_size=self.model.spec.canvas_size,
            **given,
        )
        config = PromptConfig(load_template(settings.get("template", "default")))
        return build_items(self.model, samples, config, settings.get("chat"), sampling.new_tokens, self.seed)[0]


@dataclass(frozen=True)
class StudyPlan:
    """The subsets of samples and the conditions of a study."""

    subsets: dict[str, list[Sample]]  # {"": samples} if there is only one
    conditions: list[Condition]  # run on every subset; the first is the baseline
    notes: list[str]  # what is left out


def study_jobs(name: str, study_input: StudyInput, **options: Any) -> Iterator[Job]:
    """Yield the jobs of a study of one model: the traces that its plan needs, if it needs any, and then the study.

    The conditions of the second job follow from the results of the first. So run each job before requesting the next;
    traces that are missing then are made without events.
    """
    check_study(name, options)
    if name in PREPARATIONS:
        yield PREPARATIONS[name](study_input, **options)
    yield plan_study_job(name, study_input, **options)


def plan_study_job(name: str, study_input: StudyInput, **options: Any) -> Job:
    """Plan a study of one model and return the job that runs it; its notes include those of the plan."""
    plan = plan_study(name, study_input, **options)
    job = plan_intervention(
        study_input.model,
        plan.subsets,
        study_input.out,
        plan.conditions,
        title=STUDIES[name].title,
        nll_only=STUDIES[name].nll_only,
        seed=study_input.seed,
        **study_input.settings,
    )
    return replace(job, notes=[*plan.notes, *job.notes])


def plan_study(name: str, study_input: StudyInput, **options: Any) -> StudyPlan:
    """The subsets and conditions of a study. `heads` traces some samples first, into the folder of the input."""
    check_study(name, options)
    if not study_input.samples:
        raise UserError("a study needs samples; give one or more")
    return PLANS[name](study_input, **options)


def check_study(name: str, options: Iterable[str]) -> None:
    """Refuse an unknown study or option."""
    if name not in PLANS:
        raise unknown_choice("study", name, PLANS)
    for option in options:
        if option not in study_options(name):
            raise unknown_choice(f"option of {name}", option, study_options(name))


def study_options(name: str) -> list[str]:
    """The options a study takes: `study_options("sinks")` → ["counts", "types", "draws"]."""
    return [option for option in inspect.signature(PLANS[name]).parameters if option != "study_input"]


def plan_sinks(
    study_input: StudyInput, *, counts: OptionValue = None, types: OptionValue = None, draws: OptionValue = 3
) -> StudyPlan:
    """Mask the k anchors of every head, and those of one type; the controls mask random keys of equal mass and of equal
    number, and as many of middle rank."""
    conditions, random_draws = [Condition(BASELINE, value=0.0)], _parse_count("draws", draws)
    all_counts = parse_counts("counts", counts, MASK_COUNTS, minimum=1)
    for k in all_counts:
        edits, name = f"mask_anchors(k={k})", f"anchors-{k}"
        _, middle = build_conditions(edits, "middle", name=name, value=float(k))
        conditions += _with_controls(edits, name, ("anchors", "random"), random_draws, k)
        # The middle keys are a line of their own, not one of the random controls.
        conditions.append(replace(middle, name=f"middle-{k}", control_of="", control="", series="middle"))
    k, selected, notes = _parse_types(study_input, types, MASK_TYPES, all_counts)
    for only in selected:
        edits, name = f"mask_anchors(k={k}, only={only!r})", f"anchors-{k}-{only.replace(' ', '-')}"
        conditions += _with_controls(edits, name, (only, f"{only}: random"), random_draws, control="mass")
    return StudyPlan({"": list(study_input.samples)}, conditions, notes)


def plan_pin(
    study_input: StudyInput, *, counts: OptionValue = None, types: OptionValue = None, draws: OptionValue = 3
) -> StudyPlan:
    """Move the attention of the k anchors to those of the first step, or of the first layer; as control, that of random
    keys. The questions are asked as they are, among distractors, and with the gold passage at other positions. The
    evidence stays as it is, except in the conditions by type, which run on the questions as they are."""
    subsets, notes = _pin_subsets(study_input)
    conditions, random_draws = [Condition(BASELINE, value=0.0)], _parse_count("draws", draws)
    all_counts = parse_counts("counts", counts, PIN_COUNTS, minimum=1)
    for k in all_counts:
        to_step, to_layer = ("to step 0", "random to step 0"), ("to layer 0", "random to layer 0")
        conditions += _with_controls(f"pin(k={k})", f"step-0-{k}", to_step, random_draws, k)
        conditions += _with_controls(f"pin(k={k}, layer=0)", f"layer-0-{k}", to_layer, random_draws, k)
    k, selected, type_notes = _parse_types(study_input, types, PIN_TYPES, all_counts)
    for only in selected:
        for place, layer in (("step 0", ""), ("layer 0", ", layer=0")):
            name = f"{place}-{k}-{only}".replace(" ", "-")
            edits, line = f"pin(k={k}{layer}, only={only!r})", f"{only} to {place}"
            controlled = _with_controls(edits, name, (line, f"{line}: random"), random_draws, control="mass")
            conditions += [replace(condition, subset=READING) for condition in controlled]
    return StudyPlan(subsets, conditions, [*notes, *type_notes])


def plan_heads(
    study_input: StudyInput, *, counts: OptionValue = None, draws: OptionValue = 3, score: OptionValue = "wu_set"
) -> StudyPlan:
    """Zero the K strongest retrieval heads; the control zeroes as many other heads of the same layers."""
    all_counts, random_draws, by = _parse_head_options(counts, draws, score)
    first, others = _split_samples(study_input.samples)
    ranked = rank_heads(study_input, first, by)
    order = [(layer, head) for layer, head in zip(ranked["layer"], ranked["head"], strict=True)]
    heads = max(head for _, head in order) + 1
    notes = [f"heads are found on {len(first)} samples by {by}, and tested on the other {len(others)}"]
    usable = [k for k in all_counts if k <= len(order) and _max_per_layer(order[:k]) <= heads // 2]
    if not usable:
        raise UserError(
            f"the first {all_counts[0]} heads are more than half of a layer of {study_input.model.spec.name}, which"
            " leaves too few for a control; give smaller counts"
        )
    if len(usable) < len(all_counts):
        rest = ", ".join(str(k) for k in all_counts if k not in usable)
        notes.append(f"{rest} heads are left out: more than half of a layer, which leaves too few for a control")
    copying = int((ranked[by] > 0).sum())
    if copying < usable[-1]:
        notes.append(f"only {copying} heads have any {by}; after them come those with most mass on the evidence")
    conditions = [Condition(BASELINE, value=0.0)]
    for k in usable:
        edits, lines = f"zero_heads(pairs={order[:k]})", ("retrieval heads", "random heads")
        conditions += _with_controls(edits, f"heads-{k}", lines, random_draws, k, heads)
    return StudyPlan({"": others}, conditions, notes)


def plan_head_traces(
    study_input: StudyInput, *, counts: OptionValue = None, draws: OptionValue = 3, score: OptionValue = "wu_set"
) -> Job:
    """Trace the samples that retrieval heads are found on."""
    _parse_head_options(counts, draws, score)
    return _plan_traces(study_input, _split_samples(study_input.samples)[0])


def _parse_head_options(counts: OptionValue, draws: OptionValue, score: OptionValue) -> tuple[Sequence[int], int, str]:
    all_counts, random_draws = parse_counts("counts", counts, HEAD_COUNTS, minimum=1), _parse_count("draws", draws)
    return all_counts, random_draws, require_one("score", parse_names("score", score, HEAD_SCORES))


def plan_dormant(study_input: StudyInput, *, layers: OptionValue = None) -> StudyPlan:
    """Zero every head alone, in all layers or in some."""
    depth, width = count_layers_and_heads(study_input.model)
    if depth is None or width is None:
        raise UserError(
            f"the config of {study_input.model.spec.name} does not give its layers and heads; use the edit zero_heads"
        )
    conditions = [Condition(BASELINE)]
    for layer in parse_counts("layers", layers, range(depth)):
        for head in range(width):
            edits = parse_edits(f"zero_heads(pairs=[({layer}, {head})])")
            conditions.append(Condition(f"head-{layer}-{head}", edits, value=float(head), series=f"layer {layer}"))
    return StudyPlan({"": list(study_input.samples)}, conditions, [])


def plan_blank(study_input: StudyInput, *, draws: OptionValue = 3) -> StudyPlan:
    """Hide each region of the prompt from all rows outside it; the control hides as many random positions."""
    regions = [item.tokens for item in study_input.build_items(study_input.samples)]
    names = list(dict.fromkeys(name for each in regions for name in each))
    shared = [name for name in names if all(each.get(name) for each in regions)]
    if not shared:
        raise UserError(f"no region is in the prompts of all {len(regions)} samples; give samples with passages")
    notes, conditions, random_draws = [], [Condition(BASELINE)], _parse_count("draws", draws)
    if rest := [name for name in names if name not in shared]:
        notes.append(f"{', '.join(rest)} left out: not all samples have them")
    for name in sorted(shared, key=_region_order):
        place = _trailing_number(name) if name.startswith("document ") else None  # others have no place on the axis
        lines = ("document", "random") if place else (name, f"{name}: random")
        edits = f"blank(region={name!r})"
        conditions += _with_controls(edits, name.replace(" ", "-"), lines, random_draws, place)
    return StudyPlan({"": list(study_input.samples)}, conditions, notes)


PLANS: dict[str, Callable[..., StudyPlan]] = {
    "sinks": plan_sinks,
    "pin": plan_pin,
    "heads": plan_heads,
    "dormant": plan_dormant,
    "blank": plan_blank,
}
"""The name of a study → the function that plans it. Titles, axes and summaries are in `analysis.studies.STUDIES`."""


PREPARATIONS: dict[str, Callable[..., Job]] = {"heads": plan_head_traces}
"""The name of a study → the function that plans the traces it needs."""


def rank_heads(study_input: StudyInput, samples: Sequence[Sample], by: str) -> pd.DataFrame:
    """A row per head, the strongest retrieval head first; among equals the one with more mass on the evidence."""
    job = _plan_traces(study_input, samples)
    run_job(job)
    table = pd.concat(retrieval(view) for view in trace_views(open_run(job.path)))
    scores = list(dict.fromkeys((by, "mass")))
    means = table.groupby(["layer", "head"])[scores].mean().fillna(0.0).reset_index()
    return means.sort_values(scores, ascending=False, kind="stable").astype({"layer": int, "head": int})


def _plan_traces(study_input: StudyInput, samples: Sequence[Sample]) -> Job:
    items = study_input.build_items(samples)
    prompts = {item.sample.id: item.prompt for item in items}
    settings = {name: value for name, value in study_input.settings.items() if name != "template"}
    return plan_trace(
        study_input.model,
        [item.sample for item in items],
        study_input.out / HEAD_TRACES,
        watch=Watch(fields=("row_key", "row_regions", "uniform")),
        build_prompt=lambda sample: prompts[sample.id],
        seed=study_input.seed,
        **settings,
    )


def _parse_count(option: str, given: OptionValue) -> int:
    return require_one(option, parse_counts(option, given, (), minimum=1))


def _with_controls(
    edits: str,
    name: str,
    series: tuple[str, str],
    draws: int,
    value: int | None = None,
    heads: int | None = None,
    control: str = BOTH,
) -> list[Condition]:
    """The edited condition and its controls, each on a line of their own in the chart."""
    place = None if value is None else float(value)
    edited, *controls = build_conditions(edits, control, draws, heads, name, value=place)
    return [replace(edited, series=series[0]), *(replace(each, series=series[1]) for each in controls)]


def _parse_types(
    study_input: StudyInput, given: OptionValue, default: Sequence[str], counts: Sequence[int]
) -> tuple[int, list[str], list[str]]:
    """The number of anchors of the conditions by type, their types, and a note about those that no sample has.

    Without TYPE_COUNT among the counts there are none, unless they are given.
    """
    k = TYPE_COUNT if TYPE_COUNT in counts else max(counts)
    types = [name for name in parse_names("types", given, (*default, NO_TYPES)) if name != NO_TYPES]
    if given is None and TYPE_COUNT not in counts:
        types = []
    about_evidence = [name for name in types if EVIDENCE in name]
    has_evidence = any(item.tokens.get(EVIDENCE) for item in study_input.build_items(study_input.samples))
    if has_evidence or not about_evidence:
        return k, types, []
    note = f"{', '.join(about_evidence)} left out: no sample has evidence"
    return k, [name for name in types if name not in about_evidence], [note]


def _pin_subsets(study_input: StudyInput) -> tuple[dict[str, list[Sample]], list[str]]:
    """The same samples in every subset. A subset that fewer than half of the samples can take is left out."""
    samples = study_input.samples
    subsets: dict[str, dict[str, Sample]] = {READING: {sample.id: sample for sample in samples}}
    notes = []
    for kind, options in (
        ("noise", {"distractors": "counterfactual", "counts": PIN_DISTRACTORS, "lengths": "growing"}),
        ("noise", {"distractors": "random", "counts": PIN_DISTRACTORS, "lengths": "growing"}),
        ("position", {}),
    ):
        names = [str(options["distractors"])] if options else ["gold-first", "gold-middle", "gold-last"]
        try:
            sweep = build_points(kind, samples, seed=study_input.seed, **options)
        except UserError as error:
            notes.append(f"{', '.join(names)} left out: {error}")
            continue
        count = len(sweep[0].samples)
        if 2 * count < len(samples):
            notes.append(f"{', '.join(names)} left out: only {count} of {len(samples)} samples can be used")
            continue
        placed = [point for point in sweep if point.value is not None]
        selected = placed if options else [placed[0], placed[len(placed) // 2], placed[-1]]
        for name, point in zip(names, selected, strict=True):
            subsets[name] = {sample.id: sample for sample in point.samples}
    shared = [sample.id for sample in samples if all(sample.id in subset for subset in subsets.values())]
    if not shared:
        raise UserError("no sample can be used in every subset of pin; give more samples")
    if dropped := len(samples) - len(shared):
        notes.append(f"{dropped} of {len(samples)} samples cannot be used in every subset and are left out")
    return {name: [subset[id] for id in shared] for name, subset in subsets.items()}, notes


def _split_samples(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The samples that heads are found on, the first that have evidence; and the samples that they are tested on."""
    with_evidence = [sample for sample in samples if any(passage.evidence for passage in sample.passages)]
    first = with_evidence[: max(MIN_HEAD_SAMPLES, len(samples) // 3)]
    others = [sample for sample in samples if sample not in first]
    if len(first) < MIN_HEAD_SAMPLES or not others:
        raise UserError(
            f"retrieval heads are found on at least {MIN_HEAD_SAMPLES} samples with evidence and tested on others, and"
            f" of {len(samples)} samples {len(with_evidence)} have evidence; give more samples"
        )
    return first, others


def _max_per_layer(heads: Sequence[Head]) -> int:
    """The largest number of these heads in one layer."""
    return max(Counter(layer for layer, _ in heads).values())


def _region_order(name: str) -> tuple[int, str, int]:
    """Sort key: regions that most prompts have, then documents by their numbers."""
    place = COMMON_REGIONS.index(name) if name in COMMON_REGIONS else len(COMMON_REGIONS)
    return place, name.rstrip("0123456789"), _trailing_number(name)


def _trailing_number(name: str) -> int:
    match = re.search(r"\d+$", name)
    return int(match[0]) if match else 0
