"""What regions take from each other: by hand, against products of whole matrices, and with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from dense_decodings import KINDS, Decoding, build_trace, canvas, causal, full, growing, random_decoding

import floatscope as fs
from floatscope.analysis import TraceView, region_flow
from floatscope.errors import UserError
from floatscope.tasks.sample import Passage, Sample
from floatscope.traces import Trace

pytestmark = pytest.mark.filterwarnings("error")
decodings = pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for kind in KINDS for seed in range(4)])
tables = pytest.mark.parametrize(
    "table", [region_flow.flow, region_flow.rollout, region_flow.rollout_distance, region_flow.region_importance]
)
HALF = {"rtol": 2e-3, "atol": 2e-4}  # regions are stored as float16
N, PROMPT = 40, 32
PARTS = ["bos", "template", "document 1", "document 2", "question", "answer"]


def regions(prompt: int = PROMPT, beyond: int = 60) -> dict[str, Sequence[int]]:
    """Regions that contain every position once; gold is the second document, and evidence is part of it."""
    return {
        "bos": [0],
        "template": [1, 2, 8, *range(18, prompt)],
        "document 1": range(3, 8),
        "gold": range(9, 14),
        "evidence": [10, 11],
        "document 2": range(9, 14),
        "question": range(14, 18),
        "answer": range(prompt, beyond),
    }


def with_rollout(trace: Trace, decoding: Decoding) -> Trace:
    """The trace with the rollout that a watched forward would store."""
    stored = [
        [pool_regions(rollout_matrix(decoding, t, layer), decoding) for layer in range(decoding.layers)]
        for t in range(decoding.steps)
    ]
    return replace(trace, arrays={**trace.arrays, "rollout": np.array(stored, np.float32)})


def rollout_matrix(decoding: Decoding, t: int, layer: int) -> np.ndarray:
    """The product of whole matrices from the first layer up to this one, [row, key]."""
    product = np.eye(len(decoding.states[t]))
    for A in decoding.attention[t][: layer + 1]:
        product = (A.mean(0) / 2 + np.eye(len(A[0])) / 2) @ product
    return product


def pool_regions(A: np.ndarray, decoding: Decoding, names: Sequence[str] | None = None) -> np.ndarray:
    """What an average row of a region gives each region; NaN for a region without rows."""
    n = len(A)
    at = [[i for i in decoding.regions[name] if i < n] for name in names or decoding.regions]
    return np.array([[A[np.ix_(r, s)].sum() / len(r) if r else np.nan for s in at] for r in at])


@functools.cache
def case(seed: int, kind: str) -> tuple[Decoding, Trace]:
    decoding = random_decoding(seed, kind)
    decoding = replace(decoding, regions=regions(int((decoding.states[0] == 1).sum())))
    return decoding, with_rollout(build_trace(decoding, f"{kind}-{seed}"), decoding)


def uniform_attention(decoding: Decoding, t: int, layer: int) -> np.ndarray:
    mask = decoding.visible[t][layer]
    return mask / mask.sum(1, keepdims=True)


def mean_over_steps(of_step: Callable[[int], np.ndarray], steps: int) -> np.ndarray:
    """The mean over the steps with a value."""
    each = np.array([of_step(t) for t in range(steps)])
    return np.nansum(each, 0) / np.isfinite(each).sum(0)


def region_matrix(table: pd.DataFrame, column: str, layer: int, names: Sequence[str]) -> np.ndarray:
    """A layer's values [region, key_region]."""
    wide = table[table["layer"] == layer].pivot(index="region", columns="key_region", values=column)
    return wide.loc[list(names), list(names)].to_numpy()


def decode_one_layer(A: np.ndarray, steps: int = 1, heads: int = 1, **more: object) -> Decoding:
    return canvas(np.broadcast_to(A, (steps, 1, heads, *A.shape)), PROMPT, regions=regions(), **more)


# By hand


