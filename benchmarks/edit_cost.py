"""What an intervention costs: watched decoding with an edit on every head and layer against watched decoding without.

    python benchmarks/edit_cost.py                       # here: CUDA if there is one (8B shape), else the CPU (a twin)
    python benchmarks/edit_cost.py --json out.json

CUDA     LLaDA-8B's shape with random weights, bf16, a canvas of 1,024 positions, 32 of them masks; milliseconds a step
CPU      `twin:mdm`, a held-out question with five passages, 8 masks
watched  `fs.decode(watch=fs.Watch())`: everything the keep level `summary` keeps; `plain`: unwatched

The variants take turns, a decoding each; of each the median step is told, and its ratio to the watched one.
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
from floatscope.lab.twins.heldout import read
from floatscope.lab.twins.lessons import prompt_of
from floatscope.models.load import load
from floatscope.models.model import Model, ModelSpec
from floatscope.pipelines.decode import decode

GOALS = {"cuda": {"mask_anchors(k=5)": 1.4}, "cpu": {"mask_anchors(k=5)": 1.5}}
EDITS = (
    "mask_anchors(k=5)", "pin(k=5)", "spread(k=5)", "virtual_sink(score=0.0)", "scale_values(k=5)",
    "zero_heads(pairs=[(0, 0)])", "evict(keep=0.5)",
)  # fmt: skip
ROUNDS = {"cuda": 5, "cpu": 7}


def of_device(device: str) -> tuple[Model, list[int], int, int]:
    """The model, its prompt, how many new tokens, how many steps are taken of them."""
    if device == "cpu":
        model = load("twin:mdm", device="cpu")
        assert model.tokenizer is not None
        return model, model.tokenizer.encode(prompt_of(read("reading-5")[0]), chat=False), 8, 8
    module = build("cuda")
    vocabulary = module.config.vocab_size
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary - 1, (992,), generator=draw).tolist()
    return Model(module, ModelSpec("8B", "mdm", vocabulary - 1)), prompt, 32, 6


def steps(model: Model, prompt: list[int], new: int, count: int, edit: str | None, watched: bool) -> list[float]:
    """Seconds of each step but the first, which warms up."""
    out = decode(
        model, [prompt], new_tokens=new, watch=Watch() if watched else None, edits=() if edit is None else edit
    )
    times, taking = [], iter(out)
    for _ in range(count):
        began = time.perf_counter()
        next(taking)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, *asked = of_device(device)
    variants: dict[str, tuple[str | None, bool]] = {"plain": (None, False), "watched": (None, True)}
    variants |= {edit: (edit, True) for edit in EDITS}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS[device]):
        for name, (edit, watched) in variants.items():
            times[name] += steps(model, *asked, edit, watched)
    median = {name: statistics.median(each) for name, each in times.items()}
    rows: list[dict[str, Any]] = [
        {"what": name, "ms": 1e3 * value, "ratio": value / median["watched"], "goal": GOALS[device].get(name)}
        for name, value in median.items()
    ]
    print(f"{machine(device)}, commit {commit()}")
    print("| what | ms a step | ratio to watched | goal |\n|---|---:|---:|---:|")
    for row in rows:
        print(f"| {row['what']} | {row['ms']:.1f} | {row['ratio']:.2f} | {row['goal'] or ''} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(device), "commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
