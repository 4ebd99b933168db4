"""Each rule commits what its paper says, checked against slow loops over Python floats."""

from __future__ import annotations

import json
import math
from itertools import combinations

import pytest
import torch
from toys import MASK, VOCABULARY, best, compute_logits, fill, fixed_model, positions, random_model, softmax

from floatscope.errors import UserError
from floatscope.sampling import SAMPLERS
from floatscope.sampling.denoising import KLHistory
from floatscope.sampling.proposal import filter_logits, propose_tokens
from floatscope.sampling.randomness import gumbel, step_keys, uniform
from floatscope.sampling.settings import Sampling

SEEDS = range(5)
PROMPT = [4, 9, 2]
BLOCKS = [(8, None), (9, 3)]  # new tokens, block


def run_reference(rule, forward, new, block=None, steps=None, shift=False):
    """The commits of every step of one sample. `rule(p, share, state)` gets {position: distribution} of the block's
    masks, the schedule's share, and a dict that lives as long as the run; it returns the positions to commit.
    """
    x = [*PROMPT, *[MASK] * new]
    block = block or new
    state: dict = {"step": 0}
    history = []
    for start in range(len(PROMPT), len(x), block):
        masks = x[start : start + block].count(MASK)
        each = steps // (new // block) if steps else masks
        state |= {"start": start, "in_block": 0}
        while MASK in x[start : start + block] and state["in_block"] < max(each, masks):
            logits = compute_logits(forward, x, state["step"])
            if shift:
                logits = [logits[0], *logits[:-1]]
            state["all"] = {p: softmax(logits[p]) for p in range(len(x)) if x[p] == MASK}
            these = {p: d for p, d in state["all"].items() if start <= p < start + block}
            share = masks // each + (state["in_block"] < masks % each)
            chosen = sorted(rule(these, share, state))
            for p in chosen:
                x[p] = these[p].index(max(these[p]))
            history.append(chosen)
            state["step"] += 1
            state["in_block"] += 1
    return history, x


def entropy(p: list[float]) -> float:
    return -sum(q * math.log(q) for q in p if q > 0)


def lead(p: list[float]) -> float:
    first, second = sorted(p, reverse=True)[:2]
    return first - second


def same(sampler_text, rule, seed, new, block, steps=None, shift=False):
    forward = random_model(seed)
    got = fill(forward, [PROMPT], new_tokens=new, block=block, steps=steps, shift=shift, sampler=sampler_text)
    want, tokens = run_reference(rule, forward, new, block, steps, shift)
    assert positions(got) == want
    assert got[-1].after.tokens[0].tolist() == tokens
    return want


# ---- samplers that follow the schedule


SCORES = {"confidence": max, "margin": lead, "entropy": lambda p: -entropy(p)}


