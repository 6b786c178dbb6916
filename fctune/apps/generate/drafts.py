"""Requests that are drafted here, for teachers that call tools better than they write requests to them.

A draft says what its calls do, in the words of the tools' descriptions, and states each value, so its calls are known.
The teacher lists values that the schemas do not give, and rewords drafts; a rewording that loses a value is not used.
"""

from __future__ import annotations

import datetime
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fctune.apps.generate.plan import RowPlan
from fctune.apps.generate.prompts import Turn
from fctune.apps.generate.values import describe_properties, draw_arguments, draw_value, is_valid
from fctune.data.augment.spoken import list_properties, list_required, match_value, say_name, say_value, split_words
from fctune.data.augment.wordings import (
    MAX_WORDS,
    describe_ability,
    first_sentence,
    lower_first,
    upper_first,
    word_reply,
)
from fctune.data.conversation import Call, Tool

_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_UNITS = {
    "m": "m", "cm": "cm", "mm": "mm", "km": "km", "kg": "kg", "g": "g", "t": "t", "l": "l", "s": "s", "min": "min",
    "h": "h", "hours": "hours", "minutes": "minutes", "days": "days", "litres": "litres", "eur": "EUR", "usd": "USD",
    "percent": "%",
}  # fmt: skip
# {do} is a phrase such as "get the weather of a city", {values} an enumeration such as "city Paris, days 3".
_SENTENCES = (
    "{Do}: {values}.",
    "Please {do}: {values}.",
    "Can you {do}? {Values}.",
    "Could you {do} for me, {values}?",
    "I need you to {do}, {values}.",
    "I'd like to {do} ({values}).",
    "{Values}. Please {do}.",
    "{Values}: {do}, please.",
    "{do}, {values}",
    "I want to {do}. {Values}.",
    "Hi, can you {do}: {values}? Thanks.",
)
_WITHOUT_VALUES = ("{Do}.", "Please {do}.", "Can you {do}?", "I need you to {do}.", "I'd like to {do}, please.")
_TOPICS = ("{Topic}: {values}.", "I need this, {topic}: {values}.", "About {topic}: {values}, please.")
_JOINERS = (" Also, ", " And ", " Then, ", " And one more thing: ", " At the same time, ", "\n", " Apart from that, ")
_LISTS = (
    "{sentence} The same for {others}.",
    "{sentence} And also {others}.",
    "{sentence} Do it for {others} as well.",
)
_CHANGES = (
    "And the same with {value}?",
    "Now the same for {value}, please.",
    "What about {value}?",
    "Again, but with {value}.",
    "Sorry, one more: {value}, the rest as before.",
)
_THANKS = (
    "Thanks!",
    "Thank you, that's all.",
    "Great, thanks.",
    "Perfect, that helps.",
    "ok thx",
    "Good, that was it.",
)
# {value} names what is taken from the result of the first call.
_FOLLOW_UPS = (
    "{first} Then {do} with the {value} that you find{rest}.",
    "{first} With the {value} from that, {do}{rest}.",
    "{first} After that, {do}{rest}; take the {value} from the result.",
    "{first} Once you have its {value}, {do} for it{rest}.",
)
_GREETINGS = (
    "hi,", "hello there,", "Good morning!", "hey,", "Good evening!", "Hello again,", "Good afternoon,", "Hi everyone,",
)  # fmt: skip
_REMARKS = (
    "who are you?", "what can you do for me?", "are you a person or a machine?", "do you work at weekends?",
    "I've had a long day.", "I'm just testing.", "you were very helpful yesterday.", "that was quick last time.",
    "I'm new here.", "can I ask you something later?", "I'm on the phone, one moment.", "I'll come back to you later.",
    "is this thing on?", "how do you like your job?", "my colleague told me to write to you.", "let me think first.",
    "which languages do you speak?", "do you remember what I asked last week?", "nice to meet you.",
    "wrong chat, sorry.", "how are you doing?", "do you ever sleep?", "what a grey day it is.",
    "it's my first week at work.", "I only wanted to see if anybody answers.", "you answer faster than my boss.",
)  # fmt: skip
_ENDINGS = (
    "I'm in no hurry.", "Thanks for your help!", "Have a nice day.", "See you tomorrow.", "haha", "Never mind, really.",
    "Just curious.", "My coffee is ready.",
)  # fmt: skip
_SHORT_TALK = (
    "hi", "hello there", "Good morning!", "hey, anyone there?", "Thanks for your help!", "thank you so much", "bye",
    "See you tomorrow.", "ok", "Great.", "never mind", "haha", "Hm, let me think.", "No, that's everything.",
)  # fmt: skip
_SHARE_OF_SHORT_TALK = 0.1
MAX_SMALL_TALK = 1_000
"""Most rows of small talk in a run: there are a few more different drafts, and a teacher may reword none of them."""
_SHARE_OF_BARE_VALUES = 0.4
_SHARE_OF_SPOKEN_DATES = 0.5
_SHARE_OF_THANKS = 0.3
_SHARE_OF_COUNTS = 0.7
_SHARE_OF_DESCRIPTIONS = 0.5
_VAGUE = frozenset({"id", "name", "type", "kind", "status", "value", "text"})  # say too little of what they are
_MAX_GROWTH = 3
# A rewording that nobody checks keeps most of the draft's words, and adds few.
_MIN_KEPT_WORDS = 0.6
_MAX_NEW_WORDS = 6
_STEM = 5
_FIRST_WITHOUT_SPACES = "\u0e00"  # Thai, and in Unicode's order what follows: Lao, Chinese, Japanese, Korean
_MAX_DRAWS = 8


