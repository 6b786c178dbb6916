"""Commands as a user types them: exit codes, output files, one sentence for each wrong input."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.cli import main
from tests.conftest import REAL_DATA, ROOT, run_with_closed_pipe
from tests.tasks.benchmarks.bfcl.bfcl_wheel import data_dir, gold_calls, load_cases, needs_wheel
from tests.warm_interpreter import warm_python

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
BAD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "robot", "content": "Hello."}]}


def test_check_fails_on_a_bad_row_unless_it_is_skipped(
    write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = str(write_rows([GOOD, BAD]))
    assert main(["data", "check", rows]) == 1
    assert "messages[1].role" in capsys.readouterr().out
    assert main(["data", "check", rows, "--on-invalid", "skip"]) == 0


@pytest.mark.parametrize(("rows", "code"), [([GOOD], 0), ([GOOD, BAD], 1)])
def test_a_closed_pipe_changes_neither_the_exit_code_nor_the_files_written(
    rows: list[dict[str, Any]], code: int, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    assert run_with_closed_pipe("data", "check", str(write_rows(rows)), "--json", str(out)) == code
    assert json.loads(out.read_text())["rows"] == len(rows)


def test_overrides_may_come_before_and_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "llama3_1_8b_lora.yaml")
    assert main(["plan", "micro_batch_size=1", "--config", config, "--json", "data.seq_len=1024"]) == 0
    apart = capsys.readouterr().out
    assert main(["plan", "--config", config, "--json", "micro_batch_size=1", "data.seq_len=1024"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(apart)
    for wrong in (["stray"], ["--odd", "a=1"]):
        with pytest.raises(SystemExit) as stop:
            main(["plan", "micro_batch_size=1", "--config", config, *wrong])
        assert stop.value.code == 2
        assert f"unrecognized arguments: {wrong[0]}" in capsys.readouterr().err


def test_check_writes_a_report_and_a_page(write_rows: Callable[..., Path], tiny_base: Path, tmp_path: Path) -> None:
    rows = str(write_rows([GOOD, GOOD]))
    files = ["--json", str(tmp_path / "new" / "report.json"), "--html", str(tmp_path / "new" / "report.html")]
    assert main(["data", "check", rows, "--tokenizer", str(tiny_base), "--seq-len", "512", *files]) == 0
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert (report["rows"], report["conversations"], report["duplicates"], report["defects"]) == (2, 2, 1, 0)
    page = (tmp_path / "new" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http://" not in page.split("<body")[0]


def test_check_names_tokens_that_the_model_has_no_rows_for(
    make_model: Callable[..., Path], write_rows: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = make_model(vocab_size=1400), tmp_path / "report.json"
    assert main(["data", "check", str(write_rows([GOOD])), "--tokenizer", str(base), "--json", str(out)]) == 2
    error = capsys.readouterr().err
    assert "tokens beyond the 1,400 rows of the model's embedding: <|eot_id|>." in error
    assert "model.add_tokens" in error
    assert json.loads(out.read_text())["rows"] == 1


@pytest.mark.real_data
def test_check_of_real_rows_reports_their_known_counts(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(["data", "check", str(REAL_DATA / "glaive_demo"), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["rows"], report["calls"], report["duplicates"], report["defects"]) == (300, 211, 35, 0)


def test_show_prints_the_row_and_its_supervised_share(
    write_rows: Callable[..., Path], tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = str(write_rows([BAD, GOOD]))
    assert main(["data", "show", rows, "--row", "2", "--tokenizer", str(tiny_base)]) == 0
    shown = capsys.readouterr().out
    assert "Hello.<|eot_id|>" in shown
    assert "of them supervised" in shown


@pytest.mark.parametrize(("environment", "has_colour"), [({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": "1"}, False)])
def test_show_tells_supervised_text_apart_with_and_without_colour(
    environment: dict[str, str],
    has_colour: bool,
    write_rows: Callable[..., Path],
    tiny_base: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["data", "show", str(write_rows([GOOD])), "--tokenizer", str(tiny_base)]) == 0
    shown = capsys.readouterr().out
    prompt = "assistant<|end_header_id|>\n\n"
    if has_colour:
        assert f"{prompt}\x1b[32mHello.<|eot_id|>\x1b[0m" in shown
        assert "⟦" not in shown
    else:
        assert "between ⟦ and ⟧\n" in shown
        assert f"{prompt}⟦Hello.<|eot_id|>⟧" in shown
        assert "\x1b" not in shown


def test_prepare_writes_the_set_that_training_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "prepare", "--config", str(ROOT / "configs" / "tiny_lora.yaml")]
    overrides = [f"output_dir={tmp_path / 'run'}", "data.sources.0.path=synthetic:train:30:1"]
    overrides.append(f"model.path={ROOT / 'fctune' / 'assets' / 'tiny_base'}")
    assert main([*arguments, *overrides]) == 0
    (prepared,) = (path for path in (tmp_path / "cache" / "prepared").iterdir() if path.is_dir())
    stamp = (prepared / "meta.json").stat().st_mtime_ns
    assert main([*arguments, *overrides]) == 0
    assert (prepared / "meta.json").stat().st_mtime_ns == stamp
    assert "30 conversations from 30 rows" in capsys.readouterr().out


def test_synthetic_rows_and_cases_are_written_as_files(tmp_path: Path) -> None:
    for split in ("train", "cases"):
        out = tmp_path / "new" / f"{split}.jsonl"
        assert main(["data", "synthetic", split, "--rows", "5", "--seed", "1", "--out", str(out)]) == 0
        assert len(out.read_text().splitlines()) == 5


def test_synthetic_rows_replace_a_file_of_something_else_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("mine\n")
    command = ["data", "synthetic", "train", "--rows", "5", "--out", str(out)]
    assert main(command) == 2
    assert "rows.jsonl: exists and holds something else; pass --force to replace it." in capsys.readouterr().err
    assert out.read_text() == "mine\n"
    assert main([*command, "--force"]) == 0
    assert main(command) == 0, "the same rows again"
    assert main([*command, "--seed", "1"]) == 2


CASE = {
    "id": "c0",
    "kind": "single",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "expected_calls": [{"name": "f", "arguments": {}}],
}


def test_score_calls_writes_a_verdict_per_row_and_prints_each_category_with_its_interval(
    write_rows: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = write_rows(
        [CASE, CASE | {"id": "c1"}, CASE | {"id": "c2", "kind": "[no] call", "expected_calls": []}], "c.jsonl"
    )
    good = {"id": "c0", "calls": CASE["expected_calls"]}
    predictions = write_rows([good, good, {"id": "c2", "text": "No.", "format": "hermes"}, {"id": "c9", "calls": []}])
    out = tmp_path / "new" / "out.jsonl"
    assert main(["score", "calls", "--cases", str(cases), "--predictions", str(predictions), "--out", str(out)]) == 0
    assert [json.loads(line)["valid"] for line in out.read_text().splitlines()] == [True, True, True, False]
    shown = " ".join(capsys.readouterr().out.split())
    assert "[no] call 1 100.0% 20.7% - 100.0% 100.0%" in shown
    assert "single 3 66.7% 20.8% - 93.9% 66.7% 1 no_answer" in shown
    assert "1 case without a prediction, counted as wrong: c1" in shown
    assert "1 prediction with an unknown id, wrong and in no category: c9" in shown
    assert "1 id more than once" in shown
    assert set(json.loads(out.with_suffix(".summary.json").read_text())["scores"]) == {"[no] call", "single", "all"}


@needs_wheel
def test_score_bfcl_applies_the_leaderboards_rules(
    write_rows: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = load_cases("live_parallel")[0]
    calls = [{"name": call.name, "arguments": call.arguments} for call in gold_calls(case)]
    rows = [{"id": case.id, "calls": calls}, {"id": case.id, "calls": calls[:1]}, {"id": "irrelevance_0", "calls": []}]
    command = ["score", "bfcl", "--data", str(data_dir()), "--predictions", str(write_rows(rows))]
    assert main([*command, "--out", str(tmp_path / "out.jsonl"), "--categories", "multi_turn_base"]) == 0
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["category"], row["valid"], row["reason"]) for row in out] == [
        (case.id, "live_parallel", True, ""),
        (case.id, "live_parallel", False, f"1 call instead of {len(calls)}"),
        ("irrelevance_0", "irrelevance", True, ""),
    ]
    shown = " ".join(capsys.readouterr().out.split())
    assert "live_parallel 17 5.9%" in shown
    assert "multi_turn_base 200 0.0% 0.0% - 1.9%" in shown
    # A benchmark's categories are never summed up.
    assert "all" not in json.loads((tmp_path / "out.summary.json").read_text())["scores"]


def test_the_command_can_be_run_as_a_module() -> None:
    done = subprocess.run(
        [warm_python(), "-m", "fctune.cli", "score", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "bfcl" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data", "check", "no/such.jsonl"], "no such file"),
        (["data", "check", "pyproject.toml", "--seq-len", "5"], "needs --tokenizer"),
        (
            ["data", "check", "configs", "--tokenizer", "no/such"],
            "no/such: no such directory; did you mean hf:no/such?",
        ),
        (["data", "show", "synthetic:train:3:1", "--row", "9", "--tokenizer", "TINY"], "fewer than 9 rows"),
        (["data", "show", "synthetic:train:3:1", "--row", "0", "--tokenizer", "TINY"], "rows are numbered from 1"),
        (["data", "prepare", "--config", "no/such.yaml"], "no such config file"),
        (["data", "synthetic", "train", "--rows", "0", "--out", "x"], "expected 1 or more"),
        (["data", "synthetic", "train", "--rows", "1", "--out", "/proc/nowhere/x"], "cannot be written"),
        (["score", "calls", "--cases", "no/such", "--predictions", "x", "--out", "x"], "no such file"),
        (["score", "calls", "--cases", "configs", "--predictions", "x", "--out", "x"], "configs: a directory, not a"),
        (["score", "bfcl", "--data", "no/such", "--predictions", "x", "--out", "x"], "no such directory"),
        (["score", "bfcl", "--data", "configs", "--predictions", "no/such", "--out", "/tmp/x/y"], "cannot be read"),
        (["score", "bfcl", "--data", "configs", "--predictions", "README.md", "--out", "/tmp/x/y"], "invalid pred"),
        (
            ["score", "bfcl", "--data", "configs", "--categories", "simple", "--predictions", "x", "--out", "x"],
            "not a category of the leaderboard",
        ),
        (
            ["score", "bfcl", "--data", "configs", "--categories", "multiple", "--predictions", "x", "--out", "x"],
            "site-packages/bfcl_eval/data",
        ),
    ],
)
def test_wrong_input_is_answered_with_one_sentence(
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


def test_a_row_is_shown_as_a_conversation_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "synthetic:train:3:1", "--row", "3"]) == 0
    output = capsys.readouterr().out
    assert "synthetic:train:3:1:3" in output
    assert "tools: " in output
    assert "user: " in output
    assert "assistant:" in output


def test_the_tiny_base_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with_base = ["synthetic:train:10:1", "--tokenizer", "fctune/assets/tiny_base"]
    assert main(["data", "show", *with_base, "--row", "3"]) == 0
    assert main(["data", "check", *with_base]) == 0
    assert "supervised" in capsys.readouterr().out


def test_one_of_anything_is_written_in_the_singular(
    write_rows: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    rows, page, out = str(write_rows([{"tools": [tool], "messages": conversation}])), tmp_path / "page.html", tmp_path
    assert main(["data", "check", rows, "--html", str(page)]) == 0
    assert main(["data", "convert", rows, str(out / "clean.jsonl"), "--to", "openai"]) == 0
    assert main(["data", "cases", rows, "--out", str(out / "cases.jsonl")]) == 0
    predictions = out / "predictions.jsonl"
    predictions.write_text(json.dumps({"id": "unknown", "answer": "x"}) + "\n")
    cases = str(out / "cases.jsonl")
    score = ["score", "calls", "--cases", cases, "--predictions", str(predictions), "--out", str(out / "scored.jsonl")]
    assert main(score) == 0
    said = capsys.readouterr().out
    assert " ".join(said.split()).count("1 row") == 3, said
    tiles = re.findall(r'<div class="tile"><b[^>]*>([^<]*)</b><span>([^<]*)</span>', page.read_text("utf-8"))
    for text in (said, *(f"{number} {label}" for number, label in tiles)):
        assert not re.search(r"(?<![\w.,])1 +(near )?[a-z]+s\b", text), text


@pytest.mark.parametrize("command", ["sample", "parser-accuracy"])
def test_help_offers_dialogues_only_where_they_are_asked(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, is_asked in ((command, False), ("eval", True)):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "smoke, synthetic," in shown
        assert ("environment:NAMES:TASKS" in shown) == is_asked
        assert "1.0 (greedy)" not in shown


def test_help_lists_the_row_formats(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "check", "--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert all(name in output for name in ("auto", "openai", "sharegpt", "hermes", "glaive", "xlam", "toolace"))


def test_the_former_name_of_parser_accuracy_works_and_is_not_documented(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("parser-accuracy", "served"):
        assert main([name, "no/such"]) == 2
        assert "no/such: no such directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert "parser-accuracy" in listed
    assert " served " not in listed
