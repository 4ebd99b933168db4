"""The dirty sweep: passages and questions with typos, OCR errors, cuts, copies, boilerplate or stale versions.

sweep_dirty(pool, transforms="typos", levels=(0, 0.1))     # typos-0, typos-0.1

A level is the probability that a character (typos), a place that can be misread (ocr) or a passage (all others) is
changed; at level 0 nothing changes. Evidence, answers in gold passages, and titles never change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.stress.dates import add_date, draw_years
from floatscope.tasks.stress.options import Number, OptionValue, parse_names, parse_numbers
from floatscope.tasks.stress.passage_edits import (
    HAS_ANSWERING,
    Edit,
    cut_passage,
    edit_passage,
    edit_text,
    find_answers,
    find_protected,
    find_stated_answers,
    get_answering,
    insert_randomly,
    make_counterfactual,
    replace_passages,
)
from floatscope.tasks.stress.point import Point
from floatscope.tasks.stress.requirements import HAS_PASSAGE, Requirement, select_samples
from floatscope.tasks.stress.sample_pool import SamplePool, has_wrong_answer, make_rng

KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
OCR_CONFUSIONS = {
    "rn": ("m",),
    "m": ("rn",),
    "l": ("1", "I"),
    "1": ("l", "I"),
    "I": ("l", "1"),
    "O": ("0",),
    "0": ("O",),
    " ": ("\n",),
}
MISREADABLE = re.compile(r"rn|[ml1IO0 ]|(?<=\w)-(?=\w)")
LONG_WORD = re.compile(r"[^\W\d_]{6,}")
ABOVE = (
    "Home | News | About us | Contact | Log in",
    "We use cookies to improve your visit. Accept all | Settings",
    "Skip to main content",
    "Menu | Search | Subscribe",
    "You are reading one of your 3 free articles this month.",
)
BELOW = (
    "Share this page: Facebook | Twitter | E-mail",
    "All rights reserved. Terms of use | Privacy policy",
    "Sign up for our newsletter and never miss a story.",
    "Read more | Related articles | Back to top",
    "Was this page helpful? Yes | No",
)
_HAS_ANSWERING = replace(HAS_ANSWERING, remedy=f"{HAS_ANSWERING.remedy}, or leave stale out of `transforms`")
_HAS_PASSAGE = replace(
    HAS_PASSAGE, remedy='give "passages", or choose a transform of the question: transforms="typos-question"'
)
GRADED_LEVELS, ON_OFF_LEVELS = (0, 0.05, 0.1, 0.2), (0, 1)

RngFactory = Callable[[object], Random]
"""A key → the random generator for it, independent of all other keys."""

Change = Callable[[SamplePool, Sample, Number, RngFactory], Sample]
Corruption = Callable[[str, set[int], Number, Random], list[Edit]]
"""(text, protected characters, level, rng) → edits."""


@dataclass(frozen=True)
class Transform:
    """A way to change samples, with its default levels and what a sample needs for it."""

    description: str
    change: Change
    levels: tuple[Number, ...]
    requirements: tuple[Requirement, ...] = (_HAS_PASSAGE,)


def sweep_dirty(
    pool: SamplePool,
    *,
    transforms: OptionValue = None,
    levels: OptionValue = None,
) -> list[Point]:
    """Apply each transform at each of its levels."""
    names = parse_names("transform", transforms, TRANSFORMS)
    given_levels = None if levels is None else parse_numbers("levels", levels, minimum=0, maximum=1)
    requirements = dict.fromkeys(r for name in names for r in TRANSFORMS[name].requirements)
    wrong = [has_wrong_answer(pool, "dirty stale")] if "stale" in names else []
    samples = select_samples("dirty", pool.samples, [*requirements, *wrong])
    return [
        Point(
            f"{name}-{level:g}",
            level,
            tuple(_apply(pool, sample, name, level) for sample in samples),
            series=name,
            note=TRANSFORMS[name].description,
        )
        for name in names
        for level in given_levels or TRANSFORMS[name].levels
    ]


def _apply(pool: SamplePool, sample: Sample, name: str, level: Number) -> Sample:
    if level == 0:
        return sample
    return TRANSFORMS[name].change(pool, sample, level, lambda key: make_rng(pool.seed, "dirty", name, sample.id, key))


def find_neighbour_keys(letter: str) -> str:
    """Return the letters around a letter on a keyboard, in its case."""
    for number, row in enumerate(KEYBOARD):
        at = row.find(letter.lower())
        if at >= 0:
            above = KEYBOARD[number - 1][at : at + 2] if number else ""  # each row is half a key further to the right
            below = KEYBOARD[number + 1][max(0, at - 1) : at + 1] if number + 1 < len(KEYBOARD) else ""
            near = row[at - 1 : at] + row[at + 1 : at + 2] + above + below
            return near.upper() if letter.isupper() else near
    return ""


def make_typos(text: str, protected: set[int], level: Number, rng: Random) -> list[Edit]:
    """Replace letters by a neighbour, swap them with the next, or drop them; the last of a word is never dropped."""
    edits: list[Edit] = []
    free = 0
    for at, letter in enumerate(text):
        roll = rng.random()
        if roll >= level or at < free or at in protected or not letter.isalpha():
            continue
        choice, bits = divmod(int(roll * 2**53), 3)[::-1]
        follower = text[at + 1 : at + 2]
        near = find_neighbour_keys(letter)
        if choice == 1 and follower.isalpha() and follower != letter and at + 1 not in protected:
            edits.append((at, at + 2, follower + letter))
            free = at + 2
        elif choice == 2 and follower.isalpha():
            edits.append((at, at + 1, ""))
        elif near:
            edits.append((at, at + 1, near[bits % len(near)]))
    return edits


def make_ocr_errors(text: str, protected: set[int], level: Number, rng: Random) -> list[Edit]:
    """Replace characters by others of similar shape and spaces by line breaks, and hyphenate long words."""
    edits: list[Edit] = []
    for match in MISREADABLE.finditer(text):
        roll, (start, stop) = rng.random(), match.span()
        if roll < level and protected.isdisjoint(range(start, stop)):
            options = OCR_CONFUSIONS.get(match[0], ("-\n", ""))
            edits.append((start, stop, options[int(roll * 2**53) % len(options)]))
    blocked = {at for start, stop, _ in edits for at in range(start + 1, stop)} | protected
    for match in LONG_WORD.finditer(text):
        roll, at = rng.random(), rng.randrange(match.start() + 2, match.end() - 1)
        if roll < level and at not in blocked:
            edits.append((at, at, "-\n"))
    return edits


def _corrupt_passages(corruption: Corruption) -> Change:
    def change(pool: SamplePool, sample: Sample, level: Number, rng_for: RngFactory) -> Sample:
        passages = (
            edit_passage(p, corruption(p.text, find_protected(p, sample.answers), level, rng_for(place)))
            for place, p in enumerate(sample.passages)
        )
        return replace(sample, passages=tuple(passages))

    return change


def _corrupt_question(corruption: Corruption) -> Change:
    def change(pool: SamplePool, sample: Sample, level: Number, rng_for: RngFactory) -> Sample:
        edits = corruption(sample.question, set(), level, rng_for("question"))
        return replace(sample, question=edit_text(sample.question, edits))

    return change


def _change_random_passages(change_passage: Callable[[Passage, Sample, Random], Passage]) -> Change:
    def change(pool: SamplePool, sample: Sample, level: Number, rng_for: RngFactory) -> Sample:
        passages = (
            change_passage(passage, sample, rng_for(place)) if rng_for((place, "hit")).random() < level else passage
            for place, passage in enumerate(sample.passages)
        )
        return replace(sample, passages=tuple(passages))

    return change


def _truncate(passage: Passage, sample: Sample, rng: Random) -> Passage:
    """Cut off the end: at least one word and all evidence stay; a gold passage whose answer is unknown is not cut."""
    spans = list(passage.evidence) or (find_stated_answers(passage, sample.answers)[:1] if passage.gold else [])
    if passage.gold and not spans:
        return passage
    first_word = re.search(r"\S+", passage.text)
    shortest = max([stop for _, stop in spans], default=first_word.end() if first_word else len(passage.text))
    return cut_passage(passage, 0, rng.randint(shortest, max(shortest, len(passage.text) - 1)))


def _duplicate(pool: SamplePool, sample: Sample, level: Number, rng_for: RngFactory) -> Sample:
    copies = [passage for place, passage in enumerate(sample.passages) if rng_for((place, "hit")).random() < level]
    return replace_passages(sample, insert_randomly(sample.passages, copies, rng_for("places")))


def _add_boilerplate(passage: Passage, sample: Sample, rng: Random) -> Passage:
    """Add one or two lines above and below; none of them contains an answer."""
    usable = [[line for line in lines if not find_answers(line, sample.answers)] for lines in (ABOVE, BELOW)]
    above, below = (rng.sample(lines, min(len(lines), rng.randint(1, 2))) for lines in usable)
    end, before, after = len(passage.text), "".join(f"{a}\n" for a in above), "".join(f"\n{b}" for b in below)
    return edit_passage(passage, [(0, 0, before), (end, end, after)])


def _add_stale(pool: SamplePool, sample: Sample, level: Number, rng_for: RngFactory) -> Sample:
    """Put an older version, with another value, beside the passage that answers; both state their year."""
    passages, answering = list(sample.passages), get_answering(sample)[0]
    if rng_for("hit").random() >= level:
        return sample
    (value,), rng = pool.draw_wrong_answers("dirty stale", sample, 1), rng_for("years")
    new_year, (old_year,) = draw_years(rng, 1, without=sample.answers)
    newer = add_date(answering, new_year)
    older = add_date(make_counterfactual(answering, sample.answers, value), old_year)
    at = passages.index(answering)
    passages[at : at + 1] = [older, newer] if rng.random() < 0.5 else [newer, older]
    return replace_passages(sample, passages)


TRANSFORMS = {
    "typos": Transform("typos in the passages", _corrupt_passages(make_typos), GRADED_LEVELS),
    "typos-question": Transform("typos in the question", _corrupt_question(make_typos), GRADED_LEVELS, ()),
    "ocr": Transform("OCR errors in the passages", _corrupt_passages(make_ocr_errors), GRADED_LEVELS),
    "ocr-question": Transform("OCR errors in the question", _corrupt_question(make_ocr_errors), GRADED_LEVELS, ()),
    "truncated": Transform(
        "passages cut off at a random place after their evidence", _change_random_passages(_truncate), ON_OFF_LEVELS
    ),
    "duplicated": Transform(
        "passages given twice, the copy at a random position, gold if the first is", _duplicate, ON_OFF_LEVELS
    ),
    "boilerplate": Transform(
        "passages between lines of a web page", _change_random_passages(_add_boilerplate), ON_OFF_LEVELS
    ),
    "stale": Transform(
        "an older version of the gold passage beside it, with another value",
        _add_stale,
        ON_OFF_LEVELS,
        (_HAS_ANSWERING,),
    ),
}
