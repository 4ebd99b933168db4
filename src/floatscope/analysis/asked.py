"""What a sample asked and how it was answered: its passages, where the gold one stands, the scores of the prediction.

asked(look)              # one row: sample, passages, gold, acc, f1, both
gold_place(trace)        # "first", "middle", "last"; None where there is no one gold passage among several
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from floatscope.analysis.look import TraceView
from floatscope.tasks.score import f1
from floatscope.traces import Trace

PLACES = ("first", "middle", "last")
_DOCUMENT = re.compile(r"document (\d+)")


def asked(look: TraceView) -> pd.DataFrame:
    """`passages` 0 is a closed book, and NaN where the trace does not know its regions. `acc` and `f1` are 0 … 100, NaN
    without an answer to compare with; `both` is their mean."""
    trace, meta = look.trace, look.trace.meta
    known = set(trace.coords.get("region", ())) - {"bos", "answer"}
    answers, said = meta.get("answers"), meta.get("prediction")
    acc = np.nan if meta.get("acc") is None else 100 * float(meta["acc"])
    overlap = 100 * f1(said, answers) if answers and said is not None else np.nan
    return pd.DataFrame(
        {
            "sample": [look.sample],
            "passages": [float(len(_documents(trace))) if known else np.nan],
            "gold": [gold_place(trace)],
            "acc": [acc],
            "f1": [overlap],
            "both": [(acc + overlap) / 2],
        }
    )


def gold_place(trace: Trace) -> str | None:
    """Where the passage that holds all of the region `gold` stands among the others."""
    documents, regions = _documents(trace), trace.coords.get("region", ())
    if "gold" not in regions or len(documents) < 2:
        return None
    member = trace.arrays["region_member"]
    gold = member[:, regions.index("gold")]
    holding = [number for number, at in documents.items() if not (gold & ~member[:, at]).any()]
    if not gold.any() or len(holding) != 1:
        return None
    return {1: "first", max(documents): "last"}.get(holding[0], "middle")


def _documents(trace: Trace) -> dict[int, int]:
    """The number of each passage the sample has → its place among the regions."""
    if "region_member" not in trace.arrays:
        return {}
    member = trace.arrays["region_member"]
    found = {at: _DOCUMENT.fullmatch(name) for at, name in enumerate(trace.coords["region"]) if member[:, at].any()}
    return {int(match[1]): at for at, match in found.items() if match}
