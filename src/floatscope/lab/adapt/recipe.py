"""The settings of an adaptation, and the choice of its mask token.

recipe = fit_recipe(Recipe(steps=1600), model, choose_mask(model, None))   # a token id that no text contains
mask_id = choose_mask(model, "<empty_output>")      # a token by name or id; "new": a new row of the embedding
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from floatscope.errors import UserError, printable

if TYPE_CHECKING:
    from floatscope.models.model import Model
    from floatscope.models.tokenizer import ModelTokenizer

RESERVED = re.compile(r"<?[|\[<]*(mask|reserved|unused|extra|dummy|placeholder)[\w.-]*[|\]>]*", re.IGNORECASE)
NEW_ROW = "new"


@dataclass(frozen=True)
class Recipe:
    """The settings of an adaptation: everything it depends on beside the base and the corpus."""

    rank: int = 32  # 0: all weights are trained
    steps: int = 6000
    tokens: int = 16384  # of text per step, and as many of questions with their passages
    length: int = 512  # tokens per row of text
    lengths: tuple[int, ...] = (256, 512, 1024)  # tokens per row with a question
    warmup: int = 100
    lr: float = 1e-3  # peak
    control: bool = False  # train the next token with the causal mask, on the same rows
    anneal: int = 0  # steps until every token attends to all later ones; 0: from the first step
    seed: int = 0
    mask_id: int | None = None  # None: a control, or not chosen yet

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise UserError(f"the rank must be at least 1, or 0 to train all weights, got {self.rank}")
        if self.steps < 1:
            raise UserError(f"steps must be at least 1, got {self.steps}")
        if self.tokens < self.length:
            raise UserError(f"a step needs at least one row of text, which has {self.length} tokens, got {self.tokens}")
        if not 0 < self.lr < math.inf:
            raise UserError(f"the learning rate must be a number above 0, got {self.lr:g}")
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"the seed must be a number from 0 to {(1 << 32) - 1}, got {self.seed}")
        if self.control and self.anneal:
            raise UserError("a control keeps its causal mask; leave --anneal out")
        if not 0 <= self.anneal <= self.steps:
            raise UserError(f"the causal mask can be opened over 0 to {self.steps} steps, got {self.anneal}")

    @property
    def as_json(self) -> dict[str, Any]:
        """All settings, as they are stored in training.json."""
        return {**asdict(self), "lengths": list(self.lengths)}


def fit_recipe(recipe: Recipe, model: Model, mask_id: int | None) -> Recipe:
    """Return the recipe with this mask, and with rows no longer than the model's context."""
    recipe, context = replace(recipe, mask_id=mask_id), model.spec.context
    if context is None:
        return recipe
    lengths = tuple(n for n in recipe.lengths if n <= context) or (context,)
    return replace(recipe, length=min(recipe.length, context), lengths=lengths)


def require_tokenizer(model: Model) -> ModelTokenizer:
    """Return the model's tokenizer, or refuse a model without one."""
    if model.tokenizer is None:
        raise UserError(f"{model.spec.name} has no tokenizer, which an adaptation needs; give a base that has one")
    return model.tokenizer


def choose_mask(model: Model, mask: str | None) -> int:
    """Return the id of the mask token: that of `mask`, or else of a free token.

    Args:
        model: The base.
        mask: A token, its id, or "new" for a new row of the embedding; None: the tokenizer's mask token, a row of the
            embedding that the tokenizer never uses, or a token named reserved or unused.
    """
    tokenizer, rows = require_tokenizer(model), model.vocab_size
    if mask == NEW_ROW:
        return rows
    if mask is not None:
        is_number = mask.isascii() and mask.isdigit()  # the token of a number is text, so a number is an id
        mask_id = int(mask) if is_number else tokenizer.token_to_id(mask)
        if mask_id is None or mask_id >= rows:
            raise UserError(
                f"'{printable(mask)}' is not a token of {model.spec.name}; give a token, its id, or {NEW_ROW}"
            )
        if mask_id in (*model.spec.stop_ids, model.spec.bos_id):
            raise UserError(f"{printable(mask)} begins or ends a text, so it cannot be the mask; give another token")
        return mask_id
    if tokenizer.mask_id is not None:
        return tokenizer.mask_id
    if tokenizer.size < rows:  # the embedding has rows that the tokenizer never uses
        return tokenizer.size
    used = (*model.spec.stop_ids, model.spec.bos_id, model.spec.pad_id)
    names = {i: tokenizer.id_to_token(i) or "" for i in range(rows) if i not in used}
    free = [i for i, name in names.items() if RESERVED.fullmatch(name) and i in tokenizer.special_ids]
    if free:
        return free[0]
    special = [name for i, name in names.items() if re.fullmatch(r"<[\w|]+>", name)]
    hint = f", such as --mask-token '{special[-1]}'" if special else ""
    raise UserError(
        f"the tokenizer of {model.spec.name} has no free id for a mask; name a token that your texts do not"
        f" contain{hint}, or give --mask-token {NEW_ROW} for a new row of the embedding"
    )


def check_mask_unused(tokenizer: ModelTokenizer, mask_id: int, ids: np.ndarray) -> None:
    """Refuse a mask token that occurs in the text."""
    if count := int((ids == mask_id).sum()):
        refuse_mask(tokenizer, mask_id, f"{count:,} times in the text")


def refuse_mask(tokenizer: ModelTokenizer, mask_id: int, where: str) -> NoReturn:
    """Raise the error for a mask token that occurs `where`."""
    token = printable(tokenizer.id_to_token(mask_id) or mask_id)
    raise UserError(f"the mask {token} occurs {where}; give another with --mask-token, or --mask-token {NEW_ROW}")
