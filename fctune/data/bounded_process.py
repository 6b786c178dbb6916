"""Processes for work that cannot be trusted to end, such as rendering the chat template that came with a model.

A chat template is a program. No list of its dangerous operations is ever complete, so its cost is limited as a whole:
it runs in another process, in which the kernel refuses memory and ends the process when its time is over. That holds in
the middle of any operation, even of one that never returns to Python.

``BoundedProcess`` is such a process. All of them are forks of one fork server, which has the imports that they need: a
new one is ready within milliseconds, so one that was ended is easily replaced. The server is not multiprocessing's,
whose preloaded modules belong to the program. Each process ends when the other end of its socket closes, and thus with
this process, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_CPU_S = 2.0
MAX_WALL_S = 30.0  # a process that is starved, or that swaps, uses little time of the processor
MAX_GROWTH_BYTES = 2**29
_MEMORY_REASON, _MEMORY_CODE = f"it takes more than {MAX_GROWTH_BYTES // 2**20:,} MiB of memory", 3
_PAGE_BYTES = resource.getpagesize()
_IMPORTED_FIRST = "transformers.utils.chat_template_utils"


class LimitError(Exception):
    """Work exceeds a limit; the message says which, as in "it takes more than 30 s"."""


class ProcessDiedError(Exception):
    """A bounded process was killed, or crashed, for a reason other than its limits."""


def run_limited(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the function's result; in a bounded process, within the limits on memory and time.

    Raises:
        LimitError: It needs more memory. If it needs more time, this process ends, and ``BoundedProcess.receive``
            raises.
    """
    if _statm is None:
        return function(*args, **kwargs)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(os.pread(_statm, 64, 0).split(None, 1)[0]) * _PAGE_BYTES
    is_over = False
    limit = size + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    # The default action of both signals ends the process.
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)
    try:
        return function(*args, **kwargs)
    except MemoryError:
        is_over = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert is_over  # raised here, where no error holds on to what fills the memory
    raise LimitError(_MEMORY_REASON)


class BoundedProcess:
    """A process that calls functions one after the other, each request with one answer.

    Functions and arguments are pickled. Not for use by several threads at once.

    Raises (at construction):
        ProcessDiedError: The process cannot be started.
    """

    def __init__(self) -> None:
        here, there = socket.socketpair()
        with there:
            self._server = _get_server()
            self._pid: int | None = self._server.fork(there)
        self.connection = Connection(here.detach())
        self._num_pending = 0

    @property
    def is_own(self) -> bool:
        """True unless this process is a fork of the one that made the object."""
        return self._server.owner == os.getpid()

    @property
    def is_busy(self) -> bool:
        """True if an answer has not been received."""
        return self._num_pending > 0

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result, or raise what it raises; errors as for ``receive``."""
        self.submit(function, *args, **kwargs)
        result: T = self.receive()
        return result

    def submit(self, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Send a request. The process reads it even while it works on another one."""
        self._num_pending += 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # receive tells why
            self.connection.send((function, args, kwargs))

    def receive(self) -> Any:
        """Return the answer to the oldest request, or raise what its function raises.

        Raises:
            LimitError: The process was ended since the function took too long.
            ProcessDiedError: The process was ended otherwise.
        """
        try:
            is_done, value = self.connection.recv()
        except (EOFError, OSError):
            code = self.close()
        else:
            self._num_pending -= 1
            if is_done:
                return value
            raise value
        if code == _MEMORY_CODE:
            raise LimitError(_MEMORY_REASON)
        if code == -signal.SIGPROF:
            raise LimitError(f"it takes more than {MAX_CPU_S:.0f} s of computing")
        if code == -signal.SIGALRM:
            raise LimitError(f"it takes more than {MAX_WALL_S:.0f} s")
        raise ProcessDiedError(f"the process ended with {f'signal {-code}' if code < 0 else f'code {code}'}")

    def close(self) -> int:
        """Kill the process unless it has ended, and return its exit code."""
        self.connection.close()
        pid, self._pid = self._pid, None
        return 0 if pid is None else self._server.end(pid)


