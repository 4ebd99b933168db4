"""The QK decomposition against dense scores, and on anchors due to their angle or their norm only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from dense_decodings import Decoding, attend, build_trace, canvas, causal, full

from floatscope.analysis import TraceView, absorption
from floatscope.analysis.depth import structure
from floatscope.analysis.qk_decomposition import attribute_advantage, attribution, norms, qk
from floatscope.errors import UserError
from floatscope.schema import KEY_STATS, RANKS

SCALING = 0.25
MASKS = {"full": full, "causal": causal}
NEAR = {"rtol": 2e-5, "atol": 2e-5}


class DenseHeads:
    """Queries and keys [step, layer, head, position, dim] and norms of values, and what a trace stores of them."""

    def __init__(self, q: np.ndarray, k: np.ndarray, mask: np.ndarray, v: np.ndarray, o: np.ndarray) -> None:
        self.q, self.k, self.mask, self.v, self.o = q, k, mask, v, o
        self.scores = SCALING * q @ k.swapaxes(-1, -2)
        self.A = attend(self.scores, mask)

    def visible_rows(self, j: int) -> np.ndarray:
        return np.flatnonzero(self.mask[:, j])

    def column(self, at: tuple[int, int, int], j: int) -> list[float]:
        q, k = self.q[at][self.visible_rows(j)], self.k[at][j]
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
        return [j for j in range(len(self.mask)) if self.mask[:, j].sum() >= min(16, len(self.mask))]

    def ranked(self, at: tuple[int, int, int]) -> list[int]:
        lift = self.A[at].mean(0) / (self.mask / self.mask.sum(-1, keepdims=True)).mean(0)
        return sorted(self.eligible(), key=lambda j: -lift[j])

    def anchors(self, at: tuple[int, int, int], k: float) -> list[int]:
        lift = self.A[at].mean(0) / (self.mask / self.mask.sum(-1, keepdims=True)).mean(0)
        among = lift[self.eligible()]
        return [j for j in self.eligible() if lift[j] > among.mean() + k * among.std()]

    def score_at_mean_direction(self, at: tuple[int, int, int], n: int) -> float:
        ranked, k = self.ranked(at), self.k[at]
        top, others = ranked[:n], ranked[n:]
        if len(top) < n or not others:
            return np.nan
        m = np.mean([k[j] / np.linalg.norm(k[j]) for j in others], 0)
        return float(
            np.mean([SCALING * np.linalg.norm(k[j]) * self.q[at][self.visible_rows(j)].mean(0) @ m for j in top])
        )

    @property
    def decoding(self) -> Decoding:
        steps, layers, heads, n, _ = self.q.shape
        cells = [(t, i, h) for t in range(steps) for i in range(layers) for h in range(heads)]
        columns = np.empty((steps, layers, heads, len(KEY_STATS), n))
        score_at_mean_direction = np.empty((steps, layers, heads, RANKS))
        for at in cells:
            columns[at] = np.transpose([self.column(at, j) for j in range(n)])
            score_at_mean_direction[at] = [self.score_at_mean_direction(at, r + 1) for r in range(RANKS)]
        plain = canvas(self.A, prompt=n - steps, visible=self.mask)
        return Decoding(plain.attention, plain.visible, plain.states, plain.tokens, plain.commits,
                     columns=list(columns), score_at_mean_direction=list(score_at_mean_direction))  # fmt: skip


def random_heads(
    seed: int, mask: str, n: int = 30, steps: int = 2, layers: int = 2, heads: int = 3, dim: int = 8
) -> DenseHeads:
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, steps, layers, heads, n, dim))
    q += rng.normal(size=dim)
    for h in range(heads):  # a few keys that the queries point to, one of them long
        chosen = rng.choice(n - 16 if mask == "causal" else n, 2, replace=False)
        k[:, :, h, chosen] += 2.5 * q[:, :, h].mean(-2, keepdims=True)
        k[:, :, h, chosen[0]] *= 1.5
    v, o = rng.random((2, steps, layers, heads, n)) + 0.5
    return DenseHeads(q, k, MASKS[mask](n), v, o)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seed", range(4))
def test_advantage_and_attribution_equal_the_dense_values(seed, mask):
    dense = random_heads(seed, mask)
    table = qk(TraceView(build_trace(dense.decoding), "zscore(k=1.5)"))
    steps, layers, heads = dense.q.shape[:3]
    assert len(table) == layers * heads
    anchor_count = 0
    for row in table.itertuples():
        values: dict[str, list[float]] = {
            name: [] for name in ("qk", "qk_z", "cos", "norm", "norm_z", "angle", "length")
        }
        counts = []
        for t in range(steps):
            at = (t, row.layer, row.head)
            anchors = dense.anchors(at, 1.5)
            counts.append(len(anchors))
            if not anchors:
                continue
            others = [j for j in dense.eligible() if j not in anchors]
            mine, theirs = (np.array([dense.column(at, j) for j in keys]) for keys in (anchors, others))
            advantage = dict(zip(KEY_STATS, mine.mean(0) - theirs.mean(0), strict=True))
            spread = dict(zip(KEY_STATS, theirs.std(0), strict=True))
            for name in ("qk", "cos", "norm"):
                values[name].append(advantage[name])
            values["qk_z"].append(advantage["qk"] / spread["qk"])
            values["norm_z"].append(advantage["norm"] / spread["norm"])
            values["angle"].append(mine[:, 0].mean() - dense.score_at_mean_direction(at, len(anchors)))
            typical = np.mean([np.linalg.norm(dense.k[at][j]) for j in others])
            scores = []
            for j in anchors:
                direction = dense.k[at][j] / np.linalg.norm(dense.k[at][j])
                scores.append(SCALING * typical * dense.q[at][dense.visible_rows(j)].mean(0) @ direction)
            values["length"].append(mine[:, 0].mean() - np.mean(scores))
        anchor_count += sum(counts)
        assert row.anchors == np.mean(counts)
        got = (row.qk, row.qk_z, row.cos, row.norm, row.norm_z, row.angle_lost, row.norm_lost)
        np.testing.assert_allclose(got, [np.mean(column) if column else np.nan for column in values.values()], **NEAR)
    assert anchor_count


def one_anchor(direction: float, length: float, others: float = 0.2) -> DenseHeads:
    """Equal queries; key 5 has the cosine `direction` and a length, all other keys the cosine `others` and length 1."""
    n, dim = 40, 4
    q = np.zeros((1, 1, 1, n, dim))
    q[..., 0] = 4.0
    k = np.zeros_like(q)
    k[..., 0], k[..., 1] = others, np.sqrt(1 - others**2)
    if direction != others:
        k[..., 5, 0], k[..., 5, 1] = direction, np.sqrt(1 - direction**2)
    k[..., 5, :] *= length
    return DenseHeads(q, k, full(n), np.ones(k.shape[:-1]), np.ones(k.shape[:-1]))


def test_an_anchor_due_to_its_angle():
    table = qk(TraceView(build_trace(one_anchor(direction=1.0, length=1.0).decoding)))
    shares = attribute_advantage(table).iloc[0]
    assert table["anchors"].tolist() == [1]
    np.testing.assert_allclose(table["norm"], 0, atol=1e-6)
    np.testing.assert_allclose(table["cos"], 0.8, rtol=1e-5)
    np.testing.assert_allclose([shares["angle"], shares["norm"]], [1, 0], atol=1e-6)
    direct = attribution(build_trace(one_anchor(direction=1.0, length=1.0).decoding)).iloc[0]
    np.testing.assert_allclose([direct["angle"], direct["norm"]], [1, 0], atol=1e-6)


def test_an_anchor_due_to_its_norm():
    table = qk(TraceView(build_trace(one_anchor(direction=0.2, length=20.0).decoding)))
    shares = attribute_advantage(table).iloc[0]
    assert table["anchors"].tolist() == [1]
    np.testing.assert_allclose(table["cos"], 0, atol=1e-6)
    assert table["norm"].iloc[0] > 0
    np.testing.assert_allclose([shares["angle"], shares["norm"]], [0, 1], atol=1e-6)


def test_shares_above_1_are_the_example_of_the_docs():
    table = qk(TraceView(build_trace(one_anchor(direction=0.5, length=2.0, others=-0.5).decoding)))
    head, shares = table.iloc[0], attribute_advantage(table).iloc[0]
    np.testing.assert_allclose(head[["qk", "angle_lost", "norm_lost"]].to_list(), [1.5, 2.0, 0.5], rtol=1e-5)
    np.testing.assert_allclose([shares["angle"], shares["norm"]], [4 / 3, 1 / 3], rtol=1e-5)
    interaction = (2.0 - 1.0) * (0.5 - -0.5)  # of length and cosine
    np.testing.assert_allclose(shares["angle"] + shares["norm"], 1 + interaction / 1.5, rtol=1e-5)
    docs = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text()
    for number in (shares["angle"], shares["norm"], interaction / 1.5):
        assert f"share of {number:.2f}" in docs
        assert f"share of {number:.2f}" in attribution.__doc__


def test_a_share_is_negative_if_the_change_raises_the_score():
    table = qk(TraceView(build_trace(one_anchor(direction=1.0, length=0.8).decoding)))
    shares = attribute_advantage(table).iloc[0]
    assert table["anchors"].tolist() == [1]
    np.testing.assert_allclose([shares["angle"], shares["norm"]], [0.64 / 0.6, -0.2 / 0.6], rtol=1e-5)


@pytest.mark.parametrize(
    ("advantages", "share"),
    [
        ([2.0, -1.0], 0.5),
        ([2.0, np.nan], 0.25),  # a head without anchors does not count
        ([1.0, -0.8], 2.5),  # 0.2 of 1.8 is more than a tenth
        ([1.0, -0.9], np.nan),  # 0.1 of 1.9 is less: the heads cancel each other
        ([1.0, -1.0], np.nan),
        ([1.0, -2.0], np.nan),
        ([np.nan, np.nan], np.nan),
    ],
)
def test_shares_of_almost_no_advantage_are_nan(advantages, share):
    losses = np.where(np.isnan(advantages), np.nan, 0.5 / max(1, np.isfinite(advantages).sum()))
    table = pd.DataFrame({"sample": "s", "layer": 0, "depth": 0.0, "qk": advantages, "angle_lost": losses})
    shares = attribute_advantage(table.assign(norm_lost=0.0)).iloc[0]
    assert shares["angle"] == pytest.approx(share, nan_ok=True)
    assert shares["norm"] == pytest.approx(0 * share, nan_ok=True)


def test_a_head_without_anchors_has_no_advantage():
    flat = one_anchor(direction=0.2, length=1.0)
    table = qk(TraceView(build_trace(flat.decoding)))
    assert table["anchors"].tolist() == [0]
    assert table[["qk", "cos", "norm", "angle_lost", "norm_lost"]].isna().all(axis=None)
    assert attribute_advantage(table)[["angle", "norm"]].isna().all(axis=None)


def test_a_detector_that_does_not_work_on_heads_is_refused():
    with pytest.raises(UserError, match=r"gu.* does not work on single heads"):
        qk(TraceView(build_trace(random_heads(0, "full").decoding), "gu"))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seed", range(3))
def test_norms_are_ratios_to_the_median_of_other_keys(seed, mask):
    dense = random_heads(seed, mask, n=41)
    trace = build_trace(dense.decoding)
    stream = np.random.default_rng(seed).random(trace.arrays["residual"].shape).astype(np.float32)
    trace = type(trace)(trace.sample, {**trace.arrays, "residual": stream}, trace.axes, trace.coords, trace.meta)
    view = TraceView(trace, "zscore(k=1.5)")
    table = norms(view).set_index(["set", "layer"])
    for layer in range(dense.q.shape[1]):
        values_by_set: dict[str, list[list[float]]] = {"first": [], "anchors": []}
        for t in range(dense.q.shape[0]):
            columns = np.mean([[dense.column((t, layer, h), j) for j in range(41)] for h in range(3)], 0)
            anchors = np.flatnonzero(view.anchors[t, layer]).tolist()
            others = [j for j in dense.eligible() if j not in anchors and j]
            values = np.column_stack([columns[:, 2:5], stream[t, layer]])
            typical = np.median(values[others], 0)
            values_by_set["first"].append(values[0] / typical)
            if anchors:
                values_by_set["anchors"].append(values[anchors].mean(0) / typical)
        for name, ratios in values_by_set.items():
            want = np.mean(ratios, 0) if ratios else [np.nan] * 4
            got = table.loc[(name, layer), ["key_norm", "value_norm", "output_norm", "residual"]].to_numpy(float)
            np.testing.assert_allclose(got, want, rtol=3e-3)  # key_stats are float16


@pytest.mark.parametrize("mask", MASKS)
def test_the_contribution_is_attention_times_the_norm_of_the_value(mask):
    dense = random_heads(1, mask)
    view = TraceView(build_trace(dense.decoding), "zscore(k=1.5)")
    contribution = np.einsum("tlhij,tlhj->tlj", dense.A, dense.o)
    contribution /= contribution.sum(-1, keepdims=True)
    first = absorption([view.trace], "zscore(k=1.5)").query("set == 'first'")
    np.testing.assert_allclose(first["contribution"], 100 * contribution[..., 0].mean(0), rtol=1e-5)
    table = structure(view).pivot(index="layer", columns="set", values="contribution")
    np.testing.assert_allclose(table.sum(axis=1), 1, rtol=1e-5)
    content = np.array(
        [[contribution[t, i][view.token_classes[t] == 6].sum() for i in range(2)] for t in range(2)]
    ).mean(0)
    np.testing.assert_allclose(table["content"], content, rtol=1e-5)


def test_small_values_contribute_little():
    dense = one_anchor(direction=1.0, length=1.0)
    dense.o[..., 5] = 1e-3
    top = absorption([build_trace(dense.decoding)]).query("set == 'anchors'").iloc[0]
    assert top["lift"] > 2
    assert top["contribution"] < 0.01 * top["percent"]
