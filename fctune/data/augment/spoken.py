"""Values of calls as requests say them: found in a text, replaced, taken out, and read from a schema's examples."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fctune.data.conversation import Tool

# Scripts with capitals (Latin, Greek, Cyrillic, Armenian), and the marks that make one letter of two code points.
_CHARACTERS = [chr(code) for code in range(0x2000)]
_UPPER = "".join(filter(str.isupper, _CHARACTERS))
_MARKS = "".join(character for character in _CHARACTERS if unicodedata.category(character).startswith("M"))
_LOWER = "".join(filter(str.islower, _CHARACTERS)) + _MARKS
_CASELESS = rf"[^\W\d_{_UPPER}{_LOWER}]"
_WORD = re.compile(rf"[{_UPPER}]+(?![{_LOWER}])|[{_UPPER}]?[{_LOWER}]+|\d+|{_CASELESS}(?:{_CASELESS}|[{_MARKS}])*")
# Thai, Lao, Burmese, Khmer, Japanese, Chinese; Korean, whose particles are written to the words.
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)
_EXAMPLES = re.compile(r"\(\s*e\.?g\.?,?:?\s*([^()]+)\)", re.IGNORECASE)
# Examples that describe a value instead of giving one, and fragments of a list that was split at the wrong comma.
_PLACEHOLDER = re.compile(
    r"YYYY|MM/DD|[()\[\]{}\"]|^(?:city|state|country|region|location|age range|interests|title|name|class|ID)$|\bname$",
    re.IGNORECASE,
)
_PREPOSITIONS = (
    "about|after|around|as|at|before|between|by|called|during|for|from|in|into|named|near|of|on|over|since|titled|to|"
    "towards|under|until|using|via|with|within"
)
_ARTICLE = r"(?:(?:the|my|our|a|an)\s+)?"
_QUOTE = "[\"'“”‘’`]?"
_LEADING = re.compile(rf"(?:\s*\b(?:{_PREPOSITIONS})\s+{_ARTICLE})?{_QUOTE}$", re.IGNORECASE)
# Words that may follow a value whose phrase is taken out, so that the rest remains a sentence.
_FOLLOWING = re.compile(
    rf"{_QUOTE}(?=\s*(?:[.?!;)](?!\d)|$|,(?-i:(?=\s+[a-z]))|\s(?:{_PREPOSITIONS}|please|but|then|that|which|so|because|if|when|while)\b))",
    re.IGNORECASE,
)
# "my name is X", "some X", "films directed by X" and "query: X" would lose their end, "from A to X" half of a range.
_UNFINISHED = re.compile(
    r"(?:[:=(,]|\b(?:is|are|was|and|or|to|be|than|the|an?|my|our|some|any|this|these|more|each|every|born|says?|\w+ed)"
    r"|'s)$",
    re.IGNORECASE,
)
_DANGLING = re.compile(r"\s+([.,?!;])")
_MIN_WORDS_LEFT = 3


def split_words(text: str) -> list[str]:
    """Return the words of a text or of a name in any spelling, in lower case."""
    return [word.lower() for word in _WORD.findall(text)]


def split_terms(text: str) -> list[str]:
    """Return the words of a text to compare it by; of scripts without spaces, characters and pairs of neighbours."""
    terms: list[str] = []
    for word in split_words(text):
        is_unspaced = _WITHOUT_SPACES.match(word) is not None
        terms += [*word, *map("".join, pairwise(word))] if is_unspaced else [word]
    return terms


def say_name(name: str) -> str:
    """Return a name as words: ``start date`` for start_date and startDate."""
    return " ".join(split_words(name)) or name


def say_value(value: Any) -> str:
    """Return a value as a request says it: 3 for 3.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def join_words(parts: Sequence[str], conjunction: str = "and") -> str:
    """Return an enumeration: ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {conjunction} {parts[-1]}"


def match_value(value: Any) -> str:
    """Return a pattern that matches a value only as a complete word: not 1 in 12, nor 5 in 2.5, nor man in woman."""
    return rf"(?<![\w.,-]){re.escape(str(value))}(?!\w|[.,]\d)"


def count_value(text: str, value: Any) -> int:
    """Return how often a text says a value word for word."""
    return len(re.findall(match_value(value), text))


def replace_value(text: str, value: Any, new: Sequence[Any]) -> str:
    """Replace a value by others, each in the quotes that the value is in."""
    said = [say_value(one) for one in new]
    for mark in ("'", '"'):
        if f"{mark}{value}{mark}" in text:
            return text.replace(f"{mark}{value}{mark}", join_words([f"{mark}{one}{mark}" for one in said]))
    return re.sub(match_value(value), lambda _: join_words(said), text)


def take_out_value(text: str, value: Any) -> str | None:
    """Return a request without a value and the preposition before it; None if no sentence would remain.

    ``What is the weather in Paris?`` becomes ``What is the weather?``. The value must be said once, in any case.
    """
    lower, said = text.lower(), str(value).lower()
    if len(lower) != len(text) or lower.count(said) != 1:
        return None
    start = lower.index(said)
    leading, following = _LEADING.search(text[:start]), _FOLLOWING.match(text[start + len(said) :])
    if leading is None or following is None or not re.search(rf"\s{_QUOTE}$", text[:start]):
        return None
    before, after = text[: leading.start()].rstrip(), text[start + len(said) + following.end() :]
    if not before or _UNFINISHED.search(before):
        return None
    if before[-1] in ".?!,;" and re.match(r"\s*[.,?!;]", after):
        return None
    left = _DANGLING.sub(r"\1", f"{before} {after.lstrip()}" if after[:1].isspace() else before + after).strip()
    return left if _is_request(left) else None


def take_out_item(text: str, name: str, value: Any) -> str | None:
    """Return a request without the item of a list that says a value, and nothing else; None if there is none.

    ``Book a berth: C12, boat is Aurora, 3 nights.`` becomes ``Book a berth: C12, 3 nights.`` without the boat. An item
    is the value with words of the parameter's name, or a number with its unit, between two marks of punctuation. The
    value must be said once, in any case.
    """
    lower, said = text.lower(), re.escape(str(value).lower())
    if len(lower) != len(text) or lower.count(str(value).lower()) != 1:
        return None
    words = "|".join([*map(re.escape, split_words(name)), "is", "as", "of", "with", "the", "my", "a", "an"])
    label = rf"(?:(?:{words})[ _:]\s*)*"
    unit = r"(?:\s[a-z]+)?" if re.fullmatch(r"[\d.]+", str(value)) else ""
    behind = rf"(?:\s\((?:(?:{words})\s?)+\)|(?:\s(?:{words}))+|{unit})"
    item = rf"(?<![\w.-]){label}{_QUOTE}{said}{_QUOTE}{behind}"
    for start, end in (
        (r"\s\(", r"\)"),  # the only item, in brackets
        (r"(?:(?<=[.?!])\s|^)", r"[.?!](?=\s|$)"),  # a sentence of its own
        (r"(?:^|(?<=[.?!]\s))", r"[,:]\s+"),  # the first of a sentence
        (r",\s+", rf"(?=,\s(?!(?:and|or|{_PREPOSITIONS})\b))"),  # in the middle
        (r"(?:(?<=[:(]\s)|(?<=\())", r",\s+"),  # the first of a list
        (r"[,:]\s+", r"(?=[.?!;)](?!\d)|$)"),  # the last
    ):
        found = re.search(start + item + end, lower)
        if found is None:
            continue
        before, after = text[: found.start()], text[found.end() :]
        if text[found.start() : found.start() + 1].isupper() and (not before or before.rstrip()[-1:] in ".?!"):
            after = after[:1].upper() + after[1:]
        kept = (before + after).strip()
        return kept if _is_request(kept) else None
    return None


def _is_request(text: str) -> bool:
    """Return True if enough is left of a request; words of other alphabets do not count, as the rules are English."""
    return sum(word.isascii() for word in split_words(text)) >= _MIN_WORDS_LEFT


def read_examples(schema: dict[str, Any]) -> list[Any]:
    """Return the values that a schema allows by enum or that its description gives as examples, in its type."""
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    found = _EXAMPLES.search(str(schema.get("description", "")))
    values: list[Any] = []
    for part in re.split(r",\s*(?:or\s+)?|\s+or\s+", found[1]) if found else ():
        text = part.strip().strip("'\"").strip()
        if not text or text.startswith(("etc", "...")) or _PLACEHOLDER.search(text):
            continue
        try:
            kind = schema.get("type")
            is_number = kind == "number" and not text.isdigit()
            value = float(text) if is_number else int(text) if kind in ("integer", "number") else text
        except ValueError:
            continue
        if schema.get("type") in ("string", "integer", "number") and value not in values:
            values.append(value)
    return values


def list_properties(tool: Tool) -> dict[str, Any]:
    """Return the parameters of a tool with their schemas; empty if they are not an object of schemas.

    ``true``, the schema that allows every value, is returned as ``{}``, which means the same.
    """
    properties = tool.parameters.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {k: {} if v is True else v for k, v in properties.items() if v is True or isinstance(v, dict)}


def list_required(tool: Tool) -> list[str]:
    """Return the names of the parameters that a tool requires."""
    required = tool.parameters.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
