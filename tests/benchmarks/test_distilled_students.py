"""The students of the distillation benchmark differ in their answers and divergences alone."""

from __future__ import annotations

from pathlib import Path

from benchmarks.distillation import ANSWERS, format_results, list_students, write_config
from fctune.config.loading import load_config
from tests.conftest import TINY_BASE


def test_students_take_as_many_answers_a_step_from_themselves_or_from_rows(tmp_path: Path) -> None:
    for name in ("prompts.jsonl", "prompt_rows.jsonl"):
        (tmp_path / name).write_text("{}\n")
    found = {}
    for name, options in list_students(tmp_path, TINY_BASE).items():
        if options:
            config = load_config(write_config(tmp_path), [*options, f"output_dir={tmp_path / name}"])
            assert config.distill is not None
            assert config.recipe == "lora_distill_distributed"
            found[name] = config.distill.prompts_per_step, config.distill.rows_per_step, config.distill.beta
    assert found == {"on_policy": (ANSWERS, 0, 1.0), "mixture": (8, 8, 0.5), "rows": (0, ANSWERS, 0.0)}


def test_the_table_names_tokens_and_right_answers() -> None:
    result = {"model": "rows", "seed": 1, "tokens_supervised": 1234, "categories": {"all": {"right": 30, "n": 40}}}
    start = {**result, "model": "start", "tokens_supervised": None}
    lines = format_results([start, result])
    assert lines[2].startswith("| rows | 1 | 1,234 | 75.0% |")
    assert lines[3].startswith("| start | 1 |  | 75.0% |")
