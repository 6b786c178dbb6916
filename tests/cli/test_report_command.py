"""``fctune report`` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fctune.cli import main
from fctune.config.sections.success import SuccessConfig
from tests.runs.sample_runs import make_run, tear


def test_a_page_is_written_and_what_is_odd_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tear(make_run(tmp_path / "run", 12))
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(tmp_path / "run"), "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "the last line is incomplete" in output
    assert f"{out}: 1 run, 12 steps" in output
    assert out.read_text().startswith("<!doctype html>")


def test_several_runs_make_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, 5)
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 0
    assert "2 runs, 10 steps" in capsys.readouterr().out
    assert "<h1>2 runs: a, b</h1>" in out.read_text()


@pytest.mark.parametrize(
    ("thresholds", "options", "code"),
    [
        (None, [], 0),
        (None, ["--strict"], 1),
        (SuccessConfig(min_tokens_per_s_per_gpu=1e6, final_checkpoint=False), [], 1),  # too slow
        (SuccessConfig(min_tokens_per_s_per_gpu=10), [], 1),  # no final checkpoint
        (SuccessConfig(min_tokens_per_s_per_gpu=10, final_checkpoint=False), [], 0),
        (SuccessConfig(min_tokens_per_s_per_gpu=10, final_checkpoint=False), ["--strict"], 1),
    ],
)
def test_the_exit_code_is_the_verdict(
    thresholds: SuccessConfig | None, options: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", 60, success=thresholds)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html"), *options]) == code
    is_judged = thresholds is not None or bool(options)
    assert ("tokens/s per GPU, of the planned" in capsys.readouterr().out) == is_judged
    assert ("Success criteria" in (tmp_path / "page.html").read_text()) == is_judged


@pytest.mark.parametrize(
    ("arguments", "due"),
    [
        (["{}/nothing"], "nothing: no such directory"),
        (["{}/other"], "it has neither run.json nor metrics.jsonl"),
        (["{}/run", "--before", "x.jsonl"], "--before: needs --after"),
        (["{}/run", "{}/run", "--after", "x.jsonl"], "only for a single run"),
        (["{}/run", "--after", "x.jsonl"], "x.jsonl: cannot be read"),
        (["{}/run", "--price", "-1"], "--price -1.0: expected 0 or more"),
        (["{}/run", "--price", "inf"], "--price inf: expected 0 or more"),
        (["{}/run", "--out", "{}/run/run.json/page.html"], "cannot be written"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    arguments: list[str], due: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", 3)
    (tmp_path / "other").mkdir()
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "page.html")]
    assert main(["report", *(text.format(tmp_path) for text in arguments), *out]) == 2
    output = capsys.readouterr().err.strip()
    assert due in output
    assert "\n" not in output
    assert not (tmp_path / "page.html").exists()
