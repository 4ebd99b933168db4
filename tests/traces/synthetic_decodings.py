"""Small synthetic decodings: real softmax attention over random scores, so sums and lifts have their usual meaning.

A `SyntheticStep` is one step of one sample, unpadded. `batch_steps` pads the steps of several samples into the Step and
Reductions that a watched forward would give, with filler values under the padding.

    decodings = [decode_mdm(seed=0, prompt=4, new=5, steps=3), decode_mdm(seed=1, prompt=7, new=5, steps=3)]
    first, second = record_traces(decodings, pad="left")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from floatscope.canvas import CanvasState, Commits, Reductions, Regions, Step, StepCapture
from floatscope.schema import (
    FIELDS,
    HEAD_STATS,
    KEY_STATS,
    ORDERS,
    QUANTITIES,
    RANKS,
    TOP_STATS,
    MaskKind,
    MaskStructure,
    State,
    fields_at_level,
)
from floatscope.traces import Trace
from floatscope.traces.recorder import Recorder

LAYERS, HEADS = 3, 2
REGIONS = ("question", "document", "answer")
VISIBILITY = (0, 1, 0)
"""Layer 1 has a sliding window, the others see everything that the paradigm allows."""


@dataclass(frozen=True)
class SyntheticStep:
    """One step of one sample."""

    tokens: np.ndarray  # [key]
    states: np.ndarray  # [key]
    member: np.ndarray  # [key, region]
    after: np.ndarray  # [position]
    commits: list[tuple[int, int, int, float]]  # position, row, token, confidence
    fields: list[dict[str, np.ndarray]]  # per layer
    block: tuple[int, int] | None = None


def decode_mdm(seed: int, prompt: int, new: int, steps: int) -> list[SyntheticStep]:
    """A masked canvas of fixed width, filled in random order; a step may commit none, one or many."""
    rng = np.random.default_rng([seed, prompt, new, steps])
    width = prompt + new
    tokens = rng.integers(5, 100, width)
    states = np.where(np.arange(width) < prompt, State.PROMPT, State.MASKED)
    tokens[prompt:] = 0
    when = rng.integers(0, steps, new)
    result = []
    for t in range(steps):
        positions = prompt + np.flatnonzero(when == t)
        rng.shuffle(positions)
        commits = [(int(p), int(p), int(rng.integers(5, 100)), float(rng.random())) for p in positions]
        scores = rng.normal(0, 2, (LAYERS, HEADS, width, width))
        fields = _fields(rng, scores, [_full(width), _window(width)], states, commits)
        before, at = (tokens.copy(), states.copy()), (prompt, prompt + 2) if t % 2 else None
        for position, _, token, _ in commits:
            tokens[position], states[position] = token, State.COMMITTED
        result.append(SyntheticStep(*before, _member(width, prompt), tokens.copy(), commits, fields, at))
    return result


def decode_arm(seed: int, prompt: int, new: int) -> tuple[list[SyntheticStep], np.ndarray]:
    """A canvas that grows by a token per step, watched with a cache; and the whole attention [layer, head, T, T]."""
    rng = np.random.default_rng([seed, prompt, new])
    total = prompt + new
    tokens, scores = rng.integers(5, 100, total), rng.normal(0, 2, (LAYERS, HEADS, total, total))
    visible = [np.tril(_full(total)), np.tril(_window(total))]
    result = []
    for t in range(new):
        width, cached = prompt + t, prompt + t - 1 if t else 0
        states = np.where(np.arange(width) < prompt, State.PROMPT, State.COMMITTED)
        commits = [(width, width - 1, int(tokens[width]), float(rng.random()))]
        rows = np.s_[cached:width, :width]
        fields = _fields(rng, scores[:, :, *rows], [v[rows] for v in visible], states, commits, cached)
        result.append(
            SyntheticStep(tokens[:width], states, _member(width, prompt), tokens[: width + 1], commits, fields)
        )
    attention = np.stack([_softmax(scores[layer], visible[v]) for layer, v in enumerate(VISIBILITY)])
    return result, attention


def record_traces(
    decodings: Sequence[Sequence[SyntheticStep]],
    pad: str = "right",
    level: str = "full",
    names: Sequence[str] | None = None,
    meta: Mapping[str, object] | None = None,
) -> list[Trace]:
    """Record the decodings as one batch."""
    recorder = Recorder(names or [f"sample-{i}" for i in range(len(decodings))], meta or {})
    for samples in zip(*decodings, strict=True):
        step, layers, visibility = batch_steps(samples, pad, level)
        recorder.add(step, as_capture(layers, visibility))
    return recorder.build_traces()


def as_capture(layers: Sequence[Reductions], visibility: Sequence[int]) -> StepCapture:
    """The capture of a step whose masks have no structure."""
    return StepCapture(tuple(layers), tuple(visibility), (MaskStructure(MaskKind.MASK),) * LAYERS)


def batch_steps(
    samples: Sequence[SyntheticStep], pad: str = "right", level: str = "full"
) -> tuple[Step, list[Reductions], list[int]]:
    """One step of several samples, padded on the left or the right."""
    width = max(len(m.tokens) for m in samples)
    starts = [width - len(m.tokens) if pad == "left" else 0 for m in samples]
    owner = [b for b, m in enumerate(samples) for _ in m.commits]

    def stack(
        name: str, each: Sequence[np.ndarray], axes: Sequence[str], filler: float, own: Sequence[int] = ()
    ) -> torch.Tensor:
        """Stack batch-first (or commit-first), shifting the `key` and `query` axes by the padding on the left."""
        shape = [len(each)] + [max(a.shape[i] for a in each) for i in range(len(axes))]
        shape = [width if axis == "key" and name else size for axis, size in zip(("", *axes), shape, strict=True)]
        out = np.full(shape, filler, each[0].dtype)
        for b, array in enumerate(each):
            if name.endswith("_key"):
                array = np.where(array < 0, array, array + starts[own[b] if own else b])
            lead = [
                out.shape[i + 1] - array.shape[i] if a in ("key", "query") and pad == "left" else 0
                for i, a in enumerate(axes)
            ]
            out[(b, *(slice(s, s + n) for s, n in zip(lead, array.shape, strict=True)))] = array
        return torch.from_numpy(out)

    def canvas(tokens: Sequence[np.ndarray], states: Sequence[np.ndarray]) -> CanvasState:
        member = stack("", [m.member for m in samples], ("key", "region"), True)
        return CanvasState(
            stack("", tokens, ("key",), 77), stack("", states, ("key",), State.PAD), 0, Regions(REGIONS, member), block
        )

    if any(m.block is None for m in samples):
        block = None
    else:
        block = torch.tensor([[x + start for x in m.block] for m, start in zip(samples, starts, strict=True)])
    before = canvas([m.tokens for m in samples], [m.states for m in samples])
    after = canvas([m.after for m in samples], [np.ones(len(m.after), int) for m in samples])
    rows = [(b, p + starts[b], r + starts[b], token, c) for b, m in enumerate(samples) for p, r, token, c in m.commits]
    columns = [torch.tensor([row[i] for row in rows], dtype=torch.long) for i in range(4)]
    commits = Commits(*columns, torch.tensor([row[4] for row in rows]))
    layers = []
    for layer in range(LAYERS):
        fields = {}
        for name in fields_at_level(level):
            each = [m.fields[layer][name] for m in samples if name in m.fields[layer]]
            if not each:
                continue
            axes = FIELDS[name].axes
            if axes[0] == "commit":
                rows_of = [row for array in each for row in array]
                none = torch.zeros(
                    0, *(width if a == "key" else n for a, n in zip(axes, each[0].shape, strict=True) if a != "commit")
                )
                fields[name] = stack(name, rows_of, axes[1:], -9, owner) if owner else none
            else:
                fields[name] = stack(name, each, axes, 9)
        layers.append(Reductions(layer, fields))
    return Step(before, after, commits), layers, list(VISIBILITY)


def _fields(
    rng: np.random.Generator,
    scores: np.ndarray,
    visible: Sequence[np.ndarray],
    states: np.ndarray,
    commits: Sequence[tuple[int, int, int, float]],
    cached: int = 0,
) -> list[dict[str, np.ndarray]]:
    """Every field of one sample at one step, per layer; fields whose values no test interprets are random."""
    _, H, Q, K = scores.shape
    C, R = len(commits), len(REGIONS)
    predicting = np.isin(np.arange(cached, K), [row for _, row, _, _ in commits])
    own = states[cached:]
    W = np.stack([np.ones(Q, bool), own == State.MASKED, own == State.COMMITTED, predicting], -1).astype(float)
    W = W / np.maximum(W.sum(0), 1)
    layers = []
    for layer, v in enumerate(VISIBILITY):
        A = _softmax(scores[layer], visible[v])  # [H, Q, K]
        received = np.einsum("hqk,qg->hgk", A, W)
        rows = A[:, [row - cached for _, row, _, _ in commits]].swapaxes(0, 1)  # [C, H, K]
        top_key, row_key = _ranked(received), _ranked(rows)
        G = len(received[0])
        fields = {
            "received": received.mean(0),
            "top_key": top_key,
            "top": rng.random((H, G, RANKS, len(TOP_STATS))),
            "score_at_mean_direction": rng.random((H, RANKS)),
            "key_stats": rng.random((len(KEY_STATS), K)),
            "contribution": rng.random((G, K)),
            "moments": rng.random((H, len(QUANTITIES), len(ORDERS))),
            "head_stats": rng.random((H, len(HEAD_STATS))),
            "regions": rng.random((H, R, R)),
            "rollout": rng.random((R, R)),
            "residual": rng.random(K),
            "row_key": row_key,
            "row_mass": rng.random((C, H, RANKS)),
            "row_regions": rng.random((C, H, R)),
            "received_heads": received,
            "rows": rows,
            "matrix": A,
        }
        if v not in VISIBILITY[:layer]:
            share = visible[v] / visible[v].sum(1, keepdims=True)
            fields["uniform"] = np.einsum("qk,qg->gk", share, W)
            fields["visible_rows"] = np.einsum("qk,qg->gk", visible[v] * 1, (W > 0) * 1).astype(np.int32)
            fields["eligible"] = (fields["visible_rows"] >= np.clip((W > 0).sum(0), 1, 16)[:, None]).astype(np.int8)
        layers.append({n: a if a.dtype.kind == "i" else a.astype(np.float32) for n, a in fields.items()})
    return layers


def _ranked(values: np.ndarray) -> np.ndarray:
    """The 16 largest along the last axis, -1 if there are fewer."""
    order = np.argsort(-values, -1, kind="stable")[..., :RANKS]
    return np.pad(order, [(0, 0)] * (order.ndim - 1) + [(0, RANKS - order.shape[-1])], constant_values=-1)


def _softmax(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    e = np.exp(np.where(visible, scores, -np.inf))
    return e / e.sum(-1, keepdims=True)


def _full(n: int) -> np.ndarray:
    return np.ones((n, n), bool)


def _window(n: int) -> np.ndarray:
    return abs(np.arange(n)[:, None] - np.arange(n)) <= 2


def _member(width: int, prompt: int) -> np.ndarray:
    at = np.arange(width)
    return np.stack([at < prompt // 2, (at >= prompt // 2) & (at < prompt), at >= prompt - 1], -1)
