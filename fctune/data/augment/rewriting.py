"""Tools rewritten so that calls mean the same: meaningless names, and schemas in another order and spelling."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fctune.data.augment.spoken import list_properties, split_words
from fctune.data.conversation import Call, Message, Tool

# Keywords of an object's schema that either hold no names of parameters, or whose names are rewritten.
_KNOWN_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "description", "title", "$schema", "default", "examples")
)
_IDENTIFIER = re.compile(r"[a-z0-9][A-Z]|[_.\d-]|[A-Z]{2}")
_QUOTED = re.compile(r"[`'\"](\w+)(?=[`'\"])")
_MIN_DESCRIPTION_WORDS = 2
_MASK_STYLES: tuple[tuple[str, str], ...] = (
    ("{letters}_{digits}", "{letters}_{digits}"),
    ("func_{digits}", "arg_{digits}"),
    ("tool_{mixed}", "p_{mixed}"),
    ("{letters}{digits}", "{letters}{digits}"),
    ("f{digits}_{letters}", "param_{digits}"),
    ("api_{mixed}", "field_{mixed}"),
)


@dataclass(frozen=True, slots=True)
class NameMask:
    """New names of a row's tools, and of parameters, which have the same new name in each of the tools."""

    tools: Mapping[str, str]
    parameters: Mapping[str, str]

    def apply_to_tool(self, tool: Tool) -> Tool:
        """Return the tool with its new name, its parameters' new names, and these names in its texts."""
        function = {key: self._rewrite_texts(value) for key, value in tool.function.items()}
        function["name"] = self.tools.get(tool.name, tool.name)
        if isinstance(parameters := function.get("parameters"), dict):
            parameters = dict(parameters)
            if isinstance(properties := parameters.get("properties"), dict):
                parameters["properties"] = {
                    self.parameters.get(name, name): _drop_title(schema) if name in self.parameters else schema
                    for name, schema in properties.items()
                }
            if isinstance(required := parameters.get("required"), list):
                parameters["required"] = [
                    self.parameters.get(one, one) if isinstance(one, str) else one for one in required
                ]
            function["parameters"] = _drop_title(parameters) if tool.name in self.tools else parameters
        return Tool(function)

    def apply_to_message(self, message: Message) -> Message:
        """Return the message with the new names in its calls, and in the texts of all but the user."""
        calls = tuple(self._rewrite_call(call) for call in message.calls)
        renamed = replace(
            message,
            calls=calls,
            call_id=self._rewrite_id(message.call_id),
            name=self.tools.get(name, name) if (name := message.name) and message.role == "tool" else message.name,
            reasoning=self._rewrite_text(message.reasoning) if message.reasoning else message.reasoning,
        )
        if message.role == "user" or not message.content:
            return renamed
        content = self._rewrite_text(message.content)
        return replace(renamed, content=self._rewrite_parameters(content) if message.role == "tool" else content)

    def _rewrite_call(self, call: Call) -> Call:
        arguments = {self.parameters.get(name, name): value for name, value in call.arguments.items()}
        return Call(self.tools.get(call.name, call.name), arguments, self._rewrite_id(call.id))

    def _rewrite_id(self, call_id: str | None) -> str | None:
        """Return a call's id without the old name, which some services write into it."""
        for old, new in self.tools.items():
            if call_id is not None and old in call_id:
                return call_id.replace(old, new)
        return call_id

    def _rewrite_texts(self, value: Any) -> Any:
        """Rewrite the texts of a tool's JSON, but no keys, and no values that calls may hold."""
        if isinstance(value, str):
            return self._rewrite_parameters(self._rewrite_text(value))
        if isinstance(value, list):
            return [self._rewrite_texts(item) for item in value]
        if isinstance(value, dict):
            fixed = ("enum", "const", "default", "examples", "required", "type", "pattern", "format", "$ref")
            return {key: item if key in fixed else self._rewrite_texts(item) for key, item in value.items()}
        return value

    def _rewrite_text(self, text: str) -> str:
        for old, new in self.tools.items():
            if old in text:
                text = _match_name(old).sub(functools.partial(_replace_within, old, new), text)
        return text

    def _rewrite_parameters(self, text: str) -> str:
        """Rewrite names of parameters that are no words, other than the keys of a JSON result."""
        for old, new in self.parameters.items():
            if old in text and _is_identifier(old):
                text = re.sub(rf"(?<![\w.-]){re.escape(old)}(?![\w-]|\"\s*:)", new, text)
        return text


def _replace_within(old: str, new: str, found: re.Match[str]) -> str:
    return found[0].replace(old, new)


