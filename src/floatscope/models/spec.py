"""What floatscope must know about a checkpoint that its weights do not say.

    spec = infer_spec("tiny", architecture, config_json, module, tokenizer, mask_id=None, shift=None)
    spec.paradigm, spec.mask_id, spec.shift      # "mdm", 126336, False

The facts come from the files of the checkpoint, its row in the architecture table, and the user's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from floatscope.errors import UserError, printable
from floatscope.models.architectures import Architecture
from floatscope.models.conversions import Config
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.schema import Paradigm


@dataclass(frozen=True)
class ModelSpec:
    """The facts about a model that decoding and tracing depend on.

    `load` infers them. Build one yourself to wrap a module of your own.

    Example:
        twin = fs.load("twin:mdm")
        spec = fs.ModelSpec("my-mdm", fs.Paradigm.MDM, mask_id=twin.spec.mask_id)
        model = fs.Model(twin.module, spec)  # any module that returns logits
    """

    name: str
    paradigm: Paradigm  # or its name, "mdm" or "arm"
    mask_id: int | None
    shift: bool = False  # the logits at row p predict position p + 1
    architecture: str = ""  # the row of the architecture table that opened it
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None  # ends a turn, if that is another token than eos
    pad_id: int | None = None
    context: int | None = None  # number of positions it was trained for
    first_position: int = 0  # position id of the first token of a text (RoBERTa counts from its padding id + 1)
    revision: str | None = None  # commit of a hub checkpoint
    weights: str | None = None  # fingerprint of the weight files
    uses_remote_code: bool = False  # it runs the checkpoint's own code, because the user allowed it
    supports_cache: bool = True  # False: a key-value cache would change its predictions (see capabilities.py)
    supports_padding: bool = True  # False: padding would change its predictions, so a batch needs prompts of one length

    def __post_init__(self) -> None:
        object.__setattr__(self, "paradigm", Paradigm(self.paradigm))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token ids that end a text."""
        return tuple(dict.fromkeys(i for i in (self.eos_id, self.eot_id) if i is not None))


def infer_spec(
    name: str,
    architecture: Architecture,
    config: Config,
    module: Any,
    tokenizer: ModelTokenizer | None,
    *,
    mask_id: int | None,
    shift: bool | None,
) -> ModelSpec:
    """Build the spec of a checkpoint.

    Args:
        name: the name that the spec shows.
        architecture: the row of the table that opens the checkpoint.
        config: the checkpoint's own config.json.
        module: the transformers module; it may be on the meta device.
        tokenizer: the tokenizer, or None.
        mask_id: overrides the checkpoint's mask token; makes any model a masked diffusion model.
        shift: overrides the architecture's shift; only for masked diffusion models.
    """
    rows = module.get_input_embeddings().num_embeddings
    if tokenizer is not None and tokenizer.size > rows:
        raise UserError(f"its tokenizer has ids up to {tokenizer.size - 1}, but the model accepts 0 … {rows - 1}")
    mask = architecture.find_mask_id(config, tokenizer) if mask_id is None else mask_id
    paradigm = architecture.paradigm if mask_id is None else Paradigm.MDM
    if shift is not None and not isinstance(shift, bool):
        raise UserError(
            f"shift must be True (a row predicts the next position) or False (its own position), got {shift!r}"
        )
    if shift is not None and paradigm is Paradigm.ARM:
        raise UserError(
            "shift= is for masked diffusion models, and this model is autoregressive: its rows always predict the next"
            " position; leave it out, or give mask_id= too"
        )
    if paradigm is Paradigm.MDM and mask is None:
        raise UserError(f"its mask token was not found in {architecture.mask_source}; give its id with mask_id=")
    if mask is not None and not (type(mask) is int and 0 <= mask < rows):
        raise UserError(f"mask id {printable(repr(mask))} is not a valid token id; expected 0 … {rows - 1}")

    def token_id(role: str) -> int | None:
        """The first id in the config, else the tokenizer's."""
        value = getattr(module.config, f"{role}_token_id", None)
        value = value[0] if isinstance(value, list) and value else value
        value = getattr(tokenizer, f"{role}_id", None) if value is None else value
        return value if type(value) is int and 0 <= value < rows else None

    eos, eot, pad = token_id("eos"), None if tokenizer is None else tokenizer.eot_id, token_id("pad")
    first = _first_position(module)
    positions = getattr(module.config, "max_position_embeddings", None)
    return ModelSpec(
        name=name,
        paradigm=paradigm,
        mask_id=mask if paradigm is Paradigm.MDM else None,
        shift=architecture.shift if shift is None else shift,
        architecture=architecture.name,
        bos_id=token_id("bos"),
        eos_id=eos,
        eot_id=None if eot == eos else eot,
        pad_id=pad,
        context=architecture.context
        or (positions - first if isinstance(positions, int) and positions > first else None),
        first_position=first,
    )


def _first_position(module: nn.Module) -> int:
    """RoBERTa and similar models count positions from their padding id + 1; the rows before it stay unused."""
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
            return part.padding_idx + 1
    return 0
