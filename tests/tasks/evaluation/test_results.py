"""Results on disk: killed and resumed runs, several ranks, invalid files."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fctune.base.distributed import World
from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.registry import FORMATS
from fctune.engines.engine import Answer, Prompt
from fctune.tasks.evaluation.results import ResultsFile, read_rows, read_settings
from fctune.tasks.evaluation.run import describe_run, run_suite
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from tests.conftest import ROOT
from tests.ranks import run_ranks


class Oracle:
    """Answers rightly, until it has answered ``dies_after`` prompts; those in ``lost`` get no answer."""

    def __init__(self, suite: Suite, dies_after: int | None = None, lost: Sequence[str] = (), name: str = "oracle"):
        self.by_source = {case.prompt.source: case for case in suite.cases}
        self.dies_after, self.lost, self.name = dies_after, lost, name
        self.queried: list[str] = []

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        # Not in the order of the prompts, as engines do.
        for index in reversed(range(len(prompts))):
            if self.dies_after is not None and len(self.queried) >= self.dies_after:
                raise KeyboardInterrupt
            case = self.by_source[prompts[index].conversation.source]
            self.queried.append(case.id)
            if case.id in self.lost:
                yield Answer(index, error="the server is gone")
            else:
                yield Answer(index, FORMATS["hermes"].render(case.expected) or "No.")

    def describe(self) -> dict[str, Any]:
        return {"model": self.name}


@pytest.fixture(scope="module")
def suite() -> Suite:
    return load_suite(ROOT / "eval" / "suites" / "synthetic.yaml", num_cases=30)


def run(suite: Suite, engine: Oracle, path: Path, **options: Any) -> list[dict[str, Any]]:
    rows = run_suite(suite, engine, FORMATS["hermes"], ResultsFile(path), **options)
    assert rows is not None
    assert rows == read_rows(path)
    return rows


def test_a_stopped_run_resumes_with_the_same_results(suite: Suite, tmp_path: Path) -> None:
    complete = run(suite, Oracle(suite), tmp_path / "complete.jsonl")
    assert [row["id"] for row in complete] == [case.id for case in suite.cases]
    path = tmp_path / "cut.jsonl"
    first, second = Oracle(suite, dies_after=12), Oracle(suite)
    with pytest.raises(KeyboardInterrupt):
        run(suite, first, path)
    assert len(read_rows(path)) == 12
    assert run(suite, second, path) == complete
    assert sorted(first.queried + second.queried) == sorted(case.id for case in suite.cases)


def test_an_incomplete_last_line_is_asked_again(suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    complete = run(suite, Oracle(suite), path)
    path.write_bytes(path.read_bytes()[:-40])
    again = Oracle(suite)
    assert run(suite, again, path) == complete
    assert again.queried == [complete[-1]["id"]]


def test_unanswered_cases_count_as_wrong_and_are_asked_again(suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lost = [suite.cases[3].id, suite.cases[7].id]
    rows = run(suite, Oracle(suite, lost=lost), path)
    summary = summarise_run(suite, rows, {})
    overall = summary["scores"]["all"]
    assert (overall["n"], overall["rates"]["accuracy"]["successes"], summary["num_no_answer"]) == (30, 28, 2)
    assert overall["verdicts"]["no_answer"] == 2
    again = Oracle(suite)
    assert all(row["verdict"] == "correct" for row in run(suite, again, path))
    assert sorted(again.queried) == sorted(lost)


def test_a_case_without_a_row_counts_as_wrong(suite: Suite, tmp_path: Path) -> None:
    rows = run(suite, Oracle(suite), tmp_path / "results.jsonl")
    summary = summarise_run(suite, rows[5:], {})
    assert summary["scores"]["all"]["rates"]["accuracy"] | {"low": 0, "high": 0} == {
        "rate": 25 / 30,
        "successes": 25,
        "n": 30,
        "low": 0,
        "high": 0,
    }
    assert summary["num_no_answer"] == 5


def test_results_of_different_settings_are_never_mixed(suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run(suite, Oracle(suite), path)
    other = load_suite(ROOT / "eval" / "suites" / "synthetic.yaml", num_cases=30, seed=7)
    with pytest.raises(ConfigError, match='model: was "oracle", is now "another"'):
        run(suite, Oracle(suite, name="another"), path)
    with pytest.raises(ConfigError, match=r"cases_digest: .*\n.*--fresh"):
        run(other, Oracle(other), path)
    with pytest.raises(ConfigError, match="max_new_tokens: was 256, is now 8"):
        run(suite, Oracle(suite), path, max_new_tokens=8)
    assert len(run(other, Oracle(other), path, is_fresh=True)) == 30
    path.with_suffix(".settings.json").unlink()
    with pytest.raises(ConfigError, match=r"results\.settings\.json, which describes them, is missing"):
        run(other, Oracle(other), path)


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_file_of_another_kind_is_never_replaced(is_fresh: bool, suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(before := "".join(json.dumps({"id": case.id, "messages": []}) + "\n" for case in suite.cases))
    with pytest.raises(
        ConfigError, match=r"cases\.jsonl: is not a result of fctune eval\. Pass another --out"
    ) as raised:
        run(suite, Oracle(suite), path, is_fresh=is_fresh)
    assert "--fresh" not in str(raised.value)
    assert {file.name for file in tmp_path.iterdir()} == {"cases.jsonl"}
    assert path.read_text() == before


def test_names_that_end_in_a_version_share_no_file(suite: Suite, tmp_path: Path) -> None:
    for version in ("3.1", "3.2"):
        results = ResultsFile(tmp_path / f"llama-{version}")
        run(suite, Oracle(suite, name=version), results.path)
        results.write_summary({"model": version})
    for version in ("3.1", "3.2"):
        assert (read_settings(tmp_path / f"llama-{version}") or {})["model"] == version
        assert json.loads((tmp_path / f"llama-{version}.summary.json").read_text()) == {"model": version}


def test_settings_of_an_earlier_name_are_still_read(tmp_path: Path) -> None:
    (tmp_path / "llama-3.settings.json").write_text('{"model": "3.1"}')
    assert read_settings(tmp_path / "llama-3.1") == {"model": "3.1"}


def test_a_name_is_no_pattern(suite: Suite, tmp_path: Path) -> None:
    for name in ("x[exp]", "xe"):
        (tmp_path / f"{name}.settings.json").write_text("{}")
        part = ResultsFile(tmp_path / f"{name}.jsonl", rank=1, world_size=2)
        part.append({"id": name, "category": "all", "verdict": "correct"})
        part.close()
    assert list(ResultsFile(tmp_path / "x[exp].jsonl").start({}, is_fresh=False)) == ["x[exp]"]
    assert (tmp_path / ".xe.jsonl.rank1").exists(), "it is another's"


@pytest.mark.parametrize("is_fresh", [False, True])
def test_results_named_after_a_rank_are_no_part_of_others(is_fresh: bool, suite: Suite, tmp_path: Path) -> None:
    for name in ("qwen", "qwen.rank16"):
        run(suite, Oracle(suite, name=name), tmp_path / f"{name}.jsonl")
    other = (tmp_path / "qwen.rank16.jsonl").read_text()
    run(suite, Oracle(suite, name="qwen"), tmp_path / "qwen.jsonl", is_fresh=is_fresh)
    assert (tmp_path / "qwen.rank16.jsonl").read_text() == other


def test_two_runs_do_not_write_to_one_file(suite: Suite, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    engine = Oracle(suite)
    held = ResultsFile(path)
    held.start(describe_run(suite, engine, FORMATS["hermes"], 256))
    with pytest.raises(ConfigError, match="another run of this command is writing"):
        run(suite, engine, path)
    held.release()
    assert len(run(suite, engine, path)) == 30


def test_half_a_surrogate_pair_is_written_and_read_back(suite: Suite, tmp_path: Path) -> None:
    class Odd(Oracle):
        def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
            yield from (Answer(index, "\ud800 ü", error=None) for index in range(len(prompts)))

    rows = run(suite, Odd(suite), tmp_path / "results.jsonl")
    assert rows[0]["answer"] == "\ud800 ü"


@pytest.mark.parametrize(
    "content", ["nonsense\n", "[]\n", '{"id": 3, "category": "x", "verdict": "correct"}\n', '{"id": "a"}\n']
)
def test_a_file_that_holds_other_rows_is_reported(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"results\.jsonl:1: not a result of fctune eval"):
        read_rows(path)


def ask_on_rank(world: World, path: str, dies_after: int | None) -> list[dict[str, Any]] | None:
    suite = load_suite(ROOT / "eval" / "suites" / "synthetic.yaml", num_cases=30)
    results = ResultsFile(path, world.rank, world.world_size)
    engine = Oracle(suite, dies_after if world.rank == 1 else None)
    try:
        return run_suite(suite, engine, FORMATS["hermes"], results, world=world)
    except KeyboardInterrupt:
        os._exit(9)


def test_ranks_share_the_cases_and_one_process_takes_over_from_three(suite: Suite, tmp_path: Path) -> None:
    complete = run(suite, Oracle(suite), tmp_path / "complete.jsonl")
    path = tmp_path / "ranks.jsonl"
    first, *others = run_ranks(ask_on_rank, 3, str(path), None)
    assert others == [None, None]
    assert first == complete == read_rows(path)
    assert [file.name for file in tmp_path.glob("*ranks.jsonl*")] == ["ranks.jsonl"]

    cut = tmp_path / "cut.jsonl"
    with pytest.raises(RuntimeError):
        run_ranks(ask_on_rank, 3, str(cut), 4)
    parts = {file.name: len(read_rows(file)) for file in tmp_path.glob(".cut.jsonl.rank*")}
    assert parts == {".cut.jsonl.rank0": 10, ".cut.jsonl.rank1": 4, ".cut.jsonl.rank2": 10}
    engine = Oracle(suite)
    assert run(suite, engine, cut) == complete
    assert len(engine.queried) == 6


@pytest.mark.slow
def test_a_killed_run_keeps_its_results_and_resumes(tmp_path: Path, tiny_base: Path) -> None:
    """The command itself, under SIGKILL in the middle."""
    out = tmp_path / "killed.jsonl"
    command = [sys.executable, "-m", "eval.tool_calls", "--model", str(tiny_base), "--suite", "synthetic"]
    command += ["--num-cases", "40", "--batch-size", "2", "--max-new-tokens", "24", "--out"]
    process = subprocess.Popen([*command, str(out)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not out.exists() or out.read_bytes().count(b"\n") < 6):
        assert process.poll() is None, "it was over before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = read_rows(out, is_partial=True)
    assert 6 <= len(kept) < 40
    done = subprocess.run([*command, str(out)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = read_rows(out)
    assert len(rows) == 40
    by_id = {row["id"]: row for row in rows}
    assert all(by_id[row["id"]] == row for row in kept)
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    assert summary["scores"]["all"]["n"] == 40


def test_a_full_disk_is_named_and_the_run_resumes_once_there_is_room(suite: Suite, tmp_path: Path) -> None:
    expected = run(suite, Oracle(suite), tmp_path / "whole.jsonl")
    results = tmp_path / "answers.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        # Also when the file is closed, which writes again what is left in its buffer.
        with pytest.raises(ConfigError, match=r"--out .*answers\.jsonl: cannot be written \(File too large\)\."):
            run(suite, Oracle(suite), results)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run(suite, Oracle(suite), results) == expected


def test_a_results_file_cut_in_its_last_row_says_how_to_finish_it(tmp_path: Path) -> None:
    row = json.dumps({"id": "a", "category": "c", "verdict": "correct"})
    path = tmp_path / "r.jsonl"
    path.write_text(f"{row}\n{row[:20]}")
    with pytest.raises(DataError, match=r"r\.jsonl:2: the last row is incomplete.*Run the same fctune eval again"):
        read_rows(path)
    assert [found["id"] for found in read_rows(path, is_partial=True)] == ["a"]
    path.write_text(f"{row[:20]}\n{row}\n")
    with pytest.raises(DataError, match=r"r\.jsonl:1: not a result of"):
        read_rows(path)
