"""Passages to retrieve from: an index on the disk, searched by BM25 (tantivy).

    index = Index.create("wiki")                                # or Index.open("wiki")
    index.add_file("passages.jsonl.gz")                         # Added(added=6119, replaced=0, unchanged=0)
    index.add([("q-7", "Mira", "Mira lives in Velmora.")])      # id, title, text; an id of None is made from the two
    index.search("Where does Mira live?", 5)                    # [Hit(id="q-7", title="Mira", text=…, score=3.1), …]

    wiki/meta.json       format, versions, files added; what makes the folder an index
    wiki/index.lock      held by the one process that writes
    wiki/tantivy/        the engine's own files, each with a checksum

Passages are committed batch by batch. A killed `add` leaves every committed batch, and the same call again completes
it: a passage that is there already is not written twice. An `Index` sees what was committed when it was opened, and
what it writes itself.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import importlib.metadata
import io
import json
import lzma
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tantivy

from floatscope import __version__
from floatscope.errors import UserError
from floatscope.tasks.sample import Passage, Sample

FORMAT = 1
META, LOCK, ENGINE = "meta.json", "index.lock", "tantivy"
BATCH, BATCH_CHARACTERS = 10_000, 32_000_000  # of a commit
LONGEST_ID, LONGEST_TERM = 1000, 100
TIE, WIDEST_TIE = 1e-6, 65_536
FIELDS = ("id", "title", "text")
SEGMENT = ("store", "term", "idx", "pos", "fieldnorm", "fast")  # the files of a segment

Entry = tuple[str | None, str, str]


@dataclass(frozen=True)
class Hit:
    id: str
    title: str
    text: str
    score: float


@dataclass(frozen=True)
class Added:
    """What became of the passages given; `replaced` had their id with another title or text."""

    added: int = 0
    replaced: int = 0
    unchanged: int = 0

    @property
    def passages(self) -> int:
        return self.added + self.replaced + self.unchanged

    def __add__(self, other: Added) -> Added:
        return Added(self.added + other.added, self.replaced + other.replaced, self.unchanged + other.unchanged)


@dataclass(frozen=True)
class Stat:
    path: str
    passages: int
    bytes: int
    format: int
    floatscope: str  # the version that made it
    tantivy: str  # likewise
    files: tuple[dict[str, Any], ...]  # of each file added the name, sha256, bytes, passages, and when it was last

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Index:
    """A folder of passages; `Index.open` and `Index.create` give one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _engine(path, "read"):
            if not tantivy.Index.is_compatible(str(path / ENGINE)):
                raise UserError(f"{path} was written by another tantivy, which this one cannot read: make it anew")
            self._index = tantivy.Index.open(str(path / ENGINE))
            self._index.config_reader("manual")
        self._index.register_tokenizer("english", _analyzer())
        self._words, self._telling = _analyzer(), _analyzer(stop=True)

    @classmethod
    def open(cls, path: str | Path) -> Index:
        """The index in a folder, to search and to write."""
        _read_meta(Path(path))
        return cls(Path(path))

    @classmethod
    def create(cls, path: str | Path, *, exist_ok: bool = False) -> Index:
        """A new, empty index; with `exist_ok` the one that is there, if there is one."""
        path = Path(path)
        if exist_ok and (path / META).exists():
            return cls.open(path)
        try:
            _check_place(path)
            path.mkdir(parents=True, exist_ok=True)
            with _locked(path):
                _check_place(path)  # again: until the lock was ours, another process may have begun here
                (path / ENGINE).mkdir(exist_ok=True)
                with _engine(path, "write"):
                    tantivy.Index(_schema(), str(path / ENGINE))
                made = {"floatscope": __version__, "tantivy": importlib.metadata.version("tantivy")}
                _write_meta(path, {"format": FORMAT, "created": _now(), **made, "files": []})
        except OSError as error:
            raise UserError(f"cannot make an index in {path}: {error.strerror}") from error
        return cls(path)

    # Writing ----------------------------------------------------------------------------------------------------------

    def add(
        self, passages: Iterable[Entry], *, batch: int = BATCH, told: Callable[[Added], object] | None = None
    ) -> Added:
        """Add (id, title, text), replacing what has the same id; after each commit `told` hears the counts so far."""
        with _locked(self.path):
            return self._add(passages, batch, told)

    def add_file(
        self,
        path: str | Path | PassageFile,
        *,
        batch: int = BATCH,
        told: Callable[[Added, float], object] | None = None,
    ) -> Added:
        """Add the passages of a file and remember it; `told` hears the counts and how much of the file is read."""
        file = path if isinstance(path, PassageFile) else PassageFile(path)

        def tell(counts: Added) -> None:
            if told is not None:
                told(counts, file.read)

        with _locked(self.path):
            counts = self._add(file, batch, tell)
            meta, entry = _read_meta(self.path), {**file.about(), "passages": counts.passages, "when": _now()}
            others = [known for known in meta["files"] if known["sha256"] != entry["sha256"]]
            _write_meta(self.path, {**meta, "files": [*others, entry]})
        return counts

    def remove(self, ids: Iterable[str]) -> int:
        """Remove passages by id, in one commit; how many of them were there."""
        with _locked(self.path), self._writer() as writer:
            here = [id for id in dict.fromkeys(ids) if self.get(id) is not None]
            with _engine(self.path, "write"):
                for id in here:
                    writer.delete_documents_by_term("id", id)
                writer.commit()
                self._index.reload()
        return len(here)

    def _add(self, passages: Iterable[Entry], batch: int, told: Callable[[Added], object] | None) -> Added:
        if batch < 1:
            raise UserError(f"batch must be at least 1, got {batch}")
        counts, waiting, characters = Added(), dict[str, tuple[str, str]](), 0
        with self._writer() as writer:
            for entry in passages:
                id, title, text = checked(*entry)
                if id in waiting:  # a second time in this batch
                    same = waiting[id] == (title, text)
                    counts += Added(unchanged=1) if same else Added(replaced=1)
                waiting[id] = title, text
                characters += len(title) + len(text)
                if len(waiting) >= batch or characters >= BATCH_CHARACTERS:
                    counts += self._commit(writer, waiting)
                    waiting, characters = {}, 0
                    if told is not None:
                        told(counts)
            counts += self._commit(writer, waiting)
            if told is not None:
                told(counts)
        return counts

    def _commit(self, writer: tantivy.IndexWriter, waiting: dict[str, tuple[str, str]]) -> Added:
        """Write what is not there yet, and make it last."""
        added = replaced = 0
        with _engine(self.path, "write"):
            for id, (title, text) in waiting.items():
                known = self.get(id)
                if known is None:
                    added += 1
                elif (known.title, known.text) == (title, text):
                    continue
                else:
                    writer.delete_documents_by_term("id", id)
                    replaced += 1
                document = tantivy.Document(id=id, title=title, text=text)
                document.add_unsigned("key", int.from_bytes(hashlib.sha256(id.encode()).digest()[:8]))
                writer.add_document(document)
            if added or replaced:
                writer.commit()
                self._index.reload()
        return Added(added, replaced, len(waiting) - added - replaced)

    @contextmanager
    def _writer(self) -> Iterator[tantivy.IndexWriter]:
        """The engine's writer; what it has not committed when the block is left is dropped."""
        with _engine(self.path, "write"):
            self._index.reload()
            writer = self._index.writer()
        try:
            yield writer
        finally:
            with suppress(ValueError):  # a writer that failed has said so already
                writer.wait_merging_threads()
        with _engine(self.path, "read"):
            self._index.reload()

    # Reading ----------------------------------------------------------------------------------------------------------

    def get(self, id: str) -> Hit | None:
        """The passage of an id; its score is 0."""
        if len(id) > LONGEST_ID or _whole(id) != id:
            return None
        with _engine(self.path, "read"):
            searcher = self._index.searcher()
            if not searcher.doc_freq("id", id):
                return None
            query = tantivy.Query.term_query(self._index.schema, "id", id, "basic")
            hits = searcher.search(query, 1, count=False).hits
            return _hit(searcher.doc(hits[0][1]), 0.0) if hits else None

    def search(self, question: str, k: int = 5) -> list[Hit]:
        """The best `k` passages for a question in any words; of equal scores, in an order that only ids decide."""
        if k < 1:
            raise UserError(f"k must be at least 1, got {k}")
        query = self._query(question)
        if query is None:
            return []
        with _engine(self.path, "read"):
            searcher = self._index.searcher()
            return [_hit(searcher.doc(address), score) for score, address in _best(searcher, query, k)]

    def search_many(self, questions: Iterable[str], k: int = 5) -> list[list[Hit]]:
        return [self.search(question, k) for question in questions]

    def _query(self, question: str) -> tantivy.Query | None:
        """Any of the question's words in title or text; its punctuation says nothing, and stop words only if alone."""
        text = _whole(question)
        words = dict.fromkeys(self._telling.analyze(text) or self._words.analyze(text))
        if not words:
            return None
        term, schema = tantivy.Query.term_query, self._index.schema
        clauses = [term(schema, field, word, "freq") for word in words for field in ("title", "text")]
        return tantivy.Query.boolean_query([(tantivy.Occur.Should, clause) for clause in clauses])

    def stat(self) -> Stat:
        meta = _read_meta(self.path)
        with _engine(self.path, "read"):
            passages = self._index.searcher().num_docs
        size = sum(_size(file) for file in [self.path / META, *(self.path / ENGINE).iterdir()])
        files = tuple(meta["files"])
        return Stat(str(self.path), passages, size, meta["format"], meta["floatscope"], meta["tantivy"], files)

    def check(self) -> None:
        """Read every byte of the index; one `UserError` names all files that are missing or damaged."""
        if found := _damage(self.path):
            raise _damaged(self.path, found)


