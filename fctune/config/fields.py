"""Fields of a config: the annotations of their types in the dataclass that holds them, and how these are read.

An annotation is a constraint of the value, the meaning of null, or the consequence of another value
(``keep_last: Annotated[int, Range(ge=1), MAY_CHANGE] = 3``). The checks, the reference page, the JSON Schema, the check
of a resumed run and the fingerprint of prepared sets read it there. A field's documentation is the string literal below
it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


class SectionProblems:
    """Problems that the ``check`` of a section finds, one line each.

    Args:
        uncertain: Fields of the section without a right value, such as one with a misspelt key. A problem that depends
            on one of them is left out: the mistake that is reported for the field may be its cause.
    """

    def __init__(self, uncertain: Collection[str] = ()):
        self._uncertain = frozenset(uncertain)
        self.lines: list[str] = []

    def add(self, fields: Sequence[str], line: str) -> None:
        """Add a problem that depends on these fields of the section."""
        if self._uncertain.isdisjoint(fields):
            self.lines.append(line)


@dataclass(frozen=True, slots=True)
class Range:
    """Interval of a finite number: ``ge <= x``, ``gt < x``, ``x <= le``, ``x < lt``."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def contains(self, value: float) -> bool:
        """Return True for a finite number within the bounds; NaN is in no interval."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def find_problems(self, key: str, value: float | str | list[float], null: str) -> list[str]:
        """Check a number, or each number of a list; a word in place of a number is in the field's type."""
        if isinstance(value, str):
            return []
        if isinstance(value, list):
            return [p for i, item in enumerate(value) for p in self.find_problems(f"{key}.{i}", item, null)]
        return [] if self.contains(value) else [f"{key}={value}: expected {self.describe()}{null}"]

    def describe(self) -> str:
        """Describe the interval for a sentence that starts with "expected"."""
        bounds = (
            (self.ge, "{:g} or more"),
            (self.gt, "more than {:g}"),
            (self.le, "at most {:g}"),
            (self.lt, "less than {:g}"),
        )
        return " and ".join(words.format(bound) for bound, words in bounds if bound is not None)

    def to_json_schema(self) -> dict[str, float]:
        """Return the bounds as JSON Schema keywords."""
        names = {"minimum": self.ge, "exclusiveMinimum": self.gt, "maximum": self.le, "exclusiveMaximum": self.lt}
        return {name: bound for name, bound in names.items() if bound is not None}


AT_LEAST_0 = Range(ge=0)
AT_LEAST_1 = Range(ge=1)
SHARE = Range(ge=0, le=1)


@dataclass(frozen=True, slots=True)
class Null:
    """Meaning of null in an optional field, such as "no limit"."""

    meaning: str


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """Constraint of a list that needs at least one item; ``example`` is what to write."""

    example: str

    def find_problems(self, key: str, value: list[Any], null: str) -> list[str]:
        """Check that the list holds an item."""
        return [] if value else [f"{key}={value}: empty; write e.g. {self.example}{null}"]


@dataclass(frozen=True, slots=True)
class Notation:
    """Constraint of values in a notation of their own, of any type, such as ``10min``.

    Attributes:
        name: Describes the values on the reference page.
        read: Reads a value; its ``ValueError`` says what is wrong with another.
    """

    name: str
    read: Callable[[Any], object]

    def find_problems(self, key: str, value: Any, null: str) -> list[str]:
        """Check that the value can be read."""
        try:
            self.read(value)
        except ValueError as error:
            return [f"{key}={value}: {error}{null}"]
        return []


class Change(Enum):
    """Consequence of another value in a field; of a section, of another value in any of its fields.

    Without one, a run does not resume with another value. Another value in ``data`` makes another prepared set, unless
    the field keeps it. The members' values are the words of the reference page.
    """

    MAY_CHANGE = "may change"
    SAME_CONTENT = "same content"  # compared by a digest of what the field stands for
    KEEPS_PREPARED = "may change; same rows"


MAY_CHANGE, SAME_CONTENT, KEEPS_PREPARED = Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a section, read from its annotated type.

    Attributes:
        name: Name of the field.
        arms: Its type, or the types of its union, without None.
        is_nullable: Null is a value of its own; otherwise it selects the default.
        section: Dataclass that it holds, or a list of.
        is_list: It holds a list of sections.
        default: Default value; ``dataclasses.MISSING`` if it is required.
        constraints: Constraints of its value.
        null: Meaning of null, if it is annotated.
        change: Consequence of another value, if it is annotated.
    """

    name: str
    arms: tuple[Any, ...]
    is_nullable: bool
    section: type[Any] | None
    is_list: bool
    default: Any
    constraints: tuple[Any, ...]
    null: str | None
    change: Change | None

    @property
    def is_required(self) -> bool:
        """True if it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def notation(self) -> str | None:
        """Name of the notation of its values, if they have one of their own."""
        return next((one.name for one in self.constraints if isinstance(one, Notation)), None)

    def find_problems(self, key: str, value: Any) -> list[str]:
        """Check a value of the right type; one line per problem."""
        null = "" if self.null is None else f", or null ({self.null})"
        return [problem for one in self.constraints for problem in one.find_problems(key, value, null)]


_FIELDS: dict[type[Any], tuple[Field, ...]] = {}


def list_fields(cls: type[Any]) -> tuple[Field, ...]:
    """Return the fields of a section, in order."""
    if cls not in _FIELDS:
        hints = get_type_hints(cls, include_extras=True)
        _FIELDS[cls] = tuple(_read_field(spec, hints[spec.name]) for spec in dataclasses.fields(cls))
    return _FIELDS[cls]


def _read_field(spec: dataclasses.Field[Any], hint: Any) -> Field:
    hint, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    union = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    arms = tuple(arm for arm in union if arm is not type(None))
    parts = [get_args(arm)[0] if get_origin(arm) is list else arm for arm in arms]
    section = next((part for part in parts if dataclasses.is_dataclass(part)), None)
    return Field(
        name=spec.name,
        arms=arms,
        is_nullable=arms != union,
        section=section,  # type: ignore[arg-type]
        is_list=section is not None and section not in arms,
        default=spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory(),
        constraints=tuple(note for note in notes if not isinstance(note, Null | Change)),
        null=next((note.meaning for note in notes if isinstance(note, Null)), None),
        change=next((note for note in notes if isinstance(note, Change)), None),
    )


def iter_fields(cls: type[Any], where: str = "") -> Iterator[tuple[str, Field]]:
    """Yield the key of each field with the field; a section is followed by its fields, but not a list of sections."""
    for field in list_fields(cls):
        key = join_key(where, field.name)
        yield key, field
        if field.section is not None and not field.is_list:
            yield from iter_fields(field.section, key)


def join_key(where: str, name: str) -> str:
    """Return the full key of a field in the section ``where``, which is empty at the top level."""
    return f"{where}.{name}" if where else name


def read_field_docs(cls: type[Any]) -> dict[str, str]:
    """Return the documentation of each field of a dataclass, those of its bases included, on one line each.

    Raises:
        LookupError: A field has no string literal below it.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            docs |= read_field_docs(base)
    names = [field.name for field in dataclasses.fields(cls)]
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[node.target.id] = " ".join(str(following.value.value).split())
    if missing := [name for name in names if name not in docs]:
        raise LookupError(f"{cls.__name__}: no documentation below {', '.join(missing)}")
    return docs
