"""What a lesson says is so: its answer stands in its passages, and nothing there tells another."""

from __future__ import annotations

import json
from random import Random

import pytest

from floatscope.errors import UserError
from floatscope.lab.adapt import lessons
from floatscope.lab.adapt.gaps import gaps
from floatscope.lab.adapt.material import Given, Material, prepare
from floatscope.lab.adapt.recipe import Recipe
from floatscope.models.load import load
from floatscope.tasks.sample import Passage, Sample

BASE = "twin:arm"


def asked(question: str, answer: str, text: str) -> Sample:
    return Sample("", question, (answer,), (Passage("", text, gold=True),))


def test_only_whole_words_are_put_into_passages():
    sample = asked("How old was she?", "5", "She was 5 in 1956, and 15 in 1966.")
    assert lessons.swapped(sample, "7").passages[0].text == "She was 7 in 1956, and 15 in 1966."
    unknown = asked("Which art?", "art", "It was a party.")
    assert lessons.swapped(unknown, "Oslo") is unknown


@pytest.mark.parametrize("answer", ["no", "Yes"])
def test_yes_and_no_are_neither_taken_out_nor_put_in(answer):
    sample = asked("Are both old?", answer, f"There is {answer} doubt.")
    assert lessons.swapped(sample, "Oslo") is sample
    assert lessons.shape(answer) != lessons.shape("Oslo")


@pytest.fixture(scope="module")
def maker(tmp_path_factory, small) -> lessons.Maker:
    """Three questions of data, and a text without anything to take out."""
    folder = tmp_path_factory.mktemp("lessons")
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
    material = prepare(folder / "material", load(BASE), Given([folder / "text.txt"], [folder / "data.jsonl"]))
    return lessons.Maker(material, Recipe(tokens=1024))


def test_a_text_without_names_has_no_gaps_to_ask_for(maker):
    assert maker.material.facts["paragraphs"] == 0
    assert maker(0).tokens.shape[0] >= 1


def test_lines_of_questions_may_hold_other_line_breaks(maker):
    assert [sample.answers for sample in maker._samples] == [("Paris",), ("Rome",), ("Oslo",)]


def test_a_question_without_passages_has_its_own_answer_and_one_with_them_a_single_one(maker, monkeypatch):
    monkeypatch.setattr(lessons, "SHARES", {"data": 1.0})
    monkeypatch.setattr(lessons, "SWAPPED", 1.0)
    monkeypatch.setattr(lessons, "CLOSED", 0.3)
    text = maker.material.source().text
    closed = 0
    for seed in range(60):
        prompt, answer = (text.decode(ids) for ids in maker._lesson(Random(seed), 512))
        name = next(n for n in ("Ann", "Bob", "Cid") if f"Where does {n}" in prompt)
        if "lives in" in prompt:
            assert prompt.count(f"{name}\u2028lives in") == 1
            assert f"{name}\u2028lives in {answer.strip()}." in prompt
        else:
            assert answer.strip() == {"Ann": "Paris", "Bob": "Rome", "Cid": "Oslo"}[name]
            closed += 1
    assert 5 < closed < 40


def test_gaps_are_names_and_numbers_inside_sentences():
    told = "The town is old. In May the river at Oslo froze in 1740, they say. No."
    assert gaps(told) == [("In May the river at Oslo froze in 1740, they say.", ["May", "Oslo", "1740"])]


@pytest.mark.parametrize("broken", ["", "nothing"])
def test_a_lost_or_broken_file_of_the_material_is_one_sentence(tmp_path, broken):
    if broken:
        (tmp_path / "text.npy").write_text(broken)
    with pytest.raises(UserError, match=r"text.npy is missing or damaged; remove .* and run the same command again"):
        Material(tmp_path, {}).ids()
