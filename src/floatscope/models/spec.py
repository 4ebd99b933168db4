"""What floatscope must know about a checkpoint that its weights do not say.

    spec = infer_spec("tiny", architecture, config_json, module, tokenizer)
    spec.paradigm, spec.mask_id, spec.shift      # "mdm", 126336, False
    spec.visibility                              # MaskStructure(kind="full", size=0)

The facts come from the files of the checkpoint, its row in the architecture table, and the user's arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from floatscope.errors import UserError, printable
from floatscope.models.architectures import ALWAYS, Architecture
from floatscope.models.conversions import Config
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.schema import MaskKind, MaskStructure, Paradigm, RowSource


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
    excludes_mask: bool = False  # the mask token has no probability, whatever its logit (MDLM's substitution)
    block_size: int | None = None  # an MDM that attends block-causally, in blocks of this size; None: to all positions
    canvas_size: int | None = None  # an MDM without a mask token: it denoises canvases of this size after a cached text
    architecture: str = ""  # the row of the architecture table that opened it
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None  # ends a turn, if that is another token than eos
    other_eos_ids: tuple[int, ...] = ()  # further ends of text, if the config has several
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
        _check_size("block", self.block_size)
        _check_size("canvas", self.canvas_size)
        if self.canvas_size is not None:
            _check_canvas_model(self)
        if self.block_size is not None and self.paradigm is Paradigm.ARM:
            raise UserError(
                "block_size= is for masked diffusion models, and this model is autoregressive; leave it out, or give"
                " mask_id= too"
            )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token ids that end a text."""
        return tuple(dict.fromkeys(i for i in (self.eos_id, self.eot_id, *self.other_eos_ids) if i is not None))

    @property
    def noise(self) -> str | None:
        """What an undecided position holds: "mask", the mask token; "uniform", a random token; None in an ARM."""
        if self.paradigm is Paradigm.ARM:
            return None
        return "mask" if self.canvas_size is None else "uniform"

    @property
    def visibility(self) -> MaskStructure:
        """Which keys a row sees: all, those up to itself, or those up to the end of its block."""
        if self.block_size is not None:
            return MaskStructure(MaskKind.BLOCK, self.block_size)
        return MaskStructure(MaskKind.CAUSAL if self.paradigm is Paradigm.ARM else MaskKind.FULL)

    @property
    def row_source(self) -> RowSource:
        """Which rows a step of decoding computes: all, or with a cache the new ones or those of the current block."""
        if self.canvas_size is not None:
            return RowSource.BLOCK
        if not self.supports_cache:
            return RowSource.ALL
        if self.paradigm is Paradigm.ARM:
            return RowSource.CACHE
        return RowSource.ALL if self.block_size is None else RowSource.BLOCK


def infer_spec(
    name: str,
    architecture: Architecture,
    config: Config,
    module: Any,
    tokenizer: ModelTokenizer | None,
    *,
    mask_id: int | None = None,
    shift: bool | None = None,
    block_size: int | None = None,
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
        block_size: overrides the block size of the checkpoint; only for masked diffusion models.
    """
    text_config = module.config.get_text_config()
    rows = module.get_input_embeddings().num_embeddings
    if tokenizer is not None and tokenizer.size > rows:
        raise UserError(f"its tokenizer has ids up to {tokenizer.size - 1}, but the model accepts 0 … {rows - 1}")
    mask = _find_mask_id(architecture, config, tokenizer, rows) if mask_id is None else mask_id
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
    has_masks = paradigm is Paradigm.MDM and not architecture.canvas_setting
    if has_masks and mask is None:
        raise UserError(f"its mask token was not found in {architecture.mask_source}; give its id with mask_id=")
    if mask is not None and not (type(mask) is int and 0 <= mask < rows):
        raise UserError(f"mask id {printable(repr(mask))} is not a valid token id; expected 0 … {rows - 1}")

    def token_ids(role: str) -> list[int]:
        """The ids in the config, else the tokenizer's."""
        value = getattr(text_config, f"{role}_token_id", None)
        value = getattr(tokenizer, f"{role}_id", None) if value is None or value == [] else value
        return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int and 0 <= i < rows]

    bos, eos, pad = (token_ids(role) for role in ("bos", "eos", "pad"))
    eot = None if tokenizer is None else tokenizer.eot_id
    first = _first_position(module)
    positions = getattr(text_config, "max_position_embeddings", None)
    return ModelSpec(
        name=name,
        paradigm=paradigm,
        mask_id=mask if paradigm is Paradigm.MDM else None,
        shift=architecture.shift if shift is None else shift,
        excludes_mask=architecture.excludes_mask,
        block_size=_find_block_size(architecture, name, config, block_size),
        canvas_size=getattr(module.config, architecture.canvas_setting) if architecture.canvas_setting else None,
        architecture=architecture.name,
        bos_id=_first(bos),
        eos_id=_first(eos),
        eot_id=None if eot == _first(eos) else eot,
        other_eos_ids=tuple(i for i in eos[1:] if i != eot),
        pad_id=_first(pad),
        context=architecture.context
        or (positions - first if isinstance(positions, int) and positions > first else None),
        first_position=first,
    )


def _find_mask_id(
    architecture: Architecture, config: Config, tokenizer: ModelTokenizer | None, rows: int
) -> int | None:
    """The mask token of the files, else the one that the authors of the family publish."""
    mask, published = architecture.find_mask_id(config, tokenizer), architecture.published.mask_id
    if mask is None and published is not None and published >= rows:
        raise UserError(
            f"neither its config.json nor its tokenizer names its mask token, and {published}, the one of"
            f" {architecture.name}, is outside its vocabulary, 0 … {rows - 1}; give its id with mask_id="
        )
    return published if mask is None else mask


def _find_block_size(architecture: Architecture, name: str, config: Config, block_size: int | None) -> int | None:
    """The block size that the user gives, else that of the config, else that of the family; None: no blocks."""
    sizes = [block_size, *(config.get(setting) for setting in architecture.block_settings)]
    size = next((s for s in [*sizes, architecture.published.block_size] if s is not None), None)
    if size is None and re.search(architecture.block_names, name):
        is_named = architecture.block_names != ALWAYS
        raise UserError(
            f"{'its name says that ' if is_named else ''}it attends in blocks, and its config.json has no"
            f" {architecture.block_settings[0]}; give the size with block_size= (its authors use"
            f" {architecture.usual_blocks})"
        )
    return _check_size("block", size)


def _check_size(name: str, size: Any) -> int | None:
    if size is not None and (type(size) is not int or size < 1):
        raise UserError(f"{name} size {printable(repr(size))} is not valid; expected a whole number of at least 1")
    checked: int | None = size
    return checked


def _check_canvas_model(spec: ModelSpec) -> None:
    if spec.paradigm is Paradigm.ARM:
        raise UserError("canvas_size= is for masked diffusion models, and this model is autoregressive; leave it out")
    for name, value in (("mask_id", spec.mask_id), ("block_size", spec.block_size), ("shift", spec.shift or None)):
        if value is not None:
            raise UserError(
                f"this model denoises uniform noise on canvases of {spec.canvas_size}: it has no mask token, no blocks"
                f" in its attention and no shift; leave out {name}="
            )


def _first(values: list[int]) -> int | None:
    return values[0] if values else None


def _first_position(module: nn.Module) -> int:
    """RoBERTa and similar models count positions from their padding id + 1; the rows before it stay unused."""
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
            return part.padding_idx + 1
    return 0
