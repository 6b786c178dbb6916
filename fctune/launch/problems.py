"""What is wrong with a node or between nodes, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, in a line.

    A ``fault`` stops the launch, a ``note`` is said alone; ``usage`` is a fault of what was asked, not of the cluster.
    """

    what: str
    remedy: str
    kind: Literal["fault", "note", "usage"] = "fault"

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}" if self.remedy else self.what
