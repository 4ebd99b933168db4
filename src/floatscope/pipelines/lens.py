"""The logit lens at the anchors: what the residual stream at the keys of largest lift reads as, by step and layer.

    table = lens(model, "What floats?", k=1, top=3, new_tokens=16)
    table[["step", "layer", "key", "token", "lift", "token_1", "p_1", "entropy"]]

At every step and layer the keys of largest lift are taken. What enters the layer at their positions goes through what
the model has behind its last block, the final norm and the output embedding, and the distribution is told. Which
modules those are is no list of names: a short forward shows whose output is whose input, from the last block to the
logits. A causal model with a cache computes a position once; its streams are kept from the step that did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from floatscope.canvas import CanvasState, Step
from floatscope.capture.watcher import Watch, Watcher
from floatscope.capture.ways import attach
from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.pipelines import prompts as asked
from floatscope.pipelines.decode import Decoding, decode
from floatscope.schema import State

if TYPE_CHECKING:
    import pandas as pd

LIFT = Watch(fields=("received", "uniform", "eligible"))
PROBE = 4  # positions of the forward that shows the way from the last block to the logits


def lens(
    model: Model, prompts: asked.Prompt | Sequence[asked.Prompt], *, k: int = 1, top: int = 3, **settings: Any
) -> pd.DataFrame:
    """Decode, and read the stream that enters each layer at its `k` keys of largest lift; `settings` are `decode`'s.

    A row per sample, step, layer and rank: the `key` (counted in its sample), its `token` and `state` before the step's
    commits, its `lift` (mean over heads and all rows of the forward: of a cached model the prompt's, then the newest),
    `about`, the position this row of the model speaks about (the next one where logits are shifted), the `entropy` of
    what the lens reads in nats, and its `top` tokens with their probabilities: `token_1`, `p_1`, …
    """
    import pandas as pd

    for name, number in (("k", k), ("top", top)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UserError(f"{name} must be a whole number of at least 1, got {number!r}")
    out = decode(model, prompts, watch=LIFT, **settings)
    if top > model.vocabulary:
        raise UserError(f"top={top} is more than the {model.vocabulary} tokens {model.spec.name} has; ask for fewer")
    layers, readout = _anatomy(model)
    streams, words, rows = _Streams(layers), _Words(model), []
    with streams.kept(model.module):
        for step in out:
            rows += _rows(out, step, streams.up_to(step.before.tokens.shape[1]), readout, words, k, top)
    pairs = [name for n in range(1, top + 1) for name in (f"token_{n}", f"p_{n}")]
    fixed = ["sample", "step", "layer", "rank", "key", "token", "state", "lift", "about", "entropy"]
    return pd.DataFrame(rows, columns=[*fixed, *pairs])


def _rows(
    out: Decoding, step: Step, streams: Sequence[Tensor], readout: nn.Sequential, words: _Words, k: int, top: int
) -> list[list[Any]]:
    canvas, spec, device = step.before, out.model.spec, step.before.tokens.device
    lift = torch.stack([out.lift(layer).to(device) for layer in range(len(streams))], 1)  # [batch, layer, key]
    best, at = lift.nan_to_num(-1.0).topk(min(k, lift.shape[-1]))  # [batch, layer, rank]
    there = best >= 0
    if canvas.active is not None:
        there &= canvas.active[:, None, None]
    entering = torch.stack([_at(stream, at[:, i]).to(device) for i, stream in enumerate(streams)], 1)
    entropy, p, tokens = _distribution(readout, entering[there], top)
    sample, layer, rank = there.nonzero(as_tuple=True)
    position, first = at[there], canvas.valid.int().argmax(-1)[sample]
    next_one = int(spec.shift or spec.paradigm == "arm")
    state = [State(number).name.lower() for number in canvas.states[sample, position].tolist()]
    columns = [
        [out.samples[b] for b in sample.tolist()],
        [canvas.step] * len(state),
        layer.tolist(),
        rank.tolist(),
        (position - first).tolist(),
        words[canvas.tokens[sample, position].tolist()],
        state,
        best[there].tolist(),
        (position - first + next_one).tolist(),
        entropy,
        [[value for pair in zip(words[t], q, strict=True) for value in pair] for t, q in zip(tokens, p, strict=True)],
    ]
    return [[*row, *read] for *row, read in zip(*columns, strict=True)]


def _at(stream: Float[Tensor, "batch position width"], keys: Tensor) -> Float[Tensor, "batch rank width"]:
    return stream.take_along_dim(keys.to(stream.device)[..., None], 1)


@torch.no_grad()
def _distribution(
    readout: nn.Sequential, entering: Float[Tensor, "anchor width"], top: int
) -> tuple[list[float], list[list[float]], list[list[int]]]:
    """Of each anchor: the entropy in nats, the largest probabilities, the tokens that have them."""
    logits = readout(entering[None])[0]
    log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    p, tokens = log_p.exp().topk(top)
    return torch.special.entr(log_p.exp()).sum(-1).tolist(), p.tolist(), tokens.tolist()


class _Words:
    """Token ids as text, each looked up once; of a model without a tokenizer the ids themselves."""

    def __init__(self, model: Model) -> None:
        self._text, self._known = model.tokenizer, dict[int, str]()

    def __getitem__(self, tokens: Sequence[int]) -> list[str]:
        for token in tokens:
            if token not in self._known:
                piece = None if self._text is None else self._text.pieces([token])[0] or self._text.name_of(token)
                self._known[token] = str(token) if piece is None else piece
        return [self._known[token] for token in tokens]


class _Streams:
    """What enters the blocks of the attention layers, of every position up to the newest."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._entered: dict[nn.Module, list[Tensor]] = {}
        self._kept: list[Tensor] = []

    @contextmanager
    def kept(self, module: nn.Module) -> Iterator[None]:
        def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (stream := _stream(args, kwargs)) is not None:  # copied: a block may add to it in place
                self._entered.setdefault(block, []).append(stream.detach().clone())

        handles = [module.register_forward_pre_hook(lambda m, a: self._entered.clear())]
        handles += [b.register_forward_pre_hook(enter, with_kwargs=True) for b in dict.fromkeys(self._layers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def up_to(self, length: int) -> list[Float[Tensor, "batch position width"]]:
        """By layer, after a forward; positions it did not compute anew are as the forwards before left them."""
        turns = [self._layers[:i].count(block) for i, block in enumerate(self._layers)]  # of a block that runs again
        new = [self._entered[block][turn] for block, turn in zip(self._layers, turns, strict=True)]
        self._kept = [
            now if now.shape[1] == length else torch.cat([past[:, : length - now.shape[1]], now], 1)
            for past, now in zip(self._kept or new, new, strict=True)
        ]
        return self._kept


class _Call(NamedTuple):
    """A module, the stream it was given, the tensor it gave, and whether it gave nothing else."""

    part: nn.Module
    given: Tensor | None
    made: Tensor
    alone: bool


def _anatomy(model: Model) -> tuple[list[nn.Module], nn.Sequential]:
    """The block of each attention layer, and what leads from the last block to the logits."""
    tokens = torch.arange(min(PROBE, model.vocabulary), device=model.device)[None]
    canvas, watcher = CanvasState(tokens, torch.full_like(tokens, int(State.PROMPT))), Watcher(LIFT)
    with torch.no_grad(), attach(model.module, watcher), _calls(model.module) as calls:
        watcher.begin(canvas)
        logits = model.forward(canvas)
    lists = {name: part for name, part in model.module.named_modules() if isinstance(part, nn.ModuleList)}
    homes = [_home(layer, lists) for layer in watcher.layers]
    blocks = [model.module.get_submodule(block) for block, _ in homes]
    entered = {call.part for call in calls if call.given is not None}
    if not blocks or not entered.issuperset(blocks):
        raise UserError(
            f"the lens reads what enters the blocks of a model, and {type(model.module).__name__} has no list of blocks"
            " with attention that take [batch, position, width]"
        )
    beside = set(homes[-1][1])  # in a hybrid the last block need not have attention
    last = [call.made for call in calls if call.part in beside][-1]
    return blocks, _way(model, calls, last, logits)


def _home(layer: str, lists: dict[str, nn.ModuleList]) -> tuple[str, nn.ModuleList | tuple[()]]:
    """The innermost part of a list of modules that a layer is or lies in, by name, and that list."""
    while layer:
        above = layer.rpartition(".")[0]
        if above in lists:
            return layer, lists[above]
        layer = above
    return "", ()


def _way(model: Model, calls: Sequence[_Call], last: Tensor, logits: Tensor) -> nn.Sequential:
    """The modules from the last block to the logits, found backwards: which gave what the next one was given?"""
    way: list[nn.Module] = []
    target = _copy(logits)
    while not torch.equal(target, last):
        made = [(c.part, c.given) for c in calls if c.alone and c.given is not None and torch.equal(c.made, target)]
        made = [(part, given) for part, given in made if not torch.equal(given, target)]  # unlike dropout's
        if not made:
            raise UserError(
                f"the lens needs a final norm and an output embedding, and in {type(model.module).__name__} no modules"
                " lead from the last block to the logits; it may scale or cap them on the way"
            )
        part, target = made[-1]  # the outermost, which ends last
        way.insert(0, part)
    return nn.Sequential(*way)


@contextmanager
def _calls(module: nn.Module) -> Iterator[list[_Call]]:
    """What every module is given and gives while the block lasts, in the order in which they end."""
    calls: list[_Call] = []

    def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given, made = _stream(args, kwargs), output[0] if isinstance(output, tuple) and output else output
        if isinstance(made, Tensor) and made.ndim == 3:
            calls.append(_Call(part, None if given is None else _copy(given), _copy(made), made is output))

    handles = [part.register_forward_hook(hook, with_kwargs=True) for part in module.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _copy(x: Tensor) -> Tensor:
    """To be compared, wherever it is and whatever its dtype."""
    return x.detach().to("cpu", torch.float32, copy=True)


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    given = args[0] if args else kwargs.get("hidden_states")
    return given if isinstance(given, Tensor) and given.ndim == 3 and given.is_floating_point() else None
