"""The tools train the same rows, each part is done once, and the statistics count cases rather than seeds.

The tests with LLaMA-Factory and axolotl need a Python that has the tool: FCTUNE_LLAMAFACTORY_PYTHON, or
FCTUNE_AXOLOTL_PYTHON, names it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from math import comb
from pathlib import Path
from typing import Any

import pytest

from benchmarks import head_to_head, head_to_head_peers
from benchmarks.head_to_head import (
    SAME_RATE,
    TOKENS_OFF,
    Training,
    choose_rate,
    compare,
    format_report,
    main,
    measure_accuracies,
    run_step,
    sign_flip_p,
    summarize,
)
from benchmarks.head_to_head_peers import COMMANDS, count, make_settings
from benchmarks.head_to_head_trl import Job
from benchmarks.real_rows import to_cases, write_rows
from benchmarks.real_summary import balance_accuracy
from fctune.base.errors import CheckpointError, DataError
from fctune.config.loading import load_config
from fctune.data.synthetic import iter_conversations
from fctune.tasks.evaluation.paired import mcnemar_p


@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (1, 0), (5, 1), (3, 3), (2, 9)])
def test_with_one_seed_the_test_is_mcnemars(right: int, wrong: int) -> None:
    assert sign_flip_p([1] * right + [-1] * wrong + [0] * 7) == pytest.approx(mcnemar_p(right, wrong))


def test_seeds_that_agree_add_no_evidence() -> None:
    differences = [1] * 6 + [-1] * 2
    assert sign_flip_p([3 * one for one in differences]) == pytest.approx(sign_flip_p(differences))
    # All sign choices of 3, 3, 1: only those of equal signs reach 7.
    assert sign_flip_p([3, 3, 1]) == pytest.approx(2 / 2**3)
    assert sign_flip_p([2] * 10) == pytest.approx(2 * comb(10, 0) / 2**10)


def make_results(tool: str, by_seed: list[list[bool]]) -> list[dict[str, Any]]:
    verdicts = [{"c": {f"c-{i}": right for i, right in enumerate(one)}} for one in by_seed]
    common = {"tool": tool, "stage": "full", "learning_rate": 1e-3}
    return [{**common, "seed": seed, "verdicts": one} for seed, one in enumerate(verdicts, 1)]


def test_accuracies_are_means_over_seeds_with_the_interval_of_the_cases() -> None:
    ours = make_results("fctune", [[True] * 8 + [False] * 2, [True] * 6 + [False] * 4])
    theirs = make_results("trl", [[True] * 5 + [False] * 5, [True] * 5 + [False] * 5])
    once = compare(ours[:1], theirs[:1])["categories"]["c"]
    both = compare(ours, theirs)
    assert both["categories"]["c"]["fctune"]["accuracy"] == pytest.approx(0.7)
    assert both["categories"]["c"]["difference"][0] == pytest.approx(0.2)
    assert both["categories"]["c"]["n"] == once["n"] == 10
    assert both["categories"]["c"]["trl"] == once["trl"]
    assert both["mean_over_categories_by_seed"] == {"fctune": [0.8, 0.6], "trl": [0.5, 0.5]}
    assert both["kinds"] == {"a call is due": both["categories"]["c"]}
    with pytest.raises(DataError, match="different cases"):
        compare(ours[:1], make_results("trl", [[True] * 9]))


def make_search(rate: float, loss: float = 1.0, **num_right: int) -> dict[str, Any]:
    """A training of the search, with a number of right answers to five cases in each category."""
    verdicts = {name: {f"{name}-{i}": i < right for i in range(5)} for name, right in num_right.items()}
    return {"learning_rate": rate, "verdicts": verdicts, "trained": {"losses": [loss]}}


def test_a_model_that_never_calls_or_always_does_is_not_chosen() -> None:
    never = make_search(1e-4, simple_python=0, multiple=0, irrelevance=5, no_call=5, set_no_call=5)
    always = make_search(2e-4, simple_python=5, multiple=5, irrelevance=0, no_call=0, set_no_call=0)
    both = make_search(4e-4, simple_python=2, multiple=1, irrelevance=1, no_call=0, set_no_call=1)
    assert choose_rate([never, always, both]) == 4e-4
    assert balance_accuracy(measure_accuracies(both["verdicts"])) == pytest.approx(2 / (1 / 0.3 + 1 / (2 / 15)))
    assert choose_rate([never, always]) == 2e-4  # neither can be used; one has learned to call
    assert choose_rate([make_search(1e-4, multiple=3), make_search(2e-4, 0.9, multiple=3)]) == 2e-4


def test_every_tool_is_compared_with_fctune_on_one_seed_and_a_failed_one_is_named() -> None:
    ours = make_results("fctune", [[True] * 8 + [False] * 2, [True] * 10])
    trl = make_results("trl", [[True] * 5 + [False] * 5, [True] * 10])
    axolotl = make_results("axolotl", [[True] * 10])
    for one in (*ours, *trl, *axolotl):
        one["trained"] = {"steps": 2, "tokens": 1_000, "supervised_tokens": None, "training_s": 1.0}
    failed = {"tool": "llamafactory", "stage": "full", "learning_rate": 1e-3, "seed": 1, "failed": "It said: no."}
    found = summarize([*ours, *trl, failed, *axolotl])
    assert found["full"] == compare(ours, trl)
    assert found["one_seed"] == {"trl": compare(ours[:1], trl[:1]), "axolotl": compare(ours[:1], axolotl)}
    assert found["one_seed"]["axolotl"]["all_cases"]["difference"][0] == pytest.approx(-0.2)
    assert found["trainings"][-2] == failed
    report = format_report({**found, "rows": {"in_trl": {}}})
    assert "|  | cases | fctune | TRL | difference | p | axolotl | difference | p |" in report
    row = "| llamafactory | full | 0.001 | 1 | - | - | - | - | - | - | - | - | failed |"
    assert row in report.splitlines()
    assert "It said: no." in report.splitlines()


def test_without_other_tools_the_report_has_the_pair_alone() -> None:
    results = [make_results(tool, [[True] * 4])[0] | {"trained": {}} for tool in ("fctune", "trl")]
    found = summarize(results)
    assert "one_seed" not in found
    assert "|  | cases | fctune | TRL | difference | p |" in format_report({**found, "rows": {"in_trl": {}}})


def make_job(tool: str, *overrides: str) -> Job:
    settings = load_config("configs/tiny_lora.yaml", ["optimizer.lr=1e-3", *overrides]).to_dict()
    return Job("base", "rows.jsonl", "out", seed=3, settings=settings, tool=tool, python="python")


def test_each_tool_gets_the_settings_under_its_names() -> None:
    overrides = ("adapter.dropout=0.1", "adapter.modules=[q_proj, v_proj]", "lr_scheduler.warmup=5%")
    lf, axolotl = (make_settings(make_job(tool, *overrides)) for tool in COMMANDS)
    for one in (lf, axolotl):
        assert (one["learning_rate"], one["seed"], one["warmup_ratio"], one["max_grad_norm"]) == (1e-3, 3, 0.05, 1.0)
        assert one["gradient_accumulation_steps"] == 2  # packs
        assert not one["bf16"]
        assert "max_steps" not in one
        assert "warmup_steps" not in one
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "cutoff_len", "num_train_epochs")
    assert [lf[name] for name in names] == [32, 64, 0.1, "q_proj,v_proj", 1024, 1]
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "sequence_len", "num_epochs")
    assert [axolotl[name] for name in names] == [32, 64, 0.1, ["q_proj", "v_proj"], 1024, 1]
    assert lf["neat_packing"]
    assert axolotl["sample_packing"]


def test_all_linear_modules_and_a_constant_rate_have_names_of_their_own() -> None:
    overrides = ("adapter.modules=all-linear", "lr_scheduler.name=constant", "lr_scheduler.warmup=0", "max_steps=5")
    lf, axolotl = (make_settings(make_job(tool, *overrides)) for tool in COMMANDS)
    assert lf["lora_target"] == "all"
    assert axolotl["lora_target_linear"]
    assert lf["lr_scheduler_type"] == axolotl["lr_scheduler"] == "constant_with_warmup"
    assert lf["warmup_steps"] == axolotl["warmup_steps"] == 0
    assert lf["max_steps"] == axolotl["max_steps"] == 5


def test_without_an_adapter_all_weights_are_trained() -> None:
    lf, axolotl = (make_settings(make_job(tool, "adapter=null")) for tool in COMMANDS)
    assert lf["finetuning_type"] == "full"
    assert "adapter" not in axolotl


def test_a_failed_training_says_what_the_tool_said_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, rows, folder = tmp_path / "python", tmp_path / "rows.jsonl", tmp_path / "axolotl-full"
    python.write_text("#!/bin/sh\necho $HF_HUB_OFFLINE $AXOLOTL_DO_NOT_TRACK $*\necho 'ValueError: no GPU'\nexit 3\n")
    python.chmod(0o755)
    rows.write_text("")
    folder.mkdir()
    job = replace(make_job("axolotl"), rows=str(rows), out=str(folder), python=str(python))
    (folder / "job.json").write_text(json.dumps(asdict(job)))

    def run_here(_: str, *words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["", *map(str, words)])
        return head_to_head_peers.main()

    monkeypatch.setattr(head_to_head, "run_module", run_here)
    with pytest.raises(CheckpointError, match=r"code 3; log\.txt ends with: ValueError: no GPU$"):
        run_step("train", Training("axolotl", "full", 1, 1e-3), folder)
    assert (folder / "log.txt").read_text().startswith("1 1 -m axolotl.cli.train config.yaml\n")


def test_what_a_tool_does_not_report_is_null(tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"trained/checkpoint-{step}").mkdir(parents=True)
        state = {"global_step": step, "log_history": [{"loss": 2.0}, {"loss": 1.0}, {"train_loss": 1.5}]}
        (tmp_path / f"trained/checkpoint-{step}/trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "log.txt").write_text("{'loss': 1.0}\r{'train_runtime': '12.5', 'train_loss': '1.5'}\n")
    found = count(tmp_path)
    assert (found["steps"], found["losses"], found["training_s"]) == (10, [2.0, 1.0], 12.5)
    assert found["tokens"] is found["supervised_tokens"] is None


def write_inputs(model: Path, folder: Path) -> list[str]:
    """Write rows and cases, and return the options of a comparison in which each step has all rows."""
    rows = folder / "rows"
    write_rows(rows / "train.jsonl", (row.to_openai() for row in iter_conversations("train", 40, 0)))
    for split in ("test", "validation"):
        write_rows(rows / f"{split}.jsonl", to_cases(list(iter_conversations("train", 4, 1)), "unseen_tools"))
    words = ["--model", str(model), "--rows", str(rows), "--out", str(folder / "out")]
    words += ["--config", "configs/tiny_lora.yaml", "--seeds", "1", "--learning-rates", "1e-3", "--limit", "2"]
    words += ["--max-new-tokens", "8"]
    # As each step has all rows, the tools' orders of rows do not matter.
    words += ["adapter.modules=all-linear", "adapter.train_tokens=off", "global_batch_size=16", "epochs=2"]
    return [*words, "lr_scheduler.warmup=1", "--categories", "unseen_tools"]


def find_trained(report: dict[str, Any], tool: str) -> dict[str, Any]:
    return next(one["trained"] for one in report["trainings"] if (one["tool"], one["stage"]) == (tool, "full"))


@pytest.mark.slow
def test_both_tools_train_the_same_tokens_and_an_ended_part_is_kept(chatml_base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [*write_inputs(chatml_base, tmp_path), "--tokens", "8000", "--tokens-off", "--same-rate"]
    assert main(words) == 0
    report = json.loads((out / "head_to_head.json").read_text())
    ours, theirs = (find_trained(report, tool) for tool in ("fctune", "trl"))
    assert theirs["is_packed"]
    assert ours["steps"] == theirs["steps"] == 2
    assert ours["tokens"] == theirs["tokens"]
    assert ours["trained_parameters"] == theirs["trained_parameters"]
    in_trl = report["rows"]["in_trl"]["trl: objects, load_dataset, assistant_only_loss"]
    assert in_trl["kinds"] == {"equal": report["rows"]["counts"]["full"]["rows"]}  # apart from white space
    added = in_trl["tokens_trained"]["trl"] - in_trl["tokens_trained"]["fctune"]
    assert theirs["supervised_tokens"] == ours["supervised_tokens"] + 2 * added  # in each of two epochs
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=0.02)
    assert report["full"]["categories"]["unseen_tools"]["n"] == 2
    # The config has no trained tokens here, and there is one learning rate.
    assert find_trained(report, TOKENS_OFF)["losses"] == ours["losses"]
    assert find_trained(report, SAME_RATE)["losses"] == theirs["losses"]
    assert report["one_seed"][TOKENS_OFF]["all_cases"]["difference"][0] == 0
    kept = {path: path.stat().st_mtime_ns for path in (out / "measured").iterdir()}
    assert not list((out / "trainings").glob("*/"))
    assert main(words) == 0
    assert kept == {path: path.stat().st_mtime_ns for path in (out / "measured").iterdir()}
    assert main([*words, "--tokens", "4000"]) == 2


@pytest.mark.thorough
def test_trl_cannot_train_the_rows_of_tokens_in_the_head(chatml_base: Path, tmp_path: Path) -> None:
    """What the comparison says of TRL, which may change with its version."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    config = json.loads((chatml_base / "config.json").read_text())
    (chatml_base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    rows = Dataset.from_list([row.to_openai() for row in iter_conversations("train", 1, 0)])
    trainer = SFTTrainer(
        model=str(chatml_base),
        args=SFTConfig(str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to=[]),
        train_dataset=rows,
        peft_config=LoraConfig(trainable_token_indices=[5], target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    with pytest.raises(AttributeError, match="'TrainableTokensWrapper' object has no attribute 'bias'"):
        trainer.train()


def test_a_python_without_the_tool_is_named(
    chatml_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*write_inputs(chatml_base, tmp_path), "--axolotl", sys.executable]
    assert main(words) == 2
    assert f"--axolotl {sys.executable}: has no axolotl." in capsys.readouterr().err
    assert main([*words, "lr_scheduler.min_factor=0.1"]) == 2
    assert "lr_scheduler.min_factor: " in capsys.readouterr().err


@pytest.mark.slow
def test_other_tools_train_the_same_rows_once_and_a_failure_is_reported(chatml_base: Path, tmp_path: Path) -> None:
    pythons = {tool: os.environ.get(f"FCTUNE_{tool.upper()}_PYTHON") for tool in COMMANDS}
    options = [word for tool, python in pythons.items() if python for word in (f"--{tool}", python)]
    if not options:
        pytest.skip("neither FCTUNE_LLAMAFACTORY_PYTHON nor FCTUNE_AXOLOTL_PYTHON names a Python")
    words = [*write_inputs(chatml_base, tmp_path), "--tokens", "3000", *options]
    assert main(words) == 0
    report = json.loads((tmp_path / "out/head_to_head.json").read_text())
    ours = find_trained(report, "fctune")
    for tool in (tool for tool, python in pythons.items() if python):
        theirs = find_trained(report, tool)
        assert theirs["steps"] == ours["steps"] == 2
        assert theirs["trained_parameters"] == ours["trained_parameters"]
        assert theirs["tokens"] in (None, ours["tokens"])
        # The first step of a warm-up from 0 changes nothing, so the second step has the base's loss, too.
        assert theirs["losses"] == pytest.approx([ours["losses"][0]] * 2, rel=0.02)
        assert report["one_seed"][tool]["all_cases"]["n"] == 2
        assert report["versions"][tool]
    assert not list((tmp_path / "out/trainings").glob("*/"))
