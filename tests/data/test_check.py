"""The dataset report: counts, findings, repeats, overlap, and the schema of its JSON."""

from __future__ import annotations

import gzip
import io
import json
import resource
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from fctune.base.errors import DataError
from fctune.data.chat_template import ChatTemplate
from fctune.data.check import CLASSES, WARNING_KINDS, Report, check_sources
from fctune.data.check.similarity import NEAR, spoken_text
from fctune.data.conversation import Conversation
from fctune.data.sources import read_source
from tests.conftest import REAL_DATA

DEFECTS = str(Path(__file__).parent / "fixtures" / "defects.jsonl")
GLAIVE_DEMO = str(REAL_DATA / "glaive_demo" / "glaive_toolcall_en_demo.json")


def make_row(question: str, answer: str = "Sunny.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def kinds(report: Report) -> dict[str, int]:
    return {finding.kind: finding.count for finding in (*report.defect_kinds, *report.warning_kinds)}


def render(report: Report) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(report.render_text())
    return capture.get()


@pytest.mark.real_data
def test_the_real_rows_have_the_known_counts() -> None:
    report = check_sources([GLAIVE_DEMO])
    assert (report.rows, report.conversations, report.calls, report.defects) == (300, 300, 211, 0)
    assert report.duplicates == 35
    assert report.tools == 64
    assert report.classes["no_tools"] == 109
    assert report.classes["no_tools"] + report.classes["no_call"] == 147
    assert report.classes["parallel"] == 0
    assert set(kinds(report)) == {"wrong_type", "secret"}


def test_a_tool_that_allows_no_arguments_is_a_warning(tmp_path: Path) -> None:
    closed = {"type": "object", "properties": {"unit": {"enum": []}}, "required": ["unit"]}
    open_ = {"type": "object", "properties": {"unit": {"enum": []}}}
    tools = [{"name": name, "parameters": schema} for name, schema in (("locked", closed), ("free", open_))]
    path = write_rows(tmp_path / "rows.jsonl", [{**make_row("Weather?"), "tools": tools}])
    report = check_sources([path])
    (finding,) = report.warning_kinds
    assert (finding.kind, finding.count) == ("schema_allows_nothing", 1)
    assert finding.examples[0].pointer == "tools[0].parameters"
    assert finding.examples[0].reason == "locked: allows no arguments at all"


def test_defects_are_reported_with_file_line_and_pointer() -> None:
    report = check_sources([DEFECTS])
    lines = Path(DEFECTS).read_text("utf-8").split("\n")[:-1]
    assert report.rows == report.conversations + report.defects
    assert len(lines) == report.rows + sum(report.left_out.values())
    assert report.left_out == {"answer_failed": 1}
    assert report.defects == sum(finding.count for finding in report.defect_kinds)
    assert not report.is_usable("fail")
    assert report.is_usable("skip")
    for finding in (*report.defect_kinds, *report.warning_kinds):
        assert finding.meaning
        for example in finding.examples:
            assert example.file == DEFECTS
            assert 1 <= example.line <= len(lines)
    text = render(report)
    where = f"{DEFECTS}:60: messages[1].tool_calls[0].function.arguments: not JSON (expected a key in double quotes"
    assert where in text
    assert "arguments_not_json" in text


def test_every_kind_of_warning_is_found(tmp_path: Path) -> None:
    weightless = {"role": "assistant", "content": "x", "weight": 0}
    prompt = {"from": "system", "value": 'Use these. <tools>[{"name": "f"}]</tools>'}
    odd = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 3}}}
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    more = [
        {"messages": [{"role": "user", "content": "?"}, weightless]},
        {"conversations": [prompt, {"from": "human", "value": "?"}, {"from": "gpt", "value": "x"}]},
        {
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}],
            "tools": [{"name": "f", "parameters": odd}],
        },
        {**make_row("?"), "tools": [{"name": "f", "parameters": {"type": "object", "not": {}}}]},
        {"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "x"}]},
        make_row("My password: aB3xQ9z7kk, and I am jane@corp.org."),
    ]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    request = {"max_tokens": 9, "stop_sequences": ["."]}  # of Anthropic's API
    tool = {"name": "f", "input_schema": {"type": "object"}}
    changed = [request | {"messages": turns}, request | {"messages": turns * 2, "tools": [tool]}]
    paths = [DEFECTS, write_rows(tmp_path / "more.jsonl", more), write_rows(tmp_path / "changed.jsonl", changed)]
    report = check_sources(paths, secrets=("secrets", "emails"))
    assert WARNING_KINDS.keys() - kinds(report).keys() == set()


