"""The gate's report: its verdict, and what it writes for people's tools (JSON, JUnit XML)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fctune.apps.gate.lines import JudgedLine, Verdict
from fctune.base.files import write_atomically

SCHEMA_VERSION = 1


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
    """

    base: str
    tuned: str
    lines: tuple[JudgedLine, ...]
    not_run: Mapping[str, str]
    settings: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """``worse`` if a line is, else ``undecided`` if a line is or none ran, else ``safe``."""
        found = {line.verdict for line in self.lines} or {"undecided"}
        return "worse" if "worse" in found else "undecided" if "undecided" in found else "safe"

    @property
    def is_blocked(self) -> bool:
        """True if the result must not be released: it is worse, or undecided where it is required to be safe."""
        return self.verdict == "worse" or (bool(self.settings["require_safe"]) and self.verdict == "undecided")

    @property
    def blocking(self) -> tuple[JudgedLine, ...]:
        """The lines that block."""
        kinds = ("worse", "undecided") if self.settings["require_safe"] else ("worse",)
        return tuple(line for line in self.lines if line.verdict in kinds)

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
            "commands": list(self.commands),
            "tables": dict(self.tables),
            "settings": dict(self.settings),
        }

    def to_junit(self) -> str:
        """Return the report as JUnit XML: a blocking line is a failure; one that is undecided or not run is skipped."""
        cases = len(self.lines) + len(self.not_run)
        blocking = {line.line.name for line in self.blocking}
        num_skipped = cases - len(blocking) - sum(line.verdict == "safe" for line in self.lines)
        suite = ElementTree.Element(
            "testsuite",
            name="fctune gate",
            tests=str(cases),
            failures=str(len(blocking)),
            errors="0",
            skipped=str(num_skipped),
        )
        for line in self.lines:
            case = ElementTree.SubElement(suite, "testcase", classname="fctune.gate", name=line.line.name)
            if line.line.name in blocking:
                failure = ElementTree.SubElement(case, "failure", message=line.verdict, type=line.verdict)
                failure.text = _to_xml_text(line.describe())
            elif line.verdict == "undecided":
                ElementTree.SubElement(case, "skipped", message=_to_xml_text(f"undecided: {line.describe()}"))
        for name, reason in self.not_run.items():
            case = ElementTree.SubElement(suite, "testcase", classname="fctune.gate", name=name)
            ElementTree.SubElement(case, "skipped", message=_to_xml_text(f"not run: {reason}"))
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"

    def write(self, folder: Path) -> Path:
        """Write ``gate.json`` and ``gate.xml``, and return the former's path."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "gate.xml", self.to_junit())
        path = folder / "gate.json"
        write_atomically(path, json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n")
        return path


def _to_xml_text(text: str) -> str:
    """Replace what XML 1.0 cannot hold: ids of cases may have any character."""
    return "".join(c if c in "\t\n\r" or (c >= " " and not "\ud800" <= c <= "\udfff") else "?" for c in text)
