"""`CanvasLayout`: what stands where on a canvas.

    layout = plan_layout(model, new_tokens=32)
    layout.length(prompt=12)             # 44: the positions of the finished canvas
    layout.suffix                        # token ids after the new tokens

The canvas of an MDM is the prompt, the new tokens and the suffix: what the caller puts after the answer (extra masks, a
text) and what the tokenizer does (the separator of an encoder). That of an ARM is the prompt, and grows by the new
tokens.
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

    def length(self, prompt: int) -> int:
        """The positions of the finished canvas, for a prompt of this length."""
        return prompt + self.new_tokens + len(self.suffix)

    def longest_forward(self, prompt: int) -> int:
        """The positions of the longest forward: a growing canvas ends with a token that no forward sees."""
        return self.length(prompt) - int(self.grows)

    @property
    def after_prompt(self) -> int:
        """The positions after the prompt on the first canvas."""
        return 0 if self.grows else self.length(0)

    def answer_span(self, prompt: int) -> tuple[int, int]:
        """[start, stop) of the new tokens."""
        return prompt, prompt + self.new_tokens

    def suffix_span(self, prompt: int) -> tuple[int, int]:
        """[start, stop) of the suffix."""
        return prompt + self.new_tokens, self.length(prompt)


def plan_layout(model: Model, new_tokens: int, suffix: Sequence[int] = ()) -> CanvasLayout:
    """Return the layout of a model's canvases; `suffix` is for an MDM only."""
    spec = model.spec
    if spec.block_size is not None:
        raise UserError(
            f"{spec.name} attends in blocks of {spec.block_size} that count from position 0, and decoding in such"
            " blocks is not supported yet; run model.forward, or watch code that runs model.module with fs.watch"
        )
    if spec.paradigm is Paradigm.ARM:
        return CanvasLayout(new_tokens, grows=True)
    own = model.tokenizer.suffix if model.tokenizer is not None else ()
    return CanvasLayout(new_tokens, (*suffix, *own))
