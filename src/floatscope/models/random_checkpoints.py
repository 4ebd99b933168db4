"""Small checkpoints with random weights in the formats of real ones, for trying things out and for tests.

    write_random("tiny")                                  # LLaDA's format
    write_random("tiny-dream", "dream", seed=1, shards=3, layers=2)

The tokenizer is real and small: the 256 bytes and the special tokens of the architecture, with its chat template.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from floatscope.errors import UserError, unknown_choice
from floatscope.files.json_files import read_json
from floatscope.models.checkpoint import DOWNLOAD_AGAIN
from floatscope.models.checkpoint_writer import checkpoint_tensors, write_checkpoint

SIGNATURE = {"written_by": "floatscope.write_random"}  # in config.json
OWN_FILES = ("model*.safetensors*", "*token*.json", "vocab.json", "merges.txt", "chat_template.jinja")
WEIGHT_STD = 0.3  # with the usual 0.02, a model this small attends to everything alike
EXPERTS = 8
CANVAS, WINDOW = 8, 12  # of DiffusionGemma
CONDITIONING = 16  # width of the conditioning vector of a DiT
SIZES = {"width": 64, "layers": 6, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab_size": 512, "context": 4096}
CONFIG_NAMES = {  # our names → those of a transformers config
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
}

LLAMA3_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLADA2_TEMPLATE = (
    "{% for message in messages %}<role>{{ message['role'] | upper }}</role>{{ message['content'] }}<|role_end|>"
    "{% endfor %}{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}"
)


@dataclass(frozen=True)
class RandomArchitecture:
    """How to build and write a random model of one architecture."""

    file_format: str
    build: Callable[[dict[str, int], dict[str, Any]], Any]  # sizes and config settings → a transformers module
    special_tokens: dict[str, str]  # a role such as "eos_token" → the token
    extra_tokens: tuple[str, ...] = ()  # special tokens without a role
    chat_template: str | None = None
    mask_token: str | None = None
    extra_config: dict[str, int] = field(default_factory=dict)  # settings that the transformers class does not have


def write_random(folder: str | Path, architecture: str = "llada", seed: int = 0, shards: int = 1, **sizes: int) -> Path:
    """Write a checkpoint with random weights, which `load` opens.

    Args:
        folder: a new or empty folder, or one that this function wrote before.
        architecture: a key of `RANDOM_ARCHITECTURES`: "llada", "dream", "llada2", "llada-moe", "sdar", "sdar-moe",
            "fast-dllm-v2", "a2d", "mdlm", "bd3lm", "diffusion-gemma", "llama" or "bert". Mixtures have 8 experts of
            `ffn` / 2 hidden units, 2 for a token. "mdlm" and "bd3lm" have 4 · `width` hidden units and `heads` heads of
            keys. "diffusion-gemma" has canvases of 8, windows of 12 in two of three layers, and wider heads in the
            third.
        seed: the seed of the weights.
        shards: the number of weight files.
        **sizes: width, layers, heads, kv_heads, ffn, vocab_size, context; the defaults are `SIZES`. If `vocab_size` is
            too small for the tokenizer, none is written: the last id is then the mask, and the one before it is eos.

    Returns:
        The folder.

    Example:
        model = fs.load(fs.write_random("tiny", layers=2, heads=2))
        model.spec.architecture  # 'llada'
    """
    if architecture not in RANDOM_ARCHITECTURES:
        raise unknown_choice("architecture", str(architecture), RANDOM_ARCHITECTURES)
    for name in sizes:
        if name not in SIZES:
            raise unknown_choice("size of a random checkpoint", name, SIZES)
    sizes = {**SIZES, "kv_heads": sizes.get("heads", SIZES["heads"]), **sizes}
    _check_numbers(sizes, seed, shards, architecture)
    row = RANDOM_ARCHITECTURES[architecture]
    tokenizer: Any = _build_tokenizer(row)
    if len(tokenizer) > sizes["vocab_size"]:
        tokenizer, last = None, sizes["vocab_size"] - 1
        ids = {"eos_token_id": last - 1, "pad_token_id": last - 1}
        ids |= {"mask_token_id": last} if row.mask_token else {}
    else:
        roles = ("bos_token", "eos_token", "pad_token")
        tokens = {role: row.special_tokens[role] for role in roles if role in row.special_tokens}
        tokens |= {"mask_token": row.mask_token} if row.mask_token else {}
        ids = {f"{role}_id": tokenizer.convert_tokens_to_ids(token) for role, token in tokens.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = row.build(sizes, {"initializer_range": WEIGHT_STD, "tie_word_embeddings": False})
    checkpoint_tensors(module, row.file_format, shards)  # raises before any file is touched
    _prepare_folder(Path(folder))
    text_config = module.config.get_text_config()
    if text_config is not module.config:  # a config of several parts has the ids of tokens in that of the text
        for name, token in ids.items():
            setattr(text_config, name, token)
        ids = {}
    extra_config: dict[str, int | str] = {**ids, **row.extra_config, **SIGNATURE}
    return write_checkpoint(
        folder, module, row.file_format, tokenizer=tokenizer, extra_config=extra_config, shards=shards
    )


def _check_numbers(sizes: dict[str, int], seed: int, shards: int, architecture: str) -> None:
    for name, value in {**sizes, "shards": shards, "seed": seed}.items():
        # The writer checks the number of shards against that of the tensors.
        least = {"vocab_size": 2, "seed": 0, "shards": -math.inf}.get(name, 1)
        if type(value) is not int or value < least or value >= 2**63:
            raise UserError(f"{name} must be a whole number of at least {max(least, 0)}, got {value!r}")
    width, heads, kv_heads = sizes["width"], sizes["heads"], sizes["kv_heads"]
    if width % heads or heads % kv_heads:
        raise UserError(f"width {width}, heads {heads}, kv_heads {kv_heads}: each must be a multiple of the next")
    multiple = {"bert": 1, "llada2": 4}.get(architecture, 2)  # a rotation turns pairs; LLaDA2's turns half of a head
    if width // heads % multiple:
        rule = "even" if multiple == 2 else f"a multiple of {multiple}"
        raise UserError(f"width {width} with {heads} heads gives heads of {width // heads}, which must be {rule}")


def _prepare_folder(folder: Path) -> None:
    """Create the folder, or clear one that `write_random` wrote; refuse one with other files."""
    config = folder / "config.json"
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        folder.mkdir(parents=True, exist_ok=True)
    elif not config.is_file() or not SIGNATURE.items() <= read_json(config, DOWNLOAD_AGAIN).items():
        raise UserError(f"{folder} contains other files, which would be overwritten; give a new or empty folder")
    for file in {file for pattern in OWN_FILES for file in folder.glob(pattern)}:
        file.unlink()
    config.write_text(json.dumps(SIGNATURE))  # so that an interrupted write can be repeated


def _build_tokenizer(row: RandomArchitecture) -> Any:
    """Build a byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*dict.fromkeys([*row.special_tokens.values(), *row.extra_tokens])])
    if "cls_token" in row.special_tokens:
        cls, sep = row.special_tokens["cls_token"], row.special_tokens["sep_token"]
        ends = [(token, backend.token_to_id(token)) for token in (cls, sep)]
        backend.post_processor = processors.TemplateProcessing(single=f"{cls} $A {sep}", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=row.chat_template, **row.special_tokens)


