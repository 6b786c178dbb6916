"""The GPU benchmarks train real shapes, and keep what was measured when their time ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import Results
from benchmarks.gpu_report import RESULTS_FILE, SPEEDS
from benchmarks.gpu_rows import NO_TIME, Bench
from benchmarks.job import Job
from benchmarks.planner import compare_speeds
from benchmarks.train_fctune import fctune_config
from benchmarks.workload import PUBLIC, write_public_model
from fctune.config.loading import parse_config
from fctune.config.schema import RunConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.data.sources.reader import read_source
from fctune.models.planned_model import shape_model
from fctune.models.sources import read_architecture
from fctune.training.meter import count_flops

# Billions of parameters by the models' own cards: all, and those that a token uses.
PUBLISHED = {"qwen3_8b": (8.2, 8.2), "qwen3_30b_a3b": (30.5, 3.3), "gpt_oss_20b": (20.9, 3.6), "qwen3_5_9b": (9.0, 9.0)}


def parse_job(job: Job) -> RunConfig:
    problems: list[str] = []
    raw = fctune_config(job, Path("runs"))
    raw["data"]["sources"] = [{"path": "hf:some/rows"}]
    config = parse_config(raw, problems)
    assert not problems
    assert isinstance(config, RunConfig)
    return config


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PUBLIC)
def test_models_of_public_shapes_have_their_published_sizes(name: str, tmp_path: Path) -> None:
    write_public_model(tmp_path / name, PUBLIC[name], is_small=False, num_texts=50)
    job = Bench(tmp_path, is_toy=True).shipped(name)
    model = shape_model(parse_job(job), read_architecture(tmp_path / name))
    base = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    total, active = PUBLISHED[name]
    assert base / 1e9 == pytest.approx(total, rel=0.01)
    # OpenAI counts the head without the embedding.
    used = count_flops(model).num_parameters - (model.architecture.vocab_size * 2880 if name == "gpt_oss_20b" else 0)
    assert used / 1e9 == pytest.approx(active, rel=0.02)


def test_every_result_and_every_line_of_the_page_is_a_row(tmp_path: Path) -> None:
    rows = Bench(tmp_path, is_toy=True).rows()
    assert json.loads(RESULTS_FILE.read_text()).keys() | SPEEDS.keys() <= rows.keys()
    assert not list(tmp_path.iterdir())  # a GPU does not wait for the inputs of all rows


def test_long_conversations_fill_their_rows_and_are_supervised_in_part(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_toy=True)
    bench.write_rows("long_4096")
    template = ChatTemplate(tmp_path / "8b")
    rows = list(read_source(str(tmp_path / "long_4096" / "rows.jsonl")))
    encoded = [template.encode(row)[0] for row in rows if isinstance(row, Conversation)]
    assert len(encoded) == len(rows) == 4
    for row in encoded:
        assert 0.5 * 4096 < len(row.tokens) < 4096
        assert 0.1 < row.num_supervised / len(row.tokens) < 0.4


class Measured(Bench):
    """Rows of given measurements."""

    def __init__(self, folder: Path, results: Iterator[dict[str, Any]]):
        super().__init__(folder, is_toy=True)
        self.is_toy, self.limits = False, [0.0]
        self._results = results

    def measure(self, job: Job, limit: float) -> dict[str, Any]:
        self.limits.append(limit)
        return next(self._results)


def measured(rate: float) -> dict[str, Any]:
    keys = ("supervised_per_s", "padding_share", "peak_mib", "setup_s", "first_step_s", "attention_flops")
    return dict.fromkeys(keys, 1.0) | {"real_per_s": rate, "losses": [1.0], "parameters": 1_000}


def test_a_setting_is_reported_before_the_next_one_runs(tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []

    def results() -> Iterator[dict[str, Any]]:
        yield measured(3.0)
        assert reports[-1]["tokens_per_s"] == 3.0
        assert reports[-1]["not_run"] == "1 of 2 settings"
        yield {"error": "out of memory"}

    bench = Measured(tmp_path, results())
    found = bench.best([bench.lora(), bench.lora().replace(compile=True)])(240, reports.append)
    assert (found["tokens_per_s"], found["compiled"], len(found["tried"])) == (3.0, False, 2)
    assert "not_run" not in found
    # The first leaves time for the second.
    assert bench.limits[1] == pytest.approx(180, abs=1)
    assert bench.limits[2] == pytest.approx(240, abs=1)


def test_a_row_without_time_for_all_settings_runs_again(tmp_path: Path) -> None:
    bench = Measured(tmp_path, iter([measured(3.0)]))
    found = bench.best([bench.lora(), bench.lora()], "liger_kernel is not installed")(39, lambda line: None)
    assert found["tried"][0]["error"] == NO_TIME
    assert (found["ok"], found["tokens_per_s"]) == (True, 3.0)
    assert found["not_run"] == "liger_kernel is not installed; 1 of 2 settings"
    results = Results(tmp_path / "gpu.json")
    results.add("lora_8b_trl", found)
    assert not results.is_current("lora_8b_trl")


def test_speeds_are_planned_for_the_model_that_ran(tmp_path: Path) -> None:
    """A row of another model is not compared with the plan for Llama, nor one whose conversations are unknown."""
    results = json.loads(RESULTS_FILE.read_text())
    row = results["lora_8b"]
    job = {**row["tried"][0]["job"], "model_dir": "qwen3_8b", "config": "qwen3_8b_lora.yaml"}
    other = row | {"tried": [row["tried"][0] | {"job": job, "checkpointed": 0.5}]}
    long = row | {"tried": [row["tried"][0] | {"job": row["tried"][0]["job"] | {"rows_dir": "long_32768"}}]}
    speeds = compare_speeds({"lora_8b": row, "other": other, "long": long})
    assert speeds.keys() == {"lora_8b", "other"}
    assert speeds["other"][0] < 0.9 * speeds["lora_8b"][0]  # half of the blocks are recomputed
