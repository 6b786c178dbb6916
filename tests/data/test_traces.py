"""Traces and sessions of agents as rows: every conversation of a file is read, and nothing else is lost in silence."""

from __future__ import annotations

import copy
import gzip
import json
import re
import resource
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fctune.base.errors import DataError
from fctune.cli import main
from fctune.config.sections.data import DataConfig, Fold, SourceConfig
from fctune.data.chunk_encoder import find_split
from fctune.data.conversation import Conversation, Message, Tool
from fctune.data.conversion import convert_source
from fctune.data.encoding import _scan_chunks
from fctune.data.fingerprint import fingerprint_inputs
from fctune.data.prepared_set import prepare
from fctune.data.sources import (
    Defect,
    LeftOut,
    ParsedRow,
    RowReader,
    Selection,
    UnreadRow,
    parse_source,
    read_source,
    scan_source,
)
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.reader import decode_row
from fctune.data.sources.row_formats.registry import read_row
from tests.api_rows import iter_parts
from tests.conftest import TINY_BASE
from tests.trace_rows import (
    CITY_CALL,
    CUT_OFF,
    DEFECTS,
    EXPECTED,
    FAILED,
    FUNCTION,
    ROLLOUT,
    SESSION,
    SHAPES,
    SWE,
    SWE_SMITH,
    TRAJECTORY,
    Row,
    assistant,
    atif,
    event,
    item,
    otlp,
    result,
    said,
    span,
    step,
    text_block,
    text_part,
    use,
    user,
)


def write(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str) -> list[ParsedRow | Defect]:
    reader = RowReader(tools=(Tool(FUNCTION),))
    parsed = [reader.read(row) for row in scan_source(path)]
    return [row for row in parsed if not isinstance(row, LeftOut)]


def count_left_out(path: str) -> Counter[str]:
    """Count the records and parts of a log that are no rows."""
    left_out: Counter[str] = Counter()
    reader = RowReader(tools=(Tool(FUNCTION),))
    for row in scan_source(path):
        left_out.update(row.left_out or {})
        if isinstance(parsed := reader.read(row), LeftOut):
            left_out[parsed.kind] += 1
    return left_out


def describe(message: Message) -> tuple[Any, ...]:
    calls = [(call.name, call.arguments) for call in message.calls]
    return message.role, message.content, message.reasoning, calls, message.weight


def texts(row: ParsedRow | Defect) -> list[str | None]:
    assert isinstance(row, ParsedRow), row
    return [message.content for message in row.conversation.messages]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_trace_of_a_conversation_reads_as_the_same_and_converts(shape: str, tmp_path: Path) -> None:
    rows, row_format = SHAPES[shape]
    path = write(tmp_path / "in.jsonl", rows)
    (row,) = read(path)
    assert isinstance(row, ParsedRow), row
    expected = EXPECTED[1:] if row_format == "claude_code" else EXPECTED  # such files have no system prompt
    assert list(map(describe, row.conversation.messages)) == expected
    assert [tool.function for tool in row.conversation.tools] == [FUNCTION]
    assert row.row_format == row_format
    report = convert_source(path, tmp_path / "out.jsonl", tools=(Tool(FUNCTION),))
    assert (report.rows, report.converted, report.num_skipped) == (1, 1, 0)
    (again,) = read(str(tmp_path / "out.jsonl"))
    assert isinstance(again, ParsedRow)
    assert list(map(describe, again.conversation.messages)) == expected
    # The name of the format may be given, too.
    named = [RowReader(row_format, tools=(Tool(FUNCTION),)).read(row) for row in scan_source(path, row_format)]
    assert [r.conversation.digest() for r in named if isinstance(r, ParsedRow)] == [row.conversation.digest()]


# The last keys of texts that may change, or of objects that may have others, without changing what is read.
DESCRIPTIONS = {"gen_ai.operation.name", "gen_ai.request.model"} | frozenset(
    re.findall(
        r"\w+",
        "name schema_version session_id version timestamp type uuid parentUuid sessionId cwd id model signature "
        "stop_reason promptSource attributionSkill kind encrypted_content instance_id step_id stdout "
        "agent message_type action traj_id patch",
    )
)
HOLDERS = frozenset(("metrics", "final_metrics", "usage", "origin", "toolUseResult", "attributes"))
# Lines that are no part of a conversation, and are left out.
LEFT_OUT = ("summary", "turn_context", "event_msg")
OTHER = "Altogether other words"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.startswith("OTLP")])
def test_no_text_of_a_trace_is_dropped_without_a_word(shape: str, tmp_path: Path) -> None:
    """Every text that is changed, and every text under a new key, changes what is read or is a known description."""
    rows, _ = SHAPES[shape]
    (told,) = read(write(tmp_path / "rows.jsonl", rows))
    assert isinstance(told, ParsedRow)
    found = set()
    for place, value in iter_parts(rows):
        if not isinstance(value, str | dict) or not place:
            continue
        changed: Any = copy.deepcopy(rows)
        keys = place if isinstance(value, str) else (*place, "note")
        holder = changed
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = OTHER
        try:
            again = read(write(tmp_path / "rows.jsonl", changed))
        except DataError:
            continue
        conversations = [row.conversation.to_openai() for row in again if isinstance(row, ParsedRow)]
        is_same = len(again) == 1 and conversations == [told.conversation.to_openai()]
        line_type = rows[place[0]].get("type")
        is_left_out = line_type in LEFT_OUT or (line_type == "session_meta" and place[1:] in ((), ("payload",)))
        names = [key for key in place if isinstance(key, str)]
        known = DESCRIPTIONS if isinstance(value, str) else HOLDERS
        if is_same and not is_left_out and not (names and names[-1] in known):
            found.add((place, isinstance(value, str)))
    assert not found


ANSWERED = {"gen_ai.output.messages": CUT_OFF, "gen_ai.response.finish_reasons": None}
FAILURES: dict[str, tuple[list[Any], str]] = {
    "a failed call": ([otlp(span(status=FAILED))], "status"),
    "a call with an error": ([otlp(span(**{"error.type": "timeout"}))], "attributes.error.type"),
    "an answer that was cut off": (
        [otlp(span(**ANSWERED))],
        "attributes.gen_ai.output.messages[0].finish_reason",
    ),
    "an answer that was cut off, as the span says": (
        [otlp(span(**{"gen_ai.response.finish_reasons": ["max_tokens"]}), is_text=False)],
        "attributes.gen_ai.response.finish_reasons",
    ),
    "a run that did not solve its task": ([{**SWE, "resolved": False}], "resolved"),
    "a run of SWE-smith that did not": ([{**SWE_SMITH, "resolved": False, "tools": SWE["tools"]}], "resolved"),
    "a run of SWE-smith, with its messages as JSON": (
        [{**SWE_SMITH, "messages": json.dumps(TRAJECTORY), "resolved": "False", "tools": SWE["tools"]}],
        "resolved",
    ),
    "a run of nebius that did not": ([{**SWE, "target": False}], "target"),
}


