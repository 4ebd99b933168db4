"""The samples of a run: their passages, the position of the gold passage, and the scores of the prediction.

samples(run)                # a row per sample: passages, gold_position, acc, f1, mean_score
gold_position(trace)        # "first", "middle" or "last"; None without a single gold passage among several
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from floatscope.analysis.trace_view import TraceView, per_sample
from floatscope.tasks.scores import f1
from floatscope.traces import Trace

POSITIONS = ("first", "middle", "last")
_DOCUMENT = re.compile(r"document (\d+)")


@per_sample
def samples(view: TraceView) -> pd.DataFrame:
    """The number of `passages`, the `gold_position` and the scores of the prediction: a row per sample.

    `passages` is 0 for a closed book and NaN if the trace does not know its regions. `acc` and `f1` are percentages,
    NaN without an answer to compare with; `mean_score` is the mean of both.
    """
    trace, meta = view.trace, view.trace.meta
    text_regions = set(trace.coords.get("region", ())) - {"bos", "answer"}
    answers, prediction = meta.get("answers"), meta.get("prediction")
    acc = np.nan if meta.get("acc") is None else 100 * float(meta["acc"])
    overlap = 100 * f1(prediction, answers) if answers and prediction is not None else np.nan
    return pd.DataFrame(
        {
            "sample": [view.sample],
            "passages": [float(len(_documents(trace))) if text_regions else np.nan],
            "gold_position": [gold_position(trace)],
            "acc": [acc],
            "f1": [overlap],
            "mean_score": [(acc + overlap) / 2],
        }
    )


def gold_position(trace: Trace) -> str | None:
    """Return the position of the passage that contains the whole region `gold` among the other passages."""
    documents, regions = _documents(trace), trace.coords.get("region", ())
    if "gold" not in regions or len(documents) < 2:
        return None
    member = trace.arrays["region_member"]
    gold = member[:, regions.index("gold")]
    gold_documents = [number for number, index in documents.items() if not (gold & ~member[:, index]).any()]
    if not gold.any() or len(gold_documents) != 1:
        return None
    return {1: "first", max(documents): "last"}.get(gold_documents[0], "middle")


def _documents(trace: Trace) -> dict[int, int]:
    """The number of each passage → its index among the regions."""
    if "region_member" not in trace.arrays:
        return {}
    member = trace.arrays["region_member"]
    matches = {i: _DOCUMENT.fullmatch(name) for i, name in enumerate(trace.coords["region"]) if member[:, i].any()}
    return {int(match[1]): i for i, match in matches.items() if match}
