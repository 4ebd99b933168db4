"""Question rows: the passages contain the answer and no other one."""

from __future__ import annotations

import json
from random import Random

import pytest

from floatscope.errors import UserError
from floatscope.lab.adapt import examples
from floatscope.lab.adapt.corpus import Corpus, TrainingFiles, find_gaps, prepare_corpus
from floatscope.lab.adapt.recipe import Recipe
from floatscope.models.loader import load
from floatscope.tasks.sample import Passage, Sample

BASE = "twin:arm"


def make_sample(question: str, answer: str, text: str) -> Sample:
    return Sample("", question, (answer,), (Passage("", text, gold=True),))


def test_only_complete_words_are_swapped():
    sample = make_sample("How old was she?", "5", "She was 5 in 1956, and 15 in 1966.")
    assert examples.swap_answer(sample, "7").passages[0].text == "She was 7 in 1956, and 15 in 1966."
    unknown = make_sample("Which art?", "art", "It was a party.")
    assert examples.swap_answer(unknown, "Oslo") is unknown


@pytest.mark.parametrize("answer", ["no", "Yes"])
def test_yes_and_no_are_not_swapped(answer):
    sample = make_sample("Are both old?", answer, f"There is {answer} doubt.")
    assert examples.swap_answer(sample, "Oslo") is sample
    assert examples.answer_shape(answer) != examples.answer_shape("Oslo")


@pytest.fixture(scope="module")
def maker(tmp_path_factory, small) -> examples.BatchMaker:
    """Return a maker with three data questions and a text without gaps."""
    folder = tmp_path_factory.mktemp("examples")
    towns = {"Ann": "Paris", "Bob": "Rome", "Cid": "Oslo"}
    lines = [
        {
            "id": name,
            "question": f"Where does {name} live?",
            "answers": [town],
            "passages": [{"title": "", "text": f"{name}\u2028lives in {town}.", "gold": True}],
        }
        for name, town in towns.items()
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    (folder / "text.txt").write_text("\n".join(["the river runs on and on, and nobody knows where to. " * 5] * 60))
    corpus = prepare_corpus(
        folder / "corpus", load(BASE), TrainingFiles([folder / "text.txt"], [folder / "data.jsonl"])
    )
    return examples.BatchMaker(corpus, Recipe(tokens=1024))


def test_text_without_names_has_no_gap_questions(maker):
    assert maker.corpus.facts.paragraphs == 0
    assert maker(0).tokens.shape[0] >= 1


def test_questions_may_contain_other_line_breaks(maker):
    assert [sample.answers for sample in maker._samples] == [("Paris",), ("Rome",), ("Oslo",)]


def test_swapped_answer_is_the_only_one_and_closed_book_questions_are_not_swapped(maker, monkeypatch):
    monkeypatch.setattr(examples, "SHARES", {"data": 1.0})
    monkeypatch.setattr(examples, "SWAP_RATE", 1.0)
    monkeypatch.setattr(examples, "CLOSED_BOOK_RATE", 0.3)
    tokenizer = maker.corpus.question_format().tokenizer
    closed_book = 0
    for seed in range(60):
        prompt, answer = (tokenizer.decode(ids) for ids in maker._make_question(Random(seed), 512))
        name = next(n for n in ("Ann", "Bob", "Cid") if f"Where does {n}" in prompt)
        if "lives in" in prompt:
            assert prompt.count(f"{name}\u2028lives in") == 1
            assert f"{name}\u2028lives in {answer.strip()}." in prompt
        else:
            assert answer.strip() == {"Ann": "Paris", "Bob": "Rome", "Cid": "Oslo"}[name]
            closed_book += 1
    assert 5 < closed_book < 40


def test_gaps_are_names_and_numbers_inside_sentences():
    paragraph = "The town is old. In May the river at Oslo froze in 1740, they say. No."
    assert find_gaps(paragraph) == [("In May the river at Oslo froze in 1740, they say.", ["May", "Oslo", "1740"])]


@pytest.mark.parametrize("content", ["", "nothing"])
def test_missing_or_damaged_corpus_file_is_a_user_error(tmp_path, content):
    if content:
        (tmp_path / "text.npy").write_text(content)
    with pytest.raises(UserError, match=r"text.npy is missing or damaged; remove .* and run the same command again"):
        Corpus(tmp_path, {}).ids()
