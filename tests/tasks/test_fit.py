"""Prompts that are too long lose shots and passages, whole; what is asked stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatscope.errors import UserError
from floatscope.tasks.fit import fit
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.template import template

SHOT = Sample("s", "Who keeps a cow?", ("Jon",))


def asked(*gold):
    told = (Passage("", f"Passage number {number} says little.", is_gold) for number, is_gold in enumerate(gold, 1))
    return Sample("a", "Where does Mira live?", ("Velmora",), tuple(told))


def words(sample, shots):
    return len(template().prompt(sample, shots).text.split())


def numbers(fitted):
    return [int(passage.text.split()[2]) for passage in fitted.sample.passages]


def test_what_fits_is_left_alone_and_measured_once():
    seen = []
    sample, shots = asked(False, True), [SHOT]
    fitted = fit(sample, shots, 100, lambda *given: seen.append(given) or 100)
    assert fitted.sample is sample
    assert (fitted.shots, fitted.dropped, len(seen)) == (shots, 0, 1)


def test_shots_go_first_then_passages_from_the_last_and_gold_ones_at_the_end():
    sample, left = asked(True, False, True, False), []
    for drops in range(7):
        fitted = fit(sample, [SHOT] * 2, 6 - drops, lambda sample, shots: len(shots) + len(sample.passages))
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
        (asked(), [], ""),
        (asked(True), [], " without shots and passages"),
        (asked(), [SHOT], " without shots and passages"),
    ],
)
def test_a_question_that_does_not_fit_is_refused_by_name(sample, shots, without):
    alone = words(asked(), [])
    assert fit(sample, shots, alone, words).dropped == len(shots) + len(sample.passages)
    with pytest.raises(UserError) as error:
        fit(sample, shots, alone - 1, words)
    assert str(error.value) == (
        f"the prompt of sample 'a' has {alone} tokens{without}, and there is room for {alone - 1}: shorten the question"
        " or the template, or ask for fewer new tokens"
    )


def slow(sample, shots, room, length):
    """(passages, shots) that are left, one drop at a time."""
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
def test_halving_finds_what_dropping_one_by_one_finds(told, shots, room):
    sample = Sample("a", "Who?", (), tuple(Passage("", "word " * size, gold) for size, gold in told))
    for name in ("default", "af-llada"):  # the latter may be longer when the last passage is gone

        def length(sample, shots, name=name):
            return len(template(name).prompt(sample, shots).text.split())

        expected = slow(sample, [SHOT] * shots, room, length)
        if expected is None:
            with pytest.raises(UserError, match="there is room for"):
                fit(sample, [SHOT] * shots, room, length)
        else:
            fitted = fit(sample, [SHOT] * shots, room, length)
            assert (list(fitted.sample.passages), fitted.shots) == expected
            assert length(fitted.sample, fitted.shots) <= room
            assert fitted.dropped == len(told) - len(expected[0]) + shots - len(expected[1])


def test_a_hundred_passages_are_measured_a_few_times():
    seen = []

    def length(sample, shots):
        seen.append(len(sample.passages))
        return words(sample, shots)

    fitted = fit(asked(*[number == 70 for number in range(100)]), [], 150, length)
    assert 71 in numbers(fitted)
    assert words(fitted.sample, []) <= 150 < words(fitted.sample, []) + 7
    assert len(seen) <= 8
