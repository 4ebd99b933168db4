"""A run folder keeps finished samples through kills, full disks and damage, and never reads an incomplete file."""

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
from child_process import fork_child, run_in_child
from synthetic_decodings import decode_mdm, record_traces
from test_trace_file import AWKWARD_IDS
from trace_equality import assert_equal_traces

from floatscope.errors import UserError
from floatscope.traces import Run, Trace, create_run, open_run
from floatscope.traces.run_record import read_record, write_record

IDS = [f"nq-{i}" for i in range(6)]
SETTINGS = {"model": "twin:mdm", "steps": 4, "sampler": {"name": "confidence", "temperature": 0.0}, "seeds": [0, 1]}
TRACES = {name: record_traces([decode_mdm(i, 4, 5, 3)], names=[name])[0] for i, name in enumerate(IDS)}


def fill(run: Run, count: int = len(IDS)) -> None:
    """Write samples until `count` are finished."""
    for sample in run.missing:
        if len(run.finished) < count:
            run.write(TRACES[sample])


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.002)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "run"


@pytest.fixture
def uninterrupted(tmp_path: Path) -> dict[str, bytes]:
    with create_run(tmp_path / "uninterrupted", SETTINGS, IDS) as run:
        fill(run)
    return read_files(tmp_path / "uninterrupted")


def test_written_traces_are_read_back(folder):
    with create_run(folder, SETTINGS, IDS, plan=[IDS[:4], IDS[4:]]) as run:
        assert (run.finished, run.missing) == ((), tuple(IDS))
        run.write(TRACES["nq-3"])
        run.write(TRACES["nq-1"])
        assert run.finished == ("nq-1", "nq-3")
        assert run.missing == ("nq-0", "nq-2", "nq-4", "nq-5")
    run = open_run(folder)
    assert run.settings == SETTINGS
    assert run.samples == tuple(IDS)
    assert run.plan == [IDS[:4], IDS[4:]]
    assert [trace.sample for trace in run] == ["nq-1", "nq-3"]
    for trace in run:
        assert_equal_traces(trace, TRACES[trace.sample])
    run.check()


