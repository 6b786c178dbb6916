"""Page of a run: how many rows of each kind were kept, and why the others fell."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from fctune.apps.generate.run import Report
from fctune.apps.generate.teacher import DROPPED
from fctune.config.intervals import format_count
from fctune.pages.page import Cases, Num, Page, Table, make_count_tile, make_heat_row, make_settings

_EXAMPLES_PER_REASON = 5

ENDINGS = {
    "complete": "Complete: there are as many rows of each kind as were wanted.",
    "budget": "The budget was used up. Raise it and run the same command to resume.",
    "unusable": "Stopped early: nothing that the teacher answered was usable.",
    "unreachable": "Stopped: the server does not answer any more. Run the same command to resume.",
    "exhausted": "Some kinds gave fewer rows than wanted although four times as many were asked for.",
}


def write_page(report: Report, settings: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the page of a run."""
    tone: Any = "good" if report.ending == "complete" else "warn" if report.kept else "bad"
    page = Page(f"Generated rows: {settings['teacher']}", f"{ENDINGS[report.ending]} {report.problem}".strip(), tone)
    usage = report.spent
    page.add_tiles(
        [
            make_count_tile(report.asked, "row", "", " asked for"),
            make_count_tile(len(report.kept), "row", "good", " kept"),
            make_count_tile(report.dropped.total(), "row", "warn", " dropped"),
            make_count_tile(usage.requests, "request"),
            make_count_tile(usage.prompt_tokens + usage.completion_tokens, "token"),
            *([(f"{usage.cost:,.2f}", "cost, in the currency of the prices", "")] if usage.cost else []),  # type: ignore[list-item]
        ]
    )
    _add_kinds(page, report)
    _add_reasons(page, report)
    _add_tools(page, report)
    _add_fallen(page, report)
    page.add_section("Secrets", ". ".join(report.describe_secrets()) + ".")
    page.add_section("Settings", make_settings("Setting", {k: v for k, v in settings.items() if v is not None}))
    page.write(path, f"fctune data generate, {format_count(len(report.kept), 'row')}")


def _add_kinds(page: Page, report: Report) -> None:
    rows = []
    for kind, wanted in report.wanted.items():
        verdicts = report.verdicts.get(kind, Counter[str]())
        asked = verdicts.total()
        rows.append([kind, wanted, asked, verdicts["kept"], f"{verdicts['kept'] / asked:.1%}" if asked else ""])
    heads = ["Kind", Num("Wanted"), Num("Asked for"), Num("Kept"), Num("Yield")]
    page.add_section("Yield by kind", Table(heads, rows))


def _add_reasons(page: Page, report: Report) -> None:
    dropped = report.dropped
    if not dropped:
        page.add_section("Why rows fell", "No row fell.")
        return
    rows = [[name, DROPPED[name], count, f"{count / report.asked:.1%}"] for name, count in dropped.most_common()]
    heads = ["Reason", "Meaning", Num("Rows"), Num("Of all asked for")]
    names = [name for name, _ in dropped.most_common()]
    by_kind = [
        [kind, *make_heat_row([report.verdicts.get(kind, Counter[str]())[name] for name in names])]
        for kind in report.wanted
    ]
    page.add_section("Why rows fell", Table(heads, rows))
    page.add_section("Why rows fell, by kind", Table(["Kind", *map(Num, names)], by_kind))


def _add_tools(page: Page, report: Report) -> None:
    offered, called = Counter[str](), Counter[str]()
    for row in report.kept:
        offered.update(tool["function"]["name"] for tool in row["tools"])
        for message in row["messages"]:
            called.update(call["function"]["name"] for call in message.get("tool_calls", ()))
    rows = [[name, count, called[name]] for name, count in sorted(offered.items())]
    lead = "Rows that offer each tool, and calls of it in the rows that were kept."
    page.add_section("Tools", Table(["Tool", Num("Rows"), Num("Calls")], rows), lead=lead)


def _add_fallen(page: Page, report: Report) -> None:
    shown: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in report.fallen:
        if len(shown[line["verdict"]]) < _EXAMPLES_PER_REASON:
            shown[line["verdict"]].append(line)
    cases = [
        {
            "title": line["requests"][0][:120] if line["requests"] else f"Row {line['id']}",
            "tags": [line["category"], line["verdict"]],
            "facets": {"kind": line["category"], "verdict": line["verdict"]},
            "parts": [
                {"heading": "Reason", "text": line["reason"], "kind": "text"},
                {"heading": "The user's messages", "text": "\n".join(line["requests"]) or "None.", "kind": "list"},
            ],
        }
        for lines in shown.values()
        for line in lines
    ]
    if cases:
        lead = f"Up to {_EXAMPLES_PER_REASON} of each reason; the log has all of them."
        page.add_section("Rows that fell", Cases(cases, {"kind": "Kind", "verdict": "Reason"}), lead=lead)
