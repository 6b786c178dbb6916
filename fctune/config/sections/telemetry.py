"""Destinations of metrics, and the operator profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from fctune.config.fields import AT_LEAST_0, AT_LEAST_1, NotEmpty, Null, Range, SectionProblems


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases. The API key is read from WANDB_API_KEY or `wandb login`, never from a config."""

    project: str
    """Project name."""
    entity: Annotated[str | None, Null("the key's default")] = None
    """Team or user."""
    name: Annotated[str | None, Null("the last component of `output_dir`")] = None
    """Name of the run."""
    mode: Literal["auto", "online", "offline", "disabled"] = "online"
    """`online` falls back to offline without a key or network; `auto` is `online` if WANDB_API_KEY is set, else off."""


@dataclass(kw_only=True, slots=True)
class PrometheusConfig:
    """Metrics endpoint of rank 0, http://HOST:PORT/metrics, for a Prometheus server to scrape."""

    port: Annotated[int | None, Range(ge=1, le=65535), Null("no endpoint")] = None
    """TCP port."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections of other machines, from anyone who can reach the port."""


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    """Destinations of metrics and alerts in addition to the run's files and the console."""

    wandb: Annotated[WandbConfig | None, Null("off")] = None
    """Weights & Biases."""
    tensorboard: bool = False
    """Write event files to `output_dir/tensorboard`."""
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    """Prometheus endpoint."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Operator profile of some steps, in `output_dir/profile`; `profile: {}` uses these defaults."""

    first_step: Annotated[int, AT_LEAST_1] = 10
    """First step to profile."""
    last_step: int = 12
    """Last step to profile; in a large model a step is about 10 MB of trace."""
    ranks: Annotated[list[int], NotEmpty("[0]"), AT_LEAST_0] = field(default_factory=lambda: [0])
    """Ranks to profile."""
    shapes: bool = False
    """Record the input shapes of each operator."""
    stacks: bool = False
    """Record the source lines that called each operator; slower."""
    allocations: bool = False
    """Record the call stack of each allocation, for the memory snapshot that an out-of-memory error leaves (CUDA only);
    slower."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the order of the steps."""
        if self.last_step < self.first_step:
            problems.add(
                ("last_step", "first_step"),
                f"{where}.last_step={self.last_step}: less than {where}.first_step={self.first_step}",
            )
