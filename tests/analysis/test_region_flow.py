"""What regions take from each other: by hand, against whole products of matrices, and for a cached model as for any."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from dense_decodings import KINDS, Decoding, random_decoding, canvas, causal, full, growing, build_trace

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
    """Every position once; gold is the second document and evidence in it."""
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


def rolled(trace: Trace, decoding: Decoding) -> Trace:
    """With the rollout a watched forward would have stored."""
    stored = [
        [pool(product(decoding, t, layer), decoding) for layer in range(decoding.layers)] for t in range(decoding.steps)
    ]
    return replace(trace, arrays={**trace.arrays, "rollout": np.array(stored, np.float32)})


def product(decoding: Decoding, t: int, layer: int) -> np.ndarray:
    """Of whole matrices, from the first layer up to and including this one, [row, key]."""
    whole = np.eye(len(decoding.states[t]))
    for A in decoding.attention[t][: layer + 1]:
        whole = (A.mean(0) / 2 + np.eye(len(A[0])) / 2) @ whole
    return whole


def pool(A: np.ndarray, decoding: Decoding, names: Sequence[str] | None = None) -> np.ndarray:
    """What an average row of a region puts on each; NaN for one without rows."""
    n = len(A)
    at = [[i for i in decoding.regions[name] if i < n] for name in names or decoding.regions]
    return np.array([[A[np.ix_(r, s)].sum() / len(r) if r else np.nan for s in at] for r in at])


@functools.cache
def case(seed: int, kind: str) -> tuple[Decoding, Trace]:
    decoding = random_decoding(seed, kind)
    decoding = replace(decoding, regions=regions(int((decoding.states[0] == 1).sum())))
    return decoding, rolled(build_trace(decoding, f"{kind}-{seed}"), decoding)


def even(decoding: Decoding, t: int, layer: int) -> np.ndarray:
    see = decoding.visible[t][layer]
    return see / see.sum(1, keepdims=True)


def over_steps(of_step: Callable[[int], np.ndarray], steps: int) -> np.ndarray:
    """The mean of those that are there."""
    each = np.array([of_step(t) for t in range(steps)])
    return np.nansum(each, 0) / np.isfinite(each).sum(0)


def square(table: pd.DataFrame, column: str, layer: int, names: Sequence[str]) -> np.ndarray:
    """A layer's values [region, key_region]."""
    wide = table[table["layer"] == layer].pivot(index="region", columns="key_region", values=column)
    return wide.loc[list(names), list(names)].to_numpy()


def one_layer(A: np.ndarray, steps: int = 1, heads: int = 1, **more: object) -> Decoding:
    return canvas(np.broadcast_to(A, (steps, 1, heads, *A.shape)), PROMPT, regions=regions(), **more)


# By hand


def test_answer_rows_take_from_gold():
    """In one of two heads they give .7 to gold and .3 to themselves; all else is uniform."""
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
        told = cells.loc[(1, "answer", name)].tolist()
        assert told == pytest.approx([mass, mass / tokens, base, mass / base], rel=1e-3), name
    others = table[(table["layer"] == 0) | (table["region"] != "answer")]
    np.testing.assert_allclose(others["ratio"], 1, rtol=1e-3)
    np.testing.assert_allclose(others["per_token"], 1 / N, rtol=1e-3)
    assert table["depth"].tolist() == [0.0] * 64 + [1.0] * 64


def test_it_is_the_mean_over_steps():
    A = np.full((4, 1, 1, N, N), 1 / N)
    A[0, ..., PROMPT:, :] = np.eye(N)[3]
    table = region_flow.flow(TraceView(build_trace(canvas(A, PROMPT, regions=regions()))))
    assert square(table, "mass", 0, ["answer", "document 1"])[0, 1] == pytest.approx((1 + 3 * 5 / N) / 4, rel=1e-3)


