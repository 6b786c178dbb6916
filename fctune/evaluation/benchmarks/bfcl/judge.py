"""Judge answers to the leaderboard's cases: the benchmark's own verdict, and the strict typed match with its counts.

The two differ on malformed calls. To the typed match they are always wrong. The leaderboard decodes arguments with
duplicate keys, of which the last counts, and takes an answer that it cannot decode for an abstention.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from fctune.calls.formats.base import Parsed
from fctune.calls.judge import BenchmarkVerdict, ErrorKind, Judgement, Outcome, describe_malformed, judge, judge_failure
from fctune.data.conversation import Call, Tool
from fctune.evaluation.benchmarks.bfcl.answer_key import AnswerKey
from fctune.evaluation.benchmarks.bfcl.cases import BfclCase
from fctune.evaluation.benchmarks.bfcl.checker import CallChecker
from fctune.evaluation.benchmarks.bfcl.multi_turn import SimulatedTools, check_multi_turn, load_simulators

_VALID = BenchmarkVerdict(True, "")


class SingleTurnJudge:
    """Judges answers to one single-turn case; prepared once for many answers."""

    def __init__(self, case: BfclCase) -> None:
        self._checker = CallChecker(case.category, case.functions, case.answers)
        self._key = AnswerKey(case)

    def judge(self, parsed: Parsed, decoded: Parsed | None = None) -> Judgement:
        """Judge the calls of one answer; ``Judgement.differences`` stays empty, as listing them takes most time.

        Args:
            parsed: The answer as read.
            decoded: The answer as the leaderboard decodes it; see ``Reading.decoded``. None: as read.
        """
        decoded = decoded or parsed
        checked = self._checker.check(() if decoded.malformed else decoded.calls)
        outcome = self._key.judge(parsed, checked.is_exact)
        if checked.valid and not checked.reason:
            return Judgement(outcome, "", (), _VALID)
        reason = describe_malformed(decoded.malformed[0]) if decoded.malformed and not checked.valid else checked.reason
        return Judgement(outcome, reason, (), BenchmarkVerdict(checked.valid, checked.reason))

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a case without an answer."""
        failure = judge_failure(self._key.num_expected, reason)
        return failure._replace(benchmark=BenchmarkVerdict(False, reason))


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
        """Expected calls of each turn, read from the benchmark's answers."""
        simulated = SimulatedTools(self._case, load_simulators(), "expected")
        return tuple(tuple(map(simulated.read_answer, answer)) for answer in self._case.answers)

    def judge(
        self,
        turns: Sequence[Sequence[Parsed]],
        stopped: str | None = None,
        is_unanswered: bool = False,
        decoded: Sequence[Sequence[Parsed]] | None = None,
    ) -> Judgement:
        """Judge the model's answers, given as the steps of each turn.

        The kind of error is that of the first turn whose calls are not the expected ones. Counts of calls and arguments
        are sums over turns.

        Args:
            turns: The steps of each turn; fewer turns if the conversation was stopped.
            stopped: Why the conversation was stopped early; None if it was not.
            is_unanswered: The conversation was stopped because the model could not answer.
            decoded: The steps as the leaderboard decodes them; see ``Reading.decoded``. None: as read.
        """
        calls = [[() if step.malformed else step.calls for step in turn] for turn in decoded or turns]
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
        verdict: ErrorKind = next((one.verdict for one in outcomes if not one.is_correct), "correct")
        malformed = _first_malformed(turns)
        if malformed:
            verdict = "malformed"
        elif is_unanswered:
            verdict = "no_answer"
        elif verdict == "correct" and (stopped is not None or len(turns) != len(self.expected)):
            # The wheel judges a conversation that it stops in the last turn like any other; here one that would never
            # end is wrong.
            verdict = "wrong_count"
        differences = [stopped] if stopped is not None else []
        if checked.reason:
            differences.append(f"BFCL: {checked.reason}")
        if verdict != "correct":
            differences += [f"turn {n}: {line}" for n, one in enumerate(judged, start=1) for line in one.differences]
        return Judgement(
            _add_outcomes(verdict, outcomes),
            "" if checked.valid else stopped or malformed or checked.reason,
            tuple(differences),
            BenchmarkVerdict(checked.valid, checked.reason),
        )

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a conversation that came to no end."""
        failure = judge_failure(sum(map(len, self.expected)), reason)
        return failure._replace(benchmark=BenchmarkVerdict(False, reason))


def _first_malformed(turns: Sequence[Sequence[Parsed]]) -> str:
    for number, steps in enumerate(turns, start=1):
        for step in steps:
            if step.malformed:
                return f"turn {number}: {describe_malformed(step.malformed[0])}"
    return ""


def _add_outcomes(verdict: ErrorKind, outcomes: Sequence[Outcome]) -> Outcome:
    counts = zip(*(outcome[1:] for outcome in outcomes), strict=True)
    return Outcome(verdict, *(sum(int(count or 0) for count in column) for column in counts))
