"""Whether calls are the expected ones: typed equality, order-free, and the best pairing of those that differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from fctune.data.conversation import Call

# Above it calls of one name are paired in order: the best pairing costs the cube.
MAX_ASSIGNED = 48


def value_key(value: Any) -> Hashable:
    """A key that two argument values share exactly when they are equal as typed JSON values.

    Types count: ``"5"`` is not ``5`` and ``true`` is not ``1``. ``5`` and ``5.0`` are equal, as JSON has one type of
    number and JSON Schema takes ``5.0`` for an integer; many serialisers write one for the other. Key order in
    objects does not count, order in lists does, strings count to the letter. NaN equals nothing.
    """
    if isinstance(value, bool) or value is None:
        return (type(value).__name__, value)
    if isinstance(value, dict):
        return ("object", frozenset((key, value_key(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("array", tuple(value_key(item) for item in value))
    if isinstance(value, float) and value != value:
        return ("nan", object())
    key: Hashable = value
    return key


def is_equal(left: Any, right: Any, is_same_number_type: bool = False) -> bool:
    """Whether two argument values are equal as typed JSON values, as ``value_key`` says.

    Args:
        left: One value.
        right: The other.
        is_same_number_type: Tell ``5`` from ``5.0`` as well.
    """
    if value_key(left) != value_key(right):
        return False
    return not is_same_number_type or _number_types(left) == _number_types(right)


def call_key(call: Call) -> Hashable:
    """A key that two calls share exactly when name and arguments are equal; the id does not count."""
    return (call.name, value_key(call.arguments))


def is_exact_match(expected: Sequence[Call], actual: Sequence[Call]) -> bool:
    """Whether the calls are the expected ones, each as often, in any order.

    Equality of calls is transitive, so counting them pairs them as well as any assignment could.
    """
    if len(expected) != len(actual):
        return False
    if len(expected) == 1:
        return call_key(expected[0]) == call_key(actual[0])
    return Counter(map(call_key, expected)) == Counter(map(call_key, actual))


def count_equal_arguments(expected: Call, actual: Call) -> int:
    """How many arguments both calls have with equal values."""
    return sum(
        key in actual.arguments and value_key(value) == value_key(actual.arguments[key])
        for key, value in expected.arguments.items()
    )


def align(expected: Sequence[Call], actual: Sequence[Call]) -> list[tuple[int, int]]:
    """The pairs ``(place in expected, place in actual)`` of calls of one name that share most arguments in all.

    Each call is in one pair at most; as many are paired as can be. Calls that are equal are paired with each other,
    which never costs a shared argument: what two calls share with a third, they share among themselves.
    """
    pairs: list[tuple[int, int]] = []
    left_by_key: dict[Hashable, list[int]] = defaultdict(list)
    for place in reversed(range(len(actual))):
        left_by_key[call_key(actual[place])].append(place)
    waiting: list[int] = []
    for place, call in enumerate(expected):
        if same := left_by_key[call_key(call)]:
            pairs.append((place, same.pop()))
        else:
            waiting.append(place)
    taken = {place for _, place in pairs}
    offered = [place for place in range(len(actual)) if place not in taken]
    more = assign(
        [expected[place].name for place in waiting],
        [actual[place].name for place in offered],
        lambda row, column: count_equal_arguments(expected[waiting[row]], actual[offered[column]]),
    )
    return sorted([*pairs, *((waiting[row], offered[column]) for row, column in more)])


def assign(expected: Sequence[str], actual: Sequence[str], gain: Callable[[int, int], int]) -> list[tuple[int, int]]:
    """The pairs of places of one name with the greatest sum of gains, as many as can be.

    Args:
        expected: The names of the calls that are due.
        actual: The names of the calls that were made.
        gain: What pairing a place of ``expected`` with one of ``actual`` is worth, 0 or more.
    """
    rows_by_name: dict[str, list[int]] = defaultdict(list)
    columns_by_name: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(expected):
        rows_by_name[name].append(row)
    for column, name in enumerate(actual):
        columns_by_name[name].append(column)
    pairs: list[tuple[int, int]] = []
    for name, rows in rows_by_name.items():
        columns = columns_by_name[name]
        if max(len(rows), len(columns)) == 1 or max(len(rows), len(columns)) > MAX_ASSIGNED:
            pairs.extend(zip(rows, columns, strict=False))
        else:
            gains = [[gain(row, column) for column in columns] for row in rows]
            pairs.extend((rows[row], columns[column]) for row, column in _best_assignment(gains))
    return sorted(pairs)


def describe_differences(expected: Sequence[Call], actual: Sequence[Call]) -> tuple[str, ...]:
    """What differs, one line each: calls that are missing or were not expected, arguments of those that pair."""
    lines: list[str] = []
    pairs = align(expected, actual)
    for row, column in pairs:
        name, due, given = expected[row].name, expected[row].arguments, actual[column].arguments
        for key, value in due.items():
            if key not in given:
                lines.append(f"{name}.{key}: missing, expected {shorten(value)}")
            elif value_key(value) != value_key(given[key]):
                lines.append(f"{name}.{key}: {shorten(given[key])}, expected {shorten(value)}")
        lines.extend(f"{name}.{key}: {shorten(given[key])}, not expected" for key in given if key not in due)
    rows, columns = {row for row, _ in pairs}, {column for _, column in pairs}
    lines.extend(f"{call.name}: not called" for place, call in enumerate(expected) if place not in rows)
    lines.extend(f"{call.name[:80]}: not expected" for place, call in enumerate(actual) if place not in columns)
    return tuple(lines)


def _best_assignment(gains: list[list[int]]) -> list[tuple[int, int]]:
    """Pairs of row and column with the greatest sum, as many as there are rows or columns.

    The Hungarian method with potentials, one shortest augmenting path a row: H. W. Kuhn (1955), in the form of
    J. Munkres (1957); cubic.
    """
    if not gains or not gains[0]:
        return []
    if len(gains) > len(gains[0]):
        return [(row, column) for column, row in _best_assignment([list(line) for line in zip(*gains, strict=True)])]
    num_rows, num_columns = len(gains), len(gains[0])
    best = [line.index(max(line)) for line in gains]
    if len(set(best)) == num_rows:
        return list(enumerate(best))
    row_price, column_price = [0] * (num_rows + 1), [0] * (num_columns + 1)
    # Column 0 stands for "no column yet"; rows count from 1.
    row_of = [0] * (num_columns + 1)
    for row in range(1, num_rows + 1):
        row_of[0], column = row, 0
        slack: list[float] = [float("inf")] * (num_columns + 1)
        came_from, is_done = [0] * (num_columns + 1), [False] * (num_columns + 1)
        while row_of[column]:
            is_done[column] = True
            for other in range(1, num_columns + 1):
                if not is_done[other]:
                    here = row_of[column]
                    cost = -gains[here - 1][other - 1] - row_price[here] - column_price[other]
                    if cost < slack[other]:
                        slack[other], came_from[other] = cost, column
            nearest = min((other for other in range(1, num_columns + 1) if not is_done[other]), key=slack.__getitem__)
            step = int(slack[nearest])
            for other in range(num_columns + 1):
                if is_done[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                else:
                    slack[other] -= step
            column = nearest
        while column:
            row_of[column], column = row_of[came_from[column]], came_from[column]
    return [(row_of[column] - 1, column - 1) for column in range(1, num_columns + 1) if row_of[column]]


def _number_types(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_number_types(item) for item in value]
    return type(value)


def shorten(value: Any) -> str:
    """A value as a message shows it, in 80 characters at most."""
    # Cut before it is printed: a hostile value may be megabytes.
    text = repr(value[:80] if isinstance(value, (str, list)) else value)
    return text if len(text) <= 80 else text[:77] + "..."
