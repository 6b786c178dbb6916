"""Trajectories in the Agent Trajectory Interchange Format, versions 1.0 to 1.8.

https://www.harborframework.com/docs/trajectory-format. A document is a conversation; those of its subagents are rows of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fctune.data.conversation import Call
from fctune.data.sources.columns import require_read_keys
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_content import read_content, read_string
from fctune.data.sources.row_formats.base import FileRow, LeftOut, LogRow, RowFormat

_STEP_KEYS = (
    *("step_id", "timestamp", "source", "model_name", "reasoning_effort", "message", "reasoning_content"),
    *("tool_calls", "observation", "metrics", "is_copied_context", "llm_call_count", "extra"),
)
_RESULT_KEYS = ("source_call_id", "content", "subagent_trajectory_ref", "extra")


def _is_trajectory(row: dict[str, Any]) -> bool:
    version = row.get("schema_version")
    return "steps" in row and "agent" in row and isinstance(version, str) and version.startswith("ATIF-v1.")


def _expand(rows: Iterator[FileRow]) -> Iterator[LogRow]:
    """Yield each trajectory, followed by those of its subagents, without steps that other agents made."""
    for line, row in rows:
        if isinstance(row, RowError):
            yield line, row
            continue
        waiting = [row]
        while waiting:
            document = waiting.pop(0)
            children = document.get("subagent_trajectories") or []
            document = {key: value for key, value in document.items() if key != "subagent_trajectories"}
            steps = document.get("steps")
            if isinstance(steps, list):
                document["steps"] = [step for step in steps if not _is_sidechain(step)]
                for _ in range(len(steps) - len(document["steps"])):
                    yield line, LeftOut("sidechain_step")
            yield line, document
            if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
                reason = f"expected a list of trajectories, got {describe_value(children)}"
                yield line, RowError("subagent_trajectories", "message_shape", reason)
                continue
            waiting = children + waiting


def _is_sidechain(step: Any) -> bool:
    """Return True for a step of a subagent in the list of its parent, as converters of sessions mark it."""
    extra = step.get("extra") if isinstance(step, dict) else None
    return isinstance(extra, dict) and extra.get("is_sidechain") is True


def _read(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    agent = row["agent"]
    if not isinstance(agent, dict):
        raise RowError("agent", "message_shape", f"expected an object, got {describe_value(agent)}")
    builder.note_unread(agent, ("name", "version", "model_name", "tool_definitions", "extra"), "agent")
    tools = agent.get("tool_definitions")
    builder.set_tools([] if tools is None else tools, "agent.tool_definitions")
    steps = row["steps"]
    if not isinstance(steps, list) or not steps:
        raise RowError("steps", "message_shape", f"expected a list of steps, got {describe_value(steps)}")
    for i, step in enumerate(steps):
        if not isinstance(step, dict):
            raise RowError(f"steps[{i}]", "message_shape", f"expected an object, got {describe_value(step)}")
        _add_step(step, f"steps[{i}]", builder)
    if builder.notes["observation_as_user"]:
        builder.join_turns()
    return builder.finish()


def _add_step(step: dict[str, Any], at: str, builder: RowBuilder) -> None:
    builder.note_unread(step, _STEP_KEYS, at)
    source = step.get("source")
    message = read_content(step.get("message"), f"{at}.message", builder.notes) or ""
    if source == "agent":
        _add_turn(step, message, at, builder)
    elif source in ("user", "system"):
        for key in ("tool_calls", "reasoning_content"):
            if step.get(key):
                raise RowError(
                    f"{at}.{key}", "message_shape", f"only the agent may have {key}; this step is the {source}'s"
                )
        if message or step.get("observation") is None:
            builder.add(source, message, at)
    else:
        raise RowError(f"{at}.source", "unknown_role", f"expected user, agent or system, got {describe_value(source)}")
    observation = step.get("observation")
    if observation is None:
        return
    results = observation.get("results") if isinstance(observation, dict) else None
    if not isinstance(results, list):
        reason = f"expected an object with a list of results, got {describe_value(observation)}"
        raise RowError(f"{at}.observation", "message_shape", reason)
    require_read_keys(observation, ("results",), f"{at}.observation")
    for j, result in enumerate(results):
        where = f"{at}.observation.results[{j}]"
        if not isinstance(result, dict):
            raise RowError(where, "message_shape", f"expected an object, got {describe_value(result)}")
        require_read_keys(result, _RESULT_KEYS, where)
        _add_result(result, where, builder)


def _add_result(result: dict[str, Any], at: str, builder: RowBuilder) -> None:
    """Add a result; that of an action which is no call, such as a command in the agent's text, is the user's turn."""
    content, call_id = result.get("content"), read_string(result.get("source_call_id"), f"{at}.source_call_id")
    if content is None:
        if result.get("subagent_trajectory_ref"):
            reason = (
                "null, with a reference to a subagent in its place: the result that the agent saw is not in the row"
            )
            raise RowError(f"{at}.content", "content_not_text", reason)
        content = ""
    if call_id is not None or builder.pending:
        builder.add_result(content, f"{at}.content", call_id)
    elif text := read_content(content, f"{at}.content", builder.notes):
        builder.notes["observation_as_user"] += 1
        builder.add("user", text, f"{at}.content")


def _add_turn(step: dict[str, Any], message: str, at: str, builder: RowBuilder) -> None:
    given = step.get("reasoning_content") or None
    if given is not None and not isinstance(given, str):
        raise RowError(f"{at}.reasoning_content", "reasoning_not_text", f"expected text, got {describe_value(given)}")
    text, reasoning = builder.take_reasoning(message, f"{at}.message", given)
    listed = step.get("tool_calls") or []
    if not isinstance(listed, list):
        raise RowError(f"{at}.tool_calls", "call_shape", f"expected a list, got {describe_value(listed)}")
    calls = tuple(_read_call(call, f"{at}.tool_calls[{j}]", builder) for j, call in enumerate(listed))
    # Steps copied from an earlier trajectory are trained there; those without a call of the model are a program's.
    is_context = step.get("is_copied_context") is True or step.get("llm_call_count") == 0
    builder.notes["step_as_context"] += is_context
    builder.add("assistant", text or (None if calls else ""), at, calls, 0.0 if is_context else 1.0, reasoning)


def _read_call(call: Any, at: str, builder: RowBuilder) -> Call:
    if not isinstance(call, dict):
        raise RowError(at, "call_shape", f"expected an object, got {describe_value(call)}")
    renamed = {"name" if key == "function_name" else key: value for key, value in call.items()}
    call_id = read_string(renamed.get("tool_call_id"), f"{at}.tool_call_id")
    return builder.read_call({key: v for key, v in renamed.items() if key != "tool_call_id"}, at, call_id)


ROW_FORMAT = RowFormat(
    name="atif",
    keys="schema_version ATIF-v1.x, agent, steps",
    matches=_is_trajectory,
    read=_read,
    expand=_expand,
    columns=("agent", "steps", "subagent_trajectories"),
    harmless=("schema_version", "session_id", "trajectory_id", "notes", "final_metrics", "continued_trajectory_ref"),
    is_log=True,  # a continuation repeats the steps before it
    priority=12,
)
