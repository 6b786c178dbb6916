"""Lookup of call formats by name, by model family, and by chat template.

The formats are found in the modules of this package; nothing about any one of them is known here.
"""

from __future__ import annotations

import difflib
import re

from fctune.base.errors import ConfigError, DataError
from fctune.calls import formats
from fctune.calls.discovery import find_formats, match_signature, sort_signatures
from fctune.calls.formats.base import CallFormat

_DECLARED = re.compile(r"\{#-?\s*call_format:\s*([\w.\-]+)")

FORMATS: dict[str, CallFormat] = find_formats(formats, CallFormat)  # type: ignore[type-abstract]
_ALIASES = {alias: found.name for found in FORMATS.values() for alias in found.aliases}
_SIGNATURES = sort_signatures(FORMATS)


def get_format(name: str) -> CallFormat:
    """Return the format of that name, or the one written by the model family of that name.

    Raises:
        ConfigError: No such format; the message lists the known ones.
    """
    found = FORMATS.get(_ALIASES.get(name, name))
    if found is not None:
        return found
    near = difflib.get_close_matches(name, [*FORMATS, *_ALIASES], n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(
        f"format {name!r}: no such call format{hint}\n"
        f"  Known formats: {', '.join(FORMATS)}; by model: {', '.join(_ALIASES)}."
    )


def detect_format(chat_template: str) -> CallFormat:
    """Return the format in which a chat template writes calls.

    A template can say it itself, in a comment such as ``{# call_format: hermes #}``; else its text is searched for the
    formats' marks.

    Raises:
        DataError: The template writes calls in no known format, or writes none.
    """
    declared = _DECLARED.search(chat_template)
    if declared is not None:
        try:
            return get_format(declared[1])
        except ConfigError as error:
            raise DataError(f"chat template: its call_format comment does not name a format. {error}") from None
    found = match_signature(_SIGNATURES, chat_template)
    if found is not None:
        return found
    raise DataError(
        f"chat template of {len(chat_template):,} characters: matches no known call format.\n"
        f"  Specify the format: --format NAME, one of {', '.join(FORMATS)}; or start the template with the comment "
        "{# call_format: NAME #}."
    )
