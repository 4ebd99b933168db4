"""The random numbers of a step depend on its number alone."""

from __future__ import annotations

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from floatscope.lab.adapt.examples import ANSWER, PROMPT, Batch
from floatscope.lab.adapt.lora import adapter_tensors, make_trainable
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.adapt.train import build_optimizer, train_steps
from floatscope.lab.training.progress import Progress


def test_training_a_base_with_dropout_does_not_depend_on_the_global_rng():
    recipe = Recipe(mask_id=39, rank=2, steps=2, tokens=512)
    rows = np.arange(32).reshape(2, 16)
    roles = np.full((2, 16), PROMPT)
    roles[:, 12:] = ANSWER
    results = []
    for seed in (0, 1):
        torch.manual_seed(0)
        module = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=16)).eval()
        make_trainable(module, 39, recipe.rank)
        torch.manual_seed(seed)
        batches = iter([Batch(rows, rows, roles)] * 2)
        list(train_steps(module, build_optimizer(module, recipe), recipe, batches, Progress(0, []), lambda: False))
        results.append(adapter_tensors(module, torch.float32))
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
