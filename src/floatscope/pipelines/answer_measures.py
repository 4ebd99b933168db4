"""What is measured of one answer: scores, order, attention moved, attention on the passages.

score_answer(item, "Kuburg")                  # a line of predictions.jsonl
measure_trace(trace, stop_ids)                # order and attention moved, of the commits of the answer
passage_attention(trace, end)                 # what the predicting rows give to gold and to other passages
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from floatscope.analysis.commit_order import kendall
from floatscope.analysis.floating import floating_index, top_keys
from floatscope.analysis.trace_view import TraceView
from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.pipelines.likelihood import encode_continuation
from floatscope.pipelines.prompting import PromptItem, require_tokenizer
from floatscope.sampling import Sampling
from floatscope.tasks.scores import abstains, acc, em, f1, is_unanswerable
from floatscope.traces import Trace

MEASURE_FIELDS = ("received", "uniform", "visible_rows", "eligible")
"""The trace fields that attention moved needs."""


def measure_trace(trace: Trace, stop_ids: Sequence[int]) -> dict[str, float | None]:
    """What an experiment measures of a decoding besides its score; None where a value is not defined.

    Both are of the commits of the answer, before the first of `stop_ids`: `order` is Kendall's τ of commit step and
    position, `moved` the attention moved per step, all rows, mean over layers.
    """
    special = dict(zip(("eos", "eot"), stop_ids, strict=False))
    view = TraceView(replace(trace, meta={**trace.meta, "special": special}))
    try:
        step, position = (trace.arrays[name][view.commits] for name in ("commit_step", "commit_position"))
    except UserError:  # an empty answer
        return {"order": None, "moved": None}
    floating = floating_index(top_keys(view))
    moved = float(floating.loc[floating["group"] == "all", "moved"].mean())
    return {"order": finite_or_none(kendall(step, position)), "moved": finite_or_none(moved)}


def has_nll(model: Model, sampling: Sampling) -> bool:
    """Whether answers have an end, which the likelihood of an answer includes."""
    return bool(model.spec.stop_ids) and sampling.eos == "free"


def has_target_answer(model: Model, item: PromptItem, new_tokens: int) -> bool:
    """Whether the sample has an answer that fits into the new tokens together with its end."""
    if not item.sample.answers or not item.sample.answers[0].strip():
        return False
    ids = encode_continuation(require_tokenizer(model), item.ids, item.sample.answers[0])
    return 0 < len(ids) < new_tokens and not {model.spec.mask_id, *model.spec.stop_ids} & set(ids)


def finite_or_none(value: float) -> float | None:
    """The value, or None if it is NaN or infinite, which JSON does not have."""
    return value if math.isfinite(value) else None


def score_answer(item: PromptItem, prediction: str) -> dict[str, Any]:
    """Return the line of `predictions.jsonl` for an answer: the prediction and its scores."""
    sample = item.sample
    unanswerable = is_unanswerable(sample)
    accuracy = float(abstains(prediction)) if unanswerable else acc(prediction, sample.answers)
    return {
        "id": sample.id,
        "prediction": prediction,
        "answers": list(sample.answers),
        "acc": accuracy,
        "em": accuracy if unanswerable else em(prediction, sample.answers),
        "f1": accuracy if unanswerable else f1(prediction, sample.answers),
        "abstained": abstains(prediction),
        "unanswerable": unanswerable,
        "passages": len(sample.passages),
        "tokens": len(item.ids),
    }


def passage_attention(trace: Trace, end: int) -> dict[str, float]:
    """The attention that the predicting rows of the answer give to gold and to other passages, mean over layers and
    heads; and the share of the canvas that those passages are."""
    names, member = list(trace.coords["region"]), trace.arrays["region_member"]
    in_answer = (trace.arrays["commit_position"] < end) & trace.is_last_commit
    mass = trace.arrays["row_regions"][in_answer].astype(np.float64).mean((0, 1, 2))
    documents = [i for i, name in enumerate(names) if name.startswith("document ")]
    gold = names.index("gold") if "gold" in names else None
    gold_mass, gold_share = (0.0, 0.0) if gold is None else (mass[gold], member[:, gold].mean())
    return {
        "gold_mass": float(gold_mass),
        "gold_share": float(gold_share),
        "other_mass": float(sum(mass[i] for i in documents) - gold_mass),
        "other_share": float(sum(member[:, i].mean() for i in documents) - gold_share),
    }
