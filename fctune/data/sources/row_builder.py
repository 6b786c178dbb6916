"""Shared parts of all row readers: strict tools and calls, ordered messages, results matched to their calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fctune.data.call_ids import find_answered
from fctune.data.conversation import Call, Conversation, Message, Role, Tool
from fctune.data.sources.columns import is_harmless
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.filling import ArgumentFilling, ArrowStruct, holds_null
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_content import read_content, read_result_content
from fctune.data.sources.row_json import check_depth, check_values, read_python_literal
from fctune.data.sources.row_reasoning import take_reasoning

_DIGEST = re.compile(r"[0-9a-f]{16}")


class RowWarning(NamedTuple):
    """A problem in a row that is kept despite it."""

    pointer: str
    kind: str
    reason: str


class CallPointer(NamedTuple):
    """Location of a call in its row, and of its arguments."""

    call: str
    arguments: str


@dataclass(slots=True)
class ParsedRow:
    """A conversation with the location of each part in its row.

    ``message_pointers[i]`` is the location of ``conversation.messages[i]``, ``tools_pointer[i]tools_suffix`` that of
    ``conversation.tools[i]``. ``notes`` counts the conversions that were made, by their kind in ``NOTE_KINDS``. ``raw``
    is the row as it was decoded; empty if it had no text. ``call_pointers`` are the locations of all calls, in order.
    ``is_record`` is True for records of logs, of which several may be of one run.
    """

    conversation: Conversation
    message_pointers: list[str]
    tools_pointer: str
    tools_suffix: str = ""
    row_format: str = ""
    warnings: list[RowWarning] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    raw: dict[str, Any] = field(default_factory=dict)
    call_pointers: list[CallPointer] = field(default_factory=list)
    is_record: bool = False

    @property
    def benchmark(self) -> str | None:
        """The benchmark whose question the row is, as its metadata says; None if it is none's."""
        metadata = self.raw.get("metadata")
        name = metadata.get("benchmark") if isinstance(metadata, dict) else None
        return name if isinstance(name, str) else None

    @property
    def mark(self) -> dict[str, Any] | None:
        """The provenance of a row that ``data augment`` made, from its metadata; None for others.

        It has ``kinds`` (of augmentation), ``digest`` and ``from`` (of the original row), and ``seed``.
        """
        metadata = self.raw.get("metadata")
        mark = metadata.get("augmented") if isinstance(metadata, dict) else None
        if not isinstance(mark, dict) or not isinstance(kinds := mark.get("kinds"), list):
            return None
        is_valid = isinstance(digest := mark.get("digest"), str) and _DIGEST.fullmatch(digest) is not None
        return mark if is_valid and kinds and all(isinstance(kind, str) for kind in kinds) else None

    @property
    def redacted(self) -> dict[str, Any] | None:
        """The row's record of its redaction: the number of places by kind, and the ``calls`` with a placeholder."""
        metadata = self.raw.get("metadata")
        entry = metadata.get("redacted") if isinstance(metadata, dict) else None
        if not isinstance(entry, dict) or entry.keys() != {"kinds", "calls"}:
            return None
        kinds, calls = entry["kinds"], entry["calls"]
        is_valid = isinstance(kinds, dict) and all(type(count) is int for count in kinds.values())
        is_valid = is_valid and isinstance(calls, list) and all(isinstance(call, str) for call in calls)
        return entry if is_valid else None

    @property
    def run(self) -> str | None:
        """The digest of the run that a log's record is of, from the metadata of a written row; None for others."""
        metadata = self.raw.get("metadata")
        run = metadata.get("run") if isinstance(metadata, dict) else None
        return run if isinstance(run, str) and _DIGEST.fullmatch(run) is not None else None

    @property
    def provenance(self) -> dict[str, Any]:
        """The metadata that stays with the row when it is written.

        How it was ``augmented``, ``redacted`` and ``generated``, its ``run``, and the ``benchmark`` that it is of.
        """
        metadata = self.raw.get("metadata")
        generated = metadata.get("generated") if isinstance(metadata, dict) else None
        entries = {
            "augmented": self.mark,
            "redacted": self.redacted,
            "run": self.run,
            "generated": generated if isinstance(generated, dict) else None,
            "benchmark": self.benchmark,
        }
        return {name: entry for name, entry in entries.items() if entry is not None}

    def digest(self) -> str:
        """Return the digest that decides the row's split: its own, or that of the row that it was made of."""
        mark = self.mark
        return self.conversation.digest() if mark is None else str(mark["digest"])


