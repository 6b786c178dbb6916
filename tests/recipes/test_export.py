"""Exports to a failing disk are complete or absent."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import CheckpointError
from fctune.config.loading import load_config
from fctune.models.export import export_merged
from fctune.training.setup import build_base, shard_and_load_
from tests.conftest import ROOT, TINY_BASE
from tests.ranks import run_ranks


def export_to_a_full_disk(world: World, out: Path) -> str:
    """Return the error of this rank when files of the writing rank are limited to 100 kB."""
    config = load_config(str(ROOT / "configs" / "tiny_full.yaml"), [f"output_dir={out}", f"model.path={TINY_BASE}"])
    model = build_base(config, TINY_BASE, world)
    shard_and_load_(model, config, TINY_BASE, world)
    if world.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        distributed.run_on_all_ranks(lambda: export_merged(model, TINY_BASE, out / "merged", world.is_main))
    return str(caught.value)


def test_a_full_disk_is_reported_on_every_rank_and_leaves_no_partial_export(tmp_path: Path) -> None:
    errors = run_ranks(export_to_a_full_disk, 2, tmp_path / "export")
    assert len(set(errors)) == 1
    assert "merged: cannot be written" in errors[0]
    assert "File too large" in errors[0]
    assert not list((tmp_path / "export").iterdir())
