"""`Decoding`: the steps of a decoding, run when they are needed, and what comes out of them.

    out = decode(model, "What floats?", new_tokens=32, watch=Watch())
    for step in out: ...                        # the steps as they happen
    out.text, out.steps, out.trace              # the result; the remaining steps run first

This module connects a model, the sampling loop, the watcher and the intervention; it has no rules of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from floatscope.canvas import CanvasState, EndAlignment, Step, StepCapture
from floatscope.capture.hooks import attach, detached
from floatscope.capture.influence import compute_influence
from floatscope.capture.watcher import Watch, Watcher
from floatscope.errors import UserError
from floatscope.interventions.edits import Edit
from floatscope.interventions.intervention import Intervention
from floatscope.interventions.notes import EditNote, EditWarning
from floatscope.models.model import Model
from floatscope.pipelines.canvas_layout import CanvasLayout
from floatscope.pipelines.watched_forwards import build_recorder
from floatscope.sampling import Sampling, autoregress, denoise, renoise
from floatscope.schema import Paradigm, RowSource
from floatscope.traces import Trace
from floatscope.traces.recorder import Recorder


class Decoding:
    """A decoding, made by `decode`: iterate over its steps, or read its results.

    Steps run when they are first needed, and are stored. Results such as `texts` and `traces` run the remaining steps.

    Attributes:
        model: the model.
        sampling: the resolved settings, a `Sampling`.
        samples: the names of the prompts.
        meta: the metadata of the traces.
        initial_canvas: the canvas before the first step.
        layout: what stands after the prompt: new tokens and suffix.
        answer_start: the position of the first new token, the same in every canvas of the batch.
        rows: which rows a step computes, a `RowSource`.
        capture: what was captured in the latest step; None before the first one, and without `watch` or `edits`. With
            `rows` "block" its canvases are aligned: each one ends at the last column.

    Example:
        out = fs.decode(fs.load("twin:mdm"), "Where does Mira live?", new_tokens=4)
        for step in out:
            print(step)
        out.text
    """

    def __init__(
        self,
        model: Model,
        sampling: Sampling,
        canvas: CanvasState,
        samples: Sequence[str],
        watch: Watch | None,
        meta: Mapping[str, Any],
        *,
        layout: CanvasLayout,
        answer_start: int,
        infill: bool,
        edits: tuple[Edit, ...],
        target_ids: Tensor | None,
        rows: RowSource,
    ) -> None:
        self.model, self.sampling, self.samples, self.meta = model, sampling, tuple(samples), dict(meta)
        self.initial_canvas, self.layout, self.answer_start = canvas, layout, answer_start
        self.rows = rows
        self.capture: StepCapture | None = None
        self._eligible: dict[int, Tensor] = {}
        self._infill, self._is_watched = infill, watch is not None
        self._intervention = Intervention(edits, model, self.samples) if edits else None
        self._watcher = _build_watcher(watch, self._intervention)
        self._recorder: Recorder | None = None
        self._steps: list[Step] = []
        self._is_finished = False
        self._failure: str | None = None
        answer_stop = answer_start + sampling.new_tokens
        self._run = _run_steps(
            model, sampling, canvas, self.samples, answer_stop, self._watcher, self._intervention, target_ids, rows
        )

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps from the first on; steps that have not run yet run now."""
        number = 0
        while number < len(self._steps) or self._run_step():
            yield self._steps[number]
            number += 1

    def __repr__(self) -> str:
        prompts = f"{len(self.samples)} prompt{'s' if len(self.samples) > 1 else ''}"
        state = "finished" if self._is_finished else "failed" if self._failure is not None else "unfinished"
        parts = (
            self.model.spec.name,
            prompts,
            f"sampler={self.sampling.sampler}",
            f"new_tokens={self.sampling.new_tokens}",
            f"steps={len(self._steps)} ({state})",
            *(["watched"] if self._is_watched else []),
        )
        return f"Decoding({', '.join(parts)})"

    @property
    def steps(self) -> list[Step]:
        """All steps; those that have not run yet run now."""
        while self._run_step():
            pass
        return self._steps

    @property
    def tokens(self) -> Tensor:
        """The finished canvases [batch, position], left-padded."""
        return self.steps[-1].after.tokens if self.steps else self.initial_canvas.tokens

    @property
    def generated_ids(self) -> list[list[int]]:
        """The new token ids of each prompt, up to the first end token."""
        start = self.answer_start
        answers: list[list[int]] = self.tokens[:, start : start + self.sampling.new_tokens].tolist()
        ends = set(self.model.spec.stop_ids)
        return [answer[: next((i for i, t in enumerate(answer) if t in ends), len(answer))] for answer in answers]

    @property
    def texts(self) -> list[str]:
        """The generated text of each prompt; with `infill`, the whole canvas as text."""
        if self.model.tokenizer is None:
            raise UserError(f"{self.model.spec.name} has no tokenizer; read `generated_ids` or `tokens`")
        if not self._infill:
            return [self.model.tokenizer.decode(ids) for ids in self.generated_ids]
        valid = self.steps[-1].after.valid if self.steps else self.initial_canvas.valid
        return [self.model.tokenizer.decode(row[mask].tolist()) for row, mask in zip(self.tokens, valid, strict=True)]

    @property
    def text(self) -> str:
        """The text of a single prompt; for a batch read `texts`."""
        return str(_get_single(self.texts, "texts"))

    @property
    def traces(self) -> list[Trace]:
        """The trace of each prompt; needs `watch`."""
        if not self._is_watched:
            raise UserError("nothing was watched; decode with watch=fs.Watch()")
        if not self.steps or self._recorder is None:
            raise UserError("nothing was decoded: no prompt has a mask to fill")
        return self._recorder.build_traces()

    @property
    def trace(self) -> Trace:
        """The trace of a single prompt; for a batch read `traces`."""
        trace: Trace = _get_single(self.traces, "traces")
        return trace

    @property
    def doses(self) -> list[float]:
        """The dose of the edits in each prompt: the share of the attention before the edits that they move.

        The mean over the rows that are computed and the heads, of all layers and steps in which an edit is active. It
        is 0 without edits, and NaN for edits that do not move a definite share (`docs/interventions.md`).
        """
        if self.steps and self._intervention is not None:
            return self._intervention.doses
        return [0.0] * len(self.samples)

    @property
    def notes(self) -> list[EditNote]:
        """What the edits did not do, such as selecting keys where there are none."""
        return self._intervention.notes if self.steps and self._intervention is not None else []

    def lift(self, layer: int) -> Tensor:
        """The lift of every key in one layer at the latest step, [batch, key].

        Lift is received attention divided by what uniform attention gives, averaged over heads and all rows of the
        forward. It is NaN for keys that were not eligible at every step so far: too few rows could see them.
        """
        capture = self.capture
        if self._watcher is None or not self._is_watched or capture is None:
            raise UserError("nothing was watched; decode with watch=fs.Watch() and run a step first")
        if missing := {"received", "uniform", "eligible"} - self._watcher.fields:
            raise UserError(f"lift needs the fields {', '.join(sorted(missing))}; watch them too")
        count = len(capture.layers)
        if not isinstance(layer, int) or not 0 <= layer < count:
            raise UserError(f"there is no layer {layer}: {self.model.spec.name} has layers 0 to {count - 1}")
        first = capture.first_layer(layer)
        received, uniform = capture.layers[layer].fields["received"][:, 0], first.fields["uniform"][:, 0]
        lift = _at_columns(received / uniform, self._steps[-1].before, self.rows, torch.nan)
        return torch.where(self._eligible[first.layer], lift, torch.nan)

    def _run_step(self) -> bool:
        """Run one more step; False when there is none. An interrupted decoding is never reported as finished."""
        if self._failure is not None:
            raise UserError(f"this decoding was interrupted at step {len(self._steps)} ({self._failure}); decode again")
        try:
            result = next(self._run, None)
        except BaseException as error:
            self._failure = str(error) if isinstance(error, UserError) else type(error).__name__
            raise
        if result is None:
            self._is_finished = True
            return False
        step, self.capture = result
        if self.capture is not None:
            self._eligible = _eligible_so_far(self._eligible, self.capture, step.before, self.rows)
            if self._watcher is not None and self._is_watched:
                self._recorder = self._recorder or build_recorder(self.samples, self._watcher, self.meta)
                self._recorder.add(_align_step(step, self.rows), self.capture)
        self._steps.append(step)
        return True


