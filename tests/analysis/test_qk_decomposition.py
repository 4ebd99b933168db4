"""The QK decomposition against dense scores, and on anchors that are made by their angle or by their norm alone."""

from __future__ import annotations

import numpy as np
import pytest
from dense_decodings import Decoding, attend, canvas, causal, full, build_trace

from floatscope.analysis import TraceView, absorption
from floatscope.analysis.depth import structure
from floatscope.analysis.qk_decomposition import attribution, norms, qk
from floatscope.errors import UserError
from floatscope.schema import KEY_STATS, RANKS

SCALING = 0.25
MASKS = {"full": full, "causal": causal}
NEAR = {"rtol": 2e-5, "atol": 2e-5}


class Net:
    """Queries and keys [step, layer, head, position, dim], values' norms, and what a trace keeps of them."""

    def __init__(self, q: np.ndarray, k: np.ndarray, see: np.ndarray, v: np.ndarray, o: np.ndarray) -> None:
        self.q, self.k, self.see, self.v, self.o = q, k, see, v, o
        self.scores = SCALING * q @ k.swapaxes(-1, -2)
        self.A = attend(self.scores, see)

    def seen_by(self, j: int) -> np.ndarray:
        return np.flatnonzero(self.see[:, j])

    def column(self, at: tuple[int, int, int], j: int) -> list[float]:
        q, k = self.q[at][self.seen_by(j)], self.k[at][j]
        lengths = np.linalg.norm(q, axis=-1) * np.linalg.norm(k)
        scores = q @ k
        return [
            SCALING * scores.mean(),
            (scores / lengths).mean(),
            np.linalg.norm(k),
            self.v[at][j],
            self.o[at][j],
            lengths.mean(),
        ]

    def eligible(self) -> list[int]:
        return [j for j in range(len(self.see)) if self.see[:, j].sum() >= min(16, len(self.see))]

    def ranked(self, at: tuple[int, int, int]) -> list[int]:
        lift = self.A[at].mean(0) / (self.see / self.see.sum(-1, keepdims=True)).mean(0)
        return sorted(self.eligible(), key=lambda j: -lift[j])

    def anchors(self, at: tuple[int, int, int], k: float) -> list[int]:
        lift = self.A[at].mean(0) / (self.see / self.see.sum(-1, keepdims=True)).mean(0)
        among = lift[self.eligible()]
        return [j for j in self.eligible() if lift[j] > among.mean() + k * among.std()]

    def turned(self, at: tuple[int, int, int], n: int) -> float:
        ranked, k = self.ranked(at), self.k[at]
        top, others = ranked[:n], ranked[n:]
        if len(top) < n or not others:
            return np.nan
        m = np.mean([k[j] / np.linalg.norm(k[j]) for j in others], 0)
        return float(np.mean([SCALING * np.linalg.norm(k[j]) * self.q[at][self.seen_by(j)].mean(0) @ m for j in top]))

    @property
    def decoding(self) -> Decoding:
        steps, layers, heads, n, _ = self.q.shape
        cells = [(t, i, h) for t in range(steps) for i in range(layers) for h in range(heads)]
        columns = np.empty((steps, layers, heads, len(KEY_STATS), n))
        turned = np.empty((steps, layers, heads, RANKS))
        for at in cells:
            columns[at] = np.transpose([self.column(at, j) for j in range(n)])
            turned[at] = [self.turned(at, r + 1) for r in range(RANKS)]
        plain = canvas(self.A, prompt=n - steps, visible=self.see)
        return Decoding(plain.attention, plain.visible, plain.states, plain.tokens, plain.commits,
                     columns=list(columns), turned=list(turned))  # fmt: skip


def net(seed: int, mask: str, n: int = 30, steps: int = 2, layers: int = 2, heads: int = 3, dim: int = 8) -> Net:
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, steps, layers, heads, n, dim))
    q += rng.normal(size=dim)
    for h in range(heads):  # a few keys the queries point to, one of them long
        chosen = rng.choice(n - 16 if mask == "causal" else n, 2, replace=False)
        k[:, :, h, chosen] += 2.5 * q[:, :, h].mean(-2, keepdims=True)
        k[:, :, h, chosen[0]] *= 1.5
    v, o = rng.random((2, steps, layers, heads, n)) + 0.5
    return Net(q, k, MASKS[mask](n), v, o)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seed", range(4))
def test_advantage_and_attribution_equal_the_dense_ones(seed, mask):
    one = net(seed, mask)
    table = qk(TraceView(build_trace(one.decoding), "zscore(k=1.5)"))
    steps, layers, heads = one.q.shape[:3]
    assert len(table) == layers * heads
    met = 0
    for row in table.itertuples():
        seen: dict[str, list[float]] = {name: [] for name in ("qk", "qk_z", "cos", "norm", "norm_z", "angle", "long")}
        counts = []
        for t in range(steps):
            at = (t, row.layer, row.head)
            found = one.anchors(at, 1.5)
            counts.append(len(found))
            if not found:
                continue
            others = [j for j in one.eligible() if j not in found]
            mine, theirs = (np.array([one.column(at, j) for j in some]) for some in (found, others))
            apart = dict(zip(KEY_STATS, mine.mean(0) - theirs.mean(0), strict=True))
            spread = dict(zip(KEY_STATS, theirs.std(0), strict=True))
            for name in ("qk", "cos", "norm"):
                seen[name].append(apart[name])
            seen["qk_z"].append(apart["qk"] / spread["qk"])
            seen["norm_z"].append(apart["norm"] / spread["norm"])
            seen["angle"].append(mine[:, 0].mean() - one.turned(at, len(found)))
            typical = np.mean([np.linalg.norm(one.k[at][j]) for j in others])
            short = [
                SCALING * typical * one.q[at][one.seen_by(j)].mean(0) @ one.k[at][j] / np.linalg.norm(one.k[at][j])
                for j in found
            ]
            seen["long"].append(mine[:, 0].mean() - np.mean(short))
        met += sum(counts)
        assert row.anchors == np.mean(counts)
        got = (row.qk, row.qk_z, row.cos, row.norm, row.norm_z, row.angle_lost, row.norm_lost)
        np.testing.assert_allclose(got, [np.mean(values) if values else np.nan for values in seen.values()], **NEAR)
    assert met