@pytest.mark.parametrize("kind", ["full", "causal", "blocks", "cached", "grown"])
def test_uniform_attention_is_its_own_base(kind):
    """Under any mask by which later rows see more; of the same rollouts as well."""
    at = np.arange(N) // 8
    see = {"full": full(N), "blocks": at[:, None] >= at}.get(kind, causal(N))
    A = np.broadcast_to(see / see.sum(1, keepdims=True), (3, 2, N, N))
    if kind in ("cached", "grown"):
        decoding = growing(A, PROMPT, cached=kind == "cached", regions=regions())
    else:
        decoding = canvas(np.stack([A] * 2), PROMPT, see, regions=regions())
    view = TraceView(rolled(build_trace(decoding), decoding))
    table = region_flow.flow(view)
    np.testing.assert_allclose(table["mass"], table["base"], **HALF)
    assert table["base"].notna().all()
    assert (table["ratio"].isna() == (table["base"] == 0)).all()
    found = region_flow.region_importance(view)
    np.testing.assert_allclose(found[["token_ratio", "pooled_ratio"]], 1, rtol=2e-3)
    for column in ("token", "pooled", "token_base", "pooled_base"):
        assert found[column].sum() == pytest.approx(1)
    if kind == "full":
        share = [1 / N, (3 + PROMPT - 18) / N, 5 / N, 5 / N, 4 / N, 8 / N]
        for column in ("token_base", "pooled_base"):
            assert found.set_index("key_region").loc[PARTS, column].tolist() == pytest.approx(share)


def test_under_a_causal_mask_early_keys_have_the_larger_base():
    """Row i gives the first key 1 / (i + 1)."""
    decoding = growing(np.broadcast_to(causal(N) / causal(N).sum(1, keepdims=True), (1, 1, N, N)), N - 1)
    decoding = replace(decoding, regions={"first": [0], "rest": range(1, N)})
    found = region_flow.region_importance(TraceView(rolled(build_trace(decoding), decoding))).set_index("key_region")
    shares = [sum(1 / i for i in range(1, n + 1)) / n for n in (N - 1, N)]
    expected = np.mean([(share + 1 / n) / 2 for share, n in zip(shares, (N - 1, N), strict=True)])
    assert found.loc["first", "token_base"] == pytest.approx(expected)
    assert found.loc["first", "pooled_base"] == pytest.approx(expected)  # in the first layer they are one


def test_layers_that_see_differently_have_bases_of_their_own():
    """As a decoder over an encoder would: the first layer sees all, the second what came before."""
    see = np.stack([full(N), causal(N)])
    decoding = canvas(np.stack([see[:, None] / see.sum(-1)[:, None, :, None]] * 2), PROMPT, see, regions=regions())
    view = TraceView(rolled(build_trace(decoding), decoding))
    assert view.trace.arrays["layer_visibility"].tolist() == [0, 1]
    table, found = region_flow.flow(view), region_flow.region_importance(view)
    np.testing.assert_allclose(table["mass"], table["base"], **HALF)
    assert (table.loc[table["layer"] == 0, "base"] > 0).all()
    assert (table.loc[table["layer"] == 1, "base"] == 0).any()
    np.testing.assert_allclose(found[["token_ratio", "pooled_ratio"]], 1, rtol=2e-3)


def test_a_window_leaves_the_base_empty():
    at = np.arange(N)
    behind = causal(N) & (at[:, None] - at <= 6)
    for see in (abs(at[:, None] - at) <= 6, behind, causal(N) & (behind | (at == 0))):
        decoding = one_layer(see / see.sum(1, keepdims=True), visible=see)
        view = TraceView(rolled(build_trace(decoding), decoding))
        table = region_flow.flow(view)
        assert table[["base", "ratio"]].isna().all(axis=None)
        assert table["mass"].notna().all()
        assert region_flow.region_importance(view)[["token_base", "pooled_base", "token_ratio"]].isna().all(axis=None)


