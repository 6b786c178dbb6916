"""A server is announced when it is healthy, and ends with everything that it has started."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from fctune.apps.serve.server import IdleWatch, ServerEndedError, run_server
from fctune.base.errors import ConfigError
from fctune.cli import main
from tests.conftest import ROOT, TINY_BASE
from tests.ranks import find_port

# Serves /health after half a second, with a child process, which ignores being asked to end.
SERVER = """
import http.server, subprocess, sys, time
ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignoring])
open(sys.argv[2], "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
time.sleep(0.5)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
RUN = """
import sys
from fctune.apps.serve.server import run_server
command = [sys.executable, "-c", sys.argv[3], sys.argv[1], sys.argv[2]]
sys.exit(run_server(command, int(sys.argv[1]), lambda seconds: print(f"ready {seconds:.1f}", flush=True)))
"""


# Stands in for a Python with vLLM: has the module, and serves /health and vLLM's metrics where it is told. A request
# takes as long as its path says.
PYTHON = f"""#!{sys.executable}
import http.server, sys, time
if sys.argv[1] == "-c":
    sys.exit(0)
running = served = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global running, served
        text = b""
        if self.path == "/metrics" and "--without-metrics" not in sys.argv:
            lines = ["# TYPE vllm:num_requests_running gauge"]
            for engine, number in ((0, running), (1, 0)):
                label = '{{model_name="a b}}",engine="' + str(engine) + '"}} '
                lines += [f"vllm:num_requests_running{{label}}{{number}}.0", f"vllm:num_requests_waiting{{label}}0.0"]
                lines += [f"vllm:prompt_tokens_total{{label}}{{7 * served}}.0"]
            text = "\\n".join(lines).encode()
        elif self.path.startswith("/v1/"):
            running += 1
            time.sleep(float(self.path.removeprefix("/v1/")))
            running -= 1
            served += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text)
host, port = (sys.argv[sys.argv.index(option) + 1] for option in ("--host", "--port"))
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


def _obey_hangups() -> None:
    """Undo what a test run under nohup passes on to its children."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def run_until_ready(tmp_path: Path, prefix: tuple[str, ...] = ()) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the server until it is announced; yields the process and the id of the server's stubborn child."""
    child = tmp_path / "child"
    command = [*prefix, sys.executable, "-c", RUN, str(find_port()), str(child), SERVER]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=_obey_hangups)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ready")
        yield process, int(child.read_text())
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], limit_s: float = 10) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_server_that_is_asked_to_end_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    with run_until_ready(tmp_path) as (process, child):
        process.send_signal(number)
        assert process.wait(60) == 0
        assert wait_for(lambda: has_ended(child))


