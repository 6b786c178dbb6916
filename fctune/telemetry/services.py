"""Sinks that other programs read: Weights & Biases, TensorBoard, Prometheus. Each is to run in a ``BackgroundSink``."""

from __future__ import annotations

import importlib
import logging
import math
import secrets
from pathlib import Path
from typing import Any

from fctune.config.schema import PrometheusConfig, WandbConfig
from fctune.telemetry.alerts import ALERTS, Alert
from fctune.telemetry.names import METRICS, find_metric

logger = logging.getLogger("fctune")

_INIT_S = 20.0  # to reach W&B; training does not wait for it
_FLUSH_S = 1.0


class WandbSink:
    """A run of W&B, the same one after every restart: its id is kept in ``wandb/run_id`` of the run's directory.

    Steps are W&B's own: one that is taken again after a restart, with the same numbers, does not appear twice.
    No git remote, no source and no console output leave the machine.

    Args:
        config: project and mode; ``online`` without a key or a network goes offline, and says so.
        folder: the run's directory.
        plain_config: the run's config, as W&B shows it.
    """

    def __init__(self, config: WandbConfig, folder: Path, plain_config: dict[str, Any]):
        self._wandb: Any = importlib.import_module("wandb")
        self._config, self._folder, self._plain = config, folder, plain_config
        self._id = _keep_id(folder / "wandb" / "run_id")
        try:
            self._run = self._start(config.mode)
        except self._wandb.errors.Error as error:
            if config.mode != "online":
                raise
            reason = str(error).splitlines()[0].rstrip(".")
            logger.warning(
                "wandb: %s; going on offline. Later: wandb sync %s", reason, folder / "wandb" / "offline-run-*"
            )
            self._wandb.teardown()  # its service holds the run's id for the start that failed
            self._run = self._start("offline")

    def write(self, metrics: dict[str, Any]) -> None:
        """One row of the run's history."""
        self._run.log(_numbers(metrics), step=metrics["step"], commit=True)

    def alert(self, alert: Alert) -> None:
        """An alert of W&B, which it sends on as its user has set."""
        self._run.alert(title=alert.name, text=f"step {alert.step}: {alert.message}", level="WARN")

    def close(self) -> None:
        """Send what is left; ``finish`` alone returns before wandb's service has written its file."""
        self._run.finish()
        self._wandb.teardown()

    def _start(self, mode: str) -> Any:
        settings = self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            init_timeout=_INIT_S,
            login_timeout=1,  # never asks at the terminal of a run
            x_transaction_log_flush_interval=_FLUSH_S,  # 15 s by default, which a kill would lose
        )
        return self._wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            name=self._config.name or self._folder.name,
            id=self._id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(self._folder),
            config=self._plain,
            settings=settings,
        )


class TensorBoardSink:
    """Event files in a folder; after a restart TensorBoard leaves out the steps that are taken again."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._make: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer: Any = None

    def write(self, metrics: dict[str, Any]) -> None:
        """A scalar a metric."""
        step = metrics["step"]
        if self._writer is None:
            # Also where no file is yet: a run that resumes at step 1 is a run that began.
            self._writer = self._make(str(self._folder), purge_step=step if step > 1 else None, flush_secs=_FLUSH_S)
        numbers = {name: value for name, value in _numbers(metrics).items() if name != "step"}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        # One event a step: add_scalar, an event a metric, takes eight times as long.
        self._writer.file_writer.add_summary(self._summary(value=values), step)

    def alert(self, alert: Alert) -> None:
        """A text beside the curves."""
        if self._writer is not None:
            self._writer.add_text(f"alert/{alert.name}", alert.message, alert.step)

    def close(self) -> None:
        """Flush."""
        if self._writer is not None:
            self._writer.close()


class PrometheusSink:
    """http://HOST:PORT/metrics: the last step's metrics as gauges, alerts as a counter.

    Args:
        config: where to listen.
        run: what the label ``run`` says.
        num_steps: of the run.
    """

    def __init__(self, config: PrometheusConfig, run: str, num_steps: int):
        prometheus: Any = importlib.import_module("prometheus_client")
        self._registry, self._run = prometheus.CollectorRegistry(), run
        self._gauges: dict[str, Any] = {}
        for metric in METRICS:
            if metric.kind != "text":
                labels = ("run", "category") if metric.name.endswith("/*") else ("run",)
                text = f"{metric.meaning} ({metric.unit or 'no unit'}; {metric.convention or 'this step'})"
                self._gauges[metric.name] = prometheus.Gauge(metric.prometheus, text, labels, registry=self._registry)
        total = prometheus.Gauge("fctune_num_steps", "steps of the whole run", ("run",), registry=self._registry)
        total.labels(run).set(num_steps)
        self._alerts = prometheus.Counter("fctune_alerts", "alerts so far", ("run", "alert"), registry=self._registry)
        for name in ALERTS:
            self._alerts.labels(run, name)
        self._server, self._thread = prometheus.start_http_server(config.port, config.host, self._registry)

    def write(self, metrics: dict[str, Any]) -> None:
        """Set the gauges; those of flags that are not up go back to 0."""
        numbers = _numbers(metrics)
        for metric in METRICS:
            if metric.kind == "flag":
                self._gauges[metric.name].labels(self._run).set(numbers.pop(metric.name, 0))
        for name, value in numbers.items():
            known = find_metric(name)
            if known is not None:
                labels = (self._run, name.partition("/")[2]) if "/" in name else (self._run,)
                self._gauges[known.name].labels(*labels).set(value)

    def alert(self, alert: Alert) -> None:
        """Count it."""
        self._alerts.labels(self._run, alert.name).inc()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """What of a step's metrics is a number and finite; flags are 1."""
    found = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _keep_id(file: Path) -> str:
    """The id of a directory's run, made once."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