@pytest.mark.parametrize("sampler", SCORES)
@pytest.mark.parametrize(("new", "block"), BLOCKS)
@pytest.mark.parametrize("per_block", [None, 1, 2])
def test_the_best_score_is_committed_first(sampler, new, block, per_block):
    steps = per_block and per_block * (new // block if block else 1)
    for seed in SEEDS:
        same(
            sampler,
            lambda these, share, _: best({p: SCORES[sampler](d) for p, d in these.items()}, share),
            seed,
            new,
            block,
            steps,
            shift=seed % 2 == 1,
        )


def test_the_three_scores_give_different_orders():
    runs = [positions(fill(random_model(0), [PROMPT], new_tokens=8, sampler=s)) for s in SCORES]
    assert len({str(run) for run in runs}) == 3


@pytest.mark.parametrize("sampler", [*SCORES, "threshold", "factor", "eb", "klass"])
def test_equal_scores_go_by_position(sampler):
    logits = torch.zeros(7, VOCABULARY)
    logits[:, 5] = 0.5
    assert positions(fill(fixed_model(logits), [[1]], new_tokens=6, sampler=sampler)) == [[p] for p in range(1, 7)]


def test_random_orders_positions_by_their_uniform_numbers():
    """The confidences are still the model's."""
    forward = random_model(0)
    steps = fill(forward, [PROMPT], samples=["s"], new_tokens=8, steps=4, sampler="random", seed=3)
    masked = list(range(3, 11))
    for number, step in enumerate(steps):
        key = step_keys(3, ["s"], number, "order")[0]
        want = best({p: float(uniform(key, torch.tensor(p))) for p in masked}, 2)
        assert step.commits.position.tolist() == want
        p = forward(step.before, slice(0, 11))[0].softmax(-1)
        torch.testing.assert_close(step.commits.confidence, p[want].amax(-1))
        masked = [p for p in masked if p not in want]


def count_first_commits(draws: int, logits: torch.Tensor, **given) -> dict[tuple[int, ...], int]:
    """How often each set of positions is the first step's, over samples with different names."""
    steps = fill(fixed_model(logits), [[1]] * draws, samples=[f"s{i}" for i in range(draws)], **given)
    counts: dict[tuple[int, ...], int] = {}
    at = steps[0].commits
    sets: list[list[int]] = [[] for _ in range(draws)]
    for sample, position in zip(at.sample.tolist(), at.position.tolist(), strict=True):
        sets[sample].append(position)
    for one in sets:
        counts[tuple(one)] = counts.get(tuple(one), 0) + 1
    return counts


def chi_square(counts: dict, chances: dict, draws: int) -> float:
    assert set(counts) <= set(chances)
    return sum((counts.get(k, 0) - draws * p) ** 2 / (draws * p) for k, p in chances.items())


def test_random_selects_every_set_equally_often():
    draws, pairs = 1500, list(combinations(range(1, 5), 2))
    counts = count_first_commits(draws, torch.zeros(5, VOCABULARY), sampler="random", new_tokens=4, steps=2)
    assert chi_square(counts, dict.fromkeys(pairs, 1 / 6), draws) < 20.5  # 99.9 % of χ² with 5 degrees of freedom


def test_order_temperature_samples_without_replacement_in_proportion_to_exp_of_the_score():
    """Dream's alg_temp: multinomial(softmax(confidence / alg_temp), 2)."""
    logits = torch.zeros(5, VOCABULARY)
    logits[1:, 5] = torch.tensor([2.0, 3.0, 4.0, 5.0])
    draws, temperature = 2500, 0.4
    weight = dict(enumerate((logits.softmax(-1).amax(-1) / temperature).exp().tolist()))
    del weight[0]
    share = {p: w / sum(weight.values()) for p, w in weight.items()}
    chances = {
        (a, b): share[a] * share[b] / (1 - share[a]) + share[b] * share[a] / (1 - share[b])
        for a, b in combinations(share, 2)
    }
    counts = count_first_commits(draws, logits, new_tokens=4, steps=2, order_temperature=temperature)
    assert chi_square(counts, chances, draws) < 20.5
    assert max(chances.values()) > 3 * min(chances.values())  # and would not fit a uniform draw
    assert chi_square(counts, dict.fromkeys(chances, 1 / 6), draws) > 100


def test_a_low_order_temperature_commits_the_best_first():
    forward = random_model(1)
    cold, sure = (fill(forward, [PROMPT], new_tokens=8, order_temperature=t) for t in (1e-6, 0.0))
    assert positions(cold) == positions(sure)


@pytest.mark.parametrize("sampler", ["threshold", "factor", "eb", "klass"])
def test_order_temperature_is_refused_by_samplers_that_do_not_rank(sampler):
    with pytest.raises(UserError, match="order_temperature"):
        fill(random_model(0), [PROMPT], new_tokens=4, sampler=sampler, order_temperature=0.5)


# ---- Dream's time


def time_schedule(masks: int, steps: int) -> list[int]:
    """int(M·(1 − t'/t)) in fp32, what is left with the last."""
    t = torch.linspace(1, 1e-3, steps + 1, dtype=torch.float32)
    shares = []
    for i in range(steps):
        left = masks - sum(shares)
        if not left:
            break
        part = torch.tensor(float(left), dtype=torch.float32) * (1 - t[i + 1] / t[i])
        shares.append(left if i == steps - 1 else int(part))
    return shares


DREAMS = {  # read off Dream's own loop
    (8, 8): [0, 1, 1, 1, 1, 1, 1, 2],
    (16, 16): [0] + [1] * 14 + [2],
    (8, 4): [1, 2, 2, 3],
    (8, 16): [0] * 9 + [1] * 6 + [2],
    (5, 3): [1, 1, 3],
    (12, 7): [1, 1, 1, 2, 2, 2, 3],
}


@pytest.mark.parametrize(("masks", "steps"), DREAMS)
@pytest.mark.parametrize("sampler", ["confidence", "margin", "entropy", "random"])
def test_the_time_schedule_equals_dreams(masks, steps, sampler):
    got = fill(random_model(0), [PROMPT], new_tokens=masks, steps=steps, schedule="time", sampler=sampler)
    assert [len(step.commits) for step in got] == DREAMS[masks, steps] == time_schedule(masks, steps)


@pytest.mark.parametrize(("masks", "want"), [(9, [2, 3, 4]), (10, [2, 3, 5])])
def test_the_time_is_computed_in_fp32(masks, want):
    """Dream's own loop; doubles would give 2, 2, 5 and 3, 2, 5."""
    got = fill(random_model(0), [PROMPT], new_tokens=masks, steps=3, schedule="time", eps=0.1)
    assert [len(step.commits) for step in got] == want


@pytest.mark.parametrize("eps", [1e-3, 0.1, 1.0])
def test_the_time_schedule_ends_at_eps(eps):
    got = fill(random_model(0), [PROMPT], new_tokens=12, steps=6, schedule="time", eps=eps)
    t = torch.linspace(1, eps, 7)
    left, want = 12, []
    for i in range(6):
        want.append(left if i == 5 else int(torch.tensor(float(left)) * (1 - t[i + 1] / t[i])))
        left -= want[-1]
    assert [len(step.commits) for step in got] == want


def test_the_time_schedule_counts_each_sample_and_block_separately():
    prompts = [[1, MASK, MASK, 2], [3]]
    steps = fill(random_model(0), prompts, new_tokens=12, block=6, steps=8, schedule="time")
    counts = [[int((s.commits.sample == b).sum()) for s in steps] for b in range(2)]
    assert counts[0] == time_schedule(8, 4) + time_schedule(6, 4)
    assert counts[1] == time_schedule(6, 4) + time_schedule(6, 4)


@pytest.mark.parametrize("schedule", ["even", "time"])
def test_origin_commits_each_mask_with_the_probability_of_the_step(schedule):
    """u < 1 − t'/t for each position independently; the last step commits all."""
    steps = fill(random_model(0), [PROMPT], samples=["s"], new_tokens=12, steps=5, sampler="origin", schedule=schedule)
    t = torch.linspace(1, 1e-3, 6)
    masked = list(range(3, 15))
    for i, step in enumerate(steps):
        key = step_keys(0, ["s"], i, "order")[0]
        chance = float(1 - t[i + 1] / t[i])
        want = [p for p in masked if i == 4 or float(uniform(key, torch.tensor(p))) < chance]
        assert step.commits.position.tolist() == want
        masked = [p for p in masked if p not in want]
    assert not masked


def test_the_share_of_commits_of_origin_is_the_probability_of_the_step():
    draws, new = 500, 8
    given = {"sampler": "origin", "new_tokens": new, "steps": 5}
    steps = fill(fixed_model(torch.zeros(9, VOCABULARY)), [[1]] * draws, **given)
    t, left = torch.linspace(1, 1e-3, 6), draws * new
    for i, step in enumerate(steps[:-1]):
        chance = float(1 - t[i + 1] / t[i])
        assert abs(len(step.commits) / left - chance) < 4 * math.sqrt(chance * (1 - chance) / left)
        left -= len(step.commits)
    assert not steps[-1].after.masked.any()


def test_the_last_step_of_origin_commits_all(monkeypatch):

    monkeypatch.setattr(
        "floatscope.sampling.denoising.uniform", lambda key, at: torch.full(at.shape, 1 - 2.0**-40, dtype=torch.float64)
    )
    steps = fill(random_model(0), [[1]], new_tokens=2, steps=2, sampler="origin")
    assert not steps[-1].after.masked.any()


# ---- PC-Sampler


COUNTS = {1: 500, 2: 40, 5: 3, 7: 900, 11: 60, 12: 1}


def calibrated(decay, counts=COUNTS):
    total = sum(counts.values())

    def rule(these, share, state):
        scores = {}
        for p, d in these.items():
            frequency = counts.get(d.index(max(d)), 1) / total  # a token that was not counted occurs once
            surprise = -math.log(frequency + 1e-9)
            scores[p] = min(max(d) * surprise, 10) * math.exp(-decay * (p - state["start"]))
        return best(scores, share)

    return rule


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("pc") / "plain.json"
    path.write_text(json.dumps({str(k): v for k, v in COUNTS.items()}))
    return str(path)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pc") / "theirs.json"
    table = {"num_token": sum(COUNTS.values()), "p_baseline_dict": {str(k): v for k, v in COUNTS.items()}}
    path.write_text(json.dumps(table))
    return str(path)


@pytest.mark.parametrize("decay", [None, 0.0, 1.0])
@pytest.mark.parametrize(("new", "block"), BLOCKS)
def test_pc_calibrates_by_frequency_and_position(plain, decay, new, block):
    sampler_text = f"pc(background={plain!r}{'' if decay is None else f', decay={decay}'})"
    for seed in SEEDS:
        same(sampler_text, calibrated(0.25 if decay is None else decay), seed, new, block)


def test_pc_reads_its_authors_files_too(plain, theirs):
    runs = [fill(random_model(2), [PROMPT], new_tokens=8, sampler=f"pc(background={f!r})") for f in (plain, theirs)]
    assert positions(runs[0]) == positions(runs[1])


def test_pc_clips_before_it_applies_the_position_decay(tmp_path):
    """9.95 at the first place stays ahead of 10 (20.7, clipped) at the second: 10 · exp(−0.01) = 9.90."""
    path = tmp_path / "rare.json"
    path.write_text(json.dumps({"1": 10**12, "2": 47_750_000}))
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 2] = 40.0  # −log(47.75e6 / 1e12) = 9.95
    logits[2, 5] = 40.0  # never counted: −log(1e-12 + 1e-9) = 20.7
    for decay, want in [(0.01, [[1], [2]]), (0.001, [[2], [1]])]:
        sampler_text = f"pc(background={str(path)!r}, decay={decay})"
        assert positions(fill(fixed_model(logits), [[1]], new_tokens=2, sampler=sampler_text)) == want


