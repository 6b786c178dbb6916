"""Read calls that arrive as data: from an endpoint's ``tool_calls`` or from a file of predictions.

OpenAI's API sends a call's arguments as a string of JSON; some servers and most files hold an object. Both are read
everywhere, as are calls with and without the ``function`` wrapper.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from fctune.base.json_reader import MAX_DEPTH, ParseError, decode_json, is_deeper_than, reads_like_python
from fctune.calls.formats.base import Malformed, Parsed, with_decoded
from fctune.data.conversation import Call

# How the readers of JSON, of Python literals and of tagged arguments all word it.
_DUPLICATE = re.compile(r"(?:^|: )duplicate (?:key|argument|parameter) ['\"]")


class Reading(NamedTuple):
    """One answer read twice: strictly, and leniently as serving engines do; both are one object where they agree."""

    strict: Parsed
    lenient: Parsed

    @property
    def decoded(self) -> Parsed:
        """The strict reading as a benchmark's decoder gives it, which accepts whatever ``json.loads`` does."""
        if self.strict.decoded is not None:
            return Parsed(self.strict.decoded)
        malformed = self.strict.malformed
        if malformed and not self.lenient.malformed and all(_DUPLICATE.search(one.reason) for one in malformed):
            return self.lenient
        return self.strict


def read_tool_calls(sent: Any, prose: str = "", is_bounded: bool = False) -> Reading:
    """Read calls as endpoints and prediction files give them; never raises.

    The lenient reading also takes missing or empty arguments for ``{}``, and the last of equal keys.

    Args:
        sent: Expected to be a list of calls. Items that are not calls become malformed stretches, of length 0 because
            there is no text.
        prose: Text next to the calls.
        is_bounded: The calls come from ``decode_json``, which bounds their depth; otherwise deep ones are malformed.
    """
    if not isinstance(sent, (list, tuple)):
        parsed = Parsed((), (Malformed(0, 0, f"expected a list of calls, got {type(sent).__name__}"),), prose)
        return Reading(parsed, parsed)
    strict = with_decoded(
        _read_all(sent, prose, is_bounded, lenient=False), lambda: _read_all(sent, prose, is_bounded, lenient=False)
    )
    # Lenience only ever accepts more.
    return Reading(strict, _read_all(sent, prose, is_bounded, lenient=True) if strict.malformed else strict)


def _read_all(sent: list[Any] | tuple[Any, ...], prose: str, is_bounded: bool, lenient: bool) -> Parsed:
    calls: list[Call] = []
    malformed: list[Malformed] = []
    for item in sent:
        call = _read_call(item, is_bounded, lenient)
        if isinstance(call, Call):
            calls.append(call)
        else:
            malformed.append(Malformed(0, 0, call))
    return Parsed(tuple(calls), tuple(malformed), prose)


def _read_call(value: Any, is_bounded: bool, lenient: bool) -> Call | str:
    """Read one call, or return the reason that it cannot be read."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return f"expected a call as an object, got {type(value).__name__}"
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        if not reads_like_python() or "name" not in value or isinstance(name, (dict, list)):
            return "a call without a name"
        name = ""
    if lenient and (arguments is None or arguments == [] or (isinstance(arguments, str) and not arguments.strip())):
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = decode_json(arguments, lenient)
        except ParseError as error:
            return f"{name[:80]}: arguments are not JSON: {error.reason}"
    if not isinstance(arguments, dict):
        return f"{name[:80]}: arguments are not an object but {type(arguments).__name__}"
    if not is_bounded and not reads_like_python() and is_deeper_than(arguments, MAX_DEPTH):
        return f"{name[:80]}: arguments are nested more than {MAX_DEPTH} deep"
    return Call(name, arguments)
