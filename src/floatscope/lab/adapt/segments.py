"""The complete adaptation, in segments: corpus, training, adapter, scores, card.

    files = TrainingFiles(text=[…], data=[…])
    for event in train_segment("base.gguf", Path("sibling"), files, Recipe(), minutes=8):
        event                                    # a ProgressEvent while training; then the Job of the scores

Whoever receives the job may run it and show its progress; else it runs when the next event is requested.

A segment ends when its time is over. The same call again, here or on a machine the folder was moved to, resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from msgspec import to_builtins

from floatscope.errors import UserError, printable
from floatscope.files.atomic import write_folder_atomic
from floatscope.files.digests import sha256_file, sha256_json
from floatscope.lab.adapt.card import write_card
from floatscope.lab.adapt.corpus import Corpus, TrainingFiles, prepare_corpus, read_facts
from floatscope.lab.adapt.examples import BatchMaker
from floatscope.lab.adapt.lora import adapter_tensors, make_trainable
from floatscope.lab.adapt.recipe import Recipe, check_mask_unused, choose_mask, fit_recipe, require_tokenizer
from floatscope.lab.adapt.record import AdapterTraining
from floatscope.lab.adapt.scores import ADAPTER, SCORES, plan_scores, write_scores
from floatscope.lab.adapt.train import build_optimizer, train_steps
from floatscope.lab.training.checkpoint import Training, check_same_training, count_saved_steps
from floatscope.lab.training.prefetch import prefetch
from floatscope.lab.training.progress import Progress, ProgressEvent
from floatscope.lab.training.record import read_training, run_record, write_training
from floatscope.lab.training.segments import CORPUS, Segment, refuse_old_folder, run_segment
from floatscope.models.adapter import (
    Adapter,
    check_base,
    is_adapter,
    read_adapter,
    sha256_weights,
    tensors_file,
    write_adapter,
)
from floatscope.models.adapter_merge import add_token_row
from floatscope.models.capabilities import detect_capabilities
from floatscope.models.device import resolve_device
from floatscope.models.loader import load
from floatscope.models.model import Model
from floatscope.models.names import find_weights, split_adapter
from floatscope.pipelines.job import Job, run_job
from floatscope.schema import Paradigm

KIND, CHECKPOINTS = "adapter", "checkpoints"


def train_segment(
    base: str,
    folder: Path,
    training_files: TrainingFiles,
    recipe: Recipe,
    minutes: float,
    *,
    mask: str | None = None,
    device: str | None = None,
    workers: int = 0,
    command: str = "",
    licence: str = "",
) -> Iterator[ProgressEvent | Job]:
    """Train until the time is over or everything is done; then write `folder`/adapter with its scores and card.

    Args:
        base: The causal model to adapt, as `load` opens it.
        folder: For the corpus, the checkpoints and the adapter.
        training_files: Files to train on, and files held out for evaluation.
        recipe: The settings of the training.
        minutes: Of this segment.
        mask: The mask token, its id, or "new"; None: a free token (`choose_mask`).
        device: "cpu", "cuda" or "cuda:1"; None: a GPU if there is one.
        workers: Processes that prepare batches.
        command: The command line, for the card.
        licence: Of the training files, for the card.
    """
    torch_device = resolve_device(device)
    if isinstance(torch_device, str):
        raise UserError("an adaptation runs on one device; give cpu, cuda or cuda:1")
    segment = Segment.start(folder, minutes, workers, command, licence)
    adapter_folder = folder / ADAPTER
    plain_base, adapter = split_adapter(base)
    if adapter is not None:
        raise UserError(f"{printable(base)} already has an adapter; give the base alone: {plain_base}")
    is_trained = is_adapter(adapter_folder)
    model = load(base, device=torch_device, dtype=torch.float32)
    if model.spec.paradigm is not Paradigm.ARM:
        raise UserError(f"{base} is not an autoregressive model; only those can be adapted")
    tokenizer = require_tokenizer(model)
    if recipe.control and mask is not None:
        raise UserError("a control has no mask; leave --mask-token out")
    vocab_size = model.vocab_size  # a new mask adds a row while training
    recipe = fit_recipe(recipe, model, None if recipe.control else choose_mask(model, mask))
    if not is_trained:
        refuse_old_folder(folder)
        if recipe.mask_id is not None:
            spec = replace(model.spec, paradigm=Paradigm.MDM, mask_id=recipe.mask_id, architecture="adapted")
            detect_capabilities(replace(model, spec=spec))
        corpus = prepare_corpus(folder / CORPUS, model, training_files)
        if recipe.mask_id is not None:
            check_mask_unused(tokenizer, recipe.mask_id, corpus.ids())
        yield from _train(segment, base, model, recipe, corpus)
    else:
        stored = read_training(adapter_folder, AdapterTraining)
        check_base(read_adapter(adapter_folder), find_weights(base))
        check_same_training(adapter_folder, (stored.kind, stored.recipe.as_json), KIND, recipe)
        if remaining_work(folder):
            refuse_old_folder(folder)
            prepare_corpus(folder / CORPUS, model, training_files)
    if is_adapter(adapter_folder) and (is_trained or not segment.is_over):
        if remaining_work(folder):
            ids = Corpus(folder / CORPUS, read_facts(folder / CORPUS)).ids("held_out")
            job = plan_scores(base, folder, ids, context=model.spec.context, vocab_size=vocab_size, device=torch_device)
            del model
            yield job
            run_job(job)
            write_scores(folder)
        write_card(adapter_folder)


def remaining_work(folder: Path) -> list[str]:
    """Return what is still to do, in words."""
    adapter_folder = folder / ADAPTER
    if (adapter_folder / SCORES).is_file():
        return []
    return ["its scores"] if is_adapter(adapter_folder) else ["the adapter"]


def describe_saved(folder: Path, recipe: Recipe) -> str:
    """Return how much of the training is saved, in words."""
    return f"{count_saved_steps(folder / CHECKPOINTS)} of {recipe.steps} steps are saved"


def _train(segment: Segment, base: str, model: Model, recipe: Recipe, corpus: Corpus) -> Iterator[ProgressEvent]:
    module, tokens_per_step = model.module, 2 * recipe.tokens
    if recipe.mask_id == model.vocab_size:
        add_token_row(module)
    make_trainable(module, recipe.mask_id, recipe.rank or None, recipe.seed)
    optimizer = build_optimizer(module, recipe)
    training = Training(
        segment.folder / CHECKPOINTS, KIND, recipe, sha256_json(to_builtins(corpus.facts)), module, optimizer
    )
    batches = partial(prefetch, BatchMaker(corpus, recipe), workers=segment.workers)
    steps = partial(train_steps, module, optimizer, recipe, compiled=model.device.type == "cuda")
    progress = yield from run_segment(training, batches, steps, segment, tokens_per_step)
    if progress.step >= recipe.steps:
        _write_adapter(segment, base, model, recipe, corpus, progress)
        rate = progress.step * tokens_per_step / progress.seconds  # over all segments
        yield ProgressEvent.from_progress(KIND, progress, recipe, rate, finished=True)


def _write_adapter(
    segment: Segment, base: str, model: Model, recipe: Recipe, corpus: Corpus, progress: Progress
) -> None:
    """Write the adapter in bf16 with its training.json, atomically."""
    token = require_tokenizer(model).id_to_token(recipe.mask_id)
    tensors, sha256 = adapter_tensors(model.module, torch.bfloat16), sha256_weights(find_weights(base))
    adapter = Adapter(model.spec.name, sha256, recipe.mask_id, token, recipe.rank or None, tensors)
    with write_folder_atomic("the adapter", segment.folder / ADAPTER) as part:
        write_adapter(part, adapter)
        run = run_record(
            progress,
            2 * progress.step * recipe.tokens,
            device=model.device,
            parameters=adapter.parameters,
            weights=sha256_file(tensors_file(part)),
            command=segment.command,
        )
        identity = {name: value for name, value in adapter.as_json.items() if name != "rank"}
        facts = {**identity, **run}
        record = AdapterTraining(kind=KIND, recipe=recipe, corpus=corpus.facts, licence=segment.licence, **facts)
        write_training(part, record)
