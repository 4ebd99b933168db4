"""Denoising commits what LLaDA's loop commits; a batch commits what its samples commit alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from toys import (
    MASK,
    VOCABULARY,
    best,
    compute_logits,
    fill,
    fixed_model,
    positions,
    random_model,
    select_sample,
    softmax,
)

from example_counts import examples
from floatscope.canvas import Regions, build_canvas
from floatscope.errors import UserError
from floatscope.sampling import SAMPLERS, denoise
from floatscope.sampling.settings import resolve_sampling
from floatscope.schema import Paradigm, State


def run_llada_loop(forward, prompt, new, steps, block=None, shift=False):
    """LLaDA's loop for one sequence, temperature 0, low-confidence remasking: the canvas after every step.

    The shares of a block are fixed when it begins; its masks are looked up at every step, with those that were left
    before it: a block's end is all that bounds it. Masks in the prompt count as the first block's.
    """
    x = [*prompt, *[MASK] * new]
    block = block or new
    start, history = len(prompt), []
    for number in range(new // block if block else 1):
        lo, hi = (0 if number == 0 else start + number * block), start + (number + 1) * block
        masks = x[lo:hi].count(MASK)
        for i in range(steps // (new // block)):
            if MASK not in x[lo:hi]:
                break
            logits = compute_logits(forward, x)
            if shift:
                logits = [logits[0], *logits[:-1]]
            masked = [p for p in range(hi) if x[p] == MASK]
            share = masks // (steps // (new // block)) + (i < masks % (steps // (new // block)))
            for p in best({p: max(softmax(logits[p])) for p in masked}, share):
                x[p] = logits[p].index(max(logits[p]))
            history.append(list(x))
    return history


def ids(seed: int, length: int, high: int = MASK) -> list[int]:
    return torch.randint(0, high, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- LLaDA's loop


@examples(40)
@given(
    st.integers(0, 99),
    st.integers(0, 8),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
def test_commits_equal_those_of_lladas_loop(seed, prompt, block, blocks, each, shift, infilling):
    """`each` steps a block: fewer than its masks, as many, or more."""
    start = ids(seed, prompt, MASK + infilling)
    forward, new = random_model(seed), block * blocks
    given = {"new_tokens": new, "block": block, "steps": each * blocks, "shift": shift}
    got = [step.after.tokens[0].tolist() for step in fill(forward, [start], **given)]
    assert got == run_llada_loop(forward, start, new, each * blocks, block, shift)


@examples(15)
@given(st.integers(0, 99), st.integers(1, 5), st.integers(1, 3), st.integers(1, 6))
def test_committed_mask_tokens_are_handled_as_in_the_official_loop(seed, block, blocks, each):
    forward = random_model(seed, never_mask=False)
    given = {"new_tokens": block * blocks, "block": block, "steps": each * blocks}
    got = [step.after.tokens[0].tolist() for step in fill(forward, [[1, 2]], **given)]
    assert got == run_llada_loop(forward, [1, 2], block * blocks, each * blocks, block)


def run_official_loop(forward, prompt, new, steps, block, mask):
    """LLaDA's `generate` at temperature 0, as its authors describe it, for one sequence: the final canvas.

    Every step of every block runs. The confidence is −∞ beyond the block's end and where nothing is masked.
    """
    x = torch.tensor([*prompt, *[mask] * new])
    blocks = new // block
    per_block = steps // blocks
    for number in range(blocks):
        begin, end = len(prompt) + number * block, len(prompt) + (number + 1) * block
        masks = int((x[begin:end] == mask).sum())
        counts = [masks // per_block + (i < masks % per_block) for i in range(per_block)]
        for count in counts:
            masked = x == mask
            logits = torch.tensor(compute_logits(forward, x.tolist()))
            proposal = torch.where(masked, logits.argmax(-1), x)
            confidence = logits.double().softmax(-1).gather(-1, proposal[:, None])[:, 0]
            confidence[end:] = -torch.inf
            confidence[~masked] = -torch.inf
            chosen = confidence.sort(descending=True, stable=True).indices[:count]
            x[chosen] = proposal[chosen]
    return x.tolist()


def tiny_model(seed: int, vocabulary: int):
    """The mask is the last token, and predicted about as often as the others."""
    table = torch.randn(64, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))

    def forward(canvas, rows):
        at = torch.arange(canvas.tokens.shape[1])
        own = table[at, canvas.tokens]
        return (own + own.mean(1, keepdim=True) * 3 + table[(at + 9) % 64, 0])[:, rows]

    return forward


@pytest.mark.parametrize("vocabulary", [2, 3, 5])
@pytest.mark.parametrize(
    ("block", "blocks", "each"), [(3, 3, 3), (4, 2, 2), (2, 4, 3), (1, 5, 1), (4, 3, 6), (6, 1, 4)]
)
def test_tokens_equal_those_of_the_official_loop_when_masks_are_predicted(vocabulary, block, blocks, each):
    mask, unfilled = vocabulary - 1, 0
    for seed in range(25):
        forward, prompt = tiny_model(seed, vocabulary), ids(seed, seed % 4, mask)
        new, steps = block * blocks, each * blocks
        got = (
            fill(forward, [prompt], mask_id=mask, new_tokens=new, block=block, steps=steps)[-1].after.tokens[0].tolist()
        )
        assert got == run_official_loop(forward, prompt, new, steps, block, mask)
        unfilled += mask in got
    assert unfilled  # masks are left, so the rule is exercised


def test_a_mask_that_stays_is_ranked_in_later_blocks_too():
    """The model commits the mask token at position 1. LLaDA's rules pick it again, the others keep to their block."""
    logits = torch.zeros(7, VOCABULARY)
    logits[:, 5], logits[1, MASK] = 1, 9
    steps = fill(fixed_model(logits), [[1, MASK, 2]], new_tokens=4, block=2)
    assert positions(steps) == [[1]] * 5
    assert steps[-1].after.tokens[0].tolist() == [1, MASK, 2, MASK, MASK, MASK, MASK]
    for sampler in ("margin", "entropy"):
        steps = fill(fixed_model(logits), [[1, MASK, 2]], new_tokens=4, block=2, sampler=sampler)
        assert positions(steps) == [[1], [1], [1], [5], [6]]
        assert steps[-1].after.tokens[0].tolist() == [1, MASK, 2, MASK, MASK, 5, 5]


