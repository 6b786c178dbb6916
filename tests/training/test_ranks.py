"""Losses and weights do not depend on the number of ranks or the parallel layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import prepare
from fctune.models.sources import read_architecture
from tests.ranks import run_ranks
from tests.training.training_runs import ADAPTER, MEASURED, WIDE, compare, make_config, run_training

MODELS: dict[str | None, dict[str, Any]] = {None: {}, "untied": {}, "tied": {"tie_word_embeddings": True}, "wide": WIDE}


class Training(NamedTuple):
    """A training on some ranks, and how closely it must match the same training of one process."""

    name: str
    world_size: int
    changes: dict[str, Any]  # of its config and of one process's
    own: Mapping[str, Any] = MappingProxyType({})  # of its config alone
    holds_gradients: bool = True
    rtol: float = 1e-9
    atol: float = 0.0
    is_thorough: bool = False


class Wanted(NamedTuple):
    """A training to run, with all changes of its config."""

    changes: dict[str, Any]
    holds_gradients: bool = True


def run_in_turn(world: World, wanted: Sequence[tuple[RunConfig, Path, bool]]) -> list[dict[str, Any]]:
    """Train one config after another: the processes start, and plan each sharded tensor's operations, once."""
    return [run_training(world, *each) for each in wanted]


