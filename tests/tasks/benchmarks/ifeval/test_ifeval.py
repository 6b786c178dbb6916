"""IFEval: lm-eval's own checkers on answers of every kind, what is left out, and the published figures."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.base.errors import ConfigError, DataError
from fctune.cli import main
from fctune.cli.eval_options import parse_eval_arguments
from fctune.cli.evaluate import open_suite
from fctune.tasks.benchmarks import find_benchmarks, find_suite_files
from fctune.tasks.benchmarks.ifeval import BENCHMARK, checkers
from fctune.tasks.benchmarks.ifeval.cases import IfevalCase, load_ifeval, open_ifeval
from fctune.tasks.evaluation.results import read_rows
from fctune.tasks.evaluation.summary import summarise_run
from tests.conftest import REAL_DATA, TINY_BASE
from tests.tasks.benchmarks.ifeval.ifeval_rows import ASKED, NEEDS_DATA, Asked, add_sentence_data, write_rows

pytest.importorskip("lm_eval", reason="needs fctune[ifeval]")
nltk = pytest.importorskip("nltk", reason="needs fctune[ifeval]")


@pytest.fixture(autouse=True)
def no_nltk_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide NLTK's data that this machine may have."""
    checkers.load_checkers()
    monkeypatch.setattr(nltk.data, "path", [])
    sys.modules["lm_eval.tasks.ifeval.instructions_util"]._get_sentence_tokenizer.cache_clear()
    sys.modules["nltk.tokenize"]._get_punkt_tokenizer.cache_clear()


def follows(flags: str) -> list[bool]:
    return [flag == "+" for flag in flags]


def judge_all(asked: tuple[Asked, ...], path: Path) -> None:
    """Check that each answer follows the instructions that it should."""
    for case, one in zip(open_ifeval(str(write_rows(path, asked))).cases, asked, strict=True):
        assert isinstance(case, IfevalCase)
        for answer, flags in one.answers.items():
            for judgement, expected in zip(case.judge_answer(answer, ()), map(follows, flags), strict=True):
                assert judgement.benchmark is not None
                assert judgement.benchmark.details == {"instructions": list(one.instructions), "followed": expected}
                assert judgement.is_valid == all(expected), (answer, judgement)
                assert judgement.outcome.verdict == ("correct" if all(expected) else "wrong_answer")


def test_answers_are_judged_by_instruction_strictly_and_loosely(tmp_path: Path) -> None:
    judge_all(ASKED, tmp_path / "prompts.jsonl")


def test_prompts_whose_checker_lacks_its_data_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", ASKED + NEEDS_DATA)
    suite = open_ifeval(str(path))
    assert [case.id for case in suite.cases] == [f"ifeval-{100 + number}" for number in range(len(ASKED))]
    needed = "needs NLTK's data: python -m nltk.downloader punkt_tab"
    assert suite.not_run == {
        "1 prompt with length_constraints:number_sentences": needed,
        "1 prompt with change_case:capital_word_frequency": needed,
    }
    assert suite.measure is not None
    assert suite.measure([], [])["left_out"] == ["ifeval-104", "ifeval-105"]
    with pytest.raises(ConfigError, match="none of its 2 prompts can be checked here"):
        open_ifeval(str(write_rows(path, NEEDS_DATA)))
    monkeypatch.setattr(nltk.data, "path", [str(add_sentence_data(tmp_path / "nltk"))])
    judge_all(ASKED + NEEDS_DATA, path)
    assert not open_ifeval(str(path)).not_run