@pytest.mark.parametrize("claim", FAILURES)
def test_failed_answers_and_runs_are_left_out_unless_asked_for(claim: str, tmp_path: Path) -> None:
    rows, pointer = FAILURES[claim]
    is_run = "resolved" in rows[0] or "target" in rows[0]
    path = write(tmp_path / "rows.jsonl", [*rows, SWE if is_run else otlp(span("Again?"))])
    (row,) = read(path)
    assert isinstance(row, ParsedRow)
    (unread, _) = scan_source(path)
    with pytest.raises(RowError) as caught:
        read_row(decode_row(unread.value, ReadContext()), "auto", ReadContext())
    assert (caught.value.kind, caught.value.pointer) == ("answer_failed", pointer)
    report = convert_source(path, tmp_path / "out.jsonl")
    assert (report.rows, report.left_out) == (1, {"answer_failed": 1})
    kept = convert_source(path, tmp_path / "out.jsonl", selection=Selection(failed="keep"))
    assert (kept.rows, kept.left_out, kept.notes["failed_kept"]) == (2, {}, 1)


@pytest.mark.parametrize("claim", DEFECTS)
def test_what_cannot_be_learned_from_is_a_defect_with_its_place(claim: str, tmp_path: Path) -> None:
    rows, kind, pointer = DEFECTS[claim]
    path = write(tmp_path / "rows.jsonl", rows)
    (defect,) = parse_source(path) if kind == "call_without_tools" else read(path)
    assert isinstance(defect, Defect), defect
    assert (defect.kind, defect.pointer) == (kind, pointer)


@pytest.mark.parametrize("reason", ["STOP", "TOOL_CALLS", "COMPLETE", "function_call"])
def test_reasons_of_an_end_are_read_as_each_provider_writes_them(reason: str, tmp_path: Path) -> None:
    answer = [{**span()["gen_ai.output.messages"][0], "finish_reason": reason}]
    attributes = span(**{"gen_ai.response.finish_reasons": [reason], "gen_ai.output.messages": answer})
    assert len(read(write(tmp_path / "trace.jsonl", [otlp(attributes)]))) == 1


def test_spans_that_are_no_answers_are_counted_and_a_file_of_such_spans_alone_is_refused(tmp_path: Path) -> None:
    tool_span = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "get_weather"}
    agent_span = span() | {"gen_ai.operation.name": "invoke_agent"}
    without = {"gen_ai.operation.name": "chat"}
    lines = [otlp({"http.method": "GET"}), otlp(agent_span, span(), without), otlp(span("Again?")), otlp(tool_span)]
    first, second = read(write(tmp_path / "trace.jsonl", lines))
    assert isinstance(first, ParsedRow)
    assert isinstance(second, ParsedRow)
    assert first.conversation.source.endswith(":2")
    assert second.conversation.source.endswith(":3")
    assert count_left_out(str(tmp_path / "trace.jsonl")) == {"span_left_out": 3, "span_without_content": 1}
    with pytest.raises(DataError, match=r"no conversations\. Found only: spans and records that are not .*\(1\)"):
        read(write(tmp_path / "other.jsonl", [otlp(tool_span)]))


def test_spans_with_an_object_of_attributes_are_sorted_out_as_those_of_otlp(tmp_path: Path) -> None:
    def flat(attributes: Row, **keys: Any) -> Row:
        return {"name": "s", "context": {"trace_id": "0x5b", "span_id": "0xee"}, "attributes": attributes, **keys}

    agent, tool = (span() | {"gen_ai.operation.name": name} for name in ("invoke_agent", "execute_tool"))
    chat = {"gen_ai.operation.name": "chat"}
    details = {"name": "gen_ai.client.inference.operation.details", "attributes": span("In an event?")}
    others = [
        *(flat({"http.method": "GET"}), flat(agent), flat({**tool, "gen_ai.input.messages": None}), flat(chat)),
        {"name": "t", "attributes": {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "get_weather"}},
    ]
    lines = [*others, flat(span()), flat(chat, events=[details]), flat({**chat, "gen_ai.prompt.0.content": "Hi"})]
    left_out = {"span_left_out": 4, "span_without_content": 1}
    for rows in (lines, lines[::-1]):
        path = write(tmp_path / "trace.jsonl", rows)
        found = read(path)
        assert sorted(texts(row)[1] or "" for row in found if isinstance(row, ParsedRow)) == [
            *("In an event?", "Weather in Oslo?")
        ]
        assert [row.kind for row in found if isinstance(row, Defect)] == ["message_shape"]
        assert count_left_out(path) == left_out
    path = write(tmp_path / "mixed.jsonl", [{"messages": TRAJECTORY}, *others])
    assert len(read(path)) == 1
    assert count_left_out(path) == left_out


def test_subagents_of_a_trajectory_are_conversations_of_their_own(tmp_path: Path) -> None:
    child = atif(steps=[step(1, "user", "Find it."), step(2, "agent", "Found.")])
    aside = step(5, "agent", "Aside.", extra={"is_sidechain": True})
    document = atif(steps=[*atif()["steps"], aside], subagent_trajectories=[child])
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(document, indent=2))
    main, sub = read(str(path))
    assert texts(main)[-1] == "It is 3 degrees."
    assert texts(sub) == ["Find it.", "Found."]
    assert count_left_out(str(path)) == {"sidechain_step": 1}


def test_steps_that_are_copied_or_no_models_are_context(tmp_path: Path) -> None:
    steps = [
        step(1, "user", "?"),
        step(2, "agent", "old", is_copied_context=True),
        step(3, "user", "And?"),
        step(4, "agent", "fixed", llm_call_count=0),
        step(5, "user", "So?"),
        step(6, "agent", "new"),
    ]
    (row,) = read(write(tmp_path / "rows.jsonl", [atif(steps=steps)]))
    assert isinstance(row, ParsedRow)
    weights = {m.content: m.weight for m in row.conversation.messages if m.role == "assistant"}
    assert weights == {"old": 0.0, "fixed": 0.0, "new": 1.0}


