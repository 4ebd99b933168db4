"""`floatscope index`: add, remove, search and stat, and what they say of mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from floatscope.cli.main import app
from floatscope.tasks.index import Index

LINES = [
    {"id": "m", "title": "Mira", "text": "Mira lives in Velmora.", "url": "http://…"},
    {"id": "t", "title": "Tove", "text": "Tove bakes bread."},
    {"text": "Olaf \x1b[2J paints [bold]walls[/bold]."},
]


def ask(*words: object):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["index", *map(str, words)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


@pytest.fixture
def folder(tmp_path: Path, file: Path) -> Path:
    assert ask("add", tmp_path / "wiki", file).exit_code == 0
    return tmp_path / "wiki"


@pytest.mark.parametrize("command", ["add", "remove", "search", "stat"])
def test_help_shows_an_example(command):
    done = ask(command, "--help")
    assert done.exit_code == 0
    assert f"Example: floatscope index {command} wiki" in done.output


def test_files_are_added_once(tmp_path, file):
    other = tmp_path / "list.json"
    other.write_text(json.dumps([{"text": "Nina."}, LINES[1] | {"text": "Tove rests."}]))
    done = ask("add", tmp_path / "wiki", file, other)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'wiki'}: 4 added, 1 replaced, 0 there already; 4 passages\n"
    assert done.stderr == "note only id, title and text are kept of a passage, and not 'url'\n"
    done = ask("add", tmp_path / "wiki", other, "--json")
    told = {"index": str(tmp_path / "wiki"), "added": 0, "replaced": 0, "unchanged": 2, "passages": 4}
    assert json.loads(done.stdout) == told
    assert done.stderr == ""


def test_a_question_is_answered(folder):
    done = ask("search", folder, 'Where: "does (Mira AND live?', "-k", 1)
    assert done.exit_code == 0
    assert done.stdout.split() == ["1", "Mira", "m", done.stdout.split()[3], "Mira", "lives", "in", "Velmora."]
    told = json.loads(ask("search", folder, "bread", "--json").stdout)
    assert told["question"] == "bread"
    assert [(hit["id"], hit["title"], hit["text"]) for hit in told["hits"]] == [("t", "Tove", "Tove bakes bread.")]
    assert told["hits"][0]["score"] > 0
    assert ask("search", folder, "😀 ???").stdout == "no passage has a word of the question\n"
    assert json.loads(ask("search", folder, "", "--json").stdout)["hits"] == []


def test_passages_cannot_write_to_the_terminal(folder):
    done = ask("search", folder, "Olaf")
    assert "\x1b" not in done.output
    assert r"Olaf \x1b[2J paints [bold]walls[/bold]." in done.output


def test_removing_is_all_or_nothing(folder):
    done = ask("remove", folder, "m", "nobody", "no\nbody")
    assert done.exit_code == 2
    assert done.stderr == f"floatscope: {folder} holds no passage 'nobody' (nor 1 others); nothing was removed\n"
    assert ask("remove", folder, "m").stdout == f"{folder}: 1 removed; 2 passages\n"
    assert json.loads(ask("search", folder, "Mira", "--json").stdout)["hits"] == []


def test_stat_tells_what_is_there(folder, file):
    done = ask("stat", folder, "--check")
    first, digest, made, added = done.stdout.splitlines()
    assert first.startswith(f"{folder}: 3 passages, ")
    assert first.endswith(", every file whole")
    assert digest == f"digest {Index.open(folder).stat().digest}"
    assert made.startswith("format 2, made by floatscope ")
    assert added.startswith("p.jsonl: 3 passages, added 20")
    told = json.loads(ask("stat", folder, "--json").stdout)
    assert (told["passages"], told["format"]) == (3, 2)
    assert [(each["name"], each["passages"], each["bytes"]) for each in told["files"]] == [
        ("p.jsonl", 3, file.stat().st_size)
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["search", "{tmp}", "Who?"], "{tmp} is no index: it has no meta.json; floatscope index add makes one"),
        (["stat", "{tmp}/none"], "{tmp}/none is no index: it has no meta.json; floatscope index add makes one"),
        (["remove", "{tmp}", "x"], "{tmp} is no index: it has no meta.json; floatscope index add makes one"),
        (["add", "{tmp}", "{file}"], "{tmp} exists and is no index (it has no meta.json): give another path"),
        (["add", "{tmp}/new", "{tmp}/none"], "cannot read {tmp}/none: No such file or directory"),
        (["search", "{folder}", "Who?", "-k", "0"], "k must be at least 1, got 0"),
        (["add", "{folder}", "{tmp}/bad"], '{tmp}/bad, line 1: "text" must be a text, and not an empty one'),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(tmp_path, folder, file, words, said):
    (tmp_path / "bad").write_text('{"title": "x"}')
    places = {"tmp": tmp_path, "file": file, "folder": folder}
    done = ask(*(word.format(**places) for word in words))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == f"floatscope: {said.format(**places)}\n"
    assert not (tmp_path / "new").exists()


def test_damage_is_found(folder):
    store = next((folder / "tantivy").glob("*.store"))
    content = bytearray(store.read_bytes())
    content[0] ^= 255
    store.write_bytes(content)
    done = ask("stat", folder, "--check")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"floatscope: {folder} is damaged: tantivy/{store.name} is damaged; ")


def test_an_interrupt_says_what_is_kept(tmp_path, file, monkeypatch):
    def interrupted(index: Index, file: object, told: object) -> None:
        index.add([("a", "", "one"), ("b", "", "two")])
        raise KeyboardInterrupt

    monkeypatch.setattr(Index, "add_file", interrupted)
    done = ask("add", tmp_path / "wiki", file)
    assert done.exit_code == 130
    said = f"2 passages are in {tmp_path / 'wiki'}, 2 of them new, and the same command adds the others"
    assert done.stderr == f"floatscope: interrupted; {said}\n"


def test_an_evaluation_knows_the_index_it_was_made_with(folder, tmp_path):
    data = tmp_path / "q.jsonl"
    asked = {"question": "Where does Mira live?", "answers": ["Velmora"]}
    data.write_text(json.dumps(asked | {"passages": [{"title": "Mira", "text": LINES[0]["text"], "gold": True}]}))
    words = ["eval", "twin:mdm", "--data", data, "--out", tmp_path / "e", "--new-tokens", 4, "--device", "cpu"]

    def evaluate():
        return CliRunner(env={"COLUMNS": "400"}).invoke(app, [*map(str, words), "--retrieve", str(folder), "-k", "1"])

    done = evaluate()
    assert done.exit_code == 0, done.output
    assert "1.000 of the gold passages are among the 1 retrieved" in done.output
    settings = json.loads((tmp_path / "e/run.json").read_text())["settings"]
    told = {"index": "wiki", "index_passages": 3, "index_sha256": Index.open(folder).stat().digest, "retrieved": 1}
    assert {name: settings[name] for name in told} == told
    assert evaluate().exit_code == 0
    Index.open(folder).add([("n", "", "Nina is not asked for.")])  # what is retrieved stays the same
    done = evaluate()
    assert done.exit_code == 2
    assert "cannot be resumed with other settings: index_passages: 3 in the folder, 4 now" in done.stderr
    assert "index_sha256" in done.stderr
    Index.open(folder).remove(["n"])
    assert evaluate().exit_code == 0


def test_searching_waits_for_no_torch(folder):
    code = (
        "import sys; from floatscope.cli.main import app\n"
        f"app(['index', 'search', {str(folder)!r}, 'Mira'], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("False\n")
