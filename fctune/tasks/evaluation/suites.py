"""Suites: named sets of evaluation cases, and how they are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.config.loading import format_problems, read_yaml_mapping
from fctune.config.parsing import parse_dataclass
from fctune.data.synthetic import iter_cases
from fctune.tasks.benchmarks import Benchmark, find_benchmarks
from fctune.tasks.evaluation.cases import Suite, make_cases, read_cases


@dataclass(frozen=True, slots=True)
class _Synthetic:
    num_cases: int
    seed: int = 42


@dataclass(frozen=True, slots=True)
class _SuiteFile:
    """A suite in YAML: ``cases`` (with ``tools`` that all of them offer), or ``synthetic``, or a benchmark's key."""

    description: str
    benchmark: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)
    synthetic: _Synthetic | None = None


def load_suite(
    path: str | Path,
    *,
    seed: int | None = None,
    num_cases: int | None = None,
    categories: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    has_plain_names: bool = False,
    has_multi_turn: bool = False,
) -> Suite:
    """Load a suite from a YAML file, or from a JSONL file of cases; see ``fctune.tasks.evaluation.cases``.

    Args:
        path: The ``.yaml`` or JSONL file.
        seed: Seed of a synthetic suite; default: the file's.
        num_cases: Size of a synthetic suite; default: the file's.
        categories: Categories to run; empty: all that the file names.
        options: Values of the benchmark's options by name, such as ``bfcl_data``; others are ignored.
        has_plain_names: Write underscores for dots in the tools' names, as servers' own protocols require.
        has_multi_turn: Include the benchmark's multi-turn categories.

    Raises:
        ConfigError: The file is missing or not a suite, or it does not have one of the categories.
        DataError: There are invalid cases: no expected calls, calls of tools that are not on offer, repeated ids.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        return Suite(path.stem, tuple(read_cases(path)), read_mark(path)).select(categories)
    spec, benchmark, settings = _read_spec(path)
    if benchmark is not None:
        suite = benchmark.load(settings, str(path), categories, options or {}, has_plain_names, has_multi_turn)
        suite.benchmark = spec.benchmark or benchmark.title
        return suite
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
    known = find_benchmarks().values()
    for row in rows:
        metadata = row.get("metadata")
        if isinstance(metadata, dict) and isinstance(metadata.get("benchmark"), str):
            return str(metadata["benchmark"])
        if (case_id := row.get("id")) is not None:
            for benchmark in known:
                if benchmark.owns(str(case_id)):
                    return benchmark.title
    return None


def read_mark(path: Path) -> str | None:
    """Return the benchmark that the rows of a JSONL file are marked with, or None."""
    with open(path, "rb") as lines:
        marked = (json.loads(line) for line in lines if b'"benchmark"' in line)
        return find_benchmark({"metadata": row.get("metadata")} for row in marked if isinstance(row, dict))


def _read_spec(path: Path) -> tuple[_SuiteFile, Benchmark | None, Any]:
    """Return a suite's file, and the benchmark that it names with that key's value."""
    raw = read_yaml_mapping(path)
    named = {name: raw.pop(name) for name in find_benchmarks() if name in raw}
    problems: list[str] = []
    spec: _SuiteFile | None = parse_dataclass(_SuiteFile, raw, "", problems)
    if spec is not None and len(named) + bool(spec.cases) + bool(spec.synthetic) != 1:
        problems.append(f"expected one of cases, synthetic and {', '.join(find_benchmarks())}")
    if problems or spec is None:
        raise ConfigError(format_problems(str(path), problems))
    name = next(iter(named), None)
    return (spec, None, None) if name is None else (spec, find_benchmarks()[name], named[name])
