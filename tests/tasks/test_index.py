"""The index: passages survive kills, reopening and repetition, and no question raises an error."""

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
from hypothesis import given
from hypothesis import strategies as st

from example_counts import examples
from floatscope.errors import UserError
from floatscope.tasks.index import ENGINE, SEGMENT_FILES, AddCounts, Hit, Index, passage_id

MIRA = ("m", "Mira", "Mira lives in Velmora, a town by the sea.")
TOVE = ("t", "Tove Ås", "Tove was baking breads for the sailors.")
OLAF = (None, "", "Olaf has neither a title nor an id; he is a painter.")
WORDS = [f"{a}{b}{c}" for a in "kmpt" for b in "aeiou" for c in "lnrs"]


def make_passages(count: int) -> list[tuple[str, str, str]]:
    """Return passages of random words, many of which have the same score."""
    draw = random.Random(0)
    return [(f"id-{i}", draw.choice(WORDS), " ".join(draw.choices(WORDS, k=12))) for i in range(count)]


QUESTIONS = ["kal", "kal men", "tus pir mol?", "what is a kan or a ter", " ".join(WORDS[:20])]


def search_approximately(index: Index, k: int = 20) -> list[list[tuple[str, str, str, float]]]:
    """Return the hits of all questions; scores are approximate, since the engine sums in any order."""
    results = (index.search(question, k) for question in QUESTIONS)
    return [[(hit.id, hit.title, hit.text, pytest.approx(hit.score, rel=1e-5)) for hit in hits] for hits in results]


def search_exactly(index: Index, k: int = 20) -> list[list[tuple[str, str, str, float]]]:
    return [
        [(hit.id, hit.title, hit.text, hit.score) for hit in hits]
        for hits in (index.search(question, k) for question in QUESTIONS)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "index"


@pytest.fixture(scope="module")
def shared_index(tmp_path_factory) -> Index:
    index = Index.create(tmp_path_factory.mktemp("shared") / "index")
    assert index.add([MIRA, TOVE, OLAF]) == AddCounts(added=3)
    return index


@pytest.fixture
def index(shared_index: Index, folder: Path) -> Index:
    """A copy to write to; copying is faster than building."""
    return Index.open(shutil.copytree(shared_index.path, folder))


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Index:
    index = Index.create(tmp_path_factory.mktemp("complete") / "index")
    index.add(make_passages(2000))
    return index


# Adding and removing -----------------------------------------------------------------------------------------------


def test_added_passages_are_found_after_reopening(index, folder):
    for opened in (index, Index.open(folder), Index.create(folder, exist_ok=True)):
        (hit,) = opened.search("Where does Mira live?")
        assert (hit.id, hit.title, hit.text) == MIRA
        assert hit.score > 0
        assert opened.get("t") == Hit(*TOVE, 0.0)
        assert opened.search("zzz") == []
        assert opened.stats().passages == 3


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
def test_words_match_by_stem_in_title_and_text(index, question, id):
    assert index.search(question)[0].id == id


def test_more_and_rarer_words_rank_higher(folder):
    index = Index.create(folder)
    index.add([(str(i), "", f"common word number{i}") for i in range(20)] + [("x", "", "common word rare number3")])
    assert [hit.id for hit in index.search("a rare common number3 word", 2)] == ["x", "3"]
    assert len(index.search("common", 100)) == 21
    scores = [hit.score for hit in index.search("common number7 rare", 21)]
    assert scores == sorted(scores, reverse=True)


def test_adding_twice_adds_nothing(index, folder):
    before = search_exactly(index)
    files = sorted(os.listdir(folder / ENGINE))
    assert index.add([MIRA, TOVE, OLAF]) == AddCounts(unchanged=3)
    assert Index.open(folder).add([OLAF, ("new", "", "Something else.")]) == AddCounts(added=1, unchanged=1)
    assert search_exactly(index) == before
    assert set(files) <= set(os.listdir(folder / ENGINE))


def test_the_same_id_replaces_a_passage(index, folder):
    assert index.add([("m", "Mira", "Mira has moved to Tarn."), TOVE]) == AddCounts(replaced=1, unchanged=1)
    assert index.search("Velmora") == []
    assert [hit.text for hit in Index.open(folder).search("Mira")] == ["Mira has moved to Tarn."]
    assert index.add([("m", "Mirabel", "Mira has moved to Tarn.")]) == AddCounts(replaced=1)  # the title counts too
    assert index.stats().passages == 3


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_the_last_passage_of_an_id_wins(folder, batch_size):
    index = Index.create(folder)
    given = [("a", "", "first"), ("a", "", "first"), ("b", "", "other"), ("a", "", "second"), ("a", "", "third")]
    assert index.add(given, batch_size=batch_size) == AddCounts(added=2, replaced=2, unchanged=1)
    assert index.stats().passages == 2
    assert index.get("a").text == "third"


def test_removed_passages_are_not_found(index, folder):
    assert index.remove(["m", "m", "nobody", "x" * 100_000, "\ud800"]) == 1
    for opened in (index, Index.open(folder)):
        assert opened.search("Mira Velmora") == []
        assert opened.get("m") is None
        assert opened.stats().passages == 2
    assert index.remove(["m"]) == 0
    assert index.add([MIRA]) == AddCounts(added=1)
    assert index.search("Velmora")[0].id == "m"


def test_an_index_can_be_emptied_and_filled_again(index):
    assert index.remove(["m", "t", passage_id("", OLAF[2])]) == 3
    assert index.search("Mira") == []
    assert index.add([MIRA]) == AddCounts(added=1)


def test_unusual_ids_and_texts_are_stored_exactly(folder):
    odd = [("a b", "\n", "x\ty\0z"), ("ä/‮\n", "“:(", "word" * 40), ("AND", "[", "a " * 5000), ("x" * 1000, "", "…")]
    index = Index.create(folder)
    assert index.add(odd) == AddCounts(added=4)
    assert [index.get(id) for id, _, _ in odd] == [Hit(*entry, 0.0) for entry in odd]
    assert index.add(odd) == AddCounts(unchanged=4)
    assert index.remove([id for id, _, _ in odd]) == 4


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("a", "t", " \n"), '"text" must be a text that is not empty'),
        ((" ", "t", "x"), '"id" must be a text of 1 to 1000 characters, or be left out'),
        (("a" * 1001, "t", "x"), '"id" must be a text of 1 to 1000 characters, or be left out'),
        (("a", "t", "\ud800"), "it contains half a character"),
        (("a", "\udfff", "x"), "it contains half a character"),
    ],
)
def test_invalid_passages_are_errors(index, entry, message):
    with pytest.raises(UserError, match=message):
        index.add([entry])
    assert index.stats().passages == 3


