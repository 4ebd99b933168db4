"""A run folder keeps what is finished through kills, full disks and damage, and never takes half a file for a whole."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from alike import assert_alike
from child import forked, in_child
from synthetic import mdm, record
from test_trace_file import NASTY

from floatscope.errors import UserError
from floatscope.traces import Run, Trace, create_run, open_run

IDS = [f"nq-{i}" for i in range(6)]
SETTINGS = {"model": "twin:mdm", "steps": 4, "sampler": {"name": "confidence", "temperature": 0.0}, "seeds": [0, 1]}
TRACES = {name: record([mdm(i, 4, 5, 3)], names=[name])[0] for i, name in enumerate(IDS)}


def fill(run: Run, upto: int = len(IDS)) -> None:
    for sample in run.missing:
        if len(run.done) < upto:
            run.write(TRACES[sample])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.002)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "run"


@pytest.fixture
def unbroken(tmp_path: Path) -> dict[str, bytes]:
    with create_run(tmp_path / "unbroken", SETTINGS, IDS) as run:
        fill(run)
    return files(tmp_path / "unbroken")


def test_what_was_written_is_read(folder):
    with create_run(folder, SETTINGS, IDS, plan=[IDS[:4], IDS[4:]]) as run:
        assert (run.done, run.missing) == ((), tuple(IDS))
        run.write(TRACES["nq-3"])
        run.write(TRACES["nq-1"])
        assert run.done == ("nq-1", "nq-3")
        assert run.missing == ("nq-0", "nq-2", "nq-4", "nq-5")
    run = open_run(folder)
    assert run.settings == SETTINGS
    assert run.samples == tuple(IDS)
    assert run.plan == [IDS[:4], IDS[4:]]
    assert [trace.sample for trace in run] == ["nq-1", "nq-3"]
    for trace in run:
        assert_alike(trace, TRACES[trace.sample])
    run.check()


def test_a_run_is_read_while_it_is_written(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        reader = open_run(folder)
        assert reader.done == ()
        run.write(TRACES["nq-0"])
        assert reader.done == ("nq-0",)
        assert_alike(reader.trace("nq-0"), TRACES["nq-0"])


def test_run_json_says_where_and_with_what(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        record = json.loads((folder / "run.json").read_text())
        assert record["status"] == "unfinished"
        assert {"created", "device", "platform", "python", "torch", "transformers", "floatscope"} <= set(run.provenance)
        assert record["provenance"] == run.provenance
        fill(run)
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert len(run.record["resumed"]) == 1
    (folder / "samples" / "nq-2.safetensors").unlink()
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert run.missing == ("nq-2",)
        assert [run.record["status"], len(run.record["resumed"])] == ["unfinished", 2]


def test_nasty_ids_have_files_of_their_own(folder):
    with create_run(folder, {}, NASTY) as run:
        for i, sample in enumerate(NASTY):
            run.write(record([mdm(i, 2, 2, 1)], names=[sample], keep="summary")[0])
        assert run.done == tuple(NASTY)
    assert [trace.sample for trace in open_run(folder)] == NASTY
    assert {path.name for path in folder.iterdir()} == {"run.json", "run.lock", "samples"}


# Where a run may begin ------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_not_overwritten(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        fill(run, 2)
    with pytest.raises(
        UserError, match=r"already holds a run \(2 of 6 samples finished\): .*resume=True.*another path"
    ):
        create_run(folder, SETTINGS, IDS)
    assert len(open_run(folder).done) == 2


def test_a_folder_of_other_things_is_left_alone(folder):
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("…")
    for resume in (False, True):
        with pytest.raises(
            UserError, match=r"exists and is not a run folder \(it has no run.json\): give another path"
        ):
            create_run(folder, SETTINGS, IDS, resume=resume)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_and_one_killed_at_birth_will_do(folder):
    folder.mkdir(parents=True)
    create_run(folder, SETTINGS, IDS).close()
    os.rename(folder / "run.json", folder / "run.json.part")
    shutil.rmtree(folder / "samples")
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert run.missing == tuple(IDS)
    assert not (folder / "run.json.part").exists()


def test_a_file_is_not_a_run_folder(folder):
    folder.parent.mkdir()
    folder.write_text("")
    with pytest.raises(UserError, match="exists and is not a run folder"):
        create_run(folder, SETTINGS, IDS)
    with pytest.raises(UserError, match=r"is not a run folder: it has no run.json"):
        open_run(folder)
    with pytest.raises(UserError, match=r"cannot make a run in .*: Not a directory"):
        create_run(folder / "below", SETTINGS, IDS)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', "\xff"])
def test_a_damaged_run_json_is_refused(folder, text):
    create_run(folder, SETTINGS, IDS).close()
    (folder / "run.json").write_text(text, "latin-1")
    with pytest.raises(UserError, match=r"run.json is damaged, or not floatscope's; restore it"):
        open_run(folder)
    with pytest.raises(UserError, match="is damaged"):
        create_run(folder, SETTINGS, IDS, resume=True)


def test_a_run_of_another_format_is_refused(folder):
    create_run(folder, SETTINGS, IDS).close()
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"format": 2}))
    with pytest.raises(UserError, match="has run format 2, not 1: open it with the floatscope that made it"):
        open_run(folder)


def test_nothing_here_is_not_a_run_folder(folder):
    with pytest.raises(UserError, match=r"is not a run folder: it has no run\.json"):
        open_run(folder)


@pytest.mark.parametrize(
    ("samples", "message"),
    [([], "a run needs at least one sample"), (["a", "b", "a"], "sample ids must differ, and 1 occur .*, such as 'a'")],
)
def test_samples_that_make_no_run_are_refused(folder, samples, message):
    with pytest.raises(UserError, match=message):
        create_run(folder, SETTINGS, samples)
    assert not folder.exists()


def test_settings_that_are_not_json_are_refused(folder):
    with pytest.raises(UserError, match="the settings of a run must be plain JSON"):
        create_run(folder, {"model": object()}, IDS)
    assert not folder.exists()


# Resuming -------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_unbroken_one(folder, unbroken):
    for upto in (2, 3, 6):
        with create_run(folder, SETTINGS, IDS, resume=True) as run:
            fill(run, upto)
    assert files(folder) == unbroken


def test_settings_equal_after_json_are_the_same_settings(folder):
    create_run(folder, SETTINGS, IDS, plan=[IDS]).close()
    create_run(folder, {**SETTINGS, "seeds": (0, 1)}, tuple(IDS), plan=(tuple(IDS),), resume=True).close()
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert run.plan == [IDS]


def test_other_settings_are_refused_each_with_both_values(folder):
    create_run(folder, SETTINGS, IDS, plan=[IDS]).close()
    other = {"model": "twin:arm", "steps": 4, "sampler": {"name": "entropy", "temperature": 0.0}, "block": 8}
    with pytest.raises(UserError) as caught:
        create_run(folder, other, [*IDS[:5], "tqa-1"], plan=[IDS[:3], IDS[3:]], resume=True)
    text = str(caught.value)
    assert 'model: "twin:mdm" in the folder, "twin:arm" now; ' in text
    assert 'sampler.name: "confidence" in the folder, "entropy" now; ' in text
    assert "seeds: [0, 1] in the folder, nothing now; " in text
    assert "block: nothing in the folder, 8 now; " in text
    assert 'samples: ["nq-0", ' in text
    assert "plan: [[" in text
    assert "steps:" not in text
    assert "temperature" not in text
    assert text.endswith("Give those it was made with, or another path")


def test_a_long_list_is_shown_at_its_first_difference(folder):
    create_run(folder, {}, [str(i) for i in range(100)]).close()
    for now, wanted in {
        99: r"samples \(100 entries in the folder, 99 now\), first at entry 99: \"99\" in the folder, nothing now",
        101: r"samples \(100 entries in the folder, 101 now\), first at entry 100: nothing in the folder, \"100\" now",
    }.items():
        with pytest.raises(UserError, match=wanted):
            create_run(folder, {}, [str(i) for i in range(now)], resume=True)


def test_a_refused_resume_leaves_the_folder_free(folder):
    create_run(folder, SETTINGS, IDS).close()
    with pytest.raises(UserError) as caught:
        create_run(folder, {}, IDS, resume=True)
    create_run(folder, SETTINGS, IDS, resume=True).close()
    assert caught.tb  # which would have kept a lock that nobody closed


def test_only_this_runs_leftovers_are_swept(folder):
    create_run(folder, SETTINGS, IDS).close()
    for name in ("nq-3.safetensors.part", "other.safetensors.part", "notes.txt", "nq-3.part"):
        (folder / "samples" / name).write_bytes(b"half")
    assert open_run(folder).done == ()
    create_run(folder, SETTINGS, IDS, resume=True).close()
    assert set(files(folder)) == {"other.safetensors.part", "notes.txt", "nq-3.part"}


# Kills ----------------------------------------------------------------------------------------------------------------


def test_a_writer_killed_in_the_middle_of_a_file_leaves_a_run_that_resumes(folder, unbroken):
    """kill -9 with half of the third file written; until then the folder is locked, and after it free."""

    def write_and_hang() -> None:
        run = create_run(folder, SETTINGS, IDS)
        fill(run, 2)

        def hang(descriptor: int) -> None:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            (folder / "hanging").touch()
            time.sleep(60)

        os.fsync = hang
        fill(run)

    with forked(write_and_hang) as pid:
        wait_for(folder / "hanging")
        with pytest.raises(UserError, match=f"is being written by process {pid}: wait for it, or stop it"):
            create_run(folder, SETTINGS, IDS, resume=True)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert (folder / "samples" / "nq-2.safetensors.part").stat().st_size > 0
    assert open_run(folder).done == ("nq-0", "nq-1")
    open_run(folder).check()
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert not (folder / "samples" / "nq-2.safetensors.part").exists()
        fill(run)
    assert files(folder) == unbroken


def test_a_writer_killed_again_and_again_gets_there(folder, unbroken):
    for attempt in range(200):
        with forked(lambda: fill(create_run(folder, SETTINGS, IDS, resume=True))):
            time.sleep(0.002 + 0.0005 * attempt)
        if (folder / "run.json").exists():
            open_run(folder).check()
            if not open_run(folder).missing:
                break
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert run.missing == ()
        assert run.record["status"] == "finished"
    assert files(folder) == unbroken


def test_a_second_writer_in_the_same_process_is_refused_until_the_first_closes(folder):
    first = create_run(folder, SETTINGS, IDS)
    with pytest.raises(UserError, match=f"is being written by process {os.getpid()}: .*close the run it has open"):
        create_run(folder, SETTINGS, IDS, resume=True)
    first.close()
    with create_run(folder, SETTINGS, IDS, resume=True) as second:
        second.write(TRACES["nq-0"])
        with pytest.raises(UserError, match=r"is open for reading only: write through create_run\(…, resume=True\)"):
            first.write(TRACES["nq-1"])


def test_a_reader_cannot_write(folder):
    create_run(folder, SETTINGS, IDS).close()
    with pytest.raises(UserError, match="is open for reading only"):
        open_run(folder).write(TRACES["nq-0"])


# Disks that fail ------------------------------------------------------------------------------------------------------

FULL = r"cannot write .*nq-2\.safetensors: {}\. 2 of 6 samples are finished and readable; .*then resume"


def refusal(work, *args) -> str:
    try:
        work(*args)
    except UserError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_full_disk_keeps_what_is_finished(folder, unbroken, monkeypatch, call):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with create_run(folder, SETTINGS, IDS) as run:
        fill(run, 2)
        with monkeypatch.context() as patch:
            patch.setattr(*{"fsync": (os, "fsync"), "replace": (os, "replace"), "open": (Path, "open")}[call], full)
            with pytest.raises(UserError, match=FULL.format("No space left on device")):
                fill(run)
        assert set(files(folder)) == {"nq-0.safetensors", "nq-1.safetensors"}
        fill(run)
    assert files(folder) == unbroken


def test_a_file_size_limit_keeps_what_is_finished(folder, unbroken):
    """A real refusal by the kernel, half way through the bytes."""

    def write() -> str:
        run = create_run(folder, SETTINGS, IDS)
        fill(run, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
        return refusal(fill, run)

    assert "nq-2.safetensors: File too large. 2 of 6 samples are finished and readable" in in_child(write)
    assert set(files(folder)) == {"nq-0.safetensors", "nq-1.safetensors"}
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        fill(run)
    assert files(folder) == unbroken


@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "unshare -rm true"], capture_output=True).returncode != 0,
    reason="no user namespaces here",
)
def test_a_disk_that_is_really_full_keeps_what_is_finished(tmp_path):
    """A disk of 128 KiB of our own. Room for a few files; the rest are refused, and all that is there is whole."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "fill.py").write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from test_run_folder import *\n"
        "run = create_run('disk/run', SETTINGS, IDS)\n"
        "print(refusal(fill, run))\n"
        "run.check()\n"
        "print(len(run.done), [p.name for p in (run.path / 'samples').iterdir() if p.suffix == '.part'])\n"
    )
    script = f"mount -t tmpfs -o size=128k none disk && exec {sys.executable} fill.py"
    said = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    first, second = said.stdout.splitlines()
    assert "No space left on device. " in first
    done = int(second.split()[0])
    assert 0 < done < len(IDS)
    assert f"{done} of 6 samples are finished and readable" in first
    assert second.endswith("[]")


