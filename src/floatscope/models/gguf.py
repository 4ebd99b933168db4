"""A .gguf file → a module and its tokenizer, through transformers, which unpacks the weights.

    header = read_header(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
    header.architecture, header.parameters                            # "llama", 134515008
    module, text = read(path, torch.device("cpu"), torch.float32)     # needs the extra `gguf`

LLaDA and Dream files of this kind exist for llama.cpp; transformers does not know them, so they are refused by name.
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

from floatscope.errors import LIBRARY_ERRORS, UserError, is_rust_error, join_names, printable, reason
from floatscope.models.quiet import quiet
from floatscope.models.text import ModelTokenizer, check_text

REFUSED = {"llada": "LLaDA", "llada-moe": "LLaDA-MoE", "llada2": "LLaDA2", "dream": "Dream", "rnd1": "RND1"}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
COUNTS = ("block_count", "context_length", "embedding_length", "attention.head_count")


@dataclass(frozen=True)
class Header:
    """What the file says of itself; of its lists only the length is kept."""

    values: dict[str, Any]
    tensors: int
    parameters: int

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def get(self, name: str) -> Any:
        """A value of the architecture: `get("block_count")`."""
        return self.values.get(f"{self.architecture}.{name}")


def read_header(path: Path) -> Header:
    """The header alone, whatever the size of the file; a family that cannot be opened is refused here."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        with path.open("rb") as file:
            header = _parse(file)
    except (struct.error, UnicodeDecodeError, MemoryError, OverflowError, RecursionError, ValueError) as error:
        raise UserError(f"{path} is no GGUF file, or damaged ({reason(error)}); fetch it again") from error
    if header.architecture in REFUSED:
        raise UserError(
            f"{path} is a {REFUSED[header.architecture]} GGUF ({header.architecture}), which transformers cannot read;"
            " take the safetensors checkpoint"
        )
    for name in COUNTS:
        count = header.get(name)
        if count is not None and not (type(count) is int and count > 0):
            raise UserError(f"{path} is damaged ({name} {printable(repr(count))} is no number above 0); fetch it again")
    if (header.get("block_count") or 0) > header.tensors:
        raise UserError(f"{path} asks for {header.get('block_count')} layers, and there are {header.tensors} tensors")
    return header


def read(path: Path, place: str | torch.device, dtype: torch.dtype) -> tuple[nn.Module, ModelTokenizer]:
    """Module and tokenizer; every weight unpacked to `dtype`."""
    from transformers import AutoModelForCausalLM, GgufConfig

    with _alone(path) as where:
        module, info = AutoModelForCausalLM.from_pretrained(
            dtype=dtype,
            device_map=place if isinstance(place, str) else {"": place},
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **where,
        )
    bad = {*info["missing_keys"], *info["unexpected_keys"]}
    if bad:
        raise UserError(f"{path}: tensors missing or unexpected: {join_names(bad)}")
    return module, read_text(path)


def read_config(path: Path) -> Any:
    """The config of the transformers class that opens it."""
    from transformers import AutoConfig

    with _alone(path) as where:
        return AutoConfig.from_pretrained(**where)


def read_text(path: Path) -> ModelTokenizer:
    from transformers import AutoTokenizer

    with _alone(path) as where:
        text = ModelTokenizer(AutoTokenizer.from_pretrained(**where), path.name)
    check_text(text, path)
    return text


def class_of(config: Any) -> str:
    """The causal language model a config describes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if config.model_type not in NAMES:
        raise UserError(f"transformers has no causal language model for {printable(config.model_type)}")
    return str(NAMES[config.model_type])


@contextmanager
def _alone(path: Path) -> Iterator[dict[str, Any]]:
    """How transformers finds the file, with nothing beside it: the files of another model are none of its."""
    from huggingface_hub.errors import StrictDataclassError

    if find_spec("gguf") is None:
        raise UserError(f"{path} needs the package gguf; install it with pip install 'floatscope[gguf]'")
    with TemporaryDirectory() as folder, quiet(), redirect_stderr(StringIO()):  # its progress bar asks nobody
        (Path(folder) / path.name).symlink_to(path.resolve())
        where = {"pretrained_model_name_or_path": folder, "gguf_file": path.name}
        try:
            yield {**where, "local_files_only": True, "trust_remote_code": False}
        except torch.OutOfMemoryError:
            raise
        except BaseException as error:
            if is_rust_error(error) or isinstance(error, (StrictDataclassError, OSError, *LIBRARY_ERRORS)):
                why = reason(error).replace(folder, str(path.parent))
                raise UserError(f"{path} cannot be opened by transformers ({why})") from error
            raise


def _parse(file: BinaryIO) -> Header:
    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version, tensors, values = _take(file, "I"), _take(file, "Q"), _take(file, "Q")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    found = {}
    for _ in range(values):
        name = _string(file)
        found[name] = _value(file, _take(file, "I"))
    parameters, last = 0, 0
    for _ in range(tensors):
        _string(file)
        parameters += prod(_take(file, "Q") for _ in range(_take(file, "I")))
        _take(file, "I")  # its type
        last = max(last, _take(file, "Q"))
    end = file.tell() + last
    if tensors and file.seek(0, 2) <= end:
        raise ValueError("it ends before its last tensor")
    return Header(found, tensors, parameters)


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        inner, count = _take(file, "I"), _take(file, "Q")
        if inner in SCALARS:
            _read(file, count * struct.calcsize("<" + SCALARS[inner]))
        else:
            for _ in range(count):
                _value(file, inner)
        return count
    if kind not in SCALARS:
        raise ValueError(f"value of kind {kind}")
    return _take(file, SCALARS[kind])


def _string(file: BinaryIO) -> str:
    return _read(file, _take(file, "Q")).decode()


def _take(file: BinaryIO, form: str) -> Any:
    return struct.unpack("<" + form, _read(file, struct.calcsize("<" + form)))[0]


def _read(file: BinaryIO, count: int) -> bytes:
    read = file.read(count) if count <= 1 << 30 else b""
    if len(read) != count:
        raise ValueError("it ends in its header")
    return read
