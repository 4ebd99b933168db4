"""The complete training of the twins, in segments: corpus, `arm`, `mdm`, `mdm-adapted`, scores, attention, cards.

    for event in train_segment(Path("twins"), [Path("enwik8_clean.txt.xz")], RECIPES, minutes=8):
        event.kind                               # a ProgressEvent while training, an EvaluationEvent afterwards

A segment ends when its time is over. The same call again, here or on a machine the folder was moved to, resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch import nn

from floatscope.errors import UserError
from floatscope.files.atomic import explain_write_errors, write_folder_atomic
from floatscope.files.digests import sha256_file, sha256_json
from floatscope.lab.training.checkpoint import Training, check_same_training, count_saved_steps
from floatscope.lab.training.progress import Progress, ProgressEvent
from floatscope.lab.training.record import read_training, run_record, write_training
from floatscope.lab.training.segments import CORPUS, Segment, refuse_old_folder, run_segment
from floatscope.lab.twins.attention import measure_attention, read_attention
from floatscope.lab.twins.card import write_card
from floatscope.lab.twins.corpus import Corpus, batches, prepare_corpus
from floatscope.lab.twins.record import TrainingText, TwinTraining
from floatscope.lab.twins.scores import EvaluationEvent, evaluate_twin, missing_files, read_scores
from floatscope.lab.twins.train import KINDS, Recipe, build_module, build_optimizer, train_steps
from floatscope.models.checkpoint import WEIGHTS_FILE
from floatscope.models.checkpoint_writer import write_checkpoint
from floatscope.models.conversions import LLAMA_SIZES
from floatscope.models.device import resolve_device

LAYOUTS = {"arm": "native", "mdm": "llada", "mdm-adapted": "dream"}


def train_segment(
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
) -> Iterator[ProgressEvent | EvaluationEvent]:
    """Train until the time is over or everything is done; write each finished twin to `folder`/models.

    Once all three are trained, they are scored on the held-out questions, their attention is measured beside untrained
    controls, and their cards are written. The cards quote `command` and `licence` (of the text).
    """
    torch_device = resolve_device(device)
    if isinstance(torch_device, str):
        raise UserError("a twin is trained on one device; give cpu, cuda or cuda:1")
    segment = Segment.start(folder, minutes, workers, command, licence)
    if _untrained_kinds(folder):
        refuse_old_folder(folder)
        with explain_write_errors("the corpus", folder / CORPUS):
            corpus = prepare_corpus(folder / CORPUS, text, recipes["arm"])
        for kind in KINDS:
            model_folder = folder / "models" / kind
            if kind not in _untrained_kinds(folder):
                stored = read_training(model_folder, TwinTraining)
                check_same_training(model_folder, (stored.kind, stored.recipe.as_json), kind, recipes[kind])
            elif not segment.is_over:
                yield from _train(segment, kind, recipes[kind], corpus, torch_device, compiled)
    if not _untrained_kinds(folder):
        for kind in KINDS:
            yield from evaluate_twin(folder / "models" / kind, torch_device, lambda: segment.is_over)
        for kind in KINDS:
            yield from measure_attention(folder / "models" / kind, torch_device, lambda: segment.is_over)
        if not remaining_work(folder):
            for kind in KINDS:
                write_card(folder / "models" / kind)


def remaining_work(folder: Path) -> list[str]:
    """Return what is still to do, in words: ["mdm-adapted", "scores of mdm", …]."""
    untrained = _untrained_kinds(folder)
    unscored = [k for k in KINDS if k in untrained or missing_files(read_scores(folder / "models" / k))]
    unmeasured = [k for k in KINDS if k in untrained or read_attention(folder / "models" / k) is None]
    return [*untrained, *(f"scores of {kind}" for kind in unscored), *(f"attention of {kind}" for kind in unmeasured)]


def describe_saved(folder: Path, recipes: Mapping[str, Recipe]) -> str:
    """Return how much of the training is saved, in words."""
    for kind in _untrained_kinds(folder):
        return f"{count_saved_steps(folder / kind)} of {recipes[kind].steps} steps of {kind} are saved"
    return "all twins are trained, and what is scored is saved"


def _untrained_kinds(folder: Path) -> list[str]:
    return [kind for kind in KINDS if not (folder / "models" / kind / "config.json").is_file()]


def _train(
    segment: Segment, kind: str, recipe: Recipe, corpus: Corpus, device: torch.device, compiled: bool
) -> Iterator[ProgressEvent]:
    models, tokens_per_step = segment.folder / "models", recipe.batch * recipe.length
    module = build_module(recipe)
    if kind == "mdm-adapted":
        _copy_weights(models / "arm", module)
    module.to(device)
    optimizer = build_optimizer(module, recipe)
    training = Training(segment.folder / kind, kind, recipe, sha256_json(to_builtins(corpus.facts)), module, optimizer)
    rows = partial(batches, corpus, recipe, workers=segment.workers)
    steps = partial(train_steps, module, optimizer, recipe, kind, compiled=compiled)
    progress = yield from run_segment(training, rows, steps, segment, tokens_per_step)
    if progress.step >= recipe.steps:
        write_twin(models / kind, module, kind, recipe, corpus, progress, segment)
        rate = progress.step * tokens_per_step / progress.seconds  # over all segments
        yield ProgressEvent.from_progress(kind, progress, recipe, rate, finished=True)


def write_twin(
    folder: Path, module: nn.Module, kind: str, recipe: Recipe, corpus: Corpus, progress: Progress, segment: Segment
) -> None:
    """Write the trained weights in bf16, in the layout of the architecture, with the tokenizer and training.json."""
    tokenizer, _ = corpus.open()
    device = next(module.parameters()).device
    module = module.to("cpu", torch.bfloat16)
    ids: dict[str, int] = {"eos_token_id": recipe.vocabulary - 3, "bos_token_id": recipe.vocabulary - 2}
    ids |= {"pad_token_id": recipe.vocabulary - 3}
    ids |= {} if kind == "arm" else {"mask_token_id": recipe.mask_id}
    layout = LAYOUTS[kind]
    with write_folder_atomic("the trained model", folder) as part:
        write_checkpoint(part, _to_qwen2(module) if layout == "dream" else module, layout, extra_config=ids)
        tokenizer.save_pretrained(str(part))
        run = run_record(
            progress,
            progress.step * recipe.batch * recipe.length,
            device=device,
            parameters=sum(p.numel() for p in module.parameters()),
            weights=sha256_file(part / WEIGHTS_FILE),
            command=segment.command,
        )
        facts = corpus.facts
        text = TrainingText(files=facts.text, characters=facts.characters, tokens=facts.tokens, licence=segment.licence)
        write_training(part, TwinTraining(kind=kind, seed=recipe.seed, recipe=recipe, text=text, **run))


def _to_qwen2(llama: Any) -> nn.Module:
    """Return the same network as a Qwen2 model, with zero biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {name: getattr(llama.config, name) for name in (*LLAMA_SIZES, "rope_parameters")}
    qwen: Any = Qwen2ForCausalLM(Qwen2Config(**settings)).to(torch.bfloat16)
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

    if not (arm / WEIGHTS_FILE).is_file():
        raise UserError(f"mdm-adapted starts from the trained arm, and {arm} has no weights; train the arm first")
    module.load_state_dict({name: t.float() for name, t in load_file(arm / WEIGHTS_FILE).items()})
