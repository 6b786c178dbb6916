"""Judge answers to the leaderboard's cases: the benchmark's verdict, with this project's kinds of error and counts.

A malformed call is never correct. The leaderboard, which sees no call in what it cannot decode, takes it for an
abstention; ``Judgement.benchmark`` keeps that verdict.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from fctune.calls.bfcl.answer_key import AnswerKey
from fctune.calls.bfcl.cases import BfclCase
from fctune.calls.bfcl.checker import CallChecker
from fctune.calls.bfcl.multi_turn import SimulatedTools, check_multi_turn, load_simulators
from fctune.calls.formats.base import Parsed
from fctune.calls.judge import BenchmarkVerdict, ErrorKind, Judgement, Outcome, describe_malformed, judge, judge_failure
from fctune.data.conversation import Call, Tool

_TURN = re.compile(r"turn (\d+): ")


class SingleTurnJudge:
    """Judges answers to one single-turn case; prepared once for many answers."""

    def __init__(self, case: BfclCase) -> None:
        self._checker = CallChecker(case.category, case.functions, case.answers)
        self._key = AnswerKey(case)

    def judge(self, parsed: Parsed) -> Judgement:
        """Judge the calls of one answer; ``Judgement.differences`` stays empty, as listing them takes most time."""
        if parsed.malformed:
            checked = self._checker.check(())
            reason = describe_malformed(parsed.malformed[0])
        else:
            checked = self._checker.check(parsed.calls)
            reason = checked.reason
        outcome = self._key.judge(parsed, checked.is_exact)
        benchmark = BenchmarkVerdict(checked.valid, checked.reason, outcome.verdict)
        if checked.valid and not parsed.malformed:
            if outcome.verdict != "correct":
                outcome = outcome._replace(verdict="correct")
        elif outcome.verdict == "correct":
            outcome = outcome._replace(verdict="wrong_arguments")
        return Judgement(outcome, reason, (), benchmark)

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a case without an answer."""
        return judge_failure(self._key.num_expected, reason)


class MultiTurnJudge:
    """Judges conversations about one multi-turn case.

    Args:
        case: A case of a multi-turn category.
        tools: Tools on offer in each turn.
    """

    def __init__(self, case: BfclCase, tools: Sequence[Sequence[Tool]]) -> None:
        self._case = case
        self._tools = tools

    @functools.cached_property
    def expected(self) -> tuple[tuple[Call, ...], ...]:
        """The calls that are due in each turn."""
        simulated = SimulatedTools(self._case, load_simulators(), "expected")
        return tuple(tuple(map(simulated.read_answer, answer)) for answer in self._case.answers)

    def judge(
        self, turns: Sequence[Sequence[Parsed]], stopped: str | None = None, is_unanswered: bool = False
    ) -> Judgement:
        """Judge the model's answers, given as the steps of each turn.

        The kind of error is that of the turn at which the benchmark's checker stops. Counts of calls and arguments are
        sums over turns.

        Args:
            turns: The steps of each turn; fewer turns if the conversation was stopped.
            stopped: Why the conversation was stopped early; None if it was not.
            is_unanswered: The conversation was stopped because the model could not answer.
        """
        calls = [[() if step.malformed else step.calls for step in turn] for turn in turns]
        checked = check_multi_turn(self._case, calls, load_simulators())
        judged = [
            judge(
                due,
                Parsed(
                    tuple(call for step in steps for call in step.calls),
                    tuple(stretch for step in steps for stretch in step.malformed),
                ),
                tools,
            )
            for due, tools, steps in zip(
                self.expected, self._tools, [*turns, *([()] * len(self.expected))], strict=False
            )
        ]
        outcomes = [one.outcome for one in judged]
        is_typed = len(turns) == len(outcomes) and all(outcome.is_correct for outcome in outcomes)
        typed: ErrorKind = "correct"
        if not is_typed:
            typed = next((outcome.verdict for outcome in outcomes if not outcome.is_correct), "wrong_count")
        malformed = _first_malformed(turns)
        verdict: ErrorKind = (
            "malformed"
            if malformed
            else "correct"
            if checked.valid
            else _find_error(checked.reason, len(turns), outcomes)
        )
        differences = [f"BFCL: {checked.reason}"] if checked.reason else []
        if verdict != "correct":
            differences += [f"turn {n}: {line}" for n, one in enumerate(judged, start=1) for line in one.differences]
        if stopped is not None:
            differences.insert(0, stopped)
            if is_unanswered and verdict != "malformed":
                verdict = "no_answer"
            elif verdict == "correct":
                # The wheel judges a conversation that it stops in the last turn like any other; here one that would
                # never end is wrong.
                verdict = "wrong_count"
        return Judgement(
            _add_outcomes(verdict, outcomes),
            "" if verdict == "correct" else stopped or malformed or checked.reason,
            tuple(differences),
            BenchmarkVerdict(checked.valid, checked.reason, typed),
        )

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a conversation that came to no end."""
        return judge_failure(sum(map(len, self.expected)), reason)


def _find_error(reason: str, num_turns: int, outcomes: Sequence[Outcome]) -> ErrorKind:
    """Return the kind of error at the turn that the benchmark's reason names, or before it."""
    found = _TURN.match(reason)
    last = int(found[1]) if found else min(max(1, num_turns), len(outcomes))
    if not outcomes[last - 1].is_correct:
        return outcomes[last - 1].verdict
    # This turn's own calls are right: an earlier turn left another state.
    return next((one.verdict for one in outcomes[:last] if not one.is_correct), "wrong_count")


def _first_malformed(turns: Sequence[Sequence[Parsed]]) -> str:
    for number, steps in enumerate(turns, start=1):
        for step in steps:
            if step.malformed:
                return f"turn {number}: {describe_malformed(step.malformed[0])}"
    return ""


def _add_outcomes(verdict: ErrorKind, outcomes: Sequence[Outcome]) -> Outcome:
    counts = zip(*(outcome[1:] for outcome in outcomes), strict=True)
    return Outcome(verdict, *(sum(int(count or 0) for count in column) for column in counts))
