"""Defects of answers: each is counted in every call format, and none in an answer that is merely wrong."""

from __future__ import annotations

import pytest

from fctune.calls.formats.registry import FORMATS
from fctune.calls.reasoning.base import Reasoning
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.engines.engine import Answer
from fctune.tasks.episode import Episode
from fctune.tasks.judge import judge_episode
from fctune.tasks.task import Case

TOOL = Tool(
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    }
)
CALL = Call("get_weather", {"city": "Paris", "days": 3})


def find(answer: Answer, name: str | None = "hermes") -> list[str]:
    """Return the defects in the row of an answer."""
    episode = Episode(Case("1", "call", Conversation((Message("user", "Weather?"),), (TOOL,)), (CALL,)))
    episode.start()
    episode.add_answer(answer, None if name is None else FORMATS[name], "lenient")
    defects: list[str] = judge_episode(episode).to_row()["defects"]
    return defects


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_breaks_off_is_abandoned_in_every_format(name: str) -> None:
    text = FORMATS[name].render([CALL], [TOOL])
    assert find(Answer(0, text), name) == []
    cut = text[: text.index("Paris") + 3]
    assert find(Answer(0, cut), name) == ["abandoned", "malformed"]
    assert "abandoned" not in find(Answer(0, cut, is_cut=True), name), "the limit ended it, not the model"
    broken = text.replace("Paris", '"Paris').replace("3", "3 3")
    assert "abandoned" not in find(Answer(0, broken), name), "a complete call, if a wrong one"


@pytest.mark.parametrize(
    ("answer", "defects"),
    [
        (Answer(0, "It rains."), []),
        (Answer(0, ""), ["abandoned"]),
        (Answer(0, "<think>Hm.</think>", reasoning=Reasoning("Hm.", True, ((0, 18),))), ["abandoned"]),
        (Answer(0, "<think>Hm.", reasoning=Reasoning("Hm.", False, ((0, 10),))), ["abandoned"]),
        (Answer(0, "<think>Hm.", is_cut=True, reasoning=Reasoning("Hm.", False, ((0, 10),))), []),
        (Answer(0, "<think>Hm.</think>Yes.", reasoning=Reasoning("Hm.", True, ((0, 18),))), []),
        (Answer(0, FORMATS["hermes"].render([Call("get_rain", {})])), ["invented_tool"]),
        (Answer(0, FORMATS["hermes"].render([Call("get_weather", {"city": "x", "hour": 1})])), ["invented_argument"]),
        (Answer(0, FORMATS["hermes"].render([Call("get_weather", {"days": "three"})])), []),
    ],
)
def test_each_defect_is_its_own(answer: Answer, defects: list[str]) -> None:
    assert find(answer) == defects


def test_an_empty_answer_of_a_server_is_abandoned_and_its_calls_are_checked() -> None:
    assert find(Answer(0, "", tool_calls=()), None) == ["abandoned"]
    sent = {"function": {"name": "get_rain", "arguments": "{}"}}
    assert find(Answer(0, "", tool_calls=(sent,)), None) == ["invented_tool"]
    assert find(Answer(0, "", tool_calls=({"function": {"name": "get_weather", "arguments": "{"}},)), None) == [
        "malformed"
    ]
