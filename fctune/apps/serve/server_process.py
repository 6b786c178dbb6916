"""Run a server until it ends or is asked to: started once its port is free, announced once it is healthy."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

import httpx

from fctune.base.errors import ConfigError
from fctune.base.processes import Child

_POLL_S = 0.5
_GRACE_S = 30.0


class ServerEndedError(Exception):
    """A healthy server that ended without being asked to."""


def run_server(
    command: Sequence[str],
    port: int,
    announce: Callable[[float], None],
    start_limit_s: float = 1800.0,
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> None:
    """Run a server with OpenAI's API until this process is asked to end: by SIGTERM, SIGHUP or Ctrl-C.

    Every process that the server started ends with it. If this process is killed, Linux asks the server to end.

    Args:
        command: Program and options; it gets a process group of its own.
        port: The port that it listens on.
        announce: Called with the seconds that it took, once ``/health`` answers.
        start_limit_s: Seconds after which a server that is not healthy is ended.
        environment: Variables over those of this process.
        host: Where this machine reaches the server; IPv6 addresses are in brackets.

    Raises:
        ConfigError: The port is taken, the program cannot be started, or the server ended or hung before it was
            healthy.
        ServerEndedError: The server ended by itself after it was healthy.
    """
    _require_free(port)
    signals: list[int] = []

    def remember(number: int, _: FrameType | None) -> None:
        signals.append(number)

    previous = {number: signal.signal(number, remember) for number in _find_stop_signals()}
    try:
        process = _start(command, {**os.environ, **(environment or {})})
        # The server is on this machine, which no proxy leads to; reading the certificates takes 28 ms for each client.
        client = httpx.Client(timeout=2.0, trust_env=False)
        try:
            started = time.monotonic()
            is_announced = False
            while not signals and (code := process.code) is None:
                if not is_announced and _is_healthy(client, f"http://{host}:{port}/health"):
                    announce(time.monotonic() - started)
                    is_announced = True
                if not is_announced and time.monotonic() - started > start_limit_s:
                    raise ConfigError(f"the server is not healthy after {start_limit_s:.0f} s; its output is above.")
                time.sleep(_POLL_S)
            if signals:
                return
            assert code is not None
            ending = _describe_ending(code)
            if not is_announced:
                raise ConfigError(f"the server {ending} before it was healthy; its output is above.")
            raise ServerEndedError(
                f"the server {ending} after {time.monotonic() - started:.0f} s; its output is above."
            )
        finally:
            client.close()
            process.end(_GRACE_S)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _find_stop_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end: a terminal that closes does not under nohup."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignores_hangup else [signal.SIGHUP])]


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(f"--port {port}: cannot listen on it ({error.strerror}). Choose another port.") from None


def _start(command: Sequence[str], environment: Mapping[str, str]) -> Child:
    try:
        return Child(command, environment, stdin=None)
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be started ({error.strerror}).") from None


def _is_healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):  # a server at such an address ends by itself
        return False


def _describe_ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {known.get(-code, -code)}"
