"""On a CUDA device a step waits once, and memory-saving options do not change training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.prepared_set import open_prepared, prepare
from fctune.runs.sinks import SinkGroup
from fctune.training.callbacks.base import Callback
from fctune.training.loop import build_loader, train
from fctune.training.setup import start_state
from tests.models.tiny_models import copy_tokenizer, save_tiny_model
from tests.ranks import run_ranks
from tests.training.training_runs import ADAPTER, Recorder, build_trainable, make_config


def _report_waits(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


class SyncCounter(Callback):
    """Counts the synchronizations of host and device in each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step_start(self, step: int) -> None:
        self._context = warnings.catch_warnings(record=True)
        self._seen = self._context.__enter__()
        warnings.simplefilter("always")
        _report_waits("warn")

    def after_optimizer_update(self, step: int) -> None:
        _report_waits("default")
        self.counts.append(sum("synchroniz" in str(w.message) for w in self._seen or []))
        self._context.__exit__(None, None, None)


def run_steps(world: World, config: RunConfig, path: Path) -> dict[str, Any]:
    """Return the loss and the number of synchronizations of each step."""
    model, gradient_sync = build_trainable(config, world)
    recorder, counter = Recorder(), SyncCounter()
    train(
        config,
        start_state(model, config, 4, gradient_sync),
        build_loader(config, open_prepared(path)),
        4,
        world,
        SinkGroup(recorder),
        [counter],
    )
    return {"losses": [m["loss"] for m in recorder.metrics], "waits": counter.counts, "kernel": model.attention_kernel}


@pytest.fixture
def run(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def start(**changes: Any) -> dict[str, Any]:
        path = make_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
        settings = {
            "data": {"packed": True},
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "max_steps": 4,
            "epochs": 9,
        }
        settings |= {"validation": {"every": 0}, "precision": "bf16"} | changes
        config = make_config(path, tmp_path, **settings)
        prepared = prepare(config.data, path, tmp_path / "prepared")
        result: dict[str, Any] = run_ranks(run_steps, 1, config, prepared.path)[0]
        return result

    return start


@pytest.mark.gpu
def test_the_host_waits_for_the_device_once_per_step(run: Callable[..., dict[str, Any]]) -> None:
    result = run(optimizer={"fused": True})
    assert result["kernel"] == "varlen"
    assert result["waits"][1:] == [1, 1, 1]


def on_cuda(changes: dict[str, Any]) -> Any:
    return pytest.param("cuda", changes, marks=pytest.mark.gpu, id=f"cuda-{changes}")


RECOMPUTED = {"activation_checkpointing": {"fraction": 1.0}}


@pytest.mark.parametrize(
    ("device_type", "changes"),
    [
        # That the test itself works; tests/training covers recomputing on the CPU.
        pytest.param("cpu", RECOMPUTED, id="cpu-recomputed", marks=pytest.mark.slow),
        *(
            on_cuda(changes)
            for changes in (
                {"compile": True},
                RECOMPUTED,
                {"activation_checkpointing": {"fraction": 1.0, "offload": True}},
                {"activation_checkpointing": {"fraction": 1.0, "offload": True, "mlp_tiles": 8}},
                {"activation_checkpointing": {"fraction": 0.5, "mlp_tiles": 8}, "compile": True},
                {"activation_checkpointing": {"fraction": 0.5, "policy": "op"}, "compile": True},
                {"adapter": {"base": "float8"}},
                {"adapter": {"base": "nf4"}},
                {"adapter": {"base": "float8"}, "compile": True},
                {"adapter": {"base": "nf4"}, "compile": True},
                {"parallel": {"mode": "fsdp"}},
                {"parallel": {"mode": "fsdp", "cpu_offload": True}},
                {"precision": "fp32"},
            )
        ),
    ],
    indirect=["device_type"],
)
def test_memory_saving_options_change_losses_only_slightly(
    device_type: str, changes: dict[str, Any], run: Callable[..., dict[str, Any]]
) -> None:
    plain, changed = run(), run(**changes)
    assert changed["losses"] == pytest.approx(plain["losses"], rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16_mixed", "float8", "float8_mixed"])
def test_all_weights_train_in_every_precision(precision: str, run: Callable[..., dict[str, Any]]) -> None:
    optimizer = {"lr": 1e-3, "fused": True}
    plain = run(adapter=None, precision="fp32", optimizer=optimizer)
    changed = run(adapter=None, precision=precision, optimizer=optimizer, compile=True)
    assert changed["losses"] == pytest.approx(plain["losses"], rel=0.02)


@pytest.mark.parametrize(
    ("model_type", "is_compiled", "mlp_tiles"),
    [
        pytest.param("llama", False, 1, marks=pytest.mark.thorough),
        pytest.param("llama", True, 1, marks=pytest.mark.gpu),
        pytest.param("llama", True, 8, marks=pytest.mark.gpu),
        pytest.param("gemma3_text", False, 8, marks=pytest.mark.gpu),  # windows
        pytest.param("gpt_oss", False, 1, marks=pytest.mark.gpu),  # sinks
    ],
)
def test_rows_that_gpus_share_train_as_whole_rows(
    model_type: str, is_compiled: bool, mlp_tiles: int, num_ranks: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    if num_ranks % 2:
        pytest.skip("needs an even number of GPUs")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    path, adapter = tmp_path / "base", ADAPTER
    if model_type == "llama":
        path = make_model("llama", **sizes)
    else:
        save_tiny_model(model_type, path, **sizes | {"head_dim": 64} | copy_tokenizer(path))
        adapter = ADAPTER | {"modules": ["q_proj", "o_proj"]}
    losses = []
    for context in (1, 4 if num_ranks % 4 == 0 else 2):
        config = make_config(
            path,
            tmp_path,
            data={"packed": True},
            global_batch_size=4,
            max_steps=4,
            epochs=9,
            validation={"every": 0},
            precision="bf16",
            compile=is_compiled,
            adapter=adapter,
            activation_checkpointing={"fraction": 0.5, "mlp_tiles": 1 if context == 1 else mlp_tiles},
            parallel={"mode": "fsdp", "context": context},
        )
        prepared = prepare(config.data, path, tmp_path / "prepared")
        losses.append(run_ranks(run_steps, num_ranks, config, prepared.path)[0]["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3 if model_type == "llama" else 2e-2)
