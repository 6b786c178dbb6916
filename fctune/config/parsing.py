"""Nested plain values onto dataclasses, with every problem reported: what a YAML file says against what is meant.

Unlike OmegaConf's structured configs, which stop at the first problem, and with the nearest right name for each key.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml


def apply_override(raw: dict[str, Any], override: str, problems: list[str]) -> None:
    """Set ``a.b=value`` (read as YAML), or drop ``~a.b``, in nested dicts and lists, in place."""
    drop = override.startswith("~")
    key, equals, text = (override[1:], "=", "") if drop else override.partition("=")
    if not equals or not key:
        problems.append(f"{override}: not an override; write key=value, a.b=value, or ~key to drop one")
        return
    *parents, last = key.split(".")
    node: Any = raw
    for parent in parents:
        if isinstance(node, list) and parent.isdigit() and int(parent) < len(node):
            node = node[int(parent)]
        elif isinstance(node, dict):
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        else:
            problems.append(f"{override}: {parent} is not a key of a mapping or an index of a list")
            return
    try:
        value = None if drop else yaml.safe_load(text)
    except yaml.YAMLError as error:
        problems.append(f"{override}: value is not YAML: {' '.join(str(error).split())}")
        return
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        if drop:
            node.pop(last, None)
        else:
            node[last] = value
    else:
        problems.append(f"{override}: {last} is not a key of a mapping or an index of a list")


def parse_dataclass(cls: type[Any], raw: Any, where: str, problems: list[str]) -> Any:
    """An instance of ``cls`` from nested plain values; None, and a line in ``problems``, where they do not fit it."""
    if not isinstance(raw, dict):
        problems.append(f"{where}: expected a mapping with the keys {', '.join(_field_names(cls))}, got {raw!r}")
        return None
    hints = get_type_hints(cls)
    names = _field_names(cls)
    prefix = f"{where}." if where else ""
    for key in raw:
        if key not in names:
            problems.append(f"{prefix}{key}: unknown key{suggest(str(key), names, prefix)}")
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if spec.name not in raw:
            if required:
                problems.append(f"{prefix}{spec.name}: missing; it has no default")
            continue
        value = raw[spec.name]
        if value is None and not required and type(None) not in get_args(hints[spec.name]):
            continue  # null: the default
        values[spec.name] = _parse_value(hints[spec.name], value, prefix + spec.name, problems)
    try:
        return cls(**values)
    except TypeError:
        return None  # a required key is missing: already in problems


def _parse_value(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _parse_value(next(a for a in args if a is not type(None)), value, where, problems)
    if origin is Literal:
        if value not in args or isinstance(value, bool) != isinstance(args[0], bool):
            close = suggest(str(value), [str(a) for a in args], "")
            problems.append(f"{where}={value!r}: expected one of {', '.join(map(str, args))}{close}")
        return value
    if origin is list:
        if not isinstance(value, list):
            problems.append(f"{where}={value!r}: expected a list")
            return []
        return [_parse_value(args[0], item, f"{where}.{i}", problems) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(hint):
        return parse_dataclass(hint, value, where, problems)  # type: ignore[arg-type]
    if origin is dict:
        if not isinstance(value, dict):
            problems.append(f"{where}={value!r}: expected a mapping")
            return {}
        return dict(value)
    return _parse_scalar(hint, value, where, problems)


def _parse_scalar(hint: type[Any], value: Any, where: str, problems: list[str]) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 2e-4 as text
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    noun = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[hint]
    problems.append(f"{where}={value!r}: expected {noun}, got {type(value).__name__}")
    return value


def _field_names(cls: type[Any]) -> list[str]:
    return [spec.name for spec in dataclasses.fields(cls)]


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """``; did you mean ...?`` where a known name is near, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
