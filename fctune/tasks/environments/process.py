"""The process of an environment: requests with a deadline, and the limits on what it may use and send."""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct("<I")
_NUM_STDERR_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the resources of an environment.

    Attributes:
        call_s: Seconds for one call, reset or task.
        memory_bytes: Memory of the process, as ``RLIMIT_DATA``.
        result_bytes: Size of one result or state as JSON.
    """

    call_s: float = 5.0
    memory_bytes: int = 2 * 1024**3
    result_bytes: int = 256 * 1024


# Variables that Python and common libraries need; none holds a key.
_PASSED = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV")
_FURTHER = "FCTUNE_ENVIRONMENT_VARIABLES"


def list_variables() -> dict[str, str]:
    """Return the environment variables of an environment's process: no keys or tokens, unless the user names them.

    ``FCTUNE_ENVIRONMENT_VARIABLES`` names further ones to pass on, separated by commas.
    """
    further = [name.strip() for name in os.environ.get(_FURTHER, "").split(",")]
    return {name: value for name, value in os.environ.items() if name in (*_PASSED, *further) or name[:3] == "LC_"}


class ProcessError(Exception):
    """The process ended, hung or exceeded its limits."""


class WorkerProcess:
    """A worker process, and the pipes to it.

    Args:
        reference: ``FILE.py:Class``, or ``module:Class`` of an installed package.
        limits: What it may use.
    """

    def __init__(self, reference: str, limits: Limits):
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by ``end``)
        allowed = {"memory_bytes": limits.memory_bytes, "result_bytes": limits.result_bytes}
        # One thread per process: memory limits count what idle threads of numerical libraries reserve.
        environment = list_variables() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "fctune.tasks.environments.worker", reference, json.dumps(allowed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,
        )

    def exchange(self, request: dict[str, Any], limit_s: float, max_bytes: int) -> bytes:
        """Send a request and return the reply's bytes.

        Raises:
            ProcessError: No reply arrives in time, or it is too large.
        """
        assert self._popen.stdin is not None
        deadline = time.monotonic() + limit_s
        content = json.dumps(request).encode()
        try:
            self._popen.stdin.write(_HEADER.pack(len(content)) + content)
            self._popen.stdin.flush()
        except OSError:
            raise ProcessError(self._describe_end()) from None
        (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline, limit_s))
        if size > max_bytes + 1024:
            raise ProcessError(f"sent {size:,} bytes; at most {max_bytes:,} are allowed")
        return self._read(size, deadline, limit_s)

    def end(self) -> None:
        """Kill the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._stderr):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _read(self, size: int, deadline: float, limit_s: float) -> bytes:
        assert self._popen.stdout is not None
        descriptor, content = self._popen.stdout.fileno(), b""
        while len(content) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise ProcessError(f"no result within {limit_s:g} s")
            piece = os.read(descriptor, size - len(content))
            if not piece:
                raise ProcessError(self._describe_end())
            content += piece
        return content

    def _describe_end(self) -> str:
        try:
            code = self._popen.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its pipes"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4096))
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        said = f" ({lines[-1][:_NUM_STDERR_SHOWN]})" if lines else ""
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"its process {how}{said}"
