"""Which checkpoints floatscope can open: a table of architectures, and one of those it refuses, with the reason.

    architecture, class_name = find_architecture(config, keys)      # a row and the name of a class

No architecture of transformers is implemented again. LLaDA with renamed keys *is* a Llama called without the causal
mask, and Dream *is* a Qwen2 called that way. MDLM and BD3-LM have no class there; theirs is `dit.DiTForMaskedLM`. A row
is chosen by the config's `architectures` and by the tensor names, never by `model_type`: LLaDA-MoE calls itself `llada`
too. Printing the table needs neither torch nor transformers.
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
    bd3lm_to_dit_config,
    dream_to_qwen2_config,
    fast_dllm_to_qwen2_config,
    illada_to_llama_config,
    llada2_to_glm4_moe_config,
    llada2_to_glm4_moe_key,
    llada_moe_to_qwen3_moe_config,
    llada_to_llama_config,
    llada_to_llama_key,
    mdlm_to_dit_config,
    mdlm_to_dit_key,
    sdar_moe_to_qwen3_moe_config,
    sdar_to_qwen3_config,
    split_llada2_qkv,
)
from floatscope.schema import Paradigm

if TYPE_CHECKING:
    from floatscope.models.tokenizer import ModelTokenizer

NEVER = r"(?!)"  # matches no name
ALWAYS = r""  # is found in every name
MaskFinder = Callable[[Config, "ModelTokenizer | None"], int | None]


def _mask_in_config(config: Config, tokenizer: ModelTokenizer | None) -> int | None:
    return config.get("mask_token_id")


def _mask_in_config_or_named(token: str) -> MaskFinder:
    """Return a finder that looks into the config first, and then for a token of this name."""

    def find(config: Config, tokenizer: ModelTokenizer | None) -> int | None:
        in_config = _mask_in_config(config, tokenizer)
        return tokenizer.token_to_id(token) if in_config is None and tokenizer is not None else in_config

    return find


def _mask_in_tokenizer(config: Config, tokenizer: ModelTokenizer | None) -> int | None:
    return None if tokenizer is None else tokenizer.mask_id


def _mask_by_name(config: Config, tokenizer: ModelTokenizer | None) -> int | None:
    return None if tokenizer is None else tokenizer.token_to_id("<|mask|>")


def _mask_after_gpt2(config: Config, tokenizer: ModelTokenizer | None) -> int | None:
    """The mask of the config or the tokenizer, else the id that the authors add to GPT-2's 50257."""
    in_files = _mask_in_config(config, tokenizer)
    in_files = _mask_in_tokenizer(config, tokenizer) if in_files is None else in_files
    return 50257 if in_files is None and config.get("vocab_size") == 50258 else in_files


@dataclass(frozen=True)
class Published:
    """What the authors of a family publish in their code, for checkpoints whose files do not say it."""

    mask_id: int | None = None
    block_size: int | None = None


PUBLISHED = {
    "llada2": Published(mask_id=156895, block_size=32),
    "sdar": Published(mask_id=151669, block_size=4),
    "fast-dllm-v2": Published(mask_id=151665, block_size=32),
    "llada-moe": Published(mask_id=156895),
    "illada": Published(mask_id=5),
}


@dataclass(frozen=True)
class Architecture:
    """A row of the table: which checkpoints it opens, as which class, and what their weights do not say."""

    name: str
    opens: str  # for people
    class_pattern: str  # a regular expression for an entry of the config's `architectures`
    transformers_class: str  # may refer to the groups of `class_pattern`; or a class of `NATIVE_CLASSES`
    paradigm: Paradigm
    shift: bool = False  # the logits at row p predict position p + 1
    excludes_mask: bool = False  # the mask token has no probability, whatever its logit
    key_pattern: str = r".*"  # a tensor name that must exist, if `architectures` alone is ambiguous
    find_mask_id: MaskFinder = lambda config, tokenizer: None
    mask_source: str = ""  # for people
    convert_config: Callable[[Config], dict[str, Any]] | None = None  # None: config.json is already transformers' own
    rename_key: Callable[[str], str] = str  # a checkpoint's tensor name → the transformers class's
    split_tensor: Callable[[str, Config], dict[str, int]] = lambda key, config: {}  # a tensor's parts → their rows
    has_experts: bool = False  # a file has a tensor for each expert, and the transformers class one for all
    published: Published = Published()
    block_settings: tuple[str, ...] = ()  # settings of config.json with the block size
    canvas_setting: str = ""  # setting of the config with the canvas size of a model without a mask token
    block_names: str = NEVER  # names of checkpoints that attend in blocks, even if their config does not say so
    usual_blocks: str = ""  # block sizes of the authors' checkpoints, for people
    ignored_keys: str = NEVER  # tensors of other heads, which are not read
    has_separator: bool = False  # texts end with a separator token, which must follow the answer
    context: int | None = None  # usable positions; None: as the config says
    note: str = ""  # what a user should know
    watched: str = "yes"  # what can be watched, for people

    @property
    def attends(self) -> str:
        """Which positions a row attends to, for people."""
        if self.canvas_setting:
            return f"to its canvas, of config.json's {self.canvas_setting}, and to the text before it"
        if self.block_settings:
            size, names = self.published.block_size, " or ".join(self.block_settings)
            if self.block_names == ALWAYS:
                return f"in blocks of config.json's {names}"
            if size is None:
                return f"to all, or in blocks (config.json's {names}, or block_size=)"
            return f"in blocks of {size}, or of config.json's {names}"
        return "up to itself" if self.paradigm is Paradigm.ARM else "to all"

    @property
    def block_label(self) -> str:
        """The block size in a word: a number if the files name none, or where it comes from."""
        if self.canvas_setting:
            return "files"
        if not self.block_settings:
            return "none"
        if self.published.block_size is not None:
            return str(self.published.block_size)
        return "files" if self.block_names == ALWAYS else "block_size="

    @property
    def mask_label(self) -> str:
        """Where the mask id comes from, in a few words."""
        if not self.mask_source or self.paradigm is Paradigm.ARM or self.canvas_setting:
            return "none"
        if "," not in self.mask_source:
            return "the tokenizer" if self.mask_source.startswith("the tokenizer") else self.mask_source
        published = self.published.mask_id
        return "files" if published is None else f"files, else {published}"


