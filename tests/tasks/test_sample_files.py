"""Question files: written samples are read back, and errors name the file and the line."""

from __future__ import annotations

import doctest
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from floatscope.errors import UserError
from floatscope.tasks import sample, sample_files
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.sample_files import (
    SHIPPED,
    SampleFile,
    describe_source,
    read_file,
    read_samples,
    read_shipped,
    write_samples,
)
from floatscope.tasks.summary import count_samples, find_problems

SAMPLES = [
    Sample("a", "Where does Mira live?", ("Velmora", "velmora"), meta={"kind": "closed", "deep": {"n": [1, None]}}),
    Sample(
        "b/ü",
        "Who?\u2028Whom?",
        ("Mira",),
        (Passage("Mira", "Mira lives in Velmora.", True, ((14, 21), (0, 4))), Passage("", "Nobody.")),
    ),
    Sample("c", "What is known?", ()),
]


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(("name", "opener"), [("s.jsonl", open), ("s.jsonl.gz", gzip.open), ("s.jsonl.xz", lzma.open)])
@pytest.mark.parametrize("escaped", [True, False])
def test_written_samples_are_read_back(tmp_path, name, opener, escaped):
    with opener(tmp_path / name, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(s.as_json(), ensure_ascii=escaped) + "\n" for s in SAMPLES)
    assert read_samples(tmp_path / name) == SAMPLES
    assert read_samples(tmp_path / name, limit=2) == SAMPLES[:2]
    assert read_samples(tmp_path / name, limit=99) == SAMPLES


def test_a_question_and_an_answer_are_enough(tmp_path):
    file = write_lines(
        tmp_path / "f",
        {"question": "Who?", "answer": "Mira"},
        "",
        {"question": "Whom?", "answers": ["A", "B"], "hops": 2},
        {"question": "whose", "answer": ["A", "B"]},
    )
    assert read_samples(file) == [
        Sample("1", "Who?", ("Mira",)),
        Sample("3", "Whom?", ("A", "B"), meta={"hops": 2}),
        Sample("4", "whose", ("A", "B")),  # as NQ-open has it
    ]


def test_missing_evidence_is_searched_for(tmp_path):
    record = {"text": "Mira lives in Velmora.", "gold": True}
    for passage, evidence in ((record, ((14, 21),)), (record | {"evidence": []}, ()), (record | {"gold": False}, ())):
        file = write_lines(tmp_path / "f", {"question": "Where?", "answer": "velmora", "passages": [passage]})
        assert read_samples(file)[0].passages[0].evidence == evidence


def test_files_with_bom_and_crlf_are_read(tmp_path):
    (tmp_path / "f").write_bytes(b'\xef\xbb\xbf{"question": "Who?", "answer": "Mira"}\r\n\r\n')
    assert read_samples(tmp_path / "f") == [Sample("1", "Who?", ("Mira",))]


