"""Where everything stands in a prompt, and which tokens that is; `tasks.template` has other ways to ask.

    prompt = prompt_of(sample)
    prompt.text                              # "Document 1: …\nDocument 2: …\nQuestion: …\nAnswer:"
    prompt.spans["document 2"]               # [(start, stop)], characters of the text
    tokens_of(prompt, covers)["gold"]        # positions of tokens, by the characters each of them covers

| region | is |
|---|---|
| `document 1`, `document 2`, … | the text of a passage, and its title where the template shows it |
| `gold` | the passages marked as such, whole |
| `evidence` | the answer inside them |
| `question` | the question itself, each time it stands there |
| `shot 1`, `shot 2`, … | an example with its answer, whole: its passages and its question are nothing of their own |
| `template` | the rest: "Document 1: ", "Question: ", "Answer:", an instruction, a chat template, special tokens |
| `prompt` | a text that was given as it is, by `bare` |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

from floatscope.tasks.sample import Sample
from floatscope.tasks.template import Prompt as Prompt
from floatscope.tasks.template import Span, template

TEMPLATE = "Document {number}: {passage}\n… Question: {question}\nAnswer:"
"""As runs name it; what is written is `templates/default.toml`."""

WITHIN = ("gold", "evidence")
"""Regions that lie in others."""


def prompt_of(sample: Sample, question_first: bool = False) -> Prompt:
    """The passages in order, then the question, or the question before them: as the twins learnt it."""
    return template("question-first" if question_first else "default").prompt(sample)


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
    names = [name for name in prompt.spans if name not in WITHIN]
    parts = sorted((*span, rank) for rank, name in enumerate(names) for span in prompt.spans[name])
    starts, gold = [start for start, _, _ in parts], set(prompt.spans.get("gold", ()))
    for token, cover in enumerate(covers):
        if cover is None or cover[0] < 0 >= cover[1] or cover[0] >= len(prompt.text):
            found.setdefault("template", []).append(token)
            continue
        start, stop = cover
        first = max(bisect_right(starts, start) - 1, 0)
        name = names[_part(parts[first : bisect_left(starts, max(stop, start + 1))], start, stop)]
        found.setdefault(name, []).append(token)
        if prompt.spans[name][0] in gold:
            found.setdefault("gold", []).append(token)
        if any(start < b and a < stop for a, b in prompt.spans.get("evidence", ())):
            found.setdefault("evidence", []).append(token)
    return found


def _part(parts: Sequence[tuple[int, int, int]], start: int, stop: int) -> int:
    """Of the (start, stop, rank) around a token, the rank that has most of it; of equals that which has its start."""
    if len(parts) == 1:  # nearly always
        return parts[0][2]
    shared: Counter[int] = Counter()
    for a, b, rank in parts:
        shared[rank] += min(b, stop) - max(a, start)
    return max(shared, key=lambda rank: (shared[rank], rank == parts[0][2], -rank))