NATIVE_CLASSES = {"DiTForMaskedLM": "floatscope.models.dit"}
"""Classes that transformers does not have, and their modules."""
DIT: dict[str, Any] = {
    "paradigm": Paradigm.MDM,
    "excludes_mask": True,
    "find_mask_id": _mask_after_gpt2,
    "mask_source": "config.json, the tokenizer, else 50257 in a vocabulary of 50258",
    "rename_key": mdlm_to_dit_key,
}
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
        name="llada2",
        opens="LLaDA2.0 and LLaDA2.1, mini and flash, and other checkpoints of LLaDA2MoeModelLM",
        class_pattern="LLaDA2MoeModelLM",
        key_pattern=r"model\.word_embeddings\..+",
        transformers_class="Glm4MoeForCausalLM",
        paradigm=Paradigm.MDM,
        find_mask_id=_mask_in_config_or_named("<|mask|>"),
        mask_source="config.json, the tokenizer's <|mask|>, else 156895",
        convert_config=llada2_to_glm4_moe_config,
        rename_key=llada2_to_glm4_moe_key,
        split_tensor=split_llada2_qkv,
        has_experts=True,
        published=PUBLISHED["llada2"],
        block_settings=("block_size", "block_length"),
    ),
    Architecture(
        name="llada-moe",
        opens="LLaDA-MoE Base and Instruct, without a router bias or a shared expert",
        class_pattern="LLaDAMo[eE]Model(LM)?",
        key_pattern=r"model\.layers\..+",
        transformers_class="Qwen3MoeForCausalLM",
        paradigm=Paradigm.MDM,
        find_mask_id=_mask_in_config_or_named("<|mdm_mask|>"),
        mask_source="config.json, the tokenizer's <|mdm_mask|>, else 156895",
        convert_config=llada_moe_to_qwen3_moe_config,
        has_experts=True,
        published=PUBLISHED["llada-moe"],
    ),
    Architecture(
        name="sdar",
        opens="SDAR and TraDo, dense",
        class_pattern="SDARForCausalLM",
        transformers_class="Qwen3ForCausalLM",
        paradigm=Paradigm.MDM,
        find_mask_id=_mask_in_config_or_named("<|MASK|>"),
        mask_source="config.json, the tokenizer's <|MASK|>, else 151669",
        convert_config=sdar_to_qwen3_config,
        published=PUBLISHED["sdar"],
        block_settings=("block_size", "block_length"),
    ),
    Architecture(
        name="sdar-moe",
        opens="SDAR, mixture of experts",
        class_pattern="SDARMo[eE]ForCausalLM",
        transformers_class="Qwen3MoeForCausalLM",
        paradigm=Paradigm.MDM,
        find_mask_id=_mask_in_config_or_named("<|MASK|>"),
        mask_source="config.json, the tokenizer's <|MASK|>, else 151669",
        convert_config=sdar_moe_to_qwen3_moe_config,
        has_experts=True,
        published=PUBLISHED["sdar"],
        block_settings=("block_size", "block_length"),
    ),
    Architecture(
        name="fast-dllm-v2",
        opens="Fast-dLLM v2",
        class_pattern="Fast_dLLM_QwenForCausalLM",
        transformers_class="Qwen2ForCausalLM",
        paradigm=Paradigm.MDM,
        shift=True,
        find_mask_id=_mask_in_config_or_named("|<MASK>|"),
        mask_source="config.json, the tokenizer's |<MASK>|, else 151665",
        convert_config=fast_dllm_to_qwen2_config,
        published=PUBLISHED["fast-dllm-v2"],
        block_settings=("bd_size",),
    ),
    Architecture(
        name="illada",
        opens="iLLaDA-8B Base and Instruct",
        class_pattern=r"(?i:i?llada(?!2|_?moe)\w*)",
        key_pattern=r"model\.layers\..+",
        transformers_class="LlamaForCausalLM",
        paradigm=Paradigm.MDM,
        find_mask_id=lambda config, tokenizer: PUBLISHED["illada"].mask_id,  # whatever its files say
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
        opens="dllm's diffusion models (Qwen3-0.6B-diffusion-mdlm, Qwen3-0.6B-diffusion-bd3lm, …)",
        class_pattern=r"A2D(Llama|Qwen2|Qwen3)LMHeadModel",
        transformers_class=r"\1ForCausalLM",
        paradigm=Paradigm.MDM,
        find_mask_id=_mask_by_name,
        mask_source="the tokenizer's <|mask|>",
        block_settings=("block_size",),
        block_names=r"(?i)bd3lm",
        usual_blocks="32",
        note="the files do not say whether it was trained in blocks (bd3lm); if so, give block_size= (dllm uses 32)",
    ),
    Architecture(
        name="diffusion-gemma",
        opens="DiffusionGemma, text only",
        class_pattern="DiffusionGemmaForBlockDiffusion",
        transformers_class="DiffusionGemmaForBlockDiffusion",
        paradigm=Paradigm.MDM,
        mask_source="none: its noise is uniform",
        canvas_setting="canvas_length",
        note="it reads images too, which is not supported: prompts are text",
        watched="yes, its canvases; not the encoder of the text before them",
    ),
    Architecture(
        name="mdlm",
        opens="MDLM (mdlm-owt, mdlm-no_flashattn-fp32-owt, …)",
        class_pattern="MDLM",
        transformers_class="DiTForMaskedLM",
        **DIT,
        convert_config=mdlm_to_dit_config,
    ),
    Architecture(
        name="bd3lm",
        opens="BD3-LM (bd3lm-owt-block_size4, 8 and 16, …)",
        class_pattern="BD3LM",
        transformers_class="DiTForMaskedLM",
        **DIT,
        convert_config=bd3lm_to_dit_config,
        block_settings=("block_size",),
        block_names=ALWAYS,
        usual_blocks="4, 8 or 16",
        ignored_keys=r"sampling_eps_(min|max)",
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
        watched="yes, if it has softmax attention without a soft cap or sinks as parameters",
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
    watched="if it calls transformers' AttentionInterface or scaled_dot_product_attention",
)


