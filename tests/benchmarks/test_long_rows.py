"""The page of long rows shows what was measured, for every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.long_rows import PAGE, RESULT, format_page, read_traces
from tests.augment_rows import read_rows
from tests.models.dense_samples import FAMILIES


@pytest.mark.thorough
def test_the_page_is_that_of_the_result_and_has_every_family() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == format_page(result), "run python -m benchmarks.long_rows page"
    assert result["parity"].keys() == FAMILIES.keys()
    assert all(difference <= 1e-11 for cells in result["parity"].values() for difference in cells.values())


TOOL = """
class Cancel(Tool):
    @staticmethod
    def get_info():
        return {"type": "function", "function": {"name": "cancel", "description": "Cancel it.",
                "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}}}
"""


def test_traces_are_read_with_the_tools_of_their_environment(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    tools, traces = tmp_path / "tau_bench/envs/airline/tools", tmp_path / "historical_trajectories"
    for folder in (tools, traces):
        folder.mkdir(parents=True)
    (tools / "__init__.py").write_text("raise ImportError\n")
    (tools / "cancel.py").write_text(TOOL)
    call = {"id": "call_1", "type": "function", "function": {"name": "cancel", "arguments": '{"id": "A"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Cancel A."},
        {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None},
        {"role": "tool", "tool_call_id": "call_1", "name": "cancel", "content": "done"},
        {"role": "assistant", "content": "It is cancelled.", "tool_calls": None},
    ]
    (traces / "gpt-4o-airline.json").write_text(json.dumps([{"task_id": 0, "reward": 1.0, "traj": messages}]))
    rows = write_rows(list(read_traces(tmp_path)))
    (parsed,) = read_rows(str(rows))
    assert [message.role for message in parsed.conversation.messages] == [message["role"] for message in messages]
    assert [tool.name for tool in parsed.conversation.tools] == ["cancel"]
