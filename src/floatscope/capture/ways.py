"""Two ways into a model's attention, the same reducers behind both.

`through_transformers`: a registered attention function and a mask function of our own, for models that follow
transformers' AttentionInterface. The mask function keeps structure (full, causal, a rule over indices, 2-D padding), so
no [T, T] mask is built. `through_sdpa`: a `TorchFunctionMode` on `F.scaled_dot_product_attention`, for everything else.
`into(module, watcher)` takes the first that fits.

What changes the softmax itself (softcap, attention sinks as parameters, position bias) and what hides attention inside
one fused call is refused by name, never guessed.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from floatscope.capture.attention import Attention
from floatscope.capture.columns import gram
from floatscope.capture.visibility import Rule, Visibility
from floatscope.capture.watcher import Layer, Watcher
from floatscope.errors import UserError

NAME = "floatscope"
CHANGES_SOFTMAX = {
    "softcap": "a soft cap on the scores",
    "s_aux": "attention sinks as parameters",
    "position_bias": "a learned position bias",
    "head_mask": "a head mask",
    "cache": "a paged cache",
}
FUSED = ("multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "Wo", "wo", "o", "out_lin", "proj", "attn_out")


@contextmanager
def attach(module: nn.Module, watcher: Watcher) -> Iterator[str]:
    """Watch `module` until the block ends; yields the name of the way taken."""
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False) and _has_decoder(module):
        raise UserError(
            f"{type(module).__name__} is an encoder-decoder: its two sequences are no single canvas;"
            " watch the encoder or the decoder on its own"
        )
    transformers_way = _follows_attention_interface(module)
    with (through_transformers if transformers_way else through_sdpa)(module, watcher):
        yield "AttentionInterface" if transformers_way else "scaled_dot_product_attention"


@contextmanager
def detached(module: nn.Module) -> Iterator[None]:
    """While the block lasts a watched module attends by itself, as before; for a forward that is nobody's step."""
    sites = _watchers[module][1] if module in _watchers else None
    own = [] if sites is None else sites.own_attention
    ours = [(config, config._attn_implementation_internal) for config, _ in own]
    try:
        for config, name in own:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, name in ours:
            config._attn_implementation_internal = name


_watchers: weakref.WeakKeyDictionary[nn.Module, tuple[Watcher, Sites]] = weakref.WeakKeyDictionary()


@contextmanager
def _watched(module: nn.Module, watcher: Watcher, stack: bool) -> Iterator[Sites]:
    """Mark every part of the module as watched by this watcher, and by no other."""
    if any(part in _watchers for part in module.modules()):
        raise UserError(
            "this model is being watched already; first leave the other `watch` block, or finish or drop the other"
            " decoding"
        )
    parts = list(module.modules())
    with _sites(module, watcher, stack) as sites:
        _watchers.update(dict.fromkeys(parts, (watcher, sites)))
        try:
            yield sites
        finally:
            for part in parts:
                del _watchers[part]


