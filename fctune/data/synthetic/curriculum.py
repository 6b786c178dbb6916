"""Rows with invented tools: the base model's curriculum, which has no calls, and rows that teach calls.

The curriculum is to read tools and copy values, answered in plain text. The other rows have tools that change from row
to row, so that those of held-out cases are unseen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from fctune.data.augment.spoken import join_words
from fctune.data.conversation import Call, Conversation, Message
from fctune.data.synthetic.invented import InventedTool, draw_arguments, draw_tool, frame_request, word_request
from fctune.data.synthetic.target_requests import frame_target_request
from fctune.data.synthetic.target_tools import load_target_tools
from fctune.data.synthetic.values import MADE_UP_VALUES
from fctune.data.synthetic.variants import VariantTool, draw_variant
from fctune.data.synthetic.words import NOUNS, make_name, make_word, pick_word

_STYLES = {
    "json": ("", "", "Answer with the tool and its values as JSON.", "Name the tool, then JSON."),
    "prose": ("Answer in one sentence.", "Say it in words.", "Reply in prose."),
    "lines": ("Answer in lines.", "One value a line.", "List the values."),
}
_UNFIT = "I have no tool for that."
_NONE_FITS = ("None of the tools fits that.", "No tool here can do that.", _UNFIT)
_SMALL_TALK = (
    ("Thanks!", "You are welcome."),
    ("Thank you, that was all.", "You are welcome."),
    ("Hello!", "Hello, how can I help?"),
    ("Hi there.", "Hello, how can I help?"),
    ("Good morning.", "Good morning, how can I help?"),
    ("How are you?", "I am fine, how can I help?"),
    ("Who are you?", "I am an assistant that reads tools."),
    ("Goodbye.", "Goodbye!"),
)
_JOINERS = (" and ", " and also ", ", then ", ". Also ", " and then ", "; ")

Turn = tuple[str, str]
CurriculumTool = InventedTool | VariantTool


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return join_words(value) if isinstance(value, list) else str(value)


def _answer(tool: CurriculumTool, arguments: dict[str, Any], style: str) -> str:
    """Name the fitting tool and its values as plain text."""
    name = tool.tool.name
    if style == "json":
        return f"{name}\n{json.dumps(arguments, ensure_ascii=False)}"
    pairs = [(key.replace("_", " "), _as_text(value)) for key, value in arguments.items()]
    if style == "lines":
        return "\n".join([name, *(f"{key}: {value}" for key, value in pairs)])
    return f"Use {name} with " + join_words([f"{key} {value}" for key, value in pairs]) + "."


def _draw_clause(tool: CurriculumTool, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a clause that asks for the tool, and the expected arguments."""
    if isinstance(tool, VariantTool):
        return tool.request(rng)
    arguments = draw_arguments(tool, rng)
    return word_request(tool, arguments, rng), arguments


def _frame_clause(clause: str, tool: CurriculumTool, rng: random.Random) -> str:
    """Turn the clause into a user's message."""
    if isinstance(tool, VariantTool):
        return str(frame_target_request(clause, "train", rng).content)
    return frame_request(clause, rng)


def _draw_unfit_request(tools: list[CurriculumTool], rng: random.Random) -> str:
    """Draw a request that none of the tools fits."""
    other = draw_variant(rng)
    while any(isinstance(tool, VariantTool) and tool.target is other.target for tool in tools):
        other = draw_variant(rng)
    return _frame_clause(_draw_clause(other, rng)[0], other, rng)


def _request_turn(tools: list[CurriculumTool], style: str, rng: random.Random) -> Turn:
    num_requests = 1 if rng.random() < 0.66 else rng.choice((2, 2, 2, 3))
    clauses, answers = [], []
    same_tool = rng.random() < 0.35
    tool = rng.choice(tools)
    for _ in range(num_requests):
        if not same_tool:
            tool = rng.choice(tools)
        clause, arguments = _draw_clause(tool, rng)
        clauses.append(clause)
        answers.append(_answer(tool, arguments, style))
    return _frame_clause(rng.choice(_JOINERS).join(clauses), tool, rng), "\n".join(answers)


def _unfit_turn(tools: list[CurriculumTool], style: str, rng: random.Random) -> Turn:
    del style
    return rng.choice(_SMALL_TALK) if rng.random() < 0.3 else (_draw_unfit_request(tools, rng), rng.choice(_NONE_FITS))


def _about_turn(tools: list[CurriculumTool], style: str, rng: random.Random) -> Turn:
    """A question about the tools themselves: names, descriptions, needed values, types."""
    del style
    tool = rng.choice(tools)
    function = tool.tool.function
    properties = function["parameters"]["properties"]
    param = rng.choice(list(properties))
    return rng.choice(
        (
            ("Which tools are there?", join_words([one.tool.name for one in tools])),
            (f"What does {tool.tool.name} do?", function["description"]),
            (f"Which tool is this: {function['description']}", tool.tool.name),
            (f"What does {tool.tool.name} need?", join_words(function["parameters"]["required"])),
            (f"What can {tool.tool.name} take?", join_words(list(properties))),
            (f"What type is {param} of {tool.tool.name}?", json.dumps(properties[param])),
        )
    )


