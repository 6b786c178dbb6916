"""The real-model benchmark's server: started where an answer is missing, ended with the benchmark however that ends."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.real_arguments import make_parser
from benchmarks.real_measuring import Subject, measure
from benchmarks.real_server import link_with_template, serve, wait_until_free
from fctune.base.errors import ConfigError
from fctune.cli.eval_options import find_suite
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.template_args import read_template_args
from fctune.runs.record import read_run
from fctune.tasks.evaluation.accuracy import find_accuracies
from fctune.tasks.evaluation.results import read_settings
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from tests.conftest import ROOT, TINY_BASE
from tests.ranks import find_port
from tests.runs.sample_runs import change_run, make_run

SUITE = load_suite(find_suite("smoke"))
# In place of a Python with vLLM: finds vLLM, and serves /health and one answer to everything, or ends with a message.
FAKE = """#!/bin/sh
[ "$1" = -c ] && exit 0
{end}
while [ "$1" != --port ]; do shift; done
exec {python} -c '
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"data": [{{"id": "before"}}]}}).encode())
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        choice = {{"message": {{"role": "assistant", "content": "No."}}, "finish_reason": "stop"}}
        self.wfile.write(json.dumps({{"choices": [choice]}}).encode())
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_server_that_ends_is_one_sentence_with_its_last_words(tmp_path: Path) -> None:
    python = make_python(tmp_path, "echo no room for the model; exit 3")
    with (
        pytest.raises(ConfigError, match=r"log: the server ended: .*ended with code 3"),
        serve(TINY_BASE, python, "", find_port(), tmp_path / "new" / "log"),
    ):
        pass


def test_the_template_is_served_with_the_model_and_its_own_files_stay_as_they_are(tmp_path: Path) -> None:
    source = Path("fctune/data/templates/hermes.jinja").read_text()
    model_dir = tmp_path / "model"
    shutil.copytree(TINY_BASE, model_dir)
    (model_dir / "server_parsers.json").write_text("the model's own")
    before = {file.name: file.read_bytes() for file in model_dir.iterdir()}
    switches = {"enable_thinking": False}
    folder = link_with_template(model_dir, ChosenTemplate("hermes", source), switches, tmp_path / "served")
    assert (folder / "chat_template.jinja").read_text() == source
    assert read_template_args(folder) == switches
    assert {file.name: file.read_bytes() for file in model_dir.iterdir()} == before
    folder = link_with_template(model_dir, ChosenTemplate("hermes", source), {}, tmp_path / "served")
    # Text without marks is an answer: a server that looked for reasoning would take all of it for that.
    assert json.loads((folder / "server_parsers.json").read_text())["vllm"] == {
        "tool_call_parser": "hermes",
        "reasoning_parser": None,
    }


def test_a_port_that_stays_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: another server listens there"):
            wait_until_free(port, limit_s=0.1)


def make_arguments(*options: str) -> argparse.Namespace:
    """Parse options of the benchmark; the answers are short."""
    given = ["--model", str(TINY_BASE), "--max-new-tokens", "4", *options]
    return make_parser("benchmarks.real_model", None).parse_args(given)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure the tiny base model in process and return the directory of its answers."""
    out = tmp_path_factory.mktemp("real") / "eval" / "before"
    assert len(measure(Subject(TINY_BASE), [SUITE], out, make_arguments())) == 4
    return out


def test_a_measured_model_is_not_loaded_again(answered: Path) -> None:
    started = time.monotonic()
    assert len(measure(Subject(TINY_BASE), [SUITE], answered, make_arguments("--vllm", "/nowhere/python"))) == 4
    assert time.monotonic() - started < 5


@pytest.mark.thorough
def test_an_unanswered_case_needs_the_model(answered: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(answered, tmp_path / "before")
    lines = (copy / "smoke.jsonl").read_text().splitlines(keepends=True)
    (copy / "smoke.jsonl").write_text("".join(lines[1:]))
    arguments = make_arguments("--vllm", "/nowhere/python", "--port", str(find_port()))
    with pytest.raises(ConfigError, match="the server ended"):
        measure(Subject(TINY_BASE), [SUITE], copy, arguments)


@pytest.mark.thorough
def test_an_interrupted_measurement_resumes_on_another_port(tmp_path: Path) -> None:
    out, python = tmp_path / "before", make_python(tmp_path)
    whole = measure(Subject(TINY_BASE), [SUITE], out, make_arguments("--vllm", python, "--port", str(find_port())))
    lines = (out / "smoke.jsonl").read_text().splitlines(keepends=True)
    (out / "smoke.jsonl").write_text("".join(lines[1:]))
    again = measure(Subject(TINY_BASE), [SUITE], out, make_arguments("--vllm", python, "--port", str(find_port())))
    assert {row["id"] for row in again} == {row["id"] for row in whole} == {case.id for case in SUITE.cases}
    assert set((out / "smoke.jsonl").read_text().splitlines(keepends=True)) > set(lines[1:])  # asked only once


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"template": ChosenTemplate("other", "{{ messages }}")}, "another model, chat template or server"),
        ({"template_args": {"enable_thinking": False}}, "another model, chat template or server"),
        ({"server": "http://127.0.0.1:1"}, "another model, chat template or server"),
    ],
)
def test_answers_of_another_model_are_not_taken_for_this_one(answered: Path, change: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        measure(replace(Subject(TINY_BASE), **change), [SUITE], answered, make_arguments())


def test_answers_to_other_cases_or_of_another_length_are_refused(answered: Path) -> None:
    with pytest.raises(ConfigError, match="other cases"):
        measure(Subject(TINY_BASE), [Suite(SUITE.name, SUITE.cases[:1])], answered, make_arguments())
    with pytest.raises(ConfigError, match="another --max-new-tokens"):
        measure(Subject(TINY_BASE), [SUITE], answered, make_arguments("--max-new-tokens", "5"))


def test_the_answers_are_found_as_evaluations_of_the_run_and_of_its_base(answered: Path, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 4)
    change_run(directory, config={**read_run(tmp_path / "run").config, "model": {"path": str(TINY_BASE)}})
    merged = shutil.copytree(TINY_BASE, tmp_path / "run" / "export" / "merged")
    shutil.copytree(answered, tmp_path / "eval" / "before")
    measure(Subject(merged), [SUITE], tmp_path / "eval" / "after", make_arguments())
    (found,) = find_accuracies(read_run(tmp_path / "run"))
    assert (found.suite, len(found.after.rows)) == ("smoke", 4)
    assert found.before is not None
    assert read_settings(found.before.path) == read_settings(answered / "smoke.jsonl")
