"""The command as a user types it: exit codes, files it writes, one sentence for each wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from fctune.cli import main
from fctune.data.check import REPORT_SCHEMA
from tests.conftest import REAL_DATA, ROOT

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
BAD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "robot", "content": "Hello."}]}


def test_check_fails_on_a_bad_row_and_not_where_it_is_skipped(
    write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = str(write_rows([GOOD, BAD]))
    assert main(["data", "check", rows]) == 1
    assert "messages[1].role" in capsys.readouterr().out
    assert main(["data", "check", rows, "--on-invalid", "skip"]) == 0


def test_check_writes_a_report_of_the_documented_schema_and_a_page(
    write_rows: Callable[..., Path], tiny_base: Path, tmp_path: Path
) -> None:
    rows = str(write_rows([GOOD, GOOD]))
    files = ["--json", str(tmp_path / "new" / "report.json"), "--html", str(tmp_path / "new" / "report.html")]
    assert main(["data", "check", rows, "--tokenizer", str(tiny_base), "--seq-len", "512", *files]) == 0
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    jsonschema.validate(report, REPORT_SCHEMA)
    assert (report["rows"], report["conversations"], report["duplicates"], report["defects"]) == (2, 2, 1, 0)
    page = (tmp_path / "new" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http://" not in page.split("<body")[0]


@pytest.mark.real_data
def test_check_of_the_real_rows_counts_what_is_known_of_them(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(["data", "check", str(REAL_DATA / "glaive_demo"), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["rows"], report["calls"], report["duplicates"], report["defects"]) == (300, 211, 35, 0)


def test_show_prints_the_row_and_how_much_of_it_is_learnt(
    write_rows: Callable[..., Path], tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = str(write_rows([BAD, GOOD]))
    assert main(["data", "show", rows, "--row", "2", "--tokenizer", str(tiny_base)]) == 0
    shown = capsys.readouterr().out
    assert "Hello.<|eot_id|>" in shown
    assert "of them learnt" in shown


def test_prepare_writes_the_set_that_training_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "prepare", "--config", str(ROOT / "configs" / "tiny_lora.yaml")]
    overrides = [f"output_dir={tmp_path / 'run'}", "data.sources.0.path=synthetic:train:30:1"]
    overrides.append(f"model.path={ROOT / 'fctune' / 'assets' / 'tiny_base'}")
    assert main([*arguments, *overrides]) == 0
    (prepared,) = (tmp_path / "prepared").iterdir()
    stamp = (prepared / "meta.json").stat().st_mtime_ns
    assert main([*arguments, *overrides]) == 0
    assert (prepared / "meta.json").stat().st_mtime_ns == stamp
    assert "30 conversations of 30 rows" in capsys.readouterr().out


def test_synthetic_rows_and_cases_are_written_as_files(tmp_path: Path) -> None:
    for split in ("train", "cases"):
        out = tmp_path / "new" / f"{split}.jsonl"
        assert main(["data", "synthetic", split, "--rows", "5", "--seed", "1", "--out", str(out)]) == 0
        assert len(out.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data", "check", "no/such.jsonl"], "no such file"),
        (["data", "check", "pyproject.toml", "--seq-len", "5"], "needs --tokenizer"),
        (["data", "check", "configs", "--tokenizer", "no/such"], "no tokenizer.json"),
        (["data", "show", "synthetic:train:3:1", "--row", "9", "--tokenizer", "TINY"], "fewer than 9 rows"),
        (["data", "show", "synthetic:train:3:1", "--row", "0", "--tokenizer", "TINY"], "rows count from 1"),
        (["data", "prepare", "--config", "no/such.yaml"], "no such config file"),
        (["data", "synthetic", "train", "--rows", "0", "--out", "x"], "expected 1 or more"),
        (["data", "synthetic", "train", "--rows", "1", "--out", "/proc/nowhere/x"], "cannot be written"),
    ],
)
def test_wrong_input_is_a_sentence(
    arguments: list[str],
    words: str,
    tiny_base: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([str(tiny_base) if one == "TINY" else one for one in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
