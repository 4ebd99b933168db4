"""Renoising: denoise canvases of random tokens, one after another, for models without a mask token (DiffusionGemma).

    sampling = resolve_sampling(Paradigm.MDM, canvas_size=256)
    for step in renoise(model.canvas_forward(), prompts, sampling, canvas_size=256, vocab_size=model.vocab_size):
        step.commits, step.is_renoised

A canvas begins as uniform noise. At each step every position gets a token drawn at the step's temperature. The step
accepts the tokens of lowest entropy as long as their entropies without the largest sum to at most `entropy_bound`, and
replaces all other positions by new noise: acceptance starts anew at each step. The scaled logits condition the next
step. A canvas ends when the most likely tokens stay the same and their mean entropy is small, or after
`sampling.steps`; then every position gets its most likely token.

A commit is a token that a step writes into noise, or in place of another committed token. A position that is accepted
again with the same token keeps its commit; one that is not accepted again is undone, and becomes noise.

Samples start each canvas together, and wait for each other at its end. Randomness counts the steps of each sample, so
what a sample commits does not depend on the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from floatscope.canvas import CanvasState, Commits, ConditionedForward, Step, fit_regions
from floatscope.sampling.denoising import MAX_LOGITS_PER_CHUNK
from floatscope.sampling.proposal import propose_tokens
from floatscope.sampling.randomness import step_keys, uniform
from floatscope.sampling.settings import Sampling
from floatscope.schema import State


def renoise(
    forward: ConditionedForward,
    canvas: CanvasState,
    sampling: Sampling,
    *,
    canvas_size: int,
    vocab_size: int,
    end_ids: Sequence[int] = (),
    samples: Sequence[str] | None = None,
    pad_id: int = 0,
) -> Iterator[Step]:
    """Yield one `Step` per forward until every sample has ended or has all its canvases.

    Args:
        forward: returns the logits of the last `canvas_size` positions, given the scaled logits of the step before.
        canvas: the prompts; its regions may already be those of the full length.
        sampling: the settings, from `resolve_sampling`; `steps` are those of each canvas.
        canvas_size: the positions of a canvas. The last one is filled to its end.
        vocab_size: noise is uniform over these token ids.
        end_ids: tokens that end a text: a sample whose finished canvas has one gets no further canvas.
        samples: names of the rows; they key the randomness. The default is "0", "1", …
        pad_id: the token after the end of a sample that has ended before others.
    """
    names = [str(b) for b in range(len(canvas.tokens))] if samples is None else samples
    loop = _Renoiser(forward, sampling, canvas_size, vocab_size, names, canvas.valid.int().argmax(-1))
    ends = torch.tensor(end_ids if sampling.stop else (), dtype=torch.long, device=canvas.tokens.device)
    has_ended = torch.zeros(len(names), dtype=torch.bool, device=canvas.tokens.device)
    steps_taken, regions, step = [0] * len(names), canvas.regions, 0
    assert sampling.steps is not None
    for _ in range(math.ceil(sampling.new_tokens / canvas_size)):
        # 1. Append a canvas of noise to the samples that go on.
        canvas = loop.append_noise(canvas, has_ended, steps_taken, pad_id)
        canvas = replace(canvas, regions=fit_regions(regions, canvas.tokens.shape[1]))
        active, conditioning = ~has_ended, None
        history = ArgmaxHistory(int(sampling.arguments["stability_threshold"]))
        for steps_left in range(sampling.steps, 0, -1):
            with torch.no_grad():
                # 2. Run the decoder, and draw a token for each position.
                before = replace(canvas, step=step, active=active, block=loop.bounds(canvas, active))
                predictions = loop.predict(before, conditioning, steps_left, steps_taken)
                # 3. A canvas that ends gets its most likely tokens; another accepts some, and renoises the rest.
                is_last = history.add(predictions.argmax) & predictions.are_confident(sampling)
                is_last |= steps_left == 1
                canvas, commits = loop.write(before, predictions, is_last, steps_taken)
                # 4. Move on to the next step.
                conditioning = predictions.scaled_logits
                steps_taken = [n + is_active for n, is_active in zip(steps_taken, active.tolist(), strict=True)]
                active, step = active & ~is_last, step + 1
                is_done = not bool(active.any())
            yield Step(before, canvas, commits)
            if is_done:
                break
        # 5. End the samples whose canvas has an end token.
        has_ended = has_ended | torch.isin(canvas.tokens[:, -canvas_size:], ends).any(-1)
        if bool(has_ended.all()):
            return


def select_lowest_entropies(entropy: Float[Tensor, "batch row"], entropy_bound: float) -> Bool[Tensor, "batch row"]:
    """Select the positions of lowest entropy while their entropies without the largest sum to at most the bound."""
    ordered, order = entropy.sort(dim=-1, stable=True)
    return torch.zeros_like(entropy, dtype=torch.bool).scatter_(
        -1, order, ordered.cumsum(-1) - ordered <= entropy_bound
    )


class ArgmaxHistory:
    """The most likely tokens of a canvas at its last steps; it tells whether they have stopped changing."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._canvases: list[Tensor] = []

    def add(self, argmax: Int[Tensor, "batch row"]) -> Bool[Tensor, " batch"]:
        """Add a step, and return which samples have the same tokens as at each of the last `length` steps."""
        is_stable = torch.full_like(argmax[:, 0], len(self._canvases) == self._length, dtype=torch.bool)
        for earlier in self._canvases:
            is_stable &= (earlier == argmax).all(-1)
        self._canvases = [*self._canvases, argmax][-self._length :] if self._length else []
        return is_stable


