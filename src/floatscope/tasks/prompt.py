"""The one way a question is asked, and where everything stands in the text; then which tokens that is.

    prompt = prompt_of(sample)
    prompt.text                              # "Document 1: …\nDocument 2: …\nQuestion: …\nAnswer:"
    prompt.spans["document 2"]               # [(start, stop)], characters of the text
    tokens_of(prompt, covers)["gold"]        # positions of tokens, by the characters each of them covers

| region | is |
|---|---|
| `document 1`, `document 2`, … | the text of a passage |
| `gold` | the passages marked as such, whole |
| `evidence` | the answer inside them |
| `question` | the question itself |
| `template` | neither passage nor question: "Document 1: ", "Question: ", "Answer:", a chat template, special tokens |
| `prompt` | a text that was given as it is, by `bare` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from floatscope.tasks.sample import Sample

TEMPLATE = "Document {number}: {passage}\n… Question: {question}\nAnswer:"
"""As runs name it; what is written is below."""

WITHIN = ("gold", "evidence")
"""Regions that lie in others."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Prompt:
    text: str
    spans: dict[str, list[Span]]  # region → [start, stop) characters of `text`


def prompt_of(sample: Sample, question_first: bool = False) -> Prompt:
    """The passages in order, then the question; or the question before them."""
    told = [
        part
        for number, passage in enumerate(sample.passages, 1)
        for part in (
            ("template", f"Document {number}: "),
            (f"document {number}", passage.text),
            ("template", "\n"),
        )
    ]
    asked = [("template", "Question: "), ("question", sample.question), ("template", "\n")]
    parts = [*asked, *told] if question_first else [*told, *asked]
    text, spans = "", dict[str, list[Span]]()
    for region, part in [*parts, ("template", "Answer:")]:
        spans.setdefault(region, []).append((len(text), len(text) + len(part)))
        text += part
    for number, passage in enumerate(sample.passages, 1):
        ((start, stop),) = spans[f"document {number}"]
        if passage.gold:
            spans.setdefault("gold", []).append((start, stop))
        if passage.evidence:
            spans.setdefault("evidence", []).extend((start + a, start + b) for a, b in passage.evidence)
    return Prompt(text, spans)


def bare(text: str) -> Prompt:
    """A text as it is."""
    return Prompt(text, {"prompt": [(0, len(text))]})


def tokens_of(prompt: Prompt, covers: Sequence[Span | None]) -> dict[str, list[int]]:
    """Region → its tokens. Each token is in one part of the text, that which has most of its characters, of equals the
    first; `gold` has the tokens of its documents, `evidence` those that cover a character of it.

    `covers` says of each token which characters of the prompt it stands for: None for a special token, below 0 or
    beyond the end for what a chat template puts around the prompt. Both are `template`.
    """
    found: dict[str, list[int]] = {}
    for token, cover in enumerate(covers):
        for region in ["template"] if cover is None else _regions(prompt, *cover):
            found.setdefault(region, []).append(token)
    return found


def _regions(prompt: Prompt, start: int, stop: int) -> list[str]:
    if start < 0 >= stop or start >= len(prompt.text):
        return ["template"]
    last = max(stop, start + 1)  # a token that stands for no character is where it stands

    def shared(name: str) -> tuple[int, bool]:
        spans = prompt.spans[name]
        return sum(max(0, min(b, last) - max(a, start)) for a, b in spans), any(a <= start < b for a, b in spans)

    part = max((name for name in prompt.spans if name not in WITHIN), key=shared)
    within = [part] if prompt.spans[part][0] not in prompt.spans.get("gold", ()) else [part, "gold"]
    evidence = any(start < b and a < stop for a, b in prompt.spans.get("evidence", ()))
    return [*within, "evidence"] if evidence else within
