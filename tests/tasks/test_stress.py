"""Sweeps: each point moves what it says and leaves everything else, the evidence above all."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from floatscope.errors import UserError
from floatscope.lab.twins.heldout import read
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.score import normalise
from floatscope.tasks.stress import KINDS, Point, points
from floatscope.tasks.stress.dirty import TRANSFORMS, misread, typos
from floatscope.tasks.stress.draw import Source
from floatscope.tasks.stress.layout import LAYOUTS, hops
from floatscope.tasks.stress.passages import edited, halves, occurrences, rewritten, woven
from floatscope.tasks.stress.point import dice

ANSWERS = ["Velmora", "Triston", "Kobury", "New Haven", "violin", "1901", "12 May", "Quitan Ley", "oak", "Österbro"]
PEOPLE = ["Mira", "Tan Ceberg", "Lola", "Rik Dale", "Ursa", "Benno", "Ira", "Sven Ö"]
FACTS = ["{who} keeps a pony.", "In summer {who} swims well.", "{who} is modern and calm!", "Nobody knows {who}'s age."]
EXAMPLES = settings(max_examples=20)
TWINS = {name: read(name)[:12] for name in ("reading-1", "reading-5", "two-hop", "contradicted", "unanswerable")}


def a_passage(rolls: Random, answer: str | None) -> Passage:
    who = rolls.choice(PEOPLE) + rolls.choice(["", " Ni", " Ro", " Wu"])
    said = [rolls.choice(FACTS).replace("{who}", who) for _ in range(rolls.randint(0, 3))]
    if answer is None:
        return Passage(who, " ".join([f"{who} was born{rolls.choice(['', f' in {rolls.choice(ANSWERS)}'])}.", *said]))
    told = f"{who} lives in {answer}."
    said.insert(rolls.randint(0, len(said)), told)
    text = " ".join(said)
    start = text.index(told) + len(f"{who} lives in ")
    return Passage(who, text, True, rolls.choice([(), ((start, start + len(answer)),)]))


def made_up(seed: int, gold: tuple[int, int], least: int) -> list[Sample]:
    """Samples with some gold passages, at most four others, and any meta."""
    rolls, made = Random(seed), []
    for number in range(rolls.randint(least, 6)):
        answer, count = rolls.choice(ANSWERS), rolls.randint(*gold)
        told = [a_passage(rolls, answer if i == 0 else rolls.choice([answer, "the north"])) for i in range(count)]
        told += [a_passage(rolls, None) for _ in range(rolls.randint(0, 4))]
        rolls.shuffle(told)
        meta: dict[str, object] = rolls.choice([{}, {"relation": "home"}, {"kind": "reading"}])
        if count and rolls.random() < 0.5:
            meta = {**meta, "gold_at": [p.gold for p in told].index(True)}
        made.append(Sample(f"q {number}", "Where does Rik Dale's mom live?", (answer,), tuple(told), meta))
    return made


def some_samples(gold: tuple[int, int] = (0, 3), least: int = 1) -> st.SearchStrategy[tuple[int, tuple[int, int], int]]:
    """What to make them of: beartype rolls dice, which strategies must not."""
    return st.tuples(st.integers(0, 2**32), st.just(gold), st.just(least))


def sweep(kind: str, samples: list[Sample], **options: object) -> list[Point]:
    """The points, or nothing where no sample can take part."""
    try:
        return points(kind, samples, **options)
    except UserError:
        assume(False)
        raise


def evidence(sample: Sample) -> list[str]:
    return [p.text[start:stop] for p in sample.passages for start, stop in p.evidence]


def gold(sample: Sample) -> list[Passage]:
    return [p for p in sample.passages if p.gold]


def rest(sample: Sample) -> list[Passage]:
    return [p for p in sample.passages if not p.gold]


def pairs(point: Point, samples: list[Sample]) -> list[tuple[Sample, Sample]]:
    """Each sample as it was and as it is."""
    before = {sample.id: sample for sample in samples}
    return [(before[sample.id], sample) for sample in point.samples]


def at(made: list[Point], name: str) -> Point:
    return next(point for point in made if point.name == name)


def all_points() -> list[tuple[str, list[Sample], list[Point]]]:
    """Every sweep of the twins' files that there is."""
    found = []
    for samples in TWINS.values():
        for kind in KINDS:
            try:
                found.append((kind, samples, points(kind, samples)))
            except UserError:
                continue
    return found


