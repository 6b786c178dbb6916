"""Placeholders in place of the secrets of rows.

The same secret has the same placeholder in all rows, of its kind and shape, by a keyed hash. Turns of the assistant in
which something was replaced become context, so that the model learns no placeholder as a value.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fctune.config.sections.data import RedactConfig
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.secrets import MARK, MAX_DIGITS, Finding, SecretScanner, list_forms, normalise, to_pattern, walk_value
from fctune.data.sources.row_builder import ParsedRow

_MIN_QUOTED = 16  # characters of a placeholder that a text repeats
_MAX_SEGMENT = 64  # characters of a placeholder between two separators


@dataclass(frozen=True, slots=True)
class Redaction:
    """The secrets that were found in a row, and the placeholders that replace them.

    Attributes:
        findings: The places of the secrets.
        table: The kind and the placeholder of each spelling of each secret.
        num_turns: Turns of the assistant that became context.
    """

    findings: list[Finding]
    table: dict[str, tuple[str, str]] = field(repr=False)
    num_turns: int = 0

    def make_mark(self, conversation: Conversation, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the ``redacted`` entry of a row's metadata: places by kind, and the calls that hold a placeholder.

        Args:
            conversation: The row as it is written.
            earlier: The entry that the row had.
        """
        kinds = Counter(finding.kind for finding in self.findings) + Counter((earlier or {}).get("kinds", {}))
        placeholders = {placeholder for _, placeholder in self.table.values()}
        calls = dict.fromkeys((earlier or {}).get("calls", ()))
        for i, message in enumerate(conversation.messages):
            for j, call in enumerate(message.calls):
                texts = [text for _, _, text in walk_value(call.arguments, "", "")]
                if any(placeholder in text for placeholder in placeholders for text in texts):
                    calls[f"messages[{i}].tool_calls[{j}]"] = None
        return {"kinds": dict(sorted(kinds.items())), "calls": list(calls)}

    def is_quoted_in(self, message: Message) -> bool:
        """Return True if a message holds a placeholder, or the beginning of one."""
        texts = [message.content or "", message.reasoning or ""]
        texts += [text for call in message.calls for _, _, text in walk_value(call.arguments, "", "")]
        starts = {placeholder[:_MIN_QUOTED] for _, placeholder in self.table.values()}
        return any(start in text for start in starts for text in texts)


NOTHING = Redaction([], {})


