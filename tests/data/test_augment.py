"""Augmented rows: valid, decided by the seed alone, on the side of their original, and counted."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.base.errors import DataError
from fctune.config.sections.data import ADDITIONS, AUGMENT_KINDS, CHANGES
from fctune.data.augment import augmenter as augmenter_module
from fctune.data.augment.augmenter import Form, check_counts, is_held_out
from fctune.data.augment.spoken import say_name, take_out_item, take_out_value
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.augment.wordings import describe_ability, word_question, word_refusal
from fctune.data.check.warnings import iter_warnings
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.conversion import to_openai_row
from fctune.data.prepared_set import is_validation
from fctune.data.sources import ParsedRow, RowReader, UnreadRow
from fctune.data.tool_schema import ToolSet
from tests.augment_rows import expand_all, make_parsed, make_rows, make_tool, open_augmenter, read_rows, to_parsed
from tests.conftest import REAL_DATA

ALL = dict.fromkeys(AUGMENT_KINDS, 1.0)
SOURCES = ["made", "synthetic:train:120:4", "synthetic:varied:80:1", "synthetic:reasoned:60:2"]


def load(source: str) -> list[ParsedRow]:
    return make_rows() if source == "made" else read_rows(source)


def list_problems(form: Form, row: ParsedRow) -> list[str]:
    """Return what is wrong with a form by the checks of other rows: reading it back, its warnings and its calls."""
    read = RowReader("openai").read(UnreadRow("made.jsonl", 1, json.dumps(to_openai_row(form.conversation)).encode()))
    if not isinstance(read, ParsedRow):
        return [str(read)]
    known = Counter(warning.kind for warning in iter_warnings(row))
    found = Counter(warning.kind for warning in iter_warnings(read))
    problems = [f"{kind} x {count}" for kind, count in (found - known).items()]
    tools = ToolSet(form.conversation.tools)
    if all(ToolSet(row.conversation.tools).accepts(call) for m in row.conversation.messages for call in m.calls):
        problems += [e for m in form.conversation.messages for call in m.calls for e in tools.find_errors(call)]
    return problems


@pytest.mark.parametrize("source", SOURCES)
def test_every_form_of_a_row_is_a_valid_row(source: str) -> None:
    rows = load(source)
    made: Counter[str] = Counter()
    for row, forms in expand_all(rows, open_augmenter(rows, **ALL)):
        for form in forms:
            assert not list_problems(form, row), (form, list_problems(form, row))
            made.update(form.kinds)
    assert made.keys() == set(AUGMENT_KINDS)


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["seal_tools/rows.jsonl", "glaive_demo/glaive_toolcall_en_demo.json"])
def test_every_form_of_a_real_row_is_a_valid_row(name: str) -> None:
    rows = read_rows(str(REAL_DATA / name))[:250]
    forms = [(form, row) for row, forms in expand_all(rows, open_augmenter(rows, **ALL)) for form in forms]
    assert len(forms) > len(rows) + 50
    for form, row in forms:
        assert not list_problems(form, row), (form, list_problems(form, row))


@pytest.mark.thorough
@settings(max_examples=20)
@given(seed=st.integers(0, 1000), order=st.randoms(use_true_random=False))
def test_forms_depend_on_the_seed_and_the_row_but_not_on_the_order(seed: int, order: random.Random) -> None:
    rows = make_rows(40)
    kinds = dict.fromkeys(AUGMENT_KINDS, 0.5)
    expected = {row.digest(): forms for row, forms in expand_all(rows, open_augmenter(rows, seed=seed, **kinds))}
    shuffled = order.sample(rows, len(rows))
    assert {r.digest(): f for r, f in expand_all(shuffled, open_augmenter(rows, seed=seed, **kinds))} == expected
    other = {row.digest(): forms for row, forms in expand_all(rows, open_augmenter(rows, seed=seed + 1, **kinds))}
    assert other != expected


@pytest.mark.parametrize("share", [0.4, *(pytest.param(share, marks=pytest.mark.thorough) for share in (0.1, 1.0))])
def test_each_kind_is_applied_to_its_share_of_the_eligible_rows(share: float) -> None:
    rows = make_rows(90) + read_rows("synthetic:train:900:7")
    augmenter = open_augmenter(rows, **dict.fromkeys(AUGMENT_KINDS, share))
    forms = [form for _, forms in expand_all(rows, augmenter) for form in forms]
    for kind, counts in augmenter.counts.items():
        assert counts.rows == len(rows), kind
        assert counts.chosen == counts.made + counts.left_out.total()
        deviation = (counts.eligible * share * (1 - share)) ** 0.5
        assert abs(counts.chosen - share * counts.eligible) <= 4 * deviation + 1e-9, kind
        # Added rows have the changes of their originals, which are counted once.
        assert counts.made == sum(kind in f.kinds and (kind in ADDITIONS or not f.is_added) for f in forms)
    assert len(forms) == len(rows) + sum(augmenter.counts[kind].made for kind in ADDITIONS)


# mask_names ---------------------------------------------------------------------------------------------------------


def list_texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *list_texts(item))]
    return [text for item in value for text in list_texts(item)] if isinstance(value, list) else [str(value)]


def undo(conversation: Conversation, names: dict[str, str]) -> dict[str, Any]:
    """Put the old names back by plain replacement in the row's JSON, which is no code of the masking."""
    text = json.dumps(to_openai_row(conversation))
    for new, old in names.items():
        text = re.sub(rf"(?<![A-Za-z0-9_-]){re.escape(new)}(?![A-Za-z0-9_-])", lambda _, old=old: old, text)
    return json.loads(text)  # type: ignore[no-any-return]


