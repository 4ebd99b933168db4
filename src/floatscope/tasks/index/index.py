"""The index: add, remove, search and count passages."""

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
from floatscope.tasks.index.engine import (
    Hit,
    build_analyzer,
    build_document,
    build_schema,
    digest_passages,
    explain_engine_errors,
    find_best,
    read_hit,
    replace_surrogates,
)
from floatscope.tasks.index.folder import (
    ENGINE,
    FORMAT,
    META,
    check_free,
    lock_index,
    measure_size,
    read_meta,
    timestamp,
    write_meta,
)
from floatscope.tasks.index.integrity import damage_error, find_damage
from floatscope.tasks.index.passage_file import LONGEST_ID, PassageEntry, PassageFile, check_passage

BATCH_SIZE, BATCH_CHARACTERS = 10_000, 32_000_000  # of one commit


@dataclass(frozen=True)
class AddCounts:
    """How many passages were new, replaced one with the same id, or were already there."""

    added: int = 0
    replaced: int = 0
    unchanged: int = 0

    @property
    def passages(self) -> int:
        """The number of passages that were given."""
        return self.added + self.replaced + self.unchanged

    def __add__(self, other: AddCounts) -> AddCounts:
        return AddCounts(self.added + other.added, self.replaced + other.replaced, self.unchanged + other.unchanged)


@dataclass(frozen=True)
class IndexStats:
    """What an index contains, and which versions wrote it."""

    path: str
    passages: int
    digest: str  # of the passages; their order and history do not matter
    bytes: int
    format: int
    floatscope: str  # the version that created it
    tantivy: str  # likewise
    files: tuple[dict[str, Any], ...]  # the name, sha256, bytes, passages and last time of each file that was added

    @property
    def as_json(self) -> dict[str, Any]:
        """The statistics as a JSON object."""
        return asdict(self)


