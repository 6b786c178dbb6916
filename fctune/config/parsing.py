"""Nested plain values to dataclasses, reporting every problem with the nearest known name.

Unlike OmegaConf's structured configs, which stop at the first problem.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from fctune.config.fields import SectionProblems, join_key, list_fields
from fctune.config.yaml_text import parse_yaml

# OWNER/NAME of the hub, also with :CONFIG:SPLIT or @REVISION, but no name of a data file.
_HUB_NAME = re.compile(
    r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.jsonl)(?<!\.json)(?<!\.gz)(?<!\.csv)(?<!\.parquet)(?<!\.ndjson)"
    r"(?::[\w.-]*){0,2}(?:@[\w./-]+)?"
)


_MAX_TEXT = 4096  # characters of a path on Linux, and more than any name
_MAX_SHOWN = 200  # characters of a wrong value
_MAX_UNKNOWN = 50  # unknown keys of a section that are reported
_MAX_PARTS = 50  # of a dotted key


def apply_override(raw: dict[str, Any], override: str, problems: list[str]) -> None:
    """Set ``a.b=value`` (parsed as YAML) or drop ``~a.b`` in nested dicts and lists, in place."""
    drop = override.startswith("~")
    key, equals, text = (override[1:], "=", "") if drop else override.partition("=")
    if not equals or not key:
        problems.append(f"{override}: not an override; write key=value, a.b=value, or ~key to drop one")
        return
    *parents, last = key.split(".", _MAX_PARTS)
    if "." in last:
        problems.append(f"{shorten(override)}: more than {_MAX_PARTS} levels; no key is as deep")
        return
    node: Any = raw
    for parent in parents:
        if isinstance(node, list) and (index := parse_index(parent)) is not None and index < len(node):
            node = node[index]
        elif isinstance(node, dict):
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        else:
            problems.append(f"{override}: {parent} is neither a key of a mapping nor an index of a list")
            return
    try:
        value = None if drop else parse_yaml(text)
    except yaml.YAMLError as error:
        problems.append(f"{override}: value is not YAML: {' '.join(str(error).split())}")
        return
    if isinstance(node, list) and (index := parse_index(last)) is not None and index < len(node):
        node[index] = value
    elif isinstance(node, dict):
        if drop:
            node.pop(last, None)
        else:
            node[last] = value
    else:
        problems.append(f"{override}: {last} is neither a key of a mapping nor an index of a list")


def parse_index(word: str) -> int | None:
    """Return the index that a part of a dotted key is; None for another word."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 10 else None


def shorten(value: Any, max_chars: int = _MAX_SHOWN) -> str:
    """Return a value as a message shows it: text as it is, others as Python writes them; the middle may be left out."""
    text = value if isinstance(value, str) else repr(value)
    half = max_chars // 2
    return text if len(text) <= max_chars else f"{text[:half]} ... {text[-half:]} ({len(text):,} characters)"


@dataclass(slots=True)
class _Context:
    """The parts of a parse that all sections share.

    Attributes:
        find_key: Finds the key that an unknown one is meant for, anywhere in the schema.
        out_of_range: Problems of values of the right type.
    """

    find_key: Callable[[str], str | None]
    out_of_range: list[str] = field(default_factory=list)


def parse_dataclass(
    cls: type[Any],
    raw: Any,
    where: str,
    problems: list[str],
    find_key: Callable[[str], str | None] = lambda key: None,
) -> Any:
    """Build an instance of ``cls`` from nested plain values, and check it.

    Values of the right type are checked against the constraints in the annotations of their fields, and sections by
    their ``check(where, problems)`` method, if they have one; what it finds by a wrong or misspelt key is left out.
    Null selects a field's default. A mapping is merged over the field's default mapping, in which null selects the
    default, too. For an unknown key, ``find_key`` may name the one that is meant; otherwise the nearest key of the
    section is suggested.

    Returns:
        The instance, or None if it cannot be built; then ``problems`` has a line for each reason.
    """
    context = _Context(find_key)
    built = _build(cls, raw, where, problems, context)
    problems += context.out_of_range
    return built


def _build(cls: type[Any], raw: Any, where: str, problems: list[str], context: _Context) -> Any:
    fields = {spec.name: spec for spec in list_fields(cls)}
    names = list(fields)
    if not isinstance(raw, dict):
        meant = context.find_key(where)
        close = f"; did you mean {meant}?" if meant and meant != where else ""
        problems.append(
            f"{where}: expected a mapping with the keys {', '.join(names)}, got {shorten(repr(raw))}{close}"
        )
        return None
    uncertain: set[str] = set()  # fields without a right value, and those that an unknown key may be meant for
    unknown = [key for key in raw if key not in names]
    for key in unknown[:_MAX_UNKNOWN]:
        word = shorten(str(key))
        meant = context.find_key(join_key(where, word))
        close = f"; did you mean {meant}?" if meant else suggest(word, names, join_key(where, ""))
        problems.append(f"{join_key(where, word)}: unknown key{close}")
        uncertain |= set(_find_near(word, names))
    if num_more := len(unknown[_MAX_UNKNOWN:]):
        problems.append(f"{where or 'the config'}: {num_more:,} more unknown keys")
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        key = join_key(where, name)
        if name not in raw:
            problems += [f"{key}: missing; it has no default"] if spec.is_required else []
            continue
        value = raw[name]
        if value is None and not spec.is_required and not spec.is_nullable:
            continue
        num_so_far = len(problems)
        if spec.notation is None and (value is not None or not spec.is_nullable):
            value = _parse_union(spec.arms, value, key, problems, context)
        if isinstance(value, dict) and spec.default and isinstance(spec.default, dict):
            value = spec.default | {name: item for name, item in value.items() if item is not None}
        values[name] = value
        if value is not None and len(problems) == num_so_far:
            context.out_of_range += spec.find_problems(key, value)
        elif not dataclasses.is_dataclass(value) and len(problems) > num_so_far:
            uncertain.add(name)
    try:
        built = cls(**values)
    except TypeError:
        return None  # a required key is missing, which has been reported
    if callable(getattr(cls, "check", None)):  # not a field of that name
        right = {name: value for name, value in values.items() if name not in uncertain}
        context.out_of_range += _check_section(cls, right, where, uncertain)
    return built


