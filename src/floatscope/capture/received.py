"""The one primitive, asked of a backend and answered by it.

    R[g, j] = Σ_i weights[i, g] · softmax(scores)[i, j]            received attention, by query group

and, because the same probabilities pass by, Σ_i entropy[i] · H_i (H the row entropy) and the head mean of A · carry
(what attention makes of values carried from layer to layer: rollout). `receive` picks the backend that serves the case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from floatscope.capture import blocked, dense, kernel
from floatscope.capture.ask import Received, ReductionSpec
from floatscope.capture.attention import Attention
from floatscope.errors import UserError, unknown_choice

BACKENDS = ("auto", "triton", "blocked", "dense")


def backend_for(call: Attention, lse_known: bool = True, wanted: str = "auto") -> str:
    """The backend that serves this call: `triton` on CUDA where its kernel covers the case, else `blocked`."""
    if wanted not in BACKENDS:
        raise unknown_choice("backend", wanted, BACKENDS)
    if wanted in ("blocked", "dense"):
        return wanted
    reason = kernel.unserved(call) if lse_known else "the model's kernel does not give its log-sum-exp"
    if wanted == "triton" and reason:
        raise UserError(f"the triton backend does not serve this call: {reason}; use backend='auto'")
    return "blocked" if reason else "triton"


def receive(
    call: Attention, lse: Tensor | None, ask: ReductionSpec, carry: Tensor | None = None, backend: str = "auto"
) -> Received:
    """Answer `ask` for one attention call, exactly, in O(keys · groups) memory.

    carry: [batch, key, column], values in [0, 1].
    """
    answer = {"triton": kernel.receive, "blocked": blocked.receive, "dense": _dense}
    with torch.no_grad():
        return answer[backend_for(call, lse is not None, backend)](call, lse, ask, carry)


def _dense(call: Attention, lse: Tensor | None, ask: ReductionSpec, carry: Tensor | None = None) -> Received:
    """The reference in the type all backends answer in."""
    exact = dense.receive(call, lse, ask, carry)
    entropy, carried = (None if x is None else x.float() for x in (exact.entropy, exact.carried))
    mass = None
    if call.changes is not None and call.changes.sink is not None:  # a virtual sink has its share of a row: no column
        mass = ask.weights[..., 0].sum(1, keepdim=True).expand(exact.received.shape[:2])
    return Received(exact.received.float(), entropy, carried, mass)
