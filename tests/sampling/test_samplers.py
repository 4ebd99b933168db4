"""Each rule commits what its paper says, restated slowly in Python floats."""

from __future__ import annotations

import json
import math
from itertools import combinations

import pytest
import torch
from toys import MASK, VOCABULARY, best, filled, fixed_model, positions, random_model, softmax, whole

from floatscope.errors import UserError
from floatscope.sampling import SAMPLERS
from floatscope.sampling.drift import Drift
from floatscope.sampling.noise import gumbel, step_keys, uniform
from floatscope.sampling.proposal import draw, filtered
from floatscope.sampling.settings import Sampling

SEEDS = range(5)
PROMPT = [4, 9, 2]
BLOCKS = [(8, None), (9, 3)]  # new tokens, block


def slowly(rule, forward, new, block=None, steps=None, shift=False):
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
            logits = whole(forward, x, state["step"])
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


def same(spelled, rule, seed, new, block, steps=None, shift=False):
    forward = random_model(seed)
    got = filled(forward, [PROMPT], new_tokens=new, block=block, steps=steps, shift=shift, sampler=spelled)
    want, tokens = slowly(rule, forward, new, block, steps, shift)
    assert positions(got) == want
    assert got[-1].after.tokens[0].tolist() == tokens
    return want


# ---- rules that follow the schedule


SCORES = {"confidence": max, "margin": lead, "entropy": lambda p: -entropy(p)}


@pytest.mark.parametrize("sampler", SCORES)
@pytest.mark.parametrize(("new", "block"), BLOCKS)
@pytest.mark.parametrize("per_block", [None, 1, 2])
def test_the_best_first(sampler, new, block, per_block):
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


def test_the_three_scores_are_not_the_same_order():
    runs = [positions(filled(random_model(0), [PROMPT], new_tokens=8, sampler=s)) for s in SCORES]
    assert len({str(run) for run in runs}) == 3


@pytest.mark.parametrize("sampler", [*SCORES, "threshold", "factor", "eb", "klass"])
def test_equal_scores_go_by_position(sampler):
    logits = torch.zeros(7, VOCABULARY)
    logits[:, 5] = 0.5
    assert positions(filled(fixed_model(logits), [[1]], new_tokens=6, sampler=sampler)) == [[p] for p in range(1, 7)]


def test_random_is_a_draw_of_its_own_for_each_position():
    """The order is that of the uniform numbers; confidences are still the model's."""
    forward = random_model(0)
    steps = filled(forward, [PROMPT], samples=["s"], new_tokens=8, steps=4, sampler="random", seed=3)
    open_ = list(range(3, 11))
    for number, step in enumerate(steps):
        key = step_keys(3, ["s"], number, "order")[0]
        want = best({p: float(uniform(key, torch.tensor(p))) for p in open_}, 2)
        assert step.commits.position.tolist() == want
        p = forward(step.before, slice(0, 11))[0].softmax(-1)
        torch.testing.assert_close(step.commits.confidence, p[want].amax(-1))
        open_ = [p for p in open_ if p not in want]


def many(draws: int, logits: torch.Tensor, **given) -> dict[tuple[int, ...], int]:
    """How often each set of positions is the first step's, over samples with different names."""
    steps = filled(fixed_model(logits), [[1]] * draws, samples=[f"s{i}" for i in range(draws)], **given)
    found: dict[tuple[int, ...], int] = {}
    at = steps[0].commits
    sets: list[list[int]] = [[] for _ in range(draws)]
    for sample, position in zip(at.sample.tolist(), at.position.tolist(), strict=True):
        sets[sample].append(position)
    for one in sets:
        found[tuple(one)] = found.get(tuple(one), 0) + 1
    return found


def chi_square(found: dict, chances: dict, draws: int) -> float:
    assert set(found) <= set(chances)
    return sum((found.get(k, 0) - draws * p) ** 2 / (draws * p) for k, p in chances.items())


