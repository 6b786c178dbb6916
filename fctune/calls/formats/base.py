"""What every wire format shares: the answer of a reading, the page that a reading writes it on, the format itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from fctune.data.conversation import Call, Tool
from fctune.parsing.json_reader import ParseError, decode_json

# Marks that end a turn and say nothing else; decoding with special tokens leaves them at the end of the text.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eot|>",
    "<|eom|>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",
    "<|observation|>",
    "<|return|>",
)


class Malformed(NamedTuple):
    """A stretch ``text[start:end]`` that was meant as a call and is none, with the reason."""

    start: int
    end: int
    reason: str


class Parsed(NamedTuple):
    """A model's text taken apart, nothing lost.

    ``prose`` is what is neither call nor malformed nor a mark of the format, without the white space around it.
    ``spans`` holds the place ``(start, end)`` of each call in the text, in the order of ``calls``; two calls of one
    list share theirs.
    """

    calls: tuple[Call, ...]
    malformed: tuple[Malformed, ...] = ()
    prose: str = ""
    spans: tuple[tuple[int, int], ...] = ()


class Page:
    """A text while it is being read: ``text[:end]`` is to be read from ``position`` on.

    What lies between two stretches that were put down as call or malformed is prose.
    """

    __slots__ = ("_found", "calls", "end", "malformed", "position", "prose", "spans", "text")

    def __init__(self, text: str, position: int, end: int) -> None:
        self.text = text
        self.position = position
        self.end = end
        self.calls: list[Call] = []
        self.spans: list[tuple[int, int]] = []
        self.malformed: list[Malformed] = []
        self.prose: list[str] = []
        self._found: dict[str, tuple[int, int]] = {}

    def find(self, needle: str, start: int) -> int:
        """Where ``needle`` stands next, or -1.

        The last answer is kept: without it a text of many opening marks and no closing one costs its square.
        """
        if needle in self._found:
            asked, found = self._found[needle]
            if asked <= start and (found < 0 or start <= found):
                return found
        found = self.text.find(needle, start, self.end)
        self._found[needle] = (start, found)
        return found

    def put_calls(self, calls: Sequence[Call], start: int, end: int) -> None:
        """Put ``text[start:end]`` down as calls and go on behind it."""
        self._put_prose(start, end)
        self.calls.extend(calls)
        self.spans.extend([(start, end)] * len(calls))

    def put_loose_call(self, call: Call, start: int, end: int) -> None:
        """Put a call down that was found among others, with the brackets and commas of a list around it."""
        while start > self.position and self.text[start - 1] in " \t\r\n[,;":
            start -= 1
        while end < self.end and self.text[end] in " \t\r\n],;":
            end += 1
        self.put_calls([call], start, end)

    def require_call(self, mark: str, start: int) -> None:
        """Put the text behind ``mark`` down as malformed if it stands there and nothing was found."""
        if mark and not self.calls and not self.malformed and (opened := self.find(mark, start)) >= 0:
            self.put_malformed(opened, self.end, f"no call behind {mark}")

    def put_malformed(self, start: int, end: int, reason: str) -> None:
        """Put ``text[start:end]`` down as malformed and go on behind it."""
        self._put_prose(start, end)
        self.malformed.append(Malformed(start, end, reason))

    def skip(self, start: int, end: int) -> None:
        """Leave out ``text[start:end]``, a mark of the format that says nothing itself, and go on behind it."""
        self._put_prose(start, end)

    def finish(self) -> Parsed:
        """The answer; what was not put down by now is prose."""
        self._put_prose(self.end, self.end)
        return Parsed(tuple(self.calls), tuple(self.malformed), "".join(self.prose).strip(), tuple(self.spans))

    def _put_prose(self, start: int, end: int) -> None:
        if start > self.position:
            self.prose.append(self.text[self.position : start])
        self.position = end


class CallFormat(ABC):
    """One way of writing calls into text, in both directions."""

    name: str

    @abstractmethod
    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """The text of the calls as the format's models write them, without the mark that ends the turn.

        Args:
            calls: At least one; with none the text is empty.
            tools: What may be called. Formats that write values without quotes take from the schema whether the text
                will be read back as the same value.

        Raises:
            DataError: Calls that this format cannot write.
        """

    def parse(self, text: str, tools: Sequence[Tool] = (), lenient: bool = False) -> Parsed:
        """The calls, the malformed stretches and the prose of a model's text.

        Never raises and never runs anything; the time is linear in the text. Thinking (``<think>...</think>`` at the
        start) is prose, whatever it quotes.

        Args:
            text: One assistant turn, with or without the mark that ends it.
            tools: What may be called; formats whose values have no type of their own take it from here.
            lenient: Read as serving engines do: close what is left open, decode arguments that came as a string, take
                ``parameters`` for ``arguments`` and Python's quotes for JSON's. Otherwise only the format itself is
                read.
        """
        page = Page(text, 0, _content_end(text))
        self._read(page, _content_start(text, page.end), tools, lenient)
        return page.finish()

    def parse_both(self, text: str, tools: Sequence[Tool] = ()) -> tuple[Parsed, Parsed]:
        """The strict reading and the lenient one, in less time than both take by themselves."""
        strict = self.parse(text, tools)
        return strict, strict if self._is_read_whole(text, strict) else self.parse(text, tools, lenient=True)

    def _is_read_whole(self, text: str, strict: Parsed) -> bool:
        """Whether the strict reading takes every letter for calls, and so leaves nothing to the lenient one."""
        return bool(strict.calls) and not strict.malformed and not strict.prose

    @abstractmethod
    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        """Put every call and every malformed stretch of ``page.text[start:page.end]`` on the page."""


def to_call(value: Any, key: str, lenient: bool = False) -> Call | str:
    """The call that a decoded object says, or the reason why it is none.

    Args:
        value: What was decoded.
        key: Where the format keeps the arguments: ``arguments`` or ``parameters``.
        lenient: Take either key, arguments as a string of JSON, none at all, and keys that mean nothing.
    """
    if not isinstance(value, dict):
        return f"an object was expected, not {type(value).__name__}"
    if lenient:
        function = value.get("function")
        value = {**value, **function} if isinstance(function, dict) else value
        arguments = value.get(key, value.get("parameters" if key == "arguments" else "arguments"))
        if isinstance(arguments, str):
            try:
                arguments = decode_json(arguments, lenient=True)
            except ParseError as error:
                return f"{key} is a string and not JSON: {error.reason}"
        arguments = {} if arguments is None else arguments
    else:
        unknown = value.keys() - {"name", key, "type", "id"}
        if unknown:
            return f"unknown key {min(unknown)[:40]!r}"
        if key not in value:
            return f"no {key!r}"
        arguments = value[key]
    name, call_id = value.get("name"), value.get("id")
    if not isinstance(name, str) or not name:
        return "no name"
    if not isinstance(arguments, dict):
        return f"{key} is not an object but {type(arguments).__name__}"
    return Call(name, arguments, call_id if isinstance(call_id, str) else None)


def _content_end(text: str) -> int:
    """Where the marks that end the turn begin."""
    end = len(text)
    while True:
        stripped = end
        while stripped and text[stripped - 1].isspace():
            stripped -= 1
        if not text.endswith(TURN_ENDS, 0, stripped):
            return end
        end = stripped - next(len(mark) for mark in TURN_ENDS if text.endswith(mark, 0, stripped))


def _content_start(text: str, end: int) -> int:
    """Where the answer begins after the thinking; ``end`` where thinking never stops.

    Templates that open the thinking themselves leave only its end, on a line of its own, in the model's text.
    """
    start = 0
    while start < end and text[start].isspace():
        start += 1
    if text.startswith("<think>", start):
        stop = text.find("</think>", start, end)
        return end if stop < 0 else stop + len("</think>")
    stop = start if text.startswith("</think>", start) else text.find("\n</think>", 0, end) + 1
    return stop + len("</think>") if stop or text.startswith("</think>", start) else 0
