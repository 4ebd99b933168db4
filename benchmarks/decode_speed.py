"""How fast decoding is: a masked diffusion model and a causal one, batched and one by one, and what the loop adds.

    python benchmarks/decode_speed.py                    # here: CUDA if there is one (8B shape), else the CPU (7M)
    python benchmarks/decode_speed.py --json out.json

MDM      prompts of 512 tokens (32 at a time, on a CPU 8), 32 new tokens in 32 steps, by confidence; `ragged`: prompts
         of 256 to 512 tokens
ARM      the same prompts, 32 new tokens with the cache
share    floating-point operations of the forwards (linear layers, attention, the logits that are asked for) over the
         time of the decoding, divided by the rate of one large matrix product measured in the same run
loop     the part of the time in which no forward runs
memory   in use while 200 prompts are decoded under watch
agree    bf16 (CPU: fp32) batches of unequal prompts against the same prompts one by one: tokens that are the same

The model has random weights: time does not depend on their values, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from watch_cost import build, commit, machine

from floatscope.capture.watcher import Watch
from floatscope.models.model import Model, ModelSpec
from floatscope.pipelines.decode import Decoding, decode

PROMPT, NEW = 512, 32
BATCH = {"cuda": 32, "cpu": 8}
ROUNDS = {"cuda": 2, "cpu": 1}
SINGLES = {"cuda": 3, "cpu": 2}


class Bench:
    def __init__(self, device: str) -> None:
        self.device, self.module = device, build(device)
        self.vocabulary = self.module.config.vocab_size
        self.models = {
            "MDM": Model(self.module, ModelSpec("mdm", "mdm", self.vocabulary - 1)),
            "ARM": Model(self.module, ModelSpec("arm", "arm", None, shift=True)),
        }
        self.rate = self.matrix_product()

    def prompts(self, count: int, seed: int, ragged: bool = False) -> list[list[int]]:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(PROMPT // 2, PROMPT + 1, (count,), generator=draw) if ragged else [PROMPT] * count
        return [torch.randint(self.vocabulary - 1, (int(n),), generator=draw).tolist() for n in lengths]

    def decode(
        self, kind: str, prompts: list[list[int]], watch: Watch | None = None, steps: int | None = None
    ) -> tuple[Decoding, float, float]:
        """The decoding, its seconds, and the part of them outside the forwards."""
        clock, steps = Clock(self.module, self.device), steps or NEW
        extra = {"steps": steps, "new_tokens": NEW} if kind == "MDM" else {"stop": False, "new_tokens": steps}
        began = self.now()
        with clock:
            out = decode(self.models[kind], prompts, watch=watch, **extra)
            assert len(out.steps) == steps
        seconds = self.now() - began
        return out, seconds, 1 - clock.seconds / seconds

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def matrix_product(self) -> float:
        """Floating-point operations per second of one large matrix product in the model's dtype."""
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

    def operations(self, prompts: list[list[int]]) -> float:
        """Of all forwards of a masked diffusion decoding; padding is not counted."""
        c = self.module.config
        linear = sum(p.numel() for name, p in self.module.named_parameters() if p.ndim == 2 and "layers" in name)
        total = 0.0
        for T in (len(prompt) + NEW for prompt in prompts):
            layers = 2 * linear * T + 4 * c.num_hidden_layers * c.hidden_size * T * T
            total += NEW * (layers + 2 * c.hidden_size * c.vocab_size * NEW)
        return total


class Clock:
    """Time spent inside the module's forward."""

    def __init__(self, module: torch.nn.Module, device: str) -> None:
        self.module, self.cuda = module, device == "cuda"
        self.events: list[tuple[Any, Any]] = []
        self.spent = 0.0

    def __enter__(self) -> None:
        self.handles = [
            self.module.register_forward_pre_hook(lambda *_: self._begin()),
            self.module.register_forward_hook(lambda *_: self._end()),
        ]

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _begin(self) -> None:
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
        return sum(a.elapsed_time(b) for a, b in self.events) / 1e3 if self.cuda else self.spent


def speed(bench: Bench) -> list[dict[str, Any]]:
    batch, rows = BATCH[bench.device], []
    for kind in ("MDM", "ARM"):
        batches = {
            f"batch of {batch}": bench.prompts(batch, 0),
            f"batch of {batch}, ragged": bench.prompts(batch, 1, True),
        }
        for what, prompts in batches.items():
            bench.decode(kind, prompts, steps=2)  # warm
            rows.append(
                row(bench, kind, what, prompts, [bench.decode(kind, prompts) for _ in range(ROUNDS[bench.device])])
            )
        singles = bench.prompts(SINGLES[bench.device], 2)
        bench.decode(kind, singles[:1], steps=2)
        rows.append(row(bench, kind, "one by one", singles[:1], [bench.decode(kind, [prompt]) for prompt in singles]))
    return rows


def row(
    bench: Bench, kind: str, what: str, prompts: list[list[int]], runs: list[tuple[Decoding, float, float]]
) -> dict[str, Any]:
    seconds, loop = statistics.median(s for _, s, _ in runs), statistics.median(outside for *_, outside in runs)
    found = {"model": kind, "what": what, "prompts_s": len(prompts) / seconds, "tokens_s": NEW * len(prompts) / seconds}
    share = bench.operations(prompts) / seconds / bench.rate if kind == "MDM" else None
    return {**found, "share": share, "loop": loop}


def memory(bench: Bench, prompts: int = 200, batch: int = 8) -> list[float]:
    """MiB in use after every batch; a batch's traces are dropped before the next."""
    used = []
    for start in range(0, prompts, batch):
        out, *_ = bench.decode("MDM", bench.prompts(batch, start, ragged=True), Watch(), steps=2)
        assert len(out.traces) == batch
        del out
        if bench.device == "cuda":
            used.append(torch.cuda.memory_allocated() / 2**20)
        else:
            ctypes.CDLL(None).malloc_trim(0)  # what is freed, not what the allocator keeps for later
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20)
    return used


def agreement(bench: Bench, prompts: int = 4) -> dict[str, float]:
    """Share of tokens a ragged batch has in common with its prompts decoded alone."""
    found, several = {}, bench.prompts(prompts, 7, ragged=True)
    for kind in ("MDM", "ARM"):
        together = torch.tensor(bench.decode(kind, several)[0].generated)
        alone = torch.tensor([bench.decode(kind, [prompt])[0].generated[0] for prompt in several])
        found[kind] = float((together == alone).float().mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{machine(device)}, commit {commit()}")
    bench = Bench(device)
    print(f"one matrix product: {bench.rate / 1e12:.3g} TFLOP/s")
    rows = speed(bench)
    print("| model | what | prompts/s | tokens/s | share of the matrix product | outside the forward |")
    print("|---|---|---:|---:|---:|---:|")
    for r in rows:
        share = "" if r["share"] is None else f"{r['share']:.0%}"
        figures = f"{r['prompts_s']:.3g} | {r['tokens_s']:.3g} | {share} | {r['loop']:.1%}"
        print(f"| {r['model']} | {r['what']} | {figures} |", flush=True)
    agreed = agreement(bench)
    print(f"tokens a ragged batch has in common with single prompts: MDM {agreed['MDM']:.1%}, ARM {agreed['ARM']:.1%}")
    used = memory(bench)
    first, middle, last = used[0], used[len(used) // 2], used[-1]
    print(f"MiB while 200 prompts are watched: {first:.0f} first, {middle:.0f} half way, {last:.0f} last")
    if args.json:
        told = {"machine": machine(device), "commit": commit(), "rows": rows, "agreement": agreed, "memory_mib": used}
        args.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
