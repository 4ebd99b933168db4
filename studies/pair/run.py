"""The runs behind docs/pair.md: an ARM and an MDM through all of floatscope on real questions.

    python studies/pair/run.py --arm smollm2:arm --mdm smollm2:mdm --data runs/pair/data --dtype bf16
    python studies/pair/run.py … --part scores --limit 50 --batch 64        # one part, fewer questions
    python studies/pair/run.py --arm smollm2:arm+control/adapter --base smollm2:arm …     # an ARM with the same data
    python studies/pair/page.py --out runs/pair --page docs/pair.md         # the page, from the folders alone

The data, from split.py, are nq.jsonl and xquad.jsonl, each question with one gold passage. A folder that is finished is
not run again, and a run that is refused is reported and skipped. Traces are analysed where they are made, and only the
tables are stored.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

from runs import evaluate_once, stress_once, study_once
from trace_tables import build_trace_tables

import floatscope as fs
from floatscope.errors import UserError
from floatscope.tasks.sample import Sample
from floatscope.tasks.sample_files import read_samples
from floatscope.tasks.stress import build_points

PASSAGES = 5
SETTINGS: dict[str, Any] = {"template": "instruct", "new_tokens": 16}
QUESTIONS = {"scores": 400, "position": 150, "noise": 150, "query": 100, "traces": 24, "studies": 48}
PASSAGE_CHOICES: dict[str, int | str] = {"closed": 0, "gold": "gold", "five": "all"}
STRESS: dict[str, dict[str, Any]] = {
    "position": {"documents": PASSAGES},
    "noise": {"distractors": "random", "counts": (0, 2, 8), "lengths": "growing"},
    "query": {},
}
STUDIES: dict[str, dict[str, Any]] = {
    "sinks": {"counts": (1, 5), "draws": 1},
    "pin": {"counts": 5},
    "heads": {"counts": (2, 4), "draws": 1},
    "blank": {"draws": 1},
}

Task = tuple[Path, Callable[[Path], object]]
"""A folder, and the function that fills it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", required=True)
    parser.add_argument("--mdm", required=True)
    parser.add_argument("--base", help="the base of both; it runs in the part `scores` only")
    parser.add_argument("--data", type=Path, required=True, help="the folder of nq.jsonl and xquad.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/pair"))
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=int, default=max(QUESTIONS.values()), help="maximal questions of any run")
    parser.add_argument("--batch", type=int, help="questions per batch")
    parser.add_argument("--dtype")
    args = parser.parse_args(arguments)
    SETTINGS["batch_size"] = args.batch
    names = {"arm": args.arm, "mdm": args.mdm} | ({"base": args.base} if args.base else {})
    models = {role: fs.load(name, dtype=args.dtype) for role, name in names.items()}
    data = {name: add_distractors(read_samples(args.data / f"{name}.jsonl")) for name in ("nq", "xquad")}
    for part in args.part:
        began = time.monotonic()
        used = models if part == "scores" else {role: model for role, model in models.items() if role != "base"}
        for folder, fill in PARTS[part](used, data, args.out / part, args.limit):
            _run_timed(folder, fill)
        print(f"{part}: {time.monotonic() - began:.1f} s", flush=True)


def add_distractors(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return every question with its gold passage and four of other questions, in random order."""
    return build_points("position", samples, documents=PASSAGES)[-1].samples


def select_evenly(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return `count` samples, spread evenly over the file."""
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def score_tasks(
    models: dict[str, fs.Model], data: dict[str, Sequence[Sample]], out: Path, limit: int
) -> Iterator[Task]:
    """Yield the evaluations."""
    for name, samples in data.items():
        selection = select_evenly(samples, min(limit, QUESTIONS["scores"]))
        for choice, passages in PASSAGE_CHOICES.items():
            for role, model in models.items():
                settings = {**SETTINGS, "passages": passages, "source": {"data": name}}
                yield out / f"{name}-{choice}" / role, partial(evaluate_once, model, selection, **settings)


def stress_tasks(
    models: dict[str, fs.Model], data: dict[str, Sequence[Sample]], out: Path, limit: int
) -> Iterator[Task]:
    """Yield the stress sweeps."""
    for kind, options in STRESS.items():
        selection = select_evenly(data["nq"], min(limit, QUESTIONS[kind]))
        for role, model in models.items():
            yield out / kind / role, partial(stress_once, model, selection, kind=kind, options=options, **SETTINGS)


def trace_tasks(
    models: dict[str, fs.Model], data: dict[str, Sequence[Sample]], out: Path, limit: int
) -> Iterator[Task]:
    """Yield the traces and their tables."""
    selection = select_evenly(with_evidence(data["nq"]), min(limit, QUESTIONS["traces"]))
    for role, model in models.items():
        yield out / role, partial(build_trace_tables, model, selection, **SETTINGS)


def study_tasks(
    models: dict[str, fs.Model], data: dict[str, Sequence[Sample]], out: Path, limit: int
) -> Iterator[Task]:
    """Yield the interventions."""
    selection = select_evenly(with_evidence(data["nq"]), min(limit, QUESTIONS["studies"]))
    for name, options in STUDIES.items():
        for role, model in models.items():
            one_subset = name != "heads"  # that study traces some questions and evaluates the others
            yield out / name / role, partial(_run_study, name, model, selection, options, one_subset)


def with_evidence(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples whose gold passage has the span of the answer."""
    return [sample for sample in samples if any(passage.evidence for passage in sample.passages)]


PARTS = {"scores": score_tasks, "traces": trace_tasks, "stress": stress_tasks, "studies": study_tasks}


def _run_study(
    name: str, model: fs.Model, samples: Sequence[Sample], options: dict[str, Any], one_subset: bool, out: Path
) -> None:
    study_once(name, model, samples, out, options, SETTINGS, one_subset=one_subset)


def _run_timed(folder: Path, fill: Callable[[Path], object]) -> None:
    began = time.monotonic()
    try:
        fill(folder)
    except UserError as error:
        print(f"{folder} skipped: {error}", flush=True)
    else:
        print(f"{folder} {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
