"""The real-model benchmark's server: started where an answer is missing, ended with the benchmark however that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.real_arguments import make_parser
from benchmarks.real_model import measure
from benchmarks.real_server import link_with_template, serve
from fctune.data.chosen_template import ChosenTemplate
from fctune.errors import ConfigError
from fctune.evaluation.results import ResultsFile
from fctune.evaluation.run import describe_run
from fctune.evaluation.suites import Suite
from tests.conftest import ROOT, TINY_BASE
from tests.ranks import find_port

# In place of a Python with vLLM: finds vLLM, and serves /health, or ends with a message.
FAKE = """#!/bin/sh
[ "$1" = -c ] && exit 0
{end}
while [ "$1" != --port ]; do shift; done
exec {python} -c '
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
' "$2"
"""
BENCHMARK = """
import sys, time
from pathlib import Path
from benchmarks.real_server import serve
with serve(Path(sys.argv[1]), sys.argv[2], "", int(sys.argv[3]), Path(sys.argv[4])) as url:
    print(url, flush=True)
    time.sleep(600)
"""


def make_python(folder: Path, end: str = "") -> str:
    """Write a program that acts as a Python with vLLM."""
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, end=end))
    path.chmod(0o755)
    return str(path)


def is_served(port: int) -> bool:
    """Return True if something answers on a port."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_server_ends_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    port = find_port()
    command = [sys.executable, "-c", BENCHMARK, str(TINY_BASE), make_python(tmp_path), str(port)]
    process = subprocess.Popen([*command, str(tmp_path / "log")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "served after" in process.stdout.readline()
    assert is_served(port)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    gone, alive = psutil.wait_procs(children, 60)
    assert gone
    assert not alive
    assert not is_served(port)


def test_a_server_that_ends_is_one_sentence_with_its_last_words(tmp_path: Path) -> None:
    python = make_python(tmp_path, "echo no room for the model; exit 3")
    with (
        pytest.raises(ConfigError, match=r"log: the server ended: .*ended with code 3"),
        serve(TINY_BASE, python, "", find_port(), tmp_path / "new" / "log"),
    ):
        pass


def test_the_template_is_served_with_the_model_and_its_own_files_stay_as_they_are(tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in TINY_BASE.iterdir()}
    source = Path("fctune/data/templates/hermes.jinja").read_text()
    folder = link_with_template(TINY_BASE, ChosenTemplate("hermes", source), tmp_path / "served")
    assert (folder / "chat_template.jinja").read_text() == source
    assert {file.name: file.read_bytes() for file in TINY_BASE.iterdir()} == before
    # Text without marks is an answer: a server that looked for reasoning would take all of it for that.
    assert json.loads((folder / "server_parsers.json").read_text())["vllm"] == {
        "tool_call_parser": "hermes",
        "reasoning_parser": None,
    }


def test_no_server_is_started_where_every_case_has_its_answer(tmp_path: Path) -> None:
    suite = Suite("smoke", ())
    arguments = make_parser("benchmarks.real_model", None).parse_args(["--model", "x", "--vllm", "/nowhere/python"])

    class Nothing:
        def describe(self) -> dict[str, str]:
            return {}

    results = ResultsFile(tmp_path / "smoke.jsonl")
    with pytest.raises(ConfigError, match="the server ended"):
        measure(TINY_BASE, [suite], tmp_path, None, arguments)
    settings = describe_run(suite, Nothing(), None, arguments.max_new_tokens)  # type: ignore[arg-type]
    results.path.write_text("")
    (tmp_path / "smoke.settings.json").write_text(json.dumps(settings))
    started = time.monotonic()
    assert measure(TINY_BASE, [suite], tmp_path, None, arguments) == []
    assert time.monotonic() - started < 5
