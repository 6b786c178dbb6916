"""Ids of calls: which call a result answers, and the ids that templates print in place of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fctune.data.conversation import Call, Message


def find_answered(pending: Sequence[Call], call_id: str | None, name: str | None) -> int | None:
    """Return the index of the call that a result answers, by id, else by name, else the oldest; None if there is none.

    Args:
        pending: Calls without a result, in order.
        call_id: Id of the call, if the result has it; without effect if no call has an id.
        name: Name of the tool, if the result has it.
    """
    if call_id is not None and any(call.id is not None for call in pending):
        return next((i for i, call in enumerate(pending) if call.id == call_id), None)
    if name is not None:
        return next((i for i, call in enumerate(pending) if call.name == name), None)
    return 0 if pending else None


def write_names_into_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with ``functions.NAME:N`` as each call's id and in its result; N counts all calls from 0.

    Templates of Kimi K2 print a call's id where others print its name, and expect such ids (``tool_call_guidance.md``
    next to the model). A result that answers no call keeps its id.
    """
    changed: list[Message] = []
    pending: list[tuple[Call, str]] = []
    num_calls = 0
    for message in messages:
        if message.calls:
            ids = [f"functions.{call.name}:{number}" for number, call in enumerate(message.calls, num_calls)]
            num_calls += len(ids)
            pending += zip(message.calls, ids, strict=True)
            calls = tuple(replace(call, id=new) for call, new in zip(message.calls, ids, strict=True))
            message = replace(message, calls=calls)
        elif message.role == "tool":
            index = find_answered([call for call, _ in pending], message.call_id, message.name)
            if index is not None:
                message = replace(message, call_id=pending.pop(index)[1])
        else:
            pending = []
        changed.append(message)
    return tuple(changed)
