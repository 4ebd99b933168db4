"""`stress`: the same questions under changing conditions, scored, with the attention on gold and other passages beside.

stressed = stress(model, samples, "runs/position/mdm", "position", new_tokens=8)
for point, answered in stressed: print(point.name, answered.done, answered.acc)
curve([Path("runs/position/mdm")])            # a row per model and point, with intervals
stressed.told                                 # who is left out of all points, in sentences

runs/position/mdm/gold-0/     an evaluation for each point
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from floatscope.analysis.estimate import difference, estimate
from floatscope.decode import sampling
from floatscope.errors import UserError
from floatscope.evaluating import Answered, Evaluation, evaluate, open_evaluation
from floatscope.models import Model, ModelSpec
from floatscope.posing import Ask, too_long
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress import Point, points
from floatscope.tasks.template import template
from floatscope.trace.atomic import write_atomic

STRESS = "stress.json"


@dataclass(frozen=True, eq=False)
class Stressed:
    """Ready to be iterated, point by point; again, and it goes on with what is missing."""

    path: Path
    points: list[Point]
    evaluations: list[Evaluation]
    told: list[str]  # who is left out, in sentences

    def __iter__(self) -> Iterator[tuple[Point, Answered]]:
        asked = (point for point in self.points if not point.same_as)
        for point, evaluation in zip(asked, self.evaluations, strict=True):
            if evaluation.finished < len(evaluation.items):
                for answered in evaluation:
                    yield point, answered

    @property
    def total(self) -> int:
        return sum(len(each.items) for each in self.evaluations)

    @property
    def finished(self) -> int:
        return sum(each.finished for each in self.evaluations)


def check_kind(kind: str, spec: ModelSpec) -> None:
    """Refuse a sweep of which a model has no point but the first."""
    if kind == "masks" and spec.family == "arm":
        raise UserError(
            f"{spec.name} writes from left to right: nothing can stand behind its answer, masks has nothing to sweep"
            " over; leave it out, or choose another kind"
        )


def stress(
    model: Model,
    samples: Sequence[Sample],
    out: str | Path,
    kind: str,
    *,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    prompt: str | Path = "default",
    chat: bool | None = None,
    **settings: Any,
) -> Stressed:
    """Everything is checked here. `options` are those of the kind, `settings` those of `evaluate`.

    Nothing is cut to fit: a sample that is too long for the model at any point is in none, and that is told.
    """
    if not isinstance(model, Model):
        raise UserError(f"stress needs a floatscope Model (fs.load), got {type(model).__name__}")
    check_kind(kind, model.spec)
    able, path = points(kind, samples, seed=seed, **(options or {})), Path(out)
    new = sampling(model.spec.family, settings.get("preset"), new_tokens=settings.get("new_tokens")).new_tokens
    made = _whole(model, able, prompt, chat, new, seed)
    evaluations = [
        evaluate(
            model,
            point.samples,
            path / point.name,
            placement=point.placement,
            shots=point.shots,
            extra_masks=point.extra_masks,
            filler=point.filler,
            attention=True,
            prompt=prompt,
            chat=chat,
            seed=seed,
            **settings,
        )
        for point in made
        if not point.same_as
    ]
    told = _left_out(model.spec, len(samples), able[0], made[0])
    record = {"kind": kind, "model": model.spec.name, "told": told, "points": [_told(point) for point in made]}
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / STRESS, [json.dumps(record, indent=1).encode()])
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    return Stressed(path, made, evaluations, told)


def _whole(model: Model, made: list[Point], prompt: str | Path, chat: bool | None, new: int, seed: int) -> list[Point]:
    """The points with the samples whose prompts fit at all of them; who is left out can be a shot of nobody."""
    asked = template(prompt)
    while made[0].samples:
        long: set[str] = set()
        for p in (point for point in made if not point.same_as):
            ask = Ask(asked, "all", p.shots, p.placement, p.extra_masks, p.filler)
            long |= too_long(model, p.samples, ask, chat, new, seed)
        if not long:
            return made
        made = [replace(p, samples=tuple(s for s in p.samples if s.id not in long)) for p in made]
    raise UserError(
        f"every sample is longer at some point than the {model.spec.context} tokens {model.spec.name} was trained for:"
        " give fewer documents or smaller counts, shorter passages, or ask for fewer new tokens"
    )


def _left_out(spec: ModelSpec, count: int, able: Point, asked: Point) -> list[str]:
    long, told = len(able.samples) - len(asked.samples), []
    if able.left_out:
        told.append(f"{able.left_out} of {count} samples cannot take part in every point, so they are in none")
    if long:
        told.append(
            f"{long} of {count} samples are longer at some point than the {spec.context} tokens {spec.name} was trained"
            " for, so they are in none"
        )
    return told


def read_stress(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((path / STRESS).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no stress test; floatscope stress makes one") from error
    return told


def curve(paths: Sequence[Path]) -> pd.DataFrame:
    """A row per model and point: acc with its interval and its paired difference from the model's first point, and how
    much the rows that decide the answer give to gold and to other passages, over their share of the canvas."""
    rows = []
    for path in paths:
        told = read_stress(path)
        first: pd.DataFrame | None = None
        for point in told["points"]:
            table = open_evaluation(path / point["asked"]).table
            first = table if first is None else first
            rows.append({"model": told["model"], **point, "n": len(table), **_scores(table, first), **_looks(table)})
    return pd.DataFrame(rows)


def gap(table: pd.DataFrame) -> pd.DataFrame:
    """Of each model over its points that have a place on the axis: best, worst, their gap, and the middle dip: the mean
    of the two ends less the least between them."""
    rows = []
    for (model, series), some in table[table["value"].notna()].groupby(["model", "series"], sort=False):
        accs = some.sort_values("value")["acc"].to_numpy()
        dip = (accs[0] + accs[-1]) / 2 - accs[1:-1].min() if len(accs) > 2 else float("nan")
        rows.append((model, series, accs.max(), accs.min(), accs.max() - accs.min(), dip))
    return pd.DataFrame(rows, columns=["model", "series", "best", "worst", "gap", "dip"])


def _told(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "value": point.value,
        "series": point.series,
        "note": point.note,
        "asked": point.same_as or point.name,
    }


def _scores(table: pd.DataFrame, first: pd.DataFrame) -> dict[str, float]:
    acc, apart = estimate(table, "acc").iloc[0], difference(table, first, "acc").iloc[0]
    return {
        "acc": acc["mean"],
        "low": acc["low"],
        "high": acc["high"],
        "change": apart["mean"],
        "change_low": apart["low"],
        "change_high": apart["high"],
        "f1": float(table["f1"].mean()),
    }


def _looks(table: pd.DataFrame) -> dict[str, float]:
    """Lift of gold and of the others, and of gold where the answer was right and where it was wrong."""
    if "gold_mass" not in table:
        return {}
    table = table.assign(
        gold=(table["gold_mass"] / table["gold_share"]).where(table["gold_share"] > 0),
        other=(table["other_mass"] / table["other_share"]).where(table["other_share"] > 0),
    )
    found: dict[str, float] = {}
    for name in ("gold", "other"):
        told = estimate(table, name).iloc[0]
        found |= {f"{name}_lift": told["mean"], f"{name}_low": told["low"], f"{name}_high": told["high"]}
    right = table["acc"] > 0
    return found | {"gold_right": table.loc[right, "gold"].mean(), "gold_wrong": table.loc[~right, "gold"].mean()}
