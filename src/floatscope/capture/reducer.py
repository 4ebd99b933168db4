"""Your own reduction of the attention, in about ten lines.

    class Local(fs.Reducer):
        name, axes = "local", ("head",)

        def start(self, call):
            return torch.zeros(2, *call.query.shape[:2])

        def block(self, total, at):
            rows, keys = torch.arange(at.rows.start, at.rows.stop), torch.arange(at.keys.start, at.keys.stop)
            near = (at.offset + rows[:, None] - keys).abs() <= 8
            total[0, at.batch, at.heads] += (at.p * near).sum((-1, -2))
            total[1, at.batch, at.heads] += len(rows)

        def finish(self, total, call):
            return total[0] / total[1]

`fs.Watch(reducers=(Local(),))` then stores `local` [step, layer, head] in the trace. Probabilities pass by in blocks
(`at.p` [batch, head, rows, keys], fp32, zero outside `at.keys`), on every mask and device; padding never appears.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from floatscope.capture.attention import Attention
from floatscope.capture.blocked import Block, blocks
from floatscope.errors import UserError


class Reducer:
    """Subclass it: a name, the axes of the result (without batch), and three methods."""

    name: str
    axes: tuple[str, ...]

    def start(self, call: Attention) -> Any:
        """The state to fold into; on `call.query.device`."""
        raise NotImplementedError

    def block(self, state: Any, at: Block) -> None:
        """Fold one block of probabilities into the state, in place."""
        raise NotImplementedError

    def finish(self, state: Any, call: Attention) -> Tensor:
        """The result, batch first, then `axes`."""
        raise NotImplementedError

    def run(self, call: Attention, lse: Tensor | None) -> Tensor:
        state = self.start(call)
        for at in blocks(call, lse):
            self.block(state, at)
        out = self.finish(state, call)
        if out.ndim != 1 + len(self.axes) or len(out) != len(call.query):
            raise UserError(
                f"reducer '{self.name}' returned shape {tuple(out.shape)}; expected [batch={len(call.query)},"
                f" {', '.join(self.axes)}]"
            )
        return out
