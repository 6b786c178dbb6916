"""The gate: a comparison of base and result, before the result is released."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fctune.config.fields import AT_LEAST_1, Null, Range, SectionProblems
from fctune.config.intervals import PERCENTAGE, parse_share
from fctune.config.parsing import describe_no_file

_QUICK_TOLERANCE, _THOROUGH_TOLERANCE = 0.10, 0.05
_QUICK_CASES, _THOROUGH_CASES = 200, 600


@dataclass(kw_only=True, slots=True)
class GateConfig:
    """Comparison of base and result by `fctune gate`; `gate: {}` uses these defaults."""

    cases: Annotated[str | None, Null("the `held_out.jsonl` of the run")] = None
    """File of held-out cases with `messages`, `tools` and `expected_calls`: JSONL, or a suite in YAML."""
    base_answers: Annotated[str | None, Null("ask the base")] = None
    """Directory of an earlier gate. Its answers of the base are taken over where base, cases and settings are the same,
    so that only the result is asked."""
    thorough: bool = False
    """Larger samples, which find falls of 5 points."""
    tolerance: Annotated[float | str | None, PERCENTAGE, Null("10%, or 5% if `thorough`")] = None
    """Fall in accuracy that is accepted on each line."""
    require_safe: bool = False
    """Also block a result with an undecided line."""
    max_cases: Annotated[int | None, AT_LEAST_1, Null("200, or 600 if `thorough`")] = None
    """Largest number of cases on a line. A hash of the case's id chooses them."""
    benchmarks: Annotated[list[str] | None, Null("all that `fctune eval` knows")] = None
    """Benchmarks to ask, by name; one whose data is missing is listed as not run. `[]`: only the held-out cases."""
    max_tokens: Annotated[int | None, AT_LEAST_1, Null("no limit")] = None
    """Token budget: the most tokens that both models together may generate. Lines get fewer cases to keep it, however
    long every answer and every turn is."""
    max_new_tokens: Annotated[int, AT_LEAST_1] = 256
    """Maximum length of an answer in tokens."""
    chat_template: Literal["same", "tuned", "own"] = "same"
    """Template of a base whose chat template differs from the result's: refuse it (`same`), ask it with the result's
    (`tuned`), or with its own (`own`)."""
    batch_size: Annotated[int, AT_LEAST_1] = 64
    """Prompts per batch, in process."""
    temperature: Annotated[float, Range(ge=0)] = 0.0
    """Temperature of both models' answers; 0: greedy."""
    seed: int = 0
    """Seed of sampled answers."""
    streamed: bool = False
    """Ask servers the held-out cases again, with streamed answers."""
    guided: bool = False
    """Ask servers the held-out cases with a call again, with guided decoding (`tool_choice: required`)."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that the cases exist, and that some fall is accepted."""
        if self.cases is not None and not os.path.isfile(self.cases):
            problems.add(
                ("cases",),
                f"{where}.cases={self.cases}: {describe_no_file(self.cases)} (relative paths start at {Path.cwd()}); "
                "specify a file of held-out cases",
            )
        try:
            share = 1.0 if self.tolerance is None else parse_share(self.tolerance)
        except ValueError:
            return  # reported by its field
        if share == 0:
            problems.add(
                ("tolerance",),
                f"{where}.tolerance={self.tolerance}: no sample can show that nothing fell; write e.g. 5%",
            )

    @property
    def accepted_fall(self) -> float:
        """The tolerance, from 0 to 1."""
        if self.tolerance is None:
            return _THOROUGH_TOLERANCE if self.thorough else _QUICK_TOLERANCE
        return parse_share(self.tolerance)

    @property
    def line_size(self) -> int:
        """Largest number of cases on a line."""
        return self.max_cases or (_THOROUGH_CASES if self.thorough else _QUICK_CASES)
