"""Public benchmarks, one folder each: their cases, their judges and their overall numbers.

A folder is a plug-in. Its package has an instance of ``Benchmark`` named ``BENCHMARK``, and ``NAME.yaml`` is the suite
that ``--suite NAME`` runs. Nothing outside the folder names a benchmark, so adding one adds a folder and nothing else.
"""

from __future__ import annotations

import argparse
import functools
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from fctune.tasks.suite import Measured, Suite


class GateSample(NamedTuple):
    """Cases of a benchmark that are one line of the gate; a hash of their ids chooses them.

    Attributes:
        name: Name of the line.
        title: What is counted as right, for people.
        categories: The benchmark's categories.
        max_cases: Largest number of cases; the gate's settings may ask for fewer.
        cause: What a fall is explained by: ``calls``, ``over_calling``, ``over_refusing``, ``asking``, ``multi_turn``,
            ``reasoning`` or ``text``.
        thorough_cases: Largest number of cases of a thorough gate; 0: ``max_cases``.
    """

    name: str
    title: str
    categories: tuple[str, ...]
    max_cases: int
    cause: str = ""
    thorough_cases: int = 0


class Benchmark(ABC):
    """A public benchmark. Its package is imported for ``--help``, so it imports its cases and judges in methods."""

    name: ClassVar[str]
    """Name of the suite, key of its settings in a suite's YAML, and key of its verdicts in result rows."""
    title: ClassVar[str]
    """Name and version as people write it; marks rows that must not be trained on."""
    eval_only_options: ClassVar[tuple[str, ...]] = ()
    """Options of ``add_eval_options`` that only ``fctune eval`` has; other commands use their defaults."""
    gate_samples: ClassVar[tuple[GateSample, ...]] = ()
    """The lines of the gate that the benchmark gives."""
    has_predictions: ClassVar[bool] = True
    """``fctune score NAME`` can judge a file of predictions."""

    def add_eval_options(self, group: argparse._ArgumentGroup) -> None:  # noqa: B027 a benchmark may have none
        """Add options of commands that ask the benchmark's cases; each has the prefix ``--NAME-``."""

    def add_score_options(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 a benchmark may have none
        """Add options of ``fctune score NAME``, which judges a file of predictions."""

    def open_predictions_suite(self, arguments: argparse.Namespace) -> Suite:
        """Return the suite that ``fctune score NAME`` judges predictions against; ``find`` may load cases on demand."""
        raise NotImplementedError

    @abstractmethod
    def load(
        self,
        settings: Any,
        where: str,
        categories: Sequence[str],
        options: Mapping[str, Any],
        has_plain_names: bool,
        has_multi_turn: bool,
    ) -> Suite:
        """Load the cases of a suite.

        Args:
            settings: The value of the benchmark's key in the suite's YAML.
            where: The YAML file, for messages; its stem is the suite's name.
            categories: Categories to load; empty: those that ``settings`` name.
            options: Values of the command's options by name, those of ``add_eval_options`` among them; may lack any.
            has_plain_names: Write underscores for dots in the tools' names, as servers' own protocols require.
            has_multi_turn: Include multi-turn categories; without it they are ``not_run``.

        Raises:
            ConfigError: The settings are invalid, there is no such category, or the benchmark is not installed.
            DataError: The benchmark's files are missing or damaged.
        """

    @abstractmethod
    def owns(self, case_id: str) -> bool:
        """Return True if an id is one of the benchmark's, so that rows made of its cases are recognised."""

    def weigh(self, measured: Mapping[str, Measured]) -> dict[str, Any] | None:
        """Return the benchmark's overall number, from results by category; None if it has none.

        Returns:
            ``overall`` and ``parts`` by name, each from 0 to 1; ``weights`` of the parts in percent; ``not_measured``,
            the categories that counted as 0; and ``incomplete``, those measured on some of their cases only.
        """
        return None


@functools.cache
def find_benchmarks() -> dict[str, Benchmark]:
    """Return all benchmarks by name."""
    packages = (module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    found: list[Benchmark] = [import_module(f"{__name__}.{package}").BENCHMARK for package in packages]
    return {benchmark.name: benchmark for benchmark in found}


def find_suite_files() -> dict[str, Path]:
    """Return the YAML file of each benchmark's suite by name."""
    files = (file for folder in __path__ for file in Path(folder).glob("*/*.yaml"))
    return {file.stem: file for file in files}


def find_verdict(row: Mapping[str, Any]) -> tuple[Benchmark, Mapping[str, Any]] | None:
    """Return the benchmark's own verdict in a result row, with the benchmark; None if the row belongs to none."""
    for name, benchmark in find_benchmarks().items():
        if name in row:
            return benchmark, row[name]
    return None


def find_benchmark_of_rows(rows: Iterable[Mapping[str, Any]]) -> Benchmark | None:
    """Return the benchmark that result rows belong to, or None."""
    return next((found[0] for row in rows if (found := find_verdict(row)) is not None), None)
