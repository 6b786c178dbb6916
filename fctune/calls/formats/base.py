"""The interface of call formats, and the state and result of parsing a model's text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, get_args

from fctune.base.forward_search import ForwardSearch
from fctune.base.json_reader import MAX_DEPTH, is_deeper_than, reading_like_python, reads_like_python
from fctune.calls.formats.call_objects import find_bare_calls
from fctune.calls.formats.response_fields import ResponseFields, Surroundings
from fctune.data.conversation import Call, Tool

Server = Literal["vllm", "sglang"]
SERVERS: tuple[Server, ...] = get_args(Server)

# Marks that only end a turn. Decoding with special tokens leaves them at the end of the text.
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
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<SPECIAL_12>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_turn>",
    "<start_function_response>",
    "[e~[",
)

# Few texts end like a mark, and comparing them with every mark takes several times as long as with these.
_LAST_LETTERS = frozenset(mark[-2:] for mark in TURN_ENDS)

# Attempts to read a call that may fail beyond the next mark before the text they read is skipped.
_MAX_REREADS = 4


class Malformed(NamedTuple):
    """A span ``text[start:end]`` that was meant as a call and cannot be read as one, with the reason."""

    start: int
    end: int
    reason: str


class Parsed(NamedTuple):
    """The calls, malformed spans and prose of a model's text; together they cover all of it.

    Attributes:
        calls: The calls in the order of the text.
        malformed: Spans that were meant as calls.
        prose: The text outside calls, malformed spans and marks of the format, stripped.
        spans: The position ``(start, end)`` of each call in the text; calls of one list share theirs.
        decoded: The calls as ``json.loads`` reads them, if strict reading refuses some for their JSON; see
            ``with_decoded``. None otherwise.
    """

    calls: tuple[Call, ...]
    malformed: tuple[Malformed, ...] = ()
    prose: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    decoded: tuple[Call, ...] | None = None


def with_decoded(strict: Parsed, read: Callable[[], Parsed]) -> Parsed:
    """Add ``decoded`` to a strict reading with malformed calls, if ``json.loads`` reads all of them.

    A call without a name, or whose arguments hold what strict JSON cannot, equals no call that could be expected; an
    empty one stands for it, so that results can be written as JSON.

    Args:
        strict: The strict reading.
        read: Reads the same answer again, inside ``reading_like_python``.
    """
    if not strict.malformed or reads_like_python():
        return strict
    with reading_like_python():
        again = read()
    if again.malformed or not again.calls:
        return strict
    return strict._replace(decoded=tuple(call if _is_strict(call) else Call("", {}) for call in again.calls))


def _is_strict(call: Call) -> bool:
    if not call.name or is_deeper_than(call.arguments, MAX_DEPTH):
        return False
    try:
        json.dumps(call.arguments, allow_nan=False)
    except ValueError:
        return False
    return True


class TemplateSignature(NamedTuple):
    """Strings that occur together in the chat templates of a format.

    Signatures are tried from the highest priority down. Raise the priority of one whose templates contain the marks of
    another format as well.
    """

    marks: tuple[str, ...]
    priority: int = 0


class ParseState(ForwardSearch):
    """Progress of parsing ``text[:end]``: everything before ``position`` is accounted for.

    Text between the spans that are added as calls or as malformed is prose.
    """

    __slots__ = ("_num_rereads", "calls", "malformed", "position", "prose", "spans")

    def __init__(self, text: str, end: int) -> None:
        # The attributes of ForwardSearch are set here: calling its __init__ would take a third of this time.
        self.text = text
        self.end = end
        self._found: dict[str, tuple[int, int]] = {}
        self.position = 0
        self.calls: list[Call] = []
        self.spans: list[tuple[int, int]] = []
        self.malformed: list[Malformed] = []
        self.prose: list[str] = []
        self._num_rereads = 0

    def add_calls(self, calls: Sequence[Call], start: int, end: int) -> None:
        """Record ``text[start:end]`` as calls, and continue after it."""
        self.skip(start, end)
        self.calls.extend(calls)
        self.spans.extend([(start, end)] * len(calls))

    def add_list_item(self, call: Call, start: int, end: int) -> None:
        """Record a call together with the brackets and separators of a list around it."""
        while start > self.position and self.text[start - 1] in " \t\r\n[,;":
            start -= 1
        while end < self.end and self.text[end] in " \t\r\n],;":
            end += 1
        self.add_calls([call], start, end)

    def add_malformed(self, start: int, end: int, reason: str) -> None:
        """Record ``text[start:end]`` as malformed, and continue after it."""
        self.skip(start, end)
        self.malformed.append(Malformed(start, end, reason))

    def choose_restart(self, restart: int, read_to: int) -> int:
        """Return the position after a failed attempt to read a call.

        A string or comment that is never closed may carry an attempt past the marks of later calls, so reading restarts
        at the next mark. A text that makes many attempts read the same stretch would take quadratic time: after a few,
        reading restarts where the attempt failed.

        Args:
            restart: Position of the next mark.
            read_to: Position at which the attempt failed.
        """
        if read_to <= restart:
            return restart
        self._num_rereads += 1
        return restart if self._num_rereads <= _MAX_REREADS else min(read_to, self.end)

    def require_call(self, mark: str) -> None:
        """Record the text from ``mark`` on as malformed if the mark occurs and nothing was found."""
        if mark and not self.calls and not self.malformed and (opened := self.find(mark, 0)) >= 0:
            self.add_malformed(opened, self.end, f"no call after {mark}")

    def skip(self, start: int, end: int) -> None:
        """Continue at ``end``; the text before ``start`` is prose, and ``text[start:end]`` is not."""
        if start > self.position:
            self.prose.append(self.text[self.position : start])
        self.position = end

    def finish(self) -> Parsed:
        """Treat the remaining text as prose, and return the result."""
        self.skip(self.end, self.end)
        return Parsed(tuple(self.calls), tuple(self.malformed), "".join(self.prose).strip(), tuple(self.spans))


class TemplateFormat(ABC):
    """A syntax that chat templates write and servers parse.

    A subclass with a ``name`` is a format; one without is a base of several.

    Attributes:
        name: The format's name in configs and on command lines.
        template_signatures: How a chat template that writes the format is recognised.
        vllm_parser: Name of vLLM's parser for the format, as on its command line; None if vLLM cannot read it.
        vllm_tokens: Tokens that this parser looks up in the tokenizer; without them the server ends as it starts.
        sglang_parser: The same for SGLang.
    """

    name: ClassVar[str]
    template_signatures: ClassVar[tuple[TemplateSignature, ...]] = ()
    vllm_parser: ClassVar[str | None] = None
    vllm_tokens: ClassVar[tuple[str, ...]] = ()
    sglang_parser: ClassVar[str | None] = None

    def get_server_parser(self, server: Server) -> str | None:
        """Return the name of a server's parser for the format; None if it has none."""
        return self.vllm_parser if server == "vllm" else self.sglang_parser


