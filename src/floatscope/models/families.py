"""Which checkpoints open as what: one table, and one of those that are refused with the reason.

    row, becomes = recognise(config, keys)      # a Family and the transformers class it becomes

No architecture is written anew. LLaDA with its keys renamed *is* a Llama called without the causal mask, Dream *is* a
Qwen2 called so. A row is chosen by `architectures` and the keys that are present, never by `model_type`: LLaDA-MoE
calls itself `llada` too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from floatscope.errors import UserError, printable

if TYPE_CHECKING:
    from floatscope.models.text import ModelTokenizer

Config = Mapping[str, Any]

LLADA_LAYER = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
LLADA_WHOLE = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",  # the same leaf name as an MLP's, one level up
}
LLADA_SIZES = {  # LLaDA's name → Llama's
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
PLAIN_SIZES = (  # of a Llama as of a Qwen2
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)
LLADA_IS = {  # what makes a LLaDA a Llama; a config that says otherwise describes another network
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "clip_qkv": None,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "multi_query_attention": None,
    "rope": True,
    "rope_scaling": None,
    "scale_logits": False,
}
LLAMA_IS = {  # the same of a config in Llama's words
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "use_sliding_window": False,
}
QWEN2_IS = {**LLAMA_IS, "attention_bias": True}  # queries, keys and values have one, whether the config says so or not


def llama_key(key: str) -> str:
    """`model.transformer.blocks.3.attn_out.weight` → `model.layers.3.self_attn.o_proj.weight`; others stay."""
    match = re.fullmatch(r"model\.transformer\.blocks\.(\d+)\.(\w+)\.weight", key)
    if match and match[2] in LLADA_LAYER:
        return f"model.layers.{match[1]}.{LLADA_LAYER[match[2]]}.weight"
    return LLADA_WHOLE.get(key, key)


def llada_key(key: str) -> str:
    """The way back: a Llama's key as LLaDA's files have it."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", key)
    if match:
        return f"model.transformer.blocks.{match[1]}.{_flip(LLADA_LAYER)[match[2]]}.weight"
    return _flip(LLADA_WHOLE)[key]


def llada_config(config: Config) -> dict[str, Any]:
    """LLaDA's config in Llama's words."""
    _check_build(config, LLADA_IS, "a LLaDA of another build, which is no Llama")
    config = {"max_sequence_length": 4096, **config}
    config["n_kv_heads"] = config.get("n_kv_heads") or config.get("n_heads")
    sizes = _taken(config, LLADA_SIZES)
    rope = {"rope_type": "default", **_taken(config, {"rope_theta": "rope_theta"})}
    return {**sizes, "rope_parameters": rope, "tie_word_embeddings": bool(config.get("weight_tying")), **_ids(config)}


def llada_json(llama: Any) -> dict[str, Any]:
    """The way back: what LLaDA's config.json says of a LlamaConfig."""
    sizes = {theirs: getattr(llama, ours) for theirs, ours in LLADA_SIZES.items()}
    rope = {"rope_theta": llama.rope_parameters["rope_theta"], "rope_full_precision": True}
    return {**LLADA_IS, **sizes, **rope, "vocab_size": llama.vocab_size, "weight_tying": llama.tie_word_embeddings}


def _dream_config(config: Config) -> dict[str, Any]:
    """Dream's config is Qwen2's, but for what its own code adds."""
    return _plain_config(config, QWEN2_IS, "a Dream of another build, which is no Qwen2")


def _illada_config(config: Config) -> dict[str, Any]:
    if "d_model" in config:
        return llada_config(config)
    tied = {"tie_word_embeddings": True, **config}
    return _plain_config(tied, LLAMA_IS, "an iLLaDA of another build, which is no Llama")


def _plain_config(config: Config, build: Config, other: str) -> dict[str, Any]:
    """A Llama's or Qwen2's own words: the same attention in every layer, rotated the plain way."""
    sizes, rope = _taken(config, {n: n for n in PLAIN_SIZES}), config.get("rope_parameters")
    derived = {
        "head_dim": _quotient(sizes["hidden_size"], sizes["num_attention_heads"]),
        "layer_types": ["full_attention"] * len(_sequence(config.get("layer_types"))),
        "rope_parameters": {"rope_type": "default", "rope_theta": _theta(config)},
    }
    _check_build(config, {**build, **derived}, other)
    return {**sizes, "rope_parameters": rope or derived["rope_parameters"], **_ids(config)}