def test_rows_that_other_rows_continue_are_a_warning(tmp_path: Path) -> None:
    rows = [make_row(f"{n}?") for n in range(4)]
    longer = [{"messages": [*row["messages"], *make_row("And Rome?")["messages"]]} for row in rows[1:3]]
    context = {"messages": [rows[3]["messages"][0], {**rows[3]["messages"][1], "weight": 0}, *longer[0]["messages"]]}
    path = write_rows(tmp_path / "rows.jsonl", [*longer, *rows, context, rows[1]])
    report = check_sources([path])
    assert kinds(report) == {"begins_another": 3}
    (finding,) = report.warning_kinds
    assert [example.line for example in finding.examples] == [4, 5, 8]
    assert "--fold always" in render(report)
    folded = check_sources([path], fold="always")
    assert (kinds(folded), folded.left_out) == ({}, {"folded_record": 3})


def test_the_report_is_json_of_its_version() -> None:
    report = check_sources(
        [DEFECTS], encode=lambda conversation: (10, 3), seq_len=8, validation=[DEFECTS], eval_suites=[DEFECTS]
    )
    value = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert value["schema_version"] == 2
    for key in ("rows", "conversations", "calls", "duplicates", "defects"):
        assert isinstance(value[key], int)


def test_a_call_that_violates_its_schema_is_kept_and_reported(tmp_path: Path) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
    }
    arguments = {"days": "three", "unit": "K", "country": "France"}
    call = {"function": {"name": "f", "arguments": arguments}}
    row = make_row("?")
    row["messages"][1] |= {"content": None, "tool_calls": [call, {"function": {"name": "g", "arguments": {}}}]}
    row["tools"] = [{"name": "f", "parameters": parameters}]
    report = check_sources([write_rows(tmp_path / "rows.jsonl", [row])])
    assert report.conversations == 1
    expected = ["missing_argument", "not_in_enum", "undeclared_tool", "unknown_argument", "wrong_type"]
    assert sorted(kinds(report)) == expected
    pointers = {f.kind: f.examples[0].pointer for f in report.warning_kinds}
    assert pointers["wrong_type"] == "messages[1].tool_calls[0].function.arguments.days"
    assert pointers["undeclared_tool"] == "messages[1].tool_calls[1].function.name"


def test_duplicates_agree_with_an_independent_count(tmp_path: Path) -> None:
    rows = [make_row(f"question {i % 7}") for i in range(30)]
    report = check_sources([write_rows(tmp_path / "rows.jsonl", rows)])
    assert report.duplicates == 30 - len({json.dumps(row) for row in rows}) == 23
    first = report.duplicate_examples[0]
    assert (first.row.rpartition(":")[2], first.earlier.rpartition(":")[2], first.similarity) == ("8", "1", 1.0)


def test_near_duplicates_share_most_of_their_word_runs(tmp_path: Path) -> None:
    conversations = [item for item in read_source("synthetic:train:400:1") if isinstance(item, Conversation)]
    base = " ".join(f"word{i}" for i in range(100))
    rows = [conversation.to_openai() for conversation in conversations]
    rows += [make_row(base), make_row(base + " and more"), make_row(base.replace("word50 ", "other ")), make_row("x")]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    runs = []
    for item in read_source(path):
        assert isinstance(item, Conversation)
        words = "".join(c if c.isalnum() or c == "_" else " " for c in spoken_text(item).lower()).split()
        runs.append({tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))})
    digests = Counter[str]()
    surely, possibly = set(), set()
    for i, item in enumerate(read_source(path)):
        assert isinstance(item, Conversation)
        digests[item.digest()] += 1
        if digests[item.digest()] > 1:
            continue
        best = max((len(runs[i] & runs[j]) / len(runs[i] | runs[j]) for j in range(i)), default=0.0)
        surely |= {i + 1} if best >= NEAR + 0.12 else set()
        possibly |= {i + 1} if best >= NEAR - 0.2 else set()
    report = check_sources([path])
    found = {int(repeat.row.rpartition(":")[2]) for repeat in report.near_duplicate_examples}
    assert found <= possibly
    assert len(surely) <= report.near_duplicates <= len(possibly)
    assert surely


