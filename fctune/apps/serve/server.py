"""vLLM's server: started once its port is free, announced once it is healthy, with the user's own options checked."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType

import httpx

from fctune.base.errors import ConfigError, ConfigProblems
from fctune.base.network import find_port_problem
from fctune.base.processes import Child

_POLL_S = 0.5
_GRACE_S = 30.0
_IDLE_POLLS = 20  # looks at the metrics within the limit
_LOAD = ("vllm:num_requests_running", "vllm:num_requests_waiting")
# Requests that start and end between two looks change these.
_WORK = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")


class ServerEndedError(Exception):
    """A healthy server that ended without being asked to."""


def run_server(
    command: Sequence[str],
    port: int,
    announce: Callable[[float], None],
    start_limit_s: float = 1800.0,
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    idle_limit_s: float | None = None,
) -> bool:
    """Run a server with OpenAI's API until this process is asked to end: by SIGTERM, SIGHUP or Ctrl-C.

    Every process that the server started ends with it. If this process is killed, Linux asks the server to end.

    Args:
        command: Program and options; it gets a process group of its own.
        port: The port that it listens on.
        announce: Called with the seconds that it took, once ``/health`` answers.
        start_limit_s: Seconds after which a server that is not healthy is ended.
        environment: Variables over those of this process.
        host: Where this machine reaches the server; IPv6 addresses are in brackets.
        idle_limit_s: Seconds without work, by vLLM's metrics, after which the server is ended; None: never.

    Returns:
        True if the server was ended because it was idle.

    Raises:
        ConfigError: The port is taken, the program cannot be started, or the server ended or hung before it was
            healthy, or has no metrics that show whether it is idle.
        ServerEndedError: The server ended by itself after it was healthy.
    """
    if (problem := find_port_problem(port)) is not None:
        raise ConfigError(f"--port {port}: cannot listen on it ({problem.strerror}). Choose another port.")
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
            idle: IdleWatch | None = None
            while not signals and (code := process.code) is None:
                if not is_announced and _is_healthy(client, f"http://{host}:{port}/health"):
                    announce(time.monotonic() - started)
                    is_announced = True
                    if idle_limit_s is not None:
                        idle = IdleWatch(client, f"http://{host}:{port}/metrics", idle_limit_s)
                if idle is not None and idle.is_over():
                    return True
                if not is_announced and time.monotonic() - started > start_limit_s:
                    raise ConfigError(f"the server is not healthy after {start_limit_s:.0f} s; its output is above.")
                time.sleep(_POLL_S)
            if signals:
                return False
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


class IdleWatch:
    """Time since a server of vLLM last had work.

    Args:
        client: How to ask it.
        url: Its metrics.
        limit_s: Seconds without work after which it is idle; they count from now.
    """

    def __init__(self, client: httpx.Client, url: str, limit_s: float) -> None:
        self._client, self._url, self._limit_s = client, url, limit_s
        self._poll_s = limit_s / _IDLE_POLLS
        self._looked = self._worked = time.monotonic()
        self._seen: dict[str, float] | None = None

    def is_over(self) -> bool:
        """Return whether the server has been idle for longer than the limit.

        Metrics that do not arrive show no work, so that a server that hangs is idle.

        Raises:
            ConfigError: The metrics do not show requests.
        """
        now = time.monotonic()
        if now - self._looked >= self._poll_s:
            self._looked = now
            try:
                answer = self._client.get(self._url)
            except httpx.HTTPError:
                pass
            else:
                if answer.status_code < 500:  # otherwise its text is not about metrics that are turned off
                    self._compare(_sum_metrics(answer.text))
        return now - self._worked > self._limit_s

    def _compare(self, metrics: dict[str, float]) -> None:
        if missing := [name for name in _LOAD if name not in metrics]:
            raise ConfigError(
                f"--stop-idle: {self._url} has no {missing[0]}, which shows whether the server is idle. Leave out "
                "--stop-idle, or what turns vLLM's metrics off."
            )
        work = {name: metrics.get(name, 0.0) for name in _WORK}
        if any(metrics[name] for name in _LOAD) or (self._seen is not None and work != self._seen):
            self._worked = time.monotonic()
        self._seen = work


def _sum_metrics(text: str) -> dict[str, float]:
    """Sum the samples of each metric in Prometheus' text format, over engines and models."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _LOAD or name in _WORK:
            with suppress(ValueError):
                sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums


