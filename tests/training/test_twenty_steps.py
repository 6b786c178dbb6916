"""Twenty training steps match plain reference loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fctune.base.distributed import World
from fctune.checkpoint.tensors import collect_tensors, init_optimizer_state_
from fctune.config.schema import RunConfig
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import PreparedSet, open_prepared, prepare
from fctune.models.base_weights import load_base_
from fctune.models.sources import build_model, read_architecture
from fctune.runs.sinks import SinkGroup
from fctune.training.callbacks.base import Callback
from fctune.training.loop import build_loader, train
from fctune.training.prefetch import make_inputs
from fctune.training.setup import start_state
from tests.models.model_samples import load_reference
from tests.ranks import run_ranks
from tests.training.training_runs import Recorder, build_trainable, make_config

NUM_STEPS = 20
LR = 2e-3
WEIGHT_DECAY = 5.0  # 1 % a step: losses show which weights decay
CLIP = 0.5
TWENTY_STEPS: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "epochs": 9,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": LR, "weight_decay": WEIGHT_DECAY},
    "clip_grad_norm": CLIP,
    "validation": {"every": 0},
}


class FirstWeights(Callback):
    """Copies the trainable weights before the first update."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.weights: dict[str, Any] = {}

    def before_optimizer_update(self, step: int) -> None:
        if not self.weights:
            trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            self.weights = {n: p.detach().clone().numpy() for n, p in trained.items() if not hasattr(p, "full_tensor")}


def train_ours(world: World, config: RunConfig, path: Path) -> tuple[list[float], list[float], dict[str, Any]]:
    """Return losses, gradient norms and the initial weights."""
    model, gradient_sync = build_trainable(config, world)
    recorder, first = Recorder(), FirstWeights(model)
    train(
        config,
        start_state(model, config, NUM_STEPS, gradient_sync),
        build_loader(config, open_prepared(path)),
        NUM_STEPS,
        world,
        SinkGroup(recorder),
        [first],
    )
    metrics = recorder.metrics
    return [m["loss"] for m in metrics], [m["grad_norm"] for m in metrics], first.weights


def plain_step(model: Any, optimizer: Any, prepared: PreparedSet, packs: tuple[int, ...]) -> tuple[float, float]:
    """Take one step over the conversations of the packs, one forward pass each."""
    optimizer.zero_grad()
    losses: list[Tensor] = []
    total = 0.0
    for member in (m for pack in packs for m in prepared.members("train", pack)):
        span = slice(*prepared.offsets[member : member + 2])
        tokens = torch.from_numpy(prepared.tokens[span].astype(np.int64))
        weights = torch.from_numpy(prepared.weights[prepared.codes[span]])[1:]
        logits = model(tokens[None]).logits[0, :-1]
        losses.append((cross_entropy(logits, tokens[1:], reduction="none") * weights).sum())
        total += float(weights.sum())
    loss = torch.stack(losses).sum() / total
    loss.backward()
    norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], CLIP)
    optimizer.step()
    return float(loss.detach()), float(norm)


