"""Rows of a benchmark are counted when they are prepared, and every record of a run names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fctune.apps.push.card import make_model_card
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.prepared_set import describe_counts, prepare
from fctune.runs.record import read_run
from tests.runs.sample_runs import make_run


def test_a_run_on_marked_rows_says_so(tiny_base: Path, tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows: list[dict[str, Any]] = [{"messages": messages}, {"messages": messages, "metadata": {"benchmark": "BFCL v4"}}]
    rows[1]["messages"] = [*messages, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Bye."}]
    data = DataConfig(sources=[SourceConfig(path=str(write_rows(rows)))], seq_len=256, validation_share=0.0)
    prepared = prepare(data, tiny_base, tmp_path / "prepared")
    assert prepared.counts.benchmark == 1
    assert any("1 conversation marked as a benchmark's" in line for line in describe_counts(prepared))
    path = tmp_path / "run"
    make_run(path)
    record = read_run(path)
    assert "benchmark" not in make_model_card(path, "me/tuned", record)
    record.run["data"] = prepared.describe()
    assert "| benchmark questions | trained on 1;" in make_model_card(path, "me/tuned", record)
