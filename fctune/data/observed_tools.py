"""The tools of rows, and drafts of tools from the calls of rows that name none, such as the sessions of agents."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from fctune.base.errors import DataError
from fctune.config.sections.data import SourceConfig
from fctune.data.conversation import Tool
from fctune.data.sources import LeftOut, ParsedRow, RowReader, scan_source
from fctune.data.sources.selection import Selection
from fctune.data.sources.unmatched import require_selected

# Rows without tools are read as if they offered this one, so that their calls are not a defect.
_UNKNOWN = Tool({"name": "unknown", "description": "", "parameters": {"type": "object", "properties": {}}})
# JSON types by those of Python; bool is before int, of which it is a subclass.
_TYPES = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))


@dataclass(slots=True)
class _Observed:
    """The calls of one tool: their number, and of each argument how often it has which type."""

    num_calls: int = 0
    arguments: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


@dataclass(slots=True)
class ToolDrafts:
    """The tools of rows, as rows carry them or drafted from their calls.

    Attributes:
        tools: The tools in OpenAI's form: those that rows carry, then the drafts, the most called first.
        variants: Number of different definitions that rows carry, by name.
        drafted: Names of the drafts.
        num_without: Rows with a call and no tools.
    """

    tools: list[dict[str, Any]]
    variants: dict[str, int]
    drafted: list[str]
    num_without: int


def draft_tools(sources: list[SourceConfig]) -> ToolDrafts:
    """Return the tools that rows carry, and drafts of the others that rows without tools call.

    Of several definitions of a name, that of the most rows is returned. A parameter of a draft is required if every
    call gives it, and has the types of its values. Descriptions are empty, because rows do not hold them.

    Raises:
        DataError: A source cannot be read, or its rows have neither tools nor calls.
    """
    found: dict[str, _Observed] = defaultdict(_Observed)
    carried: dict[str, Counter[str]] = {}
    num_without, left_out = 0, Counter[str]()
    for source in sources:
        selection = Selection.from_config(source)
        reader = RowReader(source.format, source.columns, (_UNKNOWN,), selection=selection)
        num_rows = 0
        for row in scan_source(source.path, source.format, source.columns, source.fold, selection):
            left_out.update(row.left_out or {})
            parsed = reader.read(row)
            if isinstance(parsed, LeftOut):
                left_out[parsed.kind] += 1
                continue
            num_rows += 1
            if not isinstance(parsed, ParsedRow):
                continue
            calls = [call for message in parsed.conversation.messages for call in message.calls]
            if parsed.conversation.tools != (_UNKNOWN,):
                for tool in parsed.conversation.tools:
                    carried.setdefault(tool.name, Counter())[tool.to_json()] += 1
                continue
            num_without += bool(calls)
            for call in calls:
                found[call.name].num_calls += 1
                for name, value in call.arguments.items():
                    found[call.name].arguments[name][_name_type(value)] += 1
        if not num_rows:
            require_selected([source.path], left_out, source.format, source.columns, source.fold, selection)
    if not found and not carried:
        paths = ", ".join(source.path for source in sources)
        raise DataError(f"{paths}: no row has tools or a call, so there is nothing to draft tools from.")
    by_calls = sorted(found.items(), key=lambda item: (-item[1].num_calls, item[0]))
    drafts = {name: _to_tool(name, observed) for name, observed in by_calls if name not in carried}
    kept = [json.loads(definitions.most_common(1)[0][0]) for definitions in carried.values()]
    variants = {name: len(definitions) for name, definitions in carried.items()}
    return ToolDrafts([*kept, *drafts.values()], variants, list(drafts), num_without)


def _to_tool(name: str, observed: _Observed) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for argument, types in observed.arguments.items():
        names = [name for name, _ in types.most_common()]
        properties[argument] = {"type": names[0] if len(names) == 1 else names, "description": ""}
    required = [name for name, types in observed.arguments.items() if types.total() == observed.num_calls]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _name_type(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")
