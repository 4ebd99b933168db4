"""A cache of finished blocks changes nothing: tokens, logits and captured rows equal those of forwards without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import floatscope as fs
from floatscope import analysis
from floatscope.canvas import CanvasState, EndAlignment, Regions, move_columns
from floatscope.models.model import BlockCachedForward
from floatscope.pipelines.trace import plan_trace
from floatscope.reports.explorer import build_payload
from floatscope.schema import RowSource, State

FAMILIES = {  # architecture → preset, settings that take several steps with random weights
    "llada2": ("llada2", {"sampler": "dynamic(tau=0.02)"}),
    "sdar-moe": ("llada2.1", {"sampler": "dynamic(tau=0.02, editing=0.01)", "seed": 1}),
    "sdar": ("sdar", {"sampler": "dynamic(tau=0.02)"}),
    "fast-dllm-v2": ("fast-dllm-v2", {"block": 4}),
    "a2d": (None, {"sampler": "klass", "block": 4}),
    "bd3lm": (None, {"sampler": "confidence", "steps": 5}),
}
SIZE = 8
LENGTHS = (1, 7, 8, 9, 16, 21)
SIZES = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 128}


def prompt(length: int) -> list[int]:
    return torch.randint(5, 200, (length,), generator=torch.Generator().manual_seed(length)).tolist()


PROMPTS = [prompt(n) for n in LENGTHS]
NAMES = [f"s{n}" for n in LENGTHS]


def without_cache(model):
    return fs.Model(model.module, replace(model.spec, supports_cache=False), model.tokenizer)


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    model = fs.load(fs.write_random(folder, request.param, seed=3, **SIZES), device="cpu", block_size=SIZE)
    preset, settings = FAMILIES[request.param]
    own = {"new_tokens": 19, "stop": False, "chat": False, **({} if preset is None else {"preset": preset})}
    return model, {**own, **settings}


def assert_same_steps(ours, theirs):
    assert len(ours.steps) == len(theirs.steps)
    for a, b in zip(ours.steps, theirs.steps, strict=True):
        for name in ("sample", "position", "row", "token"):
            assert torch.equal(getattr(a.commits, name), getattr(b.commits, name)), name
        torch.testing.assert_close(a.commits.confidence, b.commits.confidence, rtol=0, atol=2e-6)
    assert torch.equal(ours.tokens, theirs.tokens)


# --- tokens and logits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_a_cached_decoding_equals_one_without_a_cache(opened, length):
    model, settings = opened
    assert model.spec.row_source is RowSource.BLOCK
    ours = fs.decode(model, prompt(length), **settings)
    assert_same_steps(ours, fs.decode(without_cache(model), prompt(length), **settings))
    assert len(ours.steps) > 2


def test_a_batch_of_unequal_prompts_equals_one_without_a_cache_and_its_prompts_alone(opened):
    model, settings = opened
    together = fs.decode(model, PROMPTS, samples=NAMES, **settings)
    assert_same_steps(together, fs.decode(without_cache(model), PROMPTS, samples=NAMES, **settings))
    for b, name in enumerate(NAMES):
        alone = fs.decode(model, PROMPTS[b], samples=[name], **settings)
        assert together.tokens[b][together.steps[-1].after.valid[b]].tolist() == alone.tokens[0].tolist()


def test_logits_of_samples_in_different_blocks_equal_a_plain_forward(opened):
    """Canvases grow by blocks in any order, as when samples need different numbers of steps."""
    model, _ = opened
    forward, generator = BlockCachedForward(model), torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 200, (3, 6 * SIZE), generator=generator)
    first, blocks = torch.tensor([0, 5, 11]), torch.tensor([1, 1, 3])
    for grown in ([], [1], [0, 2], [], [1], [1], [0]):
        blocks[grown] += 1
        stop = first + blocks * SIZE
        position = torch.arange(int(stop.max()))
        valid = (position >= first[:, None]) & (position < stop[:, None])
        states = torch.where(valid, int(State.PROMPT), int(State.PAD))
        in_block = valid & (position >= stop[:, None] - SIZE)
        tokens[:, : len(position)][in_block] = torch.randint(5, 200, (int(in_block.sum()),), generator=generator)
        canvas = CanvasState(tokens[:, : len(position)], states)
        rows = slice(int(stop.min()) - SIZE, int(stop.max()))
        with torch.no_grad():
            ours, theirs = forward(canvas, rows), model.forward(canvas, rows)
        is_run = in_block
        if model.spec.shift:
            is_run = valid & (position >= stop[:, None] - SIZE - 1)
        is_run = is_run[:, rows]
        torch.testing.assert_close(ours[is_run], theirs[is_run], rtol=0, atol=2e-5 * float(theirs[is_run].abs().max()))
        assert ours[valid[:, rows] & ~is_run].isnan().all()


def test_a_step_runs_its_block_and_a_finished_block_is_stored_once(opened):
    model, settings = opened
    widths = []
    hook = model.module.register_forward_pre_hook(
        lambda m, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        out = fs.decode(model, prompt(21), **settings)
        steps = len(out.steps)
    finally:
        hook.remove()
    rows = SIZE + model.spec.shift
    prefill, blocks = 16, out.tokens.shape[1] // SIZE - 2
    # With shifted logits, storing runs the last row of the block before again.
    assert widths[0] == prefill
    assert sorted(widths[1:]) == sorted([rows] * (steps + blocks - 1))


def test_samples_stop_at_an_end_of_text(opened):
    model, settings = opened
    free = fs.decode(model, PROMPTS, samples=NAMES, **settings)
    end = int(free.tokens[2][len(free.tokens[2]) // 2])
    model = fs.Model(model.module, replace(model.spec, eos_id=end), model.tokenizer)
    settings = settings | {"stop": True}
    ours = fs.decode(model, PROMPTS, samples=NAMES, **settings)
    assert_same_steps(ours, fs.decode(without_cache(model), PROMPTS, samples=NAMES, **settings))


def test_guidance_has_a_cache_of_its_own(opened):
    model, settings = opened
    settings = settings | {"guidance": 0.7}
    ours = fs.decode(model, PROMPTS[2:5], **settings)
    assert_same_steps(ours, fs.decode(without_cache(model), PROMPTS[2:5], **settings))


# --- traces ----------------------------------------------------------------------------------------------------------


def watch(model, settings, **given):
    length = max(LENGTHS)
    width = length + settings["new_tokens"]
    spans = [
        {"question": [(length - n, length - n // 2)], "rest": [(length - n // 2, length)], "answer": [(length, width)]}
        for n in LENGTHS
    ]
    regions = Regions.from_spans(spans, width)
    return fs.decode(model, PROMPTS, samples=NAMES, watch=fs.Watch("full", **given), regions=regions, **settings)


@pytest.fixture(scope="module")
def watched(opened):
    model, settings = opened
    return watch(model, settings, verify=True), watch(without_cache(model), settings)


def close(ours, theirs, name):
    np.testing.assert_allclose(ours, theirs, atol=3e-4, rtol=3e-3, err_msg=name)


def test_captured_rows_equal_those_without_a_cache(opened, watched):
    shift = int(opened[0].spec.shift)
    for ours, theirs in zip(watched[0].traces, watched[1].traces, strict=True):
        assert (ours.meta["rows"], theirs.meta["rows"]) == (RowSource.BLOCK, RowSource.ALL)
        a, b = ours.arrays, theirs.arrays
        same = ("tokens", "states", "keys", "block", "tokens_after", "region_member", "commit_step", "commit_position")
        for name in (*same, "commit_row", "commit_token", "layers", "layer_visibility"):
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert a["queries"].tolist() == [min(n, SIZE + shift) for n in a["keys"].tolist()]
        assert b["queries"].tolist() == b["keys"].tolist()
        assert ours.masks == theirs.masks
        # 1. Predicting rows, and groups whose rows are all in the block.
        for name in ("rows", "row_mass", "row_regions", "rollout"):
            close(a[name], b[name], name)
        for group in ("masked", "predicting"):
            g = ours.coords["group"].index(group)
            for name in ("received", "contribution", "uniform", "visible_rows"):
                close(a[name][:, :, g], b[name][:, :, g], name)
            close(a["received_heads"][:, :, :, g], b["received_heads"][:, :, :, g], group)
        # 2. The rows of the block.
        for t, (keys, rows) in enumerate(zip(a["keys"].tolist(), a["queries"].tolist(), strict=True)):
            block = b["matrix"][t, :, :, keys - rows : keys, :keys]
            close(a["matrix"][t, :, :, :rows, :keys], block, "matrix")
            close(a["received"][t, :, 0, :keys], block.mean((1, 2)), "received")
            close(a["residual"][t, :, keys - rows : keys], b["residual"][t, :, keys - rows : keys], "residual")
            assert np.isnan(a["residual"][t, :, : keys - rows]).all()


def test_a_traced_batch_equals_single_traces(opened, watched):
    model, settings = opened
    for name, own, batched in zip(NAMES, PROMPTS, watched[0].traces, strict=True):
        single = fs.decode(model, own, samples=[name], watch=fs.Watch("full"), **settings).trace
        for field, array in single.arrays.items():
            if field in ("top_key", "row_key", "regions", "rollout", "row_regions", "region_member"):
                continue  # equal values may change places; the single prompt has no regions
            if array.dtype.kind == "f":
                close(batched.arrays[field], array, field)
            else:
                np.testing.assert_array_equal(batched.arrays[field], array, err_msg=field)


def test_the_lift_of_a_decoding_is_at_the_columns_of_its_canvas(opened):
    model, settings = opened
    out = fs.decode(model, PROMPTS, samples=NAMES, watch=fs.Watch(), **settings)
    for t, step in enumerate(out):
        for b in np.flatnonzero(step.before.active.tolist()).tolist():
            single = out._recorder.build_traces()[b].received(1, scale="lift")
            lift = out.lift(1)[b][step.before.valid[b]]
            own = single[min(t, len(single) - 1)][: len(lift)]
            is_measured = torch.isfinite(lift).numpy()
            close(lift.numpy()[is_measured], own[is_measured], "lift")
        assert out.lift(1).shape == step.before.tokens.shape
        if t == 6:
            break


def test_influence_is_that_of_a_decoding_without_a_cache(opened):
    model, settings = opened
    settings = settings | {"watch": fs.Watch(fields=("received",), influence=True), "new_tokens": 9}
    ours, theirs = (fs.decode(m, PROMPTS[1:4], **settings).traces for m in (model, without_cache(model)))
    for a, b in zip(ours, theirs, strict=True):
        close(a.arrays["influence"], b.arrays["influence"], "influence")


# --- analyses --------------------------------------------------------------------------------------------------------


def test_flow_is_that_of_the_rows_of_the_block(watched):
    trace = watched[0].traces[4]
    member, keys, queries = (trace.arrays[name] for name in ("region_member", "keys", "queries"))
    names, sums = list(trace.coords["region"]), {}
    for t, (n, rows) in enumerate(zip(keys.tolist(), queries.tolist(), strict=True)):
        row = np.arange(n - rows, n)
        matrix = trace.arrays["matrix"][t, :, :, :rows, :n].mean(1)
        visible = np.array([np.arange(n) < min(n, (i // SIZE + 1) * SIZE) for i in row])
        uniform = visible / visible.sum(1, keepdims=True)
        for i, a in enumerate(names):
            own = member[row, i]
            for j, b in enumerate(names):
                if own.any():
                    mass = matrix[:, own][:, :, member[:n, j]].sum(-1).mean(-1)
                    sums.setdefault((a, b), []).append((mass, uniform[own][:, member[:n, j]].sum(-1).mean()))
    table = analysis.flow(trace, commits="all").set_index(["region", "key_region", "layer"]).sort_index()
    for (a, b), values in sums.items():
        mass, base = (np.mean([value[i] for value in values], 0) for i in (0, 1))
        np.testing.assert_allclose(table.loc[(a, b)]["mass"], mass, atol=2e-3)
        np.testing.assert_allclose(table.loc[(a, b)]["base"], base, atol=1e-6)
    absent = [name for name in names if (name, name) not in sums]
    assert table.loc[absent]["mass"].isna().all()


def partitioned(model, settings):
    """A prompt of 16 tokens whose last block is filled up: each position is in one region."""
    spans = [{"first": [(0, 11)], "second": [(11, 16)], "answer": [(16, 32)]}]
    given = settings | {"new_tokens": 16, "regions": Regions.from_spans(spans, 32)}
    return fs.decode(model, prompt(16), watch=fs.Watch(), **given).trace


def test_the_token_rollout_is_complete_and_the_pooled_one_is_not_measured(opened):
    model, settings = opened
    ours, theirs = partitioned(model, settings), partitioned(without_cache(model), settings)
    for compute in (analysis.rollout, analysis.rollout_distance, analysis.region_importance):
        a, b = compute(ours, commits="all"), compute(theirs, commits="all")
        for column in b.columns:
            if column.startswith("pooled"):
                assert a[column].isna().all()
            elif column.startswith("token"):
                np.testing.assert_allclose(a[column], b[column], atol=1e-4, err_msg=column)


def test_analyses_read_the_rows_of_the_block(watched, tmp_path):
    trace = watched[0].traces[5]
    for compute in (
        analysis.head_activity,
        analysis.masked_rows,
        analysis.head_floating,
        analysis.drift,
        analysis.lifetimes,
        analysis.sinks,
    ):
        assert len(compute(trace, commits="all"))
    assert np.isfinite(analysis.head_floating(trace, commits="all")["changes"]).any()
    assert trace.count_rows("masked").tolist() == (trace.arrays["states"] == State.MASKED).sum(1).tolist()
    np.testing.assert_array_equal(trace.received(view="row"), trace.received(view="prefix"))
    assert build_payload(trace, "m")["rows"] == "block"
    assert "of the current block" in trace.plot(path=tmp_path / "map.png").axes[0].get_title()


# --- where no cache is used ------------------------------------------------------------------------------------------


def test_edits_switch_the_cache_off(opened):
    model, settings = opened
    given = settings | {"edits": "mask_anchors(k=2)", "new_tokens": 9, "watch": fs.Watch()}
    ours, theirs = (fs.decode(m, PROMPTS[3], **given) for m in (model, without_cache(model)))
    assert ours.trace.meta["rows"] == RowSource.ALL
    assert_same_steps(ours, theirs)


def test_a_module_that_ignores_its_cache_is_not_cached(opened):
    model, settings = opened

    class Ignoring(type(model.module)):
        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids)

    from floatscope.models.capabilities import detect_capabilities

    original = type(model.module)
    model.module.__class__ = Ignoring
    try:
        trusting = fs.Model(model.module, model.spec, model.tokenizer)
        assert not detect_capabilities(trusting).spec.supports_cache
        with pytest.raises(fs.UserError, match="ignores its key-value cache; give its ModelSpec supports_cache=False"):
            _ = fs.decode(trusting, PROMPTS[5], **settings).tokens
    finally:
        model.module.__class__ = original


def test_the_lens_reads_every_position(tmp_path):
    model = fs.load(fs.write_random(tmp_path / "m", "sdar", seed=3, **SIZES), device="cpu", block_size=SIZE)
    ours, theirs = (fs.lens(m, PROMPTS[3:5], new_tokens=5, chat=False) for m in (model, without_cache(model)))
    assert len(ours)
    assert ours.equals(theirs)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    model = fs.load(fs.write_random(tmp_path / "m", "sdar", seed=3, **SIZES), device="cpu", block_size=SIZE)
    given = {"new_tokens": 5, "chat": False, "batch_size": 2}
    prompts = ["What floats?", "Where does Mira live in summer?", "Who sings?"]
    fs.trace(model, prompts, out=tmp_path / "unbroken", **given)
    part = fs.trace(model, prompts, out=tmp_path / "resumed", **given)
    removed = sorted((tmp_path / "resumed" / "samples").iterdir())[1]
    unbroken = tmp_path / "unbroken" / "samples" / removed.name
    removed.unlink()
    fs.trace(model, prompts, out=tmp_path / "resumed", **given)
    assert removed.read_bytes() == unbroken.read_bytes()
    assert next(iter(part)).meta["rows"] == RowSource.BLOCK


@pytest.mark.parametrize("architecture", ["sdar", "fast-dllm-v2"])
def test_the_forecast_counts_the_rows_of_a_block(tmp_path, architecture):
    model = fs.load(fs.write_random(tmp_path / "m", architecture, seed=3, **SIZES), device="cpu", block_size=SIZE)
    given = {"new_tokens": 5, "chat": False, "watch": fs.Watch("full"), "sampler": "confidence"}
    job = plan_trace(model, ["What floats in the sea?"], out=tmp_path / "run", **given)
    (trace,) = fs.trace(model, ["What floats in the sea?"], out=tmp_path / "run", **given)
    assert job.forecast.bytes["matrix"] == trace.arrays["matrix"].nbytes
    assert trace.arrays["matrix"].shape[3] == SIZE + model.spec.shift


# --- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_columns_move_as_in_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 7, 2, generator=generator)
    offset, width = torch.randint(-6, 7, (3,), generator=generator), 9
    expected = torch.full((3, width, 2), -1.0)
    for b in range(3):
        for j in range(width):
            if 0 <= j - offset[b] < 7:
                expected[b, j] = x[b, j - offset[b]]
    assert torch.equal(move_columns(x, offset, width, -1.0), expected)


def test_aligned_canvases_end_at_the_last_column():
    states = torch.tensor([[0, 1, 1, 2, 0], [1, 1, 3, 2, 2]])
    canvas = CanvasState(torch.arange(10).view(2, 5), states, block=torch.tensor([[2, 4], [-1, -1]]))
    alignment = EndAlignment.from_canvas(canvas)
    aligned = alignment.move_canvas(canvas)
    assert aligned.states.tolist() == [[0, 0, 1, 1, 2], [1, 1, 3, 2, 2]]
    assert aligned.tokens[0, 2:].tolist() == [1, 2, 3]
    assert aligned.block.tolist() == [[3, 5], [-1, -1]]
    assert alignment.move_back(aligned.states, 5, 0).tolist() == states.tolist()
