"""A file's digest is that of its content, whatever was kept from an earlier start."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from fctune.data.sources import fingerprint
from fctune.data.sources.fingerprint import FileDigests


def content_digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this moment count as settled, so that tests need not wait."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -(10**12))


@pytest.mark.usefixtures("settled")
def test_a_kept_digest_is_taken_without_reading(tmp_path: Path) -> None:
    rows, kept = tmp_path / "rows.jsonl", tmp_path / "kept.json"
    rows.write_text("one\n")
    first = FileDigests(kept)
    assert first.digest(rows) == content_digest(rows)
    first.keep()
    entries = json.loads(kept.read_text())
    entries[str(rows)][-1] = "as kept"
    kept.write_text(json.dumps(entries))
    assert FileDigests(kept).digest(rows) == "as kept"


@pytest.mark.usefixtures("settled")
def test_a_change_that_hides_its_time_and_size_is_seen(tmp_path: Path) -> None:
    rows, kept = tmp_path / "rows.jsonl", tmp_path / "kept.json"
    rows.write_text("one\n")
    digests = FileDigests(kept)
    before, stamp = digests.digest(rows), rows.stat().st_mtime_ns
    digests.keep()
    rows.write_text("two\n")
    os.utime(rows, ns=(stamp, stamp))
    assert FileDigests(kept).digest(rows) == content_digest(rows) != before


def test_a_file_of_this_moment_is_not_kept(tmp_path: Path) -> None:
    rows, kept = tmp_path / "rows.jsonl", tmp_path / "kept.json"
    rows.write_text("one\n")
    digests = FileDigests(kept)
    digests.digest(rows)
    digests.keep()
    assert not kept.exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b'{"a": []}', b"\xff\xfe"])
def test_what_is_kept_may_be_damaged(content: bytes, tmp_path: Path) -> None:
    rows, kept = tmp_path / "rows.jsonl", tmp_path / "kept.json"
    rows.write_text("one\n")
    kept.write_bytes(content)
    digests = FileDigests(kept)
    assert digests.digest(rows) == content_digest(rows)
    digests.keep()
    assert FileDigests(kept).digest(rows) == content_digest(rows)


@pytest.mark.usefixtures("settled")
def test_a_place_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("one\n")
    digests = FileDigests(tmp_path / "missing" / "kept.json")
    assert digests.digest(rows) == content_digest(rows)
    digests.keep()