class _ForkServer:
    """The client of the fork server; the server runs ``_serve_forks``."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._control, there = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _serve_forks; _serve_forks()"
        with there:
            self._process = subprocess.Popen(  # in a session of its own: Ctrl-C and Ctrl-Z are for this process
                [sys.executable, "-P", "-c", code],
                stdin=there.fileno(),
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # threads that are never used, and are not forked
                start_new_session=True,
            )
        atexit.register(self._close)

    def fork(self, end: socket.socket) -> int:
        """Start a bounded process with an end of a socket, and return its process id."""
        with self._lock:
            try:
                socket.send_fds(self._control, [b"fork".ljust(_REQUEST_BYTES)], [end.fileno()])
                answer = self._control.recv(8)
            except OSError:
                answer = b""
        if not answer:
            raise ProcessDiedError(f"the process that starts it ended with code {self._process.wait()}")
        return int.from_bytes(answer, "little")

    def import_module(self, name: str) -> None:
        """Import a module before further processes are forked; does not wait for it."""
        with self._lock, contextlib.suppress(OSError):
            self._control.send(f"import {name}".encode().ljust(_REQUEST_BYTES))

    def end(self, pid: int) -> int:
        """Kill a bounded process unless it has ended, and return its exit code."""
        if self.owner != os.getpid():  # a fork of the owner, in which this object is a copy
            return 0
        with self._lock:
            try:
                self._control.send(f"end {pid}".encode().ljust(_REQUEST_BYTES))
                answer = self._control.recv(8)
            except OSError:
                answer = b""
        return int.from_bytes(answer, "little", signed=True) if answer else -signal.SIGKILL

    def is_alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def _close(self) -> None:
        if self.owner == os.getpid():
            self._control.close()
            self._process.wait()


_REQUEST_BYTES = 128
_server: _ForkServer | None = None
_starting = threading.Lock()
_statm: int | None = None  # in bounded processes: the file that tells their size


def _get_server() -> _ForkServer:
    global _server
    with _starting:
        if _server is None or not _server.is_alive():
            _server = _ForkServer()
        return _server


def prepare_processes(module: str | None = None) -> None:
    """Start what bounded processes come from, which takes a second, without waiting for it."""
    if _statm is None:
        server = _get_server()
        if module is not None:
            server.import_module(module)


def is_bounded() -> bool:
    """Return True in a bounded process."""
    return _statm is not None


def _serve_forks() -> None:
    """Run the fork server: fork, import and end as requested on the socket that is its standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGALRM):  # which a parent may have ignored or blocked
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    importlib.import_module(_IMPORTED_FIRST)
    control = socket.socket(fileno=os.dup(0))
    while True:
        request, ends, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 1)
        if not request:
            os._exit(0)
        name, _, argument = request.decode().strip().partition(" ")
        if name == "import":
            importlib.import_module(argument)
            continue
        if name == "fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                _serve_calls(Connection(ends[0]))
            os.close(ends[0])
            answer = pid
        else:
            with contextlib.suppress(ProcessLookupError):  # an ended one keeps its id until then
                os.kill(int(argument), signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(int(argument), 0)[1])
        control.send(answer.to_bytes(8, "little", signed=True))


def _serve_calls(connection: Connection) -> NoReturn:
    """Run a bounded process: answer the requests of a connection until its other end closes."""
    global _statm
    _statm = os.open("/proc/self/statm", os.O_RDONLY)
    gc.freeze()
    requests: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = queue.SimpleQueue()
    # A thread reads them, so that neither end waits in sending while the other does too.
    threading.Thread(target=_read_requests, args=(connection, requests), daemon=True).start()
    while True:
        function, args, kwargs = requests.get()
        try:
            answer = True, function(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, LimitError | ValueError):
                error.add_note(f"in a bounded process: {''.join(traceback.format_exception(error))}")
            answer = False, error.with_traceback(None)
        try:
            message = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            message = pickle.dumps((False, RuntimeError(f"{error!r} in pickling {answer!r:.2000}")))
        del function, args, kwargs, answer
        connection.send_bytes(message)


def _read_requests(connection: Connection, requests: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)
    except MemoryError:  # the work that is being done has taken all; the request is lost
        os._exit(_MEMORY_CODE)
    except BaseException as error:
        requests.put((_raise, (error,), {}))


def _raise(error: BaseException) -> NoReturn:
    raise error
