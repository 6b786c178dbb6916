"""What the gate asks: held-out cases and the benchmarks' samples, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fctune.apps.gate.cases import HeldOutCases, choose_cases, pair_held_out
from fctune.base.errors import ConfigError, DataError
from fctune.config.sections.gate import GateConfig
from fctune.tasks.benchmarks import Benchmark, GateSample, find_benchmarks, find_suite_files
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from fctune.tasks.task import AnswerCase, AnyCase, Case


@dataclass
class Plan:
    """The cases that a gate asks of base and result, and what it leaves out with the reasons.

    Attributes:
        held_out: The held-out cases; None: there are none.
        samples: The benchmarks' samples with their cases.
        not_run: Why other lines are not run, by name.
    """

    held_out: HeldOutCases | None = None
    samples: list[tuple[GateSample, Suite]] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def suites(self) -> list[Suite]:
        """The suites that both models are asked."""
        return [*([self.held_out.suite] if self.held_out else []), *(suite for _, suite in self.samples)]

    def count_answers(self, config: GateConfig) -> int:
        """Return the most answers that one model may give; see ``served`` for those asked again."""
        return self._count_again(config) + sum(
            _count_answers(case) for suite in self.suites for case in suite.all_cases
        )

    def count_tokens(self, config: GateConfig) -> int:
        """Return the most tokens that one model may generate; a multiple-choice case has none."""
        generated = 0
        for suite in self.suites:
            limit = max(config.max_new_tokens, suite.max_new_tokens or 0)
            answers = sum(_count_answers(case) for case in suite.all_cases if not _is_choice(case))
            if self.held_out is not None and suite is self.held_out.suite:
                answers += self._count_again(config)
            generated += limit * answers
        return generated

    def _count_again(self, config: GateConfig) -> int:
        if self.held_out is None:
            return 0
        streamed = len(self.held_out.suite.cases) if config.streamed else 0
        return streamed + (len(self.held_out.calls) if config.guided else 0)


def _count_answers(case: AnyCase) -> int:
    """Return the most answers to a case: a turn may end with one more than the steps that call."""
    return 1 if isinstance(case, Case) else len(case.turns) * (case.max_steps + 1)


def _is_choice(case: AnyCase) -> bool:
    return isinstance(case, AnswerCase) and bool(case.choices)


def make_plan(
    path: Path | None, config: GateConfig, options: Mapping[str, Any], has_server: bool
) -> tuple[Plan, list[str]]:
    """Choose the cases of every line, fewer than wanted if the budget is too small for them.

    Args:
        path: File of the held-out cases; None: there are none.
        config: Settings of the gate.
        options: Options of the benchmarks, such as ``bfcl_data``.
        has_server: One of the models is on a server.

    Returns:
        The plan, and warnings about it.

    Raises:
        ConfigError: The budget is too small for one case on each line, or a benchmark is unknown.
        DataError: The cases cannot be read, or there is nothing to ask.
    """
    held_out = load_suite(path) if path is not None else None
    plan, warnings = plan_cases(held_out, config, options, has_server)
    if held_out is not None and (benchmark := held_out.benchmark) is not None:
        warnings.append(f"{path}: belongs to a benchmark ({benchmark}), so it says little about your own requests")
    return plan, warnings


def check_settings(config: GateConfig, held_out: Suite | None) -> None:
    """Check the settings of a gate between two models on this machine before the result is trained.

    Args:
        config: The settings.
        held_out: The held-out cases; None: they are unknown, so that the token budget is not checked.

    Raises:
        ConfigError: A benchmark is unknown, servers are needed, or the budget is too small.
    """
    _check_names(config)
    for name in ("streamed", "guided"):
        if getattr(config, name):
            raise ConfigError(
                f"gate.{name}: needs servers, and these models are on none. Leave it out, and run fctune gate with "
                "the URLs of both once they are served."
            )
    if config.max_tokens is not None and held_out is not None:
        plan_cases(held_out, config, {}, has_server=False)


def plan_cases(
    held_out: Suite | None, config: GateConfig, options: Mapping[str, Any], has_server: bool
) -> tuple[Plan, list[str]]:
    """Choose the cases of every line; see ``make_plan``."""
    loaded, not_run = _load_benchmarks(config, options, has_server)
    if held_out is None:
        not_run["held_out"] = "no held-out cases; pass --cases, or hold rows out with data.validation_share"
    if held_out is None and not loaded:
        raise DataError(
            "nothing to compare: there are no held-out cases, and no benchmark can be run "
            f"({'; '.join(f'{name}: {reason}' for name, reason in not_run.items())}). Pass --cases FILE."
        )

    def choose(size: int) -> Plan:
        plan = Plan(not_run=dict(not_run))
        if held_out is not None:
            plan.held_out = pair_held_out(held_out, size, config.seed)
        plan.samples = [(sample, _choose(sample, suite, size, config)) for sample, suite in loaded]
        return plan

    plan, warnings = choose(size := config.line_size), []
    if config.max_tokens is not None:
        wanted = plan.count_answers(config)
        while 2 * plan.count_tokens(config) > config.max_tokens:
            if size == 1:
                raise ConfigError(
                    f"max_tokens={config.max_tokens}: too few for one case on each line; the least is "
                    f"{2 * plan.count_tokens(config):,}."
                )
            size = max(1, size * 9 // 10)
            plan = choose(size)
        if (asked := plan.count_answers(config)) < wanted:
            warnings.append(f"the token budget allows {asked:,} of {wanted:,} answers: lines have fewer cases")
    return plan, warnings


def _choose(sample: GateSample, suite: Suite, size: int, config: GateConfig) -> Suite:
    cases: list[AnyCase] = suite.all_cases
    most = sample.thorough_cases if config.thorough and sample.thorough_cases else sample.max_cases
    chosen = choose_cases(cases, [case.id for case in cases], min(size, most), config.seed)
    single = [case for case in chosen if isinstance(case, Case)]
    made = suite.with_cases(single, [case for case in chosen if not isinstance(case, Case)])
    made.name = sample.name
    return made


def _check_names(config: GateConfig) -> None:
    known = find_benchmarks()
    if unknown := [name for name in config.benchmarks or () if name not in known]:
        raise ConfigError(f"gate.benchmarks: {unknown[0]}: no such benchmark; known: {', '.join(known)}.")


def _load_benchmarks(
    config: GateConfig, options: Mapping[str, Any], has_server: bool
) -> tuple[list[tuple[GateSample, Suite]], dict[str, str]]:
    """Return the samples that the benchmarks declare with their cases, and why others cannot be run."""
    known, files = find_benchmarks(), find_suite_files()
    _check_names(config)
    names = list(known) if config.benchmarks is None else config.benchmarks
    loaded: list[tuple[GateSample, Suite]] = []
    not_run: dict[str, str] = {}
    for benchmark in known.values():
        for sample in benchmark.gate_samples:
            if benchmark.name not in names:
                not_run[sample.name] = "not asked for (gate.benchmarks)"
                continue
            try:
                suite = _load_sample(benchmark, sample, files, options, has_server)
            except (ConfigError, DataError) as error:
                not_run[sample.name] = " ".join(str(error).split())
            else:
                loaded.append((sample, suite))
    return loaded, not_run


def _load_sample(
    benchmark: Benchmark, sample: GateSample, files: Mapping[str, Path], options: Mapping[str, Any], has_server: bool
) -> Suite:
    suite = load_suite(
        files[benchmark.name],
        categories=sample.categories,
        options=options,
        has_plain_names=has_server,
        has_multi_turn=True,
    )
    if not suite.all_cases:
        raise DataError("; ".join(suite.not_run.values()) or "no cases")
    return suite