class Index:
    """A folder of passages that is searched by BM25. Open one with `Index.open` or `Index.create`.

    index = Index.create("wiki", exist_ok=True)
    index.add([("q-7", "Mira", "Mira lives in Velmora.")])
    index.search("Where does Mira live?", k=1)[0].id            # "q-7"
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_engine_errors(path, "read"):
            if not tantivy.Index.is_compatible(str(path / ENGINE)):
                raise UserError(f"{path} was written by another tantivy, which this one cannot read: build it again")
            self._index = tantivy.Index.open(str(path / ENGINE))
            self._index.config_reader("manual")
        self._index.register_tokenizer("english", build_analyzer())
        self._all_words, self._content_words = build_analyzer(), build_analyzer(stop=True)

    @classmethod
    def open(cls, path: str | Path) -> Index:
        """Open the index in a folder, to search and to write."""
        read_meta(Path(path))
        return cls(Path(path))

    @classmethod
    def create(cls, path: str | Path, *, exist_ok: bool = False) -> Index:
        """Create an empty index; with `exist_ok` open the existing one, if there is one."""
        path = Path(path)
        if exist_ok and (path / META).exists():
            return cls.open(path)
        try:
            check_free(path)
            path.mkdir(parents=True, exist_ok=True)
            with lock_index(path):
                check_free(path)  # again: another process may have created one before we held the lock
                (path / ENGINE).mkdir(exist_ok=True)
                with explain_engine_errors(path, "write"):
                    tantivy.Index(build_schema(), str(path / ENGINE))
                versions = {"floatscope": __version__, "tantivy": importlib.metadata.version("tantivy")}
                write_meta(path, {"format": FORMAT, "created": timestamp(), **versions, "files": []})
        except OSError as error:
            raise UserError(f"cannot create an index in {path}: {error.strerror}") from error
        return cls(path)

    # Writing ----------------------------------------------------------------------------------------------------------

    def add(
        self,
        passages: Iterable[PassageEntry],
        *,
        batch_size: int = BATCH_SIZE,
        on_progress: Callable[[AddCounts], object] | None = None,
    ) -> AddCounts:
        """Add passages; one with an existing id replaces the old one.

        Args:
            passages: (id, title, text) each; an id of None is made from title and text.
            batch_size: Passages per commit.
            on_progress: Called with the counts so far after each commit.
        """
        with lock_index(self.path):
            return self._add(passages, batch_size, on_progress)

    def add_file(
        self,
        path: str | Path | PassageFile,
        *,
        batch_size: int = BATCH_SIZE,
        on_progress: Callable[[AddCounts, float], object] | None = None,
    ) -> AddCounts:
        """Add the passages of a file and record the file in meta.json.

        `on_progress` is called with the counts so far and the share of the file that is read.
        """
        file = path if isinstance(path, PassageFile) else PassageFile(path)

        def report(counts: AddCounts) -> None:
            if on_progress is not None:
                on_progress(counts, file.progress)

        with lock_index(self.path):
            counts = self._add(file, batch_size, report)
            meta, entry = read_meta(self.path), {**file.describe(), "passages": counts.passages, "when": timestamp()}
            others = [known for known in meta["files"] if known["sha256"] != entry["sha256"]]
            write_meta(self.path, {**meta, "files": [*others, entry]})
        return counts

    def remove(self, ids: Iterable[str]) -> int:
        """Remove passages by id in one commit, and return how many of them existed."""
        with lock_index(self.path), self._open_writer() as writer:
            existing = [id for id in dict.fromkeys(ids) if self.get(id) is not None]
            with explain_engine_errors(self.path, "write"):
                for id in existing:
                    writer.delete_documents_by_term("id", id)
                writer.commit()
                self._index.reload()
        return len(existing)

    def _add(
        self,
        passages: Iterable[PassageEntry],
        batch_size: int,
        on_progress: Callable[[AddCounts], object] | None,
    ) -> AddCounts:
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}")
        counts, batch, characters = AddCounts(), dict[str, tuple[str, str]](), 0
        with self._open_writer() as writer:
            for entry in passages:
                id, title, text = check_passage(*entry)
                if id in batch:  # a second time in this batch
                    is_same = batch[id] == (title, text)
                    counts += AddCounts(unchanged=1) if is_same else AddCounts(replaced=1)
                batch[id] = title, text
                characters += len(title) + len(text)
                if len(batch) >= batch_size or characters >= BATCH_CHARACTERS:
                    counts += self._commit(writer, batch)
                    batch, characters = {}, 0
                    if on_progress is not None:
                        on_progress(counts)
            counts += self._commit(writer, batch)
            if on_progress is not None:
                on_progress(counts)
        return counts

    def _commit(self, writer: tantivy.IndexWriter, batch: dict[str, tuple[str, str]]) -> AddCounts:
        """Write the passages of a batch that are new or changed, and commit them."""
        added = replaced = 0
        with explain_engine_errors(self.path, "write"):
            for id, (title, text) in batch.items():
                known = self.get(id)
                if known is None:
                    added += 1
                elif (known.title, known.text) == (title, text):
                    continue
                else:
                    writer.delete_documents_by_term("id", id)
                    replaced += 1
                writer.add_document(build_document(id, title, text))
            if added or replaced:
                writer.commit()
                self._index.reload()
        return AddCounts(added, replaced, len(batch) - added - replaced)

    @contextmanager
    def _open_writer(self) -> Iterator[tantivy.IndexWriter]:
        """Open the engine's writer; uncommitted passages are dropped when the block ends."""
        with explain_engine_errors(self.path, "write"):
            self._index.reload()
            writer = self._index.writer()
        try:
            yield writer
        finally:
            with suppress(ValueError):  # a writer that failed has raised its error already
                writer.wait_merging_threads()
        with explain_engine_errors(self.path, "read"):
            self._index.reload()

    # Reading ----------------------------------------------------------------------------------------------------------

    def get(self, id: str) -> Hit | None:
        """Return the passage with this id, with a score of 0; None if there is none."""
        if len(id) > LONGEST_ID or replace_surrogates(id) != id:
            return None
        with explain_engine_errors(self.path, "read"):
            searcher = self._index.searcher()
            if not searcher.doc_freq("id", id):
                return None
            query = tantivy.Query.term_query(self._index.schema, "id", id, "basic")
            hits = searcher.search(query, 1, count=False).hits
            return read_hit(searcher.doc(hits[0][1]), 0.0) if hits else None

    def search(self, question: str, k: int = 5) -> list[Hit]:
        """Return the best `k` passages for a question, the best first; ids order passages of equal score."""
        if k < 1:
            raise UserError(f"k must be at least 1, got {k}")
        query = self._build_query(question)
        if query is None:
            return []
        with explain_engine_errors(self.path, "read"):
            searcher = self._index.searcher()
            return [read_hit(searcher.doc(address), score) for score, address in find_best(searcher, query, k)]

    def _build_query(self, question: str) -> tantivy.Query | None:
        """Match any word of the question in title or text; stop words count only if there are no others."""
        text = replace_surrogates(question)
        words = dict.fromkeys(self._content_words.analyze(text) or self._all_words.analyze(text))
        if not words:
            return None
        term, fields = tantivy.Query.term_query, self._index.schema
        clauses = [term(fields, name, word, "freq") for word in words for name in ("title", "text")]
        return tantivy.Query.boolean_query([(tantivy.Occur.Should, clause) for clause in clauses])

    def __len__(self) -> int:
        with explain_engine_errors(self.path, "read"):
            return int(self._index.searcher().num_docs)

    def stats(self) -> IndexStats:
        """Return the size, digest, versions and files of the index."""
        meta = read_meta(self.path)
        with explain_engine_errors(self.path, "read"):
            digest = digest_passages(self._index.searcher())
        versions = meta["format"], meta["floatscope"], meta["tantivy"]
        return IndexStats(str(self.path), len(self), digest, measure_size(self.path), *versions, tuple(meta["files"]))

    def check(self) -> None:
        """Read every byte of the index; raise one UserError that names all missing or damaged files."""
        if damage := find_damage(self.path):
            raise damage_error(self.path, damage)
