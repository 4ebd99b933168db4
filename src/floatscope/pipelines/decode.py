"""`decode`: fill the masks of a canvas (MDM) or continue a prompt (ARM), watched or not.

    out = decode(model, "What floats?", new_tokens=32, watch=Watch())
    for step in out: ...                        # the steps as they happen
    out.text, out.steps, out.trace              # the result; the remaining steps run first

All arguments are checked here, and become a `Decoding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from floatscope.canvas import Regions, build_canvas
from floatscope.capture.experts import find_experts
from floatscope.capture.influence import input_embedding
from floatscope.capture.watcher import Watch
from floatscope.errors import UserError
from floatscope.interventions.checks import check_edits
from floatscope.interventions.edits import Edit
from floatscope.interventions.intervention import invalidates_cache
from floatscope.interventions.recipes import parse_edits
from floatscope.models.model import Model
from floatscope.pipelines.canvas_layout import plan_layout
from floatscope.pipelines.decoding import Decoding
from floatscope.pipelines.prompting import (
    RawPrompt,
    check_prompts,
    check_target_ids,
    encode_prompts,
    list_prompts,
    parse_target_ids,
    uses_chat_template,
)
from floatscope.sampling import Sampling, resolve_sampling
from floatscope.schema import Paradigm, RowSource


def decode(
    model: Model,
    prompts: RawPrompt | Sequence[RawPrompt],
    *,
    watch: Watch | None = None,
    sampling: Sampling | None = None,
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
    """Decode one prompt or a batch of prompts.

    All arguments are checked here; decoding starts when the first step is read. A batch gives the same result as its
    prompts alone.

    Args:
        model: from `fs.load`.
        prompts: a text, a list of token ids, a list of chat messages, or a list of these.
        watch: what to capture of the attention, e.g. `fs.Watch()`; None captures nothing.
        sampling: all settings as one value, `fs.Sampling(…)`; `settings` override it.
        preset: the official defaults of a model's authors, such as "llada" or "sdar"; `settings` override it.
        chat: whether texts go through the chat template; None: if the model has one.
        infill: fill the masks inside the prompts; appends new tokens only if `new_tokens` is given. MDM only.
        suffix: token ids after the new tokens; masks among them are never filled. MDM only.
        target_ids: the new tokens of each prompt, for teacher forcing. The model's own proposals decide when a position
            is committed; the target is written there, and end tokens do not stop the sample. A target's `confidence` is
            its probability in the distribution of `confidence_from`: by default the softmax of the model's logits, at
            temperature 1 and unfiltered.
        samples: names of the prompts in traces; they also key the randomness. The default is "0", "1", …
        regions: named spans over prompt, new tokens and suffix, counted in the left-padded batch.
        edits: changes of the attention: recipes such as "mask_anchors(k=5)", or `fs.Edit`s.
        meta: extra entries for the metadata of the traces.
        **settings: fields of `Sampling`: sampler, new_tokens, steps, block, temperature, top_p, top_k, seed, …

    Returns:
        A lazy `Decoding`: iterate over its steps, or read `text`, `texts`, `tokens`, `trace`, `traces`.

    Example:
        model = fs.load("twin:mdm")
        out = fs.decode(model, ["Where does Mira live?", "Who sings?"], new_tokens=8, watch=fs.Watch())
        out.texts  # 2 texts
        out.tokens.shape  # (2, prompt + 8), left-padded
        out.traces[0].received().shape  # (step, layer, key)
    """
    _check_types(model, watch, regions, chat, infill, meta)
    spec = model.spec
    if spec.noise == "mask" and spec.mask_id is None:
        raise UserError(f"{spec.name} has no mask token; open it with mask_id=")
    if watch is not None and watch.influence:
        input_embedding(model.module)  # raises if the model has none
    if watch is not None and watch.captures_experts:
        find_experts(model.module)  # raises if the model has none
    if spec.canvas_size is not None:
        _check_canvas_model(model, infill, target_ids)
    watch = None if watch is None else supported_watch(model, watch)
    # 1. Settings. Infilling appends nothing and uses no chat template by default; targets set the number of new tokens.
    if infill:
        if sampling is None and settings.get("new_tokens") is None:
            settings["new_tokens"] = 0
        chat = bool(chat)
    if target_ids is not None:
        if infill or settings.get("stop") or (sampling is not None and sampling.stop):
            other = "infill fills masks inside the prompt" if infill else "stop ends a text at its first end token"
            raise UserError(f"target_ids gives all new tokens, but {other}; leave one of them out")
        target_ids = parse_target_ids(model, target_ids)
        if sampling is None and settings.get("new_tokens") is None:
            settings["new_tokens"] = len(target_ids[0])
        settings["stop"] = False
    sampling = resolve_sampling(
        spec.paradigm, preset, sampling=sampling, block_size=spec.block_size, canvas_size=spec.canvas_size, **settings
    )
    # 2. Prompts.
    _check_suffix(model, suffix, sampling)
    ids = encode_prompts(model, prompts, chat)
    layout = plan_layout(model, sampling.new_tokens, suffix)
    check_prompts(model, ids, layout, infill)
    if target_ids is not None:
        check_target_ids(target_ids, len(ids), sampling.new_tokens)
    names = _name_samples(samples, len(ids))
    # 3. The canvas.
    canvas = build_canvas(
        ids,
        layout.new_tokens,
        spec.mask_id,
        suffix=layout.suffix,
        regions=regions,
        pad_id=spec.pad_id or 0,
        block_size=spec.block_size,
    )
    # 4. Edits.
    parsed_edits = parse_edits(edits)
    check_edits(parsed_edits, model, canvas)
    if parsed_edits and (sampling.guidance or (watch is not None and watch.influence)):
        other = "guidance" if sampling.guidance else "influence"
        raise UserError(f"edits and {other} cannot be combined; leave one out")
    # 5. Metadata.
    used_chat = uses_chat_template(model, chat) and not all(_is_token_ids(p) for p in list_prompts(prompts))
    rows = RowSource.ALL if invalidates_cache(parsed_edits, spec) else spec.row_source
    record = {**_build_meta(model, sampling, watch, rows), "chat": used_chat}
    record |= {} if target_ids is None else {"teacher_forcing": True}
    record |= {"edits": [str(edit) for edit in parsed_edits]} if parsed_edits else {}
    return Decoding(
        model,
        sampling,
        canvas.to(model.device),
        names,
        watch,
        {**record, **(meta or {})},
        layout=layout,
        answer_start=max(map(len, ids)),
        infill=infill,
        edits=parsed_edits,
        target_ids=None if target_ids is None else torch.tensor(target_ids, device=model.device),
        rows=rows,
    )


def _check_types(
    model: Model,
    watch: Watch | None,
    regions: Regions | None,
    chat: bool | None,
    infill: bool,
    meta: Mapping[str, Any] | None,
) -> None:
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
        raise UserError(f"meta must be a dict, got {meta!r}")


def supported_watch(model: Model, watch: Watch) -> Watch:
    """The watch without what the model does not show; raise a `UserError` if that was asked for by name.

    The attention of an encoder is not captured, so a level has no rollout for a model with one.
    """
    if model.spec.canvas_size is None:
        return watch
    name = model.spec.name
    if watch.influence:
        raise UserError(
            f"{name} conditions each step on the logits of the one before, so influence is not that of one forward;"
            " leave influence out"
        )
    if "rollout" in (watch.fields or ()):
        raise UserError(
            f"rollout needs the attention of all rows, and that of {name}'s encoder is not captured; leave it out"
        )
    return replace(watch, fields=tuple(field for field in watch.selected_fields if field != "rollout"))


def _check_canvas_model(model: Model, infill: bool, target_ids: Any) -> None:
    name = model.spec.name
    if infill:
        raise UserError(f"{name} has no mask token, so a prompt has no masks to fill; leave infill out")
    if target_ids is not None:
        raise UserError(f"{name} renoises what it does not accept, so targets cannot be forced; leave target_ids out")


def _check_suffix(model: Model, suffix: Sequence[int], sampling: Sampling) -> None:
    spec = model.spec
    if suffix and (spec.paradigm is Paradigm.ARM or not sampling.new_tokens):
        reason = "only appends" if spec.paradigm is Paradigm.ARM else "has no new tokens to generate"
        raise UserError(f"{spec.name} {reason}, so nothing can follow its answer; leave suffix out")
    if unknown := [token for token in suffix if not 0 <= token < model.vocab_size]:
        raise UserError(f"token {unknown[0]} is not in {spec.name}'s vocabulary, 0 … {model.vocab_size - 1}")


def _name_samples(samples: Sequence[str] | None, count: int) -> list[str]:
    if samples is not None and (isinstance(samples, str) or not all(isinstance(name, str) for name in samples)):
        raise UserError(f"samples must be a list of names, one for each prompt, got {samples!r}")
    names = [str(i) for i in range(count)] if samples is None else list(samples)
    if len(names) != count or len(set(names)) != len(names):
        raise UserError(f"{len(set(names))} different sample names for {count} prompts; give one for each")
    return names


def _build_meta(model: Model, sampling: Sampling, watch: Watch | None, rows: RowSource) -> dict[str, Any]:
    """Everything that a result depends on besides the prompt."""
    meta = {**model.metadata, **sampling.as_json, "rows": rows, "state": "step"}
    return meta | ({} if watch is None else {"fields": list(watch.field_names)})


def _is_token_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and not any(isinstance(part, Mapping) for part in prompt)
