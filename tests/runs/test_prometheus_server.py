"""A real Prometheus server with the shipped files scrapes a run, fires alerts, and answers the dashboard's queries."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.config.sections.telemetry import PrometheusConfig
from fctune.runs.alerts import Alert
from fctune.runs.services import PrometheusSink
from fctune.runs.sinks import BackgroundSink, SinkGroup
from tests.conftest import ROOT
from tests.ranks import find_port

MONITORING = ROOT / "sky" / "monitoring"
SERVER, TOOL = shutil.which("prometheus"), shutil.which("promtool")
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
NUM_STEPS = 40

# What the exporters of a node with a broken GPU say: dcgm-exporter, node_exporter and the kubelet.
NODE_METRICS = """\
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="gpu-node-7"} 97
DCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="gpu-node-7"} 60
DCGM_FI_DEV_MEMORY_TEMP{gpu="0",Hostname="gpu-node-7"} 70
DCGM_FI_DEV_POWER_USAGE{gpu="0",Hostname="gpu-node-7"} 650
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",Hostname="gpu-node-7"} 0.4
DCGM_FI_DEV_XID_ERRORS{gpu="0",Hostname="gpu-node-7"} 79
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{gpu="0",Hostname="gpu-node-7"} 1
node_infiniband_port_data_transmitted_bytes_total{device="mlx5_0",port="1"} 1e12
node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1"} 1e12
node_infiniband_state_id{device="mlx5_0",port="1"} 4
node_network_transmit_bytes_total{device="eth0"} 1e9
node_network_receive_bytes_total{device="eth0"} 1e9
node_filesystem_avail_bytes{mountpoint="/",fstype="ext4"} 9e11
node_filesystem_size_bytes{mountpoint="/",fstype="ext4"} 1e12
kubelet_volume_stats_available_bytes{persistentvolumeclaim="fctune-shared"} 1e12
kubelet_volume_stats_capacity_bytes{persistentvolumeclaim="fctune-shared"} 2e12
"""

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


@contextlib.contextmanager
def serve_metrics(text: str) -> Iterator[int]:
    """Serve a fixed page of metrics; yield the port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        try:
            yield page.server_address[1]
        finally:
            page.shutdown()
            thread.join()


