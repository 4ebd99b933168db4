"""`floatscope data`: what it says of a file, to people and to programs."""

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
from floatscope.tasks.prompt import prompt_of
from floatscope.tasks.read import read_samples

TOWN = {"title": "Mira", "text": "Mira Velwick lives in a house in Velmora, which she likes.", "gold": True}
OTHERS = [{"title": "", "text": f"Somebody else lives in town {number}, " + "far away, " * 30} for number in range(4)]
SAMPLES = [
    {"id": "first", "question": "Where does Mira live?", "answer": "velmora", "passages": [*OTHERS, TOWN], "hops": 1},
    {"id": "second", "question": "Is it so?", "answer": "yes", "passages": [TOWN]},
    {"id": "third", "question": "where does  Mira live?", "answers": ["Dramora", "Dram"], "passages": [TOWN]},
    {"id": "fourth", "question": "Who knows?", "answers": []},
]


def ask(*words: object):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["data", *map(str, words)])


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    return path


def test_a_file_is_described(file):
    done = ask(file)
    assert done.exit_code == 0, done.output
    text = flat(done.output)
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
        "also hops 1",
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
    (line,) = [line for line in ask(file).output.splitlines() if line.startswith("passage 1")]
    assert line.rstrip().endswith("…")


def test_a_program_is_told_the_same(file):
    told = json.loads(ask(file, "--json").stdout)
    assert (told["file"], told["format"], told["samples"], told["bad"]) == (str(file), "own", 4, [])
    assert told["passages_each"] == {"min": 0, "median": 1, "max": 5}
    assert told["problems"] == {
        "no evidence in the gold passages": ["third"],
        "a question asked more than once": ["first", "third"],
    }
    assert [sample["id"] for sample in told["shown"]] == ["first", "third", "fourth"]
    assert told["shown"][0]["passages"][4]["evidence"] == [[33, 40]]
    assert told["prompts"]["counted_in"] == "words"
    assert json.loads(ask(file, "--json", "--limit", 1).stdout)["samples"] == 1


def test_prompts_are_counted_in_tokens_of_a_model(file, tmp_path):
    folder = fs.write_random(tmp_path / "m", "llama", layers=1, width=32, context=256)
    model = fs.load(folder, device="cpu")
    prompts = [prompt_of(sample).text for sample in read_samples(file)]
    lengths = [len(model.tokenizer.encode(prompt, chat=model.tokenizer.has_template)) for prompt in prompts]
    told = json.loads(ask(file, "--model", folder, "--json").stdout)["prompts"]
    assert (told["min"], told["max"], told["context"]) == (min(lengths), max(lengths), 256)
    assert told["longer_than_context"] == 1 == sum(length > 256 for length in lengths)
    assert f"tokens of {folder}; 1 are longer than its context of 256" in flat(ask(file, "--model", folder).output)


def test_bad_lines_are_refused_or_told(file):
    file.write_text(file.read_text() + '{"question": "Wh\n' + '{"question": "Who?"}\n' * 5)
    done = ask(file)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"floatscope: {file}, line 5: it is no whole JSON (Unterminated string starting at ")
    done = ask(file, "--skip-bad")
    text = flat(done.output)
    assert done.exit_code == 0
    assert "6 lines that cannot be read, and were left out line 5: it is no whole JSON" in text
    assert 'line 6: it has neither "answer" nor "answers"' in text
    assert "line 9" not in text
    told = json.loads(ask(file, "--skip-bad", "--json").stdout)
    assert [bad["line"] for bad in told["bad"]] == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.jsonl"], "cannot read nowhere.jsonl: No such file or directory"),
        (["{file}", "--format", "squat"], "unknown format 'squat' (did you mean 'squad'?); allowed: own, paper, "),
        (["{file}", "--format", "kv"], '{file}, line 1: it has no "key"'),
        (["{file}", "--limit", "0"], "limit must be at least 1, got 0"),
        (["{file}", "--model", "twin:mdn"], "unknown twin 'mdn' (did you mean 'mdm'?)"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(file, words, said):
    done = ask(*(word.format(file=file) for word in words))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"floatscope: {said.format(file=file)}")
    assert done.stderr.count("\n") == 1


def test_help_has_an_example_and_every_format():
    said = flat(ask("--help").output)
    assert "Example: floatscope data hotpot_dev_distractor_v1.json --model twin:mdm" in said
    assert ", ".join(format.name for format in FORMATS) in said


def test_a_file_cannot_write_to_the_terminal(tmp_path):
    nasty = "a\x1b[2J[/bold]\nb\u202e"
    passage = {"title": nasty, "text": nasty + " Velmora", "gold": True}
    told = {"id": nasty, "question": nasty, "answer": "Velmora", "passages": [passage], nasty: nasty}
    (tmp_path / "f").write_text(json.dumps(told))
    done = ask(tmp_path / "f")
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "\u202e" not in done.output
    assert r"a\x1b[2J[/bold] b\u202e" in done.output


def test_words_need_no_torch_and_any_terminal_will_do(file):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = "import sys; sys.argv = sys.argv[1:]; import floatscope.cli.main as m, atexit\n"
    code += "atexit.register(lambda: print('torch' in sys.modules)); m.main()"
    words = [sys.executable, "-c", code, "floatscope", "data", str(file)]
    done = subprocess.run(words, capture_output=True, env=env, timeout=120, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    assert "?Velmora?" in done.stdout
