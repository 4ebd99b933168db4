"""Small checkpoints with random weights in the layouts of the real ones, to look through and to test with.

    write_random("tiny")                                  # LLaDA's layout
    write_random("tiny-dream", "dream", seed=1, shards=3, layers=2)

The tokenizer is real and small: the 256 bytes and the special tokens of the family, with its chat template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from floatscope.errors import UserError, unknown_choice
from floatscope.models.files import read_json
from floatscope.models.write import tensors_of, write_checkpoint

MARK = {"written_by": "floatscope.write_random"}  # in config.json
WRITTEN = ("model*.safetensors*", "*token*.json", "vocab.json", "merges.txt", "chat_template.jinja")
SPREAD = 0.3  # of the random weights: at a real initialiser's 0.02 so small a model attends to everything alike
SHAPE = {"width": 64, "layers": 6, "heads": 4, "kv_heads": 4, "ffn": 192, "vocabulary": 512, "context": 4096}

HEADERS = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A layout, the transformers class behind it, and its special tokens: those with a role, then those without."""

    writes: str
    build: Callable[[dict[str, int], dict[str, Any]], Any]
    roles: dict[str, str]
    others: tuple[str, ...] = ()
    template: str | None = None
    mask: str | None = None


def write_random(folder: str | Path, layout: str = "llada", seed: int = 0, shards: int = 1, **shape: int) -> Path:
    """A checkpoint with random weights; the sizes are `SHAPE` unless `shape` says otherwise.

    A vocabulary too small for the tokenizer gets none: its last id is then the mask, the one before ends a text.
    """
    if layout not in KINDS:
        raise unknown_choice("layout", str(layout), KINDS)
    for name in shape:
        if name not in SHAPE:
            raise unknown_choice("size of a random checkpoint", name, SHAPE)
    sizes = {**SHAPE, "kv_heads": shape.get("heads", SHAPE["heads"]), **shape}
    _check(sizes, seed, shards, layout)
    kind = KINDS[layout]
    tokenizer: Any = _tokenizer(kind)
    if len(tokenizer) > sizes["vocabulary"]:
        tokenizer, last = None, sizes["vocabulary"] - 1
        ids = {"eos_token_id": last - 1, "pad_token_id": last - 1, **({"mask_token_id": last} if kind.mask else {})}
    else:
        named: dict[str, str] = {
            role: kind.roles[role] for role in ("bos_token", "eos_token", "pad_token") if role in kind.roles
        }
        named |= {"mask_token": kind.mask} if kind.mask else {}
        ids = {f"{role}_id": tokenizer.convert_tokens_to_ids(token) for role, token in named.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = kind.build(sizes, {"initializer_range": SPREAD, "tie_word_embeddings": False})
    tensors_of(module, kind.writes, shards)  # nothing is touched before all is known to be right
    _claim(Path(folder))
    return write_checkpoint(folder, module, kind.writes, tokenizer=tokenizer, ids={**ids, **MARK}, shards=shards)


def _check(sizes: dict[str, int], seed: int, shards: int, layout: str) -> None:
    for name, value in {**sizes, "shards": shards, "seed": seed}.items():
        least = {"vocabulary": 2, "seed": 0, "shards": -math.inf}.get(name, 1)  # shards: as there are tensors
        if type(value) is not int or value < least or value >= 2**63:
            raise UserError(f"{name} must be a whole number of at least {max(least, 0)}, got {value!r}")
    width, heads, kv_heads = sizes["width"], sizes["heads"], sizes["kv_heads"]
    if width % heads or heads % kv_heads:
        raise UserError(f"width {width}, heads {heads}, kv_heads {kv_heads}: each must be a multiple of the next")
    if layout != "bert" and width // heads % 2:
        raise UserError(f"width {width} of {heads} heads: each head takes {width // heads}, which must be even")


def _claim(folder: Path) -> None:
    """A new or empty folder, or one written here before, whose files are then cleared away."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        folder.mkdir(parents=True, exist_ok=True)
    elif not (folder / "config.json").is_file() or not MARK.items() <= read_json(folder / "config.json").items():
        raise UserError(f"{folder} holds other files, which would be overwritten; give a new or empty folder")
    for file in {file for pattern in WRITTEN for file in folder.glob(pattern)}:
        file.unlink()
    (folder / "config.json").write_text(json.dumps(MARK))  # ours from now on, also if the writing is broken off


def _tokenizer(kind: Kind) -> Any:
    """Byte-level, without merges."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*dict.fromkeys([*kind.roles.values(), *kind.others])])
    if "cls_token" in kind.roles:
        cls, sep = kind.roles["cls_token"], kind.roles["sep_token"]
        ends = [(token, backend.token_to_id(token)) for token in (cls, sep)]
        backend.post_processor = processors.TemplateProcessing(single=f"{cls} $A {sep}", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=kind.template, **kind.roles)


def _llama(sizes: dict[str, int], extra: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return LlamaForCausalLM(LlamaConfig(**_names(sizes), rope_parameters=rope, rms_norm_eps=1e-5, **extra))


def _qwen2(sizes: dict[str, int], extra: dict[str, Any]) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    return Qwen2ForCausalLM(Qwen2Config(**_names(sizes), rope_parameters=rope, rms_norm_eps=1e-6, **extra))


def _bert(sizes: dict[str, int], extra: dict[str, Any]) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_names(sizes), **{**extra, "tie_word_embeddings": True}))


def _names(sizes: dict[str, int]) -> dict[str, int]:
    """Our words → transformers'."""
    words = {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn": "intermediate_size",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
    }
    return {words[name]: value for name, value in sizes.items()}


KINDS = {
    "llada": Kind(
        writes="llada",
        build=_llama,
        roles={"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        others=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>"),
        template=HEADERS,
        mask="<|mdm_mask|>",  # in the config alone: the real tokenizer has no mask_token either
    ),
    "dream": Kind(
        writes="dream",
        build=_qwen2,
        roles={
            "bos_token": "<|beginoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "mask_token": "<|mask|>",
        },
        others=("<|im_start|>", "<|im_end|>"),
        template=CHATML,
        mask="<|mask|>",
    ),
    "llama": Kind(
        writes="native",
        build=_llama,
        roles={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        others=("<|im_start|>",),
        template=CHATML,
    ),
    "bert": Kind(
        writes="native",
        build=_bert,
        roles={"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
    ),
}