def test_rows_that_are_all_alike_and_rows_that_share_nothing():
    """Through many layers of uniform attention a row is forgotten; of itself alone never."""
    layers = 12
    for A, expected in ((np.full((N, N), 1 / N), [2.0**-k for k in range(1, layers + 1)]), (np.eye(N), [1.0] * layers)):
        decoding = canvas(np.broadcast_to(A, (2, layers, 1, N, N)), PROMPT, regions=regions())
        table = region_flow.rollout_distance(TraceView(rolled(build_trace(decoding), decoding)))
        assert list(table.columns) == ["sample", "layer", "depth", "token", "pooled"]
        for column in ("token", "pooled"):
            assert table[column].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    alike = np.broadcast_to(np.arange(1.0, 5) / 10, (2, 1, 4, 4))
    assert region_flow._max_distance(alike, np.ones((2, 4), int)).tolist() == [0]


def test_a_step_without_a_difference_counts():
    """The index is that of each step, not of the mean over steps: here the answer changes sides."""
    A = np.zeros((2, 1, 1, N, N))
    A[..., 3] = 1
    A[0, ..., PROMPT:, 3], A[0, ..., PROMPT:, 9] = 0, 1
    decoding = canvas(A, PROMPT, regions={"prompt": range(PROMPT), "answer": range(PROMPT, N)})
    table = region_flow.rollout_distance(TraceView(rolled(build_trace(decoding), decoding)))
    assert table["token"].tolist() == pytest.approx([0.5], rel=1e-3)


def test_the_importance_of_a_key_all_rows_look_at():
    """Half of what a row holds stays its own."""
    A = np.zeros((N, N))
    A[:, 0] = 1
    decoding = one_layer(A, steps=2)
    found = region_flow.region_importance(TraceView(rolled(build_trace(decoding), decoding))).set_index("key_region")
    assert list(found.columns) == [
        "sample", "token", "token_base", "token_ratio", "pooled", "pooled_base", "pooled_ratio"
    ]  # fmt: skip
    for way in ("token", "pooled"):
        assert found.loc["bos", way] == pytest.approx(0.5 + 0.5 / N, rel=1e-3)
        assert found.loc["bos", f"{way}_ratio"] == pytest.approx((N + 1) / 2, rel=1e-3)
        assert found.loc["answer", way] == pytest.approx(8 / N / 2, rel=1e-3)


# Restated


@decodings
def test_flow(seed, kind):
    decoding, trace = case(seed, kind)
    table = region_flow.flow(TraceView(trace))
    names = list(decoding.regions)
    for layer in range(decoding.layers):
        mass = over_steps(lambda t, k=layer: pool(decoding.attention[t][k].mean(0), decoding), decoding.steps)
        np.testing.assert_allclose(square(table, "mass", layer, names), mass, **HALF)
        base = over_steps(lambda t, k=layer: pool(even(decoding, t, k), decoding), decoding.steps)
        told = square(table, "base", layer, names)
        if kind == "window" and layer % 2:
            assert np.isnan(told).all()
        else:
            np.testing.assert_allclose(told, base, rtol=1e-12)
        counts = [[sum(i < len(state) for i in at) for at in decoding.regions.values()] for state in decoding.states]
        tokens = [np.mean([row for row in counts if row[r]], 0) for r in range(len(names))]  # while it has rows
        np.testing.assert_allclose(square(table, "per_token", layer, names), mass / tokens, **HALF)