@dataclass(frozen=True, slots=True)
class Draft:
    """A message of the user, what it must state however it is worded, and the calls that answer it.

    Attributes:
        text: The message.
        stated: Values as the message says them.
        steps: The calls, step by step.
    """

    text: str
    stated: tuple[str, ...]
    steps: tuple[tuple[Call, ...], ...]

    def to_turn(self, rewording: str | None = None) -> Turn:
        """Return the turn, in another wording if there is one."""
        return Turn(rewording or self.text, self.steps, knows_all=True)

    def is_reworded_by(self, text: str, tools: Sequence[Tool], is_checked: bool) -> bool:
        """Return True if a text states all values, names no tool or parameter, and is not much longer.

        Unless its calls are checked by answers to it, it also has most of the draft's words, and few others.
        """
        said = _fold(text)
        if (
            not all(_is_said(_fold(value), said) for value in self.stated)
            or len(text) > _MAX_GROWTH * len(self.text) + 80
        ):
            return False
        if not is_checked:
            before, after = _list_stems(self.text), _list_stems(text)
            if len(before & after) < _MIN_KEPT_WORDS * len(before) or len(after - before) > _MAX_NEW_WORDS:
                return False
        names = {name for tool in tools for name in (tool.name, *list_properties(tool)) if not name.isalpha()}
        return bool(said) and not any(re.search(rf"\b{re.escape(name)}\b", text) for name in names - {*self.stated})