@dataclass(frozen=True)
class _Predictions:
    """What a step reads from its logits: a drawn token and the most likely one for each row of the canvas."""

    token: Int[Tensor, "batch row"]
    probability: Float[Tensor, "batch row"]  # of `token`
    argmax: Int[Tensor, "batch row"]
    argmax_probability: Float[Tensor, "batch row"]
    entropy: Float[Tensor, "batch row"]  # at the step's temperature
    scaled_logits: Float[Tensor, "batch row vocabulary"]

    def are_confident(self, sampling: Sampling) -> Bool[Tensor, " batch"]:
        """Whether the mean entropy of each canvas is below the threshold."""
        is_below: Tensor = self.entropy.mean(-1) < sampling.arguments["confidence_threshold"]
        return is_below


@dataclass(frozen=True)
class _Renoiser:
    """What stays the same from step to step."""

    forward: ConditionedForward
    sampling: Sampling
    canvas_size: int
    vocab_size: int
    samples: Sequence[str]
    first: Int[Tensor, " batch"]  # of each sample, its first valid position

    def bounds(self, canvas: CanvasState, active: Tensor) -> Int[Tensor, "batch 2"]:
        """[start, stop) of the canvas that each sample fills; (−1, −1) where it is done."""
        stop = canvas.tokens.shape[1]
        bounds = torch.tensor([stop - self.canvas_size, stop], device=active.device)
        return torch.where(active[:, None], bounds, -1)

    def append_noise(
        self, canvas: CanvasState, has_ended: Tensor, steps_taken: Sequence[int], pad_id: int
    ) -> CanvasState:
        """Append a canvas of noise; of padding, where a sample has ended."""
        start = canvas.tokens.shape[1]
        noise = self._draw_noise(start, steps_taken, "first noise")
        tokens = torch.where(has_ended[:, None], pad_id, noise)
        states = torch.where(has_ended[:, None], int(State.PAD), int(State.NOISE)).expand_as(tokens)
        return replace(
            canvas, tokens=torch.cat([canvas.tokens, tokens], 1), states=torch.cat([canvas.states, states], 1)
        )

    def predict(
        self, canvas: CanvasState, conditioning: Tensor | None, steps_left: int, steps_taken: Sequence[int]
    ) -> _Predictions:
        """Run one forward, scale its logits by the temperature of the step, and draw the tokens."""
        logits = self.forward(canvas, conditioning)
        batch, rows, vocabulary = logits.shape
        t_min, t_max, steps = self.sampling.arguments["t_min"], self.sampling.arguments["t_max"], self.sampling.steps
        assert steps is not None
        temperature = float(t_min + (t_max - t_min) * (torch.tensor(steps_left) / steps))  # in fp32, as the authors'
        keys = self._keys(steps_taken, "token")[:, None].expand(-1, rows).flatten()
        positions = self._positions(canvas.tokens.shape[1] - rows).flatten()
        settings, parts = replace(self.sampling, temperature=temperature), []
        flat = logits.float().reshape(-1, vocabulary)
        scaled = flat / temperature
        for chunk in torch.arange(len(flat), device=flat.device).split(max(1, MAX_LOGITS_PER_CHUNK // vocabulary)):
            token, log_p = propose_tokens(flat[chunk], settings, (), keys[chunk], positions[chunk])
            best = scaled[chunk].argmax(-1)
            both = log_p.gather(-1, torch.stack([token, best], -1)).exp()
            entropy = torch.special.entr(scaled[chunk].softmax(-1)).sum(-1)
            parts.append((token, both[:, 0], best, both[:, 1], entropy))
        token, probability, best, best_probability, entropy = (
            torch.cat(part).view(batch, rows) for part in zip(*parts, strict=True)
        )
        return _Predictions(token, probability, best, best_probability, entropy, scaled.view_as(logits))

    def write(
        self, before: CanvasState, predictions: _Predictions, is_last: Tensor, steps_taken: Sequence[int]
    ) -> tuple[CanvasState, Commits]:
        """Write the tokens of a step into a copy of the canvas, and return it with the commits."""
        assert before.active is not None
        start = before.tokens.shape[1] - self.canvas_size
        old_tokens, old_states = before.tokens[:, start:], before.states[:, start:]
        accepted = select_lowest_entropies(predictions.entropy, self.sampling.arguments["entropy_bound"])
        is_last, active = is_last[:, None], before.active[:, None]
        is_kept = (accepted | is_last) & active
        token = torch.where(is_last, predictions.argmax, predictions.token)
        probability = torch.where(is_last, predictions.argmax_probability, predictions.probability)
        noise = self._draw_noise(start, steps_taken, "noise")
        tokens, states = before.tokens.clone(), before.states.clone()
        tokens[:, start:] = torch.where(active, torch.where(is_kept, token, noise), old_tokens)
        new_states = torch.where(is_kept, int(State.COMMITTED), int(State.NOISE))
        states[:, start:] = torch.where(active, new_states, old_states)
        sample, row = (is_kept & ((old_states == State.NOISE) | (token != old_tokens))).nonzero(as_tuple=True)
        position = start + row
        commits = Commits(sample, position, position, token[sample, row], probability[sample, row])
        return replace(before, tokens=tokens, states=states), commits

    def _draw_noise(self, start: int, steps_taken: Sequence[int], purpose: str) -> Int[Tensor, "batch row"]:
        """Uniform tokens for the canvas that begins at `start`."""
        numbers = uniform(self._keys(steps_taken, purpose)[:, None], self._positions(start))
        return (numbers * self.vocab_size).long()

    def _positions(self, start: int) -> Int[Tensor, "batch row"]:
        """The positions of a canvas, counted from each sample's first token: padding changes nothing."""
        position = torch.arange(start, start + self.canvas_size, device=self.first.device)
        return position - self.first[:, None]

    def _keys(self, steps_taken: Sequence[int], purpose: str) -> Int[Tensor, " batch"]:
        """The keys of the random numbers; each sample counts its own steps, as it would alone."""
        keys = [
            step_keys(self.sampling.seed, [sample], step, purpose)
            for sample, step in zip(self.samples, steps_taken, strict=True)
        ]
        return torch.cat(keys).to(self.first.device)
