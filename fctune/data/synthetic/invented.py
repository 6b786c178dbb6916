"""Invented tools of the base's curriculum: random names and schemas, and requests that fit them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from fctune.data.augment.spoken import join_words
from fctune.data.conversation import Tool
from fctune.data.synthetic.target_tools import load_target_tools
from fctune.data.synthetic.values import MADE_UP_VALUES
from fctune.data.synthetic.words import NOUNS, SYNONYMS, VERBS, make_word, pick_word, split_words

_PARAM_NAMES = {
    "place": split_words("city town place region village harbor station location site country street area"),
    "person": split_words(
        "guest client owner author patient student driver contact member teacher person name_of_guest"
    ),
    "email": split_words("email address recipient reply_to send_to mailbox"),
    "date": split_words("date day deadline due_date start_date when"),
    "time": split_words("time hour start_time at"),
    "count": split_words(
        "days nights guests copies pages rooms people minutes hours seats tickets weeks steps quantity"
    ),
    "amount": split_words("price weight height budget distance amount limit size length width cost value"),
    "text": split_words("title label note message subject topic text caption body query"),
    "word": split_words("color material flavor style brand item product dish genre language sport artist"),
    "code": split_words("code order ref ticket serial number tracking"),
    "enum": split_words("mode level unit class priority format size kind category status"),
    "flag": split_words("express gift urgent private indoor paid quiet express secure repeat"),
    "list": split_words("tags items people colors toppings parts goods topics labels members"),
}
_KINDS = tuple(_PARAM_NAMES)
_JSON_TYPES = {"count": "integer", "amount": "number", "flag": "boolean"}

# Wordings of a value; {p} is the parameter's name in words, {v} the value.
_WORDINGS_BY_KIND = {
    "place": ("in {v}", "at {v}", "near {v}", "{p} {v}", "in the {p} of {v}", "around {v}"),
    "person": ("for {v}", "with {v}", "{p} {v}", "{v} as {p}", "by {v}"),
    "email": ("to {v}", "{p} {v}", "at {v}", "via {v}"),
    "date": ("on {v}", "for {v}", "{p} {v}", "{v}", "from {v}", "by {v}"),
    "time": ("at {v}", "{p} {v}", "from {v}", "around {v}"),
    "count": ("{v} {p}", "for {v} {p}", "{p} {v}", "with {v} {p}", "{p} of {v}"),
    "amount": ("{p} {v}", "{p} of {v}", "{v} {p}", "with {p} {v}", "a {p} of {v}"),
    "text": ('"{v}"', '{p} "{v}"', 'saying "{v}"', 'called "{v}"', "called {v}", "{p} {v}", "about {v}"),
    "word": ("{v} {p}", "{p} {v}", "in {v}", "of {v}", "{v}"),
    "code": ("{v}", "number {v}", "{p} {v}", "with {p} {v}"),
    "enum": ("{v} {p}", "{p} {v}", "in {v}", "{v}", "as {v}"),
    "list": ("{p} {v}", "with {v}", "with {p} {v}", "{v} as {p}"),
}
_EXPLICIT_WORDINGS = ("{p} {v}", "{p} is {v}", "set {p} to {v}", "{p} = {v}", "with {p} {v}", "{v} as {p}")
_ROUTES = (("origin", "destination"), ("source", "target"), ("start", "end"), ("departure", "arrival"))
_LEADS = (
    "", "", "", "Please ", "Can you ", "Could you ", "I need to ", "I want to ", "Help me ", "Hi, ", "I would like to ",
    "We have to ", "Hello, please ", "Would you ", "Time to ", "Go and ", "Let us ", "Now ", "Just ",
)  # fmt: skip
_ENDS = (".", ".", "?", "", "!", ", please.", ", thanks.", " for me.", " soon.", " today.")
_REQUESTS = (
    "{f}, {v} {o} {r}",
    "{n} {s}",
    "{n}: {s}",
    "{f} I want to {v} {o} {r}",
    "is there {o} to {v} {s}",
    "what {n} can I {v} {s}",
    "how do I {v} {o} {s}",
    "where can I {v} {o} {s}",
    "let me {v} {o} {s}",
    "I have {s}, {v} {o}",
    "{o} {s}, {v} it",
    "will you {v} {o} {s}",
)
_DETERMINERS = ("a", "the", "my", "one", "this", "some", "an", "our", "")
_DESCRIPTIONS = (
    "{V} a {n}.", "{V} the {n} by {p}.", "{V} a {n} with {p}.", "{V} a {n}", "Use it to {v} a {n}.", "{V} {n}s",
    "{V} one {n} for a user.", "Lets you {v} a {n}.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Param:
    """An argument of an invented tool."""

    name: str
    kind: str
    required: bool
    choices: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The name in words, without underscores."""
        return self.name.replace("_", " ")

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the argument."""
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        if self.kind == "list":
            return {"type": "array", "items": {"type": "string"}}
        return {"type": _JSON_TYPES.get(self.kind, "string")}

    def draw(self, rng: random.Random) -> Any:
        """Draw a value that fits the schema."""
        return rng.choice(self.choices) if self.choices else MADE_UP_VALUES[self.kind](rng)


@dataclass(frozen=True, slots=True)
class InventedTool:
    """A tool with the words that requests for it are made of."""

    tool: Tool
    verb: str
    noun: str
    params: tuple[Param, ...]


def _draw_params(rng: random.Random) -> tuple[Param, ...]:
    params: list[Param] = []
    if rng.random() < 0.15:
        params += [Param(name, "place", True) for name in rng.choice(_ROUTES)]
    num_params = rng.choice((1, 1, 2, 2, 2, 3, 3, 4))
    while len(params) < num_params:
        kind = rng.choice(_KINDS)
        named_by_kind = rng.random() < 0.75
        name = rng.choice(_PARAM_NAMES[kind]) if named_by_kind else rng.choice((make_word(rng), rng.choice(NOUNS)))
        if any(name == param.name for param in params):
            continue
        choices: tuple[str, ...] = ()
        if kind == "enum":
            choices = tuple(dict.fromkeys(pick_word(rng) for _ in range(rng.randint(2, 4))))
        params.append(Param(name, kind, rng.random() < 0.65, choices))
    if not any(param.required for param in params):
        params[0] = Param(params[0].name, params[0].kind, True, params[0].choices)
    return tuple(params)


def draw_tool(rng: random.Random) -> InventedTool:
    """Draw a tool that shares neither its name nor its set of property names with a target tool."""
    targets = load_target_tools()
    while True:
        verb = rng.choice(VERBS) if rng.random() < 0.85 else make_word(rng)
        noun = rng.choice(NOUNS) if rng.random() < 0.75 else make_word(rng)
        if rng.random() < 0.15:
            noun = f"{pick_word(rng)} {noun}"
        draw = rng.random()
        stem = noun.replace(" ", "_")
        name = f"{verb}_{stem}" if draw < 0.8 else f"{stem}_{verb}" if draw < 0.9 else make_word(rng, 2, 3)
        params = _draw_params(rng)
        if name not in targets.names and frozenset(param.name for param in params) not in targets.property_sets:
            break
    description = rng.choice(_DESCRIPTIONS).format(V=verb.capitalize(), v=verb, n=noun, p=params[0].words)
    function = {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {param.name: param.schema() for param in params},
            "required": [param.name for param in params if param.required],
        },
    }
    return InventedTool(Tool(function), verb, noun, params)


def _word_value(param: Param, value: Any, is_only: bool, rng: random.Random) -> str:
    if param.kind == "flag":
        ways = ("{p}", "with {p}", "make it {p}", "{p} please") if value else ("no {p}", "without {p}", "not {p}")
        return rng.choice(ways).format(p=param.words)
    spoken = join_words(value) if isinstance(value, list) else str(value)
    wordings = _WORDINGS_BY_KIND[param.kind] if is_only and rng.random() < 0.8 else _EXPLICIT_WORDINGS
    return rng.choice(wordings).format(p=param.words, v=spoken)


def draw_arguments(tool: InventedTool, rng: random.Random) -> dict[str, Any]:
    """Draw arguments in the order of the tool's schema, optional ones half of the time."""
    return {param.name: param.draw(rng) for param in tool.params if param.required or rng.random() < 0.5}


