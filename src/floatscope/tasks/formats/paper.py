"""The files of the attention floating paper: KILT questions, each with the passages retrieved for it.

{"input": "…", "output": [{"answer": "…"}], "passage": [{"title": "…", "segment": "…"}]}

No passage is marked gold, so none has evidence. The paper shows a model the first five; all of them are read.
"""

from __future__ import annotations

from floatscope.tasks.formats.fields import (
    Record,
    build_passage,
    get_field,
    get_id,
    get_list,
    get_text,
    list_answers,
    require_answers,
    require_objects,
)
from floatscope.tasks.sample import Sample

QUESTION = ("input", "query", "question")
ANSWERS = ("output", "answer", "answers")


def matches(record: Record) -> bool:
    """Whether an object is a question of these files."""
    questions, answers = record.keys() & set(QUESTION), record.keys() & set(ANSWERS)
    is_theirs = "question" not in questions or answers == {"output"}
    return isinstance(record.get("passage"), list) or (bool(questions and answers) and is_theirs)


def read(record: Record, number: str) -> Sample:
    """Read a question with its retrieved passages."""
    parts = require_objects(get_list(record, "passage")) if "passage" in record else []
    return Sample(
        id=get_id(record, number, "id", "_id", "qid", "query_id"),
        question=get_text(record, *QUESTION),
        answers=require_answers(list_answers(get_field(record, *ANSWERS))),
        passages=tuple(build_passage(part, place, "segment") for place, part in enumerate(parts, 1)),
    )
