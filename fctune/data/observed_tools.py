"""The tools of rows, and drafts of tools from the calls of rows that name none, such as the sessions of agents."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.config.sections.data import RedactConfig, SourceConfig
from fctune.data.conversation import Conversation, Tool
from fctune.data.redaction import Redactor
from fctune.data.secrets import SecretScanner, list_counts
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
        num_carrying: Rows with tools.
        num_neither: Rows without tools and calls.
        defects: Rows that cannot be read, by kind.
        left_out: Records that are left out, by kind.
        secrets: Kinds of the secrets in the tools, with the number of their places.
        is_redacted: True if placeholders replace them.
    """

    tools: list[dict[str, Any]]
    variants: dict[str, int]
    drafted: list[str]
    num_without: int
    num_carrying: int = 0
    num_neither: int = 0
    defects: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    secrets: Counter[str] = field(default_factory=Counter)
    is_redacted: bool = False

    def describe_rows(self) -> str:
        """Return what became of all records that were read."""
        counts = [(self.num_carrying, "with tools"), (self.num_without, "with calls and no tools")]
        parts = [f"{count:,} {what}" for count, what in [*counts, (self.num_neither, "with neither")] if count]
        for found, what in ((self.defects, "with a defect"), (self.left_out, "left out")):
            if found:
                parts.append(f"{found.total():,} {what} ({list_counts(found, ())})")
        total = self.num_carrying + self.num_without + self.num_neither + self.defects.total() + self.left_out.total()
        return f"{format_count(total, 'record')}: {', '.join(parts)}"


def draft_tools(sources: list[SourceConfig], redact: RedactConfig | None = None) -> ToolDrafts:
    """Return the tools that rows carry, and drafts of the others that rows without tools call.

    Of several definitions of a name, that of the most rows is returned. A parameter of a draft is required if every
    call gives it, and has the types of its values. Descriptions are empty, because rows do not hold them.

    Args:
        sources: Sources of rows.
        redact: Secrets of the tools to replace; None counts credentials.

    Raises:
        DataError: A source cannot be read, or its rows have neither tools nor calls.
    """
    found: dict[str, _Observed] = defaultdict(_Observed)
    carried: dict[str, Counter[str]] = {}
    rows, defects, left_out = Counter[str](), Counter[str](), Counter[str]()
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
                defects[parsed.kind] += 1
                continue
            calls = [call for message in parsed.conversation.messages for call in message.calls]
            if parsed.conversation.tools != (_UNKNOWN,):
                rows["carrying"] += 1
                for tool in parsed.conversation.tools:
                    carried.setdefault(tool.name, Counter())[tool.to_json()] += 1
                continue
            rows["without" if calls else "neither"] += 1
            for call in calls:
                found[call.name].num_calls += 1
                for name, value in call.arguments.items():
                    found[call.name].arguments[name][_name_type(value)] += 1
        if not num_rows:
            require_selected([source.path], left_out, source.format, source.columns, source.fold, selection)
    if not found and not carried:
        paths = ", ".join(source.path for source in sources)
        unread = f" {defects.total():,} with a defect ({list_counts(defects, ())})." if defects else ""
        raise DataError(f"{paths}: no row has tools or a call, so there is nothing to draft tools from.{unread}")
    by_calls = sorted(found.items(), key=lambda item: (-item[1].num_calls, item[0]))
    drafts = {name: _to_tool(name, observed) for name, observed in by_calls if name not in carried}
    kept = [json.loads(definitions.most_common(1)[0][0]) for definitions in carried.values()]
    variants = {name: len(definitions) for name, definitions in carried.items()}
    tools, secrets = _screen([*kept, *drafts.values()], redact)
    return ToolDrafts(
        tools,
        variants,
        list(drafts),
        rows["without"],
        rows["carrying"],
        rows["neither"],
        defects,
        left_out,
        secrets,
        redact is not None,
    )


def _screen(tools: list[dict[str, Any]], redact: RedactConfig | None) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return the tools as they are written, and the kinds of the secrets that were found in them."""
    conversation = Conversation((), tuple(Tool(tool["function"]) for tool in tools))
    if redact is None:
        findings = SecretScanner().locate(conversation)
    else:
        conversation, redaction = Redactor(redact).redact_conversation(conversation)
        findings = redaction.findings
    return [tool.to_openai() for tool in conversation.tools], Counter(finding.kind for finding in findings)


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