def check(kind: str, samples: list[Sample], made: list[Point]) -> None:
    """What holds of every sweep."""
    assert len({point.name for point in made}) == len(made)
    ids = [sample.id for sample in made[0].samples]
    assert [sample.id for sample in samples if sample.id in ids] == ids
    for point in made:
        assert re.fullmatch(r"[a-z0-9.-]+", point.name)
        assert [sample.id for sample in point.samples] == ids
        assert point.left_out == len(samples) - len(ids)
        if point.same_as:
            assert at(made, point.same_as).samples == point.samples
        for was, now in pairs(point, samples):
            assert now.answers == was.answers
            assert now.question == was.question or (point.series.endswith("-question") and point.value)
            kept = Counter() if point.name == "closed-book" else Counter(evidence(was))
            twice = kind in ("layout", "dirty") and point.series == "duplicated"
            assert set(evidence(now)) == set(kept) if twice else Counter(evidence(now)) == kept
            assert all(p.text.strip() for p in now.passages)
            assert all(p.gold for p in now.passages if p.evidence)
            if "gold_at" in was.meta and gold(now):
                assert now.passages[now.meta["gold_at"]].gold
            for name in set(was.meta) - {"gold_at"}:
                assert now.meta[name] == was.meta[name]


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(data=st.data())
def test_ids_answers_and_evidence_stay(kind, data):
    samples = made_up(*data.draw(some_samples(gold=(0, 3) if kind != "layout" else (1, 3), least=3)))
    options = {"documents": 4} if kind == "position" else {"counts": (1, 3)} if kind == "needle" else {}
    check(kind, samples, sweep(kind, samples, **options))


def test_ids_answers_and_evidence_of_the_twins_questions_stay():
    found = all_points()
    assert len(found) > 25
    for kind, samples, made in found:
        check(kind, samples, made)


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(data=st.data())
def test_points_follow_the_seed_and_the_id_alone(kind, data):
    """The order of the samples, and one that brings neither passages nor answers, change nothing."""
    samples = made_up(*data.draw(some_samples(gold=(1, 3), least=3)))
    options = {"documents": 4} if kind == "position" else {"counts": (1, 3)} if kind == "needle" else {}
    made = sweep(kind, samples, seed=3, **options)
    assert made == points(kind, samples, seed=3, **options)
    others = points(kind, [Sample("new", "Who?", ("nobody",)), *samples[::-1]], seed=3, **options)
    for point, other in zip(made, others, strict=True):
        assert [s for s in other.samples[::-1] if s.id != "new"] == list(point.samples)


@pytest.mark.parametrize("kind", ["position", "noise", "layout", "dirty"])
def test_another_seed_gives_another_sweep(kind):
    samples = TWINS["two-hop" if kind == "layout" else "reading-5"]
    assert points(kind, samples, seed=0) != points(kind, samples, seed=1)


@EXAMPLES
@given(some_samples(gold=(1, 2), least=4), st.integers(0, 4))
def test_a_sample_that_joins_changes_a_draw_only_by_what_it_brings(samples, count):
    samples = made_up(*samples)
    *others, new = samples
    before, after = Source(tuple(others), 0), Source(tuple(samples), 0)
    assume(any(rest(sample) for sample in others))
    for sample in others:
        brought = {p.text for p in new.passages}
        old, now = ({p.text for p in some.passages("x", sample, count)} for some in (before, after))
        assert now <= old | brought
        assert len(now) >= len(old)
        old, now = (set(some.wrong("x", sample, count)) for some in (before, after))
        assert len(now) >= len(old)


@EXAMPLES
@given(some_samples(gold=(1, 2), least=3))
def test_what_is_borrowed_concerns_others(samples):
    samples = made_up(*samples)
    source = Source(tuple(samples), 0)
    for sample in samples:
        drawn = source.passages("x", sample, 6)
        assert drawn[:2] == source.passages("x", sample, 2)
        assert len({p.text for p in drawn}) == len(drawn)
        for passage in drawn:
            assert not passage.gold
            assert not passage.evidence
            assert passage.text not in [p.text for p in sample.passages]
            assert passage.title not in [p.title for p in gold(sample)]
            assert f" {normalise(sample.answers[0])} " not in f" {normalise(passage.text)} "
        wrong = source.wrong("x", sample, 6)
        assert wrong[:1] == source.wrong("x", sample, 1)
        assert len(set(wrong)) == len(wrong)
        assert all(normalise(sample.answers[0]) not in normalise(value) for value in wrong)


def test_wrong_answers_are_of_the_same_relation():
    samples = TWINS["reading-5"]
    told = {
        s.meta["relation"]: {o.answers[0] for o in samples if o.meta["relation"] == s.meta["relation"]} for s in samples
    }
    for sample in samples:
        others = told[sample.meta["relation"]] - set(sample.answers)
        assert set(Source(tuple(samples), 0).wrong("x", sample, len(others))) == others


def test_numbers_are_taken_for_numbers():
    def asked(id: str, answer: str) -> Sample:
        return Sample(id, "When?", (answer,), (Passage("", f"It was in {answer}.", True),))

    samples = [
        asked(str(number), answer) for number, answer in enumerate(["1901", "spring", "autumn", "1950", "winter"])
    ]
    assert Source(tuple(samples), 0).wrong("x", samples[0], 1) == ["1950"]
    assert set(Source(tuple(samples), 0).wrong("x", samples[0], 9)) == {"1950", "spring", "autumn", "winter"}


