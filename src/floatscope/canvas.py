"""The values that all parts of floatscope exchange: what the model sees at a step, and what the step does.

    Regions       named sets of positions: question, document 3, gold
    CanvasState   what the model is about to see: tokens, position states, regions, step, block
    Commits       the tokens a step writes: sample, position, predicting row, token, confidence
    Step          a canvas before and after its commits
    EndAlignment  moves the canvases of a batch so that all end at the last column
    Groups        query groups: whose attention is added up, as weights [batch, query, group]
    Reductions    the fields of one attention layer at one step
    StepCapture   what was captured in one step: the reductions of all layers, and their masks

    canvas = build_canvas([[5, 6, 7]], new_tokens=4, mask_id=0)
    canvas                                           # CanvasState(1 × 7 positions, step 0, 4 masked)

They are frozen dataclasses of tensors and names, without models, files or metrics. `Trace`, which stores a sequence of
steps, is in `floatscope.traces`; edits are in `floatscope.interventions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from floatscope.errors import UserError
from floatscope.schema import MaskStructure, State


@dataclass(frozen=True, repr=False)
class Regions:
    """Named sets of positions (question, document 3, gold, …); a position may lie in several or in none.

    `member` is None without regions.

    Example:
        regions = fs.Regions.from_spans([{"question": [(0, 4)], "gold": [(6, 8), (10, 12)]}], length=20)
        regions  # Regions(question, gold; 1 × 20 positions)
        regions.member.shape  # [1, 20, 2]
    """

    names: tuple[str, ...] = ()
    member: Bool[Tensor, "batch position region"] | None = None

    def __post_init__(self) -> None:
        width = 0 if self.member is None else self.member.shape[-1]
        if width != len(self.names):
            raise UserError(
                f"{len(self.names)} region names for {width} columns of membership; give one name per column"
            )
        if len(set(self.names)) != len(self.names):
            raise UserError(f"region names must differ, got {', '.join(self.names)}")

    def __repr__(self) -> str:
        if self.member is None:
            return "Regions()"
        batch, positions, _ = self.member.shape
        return f"Regions({', '.join(self.names)}; {batch} × {positions} positions)"

    @staticmethod
    def from_spans(spans: Sequence[Mapping[str, Sequence[tuple[int, int]]]], length: int) -> Regions:
        """Build regions from one `{name: [(start, stop), …]}` per sample, on canvases of `length` positions.

        The names are in order of first appearance.
        """
        names = tuple(dict.fromkeys(name for sample in spans for name in sample))
        member = torch.zeros(len(spans), length, len(names), dtype=torch.bool)
        for b, sample in enumerate(spans):
            for name, pieces in sample.items():
                for start, stop in pieces:
                    if not 0 <= start <= stop <= length:
                        raise UserError(f"region '{name}' spans {start}:{stop}, outside a canvas of {length} positions")
                    member[b, start:stop, names.index(name)] = True
        return Regions(names, member)


def crop_regions(regions: Regions, length: int) -> Regions:
    """The regions of the first `length` positions, for a canvas that has not yet grown to its full length."""
    if regions.member is None or regions.member.shape[1] <= length:
        return regions
    return replace(regions, member=regions.member[:, :length])


def fit_regions(regions: Regions, length: int) -> Regions:
    """The regions on a canvas of `length` positions; those after the last one that they count are in none."""
    cropped = crop_regions(regions, length)
    if cropped.member is None:
        return cropped
    missing = length - cropped.member.shape[1]
    return replace(cropped, member=torch.nn.functional.pad(cropped.member, (0, 0, 0, missing)))


@dataclass(frozen=True, repr=False)
class CanvasState:
    """A batch of canvases as the forward of `step` sees them, before that step's commits.

    states  values of `State`
    block   [start, stop) of the block each sample is filling; None: no blocks
    active  the samples that are still being decoded; None: all of them. The others do not change

    Example:
        out = fs.decode(fs.load("twin:mdm"), "What floats?", new_tokens=4, steps=2)
        out.steps[0].before  # CanvasState(1 × 8 positions, step 0, 4 masked)
        out.steps[0].before.masked  # [batch, position]
    """

    tokens: Int[Tensor, "batch position"]
    states: Int[Tensor, "batch position"]
    step: int = 0
    regions: Regions = field(default_factory=Regions)
    block: Int[Tensor, "batch 2"] | None = None
    active: Bool[Tensor, " batch"] | None = None

    def __repr__(self) -> str:
        batch, positions = self.tokens.shape
        masked, noise = int(self.masked.sum()), int(self.noise.sum())
        left = f"{noise} noise" if noise else f"{masked} masked"
        return f"CanvasState({batch} × {positions} positions, step {self.step}, {left})"

    @property
    def valid(self) -> Bool[Tensor, "batch position"]:
        """True where a position is not padding."""
        return self.states != State.PAD

    @property
    def masked(self) -> Bool[Tensor, "batch position"]:
        """True where a position is masked."""
        return self.states == State.MASKED

    @property
    def noise(self) -> Bool[Tensor, "batch position"]:
        """True where a position holds a random token, in a model without a mask token."""
        return self.states == State.NOISE

    def to(self, device: torch.device) -> CanvasState:
        """This canvas on another device."""
        if self.tokens.device == device:
            return self
        member, block, active = (
            None if t is None else t.to(device) for t in (self.regions.member, self.block, self.active)
        )
        regions = replace(self.regions, member=member)
        tokens, states = self.tokens.to(device), self.states.to(device)
        return replace(self, tokens=tokens, states=states, regions=regions, block=block, active=active)


def build_canvas(
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    mask_id: int | None,
    *,
    suffix: Sequence[int] = (),
    regions: Regions | None = None,
    pad_id: int = 0,
    block_size: int | None = None,
) -> CanvasState:
    """Build the first canvas: each prompt, `new_tokens` masks and the suffix, padded on the left.

    Without a mask id (an ARM) the canvas is the prompts only and grows later. A mask inside a prompt is infilling: it
    is filled like the others. Regions count positions over the prompt, the new tokens and the suffix. With a block size
    (a block-causal model) masks fill up the last block of each sample, and padding on the right the shorter ones.

    >>> build_canvas([[5, 6, 7], [8]], new_tokens=2, mask_id=0)
    CanvasState(2 × 5 positions, step 0, 4 masked)
    """
    if not prompts or min(map(len, prompts)) + new_tokens < 1:
        raise UserError(f"a canvas needs at least one prompt and one token, got {len(prompts)} prompts")
    tail = [] if mask_id is None else [mask_id] * new_tokens + list(suffix)
    length = max(len(p) for p in prompts) + len(tail)
    tokens = torch.full((len(prompts), length), pad_id)
    states = torch.full((len(prompts), length), int(State.PAD))
    for b, prompt in enumerate(prompts):
        start = length - len(prompt) - len(tail)
        tokens[b, start:] = torch.tensor([*prompt, *tail], dtype=torch.long)
        states[b, start:] = State.PROMPT
        if mask_id is not None:
            states[b, start:][tokens[b, start:] == mask_id] = State.MASKED
    regions = Regions() if regions is None else regions
    full_length = length + (new_tokens if mask_id is None else 0)
    if regions.member is not None and regions.member.shape[:2] != (len(prompts), full_length):
        batch, positions, _ = regions.member.shape
        raise UserError(
            f"the regions are for {batch} canvases of {positions} positions, but there are {len(prompts)} canvases of"
            f" {full_length}; count positions over prompt and new tokens, from the start of the left-padded batch"
        )
    canvas = CanvasState(tokens, states, regions=regions)
    return canvas if block_size is None or mask_id is None else _fill_up_blocks(canvas, block_size, mask_id, pad_id)


def _fill_up_blocks(canvas: CanvasState, block_size: int, mask_id: int, pad_id: int) -> CanvasState:
    """The canvas with masks up to the end of the last block of each sample."""
    missing = -canvas.valid.sum(-1) % block_size
    width = int(missing.max())
    is_mask = torch.arange(width) < missing[:, None]
    member = canvas.regions.member
    if member is not None:
        member = torch.nn.functional.pad(member, (0, 0, 0, width))
    return replace(
        canvas,
        tokens=torch.cat([canvas.tokens, torch.where(is_mask, mask_id, pad_id)], 1),
        states=torch.cat([canvas.states, torch.where(is_mask, int(State.MASKED), int(State.PAD))], 1),
        regions=replace(canvas.regions, member=member),
    )


@dataclass(frozen=True, repr=False)
class Commits:
    """The tokens a step writes, over the whole batch.

    sample  index into the batch
    row     the predicting row: the query whose logits decide the token

    Example:
        out = fs.decode(fs.load("twin:mdm"), "What floats?", new_tokens=4, steps=2)
        commits = out.steps[0].commits  # Commits(2 commits)
        commits.position.tolist(), commits.token.tolist()
    """

    sample: Int[Tensor, " commit"]
    position: Int[Tensor, " commit"]
    row: Int[Tensor, " commit"]
    token: Int[Tensor, " commit"]
    confidence: Float[Tensor, " commit"]

    def __len__(self) -> int:
        return len(self.sample)

    def __repr__(self) -> str:
        return f"Commits({_count(len(self), 'commit')})"

    def to(self, device: torch.device) -> Commits:
        """These commits on another device."""
        return Commits(*(getattr(self, f.name).to(device) for f in fields(self)))

    @staticmethod
    def empty() -> Commits:
        """No commits."""
        none = torch.zeros(0, dtype=torch.long)
        return Commits(none, none, none, none, torch.zeros(0))


@dataclass(frozen=True, repr=False)
class Step:
    """One step. Its attention belongs to `before`; the commits, decided by that forward, are written in `after`.

    Example:
        out = fs.decode(fs.load("twin:mdm"), "What floats?", new_tokens=4, steps=2)
        out.steps  # [Step(0: 2 commits), Step(1: 2 commits)]
    """

    before: CanvasState
    after: CanvasState
    commits: Commits

    def __repr__(self) -> str:
        renoised = int(self.is_renoised.sum())
        undone = f", {renoised} renoised" if renoised else ""
        return f"Step({self.before.step}: {_count(len(self.commits), 'commit')}{undone})"

    @property
    def is_edit(self) -> Bool[Tensor, " commit"]:
        """Which commits overwrite a committed token (token editing): their position was committed before the step."""
        is_committed = self.before.states == State.COMMITTED
        sample, position = self.commits.sample, self.commits.position
        width = is_committed.shape[1]  # an ARM commits after its canvas
        return (position < width) & is_committed[sample, position.clamp_max(width - 1)]

    @property
    def is_renoised(self) -> Bool[Tensor, "batch position"]:
        """Which positions lose their committed token to noise again (renoising)."""
        before, after = self.before.states, self.after.states[:, : self.before.states.shape[1]]
        return (before == State.COMMITTED) & (after == State.NOISE)


def move_columns(
    x: Shaped[Tensor, "batch column *rest"], offset: Int[Tensor, " batch"], width: int, fill: float | int = 0
) -> Shaped[Tensor, "batch width *rest"]:
    """The columns of each sample moved right by its offset, `width` columns in all; `fill` where none moves in."""
    source = torch.arange(width, device=x.device) - offset.to(x.device)[:, None]  # [batch, width]
    is_inside = (source >= 0) & (source < x.shape[1])
    if not x.shape[1]:
        return x.new_full((len(x), width, *x.shape[2:]), fill)
    moved = x[torch.arange(len(x), device=x.device)[:, None], source.clamp(0, x.shape[1] - 1)]
    return moved.masked_fill(~is_inside.view(*source.shape, *(1,) * (x.ndim - 2)), fill)


@dataclass(frozen=True)
class EndAlignment:
    """Moves the canvases of a batch so that each of them ends at the last column.

    A forward over a cache of finished blocks sees them so: its rows are the last columns, whatever block a sample is
    in.

    offset  how far each canvas moves to the right
    width   the number of columns: the length of the longest canvas
    """

    offset: Int[Tensor, " batch"]
    width: int

    @staticmethod
    def from_canvas(canvas: CanvasState) -> EndAlignment:
        """The alignment of these canvases."""
        valid = canvas.valid.long()
        stop = (valid * torch.arange(1, valid.shape[1] + 1, device=valid.device)).amax(-1)
        width = int(valid.sum(-1).max())
        return EndAlignment(width - stop, width)

    def move_canvas(self, canvas: CanvasState) -> CanvasState:
        """The aligned canvases."""
        member = canvas.regions.member
        return replace(
            canvas,
            tokens=move_columns(canvas.tokens, self.offset, self.width),
            states=move_columns(canvas.states, self.offset, self.width, int(State.PAD)),
            regions=replace(
                canvas.regions, member=None if member is None else move_columns(member, self.offset, self.width)
            ),
            block=None if canvas.block is None else (canvas.block + self.offset[:, None]).where(canvas.block >= 0, -1),
        )

    def move_step(self, step: Step) -> Step:
        """The step with its canvases aligned, and its commits at their columns."""
        commits, offset = step.commits, self.offset[step.commits.sample]
        commits = replace(commits, position=commits.position + offset, row=commits.row + offset)
        return Step(self.move_canvas(step.before), self.move_canvas(step.after), commits)

    def move_back(
        self, x: Shaped[Tensor, "batch column"], width: int, fill: float | int
    ) -> Shaped[Tensor, "batch width"]:
        """Values of aligned columns at the columns where the canvases came from."""
        return move_columns(x, -self.offset, width, fill)


Forward = Callable[[CanvasState, slice], Float[Tensor, "batch row vocabulary"]]
"""The model as decoding uses it: (canvas, rows) → the logits of those rows."""
ConditionedForward = Callable[[CanvasState, Tensor | None], Float[Tensor, "batch row vocabulary"]]
"""A model that denoises canvases: (canvas, scaled logits of the step before) → the logits of the rows of the canvas."""


@dataclass(frozen=True, repr=False)
class Groups:
    """Query groups: R[g, j] = Σ_i weights[i, g] · A[i, j]. A query may be in several groups, with any weight.

    Example:
        out = fs.decode(fs.load("twin:mdm"), "What floats?", new_tokens=4, steps=2)
        fs.Groups.from_canvas(out.steps[1].before).count  # rows in `all`, `masked` and `committed`
    """

    names: tuple[str, ...]
    weights: Float[Tensor, "batch query group"]

    def __repr__(self) -> str:
        batch, queries, _ = self.weights.shape
        return f"Groups({', '.join(self.names)}; {batch} × {queries} queries)"

    @property
    def count(self) -> Float[Tensor, "batch group"]:
        """The total weight of each group: the number of its rows, if the weights are 0 or 1."""
        return self.weights.sum(1)

    @staticmethod
    def from_canvas(canvas: CanvasState) -> Groups:
        """The groups `all`, `masked` and `committed`; `predicting` rows are known only after the commits.

        Rows of noise are in `masked`: it holds the positions that have no committed token.
        """
        columns = [canvas.valid, canvas.masked | canvas.noise, canvas.states == State.COMMITTED]
        return Groups(("all", "masked", "committed"), torch.stack(columns, -1).float())


@dataclass(frozen=True, repr=False)
class Reductions:
    """One layer of one step; `fields[name]` is batch first, then the axes that `schema.FIELDS[name]` lists.

    Example:
        import torch

        fs.Reductions(layer=3, fields={"residual": torch.ones(1, 12)})  # Reductions(layer 3: residual)
    """

    layer: int
    fields: Mapping[str, Tensor]

    def __repr__(self) -> str:
        return f"Reductions(layer {self.layer}: {', '.join(self.fields)})"


@dataclass(frozen=True, repr=False)
class StepCapture:
    """What was captured in one step. Layers with the same mask share a visibility.

    layers            one entry per layer; fields that depend on the mask alone are with the first layer that has it
    layer_visibility  for each layer, the index of its visibility
    masks             the mask of each visibility
    queries           the last rows of the canvas, which the forward computed; None: all, or with a cache the new ones
    influence         of each key on each commit; None if it was not requested
    """

    layers: tuple[Reductions, ...]
    layer_visibility: tuple[int, ...]
    masks: tuple[MaskStructure, ...]
    queries: int | None = None
    influence: Float[Tensor, "commit key"] | None = None

    def __repr__(self) -> str:
        return f"StepCapture({_count(len(self.layers), 'layer')}, {_count(len(self.masks), 'mask')})"

    def first_layer(self, layer: int) -> Reductions:
        """The first layer with the mask of `layer`, which holds the fields that depend on the mask alone."""
        return self.layers[self.layer_visibility.index(self.layer_visibility[layer])]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
