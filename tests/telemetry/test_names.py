"""The table of metrics is what the code writes, no more and no less; the dashboard asks for nothing else."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from fctune.config.loading import parse_config
from fctune.distributed import World
from fctune.evaluation.live import _RATES
from fctune.telemetry.names import METRICS, find_metric
from fctune.telemetry.sinks import SinkGroup
from fctune.training.loop import count_steps, train
from fctune.training.setup import build_base, plan_parallelism, prepare_data, shard_and_load_, start_state
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.training.training_runs import make_config

MONITORING = ROOT / "sky" / "monitoring"

# Functions whose keys are metrics, by file; the record of the best evaluation is not a metric.
WRITERS = {
    "fctune/training/loop.py": ("train",),
    "fctune/training/meter.py": ("measure", "_measure_work", "_aggregate_ranks"),
    "fctune/telemetry/metrics.py": ("measure_skew", "describe", "aggregate_ranks"),
    "fctune/training/callbacks/checkpoint.py": ("step_costs",),
    "fctune/training/callbacks/evaluation.py": ("measure",),
    "fctune/evaluation/live.py": ("measure", "_describe"),
}


def keys_written(file: str, functions: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            yield from keys_of(node)


def keys_of(function: ast.FunctionDef) -> Iterator[str]:
    """Keys of dicts that are made, and of items that are set, unless of an attribute's (``self.best``)."""
    kept = {id(n.value) for n in ast.walk(function) if isinstance(n, ast.Assign) and is_attribute(n.targets[0])}
    for node in ast.walk(function):
        if isinstance(node, ast.Dict) and id(node) not in kept:
            for key in node.keys:
                yield from spellings(key)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and not is_attribute(node.value):
            yield from spellings(node.slice)


def is_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute)


def spellings(key: ast.AST | None) -> list[str]:
    if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value != "all":
        return [key.value]
    if isinstance(key, ast.JoinedStr):
        start = key.values[0]
        assert isinstance(start, ast.Constant)
        return [f"{start.value}*"] if start.value.endswith("/") else [f"{start.value}{rate}" for rate in _RATES]
    return []


def test_every_key_that_is_written_is_in_the_table_and_every_name_of_it_is_written() -> None:
    written = {key for file, functions in WRITERS.items() for key in keys_written(file, functions)}
    assert written == {metric.name for metric in METRICS}


def run_steps(world: World, model: Path, folder: Path) -> list[dict[str, Any]]:
    class Recorder:
        def write(self, metrics: dict[str, Any]) -> None:
            written.append(metrics)

        def close(self) -> None: ...

    written: list[dict[str, Any]] = []
    config = make_config(model, folder, adapter=None, max_steps=3, validation={"every_n_steps": 2})
    shaped = build_base(config, model, world)
    layout = plan_parallelism(shaped, config, world)
    prepared = prepare_data(config, model, world)
    gradient_sync = shard_and_load_(shaped, config, model, world, layout)
    num_steps = count_steps(config, prepared, world)
    train(
        config, start_state(shaped, config, num_steps, gradient_sync), prepared, num_steps, world, SinkGroup(Recorder())
    )
    return written


def test_what_a_real_run_writes_is_in_the_table(make_model: Callable[..., Path], tmp_path: Path) -> None:
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


def test_a_category_is_of_its_family_and_an_unknown_name_of_none() -> None:
    metric = find_metric("eval_accuracy/single")
    assert metric is not None
    assert metric.name == "eval_accuracy/*"
    assert find_metric("losss") is None
    assert find_metric("loss/single") is None


def test_the_dashboard_asks_only_for_metrics_that_the_endpoint_has() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    exposed = {m.prometheus for m in METRICS if m.kind != "text"} | {"fctune_num_steps", "fctune_alerts_total"}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    for expression in asked:
        names = set(re.findall(r"fctune_\w+", expression))
        assert names, expression
        assert names <= exposed, expression
        assert expression.count("(") == expression.count(")")
    shown = {name for expression in asked for name in re.findall(r"fctune_\w+", expression)}
    assert {"fctune_loss", "fctune_tokens_per_s", "fctune_eval_accuracy", "fctune_alerts_total"} <= shown


def test_panels_of_the_dashboard_do_not_cover_one_another() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_scrape_config_finds_its_targets_in_a_file() -> None:
    scrape = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = scrape["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == ["runs.json"]
    assert "metrics_path" not in job  # /metrics, where the endpoint is


def test_a_config_takes_sinks_and_never_a_key(tiny_base: Path, tmp_path: Path) -> None:
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
    assert problems == ["telemetry.prometheus.port=70000: expected 1 to 65535, or null for no endpoint"]