class Drafter:
    """Drafts the messages of a plan.

    Args:
        values: Values that the teacher listed, by tool and parameter.
    """

    def __init__(self, values: Mapping[tuple[str, str], Sequence[Any]]):
        self._values = values

    def complete(self, plan: RowPlan) -> tuple[Call, ...] | None:
        """Return the plan's calls with all required arguments; None if a value of one is not known.

        Calls of one tool differ from each other.
        """
        rng = _make_rng(plan, "values")
        tools = _by_name(plan)
        made: list[Call] = []
        for call in plan.calls:
            tool, arguments = tools[call.name], call.arguments
            for _ in range(_MAX_DRAWS):
                full = self._complete(tool, arguments, rng)
                if full is not None and full not in made:
                    made.append(full)
                    break
                arguments = draw_arguments(tool, rng)
        return tuple(made) if len(made) == len(plan.calls) else None

    def draft_small_talk(self, plan: RowPlan) -> Draft:
        """Return a message that needs no call: a few words, or a remark with a greeting, an ending, or both."""
        rng = _make_rng(plan, "talk")
        if rng.random() < _SHARE_OF_SHORT_TALK:
            return Draft(rng.choice(_SHORT_TALK), (), ())
        greeting, remark, ending = rng.choice(("", *_GREETINGS)), rng.choice(_REMARKS), rng.choice(("", *_ENDINGS))
        is_start = not greeting or greeting.endswith("!")
        parts = (greeting, upper_first(remark) if is_start else remark, ending)
        return Draft(" ".join(filter(None, parts)), (), ())

    def draft(self, plan: RowPlan, calls: Sequence[Call]) -> list[Draft]:
        """Return the messages of a row whose calls do not depend on results.

        Args:
            plan: A plan of a kind with calls that depend on no results, or of a tool that is not on offer.
            calls: Its calls, complete.
        """
        rng = _make_rng(plan, "draft")
        tools = _by_name(plan)
        first, said = calls[0], [_say(tools[call.name], call, rng) for call in calls]
        stated = tuple(value for one in said for value in one.stated)
        match plan.kind:
            case "no_tool":
                return [Draft(said[0].sentence, said[0].stated, ())]
            case "repeated_tool" if rng.random() < 0.7:
                others = " and ".join(one.values for one in said[1:])
                text = rng.choice(_LISTS).format(sentence=said[0].sentence, others=others)
                return [Draft(text, stated, (tuple(calls),))]
            case "missing_value":
                name = str(plan.missing)
                lacking = replace(first, arguments={k: v for k, v in first.arguments.items() if k != name})
                opening = _say(tools[first.name], lacking, rng)
                value = _say_value(first.arguments[name], list_properties(tools[first.name]).get(name, {}), rng)
                reply = word_reply(name, value, rng)
                return [
                    Draft(opening.sentence, opening.stated, ()),
                    Draft(reply, (value,), ((first,),)),
                ]
            case "multi_turn":
                return [
                    Draft(said[0].sentence, said[0].stated, ((first,),)),
                    *self._go_on(tools[first.name], first, rng),
                ]
        text = said[0].sentence + "".join(rng.choice(_JOINERS) + one.sentence for one in said[1:])
        return [Draft(text, stated, (tuple(calls),))]

    def draw_call(self, plan: RowPlan, tool: Tool) -> Call | None:
        """Return a complete call of a tool; None if a value that it requires is not known."""
        rng = _make_rng(plan, tool.name)
        return self._complete(tool, draw_arguments(tool, rng), rng)

    def draft_dependent(self, plan: RowPlan, first: Call, result: str) -> Draft | None:
        """Return a message whose second call takes a value from the result of its first; None if no tool does."""
        rng = _make_rng(plan, "dependent")
        found = dict(_iter_scalars(result))
        fitting = [
            (tool, name)
            for tool in plan.tools
            if tool.name != first.name
            for name, schema in list_properties(tool).items()
            if name in found
            and name not in first.arguments
            and name not in _VAGUE
            and is_valid(found[name], schema)
            and name in list_required(tool)
        ]
        rng.shuffle(fitting)
        for tool, name in fitting:
            call = self._complete(tool, {**draw_arguments(tool, rng), name: found[name]}, rng)
            ability = describe_ability(tool)
            if call is None or ability.do is None:
                continue
            rest = _say(tool, replace(call, arguments={k: v for k, v in call.arguments.items() if k != name}), rng)
            opening = _say(_by_name(plan)[first.name], first, rng)
            more = f", {rest.values}" if rest.stated else ""
            text = rng.choice(_FOLLOW_UPS).format(
                first=_end(opening.sentence), do=ability.do, value=say_name(name), rest=more
            )
            return Draft(text, (*opening.stated, *rest.stated), ((first,), (call,)))
        return None

    def _complete(self, tool: Tool, given: Mapping[str, Any], rng: random.Random) -> Call | None:
        arguments = dict(given)
        for name in list_required(tool):
            if name in arguments:
                continue
            if (value := self._choose(tool, name, rng)) is None:
                return None
            arguments[name] = value
        return Call(tool.name, {name: arguments[name] for name in list_properties(tool) if name in arguments})

    def _choose(self, tool: Tool, name: str, rng: random.Random) -> Any:
        """Return a value that the teacher listed, or one that is drawn; None if there is neither, or no schema."""
        if known := self._values.get((tool.name, name)):
            return rng.choice(known)
        if (schema := describe_properties(tool).get(name)) is None:
            return None
        draws = (draw_value(schema, rng, name, is_free=True) for _ in range(_MAX_DRAWS))
        return next((value for value in draws if value is not None), None)

    def _go_on(self, tool: Tool, call: Call, rng: random.Random) -> Iterator[Draft]:
        """Give the later messages of a dialogue: the same with another value, thanks, or both."""
        others = {name: self._draw_other(tool, name, value, rng) for name, value in call.arguments.items()}
        names = [name for name, value in others.items() if value is not None]
        if names:
            name = rng.choice(names)
            said = _say_argument(tool, name, others[name], rng, is_bare=False)
            changed = replace(call, arguments={**call.arguments, name: others[name]})
            yield Draft(rng.choice(_CHANGES).format(value=said.text), said.stated, ((changed,),))
        if not names or rng.random() < _SHARE_OF_THANKS:
            yield Draft(rng.choice(_THANKS), (), ())

    def _draw_other(self, tool: Tool, name: str, value: Any, rng: random.Random) -> Any:
        """Return another value of an argument; None if none is known, or if it only has two."""
        if isinstance(value, bool):
            return None
        for _ in range(_MAX_DRAWS):
            other = self._choose(tool, name, rng)
            if other is not None and other != value:
                return other
        return None