def test_where_all_passages_are_gold_those_of_others_serve():
    drawn = Source(tuple(TWINS["reading-1"]), 0).passages("x", TWINS["reading-1"][0], 5)
    texts = {p.text for sample in TWINS["reading-1"][1:] for p in sample.passages}
    assert len(drawn) == 5
    assert {p.text for p in drawn} <= texts
    assert not any(p.gold or p.evidence for p in drawn)


# --- position and needle


@EXAMPLES
@given(some_samples(gold=(1, 2), least=3), st.integers(2, 5))
def test_gold_stands_at_each_place(samples, k):
    samples = made_up(*samples)
    made = sweep("position", samples, documents=k)
    assert [p.name for p in made] == [*(f"gold-{i}" for i in range(k)), "closed-book", "oracle", "shuffled"]
    for place, point in enumerate(made[:k]):
        assert point.value == place
        for was, now in pairs(point, samples):
            assert len(gold(was)) == 1
            assert now.passages[place] == gold(was)[0]
            assert len(now.passages) == k
            assert rest(now)[: len(rest(was))] == rest(was)[: k - 1]
            assert rest(now) == rest(next(s for s in made[0].samples if s.id == now.id))
    for was, now in pairs(at(made, "closed-book"), samples):
        assert now.passages == ()
        assert "gold_at" not in now.meta
        assert was.id == now.id
    for was, now in pairs(at(made, "oracle"), samples):
        assert list(now.passages) == gold(was)
    for now, first in zip(at(made, "shuffled").samples, made[0].samples, strict=True):
        assert Counter(p.text for p in now.passages) == Counter(p.text for p in first.passages)


def test_documents_are_as_many_as_most_samples_have():
    samples = [
        *TWINS["reading-5"],
        *(replace(s, id=f"x{s.id}", passages=s.passages[:3]) for s in TWINS["reading-5"][:9]),
    ]
    made = points("position", samples)
    assert [p.name for p in made][-4] == "gold-4"
    shuffled = Counter(s.passages.index(gold(s)[0]) for s in at(made, "shuffled").samples)
    assert len(shuffled) == 5


def test_a_needle_lies_among_passages_of_others_or_records_of_its_own():
    samples = TWINS["reading-5"]
    made = points("needle", samples, counts=(1, 5, 20))
    assert [p.name for p in made] == [f"{key}-{n}" for n in (1, 5, 20) for key in ("first", "middle", "last")]
    for was, now in pairs(at(made, "middle-20"), samples):
        assert len(now.passages) == 20
        assert now.passages[9] == gold(was)[0]
        assert not {p.text for p in rest(now)} & {p.text for p in was.passages}
    assert at(made, "last-1").same_as == "first-1"
    records = [
        Sample(
            str(n),
            f"What is {n}-7?",
            (f"v{n}",),
            tuple(Passage("", f"{n}-{i}: {'v' if i == 7 else 'w'}{n}", i == 7) for i in range(30)),
        )
        for n in range(3)
    ]
    made = points("needle", records)
    assert [p.value for p in made if p.series == "last"] == [5, 10, 25]
    for point in made:
        for was, now in pairs(point, records):
            assert now.passages.index(gold(was)[0]) == {"first": 0, "middle": (point.value - 1) // 2}.get(
                point.series, point.value - 1
            )
            assert rest(now) == [p for p in was.passages if p in rest(now)]
    smaller, larger = (at(made, f"first-{n}").samples[0] for n in (5, 10))
    assert set(smaller.passages) < set(larger.passages)


# --- noise


@EXAMPLES
@given(some_samples(gold=(1, 3), least=4), st.sampled_from(["random", "kept"]))
def test_noise_adds_so_many_of_its_sort(samples, place):
    samples = made_up(*samples)
    made = sweep("noise", samples, gold=place)
    known = {p.text for sample in samples for p in sample.passages}
    for point in made:
        sort = point.series.removesuffix("-fixed")
        for was, now in pairs(point, samples):
            assert gold(now) == gold(was)
            assert all(not p.evidence for p in rest(now))
            own = [p.text for p in rest(was)]
            new = [p.text for p in rest(now)]
            assert len(set(new) - set(own)) == len([t for t in new if t not in own])
            if not point.series.endswith("-fixed"):
                assert len(new) == point.value
                if sort == "own":
                    assert new[: len(own)] == own[: int(point.value)]
                if sort == "random":
                    assert not set(new) & set(own)
                assert sort == "counterfactual" or set(new) <= known
            for text in new:
                assert sort == "own" or not occurrences(text, was.answers)
    fixed = [p for p in made if p.series.endswith("-fixed")]
    for series in {p.series for p in fixed}:
        assert len({len(s.passages) for p in fixed if p.series == series for s in p.samples}) == 1


