"""The central reduction, and the choice of the backend that computes it.

    R[g, j] = Σ_i weights[i, g] · softmax(scores)[i, j]            received attention, by query group

The same pass over the probabilities also yields Σ_i entropy_weights[i] · H_i (H is the row entropy) and the head mean
of A · carry (values carried from layer to layer: attention rollout).

    result = reduce_attention(call, lse, ReductionSpec(weights))   # in O(keys · groups) memory
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from floatscope.capture import blocked, dense, received_kernel
from floatscope.capture.attention import AttentionCall
from floatscope.capture.reduction_spec import ReductionResult, ReductionSpec
from floatscope.errors import UserError, unknown_choice

BACKENDS = ("auto", "triton", "blocked", "dense")
NO_LSE = "the model's kernel does not return its log-sum-exp"

logger = logging.getLogger(__name__)


def select_backend(call: AttentionCall, has_lse: bool = True, backend: str = "auto") -> str:
    """Return the backend that runs this call: `triton` on CUDA where its kernel supports the call, else `blocked`.

    has_lse  whether the model's kernel returned its log-sum-exp
    backend  one of BACKENDS; anything but "auto" forces a backend
    """
    if backend not in BACKENDS:
        raise unknown_choice("backend", backend, BACKENDS)
    if backend in ("blocked", "dense"):
        return backend
    reason = unsupported_reason(call, has_lse)
    if backend == "triton" and reason:
        raise UserError(f"the triton backend does not support this call: {reason}; use backend='auto'")
    return "blocked" if reason else "triton"


def unsupported_reason(call: AttentionCall, has_lse: bool) -> str | None:
    """Why the triton kernel does not run this call; None: it does."""
    return received_kernel.unsupported_reason(call) if has_lse else NO_LSE


def log_backend(call: AttentionCall, has_lse: bool, backend: str) -> None:
    """Log the backend of a call, and why it is not triton; each pair of the two once."""
    if not logger.isEnabledFor(logging.INFO):
        return
    reason = "as chosen" if backend != "auto" else unsupported_reason(call, has_lse) or "its kernel supports the call"
    _log_once(select_backend(call, has_lse, backend), reason)


@cache
def _log_once(backend: str, reason: str) -> None:
    logger.info("attention is reduced by the %s backend (%s)", backend, reason)


def reduce_attention(
    call: AttentionCall,
    lse: Float[Tensor, "batch head query"] | None,
    spec: ReductionSpec,
    carry: Float[Tensor, "batch key column"] | None = None,
    backend: str = "auto",
) -> ReductionResult:
    """Reduce the attention of one call, exactly, in O(keys · groups) memory.

    lse    the log-sum-exp of each row, from the kernel that ran; None: it is recomputed
    carry  values in [0, 1] per key, to be multiplied by the attention matrix
    """
    run = {
        "triton": received_kernel.reduce_attention,
        "blocked": blocked.reduce_attention,
        "dense": _reduce_dense,
    }
    with torch.no_grad():
        return run[select_backend(call, lse is not None, backend)](call, lse, spec, carry)


def _reduce_dense(
    call: AttentionCall, lse: Tensor | None, spec: ReductionSpec, carry: Tensor | None = None
) -> ReductionResult:
    """Run the float64 reference and return fp32, like the other backends."""
    exact = dense.reduce_attention(call, lse, spec, carry)
    entropy, attended_carry = (None if x is None else x.float() for x in (exact.entropy, exact.attended_carry))
    mass = None
    if (
        call.edits is not None and call.edits.sink is not None
    ):  # a virtual sink takes a share of each row but has no column
        mass = spec.weights[..., 0].sum(1, keepdim=True).expand(exact.received.shape[:2])
    return ReductionResult(exact.received.float(), entropy, attended_carry, mass)