def test_pc_adds_1e_9_to_frequencies(tmp_path):
    """−log(f + 1e-9): two very rare tokens get almost the same surprisal."""
    path = tmp_path / "rare.json"
    path.write_text(json.dumps({"1": 10**15, "2": 100}))
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 5], logits[2, 2] = 1.1, 1.2  # p: .136, .149; f: 1e-15 and 1e-13; without the floor 4.70 and 4.46
    sampler_text = f"pc(background={str(path)!r}, decay=0.0)"
    assert positions(fill(fixed_model(logits), [[1]], new_tokens=2, sampler=sampler_text)) == [[2], [1]]


def test_pc_gives_masks_in_the_prompt_the_offset_0(plain):
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 5] = 2.0  # the same token, as sure, everywhere: places decide, and a tie goes by position
    steps = fill(fixed_model(logits), [[1, MASK, 1]], new_tokens=3, sampler=f"pc(background={plain!r}, decay=1.0)")
    assert positions(steps) == [[1], [3], [4], [5]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the token counts"),
        ("[1, 2]", "is not a valid table of token counts"),
        ("{", "is not a valid table of token counts"),
        ('{"a": 1}', "is not a valid table of token counts"),
        ('{"99": 1}', "counts token 99, but the model has 20 tokens; use its own tokenizer's counts"),
        ('{"1": "many"}', "is not a valid table of token counts"),
        ('{"1": [3]}', "is not a valid table of token counts"),
        ("{}", "has no counts"),
        ('{"1": 0}', "not above 0"),
        ('{"1": -4}', "not above 0"),
        ('{"1": NaN}', "not above 0"),
    ],
)
def test_pc_reports_what_is_wrong_with_its_table(tmp_path, text, message):
    path = tmp_path / "counts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        fill(random_model(0), [PROMPT], new_tokens=4, sampler=f"pc(background={str(path)!r})")
    assert str(path) in str(error.value)


