"""Nested plain values to dataclasses, reporting every problem with the nearest known name.

Unlike OmegaConf's structured configs, which stop at the first problem.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from fctune.config.fields import find_value_problems, join_key
from fctune.config.intervals import IsInterval

# OWNER/NAME of the hub, also with :CONFIG:SPLIT or @REVISION, but no name of a data file.
_HUB_NAME = re.compile(
    r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.jsonl)(?<!\.json)(?<!\.gz)(?<!\.csv)(?<!\.parquet)(?<!\.ndjson)"
    r"(?::[\w.-]*){0,2}(?:@[\w./-]+)?"
)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the numbers of YAML 1.2: ``2e-4`` is a float, not text."""


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads: text such as ``2e-4`` is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that occurs twice in full each time."""
        return True


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+"),
        list("-+0123456789."),
    )


def parse_yaml(text: str) -> Any:
    """Parse a YAML document to plain values.

    Raises:
        yaml.YAMLError: The text is not YAML.
    """
    return yaml.load(text, _Loader)


def dump_yaml(value: Any, is_inline: bool = False) -> str:
    """Write plain values as YAML that ``parse_yaml`` reads back; ``is_inline``: on one line, without a line break."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=is_inline or None
    )
    return text.removesuffix("\n...\n").removesuffix("\n") if is_inline else text


def apply_override(raw: dict[str, Any], override: str, problems: list[str]) -> None:
    """Set ``a.b=value`` (parsed as YAML) or drop ``~a.b`` in nested dicts and lists, in place."""
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
            problems.append(f"{override}: {parent} is neither a key of a mapping nor an index of a list")
            return
    try:
        value = None if drop else parse_yaml(text)
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
        problems.append(f"{override}: {last} is neither a key of a mapping nor an index of a list")


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
    their ``check(where, problems)`` method, if they have one; what it says about a wrong or misspelt key is left out.
    Null selects a field's default. A mapping is merged over the field's default mapping. For an unknown key,
    ``find_key`` may name the one that is meant; otherwise the nearest key of the section is suggested.

    Returns:
        The instance, or None if it cannot be built; then ``problems`` has a line for each reason.
    """
    context = _Context(find_key)
    built = _build(cls, raw, where, problems, context)
    problems += context.out_of_range
    return built


def _build(cls: type[Any], raw: Any, where: str, problems: list[str], context: _Context) -> Any:
    names = [spec.name for spec in dataclasses.fields(cls)]
    if not isinstance(raw, dict):
        meant = context.find_key(where)
        close = f"; did you mean {meant}?" if meant and meant != where else ""
        problems.append(f"{where}: expected a mapping with the keys {', '.join(names)}, got {raw!r}{close}")
        return None
    hints = get_type_hints(cls, include_extras=True)
    uncertain: set[str] = set()  # fields without a right value, and those that an unknown key may be meant for
    for key in raw:
        if key not in names:
            meant = context.find_key(join_key(where, str(key)))
            close = f"; did you mean {meant}?" if meant else suggest(str(key), names, join_key(where, ""))
            problems.append(f"{join_key(where, key)}: unknown key{close}")
            uncertain |= set(_find_near(str(key), names))
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        key = join_key(where, spec.name)
        if spec.name not in raw:
            if required:
                problems.append(f"{key}: missing; it has no default")
            continue
        value, (hint, constraints) = raw[spec.name], split_annotation(hints[spec.name])
        if value is None and not required and type(None) not in get_args(hint):
            continue
        num_so_far = len(problems)
        if isinstance(value, float) and any(isinstance(constraint, IsInterval) for constraint in constraints):
            problems.append(f"{key}={value:g}: not a number of steps; for a share of the run write {100 * value:g}%")
        else:
            value = _parse_value(hint, value, key, problems, context)
        if isinstance(value, dict) and spec.default_factory is not dataclasses.MISSING:
            value = spec.default_factory() | value
        values[spec.name] = value
        if value is not None and len(problems) == num_so_far:
            context.out_of_range += find_value_problems(key, value, constraints)
        elif value is None or not dataclasses.is_dataclass(value):
            uncertain |= {spec.name} if len(problems) > num_so_far else set()
    try:
        built = cls(**values)
    except TypeError:
        return None  # a required key is missing, which has been reported
    if hasattr(built, "check"):
        right = {name: value for name, value in values.items() if name not in uncertain}
        context.out_of_range += _check_section(cls, right, where, uncertain)
    return built


def _check_section(cls: type[Any], values: dict[str, Any], where: str, uncertain: set[str]) -> list[str]:
    """Return the problems of a section's ``check`` that involve no uncertain field."""
    found: list[str] = []
    try:
        cls(**values).check(where, found)
    except TypeError:
        return []  # a required value is wrong, which has been reported
    pattern = re.compile("|".join(rf"\b{name}\b" for name in sorted(uncertain)) or r"\Z.")
    return [problem for problem in found if not pattern.search(problem)]


