"""Problems that the preflight finds, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding and its remedy, printed on one line.

    A ``fault`` is a defect of the cluster and a ``usage`` problem one of the request; both stop the launch.
    A ``note`` is only printed.
    """

    message: str
    remedy: str
    severity: Literal["fault", "usage", "note"] = "fault"

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message
