"""A round of learning from verdicts on a real model: its keys fit the configs, and wrong input is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.real_round import METHODS, main
from fctune.config.loading import load_config


@pytest.mark.parametrize("method", METHODS)
def test_the_keys_of_each_method_fit_its_config(method: str, tiny_base: Path) -> None:
    name, rows, keys = METHODS[method]
    config = load_config(f"configs/{name}", [f"model.path={tiny_base}", *keys])
    assert config.data.pairs == (rows == "pairs.jsonl")
    assert config.adapter is not None


def test_a_round_needs_a_trained_model_and_rows(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").touch()
    options = ["--model", str(tiny_base), "--glaive", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*options, "--trained", str(tmp_path), "--seal", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: no such rows" in capsys.readouterr().err
    assert main([*options, "--trained", str(tmp_path), "--seal", str(tmp_path / "rows.jsonl")]) == 2
    assert f"--trained {tmp_path}: no trained model" in capsys.readouterr().err
