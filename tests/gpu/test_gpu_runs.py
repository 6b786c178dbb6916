"""Runs on all GPUs of the machine; on a machine without, the same code on CPU ranks.

python -m pytest -m gpu        everything that needs GPUs, here and in other folders
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from fctune.base.distributed import World
from fctune.checkpoint.files import FileRecord
from fctune.checkpoint.saver import Saver
from fctune.checkpoint.sharded import read_shards_, write_shards
from fctune.checkpoint.store import CheckpointStore
from fctune.checkpoint.tensors import collect_tensors
from fctune.config.schema import RunConfig
from fctune.data.conversation import Conversation
from fctune.data.prepared_set import open_prepared, prepare
from fctune.data.synthetic import iter_cases
from fctune.engines.engine import make_prompts
from fctune.engines.local import LocalEngine
from fctune.models.attention import choose_attention_kernel, make_bounds
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import materialize_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.runs.device import DeviceSampler, read_device
from fctune.runs.metrics import active_memory_gib, peak_memory_gib
from fctune.runs.sinks import SinkGroup
from fctune.training import loop
from fctune.training.callbacks.base import Callback
from fctune.training.loop import build_loader, train
from fctune.training.setup import start_state
from fctune.training.step import LaunchedStep
from tests.apps.acceptance.harness import run as run_acceptance
from tests.conftest import TINY_BASE
from tests.models.model_samples import load_reference
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_kind_on_rank
from tests.training.training_runs import build_trainable, make_config


class SavingCallback(Callback):
    """Saves asynchronously after every step, and keeps copies of what it saves."""

    def __init__(self, saver: Saver, collect: Callable[[], dict[str, Any]]):
        self.saver, self.collect = saver, collect
        self.copies: dict[int, dict[str, torch.Tensor]] = {}

    def before_optimizer_update(self, step: int) -> None:
        self.saver.wait_staged()

    def on_step_end(self, step: int, is_last: bool) -> bool:
        def write(folder: Path, tensors: Any, _: Any, group: Any) -> list[FileRecord]:
            return write_shards(folder, tensors, group)

        tensors = self.collect()
        self.saver.start("sharded", step, tensors, {}, write)
        self.copies[step] = {name: local(tensor).clone() for name, tensor in tensors.items()}
        return False


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_while_training(world: World, config: RunConfig, path: Path, folder: Path) -> int:
    """Return the number of tensors of this rank that were compared with what was live when they were saved."""
    model, gradient_sync = build_trainable(config, world)
    state = start_state(model, config, 4, gradient_sync)
    store = CheckpointStore(folder, keep_last=9)
    callback = SavingCallback(Saver(store, world, True), lambda: collect_tensors(model, state.optimizer))
    train(config, state, build_loader(config, open_prepared(path)), 4, world, SinkGroup(), [callback])
    callback.saver.close()
    num_compared = 0
    for step, copies in callback.copies.items():
        loaded = {name: torch.zeros_like(tensor) for name, tensor in callback.collect().items()}
        read_shards_(store.path("sharded", step), loaded)
        for name, copy in copies.items():
            assert torch.equal(local(loaded[name]).to(copy.device), copy), (world.rank, step, name)
            num_compared += 1
    return num_compared


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_saved_weights_equal_the_live_ones_bit_for_bit_on_every_rank(
    mode: str, device_type: str, num_ranks: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8} if device_type == "cuda" else {}
    model = make_model("llama", **sizes)
    settings: dict[str, Any] = {"global_batch_size": 4 * num_ranks, "max_steps": 4, "epochs": 9, "adapter": None}
    settings |= {"parallel": {"mode": mode}, "validation": {"every": 0}, "precision": "fp32"}
    data = {"packed": True, "sources": [{"path": "synthetic:train:24:3"}], "validation_share": 0.0}
    config = make_config(model, tmp_path, data=data, **settings)
    prepared = prepare(config.data, model, tmp_path / "prepared")
    counts = run_ranks(save_while_training, num_ranks, config, prepared.path, tmp_path / "saves")
    assert all(count > 4 * 60 for count in counts)  # weights and optimizer state of two blocks at least, four times


@pytest.mark.parametrize("changes", [[], ["parallel.context=2", "activation_checkpointing.mlp_tiles=8"]], ids=str)
@pytest.mark.parametrize("device_type", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    changes: list[str], num_ranks: int, tmp_path: Path
) -> None:
    """On CPU: tests/faults, and tests/training/test_context_ranks.py for ranks that share rows."""
    if changes and num_ranks % 2:
        pytest.skip("needs an even number of GPUs")
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    options = ["max_steps=4", "epochs=9", "precision=fp32", "checkpoint.every=2"]
    resumed = [f"resume={whole / 'run' / 'checkpoints' / 'checkpoint-2'}", *changes]
    for folder, more in ((whole, []), (rest, resumed)):
        results = run_ranks(run_kind_on_rank, num_ranks, arguments_for(folder, *options, *more), "lora")
        assert [result["code"] for result in results] == [0] * num_ranks, results
    one, other = (load_file(f / "run" / "export" / "adapter" / "adapter_model.safetensors") for f in (whole, rest))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-3, atol=1e-6)


def train_without_waits(world: World, config: RunConfig, path: Path) -> None:
    """Train in which CUDA raises an error wherever the host waits while a step is launched, after the first ones."""
    model, gradient_sync = build_trainable(config, world)
    state, loader = start_state(model, config, 6, gradient_sync), build_loader(config, open_prepared(path))
    launch, num_steps = loop.launch_step, 0

    def launch_step(*arguments: Any, **options: Any) -> LaunchedStep:
        nonlocal num_steps
        num_steps += 1
        assert options["guard"] is not None
        torch.cuda.set_sync_debug_mode("error" if num_steps > 2 else "default")  # the first ones allocate
        try:
            return launch(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    loop.launch_step = launch_step
    train(config, state, loader, 6, world, SinkGroup())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_host_waits_nowhere_in_a_step(mode: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 1e-3, "fused": True}
    changes = {"precision": "bf16", "optimizer": optimizer, "validation": {"every": 0}, "parallel": {"mode": mode}}
    changes |= {"run_ahead": True}
    config = make_config(make_model(), tmp_path, data={"packed": True}, **changes)
    path = prepare(config.data, Path(config.model.path), tmp_path / "prepared").path
    run_ranks(train_without_waits, torch.cuda.device_count(), config, path)


@pytest.mark.gpu
def test_losses_and_gradients_of_every_kernel_equal_float64(tmp_path: Path) -> None:
    from benchmarks.gpu_correctness import SHAPE, check
    from benchmarks.workload import write_model

    write_model(tmp_path, SHAPE, has_weights=True, num_texts=200)
    results = check(tmp_path, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert all(one["ok"] for one in results.values()), results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_losses_equal_those_of_transformers(
    family: str,
    dtype: torch.dtype,
    device_type: str,
    capability: tuple[int, int] | None,
    make_model: Callable[..., Path],
) -> None:
    path, device = make_model(family), torch.device(device_type)
    architecture = read_architecture(path)
    kernel, _ = choose_attention_kernel(device_type, dtype, 16, capability)
    model = build_model(architecture, 256, PrecisionPolicy.uniform(dtype), kernel)
    materialize_(model, device)
    load_base_(model, path)
    lengths = [[40, 24, 0], [30, 33, 1]]
    tokens = torch.randint(architecture.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    reference, total = load_reference(path), 0.0
    labels, positions = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for row, parts in enumerate(lengths):
        at = 0
        for length in parts:
            part = tokens[row : row + 1, at : at + length]
            if length > 1:
                labels[row, at : at + length - 1] = part[0, 1:]
                total += reference(part, labels=part).loss.item() * (length - 1)
            positions[row, at : at + length] = torch.arange(length)
            at += length
    bounds = make_bounds(lengths, kernel).to(device)
    loss = model.eval()(tokens.to(device), positions.to(device), bounds, labels=labels.to(device))
    assert loss.item() == pytest.approx(total, rel=1e-4 if dtype is torch.float32 else 5e-3)


def test_greedy_answers_equal_those_of_single_prompts_on_the_cpu(device_type: str) -> None:
    prompts = [Conversation(case.messages, case.tools, case.id) for case in iter_cases(12, 5)]
    texts = []
    for device, batch_size in (("cpu", 1), (device_type, 4)):
        engine = LocalEngine(TINY_BASE, batch_size=batch_size, device=torch.device(device))
        engine.model.float()
        texts.append({answer.index: answer.text for answer in engine.answer(make_prompts(prompts, 24))})
    same = sum(texts[0][index] == texts[1][index] for index in texts[0])
    assert same >= len(prompts) - 1


@pytest.mark.gpu
def test_every_gpu_reports_its_state_and_memory() -> None:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        held = torch.ones(2**26, device=device)
        reading = read_device(index)
        assert reading is not None, "install nvidia-ml-py: pip install '.[telemetry]'"
        assert torch.cuda.get_device_name(device) == reading.name
        assert reading.memory_used_bytes is not None
        assert reading.memory_used_bytes > 2**28
        assert reading.power_w
        sampler = DeviceSampler(lambda index=index: read_device(index), every_s=0.05)
        torch.cuda.synchronize(device)
        sampler.close()
        assert sampler.take() is not None
        assert peak_memory_gib(device) >= active_memory_gib(device) >= 0.25
        del held


@pytest.mark.gpu
def test_the_machines_gpus_pass_an_acceptance_run(tmp_path: Path) -> None:
    changes = ["device=cuda", "compute.dtypes=[bf16, fp32]", "compute.size=4096"]
    done = run_acceptance(tmp_path, *changes, ranks=torch.cuda.device_count(), limit_s=300)
    assert done.result is not None
    failed = {name: check for name, check in done.checks.items() if check["status"] == "FAIL"}
    assert not failed
    assert not done.blamed
