"""The run folder: what was asked, and one checked file per finished sample.

    runs/demo/run.json                      provenance, settings, sample ids, batch plan, status
    runs/demo/samples/<id>.safetensors      one trace each; there once it is whole
    runs/demo/run.lock                      held by the one process that writes
    runs/demo/untrained-0/                  a run of its own: the untrained control of seed 0, where there is one

A run that was killed keeps every finished sample and goes on with `resume=True`. Which samples are done is read from
the folder, never from memory, so that nothing can disagree with the files.

    with create_run("runs/demo", settings, ids, resume=True) as run:
        for sample in run.missing: run.write(decode_and_trace(sample))
    for trace in open_run("runs/demo"): print(trace.sample, trace.received().shape)
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from floatscope.errors import UserError
from floatscope.files.atomic import PART, sync
from floatscope.traces.file import check_file, file_name, read_trace, write_trace
from floatscope.traces.record import RECORD, differences, new_record, read_record, write_record
from floatscope.traces.trace import Trace

LOCK, SAMPLES = "run.lock", "samples"
CONTROL = "untrained-"


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder, opened for reading (`open_run`) or, holding its lock, for writing (`create_run`)."""

    path: Path
    record: Mapping[str, Any] = field(repr=False)  # run.json as it was when opened
    lock: IO[str] | None = field(default=None, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.record["settings"])

    @property
    def provenance(self) -> dict[str, Any]:
        """Versions and machine when the run was created; `record["resumed"]` has the same for every later start."""
        return dict(self.record["provenance"])

    @property
    def plan(self) -> list[list[str]] | None:
        """Which samples are decoded together."""
        plan: list[list[str]] | None = self.record["plan"]
        return plan

    @property
    def samples(self) -> tuple[str, ...]:
        return tuple(self.record["samples"])

    @property
    def done(self) -> tuple[str, ...]:
        """The samples whose files are there, in the order of `samples`."""
        folder = self.path / SAMPLES
        there = set(os.listdir(folder)) if folder.is_dir() else set()
        return tuple(sample for sample in self.samples if file_name(sample) in there)

    @property
    def missing(self) -> tuple[str, ...]:
        done = set(self.done)
        return tuple(sample for sample in self.samples if sample not in done)

    def trace(self, sample: str) -> Trace:
        """Read one finished sample; its file is checked first."""
        path = self._file(sample)
        if not path.exists():
            raise UserError(f"sample '{sample}' of {self.path} is not finished ({self._count()} are): resume the run")
        trace = read_trace(path)
        if trace.sample != sample:
            raise UserError(f"{path} holds sample '{trace.sample}', not '{sample}': delete it and resume the run")
        return trace

    def __iter__(self) -> Iterator[Trace]:
        """The finished traces, one at a time."""
        return (self.trace(sample) for sample in self.done)

    def write(self, trace: Trace) -> None:
        """Add a finished sample. Its file appears whole, or not at all and a `UserError` says where the run stands."""
        if self.lock is None or self.lock.closed:
            raise UserError(f"{self.path} is open for reading only: write through create_run(…, resume=True)")
        path = self._file(trace.sample)
        if path.exists():
            raise UserError(f"{path} is finished already: delete it first if it should be made anew")
        for key in self.settings.keys() & trace.meta.keys():
            if self.settings[key] != trace.meta[key]:
                raise UserError(
                    f"the run was begun with {key} {self.settings[key]!r} and sample '{trace.sample}' was made with"
                    f" {trace.meta[key]!r}: use the run's settings, or another folder"
                )
        try:
            write_trace(path, trace)
            if not self.missing:
                write_record(self.path, {**self.record, "status": "finished"})
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}. {self._count()} samples are finished and readable; mend that, "
                f"then resume and the run continues with the others"
            ) from error

    def check(self) -> None:
        """Compare every finished file with its digest; one `UserError` names all that are damaged."""
        damaged = []
        for sample in self.done:
            try:
                check_file(self._file(sample))
            except UserError as error:
                damaged.append(str(error))
        if damaged:
            raise UserError("\n".join(damaged))

    def close(self) -> None:
        """Let go of the folder, so that another process may write; reading goes on working."""
        if self.lock is not None:
            self.lock.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file(self, sample: str) -> Path:
        if sample not in self.record["samples"]:
            few = ", ".join(f"'{s}'" for s in self.samples[:3])
            raise UserError(f"{self.path} has no sample '{sample}'; it has {len(self.samples)}, beginning with {few}")
        return self.path / SAMPLES / file_name(sample)

    def _count(self) -> str:
        return f"{len(self.done)} of {len(self.samples)}"


