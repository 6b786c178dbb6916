"""Judge the calls of one answer: strict typed match, the kind of error, and the counts that rates are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from fctune.calls.formats.base import Malformed, Parsed
from fctune.calls.matching import align, count_equal_arguments, describe_differences, is_exact_match
from fctune.data.conversation import Call, Tool
from fctune.data.tool_schema import ToolSet

ErrorKind = Literal[
    "correct",
    "wrong_name",
    "wrong_arguments",
    "wrong_count",
    "missed_call",
    "false_call",
    "wrong_answer",
    "malformed",
    "no_answer",
    "not_judged",
]
ERROR_KINDS: tuple[str, ...] = get_args(ErrorKind)


class Outcome(NamedTuple):
    """Verdict on one case and the counts behind its rates; equal outcomes can be counted together.

    ``num_malformed`` counts stretches that were meant as calls but cannot be read. Arguments are counted over calls
    paired with an expected call of the same name. ``num_schema_valid`` is None where the tools are unknown.
    """

    verdict: ErrorKind
    num_expected: int
    num_called: int
    num_malformed: int = 0
    num_names_matched: int = 0
    num_arguments_expected: int = 0
    num_arguments_called: int = 0
    num_arguments_matched: int = 0
    num_schema_valid: int | None = None

    @property
    def is_correct(self) -> bool:
        """True if the calls are the expected ones."""
        return self.verdict == "correct"


class BenchmarkVerdict(NamedTuple):
    """A benchmark's own verdict, reported next to ours; ``reason`` is why the answer is not valid.

    The benchmark compares more loosely than the strict typed match, and does not count a malformed call as a call.
    ``details`` are further JSON values that the benchmark's figures are made of; None if it judges calls only.
    """

    valid: bool
    reason: str
    details: Mapping[str, Any] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the verdict as a result row holds it."""
        return {"valid": self.valid, "reason": self.reason, **(self.details or {})}


class Judgement(NamedTuple):
    """Result of judging one answer.

    ``outcome`` is always that of the strict typed match; ``benchmark`` is set for benchmark cases only. ``reason`` is
    the first problem, empty if the answer is valid. ``differences`` lists every problem, one line each; a correct
    answer may still differ from its tool's schema.
    """

    outcome: Outcome
    reason: str = ""
    differences: tuple[str, ...] = ()
    benchmark: BenchmarkVerdict | None = None

    @property
    def is_valid(self) -> bool:
        """True if the case counts as solved: by its benchmark's verdict, or by ours if it belongs to none."""
        return self.outcome.is_correct if self.benchmark is None else self.benchmark.valid


def judge(expected: Sequence[Call], parsed: Parsed, tools: Sequence[Tool] | ToolSet = ()) -> Judgement:
    """Compare calls with the expected ones as typed values, in any order.

    A malformed stretch makes the answer wrong whatever else it holds: it is neither a call nor an abstention.

    Args:
        expected: Calls that are due; empty if the model should abstain.
        parsed: The answer as read.
        tools: Tools on offer; with them the calls are also validated against the schemas.
    """
    calls = parsed.calls
    if not isinstance(tools, ToolSet):
        tools = ToolSet(tools)
    num_schema_valid = sum(map(tools.accepts, calls)) if tools else None
    is_correct = not parsed.malformed and is_exact_match(expected, calls)
    if is_correct and num_schema_valid in (None, len(calls)):
        num_arguments = sum(len(call.arguments) for call in calls)
        counts = (len(calls), len(calls), 0, len(calls), num_arguments, num_arguments, num_arguments)
        return Judgement(Outcome("correct", *counts, num_schema_valid))
    pairs = [(expected[row], calls[column]) for row, column in align(expected, calls)]
    differences = [describe_malformed(stretch) for stretch in parsed.malformed]
    differences.extend(describe_differences(expected, calls))
    differences.extend(f"schema: {line}" for call in calls if tools for line in tools.find_errors(call))
    outcome = Outcome(
        verdict="correct" if is_correct else classify([call.name for call in expected], parsed),
        num_expected=len(expected),
        num_called=len(calls),
        num_malformed=len(parsed.malformed),
        num_names_matched=len(pairs),
        num_arguments_expected=sum(len(due.arguments) for due, _ in pairs),
        num_arguments_called=sum(len(given.arguments) for _, given in pairs),
        num_arguments_matched=sum(count_equal_arguments(due, given) for due, given in pairs),
        num_schema_valid=num_schema_valid,
    )
    return Judgement(outcome, "" if is_correct else differences[0], tuple(differences))


def judge_failure(num_expected: int, reason: str) -> Judgement:
    """Judge a case without an answer: wrong even if no call was due, and part of every denominator."""
    return Judgement(Outcome("no_answer", num_expected, num_called=0), reason, (f"no answer: {reason}",))


def judge_error(failure: Judgement, error: Exception) -> Judgement:
    """Return the judgement of an answer that could not be judged: wrong, named as such, and in every denominator.

    Args:
        failure: The case's judgement of a missing answer.
        error: What judging raised.
    """
    reason = f"could not be judged: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    benchmark = None if failure.benchmark is None else failure.benchmark._replace(valid=False, reason=reason)
    return Judgement(failure.outcome._replace(verdict="not_judged"), reason, (reason,), benchmark)


def classify(names: Sequence[str], parsed: Parsed) -> ErrorKind:
    """Return the kind of error of calls that do not match the expected ones, given the expected names."""
    if parsed.malformed:
        return "malformed"
    if not names:
        return "false_call"
    if not parsed.calls:
        return "missed_call"
    if len(names) != len(parsed.calls):
        return "wrong_count"
    return "wrong_arguments" if sorted(names) == sorted(call.name for call in parsed.calls) else "wrong_name"


def describe_malformed(stretch: Malformed) -> str:
    """Format a malformed stretch; calls that arrived as data have no position in a text."""
    position = f" at {stretch.start}-{stretch.end}" if stretch.end else ""
    return f"malformed{position}: {stretch.reason}"
