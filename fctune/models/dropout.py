"""Dropout that is a function of (seed, step, row, position, channel), so it is the same at any world size.

A generator's state depends on what a rank drew before; a hash of the place does not. It also needs no replay when a
checkpointed block runs again in backward.
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


class TokenKeys:
    """The keys ``[b, s]`` of the tokens now in the model, shared by all its adapters; None outside of training."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def set_rows(self, row_keys: Tensor, seq_len: int) -> None:
        """Derive a key for each position of rows with the keys ``[b]`` (int64)."""
        positions = torch.arange(seq_len, device=row_keys.device) * _GOLDEN
        self.value = _mix(row_keys[:, None] + positions[None])


def row_key(seed: int, step: int, row: int) -> int:
    """Key of one row of a global step: a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}:{step}:{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def channel_keys(name: str, size: int, device: torch.device | None = None) -> Tensor:
    """Keys of a module's input channels, int64 ``[size]``; they tell one module's mask from another's.

    They are made once and kept: made anew where they are used, compilation for the CPU would put the index times a
    constant of 63 bits into a loop, whose overflow C++ does not define, and the loop may then never end.
    """
    salt = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True) >> 1
    return torch.arange(size, device=device) * _GOLDEN + salt


def keyed_dropout(x: Tensor, p: float, token_keys: Tensor, channels: Tensor) -> Tensor:
    """Zero each element of ``x`` (``[..., d]``) with probability ``p``, scale the rest by 1 / (1 - p).

    Args:
        x: input.
        p: probability, under 1.
        token_keys: int64 keys of x's leading shape.
        channels: keys of the module that drops, int64 ``[d]``.
    """
    uniform = (_mix(token_keys[..., None] ^ channels) >> 40) & 0xFFFFFF  # 24 bits
    return torch.where(uniform >= int(p * 2**24), x / (1 - p), torch.zeros((), dtype=x.dtype, device=x.device))
