"""Step times of unpacked rows, HSDP, accumulation, float32 and offloading."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fctune.apps.plan.memory_timeline import Setting
from fctune.apps.plan.plan import make_plan
from fctune.apps.plan.plan_request import PlanRequest
from fctune.apps.plan.speed import count_flops, estimate_step_time
from fctune.base.gpus import find_gpu
from fctune.cli import main
from tests.apps.plan.sample_plans import LLAMA, make_config, make_memory
from tests.conftest import ROOT

FULL = {"precision": "bf16_mixed", "compile": True}
FULL_CONFIG = str(ROOT / "configs" / "llama3_1_8b_full.yaml")


def test_unpacked_rows_need_as_many_gathers_as_packs() -> None:
    """A step of 128 short rows has 4 micro-batches of 2 per rank, whatever their length."""
    memory, gpu, setting = (
        make_memory(make_config(LLAMA, 4096, **FULL), 79.1),
        find_gpu("h100"),
        Setting("fsdp", 1, 16, 0.0, 2),
    )
    flops = count_flops(memory, 0.0, 0.25, 250.0)
    packed = estimate_step_time(memory, gpu, setting, flops, 128, 8)
    short = estimate_step_time(memory, gpu, setting, flops, 128, 8, slots_per_pack=512)
    assert short.gathered_bytes == packed.gathered_bytes
    assert short.compute_s == pytest.approx(packed.compute_s / 8)
    one_each = estimate_step_time(memory, gpu, Setting("fsdp", 1, 128, 0.0, 1), flops, 128, 8, slots_per_pack=512)
    assert one_each.compute_s == pytest.approx(short.compute_s / 8)  # not that of a row of 4096


def test_replicas_within_a_node_share_its_network_adapters() -> None:
    """On 2 nodes of 8 GPUs with 4 replicas of 4 shards, 4 rings share 8 adapters, 2 per ring."""
    memory = make_memory(make_config(LLAMA, 4096, **FULL), 79.1)
    gpu = replace(find_gpu("h100"), nic_gb_s=1.0)
    flops = count_flops(memory, 0.0, 0.25, 250.0)
    numel = 8_030_261_248
    for shard, adapters in ((8, 1), (4, 2), (2, 4), (1, 8)):
        replicas = 16 // shard
        sent = estimate_step_time(memory, gpu, Setting("hsdp", replicas, shard, 0.0, 1), flops, 16, 8).collectives_s
        summed = 2 * numel * 4 / shard * (replicas - 1) / replicas / (adapters * 0.8e9)
        blocks, ends = 32 * 218_112_000, 2 * 128_256 * 4096 + 4096
        within = (2 * (2 * blocks + ends) + 4 * numel) * (shard - 1) / shard / (450 * 0.8e9)
        assert sent == pytest.approx(summed + within, rel=1e-6), shard


def test_gradients_reduced_once_per_step_overlap_with_the_last_micro_batch_only() -> None:
    """Gradients that accumulate are not there to be sent before (``fctune.parallel.sharding.GradientSync``)."""
    config = make_config(LLAMA, 2048, adapter={"rank": 64}, compile=True)
    memory, gpu = make_memory(config, 79.1), replace(find_gpu("h100"), nic_gb_s=0.1)
    setting, flops = Setting("ddp", 16, 1, 0.0, 2), count_flops(make_memory(config, 79.1), 0.0, 0.25, 250.0)
    one, eight = (estimate_step_time(memory, gpu, setting, flops, packs, 8) for packs in (32, 256))
    assert one.exposed_s > one.collectives_s / 2
    assert eight.collectives_s == one.collectives_s
    assert eight.compute_s == pytest.approx(8 * one.compute_s)
    assert eight.exposed_s == pytest.approx(one.exposed_s, rel=1e-3)


def test_float32_runs_at_the_rate_without_tensor_cores(capsys: pytest.CaptureFixture[str]) -> None:
    request = PlanRequest(find_gpu("h100"), 2, 8)
    alike = {"compile": True, "activation_checkpointing": {"fraction": 1.0}}
    wide = make_plan(make_config(LLAMA, 4096, precision="fp32", **alike), request)
    narrow = make_plan(make_config(LLAMA, 4096, precision="bf16", **alike), request)
    # Recomputed kernels between products move twice the bytes at the same rate.
    assert wide.time.compute_s == pytest.approx(narrow.time.compute_s * 989 / 67, rel=0.05)
    unknown = ["--gpu", "mine", "--gpu-memory-gib", "80", "--tflops", "900"]
    for arguments, is_unknown in (([], False), (unknown, True)):
        main(["plan", "--config", FULL_CONFIG, "--nodes", "2", "precision=fp32", *arguments])
        out = capsys.readouterr().out
        assert ("the rate of precision=fp32 is unknown for this GPU; bf16's was used" in out) is is_unknown
        assert ("of 67 TFLOP/s" in out) is not is_unknown


def test_offloading_costs_time() -> None:
    request = PlanRequest(find_gpu("h100"), 1, 8)
    here = make_plan(make_config(LLAMA, 4096, parallel={"mode": "fsdp"}, **FULL), request)
    away = make_plan(make_config(LLAMA, 4096, parallel={"mode": "fsdp", "cpu_offload": True}, **FULL), request)
    part = 8_030_261_248 / 8
    # 8 micro-batches of 2 over 8 ranks: each copies the float32 shards twice to the GPU and the gradients to the host.
    assert away.setting.accumulation == 8
    assert away.time.host_s == pytest.approx(8 * (2 * 4 * part + 4 * part) / 25e9, rel=0.01)
    # The host reads weights, gradients and two moments, and writes all but the gradients.
    assert away.time.update_s == pytest.approx(4 * 8 * part / 40e9, rel=0.01)
    assert away.time.total_s > here.time.total_s
    checkpointing = {"fraction": 1.0, "offload": True}
    kept = make_plan(make_config(LLAMA, 4096, activation_checkpointing=checkpointing, **FULL), request)
    assert kept.time.host_s == pytest.approx(
        2 * 32 * 4096 * 2 * (16 * 4096) / 25e9
    )  # each block's input, in both directions


def test_a_micro_batch_is_no_larger_than_a_ranks_share_of_the_batch() -> None:
    request = PlanRequest(find_gpu("h100"), 2, 8)
    sizes = {"adapter": {"rank": 8}, "global_batch_size": 16}
    small, large = (make_plan(make_config(LLAMA, 4096, micro_batch_size=size, **sizes), request) for size in (1, 64))
    assert large.fits
    assert (large.setting, large.peak, large.time) == (small.setting, small.peak, small.time)


def test_logits_are_recomputed_only_if_they_need_several_chunks() -> None:
    """256 supervised positions with 128,256 logits each are one chunk; 512 are two."""
    memory = make_memory(make_config(LLAMA, 1024, micro_batch_size=2, **FULL), 79.1)
    one, two = (count_flops(memory, 0.0, 0.25, 0.0, micro_batch_size=size).head for size in (1, 2))
    assert two == pytest.approx(one * 8 / 6)


def test_steps_bounded_by_the_config_are_not_reported_as_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", FULL_CONFIG, "--nodes", "2", "max_steps=100"]) == 0
    out = capsys.readouterr().out
    assert "100 steps: " in out
    assert "hours are unknown" not in out
    assert "max_steps of full packs are assumed" in out
