"""Losses of preference pairs equal a plain implementation and TRL's, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.preference import PreferenceConfig
from fctune.data.prepared_set import PreparedSet, prepare
from fctune.models.export import iter_merged
from fctune.models.lora import adapters_off
from fctune.runs.sinks import SinkGroup
from fctune.training.loop import build_loader, train
from fctune.training.preference import PreferenceObjective, log1mexp, pair_losses
from fctune.training.prefetch import make_inputs
from fctune.training.setup import start_state
from tests.models.model_samples import draw_tokens, load_model, load_reference
from tests.pair_rows import make_pairs, write_pairs
from tests.ranks import run_ranks
from tests.training.training_runs import Recorder, build_trainable, compare, make_config, run_training

CPU = torch.device("cpu")
LOSSES: list[dict[str, Any]] = [
    {"loss": "dpo", "beta": 0.3, "sft_weight": 0.5},
    {"loss": "dpo", "length_normalized": True, "label_smoothing": 0.1},
    {"loss": "ipo"},
    {"loss": "simpo"},
    {"loss": "orpo"},
]


def make_pair_config(model: Path, folder: Path, num_pairs: int = 8, **changes: Any) -> RunConfig:
    source = write_pairs(folder / "pairs.jsonl", make_pairs(num_pairs))
    data = {"sources": [{"path": str(source)}], "pairs": True, "packed": True, "seq_len": 1024}
    data |= changes.pop("data", {})
    defaults: dict[str, Any] = {"preference": {"loss": "dpo"}, "global_batch_size": 3, "micro_batch_size": 1}
    return make_config(model, folder, data=data, **defaults | changes)


def plain_logps(model: Any, prepared: PreparedSet, member: int) -> Tensor:
    """Return the log-probabilities of an answer's supervised tokens, by a forward pass of its own."""
    span = slice(*prepared.offsets[member : member + 2])
    tokens = torch.from_numpy(prepared.tokens[span].astype(np.int64))
    is_supervised = torch.from_numpy(prepared.weights[prepared.codes[span]] > 0)[1:]
    logps = log_softmax(model(tokens[None]).logits[0, :-1].double(), -1).gather(1, tokens[1:, None]).squeeze(1)
    return logps[is_supervised]


def plain_loss(pairs: list[tuple[Tensor, ...]], options: dict[str, Any]) -> float:
    """Return the mean loss of pairs of (chosen, rejected, reference's chosen, reference's rejected) by the papers."""
    beta = options.get("beta", 2.0 if options["loss"] == "simpo" else 0.1)
    total = 0.0
    for chosen, rejected, base_chosen, base_rejected in pairs:
        c, r, bc, br = (float(part.sum()) for part in (chosen, rejected, base_chosen, base_rejected))
        num_chosen, num_rejected = len(chosen), len(rejected)
        if options["loss"] == "dpo":
            if options.get("length_normalized"):
                h = beta * ((c - bc) / num_chosen - (r - br) / num_rejected)
            else:
                h = beta * ((c - bc) - (r - br))
            smoothing = options.get("label_smoothing", 0.0)
            total += (1 - smoothing) * math.log1p(math.exp(-h)) + smoothing * math.log1p(math.exp(h))
        elif options["loss"] == "ipo":
            total += ((c - bc) / num_chosen - (r - br) / num_rejected - 1 / (2 * beta)) ** 2
        elif options["loss"] == "simpo":
            total += math.log1p(math.exp(-(beta * (c / num_chosen - r / num_rejected) - 1.0)))
        else:
            odds = [math.exp(x) / (1 - math.exp(x)) for x in (c / num_chosen, r / num_rejected)]
            total += -beta * math.log(1 / (1 + odds[1] / odds[0]))
    loss = total / len(pairs)
    sft = -sum(float(p[0].sum()) for p in pairs) / sum(len(p[0]) for p in pairs)
    return loss + (1.0 if options["loss"] == "orpo" else options.get("sft_weight", 0.0)) * sft


