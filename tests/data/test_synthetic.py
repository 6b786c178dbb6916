import itertools
import json
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from fctune.data.conversation import Conversation
from fctune.data.synthetic import iter_cases, iter_conversations
from fctune.data.synthetic.cases import KINDS
from fctune.data.synthetic.target_tools import load_target_tools
from fctune.data.synthetic.values import TARGET_VALUES, is_held_out
from fctune.data.synthetic.words import make_word

TARGETS = load_target_tools().called
SPLITS = ("pretrain", "train", "varied", "reasoned", "shuffled")


@pytest.fixture(scope="module")
def train() -> list[Conversation]:
    return list(iter_conversations("train", 4000, 0))


@pytest.fixture(scope="module")
def cases() -> list[Any]:
    return list(iter_cases(600, 0))


def _calls(conversation: Conversation) -> list[Any]:
    return [call for message in conversation.messages for call in message.calls]


def _open_values(name: str, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return kind and value of each argument without an enum; the items of a list one by one."""
    slots = next(target.slots for target in TARGETS if target.name == name)
    return [
        (slots[key].kind, one)
        for key, value in arguments.items()
        if slots[key].kind in TARGET_VALUES
        for one in (value if isinstance(value, list) else [value])
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_seed_gives_the_same_rows_and_another_seed_different_ones(split):
    first, again, other = ([one.digest() for one in iter_conversations(split, 40, seed)] for seed in (3, 3, 4))
    assert first == again
    assert not set(first) & set(other)


def test_the_same_seed_gives_the_same_cases_and_another_seed_different_ones():
    first, again, other = ([json.dumps(one.to_json()) for one in iter_cases(40, seed)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("split", SPLITS)
def test_every_row_ends_with_a_nonempty_assistant_turn(split):
    for row in iter_conversations(split, 500, 0):
        assert row.messages[-1].role == "assistant"
        assert all(message.content or message.calls for message in row.messages)
        assert row.tools


def test_the_curriculum_has_no_calls_and_no_target_tools():
    names = {target.name for target in TARGETS}
    schemas = {json.dumps(target.tool().parameters["properties"], sort_keys=True) for target in TARGETS}
    properties = {frozenset(target.slots) for target in TARGETS}
    any_name = re.compile(rf"\b(?:{'|'.join(names)})\b")
    for row in iter_conversations("pretrain", 3000, 0):
        assert not _calls(row)
        text = json.dumps(row.to_openai())
        assert "tool_call>" not in text
        assert not any_name.search(text)
        for tool in row.tools:
            assert json.dumps(tool.parameters["properties"], sort_keys=True) not in schemas
            assert frozenset(tool.parameters["properties"]) not in properties


def test_training_rows_and_held_out_cases_share_every_tool_and_no_phrasing(train, cases):
    assert {tool.name for row in train for tool in row.tools} == {tool.name for case in cases for tool in case.tools}
    assert {call.name for row in train for call in _calls(row)} == {
        call.name for case in cases for call in case.expected_calls
    }
    train_phrasings = {phrasing for target in TARGETS for phrasing in target.train}
    assert not train_phrasings & {phrasing for target in TARGETS for phrasing in target.held_out}
    requests = {message.content for row in train for message in row.messages if message.role == "user"}
    assert not requests & {message.content for case in cases for message in case.messages if message.role == "user"}


def test_no_open_value_of_a_held_out_case_is_in_a_training_row(train, cases):
    trained = {pair for row in train for call in _calls(row) for pair in _open_values(call.name, call.arguments)}
    held_out = {
        pair for case in cases for call in case.expected_calls for pair in _open_values(call.name, call.arguments)
    }
    assert trained
    assert held_out
    assert not trained & held_out
    assert not any(is_held_out(*pair) for pair in trained)


def test_every_call_obeys_the_schema_of_an_offered_tool(train, cases):
    requests = itertools.chain(
        ((row.tools, _calls(row)) for row in train), ((case.tools, case.expected_calls) for case in cases)
    )
    validators: dict[str, Any] = {}  # compiling a schema takes far longer than a call
    for tools, calls in requests:
        schemas = {tool.name: {**tool.parameters, "additionalProperties": False} for tool in tools}
        assert len(schemas) == len(tools)
        for call in calls:
            key = json.dumps(schemas[call.name])
            if key not in validators:
                jsonschema.Draft202012Validator.check_schema(schemas[call.name])
                validators[key] = jsonschema.Draft202012Validator(schemas[call.name])
            validators[key].validate(call.arguments)


def test_every_kind_of_case_occurs_and_few_expect_no_call(cases):
    kinds = Counter(case.kind for case in cases)
    assert set(kinds) == set(KINDS)
    without = sum(not case.expected_calls for case in cases)
    assert without == kinds["no_call"]
    assert without <= 0.12 * len(cases)
    assert all(len(case.expected_calls) >= 2 for case in cases if case.kind == "parallel")
    assert all(len(case.messages) >= 3 for case in cases if case.kind == "multi_turn")


def test_arguments_have_every_json_type(cases):
    types = {type(value) for case in cases for call in case.expected_calls for value in call.arguments.values()}
    assert types == {str, int, float, bool, list}


def test_shuffled_rows_keep_the_words_and_the_calls_but_not_their_pairing():
    train = list(iter_conversations("train", 500, 0))
    shuffled = list(iter_conversations("shuffled", 500, 0))
    for row, other in zip(train, shuffled, strict=True):
        assert row.tools == other.tools
        assert [(one.role, one.content) for one in row.messages] == [(one.role, one.content) for one in other.messages]
    before = [message.calls for row in train for message in row.messages if message.calls]
    after = [message.calls for row in shuffled for message in row.messages if message.calls]
    assert Counter(map(repr, before)) == Counter(map(repr, after))
    assert sum(one == other for one, other in zip(before, after, strict=True)) < 0.02 * len(before)


def test_half_of_the_reasoned_rows_reason_truthfully_and_all_else_is_as_in_train():
    plain, reasoned = (list(iter_conversations(split, 1000, 3)) for split in ("train", "reasoned"))
    counts = Counter()
    for before, after in zip(plain, reasoned, strict=True):
        assert replace(after, messages=tuple(replace(m, reasoning=None) for m in after.messages)) == before
        spoken = [message for message in after.messages if message.role == "assistant"]
        has = {message.reasoning is not None for message in spoken}
        assert len(has) == 1
        counts[has.pop()] += 1
        for message in spoken if spoken[0].reasoning else ():
            said = re.findall(r"[a-z]+_[a-z_]+", message.reasoning)
            assert said == [call.name for call in message.calls]
            assert ("no tool" in message.reasoning or "answers" in message.reasoning) == (not message.calls)
        assert all(message.reasoning is None for message in after.messages if message.role != "assistant")
    assert 440 < counts[True] < 560


def test_varied_rows_call_tools_of_their_own_with_arguments_that_fit() -> None:
    rows = list(iter_conversations("varied", 1000, 0))
    names = Counter(tool.name for row in rows for tool in row.tools)
    assert not set(names) & {target.name for target in TARGETS}
    assert len(names) > 1000
    assert max(names.values()) < 10
    counts = Counter(len(_calls(row)) for row in rows)
    assert counts.keys() == {0, 1, 2}
    assert 150 < counts[0] < 250
    assert 150 < counts[2] < 250
    for row in rows:
        schemas = {tool.name: tool.function["parameters"] for tool in row.tools}
        for call in _calls(row):
            jsonschema.validate(call.arguments, schemas[call.name])


def test_no_made_up_word_is_rude() -> None:
    rng = random.Random(0)
    words = " ".join(make_word(rng) for _ in range(50_000))
    assert not [rude for rude in ("fuck", "shit", "slut", "dick", "cock") if rude in words]
