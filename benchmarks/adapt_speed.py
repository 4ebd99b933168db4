"""Training speed of an adaptation, beside a bare forward and backward: SmolLM2's shape with random weights.

    python benchmarks/adapt_speed.py --device cuda
    python benchmarks/adapt_speed.py --shape tiny                # to try it on a CPU

forward       forward and backward of the base on the same rows, all weights trainable, a mean as the loss
eager         steps of `floatscope adapt`, rank 32
compiled      the same with compiled layers, as on a GPU

The table has tokens per second, text and questions together, over the last half of the steps, and the peak memory.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from watch_cost import commit, machine

from floatscope.lab.adapt import train
from floatscope.lab.adapt.examples import ANSWER, PAD, PROMPT, TAIL, Batch
from floatscope.lab.adapt.lora import make_trainable
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.training.progress import Progress

SHAPES = {
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "vocab_size": 49152},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 1024},
}
MASK = 16


def make_batches(recipe: Recipe, vocabulary: int) -> Iterator[Batch]:
    """Yield rows of random tokens; questions fill three quarters of their rows."""
    rng = np.random.default_rng(0)
    for length in itertools.cycle(recipe.lengths):
        text = rng.integers(20, vocabulary, (recipe.tokens // recipe.length, recipe.length), np.int32)
        tokens = rng.integers(20, vocabulary, (recipe.tokens // length, length), np.int32)
        roles = np.full(tokens.shape, PROMPT, np.uint8)
        end = 3 * length // 4
        roles[:, end - 16 : end - 8], roles[:, end - 8 : end], roles[:, end:] = ANSWER, TAIL, PAD
        yield Batch(text, tokens, roles)


def build_network(shape: str, device: str) -> Any:
    """Return a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPES[shape], tie_word_embeddings=True)).to(device)


def measure_speed(variant: str, shape: str, device: str, recipe: Recipe) -> tuple[float, float]:
    """Return tokens per second, and GiB of peak memory."""
    module, rows = build_network(shape, device), make_batches(recipe, SHAPES[shape]["vocab_size"])
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    if variant == "forward":
        for _, batch in zip(range(recipe.steps), rows, strict=False):
            for part in (batch.text, batch.tokens):
                tokens = torch.from_numpy(part.astype("int64")).to(device)
                with torch.autocast(device, torch.bfloat16):
                    loss = module(tokens, is_causal=False, use_cache=False).logits.mean()
                loss.backward()
            module.zero_grad()
            times.append(_synchronized_time(device))
    else:
        make_trainable(module, MASK, recipe.rank)
        optimizer = train.build_optimizer(module, recipe)
        train.LOG_EVERY = 1
        for _ in train.train_steps(
            module, optimizer, recipe, rows, Progress(0, []), lambda: False, variant == "compiled"
        ):
            times.append(_synchronized_time(device))
    half = len(times) // 2
    speed = 2 * recipe.tokens * (len(times) - 1 - half) / (times[-1] - times[half])
    return speed, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")


def _synchronized_time(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--tokens", type=int, default=16384 if torch.cuda.is_available() else 2048)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    recipe = Recipe(steps=args.steps, tokens=args.tokens, mask_id=MASK)
    variants = ["forward", "eager", *(["compiled"] if args.device == "cuda" else [])]
    print(
        f"{machine(args.device)}, commit {commit()}, shape {args.shape}, {args.tokens:,} tokens of each kind per step"
    )
    print("| | ktok/s | of forward | GiB |\n|---|---:|---:|---:|")
    results = {v: measure_speed(v, args.shape, args.device, recipe) for v in variants}
    for variant, (speed, memory) in results.items():
        print(f"| {variant} | {speed / 1e3:,.0f} | {speed / results['forward'][0]:.2f} | {memory:.1f} |")


if __name__ == "__main__":
    main()
