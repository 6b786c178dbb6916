"""Data sizes counted in a prepared set, compared with the loader; the choice of the set; sizes given by options."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import DataError
from fctune.config.cache import prepared_root
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.data import data_size
from fctune.data.data_size import measure_data
from fctune.data.fingerprint import fingerprint_inputs
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import prepare
from fctune.data.synthetic import iter_conversations
from tests.conftest import ROOT, TINY_BASE


def tiny(tmp_path: Path, *overrides: str) -> RunConfig:
    source = "data.sources.0.path=synthetic:train:200:7"
    common = [f"output_dir={tmp_path}/run", f"model.path={TINY_BASE}", source]
    return load_config(ROOT / "configs" / "tiny_full.yaml", [*common, *overrides])


@pytest.mark.parametrize(("world_size", "size", "batch"), [(1, 1, 4), (2, 2, 16), (4, 3, 26)])
def test_positions_of_unpacked_rows_equal_those_of_the_loader(
    world_size: int, size: int, batch: int, tmp_path: Path
) -> None:
    config = tiny(tmp_path, "data.packed=false", f"micro_batch_size={size}", f"global_batch_size={batch}")
    prepared = prepare(config.data, TINY_BASE, prepared_root(config))
    rows = measure_data(config, TINY_BASE, None, None, world_size)
    assert rows is not None
    loader = GlobalLoader(prepared, "train", batch, config.seed)
    loaded = 0
    for step in range(1, loader.steps_per_epoch + 1):
        for rank in range(world_size):
            batches = loader.micro_batches(loader.step_at(step), rank, world_size, size)
            loaded += sum(batch.tokens.numel() for batch in batches if batch.rows != (-1,))
    assert rows.slots == loaded
    assert rows.packs == prepared.num_packs("train")


def test_a_set_of_another_tokenizer_is_not_counted(tmp_path: Path) -> None:
    """Rows on the hub are identified by name and revision, so nothing is downloaded to tell the sets apart."""
    config = tiny(tmp_path)
    prepared = prepare(config.data, TINY_BASE, prepared_root(config))
    config.data.sources[0].path = "hf:some/rows@abc"
    other = tmp_path / "other"
    shutil.copytree(TINY_BASE, other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    name, inputs = fingerprint_inputs(config.data, other)
    meta = json.loads((prepared.path / "meta.json").read_text())
    moved = prepared.path.rename(prepared.path.parent / name)
    (moved / "meta.json").write_text(json.dumps(meta | {"inputs": inputs, "fingerprint": name}))
    counted = measure_data(config, other, None, None)
    assert counted is not None
    assert counted.source == f"counted in {moved}"
    assert measure_data(config, TINY_BASE, None, None) is None


def test_without_a_tokenizer_the_newest_set_is_counted_with_a_note(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    prepared = prepare(config.data, TINY_BASE, prepared_root(config))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(TINY_BASE / "config.json", bare / "config.json")
    for model_dir in (bare, None):
        rows = measure_data(config, model_dir, None, None)
        assert rows is not None
        assert rows.packs == prepared.num_packs("train")
        assert "without the model's tokenizer" in rows.source


def test_a_damaged_set_is_an_error(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    prepared = prepare(config.data, TINY_BASE, prepared_root(config))
    (prepared.path / "tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match="damaged prepared set"):
        measure_data(config, TINY_BASE, None, None)


def test_files_with_stored_digests_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10**10)  # digests of files this young are not cached
    config = tiny(tmp_path)
    prepare(config.data, TINY_BASE, prepared_root(config))

    def refuse(*_: Any) -> Any:
        raise AssertionError("a file was read")

    monkeypatch.setattr(hashlib, "file_digest", refuse)
    assert measure_data(config, TINY_BASE, None, None) is not None


def test_rows_that_were_moved_are_found_unless_that_takes_long_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10**10)  # digests of files this young are not cached
    rows = tmp_path / "a" / "rows.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps(row.to_openai()) + "\n" for row in iter_conversations("train", 30, 1)))
    config = tiny(tmp_path, f"data.sources.0.path={rows}")
    prepared = prepare(config.data, TINY_BASE, prepared_root(config))

    def find() -> str | None:
        counted = measure_data(config, TINY_BASE, None, None)
        return None if counted is None else counted.source

    rows.parent.rename(tmp_path / "b")
    copied = tmp_path / "c" / "rows.jsonl"
    copied.parent.mkdir()
    shutil.copyfile(tmp_path / "b" / "rows.jsonl", copied)
    for folder, limit, is_found in (("b", 0, True), ("c", 0, False), ("c", 2**20, True)):
        monkeypatch.setattr(data_size, "_MAX_READ_BYTES", limit)
        config.data.sources[0].path = str(tmp_path / folder / "rows.jsonl")
        assert find() == (f"counted in {prepared.path}" if is_found else None), (folder, limit)
    copied.write_text(copied.read_text() + "\n")
    assert find() is None


def test_a_single_given_row_is_one_pack(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    assert config.data.validation_share > 0
    for data in (config.data, replace(config.data, packed=False)):
        rows = measure_data(replace(config, data=data), TINY_BASE, 1, 1)
        assert rows is not None
        assert (rows.packs, rows.tokens) == (1, 1)
