"""Steps of an adaptation depend on nothing but their number."""

from __future__ import annotations

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from floatscope.lab.adapt.lessons import ANSWER, PROMPT, Batch
from floatscope.lab.adapt.low_rank import learn, learnt
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.adapt.train import optimizer_for, train_steps
from floatscope.lab.training.progress import Progress


def test_a_base_with_dropout_learns_the_same_whatever_was_drawn_before():
    recipe = Recipe(mask_id=39, rank=2, steps=2, tokens=512)
    rows = np.arange(32).reshape(2, 16)
    roles = np.full((2, 16), PROMPT)
    roles[:, 12:] = ANSWER
    found = []
    for seed in (0, 1):
        torch.manual_seed(0)
        module = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=16)).eval()
        learn(module, 39, recipe.rank)
        torch.manual_seed(seed)
        batches = iter([Batch(rows, rows, roles)] * 2)
        list(train_steps(module, optimizer_for(module, recipe), recipe, batches, Progress(0, []), lambda: False))
        found.append(learnt(module, torch.float32))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
