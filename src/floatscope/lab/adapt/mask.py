"""Which token becomes the mask.

mask_id = choose_mask(model, None)                  # a token id that no text has
mask_id = choose_mask(model, "<empty_output>")      # a token by name, or by its id; "new": one more row
"""

from __future__ import annotations

import re
from typing import NoReturn

import numpy as np

from floatscope.errors import UserError, printable
from floatscope.models.model import Model
from floatscope.models.text import ModelTokenizer

RESERVED = re.compile(r"<?[|\[<]*(mask|reserved|unused|extra|dummy|placeholder)[\w.-]*[|\]>]*", re.IGNORECASE)
NEW = "new"


def text_of(model: Model) -> ModelTokenizer:
    if model.tokenizer is None:
        raise UserError(f"{model.spec.name} has no tokenizer, and an adaptation reads text; give a base that has one")
    return model.tokenizer


def choose_mask(model: Model, asked: str | None) -> int:
    """The id; where no token is free, a sentence that says what can be given."""
    text, rows = text_of(model), model.vocabulary
    if asked == NEW:
        return rows
    if asked is not None:
        found = int(asked) if asked.isascii() and asked.isdigit() else text.id_of(asked)  # a number is text, no mask
        if found is None or found >= rows:
            raise UserError(f"'{printable(asked)}' is no token of {model.spec.name}; give a token, its id, or new")
        if found in (*model.spec.stop_ids, model.spec.bos_id):
            raise UserError(f"{printable(asked)} begins or ends its texts, and cannot be the mask as well")
        return found
    if text.mask_id is not None:
        return text.mask_id
    if text.size < rows:  # the embedding has rows the tokenizer never asks for
        return text.size
    kept = (*model.spec.stop_ids, model.spec.bos_id, model.spec.pad_id)
    names = {i: text.name_of(i) or "" for i in range(rows) if i not in kept}
    free = [i for i, name in names.items() if RESERVED.fullmatch(name) and i in text.special_ids]
    if free:
        return free[0]
    special = [name for i, name in names.items() if re.fullmatch(r"<[\w|]+>", name)]
    helps = f", such as --mask '{special[-1]}'" if special else ""
    raise UserError(
        f"the tokenizer of {model.spec.name} has no free id for a mask; name a token your texts never have{helps}, or"
        " give --mask new for one more row"
    )


def check_free(text: ModelTokenizer, mask_id: int, ids: np.ndarray) -> None:
    """A token of the text cannot be the mask as well."""
    if met := int((ids == mask_id).sum()):
        refuse_mask(text, mask_id, f"{met:,} times in the text")


def refuse_mask(text: ModelTokenizer, mask_id: int, where: str) -> NoReturn:
    named = printable(text.name_of(mask_id) or mask_id)
    raise UserError(f"the mask {named} stands {where}; give another with --mask, or --mask new")