def test_observations_of_actions_that_are_no_calls_are_turns_of_the_user(tmp_path: Path) -> None:
    seen = {"results": [{"content": "a.txt"}, {"content": "b.txt"}]}
    silent = step(3, "agent", "", tool_calls=[CITY_CALL], observation={"results": [{"source_call_id": "c1"}]})
    steps = [step(1, "user", "?"), step(2, "agent", "ls", observation=seen), silent, step(4, "agent", "Done.")]
    (row,) = read(write(tmp_path / "rows.jsonl", [atif(steps=steps)]))
    assert texts(row) == ["?", "ls", "a.txt\nb.txt", None, "", "Done."]
    assert isinstance(row, ParsedRow)
    assert [message.role for message in row.conversation.messages][2] == "user"
    assert row.notes["observation_as_user"] == 2


def reply(uuid: str, parent: str, text: str, message_id: str | None = None, **keys: Any) -> Row:
    identity = {} if message_id is None else {"id": message_id}
    return event(uuid, parent, assistant(text_block(text), **identity), **keys)


def parallel_calls(session: str, first: str, second: str, parent: str | None = None) -> list[Row]:
    """Two calls at once with their results, each an event of its own; ids of calls and messages are of their turn."""
    a, b = assistant(use("c1", first), id="m" if parent is None else parent), assistant(use("c2", second))
    b["id"] = a["id"]
    keys = {"sessionId": session}
    return [
        event(f"{first}-a", parent, user(f"{first}?"), **keys),
        event(f"{first}-b", f"{first}-a", a, **keys),
        event(f"{first}-c", f"{first}-b", b, **keys),
        event(f"{first}-d", f"{first}-b", user([result("c1", f"in {first}")]), **keys),
        event(f"{first}-e", f"{first}-c", user([result("c2", f"in {second}")]), **keys),
        reply(f"{first}-end", f"{first}-e", "A.", **keys),
    ]


SUMMARY = "The user asked about Oslo."
PATHS: dict[str, tuple[list[Row], list[list[str | None]]]] = {
    "an edited message begins a branch": (
        [
            event("a", None, user("A?")),
            reply("b", "a", "A."),
            event("c", "b", user("C?")),
            reply("d", "c", "C."),
            event("e", "b", user("E?")),
            reply("f", "e", "E."),
        ],
        [["A?", "A.", "C?", "C."], ["A?", "A.", "E?", "E."]],
    ),
    "parallel results are of one turn, though their parents differ": (
        [
            event("a", None, user("A?")),
            event("b", "a", assistant(use("c1"), id="m")),
            event("c", "b", assistant(use("c2", "Rome"), id="m")),
            event("d", "b", user([result("c1", "3")])),
            event("e", "c", user([result("c2", "20")])),
            reply("f", "e", "A."),
        ],
        [["A?", None, "3", "20", "A."]],
    ),
    "a subagent is apart": (
        [
            event("a", None, user("A?")),
            event("s", None, user("S?"), isSidechain=True),
            reply("t", "s", "S.", isSidechain=True),
            reply("b", "a", "A."),
        ],
        [["A?", "A."], ["S?", "S."]],
    ),
    "a compaction begins a conversation with its summary": (
        [
            event("a", None, user("A?")),
            reply("b", "a", "A."),
            event("x", None, type="system", subtype="compact_boundary", content="Compacted", logicalParentUuid="b"),
            event("y", "x", user(SUMMARY), isCompactSummary=True),
            event("c", "y", user("C?")),
            reply("d", "c", "C."),
        ],
        [["A?", "A."], [f"{SUMMARY}\nC?", "C."]],
    ),
    "two sessions of a file are apart": (
        [
            event("a", None, user("A?")),
            event("p", None, user("P?"), sessionId="t"),
            reply("b", "a", "A."),
            reply("q", "p", "P.", sessionId="t"),
        ],
        [["A?", "A."], ["P?", "P."]],
    ),
    "a session that repeats another is read once": (
        [
            event("a", None, user("A?")),
            reply("b", "a", "A."),
            event("a", None, user("A?")),
            reply("b", "a", "A."),
        ],
        [["A?", "A."]],
    ),
    "two sessions of a file may use the same ids of calls and messages": (
        [*parallel_calls("s", "Oslo", "Rome"), *parallel_calls("t", "Kyiv", "Bonn")],
        [["Oslo?", None, "in Oslo", "in Rome", "A."], ["Kyiv?", None, "in Kyiv", "in Bonn", "A."]],
    ),
    "later turns may use the ids of earlier calls": (
        [*parallel_calls("s", "Oslo", "Rome"), *parallel_calls("s", "Kyiv", "Bonn", "Oslo-end")],
        [["Oslo?", None, "in Oslo", "in Rome", "A.", "Kyiv?", None, "in Kyiv", "in Bonn", "A."]],
    ),
    "a call without a result gets none of another session": (
        [
            *parallel_calls("s", "Oslo", "Rome"),
            event("a", None, user("A?"), sessionId="t"),
            event("b", "a", assistant(use("c1"), id="m1"), sessionId="t"),
            event("c", "b", user("[Request interrupted]"), sessionId="t"),
            reply("d", "c", "A.", sessionId="t"),
        ],
        [["Oslo?", None, "in Oslo", "in Rome", "A."], ["A?", None, "[Request interrupted]", "A."]],
    ),
    "a copy of a session in the same file adds nothing to its messages": (
        [
            event("a", None, user("A?"), sessionId="s"),
            reply("b", "a", "A.", sessionId="s", message_id="m1"),
            event("a", None, user("A?"), sessionId="t"),
            reply("b", "a", "A.", sessionId="t", message_id="m1"),
            event("c", "b", user("C?"), sessionId="t"),
            reply("d", "c", "C.", sessionId="t", message_id="m2"),
        ],
        [["A?", "A.", "C?", "C."]],
    ),
    "messages with an empty id are apart": (
        [
            event("a", None, user("A?")),
            event("b", "a", assistant(text_block("A."), id="")),
            event("c", "b", user("C?")),
            event("d", "c", assistant(text_block("C."), id="")),
        ],
        [["A?", "A.", "C?", "C."]],
    ),
    "an id that is no text is none": (
        [event("a", None, user("A?")), event("b", "a", assistant(text_block("A."), id=["m"]))],
        [["A?", "A."]],
    ),
    "events in a circle are read": ([event("a", "b", user("A?")), reply("b", "a", "A.")], [["A?", "A."]]),
    "events that hang on a message are no branches": (
        [
            event("a", None, user("A?")),
            reply("b", "a", "A."),
            event("x", "b", type="system", subtype="turn_duration"),
            event("y", "b", type="system", subtype="turn_duration"),
            event("z", "a", type="system", subtype="informational"),
        ],
        [["A?", "A."]],
    ),
    "the application's own errors are no answers": (
        [
            event("a", None, user("A?")),
            event("b", "a", assistant(text_block("API Error"), model="<synthetic>"), isApiErrorMessage=True),
            event("c", "b", user("Again?")),
            reply("d", "c", "A."),
        ],
        [["A?\nAgain?", "A."]],
    ),
}


