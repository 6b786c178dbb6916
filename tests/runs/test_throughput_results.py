"""Throughput results are found in files of ``fctune throughput`` that measured the run's own model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fctune.runs.record import read_run
from fctune.runs.success import find_throughput, judge_run
from tests.runs.sample_runs import change_run, make_run


def write(path: Path, *rows: tuple[str, int, float], age_s: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [{"model": model, "width": width, "tokens_per_s": speed, "num_tokens": 1} for model, width, speed in rows]
    path.write_text(json.dumps(found))
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))


def find_best(run: Path) -> tuple[float, int] | None:
    found = find_throughput(read_run(run))
    return None if found is None else (found.tokens_per_s, found.width)


def test_the_fastest_width_of_the_runs_own_model_is_used(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    assert find_best(tmp_path / "run") is None
    own, base = str(tmp_path / "run"), "models/base"
    write(tmp_path / "throughput.json", (base, 32, 900.0), (own, 1, 40.0), (own, 8, 150.0))
    assert find_best(tmp_path / "run") == (150.0, 8)


def test_the_newest_file_is_used_and_a_servers_only_inside_the_run(tmp_path: Path) -> None:
    change_run(make_run(tmp_path / "run", 3), started_at="2020-01-01T00:00:00Z")
    write(tmp_path / "eval" / "throughput.json", (str(tmp_path / "run" / "export"), 8, 10.0), age_s=100)
    write(tmp_path / "run" / "server-throughput.json", ("http://127.0.0.1:8000", 16, 700.0), age_s=50)
    write(tmp_path / "throughput.json", ("http://127.0.0.1:9000", 16, 9000.0))  # of an unknown model
    assert find_best(tmp_path / "run") == (700.0, 16)


def test_results_older_than_the_run_are_ignored(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    write(tmp_path / "throughput.json", (str(tmp_path / "run"), 8, 150.0), age_s=100)
    assert find_best(tmp_path / "run") is None


ROW = '[{"model": "RUN", "width": %s, "tokens_per_s": %s}]'


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "[1]", '{"model": 1}', '[{"model": "x", "width": 1}]', ROW % ("null", 1), ROW % (1, '"x"')],
)
def test_files_with_other_contents_are_ignored(content: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    (tmp_path / "run" / "throughput.json").write_text(content.replace("RUN", str(tmp_path / "run")))
    assert find_best(tmp_path / "run") is None


def test_the_commands_output_is_readable(tmp_path: Path, tiny_base: Path) -> None:
    from eval import throughput

    make_run(tmp_path / "run", 3)
    merged, out = tmp_path / "run" / "export" / "merged", tmp_path / "run" / "throughput.json"
    shutil.copytree(tiny_base, merged)
    small = ["--widths", "1,2", "--rounds", "1", "--new-tokens", "4", "--suite", "smoke"]
    assert throughput.main(["--model", str(merged), *small, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    found = find_best(tmp_path / "run")
    assert found is not None
    assert found[0] == max(row["tokens_per_s"] for row in rows)
    judged = {one.name: one for one in judge_run(read_run(tmp_path / "run"))}
    criterion = judged[f"inference tokens/s, {found[1]} prompts at a time"]
    assert (criterion.value, criterion.status) == (found[0], "PASS" if found[0] >= 100 else "FAIL")
