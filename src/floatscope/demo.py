"""The demo: a small checkpoint in LLaDA's layout is watched while it denoises a few canvases, beside its control.

    ready = prepare("demo")                  # writes and opens the checkpoint, says how large the runs will be
    for finished in watch(ready): ...        # one sample after the other, each on disk when it is named
    look(ready).maps                         # the temporal maps

The weights are random, in the model and in its `untrained` control alike: two draws of the same thing. What can be seen
is how the instrument works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from floatscope.capture.watcher import Watch
from floatscope.decoding import decode
from floatscope.errors import UserError
from floatscope.models import Model, load, untrained, write_random
from floatscope.threads import one_thread
from floatscope.trace import Forecast, Trace, create_run, forecast, open_run
from floatscope.values import Regions

STEPS, NEW_TOKENS = 16, 32
KEEP = "summary"
PROMPTS = {  # region → tokens
    "short": {"question": 6, "passage 1": 8, "passage 2": 10},
    "even": {"question": 8, "passage 1": 12, "passage 2": 12},
    "front": {"question": 8, "passage 1": 18, "passage 2": 6},
    "long": {"question": 10, "passage 1": 14, "passage 2": 16},
}
SHOWN = "even"  # the sample that is drawn


@dataclass(frozen=True)
class Ready:
    folder: Path
    checkpoint: Path
    models: dict[str, Model]
    size: Forecast

    @property
    def samples(self) -> int:
        return len(PROMPTS) * len(self.models)

    @property
    def about(self) -> str:
        shape = self.size.sizes
        return f"random weights in LLaDA's layout, {shape['layer']} layers of {shape['head']} heads"


@dataclass(frozen=True)
class Finished:
    model: str
    sample: str
    decoded: bool  # False: it was there already


@dataclass(frozen=True)
class Seen:
    checkpoint: Path
    runs: dict[str, Path]
    maps: dict[str, Path]
    changes: dict[str, float]  # how often a layer's top key changes while a canvas is denoised; mean over samples

    @property
    def line(self) -> str:
        model, control = self.changes.values()
        return (
            f"over {STEPS} steps the top key of a layer changes {model:.1f} times, in the control {control:.1f} times"
            f" (mean over layers and samples)"
        )

    @property
    def as_json(self) -> dict[str, Any]:
        paths = {"checkpoint": str(self.checkpoint)}
        folders = {kind: {name: str(p) for name, p in getattr(self, kind).items()} for kind in ("runs", "maps")}
        return {**paths, **folders, "steps": STEPS, "top_key_changes": self.changes}


def _claim(folder: Path) -> None:
    """The demo writes under names of its own, so it takes a new or empty folder, or one it took before."""
    mark = folder / "floatscope-demo"
    if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
        raise UserError(f"{folder} holds other files, which the demo might overwrite; give another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()


def prepare(folder: str | Path) -> Ready:
    folder = Path(folder)
    try:
        _claim(folder)
        checkpoint = write_random(folder / "random-llada", seed=0)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot write the demo to {folder}: {why}; give another folder with --out") from error
    model = load(checkpoint, device="cpu")
    models = {"random": model, "untrained": untrained(model, seed=1)}
    config: Any = model.module.config
    lengths = [sum(parts.values()) + NEW_TOKENS for parts in PROMPTS.values()]
    size = forecast(
        keep=KEEP,
        samples=len(PROMPTS) * len(models),
        steps=STEPS,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        keys=round(np.mean(lengths)),
        regions=4,
        commits=NEW_TOKENS,
    )
    return Ready(folder, checkpoint, models, size)


def watch(ready: Ready) -> Iterator[Finished]:
    """Decode what is missing; a sample is named once its file is whole."""
    for name, model in ready.models.items():
        settings = {
            "model": model.spec.name,
            "weights": model.spec.weights,  # a run must not go on with another checkpoint
            "dtype": "float32",
            "sampler": "confidence",
            "new_tokens": NEW_TOKENS,
            "steps": STEPS,
            "keep": KEEP,
            "prompts": PROMPTS,
        }
        with create_run(_run(ready, name), settings, list(PROMPTS), resume=True) as run:
            missing = set(run.missing)
            for sample in run.samples:
                if sample in missing:
                    run.write(_decode(model, sample))
                yield Finished(name, sample, sample in missing)


def look(ready: Ready) -> Seen:
    """Draw the temporal map of one sample of each model, at half depth, and count how often top keys change."""
    layers = ready.size.sizes["layer"]
    maps, changes = {}, {}
    for name in ready.models:
        run = open_run(_run(ready, name))
        changes[name] = float(np.mean([_changes(trace, layer) for trace in run for layer in range(layers)]))
        maps[name] = ready.folder / f"{name}.png"
        run.trace(SHOWN).plot(layer=layers // 2, path=maps[name])
    return Seen(ready.checkpoint, {name: _run(ready, name) for name in ready.models}, maps, changes)


def _run(ready: Ready, name: str) -> Path:
    return ready.folder / "runs" / name


def _decode(model: Model, sample: str) -> Trace:
    """One canvas: a prompt of random tokens, drawn by the sample's number, and the masks to fill."""
    parts = {**PROMPTS[sample], "answer": NEW_TOKENS}
    stops = np.cumsum(list(parts.values())).tolist()
    spans = {name: [(stop - parts[name], stop)] for name, stop in zip(parts, stops, strict=True)}
    draw = torch.Generator().manual_seed(list(PROMPTS).index(sample))
    prompt = torch.randint(256, (stops[-2],), generator=draw).tolist()
    regions = Regions.from_spans([spans], stops[-1])
    with one_thread():
        watched = decode(
            model, [prompt], new_tokens=NEW_TOKENS, steps=STEPS, watch=Watch(KEEP), samples=[sample], regions=regions
        )
    return watched.traces[0]


def _changes(trace: Trace, layer: int) -> int:
    top = np.nanargmax(trace.received(layer, scale="lift", eligible=True), 1)  # [step]
    return int((top[1:] != top[:-1]).sum())