def test_answer_rows_attend_to_gold():
    """In one of two heads they give .7 to gold and .3 to themselves; everything else is uniform."""
    A = np.full((2, 2, 2, N, N), 1 / N)
    A[:, 1, 0, PROMPT:] = 0
    A[:, 1, 0, PROMPT:, 9:14], A[:, 1, 0, PROMPT:, PROMPT:] = 0.7 / 5, 0.3 / 8
    table = region_flow.flow(TraceView(build_trace(canvas(A, PROMPT, regions=regions()))))
    assert list(table.columns) == [
        "sample", "layer", "depth", "region", "key_region", "mass", "per_token", "base", "ratio"
    ]  # fmt: skip
    assert len(table) == 2 * 8 * 8
    cells = table.set_index(["layer", "region", "key_region"])[["mass", "per_token", "base", "ratio"]]
    expected = {
        "gold": (0.7, 5),
        "document 2": (0.7, 5),
        "answer": (0.3, 8),
        "document 1": (0, 5),
        "evidence": (0.28, 2),
    }
    for name, (mass, tokens) in expected.items():
        mass, base = (mass + tokens / N) / 2, tokens / N
        values = cells.loc[(1, "answer", name)].tolist()
        assert values == pytest.approx([mass, mass / tokens, base, mass / base], rel=1e-3), name
    others = table[(table["layer"] == 0) | (table["region"] != "answer")]
    np.testing.assert_allclose(others["ratio"], 1, rtol=1e-3)
    np.testing.assert_allclose(others["per_token"], 1 / N, rtol=1e-3)
    assert table["depth"].tolist() == [0.0] * 64 + [1.0] * 64


def test_flow_is_the_mean_over_steps():
    A = np.full((4, 1, 1, N, N), 1 / N)
    A[0, ..., PROMPT:, :] = np.eye(N)[3]
    table = region_flow.flow(TraceView(build_trace(canvas(A, PROMPT, regions=regions()))))
    assert region_matrix(table, "mass", 0, ["answer", "document 1"])[0, 1] == pytest.approx(
        (1 + 3 * 5 / N) / 4, rel=1e-3
    )


