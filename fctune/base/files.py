"""Durable files: atomic replacement, flushing, time limits for disks that hang, checksums, and marks of use."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import xxhash

_CHUNK_BYTES = 16 * 1024 * 1024


@contextmanager
def open_atomically(path: Path) -> Iterator[IO[str]]:
    """Open a text file (UTF-8) that replaces ``path`` when the block ends, or vanishes if the block raises.

    Concurrent writers do not interfere: the last one to finish wins. Readers see the old file or the new one.

    Args:
        path: File to create or replace; its directory must exist.
    """
    partial = _partial_name(path)
    try:
        with open(partial, "w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes, *, is_durable: bool = False) -> None:
    """Create or replace a file in one step; text is encoded as UTF-8.

    Args:
        path: File to create or replace; its directory must exist.
        content: Complete content of the file.
        is_durable: Flush the file and its directory, so that the new content survives a power cut.
    """
    partial = _partial_name(path)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        if is_durable:
            flush(partial)
        partial.replace(path)
        if is_durable:
            flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def staged_directory(path: Path, *, suffix: str = "partial", replaces: bool = False) -> Iterator[Path]:
    """Create a hidden directory next to ``path`` and rename it to ``path`` when the block ends.

    The hidden directory is removed if the block raises; a killed process leaves it for the next one to replace.

    Args:
        path: Final directory.
        suffix: Last part of the hidden directory's name; processes that may run at once need different ones.
        replaces: Replace an existing ``path``; of a link, the link. Otherwise it is kept and the new one dropped.

    Raises:
        OSError: The disk is full, gone or read-only; an existing ``path`` is unaffected.
    """
    staging = path.with_name(f".{path.name}.{suffix}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        if replaces:
            _swap(staging, path)
        elif not path.exists():
            staging.rename(path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap(staging: Path, path: Path) -> None:
    """Rename a directory to ``path``; an existing one is deleted last, so that one of the two is always complete."""
    # A name of its own, because an earlier one may still be there: NFS keeps files that a process has open.
    old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.replaced")
    if os.path.lexists(path):
        path.rename(old)
    try:
        staging.rename(path)
    except BaseException:
        if os.path.lexists(old):
            old.rename(path)
        raise
    for replaced in path.parent.glob(f".{glob.escape(path.name)}.*.replaced"):  # and those of killed processes
        with suppress(OSError):
            delete(replaced)


def delete(path: Path, *, ignore_errors: bool = False) -> None:
    """Delete a directory, file or link, if there is one; of a link, not what it points to.

    Args:
        path: What to delete.
        ignore_errors: Leave what cannot be deleted of a directory.

    Raises:
        OSError: It cannot be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def find_free_name(path: Path) -> Path:
    """Return the path with the first number behind its name that is not taken: ``mine.1`` for ``mine``."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{number}")):
        number += 1
    return free


def run_within(limit_s: float, action: Callable[[], object]) -> bool:
    """Run ``action`` on a thread, for at most ``limit_s``, because a disk may hang; returns True if it has ended.

    An ``OSError`` ends it, too.
    """

    def run() -> None:
        with suppress(OSError):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def format_bytes(count: int) -> str:
    """Format a size for a message, such as ``1.5 GiB`` or ``20 MiB``."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.{int(count < 10 * 2**20)}f} MiB"


def flush(path: Path) -> None:
    """Flush a file's content, or a directory's names, to disk (fsync).

    Raises:
        OSError: The disk cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Return the XXH3-128 checksum of a file's bytes, 32 hex digits.

    Raises:
        OSError: The file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")


# Descriptors of the files that this process has marked.
_in_use: dict[Path, int] = {}


def mark_in_use(file: Path) -> None:
    """Share a lock on a file until this process ends; nothing where its file system has no locks."""
    if (earlier := _in_use.pop(file, None)) is not None:  # perhaps of a file that was removed and written again
        os.close(earlier)
    with suppress(OSError):
        _in_use[file] = os.open(file, os.O_RDONLY)
        fcntl.flock(_in_use[file], fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_in_use(file: Path) -> bool:
    """Return True if a process has a lock on a file; False without the file, or without locks on its file system."""
    try:
        descriptor = os.open(file, _lock_mode(file))
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _lock_mode(file: Path) -> int:
    return os.O_RDWR if os.access(file, os.W_OK) else os.O_RDONLY  # NFS gives exclusive locks to writers only


def _wait_for_lock(descriptor: int, on_wait: Callable[[str], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait(os.pread(descriptor, 4096, 0).decode(errors="replace"))
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        pass


@contextmanager
def hold_lock(file: Path, content: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file while the block runs; without one where the file system has no locks.

    The file is created, and removed at the end. A process that is killed loses its lock.

    Args:
        file: File to lock; its directory must exist.
        content: Text that describes this process, for others.
        on_wait: Called with the text of the process that holds the lock, before this one waits for it.

    Raises:
        OSError: The file cannot be created.
    """
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o664)
        except PermissionError:  # another user's
            descriptor = os.open(file, os.O_RDONLY)
        try:
            _wait_for_lock(descriptor, on_wait)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                    break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the process that held it has removed the file, and another may have created one
    try:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content.encode(), 0)
        yield
    finally:
        with suppress(OSError):
            file.unlink()
        os.close(descriptor)
