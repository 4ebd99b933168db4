"""HotpotQA, 2WikiMultiHopQA and MuSiQue: questions that need several of their passages, which are marked.

{"_id": "…", "question": "…", "answer": "…", "context": [["title", ["sentence"]]], "supporting_facts": [["title", 0]]}
{"id": "…", …, "context": {"title": […], "sentences": [[…], …]}, "supporting_facts": {"title": […], "sent_id": […]}}
{"id": "2hop__…", …, "paragraphs": [{"title": "…", "paragraph_text": "…", "is_supporting": true}]}

The first two, the original layout and Hugging Face's columns, serve HotpotQA and 2WikiMultiHopQA alike; only the second
of these has `evidences`. A passage is gold if a supporting fact names its title.
"""

from __future__ import annotations

from typing import Any

from floatscope.errors import UserError
from floatscope.tasks.formats.fields import Told, found, identity, items, objects, passage, some, text, texts, the
from floatscope.tasks.sample import Passage, Sample

ONLY_2WIKI = ("evidences", "evidences_id", "entity_ids")
TYPES_2WIKI = ("compositional", "inference", "bridge_comparison")


def looks_hotpot(told: Told) -> bool:
    return _has_facts(told) and not looks_2wiki(told)


def looks_2wiki(told: Told) -> bool:
    return _has_facts(told) and (any(name in told for name in ONLY_2WIKI) or told.get("type") in TYPES_2WIKI)


def looks_musique(told: Told) -> bool:
    paragraphs = told.get("paragraphs")
    return isinstance(paragraphs, list) and any(isinstance(p, dict) and "paragraph_text" in p for p in paragraphs)


def read_hotpot(told: Told, number: str) -> Sample:
    return _read(told, number, {name: told[name] for name in ("type", "level") if name in told})


def read_2wiki(told: Told, number: str) -> Sample:
    meta = {"type": told["type"]} if "type" in told else {}
    return _read(told, number, meta | ({"evidences": _triples(told["evidences"])} if "evidences" in told else {}))


def read_musique(told: Told, number: str) -> Sample:
    hidden = told.get("answerable") is False  # its answer is that of the twin question which can be answered
    answers = () if hidden else some(texts([the(told, "answer"), told.get("answer_aliases")]))
    parts = objects(items(told, "paragraphs"))
    passages = [passage(part, place, "paragraph_text", "is_supporting") for place, part in enumerate(parts, 1)]
    steps = told.get("question_decomposition")
    meta = {"hops": len(steps), "question_decomposition": steps} if isinstance(steps, list) else {}
    return Sample(
        id=identity(told, number, "id"),
        question=text(told, "question"),
        answers=answers,
        passages=found(passages, answers),
        meta=meta | ({"unanswerable": True} if hidden else {}),
    )


def _has_facts(told: Told) -> bool:
    return "context" in told and "supporting_facts" in told


def _read(told: Told, number: str, meta: dict[str, Any]) -> Sample:
    answers, gold = some(texts(the(told, "answer"))), _gold(the(told, "supporting_facts"))
    passages = [Passage(title, words, title in gold) for title, words in _context(the(told, "context"))]
    return Sample(
        id=identity(told, number, "id", "_id"),
        question=text(told, "question"),
        answers=answers,
        passages=found(passages, answers),
        meta=meta,
    )


def _context(told: Any) -> list[tuple[str, str]]:
    """Title and text of each paragraph, in either layout."""
    if isinstance(told, dict):
        titles, bodies = items(told, "title"), items(told, "sentences", "content")
        if len(titles) != len(bodies):
            raise UserError(f'"context" has {len(titles)} titles and {len(bodies)} paragraphs')
        told = [list(pair) for pair in zip(titles, bodies, strict=True)]
    if not isinstance(told, list):
        raise UserError('"context" must be a list of [title, sentences], or the columns "title" and "sentences"')
    return [_paragraph(pair, place) for place, pair in enumerate(told, 1)]


def _paragraph(pair: Any, place: int) -> tuple[str, str]:
    """Sentences that bring no space of their own are joined by one."""
    if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and _are_texts(pair[1])):
        raise UserError(f"passage {place} must be a title and a list of sentences")
    title, sentences = pair
    spaced = any(sentence[:1].isspace() for sentence in sentences[1:])
    joined = ("" if spaced else " ").join(sentences).strip()
    if not joined:
        raise UserError(f"passage {place} has no text")
    return title, joined


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _gold(told: Any) -> set[str]:
    """The titles supporting facts name, in either layout."""
    titles = told.get("title") if isinstance(told, dict) else _firsts(told)
    if not _are_texts(titles):
        raise UserError('"supporting_facts" must be a list of [title, sentence], or have a column "title"')
    return set(titles or ())


def _firsts(told: Any) -> list[Any] | None:
    pairs = isinstance(told, list) and all(isinstance(fact, list) and fact for fact in told)
    return [fact[0] for fact in told] if pairs else None


def _triples(told: Any) -> Any:
    """Facts as [subject, relation, object], from columns too."""
    columns = [told.get(name) for name in ("fact", "relation", "entity")] if isinstance(told, dict) else []
    if columns and all(isinstance(column, list) for column in columns):
        return [list(triple) for triple in zip(*columns, strict=False)]
    return told
