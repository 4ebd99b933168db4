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

from floatscope.capture import attention_kernel, dense
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
    "causal, cached, left padding": {"kind": "causal", "queries": 9, "keys": 70, "side": "left"},
    "block of 4": {"kind": "block", "queries": 70, "keys": 70, "size": 4},
    "block of 8, left padding": {"kind": "block", "queries": 70, "keys": 70, "size": 8, "side": "left"},
    "block of 32, complete blocks, wide heads": {"kind": "block", "queries": 96, "keys": 96, "size": 32, "dim": 128},
    "block of 32, right padding, GQA": {
        "kind": "block",
        "queries": 90,
        "keys": 90,
        "size": 32,
        "side": "right",
        "repeats": 2,
    },
    "block of 48": {"kind": "block", "queries": 130, "keys": 130, "size": 48, "dim": 64},
    "block of 48, left padding, cached": {
        "kind": "block",
        "queries": 20,
        "keys": 130,
        "size": 48,
        "side": "left",
        "seed": 1,
    },
    "block of 32, the last block cached": {"kind": "block", "queries": 32, "keys": 96, "size": 32},
    "block of 4, the last block cached, left padding": {
        "kind": "block",
        "queries": 4,
        "keys": 70,
        "size": 4,
        "side": "left",
    },
    "block of 8, hidden keys": {"kind": "block", "queries": 70, "keys": 70, "size": 8, "side": "left", "hides": True},
    "window of 6": {"kind": "window", "queries": 130, "keys": 130, "size": 6},
    "window of 34": {"kind": "window", "queries": 130, "keys": 130, "size": 34},  # the last row begins a block of 32
    "window of 6, left padding, cached": {"kind": "window", "queries": 20, "keys": 100, "size": 6, "side": "left"},
    "window of 64": {"kind": "window", "queries": 130, "keys": 130, "size": 64, "dim": 64, "seed": 2},
    "window of 64, right padding, wide heads": {
        "kind": "window",
        "queries": 90,
        "keys": 90,
        "size": 64,
        "side": "right",
        "dim": 128,
    },
    "window of 6, one cached row": {"kind": "window", "queries": 1, "keys": 70, "size": 6},
    "window of 6, hidden keys, GQA": {
        "kind": "window",
        "queries": 70,
        "keys": 70,
        "size": 6,
        "repeats": 2,
        "hides": True,
    },
    "full, heads of 512, cached": {"kind": "full", "queries": 20, "keys": 50, "dim": 512, "repeats": 2},
    "causal, heads of 512": {"kind": "causal", "queries": 40, "keys": 40, "dim": 512, "side": "left"},
    "block of 8, heads of 512": {"kind": "block", "queries": 40, "keys": 40, "size": 8, "dim": 512},
    "window of 6, heads of 512": {"kind": "window", "queries": 40, "keys": 40, "size": 6, "dim": 512},
    "causal, another scaling": {"kind": "causal", "queries": 40, "keys": 40, "scaling": 0.9},
}
SKIP_CASES = {
    "block-causal programs skip what they cannot see": {"kind": "block", "size": 32},
    "windowed programs skip what they cannot see": {"kind": "window", "size": 6},
}
KEY_STATS_CASES = {
    "key stats": {"queries": 70, "keys": 70},
    "key stats, left padding, GQA": {"queries": 70, "keys": 70, "side": "left", "repeats": 2},
    "key stats, holes": {"queries": 40, "keys": 40, "side": "holes"},
    "key stats, cached": {"queries": 5, "keys": 70},
}