def test_a_run_is_a_sequence_of_its_finished_traces(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        assert (len(run), list(run)) == (0, [])
        fill(run, 3)
        assert len(run) == 3
        assert_equal_traces(run["nq-1"], TRACES["nq-1"])
        assert [run[i].sample for i in (0, 1, 2, -1, -3)] == ["nq-0", "nq-1", "nq-2", "nq-2", "nq-0"]
        assert [trace.sample for trace in run] == ["nq-0", "nq-1", "nq-2"]
        assert run.samples == tuple(IDS)
        for index in (3, -4):
            with pytest.raises(IndexError, match=rf"has 3 finished samples, so there is no run\[{index}\]"):
                run[index]
        with pytest.raises(UserError, match=r"sample 'nq-4' of .* is not finished"):
            run["nq-4"]


def test_the_repr_of_a_run_is_short(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        fill(run, 2)
        assert repr(run) == f"Run('{folder}': twin:mdm, 2 of 6 samples finished)"
    with create_run(folder.with_name("scores"), {"kind": "evaluation"}, IDS) as run:
        assert repr(run) == f"Run('{folder.with_name('scores')}': evaluation of 6 samples)"


def test_a_removed_sample_leaves_an_unfinished_run(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        fill(run)
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert read_record(folder)["status"] == "finished"
        run.remove("nq-2")
        assert (run.missing, read_record(folder)["status"]) == (("nq-2",), "unfinished")
        fill(run)
    assert read_record(folder)["status"] == "finished"


def test_a_run_can_be_read_while_it_is_written(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        reader = open_run(folder)
        assert reader.finished == ()
        run.write(TRACES["nq-0"])
        assert reader.finished == ("nq-0",)
        assert_equal_traces(reader.trace("nq-0"), TRACES["nq-0"])


def test_run_json_has_status_and_provenance(folder):
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


def test_awkward_ids_have_their_own_files(folder):
    with create_run(folder, {}, AWKWARD_IDS) as run:
        for i, sample in enumerate(AWKWARD_IDS):
            run.write(record_traces([decode_mdm(i, 2, 2, 1)], names=[sample], level="summary")[0])
        assert run.finished == tuple(AWKWARD_IDS)
    assert [trace.sample for trace in open_run(folder)] == AWKWARD_IDS
    assert {path.name for path in folder.iterdir()} == {"run.json", "run.lock", "samples"}


# Where a run may start ------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_not_overwritten(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        fill(run, 2)
    with pytest.raises(
        UserError, match=r"already holds a run \(2 of 6 samples finished\): resume it with resume=True.*another path"
    ):
        create_run(folder, SETTINGS, IDS)
    assert len(open_run(folder).finished) == 2


def test_a_folder_with_other_files_is_refused(folder):
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("…")
    for resume in (False, True):
        with pytest.raises(
            UserError, match=r"exists and is not a run folder \(it has no run.json\): give another path"
        ):
            create_run(folder, SETTINGS, IDS, resume=resume)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_and_one_killed_at_the_start_are_accepted(folder):
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
    with pytest.raises(UserError, match=r"cannot create a run in .*: Not a directory"):
        create_run(folder / "below", SETTINGS, IDS)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', "\xff"])
def test_a_damaged_run_json_is_refused(folder, text):
    create_run(folder, SETTINGS, IDS).close()
    (folder / "run.json").write_text(text, "latin-1")
    with pytest.raises(UserError, match=r"run.json is damaged, or floatscope did not write it \(.+\); restore it"):
        open_run(folder)
    with pytest.raises(UserError, match="is damaged"):
        create_run(folder, SETTINGS, IDS, resume=True)


def test_a_run_of_another_format_is_refused(folder):
    create_run(folder, SETTINGS, IDS).close()
    write_record(folder, read_record(folder) | {"format": 3})
    with pytest.raises(UserError, match="has run format 3, but this floatscope reads 1 and 2: open it with"):
        open_run(folder)


def test_a_missing_folder_is_refused(folder):
    with pytest.raises(UserError, match=r"does not exist; give a folder that floatscope trace"):
        open_run(folder)


@pytest.mark.parametrize(
    ("samples", "message"),
    [([], "a run needs at least one sample"), (["a", "b", "a"], "sample ids must differ, but 1 occur .*, such as 'a'")],
)
def test_invalid_sample_lists_are_refused(folder, samples, message):
    with pytest.raises(UserError, match=message):
        create_run(folder, SETTINGS, samples)
    assert not folder.exists()


def test_settings_that_are_not_json_are_refused(folder):
    with pytest.raises(UserError, match="the settings of a run must be plain JSON"):
        create_run(folder, {"model": object()}, IDS)
    assert not folder.exists()


# Resuming -------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_uninterrupted_one(folder, uninterrupted):
    for count in (2, 3, 6):
        with create_run(folder, SETTINGS, IDS, resume=True) as run:
            fill(run, count)
    assert read_files(folder) == uninterrupted


def test_settings_are_compared_as_json(folder):
    create_run(folder, SETTINGS, IDS, plan=[IDS]).close()
    create_run(folder, {**SETTINGS, "seeds": (0, 1)}, tuple(IDS), plan=(tuple(IDS),), resume=True).close()
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert run.plan == [IDS]


def test_every_changed_setting_is_named_with_both_values(folder):
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
    assert text.endswith("Use the settings it was created with, or give another path")


def test_the_first_difference_of_a_long_list_is_named(folder):
    create_run(folder, {}, [str(i) for i in range(100)]).close()
    for now, message in {
        99: r"samples \(100 entries in the folder, 99 now\), first at entry 99: \"99\" in the folder, nothing now",
        101: r"samples \(100 entries in the folder, 101 now\), first at entry 100: nothing in the folder, \"100\" now",
    }.items():
        with pytest.raises(UserError, match=message):
            create_run(folder, {}, [str(i) for i in range(now)], resume=True)


def test_a_refused_resume_releases_the_lock(folder):
    create_run(folder, SETTINGS, IDS).close()
    with pytest.raises(UserError) as caught:
        create_run(folder, {}, IDS, resume=True)
    create_run(folder, SETTINGS, IDS, resume=True).close()
    assert caught.tb  # the traceback would keep a lock alive that was not closed


def test_only_partial_files_of_this_run_are_removed(folder):
    create_run(folder, SETTINGS, IDS).close()
    for name in ("nq-3.safetensors.part", "other.safetensors.part", "notes.txt", "nq-3.part"):
        (folder / "samples" / name).write_bytes(b"half")
    assert open_run(folder).finished == ()
    create_run(folder, SETTINGS, IDS, resume=True).close()
    assert set(read_files(folder)) == {"other.safetensors.part", "notes.txt", "nq-3.part"}


# Kills ----------------------------------------------------------------------------------------------------------------


def test_a_run_killed_in_the_middle_of_a_file_can_be_resumed(folder, uninterrupted):
    """kill -9 with half of the third file written: the folder is locked before and free after it."""

    def write_and_hang() -> None:
        run = create_run(folder, SETTINGS, IDS)
        fill(run, 2)

        def hang(descriptor: int) -> None:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            (folder / "hanging").touch()
            time.sleep(60)

        os.fsync = hang
        fill(run)

    with fork_child(write_and_hang) as pid:
        wait_for(folder / "hanging")
        with pytest.raises(UserError, match=f"is being written by process {pid}: wait for it, stop it"):
            create_run(folder, SETTINGS, IDS, resume=True)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert (folder / "samples" / "nq-2.safetensors.part").stat().st_size > 0
    assert open_run(folder).finished == ("nq-0", "nq-1")
    open_run(folder).check()
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert not (folder / "samples" / "nq-2.safetensors.part").exists()
        fill(run)
    assert read_files(folder) == uninterrupted


@pytest.mark.slow
def test_a_run_killed_many_times_finishes(folder, uninterrupted):
    for attempt in range(200):
        with fork_child(lambda: fill(create_run(folder, SETTINGS, IDS, resume=True))):
            time.sleep(0.002 + 0.0005 * attempt)
        if (folder / "run.json").exists():
            open_run(folder).check()
            if not open_run(folder).missing:
                break
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert run.missing == ()
        assert run.record["status"] == "finished"
    assert read_files(folder) == uninterrupted


def test_a_second_writer_in_one_process_is_refused_until_the_first_closes(folder):
    first = create_run(folder, SETTINGS, IDS)
    with pytest.raises(UserError, match=f"is being written by process {os.getpid()}: .*close the run that it has open"):
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


# Failing disks ------------------------------------------------------------------------------------------------------

FULL = r"cannot write .*nq-2\.safetensors: {}\. 2 of 6 samples are finished and readable; .*then resume the run"


def refusal(work, *args) -> str:
    try:
        work(*args)
    except UserError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_full_disk_keeps_finished_samples(folder, uninterrupted, monkeypatch, call):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with create_run(folder, SETTINGS, IDS) as run:
        fill(run, 2)
        with monkeypatch.context() as patch:
            patch.setattr(*{"fsync": (os, "fsync"), "replace": (os, "replace"), "open": (Path, "open")}[call], full)
            with pytest.raises(UserError, match=FULL.format("No space left on device")):
                fill(run)
        assert set(read_files(folder)) == {"nq-0.safetensors", "nq-1.safetensors"}
        fill(run)
    assert read_files(folder) == uninterrupted


def test_a_file_size_limit_keeps_finished_samples(folder, uninterrupted):
    """The kernel refuses the write halfway through the file."""

    def write() -> str:
        run = create_run(folder, SETTINGS, IDS)
        fill(run, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
        return refusal(fill, run)

    assert "nq-2.safetensors: File too large. 2 of 6 samples are finished and readable" in run_in_child(write)
    assert set(read_files(folder)) == {"nq-0.safetensors", "nq-1.safetensors"}
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        fill(run)
    assert read_files(folder) == uninterrupted


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "unshare -rm true"], capture_output=True).returncode != 0,
    reason="no user namespaces here",
)
def test_a_small_real_disk_keeps_finished_samples(tmp_path):
    """A disk of 128 KiB has room for a few files; the rest are refused, and every file on it is complete."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "fill.py").write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from test_run_folder import *\n"
        "run = create_run('disk/run', SETTINGS, IDS)\n"
        "print(refusal(fill, run))\n"
        "run.check()\n"
        "print(len(run.finished), [p.name for p in (run.path / 'samples').iterdir() if p.suffix == '.part'])\n"
    )
    script = f"mount -t tmpfs -o size=128k none disk && exec {sys.executable} fill.py"
    result = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    first, second = result.stdout.splitlines()
    assert "No space left on device. " in first
    finished = int(second.split()[0])
    assert 0 < finished < len(IDS)
    assert f"{finished} of 6 samples are finished and readable" in first
    assert second.endswith("[]")


def test_a_read_only_folder_is_refused():
    parent = Path(tempfile.mkdtemp())
    try:
        parent.chmod(0o755)

        def without_rights(work, *args) -> str:
            if os.geteuid() == 0:
                os.setuid(65534)
            return refusal(work, *args)

        parent.chmod(0o555)
        message = run_in_child(lambda: without_rights(create_run, parent / "run", SETTINGS, IDS))
        assert message == f"cannot create a run in {parent / 'run'}: Permission denied"

        parent.chmod(0o755)
        run = create_run(parent / "run", SETTINGS, IDS)
        fill(run, 2)
        (parent / "run" / "samples").chmod(0o555)
        message = run_in_child(lambda: without_rights(fill, run))
        assert "nq-2.safetensors: Permission denied. 2 of 6 samples are finished and readable" in message
        (parent / "run" / "samples").chmod(0o755)
        run.close()
    finally:
        shutil.rmtree(parent)


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_named_and_can_be_replaced(folder, uninterrupted):
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
    assert_equal_traces(run.trace("nq-2"), TRACES["nq-2"])
    for name in ("nq-1", "nq-4"):
        (folder / "samples" / f"{name}.safetensors").unlink()
    with create_run(folder, SETTINGS, IDS, resume=True) as run:
        assert run.missing == ("nq-1", "nq-4")
        fill(run)
    assert read_files(folder) == uninterrupted


def test_a_trace_of_another_sample_is_refused(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        fill(run, 1)
    shutil.copy(folder / "samples" / "nq-0.safetensors", folder / "samples" / "nq-1.safetensors")
    with pytest.raises(UserError, match=r"nq-1\.safetensors is a trace of sample 'nq-0', not 'nq-1': delete it"):
        open_run(folder).trace("nq-1")


def test_unfinished_and_unknown_samples_are_named(folder):
    with create_run(folder, SETTINGS, IDS) as run:
        fill(run, 1)
        with pytest.raises(UserError, match=r"sample 'nq-3' of .* is not finished \(1 of 6 are\): resume the run"):
            run.trace("nq-3")
        with pytest.raises(UserError, match=r"has no sample 'nq'; it has 6, beginning with 'nq-0', 'nq-1', 'nq-2'"):
            run.trace("nq")
        with pytest.raises(UserError, match="has no sample 'other'"):
            run.write(Trace("other", {}, {}, {}, {}))


def test_a_finished_sample_is_not_overwritten(tmp_path):
    trace = record_traces([decode_mdm(0, 6, 5, 4)])[0]
    with create_run(tmp_path / "run", {}, [trace.sample]) as run:
        run.write(trace)
        with pytest.raises(UserError, match="is finished already: delete it first"):
            run.write(trace)


def test_a_trace_with_other_settings_is_refused(tmp_path):
    trace = record_traces([decode_mdm(0, 6, 5, 4)], meta={"steps": 4})[0]
    with create_run(tmp_path / "run", {"steps": 8}, [trace.sample]) as run:
        with pytest.raises(UserError, match=r"the run was created with steps 8, but sample '.*' was decoded with 4"):
            run.write(trace)
