"""Asked to stop: by a signal, or by a file named ``stop`` in the run's directory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# sysexits.h EX_TEMPFAIL: the run is not over, and the same command goes on with it.
STOPPED = 75

_STOP_FILE_EVERY_S = 2.0


class Stopped(Exception):
    """The run was asked to stop and has done so; ``checkpoint`` is what it goes on from, if anything was saved."""

    def __init__(self, reason: str, checkpoint: Path | None = None):
        super().__init__(reason)
        self.checkpoint = checkpoint


class StopRequest:
    """Hears requests to stop, whatever this process is doing.

    Python runs a signal's handler only between two lines of Python, and a rank that waits in a collective runs none. So
    a thread reads the signals from the wakeup pipe: before the first step it ends the process at once, as there is
    nothing to save; in training it notes the request, which the loop agrees on after its step; a second signal ends the
    process at once.

    Args:
        stop_file: asks for a stop when it appears; None where this rank does not look.
        leave: called before the process is ended at once, with the reason.
    """

    def __init__(self, stop_file: Path | None, leave: Callable[[str], None]):
        self._stop_file = stop_file
        self._leave = leave
        self._reason: str | None = None
        self._is_training = False
        self._looked_at = 0.0
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def start_training(self) -> None:
        """From now on a signal waits for the end of the step."""
        self._is_training = True

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop; None where it does not."""
        if self._reason is None and self._stop_file is not None:
            now = time.monotonic()
            if now - self._looked_at > _STOP_FILE_EVERY_S:
                self._looked_at = now
                if self._stop_file.exists():
                    self._reason = f"{self._stop_file.name} file"
        return self._reason

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _listen(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if number not in SIGNALS:
                continue
            name = signal.Signals(number).name
            if not self._is_training or self._reason is not None:
                why = "again" if self._reason is not None else "before the first step; nothing to save"
                self._leave(f"{name} {why}")
                os._exit(STOPPED)
            self._reason = name
