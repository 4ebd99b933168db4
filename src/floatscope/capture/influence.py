"""Influence: how far the logit of a committed token moves with the embedding of each position.

    compute_influence(model.forward, model.module, step.before, step.commits)      # [commit, key]

Attention says where a row looks; |∂ logit / ∂ embedding_j|, the norm over the embedding dimensions, says whether the
token there changes anything. It takes a forward of its own, with gradients, and a backward for each commit of a sample.
Samples are independent, so one backward serves the first commits of all of them, the next one the second commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from floatscope.canvas import CanvasState, Commits
from floatscope.errors import UserError

EMBEDDING_ELEMENTS = 2**23
"""The most embedding elements in one forward with gradients. The backward needs hundreds of times that memory: 34 bytes
per element and layer of a bf16 Llama, 9 GB in 32 layers. A larger batch is split, down to single samples."""


def compute_influence(
    forward: Callable[[CanvasState, slice], Tensor], module: nn.Module, canvas: CanvasState, commits: Commits
) -> Float[Tensor, "commit key"]:
    """|∂ logit of the committed token at its predicting row / ∂ input embedding_j|; 0 for padding.

    `forward` computes every position of the canvas through `module`, without a cache.
    """
    embedding, length = input_embedding(module), canvas.tokens.shape[1]
    batch_size = max(1, EMBEDDING_ELEMENTS // (length * next(embedding.parameters()).shape[-1]))
    with torch.inference_mode(False), torch.enable_grad(), _frozen(module):
        out = torch.zeros(len(commits), length, device=canvas.tokens.device)
        for samples in commits.sample.unique().split(batch_size) if len(commits) else ():
            selected = torch.isin(commits.sample, samples)
            index = torch.searchsorted(samples, commits.sample[selected])
            columns = (commits.position, commits.row, commits.token, commits.confidence)
            part = CanvasState(canvas.tokens[samples], canvas.states[samples], canvas.step)
            part_commits = Commits(index, *(column[selected] for column in columns))
            out[selected] = _gradient_norms(forward, embedding, part, part_commits)
    if not bool(out.isfinite().all()):
        raise UserError(
            f"the gradient of a logit is NaN or infinite at step {canvas.step}; try float32 or bfloat16, or"
            " leave influence out"
        )
    return out


def input_embedding(module: nn.Module) -> nn.Module:
    """The input embedding of a module; influence differentiates by its output."""
    try:
        embedding = module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        embedding = None
    if not isinstance(embedding, nn.Module):
        raise UserError(
            f"influence is the gradient with respect to the input embeddings, and {type(module).__name__} does not"
            " provide them (get_input_embeddings); leave influence out"
        )
    return embedding


def _gradient_norms(
    forward: Callable[[CanvasState, slice], Tensor], embedding: nn.Module, canvas: CanvasState, commits: Commits
) -> Float[Tensor, "commit key"]:
    """Influence in samples that all have commits: one forward, and a backward for each commit of the busiest sample."""
    first, last = int(commits.row.min()), int(commits.row.max())
    with _leaf_embeddings(embedding) as leaves, _explain_errors(canvas):
        logits = forward(canvas, slice(first, last + 1))
    if len(leaves) != 1 or leaves[0].shape[:2] != canvas.tokens.shape:
        raise UserError(
            f"influence needs input embeddings of shape [batch, position, dimension], once per forward, but"
            f" {type(embedding).__name__} returned {[tuple(leaf.shape) for leaf in leaves]}; leave influence out"
        )
    committed_logits = logits[commits.sample, commits.row - first, commits.token]
    order = (commits.sample[:, None] == commits.sample).tril(-1).sum(-1)  # 0, 1, … within a sample
    out = torch.zeros(len(commits), canvas.tokens.shape[1], device=canvas.tokens.device)
    n_backwards = int(order.max()) + 1
    for i in range(n_backwards):
        total, retain_graph = committed_logits[order == i].sum(), i + 1 < n_backwards
        with _explain_errors(canvas):
            (gradient,) = torch.autograd.grad(total, leaves[0], retain_graph=retain_graph)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norms = torch.linalg.vector_norm(gradient, dim=-1, dtype=wide).float().to(out.device)
        out[order == i] = norms.masked_fill(~canvas.valid, 0)[commits.sample[order == i]]
    return out


@contextmanager
def _explain_errors(canvas: CanvasState) -> Iterator[None]:
    """Turn errors of a forward or backward into UserErrors; the same forward worked without gradients."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"influence stores the activations of a forward over {canvas.tokens.shape[1]} positions, which do not fit"
            f" in the memory of {canvas.tokens.device}; use shorter prompts, or leave influence out"
        ) from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"influence needs gradients, but this model cannot be differentiated ({reason}); leave influence out"
        ) from error


@contextmanager
def _leaf_embeddings(embedding: nn.Module) -> Iterator[list[Tensor]]:
    """Detach the outputs of the embedding until the block ends, and collect them as leaves to differentiate by."""
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
    """Turn the gradients of parameters off until the block ends; the forward then stores a third less."""
    trainable = [p for p in module.parameters() if p.requires_grad and not p.is_inference()]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