def retrieved(index: Index, samples: Iterable[Sample], k: int = 5) -> tuple[list[Sample], float | None]:
    """Each sample with the best `k` passages for its question, and the share of the gold passages that are among them.

    A passage is gold if one of the sample's own gold passages has its title or, where one of the two has none, its
    text. Without gold passages there is no share.
    """
    given, found, gold = [], 0, 0
    for sample in samples:
        wanted = [passage for passage in sample.passages if passage.gold]
        hits = index.search(sample.question, k)
        gold, found = gold + len(wanted), found + sum(any(_same(hit, passage) for hit in hits) for passage in wanted)
        passages = []
        for hit in hits:
            mine = [passage for passage in wanted if _same(hit, passage)]
            evidence = next((passage.evidence for passage in mine if passage.text == hit.text), ())
            passages.append(Passage(hit.title, hit.text, bool(mine), evidence))
        given.append(replace(sample, passages=tuple(passages)))
    return given, found / gold if gold else None


def _same(hit: Hit, passage: Passage) -> bool:
    mine, theirs = (hit.title, passage.title) if hit.title and passage.title else (hit.text, passage.text)
    return mine.casefold().split() == theirs.casefold().split()


# Files of passages ----------------------------------------------------------------------------------------------------


class PassageFile:
    """The passages of a file: a JSON object on each line, or one JSON list of objects; also .gz and .xz."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.read = 0.0  # how much of it, from 0 to 1
        self.passed_over: dict[str, None] = {}  # fields that are no part of a passage
        try:
            self.bytes = self.path.stat().st_size
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        self.read, count = 0.0, 0
        for where, told in self._objects():
            try:
                passage = self._passage(told)
            except UserError as error:
                raise UserError(f"{self.path}, {where}: {error}") from error
            yield passage
            count += 1
        if not count:
            raise UserError(f'{self.path} holds no passages: give JSON objects with a "text", one on each line')
        self.read = 1.0

    def about(self) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return {"name": self.path.name, "sha256": digest, "bytes": self.bytes}

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """Each object, and the words for where it stands."""
        try:
            with self.path.open("rb") as raw, _unpacked(self.path, raw) as lines:
                seen = False
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    if not seen and line.lstrip().startswith("["):
                        yield from self._listed(line + lines.read())
                        return
                    seen = True
                    self.read = min(1.0, raw.tell() / max(1, self.bytes))
                    yield f"line {number}", self._json(line, f"{self.path}, line {number}")
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is no UTF-8 text ({error.reason})") from error
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{self.path} is damaged ({error}); fetch it again") from error
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def _listed(self, text: str) -> Iterator[tuple[str, Any]]:
        told = self._json(text, str(self.path))
        for place, each in enumerate(told, 1):
            self.read = place / len(told)
            yield f"passage {place}", each

    def _json(self, text: str, where: str) -> Any:
        try:
            return json.loads(text)
        except RecursionError as error:
            raise UserError(f"{where}: it is nested too deeply") from error
        except ValueError as error:
            raise UserError(f"{where}: it is no JSON ({error})") from error

    def _passage(self, told: Any) -> tuple[str, str, str]:
        if not isinstance(told, dict):
            raise UserError(f'a passage is a JSON object with a "text", and this is a {type(told).__name__}')
        if len(self.passed_over) < 100:
            self.passed_over |= dict.fromkeys(name for name in told if name not in FIELDS)
        id, title, text = told.get("id"), told.get("title"), told.get("text", "")
        if type(id) is int:
            id = str(id)
        for name, value in (("id", id or ""), ("title", title or ""), ("text", text)):
            if not isinstance(value, str):
                raise UserError(f'"{name}" must be a text')
        return checked(id, title or "", text)


def checked(id: str | None, title: str, text: str) -> tuple[str, str, str]:
    """A passage that can be kept: with an id, with a text, of whole characters."""
    if not text.strip():
        raise UserError('"text" must be a text, and not an empty one')
    try:
        (title + text + (id or "")).encode()
    except UnicodeEncodeError as error:
        raise UserError("it holds half a character (a lone surrogate)") from error
    if id is None:
        return passage_id(title, text), title, text
    if not id.strip() or len(id) > LONGEST_ID:
        raise UserError(f'"id" must be a text of 1 to {LONGEST_ID} characters, or left out')
    return id, title, text


def passage_id(title: str, text: str) -> str:
    """The id of a passage that has none: the same for the same title and text, anywhere."""
    return hashlib.sha256(json.dumps([title, text]).encode()).hexdigest()[:20]


def _unpacked(path: Path, raw: io.BufferedReader) -> io.TextIOWrapper:
    packed: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix)
    return io.TextIOWrapper(raw if packed is None else packed(raw), encoding="utf-8-sig")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror or error}")


# The engine -----------------------------------------------------------------------------------------------------------


def _schema() -> tantivy.Schema:
    """Format 1. `key` is drawn from the id, and orders passages of equal score."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_text_field("title", stored=True, tokenizer_name="english", index_option="freq")
    builder.add_text_field("text", stored=True, tokenizer_name="english", index_option="freq")
    builder.add_unsigned_field("key", fast=True)
    return builder.build()


