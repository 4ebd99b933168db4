"""Edits during a decoding: they change nothing else, batches equal single samples, hidden keys receive nothing."""

from __future__ import annotations

import gc
import json
import warnings

import pytest
import torch
from reference import BOS, KINDS, MASK, NAMES, PROMPTS, build_model, run_decode

import floatscope as fs
from floatscope.interventions.edits import (
    Anchors,
    Bias,
    DropBos,
    FirstKey,
    MiddleKeys,
    RandomKeys,
    RandomSameCount,
    ReplaceToken,
    ScaleKeys,
)
from floatscope.interventions.recipes import parse_edits
from floatscope.sampling import SAMPLERS

INF = float("inf")
EVERYTHING = ["mask_anchors(k=2)", "pin(k=2)", "virtual_sink(score=1)", "scale_values(k=1, factor=0.5)",
              "zero_heads(pairs=[(1, 2)])"]  # fmt: skip
DRAWN = [
    Bias(RandomKeys(2, seed=4), -INF),
    ScaleKeys(MiddleKeys(1), 2.0),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edits", [(), ["mask_anchors(k=2, steps=[9])", "zero_heads(pairs=[(0, 0)], steps=[9])"]])
def test_inactive_edits_change_nothing(kind, edits):
    model = build_model(kind)
    with warnings.catch_warnings(action="ignore"):
        out, matrices = run_decode(model, edits)
    plain, same = run_decode(model, ())
    for a, b in zip(out.steps, plain.steps, strict=True):
        assert torch.equal(a.after.tokens, b.after.tokens)
        assert torch.equal(a.commits.confidence, b.commits.confidence)
    assert all(
        torch.equal(a, b)
        for ours, theirs in zip(matrices, same, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kind", ["unshifted", "arm"])
def test_a_limited_edit_changes_nothing_else(kind):
    model = build_model(kind)
    _, plain = run_decode(model, ())
    _, later = run_decode(model, "mask_anchors(k=2, steps=[1], layers=[1], heads=[0])")
    assert all(torch.equal(a, b) for a, b in zip(later[0], plain[0], strict=True))
    assert torch.equal(later[1][0], plain[1][0])
    torch.testing.assert_close(later[1][1][:, 1:], plain[1][1][:, 1:], atol=1e-6, rtol=0)  # another kernel call
    assert not torch.equal(later[1][1][:, 0], plain[1][1][:, 0])


@pytest.mark.filterwarnings("ignore:.*selected no keys")
@pytest.mark.parametrize("kind", ["shifted", "arm"])
@pytest.mark.parametrize("edits", [EVERYTHING, ["replace_token(k=2, token=5)", "evict(keep=0.5)"], DRAWN])
def test_a_batch_equals_its_samples_alone(kind, edits):
    model = build_model(kind)
    batched, matrices = run_decode(model, edits)
    for b, (name, prompt) in enumerate(zip(NAMES, PROMPTS, strict=True)):
        alone, own = run_decode(model, edits, prompts=[prompt], samples=[name])
        assert alone.generated_ids[0] == batched.generated_ids[b]
        for ours, theirs in zip(own, matrices, strict=False):
            for A, B in zip(ours, theirs, strict=True):
                torch.testing.assert_close(A[0], B[b, :, -A.shape[2] :, -A.shape[3] :], atol=1e-5, rtol=0)


def test_hidden_keys_receive_nothing_except_from_their_own_row():
    out, matrices = run_decode(build_model("unshifted"), "mask_anchors(k=3)", watch=fs.Watch("full", verify=True))
    for step, layers in zip(out.steps, matrices, strict=True):
        for A in layers:
            for b in range(len(A)):
                inside = step.before.valid[b].nonzero()[:, 0]
                part = A[b][:, inside][..., inside]
                own = torch.eye(len(inside), dtype=torch.bool)
                hidden = ((part == 0) | own).all(1)
                assert hidden.sum(-1).tolist() == [3] * 4
                assert (part.diagonal(dim1=1, dim2=2) > 0).all()
    received = out.traces[0].arrays["received_heads"]
    assert received.shape[2] == 4


def test_pinned_mass_stays_at_the_anchor_of_the_first_step():
    _, matrices = run_decode(build_model("unshifted"), "pin(k=1)", prompts=[PROMPTS[0]], samples=["a"])
    _, plain = run_decode(build_model("unshifted"), (), prompts=[PROMPTS[0]], samples=["a"])
    for layer in range(2):
        anchor = plain[0][layer][0].sum(1).argmax(-1) if layer == 0 else matrices[0][1][0].sum(1).argmax(-1)
        for now in matrices:
            got = now[layer][0].sum(1)  # [head, key]
            for h in range(4):
                assert got[h, anchor[h]] >= got[h].max() - 1e-5


@pytest.mark.filterwarnings("ignore:.*selected no keys")
@pytest.mark.parametrize("kind", ["unshifted", "arm"])
def test_knocked_out_keys_receive_nothing(kind):
    width = 18 + 4
    spans = [
        {"gold": [(width - 4 - len(p) + 1, width - 4 - len(p) + 3)], "query": [(width - 5, width)]} for p in PROMPTS
    ]
    regions = fs.Regions.from_spans(spans, width)
    for queries in ("all", "query", "prompt"):
        out, matrices = run_decode(build_model(kind), f"knock_out(queries='{queries}', keys='gold')", regions=regions)
        for step, layers in zip(out.steps, matrices, strict=True):
            rows = {
                "all": step.before.valid,
                "query": step.before.regions.member[..., 1],
                "prompt": step.before.states == 1,
            }[queries]
            gold = step.before.regions.member[..., 0]
            for A in layers:
                start = A.shape[3] - A.shape[2]
                own = torch.eye(A.shape[3], dtype=torch.bool)[start:]
                removed = (rows[:, start:, None] & gold[:, None] & ~own)[:, None].expand_as(A)
                assert (A[removed] == 0).all()
                remaining = step.before.valid[:, start:, None] & ~rows[:, start:, None] & gold[:, None]
                assert queries == "all" or not remaining.any() or (A[remaining[:, None].expand_as(A)] > 0).any()


def test_cached_baselines_are_not_reused_for_another_forward():
    """The preview and the first step have different padding, in tensors that may get the same id."""
    model, edits = build_model("unshifted"), ["drop_bos()", "replace_token(k=1, token=5)", "mask_anchors(k=1)"]
    prompts = [[BOS, 1, 2, 3, 4], [BOS, 5, 6]]
    runs = []
    for _ in range(2):
        gc.collect()
        runs.append(run_decode(model, edits, prompts=prompts, samples=["a", "b"])[0].tokens)
    assert all(torch.equal(run, runs[0]) for run in runs)


# ---- edits that select no keys


def collect_warnings(model, edits, **given) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_decode(model, edits, **given)
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_an_edit_that_selects_nothing_warns_once():
    model = build_model("unshifted")
    assert collect_warnings(model, "mask_anchors(k=2)") == []
    assert collect_warnings(model, "drop_bos()", prompts=[[1, 2], [3]], samples=["a", "b"]) == [
        "drop_bos() selected no keys in 3 of 3 steps"
    ]
    # nothing is committed before the first step
    assert collect_warnings(model, "knock_out(queries='committed', keys='prompt')") == [
        "knock_out(queries='committed', keys='prompt') selected no keys in 1 of 3 steps"
    ]
    empty = fs.Regions.from_spans([{"gold": []}] * 3, 22)
    assert collect_warnings(model, "knock_out(keys='gold', layers=[1])", regions=empty) == [
        "knock_out(keys='gold', layers=[1]) selected no keys in 3 of 3 steps"
    ]


def test_an_edit_whose_steps_are_never_reached_warns():
    model = build_model("unshifted")
    assert collect_warnings(model, ["virtual_sink(steps=[3, 7])", "mask_anchors(k=1, steps=[2])"]) == [
        "virtual_sink(steps=[3, 7]) was never active: there were only 3 steps"
    ]
    assert collect_warnings(model, "freeze(step=2)") == ["freeze(step=2) was never active: there were only 3 steps"]
    assert collect_warnings(model, "freeze(step=1)") == []


# ---- settings of decoding


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_decodes_under_edits(sampler, tmp_path):
    if sampler == "pc":
        path = tmp_path / "background.json"
        path.write_text(json.dumps({str(token): 1 for token in range(50)}))
        sampler = f"pc(background='{path}')"
    out, _ = run_decode(
        build_model("shifted"), ["mask_anchors(k=1)", "spread(k=1)"], sampler=sampler, new_tokens=3, block=3
    )
    assert len(out.steps) >= 1
    assert out.meta["edits"] == ["mask_anchors(k=1)", "spread(k=1)"]


def test_edits_work_without_watch():
    for kind, steps in (("shifted", 3), ("arm", None)):
        watched, _ = run_decode(build_model(kind), EVERYTHING)
        settings = {"new_tokens": 4, "stop": False, "steps": steps}
        plain = fs.decode(build_model(kind), PROMPTS, samples=NAMES, edits=EVERYTHING, **settings)
        assert torch.equal(plain.tokens, watched.tokens)
        with pytest.raises(fs.UserError, match="nothing was watched"):
            _ = plain.traces


def test_the_dense_backend_supports_virtual_sinks():
    watch = fs.Watch(fields=("received", "matrix"), backend="dense")
    dense, _ = run_decode(build_model("arm"), "virtual_sink(score=3)", watch=watch)
    blocked, _ = run_decode(build_model("arm"), "virtual_sink(score=3)")
    assert torch.equal(dense.tokens, blocked.tokens)


def test_lists_and_tuples_give_equal_edits():
    written = {"steps": [0, 1], "layers": [1], "heads": [0]}
    edit = Bias(FirstKey(), -INF)
    for name, values in written.items():  # as outside of tests, where types are not checked
        object.__setattr__(edit, name, values)
    edit.__post_init__()
    assert edit == Bias(FirstKey(), -INF, steps=(0, 1), layers=(1,), heads=(0,))
    assert hash(edit)


def test_tokens_are_replaced_at_the_keys_of_the_rule():
    """Also for anchors of one layer, of masked rows, of the first step, and for random keys."""
    for keys in (Anchors(2, layer=1), Anchors(2, rows="masked"), Anchors(2, "first"),
                 RandomSameCount(Anchors(2, rows="masked"))):  # fmt: skip
        inputs = []
        model = build_model("unshifted")
        hook = model.module.register_forward_pre_hook
        with hook(lambda _, args, kw, to=inputs: to.append(kw["input_ids"]), with_kwargs=True):
            out, _ = run_decode(model, ReplaceToken(keys, 33))
        for step, ids in zip(out.steps, inputs[1:], strict=True):
            assert (ids != step.before.tokens).sum(-1).tolist() == [2, 2, 2], keys


def test_a_replacement_by_the_mask_token_is_not_filled():
    out, _ = run_decode(build_model("unshifted"), "replace_token(k=2, token='mask')")
    assert all(step.commits.position.min() >= out.answer_start for step in out.steps if len(step.commits))
    assert (out.tokens[:, : out.answer_start] != MASK).all()


def test_recipes_become_edits():
    (pinned, _) = parse_edits(["pin(k=2)", DropBos()])
    assert pinned.keys == Anchors(2, "now", only="all but evidence")
    assert pinned.to == Anchors(2, "first", only="all but evidence")
