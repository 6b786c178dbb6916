"""A round of learning from verdicts: keys fit the configs, controls ignore verdicts, wrong input is one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_arguments import make_parser
from benchmarks.real_round import CONTROL, METHODS, main, make_training, write_control
from benchmarks.real_rows import to_cases, write_rows
from fctune.base.errors import DataError
from fctune.config.loading import load_config
from fctune.data.synthetic import iter_conversations
from fctune.tasks.sampling.selection import select_pairs, select_rows
from fctune.tasks.suite_files import load_suite
from tests.conftest import ROOT, TINY_BASE

GEMMA, QWEN = "gemma3_270m_lora", "qwen2_5_coder_0_5b_lora"


def make_samples(folder: Path, num_cases: int = 6) -> tuple[Path, list[dict[str, Any]]]:
    """Write questions, and four answers to each: two right ones, and two wrong ones. Returns the questions' file."""
    cases = folder / "cases.jsonl"
    write_rows(cases, to_cases(list(iter_conversations("train", num_cases, 1)), "call"))
    rows: list[dict[str, Any]] = []
    for case in load_suite(cases).cases:
        for sample in range(4):
            is_right = sample < 2
            answer = {
                "answer": f"answer {sample}",
                "text": f"answer {sample}",
                "prose": f"answer {sample}",
                "calls": [],
            }
            row = {"case": case.id, "sample": sample, "id": f"{case.id}#{sample}", "category": "call", **answer}
            row |= {
                "verdict": "correct" if is_right else "missed_call",
                "malformed": [],
                "is_cut": False,
                "num_tokens": 3,
            }
            rows.append(row | {"closeness": 0.5, "scores": {"schema": 1.0}})
    samples = folder / "samples"
    write_rows(samples / "answers.jsonl", rows)
    for name, select in (("sft", select_rows), ("pairs", select_pairs)):
        of_cases = [select(case, [row for row in rows if row["case"] == case.id]) for case in load_suite(cases).cases]
        write_rows(samples / f"{name}.jsonl", [row for found in of_cases for row in found])
    summary = {"num_samples": 4, "num_missing": 0}
    (samples / "answers.summary.json").write_text(json.dumps(summary))
    write_control(samples, cases)
    return cases, rows


def parse(*options: str) -> Any:
    arguments = make_parser("benchmarks.real_round", None).parse_args(["--model", "m", *options])
    arguments.grpo_steps = 2
    return arguments


@pytest.mark.parametrize("trained", [GEMMA, QWEN])
@pytest.mark.parametrize("name", [name + suffix for name in METHODS for suffix in ("", CONTROL)])
def test_the_keys_of_each_method_fit_its_config(name: str, trained: str, tiny_base: Path, tmp_path: Path) -> None:
    cases, _ = make_samples(tmp_path, 2)
    arguments = parse("dpo:optimizer.lr=1e-5", "grpo:grpo.group_size=3", "seed=5")
    arguments.config = ROOT / "configs" / f"{trained}.yaml"
    arguments.chat_template = load_config(arguments.config).model.chat_template
    config_path, keys = make_training(arguments, name, cases, tmp_path / "samples")
    config = load_config(config_path, ["eval.every=0", f"model.path={tiny_base}", *keys])
    assert config.adapter is not None
    assert config.model.chat_template == arguments.chat_template
    assert config.seed == 5
    assert config.data.pairs == name.startswith("dpo")
    assert (config.optimizer["lr"] == 1e-5) == name.startswith("dpo")
    if config.grpo is not None:
        assert config.grpo.group_size == 3
        assert config.grpo.reward == ({"random": 1} if name.endswith(CONTROL) else None)


def test_controls_have_the_questions_of_the_methods_and_answers_of_any_verdict(tmp_path: Path) -> None:
    cases, rows = make_samples(tmp_path, 20)
    is_right = {(row["case"], row["sample"]): row["verdict"] == "correct" for row in rows}

    def read(name: str) -> list[dict[str, Any]]:
        return [json.loads(line)["metadata"] for line in (tmp_path / "samples" / name).read_text().splitlines()]

    chosen, control = read("sft.jsonl"), read("control_sft.jsonl")
    assert {one["case"] for one in chosen} == {one["case"] for one in control}
    assert all(is_right[one["case"], one["sample"]] for one in chosen)
    assert len({is_right[one["case"], one["sample"]] for one in control}) == 2
    pairs = [(is_right[one["case"], one["chosen_sample"]], is_right[one["case"], one["rejected_sample"]])
             for one in read("control_pairs.jsonl")]  # fmt: skip
    assert pairs.count((True, False)) < len(pairs)
    assert (False, True) in pairs
    (tmp_path / "samples" / "pairs.jsonl").write_text("")
    arguments = parse()
    arguments.config = ROOT / "configs" / f"{QWEN}.yaml"
    with pytest.raises(DataError, match=r"pairs\.jsonl: no rows"):
        make_training(arguments, "dpo", cases, tmp_path / "samples")


def test_a_round_needs_a_trained_model_and_rows(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").touch()
    options = ["--model", str(tiny_base), "--glaive", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*options, "--trained", str(tmp_path), "--seal", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: no such rows" in capsys.readouterr().err
    assert main([*options, "--trained", str(tmp_path), "--seal", str(tmp_path / "rows.jsonl")]) == 2
    assert f"--trained {tmp_path}: no trained model" in capsys.readouterr().err


@pytest.mark.slow
def test_every_method_and_its_control_take_the_same_steps_and_are_measured(tmp_path: Path) -> None:
    trained, out = tmp_path / "trained", tmp_path / "out"
    shutil.copytree(TINY_BASE, trained / "run" / "export" / "merged")
    make_samples(out)
    for split in ("validation", "test"):
        write_rows(
            trained / "data" / f"{split}.jsonl", to_cases(list(iter_conversations("train", 2, 2)), "unseen_tools")
        )
    words = ["--model", str(TINY_BASE), "--config", "configs/tiny_lora.yaml", "--trained", str(trained), "--num", "4"]
    words += ["--out", str(out), "--seal", str(trained / "data" / "test.jsonl"), "--glaive", str(trained / "data")]
    words += [
        "--max-new-tokens",
        "8",
        "--grpo-steps",
        "1",
        "rejection:max_steps=1",
        "dpo:max_steps=1",
        "precision=fp32",
    ]
    words += ["rejection:lr_scheduler.warmup=0", "dpo:lr_scheduler.warmup=0"]
    # The base is never right, but some of its answers are shorter.
    words += ["grpo:grpo.reward={brevity: 1}", "grpo:grpo.mask_cut=false", "grpo:grpo.prompts_per_step=2"]
    assert main([*words, "--categories", "unseen_tools"]) == 0
    for split in ("validation", "eval"):
        found = json.loads((out / split / "round.json").read_text())
        names = {"start", *METHODS, *(name + CONTROL for name in METHODS)}
        assert found["balanced_accuracy"].keys() == names
        assert found["arms"].keys() == names | {f"{name} against its control" for name in METHODS}
    for name in METHODS:
        steps = [(out / run / "metrics.jsonl").read_text().count('"loss"') for run in (name, name + CONTROL)]
        assert steps == [1, 1]
