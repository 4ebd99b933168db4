"""The names that open a model: a folder, a hub id, a .gguf file, twin:NAME, smollm2:NAME, or BASE+ADAPTER.

split_adapter("base.gguf+sibling")             # ("base.gguf", Path("sibling"))
find_checkpoint("GSAI-ML/LLaDA-8B-Base")       # its folder in the local cache and its commit
find_checkpoint("twin:mdm")                    # the folder in the package, and None
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from floatscope.errors import UserError, join_names, name_in_errors, printable, summarize_error, unknown_choice
from floatscope.models import hub
from floatscope.models.adapter import is_adapter
from floatscope.models.architectures import find_architecture
from floatscope.models.bases import ADAPTED_MODELS, base_path, is_base_name
from floatscope.models.checkpoint import read_config

TWIN = "twin:"


def split_adapter(name: str | Path) -> tuple[str | Path, Path | None]:
    """Split `base.gguf+sibling` into base and adapter; a path that exists is one name, even with a + in it."""
    if str(name) in ADAPTED_MODELS:
        return ADAPTED_MODELS[str(name)], _assets() / "adapters" / str(name).partition(":")[0]
    splits = [(str(name)[:i], str(name)[i + 1 :]) for i, character in enumerate(str(name)) if character == "+"]
    if not splits or resolve_path(name).exists():
        return name, None
    # A folder may have a + in its name too.
    adapters = (split for split in reversed(splits) if split[1] and is_adapter(resolve_path(split[1])))
    base, adapter = next(adapters, splits[-1])
    return base, resolve_path(adapter)


def resolve_path(name: str | Path) -> Path:
    """Return a name as a path: the downloaded file of `smollm2:arm`, or the path itself with ~ expanded."""
    if not isinstance(name, str | Path) or not str(name) or "\0" in str(name):
        raise UserError(
            f"{printable(repr(name))} is not a valid model name; give a checkpoint folder, a hub id (org/name), a .gguf"
            " file, twin:NAME, smollm2:NAME or BASE+ADAPTER"
        )
    if is_base_name(name):
        return base_path(name)
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # no such user
        raise UserError(
            f"{printable(name)} is not a folder ({summarize_error(error)}); give the path without ~"
        ) from error


def find_weights(name: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """Return the file or folder with the weights of a model."""
    path = resolve_path(name)
    return path if path.suffix == ".gguf" else find_checkpoint(name, revision, trust_remote_code=trust_remote_code)[0]


def find_checkpoint(
    name: str | Path, revision: str | None = None, *, weights: bool = True, trust_remote_code: bool = False
) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint, and the commit if it is on the hub; fetch it, with its weights or without."""
    path, text = resolve_path(name), str(name)
    if text.startswith(TWIN):
        return _twin_folder(text.removeprefix(TWIN)), None
    if path.exists() or not hub.is_hub_id(text):
        if revision is not None:
            raise UserError(f"revision={revision!r} needs a hub id (org/name), and {text} is not one")
        return path, None
    config = read_config(hub.fetch_config(text, revision))
    with name_in_errors(text):
        if find_architecture(config, None) is None and not trust_remote_code:
            raise unknown_architecture(config)
    return hub.fetch_checkpoint(text, revision, weights=weights, code=trust_remote_code)


def display_name(name: str | Path, path: Path, commit: str | None = None) -> str:
    """Return the name that a spec shows; a local path is shortened to its last part, so that a run can be moved."""
    if commit or str(name).startswith(TWIN) or is_base_name(name):
        return str(name)
    return path.name if path.suffix == ".gguf" else path.resolve().name


def unknown_architecture(config: dict[str, Any], tensors: Mapping[str, Any] | None = None) -> UserError:
    """Return the error for a checkpoint that no row of the architecture table opens."""
    names = join_names(list(map(str, config.get("architectures") or ["none"])))
    if find_architecture(config, None) is not None:  # known, but not with these tensors
        return UserError(f"its tensors are not named as those of {names} are ({join_names(tensors or {}, 3)})")
    has_code = "auto_map" in config
    hint = "; it has its own code, which runs only with trust_remote_code=True" if has_code else ""
    return UserError(f"unknown architecture {names} (`floatscope models` lists the supported ones){hint}")


def _twin_folder(name: str) -> Path:
    twins = _assets() / "twins"
    names = sorted(p.name for p in twins.iterdir() if (p / "config.json").is_file())
    if name not in names:
        raise unknown_choice("twin", name, names)
    return twins / name


def _assets() -> Path:
    return Path(str(package_files("floatscope"))) / "assets"
