"""Decoding speed of a masked diffusion model and a causal one, batched and one by one, and the overhead of the loop.

    python benchmarks/decode_speed.py                    # CUDA if there is one (8B shape), else the CPU (7M)
    python benchmarks/decode_speed.py --models llada2-mini sdar-8b --json out.json

MDM      prompts of 512 tokens (32 at a time, on a CPU 8), 32 new tokens in 32 steps, by confidence; `ragged`: prompts
         of 256 to 512 tokens
ARM      the same prompts, 32 new tokens with the cache
share    floating-point operations of the forwards (linear layers, attention, the requested logits) over the decoding
         time, divided by the rate of one large matrix product in the same run
loop     the part of the time outside the forwards
memory   in use while 200 prompts are decoded with tracing
blocks   block-causal models, one prompt: 32 new tokens in 32 steps after a prompt that fills the canvas up to T, plain
         and watched; "rows per forward" shows whether earlier blocks are cached
agree    share of identical tokens between bf16 (CPU: fp32) batches of unequal prompts and the same prompts one by one

The model has random weights: time does not depend on their values, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from watch_cost import BLOCK_LENGTHS, BLOCK_MODELS, DEFAULT_MODEL, SHAPES, build, commit, machine

from floatscope.capture.watcher import Watch
from floatscope.models.model import Model
from floatscope.models.spec import ModelSpec
from floatscope.pipelines.decode import decode
from floatscope.pipelines.decoding import Decoding
from floatscope.schema import Paradigm

PROMPT, NEW = 512, 32
BATCH = {"cuda": 32, "cpu": 8}
ROUNDS = {"cuda": 2, "cpu": 1}
SINGLES = {"cuda": 3, "cpu": 2}
WATCHED_GOAL = {1024: 1.6, 4096: 1.3}
"""The largest ratio allowed between the seconds of watched and plain decoding of a block-causal model, by length."""


class Bench:
    """A model with random weights, opened as an MDM and, if it is not block-causal, as an ARM."""

    def __init__(self, device: str, name: str | None = None) -> None:
        self.device, self.module = device, build(device, name)
        self.vocabulary, block_size = self.module.config.vocab_size, SHAPES[name or DEFAULT_MODEL[device]].block_size
        spec = ModelSpec("mdm", Paradigm.MDM, self.vocabulary - 1, block_size=block_size)
        self.models = {"MDM": Model(self.module, spec)}
        if block_size is None:
            self.models["ARM"] = Model(self.module, ModelSpec("arm", Paradigm.ARM, None, shift=True))

    def make_prompts(self, count: int, seed: int, ragged: bool = False, length: int = PROMPT) -> list[list[int]]:
        """Return prompts of random tokens."""
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(length // 2, length + 1, (count,), generator=rng) if ragged else [length] * count
        return [torch.randint(self.vocabulary - 1, (int(n),), generator=rng).tolist() for n in lengths]

    def decode(
        self, kind: str, prompts: list[list[int]], watch: Watch | None = None, steps: int | None = None
    ) -> tuple[Decoding, float, float]:
        """Return the decoding, its seconds, and the share of them outside the forwards."""
        clock, steps = ForwardClock(self.module, self.device), steps or NEW
        extra = {"steps": steps, "new_tokens": NEW} if kind == "MDM" else {"stop": False, "new_tokens": steps}
        began = self.now()
        with clock:
            out = decode(self.models[kind], prompts, watch=watch, **extra)
            assert len(out.steps) == steps
        seconds = self.now() - began
        return out, seconds, 1 - clock.seconds / seconds

    def decode_blocks(self, prompt: list[int], watch: Watch | None, steps_per_block: int) -> tuple[float, list[int]]:
        """Return the seconds of decoding a prompt in blocks, and the rows of each forward."""
        clock = ForwardClock(self.module, self.device)
        began = self.now()
        with clock:
            out = decode(self.models["MDM"], [prompt], watch=watch, steps=steps_per_block, new_tokens=NEW, stop=False)
            assert len(out.generated_ids[0]) == NEW
        return self.now() - began, clock.rows

    def now(self) -> float:
        """Return the time after all kernels have finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @cached_property
    def rate(self) -> float:
        """Return the floating-point operations per second of one large matrix product in the model's dtype."""
        n = 8192 if self.device == "cuda" else 1536
        a = torch.randn(n, n, device=self.device, dtype=self.module.dtype)
        b = torch.randn(n, n, device=self.device, dtype=self.module.dtype)
        times = []
        for _ in range(12):
            began = self.now()
            for _ in range(5):
                a @ b
            times.append((self.now() - began) / 5)
        return 2 * n**3 / statistics.median(times[2:])

    def count_operations(self, prompts: list[list[int]]) -> float:
        """Return the operations of all forwards of a masked diffusion decoding, without padding."""
        c = self.module.config
        linear = sum(p.numel() for name, p in self.module.named_parameters() if p.ndim == 2 and "layers" in name)
        total = 0.0
        for T in (len(prompt) + NEW for prompt in prompts):
            layers = 2 * linear * T + 4 * c.num_hidden_layers * c.hidden_size * T * T
            total += NEW * (layers + 2 * c.hidden_size * c.vocab_size * NEW)
        return total


