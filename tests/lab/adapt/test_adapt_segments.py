"""A complete adaptation: the loss falls, it resumes after an interruption, and the result opens as a model."""

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
from floatscope.lab.adapt import examples, scores, segments, train
from floatscope.lab.adapt.card import card
from floatscope.lab.adapt.corpus import TrainingFiles, exclude_held_out, prepare_corpus
from floatscope.lab.adapt.examples import BatchMaker
from floatscope.lab.adapt.lora import make_trainable
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.training.checkpoint import MAX_SHARD_BYTES
from floatscope.lab.training.progress import ProgressEvent
from floatscope.models.loader import load
from floatscope.models.random_checkpoints import write_random
from floatscope.pipelines.job import BatchDone, Job
from floatscope.tasks.sample_files import read_samples

BASE = "twin:arm"
RECIPE = Recipe(rank=4, steps=8, tokens=512, length=128, lengths=(256, 512), warmup=2, lr=3e-3)


def run(folder, small, recipe=RECIPE, minutes=5.0, base=BASE, **options):
    return list(segments.train_segment(base, folder, small.files, recipe, minutes, device="cpu", **options))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, small) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "corpus"
    prepare_corpus(folder, load(BASE), small.files)
    return folder


@pytest.fixture
def begun(tmp_path, prepared) -> Path:
    shutil.copytree(prepared, tmp_path / "out" / "corpus")
    return tmp_path / "out"


@pytest.fixture(scope="module")
def done(tmp_path_factory, prepared, small) -> Path:
    folder = tmp_path_factory.mktemp("done") / "out"
    shutil.copytree(prepared, folder / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "LOG_EVERY", 4)
        run(folder, small, command="floatscope adapt twin:arm", licence="none")
    return folder


@pytest.mark.slow
def test_masked_loss_falls(done, prepared):
    """Compare the same masks on the same rows before and after."""
    ids = prepare_corpus(prepared, load(BASE), TrainingFiles()).ids("held_out")
    tokens = torch.from_numpy(ids[:512].astype("int64")).view(4, 128)
    before, after = load(BASE), load(f"{BASE}+{done / 'adapter'}")
    make_trainable(before.module, after.spec.mask_id, RECIPE.rank)
    losses = []
    for model in (before, after):
        forward = train._make_forward(model.module, 1.0, torch.Generator())
        with torch.inference_mode():
            rng = torch.Generator().manual_seed(0)
            losses.append(float(train.diffusion_loss(forward, tokens, rng, after.spec.mask_id)))
    assert losses[1] < 0.9 * losses[0]
    curve = json.loads((done / "adapter" / "training.json").read_text())["losses"]
    assert [step for step, *_ in curve] == [4, 8]


def interrupt(folder, small, monkeypatch, at: int) -> None:
    """Run a segment whose time is over after step `at`."""
    with monkeypatch.context() as patch:
        events = segments.train_segment(BASE, folder, small.files, RECIPE, 5.0, device="cpu")
        for event in events:
            if event.step == at:
                patch.setattr(segments.Segment, "is_over", property(lambda _: True))
                break
        list(events)


@pytest.mark.slow
def test_two_segments_equal_one(done, begun, small, monkeypatch):
    monkeypatch.setattr(train, "LOG_EVERY", 4)
    interrupt(begun, small, monkeypatch, at=5)
    (checkpoint,) = (begun / "checkpoints").iterdir()
    assert checkpoint.name == "step-000005"
    assert all(shard.stat().st_size < 1.01 * MAX_SHARD_BYTES for shard in checkpoint.glob("*.safetensors"))
    assert not (begun / "adapter").exists()
    run(begun, small)
    one, two = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (done, begun))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    records = [json.loads((folder / "adapter" / "training.json").read_text()) for folder in (done, begun)]
    assert records[0]["losses"] == records[1]["losses"]


