"""A run read once more, and what several figures are made with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from floatscope.analysis.look import TraceView, argmax
from floatscope.errors import UserError
from floatscope.reports.charts import Chart, Map, Mark, Table
from floatscope.reports.compared import Compared
from floatscope.reports.sections.floating import map_of_lift


@dataclass(frozen=True)
class Read:
    """A run whose traces were read once more, for what its tables do not hold."""

    run: Compared
    means: list[Map]  # the first and the last layer, over the samples of the most frequent length

    @staticmethod
    def of(run: Compared) -> Read:
        sums: dict[tuple[int, ...], dict[int, np.ndarray]] = {}
        times: Counter[tuple[int, ...]] = Counter()
        for trace in run.run if run.has("tops") else ():
            shape = trace.arrays["tokens"].shape
            times[shape] += 1
            total = sums.setdefault(shape, {})
            for layer in ends(trace.arrays["layers"]):
                total[layer] = total.get(layer, 0) + trace.received(layer, scale="lift", eligible=True)
        shape, n = times.most_common(1)[0] if times else ((), 0)
        means = [_mean_map(run.label, layer, total / n, n) for layer, total in sums[shape].items()] if n > 1 else []
        return Read(run, means)

    @property
    def asked(self) -> pd.DataFrame:
        return self.run.table("asked")

    def at(self, place: str) -> set[str]:
        """The samples whose gold passage stands there."""
        return set(self.asked.loc[self.asked["gold"] == place, "sample"])

    @property
    def model(self) -> str:
        """The model itself; a label may add the run's folder."""
        return str(self.run.run.settings.get("model", self.run.label))


def notes(*differences: str) -> str:
    """A paragraph for each."""
    return "".join(f"\n\n{text}" for text in differences)


def filled(charts: Sequence[Chart]) -> list[Chart]:
    """Tables last, and none without rows."""
    kept = [chart for chart in charts if not (isinstance(chart, Table) and not chart.rows)]
    return sorted(kept, key=lambda chart: isinstance(chart, Table))


def shared_sample(runs: Sequence[Compared]) -> str | None:
    """The first sample all runs have."""
    return next((name for name in runs[0].run.done if all(name in run.run.done for run in runs)), None)


def ends(layers: np.ndarray) -> list[int]:
    return sorted({int(layers[0]), int(layers[-1])})


def anchors_of(look: TraceView) -> np.ndarray:
    """None where the detector cannot fire; why is said on the page."""
    try:
        return look.anchors
    except UserError:
        return np.zeros(look.lift.shape, bool)


def _mean_map(label: str, layer: int, lift: Float[np.ndarray, "step key"], n: int) -> Map:
    marks: list[Mark] = [(t, int(k), "top") for t, k in enumerate(argmax(lift)) if k >= 0]
    return map_of_lift(f"{label}, layer {layer}: mean of {n} samples", label, lift, marks)