@pytest.mark.parametrize("seed", range(5))
def test_later_blocks_fill_what_earlier_ones_left(seed):
    """The mask token is the proposal in the first block's steps, another token afterwards."""
    logits = torch.zeros(5, 9, VOCABULARY)
    logits[:, :, 5] = torch.rand(9, generator=torch.Generator().manual_seed(seed)) + 3
    logits[:2, 1:5, MASK] = 9
    steps = fill(fixed_model(logits), [[1]], new_tokens=8, block=4, steps=4)
    order = logits[2, 1:, 5].argsort(descending=True) + 1
    assert positions(steps)[2:] == [sorted(order[:2].tolist()), sorted(order[2:4].tolist())]
    others = fill(fixed_model(logits), [[1]], new_tokens=8, block=4, steps=4, sampler="margin")
    assert sorted(p for step in positions(others)[2:] for p in step) == [5, 6, 7, 8]


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s != "pc"])
def test_a_model_that_only_predicts_masks_stops_after_its_steps(sampler):
    """The commits are recorded, the positions stay masked, and the second block is filled too."""
    logits = torch.zeros(9, VOCABULARY)
    logits[:, MASK] = 5.0
    steps = fill(fixed_model(logits), [[1]], new_tokens=8, block=4, sampler=sampler)
    assert 2 <= len(steps) <= 8
    assert steps[-1].after.tokens[0].tolist() == [1] + [MASK] * 8
    assert steps[-1].after.masked.sum() == 8
    assert {tuple(b) for s in steps for b in s.before.block.tolist()} == {(1, 5), (5, 9)}
    assert all(len(s.commits) and s.commits.token.eq(MASK).all() for s in steps if sampler != "origin")


def test_the_first_steps_take_the_remainder():
    steps = fill(random_model(0), [[1], [1, 2, 3]], new_tokens=7, steps=3)
    assert [len(step.commits) for step in steps] == [6, 4, 4]  # 3 + 2 + 2, in both rows


