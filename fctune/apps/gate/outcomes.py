"""From the answers of both models to the lines of the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from fctune.apps.gate.lines import Line
from fctune.apps.gate.plan import Plan
from fctune.apps.gate.served import STREAMED
from fctune.config.intervals import format_count
from fctune.tasks.evaluation.paired import PairedOutcome
from fctune.tasks.judge import Row, is_valid

CALLS = "held-out calls: exactly the expected ones"
OVER_CALLING = "over-calling: no call where none is due"
OVER_REFUSING = "over-refusing: a call where one is due"
REASONING = "reasoning kept"
DEFECT_LINES = {
    "abandoned": "abandoned: no answer that ends after its reasoning or inside a call",
    "malformed": "malformed: no call that cannot be read",
    "invented_tool": "invented tools: no call of a tool that is not on offer",
    "invented_argument": "invented arguments: none that the tool does not declare",
}


def make_lines(
    plan: Plan, before: Mapping[str, Mapping[str, Row]], after: Mapping[str, Mapping[str, Row]]
) -> tuple[list[Line], dict[str, str], list[str]]:
    """Return the lines that have items, why others have none, and warnings of missing answers.

    Args:
        plan: What was asked.
        before: The base's rows by suite and case.
        after: The result's.
    """
    lines: list[Line] = []
    not_run, warnings = dict(plan.not_run), []
    for suite in plan.suites:
        lost = {
            i for i in before[suite.name] if _has_failed(before[suite.name][i]) or _has_failed(after[suite.name][i])
        }
        if lost:
            count = format_count(len(lost), "case has", "cases have")
            warnings.append(
                f"{suite.name}: {count} no answer of a model, such as {min(lost)}: wrong if the other answered, left "
                "out if neither did; the same command asks again"
            )

    def pair(suite: str, ids: Iterable[str], is_right: Callable[[Row], bool]) -> list[PairedOutcome]:
        first, second = before[suite], after[suite]
        return [
            PairedOutcome(i, is_right(first[i]), is_right(second[i]))
            for i in ids
            if not (_has_failed(first[i]) and _has_failed(second[i]))
        ]

    def add(name: str, title: str, outcomes: list[PairedOutcome], reason: str, note: str = "") -> None:
        if outcomes:
            lines.append(Line(name, title, outcomes, note))
        else:
            not_run[name] = reason

    if (cases := plan.held_out) is not None:
        name = cases.suite.name
        everything = [case.id for case in cases.suite.cases]
        note = f"{format_count(cases.num_left_out, 'held-out case')} not asked" if cases.num_left_out else ""
        add("calls", CALLS, pair(name, cases.calls, is_valid), "no held-out case needs a call", note)
        alone = "no held-out case without a call, and none can be made of those with one"
        add("over_calling", OVER_CALLING, pair(name, cases.no_calls, is_valid), alone, cases.note)
        add("over_refusing", OVER_REFUSING, pair(name, cases.partners, _calls_something), alone, cases.note)
        if STREAMED in before:
            add("calls_streamed", f"{CALLS}, streamed", pair(STREAMED, cases.calls, is_valid), alone)
        for defect, title in DEFECT_LINES.items():
            add(defect, title, pair(name, everything, partial(_lacks, defect)), alone)
        outcomes = pair(name, everything, _reasons)
        if any(outcome.before for outcome in outcomes):
            add("reasoning", REASONING, outcomes, "")
        else:
            not_run["reasoning"] = "the base does not reason on the held-out cases"
    for sample, suite in plan.samples:
        ids = [case.id for case in suite.all_cases]
        lines.append(
            Line(sample.name, sample.title, pair(suite.name, ids, is_valid), suite.release or "", sample.cause)
        )
    return lines, not_run, warnings


def _has_failed(row: Row) -> bool:
    return row.get("error") is not None


def _calls_something(row: Row) -> bool:
    return bool(row["calls"]) and not _has_failed(row)


def _lacks(defect: str, row: Row) -> bool:
    return defect not in row.get("defects", ()) and not _has_failed(row)


def _reasons(row: Row) -> bool:
    return bool((row.get("reasoning") or {}).get("text"))
