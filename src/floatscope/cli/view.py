"""The canvas as a person sees it: masks, fresh commits coloured by confidence, anchors underlined.

with Live(…) as live:
    for step in out: live.update(view.after(step))
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from floatscope.values import State

if TYPE_CHECKING:
    from floatscope.decode import Step
    from floatscope.decoding import Decoding

MASK = "░░"
PROMPT_SHOWN = 48  # tokens of the prompt before the first mask; anchors further back are named below the canvas
ANCHORS = 3
UNSURE, SURE = (214, 39, 40), (44, 160, 44)


class View:
    """Draws one sample of a decoding after each of its steps."""

    def __init__(self, out: Decoding, layer: int | None) -> None:
        self.out, self.layer = out, layer
        self.began, self.committed, self.forwards = time.monotonic(), 0, 0

    def after(self, step: Step) -> Panel:
        """The canvas with what the step wrote."""
        self._count(step)
        anchors = self._anchors()
        parts = [self._canvas(step, {position for position, _ in anchors}), self._counters(step)]
        if self.layer is not None:
            parts.append(self._named(step, anchors))
        spec, how = self.out.model.spec, self.out.how
        kind = "masked diffusion" if spec.family == "mdm" else "autoregressive"
        return Panel(Group(*parts), title=f"[bold]{spec.name}[/] · {kind} · {how.sampler}", title_align="left")

    def told(self, step: Step) -> dict[str, Any]:
        """The same for machines; positions count from the sample's own start."""
        self._count(step)
        first, commits = _first(step), step.commits
        names = self._pieces(commits.token.tolist())
        columns = (commits.position - first).tolist(), commits.token.tolist(), names, commits.confidence.tolist()
        words = ("position", "token", "text", "confidence")
        written = [dict(zip(words, commit, strict=True)) for commit in zip(*columns, strict=True)]
        told: dict[str, Any] = {"step": step.before.step, "commits": written}
        if step.before.block is not None:
            told["block"] = (step.before.block[0] - first).tolist()
        if self.layer is not None:
            told["anchors"] = [{"position": p - first, "lift": lift} for p, lift in self._anchors()]
        return told

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def speed(self) -> float:
        return self.committed / max(1e-9, self.seconds)

    def _count(self, step: Step) -> None:
        self.committed += len(step.commits)
        self.forwards += 1

    def _anchors(self) -> list[tuple[int, float]]:
        """The keys of largest lift at this step, the largest first."""
        if self.layer is None:
            return []
        lift = self.out.lift(self.layer)[0].nan_to_num(-1)
        best = lift.topk(min(ANCHORS, len(lift)))
        return [(int(i), float(x)) for x, i in zip(best.values, best.indices, strict=True) if x >= 0]

    def _canvas(self, step: Step, anchors: set[int]) -> Text:
        after = step.after
        tokens, valid, masked = after.tokens[0].tolist(), after.valid[0].tolist(), after.masked[0].tolist()
        fresh = dict(zip(step.commits.position.tolist(), step.commits.confidence.tolist(), strict=True))
        written = (after.states[0] == State.COMMITTED).tolist()
        first = next((i for i in range(len(tokens)) if masked[i] or written[i]), len(tokens))
        start = max(valid.index(True), first - PROMPT_SHOWN)
        pieces = self._pieces(tokens[start:])
        text = Text(overflow="fold")
        text.append("… " if start > valid.index(True) else "", "dim")
        for i, piece in zip(range(start, len(tokens)), pieces, strict=True):
            style = "bold" if written[i] else "dim"
            if masked[i]:
                piece, style = MASK, "bright_black"
            elif i in fresh:
                style = f"bold white on rgb({','.join(str(c) for c in _between(fresh[i]))})"
            text.append(_printable(piece), f"{style} underline" if i in anchors else style)
        return text

    def _counters(self, step: Step) -> Text:
        how, parts = self.out.how, [f"step {self.forwards}" + (f"/{self.out.how.steps}" if self.out.how.steps else "")]
        if how.block and step.before.block is not None:
            begin = self.out.answer_start
            parts.append(f"block {(int(step.before.block[0, 0]) - begin) // how.block + 1}/{how.blocks}")
        left = int(step.after.masked[0].sum())
        parts += [f"{self.committed} committed", f"{left} masked" if self.out.model.spec.family == "mdm" else ""]
        parts.append(f"{self.speed:.1f} tokens/s")
        return Text(" · ".join(part for part in parts if part), style="cyan")

    def _named(self, step: Step, anchors: Sequence[tuple[int, float]]) -> Text:
        first = _first(step)
        tokens = step.before.tokens[0].tolist()
        masked = step.before.masked[0].tolist()
        named = []
        for position, lift in anchors:
            piece = "mask" if masked[position] else repr(_printable(self._pieces([tokens[position]])[0]))
            named.append(f"{piece} at {position - first}, {lift:.1f}×")
        return Text(f"anchors of layer {self.layer}: " + (" · ".join(named) or "none"), style="cyan")

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        text = self.out.model.text
        return [f" {token}" for token in tokens] if text is None else text.pieces(tokens)


def _first(step: Step) -> int:
    """The sample's own start in the canvas."""
    return int(step.before.valid[0].int().argmax())


def _between(confidence: float) -> tuple[int, ...]:
    """A colour from unsure (red) to sure (green)."""
    return tuple(round(a + (b - a) * min(1.0, max(0.0, confidence))) for a, b in zip(UNSURE, SURE, strict=True))


def _printable(piece: str) -> str:
    """Control characters shown as what they are: a terminal would act on them."""
    shown = piece.replace("\n", "⏎\n") if piece != "\n" else "⏎\n"
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in shown)
