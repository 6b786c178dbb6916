"""Runs one environment class for ``host``: python -m fctune.tasks.environments.worker REFERENCE LIMITS.

Requests and replies are JSON, preceded by their length in four bytes. Each episode has a number and an instance of its
own. Output that the class prints goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import struct
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from fctune.tasks.environments.base import TaskSpec, ToolError

_HEADER = struct.Struct("<I")
_MAX_REASON = 300
_WATCH_S = 1.0


def main() -> None:
    """Serve requests until stdin ends."""
    reference, limits = sys.argv[1], json.loads(sys.argv[2])
    _watch_parent()
    # The class's own prints must not get between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_DATA, (limits["memory_bytes"],) * 2)
    # Its stderr is a file, which must not grow when the class prints endlessly.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    worker = _Worker(reference, limits["result_bytes"])
    while (request := read_frame(sys.stdin.buffer)) is not None:
        write_frame(replies, worker.answer(json.loads(request)))


def read_frame(file: BinaryIO) -> bytes | None:
    """Return the next message; None at the end of the file."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    return file.read(_HEADER.unpack(header)[0])


def write_frame(file: BinaryIO, content: bytes) -> None:
    """Write a message with its length."""
    file.write(_HEADER.pack(len(content)) + content)
    file.flush()


class _WrongReturn(Exception):
    """A method returned something else than it should."""


class _Worker:
    def __init__(self, reference: str, max_result_bytes: int):
        self._reference = reference
        self._max_result_bytes = max_result_bytes
        self._class: Any = None
        self._episodes: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> bytes:
        """Return the reply: ``{"value"}``, ``{"refused"}`` for a ``ToolError``, or ``{"error"}``."""
        reply: dict[str, Any]
        try:
            reply = {"value": getattr(self, f"_do_{request['do']}")(**request["with"])}
        except ToolError as error:
            reply = {"refused": _shorten(str(error))}
        except MemoryError:
            reply = {"error": "ran out of the memory that it may use"}
        except _WrongReturn as error:
            reply = {"error": str(error)}
        except Exception as error:  # a user's class may raise anything
            reply = {"error": f"raised {type(error).__name__}: {_shorten(str(error))}"}
        except SystemExit as error:
            reply = {"error": f"tried to exit with {error.code}"}
        return self._encode(reply)

    def _encode(self, reply: dict[str, Any]) -> bytes:
        try:
            encoded = json.dumps(reply, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError, MemoryError) as error:
            return json.dumps({"error": f"returned what JSON cannot express ({_shorten(str(error))})"}).encode()
        if len(encoded) > self._max_result_bytes:
            said = f"returned {len(encoded):,} bytes; at most {self._max_result_bytes:,} are allowed"
            return json.dumps({"error": said}).encode()
        return encoded

    def _do_open(self) -> Any:
        where, _, name = self._reference.rpartition(":")
        found: Any = _load_file(Path(where)) if where.endswith(".py") else _import_module(where, name)
        for part in name.split("."):
            found = getattr(found, part)
        needed = ("list_tools", "make_task", "reset", "call", "state")
        if lacking := [method for method in needed if not callable(getattr(found, method, None))]:
            raise TypeError(f"lacks the methods {', '.join(lacking)} of fctune.tasks.environments.base.Environment")
        self._class = found
        return self._class().list_tools()

    def _do_make_task(self, seed: int, split: Any) -> Any:
        spec = self._class().make_task(seed, split)
        if not isinstance(spec, TaskSpec):
            raise _WrongReturn(f"returned {type(spec).__name__}; expected fctune.tasks.environments.base.TaskSpec")
        return {
            "question": spec.question,
            "state": spec.state,
            "calls": [list(call) for call in spec.calls],
            "facts": list(spec.facts),
            "category": spec.category,
            "system": spec.system,
        }

    def _do_reset(self, episode: int, state: dict[str, Any]) -> None:
        self._episodes[episode] = environment = self._class()
        environment.reset(state)

    def _do_call(self, episode: int, name: str, arguments: dict[str, Any]) -> Any:
        return self._episodes[episode].call(name, arguments)

    def _do_state(self, episode: int) -> Any:
        return self._episodes[episode].state()

    def _do_close(self, episode: int) -> None:
        self._episodes.pop(episode, None)


def _import_module(name: str, class_name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        file = Path(f"{name.replace('.', '/')}.py")
        if file.is_file():
            hint = f"modules are not imported from the working directory; pass {file}:{class_name}"
            raise ModuleNotFoundError(f"{error}: {hint}") from None
        raise


def _load_file(path: Path) -> ModuleType:
    """Import a module from its file; its folder comes last on the path, so the files next to it hide no package."""
    sys.path.append(str(path.resolve().parent))
    name = f"environment_{path.stem}"  # a file calendar.py does not become Python's own module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _watch_parent() -> None:
    """End this process when its parent is gone, even while the class hangs."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."


if __name__ == "__main__":
    main()
