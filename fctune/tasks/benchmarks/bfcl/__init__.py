"""The Berkeley Function Calling Leaderboard, v4: its cases, its verdicts and its overall number.

The cases are read from the ``bfcl-eval`` wheel; none of its data is copied into this project.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fctune.tasks.benchmarks import Benchmark, GateSample
from fctune.tasks.benchmarks.bfcl.cases import CATEGORIES, NAME, TITLE, category_of

if TYPE_CHECKING:
    from fctune.tasks.benchmarks.bfcl.single_turn import Mode
    from fctune.tasks.suite import Measured, Suite


class Bfcl(Benchmark):
    """The leaderboard as a suite, asked with native tool calling or in its own prompt."""

    name = NAME
    title = TITLE
    eval_only_options = ("--bfcl-mode",)
    gate_samples = (
        GateSample(
            "bfcl_irrelevance",
            "BFCL irrelevance: no call where no function helps",
            ("irrelevance",),
            max_cases=240,
            cause="over_calling",
        ),
        GateSample(
            "bfcl_multi_turn",
            "BFCL multi-turn: the state after each turn",
            ("multi_turn_base",),
            max_cases=50,  # a conversation takes about ten answers
            cause="multi_turn",
            thorough_cases=150,  # with fewer, a few flips by chance hide whether it kept within 5 points
        ),
    )

    def add_eval_options(self, group: argparse._ArgumentGroup) -> None:
        """Add where the wheel's data is, and how a model is given the functions."""
        group.add_argument(
            "--bfcl-data", metavar="DIR", help="data directory of bfcl-eval; default: where it is installed"
        )
        group.add_argument(
            "--bfcl-mode",
            choices=("tools", "prompt"),
            default="tools",
            help="describe bfcl's functions as native tools, or in the leaderboard's own prompt; default: %(default)s",
        )

    def add_score_options(self, parser: argparse.ArgumentParser) -> None:
        """Add where the wheel's data is, and which categories to score."""
        parser.description = "judge by the Berkeley leaderboard's rules, for each of its categories"
        parser.add_argument(
            "--data", required=True, metavar="DIR", help="the wheel's data: site-packages/bfcl_eval/data"
        )
        parser.add_argument(
            "--categories",
            nargs="+",
            default=[],
            metavar="NAME",
            help="categories to score in full; default: those of the predictions",
        )
        parser.add_argument("--dots-as-underscores", action="store_true", help="for models that write a_b for a.b")

    def open_predictions_suite(self, arguments: argparse.Namespace) -> Suite:
        """Return the suite of the categories that are named; ``find`` adds those of the predictions."""
        from fctune.tasks.benchmarks.bfcl.suite import BfclSuite

        return BfclSuite(arguments.data, arguments.categories, arguments.dots_as_underscores, weigh=self.weigh)

    def load(
        self,
        settings: Any,
        where: str,
        categories: Sequence[str],
        options: Mapping[str, Any],
        has_plain_names: bool,
        has_multi_turn: bool,
    ) -> Suite:
        """Load the categories; see ``Benchmark.load``."""
        from fctune.tasks.benchmarks.bfcl.suite import load_bfcl

        data = options.get("bfcl_data")
        mode: Mode = "prompt" if options.get("bfcl_mode") == "prompt" else "tools"
        return load_bfcl(settings, where, categories, data, mode, has_plain_names, has_multi_turn, self.weigh)

    def owns(self, case_id: str) -> bool:
        """Return True for ids such as ``simple_python_12``."""
        return category_of(case_id) in CATEGORIES

    def weigh(self, measured: Mapping[str, Measured]) -> dict[str, Any]:
        """Return the leaderboard's overall number; see ``fctune.tasks.benchmarks.bfcl.overall``."""
        from fctune.tasks.benchmarks.bfcl.overall import weigh

        return weigh(measured)


BENCHMARK = Bfcl()
