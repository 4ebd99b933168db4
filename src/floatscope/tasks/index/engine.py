"""The search engine (tantivy): how it stores passages, splits words, and ranks hits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tantivy

from floatscope.errors import UserError
from floatscope.tasks.index.integrity import damage_error, find_damage

LONGEST_TERM = 100
TIE, WIDEST_TIE = 1e-6, 65_536


@dataclass(frozen=True)
class Hit:
    """A passage of an index and its BM25 score for a question."""

    id: str
    title: str
    text: str
    score: float


def build_schema() -> tantivy.Schema:
    """Return the schema of index format 2.

    `key` is a hash of the id and orders passages of equal score; `content` is a hash of id, title and text.
    """
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_text_field("title", stored=True, tokenizer_name="english", index_option="freq")
    builder.add_text_field("text", stored=True, tokenizer_name="english", index_option="freq")
    builder.add_unsigned_field("key", fast=True)
    builder.add_unsigned_field("content", fast=True)
    return builder.build()


def build_analyzer(stop: bool = False) -> tantivy.TextAnalyzer:
    """Return the analyzer: runs of letters and digits, lower case, no accents, English stems; `stop`: no stop words."""
    make = tantivy.Filter
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(make.remove_long(LONGEST_TERM))
    builder = builder.filter(make.lowercase()).filter(make.ascii_fold())
    if stop:
        builder = builder.filter(make.stopword("english"))
    return builder.filter(make.stemmer("english")).build()


def build_document(id: str, title: str, text: str) -> tantivy.Document:
    """Return a passage as the engine stores it."""
    document = tantivy.Document(id=id, title=title, text=text)
    document.add_unsigned("key", _hash(id))
    document.add_unsigned("content", _hash(json.dumps([id, title, text])))
    return document


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def digest_passages(searcher: tantivy.Searcher) -> str:
    """Return a digest of all passages; their order and history do not matter."""
    hits = searcher.search(tantivy.Query.all_query(), max(1, searcher.num_docs), count=False).hits
    contents = searcher.fast_field_values("content", [address for _, address in hits])
    return hashlib.sha256(b"".join(sorted(int(content or 0).to_bytes(8) for content in contents))).hexdigest()


def find_best(searcher: tantivy.Searcher, query: tantivy.Query, k: int) -> list[tuple[float, tantivy.DocAddress]]:
    """Return the best `k` hits in an order that does not depend on the engine.

    The engine orders ties by where they are stored, and sums scores in any order. So more hits than `k` are fetched,
    until the last one is no tie, and ties are ordered by `key`.
    """
    limit, total, hits = k + 16, searcher.num_docs, []
    while total:
        hits = searcher.search(query, min(limit, total), count=False).hits
        if len(hits) < limit or not _is_tie(hits[k - 1][0], hits[-1][0]) or limit >= max(WIDEST_TIE, k + 16):
            break
        limit *= 4
    keys = searcher.fast_field_values("key", [address for _, address in hits])
    rank, ranked = 0, []
    for place, ((score, address), key) in enumerate(zip(hits, keys, strict=True)):
        rank += place > 0 and not _is_tie(hits[place - 1][0], score)
        ranked.append((rank, key or 0, score, address))
    ranked.sort(key=lambda hit: hit[:2])
    return [(score, address) for _, _, score, address in ranked[:k]]


def _is_tie(score: float, lower: float) -> bool:
    return score - lower <= TIE * score


def read_hit(document: tantivy.Document, score: float) -> Hit:
    """Return a stored document as a hit."""
    fields = document.to_dict()
    return Hit(fields["id"][0], fields["title"][0], fields["text"][0], score)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which Python allows in a text, by question marks."""
    return text.encode(errors="replace").decode()


@contextmanager
def explain_engine_errors(path: Path, verb: str) -> Iterator[None]:
    """Turn an error of the engine into one sentence that names the damaged files, if there are any."""
    try:
        yield
    except BaseException as error:
        is_expected = isinstance(error, ValueError | OSError)
        if not is_expected and type(error).__name__ != "PanicException":
            raise
        if damage := find_damage(path):
            raise damage_error(path, damage) from error
        if not is_expected:
            raise
        note = "; committed passages are safe" if verb == "write" else ""
        raise UserError(f"cannot {verb} {path}: {error}{note}") from error
