"""Forced tokens are written when the model's own proposals say so, with the probability the model gave them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import MASK, VOCABULARY, best, filled, of_sample, random_model, softmax, whole

from floatscope.canvas import Step, build_canvas
from floatscope.sampling import SAMPLERS, autoregress
from floatscope.sampling.settings import resolve_sampling

FIELDS = ("sample", "position", "row", "token", "confidence")
PACES = [{"sampler": name} for name in SAMPLERS if name != "pc"]
SETTINGS = [*PACES, {"block": 3, "steps": 4}, {"steps": 2}, {"guidance": 1.0}, {"eos": "last", "end_ids": (3, 7)}]


def ids(seed: int, length: int) -> list[int]:
    return torch.randint(0, MASK, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def slowly(forward, prompt, answer, steps, block, shift):
    """One canvas, the surest masks of its block first by what the model would say: the canvas and the probabilities of
    the written tokens by position, after every step."""
    x, start, history = [*prompt, *[MASK] * len(answer)], len(prompt), []
    each = steps // (len(answer) // block)
    for lo in range(start, start + len(answer), block):
        for i in range(min(each, block)):
            logits = whole(forward, x)
            rows = {p: softmax(logits[max(p - 1, 0) if shift else p]) for p in range(lo, lo + block) if x[p] == MASK}
            share = block // each + (i < block % each)
            written = {}
            for p in best({p: max(row) for p, row in rows.items()}, share):
                x[p] = answer[p - start]
                written[p] = rows[p][x[p]]
            history.append((list(x), written))
    return history


@settings(max_examples=40)
@given(st.integers(0, 99), st.integers(0, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_the_slow_loop_writes_the_same_at_the_same_steps(seed, prompt, block, blocks, each, shift):
    start, answer, forward = ids(seed, prompt), ids(seed + 500, block * blocks), random_model(seed)
    given = {"new_tokens": len(answer), "block": block, "steps": each * blocks, "shift": shift}
    got = filled(forward, [start], forced=torch.tensor([answer]), **given)
    want = slowly(forward, start, answer, each * blocks, block, shift)
    assert [step.after.tokens[0].tolist() for step in got] == [x for x, _ in want]
    for step, (_, written) in zip(got, want, strict=True):
        assert step.commits.position.tolist() == sorted(written)
        assert step.commits.confidence.tolist() == pytest.approx([written[p] for p in sorted(written)], rel=1e-5)
    assert got[-1].after.tokens[0, prompt:].tolist() == answer


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("shift", [False, True])
def test_a_batch_gives_what_its_samples_give_alone(how, shift):
    forward, prompts, names = random_model(7), [ids(n, n) for n in (5, 2, 8)], ["a", "b", "c"]
    forced = torch.tensor([ids(30 + b, 6) for b in range(3)])
    how = {"new_tokens": 6, "shift": shift, **how}
    together = filled(forward, prompts, samples=names, forced=forced, **how)
    assert torch.equal(together[-1].after.tokens[:, -6:], forced)
    for b, prompt in enumerate(prompts):
        alone = filled(forward, [prompt], samples=names[b : b + 1], forced=forced[b : b + 1], **how)
        assert sum(len(step.commits) for step in alone) == 6
        for got, want in zip(together, alone, strict=False):  # one that is done waits for the others
            mine = of_sample(got.commits, b)
            assert torch.equal(mine.position - (8 - len(prompt)), want.commits.position)
            torch.testing.assert_close(mine.confidence, want.commits.confidence, rtol=1e-5, atol=1e-7)


def same(one: list[Step], other: list[Step]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.before.tokens, b.before.tokens)
        assert all(torch.equal(getattr(a.commits, name), getattr(b.commits, name)) for name in FIELDS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_forcing_what_it_would_say_changes_nothing(how, temperature):
    prompts = [ids(1, 5), ids(2, 3)]
    how = {"new_tokens": 6, "temperature": temperature, **how}
    free = filled(random_model(3), prompts, **how)
    same(free, filled(random_model(3), prompts, forced=free[-1].after.tokens[:, -6:], **how))


def test_the_order_is_the_models_own_whatever_is_forced():
    """The surest proposals of the first step are committed first, though other tokens are written."""
    free = filled(random_model(5), [[1, 2]], new_tokens=8, steps=4)
    forced = filled(random_model(5), [[1, 2]], new_tokens=8, steps=4, forced=torch.tensor([ids(9, 8)]))
    first, other = free[0].commits, forced[0].commits
    assert torch.equal(first.position, other.position)
    assert not torch.equal(first.token, other.token)
    assert (other.confidence < first.confidence).all()


def test_what_stands_behind_the_answer_stays():
    steps = filled(random_model(5), [[1, 2], [3]], new_tokens=3, suffix=(4, 5), forced=torch.tensor([[6, 7, 8]] * 2))
    assert steps[-1].after.tokens[:, 2:].tolist() == [[6, 7, 8, 4, 5]] * 2


# ---- from left to right


PROMPTS, DRAWN = [[1, 2], [9]], {"temperature": 0.7, "top_k": 5, "judged": "drawn"}


def continued(logits, forced=None, **given) -> list[Step]:
    """By a model whose next token's logits are a row of [vocabulary, vocabulary], chosen by the last token."""
    how = resolve_sampling("arm", stop=False, **given)
    canvas = build_canvas(PROMPTS, how.new_tokens, None)
    return list(autoregress(lambda c, rows: logits[c.tokens[:, rows]], canvas, how, end_ids=(3,), forced=forced))


def test_an_autoregressive_model_is_asked_for_the_next_forced_token():
    logits = torch.randn(VOCABULARY, VOCABULARY)
    forced = torch.tensor([[4, 3, 5, 6], [3, 3, 3, 3]])
    steps = continued(logits, forced, new_tokens=4)
    assert torch.equal(steps[-1].after.tokens[:, 2:], forced)
    before = torch.cat([torch.tensor([[2], [9]]), forced[:, :-1]], 1)
    want = logits.double().log_softmax(-1)[before, forced].exp().float()
    torch.testing.assert_close(torch.stack([step.commits.confidence for step in steps], 1), want)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}, DRAWN], ids=str)
def test_forcing_what_an_autoregressive_model_would_say_changes_nothing(how):
    logits = torch.randn(VOCABULARY, VOCABULARY)
    free = continued(logits, new_tokens=7, **how)
    same(free, continued(logits, free[-1].after.tokens[:, -7:], new_tokens=7, **how))