def create_run(
    path: str | Path,
    settings: Mapping[str, Any],
    samples: Sequence[str],
    *,
    plan: Sequence[Sequence[str]] | None = None,
    resume: bool = False,
) -> Run:
    """Start a run folder, or with `resume` go on with the one that is there, if it was asked the same.

    Resuming where there is no run yet starts one, so that a job restarted by a scheduler needs a single command.
    """
    _check_samples(samples)
    folder, record = Path(path), new_record(settings, samples, plan)
    try:
        _check_place(folder, resume)
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(folder)
        try:
            _check_place(folder, resume)  # again: until the lock was ours, another process may have begun here
            return _start(folder, record, lock)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise UserError(f"cannot make a run in {folder}: {error.strerror}") from error


def open_run(path: str | Path) -> Run:
    """Open a run folder for reading, after it was written or while it is."""
    return Run(Path(path), read_record(Path(path)))


def check_run(
    path: str | Path,
    settings: Mapping[str, Any],
    samples: Sequence[str],
    *,
    plan: Sequence[Sequence[str]] | None = None,
    resume: bool = False,
) -> None:
    """What `create_run` would refuse, before anything is made."""
    _check_samples(samples)
    folder = Path(path)
    try:
        _check_place(folder, resume)
    except OSError as error:
        raise UserError(f"cannot make a run in {folder}: {error.strerror}") from error
    if (folder / RECORD).exists():
        _check_same(folder, read_record(folder), new_record(settings, samples, plan))


def control_path(path: str | Path, seed: int) -> Path:
    """Where the untrained control of a run lies."""
    return Path(path) / f"{CONTROL}{seed}"


def controls(path: str | Path) -> list[Path]:
    """The run folders of a run's untrained controls, by seed."""
    found = {
        int(folder.name.removeprefix(CONTROL)): folder
        for folder in Path(path).glob(f"{CONTROL}*")
        if folder.name.removeprefix(CONTROL).isdecimal() and (folder / RECORD).exists()
    }
    return [found[seed] for seed in sorted(found)]


def _check_samples(samples: Sequence[str]) -> None:
    if not samples:
        raise UserError("a run needs at least one sample, got none")
    if doubles := [sample for sample, times in Counter(samples).items() if times > 1]:
        raise UserError(f"sample ids must differ, and {len(doubles)} occur more than once, such as '{doubles[0]}'")


def _check_place(folder: Path, resume: bool) -> None:
    if (folder / RECORD).exists():
        if not resume:
            count = open_run(folder)._count()
            raise UserError(
                f"{folder} already holds a run ({count} samples finished): continue it with resume=True, "
                f"or give another path"
            )
    # A writer killed before run.json had its name leaves these two behind.
    elif folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {LOCK, RECORD + PART}):
        raise UserError(f"{folder} exists and is not a run folder (it has no {RECORD}): give another path")


def _start(folder: Path, record: dict[str, Any], lock: IO[str]) -> Run:
    """Write run.json, or take over the one that is there; the lock is ours."""
    if (folder / RECORD).exists():
        then = read_record(folder)
        _check_same(folder, then, record)
        record = then | {"resumed": [*then["resumed"], record["provenance"]]}
        _sweep(folder, record["samples"])
    record["status"] = "unfinished" if Run(folder, record).missing else "finished"
    write_record(folder, record)  # first, so that a folder with anything of ours in it is known for a run
    (folder / SAMPLES).mkdir(exist_ok=True)
    sync(folder.parent)
    return Run(folder, record, lock)


def _check_same(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if then["settings"].get("what") != now["settings"].get("what"):
        held = "scores" if "what" in then["settings"] else "traces"
        raise UserError(f"{folder} holds a run of {held}, and this would be another kind of run: give another path")
    plan = then["plan"] if now["plan"] is None else now["plan"]
    changes = sorted(differences(then["settings"], now["settings"]), key=lambda change: "…" in change)  # digests last
    changes += differences({key: then[key] for key in ("samples", "plan")}, {"samples": now["samples"], "plan": plan})
    if changes:
        raise UserError(
            f"{folder} cannot be resumed with other settings: {'; '.join(changes)}. Give those it was made with, "
            f"or another path"
        )


def _sweep(folder: Path, samples: Sequence[str]) -> None:
    """Remove what a killed writer of this run left half done, and nothing else: other files are not ours."""
    if (folder / SAMPLES).is_dir():
        ours = {file_name(sample) + PART for sample in samples}
        for name in ours.intersection(os.listdir(folder / SAMPLES)):
            (folder / SAMPLES / name).unlink()


def _take_lock(folder: Path) -> IO[str]:
    """Hold run.lock until the file is closed or the process is gone, however it goes: the kernel frees an flock."""
    lock = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        writer = lock.read().strip()
        lock.close()
        if not isinstance(error, BlockingIOError):  # a network disk without locks
            raise
        raise UserError(
            f"{folder} is being written by process {writer}: wait for it, or stop it, or give another path "
            f"(if it is this very process, close the run it has open)"
        ) from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
