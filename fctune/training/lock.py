"""One run at a time in a directory: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from fctune.errors import ConfigError

logger = logging.getLogger("fctune")

# A process of this machine that is gone lets go at once; one of a machine that is gone when its lease at the file
# server ends (90 s, the default of Linux's NFS server).
_HERE_S, _ELSEWHERE_S = 10.0, 120.0


class DirectoryLock:
    """Holds ``.lock`` of a directory from its making to ``release``.

    Args:
        folder: the directory; it must be there.
        wait_s: for a holder that may be gone already; None: 10 s for one of this machine, 120 s for another's.

    Raises (at construction):
        ConfigError: another process that lives holds it.
    """

    def __init__(self, folder: Path, wait_s: float | None = None):
        self._file: IO[str] = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 (held until release)
        try:
            self._take(folder, wait_s)
        except BaseException:
            self._file.close()
            raise
        about = {"process": os.getpid(), "host": platform.node(), "since": datetime.now(UTC).isoformat("T", "seconds")}
        self._file.truncate(0)
        self._file.write(json.dumps(about) + "\n")
        self._file.flush()

    def release(self) -> None:
        """Let others in."""
        self._file.close()

    def _take(self, folder: Path, wait_s: float | None) -> None:
        started, is_said = time.monotonic(), False
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = self._read_holder()
            except OSError as error:
                logger.warning("%s: its file system has no locks (%s); see that one run alone uses it", folder, error)
                return
            is_here = holder.get("host") == platform.node()
            patience = wait_s if wait_s is not None else _HERE_S if is_here else _ELSEWHERE_S
            if (is_here and _is_alive(holder.get("process"))) or time.monotonic() - started >= patience:
                raise ConfigError(
                    f"output_dir={folder}: another run writes here ({_describe(holder)}). One directory is one "
                    "run: name another, or stop that one first."
                )
            if not is_said:
                is_said = True
                logger.info("%s is held by %s; waiting up to %.0f s", folder, _describe(holder), patience)
            time.sleep(0.2)

    def _read_holder(self) -> dict[str, Any]:
        self._file.seek(0)
        try:
            holder = json.loads(self._file.read())
        except ValueError:  # it has not written yet
            return {}
        return holder if isinstance(holder, dict) else {}


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "it has not said which"
    return f"process {holder.get('process')} on {holder.get('host')}, since {holder.get('since')}"


def _is_alive(process: Any) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, TypeError, ValueError):
        return True
    return True
