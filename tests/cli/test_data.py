"""`floatscope data`: how it describes a file, as text and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import floatscope as fs
from floatscope.cli.main import app
from floatscope.tasks.formats import FORMATS
from floatscope.tasks.sample_files import read_samples
from floatscope.tasks.template import load_template

TOWN = {"title": "Mira", "text": "Mira Velwick lives in a house in Velmora, which she likes.", "gold": True}
OTHERS = [{"title": "", "text": f"Somebody else lives in town {number}, " + "far away, " * 30} for number in range(4)]
SAMPLES = [
    {"id": "first", "question": "Where does Mira live?", "answer": "velmora", "passages": [*OTHERS, TOWN], "hops": 1},
    {"id": "second", "question": "Is it so?", "answer": "yes", "passages": [TOWN]},
    {"id": "third", "question": "where does  Mira live?", "answers": ["Dramora", "Dram"], "passages": [TOWN]},
    {"id": "fourth", "question": "Who knows?", "answers": []},
]


def invoke(*words: object):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["data", *map(str, words)])


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    return path


def test_a_file_is_described(file):
    result = invoke(file)
    assert result.exit_code == 0, result.output
    text = flat(result.output)
    for part in (
        f"file {file}",
        "format own",
        "samples 4",
        "passages 0 to 5 (median 1) each",
        "gold 3 of 4",
        "evidence 1 of 4; 1 are answered yes or no",
        "unanswerable 1 of 4",
        "words",
        "Sample first question Where does Mira live? answers velmora",
        "passage 1 Somebody else lives in town 0, far away,",
        "gold 5 Mira: Mira Velwick lives in a house in «Velmora», which she likes.",
        "and 2 more",
        "other hops 1",
        "Sample third",
        "answers Dramora | Dram",
        "Sample fourth question Who knows? answers none",
        "Problems",
        "1 no evidence in the gold passages: third",
        "2 a question asked more than once: first, third",
    ):
        assert part in text, part
    assert "Sample second" not in text


def test_a_passage_that_is_not_gold_takes_one_line(file):
    (line,) = [line for line in invoke(file).output.splitlines() if line.startswith("passage 1")]
    assert line.rstrip().endswith("…")


def test_json_has_the_same_facts(file):
    record = json.loads(invoke(file, "--json").stdout)
    assert (record["file"], record["format"], record["samples"], record["skipped"]) == (str(file), "own", 4, [])
    assert record["passages_each"] == {"min": 0, "median": 1, "max": 5}
    assert record["problems"] == {
        "no evidence in the gold passages": ["third"],
        "a question asked more than once": ["first", "third"],
    }
    assert [sample["id"] for sample in record["examples"]] == ["first", "third", "fourth"]
    assert record["examples"][0]["passages"][4]["evidence"] == [[33, 40]]
    assert record["prompts"]["counted_in"] == "words"
    assert json.loads(invoke(file, "--json", "--limit", 1).stdout)["samples"] == 1


def test_prompts_are_counted_in_tokens_of_a_model(file, tmp_path):
    folder = fs.write_random(tmp_path / "m", "llama", layers=1, width=32, context=256)
    model = fs.load(folder, device="cpu")
    prompts = [load_template().prompt(sample).text for sample in read_samples(file)]
    lengths = [len(model.tokenizer.encode(prompt, chat=model.tokenizer.has_chat_template)) for prompt in prompts]
    record = json.loads(invoke(file, "--model", folder, "--json").stdout)["prompts"]
    assert (record["min"], record["max"], record["context"]) == (min(lengths), max(lengths), 256)
    assert record["longer_than_context"] == 1 == sum(length > 256 for length in lengths)
    assert f"tokens of {folder}; 1 are longer than its context of 256" in flat(invoke(file, "--model", folder).output)


def test_bad_lines_are_refused_or_skipped(file):
    file.write_text(file.read_text() + '{"question": "Wh\n' + '{"question": "Who?"}\n' * 5)
    result = invoke(file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"floatscope: {file}, line 5: it is not valid JSON (Unterminated string starting ")
    result = invoke(file, "--skip-bad")
    text = flat(result.output)
    assert result.exit_code == 0
    assert "6 lines that cannot be read are skipped line 5: it is not valid JSON" in text
    assert 'line 6: it has neither "answer" nor "answers"' in text
    assert "line 9" not in text
    record = json.loads(invoke(file, "--skip-bad", "--json").stdout)
    assert [entry["line"] for entry in record["skipped"]] == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.jsonl"], "cannot read nowhere.jsonl: No such file or directory"),
        (["{file}", "--format", "squat"], "unknown format 'squat' (did you mean 'squad'?); allowed: own, paper, "),
        (["{file}", "--format", "kv"], '{file}, line 1: it has no "key"'),
        (["{file}", "--limit", "0"], "invalid value for '--limit': it should be greater than or equal to 1"),
        (["{file}", "--model", "twin:mdn"], "unknown twin 'mdn' (did you mean 'mdm'?)"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(file, words, message):
    result = invoke(*(word.format(file=file) for word in words))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"floatscope: {message.format(file=file)}")
    assert result.stderr.count("\n") == 1


def test_help_names_every_format():
    assert ", ".join(format.name for format in FORMATS) in flat(invoke("--help").output)


def test_a_shipped_file_has_a_name():
    record = json.loads(invoke("twin:two-hop", "--limit", 3, "--json").stdout)
    assert (record["file"], record["samples"], record["with_gold"]) == ("twin:two-hop", 3, 3)
    result = invoke("twin:two-hops")
    assert result.exit_code == 2
    assert "did you mean" in result.stderr


def test_a_file_cannot_write_to_the_terminal(tmp_path):
    nasty = "a\x1b[2J[/bold]\nb\u202e"
    passage = {"title": nasty, "text": nasty + " Velmora", "gold": True}
    record = {"id": nasty, "question": nasty, "answer": "Velmora", "passages": [passage], nasty: nasty}
    (tmp_path / "f").write_text(json.dumps(record))
    result = invoke(tmp_path / "f")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output
    assert r"a\x1b[2J[/bold] b\u202e" in result.output


def test_counting_words_needs_no_torch_and_an_ascii_terminal_is_enough(file):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = "import sys; sys.argv = sys.argv[1:]; import floatscope.cli.main as m, atexit\n"
    code += "atexit.register(lambda: print('torch' in sys.modules)); m.main()"
    words = [sys.executable, "-c", code, "floatscope", "data", str(file)]
    result = subprocess.run(words, capture_output=True, env=env, timeout=120, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "False"
    assert "?Velmora?" in result.stdout
