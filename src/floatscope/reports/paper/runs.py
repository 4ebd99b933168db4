"""The runs of the paper's figures, with data that their tables do not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from floatscope.analysis.trace_view import argmax_key
from floatscope.reports.charts import Chart, Map, Mark, Table
from floatscope.reports.report_runs import ReportRun
from floatscope.reports.sections.decoding import build_lift_map, first_and_last
from floatscope.schema import MIN_ANCHOR_LIFT


@dataclass(frozen=True)
class PaperRun:
    """A run and the mean maps of its traces."""

    run: ReportRun
    mean_maps: list[Map]  # the first and the last layer, over the samples of the most frequent length

    @staticmethod
    def read(run: ReportRun) -> PaperRun:
        """Read the traces of a run once more, to average the maps of equally long canvases."""
        sums: dict[tuple[int, ...], dict[int, np.ndarray]] = {}
        counts: Counter[tuple[int, ...]] = Counter()
        for trace in run.run if run.has_table("top_keys") else ():
            shape = trace.arrays["tokens"].shape
            counts[shape] += 1
            layers = sums.setdefault(shape, {})
            for layer in first_and_last(trace.arrays["layers"]):
                layers[layer] = layers.get(layer, 0) + trace.received(layer, scale="lift", eligible=True)
        shape, n = counts.most_common(1)[0] if counts else ((), 0)
        maps = (
            [_build_mean_map(run.label, layer, total / n, n) for layer, total in sums[shape].items()] if n > 1 else []
        )
        return PaperRun(run, maps)

    @property
    def samples(self) -> pd.DataFrame:
        """A row per sample: its passages, the position of the gold passage, its scores."""
        return self.run.table("samples")

    def samples_with_gold(self, position: str) -> set[str]:
        """The samples whose gold passage is `first`, in the `middle` or `last`."""
        return set(self.samples.loc[self.samples["gold_position"] == position, "sample"])

    @property
    def model(self) -> str:
        """The name of the model; the label may add the folder of the run."""
        return str(self.run.run.settings.get("model", self.run.label))


def format_notes(*notes: str) -> str:
    """Each note as a paragraph of its own."""
    return "".join(f"\n\n{text}" for text in notes)


def sort_charts(charts: Sequence[Chart]) -> list[Chart]:
    """The charts with tables last and without empty tables."""
    filled = [chart for chart in charts if not (isinstance(chart, Table) and not chart.rows)]
    return sorted(filled, key=lambda chart: isinstance(chart, Table))


def _build_mean_map(label: str, layer: int, lift: Float[np.ndarray, "step key"], n: int) -> Map:
    marks: list[Mark] = [
        (step, int(key), "top")
        for step, key in enumerate(argmax_key(lift))
        if key >= 0 and lift[step, key] >= MIN_ANCHOR_LIFT
    ]
    return build_lift_map(f"{label}, layer {layer}: mean of {n} samples", label, lift, marks)
