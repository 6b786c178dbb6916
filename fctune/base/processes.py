"""Supervisor of child processes: each ends with this process, and with it everything that it started."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from fctune.base.errors import ConfigError
from fctune.base.launcher_watch import stop_with_parent

_POLL_S = 0.05
_REAP_S = 5.0  # after SIGKILL; a process whose driver or disk hangs is left to the kernel
_PIECE_BYTES = 64 * 1024
_MAX_PIPE_BYTES = 1024 * 1024  # what a pipe may hold (/proc/sys/fs/pipe-max-size)
# Runs a command in its own process group, all of which ends by SIGTERM.
_LEADER = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
try:
    code = subprocess.call(sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]}: cannot be started ({error.strerror})")
sys.exit(code if code >= 0 else 128 - code)
"""


def count_srun_tasks() -> int:
    """Return the number of tasks in which srun started this command; 1 without srun, and for a shell that it opened.

    The script of a batch job is one task, however many the job may start.
    """
    if "SLURM_PTY_PORT" in os.environ:  # srun --pty: a person types the command, in the first task only
        return 1
    number = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return int(number) if number.isdecimal() else 1


def check_srun_tasks(own_run: str) -> None:
    """Check that srun started this command only once.

    Args:
        own_run: Option that says that each task is a run of its own.

    Raises:
        ConfigError: srun started it in several tasks.
    """
    if (tasks := count_srun_tasks()) > 1:
        raise ConfigError(
            f"srun started this command {tasks} times, and each would train by itself. Start one that starts a process "
            "for each GPU: on one node srun --nodes=1 --ntasks=1 --gpus-per-node=8 fctune train CONFIG, on several "
            f"sbatch --nodes=2 sky/slurm/finetune_venv.sbatch. If each task is a run of its own, pass {own_run}, and "
            "another output_dir in each."
        )


class Child:
    """A process that leads a session and a process group of its own, so that Ctrl-C reaches this process alone.

    If this process dies, even by SIGKILL, Linux sends the child SIGTERM.

    Args:
        command: Program and arguments; no shell reads them.
        environment: Its environment variables; None: those of this process.
        stdin, stdout, stderr: As ``subprocess.Popen`` takes them.
        ends_with_thread: Linux sends the signal when the thread that starts the child ends. False for one that is
            started on a short-lived thread, and that ends by itself when its pipes close.

    Raises (at construction):
        OSError: The program cannot be started.
        ValueError: A word of the command holds a NUL.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        ends_with_thread: bool = True,
    ):
        self._process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
            preexec_fn=stop_with_parent() if ends_with_thread else None,
        )
        self.pid = self._process.pid
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr

    @property
    def code(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.poll()

    def has_ended(self) -> bool:
        """Return True once the process has ended; it is not reaped, so that its group's id is not used again."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, limit_s: float | None = None) -> int | None:
        """Wait until the process has ended and return its code; None if it still runs after ``limit_s``."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(limit_s)
        return None

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process alone, which may pass it on."""
        self._process.terminate()

    def kill_group(self) -> None:
        """Kill the process and those that it started, except those that have left its group."""
        self._signal_group(signal.SIGKILL)

    def end(self, grace_s: float = 0.0) -> None:
        """End the process with those that it started: asked first if there is a grace, then killed."""
        if grace_s and not self.has_ended():
            self._signal_group(signal.SIGTERM)
            self.wait(grace_s)
        self.kill_group()
        self.wait(_REAP_S)
        for pipe in (self.stdin, self.stdout, self.stderr):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self.pid, number)


def lead_group(command: Sequence[str]) -> list[str]:
    """Return a command that runs another, and kills its process group if the process that started it dies.

    Linux sends its signal to the child alone, so that what the child has started would go on. A command that a signal
    ended has the code 128 plus its number, as in shells.
    """
    return [sys.executable, "-I", "-S", "-c", _LEADER, *command]


