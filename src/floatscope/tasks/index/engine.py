"""What is the engine's: how it keeps passages, how it cuts words, which hits are the best."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tantivy

from floatscope.errors import UserError
from floatscope.tasks.index.damage import damage, damaged

LONGEST_TERM = 100
TIE, WIDEST_TIE = 1e-6, 65_536


@dataclass(frozen=True)
class Hit:
    id: str
    title: str
    text: str
    score: float


def schema() -> tantivy.Schema:
    """Format 2. `key` is drawn from the id, and orders passages of equal score; `content` is drawn from all three."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_text_field("title", stored=True, tokenizer_name="english", index_option="freq")
    builder.add_text_field("text", stored=True, tokenizer_name="english", index_option="freq")
    builder.add_unsigned_field("key", fast=True)
    builder.add_unsigned_field("content", fast=True)
    return builder.build()


def analyzer(stop: bool = False) -> tantivy.TextAnalyzer:
    """Letters and digits in a row, lower case, without accents, by their English stem."""
    make = tantivy.Filter
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(make.remove_long(LONGEST_TERM))
    builder = builder.filter(make.lowercase()).filter(make.ascii_fold())
    if stop:
        builder = builder.filter(make.stopword("english"))
    return builder.filter(make.stemmer("english")).build()


def document(id: str, title: str, text: str) -> tantivy.Document:
    made = tantivy.Document(id=id, title=title, text=text)
    made.add_unsigned("key", _drawn(id))
    made.add_unsigned("content", _drawn(json.dumps([id, title, text])))
    return made


def _drawn(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def digest(searcher: tantivy.Searcher) -> str:
    """The same for the same passages, however they came to be there."""
    every = searcher.search(tantivy.Query.all_query(), max(1, searcher.num_docs), count=False).hits
    contents = searcher.fast_field_values("content", [address for _, address in every])
    return hashlib.sha256(b"".join(sorted(int(content or 0).to_bytes(8) for content in contents))).hexdigest()


def best(searcher: tantivy.Searcher, query: tantivy.Query, k: int) -> list[tuple[float, tantivy.DocAddress]]:
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


def hit(found: tantivy.Document, score: float) -> Hit:
    told = found.to_dict()
    return Hit(told["id"][0], told["title"][0], told["text"][0], score)


def whole(text: str) -> str:
    """Half a character, which Python lets pass, becomes a question mark."""
    return text.encode(errors="replace").decode()


@contextmanager
def guarded(path: Path, verb: str) -> Iterator[None]:
    """What the engine cannot do becomes one sentence, with the damaged files by name where there are any."""
    try:
        yield
    except BaseException as error:
        told = isinstance(error, ValueError | OSError)
        if not told and type(error).__name__ != "PanicException":
            raise
        if found := damage(path):
            raise damaged(path, found) from error
        if not told:
            raise
        kept = "; what was committed is kept" if verb == "write" else ""
        raise UserError(f"cannot {verb} {path}: {error}{kept}") from error
