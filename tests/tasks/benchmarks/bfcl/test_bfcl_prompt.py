"""The leaderboard's own prompt: its text, the answers as decoded, and the verdicts, against the wheel's functions."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from fctune.calls.answers import read_text
from fctune.data.conversation import Call
from fctune.engines.engine import Answer
from fctune.tasks.benchmarks import find_suite_files
from fctune.tasks.benchmarks.bfcl.cases import SINGLE_TURN, read_bfcl
from fctune.tasks.benchmarks.bfcl.prompt_answers import BfclAnswer
from fctune.tasks.benchmarks.bfcl.suite import BfclSuite
from fctune.tasks.judge import judge_answer, judge_row
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from tests.tasks.benchmarks.bfcl.bfcl_wheel import (
    data_dir,
    gold_calls,
    load_cases,
    needs_wheel,
    official_checker,
    python_cases,
)
from tests.tasks.benchmarks.bfcl.official_prompt import (
    is_same_reading,
    odd_answer,
    official_decode,
    official_functions,
    read_answer,
)

pytestmark = needs_wheel

PROMPTED = [name for name in SINGLE_TURN if name not in ("simple_java", "simple_javascript")]

PECULIAR = [
    *("[f(a='ab'[1:] + 'c')]", "[f(a=[1, 2, 3][::2] * 2)]", "[f(a='abc'[1:-1:1] + 'd')]", "[f(a='a'[1:'x'] + 'b')]"),
    "",
    "[]",
    "I cannot help with that.",
    "No function.",
    "f(a=1)",
    "```\n[f(a=1), g()]\n```",
    "[f(a=1)",
    "f(a=1)]",
    "[f(1, 2, a=3)]",
    "[f(a=3, 1)]",
    "[f('x')]",
    "[f(a=b)]",
    "[f(a=b.c)]",
    "[f(a=true, b=null)]",
    "[f(a=None, b=True)]",
    "[f(a=(1, 2))]",
    "[f(a=[(1, 2), [3]])]",
    "[f(a=())]",
    "[f(a=(1))]",
    "[f(a=1, a=2)]",
    "[f(a=+5)]",
    "[f(a=-5)]",
    "[f(a=-5.5)]",
    "[f(a=2 * 3 + 1)]",
    "[f(a=x * 3)]",
    "[f(a=...)]",
    "[f(a=g(b=1))]",
    "[f(a=g())]",
    "[f(class=1)]",
    "[f(a=class)]",
    "[for(a=1)]",
    "[a-b(c=1)]",
    "[a.b.c(d='e')]",
    "[f(a={'b': 1, 'c': [True]})]",
    "[f(a=1)] and more",
    "Sure: [f(a=1)]",
    "[f(a=1)]\n[g(b=2)]",
    "[f(a=1)(b=2)]",
    "[f[0](a=1), 'x'.g(b=2)]",
    "[f(a=1e400, b=-1e400, c=5j)]",
    "[f(a=b'x')]",
    "[f(a='''x)]",
    '[f(a="""x, b=1)]',
    "[f(a={1: 2, None: 3}, b={'tuple': [1]})]",
    "[f(a='x'[0] + 'y' * 2, b=[1] * 2, c='%s' % 1)]",
    "[f(a=not 5, b=~5, c=--5)]",
    "[f(lambda: 1, [x for x in y], a=1)]",
    "[f(a=x[0])], [g()]",
    "[f(a=1); g(b=2)]",
    "[f(a='it's')]",
    "[f(a='x' 'y')]",
    '[f(a="""x\ny""")]',
    "[f(a=r'\\d', b=u'x')]",
    "[f(a=f'{x}')]",
    "[f(a=1 if b else 2)]",
    "[f(a==1)]",
    "[f(a==1, b='x')]",
    "[f(a<2>1)]",
    "[a . b(c=1)]",
    "[f(**{'a': 1})]",
    "[f(a=01)]",
    "[f(a=1_000, b=0x1f, c=1e3)]",
    "[f(a={1, 2})]",
    "[f(a=1,)]",
    "[f(a=1),]",
    "['f(a=1)']",
    "[{'f': {'a': 1}}]",
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "python\n[f(a=1)]",
]


@pytest.mark.parametrize("text", PECULIAR)
def test_peculiar_answers_are_decoded_as_the_wheel_decodes_them(text: str) -> None:
    assert is_same_reading(text), (read_answer(text), official_decode(text))


@pytest.mark.parametrize(
    "text",
    [
        "[f(a=len('x') + 1)]",
        "[f(a=__name__ + 'x')]",
        "[f(a=int | None)]",
        "[f(a=1 + (2 if 3 else 4))]",
        "[f(a=(1 < 2) + 1)]",
        "[f(a='%9d' % 1)]",
        "[f(a=2 ** 20_000)]",
    ],
)
def test_the_wheel_evaluates_more_than_arithmetic_over_literals(text: str) -> None:
    """Which would let a model run code, or compute forever: here such an answer is malformed."""
    assert official_decode(text)
    assert BfclAnswer().parse(text).malformed


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_odd_answers_are_decoded_as_the_wheel_decodes_them(seed: int) -> None:
    """``python -m benchmarks.scoring`` compares many times as many."""
    rng = random.Random(seed)
    cases = list(python_cases())
    texts = [odd_answer(rng.choice(cases), rng) for _ in range(4_000)]
    assert not [text for text in texts if not is_same_reading(text)]
    assert sum(bool(official_decode(text)) for text in texts) > 1_000


