"""The registry covers all metrics that a run writes, and the dashboard queries only metrics of the endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fctune.base.distributed import World
from fctune.config.loading import parse_config
from fctune.runs.metrics import RankMetrics, StepTimeStats, aggregate_ranks
from fctune.runs.names import METRICS, find_metric
from fctune.runs.sinks import SinkGroup
from fctune.training.loop import build_loader, count_steps, train
from fctune.training.setup import build_base, plan_parallelism, prepare_data, shard_and_load_, start_state
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.training.training_runs import make_config

MONITORING = ROOT / "sky" / "monitoring"


def run_steps(world: World, model: Path, folder: Path) -> list[dict[str, Any]]:
    class Recorder:
        def write(self, metrics: dict[str, Any]) -> None:
            written.append(metrics)

        def close(self) -> None: ...

    written: list[dict[str, Any]] = []
    config = make_config(model, folder, adapter=None, max_steps=3, validation={"every": 2})
    shaped = build_base(config, model, world)
    layout = plan_parallelism(shaped, config, world)
    prepared = prepare_data(config, model, None, world)
    gradient_sync = shard_and_load_(shaped, config, model, world, layout)
    loader = build_loader(config, prepared)
    num_steps = count_steps(config, loader, world)
    train(
        config, start_state(shaped, config, num_steps, gradient_sync), loader, num_steps, world, SinkGroup(Recorder())
    )
    return written


def test_every_metric_that_a_run_writes_is_registered(make_model: Callable[..., Path], tmp_path: Path) -> None:
    (steps,) = run_ranks(run_steps, 1, make_model(), tmp_path)
    assert len(steps) == 3
    keys = set().union(*steps)
    assert {"loss", "compute_skew", "validation_loss"} <= keys
    assert not [key for key in keys if find_metric(key) is None]
    for key in keys:
        metric = find_metric(key)
        assert metric is not None
        values = [step[key] for step in steps if key in step]
        assert all(isinstance(value, str) == (metric.kind == "text") for value in values), key


def test_metrics_aggregated_over_ranks_and_steps_are_registered() -> None:
    times = StepTimeStats(num_skipped=0)
    times.add(1.0)
    keys = {*aggregate_ranks([RankMetrics(*[1.0] * len(RankMetrics().to_row()))]), *times.describe()}
    assert {"gpu_power_w", "alloc_retries", "step_time_p99_s"} <= keys
    assert not [key for key in keys if find_metric(key) is None]


def test_a_category_belongs_to_its_family_and_an_unknown_name_to_none() -> None:
    metric = find_metric("eval_accuracy/single")
    assert metric is not None
    assert metric.name == "eval_accuracy/*"
    assert find_metric("losss") is None
    assert find_metric("loss/single") is None


def test_the_dashboard_queries_only_metrics_of_the_endpoint() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    exposed = {m.prometheus for m in METRICS if m.kind != "text"} | {"fctune_num_steps", "fctune_alerts_total"}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    for expression in queries:
        assert re.search(r"\b(fctune|DCGM_FI|node|kubelet)_\w+|\bALERTS\b", expression), expression
        assert set(re.findall(r"fctune_\w+", expression)) <= exposed, expression
        assert expression.count("(") == expression.count(")")
    shown = {name for expression in queries for name in re.findall(r"fctune_\w+", expression)}
    assert {"fctune_loss", "fctune_tokens_per_s", "fctune_eval_accuracy", "fctune_alerts_total"} <= shown


def test_the_alerting_rules_use_only_metrics_of_the_endpoint_and_say_what_to_do() -> None:
    exposed = {m.prometheus for m in METRICS if m.kind != "text"} | {"fctune_num_steps", "fctune_alerts_total"}
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(re.findall(r"\bfctune_\w+", rule["expr"])) <= exposed, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        for page in re.findall(r"docs/[\w-]+\.md", rule["annotations"]["description"]):
            assert (ROOT / page).is_file(), page
        described = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
        assert f"`{rule['alert']}`" in described, rule["alert"]


def test_dashboard_panels_do_not_overlap() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in panels)
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_scrape_config_reads_its_targets_from_a_file() -> None:
    scrape = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    job = scrape["scrape_configs"][0]
    assert job["job_name"] == "fctune"
    assert job["file_sd_configs"][0]["files"] == ["runs.json"]
    assert "metrics_path" not in job  # the default, /metrics, is the endpoint's path


def test_a_config_accepts_sinks_but_no_api_key(tiny_base: Path, tmp_path: Path) -> None:
    raw = {
        "output_dir": str(tmp_path / "run"),
        "model": {"path": str(tiny_base)},
        "data": {"sources": [{"path": "synthetic:train:8:1"}]},
        "telemetry": {"wandb": {"project": "calls"}, "tensorboard": True, "prometheus": {"port": 9464}},
    }
    problems: list[str] = []
    config = parse_config(raw, problems)
    assert not problems
    assert config is not None
    assert config.telemetry is not None
    assert config.telemetry.wandb is not None
    assert config.telemetry.wandb.mode == "online"
    raw["telemetry"] = {"wandb": {"project": "calls", "api_key": "SECRET"}, "prometheus": {"port": 70000}}
    parse_config(raw, problems)
    assert any(problem.startswith("telemetry.wandb.api_key: unknown key") for problem in problems)
    assert "SECRET" not in "".join(problems)
    del raw["telemetry"]["wandb"]["api_key"]  # type: ignore[index]
    problems.clear()
    parse_config(raw, problems)
    assert problems == ["telemetry.prometheus.port=70000: expected 1 or more and at most 65535, or null (no endpoint)"]
