"""Which checkpoints floatscope can open: a table of architectures, and one of those it refuses, with the reason.

    architecture, class_name = find_architecture(config, keys)      # a row and the name of a transformers class

No architecture is implemented again. LLaDA with renamed keys *is* a Llama called without the causal mask, and Dream
*is* a Qwen2 called that way. A row is chosen by the config's `architectures` and by the tensor names, never by
`model_type`: LLaDA-MoE calls itself `llada` too. Printing the table needs neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from floatscope.errors import UserError, printable
from floatscope.models.conversions import (
    Config,
    dream_to_qwen2_config,
    illada_to_llama_config,
    llada_to_llama_config,
    llada_to_llama_key,
)
from floatscope.schema import Paradigm

if TYPE_CHECKING:
    from floatscope.models.tokenizer import ModelTokenizer

MaskFinder = Callable[[Config, "ModelTokenizer | None"], int | None]


def _mask_in_config(config: Config, tokenizer: ModelTokenizer | None) -> int | None:
    return config.get("mask_token_id")


def _mask_in_tokenizer(config: Config, tokenizer: ModelTokenizer | None) -> int | None:
    return None if tokenizer is None else tokenizer.mask_id


def _mask_by_name(config: Config, tokenizer: ModelTokenizer | None) -> int | None:
    return None if tokenizer is None else tokenizer.token_to_id("<|mask|>")


@dataclass(frozen=True)
class Architecture:
    """A row of the table: which checkpoints it opens, as which class, and what their weights do not say."""

    name: str
    opens: str  # for people
    class_pattern: str  # a regular expression for an entry of the config's `architectures`
    transformers_class: str  # may refer to the groups of `class_pattern`
    paradigm: Paradigm
    shift: bool = False  # the logits at row p predict position p + 1
    key_pattern: str = r".*"  # a tensor name that must exist, if `architectures` alone is ambiguous
    find_mask_id: MaskFinder = lambda config, tokenizer: None
    mask_source: str = ""  # for people
    convert_config: Callable[[Config], dict[str, Any]] | None = None  # None: config.json is already transformers' own
    rename_key: Callable[[str], str] = str  # a checkpoint's tensor name → the transformers class's
    ignored_keys: str = r"(?!)"  # tensors of other heads, which are not read
    has_separator: bool = False  # texts end with a separator token, which must follow the answer
    context: int | None = None  # usable positions; None: as the config says
    note: str = ""  # what a user should know


ARCHITECTURES = (
    Architecture(
        name="llada",
        opens="LLaDA-8B Base and Instruct, LLaDA-1.5",
        class_pattern="LLaDAModelLM",
        key_pattern=r"model\.transformer\..+",
        transformers_class="LlamaForCausalLM",
        paradigm=Paradigm.MDM,
        find_mask_id=_mask_in_config,
        mask_source="config.json",
        convert_config=llada_to_llama_config,
        rename_key=llada_to_llama_key,
    ),
    Architecture(
        name="illada",
        opens="iLLaDA-8B Base and Instruct",
        class_pattern=r"(?i:i?llada)\w*",
        key_pattern=r"model\.layers\..+",
        transformers_class="LlamaForCausalLM",
        paradigm=Paradigm.MDM,
        find_mask_id=lambda config, tokenizer: 5,  # in neither the config nor the tokenizer; published by its authors
        mask_source="always 5",
        convert_config=illada_to_llama_config,
    ),
    Architecture(
        name="dream",
        opens="Dream-7B Base and Instruct, Dream-Coder, DiffuCoder",
        class_pattern="DreamModel",
        transformers_class="Qwen2ForCausalLM",
        paradigm=Paradigm.MDM,
        shift=True,
        find_mask_id=_mask_in_config,
        mask_source="config.json",
        convert_config=dream_to_qwen2_config,
        context=2048,  # trained length; its config has the 131072 of the base model
    ),
    Architecture(
        name="a2d",
        opens="dllm's diffusion models (Qwen3-0.6B-diffusion-mdlm, …)",
        class_pattern=r"A2D(Llama|Qwen2|Qwen3)LMHeadModel",
        transformers_class=r"\1ForCausalLM",
        paradigm=Paradigm.MDM,
        find_mask_id=_mask_by_name,
        mask_source="the tokenizer's <|mask|>",
        note="a block-diffusion checkpoint (bd3lm) has the same files and would be run with full attention",
    ),
    Architecture(
        name="bert",
        opens="masked language models: BERT, ModernBERT",
        class_pattern=r"((?:Bert|ModernBert)ForMaskedLM)",
        transformers_class=r"\1",
        paradigm=Paradigm.MDM,
        find_mask_id=_mask_in_tokenizer,
        mask_source="the tokenizer",
        ignored_keys=r"cls\.seq_relationship\..+|(\w+\.)?pooler\..+",
        has_separator=True,
    ),
    Architecture(
        name="roberta",
        opens="masked language models: RoBERTa, XLM-RoBERTa",
        class_pattern=r"((?:Roberta|XLMRoberta)ForMaskedLM)",
        transformers_class=r"\1",
        paradigm=Paradigm.MDM,
        find_mask_id=_mask_in_tokenizer,
        mask_source="the tokenizer",
        ignored_keys=r"(\w+\.)?pooler\..+",
        has_separator=True,
    ),
    Architecture(
        name="causal",
        opens="any causal language model of transformers (Llama, Qwen, Gemma, SmolLM, GPT-2, …)",
        class_pattern=r"(\w+)",  # and a causal language model of transformers
        transformers_class=r"\1",
        paradigm=Paradigm.ARM,
        shift=True,
        mask_source="mask_id=, which makes it a masked diffusion model (DiffuGPT, DiffuLLaMA)",
    ),
)
CAUSAL = ARCHITECTURES[-1]
REMOTE_CODE = Architecture(
    name="remote",
    opens="checkpoints with their own code, run only with trust_remote_code=True",
    class_pattern=r"(?!)",
    transformers_class="",
    paradigm=Paradigm.ARM,
    shift=True,
    find_mask_id=_mask_in_config,
    mask_source="config.json",
)

BLOCK_CAUSAL = "it attends causally from block to block, which is not supported yet"
OWN_MIXTURE = "a mixture of experts with its own code; transformers has no such class"
REFUSED = {  # pattern for an entry of `architectures` → (name, reason)
    r"LLaDA2\w*": ("LLaDA2", f"{BLOCK_CAUSAL}, and it is {OWN_MIXTURE}"),
    r"LLaDAMoE\w*": ("LLaDA-MoE", f"it is {OWN_MIXTURE}"),
    r"Llava\w*LLaDA\w*|LLaDAV\w*|MMaDA\w*": ("LLaDA-V / MMaDA", "it reads images, which is not supported"),
    r"SDAR\w*": ("SDAR", BLOCK_CAUSAL),
    r"Fast_?dLLM\w*": ("Fast-dLLM v2", BLOCK_CAUSAL),
    r"(?i:bd3lm)\w*": ("BD3-LM", f"{BLOCK_CAUSAL}, and transformers has no such class"),
    r"(?i:mdlm|sedd)\w*": ("MDLM / SEDD", "it is a network of DiT blocks; transformers has no such class"),
    r"DiffusionGemma\w*": (
        "DiffusionGemma",
        "it has no mask token: its noise is uniform and its canvas attends to a prefix of keys; not supported yet",
    ),
}


def find_architecture(config: Config, keys: Collection[str] | None) -> tuple[Architecture, str] | None:
    """Return the row that opens a checkpoint and the name of its transformers class, or None if no row does.

    `keys` are the checkpoint's tensor names; with None (not known yet) any row with a matching class will do. Raises a
    `UserError` with the reason for a checkpoint in `REFUSED`.
    """
    for class_name in _class_names(config):
        for pattern, (name, why) in REFUSED.items():
            if re.fullmatch(pattern, class_name):
                raise UserError(f"{name} ({printable(class_name)}) cannot be opened: {why}")
        for row in ARCHITECTURES:
            match = re.fullmatch(row.class_pattern, class_name)
            if match is None or not (
                keys is None or any(re.fullmatch(row.key_pattern, key, re.DOTALL) for key in keys)
            ):
                continue
            transformers_class = match.expand(row.transformers_class)
            if row.name != "causal" or transformers_class in causal_classes():
                return row, transformers_class
    return None


def _class_names(config: Config) -> list[str]:
    names = config.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(n, str) for n in names)):
        raise UserError(f"its config.json names no architectures (got {printable(repr(names))})")
    return names


@cache
def causal_classes() -> frozenset[str]:
    """The names of all causal language models of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return frozenset(NAMES.values())