@decodings
def test_rollout(seed, kind):
    decoding, trace = case(seed, kind)
    assert region_flow.partition_regions(trace) == PARTS
    table, apart, found = (
        f(TraceView(trace)) for f in (region_flow.rollout, region_flow.rollout_distance, region_flow.region_importance)
    )
    assert list(table.columns) == ["sample", "layer", "depth", "region", "key_region", "token", "pooled"]

    def by_token(t: int, layer: int) -> np.ndarray:
        return pool(product(decoding, t, layer), decoding, PARTS)

    def by_region(t: int, layer: int) -> np.ndarray:
        """Products of pooled matrices; the answer has no rows before its first token."""
        there = [name for name in PARTS if any(i < len(decoding.states[t]) for i in decoding.regions[name])]
        carried = np.eye(len(there))
        for A in decoding.attention[t][: layer + 1]:
            carried = 0.5 * pool(A.mean(0), decoding, there) @ carried + 0.5 * carried
        whole = np.full((len(PARTS), len(PARTS)), np.nan)
        whole[: len(there), : len(there)] = carried
        whole[: len(there), len(there) :] = 0
        return whole

    for way, of in {"token": by_token, "pooled": by_region}.items():
        for layer in range(decoding.layers):
            expected = over_steps(lambda t, k=layer, of=of: of(t, k), decoding.steps)
            np.testing.assert_allclose(square(table, way, layer, PARTS), expected, **HALF)
            each = [of(t, layer) for t in range(decoding.steps)]
            index = np.mean([max(np.nansum(abs(a - b)) / 2 for a in rows for b in rows) for rows in each])
            assert apart.loc[layer, way] == pytest.approx(index, rel=2e-3)
        shares = []
        for t, rows in enumerate(each):
            n = len(decoding.states[t])
            sizes = [sum(i < n for i in decoding.regions[name]) for name in PARTS]
            shares.append(sum(size * row for size, row in zip(sizes, rows, strict=True) if size) / n)
        np.testing.assert_allclose(found.set_index("key_region").loc[PARTS, way], np.mean(shares, 0), **HALF)
    if decoding.layers > 1:
        gap = abs(table["token"] - table["pooled"])
        assert gap[table["layer"] == 0].max() < 1e-3
        assert gap[table["layer"] > 0].max() > 2e-3


@decodings
def test_what_uniform_attention_would_make_of_a_rollout(seed, kind):
    decoding, trace = case(seed, kind)
    found = region_flow.region_importance(TraceView(trace)).set_index("key_region").loc[PARTS]
    if kind == "window" and decoding.layers > 1:
        assert found[["token_base", "pooled_base"]].isna().all(axis=None)
        return
    uniform = replace(
        decoding, attention=[see[:, None] / see.sum(-1, keepdims=True)[:, None] for see in decoding.visible]
    )
    expected = (
        region_flow.region_importance(TraceView(rolled(build_trace(uniform), uniform)))
        .set_index("key_region")
        .loc[PARTS]
    )
    np.testing.assert_allclose(found["token_base"], expected["token"], rtol=1e-5)
    np.testing.assert_allclose(found["pooled_base"], expected["pooled"], **HALF)
    np.testing.assert_allclose(found["token_ratio"], found["token"] / found["token_base"])
    np.testing.assert_allclose(found["pooled_ratio"], found["pooled"] / found["pooled_base"])


@tables
@pytest.mark.parametrize("seed", range(4))
def test_a_cache_changes_nothing(table, seed):
    decoding, cached = case(seed, "cached")
    anew = replace(decoding, cached=False)
    told = [table(TraceView(trace)) for trace in (cached, rolled(build_trace(anew, cached.sample), anew))]
    pd.testing.assert_frame_equal(*told, **HALF)
    assert told[0].drop(columns="ratio", errors="ignore").notna().all(axis=None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    shape = {"layers": 3, "width": 32, "kv_heads": 2, "ffn": 48, "vocab_size": 64}
    return fs.load(fs.write_random(tmp_path_factory.mktemp("llama"), architecture="llama", **shape), device="cpu")


@pytest.mark.parametrize("which", ["llada", "llama"])
def test_of_a_model_that_is_watched(which, request):
    """Against whole matrices, which the trace keeps as well."""
    model, prompt, new = request.getfixturevalue(which), 20, 6
    spans = {"bos": [(0, 1)], "document 1": [(1, 8)], "question": [(8, prompt)], "answer": [(prompt, prompt + new)]}
    regions = fs.Regions.from_spans([spans], length=prompt + new)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 60, prompt)]
    trace = fs.decode(model, [ids], new_tokens=new, regions=regions, watch=fs.Watch(level="full"), stop=False).trace
    matrix, keys, rows = (trace.arrays[name] for name in ("matrix", "keys", "queries"))
    whole: list[np.ndarray] = []
    for t, n in enumerate(keys):
        A = np.zeros((*matrix.shape[1:3], n, n))
        first = n - rows[t]
        if first:
            A[:, :, :first, :first] = whole[-1]
        A[:, :, first:] = matrix[t][:, :, : rows[t], :n]
        whole.append(A)
    assert bool(keys[0] < keys[-1]) == (which == "llama")
    see = [np.broadcast_to(causal(n) if which == "llama" else full(n), (3, n, n)) for n in keys]
    held = {name: range(*pieces[0]) for name, pieces in spans.items()}
    decoding = Decoding(whole, see, [np.ones(n) for n in keys], [np.ones(n) for n in keys], regions=held)
    table = region_flow.rollout(TraceView(trace))
    steps = region_flow.flow(TraceView(trace))
    for layer in range(3):
        for column, of in {
            "token": lambda t, k=layer: pool(product(decoding, t, k), decoding),
            "mass": lambda t, k=layer: pool(decoding.attention[t][k].mean(0), decoding),
            "base": lambda t, k=layer: pool(even(decoding, t, k), decoding),
        }.items():
            told = square(table if column == "token" else steps, column, layer, list(spans))
            near = HALF if column == "mass" else {"rtol": 1e-4, "atol": 1e-6}
            np.testing.assert_allclose(told, over_steps(of, decoding.steps), **near)
    assert region_flow.rollout_distance(TraceView(trace))["token"].is_monotonic_decreasing