def test_counterfactual_copies_differ_in_the_answer_alone():
    samples = TWINS["two-hop"]
    made = points("noise", samples, distractors="counterfactual", counts=(0, 3), lengths="growing")
    for was, now in pairs(at(made, "counterfactual-3"), samples):
        (answering,) = [p for p in gold(was) if evidence(replace(was, passages=(p,))) == [was.answers[0]]]
        pattern = re.escape(answering.text).replace(re.escape(was.answers[0]), "(.+)")
        assert all(re.fullmatch(pattern, p.text) for p in rest(now))
        assert len({p.text for p in rest(now)}) == 3


def test_at_fixed_length_noise_takes_the_place_of_harmless_passages():
    samples = TWINS["reading-5"]
    made = points("noise", samples, counts=(0, 1, 4), total=8, lengths="fixed")
    assert [p.name for p in made] == [f"{sort}-fixed-{n}" for sort in ("own", "counterfactual") for n in (0, 1, 4)]
    for series in ("own", "counterfactual"):
        none, one, four = (at(made, f"{series}-fixed-{n}") for n in (0, 1, 4))
        for was, a, b, c in zip(samples, none.samples, one.samples, four.samples, strict=True):
            assert len(a.passages) == len(b.passages) == len(c.passages) == 8
            assert [x == y for x, y in zip(a.passages, b.passages, strict=True)].count(False) == 1
            assert [x == y for x, y in zip(a.passages, c.passages, strict=True)].count(False) == 4
            assert {p.text for p in a.passages} & {p.text for p in was.passages} == {gold(was)[0].text}
            assert a.passages.index(gold(was)[0]) == c.passages.index(gold(was)[0])
            if series == "own":
                assert set(rest(c)) >= set(rest(was))


def test_gold_is_kept_where_it_was_or_put_anywhere():
    samples = read("reading-5")[:40]
    for n in (2, 8):
        kept = points("noise", samples, distractors="own", counts=n, lengths="growing", gold="kept")[0]
        for was, now in pairs(kept, samples):
            assert now.passages.index(gold(was)[0]) == min(n, was.passages.index(gold(was)[0]))
    anywhere = points("noise", samples, distractors="own", counts=4, lengths="growing")[0]
    assert {s.passages.index(gold(s)[0]) for s in anywhere.samples} == set(range(5))


def test_what_is_retrieved_comes_first_without_what_answers():
    samples = TWINS["two-hop"]

    def retrieve(question: str) -> list[Passage]:
        (sample,) = [s for s in samples if s.question == question]
        told = Passage("", f"{sample.answers[0]} it is.", True)
        other = next(s for s in samples if s is not sample)
        return [*gold(sample), told, Passage("", question, True, ((0, 1),)), rest(other)[0]]

    made = points(
        "noise", samples, retrieve=retrieve, lengths="growing", counts=(1, 20), distractors=("own", "retrieved")
    )
    assert [p.name for p in made] == ["own-1", "own-20", "retrieved-1", "retrieved-20"]
    for was, now in pairs(at(made, "retrieved-20"), samples):
        first, *others = rest(now)
        assert first == Passage("", was.question)
        assert len({p.text for p in others}) == 19
        assert not {p.text for p in others} & {p.text for p in was.passages}
    usual = points("noise", samples, retrieve=retrieve, lengths="growing", counts=1)
    assert [p.series for p in usual] == ["random", "own", "retrieved", "counterfactual"]


# --- layout


def indices(sample: Sample, passages: list[Passage]) -> list[int]:
    return [sample.passages.index(passage) for passage in passages]


@EXAMPLES
@given(some_samples(gold=(1, 3), least=3))
def test_hops_stand_as_the_layout_says(samples):
    samples = made_up(*samples)
    made = sweep("layout", samples)
    assert [p.name for p in made] == list(LAYOUTS)
    for was, now in pairs(at(made, "given"), samples):
        assert now == was
    for name in ("adjacent", "separated", "reversed"):
        for was, now in pairs(at(made, name), samples):
            assert Counter(now.passages) == Counter(was.passages)
            assert rest(now) == rest(was)
            assert gold(now) == (hops(was)[::-1] if name == "reversed" else hops(was))
            places = [i for i, p in enumerate(now.passages) if p.gold]
            if name == "separated":
                gaps = [b - a for a, b in pairwise(places)]
                assert (places[0], places[-1]) == (0, len(now.passages) - 1)
                assert max(gaps) - min(gaps) <= 1
            else:
                assert places == list(range(places[0], places[0] + len(places)))
    for one, other in zip(at(made, "adjacent").samples, at(made, "reversed").samples, strict=True):
        assert [p.gold for p in one.passages] == [p.gold for p in other.passages]
    for was, now in pairs(at(made, "split"), samples):
        assert rest(now) == rest(was)
        assert len(gold(now)) > len(gold(was))
        assert " ".join(p.text for p in now.passages) == " ".join(p.text for p in was.passages)
    for was, now in pairs(at(made, "duplicated"), samples):
        assert rest(now) == rest(was)
        assert Counter(gold(now)) == Counter(gold(was) * 2)
    for was, now in pairs(at(made, "contradicted"), samples):
        (copy,) = Counter(now.passages) - Counter(was.passages)
        assert not copy.gold
        assert not copy.evidence
        assert not occurrences(copy.text, was.answers)
        assert [p for p in now.passages if p != copy] == list(was.passages)


