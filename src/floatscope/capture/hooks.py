"""Hooks into the attention of a model. There are two; `attach` chooses, and both feed the same `Watcher`.

    with attach(module, watcher) as hook:            # "AttentionInterface" or "scaled_dot_product_attention"
        ...

*AttentionInterface*: an attention function and a mask function registered with transformers, for models that use its
interface. The mask function returns structure (full, causal, a rule over indices, 2-D padding), so no [T, T] mask is
built. *scaled_dot_product_attention*: a `TorchFunctionMode` on the torch function, for every other model.

Arguments that change the softmax itself (a soft cap, attention sinks as parameters, a position bias) and attention
inside one fused call cannot be captured exactly; they raise a `UserError` that names them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from floatscope.capture.attention import AttentionCall
from floatscope.capture.block_causal import block_causal_name, block_visibility, find_block_size, valid_keys
from floatscope.capture.call_sites import CallSites, ForwardObserver, track_sites
from floatscope.capture.experts import track_experts
from floatscope.capture.parallel import check_not_split
from floatscope.capture.visibility import Rule, Visibility
from floatscope.capture.watcher import Layer, Watcher
from floatscope.compat import (
    FUSED_ATTENTION_FUNCTIONS,
    attention_name,
    has_attention_name,
    index_by_scalars,
    mask_kind,
    set_attention_name,
    uses_attention_interface,
)
from floatscope.errors import UserError

IMPLEMENTATION = "floatscope"
"""The name under which transformers knows our attention and mask functions."""
TENSOR_MASK_IMPLEMENTATION = "floatscope_tensor_mask"
"""The name under which it knows our attention function with its own mask function of SDPA."""
TENSOR_MASK_MODELS = ("doge",)
"""Model types that build another mask from the one they get, so it must be a tensor."""
UNSUPPORTED_ARGUMENTS = {
    "softcap": "a soft cap on the scores",
    "s_aux": "attention sinks as parameters",
    "position_bias": "a learned position bias",
    "head_mask": "a head mask",
    "cache": "a paged cache",
}
"""Arguments of transformers' attention functions that change the softmax or hide keys."""


@contextmanager
def attach(module: nn.Module, watcher: Watcher, observer: ForwardObserver | None = None) -> Iterator[str]:
    """Pass the attention calls of `module` to `watcher` until the block ends; yield the name of the hook.

    `observer` is called around each forward of the model, or of a part of it that is called on its own.
    """
    check_not_split(module)
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False) and _has_decoder(module):
        raise UserError(
            f"{type(module).__name__} is an encoder-decoder: its two sequences are not one canvas; watch the encoder or"
            " the decoder on its own"
        )
    if uses_attention_interface(module):
        with _attach_attention_interface(module, watcher, observer):
            yield "AttentionInterface"
    else:
        with _attach_sdpa(module, watcher, observer):
            yield "scaled_dot_product_attention"


@contextmanager
def detached(module: nn.Module) -> Iterator[None]:
    """Give a watched module its own attention back until the block ends, for a forward that is not a step."""
    sites = _watchers[module][1] if module in _watchers else None
    original = [] if sites is None else sites.original_attention
    attached = [(config, attention_name(config)) for config, _ in original]
    try:
        for config, name in original:
            set_attention_name(config, name)
        yield
    finally:
        for config, name in attached:
            set_attention_name(config, name)


_watchers: weakref.WeakKeyDictionary[nn.Module, tuple[Watcher, CallSites]] = weakref.WeakKeyDictionary()
"""Every submodule of a watched model."""


@contextmanager
def _register_watcher(
    module: nn.Module, watcher: Watcher, observer: ForwardObserver | None, every_module: bool
) -> Iterator[CallSites]:
    """Register the watcher for every submodule; a submodule has at most one watcher."""
    submodules = list(module.modules())
    if any(submodule in _watchers for submodule in submodules):
        raise UserError(
            "this model is already being watched; first leave the other `watch` block, or finish or discard the other"
            " decoding"
        )
    with ExitStack() as tracking:
        sites = tracking.enter_context(track_sites(module, every_module=every_module, observer=observer))
        if watcher.watch.captures_experts:
            tracking.enter_context(
                track_experts(module, lambda routing: watcher.record_routing(sites.block_name, routing))
            )
        _watchers.update(dict.fromkeys(submodules, (watcher, sites)))
        try:
            yield sites
        finally:
            for submodule in submodules:
                del _watchers[submodule]


def _attend(
    watcher: Watcher, layer: Layer, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scaling: float
) -> Tensor:
    """Pass a call to the watcher.

    Under autocast PyTorch casts q, k and v before its kernel; the capture itself must not be rounded again.
    """
    device_type = query.device.type
    if not torch.is_autocast_enabled(device_type):
        return watcher.attend(AttentionCall(query, key, value, visibility, scaling), layer)
    q, k, v = (_autocast(x) for x in (query, key, value))
    with torch.autocast(device_type, enabled=False):
        return watcher.attend(AttentionCall(q, k, v, visibility, scaling), layer)


def _autocast(x: Tensor) -> Tensor:
    enabled = torch.is_autocast_enabled(x.device.type) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return x.to(torch.get_autocast_dtype(x.device.type)) if enabled else x


def _has_decoder(module: nn.Module) -> bool:
    return any(hasattr(part, "decoder") for part in (module, getattr(module, "model", None)))


# --- transformers ---------------------------------------------------------------------------------------------------


