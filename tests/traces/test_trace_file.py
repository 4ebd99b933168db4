"""A trace file is read back bit for bit, or refused by name: flipped, truncated, empty or of another program."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file
from synthetic_decodings import decode_arm, decode_mdm, record_traces
from trace_equality import assert_equal_traces

from example_counts import examples
from floatscope.errors import UserError
from floatscope.traces import Trace
from floatscope.traces.trace_file import DTYPES, read_trace, trace_file_name, write_trace

DAMAGED = r"x\.safetensors is damaged: .*Delete it and resume the run"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def small_trace() -> Trace:
    return record_traces([decode_mdm(0, 3, 2, 1)], level="summary", meta={"rows": "all", "text": "Grüße"})[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["summary", "full"])
def test_a_trace_is_read_back_unchanged(path, seed, level):
    for trace in record_traces([decode_mdm(seed, 5, 4, 3)], level=level) + record_traces(
        [decode_arm(seed, 5, 4)[0]], level=level, meta={"rows": "cache"}
    ):
        write_trace(path, trace)
        assert_equal_traces(read_trace(path), trace)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    dtype=st.sampled_from(list(DTYPES)),
    sample=st.text(),
    meta=st.dictionaries(st.text(), st.integers()),
)
def test_any_array_is_read_back_bit_for_bit(path, data, dtype, sample, meta):
    """Every type, every shape (also empty and scalar), every NaN payload: the bytes are drawn, not the values."""
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
    if dtype == "|b1":
        raw = bytearray(byte & 1 for byte in raw)
    axes = tuple(f"axis{i}" for i in range(len(shape)))
    array = np.frombuffer(raw, dtype).reshape(shape)
    trace = Trace(sample, {"a": array, "b": array.T}, {"a": axes, "b": axes[::-1]}, {}, meta)
    write_trace(path, trace)
    assert_equal_traces(read_trace(path), trace)


def test_equal_traces_give_equal_files(path):
    written = set()
    for _ in range(5):
        write_trace(path, small_trace())
        written.add(path.read_bytes())
    assert len(written) == 1


def test_any_safetensors_reader_opens_a_trace(path):
    trace = small_trace()
    write_trace(path, trace)
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, trace.arrays[name])


def test_a_flipped_bit_is_refused_anywhere(path):
    """Every bit of the length, and many of the header, its metadata, the digest, the padding and the data."""
    write_trace(path, small_trace())
    original = path.read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")
    rng = np.random.default_rng(0)
    digest = original.index(b'"sha256":"')
    bits = [*range(64), *rng.integers(64, 8 * end, 1000), *rng.integers(8 * end, 8 * len(original), 500)]
    bits += [*range(8 * digest, 8 * digest + 80 * 8, 7), *range(8 * (end - 9), 8 * (end + 1)), 8 * len(original) - 1]
    for bit in bits:
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=DAMAGED):
            read_trace(path)


@pytest.mark.parametrize("seed", range(3))
def test_a_truncated_or_extended_file_is_refused(path, seed):
    write_trace(path, small_trace())
    original = path.read_bytes()
    lengths = [0, 1, 7, 8, 9, len(original) - 1, *np.random.default_rng(seed).integers(0, len(original), 50)]
    for damaged in (
        *(original[:length] for length in lengths),
        original + b"\0",
        original[:8] + original,
        b"\0" * len(original),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=DAMAGED):
            read_trace(path)


def test_swapped_blocks_are_refused(path):
    write_trace(path, small_trace())
    original = path.read_bytes()
    path.write_bytes(original[:-2048] + original[-1024:] + original[-2048:-1024])
    with pytest.raises(UserError, match="its bytes do not match its digest"):
        read_trace(path)


def test_a_safetensors_file_of_another_program_is_refused(path):
    save_file({"weight": np.ones(3)}, path)
    with pytest.raises(UserError, match="its header cannot be read"):
        read_trace(path)


def test_a_missing_file_is_named(path):
    with pytest.raises(UserError, match=r"cannot read .*x\.safetensors: No such file"):
        read_trace(path)


def test_an_unsupported_type_is_refused(path):
    trace = replace(small_trace(), arrays={"a": np.zeros(3, ">f4")}, axes={"a": ("key",)}, coords={})
    with pytest.raises(UserError, match=r"array 'a' is float32.* a trace stores floats, signed integers and booleans"):
        write_trace(path, trace)
    assert list(path.parent.iterdir()) == []


AWKWARD_IDS = [
    *("a/b", "a-b", "a_b", "A-b", "..", ".", "", " ", "a b", "a\0b", "a\nb", "é", "e\u0301", "É", "日本語", "\ud800"),
    *("x" * 99, "x" * 100, "x" * 101, "X" * 101, "x" * 5000),
    *("con", "a", "A", "a.safetensors", "a.part", "-rf", "~", "a~b"),
]


def test_file_names_are_safe_and_differ_on_case_insensitive_disks():
    names = [trace_file_name(sample) for sample in AWKWARD_IDS]
    assert len({name.lower() for name in names}) == len(AWKWARD_IDS)
    for name in names:
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set('/\\:*?"<>| ')
        assert name[0] not in ".-"
        assert len(name) < 200


def test_plain_ids_are_file_names():
    assert trace_file_name("nq-dev_17.2") == "nq-dev_17.2.safetensors"


@given(st.lists(st.text(max_size=8), unique=True, max_size=30))
def test_different_ids_have_different_files(samples):
    assert len({trace_file_name(sample).lower() for sample in samples}) == len(samples)


def test_metadata_is_plain_json(path):
    write_trace(path, small_trace())
    original = path.read_bytes()
    metadata = json.loads(original[8 : 8 + int.from_bytes(original[:8], "little")])["__metadata__"]
    assert json.loads(metadata["axes"])["received"] == ["step", "layer", "group", "key"]
    assert json.loads(metadata["meta"]) == {"rows": "all", "text": "Grüße"}
