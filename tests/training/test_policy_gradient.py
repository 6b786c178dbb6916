"""Advantages, ratios and losses of rollouts equal a plain implementation and TRL's, on any number of ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.grpo import GRPOConfig
from fctune.data.loader import StepTotals
from fctune.models.export import iter_merged
from fctune.runs.sinks import SinkGroup
from fctune.tasks.rollouts import Rollout
from fctune.training.loop import train
from fctune.training.policy_gradient import (
    PolicyObjective,
    average_losses,
    clipped_losses,
    compute_advantages,
    divergences,
)
from fctune.training.prefetch import StepData
from fctune.training.rollout_steps import TrainedRollout, make_step_data
from fctune.training.setup import start_state
from tests.models.model_samples import load_model, load_reference
from tests.ranks import run_ranks
from tests.training.training_runs import Recorder, build_trainable, compare, make_config

ONE = World(rank=0, local_rank=0, world_size=1, ranks_per_node=1, device=torch.device("cpu"))
OPTIONS: list[dict[str, Any]] = [
    {"loss": "grpo", "updates_per_batch": 2},
    {"loss": "grpo", "updates_per_batch": 2, "kl_beta": 0.3},
    {"loss": "dapo", "updates_per_batch": 2},
    {"loss": "dapo", "updates_per_batch": 1, "ratio_cap": 1.05},
    {"loss": "gspo", "updates_per_batch": 2, "clip_low": 0.02, "clip_high": 0.03},
    # A batch of 15 answers, of which the tests train fewer: the others are masked.
    {"loss": "dr_grpo", "updates_per_batch": 2, "max_new_tokens": 30, "prompts_per_step": 5, "group_size": 3},
]


def make_policy_config(model: Path, folder: Path, **options: Any) -> RunConfig:
    adapter = {"rank": 4, "alpha": 8, "dropout": 0.0, "modules": ["q_proj", "v_proj", "down_proj"]}
    grpo = {"cases": "synthetic:8", "max_new_tokens": 30, **options}
    data = {"sources": [], "packed": True, "seq_len": 128}
    return make_config(
        model, folder, adapter=adapter, grpo=grpo, data=data, micro_batch_size=1, validation={"every": 0}
    )


def draw_rollouts(num: int, num_vocab: int = 100, seed: int = 0) -> list[TrainedRollout]:
    """Return rollouts of random tokens, some with a tool's result in the middle."""
    rng = random.Random(seed)
    drawn = []
    for number in range(num):
        length = rng.randint(3, 24)
        is_generated = [True] * length
        if number % 3 == 1:
            is_generated[1 : rng.randint(2, length - 1)] = [False] * (len(is_generated[1 : rng.randint(2, 2)]))
            is_generated = (is_generated + [True] * length)[:length]
        ids = tuple(rng.randrange(3, num_vocab) for _ in range(length))
        logprobs = tuple(rng.uniform(-7.6, -6.0) if flag else 0.0 for flag in is_generated)
        prompt = tuple(rng.randrange(3, num_vocab) for _ in range(rng.randint(2, 20)))
        rollout = Rollout(f"case {number // 4}", number % 4, "all", 0, prompt, ids, tuple(is_generated), logprobs)
        drawn.append(TrainedRollout(rollout, rng.uniform(-2, 2)))
    return drawn


