"""Which experts process each token of a mixture, and with which weights: what the router passes to them.

    with track_experts(module, on_routing=print):
        module(ids)                      # Routing(ids [token, k], weights [token, k]) of each layer with experts

All mixtures of transformers call their experts in one form, `experts(hidden_states, ids, weights)`, whatever their
router computes. So the experts' own arguments are read: they are what the model multiplies with, after all
normalisation and scaling, and no router is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Signature, signature
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from floatscope.compat import is_expert_module
from floatscope.errors import UserError


@dataclass(frozen=True)
class Routing:
    """The experts of each token in one layer, by their weight, the largest first; equal weights by their id."""

    ids: Int[Tensor, "token expert_rank"]
    weights: Float[Tensor, "token expert_rank"]


def find_experts(root: nn.Module) -> list[nn.Module]:
    """Return the modules that hold the experts of each layer; refuse a model without any."""
    experts = [module for module in root.modules() if is_expert_module(module)]
    if not experts:
        raise UserError(
            f"{type(root).__name__} has no experts that can be recorded: none of its modules is called with the choice"
            " of a router, as in transformers' mixtures of experts; leave experts out"
        )
    return experts


@contextmanager
def track_experts(root: nn.Module, on_routing: Callable[[Routing], None]) -> Iterator[None]:
    """Call `on_routing` before each call of a layer's experts, until the block ends."""
    with ExitStack() as undo:
        for module in find_experts(root):
            hook = partial(_read_call, signature(module.forward), on_routing)
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _read_call(
    parameters: Signature,
    on_routing: Callable[[Routing], None],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    ids, weights = list(parameters.bind(*args, **kwargs).arguments.values())[1:3]
    on_routing(_sort_experts(ids.detach(), weights.detach()))


def _sort_experts(ids: Tensor, weights: Tensor) -> Routing:
    """A router may return its choice in any order, so the order is ours."""
    by_id = ids.argsort(-1)
    ids, weights = ids.gather(-1, by_id), weights.gather(-1, by_id)
    by_weight = weights.argsort(dim=-1, descending=True, stable=True)
    return Routing(ids.gather(-1, by_weight), weights.gather(-1, by_weight))