def test_adapter_opens_decodes_and_has_a_card(done):
    model = load(f"{BASE}+{done / 'adapter'}")
    assert model.spec.paradigm == "mdm"
    assert model.spec.name == "twin:arm+out/adapter"
    out = fs.decode(model, "Question: Where?\nAnswer:", new_tokens=4, watch=fs.Watch())
    assert out.traces[0].received().shape[0] == 4
    stored = json.loads((done / "adapter" / "scores.json").read_text())
    assert [row["ratio"] for row in stored["masked"]] == [0.15, 0.3, 0.5, 0.7, 0.85]
    text = card(done / "adapter")
    assert (done / "adapter" / "README.md").read_text() == text
    for piece in ("floatscope adapt twin:arm", "rank 4", "`held.txt`", "held out", "Masked-token accuracy"):
        assert piece in text
    assert segments.remaining_work(done) == []


@pytest.mark.slow
def test_all_weights_can_be_trained_and_are_saved_in_small_shards(begun, small, monkeypatch):
    monkeypatch.setattr("floatscope.lab.training.checkpoint.MAX_SHARD_BYTES", 100_000)
    run(begun, small, replace(RECIPE, rank=0, steps=2))
    sizes = [shard.stat().st_size for shard in begun.glob("checkpoints/*/shard-*.safetensors")]
    assert len(sizes) > 100
    assert max(sizes) < 130_000
    model = load(f"{BASE}+{begun / 'adapter'}")
    stored = load_file(begun / "adapter" / "adapter.safetensors")
    assert stored.keys() == dict(model.module.named_parameters()).keys()
    assert all(torch.equal(p, stored[n].float()) for n, p in model.module.named_parameters())


def test_batches_are_reproducible_and_prompts_contain_their_answers(prepared):
    corpus = prepare_corpus(prepared, load(BASE), TrainingFiles())
    recipe = replace(RECIPE, tokens=4096)
    one, two = BatchMaker(corpus, recipe)(3), BatchMaker(corpus, recipe)(3)
    assert (one.tokens == two.tokens).all()
    assert (one.text == two.text).all()
    tokenizer = corpus.question_format().tokenizer
    for tokens, roles in zip(one.tokens, one.roles, strict=True):
        prompt, answer = (tokenizer.decode(tokens[roles == r].tolist()) for r in (examples.PROMPT, examples.ANSWER))
        assert re.sub(r"\s", "", answer) in re.sub(r"\s", "", prompt)
        assert prompt.rstrip().endswith("Answer:")
        kinds = roles[roles != examples.PAD].tolist()
        assert kinds == sorted(kinds)
        assert tokens[roles == examples.ANSWER][-1] == corpus.facts.end_id


def test_swapped_answer_replaces_the_old_one_in_the_passages(small):
    sample = read_samples(small.folder / "train.jsonl")[0]
    other = examples.swap_answer(sample, "Atlantis")
    assert other.answers == ("Atlantis",)
    assert "Atlantis" in " ".join(p.text for p in other.passages)
    assert sample.answers[0] not in " ".join(p.text for p in other.passages)


