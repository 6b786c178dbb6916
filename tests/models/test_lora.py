"""LoRA adapters: targets, initial values and dropout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.dropout import TokenKeys, channel_keys, keyed_dropout, row_key
from tests.models.model_samples import ALL_MODULES, load_model


def keys_of(rows: list[int], seq_len: int, step: int = 1) -> torch.Tensor:
    keys = TokenKeys()
    keys.set_rows(torch.tensor([row_key(7, step, row) for row in rows]), seq_len)
    assert keys.value is not None
    return keys.value


def test_adapters_start_as_the_base(make_model: Callable[..., Path]) -> None:
    from fctune.models.lora import init_adapters_

    path = make_model("llama")
    model = load_model(path, AdapterConfig(rank=4, alpha=8, modules=ALL_MODULES))
    init_adapters_(model, 5)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens), load_model(path)(tokens))


def test_an_adapter_on_a_tied_head_is_rejected(make_model: Callable[..., Path]) -> None:
    path = make_model("llama", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="lm_head"):
        load_model(path, AdapterConfig(modules=["lm_head"]))


def test_only_adapters_train(make_model: Callable[..., Path]) -> None:
    model = load_model(make_model("qwen2"), AdapterConfig(rank=2, modules=["q_proj", "down_proj"]))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all(name.endswith(("lora_a", "lora_b")) for name in trained)


def test_dropout_of_a_row_does_not_depend_on_its_batch() -> None:
    x = torch.ones(3, 20, 16)
    together = keyed_dropout(x, 0.3, keys_of([0, 1, 2], 20), channel_keys("m", x.shape[-1]))
    for row in range(3):
        alone = keyed_dropout(x[row : row + 1], 0.3, keys_of([row], 20), channel_keys("m", x.shape[-1]))
        assert torch.equal(together[row : row + 1], alone)


def test_dropout_differs_by_step_row_and_module_and_keeps_the_mean() -> None:
    x = torch.ones(1, 512, 256)
    base = keyed_dropout(x, 0.3, keys_of([0], 512), channel_keys("m", x.shape[-1]))
    for other in (
        keyed_dropout(x, 0.3, keys_of([1], 512), channel_keys("m", x.shape[-1])),
        keyed_dropout(x, 0.3, keys_of([0], 512, step=2), channel_keys("m", x.shape[-1])),
        keyed_dropout(x, 0.3, keys_of([0], 512), channel_keys("n", x.shape[-1])),
    ):
        agreement = ((base > 0) == (other > 0)).float().mean()
        assert abs(float(agreement) - 0.58) < 0.01  # 0.7^2 + 0.3^2: independent
    assert abs(float((base == 0).float().mean()) - 0.3) < 0.01
    assert abs(float(base.mean()) - 1) < 0.01
    columns = (base[0] > 0).float()
    assert float(columns.mean(0).std()) < 0.03
    assert float(columns.mean(1).std()) < 0.04