def test_the_same_rows_give_the_same_report() -> None:
    first, second = (check_sources([DEFECTS]).to_json() for _ in range(2))
    del first["seconds"], second["seconds"]
    assert first == second


def test_questions_of_an_eval_suite_are_found_in_the_rows(tmp_path: Path) -> None:
    greeting = {"id": "irrelevance_0", "question": [[{"role": "user", "content": "hello"}]], "function": []}
    question = "Please find the fastest route from Berlin to Munich that avoids all toll roads today"
    other = "How many moons does the planet Saturn have according to the newest counts of astronomers"
    bfcl = [
        {"id": "simple_0", "question": [[{"role": "user", "content": question}]], "function": []},
        {"id": "simple_1", "question": [[{"role": "user", "content": other}]], "function": []},
        {"id": "simple_2", "question": [[{"role": "user", "content": "Is it warm in Oslo now?"}]], "function": []},
    ]
    suite = write_rows(tmp_path / "BFCL_v4_simple.json", [*bfcl, greeting])
    rows = [
        make_row(f"Hello! {question.upper()}!"),
        make_row("Saturn has moons, how many?"),
        make_row("Hello"),
        make_row("is it WARM in Oslo, now"),
    ]
    report = check_sources([write_rows(tmp_path / "rows.jsonl", rows)], eval_suites=[suite])
    (overlap,) = report.overlaps
    assert (overlap.num_items, overlap.num_found, overlap.num_rows) == (3, 2, 2)
    assert overlap.examples[0].item.endswith(":1 (simple_0)")
    assert overlap.examples[0].row.endswith("rows.jsonl:1")


def test_a_suite_in_yaml_is_found_in_the_rows(tmp_path: Path) -> None:
    ask = "Please find the fastest route from Berlin to Munich that avoids all toll roads today"
    cases = [{"id": "route", "messages": [{"role": "user", "content": ask}], "expected_calls": []}]
    suite = tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump({"description": "d", "tools": [], "cases": cases}))
    rows = write_rows(tmp_path / "rows.jsonl", [make_row(f"Hello! {ask}"), make_row("Saturn has moons, how many?")])
    (overlap,) = check_sources([rows], eval_suites=[str(suite)]).overlaps
    assert (overlap.num_items, overlap.num_found, overlap.num_rows) == (1, 1, 1)
    assert overlap.examples[0].item == f"{suite}: case route"
    suite.write_text("cases: [")
    with pytest.raises(DataError, match="cannot be read as a suite"):
        check_sources([rows], eval_suites=[str(suite)])


@pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed")
def test_bfcl_questions_are_found_in_the_rows_that_contain_them_and_in_no_others(tmp_path: Path) -> None:
    spec = find_spec("bfcl_eval")
    assert spec is not None
    assert spec.submodule_search_locations
    suite = Path(spec.submodule_search_locations[0]) / "data"
    questions = [json.loads(line) for line in (suite / "BFCL_v4_multi_turn_base.json").read_text().splitlines()]
    taken = [turn[0]["content"] for question in questions[:5] for turn in question["question"]]
    rows = write_rows(tmp_path / "rows.jsonl", [make_row(text) for text in taken])
    (overlap,) = check_sources([rows, "synthetic:train:500:1"], eval_suites=[str(suite)]).overlaps
    assert overlap.num_items > 4_000
    assert overlap.num_found >= 1
    assert all("rows.jsonl" in example.row for example in overlap.examples)