@dataclass(slots=True)
class Output:
    """Output of a pipe: all of it, or its first or last bytes, and its total size."""

    max_bytes: int | None
    keeps_end: bool
    kept: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0

    def add(self, piece: bytes) -> None:
        """Add what was read."""
        self.num_bytes += len(piece)
        self.kept += piece
        if self.max_bytes is not None:
            del self.kept[slice(None, -self.max_bytes) if self.keeps_end else slice(self.max_bytes, None)]

    @property
    def text(self) -> str:
        """The text that was kept; bytes that are not UTF-8 are replaced."""
        return self.kept.decode("utf-8", "replace")

    @property
    def last_line(self) -> str:
        """The last line that is not blank, without spaces around it; empty if there is none."""
        lines = self.text.replace("\r", "\n").split("\n")  # splitlines would also split at U+2028 in texts
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended, or was ended.

    Attributes:
        code: Its exit code, or the negative number of the signal that ended it; None: its time was over.
        output: Its standard output; of too much, the first bytes, or the last.
        errors: Its standard error; of too much, the last bytes.
    """

    code: int | None
    output: Output
    errors: Output


def run_command(
    command: Sequence[str],
    given: bytes = b"",
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    max_bytes: int | None = None,
    *,
    keeps_end: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Finished:
    """Run a command to its end, and return what it wrote.

    Its process group is killed when it has ended, when its time is over, and when the user presses Ctrl-C. So what it
    started in the background neither goes on nor keeps the result back.

    Args:
        command: Program and arguments; no shell reads them.
        given: Its input.
        limit_s: Seconds that it may take; None: any number.
        environment: Its environment variables; None: those of this process.
        max_bytes: What is kept of each output; None: all.
        keeps_end: Of too much standard output, keep the last bytes.
        is_stopped: Asked all the time; the command is killed once it returns True, as if its time were over.

    Raises:
        OSError: The program cannot be started.
        ValueError: A word of the command holds a NUL.
    """
    pipe = subprocess.PIPE
    child = Child(command, environment, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        outputs = Output(max_bytes, keeps_end), Output(max_bytes, keeps_end=True)
        _exchange(child, given, deadline, outputs, is_stopped)
        has_ended = child.has_ended()
    finally:
        child.end()
    return Finished(child.code if has_ended else None, *outputs)


def _exchange(
    child: Child,
    given: bytes,
    deadline: float | None,
    kept: tuple[Output, Output],
    is_stopped: Callable[[], bool],
) -> None:
    """Write a command's input and read its outputs until it ends, is stopped, or until the deadline.

    Other processes may hold the pipes longer than the command, so that its own end counts, not that of the pipes.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    outputs = dict(zip((child.stdout, child.stderr), kept, strict=True))
    rest = memoryview(given)
    with selectors.DefaultSelector() as selector:
        for pipe in (child.stdin, *outputs):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE if pipe is child.stdin else selectors.EVENT_READ)
        while not child.has_ended() and not is_stopped() and (deadline is None or time.monotonic() < deadline):
            left_s = _POLL_S if deadline is None else min(_POLL_S, max(0.0, deadline - time.monotonic()))
            for key, _ in selector.select(left_s):
                if key.fileobj is child.stdin:
                    try:
                        rest = rest[os.write(key.fd, rest) :]
                    except BrokenPipeError:  # the command does not read its input
                        rest = rest[:0]
                    if not rest:
                        selector.unregister(child.stdin)
                        child.stdin.close()
                elif piece := os.read(key.fd, _PIECE_BYTES):
                    outputs[key.fileobj].add(piece)  # type: ignore[index]
                else:
                    selector.unregister(key.fileobj)
    if child.has_ended():
        child.kill_group()  # nobody writes after this, except processes that have left the group
        for pipe, output in outputs.items():
            with suppress(BlockingIOError):
                for _ in range(_MAX_PIPE_BYTES // _PIECE_BYTES):
                    output.add(os.read(pipe.fileno(), _PIECE_BYTES))