def plain_logprobs(model: Any, rollout: Rollout) -> list[float]:
    """Return the log-probabilities of the generated ids by a forward pass of the rollout alone."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.ids]])
    logits = model(ids).logits[0].double()
    start = len(rollout.prompt_ids)
    return [
        float(log_softmax(logits[start + i - 1], -1)[token])
        for i, (token, flag) in enumerate(zip(rollout.ids, rollout.is_generated, strict=True))
        if flag
    ]


def plain_loss(
    answers: Sequence[tuple[list[float], list[float], list[float], float]], options: dict[str, Any]
) -> tuple[float, float]:
    """Return the loss of answers (policy, generating, reference, advantage) and the share of clipped tokens."""
    low = options.get("clip_low", 0.2)
    high = options.get("clip_high", 0.28 if options["loss"] == "dapo" else 0.2)
    answer_sums, num_tokens, num_clipped = [], 0, 0
    for policy, generating, reference, advantage in answers:
        total = 0.0
        mean = sum(p - g for p, g in zip(policy, generating, strict=True)) / len(policy)
        for p, g, q in zip(policy, generating, reference, strict=True):
            if options["updates_per_batch"] == 1:
                value = min(math.exp(p - g), options["ratio_cap"]) * advantage
            else:
                ratio = math.exp(mean if options["loss"] == "gspo" else p - g)
                bounded = max(1 - low, min(ratio, 1 + high))
                value = min(ratio * advantage, bounded * advantage)
                num_clipped += bounded * advantage < ratio * advantage
            penalty = math.exp(q - p) - (q - p) - 1
            total += -value + options.get("kl_beta", 0.0) * penalty
        answer_sums.append((total, len(policy)))
        num_tokens += len(policy)
    if options["loss"] == "dapo":
        loss = sum(total for total, _ in answer_sums) / num_tokens
    elif options["loss"] == "dr_grpo":
        num_answers = options["prompts_per_step"] * options["group_size"]
        loss = sum(total for total, _ in answer_sums) / (num_answers * options["max_new_tokens"])
    else:
        loss = sum(total / length for total, length in answer_sums) / len(answers)
    return loss, num_clipped / num_tokens


def objective_loss(model: Any, data: StepData, config: GRPOConfig) -> tuple[float, dict[str, float]]:
    objective = PolicyObjective(config)
    parts = [objective.compute(model, inputs, data.totals, torch.device("cpu")) for inputs in data.inputs]
    assert len(parts) > 1
    names = dict(zip(objective.metrics, torch.stack([m for _, m in parts]).T.tolist(), strict=True))
    metrics = {name: (max if name in objective.maxima else sum)(values) for name, values in names.items()}
    return sum(float(loss.detach()) for loss, _ in parts), metrics


def test_losses_equal_a_plain_implementation(make_model: Callable[..., Path], tmp_path: Path) -> None:
    path = make_model("llama")
    adapter = AdapterConfig(rank=4, alpha=8, modules=["q_proj", "v_proj", "down_proj"])
    model = load_model(path, adapter, torch.float64, seq_len=128).train()
    base, policy = load_reference(path).double(), load_reference(path).double()
    policy.load_state_dict(dict(iter_merged(model)))
    trained = draw_rollouts(13)
    assert any(not all(one.rollout.is_generated) for one in trained)
    with torch.no_grad():
        answers = [
            (
                plain_logprobs(policy, one.rollout),
                [p for p, flag in zip(one.rollout.logprobs, one.rollout.is_generated, strict=True) if flag],
                plain_logprobs(base, one.rollout),
                one.advantage,
            )
            for one in trained
        ]
    gaps = [p - g for policy_, generating, _, _ in answers for p, g in zip(policy_, generating, strict=True)]
    for options in OPTIONS:
        config = make_policy_config(path, tmp_path, **options)
        assert config.grpo is not None
        data = make_step_data(trained, config, ONE, model.make_bounds)
        assert data.totals.num_supervised == len(gaps)
        loss, metrics = objective_loss(model, data, config.grpo)
        expected, clip_share = plain_loss(answers, options)
        assert loss == pytest.approx(expected, rel=1e-6), options
        assert metrics["clip_share"] == pytest.approx(clip_share)
        assert clip_share > 0 or options["updates_per_batch"] == 1
        assert metrics["ratio_max"] == pytest.approx(max(map(math.exp, gaps)), rel=1e-6)
        assert metrics["engine_gap"] == pytest.approx(sum(map(abs, gaps)) / len(gaps), rel=1e-6)
        assert metrics["entropy"] == pytest.approx(-sum(sum(a[0]) for a in answers) / len(gaps), rel=1e-6)
        assert (metrics["kl"] > 0) == ("kl_beta" in options)


def test_advantages_of_a_group() -> None:
    rewards = [1.0, 0.0, 0.5, 0.5]
    std = math.sqrt((0.25 + 0.25) / 3)
    assert compute_advantages(rewards, "unbiased") == pytest.approx([0.5, -0.5, 0, 0])
    assert compute_advantages(rewards, "group") == pytest.approx([0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0, 0])
    others = [1.0 - 1 / 3, 0 - 2 / 3, 0.5 - 0.5, 0.5 - 0.5]
    assert compute_advantages(rewards, "leave_one_out") == pytest.approx(others)
    assert compute_advantages([0.25, 0.25], "group") == [0, 0]


class FixedSteps:
    """Source that trains the same rollouts in each step, on any number of ranks."""

    def __init__(self, config: RunConfig, world: World, make_bounds: Any):
        self.config, self.world, self.make_bounds = config, world, make_bounds

    def __enter__(self) -> FixedSteps:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, step: int) -> StepData:
        trained = draw_rollouts(13, seed=step // 2)
        return make_step_data(trained, self.config, self.world, self.make_bounds, step=step)


def train_rollouts(world: World, config: RunConfig) -> dict[str, Any]:
    """Return the metrics and weights of three steps."""
    model, gradient_sync = build_trainable(config, world)
    assert config.grpo is not None
    recorder, state = Recorder(), start_state(model, config, 3, gradient_sync)
    source = FixedSteps(config, world, model.make_bounds)
    train(
        *(config, state, None, 3, world, SinkGroup(recorder)),
        objective=PolicyObjective(config.grpo),
        source=source,
    )
    weights = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights[name] = full.detach().clone().numpy()
    return {"metrics": recorder.metrics, "weights": weights}


@pytest.fixture(scope="module")
def one_process(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder, done = tmp_path_factory.mktemp("policy"), {}

    def run(world_size: int, loss: str, mode: str) -> dict[str, Any]:
        if (key := (world_size, loss, mode)) not in done:
            options = {"loss": loss, "updates_per_batch": 2, "kl_beta": 0.1}
            config = make_policy_config(make_model("llama"), folder, **options)
            config.parallel.mode = mode  # type: ignore[assignment]
            done[key] = run_ranks(train_rollouts, world_size, config)[0]
        return done[key]

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world_size", "loss", "mode"),
    [
        (2, "grpo", "ddp"),
        (4, "dapo", "fsdp"),
        pytest.param(2, "gspo", "fsdp", marks=pytest.mark.slow),
        pytest.param(4, "dr_grpo", "ddp", marks=pytest.mark.slow),
    ],
    ids=["grpo on 2", "dapo on 4", "gspo on 2", "dr_grpo on 4"],
)
def test_every_layout_matches_one_process_in_float64(
    one_process: Callable[..., Any], world_size: int, loss: str, mode: str
) -> None:
    one, other = one_process(1, loss, "auto"), one_process(world_size, loss, mode)
    compare(one, other, rtol=1e-9, atol=1e-12)
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        for name in PolicyObjective.metrics:
            assert math.isclose(a[name], b[name], rel_tol=1e-9, abs_tol=1e-12), name
    assert one["metrics"][0]["ratio_max"] > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=[f"{o['loss']}-{n}" for n, o in enumerate(OPTIONS)])
def test_losses_and_gradients_equal_those_of_trl(options: dict[str, Any]) -> None:
    from trl import GRPOTrainer

    config = GRPOConfig(**{"cases": "synthetic:8", "max_new_tokens": 30, **options})
    trained = draw_rollouts(12, seed=5)
    rollouts = [one.rollout for one in trained]
    flags = [torch.tensor(one.is_generated) for one in rollouts]
    generating = [
        torch.tensor(one.logprobs, dtype=torch.float64)[flag] for one, flag in zip(rollouts, flags, strict=True)
    ]
    torch.manual_seed(3)
    flat = torch.cat(generating)
    ours = (flat + 0.3 * torch.randn_like(flat)).requires_grad_()
    reference = flat + 0.3 * torch.randn_like(flat)
    lengths = torch.tensor([len(one) for one in generating])
    advantages = torch.tensor([one.advantage for one in trained], dtype=torch.float64)
    is_first = config.updates_per_batch == 1
    old = ours.detach() if is_first else flat
    weights = (ours.detach() - flat).exp().clamp(max=config.ratio_cap)
    each, _ = clipped_losses(ours, old, advantages, lengths, config)
    each = each * weights if is_first else each
    if config.kl_beta:
        each = each + config.kl_beta * divergences(ours, reference)
    totals = StepTotals(0, len(flat), 0.0, 0, num_answers=len(trained))
    loss = average_losses(each, lengths, totals, config)
    loss.backward()

    width, num_masked = int(lengths.max()), 0
    if config.loss == "dr_grpo":
        num_masked = config.answers_per_batch - len(trained)
        assert num_masked > 0
    theirs = ours.detach().clone().requires_grad_()

    def spread(values: Tensor) -> Tensor:
        rows = [torch.cat([one, one.new_zeros(width - len(one))]) for one in values.split(lengths.tolist())]
        return torch.stack(rows + [torch.zeros_like(rows[0])] * num_masked)

    low, high = config.clips
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros(len(trained) + num_masked, 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(trained) + num_masked, 1, dtype=torch.long),
        "completion_ids": torch.zeros(len(trained) + num_masked, width, dtype=torch.long),
        "completion_mask": spread(torch.ones_like(flat)).long(),
        "advantages": torch.cat([advantages, advantages.new_ones(num_masked)]),
        "ref_per_token_logps": spread(reference),
        "importance_sampling_ratio": spread(weights),
        "num_items_in_batch": torch.tensor(len(flat)),
    }
    if not is_first:
        inputs["old_per_token_logps"] = spread(flat)
    trainer: Any = SimpleNamespace(
        beta=config.kl_beta,
        loss_type={"gspo": "grpo"}.get(config.loss, config.loss),
        importance_sampling_level="sequence" if config.loss == "gspo" else "token",
        epsilon_low=low,
        epsilon_high=high,
        max_completion_length=config.max_new_tokens,
        use_vllm=is_first,
        vllm_importance_sampling_correction=is_first,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": _AnyMetrics()},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (spread(theirs), spread(torch.zeros_like(flat)), None),
    )
    expected = GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-9)
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


class _AnyMetrics(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return []