def test_rows_of_the_validation_split_are_found_in_the_training_rows(tmp_path: Path) -> None:
    rows = [make_row(f"question number {i} about something that is longer than eight words {i}") for i in range(10)]
    train = write_rows(tmp_path / "train.jsonl", rows[:7])
    held_out = write_rows(tmp_path / "held_out.jsonl", rows[5:])
    (overlap,) = check_sources([train], validation=[held_out]).overlaps
    assert overlap.purpose == "validation"
    assert overlap.num_items == 5
    assert overlap.num_found >= 2
    (disjoint,) = check_sources(
        [train], validation=[write_rows(tmp_path / "x.jsonl", [make_row("x y z a b c d")])]
    ).overlaps
    assert disjoint.num_found == 0


def test_a_held_out_set_without_questions_is_rejected(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [make_row("?")])
    with pytest.raises(DataError, match="no user turn of six words or more"):
        check_sources([rows], eval_suites=[write_rows(tmp_path / "suite.jsonl", [{"id": 1, "ground_truth": []}])])


def test_tokens_are_counted_if_a_tokenizer_is_given(tmp_path: Path) -> None:
    rows = [make_row("a " * n) for n in (1, 5, 10, 50)]

    def encode(conversation: Conversation) -> tuple[int, int]:
        length = len((conversation.messages[0].content or "").split())
        return length, length // 5

    report = check_sources([write_rows(tmp_path / "rows.jsonl", rows)], encode=encode, seq_len=10)
    assert report.tokens is not None
    assert (report.tokens.total, report.tokens.supervised, report.tokens.num_over_seq_len) == (66, 13, 1)
    assert report.tokens.num_unsupervised == 1
    assert report.tokens.supervised_share == pytest.approx(13 / 66)
    assert (report.tokens.lengths.min, report.tokens.lengths.p50, report.tokens.lengths.max) == (1, 5, 50)


def test_a_full_disk_ends_the_check_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [make_row(f"question {i}") for i in range(200)])
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.raises(DataError, match=r"No space left on device\. Set TMPDIR"):
        check_sources([rows])


def test_a_truncated_file_is_reported_and_the_next_source_is_read(tmp_path: Path) -> None:
    lines = "".join(json.dumps(make_row(f"{i} {i * i}")) + "\n" for i in range(5000))
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(lines.encode())[:-3000])
    intact = write_rows(tmp_path / "intact.jsonl", [make_row("intact")])
    report = check_sources([str(broken), intact])
    assert report.sources[0].rows > 1000
    assert "ends early" in report.errors[0]
    assert report.sources[1].rows == 1
    assert not report.is_usable("skip")
    assert "ends early" in render(report)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([], "no_call"),
        ([1], "one_call"),
        ([1, 1], "multi_turn"),
        ([2], "parallel"),
        ([1, 2], "parallel"),
    ],
)
def test_a_conversation_has_the_class_of_its_calls(tmp_path: Path, turns: list[int], expected: str) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages: list[dict[str, Any]] = []
    for number in turns:
        messages += [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call] * number}]
        messages += [{"role": "tool", "content": "x"}] * number
    messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": messages, "tools": [{"name": "f"}]}])
    assert {name for name, count in check_sources([path]).classes.items() if count} == {expected}
    assert expected in CLASSES


@pytest.mark.slow
def test_100k_rows_take_under_a_minute_and_memory_stays_flat(tmp_path: Path) -> None:
    conversations = read_source("synthetic:train:100000:1")
    rows = (item.to_openai() for item in conversations if isinstance(item, Conversation))
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    check_sources([str(path)], max_samples=5_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = check_sources([str(path)])
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert report.rows == 100_000
    assert report.seconds < 60
    assert grown_mib < 100


def test_a_row_that_the_model_cannot_be_given_is_a_defect_with_a_tokenizer(tiny_base: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]}
        for text in ("Hello.", "Stop<|eot_id|> here.")
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check_sources([str(path)])
    assert report.defects == 0
    assert [finding.kind for finding in report.warning_kinds] == ["spelled_control_token"]
    template = ChatTemplate(tiny_base)
    report = check_sources([str(path)], encode=lambda c: (len(template.encode(c)[0].tokens), 1))
    assert [finding.kind for finding in report.defect_kinds] == ["special_token_in_content"]
    assert "rows.jsonl:2: messages[1].content holds '<|eot_id|>'" in str(report.defect_kinds[0].examples[0])
    assert report.conversations == 1
    assert not report.is_usable()
