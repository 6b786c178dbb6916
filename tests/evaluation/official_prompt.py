"""The wheel's own prompt and the decoder of answers to it, cut out of a module that imports what is not installed."""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from typing import Any, Optional

from tests.calls.bfcl_wheel import data_dir

_WANTED = (
    "ast_parse",
    "resolve_ast_call",
    "resolve_ast_by_type",
    "default_decode_ast_prompting",
    "system_prompt_pre_processing_chat_model",
    "formulate_system_prompt",
    "format_function_doc",
    "parse_prompt_variation_params",
)


@functools.cache
def official_functions() -> dict[str, Any]:
    import bfcl_eval.constants.default_prompts as prompts
    from bfcl_eval.constants.enums import ReturnFormat
    from bfcl_eval.utils import extract_prompt_format_from_id

    source = (data_dir().parent / "model_handler" / "utils.py").read_text()
    wanted = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name in _WANTED]
    assert len(wanted) == len(_WANTED)
    names: dict[str, Any] = {**vars(prompts), "ast": ast, "json": json, "re": re, "Optional": Optional}
    names |= {"ReturnFormat": ReturnFormat, "extract_prompt_format_from_id": extract_prompt_format_from_id}
    exec(compile(ast.Module(wanted, []), "utils.py", "exec"), names)
    return names


def official_decode(text: str) -> list[dict[str, Any]] | None:
    """The wheel's reading of an answer; None where it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            decoded: list[dict[str, Any]] = official_functions()["default_decode_ast_prompting"](text)
        except Exception:
            return None
    return decoded
