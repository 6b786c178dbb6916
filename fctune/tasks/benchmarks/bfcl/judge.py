"""Judge single-turn answers: the benchmark's own verdict, and the strict typed match with its counts.

The two differ on malformed calls. To the typed match they are always wrong. The leaderboard decodes arguments with
duplicate keys, of which the last counts, and takes an answer that it cannot decode for an abstention.
"""

from __future__ import annotations

from fctune.calls.formats.base import Parsed
from fctune.calls.judge import BenchmarkVerdict, Judgement, describe_malformed, judge_failure
from fctune.tasks.benchmarks.bfcl.answer_key import AnswerKey
from fctune.tasks.benchmarks.bfcl.cases import BfclCase
from fctune.tasks.benchmarks.bfcl.checker import CallChecker

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
