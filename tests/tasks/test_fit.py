"""Prompts that are too long lose whole shots and passages; the question stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatscope.errors import UserError
from floatscope.tasks.fit import fit_sample
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.template import load_template

SHOT = Sample("s", "Who keeps a cow?", ("Jon",))


def make_sample(*gold):
    entries = (Passage("", f"Passage number {number} says little.", is_gold) for number, is_gold in enumerate(gold, 1))
    return Sample("a", "Where does Mira live?", ("Velmora",), tuple(entries))


def words(sample, shots):
    return len(load_template().prompt(sample, shots).text.split())


def numbers(fitted):
    return [int(passage.text.split()[2]) for passage in fitted.sample.passages]


def test_a_prompt_that_fits_is_unchanged_and_measured_once():
    calls = []
    sample, shots = make_sample(False, True), [SHOT]
    fitted = fit_sample(sample, shots, 100, lambda *given: calls.append(given) or 100)
    assert fitted.sample is sample
    assert (fitted.shots, fitted.dropped, len(calls)) == (shots, 0, 1)


def test_shots_are_dropped_first_and_gold_passages_last():
    sample, left = make_sample(True, False, True, False), []
    for drops in range(7):
        fitted = fit_sample(sample, [SHOT] * 2, 6 - drops, lambda sample, shots: len(shots) + len(sample.passages))
        left.append((len(fitted.shots), numbers(fitted)))
        assert fitted.dropped == drops
        assert (fitted.sample.question, fitted.sample.answers) == (sample.question, sample.answers)
    assert left == [
        (2, [1, 2, 3, 4]),
        (1, [1, 2, 3, 4]),
        (0, [1, 2, 3, 4]),
        (0, [1, 2, 3]),
        (0, [1, 3]),
        (0, [1]),
        (0, []),
    ]


@pytest.mark.parametrize(
    ("sample", "shots", "without"),
    [
        (make_sample(), [], ""),
        (make_sample(True), [], " without shots and passages"),
        (make_sample(), [SHOT], " without shots and passages"),
    ],
)
def test_a_question_that_does_not_fit_is_an_error_with_its_id(sample, shots, without):
    alone = words(make_sample(), [])
    assert fit_sample(sample, shots, alone, words).dropped == len(shots) + len(sample.passages)
    with pytest.raises(UserError) as error:
        fit_sample(sample, shots, alone - 1, words)
    assert str(error.value) == (
        f"the prompt of sample 'a' has {alone} tokens{without}, and there is room for {alone - 1}: shorten the question"
        " or the template, or request fewer new tokens"
    )


def drop_one_by_one(sample, shots, room, length):
    """Return the (passages, shots) that remain after single drops."""
    passages, shots = list(sample.passages), list(shots)
    while length(Sample("a", sample.question, (), tuple(passages)), shots) > room:
        if shots:
            shots.pop()
        elif passages:
            plain = [at for at, passage in enumerate(passages) if not passage.gold]
            passages.pop(plain[-1] if plain else -1)
        else:
            return None
    return passages, shots


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), st.integers(0, 3), st.integers(0, 160))
def test_bisection_matches_dropping_one_by_one(entries, shots, room):
    sample = Sample("a", "Who?", (), tuple(Passage("", "word " * size, gold) for size, gold in entries))
    for name in ("default", "af-llada"):  # the latter may be longer when the last passage is gone

        def length(sample, shots, name=name):
            return len(load_template(name).prompt(sample, shots).text.split())

        expected = drop_one_by_one(sample, [SHOT] * shots, room, length)
        if expected is None:
            with pytest.raises(UserError, match="there is room for"):
                fit_sample(sample, [SHOT] * shots, room, length)
        else:
            fitted = fit_sample(sample, [SHOT] * shots, room, length)
            assert (list(fitted.sample.passages), fitted.shots) == expected
            assert length(fitted.sample, fitted.shots) <= room
            assert fitted.dropped == len(entries) - len(expected[0]) + shots - len(expected[1])


def test_a_hundred_passages_are_measured_a_few_times():
    calls = []

    def length(sample, shots):
        calls.append(len(sample.passages))
        return words(sample, shots)

    fitted = fit_sample(make_sample(*[number == 70 for number in range(100)]), [], 150, length)
    assert 71 in numbers(fitted)
    assert words(fitted.sample, []) <= 150 < words(fitted.sample, []) + 7
    assert len(calls) <= 8