class ForwardClock:
    """Measures the time spent in the module's forward."""

    def __init__(self, module: torch.nn.Module, device: str) -> None:
        self.module, self.cuda = module, device == "cuda"
        self.events: list[tuple[Any, Any]] = []
        self.spent = 0.0
        self.rows: list[int] = []

    def __enter__(self) -> None:
        self.handles = [
            self.module.register_forward_pre_hook(lambda *args: self._begin(args[-1]), with_kwargs=True),
            self.module.register_forward_hook(lambda *_: self._end()),
        ]

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _begin(self, arguments: dict[str, Any]) -> None:
        self.rows.append(arguments["input_ids"].shape[1])
        self.start = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            self.start.record()

    def _end(self) -> None:
        if self.cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self.events.append((self.start, end))
        else:
            self.spent += time.perf_counter() - self.start

    @property
    def seconds(self) -> float:
        """Seconds in forwards so far."""
        return sum(a.elapsed_time(b) for a, b in self.events) / 1e3 if self.cuda else self.spent


def measure_speed(bench: Bench) -> list[dict[str, Any]]:
    """Return a row for each paradigm and kind of batch."""
    batch, rows = BATCH[bench.device], []
    for kind in ("MDM", "ARM"):
        batches = {
            f"batch of {batch}": bench.make_prompts(batch, 0),
            f"batch of {batch}, ragged": bench.make_prompts(batch, 1, True),
        }
        for variant, prompts in batches.items():
            bench.decode(kind, prompts, steps=2)  # warm-up
            runs = [bench.decode(kind, prompts) for _ in range(ROUNDS[bench.device])]
            rows.append(make_row(bench, kind, variant, prompts, runs))
        singles = bench.make_prompts(SINGLES[bench.device], 2)
        bench.decode(kind, singles[:1], steps=2)
        runs = [bench.decode(kind, [prompt]) for prompt in singles]
        rows.append(make_row(bench, kind, "one by one", singles[:1], runs))
    return rows


def measure_blocks(device: str, name: str) -> list[dict[str, Any]]:
    """Return a row for each length of a block-causal model, decoded one prompt at a time."""
    bench, rows = Bench(device, name), []
    for T in BLOCK_LENGTHS[device]:
        [prompt] = bench.make_prompts(1, T, length=T - NEW)
        seconds, lengths = {}, []
        for kind, watch in {"plain": None, "watched": Watch()}.items():
            bench.decode_blocks(prompt, watch, 1)  # warm-up
            seconds[kind], lengths = bench.decode_blocks(prompt, watch, SHAPES[name].block_size)
        rows.append(
            {
                "model": name,
                "T": T,
                "plain_tokens_s": NEW / seconds["plain"],
                "watched_tokens_s": NEW / seconds["watched"],
                "ratio": seconds["watched"] / seconds["plain"],
                "goal": WATCHED_GOAL.get(T),
                "rows_per_forward": statistics.median(lengths),
            }
        )
    return rows


