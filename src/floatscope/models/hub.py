"""A hub id → a folder in the local cache.

    folder, commit = fetch("GSAI-ML/LLaDA-8B-Instruct")

config.json comes first, so that a family that cannot be opened is refused before gigabytes are fetched; then only what
is read: safetensors, JSON, text and templates, never pickles, and code only for a user who trusts it.
"""

from __future__ import annotations

import re
from pathlib import Path

from floatscope.errors import UserError, reason
from floatscope.models.files import read_config
from floatscope.models.quiet import quiet

HUB_ID = r"[\w.-]+/[\w.-]+"
READ = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "vocab.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.txt",
    "*.jinja",
    "*.model",
)
WEIGHTS, CODE = ("model*.safetensors",), ("*.py",)


def is_hub_id(name: str) -> bool:
    return re.fullmatch(HUB_ID, name) is not None and ".." not in name


def fetch_config(name: str, revision: str | None = None) -> Path:
    """The folder of config.json alone."""
    from huggingface_hub import hf_hub_download

    return Path(_ask(name, revision, hf_hub_download, filename="config.json")).parent


def fetch(name: str, revision: str | None = None, *, weights: bool = True, code: bool = False) -> tuple[Path, str]:
    """Folder and commit; what is there already is not fetched again."""
    from huggingface_hub import snapshot_download

    patterns = [*READ, *(WEIGHTS if weights else ()), *(CODE if code else ())]
    folder = Path(_ask(name, revision, snapshot_download, allow_patterns=patterns))
    read_config(folder)
    return folder, folder.name  # the cache names a snapshot by its commit


def _ask(name: str, revision: str | None, how: object, **what: object) -> str:
    from huggingface_hub import errors

    at = f"{name} at {revision}" if revision else name
    try:
        with quiet():
            return str(how(name, revision=revision, **what))  # type: ignore[operator]
    except errors.GatedRepoError as error:
        raise UserError(f"{at} is gated; accept its terms on the hub and log in (hf auth login)") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r} on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{name} is neither a folder here nor a repository on the hub you can read; check the spelling"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{at} is not in the local cache, and the hub cannot be reached (offline?); fetch it where there is a"
            " network (hf download), or give a folder"
        ) from error
    except errors.EntryNotFoundError as error:
        raise UserError(f"{at} has no config.json on the hub: no transformers checkpoint") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise UserError(
            f"{at} could not be fetched from the hub ({reason(error)}); try again, or give a folder"
        ) from error
