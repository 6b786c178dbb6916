"""The wheel's conversion of tools and its loop over multi-turn cases, cut out of modules that cannot be imported."""

from __future__ import annotations

import ast
import copy
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

from fctune.data.conversation import Call
from fctune.tasks.task import MultiTurnCase
from tests.tasks.benchmarks.bfcl.bfcl_wheel import data_dir
from tests.tasks.benchmarks.bfcl.scripted_player import Plan


def official_convert_to_tool() -> Any:
    """The wheel's own functions, cut out of a module that imports what is not installed."""
    import bfcl_eval.constants.type_mappings as mappings
    from bfcl_eval.constants.enums import ModelStyle

    source = (data_dir().parent / "model_handler" / "utils.py").read_text()
    wanted = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in ("_cast_to_openai_type", "convert_to_tool")
    ]
    names: dict[str, Any] = {"copy": copy, "re": re, "json": json, "ModelStyle": ModelStyle}
    names["GORILLA_TO_OPENAPI"] = mappings.GORILLA_TO_OPENAPI
    exec(compile(ast.Module(wanted, []), "utils.py", "exec"), names)
    return lambda functions: names["convert_to_tool"](functions, mappings.GORILLA_TO_OPENAPI, ModelStyle.OSSMODEL)


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
        self.queries: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []
        self.num_calls = 0

    def _pre_query_processing_FC(self, data: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
        return {"message": []}

    def _compile_tools(self, data: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
        return {**data, "tools": [{"type": "function", "function": f} for f in self.convert(entry["function"])]}

    def add_first_turn_message_FC(self, data: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {**data, "message": data["message"] + messages}

    _add_next_turn_user_message_FC = add_first_turn_message_FC

    def _query_FC(self, data: dict[str, Any]) -> tuple[list[Call] | str, float]:
        self.queries.append(copy.deepcopy((data["message"], data["tools"])))
        roles = [message["role"] for message in data["message"]]
        last = len(roles) - 1 - roles[::-1].index("user")
        return self.plan(self.case, roles.count("user") - 1, roles[last:].count("assistant")), 0.0

    def _parse_query_response_FC(self, answer: list[Call] | str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer if isinstance(answer, str) else "Done."}
        if isinstance(answer, list) and answer:
            calls = []
            for call in answer:
                self.num_calls += 1
                function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
                calls.append({"id": f"call{self.num_calls:05d}", "type": "function", "function": function})
            message |= {"content": None, "tool_calls": calls}
        return {"model_responses": answer, "message": message, "input_token": 0, "output_token": 0}

    def _add_assistant_message_FC(self, data: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
        return {**data, "message": [*data["message"], response["message"]]}

    def decode_execute(self, answer: list[Call] | str, has_tool_call_tag: bool) -> list[str]:
        if isinstance(answer, str):
            raise ValueError(answer)
        return [f"{c.name}({','.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in answer]

    def _add_execution_results_FC(
        self, data: dict[str, Any], results: list[str], response: dict[str, Any]
    ) -> dict[str, Any]:
        calls = response["message"]["tool_calls"]
        messages = [
            {"role": "tool", "content": result, "tool_call_id": call["id"]}
            for result, call in zip(results, calls, strict=True)
        ]
        return {**data, "message": data["message"] + messages}