def test_causal_mask_is_opened_step_by_step():
    recipe = replace(RECIPE, steps=20, anneal=10)
    assert [train.open_share(recipe, step) for step in (0, 4, 9, 10, 11)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    assert train.open_share(RECIPE, 0) == 1.0


def rows_affected(forward, valid: torch.Tensor | None) -> list[int]:
    """Return the positions of the first row whose logits change with the token at position 9."""
    tokens = torch.randint(0, 4000, (2, 14), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 9] = (tokens[0, 9] + 1) % 4000
    with torch.inference_mode():
        moved = (forward(tokens, valid) - forward(other, valid)).abs().amax(-1)
    assert not moved[1].any()
    return moved[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_sibling_attends_both_ways_and_control_backwards_only(padded):
    module = load(BASE).module
    valid = None
    if padded:
        valid = torch.ones(2, 14, dtype=torch.bool)
        valid[0, 12:] = False
    until = 12 if padded else 14
    bidirectional, causal = (train._make_forward(module, 1.0, torch.Generator(), causal=c) for c in (False, True))
    assert [row for row in rows_affected(bidirectional, valid) if row < until] == list(range(until))
    assert [row for row in rows_affected(causal, valid) if row < until] == list(range(9, until))
    if valid is not None:
        hidden = valid.clone()
        hidden[0, 9] = False
        assert [row for row in rows_affected(bidirectional, hidden) if row < until] == [9]
    barely = train._make_forward(module, 1e-9, torch.Generator().manual_seed(0))
    assert [row for row in rows_affected(barely, valid) if row < until] == list(range(9, until))


def test_partial_mask_shows_half_of_the_later_keys():
    tokens = torch.zeros(1, 400, dtype=torch.long)
    sees = train._sample_partial_mask(tokens, None, 0.5, torch.Generator().manual_seed(0))[0, 0]
    assert sees.tril().sum() == 400 * 401 // 2
    later = torch.ones(400, 400).triu(1).bool()
    assert float(sees[later].double().mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
def test_every_step_has_its_own_seed(begun, small, monkeypatch):
    seeds, loss = [], train.diffusion_loss
    monkeypatch.setattr(
        train, "diffusion_loss", lambda f, x, rng, m: (seeds.append(rng.initial_seed()), loss(f, x, rng, m))[1]
    )
    run(begun, small, replace(RECIPE, steps=3))
    assert len(set(seeds)) == 3


def test_network_that_accepts_no_4d_mask_is_refused():
    from transformers import BloomConfig, BloomForCausalLM

    module = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)).eval()
    tokens = torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(UserError, match=r"Bloom\w+ does not accept a 4D attention mask \(.+\); leave --anneal out"):
        train._make_forward(module, 0.5, torch.Generator())(tokens, None)


@pytest.mark.slow
def test_annealing_trains(begun, small):
    run(begun, small, replace(RECIPE, steps=3, anneal=2))
    assert (begun / "adapter" / "README.md").read_text().count("opened over 2 steps") == 1


@pytest.mark.slow
def test_control_trains_the_next_token_and_stays_autoregressive(begun, small, monkeypatch):
    monkeypatch.setattr(train, "LOG_EVERY", 4)
    run(begun, small, replace(RECIPE, control=True))
    model = load(f"{BASE}+{begun / 'adapter'}")
    assert (model.spec.paradigm, model.spec.mask_id, model.spec.supports_cache) == ("arm", None, True)
    assert fs.decode(model, "Question: Where?\nAnswer:", new_tokens=4).tokens.shape[0] == 1
    curve = json.loads((begun / "adapter" / "training.json").read_text())["losses"]
    assert curve[-1][1] < curve[0][1]
    text = (begun / "adapter" / "README.md").read_text()
    assert text.startswith("# A control of twin:arm")
    assert "causal mask | kept" in text
    stored = load_file(begun / "adapter" / "adapter_model.safetensors")
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in stored)


def test_held_out_file_is_refused_by_its_content(tmp_path, small):
    import gzip

    same = tmp_path / "other-name.jsonl.gz"
    same.write_bytes(gzip.compress((small.folder / "eval.jsonl").read_bytes()))
    files = replace(small.files, data=[same])
    with pytest.raises(UserError, match=r"other-name.jsonl.gz has the same content as eval.jsonl, which is held"):
        run(tmp_path / "out", replace(small, files=files))
    shipped = Path(fs.__file__).parent / "assets" / "questions" / "reading-5.jsonl"
    with pytest.raises(UserError, match=r"has the same content as reading-5.jsonl, which is held out"):
        run(tmp_path / "out", replace(small, files=replace(small.files, data=[shipped])))
    assert not (tmp_path / "out" / "corpus").exists()


