"""Defects of answers: each is counted in every call format, and none in an answer that is merely wrong."""

from __future__ import annotations

import pytest

from fctune.calls.formats.registry import FORMATS
from fctune.calls.reasoning.base import Reasoning
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.engines.engine import Answer
from fctune.tasks.episode import Episode
from fctune.tasks.judge import is_valid, judge_episode
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


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_a_server_left_in_the_text_is_malformed_in_every_format(name: str) -> None:
    text = FORMATS[name].render([CALL], [TOOL])
    if name == "smollm3_code":  # its mark is HTML's
        assert find(Answer(0, text), None) == []
        return
    cut = text[: text.index("Paris") + 3]
    assert find(Answer(0, text), None) == ["malformed"], "clients get no call"
    assert find(Answer(0, cut), None) == ["abandoned", "malformed"]
    assert find(Answer(0, cut, is_cut=True), None) == ["malformed"], "the limit ended it, not the model"
    sent = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    assert find(Answer(0, text, tool_calls=(sent,)), None) == [], "the server read it as well"


def test_an_answer_without_a_call_is_wrong_if_a_server_left_one_in_its_text() -> None:
    for text, is_right in (("No tool does that.", True), ('Well. <tool_call>\n{"name": "f", "arguments": {', False)):
        episode = Episode(Case("1", "no_call", Conversation((Message("user", "Hello"),), (TOOL,)), ()))
        episode.start()
        step = episode.add_answer(Answer(0, text, tool_calls=()), None, "lenient")
        assert is_valid(judge_episode(episode).to_row()) == is_right
        assert step.content == text, "the conversation goes on with what clients have"


@pytest.mark.parametrize(
    "text",
    [
        "It rains.",
        "Use <code>get_weather(city='Paris')</code> for that.",
        "[Paris](https://example.org) and {braces} [TODO]",
        '{"city": "Paris", "rain": true}',
        "I would call get_weather(city='Paris').",
        "<think>Shall I write <tool_call>?</think>No.",
    ],
)
def test_prose_of_a_server_is_no_call(text: str) -> None:
    reasoning = (
        Reasoning(
            "Shall I write <tool_call>?",
            True,
            (
                (
                    0,
                    text.index("No."),
                ),
            ),
        )
        if "<think>" in text
        else None
    )
    assert find(Answer(0, text, tool_calls=(), reasoning=reasoning), None) == []
