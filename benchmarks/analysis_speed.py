"""Time and memory of analysing a run: all tables of `analyse`, in one pass.

    python benchmarks/analysis_speed.py                     # 64 samples, 32 steps, 32 layers of 32 heads, T = 1024
    python benchmarks/analysis_speed.py --samples 8 --profile

The run is synthetic (moving anchors, realistic sizes). Another process writes it to a temporary folder first, so that
the peak memory is that of the analysis. Reading includes the check of every file's digest. CPU seconds are those of
this process, whatever else runs on the machine.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from watch_cost import commit, machine

from floatscope.analysis import analyse
from floatscope.files.sizes import format_size
from floatscope.schema import FIELDS, GROUPS, RANKS, State, fields_at_level
from floatscope.traces import Trace, create_run, forecast, open_run
from floatscope.traces.trace_fields import COORDS, TRACE_FIELDS, stored_axes

T, STEPS, LAYERS, HEADS, NEW = 1024, 32, 32, 32, 32
PARTS = ("template", *(f"document {k}" for k in range(1, 6)), "question", "answer")
REGIONS = (*PARTS, "gold", "evidence")
GOAL = "60 s and 4 GB for 64 samples"


def main() -> None:
    """Print the times and the peak memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="print a profile")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_run(args.write, args.samples)
        return
    size = forecast(
        samples=args.samples, steps=STEPS, layers=LAYERS, heads=HEADS, keys=T, regions=len(REGIONS), commits=NEW
    )
    print(
        f"{machine('cpu')}, commit {commit()}; {args.samples} samples, {format_size(size.total)} of traces", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--write", folder, "--samples", str(args.samples)]
        subprocess.run(command, check=True)
        result = measure_analysis(Path(folder), args.profile)
    for row in result["at"]:
        print(f"{row['samples']:3} samples: {row['seconds']:.1f} s")
    print(f"{result['cpu']:.1f} s of CPU time; reading took {result['reading']:.1f} s")
    print(f"peak memory {result['peak_mib']:.0f} MiB; goal: {GOAL}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine("cpu"), "commit": commit(), **result}, indent=1))


def measure_analysis(folder: Path, profile: bool) -> dict[str, Any]:
    """Return times by number of samples, CPU and reading seconds, peak memory, and rows per table."""
    run = open_run(folder)
    reading, times = 0.0, []

    def traces() -> Any:
        nonlocal reading
        for sample in run.finished:
            start = time.perf_counter()
            trace = run.trace(sample)
            reading += time.perf_counter() - start
            yield trace

    def record_time(_: str) -> None:
        times.append(time.perf_counter() - began)

    profiler = cProfile.Profile(time.process_time)
    began, cpu = time.perf_counter(), time.process_time()
    if profile:
        profiler.enable()
    tables = analyse(traces(), on_progress=record_time)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(40)
    cpu = time.process_time() - cpu
    assert not tables.missing, tables.missing
    marks = sorted({len(times) // 4, len(times) // 2, len(times)} - {0})
    return {
        "at": [{"samples": n, "seconds": times[n - 1]} for n in marks],
        "cpu": cpu,
        "reading": reading,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rows": {name: len(table) for name, table in tables.tables.items()},
    }


def write_run(folder: Path, samples: int) -> None:
    """Write a synthetic run."""
    names = [f"sample-{i}" for i in range(samples)]
    with create_run(folder, {}, names, resume=True) as run:
        for seed, name in enumerate(names):
            run.write(make_trace(name, np.random.default_rng(seed)))


def make_trace(sample: str, rng: np.random.Generator) -> Trace:
    """Return a trace with an anchor in each layer that lasts a few steps; fields that no analysis reads are zero."""
    sizes = {"step": STEPS, "layer": LAYERS, "head": HEADS, "key": T, "rank": RANKS, "commit": NEW, "visibility": 1}
    sizes |= {"region": len(REGIONS), "key_region": len(REGIONS), "position": T}
    sizes |= {axis: len(names) for axis, names in COORDS.items()}
    fields = {name: FIELDS[name] for name in fields_at_level("summary")} | TRACE_FIELDS
    axes = {name: f.axes if name in TRACE_FIELDS else stored_axes(name, f.axes) for name, f in fields.items()}
    arrays = {name: np.zeros([sizes[axis] for axis in axes[name]], f.dtype) for name, f in fields.items()}
    step, key, prompt = np.arange(STEPS), np.arange(T), T - NEW

    states = np.where(key < prompt, State.PROMPT, np.where(key - prompt < step[:, None], State.COMMITTED, State.MASKED))
    text = rng.choice(100_000, T)
    arrays["tokens"][:], arrays["states"][:] = np.where(states == State.MASKED, 126_336, text), states
    arrays["keys"][:], arrays["queries"][:], arrays["tokens_after"][:] = T, T, text
    arrays["block"][:], arrays["layers"][:] = (prompt, T), np.arange(LAYERS)
    arrays["commit_step"][:], arrays["commit_position"][:] = step, prompt + step
    arrays["commit_row"][:], arrays["commit_token"][:] = prompt + step, text[prompt:]
    part = np.minimum(key // (prompt // (len(PARTS) - 1)), len(PARTS) - 2)
    arrays["region_member"][key, np.where(key < prompt, part, len(PARTS) - 1)] = True
    arrays["region_member"][:, -2] = arrays["region_member"][:, 1]  # gold is the first document
    arrays["region_member"][:, -1] = arrays["region_member"][:, 1] & (key % 50 < 3)

    received = rng.gamma(2, 1, (STEPS, LAYERS, len(GROUPS), T))
    path = rng.integers(0, T, (STEPS // 4, LAYERS)).repeat(4, 0)
    np.put_along_axis(received, np.broadcast_to(path[..., None, None], (*received.shape[:3], 1)), 400.0, -1)
    arrays["received"][:] = received / received.sum(-1, keepdims=True)
    arrays["uniform"][:], arrays["eligible"][:] = 1 / T, 1
    arrays["visible_rows"][:] = np.stack([np.full(STEPS, T), NEW - step, step, np.ones(STEPS)], -1)[:, None, :, None]
    arrays["top_key"][:] = rng.integers(0, T, arrays["top_key"].shape, np.int32)
    arrays["top"][:] = rng.random(arrays["top"].shape, np.float32) * 10
    arrays["moments"][..., 0], arrays["moments"][..., 1], arrays["moments"][..., 2] = T, T, 4 * T
    arrays["head_stats"][:] = rng.random(arrays["head_stats"].shape, np.float32)
    arrays["key_stats"][:] = rng.random(arrays["key_stats"].shape, np.float32)
    arrays["contribution"][:] = arrays["received"] * rng.random(arrays["received"].shape, np.float32)
    arrays["row_key"][:] = rng.integers(0, T, arrays["row_key"].shape, np.int32)
    for name in ("score_at_mean_direction", "residual", "row_mass", "row_regions", "regions", "rollout"):
        arrays[name][:] = rng.random(arrays[name].shape, np.float32) / len(REGIONS)

    pieces = {str(i): ("\n", " .", "", " word")[i % 4] for i in [*text.tolist(), 126_336]}
    meta = {"paradigm": "mdm", "rows": "all", "pieces": pieces, "special": {"mask": 126_336}, "special_ids": [126_336]}
    coords = {**COORDS, "region": REGIONS, "key_region": REGIONS}
    return Trace(sample, arrays, axes, coords, meta)


if __name__ == "__main__":
    main()
