"""The run folder: the settings of a run, and one checked file per finished sample.

    runs/demo/run.json                      provenance, settings, sample ids, batch plan, status
    runs/demo/samples/<id>.safetensors      one trace each; a file is complete or absent
    runs/demo/run.lock                      held by the one process that writes
    runs/demo/untrained-0/                  a run of its own: the untrained control of seed 0, if there is one

An interrupted run keeps every finished sample and is resumed with `resume=True`. Which samples are finished is read
from the folder, never from memory, so nothing can disagree with the files.

    with create_run("runs/demo", settings, ids, resume=True) as run:
        for sample in run.missing: run.write(decode_and_trace(sample))
    run = open_run("runs/demo")
    len(run), run["nq-1"], run[0], [trace.sample for trace in run]
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floatscope.errors import UserError
from floatscope.files.atomic import PART_SUFFIX, fsync_path
from floatscope.files.locks import Lock, acquire_lock
from floatscope.traces.run_record import (
    FINISHED,
    RECORD_FILE,
    UNFINISHED,
    list_differences,
    new_record,
    read_record,
    write_record,
)
from floatscope.traces.trace import Trace
from floatscope.traces.trace_file import check_trace_file, read_trace, trace_file_name, write_trace

LOCK_FILE, SAMPLES_FOLDER = "run.lock", "samples"
LOCK_REMEDY = "wait for it, stop it, or give another path (if it is this process, close the run that it has open)"
CONTROL_PREFIX = "untrained-"


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run folder, opened for reading (`open_run`) or, holding its lock, for writing (`create_run`).

    A run is a sequence of its finished traces, read from disk one at a time: `len(run)`, `run[0]`, iteration;
    `run["id"]` is the trace of one sample.

    Example:
        run = fs.trace(fs.load("twin:mdm"), fs.read_samples("twin:reading-5", limit=2), "runs/mdm", new_tokens=4)
        len(run), run[0].sample, run.samples
    """

    path: Path
    record: Mapping[str, Any]  # run.json when it was opened
    lock: Lock | None = None

    def __repr__(self) -> str:
        model = f"{self.settings['model']}, " if "model" in self.settings else ""
        kind = self.settings.get("kind")  # a run of scores has no traces
        content = f"{self._progress()} samples finished" if kind is None else f"{kind} of {len(self.samples)} samples"
        return f"Run('{self.path}': {model}{content})"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the run was created with."""
        return dict(self.record["settings"])

    @property
    def provenance(self) -> dict[str, Any]:
        """Versions and machine when the run was created; `record["resumed"]` has the same for every later start."""
        return dict(self.record["provenance"])

    @property
    def plan(self) -> list[list[str]] | None:
        """The ids of the samples that are decoded together, batch by batch."""
        plan: list[list[str]] | None = self.record["plan"]
        return plan

    @property
    def samples(self) -> tuple[str, ...]:
        """The ids of all samples, finished or not."""
        return tuple(self.record["samples"])

    @property
    def finished(self) -> tuple[str, ...]:
        """The ids of the samples whose files exist, in the order of `samples`."""
        folder = self.path / SAMPLES_FOLDER
        names = set(os.listdir(folder)) if folder.is_dir() else set()
        return tuple(sample for sample in self.samples if trace_file_name(sample) in names)

    @property
    def missing(self) -> tuple[str, ...]:
        """The ids of the samples that are not finished."""
        finished = set(self.finished)
        return tuple(sample for sample in self.samples if sample not in finished)

    def trace(self, sample: str) -> Trace:
        """Read one finished sample; its file is checked first."""
        path = self._trace_path(sample)
        if not path.exists():
            raise UserError(
                f"sample '{sample}' of {self.path} is not finished ({self._progress()} are): resume the run"
            )
        trace = read_trace(path)
        if trace.sample != sample:
            raise UserError(
                f"{path} is a trace of sample '{trace.sample}', not '{sample}': delete it and resume the run"
            )
        return trace

    def __len__(self) -> int:
        """The number of finished samples."""
        return len(self.finished)

    def __getitem__(self, key: str | int) -> Trace:
        """The trace of a sample id, or the n-th finished trace."""
        if isinstance(key, str):
            return self.trace(key)
        finished = self.finished
        if not -len(finished) <= key < len(finished):
            raise IndexError(f"{self.path} has {len(finished)} finished samples, so there is no run[{key}]")
        return self.trace(finished[key])

    def __iter__(self) -> Iterator[Trace]:
        """The finished traces, one at a time."""
        return (self.trace(sample) for sample in self.finished)

    def write(self, trace: Trace) -> None:
        """Add a finished sample. Its file appears completely, or not at all and a `UserError` says what is finished."""
        if self.lock is None or self.lock.closed:
            raise UserError(f"{self.path} is open for reading only: write through create_run(…, resume=True)")
        path = self._trace_path(trace.sample)
        if path.exists():
            raise UserError(f"{path} is finished already: delete it first to write it again")
        for key in self.settings.keys() & trace.meta.keys():
            if self.settings[key] != trace.meta[key]:
                raise UserError(
                    f"the run was created with {key} {self.settings[key]!r}, but sample '{trace.sample}' was decoded "
                    f"with {trace.meta[key]!r}: use the settings of the run, or another folder"
                )
        try:
            write_trace(path, trace)
            if not self.missing:
                write_record(self.path, {**self.record, "status": FINISHED})
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}. {self._progress()} samples are finished and readable; fix "
                f"that, then resume the run to decode the others"
            ) from error

    def check(self) -> None:
        """Compare every finished file with its digest; one `UserError` names all damaged files."""
        if damaged := self.find_damaged():
            raise UserError("\n".join(damaged.values()))

    def find_damaged(self) -> dict[str, str]:
        """Return the samples whose files do not match their digests or belong to others, with a sentence for each."""
        damaged = {}
        for sample in self.finished:
            try:
                path = self._trace_path(sample)
                if (stored := check_trace_file(path)["sample"]) != sample:
                    damaged[sample] = f"{path} is a trace of sample '{stored}', not '{sample}'"
            except UserError as error:
                damaged[sample] = str(error)
        return damaged

    def remove(self, sample: str) -> None:
        """Delete the file of a finished sample, so that it is decoded again."""
        write_record(self.path, {**self.record, "status": UNFINISHED})
        self._trace_path(sample).unlink()

    def close(self) -> None:
        """Release the lock, so that another process may write; the run stays readable."""
        if self.lock is not None:
            self.lock.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _trace_path(self, sample: str) -> Path:
        if sample not in self.record["samples"]:
            first = ", ".join(f"'{s}'" for s in self.samples[:3])
            raise UserError(f"{self.path} has no sample '{sample}'; it has {len(self.samples)}, beginning with {first}")
        return self.path / SAMPLES_FOLDER / trace_file_name(sample)

    def _progress(self) -> str:
        return f"{len(self.finished)} of {len(self.samples)}"


def create_run(
    path: str | Path,
    settings: Mapping[str, Any],
    samples: Sequence[str],
    *,
    plan: Sequence[Sequence[str]] | None = None,
    resume: bool = False,
) -> Run:
    """Start a run folder, or with `resume` resume the one in the folder if its settings are the same.

    Resuming an empty folder starts a run, so that a job which a scheduler restarts needs a single command.

    Args:
        path: the folder.
        settings: what the traces depend on, as plain JSON.
        samples: the ids of all samples.
        plan: the ids of the samples that are decoded together; None takes the plan of a run that is resumed.
        resume: whether a run in the folder is resumed.

    Returns:
        The run, with its lock; use it in a `with` block.

    Example:
        model = fs.load("twin:mdm")
        with fs.create_run("runs/own", {"model": "twin:mdm"}, ["a"], resume=True) as run:
            for sample in run.missing:
                out = fs.decode(model, "Where does Mira live?", new_tokens=4, watch=fs.Watch(), samples=[sample])
                run.write(out.trace)
    """
    _check_sample_ids(samples)
    folder, record = Path(path), new_record(settings, samples, plan)
    try:
        _check_folder(folder, resume)
        folder.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(folder / LOCK_FILE, remedy=LOCK_REMEDY)
        try:
            _check_folder(folder, resume)  # again: before the lock was ours, another process may have started here
            return _start_or_resume(folder, record, lock)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise UserError(f"cannot create a run in {folder}: {error.strerror}") from error


def open_run(path: str | Path) -> Run:
    """Open a run folder for reading, even while another process writes it.

    Args:
        path: the folder.

    Returns:
        The run.

    Example:
        run = fs.trace(fs.load("twin:mdm"), fs.read_samples("twin:reading-5", limit=2), "runs/mdm", new_tokens=4)
        for trace in fs.open_run("runs/mdm"):
            print(trace.sample, trace.received().shape)
    """
    return Run(Path(path), read_record(Path(path)))


def check_run(
    path: str | Path,
    settings: Mapping[str, Any],
    samples: Sequence[str],
    *,
    plan: Sequence[Sequence[str]] | None = None,
    resume: bool = False,
) -> None:
    """Raise the `UserError` that `create_run` would raise, without creating anything."""
    _check_sample_ids(samples)
    folder = Path(path)
    try:
        _check_folder(folder, resume)
    except OSError as error:
        raise UserError(f"cannot create a run in {folder}: {error.strerror}") from error
    if (folder / RECORD_FILE).exists():
        _check_same_settings(folder, read_record(folder), new_record(settings, samples, plan))


def control_path(path: str | Path, seed: int) -> Path:
    """Return the folder of the untrained control with this seed."""
    return Path(path) / f"{CONTROL_PREFIX}{seed}"


def find_controls(path: str | Path) -> list[Path]:
    """Return the run folders of a run's untrained controls, by seed."""
    by_seed = {
        int(folder.name.removeprefix(CONTROL_PREFIX)): folder
        for folder in Path(path).glob(f"{CONTROL_PREFIX}*")
        if folder.name.removeprefix(CONTROL_PREFIX).isdecimal() and (folder / RECORD_FILE).exists()
    }
    return [by_seed[seed] for seed in sorted(by_seed)]


