"""A training that was broken off: what is learnt, the optimizer and the progress, in small pieces, never half-written.

    save(folder, module, optimizer, progress, recipe, kind)
    progress = restore(folder, module, optimizer, recipe, kind)      # None: there is nothing to go on from

A checkpoint is a folder `step-NNNNNN` of safetensors pieces of at most 15 MB, so that a run can move between machines.
It gets its name when it is whole; the one before is removed after.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from floatscope.errors import UserError
from floatscope.training.progress import Progress, Recipe
from floatscope.training.writing import writing

PIECE = 15 * 1000**2


def save(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, recipe: Recipe, kind: str
) -> Path:
    """Write the state of a training; returns the checkpoint's folder."""
    name = f"step-{progress.step:06}"
    part = folder / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        with writing("the checkpoint", folder):
            part.mkdir(parents=True)
            for i, piece in enumerate(_pieces(_state(module, optimizer))):
                save_file(piece, part / f"piece-{i:02}.safetensors")
            told = {"kind": kind, "recipe": recipe.as_json, **asdict(progress)}
            (part / "progress.json").write_text(json.dumps(told))
            shutil.rmtree(folder / name, ignore_errors=True)
            part.rename(folder / name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for other in _checkpoints(folder):
        if other.name != name:
            shutil.rmtree(other)
    return folder / name


def restore(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, kind: str
) -> Progress | None:
    """Put the latest checkpoint's state into the module and the optimizer."""
    found = _checkpoints(folder)
    if not found:
        return None
    at = found[-1]
    try:
        told = json.loads((at / "progress.json").read_text())
        parts: dict[str, Tensor] = {}
        for piece in sorted(at.glob("piece-*.safetensors")):
            parts |= load_file(piece)
        stored = _joined(parts)
        then = told["kind"], told["recipe"]
        losses = [(int(step), float(text), float(answers)) for step, text, answers in told["losses"]]
        progress = Progress(int(told["step"]), losses, float(told["seconds"]))
    except (OSError, ValueError, TypeError, LookupError, SafetensorError) as error:
        raise UserError(f"the checkpoint {at} is damaged ({error}); remove it to begin again") from error
    check_same(at, then, kind, recipe)
    wanted = _state(module, optimizer, progress.step)
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


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and p.suffix != ".part")


def _differs(then: dict[str, Any], now: Recipe) -> str:
    changed = {k: (then.get(k), v) for k, v in now.as_json.items() if then.get(k) != v}
    return ", ".join(f"{k} {a}, not {b}" for k, (a, b) in changed.items()) or "the same recipe"