@dataclass(frozen=True)
class Refusal:
    """Checkpoints that are not opened, and the reason."""

    name: str
    class_pattern: str  # for an entry of `architectures`
    reason: str
    settings: tuple[str, ...] = ()  # only with one of these in the config; (): always


REFUSED = (
    Refusal(
        "LLaDA-V / MMaDA",
        r"(?i:llava\w*llada\w*|llada_?[vo]\w*|mmada\w*)",
        "it reads images, which is not supported",
    ),
    Refusal(
        "other multimodal diffusion models",
        r"(?i:\w*(llada|dream|lavida|dimple|sdar)\w*)",
        "it reads images, which is not supported",
        settings=("vision_config", "mm_vision_tower", "vision_tower"),
    ),
    Refusal(
        "LLaDA2.2",
        "LLaDA2MoeModelLM",
        "it routes whole blocks to experts and edits with DELETE and INSERT tokens, which no transformers class does",
        settings=("expert_capacity", "delete_token_id", "insert_token_id", "split_token_id"),
    ),
    Refusal(
        "a newer LLaDA",
        r"(?i:llada_?)(2(?!MoeModelLM$)|[3-9])\w*",
        "only LLaDA2MoeModelLM, the class of LLaDA2.0 and 2.1, has been compared with its authors' code",
    ),
    Refusal(
        "Nemotron-Labs-Diffusion",
        r"(?i:nemotron\w*diffusion\w*)",
        "it scales its queries by their position (Ministral3) and has not been compared with its authors' code",
    ),
    Refusal(
        "SEDD", r"(?i:sedd\w*)", "its logits are ratios of probabilities and depend on the noise level of each step"
    ),
    Refusal(
        "parts of DiffusionGemma",
        r"DiffusionGemma(?!ForBlockDiffusion$)\w*",
        "only DiffusionGemmaForBlockDiffusion has a language model head",
    ),
)


def find_architecture(config: Config, keys: Collection[str] | None) -> tuple[Architecture, str] | None:
    """Return the row that opens a checkpoint and the name of its transformers class, or None if no row does.

    `keys` are the checkpoint's tensor names; with None (not known yet) any row with a matching class will do. Raises a
    `UserError` with the reason for a checkpoint in `REFUSED`.
    """
    for class_name in _class_names(config):
        for refusal in REFUSED:
            given = [s for s in refusal.settings if config.get(s) is not None]
            if re.fullmatch(refusal.class_pattern, class_name) and (given or not refusal.settings):
                where = f"; its config.json has {given[0]}" if given else ""
                raise UserError(f"{refusal.name} ({printable(class_name)}) cannot be opened: {refusal.reason}{where}")
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
