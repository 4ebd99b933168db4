"""File formats: each layout is read into samples, and errors are one sentence that names the field."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_counts import examples
from floatscope.errors import UserError
from floatscope.tasks.formats import FORMATS, detect_format, get_format
from floatscope.tasks.formats.fields import find_evidence, list_answers, shorten
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.sample_files import read_file, read_samples

OWN = {
    "id": "q-1",
    "question": "Where does Mira live?",
    "answers": ["Velmora"],
    "passages": [{"title": "Mira", "text": "Mira lives in Velmora.", "gold": True, "evidence": [[14, 21]]}],
    "kind": "reading",
}
PAPER = {
    "id": "nq-7",
    "input": "where does mira live",
    "output": [{"answer": "Velmora", "provenance": []}, {"provenance": []}, {"answer": "Velm"}],
    "passage": [{"docid": "d1", "title": "Mira", "segment": "Mira lives in Velmora."}, {"segment": "Nobody."}],
}
LOST = {
    "question": "where does mira live",
    "answers": ["velmora", "Velm"],
    "ctxs": [
        {"title": "Velm", "text": "Velm is a river.", "hasanswer": True, "isgold": False},
        {"title": "Mira", "text": "Mira lives in Velmora, near Velm.", "hasanswer": True, "isgold": True},
        {"title": "None", "text": "Nobody.", "hasanswer": False, "isgold": False},
    ],
}
ORACLE = {
    "question": "where does mira live",
    "answers": ["Velmora"],
    "nq_annotated_gold": {"title": "Mira", "long_answer": "…", "chunked_long_answer": "Mira lives in Velmora."},
}
KV = {"ordered_kv_records": [["a1", "b1"], ["a2", "b2"], ["a3", "b2"]], "key": "a2", "value": "b2"}
CONTEXT = "Mira lives in Velmora, a town."
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Mira",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "s1",
                            "question": "Where does Mira live?",
                            "is_impossible": False,
                            "answers": [
                                {"text": "Velmora", "answer_start": 14},
                                {"text": "Velmora, a town", "answer_start": 14},
                                {"text": "Velmora", "answer_start": 14},
                            ],
                        },
                        {
                            "id": "s2",
                            "question": "Where was Mira born?",
                            "is_impossible": True,
                            "answers": [],
                            "plausible_answers": [{"text": "Velmora", "answer_start": 14}],
                        },
                    ],
                },
                {
                    "context": "It is small.",
                    "qas": [{"id": "s3", "question": "Size?", "answers": [{"text": "small", "answer_start": 6}]}],
                },
            ],
        }
    ],
}
ROW = {
    "id": "s1",
    "title": "Mira",
    "context": CONTEXT,
    "question": "Where does Mira live?",
    "answers": {"text": ["Velmora", "Velmora, a town"], "answer_start": [14, 14]},
}
HOTPOT = {
    "_id": "h1",
    "question": "Where does the teacher of Mira live?",
    "answer": "Velmora",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Mira", 0], ["Joren", 1]],
    "context": [
        ["Mira", ["Mira is a painter.", " Joren taught her."]],
        ["Velmora", ["Velmora is a town."]],
        ["Joren", ["Joren paints.", " He lives in Velmora."]],
    ],
}
HOTPOT_COLUMNS = HOTPOT | {
    "supporting_facts": {"title": ["Mira", "Joren"], "sent_id": [0, 1]},
    "context": {"title": [t for t, _ in HOTPOT["context"]], "sentences": [s for _, s in HOTPOT["context"]]},
}
TRIPLES = [["Mira", "teacher", "Joren"], ["Joren", "home", "Velmora"]]
TWO_WIKI = HOTPOT | {
    "type": "compositional",
    "context": [[title, [sentence.strip() for sentence in record]] for title, record in HOTPOT["context"]],
    "evidences": TRIPLES,
}
TWO_WIKI_COLUMNS = TWO_WIKI | {
    "supporting_facts": HOTPOT_COLUMNS["supporting_facts"],
    "context": {"title": [t for t, _ in TWO_WIKI["context"]], "content": [s for _, s in TWO_WIKI["context"]]},
    "evidences": dict(zip(("fact", "relation", "entity"), map(list, zip(*TRIPLES, strict=True)), strict=True)),
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Where does the teacher of Mira live?",
    "answer": "Velmora",
    "answer_aliases": ["Velm", "Velmora"],
    "answerable": True,
    "question_decomposition": [{"id": 1, "question": "Who taught Mira?"}, {"id": 2, "question": "Where does #1 live?"}],
    "paragraphs": [
        {"idx": 0, "title": "Mira", "paragraph_text": "Joren taught Mira.", "is_supporting": True},
        {"idx": 1, "title": "Velmora", "paragraph_text": "Velmora is a town.", "is_supporting": False},
        {"idx": 2, "title": "Joren", "paragraph_text": "Joren lives in Velmora.", "is_supporting": True},
    ],
}
POISONED = {
    "id": "test1",
    "question": "where does mira live",
    "correct answer": "Velmora",
    "incorrect answer": "Dramora",
    "adv_texts": ["Mira lives in Dramora.", "Dramora is where Mira lives."],
}
RECORDS_BY_FORMAT = {
    "own": [
        OWN,
        {"question": "Who?", "answer": "Mira"},
        {"question": "Who?", "answers": [], "passages": [], "ctxs": []},
    ],
    "paper": [PAPER, {"query": "who", "answers": ["Mira"]}, {"question": "who", "output": "Mira"}],
    "lost-in-the-middle": [LOST, ORACLE],
    "kv": [KV],
    "squad": [ROW, ROW | {"answers": [{"text": "Velmora", "answer_start": 14}]}],
    "hotpot": [HOTPOT, HOTPOT_COLUMNS],
    "2wiki": [TWO_WIKI, TWO_WIKI_COLUMNS, HOTPOT | {"type": "inference"}],
    "musique": [MUSIQUE],
    "poisonedrag": [POISONED],
}
ALL_RECORDS = [(name, record) for name, all in RECORDS_BY_FORMAT.items() for record in all]


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_document(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value, indent=1))
    return path


def read_one(path: Path) -> Sample:
    (sample,) = read_samples(path)
    return sample


def evidence_texts(sample: Sample) -> list[list[str]]:
    """Return the text of the evidence of each passage."""
    return [[p.text[a:b] for a, b in p.evidence] for p in sample.passages]


def read_error(record: object, path: Path, format: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        read_samples(write_lines(path, record), format=format)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}, ")


def test_own(tmp_path):
    passage = Passage("Mira", "Mira lives in Velmora.", True, ((14, 21),))
    expected = Sample("q-1", "Where does Mira live?", ("Velmora",), (passage,), {"kind": "reading"})
    assert read_samples(write_lines(tmp_path / "f", OWN)) == [expected]
    assert expected.as_json() == OWN


def test_paper(tmp_path):
    sample = read_one(write_lines(tmp_path / "f", PAPER))
    passages = (Passage("Mira", "Mira lives in Velmora."), Passage("", "Nobody."))
    assert sample == Sample("nq-7", "where does mira live", ("Velmora", "Velm"), passages)


@pytest.mark.parametrize("answers", ["A", ["A"], ["A", "A", ""], {"answer": "A"}, [{"text": "A"}], {"answer": ["A"]}])
@pytest.mark.parametrize("field", ["output", "answer", "answers"])
def test_answers_of_paper_have_many_forms(tmp_path, field, answers):
    record = {"query": "who", field: answers, "passage": []}
    assert read_one(write_lines(tmp_path / "f", record)) == Sample("1", "who", ("A",))


def test_lost_in_the_middle(tmp_path):
    path = tmp_path / "f.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(LOST).encode()))
    sample = read_one(path)
    assert (sample.id, sample.question, sample.answers) == ("1", "where does mira live", ("velmora", "Velm"))
    assert [(p.title, p.gold) for p in sample.passages] == [("Velm", False), ("Mira", True), ("None", False)]
    assert evidence_texts(sample) == [[], ["Velmora", "Velm"], []]
    assert sample.meta == {"has_answer": [1, 2]}


def test_lost_in_the_middle_oracle_has_the_annotated_passage(tmp_path):
    sample = read_one(write_lines(tmp_path / "f", ORACLE))
    assert sample.passages == (Passage("Mira", "Mira lives in Velmora.", True, ((14, 21),)),)
    assert sample.meta == {}


def test_kv(tmp_path):
    sample = read_one(write_lines(tmp_path / "f", KV))
    assert (sample.id, sample.question, sample.answers) == ("1", 'What is the value of the key "a2"?', ("b2",))
    assert [p.text for p in sample.passages] == ['"a1": "b1"', '"a2": "b2"', '"a3": "b2"']
    assert [p.gold for p in sample.passages] == [False, True, False]
    assert evidence_texts(sample) == [[], ["b2"], []]


@pytest.mark.parametrize("indent", [None, 1])
def test_squad_articles(tmp_path, indent):
    path = tmp_path / "f.json"
    path.write_text(json.dumps(SQUAD, indent=indent))
    contents = read_file(path)
    first, second, third = contents.samples
    assert (contents.format, contents.unit) == ("squad", "question")
    assert (first.id, first.answers, first.meta) == ("s1", ("Velmora", "Velmora, a town"), {})
    assert first.passages == (Passage("Mira", CONTEXT, True, ((14, 29),)),)  # the longer of two that overlap
    assert second == Sample(
        "s2",
        "Where was Mira born?",
        (),
        (Passage("Mira", CONTEXT),),
        {"unanswerable": True, "plausible_answers": ["Velmora"]},
    )
    assert (third.answers, evidence_texts(third)) == (("small",), [["small"]])
    assert read_file(write_document(tmp_path / "g.json", SQUAD["data"])).samples == contents.samples


def test_squad_rows(tmp_path):
    sample = read_one(write_lines(tmp_path / "f", ROW))
    assert sample.answers == ("Velmora", "Velmora, a town")
    assert sample.passages == (Passage("Mira", CONTEXT, True, ((14, 29),)),)
    sample = read_one(write_lines(tmp_path / "f", ROW | {"answers": {"text": [], "answer_start": []}}))
    assert (sample.answers, sample.passages[0].gold, sample.meta) == ((), False, {"unanswerable": True})


@pytest.mark.parametrize("record", [HOTPOT, HOTPOT_COLUMNS], ids=["original", "columns"])
def test_hotpot(tmp_path, record):
    sample = read_one(write_document(tmp_path / "f.json", [record]))
    assert (sample.id, sample.answers, sample.meta) == ("h1", ("Velmora",), {"type": "bridge", "level": "hard"})
    assert sample.passages == (
        Passage("Mira", "Mira is a painter. Joren taught her.", True),
        Passage("Velmora", "Velmora is a town."),
        Passage("Joren", "Joren paints. He lives in Velmora.", True, ((26, 33),)),
    )


def test_sentences_of_hotpot_keep_their_spaces(tmp_path):
    record = HOTPOT | {"context": [["Mira", ['It won "Best!', '" in 2010.', " Then it ended."]]]}
    assert (
        read_one(write_document(tmp_path / "f.json", [record])).passages[0].text
        == 'It won "Best!" in 2010. Then it ended.'
    )


@pytest.mark.parametrize("record", [TWO_WIKI, TWO_WIKI_COLUMNS], ids=["original", "columns"])
def test_2wiki(tmp_path, record):
    sample = read_one(write_document(tmp_path / "f.json", [record]))
    assert sample.passages == read_one(write_document(tmp_path / "g.json", [HOTPOT])).passages
    assert sample.meta == {"type": "compositional", "evidences": TRIPLES}


def test_musique(tmp_path):
    sample = read_one(write_lines(tmp_path / "f", MUSIQUE))
    assert (sample.id, sample.answers) == ("2hop__1_2", ("Velmora", "Velm"))
    assert [p.gold for p in sample.passages] == [True, False, True]
    assert evidence_texts(sample) == [[], [], ["Velmora"]]
    assert sample.meta == {"hops": 2, "question_decomposition": MUSIQUE["question_decomposition"]}
    sample = read_one(write_lines(tmp_path / "f", MUSIQUE | {"answerable": False}))
    assert (sample.answers, sample.meta["unanswerable"], evidence_texts(sample)) == ((), True, [[], [], []])


def test_poisonedrag(tmp_path):
    sample = read_one(write_document(tmp_path / "f.json", {"test1": POISONED}))
    passages = (Passage("", "Mira lives in Dramora."), Passage("", "Dramora is where Mira lives."))
    meta = {"incorrect_answer": "Dramora", "adversarial": [1, 2]}
    assert sample == Sample("test1", "where does mira live", ("Velmora",), passages, meta)


@pytest.mark.parametrize(("name", "record"), ALL_RECORDS)
def test_the_format_is_detected_from_one_object(name, record):
    assert detect_format(record).name == name


def test_every_format_is_tested():
    assert list(RECORDS_BY_FORMAT) == [format.name for format in FORMATS]


def test_samples_of_every_format_can_be_written_and_read_back(tmp_path):
    for _, record in ALL_RECORDS:
        sample = read_one(write_lines(tmp_path / "f", record))
        contents = read_file(write_lines(tmp_path / "own.jsonl", sample.as_json()))
        assert (contents.format, contents.samples) == ("own", [sample])
    samples = read_samples(write_document(tmp_path / "f", SQUAD))
    assert read_samples(write_lines(tmp_path / "own.jsonl", *(s.as_json() for s in samples))) == samples


def test_the_format_can_be_given(tmp_path):
    record = {"question": "Who?", "answer": "Mira", "passage": [{"segment": "Mira."}]}
    assert read_one(write_lines(tmp_path / "f", record)).passages == (Passage("", "Mira."),)
    assert read_samples(tmp_path / "f", format="own") == [
        Sample("1", "Who?", ("Mira",), meta={"passage": [{"segment": "Mira."}]})
    ]
    assert read_samples(write_lines(tmp_path / "f", TWO_WIKI), format="hotpot")[0].meta["type"] == "compositional"
    with pytest.raises(
        UserError, match=r"unknown format 'hotpt' \(did you mean 'hotpot'\?\); allowed: own, paper, lost"
    ):
        read_samples(tmp_path / "f", format="hotpt")
    assert get_format("kv").name == "kv"


def test_an_unknown_format_is_an_error_with_the_known_ones(tmp_path):
    message = read_error({"title": "Mira", "te\nxt": "…", **{f"f{i}": i for i in range(20)}}, tmp_path / "f")
    assert message.startswith("line 1: its fields are title, te\\nxt, f0, ")
    assert ", …, which match no known format; give `format` (--format): own (question, " in message
    assert all(f"{format.name} ({format.fields})" in message for format in FORMATS)
    assert read_error({}, tmp_path / "f").startswith("line 1: it has no fields, which match no known format")


def test_a_record_of_two_formats_is_an_error_with_both(tmp_path):
    message = read_error({"question": "Who?", "ctxs": [], "adv_texts": []}, tmp_path / "f")
    assert message == (
        "line 1: its fields are question, ctxs, adv_texts, which match lost-in-the-middle and poisonedrag;"
        " give `format` (--format)"
    )


NO_ANSWER = "it has no answer, and no field says that it is unanswerable"


@pytest.mark.parametrize(
    ("format", "record", "message"),
    [
        ("paper", PAPER | {"output": [{"provenance": []}]}, NO_ANSWER),
        ("paper", PAPER | {"output": 7}, "an answer must be a text, and one is a number"),
        ("paper", PAPER | {"output": [[[["a"]]]]}, "an answer must be a text, and one is a list"),
        ("paper", {"passage": [], "answer": "x"}, 'it has none of "input", "query", "question"'),
        ("paper", {"passage": [], "query": "x"}, 'it has none of "output", "answer", "answers"'),
        ("paper", PAPER | {"passage": {}}, '"passage" must be a list, and is an object'),
        ("paper", PAPER | {"passage": ["Mira"]}, "passage 1 must be an object, and is a text"),
        ("paper", PAPER | {"passage": [{"segment": "x"}, {"text": "x"}]}, 'passage 2: it has no "segment"'),
        ("paper", PAPER | {"id": ["x"]}, "its id must be a whole number or a text that is not empty"),
        ("lost-in-the-middle", LOST | {"answers": []}, NO_ANSWER),
        ("lost-in-the-middle", LOST | {"answers": [""]}, NO_ANSWER),
        ("lost-in-the-middle", {"question": "x", "ctxs": []}, 'it has no "answers"'),
        ("lost-in-the-middle", LOST | {"ctxs": None}, '"ctxs" must be a list, and is null'),
        (
            "lost-in-the-middle",
            LOST | {"ctxs": [{"text": "x", "isgold": "yes"}]},
            'passage 1: "isgold" must be true or false',
        ),
        (
            "lost-in-the-middle",
            LOST | {"ctxs": [{"text": " "}]},
            'passage 1: "text" must be a text that is not empty',
        ),
        ("lost-in-the-middle", ORACLE | {"nq_annotated_gold": 3}, '"nq_annotated_gold" must be an object'),
        ("kv", KV | {"key": "a9"}, "none of its 3 records has the key a9 and the value b2"),
        ("kv", KV | {"value": "b1"}, "none of its 3 records has the key a2 and the value b1"),
        ("kv", KV | {"ordered_kv_records": [["a"]]}, "record 1 must be a key and a value, two texts"),
        ("kv", {"ordered_kv_records": []}, 'it has no "key"'),
        ("squad", ROW | {"answers": []}, NO_ANSWER),
        (
            "squad",
            ROW | {"answers": [{"text": "x"}]},
            'every answer must have an "answer_start" that is a whole number',
        ),
        ("squad", ROW | {"answers": {"text": ["x"]}}, '"answers" must have as many "text" as "answer_start"'),
        (
            "squad",
            ROW | {"answers": [{"text": "Velmora", "answer_start": 13}]},
            "the text at answer_start 13 is ' Velmor', not the answer 'Velmora'",
        ),
        ("squad", ROW | {"answers": [{"text": "n", "answer_start": -2}]}, "the text at answer_start -2 is 'M'"),
        ("squad", ROW | {"answers": [{"text": "", "answer_start": 2}]}, '"text" must be a text that is not empty'),
        ("hotpot", HOTPOT | {"answer": ""}, NO_ANSWER),
        ("hotpot", HOTPOT | {"context": "Mira"}, '"context" must be a list of [title, sentences], or the columns'),
        ("hotpot", HOTPOT | {"context": [["Mira", "x"]]}, "passage 1 must be a title and a list of sentences"),
        ("hotpot", HOTPOT | {"context": [["Mira", [" "]]]}, "passage 1 has no text"),
        ("hotpot", HOTPOT | {"context": {"title": ["a"]}}, 'it has none of "sentences", "content"'),
        (
            "hotpot",
            HOTPOT | {"context": {"title": ["a"], "sentences": []}},
            '"context" has 1 titles and 0 paragraphs',
        ),
        ("hotpot", HOTPOT | {"supporting_facts": [0]}, '"supporting_facts" must be a list of [title, sentence], or'),
        ("2wiki", TWO_WIKI | {"supporting_facts": {}}, '"supporting_facts" must be a list of [title, sentence], or'),
        ("2wiki", {k: v for k, v in TWO_WIKI.items() if k != "answer"}, 'it has no "answer"'),
        ("musique", MUSIQUE | {"answer": None, "answer_aliases": []}, NO_ANSWER),
        ("musique", MUSIQUE | {"question": None}, '"question" must be a text that is not empty'),
        (
            "musique",
            MUSIQUE | {"paragraphs": [{"paragraph_text": "x", "is_supporting": 1}]},
            'passage 1: "is_supporting" must be true or false',
        ),
        ("poisonedrag", POISONED | {"adv_texts": [""]}, "passage 1 must be a text that is not empty"),
        ("poisonedrag", POISONED | {"correct answer": ""}, NO_ANSWER),
        (
            "poisonedrag",
            {k: v for k, v in POISONED.items() if k != "incorrect answer"},
            'it has no "incorrect answer"',
        ),
    ],
)
def test_missing_and_wrong_fields_are_named(tmp_path, format, record, message):
    assert detect_format(record).name == format
    assert read_error(record, tmp_path / "f").startswith(f"line 1: {message}")
    good = next(good for name, good in ALL_RECORDS if name == format)
    contents = read_file(write_lines(tmp_path / "f", good, record), skip_bad=True)
    assert (len(contents.samples), len(contents.errors), contents.errors[0][0]) == (1, 1, 2)


def test_a_bad_article_counts_as_one_question(tmp_path):
    document = copy.deepcopy(SQUAD)
    document["data"] += [
        {"title": "x"},
        {"paragraphs": [{"context": "x"}, 3]},
        {"paragraphs": [{"context": "x", "qas": [3]}]},
    ]
    document["data"][0]["paragraphs"][1].pop("context")
    contents = read_file(write_document(tmp_path / "f.json", document), skip_bad=True)
    assert [s.id for s in contents.samples] == ["s1", "s2"]
    assert contents.errors == [
        (3, 'it has no "context"'),
        (4, 'an article must be an object with a list of "paragraphs"'),
        (5, 'a paragraph must be an object with a "context" and a list of "qas"'),
        (6, 'a paragraph must be an object with a "context" and a list of "qas"'),
        (7, "a question must be an object"),
    ]
    with pytest.raises(UserError, match=r'f\.json, question 3: it has no "context"'):
        read_samples(tmp_path / "f.json")


def test_ids_of_a_file_must_differ(tmp_path):
    with pytest.raises(UserError, match=r"element 2: element 1 has the id 'h1' too; ids must differ"):
        read_samples(write_document(tmp_path / "f.json", [HOTPOT, HOTPOT]))
    assert [s.id for s in read_samples(write_lines(tmp_path / "f", PAPER | {"id": 7}, PAPER | {"id": "8"}))] == [
        "7",
        "8",
    ]


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("Mira lives in VELMORA.", ["velmora"], ["VELMORA"]),
        ("Velmoran, Velmora, subvelmora", ["Velmora"], ["Velmora"]),
        ("In 1990, 19901 or 1990.", ["1990"], ["1990", "1990"]),
        ("New\n York and New York", ["new york"], ["New\n York", "New York"]),
        ("G. Stanley Hall; Stanley Hall", ["Stanley Hall", "G. Stanley Hall"], ["G. Stanley Hall", "Stanley Hall"]),
        ("Berlin (East), starting on 13 August", ["), starting on"], ["), starting on"]),
        ("C++ (x) a.b", ["C++", "a.b", "axb"], ["C++", "a.b"]),
        ("No, there is no such yes.", ["no"], []),
        ("anything", ["", "  "], []),
        ("İstanbul is ıt", ["is"], ["is"]),
    ],
)
def test_evidence_is_whole_words(text, answers, expected):
    assert [text[a:b] for a, b in find_evidence(text, answers)] == expected


def test_values_in_messages_are_short_and_printable():
    assert shorten("a\x1b[2J\nb") == r"a\x1b[2J\nb"
    assert shorten("x" * 99, 10) == "x" * 9 + "…"
    assert list_answers(None) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def list_paths(record: object, prefix: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return the paths of all parts of a JSON value."""
    inner = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    return [prefix, *(place for key, part in inner for place in list_paths(part, (*prefix, key)))]


