"""IFEval: whether a model follows instructions that a program can check, such as "do not use commas"."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fctune.tasks.benchmarks import Benchmark, GateSample

if TYPE_CHECKING:
    from fctune.tasks.suite import Suite

# As in ifeval.yaml.
_DATA = "hf:google/IFEval@966cd89545d6b6acfd7638bc708b98261ca58e84"
_DATA_HELP = "prompts: the benchmark's JSONL, or hf:NAME[:config][:split][@revision]"


class Ifeval(Benchmark):
    """The benchmark's prompts as a suite of one category, ``all``."""

    name = "ifeval"
    title = "IFEval"
    gate_samples = (
        GateSample(
            "ifeval",
            "IFEval: all instructions of a prompt followed",
            ("all",),
            max_cases=200,
            cause="text",
            thorough_cases=541,  # all of them: 200 show no fall of 5 points
        ),
    )

    def add_eval_options(self, group: argparse._ArgumentGroup) -> None:
        """Add where the prompts are."""
        group.add_argument("--ifeval-data", metavar="FILE", help=f"{_DATA_HELP}; default: its set on the hub")

    def add_score_options(self, parser: argparse.ArgumentParser) -> None:
        """Add where the prompts are."""
        parser.description = "judge texts by the checkers of lm-eval; a prediction is {id, text}, such as ifeval-1000"
        parser.add_argument("--data", default=_DATA, metavar="FILE", help=f"{_DATA_HELP}; the default")

    def open_predictions_suite(self, arguments: argparse.Namespace) -> Suite:
        """Load the prompts that predictions may answer: all of the file in ``--data``."""
        from fctune.tasks.benchmarks.ifeval.cases import open_ifeval

        return open_ifeval(arguments.data)

    def load(
        self,
        settings: Any,
        where: str,
        categories: Sequence[str],
        options: Mapping[str, Any],
        has_plain_names: bool,
        has_multi_turn: bool,
    ) -> Suite:
        """Load the prompts; see ``Benchmark.load``."""
        from fctune.tasks.benchmarks.ifeval.cases import load_ifeval

        return load_ifeval(settings, where, categories, options.get("ifeval_data"))

    def owns(self, case_id: str) -> bool:
        """Return True for ids such as ``ifeval-1000``."""
        return case_id.startswith("ifeval-")


BENCHMARK = Ifeval()
