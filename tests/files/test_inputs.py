"""Inputs: regular files only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from floatscope.errors import UserError
from floatscope.files.inputs import require_regular_file
from floatscope.lab.adapt.corpus import content_digest
from floatscope.lab.training.text import read_text
from floatscope.tasks.index.passage_file import PassageFile
from floatscope.tasks.sample_files import read_samples


@pytest.mark.parametrize("read", [require_regular_file, read_samples, PassageFile, read_text, content_digest])
def test_a_pipe_or_a_device_is_refused_at_once(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="is a pipe or a device, which may never end; write its contents to a file"):
            read(path)
    with pytest.raises(UserError, match="is a folder; give a file"):
        read(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert require_regular_file(tmp_path / "link") == tmp_path / "link"
