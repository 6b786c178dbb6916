"""Bonds between a process and those that it starts: they end together, and import nothing from the working directory.

Ranks whose launcher has died would train on, or wait half an hour in a rendezvous.

python -m fctune.base.launcher_watch RECIPE.py [arguments]     runs a recipe, protected during its imports too
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_EVERY_S = 0.5
_RECORD_S = 5.0  # limit for recording the end, because a disk may hang
_STUCK_S = 20.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SAFE_PATH = "PYTHONSAFEPATH"
_GIVEN_SAFE_PATH = os.environ.get(_SAFE_PATH)


def end_with_launcher() -> None:
    """Let the kernel kill this process when its launcher dies; call it on the main thread before slow imports.

    Does nothing in a process that torchrun's API did not start, and on systems other than Linux.
    """
    if not _is_launched() or sys.platform != "linux":
        return
    set_death_signal(signal.SIGKILL)
    if _is_orphan():  # the launcher died before the line above
        os._exit(1)


def watch_launcher(record: Callable[[], None]) -> None:
    """From now on, call ``record`` when the launcher dies, before ending this process; call it on the main thread."""
    if not _is_launched():
        return
    launcher = os.getppid()
    threading.Thread(target=_watch, args=(launcher, record), name="launcher-watch", daemon=True).start()
    if sys.platform == "linux":
        set_death_signal(0)


def _watch(launcher: int, record: Callable[[], None]) -> None:
    while os.getppid() == launcher:
        time.sleep(_EVERY_S)
    recorder = threading.Thread(target=record, daemon=True)
    recorder.start()
    recorder.join(_RECORD_S)
    os._exit(1)


def kill_launcher_later() -> None:
    """Kill the launcher if this process, which is about to end, is still there after a while.

    The kernel keeps a process of which a thread waits for a disk that does not answer, and torchrun would wait for it
    forever. A launcher that sees such a process itself ends before.
    """
    if not _is_launched() or sys.platform != "linux":
        return
    rank, launcher = os.getpid(), os.getppid()
    if os.fork():
        return
    time.sleep(_STUCK_S)  # only system calls here, because the other threads' locks are not released in a fork
    try:
        state = Path(f"/proc/{rank}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        if int(state[1]) == launcher:
            os.kill(launcher, signal.SIGKILL)
    finally:
        os._exit(0)


def release_output() -> None:
    """Close the pipes of this process's output, so that their readers, such as ``tee``, see its end.

    The kernel keeps them open as long as a thread waits for a disk that does not answer, even after SIGKILL.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        if stat.S_ISFIFO(os.fstat(output).st_mode):  # closing a file may wait for its disk
            os.dup2(null, output)


def _is_launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _is_orphan() -> bool:
    """Return True if process 1 has adopted this one; in a container, process 1 may be the launcher itself."""
    if os.getppid() != 1:
        return False
    try:
        return Path("/proc/1/exe").readlink() != Path("/proc/self/exe").readlink()
    except OSError:  # another user's
        return True


def set_death_signal(number: int) -> None:
    """Let the kernel send this process a signal when its parent dies; 0: none. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def protect_imports() -> None:
    """Keep the working directory, and a script's, off the import path of every Python that this process starts.

    They would come first, so a file psutil.py of a cloned data set would be executed in its place.
    """
    os.environ[_SAFE_PATH] = "1"


def user_environment() -> dict[str, str]:
    """Return the environment variables for a command of the user: without what ``protect_imports`` has set."""
    variables = dict(os.environ)
    variables.pop(_SAFE_PATH, None)
    return variables if _GIVEN_SAFE_PATH is None else variables | {_SAFE_PATH: _GIVEN_SAFE_PATH}


def stop_with_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` for processes that get SIGTERM when this one dies, even by SIGKILL; None off Linux."""
    if sys.platform != "linux":
        return None
    parent = os.getpid()

    def prepare() -> None:
        set_death_signal(signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


if __name__ == "__main__":
    end_with_launcher()
    protect_imports()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
