"""Compiled blocks are compiled in the first step and the first validation, and never again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fctune.config.schema import RunConfig
from fctune.data.prepared_set import open_prepared, prepare
from fctune.distributed import World
from fctune.parallel.activations import compile_blocks_
from fctune.telemetry.sinks import SinkGroup
from fctune.training.callbacks.base import Callback
from fctune.training.loop import build_loader, count_steps, train
from fctune.training.setup import start_state
from tests.models.model_samples import load_model
from tests.ranks import run_ranks
from tests.training.training_runs import build_trainable, make_config


class GraphCounter(Callback):
    """Compiler backend that counts the graphs it gets until the end of each step, with its validation."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward

    def on_step_end(self, step: int, is_last: bool) -> bool:
        self.counts.append(self.num_graphs)
        return False


def count_graphs(world: World, config: RunConfig, path: Path) -> dict[str, Any]:
    """Train for several epochs, capturing graphs without generating code for them."""
    counter = GraphCounter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
        # By this size of its first bucket, DDP would split the graphs of an 8B model at rank 80.
        patch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
        model, gradient_sync = build_trainable(config, world)
        loader = build_loader(config, open_prepared(path))
        num_steps = count_steps(config, loader, world)
        state = start_state(model, config, num_steps, gradient_sync)
        train(config, state, loader, num_steps, world, SinkGroup(), [counter])
    layouts = {
        tuple(batch.lengths or ())
        for step in range(1, num_steps + 1)
        for batch in loader.micro_batches(loader.step_at(step), world.rank, world.world_size, config.micro_batch_size)
    }
    return {
        "graphs": counter.counts,
        "breaks": dict(counters["graph_break"]),
        "layouts": len(layouts),
        "epochs": num_steps / loader.steps_per_epoch,
    }


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {}),
        pytest.param(
            2,
            {"activation_checkpointing": {"fraction": 0.5}, "parallel": {"mode": "fsdp"}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            {
                "data": {"packed": False, "pad_to": "seq_len", "sources": [{"path": "synthetic:train:25:3"}]},
                "parallel": {"mode": "ddp"},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["packed", "checkpointed and sharded", "unpacked and replicated"],
)
def test_graphs_are_few_and_constant_over_layouts_epoch_ends_and_validation(
    world_size: int, changes: dict[str, Any], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    data = {"packed": True, "seq_len": 512, "sources": [{"path": "synthetic:train:60:3"}]} | changes.get("data", {})
    sizes = {"global_batch_size": 7, "micro_batch_size": 2, "epochs": 2, "max_steps": None}
    # Seven packs a step leave a micro-batch of one row, and on two ranks one without rows.
    settings = {"compile": True, "precision": "fp32", "validation": {"every": 2}} | sizes | changes
    config = make_config(make_model("llama", num_hidden_layers=4), tmp_path, **(settings | {"data": data}))
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
    for result in run_ranks(count_graphs, world_size, config, prepared.path):
        _, first, *later = result["graphs"]  # the second step has the first validation
        assert result["epochs"] == 2
        assert len(later) >= 4
        assert later == [first] * len(later)
        assert first <= (5 if "activation_checkpointing" in changes else 3)
        assert not result["breaks"]
        if data["packed"]:
            assert result["layouts"] > 8


def test_a_block_that_is_compiled_too_often_fails_the_run(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(make_model("llama"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))

    def run_many_shapes() -> None:
        for length in (8, 16, 32):
            for num_rows in (1, 2):
                with torch.set_grad_enabled(num_rows == 1):
                    model(torch.ones(num_rows, length, dtype=torch.long))

    torch._dynamo.reset()
    # torch's own patch restores its settings, which pytest's would delete.
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False, optimize_ddp=True):
        compile_blocks_(model)
        torch._dynamo.config.recompile_limit = 2
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            run_many_shapes()
    torch._dynamo.reset()
