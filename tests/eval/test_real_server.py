"""The same model in this process, as base and adapter, and behind ``transformers serve``: the same answers."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eval import tool_calls
from fctune.data.conversation import Conversation, Message
from fctune.engines.server import ServerEngine
from fctune.tasks.evaluation.results import read_rows

SERVING = ("fastapi", "uvicorn", "openai")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, SERVING)), reason="pip install '.[serve]' for transformers serve"
    ),
]


@contextmanager
def transformers_serve(model: Path, home: Path) -> Iterator[str]:
    (home / "hub").mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model)]
    with open(home / "serve.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
            env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(240):
            assert process.poll() is None, (home / "serve.log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


def train(run: Path, tiny_base: Path) -> None:
    """Train briefly, so that the model makes calls."""
    from tests.recipes.recipe_runs import tune_run

    overrides = ["data.sources.0.path=synthetic:train:1500:1", "seed=1", f"output_dir={run}"]
    config = ["--config", "configs/tiny_lora.yaml", *overrides]
    done = tune_run("--nproc_per_node", "2", "recipes/lora_fc_distributed", *config, timeout_s=600)
    assert done.returncode == 0, done.stderr


def test_a_model_answers_the_same_here_from_its_adapter_and_behind_a_server(tmp_path: Path, tiny_base: Path) -> None:
    run = tmp_path / "run"
    train(run, tiny_base)
    what = ["--suite", "synthetic", "--num-cases", "24", "--max-new-tokens", "64", "--out"]

    def rows(name: str, *how: str) -> list[dict[str, Any]]:
        out = tmp_path / f"{name}.jsonl"
        assert tool_calls.main([*what, str(out), *how]) == 0
        return [{key: row[key] for key in ("id", "verdict", "answer", "calls", "is_cut")} for row in read_rows(out)]

    here = rows("here", "--model", str(run))
    assert any(row["calls"] for row in here)
    assert rows("adapter", "--model", str(run / "export" / "adapter")) == here
    merged = run / "export" / "merged"
    with transformers_serve(merged, tmp_path / "home") as url:
        server = ["--model", url, "--served-model", str(merged), "--concurrency", "2"]
        assert rows("server", *server, "--format", "hermes") == here
        unread = rows("unread", *server)
        assert all(row["calls"] == [] for row in unread)
        assert [row["answer"] for row in unread] == [row["answer"] for row in here]
        timing = ServerEngine(url, str(merged)).time_answer(Conversation((Message("user", "Hello."),)), 8)
        assert 0 < timing.first_s <= timing.total_s
        assert timing.num_tokens > 0