@pytest.mark.parametrize("source", SOURCES)
def test_the_original_is_found_again_by_putting_the_masked_names_back(source: str) -> None:
    rows, num_masked = load(source), 0
    for row, (form, *_) in expand_all(rows, open_augmenter(rows, mask_names=1.0)):
        before, after = row.conversation, form.conversation
        names = {}
        for old, new in zip(before.tools, after.tools, strict=True):
            names |= {new.name: old.name}
            names |= dict(zip(new.parameters.get("properties", {}), old.parameters.get("properties", {}), strict=True))
        changed = {new: old for new, old in names.items() if new != old}
        num_masked += bool(changed)
        assert bool(changed) == ("mask_names" in form.kinds)
        assert undo(after, changed) == to_openai_row(before)
        hidden = [old for old in changed.values() if "_" in old]
        texts = list_texts([tool.function for tool in after.tools]) + [m.content or "" for m in after.messages]
        for name in hidden:  # keys of a result are the result's own
            pattern = rf"(?<![\w-]){re.escape(name)}(?![\w-]|\"\s*:)"
            assert not any(re.search(pattern, text) for text in texts), (name, texts)
    assert num_masked > len(rows) / 3


@pytest.mark.parametrize(
    ("request_text", "kept"),
    [
        ("Call get_weatheraaa for Paris", {"get_weatheraaa"}),
        ("Use the function get_weatheraaa, please: Paris", {"get_weatheraaa"}),
        ("Weather in Paris with max_days=5", {"max_days"}),
        ("Set the parameter city to Paris", {"city"}),
        ("Which city has Paris-like weather?", set()),  # an ordinary word
    ],
)
def test_a_name_that_the_user_says_is_kept(request_text: str, kept: set[str]) -> None:
    tools = (make_tool(0), make_tool(1))
    answer = Message("assistant", calls=(Call("get_weatheraaa", {"city": "Paris", "max_days": 5}),))
    row = make_parsed(0)
    row.conversation = Conversation((Message("user", request_text), answer), tools, "rows.jsonl:1")
    (form,) = open_augmenter([row], mask_names=1.0).expand(row)
    names = {tool.name for tool in form.conversation.tools}
    names |= {name for tool in form.conversation.tools for name in tool.parameters["properties"]}
    every = {"get_weatheraaa", tools[1].name, "city", "max_days"}
    assert names & every == kept