NOTE_KINDS: dict[str, str] = {
    "arrow_struct": "arguments or tools from an Arrow struct, whose key order is the column's",
    "calls_joined": "calls in messages of their own, joined with the assistant's message before them",
    "content_with_call": "assistant text before a call, kept with it",
    "custom_call": "calls with free text (read as the argument input) or of the API's shell, read as a function's",
    "developer_as_system": "developer messages read as system messages",
    "empty_think": "empty think blocks, removed",
    "error_result": "results marked as errors, of which the text is read and the mark is not",
    "failed_kept": "marks of failed, cut off or rejected answers that are kept",
    "escaped_apostrophe": "\\' in quoted arguments read as an apostrophe",
    "filled_row": "rows whose tools or calls have null keys, as Arrow fills them in from other rows",
    "ignored_field": "message fields that no chat template of tool calls uses",
    "legacy_function_call": "OpenAI's old function_call, function role or functions",
    "missing_end_marker": "Glaive assistant turns without <|endoftext|>",
    "null_key_dropped": "null keys of tools and calls, removed",
    "number_respelled": "numbers whose value is kept but not their spelling (1e5, 1.50)",
    "observation_as_user": "observations of actions that are no calls, read as the user's turns",
    "prefilled_answer": "answers whose beginning the request gave, joined with it",
    "python_literal": "calls, results and tools of a prompt written as Python literals, read as JSON values",
    "quoted_arguments": "Glaive arguments in single quotes, read as the JSON between the quotes",
    "reasoning_hidden": "reasoning that a log holds only encrypted or not at all, left out",
    "reasoning_summary": "reasoning of which a log holds only a summary, which is read as the reasoning",
    "reasoning_from_content": "reasoning read from tags at the start of a turn's text",
    "reasoning_from_records": "turns whose reasoning is from the record that ends with them, and not in later ones",
    "result_from_json": "results that are an object or a list, written as JSON",
    "step_as_context": "answers that are copied, cut off or no model's, kept as context",
    "system_prompt_replaced": "system prompts that only declared tools, which the chat template declares instead",
    "tagged_calls": "calls in <tool_call> tags of an assistant's message, read as calls",
    "tagged_results": "results in <tool_response> tags, read without them",
    "text_parts_joined": "contents of several text parts, joined by line breaks",
    "tool_type_dropped": "tools of OpenAI's Responses API, whose type was removed",
    "tools_from_anthropic": "tools in Anthropic's form (input_schema)",
    "tools_from_gemini": "tools in Gemini's form (function_declarations)",
    "tools_from_mcp": "tools in MCP's form (inputSchema)",
    "tools_from_openapi": "OpenAPI documents, one tool read from each operation",
    "tools_from_prompt": "tools read from the prompt because the tools column is empty",
    "tools_from_python": "tools in a string that is a literal of Python",
    "type_converted": "tools whose Python type names were converted to JSON Schema",
    "wrong_turn_as_context": "turns whose calls all failed, kept as context",
}
"""The kinds of conversions made while reading rows."""

LEFT_OUT_KINDS: dict[str, str] = {
    "answer_failed": "records whose answer failed, was cut off or rejected, or whose run did not solve its task",
    "file_left_out": "JSON files of a directory that hold a single object of no row format, as descriptions of runs",
    "folded_record": "records whose messages, up to their last answer, are the beginning of a longer record's",
    "not_selected": "records that do not meet the conditions (where)",
    "repeated_record": "records that equal a later one, up to their last answer",
    "session_event": "events of sessions that are no messages",
    "sidechain_step": "steps of subagents in the list of another agent's steps",
    "span_left_out": "spans and records that are not of a model call (of agents, tools or requests)",
    "taken_back_item": "items of turns that the user took back, with the user's messages",
    "span_without_content": "spans and records of model calls whose messages were not recorded",
    "where_missing": "records without a column or key that the conditions name (where)",
}
"""The kinds of records and parts of logs that are no rows."""

TOOL_COLUMNS = ("tools", "functions", "available_tools", "tools_json")
"""Columns of a row's tools, in formats that have them in a column."""

METADATA_COLUMNS = ("metadata", "meta", "extra_info")
"""Columns whose ``tools`` are read where those of ``TOOL_COLUMNS`` are empty."""

