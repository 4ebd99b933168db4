"""Retrieval for samples: which hits are gold, and the recall of gold passages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from floatscope.tasks.index import AddCounts, Index, retrieve_passages
from floatscope.tasks.sample import Passage, Sample

MIRA = ("m", "Mira", "Mira lives in Velmora, a town by the sea.")
TOVE = ("t", "Tove Ås", "Tove was baking breads for the sailors.")
OLAF = (None, "", "Olaf has neither a title nor an id; he is a painter.")
REAL = Path(__file__).parents[2].parent / "shared/data/qa"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def index(folder: Path) -> Index:
    index = Index.create(folder)
    index.add([MIRA, TOVE, OLAF])
    return index


def test_samples_receive_their_hits(index):
    gold = Passage("mira", MIRA[2], gold=True, evidence=((14, 21),))
    other = Passage("Nina", "Nina is in no index.", gold=True)
    titled = Passage("", OLAF[2], gold=True)
    samples = [
        Sample("a", "Where does Mira live?", ("Velmora",), (gold, other), {"kind": "x"}),
        Sample("b", "Is Olaf a painter, as Tove is?", ("yes",), (titled,)),
        Sample("c", "😀", ()),
    ]
    result, recall = retrieve_passages(index, samples, 2)
    assert recall == pytest.approx(2 / 3)
    assert [(each.id, each.question, each.answers, each.meta) for each in result] == [
        (each.id, each.question, each.answers, each.meta) for each in samples
    ]
    assert result[0].passages == (Passage("Mira", MIRA[2], True, ((14, 21),)),)
    assert {(each.title, each.gold) for each in result[1].passages} == {("", True), ("Tove Ås", False)}
    assert result[2].passages == ()
    assert retrieve_passages(index, samples[2:])[1] is None


# Chunked: several passages of one title ------------------------------------------------------------------------------

LIFE = "Mira was born in Tarn. She sailed for years with her aunt. Later Mira moved to Velmora. She is a baker there."
CHUNKS = [
    ("c-0", "Mira", "Mira was born in Tarn."),
    ("c-1", "Mira", "She sailed for years with her aunt. Later"),
    ("c-2", "Mira", "Mira moved to  Velmora.\nShe is a baker there."),
]
QUESTION = "Where did Mira move, and who is a baker or sailed for years with her aunt?"


def chunked(folder: Path, *more: tuple[str, str, str]) -> Index:
    index = Index.create(folder)
    index.add([*CHUNKS, *more])
    return index


def gold_flags(sample: Sample) -> dict[str, bool]:
    return {passage.text: passage.gold for passage in sample.passages}


def sample(*passages: Passage) -> Sample:
    return Sample("q", QUESTION, ("Velmora",), passages)


def life(answer: str = "Velmora", text: str = LIFE, title: str = "Mira") -> Passage:
    at = text.index(answer)
    return Passage(title, text, gold=True, evidence=((at, at + len(answer)),))


def test_the_chunk_with_the_evidence_is_gold(folder):
    (result,), recall = retrieve_passages(chunked(folder), [sample(life())], 3)
    assert gold_flags(result) == {text: id == "c-2" for id, _, text in CHUNKS}
    (gold,) = (passage for passage in result.passages if passage.gold)
    assert [gold.text[start:stop] for start, stop in gold.evidence] == ["Velmora"]
    assert recall == 1.0


def test_a_chunk_without_the_evidence_is_not_gold(folder):
    index = chunked(folder)
    index.remove(["c-2"])
    (result,), recall = retrieve_passages(index, [sample(life())], 3)
    assert not any(gold_flags(result).values())
    assert len(result.passages) == 2
    assert recall == 0.0


def test_chunks_with_other_boundaries_match_by_evidence(folder):
    own = life(text="Years on, she said: Velmora it is. Later Mira moved to Velmora.")
    assert retrieve_passages(chunked(folder), [sample(own)], 3)[1] == 1.0


def test_the_answer_in_another_article_is_not_gold(folder):
    index = chunked(folder, ("o", "Sailors", "Sailors moved from Velmora."))
    (result,), _ = retrieve_passages(index, [sample(life())], 4)
    assert gold_flags(result)["Sailors moved from Velmora."] is False


@pytest.mark.parametrize("own_title", ["", "Mira"])
def test_without_titles_one_text_must_contain_the_other(folder, own_title):
    index = Index.create(folder)
    index.add([(id, "", text) for id, _, text in CHUNKS] + [("o", "", "Someone else moved to Velmora, a baker.")])
    (result,), recall = retrieve_passages(index, [sample(life(title=own_title))], 4)
    assert [text for text, gold in gold_flags(result).items() if gold] == [CHUNKS[2][2]]
    assert recall == 1.0


def test_without_evidence_a_part_of_the_gold_passage_is_gold(folder):
    index = chunked(folder, ("d", "Mira", "Mira is also the name of a star, and of an aunt."))
    (result,), recall = retrieve_passages(index, [sample(Passage("mira", LIFE, gold=True))], 4)
    assert gold_flags(result) == {text: True for _, _, text in CHUNKS} | {index.get("d").text: False}
    assert recall == 1.0


def test_parts_match_whole_words(folder):
    index = Index.create(folder)
    index.add([("a", "Mira", "moved to Velm")])
    assert retrieve_passages(index, [sample(Passage("Mira", LIFE, gold=True))], 4)[1] == 0.0


def test_a_longer_passage_matches_the_gold_one_inside_it(folder):
    index = Index.create(folder)
    index.add([("whole", "Mira", LIFE + " And yes, that is all.")])
    own = Passage("Mira", "Later Mira moved to Velmora.", gold=True)
    (result,), recall = retrieve_passages(index, [sample(own, Passage("Tove", "Tove moved to Velmora.", gold=True))], 4)
    assert gold_flags(result) == {LIFE + " And yes, that is all.": True}
    assert recall == 0.5


def test_evidence_alone_makes_a_passage_gold(folder):
    own = Passage("Mira", LIFE, gold=False, evidence=life().evidence)
    (result,), recall = retrieve_passages(chunked(folder), [sample(own, Passage("Mira", "Mira was born in Tarn."))], 3)
    assert gold_flags(result) == {text: id == "c-2" for id, _, text in CHUNKS}
    assert recall == 1.0


def test_copies_are_all_gold_and_count_once(folder):
    index = chunked(folder, ("copy", "Mira", CHUNKS[2][2]))
    (result,), recall = retrieve_passages(index, [sample(life(), life())], 4)
    assert sum(passage.gold for passage in result.passages) == 2
    assert recall == 1.0
    other = Passage("Nina", "Nina is in no index.", gold=True)
    assert retrieve_passages(index, [sample(life(), life(), other)], 4)[1] == 0.5


def test_recall_is_none_without_gold_passages(folder):
    index, unmarked = chunked(folder), sample(Passage("Mira", LIFE))
    (result,), recall = retrieve_passages(index, [unmarked], 3)
    assert not any(gold_flags(result).values())
    assert recall is None
    assert retrieve_passages(index, [], 3) == ([], None)
    assert retrieve_passages(index, [unmarked, sample(life())], 3)[1] == 1.0


# A real collection ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL.exists(), reason="the shared data are not here")
def test_recall_on_a_real_collection(folder, tmp_path):
    """The collection has few of the passages these questions need; their own passages are added to it."""
    index = Index.create(folder)
    assert index.add_file(REAL / "2wikimultihopqa_passages.json.gz") == AddCounts(added=6119)
    assert index.add_file(REAL / "2wikimultihopqa_passages.json.gz") == AddCounts(unchanged=6119)
    samples = []
    for record in json.loads(gzip.decompress((REAL / "2wiki_500.json.gz").read_bytes()))[:200]:
        gold_titles = {title for title, _ in record["supporting_facts"]}
        own = tuple(Passage(title, " ".join(sentences), title in gold_titles) for title, sentences in record["context"])
        samples.append(Sample(record["_id"], record["question"], (record["answer"],), own))
    counts = index.add((None, own.title, own.text) for sample in samples for own in sample.passages)
    assert counts.passages == 2000
    assert index.stats().passages == 6119 + counts.added
    at5, at10 = (retrieve_passages(index, samples, k)[1] for k in (5, 10))
    assert 0.6 < at5 < at10
