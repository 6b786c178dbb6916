"""Sinks for Weights & Biases, TensorBoard and Prometheus. Run each of them in a ``BackgroundSink``."""

from __future__ import annotations

import importlib
import logging
import math
import secrets
from pathlib import Path
from typing import Any

from fctune.config.sections.telemetry import PrometheusConfig, WandbConfig
from fctune.runs.alerts import ALERTS, Alert
from fctune.runs.names import METRICS, find_metric

logger = logging.getLogger("fctune")

_INIT_S = 20.0  # time to reach W&B, for which training does not wait
_FLUSH_S = 1.0


class WandbSink:
    """W&B run that is resumed after every restart: its id is kept in ``wandb/run_id`` of the run directory.

    Steps are W&B's own steps, so one that is repeated after a restart does not appear twice. No git remote, source
    code or console output leaves the machine.

    Args:
        config: Project and mode; ``online`` without a key or a network falls back to offline with a warning.
        folder: Run directory.
        plain_config: Config of the run as plain values, shown by W&B.
        init_timeout_s: Time to reach W&B before falling back to offline.
    """

    def __init__(
        self, config: WandbConfig, folder: Path, plain_config: dict[str, Any], init_timeout_s: float = _INIT_S
    ):
        self._wandb: Any = importlib.import_module("wandb")
        self._config, self._folder, self._plain = config, folder, plain_config
        self._init_timeout_s = init_timeout_s
        self._id = _keep_id(folder / "wandb" / "run_id")
        try:
            self._run = self._start("online" if config.mode == "auto" else config.mode)
        except self._wandb.errors.Error as error:
            if config.mode not in ("auto", "online"):
                raise
            reason = str(error).splitlines()[0].rstrip(".")
            logger.warning(
                "wandb: %s; continuing offline. To upload later: wandb sync %s",
                reason,
                folder / "wandb" / "offline-run-*",
            )
            self._wandb.teardown()  # its service reserves the run's id for the failed start
            self._run = self._start("offline")

    def write(self, metrics: dict[str, Any]) -> None:
        """Add one row to the run's history."""
        self._run.log(_numbers(metrics), step=metrics["step"], commit=True)

    def alert(self, alert: Alert) -> None:
        """Raise a W&B alert, which W&B forwards as its user has configured."""
        self._run.alert(title=alert.name, text=f"step {alert.step}: {alert.message}", level="WARN")

    def close(self) -> None:
        """Upload the remaining rows; ``finish`` alone returns before wandb's service has written its file."""
        self._run.finish()
        self._wandb.teardown()

    def _start(self, mode: str) -> Any:
        settings = self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            init_timeout=self._init_timeout_s,
            login_timeout=1,  # never prompt at the terminal of a run
            x_transaction_log_flush_interval=_FLUSH_S,  # the default of 15 s is what a kill would lose
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
    """Writer of event files; after a restart, TensorBoard hides the steps that are repeated."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._make: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer: Any = None

    def write(self, metrics: dict[str, Any]) -> None:
        """Write one scalar per metric."""
        step = metrics["step"]
        if self._writer is None:
            # A run whose first step is not 1 was resumed; purging is harmless if there is no event file yet.
            self._writer = self._make(str(self._folder), purge_step=step if step > 1 else None, flush_secs=_FLUSH_S)
        numbers = {name: value for name, value in _numbers(metrics).items() if name != "step"}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        # One event per step: add_scalar, one event per metric, takes eight times as long.
        self._writer.file_writer.add_summary(self._summary(value=values), step)

    def alert(self, alert: Alert) -> None:
        """Write the alert as a text summary."""
        if self._writer is not None:
            self._writer.add_text(f"alert/{alert.name}", alert.message, alert.step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


class PrometheusSink:
    """HTTP endpoint http://HOST:PORT/metrics: the last step's metrics as gauges, alerts as a counter.

    Args:
        config: Address to listen on.
        run: Value of the label ``run``.
        num_steps: Total number of steps of the run.
    """

    def __init__(self, config: PrometheusConfig, run: str, num_steps: int):
        prometheus: Any = importlib.import_module("prometheus_client")
        self._registry, self._run = prometheus.CollectorRegistry(), run
        self._gauges: dict[str, Any] = {}
        for metric in METRICS:
            if metric.kind != "text":
                labels = ("run", "category") if metric.name.endswith("/*") else ("run",)
                text = f"{metric.description} ({metric.unit or 'no unit'}; {metric.convention or 'this step'})"
                self._gauges[metric.name] = prometheus.Gauge(metric.prometheus, text, labels, registry=self._registry)
        total = prometheus.Gauge(
            "fctune_num_steps", "total number of steps of the run", ("run",), registry=self._registry
        )
        total.labels(run).set(num_steps)
        self._alerts = prometheus.Counter(
            "fctune_alerts", "alerts raised so far", ("run", "alert"), registry=self._registry
        )
        for name in ALERTS:
            self._alerts.labels(run, name)
        self._server, self._thread = prometheus.start_http_server(config.port, config.host, self._registry)

    def write(self, metrics: dict[str, Any]) -> None:
        """Set the gauges; flags that are absent from this step are reset to 0."""
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
        """Increase the counter of this alert."""
        self._alerts.labels(self._run, alert.name).inc()

    def close(self) -> None:
        """Shut the HTTP server down and join its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers among a step's metrics; flags are 1."""
    found = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _keep_id(file: Path) -> str:
    """Return the run id stored in a file, creating it first if necessary."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