def test_a_name_that_a_value_holds_or_that_no_description_explains_is_kept() -> None:
    described, bare = (
        make_tool(0),
        Tool({"name": "run_it", "parameters": {"type": "object", "properties": {"x_y": {}}}}),
    )
    kind = {"type": "string", "enum": ["max_days", "min_days"], "description": "The kind of bound to use"}
    properties = {**described.parameters["properties"], "bound_kind": kind}
    described = Tool({**described.function, "parameters": {**described.parameters, "properties": properties}})
    answer = Message("assistant", calls=(Call(described.name, {"city": "run_it", "bound_kind": "max_days"}),))
    row = make_parsed(0)
    row.conversation = Conversation((Message("user", "Go!"), answer), (described, bare), "rows.jsonl:1")
    (form,) = open_augmenter([row], mask_names=1.0).expand(row)
    masked, kept = form.conversation.tools
    assert kept == bare
    assert masked.name != described.name
    assert "max_days" in masked.parameters["properties"]  # a value that the user may choose is spelled like it
    assert not {"city", "bound_kind"} & masked.parameters["properties"].keys()


@pytest.mark.parametrize(
    ("function", "parameters", "has_city"),
    [
        ({}, {"examples": [{"city": "Rome"}]}, True),
        ({}, {"default": {"city": "Rome"}}, True),
        ({"required": ["city"]}, {}, True),
        ({"input_examples": [{"city": "Rome"}]}, {}, True),
        ({"description": "Get weather reports of `city`."}, {}, True),
        ({"description": "Get weather reports of a city."}, {}, False),
        ({}, {"required": ["city", ["max_days"]]}, False),
    ],
)
def test_a_parameters_name_is_kept_where_a_tool_has_it_elsewhere(
    function: dict[str, Any], parameters: dict[str, Any], has_city: bool
) -> None:
    plain = make_tool(0)
    tool = Tool({**plain.function, **function, "parameters": {**plain.parameters, **parameters}})
    answer = Message("assistant", calls=(Call(tool.name, {"city": "Paris"}),))
    row = make_parsed(0)
    row.conversation = Conversation((Message("user", "Go!"), answer), (tool,), "rows.jsonl:1")
    (form,) = open_augmenter([row], mask_names=1.0).expand(row)
    assert form.kinds == ("mask_names",)
    (masked,) = form.conversation.tools
    assert ("city" in masked.parameters["properties"]) == has_city
    assert ("city" in form.conversation.messages[1].calls[0].arguments) == has_city


# distract, shuffle_tools, paraphrase --------------------------------------------------------------------------------


def test_distractors_cannot_do_what_is_needed_and_fill_up_to_the_limit() -> None:
    rows, sizes = make_rows(), set()
    augmenter = open_augmenter(rows, distract=1.0, max_tools=6)
    for row, (form, *_) in expand_all(rows, augmenter):
        before, after = row.conversation, form.conversation
        if "distract" not in form.kinds:
            assert after == before
            continue
        own = {tool.name for tool in before.tools}
        needed = [tool for tool in before.tools if any(tool.name == c.name for m in before.messages for c in m.calls)]
        added = [tool for tool in after.tools if tool.name not in own]
        assert added
        assert after.messages == before.messages
        assert len({tool.name for tool in after.tools}) == len(after.tools)
        assert 3 <= len(after.tools) <= 6
        assert not [tool for tool in added for one in needed if augmenter.pool.are_alike(tool, one)]
        sizes.add(len(after.tools))
    assert sizes == {3, 4, 5, 6}


def test_distractors_come_from_the_same_source() -> None:
    rows = make_rows(40)
    own = {tool.name for row in rows[:20] for tool in row.conversation.tools}
    groups = [("one" if number < 20 else "two", row) for number, row in enumerate(rows)]
    config = open_augmenter(rows, distract=1.0).config
    augmenter = augmenter_module.make_augmenter(config, groups)
    for row in rows[:20]:
        for form in augmenter.expand(row, "one"):
            assert {tool.name for tool in form.conversation.tools} <= own


