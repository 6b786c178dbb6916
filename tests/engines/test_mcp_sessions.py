"""A session with an MCP server keeps its state; a server that fails ends it in a sentence, in time, and is killed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fctune.engines.mcp_client import McpClients, McpFailure, McpLimits, McpSession
from tests.engines import faulty_stdio_server as faults
from tests.engines.mcp_server import ATTACKS, serve_bookings, serve_raw

COUNTER = f"stdio: {shlex.quote(sys.executable)} -S {shlex.quote(str(Path(faults.__file__)))}"
REAL_SERVER = Path(faults.__file__).with_name("booking_server.py")
BOOKINGS = f"stdio: {shlex.quote(sys.executable)} {shlex.quote(str(REAL_SERVER))}"

Open = Callable[..., McpSession]


@pytest.fixture
def open_session() -> Iterator[Open]:
    clients = McpClients("stdio: python")

    def start(address: str, call_s: float = 30.0, max_bytes: int = 1_000_000) -> McpSession:
        return clients.open(address, None, McpLimits(60.0, max_bytes), call_s)

    yield start
    clients.close()
    assert not [one for one in psutil.Process().children(recursive=True) if "server.py" in " ".join(one.cmdline())]


def check_bookings(session: McpSession, is_empty: bool = True) -> None:
    assert '"list_rooms"' in session.list_tools()[0]
    booked = session.call("book", {"room": "blue", "day": "friday"})
    assert booked.is_error is not is_empty
    assert session.call("list_bookings", {}).structured == {"blue/friday": "booked"}
    assert session.call("book", {"room": "blue", "day": "friday"}).is_error
    assert session.call("book", {"place": "blue"}).is_error


def test_a_process_has_a_state_of_its_own_and_sessions_of_a_url_may_share_one(open_session: Open) -> None:
    check_bookings(open_session(BOOKINGS))
    with serve_bookings() as url:
        check_bookings(open_session(url))
        check_bookings(open_session(url), is_empty=False)


def test_two_processes_do_not_share_a_state(open_session: Open) -> None:
    one, other = open_session(COUNTER), open_session(COUNTER)
    assert [one.call("add", {"by": 2}).text, one.call("add", {"by": 3}).text] == ["2", "5"]
    assert other.call("add", {"by": 1}).text == "1"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "call_s", "reason"),
    [
        (faults.HANG, 1.0, "no result within 1 s"),
        (faults.EXIT, 30.0, "it said: out of paper"),
        (faults.GARBAGE, 1.0, "no result within 1 s"),
        (faults.WRONG_SHAPE, 30.0, "content"),
        (faults.FLOOD, 1.0, "no result within 1 s"),
        (faults.INTERNAL, 30.0, "no such number"),
    ],
    ids=["hang", "exit", "garbage", "wrong shape", "flood", "internal error"],
)
def test_a_failing_server_ends_its_session_alone(open_session: Open, fault: int, call_s: float, reason: str) -> None:
    session, other = open_session(COUNTER, call_s), open_session(COUNTER)
    session.list_tools()
    begun = time.monotonic()
    with pytest.raises(McpFailure) as raised:
        session.call("add", {"by": fault})
    assert time.monotonic() - begun < 20
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(McpFailure):
        session.call("read", {})
    assert other.call("add", {"by": 2}).text == "2"


def test_arguments_that_the_server_refuses_are_a_result(open_session: Open) -> None:
    session = open_session(COUNTER)
    refused = session.call("add", {"by": faults.REFUSED})
    assert (refused.text, refused.is_error) == ("no such number", True)
    assert session.call("add", {"by": 1}).text == "1"


def test_resources_are_read_as_text_and_other_data_is_named(open_session: Open) -> None:
    server = f"stdio: {shlex.quote(sys.executable)} {shlex.quote(str(REAL_SERVER.with_name('stdio_server.py')))}"
    session = open_session(server)
    data = "[{}: not text, so it cannot be read]".format
    for name, text, is_error in (
        ("a file", "Code: 4711.", False),
        ("a file with a text", "found one file\nCode: 4711.", False),
        ("a link", "https://host/plan.txt", False),
        ("an image", data("image of type image/png"), True),
        ("audio", data("audio of type audio/wav"), True),
        ("a blob", data("resource of type application/pdf"), True),
        ("an image with a text", "found one file\n" + data("image of type image/png"), False),
    ):
        result = session.call(name, {})
        assert (result.text, result.is_error) == (text, is_error), name


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_a_server_that_hangs_does_not_outlive_a_process_that_is_killed() -> None:
    code = (
        "import sys; from fctune.engines.mcp_client import McpClients, McpLimits\n"
        "clients = McpClients(sys.argv[1])\n"
        "session = clients.open(sys.argv[1], None, McpLimits(), 60.0)\n"
        "print(session.call('read', {}).text, flush=True)\n"
        f"session.call('add', {{'by': {faults.HANG}}})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, COUNTER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        (server,) = psutil.Process(process.pid).children()
        process.kill()
    server.wait(30)
    assert not server.is_running()


@pytest.mark.parametrize("name", ["an endless stream of messages", "a huge body", "silence", "half a JSON"])
def test_a_hostile_url_ends_the_session_within_its_limits(open_session: Open, name: str) -> None:
    message, attack = ATTACKS[name]
    with serve_raw(attack, "tools/call") as server:
        session = open_session(server.url, 1.0 if "within" in message else 20.0)
        begun = time.monotonic()
        with pytest.raises(McpFailure) as raised:
            session.call("x", {})
        assert time.monotonic() - begun < 30
        assert "\n" not in str(raised.value)
        assert message.replace("MCP server", "") in str(raised.value).replace("result", "complete answer")


@pytest.mark.parametrize(
    ("address", "reason"), [("stdio: no-such-program-here", "No such file"), ("http://127.0.0.1:9/mcp", "connection")]
)
def test_a_server_that_is_not_there_is_named(open_session: Open, address: str, reason: str) -> None:
    with pytest.raises(McpFailure, match=f"(?i){reason}"):
        open_session(address).list_tools()
