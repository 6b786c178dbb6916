"""A run out of memory records its allocations and suggests settings that fit."""

from __future__ import annotations

import json
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.distributed import World
from fctune.config.loading import load_config
from fctune.runs.record import read_run
from fctune.runs.success import judge_run
from fctune.training.out_of_memory import MemorySnapshot, is_out_of_memory, suggest_less_memory
from recipes.lora_fc_distributed import LoRAFunctionCallingRecipe
from tests.conftest import ROOT, TINY_BASE
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import CONFIGS, arguments_for, run_on_rank

MIB = 2**20


def run_in_little_memory(world: World, argv: list[str]) -> dict[str, Any]:
    """Run the recipe in a process whose memory is limited to little more than it has before the first step."""

    class LimitedRecipe(LoRAFunctionCallingRecipe):
        def train(self) -> None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 64 * MIB
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            super().train()

    return run_on_rank(world, argv, LimitedRecipe)


def test_running_out_of_memory_ends_the_run_with_the_planners_advice(tmp_path: Path) -> None:
    large = ["micro_batch_size=64", "global_batch_size=64", "data.seq_len=2048", "data.packed=true"]
    rows = ["data.sources.0.path=synthetic:train:900:1", "data.validation_share=0", "parallel.mode=auto"]
    (result,) = run_ranks(run_in_little_memory, 1, arguments_for(tmp_path, *large, *rows))
    assert result["code"] == 1, result
    ended = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert "can't allocate memory" in ended["reason"] or "MemoryError" in ended["reason"]
    assert "The planner expects " in ended["reason"]
    assert "Settings that fit, fastest first: " in ended["reason"]
    assert ended["reason"] in result["err"]
    judged = {criterion.name: criterion for criterion in judge_run(read_run(tmp_path / "run"))}
    assert judged["no out-of-memory"].status == "FAIL"


def test_suggested_settings_need_less_memory(tmp_path: Path) -> None:
    overrides = [f"output_dir={tmp_path}", f"model.path={TINY_BASE}", "micro_batch_size=4096", "global_batch_size=8192"]
    overrides += ["data.seq_len=2048", "parallel.mode=auto"]
    config = load_config(ROOT / "configs" / "tiny_lora.yaml", overrides)
    text = suggest_less_memory(config, TINY_BASE, World(0, 2, 0, torch.device("cpu"), 2))
    assert text.startswith("The planner expects ")
    needed = float(text.split(" expects ")[1].split(" of ")[0])
    fits = text[text.index("Settings that fit, fastest first: ") :]
    offered = [float(part.split(" GiB)")[0]) for part in fits.split("(")[1:]]
    assert 1 <= len(offered) <= 3
    assert max(offered) < needed


def test_an_error_of_the_planner_does_not_hide_the_runs_error(tmp_path: Path) -> None:
    config = load_config(CONFIGS["lora"], [f"output_dir={tmp_path}"])
    text = suggest_less_memory(config, tmp_path / "gone", World(0, 1, 0, torch.device("cpu"), 1))
    assert text.startswith("The planner has no advice (ConfigError: ")


@pytest.mark.parametrize(
    ("make", "due"),
    [
        (lambda: torch.empty(2**60, dtype=torch.uint8), True),
        (lambda: bytearray(2**60), True),
        (lambda: torch.empty(2) @ torch.empty(3), False),
    ],
)
def test_out_of_memory_errors_are_recognized(make: Callable[[], Any], due: bool) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        make()
    assert is_out_of_memory(caught.value) is due


@pytest.mark.parametrize(
    "message",
    [  # of CUDA, cuBLAS and NCCL, which allocate outside of torch's allocator
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ],
)
def test_errors_outside_of_the_allocator_are_recognized(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))


def test_no_snapshot_is_written_on_the_cpu(tmp_path: Path) -> None:
    snapshot = MemorySnapshot(tmp_path, World(0, 1, 0, torch.device("cpu")), keeps_history=True)
    assert not snapshot.file.exists()


@pytest.mark.gpu
def test_a_full_gpu_writes_a_snapshot_that_torch_reads(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    snapshot = MemorySnapshot(tmp_path, World(0, 1, 0, device), keeps_history=True)
    held = torch.empty(512 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**45, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)
    found = pickle.loads(snapshot.file.read_bytes())
    sizes = [block["size"] for segment in found["segments"] for block in segment["blocks"]]
    assert max(sizes) >= held.nbytes
    assert any(trace for trace in found["device_traces"])
    torch.cuda.memory._record_memory_history(enabled=None)