def test_random_takes_every_set_equally_often():
    draws, pairs = 1500, list(combinations(range(1, 5), 2))
    found = many(draws, torch.zeros(5, VOCABULARY), sampler="random", new_tokens=4, steps=2)
    assert chi_square(found, dict.fromkeys(pairs, 1 / 6), draws) < 20.5  # 99.9 % of χ² with 5 degrees of freedom


def test_order_temperature_draws_without_return_in_proportion_to_exp_of_the_score():
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
    found = many(draws, logits, new_tokens=4, steps=2, order_temperature=temperature)
    assert chi_square(found, chances, draws) < 20.5
    assert max(chances.values()) > 3 * min(chances.values())  # and would not fit a uniform draw
    assert chi_square(found, dict.fromkeys(chances, 1 / 6), draws) > 100


def test_a_low_order_temperature_is_the_best_first():
    forward = random_model(1)
    cold, sure = (filled(forward, [PROMPT], new_tokens=8, order_temperature=t) for t in (1e-6, 0.0))
    assert positions(cold) == positions(sure)


@pytest.mark.parametrize("sampler", ["threshold", "factor", "eb", "klass"])
def test_order_temperature_is_refused_by_rules_that_bound_their_scores(sampler):
    with pytest.raises(UserError, match="order_temperature"):
        filled(random_model(0), [PROMPT], new_tokens=4, sampler=sampler, order_temperature=0.5)


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
def test_the_time_schedule_is_dreams(masks, steps, sampler):
    got = filled(random_model(0), [PROMPT], new_tokens=masks, steps=steps, schedule="time", sampler=sampler)
    assert [len(step.commits) for step in got] == DREAMS[masks, steps] == time_schedule(masks, steps)


@pytest.mark.parametrize(("masks", "want"), [(9, [2, 3, 4]), (10, [2, 3, 5])])
def test_the_time_is_fp32(masks, want):
    """Dream's own loop; doubles would give 2, 2, 5 and 3, 2, 5."""
    got = filled(random_model(0), [PROMPT], new_tokens=masks, steps=3, schedule="time", eps=0.1)
    assert [len(step.commits) for step in got] == want


@pytest.mark.parametrize("eps", [1e-3, 0.1, 1.0])
def test_the_time_schedule_ends_at_eps(eps):
    got = filled(random_model(0), [PROMPT], new_tokens=12, steps=6, schedule="time", eps=eps)
    t = torch.linspace(1, eps, 7)
    left, want = 12, []
    for i in range(6):
        want.append(left if i == 5 else int(torch.tensor(float(left)) * (1 - t[i + 1] / t[i])))
        left -= want[-1]
    assert [len(step.commits) for step in got] == want


def test_the_time_schedule_counts_each_sample_and_block_on_its_own():
    prompts = [[1, MASK, MASK, 2], [3]]
    steps = filled(random_model(0), prompts, new_tokens=12, block=6, steps=8, schedule="time")
    counts = [[int((s.commits.sample == b).sum()) for s in steps] for b in range(2)]
    assert counts[0] == time_schedule(8, 4) + time_schedule(6, 4)
    assert counts[1] == time_schedule(6, 4) + time_schedule(6, 4)


@pytest.mark.parametrize("schedule", ["even", "time"])
def test_origin_commits_each_mask_with_the_steps_probability(schedule):
    """u < 1 − t'/t for each position on its own; the last step takes all."""
    steps = filled(
        random_model(0), [PROMPT], samples=["s"], new_tokens=12, steps=5, sampler="origin", schedule=schedule
    )
    t = torch.linspace(1, 1e-3, 6)
    open_ = list(range(3, 15))
    for i, step in enumerate(steps):
        key = step_keys(0, ["s"], i, "order")[0]
        chance = float(1 - t[i + 1] / t[i])
        want = [p for p in open_ if i == 4 or float(uniform(key, torch.tensor(p))) < chance]
        assert step.commits.position.tolist() == want
        open_ = [p for p in open_ if p not in want]
    assert not open_


