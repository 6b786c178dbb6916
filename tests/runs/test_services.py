"""W&B, TensorBoard and Prometheus sinks, read back by the readers of those programs."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.distributed import World
from fctune.config.sections.telemetry import PrometheusConfig, WandbConfig
from fctune.runs.alerts import Alert
from fctune.runs.directory import RunDirectory
from fctune.runs.names import METRICS
from fctune.runs.services import PrometheusSink, TensorBoardSink, WandbSink
from fctune.runs.sinks import AlertMonitor, BackgroundSink, SinkGroup
from fctune.training.setup import open_sinks
from tests.conftest import ROOT
from tests.runs.wandb_server import WandbServer
from tests.training.training_runs import make_config

ALERT = Alert("disk", 2, 0.01, 0.05, "1.0% of the disk is free")
KEY = "0123456789abcdef" * 2 + "01234567"


def metrics_of(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.0 / step, "lr": 1e-4, "tokens_total": 100 * step, "data_digest": "ab12"} | more


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("fctune"), "propagate", True)
    caplog.set_level(logging.WARNING, "fctune")
    return caplog


@pytest.fixture
def no_wandb_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set a home without an API key, and a W&B server that refuses connections."""
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")


def read_wandb(folder: Path) -> Iterator[Any]:
    """Yield the records of all offline runs in a folder, oldest first, parsed by wandb's own messages.

    The file is LevelDB's log format after a header of seven bytes: blocks of 32 KiB, records of checksum (4 bytes),
    length (2) and type (1: complete, 2 to 4: first, middle and last part).
    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        data, at, held = file.read_bytes(), 7, b""
        assert data[:4] == b":W&B"
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            held += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                yield wandb_internal_pb2.Record.FromString(held)
                held = b""


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in rows]


@pytest.mark.thorough
@pytest.mark.usefixtures("no_wandb_account")
def test_wandb_has_every_step_and_alert_in_one_run_after_a_restart(tmp_path: Path) -> None:
    config, handler = WandbConfig(project="calls", mode="offline"), signal.getsignal(signal.SIGTERM)
    for steps in ((1, 2, 3), (4, 5)):
        with SinkGroup(sink := BackgroundSink("wandb", lambda: WandbSink(config, tmp_path, {"seed": 42}))) as sinks:
            for step in steps:
                sinks.write(metrics_of(step))
            sink.alert(ALERT)
        time.sleep(1.1)  # wandb names its folders with a resolution of one second
    records = list(read_wandb(tmp_path / "wandb"))
    history = history_of(records)
    assert [(row["_step"], row["step"], row["loss"]) for row in history] == [(n, n, 2.0 / n) for n in range(1, 6)]
    runs = {r.run.run_id for r in records if r.WhichOneof("record_type") == "run"}
    assert runs == {(tmp_path / "wandb" / "run_id").read_text().strip()}
    alerts = [r.alert for r in records if r.WhichOneof("record_type") == "alert"]
    assert [alert.title for alert in alerts] == ["disk", "disk"]
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.usefixtures("no_wandb_account")
def test_wandb_without_a_key_warns_and_continues_offline(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    config = WandbConfig(project="calls")
    with SinkGroup(BackgroundSink("wandb", lambda: WandbSink(config, tmp_path, {}))) as sinks:
        sinks.write(metrics_of(1))
    (record,) = warnings.records
    assert "No API key configured" in record.message
    assert "continuing offline" in record.message
    assert [row["step"] for row in history_of(list(read_wandb(tmp_path / "wandb")))] == [1]


@pytest.mark.usefixtures("no_wandb_account")
def test_wandb_without_a_network_continues_offline_and_writes_its_key_nowhere(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    config, folder = WandbConfig(project="calls"), tmp_path / "run"
    with SinkGroup(BackgroundSink("wandb", lambda: WandbSink(config, folder, {}, init_timeout_s=2.0))) as sinks:
        sinks.write(metrics_of(1))
    assert [record.message for record in warnings.records if "continuing offline" in record.message]
    assert [row["step"] for row in history_of(list(read_wandb(folder / "wandb")))] == [1]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in warnings.text


@pytest.mark.thorough
@pytest.mark.usefixtures("no_wandb_account")
def test_wandb_sync_uploads_what_was_written_offline(tmp_path: Path) -> None:
    config, folder = WandbConfig(project="calls", mode="offline"), tmp_path / "run"
    for steps in ((1, 2, 3), (4, 5)):
        with SinkGroup(sink := BackgroundSink("wandb", lambda: WandbSink(config, folder, {"seed": 42}))) as sinks:
            for step in steps:
                sinks.write(metrics_of(step))
            sink.alert(ALERT)
        time.sleep(1.1)  # wandb names its folders with a resolution of one second
    with WandbServer() as server:
        environment = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
        parts = sorted(str(part) for part in (folder / "wandb").glob("offline-run-*"))
        command = [sys.executable, "-m", "wandb", "sync", *parts]
        sent = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert sent.returncode == 0, sent.stderr
    ((run_id, run),) = server.runs.items()
    assert run_id == (folder / "wandb" / "run_id").read_text().strip()
    assert run.config["seed"]["value"] == 42
    assert run.alerts == [("disk", "step 2: 1.0% of the disk is free")] * 2
    rows = sorted(run.history.values(), key=lambda row: row["step"])
    assert [(row["_step"], row["step"], row["loss"]) for row in rows] == [(n, n, 2.0 / n) for n in range(1, 6)]


@pytest.mark.usefixtures("no_wandb_account")
def test_a_run_that_restarts_online_continues_in_the_same_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    config = WandbConfig(project="calls")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        for steps in ((1, 2, 3, 4), (3, 4, 5)):  # the restart repeats two steps
            with SinkGroup(sink := BackgroundSink("wandb", lambda: WandbSink(config, tmp_path, {"seed": 42}))) as sinks:
                for step in steps:
                    sinks.write(metrics_of(step))
                sink.alert(ALERT)
    assert not [record.message for record in warnings.records if "offline" in record.message]
    ((run_id, run),) = server.runs.items()
    assert run_id == (tmp_path / "wandb" / "run_id").read_text().strip()
    assert len(run.alerts) == 2
    rows = [run.history[index] for index in sorted(run.history)]
    assert [(row["step"], row["loss"]) for row in rows] == [(n, 2.0 / n) for n in range(1, 6)]


KILLED = """
import os, signal, sys, time
from pathlib import Path
from fctune.config.sections.telemetry import WandbConfig
from fctune.runs.sinks import BackgroundSink
from fctune.runs.services import TensorBoardSink, WandbSink
from fctune.runs.sinks import SinkGroup

