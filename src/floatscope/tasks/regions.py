"""The regions of a prompt: which characters, and which tokens, are passages, gold, evidence, question or template.

    prompt = load_template().prompt(sample)
    prompt.text                              # "Document 1: …\\nDocument 2: …\\nQuestion: …\\nAnswer:"
    prompt.spans["document 2"]               # [(start, stop)], characters of the text
    find_region_tokens(prompt, offsets)["gold"]      # token positions, from the character offsets of each token

| region | content |
|---|---|
| `document 1`, `document 2`, … | the text of a passage, and its title if the template shows it |
| `gold` | the passages that are marked gold |
| `evidence` | the answer inside them |
| `question` | the question, wherever the template writes it |
| `shot 1`, `shot 2`, … | a solved example; its passages and its question are not regions of their own |
| `template` | the rest: "Document 1: ", "Question: ", "Answer:", an instruction, a chat template, special tokens |
| `prompt` | a text that is not made from a sample (`Prompt.from_text`) |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]

NESTED_REGIONS = ("gold", "evidence")
"""Regions that lie inside others."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's text, and where each region is in it."""

    text: str
    spans: dict[str, list[Span]]  # region → [start, stop) characters of `text`

    @classmethod
    def from_text(cls, text: str) -> Prompt:
        """Wrap a text that is used as it is; all of it is the region `prompt`."""
        return cls(text, {"prompt": [(0, len(text))]})


def find_region_tokens(prompt: Prompt, offsets: Sequence[Span | None]) -> dict[str, list[int]]:
    """Map each region to the positions of its tokens.

    A token belongs to the part of the text that has most of its characters; ties go to the first part. `gold` has the
    tokens of its documents, `evidence` the tokens that cover at least one character of it.

    Args:
        prompt: The prompt that was encoded.
        offsets: The characters [start, stop) of the prompt that each token covers. None is a special token. A span
            before 0 or after the end is text that a chat template adds. Both belong to `template`.
    """
    tokens: dict[str, list[int]] = {}
    names = [name for name in prompt.spans if name not in NESTED_REGIONS]
    parts = sorted((*span, rank) for rank, name in enumerate(names) for span in prompt.spans[name])
    starts, gold = [start for start, _, _ in parts], set(prompt.spans.get("gold", ()))
    for token, offset in enumerate(offsets):
        if offset is None or offset[0] < 0 >= offset[1] or offset[0] >= len(prompt.text):
            tokens.setdefault("template", []).append(token)
            continue
        start, stop = offset
        first = max(bisect_right(starts, start) - 1, 0)
        name = names[_largest_part(parts[first : bisect_left(starts, max(stop, start + 1))], start, stop)]
        tokens.setdefault(name, []).append(token)
        if prompt.spans[name][0] in gold:
            tokens.setdefault("gold", []).append(token)
        if any(start < b and a < stop for a, b in prompt.spans.get("evidence", ())):
            tokens.setdefault("evidence", []).append(token)
    return tokens


def _largest_part(parts: Sequence[tuple[int, int, int]], start: int, stop: int) -> int:
    """Return the rank of the (start, stop, rank) that shares most characters with a token; ties go to its start."""
    if len(parts) == 1:  # nearly always
        return parts[0][2]
    shared: Counter[int] = Counter()
    for a, b, rank in parts:
        shared[rank] += min(b, stop) - max(a, start)
    return max(shared, key=lambda rank: (shared[rank], rank == parts[0][2], -rank))
