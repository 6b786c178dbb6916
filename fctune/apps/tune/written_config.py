"""The config that a tune writes: which of it a person has edited, and its gate section, which may change later."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fctune.config.loading import compose_config
from fctune.config.schema import RunConfig
from fctune.config.yaml_text import dump_yaml

_GATE = re.compile(r"^gate:.*\n(?:(?:[ \t].*)?\n)*", re.MULTILINE)


class WrittenConfig:
    """``tune.yaml`` in the directory of a tune."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def exists(self) -> bool:
        """True unless the file is gone."""
        return self.path.is_file()

    def digest(self) -> str:
        """Return a digest of the text."""
        return digest_text(self._read())

    def training_digest(self) -> str:
        """Return a digest of the text without its gate section."""
        return digest_text(_divide(self._read())[0])

    def gate_digest(self) -> str:
        """Return a digest of the gate section."""
        return digest_text(_divide(self._read())[1])

    def with_gate_of(self, text: str) -> str:
        """Return the text with the gate section of another config."""
        return _divide(self._read())[0] + _divide(text)[1]

    def list_edits(self, written: Mapping[str, Any]) -> list[str]:
        """Return overrides that change the values as they were written to those of the file; none if it has the same.

        Raises:
            ConfigError: The file is no config.
        """
        return list(_list_changes(written, compose_config(self.path, RunConfig).values, ""))

    def _read(self) -> str:
        return self.path.read_text(encoding="utf-8")


def digest_text(text: str) -> str:
    """Return a digest of a config's text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _divide(text: str) -> tuple[str, str]:
    """Return the text of a config without its gate section, and that section."""
    text = text.rstrip("\n") + "\n"
    found = _GATE.search(text)
    return (text, "") if found is None else (text[: found.start()] + text[found.end() :], found[0])


def _list_changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name in dict.fromkeys((*before, *after)):
        key, was, now = f"{prefix}{name}", before.get(name), after.get(name)
        if name not in after:
            yield f"~{key}"
        elif name not in before or was != now:
            if isinstance(now, dict) and now and (was is None or isinstance(was, dict)):
                yield from _list_changes(was or {}, now, f"{key}.")
            else:
                yield f"{key}={dump_yaml(now)}"
