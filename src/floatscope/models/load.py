"""A name → a `Model`: find the files, recognise the family, check everything, then read the weights.

    model = load("GSAI-ML/LLaDA-8B-Instruct")          # a hub id; a folder, a .gguf file, twin:NAME, smollm2:NAME
    model = load("folder", device="cuda", dtype="bf16")
    model = load("gpt2-diffusion", mask_id=50257)      # a causal model that was trained to denoise
    model = load("base.gguf+sibling")                  # a base with an adapter, a folder `floatscope adapt` has written

Weights go tensor by tensor from the file to the device in the dtype asked for. A missing or unexpected tensor is
refused, and no code of a checkpoint is run unless the user says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from floatscope.errors import (
    LIBRARY_ERRORS,
    UserError,
    guard_reading,
    join_names,
    name_in_errors,
    printable,
    reason,
    unknown_choice,
)
from floatscope.models import gguf, hub, remote
from floatscope.models.adapter import adapt_model, check_base, is_adapter, read_adapter
from floatscope.models.families import CAUSAL, REMOTE, Architecture, recognise
from floatscope.models.fetched import SIBLINGS, fetched, file_name, is_fetched
from floatscope.models.files import DTYPES, OPENED, Folder, fingerprint, read_config, read_folder
from floatscope.models.model import Model, ModelSpec
from floatscope.models.place import CPU, Place, check_fits, device_of, dtype_of, free_bytes, too_large
from floatscope.models.probe import probed
from floatscope.models.quiet import quiet
from floatscope.models.spec import infer
from floatscope.models.text import ModelTokenizer, open_text

NOT_OURS = (  # what a config may ask of transformers beyond the network: kernels from the hub, code, labels
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "auto_map",
    "chunk_size_feed_forward",
    "custom_generate",
    "distributed_config",
    "dtype",
    "fusion_config",
    "id2label",
    "kernel_config",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers_weights",
    "use_kernels",
    "written_by",
)
SIZES = (  # of which a network has at least one
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SCALES = ("rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")  # numbers above 0


@dataclass(frozen=True)
class Opened:
    """A checkpoint as far as it can be known without its weights."""

    folder: Folder
    family: Architecture
    empty: Any  # the transformers module on the meta device
    text: ModelTokenizer | None
    spec: ModelSpec


def load(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    mask_id: int | None = None,
    shift: bool | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Open a checkpoint. Without `device` a GPU is taken if there is one; without `dtype` the checkpoint's own on a GPU
    and float32 on a CPU. device="auto" spreads it over all GPUs. `mask_id` and `shift` overrule what the files say."""
    place, wanted = device_of(device), dtype_of(dtype)
    overrule: dict[str, Any] = {"mask_id": mask_id, "shift": shift}
    with guard_reading(name):
        base, adapter = parted(name)
        if adapter is not None:
            if mask_id is not None or shift is not None:
                raise UserError(
                    f"{printable(name)} has a mask token and a shift of its own; leave mask_id= and shift= out"
                )
            how = {"device": device, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
            model = _load_adapted(base, adapter, place, how)
            return replace(model, spec=replace(model.spec, name=str(name))) if is_fetched(name) else model
        path = as_path(name)
        if path.suffix == ".gguf":
            return _load_gguf(file_name(name, path), path, place, wanted, **overrule)
        folder, commit = locate(name, revision, trust_remote_code=trust_remote_code)
        shown = shown_name(name, folder, commit)
        if trust_remote_code and _unknown(folder):
            model = _load_remote(shown, folder, place, wanted, **overrule)
        else:
            opened = open_checkpoint(shown, folder, **overrule)
            stored = getattr(torch, opened.folder.dtype)
            module = _read(opened, place, wanted or (torch.float32 if place == CPU else stored))
            spec = replace(opened.spec, weights=opened.folder.fingerprint)
            model = _probed(Model(module, spec, opened.text), folder, place)
        return replace(model, spec=replace(model.spec, revision=commit))


def parted(name: str | Path) -> tuple[str | Path, Path | None]:
    """A name as base and adapter: `base.gguf+sibling`; a path that exists is one name, whatever it holds."""
    if str(name) in SIBLINGS:
        return SIBLINGS[str(name)], Path(str(resources("floatscope"))) / "assets" / "adapters" / str(name).partition(
            ":"
        )[0]
    cuts = [(str(name)[:i], str(name)[i + 1 :]) for i, sign in enumerate(str(name)) if sign == "+"]
    if not cuts or as_path(name).exists():
        return name, None
    there = (cut for cut in reversed(cuts) if cut[1] and is_adapter(as_path(cut[1])))  # a folder may have a + too
    base, adapter = next(there, cuts[-1])
    return base, as_path(adapter)


def weights_of(name: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The file or folder that holds the weights behind a name."""
    path = as_path(name)
    return path if path.suffix == ".gguf" else locate(name, revision, trust_remote_code=trust_remote_code)[0]


def _load_adapted(base: str | Path, folder: Path, place: Place, how: Mapping[str, Any]) -> Model:
    adapter = read_adapter(folder)
    check_base(adapter, weights_of(base, how["revision"], how["trust_remote_code"]))
    model = load(base, **how)
    with name_in_errors(folder):
        return _probed(adapt_model(model, adapter), folder, place)


def as_path(name: str | Path) -> Path:
    """What was given as a path, or a sentence about it."""
    if not isinstance(name, str | Path) or not str(name) or "\0" in str(name):
        raise UserError(
            f"{printable(repr(name))} is no name; give a checkpoint folder, a hub id (org/name), a .gguf file,"
            " twin:NAME, smollm2:NAME or BASE+ADAPTER"
        )
    if is_fetched(name):
        return fetched(name)
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # no such user
        raise UserError(f"{printable(name)} is no folder ({reason(error)}); give the path without ~") from error


def _unknown(folder: Path) -> bool:
    with name_in_errors(folder):
        return recognise(read_config(folder), None) is None


def _load_gguf(name: str, path: Path, place: Place, dtype: torch.dtype | None, **overrule: Any) -> Model:
    header = gguf.read_header(path)
    dtype = dtype or (torch.float32 if place == CPU else torch.bfloat16)
    check_fits(name, header.parameters, dtype, place)
    module, text = gguf.read(path, place, dtype)
    with name_in_errors(path):
        spec = infer(name, CAUSAL, {}, module, text, **overrule)
    return _probed(Model(module.eval(), replace(spec, weights=fingerprint(path)), text), path, place)


def _load_remote(name: str, folder: Path, place: Place, dtype: torch.dtype | None, **overrule: Any) -> Model:
    found = read_folder(folder)
    dtype = dtype or (torch.float32 if place == CPU else getattr(torch, found.dtype))
    module, text = remote.read(folder, found.config, place, dtype)
    row = REMOTE if found.config.get("mask_token_id") is None else replace(REMOTE, paradigm="mdm", shift=False)
    with name_in_errors(folder):
        spec = infer(name, row, found.config, module, text, **overrule)
    spec = replace(spec, weights=found.fingerprint, remote_code=True)
    return _probed(Model(module.eval(), spec, text), folder, place)


def _probed(model: Model, where: Path, place: Place) -> Model:
    try:
        with name_in_errors(where):
            return probed(model)
    except torch.OutOfMemoryError as error:
        parameters = sum(p.numel() for p in model.module.parameters())
        raise too_large(model.spec.name, parameters, model.dtype, place, free_bytes(place) or 0) from error


def shown_name(name: str | Path, folder: Path, commit: str | None) -> str:
    """A local folder goes by its last name: a run must not depend on where it lies."""
    return str(name) if commit or str(name).startswith("twin:") else folder.resolve().name


def locate(
    given: str | Path, revision: str | None = None, *, weights: bool = True, trust_remote_code: bool = False
) -> tuple[Path, str | None]:
    """The folder behind a name, and the commit of a hub checkpoint, fetched with its weights or without."""
    path, name = as_path(given), str(given)
    if name.startswith("twin:"):
        return _twin(name.removeprefix("twin:")), None
    if path.exists() or not hub.is_hub_id(name):
        if revision is not None:
            raise UserError(f"revision={revision!r} belongs to a hub id, and {name} is none")
        return path, None
    config = read_config(hub.fetch_config(name, revision))
    with name_in_errors(name):
        if recognise(config, None) is None and not trust_remote_code:
            raise _stranger(config)
    return hub.fetch(name, revision, weights=weights, code=trust_remote_code)


def _twin(name: str) -> Path:
    home = Path(str(resources("floatscope"))) / "assets" / "twins"
    there = sorted(p.name for p in home.iterdir() if (p / "config.json").is_file())
    if name not in there:
        raise unknown_choice("twin", name, there)
    return home / name


def open_checkpoint(
    name: str, path: Path, *, weights: bool = True, mask_id: int | None = None, shift: bool | None = None
) -> Opened:
    """Everything but the weights: family, config, tokenizer and spec, each checked against the headers of the weights,
    or without them (`weights` False: they have not been fetched)."""
    folder = read_folder(path) if weights else Folder(path, read_config(path), (), {})
    with name_in_errors(path):
        found = recognise(folder.config, folder.stored if weights else None)
        if found is None:
            raise _stranger(folder.config, folder.stored if weights else {})
        family, becomes = found
        config = _transformers(family, becomes, folder.config)
        text = open_text(path, separator=family.separator)
        empty = empty_module(becomes, config)
        if weights:
            _check_tensors(folder, family, empty)
        spec = infer(name, family, folder.config, empty, text, mask_id=mask_id, shift=shift)
    return Opened(folder, family, empty, text, spec)


def _stranger(config: dict[str, Any], stored: Mapping[str, Any] | None = None) -> UserError:
    named = join_names(list(map(str, config.get("architectures") or ["none"])))
    if recognise(config, None) is not None:  # known, but not with these tensors
        return UserError(f"its tensors are not named as those of {named} are ({join_names(stored or {}, 3)})")
    own = "auto_map" in config
    helps = "; it brings code of its own, which runs only with trust_remote_code=True" if own else ""
    return UserError(f"unknown architecture {named} (`floatscope models` lists what can be opened){helps}")


def _transformers(family: Architecture, becomes: str, config: dict[str, Any]) -> Any:
    """The config of the transformers class; nothing but the network is taken from config.json."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    words = family.config(config) if family.config else _network(config)
    words.pop("model_type", None)  # the class has its own
    try:
        with quiet():
            made = getattr(transformers, becomes).config_class.from_dict(words)
    except (StrictDataclassError, *LIBRARY_ERRORS) as error:
        raise UserError(f"its config.json does not describe a {becomes} ({reason(error)})") from error
    _check_config(made)
    return made


def _check_config(config: Any) -> None:
    """What transformers takes as it comes, and then crashes on or computes nonsense with."""
    for name in SIZES:
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise UserError(f"its config says {name} {size}, which must be at least 1")
    rope = getattr(config, "rope_parameters", None)
    scales = {name: getattr(config, name, None) for name in SCALES} | (rope if isinstance(rope, dict) else {})
    for name in SCALES:
        scale = scales[name]
        if scale is not None and not (type(scale) in (int, float) and math.isfinite(scale) and scale > 0):
            raise UserError(f"its config says {name} {printable(repr(scale))}, which must be a number above 0")
    pad, rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and pad >= rows:
        raise UserError(f"its config says pad_token_id {pad}, and its token ids are 0 … {rows - 1}")
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "absolute"):
        raise UserError(f"its config says position_embedding_type {printable(kind)}, which transformers 5 leaves out")


def _network(config: dict[str, Any]) -> dict[str, Any]:
    """What describes the network, at every depth."""
    kept = {k: v for k, v in config.items() if k not in NOT_OURS}
    return {k: _network(v) if isinstance(v, dict) else v for k, v in kept.items()}


def empty_module(becomes: str, config: Any) -> nn.Module:
    """The module without weights: names and shapes, no memory."""
    import transformers

    try:
        with quiet(), torch.device("meta"):
            empty: nn.Module = getattr(transformers, becomes)(config)
    except LIBRARY_ERRORS as error:
        raise UserError(f"its config.json does not describe a {becomes} ({reason(error)})") from error
    return empty


def _check_tensors(folder: Folder, family: Architecture, empty: nn.Module) -> None:
    """Nothing missing, nothing unexpected, every shape as the config has it; before any weight is read.

    A class of transformers may rename and merge tensors while it loads, so what does not fit here is refused only
    where we know the names ourselves, or where more weights are wanted than are stored; `_read` sees the rest.
    """
    tied = set(getattr(empty, "all_tied_weights_keys", {}))
    wanted = empty.state_dict()
    places = _places(folder, family, empty)
    stored = {place: folder.stored[key] for key, place in places.items()}
    taken = Counter(places.values())
    _refuse((), {key for key, place in places.items() if key == place and taken[place] > 1})
    missing, extra = wanted.keys() - stored.keys() - tied, stored.keys() - wanted.keys()
    needed = sum(t.numel() for k, t in wanted.items() if k not in tied)
    if family.config or needed > sum(s.size for s in stored.values()):
        _refuse(missing, extra)
    for key, found in stored.items():
        here = wanted.get(key)
        if here is not None and found.shape != tuple(here.shape):
            raise UserError(f"its tensor {key} is {found.shape}, and its config.json asks for {tuple(here.shape)}")
        is_weight = key.endswith(".weight") if here is None else here.is_floating_point()
        if is_weight and found.dtype not in DTYPES:
            raise UserError(f"its tensor {printable(key)} is stored as {found.dtype}; {OPENED}")


def _places(folder: Folder, family: Architecture, empty: nn.Module) -> dict[str, str]:
    """A stored tensor's key → its name in the module."""
    wanted = empty.state_dict().keys()
    base = getattr(empty, "base_model_prefix", "")  # GPT-2's files leave it out
    renamed = {k: family.rename(k) for k in folder.stored if not re.fullmatch(family.spare, k)}
    return {k: f"{base}.{n}" if n not in wanted and f"{base}.{n}" in wanted else n for k, n in renamed.items()}


def _refuse(missing: Collection[str], extra: Collection[str]) -> None:
    if missing or extra:
        raise UserError(f"missing tensors: {join_names(missing)}; unexpected tensors: {join_names(extra)}")


def _check_ties(opened: Opened, stored: Mapping[str, Any]) -> None:
    """Weights the config calls one and the same may be stored twice, but not differ."""
    at = {place: key for key, place in _places(opened.folder, opened.family, opened.empty).items()}
    for one, other in getattr(opened.empty, "all_tied_weights_keys", {}).items():
        if one in at and other in at and not torch.equal(stored[at[one]][...], stored[at[other]][...]):
            raise UserError(
                f"its config.json ties {one} to {other}, and both are stored and differ; say there which is meant"
                " (tie_word_embeddings, weight_tying)"
            )


def _read(opened: Opened, place: Place, dtype: torch.dtype) -> nn.Module:
    """The weights, one by one from the file to where they belong."""
    folder, family = opened.folder, opened.family
    check_fits(opened.spec.name, folder.parameters, dtype, place)
    try:
        with quiet(), folder.tensors() as stored, name_in_errors(folder.path):
            _check_ties(opened, stored)
            lazy = {family.rename(k): t for k, t in stored.items() if not re.fullmatch(family.spare, k)}
            module, info = type(opened.empty).from_pretrained(
                None,
                config=opened.empty.config,
                state_dict=lazy,
                dtype=dtype,
                device_map=place if isinstance(place, str) else {"": place},
                attn_implementation=opened.empty.config._attn_implementation,  # transformers' choice, not the file's
                output_loading_info=True,
            )
            _refuse(info["missing_keys"], info["unexpected_keys"])
            for key, there, asked in info["mismatched_keys"]:
                raise UserError(f"its tensor {key} is {tuple(there)}, and its config.json asks for {tuple(asked)}")
    except torch.OutOfMemoryError as error:
        raise too_large(opened.spec.name, folder.parameters, dtype, place, free_bytes(place) or 0) from error
    except SafetensorError as error:
        raise UserError(f"{folder.path} is damaged ({reason(error)}); fetch it again") from error
    if place == "auto" and any(p.device.type != "cuda" for p in module.parameters()):  # the rest was left on the host
        raise too_large(opened.spec.name, folder.parameters, dtype, place, free_bytes(place) or 0)
    done: nn.Module = module.eval()
    return done