def _check_sample_ids(samples: Sequence[str]) -> None:
    """Refuse an empty list and ids that occur twice."""
    if not samples:
        raise UserError("a run needs at least one sample, got none")
    if repeated := [sample for sample, count in Counter(samples).items() if count > 1]:
        raise UserError(f"sample ids must differ, but {len(repeated)} occur more than once, such as '{repeated[0]}'")


def _check_folder(folder: Path, resume: bool) -> None:
    if (folder / RECORD_FILE).exists():
        if not resume:
            progress = open_run(folder)._progress()
            raise UserError(
                f"{folder} already holds a run ({progress} samples finished): resume it with resume=True, or give "
                f"another path"
            )
    # A writer killed before run.json got its name leaves these two files behind.
    elif folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {LOCK_FILE, RECORD_FILE + PART_SUFFIX}):
        raise UserError(f"{folder} exists and is not a run folder (it has no {RECORD_FILE}): give another path")


def _start_or_resume(folder: Path, record: dict[str, Any], lock: Lock) -> Run:
    """Write run.json, or check and extend the one in the folder; the caller holds the lock."""
    if (folder / RECORD_FILE).exists():
        then = read_record(folder)
        _check_same_settings(folder, then, record)
        record = then | {"resumed": [*then["resumed"], record["provenance"]]}
        _remove_partial_files(folder, record["samples"])
    record["status"] = UNFINISHED if Run(folder, record).missing else FINISHED
    write_record(folder, record)  # first, so that a folder with any of our files is recognised as a run
    (folder / SAMPLES_FOLDER).mkdir(exist_ok=True)
    fsync_path(folder.parent)
    return Run(folder, record, lock)


def _check_same_settings(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if then["settings"].get("kind") != now["settings"].get("kind"):
        content = "scores" if "kind" in then["settings"] else "traces"
        raise UserError(f"{folder} holds a run of {content}, but the new run is of another kind: give another path")
    plan = then["plan"] if now["plan"] is None else now["plan"]
    changes = list(list_differences(then["settings"], now["settings"]))
    changes.sort(key=lambda change: "…" in change)  # digests last
    changes += list_differences(
        {"samples": then["samples"], "plan": then["plan"]}, {"samples": now["samples"], "plan": plan}
    )
    if changes:
        raise UserError(
            f"{folder} cannot be resumed with other settings: {'; '.join(changes)}. Use the settings it was created "
            f"with, or give another path"
        )


def _remove_partial_files(folder: Path, samples: Sequence[str]) -> None:
    """Remove the unfinished files that a killed writer of this run left, and no other files."""
    if (folder / SAMPLES_FOLDER).is_dir():
        partial = {trace_file_name(sample) + PART_SUFFIX for sample in samples}
        for name in partial.intersection(os.listdir(folder / SAMPLES_FOLDER)):
            (folder / SAMPLES_FOLDER / name).unlink()
