"""Block-causal models commit what the loops of their authors commit; a batch commits what its samples commit alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import MASK, VOCABULARY, best, compute_logits, softmax

from example_counts import examples
from floatscope.canvas import CanvasState, build_canvas
from floatscope.sampling import SAMPLERS, denoise
from floatscope.sampling.randomness import gumbel, step_keys
from floatscope.sampling.settings import resolve_sampling
from floatscope.schema import Paradigm, State

SIZES = st.sampled_from([1, 2, 3, 4, 8])
PROMPTS = st.integers(1, 17)
NEW = st.integers(1, 14)
END = 3


def block_model(seed: int, size: int, sharpness: float = 3.0, never_mask: bool = True):
    """The logits of a row depend on all tokens up to the end of its block, and on nothing else."""
    table = torch.randn(64, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def forward(canvas: CanvasState, rows: slice) -> torch.Tensor:
        logits = torch.full((*canvas.tokens.shape, VOCABULARY), torch.nan)  # padding is never read
        for b, (tokens, valid) in enumerate(zip(canvas.tokens, canvas.valid, strict=True)):
            own = tokens[valid]
            at = torch.arange(len(own))
            seen = table[at, own].cumsum(0)
            ends = ((at // size + 1) * size).clamp_max(len(own))
            mixture = seen[ends - 1] / ends[:, None] ** 0.5
            logits[b, valid] = sharpness * (table[(at + 7) % 64, own] * 0.5 + mixture)
        if never_mask:
            logits[..., MASK] = -100.0
        return logits[:, rows]

    return forward


def ids(seed: int, length: int) -> list[int]:
    return torch.randint(0, MASK, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode(forward, prompts, size, *, shift=False, end_ids=(), samples=None, target_ids=None, **given):
    sampling = resolve_sampling(Paradigm.MDM, given.pop("preset", None), block_size=size, **given)
    canvas = build_canvas(prompts, sampling.new_tokens, MASK, block_size=size)
    suffix = canvas.tokens.shape[1] - max(map(len, prompts)) - sampling.new_tokens
    own = {"mask_id": MASK, "shift": shift, "end_ids": end_ids, "samples": samples, "suffix": suffix}
    return list(denoise(forward, canvas, sampling, block_size=size, target_ids=target_ids, **own))


def history(steps, sample: int = 0) -> list[list[int]]:
    """The canvas of one sample after each of its steps, without padding."""
    return [s.after.tokens[sample][s.after.valid[sample]].tolist() for s in steps if bool(s.before.active[sample])]


# ---- the loops of the authors, for one prompt


def propose_greedily(forward, x, step, positions, shift=False):
    """The most likely token of each position, and its probability."""
    logits = compute_logits(forward, x)
    rows = {p: logits[p - 1 if shift else p] for p in positions}
    return {p: row.index(max(row)) for p, row in rows.items()}, {p: max(softmax(row)) for p, row in rows.items()}


def propose_by_chance(forward, x, step, positions):
    """A token of each position drawn at temperature 1, and its probability."""
    logits, keys = torch.tensor(compute_logits(forward, x)), step_keys(0, ["0"], step, "token")
    tokens = {
        p: int((logits[p].double() + gumbel(keys, p * 2**32 + torch.arange(VOCABULARY))).argmax()) for p in positions
    }
    return tokens, {p: softmax(logits[p].tolist())[tokens[p]] for p in positions}


def run_llada2_loop(forward, prompt, new, size, steps, tau, end=None, propose=propose_greedily):
    """LLaDA2.0's generate and SDAR's low_confidence_dynamic: the canvas after every step."""
    total = -(-(len(prompt) + new) // size) * size
    x, seen = [*prompt, *[MASK] * (total - len(prompt))], []
    schedule = [size // steps + (i < size % steps) for i in range(steps)]
    for block in range(len(prompt) // size, total // size):
        low, high = block * size, (block + 1) * size
        for i in range(steps):
            masks = [p for p in range(low, high) if x[p] == MASK]
            if not masks:
                break
            token, p_token = propose(forward, x[:high], len(seen), masks)
            confident = [p for p in masks if p_token[p] > tau]
            enough = len(confident) >= schedule[i]
            for p in confident if enough else best(p_token, min(schedule[i], len(masks))):
                x[p] = token[p]
            seen.append(x[:high])
        if end in x[len(prompt) : high]:
            break
    return seen


def run_llada21_loop(forward, prompt, new, size, tau, editing, end=None, extra_steps=16):
    """LLaDA2.1's generate: the same with one token at least, and committed tokens of the block are overwritten."""
    total = -(-(len(prompt) + new) // size) * size
    x, seen, edits = [*prompt, *[MASK] * (total - len(prompt))], [], []
    for block in range(len(prompt) // size, total // size):
        low, high, after = block * size, (block + 1) * size, 0
        while True:
            masks = [p for p in range(low, high) if x[p] == MASK]
            after += not masks
            if after > extra_steps:
                break
            token, p_token = propose_greedily(forward, x[:high], len(seen), range(low, high))
            confident = [p for p in masks if p_token[p] > tau]
            chosen = confident or best({p: p_token[p] for p in masks}, 1)
            committed = [p for p in range(max(low, len(prompt)), high) if p not in masks]
            changed = [p for p in committed if p_token[p] > editing and token[p] != x[p]]
            for p in [*chosen, *changed]:
                x[p] = token[p]
            seen.append(x[:high])
            edits.append(sorted(changed))
            if not masks and not changed:
                break
        if end in x[len(prompt) : high]:
            break
    return seen, edits


def run_fast_dllm_v2_loop(forward, prompt, new, size, small, tau, end=None):
    """Fast-dLLM v2's batch_sample: sub-blocks, and the first token of a block from the last row of the one before."""
    total = -(-(len(prompt) + new) // size) * size
    x, seen = [*prompt, *[MASK] * (total - len(prompt))], []
    for block in range(len(prompt) // size, total // size):
        low, high = block * size, (block + 1) * size
        if x[low] == MASK:
            row = compute_logits(forward, x[:low])[-1]
            x[low] = row.index(max(row))
            seen.append(x[:high])
        for start in range(low, high, small):
            while masks := [p for p in range(start, start + small) if x[p] == MASK]:
                token, p_token = propose_greedily(forward, x[:high], len(seen), masks, shift=True)
                for p in {*(p for p in masks if p_token[p] > tau), *best(p_token, 1)}:
                    x[p] = token[p]
                seen.append(x[:high])
        if end in x[len(prompt) : high]:
            break
    return seen


# ---- equalities


@examples(60)
@given(st.integers(0, 999), PROMPTS, NEW, SIZES, st.integers(1, 9), st.sampled_from([0.0, 0.3, 0.6, 0.95]))
def test_llada2_equals_its_authors_loop(seed, prompt, new, size, steps, tau):
    forward, start = block_model(seed, size), ids(seed, prompt)
    given = {"new_tokens": new, "sampler": f"dynamic(tau={tau})", "steps": steps, "stop": True, "end_ids": (END,)}
    ours = history(decode(forward, [start], size, **given))
    assert ours == run_llada2_loop(forward, start, new, size, steps, tau, END)


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("prompt", [1, 7, 8, 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_preset_of_llada2(seed, prompt, size):
    """Without steps, one per position, as the authors' 32 in blocks of 32."""
    forward, start = block_model(seed, size), ids(seed, prompt)
    ours = history(decode(forward, [start], size, preset="llada2", new_tokens=11, end_ids=(END,)))
    assert ours == run_llada2_loop(forward, start, 11, size, size, 0.95, END)


@examples(40)
@given(st.integers(0, 999), PROMPTS, NEW, SIZES)
def test_the_preset_of_sdar(seed, prompt, new, size):
    forward, start = block_model(seed, size), ids(seed, prompt)
    ours = history(decode(forward, [start], size, preset="sdar", new_tokens=new, end_ids=(END,)))
    assert ours == run_llada2_loop(forward, start, new, size, size, 0.85, END, propose_by_chance)


@examples(60)
@given(
    st.integers(0, 999),
    PROMPTS,
    NEW,
    SIZES,
    st.sampled_from([0.0, 0.3, 0.95]),
    st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
)
def test_llada21_equals_its_authors_loop(seed, prompt, new, size, tau, editing):
    forward, start = block_model(seed, size), ids(seed, prompt)
    given = {"sampler": f"dynamic(tau={tau}, editing={editing})", "new_tokens": new, "stop": True, "end_ids": (END,)}
    steps = decode(forward, [start], size, **given)
    seen, edits = run_llada21_loop(forward, start, new, size, tau, editing, END)
    assert history(steps) == seen
    assert [step.commits.position[step.is_edit].tolist() for step in steps] == edits
    assert [step.commits.position.tolist() for step in steps] == [
        sorted(step.commits.position.tolist()) for step in steps
    ]


def test_tokens_are_edited_in_these_models():
    """The equality above would hold without any edit too."""
    edited = extra = unstable = 0
    for seed in range(30):
        steps = decode(block_model(seed, 8), [ids(seed, 5)], 8, sampler="dynamic(tau=0.3, editing=0.2)", new_tokens=11)
        edited += sum(int(step.is_edit.sum()) for step in steps)
        extra += sum(not bool(step.before.masked.any()) for step in steps)
        unstable += sum(not bool(step.before.masked.any()) and bool(step.is_edit.any()) for step in steps)
    assert edited > 100
    assert extra > unstable > 10


@pytest.mark.parametrize("extra_steps", [0, 1, 3])
def test_extra_steps_are_limited(extra_steps):
    for seed in range(10):
        forward, start = block_model(seed, 8), ids(seed, 5)
        sampler = f"dynamic(tau=0.3, editing=0.0, extra_steps={extra_steps})"
        seen, _ = run_llada21_loop(forward, start, 11, 8, 0.3, 0.0, extra_steps=extra_steps)
        assert history(decode(forward, [start], 8, sampler=sampler, new_tokens=11)) == seen


@examples(40)
@given(st.integers(0, 999), PROMPTS, NEW, st.sampled_from([(4, 2), (8, 4), (8, 8), (6, 3), (4, 1)]), st.booleans())
def test_fast_dllm_v2_equals_its_authors_loop(seed, prompt, new, sizes, confident):
    size, small = sizes
    forward, start = block_model(seed, size), ids(seed, prompt)
    tau = 0.3 if confident else 0.95
    given = {"preset": "fast-dllm-v2", "sampler": f"threshold(tau={tau})", "block": small, "new_tokens": new}
    ours = history(decode(forward, [start], size, shift=True, stop=False, **given))
    assert ours == run_fast_dllm_v2_loop(forward, start, new, size, small, tau)
    stopped = history(decode(forward, [start], size, shift=True, end_ids=(END,), **given))
    assert stopped == ours[: len(stopped)]
    theirs = run_fast_dllm_v2_loop(forward, start, new, size, small, tau, END)[-1][prompt:]
    until = theirs.index(END) if END in theirs else len(theirs)
    assert stopped[-1][prompt : prompt + until] == theirs[:until]


SAMPLERS_TO_TRY = [name for name in SAMPLERS if name not in ("pc", "dynamic")] + [
    "dynamic(tau=0.4)",
    "dynamic(tau=0.4, editing=0.3)",
]


@pytest.mark.parametrize("sampler", SAMPLERS_TO_TRY)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("size", "block", "shift"), [(4, None, False), (8, 4, True), (3, None, True)])
def test_a_batch_equals_its_samples_alone(sampler, temperature, size, block, shift):
    lengths, names = [1, 4, 7, 8, 13], ["a", "b", "c", "d", "e"]
    prompts = [ids(i, n) for i, n in enumerate(lengths)]
    given = {"sampler": sampler, "temperature": temperature, "new_tokens": 9, "block": block, "stop": True}
    given |= {"shift": shift, "end_ids": (END,)}
    forward = block_model(5, size)
    together = decode(forward, prompts, size, samples=names, **given)
    for b, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        alone = decode(forward, [prompt], size, samples=[name], **given)
        assert history(together, b) == history(alone)
        mine = [s for s in together if bool(s.before.active[b])]
        pad = max(lengths) - len(prompt)
        for ours, single in zip(mine, alone, strict=True):
            chosen = ours.commits.sample == b
            for field in ("position", "row"):
                assert (getattr(ours.commits, field)[chosen] - pad).equal(getattr(single.commits, field))
            assert ours.commits.confidence[chosen].equal(single.commits.confidence)
            assert (ours.before.block[b] - pad).equal(single.before.block[0])
            valid = ours.before.valid[b]
            assert ours.before.states[b][valid].equal(single.before.states[0])


@pytest.mark.parametrize("sampler", SAMPLERS_TO_TRY)
def test_every_sampler_fills_all_blocks(sampler):
    for prompt in (1, 4, 6):
        steps = decode(block_model(1, 4), [ids(0, prompt)], 4, sampler=sampler, new_tokens=6)
        last = steps[-1].after
        assert not bool(last.masked.any())
        assert last.tokens.shape[1] == -(-(prompt + 6) // 4) * 4
        assert last.tokens[0, :prompt].tolist() == ids(0, prompt)
        for step in steps:
            assert step.before.tokens.shape[1] == int(
                step.before.block[0, 1]
            )  # nothing after the block is in the input


def test_what_follows_the_block_would_change_nothing():
    """The reason why the canvas may end with the block."""
    forward, full = block_model(2, 4), build_canvas([ids(0, 6)], 12, MASK, block_size=4)
    cut = CanvasState(full.tokens[:, :8], full.states[:, :8])
    assert forward(full, slice(0, 8)).equal(forward(cut, slice(0, 8)))


def test_a_predicted_mask_does_not_hang():
    logits = torch.zeros(64, VOCABULARY)
    logits[:, MASK] = 9.0
    for sampler in ("dynamic", "dynamic(editing=0.1)", "threshold", "confidence"):
        steps = decode(lambda canvas, rows: logits[None, rows], [[1, 2]], 4, sampler=sampler, new_tokens=6)
        assert bool(steps[-1].after.masked.any())
        assert not any(bool(step.is_edit.any()) for step in steps)


def test_an_edit_never_writes_the_mask():
    logits = torch.zeros(2, 8, VOCABULARY)
    logits[0, :, 5] = 9.0
    logits[1, :, MASK] = 9.0
    steps = decode(
        lambda canvas, rows: logits[min(canvas.step, 1), rows][None],
        [[1]],
        4,
        sampler="dynamic(editing=0.1)",
        new_tokens=3,
    )
    assert [step.after.tokens[0].tolist() for step in steps] == [[1, 5, 5, 5]] * 2


def test_masks_inside_a_prompt_belong_to_their_own_block():
    prompt = [1, MASK, 3, 4, 5, MASK]
    steps = decode(block_model(0, 4), [prompt], 4, new_tokens=3)
    assert steps[0].commits.position.tolist() == [1]
    assert steps[0].before.tokens.shape[1] == 4
    assert not bool(steps[-1].after.masked.any())


def test_an_end_token_of_the_prompt_ends_nothing():
    steps = decode(block_model(0, 4), [[END, END, END]], 4, new_tokens=9, stop=True, end_ids=(MASK - 1,))
    assert steps[-1].after.tokens.shape[1] == 12


def test_targets_are_written_and_the_rest_of_the_last_block_is_decoded():
    target = torch.tensor([[7, 8, 9]])
    steps = decode(block_model(0, 4), [[1, 2]], 4, new_tokens=3, target_ids=target)
    last = steps[-1].after.tokens[0]
    assert last[2:5].tolist() == [7, 8, 9]
    assert MASK not in last.tolist()


def test_a_canvas_is_filled_up_to_whole_blocks():
    canvas = build_canvas([[1, 2, 3], [1]], 2, MASK, block_size=4, pad_id=15)
    M, P, R, X = MASK, 15, int(State.PROMPT), int(State.MASKED)
    assert canvas.tokens.tolist() == [[1, 2, 3, M, M, M, M, M], [P, P, 1, M, M, M, P, P]]
    assert canvas.states.tolist() == [[R, R, R, X, X, X, X, X], [0, 0, R, X, X, X, 0, 0]]
