"""A checkpoint folder on disk: its config and the headers of its safetensors, checked before any weight is read.

    checkpoint = read_checkpoint(Path("LLaDA-8B-Instruct"))
    checkpoint.config["architectures"], checkpoint.tensors["lm_head.weight"].shape, checkpoint.fingerprint

Nothing in the folder is trusted: an index may not point outside the folder, a shard must contain what the index says,
pickles are refused, and an error names what is damaged or missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from floatscope.errors import UserError, printable, summarize_error
from floatscope.files.digests import fingerprint
from floatscope.files.json_files import read_json

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LAYER_COUNTS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"}
TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SUPPORTED_DTYPES = "supported are float32, bfloat16, float16 and float64"
DOWNLOAD_AGAIN = "download it again"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the header of its file describes it, or some rows of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: "BF16", "F32", …
    rows_of: str = ""  # the tensor of the file that these rows belong to; "": a whole tensor
    first_row: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder: its config.json and the headers of its tensors."""

    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]

    @property
    def parameters(self) -> int:
        """The number of stored weights."""
        return sum(t.size for t in self.tensors.values())

    @property
    def dtype(self) -> str:
        """The dtype of most weights, by torch's name."""
        sizes: dict[str, int] = {}
        for t in self.tensors.values():
            sizes[t.dtype] = sizes.get(t.dtype, 0) + t.size
        largest = max(sizes, key=sizes.__getitem__)
        if largest not in TORCH_DTYPES:
            raise UserError(f"{self.path} holds {largest} weights; {SUPPORTED_DTYPES}")
        return TORCH_DTYPES[largest]

    @property
    def fingerprint(self) -> str:
        """A digest of the config and the weights."""
        return fingerprint(self.path / "config.json", *self.files)

    @contextmanager
    def open_tensors(self) -> Iterator[dict[str, Any]]:
        """Yield the weights by name; each is read when it is indexed: `tensors["lm_head.weight"][...]`."""
        with ExitStack() as stack:
            slices: dict[str, Any] = {}
            for path in self.files:
                file = stack.enter_context(safe_open(path, "pt"))
                slices.update((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118
            yield {
                key: RowSlice(slices[t.rows_of], t.first_row, t.shape[0]) if t.rows_of else slices[key]
                for key, t in self.tensors.items()
            }

    def split(self, parts: Callable[[str], Mapping[str, int]]) -> Checkpoint:
        """Replace tensors by their parts: `parts` gives the name of each part and how many rows it has."""
        tensors: dict[str, StoredTensor] = {}
        for key, tensor in self.tensors.items():
            rows = parts(key)
            if not rows or tensor.shape[:1] != (sum(rows.values()),):  # misshapen: reported under its own name
                tensors[key] = tensor
                continue
            first = 0
            for name, count in rows.items():
                shape = (count, *tensor.shape[1:])
                tensors[name] = replace(tensor, shape=shape, rows_of=key, first_row=first)
                first += count
        return replace(self, tensors=tensors)


@dataclass(frozen=True)
class RowSlice:
    """Some rows of a stored tensor, read when they are indexed: `rows[...]`."""

    stored: Any  # a slice of safetensors
    first: int
    count: int

    def __getitem__(self, index: Any) -> Any:
        return self.stored[self.first : self.first + self.count][index]

    def get_shape(self) -> list[int]:
        """The shape of these rows, as a slice of safetensors returns it."""
        return [self.count, *self.stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        """The dtype, as a slice of safetensors returns it."""
        dtype: str = self.stored.get_dtype()
        return dtype


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the config and the headers of a checkpoint folder, and check them against each other."""
    config = read_config(path)
    files, index = _find_weight_files(path)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for key, tensor in _read_header(file).items():
            if key in tensors:
                both = f"{tensors[key].file} and {file}"
                raise UserError(f"{printable(key)} is in both {both}; download the checkpoint again")
            tensors[key] = tensor
    for key, name in index.items():
        if key not in tensors or tensors[key].file.name != name:
            raise UserError(
                f"{path / INDEX_FILE} says that {printable(key)} is in {name}, which is wrong; download both again"
            )
    if not tensors:
        raise UserError(f"{files[0]} holds no tensors; {DOWNLOAD_AGAIN}")
    for name in LAYER_COUNTS & config.keys():
        if isinstance(config[name], int) and config[name] > len(tensors):
            raise UserError(f"{path / 'config.json'} has {config[name]} layers, but there are {len(tensors)} tensors")
    return Checkpoint(path, config, files, tensors)


def read_config(path: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint folder; refuse adapters and quantised checkpoints."""
    if not path.is_dir():
        raise UserError(
            f"{path} is not a folder; give a checkpoint folder, a hub id (org/name), a .gguf file, twin:NAME or"
            " smollm2:NAME"
        )
    has_config = (path / "config.json").is_file()
    if (path / "adapter.json").is_file() or ((path / "adapter_config.json").is_file() and not has_config):
        raise UserError(f"{path} is an adapter; open it with its base: BASE+{path}")
    if not has_config:
        raise UserError(f"{path} has no config.json; give a checkpoint folder")
    config = read_json(path / "config.json", DOWNLOAD_AGAIN)
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = printable(
            quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        )
        raise UserError(f"{path} is quantised ({method}), which is not supported; use the unquantised checkpoint")
    return config


def _find_weight_files(path: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Return the weight files, and the index: the name of a tensor → the name of its file."""
    if (path / INDEX_FILE).is_file():
        index = read_json(path / INDEX_FILE, DOWNLOAD_AGAIN).get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(n, str) for n in index.values()):
            raise UserError(f"{path / INDEX_FILE} is damaged (no weight_map of file names); {DOWNLOAD_AGAIN}")
        names = tuple(dict.fromkeys(index.values()))
        for name in names:
            if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name) or not name.endswith(".safetensors"):
                raise UserError(f"{path / INDEX_FILE} points to {name!r}; only .safetensors files beside it are read")
            if not (path / name).is_file():
                raise UserError(f"{path} has no shard {name}; {DOWNLOAD_AGAIN}")
        return tuple(path / name for name in names), index
    if (path / WEIGHTS_FILE).is_file():
        return (path / WEIGHTS_FILE,), {}
    pickles = sorted(p.name for pattern in PICKLES for p in path.glob(pattern))
    if pickles:
        raise UserError(
            f"{path} holds pickled weights ({pickles[0]}), and reading a pickle runs the code in it; convert them to"
            " safetensors where you trust them (save_pretrained writes them)"
        )
    raise UserError(f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; give a checkpoint folder with its weights")


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, "pt") as file:
            slices = ((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118
            return {key: StoredTensor(path, tuple(s.get_shape()), s.get_dtype()) for key, s in slices}
    except PermissionError:
        raise  # the file itself may be intact
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({summarize_error(error)}); {DOWNLOAD_AGAIN}") from error
