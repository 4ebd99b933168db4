"""How exact the primitive is: R against dense float64 on the tensors of a running model, per head, layer and step.

    python benchmarks/accuracy.py

Groups: all rows, half of them, and eight single rows. Norm-wise is ‖r − r₆₄‖ / ‖r₆₄‖ of one head and group; per key is
the largest relative error of any key with r > 1e-6. The worst over heads, layers and steps is shown. Weights are drawn
with three spreads, from an initialiser's to one that gives nearly one-hot rows: a score s is held in fp32 to one part
in 2²⁴, so a probability to about |s|·6e-8, and sharp rows bound what fp32 can do.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from watch_cost import commit, machine

from floatscope.canvas import CanvasState
from floatscope.capture import dense
from floatscope.capture.ask import ReductionSpec
from floatscope.capture.attention import Attention
from floatscope.capture.received import backend_for, receive
from floatscope.capture.reducer import Reducer
from floatscope.capture.watcher import Watch, Watcher
from floatscope.capture.ways import attach
from floatscope.schema import State

T, STEPS = 1024, 3
SPREADS = (0.02, 0.03, 0.06)


class Error(Reducer):
    """Not a fold over blocks: asks the backend that serves the call and the dense reference the same question."""

    name, axes = "error", ("what",)
    backend = ""

    def run(self, call: Attention, lse: Tensor | None) -> Tensor:
        B, _, Q, _ = call.query.shape
        weights = torch.zeros(B, Q, 10, device=call.query.device)
        weights[..., 0] = 1
        weights[:, ::2, 1] = 1
        for g, row in enumerate(torch.linspace(1, Q - 1, 8).int().tolist()):
            weights[:, row, 2 + g] = 1
        self.backend = backend_for(call, lse is not None)
        got = receive(call, lse, ReductionSpec(weights)).received.double()
        want = dense.receive(call, None, ReductionSpec(weights)).received
        mean, want_mean = got / weights.sum(1)[:, None, :, None], want / weights.sum(1)[:, None, :, None]
        keys = call.key.repeat_interleave(call.repeats, 1).transpose(-1, -2)
        largest = (call.query @ keys * call.scaling).abs().amax((1, 2, 3)).double()
        normwise = ((got - want).norm(dim=-1) / want.norm(dim=-1)).amax((1, 2))
        per_key = ((mean - want_mean).abs() / want_mean).where(want_mean > 1e-6, 0.0).amax((1, 2, 3))
        return torch.stack([normwise, per_key, largest], -1)


def worst(device: str, dtype: torch.dtype, causal: bool, spread: float) -> tuple[str, float, float, float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, initializer_range=spread,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device, dtype)
    error = Error()
    watcher = Watcher(Watch(fields=("received",), reducers=(error,)))
    found = []
    with torch.inference_mode(), attach(model, watcher):
        for step in range(STEPS):
            tokens = torch.randint(0, 4096, (1, T), device=device)
            watcher.begin(CanvasState(tokens, torch.full_like(tokens, int(State.PROMPT)), step))
            model(input_ids=tokens, is_causal=causal, use_cache=False)
            found += [layer.fields["error"] for layer in watcher.finish()]
    normwise, per_key, largest = torch.cat(found).amax(0).tolist()
    return error.backend, normwise, per_key, largest


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{machine(device)}, commit {commit()}, T={T}, 4 layers of 16 heads, {STEPS} steps")
    print("| type | mask | backend | largest score | norm-wise | per key |\n|---|---|---|---:|---:|---:|")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for causal, spread in product((False, True), SPREADS):
            backend, normwise, per_key, largest = worst(device, dtype, causal, spread)
            name, mask = str(dtype).removeprefix("torch."), "causal" if causal else "full"
            print(f"| {name} | {mask} | {backend} | {largest:.1f} | {normwise:.1e} | {per_key:.1e} |", flush=True)


if __name__ == "__main__":
    main()
