"""Print the errors of the Triton kernels against float64 as JSON, from Triton's interpreter in fp32.

The interpreter's bf16 `dot` is wrong. `test_triton.py` runs this script with TRITON_INTERPRET=1, which must be in the
environment before triton is imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from calls import make_call, make_mask, probabilities, relative_error

from floatscope.capture import biased_kernel, dense
from floatscope.capture import key_stats as key_stats
from floatscope.capture import key_stats_kernel as key_stats_kernel
from floatscope.capture.backends import reduce_attention, select_backend
from floatscope.capture.edit_tensors import BiasTensors, EditTensors
from floatscope.capture.edited_attention import attend_with_edits
from floatscope.capture.reduction_spec import ReductionSpec, entropy_row_weights

REDUCTION_CASES = {
    "full": {"kind": "full", "queries": 70, "keys": 70},
    "full, complete blocks": {"kind": "full", "queries": 64, "keys": 64},
    "causal": {"kind": "causal", "queries": 70, "keys": 70},
    "causal, complete blocks": {"kind": "causal", "queries": 128, "keys": 128},
    "full, left padding": {"kind": "full", "queries": 70, "keys": 70, "side": "left"},
    "full, right padding": {"kind": "full", "queries": 70, "keys": 70, "side": "right"},
    "causal, left padding": {"kind": "causal", "queries": 70, "keys": 70, "side": "left"},
    "causal, right padding": {"kind": "causal", "queries": 70, "keys": 70, "side": "right"},
    "causal, cached": {"kind": "causal", "queries": 5, "keys": 70},
    "causal, one cached row": {"kind": "causal", "queries": 1, "keys": 70},
    "full, cached, left padding": {"kind": "full", "queries": 9, "keys": 70, "side": "left"},
    "full, GQA": {"kind": "full", "queries": 40, "keys": 40, "repeats": 2},
    "causal, MQA": {"kind": "causal", "queries": 40, "keys": 40, "repeats": 4},
    "full, 37 groups, 19 columns of carry": {
        "kind": "full",
        "queries": 40,
        "keys": 40,
        "groups": 37,
        "carry_columns": 19,
    },
    "causal, 3 groups, 40 columns of carry": {
        "kind": "causal",
        "queries": 40,
        "keys": 40,
        "groups": 3,
        "carry_columns": 40,
    },
    "full, wide heads": {"kind": "full", "queries": 40, "keys": 40, "dim": 128},
    "full, hidden keys": {"kind": "full", "queries": 70, "keys": 70, "side": "left", "hides": True},
    "causal, hidden keys, GQA": {"kind": "causal", "queries": 70, "keys": 70, "repeats": 2, "hides": True},
    "causal, hidden keys, cached": {"kind": "causal", "queries": 5, "keys": 70, "hides": True},
    "causal, another scaling": {"kind": "causal", "queries": 40, "keys": 40, "scaling": 0.9},
}
KEY_STATS_CASES = {
    "key stats": {"queries": 70, "keys": 70},
    "key stats, left padding, GQA": {"queries": 70, "keys": 70, "side": "left", "repeats": 2},
    "key stats, holes": {"queries": 40, "keys": 40, "side": "holes"},
    "key stats, cached": {"queries": 5, "keys": 70},
}


def reduction_errors(
    kind, queries, keys, side="none", repeats=1, groups=16, carry_columns=4, dim=16, scaling=None, hides=False
) -> dict[str, float]:
    m = make_mask(kind, 2, queries, keys, side)
    call = make_call(m, 4 if repeats > 1 else 2, repeats, dim, scaling=scaling)
    if hides:  # hide keys from half of the rows; add a number to the scores of the others
        numbers = torch.where(torch.rand(2, call.query.shape[1], keys) < 0.3, -torch.inf, torch.randn(2, 1, keys))
        edits = EditTensors((BiasTensors(numbers, torch.rand(2, queries) < 0.5, hides_keys=True),))
        call = replace(call, edits=edits)
    counts = m.valid_rows[..., None]
    weights = torch.rand(2, queries, groups) * counts
    entropy = entropy_row_weights(m.valid_rows, m.table.sum(-1)[:, 0].float())
    carry = torch.rand(2, keys, carry_columns)
    attended = attend_with_edits(call)
    lse, rows_of = attended.lse, counts[:, None]
    assert select_backend(call) == "triton"
    assert biased_kernel.supports(call) == hides
    result = reduce_attention(call, lse, ReductionSpec(weights, entropy), carry)
    A = dense.attention_matrix(call) if hides else probabilities(call, m)
    rows = -torch.where(A > 0, A * A.clamp_min(1e-300).log(), 0.0).sum(-1)
    expected = torch.einsum("bhij,big->bhgj", A, weights.double())
    attended_carry = (A @ carry.double()[:, None]).mean(1)
    return {
        "output": relative_error(
            (attended.output * rows_of).flatten(2), (dense.attention_output(call) * rows_of).flatten(2)
        ),
        "received": relative_error(result.received, expected),
        "entropy": float((result.entropy - (rows * entropy[:, None]).sum(-1)).abs().max()),
        "carry": relative_error((result.attended_carry * counts).flatten(1), (attended_carry * counts).flatten(1)),
    }


def key_stats_errors(queries, keys, side="none", repeats=1) -> dict[str, float]:
    m = make_mask("full", 2, queries, keys, side)
    call = make_call(m, 4, repeats, 16)
    output, gram = attend_with_edits(call).output, key_stats.output_gram(torch.randn(24, 4 * 16), 4)
    rows = key_stats.QueryRows.from_valid(m.valid_rows)
    assert key_stats_kernel.supports(call)
    expected = key_stats.compute_key_stats(call, output, rows, gram)
    result = key_stats_kernel.compute_key_stats(call, output, rows, gram)
    bare = key_stats_kernel.compute_key_stats(call, output, rows, None).stats
    assert torch.equal(bare[:, :, :4], result.stats[:, :, :4])
    assert bare[:, :, 4].isnan().sum() == (bare[:, :, 4].numel() if m.valid is None else 4 * m.valid.sum())
    return {
        "stats": relative_error(result.stats, expected.stats),
        "output_norm": relative_error(result.output_norm, expected.output_norm),
        "query_norm": relative_error(result.query_norm, expected.query_norm),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    errors = {name: reduction_errors(**case) for name, case in REDUCTION_CASES.items()}
    errors |= {name: key_stats_errors(**case) for name, case in KEY_STATS_CASES.items()}
    json.dump(errors, sys.stdout)
