"""Accuracy as served, with the servers' real parsers where they are installed."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval import serving
from fctune.base.errors import ConfigError
from fctune.calls.formats.base import SERVERS, Server
from fctune.calls.formats.registry import FORMATS
from fctune.engines.engine import Answer
from fctune.tasks.evaluation.results import ResultsFile
from fctune.tasks.evaluation.serving import parse_as_served
from fctune.tasks.judge import judge_answer
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from tests.conftest import ROOT

MODULES = {"vllm": "vllm.tool_parsers", "sglang": "sglang.srt.function_call.function_call_parser"}


@functools.cache
def python_of(server: str) -> str:
    return os.environ.get(f"FCTUNE_{server.upper()}_PYTHON") or sys.executable


@functools.cache
def is_installed(server: str) -> bool:
    """Without importing it: that takes seconds."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({server!r}) is None)"
    return subprocess.run([python_of(server), "-c", code], capture_output=True).returncode == 0


def needs(server: str) -> Any:
    reason = f"{server} is not installed; name a Python that has it in FCTUNE_{server.upper()}_PYTHON"
    return pytest.param(server, marks=pytest.mark.skipif(not is_installed(server), reason=reason))


@pytest.fixture(scope="module")
def smoke() -> Suite:
    return load_suite(ROOT / "eval" / "suites" / "smoke.yaml")


def rows_of(suite: Suite, texts: list[str], format_name: str = "hermes") -> list[dict[str, Any]]:
    answers = [Answer(i, text) for i, text in enumerate(texts)]
    reader = FORMATS[format_name]
    return [judge_answer(c, answer, reader).to_row() for c, answer in zip(suite.cases, answers, strict=True)]


@pytest.mark.parametrize("server", SERVERS)
def test_a_missing_server_is_reported_with_the_reason(server: Server, smoke: Suite, tiny_base: Path) -> None:
    bare = f"{sys.base_prefix}/bin/python3"
    with pytest.raises(ConfigError, match=f"No module named '{server}'"):
        parse_as_served(server, smoke, [], tiny_base, "hermes", bare)
    with pytest.raises(ConfigError, match="no/python cannot be started"):
        parse_as_served(server, smoke, [], tiny_base, "hermes", "no/python")


def test_results_of_another_suite_are_refused(
    smoke: Suite, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    results = ResultsFile(path)
    for row in rows_of(smoke, ["No."] * 4)[:3]:
        results.append(row)
    results.close()
    assert serving.main([str(tiny_base), "--suite", "smoke", "--results", str(path)]) == 2
    assert "lacks 1 of the suite's 4 cases, such as 'thanks'" in capsys.readouterr().err


@pytest.mark.parametrize("server", [needs(server) for server in SERVERS])
def test_a_servers_own_parser_reads_what_is_right_and_drops_what_it_drops(
    server: Server, smoke: Suite, tiny_base: Path
) -> None:
    right = [FORMATS["hermes"].render(case.expected) or "You are welcome." for case in smoke.cases]
    served = parse_as_served(server, smoke, rows_of(smoke, right), tiny_base, "hermes", python_of(server))
    assert served.version.lower().startswith(server)
    assert all(judgement.is_valid for judgement in served.judgements.values())
    # One bad block: both servers then give a client no call at all, which looks like an answer in words.
    half = [right[0], right[1], right[2].replace('"city": "Madrid"', '"city": Madrid'), right[3]]
    rows = rows_of(smoke, half)
    served = parse_as_served(server, smoke, rows, tiny_base, "hermes", python_of(server))
    assert rows[2]["verdict"] == "malformed"
    assert served.judgements["two_cities"].outcome.verdict == "missed_call"


@pytest.mark.parametrize("server", [needs("sglang")])
def test_a_call_of_a_tool_that_is_not_on_offer_is_dropped_by_sglang(
    server: Server, smoke: Suite, tiny_base: Path
) -> None:
    call = '<tool_call>\n{"name": "say_goodbye", "arguments": {}}\n</tool_call>'
    rows = rows_of(smoke, ["No.", "No.", "No.", call])
    served = parse_as_served(server, smoke, rows, tiny_base, "hermes", python_of(server))
    assert rows[3]["verdict"] == "false_call"
    assert served.judgements["thanks"].outcome.verdict == "correct"


@pytest.mark.parametrize("server", [needs(server) for server in SERVERS])
def test_an_unknown_parser_is_reported(server: Server, smoke: Suite, tiny_base: Path) -> None:
    with pytest.raises(ConfigError, match="its parser no_such cannot be run"):
        parse_as_served(server, smoke, [], tiny_base, "no_such", python_of(server))


@pytest.mark.skipif(not any(map(is_installed, SERVERS)), reason="no server is installed")
def test_the_command_compares_served_accuracy_with_both_readings(
    smoke: Suite, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = tmp_path / "results.jsonl", tmp_path / "served.jsonl"
    results = ResultsFile(path)
    lenient = '<tool_call>{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}}</tool_call>'
    for row in rows_of(smoke, [lenient, "No.", "No.", "No."]):
        results.append(row)
    results.close()
    command = [str(tiny_base), "--suite", "smoke", "--results", str(path), "--json", str(found)]
    pythons = [f"--{server}-python={python_of(server)}" for server in SERVERS]
    assert serving.main([*command, *pythons]) == 0
    printed = capsys.readouterr().out
    first = json.loads(found.read_text().splitlines()[0])
    assert (first["id"], first["strict"], first["lenient"]) == ("weather", "malformed", "correct")
    for server in SERVERS:
        if is_installed(server):
            assert any(key.lower().startswith(server) for key in first)
        else:
            assert f"not run: {server}" in printed
