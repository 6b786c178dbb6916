"""Packing of conversations into rows of at most seq_len tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack_best_fit(lengths: Sequence[int] | NDArray[np.int64], seq_len: int) -> list[list[int]]:
    """Pack conversations by best-fit decreasing (at most 11/9 of the optimal number of packs: Johnson 1973).

    The longest remaining conversation goes into the pack where it leaves the least room. Conversations keep their order
    within a pack, and packs are ordered by their first conversation. Time is linear in the number of conversations:
    packs are indexed by their free room, and a bit set finds the smallest sufficient one.

    Args:
        lengths: Number of tokens of each conversation, at most ``seq_len``.
        seq_len: Number of tokens of a pack.

    Returns:
        The indices of the conversations of each pack.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    packs: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    rooms = 0  # bit r is set where a pack has room for exactly r more tokens
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room = seq_len
            pack = len(packs)
            packs.append([])
        packs[pack].append(index)
        by_room[room - size].append(pack)
        rooms |= 1 << (room - size)
    for members in packs:
        members.sort()
    packs.sort()
    return packs
