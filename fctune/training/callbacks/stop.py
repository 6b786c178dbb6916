"""Stopping a run early: by a signal, or by a file named ``stop`` in the run's directory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from fctune.base import distributed
from fctune.base.exit_codes import STOPPED
from fctune.base.signals import SignalPipe, name_signal
from fctune.training.callbacks.base import Callback
from fctune.training.callbacks.checkpoint import CheckpointCallback, SaveError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_STOP_FILE_EVERY_S = 2.0
_MAX_REASON = 80


class Stopped(Exception):
    """Training stopped on request and saved; a re-run resumes from ``checkpoint``, None before the first step."""

    def __init__(self, reason: str, checkpoint: Path | None = None):
        super().__init__(reason)
        self.checkpoint = checkpoint


class StopRequest:
    """Listens for requests to stop, whatever this process is doing.

    A thread reads the signals. Before the first step it ends the process at once, as there is nothing to save. During
    training it records the request, which ``StopCallback`` reads after the step; a second signal ends the process at
    once. Another thread looks for the stop file, whose disk may hang.

    Args:
        stop_file: Its appearance requests a stop; None on ranks that do not check it.
        on_exit: Called with the reason before the process is ended at once.
    """

    def __init__(self, stop_file: Path | None, on_exit: Callable[[str], None]):
        self._stop_file = stop_file
        self._on_exit = on_exit
        self._reason: str | None = None
        self._is_training = False
        self._is_closed = threading.Event()
        self._pipe = SignalPipe(SIGNALS)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def start_training(self) -> None:
        """From now on, handle requests at the end of a step."""
        self._is_training = True
        if self._stop_file is not None:
            threading.Thread(target=self._look_for_file, args=(self._stop_file,), name="stop-file", daemon=True).start()

    @property
    def reason(self) -> str | None:
        """Reason for this rank to stop; None without a request."""
        return self._reason

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._is_closed.set()
        self._pipe.restore()
        os.write(self._pipe.write_end, b"\0")
        self._thread.join()
        self._pipe.close()

    def _look_for_file(self, file: Path) -> None:
        while not self._is_closed.wait(_STOP_FILE_EVERY_S):
            if (reason := _read_stop_file(file)) is not None:
                self._reason = self._reason or reason
                return

    def _listen(self) -> None:
        while number := os.read(self._pipe.read_end, 1)[0]:
            if number not in SIGNALS:
                continue
            name = name_signal(number)
            if not self._is_training or self._reason is not None:
                why = "again" if self._reason is not None else "before the first step; nothing to save"
                self._on_exit(f"{name} {why}")
                os._exit(STOPPED)
            self._reason = name


def _read_stop_file(path: Path) -> str | None:
    """Return who requests a stop by a file: its text, such as Ctrl-C, or the file itself if it is empty."""
    try:
        return path.read_bytes()[:_MAX_REASON].decode("utf-8", "replace").strip() or f"{path.name} file"
    except FileNotFoundError:
        return None
    except OSError:
        return f"{path.name} file"


class StopCallback(Callback):
    """Saves and stops the run after a step in which any rank was requested to stop.

    Args:
        request: Requests to this rank.
        checkpoint: Saves the state.
        resume: The run's ``resume``; after ``never``, the same command would start over.
    """

    def __init__(self, request: StopRequest, checkpoint: CheckpointCallback, resume: str):
        self._request, self._checkpoint = request, checkpoint
        self._again = "re-run with resume=auto" if resume == "never" else "re-run the same command"

    def on_step_end(self, step: int, is_last: bool) -> bool:
        """Stop if any rank has a request.

        Raises:
            Stopped: A stop was requested, and the state is saved.
            SaveError: A stop was requested, but the state cannot be saved.
        """
        if not distributed.any_rank([self._request.reason is not None])[0]:
            return False
        reasons = [reason for reason in distributed.all_gather_objects(self._request.reason) if reason]
        if step == 0:  # the optimizer has no state yet
            raise Stopped(f"stopped by {reasons[0]} before the first step; nothing to save")
        stopped = f"stopped by {reasons[0]} after step {step}"
        try:
            checkpoint = self._checkpoint.save_before_stop(step)
        except SaveError as error:
            raise SaveError(f"{stopped}, but {error}", error.checkpoint) from None
        raise Stopped(f"{stopped}; checkpoint saved; {self._again} to resume", checkpoint)

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._request.close()
