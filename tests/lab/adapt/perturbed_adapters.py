"""Adapters with random trained weights, and the logits of a module."""

from __future__ import annotations

import torch

from floatscope.lab.adapt.lora import adapter_tensors, make_trainable
from floatscope.models.adapter import Adapter, sha256_weights, write_adapter
from floatscope.models.adapter_merge import add_token_row
from floatscope.models.loader import load


def perturb(model, mask_id: int, rank: int | None, seed: int = 1):
    """Return the module with random trained weights."""
    if mask_id == model.vocab_size:
        add_token_row(model.module)
    make_trainable(model.module, mask_id, rank)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.module.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn(p.shape, generator=rng)
    return model.module


def compute_logits(module, ids):
    with torch.inference_mode():
        return module(input_ids=ids, is_causal=False, use_cache=False).logits


def write_perturbed_adapter(folder, base, rank=3, **changes):
    model = load(base)
    module = perturb(model, 7, rank)
    about = {
        "base_name": "base",
        "base_sha256": sha256_weights(base),
        "mask_id": 7,
        "mask_token": "x",
        "rank": rank,
        **changes,
    }
    write_adapter(folder, Adapter(tensors=adapter_tensors(module, torch.float32), **about))
    return folder, module