def _drop_title(schema: Any) -> Any:
    """Return a schema without its title, which says the old name where pydantic writes it."""
    return {key: value for key, value in schema.items() if key != "title"} if isinstance(schema, dict) else schema


def draw_mask(tools: Sequence[Tool], messages: Iterable[Message], rng: random.Random) -> NameMask | None:
    """Draw new names for the tools and parameters whose descriptions say enough; None if no tool has one.

    A name is kept if the user says it as a name, if a value or a schema's enum holds it, or if two tools have the same
    description. A parameter's name is also kept if an answer or the system prompt spells it, if a tool's text quotes
    it as a word, or if it is elsewhere in a tool: in a nested schema, an example or a default.
    """
    messages = tuple(messages)
    asked = "\n".join(message.content or "" for message in messages if message.role == "user")
    values = list(_iter_values([call.arguments for message in messages for call in message.calls]))
    values += [value for tool in tools for value in _iter_fixed(tool.parameters)]
    held = "\n".join(map(json.dumps, values))
    everything = "\n".join([asked, held, *(m.content or "" for m in messages), *(tool.to_json() for tool in tools)])
    letters_of, digits_of = (rng.randint(3, 6), rng.randint(2, 4))
    tool_style, parameter_style = rng.choice(_MASK_STYLES)
    taken: set[str] = set()

    def draw(style: str) -> str:
        for attempt in itertools.count():
            longer = attempt // 10  # many tools may use up all short names
            name = style.format(
                letters="".join(rng.choices("bcdfghjklmnpqrstvwxz", k=letters_of + longer)),
                digits="".join(rng.choices(string.digits, k=digits_of + longer)),
                mixed="".join(rng.choices("bcdfghjkmnpqrstvwxz23456789", k=letters_of + longer)),
            )
            if name not in taken and name not in everything:
                taken.add(name)
                return name
        raise AssertionError("unreachable")

    descriptions = [_read_words(tool.function.get("description")) for tool in tools]
    names = [tool.name for tool in tools]
    masked_tools = {
        name: draw(tool_style)
        for name, words in zip(names, descriptions, strict=True)
        if len(words) >= _MIN_DESCRIPTION_WORDS
        and descriptions.count(words) == 1
        and not _is_said(name, asked)
        and not _holds_name(name, held)
    }
    if not masked_tools:
        return None
    spoken = [text for m in messages if m.role != "tool" for text in (m.content, m.reasoning) if text]
    spoken_or_held = "\n".join([*spoken, held])
    nested = {name for tool in tools for schema in list_properties(tool).values() for name in _iter_nested(schema)}
    nested |= {name for tool in tools for name in _iter_other_names(tool)}
    quoted = {name for tool in tools for text in _iter_values(tool.function) for name in _QUOTED.findall(text)}
    masked_parameters: dict[str, str] = {}
    for name in dict.fromkeys(name for tool in tools for name in list_properties(tool)):
        owners = [tool for tool in tools if name in (tool.parameters.get("properties") or {})]
        if (
            all(_can_rename(tool, name) for tool in owners)
            and name not in nested
            and name not in names
            and (_is_identifier(name) or name not in quoted)
            and not _is_said(name, asked)
            and not (_is_identifier(name) and _holds_name(name, spoken_or_held))
            and not any(name in call.arguments for m in messages for call in m.calls if call.name not in _names(owners))
        ):
            masked_parameters[name] = draw(parameter_style)
    return NameMask(masked_tools, masked_parameters)


def paraphrase_schema(tool: Tool, rng: random.Random, has_titles: bool) -> Tool:
    """Return a tool whose schema allows the same calls, with its keys and parameters in another order.

    Keys that change nothing are added or left out: an empty ``required``, and titles.

    Args:
        tool: The tool.
        rng: Random generator.
        has_titles: Give parameters without a title their name as words, as pydantic does.
    """
    function = _shuffle_keys(tool.function, rng)
    parameters = function.get("parameters")
    if not isinstance(parameters, dict):
        return Tool(function)
    parameters = _shuffle_schema(parameters, rng)
    properties = parameters.get("properties")
    if isinstance(properties, dict) and set(parameters) <= _KNOWN_KEYS:
        if not parameters.get("required"):
            parameters.pop("required", None)
            parameters |= {"required": []} if rng.random() < 0.5 else {}
        if has_titles:
            parameters["properties"] = {
                name: {**schema, "title": " ".join(split_words(name)).title()}
                if isinstance(schema, dict) and "title" not in schema and split_words(name)
                else schema
                for name, schema in properties.items()
            }
    return Tool({**function, "parameters": parameters})


