"""The wheel's own prompt and the decoder of answers to it, cut out of a module that imports what is not installed.

And answers to compare it with: calls in Python's syntax, changed at random.
"""

from __future__ import annotations

import ast
import functools
import json
import random
import re
import warnings
from typing import Any, Optional

from fctune.base.errors import DataError
from fctune.calls.formats.pythonic import render_python_call
from fctune.tasks.benchmarks.bfcl.prompt_answers import PYTHON_KEY, TUPLE_KEY, BfclAnswer
from tests.calls.mutations import mutate
from tests.tasks.benchmarks.bfcl.bfcl_wheel import Case, data_dir, gold_calls

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


# Stretches of Python that models write, and those that only a fuzzer does.
_ODD = [
    *"()[]{},.:;=+-*/%'\"\\`#@ \n\t\rab01_",
    *(
        "'''",
        '"""',
        "**",
        "//",
        "==",
        "!=",
        "<=",
        ":=",
        "->",
        "...",
        "\\\n",
        "\\d",
        "\\x4",
        "\\N{DIGIT ONE}",
        "\\u12",
        "\x00",
    ),
    *("(b=2)", "(3)", ".x", ".get(a=1)", "[0]", "[1:2]", "*a", "**{'k': 1}", "**k", "a=1", ", a=1", "a='x', a='y'"),
    *("1e400", "-1e400", "1e5", ".5", "5.", "01", "0x1f", "0b11", "0o7", "1_000", "5j", "1if", "9" * 30, "9" * 5000),
    *("b'x'", "rb'x'", "r'\\d'", "u'x'", "f'x'", "f'{x}'", "'a' 'b'", "'a' + 'b'", "'a' * 3", "'%s' % 1", "'''x\ny'''"),
    *("None", "True", "False", "true", "null", "nan", "inf", "NaN", "Infinity", "print", "Größe", "class", "lambda: 1"),
    *("{1: 2}", "{1, 2}", "{}", "()", "(1,)", "(1)", "[[1], (2,)]", "{'a': {'b': 1}}", "{a: b}", "{[1]: 2}", "{**x}"),
    *("not 5", "~5", "+5", "--5", "-'x'", "-x", "1 + 2", "2 ** 10", "2 ** -1", "1 / 0", "7 // 2", "1 << 3", "[1] * 2"),
    *("1 if a else 2", "x for x in y", "[x for x in y]", "a and b", "a or 1", "x * 3", "1 < 2", "1 is 2", "a in b"),
    *(
        "await ",
        "yield ",
        "return ",
        "import os",
        "del x",
        "x := 1",
        "g(b=1)",
        "g()",
        "g(1)",
        "g(b=1)()",
        "f(**g(a=1))",
    ),
]


_ENDLESS = re.compile(r"\*\*[^,]*(\*\*|[\d_]{5})")


def odd_answer(case: Case, rng: random.Random) -> str:
    """Write an answer to a case, right or mutated, and change its text in up to four places.

    Powers that the wheel would compute for minutes are left out.
    """
    while _ENDLESS.search(text := _change_answer(case, rng)):
        pass
    return text


def _change_answer(case: Case, rng: random.Random) -> str:
    calls = gold_calls(case) if rng.random() < 0.3 else mutate(case, rng)
    try:
        text = f"[{', '.join(map(render_python_call, calls))}]"
    except DataError:
        text = f"[f(a={calls and calls[0].arguments!r})]"
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 4))):
        start = rng.randrange(len(text) + 1)
        # Whole values are replaced as often as letters.
        values = [found.span(1) for found in re.finditer(r"=([^=,()]*)", text)]
        if values and rng.random() < 0.5:
            start, end = rng.choice(values)
        else:
            end = start + rng.choice((0, 0, 1, 1, 5))
        text = text[:start] + rng.choice(["", text[start:end] * 2, *rng.choices(_ODD, k=6)]) + text[end:]
    return rng.choice(_WRAPPINGS).replace("@", text) if rng.random() < 0.2 else text


_WRAPPINGS = (
    "```\n@\n```",
    "```python\n@\n```",
    "Sure: @",
    "@ and more",
    "@\n@",
    "@, @",
    "@; @",
    "'@'",
    "(@)",
    "x = @",
    "@[0]",
    " @ ",
    "[@]",
)


def read_answer(text: str) -> list[dict[str, Any]]:
    """Return our reading of an answer in the wheel's form; nothing if it cannot be read, as the wheel then raises."""
    parsed = BfclAnswer().parse(text)
    assert not (parsed.calls and parsed.malformed)
    return [{call.name: _to_python(call.arguments)} for call in parsed.calls]


def _to_python(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {TUPLE_KEY}:
            return tuple(map(_to_python, value[TUPLE_KEY]))
        if value.keys() == {PYTHON_KEY}:
            return _Source(value[PYTHON_KEY])
        return {None if key == "**" else key: _to_python(item) for key, item in value.items()}
    return list(map(_to_python, value)) if isinstance(value, list) else value


class _Source(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def is_same_reading(text: str) -> bool:
    """Return True if an answer is read as the wheel reads it: the same calls, with values of the same types."""
    ours, official = read_answer(text), official_decode(text) or []
    try:
        return repr(ours) == repr(official)
    except ValueError:  # an integer too long for repr: we keep its source, and refuse to compute it
        return not ours or [list(call) for call in ours] == [list(call) for call in official]