# Refused


def test_parts_of_what_floatscope_traces(tmp_path):
    """Every token of a plain prompt is in one region but for gold and evidence."""
    told = Passage("Mira", "Mira lives in Velmora.", gold=True, evidence=((14, 21),))
    other = Passage("Kalen", "Kalen, too; in Osk.")
    sample = Sample("q", "Where does Mira live?", ("Velmora",), (other, told))
    model = fs.load(fs.write_random(tmp_path / "model", layers=1), device="cpu")
    list(fs.plan_trace(model, [sample], tmp_path / "run", new_tokens=2, chat=False))
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
    return TraceView(build_trace(replace(one_layer(np.full((N, N), 1 / N)), regions=given)))


def test_gold_is_a_part_where_it_lies_in_no_other():
    halves = {"gold": range(20), "rest": range(20, N)}
    assert region_flow.partition_regions(with_regions(halves).trace) == ["gold", "rest"]
    assert region_flow.partition_regions(with_regions({**halves, "evidence": [3]}).trace) == ["gold", "rest"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": range(30)}, "of the 40 of 'hand' there are 10 in no region; give regions="),
        ({"a": range(N), "b": [3, 4]}, "there are 2 in several;"),
        ({"a": range(20), "b": range(15, 30)}, "there are 10 in no region and 5 in several;"),
        ({"evidence": [3], "gold": range(5), "document 1": range(5)}, "there are 35 in no region;"),
    ],
)
def test_regions_that_are_no_partition(given, message):
    view = with_regions(given)
    for table in (region_flow.rollout, region_flow.rollout_distance, region_flow.region_importance):
        with pytest.raises(UserError, match=message):
            table(view)
    assert len(region_flow.flow(view)) == len(given) ** 2


@tables
def test_without_regions(table):
    with pytest.raises(UserError, match="trace of 'hand' has no regions; trace samples with passages"):
        table(TraceView(build_trace(replace(one_layer(np.eye(N)), regions={}))))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        (
            "regions",
            (region_flow.flow, region_flow.rollout, region_flow.rollout_distance, region_flow.region_importance),
        ),
        ("rollout", (region_flow.rollout, region_flow.rollout_distance, region_flow.region_importance)),
        ("visible_rows", (region_flow.flow, region_flow.region_importance)),
        ("uniform", (region_flow.flow, region_flow.region_importance)),
    ],
)
def test_a_field_that_was_not_kept_is_named(name, needed):
    trace = case(0, "full")[1]
    trace = replace(trace, arrays={n: a for n, a in trace.arrays.items() if n != name})
    for table in needed:
        with pytest.raises(UserError, match=f"does not keep '{name}'"):
            table(TraceView(trace))


def test_a_random_look_is_not_even():
    """The decodings above have something to tell: masses that are not those of uniform attention."""
    table = region_flow.flow(TraceView(case(0, "full")[1]))
    assert table["ratio"].max() > 1.5
    assert table["ratio"].min() < 0.7
