"""Other people's tools and requests, from two public sets, as pairs of cases for ``benchmarks.real_model``.

A pair offers the same tools twice: with a request that one of them fits, and with a request from another domain, for
which no call is due. So refusing where a tool fits and calling where none fits are two numbers, and neither habit
gains.

    mkdir sets && cd sets
    git clone https://github.com/tangqiaoyu/ToolAlpaca && git -C ToolAlpaca checkout 189069998d64
    git clone https://github.com/AlibabaResearch/DAMO-ConvAI && git -C DAMO-ConvAI checkout 483554eae102

Both were chosen once, and only the test measures them, so no setting is chosen by them; no training row has one of
their tools or requests. They are natural wordings for tools with descriptions, with reference calls, under licenses
that permit evaluation, and not the source of any training row:

- ToolAlpaca (Apache-2.0): requests to 20 web APIs, 10 of them real, with all functions of the API on offer; the
  requests were drafted by a model.
- API-Bank (Apache-2.0): annotated dialogues, in which values come from several turns or from earlier results.

Not chosen: RestGPT's sets have no arguments, NexusRaven's own are about three security services, and the Schema-Guided
Dialogues are a source of training rows.

Answers are judged by the strict typed match. Cases whose reference cannot be that exact are left out and counted: a
value that neither the conversation nor an enumeration of the schema gives, such as a country's code or an assumed
year, calls that depend on one another's results, and calls that do not fit their tools. Nothing of the sets is part of
this project.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real_rows import write_rows
from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.tool_schema import ToolSet

NO_CALL = "_no_call"
_NUM_TOOLS = 4  # that API-Bank's cases offer at least
_MAX_OF_TOOL = 10  # cases that call the same tool; a quarter of API-Bank's calls fetch a token
_MIN_WORDS = 6  # of a request in another domain; "Hi there" fits no tool either
# With these on offer, a request from any domain may be met.
_FIT_ANYTHING = ("WolframAlpha", "SearchEngine", "Wiki", "DocumentQA", "ToolSearcher", "GetToday")
_TYPES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "list": {"type": "array"},
    "list(str)": {"type": "array", "items": {"type": "string"}},
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a public set with its reference.

    Attributes:
        conversation: The messages before the calls, and the tools on offer.
        calls: The reference calls.
        domains: Domains of the tools on offer.
    """

    conversation: Conversation
    calls: tuple[Call, ...]
    domains: frozenset[str]


class Opening(NamedTuple):
    """The user's first message in a conversation, and the domains of the tools that it needs."""

    text: str
    domains: frozenset[str]


class Found(NamedTuple):
    """The content of a public set: its usable requests, all openings, and the number of calls left out by reason."""

    requests: list[Request]
    openings: list[Opening]
    left_out: Counter[str]


class PublicSet(NamedTuple):
    """A public set, with the digest of the files that are read, so that every measurement is of the same cases.

    Attributes:
        folder: Name of the clone.
        revision: The commit.
        files: Patterns of the files that are read.
        digest: Digest of their names and contents.
        read: Reads the clone.
    """

    folder: str
    revision: str
    files: tuple[str, ...]
    digest: str
    read: Callable[[Path], Found]


def read_toolalpaca(folder: Path) -> Found:
    """Read ToolAlpaca's evaluation sets, ``data/eval_real.json`` and ``data/eval_simulated.json``.

    Args:
        folder: The clone.
    """
    found = Found([], [], Counter())
    for name in ("eval_real", "eval_simulated"):
        for api in json.loads((folder / "data" / f"{name}.json").read_text(encoding="utf-8")):
            if api["Name"] not in _FIT_ANYTHING:
                _read_api(api, found)
    return found


def _read_api(api: dict[str, Any], found: Found) -> None:
    # Keys are the client's to add; no request gives them.
    secrets = frozenset(api.get("Authentication") or ())
    tools = tuple(_read_functions(json.loads(api["Documentation"]), secrets))
    domains = frozenset((api["Category"],))
    for text, steps in zip(api["Instructions"], api["Golden_Answers"], strict=True):
        if not {step["Action"] for step in steps} <= {tool.name for tool in tools}:
            found.left_out["calls a tool that is not on offer"] += 1  # another API's tools may fit such a request
            continue
        found.openings.append(Opening(text.strip(), domains))
        prompt = Conversation((Message("user", text.strip()),), tools)
        try:
            calls = tuple(
                Call(step["Action"], {k: v for k, v in json.loads(step["Action_Input"]).items() if k not in secrets})
                for step in steps
            )
        except ValueError:  # ${...} in place of an earlier result
            found.left_out["depends on a result"] += 1
            continue
        if len({call.name for call in calls}) > 1:
            found.left_out["several steps"] += 1
        else:
            _add(Request(prompt, calls, domains), found)


