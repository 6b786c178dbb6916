"""Layers of a config merged into one, with the origin of each value, and written as YAML.

Mappings are merged key by key; any other value, lists included, replaces the one below it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from fctune.config.fields import iter_fields
from fctune.config.parsing import apply_override, parse_index
from fctune.config.yaml_text import dump_yaml

EXTENDS = "extends"
DEFAULT = "default"
COMMAND_LINE = "command line"

Key = tuple[str | int, ...]  # path of a value through mappings and lists


@dataclass(slots=True)
class Composition:
    """A config merged from layers, the lowest first.

    Attributes:
        schema: Dataclass that the merged config is parsed to.
        values: The merged config.
        origins: Layer of each value that is not a mapping; changed items of lists have their own.
        files: Files of the layers.
    """

    schema: type[Any]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)

    def add_layer(self, layer: dict[str, Any], origin: str) -> None:
        """Merge a layer over the values so far.

        A null replaces a value, as it does in a single file: it selects the default, or "none" where a key says so. In
        a mapping without a schema, such as the arguments of the optimizer, it removes the key.
        """
        self._merge(self.values, layer, (), origin)

    def apply_overrides(self, overrides: Sequence[str], problems: list[str], origin: str = COMMAND_LINE) -> None:
        """Apply command-line overrides, ``key=value`` and ``~key``, to a config."""
        for override in overrides:
            if override.removeprefix("~").partition("=")[0] == EXTENDS:
                problems.append(f"{override}: only a file can extend another; write `{EXTENDS}: FILE` into one")
                continue
            apply_override(self.values, override, problems)
            key, _, _ = override.removeprefix("~").partition("=")
            indexes = [(parse_index(part), part) for part in key.split(".")]
            path: Key = tuple(part if index is None else index for index, part in indexes)
            for known in [known for known in self.origins if known[: len(path)] == path]:
                del self.origins[known]
            if not override.startswith("~"):
                self.origins[path] = origin

    def origin_of(self, path: Key) -> str | None:
        """Return the layer of a value; None for a value that no layer gives."""
        given: Any = self.values
        for part in path:
            items: dict[Any, Any] = given if isinstance(given, dict) else {}
            if isinstance(given, list):
                items = dict(enumerate(given))
            if part not in items:
                return None
            given = items[part]
        return next((self.origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.origins), None)

    def _merge(self, into: dict[str, Any], layer: dict[str, Any], where: Key, origin: str) -> None:
        for name, value in layer.items():
            path = (*where, name)
            below = into.get(name)
            if isinstance(value, dict) and isinstance(below, dict):
                self._merge(below, value, path, origin)
            elif value is None and name in into and self._has_no_schema(where):
                self._forget(into.pop(name), path)
            else:
                self._forget(below, path)
                into[name] = copy.deepcopy(value)
                self._record(value, path, origin)

    def _record(self, value: Any, path: Key, origin: str) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                self._record(item, (*path, name), origin)
        else:
            self.origins[path] = origin

    def _forget(self, value: Any, path: Key) -> None:
        """Drop the origins of a value and its parts, which is much faster than to look at all origins."""
        self.origins.pop(path, None)
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, part in parts:
            self._forget(part, (*path, name))

    def _has_no_schema(self, path: Key) -> bool:
        fields = dict(iter_fields(self.schema))
        keys = [".".join(map(str, path[:end])) for end in range(1, len(path) + 1)]
        return any(get_origin(arm) is dict for key in keys if key in fields for arm in fields[key].arms)


def render_with_origins(values: dict[str, Any], composition: Composition) -> str:
    """Write a config as YAML in which a comment after each value names its layer."""
    return "\n".join(_render_mapping(values, (), composition)) + "\n"


def _render_mapping(values: dict[str, Any], where: Key, composition: Composition) -> Iterator[str]:
    for name, value in values.items():
        path, label = (*where, name), f"{'  ' * len(where)}{_dump_inline(name)}:"
        if isinstance(value, dict) and value:
            yield label
            yield from _render_mapping(value, path, composition)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield label
            yield from _render_list(value, path, composition)
        else:
            yield f"{label} {_dump_inline(value)} # {composition.origin_of(path) or DEFAULT}"


def _render_list(values: list[Any], where: Key, composition: Composition) -> Iterator[str]:
    for index, item in enumerate(values):
        path, mark = (*where, index), "  " * len(where) + "- "
        pairs = item.items() if isinstance(item, dict) and item else ()
        for number, (name, value) in enumerate(pairs):
            start = mark if number == 0 else " " * len(mark)
            origin = composition.origin_of((*path, name)) or DEFAULT
            yield f"{start}{_dump_inline(name)}: {_dump_inline(value)} # {origin}"
        if not pairs:
            yield f"{mark}{_dump_inline(item)} # {composition.origin_of(path) or DEFAULT}"


def _dump_inline(value: Any) -> str:
    return dump_yaml(value)
