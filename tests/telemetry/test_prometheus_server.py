"""A real Prometheus server with the shipped scrape config scrapes a run and answers the dashboard's queries."""

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

from fctune.config.sections.telemetry import PrometheusConfig
from fctune.telemetry.alerts import Alert
from fctune.telemetry.background import BackgroundSink
from fctune.telemetry.services import PrometheusSink
from fctune.telemetry.sinks import SinkGroup
from tests.conftest import ROOT
from tests.ranks import find_port

MONITORING = ROOT / "sky" / "monitoring"
SERVER, TOOL = shutil.which("prometheus"), shutil.which("promtool")
NUM_STEPS = 40

pytestmark = pytest.mark.skipif(SERVER is None or TOOL is None, reason="needs prometheus: apt-get install prometheus")


@dataclass(frozen=True, slots=True)
class Server:
    """A Prometheus server on this machine."""

    port: int
    target: int

    def request(self, path: str, **query: str) -> Any:
        """Return the data of an HTTP API response."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def value(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Evaluate an expression; return its values by labels."""
        result = self.request("query", query=expression)["result"]
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in result}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server that has scraped a run to its last step, at an interval shortened to one second."""
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
            running = Server(port, target)
            wait_for_scrapes(running, root / "log")
            yield running
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


def wait_for_scrapes(server: Server, log: Path) -> None:
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


def test_prometheus_accepts_the_shipped_config(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "prometheus.yml", tmp_path)
    (tmp_path / "runs.json").write_text("[]")
    assert TOOL is not None
    checked = subprocess.run(
        [TOOL, "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_the_last_step_is_scraped_with_the_labels_run_and_cluster(server: Server) -> None:
    ((labels, loss),) = server.value("fctune_loss").items()
    assert loss == pytest.approx(2.0 / NUM_STEPS)
    named = dict(labels)
    assert (named["run"], named["cluster"], named["job"]) == ("mine", "here", "fctune")
    assert list(server.value('fctune_alerts_total{alert="disk"}').values()) == [2]
    assert list(server.value("up").values()) == [1]


@pytest.mark.slow
def test_prometheus_lists_the_metrics_with_their_descriptions(server: Server) -> None:
    metadata = server.request("metadata")
    assert metadata["fctune_step_time_s"][0]["type"] == "gauge"
    assert "from requesting the data" in metadata["fctune_step_time_s"][0]["help"]
    names = {name for name in server.request("label/__name__/values") if name.startswith("fctune_")}
    assert {"fctune_loss", "fctune_gpu_power_w", "fctune_eval_accuracy_by_category", "fctune_num_steps"} <= names


def dashboard_queries() -> list[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.slow
def test_every_dashboard_panel_has_data(server: Server) -> None:
    queries = dashboard_queries()
    assert len(queries) > 20
    for expression in queries:
        found = server.value(re.sub(r"\$run\b", "mine|other", expression))
        assert found, expression
        assert all(value == value for value in found.values()), expression  # no NaN
