"""Every recipe equals a slow reference, row by row, in models of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import (
    KINDS,
    MASK,
    NEW,
    PROMPTS,
    Rule,
    anchors,
    build_model,
    compare,
    first,
    least,
    middle,
    positions,
    region,
    run_decode,
)

from floatscope.canvas import Regions
from floatscope.interventions.edits import Anchors, Bias, FirstKey, MiddleKeys, Move, PositionKeys
from floatscope.interventions.recipes import RECIPES, build_control, parse_edits
from pairs import every_pair

pytestmark = pytest.mark.filterwarnings("ignore:.*selected no keys")
INF = float("inf")
WIDTH = max(map(len, PROMPTS)) + NEW


def regions() -> Regions:
    starts = [WIDTH - NEW - len(prompt) for prompt in PROMPTS]
    return Regions.from_spans([{"gold": [(s + 1, s + 3)], "answer": [(WIDTH - NEW, WIDTH)]} for s in starts], WIDTH)


CASES = {
    "mask_anchors(k=2)": [Rule("hide", anchors(2))],
    "mask_anchors(k=1, of='now')": [Rule("hide", anchors(1, "now"))],
    "mask_anchors(k=2, of='first')": [Rule("hide", anchors(2, "first"))],
    "mask_anchors(k=2, steps=[1], layers=[0], heads=[3])": [
        Rule("hide", anchors(2), steps=(1,), layers=(0,), heads=(3,))
    ],
    "pin(k=1)": [Rule("move", anchors(1, "now"), anchors(1, "first"))],
    "pin(k=3, heads=[0, 2])": [Rule("move", anchors(3, "now"), anchors(3, "first"), heads=(0, 2))],
    "pin(k=2, layer=0)": [Rule("move", anchors(2, "now"), anchors(2, "now", 0))],
    "pin(k=2, layer=1)": [],  # in that layer they are its own, and before it they are not known
    "move_to_first(k=2)": [Rule("move", anchors(2, "now"), first(2))],
    "spread(k=2)": [Rule("spread", anchors(2, "now"))],
    "virtual_sink(score=1.5)": [Rule("sink", amount=1.5)],
    "virtual_sink(score=3, heads=[1], layers=[1])": [Rule("sink", amount=3.0, heads=(1,), layers=(1,))],
    "scale_values(k=2, factor=-1.5)": [Rule("scale value", anchors(2), amount=-1.5)],
    "scale_keys(k=2, factor=0.25, heads=[1, 2])": [Rule("scale key", anchors(2), amount=0.25, heads=(1, 2))],
    "zero_heads(pairs=[(1, 0), (1, 3), (0, 2)])": [
        Rule("silence", layers=(1,), heads=(0, 3)),
        Rule("silence", layers=(0,), heads=(2,)),
    ],
    "knock_out(queries='answer', keys='gold')": [Rule("hide", region("gold"), rows=region("answer"))],
    "knock_out(keys='gold', steps=[0, 2])": [Rule("hide", region("gold"), steps=(0, 2))],
    "knock_out(queries='committed', keys='prompt')": [Rule("hide", region("PROMPT"), rows=region("COMMITTED"))],
    "evict(keep=0.3)": [Rule("hide", least(0.3))],
    "evict(keep=2)": [Rule("hide", least(2))],
    "evict(keep=0.5, by='masked')": [Rule("hide", least(0.5, "masked"))],
}
FEW = (
    "mask_anchors(k=2)",
    "pin(k=1)",
    "spread(k=2)",
    "evict(keep=0.3)",
    "knock_out(queries='answer', keys='gold')",
)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param(kind, recipe, marks=() if kind == "unshifted" or recipe in FEW else pytest.mark.slow)
        for kind in KINDS
        for recipe in CASES
        if kind in ("unshifted", "arm") or recipe in FEW
    ],
)
def test_a_recipe_equals_its_definition(kind, recipe):
    compare(kind, recipe, CASES[recipe], regions=regions())


@every_pair(step=[0, 1], where=["", "layers=[1]", "heads=[1, 3]"], kind=["unshifted", "shifted"])
def test_a_frozen_model_repeats_its_attention(kind, where, step):
    limits = {"layers": (1,) if "layers" in where else None, "heads": (1, 3) if "heads" in where else None}
    reference = compare(kind, f"freeze(step={step}, {where})", [Rule("freeze", steps=(step,), **limits)])
    if not where:
        for now in reference.matrices[step:]:
            for A, frozen in zip(now, reference.matrices[step], strict=True):
                assert torch.equal(A, frozen)


@pytest.mark.parametrize("kind", KINDS)
def test_replace_token_replaces_the_token_at_the_anchors(kind):
    compare(kind, "replace_token(k=2, token=33)", [Rule("replace", amount=2)], token=33)
    compare(kind, "replace_token(k=1, token=5, steps=[1, 2])", [Rule("replace", amount=1, steps=(1, 2))], token=5)


@pytest.mark.parametrize("kind", ["unshifted", "shifted"])
def test_a_masked_position_is_never_replaced(kind):
    model, inputs = build_model(kind), []
    handle = model.module.register_forward_pre_hook(
        lambda _, args, kw: inputs.append(kw["input_ids"]), with_kwargs=True
    )
    with handle:
        out, _ = run_decode(model, "replace_token(k=6, token=33)")
    for step, ids in zip(out.steps, inputs[1:], strict=True):  # the first forward finds the anchors of the first step
        other = ids != step.before.tokens
        assert not (other & step.before.masked).any()
        assert (ids[other] == 33).all()
        assert other.sum(-1).tolist() == [6, min(6, int((step.before.valid & ~step.before.masked)[1].sum())), 6]


@pytest.mark.parametrize("kind", KINDS)
def test_drop_bos_equals_a_prompt_without_bos(kind):
    model = build_model(kind)
    out, _ = run_decode(model, "drop_bos()")
    bare, _ = run_decode(model, (), prompts=[prompt[1:] for prompt in PROMPTS])
    assert out.generated_ids == bare.generated_ids
    for a, b in zip(out.steps, bare.steps, strict=True):
        torch.testing.assert_close(a.commits.confidence, b.commits.confidence, atol=1e-5, rtol=1e-4)
    trace, plain = out.traces[0].arrays, bare.traces[0].arrays
    received, bare_received = trace["received"][:, :, 0], plain["received"][:, :, 0]  # of all rows
    np.testing.assert_allclose(received[..., 1:], bare_received, atol=1e-5, rtol=1e-3)
    assert (received[..., 0] == 0).all()


def test_a_bos_dropped_for_one_step_disables_the_cache():
    """The cached keys and values of a causal model were computed with it: they are computed again."""
    one, other = (run_decode(build_model(kind), "drop_bos(steps=[1])") for kind in ("arm", "arm without cache"))
    assert torch.equal(one[0].tokens, other[0].tokens)
    assert one[0].meta["rows"] == "all"
    assert run_decode(build_model("arm"), "drop_bos()")[0].meta["rows"] == "cache"


COMBINATIONS = [
    (
        [Bias(Anchors(2), 1.5), Bias(FirstKey(), -0.5, heads=(1,))],
        [Rule("add", anchors(2), amount=1.5), Rule("add", first(), amount=-0.5, heads=(1,))],
    ),
    (
        ["mask_anchors(k=1)", "pin(k=2)", "zero_heads(pairs=[(0, 1)])"],
        [
            Rule("hide", anchors(1)),
            Rule("move", anchors(2, "now"), anchors(2, "first")),
            Rule("silence", layers=(0,), heads=(1,)),
        ],
    ),
    (
        ["zero_heads(pairs=[(0, 1)])", "spread(k=2)", "virtual_sink(score=2)", "evict(keep=3)"],
        [Rule("silence", layers=(0,), heads=(1,)), Rule("spread", anchors(2, "now")), Rule("sink", amount=2.0),
         Rule("hide", least(3))],
    ),
    (
        ["scale_keys(k=1, factor=2, heads=[0])", "scale_values(k=2, factor=3)", "move_to_first(k=1, steps=[1])"],
        [Rule("scale key", anchors(1), amount=2.0, heads=(0,)), Rule("scale value", anchors(2), amount=3.0),
         Rule("move", anchors(1, "now"), first(), steps=(1,))],
    ),
    (
        ["pin(k=1, steps=[0, 1])", "spread(k=1, steps=[2])", "mask_anchors(k=1)", "mask_anchors(k=2, heads=[3])"],
        [Rule("move", anchors(1, "now"), anchors(1, "first"), steps=(0, 1)),
         Rule("spread", anchors(1, "now"), steps=(2,)), Rule("hide", anchors(1)), Rule("hide", anchors(2), heads=(3,))],
    ),
    (
        ["replace_token(k=1, token=7)", "mask_anchors(k=1)"],
        [Rule("replace", amount=1), Rule("hide", anchors(1))],
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["unshifted", "arm"])
@pytest.mark.parametrize(("edits", "rules"), COMBINATIONS)
def test_several_edits_combine(kind, edits, rules):
    compare(kind, edits, rules, token=7)


FREEZE = Rule("freeze", steps=(0,))


@pytest.mark.parametrize(
    ("edits", "rules"),
    [
        (
            ["scale_keys(k=1, factor=2, steps=[0])", "freeze()"],
            [Rule("scale key", anchors(1), amount=2.0, steps=(0,)), FREEZE],
        ),
        (
            ["scale_keys(k=1, factor=2)", "freeze(heads=[1])"],
            [Rule("scale key", anchors(1), amount=2.0), Rule("freeze", steps=(0,), heads=(1,))],
        ),
        (
            ["freeze()", "mask_anchors(k=1)", "spread(k=1)"],
            [FREEZE, Rule("hide", anchors(1)), Rule("spread", anchors(1, "now"))],
        ),
        (["freeze()", "scale_keys(k=1, factor=0)"], [FREEZE, Rule("scale key", anchors(1), amount=0.0)]),
    ],
)
def test_freeze_combines_with_other_edits(edits, rules):
    compare("unshifted", edits, rules)


RULES = [
    (Bias(MiddleKeys(2), -INF), [Rule("hide", middle(2))]),
    (Bias(MiddleKeys(3, "now"), 1.0), [Rule("add", middle(3, "now"), amount=1.0)]),
    (Bias(Anchors(2, layer=0), -INF), [Rule("hide", anchors(2, layer=0))]),
    (
        Bias(Anchors(1, layer=1), -INF, steps=(1, 2)),
        [Rule("hide", anchors(1, layer=1), steps=(1, 2))],
    ),
    (
        Bias(PositionKeys((0, 2)), -1.0, queries="answer"),
        [Rule("add", positions(0, 2), amount=-1.0, rows=region("answer"))],
    ),
    (
        Move(Anchors(1, "now"), to=Anchors(1, "first"), queries="masked"),
        [Rule("move", anchors(1, "now"), anchors(1, "first"), rows=region("MASKED"))],
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["unshifted", "arm"])
@pytest.mark.parametrize(("edit", "rules"), RULES)
def test_edits_without_a_recipe(kind, edit, rules):
    compare(kind, edit, rules, regions=regions())


@pytest.mark.parametrize(
    "given",
    [
        {"block": 2, "steps": 4},
        {"suffix": [MASK, 7]},
        {"target_ids": [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]},
        {"sampler": "random", "seed": 3},
        {
            "prompts": [[1, MASK, 3, MASK], [5, MASK]],
            "samples": ["x", "y"],
            "infill": True,
            "new_tokens": 0,
            "steps": 2,
        },
    ],
)
def test_a_recipe_equals_its_definition_with_other_settings(given):
    rules = [Rule("hide", anchors(1)), Rule("move", anchors(2, "now"), anchors(2, "first"))]
    compare("shifted", ["mask_anchors(k=1)", "pin(k=2)"], rules, **given)


def test_target_ids_with_edits_in_a_causal_model():
    compare(
        "arm",
        "mask_anchors(k=1)",
        [Rule("hide", anchors(1))],
        target_ids=[[1, 2, 3], [5, 6, 7], [9, 10, 11]],
        new_tokens=3,
    )


# ---- controls


def test_a_control_hides_as_many_keys_in_the_same_layers_and_steps():
    edits = parse_edits("mask_anchors(k=2, layers=[1], steps=[0, 1], heads=[0, 3])")
    model = build_model("unshifted")
    hidden, plain = {}, run_decode(model, (), steps=1)[1]
    for name, variant in (("edited", edits), *((draw, build_control(edits, "random", draw)) for draw in range(3))):
        _, matrices = run_decode(model, variant, steps=1)
        assert torch.equal(matrices[0][0], plain[0][0])
        A = matrices[0][1][0]  # of the first step and the first sample, which has no padding
        others = ~torch.eye(A.shape[-1], dtype=torch.bool)
        is_hidden = ((A == 0) | ~others).all(1)  # [head, key]
        assert is_hidden.sum(-1).tolist() == [2, 0, 0, 2]
        hidden[name] = is_hidden
    draws = [hidden[draw] for draw in range(3)]
    assert not any(torch.equal(draws[a], draws[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert not all(torch.equal(draw, hidden["edited"]) for draw in draws)


def test_the_middle_control_uses_keys_of_middle_rank():
    (edit,) = build_control(parse_edits("mask_anchors(k=2)"), "middle")
    compare("arm", edit, [Rule("hide", middle(2))])
    # At step 0 the anchors are their own targets: the edit moves nothing, and neither does the control.
    (moved,) = build_control(parse_edits("pin(k=1, layers=[0])"), "middle")

    def middle_if_moved(r, b, layer, h):
        is_moved = r.order("now", b, layer, h)[:1] != r.order("first", b, layer, h)[:1]
        return middle(1, "now")(r, b, layer, h) if is_moved else []

    compare("unshifted", moved, [Rule("move", middle_if_moved, anchors(1, "first"), layers=(0,))])


def test_the_control_of_a_region_has_as_many_keys():
    (edit,) = build_control(parse_edits("knock_out(keys='gold')"), "random", 1)
    _, matrices = run_decode(build_model("unshifted"), edit, regions=regions())
    A = matrices[0][0][0]
    is_hidden = ((A == 0) | torch.eye(A.shape[-1], dtype=torch.bool)).all(1)
    assert is_hidden.sum(-1).tolist() == [2] * 4
    assert (
        len({tuple(row.nonzero()[:, 0].tolist()) for row in is_hidden}) == 1
    )  # a region is the same for all heads too


def test_the_control_of_zeroed_heads_uses_other_heads_of_the_same_layers():
    edits = parse_edits("zero_heads(pairs=[(0, 1), (1, 2), (1, 3)])")
    controls = [build_control(edits, "random", draw, heads=8) for draw in range(4)]
    for draw in controls:
        for edit, other in zip(edits, draw, strict=True):
            assert (other.layers, len(other.heads)) == (edit.layers, len(edit.heads))
            assert not set(other.heads) & set(edit.heads)
    assert controls[0] == build_control(edits, "random", 0, heads=8)
    assert len({tuple(edit.heads for edit in draw) for draw in controls}) > 1


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("freeze", "drop_bos", "virtual_sink")])
def test_controls_are_captured_as_executed(recipe):
    given = {"zero_heads": "zero_heads(pairs=[(0, 1)])", "replace_token": "replace_token(token=3)",
             "mask_anchors": "mask_anchors(k=2)"}.get(recipe, recipe)  # fmt: skip
    for kind, steps in (("unshifted", 2), ("arm", None)):
        control = build_control(parse_edits(given), "random", 0, heads=4)
        out, _ = run_decode(build_model(kind), control, regions=regions(), steps=steps)
        assert out.meta["edits"] == [str(edit) for edit in control]
