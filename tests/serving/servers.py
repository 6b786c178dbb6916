"""Start real servers and talk to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import httpx

from tests.conftest import ROOT

START_LIMIT_S = 900.0
ENDS_S = 60.0


@contextmanager
def serve_vllm(
    model: Path | str,
    python: str,
    port: int,
    *options: str,
    adapters: int | None = None,
    stop_idle: float = 0,
    **environment: str,
) -> Iterator[str]:
    """Serve with ``fctune serve`` until the block ends; yields the address, and checks that the server ends cleanly."""
    words = ["--enforce-eager", "--max-model-len", "2048", "--dtype", "float32", "--max-num-seqs", "16"]
    words += options
    command = [sys.executable, "-u", "-m", "fctune.cli", "serve", str(model), "--python", python, "--port", str(port)]
    command.append(f"--vllm={' '.join(words)}")
    command += [] if adapters is None else ["--adapters", str(adapters)]
    command += ["--stop-idle", str(stop_idle)]
    # Threads that wait for each other on fixed cores are slow on a loaded machine, and tiny models need but one.
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own |= {"HF_HUB_OFFLINE": "1", **environment}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, log, lambda: b"ready after" in _read(log))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(ENDS_S)
    assert code == 0, "fctune serve ends with 0 when it is asked to"


@contextmanager
def serve_llama_cpp(model: Path, port: int, context: int = 2048) -> Iterator[str]:
    """Serve a GGUF file with llama.cpp's server until the block ends; yields the address."""
    command = [sys.executable, str(Path(__file__).with_name("llama_server.py")), str(model), str(port), str(context)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(process, log, lambda: _is_healthy(address))
            yield address
        finally:
            process.kill()
            process.wait(ENDS_S)


@contextmanager
def relay(address: str) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Pass requests on to a server; yields an address in front of it, and the path and body of each request so far.

    Connections break while the server is gone.
    """
    passed: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on("GET", b"")

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            passed.append((self.path, json.loads(sent)))
            self._pass_on("POST", sent)

        def _pass_on(self, method: str, sent: bytes) -> None:
            headers = {"Content-Type": "application/json"}
            with suppress(httpx.TransportError, ConnectionError):
                answer = httpx.request(method, address + self.path, content=sent, headers=headers, timeout=300)
                self.send_response(answer.status_code)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", passed
    finally:
        server.shutdown()
        server.server_close()


def complete(address: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the message of a completion without streaming."""
    answer = httpx.post(f"{address}/v1/chat/completions", json=_body(address, messages, tools, more), timeout=300)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def stream(address: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the message that a client puts together from the events of a stream."""
    content, reasoning, calls = "", "", {}
    body = _body(address, messages, tools, {**more, "stream": True})
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            for choice in json.loads(data)["choices"]:
                delta = choice["delta"]
                content += delta.get("content") or ""
                reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
                for piece in delta.get("tool_calls") or []:
                    call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
                    function = piece.get("function") or {}
                    call["name"] += function.get("name") or ""
                    call["arguments"] += function.get("arguments") or ""
    return {"content": content, "reasoning": reasoning, "tool_calls": [{"function": c} for c in calls.values()]}


def read_calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return name and arguments of each call in a message."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def _body(address: str, messages: Any, tools: Any, more: dict[str, Any]) -> dict[str, Any]:
    name = httpx.get(f"{address}/v1/models", timeout=60).json()["data"][-1]["id"]
    body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 256, **more}
    return {**body, "tools": tools} if tools else body


def _wait(process: subprocess.Popen[bytes], log: IO[bytes], is_ready: Callable[[], bool]) -> None:
    """Return once a server is ready; fail with the end of its output if it ends or takes too long."""
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if is_ready():
            return
        time.sleep(0.2)
    raise AssertionError(f"the server did not start:\n{_read(log)[-4000:].decode(errors='replace')}")


def _read(log: IO[bytes]) -> bytes:
    """Return what a process has written, without moving the place where it writes."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)


def _is_healthy(address: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{address}/health", timeout=2).status_code == 200
    return False
