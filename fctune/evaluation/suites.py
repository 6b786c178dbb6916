"""Suites: named sets of evaluation cases, and how they are loaded."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fctune.calls.bfcl.cases import CATEGORIES, MULTI_TURN, category_of
from fctune.calls.bfcl.prompt_answers import BfclAnswer
from fctune.calls.formats.base import CallFormat
from fctune.config.loading import format_problems, read_yaml_mapping
from fctune.config.parsing import parse_dataclass
from fctune.data.conversation import Conversation
from fctune.data.synthetic import iter_cases
from fctune.errors import ConfigError, DataError
from fctune.evaluation.bfcl import (
    BFCL,
    Mode,
    find_installed_data,
    find_release,
    load_category,
    resolve_categories,
)
from fctune.evaluation.cases import Case, make_cases, read_cases
from fctune.evaluation.multi_turn import MultiTurnCase

AnyCase = Case | MultiTurnCase


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
    """

    name: str
    cases: tuple[Case, ...]
    benchmark: str | None = None
    not_run: dict[str, str] = field(default_factory=dict)
    multi_turn: tuple[MultiTurnCase, ...] = ()
    release: str | None = None
    call_format: CallFormat | None = None

    def __post_init__(self) -> None:
        self._by_id: dict[str, AnyCase] = {case.id: case for case in self.all_cases}

    @property
    def all_cases(self) -> list[AnyCase]:
        """Single-turn and multi-turn cases, in order."""
        return [*self.cases, *self.multi_turn]

    def find(self, case_id: str) -> AnyCase | None:
        """Return the case with this id, or None."""
        return self._by_id.get(case_id)

    def digest(self) -> str:
        """Return a hex digest, 16 characters, of the cases: ids, prompts and expected calls."""
        digest = hashlib.blake2b(digest_size=8)
        for case in self.cases:
            expected = [[call.name, call.arguments] for call in case.expected]
            row: list[Any] = [case.id, case.category, case.prompt.digest(), expected]
            digest.update(json.dumps(row, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
        for dialogue in self.multi_turn:
            turns = [Conversation(turn.messages, turn.tools).digest() for turn in dialogue.turns]
            question = [dialogue.question.answers, dialogue.question.initial_config, dialogue.question.classes]
            row = [dialogue.id, dialogue.category, turns, question, dialogue.max_steps]
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


class BfclSuite(Suite):
    """The leaderboard's categories that are named, or that case ids passed to ``find`` belong to.

    Args:
        data_dir: The wheel's data directory.
        categories: Categories or groups of them to load at once.
        has_plain_names: Write ``a_b`` for a function ``a.b``, for models that cannot write dots.
        mode: How the model is given the functions.

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
    ) -> None:
        if not Path(data_dir).is_dir():
            raise DataError(
                f"{data_dir}: no such directory. Pass the data directory of the bfcl-eval wheel: "
                "site-packages/bfcl_eval/data."
            )
        runnable, not_run = resolve_categories(categories, mode)
        asked_in = BfclAnswer() if mode == "prompt" else None
        super().__init__("bfcl", (), BFCL, not_run, release=find_release(data_dir), call_format=asked_in)
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
    bfcl_mode: Mode = "tools",
    has_plain_names: bool = False,
    has_multi_turn: bool = False,
) -> Suite:
    """Load a suite from a YAML file, or from a JSONL file of cases; see ``fctune.evaluation.cases``.

    Args:
        path: The ``.yaml`` or JSONL file.
        seed: Seed of a synthetic suite; default: the file's.
        num_cases: Size of a synthetic suite; default: the file's.
        categories: Categories to run; empty: all that the file names.
        bfcl_data: The benchmark's data directory; None: that of the installed wheel.
        bfcl_mode: How the benchmark gives the model its functions.
        has_plain_names: Write underscores for dots in the tools' names, as servers' own protocols require.
        has_multi_turn: Include the benchmark's multi-turn categories.

    Raises:
        ConfigError: The file is missing or not a suite, or it does not have one of the categories.
        DataError: There are invalid cases: no expected calls, calls of tools that are not on offer, repeated ids.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        return Suite(path.stem, tuple(read_cases(path)), read_mark(path)).select(categories)
    spec = _read_spec(path)
    if spec.bfcl is not None:
        return _load_bfcl(path.stem, spec, categories, bfcl_data, bfcl_mode, has_plain_names, has_multi_turn)
    if spec.synthetic is not None:
        made = iter_cases(num_cases or spec.synthetic.num_cases, spec.synthetic.seed if seed is None else seed)
        rows = [case.to_json() for case in made]
    else:
        tools = [{"type": "function", "function": tool} for tool in spec.tools]
        rows = [{**({"tools": tools} if tools else {}), **row} for row in spec.cases]
    named = ((f"{path}: case {row.get('id', number)}", number, row) for number, row in enumerate(rows, start=1))
    return Suite(path.stem, tuple(make_cases(path, named)), spec.benchmark).select(categories)


def benchmark_of(suite: Suite) -> str | None:
    """Return the benchmark that a suite belongs to, by its declaration or by the ids of its cases, or None."""
    return suite.benchmark or find_benchmark([{"id": case.id} for case in suite.all_cases])


def find_benchmark(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the benchmark that rows belong to, by the marks in their metadata or by their ids, or None."""
    prefixes = tuple(f"{category}_" for category in CATEGORIES)
    for row in rows:
        metadata = row.get("metadata")
        if isinstance(metadata, dict) and isinstance(metadata.get("benchmark"), str):
            return str(metadata["benchmark"])
        if str(row.get("id", "")).startswith(prefixes):
            return BFCL
    return None


def read_mark(path: Path) -> str | None:
    """Return the benchmark that the rows of a JSONL file are marked with, or None."""
    with open(path, "rb") as lines:
        marked = (json.loads(line) for line in lines if b'"benchmark"' in line)
        return find_benchmark({"metadata": row.get("metadata")} for row in marked if isinstance(row, dict))


def _load_bfcl(
    name: str,
    spec: _SuiteFile,
    categories: Sequence[str],
    data: str | None,
    mode: Mode,
    has_plain_names: bool,
    has_multi_turn: bool,
) -> Suite:
    assert spec.bfcl is not None
    runnable, not_run = resolve_categories(list(categories) or spec.bfcl.categories, mode)
    data = data or spec.bfcl.data
    run = [category for category in runnable if has_multi_turn or category not in MULTI_TURN]
    left_out = {name: "needs several turns, which this command does not run" for name in runnable if name not in run}
    suite = BfclSuite(data if data is not None else find_installed_data(), run, has_plain_names, mode)
    return Suite(
        name if mode == "tools" else f"{name}_{mode}",
        suite.cases,
        spec.benchmark or BFCL,
        {**left_out, **suite.not_run, **not_run},
        suite.multi_turn,
        suite.release,
        suite.call_format,
    )


def _read_spec(path: Path) -> _SuiteFile:
    raw = read_yaml_mapping(path)
    problems: list[str] = []
    spec = parse_dataclass(_SuiteFile, raw, "", problems)
    if spec is not None and sum(map(bool, (spec.cases, spec.synthetic, spec.bfcl))) != 1:
        problems.append("expected one of cases, synthetic and bfcl")
    if problems or spec is None:
        raise ConfigError(format_problems(str(path), problems))
    found: _SuiteFile = spec
    return found
