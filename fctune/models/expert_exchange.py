"""Exchange of tokens between ranks that each hold a part of the experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fctune.base.distributed import exchange_rows

# Attribute of a module with experts that holds its exchange, if its experts are spread over ranks.
EXPERT_EXCHANGE = "exchange"


class ExpertExchange:
    """Sends each row to the rank that holds its expert, and the result back.

    Every rank of the group calls it at the same time, with or without rows for the others.

    Args:
        group: Ranks over which the experts are spread, in equal parts, in the order of the experts.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def run(
        self,
        compute: Callable[[Tensor, Tensor | None, Tensor], Tensor],
        rows: Tensor,
        keys: Tensor | None,
        ends: Tensor,
    ) -> Tensor:
        """Return what ``compute`` returns for the rows, ``[n, out]``, wherever it runs; zeros after the last expert's.

        Args:
            compute: Function of rows, sorted by the experts of its rank, of their keys and of the row after the last
                one of each of these experts, int32; it returns one row for each.
            rows: Rows of this rank, ``[n, in]``, sorted by expert.
            keys: Dropout keys of the rows, int64 ``[n]``, or None.
            ends: Row after the last one of each expert, int32 ``[experts]``.
        """
        num_ranks = dist.get_world_size(self.group)
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64)
        num_local = len(counts) // num_ranks
        received = exchange_rows(counts, [num_local] * num_ranks, [num_local] * num_ranks, self.group)
        by_source = received.view(num_ranks, num_local)
        numbers = torch.stack([counts.view(num_ranks, num_local).sum(1), by_source.sum(1)])
        sent_to, received_from = numbers.tolist()  # the host waits for the device, because it allocates the rows
        num_sent = sum(sent_to)  # without rows of padding
        arrived = exchange_rows(rows[:num_sent], sent_to, received_from, self.group)
        arrived_keys = None if keys is None else exchange_rows(keys[:num_sent], sent_to, received_from, self.group)
        # Rows arrive sorted by source, and within it by expert.
        experts = torch.arange(num_local, device=rows.device).repeat(num_ranks)
        experts = experts.repeat_interleave(received, output_size=len(arrived))
        order = torch.argsort(experts, stable=True)
        local_ends = by_source.sum(0).cumsum(0).to(torch.int32)
        sorted_keys = None if arrived_keys is None else arrived_keys[order]
        out = compute(arrived.index_select(0, order), sorted_keys, local_ends)
        unsorted = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        returned = exchange_rows(out.index_select(0, unsorted), received_from, sent_to, self.group)
        return pad(returned, (0, 0, 0, len(rows) - num_sent))