@pytest.mark.parametrize(("weight", "is_distracted"), [(1.0, False), (0.0, True)], ids=["supervised", "context alone"])
def test_no_tool_is_added_to_a_row_that_says_what_it_cannot_do(weight: float, is_distracted: bool) -> None:
    rows = make_rows()
    plain = rows[0].conversation
    later = (Message("user", "Then book me a room."), Message("assistant", "I have no tool for it.", weight=weight))
    row = to_parsed(replace(plain, messages=(*plain.messages, *later)))
    augmenter = open_augmenter(rows, distract=1.0)
    (form,) = augmenter.expand(row, "rows")
    assert (form.conversation.tools != plain.tools) == is_distracted
    assert ("distract" in form.kinds) == is_distracted
    assert augmenter.counts["distract"].eligible == is_distracted
    (form,) = augmenter.expand(rows[0], "rows")
    assert form.kinds == ("distract",), "an answer to a tool's result calls nothing either"


def canonical(value: Any) -> Any:
    """Return a schema without the keys and the order that mean nothing."""
    if isinstance(value, dict):
        kept = {key: canonical(item) for key, item in value.items() if key != "title"}
        return {key: item for key, item in sorted(kept.items()) if (key, item) != ("required", [])}
    if isinstance(value, list):
        return sorted((canonical(item) for item in value), key=json.dumps)
    return value


@pytest.mark.parametrize("source", SOURCES)
def test_a_paraphrased_schema_means_the_same(source: str) -> None:
    rows, num_changed = load(source), 0
    for row, (form, *_) in expand_all(rows, open_augmenter(rows, paraphrase=1.0)):
        before, after = row.conversation, form.conversation
        assert [tool.name for tool in after.tools] == [tool.name for tool in before.tools]
        for old, new in zip(before.tools, after.tools, strict=True):
            assert canonical(new.function) == canonical(old.function)
            num_changed += old.to_json() != new.to_json()
        calls = [[(c.name, c.arguments) for m in one.messages for c in m.calls] for one in (before, after)]
        assert calls[0] == calls[1]
        assert [m.content for m in after.messages] == [m.content for m in before.messages]
    assert num_changed > 20


def test_shuffled_tools_are_the_same_tools_in_another_order() -> None:
    rows = make_rows()
    for row, (form, *_) in expand_all(rows, open_augmenter(rows, shuffle_tools=1.0)):
        before, after = row.conversation.tools, form.conversation.tools
        assert sorted(tool.name for tool in after) == sorted(tool.name for tool in before)
        assert (after != before) == (len(before) > 1)


# take_away, ask, repeat ---------------------------------------------------------------------------------------------


def test_a_row_without_its_tool_asks_what_its_twin_asks_and_names_what_is_missing() -> None:
    rows, answers = make_rows(120), []
    for row, forms in expand_all(rows, open_augmenter(rows, take_away=1.0, distract=0.5, mask_names=0.3)):
        for form in (form for form in forms if "take_away" in form.kinds):
            original, made = forms[0].conversation, form.conversation
            turn = next(i for i, m in enumerate(original.messages) if m.calls)
            needed = {call.name for call in original.messages[turn].calls}
            assert made.messages[:-1] == original.messages[:turn]
            assert made.tools
            assert not needed & {tool.name for tool in made.tools}
            assert {tool.name for tool in made.tools} <= {tool.name for tool in original.tools} or len(needed) == len(
                original.tools
            )
            answer = made.messages[-1]
            assert not answer.calls
            subject = row.conversation.messages[turn].calls[0].name.partition("_")[2]
            assert subject in (answer.content or ""), answer
            answers.append(re.sub(subject, "X", answer.content or ""))
            assert form.kinds[:-1] == forms[0].kinds
    assert len(answers) > 60
    assert Counter(answers).most_common(1)[0][1] < len(answers) / 10
    assert len({answer.split()[0] + answer.split()[1] for answer in answers}) > 15  # they do not begin alike