_SYSTEM_KEYS = ("system", "system_prompt")  # of metadata

_CALL_KEYS = frozenset({"name", "arguments", "id", "type", "index"})
# What opens a call in the text of other formats; such text would be trained, but no call would be.
_CALL_MARKS = re.compile(
    r"</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<function=|<function_?calls?>|<\|tool_call\|>|<\|tool_calls_section_begin"
    r"|<｜tool▁calls▁begin｜>|<\|tool_call_start\|>|<start_function_call>|<minimax:tool_call>|<TOOLCALL>|<\|tool_call>"
)


class RowBuilder:
    """Builds a conversation from the messages of a row; raises ``RowError`` at the first defect."""

    def __init__(self, context: ReadContext, source: str = "") -> None:
        self.context = context
        self.source = source
        self.messages: list[Message] = []
        self.pointers: list[str] = []
        self.warnings: list[RowWarning] = []
        self.notes: Counter[str] = Counter()
        self.tools: tuple[Tool, ...] = ()
        self.tools_pointer = "tools"
        self.tools_suffix = ""
        self.pending: list[Call] = []
        self.call_pointers: list[CallPointer] = []
        self.template_args: dict[str, Any] = {}
        self.unread: dict[str, Any] = {}  # keys of messages and calls that no reader reads, by pointer
        self.failed_calls: set[int] = set()  # calls whose results are marked as errors, by identity
        self._system: str | None = None  # of the system column
        self._reasoning: tuple[str, str] | None = None  # of the assistant's next turn, and its location
        self._has_null_arguments = False  # of a call whose arguments are an object in the row

    def add(
        self,
        role: Role,
        content: str | None,
        pointer: str,
        calls: tuple[Call, ...] = (),
        weight: float = 1.0,
        reasoning: str | None = None,
    ) -> None:
        """Add a message that is not a result."""
        if role == "system" and self._system is not None and self.pointers == ["system"]:
            if content == self._system:
                return
            reason = "a system message that differs from the row's system column; keep one of them"
            raise RowError(pointer, "system_conflict", reason)
        if role == "assistant":
            reasoning = self._take_pending_reasoning(reasoning, pointer)
        self._require_no_reasoning(role)
        if self.pending and not (role == "assistant" and calls):
            names = ", ".join(call.name for call in self.pending)
            self.warnings.append(RowWarning(pointer, "call_without_result", f"no result of {names} precedes it"))
            self.pending = []
        if calls:
            if content:
                self.notes["content_with_call"] += 1
            self.pending.extend(calls)
            ids = [call.id for call in self.pending if call.id is not None]
            if len(set(ids)) != len(ids):
                raise RowError(pointer, "duplicate_call_id", f"two calls without a result share an id: {ids}")
        self.messages.append(Message(role, content, calls, weight=weight, reasoning=reasoning))
        self.pointers.append(pointer)

    def reject_answer(self, pointer: str, reason: str) -> None:
        """Refuse an answer that the row marks as failed or rejected, unless such answers are kept.

        Raises:
            RowError: ``answer_failed``.
        """
        if not self.context.keeps_failed:
            raise RowError(pointer, "answer_failed", f"{reason}, which must not be imitated; leave the row out")
        self.notes["failed_kept"] += 1

    def add_system_column(self, value: Any) -> None:
        """Add the text of a row's system column, if there is any, as its system message."""
        text = read_content(value, "system", self.notes)
        if text:
            self.add("system", text, "system")
            self._system = text

    def add_calls(self, calls: tuple[Call, ...], pointer: str, reasoning: str | None = None) -> None:
        """Add calls that are a message of their own; one that follows the assistant's belongs to its turn."""
        last = self.messages[-1] if self.messages else None
        is_same_turn = last is not None and last.role == "assistant" and self._reasoning is None and reasoning is None
        if last is None or not is_same_turn or (last.calls and len(last.calls) != len(self.pending)):
            self.add("assistant", None, pointer, calls, reasoning=reasoning)
            return
        self.messages.pop()
        self.pointers.pop()
        self.pending = []
        self.notes["calls_joined"] += 1
        self.notes["content_with_call"] -= bool(last.content and last.calls)  # counted again
        self.add("assistant", last.content, pointer, (*last.calls, *calls), last.weight, last.reasoning)

    def add_result(
        self,
        content: Any,
        pointer: str,
        call_id: str | None = None,
        name: str | None = None,
        is_error: bool = False,
    ) -> None:
        """Add a result of a call that has none yet, matched by id, else by name, else to the oldest call."""
        content, call_id = read_result_content(content, pointer, self.notes), call_id or None
        self._require_no_reasoning("tool")
        index = find_answered(self.pending, call_id, name)
        if index is None:
            given = f"id {call_id!r}" if call_id is not None else f"name {name!r}" if name is not None else "no id"
            open_calls = ", ".join(f"{c.name} ({c.id})" if c.id else c.name for c in self.pending) or "none"
            reason = f"answers no call (it has {given}; calls without a result: {open_calls})"
            if not any(message.calls for message in self.messages):
                reason += "; no call precedes it, so the beginning of the conversation is missing"
            raise RowError(pointer, "result_without_call", reason)
        if is_error:
            self.notes["error_result"] += 1
            self.failed_calls.add(id(self.pending[index]))
        del self.pending[index]
        self.messages.append(Message("tool", content, call_id=call_id, name=name))
        self.pointers.append(pointer)

    def join_turns(self) -> None:
        """Join messages of the user, or of the system, that follow one another: agents send their context apart."""
        for i in reversed(range(1, len(self.messages))):
            before, message = self.messages[i - 1 : i + 1]
            if before.role == message.role and message.role in ("user", "system"):
                self.messages[i - 1] = replace(before, content=f"{before.content}\n{message.content}")
                del self.messages[i], self.pointers[i]
                self.notes["text_parts_joined"] += 1

    def join_prefilled(self, index: int) -> None:
        """Join an answer, which is message ``index``, with the beginning of it that its request ends with."""
        if 0 < index < len(self.messages):
            before, answer = self.messages[index - 1 : index + 1]
            if before.role == answer.role == "assistant" and not before.calls:
                self.messages[index - 1] = replace(answer, content=f"{before.content or ''}{answer.content or ''}")
                del self.messages[index], self.pointers[index - 1]
                self.notes["prefilled_answer"] += 1

    def take_reasoning(self, text: str, pointer: str, given: str | None = None) -> tuple[str, str | None]:
        """Split the text of an assistant's turn into its content and its reasoning; the content may be empty."""
        content, reasoning = take_reasoning(text, pointer, self.notes, given)
        return content or "", reasoning

    def add_reasoning(self, text: str, pointer: str) -> None:
        """Add a turn that is the reasoning of the assistant's next one."""
        if self._reasoning is not None:
            raise RowError(
                pointer, "reasoning_conflict", f"follows other reasoning, in {self._reasoning[1]}; join them"
            )
        if not text.strip():
            raise RowError(pointer, "reasoning_empty", "empty reasoning; leave the turn out")
        self._reasoning = (text, pointer)

    def _take_pending_reasoning(self, reasoning: str | None, pointer: str) -> str | None:
        if self._reasoning is None:
            return reasoning
        (text, before), self._reasoning = self._reasoning, None
        if reasoning is not None and reasoning != text:
            raise RowError(pointer, "reasoning_conflict", f"has reasoning, and so has {before} before it; keep one")
        return text

    def _require_no_reasoning(self, role: str | None) -> None:
        """Require that every turn of reasoning is followed by a message of the assistant."""
        if self._reasoning is not None:
            follows = "the row ends after it" if role is None else f"the {role}'s message follows"
            reason = f"reasoning that no assistant's turn follows ({follows})"
            raise RowError(self._reasoning[1], "reasoning_role", reason)

    def _check_calls(self) -> None:
        """Require tools for calls, and that no call is left in a text."""
        for message, pointer in zip(self.messages, self.pointers, strict=True):
            if message.calls and not self.tools:
                names = ", ".join(call.name for call in message.calls)
                reason = f"calls {names}, but the row has no tools; --tools FILE adds the agent's"
                raise RowError(pointer, "call_without_tools", reason)
            mark = _CALL_MARKS.search(message.content) if message.role == "assistant" and message.content else None
            if mark is not None and (self.tools or mark.group() == "<tool_call>"):
                reason = f"{mark.group()} in the text, which would be trained as text; write the call in tool_calls"
                raise RowError(pointer, "call_in_text", reason)

    def finish(self, is_question: bool = False) -> ParsedRow:
        """Return the conversation with its locations, warnings and notes; a question needs no assistant's message."""
        self._require_no_reasoning(None)
        if self.failed_calls and not self.context.trains_wrong_turns:
            self._keep_wrong_turns_as_context()  # first, as the next step makes calls anew
        if self._has_null_arguments:
            self._remove_argument_filling()
        if self.notes.get("null_key_dropped"):
            self.notes["filled_row"] = 1
        is_question = is_question or self.context.keeps_requests
        if not is_question and not any(message.role == "assistant" for message in self.messages):
            raise RowError("", "no_assistant", "no assistant message to train on")
        self.tools = self.tools or self.context.default_tools
        self._check_calls()
        conversation = Conversation(tuple(self.messages), self.tools, self.source, self.template_args)
        if self.context.has_escaped_surrogate:
            try:
                json.dumps(conversation.to_openai(), ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError:
                reason = "half a surrogate pair (\\ud800 to \\udfff), which UTF-8 cannot hold"
                raise RowError("", "invalid_utf8", reason) from None
        return ParsedRow(
            conversation,
            self.pointers,
            self.tools_pointer,
            self.tools_suffix,
            warnings=self.warnings,
            notes=+self.notes if self.notes else self.notes,
            call_pointers=self._locate_calls(),
        )

    def _keep_wrong_turns_as_context(self) -> None:
        for i, message in enumerate(self.messages):
            if message.weight and message.calls and all(id(call) in self.failed_calls for call in message.calls):
                self.messages[i] = replace(message, weight=0.0)
                self.notes["wrong_turn_as_context"] += 1

    def _locate_calls(self) -> list[CallPointer]:
        """Return the location of each call; its message's if a reader makes calls without ``read_call``."""
        pointers = [pointer for m, pointer in zip(self.messages, self.pointers, strict=True) for _ in m.calls]
        if len(pointers) == len(self.call_pointers):
            return self.call_pointers
        return [CallPointer(pointer, f"{pointer}.arguments") for pointer in pointers]

    def read_call(self, value: Any, pointer: str, call_id: str | None = None, key: str = "arguments") -> Call:
        """Read a call from an object with ``name`` and, under ``key``, arguments: an object or the string of one."""
        if not isinstance(value, dict):
            raise RowError(
                pointer, "call_shape", f"expected an object with name and arguments, got {describe_value(value)}"
            )
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise RowError(f"{pointer}.name", "call_shape", f"expected a tool's name, got {describe_value(name)}")
        if key not in value:
            keys = ", ".join(map(str, value))
            raise RowError(pointer, "call_shape", f"expected the key {key!r}, got {keys}")
        if not _CALL_KEYS.issuperset(value):
            self.note_unread(value, {*_CALL_KEYS, key}, pointer)
        arguments = self.read_arguments(value[key], f"{pointer}.{key}", name)
        self.call_pointers.append(CallPointer(pointer, f"{pointer}.{key}"))
        return Call(name, arguments, call_id or None)  # some servers write an empty id

    def read_arguments(self, value: Any, pointer: str, name: str) -> dict[str, Any]:
        """Read the arguments of a call to the tool ``name``."""
        is_text = isinstance(value, str)
        if is_text:
            value = self.decode(value, pointer, "arguments_not_json")
        elif isinstance(value, ArrowStruct):
            self.notes["arrow_struct"] += 1
            value = ArgumentFilling(True, self.notes).remove(value, self._find_schema(name), pointer)
        elif self.context.may_have_null and holds_null(value):
            self._has_null_arguments = True
        if not isinstance(value, dict):
            reason = f"expected an object or a string with its JSON, got {describe_value(value)}"
            raise RowError(pointer, "arguments_not_object", reason)
        check_depth(value, pointer)
        if not is_text:
            check_values(value, pointer, "arguments_not_json")
        return value

    def decode(self, text: str, pointer: str, kind: str = "not_json") -> Any:
        """Decode JSON inside the row strictly and count respelled numbers."""
        before = self.context.json.num_respelled
        value = self.context.json.decode(text, pointer, kind)
        self.notes["number_respelled"] += self.context.json.num_respelled - before
        return value

    def decode_prefix(self, text: str, start: int, pointer: str, kind: str = "not_json") -> tuple[Any, int]:
        """Decode JSON at ``start`` of a longer text; returns the value and the index after it."""
        before = self.context.json.num_respelled
        value, end = self.context.json.decode_prefix(text, start, pointer, kind)
        self.notes["number_respelled"] += self.context.json.num_respelled - before
        return value, end

    def decode_literal_prefix(self, text: str, start: int, pointer: str, kind: str = "not_json") -> tuple[Any, int]:
        """Decode JSON at ``start`` of a longer text, or else a Python literal; returns what ``decode_prefix`` does."""
        try:
            return self.decode_prefix(text, start, pointer, kind)
        except RowError as error:
            if error.kind != kind:
                raise
            try:
                value, end = read_python_literal(text, start, pointer, kind)
            except RowError as python_error:
                if python_error.kind != kind:
                    raise
                raise RowError(pointer, kind, f"{error.reason}; {python_error.reason}") from None
        self.notes["python_literal"] += 1
        self.context.may_have_null = True  # None is not searched for
        return value, end

    def set_tools(self, value: Any, pointer: str = "tools") -> None:
        """Read the tools of the row, in any of the forms of ``fctune.data.sources.tool_forms``."""
        self.tools, repeated = self.context.read_tools(value, pointer, self.notes)
        self.tools_pointer = pointer
        if isinstance(value, list) and value and isinstance(value[0], dict) and "function" in value[0]:
            self.tools_suffix = ".function"
        for name in repeated:
            self.warnings.append(RowWarning(pointer, "repeated_tool", f"{name} is declared twice, identically"))

    def set_row_tools(self, row: dict[str, Any]) -> None:
        """Read the tools of a row from its columns, or else from its metadata.

        Raises:
            RowError: ``tools_disagree`` if two columns have different tools; or what ``set_tools`` raises.
        """
        found = ""
        for name in TOOL_COLUMNS:
            if (value := row.get(name)) in (None, "", "null", "[]", []):
                continue
            earlier = self.tools
            self.set_tools(value, name)
            if earlier and self.tools != earlier:
                raise RowError(name, "tools_disagree", f"other tools than in {found}; leave one of the two out")
            found = name
        for name in METADATA_COLUMNS:
            if row.get(name):
                self._read_metadata(row[name], name, has_tools=bool(found))

    def _read_metadata(self, metadata: Any, column: str, has_tools: bool) -> None:
        """Read the tools that a row's metadata holds, unless columns have some, and note its system prompt."""
        if isinstance(metadata, str) and any(f'"{key}"' in metadata for key in ("tools", *_SYSTEM_KEYS)):
            try:
                metadata = self.context.json.decode(metadata)
            except RowError:
                return  # a text of its own
        if not isinstance(metadata, dict):
            return
        self.unread |= {f"{column}.{key}": metadata[key] for key in _SYSTEM_KEYS if metadata.get(key)}
        tools = metadata.get("tools") if not has_tools else None
        if isinstance(tools, str):
            is_listed = tools.lstrip().startswith(("[", "{"))
        else:
            is_listed = isinstance(tools, list) and any(isinstance(tool, dict) for tool in tools)
        if is_listed:
            self.set_tools(tools, f"{column}.tools")

    def note_unread(self, value: dict[str, Any], read: Collection[str], pointer: str) -> None:
        """Note the keys of a message or call that are neither read nor harmless, for ``require_read``."""
        for key, item in value.items():
            if key not in read and item not in (None, "", [], {}) and not is_harmless(str(key)):
                self.unread[f"{pointer}.{key}"] = item

    def _remove_argument_filling(self) -> None:
        """Remove the filling of other calls' arguments, in place, if the row shows any that it cannot have meant."""
        filling = ArgumentFilling(False, self.notes)
        calls = [call for message in self.messages for call in message.calls]
        if not self.notes["null_key_dropped"] and not any(
            filling.has_undeclared(call.arguments, self._find_schema(call.name)) for call in calls
        ):
            return
        for i, message in enumerate(self.messages):
            if any(holds_null(call.arguments) for call in message.calls):
                cleaned = [
                    replace(call, arguments=filling.remove(call.arguments, self._find_schema(call.name), ""))
                    for call in message.calls
                ]
                self.messages[i] = replace(message, calls=tuple(cleaned))

    def _find_schema(self, name: str) -> dict[str, Any] | None:
        tools = self.tools or self.context.default_tools
        return next((tool.parameters for tool in tools if tool.name == name), None)
