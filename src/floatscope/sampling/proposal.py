"""From logits to the proposed token of each row, and to the distribution its confidence is read from.

    token, log_p = propose_tokens(logits, sampling, end_ids, keys, positions)      # [row], [row, vocabulary]

Everything is fp32 or better whatever the model's dtype: in bf16 most confident positions tie at 1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from floatscope.errors import UserError
from floatscope.sampling.randomness import gumbel
from floatscope.sampling.settings import Sampling


def propose_tokens(
    logits: Float[Tensor, "row vocabulary"],
    sampling: Sampling,
    end_ids: tuple[int, ...],
    keys: Int[Tensor, " row"],
    positions: Int[Tensor, " row"],
) -> tuple[Int[Tensor, " row"], Float[Tensor, "row vocabulary"]]:
    """Propose a token for each row, and return the log-probabilities its confidence is read from.

    The first of `end_ids` is eos. `sampling.eos`: "never" gives eos no probability; "last" keeps the token and reads
    confidences as if no token of `end_ids` were possible (LLaDA's logits_eos_inf and confidence_eos_eot_inf).
    `keys` and `positions` address the randomness of each row (see `randomness`).
    """
    # 1. Logits in fp32.
    logits = logits.float()
    if not bool((logits.amax(-1) < torch.inf).all()):
        raise UserError("the model's logits are NaN or infinite; look for NaN in the weights, or try another dtype")
    ends = torch.tensor(end_ids, dtype=torch.long, device=logits.device)
    if sampling.eos == "never":
        logits = logits.index_fill(-1, ends[:1], -torch.inf)
    # 2. Temperature, top-p, top-k.
    filtered = filter_logits(_apply_temperature(logits, sampling.temperature), sampling.top_p, sampling.top_k)
    # 3. The token: the most likely one, or a sample by the Gumbel trick.
    if sampling.temperature:
        vocabulary = torch.arange(logits.shape[-1], device=logits.device)
        noise = gumbel(keys[:, None], positions[:, None] * 2**32 + vocabulary)
        token = (filtered.double() + noise).argmax(-1)
    else:
        token = filtered.argmax(-1)
    # 4. The distribution of confidences.
    confidence_logits = logits if sampling.confidence_from == "model" else filtered
    if sampling.eos != "last":
        return token, confidence_logits.log_softmax(-1)
    # Where the filters leave only an end token, nothing remains: the confidence is 0.
    without_ends = confidence_logits.index_fill(-1, ends, -torch.inf)
    return token, without_ends.log_softmax(-1).nan_to_num(-torch.inf, neginf=-torch.inf)


def _apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Relative to the largest logit, so that a small temperature does not overflow."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature if temperature else logits


def filter_logits(logits: Float[Tensor, "row vocabulary"], top_p: float | None, top_k: int | None) -> Tensor:
    """Set all logits to −inf except the smallest set of most likely tokens with mass `top_p`, then the `top_k`."""
    if top_p is not None and top_p < 1:
        best, order = logits.sort(dim=-1, descending=True, stable=True)
        mass_before = torch.nn.functional.pad(best.softmax(-1).cumsum(-1)[:, :-1], (1, 0))
        is_dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, mass_before > top_p)
        logits = logits.masked_fill(is_dropped, -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[:, -1:], -torch.inf)
    return logits
