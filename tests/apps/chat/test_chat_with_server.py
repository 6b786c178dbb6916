"""``fctune chat`` with a server: errors and Ctrl-C end an answer, not the conversation."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.cli import main
from tests.cli.processes import INTERRUPTED, read_until, wait_until
from tests.conftest import ROOT
from tests.engines.fault_server import Handler, serve
from tests.engines.mcp_server import TOKEN, serve_mcp

TOOLS = [{"name": "get_time", "parameters": {"type": "object", "properties": {}}}]
Answer = Callable[[Handler], None]


def say(text: str) -> Answer:
    return lambda handler: handler.say(text)


def call(name: str = "get_time", arguments: dict[str, Any] | None = None) -> Answer:
    function = {"name": name, "arguments": json.dumps(arguments or {})}
    return lambda handler: handler.say(None, tool_calls=[{"id": "1", "type": "function", "function": function}])


def refuse(status: int) -> Answer:
    return lambda handler: handler.send(status, json.dumps({"error": {"message": "no such model"}}))


@pytest.mark.parametrize(
    ("typed", "answers", "options", "reason", "code"),
    [
        ("/cancel\n", [call()], [], "call dropped: no result given", 0),
        ("", [refuse(400)], [], "no answer: HTTP 400: no such model", 1),
        ("nine\n", [call(), refuse(400)], [], "no answer: HTTP 400: no such model", 1),
        ("nine\n", [call(), refuse(404)], [], "HTTP 404: no such model", 1),
        ("", [call()] * 21, ["--simulate"], "stopped after 20 rounds of calls without a final answer", 0),
    ],
    ids=["cancelled", "error", "error after a result", "server of another model", "endless calls"],
)
def test_a_turn_without_a_final_answer_is_taken_back(
    typed: str,
    answers: list[Answer],
    options: list[str],
    reason: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = [say("Hello."), *answers, say("Fine.")]
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"Hi\nTime?\n{typed}Again.\n"))
    with serve(lambda handler, number, body: script[number](handler)) as log:
        assert main(["chat", log.url, "--tools", str(tmp_path / "tools.json"), *options]) == code
    shown = capsys.readouterr().out
    assert shown.index(reason) < shown.index("your message was taken back") < shown.index("Fine.")
    assert [message["content"] for message in log.bodies[-1]["messages"]] == ["Hi", "Hello.", "Again."]


def test_the_tools_of_an_mcp_server_are_offered_and_never_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [call("add", {"a": 1}), say("Three.")]
    monkeypatch.setenv("FCTUNE_MCP_TOKEN", TOKEN)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/tools\nAdd one and two.\n3\n"))
    with serve_mcp("locked") as tools, serve(lambda handler, number, body: script[number](handler)) as log:
        assert main(["chat", log.url, "--tools", tools.url]) == 0
    shown = capsys.readouterr().out
    assert "3 tools." in shown
    assert "add(a)\nsubtract(a)\nmultiply(a)\n" in shown
    assert 'add({"a": 1})' in shown
    assert [tool["function"]["name"] for tool in log.bodies[0]["tools"]] == ["add", "subtract", "multiply"]
    assert log.bodies[1]["messages"][-1]["content"] == "3"
    assert "tools/call" not in tools.methods
    assert TOKEN not in shown + json.dumps(log.bodies)


def test_ctrl_c_cancels_an_answer_and_at_the_prompt_ends_the_chat() -> None:
    is_cancelled = threading.Event()

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        if number == 0:
            is_cancelled.wait(30)
        handler.say("Fine.")

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with serve(behave) as log:
        command = [sys.executable, "-m", "fctune.cli", "chat", log.url]
        chat = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        try:
            read_until(ours, "> ")
            os.write(ours, b"Hi\n")
            wait_until(lambda: log.bodies, chat)
            chat.send_signal(signal.SIGINT)
            read_until(ours, "answer cancelled\r\nyour message was taken back\r\n> ")
            is_cancelled.set()
            os.write(ours, b"Again.\n")
            read_until(ours, "Fine.\r\n> ")
            assert [message["content"] for message in log.bodies[1]["messages"]] == ["Again."]
            chat.send_signal(signal.SIGINT)
            read_until(ours, "interrupted")
            assert chat.wait(timeout=30) in INTERRUPTED
        finally:
            chat.kill()
            chat.wait()
            os.close(ours)


def test_ctrl_c_ends_a_chat_whose_lines_are_not_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        handler.say("Fine.")

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAgain.\n"))
    with serve(behave) as log:
        assert main(["chat", log.url]) == 130
    assert len(log.bodies) == 1
    assert "interrupted" in capsys.readouterr().err
