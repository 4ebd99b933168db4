"""Read question files into samples. An entry that cannot be read raises an error with its line and the reason.

    samples = read_samples("twin:reading-5", limit=100)                  # a question file that is part of the package
    samples = read_samples("hotpot_dev_distractor_v1.json")              # the format is detected; or format="hotpot"
    file = read_file("crawled.jsonl.gz", skip_bad=True)
    file.samples, file.format, file.errors                               # […], "own", [(17, 'it has no "question"')]
    describe_source("twin:reading-5", limit=100)       # name and digest of the file, for the settings of a run
    write_samples(Path("few.jsonl"), samples[:20])

A file has one object on each line, or it is one JSON document: a list of objects, objects by their ids, or SQuAD
articles. A sample without an id is named by its line or element. The formats are in `tasks/formats`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.files.inputs import require_regular_file
from floatscope.tasks.formats import Format, detect_format, get_format
from floatscope.tasks.formats.fields import describe_type, shorten
from floatscope.tasks.json_entries import EXPECTED, read_entries, read_error
from floatscope.tasks.sample import Sample

SHIPPED_PREFIX = "twin:"
_FOLDER = files("floatscope") / "assets" / "questions"
SHIPPED = tuple(
    sorted(SHIPPED_PREFIX + f.name.removesuffix(".jsonl") for f in _FOLDER.iterdir() if f.name.endswith(".jsonl"))
)
"""The held-out question files of the twins, as a data path names them: `twin:reading-5`, `twin:two-hop`, …"""


@dataclass(frozen=True)
class SampleFile:
    """The contents of a question file.

    Attributes:
        samples: The samples that could be read.
        format: The name of the file's format.
        errors: The number, from 1, and the reason of each entry that was skipped.
        unit: What the numbers count: line, element or question.
    """

    samples: list[Sample]
    format: str
    errors: list[tuple[int, str]]
    unit: str


def read_samples(path: str | Path, limit: int | None = None, *, format: str | None = None) -> list[Sample]:
    """Read the samples of a file.

    Args:
        path: A JSON lines file or a JSON document, plain, .gz or .xz; or a shipped file such as "twin:reading-5".
        limit: Read only the first `limit` samples.
        format: The name of the format (`tasks.formats.FORMATS`). By default it is detected from the first object.

    Returns:
        The samples in the order of the file. The first entry that cannot be read raises a UserError.

    Example:
        samples = fs.read_samples("twin:reading-5", limit=2)
        samples[0].question, samples[0].answers, len(samples[0].passages)
    """
    return read_file(path, limit, format=format).samples


def read_file(
    path: str | Path, limit: int | None = None, *, format: str | None = None, skip_bad: bool = False
) -> SampleFile:
    """Read a file like `read_samples`, and report its format.

    With `skip_bad` an entry that cannot be read is skipped and listed in `SampleFile.errors`.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")
    known_format = None if format is None else get_format(format)
    unit, entries = read_entries(resolve_path(path))
    samples: dict[str, Sample] = {}
    numbers: dict[str, int] = {}
    errors: list[tuple[int, str]] = []
    for number, entry in entries:
        try:
            known_format, sample = _read_entry(entry, str(number), known_format)
            if sample.id in samples:
                other = f"{unit} {numbers[sample.id]}"
                raise UserError(f"{other} has the id '{shorten(sample.id)}' too; ids must differ")
        except UserError as error:
            if not skip_bad:
                raise UserError(f"{path}, {unit} {number}: {error}") from error
            errors.append((number, str(error)))
            continue
        samples[sample.id], numbers[sample.id] = sample, number
        if len(samples) == limit:
            break
    if known_format is None or not samples:
        raise _no_samples(path, unit, errors)
    return SampleFile(list(samples.values()), known_format.name, errors, unit)


def read_shipped(name: str) -> list[Sample]:
    """Read a shipped question file by its name without the prefix, such as "reading-5" or "two-hop"."""
    return read_samples(SHIPPED_PREFIX + name)


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write one JSON object per sample and line; `read_samples` reads the file back."""
    path.write_text("".join(json.dumps(sample.as_json()) + "\n" for sample in samples), encoding="utf-8")


def describe_source(path: str | Path, limit: int | None = None) -> dict[str, Any]:
    """Return the name and the digest of a question file, for the settings of a run."""
    file = resolve_path(path)
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise read_error(file, error) from error
    return {"data": file.name, "data_sha256": digest, "limit": limit}


def resolve_path(path: str | Path) -> Path:
    """Return the path of a question file; `twin:reading-5` is a shipped one, wherever the program runs."""
    if not str(path).startswith(SHIPPED_PREFIX):
        return require_regular_file(Path(path))
    if str(path) not in SHIPPED:
        raise unknown_choice("question file", str(path), SHIPPED)
    return Path(str(_FOLDER / f"{str(path).removeprefix(SHIPPED_PREFIX)}.jsonl"))


def _read_entry(entry: Any, number: str, format: Format | None) -> tuple[Format, Sample]:
    if isinstance(entry, UserError):
        raise entry
    if not isinstance(entry, dict):
        raise UserError(f"a sample is a JSON object, and this is {describe_type(entry)}")
    format = format or detect_format(entry)
    return format, format.read(entry, number)


def _no_samples(path: str | Path, unit: str, errors: list[tuple[int, str]]) -> UserError:
    if not errors:
        return UserError(f"{path} contains no samples: {EXPECTED}")
    number, reason = errors[0]
    return UserError(
        f"{path} contains no samples, only {len(errors)} bad {unit}s; the first is {unit} {number}: {reason}"
    )
