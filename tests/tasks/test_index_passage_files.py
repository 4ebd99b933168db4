"""Passage files: their layouts, and the errors of files that cannot be read."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from floatscope.errors import UserError
from floatscope.tasks.index import AddCounts, Hit, Index, passage_id

OLAF = "Olaf has neither a title nor an id; he is a painter."
OBJECTS = [
    {"id": "m", "title": "Mira", "text": "Mira lives in Velmora."},
    {"text": OLAF},
    {"id": 7, "title": None, "text": "Sieben\u2028Berge", "url": "…"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize(("name", "opener"), [("p.json", open), ("p.jsonl.gz", gzip.open), ("p.xz", lzma.open)])
def test_lines_lists_and_compressed_files_are_read(folder, tmp_path, name, opener, as_list):
    lines = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in OBJECTS)
    with opener(tmp_path / name, "wt", encoding="utf-8-sig") as file:
        file.write("\n" + json.dumps(OBJECTS, indent=1) if as_list else lines)
    index, progress = Index.create(folder), []
    assert index.add_file(
        tmp_path / name, batch_size=2, on_progress=lambda counts, share: progress.append(share)
    ) == AddCounts(added=3)
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    assert index.get("7") == Hit("7", "", "Sieben\u2028Berge", 0.0)
    assert index.get(passage_id("", OLAF)).text == OLAF
    assert index.add_file(tmp_path / name) == AddCounts(unchanged=3)
    (file,) = Index.open(folder).stats().files
    assert (file["name"], file["passages"], file["bytes"]) == (name, 3, (tmp_path / name).stat().st_size)


def test_ids_do_not_depend_on_the_file_or_the_machine():
    assert passage_id("Mira", "Mira lives in Velmora.") == "afa3af6bab3baa17cfc4"
    assert passage_id("a", "bc") != passage_id("ab", "c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "x"}\n{', "line 2: it is not valid JSON (Expecting property name"),
        ('{"text": "x"}\n3', 'line 2: a passage is a JSON object with a "text", and this is a int'),
        ('[{"text": "x"}, "y"]', 'passage 2: a passage is a JSON object with a "text", and this is a str'),
        ("[1", "it is not valid JSON (Expecting ',' delimiter"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"id": "a"}', 'line 1: "text" must be a text that is not empty'),
        ('{"text": " "}', 'line 1: "text" must be a text that is not empty'),
        ('{"text": 7}', 'line 1: "text" must be a text'),
        ('{"text": "x", "id": [1]}', 'line 1: "id" must be a text'),
        ('{"text": "x", "id": true}', 'line 1: "id" must be a text'),
        ('{"text": "x", "title": 1}', 'line 1: "title" must be a text'),
        ('{"text": "\\ud800"}', "line 1: it contains half a character (a lone surrogate)"),
        ("\n\n", 'contains no passages: give JSON objects with a "text", one on each line'),
        ("[]", 'contains no passages: give JSON objects with a "text", one on each line'),
        (b"\xff\xfe", "is not UTF-8 text (invalid start byte)"),
    ],
)
def test_errors_name_the_file_and_the_line(folder, tmp_path, content, message):
    (tmp_path / "p.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        Index.create(folder).add_file(tmp_path / "p.jsonl")
    assert str(caught.value).startswith(str(tmp_path / "p.jsonl"))
    assert message in str(caught.value)


def test_a_damaged_or_absent_file_is_named(folder, tmp_path):
    index = Index.create(folder)
    (tmp_path / "p.gz").write_bytes(gzip.compress(os.urandom(1000).hex().encode())[:500])
    with pytest.raises(UserError, match=r"p.gz is damaged \(.*\); download it again"):
        index.add_file(tmp_path / "p.gz")
    for path, why in ((tmp_path / "none", "cannot read .*: No such file or directory"), (tmp_path, "is a folder")):
        with pytest.raises(UserError, match=why):
            index.add_file(path)
