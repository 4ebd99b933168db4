"""The private APIs of torch and transformers that floatscope uses, all in one place.

    choose_sdpa_kernel(q, k, v)        # SDPBackend.FLASH_ATTENTION
    describe_untested()                # ["torch 2.99 is newer than 2.13, the newest tested"], or nothing

A private API may change in any release. Each one here says what it is and on which versions the tests ran; a new
version is tested by running the suite on it and widening `TESTED`; nothing here fails outside the range.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

TESTED = {"torch": ("2.13", "2.13"), "transformers": ("5.17", "5.23")}
"""The oldest and the newest release of each library that the tests ran on: capture, sampling, and opening, decoding and
watching models (`make test-versions`)."""
PRIVATE_APIS = {
    "torch": (
        "torch._fused_sdp_choice",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
        "TransformGetItemToIndex",
        "torch._C._current_graph_task_id",
    ),
    "transformers": (
        "_supports_attention_backend",
        "_is_stateful",
        "_attn_implementation_internal",
        "bidirectional_mask_function",
        "causal_mask_function",
        "sdpa_attention_forward",
        "HF_DEACTIVATE_ASYNC_LOAD",
        "top_k_index",
    ),
}
"""What this module uses of each library."""


@dataclass(frozen=True)
class LibraryUse:
    """A library whose private APIs are used: its installed release, and the releases that were tested."""

    library: str
    installed: str
    oldest: str
    newest: str
    private_apis: tuple[str, ...]

    @property
    def problem(self) -> str | None:
        """A sentence if the installed release is outside the tested range."""
        release = ".".join(self.installed.split(".")[:2])
        if _numbers(release) < _numbers(self.oldest):
            return f"{self.library} {release} is older than {self.oldest}, the oldest tested"
        if _numbers(release) > _numbers(self.newest):
            return f"{self.library} {release} is newer than {self.newest}, the newest tested"
        return None


def list_libraries() -> list[LibraryUse]:
    """Return the libraries whose private APIs are used."""
    return [LibraryUse(name, version(name), *TESTED[name], apis) for name, apis in PRIVATE_APIS.items()]


def describe_untested() -> list[str]:
    """Return a sentence for each library whose installed release is outside the tested range."""
    return [library.problem for library in list_libraries() if library.problem is not None]


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


# --- torch ----------------------------------------------------------------------------------------------------------

FUSED_ATTENTION_FUNCTIONS = (
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
)
"""Functions that compute attention and its projections in one call, two of them private (torch 2.13)."""


def choose_sdpa_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    grouped: bool = False,
) -> SDPBackend:
    """`torch._fused_sdp_choice`: the kernel that F.scaled_dot_product_attention would run (torch 2.13)."""
    return SDPBackend(torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped))


def run_cpu_flash_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`aten._scaled_dot_product_flash_attention_for_cpu`: output and log-sum-exp (torch 2.13)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def run_flash_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`aten._scaled_dot_product_flash_attention`: output and log-sum-exp on CUDA (torch 2.13)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    return out, lse


def run_efficient_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`aten._scaled_dot_product_efficient_attention`: output and log-sum-exp on CUDA (torch 2.13)."""
    ran = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    out, lse = ran[:2]
    return out, lse[..., : q.shape[2]]  # the kernel pads rows to a multiple of 32


def run_cudnn_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`aten._scaled_dot_product_cudnn_attention`: output and log-sum-exp on CUDA (torch 2.13)."""
    ran = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    out, lse = ran[:2]
    return out, lse.reshape(out.shape[:3])


def index_by_scalars() -> AbstractContextManager[Any]:
    """`torch._dynamo…TransformGetItemToIndex`: under vmap, a tensor can be indexed by a scalar tensor (torch 2.13)."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def is_in_backward() -> bool:
    """`torch._C._current_graph_task_id`: whether autograd runs a backward in this thread (torch 2.13)."""
    return torch._C._current_graph_task_id() != -1