@pytest.mark.parametrize("num_offered", [4, 6])
def test_a_request_for_many_tools_loses_them_all(num_offered: int) -> None:
    tools = tuple(map(make_tool, range(6)))
    subjects = [tool.name.partition("_")[2] for tool in tools]
    calls = tuple(Call(tool.name, {"city": "Oslo"}) for tool in tools[:4])
    messages = (Message("user", f"{', '.join(subjects[:4])} in Oslo?"), Message("assistant", calls=calls))
    rows = [to_parsed(Conversation(messages, tools[:num_offered])), *make_rows(20)]
    (_, forms), *_ = expand_all(rows, open_augmenter(rows, take_away=1.0))
    made = forms[1].conversation
    offered = {tool.name for tool in made.tools}
    assert offered
    assert not offered & {call.name for call in calls}
    assert num_offered == 4 or offered == {tool.name for tool in tools[4:]}
    assert all(subject in (made.messages[-1].content or "") for subject in subjects[:4])


def test_a_row_that_asks_lacks_the_value_and_names_the_parameter() -> None:
    rows, num_asked, num_given = make_rows(120), 0, 0
    for row, forms in expand_all(rows, open_augmenter(rows, ask=1.0)):
        for form in forms[1:]:
            original, made = row.conversation, form.conversation
            turn = next(i for i, m in enumerate(original.messages) if m.calls)
            value = original.messages[turn].calls[0].arguments["city"]
            assert value not in (made.messages[turn - 1].content or "")
            assert not made.messages[turn].calls
            assert "city" in (made.messages[turn].content or "")
            num_asked += 1
            if len(made.messages) > turn + 1:
                num_given += 1
                assert made.messages[turn + 1].role == "user"
                assert value in (made.messages[turn + 1].content or "")
                assert made.messages[turn + 2] == original.messages[turn]
    assert num_asked > 60
    assert 0.3 < num_given / num_asked < 0.7


@pytest.mark.parametrize(
    ("text", "value", "left"),
    [
        ("What is the weather in Paris?", "Paris", "What is the weather?"),
        ("Fly from Oslo to Rome on Monday.", "Rome", "Fly from Oslo on Monday."),
        ("Translate 'good night' into French.", "good night", "Translate into French."),
        ("Is it warm in Paris or in PARIS, Texas?", "Paris", None),  # said twice
        ("The distance between Rome and Oslo, please.", "Oslo", None),
        ("My name is Ada, book a room.", "Ada", None),
        ("List all films directed by Nolan.", "Nolan", None),
        ("I gave a tip of $5.", "5", None),
        ("Set it to 2.5 degrees.", "2", None),
        ("Weather in Paris, Rome and Oslo", "Paris", None),
        ("Hello Paris", "Paris", None),  # too little would be left
    ],
)
def test_only_what_leaves_a_sentence_is_taken_out(text: str, value: str, left: str | None) -> None:
    assert take_out_value(text, value) == left


