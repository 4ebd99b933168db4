"""An ARM and an MDM through all of floatscope on real questions: the runs behind docs/pair.md.

    python studies/pair/run.py --arm smollm2:arm --mdm smollm2:mdm --data runs/pair/data --dtype bf16
    python studies/pair/run.py … --part scores --limit 50 --batch 64        # one part, fewer questions
    python studies/pair/run.py --arm smollm2:arm+control/adapter --base smollm2:arm …     # an ARM that learnt the same
    python studies/pair/page.py --out runs/pair --page docs/pair.md         # the page, from the folders alone

The data, from split.py, are nq.jsonl and xquad.jsonl, each question with its one gold passage. A folder that is
finished is not asked again, and one that cannot be made is told and left out. Traces are measured where they are made,
and the tables kept.
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

from runs import asked, studied, under
from tables import measured

import floatscope as fs
from floatscope.errors import UserError
from floatscope.tasks.read import read_samples
from floatscope.tasks.sample import Sample
from floatscope.tasks.stress import points

PASSAGES = 5
HOW: dict[str, Any] = {"prompt": "instruct", "new_tokens": 16}
QUESTIONS = {"scores": 400, "position": 150, "noise": 150, "query": 100, "traces": 24, "studies": 48}
SETTINGS: dict[str, int | str] = {"closed": 0, "gold": "gold", "five": "all"}
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

Made = tuple[Path, Callable[[Path], object]]
"""A folder, and what fills it."""


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", required=True)
    parser.add_argument("--mdm", required=True)
    parser.add_argument("--base", help="what both were made from; asked for its scores alone")
    parser.add_argument("--data", type=Path, required=True, help="the folder of nq.jsonl and xquad.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/pair"))
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=int, default=max(QUESTIONS.values()), help="most questions of any run")
    parser.add_argument("--batch", type=int, help="questions asked together")
    parser.add_argument("--dtype")
    args = parser.parse_args(given)
    HOW["batch"] = args.batch
    named = {"arm": args.arm, "mdm": args.mdm} | ({"base": args.base} if args.base else {})
    models = {who: fs.load(name, dtype=args.dtype) for who, name in named.items()}
    data = {name: among(read_samples(args.data / f"{name}.jsonl")) for name in ("nq", "xquad")}
    for part in args.part:
        began = time.monotonic()
        able = models if part == "scores" else {who: model for who, model in models.items() if who != "base"}
        for folder, fill in PARTS[part](able, data, args.out / part, args.limit):
            _timed(folder, fill)
        print(f"{part}: {time.monotonic() - began:.1f} s", flush=True)


def among(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Every question with its gold passage anywhere among those of other questions, five in all."""
    return points("position", samples, documents=PASSAGES)[-1].samples


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """So many, evenly over the file."""
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def scores(models: dict[str, fs.Model], data: dict[str, Sequence[Sample]], out: Path, limit: int) -> Iterator[Made]:
    for name, samples in data.items():
        some = spread(samples, min(limit, QUESTIONS["scores"]))
        for setting, passages in SETTINGS.items():
            for who, model in models.items():
                how = {**HOW, "passages": passages, "source": {"data": name}}
                yield out / f"{name}-{setting}" / who, partial(asked, model, some, **how)


def stress(models: dict[str, fs.Model], data: dict[str, Sequence[Sample]], out: Path, limit: int) -> Iterator[Made]:
    for kind, options in STRESS.items():
        some = spread(data["nq"], min(limit, QUESTIONS[kind]))
        for who, model in models.items():
            yield out / kind / who, partial(under, model, some, kind=kind, options=options, **HOW)


def traces(models: dict[str, fs.Model], data: dict[str, Sequence[Sample]], out: Path, limit: int) -> Iterator[Made]:
    some = spread(with_evidence(data["nq"]), min(limit, QUESTIONS["traces"]))
    for who, model in models.items():
        yield out / who, partial(measured, model, some, **HOW)


def studies(models: dict[str, fs.Model], data: dict[str, Sequence[Sample]], out: Path, limit: int) -> Iterator[Made]:
    some = spread(with_evidence(data["nq"]), min(limit, QUESTIONS["studies"]))
    for name, options in STUDIES.items():
        for who, model in models.items():
            own = name != "heads"  # which traces some of the questions and asks the others
            yield out / name / who, partial(_studied, name, model, some, options, own)


def with_evidence(samples: Sequence[Sample]) -> list[Sample]:
    """Those whose gold passage is known to hold the answer, and where."""
    return [sample for sample in samples if any(passage.evidence for passage in sample.passages)]


PARTS = {"scores": scores, "traces": traces, "stress": stress, "studies": studies}


def _studied(
    name: str, model: fs.Model, samples: Sequence[Sample], options: dict[str, Any], own: bool, out: Path
) -> None:
    studied(name, model, samples, out, options, HOW, as_they_are=own)


def _timed(folder: Path, fill: Callable[[Path], object]) -> None:
    began = time.monotonic()
    try:
        fill(folder)
    except UserError as error:
        print(f"{folder} left out: {error}", flush=True)
    else:
        print(f"{folder} {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