def test_held_out_questions_and_passages_are_excluded(small):
    samples, held_out = (read_samples(small.folder / f"{name}.jsonl") for name in ("train", "eval"))
    same_question = replace(samples[0], question=f"The {held_out[0].question.upper()}!")
    same_passage = replace(samples[1], passages=held_out[3].passages)
    assert exclude_held_out([same_question, same_passage, *samples], held_out) == (samples, 2)


def run_command(*words: object) -> tuple[int, str]:
    """Return the status and the error output of `floatscope adapt`."""
    result = CliRunner().invoke(app, ["adapt", *map(str, words)])
    return result.exit_code, result.stderr


def test_user_errors_are_one_sentence_with_status_2(tmp_path, small, base, done):
    full = write_random(tmp_path / "full", "llama", vocab_size=259)  # as many as its tokenizer has
    text = ("--text", small.folder / "text.txt")
    short = tmp_path / "short.txt"
    short.write_text("A few words.\n")
    keeps = shutil.copytree(base, tmp_path / "keeps")
    GPTJForCausalLM(GPTJConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=300, rotary_dim=4)).save_pretrained(keeps)
    bare = shutil.copytree(base, tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    usual = (*text, "--out", tmp_path / "out")
    adapter = f"{BASE}+{done / 'adapter'}"
    cases = [
        ((full, *usual), "has no free id for a mask; name a token that your texts do not contain"),
        ((base, *text, "--out", tmp_path / "bytes", "--workers", "0"), "of 100 questions none fits into a row of"),
        ((BASE, "--out", tmp_path / "out"), "there is no training text; give --text FILE, once per file"),
        (("twin:mdm", *usual), "twin:mdm is not an autoregressive model"),
        ((BASE, *usual, "--mask-token", "<nothing>"), "'<nothing>' is not a token of twin:arm"),
        ((BASE, *usual, "--batch-tokens", "10"), "at least one row of text, which has 512 tokens, got 10"),
        ((BASE, *usual, "--lr", "nan"), "the learning rate must be a number above 0, got nan"),
        ((BASE, *usual, "--seed", str(1 << 70)), "the seed must be a number from 0 to 4294967295"),
        ((BASE, *usual, "--mask-token", "Ġriver"), "the mask Ġriver occurs 60 times in the text; give another"),
        ((BASE, *text, "--held-out-text", short, "--out", tmp_path / "held"), "at least 512; give more of it"),
        ((keeps, *usual), "keeps its causal mask"),
        ((BASE, *usual, "--train-steps", "10", "--anneal", "20"), "can be opened over 0 to 10 steps, got 20"),
        ((BASE, *usual, "--autoregressive", "--anneal", "5"), "a control keeps its causal mask; leave --anneal out"),
        ((adapter, *usual), "already has an adapter; give the base alone: twin:arm"),
        ((BASE, *usual, "--rank", "300"), "the rank can be at most 256, got 300; give less, or --rank 0"),
        ((BASE, *text, "--held-out-text", text[1], "--out", tmp_path / "new"), "has the same content as text.txt"),
        ((BASE, *text, "--out", text[1]), "cannot write the corpus to"),
        ((BASE, *usual, "--autoregressive", "--mask-token", "9"), "a control has no mask; leave --mask-token out"),
        ((bare, *usual, "--autoregressive"), "has no tokenizer, which an adaptation needs; give a base that has one"),
        ((BASE, *usual, "--mask-token", "Question", "--workers", "0"), "the mask Question occurs in the questions"),
        ((BASE, "--text", tmp_path / "none.txt", "--out", tmp_path / "out"), "cannot read"),
        ((BASE, *text, "--data", tmp_path / "none.jsonl", "--out", tmp_path / "out"), "cannot read"),
    ]
    for words, message in cases:
        status, output = run_command(*words)
        assert status == 2, output
        assert message in " ".join(output.split()), output
        assert len(output.strip().splitlines()) == 1


def test_invalid_recipes_are_refused():
    with pytest.raises(UserError, match="the rank must be at least 1, or 0 to train all weights, got -1"):
        Recipe(rank=-1)
    with pytest.raises(UserError, match="steps must be at least 1, got 0"):
        Recipe(steps=0)


def test_corpus_of_another_base_is_refused(done, small):
    with pytest.raises(UserError, match="was prepared for another base; use another --out"):
        prepare_corpus(done / "corpus", load("twin:mdm"), small.files)


def test_loss_that_is_not_finite_stops_the_training(begun, small, monkeypatch):
    monkeypatch.setattr(train, "LOG_EVERY", 1)
    monkeypatch.setattr(train, "diffusion_loss", lambda *_: torch.tensor(float("nan"), requires_grad=True))
    with pytest.raises(UserError, match="the loss is not finite at step 1; start again with a lower --lr"):
        run(begun, small)
    assert not (begun / "checkpoints").exists()


def test_two_files_of_the_same_name_are_refused(small, tmp_path):
    (tmp_path / "text.txt").write_text("other")
    with pytest.raises(UserError, match=r"two files are named text\.txt; rename one"):
        run(tmp_path / "out", replace(small, files=replace(small.files, held_out_text=[tmp_path / "text.txt"])))


def test_another_recipe_or_other_files_are_refused(done, small, tmp_path):
    with pytest.raises(UserError, match=r"belongs to another training \(adapter, rank 4, not 8\); use another --out"):
        run(done, small, replace(RECIPE, rank=8))
    other = tmp_path / "other.txt"
    other.write_text("something else\n")
    with pytest.raises(UserError, match=r"was prepared from text.txt, train.jsonl"):
        prepare_corpus(done / "corpus", load(BASE), replace(small.files, text=[other]))


def test_another_mask_is_refused_between_segments_and_at_the_end(done, begun, small, monkeypatch):
    with pytest.raises(UserError, match=r"belongs to another training \(adapter, mask_id 4095, not 9\)"):
        run(done, small, mask="9")
    interrupt(begun, small, monkeypatch, at=1)
    with pytest.raises(UserError, match=r"step-000001 belongs to another training \(adapter, mask_id 4095, not 9\)"):
        run(begun, small, mask="9")


@pytest.mark.slow
def test_segment_without_time_trains_one_step_or_scores(begun, small):
    recipe = replace(RECIPE, steps=2)
    run(begun, small, recipe, minutes=0.0)
    assert [p.name for p in (begun / "checkpoints").iterdir()] == ["step-000001"]
    run(begun, small, recipe, minutes=0.0)
    assert segments.remaining_work(begun) == ["its scores"]
    run(begun, small, recipe, minutes=0.0)
    assert segments.remaining_work(begun) == []


def test_checkpoint_trained_on_other_files_is_refused(begun, small, tmp_path, monkeypatch):
    """Also without the prepared corpus: nothing that was trained on can become held-out later."""
    interrupt(begun, small, monkeypatch, at=1)
    shutil.rmtree(begun / "corpus")
    files = replace(small.files, data=small.files.held_out_data, held_out_data=small.files.data)
    with pytest.raises(UserError, match="step-000001 was trained on other files or another base; give those, or"):
        run(begun, replace(small, files=files))


def test_another_base_is_refused_for_a_finished_adapter(done, small, base):
    with pytest.raises(UserError, match="the adapter belongs to twin:arm"):
        run(done, small, base=str(base))


def test_base_with_a_short_context_is_adapted_and_the_command_can_be_repeated(tmp_path, small):
    short = shutil.copytree(Path(fs.__file__).parent / "assets" / "twins" / "arm", tmp_path / "short")
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 256}
    (short / "config.json").write_text(json.dumps(config))
    for _ in range(2):
        run(tmp_path / "out", small, replace(RECIPE, steps=1, length=512), base=str(short))
    stored = json.loads((tmp_path / "out" / "adapter" / "scores.json").read_text())
    assert {row["length"] for row in stored["masked"]} == {256}
    assert "over rows of 256 tokens" in card(tmp_path / "out" / "adapter")