def test_a_folder_that_may_not_be_written_is_refused():
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o755)

        def without_rights(work, *args) -> str:
            if os.geteuid() == 0:
                os.setuid(65534)
            return refusal(work, *args)

        place.chmod(0o555)
        said = in_child(lambda: without_rights(create_run, place / "run", SETTINGS, IDS))
        assert said == f"cannot make a run in {place / 'run'}: Permission denied"

        place.chmod(0o755)
        run = create_run(place / "run", SETTINGS, IDS)
        fill(run, 2)
        (place / "run" / "samples").chmod(0o555)
        said = in_child(lambda: without_rights(fill, run))
        assert "nq-2.safetensors: Permission denied. 2 of 6 samples are finished and readable" in said
        (place / "run" / "samples").chmod(0o755)
        run.close()
    finally:
        shutil.rmtree(place)


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_named_and_can_be_replaced(folder, unbroken):
    with create_run(folder, SETTINGS, IDS) as run:
        fill(run)
    for name in ("nq-1", "nq-4"):
        path = folder / "samples" / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    run = open_run(folder)
    with pytest.raises(UserError) as caught:
        run.check()
    assert [line.split(" is damaged")[0].rsplit("/")[-1] for line in str(caught.value).splitlines()] == [
        "nq-1.safetensors",
        "nq-4.safetensors",
    ]
    with pytest.raises(UserError, match=r"nq-1\.safetensors is damaged: .* Delete it and resume the run"):
        run.trace("nq-1")
    assert_alike(run.trace("nq-2"), TRACES["nq-2"])
    for name in ("nq-1", "nq-4"):
        (folder / "samples" / f"{name}.safetensors").unlink()
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert run.missing == ("nq-1", "nq-4")
        fill(run)
    assert files(folder) == unbroken


