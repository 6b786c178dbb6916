"""The benchmark's own loop over multi-turn cases and ours, with the same model that makes mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fctune.data.conversation import Conversation
from fctune.engines.server import to_messages
from fctune.tasks.benchmarks.bfcl.cases import MULTI_TURN
from tests.tasks.benchmarks.bfcl.bfcl_wheel import needs_wheel, official_multi_turn_checker
from tests.tasks.benchmarks.bfcl.official_loop import OfficialHandler, official_loop
from tests.tasks.benchmarks.bfcl.scripted_player import Player, run, sample, stray_plan

pytestmark = needs_wheel


@pytest.mark.parametrize(
    "category",
    [MULTI_TURN[1], *(pytest.param(name, marks=pytest.mark.thorough) for name in MULTI_TURN if name != MULTI_TURN[1])],
)
def test_every_prompt_and_verdict_is_that_of_the_benchmarks_own_loop(category: str, tmp_path: Path) -> None:
    """Questions, tools, their order, results and where it ends, as the wheel asks a model that makes mistakes."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.utils import load_dataset_entry

    suite, loop, check = sample(10, [category]), official_loop(), official_multi_turn_checker()
    engine = Player(suite, stray_plan)
    rows = {row["id"]: row for row in run(suite, engine, tmp_path / "out.jsonl", num_at_once=5)}
    entries = {entry["id"]: entry for entry in load_dataset_entry(category)}
    prompts: dict[str, list[Conversation]] = {}
    for prompt in engine.prompts:
        prompts.setdefault(prompt.source.split()[-1], []).append(prompt)
    num_valid = num_cut = 0
    for case in suite.multi_turn:
        entry = entries[case.id]
        handler = OfficialHandler(case, stray_plan)
        turns, _ = loop(handler, entry, False, True)
        for name in [name for name in vars(multi_turn_utils) if name.endswith("_instance")]:
            delattr(multi_turn_utils, name)
        ours = [(_without_names(to_messages(p.messages)), [t.to_openai() for t in p.tools]) for p in prompts[case.id]]
        assert ours == handler.queries, case.id
        made = [[step if isinstance(step, list) else [] for step in turn] for turn in turns]
        assert rows[case.id]["bfcl"]["valid"] == check(case.question, made), case.id
        num_valid += rows[case.id]["bfcl"]["valid"]
        num_cut += "stopped" in rows[case.id]
    assert num_valid
    assert num_cut
    assert num_valid + num_cut < len(suite.multi_turn)


def _without_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results name their tool, too, which some templates ask for."""
    return [{key: m[key] for key in m if key != "name"} if m["role"] == "tool" else m for m in messages]
