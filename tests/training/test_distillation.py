"""Divergences from a teacher equal TRL's and plain autograd on full logits, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.engines.teacher_server import TopLogprobs
from fctune.models.causal_lm import CausalLM
from fctune.runs.sinks import SinkGroup
from fctune.training.distillation import DistillObjective, TopDivergence, add_tail, generalized_jsd
from fctune.training.loop import train
from fctune.training.prefetch import StepData
from fctune.training.rollout_steps import TrainedRollout, make_step_data
from fctune.training.setup import start_state
from tests.models.model_samples import load_model
from tests.ranks import run_ranks
from tests.training.test_policy_gradient import ONE, draw_rollouts
from tests.training.training_runs import Recorder, build_trainable, compare, make_config

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
TOP_K = 7


def draw_logits(num: int = 40, size: int = 97, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    student, teacher = (torch.randn(num, size, generator=generator) * scale for _ in range(2))
    return student, teacher


def plain_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence of two rows of probabilities by its definition (arXiv:2306.13649, section 2)."""
    mixture = beta * teacher + (1 - beta) * student

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum(-1)

    if beta in (0, 1):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_equals_trls_in_value_and_gradient(beta: float) -> None:
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    student, teacher = draw_logits()
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    found = generalized_jsd(ours.log_softmax(1), teacher.log_softmax(1), beta).mean()
    expected = trainer.generalized_jsd_loss(theirs[None], teacher[None], torch.zeros(1, len(student)), beta)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_equals_its_definition(beta: float) -> None:
    student, teacher = (one.double() for one in draw_logits())
    found = generalized_jsd(student.log_softmax(1), teacher.log_softmax(1), beta)
    torch.testing.assert_close(found, plain_jsd(student.softmax(1), teacher.softmax(1), beta), rtol=1e-10, atol=0)
    assert (found > 0).all()


def top_of(teacher: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    top = teacher.log_softmax(1).topk(top_k)
    return top.indices, top.values


@pytest.mark.parametrize("beta", BETAS)
def test_of_top_tokens_and_a_tail_it_is_the_divergence_of_the_merged_events(beta: float) -> None:
    student, teacher = (one.double() for one in draw_logits())
    student.requires_grad_()
    ids, logprobs = top_of(teacher, TOP_K)
    criterion = TopDivergence(ids, logprobs, beta)
    found = criterion.losses(student, ids, logprobs)
    merged = []
    for probabilities in (student.softmax(1), teacher.softmax(1)):
        kept = probabilities.gather(1, ids)
        merged.append(torch.cat([kept, 1 - kept.sum(1, keepdim=True)], 1))
    expected = plain_jsd(merged[0], merged[1], beta)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad(one.sum(), student, retain_graph=True)[0] for one in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-7, atol=1e-12)
    values, slopes = criterion.losses_and_slopes(student, ids, logprobs)
    torch.testing.assert_close((values, slopes), (found.detach(), gradients[0]))


