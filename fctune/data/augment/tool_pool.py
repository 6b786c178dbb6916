"""The tools of a dataset, found by the words of their descriptions and by the company that they keep."""

from __future__ import annotations

import hashlib
import json
import marshal
import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from fctune.data.augment.spoken import list_properties, read_examples, split_terms
from fctune.data.conversation import Call, Conversation, Tool
from fctune.data.tool_schema import load_schema

MAX_TOOLS = 10_000  # of a pool; later ones are left out, which bounds memory and the time of a search
_MAX_VALUES = 24  # of a parameter
_MAX_REQUESTS = 6  # for a tool, of rows with the same system prompts
_MAX_COMPANIONS = 16  # of a tool
_MAX_PER_WORD = 200  # tools that a word leads to; words of more tools say little
_MAX_RANKED = 40
_MAX_DRAWS = 50  # for each tool that is wanted
_MAX_ALIKENESS = 0.4
_MAX_OVERLAP = 0.6
_MIN_WEIGHT = 0.1  # of a word that every tool has; of others, the logarithm of how rare they are

# Words that say nothing about what a tool does.
_EMPTY_TEXT = """
    a about all an and any api are as at based be by can calculate check create details do each find for from
    function get given has have if in info information into is it its list of on one or provided provides result
    results retrieve retrieves return returns search set specific specified such that the their these this to tool
    use used user using via which will with you your data"""
_EMPTY_WORDS = frozenset(_EMPTY_TEXT.split())


class _Words(NamedTuple):
    """All words of a tool's name and description, and those that say what it does."""

    all: frozenset[str]
    telling: frozenset[str]


class Request(NamedTuple):
    """A request of one call, as another row has it."""

    text: str
    arguments: dict[str, Any]