def test_an_error_keeps_committed_batches_and_releases_the_lock(folder):
    index = Index.create(folder)
    with pytest.raises(UserError) as committed:  # its traceback keeps the frame of the writer alive
        index.add([("a", "", "one"), ("b", "", "two"), ("c", "", "three"), ("d", "", "")], batch_size=2)
    assert committed.value.__traceback__ is not None
    assert index.stats().passages == 2
    assert index.add([("c", "", "three")]) == AddCounts(added=1)


def test_progress_is_reported_after_each_commit(folder):
    progress: list[AddCounts] = []
    Index.create(folder).add(make_passages(25), batch_size=10, on_progress=progress.append)
    assert [counts.added for counts in progress] == [10, 20, 25]


def test_a_reader_sees_the_state_it_opened(index, folder):
    reader = Index.open(folder)
    index.remove(["m"])
    assert reader.search("Mira")[0].id == "m"
    assert reader.add([("n", "", "Nina")]) == AddCounts(added=1)  # a writer sees everything
    assert reader.search("Mira") == []


# Contents -------------------------------------------------------------------------------------------------------------


def digest(index: Index) -> str:
    assert index.stats().passages == len(index)
    return index.stats().digest


def test_the_digest_does_not_depend_on_history(index, folder, tmp_path):
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
    digests = set()
    for number, passages in enumerate(contents):
        index = Index.create(folder / str(number))
        index.add(passages)
        digests.add(digest(index))
    assert len(digests) == len(contents)


@given(order=st.permutations(range(6)), batch_size=st.integers(1, 6), removed=st.sets(st.integers(0, 5)))
@examples(20)
def test_the_digest_does_not_depend_on_order(order, batch_size, removed, tmp_path_factory):
    passages, first, second = make_passages(6), *(Index.create(tmp_path_factory.mktemp("d") / "i") for _ in range(2))
    first.add([passages[i] for i in order], batch_size=batch_size)
    first.remove([f"id-{i}" for i in removed])
    second.add([passage for i, passage in enumerate(passages) if i not in removed])
    assert digest(first) == digest(second)


def test_an_interrupted_and_completed_add_has_the_same_digest(folder, complete):
    index = Index.create(folder)
    with pytest.raises(UserError):
        index.add([*make_passages(2000)[:700], ("bad", "", "")], batch_size=300)
    assert len(index) == 600
    index.add(make_passages(2000))
    assert digest(index) == digest(complete)


