"""Autoregressive decoding equals transformers' `generate`, in a batch and alone, with keyed randomness."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from toys import softmax

from floatscope.canvas import Regions, build_canvas
from floatscope.models.model import Model
from floatscope.models.spec import ModelSpec
from floatscope.sampling import autoregress
from floatscope.sampling.randomness import gumbel, step_keys
from floatscope.sampling.settings import resolve_sampling
from floatscope.schema import Paradigm, State

VOCABULARY, EOS = 48, 3
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,  # sharp enough that rounding decides nothing
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


@cache
def module(kind: str) -> torch.nn.Module:
    import transformers as t

    torch.manual_seed(1)
    if kind == "gpt2":
        config = t.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            initializer_range=0.4,
            bos_token_id=None,
            eos_token_id=None,
        )
        return t.GPT2LMHeadModel(config).eval()
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)).eval()
    if kind == "qwen2":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**SHAPE)).eval()
    if kind == "gemma3":
        config = t.Gemma3TextConfig(
            **SHAPE,
            head_dim=8,
            tie_word_embeddings=False,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        )
        return t.Gemma3ForCausalLM(config).eval()
    assert kind == "mistral with a window of 4"
    return t.MistralForCausalLM(t.MistralConfig(**SHAPE, sliding_window=4)).eval()


KINDS = ["llama", "qwen2", "gpt2", "gemma3", "mistral with a window of 4"]


def model(kind: str = "llama") -> Model:
    return Model(module(kind), ModelSpec("x", Paradigm.ARM, None, shift=True, eos_id=EOS))


def generate(forward, prompts, end_ids=(), samples=None, regions=None, **given):
    sampling = resolve_sampling(Paradigm.ARM, **given)
    canvas = build_canvas(prompts, sampling.new_tokens, None, regions=regions)
    return list(autoregress(forward, canvas, sampling, end_ids=end_ids, samples=samples))


def answers(steps, prompts) -> list[list[int]]:
    start = max(map(len, prompts))
    return [row[start:] for row in steps[-1].after.tokens.tolist()]


def generate_with_transformers(kind: str, prompt: list[int], new: int, eos: int | None = None) -> list[int]:
    ids = torch.tensor([prompt])
    out = module(kind).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


# ---- greedy


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_is_transformers_generate(kind):
    for prompt in PROMPTS:
        steps = generate(model(kind).cached_forward(), [prompt], new_tokens=12)
        assert answers(steps, [prompt]) == [generate_with_transformers(kind, prompt, 12)]
    assert len(set(generate_with_transformers(kind, PROMPTS[0], 12))) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_left_padded_batch_continues_as_its_samples_alone(kind):
    batched = generate(model(kind).cached_forward(), PROMPTS, new_tokens=10)
    for b, prompt in enumerate(PROMPTS):
        alone = generate(model(kind).cached_forward(), [prompt], new_tokens=10)
        for got, want in zip(batched, alone, strict=True):
            valid, offset = got.after.valid[b], int((~got.after.valid[b]).sum())
            assert torch.equal(got.after.tokens[b, valid], want.after.tokens[0])
            assert torch.equal(got.after.states[b, valid], want.after.states[0])
            mine = got.commits.sample == b
            assert torch.equal(got.commits.position[mine] - offset, want.commits.position)
            assert torch.equal(got.commits.row[mine] - offset, want.commits.row)
            torch.testing.assert_close(got.commits.confidence[mine], want.commits.confidence, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_changes_nothing(kind):
    cached = generate(model(kind).cached_forward(), PROMPTS, new_tokens=10)
    anew = generate(model(kind).forward, PROMPTS, new_tokens=10)
    for a, b in zip(cached, anew, strict=True):
        assert torch.equal(a.after.tokens, b.after.tokens)
        torch.testing.assert_close(a.commits.confidence, b.commits.confidence, rtol=1e-3, atol=1e-5)


def test_the_window_of_the_sliding_models_has_an_effect():
    """Otherwise the tests above could not detect whether it is applied."""
    import copy

    for kind in ("mistral with a window of 4", "gemma3"):
        config = copy.deepcopy(module(kind).config)
        config.sliding_window = 64
        wide = type(module(kind))(config).eval()
        wide.load_state_dict(module(kind).state_dict())
        steps = generate(Model(wide, model(kind).spec).cached_forward(), [PROMPTS[0]], new_tokens=12)
        narrow = generate(model(kind).cached_forward(), [PROMPTS[0]], new_tokens=12)
        assert not torch.equal(torch.cat([s.commits.confidence for s in steps]),
                               torch.cat([s.commits.confidence for s in narrow]))  # fmt: skip


# ---- steps


def table_model(logits: torch.Tensor):
    """The next token's logits are a row of [vocabulary, vocabulary], indexed by the last token."""

    def forward(canvas, rows):
        return logits[canvas.tokens[:, rows]]

    return forward


