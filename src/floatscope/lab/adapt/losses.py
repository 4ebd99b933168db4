"""The two losses of an adaptation, shifted as the base is: row p decides position p + 1.

text = diffusion_loss(forward, tokens, draw, mask_id)                 # masks anywhere, weighted by 1/t
answers = answer_loss(forward, tokens, roles, draw, mask_id)          # masks in what follows a question

and those of a control, which learns the next token from the same rows: `next_token_loss`, `next_answer_loss`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.lab.adapt.lessons import ANSWER, PAD, TAIL
from floatscope.lab.training.masks import drawn

WHOLE = 0.6  # how often all of an answer is masked, as it is when decoding begins
TAIL_WEIGHT = 0.1  # of the ends of text behind an answer
UNASKED = -100

Forward = Callable[[Tensor, Tensor | None], Tensor]
"""(tokens, which of them are valid) → logits."""


def diffusion_loss(
    forward: Forward, tokens: Int[Tensor, "row position"], draw: torch.Generator, mask_id: int
) -> Float[Tensor, ""]:
    """Each row is masked with a probability t of its own; a mask counts 1/t."""
    t, masked = drawn(tokens, draw)
    each = _each(forward(torch.where(masked, mask_id, tokens), None), tokens, masked)
    return (each / t).sum() / each.numel()


def answer_loss(
    forward: Forward,
    tokens: Int[Tensor, "row position"],
    roles: Int[Tensor, "row position"],
    draw: torch.Generator,
    mask_id: int,
) -> Float[Tensor, ""]:
    """Answers are masked whole, or in part as they are on the way; only they are asked for."""
    masked = _asked(roles, draw)
    each = _each(forward(torch.where(masked, mask_id, tokens), roles != PAD), tokens, masked)
    masked, roles = masked[:, 1:], roles[:, 1:]
    return _mean(each, masked & (roles == ANSWER)) + TAIL_WEIGHT * _mean(each, masked & (roles == TAIL))


def next_token_loss(forward: Forward, tokens: Int[Tensor, "row position"]) -> Float[Tensor, ""]:
    return _each(forward(tokens, None), tokens, torch.ones_like(tokens, dtype=torch.bool)).mean()


def next_answer_loss(
    forward: Forward, tokens: Int[Tensor, "row position"], roles: Int[Tensor, "row position"]
) -> Float[Tensor, ""]:
    """Of the same tokens as `answer_loss`, each after those before it."""
    asked = (roles == ANSWER) | (roles == TAIL)
    each, roles = _each(forward(tokens, roles != PAD), tokens, asked), roles[:, 1:]
    return _mean(each, roles == ANSWER) + TAIL_WEIGHT * _mean(each, roles == TAIL)


def _asked(roles: Int[Tensor, "row position"], draw: torch.Generator) -> Bool[Tensor, "row position"]:
    rows, length = roles.shape
    inside = (roles == ANSWER) | (roles == TAIL)
    whole = torch.rand(rows, 1, device=roles.device, generator=draw) < WHOLE
    t = torch.rand(rows, 1, device=roles.device, generator=draw)
    some = torch.rand(rows, length, device=roles.device, generator=draw) < t
    return inside & (whole | some)


def _each(
    logits: Float[Tensor, "row position token"],
    tokens: Int[Tensor, "row position"],
    asked: Bool[Tensor, "row position"],
) -> Float[Tensor, "row decided"]:
    """The loss at every token asked for, 0 elsewhere; the first counts nothing, for no row decides it."""
    wanted = torch.where(asked, tokens, UNASKED)[:, 1:]
    each = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), wanted.flatten(), reduction="none", ignore_index=UNASKED
    )
    return each.view_as(wanted)


def _mean(each: Float[Tensor, "row decided"], chosen: Bool[Tensor, "row decided"]) -> Float[Tensor, ""]:
    return (each * chosen).sum() / chosen.sum().clamp_min(1)
