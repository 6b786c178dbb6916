"""Training rows of the real-model benchmark from two public repositories: other people's tools, requests and dialogues.

    git clone https://github.com/qiancheng0/ToolRL && git -C ToolRL checkout 8cee13ec0ca7
    git clone https://github.com/google-research-datasets/dstc8-schema-guided-dialogue sgd
    git -C sgd checkout e852981ae349

- ToolRL's supervised rows (``dataset/rlla_4k_raw/rlla_sft.json``, Apache-2.0): 400 questions drawn from ToolACE, xLAM
  and Hammer, with one to eight tools, a third of them with masked names. Their calls are kept, their reasoning is not.
- The Schema-Guided Dialogues (CC-BY-SA-4.0): people's wordings of dialogues about 26 services, in which the assistant
  asks for missing values, calls, and reports results.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_public_sets import is_given
from fctune.base.errors import DataError
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.tool_schema import TYPE_NAMES, ToolSet

_TOOL = re.compile(r"^\d+\. Name: (.*)\nDescription: (.*)\nParameters: (\{.*\})$", re.MULTILINE)
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<response>(.*?)</response>", re.DOTALL)
_QUESTION = re.compile(r"\*\*Dialogue Records History\*\*\n<user>(.*)</user>\s*", re.DOTALL)
_NOT_A_NAME = re.compile(r"[^\w.-]+")
_MAX_RESULTS = 2  # of a service call that are shown
_MAX_TURNS = 14
_MAX_LENGTH = 400  # characters of an answer without calls; longer ones argue about functions


def read_public_rows(
    folder: Path | None, num_questions: int, num_dialogues: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Read questions and dialogues from a directory with both clones.

    Raises:
        DataError: Some are wanted, and there is no directory, or too few are in it.
    """
    if not num_questions + num_dialogues:
        return [], []
    if folder is None:
        raise DataError(
            "The mixture has rows of public repositories. Pass --public-rows DIR (benchmarks/real_public_rows.py has "
            "the commands that make it), or --mixture public=0 guided=0."
        )
    questions = read_tool_questions(folder / "ToolRL/dataset/rlla_4k_raw/rlla_sft.json") if num_questions else []
    # Twice as many, since some have tools of the benchmarks.
    dialogues = read_dialogues(folder / "sgd", 2 * num_dialogues, 0) if num_dialogues else []
    return questions, dialogues


def read_tool_questions(file: Path) -> list[Conversation]:
    """Read ToolRL's rows of one question, answered by calls that fit their tools, or by text.

    Args:
        file: ``rlla_sft.json``.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        found = [_read_question(row["instruction"], row["input"], row["output"], i) for i, row in enumerate(rows)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: not ToolRL's rlla_sft.json ({type(error).__name__}: {error}).") from None
    return [row for row in found if row is not None]


def _read_question(instruction: str, history: str, output: str, number: int) -> Conversation | None:
    if (question := _QUESTION.fullmatch(history)) is None or "<user>" in question[1]:
        return None
    try:
        called = [json.loads(line) for block in _CALLS.findall(output) for line in block.splitlines() if line.strip()]
    except ValueError:  # a few calls are cut
        return None
    calls = tuple(Call(_to_name(one["name"]), one["parameters"]) for one in called)
    given: dict[str, set[str]] = {}
    for call in calls:  # the rows do not say which parameters are required, but one that a call omits is not
        given[call.name] = given.get(call.name, set(call.arguments)) & set(call.arguments)
    tools = [_make_tool(found[1], found[2], found[3], given) for found in _TOOL.finditer(instruction)]
    schemas = ToolSet(tools)
    if not tools or len({tool.name for tool in tools}) < len(tools) or any(map(schemas.find_errors, calls)):
        return None
    if calls:
        answer = Message("assistant", calls=calls)
    elif (response := _RESPONSE.search(output)) is not None and len(response[1]) <= _MAX_LENGTH:
        answer = Message("assistant", response[1].strip())
    else:
        return None
    return Conversation((Message("user", question[1].strip()), answer), tuple(tools), f"toolrl:{number}")


def _make_tool(name: str, description: str, parameters: str, given: Mapping[str, set[str]]) -> Tool:
    name, properties, required = _to_name(name), {}, []
    for key, value in json.loads(parameters).items():
        kind = str(value["type"])
        properties[key] = {**_to_schema(kind), "description": value["description"]}
        if (default := value.get("default", "")) != "":
            properties[key]["description"] += f" Default: {default}."
        elif "optional" not in kind and key in given.get(name, {key}):
            required.append(key)
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool({"name": name, "description": description, "parameters": schema})


def _to_name(name: str) -> str:
    return _NOT_A_NAME.sub("_", name.strip()).strip("_")


def _to_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a Python type such as "int, optional" or "List[List[float]]"."""
    outer, _, inner = kind.removesuffix(", optional").partition("[")
    name = TYPE_NAMES.get(outer.strip().lower())
    if name is None:
        return {}
    if name == "array" and outer == "List" and inner.endswith("]"):
        return {"type": "array", "items": _to_schema(inner[:-1])}
    return {"type": name}


