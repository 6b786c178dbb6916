"""Keys and tokens in the environment appear in no file and no output of a run, its report or its terminal view."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fctune.base.distributed import World
from fctune.cli import main
from tests.ranks import find_port, run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank

SECRETS = {
    "WANDB_API_KEY": "5" * 20 + "secretwandbkeysecret",
    "HF_TOKEN": "hf_secretTokenOfTheHub123456789",
    "FCTUNE_API_KEY": "sk-secret-of-a-server-0001",
    "VLLM_API_KEY": "sk-secret-of-a-server-0002",
}


def run_with_secrets(world: World, argv: list[str], home: str) -> dict[str, Any]:
    os.environ.update(SECRETS, HOME=home, WANDB_BASE_URL=f"http://127.0.0.1:{find_port()}")
    return run_on_rank(world, argv)


@pytest.mark.thorough
def test_no_secret_of_the_environment_is_written_or_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    sinks = ["telemetry.wandb.project=calls", "telemetry.tensorboard=true", "success={}"]
    sinks += [f"telemetry.prometheus.port={find_port()}", "profile.first_step=1", "profile.last_step=2"]
    results = run_ranks(run_with_secrets, 1, arguments_for(tmp_path, *sinks), str(tmp_path / "home"))
    assert [result["code"] for result in results] == [0], results
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])
    main(["watch", str(tmp_path / "run"), "--once"])
    captured = capfd.readouterr()
    printed = "".join(result["out"] + result["err"] for result in results) + captured.out + captured.err
    files = [path for path in tmp_path.rglob("*") if path.is_file() and (tmp_path / "home") not in path.parents]
    assert {"run.json", "metrics.jsonl", "exit.json", "page.html"} <= {path.name for path in files}
    assert any("wandb" in path.parts for path in files)
    for value in SECRETS.values():
        assert value not in printed
        assert not [str(path) for path in files if value.encode() in path.read_bytes()]
