"""The canvas as a person sees it: masks, fresh commits coloured by confidence, anchors underlined.

with Live(…) as live:
    for step in out: live.update(view.after(step, height=20))
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from floatscope.schema import State

if TYPE_CHECKING:
    from floatscope.canvas import Step
    from floatscope.pipelines.decode import Decoding

MASK, PART = "░░", "·"  # a masked position; a token that ends inside a character
PROMPT_SHOWN = 48  # tokens of the prompt before the first mask; anchors further back are named below the canvas
ANCHORS = 3
FRAME = 6  # lines around the canvas: the panel, the counters, the anchors
UNSURE, SURE = (214, 39, 40), (44, 160, 44)


class View:
    """Draws the first sample of a decoding after each of its steps."""

    def __init__(self, out: Decoding, layer: int | None, console: Console | None = None) -> None:
        self.out, self.layer, self.console = out, layer, console
        self.began, self.committed, self.forwards = time.monotonic(), 0, 0

    def after(self, step: Step, height: int | None = None) -> Panel:
        """The canvas with what the step wrote; of a canvas higher than `height` lines, those around the newest."""
        anchors = self._anchors()
        canvas = self._canvas(step, {position for position, _ in anchors})
        parts = [canvas if height is None else self._cropped(canvas, height), self._counters(step)]
        if self.layer is not None:
            parts.append(self._named(step, anchors))
        spec, how = self.out.model.spec, self.out.how
        kind = "masked diffusion" if spec.paradigm == "mdm" else "autoregressive"
        return Panel(Group(*parts), title=f"[bold]{escape(spec.name)}[/] · {kind} · {how.sampler}", title_align="left")

    def told(self, step: Step) -> dict[str, Any]:
        """The same for machines; positions count from the sample's own start."""
        first, commits = _first(step), step.commits
        pieces = self._pieces(step.after.tokens[0, first:].tolist())
        columns = (commits.position - first).tolist(), commits.token.tolist(), commits.confidence.tolist()
        written = [
            {"position": position, "token": token, "text": pieces[position], "confidence": confidence}
            for position, token, confidence in zip(*columns, strict=True)
        ]
        told: dict[str, Any] = {"step": step.before.step, "commits": written}
        if step.before.block is not None:
            told["block"] = (step.before.block[0] - first).clamp_min(0).tolist()
        if self.layer is not None:
            tokens = step.before.tokens[0].tolist()
            told["anchors"] = [
                {"position": p - first, "token": tokens[p], "text": self._name(step, p), "lift": lift}
                for p, lift in self._anchors()
            ]
        return told

    def count(self, step: Step) -> None:
        self.committed += len(step.commits)
        self.forwards += 1

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def speed(self) -> float:
        return self.committed / max(1e-9, self.seconds)

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
            text.append(_printable(piece) or PART, f"{style} underline" if i in anchors else style)
        return text

    def _cropped(self, canvas: Text, height: int) -> Text:
        """So many lines, the last fresh commit among them: a terminal cannot redraw what has scrolled away."""
        assert self.console is not None
        lines = canvas.wrap(self.console, max(1, self.console.width - 4), overflow="fold")
        room = max(1, height - FRAME)
        fresh = (i for i, line in enumerate(lines) if any("on rgb" in str(span.style) for span in line.spans))
        newest = max(fresh, default=0)
        first = max(0, min(newest - room // 2, len(lines) - room))
        return Text("\n").join(lines[first : first + room])

    def _counters(self, step: Step) -> Text:
        how, arm = self.out.how, self.out.model.spec.paradigm == "arm"
        total = how.new_tokens if arm else how.steps or (how.new_tokens if how.paced else None)
        parts = [f"step {self.forwards}" + (f"/{total}" if total else "")]
        if how.block and step.before.block is not None:
            begin = self.out.answer_start
            parts.append(f"block {(int(step.before.block[0, 0]) - begin) // how.block + 1}/{how.blocks}")
        parts += [f"{self.committed} committed", "" if arm else f"{int(step.after.masked[0].sum())} masked"]
        parts.append(f"{self.speed:.1f} tokens/s")
        return Text(" · ".join(part for part in parts if part), style="cyan")

    def _named(self, step: Step, anchors: Sequence[tuple[int, float]]) -> Text:
        first = _first(step)
        named = [f"{self._name(step, position)} at {position - first}, {lift:.1f}×" for position, lift in anchors]
        rows = "newest row, " if self.out.model.spec.paradigm == "arm" else ""
        return Text(f"anchors ({rows}layer {self.layer}): " + (" · ".join(named) or "none"), style="cyan")

    def _name(self, step: Step, position: int) -> str:
        if bool(step.before.masked[0, position]):
            return "mask"
        piece = self._pieces([int(step.before.tokens[0, position])])[0]
        return f"'{_printable(piece).strip(chr(10))}'"

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        text = self.out.model.tokenizer
        return [f" {token}" for token in tokens] if text is None else text.pieces(tokens)


def _first(step: Step) -> int:
    """The sample's own start in the canvas."""
    return int(step.before.valid[0].int().argmax())


def _between(confidence: float) -> tuple[int, ...]:
    """A colour from unsure (red) to sure (green)."""
    return tuple(round(a + (b - a) * min(1.0, max(0.0, confidence))) for a, b in zip(UNSURE, SURE, strict=True))


def _printable(piece: str) -> str:
    """Control characters shown as what they are: a terminal would act on them."""
    shown = piece.replace("\n", "⏎\n")
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in shown)