def _attend(
    watcher: Watcher, layer: Layer, query: Tensor, key: Tensor, value: Tensor, visible: Visibility, scaling: float
) -> Tensor:
    """Under autocast PyTorch casts q, k and v before its kernel; what is captured of them must not be rounded again."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return watcher.attend(Attention(query, key, value, visible, scaling), layer)
    q, k, v = (_autocast(x) for x in (query, key, value))
    with torch.autocast(kind, enabled=False):
        return watcher.attend(Attention(q, k, v, visible, scaling), layer)


def _autocast(x: Tensor) -> Tensor:
    enabled = torch.is_autocast_enabled(x.device.type) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return x.to(torch.get_autocast_dtype(x.device.type)) if enabled else x


def _has_decoder(module: nn.Module) -> bool:
    return any(hasattr(part, "decoder") for part in (module, getattr(module, "model", None)))


# --- transformers ---------------------------------------------------------------------------------------------------


@contextmanager
def through_transformers(module: nn.Module, watcher: Watcher) -> Iterator[None]:
    _register()
    with ExitStack() as undo:
        sites = undo.enter_context(_watched(module, watcher, stack=False))
        sites.own_attention = [(config, config._attn_implementation_internal) for config in _configs(module)]
        for config, name in sites.own_attention:
            undo.callback(setattr, config, "_attn_implementation_internal", name)
        module.set_attn_implementation(NAME)  # type: ignore[operator]
        yield


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visibility | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' signature; q, k, v [batch, head, position, dim], the output [batch, position, head, dim]."""
    watcher, sites = _watchers[module]
    layer = sites.layer(module, query.shape[1], value.shape[-1])
    for name in CHANGES_SOFTMAX.keys() & kwargs.keys():
        if kwargs[name] is not None:
            what = CHANGES_SOFTMAX[name]
            raise UserError(f"layer '{layer.name}' uses {what} (`{name}`), which floatscope cannot capture exactly")
    if dropout:
        raise UserError(f"layer '{layer.name}' applies dropout {dropout} to its attention; call model.eval() first")
    visible = _visible(module, attention_mask, is_causal, query.shape[2], key.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _attend(watcher, layer, query, key, value, visible, float(scale))
    return out.transpose(1, 2).contiguous(), None


def _visible(module: nn.Module, mask: Visibility | Tensor | None, causal: bool | None, Q: int, K: int) -> Visibility:
    if isinstance(mask, Visibility):
        return mask
    if mask is not None:  # a 4-D mask the caller made
        return Visibility.by_mask(_autocast(mask[..., :K]), Q, K)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return Visibility.causal(Q, K) if causal and Q > 1 else Visibility.full(Q, K)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Rule | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Visibility:
    """transformers' mask signature, answered with structure."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    valid = None
    if attention_mask is not None:
        valid = F.pad(attention_mask.bool(), (0, max(0, kv_length + kv_offset - attention_mask.shape[-1])))
        valid = valid[:, kv_offset : kv_offset + kv_length]
    offset = int(q_offset) - int(kv_offset)
    if mask_function is causal_mask_function:
        return Visibility.causal(q_length, kv_length, valid, offset)
    if mask_function is bidirectional_mask_function:
        return Visibility.full(q_length, kv_length, valid, offset)
    assert mask_function is not None
    expanded = _vmapped(mask_function) if use_vmap else mask_function

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return expanded(b, h, q + kv_offset, k + kv_offset)

    return Visibility.by_rule(q_length, kv_length, rule, valid, offset, batch_size)


def _vmapped(function: Rule) -> Rule:
    """Custom mask functions may index tensors by scalar; vmap over the four index axes, as transformers does."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=dims, out_dims=0)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with TransformGetItemToIndex():
            return function(b.flatten(), h.flatten(), q.flatten(), k.flatten())

    return rule


def _follows_attention_interface(module: nn.Module) -> bool:
    return bool(getattr(module, "_supports_attention_backend", False)) and hasattr(module, "set_attn_implementation")


def _configs(module: nn.Module) -> list[Any]:
    """Every config whose attention implementation `set_attn_implementation` may change."""
    found: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            for name in getattr(config, "sub_configs", {}):
                if (sub := getattr(config, name, None)) is not None:
                    found[id(sub)] = sub
    return list(found.values())


# --- scaled_dot_product_attention -----------------------------------------------------------------------------------


@contextmanager
def through_sdpa(module: nn.Module, watcher: Watcher) -> Iterator[None]:
    with _watched(module, watcher, stack=True) as sites, _SdpaMode(watcher, sites):
        yield


class _SdpaMode(TorchFunctionMode):
    def __init__(self, watcher: Watcher, sites: Sites) -> None:
        super().__init__()
        self.watcher, self.sites = watcher, sites

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.watcher.watching:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in FUSED:
            raise UserError(
                f"layer '{self.sites.current_name}' computes its attention inside one fused call ({name}), which hides"
                " it from floatscope; use a module that calls F.scaled_dot_product_attention"
            )
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(**_SDPA.bind(*args, **kwargs).arguments)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.ndim not in (3, 4):
            raise UserError(
                f"layer '{self.sites.current_name}' attends with queries of shape {tuple(query.shape)};"
                " floatscope reads [batch, head, query, dim]"
            )
        q, k, v = (x[None] if x.ndim == 3 else x for x in (query, key, value))  # 3-D: the heads of one sequence
        k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
        layer = self.sites.layer(self.sites.current, q.shape[1], v.shape[-1])
        if dropout_p:
            raise UserError(
                f"layer '{layer.name}' applies dropout {dropout_p} to its attention; call model.eval() first"
            )
        Q, K = q.shape[2], k.shape[2]
        if attn_mask is not None:
            visible = Visibility.by_mask(_autocast(attn_mask), Q, K)
        elif is_causal:  # SDPA aligns a rectangular causal mask with key 0
            visible = Visibility.causal(Q, K, offset=0)
        else:
            visible = Visibility.full(Q, K)
        scaling = q.shape[-1] ** -0.5 if scale is None else scale
        out = _attend(self.watcher, layer, q, k, v, visible, float(scaling))
        return out.reshape(*query.shape[:-1], v.shape[-1])


_SDPA = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (
            ("query", inspect.Parameter.empty),
            ("key", inspect.Parameter.empty),
            ("value", inspect.Parameter.empty),
            ("attn_mask", None),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", None),
            ("enable_gqa", False),
        )
    ]
)


