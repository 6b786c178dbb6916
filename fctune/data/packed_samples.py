"""Prepared sets in memory, of samples that are tokens already, such as a step's rollouts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fctune.data.chunk_encoder import Counts
from fctune.data.packing import pack_best_fit
from fctune.data.prepared_set import PreparedSet

_NO_PACKS = (np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))


def pack_samples(
    tokens: Sequence[Sequence[int]],
    is_supervised: Sequence[Sequence[bool]],
    seq_len: int,
    is_packed: bool = True,
    fingerprint: str = "",
    inputs: Mapping[str, Any] | None = None,
) -> PreparedSet:
    """Return a training split of these samples, packed into rows of ``seq_len`` tokens, or each in a row of its own.

    Args:
        tokens: Token ids of each sample.
        is_supervised: For each of them, if it is supervised.
        seq_len: Tokens of a row; no sample may be longer.
        is_packed: Put several samples into a row.
        fingerprint: Of what the samples come from.
        inputs: What the samples come from, by name.
    """
    lengths = np.array([len(one) for one in tokens], dtype=np.int64)
    assert lengths.max(initial=0) <= seq_len, "a sample is longer than a row"
    packs = pack_best_fit(lengths, seq_len) if is_packed else [[index] for index in range(len(lengths))]
    flat = np.array([index for pack in packs for index in pack], dtype=np.int64)
    ends = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    arrays = [np.array(one, dtype=np.int32) for one in tokens]
    digests = [hashlib.blake2b(array.tobytes(), digest_size=8).digest() for array in arrays]
    return PreparedSet(
        path=Path(),
        fingerprint=fingerprint,
        inputs=dict(inputs or {}),
        seq_len=seq_len,
        is_packed=is_packed,
        is_paired=False,
        counts=Counts(),
        weights=np.array([0.0, 1.0], dtype=np.float32),
        tokens=np.concatenate([np.zeros(0, dtype=np.int32), *arrays]),
        codes=np.array([flag for one in is_supervised for flag in one], dtype=np.uint8),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        digests=np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64),
        packs={"train": (flat, ends), "validation": _NO_PACKS},
    )
