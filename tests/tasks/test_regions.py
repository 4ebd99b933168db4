"""Regions of a prompt: their characters and their tokens."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatscope.tasks.regions import Prompt, find_region_tokens
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.template import Template, load_template

MIRA = Passage("Mira", "Mira lives in Velmora.", True, ((14, 21),))
JON = Passage("Jon", "Jon keeps a cow.")
SAMPLE = Sample("a", "Where does Mira live?", ("Velmora",), (JON, MIRA))


def region_texts(prompt, region):
    return [prompt.text[a:b] for a, b in prompt.spans[region]]


def test_passages_come_before_the_question():
    prompt = load_template().prompt(SAMPLE)
    assert prompt.text == (
        "Document 1: Jon keeps a cow.\nDocument 2: Mira lives in Velmora.\nQuestion: Where does Mira live?\nAnswer:"
    )
    assert region_texts(prompt, "document 1") == [JON.text]
    assert region_texts(prompt, "document 2") == region_texts(prompt, "gold") == [MIRA.text]
    assert region_texts(prompt, "evidence") == ["Velmora"]
    assert region_texts(prompt, "question") == [SAMPLE.question]
    assert "|".join(region_texts(prompt, "template")) == "Document 1: |\n|Document 2: |\n|Question: |\n|Answer:"


def test_the_question_may_come_first():
    prompt = load_template("question-first").prompt(SAMPLE)
    assert prompt.text == (
        "Question: Where does Mira live?\nDocument 1: Jon keeps a cow.\nDocument 2: Mira lives in Velmora.\nAnswer:"
    )
    assert region_texts(prompt, "evidence") == ["Velmora"]
    assert region_texts(prompt, "question") == [SAMPLE.question]


def test_a_prompt_without_passages_has_only_the_question():
    prompt = load_template().prompt(Sample("a", "Who?", ()))
    assert prompt.text == "Question: Who?\nAnswer:"
    assert set(prompt.spans) == {"question", "template"}


def test_every_character_is_passage_question_or_template():
    for first in (False, True):
        prompt = load_template("question-first" if first else "default").prompt(SAMPLE)
        spans = [s for name, tokens in prompt.spans.items() if name not in ("gold", "evidence") for s in tokens]
        covered = sorted(i for a, b in spans for i in range(a, b))
        assert covered == list(range(len(prompt.text)))


def test_a_plain_text_is_one_region():
    assert Prompt.from_text("What floats?").spans == {"prompt": [(0, 12)]}
    assert find_region_tokens(Prompt.from_text("What floats?"), [(0, 4), (5, 11), (11, 12)]) == {"prompt": [0, 1, 2]}


def test_tokens_of_a_chat_template_are_template():
    offsets = [None, (-6, -2), (-2, 0), (0, 4), (3, 14), (12, 13), None]
    assert find_region_tokens(Prompt.from_text("What floats?"), offsets) == {
        "template": [0, 1, 2, 5, 6],
        "prompt": [3, 4],
    }


def test_a_token_across_a_border_belongs_to_the_larger_part():
    start = load_template().prompt(SAMPLE).text.index("cow.\nDoc")
    offsets = [(start, start + 8), (start + 3, start + 5), (start + 3, start + 6), (start + 4, start + 4), None]
    assert find_region_tokens(load_template().prompt(SAMPLE), offsets) == {"document 1": [0, 1], "template": [2, 3, 4]}


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(st.lists(st.tuples(TEXT, st.booleans(), st.integers(0, 7), st.integers(1, 8)), max_size=4), TEXT, st.booleans())
def test_spans_contain_the_text_of_their_region(entries, question, first):
    passages = [Passage("", text, gold, ((a, b),) if a < b <= len(text) else ()) for text, gold, a, b in entries]
    sample = Sample("x", question, ("y",), tuple(passages))
    prompt = load_template("question-first" if first else "default").prompt(sample)
    for number, passage in enumerate(sample.passages, 1):
        assert region_texts(prompt, f"document {number}") == [passage.text]
    assert region_texts(prompt, "question") == [sample.question]
    gold = [p.text for p in sample.passages if p.gold]
    assert (region_texts(prompt, "gold") if gold else []) == gold
    evidence = [p.text[a:b] for p in sample.passages for a, b in p.evidence]
    assert (region_texts(prompt, "evidence") if evidence else []) == evidence
    assert ("gold" in prompt.spans, "evidence" in prompt.spans) == (bool(gold), bool(evidence))


def write_training_prompt(sample, question_first):
    """Return the text and spans of the prompt that the twins were trained with; they must not change."""
    entries = [
        part
        for number, passage in enumerate(sample.passages, 1)
        for part in (
            ("template", f"Document {number}: "),
            (f"document {number}", passage.text),
            ("template", "\n"),
        )
    ]
    question = [("template", "Question: "), ("question", sample.question), ("template", "\n")]
    parts = [*question, *entries] if question_first else [*entries, *question]
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


ANY_TEXT = st.text(st.sampled_from("a\n\r {}\u2028é") | st.characters(exclude_categories=["Cs"]), max_size=8)
EVIDENCE = st.lists(st.tuples(st.just(0), st.integers(1, 3)), max_size=2).map(tuple)
ENTRIES = st.lists(st.tuples(ANY_TEXT, ANY_TEXT, st.booleans(), EVIDENCE), max_size=12)


@given(ENTRIES, ANY_TEXT, st.booleans())
def test_the_training_prompt_of_the_twins_has_not_changed(entries, question, first):
    sample = Sample("x", question, (), tuple(Passage(*entry) for entry in entries))
    text, spans = write_training_prompt(sample, first)
    prompt = load_template("question-first" if first else "default").prompt(sample)
    assert prompt.text == text
    assert list(prompt.spans.items()) == list(spans.items())  # their order matters: ties go to the first


def find_regions_slowly(prompt, start, stop):
    """Return the regions of a token by comparing it with all of them."""
    if start < 0 >= stop or start >= len(prompt.text):
        return ["template"]
    last = max(stop, start + 1)

    def shared(name):
        spans = prompt.spans[name]
        return sum(max(0, min(b, last) - max(a, start)) for a, b in spans), any(a <= start < b for a, b in spans)

    part = max((name for name in prompt.spans if name not in ("gold", "evidence")), key=shared)
    tokens = [part, "gold"] if prompt.spans[part][0] in prompt.spans.get("gold", ()) else [part]
    evidence = any(start < b and a < stop for a, b in prompt.spans.get("evidence", ()))
    return [*tokens, "evidence"] if evidence else tokens


SHORT = {
    "prompt": "{question}{shots}a{passages}bc\n{question}",
    "passage": "{title}{number}{text}",
    "shot": "{question}{answer}",
}
DENSE = Template("dense", SHORT)  # parts so short that tokens lie across several


@given(ENTRIES, ANY_TEXT, st.integers(0, 3), st.lists(st.tuples(st.integers(-4, 30), st.integers(0, 9)), max_size=30))
def test_region_tokens_match_a_slow_search(entries, question, shots, offsets):
    sample = Sample("x", question, ("y",), tuple(Passage(*entry) for entry in entries))
    for prompt in (load_template().prompt(sample), DENSE.prompt(sample, [sample] * shots), Prompt.from_text(question)):
        spans = [(start, start + length) for start, length in offsets]
        expected = {}
        for token, span in enumerate(spans):
            for region in find_regions_slowly(prompt, *span):
                expected.setdefault(region, []).append(token)
        assert find_region_tokens(prompt, spans) == expected


def test_ties_go_to_the_first_part():
    template = Template("x", {"prompt": "a{passages}{question}bc", "passage": "{text}"})
    prompt = template.prompt(Sample("x", "yz", (), (Passage("", "x"),)))
    assert prompt.text == "axyzbc"
    assert find_region_tokens(prompt, [(1, 6), (2, 6), (1, 4), (0, 2)]) == {"template": [0, 3], "question": [1, 2]}


def test_a_hundred_passages_are_fast():
    prompt = load_template().prompt(Sample("x", "Who?", (), (Passage("", "ten letter" * 10),) * 100))
    began = time.perf_counter()
    find_region_tokens(prompt, [(at, at + 1) for at in range(len(prompt.text))])
    assert time.perf_counter() - began < 2  # 11,000 tokens


@pytest.mark.parametrize("width", [1, 3])
def test_every_token_is_in_one_part(width):
    prompt = load_template().prompt(SAMPLE)
    offsets = [(i, min(i + width, len(prompt.text))) for i in range(0, len(prompt.text), width)]
    regions = find_region_tokens(prompt, offsets)
    parts = [tokens for region, tokens in regions.items() if region not in ("gold", "evidence")]
    assert sorted(n for tokens in parts for n in tokens) == list(range(len(offsets)))
    for region, tokens in regions.items():
        inside = {i for a, b in prompt.spans[region] for i in range(a, b)}
        shared = [len(inside & set(range(a, b))) for a, b in offsets]
        if region == "evidence":
            assert tokens == [n for n, characters in enumerate(shared) if characters]
        else:
            assert all(2 * shared[n] >= offsets[n][1] - offsets[n][0] for n in tokens)
    documents = [n for i, p in enumerate(SAMPLE.passages, 1) if p.gold for n in regions[f"document {i}"]]
    assert regions["gold"] == documents