def test_the_hop_that_answers_is_the_last():
    for sample in TWINS["two-hop"]:
        first, last = hops(sample)
        assert evidence(replace(sample, passages=(last,))) == list(sample.answers)
        assert evidence(replace(sample, passages=(first,))) == [last.title]


def test_an_order_of_hops_that_is_told_is_believed():
    told = tuple(Passage(name, f"{name}. It is X.", True) for name in "abc")
    steps = [{"paragraph_support_idx": place} for place in (2, 0, 1)]
    sample = Sample("q", "What?", ("X",), (*told, Passage("d", "d.")), {"question_decomposition": steps})
    assert [p.title for p in hops(sample)] == ["c", "a", "b"]
    assert [p.title for p in hops(replace(sample, meta={"question_decomposition": steps[:2]}))] == ["a", "b", "c"]


def test_a_passage_is_cut_between_sentences_and_not_through_evidence():
    told = Passage("t", "One is here. Two is there. Three is nowhere now.", True, ((0, 3), (27, 32)))
    assert [p.text for p in halves(told)] == ["One is here. Two is there.", "Three is nowhere now."]
    assert [p.evidence for p in halves(told)] == [((0, 3),), ((0, 5),)]
    across = replace(told, evidence=((15, 30),))
    assert [(p.text, p.evidence) for p in halves(across)] == [
        ("One is here.", ()),
        ("Two is there. Three is nowhere now.", ((2, 17),)),
    ]
    assert halves(replace(told, text="One e.g. this", evidence=())) == [
        replace(told, text="One e.g. this", evidence=())
    ]


# --- what is asked around the samples


def test_the_question_takes_its_places():
    made = points("query", TWINS["reading-5"])
    assert [(p.name, p.placement) for p in made] == [(n, n) for n in ("before", "after", "both", "middle")]
    assert all(list(p.samples) == TWINS["reading-5"] for p in made)
    assert len(points("query", TWINS["reading-1"], placements=("before", "after"))) == 2


def test_shots_and_masks_are_numbers_beside_the_samples():
    samples = read("few-shot")[:3]
    assert [(p.name, p.shots, p.value) for p in points("shots", samples)] == [
        (f"shots-{n}", n, n) for n in (0, 1, 2, 4, 8)
    ]
    made = points("masks", samples, counts=(0, 16))
    assert [(p.name, p.extra_masks, p.filler, p.same_as) for p in made] == [
        ("masks-0", 0, "", ""),
        ("masks-16", 16, "", ""),
        ("filler-0", 0, "", "masks-0"),
        ("filler-16", 0, " ." * 16, ""),
    ]
    assert [p.value for p in points("masks", samples)] == [0, 8, 16, 32, 64, 128] * 2
    assert all(list(p.samples) == samples for p in made)


# --- dirty


@EXAMPLES
@given(some_samples(gold=(1, 3), least=3), st.sampled_from(sorted(TRANSFORMS)))
def test_level_0_is_the_sample_itself(samples, name):
    samples = made_up(*samples)
    (point,) = sweep("dirty", samples, transforms=name, levels=0)
    assert all(was is now for was, now in pairs(point, samples))


@pytest.mark.parametrize("name", ["typos", "ocr"])
@EXAMPLES
@given(some_samples(gold=(1, 3), least=2), st.sampled_from([0.1, 0.5, 1]))
def test_damage_spares_answers_and_everything_but_the_passages(name, samples, level):
    samples = made_up(*samples)
    (point,) = sweep("dirty", samples, transforms=name, levels=level)
    for was, now in pairs(point, samples):
        assert [(p.title, p.gold) for p in now.passages] == [(p.title, p.gold) for p in was.passages]
        for old, new in zip(was.passages, now.passages, strict=True):
            assert len(occurrences(new.text, was.answers)) >= len(occurrences(old.text, was.answers)) * old.gold
            if level == 1:
                assert new.text != old.text


@pytest.mark.parametrize("name", ["typos-question", "ocr-question"])
def test_damage_to_the_question_spares_the_passages(name):
    (point,) = points("dirty", TWINS["unanswerable"], transforms=name, levels=0.2)
    changed = [was.question != now.question for was, now in pairs(point, TWINS["unanswerable"])]
    assert sum(changed) > len(changed) / 2
    assert all(was.passages == now.passages for was, now in pairs(point, TWINS["unanswerable"]))


