"""Task files: what is written is read back, and what cannot be read is refused by its line."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from floatscope.errors import UserError
from floatscope.tasks.read import about, read_samples
from floatscope.tasks.sample import Passage, Sample

SAMPLES = [
    Sample("a", "Where does Mira live?", ("Velmora", "velmora"), meta={"kind": "closed", "deep": {"n": [1, None]}}),
    Sample(
        "b/ü",
        "Who?\u2028Whom?",
        ("",),
        (Passage("Mira", "Mira lives in Velmora.", True, ((14, 21), (0, 4))), Passage("", "Nobody.")),
    ),
    Sample("c", "What is known?", ()),
]


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(("name", "opener"), [("s.jsonl", open), ("s.jsonl.gz", gzip.open), ("s.jsonl.xz", lzma.open)])
@pytest.mark.parametrize("escaped", [True, False])
def test_what_was_written_is_read(tmp_path, name, opener, escaped):
    with opener(tmp_path / name, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(s.as_json(), ensure_ascii=escaped) + "\n" for s in SAMPLES)
    assert read_samples(tmp_path / name) == SAMPLES
    assert read_samples(tmp_path / name, limit=2) == SAMPLES[:2]
    assert read_samples(tmp_path / name, limit=99) == SAMPLES


def test_a_question_and_an_answer_are_enough(tmp_path):
    file = written(
        tmp_path / "f",
        {"question": "Who?", "answer": "Mira"},
        "",
        {"question": "Whom?", "answers": ["A", "B"], "hops": 2},
    )
    assert read_samples(file) == [Sample("1", "Who?", ("Mira",)), Sample("3", "Whom?", ("A", "B"), meta={"hops": 2})]


def test_windows_files_are_read(tmp_path):
    (tmp_path / "f").write_bytes(b'\xef\xbb\xbf{"question": "Who?", "answer": "Mira"}\r\n\r\n')
    assert read_samples(tmp_path / "f") == [Sample("1", "Who?", ("Mira",))]


GOOD = {"question": "Who?", "answer": "Mira"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "it is no JSON (Expecting property name"),
        ("[1]", "a sample is a JSON object, and this is a list"),
        ("3", "a sample is a JSON object, and this is a int"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"question": "Who?", "answer": "x", "n": NaN}', "NaN is no JSON"),
        ('{"question": "Who \\ud800?", "answer": "x"}', "it holds half a character (a lone surrogate)"),
        ({"answer": "Mira"}, '"question" must be a text, and not an empty one'),
        (GOOD | {"question": "  "}, '"question" must be a text, and not an empty one'),
        (GOOD | {"question": 7}, '"question" must be a text, such as "7", and not an empty one'),
        (GOOD | {"id": 7}, '"id" must be a text, such as "7", and not an empty one'),
        ({"question": "Who?"}, 'it has neither "answer" nor "answers"; write "answers": [] if there is none'),
        (GOOD | {"answers": ["Mira"]}, 'it has "answer" and "answers"; give one of them'),
        (GOOD | {"answer": ["Mira"]}, '"answers" must be a list of texts, and "answer" one text'),
        ({"question": "Who?", "answers": "Mira"}, '"answers" must be a list of texts, and "answer" one text'),
        ({"question": "Who?", "answers": [None]}, '"answers" must be a list of texts, and "answer" one text'),
        (GOOD | {"passages": "Mira"}, '"passages" must be a list'),
        (GOOD | {"passages": ["Mira"]}, 'passage 1: it must be an object with a "text"'),
        (GOOD | {"passages": [{"title": "Mira"}]}, 'passage 1: "text" must be a text, and not an empty one'),
        (GOOD | {"passages": [{"text": "a", "title": 7}]}, 'passage 1: "title" must be a text'),
        (GOOD | {"passages": [{"text": "a"}, {"text": "a", "gold": 1}]}, 'passage 2: "gold" must be true or false'),
        (GOOD | {"passages": [{"text": "a", "evidense": []}]}, "unknown field 'evidense' (did you mean 'evidence'?)"),
        *(
            (GOOD | {"passages": [{"text": "abc", "evidence": bad}]}, "list of [start, stop] within its 3 characters")
            for bad in ([[0, 4]], [[2, 2]], [[-1, 2]], [[0]], [0, 1], 3, [[0.0, 1.0]], [[False, True]])
        ),
        ({"id": "1", **GOOD}, "the id '1' is that of line 1 too; ids must differ"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, line, said):
    file = written(tmp_path / "bad.jsonl", GOOD, "", line)
    with pytest.raises(UserError) as refused:
        read_samples(file)
    assert str(refused.value).startswith(f"{file}, line 3: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert read_samples(file, limit=1) == [Sample("1", "Who?", ("Mira",))]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty", b"", "holds no samples: give a file with a JSON object on each line"),
        ("blank", b"\n \n", "holds no samples"),
        ("latin", b'{"question": "\xe9"}', "is no UTF-8 text"),
        ("a.gz", b"plain", "is damaged"),
        ("b.gz", gzip.compress(b"x" * 999)[:-9], "is damaged"),
        ("c.gz", gzip.compress(b"x", mtime=0)[:10] + b"\x07" * 20, "is damaged"),
        ("d.xz", b"plain", "is damaged"),
        ("e.xz", lzma.compress(b"x" * 999)[:-9], "is damaged"),
    ],
)
def test_a_bad_file_is_refused_by_its_name(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_samples(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path / name} ")
    assert said in str(refused.value)


def test_what_is_not_there_is_named(tmp_path):
    for ask in (read_samples, about):
        with pytest.raises(UserError, match=r"cannot read .*nowhere: No such file or directory"):
            ask(tmp_path / "nowhere")
        with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
            ask(tmp_path)


def test_a_limit_takes_at_least_one(tmp_path):
    with pytest.raises(UserError, match="limit must be at least 1, got 0"):
        read_samples(written(tmp_path / "f", GOOD), limit=0)


def test_a_run_says_of_its_data(tmp_path):
    (tmp_path / "f.jsonl").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert about(tmp_path / "f.jsonl", 7) == {"data": "f.jsonl", "data_sha256": digest, "limit": 7}