def test_origins_share_of_commits_is_the_steps_probability():
    draws, new = 500, 8
    given = {"sampler": "origin", "new_tokens": new, "steps": 5}
    steps = filled(fixed_model(torch.zeros(9, VOCABULARY)), [[1]] * draws, **given)
    t, left = torch.linspace(1, 1e-3, 6), draws * new
    for i, step in enumerate(steps[:-1]):
        chance = float(1 - t[i + 1] / t[i])
        assert abs(len(step.commits) / left - chance) < 4 * math.sqrt(chance * (1 - chance) / left)
        left -= len(step.commits)
    assert not steps[-1].after.masked.any()


def test_origins_last_step_takes_all_whatever_is_drawn(monkeypatch):
    import sys

    module = sys.modules["floatscope.sampling.denoise"]
    monkeypatch.setattr(module, "uniform", lambda key, at: torch.full(at.shape, 1 - 2.0**-40, dtype=torch.float64))
    steps = filled(random_model(0), [[1]], new_tokens=2, steps=2, sampler="origin")
    assert not steps[-1].after.masked.any()


# ---- PC-Sampler


COUNTS = {1: 500, 2: 40, 5: 3, 7: 900, 11: 60, 12: 1}


def calibrated(decay, counts=COUNTS):
    total = sum(counts.values())

    def rule(these, share, state):
        scores = {}
        for p, d in these.items():
            frequency = counts.get(d.index(max(d)), 1) / total  # a token nobody counted was seen once
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
def test_pc_calibrates_by_frequency_and_place(plain, decay, new, block):
    spelled = f"pc(background={plain!r}{'' if decay is None else f', decay={decay}'})"
    for seed in SEEDS:
        same(spelled, calibrated(0.25 if decay is None else decay), seed, new, block)


def test_pc_reads_its_authors_files_too(plain, theirs):
    runs = [filled(random_model(2), [PROMPT], new_tokens=8, sampler=f"pc(background={f!r})") for f in (plain, theirs)]
    assert positions(runs[0]) == positions(runs[1])


def test_pc_clips_before_it_looks_at_the_place(tmp_path):
    """9.95 at the first place stays ahead of 10 (20.7, clipped) at the second: 10 · exp(−0.01) = 9.90."""
    path = tmp_path / "rare.json"
    path.write_text(json.dumps({"1": 10**12, "2": 47_750_000}))
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 2] = 40.0  # −log(47.75e6 / 1e12) = 9.95
    logits[2, 5] = 40.0  # never counted: −log(1e-12 + 1e-9) = 20.7
    for decay, want in [(0.01, [[1], [2]]), (0.001, [[2], [1]])]:
        spelled = f"pc(background={str(path)!r}, decay={decay})"
        assert positions(filled(fixed_model(logits), [[1]], new_tokens=2, sampler=spelled)) == want


def test_pc_looks_up_frequencies_no_smaller_than_1e_9(tmp_path):
    """−log(f + 1e-9): of two tokens that are both hardly ever seen neither is preferred for it."""
    path = tmp_path / "rare.json"
    path.write_text(json.dumps({"1": 10**15, "2": 100}))
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 5], logits[2, 2] = 1.1, 1.2  # p: .136, .149; f: 1e-15 and 1e-13; without the floor 4.70 and 4.46
    spelled = f"pc(background={str(path)!r}, decay=0.0)"
    assert positions(filled(fixed_model(logits), [[1]], new_tokens=2, sampler=spelled)) == [[2], [1]]


