"""Environment overrides: what each sets, and that .env.example and the tasks offer all of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from fctune.apps.preflight.preparation import ALLOW_VARIABLE
from fctune.base.errors import ConfigError
from fctune.config.shipped import CONFIG_OF_SIZE, has_size, list_shipped_configs
from fctune.training.env_overrides import ENV_OVERRIDES, choose_config, resolve_launch
from tests.apps.preflight.preflight_nodes import OVERRIDES, TINY
from tests.conftest import ROOT

VALUES = {  # a valid value of each key that no config uses
    "MODEL": str(ROOT / "fctune" / "assets" / "tiny_base"),
    "DATASET": "synthetic:train:33:7",
    "MAX_SAMPLES": "17",
    "EPOCHS": "11",
    "MAX_STEPS": "13",
    "LEARNING_RATE": "1.25e-5",
    "SEED": "19",
    "OUTPUT_DIR": "runs/mine",
    "WANDB_PROJECT": "mine",
}


def read_offered_variables() -> set[str]:
    return set(re.findall(r"^(?:# )?export ([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M))


BASE = (OVERRIDES[0], "telemetry.wandb.project=plain")


@pytest.mark.parametrize("name", ENV_OVERRIDES)
def test_a_variable_sets_its_key_and_nothing_else(name: str, tmp_path: Path) -> None:
    kept = [line for line in BASE if not line.startswith(f"{ENV_OVERRIDES[name]}=")]
    plain = resolve_launch(TINY, {}, BASE, tmp_path).config.to_dict()
    overridden = resolve_launch(TINY, {name: VALUES[name]}, kept, tmp_path)
    config = overridden.config.to_dict()
    value = config
    *parents, last = ENV_OVERRIDES[name].split(".")
    for parent in parents:
        value = value[int(parent)] if isinstance(value, list) else value[parent]
    expected = str(tmp_path / VALUES[name]) if name == "OUTPUT_DIR" else yaml.safe_load(VALUES[name])
    assert value[last] == pytest.approx(float(expected)) if name == "LEARNING_RATE" else value[last] == expected
    value[last] = None
    other = plain
    for parent in parents:
        other = other[int(parent)] if isinstance(other, list) else other[parent]
    other[last] = None
    assert config == plain


def test_an_empty_variable_sets_nothing_and_the_command_line_takes_precedence(tmp_path: Path) -> None:
    empty = resolve_launch(TINY, dict.fromkeys(ENV_OVERRIDES, ""), OVERRIDES, tmp_path)
    assert empty.config == resolve_launch(TINY, {}, OVERRIDES, tmp_path).config
    assert resolve_launch(TINY, {"SEED": "1"}, (*OVERRIDES, "seed=2"), tmp_path).config.seed == 2


def test_overrides_are_split_like_words_of_a_shell_and_come_before_the_command_line(tmp_path: Path) -> None:
    given = {"OVERRIDES": "seed=7 epochs=2 'adapter.modules=[q_proj, v_proj]'", "SEED": "1"}
    config = resolve_launch(TINY, given, (*OVERRIDES, "epochs=3"), tmp_path).config
    assert config.adapter is not None
    assert (config.seed, config.epochs, config.adapter.modules) == (7, 3, ["q_proj", "v_proj"])
    with pytest.raises(ConfigError, match="OVERRIDES=seed='7: No closing quotation; write key=value pairs"):
        resolve_launch(TINY, {"OVERRIDES": "seed='7"}, OVERRIDES, tmp_path)


def test_dataset_replaces_all_sources_of_a_config(tmp_path: Path) -> None:
    config = ROOT / "configs" / "llama3_1_8b_lora.yaml"
    launch = resolve_launch(config, {"DATASET": "synthetic:train:10:1"}, (), tmp_path)
    assert [source.path for source in launch.config.data.sources] == ["synthetic:train:10:1"]


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("owner/rows", "hf:owner/rows"),
        ("owner/rows:hard:test@v1.0", "hf:owner/rows:hard:test@v1.0"),
        ("hf:owner/rows", "hf:owner/rows"),
        ("mine/rows.jsonl", "mine/rows.jsonl"),  # a file that exists
    ],
)
def test_dataset_may_be_a_name_on_the_hub_or_a_file(
    given: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    launch = resolve_launch(TINY, {"DATASET": given}, OVERRIDES[:1], tmp_path)
    assert [source.path for source in launch.config.data.sources] == [path]


@pytest.mark.parametrize("given", ["other/rows.jsonl", "mine/missing"])
def test_a_missing_file_is_not_taken_for_a_name_on_the_hub(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"data.sources.0.path={given}: no such file or directory"):
        resolve_launch(TINY, {"DATASET": given}, OVERRIDES[:1], tmp_path)


def test_the_fallback_disk_of_a_launcher_is_used_unless_the_config_names_one(tmp_path: Path) -> None:
    given = {"FCTUNE_FALLBACK": "/mnt/network/fallback"}
    assert resolve_launch(TINY, given, OVERRIDES, tmp_path).config.checkpoint.fallback_dir == "/mnt/network/fallback"
    own = (*OVERRIDES, "checkpoint.fallback_dir=/mnt/other")
    assert resolve_launch(TINY, given, own, tmp_path).config.checkpoint.fallback_dir == "/mnt/other"
    assert resolve_launch(TINY, {"FCTUNE_FALLBACK": ""}, OVERRIDES, tmp_path).config.checkpoint.fallback_dir is None


def test_every_size_stands_for_a_shipped_config_with_it_in_its_name() -> None:
    shipped = {path.stem for path in list_shipped_configs()}
    for size, name in CONFIG_OF_SIZE.items():
        assert name in shipped
        assert [other for other in CONFIG_OF_SIZE if has_size(name, other)] == [size]
    named = {re.sub(r"^0", "0.", "".join(words)) for name in shipped for words in re.findall(r"_(0)?_?(\d+b)_", name)}
    assert {size.upper() for size in named} <= set(CONFIG_OF_SIZE)


def test_model_size_chooses_the_config_and_may_repeat_its_size(tmp_path: Path) -> None:
    configs = Path("configs")
    assert choose_config(Path("8b"), {"MODEL_SIZE": "8b"}) == configs / "llama3_1_8b_lora.yaml"
    assert choose_config(Path("0.6B"), {"MODEL_SIZE": "0.6B"}) == configs / "qwen3_0_6b_lora.yaml"
    full = configs / "llama3_1_8b_full.yaml"
    assert choose_config(full, {"MODEL_SIZE": "8B"}) == full
    assert choose_config(TINY, {"MODEL_SIZE": ""}) == TINY
    launch = resolve_launch(Path("8B"), {"MODEL_SIZE": "8B"}, (), tmp_path)
    assert "config=configs/llama3_1_8b_lora.yaml\n" in launch.to_shell(0)


@pytest.mark.parametrize("config", ["configs/llama3_3_70b_lora.yaml", "qwen3_5_0_8b_lora", "mine.yaml", "7B"])
def test_a_config_without_the_size_in_model_size_is_refused(config: str) -> None:
    with pytest.raises(ConfigError, match=rf"MODEL_SIZE=8B and CONFIG={config}: .* Set one of them"):
        choose_config(Path(config), {"MODEL_SIZE": "8B"})


def test_an_unknown_size_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"MODEL_SIZE=13B: fctune comes with no config .* 8B \(llama3_1_8b_lora\), .* 72B"
    ):
        resolve_launch(Path("13B"), {"MODEL_SIZE": "13B"}, (), tmp_path)
    with pytest.raises(ConfigError, match=r"^13b: fctune comes with no config .* 8B \(llama3_1_8b_lora\)"):
        resolve_launch(Path("13b"), {}, (), tmp_path)


def test_an_invalid_value_is_reported_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_samples='many'"):
        resolve_launch(TINY, {"MAX_SAMPLES": "many"}, OVERRIDES, tmp_path)


def test_shell_assignments_survive_quotes_and_dollar_signs(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a $HOME; "disk"'
    launch = resolve_launch(TINY, {"DATASET": "synthetic:train:10:1"}, OVERRIDES[:1], folder)
    script = launch.to_shell(1) + 'printf \'%s\\0\' "$recipe" "$output_dir" "$log" "${arguments[@]}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    recipe, output_dir, log, *arguments = done.stdout.split("\0")[:-1]
    assert recipe == "lora_fc_distributed"
    assert output_dir == str(folder / "runs" / "tiny_lora")
    assert log == str(folder / "logs" / "tiny_lora" / "node-1.log")
    assert arguments == launch.arguments


def test_env_example_and_all_tasks_offer_every_variable() -> None:
    offered = read_offered_variables()
    others = {"CONFIG", "MODEL_SIZE", "HF_TOKEN", "WANDB_API_KEY", "FCTUNE_SHARED", "FCTUNE_NETWORK", "FCTUNE_FALLBACK"}
    assert set(ENV_OVERRIDES) | others <= offered
    for task in ("sky/finetune.yaml", "sky/slurm/finetune.yaml", "sky/prepare.yaml"):
        envs = yaml.safe_load((ROOT / task).read_text())["envs"]
        assert set(ENV_OVERRIDES) <= set(envs), task
        assert all(envs[name] == "" for name in (*ENV_OVERRIDES, "CONFIG", "MODEL_SIZE")), task
        assert set(envs) <= offered, task


def test_env_example_explains_every_variable_of_ours_that_the_library_reads() -> None:
    texts = [file.read_text() for file in (ROOT / "fctune").rglob("*.py")]
    read = {name for text in texts for name in re.findall(r'"(FCTUNE_[A-Z_]+)"', text)}
    assert {"FCTUNE_API_KEY", "FCTUNE_CACHE"} <= read
    # Set by fctune and its node scripts for the processes that they start.
    internal = {"FCTUNE_RANKS_MET", "FCTUNE_SWEEP", "FCTUNE_TASK_FILE", "FCTUNE_EPISODE_DIR", "FCTUNE_NO_KEY"}
    assert read - internal <= read_offered_variables()


def test_env_example_explains_every_variable_that_the_node_scripts_read() -> None:
    scripts = [(ROOT / "sky" / name).read_text() for name in ("run_node.sh", "prepare_node.sh")]
    read = {name for text in scripts for name in re.findall(r"\$\{?([A-Z][A-Z_]+)", text)} | {ALLOW_VARIABLE}
    external = ("SKYPILOT_", "SLURM_", "KUBERNETES_", "TORCHINDUCTOR", "TRITON", "PATH", "PWD", "BASHPID", "PYTHON")
    assert {name for name in read if not name.startswith(external)} <= read_offered_variables()