def test_damage_grows_with_its_level():
    text = " ".join(FACTS * 50)
    for damage, places in ((typos, sum(c.isalpha() for c in text)), (misread, None)):
        counts = [len(damage(text, set(), level, dice(0))) for level in (0.05, 0.1, 0.2, 1)]
        assert counts == sorted(set(counts))
        if places:
            assert counts[1] == pytest.approx(0.1 * places, rel=0.2)


@EXAMPLES
@given(st.text(st.sampled_from("abMrnlI1O0- .\n'é木"), max_size=40), st.data(), st.sampled_from([0.3, 1]))
def test_typos_change_letters_and_ocr_what_can_be_misread(text, data, level):
    kept = data.draw(st.sets(st.integers(0, 40)))
    for damage in (typos, misread):
        edits = sorted(damage(text, kept, level, dice("x")))
        assert all(a[1] <= b[0] for a, b in pairwise(edits))
        for start, stop, new in edits:
            assert kept.isdisjoint(range(start, stop))
            if damage is typos:
                assert text[start:stop].isalpha()
                assert new.isalpha() or not new
                assert new != text[start:stop]
        assert not text.strip() or edited(text, edits).strip()
    for start, stop, new in misread(text, kept, level, dice("x")):
        pairs = ["rn m", "m rn", "l 1", "l I", "1 l", "1 I", "I l", "I 1", "O 0", "0 O"]
        assert f"{text[start:stop]} {new}" in pairs or (text[start:stop], new) in [
            (" ", "\n"),
            ("-", "-\n"),
            ("-", ""),
            ("", "-\n"),
        ]


def test_typos_are_neighbours_swaps_and_drops():
    assert all(
        stop == start + 1 and start % 2 for start, stop, _ in typos("modern" * 300, set(range(0, 1800, 2)), 1, dice(0))
    )
    edits = typos("modern" * 300, set(), 0.3, dice(0))
    kinds = Counter((stop - start, len(new)) for start, stop, new in edits)
    assert set(kinds) == {(1, 1), (2, 2), (1, 0)}
    for start, stop, new in edits:
        old = ("modern" * 300)[start:stop]
        if (len(old), len(new)) == (1, 1):
            assert new in {"m": "njk", "o": "ipkl", "d": "sferxc", "e": "wrsd", "r": "etdf", "n": "bmhj"}[old]
        elif len(old) == 2:
            assert new == old[::-1]


def test_ocr_misreads_all_that_can_be():
    text = "rn m l 1 I O 0 well-known " * 100
    found = {(text[start:stop], new) for start, stop, new in misread(text, set(), 1, dice(0))}
    assert found == {
        *(("rn", "m"), ("m", "rn"), ("l", "1"), ("l", "I"), ("1", "l"), ("1", "I"), ("I", "l"), ("I", "1")),
        *(("O", "0"), ("0", "O"), (" ", "\n"), ("-", "-\n"), ("-", "")),
    }
    broken = sorted(misread("rnrnrnrn sturdily " * 100, set(), 1, dice(0)))
    assert ("", "-\n") in {(text[start:stop], new) for start, stop, new in broken}
    assert all(a[1] <= b[0] for a, b in pairwise(broken))


def test_a_gold_passage_without_evidence_is_cut_after_the_answer():
    told = (Passage("", "It is X. There is more to tell of X.", True), Passage("", "It is all there is."))
    samples = [Sample(str(n), "What?", ("X",), told) for n in range(20)]
    (point,) = points("dirty", samples, transforms="truncated", levels=1)
    cuts = {tuple(p.text for p in sample.passages) for sample in point.samples}
    assert len({first for first, _ in cuts}) > 5
    assert all(first.startswith("It is X") and second.startswith("It") for first, second in cuts)
    unknown = [replace(sample, answers=("Y",)) for sample in samples]
    (point,) = points("dirty", unknown, transforms="truncated", levels=1)
    assert all(sample.passages[0] == told[0] and sample.passages[1] != told[1] for sample in point.samples)


@EXAMPLES
@given(some_samples(gold=(1, 3), least=2))
def test_truncated_passages_are_beginnings_that_have_the_evidence(samples):
    samples = made_up(*samples)
    (point,) = sweep("dirty", samples, transforms="truncated", levels=1)
    for was, now in pairs(point, samples):
        for old, new in zip(was.passages, now.passages, strict=True):
            assert old.text.startswith(new.text)
            assert (new.title, new.gold, new.evidence) == (old.title, old.gold, old.evidence)
            assert not old.gold or bool(occurrences(new.text, was.answers)) == bool(occurrences(old.text, was.answers))
            assert old.gold or new.text != old.text