GOOD = {"question": "Who?", "answer": "Mira"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "{",
            "it is not valid JSON (Expecting property name enclosed in double quotes at column 2), it seems to be cut",
        ),
        (
            '{"question": "Who',
            "it is not valid JSON (Unterminated string starting at column 14), it seems to be cut off",
        ),
        ('{"question": Who}', "it is not valid JSON (Expecting value at column 14)"),
        ("[1]", "a sample is a JSON object, and this is a list"),
        ("3", "a sample is a JSON object, and this is a number"),
        ("null", "a sample is a JSON object, and this is null"),
        ('{"question": "Who?", "answer": "x", "n": ' + "1" * 5000 + "}", "it is not valid JSON (Exceeds the limit"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"question": "Who?", "answer": "x", "n": NaN}', "NaN is not valid JSON"),
        ('{"question": "Who \\ud800?", "answer": "x"}', "it contains half a character (a lone surrogate)"),
        ({"answer": "Mira"}, 'it has no "question"'),
        (GOOD | {"question": "  "}, '"question" must be a text that is not empty'),
        (GOOD | {"question": 7}, '"question" must be a text such as "7", and is a number'),
        (GOOD | {"id": 7}, '"id" must be a text such as "7", and is a number'),
        ({"question": "Who?"}, 'it has neither "answer" nor "answers"; write "answers": [] if there is none'),
        (GOOD | {"answers": ["Mira"]}, 'it has "answer" and "answers"; give one of them'),
        (GOOD | {"answer": 7}, "answers must be a text or a list of texts"),
        ({"question": "Who?", "answers": {"a": 1}}, "answers must be a text or a list of texts"),
        ({"question": "Who?", "answers": [None]}, "answers must be a text or a list of texts"),
        (GOOD | {"answer": " "}, 'an answer is empty; write "answers": [] if there is none'),
        ({"question": "Who?", "answers": ["Mira", ""]}, "an answer is empty"),
        (GOOD | {"passages": "Mira"}, '"passages" must be a list'),
        (GOOD | {"passages": ["Mira"]}, 'passage 1: it must be an object with a "text"'),
        (GOOD | {"passages": [{"title": "Mira"}]}, 'passage 1: it has no "text"'),
        (GOOD | {"passages": [{"text": "a", "title": 7}]}, 'passage 1: "title" must be a text'),
        (GOOD | {"passages": [{"text": "a"}, {"text": "a", "gold": 1}]}, 'passage 2: "gold" must be true or false'),
        (GOOD | {"passages": [{"text": "a", "evidense": []}]}, "unknown field 'evidense' (did you mean 'evidence'?)"),
        *(
            (GOOD | {"passages": [{"text": "abc", "evidence": bad}]}, "list of [start, stop] within its 3 characters")
            for bad in ([[0, 4]], [[2, 2]], [[-1, 2]], [[0]], [0, 1], 3, [[0.0, 1.0]], [[False, True]])
        ),
        (GOOD | {"passages": [{"text": "a", "e\nv": []}]}, r"unknown field 'e\nv'"),
        ({"id": "1", **GOOD}, "line 1 has the id '1' too; ids must differ"),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
    file = write_lines(tmp_path / "bad.jsonl", GOOD, "", line)
    with pytest.raises(UserError) as caught:
        read_samples(file)
    assert str(caught.value).startswith(f"{file}, line 3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert read_samples(file, limit=1) == [Sample("1", "Who?", ("Mira",))]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", b"", "contains no samples: give a file with a JSON object on each line, or one JSON list of objects"),
        ("blank", b"\n \n", "contains no samples"),
        ("none", b"[]", "contains no samples"),
        ("latin", b'{"question": "\xe9"}', "is not UTF-8 text"),
        ("a.gz", b"plain", "is damaged"),
        ("b.gz", gzip.compress(b"x" * 999, mtime=0)[:-9], "is damaged"),
        ("c.gz", gzip.compress(b"x", mtime=0)[:10] + b"\x07" * 20, "is damaged"),
        ("d.xz", b"plain", "is damaged"),
        ("e.xz", lzma.compress(b"x" * 999)[:-9], "is damaged"),
        (
            "pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git LFS pointer and not the file",
        ),
    ],
)
def test_errors_name_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_samples(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name} ")
    assert message in str(caught.value)


RECORDS = [{"id": name, "question": f"Who is {name}?", "answer": name} for name in "abc"]
EXPECTED = [Sample(name, f"Who is {name}?", (name,)) for name in "abc"]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "document", [RECORDS, {"data": RECORDS}, {record["id"]: {**record, "id": record["id"]} for record in RECORDS}]
)
def test_a_json_document_is_read_like_lines(tmp_path, document, indent):
    (tmp_path / "f.json").write_text("\n" + json.dumps(document, indent=indent))
    assert read_file(tmp_path / "f.json") == SampleFile(EXPECTED, "own", [], "element")
    assert read_samples(tmp_path / "f.json", limit=2) == EXPECTED[:2]


