"""Whole conversations into rows of at most seq_len tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack_best_fit(lengths: Sequence[int] | NDArray[np.int64], seq_len: int) -> list[list[int]]:
    """Indices of the conversations of each pack, by best-fit decreasing (within 11/9 of the fewest: Johnson 1973).

    The longest conversation left goes where it leaves the least room. Packs, and conversations in a pack, come in the
    order of their first conversation. Time grows with the number of conversations, not with its square: packs are kept
    by the room they have left, and a bit set finds the smallest that is enough.

    Args:
        lengths: tokens of each conversation, each at most ``seq_len``.
        seq_len: tokens of a pack.
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