@EXAMPLES
@given(some_samples(gold=(1, 3), least=2), st.sampled_from([0.5, 1]))
def test_duplicated_passages_are_there_twice(samples, level):
    samples = made_up(*samples)
    (point,) = sweep("dirty", samples, transforms="duplicated", levels=level)
    for was, now in pairs(point, samples):
        extra = Counter(now.passages) - Counter(was.passages)
        assert extra <= Counter(was.passages)
        assert level < 1 or extra == Counter(was.passages)
        left = iter(now.passages)
        assert all(passage in left for passage in was.passages)


@EXAMPLES
@given(some_samples(gold=(1, 3), least=2))
def test_boilerplate_stands_around_a_passage(samples):
    samples = made_up(*samples)
    (point,) = sweep("dirty", samples, transforms="boilerplate", levels=1)
    for was, now in pairs(point, samples):
        for old, new in zip(was.passages, now.passages, strict=True):
            above, below = new.text.split(old.text)
            assert above.endswith("\n")
            assert below.startswith("\n")
            assert (new.title, new.gold) == (old.title, old.gold)


def test_boilerplate_does_not_tell_the_answer():
    sample = Sample("q", "What?", ("home", "Search", "no"), (Passage("", "It is home.", True),) * 40)
    (point,) = points("dirty", [sample], transforms="boilerplate", levels=1)
    assert not any(re.search("Home|Search|No$", p.text) for p in point.samples[0].passages)


@pytest.mark.parametrize("name", ["reading-5", "two-hop", "contradicted"])
def test_a_stale_version_is_beside_the_newer_and_older(name):
    (point,) = points("dirty", TWINS[name], transforms="stale", levels=1)
    before = 0
    for was, now in pairs(point, TWINS[name]):
        (stale,) = [p for p in rest(now) if p not in was.passages]
        (newer,) = [p for p in gold(now) if p not in was.passages]
        i, j = now.passages.index(stale), now.passages.index(newer)
        assert abs(i - j) == 1
        before += i < j
        year, said = re.fullmatch(r"Last updated in (\d+)\. (.*)", stale.text).groups()
        since, told = re.fullmatch(r"Last updated in (\d+)\. (.*)", newer.text).groups()
        assert int(year) < int(since)
        assert told in [p.text for p in gold(was)]
        assert said not in [p.text for p in was.passages]
        assert not occurrences(said, was.answers)
        assert [p for p in now.passages if p not in (stale, newer)] == [p for p in was.passages if p.text != told]
    assert 0 < before < len(point.samples)


# --- the parts


@EXAMPLES
@given(st.lists(st.integers(0, 5)), st.integers(0, 5))
def test_woven_keeps_both_orders(gaps, count):
    gaps = sorted(gap for gap in gaps if gap <= count)
    told, others = [Passage("g", str(i), True) for i in range(len(gaps))], [Passage("r", str(i)) for i in range(count)]
    made = woven(told, others, gaps)
    assert [p for p in made if p.gold] == told
    assert [p for p in made if not p.gold] == others
    assert [sum(not q.gold for q in made[:i]) for i, p in enumerate(made) if p.gold] == gaps


@EXAMPLES
@given(
    st.text("abc", min_size=8, max_size=8),
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 5, 6, 7]), st.text("x", max_size=3))),
)
def test_evidence_moves_with_its_text(text, given):
    passage = Passage("", text, True, ((3, 5),))
    edits = [(start, start + (start not in (3, 5)), new) for start, new in dict(given).items()]
    ((start, stop),) = rewritten(passage, edits).evidence
    assert rewritten(passage, edits).text[start:stop] == text[3:5]


def test_answers_are_found_as_words():
    assert occurrences("A red, shared Red house in C++.", ("red", "RED house", "c++", "")) == [
        (2, 5),
        (14, 23),
        (27, 30),
    ]


# --- what is refused

SAMPLES = TWINS["reading-5"]


