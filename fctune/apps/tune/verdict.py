"""The verdict on a tune's result, and whether it is released, which a later gate may have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MEANINGS = {
    "safe": "nothing got worse than its tolerance",
    "worse": "a line got worse",
    "undecided": "some lines have too few cases to tell; nothing is known to be worse",
}


def describe_verdict(judged: Mapping[str, Any]) -> str:
    """Return what the tune's own gate found."""
    return f"verdict: {judged['verdict']} ({_MEANINGS[judged['verdict']]})"


def describe_release(judged: Mapping[str, Any], marked: Sequence[Mapping[str, Any]] | None) -> str:
    """Return what serve and push do with the result, and why; empty if no gate has ever stopped it.

    Args:
        judged: What the tune's own gate found.
        marked: The lines of the result's mark; None: it has none.
    """
    if marked is None:
        return "cleared since then by fctune gate, so serve and push take the result" if judged["is_blocked"] else ""
    reasons = {line["name"]: line["reason"] for line in judged.get("still_blocking", ())}
    lines = ", ".join(_describe_line(line, reasons.get(line["name"])) for line in marked) or "the mark is damaged"
    since = "blocked" if judged["is_blocked"] else "stopped since then by fctune gate"
    return f"{since}, so serve and push refuse the result: {lines}"


def _describe_line(line: Mapping[str, Any], reason: str | None) -> str:
    if reason is not None:
        why = f"{line['verdict']} in an earlier gate; {reason}"
    else:
        why = f"{line['verdict']}, and require_safe is set" if line["verdict"] == "undecided" else line["verdict"]
    return f"{line['title']} ({why})"
