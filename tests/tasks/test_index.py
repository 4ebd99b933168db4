"""An index gives back what was added through kills, reopening and repetition, and takes any question."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floatscope.errors import UserError
from floatscope.tasks.index import ENGINE, SEGMENT, Added, Hit, Index, passage_id

MIRA = ("m", "Mira", "Mira lives in Velmora, a town by the sea.")
TOVE = ("t", "Tove Ås", "Tove was baking breads for the sailors.")
OLAF = (None, "", "Olaf has neither a title nor an id; he is a painter.")
WORDS = [f"{a}{b}{c}" for a in "kmpt" for b in "aeiou" for c in "lnrs"]


def made(count: int) -> list[tuple[str, str, str]]:
    """Passages of drawn words, many of which score alike."""
    draw = random.Random(0)
    return [(f"id-{i}", draw.choice(WORDS), " ".join(draw.choices(WORDS, k=12))) for i in range(count)]


QUESTIONS = ["kal", "kal men", "tus pir mol?", "what is a kan or a ter", " ".join(WORDS[:20])]


def told(index: Index, k: int = 20) -> list[list[tuple[str, str, str, float]]]:
    """What the questions find; scores to six figures, since the engine adds in any order."""
    found = index.search_many(QUESTIONS, k)
    return [[(hit.id, hit.title, hit.text, pytest.approx(hit.score, rel=1e-5)) for hit in hits] for hits in found]


def plain(index: Index, k: int = 20) -> list[list[tuple[str, str, str, float]]]:
    return [[(hit.id, hit.title, hit.text, hit.score) for hit in hits] for hits in index.search_many(QUESTIONS, k)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "index"


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Index:
    index = Index.create(tmp_path_factory.mktemp("asked") / "index")
    assert index.add([MIRA, TOVE, OLAF]) == Added(added=3)
    return index


@pytest.fixture
def index(asked: Index, folder: Path) -> Index:
    """A copy to write to: copying is faster than what lasts."""
    return Index.open(shutil.copytree(asked.path, folder))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Index:
    index = Index.create(tmp_path_factory.mktemp("unbroken") / "index")
    index.add(made(2000))
    return index


# What is added is found -----------------------------------------------------------------------------------------------


def test_what_is_added_is_found_also_after_reopening(index, folder):
    for opened in (index, Index.open(folder), Index.create(folder, exist_ok=True)):
        (hit,) = opened.search("Where does Mira live?")
        assert (hit.id, hit.title, hit.text) == MIRA
        assert hit.score > 0
        assert opened.get("t") == Hit(*TOVE, 0.0)
        assert opened.search("zzz") == []
        assert opened.stat().passages == 3


@pytest.mark.parametrize(
    ("question", "id"),
    [
        ("VELMORA", "m"),
        ("towns", "m"),  # stems
        ("Who baked bread?", "t"),
        ("sailor's", "t"),
        ("As", "t"),  # without accents; a stop word, but alone
        ("tove ås", "t"),
        ("Painters!", passage_id("", OLAF[2])),
    ],
)
def test_words_are_found_by_their_stem_in_title_and_text(index, question, id):
    assert index.search(question)[0].id == id


def test_more_and_rarer_words_rank_higher(folder):
    index = Index.create(folder)
    index.add([(str(i), "", f"common word number{i}") for i in range(20)] + [("x", "", "common word rare number3")])
    assert [hit.id for hit in index.search("a rare common number3 word", 2)] == ["x", "3"]
    assert len(index.search("common", 100)) == 21
    scores = [hit.score for hit in index.search("common number7 rare", 21)]
    assert scores == sorted(scores, reverse=True)


def test_adding_twice_adds_nothing(index, folder):
    before = plain(index)
    files = sorted(os.listdir(folder / ENGINE))
    assert index.add([MIRA, TOVE, OLAF]) == Added(unchanged=3)
    assert Index.open(folder).add([OLAF, ("new", "", "Something else.")]) == Added(added=1, unchanged=1)
    assert plain(index) == before
    assert set(files) <= set(os.listdir(folder / ENGINE))


def test_the_same_id_replaces(index, folder):
    assert index.add([("m", "Mira", "Mira has moved to Tarn."), TOVE]) == Added(replaced=1, unchanged=1)
    assert index.search("Velmora") == []
    assert [hit.text for hit in Index.open(folder).search("Mira")] == ["Mira has moved to Tarn."]
    assert index.add([("m", "Mirabel", "Mira has moved to Tarn.")]) == Added(replaced=1)  # the title counts too
    assert index.stat().passages == 3


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_the_last_of_one_id_stays_wherever_batches_end(folder, batch):
    index = Index.create(folder)
    given = [("a", "", "first"), ("a", "", "first"), ("b", "", "other"), ("a", "", "second"), ("a", "", "third")]
    assert index.add(given, batch=batch) == Added(added=2, replaced=2, unchanged=1)
    assert index.stat().passages == 2
    assert index.get("a").text == "third"


def test_what_is_removed_is_gone(index, folder):
    assert index.remove(["m", "m", "nobody", "x" * 100_000, "\ud800"]) == 1
    for opened in (index, Index.open(folder)):
        assert opened.search("Mira Velmora") == []
        assert opened.get("m") is None
        assert opened.stat().passages == 2
    assert index.remove(["m"]) == 0
    assert index.add([MIRA]) == Added(added=1)
    assert index.search("Velmora")[0].id == "m"


def test_an_index_may_be_emptied_and_filled_again(index):
    assert index.remove(["m", "t", passage_id("", OLAF[2])]) == 3
    assert index.search("Mira") == []
    assert index.add([MIRA]) == Added(added=1)


def test_odd_ids_and_texts_come_back_as_they_were(folder):
    odd = [("a b", "\n", "x\ty\0z"), ("ä/‮\n", "“:(", "word" * 40), ("AND", "[", "a " * 5000), ("x" * 1000, "", "…")]
    index = Index.create(folder)
    assert index.add(odd) == Added(added=4)
    assert [index.get(id) for id, _, _ in odd] == [Hit(*each, 0.0) for each in odd]
    assert index.add(odd) == Added(unchanged=4)
    assert index.remove([id for id, _, _ in odd]) == 4


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (("a", "t", " \n"), '"text" must be a text, and not an empty one'),
        ((" ", "t", "x"), '"id" must be a text of 1 to 1000 characters, or left out'),
        (("a" * 1001, "t", "x"), '"id" must be a text of 1 to 1000 characters, or left out'),
        (("a", "t", "\ud800"), "it holds half a character"),
        (("a", "\udfff", "x"), "it holds half a character"),
    ],
)
def test_a_passage_that_cannot_be_kept_is_refused(index, entry, said):
    with pytest.raises(UserError, match=said):
        index.add([entry])
    assert index.stat().passages == 3


def test_a_mistake_midway_keeps_the_committed_batches_and_frees_the_index(folder):
    index = Index.create(folder)
    with pytest.raises(UserError) as kept:  # its traceback holds the writer's frame
        index.add([("a", "", "one"), ("b", "", "two"), ("c", "", "three"), ("d", "", "")], batch=2)
    assert kept.value.__traceback__ is not None
    assert index.stat().passages == 2
    assert index.add([("c", "", "three")]) == Added(added=1)


def test_counts_are_told_after_each_commit(folder):
    heard: list[Added] = []
    Index.create(folder).add(made(25), batch=10, told=heard.append)
    assert [counts.added for counts in heard] == [10, 20, 25]


def test_a_reader_keeps_what_it_opened(index, folder):
    reader = Index.open(folder)
    index.remove(["m"])
    assert reader.search("Mira")[0].id == "m"
    assert reader.add([("n", "", "Nina")]) == Added(added=1)  # who writes sees all
    assert reader.search("Mira") == []


# Contents -------------------------------------------------------------------------------------------------------------


def digest(index: Index) -> str:
    assert index.stat().passages == len(index)
    return index.stat().digest


def test_the_digest_is_of_the_passages_and_not_of_their_history(index, folder, tmp_path):
    full = digest(index)
    assert digest(Index.open(folder)) == full
    other = Index.create(tmp_path / "other")
    for passage in (OLAF, ("x", "", "Gone again."), ("t", "Tove", "Tove rests."), TOVE, MIRA):
        other.add([passage])
    assert digest(other) != full
    assert other.remove(["x"]) == 1
    assert digest(other) == full
    other.add([TOVE, MIRA])
    assert digest(other) == full


def test_any_change_changes_the_digest(folder):
    contents = [
        [],
        [("a", "b", "c")],
        [("a", "bc", "c")],
        [("ab", "", "c")],
        [("a", "", "bc")],
        [("a", "b", "c"), ("d", "b", "c")],
        [("a", "b", "c"), ("e", "b", "c")],
    ]
    seen = set()
    for number, passages in enumerate(contents):
        index = Index.create(folder / str(number))
        index.add(passages)
        seen.add(digest(index))
    assert len(seen) == len(contents)


@given(order=st.permutations(range(6)), batch=st.integers(1, 6), gone=st.sets(st.integers(0, 5)))
@settings(max_examples=20)
def test_no_order_of_adding_and_removing_changes_the_digest(order, batch, gone, tmp_path_factory):
    passages, first, second = made(6), *(Index.create(tmp_path_factory.mktemp("d") / "i") for _ in range(2))
    first.add([passages[i] for i in order], batch=batch)
    first.remove([f"id-{i}" for i in gone])
    second.add([passage for i, passage in enumerate(passages) if i not in gone])
    assert digest(first) == digest(second)


def test_a_killed_and_completed_add_has_the_digest_of_an_unbroken_one(folder, unbroken):
    index = Index.create(folder)
    with pytest.raises(UserError):
        index.add([*made(2000)[:700], ("bad", "", "")], batch=300)
    assert len(index) == 600
    index.add(made(2000))
    assert digest(index) == digest(unbroken)


# Order ----------------------------------------------------------------------------------------------------------------


def test_batches_do_not_change_what_is_found(folder, unbroken):
    index, passages = Index.create(folder), made(2000)
    random.Random(1).shuffle(passages)
    index.add(passages, batch=300)
    for k in (1, 5, 20, 3000):
        assert plain(index, k) == told(unbroken, k)


def test_of_equal_passages_the_ids_decide_alone(folder):
    orders = []
    for turn in (1, -1):
        index = Index.create(folder / str(turn))
        index.add([(f"{i}", "", "all the same") for i in range(200)][::turn], batch=60)
        found = [hit.id for hit in index.search("same", 200)]
        assert sorted(found, key=int) == [str(i) for i in range(200)]
        for k in (1, 7, 150):
            assert [hit.id for hit in index.search("same", k)] == found[:k]
        orders.append(found)
    assert orders[0] == orders[1]


# Any question ---------------------------------------------------------------------------------------------------------

NASTY = ['"', ":", "text:", "(", ")", "[", "]", "{", "}", "^2", "~", "*", "?", "\\", "/", "AND", "OR", "NOT", "+", "-"]
NASTY += [
    "IN [",
    "a TO z",
    "id:m",
    "title:*",
    "😀",
    "\0",
    "\ud800",
    "ﬁ",
    "İ",
    "\u202e",
    "Mira",
    "the",
    "  ",
    "'s",
    "<=",
]


PIECES = st.one_of(st.sampled_from(NASTY), st.text(st.characters(), max_size=8))


@given(question=st.lists(PIECES, max_size=12).map(" ".join))
def test_no_question_raises(question, asked):
    hits = asked.search(question, 2)
    assert len(hits) <= 2
    if "Mira" in question.split():
        assert "m" in [hit.id for hit in hits]


@pytest.mark.parametrize("question", ["", "   ", "?!", "😀😀", "\ud800", "—"])
def test_a_question_without_words_finds_nothing(asked, question):
    assert asked.search(question) == []


def test_stop_words_count_only_alone(asked):
    assert {hit.id for hit in asked.search("is the a")} >= {"m", "t"}
    assert [hit.id for hit in asked.search("is the Velmora a")] == ["m"]


@pytest.mark.parametrize("question", ["x" * 10_000, "Mira " * 2000, "(" * 10_000, " ".join(map(str, range(2500)))])
def test_long_questions_are_answered(asked, unbroken, question):
    assert len(asked.search(question)) == ("Mira" in question)
    unbroken.search(question)


def test_k_is_checked_and_may_exceed_what_is_there(asked):
    assert len(asked.search("Mira Tove Olaf", 10**12)) == 3
    for k in (0, -1):
        with pytest.raises(UserError, match=f"k must be at least 1, got {k}"):
            asked.search("Mira", k)


# Killed ---------------------------------------------------------------------------------------------------------------

WRITER = """
import json, sys, time
from floatscope.tasks.index import Index
folder, passages, pause = sys.argv[1], json.load(open(sys.argv[2])), float(sys.argv[3])
def slowly():
    for number, passage in enumerate(passages):
        if number == 500:
            print("begun", flush=True)
        if number > 500 and number % 100 == 50:
            time.sleep(pause)
        yield tuple(passage)
