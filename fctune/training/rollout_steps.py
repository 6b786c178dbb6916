"""Inputs of a step on rollouts: packed and split over ranks, with advantages and log-probabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.chunk_encoder import Counts
from fctune.data.loader import DEFAULT_COST, Batch, GlobalStep, RowCost
from fctune.data.packing import pack_best_fit
from fctune.data.prepared_set import PreparedSet
from fctune.engines.teacher_server import TopLogprobs
from fctune.models.attention import MakeBounds
from fctune.tasks.rollouts import Rollout
from fctune.training.loop import build_loader
from fctune.training.prefetch import Inputs, StepData, make_inputs

_NO_PACKS = (np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class TrainedRollout:
    """A rollout to train on, with its advantage, and with a teacher's scores if it is distilled from a server."""

    rollout: Rollout
    advantage: float
    scores: TopLogprobs | None = None


def make_step_data(
    trained: Sequence[TrainedRollout],
    config: RunConfig,
    world: World,
    make_bounds: MakeBounds,
    *,
    step: int = 1,
    epoch: int = 0,
    metrics: Mapping[str, float] | None = None,
    cost: RowCost = DEFAULT_COST,
) -> StepData:
    """Return this rank's share of an optimizer step on these rollouts; the update is the same on any number of ranks.

    Args:
        trained: Rollouts of all ranks, in the same order on each; one or more.
        config: Config of the run.
        world: This rank.
        make_bounds: Function that returns the boundaries of the rollouts in packed rows.
        step: Global step.
        epoch: Passes over the cases before this step.
        metrics: Metrics of the rollouts' generation.
        cost: Cost of the rows that are dealt to ranks.
    """
    assert trained, "a step needs rollouts"
    prepared = _pack(trained, config)
    loader = build_loader(replace(config, global_batch_size=prepared.num_packs("train")), prepared)
    packed = loader.step_at(1)
    totals = replace(loader.totals(packed), num_answers=len(trained))
    inputs = []
    is_pinned = world.device.type == "cuda"
    for batch in loader.micro_batches(packed, world.rank, world.world_size, config.micro_batch_packs, cost):
        made = make_inputs(batch, make_bounds, seed=config.seed, step=step, is_pinned=is_pinned)
        inputs.append(_add_answers(made, batch, packed, prepared, trained, is_pinned))
    return StepData(replace(packed, step=step, epoch=epoch), totals, inputs, dict(metrics or {}))


def _pack(trained: Sequence[TrainedRollout], config: RunConfig) -> PreparedSet:
    """Return a prepared set in memory with the rollouts, packed or each in a row of its own."""
    rollouts = [one.rollout for one in trained]
    tokens = [np.array((*one.prompt_ids, *one.ids), dtype=np.int32) for one in rollouts]
    is_supervised = [(*[False] * len(one.prompt_ids), *one.is_generated) for one in rollouts]
    lengths = np.array([len(one) for one in tokens], dtype=np.int64)
    seq_len, is_packed = config.data.row_tokens, config.data.packed
    assert lengths.max() <= seq_len, "a rollout is longer than a row"
    packs = pack_best_fit(lengths, seq_len) if is_packed else [[index] for index in range(len(lengths))]
    flat = np.array([index for pack in packs for index in pack], dtype=np.int64)
    ends = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    digests = [hashlib.blake2b(array.tobytes(), digest_size=8).digest() for array in tokens]
    return PreparedSet(
        path=Path(),
        fingerprint="",
        inputs={},
        seq_len=seq_len,
        is_packed=is_packed,
        is_paired=False,
        counts=Counts(),
        weights=np.array([0.0, 1.0], dtype=np.float32),
        tokens=np.concatenate(tokens),
        codes=np.array([flag for one in is_supervised for flag in one], dtype=np.uint8),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        digests=np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64),
        packs={"train": (flat, ends), "validation": _NO_PACKS},
    )


def _add_answers(
    inputs: Inputs,
    batch: Batch,
    step: GlobalStep,
    prepared: PreparedSet,
    trained: Sequence[TrainedRollout],
    is_pinned: bool,
) -> Inputs:
    """Return the inputs with the rollouts' lengths, advantages, log-probabilities and scores, in the batch's order."""
    packs = [step.packs[row] for row in batch.rows if row >= 0]
    mine = [trained[member] for pack in packs for member in prepared.members("train", pack)]
    logprobs = [
        logprob
        for one in mine
        for logprob, is_generated in zip(one.rollout.logprobs, one.rollout.is_generated, strict=True)
        if is_generated
    ]
    tensors = [
        torch.tensor([one.rollout.num_generated for one in mine], dtype=torch.int64),
        torch.tensor([one.advantage for one in mine], dtype=torch.float64),
        torch.tensor(logprobs, dtype=torch.float64),
    ]
    scores = [one.scores for one in mine if one.scores is not None]
    if scores:
        tensors.append(torch.from_numpy(np.concatenate([one.ids for one in scores])))
        tensors.append(torch.from_numpy(np.concatenate([one.logprobs for one in scores])))
    if is_pinned:
        tensors = [tensor.pin_memory() for tensor in tensors]
    names = ("answer_lengths", "advantages", "logprobs", "teacher_ids", "teacher_logprobs")
    added: dict[str, Any] = dict(zip(names, tensors, strict=False))
    return replace(inputs, **added)
