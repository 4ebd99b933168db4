"""A whole training in small: three twins, their records, scores and cards; broken off anywhere, on a full disk too."""

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
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from floatscope.files.records import digest
from floatscope.lab.training.checkpoint import Training, save
from floatscope.lab.training.progress import Progress
from floatscope.lab.twins import evaluate, legs, material
from floatscope.lab.twins.attention import observe, read_attention
from floatscope.lab.twins.card import write_card
from floatscope.lab.twins.evaluate import Asked
from floatscope.lab.twins.heldout import SIZES
from floatscope.lab.twins.train import new_module, optimizer_for

RECIPES = {kind: replace(recipe, steps=2) for kind, recipe in small.SMALL.items()}
SAID = {"command": "floatscope twins train --text text.txt", "licence": "CC0"}


@pytest.fixture(scope="module")
def done(tmp_path_factory, prepared):
    """(the folder of a training from end to end, what it told)."""
    folder = begun(tmp_path_factory.mktemp("done"), prepared)
    with pytest.MonkeyPatch.context() as patch:
        small.few_questions(patch)
        return folder, list(leg(folder))


@pytest.fixture
def few(monkeypatch):
    small.few_questions(monkeypatch)


def begun(where: Path, prepared) -> Path:
    (where / "twins").mkdir()
    (where / "twins" / "material").symlink_to(prepared.folder)
    return where / "twins"


def copied(done, where: Path) -> Path:
    shutil.copytree(done[0], where / "twins", symlinks=True)
    return where / "twins"


def leg(folder: Path, minutes: float = 5.0, recipes=RECIPES):
    return legs.leg(folder, [], recipes, minutes, device="cpu", **SAID)


def test_all_three_are_trained_and_open_like_any_checkpoint(done):
    folder, told = done
    assert [t.kind for t in told if isinstance(t, legs.Told) and t.finished] == ["arm", "mdm", "mdm-adapted"]
    layouts = {}
    for kind in RECIPES:
        model = fs.load(folder / "models" / kind, device="cpu")
        layouts[kind] = (model.spec.architecture, model.spec.paradigm, model.spec.shift)
        out = fs.decode(model, "Question: Who?\nAnswer:", new_tokens=4, watch=fs.Watch())
        assert out.steps[0].before.tokens[0, 0] == RECIPES[kind].vocabulary - 2  # begins with bos
        assert len(out.trace.arrays["keys"]) >= 1
    assert layouts["arm"] == ("causal", "arm", True)
    assert layouts["mdm"] == ("llada", "mdm", False)
    assert layouts["mdm-adapted"] == ("dream", "mdm", True)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_twin_tells_how_it_was_trained(done, prepared, kind):
    folder = done[0] / "models" / kind
    told = json.loads((folder / "training.json").read_text())
    assert told["kind"] == kind
    assert told["recipe"] == RECIPES[kind].as_json
    assert (told["seed"], told["steps"], told["tokens"]) == (0, 2, 2 * 8 * 96)
    assert told["tokens_per_second"] == pytest.approx(told["tokens"] / told["seconds"], rel=0.1)
    assert told["text"]["files"] == prepared.facts["text"]
    assert (told["text"]["tokens"], told["text"]["licence"]) == (prepared.facts["tokens"], "CC0")
    assert told["command"] == SAID["command"]
    assert told["versions"].keys() == {"floatscope", "python", "torch", "transformers"}
    assert told["versions"]["torch"] == torch.__version__
    assert told["device"].endswith("CPU")
    assert told["weights"] == digest(folder / "model.safetensors")
    (last,) = told["losses"]
    assert last[0] == 2
    assert all(loss > 1 for loss in last[1:])


def test_then_they_are_asked_and_get_their_cards(done, few):
    folder, told = done
    asked = [t for t in told if isinstance(t, Asked) and t.file != "attention"]
    assert [t.answered for t in asked if t.kind == "mdm"] == list(range(1, 2 * len(SIZES) + 1))
    assert {t.questions for t in asked} == {2 * len(SIZES)}
    for kind in RECIPES:
        scores = json.loads((folder / "models" / kind / "scores.json").read_text())
        assert list(scores["files"]) == list(SIZES)
        assert all(file["n"] == 2 and file["low"] <= file["acc"] <= file["high"] for file in scores["files"].values())
        assert [place["n"] for place in scores["files"]["reading-5"]["by_gold"]] == [1, 1]
        assert (folder / "models" / kind / "README.md").read_text().startswith(f"# {kind}\n")
        tables = json.loads((folder / "models" / kind / "attention.json").read_text())["tables"]
        assert list(tables) == ["first key", "floating"] if kind == "arm" else ["first key", "floating", "masks"]
        assert [len(table["rows"]) for table in tables.values()][:2] == [RECIPES[kind].layers, 6]  # shallow and deep
    watched = [t.answered for t in told if isinstance(t, Asked) and t.file == "attention" and t.kind == "mdm"]
    assert watched == [1, 2, 3, 4]  # two questions, by the twin and one control
    assert legs.unfinished(folder) == []
    assert list(leg(folder)) == []


