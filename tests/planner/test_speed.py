"""Time of a step where it is not that of packed bfloat16 on one kind of layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fctune.cli import main
from fctune.gpus import find_gpu
from fctune.planner.memory_timeline import Setting
from fctune.planner.plan import make_plan
from fctune.planner.plan_request import PlanRequest
from fctune.planner.speed import count_flops, estimate_step_time
from tests.conftest import ROOT
from tests.planner.test_plan import LLAMA, config_of, memory_of

FULL = {"precision": "bf16_mixed", "compile": True}
FULL_CONFIG = str(ROOT / "configs" / "llama3_1_8b_full.yaml")


def test_unpacked_rows_are_gathered_for_as_often_as_packs_are() -> None:
    """A step of 128 short rows is 4 micro-batches of 2 a rank, however few places they take."""
    memory, gpu, setting = (
        memory_of(config_of(LLAMA, 4096, **FULL), 79.1),
        find_gpu("h100"),
        Setting("fsdp", 1, 16, 0.0, 2),
    )
    flops = count_flops(memory, 0.0, 0.25, 250.0)
    packed = estimate_step_time(memory, gpu, setting, flops, 128, 8)
    short = estimate_step_time(memory, gpu, setting, flops, 128, 8, slots_per_pack=512)
    assert short.gathered_bytes == packed.gathered_bytes
    assert short.compute_s == pytest.approx(packed.compute_s / 8)
    one_each = estimate_step_time(memory, gpu, Setting("fsdp", 1, 128, 0.0, 1), flops, 128, 8, slots_per_pack=512)
    assert one_each.compute_s == pytest.approx(short.compute_s / 8)  # and not that of a row of 4096


def test_copies_of_shards_within_a_node_share_its_adapters() -> None:
    """On 2 nodes of 8, 4 copies over 4 ranks each: 4 rings at once over 8 adapters, 2 a ring."""
    memory = memory_of(config_of(LLAMA, 4096, **FULL), 79.1)
    gpu = replace(find_gpu("h100"), nic_gb_s=1.0)
    flops = count_flops(memory, 0.0, 0.25, 250.0)
    numel = 8_030_261_248
    for shard, adapters in ((8, 1), (4, 2), (2, 4), (1, 8)):
        copies = 16 // shard
        sent = estimate_step_time(memory, gpu, Setting("hsdp", copies, shard, 0.0, 1), flops, 16, 8).collectives_s
        summed = 2 * numel * 4 / shard * (copies - 1) / copies / (adapters * 0.8e9)
        blocks, ends = 32 * 218_112_000, 2 * 128_256 * 4096 + 4096
        within = (2 * (2 * blocks + ends) + 4 * numel) * (shard - 1) / shard / (450 * 0.8e9)
        assert sent == pytest.approx(summed + within, rel=1e-6), shard


def test_sums_that_are_sent_once_a_step_hide_behind_its_last_micro_batch_alone() -> None:
    """Gradients that accumulate are not there to be sent before (``fctune.parallel.sharding.defer_reduce``)."""
    config = config_of(LLAMA, 2048, adapter={"rank": 64}, compile=True)
    memory, gpu = memory_of(config, 79.1), replace(find_gpu("h100"), nic_gb_s=0.1)
    setting, flops = Setting("ddp", 16, 1, 0.0, 2), count_flops(memory_of(config, 79.1), 0.0, 0.25, 250.0)
    one, eight = (estimate_step_time(memory, gpu, setting, flops, packs, 8) for packs in (32, 256))
    assert one.exposed_s > one.collectives_s / 2
    assert eight.collectives_s == one.collectives_s
    assert eight.compute_s == pytest.approx(8 * one.compute_s)
    assert eight.exposed_s == pytest.approx(one.exposed_s)


def test_float32_is_as_slow_as_it_is_without_tensor_cores(capsys: pytest.CaptureFixture[str]) -> None:
    ask = PlanRequest(find_gpu("h100"), 2, 8)
    wide = make_plan(config_of(LLAMA, 4096, precision="fp32", compile=True), ask)
    narrow = make_plan(config_of(LLAMA, 4096, precision="bf16", compile=True), ask)
    assert wide.time.compute_s == pytest.approx(narrow.time.compute_s * 989 / 67)
    by_hand = ["--gpu", "mine", "--gpu-memory-gib", "80", "--tflops", "900"]
    for arguments, is_said in (([], False), (by_hand, True)):
        main(["plan", "--config", FULL_CONFIG, "--nodes", "2", "precision=fp32", *arguments])
        out = capsys.readouterr().out
        assert ("the rate of precision=fp32 is not known here: bf16's is taken" in out) is is_said
        assert ("of 67 TFLOP/s" in out) is not is_said


def test_what_is_offloaded_costs_time() -> None:
    ask = PlanRequest(find_gpu("h100"), 1, 8)
    here = make_plan(config_of(LLAMA, 4096, parallel={"mode": "fsdp"}, **FULL), ask)
    away = make_plan(config_of(LLAMA, 4096, parallel={"mode": "fsdp", "cpu_offload": True}, **FULL), ask)
    part = 8_030_261_248 / 8
    # 8 micro-batches of 2 over 8 ranks: float32 shards come twice each, gradients go each time, as they are not held.
    assert away.setting.accumulation == 8
    assert away.time.host_s == pytest.approx(8 * (2 * 4 * part + 4 * part) / 25e9, rel=0.01)
    # Weights, gradients and two moments are read, and all but gradients written, by the host.
    assert away.time.update_s == pytest.approx(4 * 8 * part / 40e9, rel=0.01)
    assert away.time.total_s > here.time.total_s
    checkpointing = {"fraction": 1.0, "offload": True}
    kept = make_plan(config_of(LLAMA, 4096, activation_checkpointing=checkpointing, **FULL), ask)
    assert kept.time.host_s == pytest.approx(2 * 32 * 4096 * 2 * (16 * 4096) / 25e9)  # a block's input, there and back


def test_a_micro_batch_is_no_larger_than_a_ranks_share_of_the_batch() -> None:
    ask = PlanRequest(find_gpu("h100"), 2, 8)
    sizes = {"adapter": {"rank": 8}, "global_batch_size": 16}
    small, large = (make_plan(config_of(LLAMA, 4096, micro_batch_size=size, **sizes), ask) for size in (1, 64))
    assert large.fits
    assert (large.setting, large.peak, large.time) == (small.setting, small.peak, small.time)


def test_logits_are_computed_again_only_where_they_take_several_chunks() -> None:
    """256 supervised places of 128,256 logits are one chunk; 512 are two."""
    memory = memory_of(config_of(LLAMA, 1024, micro_batch_size=2, **FULL), 79.1)
    one, two = (count_flops(memory, 0.0, 0.25, 0.0, micro_batch_size=size).head for size in (1, 2))
    assert two == pytest.approx(one * 8 / 6)


def test_steps_that_the_config_bounds_are_not_said_to_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", FULL_CONFIG, "--nodes", "2", "max_steps=100"]) == 0
    out = capsys.readouterr().out
    assert "100 steps: " in out
    assert "hours are not known" not in out
    assert "max_steps are taken, of full packs" in out