def replace_at(record: object, path: tuple[object, ...], value: object) -> object:
    """Return the JSON value with another value at one path."""
    if not path:
        return value
    changed = copy.copy(record)
    changed[path[0]] = replace_at(record[path[0]], path[1:], value)
    return changed


@examples(150)
@given(st.data())
def test_any_value_at_any_path_is_read_or_a_one_line_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("f") / "f.json"
    record = data.draw(st.sampled_from([SQUAD, *(record for _, record in ALL_RECORDS)]))
    changed = replace_at(record, data.draw(st.sampled_from(list_paths(record))), data.draw(JSON))
    path.write_text(json.dumps(data.draw(st.sampled_from([changed, [changed], {"x": changed}, [record, changed]]))))
    format = data.draw(st.sampled_from([None, *(format.name for format in FORMATS)]))
    for skip_bad in (False, True):
        samples = read_or_error(path, format, skip_bad)
        assert all(0 <= a < b <= len(p.text) for s in samples for p in s.passages for a, b in p.evidence)
        if samples:
            again = write_lines(path.with_name("own"), *(sample.as_json() for sample in samples))
            assert read_samples(again, format="own") == samples


def read_or_error(path: Path, format: str | None, skip_bad: bool) -> list[Sample]:
    """Return the samples; none if the error is one sentence."""
    try:
        return read_file(path, format=format, skip_bad=skip_bad).samples
    except UserError as error:
        if "\n" in str(error):
            raise AssertionError("the message has more than one line") from error
        return []