def _build_llama(sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return LlamaForCausalLM(LlamaConfig(**_config_sizes(sizes), rope_parameters=rope, rms_norm_eps=1e-5, **settings))


def _build_qwen2(sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    return Qwen2ForCausalLM(Qwen2Config(**_config_sizes(sizes), rope_parameters=rope, rms_norm_eps=1e-6, **settings))


def _build_qwen3(sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    head = {"head_dim": sizes["width"] // sizes["heads"]}
    return Qwen3ForCausalLM(
        Qwen3Config(**_config_sizes(sizes), **head, rope_parameters=rope, rms_norm_eps=1e-6, **settings)
    )


def _build_qwen3_moe(sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    head = {"head_dim": sizes["width"] // sizes["heads"]}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": max(1, sizes["ffn"] // 2)}
    routing = {"norm_topk_prob": True, **settings}
    config = Qwen3MoeConfig(
        **_config_sizes(sizes), **head, **experts, rope_parameters=rope, rms_norm_eps=1e-6, **routing
    )
    return Qwen3MoeForCausalLM(config)


def _build_qwen3_moe_unnormalised(sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    return _build_qwen3_moe(sizes, {**settings, "norm_topk_prob": False})


def _build_glm4_moe(sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        **_config_sizes(sizes),
        head_dim=sizes["width"] // sizes["heads"],
        moe_intermediate_size=max(1, sizes["ffn"] // 2),
        n_routed_experts=EXPERTS,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=min(1, sizes["layers"] - 1),
        use_qk_norm=True,
        num_mtp_layers=0,
        rope_parameters={"rope_type": "default", "rope_theta": 600000.0, "partial_rotary_factor": 0.5},
        rms_norm_eps=1e-6,
        **settings,
    )
    module = Glm4MoeForCausalLM(config)
    for name, bias in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(bias, std=WEIGHT_STD)  # zeros at first, and a bias of zeros would test nothing
    return module


def _build_dit(sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    from floatscope.models.dit import DiTConfig, DiTForMaskedLM

    names = {name: size for name, size in sizes.items() if name not in ("kv_heads", "ffn")}
    module = DiTForMaskedLM(DiTConfig(**_config_sizes(names), conditioning_size=CONDITIONING, **settings))
    for name, weights in module.named_parameters():
        if re.search(r"adaLN|norm|\.bias$", name):  # zeros and ones at first, which would test nothing
            weights.data += torch.randn(weights.shape) * WEIGHT_STD / 3
    return module


def _build_diffusion_gemma(sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    layers, head = sizes["layers"], sizes["width"] // sizes["heads"]
    kinds = ["full_attention" if i % 3 == 2 or i == layers - 1 else "sliding_attention" for i in range(layers)]
    text = {
        **_config_sizes(sizes),
        "head_dim": head,
        "global_head_dim": 2 * head,
        "num_global_key_value_heads": 1,
        "layer_types": kinds,
        "sliding_window": WINDOW,
        "num_experts": EXPERTS,
        "top_k_experts": 2,
        "moe_intermediate_size": max(1, sizes["ffn"] // 2),
        "initializer_range": settings["initializer_range"],
    }
    vision = {"num_hidden_layers": 1, "position_embedding_size": 4, "patch_size": 2, "pooling_kernel_size": 1}
    vision |= {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = DiffusionGemmaConfig(text_config=text, vision_config={**vision, "head_dim": 8}, canvas_length=CANVAS)
    module = DiffusionGemmaForBlockDiffusion(config)
    for name, weights in [*module.named_parameters(), *module.named_buffers()]:
        if re.search(r"norm\.weight|layer_scalar|scale$", name) and "embed" not in name:  # ones at first
            weights.data += torch.randn(weights.shape) * WEIGHT_STD / 3
    return module


def _build_bert(sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_config_sizes(sizes), **{**settings, "tie_word_embeddings": True}))


def _config_sizes(sizes: dict[str, int]) -> dict[str, int]:
    return {CONFIG_NAMES[name]: value for name, value in sizes.items()}


SDAR_TOKENS: dict[str, Any] = {
    "special_tokens": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "mask_token": "<|MASK|>"},
    "extra_tokens": ("<|im_start|>",),
    "chat_template": CHATML_TEMPLATE,
    "mask_token": "<|MASK|>",
}
GPT2_TOKENS: dict[str, Any] = {
    "special_tokens": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "extra_tokens": ("<|mask|>",),
    "mask_token": "<|mask|>",  # in the config alone: GPT-2's tokenizer has none
}
RANDOM_ARCHITECTURES = {
    "llada": RandomArchitecture(
        file_format="llada",
        build=_build_llama,
        special_tokens={"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        extra_tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>"),
        chat_template=LLAMA3_TEMPLATE,
        mask_token="<|mdm_mask|>",  # in the config alone: the real tokenizer has no mask_token either
    ),
    "dream": RandomArchitecture(
        file_format="dream",
        build=_build_qwen2,
        special_tokens={
            "bos_token": "<|beginoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "mask_token": "<|mask|>",
        },
        extra_tokens=("<|im_start|>", "<|im_end|>"),
        chat_template=CHATML_TEMPLATE,
        mask_token="<|mask|>",
    ),
    "llada2": RandomArchitecture(
        file_format="llada2",
        build=_build_glm4_moe,
        special_tokens={"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        extra_tokens=("<role>", "</role>", "<|role_end|>", "<|mask|>"),
        chat_template=LLADA2_TEMPLATE,
        mask_token="<|mask|>",
        extra_config={"block_size": 32},
    ),
    "llada-moe": RandomArchitecture(
        file_format="llada-moe",
        build=_build_qwen3_moe_unnormalised,
        special_tokens={"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        extra_tokens=("<role>", "</role>", "<|role_end|>", "<|mdm_mask|>"),
        chat_template=LLADA2_TEMPLATE,
        mask_token="<|mdm_mask|>",
    ),
    "sdar": RandomArchitecture(file_format="sdar", build=_build_qwen3, **SDAR_TOKENS, extra_config={"block_size": 4}),
    "sdar-moe": RandomArchitecture(
        file_format="sdar-moe", build=_build_qwen3_moe, **SDAR_TOKENS, extra_config={"block_size": 4}
    ),
    "fast-dllm-v2": RandomArchitecture(
        file_format="fast-dllm-v2",
        build=_build_qwen2,
        special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        extra_tokens=("<|im_start|>", "|<MASK>|"),
        chat_template=CHATML_TEMPLATE,
        mask_token="|<MASK>|",
        extra_config={"bd_size": 32},
    ),
    "a2d": RandomArchitecture(
        file_format="a2d",
        build=_build_qwen3,
        special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "mask_token": "<|mask|>"},
        extra_tokens=("<|im_start|>",),
        chat_template=CHATML_TEMPLATE,
        mask_token="<|mask|>",
    ),
    "mdlm": RandomArchitecture(file_format="mdlm", build=_build_dit, **GPT2_TOKENS),
    "bd3lm": RandomArchitecture(file_format="bd3lm", build=_build_dit, **GPT2_TOKENS, extra_config={"block_size": 4}),
    "diffusion-gemma": RandomArchitecture(
        file_format="native",
        build=_build_diffusion_gemma,
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        extra_tokens=("<start_of_turn>", "<end_of_turn>"),
        chat_template=GEMMA_TEMPLATE,
    ),
    "llama": RandomArchitecture(
        file_format="native",
        build=_build_llama,
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        extra_tokens=("<|im_start|>",),
        chat_template=CHATML_TEMPLATE,
    ),
    "bert": RandomArchitecture(
        file_format="native",
        build=_build_bert,
        special_tokens={"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
    ),
}