# --- where a call happens -------------------------------------------------------------------------------------------


class Sites:
    """Names, output projections and residual streams of the modules attention calls come from."""

    def __init__(self, root: nn.Module) -> None:
        self.names = {part: name or type(root).__name__ for name, part in root.named_modules()}
        self.parents = {child: part for part in root.modules() for child in part.children()}
        self.blocks = [part for group in root.modules() if isinstance(group, nn.ModuleList) for part in group]
        self.own_attention: list[tuple[Any, Any]] = []  # each config and the implementation it names by itself
        self.running: list[nn.Module] = []
        self.streams: dict[nn.Module, Tensor] = {}  # what entered each running block: the residual stream
        self._layers: dict[nn.Module, Layer] = {}
        self._grams: dict[nn.Module, Tensor | None] = {}
        self._block_of: dict[nn.Module, nn.Module | None] = {}

    @property
    def current(self) -> nn.Module | None:
        return self.running[-1] if self.running else None

    @property
    def current_name(self) -> str:
        return self.names[self.current] if self.current is not None else "outside the model"

    def layer(self, module: nn.Module | None, heads: int, dim: int) -> Layer:
        if module is None:
            return Layer("outside the model")
        return Layer(self.names[module], lambda: self._gram(module, heads, dim), lambda: self._residual(module))

    def _residual(self, module: nn.Module) -> Tensor | None:
        if module not in self._block_of:
            above: nn.Module | None = module
            while above is not None and above not in self.blocks:
                above = self.parents.get(above)
            self._block_of[module] = above
        block = self._block_of[module]
        stream = None if block is None else self.streams.get(block)
        if stream is None:
            return None
        wide = torch.promote_types(stream.dtype, torch.float32)
        norms: Tensor = torch.linalg.vector_norm(stream.detach(), dim=-1, dtype=wide)
        return norms.float()

    def _gram(self, module: nn.Module, heads: int, dim: int) -> Tensor | None:
        """W_OᵀW_O of the projection that follows the heads, found by the names in use; None if there is none."""
        if module not in self._grams:
            above = self.parents.get(module)  # BERT keeps it one level up, in `output`
            places = [place for place in (module, above, getattr(above, "output", None)) if place is not None]
            found = (weight for place in places for weight in _output_projections(place))
            weight = next((w for w in found if w.shape[1] == heads * dim), None)
            self._grams[module] = None if weight is None else gram(weight, heads)
        return self._grams[module]

    def enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = args[0] if args else kwargs.get("hidden_states")
        if isinstance(stream, Tensor) and stream.ndim == 3 and stream.is_floating_point():
            self.streams[block] = stream

    def leave_block(self, block: nn.Module) -> None:
        self.streams.pop(block, None)

    def enter(self, module: nn.Module) -> None:
        self.running.append(module)

    def leave(self, module: nn.Module) -> None:
        while self.running and self.running.pop() is not module:
            pass


@contextmanager
def _sites(root: nn.Module, watcher: Watcher, stack: bool) -> Iterator[Sites]:
    """Hooks on the blocks for their residual stream; with `stack` on every module, to know which is running."""
    sites = Sites(root)
    handles: list[RemovableHandle] = []
    for block in sites.blocks if "residual" in watcher.fields else ():
        handles.append(block.register_forward_pre_hook(sites.enter_block, with_kwargs=True))
        handles.append(block.register_forward_hook(lambda m, a, o: sites.leave_block(m), always_call=True))
    for part in root.modules() if stack else ():
        handles.append(part.register_forward_pre_hook(lambda m, a: sites.enter(m)))
        handles.append(part.register_forward_hook(lambda m, a, o: sites.leave(m), always_call=True))
    try:
        yield sites
    finally:
        for handle in handles:
            handle.remove()


def _output_projections(module: nn.Module) -> Iterator[Tensor]:
    """Weights [out, head · dim] that may be the output projection, the likeliest first."""
    for name in OUTPUT_PROJECTIONS:
        part = getattr(module, name, None)
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            yield weight if isinstance(part, nn.Linear) else weight.T  # GPT-2's Conv1D is [in, out]