folder = Path(sys.argv[1])
config = WandbConfig(project="calls", mode="offline")
wandb = BackgroundSink("wandb", lambda: WandbSink(config, folder, {}))
sinks = SinkGroup(wandb, BackgroundSink("tensorboard", lambda: TensorBoardSink(folder / "tensorboard")))
for step in range(1, 21):
    sinks.write({"step": step, "loss": 2.0})
deadline = time.monotonic() + 30
while not list(folder.glob("wandb/offline-run-*/*.wandb")) and time.monotonic() < deadline:
    time.sleep(0.1)
time.sleep(8)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough  # waits until the services have written
@pytest.mark.usefixtures("no_wandb_account")
def test_a_kill_loses_no_steps_written_seconds_before(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert [row["step"] for row in history_of(list(read_wandb(tmp_path / "wandb")))] == list(range(1, 21))
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == list(range(1, 21))


def test_tensorboard_shows_each_step_once_after_a_restart_from_an_earlier_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((1, 2, 3, 4), (3, 4, 5)):
        with SinkGroup(sink := BackgroundSink("tensorboard", lambda: TensorBoardSink(tmp_path))) as sinks:
            for step in steps:
                sinks.write(metrics_of(step))
            sink.alert(ALERT)
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == {"loss", "lr", "tokens_total"}
    shown = [(event.step, event.value) for event in reader.Scalars("loss")]
    assert shown == [(n, pytest.approx(2.0 / n)) for n in range(1, 6)]
    assert b"1.0% of the disk is free" in reader.Tensors("alert/disk/text_summary")[0].tensor_proto.string_val[0]


def scrape(port: int, accept: str = "text/plain") -> dict[str, float]:
    """Return the samples by name and labels, parsed by the client library's parser of the response's content type."""
    from prometheus_client.openmetrics import parser as openmetrics
    from prometheus_client.parser import text_string_to_metric_families as plain

    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=5) as answer:
        text = answer.read().decode()
        is_open = "openmetrics" in answer.headers["Content-Type"]
    families = openmetrics.text_string_to_metric_families(text) if is_open else plain(text)
    found = {}
    for family in families:
        for sample in family.samples:
            rest = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "run"]
            assert sample.labels["run"] == "mine"
            found[",".join([sample.name, *rest])] = sample.value
    return found


