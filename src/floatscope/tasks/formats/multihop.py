"""HotpotQA, 2WikiMultiHopQA and MuSiQue: questions that need several of their passages, which are marked.

{"_id": "…", "question": "…", "answer": "…", "context": [["title", ["sentence"]]], "supporting_facts": [["title", 0]]}
{"id": "…", …, "context": {"title": […], "sentences": [[…], …]}, "supporting_facts": {"title": […], "sent_id": […]}}
{"id": "2hop__…", …, "paragraphs": [{"title": "…", "paragraph_text": "…", "is_supporting": true}]}

HotpotQA and 2WikiMultiHopQA share the first two layouts, the original one and the columns of Hugging Face; only
2WikiMultiHopQA has `evidences`. A passage is gold if a supporting fact names its title.
"""

from __future__ import annotations

from typing import Any

from floatscope.errors import UserError
from floatscope.tasks.formats.fields import (
    Record,
    add_evidence,
    build_passage,
    get_field,
    get_id,
    get_list,
    get_text,
    list_answers,
    require_answers,
    require_objects,
)
from floatscope.tasks.sample import Passage, Sample

ONLY_2WIKI = ("evidences", "evidences_id", "entity_ids")
TYPES_2WIKI = ("compositional", "inference", "bridge_comparison")


def matches_hotpot(record: Record) -> bool:
    """Whether an object is a question of HotpotQA."""
    return _has_facts(record) and not matches_2wiki(record)


def matches_2wiki(record: Record) -> bool:
    """Whether an object is a question of 2WikiMultiHopQA."""
    return _has_facts(record) and (any(name in record for name in ONLY_2WIKI) or record.get("type") in TYPES_2WIKI)


def matches_musique(record: Record) -> bool:
    """Whether an object is a question of MuSiQue."""
    paragraphs = record.get("paragraphs")
    return isinstance(paragraphs, list) and any(isinstance(p, dict) and "paragraph_text" in p for p in paragraphs)


def read_hotpot(record: Record, number: str) -> Sample:
    """Read a question of HotpotQA; `meta` has its type and level."""
    return _read(record, number, {name: record[name] for name in ("type", "level") if name in record})


def read_2wiki(record: Record, number: str) -> Sample:
    """Read a question of 2WikiMultiHopQA; `meta` has its type and evidences."""
    meta = {"type": record["type"]} if "type" in record else {}
    meta |= {"evidences": _list_triples(record["evidences"])} if "evidences" in record else {}
    return _read(record, number, meta)


def read_musique(record: Record, number: str) -> Sample:
    """Read a question of MuSiQue; `meta` has its hops and whether it is unanswerable."""
    is_unanswerable = record.get("answerable") is False  # its answer belongs to the paired question that has one
    answers: tuple[str, ...] = ()
    if not is_unanswerable:
        answers = require_answers(list_answers([get_field(record, "answer"), record.get("answer_aliases")]))
    parts = require_objects(get_list(record, "paragraphs"))
    passages = [build_passage(part, place, "paragraph_text", "is_supporting") for place, part in enumerate(parts, 1)]
    steps = record.get("question_decomposition")
    meta = {"hops": len(steps), "question_decomposition": steps} if isinstance(steps, list) else {}
    return Sample(
        id=get_id(record, number, "id"),
        question=get_text(record, "question"),
        answers=answers,
        passages=add_evidence(passages, answers),
        meta=meta | ({"unanswerable": True} if is_unanswerable else {}),
    )


def _has_facts(record: Record) -> bool:
    return "context" in record and "supporting_facts" in record


def _read(record: Record, number: str, meta: dict[str, Any]) -> Sample:
    answers = require_answers(list_answers(get_field(record, "answer")))
    gold = _get_gold_titles(get_field(record, "supporting_facts"))
    paragraphs = _list_paragraphs(get_field(record, "context"))
    passages = [Passage(title, text, title in gold) for title, text in paragraphs]
    return Sample(
        id=get_id(record, number, "id", "_id"),
        question=get_text(record, "question"),
        answers=answers,
        passages=add_evidence(passages, answers),
        meta=meta,
    )


def _list_paragraphs(context: Any) -> list[tuple[str, str]]:
    """Return the title and text of each paragraph, from either layout."""
    if isinstance(context, dict):
        titles, bodies = get_list(context, "title"), get_list(context, "sentences", "content")
        if len(titles) != len(bodies):
            raise UserError(f'"context" has {len(titles)} titles and {len(bodies)} paragraphs')
        context = [list(pair) for pair in zip(titles, bodies, strict=True)]
    if not isinstance(context, list):
        raise UserError('"context" must be a list of [title, sentences], or the columns "title" and "sentences"')
    return [_join_sentences(pair, place) for place, pair in enumerate(context, 1)]


def _join_sentences(pair: Any, place: int) -> tuple[str, str]:
    """Join the sentences of a paragraph; add spaces unless the sentences begin with their own."""
    if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and _are_texts(pair[1])):
        raise UserError(f"passage {place} must be a title and a list of sentences")
    title, sentences = pair
    has_spaces = any(sentence[:1].isspace() for sentence in sentences[1:])
    text = ("" if has_spaces else " ").join(sentences).strip()
    if not text:
        raise UserError(f"passage {place} has no text")
    return title, text


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _get_gold_titles(facts: Any) -> set[str]:
    """Return the titles that the supporting facts name, from either layout."""
    titles = facts.get("title") if isinstance(facts, dict) else _list_first_parts(facts)
    if not _are_texts(titles):
        raise UserError('"supporting_facts" must be a list of [title, sentence], or have a column "title"')
    return set(titles or ())


def _list_first_parts(facts: Any) -> list[Any] | None:
    are_pairs = isinstance(facts, list) and all(isinstance(fact, list) and fact for fact in facts)
    return [fact[0] for fact in facts] if are_pairs else None


def _list_triples(facts: Any) -> Any:
    """Return facts as [subject, relation, object], also from columns."""
    columns = [facts.get(name) for name in ("fact", "relation", "entity")] if isinstance(facts, dict) else []
    if columns and all(isinstance(column, list) for column in columns):
        return [list(triple) for triple in zip(*columns, strict=False)]
    return facts
