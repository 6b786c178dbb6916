"""Suites: named sets of evaluation cases of one or several turns."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from fctune.base.errors import ConfigError
from fctune.calls.formats.base import CallFormat
from fctune.calls.judge import BenchmarkVerdict
from fctune.data.conversation import Conversation
from fctune.tasks.task import AnswerCase, AnyCase, Case, MultiTurnCase


class Measured(NamedTuple):
    """The result of one category: the share of valid answers and the number of cases."""

    accuracy: float
    num_cases: int


Measure = Callable[[Sequence[BenchmarkVerdict], Sequence[BenchmarkVerdict]], dict[str, Any]]
"""Returns a benchmark's further figures from its strict and lenient verdicts on all cases.

``rates`` by name are those of ``fctune.calls.metrics.rate``, ``values`` by name are numbers, ``table`` holds counts by
row and column, and ``notes`` are sentences; each may be absent.
"""

Weigh = Callable[[Mapping[str, Measured]], dict[str, Any] | None]
"""Returns a benchmark's overall number from results by category; see ``Benchmark.weigh``."""


@dataclass(eq=False)
class Suite:
    """Cases of one or several turns, which judge the answers to them.

    Attributes:
        name: The suite's name.
        cases: Cases that one answer settles.
        benchmark: The public benchmark that the cases belong to: it must not be trained on, and its categories are not
            summed up.
        not_run: Categories that were requested and left out, with the reason.
        multi_turn: Multi-turn cases.
        release: The package and version that the cases come from, such as ``bfcl-eval 2026.3.23``; None if unknown.
        call_format: The format in which the prompts themselves ask for calls; None: the model's own.
        weigh: Weighs the categories of a benchmark; None: they have no overall number.
        measure: Computes the benchmark's further figures; None: it has none.
        max_new_tokens: Limit of an answer in the published evaluation; None: that of the command.
        any_call: Categories in which any call will do, so that nothing is known of its name and its arguments.
    """

    name: str
    cases: tuple[Case, ...]
    benchmark: str | None = None
    not_run: dict[str, str] = field(default_factory=dict)
    multi_turn: tuple[MultiTurnCase, ...] = ()
    release: str | None = None
    call_format: CallFormat | None = None
    weigh: Weigh | None = None
    measure: Measure | None = None
    max_new_tokens: int | None = None
    any_call: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._by_id: dict[str, AnyCase] = {case.id: case for case in self.all_cases}

    @property
    def all_cases(self) -> list[AnyCase]:
        """Single-turn and multi-turn cases, in order."""
        return [*self.cases, *self.multi_turn]

    def find(self, case_id: str) -> AnyCase | None:
        """Return the case with this id, or None."""
        return self._by_id.get(case_id)

    def find_category(self, case_id: str) -> str | None:
        """Return the category that an id names, whether or not the case exists; None if ids name none."""
        return None

    def digest(self) -> str:
        """Return a hex digest, 16 characters, of the cases: ids, prompts and expected calls."""
        digest = hashlib.blake2b(digest_size=8)
        for case in self.cases:
            expected = [[call.name, call.arguments] for call in case.expected]
            row: list[Any] = [case.id, case.category, case.prompt.digest(), expected]
            row += [case.describe()] if isinstance(case, AnswerCase) else []
            digest.update(json.dumps(row, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
        for dialogue in self.multi_turn:
            turns = [Conversation(turn.messages, turn.tools).digest() for turn in dialogue.turns]
            row = [dialogue.id, dialogue.category, turns, dialogue.describe(), dialogue.max_steps]
            digest.update(json.dumps(row, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    def select(self, categories: Sequence[str] = (), limit: int | None = None) -> Suite:
        """Return the suite with these categories only, or all if empty, and the first ``limit`` cases of each.

        Raises:
            ConfigError: No case has one of the categories.
        """
        known = {case.category for case in self.all_cases} | self.not_run.keys()
        if unknown := [name for name in categories if name not in known]:
            raise ConfigError(
                f"--categories {unknown[0]}: not a category of {self.name}; it has {', '.join(sorted(known))}."
            )
        seen: Counter[str] = Counter()

        def is_kept(case: AnyCase) -> bool:
            seen[case.category] += 1
            return (not categories or case.category in categories) and (limit is None or seen[case.category] <= limit)

        return self.with_cases(list(filter(is_kept, self.cases)), list(filter(is_kept, self.multi_turn)))

    def with_cases(self, cases: Sequence[Case], multi_turn: Sequence[MultiTurnCase] = ()) -> Suite:
        """Return a suite with other cases and the description of this one."""
        described = {field.name: getattr(self, field.name) for field in fields(Suite)}
        return Suite(**described | {"cases": tuple(cases), "multi_turn": tuple(multi_turn)})
