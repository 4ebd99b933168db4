"""A small corpus, prepared once for all tests of the twins."""

from __future__ import annotations

import pytest
from small import SMALL, write_text

from floatscope.lab.twins.corpus import Corpus, prepare_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    return prepare_corpus(folder / "corpus", [write_text(folder)], SMALL["arm"])
