"""An adaptation as a whole: it lowers the loss, breaks off and goes on, and leaves a model that opens."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTJConfig, GPTJForCausalLM
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from floatscope.errors import UserError
from floatscope.lab.adapt import legs, lessons, train
from floatscope.lab.adapt.card import card
from floatscope.lab.adapt.held import apart
from floatscope.lab.adapt.low_rank import learn
from floatscope.lab.adapt.material import Given, prepare
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.training.checkpoint import PIECE
from floatscope.models.load import load
from floatscope.models.random import write_random
from floatscope.tasks.read import read_samples

BASE = "twin:arm"
RECIPE = Recipe(rank=4, steps=8, tokens=512, length=128, lengths=(256, 512), warmup=2, peak=3e-3)


def adapted(folder, small, recipe=RECIPE, minutes=5.0, base=BASE, **how):
    return list(legs.leg(base, folder, small.given, recipe, minutes, device="cpu", **how))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, small) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "material"
    prepare(folder, load(BASE), small.given)
    return folder


@pytest.fixture
def begun(tmp_path, prepared) -> Path:
    shutil.copytree(prepared, tmp_path / "out" / "material")
    return tmp_path / "out"


@pytest.fixture(scope="module")
def done(tmp_path_factory, prepared, small) -> Path:
    folder = tmp_path_factory.mktemp("done") / "out"
    shutil.copytree(prepared, folder / "material")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "EVERY", 4)
        adapted(folder, small, command="floatscope adapt twin:arm", licence="none")
    return folder


def test_the_masked_loss_falls(done, prepared):
    """The same masks on the same rows, before and after."""
    ids = prepare(prepared, load(BASE), Given()).ids("held")
    tokens = torch.from_numpy(ids[:512].astype("int64")).view(4, 128)
    before, after = load(BASE), load(f"{BASE}+{done / 'adapter'}")
    learn(before.module, after.spec.mask_id, RECIPE.rank)
    losses = []
    for model in (before, after):
        forward = train._forward(model.module, 1.0, torch.Generator())
        with torch.inference_mode():
            draw = torch.Generator().manual_seed(0)
            losses.append(float(train.diffusion_loss(forward, tokens, draw, after.spec.mask_id)))
    assert losses[1] < 0.9 * losses[0]
    curve = json.loads((done / "adapter" / "training.json").read_text())["losses"]
    assert [step for step, *_ in curve] == [4, 8]


def broken_off(folder, small, monkeypatch, at: int) -> None:
    """A leg whose time is over after so many steps."""
    with monkeypatch.context() as patch:
        first = legs.leg(BASE, folder, small.given, RECIPE, 5.0, device="cpu")
        for told in first:
            if told.step == at:
                patch.setattr(legs.Leg, "over", property(lambda _: True))
                break
        list(first)


def test_two_legs_equal_one(done, begun, small, monkeypatch):
    monkeypatch.setattr(train, "EVERY", 4)
    broken_off(begun, small, monkeypatch, at=5)
    (kept,) = (begun / "steps").iterdir()
    assert kept.name == "step-000005"
    assert all(piece.stat().st_size < 1.01 * PIECE for piece in kept.glob("*.safetensors"))
    assert not (begun / "adapter").exists()
    adapted(begun, small)
    one, two = (load_file(folder / "adapter" / "adapter.safetensors") for folder in (done, begun))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    told = [json.loads((folder / "adapter" / "training.json").read_text()) for folder in (done, begun)]
    assert told[0]["losses"] == told[1]["losses"]


def test_what_is_left_opens_decodes_and_has_a_card(done):
    model = load(f"{BASE}+{done / 'adapter'}")
    assert model.spec.paradigm == "mdm"
    assert model.spec.name == "twin:arm+out/adapter"
    said = fs.decode(model, "Question: Where?\nAnswer:", new_tokens=4, watch=fs.Watch())
    assert said.traces[0].received().shape[0] == 4
    scores = json.loads((done / "adapter" / "scores.json").read_text())
    assert [row["ratio"] for row in scores["masked"]] == [0.15, 0.3, 0.5, 0.7, 0.85]
    text = card(done / "adapter")
    assert (done / "adapter" / "README.md").read_text() == text
    for piece in ("floatscope adapt twin:arm", "rank 4", "`held.txt`", "held apart", "Masks filled on held-out text"):
        assert piece in text
    assert legs.unfinished(done) == []


def test_whole_weights_can_be_learnt_and_are_kept_in_small_pieces(begun, small, monkeypatch):
    monkeypatch.setattr("floatscope.lab.training.checkpoint.PIECE", 100_000)
    adapted(begun, small, replace(RECIPE, rank=0, steps=2))
    sizes = [piece.stat().st_size for piece in begun.glob("steps/*/piece-*.safetensors")]
    assert len(sizes) > 100
    assert max(sizes) < 130_000
    model = load(f"{BASE}+{begun / 'adapter'}")
    stored = load_file(begun / "adapter" / "adapter.safetensors")
    assert stored.keys() == dict(model.module.named_parameters()).keys()
    assert all(torch.equal(p, stored[n].float()) for n, p in model.module.named_parameters())


def test_rows_are_the_same_whoever_makes_them_and_answers_stand_in_them(prepared):
    material = prepare(prepared, load(BASE), Given())
    recipe = replace(RECIPE, tokens=4096)
    one, two = lessons.Maker(material, recipe)(3), lessons.Maker(material, recipe)(3)
    assert (one.tokens == two.tokens).all()
    assert (one.text == two.text).all()
    text = material.source().text
    for tokens, roles in zip(one.tokens, one.roles, strict=True):
        prompt, answer = (text.decode(tokens[roles == r].tolist()) for r in (lessons.PROMPT, lessons.ANSWER))
        assert re.sub(r"\s", "", answer) in re.sub(r"\s", "", prompt)
        assert prompt.rstrip().endswith("Answer:")
        kinds = roles[roles != lessons.PAD].tolist()
        assert kinds == sorted(kinds)
        assert tokens[roles == lessons.ANSWER][-1] == material.facts["end"]


def test_another_answer_is_put_into_the_passages(small):
    sample = read_samples(small.folder / "train.jsonl")[0]
    other = lessons.swapped(sample, "Atlantis")
    assert other.answers == ("Atlantis",)
    assert "Atlantis" in " ".join(p.text for p in other.passages)
    assert sample.answers[0] not in " ".join(p.text for p in other.passages)


def test_the_mask_is_opened_step_by_step():
    recipe = replace(RECIPE, steps=20, anneal=10)
    assert [train.opened(recipe, step) for step in (0, 4, 9, 10, 11)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert train.opened(RECIPE, 0) == 1.0


def rows_that_see(forward, valid: torch.Tensor | None) -> list[int]:
    """Of the first row of two, those that another token at position 9 changes."""
    tokens = torch.randint(0, 4000, (2, 14), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 9] = (tokens[0, 9] + 1) % 4000
    with torch.inference_mode():
        moved = (forward(tokens, valid) - forward(other, valid)).abs().amax(-1)
    assert not moved[1].any()
    return moved[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_a_sibling_looks_both_ways_and_a_control_back_only(padded):
    module = load(BASE).module
    valid = None
    if padded:
        valid = torch.ones(2, 14, dtype=torch.bool)
        valid[0, 12:] = False
    until = 12 if padded else 14
    both, back = (train._forward(module, 1.0, torch.Generator(), causal=causal) for causal in (False, True))
    assert [row for row in rows_that_see(both, valid) if row < until] == list(range(until))
    assert [row for row in rows_that_see(back, valid) if row < until] == list(range(9, until))
    if valid is not None:
        hidden = valid.clone()
        hidden[0, 9] = False
        assert [row for row in rows_that_see(both, hidden) if row < until] == [9]
    barely = train._forward(module, 1e-9, torch.Generator().manual_seed(0))
    assert [row for row in rows_that_see(barely, valid) if row < until] == list(range(9, until))


def test_a_half_open_mask_shows_a_later_token_to_some():
    tokens = torch.zeros(1, 400, dtype=torch.long)
    sees = train._half_open(tokens, None, 0.5, torch.Generator().manual_seed(0))[0, 0]
    assert sees.tril().sum() == 400 * 401 // 2
    later = torch.ones(400, 400).triu(1).bool()
    assert float(sees[later].double().mean()) == pytest.approx(0.5, abs=0.01)


def test_every_step_draws_its_own_masks(begun, small, monkeypatch):
    seeds, loss = [], train.diffusion_loss
    monkeypatch.setattr(
        train, "diffusion_loss", lambda f, x, draw, m: (seeds.append(draw.initial_seed()), loss(f, x, draw, m))[1]
    )
    adapted(begun, small, replace(RECIPE, steps=3))
    assert len(set(seeds)) == 3


def test_a_network_that_takes_no_half_open_mask_is_refused_in_a_sentence():
    from transformers import BloomConfig, BloomForCausalLM

    module = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)).eval()
    tokens = torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(UserError, match=r"BloomForCausalLM takes no half-open mask \(.+\); leave --anneal out"):
        train._forward(module, 0.5, torch.Generator())(tokens, None)


def test_annealing_trains(begun, small):
    adapted(begun, small, replace(RECIPE, steps=3, anneal=2))
    assert (begun / "adapter" / "README.md").read_text().count("opened over 2 steps") == 1


def test_a_control_learns_the_next_token_and_stays_autoregressive(begun, small, monkeypatch):
    monkeypatch.setattr(train, "EVERY", 4)
    adapted(begun, small, replace(RECIPE, control=True))
    model = load(f"{BASE}+{begun / 'adapter'}")
    assert (model.spec.paradigm, model.spec.mask_id, model.spec.cache) == ("arm", None, True)
    assert fs.decode(model, "Question: Where?\nAnswer:", new_tokens=4).tokens.shape[0] == 1
    curve = json.loads((begun / "adapter" / "training.json").read_text())["losses"]
    assert curve[-1][1] < curve[0][1]
    text = (begun / "adapter" / "README.md").read_text()
    assert text.startswith("# A control of twin:arm")
    assert "causal mask | kept" in text
    assert not load_file(begun / "adapter" / "adapter.safetensors").keys() & {"mask_embedding"}


def test_a_held_file_is_refused_by_what_is_in_it(tmp_path, small):
    import gzip

    same = tmp_path / "other-name.jsonl.gz"
    same.write_bytes(gzip.compress((small.folder / "asked.jsonl").read_bytes()))
    given = replace(small.given, data=[same])
    with pytest.raises(UserError, match=r"other-name.jsonl.gz is the same as asked.jsonl, which is for evaluation"):
        list(legs.leg(BASE, tmp_path / "out", given, RECIPE, 1.0, device="cpu"))
    ours = Path(fs.__file__).parent / "assets" / "questions" / "reading-5.jsonl"
    with pytest.raises(UserError, match=r"is the same as reading-5.jsonl, which is for evaluation"):
        list(legs.leg(BASE, tmp_path / "out", replace(small.given, data=[ours]), RECIPE, 1.0, device="cpu"))
    assert not (tmp_path / "out" / "material").exists()


def test_held_questions_and_passages_are_left_out(small):
    train_, held = (read_samples(small.folder / f"{name}.jsonl") for name in ("train", "asked"))
    same_question = replace(train_[0], question=f"The {held[0].question.upper()}!")
    same_passage = replace(train_[1], passages=held[3].passages)
    assert apart([same_question, same_passage, *train_], held) == (train_, 2)


def told(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["adapt", *map(str, words)])
    return result.exit_code, result.output


def test_mistakes_are_one_sentence_and_status_2(tmp_path, small, base, done):
    full = write_random(tmp_path / "full", "llama", vocabulary=259)  # as many as its tokenizer has
    text = ("--text", small.folder / "text.txt")
    short = tmp_path / "short.txt"
    short.write_text("A few words.\n")
    keeps = shutil.copytree(base, tmp_path / "keeps")
    GPTJForCausalLM(GPTJConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=300, rotary_dim=4)).save_pretrained(keeps)
    bare = shutil.copytree(base, tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    out = ("--out", tmp_path / "out")
    for words, said in {
        (full, *text, *out): "has no free id for a mask; name a token your texts never have",
        (base, *text, "--out", tmp_path / "bytes", "--workers", "0"): "of 100 questions none fits into a row of",
        (BASE, *out): "there is no text to learn from; give --text FILE, once for each",
        ("twin:mdm", *text, *out): "twin:mdm is no autoregressive model",
        (BASE, *text, *out, "--mask", "<nothing>"): "'<nothing>' is no token of twin:arm",
        (BASE, *text, *out, "--rank", "-1"): "the rank is a number from 1 on",
        (BASE, *text, *out, "--tokens", "10"): "a step has at least one row of text, which is 512 tokens, got 10",
        (BASE, *text, *out, "--peak", "nan"): "the highest learning rate is a number above 0, got nan",
        (BASE, *text, *out, "--seed", str(1 << 70)): "the seed is a number from 0 to 4294967295",
        (BASE, *text, *out, "--mask", "Ġriver"): "the mask Ġriver stands 60 times in the text; give another",
        (BASE, *text, "--held-text", short, "--out", tmp_path / "held"): "are the least to measure on; give more of it",
        (keeps, *text, *out): "keeps its causal mask whatever it is told",
        (BASE, *text, *out, "--steps", "10", "--anneal", "20"): "the mask is opened over 0 to 10 steps, got 20",
        (BASE, *text, *out, "--control", "--anneal", "5"): "a control keeps its causal mask; leave --anneal out",
        (
            f"{BASE}+{done / 'adapter'}",
            *text,
            *out,
        ): "has an adapter already, and only a base can be adapted",
        (BASE, *text, *out, "--rank", "300"): "a projection has rank 256, and 300 is more; give less, or --rank 0",
        (
            BASE,
            *text,
            "--held-text",
            text[1],
            "--out",
            tmp_path / "new",
        ): "text.txt is the same as text.txt, which is for",
        (BASE, *text, "--out", text[1]): "cannot write the material to",
        (BASE, *text, *out, "--control", "--mask", "9"): "a control has no mask; leave --mask out",
        (bare, *text, *out, "--control"): "has no tokenizer, and an adaptation reads text; give a base that has one",
        (BASE, *text, *out, "--mask", "Question", "--workers", "0"): "the mask Question stands in the questions or",
        (BASE, "--text", tmp_path / "none.txt", *out): "cannot read",
        (BASE, *text, "--data", tmp_path / "none.jsonl", *out): "cannot read",
    }.items():
        status, output = told(*words)
        assert status == 2, output
        assert said in " ".join(output.split()), output
        assert len(output.strip().splitlines()) == 1


def test_material_of_another_base_is_refused(done, small):
    with pytest.raises(UserError, match="was prepared for another base; use another --out"):
        prepare(done / "material", load("twin:mdm"), small.given)


def test_a_loss_that_is_no_number_ends_the_training(begun, small, monkeypatch):
    monkeypatch.setattr(train, "EVERY", 1)
    monkeypatch.setattr(train, "diffusion_loss", lambda *_: torch.tensor(float("nan"), requires_grad=True))
    with pytest.raises(UserError, match="no number any more at step 1; begin anew, with a lower --peak"):
        adapted(begun, small)
    assert not (begun / "steps").exists()


def test_two_files_of_one_name_are_refused(small, tmp_path):
    (tmp_path / "text.txt").write_text("other")
    with pytest.raises(UserError, match=r"two files are called text\.txt; rename one"):
        adapted(tmp_path / "out", replace(small, given=replace(small.given, held_text=[tmp_path / "text.txt"])))


def test_another_recipe_or_other_files_are_refused(done, small, tmp_path):
    with pytest.raises(UserError, match=r"is of another training \(adapter, rank 4, not 8\); use another --out"):
        adapted(done, small, replace(RECIPE, rank=8))
    other = tmp_path / "other.txt"
    other.write_text("something else\n")
    with pytest.raises(UserError, match=r"was prepared from text.txt, train.jsonl"):
        prepare(done / "material", load(BASE), replace(small.given, text=[other]))


def test_another_mask_is_refused_between_legs_and_at_the_end(done, begun, small, monkeypatch):
    with pytest.raises(UserError, match=r"is of another training \(adapter, mask_id 4095, not 9\); use another --out"):
        adapted(done, small, mask="9")
    broken_off(begun, small, monkeypatch, at=1)
    with pytest.raises(UserError, match=r"step-000001 is of another training \(adapter, mask_id 4095, not 9\)"):
        adapted(begun, small, mask="9")


def test_a_leg_without_time_does_a_step_or_the_scores(begun, small):
    recipe = replace(RECIPE, steps=2)
    adapted(begun, small, recipe, minutes=0.0)
    assert [p.name for p in (begun / "steps").iterdir()] == ["step-000001"]
    adapted(begun, small, recipe, minutes=0.0)
    assert legs.unfinished(begun) == ["its scores"]
    adapted(begun, small, recipe, minutes=0.0)
    assert legs.unfinished(begun) == []


def test_steps_that_were_learnt_from_other_files_are_refused(begun, small, tmp_path, monkeypatch):
    """Also when what was prepared from them is gone, so that nothing learnt can be held apart later."""
    broken_off(begun, small, monkeypatch, at=1)
    shutil.rmtree(begun / "material")
    given = replace(small.given, data=small.given.held_data, held_data=small.given.data)
    with pytest.raises(UserError, match="step-000001 learnt from other files or another base; give those, or use"):
        adapted(begun, replace(small, given=given))


def test_another_base_is_refused_when_all_is_done(done, small, base):
    with pytest.raises(UserError, match="the adapter belongs to twin:arm"):
        adapted(done, small, base=str(base))


def test_a_base_that_reads_little_is_adapted_and_the_same_command_is_done(tmp_path, small):
    few = shutil.copytree(Path(fs.__file__).parent / "assets" / "twins" / "arm", tmp_path / "few")
    config = json.loads((few / "config.json").read_text()) | {"max_position_embeddings": 256}
    (few / "config.json").write_text(json.dumps(config))
    for _ in range(2):
        adapted(tmp_path / "out", small, replace(RECIPE, steps=1, length=512), base=str(few))
    scores = json.loads((tmp_path / "out" / "adapter" / "scores.json").read_text())
    assert {row["length"] for row in scores["masked"]} == {256}
    assert "over rows of 256 tokens" in card(tmp_path / "out" / "adapter")