# --- transformers ---------------------------------------------------------------------------------------------------


def uses_attention_interface(module: nn.Module) -> bool:
    """`_supports_attention_backend`: whether a model calls the AttentionInterface (transformers 5.17 to 5.23)."""
    return bool(getattr(module, "_supports_attention_backend", False)) and hasattr(module, "set_attn_implementation")


def is_stateful(module: nn.Module) -> bool:
    """`_is_stateful`: whether a model has layers with a recurrent state (transformers 5.17 to 5.23)."""
    return bool(getattr(module, "_is_stateful", False))


def has_attention_name(config: Any) -> bool:
    """Whether a config has an attention implementation of its own (transformers 5.17 to 5.23)."""
    return hasattr(config, "_attn_implementation_internal")


def attention_name(config: Any) -> Any:
    """`_attn_implementation_internal`: the attention implementation of a config (transformers 5.17 to 5.23)."""
    return config._attn_implementation_internal


def set_attention_name(config: Any, name: Any) -> None:
    """Set what `attention_name` returns, without the checks and messages of `set_attn_implementation`."""
    config._attn_implementation_internal = name


def sdpa_attention_function() -> Callable[..., Any]:
    """`sdpa_attention_forward`: the attention function that transformers registers as "sdpa" (5.17 to 5.23)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    function: Callable[..., Any] = sdpa_attention_forward
    return function


EXPERT_ARGUMENTS = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
"""The arguments of expert modules after `hidden_states`; the second pair is gpt-oss's."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""Names of the setting in the configs of mixtures."""


def is_expert_module(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer and is called with the choice of the router, as the functions of
    the `ExpertsInterface` are: `experts(hidden_states, ids, weights)` (transformers 5.17 to 5.23)."""
    return tuple(signature(module.forward).parameters)[1:3] in EXPERT_ARGUMENTS


def experts_per_token(config: Any) -> int | None:
    """How many experts process a token, as the config says; None if it does not (transformers 5.17 to 5.23)."""
    text_config = config.get_text_config()
    counts = (getattr(text_config, name, None) for name in EXPERTS_PER_TOKEN)
    return next((count for count in counts if isinstance(count, int)), None)


@contextmanager
def read_in_order() -> Iterator[None]:
    """`HF_DEACTIVATE_ASYNC_LOAD`: read weights when they are placed, not ahead in threads (transformers 5.17 to 5.23).

    Threads read every expert of a mixture before the first are stacked, which takes the memory of the model twice.
    """
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


def mask_kind(mask_function: Callable[..., Any] | None) -> Literal["causal", "full"] | None:
    """Which function of `transformers.masking_utils` this is; None: another rule (transformers 5.17 to 5.23)."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function:
        return "causal"
    return "full" if mask_function is bidirectional_mask_function else None


def full_mask_function() -> Callable[..., Any]:
    """The function of `transformers.masking_utils` under which every row sees every key (transformers 5.17 to 5.23)."""
    from transformers.masking_utils import bidirectional_mask_function

    function: Callable[..., Any] = bidirectional_mask_function
    return function


@contextmanager
def read_gguf_once() -> Iterator[None]:
    """Let transformers parse a .gguf file once inside the block.

    It opens the file for the config, the weights and the tokenizer, and lists the names of all tensors for every module
    of the network; each takes seconds. Both functions are looked up in `gguf` at each call; in a release that imports
    them otherwise this only has no effect.
    """
    import gguf

    originals = {"GGUFReader": gguf.GGUFReader, "get_tensor_name_map": gguf.get_tensor_name_map}
    by_path = cache(gguf.GGUFReader)
    replacements = {
        "GGUFReader": lambda path, *arguments: by_path(os.path.realpath(path), *arguments),
        "get_tensor_name_map": cache(gguf.get_tensor_name_map),
    }
    try:
        vars(gguf).update(replacements)
        yield
    finally:
        vars(gguf).update(originals)