def print_blocks(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table of the block-causal models."""
    print("| model | T | plain tokens/s | watched tokens/s | watched / plain | goal | rows per forward |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for r in rows:
        figures = f"{r['plain_tokens_s']:.3g} | {r['watched_tokens_s']:.3g} | {r['ratio']:.2f} | {r['goal'] or ''}"
        print(f"| {r['model']} | {r['T']} | {figures} | {r['rows_per_forward']:.0f} |", flush=True)


def make_row(
    bench: Bench, kind: str, variant: str, prompts: list[list[int]], runs: list[tuple[Decoding, float, float]]
) -> dict[str, Any]:
    """Return the rates of the median run."""
    seconds, loop = statistics.median(s for _, s, _ in runs), statistics.median(outside for *_, outside in runs)
    rate = len(prompts) / seconds
    share = bench.count_operations(prompts) / seconds / bench.rate if kind == "MDM" else None
    return {
        "model": kind,
        "variant": variant,
        "prompts_s": rate,
        "tokens_s": NEW * rate,
        "share": share,
        "loop": loop,
    }


def measure_memory(bench: Bench, prompts: int = 200, batch: int = 8) -> list[float]:
    """Return the MiB in use after every batch; the traces of a batch are deleted before the next."""
    used = []
    for start in range(0, prompts, batch):
        out, *_ = bench.decode("MDM", bench.make_prompts(batch, start, ragged=True), Watch(), steps=2)
        assert len(out.traces) == batch
        del out
        if bench.device == "cuda":
            used.append(torch.cuda.memory_allocated() / 2**20)
        else:
            ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system first
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20)
    return used


def measure_agreement(bench: Bench, prompts: int = 4) -> dict[str, float]:
    """Return the share of tokens that a ragged batch has in common with its prompts decoded alone."""
    shares, several = {}, bench.make_prompts(prompts, 7, ragged=True)
    for kind in ("MDM", "ARM"):
        together = torch.tensor(bench.decode(kind, several)[0].generated_ids)
        alone = torch.tensor([bench.decode(kind, [prompt])[0].generated_ids[0] for prompt in several])
        shares[kind] = float((together == alone).float().mean())
    return shares


def measure_default(device: str) -> dict[str, Any]:
    """Print the tables of the model that attends to all positions, and return them."""
    bench = Bench(device)
    print(f"one matrix product: {bench.rate / 1e12:.3g} TFLOP/s")
    rows = measure_speed(bench)
    print("| model | variant | prompts/s | tokens/s | share of the matrix product | outside the forward |")
    print("|---|---|---:|---:|---:|---:|")
    for r in rows:
        share = "" if r["share"] is None else f"{r['share']:.0%}"
        figures = f"{r['prompts_s']:.3g} | {r['tokens_s']:.3g} | {share} | {r['loop']:.1%}"
        print(f"| {r['model']} | {r['variant']} | {figures} |", flush=True)
    agreement = measure_agreement(bench)
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in agreement.items())
    print(f"tokens that a ragged batch has in common with single prompts: {shares}")
    used = measure_memory(bench)
    first, middle, last = used[0], used[len(used) // 2], used[-1]
    print(f"MiB while 200 prompts are traced: {first:.0f} first, {middle:.0f} half way, {last:.0f} last")
    return {"rows": rows, "agreement": agreement, "memory_mib": used}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = (DEFAULT_MODEL[device], *BLOCK_MODELS[device])
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="default: all of this device")
    args = parser.parse_args()
    print(f"{machine(device)}, commit {commit()}")
    results: dict[str, Any] = {"machine": machine(device), "commit": commit(), "blocks": []}
    if DEFAULT_MODEL[device] in args.models:
        results |= measure_default(device)
    for name in args.models:
        if SHAPES[name].block_size is not None:
            results["blocks"] += measure_blocks(device, name)
    if results["blocks"]:
        print_blocks(results["blocks"])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
