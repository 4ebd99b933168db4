"""What is measured of an answer besides its score: how likely the right one is, in which order it was written, and
whether its anchors stayed where they were.

    of_trace(trace)                       # {"order": 0.31, "floating": 0.52} of a decoding that was watched for FIELDS
    can_be_forced(model, item, new=8)     # whether `answer_nll` can be asked for the sample's first answer

What is not defined is None: the order of a single commit, the likelihood of an answer that is too long.
"""

from __future__ import annotations

import math

from floatscope.analysis.floating import floating_index, tops
from floatscope.analysis.look import TraceView
from floatscope.analysis.order import kendall
from floatscope.models.model import Model
from floatscope.pipelines.asking import PromptItem, require_tokenizer
from floatscope.pipelines.likelihood import continuation
from floatscope.sampling import Sampling
from floatscope.traces import Trace

FIELDS = ("received", "uniform", "seen", "eligible")
"""What the floating index is read from."""


def measure_trace(trace: Trace) -> dict[str, float | None]:
    """`order` is Kendall's τ of commit step and position, `floating` the index within the sample, mean over layers."""
    arrays = trace.arrays
    return {
        "order": known(kendall(arrays["commit_step"], arrays["commit_position"])),
        "floating": known(float(floating_index(tops(TraceView(trace)))["within"].mean())),
    }


def has_nll(model: Model, how: Sampling) -> bool:
    """Whether answers end: the likelihood of one is up to its end."""
    return bool(model.spec.stop_ids) and how.eos == "free"


def has_target_answer(model: Model, item: PromptItem, new: int) -> bool:
    """Whether the sample has an answer, and it fits with an end behind it."""
    if not item.sample.answers or not item.sample.answers[0].strip():
        return False
    ids = continuation(require_tokenizer(model), item.ids, item.sample.answers[0])
    return 0 < len(ids) < new and not {model.spec.mask_id, *model.spec.stop_ids} & set(ids)


def known(value: float) -> float | None:
    return value if math.isfinite(value) else None