class CallFormat(TemplateFormat):
    """One syntax of calls in text, in both directions; servers' parsers are those of ``--tool-call-parser``.

    Attributes:
        aliases: Model families and datasets that write the format, accepted in place of its name.
        response_note: What ``describe_response`` cannot express: calls that its reader refuses, or the complete format.
    """

    aliases: ClassVar[tuple[str, ...]] = ()
    response_note: ClassVar[str] = ""

    @abstractmethod
    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Write calls as the format's models do, without the mark that ends the turn.

        Args:
            calls: The calls; without any, the text is empty.
            tools: The tools on offer. Formats that write values without quotes see in their schemas whether a text
                will be read back as the same value.

        Raises:
            DataError: The format cannot express a call.
        """

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the fields of transformers' ``response_template`` that read the format: calls, and others it needs.

        A reader of them gives the calls that ``parse`` gives, or an error for those in ``response_note``.

        Args:
            around: Patterns of the chat template.

        Returns:
            The fields by name; None if the schema cannot express the format.
        """
        return None

    def parse(self, text: str, tools: Sequence[Tool] = (), lenient: bool = False) -> Parsed:
        """Split a model's text into calls, malformed spans and prose.

        Never raises and never evaluates anything; the time is linear in the text.

        Args:
            text: One assistant turn without its reasoning, with or without the mark that ends it.
            tools: The tools on offer; formats whose values carry no type take it from their schemas.
            lenient: Read as serving engines do: close what is left open, decode arguments sent as a string, accept
                ``parameters`` for ``arguments`` and Python's quotes for JSON's. If that finds nothing, read JSON
                objects that call tools on offer, bare or in a code fence. Otherwise only the exact format is read.
        """
        state = ParseState(text, find_content_end(text))
        self._read(state, tools, lenient)
        if lenient and tools and not state.calls and not state.malformed:
            names = {tool.name for tool in tools}
            for found in find_bare_calls(text[: state.end], state.position, names):
                state.add_calls(*found)
        parsed = state.finish()
        return parsed if lenient else with_decoded(parsed, lambda: self.parse(text, tools))

    def parse_both(self, text: str, tools: Sequence[Tool] = ()) -> tuple[Parsed, Parsed]:
        """Return the strict and the lenient result, in less time than two calls of ``parse`` take."""
        strict = self.parse(text, tools)
        return strict, strict if self._is_unambiguous(text, strict) else self.parse(text, tools, lenient=True)

    def _is_unambiguous(self, text: str, strict: Parsed) -> bool:
        """Return True if the strict result covers every letter with calls, so that the lenient one is the same."""
        return bool(strict.calls) and not strict.malformed and not strict.prose

    @abstractmethod
    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        """Add every call and malformed span of ``state.text[:state.end]`` to the state."""


def find_content_end(text: str) -> int:
    """Return the position of the marks that end the turn."""
    end = len(text)
    while True:
        stripped = end
        while stripped and text[stripped - 1].isspace():
            stripped -= 1
        if text[max(0, stripped - 2) : stripped] not in _LAST_LETTERS or not text.endswith(TURN_ENDS, 0, stripped):
            return end
        end = stripped - next(len(mark) for mark in TURN_ENDS if text.endswith(mark, 0, stripped))