@pytest.mark.parametrize("beta", BETAS)
def test_more_top_tokens_never_lower_it_and_all_give_the_full_divergence(beta: float) -> None:
    student, teacher = (one.double() for one in draw_logits(scale=1.5))  # no token below the tail's least probability
    full = generalized_jsd(student.log_softmax(1), teacher.log_softmax(1), beta)
    last = torch.zeros(len(student)).double()
    for top_k in (1, 4, 16, 64, student.shape[1] - 1):
        ids, logprobs = top_of(teacher, top_k)
        found = TopDivergence(ids, logprobs, beta).losses(student, ids, logprobs)
        assert (found >= last - 1e-9).all()
        last = found
    torch.testing.assert_close(last, full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_certain_models_have_finite_divergences_and_gradients(beta: float) -> None:
    student = torch.tensor([[80.0, 0, 0, 0], [0, 80.0, 0, 0], [0, 0, 0, 0]], requires_grad=True)
    teacher = torch.tensor([[80.0, 0, 0, 0], [80.0, 0, 0, 0], [80.0, 0, 0, 0]])
    ids, logprobs = top_of(teacher, 2)
    losses = TopDivergence(ids, logprobs, beta).losses(student, ids, logprobs)
    losses.sum().backward()
    assert student.grad is not None
    assert losses.isfinite().all()
    assert student.grad.isfinite().all()
    assert abs(float(losses[0])) < 1e-5, "equal models"
    assert float(add_tail(logprobs).exp().sum(1).max()) < 1 + 1e-5


def score_by(teacher: CausalLM, one: TrainedRollout, top_k: int) -> TopLogprobs:
    """Return what a server would send for a rollout: the top tokens at each generated position."""
    rollout = one.rollout
    with torch.no_grad():
        logits = teacher(torch.tensor([[*rollout.prompt_ids, *rollout.ids]]))[0].double()
    start = len(rollout.prompt_ids) - 1
    ids, logprobs = top_of(logits[start:-1][torch.tensor(rollout.is_generated)], top_k)
    return TopLogprobs(ids.numpy(), logprobs.float().numpy())


def make_distill_config(student: Path, teacher: Path, folder: Path, **options: Any) -> RunConfig:
    adapter = {"rank": 4, "alpha": 8, "dropout": 0.0, "modules": ["q_proj", "v_proj", "down_proj"]}
    served = options.pop("is_served", False)
    named = {"teacher_server": {"url": "http://localhost:1", "top_k": TOP_K}} if served else {"teacher": str(teacher)}
    distill = {"cases": "synthetic:train:8", "max_new_tokens": 30, **named, **options}
    data = {"sources": [], "packed": True, "seq_len": 128}
    changes: dict[str, Any] = {"adapter": adapter, "distill": distill, "data": data, "validation": {"every": 0}}
    return make_config(student, folder, micro_batch_size=1, **changes)


def plain_step(student: CausalLM, teacher: CausalLM, trained: list[TrainedRollout], beta: float, top_k: int) -> Tensor:
    """Return the mean divergence of the generated tokens, from full logits of each rollout alone."""
    rows = []
    for one in trained:
        tokens, start = torch.tensor([[*one.rollout.prompt_ids, *one.rollout.ids]]), len(one.rollout.prompt_ids) - 1
        flags = torch.tensor(one.rollout.is_generated)
        with torch.no_grad():
            known = teacher(tokens)[0, start:-1][flags].softmax(1)
        own = student(tokens)[0, start:-1][flags].softmax(1)
        if top_k:
            ids = known.topk(top_k).indices
            own, known = (
                torch.cat([p.gather(1, ids), 1 - p.gather(1, ids).sum(1, keepdim=True)], 1) for p in (own, known)
            )
        rows.append(plain_jsd(own, known, beta))
    return torch.cat(rows).mean()


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_served", [False, True])
@pytest.mark.parametrize("trains_all", [False, True])
def test_a_packed_step_has_the_loss_and_gradients_of_autograd_on_full_logits(
    is_served: bool, trains_all: bool, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """With a frozen head and with one that trains, in chunks that split answers."""
    paths = make_model("llama"), make_model("qwen2", hidden_size=48, num_hidden_layers=3, max_position_embeddings=512)
    config = make_distill_config(*paths, tmp_path, is_served=is_served)
    assert config.distill is not None
    adapter = None if trains_all else AdapterConfig(rank=4, alpha=8, dropout=0.0, modules=["q_proj", "down_proj"])
    student, teacher = load_model(paths[0], adapter, torch.float64), load_model(paths[1], None, torch.float64)
    student.max_logits = 1  # as few rows a chunk as there may be
    trained = draw_rollouts(30)
    if is_served:
        trained = [replace(one, scores=score_by(teacher, one, TOP_K)) for one in trained]
    data = make_step_data(trained, config, ONE, student.make_bounds)
    assert any(inputs.bounds is not None for inputs in data.inputs), "rows are packed"
    parameters = [p for p in student.parameters() if p.requires_grad]
    for beta in (0.0, 0.5, 1.0):
        objective = DistillObjective(replace(config.distill, beta=beta), None if is_served else teacher)
        parts = [objective.compute(student, inputs, data.totals, ONE.device) for inputs in data.inputs]
        loss = torch.stack([part[0] for part in parts]).sum()
        expected = plain_step(student, teacher, trained, beta, TOP_K if is_served else 0)
        # The scores of a server are float32.
        tolerance = 1e-6 if is_served else 1e-11
        torch.testing.assert_close(loss, expected.double(), rtol=tolerance, atol=tolerance)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
        for one, other in zip(found, wanted, strict=True):
            if one is None or other is None:
                assert one is None
                assert other is None
            else:
                torch.testing.assert_close(one, other, rtol=1e-4 if is_served else 1e-8, atol=1e-8)
        tail = float(sum(part[1] for part in parts))
        assert (0 < tail < 1) if is_served else tail == 0


def test_a_teacher_with_unused_rows_at_the_end_is_compared_on_the_common_ones(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_model("llama")
    config = make_distill_config(path, path, tmp_path)
    assert config.distill is not None
    student, teacher = load_model(path, None, torch.float64), load_model(path, None, torch.float64)
    project, size = teacher.project, student.architecture.vocab_size

    def padded(hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        return torch.cat([project(hidden, keys), hidden.new_full((len(hidden), 8), 50.0)], 1)

    teacher.project = cast(Any, padded)  # type: ignore[method-assign]
    assert teacher.project(torch.zeros(1, 64).double()).shape[1] == size + 8
    data = make_step_data(draw_rollouts(3), config, ONE, student.make_bounds)
    objective = DistillObjective(config.distill, teacher)
    losses = [float(objective.compute(student, one, data.totals, ONE.device)[0]) for one in data.inputs]
    assert max(map(abs, losses)) < 1e-12, "the same model"


class _Steps:
    """Source of the same rollouts in each step."""

    def __init__(self, trained: list[TrainedRollout], config: RunConfig, world: World, model: CausalLM):
        self.trained, self.config, self.world, self.model = trained, config, world, model

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *arguments: object) -> None: ...

    def take(self, step: int) -> StepData:
        return make_step_data(self.trained, self.config, self.world, self.model.make_bounds, step=step)


def train_on_rank(world: World, config: RunConfig, trained: list[TrainedRollout], teacher: Path) -> dict[str, Any]:
    assert config.distill is not None
    model, gradient_sync = build_trainable(config, world)
    state = start_state(model, config, 3, gradient_sync)
    recorder, source = Recorder(), _Steps(trained, config, world, model)
    is_local = config.distill.teacher is not None
    objective = DistillObjective(config.distill, load_model(teacher, None, torch.float64) if is_local else None)
    train(config, state, None, 3, world, SinkGroup(recorder), objective=objective, source=cast(Any, source))
    weights = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights[name] = full.detach().clone().numpy()
    return {"metrics": recorder.metrics, "weights": weights}


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_served", [False, True])
def test_two_ranks_and_idle_ones_take_the_step_of_one_process(
    is_served: bool, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """All weights, in shards, on packs of which a rank of three has none in the last micro-batch."""
    paths = make_model("llama"), make_model("qwen2")
    config = make_distill_config(*paths, tmp_path, is_served=is_served, beta=0.5)
    config = replace(config, adapter=None, optimizer=config.optimizer | {"lr": 1e-4})
    teacher, trained = load_model(paths[1], None, torch.float64), draw_rollouts(17)
    if is_served:
        trained = [replace(one, scores=score_by(teacher, one, TOP_K)) for one in trained]
    results = [run_ranks(train_on_rank, size, config, trained, paths[1])[0] for size in (1, 2, 3)]
    assert results[0]["metrics"][-1]["loss"] < results[0]["metrics"][0]["loss"]
    for other in results[1:]:
        compare(results[0], other, rtol=1e-9, atol=1e-11)
    assert all(np.isfinite(one["teacher_tail"]) for one in results[0]["metrics"])
