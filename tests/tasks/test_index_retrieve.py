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
