"""Block-causal checkpoints decoded: cropped == one forward of the whole text, padded == single, traces == dense."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import floatscope as fs
from floatscope import analysis
from floatscope.canvas import CanvasState
from floatscope.cli.view import CanvasView
from floatscope.reports.explorer import build_payload
from floatscope.schema import State
from floatscope.traces.trace_file import read_trace, write_trace

FAMILIES = {  # an architecture → its preset, and settings that make it take several steps with random weights
    "llada2": ("llada2", {"sampler": "dynamic(tau=0.02)"}),
    "sdar": ("sdar", {"sampler": "dynamic(tau=0.02)"}),
    "sdar-moe": ("llada2.1", {"sampler": "dynamic(tau=0.02, editing=0.01)"}),
    "fast-dllm-v2": ("fast-dllm-v2", {"block": 4}),
    "a2d": ("llada2", {}),
}
SIZE = 8
PROMPTS = [[5], [5, 6, 7, 8, 9, 10, 11], list(range(20, 28)), list(range(30, 43))]


@pytest.fixture(scope="module", params=FAMILIES)
def decoded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 128}
    model = fs.load(fs.write_random(folder, request.param, seed=3, **sizes), device="cpu", block_size=SIZE)
    preset, settings = FAMILIES[request.param]
    return model, {"preset": preset, "new_tokens": 11, "stop": False, "chat": False, **settings}


def test_a_batch_equals_its_prompts_alone(decoded):
    model, settings = decoded
    together = fs.decode(model, PROMPTS, samples=["a", "b", "c", "d"], **settings)
    for b, (name, prompt) in enumerate(zip("abcd", PROMPTS, strict=True)):
        alone = fs.decode(model, prompt, samples=[name], **settings)
        assert together.generated_ids[b] == alone.generated_ids[0]
        valid = together.steps[-1].after.valid[b]
        assert together.tokens[b][valid].tolist() == alone.tokens[0].tolist()
        assert alone.tokens.shape[1] == -(-(len(prompt) + 11) // SIZE) * SIZE


def test_each_step_equals_a_forward_of_the_whole_canvas(decoded):
    """The canvas with all later blocks gives the same probabilities: they are invisible."""
    model, settings = decoded
    out = fs.decode(model, PROMPTS[1], **settings | {"temperature": 0.0})
    total = out.tokens.shape[1]
    for step in out:
        width = step.before.tokens.shape[1]
        rest = torch.full((1, total - width), model.spec.mask_id)
        tokens = torch.cat([step.before.tokens, rest], 1)
        with torch.no_grad():
            logits = model.forward(CanvasState(tokens, torch.full_like(tokens, int(State.PROMPT))))
        p = logits[0, step.commits.row].double().softmax(-1)
        expected, token = p.max(-1)
        assert token.tolist() == step.commits.token.tolist()
        torch.testing.assert_close(step.commits.confidence.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_trace_follows_the_visibility_of_blocks(decoded, has_cache):
    """Received and uniform attention against a dense float64 softmax under the rule, pair by pair."""
    model, settings = decoded
    model = replace(model, spec=replace(model.spec, supports_cache=has_cache))
    out = fs.decode(model, PROMPTS[3], watch=fs.Watch("full"), **settings)
    trace = out.trace
    assert [(mask.kind, mask.size) for mask in trace.masks] == [("block", SIZE)]
    assert trace.arrays["keys"].tolist() == [step.before.tokens.shape[1] for step in out]
    for t, keys in enumerate(trace.arrays["keys"].tolist()):
        rows = min(keys, SIZE + model.spec.shift) if has_cache else keys
        visible = np.array([[j // SIZE <= i // SIZE for j in range(keys)] for i in range(keys - rows, keys)])
        uniform = (visible / visible.sum(1, keepdims=True)).mean(0)
        np.testing.assert_allclose(trace.arrays["uniform"][t, 0, 0, :keys], uniform, atol=1e-6)
        assert trace.arrays["visible_rows"][t, 0, 0, :keys].tolist() == visible.sum(0).tolist()
        enough = visible.sum(0) >= min(16, rows)
        assert (trace.arrays["eligible"][t, 0, 0, :keys] > 0).tolist() == enough.tolist()
        matrix = trace.arrays["matrix"][t][:, :, :rows, :keys].astype(np.float64)
        assert (matrix[..., ~visible] == 0).all()
        np.testing.assert_allclose(matrix.sum(-1), 1, atol=1e-5)
        np.testing.assert_allclose(trace.received()[t, :, :keys], matrix.mean((1, 2)), atol=1e-5)
        assert (trace.arrays["states"][t, keys:] == State.PAD).all()


def test_a_traced_batch_equals_single_traces(decoded):
    model, settings = decoded
    names = ["a", "b", "c", "d"]
    together = fs.decode(model, PROMPTS, samples=names, watch=fs.Watch(), **settings).traces
    for name, prompt, batched in zip(names, PROMPTS, together, strict=True):
        single = fs.decode(model, prompt, samples=[name], watch=fs.Watch(), **settings).trace
        for field, array in single.arrays.items():
            if array.dtype.kind == "f":
                np.testing.assert_allclose(batched.arrays[field], array, atol=2e-4, rtol=2e-3, err_msg=field)
            elif field not in ("top_key", "row_key"):  # equal values may change places
                np.testing.assert_array_equal(batched.arrays[field], array, err_msg=field)


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """A decoding that overwrites tokens, watched."""
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 128}
    folder = fs.write_random(tmp_path_factory.mktemp("models") / "m", "llada2", seed=3, **sizes)
    model = fs.load(folder, device="cpu", block_size=SIZE)
    settings = {"preset": "llada2.1", "sampler": "dynamic(tau=0.005, editing=0.001)", "new_tokens": 11, "stop": False}
    meta = {"pieces": {str(i): f" w{i}" for i in range(model.vocab_size)}, "special": {}, "special_ids": []}
    return fs.decode(model, PROMPTS[1], watch=fs.Watch(), meta=meta, **settings)


def test_a_trace_says_which_commits_are_edits(edited, tmp_path):
    trace, expected, last = edited.trace, [], {}
    for step in edited:
        before = step.before
        for position in step.commits.position.tolist():
            last[position] = len(expected)
            expected.append(bool(before.states[0, position] == State.COMMITTED))
            assert expected[-1] or bool(before.masked[0, position])
    assert trace.is_edit.tolist() == expected
    assert sum(expected) > 3
    assert np.flatnonzero(trace.is_last_commit).tolist() == sorted(last.values())
    assert set(trace.arrays) == set(fs.decode(fs.load("twin:mdm"), [5, 6], new_tokens=2, watch=fs.Watch()).trace.arrays)
    write_trace(tmp_path / "t.safetensors", trace)
    assert read_trace(tmp_path / "t.safetensors").is_edit.tolist() == expected


def test_order_counts_the_last_commit_of_a_position(edited):
    trace = edited.trace
    table = analysis.commits(trace, commits="all")
    assert table["position"].is_unique
    final = {}
    for step, position in zip(trace.arrays["commit_step"], trace.arrays["commit_position"], strict=True):
        final[int(position)] = int(step)
    assert sorted(zip(table["position"] + len(PROMPTS[1]), table["step"], strict=True)) == sorted(final.items())
    analysis.order(trace, commits="all")
    analysis.arness(trace, commits="all")
    analysis.trajectory(table)


def test_the_explorer_and_the_map_mark_edits(edited, tmp_path):
    trace = edited.trace
    payload = build_payload(trace, "m")
    assert payload["edits"] == np.flatnonzero(trace.is_edit).tolist()
    trace.plot(path=tmp_path / "map.png")
    plain = fs.decode(fs.load("twin:mdm"), [5, 6], new_tokens=2, watch=fs.Watch()).trace
    assert "edits" not in build_payload(plain, "m")
    assert not plain.is_edit.any()
    assert plain.is_last_commit.all()


def test_the_terminal_marks_edits(edited):
    view, records = CanvasView(edited, None), []
    for step in edited:
        view.count(step)
        records.append(view.record(step))
    marked = [bool(c.get("edit")) for record in records for c in record["commits"]]
    assert marked == edited.trace.is_edit.tolist()
    panel = view.render(edited.steps[-1])
    canvas, counters = panel.renderable.renderables
    assert f"{len(view.edited)} edited" in counters.plain
    assert f"block 3/3 · {edited.tokens.shape[1] - len(PROMPTS[1])} committed" in counters.plain
    assert sum("italic" in str(span.style) for span in canvas.spans) == len(view.edited)


def test_the_final_state_has_one_commit_of_each_position(edited):
    (trace,) = fs.final_state(edited)
    position = trace.arrays["commit_position"].tolist()
    assert sorted(position) == list(range(len(PROMPTS[1]), edited.tokens.shape[1]))
    assert trace.arrays["commit_token"].tolist() == edited.tokens[0][position].tolist()
    assert not trace.is_edit.any()


def test_the_likelihood_of_an_answer(edited):
    (value,) = fs.answer_nll(edited.model, [PROMPTS[1]], [[9, 8]], new_tokens=4)
    assert value > 0
