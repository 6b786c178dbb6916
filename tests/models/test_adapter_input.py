"""Adapters that read the same tensor: one dropout and one product, with the numbers of separate ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fctune.config.sections.adapter import AdapterConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import AdapterInput, LoRALinear
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.activations import compile_blocks_
from tests.models.model_samples import ALL_MODULES, load_model

RANK = 3
LORA = AdapterConfig(rank=RANK, alpha=8, dropout=0.3, modules=ALL_MODULES)


@pytest.fixture(params=["torchtune", "transformers"])
def load(request: pytest.FixtureRequest, make_model: Callable[..., Path]) -> Callable[..., CausalLM]:
    """Load the same tiny model in float64, from one source of models or the other."""
    return lambda adapter=LORA: load_model(make_model("llama"), adapter, torch.float64, source=request.param)


def separate_(model: CausalLM) -> None:
    """Give each adapter an input of its own, with the mask of the shared one."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            shared = module._input
            module._input = AdapterInput(shared.key, shared.dropout, model.token_keys)
            module._index = module._input.add_reader(module)


def run(model: CausalLM) -> dict[str, torch.Tensor]:
    """Compute the loss and the gradients of a step with dropout."""
    tokens = torch.randint(0, model.architecture.vocab_size, (2, 24), generator=torch.Generator().manual_seed(3))
    loss = model.train()(tokens, labels=tokens, row_keys=torch.tensor([5, 6]))
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dora", [False, True])
def test_shared_inputs_change_no_loss_and_no_gradient(load: Callable[..., CausalLM], dora: bool) -> None:
    adapter = AdapterConfig(rank=RANK, alpha=8, dropout=0.3, modules=ALL_MODULES, dora=dora)
    shared, separate = load(adapter), load(adapter)
    separate_(separate)
    ours, theirs = run(shared), run(separate)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12)


def test_both_sources_share_the_same_inputs(make_model: Callable[..., Path]) -> None:
    path, policy = make_model("llama"), PrecisionPolicy.uniform(torch.float32)
    models = [build_model(read_architecture(path, source), 64, policy) for source in ("torchtune", "transformers")]
    ours, theirs = ({linear.key: linear.input_key for linear in model.linears()} for model in models)
    assert ours == theirs
    assert [key for key, first in ours.items() if key != first] == [
        f"{index}.{name}" for index in range(2) for name in ("k_proj", "v_proj", "up_proj")
    ]


class ProductCounter(TorchDispatchMode):
    """Counts matrix products with a factor or result as thin as ``sizes``."""

    def __init__(self, sizes: set[int]):
        super().__init__()
        self.sizes, self.counts = sizes, dict.fromkeys(sizes, 0)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten.mm.default and out.shape[1] in self.sizes:
            self.counts[out.shape[1]] += 1
        return out


def test_queries_keys_and_values_read_their_input_once(load: Callable[..., CausalLM]) -> None:
    model = load().eval()
    with torch.no_grad(), ProductCounter({RANK, 2 * RANK, 3 * RANK}) as products:
        model(torch.arange(30)[None])
    # By block: one for queries, keys and values, one for gate and up, and one each for the two outputs; and the head's.
    assert products.counts == {3 * RANK: 2, 2 * RANK: 2, RANK: 2 * 2 + 1}
    assert not any(module._input._parts for module in model.modules() if isinstance(module, LoRALinear))


def test_a_linear_called_with_another_tensor_computes_by_itself(load: Callable[..., CausalLM]) -> None:
    model = load().eval()
    adapters = {m.key: m for m in model.modules() if isinstance(m, LoRALinear)}
    x, y = torch.randn(2, 5, 64, dtype=torch.float64), torch.randn(1, 3, 64, dtype=torch.float64)

    def expect(adapter: LoRALinear, x: torch.Tensor) -> torch.Tensor:
        return x @ (adapter.weight + adapter.scaling * adapter.lora_b @ adapter.lora_a).T

    for key, given in (("k", x), ("q", y), ("q", x), ("v", x), ("q", x), ("k", y)):
        adapter = adapters[f"0.{key}_proj"]
        torch.testing.assert_close(adapter(given), expect(adapter, given), rtol=1e-9, atol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fraction", [pytest.param(0.0, marks=pytest.mark.thorough), 0.5])
def test_compiled_blocks_share_inputs_without_graph_breaks(
    load: Callable[..., CausalLM], fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fctune.config.sections.parallel import ActivationCheckpointingConfig
    from fctune.parallel.activations import apply_activation_checkpointing_

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = load(), load()
    apply_activation_checkpointing_(compiled, ActivationCheckpointingConfig(fraction=fraction), "cpu")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    changed = ("recompile_limit", "fail_on_recompile_limit_hit", "optimize_ddp")
    changed += ("skip_fwd_side_effects_in_bwd_under_checkpoint",)
    # torch's own patch restores its settings, which compiling changes.
    with torch._dynamo.config.patch({name: getattr(torch._dynamo.config, name) for name in changed}):
        compile_blocks_(compiled)
        ours, theirs = run(compiled), run(plain)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(2, 1, 24), (48,)], ids=["a head of its own", "flat"])
def test_dropout_belongs_to_tokens_whatever_the_shape_of_the_input(
    load: Callable[..., CausalLM], shape: tuple[int, ...]
) -> None:
    model = load().train()
    model.token_keys.set_rows(torch.tensor([5, 6]), 24)
    linear = next(module for module in model.modules() if isinstance(module, LoRALinear))
    x = torch.randn(2, 24, linear.weight.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = linear(x)
    linear._input._parts.clear()  # of the linears that share it
    torch.testing.assert_close(linear(x.view(*shape, -1)), expected.view(*shape, -1), rtol=0, atol=1e-12)
