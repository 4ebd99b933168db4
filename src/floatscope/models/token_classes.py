"""Token classes: what a token is by its id and its text. Analyses and interventions share them.

    classify_token(13, "\\n", bos=None, mask=None, special_ids=())     # "newline"

Structure is everything that carries form: the beginning of the text, masks, special tokens, the words of the template,
line breaks and punctuation. The rest is content. `template` depends on the position of a token, not on the token
itself: text in the region TEMPLATE belongs to it.
"""

from __future__ import annotations

from collections.abc import Collection

CLASSES = ("bos", "mask", "special", "template", "newline", "punctuation", "content")
STRUCTURE = CLASSES[:-1]
TEMPLATE = "template"
"""The region with the words of the template itself."""


def classify_token(token_id: int, text: str, *, bos: int | None, mask: int | None, special_ids: Collection[int]) -> str:
    """Return the first of CLASSES that fits a token, without regard to its position.

    A bos that is not the first token of a text is `special`.
    """
    if token_id == bos:
        return "bos"
    if token_id == mask:
        return "mask"
    if token_id in special_ids:
        return "special"
    if not text.strip():
        return "newline"
    return "content" if any(character.isalnum() for character in text) else "punctuation"