def test_losses_equal_a_plain_implementation(make_model: Callable[..., Path], tmp_path: Path) -> None:
    path = make_model("llama")
    config = make_pair_config(path, tmp_path)
    prepared = prepare(config.data, path, tmp_path / "prepared")
    adapter = AdapterConfig(rank=4, alpha=8, modules=["q_proj", "v_proj", "down_proj", "lm_head"])
    model = load_model(path, adapter, torch.float64, seq_len=config.data.seq_len).train()
    base = load_reference(path).double()
    policy = load_reference(path).double()
    policy.load_state_dict(dict(iter_merged(model)))
    loader = build_loader(config, prepared)
    step = loader.step_at(1)
    members = [m for pack in step.packs for m in prepared.members("train", pack)]
    with torch.no_grad():
        pairs = [
            tuple(plain_logps(m, prepared, member) for m in (policy, base) for member in both)
            for both in zip(members[0::2], members[1::2], strict=True)
        ]
    assert all((chosen + 1 == rejected) for chosen, rejected in zip(members[0::2], members[1::2], strict=True))
    totals = loader.totals(step)
    assert totals.num_preferences == len(pairs) > 3
    assert totals.num_chosen == sum(len(pair[0]) for pair in pairs)
    for options in LOSSES:
        objective = PreferenceObjective(PreferenceConfig(**options))
        parts = [
            objective.compute(model, make_inputs(batch, model.make_bounds), totals, CPU)
            for batch in loader.micro_batches(step, 0, 1, 1)
        ]
        assert len(parts) > 1
        loss = sum(float(part.detach()) for part, _ in parts)
        assert loss == pytest.approx(plain_loss(pairs, options), rel=1e-6), options
        metrics = dict(zip(objective.metrics, sum(m for _, m in parts).tolist(), strict=True))  # type: ignore[union-attr]
        assert metrics["logps_chosen"] == pytest.approx(np.mean([float(p[0].sum()) for p in pairs]), rel=1e-6)
        assert metrics["logps_rejected"] == pytest.approx(np.mean([float(p[1].sum()) for p in pairs]), rel=1e-6)
        if options == LOSSES[0]:
            margins = [0.3 * float(p[0].sum() - p[2].sum() - p[1].sum() + p[3].sum()) for p in pairs]
            assert metrics["reward_margin"] == pytest.approx(np.mean(margins), rel=1e-4)
            assert metrics["reward_accuracy"] == pytest.approx(np.mean([margin > 0 for margin in margins]))


def test_no_term_loses_digits_for_certain_or_hopeless_answers() -> None:
    values = [-1e-12, -1e-3, -0.5, -1.0, -40.0]
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    found = log1mexp(x)
    expected = torch.tensor(
        [math.log(-math.expm1(v)) if v > -1 else math.log1p(-math.exp(v)) for v in values], dtype=torch.float64
    )
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    slopes = torch.tensor([-1 / math.expm1(-value) for value in values], dtype=torch.float64)
    torch.testing.assert_close(gradient, slopes, rtol=1e-9, atol=0)
    assert torch.isfinite(log1mexp(torch.zeros(1, dtype=torch.float64))).all()


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_model_without_its_adapters_is_its_base(dora: bool, make_model: Callable[..., Path]) -> None:
    path = make_model("llama")
    adapter = AdapterConfig(rank=4, alpha=8, dropout=0.1, dora=dora, modules=["q_proj", "k_proj", "up_proj"])
    model = load_model(path, adapter, torch.float64, token_ids=[7, 9])
    for name, parameter in model.named_parameters():
        if name.endswith("token_rows"):
            parameter.data.add_(1.0)
    tokens = draw_tokens(path)
    base = load_model(path, dtype=torch.float64)(tokens)
    with adapters_off(model):
        torch.testing.assert_close(model(tokens), base, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(tokens), base, atol=1e-3)