def _copy_turn(tools: list[CurriculumTool], style: str, rng: random.Random) -> Turn:
    """Make a request to repeat words verbatim."""
    del tools, style
    draws: tuple[Callable[[], str], ...] = (
        lambda: make_name(rng),
        lambda: make_word(rng),
        lambda: pick_word(rng),
        lambda: str(MADE_UP_VALUES[rng.choice(("date", "time", "code", "amount", "count", "email", "text"))](rng)),
    )
    text = rng.choice((" ", ", ")).join(rng.choice(draws)() for _ in range(rng.randint(2, 6)))
    return rng.choice(("Repeat: {}", "Say {}", "Copy this: {}", "Write {}")).format(text), text


def _record_turn(tools: list[CurriculumTool], style: str, rng: random.Random) -> Turn:
    """Make a record in JSON or words and a question about one or several of its values."""
    del tools, style
    kinds = [kind for kind in MADE_UP_VALUES if kind not in ("flag", "list")]
    keys = rng.sample(NOUNS, rng.randint(2, 4))
    record = {key: MADE_UP_VALUES[rng.choice(kinds)](rng) for key in keys}
    text = json.dumps(record) if rng.random() < 0.5 else join_words([f"{key} {value}" for key, value in record.items()])
    if rng.random() < 0.35:
        requested = {key: record[key] for key in rng.sample(keys, rng.randint(1, len(keys)))}
        return f"{text}\nGive me {join_words(list(requested))} as JSON.", json.dumps(requested)
    key = rng.choice(keys)
    question = rng.choice(("What is the {}?", "Give me the {}.", "Which {}?")).format(key)
    return f"{text}\n{question}", rng.choice(("The {} is {}.",)).format(key, record[key])


def _result_messages(tools: list[CurriculumTool], style: str, rng: random.Random) -> list[Message]:
    """Make a request, the plain answer, the tool's result and a sentence about it."""
    tool = rng.choice(tools)
    clause, arguments = _draw_clause(tool, rng)
    kinds = [kind for kind in MADE_UP_VALUES if kind not in ("flag", "list")]
    record = {key: MADE_UP_VALUES[rng.choice(kinds)](rng) for key in rng.sample(NOUNS, rng.randint(1, 3))}
    sentence = join_words([f"the {key} is {value}" for key, value in record.items()])
    return [
        Message("user", _frame_clause(clause, tool, rng)),
        Message("assistant", _answer(tool, arguments, style)),
        Message("tool", json.dumps(record), name=tool.tool.name),
        Message("assistant", sentence[0].upper() + sentence[1:] + "."),
    ]


_TURNS = (_request_turn, _unfit_turn, _about_turn, _copy_turn, _record_turn)
_WEIGHTS = (0.7, 0.08, 0.04, 0.12, 0.06)


def _draw_tools(rng: random.Random) -> list[CurriculumTool]:
    """Draw up to three tools with different names; most are variants of different target tools."""
    known = load_target_tools()
    targets = rng.sample(known.called if rng.random() < 0.7 else known.all, 3)
    tools: list[CurriculumTool] = []
    for target in targets[: rng.randint(1, 3)]:
        tools.append(draw_variant(rng, target) if rng.random() < 0.85 else draw_tool(rng))
    return list({tool.tool.name: tool for tool in tools}.values())


def draw_conversation(rng: random.Random) -> Conversation:
    """Draw one conversation of the curriculum."""
    style = rng.choices(("json", "prose", "lines"), (0.8, 0.1, 0.1))[0]
    tools = _draw_tools(rng)
    system = rng.choice(_STYLES[style])
    messages = [Message("system", system)] if system else []
    for _ in range(rng.randint(3, 5)):
        if rng.random() < 0.1:
            messages += _result_messages(tools, style, rng)
            continue
        user, assistant = rng.choices(_TURNS, _WEIGHTS)[0](tools, style, rng)
        messages += [Message("user", user), Message("assistant", assistant)]
    return Conversation(tuple(messages), tuple(tool.tool for tool in tools), "synthetic:pretrain")


def iter_curriculum(num_rows: int, seed: int) -> Iterator[Conversation]:
    """Yield independent conversations of the curriculum."""
    rng = random.Random(f"pretrain:{seed}")
    for _ in range(num_rows):
        yield draw_conversation(rng)


_NUM_CALLS, _NUM_CALLS_WEIGHTS = (1, 2, 0), (0.6, 0.2, 0.2)
_SINGLE_SHARE = 0.75  # such a small model is slow to learn to choose between tools that it has never seen


def iter_varied(num_rows: int, seed: int) -> Iterator[Conversation]:
    """Yield conversations of one request, each with a tool of its own, some with two or three; a fifth need no call."""
    rng = random.Random(f"varied:{seed}")
    for row in range(num_rows):
        tools = _draw_tools(rng)
        if rng.random() < _SINGLE_SHARE:
            tools = tools[:1]
        num_calls = rng.choices(_NUM_CALLS, _NUM_CALLS_WEIGHTS)[0]
        if not num_calls:
            messages = (Message("user", _draw_unfit_request(tools, rng)), Message("assistant", _UNFIT))
        else:
            due = [rng.choice(tools) for _ in range(num_calls)]
            clauses, arguments = zip(*[_draw_clause(tool, rng) for tool in due], strict=True)
            calls = tuple(Call(tool.tool.name, values) for tool, values in zip(due, arguments, strict=True))
            user = _frame_clause(rng.choice(_JOINERS).join(clauses), due[-1], rng)
            messages = (Message("user", user), Message("assistant", calls=calls))
        yield Conversation(messages, tuple(tool.tool for tool in tools), f"synthetic:varied:{row}")
