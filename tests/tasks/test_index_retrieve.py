"""Passages for samples: which of those found are gold, and how many of the gold ones are found."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from floatscope.tasks.index import Added, Index, retrieved
from floatscope.tasks.sample import Passage, Sample

MIRA = ("m", "Mira", "Mira lives in Velmora, a town by the sea.")
TOVE = ("t", "Tove Ås", "Tove was baking breads for the sailors.")
OLAF = (None, "", "Olaf has neither a title nor an id; he is a painter.")
REAL = Path(__file__).parents[2].parent / "shared/data/qa"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def asked(folder: Path) -> Index:
    index = Index.create(folder)
    index.add([MIRA, TOVE, OLAF])
    return index


def test_samples_get_the_passages_found_for_them(asked):
    gold = Passage("mira", MIRA[2], gold=True, evidence=((14, 21),))
    other = Passage("Nina", "Nina is in no index.", gold=True)
    titled = Passage("", OLAF[2], gold=True)
    samples = [
        Sample("a", "Where does Mira live?", ("Velmora",), (gold, other), {"kind": "x"}),
        Sample("b", "Is Olaf a painter, as Tove is?", ("yes",), (titled,)),
        Sample("c", "😀", ()),
    ]
    found, recall = retrieved(asked, samples, 2)
    assert recall == pytest.approx(2 / 3)
    assert [(each.id, each.question, each.answers, each.meta) for each in found] == [
        (each.id, each.question, each.answers, each.meta) for each in samples
    ]
    assert found[0].passages == (Passage("Mira", MIRA[2], True, ((14, 21),)),)
    assert {(each.title, each.gold) for each in found[1].passages} == {("", True), ("Tove Ås", False)}
    assert found[2].passages == ()
    assert retrieved(asked, samples[2:])[1] is None


# Chunked: several passages of one title ------------------------------------------------------------------------------

LIFE = "Mira was born in Tarn. She sailed for years with her aunt. Later Mira moved to Velmora. She is a baker there."
CHUNKS = [
    ("c-0", "Mira", "Mira was born in Tarn."),
    ("c-1", "Mira", "She sailed for years with her aunt. Later"),
    ("c-2", "Mira", "Mira moved to  Velmora.\nShe is a baker there."),
]
ASKED = "Where did Mira move, and who is a baker or sailed for years with her aunt?"


def chunked(folder: Path, *more: tuple[str, str, str]) -> Index:
    index = Index.create(folder)
    index.add([*CHUNKS, *more])
    return index


def gold_of(sample: Sample) -> dict[str, bool]:
    return {passage.text: passage.gold for passage in sample.passages}


def sample(*passages: Passage) -> Sample:
    return Sample("q", ASKED, ("Velmora",), passages)


def life(answer: str = "Velmora", text: str = LIFE, title: str = "Mira") -> Passage:
    at = text.index(answer)
    return Passage(title, text, gold=True, evidence=((at, at + len(answer)),))


def test_of_several_chunks_the_one_with_the_evidence_is_gold(folder):
    (found,), recall = retrieved(chunked(folder), [sample(life())], 3)
    assert gold_of(found) == {text: id == "c-2" for id, _, text in CHUNKS}
    (gold,) = (passage for passage in found.passages if passage.gold)
    assert [gold.text[start:stop] for start, stop in gold.evidence] == ["Velmora"]
    assert recall == 1.0


def test_a_chunk_without_the_evidence_finds_nothing(folder):
    index = chunked(folder)
    index.remove(["c-2"])
    (found,), recall = retrieved(index, [sample(life())], 3)
    assert not any(gold_of(found).values())
    assert len(found.passages) == 2
    assert recall == 0.0


def test_chunks_cut_elsewhere_are_known_by_the_evidence(folder):
    own = life(text="Years on, she said: Velmora it is. Later Mira moved to Velmora.")
    assert retrieved(chunked(folder), [sample(own)], 3)[1] == 1.0


def test_the_answer_in_another_article_is_no_gold(folder):
    index = chunked(folder, ("o", "Sailors", "Sailors moved from Velmora."))
    (found,), _ = retrieved(index, [sample(life())], 4)
    assert gold_of(found)["Sailors moved from Velmora."] is False


@pytest.mark.parametrize("mine", ["", "Mira"])
def test_without_titles_one_text_must_be_in_the_other(folder, mine):
    index = Index.create(folder)
    index.add([(id, "", text) for id, _, text in CHUNKS] + [("o", "", "Someone else moved to Velmora, a baker.")])
    (found,), recall = retrieved(index, [sample(life(title=mine))], 4)
    assert [text for text, gold in gold_of(found).items() if gold] == [CHUNKS[2][2]]
    assert recall == 1.0


def test_where_the_evidence_is_not_known_a_part_of_the_gold_passage_is_gold(folder):
    index = chunked(folder, ("d", "Mira", "Mira is also the name of a star, and of an aunt."))
    (found,), recall = retrieved(index, [sample(Passage("mira", LIFE, gold=True))], 4)
    assert gold_of(found) == {text: True for _, _, text in CHUNKS} | {index.get("d").text: False}
    assert recall == 1.0


def test_a_part_ends_where_words_end(folder):
    index = Index.create(folder)
    index.add([("a", "Mira", "moved to Velm")])
    assert retrieved(index, [sample(Passage("Mira", LIFE, gold=True))], 4)[1] == 0.0


def test_a_longer_passage_holds_the_gold_one(folder):
    index = Index.create(folder)
    index.add([("whole", "Mira", LIFE + " And yes, that is all.")])
    own = Passage("Mira", "Later Mira moved to Velmora.", gold=True)
    (found,), recall = retrieved(index, [sample(own, Passage("Tove", "Tove moved to Velmora.", gold=True))], 4)
    assert gold_of(found) == {LIFE + " And yes, that is all.": True}
    assert recall == 0.5


def test_evidence_counts_where_no_passage_is_marked(folder):
    own = Passage("Mira", LIFE, gold=False, evidence=life().evidence)
    (found,), recall = retrieved(chunked(folder), [sample(own, Passage("Mira", "Mira was born in Tarn."))], 3)
    assert gold_of(found) == {text: id == "c-2" for id, _, text in CHUNKS}
    assert recall == 1.0


def test_copies_are_gold_each_and_found_once(folder):
    index = chunked(folder, ("copy", "Mira", CHUNKS[2][2]))
    (found,), recall = retrieved(index, [sample(life(), life())], 4)
    assert sum(passage.gold for passage in found.passages) == 2
    assert recall == 1.0
    other = Passage("Nina", "Nina is in no index.", gold=True)
    assert retrieved(index, [sample(life(), life(), other)], 4)[1] == 0.5


def test_without_gold_passages_nothing_is_decided(folder):
    index, bare = chunked(folder), sample(Passage("Mira", LIFE))
    (found,), recall = retrieved(index, [bare], 3)
    assert not any(gold_of(found).values())
    assert recall is None
    assert retrieved(index, [], 3) == ([], None)
    assert retrieved(index, [bare, sample(life())], 3)[1] == 1.0


# A real collection ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL.exists(), reason="the shared data are not here")
def test_real_passages_are_found_by_real_questions(folder, tmp_path):
    """The collection has few of the passages these questions need; their own passages are added to it."""
    index = Index.create(folder)
    assert index.add_file(REAL / "2wikimultihopqa_passages.json.gz") == Added(added=6119)
    assert index.add_file(REAL / "2wikimultihopqa_passages.json.gz") == Added(unchanged=6119)
    samples = []
    for asked in json.loads(gzip.decompress((REAL / "2wiki_500.json.gz").read_bytes()))[:200]:
        wanted = {title for title, _ in asked["supporting_facts"]}
        own = tuple(Passage(title, " ".join(told), title in wanted) for title, told in asked["context"])
        samples.append(Sample(asked["_id"], asked["question"], (asked["answer"],), own))
    counts = index.add((None, own.title, own.text) for sample in samples for own in sample.passages)
    assert counts.passages == 2000
    assert index.stat().passages == 6119 + counts.added
    at5, at10 = (retrieved(index, samples, k)[1] for k in (5, 10))
    assert 0.6 < at5 < at10
