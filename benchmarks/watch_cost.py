"""Cost of tracing: a watched forward against the plain one, all layers and heads, ratios of medians in one run.

    python benchmarks/watch_cost.py                      # CUDA if there is one, else the CPU
    python benchmarks/watch_cost.py --models llada2-mini sdar-8b --json out.json

R        received attention of 16 query groups (3 groups and 13 regions), nothing else
summary  everything the level `summary` computes in a forward: R, entropy, rollout, top keys, moments, norms
decode   summary as `decode` runs it: keys are stored until the commits are known, then one predicting row
eager    `attn_implementation="eager"` with `output_attentions=True`, the usual way to see attention
ragged … `decode` for a batch of 16 canvases of several lengths, each with a commit; up to 1024 tokens
causal … the same for an autoregressive model: plain, R, summary, and TransformerLens caching every pattern (CPU only)
graph    both sides replayed as a CUDA graph: the cost without kernel launches
full …   a block-causal model attending to all positions instead: what its mask costs or saves

On CUDA a second table has the kernels alone, by mask: the attention, and R with entropy and carry.

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
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AttentionInterface, PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from floatscope.canvas import CanvasState, Commits, Regions
from floatscope.capture.attention import AttentionCall
from floatscope.capture.backends import reduce_attention
from floatscope.capture.block_causal import use_block_causal
from floatscope.capture.edited_attention import attend_with_edits
from floatscope.capture.hooks import attach
from floatscope.capture.reduction_spec import ReductionSpec, entropy_row_weights
from floatscope.capture.visibility import Visibility
from floatscope.capture.watcher import Watch, Watcher
from floatscope.schema import State


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: the prefix of its transformers classes, the arguments of its config, its block size."""

    classes: str
    sizes: dict[str, Any]
    block_size: int | None = None


SMALL = dict(
    vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=4096,
)  # fmt: skip
SMALL_MIXTURE = dict(
    n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=128, use_qk_norm=True,
    first_k_dense_replace=1, num_mtp_layers=0, head_dim=32,
)  # fmt: skip
SHAPES = {
    "llada-8b": Shape("Llama", dict(
        vocab_size=126464, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=32768,
    )),
    "llada2-mini": Shape("Glm4Moe", dict(
        vocab_size=157184, hidden_size=2048, intermediate_size=5120, num_hidden_layers=20, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=32768, n_routed_experts=256, num_experts_per_tok=8,
        n_group=8, topk_group=4, moe_intermediate_size=512, first_k_dense_replace=1, use_qk_norm=True, num_mtp_layers=0,
    ), block_size=32),
    "sdar-8b": Shape("Qwen3", dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768,
    ), block_size=4),
    "small": Shape("Llama", SMALL),
    "small-llada2": Shape("Glm4Moe", SMALL | SMALL_MIXTURE | {"num_key_value_heads": 2}, block_size=32),
    "small-sdar": Shape("Qwen3", SMALL | {"num_key_value_heads": 2, "head_dim": 32}, block_size=4),
}  # fmt: skip
DEFAULT_MODEL = {"cuda": "llada-8b", "cpu": "small"}
BLOCK_MODELS = {"cuda": ("llada2-mini", "sdar-8b"), "cpu": ("small-llada2", "small-sdar")}
LENGTHS = {"cuda": (256, 1024, 4096, 16384, 32768), "cpu": (512, 2048)}
ROUNDS = {"cuda": {256: 40, 1024: 30, 4096: 15, 16384: 7, 32768: 2}, "cpu": {512: 15, 2048: 9}}
BLOCK_LENGTHS = {"cuda": (1024, 4096), "cpu": (512,)}
BLOCK_ROUNDS = {1024: 9, 4096: 4}
FEW_ROUNDS = 3  # at other lengths
GOALS = {
    "cuda": {
        1024: {"R": 1.08, "summary": 1.15}, 4096: {"R": 1.12, "summary": 1.20}, 16384: {"R": 1.30, "summary": 1.45},
    },
    "cpu": {512: {"R": 1.3, "summary": 1.45}, 2048: {"R": 2.0, "summary": 2.3}},
}  # fmt: skip
"""The largest ratio allowed, for the model and for its CUDA graph."""
KERNEL_SHAPES = ((1024, 32, 8, 128), (4096, 32, 8, 128), (4096, 16, 4, 128), (4096, 16, 2, 512))
"""(T, heads, KV heads, head dimension); the last is that of DiffusionGemma's full layers."""
KERNEL_MASKS = {
    "full": lambda T: Visibility.full(T, T),
    "blocks of 32": lambda T: Visibility.block(T, T, 32),
    "blocks of 4": lambda T: Visibility.block(T, T, 4),
    "window of 1024": lambda T: Visibility.window(T, T, 1024),
    "last block of 32": lambda T: Visibility.block(32, T, 32),
}
KERNEL_GOAL = {"blocks of 32": 0.6, "blocks of 4": 0.6}
"""The largest share of the time of R under full attention at T = 4096: half of the pairs are visible."""
KERNEL_RUNS = 20
EAGER_UP_TO = {"cuda": 4096, "cpu": 2048}
REGIONS = 13
RAGGED, RAGGED_UP_TO = 16, 1024
R_ALONE = ("received", "regions")