def test_pc_needs_a_table():
    with pytest.raises(UserError, match=r"sampler 'pc' needs a table of token counts .* pc\(background="):
        fill(random_model(0), [PROMPT], new_tokens=4, sampler="pc")


# ---- adaptive samplers


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("new", "block"), BLOCKS)
def test_threshold_commits_all_that_reach_tau_and_at_least_the_best(tau, new, block):
    def rule(these, share, state):
        scores = {p: max(d) for p, d in these.items()}
        return {p for p, c in scores.items() if c >= tau} | set(best(scores, 1))

    for seed in SEEDS:
        same(f"threshold(tau={tau})", rule, seed, new, block, shift=seed % 2 == 1)


def test_a_confidence_of_exactly_tau_is_committed():
    logits = torch.full((4, VOCABULARY), -torch.inf)
    logits[:, [4, 5]] = 0.0  # p = ½, exactly
    assert positions(fill(fixed_model(logits), [[1]], new_tokens=3, sampler="threshold(tau=0.5)")) == [[1, 2, 3]]


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize(("new", "block"), BLOCKS)
def test_factor_commits_the_largest_n_that_the_nth_confidence_allows(factor, new, block):
    def rule(these, share, state):
        scores = {p: max(d) for p, d in these.items()}
        ordered, n = sorted(scores.values(), reverse=True), 0
        while n < len(ordered) and (n + 2) * (1 - ordered[n]) < factor:
            n += 1
        return best(scores, max(1, n))

    for seed in SEEDS:
        same(f"factor(factor={factor})", rule, seed, new, block)


