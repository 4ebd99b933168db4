"""`PredictionPart`: a part of a job whose results are the lines of one file, written batch by batch.

    runs/mdm-5/run.json              settings, provenance, sample ids, status
    runs/mdm-5/predictions.jsonl     one line per sample

The batches are always the same, and a batch is written as a whole or not at all, so a resumed part has the bytes of an
uninterrupted one.
"""

from __future__ import annotations

import json
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from floatscope.analysis.evaluations import PREDICTIONS_FILE, read_predictions
from floatscope.errors import UserError
from floatscope.files.atomic import explain_write_errors
from floatscope.files.records import with_digest
from floatscope.pipelines.job import Batch, Part
from floatscope.traces import Run, create_run
from floatscope.traces.run_record import FINISHED, RECORD_FILE, write_record

logger = logging.getLogger(__name__)

Lines = list[dict[str, Any]]
"""The lines of `predictions.jsonl` for a batch."""


class PredictionPart(Part):
    """A part whose results are lines of `predictions.jsonl`."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that the predictions depend on."""

    @property
    @abstractmethod
    def sample_ids(self) -> list[str]:
        """The ids of the samples."""

    @property
    @abstractmethod
    def batch_plan(self) -> list[list[str]]:
        """The sample ids of each batch."""

    @abstractmethod
    def predict(self, batches: Sequence[Sequence[str]]) -> Iterator[Lines]:
        """Yield the lines of each of these batches."""

    @property
    def total(self) -> int:
        """The number of samples."""
        return len(self.sample_ids)

    def count_done(self) -> int:
        """Return the number of samples on disk now."""
        return len(read_predictions(self.path))

    def work(self) -> Iterator[Batch]:
        """Do the missing batches."""
        with create_run(self.path, self.settings, self.sample_ids, plan=self.batch_plan, resume=True) as run:
            assert run.plan is not None
            lines = _resume_predictions(run)
            missing = run.plan[_count_batches(run.plan, len(lines)) :]
            size = max(map(len, run.plan))
            logger.info(
                "%s: %d of %d batches to do, up to %d samples each", self.name, len(missing), len(run.plan), size
            )
            scores = [line["acc"] for line in lines if "acc" in line]
            for ids, new_lines in zip(missing, self.predict(missing), strict=True):
                _append(self.path / PREDICTIONS_FILE, new_lines)
                scores += [line["acc"] for line in new_lines if "acc" in line]
                yield Batch(tuple(ids), float(np.mean(scores)) if scores else None)
            with explain_write_errors("the status", self.path / RECORD_FILE):
                write_record(self.path, {**run.record, "status": FINISHED})


def _resume_predictions(run: Run) -> list[dict[str, Any]]:
    """The complete batches of an earlier start, in the order of the plan. The file is cut after them."""
    lines = read_predictions(run.path)
    assert run.plan is not None
    order = [sample for ids in run.plan for sample in ids]
    if [line["id"] for line in lines] != order[: len(lines)]:
        raise UserError(
            f"{run.path / PREDICTIONS_FILE} has other samples than the run, or another order; restore it from a"
            " copy, or delete it and run the same command again"
        )
    keep = sum(len(ids) for ids in run.plan[: _count_batches(run.plan, len(lines))])
    file = run.path / PREDICTIONS_FILE
    if file.exists():
        head = b"".join(line + b"\n" for line in file.read_bytes().split(b"\n")[:keep])
        with explain_write_errors("the predictions", file):
            os.truncate(file, len(head))
    return lines[:keep]


def _count_batches(plan: Sequence[Sequence[str]], lines: int) -> int:
    """How many complete batches the first lines of the file are."""
    ends = np.cumsum([len(ids) for ids in plan])
    return int((ends <= lines).sum())


def _append(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    data = "".join(json.dumps(with_digest(line), ensure_ascii=False) + "\n" for line in lines).encode()
    with explain_write_errors("the predictions", file), file.open("ab") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