Index.open(folder).add(slowly(), batch=100)
"""


@contextmanager
def writing(folder: Path, tmp_path: Path, pause: float) -> Iterator[subprocess.Popen[str]]:
    """Another process that has committed 500 passages and goes on until the block is left."""
    (tmp_path / "passages.json").write_text(json.dumps(made(2000)))
    words = [sys.executable, "-c", WRITER, str(folder), str(tmp_path / "passages.json"), str(pause)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "begun\n"
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("after", [0.0, 0.03, 0.11])
def test_a_killed_add_keeps_its_batches_and_the_same_add_completes_it(folder, tmp_path, unbroken, after):
    Index.create(folder)
    with writing(folder, tmp_path, 0.01) as child:
        time.sleep(after)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    index = Index.open(folder)
    index.check()
    kept = index.stat().passages
    assert kept % 100 == 0
    assert 500 <= kept < 2000
    for id, title, text in made(kept):
        assert index.get(id) == Hit(id, title, text, 0.0)
    assert index.get(f"id-{kept}") is None
    assert index.search(made(1)[0][2], 3)
    assert index.add(made(2000)) == Added(added=2000 - kept, unchanged=kept)
    assert plain(index) == told(unbroken)
    index.check()


def test_a_second_writer_is_refused_and_a_dead_one_is_not_waited_for(folder, tmp_path):
    index = Index.create(folder)
    with writing(folder, tmp_path, 30.0) as child:
        for write in (lambda: index.add([MIRA]), lambda: index.remove(["id-1"])):
            with pytest.raises(UserError) as refused:
                write()
            said = f"{folder} is being written by process {child.pid}: wait for it, or stop it"
            assert str(refused.value) == said
        assert Index.open(folder).search("kal")  # reading goes on
    assert index.add([MIRA]) == Added(added=1)


def test_the_same_process_is_a_second_writer_too(index, folder):
    def passages():
        with pytest.raises(UserError, match=f"is being written by process {os.getpid()}"):
            Index.open(folder).add([TOVE])
        yield ("x", "", "Something.")

    assert index.add(passages()) == Added(added=1)


def test_an_index_killed_at_birth_is_begun_anew(folder):
    Index.create(folder)
    (folder / "meta.json").rename(folder / "meta.json.part")
    with pytest.raises(UserError, match="is no index"):
        Index.open(folder)
    assert Index.create(folder).add([MIRA]) == Added(added=1)


# What is no index, or no whole one ------------------------------------------------------------------------------------


def test_what_is_no_index_is_said_so(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (folder, tmp_path, tmp_path / "file"):
        with pytest.raises(UserError) as refused:
            Index.open(path)
        assert str(refused.value) == f"{path} is no index: it has no meta.json; floatscope index add makes one"
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match=r"exists and is no index \(it has no meta.json\): give another path"):
            Index.create(path)
    assert os.listdir(tmp_path) == ["file"]


def test_passages_that_lost_their_meta_are_not_written_over(index, folder):
    (folder / "meta.json").unlink()
    with pytest.raises(UserError, match="exists and is no index"):
        Index.create(folder, exist_ok=True)
    assert list((folder / ENGINE).glob("*.store"))


def test_an_index_is_not_created_twice(index, folder):
    with pytest.raises(UserError, match="already holds an index: open it, or give another path"):
        Index.create(folder)


@pytest.mark.parametrize(
    ("format", "age", "remedy"), [(3, "a newer", "update floatscope, or make"), (1, "an older", "make")]
)
def test_another_format_is_refused(index, folder, format, age, remedy):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({"format": format}))
    with pytest.raises(UserError) as refused:
        Index.open(folder)
    assert str(refused.value) == (
        f"{folder} was written by {age} floatscope (index format {format}, and this one has 2): {remedy} the index anew"
    )
    (folder / "meta.json").write_text(json.dumps(meta))
    assert Index.open(folder).search("Mira")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 2}', '{"format": "2"}'])
def test_a_damaged_meta_is_named(index, folder, content):
    (folder / "meta.json").write_text(content)
    with pytest.raises(UserError, match=r"meta.json is damaged, or not floatscope's"):
        Index.open(folder)


@pytest.mark.parametrize("part", SEGMENT)
@pytest.mark.parametrize("how", ["missing", "cut short", "damaged"])
def test_a_damaged_file_is_named(index, folder, part, how):
    index.check()
    file = next((folder / ENGINE).glob(f"*.{part}"))
    content = bytearray(file.read_bytes())
    file.unlink()
    if how == "cut short":
        file.write_bytes(content[: len(content) // 2])
    elif how == "damaged":
        content[0] ^= 255
        file.write_bytes(content)

    def use() -> None:
        opened = Index.open(folder)
        opened.search("Mira")
        opened.check()  # a flipped bit may pass unseen till here

    with pytest.raises(UserError) as refused:
        use()
    said = f"{folder} is damaged: {ENGINE}/{file.name} is {how}; restore it from a copy, or make it anew"
    assert str(refused.value) == said


@pytest.mark.parametrize("name", ["meta.json", ".managed.json"])
def test_a_damaged_list_of_files_is_named(index, folder, name):
    (folder / ENGINE / name).write_text("{")
    with pytest.raises(UserError, match=f"is damaged: {ENGINE}/{name} is no JSON"):
        Index.open(folder)


def test_removals_are_checked_too(unbroken, folder):
    index = Index.open(shutil.copytree(unbroken.path, folder))
    index.remove(["id-7"])
    index.check()
    next((folder / ENGINE).glob("*.del")).unlink()
    with pytest.raises(UserError, match=r"\.del is missing"):
        Index.open(folder)


def test_copies_are_indexes(index, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    copy = Index.open(tmp_path / "copy")
    copy.check()
    assert copy.search("Velmora")[0].id == "m"
    assert copy.add([MIRA, ("n", "", "Nina")]) == Added(added=1, unchanged=1)
