"""A complete small training: three twins, their records, scores and cards; interruptions and full disks."""

from __future__ import annotations

import json
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import small
import torch
from msgspec import to_builtins
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from floatscope.files.digests import sha256_file
from floatscope.lab.training.checkpoint import Training, save_checkpoint
from floatscope.lab.training.progress import Progress, ProgressEvent
from floatscope.lab.twins import corpus as corpus_module
from floatscope.lab.twins import segments
from floatscope.lab.twins.attention import FLOATING_ROWS, measure_attention, read_attention
from floatscope.lab.twins.card import write_card
from floatscope.lab.twins.held_out import SIZES
from floatscope.lab.twins.scores import EvaluationEvent, evaluate_twin
from floatscope.lab.twins.train import build_module, build_optimizer

RECIPES = {kind: replace(recipe, steps=2) for kind, recipe in small.SMALL.items()}
CARD_TEXTS = {"command": "floatscope twins train --text text.txt", "licence": "CC0"}


@pytest.fixture(scope="module")
def complete_training(tmp_path_factory, corpus):
    """Return the folder of a complete training, and its events."""
    folder = start_folder(tmp_path_factory.mktemp("complete"), corpus)
    with pytest.MonkeyPatch.context() as patch:
        small.use_few_questions(patch)
        return folder, list(run(folder))


@pytest.fixture
def few(monkeypatch):
    small.use_few_questions(monkeypatch)


def start_folder(where: Path, corpus) -> Path:
    (where / "twins").mkdir()
    (where / "twins" / "corpus").symlink_to(corpus.folder)
    return where / "twins"


def copy_folder(complete_training, where: Path) -> Path:
    shutil.copytree(complete_training[0], where / "twins", symlinks=True)
    return where / "twins"


def run(folder: Path, minutes: float = 5.0, recipes=RECIPES):
    return segments.train_segment(folder, [], recipes, minutes, device="cpu", **CARD_TEXTS)


