"""The leaderboard's categories as a suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.config.loading import format_problems
from fctune.config.parsing import parse_dataclass
from fctune.tasks.benchmarks.bfcl.cases import CATEGORIES, MULTI_TURN, NAME, TITLE, category_of
from fctune.tasks.benchmarks.bfcl.prompt_answers import BfclAnswer
from fctune.tasks.benchmarks.bfcl.single_turn import (
    Mode,
    find_installed_data,
    find_release,
    load_category,
    resolve_categories,
)
from fctune.tasks.suite import Suite, Weigh
from fctune.tasks.task import AnyCase, Case, MultiTurnCase


class BfclSuite(Suite):
    """The leaderboard's categories that are named, or that case ids passed to ``find`` belong to.

    Args:
        data_dir: The wheel's data directory.
        categories: Categories or groups of them to load at once.
        has_plain_names: Write ``a_b`` for a function ``a.b``, for models that cannot write dots.
        mode: How the model is given the functions.
        weigh: Weighs the categories; None leaves the overall number out.

    Raises:
        ConfigError: A category does not exist, or the wheel, which has the prompt of the mode "prompt", is missing.
        DataError: The directory is missing or does not have the wheel's layout.
    """

    def __init__(
        self,
        data_dir: str | Path,
        categories: Sequence[str] = (),
        has_plain_names: bool = False,
        mode: Mode = "tools",
        weigh: Weigh | None = None,
    ) -> None:
        if not Path(data_dir).is_dir():
            raise DataError(
                f"{data_dir}: no such directory. Pass the data directory of the bfcl-eval wheel: "
                "site-packages/bfcl_eval/data."
            )
        runnable, not_run = resolve_categories(categories, mode)
        super().__init__(
            NAME,
            (),
            TITLE,
            not_run,
            release=find_release(data_dir),
            call_format=BfclAnswer() if mode == "prompt" else None,
            weigh=weigh,
            any_call=frozenset({"live_relevance"}),
        )
        self._mode = mode
        self._data_dir = Path(data_dir)
        self._has_plain_names = has_plain_names
        self._loaded: dict[str, dict[str, AnyCase]] = {}
        for category in runnable:
            self._add(category)

    def find(self, case_id: str) -> AnyCase | None:
        """Return the case with this id, or None; adds its category to the suite."""
        if (case := self._by_id.get(case_id)) is not None:
            return case
        category = category_of(case_id)
        if category in CATEGORIES and case_id in self._load(category):
            self._add(category)
        return self._by_id.get(case_id)

    def find_category(self, case_id: str) -> str:
        """Return the category that an id names, whether or not the case exists."""
        return category_of(case_id)

    def _load(self, category: str) -> dict[str, AnyCase]:
        if category not in self._loaded:
            single, multi, not_run = load_category(self._data_dir, category, self._has_plain_names, self._mode)
            cases: list[AnyCase] = [*single, *multi]
            self._loaded[category] = {case.id: case for case in cases}
            self.not_run |= not_run
        return self._loaded[category]

    def _add(self, category: str) -> None:
        cases = self._load(category)
        self._by_id |= cases
        if category in MULTI_TURN:
            self.multi_turn += tuple(case for case in cases.values() if isinstance(case, MultiTurnCase))
        else:
            self.cases += tuple(case for case in cases.values() if isinstance(case, Case))


@dataclass(frozen=True, slots=True)
class _Settings:
    """The value of ``bfcl`` in a suite's YAML."""

    categories: list[str]
    data: str | None = None


def load_bfcl(
    settings: Any,
    where: str,
    categories: Sequence[str],
    data: str | None,
    mode: Mode,
    has_plain_names: bool,
    has_multi_turn: bool,
    weigh: Weigh,
) -> Suite:
    """Load the suite of a YAML file.

    Args:
        settings: The value of ``bfcl`` in the file.
        where: The file.
        categories: Categories to load; empty: those of the settings.
        data: The wheel's data directory; None: that of the settings, or of the installed wheel.
        mode: How the model is given the functions.
        has_plain_names: Write ``a_b`` for a function ``a.b``; the mode "prompt" keeps the dots.
        has_multi_turn: Include the multi-turn categories.
        weigh: Weighs the categories.

    Raises:
        ConfigError: The settings are invalid, a category does not exist, or the wheel is missing.
        DataError: The data directory is missing or does not have the wheel's layout.
    """
    problems: list[str] = []
    parsed: _Settings | None = parse_dataclass(_Settings, settings, NAME, problems)
    if problems or parsed is None:
        raise ConfigError(format_problems(where, problems))
    runnable, not_run = resolve_categories(list(categories) or parsed.categories, mode)
    run = [category for category in runnable if has_multi_turn or category not in MULTI_TURN]
    left_out = {name: "needs several turns, which this command does not run" for name in runnable if name not in run}
    data = data or parsed.data
    suite = BfclSuite(
        data if data is not None else find_installed_data(), run, has_plain_names and mode == "tools", mode, weigh
    )
    loaded = suite.with_cases(suite.cases, suite.multi_turn)
    name = Path(where).stem
    loaded.name = name if mode == "tools" else f"{name}_{mode}"
    loaded.not_run = {**left_out, **suite.not_run, **not_run}
    return loaded
