"""Cost of an intervention: traced decoding with an edit on every head and layer, against traced decoding without.

    python benchmarks/edit_cost.py                       # CUDA if there is one (8B shape), else the CPU (a twin)
    python benchmarks/edit_cost.py --json out.json

CUDA     LLaDA-8B's shape with random weights, bf16, a canvas of 1,024 positions, 32 of them masks
CPU      `twin:mdm`, a held-out question with five passages, 8 masks
watched  `fs.decode(watch=fs.Watch())`: everything the level `summary` captures; `plain`: no tracing

The variants alternate, one decoding each; the table shows the median step in milliseconds, and its ratio to `watched`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from watch_cost import build, commit, machine

from floatscope.capture.watcher import Watch
from floatscope.lab.twins.examples import build_prompt
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.models.spec import ModelSpec
from floatscope.pipelines.decode import decode
from floatscope.schema import Paradigm
from floatscope.tasks.sample_files import read_shipped

GOALS = {"cuda": {"mask_anchors(k=5)": 1.4}, "cpu": {"mask_anchors(k=5)": 1.5}}
EDITS = (
    "mask_anchors(k=5)", "pin(k=5)", "spread(k=5)", "virtual_sink(score=0.0)", "scale_values(k=5)",
    "zero_heads(pairs=[(0, 0)])", "evict(keep=0.5)",
)  # fmt: skip
ROUNDS = {"cuda": 5, "cpu": 7}


def load_inputs(device: str) -> tuple[Model, list[int], int, int]:
    """Return the model, its prompt, the number of new tokens, and the number of steps to run."""
    if device == "cpu":
        model = load("twin:mdm", device="cpu")
        assert model.tokenizer is not None
        return model, model.tokenizer.encode(build_prompt(read_shipped("reading-5")[0]), chat=False), 8, 8
    module = build("cuda")
    vocabulary = module.config.vocab_size
    rng = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary - 1, (992,), generator=rng).tolist()
    return Model(module, ModelSpec("8B", Paradigm.MDM, vocabulary - 1)), prompt, 32, 6


def time_steps(
    model: Model, prompt: list[int], new_tokens: int, count: int, edit: str | None, watched: bool
) -> list[float]:
    """Return the seconds of each step but the first, which is a warm-up."""
    out = decode(
        model, [prompt], new_tokens=new_tokens, watch=Watch() if watched else None, edits=() if edit is None else edit
    )
    times, decoding = [], iter(out)
    for _ in range(count):
        began = time.perf_counter()
        next(decoding)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[1:]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, *inputs = load_inputs(device)
    variants: dict[str, tuple[str | None, bool]] = {"plain": (None, False), "watched": (None, True)}
    variants |= {edit: (edit, True) for edit in EDITS}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS[device]):
        for name, (edit, watched) in variants.items():
            times[name] += time_steps(model, *inputs, edit, watched)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    rows: list[dict[str, Any]] = [
        {"variant": name, "ms": 1e3 * value, "ratio": value / median["watched"], "goal": GOALS[device].get(name)}
        for name, value in median.items()
    ]
    print(f"{machine(device)}, commit {commit()}")
    print("| variant | ms per step | ratio to watched | goal |\n|---|---:|---:|---:|")
    for row in rows:
        print(f"| {row['variant']} | {row['ms']:.1f} | {row['ratio']:.2f} | {row['goal'] or ''} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(device), "commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
