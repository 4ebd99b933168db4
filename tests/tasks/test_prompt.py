"""The prompt: its text, where everything stands in it, and which tokens that is."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatscope.tasks.prompt import bare, prompt_of, tokens_of
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.template import Template

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


def as_the_twins_learnt_it(sample, question_first):
    """`prompt_of` as it was when the twins were trained, word for word; what it writes must not change."""
    told = [
        part
        for number, passage in enumerate(sample.passages, 1)
        for part in (
            ("template", f"Document {number}: "),
            (f"document {number}", passage.text),
            ("template", "\n"),
        )
    ]
    asked = [("template", "Question: "), ("question", sample.question), ("template", "\n")]
    parts = [*asked, *told] if question_first else [*told, *asked]
    text, spans = "", {}
    for region, part in [*parts, ("template", "Answer:")]:
        spans.setdefault(region, []).append((len(text), len(text) + len(part)))
        text += part
    for number, passage in enumerate(sample.passages, 1):
        ((start, stop),) = spans[f"document {number}"]
        if passage.gold:
            spans.setdefault("gold", []).append((start, stop))
        if passage.evidence:
            spans.setdefault("evidence", []).extend((start + a, start + b) for a, b in passage.evidence)
    return text, spans


ANY = st.text(st.sampled_from("a\n\r {}\u2028é") | st.characters(exclude_categories=["Cs"]), max_size=8)
EVIDENCE = st.lists(st.tuples(st.just(0), st.integers(1, 3)), max_size=2).map(tuple)
TOLD = st.lists(st.tuples(ANY, ANY, st.booleans(), EVIDENCE), max_size=12)


@given(TOLD, ANY, st.booleans())
def test_the_prompt_the_twins_learnt_has_not_changed(told, question, first):
    sample = Sample("x", question, (), tuple(Passage(*each) for each in told))
    text, spans = as_the_twins_learnt_it(sample, first)
    prompt = prompt_of(sample, first)
    assert prompt.text == text
    assert list(prompt.spans.items()) == list(spans.items())  # their order, too: of equals the first has a token


def regions_of(prompt, start, stop):
    """The regions of a token, by looking at all of them."""
    if start < 0 >= stop or start >= len(prompt.text):
        return ["template"]
    last = max(stop, start + 1)

    def shared(name):
        spans = prompt.spans[name]
        return sum(max(0, min(b, last) - max(a, start)) for a, b in spans), any(a <= start < b for a, b in spans)

    part = max((name for name in prompt.spans if name not in ("gold", "evidence")), key=shared)
    found = [part, "gold"] if prompt.spans[part][0] in prompt.spans.get("gold", ()) else [part]
    evidence = any(start < b and a < stop for a, b in prompt.spans.get("evidence", ()))
    return [*found, "evidence"] if evidence else found


SHORT = {
    "prompt": "{question}{shots}a{passages}bc\n{question}",
    "passage": "{title}{number}{text}",
    "shot": "{question}{answer}",
}
DENSE = Template("dense", SHORT)  # parts so short that tokens lie across several


@given(TOLD, ANY, st.integers(0, 3), st.lists(st.tuples(st.integers(-4, 30), st.integers(0, 9)), max_size=30))
def test_tokens_are_where_looking_at_all_regions_finds_them(told, question, shots, covers):
    sample = Sample("x", question, ("y",), tuple(Passage(*each) for each in told))
    for prompt in (prompt_of(sample), DENSE.prompt(sample, [sample] * shots), bare(question)):
        spans = [(start, start + length) for start, length in covers]
        expected = {}
        for token, span in enumerate(spans):
            for region in regions_of(prompt, *span):
                expected.setdefault(region, []).append(token)
        assert tokens_of(prompt, spans) == expected


def test_of_parts_that_have_as_much_of_a_token_the_one_named_first_has_it():
    made = Template("x", {"prompt": "a{passages}{question}bc", "passage": "{text}"})
    prompt = made.prompt(Sample("x", "yz", (), (Passage("", "x"),)))
    assert prompt.text == "axyzbc"
    assert tokens_of(prompt, [(1, 6), (2, 6), (1, 4), (0, 2)]) == {"template": [0, 3], "question": [1, 2]}


def test_tokens_of_a_hundred_passages_are_found_at_once():
    prompt = prompt_of(Sample("x", "Who?", (), (Passage("", "ten letter" * 10),) * 100))
    began = time.perf_counter()
    tokens_of(prompt, [(at, at + 1) for at in range(len(prompt.text))])
    assert time.perf_counter() - began < 2  # 11,000 tokens


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
