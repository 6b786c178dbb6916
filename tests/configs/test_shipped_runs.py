"""Every shipped config of a real model logs, evaluates and judges its run, and saves in every run over ten minutes."""

from __future__ import annotations

import pytest

from fctune.config.intervals import parse_interval
from fctune.config.loading import load_config
from fctune.config.run_length import RunLength, find_length_warnings
from fctune.config.shipped import list_shipped_configs
from tests.configs.cluster_cases import CASES
from tests.conftest import ROOT

# A second copy of the model, for answering, does not fit next to the training state.
TOO_LARGE = {"llama3_3_70b_lora", "qwen2_5_72b_full", "qwen3_32b_lora"}
TOO_LARGE |= {"qwen3_30b_a3b_lora", "qwen3_30b_a3b_qlora", "gpt_oss_20b_lora", "gpt_oss_120b_lora"}
VERDICTS = [name for name in CASES if name.endswith(("_dpo", "_grpo"))]
SUPERVISED = [name for name in CASES if name not in VERDICTS]
PACKS = 100_000 * 700 // 4096  # of the rows that README's tables assume


def test_every_config_of_a_real_model_is_covered() -> None:
    demos = {"tiny_lora", "tiny_full", "tiny_dpo", "tiny_grpo", "acceptance_cpu", "acceptance_2x8_h100"}
    assert {path.stem for path in list_shipped_configs()} - demos <= CASES.keys()


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_config_logs_evaluates_and_judges_its_run(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    telemetry, success = config.telemetry, config.success
    assert telemetry is not None
    assert telemetry.tensorboard
    assert telemetry.prometheus.port == 9464
    assert telemetry.wandb is not None
    assert telemetry.wandb.mode == "auto"
    assert (config.eval.every == 0) == (name in TOO_LARGE)
    assert success is not None
    assert success.trainable_parameters == CASES[name].num_trained
    assert (success.min_accuracy, success.min_gpu_utilization) == (0.85, 0.85)
    assert success.max_final_loss is None, "it depends on the data"
    assert success.max_memory_share is not None
    assert (success.min_planned_speed, success.min_tokens_per_s_per_gpu) == (0.7, None)
    exported_gb = 2 * CASES[name].num_parameters / 1e9  # bfloat16
    assert success.max_model_gb is not None
    assert exported_gb < success.max_model_gb < 1.25 * exported_gb
    assert success.no_out_of_memory
    assert success.final_checkpoint
    assert success.loss_decreases


@pytest.mark.parametrize("name", VERDICTS)
def test_a_config_that_learns_from_verdicts_logs_and_judges_its_run(name: str) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert (config.preference is None) == name.endswith("_grpo") != (config.grpo is None)
    assert config.log_every_n_steps == 1, "rewards and pass rates are measured in every step"
    assert config.telemetry is not None
    assert config.telemetry.prometheus.port == 9464
    assert config.success is not None
    assert config.success.trainable_parameters == CASES[name].num_trained
    assert config.success.min_accuracy == 0.85
    assert not config.success.loss_decreases, "each step has other answers"
    exported_gb = 2 * CASES[name].num_parameters / 1e9
    assert config.success.max_model_gb is not None
    assert exported_gb < config.success.max_model_gb < 1.25 * exported_gb


@pytest.mark.parametrize("name", SUPERVISED)
@pytest.mark.parametrize("step_s", [10.0, 60.0])
def test_a_config_suits_the_length_of_its_run(name: str, step_s: float) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    steps = config.epochs * -(-PACKS // config.global_batch_size)
    assert find_length_warnings(config, RunLength(steps, PACKS, step_s)) == []
    saves = parse_interval(config.checkpoint.every).in_steps(steps, step_s)
    assert saves is not None
    assert saves < steps
