"""Generation in a plan: bytes and seconds as computed by hand for Llama 3.1 8B on H100s."""

from __future__ import annotations

from typing import Any

import pytest

from fctune.apps.plan.estimate import RolloutPlan, count_cache_bytes, plan_rollouts
from fctune.apps.plan.plan import make_plan
from fctune.apps.plan.request import PlanRequest
from fctune.base.gpus import GPUS
from fctune.models.planned_model import find_architecture
from tests.parallel.sample_plans import LLAMA, parse_small_config

ADAPTER = {"rank": 8, "alpha": 16, "modules": ["q_proj"]}
PARAMETERS = 8_030_261_248
H100 = GPUS["h100"]


def make_config(path: str = LLAMA, **grpo: Any) -> Any:
    values = {"cases": "environment:files:100", "prompts_per_step": 16, "group_size": 8, "max_new_tokens": 500, **grpo}
    raw = {"model": {"path": path}, "adapter": ADAPTER, "grpo": values, "data": {"sources": [], "seq_len": 1000}}
    return parse_small_config(raw)


def plan(num_gpus: int = 1, pack_s: float = 0.1, **grpo: Any) -> RolloutPlan:
    found = plan_rollouts(make_config(**grpo), find_architecture(LLAMA)[0], PARAMETERS, H100, num_gpus, pack_s)
    assert found is not None
    return found


def serve(concurrency: int = 64) -> dict[str, Any]:
    return {"engine": "server", "server": {"url": "http://host:8000", "concurrency": concurrency}}


def test_the_cache_of_a_token_is_that_of_the_published_sizes() -> None:
    # 32 layers, 8 heads of keys and of values, 128 values each, 2 bytes.
    assert count_cache_bytes(find_architecture(LLAMA)[0]) == 131_072


def test_a_server_reads_weights_and_cache_once_a_step() -> None:
    one = plan(**serve())
    assert one.weights_bytes == 16_060_522_496
    assert one.cache_bytes == 64 * 1000 * 131_072
    assert one.num_answers == 128
    step_s = (16_060_522_496 + 64 * 500 * 131_072) / (H100.memory_gb_s * 1e9)
    assert one.tokens_per_s == pytest.approx(64 / step_s)
    assert one.generation_s == pytest.approx(128 * 500 * step_s / 64)
    assert one.training_s == pytest.approx(12.8)
    assert one.batch_s == max(one.generation_s, one.training_s)
    assert plan(max_staleness=0, **serve()).batch_s == pytest.approx(one.generation_s + 12.8)


def test_many_answers_at_a_time_are_bound_by_the_peak_rate() -> None:
    many = plan(prompts_per_step=1024, group_size=16, **serve(100_000))
    assert many.num_concurrent == 16_384
    assert not many.fits
    busy = 2 * PARAMETERS * 16_384 / (H100.bf16_tflops * 1e12)
    read = (many.weights_bytes + many.cache_bytes / 2) / (H100.memory_gb_s * 1e9)
    assert many.tokens_per_s == pytest.approx(16_384 / max(busy, read))


def test_a_servers_gpus_share_weights_and_ranks_do_not() -> None:
    shared, own = plan(4, **serve()), plan(4)
    assert shared.weights_bytes == 16_060_522_496 / 4
    assert own.weights_bytes == 16_060_522_496
    assert shared.is_overlapped
    assert not own.is_overlapped
    assert own.num_concurrent == 128, "of 4 x 64 places"
    assert plan(1).generation_s == pytest.approx(
        2 * 500 * (16_060_522_496 + 32_000 * 131_072) / (H100.memory_gb_s * 1e9)
    )


def test_training_stays_in_the_memory_of_ranks_that_generate() -> None:
    architecture, training = find_architecture(LLAMA)[0], 60 * 1024**3
    apart, own = (
        plan_rollouts(make_config(**grpo), architecture, PARAMETERS, H100, 1, 0.1, training) for grpo in (serve(), {})
    )
    assert apart is not None
    assert own is not None
    assert apart.fits
    assert apart.free_bytes == H100.memory_bytes - apart.weights_bytes - apart.cache_bytes
    assert own.free_bytes == apart.free_bytes - training
    assert not own.fits


def test_a_server_that_sleeps_while_the_model_trains_needs_no_gpus_of_its_own(make_model: Any) -> None:
    served = serve()
    served["server"]["sleeps_while_training"] = True
    config = make_config(str(make_model("llama")), max_staleness=0, **served)
    config.max_steps = 10
    found = make_plan(config, PlanRequest(H100, gpus_per_node=8, rows=10, mean_tokens=10))
    rollouts, footprint = found.estimate.rollouts, found.peak.footprint
    assert rollouts is not None
    assert (rollouts.num_gpus, found.estimate.num_gpus) == (8, 8)
    assert rollouts.training_bytes == footprint.state + footprint.buffers + footprint.context
    assert not rollouts.is_overlapped


def test_the_plan_of_a_run_has_both_sides(make_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from fctune.apps.plan.table import print_plan
    from fctune.base.terminal import Terminal

    config = make_config(str(make_model("llama")), updates_per_batch=2, **serve())
    config.max_steps = 100
    found = make_plan(config, PlanRequest(H100, gpus_per_node=8, server_gpus=2, price=2.0, rows=10, mean_tokens=10))
    made, rollouts = found.estimate, found.estimate.rollouts
    assert rollouts is not None
    assert rollouts.num_gpus == 2
    assert found.to_json()["rollouts"]["batch_s"] == rollouts.batch_s
    print_plan(Terminal(), found)
    said = capsys.readouterr().out
    training_hours = made.hours - made.startup.total_s / 3600
    assert training_hours == pytest.approx(50 * rollouts.batch_s / 3600), "50 batches, whatever rows there are"
    assert found.to_json()["gpu_hours"] == pytest.approx(10 * made.hours), "the server's GPUs are paid for, too"
    assert "not prepared" not in said
    assert "generation on 2 GPUs" in said
    assert "a batch of 128 answers: at least" in said


@pytest.mark.parametrize("share", [0.25, 0.0])
def test_the_rows_of_a_distillation_are_trained_beside_its_answers(
    share: float, make_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from fctune.apps.plan.table import print_plan
    from fctune.base.terminal import Terminal

    path = str(make_model("llama"))
    distill = {"teacher": path, "on_policy_share": share, "answers_per_step": 8, "max_new_tokens": 500}
    if share:
        distill |= {"cases": "synthetic:train:100", **serve()}
    data = {"sources": [{"path": "synthetic:train:100"}], "seq_len": 1000, "validation_share": 0.0}
    config = parse_small_config({"model": {"path": path}, "adapter": ADAPTER, "distill": distill, "data": data})
    config.epochs = 3
    found = make_plan(config, PlanRequest(H100, gpus_per_node=1, rows=100, mean_tokens=10, price=2.0))
    made = found.estimate
    row_s = made.time.total_s / config.global_batch_size
    print_plan(Terminal(), found)
    said = capsys.readouterr().out
    if share:
        assert made.rollouts is not None
        assert (made.rollouts.num_answers, made.rollouts.num_rows) == (2, 6)
        assert made.rollouts.training_s == pytest.approx(8 * row_s)
        assert found.num_steps is None, "the cases are not counted"
        assert "a batch of 2 answers and 6 rows: at least" in said
    else:
        assert made.rollouts is None
        assert made.step_s == pytest.approx(8 * row_s)
        assert found.num_steps == 39, "three epochs of 100 rows, eight a step"
        assert made.training_hours >= 39 * made.step_s / 3600
        assert "39 steps:" in said