@dataclass(frozen=True, slots=True)
class _Said:
    """A call as a sentence, and its values as an enumeration."""

    sentence: str
    values: str
    stated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _SaidArgument:
    text: str
    stated: tuple[str, ...]


def list_unknown(tools: Sequence[Tool]) -> list[tuple[Tool, str]]:
    """Return the required parameters whose values the schemas do not give, so that the teacher has to list some."""
    rng = random.Random(0)
    return [
        (tool, name)
        for tool in tools
        for name, schema in describe_properties(tool).items()
        if name in list_required(tool)
        and all(draw_value(schema, rng, name, is_free=True) is None for _ in range(_MAX_DRAWS))
    ]


def _say(tool: Tool, call: Call, rng: random.Random) -> _Said:
    """Say a call: what the tool does, and each value."""
    schemas = list_properties(tool)
    kinds = [_name_kind(schemas.get(name, {}), value) for name, value in call.arguments.items()]
    parts = []
    for (name, value), kind in zip(call.arguments.items(), kinds, strict=True):
        is_clear = kind is not None and kinds.count(kind) == 1
        is_bare = is_clear and rng.random() < _SHARE_OF_BARE_VALUES
        parts.append(_say_argument(tool, name, value, rng, is_bare))
    values = ", ".join(part.text for part in parts)
    ability = describe_ability(tool)
    templates = _TOPICS if ability.do is None else _SENTENCES if parts else _WITHOUT_VALUES
    do, topic = ability.do or ability.topic, ability.topic
    described = _describe(tool.function)
    if parts and described and not _says_what_it_does(described, do) and rng.random() < _SHARE_OF_DESCRIPTIONS:
        templates, topic = _TOPICS, described
    sentence = rng.choice(templates).format(
        do=do, Do=upper_first(do), topic=topic, Topic=upper_first(topic), values=values,
        Values=values if parts and values.startswith(parts[0].stated) else upper_first(values),
    )  # fmt: skip
    return _Said(sentence, values, tuple(value for part in parts for value in part.stated))