def test_the_default_is_one_step_per_mask():
    steps = fill(random_model(0), [[1, MASK, 2]], new_tokens=5)
    assert [len(step.commits) for step in steps] == [1] * 6


def test_denoising_stops_when_nothing_is_masked():
    requests = []

    def forward(canvas, rows):
        requests.append(canvas.step)
        return random_model(0)(canvas, rows)

    steps = fill(forward, [[1]], new_tokens=2, steps=9)
    assert [len(step.commits) for step in steps] == [1, 1]
    assert requests == [step.before.step for step in steps] == [0, 1]


def test_a_canvas_without_masks_has_no_steps():
    sampling = resolve_sampling(Paradigm.MDM, new_tokens=0)
    assert list(denoise(random_model(0), build_canvas([[1, 2]], 0, MASK), sampling, mask_id=MASK)) == []


# ---- a batch equals its samples alone


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.5, 1.0]),
        "top_p": st.sampled_from([0.7, 0.95]),
        "top_k": st.sampled_from([1, 4]),
        "guidance": st.sampled_from([0.5, 2.0]),
        "eos": st.sampled_from(["never", "last"]),
        "confidence_from": st.just("drawn"),
        "schedule": st.just("time"),
        "seed": st.integers(0, 5),
    },
)


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    path = tmp_path_factory.mktemp("counts") / "counts.json"
    path.write_text('{"1": 500, "2": 20, "3": 3, "7": 900}')
    return f"pc(background={str(path)!r})"


