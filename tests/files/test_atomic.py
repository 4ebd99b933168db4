"""Atomic writes: a file or folder is complete or absent, and a failed write is one sentence."""

from __future__ import annotations

import errno
import os

import pytest

from floatscope.errors import UserError
from floatscope.files.atomic import explain_write_errors, write_atomic, write_folder_atomic


def fail_midway():
    yield b"half"
    raise KeyboardInterrupt


def test_a_file_has_all_chunks(tmp_path):
    write_atomic(tmp_path / "a", [b"one ", memoryview(b"two")])
    assert (tmp_path / "a").read_bytes() == b"one two"
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    write_atomic(tmp_path / "a", [b"old"])
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a", fail_midway())
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_appears_when_all_its_files_are_written(tmp_path):
    with write_folder_atomic("the model", tmp_path / "m") as part:
        (part / "a").write_text("x")
        assert not (tmp_path / "m").exists()
    assert (tmp_path / "m" / "a").read_text() == "x"
    assert os.listdir(tmp_path) == ["m"]


def test_an_interrupted_folder_is_removed(tmp_path):
    def write():
        with write_folder_atomic("the model", tmp_path / "m") as part:
            (part / "a").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room there and run the same command again"),
        (OSError(errno.ENAMETOOLONG, "File name too long"), "use another --out"),
        (PermissionError(errno.EACCES, "Permission denied"), "use another --out"),
    ],
)
def test_a_failed_write_names_content_path_and_remedy(tmp_path, error, remedy):
    with pytest.raises(UserError) as raised, explain_write_errors("the scores", tmp_path):
        raise error
    assert str(raised.value) == f"cannot write the scores to {tmp_path} ({error.strerror}); {remedy}"


def test_other_errors_are_not_explained(tmp_path):
    with pytest.raises(ValueError, match="a bug"), explain_write_errors("the scores", tmp_path):
        raise ValueError("a bug")