def test_a_file_under_another_samples_name_is_refused(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        fill(run, 1)
    shutil.copy(folder / "samples" / "nq-0.safetensors", folder / "samples" / "nq-1.safetensors")
    with pytest.raises(UserError, match=r"nq-1\.safetensors holds sample 'nq-0', not 'nq-1': delete it"):
        open_run(folder).trace("nq-1")


def test_samples_that_are_not_there_are_named(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        fill(run, 1)
        with pytest.raises(UserError, match=r"sample 'nq-3' of .* is not finished \(1 of 6 are\): resume the run"):
            run.trace("nq-3")
        with pytest.raises(UserError, match=r"has no sample 'nq'; it has 6, beginning with 'nq-0', 'nq-1', 'nq-2'"):
            run.trace("nq")
        with pytest.raises(UserError, match="has no sample 'other'"):
            run.write(Trace("other", {}, {}, {}, {}))


def test_a_finished_sample_is_not_written_over(tmp_path):
    trace = record([mdm(0, 6, 5, 4)])[0]
    with create_run(tmp_path / "run", {}, [trace.sample]) as run:
        run.write(trace)
        with pytest.raises(UserError, match="is finished already: delete it first"):
            run.write(trace)


def test_a_trace_made_with_other_settings_is_refused(tmp_path):
    trace = record([mdm(0, 6, 5, 4)], meta={"steps": 4})[0]
    with create_run(tmp_path / "run", {"steps": 8}, [trace.sample]) as run:
        with pytest.raises(UserError, match=r"the run was begun with steps 8 and sample '.*' was made with 4"):
            run.write(trace)