def _say_argument(tool: Tool, name: str, value: Any, rng: random.Random, is_bare: bool) -> _SaidArgument:
    words = say_name(name)
    if isinstance(value, bool):
        described = _describe(list_properties(tool)[name])
        if value and described and rng.random() < _SHARE_OF_DESCRIPTIONS:
            return _SaidArgument(described, (described,))
        said = words if value else f"without {words}"
        return _SaidArgument(said, (said,))
    if isinstance(value, (dict, list)):
        said = _say_value(value, {}, rng)
        return _SaidArgument(f"{words}: {said}", tuple(say_value(leaf) for _, leaf in _iter_leaves(value)))
    said = _say_value(value, list_properties(tool).get(name, {}), rng)
    parts = words.split()
    if isinstance(value, (int, float)) and len(parts) > 1 and parts[-1] in _UNITS:
        return _SaidArgument(f"{' '.join(parts[:-1])} {said} {_UNITS[parts[-1]]}", (said,))
    if isinstance(value, (int, float)) and len(parts) == 1 and words.endswith("s") and rng.random() < _SHARE_OF_COUNTS:
        return _SaidArgument(f"{said} {words}", (said,))  # 3 nights
    if is_bare:
        return _SaidArgument(said, (said,))
    forms = ("{name} {value}", "{name}: {value}", "{name} is {value}", "{value} as the {name}", "{value} ({name})")
    return _SaidArgument(rng.choice(forms).format(name=words, value=said), (said,))


def _describe(described: Mapping[str, Any]) -> str:
    """Return the first sentence of a description, to be used in another; empty if there is none, or it is too long."""
    text = described.get("description")
    first = lower_first(first_sentence(text.strip())) if isinstance(text, str) else ""
    return first if len(first.split()) <= MAX_WORDS else ""


def _says_what_it_does(described: str, do: str) -> bool:
    """Return True if the phrase of what a tool does was made of its description, and not of its name."""
    return split_words(described)[1:3] == split_words(do)[1:3]


def _say_value(value: Any, schema: Mapping[str, Any], rng: random.Random) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    text = say_value(value)
    if (day := _read_date(text)) is not None and rng.random() < _SHARE_OF_SPOKEN_DATES:
        return f"{day.day} {day:%B} {day.year}" if rng.random() < 0.6 else f"{day:%B} {day.day}, {day.year}"
    return " ".join(split_words(text)) if "enum" in schema and "_" in text else text


def _read_date(text: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text) if _ISO_DATE.fullmatch(text) else None
    except ValueError:  # the 31st of February
        return None


def _name_kind(schema: Mapping[str, Any], value: Any) -> str | None:
    """Return the kind of a value that is understood without its name, if no other value of the call is of it."""
    if "enum" in schema:
        return None if isinstance(value, (int, float)) else "word"
    if not isinstance(value, str):
        return None
    if _ISO_DATE.fullmatch(value):
        return "date"
    return "code" if re.search(r"\d", value) else None


def _iter_scalars(result: str) -> Iterator[tuple[str, Any]]:
    """Give the named scalars of a result as JSON, the outermost last, so that they win."""
    try:
        value = json.loads(result)
    except ValueError:
        return
    found = [(path[-1], leaf) for path, leaf in _iter_leaves(value) if path and isinstance(path[-1], str)]
    yield from reversed(found)


def _iter_leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from _iter_leaves(item, (*path, key))


def _by_name(plan: RowPlan) -> dict[str, Tool]:
    hidden = () if plan.hidden is None else (plan.hidden,)
    return {tool.name: tool for tool in (*plan.tools, *plan.targets, *hidden)}


def _make_rng(plan: RowPlan, use: str) -> random.Random:
    return random.Random(f"{plan.seed}/{plan.index}/{use}")


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())


def _is_said(value: str, text: str) -> bool:
    """Return True if a text has a value as a word of its own: not 6 in 6.5, nor 40 in 140.

    Scripts without spaces have no words of their own, and units may follow a number at once.
    """
    if any(character >= _FIRST_WITHOUT_SPACES for character in value):
        return value in text
    return bool(re.search(rf"{match_value(value)}|(?<![\w.,-]){re.escape(value)}(?<=\d)(?:{'|'.join(_UNITS)})\b", text))


def _list_stems(text: str) -> set[str]:
    return {word[:_STEM] for word in split_words(text) if len(word) > 2}


def _end(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