def word_request(tool: InventedTool, arguments: dict[str, Any], rng: random.Random) -> str:
    """Draw a clause that asks for the tool with these arguments, in random order."""
    kinds = [param.kind for param in tool.params]
    slots: list[str] = []
    route = [param for param in tool.params if any(param.name in pair for pair in _ROUTES)]
    if len(route) == 2:
        origin, destination = (arguments[param.name] for param in route)
        slots.append(
            rng.choice(
                (f"from {origin} to {destination}", f"to {destination} from {origin}", f"{origin} to {destination}")
            )
        )
    for param in tool.params:
        if param.name in arguments and not (len(route) == 2 and param in route):
            slots.append(_word_value(param, arguments[param.name], kinds.count(param.kind) == 1, rng))
    rng.shuffle(slots)
    verb = rng.choice(SYNONYMS.get(tool.verb, (tool.verb,)))
    object_ = f"{rng.choice(_DETERMINERS)} {tool.noun}".strip()
    spoken = (", " if rng.random() < 0.25 else " ").join(slots)
    if rng.random() < 0.6:
        return f"{verb} {object_} {spoken}".strip()
    first, rest = (slots[0], " ".join(slots[1:])) if slots else ("now", "")
    return " ".join(rng.choice(_REQUESTS).format(v=verb, o=object_, n=tool.noun, f=first, r=rest, s=spoken).split())


def frame_request(clause: str, rng: random.Random) -> str:
    """Turn the clause into a sentence with a lead and an ending."""
    sentence = rng.choice(_LEADS) + clause
    return sentence[0].upper() + sentence[1:] + rng.choice(_ENDS)