class Redactor:
    """Replaces secrets by placeholders, which depend on the secret and the seed alone.

    Args:
        config: Kinds to replace, the seed, and if turns with placeholders are supervised.
    """

    def __init__(self, config: RedactConfig):
        self.config = config
        self.scanner = SecretScanner(config.kinds)
        self._key = hashlib.blake2b(str(config.seed).encode(), digest_size=32).digest()

    def redact(self, row: ParsedRow) -> tuple[ParsedRow, Redaction]:
        """Return a row with placeholders; a secret has the same one in all texts, arguments and results.

        The row's metadata has the entry ``redacted``; turns of the assistant with placeholders have weight 0, unless
        they are to be supervised.
        """
        found = self.scanner.find(row.conversation)
        for _, _, text in walk_value(row.provenance, "", ""):
            self.scanner.search(text, found)
        if not found:
            return row, NOTHING
        findings, table = self.scanner.locate(row, found), self._make_table(found)
        conversation, num_turns = self._apply(row.conversation, table)
        redaction = Redaction(findings, table, num_turns)
        metadata = row.raw.get("metadata")
        metadata = dict(metadata) if isinstance(metadata, dict) else {}
        metadata |= _map_strings(row.provenance, _make_replacer(table))
        metadata["redacted"] = redaction.make_mark(conversation, metadata.get("redacted"))
        return replace(row, conversation=conversation, raw={**row.raw, "metadata": metadata}), redaction

    def redact_conversation(self, conversation: Conversation) -> tuple[Conversation, Redaction]:
        """Return a conversation with placeholders, as ``redact`` a row."""
        found = self.scanner.find(conversation)
        if not found:
            return conversation, NOTHING
        table = self._make_table(found)
        redacted, num_turns = self._apply(conversation, table)
        return redacted, Redaction(self.scanner.locate(conversation, found), table, num_turns)

    def replace_known(
        self, conversation: Conversation, table: dict[str, tuple[str, str]]
    ) -> tuple[Conversation, list[Finding]]:
        """Return a conversation with placeholders in place of known secrets, and the places of those.

        Args:
            conversation: The conversation.
            table: The kind and placeholder of each spelling of each secret, as in a ``Redaction``.
        """
        findings = self.scanner.locate(conversation, {form: kind for form, (kind, _) in table.items()})
        return (self._apply(conversation, table)[0] if findings else conversation), findings

    def mute(self, conversation: Conversation, redaction: Redaction) -> Conversation:
        """Return a conversation whose turns that repeat a placeholder are context, unless they are to be supervised."""
        if not redaction.table or self.config.supervise:
            return conversation
        return replace(
            conversation,
            messages=tuple(
                replace(message, weight=0.0)
                if message.role == "assistant" and redaction.is_quoted_in(message)
                else message
                for message in conversation.messages
            ),
        )

    def redact_text(self, text: str) -> str:
        """Return a text with placeholders."""
        found = self.scanner.find_in_text(text)
        return _make_replacer(self._make_table(found))(text) if found else text

    def _apply(self, conversation: Conversation, table: dict[str, tuple[str, str]]) -> tuple[Conversation, int]:
        change = _make_replacer(table)
        messages, num_turns = [], 0
        for message in conversation.messages:
            changed = _map_message(message, change)
            if changed.role == "assistant" and changed.weight and not self.config.supervise:
                spoken = replace(changed, call_id=message.call_id, name=message.name)
                if spoken != message:
                    changed = replace(changed, weight=0.0)
                    num_turns += 1
            messages.append(changed)
        return (
            replace(
                conversation,
                messages=tuple(messages),
                tools=tuple(_map_tool(tool, change) for tool in conversation.tools),
                template_args=_map_strings(conversation.template_args, change),
            ),
            num_turns,
        )

    def _make_table(self, found: dict[str, str]) -> dict[str, tuple[str, str]]:
        """Return the kind and placeholder of each spelling of each secret."""
        table: dict[str, tuple[str, str]] = {}
        for text, kind in found.items():
            forms, placeholders = list_forms(text), list_forms(self._make_placeholder(kind, text))
            for form, placeholder in zip(forms, placeholders, strict=True):
                table.setdefault(form, (kind, placeholder))
        return table

    def _make_placeholder(self, kind: str, text: str) -> str:
        """Return a placeholder of a secret's kind; with the length and characters of a key, for schemas' patterns."""
        if kind == "private_key":
            return self._make_private_key(text)
        draw = self._draw(kind, normalise(text, kind))
        if kind in _PASSWORDS and re.fullmatch("[0-9]+", text):
            return _make_number(len(text), draw)
        if kind == "email":
            return f"user-{_take(draw, _LOWER, 8)}@example.com"
        if kind == "home_path":
            cut = max(text.rfind("/"), text.rfind("\\")) + 1
            return f"{text[:cut]}user-{_take(draw, _LOWER, 8)}"
        if kind == "phone":
            return _make_phone(text, draw)
        if kind == "cookie" or (kind in _PASSWORDS and not re.fullmatch(r"[A-Za-z0-9_-]{20,}", text)):
            return f"Redacted-{_take(draw, _DIGITS, 1)}{_take(draw, _LOWER, 7)}"
        prefix = found[0] if (found := _PREFIX.match(text)) else ""
        suffix = found[0] if kind == "mailchimp_key" and (found := re.search(r"-us\d+$", text)) else ""
        body = text[len(prefix) : len(text) - len(suffix)]
        if kind == "telegram_token":
            prefix, body = "0" * body.index(":") + ":", body[body.index(":") + 1 :]
        has_upper, has_lower = re.search("[A-Z]", body), re.search("[a-z]", body)
        alphabet = (_LETTERS.upper() if has_upper else "") + (_LETTERS if has_lower else "") + _DIGITS
        segments = re.split(r"([./:])", body)
        mark = MARK.upper() if has_upper or not has_lower else MARK
        for index in range(0, len(segments), 2):
            length = min(len(segments[index]), _MAX_SEGMENT)
            if mark and (length >= len(mark) + 6 or index == len(segments) - 1):
                segments[index] = mark + _take(draw, alphabet, max(length - len(mark), 6))
                mark = ""
            else:
                segments[index] = _take(draw, alphabet, length)
        return prefix + "".join(segments) + suffix

    def _make_private_key(self, text: str) -> str:
        draw = self._draw("private_key", normalise(text, "private_key"))
        code = f"REDACTED-{_take(draw, _LOWER, 8)}"
        parts = re.fullmatch(r"(-----BEGIN [^-]*-----)(.*?)(-----END [^-]*-----)?", text, re.DOTALL)
        if parts is None:
            return code
        end = parts[3] or parts[1].replace("BEGIN", "END")
        escaped = re.match(r"(?:\\+r)?(?:\\+n)", parts[2])
        line_break = escaped[0] if escaped else "\n"
        return line_break.join((parts[1], code, end))

    def _draw(self, kind: str, text: str) -> Iterator[int]:
        """Yield numbers that depend on the secret and the seed; the secret cannot be computed from them."""
        for block in itertools.count():
            data = f"{block}:{kind}:{text}".encode("utf-8", "surrogatepass")
            yield from hashlib.blake2b(data, key=self._key, digest_size=64).digest()


