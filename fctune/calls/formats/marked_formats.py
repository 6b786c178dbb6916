"""Calls between marks of their own, the arguments as JSON: DeepSeek V3 and V3.1, gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fctune.calls.formats.base import CallFormat, Malformed, Page
from fctune.calls.formats.json_formats import dump_json, require_name
from fctune.data.conversation import Call, Tool
from fctune.parsing.json_reader import ParseError, read_json, skip_space


class DeepSeek(CallFormat):
    """Calls between DeepSeek's marks; V3 and R1 write a type and a fence around the arguments, V3.1 neither.

    The chat templates of DeepSeek-V3 and DeepSeek-V3.1.
    """

    _open, _close = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    _call, _call_end, _separator = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    _name = re.compile(r"[^\s<>{`]([^\n<>{`]*[^\s<>{`])?")

    def __init__(self, name: str, has_fence: bool) -> None:
        self.name = name
        self._has_fence = has_fence
        name = r"([^\s<>{`][^\n<>{`]*+)"
        head = rf"function<｜tool▁sep｜>{name}\n```json\n" if has_fence else rf"\s*+{name}<｜tool▁sep｜>"
        self._head = re.compile(head)
        self._tail = re.compile(r"\s*```\s*<｜tool▁call▁end｜>" if has_fence else r"\s*<｜tool▁call▁end｜>")
        # Models and prompts mix the two; serving engines take what their template says, most deployments either.
        self._any_head = re.compile(
            rf"\s*+(?:function<｜tool▁sep｜>)?+{name}\s*+(?:<｜tool▁sep｜>)?+\s*+(?:```json)?+\s*+(?=\{{)"
        )
        self._any_tail = re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?")

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """All calls between one pair of marks."""
        if not calls:
            return ""
        joint = "\n" if self._has_fence else ""
        return self._open + joint.join(map(self._render_call, calls)) + self._close

    def _render_call(self, call: Call) -> str:
        name, arguments = require_name(call.name, self._name), dump_json(call.arguments, call.name)
        if self._has_fence:
            return f"{self._call}function{self._separator}{name}\n```json\n{arguments}\n```{self._call_end}"
        return f"{self._call}{name}{self._separator}{arguments}{self._call_end}"

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        position = start
        is_open = False
        outer = -1
        while (opened := page.find(self._call, position)) >= 0:
            begun = page.find(self._open, position)
            if 0 <= begun < opened:
                page.skip(begun, begun + len(self._open))
                outer, is_open = begun, True
            following = page.find(self._call, opened + len(self._call))
            try:
                call, end = self._read_call(page.text, opened + len(self._call), lenient)
                if not is_open and not lenient:
                    raise ParseError(f"not opened by {self._open}", opened)
                page.put_calls([call], opened, end)
            except ParseError as error:
                closed = page.find(self._call_end, max(error.position, opened))
                end = following if following >= 0 else page.end
                end = closed + len(self._call_end) if 0 <= closed < end else end
                page.put_malformed(opened, end, error.reason)
            position = end
            behind = skip_space(page.text, end)
            if page.text.startswith(self._close, behind):
                page.skip(behind, behind + len(self._close))
                position, is_open = behind + len(self._close), False
        if (begun := page.find(self._open, position)) >= 0:
            page.put_malformed(begun, page.end, "no call behind the mark")
        if is_open and not lenient:
            # The place is the mark, as the calls behind it were put down already.
            page.malformed.append(Malformed(outer, outer + len(self._open), f"not closed by {self._close}"))

    def _read_call(self, text: str, start: int, lenient: bool) -> tuple[Call, int]:
        head = (self._any_head if lenient else self._head).match(text, start)
        if head is None:
            raise ParseError("no name where one is due", start)
        arguments, end = read_json(text, skip_space(text, head.end()), lenient)
        tail = (self._any_tail if lenient else self._tail).match(text, end)
        if not isinstance(arguments, dict):
            raise ParseError("the arguments are no object", head.end())
        if tail is None:
            raise ParseError(f"not closed by {self._call_end}", end)
        return Call(head[1].strip(), arguments), tail.end()


class GptOss(CallFormat):
    """Messages of the harmony format: a call is one to ``functions.name``, its content the arguments as JSON.

    https://github.com/openai/harmony. A model's own text begins behind ``<|start|>assistant``.
    """

    name = "gpt_oss"
    _start, _message = "<|start|>", "<|message|>"
    _ends = ("<|call|>", "<|end|>", "<|return|>")
    _recipient = re.compile(r"\bto=functions\.([^\s<]+)")
    _name = re.compile(r"[^\s<]+")
    _channel = "<|channel|>"
    _header = re.compile(r"(?:<\|start\|>)?[\w.\-]*\s*(?:<\|channel\|>\s*\w+\s*)?(?:<\|constrain\|>\s*\w+\s*)?")

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """One message a call (the official template writes the first call only)."""
        return "".join(map(self._render_call, calls))

    def _render_call(self, call: Call) -> str:
        name, arguments = require_name(call.name, self._name), dump_json(call.arguments, call.name)
        return f"{self._start}assistant to=functions.{name}<|channel|>commentary json{self._message}{arguments}<|call|>"

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        position = start
        while (marked := page.find(self._message, position)) >= 0:
            header = self._header_start(page, position, marked)
            recipient = self._recipient.search(page.text, header, marked)
            body = marked + len(self._message)
            if recipient is None:
                is_header = self._header.fullmatch(page.text, header, marked)
                page.skip(header if is_header else marked, body)
                position = self._skip_message(page, body)
                continue
            try:
                call, end = self._read_arguments(page, recipient[1], body, lenient)
            except ParseError as error:
                end = self._message_end(page, body)
                page.put_malformed(header, end, error.reason)
            else:
                page.put_calls([call], header, end)
            position = end
        self._read_rest(page, position)

    def _header_start(self, page: Page, position: int, marked: int) -> int:
        """Where the header of the message begins whose mark is there: at its start, or, cut off, at what is left."""
        if (begun := page.text.rfind(self._start, position, marked)) >= 0:
            return begun
        channel = page.text.rfind(self._channel, position, marked)
        recipient = self._recipient.search(page.text, position, marked)
        places = [channel, recipient.start() if recipient else -1]
        return min((place for place in places if place >= 0), default=marked)

    def _read_arguments(self, page: Page, name: str, body: int, lenient: bool) -> tuple[Call, int]:
        arguments, end = read_json(page.text, skip_space(page.text, body), lenient)
        if not isinstance(arguments, dict):
            raise ParseError("the arguments are no object", body)
        end = skip_space(page.text, end)
        mark = next((mark for mark in self._ends if page.text.startswith(mark, end)), "")
        # The mark is what generation stops at, so that the last one may have been cut off.
        if not mark and end < page.end and not (lenient and page.text.startswith(self._start, end)):
            raise ParseError("not closed by <|call|>", end)
        return Call(name, arguments), end + len(mark)

    def _message_end(self, page: Page, body: int) -> int:
        ends = [(place, mark) for mark in self._ends if (place := page.find(mark, body)) >= 0]
        reopened = page.find(self._start, body)
        if not ends or 0 <= reopened < min(ends)[0]:
            return reopened if reopened >= 0 else page.end
        place, mark = min(ends)
        return place + len(mark)

    def _skip_message(self, page: Page, body: int) -> int:
        """Leave the mark behind a message that is no call out of the prose; the position behind it."""
        end = self._message_end(page, body)
        mark = next((mark for mark in self._ends if page.text.endswith(mark, body, end)), "")
        page.skip(end - len(mark), end)
        return end

    def _read_rest(self, page: Page, position: int) -> None:
        """A header without a message that names a function was meant as a call."""
        recipient = self._recipient.search(page.text, position, page.end)
        if recipient is not None and position != 0:
            page.put_malformed(recipient.start(), page.end, f"no {self._message} behind the recipient")
        elif recipient is not None and page.text.lstrip().startswith(("to=", self._start, "<|channel|>")):
            page.put_malformed(position, page.end, f"no {self._message} behind the recipient")
