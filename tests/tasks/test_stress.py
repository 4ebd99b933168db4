"""Stress sweeps: each point changes one property and keeps everything else, the evidence above all."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from example_counts import examples
from floatscope.errors import UserError
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.sample_files import read_samples
from floatscope.tasks.scores import normalise
from floatscope.tasks.stress import KINDS, Point, build_points
from floatscope.tasks.stress.corruption import TRANSFORMS, make_ocr_errors, make_typos
from floatscope.tasks.stress.dates import YEARS, draw_years
from floatscope.tasks.stress.layout import LAYOUTS, order_hops
from floatscope.tasks.stress.passage_edits import edit_passage, edit_text, find_answers, interleave, split_passage
from floatscope.tasks.stress.sample_pool import SamplePool, make_rng

ANSWERS = ["Velmora", "Triston", "Kobury", "New Haven", "violin", "1901", "12 May", "Quitan Ley", "oak", "Österbro"]
PEOPLE = ["Mira", "Tan Ceberg", "Lola", "Rik Dale", "Ursa", "Benno", "Ira", "Sven Ö"]
FACTS = ["{who} keeps a pony.", "In summer {who} swims well.", "{who} is modern and calm!", "Nobody knows {who}'s age."]
EXAMPLES = examples(20)
TWINS = {
    name: read_samples(f"twin:{name}", 12)
    for name in ("reading-1", "reading-5", "two-hop", "contradicted", "unanswerable")
}


def make_passage(rng: Random, answer: str | None) -> Passage:
    who = rng.choice(PEOPLE) + rng.choice(["", " Ni", " Ro", " Wu"])
    sentences = [rng.choice(FACTS).replace("{who}", who) for _ in range(rng.randint(0, 3))]
    if answer is None:
        return Passage(who, " ".join([f"{who} was born{rng.choice(['', f' in {rng.choice(ANSWERS)}'])}.", *sentences]))
    fact = f"{who} lives in {answer}."
    sentences.insert(rng.randint(0, len(sentences)), fact)
    text = " ".join(sentences)
    start = text.index(fact) + len(f"{who} lives in ")
    return Passage(who, text, True, rng.choice([(), ((start, start + len(answer)),)]))


def make_samples(seed: int, gold: tuple[int, int], minimum: int) -> list[Sample]:
    """Make samples with some gold passages, at most four others, and random meta."""
    rng, samples = Random(seed), []
    for number in range(rng.randint(minimum, 6)):
        answer, count = rng.choice(ANSWERS), rng.randint(*gold)
        passages = [make_passage(rng, answer if i == 0 else rng.choice([answer, "the north"])) for i in range(count)]
        passages += [make_passage(rng, None) for _ in range(rng.randint(0, 4))]
        rng.shuffle(passages)
        meta: dict[str, object] = rng.choice([{}, {"relation": "home"}, {"kind": "reading"}])
        if count and rng.random() < 0.5:
            meta = {**meta, "gold_at": [p.gold for p in passages].index(True)}
        samples.append(Sample(f"q {number}", "Where does Rik Dale's mom live?", (answer,), tuple(passages), meta))
    return samples


def sample_arguments(
    gold: tuple[int, int] = (0, 3), minimum: int = 1
) -> st.SearchStrategy[tuple[int, tuple[int, int], int]]:
    """Return the arguments of `make_samples`; beartype uses random numbers, which strategies must not."""
    return st.tuples(st.integers(0, 2**32), st.just(gold), st.just(minimum))


def sweep(kind: str, samples: list[Sample], **options: object) -> list[Point]:
    """Build the points, or discard the example if no sample can take part."""
    try:
        return build_points(kind, samples, **options)
    except UserError:
        assume(False)
        raise


def evidence(sample: Sample) -> list[str]:
    return [p.text[start:stop] for p in sample.passages for start, stop in p.evidence]


def gold(sample: Sample) -> list[Passage]:
    return [p for p in sample.passages if p.gold]


def distractors_of(sample: Sample) -> list[Passage]:
    return [p for p in sample.passages if not p.gold]


def pair_samples(point: Point, samples: list[Sample]) -> list[tuple[Sample, Sample]]:
    """Return each sample before and after the change."""
    before = {sample.id: sample for sample in samples}
    return [(before[sample.id], sample) for sample in point.samples]


def get_point(points: list[Point], name: str) -> Point:
    return next(point for point in points if point.name == name)


def build_all_points() -> list[tuple[str, list[Sample], list[Point]]]:
    """Build all sweeps that the shipped files allow."""
    sweeps = []
    for samples in TWINS.values():
        for kind in KINDS:
            try:
                sweeps.append((kind, samples, build_points(kind, samples)))
            except UserError:
                continue
    return sweeps


def check_points(kind: str, samples: list[Sample], points: list[Point]) -> None:
    """Check the properties of every sweep."""
    assert len({point.name for point in points}) == len(points)
    ids = [sample.id for sample in points[0].samples]
    assert [sample.id for sample in samples if sample.id in ids] == ids
    for point in points:
        assert re.fullmatch(r"[a-z0-9.-]+", point.name)
        assert [sample.id for sample in point.samples] == ids
        assert point.left_out == len(samples) - len(ids)
        if point.same_as:
            assert get_point(points, point.same_as).samples == point.samples
        for source, changed in pair_samples(point, samples):
            assert changed.answers == source.answers
            assert changed.question == source.question or (point.series.endswith("-question") and point.value)
            expected = Counter() if point.name == "closed-book" else Counter(evidence(source))
            twice = kind in ("layout", "dirty") and point.series == "duplicated"
            assert set(evidence(changed)) == set(expected) if twice else Counter(evidence(changed)) == expected
            assert all(p.text.strip() for p in changed.passages)
            assert all(p.gold for p in changed.passages if p.evidence)
            if "gold_at" in source.meta and gold(changed):
                assert changed.passages[changed.meta["gold_at"]].gold
            for name in set(source.meta) - {"gold_at"}:
                assert changed.meta[name] == source.meta[name]


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(data=st.data())
def test_ids_answers_and_evidence_do_not_change(kind, data):
    samples = make_samples(*data.draw(sample_arguments(gold=(0, 3) if kind != "layout" else (1, 3), minimum=3)))
    options = {"documents": 4} if kind == "position" else {"counts": (1, 3)} if kind == "needle" else {}
    check_points(kind, samples, sweep(kind, samples, **options))


def test_ids_answers_and_evidence_of_shipped_files_do_not_change():
    sweeps = build_all_points()
    assert len(sweeps) > 25
    for kind, samples, points in sweeps:
        check_points(kind, samples, points)


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(data=st.data())
def test_points_depend_only_on_seed_and_id(kind, data):
    """Reordering the samples, or adding one without passages and answers, changes nothing."""
    samples = make_samples(*data.draw(sample_arguments(gold=(1, 3), minimum=3)))
    options = {"documents": 4} if kind == "position" else {"counts": (1, 3)} if kind == "needle" else {}
    points = sweep(kind, samples, seed=3, **options)
    assert points == build_points(kind, samples, seed=3, **options)
    others = build_points(kind, [Sample("new", "Who?", ("nobody",)), *samples[::-1]], seed=3, **options)
    for point, other in zip(points, others, strict=True):
        assert [s for s in other.samples[::-1] if s.id != "new"] == list(point.samples)


@pytest.mark.parametrize("kind", ["position", "noise", "layout", "dirty"])
def test_another_seed_gives_another_sweep(kind):
    samples = TWINS["two-hop" if kind == "layout" else "reading-5"]
    assert build_points(kind, samples, seed=0) != build_points(kind, samples, seed=1)


@EXAMPLES
@given(sample_arguments(gold=(1, 2), minimum=4), st.integers(0, 4))
def test_a_new_sample_changes_draws_only_by_its_own_items(samples, count):
    samples = make_samples(*samples)
    *others, new = samples
    before, after = SamplePool(tuple(others), 0), SamplePool(tuple(samples), 0)
    assume(any(distractors_of(sample) for sample in others))
    for sample in others:
        new_texts = {p.text for p in new.passages}
        old, more = ({p.text for p in pool.draw_passages("x", sample, count)} for pool in (before, after))
        assert more <= old | new_texts
        assert len(more) >= len(old)
        old, more = (set(pool.draw_wrong_answers("x", sample, count)) for pool in (before, after))
        assert len(more) >= len(old)


@EXAMPLES
@given(sample_arguments(gold=(1, 2), minimum=3))
def test_drawn_passages_and_answers_belong_to_other_samples(samples):
    samples = make_samples(*samples)
    pool = SamplePool(tuple(samples), 0)
    for sample in samples:
        drawn = pool.draw_passages("x", sample, 6)
        assert drawn[:2] == pool.draw_passages("x", sample, 2)
        assert len({p.text for p in drawn}) == len(drawn)
        for passage in drawn:
            assert not passage.gold
            assert not passage.evidence
            assert passage.text not in [p.text for p in sample.passages]
            assert passage.title not in [p.title for p in gold(sample)]
            assert f" {normalise(sample.answers[0])} " not in f" {normalise(passage.text)} "
        wrong = pool.draw_wrong_answers("x", sample, 6)
        assert wrong[:1] == pool.draw_wrong_answers("x", sample, 1)
        assert len(set(wrong)) == len(wrong)
        assert all(normalise(sample.answers[0]) not in normalise(value) for value in wrong)


def test_wrong_answers_have_the_same_relation():
    samples = TWINS["reading-5"]
    answers = {
        s.meta["relation"]: {o.answers[0] for o in samples if o.meta["relation"] == s.meta["relation"]} for s in samples
    }
    for sample in samples:
        others = answers[sample.meta["relation"]] - set(sample.answers)
        assert set(SamplePool(tuple(samples), 0).draw_wrong_answers("x", sample, len(others))) == others


def test_numbers_replace_numbers():
    def make_sample(id: str, answer: str) -> Sample:
        return Sample(id, "When?", (answer,), (Passage("", f"It was in {answer}.", True),))

    samples = [
        make_sample(str(number), answer) for number, answer in enumerate(["1901", "spring", "autumn", "1950", "winter"])
    ]
    assert SamplePool(tuple(samples), 0).draw_wrong_answers("x", samples[0], 1) == ["1950"]
    assert set(SamplePool(tuple(samples), 0).draw_wrong_answers("x", samples[0], 9)) == {
        "1950",
        "spring",
        "autumn",
        "winter",
    }


def test_gold_passages_of_others_are_drawn_if_there_are_no_distractors():
    drawn = SamplePool(tuple(TWINS["reading-1"]), 0).draw_passages("x", TWINS["reading-1"][0], 5)
    texts = {p.text for sample in TWINS["reading-1"][1:] for p in sample.passages}
    assert len(drawn) == 5
    assert {p.text for p in drawn} <= texts
    assert not any(p.gold or p.evidence for p in drawn)


# --- position and needle


@EXAMPLES
@given(sample_arguments(gold=(1, 2), minimum=3), st.integers(2, 5))
def test_gold_moves_through_all_positions(samples, k):
    samples = make_samples(*samples)
    points = sweep("position", samples, documents=k)
    assert [p.name for p in points] == [*(f"gold-{i}" for i in range(k)), "closed-book", "oracle", "shuffled"]
    for place, point in enumerate(points[:k]):
        assert point.value == place
        for source, changed in pair_samples(point, samples):
            assert len(gold(source)) == 1
            assert changed.passages[place] == gold(source)[0]
            assert len(changed.passages) == k
            assert distractors_of(changed)[: len(distractors_of(source))] == distractors_of(source)[: k - 1]
            assert distractors_of(changed) == distractors_of(next(s for s in points[0].samples if s.id == changed.id))
    for source, changed in pair_samples(get_point(points, "closed-book"), samples):
        assert changed.passages == ()
        assert "gold_at" not in changed.meta
        assert source.id == changed.id
    for source, changed in pair_samples(get_point(points, "oracle"), samples):
        assert list(changed.passages) == gold(source)
    for changed, first in zip(get_point(points, "shuffled").samples, points[0].samples, strict=True):
        assert Counter(p.text for p in changed.passages) == Counter(p.text for p in first.passages)


def test_the_default_of_documents_is_the_most_frequent_number():
    samples = [
        *TWINS["reading-5"],
        *(replace(s, id=f"x{s.id}", passages=s.passages[:3]) for s in TWINS["reading-5"][:9]),
    ]
    points = build_points("position", samples)
    assert [p.name for p in points][-4] == "gold-4"
    shuffled = Counter(s.passages.index(gold(s)[0]) for s in get_point(points, "shuffled").samples)
    assert len(shuffled) == 5


def test_the_haystack_is_from_other_samples_or_its_own():
    samples = TWINS["reading-5"]
    points = build_points("needle", samples, counts=(1, 5, 20))
    assert [p.name for p in points] == [f"{key}-{n}" for n in (1, 5, 20) for key in ("first", "middle", "last")]
    for source, changed in pair_samples(get_point(points, "middle-20"), samples):
        assert len(changed.passages) == 20
        assert changed.passages[9] == gold(source)[0]
        assert not {p.text for p in distractors_of(changed)} & {p.text for p in source.passages}
    assert get_point(points, "last-1").same_as == "first-1"
    records = [
        Sample(
            str(n),
            f"What is {n}-7?",
            (f"v{n}",),
            tuple(Passage("", f"{n}-{i}: {'v' if i == 7 else 'w'}{n}", i == 7) for i in range(30)),
        )
        for n in range(3)
    ]
    points = build_points("needle", records)
    assert [p.value for p in points if p.series == "last"] == [5, 10, 25]
    for point in points:
        for source, changed in pair_samples(point, records):
            assert changed.passages.index(gold(source)[0]) == {"first": 0, "middle": (point.value - 1) // 2}.get(
                point.series, point.value - 1
            )
            assert distractors_of(changed) == [p for p in source.passages if p in distractors_of(changed)]
    smaller, larger = (get_point(points, f"first-{n}").samples[0] for n in (5, 10))
    assert set(smaller.passages) < set(larger.passages)


# --- noise


@EXAMPLES
@given(sample_arguments(gold=(1, 3), minimum=4), st.sampled_from(["random", "kept"]))
def test_noise_adds_distractors_of_its_type(samples, place):
    samples = make_samples(*samples)
    points = sweep("noise", samples, gold=place)
    known = {p.text for sample in samples for p in sample.passages}
    for point in points:
        type = point.series.removesuffix("-fixed")
        for source, changed in pair_samples(point, samples):
            assert type == "dated" or gold(changed) == gold(source)
            assert all(not p.evidence for p in distractors_of(changed))
            own = [p.text for p in distractors_of(source)]
            new = [p.text for p in distractors_of(changed)]
            assert len(set(new) - set(own)) == len([t for t in new if t not in own])
            if not point.series.endswith("-fixed"):
                assert len(new) == point.value
                if type == "own":
                    assert new[: len(own)] == own[: int(point.value)]
                if type == "random":
                    assert not set(new) & set(own)
                assert type in ("counterfactual", "dated") or set(new) <= known
            for text in new:
                assert type == "own" or not find_answers(text, source.answers)
    fixed = [p for p in points if p.series.endswith("-fixed")]
    for series in {p.series for p in fixed}:
        assert len({len(s.passages) for p in fixed if p.series == series for s in p.samples}) == 1


def test_counterfactual_copies_differ_only_in_the_answer():
    samples = TWINS["two-hop"]
    points = build_points("noise", samples, distractors="counterfactual", counts=(0, 3), lengths="growing")
    for source, changed in pair_samples(get_point(points, "counterfactual-3"), samples):
        (answering,) = [p for p in gold(source) if evidence(replace(source, passages=(p,))) == [source.answers[0]]]
        pattern = re.escape(answering.text).replace(re.escape(source.answers[0]), "(.+)")
        assert all(re.fullmatch(pattern, p.text) for p in distractors_of(changed))
        assert len({p.text for p in distractors_of(changed)}) == 3


def parse_year(passage: Passage) -> tuple[int, str]:
    """Return the year that a passage states, and the text after it."""
    match = re.fullmatch(r"Last updated in (\d{4})\. (.+)", passage.text, re.DOTALL)
    assert match
    return int(match[1]), match[2]


def check_dated(points: list[Point], samples: list[Sample]) -> None:
    """Restate the series: one gold passage has a year, its copies earlier ones, and nothing else changes."""
    for point in points:
        for source, changed, first in zip(
            (s for s in samples if s.id in {c.id for c in point.samples}), point.samples, points[0].samples, strict=True
        ):
            assert gold(changed) == gold(first)  # the year of the gold passage is the same in all points
            ((old, new),) = [(a, b) for a, b in zip(gold(source), gold(changed), strict=True) if a != b]
            year, text = parse_year(new)
            assert (text, new.title) == (old.text, old.title)
            assert [new.text[a:b] for a, b in new.evidence] == [old.text[a:b] for a, b in old.evidence]
            spans = find_answers(old.text, source.answers)
            assert spans
            pieces = [old.text[a:b] for (_, a), (b, _) in pairwise([(0, 0), *spans, (len(old.text),) * 2])]
            copies = [p for p in distractors_of(changed) if p.text.startswith("Last updated in ")]
            assert len(copies) == point.value
            for copy in copies:
                copy_year, copy_text = parse_year(copy)
                assert copy_year < year
                pattern = re.escape(pieces[0]) + "(?P<value>.+)" + "(?P=value)".join(map(re.escape, pieces[1:]))
                assert re.fullmatch(pattern, copy_text)["value"] not in source.answers
            assert str(year) not in source.answers
    for smaller, larger in pairwise([p for p in points if p.series == "dated"]):
        for a, b in zip(smaller.samples, larger.samples, strict=True):
            assert set(a.passages) < set(b.passages)


def test_dated_copies_have_earlier_years_than_the_gold_passage():
    for name in ("reading-1", "reading-5", "two-hop", "contradicted"):
        points = build_points("noise", read_samples(f"twin:{name}", 40), distractors="dated", counts=(0, 1, 4))
        assert [p.name for p in points] == [f"dated{mode}-{n}" for mode in ("", "-fixed") for n in (0, 1, 4)]
        check_dated(points, read_samples(f"twin:{name}", 40))


def test_dated_copies_of_a_passage_that_states_a_year():
    samples = [
        Sample(str(year), "When?", (str(year),), (Passage("", f"It was in {year}. Yes, {year}!", True),))
        for year in range(2008, 2022)
    ]
    check_dated(build_points("noise", samples, distractors="dated", counts=(0, 2, 8), lengths="growing"), samples)


def test_noise_has_up_to_48_distractors_of_every_type():
    samples = read_samples("twin:reading-5", 120)
    points = build_points("noise", samples, counts=(0, 32, 48), lengths="growing")
    assert [p.name for p in points] == [
        f"{type}-{n}" for type in ("random", "own", "counterfactual", "dated") for n in (0, 32, 48)
    ]
    for point in points:
        assert point.left_out == 0
        assert {len(s.passages) for s in point.samples} == {1 + int(point.value)}
        assert all(len({p.text for p in s.passages}) == len(s.passages) for s in point.samples)


def test_notes_say_what_distinguishes_copies_from_gold():
    points = build_points("noise", TWINS["reading-5"], counts=2, lengths="growing")
    notes = {p.series: p.note for p in points}
    assert notes["counterfactual"].endswith("that state another value; nothing distinguishes them from it")
    assert notes["dated"].endswith("that state another value and an earlier year than it")
    (layout,) = build_points("layout", TWINS["two-hop"], layouts="contradicted")
    assert "nothing distinguishes the two" in layout.note


def test_years_of_older_versions_are_earlier():
    for seed in range(200):
        newest, older = draw_years(Random(seed), 6)
        assert newest in YEARS
        assert all(year in YEARS and year < newest for year in older)
        assert draw_years(Random(seed), 3) == (newest, older[:3])
        without = {str(year) for year in YEARS[1:-1]}
        assert draw_years(Random(seed), 2, without) == (YEARS[-1], [YEARS[0]] * 2)
    assert {draw_years(Random(seed), 0)[0] for seed in range(200)} == set(YEARS[1:])
    assert draw_years(Random(0), 4, map(str, YEARS)) == draw_years(Random(0), 4)


def test_at_fixed_length_noise_replaces_harmless_passages():
    samples = TWINS["reading-5"]
    points = build_points("noise", samples, counts=(0, 1, 4), total=8, lengths="fixed")
    types = ("own", "counterfactual", "dated")
    assert [p.name for p in points] == [f"{type}-fixed-{n}" for type in types for n in (0, 1, 4)]
    for series in types[:2]:
        none, one, four = (get_point(points, f"{series}-fixed-{n}") for n in (0, 1, 4))
        for source, a, b, c in zip(samples, none.samples, one.samples, four.samples, strict=True):
            assert len(a.passages) == len(b.passages) == len(c.passages) == 8
            assert [x == y for x, y in zip(a.passages, b.passages, strict=True)].count(False) == 1
            assert [x == y for x, y in zip(a.passages, c.passages, strict=True)].count(False) == 4
            assert {p.text for p in a.passages} & {p.text for p in source.passages} == {gold(source)[0].text}
            assert a.passages.index(gold(source)[0]) == c.passages.index(gold(source)[0])
            if series == "own":
                assert set(distractors_of(c)) >= set(distractors_of(source))


def test_gold_keeps_its_position_or_gets_a_random_one():
    samples = read_samples("twin:reading-5", 40)
    for n in (2, 8):
        point = build_points("noise", samples, distractors="own", counts=n, lengths="growing", gold="kept")[0]
        for source, changed in pair_samples(point, samples):
            assert changed.passages.index(gold(source)[0]) == min(n, source.passages.index(gold(source)[0]))
    anywhere = build_points("noise", samples, distractors="own", counts=4, lengths="growing")[0]
    assert {s.passages.index(gold(s)[0]) for s in anywhere.samples} == set(range(5))


def test_retrieved_distractors_come_first_and_do_not_answer():
    samples = TWINS["two-hop"]

    def retrieve(question: str) -> list[Passage]:
        (sample,) = [s for s in samples if s.question == question]
        answering = Passage("", f"{sample.answers[0]} it is.", True)
        other = next(s for s in samples if s is not sample)
        return [*gold(sample), answering, Passage("", question, True, ((0, 1),)), distractors_of(other)[0]]

    points = build_points(
        "noise", samples, retrieve=retrieve, lengths="growing", counts=(1, 20), distractors=("own", "retrieved")
    )
    assert [p.name for p in points] == ["own-1", "own-20", "retrieved-1", "retrieved-20"]
    for source, changed in pair_samples(get_point(points, "retrieved-20"), samples):
        first, *others = distractors_of(changed)
        assert first == Passage("", source.question)
        assert len({p.text for p in others}) == 19
        assert not {p.text for p in others} & {p.text for p in source.passages}
    default_points = build_points("noise", samples, retrieve=retrieve, lengths="growing", counts=1)
    assert [p.series for p in default_points] == ["random", "own", "retrieved", "counterfactual", "dated"]


# --- layout


def indices(sample: Sample, passages: list[Passage]) -> list[int]:
    return [sample.passages.index(passage) for passage in passages]


@EXAMPLES
@given(sample_arguments(gold=(1, 3), minimum=3))
def test_hops_are_arranged_by_the_layout(samples):
    samples = make_samples(*samples)
    points = sweep("layout", samples)
    assert [p.name for p in points] == list(LAYOUTS)
    for source, changed in pair_samples(get_point(points, "given"), samples):
        assert changed == source
    for name in ("adjacent", "separated", "reversed"):
        for source, changed in pair_samples(get_point(points, name), samples):
            assert Counter(changed.passages) == Counter(source.passages)
            assert distractors_of(changed) == distractors_of(source)
            assert gold(changed) == (order_hops(source)[::-1] if name == "reversed" else order_hops(source))
            places = [i for i, p in enumerate(changed.passages) if p.gold]
            if name == "separated":
                gaps = [b - a for a, b in pairwise(places)]
                assert (places[0], places[-1]) == (0, len(changed.passages) - 1)
                assert max(gaps) - min(gaps) <= 1
            else:
                assert places == list(range(places[0], places[0] + len(places)))
    for forward, backward in zip(
        get_point(points, "adjacent").samples, get_point(points, "reversed").samples, strict=True
    ):
        assert [p.gold for p in forward.passages] == [p.gold for p in backward.passages]
    for source, changed in pair_samples(get_point(points, "split"), samples):
        assert distractors_of(changed) == distractors_of(source)
        assert len(gold(changed)) > len(gold(source))
        assert " ".join(p.text for p in changed.passages) == " ".join(p.text for p in source.passages)
    for source, changed in pair_samples(get_point(points, "duplicated"), samples):
        assert distractors_of(changed) == distractors_of(source)
        assert Counter(gold(changed)) == Counter(gold(source) * 2)
    for source, changed in pair_samples(get_point(points, "contradicted"), samples):
        (copy,) = Counter(changed.passages) - Counter(source.passages)
        assert not copy.gold
        assert not copy.evidence
        assert not find_answers(copy.text, source.answers)
        assert [p for p in changed.passages if p != copy] == list(source.passages)


@pytest.mark.parametrize("documents", [3, 5, 16, 32])
def test_layouts_can_have_more_passages(documents):
    samples = read_samples("twin:two-hop", 60)
    points = build_points("layout", samples, documents=documents)
    assert [p.name for p in points] == list(LAYOUTS)
    given = get_point(points, "given")
    assert given.left_out == 0
    assert given.note == f"as given, among {documents} documents"
    others = {p.text for sample in samples for p in distractors_of(sample)}
    first_places = []
    for source, changed in pair_samples(given, samples):
        assert len(changed.passages) == documents
        assert gold(changed) == gold(source)
        own = [p for p in changed.passages if p in source.passages]
        assert distractors_of(replace(source, passages=tuple(own))) == distractors_of(source)[: documents - 2]
        assert own == [p for p in source.passages if p in own]
        for passage in changed.passages:
            if passage not in own:
                assert passage.text in others
                assert not find_answers(passage.text, source.answers)
        assert len({p.text for p in changed.passages}) == documents
        first_places.append(changed.passages.index(gold(changed)[0]))
    assert max(first_places) > documents / 2 - 2
    for name in ("adjacent", "separated", "reversed"):
        for source, changed in zip(given.samples, get_point(points, name).samples, strict=True):
            assert Counter(changed.passages) == Counter(source.passages)
            assert distractors_of(changed) == distractors_of(source)
            assert gold(changed) == (order_hops(source)[::-1] if name == "reversed" else order_hops(source))
    if documents == 5:
        assert list(given.samples) == samples


def test_more_passages_keep_the_order_of_the_file():
    hops = tuple(Passage(name, f"{name}. It is X.", True) for name in "abc")
    meta = {"question_decomposition": [{"paragraph_support_idx": place} for place in (2, 0, 1)]}
    sample = Sample("q", "What?", ("X",), (*hops, Passage("d", "d.")), meta)
    other = Sample("r", "Who?", ("Y",), tuple(Passage("", f"{n} is here.") for n in range(9)))
    (point,) = build_points("layout", [sample, other], layouts="adjacent", documents=10)
    assert [p.title for p in point.samples[0].passages if p.gold] == ["c", "a", "b"]
    assert len(point.samples[0].passages) == 10


def test_the_answering_hop_is_last():
    for sample in TWINS["two-hop"]:
        first, last = order_hops(sample)
        assert evidence(replace(sample, passages=(last,))) == list(sample.answers)
        assert evidence(replace(sample, passages=(first,))) == [last.title]


def test_the_order_of_the_file_is_used_if_given():
    hops = tuple(Passage(name, f"{name}. It is X.", True) for name in "abc")
    steps = [{"paragraph_support_idx": place} for place in (2, 0, 1)]
    sample = Sample("q", "What?", ("X",), (*hops, Passage("d", "d.")), {"question_decomposition": steps})
    assert [p.title for p in order_hops(sample)] == ["c", "a", "b"]
    assert [p.title for p in order_hops(replace(sample, meta={"question_decomposition": steps[:2]}))] == ["a", "b", "c"]


def test_passages_are_split_between_sentences_and_outside_evidence():
    passage = Passage("t", "One is here. Two is there. Three is nowhere now.", True, ((0, 3), (27, 32)))
    assert [p.text for p in split_passage(passage)] == ["One is here. Two is there.", "Three is nowhere now."]
    assert [p.evidence for p in split_passage(passage)] == [((0, 3),), ((0, 5),)]
    across = replace(passage, evidence=((15, 30),))
    assert [(p.text, p.evidence) for p in split_passage(across)] == [
        ("One is here.", ()),
        ("Two is there. Three is nowhere now.", ((2, 17),)),
    ]
    assert split_passage(replace(passage, text="One e.g. this", evidence=())) == [
        replace(passage, text="One e.g. this", evidence=())
    ]


# --- placement, shots and masks


def test_the_question_has_four_placements():
    points = build_points("query", TWINS["reading-5"])
    assert [(p.name, p.placement) for p in points] == [(n, n) for n in ("before", "after", "both", "middle")]
    assert all(list(p.samples) == TWINS["reading-5"] for p in points)
    assert len(build_points("query", TWINS["reading-1"], placements=("before", "after"))) == 2


def test_shots_and_masks_leave_the_samples_unchanged():
    samples = read_samples("twin:few-shot", 3)
    assert [(p.name, p.shots, p.value) for p in build_points("shots", samples)] == [
        (f"shots-{n}", n, n) for n in (0, 1, 2, 4, 8)
    ]
    points = build_points("masks", samples, counts=(0, 16))
    assert [(p.name, p.extra_masks, p.filler, p.same_as) for p in points] == [
        ("masks-0", 0, "", ""),
        ("masks-16", 16, "", ""),
        ("filler-0", 0, "", "masks-0"),
        ("filler-16", 0, " ." * 16, ""),
    ]
    assert [p.value for p in build_points("masks", samples)] == [0, 8, 16, 32, 64, 128] * 2
    assert all(list(p.samples) == samples for p in points)


# --- dirty


@EXAMPLES
@given(sample_arguments(gold=(1, 3), minimum=3), st.sampled_from(sorted(TRANSFORMS)))
def test_level_0_changes_nothing(samples, name):
    samples = make_samples(*samples)
    (point,) = sweep("dirty", samples, transforms=name, levels=0)
    assert all(source is changed for source, changed in pair_samples(point, samples))


@pytest.mark.parametrize("name", ["typos", "ocr"])
@EXAMPLES
@given(sample_arguments(gold=(1, 3), minimum=2), st.sampled_from([0.1, 0.5, 1]))
def test_corruption_of_passages_leaves_answers_intact(name, samples, level):
    samples = make_samples(*samples)
    (point,) = sweep("dirty", samples, transforms=name, levels=level)
    for source, changed in pair_samples(point, samples):
        assert [(p.title, p.gold) for p in changed.passages] == [(p.title, p.gold) for p in source.passages]
        for old, new in zip(source.passages, changed.passages, strict=True):
            assert len(find_answers(new.text, source.answers)) >= len(find_answers(old.text, source.answers)) * old.gold
            if level == 1:
                assert new.text != old.text


@pytest.mark.parametrize("name", ["typos-question", "ocr-question"])
def test_corruption_of_the_question_leaves_passages_intact(name):
    (point,) = build_points("dirty", TWINS["unanswerable"], transforms=name, levels=0.2)
    differs = [source.question != changed.question for source, changed in pair_samples(point, TWINS["unanswerable"])]
    assert sum(differs) > len(differs) / 2
    assert all(source.passages == changed.passages for source, changed in pair_samples(point, TWINS["unanswerable"]))


def test_corruption_grows_with_its_level():
    text = " ".join(FACTS * 50)
    for damage, places in ((make_typos, sum(c.isalpha() for c in text)), (make_ocr_errors, None)):
        counts = [len(damage(text, set(), level, make_rng(0))) for level in (0.05, 0.1, 0.2, 1)]
        assert counts == sorted(set(counts))
        if places:
            assert counts[1] == pytest.approx(0.1 * places, rel=0.2)


@EXAMPLES
@given(st.text(st.sampled_from("abMrnlI1O0- .\n'é木"), max_size=40), st.data(), st.sampled_from([0.3, 1]))
def test_typos_change_letters_and_ocr_changes_similar_shapes(text, data, level):
    protected = data.draw(st.sets(st.integers(0, 40)))
    for damage in (make_typos, make_ocr_errors):
        edits = sorted(damage(text, protected, level, make_rng("x")))
        assert all(a[1] <= b[0] for a, b in pairwise(edits))
        for start, stop, new in edits:
            assert protected.isdisjoint(range(start, stop))
            if damage is make_typos:
                assert text[start:stop].isalpha()
                assert new.isalpha() or not new
                assert new != text[start:stop]
        assert not text.strip() or edit_text(text, edits).strip()
    for start, stop, new in make_ocr_errors(text, protected, level, make_rng("x")):
        pair_samples = ["rn m", "m rn", "l 1", "l I", "1 l", "1 I", "I l", "I 1", "O 0", "0 O"]
        assert f"{text[start:stop]} {new}" in pair_samples or (text[start:stop], new) in [
            (" ", "\n"),
            ("-", "-\n"),
            ("-", ""),
            ("", "-\n"),
        ]


def test_typos_are_neighbours_swaps_and_drops():
    assert all(
        stop == start + 1 and start % 2
        for start, stop, _ in make_typos("modern" * 300, set(range(0, 1800, 2)), 1, make_rng(0))
    )
    edits = make_typos("modern" * 300, set(), 0.3, make_rng(0))
    kinds = Counter((stop - start, len(new)) for start, stop, new in edits)
    assert set(kinds) == {(1, 1), (2, 2), (1, 0)}
    for start, stop, new in edits:
        old = ("modern" * 300)[start:stop]
        if (len(old), len(new)) == (1, 1):
            assert new in {"m": "njk", "o": "ipkl", "d": "sferxc", "e": "wrsd", "r": "etdf", "n": "bmhj"}[old]
        elif len(old) == 2:
            assert new == old[::-1]


def test_ocr_makes_all_kinds_of_errors():
    text = "rn m l 1 I O 0 well-known " * 100
    errors = {(text[start:stop], new) for start, stop, new in make_ocr_errors(text, set(), 1, make_rng(0))}
    assert errors == {
        *(("rn", "m"), ("m", "rn"), ("l", "1"), ("l", "I"), ("1", "l"), ("1", "I"), ("I", "l"), ("I", "1")),
        *(("O", "0"), ("0", "O"), (" ", "\n"), ("-", "-\n"), ("-", "")),
    }
    broken = sorted(make_ocr_errors("rnrnrnrn sturdily " * 100, set(), 1, make_rng(0)))
    assert ("", "-\n") in {(text[start:stop], new) for start, stop, new in broken}
    assert all(a[1] <= b[0] for a, b in pairwise(broken))


def test_a_gold_passage_without_evidence_is_cut_after_the_answer():
    passages = (Passage("", "It is X. There is more to tell of X.", True), Passage("", "It is all there is."))
    samples = [Sample(str(n), "What?", ("X",), passages) for n in range(20)]
    (point,) = build_points("dirty", samples, transforms="truncated", levels=1)
    cuts = {tuple(p.text for p in sample.passages) for sample in point.samples}
    assert len({first for first, _ in cuts}) > 5
    assert all(first.startswith("It is X") and second.startswith("It") for first, second in cuts)
    unknown = [replace(sample, answers=("Y",)) for sample in samples]
    (point,) = build_points("dirty", unknown, transforms="truncated", levels=1)
    assert all(sample.passages[0] == passages[0] and sample.passages[1] != passages[1] for sample in point.samples)


@EXAMPLES
@given(sample_arguments(gold=(1, 3), minimum=2))
def test_truncated_passages_keep_their_evidence(samples):
    samples = make_samples(*samples)
    (point,) = sweep("dirty", samples, transforms="truncated", levels=1)
    for source, changed in pair_samples(point, samples):
        for old, new in zip(source.passages, changed.passages, strict=True):
            assert old.text.startswith(new.text)
            assert (new.title, new.gold, new.evidence) == (old.title, old.gold, old.evidence)
            assert not old.gold or bool(find_answers(new.text, source.answers)) == bool(
                find_answers(old.text, source.answers)
            )
            assert old.gold or new.text != old.text


@EXAMPLES
@given(sample_arguments(gold=(1, 3), minimum=2), st.sampled_from([0.5, 1]))
def test_duplicated_passages_occur_twice(samples, level):
    samples = make_samples(*samples)
    (point,) = sweep("dirty", samples, transforms="duplicated", levels=level)
    for source, changed in pair_samples(point, samples):
        extra = Counter(changed.passages) - Counter(source.passages)
        assert extra <= Counter(source.passages)
        assert level < 1 or extra == Counter(source.passages)
        left = iter(changed.passages)
        assert all(passage in left for passage in source.passages)


@EXAMPLES
@given(sample_arguments(gold=(1, 3), minimum=2))
def test_boilerplate_surrounds_a_passage(samples):
    samples = make_samples(*samples)
    (point,) = sweep("dirty", samples, transforms="boilerplate", levels=1)
    for source, changed in pair_samples(point, samples):
        for old, new in zip(source.passages, changed.passages, strict=True):
            above, below = new.text.split(old.text)
            assert above.endswith("\n")
            assert below.startswith("\n")
            assert (new.title, new.gold) == (old.title, old.gold)


def test_boilerplate_does_not_contain_the_answer():
    sample = Sample("q", "What?", ("home", "Search", "no"), (Passage("", "It is home.", True),) * 40)
    (point,) = build_points("dirty", [sample], transforms="boilerplate", levels=1)
    assert not any(re.search("Home|Search|No$", p.text) for p in point.samples[0].passages)


@pytest.mark.parametrize("name", ["reading-5", "two-hop", "contradicted"])
def test_a_stale_version_is_next_to_the_newer_one(name):
    (point,) = build_points("dirty", TWINS[name], transforms="stale", levels=1)
    before = 0
    for source, changed in pair_samples(point, TWINS[name]):
        (stale,) = [p for p in distractors_of(changed) if p not in source.passages]
        (newer,) = [p for p in gold(changed) if p not in source.passages]
        i, j = changed.passages.index(stale), changed.passages.index(newer)
        assert abs(i - j) == 1
        before += i < j
        old_year, old_text = re.fullmatch(r"Last updated in (\d+)\. (.*)", stale.text).groups()
        new_year, new_text = re.fullmatch(r"Last updated in (\d+)\. (.*)", newer.text).groups()
        assert int(old_year) < int(new_year)
        assert new_text in [p.text for p in gold(source)]
        assert old_text not in [p.text for p in source.passages]
        assert not find_answers(old_text, source.answers)
        assert [p for p in changed.passages if p not in (stale, newer)] == [
            p for p in source.passages if p.text != new_text
        ]
    assert 0 < before < len(point.samples)


# --- passage edits


@EXAMPLES
@given(st.lists(st.integers(0, 5)), st.integers(0, 5))
def test_interleaving_keeps_both_orders(gaps, count):
    gaps = sorted(gap for gap in gaps if gap <= count)
    golds, others = [Passage("g", str(i), True) for i in range(len(gaps))], [Passage("r", str(i)) for i in range(count)]
    merged = interleave(golds, others, gaps)
    assert [p for p in merged if p.gold] == golds
    assert [p for p in merged if not p.gold] == others
    assert [sum(not q.gold for q in merged[:i]) for i, p in enumerate(merged) if p.gold] == gaps


@EXAMPLES
@given(
    st.text("abc", min_size=8, max_size=8),
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 5, 6, 7]), st.text("x", max_size=3))),
)
def test_evidence_moves_with_its_text(text, insertions):
    passage = Passage("", text, True, ((3, 5),))
    edits = [(start, start + (start not in (3, 5)), new) for start, new in dict(insertions).items()]
    ((start, stop),) = edit_passage(passage, edits).evidence
    assert edit_passage(passage, edits).text[start:stop] == text[3:5]


def test_answers_are_found_as_whole_words():
    assert find_answers("A red, shared Red house in C++.", ("red", "RED house", "c++", "")) == [
        (2, 5),
        (14, 23),
        (27, 30),
    ]


# --- errors

SAMPLES = TWINS["reading-5"]


@pytest.mark.parametrize(
    ("kind", "samples", "options", "message"),
    [
        (
            "positon",
            SAMPLES,
            {},
            r"unknown kind of stress test 'positon' \(did you mean 'position'\?\); allowed:",
        ),
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
        (
            "noise",
            SAMPLES,
            {"distractors": "dated", "counts": 10**11},
            r"counts goes up to 10+, and there are \d+ dated",
        ),
        ("noise", SAMPLES, {"total": 3}, "total=3 passages cannot hold 1 gold ones and 16 others"),
        (
            "noise",
            SAMPLES,
            {"total": 9999},
            r"fixed length needs 9999 passages, and there are harmless ones for",
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
        (
            "layout",
            TWINS["two-hop"][:1],
            {},
            "an answer of another sample that can replace its own, which the sample lacks",
        ),
        (
            "layout",
            TWINS["two-hop"],
            {"documents": 1},
            "layout needs room for .* documents=1, which all 12",
        ),
        (
            "layout",
            TWINS["two-hop"],
            {"documents": 999},
            "documents=999, .* lack; give another number, or more",
        ),
        ("layout", TWINS["two-hop"], {"documents": (5, 9)}, "documents takes one value, got 2: 5, 9"),
        ("position", TWINS["two-hop"], {}, "needs exactly one gold passage, which all 12 samples lack"),
        ("position", TWINS["reading-1"], {}, "there would be 1 document; give more: documents=5"),
        ("position", SAMPLES, {"documents": 9999}, "position needs 9998 passages besides the gold one, which all 12"),
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
            "whose text contains one of the answers, .* or leave stale out of `transforms`",
        ),
        (
            "dirty",
            read_samples("twin:few-shot", 2),
            {},
            'give "passages", or choose a transform of the question: transforms="typos-question"',
        ),
        ("dirty", [], {}, "there are no samples"),
        ("dirty", [SAMPLES[0], SAMPLES[0]], {}, "several samples have the id 'reading-5-0'"),
    ],
)
def test_errors_are_one_sentence(kind, samples, options, message):
    with pytest.raises(UserError, match=message) as caught:
        build_points(kind, samples, **options)
    assert "\n" not in str(caught.value)


def test_requirements_that_no_sample_meets_together_are_an_error():
    answering = Sample("a", "Q?", ("X",), (Passage("", "X is", True), Passage("", "Y is", True), Passage("", "Z.")))
    other = Sample("b", "Q?", ("no",), (Passage("", "One. Two.", True), Passage("", "Y is", True), Passage("", "Z.")))
    with pytest.raises(UserError, match="and no sample has all of it"):
        build_points("layout", [answering, other], layouts=("split", "contradicted"))
    assert build_points("layout", [answering, other], layouts="split")[0].left_out == 1


def test_every_kind_has_a_description():
    for kind in KINDS.values():
        assert kind.title
        assert kind.description.endswith(".")
        assert kind.options
