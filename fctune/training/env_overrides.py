"""Environment variables that override a config, and the launch specification derived from both."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fctune.base.errors import ConfigError
from fctune.config.components import ALLOW_COMPONENTS
from fctune.config.loading import read_environment
from fctune.config.parsing import is_hub_name
from fctune.config.schema import RunConfig
from fctune.config.shipped import CONFIG_OF_SIZE, find_shipped_config, has_size, list_sizes
from fctune.models.run_config import load_run_config

# Environment variable -> the config key that it sets; an empty variable sets nothing.
ENV_OVERRIDES = {
    "MODEL": "model.path",
    "DATASET": "data.sources.0.path",
    "MAX_SAMPLES": "data.max_samples",
    "EPOCHS": "epochs",
    "MAX_STEPS": "max_steps",
    "LEARNING_RATE": "optimizer.lr",
    "SEED": "seed",
    "OUTPUT_DIR": "output_dir",
    "WANDB_PROJECT": "telemetry.wandb.project",
}

MODEL_SIZE = "MODEL_SIZE"  # chooses the config in place of CONFIG
FALLBACK = "FCTUNE_FALLBACK"  # checkpoint.fallback_dir of a config that sets none

_REPLACE_SOURCES = "data.sources=[{path: null}]"  # DATASET replaces all sources of a config


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A run as every node launches it."""

    config: RunConfig
    config_file: Path
    arguments: list[str]  # key=value overrides that follow --config
    shared: Path  # mount point of the volume shared by all nodes

    @property
    def log_dir(self) -> Path:
        """Directory of the nodes' logs; outside the run's own directory, which may be renamed."""
        return self.shared / "logs" / Path(self.config.output_dir).name

    def with_arguments(self, arguments: Sequence[str]) -> LaunchSpec:
        """Return a copy with further overrides appended."""
        return replace(self, arguments=[*self.arguments, *arguments])

    def prepare(self) -> None:
        """Create the log directory.

        Raises:
            ConfigError: The shared volume cannot be written.
        """
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be written ({error.strerror}).") from None

    def to_shell(self, node: int) -> str:
        """Return assignments of ``config``, ``recipe``, ``output_dir``, ``log`` and ``arguments`` for a shell script.

        What ``--allow-component`` has allowed is exported to the ranks.
        """
        words = {
            "config": str(self.config_file),
            "recipe": self.config.recipe,
            "output_dir": self.config.output_dir,
            "log": str(self.log_dir / f"node-{node}.log"),
        }
        lines = [f"{name}={shlex.quote(value)}" for name, value in words.items()]
        if allowed := read_environment().get(ALLOW_COMPONENTS):
            lines.append(f"export {ALLOW_COMPONENTS}={shlex.quote(allowed)}")
        return "\n".join([*lines, f"arguments=({' '.join(map(shlex.quote, self.arguments))})"]) + "\n"


def _split_overrides(text: str) -> list[str]:
    """Split OVERRIDES at its spaces, as a shell does.

    Raises:
        ConfigError: A quotation mark is missing.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"OVERRIDES={text}: {error}; write key=value pairs as on a command line.") from None


def choose_config(config: Path, environment: Mapping[str, str]) -> Path:
    """Return the config of a launch: ``config``, or the file that MODEL_SIZE stands for if ``config`` is a size.

    Raises:
        ConfigError: MODEL_SIZE is unknown, or is not the size of ``config``.
    """
    size = environment.get(MODEL_SIZE, "")
    if size and size.upper() not in CONFIG_OF_SIZE:
        raise ConfigError(
            f"{MODEL_SIZE}={size}: fctune comes with no config for models of this size; it has {list_sizes()}. "
            "For another model, set CONFIG to a file, or MODEL to the model and CONFIG to a config of about its size."
        )
    name = CONFIG_OF_SIZE.get(str(config).upper())
    if size and not has_size(name or config, size):
        raise ConfigError(
            f"{MODEL_SIZE}={size} and CONFIG={config}: the config's name does not have this size, so they may "
            f"contradict each other. Set one of them: {MODEL_SIZE}={size} alone is "
            f"CONFIG=configs/{CONFIG_OF_SIZE[size.upper()]}.yaml."
        )
    if name is None:
        return config
    own = Path("configs") / f"{name}.yaml"  # of the clone, though the library may be that of an image
    return own if own.is_file() else find_shipped_config(name) or config


def resolve_launch(config: Path, environment: Mapping[str, str], overrides: Sequence[str], shared: Path) -> LaunchSpec:
    """Combine a config file with environment variables and command-line overrides, in increasing precedence.

    ``config`` may be a size, as MODEL_SIZE. A relative ``output_dir`` is resolved against the shared volume, because a
    node's own disks are deleted with it.

    Raises:
        ConfigError: Listing every problem of the combined config.
    """
    config = choose_config(config, environment)
    arguments = []
    for name, key in ENV_OVERRIDES.items():
        if value := environment.get(name):
            if name == "DATASET":
                arguments.append(_REPLACE_SOURCES)
                value = f"hf:{value}" if is_hub_name(value) else value
            arguments.append(f"{key}={value}")
    arguments += _split_overrides(environment.get("OVERRIDES", ""))
    arguments += overrides
    given = load_run_config(config, arguments)
    if (other_disk := environment.get(FALLBACK)) and given.checkpoint.fallback_dir is None:
        arguments.append(f"checkpoint.fallback_dir={other_disk}")
    arguments.append(f"output_dir={shared / given.output_dir}")
    return LaunchSpec(load_run_config(config, arguments), config, arguments, shared)
