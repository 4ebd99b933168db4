"""The tables behind the verdicts of one comparison: scores, stress sweeps, interventions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from markdown_tables import effect_table, sweep_table
from runs import is_finished, is_study_finished, is_sweep_finished

from floatscope.analysis.experiments import effects
from floatscope.analysis.studies import STUDIES
from floatscope.reports.score_table import format_scores, score_rows


def write_details(folder: Path) -> Iterator[str]:
    """Yield the tables of the finished runs of a comparison."""
    yield f"## Scores, sweeps and interventions: {folder.name}\n"
    runs = [path for path in sorted((folder / "scores").glob("*/*")) if is_finished(path)]
    if runs:
        yield format_scores(score_rows(runs), "md")
    for kind in sorted(path.name for path in (folder / "stress").glob("*")):
        if sweeps := [path for path in sorted((folder / "stress" / kind).glob("*")) if is_sweep_finished(path)]:
            yield f"### Stress: {kind}\n\n{sweep_table(sweeps)}"
    for name in STUDIES:
        if studies := [path for path in sorted((folder / "studies" / name).glob("*")) if is_study_finished(path)]:
            table = effects(studies)
            yield f"### {STUDIES[name].title}\n\n`floatscope study {name}`. {STUDIES[name].description}\n"
            yield effect_table(table)
            yield "".join(f"- {sentence}\n" for sentence in STUDIES[name].summarise(table))
