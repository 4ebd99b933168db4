"""The runs behind docs/claims.md: every claim of the registry on the twins, or on a pair of real models.

    python studies/claims/run.py twins                                       # the shipped twins
    python studies/claims/run.py smollm2 --arm smollm2:arm+control --data runs/pair/data --dtype bf16
    python studies/claims/run.py twins --limit 8                             # a quick look
    python studies/claims/page.py                                            # docs/claims.md, from the folders alone

A folder that is finished is not run again, so an interrupted run resumes. Several processes with the same command share
the work: each takes folders that no other is writing, in an order of its own. Traces are analysed where they are made,
and only the tables are stored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

from runs import evaluate_once, stress_once, study_once
from setups import Setup, open_smollm2, open_twins
from trace_tables import build_trace_tables

import floatscope as fs
from floatscope.analysis.claims.measures import OTHER_TASK, POINTS_FILE, TRACES
from floatscope.errors import UserError

PASSAGES: dict[str, int | str] = {"closed": 0, "gold": "gold", "five": "all"}
STUDIES: dict[str, dict[str, Any]] = {
    "sinks": {"counts": (1, 5, 10)},
    "pin": {"counts": 5, "types": "none"},
    "heads": {"counts": (2, 4)},
}
PROMPTS: dict[str, dict[str, Any]] = {
    "paper-llada": {"template": "af-llada", "chat": False},
    "paper-others": {"template": "af-others", "chat": False},
    "ours": {"template": "instruct", "chat": False},
    "chat": {"template": "instruct", "chat": True},
}
TEMPERATURES = (0.0, 0.2)
OTHER_TASK_QUESTIONS = 32

Task = tuple[Path, Callable[[Path], object]]
"""A folder, and the function that fills it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=("twins", "smollm2"))
    parser.add_argument("--arm", default="smollm2:arm", help="the ARM of the real pair")
    parser.add_argument("--mdm", default="smollm2:mdm", help="the MDM of the real pair")
    parser.add_argument("--data", type=Path, default=Path("runs/pair/data"), help="the folder of split.py")
    parser.add_argument("--out", type=Path, default=Path("runs/claims"))
    parser.add_argument("--role", nargs="+", help="only these models")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=int, help="maximal questions of any run")
    parser.add_argument("--batch", type=int, help="questions per batch")
    parser.add_argument("--dtype")
    args = parser.parse_args(arguments)
    is_twins = args.comparison == "twins"
    setup = open_twins(args.limit) if is_twins else open_smollm2(args.arm, args.mdm, args.data, args.limit)
    out = args.out / setup.name
    out.mkdir(parents=True, exist_ok=True)
    (out / POINTS_FILE).write_text(json.dumps(setup.points, indent=1))
    shared = {"batch_size": args.batch} if args.batch else {}
    for role in args.role or setup.models:
        model = fs.load(setup.models[role], dtype=args.dtype)
        began = time.monotonic()
        tasks = [task for part in args.part for task in PARTS[part](setup, model, role, out, shared)]
        for folder, fill in Random(os.getpid()).sample(tasks, len(tasks)):
            _run_timed(folder, fill)
        print(f"{role}: {time.monotonic() - began:.1f} s", flush=True)


def score_tasks(setup: Setup, model: fs.Model, role: str, out: Path, shared: dict[str, Any]) -> Iterator[Task]:
    """Yield the evaluations with and without passages."""
    for name, samples in (("main", setup.main), ("second", setup.second)):
        for choice, passages in PASSAGES.items():
            settings = {**setup.settings, **shared, "passages": passages, "source": {"data": name}}
            yield out / "scores" / f"{name}-{choice}" / role, partial(evaluate_once, model, samples, **settings)
    for shots, samples in setup.few_shot.items():
        settings = {**setup.settings, **shared, "passages": "all", "source": {"data": "few-shot"}}
        yield out / "examples" / str(shots) / role, partial(evaluate_once, model, samples, **settings)


def stress_tasks(setup: Setup, model: fs.Model, role: str, out: Path, shared: dict[str, Any]) -> Iterator[Task]:
    """Yield the stress sweeps."""
    for name, (kind, samples, options) in setup.stress.items():
        if kind == "masks" and model.spec.paradigm == "arm":
            continue  # only an MDM has masks
        settings = {**setup.settings, **shared}
        yield (
            out / "stress" / name / role,
            partial(stress_once, model, samples, kind=kind, options=options, **settings),
        )


def trace_tasks(setup: Setup, model: fs.Model, role: str, out: Path, shared: dict[str, Any]) -> Iterator[Task]:
    """Yield the traces of the main and of another task, each with its tables and those of untrained controls."""
    settings = {**setup.trace_settings, **shared}
    yield out / TRACES / role, partial(build_trace_tables, model, setup.traced, **settings)
    other = setup.few_shot[max(setup.few_shot)][:OTHER_TASK_QUESTIONS]
    settings = {**setup.settings, **shared}
    yield out / OTHER_TASK / role, partial(build_trace_tables, model, other, tables=("position_profile",), **settings)


def study_tasks(setup: Setup, model: fs.Model, role: str, out: Path, shared: dict[str, Any]) -> Iterator[Task]:
    """Yield the interventions."""
    for name, options in STUDIES.items():
        one_subset = name != "heads"  # that study traces some questions and evaluates the others
        fill = partial(_run_study, name, model, setup.edited, options, {**setup.settings, **shared}, one_subset)
        yield out / "studies" / name / role, fill


def prompt_tasks(setup: Setup, model: fs.Model, role: str, out: Path, shared: dict[str, Any]) -> Iterator[Task]:
    """Yield the evaluations with other prompts and temperatures."""
    if not setup.prompts:
        return
    for prompt, changed in PROMPTS.items():
        for temperature in TEMPERATURES:
            for choice in ("closed", "gold"):
                settings = {**setup.settings, **shared, **changed, "temperature": temperature}
                settings |= {"passages": PASSAGES[choice], "source": {"data": "main"}}
                folder = out / "prompts" / f"{prompt}-{temperature:g}" / choice / role
                yield folder, partial(evaluate_once, model, setup.main, **settings)


PARTS = {
    "scores": score_tasks,
    "stress": stress_tasks,
    "traces": trace_tasks,
    "studies": study_tasks,
    "prompts": prompt_tasks,
}


def _run_study(
    name: str,
    model: fs.Model,
    samples: Sequence[Any],
    options: dict[str, Any],
    settings: dict[str, Any],
    one_subset: bool,
    out: Path,
) -> None:
    study_once(name, model, samples, out, options, settings, one_subset=one_subset)


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
