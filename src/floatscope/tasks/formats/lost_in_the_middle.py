"""The files of "Lost in the middle": NQ-open questions with documents, and key-value retrieval.

{"question": "…", "answers": ["…"], "ctxs": [{"title": "…", "text": "…", "hasanswer": true, "isgold": true}]}
{"ordered_kv_records": [["a54e…", "d1ff…"], …], "key": "2a8d…", "value": "bb3b…"}

Without `ctxs` the passage that NQ annotates is the only one. A record becomes the passage `"key": "value"`, as in the
JSON of the paper's prompt. These files have no ids; a sample is named by its line.
"""

from __future__ import annotations

from floatscope.errors import UserError
from floatscope.tasks.formats.fields import (
    Record,
    add_evidence,
    build_passage,
    get_field,
    get_id,
    get_list,
    get_text,
    get_title,
    list_answers,
    require_answers,
    require_objects,
    shorten,
)
from floatscope.tasks.sample import Passage, Sample

ANNOTATED = "nq_annotated_gold"


def matches(record: Record) -> bool:
    """Whether an object is an NQ-open question of these files."""
    return "ctxs" in record or ANNOTATED in record


def read(record: Record, number: str) -> Sample:
    """Read an NQ-open question with its documents."""
    answers = require_answers(list_answers(get_field(record, "answers")))
    contexts = require_objects(get_list(record, "ctxs")) if "ctxs" in record else []
    passages = [build_passage(context, place, "text", "isgold") for place, context in enumerate(contexts, 1)]
    if "ctxs" not in record:
        passages = [_read_annotated(record)]
    has_answer = [place for place, context in enumerate(contexts, 1) if context.get("hasanswer") is True]
    return Sample(
        id=get_id(record, number, "id"),
        question=get_text(record, "question"),
        answers=answers,
        passages=add_evidence(passages, answers),
        meta={"has_answer": has_answer} if has_answer else {},
    )


def _read_annotated(record: Record) -> Passage:
    gold = get_field(record, ANNOTATED)
    if not isinstance(gold, dict):
        raise UserError(f'"{ANNOTATED}" must be an object')
    return Passage(get_title(gold), get_text(gold, "chunked_long_answer", "long_answer"), gold=True)


def matches_kv(record: Record) -> bool:
    """Whether an object is a key-value retrieval task."""
    return "ordered_kv_records" in record


def read_kv(record: Record, number: str) -> Sample:
    """Read a key-value retrieval task; each record is a passage, and the one with the key is gold."""
    key, value = get_text(record, "key"), get_text(record, "value")
    pairs = get_list(record, "ordered_kv_records")
    for place, pair in enumerate(pairs, 1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise UserError(f"record {place} must be a key and a value, two texts")
    if [key, value] not in pairs:
        raise UserError(f"none of its {len(pairs)} records has the key {shorten(key)} and the value {shorten(value)}")
    return Sample(
        id=get_id(record, number, "id"),
        question=f'What is the value of the key "{key}"?',
        answers=(value,),
        passages=tuple(_build_pair(k, v, gold=(k, v) == (key, value)) for k, v in pairs),
    )


def _build_pair(key: str, value: str, gold: bool) -> Passage:
    before = f'"{key}": "'
    evidence = ((len(before), len(before) + len(value)),) if gold else ()
    return Passage("", f'{before}{value}"', gold, evidence)
