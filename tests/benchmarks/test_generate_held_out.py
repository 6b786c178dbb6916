"""The hand-written requests of benchmarks/generate: valid, enough, and kept out of generated rows."""

from __future__ import annotations

from collections import Counter

import yaml

from benchmarks.generate.server import READ_ONLY, SUITE, list_tools
from fctune.apps.generate.dialogue import HeldOut
from fctune.apps.generate.inputs import read_held_out
from fctune.apps.generate.kinds import KINDS
from fctune.data.tool_schema import ToolSet
from fctune.tasks.suite_files import load_suite


def test_the_requests_are_valid_and_of_every_kind() -> None:
    cases = load_suite(SUITE).cases
    assert len(cases) >= 60
    assert set(Counter(case.category for case in cases)) == set(KINDS)
    for case in cases:
        checked = ToolSet(case.prompt.tools)
        assert all(checked.accepts(call) for call in case.expected), case.id
        assert bool(case.expected) or case.category not in ("one_call", "several_calls", "repeated_tool"), case.id


def test_the_server_has_the_tools_of_the_suite() -> None:
    functions = yaml.safe_load(SUITE.read_text(encoding="utf-8"))["tools"]
    listed = list_tools()
    assert [(tool.name, tool.input_schema) for tool in listed] == [(f["name"], f["parameters"]) for f in functions]
    assert {tool.name for tool in listed if tool.annotations and tool.annotations.read_only_hint} == READ_ONLY


def test_the_guard_finds_each_of_them() -> None:
    read = read_held_out([str(SUITE)])
    guard = HeldOut(read)
    for name, texts in read[str(SUITE)]:
        assert guard.has(texts), name
        assert guard.has([f"  {texts[0].upper()} "]), name
    assert not guard.has(["Fetch the tide table of a port that is in no case of the suite, thanks a lot"])
