""".gguf files, opened by transformers, which unpacks the weights.

    header = read_header(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
    header.architecture, header.parameters                                   # "llama", 134515008
    module, tokenizer = read_model(path, torch.device("cpu"), torch.float32)     # needs the extra `gguf`

LLaDA and Dream files of this kind exist for llama.cpp; transformers cannot read them, so they are refused by name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
from torch import nn

from floatscope.compat import read_gguf_once
from floatscope.errors import (
    LIBRARY_ERRORS,
    UserError,
    is_rust_error,
    join_names,
    name_in_errors,
    printable,
    summarize_error,
)
from floatscope.files.digests import fingerprint
from floatscope.models.checkpoint import DOWNLOAD_AGAIN
from floatscope.models.limited_process import limits_for
from floatscope.models.limited_tokenizer import LimitedTokenizer
from floatscope.models.prepared_checkpoint import build_empty_module
from floatscope.models.silence import silence_libraries
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.models.tokenizer_files import check_tokenizer
from floatscope.models.untrusted import check_untrusted, is_shipped

REFUSED = {"llada": "LLaDA", "llada-moe": "LLaDA-MoE", "llada2": "LLaDA2", "dream": "Dream", "rnd1": "RND1"}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_WEIGHTS_PER_BYTE = 8  # the smallest type has 1.56 bits per weight
COUNTS = ("block_count", "context_length", "embedding_length", "attention.head_count")


@dataclass(frozen=True)
class Header:
    """The metadata of a file, with arrays reduced to their lengths, and the number and sizes of its tensors."""

    metadata: dict[str, Any]
    tensors: int
    parameters: int
    size: int  # bytes before the tensors

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata.get("general.architecture"))

    def get(self, name: str) -> Any:
        """Return a setting of the architecture: `get("block_count")`."""
        return self.metadata.get(f"{self.architecture}.{name}")


def read_header(path: Path) -> Header:
    """Read the header alone, and refuse an architecture that transformers cannot read."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the path of a .gguf file")
    if not is_shipped(path):
        check_untrusted(path, lambda: _open_header(path), f"header {fingerprint(path)}")
    header = _open_header(path)
    if header.architecture in REFUSED:
        raise UserError(
            f"{path} is a {REFUSED[header.architecture]} GGUF ({header.architecture}), which transformers cannot read;"
            " use the safetensors checkpoint"
        )
    for name in COUNTS:
        count = header.get(name)
        if count is not None and not (type(count) is int and count > 0):
            raise UserError(
                f"{path} is damaged ({name} {printable(repr(count))} is not a number above 0); {DOWNLOAD_AGAIN}"
            )
    if (header.get("block_count") or 0) > header.tensors:
        raise UserError(f"{path} has {header.get('block_count')} layers, but there are {header.tensors} tensors")
    return header


def check_network(path: Path, header: Header) -> None:
    """Refuse metadata that describe a network which is too large to build, or which the tensors do not fill."""

    def check() -> None:
        config = read_config(path)
        with name_in_errors(path):
            check_size(header, build_empty_module(causal_class(config), config))

    if not is_shipped(path):
        from transformers import GenerationMixin, PreTrainedModel  # noqa: F401  (here once, and not in every child)

        check_untrusted(path, check, f"network {fingerprint(path)}", limits_for(header.size, 10.0))


def check_size(header: Header, module: nn.Module) -> None:
    """Check that the file holds as many weights as a module needs."""
    tied = set(getattr(module, "all_tied_weights_keys", {}))
    needed = sum(t.numel() for k, t in module.named_parameters() if k not in tied)
    if needed > header.parameters:
        raise UserError(f"tensors are missing: {needed:,} weights are needed, but it holds {header.parameters:,}")


def read_model(path: Path, device: str | torch.device, dtype: torch.dtype) -> tuple[nn.Module, ModelTokenizer]:
    """Return the module and the tokenizer; every weight is unpacked to `dtype`."""
    from transformers import AutoModelForCausalLM, GgufConfig

    with _isolate(path) as location, read_gguf_once():
        module, info = AutoModelForCausalLM.from_pretrained(
            dtype=dtype,
            device_map=device if isinstance(device, str) else {"": device},
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **location,
        )
        tokenizer = read_tokenizer(path)
    wrong_keys = {*info["missing_keys"], *info["unexpected_keys"]}
    if wrong_keys:
        raise UserError(f"{path}: tensors missing or unexpected: {join_names(wrong_keys)}")
    return module, tokenizer


