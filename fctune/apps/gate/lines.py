"""Lines of the gate and their verdicts: one list of paired outcomes each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fctune.config.intervals import format_count
from fctune.tasks.evaluation.paired import (
    Comparison,
    PairedOutcome,
    adjust_p_values,
    compare_outcomes,
    fewest_pairs,
    find_smallest_fall,
)

Verdict = Literal["worse", "undecided", "safe"]

LEVEL = 0.05
POWER = 0.8
_NUM_SHOWN = 20


@dataclass(frozen=True)
class Line:
    """One thing that must not get worse, with the outcomes of both models.

    Attributes:
        name: Key in reports, such as ``over_calling``.
        title: What is counted as right, for people.
        outcomes: The items, each asked of both models.
        note: Where the items come from, or what they leave out.
        cause: Where the causes of a fall are looked for (see ``remedies``); empty: under the name.
        suite: Name of the suite that the items are of; suites may share ids.
    """

    name: str
    title: str
    outcomes: Sequence[PairedOutcome]
    note: str = ""
    cause: str = ""
    suite: str = ""


@dataclass(frozen=True)
class Remedy:
    """A property of the training rows that explains a fall, and the settings that treat it.

    Attributes:
        finding: The explanation, with its numbers.
        overrides: Keys of a run's config with the values that treat it.
        note: What the values stand for.
    """

    finding: str
    overrides: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True)
class JudgedLine:
    """A line with its statistics.

    Attributes:
        line: The line.
        comparison: Counts, difference with its 95 % interval, and McNemar's exact p.
        p_adjusted: p adjusted for the number of lines (Holm).
        tolerance: Fall that is accepted, from 0 to 1.
        smallest_fall: Smallest true fall that is called worse with probability 0.8; None if no fall from the base's
            accuracy is.
        remedies: What explains and treats a fall.
    """

    line: Line
    comparison: Comparison
    p_adjusted: float
    tolerance: float
    smallest_fall: float | None
    remedies: tuple[Remedy, ...] = field(default=())

    @cached_property
    def interval(self) -> tuple[float, float, float]:
        """The difference, after minus before, with the bounds of its 95 % interval."""
        return self.comparison.difference

    @property
    def verdict(self) -> Verdict:
        """``worse``: fell significantly, and by more than the tolerance; ``safe``: fell by less than it; or neither.

        Safe lines need no adjustment for their number: all of them must be safe for the result to be.
        """
        difference, low, _ = self.interval
        if self.p_adjusted < LEVEL and difference < -self.tolerance:
            return "worse"
        return "safe" if low > -self.tolerance else "undecided"

    @property
    def has_fallen(self) -> bool:
        """True if the line is worse, or undecided with fewer right answers than before."""
        return self.verdict == "worse" or (self.verdict == "undecided" and self.interval[0] < 0)

    @property
    def blindness(self) -> str | None:
        """Why the line finds no fall at all; None if it finds some."""
        if self.smallest_fall is not None:
            return None
        right, n = self.comparison.num_right_before, self.comparison.n
        if right == 0:
            return f"the base gets none of the {n:,} right, so there is nothing to lose"
        if right < n / 2:
            return f"the base gets only {right:,} of {n:,} right, too few for a fall to show"
        return f"{format_count(n, 'item is', 'items are')} too few to show a fall, however large"

    @property
    def shortage(self) -> str | None:
        """Why the line is undecided even if no answer changes; None if it need not be."""
        n, needed = self.comparison.n, fewest_pairs(self.tolerance)
        if n >= needed or self.verdict != "undecided":
            return None
        return (
            f"{format_count(n, 'item is', 'items are')} too few for safe: even if no answer changes, that takes "
            f"{needed:,} with a tolerance of {100 * self.tolerance:g} points"
        )

    @property
    def fall_found(self) -> str:
        """The smallest fall that the line finds, for a table."""
        if self.smallest_fall is not None:
            return f"{100 * self.smallest_fall:.1f} points"
        right, n = self.comparison.num_right_before, self.comparison.n
        return "nothing to lose" if right == 0 else "too few right" if right < n / 2 else "too few items"

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain values."""
        one, (difference, low, high) = self.comparison, self.interval
        return {
            "name": self.line.name,
            "title": self.line.title,
            "verdict": self.verdict,
            "n": one.n,
            "num_right_before": one.num_right_before,
            "num_right_after": one.num_right_after,
            "difference": difference,
            "low": low,
            "high": high,
            "p": one.p_value,
            "p_holm": self.p_adjusted,
            "tolerance": self.tolerance,
            "smallest_fall": self.smallest_fall,
            "turned_right": list(one.turned_right),
            "turned_wrong": list(one.turned_wrong),
            "note": self.line.note,
            "remedies": [
                {"finding": one.finding, "overrides": dict(one.overrides), "note": one.note} for one in self.remedies
            ],
        }

    def describe(self) -> str:
        """Return one sentence on the line, for machines that show text."""
        one, (difference, low, high) = self.comparison, self.interval
        text = (
            f"{self.line.title}: {one.num_right_before:,} of {one.n:,} right before, {one.num_right_after:,} after; "
            f"difference {format_points(difference)} ({format_points(low)} to {format_points(high)}), "
            f"p {one.p_value:.2g}, {self.p_adjusted:.2g} with Holm's adjustment; tolerance {self.tolerance:.0%}; "
            f"smallest fall found: {self.fall_found}"
        )
        if one.turned_wrong:
            more = len(one.turned_wrong) - _NUM_SHOWN
            rest = f" and {format_count(more, 'more item')}" if more > 0 else ""
            text += f"; turned wrong: {', '.join(one.turned_wrong[:_NUM_SHOWN])}{rest}"
        return text


def judge_lines(lines: Sequence[Line], tolerance: float) -> list[JudgedLine]:
    """Judge lines together; each must have items.

    Args:
        lines: The lines that were run.
        tolerance: Fall that is accepted on each, from 0 to 1.
    """
    compared = [compare_outcomes(line.name, line.outcomes) for line in lines]
    adjusted = adjust_p_values([one.p_value for one in compared])
    judged = []
    for line, one, p in zip(lines, compared, adjusted, strict=True):
        # Items that flip by chance do so in both directions; the smaller count has none that training explains. With
        # half an item more, an unchanged sample does not seem to be without any noise.
        flip_rate = (min(len(one.turned_right), len(one.turned_wrong)) + 0.5) / (one.n + 1)
        smallest = find_smallest_fall(one.n, flip_rate, LEVEL / len(lines), tolerance, POWER)
        if smallest is not None and smallest > one.num_right_before / one.n:  # more than there is to lose
            smallest = None
        judged.append(JudgedLine(line, one, p, tolerance, smallest))
    return judged


def format_points(difference: float) -> str:
    """Format a difference of two shares in percentage points, with its sign."""
    return f"{100 * difference:+.1f}"
