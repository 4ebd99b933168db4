"""How fast questions with five passages are answered: `evaluate`, batched and one by one, from text to scores.

    python benchmarks/eval_speed.py                      # here: CUDA if there is one (8B shape), else the CPU (a twin)
    python benchmarks/eval_speed.py --json out.json

CUDA     LLaDA-8B's shape with random weights; questions with five passages, about 900 tokens each, 32 new tokens in
         32 steps; `share`: floating-point operations of the forwards over the time of the whole evaluation, divided by
         the rate of one large matrix product measured in the same run
CPU      `twin:mdm` on 200 held-out questions with five passages, 32 new tokens in 32 steps

The time begins with texts and ends with a folder of predictions; nothing is left out of it.
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

from floatscope.lab.twins.heldout import read
from floatscope.models.load import load
from floatscope.models.model import Model, ModelSpec
from floatscope.pipelines.evaluate import plan_evaluation
from floatscope.tasks.sample import Passage, Sample

TOKENS, NEW, SINGLES = 900, 32, 4
COUNT = {"cuda": 96, "cpu": 200}
BATCHES = {"cuda": (8, 16, 32, 1), "cpu": (8, 1)}


def questions(model: Model, count: int) -> list[Sample]:
    """Held-out questions whose five passages are drawn out to about 900 tokens, unequal as real ones are."""
    assert model.tokenizer is not None
    made = []
    for sample in read("reading-5")[:count]:
        rng = random.Random(sample.id)
        room = rng.randint(TOKENS * 8 // 10, TOKENS * 12 // 10) // len(sample.passages)
        passages = []
        for passage in sample.passages:
            text, length = passage.text, len(model.tokenizer.encode(passage.text, chat=False))
            passages.append(Passage(passage.title, " ".join([text] * max(1, room // length)), passage.gold))
        made.append(Sample(sample.id, sample.question, sample.answers, tuple(passages)))
    return made


def timed(model: Model, samples: list[Sample], batch: int) -> tuple[float, list[int]]:
    """Seconds, and the lengths of the prompts."""
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        made = plan_evaluation(model, samples, Path(folder) / "run", batch=batch, new_tokens=NEW, steps=NEW)
        for _ in made:
            pass
        return time.perf_counter() - began, [len(item.ids) for item in made.items]


def on_gpu(found: dict[str, Any]) -> None:
    bench = Bench("cuda")
    text = load("twin:mdm", device="cpu").tokenizer
    model = Model(bench.module, ModelSpec("8B", "mdm", bench.vocabulary - 1), text)
    samples = questions(model, COUNT["cuda"])
    found["product_tflops"] = bench.rate / 1e12
    timed(model, samples[:4], 4)
    for batch in BATCHES["cuda"]:
        some = samples if batch > 1 else samples[:SINGLES]
        seconds, lengths = timed(model, some, batch)
        share = bench.operations([[0] * n for n in lengths]) / seconds / bench.rate
        found["rows"].append({"batch": batch, "samples_s": len(some) / seconds, "share": share})
        found["tokens"] = sum(lengths) / len(lengths)


def on_cpu(found: dict[str, Any]) -> None:
    model, samples = load("twin:mdm", device="cpu"), read("reading-5")[: COUNT["cpu"]]
    for batch in BATCHES["cpu"]:
        some = samples if batch > 1 else samples[: SINGLES * 5]
        seconds, lengths = timed(model, some, batch)
        found["rows"].append({"batch": batch, "samples_s": len(some) / seconds, "for_200_s": 200 * seconds / len(some)})
        found["tokens"] = sum(lengths) / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {"machine": machine(device), "commit": commit(), "rows": []}
    print(f"{found['machine']}, commit {found['commit']}", flush=True)
    (on_gpu if device == "cuda" else on_cpu)(found)
    print(f"{found['tokens']:.0f} tokens in a prompt, {NEW} new in {NEW} steps")
    for row in found["rows"]:
        share = (
            f", {row['share']:.0%} of the matrix product" if "share" in row else f", 200 in {row['for_200_s']:.0f} s"
        )
        print(f"batch {row['batch']:>2}: {row['samples_s']:.3g} samples/s{share}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
