"""Compiled blocks are compiled in the first step and the first validation, and never again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.model import ModelSource
from fctune.config.sections.parallel import ActivationCheckpointingConfig
from fctune.data.prepared_set import open_prepared, prepare
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.lora import adapters_off, apply_lora_, init_adapters_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, parse_architecture
from fctune.parallel.activations import apply_activation_checkpointing_, compile_blocks_
from fctune.runs.sinks import SinkGroup
from fctune.training.callbacks.base import Callback
from fctune.training.loop import build_loader, count_steps, train
from fctune.training.setup import start_state
from tests.models import expert_samples, hybrid_samples
from tests.models.dense_samples import FAMILIES, read_raw
from tests.models.expert_samples import MODEL_TYPES
from tests.models.hybrid_samples import HYBRIDS
from tests.models.model_samples import load_model
from tests.ranks import run_ranks
from tests.training.training_runs import Recorder, build_trainable, make_config


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
    counter, sink = GraphCounter(), Recorder()
    torch._dynamo.register_backend(counter, name=f"counter_{id(counter)}")
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_BACKEND", f"counter_{id(counter)}")
        # By this size of its first bucket, DDP would split the graphs of an 8B model at rank 80.
        patch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
        model, gradient_sync = build_trainable(config, world)
        loader = build_loader(config, open_prepared(path))
        num_steps = count_steps(config, loader, world)
        state = start_state(model, config, num_steps, gradient_sync)
        train(config, state, loader, num_steps, world, SinkGroup(sink), [counter])
    layouts = {
        tuple(batch.lengths or ())
        for step in range(1, num_steps + 1)
        for batch in loader.micro_batches(loader.step_at(step), world.rank, world.world_size, config.micro_batch_size)
    }
    return {
        "graphs": counter.counts,
        "metric": [line["compiled_graphs"] for line in sink.metrics],
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
        assert result["metric"] == result["graphs"]
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


# Families whose blocks differ in kind; the others are compiled in slow tests.
_QUICK = ("gemma3_text",)
_THOROUGH = ("beam", "granitemoehybrid", "qwen3", "qwen3_moe", "smollm3", "qwen3_5_text", "nemotron_h")
_FAMILIES = dict.fromkeys([*FAMILIES, *MODEL_TYPES, *HYBRIDS, "ministral3", "beam"])
_DEPTH = 20


def make_deep_config(model_type: str) -> dict[str, Any]:
    """Return config.json of a tiny model with many blocks, of which each kind comes again and again."""
    raw: dict[str, Any]
    if model_type in HYBRIDS:
        raw = hybrid_samples.make_config(model_type).to_dict()
    elif model_type in (*MODEL_TYPES, "beam"):
        raw = expert_samples.make_config(model_type).to_dict()
    else:
        lists = {name: value for name, value in FAMILIES.get(model_type, {}).items() if isinstance(value, list)}
        sizes = {"head_dim": 16} if model_type == "llama" else {}  # which torchtune builds
        return read_raw(model_type, num_hidden_layers=_DEPTH, **repeat_by_layer(lists, 3), **sizes)
    depth = raw.get("num_hidden_layers") or len(raw["layers_block_type"])
    return repeat_by_layer(raw, depth) | {"num_hidden_layers": _DEPTH}


def repeat_by_layer(values: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return values with as many entries for more layers in the lists that have one for each of ``depth`` layers."""
    return {
        name: (value * _DEPTH)[:_DEPTH]
        if isinstance(value, list) and len(value) == depth and isinstance(value[0], str | int)
        else value
        for name, value in values.items()
    }


def build_deep(model_type: str, source: ModelSource, adapter: AdapterConfig | None, fraction: float) -> CausalLM:
    """Build a deep model with compiled blocks and random weights, of which a fraction recomputes its activations."""
    architecture = parse_architecture("config.json", make_deep_config(model_type), source)
    model = build_model(architecture, 64, PrecisionPolicy.uniform(torch.float32))
    if adapter is not None:
        apply_lora_(model, adapter)
    if model_type == "qwen3_moe":
        model.balance_routers_(0.1)
    apply_activation_checkpointing_(model, ActivationCheckpointingConfig(fraction=fraction), "cpu")
    compile_blocks_(model)
    materialize_(model, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05, generator=generator)
    init_adapters_(model, 0)
    return model


def count_graphs_of_phases(model: CausalLM, counter: GraphCounter) -> list[int]:
    """Return the number of graphs after a step, another layout, validation and reference, and all of it again."""
    layouts = [[[30, 20, 14, 0], [50, 10, 4, 0]], [[15, 15, 15, 19], [64, 0, 0, 0]]]
    tokens = torch.randint(3, 90, (2, 64), generator=torch.Generator().manual_seed(1))

    def run(lengths: list[list[int]], is_training: bool) -> None:
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        model.train(is_training)
        with torch.set_grad_enabled(is_training):
            loss = model(tokens, positions, model.make_bounds(lengths), tokens, row_keys=torch.tensor([1, 2]))
        if is_training:
            if model.router_balance is not None:
                loss = loss + model.router_balance.loss()
                model.router_balance.start_step()
            loss.backward()
            model.zero_grad()
        counter.counts.append(counter.num_graphs)

    for _ in range(2):
        for lengths in layouts:
            run(lengths, is_training=True)
        run(layouts[0], is_training=False)
        with adapters_off(model):
            run(layouts[1], is_training=False)
    return counter.counts


def list_deep_models() -> Iterator[Any]:
    lora = AdapterConfig(rank=4, alpha=8.0, dropout=0.1, modules="all-linear")
    for model_type in _FAMILIES:
        for source in ("transformers", "torchtune") if model_type == "llama" else ("transformers",):
            for adapter, fraction in ((lora, 0.5), (None, 0.0), (lora, 0.0), (None, 0.5)):
                name = f"{model_type}-{source}-{'full' if adapter is None else 'lora'}-{fraction:g}"
                is_typical = adapter is not None and fraction
                is_further = model_type in _THOROUGH or source == "torchtune"
                marks = [pytest.mark.slow] if not (is_typical and (model_type in _QUICK or is_further)) else []
                marks += [pytest.mark.thorough] if is_typical and is_further else []
                yield pytest.param(model_type, source, adapter, fraction, id=name, marks=marks)


@pytest.mark.thorough
@pytest.mark.parametrize(("model_type", "source", "adapter", "fraction"), list_deep_models())
def test_deep_models_of_each_family_share_the_graphs_of_their_blocks(
    model_type: str,
    source: ModelSource,
    adapter: AdapterConfig | None,
    fraction: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = GraphCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False, optimize_ddp=True):
        model = build_deep(model_type, source, adapter, fraction)
        first, second, _, all_phases, *later = count_graphs_of_phases(model, counter)
    torch._dynamo.reset()
    assert first == second <= _DEPTH // 2
    assert later == [all_phases] * len(later)
