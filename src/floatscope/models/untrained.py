"""The untrained control: the same architecture with fresh weights from its own initialiser.

    control = untrained(model, seed=0)      # use it wherever a model is used

Many things that look like anchors exist before any training: a causal mask alone makes position 0 the top key. So every
number of a trained model is shown beside that of its control.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from floatscope.errors import UserError
from floatscope.models.model import Model

ModelOrModule = TypeVar("ModelOrModule", Model, nn.Module)


def untrained(model: ModelOrModule, seed: int = 0) -> ModelOrModule:
    """Return a copy of a model with fresh weights, on its device and in its dtype.

    Args:
        model: a `Model`, a transformers module, or any module whose layers have `reset_parameters`.
        seed: the seed of the weights; the global random state stays as it is.

    Returns:
        A `Model` with the same tokenizer and spec, named "… (untrained, seed 0)"; or a module, if one was given.

    Example:
        control = fs.untrained(fs.load("twin:mdm"), seed=1)
        control.spec.name  # 'twin:mdm (untrained, seed 1)'
    """
    if isinstance(model, Model):
        name = f"{model.spec.name} (untrained, seed {seed})"
        spec = replace(model.spec, name=name, weights=f"untrained, seed {seed}")
        return replace(model, module=_untrained_module(model.module, seed), spec=spec)
    return _untrained_module(model, seed)


def _untrained_module(module: nn.Module, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: the random state of other devices stays
        fresh = _reinitialise(module)
    originals = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in [*fresh.named_parameters(), *fresh.named_buffers()]:
        tensor.data = tensor.data.to(originals[name])  # one by one: RoPE's frequencies stay fp32 in a bf16 model
    return fresh.train(module.training)


def _reinitialise(module: nn.Module) -> nn.Module:
    config = getattr(module, "config", None)
    if config is not None and hasattr(module, "post_init"):  # transformers initialises in the constructor
        built: nn.Module = type(module)(copy.deepcopy(config))
        return built
    fresh = copy.deepcopy(module).cpu()  # so that a seed gives the same weights on every device
    for name, part in fresh.named_modules():
        parameters = [p for p, _ in part.named_parameters(recurse=False)]
        if not parameters:
            continue
        reset = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
        if not callable(reset):
            raise UserError(
                f"cannot build an untrained control: '{name or type(module).__name__}' ({type(part).__name__}) has"
                f" parameters ({', '.join(parameters)}) but no reset_parameters(); add one that initialises them"
            )
        reset()
    return fresh
