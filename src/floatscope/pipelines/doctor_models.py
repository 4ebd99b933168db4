"""Tiny models for the checks of `doctor`: each runs unwatched and watched, and both outputs must agree.

for trial in build_trials("cpu", torch.float32):
    trial.run_unwatched(), trial.run_watched()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floatscope.canvas import Regions, build_canvas
from floatscope.capture.watcher import Watch
from floatscope.models.model import Model
from floatscope.models.spec import ModelSpec
from floatscope.pipelines.decode import decode
from floatscope.pipelines.watch import watch
from floatscope.schema import Paradigm

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,  # the usual 0.02 would attend almost uniformly
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Trial:
    """A tiny model to run unwatched and watched; both runs return the numbers that must agree."""

    name: str
    run_unwatched: Callable[[], Tensor]
    run_watched: Callable[[], Tensor]


def build_trials(device: str, dtype: torch.dtype) -> list[Trial]:
    """Build one trial of each kind, with the same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        builders = (_build_denoiser, _build_causal, _build_windowed, _build_plain_torch)
        return [build(device, dtype) for build in builders]


def _build_denoiser(device: str, dtype: torch.dtype) -> Trial:
    """A Llama without its causal mask, on two prompts of different lengths; a complete decoding is verified too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    module = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4)).to(device, dtype).eval()
    model = Model(module, ModelSpec("denoiser", Paradigm.MDM, mask_id=63))
    prompts = [list(range(1, 13)), list(range(20, 27))]
    regions = Regions.from_spans([{"prompt": [(0, 12)]}, {"prompt": [(5, 12)]}], 20)
    canvas = build_canvas(prompts, 8, 63)
    canvas = replace(canvas, tokens=canvas.tokens.to(device), states=canvas.states.to(device))

    def logits() -> Tensor:
        return model.forward(canvas)[canvas.valid]

    def watched_logits() -> Tensor:
        decode(model, prompts, new_tokens=8, steps=4, regions=regions, watch=Watch("full", verify=True))
        return _run_watched(module, logits)

    return Trial("masked diffusion, left padding", logits, watched_logits)


def _build_causal(device: str, dtype: torch.dtype) -> Trial:
    """A Llama with grouped heads: a left-padded prompt, then one more token with its cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    module = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2)).to(device, dtype).eval()
    tokens, valid = _build_tokens(device)

    def logits() -> Tensor:
        prompt = module(tokens[:, :-1], attention_mask=valid[:, :-1].long(), use_cache=True)
        last = module(tokens[:, -1:], attention_mask=valid.long(), past_key_values=prompt.past_key_values)
        return torch.cat([prompt.logits, last.logits], 1)[valid]

    return Trial("causal, grouped heads, cache, left padding", logits, lambda: _run_watched(module, logits))


def _build_windowed(device: str, dtype: torch.dtype) -> Trial:
    """A Mistral with a sliding window of 6."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6)
    module = MistralForCausalLM(config).to(device, dtype).eval()
    tokens, valid = _build_tokens(device)

    def logits() -> Tensor:
        out: Tensor = module(tokens, attention_mask=valid.long(), use_cache=False).logits
        return out[valid]

    return Trial("sliding window, left padding", logits, lambda: _run_watched(module, logits))


def _build_plain_torch(device: str, dtype: torch.dtype) -> Trial:
    """A module of our own that calls F.scaled_dot_product_attention."""
    module = (
        nn.Sequential(nn.Embedding(64, 64), _AttentionLayer(), _AttentionLayer(), nn.Linear(64, 64))
        .to(device, dtype)
        .eval()
    )
    tokens, _ = _build_tokens(device)
    return Trial(
        "plain torch, scaled_dot_product_attention",
        lambda: module(tokens),
        lambda: _run_watched(module, lambda: module(tokens)),
    )


def _build_tokens(device: str) -> tuple[Tensor, Tensor]:
    """Two rows of tokens, the second with left padding."""
    tokens = torch.arange(1, 49).reshape(2, 24)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, :7] = False
    return tokens.to(device), valid.to(device)


def _run_watched(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    with watch(module, level="full", verify=True) as session:
        out = run()
    assert session.traces
    return out


class _AttentionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q * 4, k, v, is_causal=True)
        added: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return x + added