def _check_section(cls: type[Any], values: dict[str, Any], where: str, uncertain: set[str]) -> list[str]:
    """Return the problems of a section's ``check`` that depend on no uncertain field."""
    found = SectionProblems(uncertain)
    try:
        cls(**values).check(where, found)
    except TypeError:
        return []  # a required value is wrong, which has been reported
    except OSError as error:  # a path that the system cannot look up, such as one with a name of 300 characters
        key = next((name for name, value in values.items() if value and str(value) in str(error.filename)), "")
        found.add(
            (key,) if key else (),
            f"{join_key(where, key) if key else where}={shorten(str(error.filename))}: {error.strerror}",
        )
    return found.lines


def _parse_union(arms: tuple[Any, ...], value: Any, where: str, problems: list[str], context: _Context) -> Any:
    """Parse a value as the type that fits it, or else as the first one."""
    matching = [arm for arm in arms if (get_origin(arm) is list) == isinstance(value, list)] or arms
    num_so_far = len(problems)
    words = [word for arm in matching if get_origin(arm) is Literal for word in get_args(arm)]
    if len(matching) > 1 and value in words:
        return value
    arm = type(value) if type(value) in matching else matching[0]
    parsed = _parse_value(arm, value, where, problems, context)
    if len(problems) > num_so_far:
        if len(arms) > len(matching) and not isinstance(value, list):
            problems[-1] += ", or a list"
        elif len(matching) > 1 and words:
            problems[-1] += f", or {' or '.join(words)}"
    return parsed


def _parse_value(hint: Any, value: Any, where: str, problems: list[str], context: _Context) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if isinstance(value, bool) and (word := "on" if value else "off") in args:
            value = word  # YAML 1.1 reads both words as booleans
        if value not in args or isinstance(value, bool) != isinstance(args[0], bool):
            close = suggest(str(value), [str(a) for a in args], "")
            problems.append(f"{where}={shorten(repr(value))}: expected one of {', '.join(map(str, args))}{close}")
        return value
    if origin in (list, dict) and not isinstance(value, origin):
        problems.append(f"{where}={shorten(repr(value))}: expected a {'list' if origin is list else 'mapping'}")
        return None if origin is list else {}
    if origin is list:
        return [_parse_value(args[0], item, f"{where}.{i}", problems, context) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where, problems, context)  # type: ignore[arg-type]
    return dict(value) if origin is dict else _parse_scalar(hint, value, where, problems)


def _parse_scalar(hint: type[Any], value: Any, where: str, problems: list[str]) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, str) and (problem := find_text_problem(value)):
        problems.append(f"{where}={shorten(repr(value))}: {problem}")
        return None
    if hint is float and isinstance(value, str):  # other readers of YAML leave 2e-4 as text
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    noun = {int: "an integer", float: "a number", str: "text", bool: "true or false"}[hint]
    got = "one of more than 64 bits" if _is_large(hint, value) else type(value).__name__
    problems.append(f"{where}={shorten(repr(value))}: expected {noun}, got {got}")
    return value


def _is_large(hint: type[Any], value: Any) -> bool:
    """Return True for an integer that ``parse_yaml`` left as text."""
    return hint is int and isinstance(value, str) and value.lstrip("+-").isdigit()


def find_text_problem(text: str) -> str | None:
    """Return why a text can be neither a name nor a path; None if it can."""
    if "\0" in text:
        return "contains a NUL character"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "is not valid Unicode"
    return None if len(text) <= _MAX_TEXT else f"too long; expected at most {_MAX_TEXT:,} characters"


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``; did you mean ...?`` if a known name is close, else an empty string."""
    near = _find_near(word, known)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def suggest_in_brackets(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean ...?)`` if a known name is close, else an empty string."""
    near = _find_near(word, known)
    return f" (did you mean {near[0]}?)" if near else ""


def suggest_hub_name(path: str, otherwise: str = "") -> str:
    """Return ``; did you mean hf:OWNER/NAME?`` if a path that does not exist has the form of a name on the hub.

    Args:
        path: A path, or a name without ``hf:``, with ``:CONFIG`` or ``@REVISION``.
        otherwise: Returned for any other path.
    """
    return f"; did you mean hf:{path}?" if is_hub_name(path) else otherwise


def is_hub_name(path: str) -> bool:
    """Return True for the form OWNER/NAME, also with ``:CONFIG`` or ``@REVISION``, where OWNER is not a directory."""
    return _HUB_NAME.fullmatch(path) is not None and not os.path.exists(path.partition("/")[0])


def describe_no_file(path: str | Path) -> str:
    """Return why a path is not a file: ``a directory, not a file`` or ``no such file``."""
    return "a directory, not a file" if os.path.isdir(path) else "no such file"


def _find_near(word: str, known: Iterable[str]) -> list[str]:
    """Return a list with the closest known name, or an empty list if none is close."""
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
