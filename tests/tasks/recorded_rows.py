"""A conversation with calls and their results."""

from __future__ import annotations

from fctune.data.conversation import Call, Conversation, Message, Tool

TOOL = Tool(
    {
        "name": "find",
        "description": "Find a thing",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    }
)


def make_row(question: str = "Where are my keys and my hat?") -> Conversation:
    calls = (Call("find", {"what": "keys"}, "a"), Call("find", {"what": "hat"}, "b"))
    return Conversation(
        (
            Message("user", question),
            Message("assistant", None, calls),
            Message("tool", "in the hall", call_id="a", name="find"),
            Message("tool", "on the sofa", call_id="b", name="find"),
            Message("assistant", "The keys are in the hall, the hat is on the sofa."),
            Message("user", "And my coat?"),
            Message("assistant", None, (Call("find", {"what": "coat"}, "c"),)),
            Message("tool", "at the cleaner's", call_id="c", name="find"),
            Message("assistant", "At the cleaner's."),
        ),
        (TOOL,),
    )
