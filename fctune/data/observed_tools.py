"""Drafts of tools from the calls of rows that name none, such as the sessions of agents."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from fctune.base.errors import DataError
from fctune.config.sections.data import SourceConfig
from fctune.data.conversation import Tool
from fctune.data.sources import ParsedRow, RowReader, scan_source
from fctune.data.sources.selection import Selection

# Rows without tools are read as if they offered this one, so that their calls are not a defect.
_UNKNOWN = Tool({"name": "unknown", "description": "", "parameters": {"type": "object", "properties": {}}})
# JSON types by those of Python; bool is before int, of which it is a subclass.
_TYPES = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))


@dataclass(slots=True)
class _Observed:
    """The calls of one tool: their number, and of each argument how often it has which type."""

    num_calls: int = 0
    arguments: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


def draft_tools(sources: list[SourceConfig]) -> list[dict[str, Any]]:
    """Return the tools that rows without tools call, in OpenAI's form, the most called first.

    A parameter is required if every call gives it, and has the types of its values. Descriptions are empty, because
    rows do not hold them.

    Raises:
        DataError: A source cannot be read, or no row without tools has a call.
    """
    found: dict[str, _Observed] = defaultdict(_Observed)
    for source in sources:
        selection = Selection.from_config(source)
        reader = RowReader(source.format, source.columns, (_UNKNOWN,), selection=selection)
        for row in scan_source(source.path, source.format, source.columns, source.fold, selection):
            parsed = reader.read(row)
            if isinstance(parsed, ParsedRow) and parsed.conversation.tools == (_UNKNOWN,):
                for message in parsed.conversation.messages:
                    for call in message.calls:
                        found[call.name].num_calls += 1
                        for name, value in call.arguments.items():
                            found[call.name].arguments[name][_name_type(value)] += 1
    if not found:
        paths = ", ".join(source.path for source in sources)
        raise DataError(f"{paths}: no row without tools has a call, so there is nothing to draft tools from.")
    by_calls = sorted(found.items(), key=lambda item: (-item[1].num_calls, item[0]))
    return [_to_tool(name, observed) for name, observed in by_calls]


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
