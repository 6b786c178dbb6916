"""The leaderboard as a suite that predictions are judged against: its own verdict, and the strict match beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fctune.calls.bfcl.answer_key import AnswerKey
from fctune.calls.bfcl.cases import CATEGORIES, MULTI_TURN, BfclCase, category_of, read_bfcl
from fctune.calls.bfcl.checker import BfclJudge, BfclVerdict, language_of
from fctune.calls.bfcl.multi_turn import Simulators, judge_multi_turn, load_simulators
from fctune.calls.formats.base import Malformed, Parsed
from fctune.calls.judge import Suite, Verdict
from fctune.calls.metrics import judge_failure
from fctune.calls.predictions import Prediction, Readings
from fctune.data.conversation import Tool
from fctune.errors import ConfigError, DataError

# Where any call will do, nothing is known of which.
_RATES_OF_ANY_CALL = ("accuracy", "well_formed", "missed_call", "schema_valid")


class BfclSuite(Suite):
    """The cases of those categories that predictions are of, or that are named.

    A malformed call is never valid: not where none is due either, although the leaderboard, which sees no call in what
    it cannot decode, takes it for abstaining. Multi-turn cases without the wheel to play them on are not run.

    Args:
        data_dir: The wheel's data directory.
        categories: Categories to score though there be no prediction of them.
        dots_as_underscores: Expect ``a_b`` where a function is called ``a.b``, for models that cannot write dots.
    """

    def __init__(self, data_dir: str | Path, categories: Sequence[str] = (), dots_as_underscores: bool = False) -> None:
        self._data_dir = Path(data_dir)
        self._dots_as_underscores = dots_as_underscores
        self._cases: dict[str, dict[str, BfclCase]] = {}
        self._scored = dict.fromkeys(categories)
        self._single_turn: dict[str, _SingleTurn] = {}
        if not self._data_dir.is_dir():
            raise DataError(
                f"{data_dir}: no such directory. Pass the data directory of the bfcl-eval wheel: "
                "site-packages/bfcl_eval/data."
            )
        for category in categories:
            self._load(category)

    def judge(self, prediction: Prediction) -> Verdict:
        """As ``Suite`` says."""
        judge = self._single_turn.get(prediction.id)
        if judge is not None:
            return judge(prediction)
        category = category_of(prediction.id)
        case = self._load(category).get(prediction.id) if category in CATEGORIES else None
        if case is None:
            return Verdict(None, False, "no such case")
        self._scored[category] = None
        if category in MULTI_TURN:
            return _judge_multi_turn(case, prediction)
        judge = self._single_turn[case.id] = _SingleTurn(case)
        return judge(prediction)

    def ids(self) -> Iterable[str]:
        """As ``Suite`` says."""
        return [case_id for category in self._scored for case_id in self._load(category)]

    def select_rates(self, category: str, rates: dict[str, Any]) -> dict[str, Any]:
        """As ``Suite`` says."""
        return {name: rates[name] for name in _RATES_OF_ANY_CALL} if category == "live_relevance" else rates

    def _load(self, category: str) -> dict[str, BfclCase]:
        if category not in self._cases:
            cases = read_bfcl(self._data_dir, category)
            if self._dots_as_underscores:
                cases = [case.without_dots() for case in cases]
            self._cases[category] = {case.id: case for case in cases}
        return self._cases[category]


def to_source_tool(tool: Tool) -> Tool:
    """The tool as a model of Java or JavaScript is told of it: every argument is source text."""
    properties = {
        key: {"type": "string", "description": schema.get("description", "")}
        for key, schema in tool.parameters.get("properties", {}).items()
    }
    return Tool({**tool.function, "parameters": {**tool.parameters, "type": "object", "properties": properties}})


class _SingleTurn:
    """A single-turn case, made ready to judge many predictions."""

    def __init__(self, case: BfclCase) -> None:
        self._category = case.category
        self._official = BfclJudge(case.category, case.functions, case.answers)
        self._key = AnswerKey(case)
        # Of Java and JavaScript the leaderboard wants source text, whatever the type.
        self._tools = case.tools if language_of(case.category) == "python" else tuple(map(to_source_tool, case.tools))

    def __call__(self, prediction: Prediction) -> Verdict:
        readings = prediction.read(self._tools)
        category = self._category
        if readings is None:
            failure = prediction.failure or "a case of one turn needs calls or text"
            return Verdict(category, False, failure, judge_failure(self._key.num_expected, failure))
        strict, lenient = readings
        verdict = self._judge(strict)
        outcome = self._key.judge(strict, verdict.is_exact)
        if prediction.text is None:
            return Verdict(category, verdict.valid, verdict.reason, outcome)
        other = verdict if lenient is strict else self._judge(lenient)
        return Verdict(category, verdict.valid, verdict.reason, outcome, strict, (other.valid, other.reason))

    def _judge(self, parsed: Parsed) -> BfclVerdict:
        if parsed.malformed:
            return BfclVerdict(False, _describe(parsed.malformed[0]))
        return self._official.judge(parsed.calls)


def _judge_multi_turn(case: BfclCase, prediction: Prediction) -> Verdict:
    try:
        simulators = load_simulators()
    except ConfigError as error:
        return Verdict(case.category, None, str(error).split("\n")[0])
    turns = prediction.read_turns(case.tools)
    if turns is None:
        return Verdict(case.category, False, prediction.failure or "a multi-turn case needs turns")
    strict = _judge_turns(case, turns, 0, simulators)
    if prediction.call_format is None:
        return Verdict(case.category, *strict)
    return Verdict(case.category, *strict, lenient=_judge_turns(case, turns, 1, simulators))


def _judge_turns(case: BfclCase, turns: list[list[Readings]], reading: int, simulators: Simulators) -> tuple[bool, str]:
    for number, turn in enumerate(turns, start=1):
        for step in turn:
            if step[reading].malformed:
                return False, f"turn {number}: {_describe(step[reading].malformed[0])}"
    calls = [[step[reading].calls for step in turn] for turn in turns]
    verdict = judge_multi_turn(case, calls, simulators)
    return verdict.valid, verdict.reason


def _describe(stretch: Malformed) -> str:
    place = f" at {stretch.start}-{stretch.end}" if stretch.end else ""
    return f"malformed{place}: {stretch.reason}"
