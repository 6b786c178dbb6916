"""The gate on a real vLLM, which serves the demo's adapter and its base: what clients get, streamed and guided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fctune.cli import main
from tests.ranks import find_port
from tests.serving.servers import serve_vllm

pytestmark = pytest.mark.serving


def test_base_and_adapter_of_one_server_are_gated_as_clients_see_them(
    demo: Path, vllm_python: str, tmp_path: Path
) -> None:
    run = demo / "run"
    adapter = json.loads((run / "export" / "adapter" / "adapter_config.json").read_text())
    base = str(Path(adapter["base_model_name_or_path"]))  # the name under which fctune serve serves it
    words = ["--cases", str(demo / "cases.jsonl"), "--benchmarks", "none", "--max-cases", "12"]
    words += ["--max-new-tokens", "128"]
    with serve_vllm(run / "export" / "adapter", vllm_python, find_port()) as address:
        served = ["--base", address, "--base-name", base, "--tuned", address, "--tuned-name", "adapter"]
        code = main(["gate", *served, *words, "--streamed", "--guided", "--out", str(tmp_path / "served")])
    report = json.loads((tmp_path / "served" / "gate.json").read_text())
    assert code == int(report["is_blocked"])
    assert main(["gate", "--base", base, "--tuned", str(run), *words, "--out", str(tmp_path / "here")]) in (0, 1)
    here = json.loads((tmp_path / "here" / "gate.json").read_text())
    lines = {line["name"]: line for line in report["lines"]}
    own = {line["name"]: line for line in here["lines"]}
    assert lines.keys() - {"calls_streamed"} == own.keys()
    for side in ("before", "after"):
        assert abs(lines["calls"][f"num_right_{side}"] - own["calls"][f"num_right_{side}"]) <= 1
        assert lines["calls_streamed"][f"num_right_{side}"] == lines["calls"][f"num_right_{side}"]
    guided = report["tables"]["Guided decoding"]["rows"]
    assert [row[5] for row in guided] == [0, 0, 0, 0], "the server has guided decoding, so every request is answered"
