"""captured == executed: one attention call recomputed dense in float64 and compared with both what was reduced and
what the module was given. The dense result knows nothing of kernels, blocks or log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from floatscope.capture import dense
from floatscope.capture.ask import Received, ReductionSpec
from floatscope.capture.attention import Attention
from floatscope.errors import UserError

REDUCED = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
OUTPUT = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error norm-wise, per head and group. The output is in the model's dtype and has its rounding."""


class Mismatch(UserError):
    """The attention that ran is not the attention that was captured."""


def check_call(
    call: Attention, output: Tensor, ask: ReductionSpec, carry: Tensor | None, got: Received, layer: str, step: int
) -> dict[str, float]:
    """Largest error of each quantity, or `Mismatch` with the layer and the size."""
    errors = call_errors(call, output, ask, carry, got)
    for what, error in errors.items():
        limit = (OUTPUT if what == "output" else REDUCED)[call.query.dtype]
        if not error <= limit:
            raise Mismatch(
                f"captured differs from executed at layer '{layer}', step {step}: {what} is off by {error:.1e}"
                f" (allowed {limit:.0e} in {call.query.dtype}); run `floatscope doctor` and report the case"
            )
    return errors


def call_errors(
    call: Attention, output: Tensor, ask: ReductionSpec, carry: Tensor | None, got: Received
) -> dict[str, float]:
    want = dense.receive(call, None, ask, carry)
    counted = ask.weights[..., 0].abs() > 0  # [batch, query]: rows of group `all`
    rows = counted[:, None, :, None]
    errors = {
        "output": _norm_error((output * rows).flatten(2), (dense.output(call) * rows).flatten(2)),
        "received": _norm_error(got.received, want.received),
    }
    if got.mass is not None:  # rows summed to 1 under the log-sum-exp of the kernel that ran
        count = ask.weights[..., 0].sum(1)[:, None]
        errors["mass"] = float(((got.mass - count) / count.clamp_min(1)).abs().max())
    if want.entropy is not None and got.entropy is not None:
        errors["entropy"] = float((got.entropy - want.entropy).abs().max())
    if want.carried is not None and got.carried is not None:
        errors["carried"] = _norm_error(
            (got.carried * counted[..., None]).flatten(1), (want.carried * counted[..., None]).flatten(1)
        )
    return errors


def _norm_error(got: Tensor, want: Tensor) -> float:
    """Largest ‖got − want‖ / ‖want‖ along the last axis; NaN if there is one."""
    got, want = got.double(), want.double()
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
    return float("nan") if bool(error.isnan().any()) else float(error.max())
