"""Randomness that belongs to a sample and a step, not to a batch or a device.

    keys = step_keys(seed=0, samples=["nq-1", "nq-2"], step=3)           # [batch]
    uniform(keys[:, None], positions)                                     # [batch, position], in (0, 1)

A number is a hash of (seed, sample, step) and of where it is used (position, token): counter-based, so a batched run, a
resumed one and one on another device draw the same numbers. The mixing is splitmix64's.
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
    words = (f"{seed}\0{sample}\0{step}\0{purpose}" for sample in samples)
    digests = (hashlib.sha256(word.encode()).digest()[:8] for word in words)
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])


def uniform(key: Int[Tensor, "*shape"], counter: Int[Tensor, "*more"]) -> Tensor:
    """Doubles in the open interval (0, 1), one for each pair of a key and a counter (broadcast)."""
    x = key + (counter + 1) * _GOLDEN  # int64 wraps around, as the generator wants
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * factor
    bits: Tensor = _shifted(x ^ _shifted(x, 31), 12)
    return (bits.double() + 0.5) * 2.0**-52  # 52 bits and a half: with 53 the largest would round to 1


def gumbel(key: Int[Tensor, "*shape"], counter: Int[Tensor, "*more"]) -> Tensor:
    """Adding these to log-probabilities and taking the largest samples from them; the k largest, k without return."""
    return -(-uniform(key, counter).log()).log()


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A right shift that brings in zeros; torch's brings in the sign."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
