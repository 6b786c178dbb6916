"""What a step measures."""

from __future__ import annotations

import time

import pytest
import torch

from fctune.telemetry.device import capability_of, describe_device, read_device, total_memory
from fctune.telemetry.metrics import FlopCounter, StepClock, describe_skew, peak_memory_gib

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
    assert describe_skew([1.0, 1.0, 1.5, 1.0]) == {"compute_skew": 1.5, "slowest_rank": 2}
    assert describe_skew([2.0]) == {"compute_skew": 1.0, "slowest_rank": 0}


def test_a_clock_gives_the_span_that_was_settled() -> None:
    clock = StepClock(torch.device("cpu"))
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
    assert capability_of(device) is None
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
