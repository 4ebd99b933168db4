"""The formats of question answering files: one table with a name, a test that recognises it, and a reader.

    record = json.loads(line)
    format = detect_format(record)              # by its fields; a UserError if no format or several match
    sample = format.read(record, "17")          # "17": its line or element, the id of a record that has none
    get_format("hotpot").read(record, "17")     # the format that the user names

A reader turns one object into one `Sample`. Its errors are one sentence that names the field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from floatscope.errors import UserError, unknown_choice
from floatscope.tasks.formats import lost_in_the_middle, multihop, own, paper, poisonedrag, squad
from floatscope.tasks.formats.fields import Record, shorten
from floatscope.tasks.sample import Sample


@dataclass(frozen=True)
class Format:
    """A file format: `matches` recognises an object of it, `read` turns the object into a sample."""

    name: str
    fields: str  # the fields of an object, in words
    matches: Callable[[Record], bool]
    read: Callable[[Record, str], Sample]


OWN = Format("own", "question, answer or answers, optional passages", own.matches, own.read)
FORMATS = (
    OWN,
    Format("paper", "input or query or question, passage[].segment, output or answers", paper.matches, paper.read),
    Format("lost-in-the-middle", "question, answers, ctxs", lost_in_the_middle.matches, lost_in_the_middle.read),
    Format("kv", "ordered_kv_records, key, value", lost_in_the_middle.matches_kv, lost_in_the_middle.read_kv),
    Format("squad", "data[].paragraphs[].qas, or context and answers with answer_start", squad.matches, squad.read),
    Format("hotpot", "question, answer, context, supporting_facts", multihop.matches_hotpot, multihop.read_hotpot),
    Format("2wiki", "as hotpot, and evidences", multihop.matches_2wiki, multihop.read_2wiki),
    Format("musique", "question, answer, paragraphs[].is_supporting", multihop.matches_musique, multihop.read_musique),
    Format(
        "poisonedrag", "question, correct answer, incorrect answer, adv_texts", poisonedrag.matches, poisonedrag.read
    ),
)


def get_format(name: str) -> Format:
    """Return the format with this name."""
    for format in FORMATS:
        if format.name == name:
            return format
    raise unknown_choice("format", name, [format.name for format in FORMATS])


def detect_format(record: Record) -> Format:
    """Return the format of an object.

    `own` has "passages", or is a question with an answer that matches no other format.
    """
    others = [format for format in FORMATS if format is not OWN and "passages" not in record]
    matching = [format for format in others if format.matches(record)]
    if not matching and own.matches(record):
        return OWN
    if len(matching) == 1:
        return matching[0]
    names = [shorten(name) for name in list(record)[:12]] + ["…"] * (len(record) > 12)
    fields = f"its fields are {', '.join(names)}" if names else "it has no fields"
    if matching:
        raise UserError(f"{fields}, which match {' and '.join(f.name for f in matching)}; give `format` (--format)")
    known = "; ".join(f"{f.name} ({f.fields})" for f in FORMATS)
    raise UserError(f"{fields}, which match no known format; give `format` (--format): {known}")
