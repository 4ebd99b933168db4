"""A training that was broken off: what is learnt, the optimizer and the progress, in small pieces, never half-written.

    training = Training(folder, "mdm", recipe, digest_of(material.facts), module, optimizer)
    save(training, progress)
    progress = restore(training)      # None: there is nothing to go on from

A checkpoint is a folder `step-NNNNNN` of safetensors pieces of at most 15 MB, so that a run can move between machines.
It gets its name when it is whole; the one before is removed after.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from floatscope.errors import UserError
from floatscope.files.atomic import PART, writing_whole
from floatscope.lab.training.progress import Progress, Recipe

PIECE = 15 * 1000**2


@dataclass(frozen=True)
class Training:
    """What is trained, by which recipe, from what, and the folder of its checkpoints."""

    folder: Path
    kind: str
    recipe: Recipe
    material: str  # the digest of all it reads
    module: nn.Module
    optimizer: torch.optim.Optimizer


def save(training: Training, progress: Progress) -> Path:
    """Write the state of a training, unless that of this step is there; returns the checkpoint's folder."""
    at = training.folder / f"step-{progress.step:06}"
    if not at.is_dir():
        with writing_whole("the checkpoint", at) as part:
            for i, piece in enumerate(_pieces(_state(training.module, training.optimizer))):
                save_file(piece, part / f"piece-{i:02}.safetensors")
            about = {"kind": training.kind, "recipe": training.recipe.as_json, "material": training.material}
            (part / "progress.json").write_text(json.dumps({**about, **progress.as_json}))
    for other in training.folder.glob("step-*"):  # older ones, and what a kill left unfinished
        if other != at:
            shutil.rmtree(other)
    return at


def restore(training: Training) -> Progress | None:
    """Put the latest checkpoint's state into the module and the optimizer."""
    found = sorted(p for p in training.folder.glob("step-*") if p.is_dir() and p.suffix != PART)
    if not found:
        return None
    at = found[-1]
    try:
        told = json.loads((at / "progress.json").read_text())
        parts: dict[str, Tensor] = {}
        for piece in sorted(at.glob("piece-*.safetensors")):
            parts |= load_file(piece)
        stored = _joined(parts)
        then, material = (told["kind"], told["recipe"]), told["material"]
        progress = Progress.from_json(told)
    except (OSError, ValueError, TypeError, LookupError, SafetensorError) as error:
        raise UserError(f"the checkpoint {at} is damaged ({error}); remove it to begin again") from error
    check_same(at, then, training.kind, training.recipe)
    if material != training.material:
        raise UserError(f"{at} learnt from other files or another base; give those, or use another --out")
    wanted = _state(training.module, training.optimizer, progress.step)
    if stored.keys() != wanted.keys():
        lost = sorted(wanted.keys() ^ stored.keys())
        said = f"the checkpoint {at} lacks or adds {len(lost)} tensors, such as {lost[0]}"
        raise UserError(f"{said}; remove it to begin again")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(stored[name].reshape(tensor.shape))
    return progress


def check_same(at: Path, then: tuple[str, dict[str, Any]], kind: str, recipe: Recipe) -> None:
    """What lies at `at`, of a kind and a recipe, belongs to this training."""
    if then != (kind, recipe.as_json):
        what = f"{then[0]}, {_differs(then[1], recipe)}"
        raise UserError(f"{at} is of another training ({what}); use another --out")


def _state(module: nn.Module, optimizer: torch.optim.Optimizer, step: int | None = None) -> dict[str, Tensor]:
    """Everything that is learnt, by name; with `step` an optimizer that has not run yet gets room for its state."""
    learnt = {name: p for name, p in module.named_parameters() if p.requires_grad}
    state: dict[str, Tensor] = {f"weight.{name}": p.data for name, p in learnt.items()}
    for name, p in learnt.items():
        own: dict[str, Any] = optimizer.state[p]
        if step is not None and not own:
            own["step"] = torch.tensor(float(step), device=p.device if optimizer.defaults.get("fused") else "cpu")
            own["exp_avg"], own["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in own:
                state[f"{moment}.{name}"] = own[moment]
    return state


def _pieces(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in order, as many to a piece as fit; one that is larger than a piece is cut, its parts named `name#0`,
    `name#1`, …"""
    pieces: list[dict[str, Tensor]] = [{}]
    room = PIECE
    for name, part in _parts(state):
        size = part.numel() * part.element_size()
        if size > room and pieces[-1]:
            pieces.append({})
            room = PIECE
        pieces[-1][name] = part.detach().cpu().contiguous()
        room -= size
    return pieces


def _parts(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        most = PIECE // tensor.element_size()
        if tensor.numel() <= most:
            yield name, tensor
        else:
            yield from ((f"{name}#{i}", part) for i, part in enumerate(tensor.flatten().split(most)))


def _joined(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back; what was cut is flat."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for key, part in parts.items():
        name, _, number = key.partition("#")
        found.setdefault(name, []).append((int(number or 0), part))
    ordered = {name: [part for _, part in sorted(each, key=lambda e: e[0])] for name, each in found.items()}
    return {name: each[0] if len(each) == 1 else torch.cat(each) for name, each in ordered.items()}


def _differs(then: dict[str, Any], now: Recipe) -> str:
    changed = {k: (then.get(k), v) for k, v in now.as_json.items() if then.get(k) != v}
    return ", ".join(f"{k} {a}, not {b}" for k, (a, b) in changed.items()) or "the same recipe"
