"""The whole training, in legs: prepare, `arm`, `mdm`, `mdm-adapted`; each goes on where it stopped.

    for told in leg(Path("twins"), ["enwik8_clean.txt.xz"], Recipe(), minutes=8):
        told.kind, told.step, told.losses

A leg ends when its time is over. The same call again, here or on a machine the folder was moved to, does the next.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from floatscope.errors import UserError
from floatscope.models import write_checkpoint
from floatscope.models.families import PLAIN_SIZES
from floatscope.twins.checkpoint import restore, save
from floatscope.twins.material import Material, batches, prepare
from floatscope.twins.train import KINDS, Progress, Recipe, new_module, optimizer_for, train_steps

LAYOUTS = {"arm": "native", "mdm": "llada", "mdm-adapted": "dream"}
SAVE_EVERY = 120.0  # seconds


@dataclass(frozen=True)
class Told:
    """How far a leg is."""

    kind: str
    step: int
    steps: int
    text_loss: float
    answer_loss: float
    tokens_per_second: float
    finished: bool = False


def leg(
    folder: Path,
    text: Sequence[Path],
    recipes: Mapping[str, Recipe],
    minutes: float,
    *,
    device: str | None = None,
    workers: int = 0,
    compiled: bool = False,
) -> Iterator[Told]:
    """Train until the time is over or everything is done; a kind that is done is written to `folder`/models."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    ends = time.monotonic() + 60 * minutes
    material = prepare(folder / "material", text, recipes["arm"])
    for kind in KINDS:
        if not (folder / "models" / kind / "config.json").is_file() and time.monotonic() < ends:
            yield from _train(folder, kind, recipes[kind], material, ends, place, workers, compiled)


def unfinished(folder: Path) -> list[str]:
    return [kind for kind in KINDS if not (folder / "models" / kind / "config.json").is_file()]


def _train(
    folder: Path,
    kind: str,
    recipe: Recipe,
    material: Material,
    ends: float,
    place: torch.device,
    workers: int,
    compiled: bool,
) -> Iterator[Told]:
    module = new_module(recipe)
    if kind == "mdm-adapted":
        _copy_weights(folder / "models" / "arm", module)
    module.to(place)
    optimizer = optimizer_for(module, recipe)
    progress = restore(folder / kind, module, optimizer, recipe, kind) or Progress(0, [])
    began, start, saved = time.monotonic(), progress.step, time.monotonic()
    with closing(batches(material, recipe, progress.step, workers)) as rows, _interrupts() as interrupted:

        def over() -> bool:
            return bool(interrupted) or time.monotonic() > ends

        steps = train_steps(module, optimizer, recipe, kind, rows, progress, over, compiled)
        for _ in steps:
            if time.monotonic() - saved > SAVE_EVERY:
                save(folder / kind, module, optimizer, progress, recipe, kind)
                saved = time.monotonic()
            rate = (progress.step - start) * recipe.batch * recipe.length / (time.monotonic() - began)
            yield _told(kind, progress, recipe, rate)
    save(folder / kind, module, optimizer, progress, recipe, kind)
    if interrupted:
        raise KeyboardInterrupt
    if progress.step >= recipe.steps:
        write_twin(folder / "models" / kind, module, kind, recipe, material)
        yield _told(kind, progress, recipe, 0.0, finished=True)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C ends the step that runs, so that it can be saved; a second one ends at once."""
    met: list[int] = []

    def meet(number: int, _: object) -> None:
        if met:
            raise KeyboardInterrupt
        met.append(number)

    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield met
        return
    before = signal.signal(signal.SIGINT, meet)
    try:
        yield met
    finally:
        signal.signal(signal.SIGINT, before)


def write_twin(folder: Path, module: nn.Module, kind: str, recipe: Recipe, material: Material) -> None:
    """The trained weights in bf16, in the layout of the real family, with the tokenizer."""
    tokenizer, _ = material.open()
    module = module.to("cpu", torch.bfloat16)
    ids: dict[str, int] = {"eos_token_id": recipe.vocabulary - 3, "bos_token_id": recipe.vocabulary - 2}
    ids |= {"pad_token_id": recipe.vocabulary - 3}
    ids |= {} if kind == "arm" else {"mask_token_id": recipe.mask_id}
    layout = LAYOUTS[kind]
    part = folder.with_name(f"{folder.name}.part")
    write_checkpoint(part, _as_qwen2(module) if layout == "dream" else module, layout, ids=ids)
    tokenizer.save_pretrained(str(part))
    part.rename(folder)


def _as_qwen2(llama: Any) -> nn.Module:
    """The same network in Qwen2's words: its biases are zero."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    own = {name: getattr(llama.config, name) for name in (*PLAIN_SIZES, "rope_parameters")}
    qwen: Any = Qwen2ForCausalLM(Qwen2Config(**own)).to(torch.bfloat16)
    missing, unexpected = qwen.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected
    assert all(name.endswith(".bias") for name in missing)
    with torch.no_grad():
        for name in missing:
            qwen.get_parameter(name).zero_()
    module: nn.Module = qwen
    return module


def _copy_weights(arm: Path, module: nn.Module) -> None:
    from safetensors.torch import load_file

    if not (arm / "model.safetensors").is_file():
        raise UserError(f"mdm-adapted begins with the trained arm, and {arm} holds none; train that first")
    module.load_state_dict({name: t.float() for name, t in load_file(arm / "model.safetensors").items()})


def _told(kind: str, progress: Progress, recipe: Recipe, rate: float, finished: bool = False) -> Told:
    _, text, answer = progress.losses[-1] if progress.losses else (0, float("nan"), float("nan"))
    return Told(kind, progress.step, recipe.steps, text, answer, rate, finished)
