"""`CanvasLayout`: what stands where on a canvas.

    layout = plan_layout(model, new_tokens=32)
    layout.length(prompt=12)             # 44: the positions of the finished canvas
    layout.suffix                        # token ids after the new tokens

The canvas of an MDM is the prompt, the new tokens and the suffix: what the caller puts after the answer (extra masks, a
text) and what the tokenizer does (the separator of an encoder). A model that attends in blocks fills the last one to
its end, so positions may follow its new tokens; so may they after those of a model that denoises canvases of one size.
The canvas of an ARM is the prompt, and grows by the new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from floatscope.errors import UserError
from floatscope.models.model import Model
from floatscope.schema import Paradigm


@dataclass(frozen=True)
class CanvasLayout:
    """The parts of a canvas after its prompt."""

    new_tokens: int
    suffix: tuple[int, ...] = ()  # token ids after the new tokens
    grows: bool = False  # whether new tokens are appended step by step
    block_size: int = 1  # a canvas has whole blocks of this size
    canvas_size: int = 1  # the new tokens are in whole canvases of this size

    @property
    def filled_tokens(self) -> int:
        """The new tokens, up to the end of their last canvas."""
        return self.new_tokens + -self.new_tokens % self.canvas_size

    def length(self, prompt: int) -> int:
        """The positions of the finished canvas, for a prompt of this length."""
        length = prompt + self.filled_tokens + len(self.suffix)
        return length + -length % self.block_size

    def longest_prompt(self, context: int) -> int:
        """The longest prompt whose finished canvas has at most `context` positions."""
        return context // self.block_size * self.block_size - self.filled_tokens - len(self.suffix)

    def longest_forward(self, prompt: int) -> int:
        """The positions of the longest forward: a growing canvas ends with a token that no forward sees."""
        return self.length(prompt) - int(self.grows)

    def answer_span(self, prompt: int) -> tuple[int, int]:
        """[start, stop) of the new tokens."""
        return prompt, prompt + self.new_tokens

    def suffix_span(self, prompt: int) -> tuple[int, int]:
        """[start, stop) of the suffix."""
        return prompt + self.new_tokens, prompt + self.new_tokens + len(self.suffix)


def plan_layout(model: Model, new_tokens: int, suffix: Sequence[int] = ()) -> CanvasLayout:
    """Return the layout of a model's canvases; `suffix` is for an MDM only."""
    spec = model.spec
    if spec.paradigm is Paradigm.ARM:
        return CanvasLayout(new_tokens, grows=True)
    own = model.tokenizer.suffix if model.tokenizer is not None else ()
    if spec.block_size is None and spec.canvas_size is None:
        return CanvasLayout(new_tokens, (*suffix, *own))
    if (suffix or own) and spec.canvas_size is not None:
        raise UserError(
            f"{spec.name} denoises one canvas after another and sees nothing after the one it fills, so nothing can"
            " follow its answer; leave suffix, extra masks and filler out"
        )
    if spec.canvas_size is not None:
        return CanvasLayout(new_tokens, canvas_size=spec.canvas_size)
    if suffix or own:
        raise UserError(
            f"{spec.name} attends in blocks and sees nothing after the one it fills, so nothing can follow its answer;"
            " leave suffix, extra masks and filler out"
        )
    assert spec.block_size is not None
    return CanvasLayout(new_tokens, block_size=spec.block_size)
