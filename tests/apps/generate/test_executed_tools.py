"""Tools of a real MCP server: only those that it declares read-only and that the user names are called."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mcp_types import Tool, ToolAnnotations

from tests.apps.generate.commands import generate, read_rows, read_summary
from tests.apps.generate.scripted_teacher import TOOLS, Teacher, serve_teacher
from tests.engines.mcp_server import serve_tools

ANNOTATIONS = {
    "get_weather": ToolAnnotations(read_only_hint=True),
    "find_user": ToolAnnotations(read_only_hint=True, destructive_hint=True),
    "send_note": ToolAnnotations(read_only_hint=False),
}
LISTED = [
    Tool(
        name=tool["name"],
        description=tool["description"],
        input_schema=tool["parameters"],
        annotations=ANNOTATIONS.get(tool["name"]),
    )
    for tool in TOOLS
]


def test_a_named_read_only_tool_is_called_and_no_other(tmp_path: Path) -> None:
    called = Counter[str]()

    def call(name: str, arguments: dict[str, Any]) -> str:
        called[name] += 1
        return json.dumps({"weather_of": arguments["city"], "degrees": 21})

    out = tmp_path / "rows.jsonl"
    with serve_tools(LISTED, call) as url, serve_teacher(Teacher()) as log:
        options = ["--execute", "get_weather", "--kinds", "one_call,repeated_tool"]
        assert generate(log.url, url, out, *options, num=16) == 0
    assert set(called) == {"get_weather"}
    num_results = 0
    for row in read_rows(out):
        names = {call["function"]["name"] for m in row["messages"] for call in m.get("tool_calls", ())}
        assert row["metadata"]["generated"].get("executed", []) == sorted(names & {"get_weather"})
        for message in row["messages"]:
            if message["role"] == "tool":
                is_real = "weather_of" in message["content"]
                assert is_real == ("get_weather" in names)
                num_results += is_real
    assert num_results == called["get_weather"] > 4


@pytest.mark.parametrize("more", [[], ["--supervise-redacted"]])
def test_secrets_in_results_are_replaced_before_the_teacher_reads_them(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "gh" + "p_" + "kq81ZxPv30mNeTrWLsYu7b5AdFhJ2cQ9oXt4"

    def call(name: str, arguments: dict[str, Any]) -> str:
        if arguments["city"] < "c":
            raise ValueError(f"no city for {secret}")
        return json.dumps({"token": secret})

    out = tmp_path / "rows.jsonl"
    with serve_tools(LISTED[:1], call) as url, serve_teacher(Teacher()) as log:
        options = ["--execute", "get_weather", "--kinds", "one_call", *more]
        assert generate(log.url, url, out, *options, num=4) == 0
        sent = json.dumps(log.bodies)
    rows, folder = read_rows(out), out.with_suffix(".generate")
    for text in (sent, *(path.read_text() for path in (out, *folder.glob("*.json*")))):
        assert secret not in text
        assert secret[-20:] not in text
    for row in rows:
        *_, result, answer = row["messages"]
        assert json.loads(result["content"])["token"].startswith("ghp_REDACTED")
        assert "ghp_REDACTED" in answer["content"]
        assert answer.get("weight", 1) == len(more), "no placeholder is learned as a value"
        assert row["metadata"]["redacted"] == {"kinds": {"github_token": 1}, "calls": []}
    said = capsys.readouterr().out
    assert "4 secrets in 4 rows (github_token 4) replaced by placeholders\nfound in the rows' texts: secrets 0" in said
    assert read_summary(out)["redacted"]["kinds"] == {"github_token": 4}


NAMED, MENTIONED = '{"password": "kittens-Of-4Doors"}', '{"note": "use kittens-Of-4Doors"}'


@pytest.mark.parametrize(
    ("results", "kind", "count"),
    [
        ((NAMED, MENTIONED), "repeated_tool", 2),
        ((MENTIONED, NAMED), "repeated_tool", 2),
        ((MENTIONED, NAMED), "multi_turn", 3),  # the answer to the first turn quotes its result
    ],
)
def test_a_secret_that_one_result_names_is_replaced_in_all(
    results: tuple[str, str], kind: str, count: int, tmp_path: Path
) -> None:
    given = itertools.cycle(results)
    out = tmp_path / "rows.jsonl"
    with serve_tools(LISTED[:1], lambda name, arguments: next(given)) as url, serve_teacher(Teacher()) as log:
        options = ["--execute", "get_weather", "--kinds", kind, "--concurrency", "1"]
        assert generate(log.url, url, out, *options, num=2) == 0
        last = json.dumps(log.bodies if kind == "repeated_tool" else log.bodies[-1])
    assert "kittens" not in last + "".join(path.read_text() for path in out.with_suffix(".generate").glob("*.json*"))
    for row in read_rows(out):
        assert "kittens" not in json.dumps(row)
        assert row["metadata"]["redacted"]["kinds"] == {"named_secret": count}


def test_a_call_that_fails_drops_its_row(tmp_path: Path) -> None:
    def call(name: str, arguments: dict[str, Any]) -> str:
        if arguments["city"] < "e":
            raise ValueError("no such city")
        return json.dumps({"sky": "sunny"})

    out = tmp_path / "rows.jsonl"
    with serve_tools(LISTED[:1], call) as url, serve_teacher(Teacher()) as log:
        assert generate(log.url, url, out, "--execute", "get_weather", "--kinds", "one_call", num=12) == 0
    assert read_summary(out)["dropped"]["execution_failed"] >= 1


@pytest.mark.parametrize("name", ["send_note", "find_user", "set_alarm"])
def test_a_tool_that_is_not_read_only_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(name: str, arguments: dict[str, Any]) -> str:
        raise AssertionError("a tool was called")

    with serve_tools(LISTED, call) as url, serve_teacher(Teacher()) as log:
        assert generate(log.url, url, tmp_path / "rows.jsonl", "--execute", name) == 2
        assert not log.bodies
    assert f"--execute {name}: its server does not declare it read-only" in capsys.readouterr().err