def _read_functions(document: dict[str, Any], secrets: frozenset[str]) -> Iterator[Tool]:
    """Yield the operations of an OpenAPI document as tools, without the parameters that authenticate a client."""

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            target: Any = document
            for part in node["$ref"].split("/")[1:]:
                target = target[part]
            return resolve(target)
        return {key: resolve(value) for key, value in node.items()}

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method not in ("get", "post", "put", "patch", "delete"):
                continue
            properties: dict[str, Any] = {}
            required: list[str] = []
            for one in resolve(operation.get("parameters", [])):
                description = {"description": one["description"]} if one.get("description") else {}
                properties[one["name"]] = {**one.get("schema", {"type": "string"}), **description}
                required += [one["name"]] if one.get("required") else []
            for content in resolve(operation.get("requestBody", {})).get("content", {}).values():
                properties |= content["schema"].get("properties", {})
                required += content["schema"].get("required", [])
            parameters = {
                "type": "object",
                "properties": {key: schema for key, schema in properties.items() if key not in secrets},
                "required": [key for key in required if key not in secrets],
            }
            name = operation.get("operationId") or f"{re.sub('[{}]', '', path.strip('/')).replace('/', '_')}_{method}"
            about = operation.get("description") or operation.get("summary") or ""
            yield Tool({"name": name, "description": about, "parameters": parameters})


def read_api_bank(folder: Path) -> Found:
    """Read the dialogues of API-Bank that name their tools, ``api-bank/lv1-lv2-samples/level-1-given-desc``.

    Tools are the classes in ``api-bank/apis``, whose source is parsed and not run. A case offers the tools of its
    dialogue, and others up to four from other domains.

    Args:
        folder: The clone.
    """
    root = folder / "api-bank"
    tools: dict[str, Tool] = {}
    for file in sorted((root / "apis").glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (tool := _read_class(node)) is not None:
                tools[tool.name] = tool
    with (root / "data" / "all_apis.csv").open(encoding="utf-8-sig", newline="") as lines:
        # The columns are Chinese: name of the class, and field of use.
        domains = {row["类名"]: row["应用场景"] for row in csv.DictReader(lines)}
    found = Found([], [], Counter())
    for file in sorted((root / "lv1-lv2-samples" / "level-1-given-desc").glob("*.jsonl")):
        lines_read = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        _read_dialogue(lines_read, file.stem, tools, domains, found)
    return found


def _read_class(node: ast.ClassDef) -> Tool | None:
    """Return the tool that a class describes; None if it is none."""
    values: dict[str, Any] = {}
    optional: list[str] = []
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="description" | "input_parameters" as name)], value=value):
                values[name] = ast.literal_eval(value)
            case ast.FunctionDef(name="call", args=arguments):
                names = [argument.arg for argument in arguments.args]
                optional = names[len(names) - len(arguments.defaults) :]
    if values.keys() != {"description", "input_parameters"}:
        return None
    properties = {
        key: {**_TYPES[schema["type"]], "description": schema["description"]}
        for key, schema in values["input_parameters"].items()
    }
    required = [key for key in properties if key not in optional]
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool({"name": node.name, "description": values["description"], "parameters": parameters})


def _read_dialogue(
    lines: Sequence[dict[str, Any]],
    name: str,
    tools: Mapping[str, Tool],
    domains: Mapping[str, str],
    found: Found,
) -> None:
    called = dict.fromkeys(line["api_name"] for line in lines if line["role"] == "API")
    if not called:
        return
    if not all(one in tools and one in domains and one not in _FIT_ANYTHING for one in called):
        found.left_out["unknown tool, or one that fits anything"] += 1
        return
    needed = frozenset(domains[one] for one in called)
    if lines[0]["role"] == "User":
        found.openings.append(Opening(lines[0]["text"].strip(), needed))
    others = (one for one in tools if domains.get(one) not in {None, *needed} and one not in _FIT_ANYTHING)
    ranked = sorted(others, key=lambda one: _hash(f"{name}:{one}"))[: max(0, _NUM_TOOLS - len(called))]
    offered = sorted((*called, *ranked), key=lambda one: _hash(f"{one}:{name}"))
    messages: list[Message] = []
    for number, line in enumerate(lines):
        if line["role"] != "API":
            messages.append(Message("user" if line["role"] == "User" else "assistant", line["text"].strip()))
            continue
        # What the assistant says with its call is part of its answer.
        before = messages[:-1] if messages[-1].role == "assistant" and not messages[-1].calls else messages
        schemas = tools[line["api_name"]].parameters["properties"]
        arguments = {key: _to_type(value, schemas.get(key, {})) for key, value in line["param_dict"].items()}
        call = Call(line["api_name"], arguments, f"call_{number}")
        prompt = Conversation(tuple(before), tuple(tools[one] for one in offered))
        if before:
            _add(Request(prompt, (replace(call, id=None),), frozenset(domains[one] for one in offered)), found)
        said = messages[-1].content if len(before) < len(messages) else None
        output = json.dumps(line["result"]["output"], ensure_ascii=False)
        messages = [*before, Message("assistant", said, (call,)), Message("tool", output, call_id=call.id)]