def test_seconds_add_up_over_legs(tmp_path, prepared):
    folder = begun(tmp_path, prepared)
    recipes = {kind: replace(recipe, steps=10_000) for kind, recipe in RECIPES.items()}
    assert list(leg(folder, minutes=0.0, recipes=recipes)) == []
    assert not (folder / "arm").exists()  # no step was made, so nothing is kept
    seconds = []
    for legs_so_far in range(1, 3):
        while len(seconds) < legs_so_far:  # a leg this short may end before its first step
            list(leg(folder, minutes=0.02, recipes=recipes))
            for at in folder.glob("arm/step-*"):
                told = json.loads((at / "progress.json").read_text())
                if told["seconds"] not in seconds:
                    seconds.append(told["seconds"])
    assert 0 < seconds[0] < seconds[1]


def test_a_killed_examination_keeps_the_files_that_were_scored(done, tmp_path, few):
    folder = copied(done, tmp_path) / "models" / "mdm"
    whole = json.loads((folder / "scores.json").read_text())
    (folder / "scores.json").unlink()
    asking = evaluate.examine(folder)
    for asked in asking:
        if asked.answered == 5:
            break
    asking.close()
    kept = json.loads((folder / "scores.json").read_text())["files"]
    assert list(kept) == list(SIZES)[:2]
    rest = list(evaluate.examine(folder))
    assert [asked.answered for asked in rest] == list(range(5, 2 * len(SIZES) + 1))
    assert json.loads((folder / "scores.json").read_text()) == whole


def test_an_examination_ends_after_a_file_when_the_time_is_over(done, tmp_path, few):
    folder = copied(done, tmp_path) / "models" / "arm"
    (folder / "scores.json").unlink()
    times = iter([False, False, True])
    list(evaluate.examine(folder, over=lambda: next(times)))
    assert list(json.loads((folder / "scores.json").read_text())["files"]) == ["reading-1"]
    assert list(evaluate.examine(folder, over=lambda: True)) == []


def test_a_leg_without_time_leaves_the_scores_for_the_next(done, tmp_path, few):
    folder = copied(done, tmp_path)
    (folder / "models" / "mdm" / "scores.json").unlink()
    assert list(leg(folder, minutes=0.0)) == []
    assert legs.unfinished(folder) == ["scores of mdm"]
    assert {told.kind for told in leg(folder)} == {"mdm"}
    shutil.rmtree(folder / "models" / "mdm-adapted")
    assert legs.unfinished(folder) == ["mdm-adapted", "scores of mdm-adapted", "attention of mdm-adapted"]


def test_attention_is_measured_once_for_the_weights_that_are_there(done, tmp_path, few):
    folder = copied(done, tmp_path) / "models" / "mdm"
    assert list(observe(folder)) == []
    told = json.loads((folder / "attention.json").read_text())
    (folder / "attention.json").write_text(json.dumps({**told, "weights": "of others"}))
    times = iter([False, False, True])
    assert len(list(observe(folder, over=lambda: next(times)))) == 1  # broken off: nothing is said
    assert read_attention(folder) is None
    assert len(list(observe(folder))) == 4
    assert read_attention(folder) == told


def test_other_weights_are_asked_anew(done, tmp_path, few):
    models = copied(done, tmp_path) / "models"
    shutil.copy(models / "mdm" / "scores.json", models / "arm" / "scores.json")
    assert len(list(evaluate.examine(models / "arm"))) == 2 * len(SIZES)
    assert list(evaluate.examine(models / "arm")) == []


def test_models_of_another_training_are_refused(done, tmp_path, few):
    folder = copied(done, tmp_path)
    shutil.rmtree(folder / "models" / "mdm-adapted")
    others = {kind: replace(recipe, peak=0.5) for kind, recipe in RECIPES.items()}
    with pytest.raises(fs.UserError, match=r"arm is of another training \(arm, peak 0\.001, not 0\.5\); use another"):
        list(leg(folder, recipes=others))
    (folder / "models" / "arm" / "training.json").unlink()
    with pytest.raises(fs.UserError, match=r"arm has no training\.json: .* did not write it; use another --out"):
        list(leg(folder))


def test_a_model_without_weights_is_named(done, tmp_path, few):
    folder = copied(done, tmp_path)
    (folder / "models" / "mdm" / "model.safetensors").unlink()
    with pytest.raises(fs.UserError, match=r"cannot read \S+mdm/model\.safetensors: No such file"):
        list(leg(folder))