def _analyzer(stop: bool = False) -> tantivy.TextAnalyzer:
    """Letters and digits in a row, lower case, without accents, by their English stem."""
    make = tantivy.Filter
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(make.remove_long(LONGEST_TERM))
    builder = builder.filter(make.lowercase()).filter(make.ascii_fold())
    if stop:
        builder = builder.filter(make.stopword("english"))
    return builder.filter(make.stemmer("english")).build()


def _best(searcher: tantivy.Searcher, query: tantivy.Query, k: int) -> list[tuple[float, tantivy.DocAddress]]:
    """The first `k` hits. The engine orders ties by where they happen to lie, and adds scores up in any order."""
    limit, all, hits = k + 16, searcher.num_docs, []
    while all:
        hits = searcher.search(query, min(limit, all), count=False).hits
        if len(hits) < limit or not _tied(hits[k - 1][0], hits[-1][0]) or limit >= max(WIDEST_TIE, k + 16):
            break
        limit *= 4
    keys = searcher.fast_field_values("key", [address for _, address in hits])
    rank, ranked = 0, []
    for place, ((score, address), key) in enumerate(zip(hits, keys, strict=True)):
        rank += place > 0 and not _tied(hits[place - 1][0], score)
        ranked.append((rank, key or 0, score, address))
    ranked.sort(key=lambda hit: hit[:2])
    return [(score, address) for _, _, score, address in ranked[:k]]


