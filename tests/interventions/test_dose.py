"""Doses, controls of equal mass and types of anchors equal slow restatements; no keys, no change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from reference import NAMES, NEW, PROMPTS, build_model, run_decode
from test_key_selection import HEADS, build_context

import floatscope as fs
from floatscope.analysis.tokens import CLASSES, STRUCTURE, classify_tokens
from floatscope.canvas import Regions, build_canvas
from floatscope.capture.attention import AttentionCall
from floatscope.capture.edit_tensors import NO_KEY
from floatscope.capture.reduction_spec import ReductionSpec
from floatscope.capture.visibility import Visibility
from floatscope.interventions.edits import (
    Anchors,
    Bias,
    FirstKey,
    LeastKeys,
    Move,
    PositionKeys,
    RandomKeys,
    RandomSameCount,
    RandomSameMass,
)
from floatscope.interventions.key_rules import ANCHOR_TYPES
from floatscope.interventions.key_selection import match_mass, select_keys
from floatscope.interventions.recipes import build_control, parse_edits
from floatscope.interventions.structure import StructureFinder
from floatscope.interventions.unedited import UneditedCall
from floatscope.tasks.sample_files import read_samples
from pairs import every_pair

INF = float("inf")
WIDTH = max(map(len, PROMPTS)) + NEW

# ---- the attention before an edit


def build_call(seed: int, kind: str) -> tuple[AttentionCall, torch.Tensor, torch.Tensor]:
    """A call, its rows, and its dense attention in float64."""
    noise = torch.Generator().manual_seed(seed)
    B, H, K, D = 2, 4, 9 + seed, 8
    Q = 2 if kind == "cached" else K
    q, k = torch.randn(B, H, Q, D, generator=noise) * 2, torch.randn(B, 2, K, D, generator=noise)
    valid = torch.ones(B, K, dtype=torch.bool)
    valid[1, :3] = False
    visible = valid[:, None].expand(B, Q, K)
    if kind in ("causal", "cached"):
        visible = visible & (torch.arange(K) <= torch.arange(K - Q, K)[:, None])
    additive = torch.randn(1, 1, Q, K, generator=noise) if kind == "additive" else torch.zeros(1, 1, Q, K)
    see = {
        "full": lambda: Visibility.full(Q, K, valid),
        "causal": lambda: Visibility.causal(Q, K, valid),
        "cached": lambda: Visibility.causal(Q, K, valid),
        "additive": lambda: Visibility.from_mask(additive, Q, K, valid),
    }[kind]()
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.3 + additive
    A = torch.softmax(scores.masked_fill(~visible[:, None], -INF), -1).nan_to_num(0.0)
    rows = valid[:, K - Q :]
    return AttentionCall(q, k, k, see, 0.3), rows, A * rows[:, None, :, None]


@pytest.mark.parametrize("kind", ["full", "causal", "cached", "additive"])
@pytest.mark.parametrize("seed", range(4))
def test_attention_before_an_edit_equals_loops_over_the_dense_matrix(kind, seed):
    call, rows, A = build_call(seed, kind)
    B, H, Q, K = A.shape
    noise = torch.Generator().manual_seed(seed + 50)
    queries = torch.rand(B, Q, generator=noise) < 0.6
    source = torch.stack([torch.stack([torch.randperm(K, generator=noise) for _ in range(H)]) for _ in range(B)])
    source[:, :, 1] = NO_KEY
    target = torch.randint(-1, K, source.shape, generator=noise)
    target[0, 0, 0] = source[0, 0, 0]
    unedited = UneditedCall(call, ReductionSpec(rows[..., None].float(), is_binary=True))
    for given in (None, queries):
        received, hidden = torch.zeros(B, H, K).double(), torch.zeros(B, H, K).double()
        moved, spread = torch.zeros(B).double(), torch.zeros(B).double()
        for b in range(B):
            for i in range(Q):
                if given is not None and not given[b, i]:
                    continue
                for h in range(H):
                    for j in range(K):
                        received[b, h, j] += A[b, h, i, j]
                        hidden[b, h, j] += A[b, h, i, j] if j != K - Q + i else 0
                    for a, p in zip(source[b, h].tolist(), target[b, h].tolist(), strict=True):
                        if a == NO_KEY:
                            continue
                        spread[b] += A[b, h, i, a]
                        if p not in (a, NO_KEY) and A[b, h, i, p] > 0:
                            moved[b] += A[b, h, i, a]
        close = {"atol": 1e-5, "rtol": 1e-4, "check_dtype": False}
        torch.testing.assert_close(unedited.received(given), received, **close)
        torch.testing.assert_close(unedited.hidden(given), hidden, **close)
        torch.testing.assert_close(unedited.moved(source, target, given), moved, **close)
        torch.testing.assert_close(unedited.moved(source, None, given), spread, **close)


# ---- controls of equal mass


@pytest.mark.parametrize("seed", range(12))
def test_a_control_takes_the_beginning_of_a_random_order_with_the_nearest_mass(seed):
    lengths, k = [5 + seed, 30, 2], 1 + seed % 5
    context, ranking = build_context(lengths, seed)
    rule = Anchors(k)
    reference = select_keys(rule, ranking, context)
    reference[1, 0] = NO_KEY  # a head in which the edit selects nothing
    K = context.canvas.tokens.shape[1]
    mass = torch.rand(3, HEADS, K, generator=torch.Generator().manual_seed(seed)) ** 4
    excluded = torch.full((3, HEADS, 1), K - 1)
    control = RandomSameMass(rule, seed=seed)
    selected, is_short = match_mass(control, reference, mass, ranking, context, excluded)
    order = select_keys(RandomKeys(K, seed=seed), ranking, context)
    for b in range(3):
        for h in range(HEADS):
            chosen = [j for j in reference[b, h].tolist() if j != NO_KEY]
            others = [j for j in order[b, h].tolist() if j not in (NO_KEY, K - 1, *chosen)]
            goal = sum(float(mass[b, h, j]) for j in chosen)
            held = [sum(float(mass[b, h, j]) for j in others[:n]) for n in range(len(others) + 1)]
            best = min(range(len(held)), key=lambda n: abs(held[n] - goal)) if chosen else 0
            assert [j for j in selected[b, h].tolist() if j != NO_KEY] == others[:best]
            assert bool(is_short[b, h]) == (held[-1] < goal)


@pytest.mark.parametrize("kind", ["unshifted", "arm"])
@pytest.mark.parametrize(
    "recipe", ["mask_anchors(k=2, steps=[0], layers=[0])", "spread(k=2, steps=[0], layers=[0])",
               "scale_values(k=2, steps=[0], layers=[0])", "blank(region='evidence', steps=[0], layers=[0])"]
)  # fmt: skip
def test_a_control_of_equal_mass_has_the_dose_of_its_edit(kind, recipe):
    """In the first layer of the first step both have the same attention before the edit."""
    edits, model, prompt = parse_edits(recipe), build_model(kind), [list(range(1, 46)) * 2]
    spans = Regions.from_spans([{"evidence": [(20, 26)]}], len(prompt[0]) + NEW)
    given = {"prompts": prompt, "samples": ["a"], "regions": spans}
    (own,) = run_decode(model, edits, **given)[0].doses
    matched, counted = (
        [run_decode(model, build_control(edits, control, draw), **given)[0].doses[0] for draw in range(4)]
        for control in ("mass", "random")
    )
    assert 0.01 < own < 1
    # In a causal model one early key may hold more mass than two anchors, which are keys of large lift.
    assert matched == pytest.approx([own] * 4, rel=0.3 if kind == "arm" else 0.1)
    if "anchors" in recipe and kind != "arm":
        assert max(counted) < 0.5 * own


def test_other_keys_that_hold_too_little_are_reported():
    edit = Bias(LeastKeys(1), -INF, name="hide")  # all keys but one
    with pytest.warns(UserWarning, match=r"all other keys hold less attention .* % of heads and steps: hide"):
        run_decode(build_model("unshifted"), build_control([edit], "mass"))


# ---- types of anchors


@pytest.mark.parametrize("seed", range(6))
def test_types_restrict_anchors_to_keys_that_a_loop_finds(seed):
    lengths, k = [12, 3 + seed], 4
    context, ranking = build_context(lengths, seed)
    K = context.canvas.tokens.shape[1]
    noise = torch.Generator().manual_seed(seed)
    evidence, structural = (torch.rand(2, K, generator=noise) < 0.4 for _ in range(2))
    canvas = replace(context.canvas, regions=Regions(("evidence",), evidence[..., None]))
    context = replace(context, canvas=canvas, structural=structural)
    everything = select_keys(Anchors(k), ranking, context)
    for only in ANCHOR_TYPES:
        selected = select_keys(Anchors(k, only=only), ranking, context)
        for b in range(2):
            for h in range(HEADS):
                want = []
                for j in everything[b, h].tolist():
                    is_type = {
                        "all": True,
                        "first": j == int(context.first[b]),
                        "structural": bool(structural[b, j]),
                        "evidence": bool(evidence[b, j]),
                        "all but evidence": not evidence[b, j],
                    }[only]
                    want += [j] if j != NO_KEY and is_type else []
                assert selected[b, h].tolist() == want + [NO_KEY] * (k - len(want))


def test_controls_spare_the_evidence_if_their_edit_does():
    context, ranking = build_context([20, 14], 3)
    evidence = torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    canvas = replace(context.canvas, regions=Regions(("evidence",), evidence[..., None]))
    context = replace(context, canvas=canvas)
    rule = Anchors(6, only="all but evidence")
    reference = select_keys(rule, ranking, context)
    for draw in range(5):
        counted = select_keys(RandomSameCount(rule, seed=draw), ranking, context)
        matched, _ = match_mass(RandomSameMass(rule, seed=draw), reference, torch.ones(2, HEADS, 20), ranking, context)
        for b in range(2):
            for key in [*counted[b].flatten().tolist(), *matched[b].flatten().tolist()]:
                assert key == NO_KEY or not evidence[b, key]


def test_structure_is_that_of_the_analyses(tmp_path):
    model, samples = fs.load("twin:mdm", device="cpu"), read_samples("twin:reading-1", 2)
    run = fs.trace(model, samples, tmp_path / "run", new_tokens=4)
    for trace in run:
        tokens = torch.tensor(trace.tokens)
        names, member = tuple(trace.coords["region"]), torch.tensor(trace.arrays["region_member"])
        classes = classify_tokens(trace)
        for step in range(len(tokens)):
            canvas = build_canvas([tokens[step].tolist()], 0, model.spec.mask_id, regions=Regions(names, member[None]))
            found = StructureFinder(model).find(canvas)[0].tolist()
            assert found == [CLASSES[c] in STRUCTURE for c in classes[step]]
            assert 0 < sum(found) < len(found)


def test_impossible_types_are_refused():
    model = build_model("unshifted")
    with pytest.raises(fs.UserError, match="the samples have no region 'evidence'"):
        run_decode(model, "mask_anchors(only='evidence')")
    with pytest.raises(fs.UserError, match="has no tokenizer to recognise them"):
        run_decode(model, "mask_anchors(only='structural')")


def test_pin_leaves_the_evidence_as_it_is():
    """Everything but the first token is evidence: what remains to be pinned is the first token alone, to itself."""
    model = build_model("unshifted")
    spans = Regions(("evidence",), torch.arange(WIDTH)[None, :, None] > torch.tensor([0, 15, 7])[:, None, None])
    plain, _ = run_decode(model, (), regions=spans)
    pinned, _ = run_decode(model, "pin(k=4)", regions=spans)
    assert pinned.doses == [0.0] * 3
    assert torch.equal(pinned.tokens, plain.tokens)
    assert max(run_decode(model, "pin(k=4, only='all')", regions=spans)[0].doses) > 0.01


# ---- where nothing is edited

EMPTY = [
    ("pin(k=3, steps=[0])", "anchors are their own targets at step 0"),
    ("mask_anchors(k=3, only='evidence')", "no sample has evidence"),
    ("scale_values(k=3, only='evidence')", "no sample has evidence"),
    ("knock_out(keys='evidence')", "no sample has evidence"),
]


@pytest.mark.filterwarnings("ignore:.*selected no keys")
@every_pair(
    kind=["unshifted", "shifted", "arm"],
    recipe=[recipe for recipe, _ in EMPTY],
    control=[None, "mass", "random", "middle"],
)
def test_where_nothing_is_edited_nothing_changes(kind, recipe, control):
    nothing = Regions.from_spans([{"evidence": []}] * 3, WIDTH)
    edits = parse_edits(recipe)
    if control == "middle" and "knock_out" in recipe:
        return
    if control is not None:
        edits = build_control(edits, control, 1)
    model = build_model(kind)
    plain, before = run_decode(model, (), regions=nothing)
    out, after = run_decode(model, edits, regions=nothing)
    assert out.doses == [0.0] * len(NAMES)
    for a, b in zip(out.steps, plain.steps, strict=True):
        assert torch.equal(a.commits.confidence, b.commits.confidence)
        assert torch.equal(a.after.tokens, b.after.tokens)
    for ours, theirs in zip(after, before, strict=True):
        assert all(torch.equal(A, B) for A, B in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["unshifted", "arm"])
def test_doses_do_not_depend_on_the_batch(kind):
    model = build_model(kind)
    for edits in ("mask_anchors(k=2)", build_control(parse_edits("pin(k=2)"), "mass", 3)):
        batched, _ = run_decode(model, edits)
        for b, (name, prompt) in enumerate(zip(NAMES, PROMPTS, strict=True)):
            alone, _ = run_decode(model, edits, prompts=[prompt], samples=[name])
            assert alone.doses[0] == pytest.approx(batched.doses[b], abs=1e-5)


def test_a_sample_that_has_ended_adds_nothing_to_its_dose():
    model = build_model("arm")
    tokens = run_decode(model, "mask_anchors(k=2)")[0].generated_ids
    end = next(
        token for token in tokens[0][:-1] if token not in tokens[1]
    )  # the first sample ends here, the second not
    ending = fs.Model(model.module, replace(model.spec, eos_id=end))
    batched, _ = run_decode(ending, "mask_anchors(k=2)", stop=True)
    alone, _ = run_decode(ending, "mask_anchors(k=2)", stop=True, prompts=PROMPTS[:1], samples=NAMES[:1])
    assert len(alone.steps) < len(batched.steps)
    assert alone.doses[0] == pytest.approx(batched.doses[0], abs=1e-6)


def test_decodings_without_edits_have_no_dose():
    out, _ = run_decode(build_model("unshifted"), ())
    assert out.doses == [0.0] * 3
    assert all(math.isnan(dose) for dose in run_decode(build_model("unshifted"), "virtual_sink()")[0].doses)


def test_a_move_of_many_keys_is_exact():
    """More ranks than are read at a time."""
    prompts = [list(range(1, 46)) * 2]
    order = tuple(range(70))
    model = build_model("unshifted")
    edit = Move(PositionKeys(order), to=FirstKey(70), layers=(0,))
    _, matrices = run_decode(model, edit, prompts=prompts, samples=["a"], steps=1)
    _, plain = run_decode(model, (), prompts=prompts, samples=["a"], steps=1)
    want = plain[0][0].clone()
    want[..., 0] = want[..., :70].sum(-1)
    want[..., 1:70] = 0
    torch.testing.assert_close(matrices[0][0], want, atol=1e-5, rtol=1e-4)
