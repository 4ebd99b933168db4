"""Files of questions → samples. What cannot be read is refused with its line and the reason.

    samples = read_samples("held-out/reading-5.jsonl", limit=100)
    samples = read_samples("hotpot_dev_distractor_v1.json")              # its format is seen, or said: format="hotpot"
    reading = read_file("crawled.jsonl.gz", skip_bad=True)
    reading.samples, reading.format, reading.bad                         # …, "own", [(17, 'it has no "question"')]
    about("held-out/reading-5.jsonl", limit=100)       # name and digest of the file, for the run's settings

A file has an object on each line, or is one JSON document: a list of objects, objects by their ids, or the articles of
SQuAD. A sample without an id is named by its line or element. The formats are in `tasks/formats`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from floatscope.errors import UserError
from floatscope.tasks.formats import Format, detect, named
from floatscope.tasks.formats.fields import JUDGEMENTS, brief, kind
from floatscope.tasks.formats.squad import is_article, rows
from floatscope.tasks.sample import Sample

OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}
LAYOUTS = "give a file with a JSON object on each line, or one JSON list of objects"

Entries = Iterator[tuple[int, Any]]  # a number, and what stands there: a value, or the UserError that says why not


@dataclass(frozen=True)
class Reading:
    """What a file held."""

    samples: list[Sample]
    format: str
    bad: list[tuple[int, str]]  # line, element or question, counted from 1, and why it was left out
    unit: str  # which of these it is that was counted


def read_samples(path: str | Path, limit: int | None = None, *, format: str | None = None) -> list[Sample]:
    """The samples of a file in its order, the first `limit` of them; the first that is bad is refused."""
    return read_file(path, limit, format=format).samples


def read_file(
    path: str | Path, limit: int | None = None, *, format: str | None = None, skip_bad: bool = False
) -> Reading:
    """The samples of a file and what its format is; with `skip_bad` what cannot be read is left out, and told."""
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")
    path, chosen = Path(path), None if format is None else named(format)
    unit, entries = _entries(path)
    samples: dict[str, Sample] = {}
    numbers: dict[str, int] = {}
    bad: list[tuple[int, str]] = []
    for number, entry in entries:
        try:
            chosen, sample = _read(entry, str(number), chosen)
            if sample.id in samples:
                again = f"{unit} {numbers[sample.id]}"
                raise UserError(f"the id '{brief(sample.id)}' is that of {again} too; ids must differ")
        except UserError as error:
            if not skip_bad:
                raise UserError(f"{path}, {unit} {number}: {error}") from error
            bad.append((number, str(error)))
            continue
        samples[sample.id], numbers[sample.id] = sample, number
        if len(samples) == limit:
            break
    if chosen is None or not samples:
        raise _nothing(path, unit, bad)
    return Reading(list(samples.values()), chosen.name, bad, unit)


def about(path: str | Path, limit: int | None = None) -> dict[str, Any]:
    """What a run says of its data."""
    try:
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(Path(path), error) from error
    return {"data": Path(path).name, "data_sha256": digest, "limit": limit}


def counts(samples: list[Sample]) -> dict[str, Any]:
    """How many samples there are, and how many have what."""
    sizes = [len(s.passages) for s in samples]
    return {
        "samples": len(samples),
        "with_passages": sum(map(bool, sizes)),
        "with_gold": sum(any(p.gold for p in s.passages) for s in samples),
        "with_evidence": sum(any(p.evidence for p in s.passages) for s in samples),
        "yes_or_no": sum(bool(s.answers) and not _telling(s) for s in samples),
        "unanswerable": sum(not s.answers for s in samples),
        "passages_each": spread(sizes),
    }


def spread(numbers: list[int]) -> dict[str, int | float]:
    """Least, median and most."""
    return {"min": min(numbers), "median": statistics.median(numbers), "max": max(numbers)}


def problems(samples: list[Sample]) -> dict[str, list[str]]:
    """What is amiss among samples that can be read → the ids concerned."""
    asked = Counter(_plain(sample.question) for sample in samples)
    found = {
        "no gold passage": [s.id for s in samples if s.answers and s.passages and not any(p.gold for p in s.passages)],
        "no evidence in the gold passages": [s.id for s in samples if _lacks_evidence(s)],
        "a question asked more than once": [s.id for s in samples if asked[_plain(s.question)] > 1],
    }
    return {problem: ids for problem, ids in found.items() if ids}


def _lacks_evidence(sample: Sample) -> bool:
    """Whether an answer should stand in a gold passage, and none does."""
    gold = [passage for passage in sample.passages if passage.gold]
    return bool(gold and _telling(sample)) and not any(passage.evidence for passage in gold)


def _telling(sample: Sample) -> list[str]:
    """The answers that can stand in a text; a yes or no stands nowhere."""
    return [answer for answer in sample.answers if answer.strip().lower() not in JUDGEMENTS]


def _plain(question: str) -> str:
    return " ".join(question.lower().split())


def _read(entry: Any, number: str, format: Format | None) -> tuple[Format, Sample]:
    if isinstance(entry, UserError):
        raise entry
    if not isinstance(entry, dict):
        raise UserError(f"a sample is a JSON object, and this is {kind(entry)}")
    chosen = format or detect(entry)
    return chosen, chosen.read(entry, number)


def _nothing(path: Path, unit: str, bad: list[tuple[int, str]]) -> UserError:
    if not bad:
        return UserError(f"{path} holds no samples: {LAYOUTS}")
    number, reason = bad[0]
    return UserError(f"{path} holds no samples, only {len(bad)} bad {unit}s; the first is {unit} {number}: {reason}")


def _entries(path: Path) -> tuple[str, Entries]:
    """What a file is counted in, and what it holds: lines as they come, or the parts of one document."""
    lines = _lines(path)
    before: list[str] = []
    for line in lines:
        before.append(line)
        if line.strip():
            break
    else:
        raise _nothing(path, "line", [])
    if before[-1].startswith("version https://git-lfs"):
        raise UserError(f"{path} is a Git LFS pointer and not the file itself; fetch that with `git lfs pull`")
    first = _value(before[-1])
    if isinstance(first, dict) and not _holds_many(first):
        return "line", _each_line(chain(before, lines))
    return _document(path, [*before, *lines])


def _lines(path: Path) -> Iterator[str]:
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text ({error.reason})") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}); fetch it again") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _each_line(lines: Iterable[str]) -> Entries:
    return ((number, _value(line)) for number, line in enumerate(lines, 1) if line.strip())


def _document(path: Path, lines: list[str]) -> tuple[str, Entries]:
    """One JSON value over all lines; if it is none, but most lines are objects, a file of lines with bad ones."""
    told = _value("".join(lines))
    if isinstance(told, UserError):
        filled = [line for line in lines if line.strip()]
        if 2 * sum(isinstance(_value(line), dict) for line in filled) > len(filled):
            return "line", _each_line(lines)
        raise UserError(f"{path}: {told}; {LAYOUTS}") from told
    parts = _parts(told)
    if any(map(is_article, parts)):
        return "question", enumerate((row for article in parts for row in rows(article)), 1)
    return "element", enumerate(parts, 1)


def _holds_many(told: dict[str, Any]) -> bool:
    """Whether an object is a whole file: a list called "data", or objects by their ids."""
    objects = sum(isinstance(part, dict) for part in told.values())
    return "question" not in told and (isinstance(told.get("data"), list) or 2 * objects > len(told))


def _parts(told: Any) -> list[Any]:
    if isinstance(told, list):
        return told
    if not isinstance(told, dict) or not _holds_many(told):
        return [told]
    if isinstance(told.get("data"), list):
        parts: list[Any] = told["data"]
        return parts
    return [{"id": id} | part if isinstance(part, dict) else part for id, part in told.items()]


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror or error}")


def _value(text: str) -> Any:
    """A JSON value, or the UserError that says why it is none."""

    def refuse(word: str) -> None:
        raise UserError(f"{word} is no JSON")

    try:
        told = json.loads(text := text.rstrip(), parse_constant=refuse)
        if re.search(r"\\u[dD]", text):
            json.dumps(told, ensure_ascii=False).encode()
    except UserError as error:
        return error
    except UnicodeEncodeError:
        return UserError("it holds half a character (a lone surrogate)")
    except RecursionError:
        return UserError("it is nested too deeply")
    except json.JSONDecodeError as error:
        return UserError(_broken(text, error))
    except ValueError as error:  # a number of too many digits
        return UserError(f"it is no JSON ({brief(error, 100)})")
    return told


def _broken(text: str, error: json.JSONDecodeError) -> str:
    where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
    said = f"{error.msg.removesuffix(' at')} at {where}"
    ends = error.pos >= len(text) or error.msg.startswith("Unterminated string")
    return f"it is no whole JSON ({said}), it seems to be cut off" if ends else f"it is no JSON ({said})"
