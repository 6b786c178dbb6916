"""The choices of a first trial, made in the environment, and what a run is told of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.errors import ConfigError

# The one table of what a variable of the environment sets in a config; an empty one sets nothing.
CHOICES = {
    "MODEL": "model.path",
    "DATASET": "data.sources.0.path",
    "MAX_SAMPLES": "data.max_samples",
    "EPOCHS": "epochs",
    "MAX_STEPS": "max_steps",
    "LEARNING_RATE": "optimizer.lr",
    "SEED": "seed",
    "OUTPUT_DIR": "output_dir",
}

# A config has one dataset or several; the one that is chosen stands for all of them.
_ALONE = {"DATASET": "data.sources=[{path: null}]"}


@dataclass(frozen=True, slots=True)
class Launch:
    """A run as the nodes are told of it."""

    config: RunConfig
    arguments: list[str]  # key=value, after --config
    shared: Path  # that all nodes see

    @property
    def log_dir(self) -> Path:
        """What the nodes show, a file each; beside the runs, since a run's own directory may be renamed."""
        return self.shared / "logs" / Path(self.config.output_dir).name

    def with_arguments(self, arguments: Sequence[str]) -> Launch:
        """The same with more of them."""
        return replace(self, arguments=[*self.arguments, *arguments])

    def prepare(self, is_head: bool) -> None:
        """Make the folder of logs; the head forgets how an earlier run of this directory ended.

        Raises:
            ConfigError: the shared volume cannot be written.
        """
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            if is_head:
                Path(self.config.output_dir, "exit.json").unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be written ({error.strerror}).") from None

    def to_shell(self, node: int) -> str:
        """Assignments that a shell can read in."""
        words = {
            "trains": "all" if self.config.adapter is None else "adapter",
            "output_dir": self.config.output_dir,
            "log": str(self.log_dir / f"node-{node}.log"),
        }
        lines = [f"{name}={shlex.quote(value)}" for name, value in words.items()]
        return "\n".join([*lines, f"arguments=({' '.join(map(shlex.quote, self.arguments))})"]) + "\n"


def plan_launch(config: Path, environment: Mapping[str, str], overrides: Sequence[str], shared: Path) -> Launch:
    """The run that a config, the environment's choices and overrides describe; the later of these wins.

    A relative ``output_dir`` is on the shared volume: the nodes' own disks go with them.

    Raises:
        ConfigError: with every problem of it.
    """
    arguments = [
        argument
        for name, key in CHOICES.items()
        if environment.get(name)
        for argument in ([_ALONE[name]] if name in _ALONE else []) + [f"{key}={environment[name]}"]
    ]
    arguments += overrides
    planned = load_config(config, arguments)
    output_dir = shared / planned.output_dir
    arguments.append(f"output_dir={output_dir}")
    return Launch(load_config(config, arguments), arguments, shared)
