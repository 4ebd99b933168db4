"""Edits at work in a decoding: nothing else is touched, batches are their samples, what is hidden is gone."""

from __future__ import annotations

import gc
import json
import warnings

import pytest
import torch
from restated import BOS, KINDS, MASK, NAMES, PROMPTS, decoded, model_of

import floatscope as fs
from floatscope.interventions.edits import Edit, Keys
from floatscope.interventions.recipes import parse_edits
from floatscope.sampling import SAMPLERS

INF = float("inf")
EVERYTHING = ["mask_anchors(k=2)", "pin(k=2)", "virtual_sink(score=1)", "scale_values(k=1, factor=0.5)",
              "zero_heads(pairs=[(1, 2)])"]  # fmt: skip
DRAWN = [
    Edit("bias", keys=Keys("random", 2, seed=4), amount=-INF),
    Edit("scale", keys=Keys("middle", 1), what="key", amount=2.0),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edits", [(), ["mask_anchors(k=2, steps=[9])", "zero_heads(pairs=[(0, 0)], steps=[9])"]])
def test_edits_that_do_not_act_change_not_a_bit(kind, edits):
    model = model_of(kind)
    with warnings.catch_warnings(action="ignore"):
        out, matrices = decoded(model, edits)
    plain, same = decoded(model, ())
    for a, b in zip(out.steps, plain.steps, strict=True):
        assert torch.equal(a.after.tokens, b.after.tokens)
        assert torch.equal(a.commits.confidence, b.commits.confidence)
    assert all(
        torch.equal(a, b)
        for ours, theirs in zip(matrices, same, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kind", ["unshifted", "arm"])
def test_what_is_limited_touches_nothing_else(kind):
    model = model_of(kind)
    _, plain = decoded(model, ())
    _, later = decoded(model, "mask_anchors(k=2, steps=[1], layers=[1], heads=[0])")
    assert all(torch.equal(a, b) for a, b in zip(later[0], plain[0], strict=True))
    assert torch.equal(later[1][0], plain[1][0])
    torch.testing.assert_close(later[1][1][:, 1:], plain[1][1][:, 1:], atol=1e-6, rtol=0)  # another kernel call
    assert not torch.equal(later[1][1][:, 0], plain[1][1][:, 0])


@pytest.mark.filterwarnings("ignore:.*picked nothing")
@pytest.mark.parametrize("kind", ["shifted", "arm"])
@pytest.mark.parametrize("edits", [EVERYTHING, ["replace_token(k=2, token=5)", "evict(keep=0.5)"], DRAWN])
def test_a_batch_is_its_samples_one_by_one(kind, edits):
    model = model_of(kind)
    together, matrices = decoded(model, edits)
    for b, (name, prompt) in enumerate(zip(NAMES, PROMPTS, strict=True)):
        alone, own = decoded(model, edits, prompts=[prompt], samples=[name])
        assert alone.generated[0] == together.generated[b]
        for ours, theirs in zip(own, matrices, strict=False):
            for A, B in zip(ours, theirs, strict=True):
                torch.testing.assert_close(A[0], B[b, :, -A.shape[2] :, -A.shape[3] :], atol=1e-5, rtol=0)


def test_what_is_hidden_gets_exactly_nothing_but_from_its_own_row():
    out, matrices = decoded(model_of("unshifted"), "mask_anchors(k=3)", watch=fs.Watch("full", verify=True))
    for step, layers in zip(out.steps, matrices, strict=True):
        for A in layers:
            for b in range(len(A)):
                inside = step.before.valid[b].nonzero()[:, 0]
                part = A[b][:, inside][..., inside]
                own = torch.eye(len(inside), dtype=torch.bool)
                gone = ((part == 0) | own).all(1)
                assert gone.sum(-1).tolist() == [3] * 4
                assert (part.diagonal(dim1=1, dim2=2) > 0).all()
    received = out.traces[0].arrays["received_heads"]
    assert received.shape[2] == 4


def test_pinned_mass_is_where_the_first_step_had_it():
    _, matrices = decoded(model_of("unshifted"), "pin(k=1)", prompts=[PROMPTS[0]], samples=["a"])
    _, plain = decoded(model_of("unshifted"), (), prompts=[PROMPTS[0]], samples=["a"])
    for layer in range(2):
        anchor = plain[0][layer][0].sum(1).argmax(-1) if layer == 0 else matrices[0][1][0].sum(1).argmax(-1)
        for now in matrices:
            got = now[layer][0].sum(1)  # [head, key]
            for h in range(4):
                assert got[h, anchor[h]] >= got[h].max() - 1e-5


@pytest.mark.filterwarnings("ignore:.*picked nothing")
@pytest.mark.parametrize("kind", ["unshifted", "arm"])
def test_knocked_out_mass_is_exactly_nothing(kind):
    width = 18 + 4
    spans = [
        {"gold": [(width - 4 - len(p) + 1, width - 4 - len(p) + 3)], "query": [(width - 5, width)]} for p in PROMPTS
    ]
    regions = fs.Regions.from_spans(spans, width)
    for queries in ("all", "query", "prompt"):
        out, matrices = decoded(model_of(kind), f"knock_out(queries='{queries}', keys='gold')", regions=regions)
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
                knocked = (rows[:, start:, None] & gold[:, None] & ~own)[:, None].expand_as(A)
                assert (A[knocked] == 0).all()
                seen = step.before.valid[:, start:, None] & ~rows[:, start:, None] & gold[:, None]
                assert queries == "all" or not seen.any() or (A[seen[:, None].expand_as(A)] > 0).any()


def test_what_is_kept_for_a_forward_is_not_taken_for_another():
    """A look before the first step and the step itself see other padding, in tensors that may get the same id."""
    model, edits = model_of("unshifted"), ["drop_bos()", "replace_token(k=1, token=5)", "mask_anchors(k=1)"]
    prompts = [[BOS, 1, 2, 3, 4], [BOS, 5, 6]]
    runs = []
    for _ in range(2):
        gc.collect()
        runs.append(decoded(model, edits, prompts=prompts, samples=["a", "b"])[0].tokens)
    assert all(torch.equal(run, runs[0]) for run in runs)


# --- what picks nothing ----------------------------------------------------------------------------------------------


def warned(model, edits, **given) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decoded(model, edits, **given)
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_an_edit_that_picks_nothing_says_so_once():
    model = model_of("unshifted")
    assert warned(model, "mask_anchors(k=2)") == []
    assert warned(model, "drop_bos()", prompts=[[1, 2], [3]], samples=["a", "b"]) == [
        "drop_bos() picked nothing 3 of 3 times"
    ]
    assert warned(model, "knock_out(queries='committed', keys='prompt')") == [
        "knock_out(queries='committed', keys='prompt') picked nothing 1 of 3 times"  # nothing is committed at first
    ]
    empty = fs.Regions.from_spans([{"gold": []}] * 3, 22)
    assert warned(model, "knock_out(keys='gold', layers=[1])", regions=empty) == [
        "knock_out(keys='gold', layers=[1]) picked nothing 3 of 3 times"
    ]


def test_an_edit_whose_steps_never_come_says_so():
    model = model_of("unshifted")
    assert warned(model, ["virtual_sink(steps=[3, 7])", "mask_anchors(k=1, steps=[2])"]) == [
        "virtual_sink(steps=[3, 7]) was never at work: there were 3 steps"
    ]
    assert warned(model, "freeze(step=2)") == ["freeze(step=2) was never at work: there were 3 steps"]
    assert warned(model, "freeze(step=1)") == []


# --- however it is decoded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_decodes_under_edits(sampler, tmp_path):
    if sampler == "pc":
        path = tmp_path / "background.json"
        path.write_text(json.dumps({str(token): 1 for token in range(50)}))
        sampler = f"pc(background='{path}')"
    out, _ = decoded(model_of("shifted"), ["mask_anchors(k=1)", "spread(k=1)"], sampler=sampler, new_tokens=3, block=3)
    assert len(out.steps) >= 1
    assert out.meta["edits"] == ["mask_anchors(k=1)", "spread(k=1)"]


def test_edits_need_no_watch():
    for kind, steps in (("shifted", 3), ("arm", None)):
        watched, _ = decoded(model_of(kind), EVERYTHING)
        how = {"new_tokens": 4, "stop": False, "steps": steps}
        plain = fs.decode(model_of(kind), PROMPTS, samples=NAMES, edits=EVERYTHING, **how)
        assert torch.equal(plain.tokens, watched.tokens)
        with pytest.raises(fs.UserError, match="nothing was watched"):
            _ = plain.traces


def test_the_reference_backend_knows_virtual_sinks():
    watch = fs.Watch(fields=("received", "matrix"), backend="dense")
    dense, _ = decoded(model_of("arm"), "virtual_sink(score=3)", watch=watch)
    blocked, _ = decoded(model_of("arm"), "virtual_sink(score=3)")
    assert torch.equal(dense.tokens, blocked.tokens)


def test_edits_written_with_lists_are_those_with_tuples():
    written = {"steps": [0, 1], "layers": [1], "heads": [0]}
    edit = Edit("bias", keys=Keys("first"), amount=-INF)
    for name, several in written.items():  # as outside of tests, where types are not checked
        object.__setattr__(edit, name, several)
    edit.__post_init__()
    assert edit == Edit("bias", (0, 1), (1,), (0,), keys=Keys("first"), amount=-INF)
    assert hash(edit)


def test_a_token_is_replaced_at_the_keys_its_rule_names():
    """The anchors of one layer or of some rows, and as many others; not only the plain anchors."""
    for keys in (Keys("anchors", 2, layer=1), Keys("anchors", 2, rows="masked"), Keys("anchors", 2, "first"),
                 Keys("random", like=Keys("anchors", 2, rows="masked"))):  # fmt: skip
        seen = []
        model = model_of("unshifted")
        hook = model.module.register_forward_pre_hook
        with hook(lambda _, args, kw, to=seen: to.append(kw["input_ids"]), with_kwargs=True):
            out, _ = decoded(model, Edit("replace", keys=keys, token=33))
        for step, ids in zip(out.steps, seen[1:], strict=True):
            assert (ids != step.before.tokens).sum(-1).tolist() == [2, 2, 2], keys


def test_a_replaced_mask_is_no_mask_to_fill():
    out, _ = decoded(model_of("unshifted"), "replace_token(k=2, token='mask')")
    assert all(step.commits.position.min() >= out.answer_start for step in out.steps if len(step.commits))
    assert (out.tokens[:, : out.answer_start] != MASK).all()


def test_recipes_are_edits():
    assert parse_edits(["pin(k=2)", Edit("drop")])[0].to == Keys("anchors", 2, "first")
