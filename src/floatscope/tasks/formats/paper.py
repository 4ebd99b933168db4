"""The files of the attention floating paper: KILT's questions, each with the passages retrieved for it.

{"input": "…", "output": [{"answer": "…"}], "passage": [{"title": "…", "segment": "…"}]}

No passage is marked as gold, so none has evidence. The paper shows a model the first five; all of them are read.
"""

from __future__ import annotations

from floatscope.tasks.formats.fields import Told, identity, items, objects, passage, some, text, texts, the
from floatscope.tasks.sample import Sample

QUESTION = ("input", "query", "question")
ANSWERS = ("output", "answer", "answers")


def looks(told: Told) -> bool:
    asked, answered = told.keys() & set(QUESTION), told.keys() & set(ANSWERS)
    return "passage" in told or (bool(asked and answered) and ("question" not in asked or answered == {"output"}))


def read(told: Told, number: str) -> Sample:
    passages = items(told, "passage") if "passage" in told else []
    return Sample(
        id=identity(told, number, "id", "_id", "qid", "query_id"),
        question=text(told, *QUESTION),
        answers=some(texts(the(told, *ANSWERS))),
        passages=tuple(passage(part, place, "segment") for place, part in enumerate(objects(passages), 1)),
    )
