"""Counter-based randomness: a number belongs to a sample and a step, not to a batch or a device.

    keys = step_keys(seed=0, samples=["nq-1", "nq-2"], step=3, purpose="token")     # [batch]
    uniform(keys[:, None], positions)                                                # [batch, position], in (0, 1)

A number is a hash of (seed, sample, step, purpose) and of a counter (position, token). A batched run, a resumed run and
a run on another device therefore draw the same numbers. The mixing function is splitmix64's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def step_keys(seed: int, samples: Sequence[str], step: int, purpose: str) -> Int[Tensor, " batch"]:
    """One key per sample; different purposes in a step (which token, which position) draw different numbers."""
    texts = (f"{seed}\0{sample}\0{step}\0{purpose}" for sample in samples)
    digests = (hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])


def uniform(key: Int[Tensor, "*shape"], counter: Int[Tensor, "*more"]) -> Tensor:
    """Doubles in the open interval (0, 1), one for each pair of key and counter (broadcast)."""
    x = key + (counter + 1) * _GOLDEN  # int64 wraps around, as the generator requires
    for shift, factor in _MIX:
        x = (x ^ _shift_right(x, shift)) * factor
    bits: Tensor = _shift_right(x ^ _shift_right(x, 31), 12)
    return (bits.double() + 0.5) * 2.0**-52  # 52 bits and a half: with 53 the largest would round to 1


def gumbel(key: Int[Tensor, "*shape"], counter: Int[Tensor, "*more"]) -> Tensor:
    """Gumbel noise: argmax(log p + noise) is a sample from p, and the k largest are k samples without replacement."""
    return -(-uniform(key, counter).log()).log()


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's is arithmetic."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
