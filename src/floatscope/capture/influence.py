"""Influence: how far the logit of a committed token moves with the embedding of each position.

    influence(model.forward, model.module, step.before, step.commits)      # [commit, key]

Attention says where a row looks; |∂ logit / ∂ embedding_j|, the norm over the dimensions of the embedding, says whether
what stands there moves anything. It takes a forward of its own, with gradients, and a backward for each commit of a
sample. Samples do not look at each other, so the first commits of all of them share a backward, then the second ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from floatscope.canvas import CanvasState, Commits
from floatscope.errors import UserError

AT_ONCE = 2**23
"""Elements of the embeddings a forward with gradients takes; for the backward it keeps hundreds of times that (34 bytes
for each in each layer of a bf16 Llama: 9 GB in 32 layers). A larger batch goes in parts, a sample at least."""


def influence(
    forward: Callable[[CanvasState, slice], Tensor], module: nn.Module, canvas: CanvasState, commits: Commits
) -> Float[Tensor, "commit key"]:
    """|∂ logit of the committed token, at its predicting row / ∂ input embedding_j|; 0 for padding.

    `forward` computes every position of the canvas anew, without a cache, through `module`.
    """
    embedding, length = embedding_of(module), canvas.tokens.shape[1]
    at_once = max(1, AT_ONCE // (length * next(embedding.parameters()).shape[-1]))
    with torch.inference_mode(False), torch.enable_grad(), _frozen(module):
        out = torch.zeros(len(commits), length, device=canvas.tokens.device)
        for samples in commits.sample.unique().split(at_once) if len(commits) else ():
            mine = torch.isin(commits.sample, samples)
            place = torch.searchsorted(samples, commits.sample[mine])
            rest = (commits.position, commits.row, commits.token, commits.confidence)
            part = CanvasState(canvas.tokens[samples], canvas.states[samples], canvas.step)
            out[mine] = _norms(forward, embedding, part, Commits(place, *(column[mine] for column in rest)))
    if not bool(out.isfinite().all()):
        raise UserError(
            f"the gradient of a logit is NaN or infinite at step {canvas.step}; try float32 or bfloat16, or leave"
            " influence out"
        )
    return out


def embedding_of(module: nn.Module) -> nn.Module:
    """The module's input embedding, whose output is what a logit is differentiated by."""
    try:
        found = module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        found = None
    if not isinstance(found, nn.Module):
        raise UserError(
            f"influence is a gradient by the input embeddings, and {type(module).__name__} does not tell which they are"
            " (get_input_embeddings); leave influence out"
        )
    return found


def _norms(
    forward: Callable[[CanvasState, slice], Tensor], embedding: nn.Module, canvas: CanvasState, commits: Commits
) -> Float[Tensor, "commit key"]:
    """Of samples that all have commits: one forward, and as many backwards as the busiest of them has."""
    first, last = int(commits.row.min()), int(commits.row.max())
    with _leaves(embedding) as leaves, _told(canvas):
        logits = forward(canvas, slice(first, last + 1))
    if len(leaves) != 1 or leaves[0].shape[:2] != canvas.tokens.shape:
        raise UserError(
            f"influence is a gradient by the input embeddings, [batch, position, dimension] once a forward, and"
            f" {type(embedding).__name__} gave {[tuple(leaf.shape) for leaf in leaves]}; leave influence out"
        )
    chosen = logits[commits.sample, commits.row - first, commits.token]
    turn = (commits.sample[:, None] == commits.sample).tril(-1).sum(-1)  # the how manieth commit of its sample
    out = torch.zeros(len(commits), canvas.tokens.shape[1], device=canvas.tokens.device)
    turns = int(turn.max()) + 1
    for i in range(turns):
        with _told(canvas):
            (gradient,) = torch.autograd.grad(chosen[turn == i].sum(), leaves[0], retain_graph=i + 1 < turns)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norms = torch.linalg.vector_norm(gradient, dim=-1, dtype=wide).float().to(out.device)
        out[turn == i] = norms.masked_fill(~canvas.valid, 0)[commits.sample[turn == i]]
    return out


@contextmanager
def _told(canvas: CanvasState) -> Iterator[None]:
    """What fails here has just worked without gradients."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"influence keeps all that a forward over {canvas.tokens.shape[1]} positions computes, and that does not"
            f" fit in the memory of {canvas.tokens.device}; give shorter prompts, or leave influence out"
        ) from error
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise UserError(
            f"influence needs gradients, and this model cannot be differentiated ({why}); leave influence out"
        ) from error


@contextmanager
def _leaves(embedding: nn.Module) -> Iterator[list[Tensor]]:
    """What the embedding gives while the block lasts, cut off from what is before it, to be differentiated by."""
    leaves: list[Tensor] = []

    def hook(_: nn.Module, args: object, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = embedding.register_forward_hook(hook)
    try:
        yield leaves
    finally:
        handle.remove()


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Parameters need no gradient here: without one, a forward keeps a third less for the backward."""
    free = [p for p in module.parameters() if p.requires_grad and not p.is_inference()]
    try:
        for parameter in free:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in free:
            parameter.requires_grad_(True)
