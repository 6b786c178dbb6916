"""The gpt-oss models: calls as messages of the harmony format."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fctune.base.json_reader import ParseError, read_json, skip_space
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.json_calls import dump_json, require_name
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, named_call
from fctune.data.conversation import Call, Tool

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|call|>", "<|end|>", "<|return|>")
_TO = "to=functions."
_RECIPIENT = re.compile(rf"\b{re.escape(_TO)}([^\s<]+)")
_NAME = re.compile(r"[^\s<]+")
_HEADER = re.compile(r"(?:<\|start\|>)?[\w.\-]*\s*(?:<\|channel\|>\s*\w+\s*)?(?:<\|constrain\|>\s*\w+\s*)?")


class GptOss(CallFormat):
    """A call is a message to ``functions.name`` whose content is the arguments as JSON.

    https://github.com/openai/harmony. A model's own text begins after ``<|start|>assistant``.
    """

    name = "gpt_oss"
    template_signatures = (TemplateSignature((_CHANNEL, "functions.")),)
    vllm_parser = "openai"
    sglang_parser = "gpt-oss"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return one message a call; the official template writes only the first call."""
        return "".join(map(self._render_call, calls))

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the fields of messages to a function, and of those to the user."""
        start, kind = r"(?:<\|start\|>assistant)?", r"\s*(?:(?:<\|constrain\|>)?\s*\w+\s*)?<\|message\|>"
        to = r"\s*to=functions\.(?P<name>[^\s<]+)\s*"
        channel = r"<\|channel\|>(?:commentary|analysis)"
        marks = {
            "open_pattern": rf"{start}(?:{to}{channel}|{channel}{to}){kind}",
            "close_pattern": r"<\|(?:call|end|return)\|>",
        }
        answer = {
            "open_pattern": rf"{start}<\|channel\|>(?:final|commentary){kind}",
            "close_pattern": r"<\|(?:end|return)\|>",
            "content": "text",
        }
        return {"tool_calls": named_call(marks), "content": answer}

    def _render_call(self, call: Call) -> str:
        name, arguments = require_name(call.name, _NAME), dump_json(call.arguments, call.name)
        return f"{_START}assistant to=functions.{name}{_CHANNEL}commentary json{_MESSAGE}{arguments}<|call|>"

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        position = 0
        while (marked := state.find(_MESSAGE, position)) >= 0:
            header = self._find_header(state, position, marked)
            recipient = _find_recipient(state.text, header, marked)
            body = marked + len(_MESSAGE)
            if recipient is None:
                is_header = _HEADER.fullmatch(state.text, header, marked)
                state.skip(header if is_header else marked, body)
                position = self._skip_message(state, body)
                continue
            try:
                call, end = self._read_arguments(state, recipient[1], body, lenient)
            except ParseError as error:
                end = self._find_message_end(state, body)
                state.add_malformed(header, end, error.reason)
            else:
                state.add_calls([call], header, end)
            position = end
        self._read_rest(state, position)

    def _find_header(self, state: ParseState, position: int, marked: int) -> int:
        """Return the start of the header before a message mark, or of what remains of a header that was cut off."""
        if (begun := state.text.rfind(_START, position, marked)) >= 0:
            return begun
        channel = state.text.rfind(_CHANNEL, position, marked)
        recipient = _find_recipient(state.text, position, marked)
        starts = [channel, recipient.start() if recipient else -1]
        return min((start for start in starts if start >= 0), default=marked)

    def _read_arguments(self, state: ParseState, name: str, body: int, lenient: bool) -> tuple[Call, int]:
        arguments, end = read_json(state.text, skip_space(state.text, body), lenient)
        if not isinstance(arguments, dict):
            raise ParseError("the arguments are not an object", body)
        end = skip_space(state.text, end)
        if state.text.startswith(_ENDS, end):
            return Call(name, arguments), end + next(len(mark) for mark in _ENDS if state.text.startswith(mark, end))
        # Generation stops at the mark, so the last one may be missing.
        if end < state.end and not (lenient and state.text.startswith(_START, end)):
            raise ParseError("not closed by <|call|>", end)
        return Call(name, arguments), end

    def _find_message_end(self, state: ParseState, body: int) -> int:
        ends = [(position, mark) for mark in _ENDS if (position := state.find(mark, body)) >= 0]
        reopened = state.find(_START, body)
        if not ends or 0 <= reopened < min(ends)[0]:
            return reopened if reopened >= 0 else state.end
        position, mark = min(ends)
        return position + len(mark)

    def _skip_message(self, state: ParseState, body: int) -> int:
        """Keep the mark after a message other than a call out of the prose, and return the position after it."""
        end = self._find_message_end(state, body)
        mark = next((mark for mark in _ENDS if state.text.endswith(mark, body, end)), "")
        state.skip(end - len(mark), end)
        return end

    def _read_rest(self, state: ParseState, position: int) -> None:
        """Add a header that names a function and has no message as malformed."""
        recipient = _find_recipient(state.text, position, state.end)
        if recipient is not None and position != 0:
            state.add_malformed(recipient.start(), state.end, f"no {_MESSAGE} after the recipient")
        elif recipient is not None and state.text.lstrip().startswith(("to=", _START, _CHANNEL)):
            state.add_malformed(position, state.end, f"no {_MESSAGE} after the recipient")


def _find_recipient(text: str, start: int, end: int) -> re.Match[str] | None:
    """Find the function to which a header is addressed."""
    # The plain search is several times as fast, and most stretches have no recipient or one at the first place.
    found = text.find(_TO, start, end)
    return None if found < 0 else _RECIPIENT.search(text, max(start, found - 1), end)
