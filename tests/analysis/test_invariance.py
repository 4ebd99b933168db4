"""Tables do not depend on the order of heads, the batch, the cache or the order of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from dense_decodings import KINDS, build_trace, random_decoding

import floatscope as fs
from floatscope.analysis import TraceView, analyse, anchor_movement, anchor_tables
from floatscope.analysis.floating import QUERY_GROUPS
from floatscope.traces import Trace
from pairs import slow_except

pytestmark = pytest.mark.filterwarnings("error")
SHAPE = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 64}
LENGTHS = (30, 21, 26)
OF_HEADS = frozenset(
    {"per_head", "row_entropy", "gini", "sinks", "head_floating", "head_activity", "qk", "attribution", "norms"}
)
OF_COMMITS = frozenset({"last commit", "commits", "order", "arness", "coupling", "predicting_rows", "retrieval"})
HALF = frozenset({"flow", "rollout", "rollout_distance", "region_importance", "predicting_rows", "retrieval", "norms"})
"""Tables that read fields stored in float16."""
DETECTORS = ("zscore(k=1.5)", "rulli(eps=0.3)", "topk(k=3)", "gu(eps=0.08)")


def assert_same_tables(
    ours: list[Trace],
    theirs: list[Trace],
    by: str,
    ignore: frozenset[str] = frozenset(),
    groups: Sequence[str] = QUERY_GROUPS,
) -> None:
    """`groups` are the query groups that are compared in tables of groups."""
    one, two = analyse(ours, by), analyse(theirs, by)
    assert one.tables.keys() - ignore == two.tables.keys() - ignore
    assert one.missing.keys() - ignore == two.missing.keys() - ignore
    for name, table in one.tables.items():
        if name not in ignore:
            columns = [column for column in table.columns if column not in ignore]
            near = {"rtol": 2e-3, "atol": 2e-3} if name in HALF else {"rtol": 2e-4, "atol": 2e-5}
            pair = (table[columns], two.tables[name][columns])
            if name in ("top_keys", "floating"):
                pair = tuple(t[t["group"].isin(groups)].reset_index(drop=True) for t in pair)
            pd.testing.assert_frame_equal(*pair, **near, obj=name)


def with_pieces(trace: Trace) -> Trace:
    """The trace with texts for its tokens, which a model with random weights does not have."""
    words = ["\n", " .", "</s>", "one", " two", "3"]
    pieces = {str(i): words[i % len(words)] for i in range(64)}
    return replace(trace, meta={**trace.meta, "pieces": pieces, "special": {"bos": 2, "mask": 63}, "special_ids": [2]})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", slow_except([0, 3], 3))
def test_the_order_of_heads_does_not_matter(seed, kind):
    decoding = random_decoding(seed, kind)
    order = np.random.default_rng(seed).permutation(decoding.heads)
    shuffled = replace(decoding, attention=[A[:, order] for A in decoding.attention])
    for by in DETECTORS:
        assert_same_tables(
            [build_trace(decoding)],
            [build_trace(shuffled)],
            by,
            ignore=frozenset({"head_floating", "qk", "head_activity", "retrieval"}),
        )
    each = [
        anchor_movement.head_floating(TraceView(build_trace(w)))["within"].to_numpy().reshape(-1, decoding.heads)
        for w in (decoding, shuffled)
    ]
    np.testing.assert_array_equal(each[0][:, order], each[1])
    counts = [
        anchor_tables.head_anchors(TraceView(build_trace(w), "rulli(eps=1)")).sum(-1) for w in (decoding, shuffled)
    ]
    np.testing.assert_array_equal(counts[0][:, :, order], counts[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_traces_does_not_matter(kind):
    traces = [build_trace(random_decoding(seed, kind), f"{seed}") for seed in range(3)]
    one, two = (analyse(t, "rulli(eps=1)").tables for t in (traces, traces[::-1]))
    for name, table in one.items():
        columns = list(table.columns)
        pd.testing.assert_frame_equal(
            table.sort_values(columns, ignore_index=True), two[name].sort_values(columns, ignore_index=True)
        )


@pytest.fixture(scope="module", params=["llada", "llama"])
def decoded(request, tmp_path_factory) -> tuple[list[Trace], list[Trace]]:
    """Three prompts in one padded batch, and each alone."""
    layout = request.param
    model = fs.load(fs.write_random(tmp_path_factory.mktemp(layout), architecture=layout, **SHAPE), device="cpu")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, n).tolist() for n in LENGTHS]
    longest = max(LENGTHS)
    spans = [
        {
            "question": [(longest - n, longest - n + 5)],
            "rest": [(longest - n + 5, longest)],
            "answer": [(longest, longest + 6)],
            "evidence": [(longest - 9, longest)],
        }
        for n in LENGTHS
    ]
    how = {"new_tokens": 6, "watch": fs.Watch(), **({"steps": 4} if layout == "llada" else {"stop": False})}
    regions = fs.Regions.from_spans(spans, length=longest + 6)
    names = ["a", "b", "c"]
    together = fs.decode(model, prompts, samples=names, regions=regions, **how).traces
    alone = []
    for name, prompt, span in zip(names, prompts, spans, strict=True):
        shift = longest - len(prompt)
        own = {region: [(start - shift, stop - shift) for start, stop in at] for region, at in span.items()}
        regions = fs.Regions.from_spans([own], length=len(prompt) + 6)
        alone += fs.decode(model, [prompt], samples=[name], regions=regions, **how).traces
    return [*map(with_pieces, together)], [*map(with_pieces, alone)]


@pytest.mark.parametrize("by", slow_except(DETECTORS, "zscore(k=1.5)", "gu(eps=0.08)"))
def test_a_padded_batch_gives_the_tables_of_its_samples_alone(decoded, by):
    together, alone = decoded
    assert set(analyse(together, by).missing) == ({"qk"} if by.startswith("gu") else set())
    assert_same_tables(together, alone, by)


@pytest.mark.parametrize("seed", slow_except(range(3), 0))
@pytest.mark.parametrize("by", DETECTORS)
def test_cached_rows_give_the_tables_of_full_forwards(seed, by):
    """Except for single heads, which a cache shows at the first step only."""
    decoding = random_decoding(seed, "cached")
    uncached = replace(decoding, cached=False)
    assert_same_tables([build_trace(decoding)], [build_trace(uncached)], by, ignore=OF_HEADS)


def test_a_model_with_and_without_a_cache(tmp_path):
    """Decode with a cache; then watch a forward over every prefix of the generated text."""
    model = fs.load(fs.write_random(tmp_path / "llama", architecture="llama", **SHAPE), device="cpu")
    prompt = np.random.default_rng(1).integers(0, 60, 24).tolist()
    out = fs.decode(model, [prompt], new_tokens=8, stop=False, samples=["0.0"], watch=fs.Watch())
    cached = out.trace
    assert cached.meta["rows"] == "cache"
    with fs.watch(model) as watcher, torch.no_grad():
        for n in range(24, 32):
            model.module(input_ids=out.tokens[:, :n], use_cache=False)
    (watched,) = watcher.traces
    assert watched.meta["rows"] == "all"
    for by in DETECTORS:  # except for what a cache or a bare forward does not show
        ours, theirs = [with_pieces(cached)], [with_pieces(watched)]
        assert_same_tables(ours, theirs, by, OF_HEADS | OF_COMMITS, groups=["all"])