def test_a_terminal_that_closes_leaves_a_server_under_nohup_alone(tmp_path: Path) -> None:
    with run_until_ready(tmp_path, ("nohup",)) as (process, child):
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert wait_for(lambda: has_ended(child))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_server_ends_when_the_process_that_runs_it_is_killed(tmp_path: Path) -> None:
    with run_until_ready(tmp_path) as (process, child):
        (server,) = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        try:
            assert wait_for(lambda: has_ended(server.pid))
        finally:
            for left in (server.pid, child):  # the child ignores being asked
                if not has_ended(left):
                    os.kill(left, signal.SIGKILL)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A program that stands in for a Python with vLLM."""
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return str(path)


def serve(python: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "fctune.cli", "serve", str(TINY_BASE), "--python", python]
    return subprocess.Popen(
        [*command, "--port", str(find_port()), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Leads nowhere: whoever asks it for the server never gets an answer.
        env={**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"},
    )


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_a_server_at_another_address_is_announced_without_a_proxy_and_its_death_reported(python: str) -> None:
    process = serve(python, "--vllm=--host 127.0.0.2")
    assert process.stdout is not None
    assert "vllm.entrypoints" in process.stdout.readline()
    assert re.search(r"^ready after \d+ s: http://127\.0\.0\.2:\d+/v1 ", process.stdout.readline())
    (server,) = psutil.Process(process.pid).children()
    server.kill()
    _, said = process.communicate(timeout=60)
    assert re.search(r"^the server was killed by signal SIGKILL after \d+ s; its output is above\.\n\Z", said, re.M)
    assert process.returncode == 1


def ask(url: str, seconds: float) -> None:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/{seconds}", timeout=60) as answer:
        assert answer.status == 200


@pytest.mark.thorough
def test_an_idle_server_is_ended_and_one_with_requests_is_not(python: str) -> None:
    limit_s = 4.0
    process = serve(python, "--stop-idle", str(limit_s / 60), "--vllm=--host 127.0.0.1")
    assert process.stdout is not None
    try:
        assert "vllm.entrypoints" in process.stdout.readline()
        (url,) = re.findall(r"^ready after \d+ s: (\S+) ", process.stdout.readline())
        (server,) = psutil.Process(process.pid).children()
        began = time.monotonic()
        while time.monotonic() - began < 1.5 * limit_s:  # none of them is running when the metrics are read
            ask(url, 0)
            time.sleep(0.5)
        assert process.poll() is None
        ask(url, 1.5 * limit_s)  # one that takes longer than the limit
        ended = time.monotonic()
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 0
        assert time.monotonic() - ended > limit_s / 2
        assert said == f"stopped after {limit_s / 60:g} minutes without a request (--stop-idle)\n"
        assert has_ended(server.pid)
    finally:
        process.kill()
        process.wait()


def test_a_server_whose_metrics_show_no_requests_is_refused_with_stop_idle(python: str) -> None:
    port = find_port()
    command = [python, "--host", "127.0.0.1", "--port", str(port), "--without-metrics"]
    with pytest.raises(ConfigError, match=rf"--stop-idle: http://127\.0\.0\.1:{port}/metrics has no vllm:num_"):
        run_server(command, port, lambda _: None, idle_limit_s=2.0)


def test_an_error_of_the_metrics_does_not_end_a_server() -> None:
    answers = httpx.MockTransport(lambda request: httpx.Response(503, text="overloaded"))
    with httpx.Client(transport=answers) as client:
        watch = IdleWatch(client, "http://server/metrics", limit_s=2.0)
        time.sleep(0.5)  # longer than from one look to the next
        assert not watch.is_over()


def test_wrong_minutes_and_a_server_without_metrics_are_refused_before_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for minutes in ("-1", "nan", "inf"):
        assert main(["serve", str(TINY_BASE), f"--stop-idle={minutes}"]) == 2
        assert f"--stop-idle {minutes}: expected minutes, or 0 for never" in capsys.readouterr().err
    assert main(["serve", str(TINY_BASE), "--stop-idle", "5", "--vllm=--disable-log-stats"]) == 2
    assert "Leave out --disable-log-stats of --vllm" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_server_that_hangs_is_idle() -> None:
    hanging = SERVER.replace("self.send_response(", "self.path == '/metrics' and time.sleep(600); self.send_response(")
    port = find_port()
    command = [sys.executable, "-c", hanging, str(port), os.devnull]
    assert run_server(command, port, lambda _: None, idle_limit_s=1.0) is True


def test_a_healthy_server_that_ends_by_itself_is_an_error_with_its_code() -> None:
    once = SERVER.replace("serve_forever()", "handle_request(); sys.exit(3)").replace("sleep(600)", "sleep(0)")
    port, announced = find_port(), list[float]()
    with pytest.raises(ServerEndedError, match=r"^the server ended with code 3 after \d s; its output is above\.$"):
        run_server([sys.executable, "-c", once, str(port), os.devnull], port, announced.append)
    assert len(announced) == 1


def test_a_server_that_fails_or_hangs_before_it_is_healthy_is_an_error() -> None:
    announced: list[float] = []
    with pytest.raises(ConfigError, match="ended with code 3 before it was healthy"):
        run_server([sys.executable, "-c", "raise SystemExit(3)"], find_port(), announced.append)
    with pytest.raises(ConfigError, match="was killed by signal SIGTERM before it was healthy"):
        run_server([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"], find_port(), announced.append)
    with pytest.raises(ConfigError, match="not healthy after 1 s"):
        run_server([sys.executable, "-c", "import time; time.sleep(60)"], find_port(), announced.append, 1)
    with pytest.raises(ConfigError, match="nowhere: cannot be started"):
        run_server(["/nowhere"], find_port(), announced.append)
    assert not announced
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_taken_port_and_a_python_without_vllm_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            ConfigError, match=r"--port \d+: cannot listen on it \(Address .*\)\. Choose another port\.$"
        ):
            run_server([sys.executable], taken.getsockname()[1], lambda _: None)
    assert main(["serve", str(TINY_BASE)]) == 2
    assert "has no vLLM" in capsys.readouterr().err
    assert main(["serve", str(TINY_BASE), "--python", os.devnull]) == 2
    assert "cannot be started" in capsys.readouterr().err
