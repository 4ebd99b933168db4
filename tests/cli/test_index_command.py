"""`floatscope index`: add, remove, search and stat, and how they report mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from floatscope.cli.main import app
from floatscope.tasks.index import Index

CREATE = "create one with floatscope index add"
LINES = [
    {"id": "m", "title": "Mira", "text": "Mira lives in Velmora.", "url": "http://…"},
    {"id": "t", "title": "Tove", "text": "Tove bakes bread."},
    {"text": "Olaf \x1b[2J paints [bold]walls[/bold]."},
]


def invoke(*words: object):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["index", *map(str, words)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


@pytest.fixture
def folder(tmp_path: Path, file: Path) -> Path:
    assert invoke("add", tmp_path / "wiki", file).exit_code == 0
    return tmp_path / "wiki"


def test_files_are_added_once(tmp_path, file):
    other = tmp_path / "list.json"
    other.write_text(json.dumps([{"text": "Nina."}, LINES[1] | {"text": "Tove rests."}]))
    result = invoke("add", tmp_path / "wiki", file, other)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'wiki'}: 4 added, 1 replaced, 0 unchanged; 4 passages\n"
    assert result.stderr == "note: only id, title and text of a passage are stored, not 'url'\n"
    result = invoke("add", tmp_path / "wiki", other, "--json")
    record = {"index": str(tmp_path / "wiki"), "added": 0, "replaced": 0, "unchanged": 2, "passages": 4}
    assert json.loads(result.stdout) == record
    assert result.stderr == ""


def test_search_prints_the_best_passages(folder):
    result = invoke("search", folder, 'Where: "does (Mira AND live?', "-k", 1)
    assert result.exit_code == 0
    assert result.stdout.split() == ["1", "Mira", "m", result.stdout.split()[3], "Mira", "lives", "in", "Velmora."]
    record = json.loads(invoke("search", folder, "bread", "--json").stdout)
    assert record["question"] == "bread"
    assert [(hit["id"], hit["title"], hit["text"]) for hit in record["hits"]] == [("t", "Tove", "Tove bakes bread.")]
    assert record["hits"][0]["score"] > 0
    assert invoke("search", folder, "😀 ???").stdout == "no passage has a word of the question\n"
    assert json.loads(invoke("search", folder, "", "--json").stdout)["hits"] == []


def test_passages_cannot_write_to_the_terminal(folder):
    result = invoke("search", folder, "Olaf")
    assert "\x1b" not in result.output
    assert r"Olaf \x1b[2J paints [bold]walls[/bold]." in result.output


def test_remove_is_all_or_nothing(folder):
    result = invoke("remove", folder, "m", "nobody", "no\nbody")
    assert result.exit_code == 2
    assert result.stderr == f"floatscope: {folder} has no passage 'nobody' (nor 1 others); nothing was removed\n"
    assert invoke("remove", folder, "m").stdout == f"{folder}: 1 removed; 2 passages\n"
    assert json.loads(invoke("search", folder, "Mira", "--json").stdout)["hits"] == []


def test_stat_describes_the_index(folder, file):
    result = invoke("stat", folder, "--check")
    first, digest, made, added = result.stdout.splitlines()
    assert first.startswith(f"{folder}: 3 passages, ")
    assert first.endswith(", all checksums are right")
    assert digest == f"digest {Index.open(folder).stats().digest}"
    assert made.startswith("format 2, written by floatscope ")
    assert added.startswith("p.jsonl: 3 passages, added 20")
    record = json.loads(invoke("stat", folder, "--json").stdout)
    assert (record["passages"], record["format"]) == (3, 2)
    assert [(each["name"], each["passages"], each["bytes"]) for each in record["files"]] == [
        ("p.jsonl", 3, file.stat().st_size)
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["search", "{tmp}", "Who?"], "{tmp} is not an index: it has no meta.json; " + CREATE),
        (["stat", "{tmp}/none"], "{tmp}/none is not an index: it has no meta.json; " + CREATE),
        (["remove", "{tmp}", "x"], "{tmp} is not an index: it has no meta.json; " + CREATE),
        (["add", "{tmp}", "{file}"], "{tmp} exists and is not an index (it has no meta.json): give another path"),
        (["add", "{tmp}/new", "{tmp}/none"], "cannot read {tmp}/none: No such file or directory"),
        (
            ["search", "{folder}", "Who?", "-k", "0"],
            "invalid value for '-k': it should be greater than or equal to 1; see root index search --help",
        ),
        (["add", "{folder}", "{tmp}/bad"], '{tmp}/bad, line 1: "text" must be a text that is not empty'),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(tmp_path, folder, file, words, message):
    (tmp_path / "bad").write_text('{"title": "x"}')
    places = {"tmp": tmp_path, "file": file, "folder": folder}
    result = invoke(*(word.format(**places) for word in words))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"floatscope: {message.format(**places)}\n"
    assert not (tmp_path / "new").exists()


def test_check_finds_damage(folder):
    store = next((folder / "tantivy").glob("*.store"))
    content = bytearray(store.read_bytes())
    content[0] ^= 255
    store.write_bytes(content)
    result = invoke("stat", folder, "--check")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"floatscope: {folder} is damaged: tantivy/{store.name} is damaged; ")


def test_an_interrupt_reports_what_was_added(tmp_path, file, monkeypatch):
    def interrupted(index: Index, file: object, on_progress: object) -> None:
        index.add([("a", "", "one"), ("b", "", "two")])
        raise KeyboardInterrupt

    monkeypatch.setattr(Index, "add_file", interrupted)
    result = invoke("add", tmp_path / "wiki", file)
    assert result.exit_code == 130
    message = f"{tmp_path / 'wiki'} has 2 passages, 2 of them new; run the same command to resume"
    assert result.stderr == f"floatscope: interrupted; {message}\n"


def test_an_evaluation_records_its_index(folder, tmp_path):
    data = tmp_path / "q.jsonl"
    question = {"question": "Where does Mira live?", "answers": ["Velmora"]}
    data.write_text(json.dumps(question | {"passages": [{"title": "Mira", "text": LINES[0]["text"], "gold": True}]}))
    words = ["eval", "twin:mdm", "--data", data, "--out", tmp_path / "e", "--new-tokens", 4, "--device", "cpu"]

    def evaluate():
        return CliRunner(env={"COLUMNS": "400"}).invoke(app, [*map(str, words), "--retrieve", str(folder), "-k", "1"])

    result = evaluate()
    assert result.exit_code == 0, result.output
    assert "1.000 of the gold passages are among the 1 retrieved" in result.output
    settings = json.loads((tmp_path / "e/run.json").read_text())["settings"]
    record = {"index": "wiki", "index_passages": 3, "index_sha256": Index.open(folder).stats().digest, "retrieved": 1}
    assert {name: settings[name] for name in record} == record
    assert evaluate().exit_code == 0
    Index.open(folder).add([("n", "", "Nina is no answer.")])  # what is retrieved stays the same
    result = evaluate()
    assert result.exit_code == 2
    assert "cannot be resumed with other settings: index_passages: 3 in the folder, 4 now" in result.stderr
    assert "index_sha256" in result.stderr
    Index.open(folder).remove(["n"])
    assert evaluate().exit_code == 0


def test_search_imports_no_torch(folder):
    code = (
        "import sys; from floatscope.cli.main import app\n"
        f"app(['index', 'search', {str(folder)!r}, 'Mira'], standalone_mode=False); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.endswith("False\n")