@contextmanager
def _attach_attention_interface(
    module: nn.Module, watcher: Watcher, observer: ForwardObserver | None
) -> Iterator[None]:
    name = _register_functions(module)
    with ExitStack() as undo:
        sites = undo.enter_context(_register_watcher(module, watcher, observer, every_module=False))
        sites.original_attention = [(config, attention_name(config)) for config in _configs(module)]
        for config, original in sites.original_attention:
            undo.callback(set_attention_name, config, original)
        module.set_attn_implementation(name)  # type: ignore[operator]
        yield


def _register_functions(module: nn.Module) -> str:
    """Register our functions for a module, and return their name; a block size is a part of it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name, mask_function = IMPLEMENTATION, _mask_function
    if getattr(module.config, "model_type", None) in TENSOR_MASK_MODELS:
        name, mask_function = TENSOR_MASK_IMPLEMENTATION, AttentionMaskInterface()["sdpa"]
    elif (block_size := find_block_size(module)) is not None:
        name, mask_function = f"{name}_{block_causal_name(block_size)}", partial(block_visibility, block_size)
    AttentionInterface.register(name, _attention_function)
    AttentionMaskInterface.register(name, mask_function)
    return name


def _attention_function(
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
    """The attention function of transformers: q, k, v [batch, head, position, dim] → [batch, position, head, dim]."""
    watcher, sites = _watchers[module]
    layer = sites.layer(module, query.shape[1], value.shape[-1])
    for name in UNSUPPORTED_ARGUMENTS.keys() & kwargs.keys():
        if kwargs[name] is not None:
            meaning = UNSUPPORTED_ARGUMENTS[name]
            raise UserError(f"layer '{layer.name}' uses {meaning} (`{name}`), which floatscope cannot capture exactly")
    if dropout:
        raise UserError(f"layer '{layer.name}' applies dropout {dropout} to its attention; call model.eval() first")
    Q, K = query.shape[2], key.shape[2]
    visibility = _read_visibility(module, attention_mask, is_causal, Q, K)
    if (visibility.queries, visibility.keys) != (Q, K):
        raise UserError(
            f"layer '{layer.name}' attends from {Q} queries over {K} keys, but its mask was made for"
            f" {visibility.queries} and {visibility.keys}: its cache keeps other positions than the mask assumes, so"
            " the visible keys are not known; generate with use_cache=False"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _attend(watcher, layer, query, key, value, visibility, float(scale))
    return out.transpose(1, 2).contiguous(), None


def _read_visibility(
    module: nn.Module, mask: Visibility | Tensor | None, causal: bool | None, Q: int, K: int
) -> Visibility:
    if isinstance(mask, Visibility):
        return mask
    if mask is not None:  # a 4-D mask from the caller
        return Visibility.from_mask(_autocast(mask[..., :K]), Q, K)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return Visibility.causal(Q, K) if causal and Q > 1 else Visibility.full(Q, K)


def _mask_function(
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
    """The mask function of transformers; it returns structure instead of a mask tensor."""
    valid = valid_keys(attention_mask, kv_length, int(kv_offset))
    offset = int(q_offset) - int(kv_offset)
    kind = mask_kind(mask_function)
    if kind == "causal":
        return Visibility.causal(q_length, kv_length, valid, offset)
    if kind == "full":
        return Visibility.full(q_length, kv_length, valid, offset)
    assert mask_function is not None
    function = _vmap_indices(mask_function) if use_vmap else mask_function

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return function(b, h, q + kv_offset, k + kv_offset)

    return Visibility.from_rule(q_length, kv_length, rule, valid, offset, batch_size)


def _vmap_indices(function: Rule) -> Rule:
    """Vmap over the four index axes, as transformers does: custom mask functions may index tensors by scalar."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=dims, out_dims=0)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with index_by_scalars():
            return function(b.flatten(), h.flatten(), q.flatten(), k.flatten())

    return rule


def _configs(module: nn.Module) -> list[Any]:
    """Every config whose attention implementation `set_attn_implementation` may change."""
    configs: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if has_attention_name(config):
            configs[id(config)] = config
            for name in getattr(config, "sub_configs", {}):
                if (sub := getattr(config, name, None)) is not None:
                    configs[id(sub)] = sub
    return list(configs.values())


# --- scaled_dot_product_attention -----------------------------------------------------------------------------------


@contextmanager
def _attach_sdpa(module: nn.Module, watcher: Watcher, observer: ForwardObserver | None) -> Iterator[None]:
    with _register_watcher(module, watcher, observer, every_module=True) as sites, _SdpaMode(watcher, sites):
        yield


class _SdpaMode(TorchFunctionMode):
    """Replaces F.scaled_dot_product_attention while a forward is watched."""

    def __init__(self, watcher: Watcher, sites: CallSites) -> None:
        super().__init__()
        self.watcher, self.sites = watcher, sites

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.watcher.is_watching and not (self.watcher.on_first_call and self.sites.running):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in FUSED_ATTENTION_FUNCTIONS:
            raise UserError(
                f"layer '{self.sites.current_name}' computes its attention inside one fused call ({name}), which"
                " floatscope cannot capture; use a module that calls F.scaled_dot_product_attention"
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
                f"layer '{self.sites.current_name}' attends with queries of shape {tuple(query.shape)}; floatscope"
                " expects [batch, head, query, dim]"
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
            visibility = Visibility.from_mask(_autocast(attn_mask), Q, K)
        elif is_causal:  # SDPA aligns a rectangular causal mask with key 0
            visibility = Visibility.causal(Q, K, offset=0)
        else:
            visibility = Visibility.full(Q, K)
        scaling = q.shape[-1] ** -0.5 if scale is None else scale
        out = _attend(self.watcher, layer, q, k, v, visibility, float(scaling))
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
