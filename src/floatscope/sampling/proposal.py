"""From logits to the token each candidate would become, and the distribution it is judged by.

    token, log_p = draw(logits, how, end_ids, keys, positions)      # [row], [row, vocabulary]

Everything is fp32 or better whatever the model's dtype: in bf16 most confident positions tie at 1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from floatscope.errors import UserError
from floatscope.sampling.noise import gumbel
from floatscope.sampling.settings import Sampling


def draw(
    logits: Float[Tensor, "row vocabulary"],
    how: Sampling,
    end_ids: tuple[int, ...],
    keys: Int[Tensor, " row"],
    positions: Int[Tensor, " row"],
) -> tuple[Int[Tensor, " row"], Float[Tensor, "row vocabulary"]]:
    """The token of each row, and the log-probabilities its confidence is read from.

    Of `end_ids` the first is eos. `how.eos`: "never" gives eos no probability; "last" leaves the token as it is and
    reads confidences as if no token of `end_ids` could come (LLaDA's logits_eos_inf and confidence_eos_eot_inf).
    """
    logits = logits.float()
    if not bool((logits.amax(-1) < torch.inf).all()):
        raise UserError("the model's logits are NaN or infinite; look for NaN in the weights, or try another dtype")
    ends = torch.tensor(end_ids, dtype=torch.long, device=logits.device)
    if how.eos == "never":
        logits = logits.index_fill(-1, ends[:1], -torch.inf)
    drawn = filtered(_tempered(logits, how.temperature), how.top_p, how.top_k)
    if how.temperature:
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        noise = gumbel(keys[:, None], positions[:, None] * 2**32 + tokens)
        token = (drawn.double() + noise).argmax(-1)  # the largest of logits + Gumbel noise: one draw from softmax
    else:
        token = drawn.argmax(-1)
    judged = logits if how.judged == "model" else drawn
    if how.eos != "last":
        return token, judged.log_softmax(-1)
    # Where an end is all that the filters left, nothing is: no confidence.
    return token, judged.index_fill(-1, ends, -torch.inf).log_softmax(-1).nan_to_num(-torch.inf, neginf=-torch.inf)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Counted from the largest, so that a small temperature does not overflow."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature if temperature else logits


def filtered(logits: Float[Tensor, "row vocabulary"], top_p: float | None, top_k: int | None) -> Tensor:
    """−inf but for the fewest most likely tokens that hold `top_p`, then but for the `top_k` most likely."""
    if top_p is not None and top_p < 1:
        best, order = logits.sort(dim=-1, descending=True, stable=True)
        before = torch.nn.functional.pad(best.softmax(-1).cumsum(-1)[:, :-1], (1, 0))
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, before > top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[:, -1:], -torch.inf)
    return logits