def test_pc_counts_places_of_infilled_masks_as_the_blocks_first(plain):
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 5] = 2.0  # the same token, as sure, everywhere: places decide, and a tie goes by position
    steps = filled(fixed_model(logits), [[1, MASK, 1]], new_tokens=3, sampler=f"pc(background={plain!r}, decay=1.0)")
    assert positions(steps) == [[1], [3], [4], [5]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read the token counts"),
        ("[1, 2]", "is no table of token counts"),
        ("{", "is no table of token counts"),
        ('{"a": 1}', "is no table of token counts"),
        ('{"99": 1}', "counts token 99, and the model has 20: it is another tokenizer's"),
        ('{"1": "many"}', "is no table of token counts"),
        ('{"1": [3]}', "is no table of token counts"),
        ("{}", "has no counts"),
        ('{"1": 0}', "not above 0"),
        ('{"1": -4}', "not above 0"),
        ('{"1": NaN}', "not above 0"),
    ],
)
def test_pc_says_what_is_wrong_with_its_table(tmp_path, text, says):
    path = tmp_path / "counts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        filled(random_model(0), [PROMPT], new_tokens=4, sampler=f"pc(background={str(path)!r})")
    assert str(path) in str(error.value)


def test_pc_needs_a_table():
    with pytest.raises(UserError, match=r"sampler 'pc' needs a table of token counts .* pc\(background="):
        filled(random_model(0), [PROMPT], new_tokens=4, sampler="pc")


# ---- rules with a pace of their own


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("new", "block"), BLOCKS)
def test_threshold_commits_all_that_reach_tau_and_at_least_the_best(tau, new, block):
    def rule(these, share, state):
        scores = {p: max(d) for p, d in these.items()}
        return {p for p, c in scores.items() if c >= tau} | set(best(scores, 1))

    for seed in SEEDS:
        same(f"threshold(tau={tau})", rule, seed, new, block, shift=seed % 2 == 1)


def test_a_confidence_of_tau_reaches_it():
    logits = torch.full((4, VOCABULARY), -torch.inf)
    logits[:, [4, 5]] = 0.0  # p = ½, exactly
    assert positions(filled(fixed_model(logits), [[1]], new_tokens=3, sampler="threshold(tau=0.5)")) == [[1, 2, 3]]


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize(("new", "block"), BLOCKS)
def test_factor_commits_the_most_n_the_nth_confidence_allows(factor, new, block):
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
def test_eb_commits_while_the_entropies_but_the_largest_stay_within_gamma(gamma, new, block):
    def rule(these, share, state):
        entropies = {p: entropy(d) for p, d in these.items()}
        ordered = sorted(entropies.values())
        n = max(n for n in range(1, len(ordered) + 1) if n == 1 or sum(ordered[: n - 1]) <= gamma)
        return best({p: -h for p, h in entropies.items()}, n)

    for seed in SEEDS:
        same(f"eb(gamma={gamma})", rule, seed, new, block)


@pytest.mark.parametrize("sampler", ["threshold(tau=0.3)", "factor(factor=3.0)", "eb(gamma=2.0)", "klass(kl=1.0)"])
def test_these_rules_commit_several_at_once_and_at_least_one(sampler):
    sizes = [
        [len(c) for c in positions(filled(random_model(s), [PROMPT], new_tokens=8, sampler=sampler))] for s in SEEDS
    ]
    assert min(map(min, sizes)) >= 1
    assert sampler.startswith("klass") or max(map(max, sizes)) > 1
    assert all(sum(size) == 8 for size in sizes)


@pytest.mark.parametrize("sampler", ["threshold(tau=1)", "factor(factor=1)", "eb(gamma=1)", "klass(kl=1)"])
def test_a_whole_number_is_a_number(sampler):
    spelled = (sampler, sampler.replace("1)", "1.0)"))
    runs = [filled(random_model(0), [PROMPT], new_tokens=4, sampler=s) for s in spelled]
    assert positions(runs[0]) == positions(runs[1])


# ---- KLASS


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def klass(confidence, limit, history):
    """Every masked position remembers its moves, the blocks still to come too; a block waits for history − 1 steps."""

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
def test_klass_commits_what_is_sure_and_at_rest_else_the_schedules_share(confidence, limit, history, new, block):
    spelled = f"klass(confidence={confidence}, kl={limit}, history={history})"
    for seed in SEEDS:
        same(spelled, klass(confidence, limit, history), seed, new, block)


