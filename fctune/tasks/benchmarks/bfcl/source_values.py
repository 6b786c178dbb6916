"""Read Java and JavaScript values from source text the way the Berkeley leaderboard does.

The leaderboard uses regular expressions, some of which take exponential time on hostile text. Here the same values are
found in linear time, by looking ahead once. Text that cannot be read is returned unchanged.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from typing import Any

from fctune.base.forward_search import ForwardSearch

JAVA_TYPES: dict[str, type] = {
    **dict.fromkeys(("byte", "short", "integer", "long"), int),
    **dict.fromkeys(("float", "double"), float),
    **dict.fromkeys(("char", "String", "any"), str),
    **dict.fromkeys(("Array", "ArrayList", "Queue", "Stack"), list),
    **dict.fromkeys(("HashMap", "Hashtable"), dict),
    "boolean": bool,
    "Set": set,
}
JAVASCRIPT_TYPES: dict[str, type] = {
    "String": str,
    "integer": int,
    "float": float,
    "Bigint": int,
    "Boolean": bool,
    "dict": dict,
    "array": list,
    "any": str,
}

# A line break may end the text of a number, as in the leaderboard's own patterns.
_WHOLE = re.compile(r"-?\d+\n?")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?\n?")
_DOUBLE = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\n?")
_FLOAT = re.compile(r"(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)[fF]\n?")
_LONG = re.compile(r"(-?\d+)[lL]\n?")
_BIGINT = re.compile(r"(-?\d+)n")

_AS_LIST = re.compile(r"new\s+ArrayList<\w*>\(Arrays\.asList\(")
_LIST_BLOCK = re.compile(r"new\s+ArrayList<\w*>\(\)\s*\{\{")
_EMPTY_LIST = re.compile(r"new\s+ArrayList<\w*>\(\)")
_ARRAY = re.compile(r"new\s+\w+\[\]\s*\{")
_MAP = re.compile(r"new\s+HashMap<")
_MAP_BLOCK = re.compile(r">\s*\(\)\s*\{\s*\{?\s*")
_MAP_END = re.compile(r">\s*\(\)")
_NEW_ARRAY = re.compile(r"new\s+Array\(")
_SPACE = re.compile(r"\s*")


def read_java(text: str, type_name: str, item_name: str | None = None) -> Any:
    """Read Java source text as a value of the named type; text that is not such a value is returned unchanged.

    Raises:
        NotImplementedError: The type is a set, queue or stack, which the leaderboard does not read either.
    """
    if type_name in ("byte", "short", "integer"):
        return int(text) if _WHOLE.fullmatch(text) else text
    if type_name == "long":
        return int(found[1]) if (found := _LONG.fullmatch(text)) else text
    if type_name == "float":
        return float(found[1]) if (found := _FLOAT.fullmatch(text)) else text
    if type_name == "double":
        return float(text) if _DOUBLE.fullmatch(text) else text
    if type_name == "boolean":
        return {"true": True, "false": False}.get(text, text)
    if type_name == "ArrayList":
        return _read_array_list(text, item_name)
    if type_name == "Array":
        return _read_java_array(text, item_name)
    if type_name == "HashMap":
        return _read_hash_map(text)
    if type_name in ("char", "String", "any"):
        return text
    raise NotImplementedError(type_name)


def read_javascript(text: str, type_name: str, item_name: str | None = None) -> Any:
    """Read JavaScript source text as a value of the named type; other text is returned unchanged."""
    if type_name == "String":
        return text[1:-1] if _is_quoted(text) else text
    if type_name == "integer":
        return int(text) if _WHOLE.fullmatch(text) else text
    if type_name == "float":
        return float(text) if _DECIMAL.fullmatch(text) else text
    if type_name == "Bigint":
        return int(found[1]) if (found := _BIGINT.fullmatch(text)) else text
    if type_name == "Boolean":
        return {"true": True, "false": False}.get(text, text)
    if type_name == "array":
        return _read_javascript_array(text.strip(), item_name)
    if type_name == "dict":
        return _read_javascript_object(text.strip())
    return text


def _read_array_list(text: str, item_name: str | None) -> Any:
    for inside in _enclosed(text, _AS_LIST, "))", min_length=1):
        return [_read_java_item(item.strip(), item_name) for item in inside.split(",")]
    search = ForwardSearch(text)
    for block in _LIST_BLOCK.finditer(text):
        start = _skip_space(text, block.end())
        end = search.find("}}", start + 1)
        if end >= 0:
            adds = _enclosed(text[start:end], re.compile(r"add\("), ")", min_length=1)
            return [_read_java_item(item.strip(), item_name) for item in adds]
        if start > block.end() and text.startswith("}}", start):
            return []
    return [] if _EMPTY_LIST.search(text) else text


def _read_java_item(text: str, item_name: str | None) -> Any:
    if item_name in ("char", "String"):
        return text[1:-1]
    return read_java(text, item_name) if item_name else _read_untyped_java(text)


def _read_java_array(text: str, item_name: str | None) -> Any:
    for inside in _enclosed(text, _ARRAY, "}"):
        items = [item.strip() for item in inside.split(",") if item.strip()]
        return [read_java(item, item_name) if item_name else _read_untyped_java(item) for item in items]
    return text


def _read_hash_map(text: str) -> Any:
    begun = _MAP.search(text)
    if begun is None:
        return text
    for block in _MAP_BLOCK.finditer(text, begun.end()):
        if (end := text.find("}", block.end())) >= 0:
            return {key: _read_untyped_java(value.strip()) for key, value in _puts(text[block.end() : end])}
        break
    search = ForwardSearch(text)
    ended = _MAP_END.search(text, begun.end())
    for begun in _MAP.finditer(text):
        if ended is not None and ended.start() < begun.end():
            ended = _MAP_END.search(text, begun.end())
        if ended is None:
            break
        if not 0 <= search.find("\n", begun.end()) < ended.start():
            return {}
    return text


def _puts(text: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of each ``put("key", value)``; neither may span lines."""
    search = ForwardSearch(text)
    position = 0
    while (put := text.find('put("', position)) >= 0:
        line_end = search.find("\n", put)
        line_end = len(text) if line_end < 0 else line_end
        position = line_end
        key_end = search.find('",', put + 5)
        while 0 <= key_end < line_end:
            value = _skip_space(text, key_end + 2)
            closed, broken = search.find(")", value), search.find("\n", value)
            if closed >= 0 and (broken < 0 or closed < broken):
                yield text[put + 5 : key_end], text[value:closed]
                position = closed + 1
                break
            key_end = search.find('",', key_end + 1)


