"""The whole training, in legs: prepare, `arm`, `mdm`, `mdm-adapted`, then their scores, their attention, their cards.

    for told in leg(Path("twins"), [Path("enwik8_clean.txt.xz")], RECIPES, minutes=8):
        told.kind                                # a Told while it is trained, an Asked while it is examined

A leg ends when its time is over. The same call again, here or on a machine the folder was moved to, does the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from floatscope.errors import UserError
from floatscope.files.atomic import writing, writing_whole
from floatscope.files.records import device_name, digest, digest_of
from floatscope.lab.training.checkpoint import Training, check_same
from floatscope.lab.training.legs import Leg, run
from floatscope.lab.training.progress import Progress, Told, told
from floatscope.lab.twins.attention import observe, read_attention
from floatscope.lab.twins.card import write_card
from floatscope.lab.twins.evaluate import Asked, examine, missing, read_scores
from floatscope.lab.twins.material import Material, batches, prepare
from floatscope.lab.twins.record import read_training, training_facts, write_training
from floatscope.lab.twins.train import KINDS, Recipe, new_module, optimizer_for, train_steps
from floatscope.models.families import PLAIN_SIZES
from floatscope.models.files import WHOLE
from floatscope.models.place import device_of
from floatscope.models.write import write_checkpoint

LAYOUTS = {"arm": "native", "mdm": "llada", "mdm-adapted": "dream"}


def leg(
    folder: Path,
    text: Sequence[Path],
    recipes: Mapping[str, Recipe],
    minutes: float,
    *,
    device: str | None = None,
    workers: int = 0,
    compiled: bool = False,
    command: str = "",
    licence: str = "",
) -> Iterator[Told | Asked]:
    """Train until the time is over or everything is done; a kind that is done is written to `folder`/models.

    Once all are, they are asked the held-out questions, watched beside their controls, and get their cards, which tell
    `command` and `licence` (of the text) as they are given.
    """
    place = device_of(device)
    if isinstance(place, str):
        raise UserError("a twin is trained on one device; give cpu, cuda or cuda:1")
    now = Leg.of(folder, minutes, workers, command, licence)
    if _untrained(folder):
        with writing("the material", folder / "material"):
            material = prepare(folder / "material", text, recipes["arm"])
        for kind in KINDS:
            at = folder / "models" / kind
            if kind not in _untrained(folder):
                then = read_training(at)
                check_same(at, (then["kind"], then["recipe"]), kind, recipes[kind])
            elif not now.over:
                yield from _train(now, kind, recipes[kind], material, place, compiled)
    if not _untrained(folder):
        for kind in KINDS:
            yield from examine(folder / "models" / kind, place, lambda: now.over)
        for kind in KINDS:
            yield from observe(folder / "models" / kind, place, lambda: now.over)
        if not unfinished(folder):
            for kind in KINDS:
                write_card(folder / "models" / kind)


def unfinished(folder: Path) -> list[str]:
    """What is still to do, in words."""
    untrained = _untrained(folder)
    unscored = [k for k in KINDS if k in untrained or missing(read_scores(folder / "models" / k))]
    unwatched = [k for k in KINDS if k in untrained or read_attention(folder / "models" / k) is None]
    return [*untrained, *(f"scores of {kind}" for kind in unscored), *(f"attention of {kind}" for kind in unwatched)]


def _untrained(folder: Path) -> list[str]:
    return [kind for kind in KINDS if not (folder / "models" / kind / "config.json").is_file()]


def _train(
    now: Leg, kind: str, recipe: Recipe, material: Material, place: torch.device, compiled: bool
) -> Iterator[Told]:
    models, tokens = now.folder / "models", recipe.batch * recipe.length
    module = new_module(recipe)
    if kind == "mdm-adapted":
        _copy_weights(models / "arm", module)
    module.to(place)
    optimizer = optimizer_for(module, recipe)
    training = Training(now.folder / kind, kind, recipe, digest_of(material.facts), module, optimizer)
    rows = partial(batches, material, recipe, workers=now.workers)
    steps = partial(train_steps, module, optimizer, recipe, kind, compiled=compiled)
    progress = yield from run(training, rows, steps, now, tokens)
    if progress.step >= recipe.steps:
        write_twin(models / kind, module, kind, recipe, material, progress, now)
        rate = progress.step * tokens / progress.seconds  # over all legs
        yield told(kind, progress, recipe, rate, finished=True)


def write_twin(
    folder: Path, module: nn.Module, kind: str, recipe: Recipe, material: Material, progress: Progress, now: Leg
) -> None:
    """The trained weights in bf16, in the layout of the real family, with the tokenizer and training.json."""
    tokenizer, _ = material.open()
    place = next(module.parameters()).device
    module = module.to("cpu", torch.bfloat16)
    ids: dict[str, int] = {"eos_token_id": recipe.vocabulary - 3, "bos_token_id": recipe.vocabulary - 2}
    ids |= {"pad_token_id": recipe.vocabulary - 3}
    ids |= {} if kind == "arm" else {"mask_token_id": recipe.mask_id}
    layout = LAYOUTS[kind]
    with writing_whole("the trained model", folder) as part:
        write_checkpoint(part, _as_qwen2(module) if layout == "dream" else module, layout, ids=ids)
        tokenizer.save_pretrained(str(part))
        training = training_facts(
            kind=kind,
            recipe=recipe,
            progress=progress,
            parameters=sum(p.numel() for p in module.parameters()),
            text=material.facts,
            licence=now.licence,
            command=now.command,
            device=device_name(place),
            weights=digest(part / WHOLE),
        )
        write_training(part, training)


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