@pytest.mark.slow
def test_all_twins_are_trained_and_open_like_any_checkpoint(complete_training):
    folder, events = complete_training
    assert [t.kind for t in events if isinstance(t, ProgressEvent) and t.finished] == ["arm", "mdm", "mdm-adapted"]
    specs = {}
    for kind in RECIPES:
        model = fs.load(folder / "models" / kind, device="cpu")
        specs[kind] = (model.spec.architecture, model.spec.paradigm, model.spec.shift)
        out = fs.decode(model, "Question: Who?\nAnswer:", new_tokens=4, watch=fs.Watch())
        assert out.steps[0].before.tokens[0, 0] == RECIPES[kind].vocabulary - 2  # begins with bos
        assert len(out.trace.arrays["keys"]) >= 1
    assert specs["arm"] == ("causal", "arm", True)
    assert specs["mdm"] == ("llada", "mdm", False)
    assert specs["mdm-adapted"] == ("dream", "mdm", True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_training_json_records_the_training(complete_training, corpus, kind):
    folder = complete_training[0] / "models" / kind
    record = json.loads((folder / "training.json").read_text())
    assert record["kind"] == kind
    assert record["recipe"] == RECIPES[kind].as_json
    assert (record["seed"], record["steps"], record["tokens"]) == (0, 2, 2 * 8 * 96)
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"], rel=0.1)
    assert record["text"]["files"] == corpus.facts.text
    assert (record["text"]["tokens"], record["text"]["licence"]) == (corpus.facts.tokens, "CC0")
    assert record["command"] == CARD_TEXTS["command"]
    assert record["versions"].keys() == {"floatscope", "python", "torch", "transformers"}
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"].endswith("CPU")
    assert record["weights"] == sha256_file(folder / "model.safetensors")
    (last,) = record["losses"]
    assert last[0] == 2
    assert all(loss > 1 for loss in last[1:])


@pytest.mark.slow
def test_trained_twins_are_evaluated_and_get_cards(complete_training, few):
    folder, events = complete_training
    answered = [t for t in events if isinstance(t, EvaluationEvent) and t.file != "attention"]
    assert [t.answered for t in answered if t.kind == "mdm"] == list(range(1, 2 * len(SIZES) + 1))
    assert {t.questions for t in answered} == {2 * len(SIZES)}
    for kind in RECIPES:
        scores = json.loads((folder / "models" / kind / "scores.json").read_text())
        assert list(scores["files"]) == list(SIZES)
        assert all(file["n"] == 2 and file["low"] <= file["acc"] <= file["high"] for file in scores["files"].values())
        assert [place["n"] for place in scores["files"]["reading-5"]["by_gold"]] == [1, 1]
        assert (folder / "models" / kind / "README.md").read_text().startswith(f"# {kind}\n")
        tables = json.loads((folder / "models" / kind / "attention.json").read_text())["tables"]
        assert list(tables) == ["first key", "floating"] if kind == "arm" else ["first key", "floating", "masks"]
        assert len(tables["first key"]["rows"]) == RECIPES[kind].layers
        assert [row[:3] for row in tables["floating"]["rows"]] == [
            [index, group, layers] for index, group in FLOATING_ROWS for layers in ("all", "shallow", "deep")
        ]
    measured = [
        t.answered for t in events if isinstance(t, EvaluationEvent) and t.file == "attention" and t.kind == "mdm"
    ]
    assert measured == [1, 2, 3, 4]  # two questions each for the twin and one control
    assert segments.remaining_work(folder) == []
    assert list(run(folder)) == []


@pytest.mark.slow
def test_seconds_add_up_over_segments(tmp_path, corpus):
    folder = start_folder(tmp_path, corpus)
    recipes = {kind: replace(recipe, steps=10_000) for kind, recipe in RECIPES.items()}
    assert list(run(folder, minutes=0.0, recipes=recipes)) == []
    assert not (folder / "arm").exists()  # no step was trained, so nothing is saved
    seconds = []
    for count in range(1, 3):
        while len(seconds) < count:  # a segment this short may end before its first step
            list(run(folder, minutes=0.02, recipes=recipes))
            for checkpoint in folder.glob("arm/step-*"):
                progress = json.loads((checkpoint / "progress.json").read_text())
                if progress["seconds"] not in seconds:
                    seconds.append(progress["seconds"])
    assert 0 < seconds[0] < seconds[1]


@pytest.mark.slow
def test_killed_evaluation_keeps_the_scored_files(complete_training, tmp_path, few):
    folder = copy_folder(complete_training, tmp_path) / "models" / "mdm"
    complete = json.loads((folder / "scores.json").read_text())
    (folder / "scores.json").unlink()
    events = evaluate_twin(folder)
    for event in events:
        if event.answered == 5:
            break
    events.close()
    scored = json.loads((folder / "scores.json").read_text())["files"]
    assert list(scored) == list(SIZES)[:2]
    rest = list(evaluate_twin(folder))
    assert [event.answered for event in rest] == list(range(5, 2 * len(SIZES) + 1))
    assert json.loads((folder / "scores.json").read_text()) == complete


@pytest.mark.slow
def test_evaluation_stops_after_a_file_when_the_time_is_over(complete_training, tmp_path, few):
    folder = copy_folder(complete_training, tmp_path) / "models" / "arm"
    (folder / "scores.json").unlink()
    times = iter([False, False, True])
    list(evaluate_twin(folder, is_over=lambda: next(times)))
    assert list(json.loads((folder / "scores.json").read_text())["files"]) == ["reading-1"]
    assert list(evaluate_twin(folder, is_over=lambda: True)) == []


@pytest.mark.slow
def test_segment_without_time_leaves_the_scores_to_the_next(complete_training, tmp_path, few):
    folder = copy_folder(complete_training, tmp_path)
    (folder / "models" / "mdm" / "scores.json").unlink()
    assert list(run(folder, minutes=0.0)) == []
    assert segments.remaining_work(folder) == ["scores of mdm"]
    assert {event.kind for event in run(folder)} == {"mdm"}
    shutil.rmtree(folder / "models" / "mdm-adapted")
    assert segments.remaining_work(folder) == ["mdm-adapted", "scores of mdm-adapted", "attention of mdm-adapted"]


@pytest.mark.slow
def test_attention_is_measured_once_per_weights(complete_training, tmp_path, few):
    folder = copy_folder(complete_training, tmp_path) / "models" / "mdm"
    assert list(measure_attention(folder)) == []
    record = json.loads((folder / "attention.json").read_text())
    (folder / "attention.json").write_text(json.dumps({**record, "weights": "of others"}))
    times = iter([False, False, True])
    assert len(list(measure_attention(folder, is_over=lambda: next(times)))) == 1  # interrupted: no result
    assert read_attention(folder) is None
    assert len(list(measure_attention(folder))) == 4
    assert to_builtins(read_attention(folder)) == record


@pytest.mark.slow
def test_other_weights_are_evaluated_again(complete_training, tmp_path, few):
    models = copy_folder(complete_training, tmp_path) / "models"
    shutil.copy(models / "mdm" / "scores.json", models / "arm" / "scores.json")
    assert len(list(evaluate_twin(models / "arm"))) == 2 * len(SIZES)
    assert list(evaluate_twin(models / "arm")) == []


@pytest.mark.slow
def test_models_of_another_training_are_refused(complete_training, tmp_path, few):
    folder = copy_folder(complete_training, tmp_path)
    shutil.rmtree(folder / "models" / "mdm-adapted")
    others = {kind: replace(recipe, lr=0.5) for kind, recipe in RECIPES.items()}
    with pytest.raises(fs.UserError, match=r"arm belongs to another training \(arm, lr 0\.001, not 0\.5\)"):
        list(run(folder, recipes=others))
    (folder / "models" / "arm" / "training.json").unlink()
    with pytest.raises(fs.UserError, match=r"arm has no training\.json, so floatscope did not train it"):
        list(run(folder))


@pytest.mark.slow
def test_missing_weights_are_named(complete_training, tmp_path, few):
    folder = copy_folder(complete_training, tmp_path)
    (folder / "models" / "mdm" / "model.safetensors").unlink()
    with pytest.raises(fs.UserError, match=r"cannot read \S+mdm/model\.safetensors: No such file"):
        list(run(folder))


@pytest.mark.slow
def test_models_of_floatscope_0_6_are_accepted(complete_training, tmp_path, few):
    folder = copy_folder(complete_training, tmp_path)
    shutil.rmtree(folder / "models" / "mdm-adapted")
    file = folder / "models" / "arm" / "training.json"
    file.write_text(file.read_text().replace('"lr"', '"peak"').replace('"weight_decay"', '"decay"'))
    assert next(run(folder)).kind == "mdm-adapted"


def test_unfinished_training_of_floatscope_0_6_is_refused(tmp_path):
    (tmp_path / "material").mkdir()
    with pytest.raises(fs.UserError, match=r"holds a training that floatscope 0\.6 began; finish it with that version"):
        list(run(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training.json", "scores.json"])
def test_damaged_records_are_named(complete_training, tmp_path, few, name):
    folder = copy_folder(complete_training, tmp_path)
    record = (folder / "models" / "arm" / name).read_text()
    other_types = (record.replace('"weights": "', '"weights": 3, "x": "'), record.replace('"device"', '"devise"'))
    for content in ('{"kind": "ar', "[1, 2]", "", *other_types):
        (folder / "models" / "arm" / name).write_text(content)
        with pytest.raises(fs.UserError, match=rf"arm/{name} is damaged .*; restore it from a copy, or remove it"):
            list(run(folder))


@contextmanager
def limit_file_size(size: int):
    """Let the kernel refuse writes beyond `size`, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL = r"cannot write the {} to \S+ \([^)]*File too large.*\); make room there and run the same command again"


@pytest.mark.slow
def test_full_disk_while_the_corpus_is_prepared(tmp_path, few, monkeypatch):
    monkeypatch.setattr(corpus_module, "TOKENIZER_PROMPTS", 500)
    text = small.write_text(tmp_path)
    events = segments.train_segment(tmp_path / "twins", [text], RECIPES, 5.0, device="cpu")
    with limit_file_size(2000), pytest.raises(fs.UserError, match=FULL.format("corpus")):
        next(events)
    assert next(segments.train_segment(tmp_path / "twins", [text], RECIPES, 5.0, device="cpu")).kind == "arm"


def test_full_disk_while_a_checkpoint_is_written(tmp_path):
    recipe = RECIPES["arm"]
    module = build_module(recipe)
    optimizer = build_optimizer(module, recipe)
    training = Training(tmp_path, "arm", recipe, "files", module, optimizer)
    save_checkpoint(training, Progress(1, []))
    with limit_file_size(2000), pytest.raises(fs.UserError, match=FULL.format("checkpoint")):
        save_checkpoint(training, Progress(2, []))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.slow
def test_full_disk_while_a_model_is_written_keeps_the_checkpoint(tmp_path, corpus, monkeypatch):
    folder, write = start_folder(tmp_path, corpus), segments.write_twin

    def write_to_full_disk(*args):
        with limit_file_size(2000):
            write(*args)

    monkeypatch.setattr(segments, "write_twin", write_to_full_disk)
    with pytest.raises(fs.UserError, match=FULL.format("trained model")):
        list(run(folder))
    assert [p.name for p in (folder / "arm").iterdir()] == ["step-000002"]
    assert list((folder / "models").iterdir()) == []
    monkeypatch.setattr(segments, "write_twin", write)
    event = next(run(folder))
    assert (event.kind, event.step, event.finished) == ("arm", 2, True)


@pytest.mark.slow
def test_full_disk_while_scores_and_cards_are_written(complete_training, tmp_path, few):
    folder = copy_folder(complete_training, tmp_path) / "models" / "arm"
    (folder / "scores.json").unlink()
    with limit_file_size(100), pytest.raises(fs.UserError, match=FULL.format("scores")):
        list(evaluate_twin(folder))
    assert not list(folder.glob("scores*"))
    list(evaluate_twin(folder))
    card = (folder / "README.md").read_bytes()
    with limit_file_size(100), pytest.raises(fs.UserError, match=FULL.format("card")):
        write_card(folder)
    assert (folder / "README.md").read_bytes() == card


def run_command(*words: str):
    return CliRunner().invoke(app, ["twins", "train", *words])


@pytest.mark.slow
def test_command_resumes_and_says_what_remains(complete_training, tmp_path, few, monkeypatch):
    folder = copy_folder(complete_training, tmp_path)
    (folder / "models" / "mdm" / "scores.json").unlink()
    result = run_command("--out", str(folder), "--minutes", "0")
    assert result.exit_code == 0
    assert "this segment is over; still to do: scores of mdm; run the same command to resume" in result.output
    result = run_command("--out", str(folder), "--device", "cpu")
    assert result.exit_code == 0
    assert "score mdm" in result.output
    assert f"finished: the twins, their scores and their cards are in {folder / 'models'}" in result.output


def test_interrupt_says_how_many_steps_are_saved(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        (tmp_path / "arm" / "step-000120").mkdir(parents=True)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(segments, "train_segment", interrupted)
    result = run_command("--out", str(tmp_path), "--tiny")
    sentence = "interrupted; 120 of 200 steps of arm are saved; run the same command to resume"
    assert (result.exit_code, result.stderr) == (130, f"floatscope: {sentence}\n")


def test_command_and_licence_are_passed_to_the_cards(tmp_path, monkeypatch):
    passed = {}
    monkeypatch.setattr(segments, "train_segment", lambda *_, **options: passed.update(options) or iter(()))
    words = ["--out", str(tmp_path), "--licence", "CC BY-SA 3.0"]
    monkeypatch.setattr("sys.argv", ["somewhere/floatscope", "twins", "train", *words])
    assert "still to do: arm, mdm, mdm-adapted, scores of arm" in run_command(*words).output
    assert passed["command"] == f"floatscope twins train --out {tmp_path} --licence 'CC BY-SA 3.0'"
    assert passed["licence"] == "CC BY-SA 3.0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no training text; give --text FILE, once per file"),
        (["--text", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--device", "abacus"], "unknown device 'abacus'; allowed: cpu, cuda"),
    ],
)
def test_user_errors_are_one_sentence_with_status_2(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = run_command(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"floatscope: {message}")
    assert result.stderr.count("\n") == 1
