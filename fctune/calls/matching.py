"""Match calls with the expected ones: typed equality in any order, and the best pairing of calls that differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from fctune.data.conversation import Call

# With more calls of one name they are paired in order: the best pairing takes cubic time.
MAX_ASSIGNED = 48


def value_key(value: Any) -> Hashable:
    """Return a key that is equal for two argument values exactly if they are equal as typed JSON values.

    Types count: ``"5"`` is not ``5`` and ``true`` is not ``1``. ``5`` and ``5.0`` are equal, as JSON has one type of
    number and JSON Schema takes ``5.0`` for an integer; many serializers write one for the other. The order of keys in
    objects is ignored, that of lists is not; strings are compared exactly. NaN equals nothing.
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
    """Compare two argument values as typed JSON values; see ``value_key``.

    Args:
        left: One value.
        right: The other.
        is_same_number_type: Also distinguish ``5`` from ``5.0``.
    """
    if value_key(left) != value_key(right):
        return False
    return not is_same_number_type or _number_types(left) == _number_types(right)


def call_key(call: Call) -> Hashable:
    """Return a key that is equal for two calls exactly if name and arguments are equal; ids are ignored."""
    return (call.name, value_key(call.arguments))


def is_exact_match(expected: Sequence[Call], actual: Sequence[Call]) -> bool:
    """Return True if the calls are the expected ones, each as often, in any order.

    Equality of calls is transitive, so counting them is as good as any assignment.
    """
    if len(expected) != len(actual):
        return False
    if len(expected) == 1:
        return call_key(expected[0]) == call_key(actual[0])
    return Counter(map(call_key, expected)) == Counter(map(call_key, actual))


def count_equal_arguments(expected: Call, actual: Call) -> int:
    """Count the arguments that both calls have with equal values."""
    return sum(
        key in actual.arguments and value_key(value) == value_key(actual.arguments[key])
        for key, value in expected.arguments.items()
    )


def align(expected: Sequence[Call], actual: Sequence[Call]) -> list[tuple[int, int]]:
    """Pair calls of the same name so that the pairs share most arguments in total.

    Returns index pairs ``(expected, actual)``. Each call is in at most one pair, and as many as possible are paired.
    Equal calls are paired with each other, which never loses a shared argument: what two calls share with a third, they
    share with each other.
    """
    pairs: list[tuple[int, int]] = []
    unpaired_by_key: dict[Hashable, list[int]] = defaultdict(list)
    for column in reversed(range(len(actual))):
        unpaired_by_key[call_key(actual[column])].append(column)
    rows: list[int] = []
    for row, call in enumerate(expected):
        if same := unpaired_by_key[call_key(call)]:
            pairs.append((row, same.pop()))
        else:
            rows.append(row)
    paired = {column for _, column in pairs}
    columns = [column for column in range(len(actual)) if column not in paired]
    assigned = assign(
        [expected[row].name for row in rows],
        [actual[column].name for column in columns],
        lambda row, column: count_equal_arguments(expected[rows[row]], actual[columns[column]]),
    )
    return sorted([*pairs, *((rows[row], columns[column]) for row, column in assigned)])


def assign(expected: Sequence[str], actual: Sequence[str], gain: Callable[[int, int], int]) -> list[tuple[int, int]]:
    """Pair indices of equal names with the greatest total gain, as many as possible.

    Args:
        expected: Names of the calls that are due.
        actual: Names of the calls that were made.
        gain: Value, at least 0, of pairing an index of ``expected`` with one of ``actual``.
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
    """List differences, one line each: missing and unexpected calls, and the arguments of paired calls."""
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
    lines.extend(f"{call.name}: not called" for row, call in enumerate(expected) if row not in rows)
    lines.extend(f"{call.name[:80]}: not expected" for column, call in enumerate(actual) if column not in columns)
    return tuple(lines)


def _best_assignment(gains: list[list[int]]) -> list[tuple[int, int]]:
    """Find the pairs of row and column with the greatest sum, as many as there are rows or columns.

    The Hungarian method with potentials, one shortest augmenting path per row, in cubic time: H. W. Kuhn (1955), in the
    form of J. Munkres (1957).
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
    # Column 0 means "no column yet"; rows count from 1.
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
    """Format a value for a message, in at most 80 characters."""
    # Cut before it is formatted: a hostile value may be megabytes.
    text = repr(value[:80] if isinstance(value, (str, list)) else value)
    return text if len(text) <= 80 else text[:77] + "..."