def successor(vocabulary: int = 12):
    """t is followed by t + 1, and the last by itself."""
    logits = torch.zeros(vocabulary, vocabulary)
    logits[torch.arange(vocabulary), (torch.arange(vocabulary) + 1).clamp_max(vocabulary - 1)] = 5.0
    return table_model(logits)


def test_a_step_appends_one_token_predicted_by_the_last_row():
    requests = []

    def forward(canvas, rows):
        requests.append((canvas.tokens.shape[1], rows.start, rows.stop))
        return successor()(canvas, rows)

    steps = generate(forward, [[1, 2], [4]], new_tokens=3)
    assert requests == [(2, 1, 2), (3, 2, 3), (4, 3, 4)]
    for number, step in enumerate(steps):
        assert step.before.step == step.after.step == number
        assert step.before.tokens.shape == (2, 2 + number)
        assert step.after.tokens.shape == (2, 3 + number)
        assert torch.equal(step.after.tokens[:, :-1], step.before.tokens)
        assert step.commits.sample.tolist() == [0, 1]
        assert step.commits.position.tolist() == [2 + number] * 2
        assert step.commits.row.tolist() == [1 + number] * 2
        assert step.commits.token.tolist() == step.after.tokens[:, -1].tolist() == [3 + number, 5 + number]
    last = steps[-1].after
    assert last.states.tolist() == [
        [State.PROMPT] * 2 + [State.COMMITTED] * 3,
        [State.PAD, State.PROMPT] + [State.COMMITTED] * 3,
    ]


def test_confidence_is_the_probability_of_the_token():
    logits = torch.randn(12, 12)
    for step in generate(table_model(logits), [[1, 2]], new_tokens=6):
        p = logits[step.before.tokens[0, -1]].softmax(-1)
        torch.testing.assert_close(step.commits.confidence, p.amax()[None])
        assert step.commits.token.tolist() == [int(p.argmax())]


def test_bf16_logits_are_converted_to_fp32():
    logits = torch.randn(12, 12)
    low = generate(table_model(logits.bfloat16()), [[1]], new_tokens=6)
    high = generate(table_model(logits.bfloat16().float()), [[1]], new_tokens=6)
    assert all(torch.equal(a.commits.confidence, b.commits.confidence) for a, b in zip(low, high, strict=True))
    assert low[0].commits.confidence.dtype == torch.float32


def test_the_callers_canvas_is_not_modified():
    canvas = build_canvas([[1, 2], [3]], 4, None)
    tokens, states = canvas.tokens.clone(), canvas.states.clone()
    list(autoregress(successor(), canvas, resolve_sampling(Paradigm.ARM, new_tokens=4)))
    assert torch.equal(canvas.tokens, tokens)
    assert torch.equal(canvas.states, states)


def test_regions_are_cropped_to_the_growing_canvas():
    regions = Regions.from_spans([{"prompt": [(0, 2)], "answer": [(2, 5)]}, {"prompt": [(1, 2)]}], 5)
    for step in generate(successor(), [[1, 2], [3]], new_tokens=3, regions=regions):
        for canvas in (step.before, step.after):
            assert canvas.regions.names == ("prompt", "answer")
            assert torch.equal(canvas.regions.member, regions.member[:, : canvas.tokens.shape[1]])


# ---- end tokens


def test_a_sample_that_has_ended_is_filled_up_until_the_others_are_done():
    steps = generate(successor(), [[1], [6], [3, 4]], end_ids=(8,), new_tokens=10)
    assert answers(steps, [[1], [6], [3, 4]]) == [[2, 3, 4, 5, 6, 7, 8], [7, 8, 8, 8, 8, 8, 8], [5, 6, 7, 8, 8, 8, 8]]
    assert [s.before.active.tolist() for s in steps] == [[True, n < 2, n < 4] for n in range(7)]
    assert [s.commits.sample.tolist() for s in steps] == [[0, 1, 2]] * 2 + [[0, 2]] * 2 + [[0]] * 3
    for step in steps:
        assert len(step.commits.confidence) == len(step.commits.token) == len(step.commits)


def test_any_end_token_ends_a_sample():
    steps = generate(successor(), [[1], [6]], end_ids=(9, 4), new_tokens=10)
    assert answers(steps, [[1], [6]]) == [[2, 3, 4], [7, 8, 9]]


