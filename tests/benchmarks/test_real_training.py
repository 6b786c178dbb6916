"""Training of the real-model benchmark: an ended run is not trained again, nor taken for another; Ctrl-C saves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.real_arguments import run_benchmark
from benchmarks.real_model import train_once
from fctune.base.errors import CheckpointError, ConfigError
from fctune.config.loading import load_config
from tests.cli.processes import wait_until
from tests.conftest import ROOT

CONFIG = ROOT / "configs" / "tiny_lora.yaml"
# So many steps that only Ctrl-C can have ended it.
TRAINING = """
import sys
from pathlib import Path
from benchmarks.real_arguments import run_benchmark
from benchmarks.real_model import train_once
sys.exit(run_benchmark(lambda: str(train_once(Path(sys.argv[1]), Path(sys.argv[2]), ["max_steps=100000"]))))
"""


def write_ended_run(run: Path, *keys: str) -> None:
    """Write what a run leaves behind that has ended well."""
    (run / "export" / "merged").mkdir(parents=True)
    (run / "export" / "merged" / "config.json").write_text("{}")
    (run / "exit.json").write_text(json.dumps({"code": 0}))
    config = load_config(CONFIG, [f"output_dir={run}", "eval.every=0", "telemetry=null", *keys]).to_dict()
    (run / "run.json").write_text(json.dumps({"config": config}))


def test_an_ended_run_is_not_trained_again(tmp_path: Path) -> None:
    write_ended_run(tmp_path / "run", "optimizer.lr=3e-4")
    assert train_once(CONFIG, tmp_path / "run", ["optimizer.lr=3e-4"]) == tmp_path / "run" / "export" / "merged"


def test_an_ended_run_is_known_by_any_spelling_of_its_paths(tmp_path: Path) -> None:
    write_ended_run(tmp_path / "run")
    spelled = tmp_path / ".." / tmp_path.name / "run"
    assert train_once(CONFIG, spelled, []) == spelled / "export" / "merged"


def test_an_ended_run_has_chosen_what_its_config_left_open(tmp_path: Path) -> None:
    chosen = {"parallel.context": 1, "activation_checkpointing.fraction": 0.5, "activation_checkpointing.mlp_tiles": 2}
    write_ended_run(tmp_path / "run", *(f"{key}={value}" for key, value in chosen.items()))
    open_keys = [f"{key}=null" for key in chosen]
    assert train_once(CONFIG, tmp_path / "run", open_keys) == tmp_path / "run" / "export" / "merged"
    with pytest.raises(ConfigError, match=r"parallel\.context=1, not 2\. Pass another --out"):
        train_once(CONFIG, tmp_path / "run", [*open_keys, "parallel.context=2"])


def test_an_ended_run_of_another_config_is_refused_with_the_key(tmp_path: Path) -> None:
    write_ended_run(tmp_path / "run", "optimizer.lr=3e-4", "seed=7")
    with pytest.raises(ConfigError, match=r"seed=7, not 8 and 1 more keys?\. Pass another --out"):
        train_once(CONFIG, tmp_path / "run", ["optimizer.lr=1e-4", "seed=8"])


@pytest.mark.thorough
def test_ctrl_c_lets_the_training_save_and_the_same_command_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", TRAINING, str(CONFIG), str(run)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, text=True, start_new_session=True)
        try:
            wait_until(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size, process)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert "run the same command to continue" in (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()
    saved = json.loads((run / "exit.json").read_text())
    assert saved["code"] == 75
    assert list((run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("no such model"), 2, "no such model"),
        (CheckpointError("training failed"), 2, "training failed"),
        (OSError(28, "No space left on device", "rows.jsonl"), 2, "rows.jsonl: cannot be read or written (No space"),
        (KeyboardInterrupt("kept 3 answers"), 130, "interrupted: kept 3 answers"),
    ],
)
def test_a_benchmark_that_stops_says_why_in_one_line(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise error

    assert run_benchmark(fail) == code
    assert capsys.readouterr().err.strip().startswith(says)
