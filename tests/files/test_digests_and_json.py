"""Digests and JSON files: the values of sha256sum, and errors that name the file."""

from __future__ import annotations

import hashlib

import pytest

from floatscope.errors import UserError
from floatscope.files.digests import sha256_file, sha256_json
from floatscope.files.json_files import read_json, write_json


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"floats")
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"floats").hexdigest()


def test_a_missing_file_has_no_digest(tmp_path):
    with pytest.raises(UserError, match=f"cannot read {tmp_path / 'a'}: No such file or directory"):
        sha256_file(tmp_path / "a")


def test_the_digest_of_an_object_ignores_the_order_of_its_keys():
    assert sha256_json({"a": 1, "b": [2]}) == sha256_json({"b": [2], "a": 1}) != sha256_json({"a": 1, "b": 2})


def test_json_is_written_with_one_entry_per_line(tmp_path):
    content = {"loss": [4.1, 3.2], "name": "ö", "nested": {"a": None}}
    write_json(tmp_path / "a.json", content)
    assert (tmp_path / "a.json").read_text() == '{\n "loss": [4.1, 3.2],\n "name": "ö",\n "nested": {"a": null}\n}\n'
    assert read_json(tmp_path / "a.json") == content


@pytest.mark.parametrize("content", ["{", "[]", "null", "\x00", "[" * 100_000])
def test_a_damaged_file_is_named_with_a_remedy(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        read_json(path, "download it again")
    assert str(error.value).startswith(f"{path} is damaged (")
    assert str(error.value).endswith("); download it again")


def test_a_missing_json_file_is_named(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(UserError, match=f"{path} is missing; restore it from a copy, or remove it"):
        read_json(path)
