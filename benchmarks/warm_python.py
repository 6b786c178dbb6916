"""Run Python commands in forks of one process that has imported the libraries they need.

    python -P -m benchmarks.warm_python SOCKET MODULE ...       the server, which ``WarmPython`` starts
    python -I -S benchmarks/warm_python.py SOCKET PYTHON ARGUMENT ...   the interpreter's stand-in, for processes that
                                                                a command starts by ``sys.executable``

A command runs as by ``python -m MODULE ARGUMENT ...`` or ``python -c CODE ARGUMENT ...``, with its own environment,
session, working directory and output, and so do the processes that it starts; only the imports are shared. ``fctune
train`` spends up to 15 s of a CPU on them. Linux only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

if __name__ == "__main__" and sys.flags.no_site:  # the stand-in, which must start in an instant
    FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

    def stand_in(address: str, python: str, arguments: list[str]) -> int:
        """Run ``-m MODULE`` or ``-c CODE`` by the server, return its exit code; run the rest in a new interpreter."""
        kind = next((index for index, option in enumerate(arguments) if option not in ("-P", "-u")), len(arguments))
        if arguments[kind : kind + 1] not in (["-m"], ["-c"]):
            os.execv(python, [python, *arguments])
        environment = {"WARM_PYTHON_LABEL": f"process {os.getpid()}", **os.environ}
        request = {
            "module" if arguments[kind] == "-m" else "code": arguments[kind + 1],
            "arguments": arguments[kind + 2 :],
            "environment": environment,
            "cwd": os.getcwd(),
            "imports_from_cwd": "-P" not in arguments[:kind] and "PYTHONSAFEPATH" not in environment,
            "executable": os.path.join(os.path.dirname(address), "python"),
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            for attempt in range(6000):  # the server may still be making its imports, on a busy machine for minutes
                try:
                    connection.connect(address)
                    break
                except OSError:
                    if attempt == 5999:
                        raise
                    time.sleep(0.1)
            socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
            for number in FORWARDED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, lambda received, _: connection.send(bytes([received])))
            reply = connection.recv(1024)
        if not reply:
            print(f"{address}: the server of warm processes has ended, and with it this command", file=sys.stderr)
        code = int(json.loads(reply)["code"]) if reply else 1
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        return code

    sys.exit(stand_in(sys.argv[1], sys.argv[2], sys.argv[3:]))

import atexit
import contextlib
import gc
import importlib
import runpy
import selectors
import subprocess
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base.launcher_watch import set_death_signal, stop_with_parent

_LABEL = "WARM_PYTHON_LABEL"  # environment variable that a command and the processes it starts have in common
_FRESH = "WARM_PYTHON_FRESH"  # environment variable: packages to import anew, found by PYTHONPATH, separated by spaces
_LARGEST = 1 << 20  # bytes of a request


class WarmPython:
    """The server, started on first use; its methods may be called by several threads.

    Args:
        folder: Directory for the socket and the interpreter's stand-in.
        modules: Modules to import once.
        environment: Environment variables of the server, which libraries read when they are imported.
    """

    def __init__(self, folder: Path, modules: Sequence[str], environment: Mapping[str, str]):
        self._folder, self._modules, self._environment = folder, modules, environment
        self._server: subprocess.Popen[bytes] | None = None
        self._ready: int | None = None
        self._lock = threading.Lock()

    @property
    def _address(self) -> str:
        return str(self._folder / "warm.sock")

    def run(
        self, module: str, arguments: Sequence[str], label: str, environment: Mapping[str, str], cwd: Path, log: Path,
        timeout_s: float, poll: Callable[[], None] = lambda: None,
    ) -> tuple[int, float]:  # fmt: skip
        """Run a module until it ends.

        Args:
            module: Name of the module to run as ``__main__``.
            arguments: Its command line.
            label: Name under which the CPU time of the command and of its processes is summed up.
            environment: Its environment variables.
            cwd: Its working directory.
            log: File that its output is appended to.
            timeout_s: Seconds after which it and its processes are killed.
            poll: Called twenty times a second.

        Returns:
            The exit code, negative for a signal, and the CPU seconds of everything that ran under the label so far.

        Raises:
            TimeoutError: It ran too long.
        """
        self.start()
        self._wait_until_ready()
        ends = time.monotonic() + timeout_s
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": {**environment, _LABEL: label},
            "cwd": str(cwd),
            "executable": str(self.start()),
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(self._address)
            with open(log, "ab") as out, open(os.devnull, "rb") as nothing:
                socket.send_fds(
                    connection, [json.dumps(request).encode()], [nothing.fileno(), out.fileno(), out.fileno()]
                )
            connection.settimeout(0.05)
            while time.monotonic() < ends:
                poll()
                try:
                    reply = json.loads(connection.recv(1024))
                except TimeoutError:
                    continue
                return int(reply["code"]), float(reply["cpu_s"])
        raise TimeoutError

    def start(self) -> Path:
        """Start the server, if none runs, without waiting for its imports.

        Its processes end when the thread that starts it ends.

        Returns:
            The interpreter's stand-in: runs ``-m MODULE`` and ``-c CODE`` like ``python``, by the server.
        """
        stand_in = self._folder / "python"
        with self._lock:
            if self._server is not None:
                return stand_in
            stand_in.write_text(
                f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {self._address} {sys.executable} "$@"\n'
            )
            stand_in.chmod(0o755)
            self._ready, writing = os.pipe()
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "benchmarks.warm_python", self._address, str(writing), *self._modules],
                env=dict(self._environment), pass_fds=[writing], preexec_fn=stop_with_parent(), start_new_session=True,
            )  # fmt: skip
            os.close(writing)
        return stand_in

    def _wait_until_ready(self) -> None:
        with self._lock:
            if self._ready is None:
                return
            assert self._server is not None
            with open(self._ready, "rb") as ready:
                if not ready.read():
                    raise RuntimeError(f"the server of warm processes ended with code {self._server.wait()}")
            self._ready = None

    def close(self) -> None:
        """End the server, and with it all commands."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