@pytest.mark.parametrize("sampler", SAMPLERS)
@examples(12)
@example(0, [0, 3], 3, 1, 1, True, False, False, {})  # a sample whose first position is masked, beside a longer one
@example(1, [5, 2, 0], 2, 3, 2, True, True, True, {"temperature": 1.0, "guidance": 1.0})
@given(
    st.integers(0, 99),
    st.lists(st.integers(0, 9), min_size=2, max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    SETTINGS,
)
def test_a_batch_commits_what_its_samples_commit_alone(
    counts, sampler, seed, lengths, block, blocks, each, shift, infilling, stop, more
):
    forward = random_model(seed)
    prompts = [ids(seed + 100 * b, n, MASK + infilling) for b, n in enumerate(lengths)]
    names = [f"sample {b}" for b in range(len(prompts))]
    pace = SAMPLERS[sampler].pace
    steps = None if each is None or pace == "adaptive" else each * blocks
    if pace == "fallback":
        # see test_klass_with_the_time_schedule_fills_its_blocks
        more = {k: v for k, v in more.items() if k != "schedule"}
    if more.get("eos") == "last":
        # see test_eos_last_commits_an_end_token_last_when_it_is_the_only_choice
        more = {k: v for k, v in more.items() if k != "confidence_from"}
    sampler_text = {"pc": counts, "klass": "klass(confidence=0.2, kl=0.5)", "eb": "eb(gamma=1.0)"}.get(sampler, sampler)
    given = {"sampler": sampler_text, "new_tokens": block * blocks, "block": block, "steps": steps, "shift": shift}
    given |= {"stop": stop, "end_ids": (3, 7), **more}
    if pace == "schedule" and sampler != "origin" and seed % 3 == 0:
        given["order_temperature"] = 0.3
    batched = fill(forward, prompts, samples=names, **given)
    alone = [fill(forward, [p], samples=[n], **given) for p, n in zip(prompts, names, strict=True)]
    assert len(batched) == max(map(len, alone))
    for b, own in enumerate(alone):
        for number, got in enumerate(batched):
            valid, offset = got.after.valid[b], int((~got.after.valid[b]).sum())
            mine = select_sample(got.commits, b)
            if number >= len(own):  # it is done and does not change
                assert len(mine) == 0
                assert not got.before.active[b]
                assert got.before.block[b].tolist() == [-1, -1]
                assert torch.equal(got.after.tokens[b, valid], own[-1].after.tokens[0])
                assert torch.equal(got.after.states[b, valid], own[-1].after.states[0])
                continue
            want = own[number]
            for mine_, want_ in ((got.before, want.before), (got.after, want.after)):
                assert torch.equal(mine_.tokens[b, valid], want_.tokens[0])
                assert torch.equal(mine_.states[b, valid], want_.states[0])
            assert got.before.active[b] == want.before.active[0] == True  # noqa: E712
            assert torch.equal(got.before.block[b] - offset, want.before.block[0])
            assert (mine.position - offset).tolist() == want.commits.position.tolist()
            assert (mine.row - offset).tolist() == want.commits.row.tolist()
            assert mine.token.tolist() == want.commits.token.tolist()
            torch.testing.assert_close(mine.confidence, want.commits.confidence)


@pytest.mark.parametrize(
    "given",
    [{"temperature": 1.0}, {"sampler": "random"}, {"sampler": "origin"}, {"order_temperature": 1.0}],
    ids=lambda given: str(given),
)
def test_randomness_depends_on_the_seed_the_sample_and_the_step(given):
    forward = random_model(0)

    def run(name, seed=0):
        (steps,) = [fill(forward, [[1, 2]], samples=[name], new_tokens=12, steps=6, seed=seed, **given)]
        return [step.after.tokens.tolist() for step in steps]

    assert run("a") == run("a")
    assert run("a") != run("b")
    assert run("a") != run("a", seed=1)
    numbered = fill(forward, [[1, 2]], new_tokens=12, steps=6, **given)
    assert [step.after.tokens.tolist() for step in numbered] == run("0")  # without names: 0, 1, …


def test_temperature_0_does_not_depend_on_seed_or_name():
    forward = random_model(0)
    one, other = (fill(forward, [[1, 2]], samples=[n], new_tokens=8, seed=s) for n, s in (("a", 0), ("b", 5)))
    assert one[-1].after.tokens.tolist() == other[-1].after.tokens.tolist()


def test_chunks_of_logits_give_the_same_result(monkeypatch):

    def run():
        given = {"sampler": "klass(confidence=0.2, kl=0.5)", "new_tokens": 6, "temperature": 0.5}
        return fill(random_model(3), [[1, 2, 3], [4]], **given)

    in_one = run()
    # one candidate at a time
    monkeypatch.setattr("floatscope.sampling.denoising.MAX_LOGITS_PER_CHUNK", VOCABULARY + 1)
    for a, b in zip(in_one, run(), strict=True):
        assert torch.equal(a.after.tokens, b.after.tokens)
        torch.testing.assert_close(a.commits.confidence, b.commits.confidence)


# ---- rows


@pytest.mark.parametrize("shift", [False, True])
def test_the_token_of_a_position_comes_from_its_predicting_row(shift):
    forward = random_model(2)
    for step in fill(forward, [[1, 2, 3]], new_tokens=5, shift=shift):
        c = step.commits
        assert torch.equal(c.row, c.position - 1 if shift else c.position)
        p = forward(step.before, slice(0, 8)).softmax(-1)[0, c.row]
        assert torch.equal(p.argmax(-1), c.token)
        torch.testing.assert_close(p.max(-1).values, c.confidence)


def test_the_first_position_of_a_shifted_model_is_predicted_by_its_own_row_under_padding_too():
    """There is no row before it: the first valid row is used, never a row of padding."""
    first = fill(random_model(3), [[MASK, 2], [1, 2, 3, 4]], new_tokens=1, steps=1, shift=True)[0]
    at_start = (first.commits.sample == 0) & (first.commits.position == 2)
    assert first.commits.row[at_start].tolist() == [2]
    assert first.commits.row[~at_start].tolist() == [3, 3]


@pytest.mark.parametrize(("shift", "want"), [(False, [(2, 5), (5, 8)]), (True, [(1, 4), (4, 7)])])
def test_only_the_rows_of_the_block_are_requested(shift, want):
    requests = []

    def forward(canvas, rows):
        requests.append((rows.start, rows.stop))
        return random_model(0)(canvas, rows)

    fill(forward, [[1, 2]], new_tokens=6, block=3, steps=2, shift=shift)
    assert requests == want


def test_rows_of_committed_positions_are_not_requested_again():
    confident = torch.zeros(6, VOCABULARY)
    confident[torch.arange(6), 4] = torch.arange(6, 0, -1.0)  # the first is the most confident
    requests = []

    def forward(canvas, rows):
        requests.append((rows.start, rows.stop))
        return fixed_model(confident)(canvas, rows)

    fill(forward, [[1, 2]], new_tokens=4)
    assert requests == [(2, 6), (3, 6), (4, 6), (5, 6)]


def test_klass_reads_the_later_blocks_too():
    requests = []

    def forward(canvas, rows):
        requests.append((rows.start, rows.stop))
        return random_model(0)(canvas, rows)

    fill(forward, [[1, 2]], new_tokens=6, block=3, sampler="klass")
    assert requests[0] == (2, 8)


# ---- the canvas


def test_a_step_stores_the_canvas_of_its_forward():
    canvas = build_canvas([[1, 2]], 4, MASK)
    steps = list(denoise(random_model(1), canvas, resolve_sampling(Paradigm.MDM, new_tokens=4, steps=2), mask_id=MASK))
    assert torch.equal(steps[0].before.tokens, canvas.tokens)
    assert torch.equal(steps[1].before.tokens, steps[0].after.tokens)
    for step in steps:
        written = step.before.tokens != step.after.tokens
        assert written.nonzero()[:, 1].tolist() == step.commits.position.tolist()
        assert step.after.states[written].tolist() == [State.COMMITTED] * 2
        assert step.before.states[written].tolist() == [State.MASKED] * 2
        assert torch.equal(step.after.tokens[step.commits.sample, step.commits.position], step.commits.token)


def test_the_callers_canvas_is_not_modified():
    canvas = build_canvas([[1, 2]], 4, MASK)
    before = replace(canvas, tokens=canvas.tokens.clone(), states=canvas.states.clone())
    list(denoise(random_model(0), canvas, resolve_sampling(Paradigm.MDM, new_tokens=4), mask_id=MASK))
    assert torch.equal(canvas.tokens, before.tokens)
    assert torch.equal(canvas.states, before.states)


def test_steps_already_yielded_do_not_change():
    sampling, snapshots = resolve_sampling(Paradigm.MDM, new_tokens=4), []
    for step in denoise(random_model(0), build_canvas([[1]], 4, MASK), sampling, mask_id=MASK):
        snapshots.append((step, step.before.tokens.tolist(), step.after.states.tolist()))
    assert all(s.before.tokens.tolist() == t and s.after.states.tolist() == a for s, t, a in snapshots)


def test_steps_are_computed_lazily():
    requests = []

    def forward(canvas, rows):
        requests.append(canvas.step)
        return random_model(0)(canvas, rows)

    steps = denoise(forward, build_canvas([[1]], 4, MASK), resolve_sampling(Paradigm.MDM, new_tokens=4), mask_id=MASK)
    assert requests == []
    next(steps)
    assert requests == [0]


def test_blocks_are_filled_one_after_the_other():
    steps = fill(random_model(0), [[1, 2], [3]], new_tokens=6, block=2, steps=6)
    assert [step.before.block.tolist() for step in steps] == [[[at, at + 2]] * 2 for at in (2, 2, 4, 4, 6, 6)]
    for step in steps:
        (low, high), _ = step.before.block.tolist()
        assert ((step.commits.position >= low) & (step.commits.position < high)).all()
        assert step.before.active.all()


def test_masks_in_the_prompt_are_filled_with_the_first_block():
    steps = fill(random_model(0), [[1, MASK, 3, MASK]], new_tokens=4, block=2, steps=4)
    assert [len(step.commits) for step in steps] == [2, 2, 1, 1]
    assert {p for c in positions(steps)[:2] for p in c} == {1, 3, 4, 5}
    assert [step.before.block.tolist() for step in steps] == [[[4, 6]]] * 2 + [[[6, 8]]] * 2
    assert steps[-1].after.tokens[0, [0, 2]].tolist() == [1, 3]
    assert not steps[-1].after.masked.any()


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s != "pc"])
def test_only_the_masks_of_the_prompts_are_filled_without_new_tokens(sampler):
    steps = fill(random_model(0), [[1, MASK, 3, MASK], [MASK, 2], [5]], new_tokens=0, sampler=sampler)
    last = steps[-1].after
    assert not last.masked.any()
    assert last.tokens[0, [0, 2]].tolist() == [1, 3]
    assert last.tokens[1, 3] == 2
    assert not steps[0].before.active[2]
    assert steps[0].before.block.tolist() == [[0, 4], [0, 4], [-1, -1]]