@pytest.mark.parametrize(
    ("text", "name", "value", "left"),
    [
        ("Book a berth: C12, boat is Aurora, 3 nights.", "boat", "Aurora", "Book a berth: C12, 3 nights."),
        ("Book a berth: C12, boat is Aurora, 3 nights.", "nights", "3", "Book a berth: C12, boat is Aurora."),
        ("Book a berth: C12, boat is Aurora, 3 nights.", "berth", "C12", "Book a berth: boat is Aurora, 3 nights."),
        ("Book a berth. C12, boat: Aurora, 3 nights.", "boat", "Aurora", "Book a berth. C12, 3 nights."),
        ("Cancel a booking: booking id is HB-58.", "booking_id", "HB-58", "Cancel a booking."),
        ("Can I cancel it now? Booking id: HB-58.", "bookingId", "HB-58", "Can I cancel it now?"),
        ("HB-58 as the booking ID: look it up.", "booking_id", "HB-58", "Look it up."),
        ("Diesel (fuel), 3.5 litres. Please order it.", "fuel", "diesel", "3.5 litres. Please order it."),
        ("Set the time (booking id: HB-58, time: 00:43).", "time", "00:43", "Set the time (booking id: HB-58)."),
        ("Set the time (booking id: HB-58).", "booking_id", "HB-58", "Set the time."),
        ("How far is it from Paris, France, to Rome?", "country", "France", None),
        ("I like my walls red, white, and blue.", "colour", "white", None),
        ("Tell me when booking HB-58 arrives.", "booking_id", "HB-58", None),
        ("Lunde, 2027-05-02, and Lunde again.", "port", "Lunde", None),  # said twice
        ("Order it: 2.5 litres.", "litres", "2", None),
        ("Send it: 5.", "n", "5", None),  # too little would be left
    ],
)
def test_only_an_item_that_says_a_value_alone_is_taken_out(text: str, name: str, value: str, left: str | None) -> None:
    assert take_out_item(text, name, value) == left


def test_a_repeated_request_has_a_call_for_each_of_its_values() -> None:
    rows, num_calls = make_rows(120), Counter[int]()
    doubled = [*rows, *[make_parsed(number + 97, is_answered=False) for number in range(40)]]
    for row in doubled[len(rows) :]:  # other requests for the tools of the first rows
        number = doubled.index(row) - len(rows)
        call = replace(row.conversation.messages[2].calls[0], name=make_tool(number).name)
        messages = (*row.conversation.messages[:2], Message("assistant", calls=(call,)))
        row.conversation = replace(row.conversation, messages=messages, tools=(make_tool(number),))
    for row, forms in expand_all(rows, open_augmenter(doubled, repeat=1.0)):
        for form in forms[1:]:
            turn = next(i for i, m in enumerate(row.conversation.messages) if m.calls)
            request, answer = form.conversation.messages[turn - 1 :]
            (original,) = row.conversation.messages[turn].calls
            assert len(answer.calls) > 1
            assert {call.name for call in answer.calls} == {original.name}
            assert answer.calls[0].arguments == original.arguments
            assert len({json.dumps(call.arguments) for call in answer.calls}) == len(answer.calls)
            assert len({call.id for call in answer.calls}) == len(answer.calls)
            for call in answer.calls:
                assert all(str(value) in (request.content or "") for value in call.arguments.values()), (request, call)
            num_calls[len(answer.calls)] += 1
    assert num_calls.total() > 40
    assert len(num_calls) > 1


def test_requests_are_joined_only_if_their_rows_have_the_same_system_prompts() -> None:
    def make(city: str, *system: str) -> ParsedRow:
        messages = [Message("system", text) for text in system]
        messages.append(Message("user", f"Reports in {city} today, at most 3 days"))
        messages.append(Message("assistant", calls=(Call(make_tool(0).name, {"city": city, "max_days": 3}),)))
        return to_parsed(Conversation(tuple(messages), (make_tool(0),)))

    days = [f"Today is 2024-05-{day:02}." for day in range(1, 13)]
    rows = [make(city, day) for day in days for city in ("Paris", "Rome")] + [make("Oslo", "Today is Monday.")]
    augmenter = open_augmenter(rows, repeat=1.0)
    for row, forms in expand_all(rows[:-1], augmenter):
        called = {call.arguments["city"] for call in forms[1].conversation.messages[-1].calls}
        assert called == {"Paris", "Rome"}, row
    assert len(augmenter.expand(rows[-1], "rows")) == 1
    assert len(augmenter.expand(make("Lima"), "rows")) == 1, "a row without a system prompt"


# Provenance, refusals and planted mistakes ---------------------------------------------------------------------------