def group_as_trainer_does(model: nn.Module) -> list[dict[str, Any]]:
    """Group the trained parameters as transformers' Trainer does for its optimizer."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [{"params": [p for name, p in trained.items() if name in decayed]}]
    return [*groups, {"params": [p for name, p in trained.items() if name not in decayed], "weight_decay": 0.0}]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "kind", "is_packed", "world_size"),
    [
        ("llama", "lora", False, 2),
        pytest.param("llama", "full", True, 1, marks=pytest.mark.thorough),
        pytest.param("qwen2", "lora", True, 1, marks=pytest.mark.thorough),
        ("qwen2", "full", False, 2),
    ],
)
def test_twenty_steps_match_transformers_and_peft(
    family: str, kind: str, is_packed: bool, world_size: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_model(family)
    adapter = {"rank": 4, "alpha": 8, "dropout": 0.0, "modules": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]}
    config = make_config(
        path,
        tmp_path,
        adapter=adapter if kind == "lora" else None,
        precision="fp32",
        parallel={"mode": "ddp"},
        data={"packed": is_packed, "call_weight": 2.0, "overlong": "drop"},
        global_batch_size=1 if is_packed else 2,
        micro_batch_size=1,
        **TWENTY_STEPS,
    )
    prepared = prepare(config.data, path, tmp_path / "prepared")
    losses, norms, started = run_ranks(train_ours, world_size, config, prepared.path)[0]
    assert losses[-1] < losses[0] - 0.1

    theirs = load_reference(path).train()
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        theirs = get_peft_model(theirs, LoraConfig(r=4, lora_alpha=8, target_modules=adapter["modules"]))
        parameters = dict(theirs.named_parameters())
        for name, weight in started.items():
            if name.endswith("lora_a"):
                key = read_architecture(path).to_peft_name(name).replace(".weight", ".default.weight")
                parameters[key].data.copy_(torch.from_numpy(weight))
    optimizer = torch.optim.AdamW(group_as_trainer_does(theirs), lr=LR, weight_decay=WEIGHT_DECAY)
    loader = GlobalLoader(prepared, "train", config.global_batch_size, config.seed)
    for step in range(NUM_STEPS):
        loss, norm = plain_step(theirs, optimizer, prepared, loader.step_at(step + 1).packs)
        assert losses[step] == pytest.approx(loss, abs=1e-4), step
        assert norms[step] == pytest.approx(norm, rel=2e-3), step


@pytest.mark.slow
def test_mixed_precision_matches_float32_weights_computed_in_bfloat16(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_model("llama")
    config = make_config(
        path,
        tmp_path,
        adapter=None,
        precision="bf16_mixed",
        global_batch_size=3,
        micro_batch_size=1,
        **TWENTY_STEPS | {"optimizer": TWENTY_STEPS["optimizer"] | {"weight_decay": 0.01}},
    )
    prepared = prepare(config.data, path, tmp_path / "prepared")
    losses, norms, _ = run_ranks(train_ours, 1, config, prepared.path)[0]

    world = World(0, 1, 0, torch.device("cpu"))
    config.precision = "bf16"
    rounded, kept = (plain_model(config, path, precision) for precision in ("bf16", "fp32"))
    vectors = [p for p in kept.parameters() if p.ndim == 1]
    groups = [{"params": [p for p in kept.parameters() if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=0.01)
    loader = GlobalLoader(prepared, "train", config.global_batch_size, config.seed)
    for number in range(1, NUM_STEPS + 1):
        step = loader.step_at(number)
        for narrow, wide in zip(rounded.parameters(), kept.parameters(), strict=True):
            narrow.data.copy_(wide.data)
            wide.grad = torch.zeros_like(wide)
        total = 0.0
        for batch in loader.micro_batches(step, 0, 1, 1):
            loss = rounded(**make_inputs(batch, rounded.make_bounds).arguments(world.device))
            (loss / loader.totals(step).weight_sum).backward()
            total += float(loss.detach()) / loader.totals(step).weight_sum
            for narrow, wide in zip(rounded.parameters(), kept.parameters(), strict=True):
                assert wide.grad is not None
                assert narrow.grad is not None
                wide.grad += narrow.grad.float()
                narrow.grad = None
        norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP)
        optimizer.step()
        assert losses[number - 1] == pytest.approx(total, rel=1e-4), number
        assert norms[number - 1] == pytest.approx(float(norm), rel=1e-3), number


def plain_model(config: RunConfig, path: Path, precision: str) -> Any:
    from fctune.models.causal_lm import materialize_
    from fctune.models.precision import choose_precision

    dtypes = choose_precision(precision, False, "cpu")  # type: ignore[arg-type]
    model = build_model(read_architecture(path), config.data.seq_len, dtypes)
    materialize_(model, torch.device("cpu"))
    load_base_(model, path)
    return model.train()


def test_a_checkpoint_of_one_parameter_group_has_the_tensors_of_two(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Runs that began before norms were exempt from weight decay resume."""
    path = make_model("qwen2")
    config = make_config(path, tmp_path, adapter=None, precision="fp32", **TWENTY_STEPS)
    decays, grouped, alone = run_ranks(collect_names, 1, config)[0]
    assert decays == [WEIGHT_DECAY, 0.0]
    assert grouped == alone


def collect_names(world: World, config: RunConfig) -> tuple[list[float], set[str], set[str]]:
    model, gradient_sync = build_trainable(config, world)
    grouped = start_state(model, config, NUM_STEPS, gradient_sync).optimizer
    alone = torch.optim.AdamW(model.parameters(), lr=LR)
    for optimizer in (grouped, alone):
        init_optimizer_state_(optimizer)
    names = [set(collect_tensors(model, optimizer)) for optimizer in (grouped, alone)]
    return [group["weight_decay"] for group in grouped.param_groups], names[0], names[1]