def read_config(path: Path) -> Any:
    """Return the config of the transformers class that opens the file."""
    from transformers import AutoConfig

    with _isolate(path) as location:
        return AutoConfig.from_pretrained(**location)


def read_tokenizer(path: Path) -> ModelTokenizer:
    """Return the tokenizer in the file, checked."""
    from transformers import AutoTokenizer

    tokenizer_class = ModelTokenizer if is_shipped(path) else LimitedTokenizer
    with _isolate(path) as location:
        tokenizer = tokenizer_class(AutoTokenizer.from_pretrained(**location), path.name)
    check_tokenizer(tokenizer, path)
    return tokenizer


def causal_class(config: Any) -> str:
    """Return the name of the causal language model that a config describes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if config.model_type not in NAMES:
        raise UserError(f"transformers has no causal language model for {printable(config.model_type)}")
    return str(NAMES[config.model_type])


@contextmanager
def _isolate(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which transformers opens the file in a folder of its own, away from other models' files.

    An error of transformers inside the block becomes a `UserError`.
    """
    from huggingface_hub.errors import StrictDataclassError

    if find_spec("gguf") is None:
        raise UserError(f"{path} needs the package gguf; install it with pip install 'floatscope[gguf]'")
    with TemporaryDirectory() as folder, silence_libraries(), redirect_stderr(StringIO()):  # its progress bar
        (Path(folder) / path.name).symlink_to(path.resolve())
        location = {"pretrained_model_name_or_path": folder, "gguf_file": path.name}
        try:
            yield {**location, "local_files_only": True, "trust_remote_code": False}
        except torch.OutOfMemoryError:
            raise
        except BaseException as error:
            if is_rust_error(error) or isinstance(error, (StrictDataclassError, OSError, *LIBRARY_ERRORS)):
                why = summarize_error(error).replace(folder, str(path.parent))
                raise UserError(f"{path} cannot be opened by transformers ({why})") from error
            raise


def _open_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            return _parse_header(file)
    except (struct.error, UnicodeDecodeError, OverflowError, RecursionError, ValueError) as error:
        raise UserError(
            f"{path} is not a GGUF file, or it is damaged ({summarize_error(error)}); {DOWNLOAD_AGAIN}"
        ) from error


def _parse_header(file: BinaryIO) -> Header:
    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version, tensors, entries = _read_scalar(file, "I"), _read_scalar(file, "Q"), _read_scalar(file, "Q")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    metadata = {}
    for _ in range(entries):
        name = _read_string(file)
        metadata[name] = _read_value(file, _read_scalar(file, "I"))
    parameters, last_offset = 0, 0
    for _ in range(tensors):
        _read_string(file)
        parameters += prod(_read_scalar(file, "Q") for _ in range(_read_scalar(file, "I")))
        _read_scalar(file, "I")  # its type
        last_offset = max(last_offset, _read_scalar(file, "Q"))
    size, end = file.tell(), file.seek(0, 2)
    if tensors and (end <= size + last_offset or parameters > MAX_WEIGHTS_PER_BYTE * (end - size)):
        raise ValueError("it ends before its last tensor")
    return Header(metadata, tensors, parameters, size)


def _read_value(file: BinaryIO, kind: int) -> Any:
    """Read a value; of an array, return only the length."""
    if kind == STRING:
        return _read_string(file)
    if kind == ARRAY:
        item_kind, count = _read_scalar(file, "I"), _read_scalar(file, "Q")
        if item_kind in SCALARS:
            _read_bytes(file, count * struct.calcsize("<" + SCALARS[item_kind]))
        else:
            for _ in range(count):
                _read_value(file, item_kind)
        return count
    if kind not in SCALARS:
        raise ValueError(f"value of kind {kind}")
    return _read_scalar(file, SCALARS[kind])


def _read_string(file: BinaryIO) -> str:
    return _read_bytes(file, _read_scalar(file, "Q")).decode()


def _read_scalar(file: BinaryIO, format_: str) -> Any:
    return struct.unpack("<" + format_, _read_bytes(file, struct.calcsize("<" + format_)))[0]


def _read_bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(count) if count <= 1 << 30 else b""
    if len(data) != count:
        raise ValueError("it ends in its header")
    return data
