"""The NLL of an answer is what a dense restatement gives: one forward from left to right, or the sampler's own loop."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import floatscope as fs
from floatscope.canvas import CanvasState
from floatscope.lab.twins.heldout import read
from floatscope.pipelines.likelihood import continuation
from floatscope.schema import State
from floatscope.tasks.prompt import prompt_of

MASK, EOS, NEW = 49, 48, 8
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [40]]
ANSWERS = [[11, 12, 13], [14], [15, 16, 17, 18, 19, 20, 21]]
FORCED = [[*answer, *[EOS] * (NEW - len(answer))] for answer in ANSWERS]


def model_of(kind: str, seed: int = 0) -> fs.Model:
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
    family, mask = ("arm", None) if kind == "arm" else ("mdm", MASK)
    spec = fs.ModelSpec(kind, family, mask, shift=kind != "unshifted", eos_id=EOS)
    return fs.Model(LlamaForCausalLM(config).eval(), spec)


def log_p(model: fs.Model, tokens: list[int]) -> torch.Tensor:
    """Of every row of one canvas, in float64."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model.forward(CanvasState(ids, torch.full_like(ids, int(State.PROMPT))))
    return logits[0].double().log_softmax(-1)


def dense(model: fs.Model, prompt: list[int], answer: list[int]) -> float:
    """One forward over all of it."""
    told = [*answer, EOS]
    rows = log_p(model, [*prompt, *told])
    return -sum(float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(told)) / len(told)


def slowly(model: fs.Model, prompt: list[int], answer: list[int], each: int = 1, block: int = NEW) -> float:
    """The surest masks of the block by what the model itself would say are written first, `each` a step."""
    told = [*answer, *[EOS] * (NEW - len(answer))]
    x, start, surprise = [*prompt, *[MASK] * NEW], len(prompt), {}
    for lo in range(start, start + NEW, block):
        while any(x[p] == MASK for p in range(lo, lo + block)):
            rows = log_p(model, x)
            at = {p: rows[max(p - 1, 0) if model.spec.shift else p] for p in range(lo, lo + block) if x[p] == MASK}
            for p in sorted(at, key=lambda p: -float(at[p].max()))[:each]:
                x[p] = told[p - start]
                surprise[p - start] = -float(at[p][x[p]])
    counted = len(answer) + 1
    return sum(surprise[i] for i in range(counted)) / counted


# ---- what it is


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cache", [True, False])
def test_of_an_autoregressive_model_it_is_the_usual_likelihood(seed, cache):
    model = model_of("arm", seed)
    model = fs.Model(model.module, replace(model.spec, cache=cache))
    want = [dense(model, prompt, answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    assert fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=NEW) == pytest.approx(want, rel=1e-4)
    assert fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=20) == pytest.approx(want, rel=1e-4)  # more room, the same


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["unshifted", "shifted"])
@pytest.mark.parametrize(
    ("how", "loop"),
    [
        ({}, {}),
        ({"steps": 4}, {"each": 2}),
        ({"steps": 1}, {"each": NEW}),
        ({"block": 4}, {"block": 4}),
        ({"block": 4, "steps": 4}, {"block": 4, "each": 2}),
    ],
    ids=str,
)
def test_of_a_masked_diffusion_model_it_follows_the_order_of_its_sampler(seed, kind, how, loop):
    model = model_of(kind, seed)
    want = [slowly(model, prompt, answer, **loop) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    assert fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=NEW, **how) == pytest.approx(want, rel=1e-4)
    one_by_one = [
        fs.answer_nll(model, prompt, answer, new_tokens=NEW, **how)[0]
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    assert one_by_one == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("kind", ["arm", "unshifted"])
def test_settings_are_those_of_decode(kind):
    model = model_of(kind)
    how = {"temperature": 1.0, "seed": 3, "samples": ["a", "b", "c"], "watch": fs.Watch()}
    how |= {} if kind == "arm" else {"sampler": "random"}
    out = fs.decode(model, PROMPTS, target_ids=FORCED, **how)
    total = [0.0] * 3
    for commits in (step.commits for step in out):
        for b, position, p in zip(commits.sample, commits.position, commits.confidence, strict=True):
            if position < out.answer_start + len(ANSWERS[b]) + 1:
                total[b] -= math.log(p)
    want = [each / (len(answer) + 1) for each, answer in zip(total, ANSWERS, strict=True)]
    assert fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=NEW, **how) == pytest.approx(want, rel=1e-6)