@pytest.mark.parametrize("kind", ["full", "causal", "block", "window", "cached", "grown"])
def test_uniform_attention_is_its_own_base(kind):
    """Under any mask with a structure; also for rollouts. A trace without masks is full or causal by its counts."""
    at, size = np.arange(N), {"block": 8, "window": 6}.get(kind, 0)
    is_near = at[:, None] - at < size
    mask = {"full": full(N), "block": at[:, None] // 8 >= at // 8, "window": causal(N) & is_near}.get(kind, causal(N))
    A = np.broadcast_to(mask / mask.sum(1, keepdims=True), (3, 2, N, N))
    if kind in ("cached", "grown"):
        decoding = growing(A, PROMPT, cached=kind == "cached", regions=regions())
    else:
        decoding = canvas(np.stack([A] * 2), PROMPT, mask, regions=regions())
    meta = {"masks": [{"kind": kind, "size": size}]} if size else {}
    view = TraceView(with_rollout(build_trace(decoding, **meta), decoding))
    table = region_flow.flow(view)
    np.testing.assert_allclose(table["mass"], table["base"], **HALF)
    assert table["base"].notna().all()
    assert (table["ratio"].isna() == (table["base"] == 0)).all()
    importance = region_flow.region_importance(view)
    np.testing.assert_allclose(importance[["token_ratio", "pooled_ratio"]], 1, rtol=2e-3)
    for column in ("token", "pooled", "token_base", "pooled_base"):
        assert importance[column].sum() == pytest.approx(1)
    if kind == "full":
        share = [1 / N, (3 + PROMPT - 18) / N, 5 / N, 5 / N, 4 / N, 8 / N]
        for column in ("token_base", "pooled_base"):
            assert importance.set_index("key_region").loc[PARTS, column].tolist() == pytest.approx(share)


def test_under_a_causal_mask_early_keys_have_the_larger_base():
    """Row i gives the first key 1 / (i + 1)."""
    decoding = growing(np.broadcast_to(causal(N) / causal(N).sum(1, keepdims=True), (1, 1, N, N)), N - 1)
    decoding = replace(decoding, regions={"first": [0], "rest": range(1, N)})
    importance = region_flow.region_importance(TraceView(with_rollout(build_trace(decoding), decoding))).set_index(
        "key_region"
    )
    shares = [sum(1 / i for i in range(1, n + 1)) / n for n in (N - 1, N)]
    expected = np.mean([(share + 1 / n) / 2 for share, n in zip(shares, (N - 1, N), strict=True)])
    assert importance.loc["first", "token_base"] == pytest.approx(expected)
    assert importance.loc["first", "pooled_base"] == pytest.approx(expected)  # both are equal in the first layer


def test_layers_with_different_masks_have_different_bases():
    """The first layer has full attention, the second causal attention."""
    mask = np.stack([full(N), causal(N)])
    decoding = canvas(np.stack([mask[:, None] / mask.sum(-1)[:, None, :, None]] * 2), PROMPT, mask, regions=regions())
    view = TraceView(with_rollout(build_trace(decoding), decoding))
    assert view.trace.arrays["layer_visibility"].tolist() == [0, 1]
    table, importance = region_flow.flow(view), region_flow.region_importance(view)
    np.testing.assert_allclose(table["mass"], table["base"], **HALF)
    assert (table.loc[table["layer"] == 0, "base"] > 0).all()
    assert (table.loc[table["layer"] == 1, "base"] == 0).any()
    np.testing.assert_allclose(importance[["token_ratio", "pooled_ratio"]], 1, rtol=2e-3)


def test_the_base_under_a_window_is_nan():
    at = np.arange(N)
    behind = causal(N) & (at[:, None] - at <= 6)
    for mask in (abs(at[:, None] - at) <= 6, behind, causal(N) & (behind | (at == 0))):
        decoding = decode_one_layer(mask / mask.sum(1, keepdims=True), visible=mask)
        view = TraceView(with_rollout(build_trace(decoding), decoding))
        table = region_flow.flow(view)
        assert table[["base", "ratio"]].isna().all(axis=None)
        assert table["mass"].notna().all()
        assert region_flow.region_importance(view)[["token_base", "pooled_base", "token_ratio"]].isna().all(axis=None)


def test_rollout_distance_of_uniform_attention_and_of_identity():
    """Uniform attention forgets the row over many layers; attention to itself never does."""
    layers = 12
    for A, expected in ((np.full((N, N), 1 / N), [2.0**-k for k in range(1, layers + 1)]), (np.eye(N), [1.0] * layers)):
        decoding = canvas(np.broadcast_to(A, (2, layers, 1, N, N)), PROMPT, regions=regions())
        table = region_flow.rollout_distance(TraceView(with_rollout(build_trace(decoding), decoding)))
        assert list(table.columns) == ["sample", "layer", "depth", "token", "pooled"]
        for column in ("token", "pooled"):
            assert table[column].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    equal_rows = np.broadcast_to(np.arange(1.0, 5) / 10, (2, 1, 4, 4))
    assert region_flow._max_distance(equal_rows, np.ones((2, 4), int)).tolist() == [0]


def test_rollout_distance_is_the_mean_over_steps():
    """It is the distance at each step, not of the mean over steps."""
    A = np.zeros((2, 1, 1, N, N))
    A[..., 3] = 1
    A[0, ..., PROMPT:, 3], A[0, ..., PROMPT:, 9] = 0, 1
    decoding = canvas(A, PROMPT, regions={"prompt": range(PROMPT), "answer": range(PROMPT, N)})
    table = region_flow.rollout_distance(TraceView(with_rollout(build_trace(decoding), decoding)))
    assert table["token"].tolist() == pytest.approx([0.5], rel=1e-3)


def test_the_importance_of_a_key_that_all_rows_attend_to():
    """Half of what a row holds is its own input."""
    A = np.zeros((N, N))
    A[:, 0] = 1
    decoding = decode_one_layer(A, steps=2)
    importance = region_flow.region_importance(TraceView(with_rollout(build_trace(decoding), decoding))).set_index(
        "key_region"
    )
    assert list(importance.columns) == [
        "sample", "token", "token_base", "token_ratio", "pooled", "pooled_base", "pooled_ratio"
    ]  # fmt: skip
    for way in ("token", "pooled"):
        assert importance.loc["bos", way] == pytest.approx(0.5 + 0.5 / N, rel=1e-3)
        assert importance.loc["bos", f"{way}_ratio"] == pytest.approx((N + 1) / 2, rel=1e-3)
        assert importance.loc["answer", way] == pytest.approx(8 / N / 2, rel=1e-3)


# Against slow references


@decodings
def test_flow(seed, kind):
    decoding, trace = case(seed, kind)
    table = region_flow.flow(TraceView(trace))
    names = list(decoding.regions)
    for layer in range(decoding.layers):
        mass = mean_over_steps(
            lambda t, k=layer: pool_regions(decoding.attention[t][k].mean(0), decoding), decoding.steps
        )
        np.testing.assert_allclose(region_matrix(table, "mass", layer, names), mass, **HALF)
        base = mean_over_steps(
            lambda t, k=layer: pool_regions(uniform_attention(decoding, t, k), decoding), decoding.steps
        )
        values = region_matrix(table, "base", layer, names)
        if kind == "window" and layer % 2:
            assert np.isnan(values).all()
        else:
            np.testing.assert_allclose(values, base, rtol=1e-12)
        counts = [[sum(i < len(state) for i in at) for at in decoding.regions.values()] for state in decoding.states]
        tokens = [np.mean([row for row in counts if row[r]], 0) for r in range(len(names))]  # while the region has rows
        np.testing.assert_allclose(region_matrix(table, "per_token", layer, names), mass / tokens, **HALF)


@decodings
def test_rollout(seed, kind):
    decoding, trace = case(seed, kind)
    assert region_flow.partition_regions(trace) == PARTS
    table, distance, importance = (
        f(TraceView(trace)) for f in (region_flow.rollout, region_flow.rollout_distance, region_flow.region_importance)
    )
    assert list(table.columns) == ["sample", "layer", "depth", "region", "key_region", "token", "pooled"]

    def by_token(t: int, layer: int) -> np.ndarray:
        return pool_regions(rollout_matrix(decoding, t, layer), decoding, PARTS)

    def by_region(t: int, layer: int) -> np.ndarray:
        """Products of pooled matrices; the answer has no rows before its first token."""
        present = [name for name in PARTS if any(i < len(decoding.states[t]) for i in decoding.regions[name])]
        carried = np.eye(len(present))
        for A in decoding.attention[t][: layer + 1]:
            carried = 0.5 * pool_regions(A.mean(0), decoding, present) @ carried + 0.5 * carried
        padded = np.full((len(PARTS), len(PARTS)), np.nan)
        padded[: len(present), : len(present)] = carried
        padded[: len(present), len(present) :] = 0
        return padded

    for way, of in {"token": by_token, "pooled": by_region}.items():
        for layer in range(decoding.layers):
            expected = mean_over_steps(lambda t, k=layer, of=of: of(t, k), decoding.steps)
            np.testing.assert_allclose(region_matrix(table, way, layer, PARTS), expected, **HALF)
            each = [of(t, layer) for t in range(decoding.steps)]
            index = np.mean([max(np.nansum(abs(a - b)) / 2 for a in rows for b in rows) for rows in each])
            assert distance.loc[layer, way] == pytest.approx(index, rel=2e-3)
        shares = []
        for t, rows in enumerate(each):
            n = len(decoding.states[t])
            sizes = [sum(i < n for i in decoding.regions[name]) for name in PARTS]
            shares.append(sum(size * row for size, row in zip(sizes, rows, strict=True) if size) / n)
        np.testing.assert_allclose(importance.set_index("key_region").loc[PARTS, way], np.mean(shares, 0), **HALF)
    if decoding.layers > 1:
        gap = abs(table["token"] - table["pooled"])
        assert gap[table["layer"] == 0].max() < 1e-3
        assert gap[table["layer"] > 0].max() > 2e-3


@decodings
def test_the_base_is_the_rollout_of_uniform_attention(seed, kind):
    decoding, trace = case(seed, kind)
    importance = region_flow.region_importance(TraceView(trace)).set_index("key_region").loc[PARTS]
    if kind == "window" and decoding.layers > 1:
        assert importance[["token_base", "pooled_base"]].isna().all(axis=None)
        return
    uniform = replace(
        decoding, attention=[mask[:, None] / mask.sum(-1, keepdims=True)[:, None] for mask in decoding.visible]
    )
    expected = (
        region_flow.region_importance(TraceView(with_rollout(build_trace(uniform), uniform)))
        .set_index("key_region")
        .loc[PARTS]
    )
    np.testing.assert_allclose(importance["token_base"], expected["token"], rtol=1e-5)
    np.testing.assert_allclose(importance["pooled_base"], expected["pooled"], **HALF)
    np.testing.assert_allclose(importance["token_ratio"], importance["token"] / importance["token_base"])
    np.testing.assert_allclose(importance["pooled_ratio"], importance["pooled"] / importance["pooled_base"])


@tables
@pytest.mark.parametrize("seed", range(4))
def test_a_cache_does_not_change_the_tables(table, seed):
    decoding, cached = case(seed, "cached")
    uncached = replace(decoding, cached=False)
    traces = (cached, with_rollout(build_trace(uncached, cached.sample), uncached))
    tables = [table(TraceView(trace)) for trace in traces]
    pd.testing.assert_frame_equal(*tables, **HALF)
    assert tables[0].drop(columns="ratio", errors="ignore").notna().all(axis=None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    shape = {"layers": 3, "width": 32, "kv_heads": 2, "ffn": 48, "vocab_size": 64}
    return fs.load(fs.write_random(tmp_path_factory.mktemp("llama"), architecture="llama", **shape), device="cpu")


@pytest.mark.parametrize("architecture", ["llada", "llama"])
def test_flow_of_a_watched_model(architecture, request):
    """Against the whole matrices, which the trace stores too."""
    model, prompt, new = request.getfixturevalue(architecture), 20, 6
    spans = {"bos": [(0, 1)], "document 1": [(1, 8)], "question": [(8, prompt)], "answer": [(prompt, prompt + new)]}
    regions = fs.Regions.from_spans([spans], length=prompt + new)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 60, prompt)]
    trace = fs.decode(model, [ids], new_tokens=new, regions=regions, watch=fs.Watch(level="full"), stop=False).trace
    matrix, keys, rows = (trace.arrays[name] for name in ("matrix", "keys", "queries"))
    attention: list[np.ndarray] = []
    for t, n in enumerate(keys):
        A = np.zeros((*matrix.shape[1:3], n, n))
        first = n - rows[t]
        if first:
            A[:, :, :first, :first] = attention[-1]
        A[:, :, first:] = matrix[t][:, :, : rows[t], :n]
        attention.append(A)
    assert bool(keys[0] < keys[-1]) == (architecture == "llama")
    mask = [np.broadcast_to(causal(n) if architecture == "llama" else full(n), (3, n, n)) for n in keys]
    members = {name: range(*pieces[0]) for name, pieces in spans.items()}
    decoding = Decoding(attention, mask, [np.ones(n) for n in keys], [np.ones(n) for n in keys], regions=members)
    table = region_flow.rollout(TraceView(trace))
    steps = region_flow.flow(TraceView(trace))
    for layer in range(3):
        for column, of in {
            "token": lambda t, k=layer: pool_regions(rollout_matrix(decoding, t, k), decoding),
            "mass": lambda t, k=layer: pool_regions(decoding.attention[t][k].mean(0), decoding),
            "base": lambda t, k=layer: pool_regions(uniform_attention(decoding, t, k), decoding),
        }.items():
            values = region_matrix(table if column == "token" else steps, column, layer, list(spans))
            near = HALF if column == "mass" else {"rtol": 1e-4, "atol": 1e-6}
            np.testing.assert_allclose(values, mean_over_steps(of, decoding.steps), **near)
    assert region_flow.rollout_distance(TraceView(trace))["token"].is_monotonic_decreasing