@pytest.mark.parametrize(("new", "block", "steps"), [(8, None, 4), (8, 4, 4), (8, None, 3)])
def test_klass_falls_back_to_the_share_of_its_steps(new, block, steps):
    rule = klass(0.35, 0.6, 2)
    for seed in SEEDS:
        same("klass(confidence=0.35, kl=0.6)", rule, seed, new, block, steps)


@pytest.mark.parametrize("history", [1, 2, 3])
def test_klass_is_first_ready_after_n_steps_and_in_later_blocks_after_one_less(history):
    """A model at rest from the start: moves exist from the second forward on, and go on across the border."""
    logits = torch.zeros(17, VOCABULARY)
    logits[:, 5] = 6.0
    spelled = f"klass(history={history})"
    sizes = [len(c) for c in positions(filled(fixed_model(logits), [[1]], new_tokens=16, block=8, sampler=spelled))]
    assert sizes == [1] * history + [8 - history] + [1] * (history - 1) + [9 - history]


def test_klass_waits_again_when_a_distribution_moves():
    still, moved = torch.zeros(9, VOCABULARY), torch.zeros(9, VOCABULARY)
    still[:, 5] = moved[:, 6] = 6.0
    logits = torch.stack([still, still, moved, moved, moved])
    sizes = [len(c) for c in positions(filled(fixed_model(logits), [[1]], new_tokens=8, sampler="klass"))]
    assert sizes == [1, 1, 1, 1, 4]  # ready two quiet moves after the change


def test_drift_is_kl_of_now_from_the_step_before_the_largest_of_the_last():
    """Positions come and go; one that was not there a step ago has moved infinitely far."""
    drift = Drift(torch.zeros(2, 4, dtype=torch.long), history=2)
    a, b, c = torch.randn(3, 3, 6).log_softmax(-1)
    sample, position = torch.tensor([0, 0, 1]), torch.tensor([1, 3, 0])
    assert drift.since(a, sample, position).tolist() == [math.inf] * 3
    assert drift.since(b, sample, position).tolist() == [math.inf] * 3  # one move, and two are looked at
    p, q, r = (x.exp().tolist() for x in (a, b, c))
    want = [max(kl(q[i], p[i]), kl(r[i], q[i])) for i in (0, 2)]
    got = drift.since(c[[0, 2]], sample[[0, 2]], position[[0, 2]]).tolist()
    assert got == pytest.approx(want, rel=1e-5)
    again = drift.since(c, sample, position).tolist()
    assert again == pytest.approx([kl(r[0], q[0]), math.inf, kl(r[2], q[2])], rel=1e-5)


def test_klass_is_quiet_about_tokens_that_lost_all_probability():
    logits = torch.zeros(6, VOCABULARY)
    logits[:, 5], logits[:, 6] = 6.0, -torch.inf
    sizes = [len(c) for c in positions(filled(fixed_model(logits), [[1]], new_tokens=5, sampler="klass"))]
    assert sizes == [1, 1, 3]


def test_klass_by_dreams_time_fills_its_blocks():
    steps = filled(random_model(0), [PROMPT], preset="dream", sampler="klass", new_tokens=8)
    assert not steps[-1].after.masked.any()


# ---- what is judged


def drawn_from(p, temperature, top_p, top_k):
    """Dream's filters: a token stays if the mass before it is at most top_p; then whoever is as likely as the k-th."""
    logits = [math.log(q) / (temperature or 1) for q in p]
    q = softmax(logits)
    if top_p is not None and top_p < 1:
        mass, kept = 0.0, set()
        for token in sorted(range(len(q)), key=lambda t: -q[t]):
            if mass <= top_p:
                kept.add(token)
            mass += q[token]
        logits = [x if t in kept else -math.inf for t, x in enumerate(logits)]
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
@pytest.mark.parametrize("judged", ["model", "drawn"])
def test_the_distribution_that_is_judged_and_the_one_drawn_from(given, judged):
    logits = torch.randn(30, VOCABULARY) * 1.5
    keys, at = step_keys(0, ["s"] * 30, 0, "token"), torch.arange(30)
    token, log_p = draw(logits, Sampling("confidence", judged=judged, **given), (), keys, at)
    for row in range(30):
        p = softmax(logits[row].tolist())
        temperature = given.get("temperature", 0.0)
        q = drawn_from(p, temperature, given.get("top_p"), given.get("top_k"))
        want = torch.tensor(p if judged == "model" else q)
        torch.testing.assert_close(log_p[row].exp(), want, rtol=1e-5, atol=1e-7)
        if temperature:
            noise = gumbel(keys[row], at[row] * 2**32 + torch.arange(VOCABULARY)).tolist()
            race = [math.log(x) + n if x else -math.inf for x, n in zip(q, noise, strict=True)]
            assert int(token[row]) == race.index(max(race))
        else:
            assert int(token[row]) == q.index(max(q))


