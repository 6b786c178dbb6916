"""Measurements during training: validation loss and tool-call accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fctune.config.fields import AT_LEAST_0, AT_LEAST_1, Null, Range


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """Loss on the validation split."""

    every_n_steps: Annotated[int, AT_LEAST_0] = 100
    """Steps between measurements; 0: never."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Tool-call accuracy during training, by generation on held-out cases."""

    every_n_steps: Annotated[int, AT_LEAST_0] = 0
    """Steps between evaluations; 0: never."""
    cases: str | None = None
    """JSONL file of cases with `messages`, `tools` and `expected_calls`; required if `every_n_steps` is set."""
    max_cases: Annotated[int | None, AT_LEAST_1, Null("all cases")] = None
    """Use only the first N cases."""
    max_new_tokens: Annotated[int, AT_LEAST_1] = 256
    """Longest answer in tokens."""
    batch_size: Annotated[int, AT_LEAST_1] = 64
    """Prompts per rank and batch."""
    max_share_of_time: Annotated[float, Range(gt=0, le=1)] = 0.1
    """Share of the run's time to spend; an evaluation that would exceed it is skipped."""
    early_stop: Annotated[int | None, AT_LEAST_1, Null("never")] = None
    """End the run after this many evaluations without a better accuracy."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check that the cases exist."""
        if self.every_n_steps and self.cases is None:
            problems.append(
                f"{where}.cases: missing; name a JSONL file of held-out cases, or set {where}.every_n_steps=0"
            )
        if self.cases is not None and not Path(self.cases).is_file():
            problems.append(f"{where}.cases={self.cases}: no such file (relative paths start at {Path.cwd()})")
