"""The logit lens at the anchors: what the residual stream at the keys of largest lift predicts, by step and layer.

    table = lens(model, "What floats?", anchors=1, top_tokens=3, new_tokens=16)
    table[["step", "layer", "key", "token", "lift", "token_1", "p_1", "entropy"]]

At every step and layer the lens takes the keys of largest lift, and sends the stream that enters the layer at their
positions through the model's readout: the final norm and the output embedding. The readout is found without a list of
module names: a short forward shows whose output is whose input, from the last block to the logits. A causal model with
a cache computes a position once; its streams are kept from the step that computed them. A block-causal model runs
without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from floatscope.canvas import CanvasState, Step
from floatscope.capture.hooks import attach
from floatscope.capture.watcher import Watch, Watcher
from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.pipelines.decode import decode
from floatscope.pipelines.decoding import Decoding
from floatscope.pipelines.prompting import RawPrompt
from floatscope.schema import Paradigm, State

if TYPE_CHECKING:
    import pandas as pd

LIFT_WATCH = Watch(fields=("received", "uniform", "eligible"))
PROBE_LENGTH = 4  # positions of the forward that shows the modules from the last block to the logits
COLUMNS = ("sample", "step", "layer", "rank", "key", "token", "state", "lift", "predicted_position", "entropy")


def lens(
    model: Model, prompts: RawPrompt | Sequence[RawPrompt], *, anchors: int = 1, top_tokens: int = 3, **settings: Any
) -> pd.DataFrame:
    """Decode, and read the stream that enters each layer at its `anchors` keys of largest lift.

    Args:
        model: from `fs.load`.
        prompts: as in `fs.decode`.
        anchors: the number of keys per layer and step.
        top_tokens: the number of predicted tokens to return for each key.
        **settings: as in `fs.decode`.

    Returns:
        A table with one row per sample, step, layer and rank:

        key                 the position of the key in its sample
        token, state        its token and state before the step's commits
        lift                mean over heads and all rows of the forward (with a cache: of the prompt, then the newest)
        predicted_position  the position that the model's row at the key predicts: `key`, or `key` + 1 for an ARM or a
                            shifted MDM
        entropy             of the lens's distribution, in nats
        token_1, p_1, …     the most likely tokens and their probabilities

    Example:
        table = fs.lens(fs.load("twin:mdm"), "Where does Mira live?", anchors=2, new_tokens=4)
        table.query("step == 0 and rank == 0")[["layer", "key", "token", "lift", "token_1", "p_1"]]
    """
    import pandas as pd

    for name, number in (("anchors", anchors), ("top_tokens", top_tokens)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {number!r}")
    if isinstance(model, Model) and model.spec.block_size is not None:  # its streams change until a block is finished
        model = replace(model, spec=replace(model.spec, supports_cache=False))
    out = decode(model, prompts, watch=LIFT_WATCH, **settings)
    if top_tokens > model.vocab_size:
        raise UserError(
            f"top_tokens={top_tokens} exceeds the {model.vocab_size} tokens of {model.spec.name}; give a smaller number"
        )
    blocks, readout = _find_blocks_and_readout(model)
    streams, token_texts, rows = _Streams(blocks), _TokenTexts(model), []
    with streams.record(model.module):
        for step in out:
            entering = streams.collect(step.before.tokens.shape[1])
            rows += _read_step(out, step, entering, readout, token_texts, anchors, top_tokens)
    pairs = [name for n in range(1, top_tokens + 1) for name in (f"token_{n}", f"p_{n}")]
    return pd.DataFrame(rows, columns=[*COLUMNS, *pairs])


def _read_step(
    out: Decoding,
    step: Step,
    streams: Sequence[Tensor],
    readout: nn.Sequential,
    token_texts: _TokenTexts,
    anchors: int,
    top_tokens: int,
) -> list[list[Any]]:
    """The rows of the table for one step."""
    canvas, spec, device = step.before, out.model.spec, step.before.tokens.device
    # 1. The keys of largest lift in every layer.
    lift = torch.stack([out.lift(layer).to(device) for layer in range(len(streams))], 1)  # [batch, layer, key]
    best, keys = lift.nan_to_num(-1.0).topk(min(anchors, lift.shape[-1]))  # [batch, layer, rank]
    exists = best >= 0
    if canvas.active is not None:
        exists &= canvas.active[:, None, None]
    # 2. The streams at these keys, and what they predict.
    at_keys = torch.stack([_gather_keys(stream, keys[:, i]).to(device) for i, stream in enumerate(streams)], 1)
    entropy, p, tokens = _predict(readout, at_keys[exists], top_tokens)
    # 3. One row per key.
    sample, layer, rank = exists.nonzero(as_tuple=True)
    position, first = keys[exists], canvas.valid.int().argmax(-1)[sample]
    shift = int(spec.shift or spec.paradigm is Paradigm.ARM)
    states = [State(number).name.lower() for number in canvas.states[sample, position].tolist()]
    predictions = [
        [value for pair in zip(token_texts[t], q, strict=True) for value in pair]
        for t, q in zip(tokens, p, strict=True)
    ]
    columns = [
        [out.samples[b] for b in sample.tolist()],
        [canvas.step] * len(states),
        layer.tolist(),
        rank.tolist(),
        (position - first).tolist(),
        token_texts[canvas.tokens[sample, position].tolist()],
        states,
        best[exists].tolist(),
        (position - first + shift).tolist(),
        entropy,
        predictions,
    ]
    return [[*row, *prediction] for *row, prediction in zip(*columns, strict=True)]


def _gather_keys(stream: Float[Tensor, "batch position width"], keys: Tensor) -> Float[Tensor, "batch rank width"]:
    return stream.take_along_dim(keys.to(stream.device)[..., None], 1)


@torch.no_grad()
def _predict(
    readout: nn.Sequential, streams: Float[Tensor, "anchor width"], top_tokens: int
) -> tuple[list[float], list[list[float]], list[list[int]]]:
    """For each anchor: the entropy in nats, the largest probabilities, and their tokens."""
    logits = readout(streams[None])[0]
    log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    p, tokens = log_p.exp().topk(top_tokens)
    return torch.special.entr(log_p.exp()).sum(-1).tolist(), p.tolist(), tokens.tolist()


class _TokenTexts:
    """Token ids → texts, each looked up once; the ids themselves for a model without a tokenizer."""

    def __init__(self, model: Model) -> None:
        self._tokenizer, self._texts = model.tokenizer, dict[int, str]()

    def __getitem__(self, tokens: Sequence[int]) -> list[str]:
        for token in tokens:
            if token not in self._texts:
                self._texts[token] = self._look_up(token)
        return [self._texts[token] for token in tokens]

    def _look_up(self, token: int) -> str:
        if self._tokenizer is None:
            return str(token)
        text = self._tokenizer.pieces([token])[0] or self._tokenizer.id_to_token(token)
        return str(token) if text is None else text


class _Streams:
    """The residual stream that enters the block of each attention layer, at every position computed so far."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._inputs: dict[nn.Module, list[Tensor]] = {}  # of the latest forward
        self._streams: list[Tensor] = []

    @contextmanager
    def record(self, module: nn.Module) -> Iterator[None]:
        """Record the inputs of the blocks while the `with` block lasts."""

        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (stream := _get_stream(args, kwargs)) is not None:  # copied: a block may add to it in place
                self._inputs.setdefault(block, []).append(stream.detach().clone())

        handles = [module.register_forward_pre_hook(lambda m, a: self._inputs.clear())]
        handles += [b.register_forward_pre_hook(hook, with_kwargs=True) for b in dict.fromkeys(self._blocks)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def collect(self, length: int) -> list[Float[Tensor, "batch position width"]]:
        """The streams by layer after a forward; cached positions come from earlier forwards."""
        turns = [self._blocks[:i].count(block) for i, block in enumerate(self._blocks)]  # a block may run several times
        new = [self._inputs[block][turn] for block, turn in zip(self._blocks, turns, strict=True)]
        self._streams = [
            now if now.shape[1] == length else torch.cat([past[:, : length - now.shape[1]], now], 1)
            for past, now in zip(self._streams or new, new, strict=True)
        ]
        return self._streams


class _ModuleCall(NamedTuple):
    """A module with its input stream, its output tensor, and whether it returned nothing else."""

    module: nn.Module
    input: Tensor | None
    output: Tensor
    is_only_output: bool


def _find_blocks_and_readout(model: Model) -> tuple[list[nn.Module], nn.Sequential]:
    """The block of each attention layer, and the modules from the last block to the logits."""
    tokens = torch.arange(min(PROBE_LENGTH, model.vocab_size), device=model.device)[None]
    canvas, watcher = CanvasState(tokens, torch.full_like(tokens, int(State.PROMPT))), Watcher(LIFT_WATCH)
    with torch.no_grad(), attach(model.module, watcher), _record_calls(model.module) as calls:
        watcher.begin(canvas)
        logits = model.forward(canvas)
    lists = {name: part for name, part in model.module.named_modules() if isinstance(part, nn.ModuleList)}
    homes = [_find_list(layer, lists) for layer in watcher.layers]
    blocks = [model.module.get_submodule(block) for block, _ in homes]
    with_input = {call.module for call in calls if call.input is not None}
    if not blocks or not with_input.issuperset(blocks):
        raise UserError(
            f"the lens reads what enters the blocks of a model, and {type(model.module).__name__} has no list of blocks"
            " with attention that take [batch, position, width]"
        )
    siblings = set(homes[-1][1])  # in a hybrid model the last block need not have attention
    last = [call.output for call in calls if call.module in siblings][-1]
    return blocks, _find_readout(model, calls, last, logits)


def _find_list(layer: str, lists: dict[str, nn.ModuleList]) -> tuple[str, nn.ModuleList | tuple[()]]:
    """The innermost element of a module list that contains the layer, by name, and that list."""
    while layer:
        parent = layer.rpartition(".")[0]
        if parent in lists:
            return layer, lists[parent]
        layer = parent
    return "", ()


def _find_readout(model: Model, calls: Sequence[_ModuleCall], last: Tensor, logits: Tensor) -> nn.Sequential:
    """The modules from the last block to the logits, found backwards: whose output is the input of the next one?"""
    readout: list[nn.Module] = []
    target = _copy(logits)
    while not torch.equal(target, last):
        sources = [
            (call.module, call.input)
            for call in calls
            if call.is_only_output and call.input is not None and torch.equal(call.output, target)
        ]
        sources = [(module, x) for module, x in sources if not torch.equal(x, target)]  # without dropout
        if not sources:
            raise UserError(
                f"the lens needs a final norm and an output embedding, and in {type(model.module).__name__} no modules"
                " lead from the last block to the logits; it may scale or cap them in between"
            )
        module, target = sources[-1]  # the outermost one returns last
        readout.insert(0, module)
    return nn.Sequential(*readout)


@contextmanager
def _record_calls(module: nn.Module) -> Iterator[list[_ModuleCall]]:
    """Record the input and output of every module inside the block, in the order in which they return."""
    calls: list[_ModuleCall] = []

    def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        stream, result = _get_stream(args, kwargs), output[0] if isinstance(output, tuple) and output else output
        if isinstance(result, Tensor) and result.ndim == 3:
            copied = None if stream is None else _copy(stream)
            calls.append(_ModuleCall(part, copied, _copy(result), result is output))

    handles = [part.register_forward_hook(hook, with_kwargs=True) for part in module.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _copy(x: Tensor) -> Tensor:
    """A copy that can be compared whatever its device and dtype."""
    return x.detach().to("cpu", torch.float32, copy=True)


def _get_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    stream = args[0] if args else kwargs.get("hidden_states")
    return stream if isinstance(stream, Tensor) and stream.ndim == 3 and stream.is_floating_point() else None
