"""What must be known of a checkpoint and its weights do not tell, from its files and from what the user says.

spec = infer("tiny", family, config_json, module, text, mask_id=None, shift=None)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from floatscope.errors import UserError, printable
from floatscope.models.families import Architecture, Config
from floatscope.models.model import ModelSpec
from floatscope.models.text import ModelTokenizer


def infer(
    name: str,
    family: Architecture,
    config: Config,
    module: Any,
    text: ModelTokenizer | None,
    *,
    mask_id: int | None,
    shift: bool | None,
) -> ModelSpec:
    """`config` is the checkpoint's own; `module` may be without weights. A given `mask_id` makes any model an MDM."""
    rows = module.get_input_embeddings().num_embeddings
    if text is not None and text.size > rows:
        raise UserError(f"its tokenizer has ids up to {text.size - 1}, and the model takes 0 … {rows - 1}")
    mask = family.mask(config, text) if mask_id is None else mask_id
    kind = family.paradigm if mask_id is None else "mdm"
    if shift is not None and not isinstance(shift, bool):
        raise UserError(f"shift must be True (a row decides the next position) or False (its own), got {shift!r}")
    if shift is not None and kind == "arm":
        raise UserError(
            "shift= is for masked diffusion models, and this one is autoregressive: its rows always decide the next"
            " position; leave it out, or give mask_id= too"
        )
    if kind == "mdm" and mask is None:
        raise UserError(
            f"its mask token is not where it should be ({family.mask_comes_from}); say its id with mask_id="
        )
    if mask is not None and not (type(mask) is int and 0 <= mask < rows):
        raise UserError(f"mask id {printable(repr(mask))} is none of its token ids, 0 … {rows - 1}")

    def token(role: str) -> int | None:
        """The config's id, of several the first, else the tokenizer's."""
        found = getattr(module.config, f"{role}_token_id", None)
        found = found[0] if isinstance(found, list) and found else found
        found = getattr(text, f"{role}_id", None) if found is None else found
        return found if type(found) is int and 0 <= found < rows else None

    eos, eot, pad = token("eos"), None if text is None else text.eot_id, token("pad")
    first = _first_position(module)
    longest = getattr(module.config, "max_position_embeddings", None)
    return ModelSpec(
        name=name,
        paradigm=kind,
        mask_id=mask if kind == "mdm" else None,
        shift=family.shift if shift is None else shift,
        architecture=family.name,
        bos_id=token("bos"),
        eos_id=eos,
        eot_id=None if eot == eos else eot,
        pad_id=pad,
        context=family.context or (longest - first if isinstance(longest, int) and longest > first else None),
        first_position=first,
    )


def _first_position(module: nn.Module) -> int:
    """RoBERTa and those like it count positions from their padding id + 1, whose place in the table stays free."""
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
            return part.padding_idx + 1
    return 0
