"""Hugging Face hub ids → folders in the local cache.

    folder, commit = fetch_checkpoint("GSAI-ML/LLaDA-8B-Instruct")

config.json is fetched first, so that an unsupported architecture is refused before gigabytes are downloaded; then only
the files that are read: safetensors, JSON, text and templates, never pickles, and code only if the user trusts it.

The library repeats a request for minutes if nobody answers. So the hub is asked for a sign of life first; if there is
none within a few seconds, only the local cache is used.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path

from floatscope.errors import UserError, summarize_error
from floatscope.models.checkpoint import read_config
from floatscope.models.silence import silence_libraries

logger = logging.getLogger(__name__)

HUB_ID = r"[\w.-]+/[\w.-]+"
TEXT_FILES = (
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
WEIGHT_FILES, CODE_FILES = ("model*.safetensors",), ("*.py",)
PATIENCE = 3.0  # seconds until the hub must have answered


def is_hub_id(name: str) -> bool:
    """Whether a name has the form org/name."""
    return re.fullmatch(HUB_ID, name) is not None and ".." not in name


def check_hub(name: str) -> None:
    """Refuse a checkpoint that has no folder in the local cache if the hub does not answer."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    if not cached.is_dir() and not is_reachable():
        raise _unreachable(name)


def is_reachable() -> bool:
    """Whether the hub answers anything, within a few seconds; False if HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT, round(time.monotonic() / 60))


def fetch_config(name: str, revision: str | None = None) -> Path:
    """Fetch config.json alone and return its folder."""
    from huggingface_hub import hf_hub_download

    return Path(_download(name, revision, hf_hub_download, filename="config.json")).parent


def fetch_checkpoint(
    name: str, revision: str | None = None, *, weights: bool = True, code: bool = False
) -> tuple[Path, str]:
    """Fetch a checkpoint, with its weights and its code or without; return its folder and commit.

    Files in the local cache are not fetched again.
    """
    from huggingface_hub import snapshot_download

    patterns = [*TEXT_FILES, *(WEIGHT_FILES if weights else ()), *(CODE_FILES if code else ())]
    folder = Path(_download(name, revision, snapshot_download, allow_patterns=patterns))
    read_config(folder)
    return folder, folder.name  # the cache names a snapshot by its commit


def _download(name: str, revision: str | None, function: object, **options: object) -> str:
    """Call a download function of huggingface_hub; turn its errors into sentences."""
    from huggingface_hub import errors

    shown = f"{name} at {revision}" if revision else name
    logger.info("fetching %s from the hub", shown)
    try:
        with silence_libraries():
            options |= {"revision": revision, "local_files_only": not is_reachable()}
            return str(function(name, **options))  # type: ignore[operator]
    except errors.GatedRepoError as error:
        raise UserError(f"{shown} is gated; accept its terms on the hub and log in (hf auth login)") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r} on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{name} is neither a folder here nor a repository on the hub you can read; check the spelling"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(shown) from error
    except errors.EntryNotFoundError as error:
        raise UserError(f"{shown} has no config.json on the hub, so it is not a transformers checkpoint") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise UserError(
            f"{shown} could not be fetched from the hub ({summarize_error(error)}); try again, or give a folder"
        ) from error


def _unreachable(name: str) -> UserError:
    return UserError(
        f"{name} is not in the local cache, and the hub cannot be reached (offline?); fetch it where there is a network"
        " (hf download), or give a folder"
    )


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    """Whether a server answers there. It is asked at most once in each `minute`."""
    is_alive: list[bool] = []

    def request_head() -> None:
        try:
            request = urllib.request.Request(endpoint, method="HEAD")
            urllib.request.urlopen(request, timeout=PATIENCE).close()
        except (urllib.error.HTTPError, HTTPException, ValueError):
            pass  # an answer, or an address for the library to refuse
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # the library may know other certificates
                return
        except OSError:
            return
        is_alive.append(True)

    asking = threading.Thread(
        target=request_head, daemon=True
    )  # a name server may take longer than any limit of a request
    asking.start()
    asking.join(PATIENCE)
    return bool(is_alive)