def test_an_end_token_in_the_prompt_does_not_end_a_sample():
    assert len(generate(successor(), [[8, 1]], end_ids=(8,), new_tokens=4)) == 4


def test_without_stop_generation_continues_after_an_end_token():
    assert len(generate(successor(), [[6]], end_ids=(8,), new_tokens=5, stop=False)) == 5
    assert len(generate(successor(), [[6]], new_tokens=5)) == 5  # and where nothing ends a text


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_sample_ends_where_transformers_generate_ends(kind):
    free = [generate_with_transformers(kind, p, 12) for p in PROMPTS]
    eos = free[0][5]
    steps = generate(model(kind).cached_forward(), PROMPTS, end_ids=(eos,), new_tokens=12)
    for got, prompt in zip(answers(steps, PROMPTS), PROMPTS, strict=True):
        want = generate_with_transformers(kind, prompt, 12, eos)
        assert got[: len(want)] == want
        assert got[len(want) :] == [eos] * (len(got) - len(want))


def test_eos_never_is_never_drawn():
    steps = generate(successor(), [[6]], end_ids=(8, 11), eos="never", new_tokens=4)
    assert 8 not in answers(steps, [[6]])[0]


# ---- sampled tokens


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.7}, {"temperature": 1.0, "top_k": 3}],
    ids=str,
)
def test_a_sampled_token_is_the_argmax_of_logits_and_keyed_noise(given):
    logits = torch.randn(12, 12)
    prompts, names = [[1, 2, 3], [4]], ["a", "b"]
    steps = generate(table_model(logits), prompts, samples=names, new_tokens=8, seed=5, **given)
    for number, step in enumerate(steps):
        for b, name in enumerate(names):
            x = [v / given["temperature"] for v in logits[step.before.tokens[b, -1]].tolist()]
            p, mass, allowed = softmax(x), 0.0, set()
            for token in sorted(range(12), key=lambda t: -p[t]):
                if mass <= given.get("top_p", 1) and len(allowed) < given.get("top_k", 12):
                    allowed.add(token)
                mass += p[token]
            at = len(prompts[b]) + number  # the place of the new token, padding not counted
            key = step_keys(5, [name], number, "token")
            noise = gumbel(key, at * 2**32 + torch.arange(12)).tolist()
            race = [x[t] + noise[t] if t in allowed else -math.inf for t in range(12)]
            assert int(step.commits.token[b]) == race.index(max(race))
            confidence = softmax(logits[step.before.tokens[b, -1]].tolist())[int(step.commits.token[b])]
            assert float(step.commits.confidence[b]) == pytest.approx(confidence, rel=1e-5)


def test_sampled_tokens_are_the_same_in_a_batch_and_alone():
    logits = torch.randn(12, 12)
    given = {"new_tokens": 9, "temperature": 1.0, "end_ids": (2,), "seed": 1}
    prompts, names = [[1, 2, 3], [4], [5, 6]], ["a", "b", "c"]
    batched = answers(generate(table_model(logits), prompts, samples=names, **given), prompts)
    for b, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        (alone,) = answers(generate(table_model(logits), [prompt], samples=[name], **given), [prompt])
        assert batched[b][: len(alone)] == alone


def test_names_seeds_and_steps_change_the_sampled_tokens():
    flat = table_model(torch.zeros(12, 12))

    def run(name, seed=0):
        return answers(generate(flat, [[1]], samples=[name], new_tokens=12, temperature=1.0, seed=seed), [[1]])[0]

    assert run("a") == run("a")
    assert len({tuple(run("a")), tuple(run("b")), tuple(run("a", 1))}) == 3
    assert len(set(run("a"))) > 3


def test_sampled_tokens_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]]).expand(5, 5)
    draws = 3000
    for temperature, top_p, top_k in [(1.0, None, None), (0.5, None, None), (1.0, 0.7, None), (1.0, None, 2)]:
        given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "new_tokens": 1}
        counts = generate(table_model(logits), [[1]] * draws, **given)[0].commits.token.bincount(minlength=5)
        p = (logits[0] / temperature).softmax(-1)
        keep = {None: 5, 0.7: 2}[top_p] if top_k is None else top_k
        p = torch.where(p >= p.sort(descending=True).values[keep - 1], p, 0.0)
        want = p / p.sum() * draws
        assert counts[want == 0].sum() == 0
        assert ((counts - want)[want > 0] ** 2 / want[want > 0]).sum() < 18.5  # 99.9 % of χ², 4 degrees of freedom