class ToolPool:
    """Tools with the values and requests that rows have for them.

    Tools with the same name and different schemas are different tools.
    """

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self._numbers: dict[str, int] = {}  # by the tool's JSON
        self._by_group: dict[str, list[int]] = defaultdict(list)
        self._members: set[tuple[str, int]] = set()
        self._by_word: dict[str, list[int]] = defaultdict(list)
        self._words: list[_Words] = []
        self._num_tools: Counter[str] = Counter()  # by word
        self._companions: dict[int, list[int]] = defaultdict(list)
        self._values: dict[tuple[int, str], list[Any]] = {}
        self._requests: dict[int, dict[str, list[Request]]] = defaultdict(dict)  # by tool and system prompts

    def __len__(self) -> int:
        return len(self.tools)

    def add(self, conversation: Conversation, group: str = "") -> None:
        """Add a row's tools, and the values and requests that it has for them.

        Args:
            conversation: The row.
            group: The source or server that its tools belong to.
        """
        numbers = [number for tool in conversation.tools if (number := self._add_tool(tool)) is not None]
        for number in numbers:
            if (group, number) not in self._members:
                self._members.add((group, number))
                self._by_group[group].append(number)
            known = self._companions[number]
            others = [other for other in numbers if other != number and other not in known]
            known += others[: _MAX_COMPANIONS - len(known)]
        by_name = {self.tools[number].name: number for number in numbers}
        for message in conversation.messages:
            for call in message.calls:
                if call.name in by_name:
                    self._add_values(by_name[call.name], call)
        request = _find_request(conversation)
        if request is not None and request[0] in by_name:
            known_requests = self._requests[by_name[request[0]]].setdefault(_digest_system(conversation), [])
            if len(known_requests) < _MAX_REQUESTS and request[1] not in known_requests:
                known_requests.append(request[1])

    def has_others(self, tools: Sequence[Tool], group: str = "") -> bool:
        """Return True if a group has tools of other names."""
        names = {tool.name for tool in tools}
        return any(self.tools[number].name not in names for number in self._by_group.get(group, ()))

    def values(self, tool: Tool, parameter: str) -> list[Any]:
        """Return known values of a tool's parameter."""
        number = self._numbers.get(tool.to_json())
        return [] if number is None else self._values.get((number, parameter), [])

    def requests(self, tool: Tool, row: Conversation | None = None) -> list[Request]:
        """Return known requests of one call of a tool.

        Args:
            tool: The tool.
            row: Only those of rows with the system prompts of this one, since others may be of another day or account.
        """
        number = self._numbers.get(tool.to_json())
        known = {} if number is None else self._requests.get(number, {})
        if row is not None:
            return known.get(_digest_system(row), [])
        return [request for requests in known.values() for request in requests]

    def draw_others(
        self,
        needed: Sequence[Tool],
        text: str,
        count: int,
        rng: random.Random,
        group: str = "",
        taken: Collection[Tool] = (),
    ) -> list[Tool]:
        """Draw tools that cannot do what a request needs; fewer where there are no more.

        None has the name or the description of a tool that is needed or taken, or is described like one that is
        needed. Half of them share words with the request or with what it needs, a quarter are offered together with
        the row's tools in other rows, the others are any of the group's.

        Args:
            needed: The tools that the request needs.
            text: The request.
            count: Number of tools.
            rng: Random generator.
            group: The source or server to draw from; of another, nothing is drawn.
            taken: Tools that are on offer already.
        """
        names = {tool.name for tool in (*needed, *taken)}
        said = {_read_description(tool) for tool in (*needed, *taken)} - {""}
        avoided = [_list_words(tool) for tool in needed]
        about = [word for tool in needed for word in sorted(_list_words(tool).telling)]
        near = self._rank([*dict.fromkeys(split_terms(text)), *about], group)
        own = [number for tool in (*needed, *taken) if (number := self._numbers.get(tool.to_json())) is not None]
        company = list(dict.fromkeys(other for number in own for other in self._companions.get(number, ())))
        company = [number for number in company if (group, number) in self._members]
        everyone = self._by_group.get(group, [])
        drawn: list[Tool] = []
        for _ in range(_MAX_DRAWS * count):
            if len(drawn) == count or not everyone:
                break
            chance = rng.random()
            candidates = near if chance < 0.5 and near else company if chance < 0.75 and company else everyone
            tool = self.tools[number := rng.choice(candidates)]
            if candidates is not everyone:
                candidates.remove(number)
            description = _read_description(tool)
            if tool.name in names or description in said:
                continue
            if any(self._are_alike(self._words[number], words) for words in avoided):
                continue
            names.add(tool.name)
            said |= {description} - {""}
            drawn.append(tool)
        return drawn

    def are_alike(self, one: Tool, other: Tool) -> bool:
        """Return True if two tools share so many words that a request for one may be for the other.

        Words count by their rarity, so that tools of a server are not alike because their descriptions have a form.
        """
        return self._are_alike(_list_words(one), _list_words(other))

    def _are_alike(self, one: _Words, other: _Words) -> bool:
        common = self._weigh(one.all & other.all)
        if common > _MAX_ALIKENESS * (common + self._weigh(one.all ^ other.all)):
            return True
        shared = one.telling & other.telling
        smaller = min(self._weigh(one.telling), self._weigh(other.telling))
        return len(shared) > 1 and self._weigh(shared) >= _MAX_OVERLAP * smaller

    def _weigh(self, words: frozenset[str]) -> float:
        most = max(1, len(self.tools))
        return math.fsum(max(_MIN_WEIGHT, math.log(most / max(1, self._num_tools[word]))) for word in words)

    def _add_tool(self, tool: Tool) -> int | None:
        text = tool.to_json()
        number = self._numbers.get(text)
        if number is not None or len(self.tools) >= MAX_TOOLS:
            return number
        if load_schema(marshal.dumps(tool.parameters, 2)).problem is not None:
            return None
        number = self._numbers[text] = len(self.tools)
        self.tools.append(tool)
        self._words.append(_list_words(tool))
        self._num_tools.update(self._words[-1].all)
        for word in sorted(self._words[-1].telling):
            if len(self._by_word[word]) < _MAX_PER_WORD:
                self._by_word[word].append(number)
        for parameter, schema in list_properties(tool).items():
            self._values[number, parameter] = read_examples(schema)[:_MAX_VALUES]
        return number

    def _add_values(self, number: int, call: Call) -> None:
        for parameter, value in call.arguments.items():
            known = self._values.get((number, parameter))
            if known is None or not isinstance(value, str | int | float) or isinstance(value, bool):
                continue
            if len(known) < _MAX_VALUES and value not in known:
                known.append(value)

    def _rank(self, words: Iterable[str], group: str) -> list[int]:
        """Return the tools of a group that share most words, rare ones counting more."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(words):  # in a fixed order: sums of floats depend on it
            found = self._by_word.get(word, ())
            if len(found) < _MAX_PER_WORD:
                for number in found:
                    scores[number] += 1 / len(found)
        own = (number for number in scores if (group, number) in self._members)
        return sorted(own, key=lambda number: (-scores[number], number))[:_MAX_RANKED]


def _find_request(conversation: Conversation) -> tuple[str, Request] | None:
    """Return the name and the request of a conversation that begins with one call of one tool, or None."""
    spoken = [message for message in conversation.messages if message.role != "system"][:2]
    if [message.role for message in spoken] != ["user", "assistant"] or len(spoken[1].calls) != 1:
        return None
    call = spoken[1].calls[0]
    return call.name, Request((spoken[0].content or "").strip(), call.arguments)


def _digest_system(conversation: Conversation) -> str:
    texts = [message.content for message in conversation.messages if message.role == "system"]
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()


def _read_description(tool: Tool) -> str:
    description = tool.function.get("description")
    return " ".join(description.lower().split()) if isinstance(description, str) else ""


def _list_words(tool: Tool) -> _Words:
    words = frozenset(split_terms(f"{tool.name} {_read_description(tool)}"))
    return _Words(words, words - _EMPTY_WORDS)
