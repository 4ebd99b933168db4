"""Passages and questions as the world has them: mistyped, badly scanned, cut off, twice, in boilerplate, out of date.

dirty(source, transforms="typos", levels=(0, 0.1))     # typos-0, typos-0.1

A level is the chance that a character (typos), a place that can be misread (ocr) or a passage (all others) is hit; at 0
nothing is. The evidence, and in gold passages the answers, are not touched. Titles are not either.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.stress.asked import PASSAGE
from floatscope.tasks.stress.draw import Source, has_wrong
from floatscope.tasks.stress.passages import (
    ANSWERING,
    Edit,
    answering,
    counterfactual,
    edited,
    guarded,
    occurrences,
    piece,
    rewritten,
    scattered,
    told_answers,
    with_passages,
)
from floatscope.tasks.stress.point import Choice, Need, Number, Point, able, chosen, dice, numbers

ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
MISREAD = {
    "rn": ("m",),
    "m": ("rn",),
    "l": ("1", "I"),
    "1": ("l", "I"),
    "I": ("l", "1"),
    "O": ("0",),
    "0": ("O",),
    " ": ("\n",),
}
CONFUSED = re.compile(r"rn|[ml1IO0 ]|(?<=\w)-(?=\w)")
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
OLD, NEW = range(2003, 2015), range(2018, 2025)
_TOLD = replace(ANSWERING, help=f"{ANSWERING.help}, or leave stale out of `transforms`")
_PASSAGE = replace(PASSAGE, help='give "passages", or take what hits the question: transforms="typos-question"')
GRADES, SWITCH = (0, 0.05, 0.1, 0.2), (0, 1)

Dice = Callable[[object], Random]
Make = Callable[[Source, Sample, Number, Dice], Sample]


@dataclass(frozen=True)
class Transform:
    about: str
    make: Make
    levels: tuple[Number, ...]
    needs: tuple[Need, ...] = (_PASSAGE,)


def dirty(
    source: Source,
    *,
    transforms: Choice = None,
    levels: Choice = None,
) -> list[Point]:
    """Each transform at each of its levels."""
    names = chosen("transform", transforms, TRANSFORMS)
    given = None if levels is None else numbers("levels", levels, least=0, most=1)
    needs = dict.fromkeys(need for name in names for need in TRANSFORMS[name].needs)
    wrong = [has_wrong(source, "dirty stale")] if "stale" in names else []
    samples = able("dirty", source.samples, [*needs, *wrong])
    return [
        Point(
            f"{name}-{level:g}",
            level,
            tuple(_hit(source, sample, name, level) for sample in samples),
            series=name,
            note=TRANSFORMS[name].about,
        )
        for name in names
        for level in given or TRANSFORMS[name].levels
    ]


def _hit(source: Source, sample: Sample, name: str, level: Number) -> Sample:
    if level == 0:
        return sample
    return TRANSFORMS[name].make(source, sample, level, lambda of: dice(source.seed, "dirty", name, sample.id, of))


def neighbours(letter: str) -> str:
    """The keys beside a letter's on a keyboard, in its case."""
    for number, row in enumerate(ROWS):
        at = row.find(letter.lower())
        if at >= 0:
            above = ROWS[number - 1][at : at + 2] if number else ""  # each row stands half a key to the right
            below = ROWS[number + 1][max(0, at - 1) : at + 1] if number + 1 < len(ROWS) else ""
            near = row[at - 1 : at] + row[at + 1 : at + 2] + above + below
            return near.upper() if letter.isupper() else near
    return ""


def typos(text: str, kept: set[int], level: Number, rolls: Random) -> list[Edit]:
    """Letters taken for a neighbour, swapped with the next or dropped; the last of a word is never dropped."""
    edits: list[Edit] = []
    free = 0
    for at, letter in enumerate(text):
        roll = rolls.random()
        if roll >= level or at < free or at in kept or not letter.isalpha():
            continue
        which, bits = divmod(int(roll * 2**53), 3)[::-1]
        follower = text[at + 1 : at + 2]
        near = neighbours(letter)
        if which == 1 and follower.isalpha() and follower != letter and at + 1 not in kept:
            edits.append((at, at + 2, follower + letter))
            free = at + 2
        elif which == 2 and follower.isalpha():
            edits.append((at, at + 1, ""))
        elif near:
            edits.append((at, at + 1, near[bits % len(near)]))
    return edits


