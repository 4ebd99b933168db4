"""The whole adaptation, in legs: prepare, train, write the adapter, measure it, write its card.

    for told in leg("base.gguf", Path("sibling"), Given(text=[…], data=[…]), Recipe(), minutes=8): ...

A leg ends when its time is over. The same call again, here or on a machine the folder was moved to, does the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from floatscope.errors import UserError, printable
from floatscope.files.atomic import writing, writing_whole
from floatscope.files.records import device_name, digest, digest_of, read_json, versions, write_json
from floatscope.lab.adapt.card import write_card
from floatscope.lab.adapt.lessons import Maker
from floatscope.lab.adapt.low_rank import learn, learnt
from floatscope.lab.adapt.mask import check_free, choose_mask, text_of
from floatscope.lab.adapt.material import Given, Material, prepare
from floatscope.lab.adapt.recipe import Recipe
from floatscope.lab.adapt.scores import masked_accuracy
from floatscope.lab.adapt.train import optimizer_for, train_steps
from floatscope.lab.training.ahead import ahead
from floatscope.lab.training.checkpoint import Training, check_same
from floatscope.lab.training.legs import Leg, run
from floatscope.lab.training.progress import Progress, Told, told
from floatscope.models.adapter import (
    TENSORS,
    Adapter,
    adapt_model,
    base_digest,
    check_base,
    is_adapter,
    read_adapter,
    with_new_row,
    write_adapter,
)
from floatscope.models.load import load, parted, weights_of
from floatscope.models.model import Model
from floatscope.models.place import device_of
from floatscope.models.probe import probed

KIND, TRAINING, SCORES = "adapter", "training.json", "scores.json"


def leg(
    base: str,
    folder: Path,
    given: Given,
    recipe: Recipe,
    minutes: float,
    *,
    mask: str | None = None,
    device: str | None = None,
    workers: int = 0,
    command: str = "",
    licence: str = "",
) -> Iterator[Told]:
    """Train until the time is over or everything is done; the adapter is then in `folder`/adapter, with its scores on
    the held-out text and a card that tells `command` and `licence` (of what it learnt from) as they are given."""
    place = device_of(device)
    if isinstance(place, str):
        raise UserError("an adaptation runs on one device; give cpu, cuda or cuda:1")
    now = Leg.of(folder, minutes, workers, command, licence)
    done = folder / "adapter"
    alone, adapter = parted(base)
    if adapter is not None:
        raise UserError(f"{printable(base)} has an adapter already, and only a base can be adapted; give {alone}")
    trained = is_adapter(done)
    model = load(base, device=place, dtype=torch.float32)
    if model.spec.paradigm != "arm":
        raise UserError(f"{base} is no autoregressive model; an adaptation begins with one")
    text = text_of(model)
    if recipe.control and mask is not None:
        raise UserError("a control has no mask; leave --mask out")
    recipe = fitted(recipe, model, None if recipe.control else choose_mask(model, mask))
    if not trained:
        if recipe.mask_id is not None:
            probed(
                replace(model, spec=replace(model.spec, paradigm="mdm", mask_id=recipe.mask_id, architecture="adapted"))
            )
        material = prepare(folder / "material", model, given)
        if recipe.mask_id is not None:
            check_free(text, recipe.mask_id, material.ids())
        yield from _train(now, base, model, recipe, material)
    else:
        then = read_json(done / TRAINING)
        check_base(read_adapter(done), weights_of(base))
        check_same(done, (then["kind"], then["recipe"]), KIND, recipe)
        if unfinished(folder):
            prepare(folder / "material", model, given)
    if is_adapter(done) and (trained or not now.over):
        finish(done, base, folder / "material", place)


def finish(done: Path, base: str, material: Path, place: torch.device) -> None:
    """Scores on the held-out text, once, and the card."""
    if not (done / SCORES).is_file():
        ids, adapter = Material(material, {}).ids("held"), read_adapter(done)
        scores: dict[str, object] = {"adapter": digest(done / TENSORS)}
        if len(ids) and adapter.mask_id is not None:
            model = load(base, device=place)
            if adapter.mask_id < model.vocabulary:  # a new row means nothing to the base
                spec = replace(model.spec, paradigm="mdm", mask_id=adapter.mask_id)
                scores["masked_base"] = masked_accuracy(replace(model, spec=spec), ids)
            scores["masked"] = masked_accuracy(adapt_model(model, adapter), ids)
        with writing("the scores", done):
            write_json(done / SCORES, scores)
    write_card(done)


def unfinished(folder: Path) -> list[str]:
    """What is still to do, in words."""
    done = folder / "adapter"
    return [] if (done / SCORES).is_file() else ["its scores"] if is_adapter(done) else ["the adapter"]


def fitted(recipe: Recipe, model: Model, mask_id: int | None) -> Recipe:
    """With the mask of this model, and rows no longer than it can read."""
    recipe, most = replace(recipe, mask_id=mask_id), model.spec.context
    if most is None:
        return recipe
    lengths = tuple(n for n in recipe.lengths if n <= most) or (most,)
    return replace(recipe, length=min(recipe.length, most), lengths=lengths)


def _train(now: Leg, base: str, model: Model, recipe: Recipe, material: Material) -> Iterator[Told]:
    module, tokens = model.module, 2 * recipe.tokens
    if recipe.mask_id == model.vocabulary:
        with_new_row(module)
    learn(module, recipe.mask_id, recipe.rank or None, recipe.seed)
    optimizer = optimizer_for(module, recipe)
    training = Training(now.folder / "steps", KIND, recipe, digest_of(material.facts), module, optimizer)
    batches = partial(ahead, Maker(material, recipe), workers=now.workers)
    steps = partial(train_steps, module, optimizer, recipe, compiled=model.device.type == "cuda")
    progress = yield from run(training, batches, steps, now, tokens)
    if progress.step >= recipe.steps:
        _write(now, base, model, recipe, material, progress)
        rate = progress.step * tokens / progress.seconds  # over all legs
        yield told(KIND, progress, recipe, rate, finished=True)


def _write(now: Leg, base: str, model: Model, recipe: Recipe, material: Material, progress: Progress) -> None:
    """The adapter in bf16, with training.json, put in place when it is whole."""
    token = text_of(model).name_of(recipe.mask_id)
    tensors, sha256 = learnt(model.module, torch.bfloat16), base_digest(weights_of(base))
    adapter = Adapter(model.spec.name, sha256, recipe.mask_id, token, recipe.rank or None, tensors)
    tokens = 2 * progress.step * recipe.tokens
    with writing_whole("the adapter", now.folder / "adapter") as part:
        write_adapter(part, adapter)
        training = {
            "kind": KIND,
            **{k: v for k, v in adapter.as_json.items() if k != "rank"},
            "command": now.command,
            "steps": progress.step,
            "tokens": tokens,
            "seconds": round(progress.seconds, 2),
            "tokens_per_second": round(tokens / progress.seconds),
            "device": device_name(model.device),
            "versions": versions(),
            "parameters": adapter.parameters,
            "weights": digest(part / TENSORS),
            "recipe": recipe.as_json,
            "material": material.facts,
            "licence": now.licence,
            "losses": [[step, *(float(f"{loss:.5g}") for loss in losses)] for step, *losses in progress.losses],
        }
        write_json(part / TRAINING, training)