def read_dialogues(folder: Path, num_dialogues: int, seed: int) -> list[Conversation]:
    """Read dialogues of the training share in which a service is called, as conversations with tools.

    A service is the tools of a dialogue, among those of other services that it does not use.

    Args:
        folder: A clone of the Schema-Guided Dialogues.
        num_dialogues: Number of dialogues.
        seed: Seed of their choice.

    Raises:
        DataError: The files cannot be read, or have too few dialogues.
    """
    rng = random.Random(f"dialogues:{seed}")
    try:
        services = {one["service_name"]: one for one in json.loads((folder / "train/schema.json").read_text("utf-8"))}
        files = sorted(folder.glob("train/dialogues_*.json"))
        rng.shuffle(files)
        rows: list[Conversation] = []
        for file in files:
            if len(rows) >= num_dialogues:
                break
            dialogues = json.loads(file.read_text("utf-8"))
            rng.shuffle(dialogues)
            # A file has the dialogues of a few services.
            rows += list(_convert_some(dialogues, services, max(2, num_dialogues // 12), rng))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: not the Schema-Guided Dialogues ({type(error).__name__}: {error}).") from None
    if len(rows) < num_dialogues:
        raise DataError(
            f"{folder}: has {len(rows)} dialogues of {_MAX_TURNS} turns at most; {num_dialogues} are needed."
        )
    return rows[:num_dialogues]


def _convert_some(
    dialogues: Sequence[dict[str, Any]], services: Mapping[str, dict[str, Any]], limit: int, rng: random.Random
) -> Iterator[Conversation]:
    for dialogue in dialogues:
        if limit and len(dialogue["turns"]) <= _MAX_TURNS and (row := _convert(dialogue, services, rng)) is not None:
            limit -= 1
            yield row


def _convert(
    dialogue: dict[str, Any], services: Mapping[str, dict[str, Any]], rng: random.Random
) -> Conversation | None:
    tools = [tool for name in dialogue["services"] for tool in _list_tools(services[name])]
    known = {tool.name: tool for tool in tools}
    messages: list[Message] = []
    for number, turn in enumerate(dialogue["turns"]):
        if turn["speaker"] == "USER":
            messages.append(Message("user", turn["utterance"]))
            continue
        for frame in turn["frames"]:
            if (made := frame.get("service_call")) is None:
                continue
            types = known[made["method"]].parameters["properties"]
            arguments = {key: _to_value(value, types[key]) for key, value in made["parameters"].items()}
            text = "\n".join(message.content or "" for message in messages)
            if not all(is_given(value, text, types[key]) for key, value in arguments.items()):
                return None  # such as the year of a date
            call = Call(made["method"], arguments, f"call_{number}")
            results = json.dumps(frame["service_results"][:_MAX_RESULTS], ensure_ascii=False)
            messages += [Message("assistant", calls=(call,)), Message("tool", results, call_id=call.id)]
        messages.append(Message("assistant", turn["utterance"]))
    calls = [call for message in messages for call in message.calls]
    if not calls or any(ToolSet(tools).find_errors(call) for call in calls):
        return None
    while messages[-1].role != "assistant" or _is_farewell(messages):
        messages.pop()
    others = [
        _list_tools(services[name])
        for name in sorted(services)
        if _domain(name) not in map(_domain, dialogue["services"])
    ]
    for more in rng.sample(others, rng.choice((0, 1, 2))):
        tools += [tool for tool in more if tool.name not in known]
    rng.shuffle(tools)
    return Conversation(tuple(messages), tuple(tools), f"sgd:{dialogue['dialogue_id']}")


def _is_farewell(messages: Sequence[Message]) -> bool:
    """Return True for a last answer after which no call was made or reported."""
    return (
        len(messages) > 3
        and not messages[-1].calls
        and messages[-2].role == "user"
        and not any(message.calls for message in messages[-3:])
    )


def _domain(service: str) -> str:
    return service.partition("_")[0]


def _list_tools(service: Mapping[str, Any]) -> list[Tool]:
    """Return a service's intents as tools."""
    slots = {slot["name"]: slot for slot in service["slots"]}
    tools = []
    for intent in service["intents"]:
        properties = {}
        for key in (*intent["required_slots"], *intent["optional_slots"]):
            slot = slots[key]
            values = slot["possible_values"] if slot["is_categorical"] else []
            schema: dict[str, Any] = {"type": "string", "description": slot["description"]}
            if set(values) == {"True", "False"}:
                schema["type"] = "boolean"
            elif values and all(value.isdecimal() for value in values):
                schema["type"] = "integer"
            elif values:
                schema["enum"] = values
            properties[key] = schema
        parameters = {"type": "object", "properties": properties, "required": list(intent["required_slots"])}
        tools.append(Tool({"name": intent["name"], "description": intent["description"], "parameters": parameters}))
    return tools


def _to_value(value: str, schema: Mapping[str, Any]) -> Any:
    if schema["type"] == "boolean" and value in ("True", "False"):
        return value == "True"
    return int(value) if schema["type"] == "integer" and value.isdecimal() else value
