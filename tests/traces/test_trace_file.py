"""A trace file is read back bit for bit, or refused by name: flipped, truncated, empty or of another program."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from floatscope.traces.trace_fields import TRACE_FIELDS
from floatscope.traces.trace_file import (
    BLANK_DIGEST,
    DTYPES,
    check_trace_file,
    read_trace,
    trace_file_name,
    write_trace,
)

DAMAGED = r"x\.safetensors is damaged: .*Delete it and resume the run"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def small_trace() -> Trace:
    return record_traces([decode_mdm(0, 3, 2, 1)], level="summary", meta={"rows": "all", "text": "Grüße"})[0]


SMALL = small_trace()


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
    arrays, all_axes = {"a": array, "b": array.T}, {"a": axes, "b": axes[::-1]}
    trace = Trace(sample, SMALL.arrays | arrays, SMALL.axes | all_axes, SMALL.coords, meta)
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


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a trace file, its metadata as values, and write a digest that matches."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    plain = ("format", "sha256")
    metadata = header["__metadata__"]
    header["__metadata__"] = {key: text if key in plain else json.loads(text) for key, text in metadata.items()}
    change(header)
    metadata = header["__metadata__"] | {"sha256": BLANK_DIGEST}
    texts = {
        key: value if key in plain or isinstance(value, bytes) else json.dumps(value) for key, value in metadata.items()
    }
    header["__metadata__"] = {key: text.decode() if isinstance(text, bytes) else text for key, text in texts.items()}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(text + raw[end:]).hexdigest()
    path.write_bytes(text.replace(BLANK_DIGEST.encode(), digest.encode()) + raw[end:])


def change_metadata(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"].update({key: value})


def remove_metadata(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"].pop(key)


def change_axes(name: str, axes: list[str]) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"]["axes"].update({name: axes})


def remove_array(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"]["order"].remove(name) or header.pop(name)


WRONG_CONTENTS = [
    (remove_metadata("format"), "its metadata names no format"),
    (change_metadata("format", None), "its header cannot be read"),
    (remove_metadata("sample"), "wrong metadata (missing required field 'sample')"),
    (change_metadata("sample", None), "wrong metadata (Expected 'str', got 'null' - in 'sample')"),
    (change_metadata("sample", []), "wrong metadata (Expected 'str', got 'array' - in 'sample')"),
    (change_metadata("other", 1), "wrong metadata (unknown field 'other'"),
    (change_metadata("meta", b"{"), "its metadata 'meta' is not valid JSON"),
    (change_metadata("meta", b"[" * 100_000), "its metadata 'meta' is not valid JSON"),
    (change_metadata("meta", []), "wrong metadata (Expected 'object', got 'array' - in 'meta')"),
    (change_metadata("meta", {"pieces": None}), "wrong metadata (Expected 'object', got 'null' - in 'meta.pieces')"),
    (change_metadata("meta", {"pieces": {"x": "a"}}), "wrong metadata (Expected 'int', got 'str'"),
    (change_metadata("meta", {"special_ids": ["a"]}), "wrong metadata (Expected 'int', got"),
    (change_metadata("coords", {"group": None}), "wrong metadata (Expected 'array', got 'null' - in 'coords[...]')"),
    (change_metadata("coords", {}), "axis 'bound' of array 'block' has no names"),
    (change_metadata("order", []), "its metadata 'order' does not name its arrays, each once"),
    (change_metadata("order", ["tokens", "tokens"]), "its metadata 'order' does not name its arrays, each once"),
    (change_axes("tokens", ["step"]), "array 'tokens' has 2 axes but 1 axis names: step"),
    (change_axes("tokens", ["key", "step"]), "axis 'step' has length 1 in array 'states'"),
    (change_axes("commit_token", ["other"]), "array 'commit_token' has the axes (other), not (commit)"),
    (lambda header: header["received"].update(dtype="I32"), "array 'received' is int32, not float32"),
    (lambda header: header["received"].update(dtype="BF16"), "its arrays cannot be read"),
    (lambda header: header["received"].update(shape=[1]), "its arrays cannot be read"),
    (lambda header: header["received"].update(shape=None), "its arrays cannot be read"),
    (remove_array("tokens_after"), "its arrays cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), WRONG_CONTENTS, ids=[reason[:50] for _, reason in WRONG_CONTENTS])
def test_wrong_contents_with_a_matching_digest_are_named(path, change, reason):
    write_trace(path, SMALL)
    rewrite_header(path, change)
    with pytest.raises(UserError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path} is damaged: {reason}")


def test_a_rewritten_header_without_a_change_is_read(path):
    write_trace(path, SMALL)
    rewrite_header(path, lambda header: None)
    assert_equal_traces(read_trace(path), SMALL)


@pytest.mark.parametrize("name", list(TRACE_FIELDS))
def test_an_array_that_every_trace_has_is_required(path, name):
    write_trace(path, replace(SMALL, arrays={key: array for key, array in SMALL.arrays.items() if key != name}))
    assert check_trace_file(path)["sample"] == SMALL.sample
    with pytest.raises(UserError, match=f"x.safetensors is damaged: array '{name}' is missing. Delete it"):
        read_trace(path)


def test_another_format_is_named(path):
    write_trace(path, SMALL)
    rewrite_header(path, change_metadata("format", "floatscope trace 9"))
    with pytest.raises(UserError, match="has the format 'floatscope trace 9', but this floatscope reads"):
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
    assert json.loads(metadata["meta"]) == {"rows": "all", "text": "Grüße", "masks": [{"kind": "mask", "size": 0}] * 2}
