"""Randomness is a function of (seed, sample, step, purpose, counter): uniform, independent and pinned."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from floatscope.sampling.randomness import gumbel, step_keys, uniform

WORD = 2**64


def splitmix(key: int, counter: int) -> int:
    """The 64 bits of splitmix64 that belong to a key and a counter, in Python's own integers."""
    x = (key + (counter + 1) * 0x9E3779B97F4A7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def key_for(bits: int) -> int:
    """The key whose number for counter 0 is made of these 64 bits (the inverse of the generator)."""

    def invert_shift(y: int, shift: int) -> int:
        x = y
        for _ in range(64 // shift + 1):
            x = y ^ (x >> shift)
        return x

    x = invert_shift(bits, 31) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    x = invert_shift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    key = (invert_shift(x, 30) - 0x9E3779B97F4A7C15) % WORD
    return key - WORD if key >= WORD // 2 else key


def test_a_key_is_the_hash_of_seed_sample_step_and_purpose():
    digest = hashlib.sha256(b"7\0nq-1\x003\0token").digest()
    assert step_keys(7, ["nq-1"], 3, "token").tolist() == [int.from_bytes(digest[:8], "little", signed=True)]


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_numbers_are_splitmix64s(key):
    counters = [0, 1, 2, 151_664, 511 * 2**32 + 151_664]
    got = uniform(torch.tensor(key), torch.tensor(counters)).tolist()
    assert got == pytest.approx([splitmix(key, c) / WORD for c in counters], abs=2**-52)


def test_random_numbers_are_pinned():
    """A change here changes every run that was ever made with a temperature."""
    assert step_keys(0, ["0", "nq-1"], 0, "token").tolist() == [-5642152551759959493, -3369842250914704929]
    assert step_keys(0, ["0", "nq-1"], 0, "order").tolist() == [2524201272081337476, 6334602461758230349]
    keys = step_keys(0, ["0"], 0, "token")
    assert uniform(keys, torch.arange(4)).tolist() == pytest.approx(
        [0.3331244758693129, 0.7012445001694305, 0.4410995439491013, 0.16501466821132854], abs=1e-15
    )
    assert gumbel(keys, torch.arange(2)).tolist() == pytest.approx([-0.0946181744590164, 1.0359229807579229], abs=1e-12)


def numbers(samples=400, steps=1, purpose="token", counters=250, seed=0) -> torch.Tensor:
    keys = torch.stack([step_keys(seed, [f"s{i}" for i in range(samples)], s, purpose) for s in range(steps)])
    return uniform(keys[..., None], torch.arange(counters))


def test_numbers_are_uniform_between_0_and_1():
    u = numbers().flatten()
    assert u.dtype == torch.float64
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    n = len(u)
    assert abs(u.mean() - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    cells = torch.histc(u.float(), 50, 0, 1)
    assert ((cells - n / 50) ** 2 / (n / 50)).sum() < 85.4  # 99.9 % of χ² with 49 degrees of freedom


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_numbers_of_neighbouring_counters_steps_samples_seeds_and_purposes_are_uncorrelated():
    u = numbers(steps=2)
    pairs = {
        "positions": (u[..., :-1], u[..., 1:]),
        "steps": (u[0], u[1]),
        "samples": (u[:, :-1], u[:, 1:]),
        "seeds": (u[0], numbers(seed=1)[0]),
        "purposes": (u[0], numbers(purpose="order")[0]),
    }
    for what, (a, b) in pairs.items():
        assert not torch.equal(a, b), what
        assert abs(correlation(a, b)) < 4 / math.sqrt(a.numel()), what


def test_counters_of_a_wide_vocabulary_do_not_collide():
    """position · 2³² + token: no two share a number."""
    keys = step_keys(0, ["s"], 0, "token")
    at = torch.arange(40)[:, None] * 2**32 + torch.arange(3000)
    assert len(uniform(keys, at.flatten()).unique()) == at.numel()


def test_a_number_does_not_depend_on_the_batch_or_the_memory_layout():
    names = [f"s{i}" for i in range(7)]
    keys, at = step_keys(3, names, 5, "order"), torch.arange(11)
    grid = uniform(keys[:, None], at)
    for b, name in enumerate(names):
        own = step_keys(3, [name], 5, "order")
        assert torch.equal(own, keys[b : b + 1])
        assert torch.equal(uniform(own, at), grid[b])
    turned = uniform(keys, at[:, None])  # the other way round in memory
    assert torch.equal(turned, grid.T)
    backwards = uniform(keys.flip(0)[::2, None], at.flip(0))
    assert torch.equal(backwards, grid.flip(0, 1)[::2])
    one = torch.stack([uniform(keys[b], at[p]) for b in range(7) for p in range(11)])
    assert torch.equal(one, grid.flatten())


def test_keys_of_similar_names_and_numbers_differ():
    """(1, "1", …) and (11, "", …) are different keys."""
    keys = [step_keys(*k, "token")[0].item() for k in [(1, ["1"], 1), (11, [""], 1), (1, [""], 11), (1, ["11"], 1)]]
    assert len(set(keys)) == 4
    assert step_keys(0, ["Grüße", "\N{GRINNING FACE}"], 0, "token").shape == (2,)


@pytest.mark.parametrize("bits", [0, 2**63, WORD - 2**12, WORD - 2**13])
def test_the_interval_is_open(bits):
    u = uniform(torch.tensor(key_for(bits)), torch.tensor(0))
    assert 0 < float(u) < 1
    assert gumbel(torch.tensor(key_for(bits)), torch.tensor(0)).isfinite()


def test_the_largest_number_is_below_1():
    u = uniform(torch.tensor(key_for(WORD - 1)), torch.tensor(0))
    assert float(u) < 1


def test_the_largest_of_logits_and_gumbel_noise_is_a_draw_from_softmax():
    logits = torch.tensor([0.0, 1.0, 2.5, -1.0, 0.3, 1.7], dtype=torch.float64)
    draws = 20_000
    keys = step_keys(2, [f"s{i}" for i in range(draws)], 0, "token")
    sampled = (logits + gumbel(keys[:, None], torch.arange(6))).argmax(-1)
    want = logits.softmax(-1) * draws
    assert ((sampled.bincount(minlength=6) - want) ** 2 / want).sum() < 20.5  # 99.9 %, 5 degrees of freedom


def test_gumbel_noise_has_gumbels_mean_and_variance():
    g = gumbel(step_keys(0, [f"s{i}" for i in range(200)], 0, "order")[:, None], torch.arange(250))
    assert abs(g.mean() - 0.5772156649) < 4 * math.sqrt(math.pi**2 / 6 / g.numel())
    assert abs(g.var() - math.pi**2 / 6) < 0.05