def start_scores(done, folder) -> Path:
    """Copy a complete adaptation without its scores."""
    shutil.copytree(done, folder)
    shutil.rmtree(folder / "scores")
    (folder / "adapter" / "scores.json").unlink()
    return folder


def test_interrupted_scores_resume_and_equal_uninterrupted_ones(done, small, tmp_path, monkeypatch):
    folder = start_scores(done, tmp_path / "out")
    measured, measure = [], scores.row_accuracies
    monkeypatch.setattr(scores, "row_accuracies", lambda *args: (measured.append(1), measure(*args))[1])
    job = next(segments.train_segment(BASE, folder, small.files, RECIPE, 5.0, device="cpu"))
    assert isinstance(job, Job)
    for event in job:
        if isinstance(event, BatchDone) and event.done > job.total / 2:  # the base is done, the adapted model begins
            break
    before = len(measured)
    assert segments.remaining_work(folder) == ["its scores"]
    run(folder, small)
    assert len(measured) == len(job.parts[0].batch_plan)
    assert before < len(measured)
    for name in ("adapter/scores.json", "scores/predictions.jsonl"):
        assert (folder / name).read_bytes() == (done / name).read_bytes()


def test_command_shows_the_job_of_the_scores(done, tmp_path):
    words = ("--rank", "4", "--train-steps", "8", "--batch-tokens", "512", "--lr", "3e-3", "--device", "cpu")
    folder = start_scores(done, tmp_path / "out")
    training = folder / "adapter" / "training.json"
    lengths = {
        '"length": 128': '"length": 512',
        '"lengths": [256, 512]': '"lengths": [256, 512, 1024]',
        '"warmup": 2': '"warmup": 100',
    }
    for old, new in lengths.items():
        training.write_text(training.read_text().replace(old, new))
    result = CliRunner().invoke(app, ["adapt", BASE, "--out", str(folder), *words])
    assert result.exit_code == 0, result.output
    total = len(json.loads((folder / "scores" / "run.json").read_text())["samples"])
    assert re.search(rf"scoring +{total} of {total}, scores: in 0:", result.output)
    assert f"finished: {folder / 'adapter'} and its model card" in result.output


