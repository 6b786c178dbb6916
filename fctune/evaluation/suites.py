"""Suites: which cases are asked, and how an answer to one is judged."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fctune.calls.bfcl.cases import CATEGORIES
from fctune.calls.cases import Case, make_cases, read_cases
from fctune.calls.formats.base import Parsed
from fctune.calls.metrics import Outcome, judge
from fctune.config.parsing import parse_dataclass
from fctune.data.conversation import Conversation
from fctune.data.synthetic import iter_cases
from fctune.errors import ConfigError
from fctune.evaluation.bfcl import BFCL, open_bfcl
from fctune.evaluation.multi_turn import MultiTurnCase

Judge = Callable[[Case, Parsed], tuple[Outcome, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases and how they are judged.

    ``judge`` gives the outcome of a case and what else is to be kept of the verdict. ``benchmark`` names the public
    benchmark that the cases are of, of which nothing may be trained on; its categories are not summed up. ``not_run``
    says of categories that were asked for why they are left out. ``multi_turn`` are cases that one answer does not
    settle; they judge themselves.
    """

    name: str
    cases: tuple[Case, ...]
    benchmark: str | None = None
    not_run: dict[str, str] = field(default_factory=dict)
    judge: Judge = field(default=lambda case, parsed: (judge(case.expected, parsed, case.prompt.tools), {}))
    multi_turn: tuple[MultiTurnCase, ...] = ()

    @property
    def all_cases(self) -> list[Case | MultiTurnCase]:
        """Those of one turn and of several, in order."""
        return [*self.cases, *self.multi_turn]

    def digest(self) -> str:
        """Hex digest, 16 characters, of the cases: ids, what is asked and what is expected."""
        digest = hashlib.blake2b(digest_size=8)
        for case in self.cases:
            expected = [[call.name, call.arguments] for call in case.expected]
            row: list[Any] = [case.id, case.category, case.prompt.digest(), expected]
            digest.update(json.dumps(row, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
        for talk in self.multi_turn:
            turns = [Conversation(turn.messages, turn.tools).digest() for turn in talk.turns]
            question = [talk.question.answers, talk.question.initial_config, talk.question.classes]
            row = [talk.id, talk.category, turns, question, talk.max_steps]
            digest.update(json.dumps(row, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    def select(self, categories: Sequence[str] = (), limit: int | None = None) -> Suite:
        """The suite with these categories alone, and of each the first ``limit`` cases.

        Raises:
            ConfigError: a category that no case has.
        """
        known = {case.category for case in self.all_cases} | self.not_run.keys()
        if unknown := [name for name in categories if name not in known]:
            raise ConfigError(
                f"--categories {unknown[0]}: {self.name} has none of it; it has {', '.join(sorted(known))}."
            )
        seen: Counter[str] = Counter()

        def is_kept(case: Case | MultiTurnCase) -> bool:
            seen[case.category] += 1
            return (not categories or case.category in categories) and (limit is None or seen[case.category] <= limit)

        cases, multi_turn = tuple(filter(is_kept, self.cases)), tuple(filter(is_kept, self.multi_turn))
        return replace(self, cases=cases, multi_turn=multi_turn)


@dataclass(frozen=True, slots=True)
class _Synthetic:
    num_cases: int
    seed: int = 42


@dataclass(frozen=True, slots=True)
class _Bfcl:
    categories: list[str]
    data: str | None = None


@dataclass(frozen=True, slots=True)
class _SuiteFile:
    """A suite in YAML: one of ``cases`` (with ``tools`` that all of them offer), ``synthetic`` and ``bfcl``."""

    description: str
    benchmark: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)
    synthetic: _Synthetic | None = None
    bfcl: _Bfcl | None = None


def load_suite(
    path: str | Path,
    *,
    seed: int | None = None,
    num_cases: int | None = None,
    categories: Sequence[str] = (),
    bfcl_data: str | None = None,
    has_plain_names: bool = False,
    has_multi_turn: bool = False,
) -> Suite:
    """The suite of a YAML file, or of a JSONL file of cases as ``fctune.calls.cases`` reads them.

    Args:
        path: ``.yaml`` or JSONL.
        seed: of a synthetic suite, in place of the file's.
        num_cases: of a synthetic suite, in place of the file's.
        categories: which to ask; empty: all that the file names.
        bfcl_data: the benchmark's data directory; None: that of the installed wheel.
        has_plain_names: whether names of tools may hold no dots, as servers' own protocols ask.
        has_multi_turn: whether the benchmark's multi-turn categories are opened or left out.

    Raises:
        ConfigError: no such file, not a suite, or categories that it has not.
        DataError: cases that are none: no expected calls, calls of tools that are not on offer, ids that repeat.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        return Suite(path.stem, tuple(read_cases(path))).select(categories)
    spec = _read_spec(path)
    if spec.bfcl is not None:
        names = list(categories) or spec.bfcl.categories
        opened = open_bfcl(bfcl_data or spec.bfcl.data, names, has_plain_names, has_multi_turn)
        benchmark = spec.benchmark or BFCL
        return Suite(path.stem, opened.cases, benchmark, opened.not_run, opened.judge, opened.multi_turn)
    if spec.synthetic is not None:
        made = iter_cases(num_cases or spec.synthetic.num_cases, spec.synthetic.seed if seed is None else seed)
        rows = [case.to_json() for case in made]
    else:
        tools = [{"type": "function", "function": tool} for tool in spec.tools]
        rows = [{**({"tools": tools} if tools else {}), **row} for row in spec.cases]
    named = ((f"{path}: case {row.get('id', number)}", number, row) for number, row in enumerate(rows, start=1))
    return Suite(path.stem, tuple(make_cases(path, named)), spec.benchmark).select(categories)


def benchmark_of(suite: Suite) -> str | None:
    """The benchmark that a suite is, by its name or by the ids of its cases; None if it is none."""
    if suite.benchmark is not None:
        return suite.benchmark
    prefixes = tuple(f"{category}_" for category in CATEGORIES)
    return BFCL if any(case.id.startswith(prefixes) for case in suite.all_cases) else None


def _read_spec(path: Path) -> _SuiteFile:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())}).") from None
    problems: list[str] = []
    spec = parse_dataclass(_SuiteFile, raw, "", problems)
    if spec is not None and sum(map(bool, (spec.cases, spec.synthetic, spec.bfcl))) != 1:
        problems.append("expected one of cases, synthetic and bfcl")
    if problems or spec is None:
        noun = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{path}: {noun}\n" + "\n".join(f"  {problem}" for problem in problems))
    found: _SuiteFile = spec
    return found