# Refused


def test_the_partition_of_a_traced_prompt(tmp_path):
    """Every token of a plain prompt is in one region besides gold and evidence."""
    gold = Passage("Mira", "Mira lives in Velmora.", gold=True, evidence=((14, 21),))
    other = Passage("Kalen", "Kalen, too; in Osk.")
    sample = Sample("q", "Where does Mira live?", ("Velmora",), (other, gold))
    model = fs.load(fs.write_random(tmp_path / "model", layers=1), device="cpu")
    fs.trace(model, [sample], tmp_path / "run", new_tokens=2, chat=False)
    (trace,) = fs.open_run(tmp_path / "run")
    assert sorted(region_flow.partition_regions(trace)) == [
        "answer",
        "document 1",
        "document 2",
        "question",
        "template",
    ]
    assert {"gold", "evidence"} <= set(trace.coords["region"])


def with_regions(given: dict[str, Sequence[int]]) -> TraceView:
    return TraceView(build_trace(replace(decode_one_layer(np.full((N, N), 1 / N)), regions=given)))


def test_gold_outside_other_regions_is_part_of_the_partition():
    halves = {"gold": range(20), "rest": range(20, N)}
    assert region_flow.partition_regions(with_regions(halves).trace) == ["gold", "rest"]
    assert region_flow.partition_regions(with_regions({**halves, "evidence": [3]}).trace) == ["gold", "rest"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": range(30)}, "of the 40 positions of 'hand' 10 in no region; give regions="),
        ({"a": range(N), "b": [3, 4]}, "of 'hand' 2 in several;"),
        ({"a": range(20), "b": range(15, 30)}, "of 'hand' 10 in no region and 5 in several;"),
        ({"evidence": [3], "gold": range(5), "document 1": range(5)}, "of 'hand' 35 in no region;"),
    ],
)
def test_regions_that_are_not_a_partition_are_refused(given, message):
    view = with_regions(given)
    for table in (region_flow.rollout, region_flow.rollout_distance, region_flow.region_importance):
        with pytest.raises(UserError, match=message):
            table(view)
    assert len(region_flow.flow(view)) == len(given) ** 2


@tables
def test_a_trace_without_regions_is_refused(table):
    with pytest.raises(UserError, match="trace of 'hand' has no regions; trace samples with passages"):
        table(TraceView(build_trace(replace(decode_one_layer(np.eye(N)), regions={}))))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        (
            "regions",
            (region_flow.flow, region_flow.rollout, region_flow.rollout_distance, region_flow.region_importance),
        ),
        ("rollout", (region_flow.rollout, region_flow.rollout_distance, region_flow.region_importance)),
        ("visible_rows", (region_flow.flow, region_flow.region_importance)),
    ],
)
def test_a_field_that_is_not_stored_is_named(name, needed):
    trace = case(0, "full")[1]
    trace = replace(trace, arrays={n: a for n, a in trace.arrays.items() if n != name})
    for table in needed:
        with pytest.raises(UserError, match=f"does not store '{name}'"):
            table(TraceView(trace))


def test_a_random_look_is_not_even():
    """Their masses differ from those of uniform attention."""
    table = region_flow.flow(TraceView(case(0, "full")[1]))
    assert table["ratio"].max() > 1.5
    assert table["ratio"].min() < 0.7