@pytest.mark.parametrize("name", ["training.json", "scores.json"])
def test_damaged_records_are_named(done, tmp_path, few, name):
    folder = copied(done, tmp_path)
    for content in ('{"kind": "ar', "[1, 2]", ""):
        (folder / "models" / "arm" / name).write_text(content)
        with pytest.raises(fs.UserError, match=rf"arm/{name} is damaged .*; restore it from a copy, or remove it"):
            list(leg(folder))


@contextmanager
def files_of_at_most(size: int):
    """No file grows beyond `size`: the kernel refuses the rest, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL = r"cannot write the {} to \S+ \([^)]*File too large.*\); make room there and run the same command again"


def test_a_disk_that_is_full_while_the_text_is_prepared(tmp_path, few, monkeypatch):
    monkeypatch.setattr(material, "TOLD", 500)
    text = small.write_text(tmp_path)
    begin = legs.leg(tmp_path / "twins", [text], RECIPES, 5.0, device="cpu")
    with files_of_at_most(2000), pytest.raises(fs.UserError, match=FULL.format("material")):
        next(begin)
    assert next(legs.leg(tmp_path / "twins", [text], RECIPES, 5.0, device="cpu")).kind == "arm"


def test_a_disk_that_is_full_while_a_checkpoint_is_written(tmp_path):
    recipe = RECIPES["arm"]
    module = new_module(recipe)
    optimizer = optimizer_for(module, recipe)
    training = Training(tmp_path, "arm", recipe, "files", module, optimizer)
    save(training, Progress(1, []))
    with files_of_at_most(2000), pytest.raises(fs.UserError, match=FULL.format("checkpoint")):
        save(training, Progress(2, []))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_disk_that_is_full_while_a_model_is_written(tmp_path, prepared, monkeypatch):
    """What was trained is not lost."""
    folder, write = begun(tmp_path, prepared), legs.write_twin

    def on_a_full_disk(*given):
        with files_of_at_most(2000):
            write(*given)

    monkeypatch.setattr(legs, "write_twin", on_a_full_disk)
    with pytest.raises(fs.UserError, match=FULL.format("trained model")):
        list(leg(folder))
    assert [p.name for p in (folder / "arm").iterdir()] == ["step-000002"]
    assert list((folder / "models").iterdir()) == []
    monkeypatch.setattr(legs, "write_twin", write)
    told = next(leg(folder))
    assert (told.kind, told.step, told.finished) == ("arm", 2, True)


def test_a_disk_that_is_full_while_scores_and_cards_are_written(done, tmp_path, few):
    folder = copied(done, tmp_path) / "models" / "arm"
    (folder / "scores.json").unlink()
    with files_of_at_most(100), pytest.raises(fs.UserError, match=FULL.format("scores")):
        list(evaluate.examine(folder))
    assert not list(folder.glob("scores*"))
    list(evaluate.examine(folder))
    card = (folder / "README.md").read_bytes()
    with files_of_at_most(100), pytest.raises(fs.UserError, match=FULL.format("card")):
        write_card(folder)
    assert (folder / "README.md").read_bytes() == card


def ask(*words: str):
    return CliRunner().invoke(app, ["twins", "train", *words])


def test_the_command_goes_on_and_says_what_is_left(done, tmp_path, few, monkeypatch):
    folder = copied(done, tmp_path)
    (folder / "models" / "mdm" / "scores.json").unlink()
    said = ask("--out", str(folder), "--minutes", "0")
    assert said.exit_code == 0
    assert "this leg is over; still to do: scores of mdm. Run the same command to go on" in said.output
    said = ask("--out", str(folder), "--device", "cpu")
    assert said.exit_code == 0
    assert "ask mdm" in said.output
    assert f"done: the twins, their scores and their cards are in {folder / 'models'}" in said.output


def test_the_command_and_the_licence_go_into_the_cards_as_they_were_given(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(legs, "leg", lambda *_, **words: given.update(words) or iter(()))
    words = ["--out", str(tmp_path), "--licence", "CC BY-SA 3.0"]
    monkeypatch.setattr("sys.argv", ["somewhere/floatscope", "twins", "train", *words])
    assert "still to do: arm, mdm, mdm-adapted, scores of arm" in ask(*words).output
    assert given["command"] == f"floatscope twins train --out {tmp_path} --licence 'CC BY-SA 3.0'"
    assert given["licence"] == "CC BY-SA 3.0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no text to learn from; give --text FILE, once for each"),
        (["--text", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--device", "abacus"], "unknown device 'abacus'; allowed: cpu, cuda"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done = ask(*words)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"floatscope: {said}")
    assert done.stderr.count("\n") == 1