def test_an_answer_that_cannot_come_is_infinitely_unlikely():
    model = model_of("arm")
    with torch.no_grad():
        model.module.lm_head.weight[11] *= -1e5
        model.module.lm_head.weight[12] *= 1e5
    assert math.inf in fs.answer_nll(model, PROMPTS, ANSWERS, new_tokens=NEW)


# ---- forced decoding


@pytest.mark.parametrize("kind", ["arm", "unshifted", "shifted"])
def test_forced_tokens_are_written_and_ends_stop_nothing(kind):
    out = fs.decode(model_of(kind), PROMPTS, target_ids=FORCED)
    start = out.answer_start
    assert out.tokens[:, start:].tolist() == FORCED
    assert out.generated == ANSWERS
    assert len(out.steps) == NEW
    assert all(step.commits.sample.tolist() == [0, 1, 2] for step in out)


@pytest.mark.parametrize("kind", ["arm", "unshifted", "shifted"])
def test_forcing_what_it_would_say_changes_nothing(kind):
    how = {"new_tokens": NEW, "stop": False, "watch": fs.Watch()}
    free = fs.decode(model_of(kind), PROMPTS, **how)
    said = free.tokens[:, free.answer_start :].tolist()
    forced = fs.decode(model_of(kind), PROMPTS, target_ids=said, **how)
    for a, b in zip(free, forced, strict=True):
        for name in ("sample", "position", "row", "token", "confidence"):
            assert torch.equal(getattr(a.commits, name), getattr(b.commits, name))
    for one, other in zip(free.traces, forced.traces, strict=True):
        assert all((one.arrays[name] == other.arrays[name]).all() for name in ("commit_confidence", "top_key"))
        assert other.meta == {**one.meta, "forced": True}


SLIPS = """
import floatscope as fs, sys
mdm = fs.load(fs.write_random(sys.argv[1]), device="cpu")
def said(slip):
    try:
        slip()
    except fs.UserError as error:
        print(error)
ids = [[1, 2], [3]]
said(lambda: fs.decode(mdm, ids, forced=[[4, 5]]))
said(lambda: fs.decode(mdm, ids, forced=[[4, 5], [6]]))
said(lambda: fs.decode(mdm, ids, forced=[[4, 5], [6, 7]], new_tokens=3))
said(lambda: fs.decode(mdm, ids, forced=[[4, 5], [6, 99999]]))
said(lambda: fs.decode(mdm, ids, forced=[[4, 5], [6, mdm.spec.mask_id]]))
said(lambda: fs.decode(mdm, ids, forced=[[4, 5], [6, 7]], infill=True))
said(lambda: fs.decode(mdm, ids, forced=[[4, 5], [6, 7]], stop=True))
said(lambda: fs.decode(mdm, ids, forced=[4, 5]))
said(lambda: fs.decode(mdm, ids, forced=["a", "b"]))
said(lambda: fs.decode(mdm, ids, forced=[]))
said(lambda: fs.decode(mdm, ids, forced=5))
nll = lambda answers, **how: said(lambda: fs.answer_nll(mdm, ids, answers, **{"new_tokens": 4, **how}))
nll(["a"])
nll(["a", ""])
nll(["a", [6, 7, 8, 9]])
nll([[5], [6, 1.5]])
nll([[5], [6, mdm.spec.eos_id]])
nll(["a", "b"], eos="last")
nll(["a", "b"], new_tokens="4")
said(lambda: fs.answer_nll(mdm.module, ids, ["a", "b"], new_tokens=4))
without = fs.Model(mdm.module, fs.ModelSpec("bare", "mdm", mdm.spec.mask_id))
said(lambda: fs.answer_nll(without, ids, ["a", "b"], new_tokens=4))
without = fs.Model(mdm.module, mdm.spec)
said(lambda: fs.answer_nll(without, ids, ["a", "b"], new_tokens=4))
"""