@pytest.mark.parametrize(
    ("kind", "samples", "options", "message"),
    [
        ("positon", SAMPLES, {}, r"unknown stress 'positon' \(did you mean 'position'\?\); allowed: position, noise"),
        (
            "noise",
            SAMPLES,
            {"count": 3},
            r"unknown option of noise 'count' \(did you mean 'counts'\?\); allowed: distra",
        ),
        ("query", SAMPLES, {"placements": "midle"}, r"unknown placement 'midle' \(did you mean 'middle'\?\)"),
        ("noise", SAMPLES, {"distractors": ("own", "radnom")}, r"unknown distractor 'radnom' \(did you mean 'random'"),
        ("noise", SAMPLES, {"gold": "keep"}, r"unknown gold place 'keep' \(did you mean 'kept'\?\)"),
        ("noise", SAMPLES, {"distractors": "retrieved"}, "need `retrieve`, a function from a question to passages"),
        ("noise", SAMPLES, {"distractors": "random", "lengths": "fixed"}, "the harmless passages themselves"),
        ("noise", SAMPLES, {"counts": (1, 99999)}, r"counts goes up to 99999, and there are \d+ random passages for"),
        ("noise", SAMPLES, {"total": 3}, "total=3 passages do not hold 1 gold ones and 16 others"),
        (
            "noise",
            SAMPLES,
            {"total": 9999},
            r"9999 passages of fixed length are asked for, and there are harmless ones for",
        ),
        ("noise", SAMPLES[:1], {}, "noise needs random distractors .*, which the sample lacks; give more samples"),
        (
            "noise",
            TWINS["unanswerable"],
            {},
            r'noise needs a gold passage, which all 12 samples lack; mark it with "gold"',
        ),
        (
            "layout",
            SAMPLES,
            {},
            'layout needs two gold passages or more, which all 12 samples lack; mark each hop with "',
        ),
        ("layout", TWINS["two-hop"][:1], {}, "an answer of another sample to put in its place, which the sample lacks"),
        ("position", TWINS["two-hop"], {}, "needs exactly one gold passage, which all 12 samples lack"),
        ("position", TWINS["reading-1"], {}, "there would be 1 document; give more: documents=5"),
        ("position", SAMPLES, {"documents": 9999}, "position needs 9998 passages beside the gold one, which all 12"),
        ("position", SAMPLES, {"documents": (2, 3)}, "documents takes one value, got 2: 2, 3"),
        ("position", SAMPLES, {"documents": "x"}, "documents must be whole numbers from 1 on, got 'x'"),
        ("noise", SAMPLES, {"total": (20, 30)}, "total takes one value, got 2: 20, 30"),
        ("noise", SAMPLES, {"gold": ("kept", "random")}, "gold takes one value, got 2: kept, random"),
        ("noise", SAMPLES, {"lengths": 5}, "unknown length '5'; allowed: growing, fixed"),
        ("query", SAMPLES, {"placements": 3}, "unknown placement '3'"),
        ("needle", SAMPLES, {"haystack": ("own", "others")}, "haystack takes one value, got 2: own, others"),
        ("position", SAMPLES, {"documents": -2}, "documents must be whole numbers from 1 on, got -2"),
        (
            "needle",
            SAMPLES[:1],
            {},
            "among 4 others or more, and some sample has 0; give counts up to 1, or more samples",
        ),
        ("needle", SAMPLES, {"counts": 0}, "counts must be whole numbers from 1 on, got 0"),
        ("needle", SAMPLES, {"counts": (5, 3000)}, r"counts goes up to 3000, and there are \d+ passages for every"),
        ("needle", SAMPLES, {"haystack": "own", "counts": (5, 6)}, "up to 6, and there are 5 passages for every"),
        (
            "query",
            TWINS["reading-1"],
            {},
            "needs two passages or more, which all 12 samples lack; choose other placements",
        ),
        ("shots", SAMPLES, {"counts": (1, 1)}, "counts 1 is given twice"),
        ("shots", SAMPLES, {"counts": ()}, "no counts is given"),
        ("masks", SAMPLES, {"counts": (1, True)}, "counts must be whole numbers from 0 on, got True"),
        ("dirty", SAMPLES, {"levels": (0, 1.5)}, "levels must be numbers from 0 to 1, got 1.5"),
        ("dirty", SAMPLES, {"levels": float("nan")}, "levels must be numbers from 0 to 1, got nan"),
        (
            "dirty",
            TWINS["unanswerable"],
            {},
            "has one of the answers in its text, .* or leave stale out of `transforms`",
        ),
        (
            "dirty",
            read("few-shot")[:2],
            {},
            'give "passages", or take what hits the question: transforms="typos-question"',
        ),
        ("dirty", [], {}, "there are no samples"),
        ("dirty", [SAMPLES[0], SAMPLES[0]], {}, "the id 'reading-5-0' is that of several samples"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(kind, samples, options, message):
    with pytest.raises(UserError, match=message) as refused:
        points(kind, samples, **options)
    assert "\n" not in str(refused.value)


def test_where_no_sample_meets_all_needs_both_are_told():
    whole = Sample("a", "Q?", ("X",), (Passage("", "X is", True), Passage("", "Y is", True), Passage("", "Z.")))
    without = Sample("b", "Q?", ("no",), (Passage("", "One. Two.", True), Passage("", "Y is", True), Passage("", "Z.")))
    with pytest.raises(UserError, match="and no sample has it all"):
        points("layout", [whole, without], layouts=("split", "contradicted"))
    assert points("layout", [whole, without], layouts="split")[0].left_out == 1


def test_every_kind_tells_what_it_is():
    for kind in KINDS.values():
        assert kind.title
        assert kind.about.endswith(".")
        assert kind.options
