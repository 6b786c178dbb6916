"""The last steps of ``fctune tune``: judge the result, write its page, and print what comes next."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import DataError
from fctune.base.terminal import escape_controls
from fctune.runs.tune_directory import RUN

if TYPE_CHECKING:
    from fctune.apps.gate import GateReport
    from fctune.apps.tune.progress import Progress
    from fctune.apps.tune.written_config import WrittenConfig

_GATE, _PAGE = "gate", "report.html"
_MEANINGS = {
    "safe": "nothing got worse than its tolerance",
    "worse": "a line got worse",
    "undecided": "some lines have too few cases to tell; nothing is known to be worse",
}


class TuneResult:
    """The trained model of a tune.

    Args:
        config: The config that it was trained with.
        out: Directory of the tune.
        cases: File of --cases; None: those of the config or the run.
        say: Prints a line, with a style if one is given.

    Attributes:
        verdict: File that the gate writes.
        page: File of the report.
    """

    def __init__(self, config: WrittenConfig, out: Path, cases: str | None, say: Callable[..., None]):
        self.config, self.out, self.cases, self.say = config, out, cases, say
        self.verdict, self.page = out / _GATE / "gate.json", out / _PAGE

    def judge(self) -> dict[str, Any]:
        """Ask base and result the same cases, and judge each line."""
        from fctune.apps.gate import run_gate
        from fctune.cli.gate import print_report
        from fctune.cli.tables import make_console
        from fctune.models.run_config import load_run_config, resolve_base
        from fctune.tasks.evaluation.results import ResultsConflictError

        config, cases = load_run_config(self.config.path), self.find_cases()
        if not cases.is_file():
            raise DataError(
                f"{cases}: is missing, so there is nothing to judge with. Pass --cases FILE to fctune gate."
            )

        def judge(is_fresh: bool) -> GateReport:
            return run_gate(
                str(resolve_base(config)),
                str(self.out / RUN),
                self.out / _GATE,
                cases=cases,
                config=config.gate,
                is_fresh=is_fresh,
                log=show_progress,
            )

        try:
            report = judge(is_fresh=False)
        except ResultsConflictError:
            show_progress(
                "the answers of an earlier gate are of another model, other cases or another fctune; asking again"
            )
            report = judge(is_fresh=True)
        print_report(make_console(), report, self.out / _GATE, has_remedies=False)  # told at the end, by every start
        return {
            "verdict": report.verdict,
            "is_blocked": report.is_blocked,
            "still_blocking": list(map(dict, report.still_blocking)),
            "lines": [f"  {line.line.title}: {line.verdict}" for line in report.lines],
            "findings": report.describe_findings(),
            "commands": list(report.commands),
            "settings": self.config.gate_digest(),
        }

    def find_cases(self) -> Path:
        """Return the file of the held-out cases."""
        from fctune.models.run_config import load_run_config
        from fctune.tasks.evaluation.held_out import HELD_OUT_FILE

        gate = load_run_config(self.config.path).gate
        named = gate.cases if gate is not None else None
        return Path(self.cases or named or self.out / RUN / HELD_OUT_FILE)

    def report(self) -> dict[str, Any]:
        """Write the page of the run, with the gate's verdict and the accuracy before and after."""
        from fctune.apps.report.run_page import write_run_html
        from fctune.apps.report.run_sections import GateResult
        from fctune.runs.figures import Pricing
        from fctune.runs.record import read_run
        from fctune.tasks.evaluation.accuracy import find_accuracies, pair_results

        record = read_run(self.out / RUN)
        after, before = (self.out / _GATE / f"{side}.held_out.jsonl" for side in ("tuned", "base"))
        judged = [pair_results(after, before)] if after.is_file() and before.is_file() else []
        report = json.loads(self.verdict.read_text(encoding="utf-8"))
        gate = GateResult(report, f"{_GATE}/gate.html")
        accuracies = [*judged, *find_accuracies(record)]
        write_run_html([record], self.page, [accuracies], [[]], Pricing(None, None, 0.0), [], gate)
        self.say(f"  page: {self.page}")
        return {}

    def print_next(
        self, judged: Mapping[str, Any], tools: Mapping[str, int] | None, progress: Progress, *, is_tiny: bool
    ) -> int:
        """Print the verdict, its reasons and the commands that come next, the most useful last; returns the exit code.

        Args:
            judged: What the gate found.
            tools: Number of the rows' tools and the most of a row; None: of a tune by an older version.
            progress: Writes the files that the commands name.
            is_tiny: The built-in model was trained.
        """
        from fctune.apps.tune.trial import describe_trial
        from fctune.runs.release import read_mark

        run = shlex.quote(str(self.out / RUN))
        marked = read_mark(self.out / RUN)
        is_blocked, is_cleared = marked is not None, marked is None and judged["is_blocked"]
        style = {"safe": "bold green", "worse": "bold red"}.get(judged["verdict"], "bold yellow")
        self.say()
        self.say(f"verdict: {judged['verdict']} ({_MEANINGS[judged['verdict']]})", style)
        if release := _describe_release(judged, marked):
            self.say(release, "bold red" if is_blocked else "bold green")
        counts = tools or {"count": 0, "most_offered": 0}
        trial = describe_trial(
            self.out, self.out / RUN, self.find_cases(), counts["count"], counts["most_offered"], progress.write
        )
        for label, line in zip(("try it:", "", ""), trial, strict=False):
            self.say(f"{label:<13} {line}")
        if not is_blocked:
            self.say(f"serve it:     fctune serve {run}")
            if not is_tiny:
                self.say(f"publish it:   fctune push {run} OWNER/NAME")
        findings = [] if is_cleared else judged.get("findings", [])  # of tunes by this version
        for finding in findings:
            self.say(finding)
        for command in [] if is_cleared else judged.get("commands", []):
            self.say(f"remedy:       {command}")
        if is_tiny and not findings:
            self.say("next:         the same command with --model MODEL and another --out, for a model that is of use")
        return int(is_blocked)


def _describe_release(judged: Mapping[str, Any], marked: Sequence[Mapping[str, Any]] | None) -> str:
    """Return what serve and push do with the result, and why; empty if no gate has ever stopped it.

    Args:
        judged: What the tune's own gate found.
        marked: The lines of the result's mark; None: it has none.
    """
    if marked is None:
        return "cleared since then by fctune gate, so serve and push take the result" if judged["is_blocked"] else ""
    reasons = {line["name"]: line["reason"] for line in judged.get("still_blocking", ())}
    lines = ", ".join(_describe_line(line, reasons.get(line["name"])) for line in marked) or "the mark is damaged"
    since = "blocked" if judged["is_blocked"] else "stopped since then by fctune gate"
    return f"{since}, so serve and push refuse the result: {lines}"


def _describe_line(line: Mapping[str, Any], reason: str | None) -> str:
    if reason is not None:
        why = f"{line['verdict']} in an earlier gate; {reason}"
    else:
        why = f"{line['verdict']}, and require_safe is set" if line["verdict"] == "undecided" else line["verdict"]
    return f"{line['title']} ({why})"


def show_progress(line: str) -> None:
    """Print a line on the progress to standard error."""
    print(escape_controls(f"fctune tune: {line}"), file=sys.stderr, flush=True)
