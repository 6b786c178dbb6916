"""Options of adapters, layouts and compilation give transformers' models the same numbers on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.data.prepared_set import prepare
from tests.models.expert_samples import save_base
from tests.models.hybrid_samples import save_hybrid
from tests.models.tiny_models import copy_tokenizer
from tests.ranks import run_ranks
from tests.training.training_runs import compare, make_config, run_training

ATTENTION = ["q_proj", "k_proj", "v_proj"]
ADAPTER = {"rank": 2, "alpha": 4, "dropout": 0.1, "modules": "all-linear"}
DATA = {"sources": [{"path": "synthetic:train:24:3"}], "seq_len": 768, "packed": True}
FSDP, HSDP = {"mode": "fsdp"}, {"mode": "hsdp", "replicate": 2}
# 4-bit weights share scales among 16,384.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 4}


def save_dense(path: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = WIDE | copy_tokenizer(path)
    config = Qwen3Config(num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=2048, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


KINDS: dict[str, Callable[[Path], Path]] = {
    "dense": save_dense,
    "hybrid": lambda path: save_hybrid("lfm2", path, with_tokenizer=True, block_auto_adjust_ff_dim=False, **WIDE),
    "experts": lambda path: save_base("qwen3_moe", path, with_tokenizer=True, num_experts=4),
    "hybrid experts": lambda path: save_hybrid("qwen3_5_moe_text", path, with_tokenizer=True),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Train a kind of model on a number of ranks for three steps."""
    output = tmp_path_factory.mktemp("other models")

    def run(kind: str, world_size: int, adapter: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
        base = output / kind
        if not base.exists():
            KINDS[kind](base)
        keys = {"max_steps": 3, "global_batch_size": 4, "micro_batch_size": 1, "validation": {"every": 0}}
        config = make_config(base, output, adapter=adapter, data=DATA, **keys, **changes)
        prepared = prepare(config.data, base, output / "prepared")
        result: dict[str, Any] = run_ranks(run_training, world_size, config, prepared.path, timeout_s=600)[0]
        return result

    return run


CASES = [
    *((kind, {"dora": True}) for kind in ("dense", "hybrid")),
    *((kind, {"dora": True, "modules": ATTENTION}) for kind in ("experts", "hybrid experts")),  # experts have no DoRA
    *((kind, {"scaling": "rslora"}) for kind in KINDS),
    *((kind, {"base": "nf4"}) for kind in ("dense", "hybrid")),  # refused for experts
]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [FSDP, HSDP], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize(("kind", "option"), CASES, ids=[f"{kind} {' '.join(option)}" for kind, option in CASES])
def test_kinds_of_adapters_train_equally_on_any_layout(
    train: Callable[..., dict[str, Any]], kind: str, option: dict[str, Any], parallel: dict[str, Any]
) -> None:
    adapter = ADAPTER | option
    compare(train(kind, 1, adapter), train(kind, 4, adapter, parallel=parallel), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["lora", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_train_as_uncompiled_ones(
    train: Callable[..., dict[str, Any]], kind: str, adapter: dict[str, Any] | None
) -> None:
    checkpointing = {"fraction": 0.5, "policy": "op"}
    compiled = train(kind, 2, adapter, compile=True, parallel=FSDP, activation_checkpointing=checkpointing)
    compare(train(kind, 1, adapter), compiled, rtol=1e-9, atol=1e-9)
