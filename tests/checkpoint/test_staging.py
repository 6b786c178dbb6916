"""Saves hold what the weights were when they were started, on every rank's device, and end on all ranks at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fctune.base.distributed import World
from fctune.checkpoint.files import FileRecord, write_tensors
from fctune.checkpoint.saver import Saver
from fctune.checkpoint.store import CheckpointStore
from tests.cuda_stand_in import CudaStandIn
from tests.ranks import run_ranks


def save_while_training(world: World, folder: Path, is_async: bool) -> dict[str, Any]:
    """Save twice while updates and steps are queued on the rank's device; returns which devices were used."""
    device = torch.device("cuda", world.rank)
    ran: list[str] = []

    def write(to: Path, tensors: dict[str, torch.Tensor], _: Any, group: Any) -> list[FileRecord]:
        return [write_tensors(to / f"rank-{world.rank}.safetensors", tensors)]

    with CudaStandIn().installed() as cuda:
        cuda.set_device(device)
        weight = cuda.put(torch.full((1000,), -1.0), world.rank)
        saver = Saver(CheckpointStore(folder, 9), replace(world, device=device), is_async)
        for step in (1, 2):
            cuda.launch(lambda step=step: weight.fill_(step))  # the update, which the host does not wait for
            saver.start("sharded", step, {"weight": weight}, {}, write)
            cuda.launch(lambda step=step: ran.append(f"forward after {step}"))
            saver.wait_staged()
            waited_for = list(ran)
            saver.finish()  # the files are written before the device gets to the step
            cuda.synchronize(device)  # the loss of the step
        saver.close()
        return {"contexts": cuda.contexts, "pinned_on": cuda.pinned_on, "waited_for": waited_for}


@pytest.mark.parametrize("is_async", [True, False])
def test_saves_hold_the_weights_of_their_step_on_every_local_rank(is_async: bool, tmp_path: Path) -> None:
    results = run_ranks(save_while_training, 3, tmp_path, is_async)
    folders = {step: CheckpointStore(tmp_path).path("sharded", step) for step in (1, 2)}
    saved = {
        (rank, step): set(load_file(folder / f"rank-{rank}.safetensors")["weight"].tolist())
        for step, folder in folders.items()
        for rank in range(3)
    }
    assert saved == {(rank, step): {step} for rank, step in saved}
    assert [result["contexts"] for result in results] == [{0}, {1}, {2}]
    assert [result["pinned_on"] for result in results] == [{0}, {1}, {2}]
    # Staging does not wait for the step that was queued after it.
    assert [result["waited_for"] for result in results] == [["forward after 1"]] * 3


def save_with_a_bug(world: World, folder: Path, is_async: bool) -> str:
    """Save with a bug on rank 1; returns what the rank is told of it."""

    def write(to: Path, tensors: dict[str, torch.Tensor], _: Any, group: Any) -> list[FileRecord]:
        if world.rank == 1:
            raise ValueError("no such tensor")
        return []

    saver = Saver(CheckpointStore(folder, 9), world, is_async)
    try:
        saver.start("sharded", 1, {"weight": torch.ones(3)}, {}, write)
        result = saver.finish()
    except ValueError as error:
        return f"raised {error}"
    assert result is not None
    return f"told {result.error}"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_bug_in_one_ranks_save_is_raised_there_and_keeps_no_other_rank_waiting(
    is_async: bool, tmp_path: Path
) -> None:
    told = "told ValueError: no such tensor"
    assert run_ranks(save_with_a_bug, 3, tmp_path, is_async, timeout_s=60) == [told, "raised no such tensor", told]
    assert not CheckpointStore(tmp_path).path("sharded", 1).exists()
