"""The tasks of the benchmark with an MCP server, and a toy run of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.mcp_learning import START_ROWS, TOOLS, WORDINGS, format_results, main, make_tasks, write_tasks
from fctune.data.synthetic import iter_conversations
from fctune.tasks.environments.mcp.server import EpisodeServerLimits, ToolServer
from fctune.tasks.environments.mcp.task_file import read_task_file


def test_sides_share_no_question_bed_amount_or_wording() -> None:
    sides = make_tasks(3)
    seen: dict[str, set[str]] = {
        side: {str(value) for task in tasks for value in task["calls"][0]["arguments"].values()}
        | {task["question"] for task in tasks}
        for side, tasks in sides.items()
    }
    wordings = {side: {one for of_tool in by_tool.values() for one in of_tool} for side, by_tool in WORDINGS.items()}
    for found in (seen, wordings):
        assert not found["train"] & found["test"]
        assert not found["validation"] & (found["train"] | found["test"])
    assert {task["split"] for task in sides["train"]} == {"train"}
    assert {task["split"] for side in ("validation", "test") for task in sides[side]} == {"test"}


def test_no_row_of_the_start_has_a_tool_of_the_server() -> None:
    split, number = START_ROWS.split(":")[1:]
    rows = iter_conversations(split, int(number), 0)  # type: ignore[arg-type]
    assert not {tool.name for row in rows for tool in row.tools} & set(TOOLS)


def test_the_server_is_reset_for_each_dialogue_and_the_tasks_calls_solve_them(tmp_path: Path) -> None:
    from fctune.tasks.environments.mcp.recording import EpisodeKey

    file = read_task_file(write_tasks(tmp_path, 0)["test"])
    server = ToolServer(file, EpisodeServerLimits())
    try:
        for task in file.tasks[:3]:
            assert task.check is not None
            run = server.begin(EpisodeKey("task", 0, None))
            before = run.check(task.check.to_call())
            run.call(task.calls[0].to_call())
            after = run.check(task.check.to_call())
            run.close()
            assert before is not None
            assert after is not None
            assert json.loads(before.text) == {}
            assert json.loads(after.text) == task.check.result
    finally:
        server.close()


def test_the_table_compares_each_model_with_its_start() -> None:
    start = {"model": "start", "seed": 0, "categories": {"all": {"right": 4, "n": 20}}}
    found = {"right": 12, "n": 20, "difference": [0.4, 0.1, 0.6], "p_value": 0.01}
    table = format_results([start, {"model": "grpo", "seed": 0, "categories": {"all": found}}])
    assert table[2].startswith("| grpo | 0 | 20 | 20.0% | 60.0% |")
    assert table[2].endswith("| +40.0% | +10.0% to +60.0% | 0.01 |")


@pytest.mark.slow
def test_a_toy_run_measures_start_result_and_control_and_repeats_nothing(tmp_path: Path) -> None:
    out, results = tmp_path / "out", tmp_path / "results.json"
    words = ["--out", str(out), "--seeds", "0", "--tasks", "4", "--start-steps", "2", "--results", str(results)]
    words += ["--trial", "toy", "max_steps=1", "grpo.prompts_per_step=1", "grpo.group_size=2"]
    # The start is hardly ever right after two steps.
    words += ["grpo.drop_flat_groups=false", "grpo.max_new_tokens=8"]
    assert main(words) == 0
    found = json.loads(results.read_text())["test"]
    assert [one["model"] for one in found] == ["start", "control-toy", "grpo-toy"]
    assert {one["categories"]["all"]["n"] for one in found} == {4}
    times = {path: path.stat().st_mtime_ns for path in out.rglob("test/*.json*")}
    shutil.rmtree(out / "seed0" / "grpo-toy" / "checkpoints", ignore_errors=True)
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("test/*.json*")} == times
