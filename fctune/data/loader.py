"""Global batches of a prepared set: step k has the same packs in the same order on any number of ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fctune.base.errors import DataError
from fctune.data.fingerprint import name_inputs
from fctune.data.prepared_set import PreparedSet, Split

IGNORE = -100  # label of an unsupervised position

# Lengths of unpacked rows are multiples of this or more: float8 products over the tokens of a micro-batch need them.
ROW_MULTIPLE = 16


def _name_input(key: str) -> str:
    """Return the config key of an input of a prepared set."""
    return f"model.{key}" if key in ("template_args", "chat_template") else f"data.{key}"


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """The packs of one optimizer step of all ranks; steps are numbered from 1, epochs from 0."""

    step: int
    epoch: int
    packs: tuple[int, ...]
    data_digest: str


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals of a global step over all its packs; every rank computes them itself, without communication.

    ``num_pairs`` is the number of pairs of a token and a token it attends to, itself included. ``num_preferences`` is
    the number of preference pairs, ``num_chosen`` that of supervised tokens of their chosen answers, and
    ``num_answers`` that of rollouts.
    """

    num_tokens: int
    num_supervised: int
    weight_sum: float
    num_pairs: int
    num_preferences: int = 0
    num_chosen: int = 0
    num_answers: int = 0


@dataclass(frozen=True, slots=True)
class RowCost:
    """Cost of a row of tokens in training, in any unit; whole numbers, so that every rank adds up the same.

    Attributes:
        position: Cost of each position, padding included.
        supervised: Further cost of each supervised position.
        pair: Cost of each pair of a token and a token it attends to.
    """

    position: int = 1
    supervised: int = 0
    pair: int = 0


DEFAULT_COST = RowCost()


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of a rank.

    Tokens, labels and positions are int64 ``[b, s]``, loss weights float32 ``[b, s]``. ``lengths`` are those of each
    row's conversations, then the padding's, then zeros if all batches have as many; positions and lengths are None if
    each row is one conversation. ``rows`` are the indices of the rows in the global step, or -1 for a row of padding;
    ``row_lengths`` are their numbers of tokens before padding. Labels are already shifted: ``labels[t]`` is the token
    after ``tokens[t]``. ``answer_lengths`` are the numbers of supervised tokens of each answer of preference pairs, row
    by row; None for other sets.
    """

    tokens: Tensor
    labels: Tensor
    loss_weights: Tensor
    positions: Tensor | None
    lengths: tuple[tuple[int, ...], ...] | None
    rows: tuple[int, ...]
    row_lengths: tuple[int, ...]
    num_tokens: int
    num_supervised: int
    weight_sum: float
    answer_lengths: tuple[int, ...] | None = None


def shuffled(num_packs: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch's packs, the same on every rank."""
    return np.random.default_rng([seed, epoch]).permutation(num_packs)


