"""Speed of `evaluate` on questions with five passages, batched and one by one, from text to scores.

    python benchmarks/eval_speed.py                      # CUDA if there is one (8B shape), else the CPU (a twin)
    python benchmarks/eval_speed.py --json out.json

CUDA     LLaDA-8B's shape with random weights; questions with five passages, about 900 tokens each, 32 new tokens in
         32 steps; `share`: floating-point operations of the forwards over the time of the complete evaluation, divided
         by the rate of one large matrix product in the same run
CPU      `twin:mdm` on 200 held-out questions with five passages, 32 new tokens in 32 steps

The time covers everything from the texts to a folder of predictions.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from decode_speed import Bench
from watch_cost import commit, machine

from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.models.spec import ModelSpec
from floatscope.pipelines.evaluate import plan_evaluation
from floatscope.schema import Paradigm
from floatscope.tasks.sample import Passage, Sample
from floatscope.tasks.sample_files import read_shipped

TOKENS, NEW, SINGLES = 900, 32, 4
COUNT = {"cuda": 96, "cpu": 200}
BATCHES = {"cuda": (8, 16, 32, 1), "cpu": (8, 1)}


def make_questions(model: Model, count: int) -> list[Sample]:
    """Return held-out questions whose five passages are extended to about 900 tokens, of varying length."""
    assert model.tokenizer is not None
    samples = []
    for sample in read_shipped("reading-5")[:count]:
        rng = random.Random(sample.id)
        room = rng.randint(TOKENS * 8 // 10, TOKENS * 12 // 10) // len(sample.passages)
        passages = []
        for passage in sample.passages:
            text, length = passage.text, len(model.tokenizer.encode(passage.text, chat=False))
            passages.append(Passage(passage.title, " ".join([text] * max(1, room // length)), passage.gold))
        samples.append(Sample(sample.id, sample.question, sample.answers, tuple(passages)))
    return samples


def time_evaluation(model: Model, samples: list[Sample], batch: int) -> tuple[float, list[int]]:
    """Return the seconds, and the lengths of the prompts."""
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        job = plan_evaluation(model, samples, Path(folder) / "run", batch_size=batch, new_tokens=NEW, steps=NEW)
        for _ in job:
            pass
        return time.perf_counter() - began, [len(item.ids) for item in job.parts[0].items]


def measure_gpu(results: dict[str, Any]) -> None:
    """Add the rows of a GPU."""
    bench = Bench("cuda")
    tokenizer = load("twin:mdm", device="cpu").tokenizer
    model = Model(bench.module, ModelSpec("8B", Paradigm.MDM, bench.vocabulary - 1), tokenizer)
    samples = make_questions(model, COUNT["cuda"])
    results["product_tflops"] = bench.rate / 1e12
    time_evaluation(model, samples[:4], 4)
    for batch in BATCHES["cuda"]:
        selection = samples if batch > 1 else samples[:SINGLES]
        seconds, lengths = time_evaluation(model, selection, batch)
        share = bench.count_operations([[0] * n for n in lengths]) / seconds / bench.rate
        results["rows"].append({"batch": batch, "samples_s": len(selection) / seconds, "share": share})
        results["tokens"] = sum(lengths) / len(lengths)


def measure_cpu(results: dict[str, Any]) -> None:
    """Add the rows of a CPU."""
    model, samples = load("twin:mdm", device="cpu"), read_shipped("reading-5")[: COUNT["cpu"]]
    for batch in BATCHES["cpu"]:
        selection = samples if batch > 1 else samples[: SINGLES * 5]
        seconds, lengths = time_evaluation(model, selection, batch)
        results["rows"].append(
            {"batch": batch, "samples_s": len(selection) / seconds, "for_200_s": 200 * seconds / len(selection)}
        )
        results["tokens"] = sum(lengths) / len(lengths)


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, Any] = {"machine": machine(device), "commit": commit(), "rows": []}
    print(f"{results['machine']}, commit {results['commit']}", flush=True)
    (measure_gpu if device == "cuda" else measure_cpu)(results)
    print(f"{results['tokens']:.0f} tokens per prompt, {NEW} new tokens in {NEW} steps")
    for row in results["rows"]:
        share = (
            f", {row['share']:.0%} of the matrix product" if "share" in row else f", 200 in {row['for_200_s']:.0f} s"
        )
        print(f"batch {row['batch']:>2}: {row['samples_s']:.3g} samples/s{share}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
