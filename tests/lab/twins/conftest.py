"""A text and its tokenizer, made once for all tests of the twins."""

from __future__ import annotations

import pytest
from small import SMALL, write_text

from floatscope.lab.twins.material import Material, prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Material:
    folder = tmp_path_factory.mktemp("material")
    return prepare(folder / "made", [write_text(folder)], SMALL["arm"])