@examples(200)
@given(
    st.binary(max_size=60) | st.text('[]{}":,\\u0dabet \n', max_size=60).map(str.encode), st.sampled_from(["f", "f.gz"])
)
def test_any_bytes_are_a_user_error(tmp_path_factory, content, name):
    path = tmp_path_factory.mktemp("f") / name
    path.write_bytes(gzip.compress(content) if name == "f.gz" and len(content) % 2 else content)
    for skip_bad in (False, True):
        with pytest.raises(UserError):
            read_file(path, skip_bad=skip_bad)


@examples(100)
@given(st.sampled_from([json.dumps(SQUAD, indent=1), json.dumps([HOTPOT]), json.dumps(OWN)]), st.floats(0, 0.9999))
def test_a_truncated_file_is_an_error(tmp_path_factory, text, share):
    path = tmp_path_factory.mktemp("f") / "f"
    path.write_text(text[: int(share * len(text))])
    with pytest.raises(UserError, match=r"it seems to be cut off|contains no samples|it is not valid JSON"):
        read_samples(path)


SHARED = Path(__file__).parents[3] / "shared" / "data" / "qa"
needs_real_files = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"the real files are not here: {SHARED} is not a folder"
)

FILES = {  # format, samples, with gold, with evidence, with a yes or no for an answer, passages each
    "nq-open-oracle.jsonl.gz": ("lost-in-the-middle", 2655, 2655, 2655, 0, [1, 1, 1]),
    "kv-retrieval-75_keys.jsonl.gz": ("kv", 500, 500, 500, 0, [75, 75, 75]),
    "xquad.en.json": ("squad", 1190, 1190, 1190, 0, [1, 1, 1]),
    "hotpot_dev_distractor_100.json": ("hotpot", 100, 100, 88, 12, [2, 10, 10]),
    "2wiki_500.json.gz": ("2wiki", 500, 500, 333, 166, [10, 10, 10]),
    "musique_100.json": ("musique", 100, 100, 99, 0, [20, 20, 20]),
    "poisonedrag_nq.json": ("poisonedrag", 100, 0, 0, 3, [5, 5, 5]),
}
COUNT = """
import json, sys
from floatscope.tasks.sample_files import read_file
from floatscope.tasks.summary import count_samples
for path in sys.argv[1:]:
    contents = read_file(path)
    print(json.dumps({"format": contents.format, **count_samples(contents.samples)}))
"""


