"""What a step measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fctune.telemetry.device import compute_capability, describe_device, read_device, total_memory
from fctune.telemetry.metrics import FlopCounter, SpanTimer, StepTimeStats, measure_skew, peak_memory_gib

LLAMA_8B = {"num_parameters": 8_030_261_248, "num_layers": 32, "attention_dim": 4096}


def test_flops_are_counted_as_others_publish_them() -> None:
    lora, full = FlopCounter(**LLAMA_8B, is_frozen=True), FlopCounter(**LLAMA_8B, is_frozen=False)
    # NeMo Automodel: 402 TFLOP/s at 12,472.87 tokens/s of LoRA on Llama 3 8B, attention not counted.
    assert lora.weights(12_473) == pytest.approx(402e12, rel=0.005)
    # torchtitan: 5,762 tokens/s at 8,192 tokens are 33.7 % of 989 TFLOP/s, its dense attention counted; it leaves the
    # 525M weights of the embedding out.
    titan = FlopCounter(8_030_261_248 - 128_256 * 4096, 32, 4096, is_frozen=False)
    assert titan.weights(5762) + titan.dense_attention(5762, 8192) == pytest.approx(0.337 * 989e12, rel=0.01)
    assert full.weights(10) == 6 * 8_030_261_248 * 10


def test_attention_is_counted_within_conversations() -> None:
    counter = FlopCounter(1, 2, 64, is_frozen=False)
    lengths = [3, 5]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    # A product of a query and a key, and of a weight and a value: 2 x 2 x 64 a layer; backward twice that.
    assert counter.attention(pairs) == 3 * 2 * (4 * 64) * pairs
    assert counter.dense_attention(8, 8) > 3 * counter.attention(pairs) / 2


def test_the_slowest_rank_is_named() -> None:
    assert measure_skew([1.0, 1.0, 1.5, 1.0]) == {"compute_skew": 1.5, "slowest_rank": 2}
    assert measure_skew([2.0]) == {"compute_skew": 1.0, "slowest_rank": 0}
    assert measure_skew([1.0, 1.3]) == {"compute_skew": 1.3, "slowest_rank": 1}  # over the other, not over both's mean
    assert measure_skew([4.0, 1.0, 3.0, 2.0]) == {"compute_skew": 2.0, "slowest_rank": 0}


def test_a_clock_gives_the_span_that_was_settled() -> None:
    clock = SpanTimer(torch.device("cpu"))
    assert clock.last_s != clock.last_s  # NaN: nothing measured
    clock.start()
    time.sleep(0.02)
    clock.stop()
    time.sleep(0.02)
    clock.settle()
    assert 0.02 <= clock.last_s < 0.04


def test_memory_of_this_process_is_its_peak() -> None:
    before = peak_memory_gib(torch.device("cpu"))
    held = torch.ones(64 * 1024 * 1024)  # 256 MiB, touched
    assert peak_memory_gib(torch.device("cpu")) >= max(before, held.nbytes / 1024**3)


def test_a_machine_without_a_gpu_says_so() -> None:
    device = torch.device("cpu")
    assert compute_capability(device) is None
    assert describe_device(device).startswith("cpu, ")
    assert total_memory(device, 2) == total_memory(device, 1) // 2 > 0
    if not torch.cuda.is_available():
        assert read_device(0) is None


@pytest.mark.gpu
def test_nvml_reads_the_gpu_that_torch_names() -> None:
    pytest.importorskip("pynvml")
    reading = read_device(0)
    assert reading is not None
    assert torch.cuda.get_device_name(0).split()[-1] in reading.name
    assert reading.memory_total_bytes is not None
    assert reading.memory_total_bytes >= 0.9 * total_memory(torch.device("cuda", 0), 1)
    assert reading.power_w is None or 0 < reading.power_w < 2000


def count_products(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Operations of all matrix products of a forward and a backward, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        run().backward()
    kinds = {"mm", "addmm", "bmm", "baddbmm"}
    return sum(int(n) for op, n in counter.get_flop_counts()["Global"].items() if str(op).split(".")[-1] in kinds)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_products_that_a_device_computes_are_those_that_torch_counts(
    kind: str, fraction: float, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    from fctune.models.base_weights import load_base_
    from fctune.models.causal_lm import materialize_
    from fctune.models.lora import apply_lora_, init_adapters_
    from fctune.models.precision import PrecisionPolicy
    from fctune.models.sources import read_architecture
    from fctune.parallel.activations import apply_activation_checkpointing_
    from fctune.training.meter import count_flops
    from tests.training.training_runs import make_config

    path = make_model(num_hidden_layers=4)
    config = make_config(path, tmp_path, activation_checkpointing={"fraction": fraction}, precision="fp32")
    model = read_architecture(path).build_model(64, PrecisionPolicy.uniform(torch.float32))
    if kind == "lora":
        assert config.adapter is not None
        apply_lora_(model, replace(config.adapter, dropout=0.0, modules=["q_proj", "down_proj"]))
    materialize_(model, torch.device("cpu"), False)
    load_base_(model, path)
    if kind == "lora":
        init_adapters_(model, 0)
    apply_activation_checkpointing_(model, config.activation_checkpointing, "cpu")
    model.train()
    tokens = torch.randint(0, model.architecture.vocab_size, (2, 64))
    labels = torch.full_like(tokens, -100)
    labels[:, 40:] = tokens[:, 40:]
    counted = count_products(model, lambda: model(tokens, labels=labels))
    ours = count_flops(model, config).hardware(tokens.numel(), 2 * 24, 0)
    # Of an adapter's first input no gradient is due; a block's last product is not computed again.
    assert ours == pytest.approx(counted, rel=0.06 if kind == "lora" or fraction else 0.005)
    assert ours >= 0.995 * counted


def test_percentiles_of_the_last_steps_leave_the_first_ones_out() -> None:
    times = StepTimeStats(num_kept=200, num_first=2)
    times.add(60.0)
    times.add(30.0)
    assert times.describe() == {}
    for n in range(1, 301):
        times.add(float(n))
    kept = np.arange(101, 301)
    assert times.describe() == {
        "step_time_p50_s": np.median(kept),
        "step_time_p99_s": np.percentile(kept, 99, method="inverted_cdf"),
    }
