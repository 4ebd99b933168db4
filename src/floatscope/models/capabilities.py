"""What an opened model supports, found by a few forwards of four tokens or of a block before anything is decoded.

    model = detect_capabilities(model)       # the same model; its spec now says whether it can be cached and padded

A transformers class may have no key-value cache of the usual kind (Mamba has none, hybrids have more), may let padding
into its state, and may attend in both directions although it is called a causal language model. No config says so, and
the only symptom would be wrong numbers.

Sliding windows are shortened while the cache is checked: a window shows only in inputs that are longer, and those of
real models hold thousands of tokens. Recurrent layers are not cached: some keep their state in the module, where two
decodings would overwrite each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from floatscope.canvas import CanvasState
from floatscope.compat import is_stateful
from floatscope.errors import LIBRARY_ERRORS, UserError, summarize_error
from floatscope.models.model import BlockCachedForward, CachedForward, Model
from floatscope.models.silence import silence_libraries
from floatscope.schema import Paradigm, State

TOKENS = 4
MAX_BLOCK = 128  # the token after a larger block is not computed: a block size comes from a file
WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size")
"""Fields of configs that limit how far back a row sees."""


def detect_capabilities(model: Model) -> Model:
    """Return the model with `supports_cache` and `supports_padding` set in its spec.

    Raises a `UserError` if the model cannot run, or attends to positions it should not see.
    """
    opened, model = model, _with_mask_logits(model)
    with torch.inference_mode(), silence_libraries():
        samples = _two_samples(model)
        longer = samples[0]
        length, shorter = len(longer), longer[:-1]
        logits = _forward(model, samples)
        if bool(logits.isnan().any()):
            raise UserError(
                f"{_describe(model)} computes NaN for ordinary tokens, in {str(model.dtype).removeprefix('torch.')};"
                " correct its config.json or download it again, or open it with dtype='float32'"
            )
        if length < TOKENS or not bool(logits.isfinite().all()):  # nothing to compare
            return opened
        _check_direction(model, logits)
        expected = [logits[0], _forward(model, [shorter])[0]]  # each sample alone
        batch = _build_canvas(model, [longer, shorter])
        has_position_ids = "position_ids" in model.forward_parameters  # else padding is refused in any case
        supports_padding = not has_position_ids or _gives(expected, lambda: _run(model, batch))
        supports_cache = True
        if model.spec.paradigm is Paradigm.ARM:
            canvas = batch if has_position_ids and supports_padding else _build_canvas(model, [longer])
            supports_cache = not is_stateful(model.module) and _gives(
                expected, lambda: _forward_with_cache(model, canvas)
            )
            with _short_windows(model) as has_windows:
                if supports_cache and has_windows:
                    expected = [_forward(model, [sample])[0] for sample in (longer, shorter)]
                    supports_cache = _gives(expected, lambda: _forward_with_cache(model, canvas))
        elif model.spec.block_size is not None:
            supports_cache = _supports_block_cache(model, has_position_ids and supports_padding)
    spec = replace(opened.spec, supports_padding=supports_padding, supports_cache=supports_cache)
    return replace(opened, spec=spec)


def check_forward(model: Model) -> None:
    """Run the first forward of `detect_capabilities`, and raise a `UserError` if the model cannot run."""
    with torch.inference_mode(), silence_libraries():
        _forward(model, _two_samples(model))


def _with_mask_logits(model: Model) -> Model:
    """The model with its own logits for the mask token; beside the lowest number every difference would look small."""
    return replace(model, spec=replace(model.spec, excludes_mask=False))


def _two_samples(model: Model) -> list[list[int]]:
    """Return two samples of ordinary tokens that differ in the last one."""
    size = model.spec.block_size
    longest = TOKENS if size is None or size > MAX_BLOCK else max(TOKENS, size + 1)
    length = min(longest, model.spec.context or longest)
    ids = _ordinary_tokens(model, length + 1)
    return [ids[:length], [*ids[: length - 1], ids[-1]]]


def _forward(model: Model, samples: list[list[int]]) -> Tensor:
    try:
        logits = _run(model, _build_canvas(model, samples))
    except torch.OutOfMemoryError:
        raise
    except LIBRARY_ERRORS as error:
        raise UserError(
            f"{_describe(model)} cannot be run on {len(samples[0])} tokens ({summarize_error(error)})"
        ) from error
    rows = model.spec.canvas_size or len(samples[0])
    if logits.shape[:2] != (len(samples), rows):
        raise UserError(f"{_describe(model)} returns {logits.shape[1]} rows for {rows} tokens; expected one per token")
    return logits


def _run(model: Model, canvas: CanvasState) -> Tensor:
    """The logits of all rows, or of a canvas after the tokens."""
    if model.spec.canvas_size is None:
        return model.forward(canvas)
    noise = torch.tensor(_ordinary_tokens(model, model.spec.canvas_size), device=model.device)
    noise = noise.expand(len(canvas.tokens), -1)
    tokens = torch.cat([canvas.tokens, noise], 1)
    states = torch.cat([canvas.states, torch.full_like(noise, int(State.NOISE))], 1)
    return model.canvas_forward()(CanvasState(tokens, states), None)


def _check_direction(model: Model, logits: Tensor) -> None:
    """Compare the first row of two samples that differ in their last token."""
    size = model.spec.block_size
    if size is not None:
        if logits.shape[1] > size and not _are_close(logits[0, 0], logits[1, 0]):
            raise UserError(
                f"{_describe(model)} attends to later blocks, so it is not block-causal; open it without block_size="
            )
        return
    sees_later_tokens = not torch.equal(logits[0, 0], logits[1, 0])
    is_mdm = model.spec.paradigm is Paradigm.MDM
    if not sees_later_tokens and is_mdm and model.spec.architecture in ("causal", "remote", "adapted"):
        is_adapted = model.spec.architecture == "adapted"
        remedy = "an adapter cannot change that" if is_adapted else "open it without mask_id="
        raise UserError(
            f"{_describe(model)} keeps its causal mask with is_causal=False, so it cannot denoise; {remedy}"
        )
    if sees_later_tokens and not is_mdm and not _are_close(logits[0, 0], logits[1, 0]):
        raise UserError(
            f"{_describe(model)} attends in both directions, so it is not autoregressive; with mask_id= it opens as a"
            " masked diffusion model"
        )


@contextmanager
def _short_windows(model: Model) -> Iterator[bool]:
    """Shorten the windows of a model to less than the input of a check; yield whether it has any."""
    config = getattr(model.module, "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    with ExitStack() as undo:
        count = 0
        for part, name in ((part, name) for part in configs for name in WINDOWS):
            size = getattr(part, name, None)
            if isinstance(size, int) and size > TOKENS // 2:
                undo.callback(setattr, part, name, size)
                setattr(part, name, TOKENS // 2)
                count += 1
        yield count > 0


def _forward_with_cache(model: Model, canvas: CanvasState) -> Tensor:
    """Return the last rows through a cache: half of the canvas at once, the rest token by token."""
    forward, length = CachedForward(model), canvas.tokens.shape[1]
    prefixes = [CanvasState(canvas.tokens[:, :n], canvas.states[:, :n]) for n in range(length // 2, length + 1)]
    return torch.cat([forward(c, slice(c.tokens.shape[1] - 1, c.tokens.shape[1])) for c in prefixes], 1)


def _supports_block_cache(model: Model, pads: bool) -> bool:
    """Whether the last blocks of one and of two blocks are the same over a cache; larger blocks are not tried."""
    size = model.spec.block_size
    if size is None or size > MAX_BLOCK or is_stateful(model.module):
        return False
    longer = _ordinary_tokens(model, 2 * size)
    samples = [longer, longer[:size]] if pads else [longer]
    canvas = _build_canvas(model, samples)

    rows = slice(size, 2 * size)
    try:
        expected = list(model.forward(canvas, rows))
    except torch.OutOfMemoryError:
        raise
    except LIBRARY_ERRORS:
        return False
    return _gives(expected, lambda: BlockCachedForward(model)(canvas, rows))


def _gives(expected: list[Tensor], forward: Callable[[], Tensor]) -> bool:
    """Whether `forward` runs and its last rows are close to those expected, sample by sample."""
    try:
        logits = forward()
    except torch.OutOfMemoryError:
        raise
    except (UserError, *LIBRARY_ERRORS):
        return False
    count = min(logits.shape[1], *map(len, expected))
    return all(_are_close(ours[-count:], theirs[-count:]) for ours, theirs in zip(logits, expected, strict=False))


def _are_close(ours: Tensor, theirs: Tensor) -> bool:
    """Compare with the precision that a dtype has left after many layers; another network differs more."""
    if ours.shape != theirs.shape or not bool(ours.isfinite().all()):
        return False
    tolerance = torch.finfo(theirs.dtype).eps ** 0.5 * theirs.abs().max()
    return bool((ours - theirs).abs().max() <= tolerance)


def _ordinary_tokens(model: Model, count: int) -> list[int]:
    """Return token ids that are not special; repeated if there are fewer than `count`."""
    spec = model.spec
    special = {spec.mask_id, spec.bos_id, spec.eos_id, spec.eot_id, spec.pad_id}
    ids = list(islice((i for i in range(model.vocab_size) if i not in special), count)) or [0]
    return [ids[i % len(ids)] for i in range(count)]


def _build_canvas(model: Model, samples: list[list[int]]) -> CanvasState:
    length = max(map(len, samples))
    tokens = torch.tensor([[model.spec.pad_id or 0] * (length - len(s)) + s for s in samples])
    states = torch.tensor([[int(State.PAD)] * (length - len(s)) + [int(State.PROMPT)] * len(s) for s in samples])
    return CanvasState(tokens, states).to(model.device)


def _describe(model: Model) -> str:
    return f"{model.spec.name} ({type(model.module).__name__})"
