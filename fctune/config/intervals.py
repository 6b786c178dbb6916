"""Lengths within a run as configs give them: steps (``500``), time (``10min``), or a share of the run (``5%``)."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass

from fctune.config.fields import Notation

NEVER = 0
AUTO = "auto"
AUTO_SHARE = 1 / 3  # longest interval that ``auto`` stands for, as a share of the run

_EXPECTED = "expected steps (500), a time (90s, 10min, 2h), a share of the run (5%)"
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
_MAX_CHARS = 18  # of an interval, whose number 64 bits hold
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|%)")


@dataclass(frozen=True, slots=True)
class Interval:
    """A length in exactly one unit; ``steps=0`` is never."""

    steps: int | None = None
    seconds: float | None = None
    share: float | None = None  # of the run's steps

    @property
    def is_never(self) -> bool:
        """True for an interval that never ends."""
        return self.steps == NEVER

    def in_steps(self, num_steps: int, step_s: float | None = None) -> int | None:
        """Return the interval in steps, at least 1, or 0 for never; None for a time without ``step_s``.

        Args:
            num_steps: Steps of the run.
            step_s: Seconds of a step, which a time is divided by.
        """
        if self.steps is not None:
            return self.steps
        if self.share is not None:
            return max(1, math.ceil(self.share * num_steps - 1e-9))  # 3% of 100 is 3, whatever 0.03 * 100 rounds to
        assert self.seconds is not None
        return None if not step_s else max(1, math.ceil(self.seconds / step_s))

    def __str__(self) -> str:
        if self.share is not None:
            return f"{100 * self.share:g}% of the run"
        if self.seconds is not None:
            return format_duration(self.seconds)
        return "never" if self.is_never else format_count(self.steps or 0, "step")


def parse_interval(value: int | str) -> Interval:
    """Parse ``500`` (steps), ``90s``, ``10min``, ``2h``, ``5%`` (of the run) or ``0`` (never).

    Raises:
        ValueError: The value is none of these.
    """
    if isinstance(value, float):
        raise ValueError(f"not a number of steps; for a share of the run write {100 * value:g}%")
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError("expected 0 (never) or more steps")
        return Interval(steps=value)
    text = value.strip() if isinstance(value, str) and len(value) <= _MAX_CHARS else ""
    if text.isdigit():
        return Interval(steps=int(text))
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise ValueError(f"{_EXPECTED}, or 0 for never")
    number, unit = float(found[1]), found[2]
    if number == 0:
        return Interval(steps=NEVER)
    if unit == "%":
        if number > 100:
            raise ValueError("expected at most 100%")
        return Interval(share=number / 100)
    return Interval(seconds=number * _UNITS_S[unit])


def parse_interval_or_auto(value: int | str) -> Interval:
    """Parse an interval where ``auto`` is at most a third of the run; a plan may shorten it.

    Raises:
        ValueError: The value is something else.
    """
    if value == AUTO:
        return Interval(share=AUTO_SHARE)
    try:
        return parse_interval(value)
    except ValueError as error:
        raise error if isinstance(value, float) else ValueError(f"{_EXPECTED}, 0 for never, or auto") from None


def parse_steps_or_share(value: int | str) -> Interval:
    """Parse an interval where a time makes no sense.

    Raises:
        ValueError: The value is something else.
    """
    expected = "expected steps (100) or a share of the run (3%)"
    try:
        interval = parse_interval(value)
    except ValueError as error:
        raise error if isinstance(value, float) else ValueError(expected) from None
    if interval.seconds is not None:
        raise ValueError(f"{expected}, not a time")
    return interval


def parse_share(value: float | str) -> float:
    """Parse a share, ``10%`` or ``0.1``.

    Raises:
        ValueError: The value is neither, or not between 0 and 100%.
    """
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ValueError("expected a share, such as 10% or 0.1, of at most 100%")
    return share


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural unless it is one: ``1 step``, ``1,000 steps``."""
    return f"{number:,} {choose_noun(number, noun, plural)}"


def choose_noun(number: int, noun: str, plural: str = "") -> str:
    """Return a noun, or any words, as they agree with a number; the plural ends in s unless it is given."""
    return noun if number == 1 else plural or f"{noun}s"


def format_share(share: float) -> str:
    """Format a share in percent, such as ``10%``; a small one is not rounded to 0%."""
    return f"{100 * share:.3g}%"


def format_duration(seconds: float) -> str:
    """Format a time with the unit that suits it, such as ``10 min``."""
    if seconds < 120:
        return f"{seconds:,.3g} s"
    return f"{seconds / 60:,.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"


INTERVAL = Notation("steps, time or share", parse_interval)
INTERVAL_OR_AUTO = Notation("steps, time, share or auto", parse_interval_or_auto)
STEPS_OR_SHARE = Notation("steps or share", parse_steps_or_share)
PERCENTAGE = Notation("share", parse_share)


def is_never(value: int | str) -> bool:
    """Return True for an interval that never ends; False for others and for invalid text."""
    try:
        return parse_interval(value).is_never
    except ValueError:
        return False


def is_in_share(text: str, share: float) -> bool:
    """Return True for a share of all texts, by a hash, so that a text is always on the same side."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
