"""The benchmark's own loop over multi-turn cases, run beside ours with a model that makes mistakes."""

from __future__ import annotations

import ast
import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.calls.bfcl.cases import MULTI_TURN
from fctune.data.conversation import Call, Conversation
from fctune.evaluation.multi_turn import MultiTurnCase
from fctune.generation.endpoint import to_messages
from tests.calls.bfcl_wheel import data_dir, needs_wheel, official_multi_turn_checker
from tests.evaluation.player import Plan, Player, run, sample, stray_plan
from tests.evaluation.test_eval_suites import official_convert_to_tool

pytestmark = needs_wheel


def official_loop() -> Callable[..., tuple[list[list[Any]], Any]]:
    """The wheel's own loop over one case, cut out of a module that imports what is not installed."""
    import bfcl_eval.constants.default_prompts as prompts
    import bfcl_eval.constants.executable_backend_config as backend
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.utils import is_memory, is_memory_prereq

    source = (data_dir().parent / "model_handler" / "base_handler.py").read_text()
    (loop,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "inference_multi_turn_FC"
    )
    loop.decorator_list = []
    names = {**vars(prompts), **vars(backend), **vars(multi_turn_utils), "deepcopy": copy.deepcopy, "Any": Any}
    names |= {"is_memory": is_memory, "is_memory_prereq": is_memory_prereq, "print": lambda *_: None}
    exec(compile(ast.Module([loop], []), "base_handler.py", "exec"), names)
    return names["inference_multi_turn_FC"]  # type: ignore[no-any-return]


class OfficialHandler:
    """A model to the wheel's loop: what its handler of OpenAI's completions does, saying what a plan has."""

    numbers = itertools.count()

    def __init__(self, case: MultiTurnCase, plan: Plan):
        self.case, self.plan, self.convert = case, plan, official_convert_to_tool()
        self.model_name_underline_replaced = f"loop{next(self.numbers)}"
        self.asked: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []
        self.num_calls = 0

    def _pre_query_processing_FC(self, data: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
        return {"message": []}

    def _compile_tools(self, data: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
        return {**data, "tools": [{"type": "function", "function": f} for f in self.convert(entry["function"])]}

    def add_first_turn_message_FC(self, data: dict[str, Any], said: list[dict[str, Any]]) -> dict[str, Any]:
        return {**data, "message": data["message"] + said}

    _add_next_turn_user_message_FC = add_first_turn_message_FC

    def _query_FC(self, data: dict[str, Any]) -> tuple[list[Call] | str, float]:
        self.asked.append(copy.deepcopy((data["message"], data["tools"])))
        roles = [message["role"] for message in data["message"]]
        last = len(roles) - 1 - roles[::-1].index("user")
        return self.plan(self.case, roles.count("user") - 1, roles[last:].count("assistant")), 0.0

    def _parse_query_response_FC(self, said: list[Call] | str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else "Done."}
        if isinstance(said, list) and said:
            calls = []
            for call in said:
                self.num_calls += 1
                function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
                calls.append({"id": f"call{self.num_calls:05d}", "type": "function", "function": function})
            message |= {"content": None, "tool_calls": calls}
        return {"model_responses": said, "message": message, "input_token": 0, "output_token": 0}

    def _add_assistant_message_FC(self, data: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
        return {**data, "message": [*data["message"], response["message"]]}

    def decode_execute(self, said: list[Call] | str, has_tool_call_tag: bool) -> list[str]:
        if isinstance(said, str):
            raise ValueError(said)
        return [f"{c.name}({','.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in said]

    def _add_execution_results_FC(
        self, data: dict[str, Any], results: list[str], response: dict[str, Any]
    ) -> dict[str, Any]:
        calls = response["message"]["tool_calls"]
        told = [
            {"role": "tool", "content": result, "tool_call_id": call["id"]}
            for result, call in zip(results, calls, strict=True)
        ]
        return {**data, "message": data["message"] + told}


@pytest.mark.parametrize("category", MULTI_TURN)
def test_every_prompt_and_verdict_is_that_of_the_benchmarks_own_loop(category: str, tmp_path: Path) -> None:
    """Questions, tools, their order, results and where it ends, as the wheel asks a model that makes mistakes."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.utils import load_dataset_entry

    suite, loop, check = sample(10, [category]), official_loop(), official_multi_turn_checker()
    engine = Player(suite, stray_plan)
    rows = {row["id"]: row for row in run(suite, engine, tmp_path / "out.jsonl", num_at_once=5)}
    entries = {entry["id"]: entry for entry in load_dataset_entry(category)}
    asked: dict[str, list[Conversation]] = {}
    for prompt in engine.prompts:
        asked.setdefault(prompt.source.split()[-1], []).append(prompt)
    num_valid = num_cut = 0
    for case in suite.multi_turn:
        entry = entries[case.id]
        handler = OfficialHandler(case, stray_plan)
        turns, _ = loop(handler, entry, False, True)
        for name in [name for name in vars(multi_turn_utils) if name.endswith("_instance")]:
            delattr(multi_turn_utils, name)
        ours = [(_without_names(to_messages(p.messages)), [t.to_openai() for t in p.tools]) for p in asked[case.id]]
        assert ours == handler.asked, case.id
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
