"""A server is announced when it is healthy, and ends with everything that it has started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fctune.cli import main
from fctune.errors import ConfigError
from fctune.launch.server_process import run_server
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
from fctune.launch.server_process import run_server
command = [sys.executable, "-c", sys.argv[3], sys.argv[1], sys.argv[2]]
sys.exit(run_server(command, int(sys.argv[1]), lambda seconds: print(f"ready {seconds:.1f}", flush=True)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_asked_to_end_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    port, child = find_port(), tmp_path / "child"
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(port), str(child), SERVER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    process.send_signal(number)
    assert process.wait(60) == 0
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(child.read_text())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(child.read_text()))


def test_a_server_that_fails_or_hangs_before_it_is_healthy_is_an_error() -> None:
    announced: list[float] = []
    with pytest.raises(ConfigError, match="ended with code 3 before it was healthy"):
        run_server([sys.executable, "-c", "raise SystemExit(3)"], find_port(), announced.append)
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
        with pytest.raises(ConfigError, match="cannot be listened on"):
            run_server([sys.executable], taken.getsockname()[1], lambda _: None)
    assert main(["serve", str(TINY_BASE)]) == 2
    assert "has no vLLM" in capsys.readouterr().err
    assert main(["serve", str(TINY_BASE), "--python", os.devnull]) == 2
    assert "cannot be started" in capsys.readouterr().err
