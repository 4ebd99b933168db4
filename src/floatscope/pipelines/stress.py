"""`stress`: the same questions while one thing about the prompt changes; scores and the attention on the passages.

table = stress(["twin:arm", "twin:mdm"], samples, "runs/position", "position", new_tokens=8)
job = plan_stress(model, samples, "runs/position/mdm", "position", new_tokens=8)     # one model, step by step
for event in job: print(event)                  # the events of `job`; each point is a part
job.notes                                      # which samples are left out

runs/position/mdm/gold-0/     an evaluation for each point
runs/position/curve.csv       a row per model and point, with intervals
runs/position/report.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.stress_tests import STRESS_FILE, stress_curve
from floatscope.errors import UserError
from floatscope.files.atomic import explain_write_errors
from floatscope.files.records import write_record
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.models.spec import ModelSpec
from floatscope.pipelines.evaluate import plan_part
from floatscope.pipelines.folders import model_folders
from floatscope.pipelines.job import Event, Job, run_job
from floatscope.pipelines.prompting import PromptConfig, find_too_long
from floatscope.reports.page import write_page
from floatscope.reports.stress_report import build_stress_report
from floatscope.sampling.settings import resolve_sampling
from floatscope.schema import Paradigm
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress import Point, build_points
from floatscope.tasks.template import load_template


def stress(
    models: Model | str | Sequence[Model | str],
    samples: Sequence[Sample],
    out: str | Path,
    kind: str,
    *,
    on_event: Callable[[Event], None] | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """Run a stress test on one model or several, and write the curve and the report.

    Args:
        models: Models from `fs.load`, or their names, which are loaded one after the other.
        samples: The questions.
        out: The folder, with a subfolder per model. An interrupted test resumes.
        kind: What changes: noise, position, layout, query, shots, masks, needle or dirty.
        on_event: Called with each event of the jobs (`floatscope.pipelines.job`).
        **settings: As for `plan_stress`: `options` of the kind, `seed`, `template`, and the settings of `evaluate`.

    Returns:
        A row per model and point: `acc` with its 95 % CI, its change from the first point, the lift of gold and other
        passages in the predicting rows.

    Example:
        samples = fs.read_samples("twin:reading-5", limit=3)
        table = fs.stress("twin:mdm", samples, "runs/place", "position", new_tokens=4, options={"documents": 2})
        table[["name", "acc", "low", "high"]]
    """
    listed = [models] if isinstance(models, Model | str) else list(models)
    paths = model_folders(listed, Path(out))
    for model, path in zip(listed, paths, strict=True):
        job = plan_stress(load(model) if isinstance(model, str) else model, samples, path, kind, **settings)
        run_job(job, on_event)
    return write_stress_results(paths, Path(out))


def write_stress_results(paths: Sequence[Path], out: Path) -> pd.DataFrame:
    """Write `curve.csv` and `report.html` of finished stress tests into `out`, and return the curve."""
    table = stress_curve(paths)
    with explain_write_errors("the table", out / "curve.csv"):
        table.to_csv(out / "curve.csv", index=False)
    write_page(build_stress_report(paths), out / "report.html")
    return table


def plan_stress(
    model: Model,
    samples: Sequence[Sample],
    out: str | Path,
    kind: str,
    *,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    template: str | Path = "default",
    chat: bool | None = None,
    **settings: Any,
) -> Job:
    """Check everything and return a job; iterating the job answers the questions at every point.

    Nothing is cut to fit the context: a sample that is too long at one point is left out of all, with a note.

    Args:
        model: A model from `fs.load`.
        samples: The questions.
        out: The folder of this model.
        kind: What changes.
        seed: The seed of whatever is drawn.
        options: The options of the kind, such as `{"documents": 10}`.
        template: The name of a prompt template, or a file.
        chat: Whether prompts go through the chat template. Default: if the tokenizer has one.
        **settings: The settings of `plan_evaluation`.
    """
    if not isinstance(model, Model):
        raise UserError(f"stress needs a floatscope Model (fs.load), got {type(model).__name__}")
    check_kind(kind, model.spec)
    all_points, path = build_points(kind, samples, seed=seed, **(options or {})), Path(out)
    given = {name: settings.get(name) for name in ("preset", "sampling", "new_tokens")}
    sampling = resolve_sampling(
        model.spec.paradigm, block_size=model.spec.block_size, canvas_size=model.spec.canvas_size, **given
    )
    fitting_points = _drop_long_samples(model, all_points, template, chat, sampling.new_tokens, seed)
    parts = [
        plan_part(
            model,
            point.samples,
            path / point.name,
            placement=point.placement,
            shots=point.shots,
            extra_masks=point.extra_masks,
            filler=point.filler,
            attention=True,
            template=template,
            chat=chat,
            seed=seed,
            **settings,
        )
        for point in fitting_points
        if not point.same_as
    ]
    notes = _note_left_out(model.spec, len(samples), all_points[0], fitting_points[0])
    records = [_point_record(point) for point in fitting_points]
    record = {"kind": kind, "model": model.spec.name, "notes": notes, "points": records}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_record(path / STRESS_FILE, record)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    return Job(path, parts, notes)


def check_kind(kind: str, spec: ModelSpec) -> None:
    """Refuse a stress test in which a model has a single point."""
    if kind == "masks" and spec.paradigm is Paradigm.ARM:
        raise UserError(
            f"{spec.name} is autoregressive: nothing can stand after its answer, so masks has nothing to vary; leave"
            " the model out, or choose another kind"
        )


def _drop_long_samples(
    model: Model, points: list[Point], template: str | Path, chat: bool | None, new_tokens: int, seed: int
) -> list[Point]:
    """The points with only the samples whose prompts fit at all of them. A dropped sample is also not used as a shot,
    so lengths are checked again until none is dropped."""
    loaded = load_template(template)
    while points[0].samples:
        long: set[str] = set()
        for point in points:
            if not point.same_as:
                config = PromptConfig(loaded, "all", point.shots, point.placement, point.extra_masks, point.filler)
                long |= find_too_long(model, point.samples, config, chat, new_tokens, seed)
        if not long:
            return points
        points = [replace(p, samples=tuple(s for s in p.samples if s.id not in long)) for p in points]
    raise UserError(
        f"every sample is longer at some point than the {model.spec.context} tokens {model.spec.name} was trained for;"
        " give fewer documents or smaller counts, shorter passages, or fewer new tokens"
    )


def _note_left_out(spec: ModelSpec, samples: int, complete: Point, fitting: Point) -> list[str]:
    long, notes = len(complete.samples) - len(fitting.samples), []
    if complete.left_out:
        notes.append(f"{complete.left_out} of {samples} samples cannot take part at every point and are left out")
    if long:
        notes.append(
            f"{long} of {samples} samples are longer at some point than the {spec.context} tokens {spec.name} was"
            " trained for and are left out"
        )
    return notes


def _point_record(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "value": point.value,
        "series": point.series,
        "note": point.note,
        "folder": point.same_as or point.name,
    }