def _tied(score: float, lower: float) -> bool:
    return score - lower <= TIE * score


def _hit(document: tantivy.Document, score: float) -> Hit:
    told = document.to_dict()
    return Hit(told["id"][0], told["title"][0], told["text"][0], score)


def _whole(text: str) -> str:
    """Half a character, which Python lets pass, becomes a question mark."""
    return text.encode(errors="replace").decode()


@contextmanager
def _engine(path: Path, verb: str) -> Iterator[None]:
    """What the engine cannot do becomes one sentence, with the damaged files by name where there are any."""
    try:
        yield
    except BaseException as error:
        told = isinstance(error, ValueError | OSError)
        if not told and type(error).__name__ != "PanicException":
            raise
        if found := _damage(path):
            raise _damaged(path, found) from error
        if not told:
            raise
        kept = "; what was committed is kept" if verb == "write" else ""
        raise UserError(f"cannot {verb} {path}: {error}{kept}") from error


def _damaged(path: Path, found: list[str]) -> UserError:
    return UserError(f"{path} is damaged: {', '.join(found)}; restore it from a copy, or make it anew")


def _damage(path: Path) -> list[str]:
    """Files that are missing, cut short, or not what their checksum says."""
    folder = path / ENGINE
    while True:
        try:
            before = (folder / "meta.json").read_bytes()
            told = json.loads(before)["segments"]
            segments = [(each["segment_id"].replace("-", ""), each["deletes"]) for each in told]
        except OSError as error:
            return [f"{ENGINE}/meta.json is {_gone(error)}"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return [f"{ENGINE}/meta.json is no JSON of tantivy's"]
        names = [f"{segment}.{part}" for segment, _ in segments for part in SEGMENT]
        names += [f"{segment}.{deletes['opstamp']}.del" for segment, deletes in segments if deletes]
        found = [f"{ENGINE}/{name} is {state}" for name in names if (state := _state(folder / name)) != "whole"]
        try:
            json.loads((folder / ".managed.json").read_bytes())
        except OSError:
            pass  # it is only what the engine sweeps by
        except ValueError:
            found.append(f"{ENGINE}/.managed.json is no JSON")
        if not found or (folder / "meta.json").read_bytes() == before:  # else a writer has put others in their place
            return found


def _state(file: Path) -> str:
    """Of a file of the engine: a body, a footer in JSON with the body's CRC-32, the footer's length, and 1337."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - 8))
            length, magic = struct.unpack("<II", opened.read(8))
            if magic != 1337 or length > size - 8:
                return "cut short"
            opened.seek(size - 8 - length)
            crc, left, now = json.loads(opened.read(length))["crc"], size - 8 - length, 0
            opened.seek(0)
            while left:
                chunk = opened.read(min(left, 1 << 20))
                left, now = left - len(chunk), zlib.crc32(chunk, now)
    except OSError as error:
        return _gone(error)
    except struct.error:
        return "cut short"
    except (ValueError, LookupError, TypeError):
        return "damaged"
    return "whole" if now == crc else "damaged"


def _gone(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"not to be read ({error.strerror})"


# The folder -----------------------------------------------------------------------------------------------------------


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / META).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} is no index: it has no {META}; floatscope index add makes one") from error
    except OSError as error:
        raise _unreadable(path / META, error) from error
    except ValueError:
        meta = None
    theirs = meta.get("format") if isinstance(meta, dict) else None
    if isinstance(theirs, int) and theirs > FORMAT:
        raise UserError(
            f"{path} was written by a newer floatscope (index format {theirs}, and this one has {FORMAT}): "
            f"update floatscope, or make the index anew"
        )
    if not isinstance(meta, dict) or theirs != FORMAT or not {"floatscope", "tantivy", "files"} <= meta.keys():
        raise UserError(f"{path / META} is damaged, or not floatscope's; restore it from a copy, or make it anew")
    return meta


def _write_meta(path: Path, meta: dict[str, Any]) -> None:
    from floatscope.trace.atomic import write_atomic  # brings torch along, which searching need not wait for

    try:
        write_atomic(path / META, [json.dumps(meta, indent=1).encode() + b"\n"])
    except OSError as error:
        raise UserError(f"cannot write {path / META}: {error.strerror}") from error


def _check_place(path: Path) -> None:
    """Whether an index may begin here: in a folder that is new, empty, or left by a process killed at its birth."""
    if (path / META).exists():
        raise UserError(f"{path} already holds an index: open it, or give another path")
    if not path.exists():
        return
    ours = path.is_dir() and set(os.listdir(path)) <= {LOCK, META + ".part", ENGINE}
    if not ours or any((path / ENGINE).glob("*.store")):  # passages without a meta.json are not written over
        raise UserError(f"{path} exists and is no index (it has no {META}): give another path")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold index.lock, until the block is left or the process is gone, however it goes: the kernel frees an flock."""
    try:
        lock = (path / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
        except BlockingIOError as error:
            lock.seek(0)
            writer = lock.read().strip()
            raise UserError(f"{path} is being written by process {writer}: wait for it, or stop it") from error
        except OSError as error:  # a network disk without locks, or a full one
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        yield


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # merged into another one just now
        return 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
