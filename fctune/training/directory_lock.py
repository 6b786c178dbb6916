"""The lock on a directory that one process at a time may write to."""

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

from fctune.base.errors import ConfigError

logger = logging.getLogger("fctune")

# A dead process on this machine frees its lock at once; one on a machine that died, when its lease at the file server
# expires (90 s, the default of Linux's NFS server).
_LOCAL_WAIT_S, _REMOTE_WAIT_S = 10.0, 120.0


class DirectoryLock:
    """Lock on ``.lock`` in a directory, held from construction to ``release`` or the end of the process.

    Args:
        folder: An existing directory.
        wait_s: Seconds to wait for a holder that may be dead already; None: 10 s for one on this machine, 120 s for one
            on another machine.

    Raises (at construction):
        ConfigError: Another live process holds the lock.
    """

    def __init__(self, folder: Path, wait_s: float | None = None):
        self._file: IO[str] = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 (held until release)
        try:
            self._acquire(folder, wait_s)
        except BaseException:
            self._file.close()
            raise
        holder = {"process": os.getpid(), "host": platform.node(), "since": datetime.now(UTC).isoformat("T", "seconds")}
        self._file.truncate(0)
        self._file.write(json.dumps(holder) + "\n")
        self._file.flush()

    def release(self) -> None:
        """Release the lock, so that another run may use the directory."""
        self._file.close()

    def _acquire(self, folder: Path, wait_s: float | None) -> None:
        started, is_logged = time.monotonic(), False
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = self._read_holder()
            except OSError as error:
                logger.warning(
                    "%s: its file system has no locks (%s); make sure that only one run uses it", folder, error
                )
                return
            is_local = holder.get("host") == platform.node()
            limit_s = wait_s if wait_s is not None else _LOCAL_WAIT_S if is_local else _REMOTE_WAIT_S
            if (is_local and _is_alive(holder.get("process"))) or time.monotonic() - started >= limit_s:
                raise ConfigError(
                    f"output_dir={folder}: another run is writing to it ({_describe_holder(holder)}). "
                    "Use another directory, or stop that run first."
                )
            if not is_logged:
                is_logged = True
                logger.info("%s is locked by %s; waiting up to %.0f s", folder, _describe_holder(holder), limit_s)
            time.sleep(0.2)

    def _read_holder(self) -> dict[str, Any]:
        self._file.seek(0)
        try:
            holder = json.loads(self._file.read())
        except ValueError:  # not written yet
            return {}
        return holder if isinstance(holder, dict) else {}


def _describe_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return "unknown process"
    return f"process {holder.get('process')} on {holder.get('host')}, since {holder.get('since')}"


def _is_alive(process: Any) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, TypeError, ValueError):
        return True
    return True
