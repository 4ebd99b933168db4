"""Traces made by hand from whole attention matrices, so that a test knows what an analysis should find.

A `World` is one decoding with nothing reduced: the attention of every step over all rows. `trace_of` reduces it to the
arrays docs/trace.md lists at the level `summary`; of a world with a cache each step keeps its new rows alone. What no
analysis reads (rollout, the residual stream), and scores and norms that are not given, is NaN.

    world = canvas(attend(scores), prompt=20)       # scores [step, layer, head, query, key]
    look = Look(trace_of(world))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from floatscope.traces.layout import COORDS, TRACE_FIELDS, stored_axes

BOS, MASK, END, LINE, SPACE, STOP, COMMA = range(7)
WORDS = range(7, 40)
PIECES = {BOS: "<s>", MASK: "<mask>", END: "</s>", LINE: "\n", SPACE: "  ", STOP: " .", COMMA: ",--"}
PIECES |= {i: f" word{i}" for i in WORDS}
META = {
    "family": "mdm",
    "rows": "all",
    "pieces": {str(i): text for i, text in PIECES.items()},
    "special": {"bos": BOS, "mask": MASK},
    "special_ids": [BOS, MASK, END],
}


@dataclass(frozen=True, eq=False)
class World:
    attention: Sequence[np.ndarray]  # of each step [layer, head, query, key], all rows
    visible: Sequence[np.ndarray]  # of each step [layer, query, key]
    states: Sequence[np.ndarray]  # of each step [key]
    tokens: Sequence[np.ndarray]
    commits: Sequence[tuple[int, int, int, int]] = ()  # step, position, predicting row, token
    blocks: Sequence[tuple[int, int]] = ()
    regions: dict[str, Sequence[int]] = field(default_factory=dict)
    cached: bool = False
    columns: Sequence[np.ndarray] = ()  # of each step [layer, head, key_stat, key]
    turned: Sequence[np.ndarray] = ()  # of each step [layer, head, rank]

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
    return np.ones((n, n), bool)


def causal(n: int) -> np.ndarray:
    return np.tril(full(n))


def window(n: int, reach: int) -> np.ndarray:
    at = np.arange(n)
    return abs(at[:, None] - at) <= reach


def canvas(
    attention: np.ndarray,
    prompt: int,
    visible: np.ndarray | None = None,
    when: Sequence[int] | None = None,
    tokens: np.ndarray | None = None,
    regions: dict[str, Sequence[int]] | None = None,
    block: int | None = None,
) -> World:
    """A canvas of fixed width. `when[i]` is the step that fills the i-th mask; by default from the left, evenly.

    `visible` is [query, key] or [layer, query, key], by default all. Commits of a step are listed from the right.
    """
    steps, layers, _, n, _ = attention.shape
    new = n - prompt
    when = [i * steps // new for i in range(new)] if when is None else when
    see = np.broadcast_to(full(n) if visible is None else visible, (layers, n, n))
    text = np.array([BOS, *np.resize([*WORDS, STOP, LINE, SPACE, COMMA, END], n - 1)]) if tokens is None else tokens
    at = np.arange(n)
    decided = np.array([-1] * prompt + list(when))
    states, shown, commits, blocks = [], [], [], []
    for t in range(steps):
        state = np.where(decided >= t, State.MASKED, State.COMMITTED)
        state[:prompt] = State.PROMPT
        states.append(state)
        shown.append(np.where(state == State.MASKED, MASK, text))
        commits += [(t, int(p), int(p), int(text[p])) for p in at[::-1] if p >= prompt and decided[p] == t]
        if block is not None:
            leftmost = min((int(p) for p in at if state[p] == State.MASKED), default=n - 1)
            start = prompt + (leftmost - prompt) // block * block
            blocks.append((start, min(n, start + block)))
    return World(list(attention), [see] * steps, states, shown, commits, blocks, regions or {})


def growing(
    whole: np.ndarray, prompt: int, visible: np.ndarray | None = None, cached: bool = True, **more: object
) -> World:
    """A causal model's text, a token longer at each step; `whole` is the attention of the last [layer, head, T, T]."""
    layers, _, total, _ = whole.shape
    see = np.broadcast_to(causal(total) if visible is None else visible, (layers, total, total))
    text = np.array([BOS, *np.resize([*WORDS, STOP, LINE, END], total)])  # and the token the last row decides
    lengths = range(prompt, total + 1)
    return World(
        [whole[:, :, :n, :n] for n in lengths],
        [see[:, :n, :n] for n in lengths],
        [np.where(np.arange(n) < prompt, State.PROMPT, State.COMMITTED) for n in lengths],
        [text[:n] for n in lengths],
        [(t, n, n - 1, int(text[n])) for t, n in enumerate(lengths)],
        cached=cached,
        **more,
    )


