"""Task files: what is written is read back, and what cannot be read is refused by its line."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from floatscope.errors import UserError
from floatscope.tasks.read import Reading, about, counts, problems, read_file, read_samples
from floatscope.tasks.sample import Passage, Sample

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
        {"question": "whose", "answer": ["A", "B"]},
    )
    assert read_samples(file) == [
        Sample("1", "Who?", ("Mira",)),
        Sample("3", "Whom?", ("A", "B"), meta={"hops": 2}),
        Sample("4", "whose", ("A", "B")),  # as NQ-open has it
    ]


def test_evidence_that_is_not_given_is_looked_for(tmp_path):
    told = {"text": "Mira lives in Velmora.", "gold": True}
    for passage, evidence in ((told, ((14, 21),)), (told | {"evidence": []}, ()), (told | {"gold": False}, ())):
        file = written(tmp_path / "f", {"question": "Where?", "answer": "velmora", "passages": [passage]})
        assert read_samples(file)[0].passages[0].evidence == evidence


def test_windows_files_are_read(tmp_path):
    (tmp_path / "f").write_bytes(b'\xef\xbb\xbf{"question": "Who?", "answer": "Mira"}\r\n\r\n')
    assert read_samples(tmp_path / "f") == [Sample("1", "Who?", ("Mira",))]


GOOD = {"question": "Who?", "answer": "Mira"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "{",
            "it is no whole JSON (Expecting property name enclosed in double quotes at column 2), it seems to be cut",
        ),
        (
            '{"question": "Who',
            "it is no whole JSON (Unterminated string starting at column 14), it seems to be cut off",
        ),
        ('{"question": Who}', "it is no JSON (Expecting value at column 14)"),
        ("[1]", "a sample is a JSON object, and this is a list"),
        ("3", "a sample is a JSON object, and this is a number"),
        ("null", "a sample is a JSON object, and this is null"),
        ('{"question": "Who?", "answer": "x", "n": ' + "1" * 5000 + "}", "it is no JSON (Exceeds the limit"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"question": "Who?", "answer": "x", "n": NaN}', "NaN is no JSON"),
        ('{"question": "Who \\ud800?", "answer": "x"}', "it holds half a character (a lone surrogate)"),
        ({"answer": "Mira"}, 'it has no "question"'),
        (GOOD | {"question": "  "}, '"question" must be a text, and not an empty one'),
        (GOOD | {"question": 7}, '"question" must be a text, such as "7", and not an empty one'),
        (GOOD | {"id": 7}, '"id" must be a text, such as "7", and not an empty one'),
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
        ("empty", b"", "holds no samples: give a file with a JSON object on each line, or one JSON list of objects"),
        ("blank", b"\n \n", "holds no samples"),
        ("none", b"[]", "holds no samples"),
        ("latin", b'{"question": "\xe9"}', "is no UTF-8 text"),
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
def test_a_bad_file_is_refused_by_its_name(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_samples(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path / name} ")
    assert said in str(refused.value)


MANY = [{"id": name, "question": f"Who is {name}?", "answer": name} for name in "abc"]
READ = [Sample(name, f"Who is {name}?", (name,)) for name in "abc"]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("document", [MANY, {"data": MANY}, {told["id"]: {**told, "id": told["id"]} for told in MANY}])
def test_one_document_is_read_like_lines(tmp_path, document, indent):
    (tmp_path / "f.json").write_text("\n" + json.dumps(document, indent=indent))
    assert read_file(tmp_path / "f.json") == Reading(READ, "own", [], "element")
    assert read_samples(tmp_path / "f.json", limit=2) == READ[:2]


def test_objects_by_their_ids_are_named_by_them(tmp_path):
    named = {told["id"]: {"question": told["question"], "answer": told["answer"]} for told in MANY}
    (tmp_path / "f.json").write_text(json.dumps(named))
    assert read_samples(tmp_path / "f.json") == READ


def test_a_single_object_over_many_lines_is_one_sample(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps({**MANY[0], "data": [1]}, indent=2))
    assert read_samples(tmp_path / "f.json") == [Sample("a", "Who is a?", ("a",), meta={"data": [1]})]


def test_a_list_with_an_object_on_each_line_is_a_document(tmp_path):
    (tmp_path / "f.json").write_text("[\n" + ",\n".join(map(json.dumps, MANY)) + "\n]")
    assert read_file(tmp_path / "f.json").unit == "element"
    (tmp_path / "g.json").write_text("[\n" + json.dumps(MANY[0]) + "\n]")
    assert read_samples(tmp_path / "g.json") == READ[:1]


def test_a_document_that_is_cut_off_is_said_to_be(tmp_path):
    whole = json.dumps(MANY, indent=1)
    for cut in (whole[: len(whole) // 2], whole[:-1], whole[:20], "["):
        (tmp_path / "f.json").write_text(cut)
        for skip_bad in (False, True):
            with pytest.raises(UserError, match=r"f\.json: it is no whole JSON \(.*\), it seems to be cut off; give a"):
                read_file(tmp_path / "f.json", skip_bad=skip_bad)


def test_a_bad_element_is_refused_by_its_number(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps([MANY[0], {"question": "Who?"}]))
    with pytest.raises(UserError, match=r'f\.json, element 2: it has neither "answer" nor "answers"'):
        read_samples(tmp_path / "f.json")
    (tmp_path / "f.json").write_text(json.dumps([MANY[0], 3, MANY[0]]))
    assert read_file(tmp_path / "f.json", skip_bad=True).bad == [
        (2, "a sample is a JSON object, and this is a number"),
        (3, "the id 'a' is that of element 1 too; ids must differ"),
    ]


@pytest.mark.parametrize("places", [[0], [1], [0, 3], [0, 1]])
def test_what_is_bad_can_be_left_out_and_is_counted(tmp_path, places):
    lines: list[object] = list(MANY)
    for place in places:
        lines.insert(place, '{"id": "d", "quest')
    file = written(tmp_path / "f", *lines)
    reading = read_file(file, skip_bad=True)
    assert (reading.samples, reading.format, reading.unit) == (READ, "own", "line")
    assert [number for number, _ in reading.bad] == [place + 1 for place in places]
    assert all("it seems to be cut off" in reason for _, reason in reading.bad)
    with pytest.raises(UserError, match=f"f, line {places[0] + 1}: it is no whole JSON"):
        read_file(file)


def test_a_file_of_nothing_but_bad_lines_is_refused(tmp_path):
    file = written(tmp_path / "f", {"question": "Who?"}, {"answer": "x"})
    with pytest.raises(UserError) as refused:
        read_file(file, skip_bad=True, format="own")
    assert str(refused.value) == (
        f'{file} holds no samples, only 2 bad lines; the first is line 1: it has neither "answer" nor "answers";'
        ' write "answers": [] if there is none'
    )


def test_what_samples_have_is_counted():
    gold = Passage("", "It is Velmora.", True, ((6, 13),))
    samples = [
        Sample("a", "Where?", ("Velmora",), (gold, Passage("", "x"))),
        Sample("b", "where? ", ("yes",), (Passage("", "x", True),)),
        Sample("c", "When?", ("1990",), (Passage("", "x", True),)),
        Sample("d", "Who?", ("Mira",), (Passage("", "x"),)),
        Sample("e", "What?", (), (Passage("", "x"),)),
        Sample("f", "Why?", ("so",)),
    ]
    assert counts(samples) == {
        "samples": 6,
        "with_passages": 5,
        "with_gold": 3,
        "with_evidence": 1,
        "yes_or_no": 1,
        "unanswerable": 1,
        "passages_each": {"min": 0, "median": 1.0, "max": 2},
    }
    assert problems(samples) == {
        "no gold passage": ["d"],
        "no evidence in the gold passages": ["c"],
        "a question asked more than once": ["a", "b"],
    }
    assert problems(samples[:1]) == {}


def test_what_is_not_there_is_named(tmp_path):
    for ask in (read_samples, read_file, about):
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
