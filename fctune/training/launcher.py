"""Run a recipe on the processes of this machine, by torchrun's own API.

torchrun forwards the signals it receives, kills workers 30 seconds later, and ends with a traceback and code 1 however
a run ended. Here a request to stop reaches the run once, with all the time it needs to save, and the exit code is the
run's own.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from fctune.base.exit_codes import EXIT_CODES, FAILED, SAVE_FAILED, STOPPED
from fctune.base.files import run_within
from fctune.base.signals import name_signal
from fctune.config.loading import set_default_environment
from fctune.runs.directory import RunFiles

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_READ_S = 10.0  # limit for reading a run's record, because its disk may hang
_STUCK_S = 10.0  # after which a process that has ended is not waited for


def count_gpus() -> int:
    """Return the number of CUDA devices that PyTorch can use."""
    import torch

    return torch.cuda.device_count()


def launch_recipe(
    recipe: Path, arguments: Sequence[str], num_processes: int, output_dir: Path, show: Callable[[str], None]
) -> int:
    """Run a recipe on ``num_processes`` processes until it ends.

    SIGINT, SIGTERM and SIGUSR1 ask the run to save and stop; a second one ends it at once.

    Args:
        recipe: Python file of the recipe.
        arguments: Its command line.
        num_processes: Ranks to start, all on this machine.
        output_dir: Directory of the run, where ``exit.json`` gives the reason for its end.
        show: Receives messages for the user, one line each.

    Returns:
        The exit code, one of ``EXIT_CODES``.
    """
    started_at = time.time()
    requests = _StopRequests(output_dir, started_at, show)
    set_default_environment({"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes))})
    with requests:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        _silence_launcher()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle=",".join(_list_fatal_signals()),  # the others are requests to stop, handled here
        )
        requests.has_workers = True
        threading.Thread(target=_end_with_stuck_worker, args=(show,), name="stuck-worker", daemon=True).start()
        try:
            elastic_launch(config, sys.executable)(
                "-P", "-u", "-m", "fctune.base.launcher_watch", str(recipe), *arguments
            )
        except ChildFailedError as error:
            return _exit_code(error, output_dir, started_at, requests, show)
        except SignalException as error:
            show(f"ended by {signal.Signals(error.sigval).name}; re-run the same command to resume")
            return 1
    return 0


def _list_fatal_signals() -> list[str]:
    """Return the signals that end a run at once; under nohup, a hang-up is not one of them."""
    return ["SIGQUIT"] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else ["SIGQUIT", "SIGHUP"]


class _StopRequests:
    """Signal handlers that pass on requests to stop to the workers, which torch starts in sessions of their own."""

    def __init__(self, output_dir: Path, started_at: float, show: Callable[[str], None]):
        self.num_received = 0
        self.has_workers = False
        self._output_dir, self._started_at, self._show = output_dir, started_at, show
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _StopRequests:
        self._previous = {number: signal.signal(number, self._handle) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.num_received += 1
        is_first_in_training = self.num_received == 1 and self._is_training()
        if self.num_received == 1 and not is_first_in_training:
            self._show("stopped before training; nothing was saved")
        if not self.has_workers:
            raise SystemExit(STOPPED)
        # A batch system may signal the workers too, and a worker that receives two signals ends without saving. So a
        # run in training is stopped through its stop file, which is safe to see more than once.
        if is_first_in_training:
            self._show("stopping after this step, then saving; send the signal again to end at once")
            if self._request_stop(name_signal(number)):
                return
        self._signal_workers()

    def _request_stop(self, reason: str) -> bool:
        """Create the stop file with the reason, or empty on a full disk; False if that fails, or its disk hangs."""
        files = RunFiles(self._output_dir)
        return run_within(_READ_S, lambda: files.request_stop(reason)) and files.stop_file.exists()

    def _is_training(self) -> bool:
        try:
            return RunFiles(self._output_dir).metrics.stat().st_mtime >= self._started_at
        except OSError:
            return False

    def _signal_workers(self) -> None:
        import psutil

        for worker in psutil.Process().children():
            worker.terminate()


def _exit_code(
    error: Any, output_dir: Path, started_at: float, requests: _StopRequests, show: Callable[[str], None]
) -> int:
    """Return the code in exit.json, or that of the first worker that failed if this run wrote none."""
    path = RunFiles(output_dir).exit
    found: list[int] = []
    run_within(_READ_S, lambda: found.extend(_read_code(path, started_at)))
    if found:
        return found[0]
    if requests.num_received:
        return STOPPED
    rank, failure = error.get_first_failure()
    if failure.exitcode in EXIT_CODES:
        return int(failure.exitcode)
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    show(f"rank {rank} ended with {how} and left no reason in {path}")
    return 1


def _read_code(path: Path, started_at: float) -> list[int]:
    """Return the code of a run that failed in an exit.json that is not older than ``started_at``, if there is one."""
    try:
        if path.stat().st_mtime >= started_at:
            code = json.loads(path.read_text(encoding="utf-8"))["code"]
            return [int(code) if code in EXIT_CODES and code != 0 else FAILED]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return []


def _end_with_stuck_worker(show: Callable[[str], None]) -> None:
    """End this process when a worker has ended, but the kernel keeps it for a thread that waits for a disk.

    torchrun would wait for such a worker forever. The other workers end when their launcher is gone.
    """
    import psutil

    seen_at: dict[int, float] = {}
    while True:
        time.sleep(1.0)
        for child in psutil.Process().children():
            if not _is_ending(child.pid):
                continue
            if time.monotonic() - seen_at.setdefault(child.pid, time.monotonic()) > _STUCK_S:
                show(f"process {child.pid} of the run has ended, but waits for a disk that does not answer")
                os._exit(SAVE_FAILED)


def _is_ending(process: int) -> bool:
    """Return True if all threads of a process were told to end; False off Linux."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        fields = dict(line.split(":", 1) for line in status.splitlines())
        is_killed = (int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)) & 1 << (signal.SIGKILL - 1)
        return bool(is_killed) or (fields["State"].split()[0] == "Z" and int(fields["Threads"]) > 1)
    except (OSError, ValueError, KeyError):
        return False


def _silence_launcher() -> None:
    """Silence torchrun's own loggers, which report every exit code but 0 as an error."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