def trace_of(world: World, sample: str = "hand", **meta: object) -> Trace:
    """What a watched decoding of this world would have stored."""
    kinds, of_layer = _visibilities(world)
    moments = [_moment(world, t, kinds) for t in range(world.steps)]
    width = max(len(state) for state in world.states)
    arrays = {name: _stack([m[name] for m in moments], name, width) for name in moments[0]}
    commits = list(world.commits)
    for column, name in enumerate(("commit_step", "commit_position", "commit_row", "commit_token")):
        arrays[name] = np.array([c[column] for c in commits], np.int32)
    arrays["commit_confidence"] = np.ones(len(commits), np.float32)
    arrays["layers"] = np.arange(world.layers, dtype=np.int32)
    arrays["layer_visibility"] = np.array(of_layer, np.int32)
    after = np.append(world.tokens[-1], [-1] * sum(position >= width for _, position, _, _ in commits))
    for step, position, _, token in commits:
        if step == world.steps - 1:
            after[position] = token
    arrays["tokens_after"] = after.astype(np.int32)
    if world.regions:
        arrays["region_member"] = np.stack([np.isin(np.arange(width), at) for at in world.regions.values()], -1)
    fields = {name: FIELDS[name] for name in fields_at_level("summary")} | TRACE_FIELDS
    axes = {
        name: fields[name].axes if name in TRACE_FIELDS else stored_axes(name, fields[name].axes) for name in arrays
    }
    coords = {**COORDS, "region": tuple(world.regions), "key_region": tuple(world.regions)}
    typed = {name: array.astype(fields[name].dtype) for name, array in arrays.items()}
    rows = "cache" if world.cached else "all"
    family = "mdm" if any((state == State.MASKED).any() for state in world.states) else "arm"
    return Trace(sample, typed, axes, coords, {**META, "rows": rows, "family": family, **meta})


def gini(values: Sequence[float]) -> float:
    x = sorted(values)
    n = len(x)
    return sum((2 * k - n - 1) * v for k, v in enumerate(x, 1)) / (n * sum(x))


def _visibilities(world: World) -> tuple[list[int], list[int]]:
    """The first layer of each mask, and which of them each layer has."""
    kinds: list[int] = []
    of_layer = []
    for layer in range(world.layers):
        same = [k for k, kind in enumerate(kinds) if all((see[kind] == see[layer]).all() for see in world.visible)]
        if not same:
            same = [len(kinds)]
            kinds.append(layer)
        of_layer.append(same[0])
    return kinds, of_layer


