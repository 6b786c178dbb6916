"""The field ``tool_calls`` of transformers' ``response_template``, as call formats describe themselves in it.

https://huggingface.co/docs/transformers/main/chat_response_parsing. A parser of the schema splits an answer at the
fields' opening and closing patterns, reads the text between them by one of a few content parsers, and puts the result
in the shape of OpenAI's calls. Patterns are of Python's package ``regex``, in which ``.`` matches line breaks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ResponseFields = dict[str, dict[str, Any]]

_NUMBER = r"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+\-]?\d++)?"
_ESCAPE = r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
# Strings of JSON, of which none has the mark by which a string in single quotes is found.
_JSON_STRING = rf'"(?:[^"\\\x00-\x1f=]|=(?!\')|{_ESCAPE})*+"'
# Strings without escapes, one kind of quotes and no apostrophes.
_PLAIN_STRING = r"""'[^'"\\]*+'|"[^"\\'\x00-\x1f]*+\""""


class Surroundings(NamedTuple):
    """Patterns of a chat template around the calls.

    Attributes:
        start: Matches, without a character, where an answer may begin.
        end: Matches one of the marks that end the turn.
    """

    start: str
    end: str


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def call_object(marks: dict[str, Any], arguments: str = "arguments") -> dict[str, Any]:
    """Return the field of calls that are each a JSON object with a name.

    Args:
        marks: Opening and closing of a call.
        arguments: Key of the arguments.
    """
    transform = _call("{content.name}", f"{{content.{arguments}}}")
    return {**marks, "repeats": True, "content": "json", "transform": transform}


def call_list(marks: dict[str, Any], name: str = "name", arguments: str = "arguments") -> dict[str, Any]:
    """Return the field of one JSON list of all calls, whose objects have these keys."""
    transform = _call(f"{{{name}}}", f"{{{arguments}}}")
    return {**marks, "content": "json", "transform": transform, "transform_each": True}


def named_call(marks: dict[str, Any], content: str = "json", **content_args: Any) -> dict[str, Any]:
    """Return the field of calls whose opening has the name, in a group ``name``, and whose content is the arguments."""
    args = {"content_args": content_args} if content_args else {}
    return {**marks, "repeats": True, "content": content, **args, "transform": _call("{name}", "{content}")}


def tagged_call(marks: dict[str, Any], tag_pattern: str) -> dict[str, Any]:
    """Return the field of calls whose arguments are tags with untyped text, which the schemas of tools type."""
    return named_call(marks, "xml-inline", tag_pattern=tag_pattern)


def python_call(marks: dict[str, Any], *, is_json: bool = False) -> dict[str, Any]:
    """Return the field of calls with keyword arguments in Python's syntax.

    No content parser knows Python's escapes, nor its constants within a list or an object. What would be misread is
    left to a branch of the pattern that has no key, for which parsers raise an error.

    Args:
        marks: Opening, up to the parenthesis, and closing of a call.
        is_json: Strings are JSON's, but for arguments that are a string in single quotes. Otherwise they are Python's,
            of which only those without escapes are read.
    """
    string, space = _JSON_STRING if is_json else _PLAIN_STRING, r"\s*+"
    items = rf"(?&json)(?:{space},{space}(?&json))*+"
    pairs = rf"(?:{string}){space}:{space}(?&json)(?:{space},{space}(?:{string}){space}:{space}(?&json))*+"
    value = (
        rf"{string}|{_NUMBER}|true|false|null"
        rf"|\[{space}(?:{items})?+{space}\]|\{{{space}(?:{pairs})?+{space}\}}"
    )
    # A single apostrophe does not look like a string's quotes to the reader.
    others = "" if is_json else r"""|"[^"\\'\x00-\x1f]*+'[^"\\'\x00-\x1f]*+\""""
    argument = rf"={space}(?P<value>(?&json)|True|False|None{others})"
    if is_json:
        argument = rf"""(?:(?P<value>='[^'"\\]*+')|{argument})"""
    pattern = rf"(?(DEFINE)(?P<json>{value}))(?P<key>[^\W\d]\w*+){space}{argument}{space}(?:,{space}|\Z)|\S.*+"
    reader = {
        "allow_non_json": True,  # a constant of Python's, which the schema types
        "string_delims": [["='" if is_json else "'", "'"]],
    }
    return named_call(marks, "xml-inline", tag_pattern=pattern, value_parser={"name": "json", "args": reader})
