"""The benchmark of rejection sampling, with commands that write what the real ones write."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rejection


class Commands:
    """Plays ``fctune``: the start answers half of the test right, a model of right answers all of it."""

    def __init__(self) -> None:
        self.called: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str) -> None:
        self.called.append(arguments)
        options = dict(itertools.pairwise(arguments))
        if arguments[0] == "data":
            for option in ("--out", "--test"):
                write(Path(options[option]), [{"id": str(n)} for n in range(60)])
        elif arguments[0] == "train":
            folder = Path(next(word for word in arguments if word.startswith("output_dir=")).partition("=")[2])
            (folder / "export" / "merged").mkdir(parents=True)
            (folder / "export" / "merged" / "config.json").write_text("{}")
        elif arguments[0] == "sample":
            out, num_rows = Path(options["--out"]), 9 if options["--keep"] == "best" else 40
            write(out / "sft.jsonl", [{"row": n} for n in range(num_rows)])
            (out / "answers.summary.json").write_text(json.dumps({"pass_rates": {"all": []}}))
        else:
            num_right = 40 if "tuned_best" in options["--model"] else 20
            rows = [
                {"id": str(n), "category": "call" if n % 2 else "no_call", "expected_calls": []}
                | {"verdict": "correct" if n < num_right else "wrong_name"}
                for n in range(40)
            ]
            write(Path(options["--out"]), rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_models_of_right_and_of_random_answers_are_compared_with_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands()
    monkeypatch.setattr(rejection, "fctune", commands)
    assert rejection.main(["--out", str(tmp_path), "--prompts", "25"]) == 0
    (found,) = json.loads((tmp_path / "rejection.json").read_text())
    assert found["models"]["best"]["p_value"]["all"] == pytest.approx(2 / 2**20)
    assert found["models"]["random"]["difference"]["all"][0] == 0
    assert "| 42 | best | all (40) | 100.0% | 91.2% - 100.0% | +50.0% | 1.9e-06 |" in capsys.readouterr().out
    # The control has as many rows, and no row to sample from is in the start's training data.
    sizes = {
        name: len((tmp_path / "seed42" / name).read_text().splitlines()) for name in ("best.jsonl", "random.jsonl")
    }
    assert sizes == {"best.jsonl": 9, "random.jsonl": 9}
    prompts, start = ((tmp_path / "seed42" / name).read_text() for name in ("prompts.jsonl", "start_rows.jsonl"))
    assert not set(prompts.splitlines()) & set(start.splitlines())
    assert [words[0] for words in commands.called].count("train") == 3
    # Run again, nothing is sampled or trained.
    commands.called.clear()
    assert rejection.main(["--out", str(tmp_path), "--prompts", "25"]) == 0
    assert {words[0] for words in commands.called} == {"eval"}
