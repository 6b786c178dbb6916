"""``fctune train`` launches a recipe, saves when it is stopped, and returns the run's own exit code."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fctune.cli import main
from fctune.training.entry import run_recipe
from tests.cli.processes import wait_until
from tests.conftest import ROOT
from tests.warm_interpreter import warm_python

TRAIN = ["-m", "fctune.cli", "train", "--config", "lora_tiny", "--nproc", "1"]
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SMALL = [
    "data.sources.0.path=synthetic:train:300:1",
    "data.seq_len=512",
    "data.overlong=drop",
    "validation.every=0",
    "data.validation_share=0.03",  # all of its rows are answered in the end
    "global_batch_size=1",
    "adapter.modules=[q_proj,v_proj]",
]


def start(folder: Path, *arguments: str, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*(command or [warm_python()]), *TRAIN, *SMALL, "output_dir=run", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough
def test_a_stopped_run_saves_and_the_same_command_completes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stop is asked for with a file, which is looked for every two seconds; a step takes 60 ms.
    process = start(tmp_path, "max_steps=60", "checkpoint.every=0", command=("nohup", sys.executable))
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process, 240)
    process.send_signal(signal.SIGHUP)  # its terminal closes, which nohup makes it ignore
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 75, errors
    assert "Traceback" not in errors
    ended = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert ended["code"] == 75
    assert ended["reason"].startswith(f"stopped by Ctrl-C after step {ended['step']}; checkpoint saved")
    assert (tmp_path / ended["checkpoint"]).is_dir()

    process = start(tmp_path, "max_steps=60", "checkpoint.every=0")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 61))
    assert (tmp_path / "run" / "export" / "merged" / "model.safetensors").is_file()

    found = json.loads((tmp_path / "run" / "run.json").read_text())["response_template"]
    assert (found["origin"], found["note"], found["wrong"]) == ("fctune", "", [])
    assert found["calls"] == found["read"] > 0  # every call of the held-out rows
    monkeypatch.chdir(tmp_path)
    assert "merged model: run/export/merged" in output
    assert "adapter: run/export/adapter" in output
    commands = [line[line.index("fctune ") :] for line in output.splitlines() if " it: fctune " in line]
    assert [shlex.split(command)[1] for command in commands] == ["eval", "report", "serve"]
    assert commands[0].endswith("--cases run/held_out.jsonl")
    for command in commands:
        words = shlex.split(command)[1:]
        words += ["--print"] if words[0] == "serve" else []  # without vLLM, which is not installed here
        assert main(words) == 0, command


def test_a_run_that_cannot_start_returns_its_own_code_and_message_only(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "robot\x1b[2J", "content": "x"}]}) + "\n")
    process = start(tmp_path, "data.sources.0.path=rows.jsonl")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "rows.jsonl:1: messages[0].role" in errors
    assert "Traceback" not in errors
    assert "torch" not in errors
    assert "\x1b" not in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: CONFIG"),
        (["tiny_lora", "--nproc", "0"], "--nproc 0: expected 1 or more"),
        (["tiny_lora", "--nprok", "2"], "did you mean --nproc?"),
        (["tiny_lora", "tiny_full"], "unrecognized arguments: tiny_full"),
        (["rows.jsonl"], "write CONFIG --data rows.jsonl"),
        (["tiny_lora", "rows.jsonl", "epochs=1"], "write CONFIG --data rows.jsonl"),
        (["tiny_lora", "--data"], "argument --data: expected at least one"),
        (["tiny_lora", "--data", "epochs=1"], "argument --data: expected at least one"),
        (["tiny_lora", "--rank", "8"], "--rank: config keys take no dashes; write adapter.rank=8"),
        (["--rank", "8", "tiny_lora"], "write adapter.rank=8"),
        (["tiny_lora", "--lr=3e-4", "epochs=1"], "write optimizer.lr=3e-4"),
        (["tiny_lora", "--on-invalid", "skip"], "write data.on_invalid=skip"),
        (
            ["tiny_lora", "--num_train_epochs", "3", "--nprok", "2"],
            "write epochs=3; unrecognized arguments: --nprok; did",
        ),
        (["tiny_lora", "--dataset", "rows.jsonl"], "write --data FILE, or data.sources=[{path: FILE}]"),
    ],
)
def test_wrong_usage_is_answered_with_the_remedy(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", *arguments])
    assert words in capsys.readouterr().err


def test_a_wrong_key_is_found_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["train", "lora_tiny", "optimizer.lrr=1", "~adapter", "epochs=0"]) == 2
    report = capsys.readouterr().err
    assert "optimizer.lrr: AdamW takes no such argument; did you mean optimizer.lr?" in report
    assert "epochs=0: expected 1 or more" in report


def test_several_tasks_of_srun_are_refused_unless_each_is_a_run_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", "lora_tiny"]) == 2
    report = capsys.readouterr().err
    assert "srun started this command 8 times" in report
    assert "srun --nodes=1 --ntasks=1 --gpus-per-node=8" in report
    assert "sbatch --nodes=2 sky/slurm/finetune_venv.sbatch" in report
    assert main(["train", "lora_tiny", "--nproc", "1", "optimizer.lrr=1"]) == 2
    assert "srun" not in capsys.readouterr().err
    assert run_recipe(lambda *_: pytest.fail("the recipe was made"), ["--config", "lora_tiny"]) == 2
    assert "pass --nproc_per_node, and another output_dir in each" in capsys.readouterr().err


def test_data_replaces_the_sources_of_the_config_wherever_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "date=1").mkdir()
    for name in ("a, b.jsonl", "date=1/c.jsonl"):
        (tmp_path / name).write_text("{}\n")
    expected = ["a, b.jsonl", "date=1/c.jsonl", "hf:me/rows"]
    config = "qwen3_8b_lora"  # with two public sources
    for words in (
        [config, "--data", *expected, "epochs=2", "data.sources.1.weight=3"],
        ["--data", *expected, "--config", config, "epochs=2", "data.sources.1.weight=3"],
        ["epochs=2", "--data", *expected, config, "data.sources.1.weight=3"],
        [config, "--data", *expected[:2], "epochs=2", "--data", expected[2], "data.sources.1.weight=3"],
    ):
        assert main(["config", "show", *words]) == 0, words
        shown = yaml.safe_load(capsys.readouterr().out)
        assert [source["path"] for source in shown["data"]["sources"]] == expected
        assert shown["data"]["sources"][1]["weight"] == 3
        assert shown["epochs"] == 2


def test_the_copy_of_a_shipped_config_in_this_directory_is_used_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "cp", "tiny_lora"]) == 0
    captured = capsys.readouterr()
    assert "fctune train tiny_lora.yaml --data FILE" in captured.err
    copy = tmp_path / "tiny_lora.yaml"
    copy.write_text(copy.read_text().replace("epochs: 1", "epochs: 7"))
    for name in ("tiny_lora", "lora_tiny", "tiny_lora.yaml"):
        assert main(["config", "show", name]) == 0
        captured = capsys.readouterr()
        assert yaml.safe_load(captured.out)["epochs"] == 7
        assert ("using tiny_lora.yaml in this directory" in captured.err) == (name != "tiny_lora.yaml")
    copy.write_text("extends: tiny_lora\nepochs: 9\n")  # the shipped one
    assert main(["config", "show", "tiny_lora"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["epochs"] == 9
