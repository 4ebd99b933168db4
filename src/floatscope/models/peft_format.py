"""LoRA in PEFT's format: adapter_config.json and adapter_model.safetensors.

    config = read_lora_config(folder / CONFIG_FILE)      # refuses what is not plain LoRA
    tensors = config.read_tensors(tensors_of_the_file)   # names of the base; lora_B has the scaling in it
    write_json(folder / CONFIG_FILE, lora_config_json("base", 32, layers, token_ids=[7]))

Plain LoRA adds lora_B · lora_A to the matrix of a layer, and may replace the embeddings of single tokens. PEFT has more
methods; a setting that this module does not know is refused, because it could change the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from msgspec import Meta, Struct
from torch import Tensor

from floatscope.errors import UserError, join_names, printable
from floatscope.files.json_files import read_json
from floatscope.files.records import read_typed

CONFIG_FILE, MODEL_FILE, PICKLE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # of every name in the file; then comes the name in the base
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # [rank, inputs] and [outputs, rank]
TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"  # [tokens, width]; despite its name it replaces the rows

READ_SETTINGS = frozenset(
    [
        *("base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
        *("trainable_token_indices", "peft_type", "init_lora_weights", "bias"),
    ]
)
HARMLESS_SETTINGS = frozenset(  # they choose what is trained and how, and change nothing in a trained adapter
    [
        *("auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config"),
        *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules"),
        "task_type",
    ]
)
REASONS = {  # why a setting of PEFT cannot be applied
    "use_dora": "DoRA also scales the rows of the weights",
    "modules_to_save": "it stores complete layers beside the low-rank matrices",
    "bias": "it changes biases",
    "lora_bias": "it adds biases",
    "alora_invocation_tokens": "it is applied only after certain tokens",
    "layer_replication": "it repeats layers of the base",
    "target_parameters": "it changes weights that are not linear layers",
}
NEUTRAL_INITS = (True, False, "gaussian", "orthogonal", "eva")  # the others change the weights of the base as well
REMEDY = "merge it into its base with peft (merge_and_unload) and open the result"

Value = TypeVar("Value")


Rank = Annotated[int, Meta(ge=1)]
Number = Annotated[float, Meta(gt=-1e30, lt=1e30)]
LayerName = Annotated[str, Meta(pattern=r"^[\w.]+\Z")]  # PEFT allows regular expressions too; those are not evaluated
TokenIds = list[Annotated[int, Meta(ge=0)]]
NAMES = {  # ours → PEFT's
    "base_name": "base_model_name_or_path",
    "rank": "r",
    "alpha": "lora_alpha",
    "is_rank_stabilized": "use_rslora",
    "token_indices": "trainable_token_indices",
}


class LoraConfig(Struct, frozen=True, rename=NAMES):
    """The settings of plain LoRA that decide what is added to the base: the type of adapter_config.json."""

    base_name: str = "an unnamed base"
    rank: Rank = 8
    alpha: Number = 8.0
    rank_pattern: dict[LayerName, Rank] = {}  # the end of a layer's name → its own rank
    alpha_pattern: dict[LayerName, Number] = {}
    is_rank_stabilized: bool = False  # scaled by alpha / √rank instead of alpha / rank
    token_indices: TokenIds | dict[str, TokenIds] = []  # of all embeddings, or by the name of the embedding

    def __post_init__(self) -> None:
        is_of_one = not isinstance(self.token_indices, dict) or len(self.token_indices) == 1
        if not is_of_one or len(set(self.token_ids)) < len(self.token_ids):
            raise ValueError("Expected different ids of one embedding in 'trainable_token_indices'")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens whose embeddings are replaced."""
        ids = self.token_indices
        return tuple(next(iter(ids.values())) if isinstance(ids, dict) else ids)

    def layer_rank(self, layer: str) -> int:
        """Return the rank of a layer."""
        return _find_by_name(self.rank_pattern, layer, self.rank)

    def scaling(self, layer: str) -> float:
        """Return the factor of lora_B · lora_A in a layer."""
        rank = self.layer_rank(layer)
        return _find_by_name(self.alpha_pattern, layer, self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )

    def read_tensors(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of adapter_model.safetensors by the names of the base; lora_B has the scaling in it."""
        names = {name: name.removeprefix(PREFIX) for name in stored}
        if foreign := [k for k, v in names.items() if k == v or not v.endswith((LORA_A, LORA_B, TOKEN_ROWS))]:
            raise UserError(f"it has tensors that plain LoRA does not have: {join_names(foreign, 2)}; {REMEDY}")
        for name, tensor in stored.items():
            layer, axis = split_name(names[name])[0], 0 if name.endswith(LORA_A) else 1
            if not name.endswith(TOKEN_ROWS) and (tensor.ndim != 2 or tensor.shape[axis] != self.layer_rank(layer)):
                raise UserError(f"its {names[name]} is {tuple(tensor.shape)}, not of rank {self.layer_rank(layer)}")
        return {names[name]: self._scaled(names[name], tensor) for name, tensor in stored.items()}

    def _scaled(self, name: str, tensor: Tensor) -> Tensor:
        scaling = self.scaling(split_name(name)[0]) if name.endswith(LORA_B) else 1.0
        return tensor if scaling == 1.0 else tensor.to(torch.float32) * scaling


def split_name(name: str) -> tuple[str, str]:
    """Split the name of a tensor into layer and suffix: `("model.layers.0.mlp.up_proj", ".lora_A.weight")`."""
    suffix = next((s for s in (LORA_A, LORA_B, TOKEN_ROWS) if name.endswith(s)), "")
    return name.removesuffix(suffix), suffix


def lora_config_json(base_name: str, rank: int, layers: Iterable[str], token_ids: Iterable[int]) -> dict[str, Any]:
    """Return the content of adapter_config.json for lora_B · lora_A, with a scaling of 1, in `layers`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(layers),
        "trainable_token_indices": list(token_ids) or None,
    }


def read_lora_config(path: Path, remedy: str) -> LoraConfig:
    """Read adapter_config.json; refuse what cannot be applied exactly. `remedy` ends the message for a damaged file."""
    content = read_json(path, remedy)
    if (method := content.get("peft_type")) != "LORA":
        raise UserError(f"{path} is of the method {printable(method)}; only LORA can be applied")
    for name in sorted(content.keys() - READ_SETTINGS - HARMLESS_SETTINGS | {"bias"}):
        if content.get(name) not in (None, False, "none", [], {}):
            reason = REASONS.get(name, "it is not part of plain LoRA")
            raise UserError(f"{path} sets {printable(name)}, which cannot be applied ({reason}); {REMEDY}")
    if (init := content.get("init_lora_weights", True)) not in NEUTRAL_INITS:
        raise UserError(f"{path} sets init_lora_weights to {printable(init)}, which changes the base too; {REMEDY}")
    return read_typed(path, LoraConfig, remedy, _drop_null)


def _drop_null(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not None}


def _find_by_name(table: Mapping[str, Value], layer: str, default: Value) -> Value:
    """Return the first entry whose name is the layer's or its end."""
    return next((value for name, value in table.items() if f".{layer}".endswith(f".{name}")), default)
