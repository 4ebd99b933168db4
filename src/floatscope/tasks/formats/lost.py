"""The files of "Lost in the middle": NQ-open questions among documents, and values among keys.

{"question": "…", "answers": ["…"], "ctxs": [{"title": "…", "text": "…", "hasanswer": true, "isgold": true}]}
{"ordered_kv_records": [["a54e…", "d1ff…"], …], "key": "2a8d…", "value": "bb3b…"}

Without `ctxs` the passage annotated in NQ is the only one. A record becomes the passage `"key": "value"`, as it stands
in the JSON of the paper's prompt. These files have no ids; a sample is named by its line.
"""

from __future__ import annotations

from floatscope.errors import UserError
from floatscope.tasks.formats.fields import (
    Told,
    brief,
    found,
    identity,
    items,
    objects,
    passage,
    some,
    text,
    texts,
    the,
    title,
)
from floatscope.tasks.sample import Passage, Sample

ANNOTATED = "nq_annotated_gold"


def looks(told: Told) -> bool:
    return "ctxs" in told or ANNOTATED in told


def read(told: Told, number: str) -> Sample:
    answers = some(texts(the(told, "answers")))
    contexts = objects(items(told, "ctxs")) if "ctxs" in told else []
    passages = [passage(context, place, "text", "isgold") for place, context in enumerate(contexts, 1)]
    if "ctxs" not in told:
        passages = [_annotated(told)]
    holds = [place for place, context in enumerate(contexts, 1) if context.get("hasanswer") is True]
    return Sample(
        id=identity(told, number, "id"),
        question=text(told, "question"),
        answers=answers,
        passages=found(passages, answers),
        meta={"has_answer": holds} if holds else {},
    )


def _annotated(told: Told) -> Passage:
    gold = the(told, ANNOTATED)
    if not isinstance(gold, dict):
        raise UserError(f'"{ANNOTATED}" must be an object')
    return Passage(title(gold), text(gold, "chunked_long_answer", "long_answer"), gold=True)


def looks_kv(told: Told) -> bool:
    return "ordered_kv_records" in told


def read_kv(told: Told, number: str) -> Sample:
    key, value = text(told, "key"), text(told, "value")
    records = items(told, "ordered_kv_records")
    for place, record in enumerate(records, 1):
        if not (isinstance(record, list) and len(record) == 2 and all(isinstance(part, str) for part in record)):
            raise UserError(f"record {place} must be a key and a value, two texts")
    if [key, value] not in records:
        raise UserError(f"none of its {len(records)} records has the key {brief(key)} and the value {brief(value)}")
    return Sample(
        id=identity(told, number, "id"),
        question=f'What is the value of the key "{key}"?',
        answers=(value,),
        passages=tuple(_record(k, v, gold=(k, v) == (key, value)) for k, v in records),
    )


def _record(key: str, value: str, gold: bool) -> Passage:
    before = f'"{key}": "'
    evidence = ((len(before), len(before) + len(value)),) if gold else ()
    return Passage("", f'{before}{value}"', gold, evidence)