@pytest.fixture(scope="module")
def runs(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Run a config on a number of ranks; each combination runs once."""
    output = tmp_path_factory.mktemp("preference")
    done: dict[str, dict[str, Any]] = {}

    def run(world_size: int, **changes: Any) -> dict[str, Any]:
        key = f"{world_size} {changes}"
        if key not in done:
            config = make_pair_config(make_model(), output, 16, max_steps=3, validation={"every": 3}, **changes)
            prepared = prepare(config.data, Path(config.model.path), output / "prepared")
            done[key] = run_ranks(run_training, world_size, config, prepared.path)[0]
        return done[key]

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(2, {"mode": "ddp"}), pytest.param(2, {"mode": "fsdp"}, marks=pytest.mark.thorough), (4, {"mode": "fsdp"})],
    ids=["ddp on 2", "fsdp on 2", "fsdp on 4"],
)
def test_every_layout_matches_one_process_in_float64(
    runs: Callable[..., dict[str, Any]], world_size: int, parallel: dict[str, Any]
) -> None:
    changes = {"preference": {"loss": "dpo", "sft_weight": 0.3}}
    one, other = runs(1, **changes), runs(world_size, parallel=parallel, **changes)
    compare(one, other, rtol=1e-9, atol=0)
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        for name in PreferenceObjective.metrics:
            assert math.isclose(a[name], b[name], rel_tol=1e-9, abs_tol=1e-12), name
    assert "validation_reward_accuracy" in one["metrics"][-1]
    assert one["metrics"][0]["reward_margin"] == 0  # the policy starts as the reference


def test_training_prefers_the_chosen_answers(runs: Callable[..., dict[str, Any]]) -> None:
    metrics = runs(1, preference={"loss": "dpo", "sft_weight": 0.3})["metrics"]
    assert metrics[0]["loss"] > metrics[-1]["loss"]
    assert metrics[-1]["reward_margin"] > 0.01


def train_pairs(world: World, config: RunConfig, prepared: Path, num_steps: int) -> tuple[list[dict[str, Any]], Any]:
    """Return the metrics and the first A matrices of a run."""
    from fctune.data.prepared_set import open_prepared

    model, gradient_sync = build_trainable(config, world)
    started = {n: p.detach().clone().numpy() for n, p in model.named_parameters() if n.endswith("lora_a")}
    recorder, loader = Recorder(), build_loader(config, open_prepared(prepared))
    assert config.preference is not None
    train(
        *(config, start_state(model, config, num_steps, gradient_sync), loader, num_steps, world, SinkGroup(recorder)),
        objective=PreferenceObjective(config.preference),
    )
    return recorder.metrics, started


@pytest.mark.slow  # importing TRL
@pytest.mark.parametrize(("beta", "margin"), [(2.0, 0.5), (0.3, 0.0), (10.0, 2.0)])
def test_simpo_and_orpo_are_those_of_trl(beta: float, margin: float) -> None:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 9, 1, 4, 20, 20])
    policy = -lengths * torch.rand(6, generator=generator, dtype=torch.float64) * 3
    mean_chosen, mean_rejected = (policy / lengths).view(-1, 2).T
    their_config = SimpleNamespace(
        alpha=0.0,
        beta=beta,
        simpo_gamma=margin,
        loss_type="simpo",
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    for name, theirs, sign in (("simpo", CPOTrainer.cpo_loss, 1), ("orpo", ORPOTrainer.odds_ratio_loss, -1)):
        expected, chosen, rejected, *_ = theirs(their_config, mean_chosen, mean_rejected)
        options = {"margin": margin} if name == "simpo" else {}
        config = PreferenceConfig(loss=name, beta=beta, **options)
        losses, rewards = pair_losses(policy, None, lengths, config)
        # TRL computes ORPO in float32.
        torch.testing.assert_close(losses, sign * expected.double(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(rewards, torch.stack([chosen, rejected]).double(), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"loss": "dpo", "beta": 0.2}, {"loss_type": ["sigmoid"], "beta": 0.2}),
        ({"loss": "dpo", "sft_weight": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ({"loss": "dpo", "length_normalized": True}, {"loss_type": ["sigmoid_norm"]}),
        ({"loss": "ipo"}, {"loss_type": ["ipo"]}),
    ],
    ids=["dpo", "dpo and sft", "dpo by length", "ipo"],
)
def test_twenty_steps_match_trl(
    options: dict[str, Any], theirs: dict[str, Any], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    path, num_steps, lr = make_model("llama"), 20, 2e-3
    adapter = {"rank": 4, "alpha": 8, "dropout": 0.0, "modules": ["q_proj", "k_proj", "o_proj", "down_proj"]}
    config = make_pair_config(
        *(path, tmp_path, 4),
        adapter=adapter,
        precision="fp32",
        preference=options,
        data={"validation_share": 0.0},
        global_batch_size=9,  # all packs, so that the order does not matter
        max_steps=num_steps,
        epochs=num_steps,
        optimizer={"_component_": "torch.optim.AdamW", "lr": lr, "weight_decay": 0.01},
        validation={"every": 0},
    )
    prepared = prepare(config.data, path, tmp_path / "prepared")
    metrics, started = run_ranks(train_pairs, 1, config, prepared.path, num_steps)[0]

    rows = []
    for chosen in range(0, len(prepared.offsets) - 1, 2):
        both = [slice(*prepared.offsets[member : member + 2]) for member in (chosen, chosen + 1)]
        start = int(np.flatnonzero(prepared.codes[both[0]])[0])
        ids = [prepared.tokens[span].tolist() for span in both]
        rows.append({"prompt_ids": ids[0][:start], "chosen_ids": ids[0][start:], "rejected_ids": ids[1][start:]})
    logs = train_trl(path, rows, adapter, started, tmp_path, num_steps, lr, theirs)
    assert len(logs) == num_steps
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.005
    for ours, log in zip(metrics, logs, strict=True):
        assert ours["loss"] == pytest.approx(log["loss"], abs=1e-4), ours["step"]
        assert ours["logps_chosen"] == pytest.approx(log["logps/chosen"], rel=1e-4), ours["step"]
        assert ours["logps_rejected"] == pytest.approx(log["logps/rejected"], rel=1e-4), ours["step"]


def train_trl(
    path: Path,
    rows: list[dict[str, Any]],
    adapter: dict[str, Any],
    started: dict[str, Any],
    folder: Path,
    num_steps: int,
    lr: float,
    options: dict[str, Any],
) -> list[dict[str, float]]:
    """Train TRL's DPOTrainer on tokenised pairs, all of them in each step; returns its logs."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from fctune.models.sources import read_architecture

    class Tokenised(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    config = DPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=num_steps,
        per_device_train_batch_size=len(rows),
        learning_rate=lr,
        weight_decay=0.01,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        max_length=None,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = Tokenised(
        model=load_reference(path),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=adapter["modules"], task_type="CAUSAL_LM"),
    )
    parameters = dict(trainer.model.named_parameters())
    architecture = read_architecture(path)
    for name, weight in started.items():
        key = architecture.to_peft_name(name).replace(".weight", ".default.weight")
        parameters[key].data.copy_(torch.from_numpy(weight))
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]