def _moment(world: World, t: int, kinds: list[int]) -> dict[str, np.ndarray]:
    """Every stored array of one step; those of commits have them in front."""
    state = world.states[t]
    n = len(state)
    first = len(world.states[t - 1]) if world.cached and t else 0
    A, see = world.attention[t][:, :, first:], world.visible[t][:, first:]
    layers, heads, queries, _ = A.shape
    commits = [c for c in world.commits if c[0] == t]
    groups = [
        list(range(queries)),
        [i for i in range(queries) if state[first + i] == State.MASKED],
        [i for i in range(queries) if state[first + i] == State.COMMITTED],
        [row - first for _, _, row, _ in commits],
    ]
    share = see / see.sum(-1, keepdims=True)
    G = len(GROUPS)
    received = np.full((layers, heads, G, n), np.nan)
    uniform, seen = np.full((layers, G, n), np.nan), np.zeros((layers, G, n), int)
    eligible = np.zeros((layers, G, n), int)
    for g, rows in enumerate(groups):
        if rows:
            received[:, :, g], uniform[:, g] = A[:, :, rows].mean(2), share[:, rows].mean(1)
            seen[:, g] = see[:, rows].sum(1)
            eligible[:, g] = seen[:, g] >= min(16, len(rows))
    top_key = np.full((layers, heads, G, RANKS), -1)
    top = np.full((layers, heads, G, RANKS, len(TOP_STATS)), np.nan)
    moments = np.full((layers, heads, len(QUANTITIES), len(ORDERS)), np.nan)
    stats = np.full((layers, heads, len(HEAD_STATS)), np.nan)
    columns = world.columns[t] if world.columns else np.full((layers, heads, len(KEY_STATS), n), np.nan)
    turned = world.turned[t] if world.turned else np.full((layers, heads, RANKS), np.nan)
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
            stats[layer, head, HEAD_STATS.index("entropy")] = _entropy(A[layer, head], see[layer])
            stats[layer, head, HEAD_STATS.index("first")] = received[layer, head, 0, 0]
    rows = A[:, :, groups[3]].transpose(2, 0, 1, 3) if commits else np.zeros((0, layers, heads, n))
    order = np.argsort(-rows, -1, kind="stable")[..., :RANKS]
    order = np.pad(order, [(0, 0)] * 3 + [(0, RANKS - order.shape[-1])], constant_values=-1)
    mass = np.take_along_axis(rows, np.maximum(order, 0), -1)
    there = (order >= 0) & (mass > 0)
    found = {
        "tokens": world.tokens[t],
        "states": state,
        "keys": np.array(n),
        "queries": np.array(queries),
        "block": np.array(world.blocks[t] if world.blocks else (-1, -1)),
        "received": received.mean(1),
        "uniform": uniform[kinds],
        "seen": seen[kinds],
        "eligible": eligible[kinds],
        "top_key": top_key,
        "top": top,
        "moments": moments,
        "turned": turned,
        "key_stats": columns.mean(1),
        "contribution": (received * columns[:, :, None, KEY_STATS.index("output_norm")]).mean(1),
        "head_stats": stats,
        "residual": np.full((layers, n), np.nan),
        "row_key": np.where(there, order, -1),
        "row_mass": np.where(there, mass, np.nan),
    }
    if world.regions:
        member = np.stack([np.isin(np.arange(n), at) for at in world.regions.values()], -1).astype(float)
        inside = member[first:].sum(0)
        with np.errstate(invalid="ignore"):
            pooled = np.einsum("lhqk,qr,ks->lhrs", A, member[first:], member) / inside[:, None]
        found |= {"regions": pooled, "rollout": np.full_like(pooled[:, 0], np.nan), "row_regions": rows @ member}
    return found


def _entropy(A: np.ndarray, see: np.ndarray) -> float:
    """Mean over the rows that see more than one key of the row's entropy over that of a uniform row."""
    each = []
    for row, visible in zip(A, see, strict=True):
        if visible.sum() > 1:
            p = row[visible & (row > 0)]
            each.append(-(p * np.log(p)).sum() / np.log(visible.sum()))
    return float(np.mean(each)) if each else np.nan


def _stack(pieces: Sequence[np.ndarray], name: str, width: int) -> np.ndarray:
    """Join the steps; `key` axes are filled up to the widest canvas."""
    axes = TRACE_FIELDS[name].axes if name in TRACE_FIELDS else stored_axes(name, FIELDS[name].axes)
    grown = []
    for piece in pieces:
        axes_of = axes if axes[0] == "commit" else axes[1:]
        missing = [(0, width - size if axis == "key" else 0) for axis, size in zip(axes_of, piece.shape, strict=True)]
        blank = np.nan if piece.dtype.kind == "f" else State.PAD if name == "states" else -1
        grown.append(np.pad(piece, missing, constant_values=blank) if "key" in axes_of else piece)
    return np.concatenate(grown) if axes[0] == "commit" else np.stack(grown)


KINDS = ("full", "window", "causal", "cached")
REGIONS = {"question": range(2, 9), "template": (1, 5, 6, 11), "gold": range(9, 14), "answer": range(24, 60)}


def anything(seed: int, kind: str) -> World:
    """A random decoding with a few keys that draw attention for a while; in windows every other layer sees less."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    steps, layers, heads = int(rng.integers(3, 7)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    prompt, new = int(rng.integers(22, 27)), int(rng.integers(6, 10))
    n = prompt + new
    shape = (layers, heads, n, n) if kind == "cached" else (steps, layers, heads, n, n)
    scores = rng.normal(0, 1, shape)
    loud = rng.random((*shape[:-3], 1, 1, n)) < 0.12
    scores += np.where(loud, rng.uniform(1, 5, loud.shape), 0.0)
    see = np.stack([full(n) if kind == "full" else causal(n)] * layers)
    if kind == "window":
        see = np.stack([window(n, 9) if layer % 2 else full(n) for layer in range(layers)])
    if kind == "cached":
        return growing(attend(scores, see[:, None]), prompt, see, regions=REGIONS)
    tokens = np.array([BOS, *rng.permutation(np.resize([*WORDS, STOP, LINE, SPACE, COMMA, END, BOS], n - 1))])
    when = rng.integers(0, steps, new).tolist()
    return canvas(attend(scores, see[:, None]), prompt, see, when, tokens, REGIONS, block=4)