@pytest.mark.parametrize("gamma", [0.0, 0.01, 1.0, 3.0, 10.0])
@pytest.mark.parametrize(("new", "block"), BLOCKS)
def test_eb_commits_while_the_entropies_without_the_largest_stay_within_gamma(gamma, new, block):
    def rule(these, share, state):
        entropies = {p: entropy(d) for p, d in these.items()}
        ordered = sorted(entropies.values())
        n = max(n for n in range(1, len(ordered) + 1) if n == 1 or sum(ordered[: n - 1]) <= gamma)
        return best({p: -h for p, h in entropies.items()}, n)

    for seed in SEEDS:
        same(f"eb(gamma={gamma})", rule, seed, new, block)


@pytest.mark.parametrize("sampler", ["threshold(tau=0.3)", "factor(factor=3.0)", "eb(gamma=2.0)", "klass(kl=1.0)"])
def test_adaptive_samplers_commit_several_at_once_and_at_least_one(sampler):
    sizes = [[len(c) for c in positions(fill(random_model(s), [PROMPT], new_tokens=8, sampler=sampler))] for s in SEEDS]
    assert min(map(min, sizes)) >= 1
    assert sampler.startswith("klass") or max(map(max, sizes)) > 1
    assert all(sum(size) == 8 for size in sizes)


@pytest.mark.parametrize("sampler", ["threshold(tau=1)", "factor(factor=1)", "eb(gamma=1)", "klass(kl=1)"])
def test_a_whole_number_is_accepted_as_a_float_argument(sampler):
    sampler_texts = (sampler, sampler.replace("1)", "1.0)"))
    runs = [fill(random_model(0), [PROMPT], new_tokens=4, sampler=s) for s in sampler_texts]
    assert positions(runs[0]) == positions(runs[1])


# ---- KLASS


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def klass(confidence, limit, history):
    """Every masked position has a KL history, in later blocks too; a block waits for history − 1 steps."""

    def rule(these, share, state):
        before, moves = state.get("before", {}), state.setdefault("moves", {})
        for p, d in state["all"].items():
            moves.setdefault(p, []).append(kl(d, before[p]) if p in before else math.inf)
        state["before"] = state["all"]
        ready = [
            p
            for p, d in these.items()
            if max(d) > confidence
            and state["in_block"] >= history - 1
            and len(moves[p]) >= history
            and all(move < limit for move in moves[p][-history:])
        ]
        return ready or best({p: max(d) for p, d in these.items()}, share)

    return rule


@pytest.mark.parametrize(("confidence", "limit"), [(0.2, 0.5), (0.3, 2.0), (0.6, 0.3), (0.0, 1e9)])
@pytest.mark.parametrize("history", [1, 2, 3])
@pytest.mark.parametrize(("new", "block"), BLOCKS)
def test_klass_commits_confident_and_stable_positions_else_by_the_schedule(confidence, limit, history, new, block):
    sampler_text = f"klass(confidence={confidence}, kl={limit}, history={history})"
    for seed in SEEDS:
        same(sampler_text, klass(confidence, limit, history), seed, new, block)


