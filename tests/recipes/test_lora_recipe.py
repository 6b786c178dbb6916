"""The LoRA recipe as a user starts it: its files, and one report for every wrong input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fctune.base import distributed
from fctune.base.distributed import World
from tests.conftest import REAL_DATA, ROOT, TINY_BASE
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import (
    Kind,
    arguments_for,
    check_single_reports,
    run_in_turn,
    run_kind_on_rank,
    run_on_rank,
    tune_run,
)


def test_a_run_writes_the_files_that_scripts_rely_on(tmp_path: Path) -> None:
    results = run_ranks(run_on_rank, 2, arguments_for(tmp_path))
    assert [r["code"] for r in results] == [0, 0], results
    run = tmp_path / "run"
    described = json.loads((run / "run.json").read_text())
    assert described["config"]["global_batch_size"] == 8
    assert described["config"]["activation_checkpointing"]["fraction"] == 0.0  # chosen: the tiny model fits
    assert described["seed"] == 42
    assert described["world_size"] == 2
    assert described["num_steps"] == 2
    assert described["steps_per_epoch"] == 24 / 8
    assert described["data"]["inputs"]["sources"][0]["path"] == "synthetic:train:24:1"
    assert {"torch", "torchtune", "fctune"} <= described["versions"].keys()
    assert json.loads((run / "exit.json").read_text()) == {
        "code": 0,
        "reason": "completed",
        "step": 2,
        "checkpoint": str(run / "checkpoints" / "elastic-checkpoint-2"),
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    fields = {"step", "epoch", "loss", "lr", "grad_norm", "tokens_total", "tokens_supervised", "tokens_per_s"}
    fields |= {"step_time_s", "data_digest"}
    assert all(fields <= line.keys() for line in lines)
    assert all(0 < line["tokens_supervised"] < line["tokens_total"] for line in lines)
    assert "validation_loss" in lines[-1]
    for file in ("merged/model.safetensors", "merged/config.json", "merged/tokenizer.json"):
        assert (run / "export" / file).is_file()
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (run / "export" / file).is_file()


def test_starting_over_keeps_the_earlier_run(tmp_path: Path) -> None:
    assert run_ranks(run_on_rank, 1, arguments_for(tmp_path))[0]["code"] == 0
    first = (tmp_path / "run" / "metrics.jsonl").read_text()
    second = run_ranks(run_on_rank, 1, arguments_for(tmp_path, "max_steps=1", "resume=never"))[0]
    assert second["code"] == 0
    assert "held an earlier run" in second["out"]
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == first


def test_a_run_that_goes_back_keeps_its_new_checkpoints_and_resumes_from_them(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    common = ("checkpoint.every=1", "epochs=9")
    back = (*common, "max_steps=3", "checkpoint.keep_last=1")
    launches = [
        (*common, "max_steps=5", "checkpoint.keep_last=9"),
        (*back, f"resume={checkpoints / 'checkpoint-1'}"),
        back,
    ]
    runs: list[tuple[list[str], Kind]] = [(arguments_for(tmp_path, *overrides), "lora") for overrides in launches]
    ends = run_ranks(run_in_turn, 2, runs, run_and_read_end)[0]
    assert [end["code"] for end in ends] == [0, 0, 0], ends
    assert ends[1]["checkpoint"] == str(checkpoints / "elastic-checkpoint-3")
    assert "already complete after step 3" in ends[2]["out"]
    found = "checkpoint-2 checkpoint-4.1 elastic-checkpoint-3 elastic-checkpoint-5.1 final"
    assert sorted(os.listdir(checkpoints)) == found.split()
    assert (checkpoints / "final").readlink() == Path("elastic-checkpoint-3")


def test_a_run_from_a_named_checkpoint_is_resumed_by_its_own_command(tmp_path: Path) -> None:
    first, second = tmp_path / "A", tmp_path / "B"
    common = ("epochs=9", "checkpoint.every=1", "lr_scheduler.name=constant")
    named = (*common, f"resume={first / 'run' / 'checkpoints' / 'checkpoint-1'}")
    commands = [
        arguments_for(first, *common, "max_steps=2"),
        arguments_for(second, *named, "max_steps=2"),
        arguments_for(second, *named, "max_steps=3"),
    ]
    results = run_ranks(run_as_if_killed, 2, commands)[0]
    assert [result["code"] for result in results] == [0, 0, 0], results
    assert os.listdir(second) == ["run"], "nothing was renamed"
    assert [json.loads(line)["step"] for line in (second / "run" / "metrics.jsonl").open()] == [2, 3]
    (resumed,) = json.loads((second / "run" / "run.json").read_text())["resumed"]
    assert resumed["step"] == 2


def run_as_if_killed(world: World, commands: list[list[str]]) -> list[dict[str, Any]]:
    """Run the LoRA recipe with one command after another, each time without a record of the end."""
    results = []
    for command in commands:
        results += run_in_turn(world, [(command, "lora")])
        distributed.run_on_rank_0((Path(command[2].partition("=")[2]) / "exit.json").unlink)
    return results


def run_and_read_end(world: World, argv: list[str], kind: Kind) -> dict[str, Any]:
    """Run a recipe; returns its code and output, and on rank 0, which writes it, what exit.json says."""
    result = run_kind_on_rank(world, argv, kind)
    return result | json.loads((Path(argv[2].partition("=")[2]) / "exit.json").read_text()) if world.is_main else result


def test_a_checkpoint_contains_adapters_and_their_optimizer_and_little_else(tmp_path: Path) -> None:
    overrides = ("checkpoint.every=1", "adapter.modules=all-linear")
    assert run_ranks(run_on_rank, 2, arguments_for(tmp_path, *overrides))[0]["code"] == 0
    adapter = load_file(tmp_path / "run" / "export" / "adapter" / "adapter_model.safetensors")
    needed = sum(tensor.numel() for tensor in adapter.values()) * 4 * 3  # float32: weights and AdamW's two moments
    folder = tmp_path / "run" / "checkpoints" / "checkpoint-1"
    assert needed < sum(file.stat().st_size for file in folder.iterdir()) <= 1.05 * needed


@pytest.mark.real_data
@pytest.mark.parametrize(("num_steps", "share"), [(8, 0.9), pytest.param(60, 0.5, marks=pytest.mark.slow)])
def test_real_rows_train(num_steps: int, share: float, tmp_path: Path) -> None:
    rows = f"data.sources.0.path={REAL_DATA / 'glaive_demo'}"
    argv = arguments_for(tmp_path, rows, "data.overlong=drop", "data.seq_len=512", f"max_steps={num_steps}", "epochs=9")
    result = run_ranks(run_on_rank, 1, argv)[0]
    assert result["code"] == 0, result
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < share * losses[0]


def broken_model(tmp_path: Path, base: Path, change: Callable[[Path], None]) -> str:
    path = tmp_path / "model"
    shutil.copytree(base, path)
    change(path)
    return f"model.path={path}"


def drop_template(path: Path) -> None:
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").unlink(missing_ok=True)


def ignore_tools(path: Path) -> None:
    drop_template(path)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"
    )


def truncate_weights(path: Path) -> None:
    with open(path / "model.safetensors", "r+b") as file:
        file.truncate(1000)


def resize_config(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))


def other_family(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"model_type": "mamba"}))


BAD_MODELS: list[tuple[Callable[[Path], None], str]] = [
    (lambda path: (path / "config.json").write_text("{"), "cannot be read as JSON"),
    (other_family, "model_type='mamba' has layers without attention only"),
    (drop_template, "no chat template"),
    (ignore_tools, "ignores tools"),
    (truncate_weights, "damaged safetensors"),
    (lambda path: (path / "model.safetensors").unlink(), "no such file"),
    (resize_config, "missing"),
]


def test_a_broken_model_directory_is_reported_once(tiny_base: Path, tmp_path: Path) -> None:
    cases: list[tuple[list[str], str, Kind]] = []
    for number, (change, words) in enumerate(BAD_MODELS):
        folder = tmp_path / str(number)
        folder.mkdir()
        cases.append((arguments_for(folder, broken_model(folder, tiny_base, change)), words, "lora"))
    check_single_reports(cases)


def test_wrong_input_is_reported_once(tmp_path: Path) -> None:
    wrong = [
        (["model.path=no/such"], "no such directory"),
        (["data.sources.0.path=no/such.jsonl"], "no such file"),
        (["adapter=null"], "recipes/lora_fc_distributed is for configs with adapter"),
        (["data.seq_len=64"], "over data.seq_len=64"),
        (["data.seq_len=100000"], "positions"),
        (["output_dir=/proc/nowhere"], "output_dir=/proc/nowhere"),
        (["lr=3"], "unknown key"),
    ]
    unusable = [
        ("", "an empty file; expected rows"),
        ('{"text": "hello"}\n', "unknown format"),
        ('{"messages": [', "not JSON"),
    ]
    for number, (content, words) in enumerate(unusable):
        (tmp_path / f"{number}.jsonl").write_text(content)
        wrong.append(([f"data.sources.0.path={tmp_path / f'{number}.jsonl'}"], words))
    check_single_reports([(arguments_for(tmp_path, *overrides), words, "lora") for overrides, words in wrong])


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    results = run_ranks(
        run_on_rank, 2, arguments_for(tmp_path, "optimizer.lr=1e30", "clip_grad_norm=null", "max_steps=8")
    )
    assert [r["code"] for r in results] == [1, 1]
    assert "not finite, stopped before the update" in results[0]["err"]
    exit_json = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert exit_json["code"] == 1


def test_steps_that_are_not_finite_are_skipped_if_configured(tmp_path: Path) -> None:
    argv = arguments_for(tmp_path, "optimizer.lr=1e30", "clip_grad_norm=null", "max_steps=3", "on_nonfinite=skip")
    assert run_ranks(run_on_rank, 2, argv)[0]["code"] == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("is_skipped") for line in lines)


def test_a_run_whose_steps_were_all_skipped_is_not_completed(tmp_path: Path) -> None:
    model = shutil.copytree(TINY_BASE, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][:] = 1e38  # finite, as loading requires; its products are not
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    overrides = (f"model.path={model}", "max_steps=2", "on_nonfinite=skip", "data.packed=false")
    done = run_ranks(run_on_rank, 1, arguments_for(tmp_path, *overrides))[0]
    exit_json = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (done["code"], exit_json["code"]) == (1, 1)
    assert "not finite in all of 2 steps" in exit_json["reason"]


@pytest.mark.thorough
def test_the_launcher_runs_two_ranks(tmp_path: Path) -> None:
    done = tune_run("--nproc_per_node", "2", "recipes/lora_fc_distributed", *arguments_for(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("cpp extensions") <= 1  # of torchtune's own command, not of the ranks


@pytest.mark.slow  # wrong input is reported once on ranks without a launcher, too
def test_wrong_input_is_reported_once_under_the_launcher(tmp_path: Path) -> None:
    failed = tune_run("--nproc_per_node", "2", "recipes/lora_fc_distributed", *arguments_for(tmp_path, "epochs=0"))
    assert failed.returncode != 0
    assert (failed.stdout + failed.stderr).count("epochs=0: expected 1 or more") == 1


@pytest.mark.thorough
def test_tune_run_without_nproc_runs_one_process(tmp_path: Path) -> None:
    done = tune_run("recipes/lora_fc_distributed", *arguments_for(tmp_path), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world_size"] == 1
