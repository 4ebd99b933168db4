"""The formats of question answering files: one table of a name, what it is recognised by, and its reader.

    told = json.loads(line)
    format = detect(told)                     # by its fields; refused if none or several formats have them
    sample = format.read(told, "17")          # "17": its line or element, the id of what has none
    named("hotpot").read(told, "17")          # as the user says

A reader takes one object and gives one `Sample`. What it cannot read it refuses in one sentence, with the field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.formats import lost, multihop, own, paper, poisoned, squad
from floatscope.tasks.formats.fields import brief
from floatscope.tasks.sample import Sample

Told = dict[str, Any]


@dataclass(frozen=True)
class Format:
    name: str
    fields: str  # what an object of it has, in words
    looks: Callable[[Told], bool]
    read: Callable[[Told, str], Sample]


OWN = Format("own", "question, answer or answers, passages if any", own.looks, own.read)
FORMATS = (
    OWN,
    Format("paper", "input or query or question, passage[].segment, output or answers", paper.looks, paper.read),
    Format("lost-in-the-middle", "question, answers, ctxs", lost.looks, lost.read),
    Format("kv", "ordered_kv_records, key, value", lost.looks_kv, lost.read_kv),
    Format("squad", "data[].paragraphs[].qas, or context and answers with answer_start", squad.looks, squad.read),
    Format("hotpot", "question, answer, context, supporting_facts", multihop.looks_hotpot, multihop.read_hotpot),
    Format("2wiki", "as hotpot, and evidences", multihop.looks_2wiki, multihop.read_2wiki),
    Format("musique", "question, answer, paragraphs[].is_supporting", multihop.looks_musique, multihop.read_musique),
    Format("poisonedrag", "question, correct answer, incorrect answer, adv_texts", poisoned.looks, poisoned.read),
)


def named(name: str) -> Format:
    """The format of that name."""
    for format in FORMATS:
        if format.name == name:
            return format
    raise unknown_choice("format", name, [format.name for format in FORMATS])


def detect(told: Told) -> Format:
    """The format an object is of; our own has "passages", or is a question with an answer that no other claims."""
    found = [format for format in FORMATS if format is not OWN and format.looks(told) and "passages" not in told]
    if not found and own.looks(told):
        return OWN
    if len(found) == 1:
        return found[0]
    fields = [brief(name) for name in list(told)[:12]] + ["…"] * (len(told) > 12)
    seen = f"its fields are {', '.join(fields)}" if fields else "it has no fields"
    if found:
        raise UserError(
            f"{seen}, which fit {' and '.join(f.name for f in found)}; say which it is, by `format` (--format)"
        )
    known = "; ".join(f"{f.name} ({f.fields})" for f in FORMATS)
    raise UserError(f"{seen}, and no known format has just these; name one by `format` (--format): {known}")
