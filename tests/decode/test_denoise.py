"""Denoising commits what LLaDA's rule commits, a batch what its samples would alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from floatscope.decode import canvas_of, denoise
from floatscope.errors import UserError
from floatscope.values import CanvasState, Regions, State

MASK, VOCABULARY = 19, 20


def random_model(seed: int, never_mask: bool = True):
    """Logits that depend on every token of a row and on nothing else, wherever the row stands in the batch."""
    noise = torch.Generator().manual_seed(seed)
    table = torch.randn(64, VOCABULARY, VOCABULARY, generator=noise)

    def forward(canvas: CanvasState) -> torch.Tensor:
        logits = torch.zeros(*canvas.tokens.shape, VOCABULARY)
        for b, (tokens, valid) in enumerate(zip(canvas.tokens, canvas.valid, strict=True)):
            own = tokens[valid]
            whole = torch.stack([table[i, t] for i, t in enumerate(own)]).sum(0)
            rows = torch.stack([table[(i + 7) % 64, t] for i, t in enumerate(own)])
            logits[b, valid] = rows * 3 + whole
        if never_mask:
            logits[..., MASK] = -100.0
        return logits

    return forward


def official(forward, tokens: torch.Tensor, steps: int, shift: bool = False):
    """LLaDA's `generate.py` restated for one sequence: temperature 0, one block, low-confidence remasking.

    The shares are fixed before the first step (`get_num_transfer_tokens`), the masks are looked up at every step.
    """
    x = tokens.clone()
    count = int((x == MASK).sum())
    shares = [count // steps + (1 if i < count % steps else 0) for i in range(steps)]
    history = []
    for share in shares:
        states = torch.full_like(x, int(State.PROMPT))
        logits = forward(CanvasState(x[None], states[None]))[0]
        if shift:
            logits = torch.cat([logits[:1], logits[:-1]])
        p = torch.softmax(logits.double(), -1)
        confidence = {}
        for i in range(len(x)):
            if x[i] == MASK:
                confidence[i] = float(p[i].max())
        for i in sorted(confidence, key=lambda i: -confidence[i])[:share]:
            x[i] = int(logits[i].argmax())
        history.append(x.clone())
    return history


@settings(max_examples=40)
@given(st.integers(0, 99), st.integers(0, 8), st.integers(1, 12), st.integers(1, 14), st.booleans())
def test_the_commits_are_lladas(seed, prompt, new, steps, shift):
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MASK, (prompt,), generator=noise).tolist()
    forward = random_model(seed)
    canvas = canvas_of([ids], new, MASK)
    got = [step.after.tokens[0] for step in denoise(forward, canvas, mask_id=MASK, steps=steps, shift=shift)]
    want = official(forward, canvas.tokens[0], steps, shift)
    assert len(got) == steps
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@settings(max_examples=15)
@given(st.integers(0, 99), st.integers(1, 10), st.integers(1, 10))
def test_a_model_that_commits_masks_is_followed_like_the_official_loop(seed, new, steps):
    forward = random_model(seed, never_mask=False)
    canvas = canvas_of([[1, 2]], new, MASK)
    got = [step.after.tokens[0] for step in denoise(forward, canvas, mask_id=MASK, steps=steps)]
    assert all(torch.equal(a, b) for a, b in zip(got, official(forward, canvas.tokens[0], steps), strict=True))


@settings(max_examples=25)
@example(0, [0, 3], 3, 2, True, False)  # a sample whose first position is masked, beside a longer one
@given(
    st.integers(0, 99),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 10),
    st.booleans(),
    st.booleans(),
)
def test_a_batch_commits_what_its_samples_commit_alone(seed, lengths, new, steps, shift, infilling):
    noise = torch.Generator().manual_seed(seed)
    high = MASK + 1 if infilling else MASK
    prompts = [torch.randint(0, high, (n,), generator=noise).tolist() for n in lengths]
    forward = random_model(seed)
    settings_ = {"mask_id": MASK, "steps": steps, "shift": shift}
    together = list(denoise(forward, canvas_of(prompts, new, MASK), **settings_))
    for b, prompt in enumerate(prompts):
        alone = list(denoise(forward, canvas_of([prompt], new, MASK), **settings_))
        for got, want in zip(together, alone, strict=True):
            valid, offset = got.after.valid[b], int((~got.after.valid[b]).sum())
            assert torch.equal(got.after.tokens[b, valid], want.after.tokens[0])
            assert torch.equal(got.after.states[b, valid], want.after.states[0])
            mine = got.commits.sample == b
            assert (got.commits.position[mine] - offset).tolist() == want.commits.position.tolist()
            assert (got.commits.row[mine] - offset).tolist() == want.commits.row.tolist()
            torch.testing.assert_close(got.commits.confidence[mine], want.commits.confidence)


def test_the_first_steps_take_the_remainder():
    canvas = canvas_of([[1], [1, 2, 3]], 7, MASK)
    sizes = [len(step.commits) for step in denoise(random_model(0), canvas, mask_id=MASK, steps=3)]
    assert sizes == [6, 4, 4]  # 3 + 2 + 2, in both rows


def test_more_steps_than_masks_leave_the_last_ones_empty():
    steps = list(denoise(random_model(0), canvas_of([[1]], 2, MASK), mask_id=MASK, steps=4))
    assert [len(step.commits) for step in steps] == [1, 1, 0, 0]
    assert [step.before.step for step in steps] == [0, 1, 2, 3]


def test_a_step_keeps_the_canvas_the_model_saw():
    canvas = canvas_of([[1, 2]], 4, MASK)
    steps = list(denoise(random_model(1), canvas, mask_id=MASK, steps=2))
    assert torch.equal(steps[0].before.tokens, canvas.tokens)
    assert torch.equal(steps[1].before.tokens, steps[0].after.tokens)
    for step in steps:
        written = step.before.tokens != step.after.tokens
        assert written.nonzero()[:, 1].tolist() == sorted(step.commits.position.tolist())
        assert torch.equal(step.after.states[written], torch.full((2,), int(State.COMMITTED)))
        assert torch.equal(step.before.states[written], torch.full((2,), int(State.MASKED)))
        assert torch.equal(step.after.tokens[step.commits.sample, step.commits.position], step.commits.token)


@pytest.mark.parametrize("shift", [False, True])
def test_the_predicting_row_decides_the_position(shift):
    canvas = canvas_of([[1, 2, 3]], 5, MASK)
    forward = random_model(2)
    for step in denoise(forward, canvas, mask_id=MASK, steps=5, shift=shift):
        c = step.commits
        assert torch.equal(c.row, c.position - 1 if shift else c.position)
        p = forward(step.before).softmax(-1)[0, c.row]
        assert torch.equal(p.argmax(-1), c.token)
        torch.testing.assert_close(p.max(-1).values, c.confidence)


def test_the_first_position_of_a_shifted_model_is_decided_by_its_own_row_under_padding_too():
    """There is no row before it: the first valid one stands in, never a row of padding."""
    canvas = canvas_of([[MASK, 2], [1, 2, 3, 4]], 1, MASK)
    first = next(iter(denoise(random_model(3), canvas, mask_id=MASK, steps=1, shift=True)))
    at_start = (first.commits.sample == 0) & (first.commits.position == 2)
    assert first.commits.row[at_start].tolist() == [2]


def test_masks_in_the_prompt_are_part_of_the_canvas():
    canvas = canvas_of([[1, MASK, 3]], 2, MASK)
    assert canvas.states[0].tolist() == [State.PROMPT, State.MASKED, State.PROMPT, State.MASKED, State.MASKED]
    *_, last = denoise(random_model(0), canvas, mask_id=MASK, steps=3)
    assert not (last.after.tokens == MASK).any()
    assert last.after.tokens[0, [0, 2]].tolist() == [1, 3]


def test_prompts_are_padded_on_the_left():
    canvas = canvas_of([[1, 2, 3], [4]], 2, MASK)
    assert canvas.valid.tolist() == [[True] * 5, [False, False, True, True, True]]
    assert canvas.tokens[1, 2:].tolist() == [4, MASK, MASK]
    assert not canvas.masked[1, :2].any()


def test_confidence_is_fp32_whatever_the_logits_are():
    """bf16 confidences tie, and ties are broken by the device."""
    base = random_model(4)
    canvas = canvas_of([[1, 2]], 6, MASK)
    got = list(denoise(lambda c: base(c).bfloat16(), canvas, mask_id=MASK, steps=6))
    want = list(denoise(lambda c: base(c).bfloat16().float(), canvas, mask_id=MASK, steps=6))
    assert [s.commits.position.tolist() for s in got] == [s.commits.position.tolist() for s in want]
    assert all(s.commits.confidence.dtype == torch.float32 for s in got)


def test_regions_travel_with_the_canvas():
    regions = Regions.from_spans([{"prompt": [(0, 2)]}], 5)
    canvas = canvas_of([[1, 2]], 3, MASK, regions=regions)
    assert all(step.after.regions is regions for step in denoise(random_model(0), canvas, mask_id=MASK, steps=2))


def test_regions_of_another_size_are_refused():
    regions = Regions.from_spans([{"prompt": [(0, 2)]}], 4)
    with pytest.raises(UserError, match=r"regions are for 1 canvases of 4 positions, and there are 1 of 5"):
        canvas_of([[1, 2]], 3, MASK, regions=regions)


def test_an_empty_canvas_is_refused():
    with pytest.raises(UserError, match="at least one prompt and one new token, got 0 and 4"):
        canvas_of([], 4, MASK)
    with pytest.raises(UserError, match="at least one prompt and one new token, got 1 and 0"):
        canvas_of([[1]], 0, MASK)


def test_no_steps_are_refused():
    with pytest.raises(UserError, match="steps must be at least 1, got 0"):
        list(denoise(random_model(0), canvas_of([[1]], 2, MASK), mask_id=MASK, steps=0))


def test_the_callers_canvas_is_left_alone():
    canvas = canvas_of([[1, 2]], 4, MASK)
    before = replace(canvas, tokens=canvas.tokens.clone(), states=canvas.states.clone())
    list(denoise(random_model(0), canvas, mask_id=MASK, steps=4))
    assert torch.equal(canvas.tokens, before.tokens)
    assert torch.equal(canvas.states, before.states)