def test_json_has_a_line_per_step_and_the_result(done, monkeypatch):
    def two_steps(*_, **__):
        yield ProgressEvent("adapter", 1, 2, float("nan"), float("nan"), 300.0)
        yield ProgressEvent("adapter", 2, 2, 3.5, 1.25, 400.0)

    monkeypatch.setattr(segments, "train_segment", two_steps)
    result = CliRunner().invoke(app, ["adapt", BASE, "--out", str(done), "--json"])
    assert result.exit_code == 0, result.output
    opening, *steps = map(json.loads, result.stderr.splitlines())
    assert opening == {"event": "opening", "text": BASE}
    first = {"event": "step", "done": 1, "total": 2, "text_loss": None, "answer_loss": None, "tokens_per_second": 300}
    second = {**first, "done": 2, "text_loss": 3.5, "answer_loss": 1.25, "tokens_per_second": 400}
    assert steps == [first, second]
    assert json.loads(result.stdout) == {"out": str(done), "adapter": str(done / "adapter"), "remaining": []}
    monkeypatch.setattr(segments, "remaining_work", lambda _: ["its scores"])
    result = CliRunner().invoke(app, ["adapt", BASE, "--out", str(done), "--json"])
    assert json.loads(result.stdout) == {"out": str(done), "adapter": None, "remaining": ["its scores"]}


def test_interrupt_says_how_many_steps_are_saved(begun, small, monkeypatch):
    interrupt(begun, small, monkeypatch, at=2)

    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(segments, "train_segment", interrupted)
    status, output = run_command(BASE, "--out", begun, "--train-steps", "8")
    assert status == 130
    assert output == "floatscope: interrupted; 2 of 8 steps are saved; run the same command to resume\n"