def _align_step(step: Step, rows: RowSource) -> Step:
    """The step as its forward saw it."""
    return EndAlignment.from_canvas(step.before).move_step(step) if rows is RowSource.BLOCK else step


def _at_columns(values: Tensor, canvas: CanvasState, rows: RowSource, fill: float | int) -> Tensor:
    """Captured values [batch, key] at the columns of the canvas; `fill` at padding."""
    if rows is not RowSource.BLOCK:
        return values
    return EndAlignment.from_canvas(canvas).move_back(values, canvas.tokens.shape[1], fill)


def _eligible_so_far(
    before: dict[int, Tensor], capture: StepCapture, canvas: CanvasState, rows: RowSource
) -> dict[int, Tensor]:
    """The keys eligible at every step so far, by the layer that stores the field; a key that is new was not before."""
    now = {
        x.layer: _at_columns(x.fields["eligible"][:, 0] > 0, canvas, rows, fill=False)
        for x in capture.layers
        if "eligible" in x.fields
    }
    return {
        i: keys & F.pad(before[i], (0, keys.shape[1] - before[i].shape[1])) if i in before else keys
        for i, keys in now.items()
    }


def _build_watcher(watch: Watch | None, intervention: Intervention | None) -> Watcher | None:
    """Edits are applied by the watcher; without `watch` it captures only the cheapest field."""
    if intervention is not None:
        minimal = Watch(fields=("received",))
        return Watcher(watch or minimal, predicting_rows=watch is not None, edit_call=intervention.edit_call)
    return None if watch is None else Watcher(watch, predicting_rows=True)


