"""Step after step of an adaptation.

    for progress in train_steps(module, optimizer, recipe, batches, Progress(0, []), over): ...

Text and questions are two forwards of one step. Every step draws by its number, so that legs make no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from floatscope.errors import LIBRARY_ERRORS, UserError, reason
from floatscope.lab.adapt.lessons import Batch
from floatscope.lab.adapt.losses import Forward, answer_loss, diffusion_loss, next_answer_loss, next_token_loss
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.training.progress import Progress, rate

EVERY = 20  # steps between two losses that are kept


def optimizer_for(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    learnt = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(learnt, lr=recipe.peak, betas=(0.9, 0.95), weight_decay=0.0, fused=learnt[0].is_cuda)


def train_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    batches: Iterator[Batch],
    progress: Progress,
    over: Callable[[], bool],
    compiled: bool = False,
) -> Iterator[Progress]:
    """Until the time is over or all steps are done; yields after every step. The module stays as it is when it is
    asked: a dropout would draw otherwise in every leg."""
    assert recipe.control == (recipe.mask_id is None)  # else the mask is still to be chosen
    device, mask_id = next(module.parameters()).device, recipe.mask_id
    learnt = [p for p in module.parameters() if p.requires_grad]
    bf16 = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()
    if compiled:
        compile_layers(module)
    for batch in batches:
        if progress.step >= recipe.steps or over():
            break
        draw = torch.Generator(device).manual_seed(recipe.seed * 1_000_003 + progress.step)
        text, tokens, roles = (_to(device, part) for part in (batch.text, batch.tokens, batch.roles))
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, progress.step)
        forward = _forward(module, opened(recipe, progress.step), draw, causal=recipe.control)
        with bf16:
            of_text = _text_loss(forward, text, draw, mask_id)
        of_text.backward()
        with bf16:
            of_answers = _answer_loss(forward, tokens, roles, draw, mask_id)
        of_answers.backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if progress.stepped(of_text, of_answers, EVERY, recipe.steps) and not math.isfinite(sum(progress.losses[-1])):
            raise UserError(
                f"the loss is no number any more at step {progress.step:,}; begin anew, with a lower --peak"
            )
        yield progress


def _text_loss(forward: Forward, text: Tensor, draw: torch.Generator, mask_id: int | None) -> Tensor:
    return next_token_loss(forward, text) if mask_id is None else diffusion_loss(forward, text, draw, mask_id)


def _answer_loss(forward: Forward, tokens: Tensor, roles: Tensor, draw: torch.Generator, mask_id: int | None) -> Tensor:
    if mask_id is None:
        return next_answer_loss(forward, tokens, roles)
    return answer_loss(forward, tokens, roles, draw, mask_id)


def compile_layers(module: nn.Module) -> None:
    """Layer by layer: all share what is compiled for one, and the loss, whose size changes, stays out of it."""
    for layer in next(part for part in module.modules() if isinstance(part, nn.ModuleList)):
        layer.compile(dynamic=False)


def opened(recipe: Recipe, step: int) -> float:
    """The share of later tokens a token sees."""
    return 1.0 if step >= recipe.anneal else (step + 1) / recipe.anneal


def _forward(module: Any, share: float, draw: torch.Generator, causal: bool = False) -> Forward:
    def forward(tokens: Tensor, valid: Tensor | None) -> Tensor:
        mask = None if valid is None else valid.long()
        if share < 1:
            mask = _half_open(tokens, valid, share, draw)
        try:
            logits: Tensor = module(input_ids=tokens, attention_mask=mask, is_causal=causal, use_cache=False).logits
        except LIBRARY_ERRORS as error:
            if share == 1 or isinstance(error, torch.OutOfMemoryError):
                raise
            named = type(module).__name__
            raise UserError(f"{named} takes no half-open mask ({reason(error)}); leave --anneal out") from error
        return logits

    return forward


def _half_open(
    tokens: Int[Tensor, "row position"],
    valid: Bool[Tensor, "row position"] | None,
    share: float,
    draw: torch.Generator,
) -> Bool[Tensor, "row 1 position position"]:
    """All that comes before and some of what comes later, the same for all rows; padding sees and is seen by itself."""
    (rows, length), device = tokens.shape, tokens.device
    later = torch.rand(length, length, device=device, generator=draw) < share
    sees = (torch.ones(length, length, dtype=torch.bool, device=device).tril() | later).expand(rows, 1, length, length)
    return sees if valid is None else sees & (valid[:, None, None] | torch.eye(length, dtype=torch.bool, device=device))


def _to(device: torch.device, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype("int64")).to(device, non_blocking=True)
