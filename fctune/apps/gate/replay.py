"""``data.replay`` of a remedy: rows to mix in, added to those that are mixed in already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fctune.config.intervals import format_share, parse_share
from fctune.config.sections.data import SourceConfig
from fctune.config.yaml_text import dump_yaml, parse_yaml

SOURCES, SHARE = "data.replay.sources", "data.replay.share"

_DEFAULTS = {field.name: getattr(SourceConfig(path=""), field.name) for field in fields(SourceConfig)}


class ReplayMix:
    """Sources of rows to mix in, each with its number of rows for each row that is trained on.

    Such numbers add up, unlike shares of the whole: a further source leaves the others as many rows as they had, and no
    file is asked for rows that it may not have.
    """

    def __init__(self) -> None:
        self._scale: float | None = None  # weight of one row for each that is trained on, in the first config
        self._mixed: dict[str, tuple[dict[str, Any], float]] = {}  # source without its weight, and its number

    @classmethod
    def read(cls, replay: Mapping[str, Any]) -> ReplayMix:
        """Read ``sources`` and ``share`` of a config's section."""
        mix = cls()
        share = parse_share(replay["share"])
        weights = [source.get("weight", 1.0) for source in replay["sources"]]
        mix._scale = sum(weights) * (1 - share) / share
        for source, weight in zip(replay["sources"], weights, strict=True):
            mix.add(source, weight / mix._scale)
        return mix

    @classmethod
    def combine(cls, overrides: Iterable[Mapping[str, str]]) -> ReplayMix:
        """Read the overrides of several remedies; of what several have, the largest number counts."""
        combined = cls()
        for found in overrides:
            mix = cls.read({"sources": parse_yaml(found[SOURCES]), "share": found[SHARE]})
            combined._scale = combined._scale or mix._scale
            for key, (source, number) in mix._mixed.items():
                known = combined._mixed.get(key, (source, 0.0))[1]
                combined._mixed[key] = source, max(known, number)
        return combined

    def add(self, source: Mapping[str, Any], number: float) -> None:
        """Add rows of a source, which may have some already."""
        plain = {
            name: value
            for name, value in source.items()
            if name == "path" or (name != "weight" and value != _DEFAULTS.get(name))
        }
        key = dump_yaml(plain)
        self._mixed[key] = plain, self._mixed.get(key, (plain, 0.0))[1] + number

    def to_overrides(self) -> dict[str, str]:
        """Return the overrides of a run. Numbers are rounded so that the first source gets no more than its own."""
        numbers = [number for _, number in self._mixed.values()]
        scale = self._scale or 1 / numbers[0]
        share = sum(numbers) / (1 + sum(numbers))
        sources = []
        for source, number in self._mixed.values():
            weight = math.ceil(100 * number * scale - 1e-6) / 100
            sources.append(source if weight == 1 else {**source, "weight": weight})
        return {SOURCES: dump_yaml(sources), SHARE: format_share(math.floor(1000 * share + 1e-6) / 1000)}