def test_the_suffix_is_not_modified():
    forward = random_model(5)
    canvas = build_canvas([[1, 2], [3]], 4, MASK, suffix=[7, 8])
    assert canvas.tokens[:, -2:].tolist() == [[7, 8]] * 2
    steps = fill(forward, [[1, 2], [3]], new_tokens=4, block=2, suffix=[7, 8])
    assert steps[-1].after.tokens[:, -2:].tolist() == [[7, 8]] * 2
    assert [s.before.block[0].tolist() for s in steps] == [[2, 4]] * 2 + [[4, 6]] * 2
    assert not steps[-1].after.masked.any()
    assert steps[-1].after.states[:, -2:].eq(State.PROMPT).all()


def test_prompts_are_padded_on_the_left():
    canvas = build_canvas([[1, 2, 3], [4]], 2, MASK)
    assert canvas.valid.tolist() == [[True] * 5, [False, False, True, True, True]]
    assert canvas.tokens[1, 2:].tolist() == [4, MASK, MASK]
    assert not canvas.masked[1, :2].any()
    assert canvas.states[0].tolist() == [State.PROMPT] * 3 + [State.MASKED] * 2


def test_without_a_mask_id_a_canvas_contains_only_the_prompts():
    canvas = build_canvas([[1, 2, 3], [4]], 5, None)
    assert canvas.tokens.shape == (2, 3)
    assert canvas.tokens[1, 2] == 4
    assert canvas.states[1].tolist() == [State.PAD, State.PAD, State.PROMPT]


