"""A trace file comes back bit for bit, or is refused by name: flipped, cut, emptied or foreign."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from alike import assert_alike
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file
from synthetic import arm, mdm, record

from floatscope.errors import UserError
from floatscope.traces import Trace
from floatscope.traces.file import DTYPES, file_name, read_trace, write_trace

DAMAGED = r"x\.safetensors is damaged: .*Delete it and resume the run"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def small() -> Trace:
    return record([mdm(0, 3, 2, 1)], keep="summary", meta={"rows": "all", "text": "Grüße"})[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keep", ["summary", "full"])
def test_a_trace_comes_back_as_it_was(path, seed, keep):
    for trace in record([mdm(seed, 5, 4, 3)], keep=keep) + record(
        [arm(seed, 5, 4)[0]], keep=keep, meta={"rows": "cache"}
    ):
        write_trace(path, trace)
        assert_alike(read_trace(path), trace)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    dtype=st.sampled_from(list(DTYPES)),
    sample=st.text(),
    meta=st.dictionaries(st.text(), st.integers()),
)
def test_any_array_comes_back_bit_for_bit(path, data, dtype, sample, meta):
    """Every type, every shape (empty and scalar among them), every NaN payload: the bytes are drawn, not the values."""
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
    if dtype == "|b1":
        raw = bytearray(byte & 1 for byte in raw)
    axes = tuple(f"axis{i}" for i in range(len(shape)))
    array = np.frombuffer(raw, dtype).reshape(shape)
    trace = Trace(sample, {"a": array, "b": array.T}, {"a": axes, "b": axes[::-1]}, {}, meta)
    write_trace(path, trace)
    assert_alike(read_trace(path), trace)


def test_equal_traces_give_equal_files(path):
    written = set()
    for _ in range(5):
        write_trace(path, small())
        written.add(path.read_bytes())
    assert len(written) == 1


def test_any_safetensors_reader_opens_it(path):
    trace = small()
    write_trace(path, trace)
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, trace.arrays[name])


def test_a_flipped_bit_is_refused_wherever_it_is(path):
    """Every bit of the length, many of the header, its metadata, the digest, the spaces after them, and the data."""
    write_trace(path, small())
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    digest = whole.index(b'"sha256":"')
    bits = [*range(64), *rng.integers(64, 8 * end, 1000), *rng.integers(8 * end, 8 * len(whole), 500)]
    bits += [*range(8 * digest, 8 * digest + 80 * 8, 7), *range(8 * (end - 9), 8 * (end + 1)), 8 * len(whole) - 1]
    for bit in bits:
        bent = bytearray(whole)
        bent[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bent)
        with pytest.raises(UserError, match=DAMAGED):
            read_trace(path)


@pytest.mark.parametrize("seed", range(3))
def test_a_cut_or_lengthened_file_is_refused(path, seed):
    write_trace(path, small())
    whole = path.read_bytes()
    lengths = [0, 1, 7, 8, 9, len(whole) - 1, *np.random.default_rng(seed).integers(0, len(whole), 50)]
    for bent in (*(whole[:length] for length in lengths), whole + b"\0", whole[:8] + whole, b"\0" * len(whole)):
        path.write_bytes(bent)
        with pytest.raises(UserError, match=DAMAGED):
            read_trace(path)


def test_two_blocks_that_changed_places_are_refused(path):
    write_trace(path, small())
    whole = path.read_bytes()
    path.write_bytes(whole[:-2048] + whole[-1024:] + whole[-2048:-1024])
    with pytest.raises(UserError, match="its bytes do not match its digest"):
        read_trace(path)


def test_a_foreign_safetensors_file_is_refused(path):
    save_file({"weight": np.ones(3)}, path)
    with pytest.raises(UserError, match="its header cannot be read"):
        read_trace(path)


def test_a_file_that_is_not_there_is_named(path):
    with pytest.raises(UserError, match=r"cannot read .*x\.safetensors: No such file"):
        read_trace(path)


def test_a_type_the_format_does_not_have_is_refused(path):
    trace = replace(small(), arrays={"a": np.zeros(3, ">f4")}, axes={"a": ("key",)}, coords={})
    with pytest.raises(UserError, match=r"array 'a' is float32.* a trace keeps floats, signed integers and booleans"):
        write_trace(path, trace)
    assert list(path.parent.iterdir()) == []


NASTY = [
    *("a/b", "a-b", "a_b", "A-b", "..", ".", "", " ", "a b", "a\0b", "a\nb", "é", "e\u0301", "É", "日本語", "\ud800"),
    *("x" * 99, "x" * 100, "x" * 101, "X" * 101, "x" * 5000),
    *("con", "a", "A", "a.safetensors", "a.part", "-rf", "~", "a~b"),
]


def test_file_names_are_safe_and_differ_even_where_case_does_not_count():
    names = [file_name(sample) for sample in NASTY]
    assert len({name.lower() for name in names}) == len(NASTY)
    for name in names:
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set('/\\:*?"<>| ')
        assert name[0] not in ".-"
        assert len(name) < 200


def test_plain_ids_keep_their_names():
    assert file_name("nq-dev_17.2") == "nq-dev_17.2.safetensors"


@given(st.lists(st.text(max_size=8), unique=True, max_size=30))
def test_different_ids_have_different_files(samples):
    assert len({file_name(sample).lower() for sample in samples}) == len(samples)


def test_metadata_is_plain_json(path):
    write_trace(path, small())
    whole = path.read_bytes()
    about = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
    assert json.loads(about["axes"])["received"] == ["step", "layer", "group", "key"]
    assert json.loads(about["meta"]) == {"rows": "all", "text": "Grüße"}