def reduction_errors(
    kind,
    queries,
    keys,
    side="none",
    repeats=1,
    groups=16,
    carry_columns=4,
    dim=16,
    scaling=None,
    hides=False,
    size=4,
    seed=0,
) -> dict[str, float]:
    m = make_mask(kind, 2, queries, keys, side, size, seed)
    call = make_call(m, 4 if repeats > 1 else 2, repeats, dim, scaling=scaling, seed=seed)
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
    assert attention_kernel.supports(call)
    if kind == "full" or dim == 512:  # the model's kernel may give the output without the log-sum-exp
        lse = attention_kernel.compute_lse(call)
    result = reduce_attention(call, lse, ReductionSpec(weights, entropy), carry)
    A = dense.attention_matrix(call) if hides else probabilities(call, m)
    rows = -torch.where(A > 0, A * A.clamp_min(1e-300).log(), 0.0).sum(-1)
    expected = torch.einsum("bhij,big->bhgj", A, weights.double())
    attended_carry = (A @ carry.double()[:, None]).mean(1)
    return {
        "log-sum-exp": relative_error(lse * rows_of[..., 0], expected_lse(call, A) * rows_of[..., 0]),
        "output": relative_error(
            (attended.output * rows_of).flatten(2), (dense.attention_output(call) * rows_of).flatten(2)
        ),
        "received": relative_error(result.received, expected),
        "entropy": float((result.entropy - (rows * entropy[:, None]).sum(-1)).abs().max()),
        "carry": relative_error((result.attended_carry * counts).flatten(1), (attended_carry * counts).flatten(1)),
    }


def expected_lse(call, A) -> torch.Tensor:
    """The log-sum-exp in float64 from the largest probability of each row: its score minus its logarithm."""
    scores = call.scaling * call.query.double() @ call.key.double().repeat_interleave(call.repeats, 1).mT
    if call.edits is not None:
        [bias] = call.edits.biases
        number = torch.where(bias.queries[:, None, :, None], bias.keys.double()[:, :, None], 0.0)
        scores = scores + torch.where(A > 0, number.nan_to_num(neginf=0.0), 0.0)  # a row's own key is not hidden
    largest, at = A.max(-1)
    return torch.where(largest > 0, scores.gather(-1, at[..., None])[..., 0] - largest.clamp_min(1e-300).log(), 1e30)


def skip_errors(kind, size) -> dict[str, float]:
    """NaN stands where no program of the other rows and keys may read: it would spread through the products."""
    T = 256
    m = make_mask(kind, 1, T, T, size=size)
    call = make_call(m, 2, dim=16)
    attended = attend_with_edits(call)
    weights = torch.ones(1, T, 16)
    weights[:, :64] = torch.nan  # these rows see no key from 128 on, and stand outside the window of keys from 128 on
    R = reduce_attention(call, attended.lse, ReductionSpec(weights)).received[..., 128:]
    value = call.value.clone()
    value[:, :, 128:] = torch.nan
    if kind == "window":
        value[:, :, :64] = torch.nan
    out = attention_kernel.attend(replace(call, value=value))[0][:, :, 96:128]
    A = probabilities(call, m)
    return {
        "received": relative_error(R, A[..., 128:].sum(2)[:, :, None].expand_as(R)),
        "output": relative_error(out, attended.output[:, :, 96:128]),
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


def gradient_errors() -> dict[str, float]:
    """The kernels have no backward: a call that needs a gradient runs without them."""
    m = make_mask("block", 1, 20, 20)
    call = make_call(m, 2, dim=16)
    assert attention_kernel.supports(call)
    value = call.value.clone().requires_grad_()
    attend_with_edits(replace(call, value=value)).output.sum().backward()
    return {"gradient": relative_error(value.grad, probabilities(call, m).sum(2)[..., None].expand(value.shape))}


if __name__ == "__main__":
    torch.manual_seed(0)
    errors = {name: reduction_errors(**case) for name, case in REDUCTION_CASES.items()}
    errors |= {name: skip_errors(**case) for name, case in SKIP_CASES.items()}
    errors["gradient"] = gradient_errors()
    errors |= {name: key_stats_errors(**case) for name, case in KEY_STATS_CASES.items()}
    json.dump(errors, sys.stdout)
