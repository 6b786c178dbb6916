"""The mark of a model that the gate stopped: it holds by every path that leads to the model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fctune.base.errors import ConfigError
from fctune.cli import main
from fctune.runs.release import mark_not_released, read_mark, remove_mark, require_released
from tests.conftest import TINY_BASE

LINES = [{"name": "calls", "title": "held-out calls", "verdict": "worse"}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run whose merged export lies on checkpoint.fallback_dir, as training writes it, and the adapter here."""
    run, other = tmp_path / "runs" / "mine", tmp_path / "other" / "mine" / "export"
    (run / "export" / "adapter").mkdir(parents=True)
    (run / "export" / "adapter" / "adapter_config.json").write_text("{}")
    shutil.copytree(TINY_BASE, other / "merged")
    (run / "export" / "merged").symlink_to(other / "merged")
    return run


def find_paths(run: Path) -> dict[str, Path]:
    merged = run / "export" / "merged"
    (link := run.parent / "link").symlink_to(merged)
    return {"run": run, "link in the run": merged, "files": merged.resolve(), "another link": link}


@pytest.mark.parametrize("marked", ["run", "link in the run", "files", "another link"])
def test_an_export_on_another_disk_is_refused_by_every_path(run: Path, tmp_path: Path, marked: str) -> None:
    paths = find_paths(run)
    mark_not_released(paths[marked], LINES, tmp_path / "gate.json")
    for name, path in paths.items():
        assert read_mark(path) == LINES, name
        with pytest.raises(ConfigError, match=r"held-out calls \(worse\). See .*/export/not_released; "):
            require_released(path, "not served", is_forced=False)
    assert remove_mark(run)
    assert {name: read_mark(path) for name, path in paths.items()} == dict.fromkeys(paths)


def test_exports_of_one_run_on_two_disks_are_released_together(run: Path, tmp_path: Path) -> None:
    mark_not_released(run / "export" / "merged", LINES, tmp_path / "gate.json")
    assert read_mark(run / "export" / "adapter") == LINES
    assert remove_mark(run / "export" / "adapter")
    assert read_mark(run / "export" / "merged") is None


def test_a_mark_of_an_older_version_next_to_the_link_still_holds(run: Path) -> None:
    (run / "export" / "not_released").write_text(json.dumps({"report": "gate.json", "lines": LINES}))
    assert read_mark(run / "export" / "merged") == LINES


def test_a_mark_that_cannot_be_written_at_one_end_is_an_error_and_still_written_at_the_other(
    run: Path, tmp_path: Path
) -> None:
    (run / "export" / "not_released").mkdir()
    with pytest.raises(ConfigError, match=r"runs/mine/export/not_released: cannot be written .* not marked there"):
        mark_not_released(run, LINES, tmp_path / "gate.json")
    assert read_mark((run / "export" / "merged").resolve()) == LINES


def test_checkpoints_of_a_stopped_run_are_refused_and_judged_for_themselves(run: Path, tmp_path: Path) -> None:
    saved, elsewhere = run / "checkpoints" / "elastic-checkpoint-8", tmp_path / "saved"
    saved.mkdir(parents=True)
    elsewhere.symlink_to(saved)
    mark_not_released(run, LINES, tmp_path / "gate.json")
    for path in (saved, elsewhere):
        with pytest.raises(ConfigError, match=r"the gate stopped its run: held-out calls .*/export/not_released; "):
            require_released(path, "not served", is_forced=False)
        require_released(path, "not served", is_forced=True)
    assert not remove_mark(saved), "a gate that judges the checkpoint says nothing about the exports"
    assert read_mark(run) == LINES
    remove_mark(run)
    require_released(saved, "not served", is_forced=False)
    mark_not_released(saved, LINES, tmp_path / "gate.json")
    with pytest.raises(ConfigError, match="the gate stopped it: held-out calls"):
        require_released(saved, "not served", is_forced=False)
    assert read_mark(run) is None


def test_commands_refuse_an_export_on_another_disk_and_its_card_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_not_released(run, LINES, tmp_path / "gate.json")
    monkeypatch.chdir(run.parent)
    merged = Path("mine") / "export" / "merged"
    saved = Path("mine", "checkpoints", "elastic-checkpoint-8")
    saved.mkdir(parents=True)
    for command in (["serve", "--print"], ["export", "--to", "gguf"]):
        assert main([command[0], str(saved), *command[1:]]) == 2
        assert "because the gate stopped its run: held-out calls (worse)" in capsys.readouterr().err
    for path in (Path("mine"), merged, Path(os.path.realpath(merged))):
        for command in (["serve", "--print"], ["push", "me/tuned", "--yes"], ["export", "--to", "gguf"]):
            assert main([command[0], str(path), *command[1:]]) == 2
            assert "because the gate stopped it: held-out calls (worse)" in capsys.readouterr().err
        assert main(["serve", str(path), "--print", "--force"]) == 0
        capsys.readouterr()
        assert main(["push", str(path), "me/tuned", "--print-card"]) == 0
        assert "## Not released" in capsys.readouterr().out
