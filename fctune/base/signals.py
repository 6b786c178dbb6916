"""Naming signals, and receiving them in a thread while the main thread is in C code, such as a collective."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def name_signal(number: int) -> str:
    """Return a signal's name as a user knows it: Ctrl-C for SIGINT."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def handle_signal(number: int, handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle a signal during the block; outside the main thread, the handler that is there stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


class SignalPipe:
    """A pipe that receives the number of each signal as a byte; Python's own handlers do nothing meanwhile.

    Python runs a handler only between two bytecodes of the main thread, and a process that waits in a collective
    executes none. The wakeup pipe is written at once, and any thread can read it. Outside the main thread no signal is
    redirected.
    """

    def __init__(self, signals: Iterable[int]):
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, lambda *_: None) for number in signals}
            self._previous_wakeup = signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)

    def restore(self) -> None:
        """Restore the signal handlers that were installed before."""
        if self._previous:
            signal.set_wakeup_fd(self._previous_wakeup)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous = {}

    def close(self) -> None:
        """Restore the previous handlers and close the pipe."""
        self.restore()
        os.close(self.read_end)
        os.close(self.write_end)