def _read_untyped_java(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith('"') and text.endswith('"'):
        return text[1:-1]
    if found := _LONG.fullmatch(text):
        return int(found[1])
    if found := _FLOAT.fullmatch(text):
        return float(found[1])
    return _read_number(text)


def _read_javascript_array(text: str, item_name: str | None) -> Any:
    nested_end = _nested_array_end(text)
    if nested_end >= 0:
        rows = list(_enclosed(text[:nested_end], re.compile(r"\["), "]"))
        first = rows[0].strip()
        rows[0] = first[1:] if first.startswith("[") else first
        return [[_read_untyped_javascript(item) for item in row.split(",")] for row in rows]
    begun = _NEW_ARRAY.match(text)
    start, closing = (begun.end(), ")") if begun else (1, "]")
    if begun is None and not text.startswith("["):
        return text
    end = text.find(closing, start)
    if end < 0 or "\n" in text[start:end]:
        return text
    inside = text[start:end].strip()
    items = [item.strip() for item in inside.split(",")] if inside else []
    try:
        return [read_javascript(item, item_name) if item_name else _read_untyped_javascript(item) for item in items]
    except ValueError:
        return text


def _nested_array_end(text: str) -> int:
    """Return the end of a list of lists at the start of the text, or -1.

    A closing bracket of an inner list is good if the end can be reached from it: directly, or over a comma to another
    inner list with a good closing bracket on the same line. Good brackets are found from the right, each once.
    """
    begun = _NEW_ARRAY.match(text)
    if begun is None and not text.startswith("["):
        return -1
    closing = ")" if begun else "]"
    first = _skip_space(text, begun.end() if begun else 1)
    if not text.startswith("[", first):
        return -1
    line_ends = [index for index, letter in enumerate(text) if letter == "\n"] + [len(text)]
    # Both from right to left: the good closing brackets, negated so that they ascend, and the target of each.
    good: list[int] = []
    leads: dict[int, int] = {}

    def next_good(opened: int) -> int:
        """Return the first good closing bracket after an opening one on the same line, or -1."""
        index = bisect.bisect_left(good, -opened) - 1
        line_end = line_ends[bisect.bisect_left(line_ends, opened)]
        return -good[index] if index >= 0 and -good[index] < line_end else -1

    closed = text.rfind("]")
    while closed > first:
        behind = _skip_space(text, closed + 1)
        if text.startswith(closing, behind):
            good.append(-closed)
            leads[closed] = behind + 1
        elif text.startswith(",", behind):
            opened = _skip_space(text, behind + 1)
            if text.startswith("[", opened) and next_good(opened) >= 0:
                good.append(-closed)
                leads[closed] = -opened
        closed = text.rfind("]", 0, closed)
    closed = next_good(first)
    while closed >= 0:
        if leads[closed] > 0:
            return leads[closed]
        closed = next_good(-leads[closed])
    return -1


def _read_javascript_object(text: str) -> Any:
    end = text.find("}")
    if not text.startswith("{") or end < 0 or "\n" in text[:end]:
        return text
    result: dict[str, Any] = {}
    for key, value in _pairs(text[1:end]):
        if value.startswith("[") and value.endswith("]"):
            result[key] = _read_javascript_array(value, None)
        else:
            result[key] = _read_untyped_javascript(value.strip("'\""))
    return result


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of each ``key: value``; a comma ends a value if a colon comes before the next comma."""
    search = ForwardSearch(text)
    position = 0
    while (colon := search.find(":", position)) >= 0:
        if colon == position:
            position += 1
            continue
        key = text[position:colon].strip().strip("'\"")
        start = _skip_space(text, colon + 1)
        end, position = _value_end(search, start)
        yield key, text[start:end].strip()


def _value_end(search: ForwardSearch, start: int) -> tuple[int, int]:
    """Return the end of an object's value and the start of the next key."""
    text = search.text
    comma = search.find(",", start)
    while comma >= 0:
        following = search.find(",", comma + 1)
        limit = len(text) if following < 0 else following
        if 0 <= search.find(":", comma + 2) < limit:
            begun = _skip_space(text, comma + 1)
            # The key has at least one character, even if only a space before its colon.
            return comma, begun if 0 <= search.find(":", begun + 1) < limit else begun - 1
        comma = following
    return len(text), len(text)


def _read_untyped_javascript(text: str) -> Any:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    return text[1:-1] if _is_quoted(text) else _read_number(text)


def _read_number(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _is_quoted(text: str) -> bool:
    return any(text.startswith(mark) and text.endswith(mark) for mark in ('"', "'"))


def _enclosed(text: str, opening: re.Pattern[str], closing: str, min_length: int = 0) -> Iterator[str]:
    """Yield the text between each opening and the next closing on the same line, from left to right."""
    search = ForwardSearch(text)
    position = 0
    while (opened := opening.search(text, position)) is not None:
        closed = search.find(closing, opened.end() + min_length)
        if closed < 0:
            return
        if 0 <= search.find("\n", opened.end()) < closed:
            position = opened.start() + 1
            continue
        yield text[opened.end() : closed]
        position = closed + len(closing)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()