def split_annotation(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split ``Annotated[type, *constraints]`` into the type and its constraints; other types have none."""
    if get_origin(hint) is Annotated:
        inner, *constraints = get_args(hint)
        return inner, tuple(constraints)
    return hint, ()


def _parse_value(hint: Any, value: Any, where: str, problems: list[str], context: _Context) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        arms = [a for a in args if a is not type(None)]
        lists = [a for a in arms if get_origin(a) is list]
        matching = [a for a in arms if (a in lists) == isinstance(value, list)]
        if type(value) in matching:
            matching = [type(value)]
        num_so_far = len(problems)
        parsed = _parse_value((matching or arms)[0], value, where, problems, context)
        if lists and matching and len(problems) > num_so_far and not isinstance(value, list):
            problems[-1] += ", or a list"
        return parsed
    if origin is Literal:
        if isinstance(value, bool) and (word := "on" if value else "off") in args:
            value = word  # YAML 1.1 reads both words as booleans
        if value not in args or isinstance(value, bool) != isinstance(args[0], bool):
            close = suggest(str(value), [str(a) for a in args], "")
            problems.append(f"{where}={value!r}: expected one of {', '.join(map(str, args))}{close}")
        return value
    if origin is list:
        if not isinstance(value, list):
            problems.append(f"{where}={value!r}: expected a list")
            return None
        return [_parse_value(args[0], item, f"{where}.{i}", problems, context) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where, problems, context)  # type: ignore[arg-type]
    if origin is dict:
        if not isinstance(value, dict):
            problems.append(f"{where}={value!r}: expected a mapping")
            return {}
        return dict(value)
    return _parse_scalar(hint, value, where, problems)


def _parse_scalar(hint: type[Any], value: Any, where: str, problems: list[str]) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # other readers of YAML leave 2e-4 as text
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    noun = {int: "an integer", float: "a number", str: "text", bool: "true or false"}[hint]
    problems.append(f"{where}={value!r}: expected {noun}, got {type(value).__name__}")
    return value


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``; did you mean ...?`` if a known name is close, else an empty string."""
    near = _find_near(word, known)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def suggest_hub_name(path: str, otherwise: str = "") -> str:
    """Return ``; did you mean hf:OWNER/NAME?`` if a path that does not exist has the form of a name on the hub.

    Args:
        path: A path, or a name without ``hf:``, with ``:CONFIG`` or ``@REVISION``.
        otherwise: Returned for any other path.
    """
    owner = path.partition("/")[0]
    is_name = _HUB_NAME.fullmatch(path) is not None and not Path(owner).exists()
    return f"; did you mean hf:{path}?" if is_name else otherwise


def describe_no_file(path: str | Path) -> str:
    """Return why a path is not a file: ``a directory, not a file`` or ``no such file``."""
    return "a directory, not a file" if Path(path).is_dir() else "no such file"


def _find_near(word: str, known: Iterable[str]) -> list[str]:
    """Return a list with the closest known name, or an empty list if none is close."""
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
