"""Bytes of JSON values, to tell values apart and to search their strings in a tenth of the time that JSON takes."""

from __future__ import annotations

import marshal
from typing import Any


def dump_value(value: Any) -> bytes | None:
    """Return bytes with all strings of a value in UTF-8, the order of keys included; None for values of other types."""
    try:
        return marshal.dumps(value, 2)
    except ValueError:  # it takes no subclasses, such as the structs of Arrow
        return None
