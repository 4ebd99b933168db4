"""The tokenizer files of a checkpoint folder, opened without running the checkpoint's code and checked.

    tokenizer = open_tokenizer(Path("LLaDA-8B-Instruct"))      # a ModelTokenizer

A folder without tokenizer files gives None; prompts are then token ids.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from floatscope.errors import LIBRARY_ERRORS, UserError, is_rust_error, printable, summarize_error
from floatscope.files.digests import sha256_file, sha256_json
from floatscope.files.json_files import read_json
from floatscope.models.checkpoint import DOWNLOAD_AGAIN
from floatscope.models.limited_process import limits_for
from floatscope.models.limited_tokenizer import LimitedTokenizer
from floatscope.models.silence import silence_libraries
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.models.untrusted import check_untrusted, is_shipped

VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
CONFIG_FILE = "tokenizer_config.json"
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json")
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")
PROBE = string.printable  # a rule that lengthens one of these characters shows when the tokenizer is opened
TEXT_BYTES = frozenset([9, 10, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)])
"""The bytes of printable characters in UTF-8. SmolLM2 has no tokens for some of the other bytes."""


def open_tokenizer(folder: Path, has_separator: bool = False, trust_remote_code: bool = False) -> ModelTokenizer | None:
    """Open the tokenizer of a checkpoint folder; return None if it has no tokenizer files.

    Args:
        folder: the checkpoint folder.
        has_separator: whether a separator token ends every text, as in BERT.
        trust_remote_code: whether the tokenizer's own code may run.
    """
    vocabulary_files = [name for name in VOCABULARY_FILES if (folder / name).is_file()]
    if not vocabulary_files:
        return None
    vocabulary_file = folder / vocabulary_files[0]
    configs = {
        name: read_json(folder / name, DOWNLOAD_AGAIN)
        for name in (CONFIG_FILE, *OTHER_FILES)
        if (folder / name).is_file()
    }
    config = configs.get(CONFIG_FILE, {})
    if trust_remote_code:
        refuse_foreign_code(folder / CONFIG_FILE, config.get("auto_map"))
    tokenizer_class = _tokenizer_class(vocabulary_files, config.get("tokenizer_class"))
    _check_chat_template(folder / CHAT_TEMPLATE_FILE)

    def read() -> Any:
        return _read_tokenizer(folder, vocabulary_file, tokenizer_class, config, trust_remote_code)

    def read_and_check() -> ModelTokenizer:
        tokenizer = ModelTokenizer(read(), str(folder), has_separator)
        check_tokenizer(tokenizer, vocabulary_file, _declared_tokens(vocabulary_file, config))
        with suppress(UserError):  # not every tokenizer has tokens for all of it
            tokenizer.encode(PROBE)
        return tokenizer

    if trust_remote_code or is_shipped(folder):
        return read_and_check()
    digest = f"{_digest_texts(folder)} {has_separator}"
    check_untrusted(vocabulary_file, read_and_check, digest, limits_for(vocabulary_file.stat().st_size, 2.0))
    return LimitedTokenizer(read(), str(folder), has_separator)


def _read_tokenizer(
    folder: Path, vocabulary_file: Path, tokenizer_class: Any, config: Mapping[str, Any], trust_remote_code: bool
) -> Any:
    """Open the files with a transformers class; an error names the file."""
    try:
        with silence_libraries():
            return tokenizer_class.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
    except ImportError as error:
        raise UserError(f"{vocabulary_file} needs another package ({summarize_error(error)})") from error
    except BaseException as error:
        if isinstance(error, PermissionError) or not (
            is_rust_error(error) or isinstance(error, (OSError, *LIBRARY_ERRORS))
        ):
            raise
        if config.get("auto_map") and not trust_remote_code and tokenizer_class.__name__ == "AutoTokenizer":
            raise UserError(f"{vocabulary_file} needs the checkpoint's own code, which is not run") from error
        if _is_valid_vocabulary(vocabulary_file):
            raise UserError(
                f"{folder / CONFIG_FILE} does not fit {vocabulary_file.name} ({summarize_error(error)})"
            ) from error
        raise UserError(f"{vocabulary_file} is damaged ({summarize_error(error)}); {DOWNLOAD_AGAIN}") from error


def _digest_texts(folder: Path) -> str:
    """Return a digest of every file in the folder that a tokenizer may read."""
    files = sorted(file for file in folder.iterdir() if file.suffix in TEXT_SUFFIXES and file.is_file())
    return sha256_json({file.name: sha256_file(file) for file in files})


def refuse_foreign_code(file: Path, auto_map: object) -> None:
    """Refuse an `auto_map` that names code of another repository ("org/name--module.Class"), which nobody trusted."""
    values = auto_map.values() if isinstance(auto_map, dict) else []
    for name in (n for value in values for n in (value if isinstance(value, list) else [value])):
        if name is not None and (not isinstance(name, str) or "--" in name):
            raise UserError(f"{file} needs code that is not in its folder ({printable(name)}), which is not run")


def check_tokenizer(tokenizer: ModelTokenizer, file: Path, declared: Sequence[tuple[str, int]] = ()) -> None:
    """Check a tokenizer that opens: it must encode ordinary text, and the tokens in `declared` must have those ids.

    A truncated vocabulary would give every added token another id, and drop bytes of every text.
    """
    ids = ((token, i, tokenizer.token_to_id(token)) for token, i in declared)
    problems = []
    if shared := tokenizer.shared_id:  # first: transformers 5.17 then also moves the added tokens
        problems = ["{} and {} both have id {}".format(*shared)]
    problems += [f"{token} has id {actual} instead of {i}" for token, i, actual in ids if actual != i]
    if not problems and (missing := tokenizer.missing_bytes & TEXT_BYTES):
        problems = [f"{len(missing)} bytes of ordinary text have no token"]
    if not problems and not tokenizer.encode("a"):
        problems = ["it has no tokens for a text"]
    if problems:
        raise UserError(f"{file} is damaged ({printable(problems[0])}); {DOWNLOAD_AGAIN}")


def _declared_tokens(file: Path, config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the tokens added to a vocabulary with the ids they should have."""
    added = read_json(file, DOWNLOAD_AGAIN).get("added_tokens") or [] if file.name == "tokenizer.json" else []
    try:
        decoder = (config.get("added_tokens_decoder") or {}).items()
        return [(t["content"], int(i)) for i, t in decoder] + [(t["content"], int(t["id"])) for t in added]
    except LIBRARY_ERRORS as error:
        raise UserError(f"{file} is damaged (its added tokens: {summarize_error(error)}); {DOWNLOAD_AGAIN}") from error


def _check_chat_template(file: Path) -> None:
    try:
        if file.is_file():
            file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is damaged ({summarize_error(error)}); {DOWNLOAD_AGAIN}") from error


def _is_valid_vocabulary(file: Path) -> bool:
    """Whether the vocabulary itself opens, so that the settings beside it are wrong."""
    from tokenizers import Tokenizer

    try:
        return file.name == "tokenizer.json" and Tokenizer.from_file(str(file)) is not None
    except BaseException as error:
        if is_rust_error(error) or isinstance(error, LIBRARY_ERRORS):
            return False
        raise


def _tokenizer_class(vocabulary_files: Sequence[str], name: object) -> Any:
    """Choose the class: tokenizer.json is read as it is, whatever class the config names. Dream's class is Qwen2's."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

    if "tokenizer.json" in vocabulary_files:
        return PreTrainedTokenizerFast
    if name in ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"):
        return Qwen2Tokenizer
    return AutoTokenizer