def order_arguments(call: Call, before: Tool, after: Tool) -> Call:
    """Return a call with its arguments in the order of the new schema, if they were in that of the old one."""
    old, new = (list(list_properties(tool)) for tool in (before, after))
    known = [name for name in call.arguments if name in old]
    if not set(call.arguments) <= {*old} & {*new} or known != [name for name in old if name in call.arguments]:
        return call
    return replace(call, arguments={name: call.arguments[name] for name in new if name in call.arguments})


def shuffle_tools(tools: Sequence[Tool], rng: random.Random) -> tuple[Tool, ...]:
    """Return two or more tools in another order."""
    order = list(range(len(tools)))
    rng.shuffle(order)
    if order == sorted(order):
        order = [*order[1:], order[0]]
    return tuple(tools[index] for index in order)


def _shuffle_keys(mapping: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    keys = list(mapping)
    rng.shuffle(keys)
    return {key: mapping[key] for key in keys}


def _shuffle_schema(schema: Any, rng: random.Random) -> Any:
    if not isinstance(schema, dict):
        return schema
    shuffled = _shuffle_keys(schema, rng)
    for key, value in shuffled.items():
        if key == "properties" and isinstance(value, dict):
            shuffled[key] = {name: _shuffle_schema(one, rng) for name, one in _shuffle_keys(value, rng).items()}
        elif key == "required" and isinstance(value, list):
            shuffled[key] = rng.sample(value, len(value))
        elif key == "items":
            shuffled[key] = _shuffle_schema(value, rng)
    return shuffled


def _can_rename(tool: Tool, name: str) -> bool:
    """Return True if a parameter's description says enough, and its name is nowhere else in the schema."""
    schema = tool.parameters.get("properties", {}).get(name)
    words = _read_words(schema.get("description")) if isinstance(schema, dict) else []
    return len(words) >= _MIN_DESCRIPTION_WORDS and _KNOWN_KEYS.issuperset(tool.parameters)


def _names(tools: Iterable[Tool]) -> set[str]:
    return {tool.name for tool in tools}


def _read_words(description: Any) -> list[str]:
    return split_words(description) if isinstance(description, str) else []


def _is_identifier(name: str) -> bool:
    """Return True for a name that is no ordinary word: get_weather, getWeather, IBAN2."""
    return _IDENTIFIER.search(name) is not None


def _match_name(name: str) -> re.Pattern[str]:
    """Return a pattern of a name in a text: any identifier, but a word only in quotes or as a call."""
    exact = re.escape(name)
    if _is_identifier(name):
        return re.compile(rf"(?<![\w-]){exact}(?![\w-])")
    return re.compile(rf"([`'\"]){exact}(?=[`'\"])|(?<![\w-]){exact}(?=\()")


def _holds_name(name: str, text: str) -> bool:
    # Few names are in a text, and compiling a pattern takes a hundred times as long as looking for one.
    return name in text and _match_name(name).search(text) is not None


def _is_said(name: str, text: str) -> bool:
    """Return True if a user's text has a name as a name, rather than as a word."""
    if name.lower() not in text.lower():
        return False
    if _holds_name(name, text):
        return True
    exact, noun = re.escape(name), "function|tool|api|method|endpoint|parameter|argument|field|option"
    before, after = (
        rf"\b(?:{noun})s?\s+(?:named\s+|called\s+)?{exact}\b",
        rf"(?<![\w-]){exact}(?:\s*[=(]|\s+(?:{noun})\b)",
    )
    return re.search(f"{before}|{after}", text, re.IGNORECASE) is not None


def _iter_values(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _iter_values(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iter_values(item)


def _iter_fixed(schema: Any) -> Iterator[str]:
    """Yield the texts that a schema fixes for values."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("enum", "const", "default", "examples"):
                yield from _iter_values(value)
            else:
                yield from _iter_fixed(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _iter_fixed(item)


def _iter_other_names(tool: Tool) -> Iterator[str]:
    """Yield the keys and texts of a tool outside of the schemas and descriptions of its parameters."""
    parameters = [value for key, value in tool.parameters.items() if key in ("default", "examples")]
    known = ("name", "description", "parameters")
    for value in (*parameters, *(value for key, value in tool.function.items() if key not in known)):
        yield from _iter_values(value)
        yield from _iter_keys(value)


def _iter_keys(value: Any) -> Iterator[str]:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _iter_keys(item)
    if isinstance(value, dict):
        yield from value


def _iter_nested(schema: Any) -> Iterator[str]:
    """Yield the names of properties anywhere in a parameter's schema."""
    if isinstance(schema, dict):
        if isinstance(properties := schema.get("properties"), dict):
            yield from properties
        for value in schema.values():
            yield from _iter_nested(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _iter_nested(item)
