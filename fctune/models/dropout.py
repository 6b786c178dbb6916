"""Dropout as a function of (seed, step, row, position, channel), so that it is the same at any world size.

Unlike the state of a random generator, a hash of these does not depend on what a rank drew before, and needs no replay
when backward recomputes a checkpointed block.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Odd 64-bit constants of the splitmix64 generator, as signed integers: https://prng.di.unimi.it/splitmix64.c
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _high_half(x: Tensor) -> Tensor:
    return (x >> 32).to(torch.int32)


class TokenKeys:
    """Keys of the tokens in the current forward, int32 ``[b, s]``, shared by all adapters; None outside of training."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def set_rows(self, row_keys: Tensor, seq_len: int, start: int = 0) -> None:
        """Derive a key for ``seq_len`` positions of each row, from ``start`` on, from the row keys, int64 ``[b]``."""
        positions = torch.arange(start, start + seq_len, device=row_keys.device) * _GOLDEN
        self.value = _high_half(_mix(row_keys[:, None] + positions[None]))


def row_key(seed: int, step: int, row: int) -> int:
    """Return the key of one row of a global step, a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}:{step}:{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def channel_keys(name: str, size: int) -> Tensor:
    """Return keys of an input's channels, int32 ``[size]``, so that inputs of different names drop independently.

    Modules must store them as a buffer: computed in the forward, compilation for the CPU turns the index times a 63-bit
    constant into a loop variable, whose overflow is undefined in C++, and the loop may never end.
    """
    salt = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True) >> 1
    return _high_half(_mix(torch.arange(size) * _GOLDEN + salt))


def mix_keys(numbers: Tensor) -> Tensor:
    """Return keys, int32, for small numbers, such as those of experts; combine them with others by exclusive or."""
    return _high_half(_mix((numbers + 1) * _GOLDEN))


def keyed_dropout(x: Tensor, p: float, token_keys: Tensor, channels: Tensor) -> Tensor:
    """Zero each element of ``x [..., d]`` with probability ``p`` and scale the others by 1 / (1 - p).

    An element is dropped by the high bits of x (2 x + 1) modulo 2^32, for x the sum of both keys: a permutation, in
    which each bit depends on all lower ones (RC6, https://people.csail.mit.edu/rivest/pubs/RRSY98.pdf). Keys are random
    already, and backward computes the mask again from so few sums and products; a compiler would keep it, had it
    operations on bits.

    Args:
        x: Input.
        p: Probability, less than 1.
        token_keys: int32 ``[...]``.
        channels: Result of ``channel_keys`` for the input, int32 ``[d]``.
    """
    # Each input has token keys of its own, because a compiler keeps masks that depend on a tensor used far apart.
    token_keys = token_keys + channels[:1]
    mixed = token_keys[..., None] + channels
    is_kept = mixed * (2 * mixed + 1) >= int(p * 2**32) - 2**31
    return torch.where(is_kept, x / (1 - p), torch.zeros((), dtype=x.dtype, device=x.device))
