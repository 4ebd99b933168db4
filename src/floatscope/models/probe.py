"""Does an opened model do what decoding asks of it? A few forwards of four tokens, before anything is decoded.

    model = probed(model)       # the same model; its spec now says whether it can be cached and padded

A class of transformers need not keep its keys and values as we do (Mamba has none, hybrids keep more), may let padding
into its state, and may look both ways although it is called a causal language model. None of that can be read off a
config, and all of it would only show as wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from floatscope.canvas import CanvasState
from floatscope.errors import LIBRARY_ERRORS, UserError, reason
from floatscope.models.model import Cached, Model
from floatscope.models.quiet import quiet
from floatscope.schema import State

TOKENS = 4


def probed(model: Model) -> Model:
    """Refused if it cannot run or sees what it should not; `cache` and `padding` are off where they change answers."""
    length = min(TOKENS, model.spec.context or TOKENS)
    ids = _tokens(model, length + 1)
    whole, shorter = ids[:length], ids[: length - 1]
    with torch.inference_mode(), quiet():
        rows = _rows(model, [whole, [*shorter, ids[-1]]])  # two samples that differ in their last token
        if length < TOKENS or not bool(rows.isfinite().all()):  # nothing to compare
            return model
        _check_direction(model, rows)
        alone = [rows[0], _rows(model, [shorter])[0]]
        together = _canvas(model, [whole, shorter])
        placed = "position_ids" in model._takes  # else padding is refused in any case
        padding = not placed or _answers(lambda: model.forward(together), alone)
        cache = True
        if model.spec.paradigm == "arm":
            canvas = together if placed and padding else _canvas(model, [whole])
            cache = _answers(lambda: _token_by_token(model, canvas), alone)
    return replace(model, spec=replace(model.spec, padding=padding, cache=cache))


def _rows(model: Model, samples: list[list[int]]) -> Tensor:
    try:
        rows = model.forward(_canvas(model, samples))
    except torch.OutOfMemoryError:
        raise
    except LIBRARY_ERRORS as error:
        raise UserError(f"{_name(model)} cannot be run on {len(samples[0])} tokens ({reason(error)})") from error
    if rows.shape[:2] != (len(samples), len(samples[0])):
        raise UserError(
            f"{_name(model)} gives {rows.shape[1]} rows for {len(samples[0])} tokens, and must give as many"
        )
    return rows


def _check_direction(model: Model, rows: Tensor) -> None:
    sees = not torch.equal(rows[0, 0], rows[1, 0])
    if not sees and model.spec.paradigm == "mdm" and model.spec.architecture in ("causal", "remote", "adapted"):
        helps = "no adapter can change that" if model.spec.architecture == "adapted" else "open it without mask_id="
        raise UserError(f"{_name(model)} keeps its causal mask whatever it is told, so it cannot denoise; {helps}")
    if sees and model.spec.paradigm == "arm" and not _close(rows[0, 0], rows[1, 0]):
        raise UserError(
            f"{_name(model)} looks both ways, so it is no autoregressive model; with mask_id= it opens as a masked"
            " diffusion model"
        )


def _token_by_token(model: Model, canvas: CanvasState) -> Tensor:
    """The last rows through a cache: half of the canvas at once, the rest one after the other."""
    forward, length = Cached(model), canvas.tokens.shape[1]
    firsts = [CanvasState(canvas.tokens[:, :n], canvas.states[:, :n]) for n in range(length // 2, length + 1)]
    return torch.cat([forward(c, slice(c.tokens.shape[1] - 1, c.tokens.shape[1])) for c in firsts], 1)


def _answers(ask: Callable[[], Tensor], alone: list[Tensor]) -> bool:
    """Whether the last rows of each sample are what they are when the sample is computed whole and alone."""
    try:
        rows = ask()
    except torch.OutOfMemoryError:
        raise
    except LIBRARY_ERRORS:
        return False
    count = min(rows.shape[1], *map(len, alone))
    return all(_close(ours[-count:], theirs[-count:]) for ours, theirs in zip(rows, alone, strict=False))


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """To what is left of a dtype's precision after many layers; another network is further away."""
    if ours.shape != theirs.shape or not bool(ours.isfinite().all()):
        return False
    allowed = torch.finfo(theirs.dtype).eps ** 0.5 * theirs.abs().max()
    return bool((ours - theirs).abs().max() <= allowed)


def _tokens(model: Model, count: int) -> list[int]:
    """Ordinary tokens where there are so many."""
    spec = model.spec
    special = {spec.mask_id, spec.bos_id, spec.eos_id, spec.eot_id, spec.pad_id}
    found = list(islice((i for i in range(model.vocabulary) if i not in special), count)) or [0]
    return [found[i % len(found)] for i in range(count)]


def _canvas(model: Model, rows: list[list[int]]) -> CanvasState:
    longest = max(map(len, rows))
    tokens = torch.tensor([[model.spec.pad_id or 0] * (longest - len(row)) + row for row in rows])
    states = torch.tensor([[int(State.PAD)] * (longest - len(r)) + [int(State.PROMPT)] * len(r) for r in rows])
    return CanvasState(tokens, states).to(model.device)


def _name(model: Model) -> str:
    return f"{model.spec.name} ({type(model.module).__name__})"