# Order ----------------------------------------------------------------------------------------------------------------


def test_batches_do_not_change_the_hits(folder, complete):
    index, passages = Index.create(folder), make_passages(2000)
    random.Random(1).shuffle(passages)
    index.add(passages, batch_size=300)
    for k in (1, 5, 20, 3000):
        assert search_exactly(index, k) == search_approximately(complete, k)


def test_ids_order_passages_of_equal_score(folder):
    orders = []
    for direction in (1, -1):
        index = Index.create(folder / str(direction))
        index.add([(f"{i}", "", "all the same") for i in range(200)][::direction], batch_size=60)
        ids = [hit.id for hit in index.search("same", 200)]
        assert sorted(ids, key=int) == [str(i) for i in range(200)]
        for k in (1, 7, 150):
            assert [hit.id for hit in index.search("same", k)] == ids[:k]
        orders.append(ids)
    assert orders[0] == orders[1]


# Any question ---------------------------------------------------------------------------------------------------------

HARD_PIECES = [
    '"',
    ":",
    "text:",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "^2",
    "~",
    "*",
    "?",
    "\\",
    "/",
    "AND",
    "OR",
    "NOT",
    "+",
    "-",
]
HARD_PIECES += [
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


PIECES = st.one_of(st.sampled_from(HARD_PIECES), st.text(st.characters(), max_size=8))


@given(question=st.lists(PIECES, max_size=12).map(" ".join))
def test_no_question_raises(question, shared_index):
    hits = shared_index.search(question, 2)
    assert len(hits) <= 2
    if "Mira" in question.split():
        assert "m" in [hit.id for hit in hits]


@pytest.mark.parametrize("question", ["", "   ", "?!", "😀😀", "\ud800", "—"])
def test_a_question_without_words_finds_nothing(shared_index, question):
    assert shared_index.search(question) == []


def test_stop_words_count_only_without_other_words(shared_index):
    assert {hit.id for hit in shared_index.search("is the a")} >= {"m", "t"}
    assert [hit.id for hit in shared_index.search("is the Velmora a")] == ["m"]


@pytest.mark.parametrize("question", ["x" * 10_000, "Mira " * 2000, "(" * 10_000, " ".join(map(str, range(2500)))])
def test_long_questions_are_answered(shared_index, complete, question):
    assert len(shared_index.search(question)) == ("Mira" in question)
    complete.search(question)


def test_k_is_checked_and_may_exceed_the_passages(shared_index):
    assert len(shared_index.search("Mira Tove Olaf", 10**12)) == 3
    for k in (0, -1):
        with pytest.raises(UserError, match=f"k must be at least 1, got {k}"):
            shared_index.search("Mira", k)


# Killed ---------------------------------------------------------------------------------------------------------------

WRITER = """
import json, sys, time
from floatscope.tasks.index import Index
folder, passages, pause = sys.argv[1], json.load(open(sys.argv[2])), float(sys.argv[3])
def slowly():
    for number, passage in enumerate(passages):
        if number == 500:
            print("started", flush=True)
        if number > 500 and number % 100 == 50:
            time.sleep(pause)
        yield tuple(passage)
Index.open(folder).add(slowly(), batch_size=100)
"""


@contextmanager
def start_writer(folder: Path, tmp_path: Path, pause: float) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has committed 500 passages and continues until the block ends."""
    (tmp_path / "passages.json").write_text(json.dumps(make_passages(2000)))
    command = [sys.executable, "-c", WRITER, str(folder), str(tmp_path / "passages.json"), str(pause)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "started\n"
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("after", [0.0, 0.03, 0.11])
def test_a_killed_add_keeps_its_batches_and_can_be_completed(folder, tmp_path, complete, after):
    Index.create(folder)
    with start_writer(folder, tmp_path, 0.01) as child:
        time.sleep(after)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    index = Index.open(folder)
    index.check()
    committed = index.stats().passages
    assert committed % 100 == 0
    assert 500 <= committed < 2000
    for id, title, text in make_passages(committed):
        assert index.get(id) == Hit(id, title, text, 0.0)
    assert index.get(f"id-{committed}") is None
    assert index.search(make_passages(1)[0][2], 3)
    assert index.add(make_passages(2000)) == AddCounts(added=2000 - committed, unchanged=committed)
    assert search_exactly(index) == search_approximately(complete)
    index.check()


def test_a_second_writer_is_an_error_and_a_dead_one_does_not_block(folder, tmp_path):
    index = Index.create(folder)
    with start_writer(folder, tmp_path, 30.0) as child:
        for write in (lambda: index.add([MIRA]), lambda: index.remove(["id-1"])):
            with pytest.raises(UserError) as caught:
                write()
            message = f"{folder} is being written by process {child.pid}: wait for it, or stop it"
            assert str(caught.value) == message
        assert Index.open(folder).search("kal")  # reading continues
    assert index.add([MIRA]) == AddCounts(added=1)


def test_the_same_process_is_a_second_writer_too(index, folder):
    def passages():
        with pytest.raises(UserError, match=f"is being written by process {os.getpid()}"):
            Index.open(folder).add([TOVE])
        yield ("x", "", "Something.")

    assert index.add(passages()) == AddCounts(added=1)


def test_an_interrupted_creation_can_be_repeated(folder):
    Index.create(folder)
    (folder / "meta.json").rename(folder / "meta.json.part")
    with pytest.raises(UserError, match="is not an index"):
        Index.open(folder)
    assert Index.create(folder).add([MIRA]) == AddCounts(added=1)


# Folders that are not an index, or a damaged one ---------------------------------------------------------------------


def test_other_folders_are_not_an_index(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (folder, tmp_path, tmp_path / "file"):
        with pytest.raises(UserError) as caught:
            Index.open(path)
        assert str(caught.value) == f"{path} is not an index: it has no meta.json; create one with floatscope index add"
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match=r"exists and is not an index \(it has no meta.json\): give another path"):
            Index.create(path)
    assert os.listdir(tmp_path) == ["file"]


def test_passages_without_meta_are_not_overwritten(index, folder):
    (folder / "meta.json").unlink()
    with pytest.raises(UserError, match="exists and is not an index"):
        Index.create(folder, exist_ok=True)
    assert list((folder / ENGINE).glob("*.store"))


def test_an_index_is_not_created_twice(index, folder):
    with pytest.raises(UserError, match="already contains an index: open it, or give another path"):
        Index.create(folder)


@pytest.mark.parametrize(
    ("format", "age", "remedy"), [(3, "a newer", "update floatscope, or build"), (1, "an older", "build")]
)
def test_another_format_is_an_error(index, folder, format, age, remedy):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({"format": format}))
    with pytest.raises(UserError) as caught:
        Index.open(folder)
    assert str(caught.value) == (
        f"{folder} was written by {age} floatscope (index format {format}, this version reads 2):"
        f" {remedy} the index again"
    )
    (folder / "meta.json").write_text(json.dumps(meta))
    assert Index.open(folder).search("Mira")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 2}', '{"format": "2"}'])
def test_a_damaged_meta_is_named(index, folder, content):
    (folder / "meta.json").write_text(content)
    with pytest.raises(UserError, match=r"meta.json is damaged or was not written by floatscope"):
        Index.open(folder)


@pytest.mark.parametrize("part", SEGMENT_FILES)
@pytest.mark.parametrize("state", ["missing", "cut short", "damaged"])
def test_a_damaged_file_is_named(index, folder, part, state):
    index.check()
    file = next((folder / ENGINE).glob(f"*.{part}"))
    content = bytearray(file.read_bytes())
    file.unlink()
    if state == "cut short":
        file.write_bytes(content[: len(content) // 2])
    elif state == "damaged":
        content[0] ^= 255
        file.write_bytes(content)

    def use() -> None:
        opened = Index.open(folder)
        opened.search("Mira")
        opened.check()  # only this is certain to find a flipped bit

    with pytest.raises(UserError) as caught:
        use()
    message = f"{folder} is damaged: {ENGINE}/{file.name} is {state}; restore it from a copy, or build it again"
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["meta.json", ".managed.json"])
def test_a_damaged_file_list_is_named(index, folder, name):
    (folder / ENGINE / name).write_text("{")
    with pytest.raises(UserError, match=f"is damaged: {ENGINE}/{name} is not JSON"):
        Index.open(folder)


def test_removals_are_checked_too(complete, folder):
    index = Index.open(shutil.copytree(complete.path, folder))
    index.remove(["id-7"])
    index.check()
    next((folder / ENGINE).glob("*.del")).unlink()
    with pytest.raises(UserError, match=r"\.del is missing"):
        Index.open(folder)


def test_a_copied_folder_is_an_index(index, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    copy = Index.open(tmp_path / "copy")
    copy.check()
    assert copy.search("Velmora")[0].id == "m"
    assert copy.add([MIRA, ("n", "", "Nina")]) == AddCounts(added=1, unchanged=1)
