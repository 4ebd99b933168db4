"""Checkpoints of an unfinished training: trainable weights, optimizer state and progress, written atomically.

    training = Training(folder, "mdm", recipe, sha256_json(corpus.facts), module, optimizer)
    save_checkpoint(training, progress)
    progress = restore_checkpoint(training)      # None if there is no checkpoint

A checkpoint is a folder `step-NNNNNN` of safetensors shards of at most 15 MB, so that it can move between machines. It
gets its name when it is complete; then the one before it is removed.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from floatscope.errors import UserError
from floatscope.files.atomic import PART_SUFFIX, write_folder_atomic
from floatscope.files.records import Record, read_typed
from floatscope.lab.training.progress import Progress, Recipe

MAX_SHARD_BYTES = 15 * 1000**2
PROGRESS = "progress.json"

logger = logging.getLogger(__name__)


class CheckpointRecord(Record):
    """The type of progress.json."""

    kind: str
    recipe: dict[str, Any]
    corpus: str  # digest
    step: Annotated[int, Meta(ge=0)]
    losses: list[tuple[int, float, float]]
    seconds: float
    pending: list[tuple[float, float]]


@dataclass(frozen=True)
class Training:
    """A module in training: its recipe, its corpus, its optimizer, and the folder of its checkpoints."""

    folder: Path
    kind: str
    recipe: Recipe
    corpus_digest: str
    module: nn.Module
    optimizer: torch.optim.Optimizer


def save_checkpoint(training: Training, progress: Progress) -> Path:
    """Write the checkpoint of this step unless it exists, remove all others, and return its folder."""
    checkpoint = training.folder / f"step-{progress.step:06}"
    if not checkpoint.is_dir():
        with write_folder_atomic("the checkpoint", checkpoint) as part:
            for file, shard in _split_into_shards(_training_state(training.module, training.optimizer)):
                save_file(shard, part / file)
            identity = {"kind": training.kind, "recipe": training.recipe.as_json, "corpus": training.corpus_digest}
            (part / PROGRESS).write_text(json.dumps({**identity, **progress.as_json}))
        logger.info("saved %s", checkpoint)
    for other in training.folder.glob("step-*"):  # older checkpoints, and parts that a kill left behind
        if other != checkpoint:
            shutil.rmtree(other)
    return checkpoint


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the latest last."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and p.suffix != PART_SUFFIX)


def count_saved_steps(folder: Path) -> int:
    """Return the step of the latest checkpoint in a folder; 0 without one."""
    checkpoints = find_checkpoints(folder)
    return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0


def restore_checkpoint(training: Training) -> Progress | None:
    """Load the latest checkpoint into the module and the optimizer; return its progress, None without a checkpoint."""
    checkpoints = find_checkpoints(training.folder)
    if not checkpoints:
        return None
    latest = checkpoints[-1]
    record = read_typed(latest / PROGRESS, CheckpointRecord, f"remove {latest} to start again")
    progress = Progress(record.step, record.losses, record.seconds, list(map(torch.tensor, record.pending)))
    try:
        parts: dict[str, Tensor] = {}
        for shard in sorted(latest.glob("shard*.safetensors")):
            parts |= load_file(shard)
        stored = _join_parts(parts)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise UserError(f"the checkpoint {latest} is damaged ({error}); remove it to start again") from error
    check_same_training(latest, (record.kind, record.recipe), training.kind, training.recipe)
    if record.corpus != training.corpus_digest:
        raise UserError(f"{latest} was trained on other files or another base; give those, or use another --out")
    state = _training_state(training.module, training.optimizer, progress.step)
    if stored.keys() != state.keys():
        names = sorted(state.keys() ^ stored.keys())
        message = f"the checkpoint {latest} lacks or adds {len(names)} tensors, such as {names[0]}"
        raise UserError(f"{message}; remove it to start again")
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(stored[name].reshape(tensor.shape))
    logger.info("resumed from %s", latest)
    return progress


def check_same_training(path: Path, stored: tuple[str, dict[str, Any]], kind: str, recipe: Recipe) -> None:
    """Refuse what lies at `path` if its (kind, recipe) is not that of this training."""
    if stored != (kind, recipe.as_json):
        difference = f"{stored[0]}, {_describe_difference(stored[1], recipe)}"
        raise UserError(f"{path} belongs to another training ({difference}); use another --out")


def _training_state(module: nn.Module, optimizer: torch.optim.Optimizer, step: int | None = None) -> dict[str, Tensor]:
    """Return trainable weights and optimizer moments by name; `step` creates the moments of a new optimizer."""
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    state: dict[str, Tensor] = {f"weight.{name}": p.data for name, p in trainable.items()}
    for name, p in trainable.items():
        moments: dict[str, Any] = optimizer.state[p]
        if step is not None and not moments:
            moments["step"] = torch.tensor(float(step), device=p.device if optimizer.defaults.get("fused") else "cpu")
            moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in moments:
                state[f"{moment}.{name}"] = moments[moment]
    return state


def _split_into_shards(state: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield file names and their tensors; a tensor larger than a shard is cut into parts `name#0`, `name#1`, …"""
    parts = dict(_split_large_tensors(state))
    split = split_state_dict_into_shards_factory(
        parts,
        get_storage_size=lambda part: part.nbytes,
        filename_pattern="shard{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        yield file, {name: parts[name].detach().cpu().contiguous() for name in names}


def _split_large_tensors(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        max_elements = MAX_SHARD_BYTES // tensor.element_size()
        if tensor.numel() <= max_elements:
            yield name, tensor
        else:
            yield from ((f"{name}#{i}", part) for i, part in enumerate(tensor.flatten().split(max_elements)))


def _join_parts(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert `_split_large_tensors`; a tensor that was cut comes back flat."""
    grouped: dict[str, list[tuple[int, Tensor]]] = {}
    for key, part in parts.items():
        name, _, number = key.partition("#")
        grouped.setdefault(name, []).append((int(number or 0), part))
    ordered = {name: [part for _, part in sorted(pairs, key=lambda p: p[0])] for name, pairs in grouped.items()}
    return {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in ordered.items()}


def _describe_difference(stored: dict[str, Any], recipe: Recipe) -> str:
    changed = {k: (stored.get(k), v) for k, v in recipe.as_json.items() if stored.get(k) != v}
    return ", ".join(f"{k} {a}, not {b}" for k, (a, b) in changed.items()) or "the same recipe"