@contextlib.contextmanager
def start_server(root: Path, config: str, target: int = 0) -> Iterator[Server]:
    """Start Prometheus in a folder, with all intervals of its config shortened to one second."""
    port = find_port()
    (root / "prometheus.yml").write_text(re.sub(r"(_interval|_timeout): \d+s", r"\1: 1s", config), encoding="utf-8")
    assert SERVER is not None
    command = [SERVER, f"--config.file={root / 'prometheus.yml'}", f"--storage.tsdb.path={root / 'data'}"]
    with open(root / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=root, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield Server(port, target)
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server that has scraped a run to its last step, and a node with a broken GPU."""
    root = tmp_path_factory.mktemp("prometheus")
    target = find_port()
    shutil.copy(MONITORING / "alerts.yml", root)
    sink = BackgroundSink(
        "prometheus", lambda: PrometheusSink(PrometheusConfig(port=target, host="127.0.0.1"), "mine", NUM_STEPS)
    )
    with SinkGroup(sink) as sinks, serve_metrics(NODE_METRICS) as node:
        targets = {"runs": (target, {"cluster": "here"}), "nodes": (node, {}), "gpus": (node, {})}
        for name, (port, labels) in targets.items():
            (root / f"{name}.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": labels}]))
        config = (MONITORING / "prometheus.yml").read_text(encoding="utf-8")
        with start_server(root, config, target) as running:
            for step in range(1, NUM_STEPS + 1):
                sinks.write(metrics_of(step))
            sink.alert(Alert("disk", NUM_STEPS, 0.01, 0.05, "full"))
            sink.alert(Alert("disk", NUM_STEPS, 0.01, 0.05, "full"))
            wait_for(lambda: has_scraped(running), root / "log")
            yield running


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


def has_scraped(server: Server) -> bool:
    """Return whether the run's last step and its alerts, and the node's metrics, were scraped several times."""
    counts = server.value("count_over_time(fctune_alerts_total[1m]) or count_over_time(DCGM_FI_DEV_GPU_UTIL[1m])")
    return len(counts) >= 2 and min(counts.values()) >= 3 and NUM_STEPS in server.value("fctune_step").values()


def wait_for(is_done: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if is_done():
                return
        time.sleep(0.2)
    raise AssertionError(f"nothing was scraped:\n{log.read_text()[-2000:]}")


def check_with_promtool(folder: Path, *arguments: str) -> None:
    assert TOOL is not None
    done = subprocess.run([TOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_shipped_config(tmp_path: Path) -> None:
    for file in ("prometheus.yml", "alerts.yml"):
        shutil.copy(MONITORING / file, tmp_path)
    for targets in ("runs", "nodes", "gpus"):
        (tmp_path / f"{targets}.json").write_text("[]")
    check_with_promtool(tmp_path, "check", "config", "prometheus.yml")


def test_each_alert_fires_on_its_fault_and_only_then(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    cases = Path(__file__).with_name("alerts.test.yml")
    shutil.copy(cases, tmp_path)
    check_with_promtool(tmp_path, "test", "rules", cases.name)
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    untested = {rule["alert"] for group in groups for rule in group["rules"]} - set(
        re.findall(r"\b[A-Z]\w+", cases.read_text(encoding="utf-8"))
    )
    assert not untested


@pytest.mark.slow
def test_the_last_step_is_scraped_with_the_labels_run_and_cluster(server: Server) -> None:
    ((labels, loss),) = server.value("fctune_loss").items()
    assert loss == pytest.approx(2.0 / NUM_STEPS)
    named = dict(labels)
    assert (named["run"], named["cluster"], named["job"]) == ("mine", "here", "fctune")
    assert list(server.value('fctune_alerts_total{alert="disk"}').values()) == [2]
    assert list(server.value('up{job="fctune"}').values()) == [1]


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


@pytest.mark.slow
def test_a_broken_gpu_raises_an_alert(server: Server) -> None:
    wait_for(lambda: bool(server.value('ALERTS{alertname="GpuXid", alertstate="firing"}')), Path("/dev/null"))
    summaries = [one["annotations"]["summary"] for one in server.request("alerts")["alerts"]]
    assert "GPU 0 of gpu-node-7 reported Xid 79" in summaries


@pytest.mark.slow
@pytest.mark.skipif(ALERTMANAGER is None, reason="needs Alertmanager: apt-get install prometheus-alertmanager")
def test_alertmanager_routes_alerts_as_its_sample_says(tmp_path: Path) -> None:
    """Prometheus sends the alert of a run to Alertmanager with the sample configuration, which routes it on call."""
    for name in ("alerts.yml", "alertmanager.yml"):
        shutil.copy(MONITORING / name, tmp_path)
    port, peers = find_port(), find_port()
    config = (MONITORING / "prometheus.yml").read_text(encoding="utf-8").replace("127.0.0.1:9093", f"127.0.0.1:{port}")
    (tmp_path / "runs.json").write_text("[]")
    (tmp_path / "nodes.json").write_text("[]")
    assert ALERTMANAGER is not None
    command = [ALERTMANAGER, "--config.file=alertmanager.yml", f"--web.listen-address=127.0.0.1:{port}"]
    with open(tmp_path / "alertmanager.log", "w", encoding="utf-8") as log, serve_metrics(NODE_METRICS) as node:
        (tmp_path / "gpus.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{node}"]}]))
        process = subprocess.Popen(
            [*command, f"--cluster.listen-address=127.0.0.1:{peers}", f"--storage.path={tmp_path / 'kept'}"],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            with start_server(tmp_path, config):
                url = f"http://127.0.0.1:{port}/api/v2/alerts?filter=alertname%3DGpuXid"
                received: list[dict[str, Any]] = []

                def has_arrived() -> bool:
                    with urllib.request.urlopen(url, timeout=5) as answer:
                        received[:] = json.load(answer)
                    return bool(received)

                wait_for(has_arrived, tmp_path / "alertmanager.log")
        finally:
            process.terminate()
            process.wait(20)
    assert [one["name"] for one in received[0]["receivers"]] == ["on-call"]


@pytest.mark.slow
def test_runs_and_gpus_are_found_among_the_pods_of_a_cluster(tmp_path: Path) -> None:
    """Prometheus relabels pods as Kubernetes would describe them: heads and first pods of Jobs are kept, once each."""
    meta = "__meta_kubernetes_"
    pods: list[dict[str, str]] = [
        {"pod_ip": "10.0.0.1", "pod_label_skypilot_head_node": "1", "pod_label_skypilot_cluster_name": "fctune-ab12"},
        {"pod_ip": "10.0.0.2", "pod_label_skypilot_head_node": "0", "pod_label_skypilot_cluster_name": "fctune-ab12"},
        {
            "pod_ip": "10.0.0.3",
            "pod_label_app": "fctune-train",
            "pod_label_batch_kubernetes_io_job_completion_index": "0",
        },
        {
            "pod_ip": "10.0.0.4",
            "pod_label_app": "fctune-train",
            "pod_label_batch_kubernetes_io_job_completion_index": "1",
        },
        {"pod_ip": "10.0.0.5", "pod_label_app": "grafana"},
        {"pod_ip": "10.0.0.6", "pod_label_skypilot_head_node": "1", "pod_phase": "Pending"},
        {"pod_ip": "10.0.0.7", "pod_label_app_kubernetes_io_name": "dcgm-exporter"},
        {"pod_ip": "10.0.0.8", "pod_label_app": "nvidia-dcgm-exporter"},
    ]
    entries = []
    for pod in pods:
        labels = {"pod_phase": "Running", "namespace": "default", "pod_node_name": "gpu-1"} | pod
        for port in ("10001", "8265"):  # Kubernetes lists a pod once for each of its ports
            entries.append(
                {"targets": [f"{pod['pod_ip']}:{port}"], "labels": {meta + key: value for key, value in labels.items()}}
            )
    (tmp_path / "pods.json").write_text(json.dumps(entries))
    config = yaml.safe_load((MONITORING / "prometheus-kubernetes.yml").read_text(encoding="utf-8"))
    # Debian builds Prometheus without Kubernetes' discovery, so a file stands in for it.
    for job in config["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["file_sd_configs"] = [{"files": ["pods.json"]}]
    with start_server(tmp_path, yaml.safe_dump(config)) as server:
        wait_for(lambda: bool(server.request("targets")["activeTargets"]), tmp_path / "log")
        found = {
            (one["labels"]["job"], one["scrapeUrl"]): one["labels"]
            for one in server.request("targets")["activeTargets"]
        }
    assert set(found) == {
        ("fctune", "http://10.0.0.1:9464/metrics"),
        ("fctune", "http://10.0.0.3:9464/metrics"),
        ("dcgm-exporter", "http://10.0.0.7:9400/metrics"),
        ("dcgm-exporter", "http://10.0.0.8:9400/metrics"),
    }
    assert found["fctune", "http://10.0.0.1:9464/metrics"]["cluster"] == "fctune-ab12"
    assert found["dcgm-exporter", "http://10.0.0.7:9400/metrics"]["node"] == "gpu-1"