def _check_build(config: Config, build: Config, other: str) -> None:
    """`build` names what the network must be; what a config leaves out or says null of is so."""
    differs = {k: v for k, v in build.items() if config.get(k) is not None and config[k] != v}
    if differs:
        said = ", ".join(f"{k} {printable(repr(config[k]))} (not {v!r})" for k, v in differs.items())
        raise UserError(f"its config.json asks for {said}: {other}")


def _theta(config: Config) -> Any:
    """The rotation's base, as older configs have it or as transformers 5 writes it."""
    rope = config.get("rope_parameters")
    if "rope_theta" not in config and isinstance(rope, dict) and "rope_theta" in rope:
        return rope["rope_theta"]
    return _taken(config, {"rope_theta": "rope_theta"})["rope_theta"]


def _quotient(width: Any, heads: Any) -> Any:
    return width // heads if type(width) is int and type(heads) is int and heads > 0 else None


def _sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _taken(config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    if lacking := sorted(names.keys() - config.keys()):
        raise UserError(f"its config.json lacks {', '.join(lacking)}")
    return {ours: config[theirs] for theirs, ours in names.items()}


def _ids(config: Config) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {n: config.get(n) for n in names}


def _flip(names: Mapping[str, str]) -> dict[str, str]:
    return {v: k for k, v in names.items()}


Mask = Callable[[Config, "ModelTokenizer | None"], int | None]


def _mask_in_config(config: Config, text: ModelTokenizer | None) -> int | None:
    return config.get("mask_token_id")


def _mask_in_tokenizer(config: Config, text: ModelTokenizer | None) -> int | None:
    return None if text is None else text.mask_id


def _mask_by_name(config: Config, text: ModelTokenizer | None) -> int | None:
    return None if text is None else text.id_of("<|mask|>")


@dataclass(frozen=True)
class Architecture:
    """A row: which checkpoints it opens, what they become, and what their weights do not tell."""

    name: str
    opens: str  # for people
    architecture: str  # a pattern
    becomes: str  # the transformers class, the pattern's groups filled in
    paradigm: str  # "mdm" | "arm"
    shift: bool = False
    key: str = r".*"  # a pattern of a key that must be there, where the architecture alone does not tell
    mask: Mask = lambda config, text: None
    mask_comes_from: str = ""  # for people
    config: Callable[[Config], dict[str, Any]] | None = None  # None: config.json is the transformers class's own
    rename: Callable[[str], str] = str  # a checkpoint's key → the transformers class's
    spare: str = r"(?!)"  # a pattern of tensors of other heads, left unread
    separator: bool = False  # its texts end with a separator token, which must follow the answer
    context: int | None = None  # usable positions; None: those the config names
    note: str = ""  # what a user should know


ARCHITECTURES = (
    Architecture(
        name="llada",
        opens="LLaDA-8B Base and Instruct, LLaDA-1.5",
        architecture="LLaDAModelLM",
        key=r"model\.transformer\..+",
        becomes="LlamaForCausalLM",
        paradigm="mdm",
        mask=_mask_in_config,
        mask_comes_from="config.json",
        config=llada_config,
        rename=llama_key,
    ),
    Architecture(
        name="illada",
        opens="iLLaDA-8B Base and Instruct",
        architecture=r"(?i:i?llada)\w*",
        key=r"model\.layers\..+",
        becomes="LlamaForCausalLM",
        paradigm="mdm",
        mask=lambda config, text: 5,  # in neither the config nor the tokenizer; its authors say so
        mask_comes_from="always 5",
        config=_illada_config,
    ),
    Architecture(
        name="dream",
        opens="Dream-7B Base and Instruct, Dream-Coder, DiffuCoder",
        architecture="DreamModel",
        becomes="Qwen2ForCausalLM",
        paradigm="mdm",
        shift=True,
        mask=_mask_in_config,
        mask_comes_from="config.json",
        config=_dream_config,
        context=2048,  # what it was trained for; its config names the base model's 131072
    ),
    Architecture(
        name="a2d",
        opens="dllm's diffusion models (Qwen3-0.6B-diffusion-mdlm, …)",
        architecture=r"A2D(Llama|Qwen2|Qwen3)LMHeadModel",
        becomes=r"\1ForCausalLM",
        paradigm="mdm",
        mask=_mask_by_name,
        mask_comes_from="the tokenizer's <|mask|>",
        note="a block-diffusion checkpoint (bd3lm) has the same files and would be read with full attention",
    ),
    Architecture(
        name="bert",
        opens="masked language models: BERT, ModernBERT",
        architecture=r"((?:Bert|ModernBert)ForMaskedLM)",
        becomes=r"\1",
        paradigm="mdm",
        mask=_mask_in_tokenizer,
        mask_comes_from="the tokenizer",
        spare=r"cls\.seq_relationship\..+|(\w+\.)?pooler\..+",
        separator=True,
    ),
    Architecture(
        name="roberta",
        opens="masked language models: RoBERTa, XLM-RoBERTa",
        architecture=r"((?:Roberta|XLMRoberta)ForMaskedLM)",
        becomes=r"\1",
        paradigm="mdm",
        mask=_mask_in_tokenizer,
        mask_comes_from="the tokenizer",
        spare=r"(\w+\.)?pooler\..+",
        separator=True,
    ),
    Architecture(
        name="causal",
        opens="any causal language model of transformers (Llama, Qwen, Gemma, SmolLM, GPT-2, …)",
        architecture=r"(\w+)",  # and known to transformers as a causal language model
        becomes=r"\1",
        paradigm="arm",
        shift=True,
        mask_comes_from="mask_id=, which makes it a masked diffusion model (DiffuGPT, DiffuLLaMA)",
    ),
)
CAUSAL = ARCHITECTURES[-1]
REMOTE = Architecture(
    name="remote",
    opens="checkpoints with code of their own, run only with trust_remote_code=True",
    architecture=r"(?!)",
    becomes="",
    paradigm="arm",
    shift=True,
    mask=_mask_in_config,
    mask_comes_from="config.json",
)

BLOCK = "it attends causally from block to block, which is not offered yet"
MIXTURE = "a mixture of experts with code of its own; transformers has no such class"
REFUSED = {  # pattern of an architecture → (name, why)
    r"LLaDA2\w*": ("LLaDA2", f"{BLOCK}, and it is {MIXTURE}"),
    r"LLaDAMoE\w*": ("LLaDA-MoE", f"it is {MIXTURE}"),
    r"Llava\w*LLaDA\w*|LLaDAV\w*|MMaDA\w*": ("LLaDA-V / MMaDA", "it reads images, which is not offered"),
    r"SDAR\w*": ("SDAR", BLOCK),
    r"Fast_?dLLM\w*": ("Fast-dLLM v2", BLOCK),
    r"(?i:bd3lm)\w*": ("BD3-LM", f"{BLOCK}, and transformers has no such class"),
    r"(?i:mdlm|sedd)\w*": ("MDLM / SEDD", "a network of its own (DiT blocks); transformers has no such class"),
    r"DiffusionGemma\w*": (
        "DiffusionGemma",
        "it has no mask token: noise is uniform and the canvas attends to a prefix of keys, which is not offered yet",
    ),
}


def recognise(config: Config, keys: Collection[str] | None) -> tuple[Architecture, str] | None:
    """The row that opens a checkpoint and the transformers class it becomes; None: no row does.

    `keys` None: they are not known yet, and any row whose architecture fits will do.
    """
    for architecture in _architectures(config):
        for pattern, (name, why) in REFUSED.items():
            if re.fullmatch(pattern, architecture):
                raise UserError(f"{name} ({printable(architecture)}) cannot be opened: {why}")
        for row in ARCHITECTURES:
            match = re.fullmatch(row.architecture, architecture)
            if match is None or not (keys is None or any(re.fullmatch(row.key, key, re.DOTALL) for key in keys)):
                continue
            becomes = match.expand(row.becomes)
            if row.name != "causal" or becomes in causal_classes():
                return row, becomes
    return None


def _architectures(config: Config) -> list[str]:
    named = config.get("architectures")
    if not (isinstance(named, list) and named and all(isinstance(n, str) for n in named)):
        raise UserError(f"its config.json names no architectures (got {printable(repr(named))})")
    return named


@cache
def causal_classes() -> frozenset[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return frozenset(NAMES.values())
