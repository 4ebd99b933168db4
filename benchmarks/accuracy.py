"""Accuracy of received attention (R) against dense float64, on the tensors of a running model.

    python benchmarks/accuracy.py

Groups: all rows, half of them, and eight single rows. Norm-wise is ‖r − r₆₄‖ / ‖r₆₄‖ of one head and group; per key is
the largest relative error of any key with r > 1e-6. The table shows the worst over heads, layers and steps. The
weights have three standard deviations, from that of an initialiser to one with nearly one-hot rows: fp32 stores a score
s to one part in 2²⁴, so a probability to about |s|·6e-8, and sharp rows limit the accuracy of fp32.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from watch_cost import commit, machine

from floatscope.canvas import CanvasState
from floatscope.capture import dense
from floatscope.capture.attention import AttentionCall
from floatscope.capture.backends import reduce_attention, select_backend
from floatscope.capture.hooks import attach
from floatscope.capture.reducer import Reducer
from floatscope.capture.reduction_spec import ReductionSpec
from floatscope.capture.watcher import Watch, Watcher
from floatscope.schema import State

T, STEPS = 1024, 3
STANDARD_DEVIATIONS = (0.02, 0.03, 0.06)


class ErrorReducer(Reducer):
    """Compares the backend of a call with the dense reference; it does not fold over blocks."""

    name, axes = "error", ("statistic",)
    backend = ""

    def run(self, call: AttentionCall, lse: Tensor | None) -> Tensor:
        """Return the norm-wise error, the per-key error and the largest score of each sample."""
        B, _, Q, _ = call.query.shape
        weights = torch.zeros(B, Q, 10, device=call.query.device)
        weights[..., 0] = 1
        weights[:, ::2, 1] = 1
        for g, row in enumerate(torch.linspace(1, Q - 1, 8).int().tolist()):
            weights[:, row, 2 + g] = 1
        self.backend = select_backend(call, lse is not None)
        actual = reduce_attention(call, lse, ReductionSpec(weights)).received.double()
        expected = dense.reduce_attention(call, None, ReductionSpec(weights)).received
        mean, expected_mean = (x / weights.sum(1)[:, None, :, None] for x in (actual, expected))
        keys = call.key.repeat_interleave(call.repeats, 1).transpose(-1, -2)
        largest = (call.query @ keys * call.scaling).abs().amax((1, 2, 3)).double()
        normwise = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).amax((1, 2))
        relative = (mean - expected_mean).abs() / expected_mean
        per_key = relative.where(expected_mean > 1e-6, 0.0).amax((1, 2, 3))
        return torch.stack([normwise, per_key, largest], -1)


def measure_error(device: str, dtype: torch.dtype, causal: bool, std: float) -> tuple[str, float, float, float]:
    """Return the backend, the norm-wise error, the per-key error and the largest score."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, initializer_range=std,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device, dtype)
    reducer = ErrorReducer()
    watcher = Watcher(Watch(fields=("received",), reducers=(reducer,)))
    errors = []
    with torch.inference_mode(), attach(model, watcher):
        for step in range(STEPS):
            tokens = torch.randint(0, 4096, (1, T), device=device)
            watcher.begin(CanvasState(tokens, torch.full_like(tokens, int(State.PROMPT)), step))
            model(input_ids=tokens, is_causal=causal, use_cache=False)
            errors += [layer.fields["error"] for layer in watcher.finish().layers]
    normwise, per_key, largest = torch.cat(errors).amax(0).tolist()
    return reducer.backend, normwise, per_key, largest


def main() -> None:
    """Print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{machine(device)}, commit {commit()}, T={T}, 4 layers of 16 heads, {STEPS} steps")
    print("| type | mask | backend | largest score | norm-wise | per key |\n|---|---|---|---:|---:|---:|")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for causal, std in product((False, True), STANDARD_DEVIATIONS):
            backend, normwise, per_key, largest = measure_error(device, dtype, causal, std)
            name, mask = str(dtype).removeprefix("torch."), "causal" if causal else "full"
            print(f"| {name} | {mask} | {backend} | {largest:.1f} | {normwise:.1e} | {per_key:.1e} |", flush=True)


if __name__ == "__main__":
    main()