def test_one_row_is_held_out_as_many_are() -> None:
    splits = [int(row.digest(), 16) for row in make_rows(90)]
    mask = is_validation(np.array(splits, dtype=np.uint64), 0.3)
    assert mask.tolist() == [is_held_out(split, 0.3) for split in splits]
    assert 10 < mask.sum() < 50


def plant_wrong_call(conversation: Conversation, *_: Any) -> Conversation:
    """A ``repeat`` whose second call lacks its required argument."""
    turn = next(i for i, m in enumerate(conversation.messages) if m.calls)
    (call,) = conversation.messages[turn].calls
    answer = replace(conversation.messages[turn], calls=(call, Call(call.name, {"max_days": 1}, "call_2")))
    return replace(conversation, messages=(*conversation.messages[:turn], answer))


def plant_lost_parameters(tool: Tool, *_: Any) -> Tool:
    """A ``paraphrase`` that loses all parameters."""
    return Tool({**tool.function, "parameters": {"type": "object", "properties": {}}})


@pytest.mark.parametrize(
    ("kind", "owner", "name", "planted"),
    [
        ("repeat", augmenter_module, "repeat", plant_wrong_call),
        ("mask_names", augmenter_module.NameMask, "apply_to_message", lambda mask, message: message),
        ("paraphrase", augmenter_module, "paraphrase_schema", plant_lost_parameters),
    ],
)
def test_a_wrong_augmentation_is_left_out_and_counted(
    kind: str, owner: Any, name: str, planted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(60)
    monkeypatch.setattr(owner, name, planted)
    augmenter = open_augmenter(rows, **{kind: 1.0})
    for row, forms in expand_all(rows, augmenter):
        has_calls = any(message.calls for message in row.conversation.messages)
        if has_calls:
            assert forms == [Form(row.conversation)]
    counts = augmenter.counts[kind]
    assert counts.left_out["not valid"] > 10
    assert counts.made + counts.left_out.total() == counts.chosen


@pytest.mark.parametrize(
    ("rows", "kinds", "says"),
    [
        (make_rows(7)[6:], {"ask": 0.5}, "ask=50%: applies to none of the 1 row (no request that a call of a tool on"),
        (
            [make_parsed(1)],
            {"take_away": 1.0},
            "take_away=100%: applies to none of the 1 row (all tools are needed, and",
        ),
        ([make_parsed(3)], {"repeat": 1.0}, "(no other values or requests known for the tool: 1). Remove it."),
        (make_rows(30), {"shuffle_tools": 1e-9}, "selects none of the"),
        (
            [make_parsed(1)],
            {"distract": 1.0},
            "none of the 1 row chosen among 1 eligible ones can be used (no other tool",
        ),
    ],
    ids=["no call", "all tools needed", "nothing to repeat with", "share too small", "no distractors"],
)
def test_a_kind_that_applies_to_no_row_is_refused(rows: Sequence[ParsedRow], kinds: dict[str, Any], says: str) -> None:
    augmenter = open_augmenter(rows, **kinds)
    list(expand_all(rows, augmenter))
    with pytest.raises(DataError, match=re.escape(says)):
        check_counts(augmenter.counts, augmenter.shares)


def test_no_required_value_in_the_request_leaves_nothing_to_ask_for() -> None:
    row = make_parsed(1)
    messages = list(row.conversation.messages)
    messages[1] = Message("user", "What is it like where I live?")
    row.conversation = replace(row.conversation, messages=tuple(messages))
    augmenter = open_augmenter([row], ask=1.0)
    assert len(augmenter.expand(row)) == 1
    assert augmenter.counts["ask"].unsuitable == {"no required value that can be left out of the request": 1}


def test_an_augmented_row_is_not_augmented_again() -> None:
    row = make_parsed(3, [5, 8])
    (form,) = open_augmenter([row], shuffle_tools=1.0).expand(row)
    mark = {"kinds": list(form.kinds), "digest": row.digest(), "from": row.conversation.source, "seed": 0}
    again = replace(row, conversation=form.conversation, raw={"metadata": {"augmented": mark}})
    augmenter = open_augmenter([row], **ALL)
    assert augmenter.expand(again) == [Form(form.conversation)]
    assert again.digest() == row.digest() != form.conversation.digest()
    assert {count for counts in augmenter.counts.values() for count in counts.unsuitable.values()} == {1}


@pytest.mark.parametrize(
    "mark", [None, [], {"kinds": ["ask"]}, {"kinds": "ask", "digest": "0" * 16}, {"kinds": ["ask"], "digest": "xyz"}]
)
def test_a_malformed_mark_is_no_mark(mark: Any) -> None:
    row = replace(make_parsed(2), raw={"metadata": {"augmented": mark}})
    assert row.mark is None
    assert row.digest() == row.conversation.digest()


# Wordings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "description", "do", "topic"),
    [
        (
            "getWeather",
            "Retrieves the current weather of a city. Needs a key.",
            "retrieve the current weather of a city",
            "weather",
        ),
        ("x", "This function is used to convert currencies", "convert currencies", "x"),
        ("send_mail", "", "send mail", "mail"),
        ("stock_price", "Prices of stocks", None, "stock price"),
        ("verify", "Verifies an IBAN (international account number)", "verify an IBAN", "verify"),
        ("f", "Allows users to book a table, such as for dinner", "book a table", "f"),
        ("get_a", "Get " + "very " * 30 + "long", "get a", "a"),
    ],
)
def test_the_ability_of_a_tool_is_a_phrase(name: str, description: str, do: str | None, topic: str) -> None:
    assert tuple(describe_ability(Tool({"name": name, "description": description}))) == (do, topic)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("startDate", "start date"),
        ("HTTPServer_2", "http server 2"),
        ("département", "département"),
        ("größeDerSchrift", "größe der schrift"),
        ("ÄußereGröße", "äußere größe"),
        ("городВылета", "город вылета"),
        ("出発日", "出発日"),
        ("मौसम", "मौसम"),
    ],
)
def test_names_of_any_script_are_said_in_full(name: str, said: str) -> None:
    assert say_name(name) == said


