"""Duplicate and near-duplicate rows, found by digests and MinHash signatures on disk so that memory stays flat.

MinHash: Broder, On the resemblance and containment of documents, 1997. Bands of the signature find candidates
(Leskovec et al., Mining of Massive Datasets, 3.4), the full signature estimates their Jaccard similarity.

datasketch takes four times the CPU time for the same search (4.5 s and 1.2 s for 20,000 rows) and keeps its index in
memory.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
import tempfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fctune.base.errors import DataError
from fctune.data.conversation import Conversation

NUM_HASHES = 64
NEAR = 0.8
_NUM_BANDS = 16
_MAX_WORDS = 20_000
_MAX_CACHED_WORDS = 200_000
_WORD = re.compile(r"\w+")
_RECORD = np.dtype(
    [("digest", "<u8"), ("origin", "<u8"), ("line", "<u8"), ("file", "<u4"), ("signature", "<u4", (NUM_HASHES,))]
)

_SLICE_ROWS = 16_384
_SLICE_PAIRS = 512  # the kernel maps 64 KiB around each row looked at
_NUM_SHOWN = 10

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Location = tuple[int, int]
"""(index of the file, line)"""


class Repeats(NamedTuple):
    """The numbers of exact and near repeats of earlier rows, and examples of (row, earlier row, similarity)."""

    num_exact: int
    exact: list[tuple[Location, Location, float]]
    num_near: int
    near: list[tuple[Location, Location, float]]


class WordHasher:
    """Hashes words, and runs of words, to 64 bits, identically in every process."""

    def __init__(self) -> None:
        self._words: dict[str, int] = {}
        self._factors = np.random.default_rng(8).integers(2**62, 2**63, 64, dtype=np.uint64) | np.uint64(1)

    def hash_words(self, text: str) -> Hashes:
        """Return one hash per word of the text, ``[num_words]``; case and punctuation are ignored."""
        cache = self._words
        if len(cache) > _MAX_CACHED_WORDS:
            cache.clear()
        words = _WORD.findall(text.lower())[:_MAX_WORDS]
        try:
            return np.array([cache[word] for word in words], np.uint64)
        except KeyError:
            for word in words:
                if word not in cache:
                    data = word.encode("utf-8", "surrogatepass")
                    cache[word] = zlib.crc32(data) << 32 | zlib.crc32(data, 0x9E3779B9)
            return np.array([cache[word] for word in words], np.uint64)

    def hash_runs(self, words: Hashes, length: int) -> Hashes:
        """Return one hash per run of ``length`` words, ``[num_words - length + 1]``; a shorter text is a single run."""
        length = min(length, len(words))
        if length == 0:
            return words
        count = len(words) - length + 1
        runs = np.zeros(count, np.uint64)
        for i in range(length):
            runs += words[i : i + count] * self._factors[i]
        mixed: Hashes = (runs ^ (runs >> np.uint64(29))) * self._factors[63]
        return mixed


class MinHasher:
    """Makes MinHash signatures of texts from their runs of three words."""

    def __init__(self, hasher: WordHasher) -> None:
        self._hasher = hasher
        rng = np.random.default_rng(5)
        self._multipliers = (rng.integers(0, 2**63, (NUM_HASHES, 1), dtype=np.uint64) << np.uint64(1)) | np.uint64(1)

    def sign(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the signature of a text, ``[NUM_HASHES]``; zeros if it has no words."""
        runs = self._hasher.hash_runs(self._hasher.hash_words(text), 3)
        if not len(runs):
            return np.zeros(NUM_HASHES, np.uint32)
        signature: npt.NDArray[np.uint32] = ((runs[None, :] * self._multipliers) >> np.uint64(32)).min(1)
        return signature.astype(np.uint32)


class SeenTexts:
    """Texts in memory, 256 bytes each, for callers that must know at once if a new one nearly repeats another."""

    def __init__(self, hasher: WordHasher) -> None:
        self._signer = MinHasher(hasher)
        self._signatures = np.zeros((64, NUM_HASHES), np.uint32)
        self.num_texts = 0

    def add(self, text: str) -> int | None:
        """Add a text, and return None; or return the number of the earlier text that it nearly repeats."""
        signature = self._signer.sign(text)
        shares = (self._signatures[: self.num_texts] == signature).mean(1)
        if len(shares) and shares.max() >= NEAR:
            return int(shares.argmax())
        if self.num_texts == len(self._signatures):
            self._signatures = np.concatenate([self._signatures, np.zeros_like(self._signatures)])
        self._signatures[self.num_texts] = signature
        self.num_texts += 1
        return None