def test_keys_of_a_document_become_ids(tmp_path):
    by_id = {record["id"]: {"question": record["question"], "answer": record["answer"]} for record in RECORDS}
    (tmp_path / "f.json").write_text(json.dumps(by_id))
    assert read_samples(tmp_path / "f.json") == EXPECTED


def test_a_single_object_over_many_lines_is_one_sample(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps({**RECORDS[0], "data": [1]}, indent=2))
    assert read_samples(tmp_path / "f.json") == [Sample("a", "Who is a?", ("a",), meta={"data": [1]})]


def test_a_list_with_an_object_on_each_line_is_a_document(tmp_path):
    (tmp_path / "f.json").write_text("[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]")
    assert read_file(tmp_path / "f.json").unit == "element"
    (tmp_path / "g.json").write_text("[\n" + json.dumps(RECORDS[0]) + "\n]")
    assert read_samples(tmp_path / "g.json") == EXPECTED[:1]


def test_a_truncated_document_is_recognised(tmp_path):
    whole = json.dumps(RECORDS, indent=1)
    for cut in (whole[: len(whole) // 2], whole[:-1], whole[:20], "["):
        (tmp_path / "f.json").write_text(cut)
        for skip_bad in (False, True):
            with pytest.raises(
                UserError, match=r"f\.json: it is not valid JSON \(.*\), it seems to be cut off; give a"
            ):
                read_file(tmp_path / "f.json", skip_bad=skip_bad)


def test_errors_name_the_element(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps([RECORDS[0], {"question": "Who?"}]))
    with pytest.raises(UserError, match=r'f\.json, element 2: it has neither "answer" nor "answers"'):
        read_samples(tmp_path / "f.json")
    (tmp_path / "f.json").write_text(json.dumps([RECORDS[0], 3, RECORDS[0]]))
    assert read_file(tmp_path / "f.json", skip_bad=True).errors == [
        (2, "a sample is a JSON object, and this is a number"),
        (3, "element 1 has the id 'a' too; ids must differ"),
    ]


@pytest.mark.parametrize("places", [[0], [1], [0, 3], [0, 1]])
def test_bad_lines_can_be_skipped_and_are_listed(tmp_path, places):
    lines: list[object] = list(RECORDS)
    for place in places:
        lines.insert(place, '{"id": "d", "quest')
    file = write_lines(tmp_path / "f", *lines)
    contents = read_file(file, skip_bad=True)
    assert (contents.samples, contents.format, contents.unit) == (EXPECTED, "own", "line")
    assert [number for number, _ in contents.errors] == [place + 1 for place in places]
    assert all("it seems to be cut off" in reason for _, reason in contents.errors)
    with pytest.raises(UserError, match=f"f, line {places[0] + 1}: it is not valid JSON"):
        read_file(file)


def test_a_file_with_only_bad_lines_is_an_error(tmp_path):
    file = write_lines(tmp_path / "f", {"question": "Who?"}, {"answer": "x"})
    with pytest.raises(UserError) as caught:
        read_file(file, skip_bad=True, format="own")
    assert str(caught.value) == (
        f'{file} contains no samples, only 2 bad lines; the first is line 1: it has neither "answer" nor "answers";'
        ' write "answers": [] if there is none'
    )


def test_samples_are_counted_and_problems_found():
    gold = Passage("", "It is Velmora.", True, ((6, 13),))
    samples = [
        Sample("a", "Where?", ("Velmora",), (gold, Passage("", "x"))),
        Sample("b", "where? ", ("yes",), (Passage("", "x", True),)),
        Sample("c", "When?", ("1990",), (Passage("", "x", True),)),
        Sample("d", "Who?", ("Mira",), (Passage("", "x"),)),
        Sample("e", "What?", (), (Passage("", "x"),)),
        Sample("f", "Why?", ("so",)),
    ]
    assert count_samples(samples) == {
        "samples": 6,
        "with_passages": 5,
        "with_gold": 3,
        "with_evidence": 1,
        "yes_or_no": 1,
        "unanswerable": 1,
        "passages_each": {"min": 0, "median": 1.0, "max": 2},
    }
    assert find_problems(samples) == {
        "no gold passage": ["d"],
        "no evidence in the gold passages": ["c"],
        "a question asked more than once": ["a", "b"],
    }
    assert find_problems(samples[:1]) == {}


def test_missing_files_are_named(tmp_path):
    for function in (read_samples, read_file, describe_source):
        with pytest.raises(UserError, match=r"cannot read .*nowhere: No such file or directory"):
            function(tmp_path / "nowhere")
        with pytest.raises(UserError, match=r"is a folder; give a file"):
            function(tmp_path)


def test_limit_must_be_at_least_one(tmp_path):
    with pytest.raises(UserError, match="limit must be at least 1, got 0"):
        read_samples(write_lines(tmp_path / "f", GOOD), limit=0)


def test_the_source_has_name_digest_and_limit(tmp_path):
    (tmp_path / "f.jsonl").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert describe_source(tmp_path / "f.jsonl", 7) == {"data": "f.jsonl", "data_sha256": digest, "limit": 7}


# Shipped files


def test_shipped_files_are_read_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "twin:reading-5" in SHIPPED
    for name in SHIPPED:
        contents = read_file(name)
        assert (contents.format, contents.errors) == ("own", [])
        assert contents.samples[:3] == read_samples(Path(name), 3)
    assert read_shipped("two-hop") == read_samples("twin:two-hop")
    write_samples(tmp_path / "copy.jsonl", read_samples("twin:two-hop", limit=3))
    assert read_samples("copy.jsonl") == read_samples("twin:two-hop")[:3]


def test_the_source_of_a_shipped_file_is_that_of_its_copy(tmp_path):
    write_samples(tmp_path / "reading-5.jsonl", read_shipped("reading-5"))
    assert describe_source("twin:reading-5", 9) == describe_source(tmp_path / "reading-5.jsonl", 9)


@pytest.mark.parametrize("function", [read_samples, read_file, describe_source])
def test_an_unknown_shipped_file_is_one_sentence_with_the_allowed_names(function):
    with pytest.raises(UserError) as caught:
        function("twin:readng-5")
    assert str(caught.value) == (
        f"unknown question file 'twin:readng-5' (did you mean 'twin:reading-5'?); allowed: {', '.join(SHIPPED)}"
    )


def test_reading_a_shipped_file_needs_no_torch(tmp_path):
    code = (
        "import sys; from floatscope.tasks.sample_files import describe_source, read_samples;"
        " read_samples('twin:reading-5', 2), describe_source('twin:reading-5');"
        " print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("module", [sample, sample_files])
def test_docstring_examples_are_true(module):
    assert doctest.testmod(module).failed == 0


def test_one_passage_as_text_is_the_gold_one(tmp_path):
    line = {"question": "Is Mira a singer?", "answer": True, "passage": "Mira sings. Yes, she does."}
    (tmp_path / "boolq.jsonl").write_text(json.dumps(line) + "\n")
    (sample,) = read_samples(tmp_path / "boolq.jsonl")
    assert sample.answers == ("yes",)
    assert [(passage.text, passage.gold) for passage in sample.passages] == [(line["passage"], True)]
    assert sample.meta == {}


@pytest.mark.parametrize("name", ["passawes", "Passages", "questoin_id", "pasages"])
def test_a_misspelt_field_is_not_dropped_silently(tmp_path, name):
    line = {"question": "Where?", "answer": "here", name: []}
    (tmp_path / "q.jsonl").write_text(json.dumps(line) + "\n")
    if name == "questoin_id":  # not close to any field
        assert name in read_samples(tmp_path / "q.jsonl")[0].meta
    else:
        with pytest.raises(UserError, match=f'it has "{name}"; did you mean "passages"'):
            read_samples(tmp_path / "q.jsonl")
