"""From the answers of both models to the lines of the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fctune.apps.gate.cases import HeldOutCases
from fctune.apps.gate.lines import Line
from fctune.apps.gate.plan import Plan
from fctune.apps.gate.served import LINES, STREAMED
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
_MAX_CUT_SHARE = 0.05  # of a model's answers to a suite
_ABSENT = {
    "calls": "no held-out case needs a call",
    "over_calling": "no held-out case without a call, and none can be made of those with one",
    "over_refusing": "no held-out case that needs a call is the partner of one without",
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
    for name, first in before.items():
        lost = [i for i, row in first.items() if _has_failed(row) or _has_failed(after[name][i])]
        if lost:
            count = format_count(len(lost), "case has", "cases have")
            warnings.append(
                f"{name}: {count} no answer of a model, such as {min(lost)}: left out if the base did not answer, "
                "wrong if only the result did not; the same command asks again"
            )

        for side, rows in (("base", first), ("result", after[name])):
            num_cut = sum(bool(row.get("is_cut")) for row in rows.values())
            if num_cut > _MAX_CUT_SHARE * len(rows):
                count = format_count(len(rows), "answer")
                warnings.append(
                    f"{name}: {num_cut:,} of {count} of the {side} were cut off at the limit of tokens, so they show "
                    "little; raise gate.max_new_tokens"
                )

    def pair(suite: str, ids: Iterable[str], is_right: Callable[[Row], bool]) -> list[PairedOutcome]:
        # Counted as wrong before, cases that the base did not answer would hide falls of others.
        first, second = before[suite], after[suite]
        return [PairedOutcome(i, is_right(first[i]), is_right(second[i])) for i in ids if not _has_failed(first[i])]

    def add(
        name: str,
        title: str,
        suite: str,
        ids: Sequence[str],
        is_right: Callable[[Row], bool],
        note: str = "",
        cause: str = "",
    ) -> None:
        if outcomes := pair(suite, ids, is_right):
            lines.append(Line(name, title, outcomes, note, cause, suite))
        else:
            not_run[name] = "the base answered none of its cases" if ids else _ABSENT.get(name, "no cases")

    if (cases := plan.held_out) is not None:
        name = cases.suite.name
        everything = [case.id for case in cases.suite.cases]
        note = f"{format_count(cases.num_left_out, 'held-out case')} not asked" if cases.num_left_out else ""
        add("calls", CALLS, name, cases.calls, is_valid, note)
        add("over_calling", OVER_CALLING, name, (*cases.no_calls, *cases.made), _calls_nothing)
        lines = [_tell_made_apart(line, cases) if line.name == "over_calling" else line for line in lines]
        add("over_refusing", OVER_REFUSING, name, cases.partners, _calls_something, cases.note)
        if STREAMED in before:
            add(LINES[STREAMED], f"{CALLS}, streamed", STREAMED, cases.calls, is_valid)
        attempts = [i for i in everything if _tries_a_call(before[name][i])]
        for defect, title in DEFECT_LINES.items():
            # A base that calls nothing makes no mistakes in calls: a result that has learned to call would seem worse.
            asked = everything if defect == "abandoned" else attempts
            if asked or all(map(_has_failed, before[name].values())):
                add(defect, title, name, asked, partial(_lacks, defect), _describe_attempts(asked, everything))
                continue
            found = sum(not _lacks(defect, row) for row in after[name].values() if not _has_failed(row))
            have = format_count(found, "answer of the result has it", "answers of the result have it")
            not_run[defect] = f"the base calls nothing on the held-out cases; {have}"
        outcomes = pair(name, everything, _reasons)
        if any(outcome.before for outcome in outcomes):
            lines.append(Line("reasoning", REASONING, outcomes, suite=name))
        else:
            not_run["reasoning"] = "the base does not reason on the held-out cases"
    for sample, suite in plan.samples:
        ids = [case.id for case in suite.all_cases]
        is_right = _calls_nothing if sample.cause == "over_calling" else is_valid
        left_out = [f"left out: {what} ({why})" for what, why in suite.not_run.items()]
        note = "; ".join(filter(None, [suite.release, *left_out]))
        add(sample.name, sample.title, suite.name, ids, is_right, note, sample.cause)
    return lines, not_run, warnings


def _tell_made_apart(line: Line, cases: HeldOutCases) -> Line:
    """Return the line of cases without a call with the counts of the user's own and of those that were made."""
    names = set(cases.made)
    made = [outcome for outcome in line.outcomes if outcome.id in names]
    own = [outcome for outcome in line.outcomes if outcome.id not in names]
    counts = [
        f"{format_count(len(part), f'case {kind}', f'cases {kind}')}: {sum(one.before for one in part):,} right "
        f"before, {sum(one.after for one in part):,} after"
        for kind, part in (("from your rows", own), ("made by taking the tool away", made))
        if part
    ]
    num_lost, num_lost_made = (sum(one.before and not one.after for one in part) for part in (line.outcomes, made))
    return replace(line, note="; ".join(counts), cause="missing_tool" if 2 * num_lost_made > num_lost else "")


def _has_failed(row: Row) -> bool:
    return row.get("error") is not None


def _calls_something(row: Row) -> bool:
    return bool(row["calls"]) and not _has_failed(row)


def _calls_nothing(row: Row) -> bool:
    """Return True if an answer is right and complete: one that was cut may have been about to call."""
    return is_valid(row) and not (row.get("is_cut") and not row.get("calls"))


def _tries_a_call(row: Row) -> bool:
    return not _has_failed(row) and (bool(row.get("calls")) or "malformed" in row.get("defects", ()))


def _describe_attempts(asked: Sequence[str], everything: Sequence[str]) -> str:
    return "" if len(asked) == len(everything) else f"the {format_count(len(asked), 'case')} in which the base calls"


def _lacks(defect: str, row: Row) -> bool:
    return defect not in row.get("defects", ()) and not _has_failed(row)


def _reasons(row: Row) -> bool:
    return bool((row.get("reasoning") or {}).get("text"))
