"""``fctune sample``: its outputs, its page, and wrong usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from fctune.cli import main
from fctune.cli.sample import _KEEPS as KEEPS_OFFERED
from fctune.data.conversation import Conversation
from fctune.data.sources import read_source
from fctune.tasks.evaluation.results import read_rows
from fctune.tasks.sampling.selection import Keep
from tests.conftest import TINY_BASE

QUESTION = {"role": "user", "content": "Say kalo menu."}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


def test_the_command_offers_what_the_library_has() -> None:
    assert get_args(Keep) == KEEPS_OFFERED


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    """Two cases that the base model gets right if it says anything without a call, and one that needs a call."""
    rows: list[dict[str, Any]] = [
        {"id": f"talk-{n}", "kind": "no_call", "messages": [QUESTION], "tools": [TOOL], "expected_calls": []}
        for n in range(2)
    ]
    call = {"name": "get_weather", "arguments": {}}
    rows.append({"id": "call", "kind": "call", "messages": [QUESTION], "tools": [TOOL], "expected_calls": [call]})
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(cases: Path, out: Path, *options: str) -> int:
    command = ["sample", "--model", str(TINY_BASE), "--cases", str(cases), "--out", str(out)]
    return main([*command, "--max-new-tokens", "8", "--num", "3", *options])


def test_answers_rows_pairs_and_page_are_written(
    cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html = tmp_path / "out", tmp_path / "page.html"
    options = ("--html", str(html), "--keep-tokens", "--keep", "random", "--reward", "strict=1,format=0.5")
    assert run(cases, out, *options) == 0
    rows = read_rows(out / "answers.jsonl")
    assert sorted(row["id"] for row in rows) == [
        f"{name}#{k}" for name in ("call", "talk-0", "talk-1") for k in range(3)
    ]
    assert all(len(row["token_ids"]) == len(row["logprobs"]) == row["num_tokens"] for row in rows)
    summary = json.loads((out / "answers.summary.json").read_text())
    right = sum(row["verdict"] == "correct" for row in rows)
    assert summary["pass_rates"]["all"][0]["rate"] == pytest.approx(right / 9)
    assert summary["reward"]["weights"] == {"strict": 1, "format": 0.5}
    assert 0 < summary["timings"]["judging_share"] < 1
    for row in read_source(str(out / "sft.jsonl")):
        assert isinstance(row, Conversation)
    printed, page = capsys.readouterr().out, html.read_text()
    assert "pass@3" in printed
    assert "Always, sometimes, never right" in page
    assert "http://" not in page.split("<main>")[1].split("<script")[0]
    # Asked again, nothing is generated, and everything is as it was.
    before = (out / "answers.jsonl").read_bytes(), (out / "pairs.jsonl").read_bytes()
    assert run(cases, out, "--keep-tokens", "--keep", "random") == 0
    assert ((out / "answers.jsonl").read_bytes(), (out / "pairs.jsonl").read_bytes()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0"], "all answers to a case would be equal"),
        (["--num", "0"], "--num 0: expected 1 or more"),
        (["--reward", "strct=1"], "--reward.strct: no such part of a reward"),
        (["--max-minutes", "0"], "--max-minutes 0.0: expected more than 0"),
        (["--model", "http://127.0.0.1:9"], "Is the server up"),
        (["--model", "http://127.0.0.1:9", "--adapter", "a"], "--adapter a: http://127.0.0.1:9 is a server"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--tokenizer", str(TINY_BASE)], "pass --keep-tokens and a server's address"),
    ],
    ids=[
        "greedy",
        "no_answers",
        "unknown_part",
        "no_time",
        "no_server",
        "adapter_of_server",
        "no_model",
        "tokenizer_of_no_server",
    ],
)
def test_wrong_usage_is_one_sentence(
    cases: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cases, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "answers.jsonl").exists()


def test_cases_without_an_expected_answer_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "open.jsonl"
    path.write_text(json.dumps({"messages": [QUESTION], "tools": [TOOL]}) + "\n")
    assert run(path, tmp_path / "out") == 2
    assert "no expected_calls, and the last message is not the assistant's answer" in capsys.readouterr().err


def test_answers_of_another_model_are_not_mixed(
    cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(cases, out) == 0
    settings = json.loads((out / "answers.settings.json").read_text())
    (out / "answers.settings.json").write_text(json.dumps({**settings, "model_digest": "another"}))
    assert run(cases, out) == 2
    assert 'model_digest: was "another"' in capsys.readouterr().err


def test_forced_benchmark_questions_are_marked_in_rows_and_on_every_record(
    cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marked, out = tmp_path / "marked.jsonl", tmp_path / "out"
    rows = [json.loads(line) | {"metadata": {"benchmark": "bfcl"}} for line in cases.read_text().splitlines()]
    marked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(marked, out) == 2
    assert "belongs to a benchmark (bfcl)" in capsys.readouterr().err
    assert run(marked, out, "--force-benchmark", "--keep", "random") == 0
    assert json.loads((out / "answers.settings.json").read_text())["benchmark"] == "bfcl"
    chosen = [json.loads(line) for line in (out / "sft.jsonl").read_text().splitlines()]
    assert {row["metadata"]["benchmark"] for row in chosen} == {"bfcl"}
    assert main(["data", "cases", str(out / "sft.jsonl"), "--out", str(tmp_path / "again.jsonl")]) == 2
    assert "belongs to a benchmark" in capsys.readouterr().err