def _to_type(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return an argument, which API-Bank often writes as text, as its parameter's type."""
    if isinstance(value, str) and schema.get("type") in ("integer", "number", "boolean", "array"):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    return value


def _add(request: Request, found: Found) -> None:
    """Add a request, or count why it is left out."""
    prompt = request.conversation
    text = "\n".join(message.content or "" for message in prompt.messages)
    schemas = {tool.name: tool.parameters.get("properties", {}) for tool in prompt.tools}
    if not request.calls:
        found.left_out["has no reference"] += 1
    elif any(ToolSet(prompt.tools).find_errors(call) for call in request.calls):
        found.left_out["does not fit its tool"] += 1
    elif not all(
        is_given(value, text, schemas[call.name].get(key, {}))
        for call in request.calls
        for key, value in call.arguments.items()
    ):
        found.left_out["has a value that no text gives"] += 1
    else:
        found.requests.append(request)


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_MONTH = rf"({'|'.join(_MONTHS)})[a-z]*\.?"
_DATE = re.compile(r"(?:(\d{4})-)?(\d{2})-(\d{2})(?: (\d{2}):(\d{2}):00)?")
_MONTH_DAY = re.compile(rf"\b{_MONTH} (\d{{1,2}})\b|\b{_MONTH} (\d{{1,2}})(?:st|nd|rd|th)", re.IGNORECASE)
_DAY_MONTH = re.compile(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? {_MONTH}\b", re.IGNORECASE)
_NUMERIC_DAY = re.compile(r"\b\d{4}[-/](\d{1,2})[-/](\d{1,2})\b")
_CLOCK = re.compile(r"\b(\d{1,2})(?::(\d{2}))?(?::\d{2})? ?(a\.?m\b|p\.?m\b)?", re.IGNORECASE)


def is_given(value: Any, text: str, schema: Mapping[str, Any]) -> bool:
    """Return True if an argument can be read from a text as it is written in the call.

    A word of an enumeration may have any case, a number may be a word up to twelve, and the parts of a date or time
    may be written as people do; any other text must be there letter by letter. A flag is always taken as given.

    Args:
        value: The argument.
        text: The conversation.
        schema: The parameter's JSON Schema.
    """
    if isinstance(value, bool):
        return True
    if isinstance(value, dict):
        nested = schema.get("properties", {})
        return all(is_given(item, text, nested.get(key, {})) for key, item in value.items())
    if isinstance(value, list):
        return all(is_given(item, text, schema.get("items", {})) for item in value)
    if isinstance(value, int | float):
        word = _NUMBERS[int(value)] if value in range(len(_NUMBERS)) else None
        return _contains(text, f"{value:g}", "(?![.,]?[0-9])") or (word is not None and _contains(text.lower(), word))
    if not isinstance(value, str):
        return False
    if value in schema.get("enum", ()) and _contains(text.lower(), value.lower()):
        return True
    return _contains(text, value) or _is_date_given(value, text)


def _contains(text: str, part: str, end: str = "") -> bool:
    """Return True if a text has a part as words of its own; "Don't" has no word "Don" or "t"."""
    pattern = rf"(?<!\w)(?<!\w['’]){re.escape(part)}(?!['’]?\w){end}"
    return bool(part.strip()) and re.search(pattern, text) is not None


def _is_date_given(value: str, text: str) -> bool:
    """Return True if a text has the year, the day and the time of ``[YYYY-]MM-DD[ HH:MM:00]`` in any notation."""
    if (found := _DATE.fullmatch(value)) is None:
        return False
    year, month, day, hour, minute = found.groups()
    days = {(_month(m[0] or m[2]), int(m[1] or m[3])) for m in _MONTH_DAY.findall(text)}
    days |= {(_month(m), int(d)) for d, m in _DAY_MONTH.findall(text)}
    days |= {(int(m), int(d)) for m, d in _NUMERIC_DAY.findall(text)}
    times = set()
    for hours, minutes, half in _CLOCK.findall(text):
        if half or minutes:
            shift = {"a": int(hours) % 12, "p": int(hours) % 12 + 12}.get(half[:1].lower(), int(hours))
            times.add((shift, int(minutes or 0)))
    is_year_given = year is None or _contains(text, year) or re.search(rf"\b{year}[-/]", text) is not None
    is_time_given = hour is None or (int(hour), int(minute)) in times
    return is_year_given and is_time_given and (int(month), int(day)) in days


def _month(name: str) -> int:
    return _MONTHS.index(name[:3].lower()) + 1


def make_pairs(name: str, found: Found) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the cases that need calls and those that need none, in the same order: each pair has the same tools.

    An opening is used a second time only where no other is left.

    Args:
        name: Category of the cases that need calls.
        found: The set's content.
    """
    num_of_tool: Counter[str] = Counter()
    chosen = []
    for request in sorted(found.requests, key=lambda one: _hash(one.conversation.to_json() + one.calls[0].name)):
        num_of_tool[request.calls[0].name] += 1
        if num_of_tool[request.calls[0].name] <= _MAX_OF_TOOL:
            chosen.append(request)
        else:
            found.left_out["more of the same tool"] += 1
    openings = [one for one in found.openings if len(one.text.split()) >= _MIN_WORDS]
    waiting = sorted(dict.fromkeys(openings), key=lambda one: _hash(one.text))
    fitting, unfit = [], []
    for number, request in enumerate(chosen):
        opening = next((one for one in waiting if not one.domains & request.domains), None)
        if opening is None:
            raise DataError(f"{name}: every request is about one of {', '.join(sorted(request.domains))}.")
        waiting.remove(opening)
        waiting.append(opening)
        fitting.append(_to_case(name, number, request.conversation, request.calls))
        other = replace(request.conversation, messages=(Message("user", opening.text),))
        unfit.append(_to_case(name + NO_CALL, number, other, ()))
    return fitting, unfit


def _to_case(kind: str, number: int, prompt: Conversation, calls: Sequence[Call]) -> dict[str, Any]:
    expected = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return {"id": f"{kind}-{number}", "kind": kind, **prompt.to_openai(), "expected_calls": expected}


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


PUBLIC_SETS = {
    "toolalpaca": PublicSet(
        "ToolAlpaca",
        "189069998d64",
        ("data/eval_real.json", "data/eval_simulated.json"),
        "36a2cb0bdffd24de",
        read_toolalpaca,
    ),
    "api_bank": PublicSet(
        "DAMO-ConvAI",
        "483554eae102",
        ("api-bank/apis/*.py", "api-bank/data/all_apis.csv", "api-bank/lv1-lv2-samples/level-1-given-desc/*.jsonl"),
        "59804a9fb673973f",
        read_api_bank,
    ),
}


PUBLIC_CATEGORIES = tuple(category for name in PUBLIC_SETS for category in (name, name + NO_CALL))


def write_public_sets(root: Path, folder: Path) -> None:
    """Write the cases of the public sets to ``CATEGORY.jsonl`` in a folder, and print how many there are.

    Args:
        root: ``--public-sets``, which holds the clones.
        folder: Where the cases are written.

    Raises:
        DataError: A clone is missing, or at another revision.
    """
    for name, public in PUBLIC_SETS.items():
        clone = root / public.folder
        files = sorted(file for pattern in public.files for file in clone.glob(pattern))
        digest = hashlib.blake2b(digest_size=8)
        for file in files:
            digest.update(file.relative_to(clone).as_posix().encode() + file.read_bytes())
        if digest.hexdigest() != public.digest:
            problem = "its files differ from those" if files else "no such clone"
            raise DataError(
                f"--public-sets {root}: {clone}: {problem} of {public.folder} at {public.revision}. "
                "benchmarks/real_public_sets.py has the commands that make the clones."
            )
        found = public.read(clone)
        fitting, unfit = make_pairs(name, found)
        for category, cases in ((name, fitting), (name + NO_CALL, unfit)):
            write_rows(folder / f"{category}.jsonl", cases)
        reasons = "; ".join(f"{count} {reason}" for reason, count in found.left_out.most_common())
        print(f"{name}: {format_count(len(fitting), 'pair')}; left out: {reasons}", flush=True)