def _run_steps(
    model: Model,
    sampling: Sampling,
    canvas: CanvasState,
    samples: Sequence[str],
    answer_stop: int,
    watcher: Watcher | None,
    intervention: Intervention | None,
    target_ids: Tensor | None,
    rows: RowSource,
) -> Iterator[tuple[Step, StepCapture | None]]:
    """Run the sampling loop with the watcher attached; a step comes with what was captured in it.

    The generator holds no reference to its `Decoding`: when that is dropped, the watcher is detached.
    """
    spec = model.spec
    is_cached = rows is not RowSource.ALL and spec.canvas_size is None

    def begin(canvas: CanvasState, is_step: bool) -> None:
        if watcher is not None and (is_step or watcher.follows_prefix(canvas)):
            # With token editing, the row of any committed position may predict.
            watcher.begin(canvas, first_row=None if sampling.arguments.get("editing") is None else 0)

    run_cached = model.cached_forward(begin) if is_cached else None
    run_canvas = None if spec.canvas_size is None else model.canvas_forward()

    def forward_canvas(canvas: CanvasState, conditioning: Tensor | None) -> Tensor:
        assert run_canvas is not None
        try:
            run_canvas.encode(canvas)  # before the watched forward begins: the encoder's attention is not captured
            if intervention is not None and watcher is not None and intervention.needs_preview(canvas):
                watcher.begin(canvas, first_row=0)
                run_canvas(canvas, conditioning)
            if watcher is not None:
                watcher.begin(canvas, first_row=0)
            return run_canvas(canvas, conditioning)
        except torch.OutOfMemoryError as error:
            raise _explain_out_of_memory(model, canvas) from error

    def forward(canvas: CanvasState, rows: slice) -> Tensor:
        if intervention is not None and watcher is not None:
            if intervention.needs_preview(canvas):
                watcher.begin(canvas)
                model.forward(canvas, rows)
            canvas = intervention.edit_canvas(canvas)
        try:
            if run_cached is not None:
                return run_cached(canvas, rows)
            begin(canvas, True)
            return model.forward(canvas, rows)
        except torch.OutOfMemoryError as error:
            raise _explain_out_of_memory(model, canvas) from error

    with nullcontext() if watcher is None else attach(model.module, watcher):
        if spec.paradigm is Paradigm.ARM:
            steps = autoregress(
                forward, canvas, sampling, end_ids=spec.stop_ids, samples=samples, target_ids=target_ids
            )
        elif spec.canvas_size is not None:
            steps = renoise(
                forward_canvas,
                canvas,
                sampling,
                canvas_size=spec.canvas_size,
                vocab_size=model.vocab_size,
                end_ids=spec.stop_ids,
                samples=samples,
                pad_id=spec.pad_id or 0,
            )
        else:
            assert spec.mask_id is not None
            steps = denoise(
                forward,
                canvas,
                sampling,
                mask_id=spec.mask_id,
                shift=spec.shift,
                end_ids=spec.stop_ids,
                samples=samples,
                suffix=canvas.tokens.shape[1] - answer_stop,
                block_size=spec.block_size,
                unguided=model.cached_forward() if is_cached else model.forward,
                target_ids=target_ids,
            )
        for step in steps:
            seen = step if watcher is None else _align_step(step, rows)
            capture = None if watcher is None else watcher.finish(seen.commits)
            if capture is not None and not capture.layers:
                raise UserError(
                    f"no attention was seen: {type(model.module).__name__} calls neither transformers'"
                    " AttentionInterface nor F.scaled_dot_product_attention; decode it without watch"
                )
            if watcher is not None and capture is not None and watcher.watch.influence:
                with detached(model.module):
                    influence = compute_influence(model.forward, model.module, seen.before, seen.commits)
                capture = replace(capture, influence=influence)
            yield step, capture
    for note in intervention.notes if intervention is not None else ():
        warnings.warn(str(note), EditWarning, stacklevel=2)


def _explain_out_of_memory(model: Model, canvas: CanvasState) -> UserError:
    """Run one sample to measure its memory, and say how many would fit."""
    batch, length = canvas.tokens.shape
    device, advice = canvas.tokens.device, "give shorter prompts, fewer new tokens, or another device or dtype"
    if batch > 1 and device.type == "cuda" and model.spec.canvas_size is None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        free, before = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_allocated(device)
        single = CanvasState(canvas.tokens[:1], canvas.states[:1])
        try:
            model.forward(single, slice(0, length))
            per_sample = max(1, torch.cuda.max_memory_allocated(device) - before)
            advice = f"{max(1, min(batch - 1, int(0.9 * free / per_sample)))} at a time would fit"
        except torch.OutOfMemoryError:
            advice = f"not even one fits; {advice}"
    return UserError(f"{batch} prompts of {length} positions do not fit in the memory of {device}: {advice}")


def _get_single(values: list[Any], name: str) -> Any:
    if len(values) != 1:
        raise UserError(f"there are {len(values)} {name}, one per prompt; read `{name}`")
    return values[0]