@pytest.mark.parametrize("claim", PATHS)
def test_each_path_of_a_session_is_a_conversation(claim: str, tmp_path: Path) -> None:
    events, expected = PATHS[claim]
    rows = read(write(tmp_path / "session.jsonl", events))
    assert list(map(texts, rows)) == expected


def test_events_that_are_no_messages_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "session.jsonl", [*SESSION, {"type": "file-history-snapshot", "snapshot": {}}])
    assert len(read(path)) == 1
    assert count_left_out(path) == {"session_event": 2}


def test_an_answer_that_was_cut_off_is_context(tmp_path: Path) -> None:
    cut = event("b", "a", assistant(text_block("It is"), id="m", stop_reason="max_tokens"))
    events = [event("a", None, user("A?")), cut, event("c", "b", user("Go on")), reply("d", "c", "3 degrees.")]
    (row,) = read(write(tmp_path / "session.jsonl", events))
    assert isinstance(row, ParsedRow)
    assert [m.weight for m in row.conversation.messages if m.role == "assistant"] == [0.0, 1.0]


STOPPED = "[Request interrupted by user]"
REFUSED = "[Request interrupted by user for tool use]"
INTERRUPTED: dict[str, tuple[list[Row], list[float]]] = {
    "the text that follows says so": (
        [reply("b", "a", "It is"), event("c", "b", user([text_block(STOPPED)])), reply("d", "c", "3 degrees.")],
        [0.0, 1.0],
    ),
    "the text that follows is no list": (
        [reply("b", "a", "It is"), event("c", "b", user(STOPPED)), reply("d", "c", "3 degrees.")],
        [0.0, 1.0],
    ),
    "the user's next event names the message": (
        [
            reply("b", "a", "It is", "m"),
            event("c", "b", user("Stop."), interruptedMessageId="m"),
            reply("d", "c", "3 degrees."),
        ],
        [0.0, 1.0],
    ),
    "the user refused its call": (
        [
            event("b", "a", assistant(use("c1"), id="m", stop_reason="tool_use")),
            event("c", "b", user([result("c1", "The user does not want this.")])),
            event("d", "c", user([text_block(REFUSED)])),
            reply("e", "d", "3 degrees."),
        ],
        [0.0, 1.0],
    ),
    "a turn with its result was finished": (
        [
            event("b", "a", assistant(use("c1"), id="m")),
            event("c", "b", user([result("c1")])),
            event("d", "c", user([text_block(STOPPED)])),
            reply("e", "d", "3 degrees."),
        ],
        [1.0, 1.0],
    ),
    "others without a reason of their end are finished": (
        [reply("b", "a", "It is 3."), event("c", "b", user("Rome?")), reply("d", "c", "3 degrees.")],
        [1.0, 1.0],
    ),
}


@pytest.mark.parametrize("claim", INTERRUPTED)
def test_an_answer_that_the_user_interrupted_is_context(claim: str, tmp_path: Path) -> None:
    events, weights = INTERRUPTED[claim]
    (row,) = read(write(tmp_path / "session.jsonl", [event("a", None, user("A?")), *events]))
    assert isinstance(row, ParsedRow)
    assert [m.weight for m in row.conversation.messages if m.role == "assistant"] == weights
    assert row.notes["step_as_context"] == weights.count(0.0)


def meta(session: str) -> Row:
    return {"type": "session_meta", "payload": {"id": session}}


