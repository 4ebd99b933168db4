"""`load`: from the name of a checkpoint to a `Model`.

    model = load("GSAI-ML/LLaDA-8B-Instruct")          # a hub id; or a folder, a .gguf file, twin:NAME, smollm2:NAME
    model = load("folder", device="cuda", dtype="bf16")
    model = load("gpt2-diffusion", mask_id=50257)      # a causal model that was trained to denoise
    model = load("Qwen3-bd3lm", block_size=32)         # a model that attends block-causally; most configs say so
    model = load("base.gguf+sibling")                  # a base with an adapter that `floatscope adapt` wrote

Everything is checked before the weights are read. Weights go tensor by tensor from the file to the device, in the
chosen dtype. Missing and unexpected tensors are refused, and a checkpoint's own code runs only if the user allows it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from floatscope.compat import read_in_order
from floatscope.errors import UserError, explain_read_errors, name_in_errors, printable, summarize_error
from floatscope.files.digests import fingerprint
from floatscope.models import gguf, remote_code
from floatscope.models.adapter import adapt_model, check_base, read_adapter
from floatscope.models.architectures import CAUSAL, REMOTE_CODE, find_architecture
from floatscope.models.bases import is_base_name
from floatscope.models.capabilities import check_forward, detect_capabilities
from floatscope.models.checkpoint import DOWNLOAD_AGAIN, read_checkpoint, read_config
from floatscope.models.device import (
    CPU,
    Device,
    check_memory,
    free_memory,
    memory_error,
    resolve_device,
    resolve_dtype,
)
from floatscope.models.limited_process import DEFAULT_LIMITS, Limits
from floatscope.models.model import Model
from floatscope.models.names import display_name, find_checkpoint, find_weights, resolve_path, split_adapter
from floatscope.models.prepared_checkpoint import PreparedCheckpoint, check_keys, module_keys, prepare_checkpoint
from floatscope.models.silence import silence_libraries
from floatscope.models.spec import infer_spec
from floatscope.models.untrusted import check_untrusted, is_shipped
from floatscope.schema import Paradigm

logger = logging.getLogger(__name__)


def load(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    mask_id: int | None = None,
    shift: bool | None = None,
    block_size: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Open a checkpoint.

    Args:
        name: a folder, a hub id (org/name), a .gguf file, twin:NAME, smollm2:NAME, or BASE+ADAPTER.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto" to spread the model over all GPUs. Default: a GPU if there is
            one.
        dtype: such as "bf16" or torch.float32. Default: float32 on a CPU, otherwise the checkpoint's own.
        mask_id: the id of the mask token, if the files do not say it or are wrong. It makes any model an MDM.
        shift: whether the logits at row p predict position p + 1 instead of p; overrides the architecture's default.
        block_size: the size of the blocks of a model that attends block-causally, if the files do not say it or are
            wrong. It makes any MDM block-causal.
        revision: a branch, tag or commit on the hub.
        trust_remote_code: run the checkpoint's own code if no row of the architecture table opens it.

    Returns:
        A `Model` in evaluation mode.

    Raises:
        UserError: if the checkpoint is missing, damaged or not supported, or does not fit into memory.

    Example:
        model = fs.load("twin:mdm", device="cpu")
        model.spec.paradigm, model.spec.mask_id  # ('mdm', 4095)
    """
    target, chosen_dtype = resolve_device(device), resolve_dtype(dtype)
    overrides: dict[str, Any] = {"mask_id": mask_id, "shift": shift, "block_size": block_size}
    with explain_read_errors(name):
        base, adapter = split_adapter(name)
        if adapter is not None:
            if any(value is not None for value in overrides.values()):
                raise UserError(
                    f"the adapter of {printable(name)} sets the mask token and the shift, and has no blocks; leave out"
                    " mask_id=, shift= and block_size="
                )
            options = {"device": device, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
            model = _load_adapted(base, adapter, target, options)
            model = replace(model, spec=replace(model.spec, name=str(name))) if is_base_name(name) else model
        elif (path := resolve_path(name)).suffix == ".gguf":
            model = _load_gguf(display_name(name, path), path, target, chosen_dtype, overrides)
        else:
            model = _load_folder(name, revision, trust_remote_code, target, chosen_dtype, overrides)
    spec = model.spec
    kind = f"architecture {spec.architecture}, paradigm {spec.paradigm}"
    logger.info("opened %s: %s, %s on %s, weights %s", spec.name, kind, model.dtype, model.device, spec.weights)
    return model


def _load_folder(
    name: str | Path,
    revision: str | None,
    trust_remote_code: bool,
    device: Device,
    dtype: torch.dtype | None,
    overrides: Mapping[str, Any],
) -> Model:
    folder, commit = find_checkpoint(name, revision, trust_remote_code=trust_remote_code)
    shown = display_name(name, folder, commit)
    if trust_remote_code and not _is_known(folder):
        model = _load_remote_code(shown, folder, device, dtype, overrides)
    else:
        prepared = prepare_checkpoint(shown, folder, **overrides)
        stored_dtype = getattr(torch, prepared.checkpoint.dtype)
        module = _load_weights(prepared, device, dtype or (torch.float32 if device == CPU else stored_dtype))
        spec = replace(prepared.spec, weights=prepared.checkpoint.fingerprint)
        model = _check_model(Model(module, spec, prepared.tokenizer), folder, device)
    return replace(model, spec=replace(model.spec, revision=commit))


def _load_adapted(base: str | Path, folder: Path, device: Device, options: Mapping[str, Any]) -> Model:
    adapter = read_adapter(folder)
    check_base(adapter, find_weights(base, options["revision"], options["trust_remote_code"]))
    model = load(base, **options)
    with name_in_errors(folder):
        return _check_runs(adapt_model(model, adapter), folder, device)


def _is_known(folder: Path) -> bool:
    with name_in_errors(folder):
        return find_architecture(read_config(folder), None) is not None


def _load_gguf(name: str, path: Path, device: Device, dtype: torch.dtype | None, overrides: Mapping[str, Any]) -> Model:
    header = gguf.read_header(path)
    dtype = dtype or (torch.float32 if device == CPU else torch.bfloat16)
    check_memory(name, header.parameters, dtype, device)
    gguf.check_network(path, header)
    module, tokenizer = gguf.read_model(path, device, dtype)
    with name_in_errors(path):
        spec = infer_spec(name, CAUSAL, {}, module, tokenizer, **overrides)
    return _check_model(Model(module.eval(), replace(spec, weights=fingerprint(path)), tokenizer), path, device)


def _load_remote_code(
    name: str, folder: Path, device: Device, dtype: torch.dtype | None, overrides: Mapping[str, Any]
) -> Model:
    checkpoint = read_checkpoint(folder)
    dtype = dtype or (torch.float32 if device == CPU else getattr(torch, checkpoint.dtype))
    module, tokenizer = remote_code.read_model(folder, checkpoint.config, device, dtype)
    has_mask = checkpoint.config.get("mask_token_id") is not None
    row = replace(REMOTE_CODE, paradigm=Paradigm.MDM, shift=False) if has_mask else REMOTE_CODE
    with name_in_errors(folder):
        spec = infer_spec(name, row, checkpoint.config, module, tokenizer, **overrides)
    spec = replace(spec, weights=checkpoint.fingerprint, uses_remote_code=True)
    return _check_model(Model(module.eval(), spec, tokenizer), folder, device)


def _check_model(model: Model, path: Path, device: Device) -> Model:
    for name, weights in model.module.named_parameters():
        if weights.is_floating_point() and weights.numel():
            lowest, highest = weights.detach().aminmax()  # NaN if a weight is NaN
            if not bool(lowest.isfinite() & highest.isfinite()):
                raise UserError(
                    f"{path}: its tensor {name} contains NaN or infinity in {str(model.dtype).removeprefix('torch.')};"
                    f" {DOWNLOAD_AGAIN}, or open it with dtype='float32'"
                )
    if device == CPU and not model.spec.uses_remote_code and not is_shipped(path):
        _check_forward_limits(model, path)
    return _check_runs(model, path, device)


def _check_forward_limits(model: Model, path: Path) -> None:
    """Refuse a config that makes four tokens cost too much, such as one that pads a text to 10^9 positions."""

    def run() -> None:
        with name_in_errors(path):
            check_forward(model)

    sizes = [p.numel() * p.itemsize for p in model.module.parameters()]
    seconds = DEFAULT_LIMITS.seconds + sum(sizes) / 2e8  # one thread reads the weights once
    limits = Limits(seconds, DEFAULT_LIMITS.memory + 8 * max(sizes))  # some kernels copy a weight matrix
    file = path / "config.json" if path.is_dir() else path
    check_untrusted(file, run, f"forward {model.spec.paradigm} {model.dtype} {model.spec.weights}", limits)


def _check_runs(model: Model, path: Path, device: Device) -> Model:
    try:
        with name_in_errors(path):
            return detect_capabilities(model)
    except torch.OutOfMemoryError as error:
        parameters = sum(p.numel() for p in model.module.parameters())
        raise memory_error(model.spec.name, parameters, model.dtype, device, free_memory(device) or 0) from error


def _load_weights(prepared: PreparedCheckpoint, device: Device, dtype: torch.dtype) -> nn.Module:
    """Read the weights tensor by tensor from the files to the device."""
    checkpoint, architecture, empty_module = prepared.checkpoint, prepared.architecture, prepared.empty_module
    check_memory(prepared.spec.name, checkpoint.parameters, dtype, device)
    try:
        with silence_libraries(), checkpoint.open_tensors() as tensors, name_in_errors(checkpoint.path):
            _check_ties(prepared, tensors)
            state_dict = {
                architecture.rename_key(k): t
                for k, t in tensors.items()
                if not re.fullmatch(architecture.ignored_keys, k)
            }
            with read_in_order() if architecture.has_experts else nullcontext():
                module, info = type(empty_module).from_pretrained(
                    None,
                    config=empty_module.config,
                    state_dict=state_dict,
                    dtype=dtype,
                    device_map=device if isinstance(device, str) else {"": device},
                    attn_implementation=empty_module.config._attn_implementation,  # transformers' choice, not a file's
                    output_loading_info=True,
                )
            check_keys(info["missing_keys"], info["unexpected_keys"])
            for key, stored, needed in info["mismatched_keys"]:
                raise UserError(f"its tensor {key} is {tuple(stored)}, but its config.json needs {tuple(needed)}")
    except torch.OutOfMemoryError as error:
        free = free_memory(device) or 0
        raise memory_error(prepared.spec.name, checkpoint.parameters, dtype, device, free) from error
    except SafetensorError as error:
        raise UserError(f"{checkpoint.path} is damaged ({summarize_error(error)}); {DOWNLOAD_AGAIN}") from error
    if device == "auto" and any(p.device.type != "cuda" for p in module.parameters()):  # the rest stayed on the host
        raise memory_error(prepared.spec.name, checkpoint.parameters, dtype, device, free_memory(device) or 0)
    loaded: nn.Module = module.eval()
    return loaded


def _check_ties(prepared: PreparedCheckpoint, tensors: Mapping[str, Any]) -> None:
    """Check that weights which the config ties are equal if they are stored twice."""
    names = module_keys(prepared.checkpoint, prepared.architecture, prepared.empty_module)
    stored = {name: key for key, name in names.items()}
    for one, other in getattr(prepared.empty_module, "all_tied_weights_keys", {}).items():
        if one not in stored or other not in stored:
            continue
        if not torch.equal(tensors[stored[one]][...], tensors[stored[other]][...]):
            raise UserError(
                f"its config.json ties {one} to {other}, but both are stored and differ; correct the config"
                " (tie_word_embeddings, weight_tying)"
            )
