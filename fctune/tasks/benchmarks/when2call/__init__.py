"""When2Call: whether a model calls a tool, asks back, declines or answers directly, as each question requires."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fctune.tasks.benchmarks import Benchmark, GateSample

if TYPE_CHECKING:
    from fctune.tasks.suite import Suite


class When2Call(Benchmark):
    """The benchmark's multiple-choice form as a suite; a category is the kind of answer that is right."""

    name = "when2call"
    title = "When2Call"
    has_predictions = False
    gate_samples = (
        GateSample("when2call_call", "When2Call: a call where one is due", ("tool_call",), 500, "over_refusing"),
        GateSample(
            "when2call_ask",
            "When2Call: a question where the request lacks a value",
            ("request_for_info",),
            max_cases=500,
            cause="asking",
        ),
        GateSample(
            "when2call_decline", "When2Call: a refusal where no tool helps", ("cannot_answer",), 500, "over_calling"
        ),
    )

    def add_eval_options(self, group: argparse._ArgumentGroup) -> None:
        """Add where the cases are."""
        group.add_argument(
            "--when2call-data",
            metavar="FILE",
            help="cases: the benchmark's JSONL, or hf:NAME[:config][:split][@revision]; default: its set on the hub",
        )

    def load(
        self,
        settings: Any,
        where: str,
        categories: Sequence[str],
        options: Mapping[str, Any],
        has_plain_names: bool,
        has_multi_turn: bool,
    ) -> Suite:
        """Load the cases; see ``Benchmark.load``."""
        from fctune.tasks.benchmarks.when2call.cases import load_when2call

        return load_when2call(settings, where, categories, options.get("when2call_data"))

    def owns(self, case_id: str) -> bool:
        """Return True for ids such as ``when2call-276e4475-e087-4660-9a3a-1fe295fa452c``."""
        return case_id.startswith("when2call-")


BENCHMARK = When2Call()