def test_steps_keep_the_regions_of_the_canvas():
    regions = Regions.from_spans([{"prompt": [(0, 2)]}], 5)
    steps = fill(random_model(0), [[1, 2]], new_tokens=3, regions=regions)
    assert all(step.before.regions is regions and step.after.regions is regions for step in steps)


def test_regions_of_another_size_are_refused():
    regions = Regions.from_spans([{"prompt": [(0, 2)]}], 4)
    with pytest.raises(UserError, match=r"regions are for 1 canvases of 4 positions, but there are 1 canvases of 5"):
        build_canvas([[1, 2]], 3, MASK, regions=regions)
    with pytest.raises(UserError, match=r"regions are for 1 canvases of 4 positions, but there are 1 canvases of 5"):
        build_canvas([[1, 2]], 3, None, regions=regions)  # those of a model that appends are of the full length


@pytest.mark.parametrize(("prompts", "new"), [([], 4), ([[]], 0), ([[1], []], 0)])
def test_an_empty_canvas_is_refused(prompts, new):
    with pytest.raises(UserError, match=f"at least one prompt and one token, got {len(prompts)} prompts"):
        build_canvas(prompts, new, MASK)


def test_confidence_is_fp32_whatever_the_logits_are():
    """bf16 confidences tie, and ties are broken by the device."""
    base = random_model(4)
    got = fill(lambda c, rows: base(c, rows).bfloat16(), [[1, 2]], new_tokens=6)
    want = fill(lambda c, rows: base(c, rows).bfloat16().float(), [[1, 2]], new_tokens=6)
    assert positions(got) == positions(want)
    assert all(torch.equal(a.commits.confidence, b.commits.confidence) for a, b in zip(got, want, strict=True))
    assert all(s.commits.confidence.dtype == torch.float32 for s in got)


def test_confidences_that_tie_in_bf16_are_ordered_in_fp32():
    logits = torch.zeros(5, VOCABULARY)
    logits[1:, 4] = torch.tensor([9.0, 9.5, 10.0, 9.75])  # exact in bf16; every p above .997
    assert len(set(logits.bfloat16().softmax(-1).amax(-1)[1:].tolist())) < 4
    got = fill(fixed_model(logits.bfloat16()), [[1]], new_tokens=4)
    assert positions(got) == [[3], [4], [2], [1]]


# ---- guidance


