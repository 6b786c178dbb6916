"""The chat that a tune offers at its end has tools, a system prompt and a question that the result was made for."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.tune.rows import RowSurvey
from fctune.apps.tune.trial import describe_trial, render_tools
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.sources.tool_file import read_tool_files

LONG = "You are 'it'.\n" + "Be kind. " * 20


def make_case(number: int, system: str, *, num_turns: int = 1) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": f"t{number}", "parameters": {"type": "object", "properties": {}}}}
    turns = [{"role": "user", "content": f"Question {number}"}]
    turns += [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on"}] * (num_turns - 1)
    messages = [*([{"role": "system", "content": system}] if system else []), *turns]
    calls = [{"name": f"t{number}", "arguments": {"n": number}}]
    return {"id": str(number), "tools": [tool], "messages": messages, "expected_calls": calls}


def describe(folder: Path, cases: Sequence[dict[str, Any]], num_tools: int) -> list[str]:
    path = folder / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    tools = [Tool({"name": f"t{number}", "parameters": {}}) for number in range(num_tools)]
    (folder / "tools.json").write_text(render_tools(tools))

    def write(name: str, text: str) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return describe_trial(folder, folder / "run", path, num_tools, 3, write)


def test_the_survey_counts_requests_once_and_keeps_the_first_tool_of_a_name() -> None:
    survey = RowSurvey()
    call = Message("assistant", None, (Call("t", {}),))
    for text, answer, about in [("a", call, "x"), ("a ", call, "y"), ("b", Message("assistant", "No."), "x")]:
        tools = (Tool({"name": "t", "description": about}), Tool({"name": "other"}))
        survey.add(Conversation((Message("user", text), answer), tools))
    survey.add(Conversation((Message("user", "c"), Message("assistant", "No.")), ()))
    assert (len(survey.requests.found), len(survey.requests.no_call), survey.most_offered) == (2, 1, 2)
    assert survey.variants == {"t"}
    assert [tool.function.get("description") for tool in survey.tools.values()] == ["x", None]


def test_the_question_has_the_system_prompt_that_most_have_and_one_turn(tmp_path: Path) -> None:
    cases = [make_case(1, "Rare."), make_case(2, "It's usual.", num_turns=2), *(make_case(i, "Usual.") for i in (3, 4))]
    command, ask, answer = describe(tmp_path, cases, 5)
    words = ["fctune", "chat", str(tmp_path / "run"), "--tools", str(tmp_path / "tools.json"), "--system", "Usual."]
    assert shlex.split(command) == words
    assert ask.endswith("for example: Question 3")
    assert answer.endswith('t3({"n": 3})')


def test_a_long_system_prompt_is_passed_in_a_file(tmp_path: Path) -> None:
    command, *_ = describe(tmp_path, [make_case(1, LONG)], 5)
    assert "\n" not in command
    printed = command.replace("fctune chat", "printf %s\\\\0", 1)
    words = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True).stdout.split("\0")
    assert words[-2] == LONG


@pytest.mark.parametrize("num_tools", [16, 17])
def test_a_chat_with_more_tools_than_rows_have_offers_those_of_the_question(num_tools: int, tmp_path: Path) -> None:
    command, *_ = describe(tmp_path, [make_case(1, "")], num_tools)
    assert "--system" not in command
    (path,) = shlex.split(command)[4:]
    assert len(read_tool_files([Path(path)])) == (16 if num_tools == 16 else 1)


def test_without_a_question_there_is_a_chat_all_the_same(tmp_path: Path) -> None:
    (command,) = describe(tmp_path, [make_case(1, "", num_turns=2)], 5)
    assert "--tools" in command
    (tmp_path / "tools.json").unlink()
    assert describe_trial(tmp_path, tmp_path / "run", tmp_path / "absent", 0, 0, lambda name, text: tmp_path) == [
        f"fctune chat {tmp_path / 'run'}"
    ]
