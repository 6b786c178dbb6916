"""Rows out of files as a stream: JSON lines or a JSON list, with the line on which each row starts."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from typing import IO, Any

from fctune.errors import DataError

MAX_ROW_BYTES = 32 * 2**20
_BUFFER_BYTES = 2**20
_CHUNK_BYTES = 2**20
_QUOTE = 0x22
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
_UNTIL_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_SCALAR = re.compile(rb'(?:[^",{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)


class RawRow:
    """One row's bytes and the line that it starts on; ``data`` is None where the row is over ``MAX_ROW_BYTES``."""

    __slots__ = ("data", "line")

    def __init__(self, line: int, data: bytes | None) -> None:
        self.line = line
        self.data = data


def iter_lines(stream: IO[bytes]) -> Iterator[RawRow]:
    """The rows of JSON lines; blank lines count as lines and are no rows."""
    line = 0
    while True:
        line += 1
        data = stream.readline(MAX_ROW_BYTES + 1)
        if not data:
            return
        if len(data) > MAX_ROW_BYTES and not data.endswith(b"\n"):
            while data and not data.endswith(b"\n"):
                data = stream.readline(_CHUNK_BYTES)
            yield RawRow(line, None)
        elif data.strip():
            yield RawRow(line, data)


def iter_objects(stream: IO[bytes], path: str) -> Iterator[RawRow]:
    """The rows of a JSON list, or of objects one after the other, each found by its brackets alone.

    Raises:
        DataError: Where the text ends inside a row or the list is followed by more.
    """
    scanner = _Scanner(stream, path)
    in_list = scanner.peek() == b"["
    if in_list:
        scanner.take()
    expect_row = False
    while True:
        mark = scanner.peek()
        if mark == b"":
            if in_list:
                raise DataError(
                    f"{path}:{scanner.line}: ends inside its list of rows: the file is cut off. Fetch it again."
                )
            return
        if in_list and mark == b"]" and not expect_row:
            scanner.take()
            if scanner.peek() != b"":
                raise DataError(
                    f"{path}:{scanner.line}: text after the end of the list of rows. "
                    "Expected one list, or one row a line."
                )
            return
        if mark == b"]" and expect_row:
            raise DataError(f"{path}:{scanner.line}: a comma, then the end of the list of rows. Expected another row.")
        row = scanner.take_value()
        yield row
        if in_list and scanner.peek() == b",":
            scanner.take()
            expect_row = True
        elif in_list and scanner.peek() not in (b"]", b""):
            raise DataError(f"{path}:{scanner.line}: expected ',' or ']' after the row that starts on line {row.line}.")
        else:
            expect_row = False


class _Scanner:
    """A window on a stream that moves from one JSON value to the next."""

    def __init__(self, stream: IO[bytes], path: str) -> None:
        self.line = 1
        self._stream = stream
        self._path = path
        self._buffer = b""
        self._at = 0

    def peek(self) -> bytes:
        """The next byte that is not white space; empty at the end."""
        while True:
            found = _NOT_SPACE.search(self._buffer, self._at)
            end = found.start() if found else len(self._buffer)
            self.line += self._buffer.count(b"\n", self._at, end)
            self._at = end
            if found:
                return found.group()
            if not self._read_more():
                return b""

    def take(self) -> None:
        """Steps over the byte that ``peek`` showed."""
        self._at += 1

    def take_value(self) -> RawRow:
        """The value that starts at the byte that ``peek`` showed."""
        start_line = self.line
        if self._buffer[self._at] not in b"{[":
            return self._take_scalar()
        depth = 0
        scan = self._at
        is_large = False
        while True:
            end = _UNTIL_BRACKET.match(self._buffer, scan).end()  # type: ignore[union-attr]
            if end == len(self._buffer) or self._buffer[end] == _QUOTE:  # nothing more, or a string not closed yet
                if scan - self._at > MAX_ROW_BYTES:
                    is_large = True
                    self.line += self._buffer.count(b"\n", self._at, scan)
                    self._at = scan
                scan -= self._at
                if len(self._buffer) - self._at > 8 * MAX_ROW_BYTES or not self._read_more():
                    raise DataError(
                        f"{self._path}:{start_line}: the row that starts here does not end: the file is cut off, or a "
                        "bracket or quote is missing. Fix the row, or fetch the file again."
                    )
                continue
            depth += 1 if self._buffer[end] in b"{[" else -1
            scan = end + 1
            if depth == 0:
                break
        data = self._buffer[self._at : scan]
        self.line += data.count(b"\n")
        self._at = scan
        return RawRow(start_line, None if is_large or len(data) > MAX_ROW_BYTES else data)

    def _take_scalar(self) -> RawRow:
        """A number, string or word where a row should be: what stands up to the next comma or bracket."""
        end = self._at
        while (match := _SCALAR.match(self._buffer, self._at)) and match.end() == len(self._buffer):
            if not self._read_more():
                break
        end = max(match.end(), self._at + 1) if match else self._at + 1
        data = self._buffer[self._at : end]
        row = RawRow(self.line, data)
        self.line += data.count(b"\n")
        self._at = end
        return row

    def _read_more(self) -> bool:
        """Drops what was taken and reads on, by more the longer the value is."""
        self._buffer = self._buffer[self._at :]
        self._at = 0
        chunk = self._stream.read(max(_CHUNK_BYTES, len(self._buffer)))
        self._buffer += chunk
        return bool(chunk)


def open_rows(path: str) -> Iterator[RawRow]:
    """The rows of one JSON or JSON lines file, gzip or not, which is told by its first bytes and not by its name.

    Raises:
        DataError: For a file that is binary or cut off, after the rows before.
    """
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    if not is_gzip:
        with open(path, "rb") as file:
            yield from _iter_rows(io.BufferedReader(file, _BUFFER_BYTES), path)
        return
    with gzip.open(path, "rb") as unzipped:
        stream = _GzipStream(unzipped)
        held: RawRow | None = None
        line = 0
        try:
            for row in _iter_rows(io.BufferedReader(stream, _BUFFER_BYTES), path):
                if held is not None:
                    line = held.line
                    yield held
                held = row
        except DataError:
            if stream.error is None:
                raise
        if stream.error is not None:  # the row held is the one that breaks off
            raise DataError(
                f"{path}:{line}: the gzip stream breaks off after the row on this line ({stream.error}). "
                "Fetch the file again."
            )
        if held is not None:
            yield held


class _GzipStream(io.RawIOBase):
    """What a gzip file holds up to where it breaks off, with ``error`` saying why it does."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._unzipped = file
        self.error: Exception | None = None

    def readable(self) -> bool:
        """True: it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer and returns the number of bytes."""
        if self.error is not None:
            return 0
        try:
            data = self._unzipped.read1(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.error = error
            return 0
        buffer[: len(data)] = data
        return len(data)


def _iter_rows(stream: io.BufferedReader, path: str) -> Iterator[RawRow]:
    head = stream.peek(_BUFFER_BYTES)[:4096]
    if head.startswith(b"\xef\xbb\xbf"):
        stream.read(3)
        head = head[3:]
    if b"\0" in head or head.startswith((b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ")):
        raise DataError(
            f"{path}: binary or not UTF-8 (starts with {head[:8]!r}). Expected JSON, JSON lines, JSON lines in gzip, "
            "or Parquet."
        )
    first_line = head.lstrip().split(b"\n", 1)[0].strip()
    if head.lstrip()[:1] == b"[" or first_line == b"{":
        return iter_objects(stream, path)
    return iter_lines(stream)
