"""The canvas in a terminal: masks, new commits coloured by confidence, edited tokens in italics, anchors underlined.

view = CanvasView(out, layer=3, console=console)
with Live(…) as live:
    for step in out: live.update(view.render(step, height=20))
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from floatscope.errors import escape_controls
from floatscope.schema import Paradigm, RowSource, State

if TYPE_CHECKING:
    from floatscope.canvas import Step
    from floatscope.pipelines.decoding import Decoding

MASK, NOISE, PARTIAL = "░░", "▒▒", "·"  # a masked position; a random token; a token that ends inside a character
PROMPT_TOKENS = 48  # of the prompt before the first mask; anchors further back are named below the canvas
ANCHORS = 3
FRAME_LINES = 6  # around the canvas: the panel, the counters, the anchors
LOW, HIGH = (214, 39, 40), (44, 160, 44)  # colours of confidence 0 and 1


class CanvasView:
    """Draws the first sample of a decoding after each step."""

    def __init__(self, out: Decoding, layer: int | None, console: Console | None = None) -> None:
        self.out, self.layer, self.console = out, layer, console
        self.start, self.committed, self.forwards = time.monotonic(), 0, 0
        self.renoised = 0
        self.edited: set[int] = set()  # positions whose token was overwritten, so far

    def render(self, step: Step, height: int | None = None) -> Panel:
        """The canvas after a step; if it is higher than `height` lines, the lines around the newest commit."""
        anchors = self._anchors()
        canvas = self._canvas(step, {position for position, _ in anchors})
        parts = [canvas if height is None else self._crop(canvas, height), self._counters(step)]
        if self.layer is not None:
            parts.append(self._anchor_line(step, anchors))
        spec, sampling = self.out.model.spec, self.out.sampling
        paradigm = spec.paradigm.label
        title = f"[bold]{escape(escape_controls(spec.name))}[/] · {paradigm} · {sampling.sampler}"
        return Panel(Group(*parts), title=title, title_align="left")

    def record(self, step: Step) -> dict[str, Any]:
        """The step as JSON values; positions count from the first token of the sample."""
        first, commits = _first_position(step), step.commits
        pieces = self._pieces(step.after.tokens[0, first:].tolist())
        columns = (commits.position - first).tolist(), commits.token.tolist(), commits.confidence.tolist()
        written = [
            {"position": position, "token": token, "text": pieces[position], "confidence": confidence}
            | ({"edit": True} if is_edit else {})
            for position, token, confidence, is_edit in zip(*columns, step.is_edit.tolist(), strict=True)
        ]
        record: dict[str, Any] = {"step": step.before.step, "commits": written}
        if bool(step.is_renoised[0].any()):
            record["renoised"] = (step.is_renoised[0].nonzero()[:, 0] - first).tolist()
        if step.before.block is not None:
            record["block"] = (step.before.block[0] - first).clamp_min(0).tolist()
        if self.layer is not None:
            tokens = step.before.tokens[0].tolist()
            record["anchors"] = [
                {"position": p - first, "token": tokens[p], "text": self._token_name(step, p), "lift": lift}
                for p, lift in self._anchors()
            ]
        return record

    def count(self, step: Step) -> None:
        """Add a step to the counters."""
        renoised = int(step.is_renoised.sum())
        self.committed += len(step.commits) - int(step.is_edit.sum()) - renoised
        self.renoised += renoised
        self.edited |= set(step.commits.position[step.is_edit].tolist())
        self.forwards += 1

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self.start

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens per second since the start."""
        return self.committed / max(1e-9, self.seconds)

    def _anchors(self) -> list[tuple[int, float]]:
        """The keys of largest lift at this step with their lift, the largest first."""
        if self.layer is None:
            return []
        lift = self.out.lift(self.layer)[0].nan_to_num(-1)
        best = lift.topk(min(ANCHORS, len(lift)))
        return [(int(i), float(x)) for x, i in zip(best.values, best.indices, strict=True) if x >= 0]

    def _canvas(self, step: Step, anchors: set[int]) -> Text:
        after = step.after
        tokens, valid, masked = after.tokens[0].tolist(), after.valid[0].tolist(), after.masked[0].tolist()
        new = dict(zip(step.commits.position.tolist(), step.commits.confidence.tolist(), strict=True))
        committed, noise = (after.states[0] == State.COMMITTED).tolist(), after.noise[0].tolist()
        first = next((i for i in range(len(tokens)) if masked[i] or committed[i] or noise[i]), len(tokens))
        start = max(valid.index(True), first - PROMPT_TOKENS)
        pieces = self._pieces(tokens[start:])
        text = Text(overflow="fold")
        text.append("… " if start > valid.index(True) else "", "dim")
        for i, piece in zip(range(start, len(tokens)), pieces, strict=True):
            style = "bold" if committed[i] else "dim"
            if masked[i] or noise[i]:
                piece, style = MASK if masked[i] else NOISE, "bright_black"
            elif i in new:
                style = f"bold white on rgb({','.join(str(c) for c in _confidence_colour(new[i]))})"
            style += " italic" if i in self.edited else ""
            text.append(_printable(piece) or PARTIAL, f"{style} underline" if i in anchors else style)
        return text

    def _crop(self, canvas: Text, height: int) -> Text:
        """As many lines as fit, with the last new commit: a terminal cannot redraw what has scrolled away."""
        assert self.console is not None
        lines = canvas.wrap(self.console, max(1, self.console.width - 4), overflow="fold")
        room = max(1, height - FRAME_LINES)
        with_commits = (i for i, line in enumerate(lines) if any("on rgb" in str(span.style) for span in line.spans))
        newest = max(with_commits, default=0)
        first = max(0, min(newest - room // 2, len(lines) - room))
        return Text("\n").join(lines[first : first + room])

    def _counters(self, step: Step) -> Text:
        sampling, is_arm = self.out.sampling, self.out.model.spec.paradigm is Paradigm.ARM
        scheduled = sampling.new_tokens if sampling.is_scheduled else None
        total = sampling.new_tokens if is_arm else sampling.steps or scheduled
        size = self.out.model.spec.block_size
        canvas_size = self.out.model.spec.canvas_size
        # The number of blocks depends on the prompt, and a canvas may take fewer steps.
        total = None if size is not None or canvas_size is not None else total
        parts = [f"step {self.forwards}" + (f"/{total}" if total else "")]
        if size is not None and step.before.block is not None:
            first, width = _first_position(step), self.out.initial_canvas.valid[0].sum()
            parts.append(f"block {(int(step.before.block[0, 0]) - first) // size + 1}/{int(width) // size}")
        elif canvas_size is not None:
            filled, start = self.out.layout.filled_tokens, step.before.tokens.shape[1] - self.out.answer_start
            parts.append(f"canvas {start // canvas_size}/{filled // canvas_size}")
        elif sampling.block and step.before.block is not None:
            start = self.out.answer_start
            parts.append(f"block {(int(step.before.block[0, 0]) - start) // sampling.block + 1}/{sampling.blocks}")
        parts.append(f"{self.committed} committed")
        parts += [
            f"{len(self.edited)} edited" if self.edited else "",
            f"{self.renoised} renoised" if self.renoised else "",
            f"{int(step.after.noise[0].sum())} noise" if canvas_size is not None else "",
            "" if is_arm or canvas_size is not None else f"{int(step.after.masked[0].sum())} masked",
        ]
        parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        return Text(" · ".join(part for part in parts if part), style="cyan")

    def _anchor_line(self, step: Step, anchors: Sequence[tuple[int, float]]) -> Text:
        first = _first_position(step)
        names = [f"{self._token_name(step, position)} at {position - first}, {lift:.1f}×" for position, lift in anchors]
        is_arm = self.out.model.spec.paradigm is Paradigm.ARM
        rows = "newest row, " if is_arm else "rows of the block, " if self.out.rows is RowSource.BLOCK else ""
        return Text(f"anchors ({rows}layer {self.layer}): " + (" · ".join(names) or "none"), style="cyan")

    def _token_name(self, step: Step, position: int) -> str:
        if bool(step.before.masked[0, position]):
            return "mask"
        piece = self._pieces([int(step.before.tokens[0, position])])[0]
        return f"'{_printable(piece).strip(chr(10))}'"

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        tokenizer = self.out.model.tokenizer
        return [f" {token}" for token in tokens] if tokenizer is None else tokenizer.pieces(tokens)


def _first_position(step: Step) -> int:
    """The position of the sample's first token in the padded canvas."""
    return int(step.before.valid[0].int().argmax())


def _confidence_colour(confidence: float) -> tuple[int, ...]:
    """A colour from red (0) to green (1)."""
    return tuple(round(a + (b - a) * min(1.0, max(0.0, confidence))) for a, b in zip(LOW, HIGH, strict=True))


def _printable(piece: str) -> str:
    """The text with control characters spelled out, which a terminal would obey."""
    return escape_controls(piece, keep="\n").replace("\n", "⏎\n")