@pytest.mark.parametrize(
    ("one", "like_it", "unlike_it"),
    [
        ("Show the weather in a city", "Show the weather in a city now", "Cancel an order of the shop"),
        ("Показать погоду в городе", "Показать погоду в городе сейчас", "Отменить заказ магазина"),
        ("查询某个城市的天气情况", "查询某个城市的天气情况和气温", "取消商店的订单"),
        ("查询指定城市的天气情况", "查询某个城市的天气和气温情况", "预订酒店房间"),
        ("都市の天気を表示する", "都市の今の天気を表示する", "店の注文を取り消す"),
    ],
)
def test_tools_are_alike_by_descriptions_in_any_script(one: str, like_it: str, unlike_it: str) -> None:
    tools = [Tool({"name": f"t{n}", "description": text}) for n, text in enumerate((one, like_it, unlike_it))]
    pool = ToolPool()
    assert pool.are_alike(tools[0], tools[1])
    assert not pool.are_alike(tools[0], tools[2])


def test_nothing_is_taken_out_of_a_request_whose_prepositions_are_not_known() -> None:
    assert take_out_value("Какая погода сегодня в Осло?", "Осло") is None


def test_there_are_dozens_of_wordings_and_each_names_what_is_missing() -> None:
    rng = random.Random(0)
    tool, other = make_tool(0), make_tool(1)
    declined = {word_refusal([other], [tool], rng) for _ in range(3000)}
    assert len(declined) > 150
    assert all("weatheraaa" in text for text in declined)
    asked = {word_question(tool, "city", rng) for _ in range(1000)}
    assert len(asked) > 25
    assert all("city" in text for text in asked)
    unknown = {word_refusal([other], [], rng) for _ in range(1000)}
    assert len(unknown) > 40
    assert all("{" not in text and "  " not in text for text in declined | asked | unknown)
    assert set(AUGMENT_KINDS) == {*CHANGES, *ADDITIONS}
