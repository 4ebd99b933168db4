"""The untrained control: the same architecture with fresh weights by its own initialiser.

    control = untrained(model, seed=0)      # wherever a model is

Much of what looks like an anchor is there before any training (a causal mask alone puts the top key at position 0), so
every number of a trained model stands beside the same number of its control.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import overload

import torch
from torch import nn

from floatscope.errors import UserError
from floatscope.models.model import Model


@overload
def untrained(model: Model, seed: int = 0) -> Model: ...
@overload
def untrained(model: nn.Module, seed: int = 0) -> nn.Module: ...
def untrained(model: Model | nn.Module, seed: int = 0) -> Model | nn.Module:
    """A fresh model like `model`, on its device and in its dtype; the global random state is left as it was."""
    if isinstance(model, Model):
        spec = replace(
            model.spec, name=f"{model.spec.name} (untrained, seed {seed})", weights=f"untrained, seed {seed}"
        )
        return replace(model, module=untrained(model.module, seed), spec=spec)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU alone: no device's random state is touched
        fresh = _fresh(model)
    theirs = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, ours in [*fresh.named_parameters(), *fresh.named_buffers()]:
        ours.data = ours.data.to(theirs[name])  # one by one: RoPE's frequencies stay fp32 in a bf16 model
    return fresh.train(model.training)


def _fresh(module: nn.Module) -> nn.Module:
    config = getattr(module, "config", None)
    if config is not None and hasattr(module, "post_init"):  # transformers: constructing is initialising
        built: nn.Module = type(module)(copy.deepcopy(config))
        return built
    fresh = copy.deepcopy(module).cpu()  # so that a seed gives the same weights on every device
    for name, part in fresh.named_modules():
        own = [p for p, _ in part.named_parameters(recurse=False)]
        if not own:
            continue
        reset = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
        if not callable(reset):
            raise UserError(
                f"cannot make an untrained control: '{name or type(module).__name__}' ({type(part).__name__}) has"
                f" parameters ({', '.join(own)}) and no reset_parameters(); add one that initialises them"
            )
        reset()
    return fresh
