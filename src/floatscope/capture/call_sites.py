"""Where attention calls come from: the name, the output projection and the residual stream of each attention module.

with track_sites(module, every_module=True) as sites:
    layer = sites.layer(sites.current, heads, dim)

A forward is seen by replacing `forward` on the module itself until the block ends: `module(x)` calls it, and so does
code that calls `module.forward(x)`, which forward hooks would miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from floatscope.capture.key_stats import output_gram
from floatscope.capture.watcher import Layer
from floatscope.errors import UserError

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "Wo", "wo", "o", "out_lin", "proj", "attn_out")
"""Names of output projections in common models, the likeliest first."""


@runtime_checkable
class ForwardObserver(Protocol):
    """Is called around each outermost forward of the watched model, but not around one of a single layer."""

    def enter_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward of `module`, which is the watched model or a part of it that is called on its own."""

    def leave_forward(self, module: nn.Module, output: Any) -> None:
        """After it."""

    def abort_forward(self) -> None:
        """Instead of `leave_forward`, if the forward raises an exception."""


@dataclass
class Run:
    """One run of a module: the residual stream that entered it, and the attention modules that were called in it."""

    module: nn.Module
    stream: Tensor | None = None
    attended: list[nn.Module] = field(default_factory=list)


class CallSites:
    """The modules of a model, and which of them are running.

    original_attention  each config and the attention implementation it named before floatscope attached
    running             the stack of runs, the innermost last
    """

    def __init__(self, root: nn.Module, observer: ForwardObserver | None = None) -> None:
        self.root, self.observer = root, observer
        self.names = {module: name or type(root).__name__ for name, module in root.named_modules()}
        self.parents = {child: module for module in root.modules() for child in module.children()}
        self.blocks = {block for group in root.modules() if isinstance(group, nn.ModuleList) for block in group}
        self.inside_blocks = {module for block in self.blocks for module in block.modules()}
        self.original_attention: list[tuple[Any, Any]] = []
        self.running: list[Run] = []
        self._grams: dict[nn.Module, Tensor | None] = {}

    @property
    def current(self) -> nn.Module | None:
        """The innermost running module."""
        return self.running[-1].module if self.running else None

    @property
    def current_name(self) -> str:
        """The name of the innermost running module, for messages."""
        return self.names[self.current] if self.current is not None else "outside the model"

    @property
    def block_name(self) -> str | None:
        """The name of the innermost running block; None outside of blocks."""
        block = self._running_block()
        return None if block is None else self.names[block.module]

    def layer(self, module: nn.Module | None, heads: int, dim: int) -> Layer:
        """Describe the attention call of a module with `heads` heads of `dim` value dimensions."""
        if module is None:
            return Layer("outside the model")
        name = self._count_call(module)
        return Layer(name, self.block_name, lambda: self._gram(module, heads, dim), lambda: self._residual_norms())

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a module as the innermost one, and tell the observer if it is the outermost too."""
        observer = None if self.running or module in self.inside_blocks else self.observer
        stream = args[0] if args else kwargs.get("hidden_states")
        is_stream = isinstance(stream, Tensor) and stream.ndim == 3 and stream.is_floating_point()
        if observer is not None:
            observer.enter_forward(module, args, kwargs)
        self.running.append(Run(module, stream if is_stream and module in self.blocks else None))
        depth = len(self.running)
        try:
            output = forward(*args, **kwargs)
        except BaseException:
            if observer is not None:
                observer.abort_forward()
            raise
        finally:
            del self.running[depth - 1 :]
        if observer is not None:
            observer.leave_forward(module, output)
        return output

    def _count_call(self, module: nn.Module) -> str:
        """The name of a call. A module that is not inside a block may hold all layers: its calls are numbered."""
        attended = self.running[-1].attended if self.running else []
        attended.append(module)
        count, name = attended.count(module), self.names[module]
        if count == 1:
            return name
        if module in self.inside_blocks:
            raise UserError(
                f"layer '{name}' computes attention more than once in one forward, as differential attention does: it"
                " has no single attention matrix, so it cannot be captured"
            )
        return f"{name} (call {count})"

    def _running_block(self) -> Run | None:
        return next((run for run in reversed(self.running) if run.module in self.blocks), None)

    def _residual_norms(self) -> Tensor | None:
        """Norms of the residual stream that entered the innermost running block."""
        block = self._running_block()
        if block is None or block.stream is None:
            return None
        stream = block.stream
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


class _TrackedForward:
    """Stands in for the `forward` of one module, as an attribute of the module."""

    def __init__(self, sites: CallSites, module: nn.Module) -> None:
        update_wrapper(self, module.forward)  # code that reads the signature sees the original's
        self._sites: CallSites | None = sites
        self._module, self._forward = module, module.forward
        self._is_own_attribute = "forward" in vars(module)  # of a library that replaced it before, such as accelerate
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._sites is None:
            return self._forward(*args, **kwargs)
        return self._sites.run(self._module, self._forward, args, kwargs)

    def __reduce__(self) -> Any:
        raise UserError("a model cannot be copied or pickled while it is watched; do it outside the `watch` block")

    def restore(self) -> None:
        """Give the module its own forward back; if it was replaced once more since, only stop tracking."""
        self._sites = None
        if vars(self._module).get("forward") is not self:
            return
        if self._is_own_attribute:
            self._module.forward = self._forward
        else:
            del self._module.forward


@contextmanager
def track_sites(root: nn.Module, *, every_module: bool, observer: ForwardObserver | None = None) -> Iterator[CallSites]:
    """Track the call sites of a model until the block ends.

    every_module  track all modules, to know which one is running; else blocks, and the modules outside of blocks
    observer      is called around each outermost forward
    """
    sites = CallSites(root, observer)
    tracked: list[_TrackedForward] = []
    try:
        for module in root.modules():
            if every_module or module in sites.blocks or module not in sites.inside_blocks:
                tracked.append(_TrackedForward(sites, module))
        yield sites
    finally:
        for forward in reversed(tracked):
            forward.restore()


def _output_projections(module: nn.Module) -> Iterator[Tensor]:
    """Yield weights [out, head · dim] that may be the output projection, the likeliest first."""
    for name in OUTPUT_PROJECTIONS:
        projection = getattr(module, name, None)
        weight = getattr(projection, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            yield weight if isinstance(projection, nn.Linear) else weight.T  # GPT-2's Conv1D is [in, out]
