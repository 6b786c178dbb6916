"""Load a run's config from YAML and ``key=value`` overrides; every problem is reported in one ConfigError."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fctune.base.errors import ConfigError
from fctune.config.composition import EXTENDS, Composition
from fctune.config.intervals import format_count
from fctune.config.key_hints import find_key
from fctune.config.parsing import parse_dataclass, shorten
from fctune.config.schema import RunConfig
from fctune.config.shipped import find_shipped_config, list_shipped_configs, list_sizes, resolve_shipped_path
from fctune.config.yaml_text import MAX_CHARS, parse_yaml

T = TypeVar("T")

_MAX_PROBLEMS = 100  # in a report
_MAX_PROBLEM_CHARS = 1000
_MAX_FILES = 50

_SIZE = re.compile(r"\d+(\.\d+)?[BM]?", re.IGNORECASE)  # of a model, in a config's place


def load_config(
    path: str | Path, overrides: Sequence[str] = (), check: Callable[[RunConfig], list[str]] | None = None
) -> RunConfig:
    """Load the run that a YAML file and ``key=value`` overrides describe, and check all of it.

    Args:
        path: YAML file in the schema of RunConfig, or the name of a config that comes with fctune, such as
            ``tiny_lora``.
        overrides: ``a.b=value`` (parsed as YAML; list items by index, ``data.sources.0.path=x``), or ``~a.b`` to drop
            a key.
        check: Finds further problems of a config whose keys and types are right, one line each.

    Raises:
        ConfigError: Listing every problem with its key and remedy.
    """
    path = find_config(path)
    problems: list[str] = []
    composition = compose_config(path, RunConfig)
    composition.apply_overrides(overrides, problems)
    config = parse_config(composition.values, problems)
    if config is not None and check is not None:
        problems += check(config)
    if problems or config is None:
        raise ConfigError(format_problems(str(path), problems))
    return config


def compose_config(path: Path, schema: type[Any]) -> Composition:
    """Read a config file and those that it extends.

    ``extends: FILE`` or a list of files names configs that this one is merged over; of several, later ones win. Files
    are relative to the file that names them; a shipped config may be given by its name.

    Args:
        path: YAML file.
        schema: Dataclass that the config is parsed to.

    Raises:
        ConfigError: A file is missing, cannot be read or is not YAML, or extends itself.
    """
    composition = Composition(schema)
    _add_file(composition, path, [])
    return composition


def _add_file(composition: Composition, path: Path, chain: list[Path]) -> None:
    """Merge the files that a file extends, then the file itself; ``chain`` lists the files that extend this one."""
    chain = [*chain, path]
    if path.resolve() in [file.resolve() for file in chain[:-1]]:
        raise ConfigError(f"{path}: extends itself ({' -> '.join(map(str, chain))}); remove one {EXTENDS}.")
    if max(len(chain), len(composition.files)) > _MAX_FILES:
        raise ConfigError(f"{chain[0]}: extends more than {_MAX_FILES} files; merge some of them.")
    raw = read_yaml_mapping(path)
    names = raw.pop(EXTENDS, None)
    names = [] if names is None else names if isinstance(names, list) else [names]
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{path}: {EXTENDS}={shorten(repr(name))}: expected a file, or a list of files.")
        try:
            base = _find_file(path.parent / name)
        except ConfigError as error:
            base = find_shipped_config(name) or Path()
            if not base.is_file():
                raise ConfigError(f"{path}: {EXTENDS}={shorten(name)}: {error}") from None
        _add_file(composition, base, chain)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    composition.add_layer(raw, str(shown))
    composition.files.append(path)


def parse_config(raw: dict[str, Any], problems: list[str]) -> RunConfig | None:
    """Build and validate a RunConfig from nested plain dicts; paths may start with ``~/``, the home directory.

    Returns:
        The config, or None if it cannot be built; then ``problems`` has a line for each reason.
    """
    raw = _expand_home(raw)
    model = raw.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        raw = raw | {"model": model | {"path": resolve_shipped_path(model["path"])}}
    config: RunConfig | None = parse_dataclass(RunConfig, raw, "", problems, find_key)
    return config


def _expand_home(value: Any) -> Any:
    """Return nested values with the home directory in place of the ``~`` of ``~/``, which shells leave after ``=``."""
    if isinstance(value, dict):
        return {key: _expand_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def read_dataclass(cls: type[T], path: str | Path, find_problems: Callable[[T], list[str]] = lambda read: []) -> T:
    """Read a YAML file of a dataclass, and check it.

    Args:
        cls: The dataclass.
        path: The file.
        find_problems: Returns what is wrong with values that are right by themselves.

    Raises:
        ConfigError: It cannot be read, or values are missing or wrong, all of which are reported.
    """
    path, problems = Path(path), list[str]()
    read: T | None = parse_dataclass(cls, read_yaml_mapping(path), "", problems)
    if read is not None and not problems:
        problems = find_problems(read)
    if problems or read is None:
        raise ConfigError(format_problems(str(path), problems))
    return read


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        ConfigError: The file cannot be read, is not YAML, is too large, or holds something else.
    """
    try:
        with path.open(encoding="utf-8") as file:  # no more than is refused, of a file that never ends
            raw = parse_yaml(file.read(MAX_CHARS + 1))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(raw).__name__}.")
    return raw


def format_problems(where: str, problems: Sequence[str]) -> str:
    """Format a report: the file and the number of problems, then a line for each of the first hundred."""
    count = format_count(len(problems), "problem")
    lines = [f"  {shorten(problem, _MAX_PROBLEM_CHARS)}" for problem in problems[:_MAX_PROBLEMS]]
    lines += [f"  and {len(problems) - _MAX_PROBLEMS:,} more"] if len(problems) > _MAX_PROBLEMS else []
    return f"{shorten(where, _MAX_PROBLEM_CHARS)}: {count}\n" + "\n".join(lines)


def read_environment() -> dict[str, str]:
    """Return a copy of this process's environment variables, for functions that take them as an argument."""
    return dict(os.environ)


def set_default_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process and its children, where they are not set yet."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def find_config(path: str | Path) -> Path:
    """Find a config by its path, or by its name if it is a shipped one; a copy in this directory has precedence.

    Raises:
        ConfigError: There is none; the message suggests near names.
    """
    local = find_local_copy(path)
    return _find_file(path) if local is None else local


def find_local_copy(name: str | Path) -> Path | None:
    """Return the file of this directory that a shipped config's name stands for, such as ``config cp`` writes."""
    shipped = find_shipped_config(str(name)) if Path(name).parent == Path() else None
    is_copy = shipped is not None and not os.path.isfile(name) and Path(shipped.name).is_file()
    return Path(shipped.name) if is_copy and shipped is not None else None


def _find_file(path: str | Path) -> Path:
    """Find a config by its path, or by its name if it is a shipped one."""
    found = Path(path)
    if os.path.isfile(found):
        return found
    if (shipped := find_shipped_config(str(path))) is not None:
        return shipped
    local = {file.name for file in found.parent.glob("*.yaml")} if os.path.isdir(found.parent) else set()
    near = local | {file.stem for file in list_shipped_configs() if file.name not in local}
    if _SIZE.fullmatch(str(path)):
        raise ConfigError(f"{path}: fctune comes with no config for models of this size; it has {list_sizes()}.")
    close = difflib.get_close_matches(found.name, sorted(near), n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise ConfigError(
        f"{shorten(str(path))}: no such config file{hint} `fctune config ls` lists the configs that come with fctune."
    )