@pytest.mark.parametrize("sampler", SCORES)
@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_scores_are_read_from_what_is_judged(sampler, given):
    """At temperature 0 too: Dream filters before it reads a confidence."""
    given = {k: v for k, v in given.items() if k != "temperature"}

    def rule(judged):
        def scores(these, share, _):
            q = {p: drawn_from(d, 0, given.get("top_p"), given.get("top_k")) for p, d in these.items()}
            return best({p: SCORES[sampler]((q if judged == "drawn" else these)[p]) for p in these}, share)

        return scores

    for seed in SEEDS[:3]:
        forward = random_model(seed)
        for judged in ("model", "drawn"):
            got = filled(forward, [PROMPT], new_tokens=8, sampler=sampler, judged=judged, **given)
            assert positions(got) == slowly(rule(judged), forward, 8)[0]


def test_a_draw_follows_softmax():
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    draws = 5000
    for temperature, top_p, top_k in [(1.0, None, None), (0.5, None, None), (1.0, 0.6, None), (2.0, None, 3)]:
        how = Sampling("confidence", temperature=temperature, top_p=top_p, top_k=top_k)
        keys = step_keys(1, [f"s{i}" for i in range(draws)], 0, "token")
        token, _ = draw(logits.expand(draws, -1), how, (), keys, torch.zeros(draws, dtype=torch.long))
        chances = drawn_from(softmax(logits.tolist()), temperature, top_p, top_k)
        found = {t: int((token == t).sum()) for t in range(5) if (token == t).any()}
        assert chi_square(found, {t: p for t, p in enumerate(chances) if p}, draws) < 18.5  # 99.9 %, 4 degrees


def test_top_p_keeps_a_token_whose_mass_before_it_is_exactly_top_p():
    logits = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log()
    kept = filtered(logits, 0.5, None).isfinite()
    assert kept.tolist() == [[True, True, False, False]]
    assert filtered(logits, 0.49, None).isfinite().tolist() == [[False, True, False, False]]


def test_top_k_keeps_all_that_tie_at_the_kth():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    assert filtered(logits, None, 2).isfinite().tolist() == [[True, False, True, True, False]]
    assert filtered(logits, None, 99).isfinite().all()


def test_the_most_likely_token_always_stays():
    logits = torch.randn(50, 40)
    kept = filtered(logits, 1e-6, 1)
    assert kept.isfinite().sum(-1).eq(1).all()
    assert torch.equal(kept.argmax(-1), logits.argmax(-1))


def test_bf16_logits_are_judged_in_fp32():
    logits = (torch.randn(40, 300) * 4).bfloat16()
    keys, at = step_keys(0, ["s"] * 40, 0, "token"), torch.arange(40)
    for given in SETTINGS:
        how = Sampling("confidence", judged="drawn", **given)
        low, high = (draw(x, how, (), keys, at) for x in (logits, logits.float()))
        assert torch.equal(low[0], high[0])
        assert torch.equal(low[1], high[1])
        assert low[1].dtype == torch.float32


def test_every_rule_says_what_it_does_and_has_a_pace():
    for rule in SAMPLERS.values():
        assert rule.says
        assert rule.pace in ("schedule", "own", "fallback")
        assert not set(rule.arguments) & set(rule.scored_by)
