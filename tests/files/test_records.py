"""Records: a JSON object with a type and a digest; damage is named in one sentence."""

from __future__ import annotations

import json
from random import Random

import pytest

from floatscope.errors import UserError
from floatscope.files.records import Record, parse_record, read_record, read_typed, with_digest, write_record


class Kind(Record):
    name: str
    counts: list[int]
    note: str = ""


CONTENT = {"name": "ä", "counts": [1, 2]}


def test_a_record_comes_back_without_its_digest(tmp_path):
    write_record(tmp_path / "r.json", CONTENT)
    assert read_record(tmp_path / "r.json", Kind, "x") == CONTENT
    assert parse_record(json.dumps(CONTENT).encode(), Kind) == CONTENT  # of an earlier version


def test_every_bit_of_a_record_is_covered(tmp_path):
    text = json.dumps(with_digest(CONTENT)).encode()
    for at in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[at // 8] ^= 1 << at % 8
        try:
            found = parse_record(bytes(flipped), Kind)
        except ValueError:
            continue
        assert found == CONTENT  # white space, or another spelling of the same value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is not valid JSON"),
        ("[" * 100_000, "it is not valid JSON"),
        ("[]", "Expected 'object', got 'array'"),
        ('{"name": "a"}', "missing required field 'counts'"),
        ('{"name": null, "counts": []}', "Expected 'str', got 'null' - in 'name'"),
        ('{"name": "a", "counts": [1, "2"]}', "Expected 'int', got 'str' - in 'counts[1]'"),
        ('{"name": "a", "counts": [], "other": 1}', "; allowed: name, counts, note"),
        ('{"name": "a", "counts": [], "nots": 1}', "unknown field 'nots' (did you mean 'note'?)"),
        ('{"name": "a", "counts": [], "digest": "0"}', "its contents do not match its digest"),
    ],
)
def test_damage_is_named(tmp_path, text, reason):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError) as error:
        read_record(tmp_path / "r.json", Kind, "write it again")
    assert reason in str(error.value)
    assert str(error.value).endswith("; write it again")


def test_a_file_without_a_digest_is_read_as_a_value(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(CONTENT))
    assert read_typed(tmp_path / "r.json", Kind) == Kind(**CONTENT)
    for content, reason in ({"counts": 3}, "Expected 'array', got 'int' - in 'counts'"), ([], "holds no JSON object"):
        (tmp_path / "r.json").write_text(json.dumps(content and CONTENT | content))
        with pytest.raises(UserError) as error:
            read_typed(tmp_path / "r.json", Kind, "write it again")
        assert str(error.value).startswith(f"{tmp_path / 'r.json'} is damaged (")
        assert reason in str(error.value)
        assert str(error.value).endswith("); write it again")


def test_random_damage_never_escapes(tmp_path):
    random, text = Random(0), json.dumps(with_digest(CONTENT)).encode()
    for _ in range(500):
        cut = bytearray(text)
        for _ in range(random.randint(1, 6)):
            cut[random.randrange(len(cut))] = random.randrange(256)
        try:
            assert parse_record(bytes(cut), Kind) == CONTENT
        except ValueError:
            continue
