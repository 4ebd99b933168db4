"""Losses and training steps of an adaptation, shifted as the base is: row p predicts position p + 1.

    text = diffusion_loss(forward, tokens, rng, mask_id)                 # masks anywhere, weighted by 1/t
    answers = answer_loss(forward, tokens, roles, rng, mask_id)          # masks in what follows a question
    for progress in train_steps(module, optimizer, recipe, batches, Progress(0, []), is_over): ...

A control trains on the same rows with `next_token_loss` and `next_answer_loss`. Text and questions are two forwards of
one step. The random numbers of a step depend on its number alone, so that segments do not change the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from floatscope.errors import LIBRARY_ERRORS, UserError, summarize_error
from floatscope.lab.adapt.examples import ANSWER, PAD, TAIL, Batch
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.training.losses import masked_mean, sample_masks
from floatscope.lab.training.progress import Progress, learning_rate

LOG_EVERY = 20  # steps per entry of the loss curve
FULL_MASK_RATE = 0.6  # share of answers that are masked completely, as they are when decoding begins
TAIL_WEIGHT = 0.1  # of the ends of text after an answer
IGNORED = -100

Forward = Callable[[Tensor, Tensor | None], Tensor]
"""(tokens, which of them are valid) → logits."""


def diffusion_loss(
    forward: Forward, tokens: Int[Tensor, "row position"], rng: torch.Generator, mask_id: int
) -> Float[Tensor, ""]:
    """Mask each row at its own rate t; return the loss of the masks, each weighted by 1/t, per position."""
    t, masked = sample_masks(tokens, rng)
    losses = _token_losses(forward(torch.where(masked, mask_id, tokens), None), tokens, masked)
    return (losses / t).sum() / losses.numel()


def answer_loss(
    forward: Forward,
    tokens: Int[Tensor, "row position"],
    roles: Int[Tensor, "row position"],
    rng: torch.Generator,
    mask_id: int,
) -> Float[Tensor, ""]:
    """Mask answers completely or in part; return the mean loss of their masks, plus a tenth of that of the tails."""
    masked = _sample_answer_masks(roles, rng)
    losses = _token_losses(forward(torch.where(masked, mask_id, tokens), roles != PAD), tokens, masked)
    masked, roles = masked[:, 1:], roles[:, 1:]
    tails = masked_mean(losses, masked & (roles == TAIL))
    return masked_mean(losses, masked & (roles == ANSWER)) + TAIL_WEIGHT * tails


def next_token_loss(forward: Forward, tokens: Int[Tensor, "row position"]) -> Float[Tensor, ""]:
    """Return the mean loss of all next tokens."""
    return _token_losses(forward(tokens, None), tokens, torch.ones_like(tokens, dtype=torch.bool)).mean()


def next_answer_loss(
    forward: Forward, tokens: Int[Tensor, "row position"], roles: Int[Tensor, "row position"]
) -> Float[Tensor, ""]:
    """Return the next-token loss of the tokens that `answer_loss` masks, with the same weights."""
    targets = (roles == ANSWER) | (roles == TAIL)
    losses, roles = _token_losses(forward(tokens, roles != PAD), tokens, targets), roles[:, 1:]
    return masked_mean(losses, roles == ANSWER) + TAIL_WEIGHT * masked_mean(losses, roles == TAIL)


def _sample_answer_masks(roles: Int[Tensor, "row position"], rng: torch.Generator) -> Bool[Tensor, "row position"]:
    rows, length = roles.shape
    inside = (roles == ANSWER) | (roles == TAIL)
    full = torch.rand(rows, 1, device=roles.device, generator=rng) < FULL_MASK_RATE
    t = torch.rand(rows, 1, device=roles.device, generator=rng)
    partial = torch.rand(rows, length, device=roles.device, generator=rng) < t
    return inside & (full | partial)


def _token_losses(
    logits: Float[Tensor, "row position token"],
    tokens: Int[Tensor, "row position"],
    is_target: Bool[Tensor, "row position"],
) -> Float[Tensor, "row target"]:
    """Return the loss of every target, 0 elsewhere; the first position is left out, as no row predicts it."""
    targets = torch.where(is_target, tokens, IGNORED)[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.view_as(targets)


def build_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters, without weight decay."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=parameters[0].is_cuda)


def train_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    batches: Iterator[Batch],
    progress: Progress,
    is_over: Callable[[], bool],
    compiled: bool = False,
) -> Iterator[Progress]:
    """Train until `is_over()` or the last step; yield after every step.

    The module stays in eval mode: dropout would draw other numbers in every segment.
    """
    assert recipe.control == (recipe.mask_id is None)  # else the mask is not chosen yet
    device, mask_id = next(module.parameters()).device, recipe.mask_id
    parameters = [p for p in module.parameters() if p.requires_grad]
    bf16 = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()
    if compiled:
        compile_layers(module)
    for batch in batches:
        if progress.step >= recipe.steps or is_over():
            break
        rng = torch.Generator(device).manual_seed(recipe.seed * 1_000_003 + progress.step)
        text, tokens, roles = (_to_tensor(array, device) for array in (batch.text, batch.tokens, batch.roles))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, progress.step)
        forward = _make_forward(module, open_share(recipe, progress.step), rng, causal=recipe.control)
        with bf16:
            text_loss = _text_loss(forward, text, rng, mask_id)
        text_loss.backward()
        with bf16:
            answers_loss = _answers_loss(forward, tokens, roles, rng, mask_id)
        answers_loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        has_entry = progress.record_step(text_loss, answers_loss, LOG_EVERY, recipe.steps)
        if has_entry and not math.isfinite(sum(progress.losses[-1])):
            raise UserError(f"the loss is not finite at step {progress.step:,}; start again with a lower --lr")
        yield progress


def _text_loss(forward: Forward, text: Tensor, rng: torch.Generator, mask_id: int | None) -> Tensor:
    return next_token_loss(forward, text) if mask_id is None else diffusion_loss(forward, text, rng, mask_id)


def _answers_loss(forward: Forward, tokens: Tensor, roles: Tensor, rng: torch.Generator, mask_id: int | None) -> Tensor:
    if mask_id is None:
        return next_answer_loss(forward, tokens, roles)
    return answer_loss(forward, tokens, roles, rng, mask_id)


def compile_layers(module: nn.Module) -> None:
    """Compile layer by layer: all layers share one compilation, and the loss, whose size varies, is left out."""
    for layer in next(part for part in module.modules() if isinstance(part, nn.ModuleList)):
        layer.compile(dynamic=False)


def open_share(recipe: Recipe, step: int) -> float:
    """Return the share of later tokens that a token attends to at a step."""
    return 1.0 if step >= recipe.anneal else (step + 1) / recipe.anneal


def _make_forward(module: Any, share: float, rng: torch.Generator, causal: bool = False) -> Forward:
    def forward(tokens: Tensor, valid: Tensor | None) -> Tensor:
        mask = None if valid is None else valid.long()
        if share < 1:
            mask = _sample_partial_mask(tokens, valid, share, rng)
        try:
            logits: Tensor = module(input_ids=tokens, attention_mask=mask, is_causal=causal, use_cache=False).logits
        except LIBRARY_ERRORS as error:
            if share == 1 or isinstance(error, torch.OutOfMemoryError):
                raise
            name, why = type(module).__name__, summarize_error(error)
            raise UserError(f"{name} does not accept a 4D attention mask ({why}); leave --anneal out") from error
        return logits

    return forward


def _sample_partial_mask(
    tokens: Int[Tensor, "row position"],
    valid: Bool[Tensor, "row position"] | None,
    share: float,
    rng: torch.Generator,
) -> Bool[Tensor, "row 1 position position"]:
    """Return a mask with all earlier keys and a random share of the later ones, the same for all rows of the batch.

    Padding is visible to itself only.
    """
    (rows, length), device = tokens.shape, tokens.device
    later = torch.rand(length, length, device=device, generator=rng) < share
    sees = (torch.ones(length, length, dtype=torch.bool, device=device).tril() | later).expand(rows, 1, length, length)
    return sees if valid is None else sees & (valid[:, None, None] | torch.eye(length, dtype=torch.bool, device=device))


def _to_tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype("int64")).to(device, non_blocking=True)