def taken_back(count: Any) -> Row:
    return {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": count}}


ROLLOUTS: dict[str, tuple[list[Row], list[list[str | None]]]] = {
    "a compaction keeps a history": (
        [
            meta("s"),
            said("user", "A?"),
            said("assistant", "A."),
            {
                "type": "compacted",
                "payload": {"message": "", "replacement_history": [said("user", SUMMARY)["payload"]]},
            },
            said("user", "C?"),
            said("assistant", "C."),
        ],
        [["A?", "A."], [f"{SUMMARY}\nC?", "C."]],
    ),
    "a compaction keeps a summary": (
        [
            meta("s"),
            said("user", "A?"),
            said("assistant", "A."),
            {"type": "compacted", "payload": {"message": SUMMARY}},
            said("user", "C?"),
            said("assistant", "C."),
        ],
        [["A?", "A."], [f"{SUMMARY}\nC?", "C."]],
    ),
    "a session begins without the summary of the one before": (
        [
            meta("s"),
            said("user", "A?"),
            said("assistant", "A."),
            {"type": "compacted", "payload": {"message": SUMMARY}},
            meta("t"),
            said("user", "P?"),
            said("assistant", "P."),
        ],
        [["A?", "A."], ["P?", "P."]],
    ),
    "two sessions of a file are apart": (
        [
            meta("s"),
            said("user", "A?"),
            said("assistant", "A."),
            meta("t"),
            said("user", "P?"),
            said("assistant", "P."),
        ],
        [["A?", "A."], ["P?", "P."]],
    ),
    "turns that the user took back are left out": (
        [
            meta("s"),
            said("user", "<environment_context>x</environment_context>"),
            said("user", "A?"),
            said("assistant", "A."),
            *(said(role, text) for text in ("B", "C") for role in ("user", "assistant")),
            taken_back(2),
            said("user", "D?"),
            said("assistant", "D."),
        ],
        [["<environment_context>x</environment_context>\nA?", "A.", "D?", "D."]],
    ),
}


@pytest.mark.parametrize("claim", ROLLOUTS)
def test_each_part_of_a_rollout_is_a_conversation(claim: str, tmp_path: Path) -> None:
    lines, expected = ROLLOUTS[claim]
    assert list(map(texts, read(write(tmp_path / "rollout.jsonl", lines)))) == expected


def test_what_follows_a_compaction_is_read_whatever_came_before(tmp_path: Path) -> None:
    compacted = {"type": "compacted", "payload": {"message": SUMMARY}}
    lines = [meta("s"), said("user", "A?"), said("assistant", "A."), taken_back(7), compacted]
    defect, row = read(write(tmp_path / "rollout.jsonl", [*lines, said("user", "C?"), said("assistant", "C.")]))
    assert isinstance(defect, Defect)
    assert texts(row) == [f"{SUMMARY}\nC?", "C."]


PLAIN: Row = {"messages": [{"role": "user", "content": "Plain?"}, {"role": "assistant", "content": "Plain."}]}
ROLLOUT_LINES = [meta("s"), said("user", "A?"), said("assistant", "A.")]


@pytest.mark.parametrize("log", [SESSION, ROLLOUT_LINES], ids=["claude_code", "codex"])
def test_rows_of_another_format_after_a_session_are_read_and_before_it_are_told(log: list[Row], tmp_path: Path) -> None:
    after = read(write(tmp_path / "after.jsonl", [*log, PLAIN]))
    assert sum(texts(row) == ["Plain?", "Plain."] for row in after) == 1
    assert len(after) == 2
    before = read(write(tmp_path / "before.jsonl", [PLAIN, *log]))
    assert texts(before[0]) == ["Plain?", "Plain."]
    assert all(isinstance(row, Defect) for row in before[1:])
    assert any("rows of another format; give each its own file" in str(row) for row in before[1:])


def test_items_that_the_user_took_back_are_counted(tmp_path: Path) -> None:
    lines = [meta("s"), said("user", "A?"), said("assistant", "A."), taken_back(1), said("user", "B?")]
    path = write(tmp_path / "rollout.jsonl", [*lines, said("assistant", "B.")])
    assert [texts(row) for row in read(path)] == [["B?", "B."]]
    assert count_left_out(path) == {"session_event": 1, "taken_back_item": 2}


@pytest.mark.parametrize("count", [2, -1, None, "1"])
def test_a_rollout_of_which_unknown_turns_were_taken_back_is_a_defect(count: Any, tmp_path: Path) -> None:
    lines = [meta("s"), said("user", "A?"), said("assistant", "A."), taken_back(count)]
    (defect,) = read(write(tmp_path / "rollout.jsonl", lines))
    assert isinstance(defect, Defect)
    assert (defect.line, defect.kind) == (4, "history_missing")


@pytest.mark.parametrize("base", [5, ["a", 5], {"text": {"a": "b c"}}])
def test_instructions_of_a_rollout_must_be_text(base: Any, tmp_path: Path) -> None:
    start = {"type": "session_meta", "payload": {"id": "s", "base_instructions": base}}
    (defect,) = read(write(tmp_path / "rollout.jsonl", [start, *ROLLOUT[1:]]))
    assert isinstance(defect, Defect)
    assert defect.kind == "content_not_text"


def test_a_call_with_free_text_has_it_as_an_argument(tmp_path: Path) -> None:
    call = item(type="custom_tool_call", name="get_weather", call_id="c1", input="Oslo", status="completed")
    output = item(type="custom_tool_call_output", call_id="c1", output="3 degrees")
    lines = [meta("s"), said("user", "A?"), call, output, said("assistant", "A.")]
    (row,) = read(write(tmp_path / "rollout.jsonl", lines))
    assert isinstance(row, ParsedRow)
    assert row.conversation.messages[1].calls[0].arguments == {"input": "Oslo"}
    assert row.notes["custom_call"] == 1


def test_a_call_of_the_shell_that_the_api_defines_is_one_of_a_function(tmp_path: Path) -> None:
    action = {"type": "exec", "command": ["ls"], "timeout_ms": 1000}
    call = item(type="local_shell_call", call_id="c1", status="completed", action=action)
    output = item(type="function_call_output", call_id="c1", output="a.txt")
    passthrough = {"internal_chat_message_metadata_passthrough": {"turn_id": "the first turn"}}
    asked = said("user", "A?")
    lines = [meta("s"), {**asked, "payload": asked["payload"] | passthrough}, call, output, said("assistant", "A.")]
    (row,) = read(write(tmp_path / "rollout.jsonl", lines))
    assert isinstance(row, ParsedRow)
    (found,) = row.conversation.messages[1].calls
    assert (found.name, found.arguments) == ("local_shell", {"command": ["ls"], "timeout_ms": 1000})


def test_a_session_may_begin_with_an_event_of_any_type(tmp_path: Path) -> None:
    title = {"type": "ai-title", "aiTitle": "Weather in Oslo", "sessionId": "s"}
    path = write(tmp_path / "session.jsonl", [title, *SESSION])
    assert len(read(path)) == 1
    assert count_left_out(path) == {"session_event": 2}


def test_a_line_that_cannot_be_read_leaves_no_rollout_with_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    lines = [json.dumps(row) for row in [meta("s"), said("user", "A?"), said("assistant", "A.")]]
    others = [json.dumps(row) for row in [meta("t"), said("user", "P?"), said("assistant", "P.")]]
    path.write_text("\n".join([*lines[:2], '{"type": "response_item", ', lines[2], *others]))
    defect, other = read(str(path))
    assert isinstance(defect, Defect)
    assert (defect.line, defect.kind) == (3, "not_json")
    assert texts(other) == ["P?", "P."]


def test_texts_of_agents_are_read(tmp_path: Path) -> None:
    trajectory = [
        {"role": "system", "system_prompt": "Be brief.", "text": None, "mask": False},
        {"role": "user", "system_prompt": None, "text": "Fix it.", "mask": False},
        {"role": "ai", "system_prompt": None, "text": "ls", "mask": True},
    ]
    row = {"instance_id": "x__1", "trajectory": trajectory, "target": True, "eval_logs": "1 failed", "resolved": True}
    (parsed,) = parse_source(write(tmp_path / "rows.jsonl", [row]))
    assert isinstance(parsed, ParsedRow)
    assert texts(parsed) == ["Be brief.", "Fix it.", "ls"]


def test_a_file_may_hold_a_line_as_a_document_or_a_compressed_stream_of_them(tmp_path: Path) -> None:
    text, other = ("".join(json.dumps(otlp(span(f"{name} {i}?"))) + "\n" for i in range(3)).encode() for name in "ab")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    with pa.output_stream(tmp_path / "b.jsonl.zst", compression="zstd") as stream:
        stream.write(other)
    (tmp_path / "c.json").write_text(json.dumps(otlp(span(), span("Again?")), indent=1))
    rows = read(str(tmp_path))
    assert len(rows) == 8
    assert all(isinstance(row, ParsedRow) for row in rows)
    broken = (tmp_path / "b.jsonl.zst").read_bytes()[:-12]
    (tmp_path / "d.zst").write_bytes(broken)
    with pytest.raises(DataError, match="the Zstandard stream ends early"):
        read(str(tmp_path / "d.zst"))


def test_files_that_describe_sessions_are_no_rows(tmp_path: Path) -> None:
    project = tmp_path / "projects" / "-home-me-work"
    (project / "s" / "subagents").mkdir(parents=True)
    write(project / "s.jsonl", SESSION)
    write(project / "sessions-index.json", [{"version": 1, "entries": [], "originalPath": "/home/me/work"}])
    write(project / "s" / "subagents" / "agent-a.jsonl", [event("p", None, user("P?")), reply("q", "p", "P.")])
    write(project / "s" / "subagents" / "agent-a.meta.json", [{"agentType": "Explore"}])
    assert sorted(texts(row)[0] or "" for row in read(str(project.parent))) == ["P?", "Weather in Oslo?"]


@pytest.mark.parametrize("row_format", ["auto", "atif"])
def test_files_of_a_directory_that_are_no_rows_are_counted(row_format: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "result.json", [{"task_name": name, "reward": 1.0}])
        (tmp_path / name / "config.json").write_text(json.dumps({"agent": {"name": "x"}, "job": name}, indent=1))
        (tmp_path / name / "trajectory.json").write_text(json.dumps(atif(session_id=name), indent=1))
    report = convert_source(str(tmp_path), tmp_path / "out.rows", row_format, fold="never")
    assert (report.rows, report.converted, report.left_out) == (2, 2, {"file_left_out": 4})
    for name in ("a", "b"):
        (tmp_path / name / "trajectory.json").unlink()
    found = r"config\.json:1: rows of unknown format" if row_format == "auto" else "Found only: JSON files"
    with pytest.raises(DataError, match=found):
        convert_source(str(tmp_path), tmp_path / "out.rows", row_format)


def test_rows_of_unknown_format_in_a_directory_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": TRAJECTORY}])
    (tmp_path / "b.json").write_text(json.dumps([{"question": "?", "reply": "!"}] * 2))
    with pytest.raises(DataError, match=r"b\.json:1: rows of unknown format"):
        read(str(tmp_path))
    write(tmp_path / "b.json", [{"chosen": TRAJECTORY, "rejected": TRAJECTORY}])
    with pytest.raises(DataError, match=r"b\.json:1: rows of unknown format.* Rows of preference pairs need"):
        read(str(tmp_path))
    (tmp_path / "b.json").unlink()
    write(tmp_path / "b.jsonl", [{"question": "?", "reply": "!"}])
    with pytest.raises(DataError, match=r"b\.jsonl:1: rows of unknown format"):
        read(str(tmp_path))


def test_a_directory_of_many_small_files_in_folders_is_read_by_name(tmp_path: Path) -> None:
    for i in range(30):
        folder = tmp_path / f"project-{i % 3}"
        folder.mkdir(exist_ok=True)
        write(folder / f"{i:04}.jsonl", [event("a", None, user(f"{i}?")), reply("b", "a", f"{i}.")])
    rows = read(str(tmp_path))
    names = [row.conversation.source for row in rows if isinstance(row, ParsedRow)]
    assert len(names) == 30
    assert names == sorted(names)


def test_expanded_rows_are_read_in_other_processes(tmp_path: Path) -> None:
    import pickle

    for row in scan_source(write(tmp_path / "session.jsonl", SESSION)):
        copied: UnreadRow = pickle.loads(pickle.dumps(row))
        parsed = RowReader(tools=(Tool(FUNCTION),)).read(copied)
        assert isinstance(parsed, ParsedRow)
        assert isinstance(parsed.conversation, Conversation)


def run_of(city: str, num_calls: int, tools: Any = None) -> list[Row]:
    """The records of an agent's run: each has all messages before it."""
    messages: list[Row] = []
    records = []
    for i in range(num_calls):
        messages.append({"role": "user", "parts": [text_part(f"{city} {i}?")]})
        answer = {"role": "assistant", "parts": [text_part(f"{city} {i}.")]}
        changes = {"gen_ai.input.messages": [*messages], "gen_ai.output.messages": [answer]}
        records.append(otlp(span(**changes, **({"gen_ai.tool.definitions": tools} if tools else {}))))
        messages.append(answer)
    return records


OTHER_TOOL = [{"type": "function", **FUNCTION, "name": "get_time"}]
FOLDED: dict[str, tuple[list[Row], list[int], int]] = {
    # records, the messages of each conversation that is kept (with the system prompt), records that are folded
    "a run is its last record": (run_of("Oslo", 4), [9], 3),
    "in any order": (run_of("Oslo", 4)[::-1], [9], 3),
    "runs that interleave": (
        [r for pair in zip(run_of("Oslo", 3), run_of("Rome", 3), strict=True) for r in pair],
        [7, 7],
        4,
    ),
    "equal records are one": (run_of("Oslo", 1) * 3, [3], 2),
    "branches stay apart": (
        [
            *run_of("Oslo", 2),
            otlp(span(**{"gen_ai.input.messages": [{"role": "user", "parts": [text_part("Oslo 0?")]}]})),
        ],
        [5, 3],
        1,
    ),
    "other tools are another conversation": ([*run_of("Oslo", 1), *run_of("Oslo", 2, OTHER_TOOL)], [3, 5], 1),
    "a failed call is neither folded nor kept": (
        [*run_of("Oslo", 2), otlp(span(status=FAILED))],
        [5],
        1,
    ),
}


@pytest.mark.parametrize("claim", FOLDED)
def test_records_that_others_continue_are_folded(claim: str, tmp_path: Path) -> None:
    records, lengths, num_folded = FOLDED[claim]
    path = write(tmp_path / "trace.jsonl", records)
    rows = read(path)
    kept = [row for row in rows if isinstance(row, ParsedRow)]
    assert [len(row.conversation.messages) for row in kept] == lengths
    left_out = count_left_out(path)
    assert left_out["folded_record"] + left_out["repeated_record"] == num_folded
    assert len(rows) + left_out.total() == len(records)
    assert len(list(scan_source(path, fold="never"))) == len(records)
    report = convert_source(path, tmp_path / "out.jsonl")
    changed = 1 if "other tools" in claim else 0
    assert (report.converted, report.left_out) == (len(lengths), left_out)
    assert report.warnings["tools_changed"] == changed
    assert report.rows + report.left_out.total() == len(records)


CALLING = {"role": "assistant", "content": None, "tool_calls": [TRAJECTORY[2]["tool_calls"][0]]}


def exchange(messages: list[Row], answer: Row) -> Row:
    """A record of OpenAI's chat completions."""
    request = {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    return {"request": request, "response": {"choices": [{"message": answer, "finish_reason": "stop"}]}}


def reasoned(answer: Row, reasoning: str) -> Row:
    return {**answer, "reasoning_content": reasoning}


def test_reasoning_that_clients_do_not_send_back_is_read_from_the_records_that_have_it(tmp_path: Path) -> None:
    asked, called = [user("Weather in Oslo?")], {**CALLING, "content": ""}
    answered = [*asked, called, TRAJECTORY[3]]
    records = [
        exchange(asked, reasoned(CALLING, "Ask the tool.")),
        exchange(answered, reasoned(TRAJECTORY[4], "It said so.")),
    ]
    for order in (records, records[::-1]):
        path = write(tmp_path / "rows.jsonl", order)
        (row,) = read(path)
        assert isinstance(row, ParsedRow)
        assert [m.reasoning for m in row.conversation.messages] == [None, "Ask the tool.", None, "It said so."]
        assert row.notes["reasoning_from_records"] == 1
        assert count_left_out(path) == {"folded_record": 1}
        report = convert_source(path, tmp_path / "out.jsonl")
        assert (report.converted, report.notes["reasoning_from_records"]) == (1, 1)


def test_records_that_differ_in_the_ids_of_calls_alone_are_one_conversation(tmp_path: Path) -> None:
    asked, records = [user("Weather in Oslo?")], []
    for number in range(2):
        (call,) = CALLING["tool_calls"]
        called = {**CALLING, "tool_calls": [{**call, "id": f"call_{number}"}]}
        result = {"role": "tool", "tool_call_id": f"call_{number}", "content": "3 degrees"}
        named = {**result, "name": "get_weather"} if number else result
        records += [exchange(asked, called), exchange([*asked, called, named], TRAJECTORY[4])]
    path = write(tmp_path / "rows.jsonl", records)
    assert len(read(path)) == 1
    assert count_left_out(path) == {"folded_record": 2, "repeated_record": 1}
    assert count_left_out(write(tmp_path / "first.jsonl", records[::2])) == {"repeated_record": 1}
    source = SourceConfig(path=path)
    rows = [row for row in parse_source(path, fold="never") if isinstance(row, ParsedRow)]
    assert len({find_split(row, source) for row in rows}) == 1


def test_records_of_the_same_answer_with_other_reasoning_stay_apart(tmp_path: Path) -> None:
    asked, last = [user("Hi")], {"role": "assistant", "content": "Bye."}
    hello = {"role": "assistant", "content": "Hello."}
    records = [exchange(asked, reasoned(hello, thought)) for thought in ("Greet.", "Be kind.", "Be kind.")]
    records.append(exchange([*asked, hello, user("Bye")], last))
    rows = [row for row in read(write(tmp_path / "rows.jsonl", records)) if isinstance(row, ParsedRow)]
    assert [[m.reasoning for m in row.conversation.messages if m.role == "assistant"] for row in rows] == [
        ["Greet."],
        ["Be kind."],
        [None, None],
    ]


@pytest.mark.parametrize("rest", [[], [said("user", "Thanks."), said("assistant", "You're welcome.")]])
def test_what_follows_the_last_answer_keeps_no_record(rest: list[Row], tmp_path: Path) -> None:
    interrupted = [*ROLLOUT, said("user", "[Request interrupted]")]
    write(tmp_path / "a.jsonl", interrupted)
    write(tmp_path / "b.jsonl", [*interrupted, said("user", "And Rome?"), *rest])
    (row,) = read(str(tmp_path))
    assert isinstance(row, ParsedRow)
    assert texts(row)[-1] == ("You're welcome." if rest else "[Request interrupted]\nAnd Rome?")
    assert count_left_out(str(tmp_path))["folded_record" if rest else "repeated_record"] == 1


def test_turns_that_only_an_earlier_record_trains_are_not_folded_away(tmp_path: Path) -> None:
    first, others = atif()["steps"][:4], [step(5, "user", "And Rome?"), step(6, "agent", "20 degrees.")]
    copied = [{**s, "is_copied_context": True} if s["source"] == "agent" else s for s in first]
    path = write(tmp_path / "rows.jsonl", [atif(steps=first), atif(steps=[*copied, *others])])
    rows = [row for row in read(path) if isinstance(row, ParsedRow)]
    weights = [[m.weight for m in row.conversation.messages if m.role == "assistant"] for row in rows]
    assert weights == [[1.0, 1.0], [0.0, 0.0, 1.0]]


@pytest.mark.parametrize(("fold", "num_conversations"), [("auto", 80), ("never", 160)])
def test_records_and_branches_of_a_run_are_on_one_side_of_a_split(
    fold: Fold, num_conversations: int, tmp_path: Path, tiny_base: Path
) -> None:
    records = []
    for i in range(40):
        run = run_of(f"City {i}", 3)
        branch = json.loads(json.dumps(run[1]).replace(f"City {i} 1?", "Another?"))
        records += [*run, branch]
    path = write(tmp_path / "trace.jsonl", records)
    cities = {
        int(row.digest(), 16): row.messages[1].content
        for row in read_source(path, fold="never")
        if isinstance(row, Conversation)
    }
    config = DataConfig(sources=[SourceConfig(path=path, fold=fold)], validation_share=0.3, seq_len=2048)
    prepared = prepare(config, tiny_base, tmp_path / "prepared")
    sides = [{cities[int(prepared.digests[i])] for i in prepared.packs[split][0]} for split in ("train", "validation")]
    assert prepared.counts.conversations == num_conversations
    assert [len(side) for side in sides] == [40 - len(sides[1]), len(sides[1])]
    assert sides[1]
    assert not sides[0] & sides[1]


def test_written_rows_of_a_run_stay_together_and_what_was_left_out_is_counted(tmp_path: Path) -> None:
    records = []
    for i in range(12):
        run = run_of(f"City {i}", 3)
        branch = json.loads(json.dumps(run[1]).replace(f"City {i} 1?", "Another?"))
        records += [*run, branch]
    path = write(tmp_path / "trace.jsonl", records)
    converted, augmented, counts = (tmp_path / name for name in ("rows.jsonl", "more.jsonl", "counts.json"))
    convert_source(path, converted)
    assert main(["data", "augment", path, str(augmented), "--kinds", "paraphrase=50%", "--json", str(counts)]) == 0
    assert json.loads(counts.read_text())["left_out"] == {"folded_record": 24}
    source = SourceConfig(path=path)
    expected = Counter(find_split(row, source) for row in parse_source(path) if isinstance(row, ParsedRow))
    assert len(expected) == 12
    for file in (converted, augmented):
        rows = [row for row in parse_source(str(file)) if isinstance(row, ParsedRow)]
        assert Counter(find_split(row, source) for row in rows) == expected


def make_requests(shape: str, num_requests: int = 3) -> list[Row]:
    """The requests of an agent's run without their responses: each but the first ends with what follows an answer."""
    messages, requests = [user("Weather in Oslo?")], []
    for i in range(num_requests):
        requests.append([*messages])
        messages += [assistant(use(f"c{i}")), user([result(f"c{i}")])]
    if shape == "anthropic":
        tool = {"name": "get_weather", "input_schema": FUNCTION["parameters"]}
        return [{"max_tokens": 9, "stop_sequences": [], "tools": [tool], "messages": m} for m in requests]
    items = [
        [
            {"type": "message", "role": "user", "content": message["content"]}
            if isinstance(message["content"], str)
            else {"type": "function_call", "name": "get_weather", "arguments": "{}", "call_id": block["id"]}
            if (block := message["content"][0])["type"] == "tool_use"
            else {"type": "function_call_output", "call_id": block["tool_use_id"], "output": "3 degrees"}
            for message in request
        ]
        for request in requests
    ]
    return [{"input": listed, "tools": [{"type": "function", **FUNCTION}]} for listed in items]


@pytest.mark.parametrize("shape", ["anthropic", "responses"])
def test_a_log_of_requests_is_one_conversation(shape: str, tmp_path: Path) -> None:
    requests = make_requests(shape)
    for order in (requests, requests[::-1], [requests[0], *requests]):
        path = write(tmp_path / "rows.jsonl", order)
        (row,) = read(path)
        assert isinstance(row, ParsedRow), row
        assert len(row.conversation.messages) == 5
        assert count_left_out(path).total() == len(order) - 1
    (defect,) = read(write(tmp_path / "rows.jsonl", requests[:1]))
    assert isinstance(defect, Defect)
    assert defect.kind == "no_assistant"


def test_a_log_behind_other_rows_is_folded_and_they_are_not(tmp_path: Path) -> None:
    plain = [{"messages": [user(f"{i}?"), {"role": "assistant", "content": "x"}]} for i in range(11)]
    longer = [{"messages": [*row["messages"], *TRAJECTORY[1:2], TRAJECTORY[4]]} for row in plain]
    write(tmp_path / "a.jsonl", [*plain, *longer])
    write(tmp_path / "b.jsonl", make_requests("anthropic"))
    assert len(read(str(tmp_path))) == 23
    assert count_left_out(str(tmp_path)) == {"folded_record": 2}
    assert len(list(scan_source(str(tmp_path), fold="never"))) == 25
    report = convert_source(str(tmp_path), tmp_path / "out.rows", fold="always")
    assert (report.rows, report.left_out) == (12, {"folded_record": 13})


def test_rows_that_are_always_folded_keep_their_run(tmp_path: Path) -> None:
    begun = [user("Hi"), {"role": "assistant", "content": "Hello."}]
    branches = [{"messages": [*begun, user(text), {"role": "assistant", "content": "x"}]} for text in ("A?", "B?")]
    path = write(tmp_path / "rows.jsonl", [{**row, "tools": SWE["tools"]} for row in ({"messages": begun}, *branches)])
    converted, augmented = tmp_path / "out.jsonl", tmp_path / "more.jsonl"
    convert_source(path, converted, fold="always")
    kinds = ["--kinds", "paraphrase=100%", "--fold", "always"]
    assert main(["data", "augment", path, str(augmented), *kinds]) == 0
    source = SourceConfig(path=path, fold="always")
    rows = [row for row in parse_source(path, fold="always") if isinstance(row, ParsedRow)]
    (split,) = {find_split(row, source) for row in rows}
    for file in (converted, augmented):
        written = [row for row in parse_source(str(file)) if isinstance(row, ParsedRow)]
        assert [row.run for row in written] == [f"{split:016x}"] * 2
    assert all("metadata" not in row.raw for row in rows)


def test_a_large_file_of_sessions_is_read_from_disk_and_a_full_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rows.jsonl", SESSION)
    expected = read(path)
    monkeypatch.setattr("fctune.data.sources.row_formats.claude_code._MEMORY_BYTES", 1)
    assert read(path) == expected
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(DataError, match=r"events of a large file of sessions cannot be written there .*TMPDIR"):
            read(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_session_that_repeats_another_is_folded_across_files(tmp_path: Path) -> None:
    names = dict(zip("abcde", "vwxyz", strict=True))
    resumed = [
        {**event, "uuid": names[event["uuid"]], "parentUuid": names.get(event["parentUuid"] or ""), "sessionId": "t"}
        for event in SESSION[1:]
    ]
    write(tmp_path / "1.jsonl", SESSION)
    write(tmp_path / "2.jsonl", [*resumed, event("f", "z", user("And Rome?")), reply("g", "f", "20 degrees.")])
    (row,) = read(str(tmp_path))
    assert isinstance(row, ParsedRow)
    assert len(row.conversation.messages) == 6
    assert count_left_out(str(tmp_path)) == {"folded_record": 1, "session_event": 1}


def test_rows_that_are_no_log_are_folded_only_if_asked_to(tmp_path: Path) -> None:
    turns = [user("A?"), {"role": "assistant", "content": "A."}, user("B?"), {"role": "assistant", "content": "B."}]
    path = write(tmp_path / "rows.jsonl", [{"messages": turns[:2]}, {"messages": turns}])
    assert len(list(parse_source(path))) == 2
    (row,) = parse_source(path, fold="always")
    assert texts(row) == ["A?", "A.", "B?", "B."]


def test_a_truncated_log_is_refused_after_its_rows(tmp_path: Path) -> None:
    text = "".join(json.dumps(record) + "\n" for record in run_of("Oslo", 3)).encode()
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(text)[:-9])
    rows = parse_source(str(path), fold="never")
    found = [next(rows), next(rows)]
    with pytest.raises(DataError, match="ends early"):
        next(rows)
    folded = parse_source(str(path))
    assert texts(next(folded)) == texts(found[-1])
    with pytest.raises(DataError, match="ends early"):
        next(folded)


FOLDS: tuple[Fold, ...] = ("auto", "always", "never")


def test_the_config_says_whether_records_are_folded_and_the_prepared_set_depends_on_it(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", run_of("Oslo", 3))
    configs = [DataConfig(sources=[SourceConfig(path=path, fold=fold)]) for fold in FOLDS]
    assert len({fingerprint_inputs(config, TINY_BASE)[0] for config in configs}) == 3
    rows = [sum(len(chunk.rows) for chunk in _scan_chunks(config)) for config in configs]
    assert rows == [1, 1, 3]