@pytest.fixture(scope="module")
def runs(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Train configs on a number of ranks, each combination once: ``runs(2, [Wanted({"seed": 1})])``."""
    output = tmp_path_factory.mktemp("ranks")
    done: dict[str, dict[str, Any]] = {}

    def make(wanted: Wanted) -> tuple[RunConfig, Path, bool]:
        changes = {"max_steps": 2, "validation": {"every": 2}} | wanted.changes
        config = make_config(make_model(**MODELS[changes.pop("model", None)]), output, **changes)
        return config, prepare(config.data, Path(config.model.path), output / "prepared").path, wanted.holds_gradients

    def run(world_size: int, wanted: Sequence[Wanted]) -> list[dict[str, Any]]:
        keys = [f"{world_size} {each}" for each in wanted]
        missing = {key: each for key, each in zip(keys, wanted, strict=True) if key not in done}
        if missing:
            results = run_ranks(run_in_turn, world_size, [make(each) for each in missing.values()])[0]
            done.update(zip(missing, results, strict=True))
        return [done[key] for key in keys]

    return run


# Layouts of two, three and four ranks. A global batch of 7 with micro-batches of 2 accumulates over several of them.
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    (f"{name} on {world_size}", world_size, {"mode": mode} | ({"replicate": replicate} if replicate else {}))
    for mode, replicate, name, worlds in (
        ("ddp", None, "ddp", (2, 3, 4)),
        ("fsdp", None, "fsdp", (1, 2, 3, 4)),
        ("hsdp", 2, "hsdp of 2 copies", (2, 4)),
        ("hsdp", 4, "hsdp of 4 copies", (4,)),
        ("auto", None, "auto", (2,)),
    )
    for world_size in worlds
]
SHARDED: list[dict[str, Any]] = [{"mode": "ddp"}, {"mode": "fsdp"}, {"mode": "hsdp", "replicate": 2}]
LAYOUTS_OF_ROWS = ("ddp on 2", "fsdp on 2", "fsdp on 4", "hsdp of 2 copies on 4")
ROWS = ADAPTER | {"modules": ["q_proj", "down_proj"], "train_tokens": ["<tool_call>", "</tool_call>", "<|eot_id|>"]}
# One row at a time, so that each is rounded alike wherever it runs; sums are float32.
MIXED: dict[str, Any] = {"adapter": None, "precision": "bf16_mixed", "micro_batch_size": 1}
MIXED["optimizer"] = {"_component_": "torch.optim.SGD", "lr": 0.1}


def list_trainings() -> Iterator[Training]:
    for name, world_size, layout in LAYOUTS:
        parallel = {"parallel": layout}
        further = name in ("ddp on 4", "fsdp on 4", "hsdp of 4 copies on 4", "auto on 2")
        yield Training(f"all weights, {name}", world_size, {"adapter": None}, parallel, is_thorough=further)
        yield Training(f"adapters, {name}", world_size, {"adapter": ADAPTER}, parallel, is_thorough=further)
        for model in ("untied", "tied") if name in LAYOUTS_OF_ROWS else ():
            further = name == "fsdp on 4" or (model, world_size) == ("tied", 4)
            rows = {"adapter": ROWS, "model": model}
            yield Training(f"token rows, {model}, {name}", world_size, rows, parallel, is_thorough=further)
    for layout in SHARDED:
        mode, parallel = layout["mode"], {"parallel": layout}
        dora = {"adapter": ADAPTER | {"dora": True}}
        yield Training(f"DoRA, {mode}", 4, dora, parallel, is_thorough=mode != "fsdp")
        for base, quick in (("nf4", "fsdp"), ("float8", "hsdp")):
            quantized = {"adapter": ADAPTER | {"base": base}, "model": "wide"}
            yield Training(f"{base} base, {mode}", 4, quantized, parallel, is_thorough=mode != quick)
        for policy, fraction, quick in (("block", 0.5, "fsdp"), ("op", 1.0, "hsdp")):
            checkpointing = {"activation_checkpointing": {"fraction": fraction, "policy": policy}}
            name = f"checkpointing by {policy}, {mode}"
            yield Training(name, 4, {}, parallel | checkpointing, is_thorough=mode != quick)
        for holds_gradients in (True, False):
            # After the first update, weights differ in their last float32 digit. Where one lies between two bfloat16
            # numbers it is rounded another way, by up to 1/256 of itself; how many are depends on the processor.
            name = f"mixed precision, {mode}, gradients {'held' if holds_gradients else 'scattered'}"
            yield Training(name, 4, MIXED, parallel, holds_gradients, 1e-3, 1e-4, mode != "hsdp")
        if mode != "ddp":
            name = f"large gradients scattered, {mode}"
            yield Training(name, 4, {"adapter": None}, parallel, holds_gradients=False, is_thorough=mode != "hsdp")
            gathered = {"parallel": layout | {"reshard_after_forward": False}}
            yield Training(f"weights kept gathered, {mode}", 4, {}, gathered, is_thorough=mode != "fsdp")
    # AdamW divides by the root of the second moment, so rounding of tiny gradients moves a weight by up to lr a step.
    yield Training("float32", 2, {"precision": "fp32"}, rtol=1e-4, atol=2e-3)
    yield Training("packed rows", 2, {"data": {"packed": True}, "global_batch_size": 3})
    yield Training("micro-batches of 7", 1, {}, {"micro_batch_size": 7})
    yield Training("a micro-batch of 4", 1, {"global_batch_size": 4, "micro_batch_size": 1}, {"micro_batch_size": 4})
    for mode in ("ddp", "fsdp"):
        eight = {"global_batch_size": 8, "micro_batch_size": 2}
        yield Training(f"two rows a rank, {mode}", 2, eight, {"parallel": {"mode": mode}})
        yield Training(f"one row a rank, {mode}", 4, eight, {"micro_batch_size": 1, "parallel": {"mode": mode}})


@pytest.mark.parametrize(
    ("world_size", "is_thorough"),
    [
        pytest.param(1, False, marks=pytest.mark.thorough),
        (2, False),
        pytest.param(3, False, marks=pytest.mark.thorough),
        pytest.param(4, False, marks=pytest.mark.thorough),
        pytest.param(2, True, marks=pytest.mark.thorough),
        pytest.param(4, True, marks=pytest.mark.thorough),
    ],
)
def test_ranks_train_as_one_process(
    runs: Callable[..., Any], make_model: Callable[..., Path], world_size: int, is_thorough: bool
) -> None:
    trainings = [each for each in list_trainings() if (each.world_size, each.is_thorough) == (world_size, is_thorough)]
    ones = runs(1, [Wanted(each.changes) for each in trainings])
    others = runs(world_size, [Wanted(each.changes | each.own, each.holds_gradients) for each in trainings])
    differing = {}
    for training, one, other in zip(trainings, ones, others, strict=True):
        try:
            compare(one, other, training.rtol, training.atol)
            check_details(training, one, other, make_model)
        except AssertionError as error:
            differing[training.name] = str(error)
    assert not differing


def check_details(
    training: Training, one: dict[str, Any], other: dict[str, Any], make_model: Callable[..., Path]
) -> None:
    """Check what holds for one kind of training alone."""
    adapter = training.changes.get("adapter")
    if training.name.startswith("adapters"):  # frozen weights are kept
        architecture = read_architecture(make_model())
        for name, weight in load_file(make_model() / "model.safetensors").items():
            ours = torch.from_numpy(other["weights"][name])
            if name.startswith("model.layers"):
                kind = next((kind for kind in ("q_proj", "k_proj") if kind in name), "v_proj")
                ours = architecture.to_hf_layout(f"layers.0.attn.{kind}.weight", ours)
            assert torch.equal(ours, weight.double()), name
    if adapter is ROWS:
        expected = {"model.embed_tokens.token_rows"}
        expected |= {"lm_head.token_rows"} if training.changes["model"] == "untied" else set()
        assert {name for name in one["weights"] if name.endswith("token_rows")} == expected
    if training.changes is MIXED:
        assert all(weight.dtype.name == "float32" for weight in other["weights"].values())
        for key in ("loss", "grad_norm"):  # before the first update, only the order of float32 sums differs
            assert math.isclose(one["metrics"][0][key], other["metrics"][0][key], rel_tol=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["lora", "full"])
@pytest.mark.parametrize("parallel", SHARDED, ids=lambda p: p["mode"])
def test_compiled_blocks_train_equally_on_any_layout(
    runs: Callable[..., Any], parallel: dict[str, Any], adapter: dict[str, Any] | None
) -> None:
    changes: dict[str, Any] = {"adapter": adapter, "data": {"packed": True}, "global_batch_size": 6}
    compiled = {"parallel": parallel, "compile": True, "activation_checkpointing": {"fraction": 0.5, "policy": "op"}}
    world_size = 4 if parallel["mode"] == "hsdp" else 2
    compare(*runs(1, [Wanted(changes)]), *runs(world_size, [Wanted(changes | compiled)]), rtol=1e-9, atol=0)


def test_training_twice_gives_the_same_metrics(runs: Callable[..., Any]) -> None:
    first, second = runs(2, [Wanted({}), Wanted({"log_every_n_steps": 3})])  # another key, the same training
    for a, b in zip(first["metrics"], second["metrics"], strict=True):
        for key in a.keys() - MEASURED:
            assert a[key] == b[key], key


def test_another_data_order_gives_other_losses(runs: Callable[..., Any]) -> None:
    first, second = runs(1, [Wanted({}), Wanted({"seed": 43})])
    assert first["metrics"][0]["loss"] != second["metrics"][0]["loss"]


def test_every_rank_runs_the_same_number_of_micro_batches(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    config = make_config(make_model(), tmp_path)
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
    loader = GlobalLoader(prepared, "train", 7, 42)
    for world_size in range(1, 9):
        for number in range(1, loader.steps_per_epoch + 1):
            shares = [loader.micro_batches(loader.step_at(number), rank, world_size, 2) for rank in range(world_size)]
            assert len({len(share) for share in shares}) == 1
