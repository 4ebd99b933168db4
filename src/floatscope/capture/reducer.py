"""Your own reduction of the attention, in about ten lines: subclass `Reducer`.

`fs.Watch(reducers=(Local(),))` stores the result in the trace, under the name of the reducer. `update` gets the
probabilities in blocks (`block.p` [batch, head, rows, keys], fp32, zero outside `block.keys`), for every mask and
device and without padding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from floatscope.capture.attention import AttentionCall
from floatscope.capture.blocked import Block, iter_blocks
from floatscope.errors import UserError


class Reducer:
    """A reduction of your own. Subclass it with `name`, the `axes` of the result (without batch) and three methods.

    Example:
        import torch

        class Local(fs.Reducer):
            # the share of attention within 8 positions

            name, axes = "local", ("head",)

            def start(self, call):
                return torch.zeros(2, *call.query.shape[:2])

            def update(self, total, block):
                rows = torch.arange(block.rows.start, block.rows.stop)
                keys = torch.arange(block.keys.start, block.keys.stop)
                is_near = (block.offset + rows[:, None] - keys).abs() <= 8
                total[0, block.batch, block.heads] += (block.p * is_near).sum((-1, -2))
                total[1, block.batch, block.heads] += len(rows)

            def finish(self, total, call):
                return total[0] / total[1]

        out = fs.decode(fs.load("twin:mdm"), "What floats?", new_tokens=4, watch=fs.Watch(reducers=(Local(),)))
        out.trace.arrays["local"]  # [step, layer, head]
    """

    name: str
    axes: tuple[str, ...]

    def start(self, call: AttentionCall) -> Any:
        """Return the initial state, on `call.query.device`."""
        raise NotImplementedError

    def update(self, state: Any, block: Block) -> None:
        """Add one block of probabilities to the state, in place."""
        raise NotImplementedError

    def finish(self, state: Any, call: AttentionCall) -> Tensor:
        """Return the result: batch first, then `axes`."""
        raise NotImplementedError

    def run(self, call: AttentionCall, lse: Tensor | None) -> Tensor:
        """Reduce one attention call; `lse` is the log-sum-exp of its rows, or None."""
        state = self.start(call)
        for block in iter_blocks(call, lse):
            self.update(state, block)
        out = self.finish(state, call)
        if out.ndim != 1 + len(self.axes) or len(out) != len(call.query):
            raise UserError(
                f"reducer '{self.name}' returned shape {tuple(out.shape)}; expected [batch={len(call.query)},"
                f" {', '.join(self.axes)}]"
            )
        return out