def test_guidance_is_lladas_formula_over_a_masked_prompt():
    """logits = u + (w + 1)(c − u); u sees no prompt, not even its first token, and everything committed so far."""
    base, w, canvases = random_model(6), 1.5, []

    def watched(canvas, rows):
        canvases.append(canvas)
        return base(canvas, rows)

    steps = fill(watched, [[0, 5, 6], [7]], new_tokens=4, guidance=w)
    assert len(canvases) == 2 * len(steps)
    for step, pair in zip(steps, zip(canvases[::2], canvases[1::2], strict=True), strict=True):
        conditional, without = sorted(pair, key=lambda canvas: int(canvas.tokens.eq(MASK).sum()))
        assert torch.equal(conditional.tokens, step.before.tokens)
        prompt = step.before.states == State.PROMPT
        assert without.tokens[prompt].eq(MASK).all()
        assert torch.equal(without.tokens[~prompt], step.before.tokens[~prompt])
        assert torch.equal(without.states, step.before.states)  # what is padding stays padding
        c, u = (base(canvas, slice(0, 7)) for canvas in (conditional, without))
        p = (u + (w + 1) * (c - u)).softmax(-1)[step.commits.sample, step.commits.row]
        assert torch.equal(p.argmax(-1), step.commits.token)
        torch.testing.assert_close(p.amax(-1), step.commits.confidence)
    assert steps[-1].before.states.eq(State.COMMITTED).any()


def test_the_second_pass_of_guidance_has_its_own_forward():
    first, second = [], []

    def conditional(canvas, rows):
        first.append((canvas.tokens.tolist(), rows))
        return random_model(0)(canvas, rows)

    def unguided(canvas, rows):
        second.append((canvas.tokens.tolist(), rows))
        return random_model(0)(canvas, rows)

    steps = fill(conditional, [[1, 2]], new_tokens=3, guidance=1.0, unguided=unguided)
    assert len(first) == len(second) == len(steps) == 3
    assert [rows for _, rows in first] == [rows for _, rows in second]
    assert all(tokens[0][:2] == [1, 2] for tokens, _ in first)
    assert all(tokens[0][:2] == [MASK, MASK] for tokens, _ in second)


def test_without_guidance_the_second_forward_is_not_run():
    def unguided(canvas, rows):
        raise AssertionError

    assert len(fill(random_model(0), [[1]], new_tokens=2, unguided=unguided)) == 2


def test_guidance_is_computed_in_fp32():
    base = random_model(0)
    got = fill(lambda c, rows: base(c, rows).bfloat16(), [[1, 2]], new_tokens=4, guidance=3.0)
    want = fill(lambda c, rows: base(c, rows).bfloat16().float(), [[1, 2]], new_tokens=4, guidance=3.0)
    assert all(torch.equal(a.commits.confidence, b.commits.confidence) for a, b in zip(got, want, strict=True))


# ---- end tokens


EOS, EOT = 3, 7


def ending_model(length: int):
    """End of turn is most likely, then end of text, then token 5; earlier positions are more confident."""
    logits = torch.zeros(length, VOCABULARY)
    sure = torch.arange(length, 0, -1.0) / length
    logits[:, EOT], logits[:, EOS], logits[:, 5] = 6 + sure, 5 + sure, 4 + sure
    return logits


def test_eos_never_removes_the_first_end_token():
    logits = ending_model(5)
    logits[:, EOT] = 0
    free = fill(fixed_model(logits), [[1]], new_tokens=4, end_ids=(EOS, EOT))
    assert free[-1].after.tokens[0, 1:].tolist() == [EOS] * 4
    never = fill(fixed_model(logits), [[1]], new_tokens=4, end_ids=(EOS, EOT), eos="never")
    assert never[-1].after.tokens[0, 1:].tolist() == [5] * 4
    p = logits.clone()
    p[:, EOS] = -torch.inf
    torch.testing.assert_close(never[0].commits.confidence, p.softmax(-1)[1, 5:6])


def test_eos_never_keeps_the_other_end_tokens():
    never = fill(fixed_model(ending_model(3)), [[1]], new_tokens=2, end_ids=(EOS, EOT), eos="never")
    assert never[-1].after.tokens[0, 1:].tolist() == [EOT] * 2


