"""The gate's report: its verdict, and what it writes for people's tools (JSON, JUnit XML)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fctune.apps.gate.lines import JudgedLine, Verdict
from fctune.base.files import write_atomically
from fctune.engines.model_files import is_on_disk
from fctune.runs.release import find_marks

SCHEMA_VERSION = 1
NO_LINE = "gate"  # name of what blocks a result of which no line ran

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class GateReport:
    """Verdicts on a fine-tuned model.

    Attributes:
        base: The base, as given.
        tuned: The result, as given.
        lines: The lines that ran, each with its verdict.
        not_run: Why each of the other lines did not run, by name.
        settings: What the verdicts depend on.
        warnings: What to know before the verdicts, such as a line that is too small to find anything.
        commands: What trains the result again with the remedies of all lines.
        tables: Further measurements that have no verdict, by name.
        still_blocking: Lines for which an earlier gate stopped the result and which this one does not clear, each with
            ``name``, ``title``, ``verdict``, ``reason`` and, if it is known, ``n``.
    """

    base: str
    tuned: str
    lines: tuple[JudgedLine, ...]
    not_run: Mapping[str, str]
    settings: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)
    still_blocking: tuple[Mapping[str, Any], ...] = ()

    @property
    def verdict(self) -> Verdict:
        """``worse`` if a line is, else ``undecided`` if a line is or none ran, else ``safe``."""
        found = {line.verdict for line in self.lines} or {"undecided"}
        return "worse" if "worse" in found else "undecided" if "undecided" in found else "safe"

    @property
    def is_blocked(self) -> bool:
        """True if the result must not be released: a line is worse, or undecided where all are required to be safe."""
        is_unsafe = bool(self.settings["require_safe"]) and self.verdict == "undecided"
        return self.verdict == "worse" or is_unsafe or bool(self.still_blocking)

    @property
    def has_no_line(self) -> bool:
        """True if no line ran."""
        return not self.lines

    def describe_block(self) -> str:
        """Return what keeps a blocked result from its release, for people; empty if it is not blocked."""
        if not self.is_blocked:
            return ""
        if not is_on_disk(self.tuned):
            return (
                f"blocked, and no mark can be written for {self.tuned}, which is not on this machine: do not release it"
            )
        return f"blocked: fctune serve, push and export refuse it; mark: {find_marks(self.tuned)[0]}"

    @property
    def blocking(self) -> tuple[JudgedLine, ...]:
        """The lines that block."""
        kinds = ("worse", "undecided") if self.settings["require_safe"] else ("worse",)
        return tuple(line for line in self.lines if line.verdict in kinds)

    def describe_findings(self) -> list[str]:
        """Return what explains the falls that ``commands`` treat, each once; the settings are in the commands."""
        names: dict[str, list[str]] = {}
        notes: dict[str, str] = {}
        for line in [line for line in self.lines if line.verdict == "worse"] or self.lines:
            for remedy in line.remedies:
                names.setdefault(remedy.finding, []).append(line.line.name)
                notes[remedy.finding] = f" ({remedy.note})" if remedy.note else ""
        return [f"{', '.join(lines)}: {finding}{notes[finding]}" for finding, lines in names.items()]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "base": self.base,
            "tuned": self.tuned,
            "verdict": self.verdict,
            "is_blocked": self.is_blocked,
            "warnings": list(self.warnings),
            "lines": [line.to_json() for line in self.lines],
            "not_run": dict(self.not_run),
            "still_blocking": list(map(dict, self.still_blocking)),
            "commands": list(self.commands),
            "tables": dict(self.tables),
            "settings": dict(self.settings),
        }

    def to_junit(self) -> str:
        """Return the report as JUnit XML: a blocking line is a failure; one that is undecided or not run is skipped."""
        stopped = {line["name"]: line for line in self.still_blocking}
        others = [name for name in self.not_run if name not in stopped]
        names = {line.line.name for line in self.lines}
        if self.has_no_line and self.is_blocked and NO_LINE not in stopped:
            stopped[NO_LINE] = {"name": NO_LINE, "verdict": "undecided"}
        blocking = {line.line.name for line in self.blocking} | (stopped.keys() & names)
        num_undecided = sum(line.verdict == "undecided" and line.line.name not in blocking for line in self.lines)
        suite = ElementTree.Element(
            "testsuite",
            name="fctune gate",
            tests=str(len(names | stopped.keys()) + len(others)),
            failures=str(len(blocking | stopped.keys())),
            errors="0",
            skipped=str(num_undecided + len(others)),
        )

        notes = {line.line.name: line.line.note for line in self.lines if line.line.note}

        def add(name: str) -> ElementTree.Element:
            case = ElementTree.SubElement(suite, "testcase", classname="fctune.gate", name=_to_xml_text(name))
            if name in notes:
                ElementTree.SubElement(case, "system-out").text = _to_xml_text(notes[name])
            return case

        def fail(name: str, verdict: str, text: str) -> None:
            failure = ElementTree.SubElement(add(name), "failure", message=verdict, type=verdict)
            failure.text = _to_xml_text(text)

        for line in self.lines:
            if line.line.name in blocking:
                found = stopped.get(line.line.name, {"verdict": line.verdict})
                fail(line.line.name, found["verdict"], _describe_earlier(found) + line.describe())
            else:
                case = add(line.line.name)
                if line.verdict == "undecided":
                    ElementTree.SubElement(case, "skipped", message=_to_xml_text(f"undecided: {line.describe()}"))
        for name, earlier in stopped.items():
            if name not in names:
                fail(
                    name,
                    earlier["verdict"],
                    _describe_earlier(earlier)
                    + self.not_run.get(name, "no line ran" if name == NO_LINE else "not planned"),
                )
        for name in others:
            ElementTree.SubElement(add(name), "skipped", message=_to_xml_text(f"not run: {self.not_run[name]}"))
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"

    def write(self, folder: Path) -> Path:
        """Write ``gate.json`` and ``gate.xml``, and return the former's path."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "gate.xml", self.to_junit())
        path = folder / "gate.json"
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        write_atomically(path, text.encode("utf-8", "replace"))  # ids may have half of a surrogate pair
        return path


def _describe_earlier(line: Mapping[str, Any]) -> str:
    """Return the beginning of a failure's text for a line of an earlier gate; empty for one of this gate."""
    return f"{line['verdict']} in an earlier gate; {line['reason']}: " if "reason" in line else ""


def _to_xml_text(text: str) -> str:
    """Replace what XML 1.0 cannot hold: ids of cases may have any character."""
    return _NOT_XML.sub("?", text)
