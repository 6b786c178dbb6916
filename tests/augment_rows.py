"""Rows to augment, in the shapes that readers return, and what an augmented row is checked by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fctune.config.sections.data import AugmentConfig
from fctune.data.augment.augmenter import Augmenter, Form, make_augmenter
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.sources import ParsedRow, RowReader, UnreadRow, parse_source

CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito", "Tokyo", "Delhi")
TOPICS = ("weather", "traffic", "museums", "hotels", "concerts", "pollen", "tides", "rents", "parking", "elections")
VERBS = ("Get", "Find", "Compute", "Check")


def make_tool(number: int) -> Tool:
    """Return a tool whose description names a topic of its own, with an identifier and a word as parameters."""
    topic, verb = TOPICS[number % len(TOPICS)], VERBS[number % len(VERBS)]
    subject = f"{topic}{'abcdefghij'[number // 10 % 10] * 3}"
    properties = {
        "city": {"type": "string", "description": f"The city whose {subject} are asked for (e.g., Bonn, Graz, Turin)"},
        "max_days": {"type": "integer", "description": "The largest number of days to look ahead"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    description = f"{verb} {subject} reports of a city. Pass max_days to look ahead."
    return Tool({"name": f"{verb.lower()}_{subject}", "description": description, "parameters": parameters})


def to_parsed(conversation: Conversation) -> ParsedRow:
    """Return a conversation as readers return a row."""
    parsed = RowReader().read(UnreadRow("", 0, conversation))
    assert isinstance(parsed, ParsedRow)
    return parsed


def make_parsed(number: int, offered: Sequence[int] = (), is_answered: bool = True) -> ParsedRow:
    """Return a row whose request calls tool ``number``, with the result and an answer that name the tool."""
    tool, city = make_tool(number), CITIES[number % len(CITIES)]
    call = Call(tool.name, {"city": city, "max_days": 3 + number % 5} if number % 3 == 0 else {"city": city}, "call_1")
    days = f", at most {3 + number % 5} days ahead" if number % 3 == 0 else ""
    messages = [
        Message("system", "Answer briefly."),
        Message("user", f"I would like to see the {tool.name.partition('_')[2]} reports in {city}{days}."),
        Message("assistant", calls=(call,)),
    ]
    if is_answered:
        result = json.dumps(
            {"tool": tool.name, "city": city, "max_days": 3, "note": f"{tool.name} ok, max_days ignored"}
        )
        messages += [
            Message("tool", result, call_id="call_1", name=tool.name),
            Message("assistant", f"Here is what {tool.name} says."),
        ]
    tools = tuple(map(make_tool, sorted({number, *offered})))
    conversation = Conversation(tuple(messages), tools, f"rows.jsonl:{number + 1}")
    return to_parsed(conversation)


def make_rows(count: int = 80) -> list[ParsedRow]:
    """Return rows with one to three tools on offer; every seventh needs no call."""
    rows = []
    for number in range(count):
        parsed = make_parsed(number, [(number + 3) % 97, (number + 7) % 97][: number % 3], number % 2 == 0)
        if number % 7 == 6:
            talk = (Message("user", f"Hello, it is day {number} today."), Message("assistant", "Good morning!"))
            conversation = Conversation(talk, parsed.conversation.tools, parsed.conversation.source)
            parsed = to_parsed(conversation)
        rows.append(parsed)
    return rows


def read_rows(path: str) -> list[ParsedRow]:
    """Return the usable rows of a source."""
    return [row for row in parse_source(path) if isinstance(row, ParsedRow)]


def open_augmenter(rows: Sequence[ParsedRow], **kinds: Any) -> Augmenter:
    """Return an augmenter for rows of one source."""
    return make_augmenter(AugmentConfig(**kinds), (("rows", row) for row in rows))


def expand_all(rows: Sequence[ParsedRow], augmenter: Augmenter) -> Iterator[tuple[ParsedRow, list[Form]]]:
    """Yield each row with its forms."""
    for row in rows:
        yield row, augmenter.expand(row, "rows")