@pytest.mark.parametrize(("new", "block", "steps"), [(8, None, 4), (8, 4, 4), (8, None, 3)])
def test_klass_falls_back_to_the_schedule_of_its_steps(new, block, steps):
    rule = klass(0.35, 0.6, 2)
    for seed in SEEDS:
        same("klass(confidence=0.35, kl=0.6)", rule, seed, new, block, steps)


@pytest.mark.parametrize("history", [1, 2, 3])
def test_klass_needs_n_steps_in_the_first_block_and_one_less_in_later_blocks(history):
    """The model is stable from the start: a KL exists from the second forward on, across block borders too."""
    logits = torch.zeros(17, VOCABULARY)
    logits[:, 5] = 6.0
    sampler_text = f"klass(history={history})"
    sizes = [len(c) for c in positions(fill(fixed_model(logits), [[1]], new_tokens=16, block=8, sampler=sampler_text))]
    assert sizes == [1] * history + [8 - history] + [1] * (history - 1) + [9 - history]


def test_klass_waits_again_when_a_distribution_moves():
    still, moved = torch.zeros(9, VOCABULARY), torch.zeros(9, VOCABULARY)
    still[:, 5] = moved[:, 6] = 6.0
    logits = torch.stack([still, still, moved, moved, moved])
    sizes = [len(c) for c in positions(fill(fixed_model(logits), [[1]], new_tokens=8, sampler="klass"))]
    assert sizes == [1, 1, 1, 1, 4]  # ready two stable steps after the change


def test_kl_history_returns_the_largest_of_the_last_kls():
    """A position that was not a candidate in the previous step has an infinite KL."""
    drift = KLHistory(torch.zeros(2, 4, dtype=torch.long), history=2)
    a, b, c = torch.randn(3, 3, 6).log_softmax(-1)
    sample, position = torch.tensor([0, 0, 1]), torch.tensor([1, 3, 0])
    assert drift.update(a, sample, position).tolist() == [math.inf] * 3
    assert drift.update(b, sample, position).tolist() == [math.inf] * 3  # one move, and two are looked at
    p, q, r = (x.exp().tolist() for x in (a, b, c))
    want = [max(kl(q[i], p[i]), kl(r[i], q[i])) for i in (0, 2)]
    got = drift.update(c[[0, 2]], sample[[0, 2]], position[[0, 2]]).tolist()
    assert got == pytest.approx(want, rel=1e-5)
    again = drift.update(c, sample, position).tolist()
    assert again == pytest.approx([kl(r[0], q[0]), math.inf, kl(r[2], q[2])], rel=1e-5)


def test_klass_ignores_tokens_without_probability():
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 5], logits[:, 6] = 6.0, -torch.inf
    sizes = [len(c) for c in positions(fill(fixed_model(logits), [[1]], new_tokens=5, sampler="klass"))]
    assert sizes == [1, 1, 3]


def test_klass_with_the_time_schedule_fills_its_blocks():
    steps = fill(random_model(0), [PROMPT], preset="dream", sampler="klass", new_tokens=8)
    assert not steps[-1].after.masked.any()


# ---- proposals and confidences


def filter_distribution(p, temperature, top_p, top_k):
    """Dream's filters: keep a token if the mass before it is at most top_p, then all at least as likely as the k-th."""
    logits = [math.log(q) / (temperature or 1) for q in p]
    q = softmax(logits)
    if top_p is not None and top_p < 1:
        mass, allowed = 0.0, set()
        for token in sorted(range(len(q)), key=lambda t: -q[t]):
            if mass <= top_p:
                allowed.add(token)
            mass += q[token]
        logits = [x if t in allowed else -math.inf for t, x in enumerate(logits)]
    if top_k is not None:
        least = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        logits = [x if x >= least else -math.inf for x in logits]
    return softmax(logits)


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_p": 0.5},
    {"top_k": 3},
    {"temperature": 1.5, "top_p": 0.8, "top_k": 5},
    {"top_p": 0.9, "top_k": 2},
    {"top_p": 1.0, "top_k": 1000},
]


