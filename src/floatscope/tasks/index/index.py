"""An index: passages are added, removed, found and counted."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tantivy

from floatscope import __version__
from floatscope.errors import UserError
from floatscope.tasks.index.damage import damage, damaged
from floatscope.tasks.index.engine import Hit, analyzer, best, digest, document, guarded, hit, schema, whole
from floatscope.tasks.index.folder import ENGINE, FORMAT, META, check_place, locked, now, read_meta, size, write_meta
from floatscope.tasks.index.passages import LONGEST_ID, Entry, PassageFile, checked

BATCH, BATCH_CHARACTERS = 10_000, 32_000_000  # of a commit


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
    digest: str  # of the passages, whatever their order and history
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
        with guarded(path, "read"):
            if not tantivy.Index.is_compatible(str(path / ENGINE)):
                raise UserError(f"{path} was written by another tantivy, which this one cannot read: make it anew")
            self._index = tantivy.Index.open(str(path / ENGINE))
            self._index.config_reader("manual")
        self._index.register_tokenizer("english", analyzer())
        self._words, self._telling = analyzer(), analyzer(stop=True)

    @classmethod
    def open(cls, path: str | Path) -> Index:
        """The index in a folder, to search and to write."""
        read_meta(Path(path))
        return cls(Path(path))

    @classmethod
    def create(cls, path: str | Path, *, exist_ok: bool = False) -> Index:
        """A new, empty index; with `exist_ok` the one that is there, if there is one."""
        path = Path(path)
        if exist_ok and (path / META).exists():
            return cls.open(path)
        try:
            check_place(path)
            path.mkdir(parents=True, exist_ok=True)
            with locked(path):
                check_place(path)  # again: until the lock was ours, another process may have begun here
                (path / ENGINE).mkdir(exist_ok=True)
                with guarded(path, "write"):
                    tantivy.Index(schema(), str(path / ENGINE))
                made = {"floatscope": __version__, "tantivy": importlib.metadata.version("tantivy")}
                write_meta(path, {"format": FORMAT, "created": now(), **made, "files": []})
        except OSError as error:
            raise UserError(f"cannot make an index in {path}: {error.strerror}") from error
        return cls(path)

    # Writing ----------------------------------------------------------------------------------------------------------

    def add(
        self, passages: Iterable[Entry], *, batch: int = BATCH, told: Callable[[Added], object] | None = None
    ) -> Added:
        """Add (id, title, text), replacing what has the same id; after each commit `told` hears the counts so far."""
        with locked(self.path):
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

        with locked(self.path):
            counts = self._add(file, batch, tell)
            meta, entry = read_meta(self.path), {**file.about(), "passages": counts.passages, "when": now()}
            others = [known for known in meta["files"] if known["sha256"] != entry["sha256"]]
            write_meta(self.path, {**meta, "files": [*others, entry]})
        return counts

    def remove(self, ids: Iterable[str]) -> int:
        """Remove passages by id, in one commit; how many of them were there."""
        with locked(self.path), self._writer() as writer:
            here = [id for id in dict.fromkeys(ids) if self.get(id) is not None]
            with guarded(self.path, "write"):
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
        with guarded(self.path, "write"):
            for id, (title, text) in waiting.items():
                known = self.get(id)
                if known is None:
                    added += 1
                elif (known.title, known.text) == (title, text):
                    continue
                else:
                    writer.delete_documents_by_term("id", id)
                    replaced += 1
                writer.add_document(document(id, title, text))
            if added or replaced:
                writer.commit()
                self._index.reload()
        return Added(added, replaced, len(waiting) - added - replaced)

    @contextmanager
    def _writer(self) -> Iterator[tantivy.IndexWriter]:
        """The engine's writer; what it has not committed when the block is left is dropped."""
        with guarded(self.path, "write"):
            self._index.reload()
            writer = self._index.writer()
        try:
            yield writer
        finally:
            with suppress(ValueError):  # a writer that failed has said so already
                writer.wait_merging_threads()
        with guarded(self.path, "read"):
            self._index.reload()

    # Reading ----------------------------------------------------------------------------------------------------------

    def get(self, id: str) -> Hit | None:
        """The passage of an id; its score is 0."""
        if len(id) > LONGEST_ID or whole(id) != id:
            return None
        with guarded(self.path, "read"):
            searcher = self._index.searcher()
            if not searcher.doc_freq("id", id):
                return None
            query = tantivy.Query.term_query(self._index.schema, "id", id, "basic")
            hits = searcher.search(query, 1, count=False).hits
            return hit(searcher.doc(hits[0][1]), 0.0) if hits else None

    def search(self, question: str, k: int = 5) -> list[Hit]:
        """The best `k` passages for a question in any words; of equal scores, in an order that only ids decide."""
        if k < 1:
            raise UserError(f"k must be at least 1, got {k}")
        query = self._query(question)
        if query is None:
            return []
        with guarded(self.path, "read"):
            searcher = self._index.searcher()
            return [hit(searcher.doc(address), score) for score, address in best(searcher, query, k)]

    def search_many(self, questions: Iterable[str], k: int = 5) -> list[list[Hit]]:
        return [self.search(question, k) for question in questions]

    def _query(self, question: str) -> tantivy.Query | None:
        """Any of the question's words in title or text; its punctuation says nothing, and stop words only if alone."""
        text = whole(question)
        words = dict.fromkeys(self._telling.analyze(text) or self._words.analyze(text))
        if not words:
            return None
        term, fields = tantivy.Query.term_query, self._index.schema
        clauses = [term(fields, name, word, "freq") for word in words for name in ("title", "text")]
        return tantivy.Query.boolean_query([(tantivy.Occur.Should, clause) for clause in clauses])

    def __len__(self) -> int:
        with guarded(self.path, "read"):
            return int(self._index.searcher().num_docs)

    def stat(self) -> Stat:
        meta = read_meta(self.path)
        with guarded(self.path, "read"):
            contents = digest(self._index.searcher())
        made = meta["format"], meta["floatscope"], meta["tantivy"]
        return Stat(str(self.path), len(self), contents, size(self.path), *made, tuple(meta["files"]))

    def check(self) -> None:
        """Read every byte of the index; one `UserError` names all files that are missing or damaged."""
        if found := damage(self.path):
            raise damaged(self.path, found)
