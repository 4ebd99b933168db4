"""Traces built from whole attention matrices, so that a test knows what an analysis should find.

A `Decoding` has nothing reduced: the attention of every step over all rows. `build_trace` reduces it to the arrays that
docs/trace.md lists for the level `summary`; with a cache each step has its new rows only. What no analysis reads (the
rollout, the residual stream) is NaN, and so are scores and norms that are not given.

    decoding = canvas(attend(scores), prompt=20)       # scores [step, layer, head, query, key]
    view = TraceView(build_trace(decoding))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from floatscope.schema import (
    FIELDS,
    GROUPS,
    HEAD_STATS,
    KEY_STATS,
    ORDERS,
    QUANTITIES,
    RANKS,
    TOP_STATS,
    State,
    fields_at_level,
)
from floatscope.traces import Trace
from floatscope.traces.trace_fields import COORDS, TRACE_FIELDS, stored_axes

BOS, MASK, END, LINE, SPACE, STOP, COMMA = range(7)
WORDS = range(7, 40)
PIECES = {BOS: "<s>", MASK: "<mask>", END: "</s>", LINE: "\n", SPACE: "  ", STOP: " .", COMMA: ",--"}
PIECES |= {i: f" word{i}" for i in WORDS}
META = {
    "paradigm": "mdm",
    "rows": "all",
    "pieces": {str(i): text for i, text in PIECES.items()},
    "special": {"bos": BOS, "mask": MASK},
    "special_ids": [BOS, MASK, END],
}
WITH_END = {**META["special"], "eos": END}
"""The special tokens of a model that ends its answer: `build_trace(decoding, special=WITH_END)`."""


@dataclass(frozen=True, eq=False)
class Decoding:
    """The attention, the canvas and the commits of every step."""

    attention: Sequence[np.ndarray]  # of each step [layer, head, query, key], all rows
    visible: Sequence[np.ndarray]  # of each step [layer, query, key]
    states: Sequence[np.ndarray]  # of each step [key]
    tokens: Sequence[np.ndarray]
    commits: Sequence[tuple[int, int, int, int]] = ()  # step, position, predicting row, token
    blocks: Sequence[tuple[int, int]] = ()
    regions: dict[str, Sequence[int]] = field(default_factory=dict)
    cached: bool = False
    columns: Sequence[np.ndarray] = ()  # of each step [layer, head, key_stat, key]
    score_at_mean_direction: Sequence[np.ndarray] = ()  # of each step [layer, head, rank]

    @property
    def steps(self) -> int:
        return len(self.states)

    @property
    def layers(self) -> int:
        return len(self.attention[0])

    @property
    def heads(self) -> int:
        return self.attention[0].shape[1]


def attend(scores: np.ndarray, visible: np.ndarray | bool = True) -> np.ndarray:
    """Softmax over the visible keys of the last axis."""
    e = np.where(visible, np.exp(scores), 0.0)
    return e / e.sum(-1, keepdims=True)


def full(n: int) -> np.ndarray:
    """A mask under which every row sees every key."""
    return np.ones((n, n), bool)


def causal(n: int) -> np.ndarray:
    """A mask under which every row sees the keys up to its own."""
    return np.tril(full(n))


def window(n: int, reach: int) -> np.ndarray:
    """A mask under which every row sees the keys at a distance of at most `reach`."""
    position = np.arange(n)
    return abs(position[:, None] - position) <= reach


def canvas(
    attention: np.ndarray,
    prompt: int,
    visible: np.ndarray | None = None,
    when: Sequence[int] | None = None,
    tokens: np.ndarray | None = None,
    regions: dict[str, Sequence[int]] | None = None,
    block: int | None = None,
) -> Decoding:
    """A canvas of fixed width. `when[i]` is the step that fills the i-th mask; by default from left to right.

    `visible` is [query, key] or [layer, query, key]; by default every row sees every key. The commits of a step are
    listed from the right.
    """
    steps, layers, _, n, _ = attention.shape
    new = n - prompt
    when = [i * steps // new for i in range(new)] if when is None else when
    mask = np.broadcast_to(full(n) if visible is None else visible, (layers, n, n))
    text = np.array([BOS, *np.resize([*WORDS, STOP, LINE, SPACE, COMMA, END], n - 1)]) if tokens is None else tokens
    positions = np.arange(n)
    filled_at = np.array([-1] * prompt + list(when))
    states, tokens_seen, commits, blocks = [], [], [], []
    for t in range(steps):
        state = np.where(filled_at >= t, State.MASKED, State.COMMITTED)
        state[:prompt] = State.PROMPT
        states.append(state)
        tokens_seen.append(np.where(state == State.MASKED, MASK, text))
        commits += [(t, int(p), int(p), int(text[p])) for p in positions[::-1] if p >= prompt and filled_at[p] == t]
        if block is not None:
            leftmost = min((int(p) for p in positions if state[p] == State.MASKED), default=n - 1)
            start = prompt + (leftmost - prompt) // block * block
            blocks.append((start, min(n, start + block)))
    return Decoding(list(attention), [mask] * steps, states, tokens_seen, commits, blocks, regions or {})


def growing(
    attention: np.ndarray, prompt: int, visible: np.ndarray | None = None, cached: bool = True, **more: object
) -> Decoding:
    """A causal text, one token longer at each step; `attention` [layer, head, T, T] is that of the last step."""
    layers, _, total, _ = attention.shape
    mask = np.broadcast_to(causal(total) if visible is None else visible, (layers, total, total))
    text = np.array([BOS, *np.resize([*WORDS, STOP, LINE, END], total)])  # and the token that the last row predicts
    lengths = range(prompt, total + 1)
    return Decoding(
        [attention[:, :, :n, :n] for n in lengths],
        [mask[:, :n, :n] for n in lengths],
        [np.where(np.arange(n) < prompt, State.PROMPT, State.COMMITTED) for n in lengths],
        [text[:n] for n in lengths],
        [(t, n, n - 1, int(text[n])) for t, n in enumerate(lengths)],
        cached=cached,
        **more,
    )


def end_answer(decoding: Decoding, length: int) -> Decoding:
    """The decoding whose answer has `length` tokens: all commits to the right of them are END."""
    first = sorted(position for _, position, _, _ in decoding.commits)[length]
    commits = [(t, p, row, END if p >= first else token) for t, p, row, token in decoding.commits]
    is_end = [(np.arange(len(state)) >= first) & (state == State.COMMITTED) for state in decoding.states]
    tokens = [np.where(ends, END, row) for ends, row in zip(is_end, decoding.tokens, strict=True)]
    return replace(decoding, commits=commits, tokens=tokens)


def shift_rows(decoding: Decoding) -> Decoding:
    """The decoding of a model whose logits are shifted: the row before a position predicts it."""
    return replace(decoding, commits=[(t, p, p - 1, token) for t, p, _, token in decoding.commits])


def build_trace(decoding: Decoding, sample: str = "hand", **meta: object) -> Trace:
    """The trace that watching this decoding would store."""
    first_layers, layer_visibility = _visibilities(decoding)
    steps = [_build_step(decoding, t, first_layers) for t in range(decoding.steps)]
    width = max(len(state) for state in decoding.states)
    arrays = {name: _stack([step[name] for step in steps], name, width) for name in steps[0]}
    commits = list(decoding.commits)
    for column, name in enumerate(("commit_step", "commit_position", "commit_row", "commit_token")):
        arrays[name] = np.array([c[column] for c in commits], np.int32)
    arrays["commit_confidence"] = np.ones(len(commits), np.float32)
    arrays["layers"] = np.arange(decoding.layers, dtype=np.int32)
    arrays["layer_visibility"] = np.array(layer_visibility, np.int32)
    after = np.append(decoding.tokens[-1], [-1] * sum(position >= width for _, position, _, _ in commits))
    for step, position, _, token in commits:
        if step == decoding.steps - 1:
            after[position] = token
    arrays["tokens_after"] = after.astype(np.int32)
    if decoding.regions:
        arrays["region_member"] = np.stack([np.isin(np.arange(width), at) for at in decoding.regions.values()], -1)
    fields = {name: FIELDS[name] for name in fields_at_level("summary")} | TRACE_FIELDS
    axes = {
        name: fields[name].axes if name in TRACE_FIELDS else stored_axes(name, fields[name].axes) for name in arrays
    }
    coords = {**COORDS, "region": tuple(decoding.regions), "key_region": tuple(decoding.regions)}
    typed = {name: array.astype(fields[name].dtype) for name, array in arrays.items()}
    rows = "cache" if decoding.cached else "all"
    paradigm = "mdm" if any((state == State.MASKED).any() for state in decoding.states) else "arm"
    return Trace(sample, typed, axes, coords, {**META, "rows": rows, "paradigm": paradigm, **meta})


def gini(values: Sequence[float]) -> float:
    """The Gini coefficient."""
    x = sorted(values)
    n = len(x)
    return sum((2 * k - n - 1) * v for k, v in enumerate(x, 1)) / (n * sum(x))


def _visibilities(decoding: Decoding) -> tuple[list[int], list[int]]:
    """The first layer with each mask, and the index of the mask of each layer."""
    first_layers: list[int] = []
    layer_visibility = []
    for layer in range(decoding.layers):
        same = [
            k for k, first in enumerate(first_layers) if all((m[first] == m[layer]).all() for m in decoding.visible)
        ]
        if not same:
            same = [len(first_layers)]
            first_layers.append(layer)
        layer_visibility.append(same[0])
    return first_layers, layer_visibility


def _build_step(decoding: Decoding, t: int, first_layers: list[int]) -> dict[str, np.ndarray]:
    """Every stored array of one step; arrays of commits begin with the `commit` axis."""
    state = decoding.states[t]
    n = len(state)
    first = len(decoding.states[t - 1]) if decoding.cached and t else 0
    A, mask = decoding.attention[t][:, :, first:], decoding.visible[t][:, first:]
    layers, heads, queries, _ = A.shape
    commits = [c for c in decoding.commits if c[0] == t]
    groups = [
        list(range(queries)),
        [i for i in range(queries) if state[first + i] == State.MASKED],
        [i for i in range(queries) if state[first + i] == State.COMMITTED],
        [row - first for _, _, row, _ in commits],
    ]
    share = mask / mask.sum(-1, keepdims=True)
    G = len(GROUPS)
    received = np.full((layers, heads, G, n), np.nan)
    uniform, visible_rows = np.full((layers, G, n), np.nan), np.zeros((layers, G, n), int)
    eligible = np.zeros((layers, G, n), int)
    for g, rows in enumerate(groups):
        if rows:
            received[:, :, g], uniform[:, g] = A[:, :, rows].mean(2), share[:, rows].mean(1)
            visible_rows[:, g] = mask[:, rows].sum(1)
            eligible[:, g] = visible_rows[:, g] >= min(16, len(rows))
    top_key = np.full((layers, heads, G, RANKS), -1)
    top = np.full((layers, heads, G, RANKS, len(TOP_STATS)), np.nan)
    moments = np.full((layers, heads, len(QUANTITIES), len(ORDERS)), np.nan)
    stats = np.full((layers, heads, len(HEAD_STATS)), np.nan)
    columns = decoding.columns[t] if decoding.columns else np.full((layers, heads, len(KEY_STATS), n), np.nan)
    scores = decoding.score_at_mean_direction
    score_at_mean_direction = scores[t] if scores else np.full((layers, heads, RANKS), np.nan)
    for layer in range(layers):
        for head in range(heads):
            for g in range(G):
                keys = np.flatnonzero(eligible[layer, g]).tolist()
                lift = {j: received[layer, head, g, j] / uniform[layer, g, j] for j in keys}
                moments[layer, head, g] = len(lift), sum(lift.values()), sum(x**2 for x in lift.values())
                for rank, j in enumerate(sorted(keys, key=lambda j: (-lift[j], j))[:RANKS]):
                    top_key[layer, head, g, rank] = j
                    top[layer, head, g, rank] = lift[j], *columns[layer, head, :, j]
                if g == 0 and lift:
                    own = columns[layer, head][:, keys]
                    sums = np.full(len(own), len(keys)), own.sum(-1), (own**2).sum(-1)
                    moments[layer, head, G:] = np.stack(sums, -1)
                    stats[layer, head, HEAD_STATS.index("gini")] = gini(list(lift.values()))
            stats[layer, head, HEAD_STATS.index("entropy")] = _entropy(A[layer, head], mask[layer])
            stats[layer, head, HEAD_STATS.index("first")] = received[layer, head, 0, 0]
    rows = A[:, :, groups[3]].transpose(2, 0, 1, 3) if commits else np.zeros((0, layers, heads, n))
    order = np.argsort(-rows, -1, kind="stable")[..., :RANKS]
    order = np.pad(order, [(0, 0)] * 3 + [(0, RANKS - order.shape[-1])], constant_values=-1)
    mass = np.take_along_axis(rows, np.maximum(order, 0), -1)
    is_measured = (order >= 0) & (mass > 0)
    arrays = {
        "tokens": decoding.tokens[t],
        "states": state,
        "keys": np.array(n),
        "queries": np.array(queries),
        "block": np.array(decoding.blocks[t] if decoding.blocks else (-1, -1)),
        "received": received.mean(1),
        "uniform": uniform[first_layers],
        "visible_rows": visible_rows[first_layers],
        "eligible": eligible[first_layers],
        "top_key": top_key,
        "top": top,
        "moments": moments,
        "score_at_mean_direction": score_at_mean_direction,
        "key_stats": columns.mean(1),
        "contribution": (received * columns[:, :, None, KEY_STATS.index("output_norm")]).mean(1),
        "head_stats": stats,
        "residual": np.full((layers, n), np.nan),
        "row_key": np.where(is_measured, order, -1),
        "row_mass": np.where(is_measured, mass, np.nan),
    }
    if decoding.regions:
        member = np.stack([np.isin(np.arange(n), at) for at in decoding.regions.values()], -1).astype(float)
        inside = member[first:].sum(0)
        with np.errstate(invalid="ignore"):
            pooled = np.einsum("lhqk,qr,ks->lhrs", A, member[first:], member) / inside[:, None]
        arrays |= {"regions": pooled, "rollout": np.full_like(pooled[:, 0], np.nan), "row_regions": rows @ member}
    return arrays


def _entropy(A: np.ndarray, mask: np.ndarray) -> float:
    """The entropy of a row over that of a uniform row, mean over the rows that see more than one key."""
    entropies = []
    for row, visible in zip(A, mask, strict=True):
        if visible.sum() > 1:
            p = row[visible & (row > 0)]
            entropies.append(-(p * np.log(p)).sum() / np.log(visible.sum()))
    return float(np.mean(entropies)) if entropies else np.nan


def _stack(pieces: Sequence[np.ndarray], name: str, width: int) -> np.ndarray:
    """Join the steps; `key` axes are padded to the widest canvas."""
    axes = TRACE_FIELDS[name].axes if name in TRACE_FIELDS else stored_axes(name, FIELDS[name].axes)
    padded = []
    for piece in pieces:
        step_axes = axes if axes[0] == "commit" else axes[1:]
        missing = [(0, width - size if axis == "key" else 0) for axis, size in zip(step_axes, piece.shape, strict=True)]
        fill = np.nan if piece.dtype.kind == "f" else State.PAD if name == "states" else -1
        padded.append(np.pad(piece, missing, constant_values=fill) if "key" in step_axes else piece)
    return np.concatenate(padded) if axes[0] == "commit" else np.stack(padded)


KINDS = ("full", "window", "causal", "cached")
REGIONS = {"question": range(2, 9), "template": (1, 5, 6, 11), "gold": range(9, 14), "answer": range(24, 60)}


def random_decoding(seed: int, kind: str) -> Decoding:
    """A random decoding with a few keys that receive much attention for a while. The kind is that of the mask; "window"
    narrows every other layer."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    steps, layers, heads = int(rng.integers(3, 7)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    prompt, new = int(rng.integers(22, 27)), int(rng.integers(6, 10))
    n = prompt + new
    shape = (layers, heads, n, n) if kind == "cached" else (steps, layers, heads, n, n)
    scores = rng.normal(0, 1, shape)
    is_anchor = rng.random((*shape[:-3], 1, 1, n)) < 0.12
    scores += np.where(is_anchor, rng.uniform(1, 5, is_anchor.shape), 0.0)
    mask = np.stack([full(n) if kind == "full" else causal(n)] * layers)
    if kind == "window":
        mask = np.stack([window(n, 9) if layer % 2 else full(n) for layer in range(layers)])
    if kind == "cached":
        return growing(attend(scores, mask[:, None]), prompt, mask, regions=REGIONS)
    tokens = np.array([BOS, *rng.permutation(np.resize([*WORDS, STOP, LINE, SPACE, COMMA, END, BOS], n - 1))])
    when = rng.integers(0, steps, new).tolist()
    return canvas(attend(scores, mask[:, None]), prompt, mask, when, tokens, REGIONS, block=4)


ALL_KINDS = (*KINDS, "shifted")


def random_answer(seed: int, kind: str) -> Decoding:
    """A random decoding whose answer of three or four tokens ends before its last commits; "shifted" logits too."""
    decoding = shift_rows(random_decoding(seed, "full")) if kind == "shifted" else random_decoding(seed, kind)
    return end_answer(decoding, 3 + seed % 2)


JOINING_KEY = 32


def with_joining_key(cached: bool, layers: int = 2, heads: int = 3) -> Decoding:
    """A growing text of 30 to 60 keys: every row gives half to the first key, until a new key joins that takes .9 of
    every later row and leaves .1 to be spread evenly."""
    prompt, total = 30, 60
    A = causal(total) / causal(total).sum(1, keepdims=True) / 2
    A[:, 0] += 0.5
    late = slice(JOINING_KEY, None)
    A[late] = np.where(causal(total)[late], 0.1 / np.arange(JOINING_KEY + 1, total + 1)[:, None], 0)
    A[late, JOINING_KEY] += 0.9
    return growing(np.broadcast_to(A, (layers, heads, total, total)), prompt, cached=cached)