def _describe_ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {known.get(-code, -code)}"


def require_agreement(options: Sequence[str], further: Sequence[str]) -> None:
    """Check that a user's options of vLLM's server do not undo those that the model and ``fctune serve`` need.

    Args:
        options: Options from ``serving.server_options``. If they name no parser, the user may name any,
            and a chat template.
        further: Further options, given by the user.

    Raises:
        ConfigError: They set what ``fctune serve`` sets, name the wrong parser for the model's format or a limit below
            the adapter's rank, or make a server that cannot be asked over HTTP.
    """
    needed, named = _read_options(options), _read_options(further)
    problems = ConfigProblems()
    for flag, remedy in _OWN.items():
        if _is_given(named, flag):
            problems.add(f"--vllm: {flag} is set by fctune serve. {remedy}")
    for flag in _UNREACHABLE:
        if _is_given(named, flag):
            problems.add(f"--vllm: {flag} makes a server that fctune serve cannot reach over HTTP. Leave it out.")
    if named.lora_modules is not None and needed.lora_modules is not None:
        problems.add("--vllm: --lora-modules replaces the adapter of PATH. Leave it out, or serve the base itself.")
    if needed.tool_call_parser is not None:
        _check_chat_options(needed, named, problems)
    limit, rank = named.max_lora_rank, needed.max_lora_rank
    if limit is not None and rank is not None and limit < rank:
        problems.add(
            f"--vllm: --max-lora-rank {limit} is too low for the adapter, which needs {rank}. Leave it out; fctune "
            "serve sets it."
        )
    problems.raise_all()


def find_host(further: Sequence[str]) -> str:
    """Return the host part of the URL at which this machine reaches a server with the user's options."""
    host: str = _read_options(further).host or "0.0.0.0"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"


def _check_chat_options(needed: argparse.Namespace, named: argparse.Namespace, problems: ConfigProblems) -> None:
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        given, own = getattr(named, _to_name(flag)), getattr(needed, _to_name(flag))
        if given is not None and given != own:
            problems.add(
                f"--vllm: {flag} {given} cannot read what this model writes, which needs {own or 'none'}. Leave it "
                "out; fctune serve names the right one."
            )
    if named.chat_template is not None:
        problems.add(
            "--vllm: --chat-template replaces the template for which fctune serve chose the parsers. Write it to "
            "chat_template.jinja in the model's directory instead."
        )


def _is_given(named: argparse.Namespace, flag: str) -> bool:
    return getattr(named, _to_name(flag)) not in (None, False)


def _to_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _read_options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--max-lora-rank", type=int)
    parser.add_argument("--lora-modules", nargs="+")
    for flag in _SWITCHES:
        parser.add_argument(flag, action="store_true")
    for flag in {*_OWN, *_UNREACHABLE, *_CHECKED} - {*_SWITCHES}:
        parser.add_argument(flag)
    try:
        # vLLM takes underscores, too.
        return parser.parse_known_args([_with_dashes(word) for word in words])[0]
    except argparse.ArgumentError as error:
        raise ConfigError(f"--vllm: {error}.") from None


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


# Options of vLLM that fctune sets from its own, which are named here.
_OWN = {
    "--model": "Name the model as its PATH.",
    "--tokenizer": "It takes the tokenizer from the model's or the adapter's directory.",
    "--served-model-name": "Use its own --name.",
    "--port": "Use its own --port.",
    "--default-chat-template-kwargs": "Use its own --template-args.",
}
# Options with which vLLM answers somewhere else than at http://HOST:PORT, or not at all.
_UNREACHABLE = ("--uds", "--ssl-keyfile", "--ssl-certfile", "--grpc", "--headless")
_CHECKED = ("--host", "--tool-call-parser", "--reasoning-parser", "--chat-template")
_SWITCHES = ("--grpc", "--headless")
