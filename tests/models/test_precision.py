"""Dtypes that a processor has no instructions for: found as the processor lists them, and said when a run uses one."""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import pytest
import torch

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.config.loading import load_config
from fctune.models.precision import is_emulated
from fctune.training import setup
from tests.conftest import ROOT, TINY_BASE

CPU_FLAGS = Path("/proc/cpuinfo")


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPU_FLAGS.is_file(), reason="x86 on Linux lists its flags")
def test_bfloat16_is_emulated_where_the_processor_lists_no_instructions_for_it() -> None:
    flags = set(next(line for line in CPU_FLAGS.read_text().splitlines() if line.startswith("flags")).split())
    has_instructions = {"avx512bw", "avx512vl", "avx512dq"} <= flags or "avx_ne_convert" in flags
    assert is_emulated(torch.bfloat16) == (not has_instructions)
    assert not is_emulated(torch.float32)


@pytest.mark.parametrize(("precision", "is_said"), [("bf16", True), ("fp32", False)])
def test_a_run_in_an_emulated_dtype_names_the_faster_precision(
    precision: str, is_said: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(ROOT / "configs" / "tiny_lora.yaml", [f"precision={precision}"])
    monkeypatch.setattr(setup, "is_emulated", lambda dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(distributed, "run_on_all_ranks", lambda action: action())  # one rank, without a group
    with caplog.at_level(logging.WARNING):
        setup.build_base(config, TINY_BASE, World(0, 1, 0, torch.device("cpu")))
    assert (f"precision={precision}: this processor has no instructions" in caplog.text) == is_said
    assert ("set precision=fp32" in caplog.text) == is_said
