"""A real Prometheus with the scrape config that is shipped finds a run, and answers what the dashboard asks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fctune.config.schema import PrometheusConfig
from fctune.telemetry.alerts import Alert
from fctune.telemetry.background import BackgroundSink
from fctune.telemetry.services import PrometheusSink
from fctune.telemetry.sinks import SinkGroup
from tests.conftest import ROOT
from tests.ranks import find_port

MONITORING = ROOT / "sky" / "monitoring"
SERVER, TOOL = shutil.which("prometheus"), shutil.which("promtool")
NUM_STEPS = 40

pytestmark = pytest.mark.skipif(SERVER is None or TOOL is None, reason="no prometheus here: apt-get install prometheus")


@dataclass(frozen=True, slots=True)
class Server:
    """A Prometheus that listens on a port of this machine."""

    port: int
    target: int

    def ask(self, path: str, **query: str) -> Any:
        """What its HTTP API answers."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def value(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The value of an expression, by labels."""
        result = self.ask("query", query=expression)["result"]
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in result}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that has scraped a run to its last step; it asks every second, which the shipped config does less often."""
    root = tmp_path_factory.mktemp("prometheus")
    target, port = find_port(), find_port()
    config = (MONITORING / "prometheus.yml").read_text(encoding="utf-8")
    fast = config.replace("scrape_interval: 15s", "scrape_interval: 1s").replace("10s", "1s")
    assert fast.count("1s") == config.count("15s") + config.count("10s")
    (root / "prometheus.yml").write_text(fast, encoding="utf-8")
    targets = [{"targets": [f"127.0.0.1:{target}"], "labels": {"cluster": "here"}}]
    (root / "runs.json").write_text(json.dumps(targets), encoding="utf-8")
    sink = BackgroundSink(
        "prometheus", lambda: PrometheusSink(PrometheusConfig(port=target, host="127.0.0.1"), "mine", NUM_STEPS)
    )
    assert SERVER is not None
    command = [SERVER, f"--config.file={root / 'prometheus.yml'}", f"--storage.tsdb.path={root / 'data'}"]
    with open(root / "log", "w", encoding="utf-8") as log, SinkGroup(sink) as sinks:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=root, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            for step in range(1, NUM_STEPS + 1):
                sinks.write(metrics_of(step))
            sink.alert(Alert("disk", NUM_STEPS, 0.01, 0.05, "full"))
            sink.alert(Alert("disk", NUM_STEPS, 0.01, 0.05, "full"))
            asked = Server(port, target)
            wait_for(asked, root / "log")
            yield asked
        finally:
            process.terminate()
            process.wait(20)


def metrics_of(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.0 / step,
        "validation_loss": 2.5 / step,
        "lr": 1e-4,
        "grad_norm": 1.5,
        "tokens_per_s": 1000.0 + step,
        "step_time_s": 0.5,
        "step_time_p50_s": 0.5,
        "step_time_p99_s": 0.75,
        "compute_time_s": 0.25,
        "compute_skew": 1.25,
        "slowest_rank": 3,
        "data_time_s": 0.125,
        "data_time_max_s": 0.25,
        "save_wait_s": 0.0,
        "save_wait_max_s": 0.0,
        "tflops_per_device": 400.0,
        "hardware_tflops_per_device": 450.0,
        "mfu": 0.4,
        "peak_memory_gib": 60.0,
        "peak_memory_max_gib": 61.0,
        "memory_active_gib": 50.0,
        "memory_reserved_gib": 70.0,
        "alloc_retries": 0.0,
        "gpu_utilization": 0.9,
        "gpu_utilization_min": 0.8,
        "gpu_temperature_c": 66.0,
        "gpu_power_w": 9600.0,
        "gpu_hours": 12.0,
        "cost": 30.0,
        "eval_accuracy": 0.875,
        "eval_accuracy_low": 0.75,
        "eval_accuracy_high": 0.95,
        "eval_accuracy/single": 0.9,
    }


def wait_for(server: Server, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            num_scrapes = max(server.value("count_over_time(fctune_alerts_total[1m])").values(), default=0)
            if num_scrapes >= 3 and NUM_STEPS in server.value("fctune_step").values():
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"nothing was scraped:\n{log.read_text()[-2000:]}")


def test_the_shipped_config_is_one_that_prometheus_takes(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "prometheus.yml", tmp_path)
    (tmp_path / "runs.json").write_text("[]")
    assert TOOL is not None
    checked = subprocess.run(
        [TOOL, "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_what_is_scraped_is_the_last_step_of_the_run_by_name_and_cluster(server: Server) -> None:
    ((labels, loss),) = server.value("fctune_loss").items()
    assert loss == pytest.approx(2.0 / NUM_STEPS)
    named = dict(labels)
    assert (named["run"], named["cluster"], named["job"]) == ("mine", "here", "fctune")
    assert list(server.value('fctune_alerts_total{alert="disk"}').values()) == [2]
    assert list(server.value("up").values()) == [1]


@pytest.mark.slow
def test_every_name_is_one_that_prometheus_lists_with_its_meaning(server: Server) -> None:
    about = server.ask("metadata")
    assert about["fctune_step_time_s"][0]["type"] == "gauge"
    assert "from asking for data" in about["fctune_step_time_s"][0]["help"]
    names = {name for name in server.ask("label/__name__/values") if name.startswith("fctune_")}
    assert {"fctune_loss", "fctune_gpu_power_w", "fctune_eval_accuracy_by_category", "fctune_num_steps"} <= names


def expressions() -> list[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.slow
def test_every_panel_of_the_dashboard_has_an_answer(server: Server) -> None:
    asked = expressions()
    assert len(asked) > 20
    for expression in asked:
        found = server.value(re.sub(r"\$run\b", "mine|other", expression))
        assert found, expression
        assert all(value == value for value in found.values()), expression  # no NaN
