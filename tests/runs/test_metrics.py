"""FLOP counting, timers, memory and step-time statistics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fctune.runs.device import compute_capability, describe_device, read_device, total_memory
from fctune.runs.metrics import FlopCounter, SpanTimer, StepTimeStats, measure_skew, peak_memory_gib

LLAMA_8B = {"num_parameters": 8_030_261_248, "num_layers": 32, "attention_dim": 4096}


def test_flops_match_published_figures() -> None:
    lora, full = FlopCounter(**LLAMA_8B, is_frozen=True), FlopCounter(**LLAMA_8B, is_frozen=False)
    # NeMo Automodel: 402 TFLOP/s at 12,472.87 tokens/s of LoRA on Llama 3 8B, attention not counted.
    assert lora.weights(12_473) == pytest.approx(402e12, rel=0.005)
    # torchtitan: 5,762 tokens/s at 8,192 tokens are 33.7 % of 989 TFLOP/s, with dense attention and without the 525M
    # weights of the embedding.
    titan = FlopCounter(8_030_261_248 - 128_256 * 4096, 32, 4096, is_frozen=False)
    assert titan.weights(5762) + titan.dense_attention(5762, 8192) == pytest.approx(0.337 * 989e12, rel=0.01)
    assert full.weights(10) == 6 * 8_030_261_248 * 10


def test_attention_is_counted_within_conversations() -> None:
    counter = FlopCounter(1, 2, 64, is_frozen=False)
    lengths = [3, 5]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    # Query times key and weight times value: 2 x 2 x 64 per layer; backward twice that.
    assert counter.attention(pairs) == 3 * 2 * (4 * 64) * pairs
    assert counter.dense_attention(8, 8) > 3 * counter.attention(pairs) / 2


def test_skew_names_the_slowest_rank() -> None:
    assert measure_skew([1.0, 1.0, 1.5, 1.0]) == {"compute_skew": 1.5, "slowest_rank": 2}
    assert measure_skew([2.0]) == {"compute_skew": 1.0, "slowest_rank": 0}
    assert measure_skew([1.0, 1.3]) == {
        "compute_skew": 1.3,
        "slowest_rank": 1,
    }  # compared with the other rank, not with the mean of both
    assert measure_skew([4.0, 1.0, 3.0, 2.0]) == {"compute_skew": 2.0, "slowest_rank": 0}


def test_a_timer_returns_the_settled_span() -> None:
    timer = SpanTimer(torch.device("cpu"))
    assert timer.last_s != timer.last_s  # NaN: nothing measured
    timer.start()
    time.sleep(0.02)
    timer.stop()
    time.sleep(0.02)
    timer.settle()
    assert 0.02 <= timer.last_s < 0.04


def test_peak_memory_of_this_process_grows_with_its_tensors() -> None:
    before = peak_memory_gib(torch.device("cpu"))
    held = torch.ones(64 * 1024 * 1024)  # 256 MiB, touched
    assert peak_memory_gib(torch.device("cpu")) >= max(before, held.nbytes / 1024**3)


def test_a_cpu_has_no_compute_capability() -> None:
    device = torch.device("cpu")
    assert compute_capability(device) is None
    assert describe_device(device).startswith("cpu, ")
    assert total_memory(device, 2) == total_memory(device, 1) // 2 > 0
    if not torch.cuda.is_available():
        assert read_device(0) is None


@pytest.mark.gpu
def test_nvml_reads_the_gpu_of_the_torch_index() -> None:
    pytest.importorskip("pynvml")
    reading = read_device(0)
    assert reading is not None
    assert torch.cuda.get_device_name(0).split()[-1] in reading.name
    assert reading.memory_total_bytes is not None
    assert reading.memory_total_bytes >= 0.9 * total_memory(torch.device("cuda", 0), 1)
    assert reading.power_w is None or 0 < reading.power_w < 2000


def count_products(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Count the FLOPs of all matrix products in a forward and a backward, by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        run().backward()
    kinds = {"mm", "addmm", "bmm", "baddbmm"}
    return sum(int(n) for op, n in counter.get_flop_counts()["Global"].items() if str(op).split(".")[-1] in kinds)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_hardware_flops_match_torchs_counter(
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
    # The input of the first adapter needs no gradient, and a block's last product is not recomputed.
    assert ours == pytest.approx(counted, rel=0.06 if kind == "lora" or fraction else 0.005)
    assert ours >= 0.995 * counted


def test_percentiles_leave_out_the_first_steps() -> None:
    times = StepTimeStats(num_kept=200, num_skipped=2)
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
