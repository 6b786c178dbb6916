"""The environment's choices, held to the config, to .env.example and to the tasks that name them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from fctune.errors import ConfigError
from fctune.launch.env_overrides import CHOICES, plan_launch
from tests.conftest import ROOT
from tests.launch.nodes import OVERRIDES, TINY

VALUES = {  # one that each key takes, and that no config has
    "MODEL": str(ROOT / "fctune" / "assets" / "tiny_base"),
    "DATASET": "synthetic:train:33:7",
    "MAX_SAMPLES": "17",
    "EPOCHS": "11",
    "MAX_STEPS": "13",
    "LEARNING_RATE": "1.25e-5",
    "SEED": "19",
    "OUTPUT_DIR": "runs/mine",
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_sets_its_key_and_nothing_else(name: str, tmp_path: Path) -> None:
    plain = plan_launch(TINY, {}, OVERRIDES[:1], tmp_path).config.to_dict()
    chosen = plan_launch(TINY, {name: VALUES[name]}, OVERRIDES[:1] if name != "MODEL" else (), tmp_path)
    config = chosen.config.to_dict()
    value = config
    *parents, last = CHOICES[name].split(".")
    for parent in parents:
        value = value[int(parent)] if isinstance(value, list) else value[parent]
    wanted = str(tmp_path / VALUES[name]) if name == "OUTPUT_DIR" else yaml.safe_load(VALUES[name])
    assert value[last] == pytest.approx(float(wanted)) if name == "LEARNING_RATE" else value[last] == wanted
    value[last] = None
    other = plain
    for parent in parents:
        other = other[int(parent)] if isinstance(other, list) else other[parent]
    other[last] = None
    assert config == plain


def test_an_empty_choice_sets_nothing_and_the_command_line_wins(tmp_path: Path) -> None:
    empty = plan_launch(TINY, dict.fromkeys(CHOICES, ""), OVERRIDES, tmp_path)
    assert empty.config == plan_launch(TINY, {}, OVERRIDES, tmp_path).config
    assert plan_launch(TINY, {"SEED": "1"}, (*OVERRIDES, "seed=2"), tmp_path).config.seed == 2


def test_a_chosen_dataset_stands_for_all_of_a_config(tmp_path: Path) -> None:
    config = ROOT / "configs" / "llama3_1_8b_lora.yaml"
    launch = plan_launch(config, {"DATASET": "synthetic:train:10:1"}, (), tmp_path)
    assert [source.path for source in launch.config.data.sources] == ["synthetic:train:10:1"]


def test_a_choice_that_is_wrong_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_samples='many'"):
        plan_launch(TINY, {"MAX_SAMPLES": "many"}, OVERRIDES, tmp_path)


def test_what_training_is_told_survives_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a $HOME; "disk"'
    launch = plan_launch(TINY, {"DATASET": "synthetic:train:10:1"}, OVERRIDES[:1], folder)
    script = launch.to_shell(1) + 'printf \'%s\\0\' "$trains" "$output_dir" "$log" "${arguments[@]}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    trains, output_dir, log, *arguments = done.stdout.split("\0")[:-1]
    assert trains == "adapter"
    assert output_dir == str(folder / "runs" / "tiny_lora")
    assert log == str(folder / "logs" / "tiny_lora" / "node-1.log")
    assert arguments == launch.arguments


def test_every_choice_is_offered_where_a_first_trial_looks() -> None:
    offered = set(re.findall(r"^(?:# )?export ([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M))
    assert set(CHOICES) | {"CONFIG", "HF_TOKEN", "WANDB_API_KEY", "FCTUNE_SHARED", "FCTUNE_NETWORK"} <= offered
    for task in ("sky/finetune.yaml", "sky/slurm/finetune.yaml"):
        envs = yaml.safe_load((ROOT / task).read_text())["envs"]
        assert set(CHOICES) <= set(envs), task
        assert all(envs[name] == "" for name in CHOICES), task
        assert set(envs) <= offered, task


def test_every_variable_that_the_scripts_read_is_explained() -> None:
    offered = set(re.findall(r"^(?:# )?export ([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M))
    read = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", (ROOT / "sky" / "run_node.sh").read_text()))
    given = {
        name for name in read if name.startswith(("SKYPILOT_", "SLURM_", "TORCHINDUCTOR", "TRITON", "PATH", "PWD"))
    }
    assert read - given <= offered
