"""Where attention calls come from: the name, the output projection and the residual stream of each attention module.

with track_sites(module, residual=True, stack=True) as sites:
    layer = sites.layer(sites.current, heads, dim)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from floatscope.capture.key_stats import output_gram
from floatscope.capture.watcher import Layer

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "Wo", "wo", "o", "out_lin", "proj", "attn_out")
"""Names of output projections in common models, the likeliest first."""


class CallSites:
    """The modules of a model, and which of them are running.

    original_attention  each config and the attention implementation it named before floatscope attached
    running             the stack of running modules
    streams             the residual stream that entered each running block
    """

    def __init__(self, root: nn.Module) -> None:
        self.names = {module: name or type(root).__name__ for name, module in root.named_modules()}
        self.parents = {child: module for module in root.modules() for child in module.children()}
        self.blocks = [block for group in root.modules() if isinstance(group, nn.ModuleList) for block in group]
        self.original_attention: list[tuple[Any, Any]] = []
        self.running: list[nn.Module] = []
        self.streams: dict[nn.Module, Tensor] = {}
        self._grams: dict[nn.Module, Tensor | None] = {}
        self._block_of: dict[nn.Module, nn.Module | None] = {}

    @property
    def current(self) -> nn.Module | None:
        """The innermost running module."""
        return self.running[-1] if self.running else None

    @property
    def current_name(self) -> str:
        """The name of the innermost running module, for messages."""
        return self.names[self.current] if self.current is not None else "outside the model"

    def layer(self, module: nn.Module | None, heads: int, dim: int) -> Layer:
        """Describe an attention module with `heads` heads of `dim` value dimensions."""
        if module is None:
            return Layer("outside the model")
        return Layer(self.names[module], lambda: self._gram(module, heads, dim), lambda: self._residual_norms(module))

    def enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a block: remember its residual stream."""
        stream = args[0] if args else kwargs.get("hidden_states")
        if isinstance(stream, Tensor) and stream.ndim == 3 and stream.is_floating_point():
            self.streams[block] = stream

    def leave_block(self, block: nn.Module) -> None:
        """Forward hook of a block: forget its residual stream."""
        self.streams.pop(block, None)

    def enter(self, module: nn.Module) -> None:
        """Forward pre-hook of a module: push it on the stack."""
        self.running.append(module)

    def leave(self, module: nn.Module) -> None:
        """Forward hook of a module: pop it, and whatever an exception left above it."""
        while self.running and self.running.pop() is not module:
            pass

    def _residual_norms(self, module: nn.Module) -> Tensor | None:
        """Norms of the residual stream that entered the block of `module`."""
        if module not in self._block_of:
            block: nn.Module | None = module
            while block is not None and block not in self.blocks:
                block = self.parents.get(block)
            self._block_of[module] = block
        block = self._block_of[module]
        stream = None if block is None else self.streams.get(block)
        if stream is None:
            return None
        wide = torch.promote_types(stream.dtype, torch.float32)
        norms: Tensor = torch.linalg.vector_norm(stream.detach(), dim=-1, dtype=wide)
        return norms.float()

    def _gram(self, module: nn.Module, heads: int, dim: int) -> Tensor | None:
        """W_OᵀW_O of the projection that follows the heads, searched by common names; None if none is found."""
        if module not in self._grams:
            parent = self.parents.get(module)  # in BERT the projection is one level up, in `output`
            places = [place for place in (module, parent, getattr(parent, "output", None)) if place is not None]
            weights = (weight for place in places for weight in _output_projections(place))
            weight = next((w for w in weights if w.shape[1] == heads * dim), None)
            self._grams[module] = None if weight is None else output_gram(weight, heads)
        return self._grams[module]


@contextmanager
def track_sites(root: nn.Module, *, residual: bool, stack: bool) -> Iterator[CallSites]:
    """Track the call sites of a model until the block ends.

    residual  hook the blocks, to read their residual streams
    stack     hook every module, to know which one is running
    """
    sites = CallSites(root)
    handles: list[RemovableHandle] = []
    for block in sites.blocks if residual else ():
        handles.append(block.register_forward_pre_hook(sites.enter_block, with_kwargs=True))
        handles.append(block.register_forward_hook(lambda m, a, o: sites.leave_block(m), always_call=True))
    for module in root.modules() if stack else ():
        handles.append(module.register_forward_pre_hook(lambda m, a: sites.enter(m)))
        handles.append(module.register_forward_hook(lambda m, a, o: sites.leave(m), always_call=True))
    try:
        yield sites
    finally:
        for handle in handles:
            handle.remove()


def _output_projections(module: nn.Module) -> Iterator[Tensor]:
    """Yield weights [out, head · dim] that may be the output projection, the likeliest first."""
    for name in OUTPUT_PROJECTIONS:
        projection = getattr(module, name, None)
        weight = getattr(projection, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            yield weight if isinstance(projection, nn.Linear) else weight.T  # GPT-2's Conv1D is [in, out]
