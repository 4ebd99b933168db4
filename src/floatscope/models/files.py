"""A checkpoint folder on disk: its config and the headers of its safetensors, read and checked before any weight is.

    found = read_folder("LLaDA-8B-Instruct")
    found.config["architectures"], found.stored["lm_head.weight"].shape, found.fingerprint

What a folder says is not believed: an index may not lead out of the folder, a shard must hold what the index says,
pickles are refused, and whatever is damaged or missing is named.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from floatscope.errors import UserError, printable, reason

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"}
BLOCK, BLOCKS = 64 * 1024, 64  # of a weight file's fingerprint


@dataclass(frozen=True)
class Stored:
    """One tensor as a header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: "BF16", "F32", …

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Folder:
    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    stored: dict[str, Stored]

    @property
    def parameters(self) -> int:
        return sum(s.size for s in self.stored.values())

    @property
    def dtype(self) -> str:
        """The dtype most of the weights have, in torch's words."""
        sizes: dict[str, int] = {}
        for s in self.stored.values():
            sizes[s.dtype] = sizes.get(s.dtype, 0) + s.size
        most = max(sizes, key=sizes.__getitem__)
        if most not in DTYPES:
            raise UserError(f"{self.path} holds {most} weights; {OPENED}")
        return DTYPES[most]

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.path / "config.json", *self.files)

    @contextmanager
    def tensors(self) -> Iterator[dict[str, Any]]:
        """The weights by key, each read when it is indexed: `lazy[...]`."""
        with ExitStack() as stack:
            lazy: dict[str, Any] = {}
            for file in self.files:
                opened = stack.enter_context(safe_open(file, "pt"))
                lazy.update((key, opened.get_slice(key)) for key in opened.keys())  # noqa: SIM118
            yield lazy


DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
OPENED = "float32, bfloat16, float16 and float64 can be opened"


def fingerprint(*files: Path) -> str:
    """sha256 over each file's name, size and 64 evenly spaced blocks of 64 KiB (a small file whole), of safetensors the
    header too: another checkpoint has another one, at a cost that does not grow with the weights. A change between
    the blocks goes unseen."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            digest.update(f"{file.name} {size}\n".encode())
            if size <= BLOCK * BLOCKS:
                digest.update(handle.read())
                continue
            if file.suffix == ".safetensors":
                digest.update(handle.read(int.from_bytes(handle.read(8), "little")))
            for i in range(BLOCKS):
                handle.seek((size - BLOCK) * i // (BLOCKS - 1))
                digest.update(handle.read(BLOCK))
    return digest.hexdigest()


def read_folder(path: Path) -> Folder:
    """Config and headers of a checkpoint folder, checked against each other."""
    config = read_config(path)
    files, where = _files(path)
    stored: dict[str, Stored] = {}
    for file in files:
        for key, tensor in _header(file).items():
            if key in stored:
                both = f"{stored[key].file} and {file}"
                raise UserError(f"{printable(key)} is in both {both}; fetch the checkpoint again")
            stored[key] = tensor
    for key, name in where.items():
        if key not in stored or stored[key].file.name != name:
            said = f"says that {printable(key)} is in {name}, and it is not"
            raise UserError(f"{path / INDEX} {said}; fetch both again")
    if not stored:
        raise UserError(f"{files[0]} holds no tensors; fetch it again")
    for name in LAYERS & config.keys():
        if isinstance(config[name], int) and config[name] > len(stored):
            raise UserError(
                f"{path / 'config.json'} asks for {config[name]} layers, and there are {len(stored)} tensors"
            )
    return Folder(path, config, files, stored)


def read_config(path: Path) -> dict[str, Any]:
    """config.json, which must be there and be an object."""
    if not path.is_dir():
        raise UserError(
            f"{path} is no folder; give a checkpoint folder, a hub id (org/name), a .gguf file, twin:NAME or"
            " smollm2:NAME"
        )
    if (path / "adapter.json").is_file():
        raise UserError(f"{path} is an adapter; open it with its base: BASE+{path}")
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json; give a checkpoint folder")
    config = read_json(path / "config.json")
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = printable(quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else quantised)
        raise UserError(f"{path} is quantised ({method}), which is not offered; take the unquantised checkpoint")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a sentence that names the file."""
    try:
        read = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UserError(f"{path} is damaged ({reason(error)}); fetch it again") from error
    if not isinstance(read, dict):
        raise UserError(f"{path} is damaged (it holds no JSON object); fetch it again")
    return read


def _files(path: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The weight files, and what the index says of them."""
    if (path / INDEX).is_file():
        where = read_json(path / INDEX).get("weight_map")
        if not isinstance(where, dict) or not where or not all(isinstance(n, str) for n in where.values()):
            raise UserError(f"{path / INDEX} is damaged (no weight_map of file names); fetch it again")
        names = tuple(dict.fromkeys(where.values()))
        for name in names:
            if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name) or not name.endswith(".safetensors"):
                raise UserError(f"{path / INDEX} points to {name!r}; only .safetensors files beside it are read")
            if not (path / name).is_file():
                raise UserError(f"{path} lacks its shard {name}; fetch it again")
        return tuple(path / name for name in names), where
    if (path / WHOLE).is_file():
        return (path / WHOLE,), {}
    pickles = sorted(p.name for pattern in PICKLES for p in path.glob(pattern))
    if pickles:
        raise UserError(
            f"{path} holds pickled weights ({pickles[0]}), and reading a pickle runs the code in it; convert them to"
            " safetensors where you trust them (save_pretrained writes them)"
        )
    raise UserError(f"{path} has neither {WHOLE} nor {INDEX}; give a checkpoint folder with its weights")


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, "pt") as opened:
            slices = ((key, opened.get_slice(key)) for key in opened.keys())  # noqa: SIM118
            return {key: Stored(file, tuple(s.get_shape()), s.get_dtype()) for key, s in slices}
    except PermissionError:
        raise  # nothing is wrong with the file itself
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({reason(error)}); fetch it again") from error
