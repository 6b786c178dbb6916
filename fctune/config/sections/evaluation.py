"""Measurements during training: validation loss and tool-call accuracy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fctune.config.fields import AT_LEAST_1, Null, Range, SectionProblems
from fctune.config.intervals import INTERVAL
from fctune.config.parsing import describe_no_file

VALIDATION_CASES = "validation"  # of the run's own held-out conversations


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """Loss on the validation split."""

    every: Annotated[int | str, INTERVAL] = "10%"
    """Interval of measurements: a share of the run (`10%`), steps (`100`), or a time (`30min`); 0: never. The last step
    is always measured."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Tool-call accuracy during training, measured by generating answers to held-out cases."""

    every: Annotated[int | str, INTERVAL] = 0
    """Interval of evaluations: a share of the run (`25%`), steps, or a time; 0: never. The last step is always
    evaluated."""
    cases: str = "validation"
    """JSONL file of cases with `messages`, `tools` and `expected_calls`; or `validation`, which takes one turn of each
    conversation with tools that `data.validation_share` holds out."""
    max_cases: Annotated[int | None, AT_LEAST_1, Null("all cases")] = None
    """Use only the first N cases."""
    max_new_tokens: Annotated[int, AT_LEAST_1] = 256
    """Maximum length of an answer in tokens."""
    batch_size: Annotated[int, AT_LEAST_1] = 64
    """Prompts per rank and batch."""
    max_share_of_time: Annotated[float, Range(gt=0, le=1)] = 0.1
    """Largest share of the run's time to spend on evaluation; an evaluation that would exceed it is skipped. 1: none is
    skipped."""
    early_stop: Annotated[int | None, AT_LEAST_1, Null("never")] = None
    """End the run after this many evaluations without a better accuracy."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that the cases exist."""
        if self.cases != VALIDATION_CASES and not os.path.isfile(self.cases):
            problems.add(
                ("cases",),
                f"{where}.cases={self.cases}: {describe_no_file(self.cases)} (relative paths start at {Path.cwd()}); "
                f"specify a JSONL file of held-out cases, or {VALIDATION_CASES}",
            )