class SecretScreen:
    """Replaces the secrets of rows, or finds them and leaves them.

    Args:
        redact: Secrets to replace; None finds credentials.
    """

    def __init__(self, redact: RedactConfig | None = None):
        self.redactor = None if redact is None else Redactor(redact)
        self.scanner = SecretScanner() if self.redactor is None else self.redactor.scanner

    def screen(self, row: ParsedRow) -> tuple[ParsedRow, Redaction]:
        """Return a row as it is to be used, and what was found in it."""
        if self.redactor is not None:
            return self.redactor.redact(row)
        return row, Redaction(self.scanner.locate(row), {})

    def screen_text(self, text: str) -> str:
        """Return a text that is written with rows, such as the path of their source, as it is to be used."""
        return text if self.redactor is None else self.redactor.redact_text(text)


_LETTERS, _DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
_LOWER = _LETTERS + _DIGITS
_PASSWORDS = ("basic_auth", "command_password", "named_secret")
# What providers write before the random part of their keys.
_PREFIX = re.compile(
    r"https://hooks\.slack\.com/services/|AccountKey=|A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA|AIza|ya29\.|eyJ|SG\.|GR1348941|dapi"
    r"|AC(?=[a-z0-9]{32}$)|SK(?=[a-z0-9]{32}$)|sk-(?:ant-[a-z0-9]+-|proj-|svcacct-|admin-|or-v1-)?|github_pat_|dop_v1_"
    r"|lsv2_(?:pt|sk)_|hvs\.|(?:lin_api|ntn|r8)_|(?:pplx|tvly)-|ATATT3|[rs]k_(?:live|test)_|pypi-|xapp-\d-|xox[a-z]-|(?:gh[opusr]|hf|npm|gsk|shpat|whsec)_|(?:gl[a-z]+|xai|sq0csp|GOCSPX)-"
)


def _make_phone(text: str, draw: Iterator[int]) -> str:
    """Return a number in the same notation, of a country or an area that does not exist."""
    length = len(re.sub(r"\D", "", text))
    area = "999" if text.startswith("+") else ("1555" if length == 11 else "555")
    digits = iter(area + _take(draw, _DIGITS, length - len(area)))
    return "".join(next(digits) if character.isdigit() else character for character in text)


def _make_number(length: int, draw: Iterator[int]) -> str:
    """Return a number of so few different digits that no scan takes it for a password."""
    digits = "".join(dict.fromkeys(_take(draw, _DIGITS, 64)))[:4]
    return _take(draw, digits.replace("0", ""), 1) + _take(draw, digits, length - 1)


def _take(draw: Iterator[int], alphabet: str, count: int) -> str:
    return "".join(alphabet[number % len(alphabet)] for number in itertools.islice(draw, count))


def _make_replacer(table: dict[str, tuple[str, str]]) -> Callable[[str], str]:
    """Return a function that replaces the keys of a table in a text, the longest first."""
    patterns = [to_pattern(form, table[form][0]) for form in sorted(table, key=len, reverse=True)]
    pattern = re.compile("|".join(patterns)) if patterns else None
    return lambda text: text if pattern is None else pattern.sub(lambda match: table[match[0]][1], text)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with its strings and numbers changed, keys as well."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, int) and not isinstance(value, bool):
        changed = change(str(value)) if 0 < value < 10**MAX_DIGITS else ""
        return int(changed) if changed.isdecimal() else value
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, list) else value


def _map_message(message: Message, change: Callable[[str], str]) -> Message:
    def change_optional(text: str | None) -> str | None:
        return None if text is None else change(text)

    calls = tuple(
        Call(change(call.name), _map_strings(call.arguments, change), change_optional(call.id))
        for call in message.calls
    )
    return replace(
        message,
        content=change_optional(message.content),
        reasoning=change_optional(message.reasoning),
        calls=calls,
        call_id=change_optional(message.call_id),
        name=change_optional(message.name),
    )


def _map_tool(tool: Tool, change: Callable[[str], str]) -> Tool:
    function = _map_strings(tool.function, change)
    return tool if function == tool.function else Tool(function)