def misread(text: str, kept: set[int], level: Number, rolls: Random) -> list[Edit]:
    """Characters taken for others of their shape, spaces for line breaks, and long words broken at a hyphen."""
    edits: list[Edit] = []
    for found in CONFUSED.finditer(text):
        roll, (start, stop) = rolls.random(), found.span()
        if roll < level and kept.isdisjoint(range(start, stop)):
            options = MISREAD.get(found[0], ("-\n", ""))
            edits.append((start, stop, options[int(roll * 2**53) % len(options)]))
    inside = {at for start, stop, _ in edits for at in range(start + 1, stop)} | kept
    for found in LONG_WORD.finditer(text):
        roll, at = rolls.random(), rolls.randrange(found.start() + 2, found.end() - 1)
        if roll < level and at not in inside:
            edits.append((at, at, "-\n"))
    return edits


Damage = Callable[[str, set[int], Number, Random], list[Edit]]


def _in_passages(damage: Damage) -> Make:
    def make(source: Source, sample: Sample, level: Number, rolls: Dice) -> Sample:
        told = (
            rewritten(passage, damage(passage.text, guarded(passage, sample.answers), level, rolls(place)))
            for place, passage in enumerate(sample.passages)
        )
        return replace(sample, passages=tuple(told))

    return make


def _in_question(damage: Damage) -> Make:
    def make(source: Source, sample: Sample, level: Number, rolls: Dice) -> Sample:
        edits = damage(sample.question, set(), level, rolls("question"))
        return replace(sample, question=edited(sample.question, edits))

    return make


def _some_passages(change: Callable[[Passage, Sample, Random], Passage]) -> Make:
    def make(source: Source, sample: Sample, level: Number, rolls: Dice) -> Sample:
        told = (
            change(passage, sample, rolls(place)) if rolls((place, "hit")).random() < level else passage
            for place, passage in enumerate(sample.passages)
        )
        return replace(sample, passages=tuple(told))

    return make


def _cut(passage: Passage, sample: Sample, rolls: Random) -> Passage:
    """Its beginning: a word at least, the evidence whole; a gold passage of which nobody knows what answers stays."""
    spans = list(passage.evidence) or (told_answers(passage, sample.answers)[:1] if passage.gold else [])
    if passage.gold and not spans:
        return passage
    first = re.search(r"\S+", passage.text)
    least = max([stop for _, stop in spans], default=first.end() if first else len(passage.text))
    return piece(passage, 0, rolls.randint(least, max(least, len(passage.text) - 1)))


def _duplicated(source: Source, sample: Sample, level: Number, rolls: Dice) -> Sample:
    twice = [passage for place, passage in enumerate(sample.passages) if rolls((place, "hit")).random() < level]
    return with_passages(sample, scattered(sample.passages, twice, rolls("places")))


def _wrapped(passage: Passage, sample: Sample, rolls: Random) -> Passage:
    """With one or two lines above and below; none that has an answer in it."""
    fit = [[line for line in lines if not occurrences(line, sample.answers)] for lines in (ABOVE, BELOW)]
    above, below = (rolls.sample(lines, min(len(lines), rolls.randint(1, 2))) for lines in fit)
    end, before, after = len(passage.text), "".join(f"{a}\n" for a in above), "".join(f"\n{b}" for b in below)
    return rewritten(passage, [(0, 0, before), (end, end, after)])


def _stale(source: Source, sample: Sample, level: Number, rolls: Dice) -> Sample:
    """Beside the passage that answers its older version, both with their year."""
    told, now = list(sample.passages), answering(sample)[0]
    if rolls("hit").random() >= level:
        return sample
    (value,), years = source.wrong("dirty stale", sample, 1), rolls("years")
    then, since = (years.choice([year for year in some if str(year) not in sample.answers]) for some in (OLD, NEW))
    newer = rewritten(now, [(0, 0, _dated(since))])
    older = rewritten(counterfactual(now, sample.answers, value), [(0, 0, _dated(then))])
    at = told.index(now)
    told[at : at + 1] = [older, newer] if years.random() < 0.5 else [newer, older]
    return with_passages(sample, told)


def _dated(year: int) -> str:
    return f"Last updated in {year}. "


TRANSFORMS = {
    "typos": Transform("letters of the passages mistyped", _in_passages(typos), GRADES),
    "typos-question": Transform("letters of the question mistyped", _in_question(typos), GRADES, ()),
    "ocr": Transform("passages badly scanned", _in_passages(misread), GRADES),
    "ocr-question": Transform("the question badly scanned", _in_question(misread), GRADES, ()),
    "truncated": Transform("passages cut off at any place after their evidence", _some_passages(_cut), SWITCH),
    "duplicated": Transform(
        "passages given twice, the second time anywhere, gold if the first is", _duplicated, SWITCH
    ),
    "boilerplate": Transform("passages between lines of a web page", _some_passages(_wrapped), SWITCH),
    "stale": Transform("an older version of the gold passage beside it, with another value", _stale, SWITCH, (_TOLD,)),
}
