"""Decoding speed of the shipped twins: 32 new tokens after a prompt of 300, with and without tracing.

    python benchmarks/twin_speed.py                      # on the CPU, with all its cores
    python benchmarks/twin_speed.py --json out.json --rounds 20

twin:mdm    32 new tokens in 32 steps, by confidence
twin:arm    32 new tokens with the cache
watched     with `fs.Watch()`: everything the level `summary` captures

The variants alternate; the table shows the best and the median round of each. The best shows the speed of an idle
machine.
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
from floatscope.lab.twins.examples import build_prompt
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.pipelines.decode import decode
from floatscope.tasks.sample_files import read_shipped

PROMPT, NEW = 300, 32
GOALS = {("mdm", "unwatched"): 2.5}  # seconds
WATCHES = {"unwatched": None, "watched": Watch()}


def make_prompt(model: Model) -> list[int]:
    """Return the token ids of held-out questions, cut to length."""
    assert model.tokenizer is not None
    text = "\n".join(build_prompt(sample) for sample in read_shipped("reading-5")[:4])
    return model.tokenizer.encode(text, chat=False)[:PROMPT]


def time_decoding(model: Model, ids: list[int], watch: Watch | None) -> float:
    """Return the seconds of one decoding."""
    extra: dict[str, Any] = {"steps": NEW} if model.spec.paradigm == "mdm" else {"stop": False}
    began = time.perf_counter()
    assert len(decode(model, [ids], new_tokens=NEW, watch=watch, **extra).steps) == NEW
    return time.perf_counter() - began


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each twin and variant."""
    models = {kind: load(f"twin:{kind}", device="cpu") for kind in ("mdm", "arm")}
    variants = [(kind, variant) for kind in models for variant in WATCHES]
    times: dict[tuple[str, str], list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds + 1):
        for kind, variant in variants:
            times[kind, variant].append(time_decoding(models[kind], make_prompt(models[kind]), WATCHES[variant]))
    return [
        {"model": f"twin:{kind}", "variant": variant, "best_s": min(t), "median_s": statistics.median(t)}
        for (kind, variant), (_, *t) in times.items()  # the first round is a warm-up
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    print(f"{machine('cpu')}, commit {commit()}")
    rows = measure(args.rounds)
    print("| model | variant | best s | median s | goal s |\n|---|---|---:|---:|---:|")
    for r in rows:
        goal = GOALS.get((r["model"].removeprefix("twin:"), r["variant"]), "")
        print(f"| {r['model']} | {r['variant']} | {r['best_s']:.2f} | {r['median_s']:.2f} | {goal} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine("cpu"), "commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
