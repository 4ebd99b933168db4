"""The help of the commands: a description, and examples that run as written, one after the other, in any folder.

app.command("trace", **help_for("trace", trace))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

MAKE_INDEX = (
    """echo '{"id": "mira", "text": "Mira lives in Dramora."}' > passages.jsonl""",
    "floatscope index add wiki passages.jsonl",
)
MAKE_TEXT = "python -m pydoc builtins > notes.txt"

EXAMPLES: dict[str, Sequence[str]] = {
    "": ["floatscope demo --out demo"],
    "demo": ["floatscope demo --out demo"],
    "decode": [
        "printf '%s\\n' 'Document 1: Mira Velwick lives in Dramora.' \\\n"
        "  'Question: Where does Mira Velwick live?' 'Answer:' |\n"
        "  floatscope decode twin:mdm --prompt - --new-tokens 8"
    ],
    "lens": ["floatscope lens twin:mdm --data twin:reading-1 --limit 1 --new-tokens 4"],
    "data": ["floatscope data twin:reading-5", "floatscope data twin:two-hop --model twin:mdm"],
    "trace": ["floatscope trace twin:mdm-adapted --data twin:reading-5 --limit 2 --out mdm"],
    "report": [
        "floatscope trace twin:mdm --data twin:reading-5 --limit 2 --out runs/mdm",
        "floatscope report runs/mdm --out report.html",
    ],
    "eval": ["floatscope eval twin:mdm-adapted --data twin:reading-5 --limit 2 --out mdm-5"],
    "compare": [
        "floatscope eval twin:mdm --data twin:reading-5 --limit 2 \\\n  --passages 0 --out runs/mdm-0",
        "floatscope eval twin:mdm --data twin:reading-5 --limit 2 --out runs/mdm-5",
        "floatscope compare runs/mdm-0 runs/mdm-5 --out table.md",
    ],
    "stress": [
        "floatscope stress twin:arm twin:mdm --kind position --set documents=2 \\\n"
        "  --data twin:reading-5 --limit 2 --new-tokens 4 --out runs/position"
    ],
    "intervene": [
        "floatscope intervene --list",
        "floatscope intervene twin:mdm --edit 'mask_anchors(k=5)' --draws 1 \\\n"
        "  --data twin:reading-5 --limit 2 --new-tokens 4 --out runs/mask",
    ],
    "study": [
        "floatscope study sinks twin:mdm --set counts=5 --set draws=1 \\\n"
        "  --data twin:reading-5 --limit 2 --new-tokens 4 --out runs/sinks"
    ],
    "adapt": [
        MAKE_TEXT,
        "floatscope adapt twin:arm --text notes.txt --train-steps 2 \\\n  --batch-tokens 512 --workers 0 --out adapted",
    ],
    "doctor": ["floatscope doctor --json > doctor.json"],
    "models": ["floatscope models", "floatscope models twin:mdm"],
    "fetch": ["floatscope fetch smollm2"],
    "index add": MAKE_INDEX,
    "index remove": [*MAKE_INDEX, "floatscope index remove wiki mira"],
    "index search": [*MAKE_INDEX, 'floatscope index search wiki "Where does Mira live?" -k 3'],
    "index stat": [*MAKE_INDEX, "floatscope index stat wiki --check"],
    "twins": ["floatscope twins", "floatscope data twin:two-hop"],
    "twins train": [
        MAKE_TEXT,
        "floatscope twins train --tiny --text notes.txt --minutes 0.1 \\\n  --workers 0 --out twins",
    ],
}
"""A command → its examples; a line that begins with a space continues the one before."""


def help_for(name: str, command: Callable[..., None]) -> dict[str, Any]:
    """The help of a command, from its docstring, and its examples as the last paragraph."""
    paragraphs = inspect.getdoc(command) or ""
    unwrapped = [" ".join(paragraph.split()) for paragraph in paragraphs.split("\n\n")]
    examples = EXAMPLES[name]
    label = "Examples:" if len(examples) > 1 else "Example:"
    return {"help": "\n\n".join(unwrapped), "epilog": "\n".join([label, *examples])}
