"""Check captured == executed: recompute one attention call dense in float64 and compare.

    check_call(call, output, spec, carry, result, layer="layers.3", step=0)     # the largest errors, or Mismatch

Both the reduction and the output that the module received are compared. The dense result is independent of kernels,
blocks and the log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from floatscope.capture import dense
from floatscope.capture.attention import AttentionCall
from floatscope.capture.reduction_spec import ReductionResult, ReductionSpec
from floatscope.errors import UserError

REDUCTION_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
OUTPUT_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The largest relative norm error allowed, per head and group. The output has the rounding of the model's dtype."""


class Mismatch(UserError):
    """The attention that ran is not the attention that was captured."""


def check_call(
    call: AttentionCall,
    output: Tensor,
    spec: ReductionSpec,
    carry: Tensor | None,
    result: ReductionResult,
    layer: str,
    step: int,
) -> dict[str, float]:
    """Return the largest error of each quantity; raise `Mismatch` with the layer if one exceeds its tolerance."""
    errors = measure_errors(call, output, spec, carry, result)
    for quantity, error in errors.items():
        limit = (OUTPUT_TOLERANCE if quantity == "output" else REDUCTION_TOLERANCE)[call.query.dtype]
        if not error <= limit:
            raise Mismatch(
                f"captured differs from executed at layer '{layer}', step {step}: {quantity} is off by {error:.1e}"
                f" (allowed {limit:.0e} in {call.query.dtype}); run `floatscope doctor` and report the case"
            )
    return errors


def measure_errors(
    call: AttentionCall, output: Tensor, spec: ReductionSpec, carry: Tensor | None, result: ReductionResult
) -> dict[str, float]:
    """The largest error of `output` and of each quantity of `result` against the dense float64 reference."""
    expected = dense.reduce_attention(call, None, spec, carry)
    is_counted = spec.weights[..., 0].abs() > 0  # [batch, query]: rows of group `all`
    rows = is_counted[:, None, :, None]
    errors = {
        "output": _norm_error((output * rows).flatten(2), (dense.attention_output(call) * rows).flatten(2)),
        "received": _norm_error(result.received, expected.received),
    }
    if result.mass is not None:  # rows sum to 1 under the log-sum-exp of the kernel that ran
        count = spec.weights[..., 0].sum(1)[:, None]
        errors["mass"] = float(((result.mass - count) / count.clamp_min(1)).abs().max())
    if expected.entropy is not None and result.entropy is not None:
        errors["entropy"] = float((result.entropy - expected.entropy).abs().max())
    if expected.attended_carry is not None and result.attended_carry is not None:
        errors["carry"] = _norm_error(
            (result.attended_carry * is_counted[..., None]).flatten(1),
            (expected.attended_carry * is_counted[..., None]).flatten(1),
        )
    return errors


def _norm_error(actual: Tensor, expected: Tensor) -> float:
    """The largest ‖actual − expected‖ / ‖expected‖ along the last axis; NaN if any is NaN."""
    actual, expected = actual.double(), expected.double()
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return float("nan") if bool(error.isnan().any()) else float(error.max())
