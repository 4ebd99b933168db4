"""Locks: one holder at a time, released when the file is closed or the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from floatscope.errors import UserError
from floatscope.files.locks import acquire_lock

HOLD = """
import sys, time
from pathlib import Path
from floatscope.files.locks import acquire_lock
lock = acquire_lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_a_lock_is_released_when_it_is_closed(tmp_path):
    for _ in range(2):
        with acquire_lock(tmp_path / "lock"):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_second_lock_names_the_process_and_the_remedy(tmp_path):
    with acquire_lock(tmp_path / "lock"), pytest.raises(UserError) as error:
        acquire_lock(tmp_path / "lock", remedy="give another path")
    assert str(error.value) == f"{tmp_path} is being written by process {os.getpid()}: give another path"


def test_a_killed_process_releases_its_lock(tmp_path):
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=f"is being written by process {other.pid}: wait for it, or stop it"):
            acquire_lock(path)
        other.kill()
    start = time.monotonic()
    with acquire_lock(path, wait=True):
        assert time.monotonic() - start < 10


def test_a_folder_that_does_not_exist_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        acquire_lock(tmp_path / "nowhere" / "lock")


def test_a_lock_that_is_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"):
        acquire_lock(tmp_path / "lock")
    assert (tmp_path / "precious").read_text() == "keep me"