def deal_rows(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal rows to ranks so that the sums of their costs are about equal; returns the rows of each rank by cost.

    The most expensive rows come first, one to each rank, the dearest of them to the rank with the smallest sum so far.
    So ranks have equally many rows, but for one, and rows that ranks compute at the same time cost about the same.
    """
    by_cost = sorted(range(len(costs)), key=lambda row: -costs[row])
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0] * num_ranks
    for start in range(0, len(by_cost), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: sums[rank])
        for rank, row in zip(ranks, by_cost[start : start + num_ranks], strict=False):
            shares[rank].append(row)
            sums[rank] += costs[row]
    return shares


class GlobalLoader:
    """Batches the packs of a split, shuffled by (seed, epoch), with ``global_batch_size`` packs per step.

    The last step of an epoch has the remaining packs. The only state is the step number, which callers pass.

    Args:
        prepared: Prepared set.
        split: Split of the set.
        global_batch_size: Packs per step.
        seed: Seed of the shuffle.
        is_shuffled: Shuffle the packs of each epoch.
        pad_to: Length of unpacked rows.
        has_full_batches: Pad every micro-batch to as many rows, and packed rows to as many conversations, so that all
            micro-batches of a run, of both splits, have one shape.
        row_multiple: Lengths of unpacked rows are multiples of this.
    """

    def __init__(
        self,
        prepared: PreparedSet,
        split: Split,
        global_batch_size: int,
        seed: int,
        is_shuffled: bool = True,
        pad_to: Literal["longest", "seq_len"] = "longest",
        has_full_batches: bool = False,
        row_multiple: int = ROW_MULTIPLE,
    ):
        self.prepared = prepared
        self.split: Split = split
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.is_shuffled = is_shuffled
        self.has_constant_length = prepared.is_packed or pad_to == "seq_len"
        self.has_full_batches = has_full_batches
        self.row_multiple = row_multiple
        # The conversations of the fullest pack, and the padding.
        self._num_lengths = prepared.max_pack_size + 1 if has_full_batches else 0
        self.steps_per_epoch = math.ceil(prepared.num_packs(split) / global_batch_size)
        self._order: tuple[int, np.ndarray] | None = None  # of the last requested epoch

    def step_at(self, step: int) -> GlobalStep:
        """Return the packs of a global step, counted from 1."""
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        start = index * self.global_batch_size
        packs = self._epoch_order(epoch)[start : start + self.global_batch_size]
        digest = hashlib.blake2b(digest_size=8)
        for pack in packs:
            for member in self.prepared.members(self.split, int(pack)):
                digest.update(int(self.prepared.digests[member]).to_bytes(8, "little"))
        return GlobalStep(step, epoch, tuple(int(pack) for pack in packs), digest.hexdigest())

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state that a checkpoint after global step ``step`` needs to resume with the next step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return {
            "epoch": epoch,
            "position": index * self.global_batch_size,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "fingerprint": self.prepared.fingerprint,
            "inputs": self.prepared.inputs,
        }

    def resume_at(self, state: dict[str, Any]) -> None:
        """Check that a saved state is of this data; the step number says where to continue.

        Raises:
            DataError: The state belongs to other data, another seed or another batch size; lists the differences.
        """
        mine = self.state_at(0)
        names = [name for name in ("seed", "global_batch_size") if state[name] != mine[name]]
        changes = [f"{name}: was {state[name]}, is {mine[name]}" for name in names]
        if name_inputs(state["inputs"]) != self.prepared.fingerprint:
            old, new = state["inputs"], self.prepared.inputs
            keys = [key for key in new if old.get(key) != new[key]]
            changes += [f"{_name_input(key)}: was {old.get(key)}, is {new[key]}" for key in keys]
        if changes:
            shown = "\n".join(f"  {change}" for change in changes)
            raise DataError(
                f"the data differs from that of the checkpoint:\n{shown}\n"
                "Restore the previous values, or start a new run in another output_dir."
            )

    def totals(self, step: GlobalStep) -> StepTotals:
        """Return the totals over the packs of a step."""
        prepared = self.prepared
        counts = np.zeros(len(prepared.weights), dtype=np.int64)  # target tokens by weight code
        num_tokens = num_pairs = num_answers = num_chosen = 0
        is_supervised = prepared.weights > 0
        for pack in step.packs:
            for member in prepared.members(self.split, pack):
                start, stop = (int(end) for end in prepared.offsets[member : member + 2])
                counts += np.bincount(prepared.codes[start + 1 : stop], minlength=len(counts))
                num_tokens += stop - start
                num_pairs += (stop - start) * (stop - start + 1) // 2
                if prepared.is_paired:
                    num_answers += 1
                    if member % 2 == 0:
                        num_chosen += int(is_supervised[prepared.codes[start + 1 : stop]].sum())
        weights = prepared.weights.astype(np.float64)
        num_supervised, weight_sum = int(counts[is_supervised].sum()), float(counts @ weights)
        return StepTotals(num_tokens, num_supervised, weight_sum, num_pairs, num_answers // 2, num_chosen)

    def micro_batches(
        self, step: GlobalStep, rank: int, world_size: int, micro_batch_size: int, cost: RowCost = DEFAULT_COST
    ) -> list[Batch]:
        """Return a rank's micro-batches of a step; every rank gets the same number, empty ones if packs run out.

        Packs are dealt by cost (``deal_rows``), which is that of length if rows are not packed: those of a micro-batch,
        and the micro-batches that ranks compute at the same time, are about as long.
        """
        rows = deal_rows([self._row_cost(pack, cost) for pack in step.packs], world_size)[rank]
        num_batches = math.ceil(len(step.packs) / (world_size * micro_batch_size))
        batches: list[Batch] = []
        for index in range(num_batches):
            mine = rows[index * micro_batch_size : (index + 1) * micro_batch_size]
            batches.append(self.collate({row: step.packs[row] for row in mine}, micro_batch_size))
        self.prepared.release_pages()
        return batches

    def collate(self, packs: dict[int, int], micro_batch_size: int) -> Batch:
        """Return the tensors of packs, keyed by their row in the global step; without packs, one row of padding.

        Packed rows have seq_len tokens; others about as many as the longest of them, or seq_len with
        ``pad_to="seq_len"``. With ``has_full_batches``, rows of padding make up for missing packs.
        """
        num_rows = micro_batch_size if self.has_full_batches else max(1, len(packs))
        is_real = bool(packs) or self.has_full_batches
        longest = max([1, *(self._pack_length(p) for p in packs.values())])
        length = min(self.prepared.seq_len, math.ceil(longest / self.row_multiple) * self.row_multiple)
        if self.has_constant_length and is_real:
            length = self.prepared.seq_len
        shape = (num_rows, length)
        tokens = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        loss_weights = np.zeros(shape, dtype=np.float32)
        positions = np.zeros(shape, dtype=np.int64)
        all_lengths: list[tuple[int, ...]] = []
        row_lengths: list[int] = []
        answer_lengths: list[int] = []
        for i, pack in enumerate([*packs.values(), *[None] * (num_rows - len(packs))]):
            at = 0
            lengths: list[int] = []
            for member in [] if pack is None else self.prepared.members(self.split, pack):
                span = slice(*self.prepared.offsets[member : member + 2])
                ids = self.prepared.tokens[span].astype(np.int64)
                weights = self.prepared.weights[self.prepared.codes[span]]
                stop = at + len(ids)
                tokens[i, at:stop] = ids
                positions[i, at:stop] = np.arange(len(ids))
                # The first token of a conversation is never a target, so no label crosses a boundary.
                loss_weights[i, at : stop - 1] = weights[1:]
                labels[i, at : stop - 1] = np.where(weights[1:] > 0, ids[1:], IGNORE)
                lengths.append(len(ids))
                answer_lengths.append(int((weights[1:] > 0).sum()))
                at = stop
            row_lengths.append(at)
            if at < shape[1]:
                lengths.append(shape[1] - at)
                positions[i, at:] = np.arange(shape[1] - at)
            all_lengths.append((*lengths, *[0] * (self._num_lengths - len(lengths))))
        has_bounds = self.prepared.is_packed and is_real
        return Batch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            loss_weights=torch.from_numpy(loss_weights),
            positions=torch.from_numpy(positions) if has_bounds else None,
            lengths=tuple(all_lengths) if has_bounds else None,
            rows=(*packs, *[-1] * (num_rows - len(packs))),
            row_lengths=tuple(row_lengths),
            num_tokens=sum(row_lengths),
            num_supervised=int((labels != IGNORE).sum()),
            weight_sum=float(loss_weights.sum(dtype=np.float64)),
            answer_lengths=tuple(answer_lengths) if self.prepared.is_paired else None,
        )

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            count = self.prepared.num_packs(self.split)
            order = shuffled(count, self.seed, epoch) if self.is_shuffled else np.arange(count)
            self._order = (epoch, order)
        return self._order[1]

    def _pack_length(self, pack: int) -> int:
        return int(self._lengths(pack).sum())

    def _lengths(self, pack: int) -> np.ndarray:
        """Return the lengths of a pack's conversations."""
        members = self.prepared.members(self.split, pack)
        return np.array([int(self.prepared.offsets[m + 1] - self.prepared.offsets[m]) for m in members], dtype=np.int64)

    def _row_cost(self, pack: int, cost: RowCost) -> int:
        """Return the cost of a pack's row, whose padding attends to itself; unpacked rows are padded by little."""
        prepared = self.prepared
        lengths = self._lengths(pack)
        num_positions = prepared.seq_len if self.has_constant_length else int(lengths.sum())
        rest = num_positions - int(lengths.sum())
        documents = np.append(lengths, rest) if prepared.is_packed else np.array([num_positions])
        num_supervised = 0
        if cost.supervised:
            is_supervised = prepared.weights > 0
            for member in prepared.members(self.split, pack):
                start, stop = (int(end) for end in prepared.offsets[member : member + 2])
                num_supervised += int(is_supervised[prepared.codes[start + 1 : stop]].sum())
        num_pairs = int((documents * (documents + 1) // 2).sum())
        return cost.position * num_positions + cost.supervised * num_supervised + cost.pair * num_pairs