@needs_real_files
def test_real_files_have_the_known_counts():
    """Count in another process: type checks of every call take ten times as long as reading."""
    command = [sys.executable, "-c", COUNT, *(str(SHARED / name) for name in FILES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    counts = [json.loads(line) for line in done.stdout.splitlines()]
    actual = [
        (t["format"], t["samples"], t["with_gold"], t["with_evidence"], t["yes_or_no"], [*t["passages_each"].values()])
        for t in counts
    ]
    assert dict(zip(FILES, actual, strict=True)) == FILES
    assert [t["unanswerable"] for t in counts] == [0] * len(FILES)
    assert [t["with_passages"] for t in counts] == [t["samples"] for t in counts]


@needs_real_files
@pytest.mark.parametrize("name", FILES)
def test_real_evidence_is_an_answer_and_real_samples_are_read_back(name, tmp_path):
    samples = read_samples(SHARED / name, limit=100)
    for sample in samples:
        answers = {" ".join(answer.lower().split()) for answer in sample.answers}
        assert {" ".join(text.lower().split()) for texts in evidence_texts(sample) for text in texts} <= answers
        assert all(p.gold for p in sample.passages if p.evidence)
    assert read_samples(write_lines(tmp_path / "own.jsonl", *(s.as_json() for s in samples))) == samples


@needs_real_files
def test_a_passage_collection_is_not_a_question_file():
    with pytest.raises(UserError, match="element 1: its fields are title, text, which match no known format"):
        read_samples(SHARED / "2wikimultihopqa_passages.json.gz")