def test_eos_last_commits_end_tokens_when_nothing_else_is_left():
    """Tokens do not change; end tokens have confidence 0, others one without end tokens (LLaDA)."""
    logits = ending_model(6)
    logits[4, 5] = 9.0  # one position that wants to go on
    logits[2, EOT] = 0  # and one that wants eos
    free = fill(fixed_model(logits), [[1]], new_tokens=5, end_ids=(EOS, EOT))
    last = fill(fixed_model(logits), [[1]], new_tokens=5, end_ids=(EOS, EOT), eos="last")
    assert free[-1].after.tokens.tolist() == last[-1].after.tokens.tolist() == [[1, EOT, EOS, EOT, 5, EOT]]
    assert positions(last) == [[4], [1], [2], [3], [5]]
    p = logits.clone()
    p[:, [EOS, EOT]] = -torch.inf
    torch.testing.assert_close(last[0].commits.confidence, p.softmax(-1)[4, 5:6])
    assert all(step.commits.confidence.tolist() == [0.0] for step in last[1:])


def test_eos_last_commits_an_end_token_last_when_it_is_the_only_choice():
    logits = torch.zeros(4, VOCABULARY)
    logits[1, EOS], logits[2, 5], logits[3, 5] = 9, 2, 1
    given = {"confidence_from": "drawn", "top_k": 1, "eos": "last", "end_ids": (EOS,)}
    steps = fill(fixed_model(logits), [[1]], new_tokens=3, **given)
    assert positions(steps)[-1] == [1]


def test_a_sample_ends_at_an_end_token_with_no_mask_before_it():
    """Position 3 becomes an end token first, but 1 and 2 are still masked."""
    logits = torch.zeros(7, VOCABULARY)
    for position, token, sure in [(3, EOS, 9.0), (2, 5, 8.0), (1, 5, 7.0), (4, 5, 6.0), (5, 5, 5.0), (6, 5, 4.0)]:
        logits[position, token] = sure
    steps = fill(fixed_model(logits), [[1]], new_tokens=6, end_ids=(EOT, EOS), stop=True)
    assert positions(steps) == [[3], [2], [1]]
    assert steps[-1].after.tokens[0].tolist() == [1, 5, 5, EOS, MASK, MASK, MASK]
    assert steps[-1].after.masked[0].tolist() == [False] * 4 + [True] * 3
    assert len(fill(fixed_model(logits), [[1]], new_tokens=6, end_ids=(EOT, EOS))) == 6  # only with stop


def test_end_tokens_in_the_prompt_do_not_end_a_sample():
    logits = torch.zeros(5, VOCABULARY)
    logits[:, 5] = 1
    steps = fill(fixed_model(logits), [[EOS, EOS]], new_tokens=3, end_ids=(EOS,), stop=True)
    assert not steps[-1].after.masked.any()


def test_an_ended_sample_does_not_change_while_the_others_continue():
    def forward(canvas, rows):
        logits = torch.zeros(*canvas.tokens.shape, VOCABULARY)
        logits[0, :, EOS], logits[1, :, 5] = 9, 9
        return logits[:, rows]

    steps = fill(forward, [[1], [1, 2]], new_tokens=4, block=2, end_ids=(EOS,), stop=True)
    assert [step.before.active.tolist() for step in steps] == [[True, True]] + [[False, True]] * 3
    assert [step.before.block[0].tolist() for step in steps] == [[2, 4]] + [[-1, -1]] * 3
    assert [step.before.block[1].tolist() for step in steps] == [[2, 4]] * 2 + [[4, 6]] * 2
    assert all(step.after.tokens[0].tolist() == [0, 1, EOS, MASK, MASK, MASK] for step in steps)
    assert all(step.commits.sample.tolist() == [1] for step in steps[1:])


def test_samples_with_fewer_masks_are_done_earlier():
    steps = fill(random_model(0), [[1, MASK, MASK], [2]], new_tokens=2)
    assert [step.before.active.tolist() for step in steps] == [[True, True]] * 2 + [[True, False]] * 2
    assert [len(select_sample(step.commits, 0)) for step in steps] == [1] * 4
    assert torch.equal(steps[-1].after.tokens[1], steps[1].after.tokens[1])


def test_a_mask_in_the_prompt_keeps_a_sample_from_ending():
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 5], logits[3, EOS] = 1, 9
    steps = fill(fixed_model(logits), [[1, MASK, 2]], new_tokens=3, end_ids=(EOS,), stop=True)
    assert steps[-1].after.tokens[0, 1] == 5