def one_anchor(direction: float, length: float) -> Net:
    """Queries all alike; the keys point across them at one angle, all but key 5, which is turned or stretched."""
    n, dim = 40, 4
    q = np.zeros((1, 1, 1, n, dim))
    q[..., 0] = 4.0
    k = np.zeros_like(q)
    k[..., 0], k[..., 1] = 0.2, np.sqrt(1 - 0.04)
    if direction != 0.2:
        k[..., 5, 0], k[..., 5, 1] = direction, np.sqrt(1 - direction**2)
    k[..., 5, :] *= length
    return Net(q, k, full(n), np.ones(k.shape[:-1]), np.ones(k.shape[:-1]))


def test_an_anchor_by_its_angle_alone():
    table = qk(TraceView(build_trace(one_anchor(direction=1.0, length=1.0).decoding)))
    shares = attribution(table).iloc[0]
    assert table["anchors"].tolist() == [1]
    np.testing.assert_allclose(table["norm"], 0, atol=1e-6)
    np.testing.assert_allclose(table["cos"], 0.8, rtol=1e-5)
    np.testing.assert_allclose([shares["angle"], shares["norm"]], [1, 0], atol=1e-6)


def test_an_anchor_by_its_norm_alone():
    table = qk(TraceView(build_trace(one_anchor(direction=0.2, length=20.0).decoding)))
    shares = attribution(table).iloc[0]
    assert table["anchors"].tolist() == [1]
    np.testing.assert_allclose(table["cos"], 0, atol=1e-6)
    assert table["norm"].iloc[0] > 0
    np.testing.assert_allclose([shares["angle"], shares["norm"]], [0, 1], atol=1e-6)


def test_a_head_without_anchors_has_no_advantage():
    flat = one_anchor(direction=0.2, length=1.0)
    table = qk(TraceView(build_trace(flat.decoding)))
    assert table["anchors"].tolist() == [0]
    assert table[["qk", "cos", "norm", "angle_lost", "norm_lost"]].isna().all(axis=None)
    assert attribution(table)[["angle", "norm"]].isna().all(axis=None)


def test_a_detector_that_does_not_judge_heads_is_named():
    with pytest.raises(UserError, match=r"gu.* does not judge single heads"):
        qk(TraceView(build_trace(net(0, "full").decoding), "gu"))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seed", range(3))
def test_norms_are_ratios_to_the_median_of_other_keys(seed, mask):
    one = net(seed, mask, n=41)
    trace = build_trace(one.decoding)
    stream = np.random.default_rng(seed).random(trace.arrays["residual"].shape).astype(np.float32)
    trace = type(trace)(trace.sample, {**trace.arrays, "residual": stream}, trace.axes, trace.coords, trace.meta)
    view = TraceView(trace, "zscore(k=1.5)")
    table = norms(view).set_index(["set", "layer"])
    for layer in range(one.q.shape[1]):
        seen: dict[str, list[list[float]]] = {"first": [], "anchors": []}
        for t in range(one.q.shape[0]):
            columns = np.mean([[one.column((t, layer, h), j) for j in range(41)] for h in range(3)], 0)
            found = np.flatnonzero(view.anchors[t, layer]).tolist()
            others = [j for j in one.eligible() if j not in found and j]
            values = np.column_stack([columns[:, 2:5], stream[t, layer]])
            typical = np.median(values[others], 0)
            seen["first"].append(values[0] / typical)
            if found:
                seen["anchors"].append(values[found].mean(0) / typical)
        for name, each in seen.items():
            want = np.mean(each, 0) if each else [np.nan] * 4
            got = table.loc[(name, layer), ["key_norm", "value_norm", "output_norm", "residual"]].to_numpy(float)
            np.testing.assert_allclose(got, want, rtol=3e-3)  # key_stats are float16


@pytest.mark.parametrize("mask", MASKS)
def test_what_is_moved_is_attention_times_the_values_norm(mask):
    one = net(1, mask)
    view = TraceView(build_trace(one.decoding), "zscore(k=1.5)")
    moved = np.einsum("tlhij,tlhj->tlj", one.A, one.o)
    moved /= moved.sum(-1, keepdims=True)
    first = absorption([view.trace], "zscore(k=1.5)").query("set == 'first'")
    np.testing.assert_allclose(first["moved"], 100 * moved[..., 0].mean(0), rtol=1e-5)
    table = structure(view).pivot(index="layer", columns="set", values="moved")
    np.testing.assert_allclose(table.sum(axis=1), 1, rtol=1e-5)
    content = np.array([[moved[t, i][view.token_classes[t] == 6].sum() for i in range(2)] for t in range(2)]).mean(0)
    np.testing.assert_allclose(table["content"], content, rtol=1e-5)


def test_small_values_move_little():
    one = one_anchor(direction=1.0, length=1.0)
    one.o[..., 5] = 1e-3
    top = absorption([build_trace(one.decoding)]).query("set == 'anchors'").iloc[0]
    assert top["lift"] > 2
    assert top["moved"] < 0.01 * top["percent"]