def test_the_checkers_load_without_the_harness_and_without_downloads() -> None:
    code = (
        "import sys; from fctune.tasks.benchmarks.ifeval.checkers import check\n"
        "print(check('', ['punctuation:no_comma'], [{}], 'a, b'))\n"
        "assert 'lm_eval.tasks' not in sys.modules, 'the stand-in for the package is gone'\n"
        "heavy = {'torch', 'transformers', 'datasets', 'sklearn', 'lm_eval.api'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "([False], [False])\n"), done.stderr


def broken(**changes: Any) -> dict[str, Any]:
    return ASKED[0].to_row(1) | changes


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (broken(instruction_id_list=["no:such"]), "instruction_id_list: 'no:such' is not an instruction"),
        (broken(kwargs=[{"num_words": 3}]), "kwargs: punctuation:no_comma does not take {'num_words': 3}"),
        (broken(kwargs=[]), "kwargs: expected an object for each of 1 instructions, got 0"),
        (broken(kwargs=["x"]), "instruction_id_list and kwargs: expected texts and objects"),
        (broken(prompt=" "), "prompt: empty"),
        (broken(key="1"), "key: expected int, got str"),
        ({"messages": []}, "no key; it has messages"),
    ],
)
def test_a_file_of_another_shape_is_refused_with_its_line(row: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(ASKED[1].to_row(2)) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match="1 row is not of IFEval") as error:
        load_ifeval({"data": str(path)}, "ifeval.yaml", (), None)
    assert f"{path}:2: {reason}" in str(error.value)


def test_without_lm_eval_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checkers.load_checkers.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fctune\[ifeval\]'"):
        open_ifeval("hf:google/IFEval")


def test_the_revisions_on_the_hub_are_pinned() -> None:
    parser = argparse.ArgumentParser()
    BENCHMARK.add_score_options(parser)
    sets = {
        name: yaml.safe_load(find_suite_files()[name].read_text())[name]["data"] for name in ("ifeval", "when2call")
    }
    assert parser.get_default("data") == sets["ifeval"]
    assert all(re.fullmatch(r"hf:[^@]+@[0-9a-f]{40}", data) for data in sets.values()), sets


def test_predictions_of_any_model_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "prompts.jsonl", ASKED)
    rows = [
        {"id": "ifeval-100", "text": "<think>One, two.</think>\nIt is wet."},
        {"id": "ifeval-101", "text": "the boat, and *another* boat too"},
        {"id": "ifeval-102", "text": '**\n{"a": 1}\n**'},
    ]
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--data",
        str(data),
        "--predictions",
        str(tmp_path / "predictions.jsonl"),
        "--out",
        str(tmp_path / "o.jsonl"),
    ]
    assert main(["score", "ifeval", *words]) == 0
    summary = json.loads((tmp_path / "o.summary.json").read_text())
    counts = {name: (rate["successes"], rate["n"]) for name, rate in summary["figures"]["rates"].items()}
    assert counts == {
        "prompts_strict": (1, 4),
        "prompts_loose": (2, 4),
        "instructions_strict": (3, 6),
        "instructions_loose": (4, 6),
    }
    assert summary["figures"]["table"]["keywords:frequency"] == {"strict": 1, "loose": 1, "of": 1}
    assert summary["missing_ids"] == ["ifeval-103"]
    assert "prompts strict" in capsys.readouterr().out


def test_a_model_is_evaluated_with_the_published_limit_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "prompts.jsonl", (*ASKED, NEEDS_DATA[0]))
    out = tmp_path / "results.jsonl"
    words = ["eval", "--model", str(TINY_BASE), "--suite", "ifeval", "--ifeval-data", str(data), "--out", str(out)]
    assert main([*words, "--max-new-tokens", "16"]) == 0
    rows, summary = read_rows(out), json.loads(out.with_suffix(".summary.json").read_text())
    assert len(rows) == len(ASKED)
    printed = capsys.readouterr().out
    assert "not run: 1 prompt with length_constraints:number_sentences (needs NLTK's data" in printed
    suite = open_ifeval(str(data))
    again = summarise_run(suite, rows, {})
    assert again["figures"] == summary["figures"]
    assert all(find_benchmarks()["ifeval"].owns(row["id"]) for row in rows)
    arguments = parse_eval_arguments(words[1:])
    open_suite(arguments)
    assert arguments.max_new_tokens == 1280


@pytest.mark.real_data
def test_the_published_prompts_are_read() -> None:
    suite = open_ifeval(str(REAL_DATA / "ifeval" / "prompts.jsonl"))
    assert suite.measure is not None
    assert len(suite.cases) + len(suite.measure([], [])["left_out"]) == 541
    assert {name.split(" with ")[1] for name in suite.not_run} == {
        "length_constraints:number_sentences",
        "change_case:capital_word_frequency",
    }
