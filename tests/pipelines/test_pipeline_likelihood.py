"""The NLL of an answer equals a slow reference: one forward from left to right, or a plain sampler loop."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import floatscope as fs
from floatscope.canvas import CanvasState
from floatscope.pipelines.likelihood import encode_continuation
from floatscope.schema import State
from floatscope.tasks.sample_files import read_samples
from floatscope.tasks.template import load_template
from pairs import every_pair, slow_except
from type_checks import unchecked

MASK, EOS, NEW = 49, 48, 8
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [40]]
ANSWERS = [[11, 12, 13], [14], [15, 16, 17, 18, 19, 20, 21]]
TARGET_IDS = [[*answer, *[EOS] * (NEW - len(answer))] for answer in ANSWERS]


def build_model(kind: str, seed: int = 0) -> fs.Model:
    """A tiny model with random weights: autoregressive, LLaDA-like, or Dream-like."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    paradigm, mask = (fs.Paradigm.ARM, None) if kind == "arm" else (fs.Paradigm.MDM, MASK)
    spec = fs.ModelSpec(kind, paradigm, mask, shift=kind != "unshifted", eos_id=EOS)
    return fs.Model(LlamaForCausalLM(config).eval(), spec)


def log_p(model: fs.Model, tokens: list[int]) -> torch.Tensor:
    """The log-probabilities of every row of one canvas, in float64."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model.forward(CanvasState(ids, torch.full_like(ids, int(State.PROMPT))))
    return logits[0].double().log_softmax(-1)


def compute_dense_nll(model: fs.Model, prompt: list[int], answer: list[int]) -> float:
    """The NLL from one forward over prompt and answer."""
    target = [*answer, EOS]
    rows = log_p(model, [*prompt, *target])
    return -sum(float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(target)) / len(target)


def run_sampler_loop(model: fs.Model, prompt: list[int], answer: list[int], each: int = 1, block: int = NEW) -> float:
    """The NLL from a plain loop: the most confident proposals of a block are written first, `each` per step."""
    target = [*answer, *[EOS] * (NEW - len(answer))]
    x, start, surprise = [*prompt, *[MASK] * NEW], len(prompt), {}
    for lo in range(start, start + NEW, block):
        while any(x[p] == MASK for p in range(lo, lo + block)):
            rows = log_p(model, x)
            at = {p: rows[max(p - 1, 0) if model.spec.shift else p] for p in range(lo, lo + block) if x[p] == MASK}
            for p in sorted(at, key=lambda p: -float(at[p].max()))[:each]:
                x[p] = target[p - start]
                surprise[p - start] = -float(at[p][x[p]])
    counted = len(answer) + 1
    return sum(surprise[i] for i in range(counted)) / counted


# ---- definition


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cache", [True, False])
def test_the_nll_of_an_arm_is_the_usual_likelihood(seed, cache):
    model = build_model("arm", seed)
    model = fs.Model(model.module, replace(model.spec, supports_cache=cache))
    want = [compute_dense_nll(model, prompt, answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    assert fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=NEW) == pytest.approx(want, rel=1e-4)
    # more new tokens, the same NLL
    assert fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=20) == pytest.approx(want, rel=1e-4)


SAMPLER_LOOPS = [  # the settings, and the same of the loop
    ({}, {}),
    ({"steps": 4}, {"each": 2}),
    ({"steps": 1}, {"each": NEW}),
    ({"block": 4}, {"block": 4}),
    ({"block": 4, "steps": 4}, {"block": 4, "each": 2}),
]


@every_pair(seed=range(4), kind=["unshifted", "shifted"], case=SAMPLER_LOOPS)
def test_the_nll_of_an_mdm_follows_the_order_of_its_sampler(seed, kind, case):
    settings, loop = case
    model = build_model(kind, seed)
    want = [run_sampler_loop(model, prompt, answer, **loop) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    assert fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=NEW, **settings) == pytest.approx(want, rel=1e-4)
    one_by_one = [
        fs.answer_nll(model, prompt, answer, new_tokens=NEW, **settings)[0]
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    assert one_by_one == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("kind", ["arm", "unshifted"])
def test_settings_are_passed_to_decode(kind):
    model = build_model(kind)
    settings = {"temperature": 1.0, "seed": 3, "samples": ["a", "b", "c"], "watch": fs.Watch()}
    settings |= {} if kind == "arm" else {"sampler": "random"}
    out = fs.decode(model, PROMPTS, target_ids=TARGET_IDS, **settings)
    total = [0.0] * 3
    for commits in (step.commits for step in out):
        for b, position, p in zip(commits.sample, commits.position, commits.confidence, strict=True):
            if position < out.answer_start + len(ANSWERS[b]) + 1:
                total[b] -= math.log(p)
    want = [each / (len(answer) + 1) for each, answer in zip(total, ANSWERS, strict=True)]
    assert fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=NEW, **settings) == pytest.approx(want, rel=1e-6)


def test_an_impossible_answer_has_an_infinite_nll():
    model = build_model("arm")
    with torch.no_grad():
        model.module.lm_head.weight[11] *= -1e5
        model.module.lm_head.weight[12] *= 1e5
    assert math.inf in fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=NEW)


# ---- teacher forcing


@pytest.mark.parametrize("kind", ["arm", "unshifted", "shifted"])
def test_targets_are_written_and_end_tokens_do_not_stop(kind):
    out = fs.decode(build_model(kind), PROMPTS, target_ids=TARGET_IDS)
    start = out.answer_start
    assert out.tokens[:, start:].tolist() == TARGET_IDS
    assert out.generated_ids == ANSWERS
    assert len(out.steps) == NEW
    assert all(step.commits.sample.tolist() == [0, 1, 2] for step in out)


@pytest.mark.parametrize("kind", ["arm", "unshifted", "shifted"])
def test_targets_equal_to_the_own_answer_change_nothing(kind):
    settings = {"new_tokens": NEW, "stop": False, "watch": fs.Watch()}
    free = fs.decode(build_model(kind), PROMPTS, **settings)
    answer = free.tokens[:, free.answer_start :].tolist()
    forced = fs.decode(build_model(kind), PROMPTS, target_ids=answer, **settings)
    for a, b in zip(free, forced, strict=True):
        for name in ("sample", "position", "row", "token", "confidence"):
            assert torch.equal(getattr(a.commits, name), getattr(b.commits, name))
    for one, other in zip(free.traces, forced.traces, strict=True):
        assert all((one.arrays[name] == other.arrays[name]).all() for name in ("commit_confidence", "top_key"))
        assert other.meta == {**one.meta, "teacher_forcing": True}


def test_mistakes_get_a_one_sentence_error(tmp_path):
    mdm = fs.load(fs.write_random(tmp_path / "m"), device="cpu")
    without_end = fs.Model(mdm.module, fs.ModelSpec("bare", fs.Paradigm.MDM, mdm.spec.mask_id))
    without_tokenizer = fs.Model(mdm.module, mdm.spec)
    ids = [[1, 2], [3]]

    def nll(answers, **settings):
        return fs.answer_nll(mdm, ids, answers, **{"new_tokens": 4, **settings})

    mistakes = [
        (
            lambda: fs.decode(mdm, ids, target_ids=[[4, 5]]),
            "target_ids has 1 lists for 2 prompts; give one for each prompt",
        ),
        (
            lambda: fs.decode(mdm, ids, target_ids=[[4, 5], [6]]),
            "target_ids[1] has 1 tokens and new_tokens is 2; give as many",
        ),
        (
            lambda: fs.decode(mdm, ids, target_ids=[[4, 5], [6, 7]], new_tokens=3),
            "target_ids[0] has 2 tokens and new_tokens is 3; give as many",
        ),
        (
            lambda: fs.decode(mdm, ids, target_ids=[[4, 5], [6, 99999]]),
            "token 99999 of target_ids[1] is not in m's vocabulary, 0 … 511",
        ),
        (
            lambda: fs.decode(mdm, ids, target_ids=[[4, 5], [6, mdm.spec.mask_id]]),
            "target_ids[1] contains the mask token (261); remove it",
        ),
        (
            lambda: fs.decode(mdm, ids, target_ids=[[4, 5], [6, 7]], infill=True),
            "target_ids gives all new tokens, but infill fills masks inside the prompt; leave one of them out",
        ),
        (
            lambda: fs.decode(mdm, ids, target_ids=[[4, 5], [6, 7]], stop=True),
            "target_ids gives all new tokens, but stop ends a text at its first end token; leave one of them out",
        ),
        (lambda: fs.decode(mdm, ids, target_ids=[4, 5]), "target_ids[0] must be a list of token ids, got 4"),
        (lambda: fs.decode(mdm, ids, target_ids=["a", "b"]), "target_ids[0] must be a list of token ids, got 'a'"),
        (lambda: fs.decode(mdm, ids, target_ids=[]), "target_ids must be a list of token ids for each prompt, got []"),
        (lambda: fs.decode(mdm, ids, target_ids=5), "target_ids must be a list of token ids for each prompt, got 5"),
        (lambda: nll(["a"]), "1 answers for 2 prompts; give one for each"),
        (lambda: nll(["a", ""]), "answer 1 is empty; give a text or token ids"),
        (
            lambda: nll(["a", [6, 7, 8, 9]]),
            "answer 1 has 4 tokens and an end token, which exceeds new_tokens=4; give new_tokens=5 or more",
        ),
        (lambda: nll([[5], [6, 1.5]]), "answer 1 must be a list of token ids, got [6, 1.5]"),
        (
            lambda: nll([[5], [6, mdm.spec.eos_id]]),
            "answer 1 contains an end token (257); leave it out, one is added to every answer",
        ),
        (
            lambda: nll(["a", "b"], eos="last"),
            "an answer ends with an end of text, which eos='last' excludes; leave eos out",
        ),
        (lambda: nll(["a", "b"], new_tokens="4"), "new_tokens must be a whole number, got '4'"),
        (
            lambda: fs.answer_nll(mdm.module, ids, ["a", "b"], new_tokens=4),
            "answer_nll needs a floatscope Model (fs.load), got LlamaForCausalLM",
        ),
        (
            lambda: fs.answer_nll(without_end, ids, ["a", "b"], new_tokens=4),
            "bare has no end token, and an answer ends with one; use fs.decode(target_ids=…)",
        ),
        (
            lambda: fs.answer_nll(without_tokenizer, ids, ["a", "b"], new_tokens=4),
            "m has no tokenizer: give answers as lists of token ids",
        ),
    ]
    with unchecked():
        for mistake, sentence in mistakes:
            with pytest.raises(fs.UserError, match=f"^{re.escape(sentence)}$"):
                mistake()


# ---- answers as text


@pytest.fixture(scope="module")
def twins():
    return {name: fs.load(f"twin:{name}", device="cpu") for name in ("arm", "mdm", "mdm-adapted")}


def test_an_answer_is_encoded_as_in_the_twins_training(twins):
    tokenizer = twins["mdm"].tokenizer
    for sample in read_samples("twin:reading-5", 20):
        prompt, answer = tokenizer.encode(load_template().prompt(sample).text), sample.answers[0]
        alone = tokenizer.hf(f" {answer}", add_special_tokens=False)["input_ids"]
        assert (
            encode_continuation(tokenizer, prompt, answer)
            == encode_continuation(tokenizer, prompt, f" {answer} ")
            == alone
        )


def test_there_is_one_space_before_an_answer(twins):
    tokenizer = twins["mdm"].tokenizer
    assert tokenizer.pieces(encode_continuation(tokenizer, tokenizer.encode("Answer:"), "flute"))[0].startswith(" ")
    for before in ("Answer:\n", "Answer: ", "", "<|endoftext|>"):
        assert tokenizer.decode(encode_continuation(tokenizer, tokenizer.encode(before), "flute")) == "flute"


def test_in_a_chat_an_end_of_turn_follows_the_answer(tmp_path):
    model = fs.load(fs.write_random(tmp_path / "llada", layers=2, width=32), device="cpu")
    assert model.tokenizer is not None
    assert model.tokenizer.has_chat_template
    model = fs.Model(model.module, replace(model.spec, eot_id=7), model.tokenizer)
    eos, answer = model.spec.eos_id, model.tokenizer.encode("wood")[len(model.tokenizer.encode("")) :]
    for chat, end in ((None, 7), (False, eos)):
        prompt = model.tokenizer.encode("What floats?", chat=chat is None)
        answer_ids = answer if chat is None else encode_continuation(model.tokenizer, prompt, "wood")
        target = [*answer_ids, end, *[eos] * (11 - len(answer_ids))]
        p = torch.cat([step.commits.confidence for step in fs.decode(model, [prompt], target_ids=[target], block=1)])
        want = float(-p[: len(answer_ids) + 1].double().log().mean())
        assert fs.answer_nll(model, "What floats?", "wood", new_tokens=12, block=1, chat=chat) == pytest.approx([want])


@pytest.mark.parametrize("name", slow_except(["arm", "mdm", "mdm-adapted"], "mdm"))
def test_a_passage_makes_its_answer_more_likely(twins, name):
    samples = read_samples("twin:reading-5", 6)
    answers = [sample.answers[0] for sample in samples]
    shown, hidden = (
        fs.answer_nll(twins[name], [load_template().prompt(s).text for s in variant], answers, new_tokens=NEW)
        for variant in (samples, [replace(s, passages=()) for s in samples])
    )
    assert all(with_ < without for with_, without in zip(shown, hidden, strict=True))
    assert sum(shown) / 6 < 0.5 < 2 < sum(hidden) / 6
