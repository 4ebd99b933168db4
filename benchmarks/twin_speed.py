"""How fast the shipped twins decode: 32 new tokens after a prompt of 300, watched and unwatched.

    python benchmarks/twin_speed.py                      # on the CPU, with all its cores
    python benchmarks/twin_speed.py --json out.json --rounds 20

twin:mdm    32 new tokens in 32 steps, by confidence
twin:arm    32 new tokens with the cache
watched     with `fs.Watch()`: everything the keep level `summary` keeps

The variants take turns; of each the best and the median round are told. The best is what the machine can do when
nothing else runs on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from watch_cost import commit, machine

from floatscope.capture.watcher import Watch
from floatscope.lab.twins.heldout import read
from floatscope.lab.twins.lessons import prompt_of
from floatscope.models.load import load
from floatscope.models.model import Model
from floatscope.pipelines.decode import decode

PROMPT, NEW = 300, 32
GOALS = {("mdm", "unwatched"): 2.5}  # seconds
WATCHES = {"unwatched": None, "watched": Watch()}


def prompt(model: Model) -> list[int]:
    """Held-out questions one after the other, cut to length."""
    assert model.tokenizer is not None
    text = "\n".join(prompt_of(sample) for sample in read("reading-5")[:4])
    return model.tokenizer.encode(text, chat=False)[:PROMPT]


def seconds(model: Model, ids: list[int], watch: Watch | None) -> float:
    extra: dict[str, Any] = {"steps": NEW} if model.spec.paradigm == "mdm" else {"stop": False}
    began = time.perf_counter()
    assert len(decode(model, [ids], new_tokens=NEW, watch=watch, **extra).steps) == NEW
    return time.perf_counter() - began


def measure(rounds: int) -> list[dict[str, Any]]:
    models = {kind: load(f"twin:{kind}", device="cpu") for kind in ("mdm", "arm")}
    variants = [(kind, what) for kind in models for what in WATCHES]
    times: dict[tuple[str, str], list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds + 1):
        for kind, what in variants:
            times[kind, what].append(seconds(models[kind], prompt(models[kind]), WATCHES[what]))
    return [
        {"model": f"twin:{kind}", "what": what, "best_s": min(t), "median_s": statistics.median(t)}
        for (kind, what), (_, *t) in times.items()  # the first round warms up
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    print(f"{machine('cpu')}, commit {commit()}")
    rows = measure(args.rounds)
    print("| model | what | best s | median s | goal s |\n|---|---|---:|---:|---:|")
    for r in rows:
        goal = GOALS.get((r["model"].removeprefix("twin:"), r["what"]), "")
        print(f"| {r['model']} | {r['what']} | {r['best_s']:.2f} | {r['median_s']:.2f} | {goal} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine("cpu"), "commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