@dataclass(slots=True)
class _Command:
    """A running command of the server."""

    pid: int
    pid_fd: int
    label: str
    connection: socket.socket


def _serve(address: str, ready: int) -> dict[str, Any]:
    """Fork a process for each request, and return the request in the new process; never returns in the server."""
    commands: dict[int, _Command] = {}  # by the descriptors of its connection and its process
    cpu_s: defaultdict[str, float] = defaultdict(float)
    selector = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    selector.register(listener, selectors.EVENT_READ)
    os.write(ready, b"1")
    os.close(ready)
    while True:
        for key, _ in selector.select():
            if key.fd == listener.fileno():
                connection, _ = listener.accept()
                message, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, 3)
                if not message:
                    connection.close()
                    continue
                request: dict[str, Any] = json.loads(message)
                pid = os.fork()
                if pid == 0:
                    for each in (listener, connection, *(command.connection for command in commands.values())):
                        each.close()
                    selector.close()
                    for target, descriptor in enumerate(descriptors):
                        os.dup2(descriptor, target)
                        os.close(descriptor)
                    return request
                for descriptor in descriptors:
                    os.close(descriptor)
                started = _Command(pid, os.pidfd_open(pid), request["environment"].get(_LABEL, ""), connection)
                for descriptor in (started.pid_fd, connection.fileno()):
                    commands[descriptor] = started
                    selector.register(descriptor, selectors.EVENT_READ)
            elif (command := commands.get(key.fd)) is None:
                continue  # it has ended in this turn
            elif key.fd == command.pid_fd:
                _, status, usage = os.wait4(command.pid, 0)
                cpu_s[command.label] += usage.ru_utime + usage.ru_stime
                reply = {"code": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s[command.label]}
                for descriptor in (command.pid_fd, command.connection.fileno()):
                    if commands.pop(descriptor, None) is not None:
                        selector.unregister(descriptor)
                os.close(command.pid_fd)
                with contextlib.suppress(OSError):  # nobody waits for it
                    command.connection.send(json.dumps(reply).encode())
                command.connection.close()
            elif received := command.connection.recv(1):
                os.kill(command.pid, received[0])
            else:  # who asked for it is gone, so it and all it has started end
                selector.unregister(key.fd)
                del commands[key.fd]
                for other in {each.pid: each for each in commands.values() if each.label == command.label}.values():
                    os.kill(other.pid, signal.SIGKILL)


def _reread_environment() -> None:
    """Let the hub's clients see this process's variables, which they read when they are imported."""
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    if "huggingface_hub.hf_api" in sys.modules:
        sys.modules["huggingface_hub.hf_api"].api.__init__()


def _run(request: Mapping[str, Any]) -> None:
    """Run a request's module or code in this new process."""
    set_death_signal(signal.SIGKILL)
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _reread_environment()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    fresh = os.environ.get(_FRESH, "").split()
    for name in [name for name in sys.modules if name.partition(".")[0] in fresh]:
        del sys.modules[name]
    if fresh:
        sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.executable = request.get("executable", sys.executable)
    if request.get("imports_from_cwd"):
        sys.path.insert(0, request["cwd"])
    if "code" in request:
        sys.argv = ["-c", *request["arguments"]]
        sys.modules["__main__"] = main_module = types.ModuleType("__main__")
        exec(compile(request["code"], "<string>", "exec"), main_module.__dict__)
        return
    sys.argv = [request["module"], *request["arguments"]]
    sys.modules.pop(request["module"], None)  # as in a new interpreter, which runs it before importing it
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _end_quickly(error: SystemExit | None) -> None:
    """End this process as an interpreter does, but without taking apart the imported modules, which takes 0.3 s."""
    code = None if error is None else error.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # which the interpreter itself reports, as for any command whose reader is gone
        sys.exit(code)
    os._exit(code or 0)


def main() -> None:
    """Import modules, serve, and run a request in each new process."""
    address, ready, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    ended: SystemExit | None = None
    try:
        _run(_serve(address, int(ready)))
    except SystemExit as error:
        ended = error
    _end_quickly(ended)


if __name__ == "__main__":
    main()
