"""The load-balancing loss of routers: transformers' own, and one value for any split of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fctune.base.errors import ConfigError
from fctune.config.sections.parallel import ActivationCheckpointingConfig
from fctune.models.causal_lm import CausalLM
from fctune.parallel.activations import apply_activation_checkpointing_
from tests.models.expert_samples import draw_ids, make_model, make_reference

COEFFICIENT = 0.5
LENGTHS = [20, 13, 7, 18]
TYPES_WITH_LOSS = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "olmoe", "ernie4_5_moe", "minimax_m2")


def draw_batch() -> tuple[Tensor, Tensor]:
    """Return token ids with padding at the ends of rows, and the mask of the other tokens."""
    tokens = draw_ids(4, 20)
    mask = torch.arange(20) < torch.tensor(LENGTHS)[:, None]
    return tokens.where(mask, 0), mask


def run_model(model: CausalLM, tokens: Tensor, lengths: list[int]) -> None:
    model.train()(tokens, labels=torch.full_like(tokens, -100), row_lengths=torch.tensor(lengths))


def balance(model: CausalLM, parts: list[slice], tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a batch that is computed in parts, without its coefficient, and its gradients."""
    state = model.router_balance
    assert state is not None
    state.start_step()
    model.zero_grad()
    if len(parts) > 1:
        with torch.no_grad():
            for part in parts:
                run_model(model, tokens[part], LENGTHS[part])
                state.add_counts()
        state.finish_counts()
    for part in parts:
        run_model(model, tokens[part], LENGTHS[part])
        state.loss().backward()
    assert state.value is not None
    return float(state.value), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compute_reference(reference: Any, tokens: Tensor, mask: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return transformers' loss, to which padding neither attends nor counts, and its gradients."""
    out = reference.train()(input_ids=tokens, attention_mask=mask.long(), output_router_logits=True, use_cache=False)
    reference.zero_grad()
    (COEFFICIENT * out.aux_loss).backward()
    grads = {f"decoder.{name}": p.grad for name, p in reference.named_parameters() if p.grad is not None}
    return float(out.aux_loss.detach()), grads


@pytest.mark.parametrize("model_type", TYPES_WITH_LOSS)
def test_the_loss_and_its_gradients_are_those_of_transformers(model_type: str) -> None:
    reference = make_reference(model_type)
    model = make_model(reference)
    model.balance_routers_(COEFFICIENT)
    tokens, mask = draw_batch()
    value, grads = balance(model, [slice(0, 4)], tokens)
    expected, expected_grads = compute_reference(reference, tokens, mask)
    assert value == pytest.approx(expected, abs=1e-5)  # transformers counts in float32
    assert any(float(grad.abs().max()) > 1e-4 for grad in expected_grads.values())
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name].to(grad), grad, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_any_split_into_micro_batches_gives_one_loss_and_gradient(fraction: float) -> None:
    model = make_model(make_reference("qwen3_moe"))
    model.balance_routers_(COEFFICIENT)
    tokens, _ = draw_batch()
    expected, expected_grads = balance(model, [slice(0, 4)], tokens)
    apply_activation_checkpointing_(model, ActivationCheckpointingConfig(fraction=fraction), "cpu")
    for parts in ([slice(0, 4)], [slice(0, 2), slice(2, 4)], [slice(0, 3), slice(3, 4)]):
        value, grads = balance(model, parts, tokens)
        assert value == pytest.approx(expected, abs=1e-12)
        for name, grad in expected_grads.items():
            torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-12)


def test_the_mean_of_the_micro_batches_losses_is_another_number() -> None:
    model = make_model(make_reference("qwen3_moe"))
    model.balance_routers_(COEFFICIENT)
    tokens, _ = draw_batch()
    together, _ = balance(model, [slice(0, 4)], tokens)
    assert model.router_balance is not None
    values = []
    for row in range(4):
        model.router_balance.start_step()
        run_model(model, tokens[row : row + 1], LENGTHS[row : row + 1])
        model.router_balance.loss()
        values.append(float(model.router_balance.value))  # type: ignore[arg-type]
    assert abs(sum(values) / 4 - together) > 1e-3


def test_evaluation_and_generation_observe_nothing() -> None:
    model = make_model(make_reference("qwen3_moe"))
    model.balance_routers_(COEFFICIENT)
    tokens, _ = draw_batch()
    _, grads = balance(model, [slice(0, 4)], tokens)
    state = model.router_balance
    assert state is not None
    with torch.no_grad():
        model.eval()(tokens)
    assert not state._observed
    assert grads


def test_config_json_decides_unless_the_run_does() -> None:
    silent = make_model(make_reference("qwen3_moe", router_aux_loss_coef=0.01))
    asking = make_model(make_reference("qwen3_moe", router_aux_loss_coef=0.01, output_router_logits=True))
    for model, coefficient, expected in (
        (silent, None, None),
        (asking, None, 0.01),
        (asking, 0.0, None),
        (silent, 0.3, 0.3),
    ):
        model.balance_routers_(coefficient)
        found = None if model.router_balance is None else model.router_balance.coefficient
        assert found == expected


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_models_that_balance_by_a_bias_have_no_such_loss(model_type: str) -> None:
    model = make_model(make_reference(model_type))
    model.balance_routers_(None)
    assert model.router_balance is None
    with pytest.raises(ConfigError, match="balances its experts by a bias, which stays as it is; leave it out"):
        model.balance_routers_(0.1)
    assert not [name for name, p in model.named_parameters() if "bias" in name and "gate" in name and p.requires_grad]


def test_a_dense_model_has_no_such_loss(make_model: Any) -> None:
    from tests.models.model_samples import load_model

    with pytest.raises(ConfigError, match=r"model.router_aux_loss=0.1: this model has no experts to balance"):
        load_model(make_model("llama")).balance_routers_(0.1)
