"""The tokens that the gate plans for: multiple choice generates none, and a benchmark may have its own limit."""

from __future__ import annotations

from pathlib import Path

from fctune.apps.gate.plan import Plan, _choose
from fctune.config.sections.gate import GateConfig
from fctune.data.conversation import Conversation, Message
from fctune.tasks.benchmarks import GateSample
from fctune.tasks.benchmarks.bfcl.multi_turn_cases import BfclMultiTurnCase
from fctune.tasks.benchmarks.when2call.cases import load_when2call
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case, Turn
from tests.tasks.benchmarks.when2call.when2call_rows import ROWS, write_rows


def test_the_budget_holds_if_every_turn_takes_all_its_steps() -> None:
    turns = tuple(Turn((Message("user", "?"),), ()) for _ in range(3))
    talk = BfclMultiTurnCase("m", "multi_turn_base", turns, 20, question=None)  # type: ignore[arg-type]
    suite = Suite("talk", (), multi_turn=(talk,), max_new_tokens=300)
    plan = Plan(samples=[(GateSample("x", "X", (), 10), suite)])
    assert plan.count_answers(GateConfig(max_new_tokens=100)) == 3 * 21
    assert plan.count_tokens(GateConfig(max_new_tokens=100)) == 300 * 63


def test_a_thorough_gate_asks_more_of_what_is_expensive() -> None:
    sample = GateSample("x", "X", (), 10, thorough_cases=30)
    suite = Suite("x", tuple(Case(str(i), "all", Conversation((Message("user", "?"),)), ()) for i in range(50)))
    sizes = [len(_choose(sample, suite, 600, GateConfig(thorough=thorough)).cases) for thorough in (False, True)]
    assert sizes == [10, 30]


def test_the_budget_counts_what_each_suite_may_generate(tmp_path: Path) -> None:
    sample = GateSample("x", "X", (), 10)
    chosen = load_when2call({"data": str(write_rows(tmp_path / "cases.jsonl"))}, "w.yaml", (), None)
    cases = tuple(Case(str(i), "all", Conversation((Message("user", "?"),)), ()) for i in range(3))
    plain, long = Suite("plain", cases), Suite("long", cases, max_new_tokens=1280)
    config = GateConfig(max_new_tokens=100)
    plan = Plan(samples=[(sample, chosen), (sample, plain), (sample, long)])
    assert plan.count_answers(config) == len(ROWS) + 6
    assert plan.count_tokens(config) == 3 * 100 + 3 * 1280
    assert Plan(samples=[(sample, chosen)]).count_tokens(config) == 0
