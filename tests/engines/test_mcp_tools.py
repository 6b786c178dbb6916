"""Tools are listed from a real MCP server, page by page; a hostile one ends in a sentence, within limits."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fctune.base.errors import ConfigError
from fctune.data.conversation import Call
from fctune.data.sources.tool_file import read_tool_texts
from fctune.engines.mcp_client import _MUTED, McpLimits, choose_mcp_token
from fctune.engines.mcp_tools import call_mcp_tool, fetch_mcp_tools, read_offered_tools
from tests.engines.mcp_server import ATTACKS, TOKEN, RawHandler, nest, serve_mcp, serve_raw

LIMITS = McpLimits(max_s=20.0, max_bytes=1_000_000, max_pages=5)


@pytest.mark.parametrize("kind", ["json", "events", "locked"])
def test_all_pages_of_a_real_server_are_listed_and_nothing_is_called(kind: str) -> None:
    with serve_mcp(kind) as server:
        pages = fetch_mcp_tools(server.url, TOKEN if kind == "locked" else None)
    tools = read_tool_texts(pages, ["mcp"] * len(pages))
    assert [tool.name for tool in tools] == ["add", "subtract", "multiply"]
    assert tools[0].parameters == {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}
    assert server.methods == ["tools/list", "tools/list"]


def test_a_server_that_refuses_the_token_is_reported_without_it() -> None:
    with serve_mcp("locked") as server, pytest.raises(ConfigError, match="HTTP 401") as found:
        fetch_mcp_tools(server.url, "wrong-token")
    assert "wrong-token" not in str(found.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_answer_ends_in_a_sentence_within_its_limits(
    name: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    message, attack = ATTACKS[name]
    started = time.monotonic()
    limits = replace(LIMITS, max_s=1.0) if "within 1 s" in message else LIMITS
    with serve_raw(attack) as server, pytest.raises(ConfigError, match=message) as found:
        fetch_mcp_tools(server.url, TOKEN, limits)
    assert time.monotonic() - started < limits.max_s + 4
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 700
    assert TOKEN not in str(found.value)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith("mcp")]


def test_the_first_request_is_limited_as_well() -> None:
    for name in ("a slow drip of JSON", "a huge body", "deeply nested JSON"):
        with (
            serve_raw(ATTACKS[name][1], "server/discover") as server,
            serve_raw(ATTACKS[name][1], "initialize") as other,
        ):
            for url in (server.url, other.url):
                with pytest.raises(ConfigError, match="no usable list of tools"):
                    fetch_mcp_tools(url, None, McpLimits(0.3, 1_000_000))


def test_many_messages_before_the_answer_take_linear_time() -> None:
    note = b'data: {"jsonrpc": "2.0", "method": "notifications/x", "params": {"data": "%s"}}\n\n' % (b"x" * 26_000)

    def answer(handler: RawHandler) -> None:
        last = b"data: " + handler.encode({"tools": [{"name": "x", "inputSchema": {"type": "object"}}]}) + b"\n\n"
        handler.stream(iter([*[note] * 600, last]), pause_s=0.001)

    with serve_raw(answer) as server:
        started = time.process_time()
        (page,) = fetch_mcp_tools(server.url)
    assert time.process_time() - started < 4, "parsing all of it after each message takes many times as long"
    assert [tool.name for tool in read_tool_texts([page], ["mcp"])] == ["x"]


def test_a_schema_that_the_client_accepts_is_read_without_a_traceback() -> None:
    def answer(handler: RawHandler) -> None:
        schema = b'{"type": "object", "properties": {"a": %s}}' % nest(80)
        listed = b'{"jsonrpc": "2.0", "id": %d, "result": {"tools": [{"name": "x", "inputSchema": %s}]}}'
        handler.send(listed % (handler.id, schema))

    with serve_raw(answer) as server:
        (page,) = fetch_mcp_tools(server.url)
    assert [tool.name for tool in read_tool_texts([page], ["mcp"])] == ["x"]


@pytest.mark.parametrize("attacked", ["server/discover", "initialize", "tools/list"])
@pytest.mark.parametrize("status", [302, 307, 308])
def test_a_redirect_carries_the_token_to_no_other_origin(attacked: str, status: int) -> None:
    with serve_raw(lambda handler: handler.send(b"{}"), "nothing") as thief:
        away = thief.url

        def redirect(handler: RawHandler) -> None:
            handler.send(b"", status=status, Location=away)

        with serve_raw(redirect, attacked) as server, pytest.raises(ConfigError):
            fetch_mcp_tools(server.url, TOKEN, LIMITS)
    assert server.requests[0][1]["Authorization"] == f"Bearer {TOKEN}"
    assert thief.requests == []


@pytest.mark.parametrize("host", ["tools.example.com", "10.0.0.7", "localhost.example.com", "127.0.0.1.example.com"])
def test_a_token_is_never_sent_over_plain_http_beyond_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=r"never sent over plain http\. Use https") as found:
        fetch_mcp_tools(f"http://{host}/mcp", TOKEN)
    assert TOKEN not in str(found.value)


def test_an_address_with_a_password_or_of_another_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds a name or password") as found:
        fetch_mcp_tools("https://me:secret@tools.example.com/mcp")
    assert "secret" not in str(found.value)
    for url in ("https://", "http://[::1/mcp", "https://host:port/mcp"):
        with pytest.raises(ConfigError, match="not a URL"):
            fetch_mcp_tools(url)


A, B = "https://a.example.com/mcp", "https://b.example.com:8443/mcp"


@pytest.mark.parametrize(
    ("setting", "tokens"),
    [
        (None, (None, None)),
        ("https://a.example.com=x==", ("x==", None)),
        ("https://a.example.com:443=x https://b.example.com:8443=y", ("x", "y")),
        ("https://b.example.com=y http://a.example.com=x", (None, None)),  # another port, another scheme
    ],
)
def test_each_server_gets_its_own_token(setting: str | None, tokens: tuple[str | None, str | None]) -> None:
    assert (choose_mcp_token(setting, A, [A, B]), choose_mcp_token(setting, B, [A, B])) == tokens


def test_a_token_without_an_address_is_for_one_server_only() -> None:
    assert choose_mcp_token("x", A, [A, f"{A}/other"]) == "x"
    for setting in ("secret", "secret https://a.example.com=y"):
        with pytest.raises(ConfigError, match="does not say which server") as found:
            choose_mcp_token(setting, A, [A, B])
        assert "secret" not in str(found.value)


STDIO_SERVER = Path(__file__).with_name("stdio_server.py")


def test_a_server_is_started_by_a_command_and_called_over_stdio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GARDEN_TOKEN", "green-thumb-42")
    monkeypatch.setenv("FCTUNE_API_KEY", "of-the-teacher")
    offered = read_offered_tools([f"stdio: {shlex.quote(sys.executable)} {shlex.quote(str(STDIO_SERVER))}"], None)
    [tool] = offered.tools
    assert tool.name == "read_moisture"
    assert tool.parameters["properties"]["bed"]["description"] == "Bed, 1 to 12"
    assert offered.remote["read_moisture"].is_read_only
    result = json.loads(call_mcp_tool(offered.remote["read_moisture"], Call("read_moisture", {"bed": 3})))
    assert result == {"bed": 3, "GARDEN_TOKEN": "green-thumb-42", "FCTUNE_API_KEY": None}


def test_a_command_that_fails_is_reported_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GARDEN_TOKEN", "green-thumb-42")
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(STDIO_SERVER))}"
    with pytest.raises(ConfigError, match=r"it said: cannot log in with \*\*\*") as error:
        read_offered_tools([f"stdio: {command} fail"], None)
    assert "green-thumb" not in str(error.value)
    for given, said in (
        ("stdio: no-such-program-here x --token abc", "stdio: no-such-program-here x ...: no usable list"),
        ("stdio: TOKEN=abc python server.py", "stdio: TOKEN=...: a setting"),
        ("stdio: 'python", "not a command"),
        ("stdio:", "no command"),
        (str(STDIO_SERVER), "a program, not a file of tools.*--tools 'stdio: python "),
        ("python server.py --token abc", r"a command, not a file of tools.*'stdio: python server.py \.\.\.'"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            read_offered_tools([given], None)
        assert "abc" not in str(error.value)


def test_the_clients_log_is_back_when_the_last_of_several_calls_has_ended() -> None:
    logger, first, second = logging.getLogger("mcp"), ExitStack(), ExitStack()
    before = logger.level
    first.enter_context(_MUTED)
    second.enter_context(_MUTED)
    first.close()
    assert not logger.isEnabledFor(logging.CRITICAL)
    second.close()
    assert logger.level == before
