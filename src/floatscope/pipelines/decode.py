"""`decode`: fill canvases or continue prompts, watched or not. Glue between the rooms, no rule of its own.

out = decode(model, "What floats?", new_tokens=32, watch=Watch())
for step in out: ...                        # as they happen
out.text, out.steps, out.trace              # whatever has not happened yet is done first
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from floatscope.canvas import CanvasState, Reductions, Regions, Step, build_canvas
from floatscope.capture.influence import embedding_of, influence
from floatscope.capture.watcher import Watch, Watcher
from floatscope.capture.ways import attach, detached
from floatscope.errors import UserError
from floatscope.interventions.checks import check as check_edits
from floatscope.interventions.edits import Edit
from floatscope.interventions.intervention import Intervention, rewrites
from floatscope.interventions.recipes import parse_edits
from floatscope.models.model import Model
from floatscope.pipelines import prompts as asked
from floatscope.pipelines.watch import recorder_for
from floatscope.sampling import Sampling, autoregress, denoise
from floatscope.sampling.settings import resolve_sampling
from floatscope.traces import Trace
from floatscope.traces.recorder import Recorder


def decode(
    model: Model,
    prompts: asked.Prompt | Sequence[asked.Prompt],
    *,
    watch: Watch | None = None,
    preset: str | None = None,
    chat: bool | None = None,
    infill: bool = False,
    suffix: Sequence[int] = (),
    target_ids: Sequence[Sequence[int]] | None = None,
    samples: Sequence[str] | None = None,
    regions: Regions | None = None,
    edits: str | Edit | Sequence[str | Edit] = (),
    meta: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Decoding:
    """Decode one prompt or a batch; `settings` are those of `Sampling` (sampler, new_tokens, steps, block, …).

    A prompt is a text, a list of token ids, or a list of messages. Texts go through the chat template if the model has
    one (`chat=False`: never). `infill` fills the masks inside the prompts and appends none unless `new_tokens` says so.
    `behind` are tokens that stand behind the new ones; masks among them are never filled.
    `edits` change the attention: recipes such as "mask_anchors(k=5)", or `Edit`s.
    `forced` gives the new tokens of each prompt (teacher forcing): the model's own proposals decide when a position is
    committed, these tokens are written, and no end stops it. Their `confidence` is their probability in the
    distribution that `judged` names: by default the softmax of the model's logits, at temperature 1 and unfiltered.
    `samples` name the prompts in traces and key their randomness. Everything is checked here; decoding begins when the
    first step is asked for.
    """
    if not isinstance(model, Model):
        raise UserError(f"decode needs a floatscope Model (fs.load), got {type(model).__name__}; see also fs.watch")
    if watch is not None and not isinstance(watch, Watch):
        raise UserError(f"watch must be a fs.Watch(…) or None, got {watch!r}")
    if regions is not None and not isinstance(regions, Regions):
        raise UserError(f"regions must be fs.Regions, got {type(regions).__name__}; use fs.Regions.from_spans")
    for name, flag in (("chat", chat), ("infill", infill)):
        if not isinstance(flag, bool | None):
            raise UserError(f"{name} must be True or False, got {flag!r}")
    if meta is not None and not isinstance(meta, Mapping):
        raise UserError(f"meta must be a dict of facts, got {meta!r}")
    if model.spec.paradigm == "mdm" and model.spec.mask_id is None:
        raise UserError(f"{model.spec.name} has no mask token: give its id, fs.load(…, mask_id=…)")
    if watch is not None and watch.influence:
        embedding_of(model.module)
    if infill:  # what is given is the canvas: nothing is appended, and no template put around it, unless asked for
        settings = {"new_tokens": None, **settings}
        settings["new_tokens"] = 0 if settings["new_tokens"] is None else settings["new_tokens"]
        chat = bool(chat)
    if target_ids is not None:  # what is given is the answer: it says how long that is, and no end stops it
        if infill or settings.get("stop"):
            clash = "infill fills the masks inside a prompt" if infill else "stop ends a text where it ends"
            raise UserError(f"forced gives all new tokens, and {clash}; leave one of them out")
        target_ids = asked.forced_ids(model, target_ids)
        settings = {"new_tokens": None, **settings, "stop": False}
        settings["new_tokens"] = len(target_ids[0]) if settings["new_tokens"] is None else settings["new_tokens"]
    how = resolve_sampling(model.spec.paradigm, preset, **settings)
    if suffix and (model.spec.paradigm == "arm" or not how.new_tokens):
        why = "writes from left to right" if model.spec.paradigm == "arm" else "is asked for no new tokens"
        raise UserError(f"{model.spec.name} {why}: nothing can stand behind its answer")
    if wrong := [token for token in suffix if not 0 <= token < model.vocabulary]:
        raise UserError(f"token {wrong[0]} is not in {model.spec.name}'s vocabulary, 0 … {model.vocabulary - 1}")
    ids = asked.token_ids(model, prompts, chat)
    asked.check(model, ids, how.new_tokens + len(suffix), infill)
    if target_ids is not None:
        asked.check_forced(target_ids, len(ids), how.new_tokens)
    if samples is not None and (isinstance(samples, str) or not all(isinstance(name, str) for name in samples)):
        raise UserError(f"samples are a list of names, one for each prompt, got {samples!r}")
    names = [str(i) for i in range(len(ids))] if samples is None else list(samples)
    if len(names) != len(ids) or len(set(names)) != len(names):
        raise UserError(f"{len(set(names))} different sample names for {len(ids)} prompts; give one for each")
    suffix = (*suffix, *(model.tokenizer.suffix if model.tokenizer is not None else ()))
    spec = model.spec
    canvas = build_canvas(ids, how.new_tokens, spec.mask_id, suffix=suffix, regions=regions, pad_id=spec.pad_id or 0)
    changes = parse_edits(edits)
    check_edits(changes, model, canvas)
    if changes and (how.guidance or (watch is not None and watch.influence)):
        raise UserError(f"edits and {'guidance' if how.guidance else 'influence'} do not go together; leave one out")
    template = asked.uses_template(model, chat) and not all(_given_as_ids(p) for p in asked.several(prompts))
    facts = {**_facts(model, how, watch), "template": "chat" if template else None}
    facts |= {} if target_ids is None else {"forced": True}
    facts |= {"edits": [str(edit) for edit in changes]} if changes else {}
    facts |= {"rows": "all"} if rewrites(changes) else {}
    return Decoding(
        model,
        how,
        canvas.to(model.device),
        names,
        watch,
        {**facts, **(meta or {})},
        len(suffix) if model.spec.paradigm == "mdm" else 0,
        infill,
        changes,
        None if target_ids is None else torch.tensor(target_ids, device=model.device),
    )


class Decoding:
    """The steps, as they happen or again, and the result once they are done."""

    def __init__(
        self,
        model: Model,
        how: Sampling,
        canvas: CanvasState,
        samples: Sequence[str],
        watch: Watch | None,
        meta: Mapping[str, Any],
        suffix: int,
        infill: bool,
        edits: tuple[Edit, ...],
        forced: Tensor | None,
    ) -> None:
        self.model, self.how, self.samples, self.meta = model, how, tuple(samples), dict(meta)
        self.layers: list[Reductions] = []  # what the latest step left behind, if it was watched
        self._canvas, self._suffix, self._infill = canvas, suffix, infill
        self._watched = watch is not None
        self._intervention = Intervention(edits, model, self.samples) if edits else None
        self._watcher = _watcher(watch, self._intervention)
        self._recorder: Recorder | None = None
        self._done: list[Step] = []
        self._broken: str | None = None
        self._rest = _run(model, how, canvas, self.samples, suffix, self._watcher, self._intervention, forced)

    def __iter__(self) -> Iterator[Step]:
        """The steps from the first on; those that have not happened happen now."""
        at = 0
        while at < len(self._done) or self._more():
            yield self._done[at]
            at += 1

    def __repr__(self) -> str:
        return f"Decoding({self.model.spec.name}: {len(self.samples)} samples, {len(self._done)} steps so far)"

    @property
    def steps(self) -> list[Step]:
        while self._more():
            pass
        return self._done

    @property
    def tokens(self) -> Tensor:
        """The finished canvases [batch, position], left-padded."""
        return self.steps[-1].after.tokens if self.steps else self._canvas.tokens

    @property
    def answer_start(self) -> int:
        """Where the new tokens begin in every canvas of the batch."""
        behind = self.how.new_tokens + self._suffix if self.model.spec.paradigm == "mdm" else 0
        return self._canvas.tokens.shape[1] - behind

    @property
    def generated(self) -> list[list[int]]:
        """The new tokens of each prompt, up to the first that ends a text."""
        start = self.answer_start
        answers: list[list[int]] = self.tokens[:, start : start + self.how.new_tokens].tolist()
        ends = set(self.model.spec.stop_ids)
        return [answer[: next((i for i, t in enumerate(answer) if t in ends), len(answer))] for answer in answers]

    @property
    def texts(self) -> list[str]:
        """What was generated for each prompt; of a canvas with masks in its prompt, the whole."""
        if self.model.tokenizer is None:
            raise UserError(f"{self.model.spec.name} has no tokenizer; read `generated` or `tokens`")
        if not self._infill:
            return [self.model.tokenizer.decode(ids) for ids in self.generated]
        valid = self.steps[-1].after.valid if self.steps else self._canvas.valid
        return [self.model.tokenizer.decode(row[keep].tolist()) for row, keep in zip(self.tokens, valid, strict=True)]

    @property
    def text(self) -> str:
        return str(_only(self.texts, "texts"))

    @property
    def traces(self) -> list[Trace]:
        """One per prompt."""
        if not self._watched:
            raise UserError("nothing was watched; decode with watch=fs.Watch()")
        if not self.steps or self._recorder is None:
            raise UserError("nothing was decoded: no prompt had a mask to fill")
        return self._recorder.traces()

    @property
    def trace(self) -> Trace:
        only: Trace = _only(self.traces, "traces")
        return only

    def lift(self, layer: int) -> Tensor:
        """Received attention over what uniform attention would give, [batch, key], of one layer at the latest step.

        Mean over heads, all rows of the forward; NaN for keys that too few of them see.
        """
        if self._watcher is None or not self._watched or not self.layers:
            raise UserError("nothing has been watched; decode with watch=fs.Watch() and take a step first")
        if lacking := {"received", "uniform", "eligible"} - self._watcher.fields:
            raise UserError(f"lift needs the fields {', '.join(sorted(lacking))}; watch them too")
        if not isinstance(layer, int) or not 0 <= layer < len(self.layers):
            raise UserError(f"there is no layer {layer}: {self.model.spec.name} has layers 0 to {len(self.layers) - 1}")
        at = self._watcher.layer_visibility
        shared = self.layers[at.index(at[layer])].fields  # those of a visibility come with its first layer
        received = self.layers[layer].fields["received"][:, 0]
        return torch.where(shared["eligible"][:, 0] > 0, received / shared["uniform"][:, 0], torch.nan)

    def _more(self) -> bool:
        """Do one more step; False when there is none. What broke off is not passed off as finished."""
        if self._broken is not None:
            raise UserError(f"this decoding broke off at step {len(self._done)} ({self._broken}); decode again")
        try:
            step, self.layers, moved = next(self._rest, (None, self.layers, None))
        except BaseException as error:
            self._broken = str(error) if isinstance(error, UserError) else type(error).__name__
            raise
        if step is None:
            return False
        if self._watcher is not None and self._watched:
            self._recorder = self._recorder or recorder_for(self.samples, self._watcher, self.meta)
            self._recorder.add(step, self.layers, self._watcher.layer_visibility, moved)
        self._done.append(step)
        return True


def _watcher(watch: Watch | None, intervention: Intervention | None) -> Watcher | None:
    """Edits are made where attention is watched; unwatched, next to nothing is kept of it."""
    if intervention is not None:
        return Watcher(watch or Watch(fields=("received",)), rows=watch is not None, change=intervention.change)
    return None if watch is None else Watcher(watch, rows=True)


def _run(
    model: Model,
    how: Sampling,
    canvas: CanvasState,
    samples: Sequence[str],
    suffix: int,
    watcher: Watcher | None,
    intervention: Intervention | None,
    forced: Tensor | None,
) -> Iterator[tuple[Step, list[Reductions], Tensor | None]]:
    """The steps, each with what its forward left behind and, if asked for, the influence on its commits [commit, key].

    It holds no `Decoding`: dropping that ends the watch.
    """
    spec = model.spec
    anew = intervention is not None and rewrites(intervention.edits)
    whole = model.cached() if spec.paradigm == "arm" and not anew else model.forward

    def forward(canvas: CanvasState, rows: slice) -> Tensor:
        if intervention is not None and watcher is not None:
            if intervention.looks_first(canvas):
                watcher.begin(canvas)
                model.forward(canvas, rows)
            canvas = intervention.seen(canvas)
        if watcher is not None:
            watcher.begin(canvas)
        try:
            return whole(canvas, rows)
        except torch.OutOfMemoryError as error:
            raise _too_large(model, canvas) from error

    with nullcontext() if watcher is None else attach(model.module, watcher):
        if spec.paradigm == "arm":
            steps = autoregress(forward, canvas, how, end_ids=spec.stop_ids, samples=samples, forced=forced)
        else:
            assert spec.mask_id is not None
            steps = denoise(
                forward,
                canvas,
                how,
                mask_id=spec.mask_id,
                shift=spec.shift,
                end_ids=spec.stop_ids,
                samples=samples,
                suffix=suffix,
                unguided=model.forward,
                forced=forced,
            )
        for step in steps:
            layers = [] if watcher is None else watcher.finish(step.commits)
            if watcher is not None and not layers:
                raise UserError(
                    f"no attention was seen: {type(model.module).__name__} calls neither transformers'"
                    " AttentionInterface nor F.scaled_dot_product_attention; decode it without watch"
                )
            moved = None
            if watcher is not None and watcher.watch.influence:
                with detached(model.module):
                    moved = influence(model.forward, model.module, step.before, step.commits)
            yield step, layers, moved
    for sentence in intervention.idle if intervention is not None else ():
        warnings.warn(sentence, stacklevel=2)


def _facts(model: Model, how: Sampling, watch: Watch | None) -> dict[str, Any]:
    """What a result depends on besides the prompt."""
    facts = {**model.metadata, **how.as_json}
    cached = model.spec.paradigm == "arm" and model.spec.cache
    facts |= {"rows": "cache" if cached else "all", "state": "step"}
    return facts | ({} if watch is None else {"fields": list(watch.field_names)})


def _too_large(model: Model, canvas: CanvasState) -> UserError:
    """Out of memory: run one sample to see what it takes, and say how many would fit."""
    batch, length = canvas.tokens.shape
    device, advice = canvas.tokens.device, "give shorter prompts, fewer new tokens, or another device or dtype"
    if batch > 1 and device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        free, before = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_allocated(device)
        one = CanvasState(canvas.tokens[:1], canvas.states[:1])
        try:
            model.forward(one, slice(0, length))
            each = max(1, torch.cuda.max_memory_allocated(device) - before)
            advice = f"{max(1, min(batch - 1, int(0.9 * free / each)))} at a time would fit"
        except torch.OutOfMemoryError:
            advice = f"not even one fits; {advice}"
    return UserError(f"{batch} prompts of {length} positions do not fit in the memory of {device}: {advice}")


def _given_as_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and not any(isinstance(part, Mapping) for part in prompt)


def _only(several: list[Any], name: str) -> Any:
    if len(several) != 1:
        raise UserError(f"there are {len(several)} of them, one per prompt; read `{name}`")
    return several[0]