def test_odd_answers_get_the_wheels_verdicts() -> None:
    official_check, suite, rng = official_checker(), prompt_suite(), random.Random(3)
    counts: Counter[bool] = Counter()
    for case in python_cases():
        text = odd_answer(case, rng) if rng.random() < 0.7 else BfclAnswer().render(gold_calls(case))
        official = official_decode(text)
        calls = [Call(name, args) for call in official or [] for name, args in call.items()]
        valid = official is not None and official_check(case, calls) is True
        found = suite.find(case.id)
        assert found is not None
        row = judge_answer(found, Answer(0, text), BfclAnswer()).to_row()  # type: ignore[arg-type]
        assert row["bfcl"]["valid"] == valid, (text, row["bfcl"])
        json.dumps(row, allow_nan=False)
        counts[valid] += 1
    assert min(counts.values()) > 300


def test_a_tuple_is_no_list_to_the_leaderboard_and_one_to_the_typed_match() -> None:
    suite, check = prompt_suite(), official_checker()
    seen: Counter[tuple[bool, str]] = Counter()
    for case in python_cases():
        calls = [
            Call(c.name, {k: tuple(v) if isinstance(v, list) else v for k, v in c.arguments.items()})
            for c in gold_calls(case)
        ]
        if not any(isinstance(value, tuple) for call in calls for value in call.arguments.values()):
            continue
        written = [(c.name, ", ".join(f"{key}={value!r}" for key, value in c.arguments.items())) for c in calls]
        text = f"[{', '.join(f'{name}({arguments})' for name, arguments in written)}]"
        row = judge_answer(suite.find(case.id), Answer(0, text), BfclAnswer()).to_row()  # type: ignore[arg-type]
        official = official_decode(text)
        assert official is not None
        decoded = [Call(name, args) for call in official for name, args in call.items()]
        assert row["bfcl"]["valid"] == (check(case, decoded) is True), text
        assert judge_row(suite.find(case.id), row)[0].is_valid == row["bfcl"]["valid"]  # type: ignore[arg-type]
        seen[row["bfcl"]["valid"], row["verdict"]] += 1
    assert seen[False, "correct"] > 50
    assert seen[True, "correct"] > 0


def prompt_suite() -> Suite:
    return BfclSuite(data_dir(), PROMPTED, mode="prompt")


@pytest.mark.parametrize("category", PROMPTED)
def test_the_prompt_is_the_wheels_own(category: str) -> None:
    from bfcl_eval.utils import _func_doc_language_specific_pre_processing as add_hints

    build = official_functions()["system_prompt_pre_processing_chat_model"]
    suite = BfclSuite(data_dir(), [category], mode="prompt")
    for question in read_bfcl(data_dir(), category):
        functions = add_hints(copy.deepcopy(list(question.functions)), category)
        official = build(copy.deepcopy(question.turns[0]), functions, question.id)
        found = suite.find(question.id)
        assert found is not None
        prompt = found.prompt  # type: ignore[union-attr]
        assert [{"role": m.role, "content": m.content} for m in prompt.messages] == official, question.id
        assert not prompt.tools


@pytest.mark.thorough
def test_what_the_prompt_mode_does_not_ask_is_named() -> None:
    path = find_suite_files()["bfcl"]
    suite = load_suite(path, options={"bfcl_mode": "prompt"}, has_multi_turn=True)
    assert {case.category for case in suite.all_cases} == set(PROMPTED)
    assert {"simple_java", "multi_turn_base", "memory_kv"} <= suite.not_run.keys()
    assert suite.name == "bfcl_prompt"
    assert suite.digest() != load_suite(path, has_multi_turn=True).digest()


def test_prose_abstains_and_half_a_call_is_malformed() -> None:
    case = next(case for case in prompt_suite().cases if case.category == "irrelevance")
    rows = [
        judge_answer(case, Answer(0, text), BfclAnswer()).to_row() for text in ("None can be used.", "[f(a=1", "[f()]")
    ]
    assert [row["verdict"] for row in rows] == ["correct", "malformed", "false_call"]
    assert [row["bfcl"]["valid"] for row in rows] == [True, official_decode("[f(a=1") is None, False]


def test_a_call_in_the_reasoning_is_none() -> None:
    reading = read_text("[f(a=1)]<|im_end|>", BfclAnswer())
    assert [call.name for call in reading.strict.calls] == ["f"]
    assert reading.lenient is reading.strict


def test_hostile_answers_take_linear_time_and_raise_nothing() -> None:
    for text in (
        "[" * 50_000,
        "f(" * 50_000,
        "[f(a=" + "-" * 50_000,
        "[f(a=" + "(" * 50_000,
        "f(a=1)," * 20_000 + "(",
        "a." * 60_000 + "(",
    ):
        BfclAnswer().parse(text)


def test_the_data_directory_names_its_release(tmp_path: Path) -> None:
    assert BfclSuite(data_dir(), ["parallel"]).release == "bfcl-eval 2026.3.23"
    assert BfclSuite(tmp_path, []).release is None
    assert len(load_cases("parallel")) == 200
