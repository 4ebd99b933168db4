"""The prompt: its text, where everything stands in it, and which tokens that is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatscope.tasks.prompt import bare, prompt_of, tokens_of
from floatscope.tasks.sample import Passage, Sample

MIRA = Passage("Mira", "Mira lives in Velmora.", True, ((14, 21),))
JON = Passage("Jon", "Jon keeps a cow.")
ASKED = Sample("a", "Where does Mira live?", ("Velmora",), (JON, MIRA))


def said(prompt, region):
    return [prompt.text[a:b] for a, b in prompt.spans[region]]


def test_the_passages_come_in_order_then_the_question():
    prompt = prompt_of(ASKED)
    assert prompt.text == (
        "Document 1: Jon keeps a cow.\nDocument 2: Mira lives in Velmora.\nQuestion: Where does Mira live?\nAnswer:"
    )
    assert said(prompt, "document 1") == [JON.text]
    assert said(prompt, "document 2") == said(prompt, "gold") == [MIRA.text]
    assert said(prompt, "evidence") == ["Velmora"]
    assert said(prompt, "question") == [ASKED.question]
    assert "|".join(said(prompt, "template")) == "Document 1: |\n|Document 2: |\n|Question: |\n|Answer:"


def test_the_question_may_come_first():
    prompt = prompt_of(ASKED, question_first=True)
    assert prompt.text == (
        "Question: Where does Mira live?\nDocument 1: Jon keeps a cow.\nDocument 2: Mira lives in Velmora.\nAnswer:"
    )
    assert said(prompt, "evidence") == ["Velmora"]
    assert said(prompt, "question") == [ASKED.question]


def test_without_passages_there_is_a_question_alone():
    prompt = prompt_of(Sample("a", "Who?", ()))
    assert prompt.text == "Question: Who?\nAnswer:"
    assert set(prompt.spans) == {"question", "template"}


def test_every_character_is_passage_question_or_template():
    for first in (False, True):
        prompt = prompt_of(ASKED, first)
        spans = [s for name, found in prompt.spans.items() if name not in ("gold", "evidence") for s in found]
        covered = sorted(i for a, b in spans for i in range(a, b))
        assert covered == list(range(len(prompt.text)))


def test_a_bare_prompt_is_all_prompt():
    assert bare("What floats?").spans == {"prompt": [(0, 12)]}
    assert tokens_of(bare("What floats?"), [(0, 4), (5, 11), (11, 12)]) == {"prompt": [0, 1, 2]}


def test_what_a_chat_template_adds_is_template():
    covers = [None, (-6, -2), (-2, 0), (0, 4), (3, 14), (12, 13), None]
    assert tokens_of(bare("What floats?"), covers) == {"template": [0, 1, 2, 5, 6], "prompt": [3, 4]}


def test_a_token_across_a_border_is_where_most_of_it_is():
    start = prompt_of(ASKED).text.index("cow.\nDoc")
    covers = [(start, start + 8), (start + 3, start + 5), (start + 3, start + 6), (start + 4, start + 4), None]
    assert tokens_of(prompt_of(ASKED), covers) == {"document 1": [0, 1], "template": [2, 3, 4]}


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(st.lists(st.tuples(TEXT, st.booleans(), st.integers(0, 7), st.integers(1, 8)), max_size=4), TEXT, st.booleans())
def test_spans_hold_what_they_are_named_for(told, question, first):
    passages = [Passage("", text, gold, ((a, b),) if a < b <= len(text) else ()) for text, gold, a, b in told]
    sample = Sample("x", question, ("y",), tuple(passages))
    prompt = prompt_of(sample, first)
    for number, passage in enumerate(sample.passages, 1):
        assert said(prompt, f"document {number}") == [passage.text]
    assert said(prompt, "question") == [sample.question]
    gold = [p.text for p in sample.passages if p.gold]
    assert (said(prompt, "gold") if gold else []) == gold
    evidence = [p.text[a:b] for p in sample.passages for a, b in p.evidence]
    assert (said(prompt, "evidence") if evidence else []) == evidence
    assert ("gold" in prompt.spans, "evidence" in prompt.spans) == (bool(gold), bool(evidence))


@pytest.mark.parametrize("width", [1, 3])
def test_every_token_is_in_one_part_and_evidence_is_what_covers_it(width):
    prompt = prompt_of(ASKED)
    covers = [(i, min(i + width, len(prompt.text))) for i in range(0, len(prompt.text), width)]
    found = tokens_of(prompt, covers)
    parts = [tokens for region, tokens in found.items() if region not in ("gold", "evidence")]
    assert sorted(n for tokens in parts for n in tokens) == list(range(len(covers)))
    for region, tokens in found.items():
        inside = {i for a, b in prompt.spans[region] for i in range(a, b)}
        shared = [len(inside & set(range(a, b))) for a, b in covers]
        if region == "evidence":
            assert tokens == [n for n, characters in enumerate(shared) if characters]
        else:
            assert all(2 * shared[n] >= covers[n][1] - covers[n][0] for n in tokens)
    documents = [n for i, p in enumerate(ASKED.passages, 1) if p.gold for n in found[f"document {i}"]]
    assert found["gold"] == documents
