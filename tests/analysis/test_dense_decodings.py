"""Traces built from dense decodings equal those of a watched decoding, which the other tests build on."""

from __future__ import annotations

import numpy as np
import pytest
from dense_decodings import Decoding, build_trace

import floatscope as fs

LENGTHS = (21, 13)
SHAPE = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 64}
FIELDS = (
    "received", "uniform", "visible_rows", "eligible", "top_key", "row_key", "row_mass", "row_regions", "regions",
    "keys", "queries", "states", "tokens", "block", "commit_step", "commit_position", "commit_row", "commit_token",
    "region_member", "layers", "layer_visibility", "tokens_after",
)  # fmt: skip


def decoding_from_trace(trace: fs.Trace) -> Decoding:
    """From the stored attention matrices; of a cached model, the rows of all steps form the last matrix."""
    arrays, cached = trace.arrays, trace.meta["rows"] == "cache"
    keys, queries = arrays["keys"].tolist(), arrays["queries"].tolist()
    if cached:
        last = np.zeros((*arrays["matrix"].shape[1:3], keys[-1], keys[-1]))
        for t, (n, q) in enumerate(zip(keys, queries, strict=True)):
            last[:, :, n - q : n, :n] = arrays["matrix"][t, :, :, :q, :n]
        attention = [last[:, :, :n, :n] for n in keys]
    else:
        attention = [arrays["matrix"][t, :, :, :n, :n].astype(float) for t, n in enumerate(keys)]
    commits = zip(*(arrays[f"commit_{name}"].tolist() for name in ("step", "position", "row", "token")), strict=True)
    return Decoding(
        attention,
        [A[:, 0] > 0 for A in attention],
        [arrays["states"][t, :n] for t, n in enumerate(keys)],
        [arrays["tokens"][t, :n] for t, n in enumerate(keys)],
        list(commits),
        [tuple(bound) for bound in arrays["block"].tolist()],
        {r: np.flatnonzero(arrays["region_member"][:, k]) for k, r in enumerate(trace.coords["region"])},
        cached,
    )


@pytest.mark.parametrize("architecture", ["llada", "llama"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_built_trace_equals_the_trace_of_a_decoding(architecture, length, tmp_path):
    model = fs.load(fs.write_random(tmp_path / architecture, architecture=architecture, **SHAPE), device="cpu")
    regions = fs.Regions.from_spans([{"question": [(0, 4)], "rest": [(3, length + 6)]}], length=length + 8)
    settings = {"steps": 5} if architecture == "llada" else {"stop": False}
    out = fs.decode(model, [range(length)], new_tokens=8, regions=regions, watch=fs.Watch(level="full"), **settings)
    real = out.trace
    decoding = decoding_from_trace(real)
    built = build_trace(decoding)
    assert built.meta["rows"] == real.meta["rows"] == ("all" if architecture == "llada" else "cache")
    for name in FIELDS:
        near = {"rtol": 2e-3, "atol": 1e-3} if real.arrays[name].dtype == np.float16 else {"rtol": 1e-4, "atol": 1e-6}
        np.testing.assert_allclose(built.arrays[name], real.arrays[name], **near, err_msg=name)
        assert built.arrays[name].dtype == real.arrays[name].dtype
    np.testing.assert_allclose(built.arrays["top"][..., 0], real.arrays["top"][..., 0], rtol=1e-4)
    np.testing.assert_allclose(built.arrays["moments"][..., :4, :], real.arrays["moments"][..., :4, :], rtol=1e-4)
    np.testing.assert_allclose(built.arrays["head_stats"][..., :3], real.arrays["head_stats"][..., :3], rtol=1e-4)
    assert built.arrays.keys() == real.arrays.keys() - {"received_heads", "rows", "matrix"}
    assert built.axes == {name: real.axes[name] for name in built.arrays}
