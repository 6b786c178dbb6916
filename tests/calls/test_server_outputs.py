"""The comparison with the servers' own parsers: its outputs, what counts as a difference, and its result."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from benchmarks.parsers import compare, render_page
from fctune.calls.formats.base import SERVERS, Server
from fctune.calls.formats.registry import FORMATS
from fctune.data.conversation import Call, Tool
from tests.calls.server_outputs import DAMAGED, KINDS, Output, explain_difference, is_same, make_outputs, read_reply
from tests.conftest import ROOT

each_format = pytest.mark.parametrize("name", list(FORMATS))


@each_format
def test_outputs_are_the_same_each_time_and_of_every_kind(name: str) -> None:
    outputs = make_outputs(FORMATS[name], 130)
    assert outputs == make_outputs(FORMATS[name], 130)
    assert [output.text for output in outputs] != [output.text for output in make_outputs(FORMATS[name], 130, seed=1)]
    assert {output.kind for output in outputs} == set(KINDS)


@each_format
def test_our_lenient_reading_finds_the_calls_of_every_undamaged_output(name: str) -> None:
    for output in make_outputs(FORMATS[name], 260):
        if output.kind not in (*DAMAGED, "wrong types"):
            parsed = FORMATS[name].parse(output.text, output.tools, lenient=True)
            assert parsed.calls == output.calls, output


def as_reply(output: Output) -> dict[str, Any]:
    return {"calls": [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in output.calls]}


@pytest.mark.parametrize("server", SERVERS)
def test_a_reading_with_other_calls_is_a_difference_without_a_reason(server: Server) -> None:
    """The reasons are narrow: no reply that lost, gained or changed a call of an undamaged output has one."""
    num_changed = 0
    for output in make_outputs(FORMATS["hermes"], 260):
        ours = FORMATS["hermes"].parse(output.text, output.tools, lenient=True)
        theirs = read_reply(as_reply(output))
        if output.kind in (*DAMAGED, "unknown tool", "unknown argument", "wrong types") or not ours.calls:
            continue
        assert is_same(ours, theirs)
        assert isinstance(theirs, list)
        name, arguments = theirs[0]
        changed = {key: f"{value} " for key, value in arguments.items()} | {"more": 1}
        for wrong in (
            theirs[1:],
            [*theirs, theirs[0]],
            [("other", arguments), *theirs[1:]],
            [(name, changed), *theirs[1:]],
        ):
            assert not is_same(ours, wrong)
            assert not explain_difference(output, ours, wrong, server), (output, wrong)
            num_changed += 1
    assert num_changed > 200


_PROPERTIES = {"a": {"type": ["string", "integer"]}, "s": {"type": "string"}, "n": {"type": ["string", "null"]}}
PING = Tool({"name": "ping", "parameters": {"type": "object", "properties": _PROPERTIES}})
PAUSED = FORMATS["hermes"].render([Call("ping", {"s": "x", "n": "y"})])


@pytest.mark.parametrize(
    ("name", "text", "theirs", "server", "reason"),
    [
        ("xlam", 'So: [{"name": "ping", "arguments": {}}]', [], "vllm", "prose"),
        ("hermes", 'So: <tool_call>{"name": "ping", "arguments": {}}</tool_call>', [], "vllm", None),
        ("pythonic", "[ping(a=-1), ping(a=1)]", [("ping", {"a": 1})], "sglang", "negative"),
        ("pythonic", "[ping(a=-1), ping(a=1)]", [("ping", {"a": -1})], "sglang", None),
        ("functools", 'functools[{"name": "ping", "arguments": {"a": [1]}}]', [], "vllm", "bracket"),
        ("functools", 'So: functools[{"name": "ping", "arguments": {"a": [1]}}]', [], "vllm", "bracket"),
        ("functools", 'functools[{"name": "ping", "arguments": {"a": 1}}]', [], "vllm", None),
        ("olmo3", '<function_calls>ping(a="\u2028")</function_calls>', [("ping", {"a": ", "})], "vllm", "line"),
        ("olmo3", '<function_calls>ping(a="b")</function_calls>', [("ping", {"a": ", "})], "vllm", None),
        ("mistral_v3", '[TOOL_CALLS][{"name": "ping", "arguments": {}}]', [], "sglang", "space"),
        ("mistral_v3", '[TOOL_CALLS] [{"name": "ping", "arguments": {}}]', [], "sglang", None),
        ("llama4_json", FORMATS["llama4_json"].render([Call("ping", {})] * 2), [], "vllm", "adjacent"),
        ("llama4_json", FORMATS["llama4_json"].render([Call("ping", {})]), [], "vllm", None),
        ("kimi_k2", FORMATS["kimi_k2"].render([Call("ping", {})]), [("ping", "")], "vllm", "empty"),
        ("kimi_k2", FORMATS["kimi_k2"].render([Call("ping", {"a": 1})]), [("ping", "")], "vllm", None),
        ("functiongemma", "<start_function_call>call:ping{a:1}<end_function_call>", [("ping", {})], "vllm",
         "escaped only"),
        ("functiongemma", "<start_function_call>call:ping{s:<escape>x<escape>}<end_function_call>", [("ping", {})],
         "vllm", None),
        ("gpt_oss", " to=functions.ping<|channel|>commentary json<|message|>{}", [], "sglang", "header"),
        ("gpt_oss", "<|channel|>commentary to=functions.ping<|message|>{}", [("ping", {"a": 1})], "sglang", None),
        ("gemma4", "<|tool_call>call:ping{a:1}<tool_call|>", [("ping", {"a": "1"})], "sglang", "kept"),
        ("gemma4", "<|tool_call>call:ping{a:1}<tool_call|>", [("ping", {"a": "2"})], "sglang", None),
        ("gemma4", "<|tool_call>call:ping{b:{c:1}}<tool_call|>", [("ping", {"b": {"c": "1"}})], "vllm", "untyped"),
        ("gemma4", "<|tool_call>call:ping{b:{c:1}}<tool_call|>", [("ping", {"b": {"c": "2"}})], "vllm", None),
        ("hermes", PAUSED, [("ping", {"s": "x", "n": None})], "sglang", "nullable"),
        ("hermes", PAUSED, [("ping", {"s": None, "n": "y"})], "sglang", None),
        ("hermes", PAUSED.replace('"x"', '"null"'), [("ping", {"s": None, "n": "y"})], "sglang", "null word"),
        ("hermes", PAUSED.replace('"x"', "5"), [("ping", {"s": "5", "n": "y"})], "vllm", "misfit"),
        ("hermes", PAUSED.replace('"x"', '" x "'), [("ping", {"s": "x", "n": "y"})], "sglang", "stripped"),
        ("hermes", PAUSED.replace('"x"', '" x "'), [("ping", {"s": "", "n": "y"})], "sglang", None),
        ("hermes", PAUSED.replace('"x"', '"true"'), [("ping", {"s": True, "n": "y"})], "vllm", "decoded"),
        ("hermes", PAUSED.replace('"x"', '"true"'), [("ping", {"s": "True", "n": "y"})], "sglang", "respelled"),
        ("hermes", PAUSED.replace('"x"', '"true"'), [("ping", {"s": False, "n": "y"})], "vllm", None),
        ("hermes", FORMATS["hermes"].render([Call("pong", {}), Call("ping", {"a": 1})]), [("ping", {"a": 1})],
         "sglang", "unknown tool"),
        ("hermes", FORMATS["hermes"].render([Call("pong", {}), Call("ping", {"a": 1})]), [("pong", {})], "sglang",
         None),
    ],
)  # fmt: skip
def test_a_reason_explains_its_own_difference_and_no_other(
    name: str, text: str, theirs: list[tuple[str, Any]], server: Server, reason: str | None
) -> None:
    output = Output("one call", text, (PING,), ())
    ours = FORMATS[name].parse(text, (PING,), lenient=True)
    assert ours.calls
    assert not is_same(ours, theirs)
    assert explain_difference(output, ours, theirs, server) == ((reason,) if reason else ())


@pytest.mark.parametrize(
    ("theirs", "kind"),
    [
        ([], "gives up"),
        ([("ping", {"a": 1})], "fewer calls"),
        ([("ping", {"a": 1}), ("ping", {"a": 2}), ("ping", {})], "more calls"),
        ([("ping", {"a": 1}), ("pong", {"a": 2})], "other name"),
        ([("ping", {"a": 1}), ("ping", '{"a": 2')], "not JSON"),
        ([("ping", {}), ("ping", {"a": 2})], "fewer arguments"),
        ([("ping", {"a": 1}), ("ping", {"a": 2, "s": "x"})], "more arguments"),
        ([("ping", {"a": 1}), ("ping", {"a": 3})], "other arguments"),
        ([("ping", {"a": 1}), ("ping", {"a": 2.0})], "number"),
    ],
)
def test_readings_of_damaged_text_are_told_apart_by_kind(theirs: list[tuple[str, Any]], kind: str) -> None:
    text = FORMATS["hermes"].render([Call("ping", {"a": 1}), Call("ping", {"a": 2})])
    ours = FORMATS["hermes"].parse(text, (PING,), lenient=True)
    assert explain_difference(Output("damaged", text, (PING,), ()), ours, theirs, "vllm") == (kind,)
    if kind != "number":
        assert explain_difference(Output("one call", text, (PING,), ()), ours, theirs, "vllm") == ()


def test_a_call_that_only_the_server_finds_in_damaged_text_is_named() -> None:
    nothing = FORMATS["hermes"].parse("Hm.", (PING,), lenient=True)
    assert explain_difference(Output("cut", "Hm.", (PING,), ()), nothing, [("ping", {})], "vllm") == ("makes a call",)


# Most outputs differ, for the one reason that the page gives.
LOSSY = {("functiongemma", "vllm"), ("gpt_oss", "sglang"), ("mistral_v3", "sglang"), ("mistral_v7", "sglang")}


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
@each_format
def test_every_difference_from_a_servers_own_parser_has_a_known_reason(name: str, server: Server) -> None:
    python = os.environ.get(f"FCTUNE_{server.upper()}_PYTHON")
    if python is None or FORMATS[name].get_server_parser(server) is None:
        pytest.skip(f"needs a parser of {server}, and a Python that has it in FCTUNE_{server.upper()}_PYTHON")
    found = compare(FORMATS[name], server, python, 650, seed=2)
    assert not found.unexplained, found.unexplained[:3]
    assert found.num_same > 0.6 * found.num_outputs or (name, server) in LOSSY


def test_the_page_of_the_servers_parsers_is_that_of_the_results_and_leaves_nothing_unexplained() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "parsers.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "reference" / "parsers.md").read_text(encoding="utf-8") == render_page(rows)
    assert len(rows) >= 20
    for row in rows:
        assert row["parser"] == FORMATS[row["format"]].get_server_parser(row["server"])
        assert row["outputs"] >= row["same"] > 0
        assert row["unexplained"] == 0
