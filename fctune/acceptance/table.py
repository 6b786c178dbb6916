"""A run in a terminal: what is measured, a line for each check as it is known, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fctune.terminal import print_whole

_COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red", "SKIPPED": "dim", "INCOMPLETE": "yellow"}


class Progress:
    """Says how a run goes: each phase as it begins, its pieces, and of each check, once, how it came out."""

    def __init__(self, console: Console, output_dir: str):
        self._console, self._output_dir = console, output_dir
        self._said: set[str] = set()

    def begin(self, phase: str, seconds: float) -> None:
        """Say that a phase begins."""
        self._say(Text(f"{seconds:7.1f} s  ").append(f"{'...':<8}{phase}", "dim"))

    def tell(self, text: str) -> None:
        """Say what a piece came to."""
        self._say(Text(f"{'':19}{text}", "dim"))

    def show(self, document: Mapping[str, Any]) -> None:
        """Say what is new."""
        for check in document["checks"]:
            if check["status"] == "SKIPPED" or check["name"] in self._said:
                continue
            self._said.add(check["name"])
            text = Text(f"{document['seconds']:7.1f} s  ").append(f"{check['status']:<8}", _COLOURS[check["status"]])
            self._say(text.append(f"{check['name']:<18}").append(_tell_figures(check), "dim"))

    def end(self, document: Mapping[str, Any]) -> None:
        """Print the table and the verdict."""
        self._console.print()
        print_result(self._console, document)
        self._say(Text(f"{self._output_dir}/acceptance.json"))

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


def print_result(console: Console, document: Mapping[str, Any]) -> None:
    """Print the table and the verdict."""
    print_whole(console, make_table(document))
    console.print()
    console.print(tell_verdict(document), soft_wrap=True, highlight=False)


def make_table(document: Mapping[str, Any]) -> Table:
    """Every check with its figures against their thresholds."""
    title = f"{document['profile']} profile, {document['world_size']} ranks, {document['seconds']:.0f} s"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, justify in (("check", "left"), ("", "left"), ("figure", "left"), ("value", "right"), ("wanted", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for check in document["checks"]:
        state = Text(check["status"], _COLOURS[check["status"]])
        name = check["name"] + ("" if check["required"] else " (not required)")
        figures = check["figures"]
        if not figures:
            table.add_row(name, state, check["reason"], "", "")
        for number, figure in enumerate(figures):
            value = Text(f"{figure['value']:.4g} {figure['unit']}".strip(), _COLOURS[figure["status"]])
            first = ("", "") if number else (name, state)
            table.add_row(*first, figure["name"], value, tell_threshold(figure))
    return table


def tell_verdict(document: Mapping[str, Any]) -> Text:
    """The verdict, whom each failure is laid to, and what to try."""
    text = Text().append(document["verdict"], _COLOURS[document["verdict"]]).append(f": {document['reason']}\n")
    for fault in document["config"]["faults"]:
        text.append(f"  on purpose: {fault['kind']} on rank {fault['rank']}\n", "yellow")
    for check in document["checks"]:
        if check["status"] not in ("FAIL", "WARN"):
            continue
        text.append(f"\n{check['name']} {check['status']}", _COLOURS[check["status"]]).append(f": {check['reason']}\n")
        for culprit in check["culprits"]:
            text.append(f"  {culprit['text']}\n")
        text.append(f"  next: {check['next']}\n")
    return text


def tell_threshold(figure: Mapping[str, Any]) -> str:
    """What was wanted of a figure."""
    threshold = figure["threshold"]
    if threshold is None:
        return ""
    sign = ">=" if figure["better"] == "higher" else "<="
    warn = "" if threshold["warn"] is None else f" (warns: {threshold['warn']:g})"
    return f"{sign} {threshold['fail']:g}{warn}"


def _tell_figures(check: Mapping[str, Any]) -> str:
    shown = (f"{f['name'].removeprefix(check['name'] + '_')} {f['value']:.4g}" for f in check["figures"])
    return "  ".join(shown) or check["reason"]
