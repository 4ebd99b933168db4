"""Teacher forcing: targets are written when the model's own proposals are committed, with the targets' probability."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import MASK, VOCABULARY, best, compute_logits, fill, random_model, select_sample, softmax

from example_counts import examples
from floatscope.canvas import Step, build_canvas
from floatscope.sampling import SAMPLERS, autoregress
from floatscope.sampling.settings import resolve_sampling
from floatscope.schema import Paradigm

FIELDS = ("sample", "position", "row", "token", "confidence")
PACES = [{"sampler": name} for name in SAMPLERS if name != "pc"]
SETTINGS = [*PACES, {"block": 3, "steps": 4}, {"steps": 2}, {"guidance": 1.0}, {"eos": "last", "end_ids": (3, 7)}]


def ids(seed: int, length: int) -> list[int]:
    return torch.randint(0, MASK, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_reference(forward, prompt, answer, steps, block, shift):
    """A plain loop over one canvas, the most confident proposals of a block first.

    Returns the canvas and the probabilities of the written tokens by position, after every step.
    """
    x, start, history = [*prompt, *[MASK] * len(answer)], len(prompt), []
    each = steps // (len(answer) // block)
    for lo in range(start, start + len(answer), block):
        for i in range(min(each, block)):
            logits = compute_logits(forward, x)
            rows = {p: softmax(logits[max(p - 1, 0) if shift else p]) for p in range(lo, lo + block) if x[p] == MASK}
            share = block // each + (i < block % each)
            written = {}
            for p in best({p: max(row) for p, row in rows.items()}, share):
                x[p] = answer[p - start]
                written[p] = rows[p][x[p]]
            history.append((list(x), written))
    return history


@examples(40)
@given(st.integers(0, 99), st.integers(0, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_commits_equal_those_of_the_reference_loop(seed, prompt, block, blocks, each, shift):
    start, answer, forward = ids(seed, prompt), ids(seed + 500, block * blocks), random_model(seed)
    given = {"new_tokens": len(answer), "block": block, "steps": each * blocks, "shift": shift}
    got = fill(forward, [start], target_ids=torch.tensor([answer]), **given)
    want = run_reference(forward, start, answer, each * blocks, block, shift)
    assert [step.after.tokens[0].tolist() for step in got] == [x for x, _ in want]
    for step, (_, written) in zip(got, want, strict=True):
        assert step.commits.position.tolist() == sorted(written)
        assert step.commits.confidence.tolist() == pytest.approx([written[p] for p in sorted(written)], rel=1e-5)
    assert got[-1].after.tokens[0, prompt:].tolist() == answer


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("shift", [False, True])
def test_a_batch_commits_the_same_as_its_samples_alone(sampling, shift):
    forward, prompts, names = random_model(7), [ids(n, n) for n in (5, 2, 8)], ["a", "b", "c"]
    target_ids = torch.tensor([ids(30 + b, 6) for b in range(3)])
    sampling = {"new_tokens": 6, "shift": shift, **sampling}
    batched = fill(forward, prompts, samples=names, target_ids=target_ids, **sampling)
    assert torch.equal(batched[-1].after.tokens[:, -6:], target_ids)
    for b, prompt in enumerate(prompts):
        alone = fill(forward, [prompt], samples=names[b : b + 1], target_ids=target_ids[b : b + 1], **sampling)
        assert sum(len(step.commits) for step in alone) == 6
        for got, want in zip(batched, alone, strict=False):  # one that is done waits for the others
            mine = select_sample(got.commits, b)
            assert torch.equal(mine.position - (8 - len(prompt)), want.commits.position)
            torch.testing.assert_close(mine.confidence, want.commits.confidence, rtol=1e-5, atol=1e-7)


def same(one: list[Step], other: list[Step]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.before.tokens, b.before.tokens)
        assert all(torch.equal(getattr(a.commits, name), getattr(b.commits, name)) for name in FIELDS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_targets_equal_to_the_own_answer_change_nothing(sampling, temperature):
    prompts = [ids(1, 5), ids(2, 3)]
    sampling = {"new_tokens": 6, "temperature": temperature, **sampling}
    free = fill(random_model(3), prompts, **sampling)
    same(free, fill(random_model(3), prompts, target_ids=free[-1].after.tokens[:, -6:], **sampling))


def test_the_order_does_not_depend_on_the_targets():
    """The most confident proposals are committed first, although other tokens are written."""
    free = fill(random_model(5), [[1, 2]], new_tokens=8, steps=4)
    with_targets = fill(random_model(5), [[1, 2]], new_tokens=8, steps=4, target_ids=torch.tensor([ids(9, 8)]))
    first, other = free[0].commits, with_targets[0].commits
    assert torch.equal(first.position, other.position)
    assert not torch.equal(first.token, other.token)
    assert (other.confidence < first.confidence).all()


def test_targets_do_not_touch_the_suffix():
    steps = fill(random_model(5), [[1, 2], [3]], new_tokens=3, suffix=(4, 5), target_ids=torch.tensor([[6, 7, 8]] * 2))
    assert steps[-1].after.tokens[:, 2:].tolist() == [[6, 7, 8, 4, 5]] * 2


# ---- autoregressive


PROMPTS, DRAWN = [[1, 2], [9]], {"temperature": 0.7, "top_k": 5, "confidence_from": "drawn"}


def generate(logits, target_ids=None, **given) -> list[Step]:
    """Run a model whose next token's logits are a row of [vocabulary, vocabulary], indexed by the last token."""
    sampling = resolve_sampling(Paradigm.ARM, stop=False, **given)
    canvas = build_canvas(PROMPTS, sampling.new_tokens, None)
    return list(
        autoregress(lambda c, rows: logits[c.tokens[:, rows]], canvas, sampling, end_ids=(3,), target_ids=target_ids)
    )


def test_an_autoregressive_model_scores_the_next_target():
    logits = torch.randn(VOCABULARY, VOCABULARY)
    target_ids = torch.tensor([[4, 3, 5, 6], [3, 3, 3, 3]])
    steps = generate(logits, target_ids, new_tokens=4)
    assert torch.equal(steps[-1].after.tokens[:, 2:], target_ids)
    before = torch.cat([torch.tensor([[2], [9]]), target_ids[:, :-1]], 1)
    want = logits.double().log_softmax(-1)[before, target_ids].exp().float()
    torch.testing.assert_close(torch.stack([step.commits.confidence for step in steps], 1), want)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, DRAWN], ids=str)
def test_targets_equal_to_the_autoregressive_answer_change_nothing(sampling):
    logits = torch.randn(VOCABULARY, VOCABULARY)
    free = generate(logits, new_tokens=7, **sampling)
    same(free, generate(logits, free[-1].after.tokens[:, -7:], new_tokens=7, **sampling))
