"""The Triton kernels in Triton's interpreter, in fp32 (its bf16 `dot` is wrong): errors against float64, as JSON.

Run by `test_triton.py` with TRITON_INTERPRET=1 in the environment, which must be there before triton is imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from calls import call_of, mask, off, probabilities

from floatscope.capture import biased_kernel, column_kernel, columns, dense
from floatscope.capture.ask import ReductionSpec, row_mean
from floatscope.capture.changed import attend
from floatscope.capture.changes import Bias, Changes
from floatscope.capture.received import backend_for, receive

PRIMITIVE = {
    "full": {"kind": "full", "queries": 70, "keys": 70},
    "full, whole blocks": {"kind": "full", "queries": 64, "keys": 64},
    "causal": {"kind": "causal", "queries": 70, "keys": 70},
    "causal, whole blocks": {"kind": "causal", "queries": 128, "keys": 128},
    "full, left padding": {"kind": "full", "queries": 70, "keys": 70, "side": "left"},
    "full, right padding": {"kind": "full", "queries": 70, "keys": 70, "side": "right"},
    "causal, left padding": {"kind": "causal", "queries": 70, "keys": 70, "side": "left"},
    "causal, right padding": {"kind": "causal", "queries": 70, "keys": 70, "side": "right"},
    "causal, cached": {"kind": "causal", "queries": 5, "keys": 70},
    "causal, one cached row": {"kind": "causal", "queries": 1, "keys": 70},
    "full, cached, left padding": {"kind": "full", "queries": 9, "keys": 70, "side": "left"},
    "full, GQA": {"kind": "full", "queries": 40, "keys": 40, "repeats": 2},
    "causal, MQA": {"kind": "causal", "queries": 40, "keys": 40, "repeats": 4},
    "full, 37 groups, 19 carried": {"kind": "full", "queries": 40, "keys": 40, "groups": 37, "carried": 19},
    "causal, 3 groups, 40 carried": {"kind": "causal", "queries": 40, "keys": 40, "groups": 3, "carried": 40},
    "full, wide heads": {"kind": "full", "queries": 40, "keys": 40, "dim": 128},
    "full, hidden keys": {"kind": "full", "queries": 70, "keys": 70, "side": "left", "hides": True},
    "causal, hidden keys, GQA": {"kind": "causal", "queries": 70, "keys": 70, "repeats": 2, "hides": True},
    "causal, hidden keys, cached": {"kind": "causal", "queries": 5, "keys": 70, "hides": True},
    "causal, another scaling": {"kind": "causal", "queries": 40, "keys": 40, "scaling": 0.9},
}
COLUMNS = {
    "columns": {"queries": 70, "keys": 70},
    "columns, left padding, GQA": {"queries": 70, "keys": 70, "side": "left", "repeats": 2},
    "columns, holes": {"queries": 40, "keys": 40, "side": "holes"},
    "columns, cached": {"queries": 5, "keys": 70},
}


def primitive(
    kind, queries, keys, side="none", repeats=1, groups=16, carried=4, dim=16, scaling=None, hides=False
) -> dict[str, float]:
    m = mask(kind, 2, queries, keys, side)
    call = call_of(m, 4 if repeats > 1 else 2, repeats, dim, scaling=scaling)
    if hides:  # from half of the rows, and every other key has a number added to its score
        numbers = torch.where(torch.rand(2, call.query.shape[1], keys) < 0.3, -torch.inf, torch.randn(2, 1, keys))
        changes = Changes((Bias(numbers, torch.rand(2, queries) < 0.5, hides=True),))
        call = replace(call, changes=changes)
    counts = m.standing[..., None]
    weights = torch.rand(2, queries, groups) * counts
    entropy = row_mean(m.standing, m.table.sum(-1)[:, 0].float())
    carry = torch.rand(2, keys, carried)
    done = attend(call)
    lse, rows_of = done.lse, counts[:, None]
    assert backend_for(call) == "triton"
    assert biased_kernel.serves(call) == hides
    got = receive(call, lse, ReductionSpec(weights, entropy), carry)
    A = dense.matrix(call) if hides else probabilities(call, m)
    rows = -torch.where(A > 0, A * A.clamp_min(1e-300).log(), 0.0).sum(-1)
    want = torch.einsum("bhij,big->bhgj", A, weights.double())
    onward = (A @ carry.double()[:, None]).mean(1)
    return {
        "output": off((done.output * rows_of).flatten(2), (dense.output(call) * rows_of).flatten(2)),
        "received": off(got.received, want),
        "entropy": float((got.entropy - (rows * entropy[:, None]).sum(-1)).abs().max()),
        "carried": off((got.carried * counts).flatten(1), (onward * counts).flatten(1)),
    }


def column_stats(queries, keys, side="none", repeats=1) -> dict[str, float]:
    m = mask("full", 2, queries, keys, side)
    call = call_of(m, 4, repeats, 16)
    output, gram = attend(call).output, columns.gram(torch.randn(24, 4 * 16), 4)
    rows = columns.Rows.of(m.standing)
    assert column_kernel.serves(call)
    want = columns.columns(call, output, rows, gram)
    got = column_kernel.columns(call, output, rows, gram)
    bare = column_kernel.columns(call, output, rows, None).stats
    assert torch.equal(bare[:, :, :4], got.stats[:, :, :4])
    assert bare[:, :, 4].isnan().sum() == (bare[:, :, 4].numel() if m.valid is None else 4 * m.valid.sum())
    return {
        "stats": off(got.stats, want.stats),
        "output_norm": off(got.output_norm, want.output_norm),
        "query_norm": off(got.query_norm, want.query_norm),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    errors = {name: primitive(**case) for name, case in PRIMITIVE.items()}
    errors |= {name: column_stats(**case) for name, case in COLUMNS.items()}
    json.dump(errors, sys.stdout)
