"""Cost of tracing: a watched forward against the plain one, all layers and heads, ratios of medians in one run.

    python benchmarks/watch_cost.py                      # CUDA if there is one, else the CPU
    python benchmarks/watch_cost.py --json out.json

R        received attention of 16 query groups (3 groups and 13 regions), nothing else
summary  everything the level `summary` computes in a forward: R, entropy, rollout, top keys, moments, norms
decode   summary as `decode` runs it: keys are stored until the commits are known, then one predicting row
eager    `attn_implementation="eager"` with `output_attentions=True`, the usual way to see attention
ragged … `decode` for a batch of 16 canvases of several lengths, each with a commit; up to 1024 tokens
causal … the same for an autoregressive model: plain, R, summary, and TransformerLens caching every pattern (CPU only)
graph    both sides replayed as a CUDA graph: the cost without kernel launches

The model has random weights: time does not depend on their values, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from floatscope.canvas import CanvasState, Commits, Regions
from floatscope.capture.hooks import attach
from floatscope.capture.watcher import Watch, Watcher
from floatscope.schema import State

SHAPES = {
    "cuda": dict(  # LLaDA-8B
        vocab_size=126464, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=32768,
    ),
    "cpu": dict(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=4096,
    ),
}  # fmt: skip
LENGTHS = {"cuda": (256, 1024, 4096, 16384, 32768), "cpu": (512, 2048)}
ROUNDS = {"cuda": {256: 40, 1024: 30, 4096: 15, 16384: 7, 32768: 2}, "cpu": {512: 15, 2048: 9}}
EAGER_UP_TO = {"cuda": 4096, "cpu": 2048}
REGIONS = 13
RAGGED, RAGGED_UP_TO = 16, 1024
R_ALONE = ("received", "regions")


def build(device: str) -> LlamaForCausalLM:
    """Return a model with random weights: LLaDA-8B's shape on a GPU, a small one on a CPU."""
    config = LlamaConfig(**SHAPES[device], tie_word_embeddings=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def make_canvas(T: int, vocab: int, device: str) -> CanvasState:
    """Return a canvas that is half prompt and half masks, with thirteen regions of equal length."""
    generator = torch.Generator().manual_seed(T)
    tokens = torch.randint(0, vocab, (1, T), generator=generator).to(device)
    states = torch.full((1, T), int(State.PROMPT), device=device)
    states[:, T // 2 :] = int(State.MASKED)
    edges = torch.linspace(0, T, REGIONS + 1).int().tolist()
    spans = {f"region {i}": [(edges[i], edges[i + 1])] for i in range(REGIONS)}
    regions = Regions.from_spans([spans], T)
    return CanvasState(tokens, states, regions=Regions(regions.names, regions.member.to(device)))


def make_ragged_canvas(T: int, vocab: int, device: str) -> CanvasState:
    """Return a left-padded batch of sixteen canvases; the longest has T tokens, each next one is a little shorter."""
    one = make_canvas(T, vocab, device)
    states = one.states.repeat(RAGGED, 1)
    for i in range(RAGGED):
        states[i, : i * T // (4 * RAGGED)] = int(State.PAD)
    regions = Regions(one.regions.names, one.regions.member.repeat(RAGGED, 1, 1))
    return CanvasState(one.tokens.repeat(RAGGED, 1), states, regions=regions)


@dataclass(frozen=True)
class Variant:
    """A function to time, and the context around it, which is entered before the clock starts, as in decoding."""

    run: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Bench:
    """A model and its variants of a forward."""

    def __init__(self, device: str) -> None:
        self.device, self.model = device, build(device)

    def forward(self, canvas: CanvasState, causal: bool = False, **kwargs: Any) -> Any:
        """Run the model on a canvas."""
        if len(canvas.tokens) > 1:
            kwargs["attention_mask"] = canvas.valid.long()
        return self.model(input_ids=canvas.tokens, is_causal=causal, use_cache=False, **kwargs)

    def plain(self, canvas: CanvasState, causal: bool = False) -> Variant:
        """Return the forward without tracing."""
        return Variant(lambda: self.forward(canvas, causal))

    def watched(
        self, canvas: CanvasState, watcher: Watcher, commits: Commits | None = None, causal: bool = False
    ) -> Variant:
        """Return the traced forward."""

        def run() -> Any:
            watcher.begin(canvas)
            self.forward(canvas, causal)
            return watcher.finish(commits)

        return Variant(run, lambda: attach(self.model, watcher))

    def eager(self, canvas: CanvasState) -> Variant:
        """Return the forward with eager attention and its probabilities."""

        @contextmanager
        def use_eager() -> Iterator[None]:
            self.model.set_attn_implementation("eager")
            yield
            self.model.set_attn_implementation("sdpa")

        return Variant(lambda: self.forward(canvas, output_attentions=True).attentions[-1].shape, use_eager)

    def lens(self, canvas: CanvasState) -> Variant | None:
        """Return the same weights in TransformerLens with cached attention patterns; None if it is not installed."""
        try:
            from transformer_lens.model_bridge import TransformerBridge
        except ImportError:
            return None
        words = Tokenizer(WordLevel({str(i): i for i in range(self.model.config.vocab_size)}, unk_token="0"))
        with TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            special = {"unk_token": "0", "bos_token": "1", "eos_token": "2", "pad_token": "3"}
            PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
            bridge = TransformerBridge.boot_transformers(folder, device="cpu")
        patterns = re.compile("hook_pattern$").search
        return Variant(lambda: bridge.run_with_cache(canvas.tokens, names_filter=lambda name: bool(patterns(name))))

    def graphed(self, canvas: CanvasState, watcher: Watcher | None) -> Variant:
        """Return the forward with all reductions as a CUDA graph, without `finish`, which reads numbers back.

        During the capture of a graph, transformers' sdpa mask function makes a [T, T] mask even if none is needed,
        which would slow the plain side down; an attention without a mask function gets none.
        """
        graph = torch.cuda.CUDAGraph()
        with self.unmasked() if watcher is None else attach(self.model, watcher):
            for capture in (nullcontext(), torch.cuda.graph(graph)):  # the first pass creates what later steps reuse
                if watcher is not None:
                    watcher.begin(canvas)
                with capture:
                    self.forward(canvas)
        return Variant(graph.replay)

    @contextmanager
    def unmasked(self) -> Iterator[None]:
        """Use sdpa without transformers' mask function."""
        AttentionInterface.register("sdpa_unmasked", sdpa_attention_forward)
        self.model.set_attn_implementation("sdpa_unmasked")
        yield
        self.model.set_attn_implementation("sdpa")

    def time(self, variant: Variant) -> float:
        """Return the seconds of one run after a warm-up."""
        with variant.around():
            variant.run()  # the first step also creates what later steps reuse, such as W_OᵀW_O
            self.synchronize()
            start = time.perf_counter()
            variant.run()
            self.synchronize()
            return time.perf_counter() - start

    def peak(self, variant: Variant) -> int:
        """Return the peak memory of one run, in bytes."""
        with variant.around():
            self.synchronize()
            variant.run()
            self.synchronize()
            torch.cuda.reset_peak_memory_stats()
            variant.run()
            self.synchronize()
        return torch.cuda.max_memory_allocated()

    def synchronize(self) -> None:
        """Wait for all kernels."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(bench: Bench, T: int) -> list[dict[str, Any]]:
    """Return a row for each variant at sequence length T."""
    canvas = make_canvas(T, bench.model.config.vocab_size, bench.device)
    last = torch.tensor([T - 1])
    commit = Commits(torch.tensor([0]), last, last, last, torch.ones(1))
    runs = {
        "plain": bench.plain(canvas),
        "R": bench.watched(canvas, Watcher(Watch(fields=R_ALONE))),
        "summary": bench.watched(canvas, Watcher(Watch())),
        "decode": bench.watched(canvas, Watcher(Watch(), predicting_rows=True), commit),
    }
    if EAGER_UP_TO[bench.device] >= T:
        runs["eager"] = bench.eager(canvas)
    if T <= RAGGED_UP_TO:
        ragged, samples = make_ragged_canvas(T, bench.model.config.vocab_size, bench.device), torch.arange(RAGGED)
        runs["ragged plain"] = bench.plain(ragged)
        runs["ragged decode"] = bench.watched(
            ragged,
            Watcher(Watch(), predicting_rows=True),
            Commits(samples, *[last.expand(RAGGED)] * 3, torch.ones(RAGGED)),
        )
    if bench.device == "cpu":
        runs["causal plain"] = bench.plain(canvas, causal=True)
        runs["causal R"] = bench.watched(canvas, Watcher(Watch(fields=R_ALONE)), causal=True)
        runs["causal summary"] = bench.watched(canvas, Watcher(Watch()), causal=True)
        if (lens := bench.lens(canvas)) is not None:
            runs["causal TransformerLens"] = lens
    for variant in runs.values():  # compile, tune, fill the allocator's cache
        bench.time(variant)
        bench.time(variant)
    if bench.device == "cuda" and T <= 1024:
        runs["graph plain"] = bench.graphed(canvas, None)
        runs["graph R"] = bench.graphed(canvas, Watcher(Watch(fields=R_ALONE)))
        runs["graph summary"] = bench.graphed(canvas, Watcher(Watch()))
    peaks = {name: bench.peak(variant) for name, variant in runs.items()} if bench.device == "cuda" else {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS[bench.device][T]):  # variants alternate, so that drift affects all of them
        for name, variant in runs.items():
            times[name].append(bench.time(variant))
    rows = []
    for name in runs:
        mode = name.split()[0]
        base = f"{mode} plain" if mode in ("graph", "causal", "ragged") else "plain"
        median = statistics.median(times[name])
        rows.append(
            {
                "T": T,
                "variant": name,
                "ms": 1e3 * median,
                "ratio": median / statistics.median(times[base]),
                "spread": (max(times[name]) - min(times[name])) / median,
                "extra_mib": (peaks[name] - peaks["plain"]) / 2**20 if peaks else None,
            }
        )
    return rows


def machine(device: str) -> str:
    """Return device, torch and Python version."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{_cpu()}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def commit() -> str:
    """Return the git commit of the working tree."""
    result = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table."""
    print("| T | variant | ms | ratio | extra MiB |\n|---:|---|---:|---:|---:|")
    for r in rows:
        extra = "" if r["extra_mib"] is None else f"{r['extra_mib']:.0f}"
        print(f"| {r['T']} | {r['variant']} | {r['ms']:.2f} | {r['ratio']:.3f} | {extra} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--lengths", type=int, nargs="+", help="sequence lengths, default by device")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{machine(device)}, commit {commit()}")
    bench, rows = Bench(device), []
    with torch.inference_mode():
        for T in args.lengths or LENGTHS[device]:
            results = measure(bench, T)
            print_rows(results)
            rows += results
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(device), "commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