@pytest.mark.parametrize("given", SETTINGS, ids=str)
@pytest.mark.parametrize("confidence_from", ["model", "drawn"])
def test_proposals_return_the_distribution_of_confidence_from(given, confidence_from):
    logits = torch.randn(30, VOCABULARY) * 1.5
    keys, at = step_keys(0, ["s"] * 30, 0, "token"), torch.arange(30)
    token, log_p = propose_tokens(
        logits, Sampling("confidence", confidence_from=confidence_from, **given), (), keys, at
    )
    for row in range(30):
        p = softmax(logits[row].tolist())
        temperature = given.get("temperature", 0.0)
        q = filter_distribution(p, temperature, given.get("top_p"), given.get("top_k"))
        want = torch.tensor(p if confidence_from == "model" else q)
        torch.testing.assert_close(log_p[row].exp(), want, rtol=1e-5, atol=1e-7)
        if temperature:
            noise = gumbel(keys[row], at[row] * 2**32 + torch.arange(VOCABULARY)).tolist()
            race = [math.log(x) + n if x else -math.inf for x, n in zip(q, noise, strict=True)]
            assert int(token[row]) == race.index(max(race))
        else:
            assert int(token[row]) == q.index(max(q))


@pytest.mark.parametrize("sampler", SCORES)
@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_scores_are_read_from_the_distribution_of_confidence_from(sampler, given):
    """At temperature 0 too: Dream filters before it reads a confidence."""
    given = {k: v for k, v in given.items() if k != "temperature"}

    def rule(confidence_from):
        def scores(these, share, _):
            q = {p: filter_distribution(d, 0, given.get("top_p"), given.get("top_k")) for p, d in these.items()}
            return best({p: SCORES[sampler]((q if confidence_from == "drawn" else these)[p]) for p in these}, share)

        return scores

    for seed in SEEDS[:3]:
        forward = random_model(seed)
        for confidence_from in ("model", "drawn"):
            got = fill(forward, [PROMPT], new_tokens=8, sampler=sampler, confidence_from=confidence_from, **given)
            assert positions(got) == run_reference(rule(confidence_from), forward, 8)[0]


def test_proposed_tokens_follow_softmax():
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    draws = 5000
    for temperature, top_p, top_k in [(1.0, None, None), (0.5, None, None), (1.0, 0.6, None), (2.0, None, 3)]:
        sampling = Sampling("confidence", temperature=temperature, top_p=top_p, top_k=top_k)
        keys = step_keys(1, [f"s{i}" for i in range(draws)], 0, "token")
        token, _ = propose_tokens(logits.expand(draws, -1), sampling, (), keys, torch.zeros(draws, dtype=torch.long))
        chances = filter_distribution(softmax(logits.tolist()), temperature, top_p, top_k)
        counts = {t: int((token == t).sum()) for t in range(5) if (token == t).any()}
        assert chi_square(counts, {t: p for t, p in enumerate(chances) if p}, draws) < 18.5  # 99.9 %, 4 degrees


def test_top_p_keeps_a_token_whose_mass_before_it_is_exactly_top_p():
    logits = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log()
    allowed = filter_logits(logits, 0.5, None).isfinite()
    assert allowed.tolist() == [[True, True, False, False]]
    assert filter_logits(logits, 0.49, None).isfinite().tolist() == [[False, True, False, False]]


def test_top_k_keeps_all_that_tie_at_the_kth():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    assert filter_logits(logits, None, 2).isfinite().tolist() == [[True, False, True, True, False]]
    assert filter_logits(logits, None, 99).isfinite().all()


def test_filters_always_keep_the_most_likely_token():
    logits = torch.randn(50, 40)
    allowed = filter_logits(logits, 1e-6, 1)
    assert allowed.isfinite().sum(-1).eq(1).all()
    assert torch.equal(allowed.argmax(-1), logits.argmax(-1))


def test_bf16_logits_are_scored_in_fp32():
    logits = (torch.randn(40, 300) * 4).bfloat16()
    keys, at = step_keys(0, ["s"] * 40, 0, "token"), torch.arange(40)
    for given in SETTINGS:
        sampling = Sampling("confidence", confidence_from="drawn", **given)
        low, high = (propose_tokens(x, sampling, (), keys, at) for x in (logits, logits.float()))
        assert torch.equal(low[0], high[0])
        assert torch.equal(low[1], high[1])
        assert low[1].dtype == torch.float32


def test_every_sampler_has_a_description_and_a_pace():
    for rule in SAMPLERS.values():
        assert rule.description
        assert rule.pace in ("schedule", "adaptive", "fallback", "minimum")
        assert not set(rule.select_arguments) & set(rule.score_arguments)