def build(device: str, name: str | None = None) -> transformers.PreTrainedModel:
    """Return a model with random weights, made on its device: LLaDA-8B's shape on a GPU, else a small one."""
    shape = SHAPES[name or DEFAULT_MODEL[device]]
    config = getattr(transformers, f"{shape.classes}Config")(**shape.sizes, tie_word_embeddings=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = getattr(transformers, f"{shape.classes}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)
    if shape.block_size is not None:
        use_block_causal(model, shape.block_size)
    return model


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

    def __init__(self, device: str, name: str) -> None:
        self.device, self.name, self.model = device, name, build(device, name)
        self.attention = self.model.config._attn_implementation

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

    def full(self, variant: Variant) -> Variant:
        """Return a variant whose rows see all positions, for a block-causal model."""

        @contextmanager
        def use_full() -> Iterator[None]:
            self.model.set_attn_implementation("sdpa")
            with variant.around():
                yield
            self.model.set_attn_implementation(self.attention)

        return Variant(variant.run, use_full)

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
    runs = make_variants(bench, canvas)
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
    warm_up(bench, runs)
    if bench.device == "cuda" and T <= 1024:
        runs["graph plain"] = bench.graphed(canvas, None)
        runs["graph R"] = bench.graphed(canvas, Watcher(Watch(fields=R_ALONE)))
        runs["graph summary"] = bench.graphed(canvas, Watcher(Watch()))
    return make_rows(bench, T, runs, ROUNDS[bench.device].get(T, FEW_ROUNDS))


def measure_block_causal(bench: Bench, T: int) -> list[dict[str, Any]]:
    """Return a row for each variant of a block-causal model, with its own mask and attending to all positions."""
    runs = make_variants(bench, make_canvas(T, bench.model.config.vocab_size, bench.device))
    runs |= {f"full {name}": bench.full(variant) for name, variant in runs.items() if name != "decode"}
    warm_up(bench, runs)
    return make_rows(bench, T, runs, BLOCK_ROUNDS.get(T, FEW_ROUNDS))


def make_variants(bench: Bench, canvas: CanvasState) -> dict[str, Variant]:
    """Return the forward without tracing and with three levels of it."""
    last = torch.tensor([canvas.tokens.shape[1] - 1])
    commit = Commits(torch.tensor([0]), last, last, last, torch.ones(1))
    return {
        "plain": bench.plain(canvas),
        "R": bench.watched(canvas, Watcher(Watch(fields=R_ALONE))),
        "summary": bench.watched(canvas, Watcher(Watch())),
        "decode": bench.watched(canvas, Watcher(Watch(), predicting_rows=True), commit),
    }


def warm_up(bench: Bench, runs: dict[str, Variant]) -> None:
    """Compile, tune, fill the allocator's cache."""
    for variant in runs.values():
        bench.time(variant)
        bench.time(variant)


def make_rows(bench: Bench, T: int, runs: dict[str, Variant], rounds: int) -> list[dict[str, Any]]:
    """Time all variants in turn, and return their rows."""
    peaks = {name: bench.peak(variant) for name, variant in runs.items()} if bench.device == "cuda" else {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):  # variants alternate, so that drift affects all of them
        for name, variant in runs.items():
            times[name].append(bench.time(variant))
    rows = []
    for name in runs:
        mode = name.split()[0]
        base = f"{mode} plain" if mode in ("graph", "causal", "ragged", "full") else "plain"
        median = statistics.median(times[name])
        goals = {} if mode in ("causal", "ragged") else GOALS[bench.device].get(T, {})
        rows.append(
            {
                "model": bench.name,
                "T": T,
                "variant": name,
                "ms": 1e3 * median,
                "ratio": median / statistics.median(times[base]),
                "goal": goals.get(name.split()[-1]),
                "spread": (max(times[name]) - min(times[name])) / median,
                "extra_mib": (peaks[name] - peaks["plain"]) / 2**20 if peaks else None,
            }
        )
    return rows


def measure_kernels(T: int, heads: int, kv_heads: int, dim: int) -> list[dict[str, Any]]:
    """Return the milliseconds of the attention and of R with entropy and carry, in bf16 on CUDA, for each mask."""
    rows = []
    for name, make in KERNEL_MASKS.items():
        visibility = make(T)
        Q = visibility.queries
        q, k, v = (
            torch.randn(1, n, length, dim, device="cuda", dtype=torch.bfloat16)
            for n, length in ((heads, Q), (kv_heads, T), (kv_heads, T))
        )
        call = AttentionCall(q, k, v, visibility, dim**-0.5)
        is_row = torch.ones(1, Q, dtype=torch.bool, device="cuda")
        entropy = entropy_row_weights(is_row, visibility.count_visible_keys("cuda")[:, 0])
        spec = ReductionSpec((torch.rand(1, Q, 16, device="cuda") > 0.5).float(), entropy, is_binary=True)
        carry, lse = torch.rand(1, T, REGIONS, device="cuda"), attend_with_edits(call).lse
        row = {"T": T, "heads": f"{heads}/{kv_heads} × {dim}", "mask": name}
        row["attention_ms"] = time_kernel(lambda call=call: attend_with_edits(call))
        row["R_ms"] = time_kernel(
            lambda call=call, lse=lse, spec=spec, carry=carry: reduce_attention(call, lse, spec, carry)
        )
        row["share"] = row["R_ms"] / (rows[0]["R_ms"] if rows else row["R_ms"])
        row["goal"] = KERNEL_GOAL.get(name) if T >= 4096 else None
        rows.append(row)
    return rows


def time_kernel(run: Callable[[], Any]) -> float:
    """Return the milliseconds of a run on the device, from the median of its runs."""
    times = []
    for i in range(KERNEL_RUNS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


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
    print("| model | T | variant | ms | ratio | goal | extra MiB |\n|---|---:|---|---:|---:|---:|---:|")
    for r in rows:
        extra = "" if r["extra_mib"] is None else f"{r['extra_mib']:.0f}"
        figures = f"{r['ms']:.2f} | {r['ratio']:.3f} | {r['goal'] or ''} | {extra}"
        print(f"| {r['model']} | {r['T']} | {r['variant']} | {figures} |", flush=True)


def print_kernels(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table of the kernels alone."""
    print("| T | heads | mask | attention ms | R ms | R / R of full | goal |\n|---:|---|---|---:|---:|---:|---:|")
    for r in rows:
        figures = f"{r['attention_ms']:.3f} | {r['R_ms']:.3f} | {r['share']:.2f} | {r['goal'] or ''}"
        print(f"| {r['T']} | {r['heads']} | {r['mask']} | {figures} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--lengths", type=int, nargs="+", help="sequence lengths, default by device")
    parser.add_argument("--models", nargs="+", choices=SHAPES, help="default by device, two of them block-causal")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{machine(device)}, commit {commit()}")
    rows: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in args.models or (DEFAULT_MODEL[device], *BLOCK_MODELS[device]):
            bench, is_full = Bench(device, name), SHAPES[name].block_size is None
            for T in args.lengths or (LENGTHS if is_full else BLOCK_LENGTHS)[device]:
                results = (measure if is_full else measure_block_causal)(bench, T)
                print_rows(results)
                rows += results
            del bench  # before the next model is made
        for kernel_shape in KERNEL_SHAPES if device == "cuda" else ():
            kernels += measure_kernels(*kernel_shape)
        if kernels:
            print_kernels(kernels)
    if args.json:
        tables = {"rows": rows, "kernels": kernels}
        args.json.write_text(json.dumps({"machine": machine(device), "commit": commit(), **tables}, indent=1))


if __name__ == "__main__":
    main()