class SimilarityIndex:
    """Collects a record of 284 bytes per row in a temporary file and finds the repeats at the end."""

    def __init__(self, hasher: WordHasher) -> None:
        self.num_rows = 0
        self._signer = MinHasher(hasher)
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="fctune-check-")  # noqa: SIM115  closed with the index
        self._record = np.zeros(1, _RECORD)

    def add(self, conversation: Conversation, file: int, line: int, origin: str = "") -> None:
        """Append the digest and MinHash signature of the next row to the temporary file.

        Args:
            conversation: The row.
            file: Index of its file.
            line: Its line.
            origin: Digest of the row that it was made of; rows of one origin are no near repeats of each other.
        """
        record = self._record
        digest = conversation.digest()
        record["digest"], record["origin"] = int(digest, 16), int(origin or digest, 16)
        record["file"] = file
        record["line"] = line
        record["signature"][0] = self._signer.sign(spoken_text(conversation))
        self._write(record.tobytes())
        self.num_rows += 1

    def find_repeats(self) -> Repeats:
        """Find the rows that repeat an earlier one exactly or nearly.

        A row is a near repeat if its signature agrees with an earlier row's in a share ``NEAR`` of its hashes; exact
        repeats are not counted again.
        """
        if self.num_rows == 0:
            return Repeats(0, [], 0, [])
        self._write(b"")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            records = _Records(mapped)
            first = _find_first(records)
            nearest, share = _find_nearest(records, np.flatnonzero(first < 0))
            exact, near = np.flatnonzero(first >= 0), np.flatnonzero(nearest >= 0)
            return Repeats(
                len(exact),
                [(records.locate(row), records.locate(first[row]), 1.0) for row in exact[:_NUM_SHOWN]],
                len(near),
                [(records.locate(row), records.locate(nearest[row]), float(share[row])) for row in near[:_NUM_SHOWN]],
            )

    def find_earlier(self) -> Rows:
        """Return an earlier row that each row repeats exactly or nearly, ``[num_rows]``; -1 for the others."""
        if self.num_rows == 0:
            return np.zeros(0, np.int64)
        self._write(b"")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            records = _Records(mapped)
            first = _find_first(records)
            nearest, _ = _find_nearest(records, np.flatnonzero(first < 0))
            return np.where(first >= 0, first, nearest)

    def _write(self, data: bytes) -> None:
        """Write a record, or flush the buffer if there is no data."""
        try:
            if data:
                self._file.write(data)
            else:
                self._file.flush()
        except OSError as error:
            raise DataError(
                f"temporary file of the check: {error}. Set TMPDIR to a directory on a disk with free space."
            ) from None

    def close(self) -> None:
        """Delete the temporary file that holds the signatures."""
        with contextlib.suppress(OSError):  # flushing to a full disk fails, but the data is no longer needed
            self._file.close()


def spoken_text(conversation: Conversation) -> str:
    """Return the text of a conversation, with calls and without tools."""
    parts = []
    for message in conversation.messages:
        if message.content:
            parts.append(message.content)
        for call in message.calls:
            parts.append(call.name)
            parts.append(json.dumps(call.arguments, ensure_ascii=False))
    return " ".join(parts)


class _Records:
    """The memory-mapped records of a file; pages are released after each access so that resident memory stays flat."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self.num_rows = len(mapped) // _RECORD.itemsize

    def read(self, start: int, stop: int, column: str) -> npt.NDArray[Any]:
        """Return a column of the rows start to stop."""
        part = np.frombuffer(self._mapped, _RECORD, stop - start, start * _RECORD.itemsize)[column].copy()
        self._mapped.madvise(mmap.MADV_DONTNEED)
        return part

    def read_signatures(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Return the signatures of these rows, ``[num_rows, NUM_HASHES]``."""
        part: npt.NDArray[np.uint32] = np.frombuffer(self._mapped, _RECORD)["signature"][rows]
        self._mapped.madvise(mmap.MADV_DONTNEED)
        return part

    def locate(self, row: int) -> Location:
        """Return the file and line of a row."""
        return int(self.read(row, row + 1, "file")[0]), int(self.read(row, row + 1, "line")[0])

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yield the start and stop of slices small enough for memory."""
        for start in range(0, self.num_rows, _SLICE_ROWS):
            yield start, min(start + _SLICE_ROWS, self.num_rows)


def _find_first(records: _Records) -> Rows:
    """Return the first identical row of each row, or -1 for a row that is the first itself."""
    digests = np.concatenate([records.read(start, stop, "digest") for start, stop in records.slices()])
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    is_new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    first_of = order[np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))]
    first = np.full(len(order), -1, np.int64)
    first[order[~is_new]] = first_of[~is_new]
    return first


def _find_nearest(records: _Records, rows: Rows) -> tuple[Rows, npt.NDArray[np.float32]]:
    """Return an earlier row that each of these rows nearly repeats, or -1, and its estimated similarity."""
    nearest = np.full(records.num_rows, -1, np.int64)
    shares = np.zeros(records.num_rows, np.float32)
    width = NUM_HASHES // _NUM_BANDS
    origins = np.concatenate([records.read(start, stop, "origin") for start, stop in records.slices()])
    factors = np.random.default_rng(6).integers(2**62, 2**63, width, dtype=np.uint64) | np.uint64(1)
    for band in range(_NUM_BANDS):
        columns = slice(band * width, (band + 1) * width)
        keys = np.concatenate(
            [
                (records.read(start, stop, "signature")[:, columns].astype(np.uint64) * factors).sum(1)
                for start, stop in records.slices()
            ]
        )[rows]
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        for start in range(0, len(same), _SLICE_PAIRS):
            at = same[start : start + _SLICE_PAIRS]
            later, earlier = rows[order[at + 1]], rows[order[at]]
            share = (records.read_signatures(later) == records.read_signatures(earlier)).mean(1)
            better = (share >= NEAR) & (share > shares[later]) & (origins[later] != origins[earlier])
            nearest[later[better]] = earlier[better]
            shares[later[better]] = share[better]
    return nearest, shares
