"""The choice of a parallel layout, and the messages if none fits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fctune.base.errors import ConfigError
from fctune.config.sections.parallel import ParallelConfig
from fctune.models.precision import PrecisionPolicy, check_device, choose_precision
from fctune.parallel.footprint import GIB, Footprint
from fctune.parallel.layout import (
    Hardware,
    ParallelLayout,
    check_memory,
    choose_parallel_layout,
    suggest_smaller_weights,
)


def needs(gib: float) -> Callable[[int], Footprint]:
    """Make an estimate for a model whose memory is only its shards."""
    return lambda num_shards: Footprint(parameters=int(gib * GIB) // num_shards)


def choose(
    world_size: int,
    ranks_per_node: int = 8,
    gib: float = 1.0,
    has_adapter: bool = True,
    device_type: str = "cuda",
    **config: Any,
) -> ParallelLayout:
    hardware = Hardware(device_type, world_size, ranks_per_node, 80 * GIB)
    return choose_parallel_layout(ParallelConfig(**config), hardware, has_adapter, needs(gib))


@pytest.mark.parametrize(
    ("options", "mode", "shape"),
    [
        ({"world_size": 1}, "none", (1, 1)),
        ({"world_size": 8}, "ddp", (8, 1)),
        ({"world_size": 16, "gib": 140.0}, "hsdp", (2, 8)),
        ({"world_size": 16, "gib": 800.0}, "fsdp", (1, 16)),
        ({"world_size": 8, "gib": 140.0}, "fsdp", (1, 8)),
        ({"world_size": 8, "has_adapter": False}, "fsdp", (1, 8)),
        ({"world_size": 16, "has_adapter": False, "gib": 200.0}, "hsdp", (2, 8)),
        ({"world_size": 16, "has_adapter": False, "gib": 1100.0}, "fsdp", (1, 16)),
        ({"world_size": 8, "cpu_offload": True}, "fsdp", (1, 8)),
        ({"world_size": 16, "mode": "hsdp"}, "hsdp", (2, 8)),
        ({"world_size": 64, "mode": "hsdp", "replicate": 2}, "hsdp", (2, 32)),
        ({"world_size": 1, "mode": "ddp"}, "none", (1, 1)),
        ({"world_size": 1, "mode": "fsdp"}, "fsdp", (1, 1)),
    ],
    ids=str,
)
def test_auto_chooses_the_fitting_layout_with_least_traffic(
    options: dict[str, Any], mode: str, shape: tuple[int, int]
) -> None:
    layout = choose(**options)
    assert (layout.mode, (layout.replicate, layout.shard)) == (mode, shape)
    assert layout.reason
    assert ("auto" in layout.reason) == (options.get("mode", "auto") == "auto" and options["world_size"] > 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"world_size": 16, "mode": "hsdp", "replicate": 3},
            "parallel.replicate=3: does not divide the 16 ranks of this run; use 1, 2, 4, 8 or 16.",
        ),
        ({"world_size": 4, "mode": "hsdp"}, "on one node, so hsdp would be fsdp; set it to 1, 2 or 4"),
        ({"world_size": 4, "cpu_offload": True, "device_type": "cpu"}, "this run is on CPU"),
    ],
    ids=str,
)
def test_an_impossible_layout_is_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        choose(**options)


@pytest.mark.parametrize(
    ("mode", "gib", "world_size", "smaller", "words"),
    [
        (
            "ddp",
            200.0,
            8,
            "adapter.base=nf4",
            "about 200.0 GiB .*128.0 GiB more than the 72.0 GiB .*shards over 4 ranks",
        ),
        ("fsdp", 1100.0, 8, "an adapter", "137.5 GiB.*65.5 GiB more.*fsdp on 16 such devices.*an adapter"),
        ("ddp", 100.0, 1, "adapter.base=nf4", "28.0 GiB more.*fsdp on 2 such devices.*adapter.base=nf4"),
        ("ddp", 100.0, 1, None, "28.0 GiB more.*fsdp on 2 such devices\\.$"),
    ],
)
def test_a_model_too_large_is_rejected_with_settings_that_would_fit(
    mode: Any, gib: float, world_size: int, smaller: str | None, words: str
) -> None:
    hardware = Hardware("cuda", world_size, 8, 80 * GIB)
    layout = choose_parallel_layout(ParallelConfig(mode=mode), hardware, mode == "ddp", needs(gib))
    with pytest.raises(ConfigError, match=f"(?s)model.path=some/model: .*{words}"):
        check_memory(hardware, layout, smaller, needs(gib), "some/model")


@pytest.mark.parametrize(
    ("adapter", "stores_mxfp4", "setting"),
    [
        (None, False, "an adapter instead of all weights, or an 8-bit optimizer"),
        ("bf16", False, "adapter.base=nf4"),
        ("nf4", False, None),
        ("bf16", True, "adapter.base=mxfp4"),
        ("mxfp4", True, None),
    ],
)
def test_smaller_weights_are_suggested_only_where_the_run_would_accept_them(
    adapter: Any, stores_mxfp4: bool, setting: str | None
) -> None:
    config = SimpleNamespace(adapter=adapter and SimpleNamespace(base=adapter))
    model = SimpleNamespace(architecture=SimpleNamespace(stores_mxfp4=stores_mxfp4))
    assert suggest_smaller_weights(cast(Any, config), cast(Any, model)) == setting


def test_a_run_that_may_not_fit_gives_a_warning() -> None:
    hardware = Hardware("cuda", 8, 8, 80 * GIB)
    layout = choose_parallel_layout(ParallelConfig(mode="fsdp"), hardware, False, needs(8.0))
    assert check_memory(hardware, layout, None, needs(8.0), "some/model") is None
    warning = check_memory(
        hardware, layout, None, lambda _: Footprint(parameters=60 * GIB, activations=30 * GIB), "some/model"
    )
    assert warning is not None
    assert "18.0 GiB more than the 72.0 GiB" in warning
    assert "a lower micro_batch_size" in warning


@pytest.mark.parametrize(
    ("precision", "has_adapter", "device", "expected"),
    [
        (None, True, "cpu", PrecisionPolicy(torch.float32, torch.float32)),
        (None, True, "cuda", PrecisionPolicy(torch.bfloat16, torch.bfloat16)),
        (None, False, "cuda", PrecisionPolicy(torch.float32, torch.bfloat16)),
        ("bf16_mixed", False, "cpu", PrecisionPolicy(torch.float32, torch.bfloat16)),
        ("float8", False, "cuda", PrecisionPolicy(torch.bfloat16, torch.bfloat16, has_float8_matmuls=True)),
        ("float8_mixed", False, "cuda", PrecisionPolicy(torch.float32, torch.bfloat16, has_float8_matmuls=True)),
    ],
)
def test_dtypes_follow_the_precision_and_the_device(
    precision: Any, has_adapter: bool, device: str, expected: PrecisionPolicy
) -> None:
    assert choose_precision(precision, has_adapter, device) == expected


def test_a_dtype_that_the_device_does_not_support_is_rejected() -> None:
    bf16, float8 = choose_precision("bf16", True, "cuda"), choose_precision("float8", False, "cuda")
    with pytest.raises(ConfigError, match=r"bfloat16 needs compute capability 8\.0 .* Some T4 has .* 7\.5"):
        check_device(bf16, "bf16", (7, 5), "Some T4")
    with pytest.raises(
        ConfigError, match=r"precision: float8 matrix products need compute capability 8\.9 .* Use bf16"
    ):
        check_device(float8, "bf16", (8, 0), "Some A100")
    with pytest.raises(ConfigError, match=r"adapter\.base=float8: float8 matrix products need"):
        check_device(bf16, "float8", (8, 0), "Some A100")
    check_device(float8, "bf16", (9, 0), "Some H100")
    check_device(float8, "bf16", None, "cpu")