def test_the_prometheus_endpoint_is_open_to_its_own_machine_only_by_default() -> None:
    assert PrometheusConfig().host == "127.0.0.1"


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_a_scrape_returns_the_last_step_and_counts_alerts(accept: str) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    sink = PrometheusSink(PrometheusConfig(port=port), "mine", 100)
    assert scrape(port, accept)["fctune_num_steps"] == 100
    sink.write(metrics_of(1, is_spike=True, validation_loss=1.5, loss=math.nan))
    assert scrape(port, accept)["fctune_is_spike"] == 1
    sink.alert(ALERT)
    sink.write(metrics_of(2, **{"eval_accuracy/single": 0.75}))
    found = scrape(port, accept)
    assert found["fctune_step"] == 2
    assert found["fctune_loss"] == 1.0
    assert found["fctune_tokens"] == 200
    assert found["fctune_is_spike"] == 0
    assert found["fctune_validation_loss"] == 1.5
    assert found["fctune_eval_accuracy_by_category,category=single"] == 0.75
    assert found["fctune_alerts_total,alert=disk"] == 1
    assert found["fctune_alerts_total,alert=straggler"] == 0
    sink.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_a_port_in_use_is_reported_once(warnings: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = PrometheusConfig(port=taken.getsockname()[1], host="127.0.0.1")
        with SinkGroup(BackgroundSink("prometheus", lambda: PrometheusSink(config, "mine", 9))) as sinks:
            sinks.write(metrics_of(1))
    (record,) = warnings.records
    assert "prometheus: OSError: [Errno 98]" in record.message


def test_prometheus_names_differ_for_all_metrics() -> None:
    names = [metric.prometheus for metric in METRICS]
    assert len(set(names)) == len(names)


def test_an_alert_is_logged_written_to_the_file_and_passed_to_each_sink(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    class Listener:
        alerts: list[Alert] = []  # noqa: RUF012

        def write(self, metrics: dict[str, Any]) -> None: ...

        def alert(self, alert: Alert) -> None:
            self.alerts.append(alert)

        def close(self) -> None: ...

    listener = Listener()
    with SinkGroup(BackgroundSink("alerts", lambda: AlertMonitor(tmp_path, [listener]))) as sinks:
        for step in range(1, 31):
            sinks.write(metrics_of(step, **({"is_spike": True, "spike_limit": 0.05} if step == 25 else {})))
    assert [(alert.name, alert.step) for alert in listener.alerts if alert.name != "disk"] == [("loss_spike", 25)]
    lines = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [(line["name"], line["step"]) for line in lines if line["name"] != "disk"] == [("loss_spike", 25)]
    assert [r.message for r in warnings.records if "loss_spike" in r.message] == [
        "alert: loss_spike: the loss of step 25, 0.0800, is far above the preceding losses (limit 0.0500)."
    ]


@pytest.mark.usefixtures("no_wandb_account")
def test_a_config_opens_every_sink_and_only_on_rank_0(
    make_model: Callable[..., Path], tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("prometheus_client")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    port = free_port()
    telemetry = {
        "wandb": {"project": "calls", "mode": "offline"},
        "tensorboard": True,
        "prometheus": {"port": port, "host": "127.0.0.1"},
    }
    config = make_config(make_model(), tmp_path, telemetry=telemetry, output_dir=str(tmp_path / "mine"))
    run = RunDirectory(config.output_dir)
    run.start(config, 1)
    main, other = (World(rank, 2, rank, torch.device("cpu")) for rank in (0, 1))
    step = metrics_of(1, grad_norm=1.0, tokens_per_s=10.0)
    with open_sinks(config, run, 5, other) as sinks:
        sinks.write(step)
    assert {path.name for path in run.path.iterdir()} == {".reserve", "run.json"}
    with open_sinks(config, run, 5, main) as sinks:
        sinks.write(step)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if scrape(port).get("fctune_step") == 1:
                    break
            time.sleep(0.05)
        assert scrape(port)["fctune_loss"] == 2.0
    assert not [record.message for record in warnings.records if "continues" in record.message]
    assert json.loads(run.metrics.read_text()) == step
    assert [row["loss"] for row in history_of(list(read_wandb(run.path / "wandb")))] == [2.0]
    reader = EventAccumulator(str(run.path / "tensorboard"))
    reader.Reload()
    assert [event.value for event in reader.Scalars("loss")] == [2.0]