def test_slips_of_the_hand_get_a_sentence(tmp_path):
    """In a process of its own, because the shape checks of the tests would answer first."""
    done = subprocess.run([sys.executable, "-c", SLIPS, str(tmp_path / "m")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1 forced texts for 2 prompts; give one for each",
        "forced text 1 has 1 tokens and 2 new ones are asked for; give as many",
        "forced text 0 has 2 tokens and 3 new ones are asked for; give as many",
        "token 99999 of forced text 1 is not in m's vocabulary, 0 … 511",
        "forced text 1 contains the mask token (261); take it out",
        "forced gives all new tokens, and infill fills the masks inside a prompt; leave one of them out",
        "forced gives all new tokens, and stop ends a text where it ends; leave one of them out",
        "forced text 0 must be a list of token ids, got 4",
        "forced text 0 must be a list of token ids, got 'a'",
        "forced is a list of token ids for each prompt, got []",
        "forced is a list of token ids for each prompt, got 5",
        "1 answers for 2 prompts; give one for each",
        "answer 1 is empty; give a text or token ids",
        "answer 1 has 4 tokens and an end behind it, and 4 new ones are asked for; give new_tokens=5 or more",
        "answer 1 must be a list of token ids, got [6, 1.5]",
        "answer 1 holds an end of text (257); leave it out, one is put behind every answer",
        "an answer ends with an end of text, and eos='last' denies it; leave eos out",
        "new_tokens must be a whole number, got '4'",
        "answer_nll needs a floatscope Model (fs.load), got LlamaForCausalLM",
        "bare has no token that ends a text, and an answer ends with one; see decode(forced=…)",
        "m has no tokenizer: give answers as lists of token ids",
    ]


# ---- answers in words


@pytest.fixture(scope="module")
def twins():
    return {name: fs.load(f"twin:{name}", device="cpu") for name in ("arm", "mdm", "mdm-adapted")}


def test_an_answer_is_read_as_the_twins_were_taught(twins):
    text = twins["mdm"].text
    for sample in read("reading-5")[:20]:
        prompt, answer = text.encode(prompt_of(sample).text), sample.answers[0]
        alone = text.tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]
        assert continuation(text, prompt, answer) == continuation(text, prompt, f" {answer} ") == alone


def test_the_space_before_an_answer_stands_once(twins):
    text = twins["mdm"].text
    assert text.pieces(continuation(text, text.encode("Answer:"), "flute"))[0].startswith(" ")
    for before in ("Answer:\n", "Answer: ", "", "<|endoftext|>"):
        assert text.decode(continuation(text, text.encode(before), "flute")) == "flute"


def test_in_a_conversation_the_answer_begins_the_turn_and_the_end_of_the_turn_ends_it(tmp_path):
    model = fs.load(fs.write_random(tmp_path / "llada", layers=2, width=32), device="cpu")
    assert model.tokenizer is not None
    assert model.tokenizer.has_template
    model = fs.Model(model.module, replace(model.spec, eot_id=7), model.tokenizer)
    eos, answer = model.spec.eos_id, model.tokenizer.encode("wood")[len(model.tokenizer.encode("")) :]
    for chat, end in ((None, 7), (False, eos)):
        prompt = model.tokenizer.encode("What floats?", chat=chat is None)
        said = answer if chat is None else continuation(model.tokenizer, prompt, "wood")
        forced = [*said, end, *[eos] * (11 - len(said))]
        p = torch.cat([step.commits.confidence for step in fs.decode(model, [prompt], target_ids=[forced], block=1)])
        want = float(-p[: len(said) + 1].double().log().mean())
        assert fs.answer_nll(model, "What floats?", "wood", new_tokens=12, block=1, chat=chat) == pytest.approx([want])


@pytest.mark.parametrize("name", ["arm", "mdm", "mdm-adapted"])
def test_a_passage_makes_its_answer_likelier(twins, name):
    samples = read("reading-5")[:12]
    answers = [sample.answers[0] for sample in samples]
    shown, hidden = (
        fs.answer_nll(twins[name], [prompt_of(s).text for s in told], answers, new_tokens=NEW)
        for told in (samples, [replace(s, passages=()) for s in samples])
    )
    assert all(with_ < without for with_, without in zip(shown, hidden, strict=True))
    assert sum(shown) / 12 < 0.5 < 2 < sum(hidden) / 12
