"""Cases made of rows, and their split by tool."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import DataError
from fctune.cli import main
from fctune.data.conversation import Conversation
from fctune.data.sources import read_source
from fctune.tasks.evaluation.row_cases import make_row_cases, split_by_question, split_by_tool, split_cases
from fctune.tasks.suite_files import read_cases

Write = Callable[..., Path]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def calls(*names: str) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def row(question: str, offered: list[str], *answers: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": question}]
    for answer in answers:
        messages.append(answer if isinstance(answer, dict) else {"role": "assistant", "content": answer})
    return {"messages": messages, "tools": [tool(name) for name in offered]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def test_each_turn_becomes_a_case_that_training_reads_as_well(write_rows: Write, tmp_path: Path) -> None:
    path = write_rows([row("One?", ["one"], calls("one"), result("1"), "It is 1.")])
    for turns, expected in (("last", [()]), ("each", [("one",), ()])):
        made = make_row_cases([str(path)], turns)  # type: ignore[arg-type]
        out = tmp_path / f"{turns}.jsonl"
        out.write_text("".join(json.dumps(case.row) + "\n" for case in made.cases))
        cases = read_cases(out)
        assert [tuple(call.name for call in case.expected) for case in cases] == expected
        assert [case.category for case in cases] == ["call" if names else "no_call" for names in expected]
        for case, read in zip(cases, read_source(str(out)), strict=True):
            assert isinstance(read, Conversation)
            assert len(read.messages) == len(case.prompt.messages) + 1
            # A turn is supervised in the case that asks for it, and not again in the next.
            assert [m.weight for m in read.messages if m.role == "assistant"][-1] == 1.0
            assert not any(m.weight for m in read.messages[:-1] if m.role == "assistant")


def test_what_gives_no_case_is_counted(write_rows: Write) -> None:
    rows = [
        row("One?", ["one"], calls("one")),
        row("One?", ["one"], calls("one")),
        row("Two?", [], "No."),
        row("Three?", ["one"], {**calls("one"), "weight": 0}),
        row("Four?", ["one"], {"role": "assistant"}),
    ]
    made = make_row_cases([str(write_rows(rows))])
    assert (made.num_rows, len(made.cases)) == (5, 1)
    assert dict(made.left_out) == {
        "duplicate questions": 1,
        "rows without tools": 1,
        "turns with weight 0": 1,
        "rows that cannot be read": 1,
    }
    with pytest.raises(DataError, match=r"no row yields a case \(1 row without tools\)"):
        make_row_cases([str(write_rows(rows[2:3]))])


@pytest.mark.parametrize("num_offered", [1, 3], ids=["apart", "mixed"])
def test_no_tool_of_a_test_case_is_offered_in_training(write_rows: Write, num_offered: int) -> None:
    rng = random.Random(0)
    rows = []
    for number in range(400):
        offered = rng.sample([f"tool_{i}" for i in range(20)], num_offered)
        rows.append(row(f"{number}?", offered, calls(offered[0]) if number % 4 else "No tool for that."))
    made = make_row_cases([str(write_rows(rows))])
    for seed in range(5):
        split = split_by_tool(made.cases, 0.2, seed)
        assert len(split.train) + len(split.test) + split.num_dropped == 400
        assert not any(case.offered & split.test_tools for case in split.train)
        assert all(case.called <= split.test_tools for case in split.test)
        assert all(case.offered & split.test_tools for case in split.test)
        assert 40 <= len(split.test) <= 150
        assert bool(split.num_dropped) == (num_offered > 1)
    again = split_by_tool(made.cases[::-1], 0.2, 4)
    assert again.test_tools == split.test_tools


def test_no_question_of_a_test_case_is_asked_in_training(write_rows: Write) -> None:
    rows = [row("Hello!" if n % 2 else f"{n}?", [f"tool_{n % 10}"], "Hi.") for n in range(100)]
    rows += [row("Hello!", [f"tool_{n}"], "Hi.", {"role": "user", "content": "Bye"}, "Bye.") for n in range(10)]
    split = split_by_tool(make_row_cases([str(write_rows(rows))], "each").cases)
    asked = {case.questions for case in split.train}
    assert ("Hello!",) in asked
    assert split.test
    assert not any(case.questions in asked for case in split.test)


def test_a_split_needs_several_tools(write_rows: Write) -> None:
    made = make_row_cases([str(write_rows([row(f"{n}?", ["one"], calls("one")) for n in range(9)]))])
    with pytest.raises(DataError, match=r"the split by tool leaves no (training|test) case: 1 tool is"):
        split_by_tool(made.cases)


def test_rows_that_share_their_tools_are_split_by_question(
    write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cities = [f"city{n}" for n in range(60)]
    texts = [f"Please tell me all about the weather, wind and rain that I can expect today in {c}" for c in cities[:3]]
    texts += [f"{c}: what is the forecast?" for c in cities]
    rows = [
        row(text, ["one", "two"], calls("one"), {"role": "user", "content": f"{text} Really?"}, "Yes.")
        for text in texts
    ]
    made = make_row_cases([str(write_rows(rows))], "each")
    for seed in range(4):
        split = split_cases(made.cases, 0.25, seed)
        assert split.test_tools == frozenset()
        assert len(split.train) + len(split.test) == 126
        assert 20 <= len(split.test) <= 32
        sides = [{case.origin for case in side} for side in (split.train, split.test)]
        assert not sides[0] & sides[1]
        alike = [sum(case.questions[0].startswith("Please") for case in side) for side in (split.train, split.test)]
        assert 0 in alike  # near duplicates stay together
        again = split_cases(made.cases[::-1], 0.25, seed)
        assert {case.row["id"] for case in again.test} == {case.row["id"] for case in split.test}
    assert (
        len({tuple(case.row["id"] for case in split_by_question(made.cases, 0.25, seed).test) for seed in range(4)})
        == 4
    )

    out, test = tmp_path / "cases.jsonl", tmp_path / "test.jsonl"
    source = write_rows([row(f"{n}?", ["one"], calls("one")) for n in range(3)])
    assert main(["data", "cases", str(source), "--out", str(out), "--test", str(test)]) == 0
    assert (len(read_cases(out)), len(read_cases(test))) == (2, 1)
    shown = capsys.readouterr().out
    assert "1 case in " in shown
    assert "split by question, because the rows share their tools" in shown
    source = write_rows([row("What?", ["one"], calls("one"))])
    assert main(["data", "cases", str(source), "--out", str(out), "--test", str(test)]) == 2
    assert "ask nearly the same question" in capsys.readouterr().err


def test_branches_of_a_run_and_what_continues_a_conversation_are_on_one_side(write_rows: Write) -> None:
    def record(*texts: str) -> dict[str, Any]:
        messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
        request = {"messages": messages[:-1], "tools": [tool("one"), tool("two")]}
        return {"request": request, "response": {"choices": [{"message": messages[-1], "finish_reason": "stop"}]}}

    runs = [record(f"City {n}?", f"It is {n}.", f"{more} {n}?", "Yes.") for n in range(14) for more in ("And", "Or")]
    plain = [row(f"{n}: what next?", ["one", "two"], "Hi.") for n in range(14)]
    longer = [
        row(f"{n}: what next?", ["one", "two"], "Hi.", {"role": "user", "content": f"{n}"}, "No.") for n in range(14)
    ]
    sources = [str(write_rows(rows, f"{name}.jsonl")) for name, rows in (("a", runs), ("b", [*plain, *longer]))]
    for fold, paths in (("auto", sources), ("always", sources[1:])):
        cases = make_row_cases(paths, fold=fold).cases  # type: ignore[arg-type]
        for seed in range(4):
            split = split_by_question(cases, 0.3, seed)
            sides = [{case.questions[0] for case in side} for side in (split.train, split.test)]
            assert split.test
            assert not sides[0] & sides[1]
            assert len(split.train) + len(split.test) + split.num_dropped == len(cases)


def test_a_split_by_tool_that_would_drop_most_cases_is_one_by_question(write_rows: Write) -> None:
    rows = [row(f"{n}?", ["one", "two"], calls("one")) for n in range(50)]
    rows += [row(f"{n}?", [f"other_{n}"], calls(f"other_{n}")) for n in range(50, 53)]
    cases = make_row_cases([str(write_rows(rows))]).cases
    split = split_cases(cases, 0.2)
    assert (len(split.train), len(split.test)) == (43, 10)


def test_the_command_writes_both_sides(write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows([row(f"{n}?", [f"tool_{n % 9}"], calls(f"tool_{n % 9}")) for n in range(90)])
    out, test = tmp_path / "cases.jsonl", tmp_path / "test.jsonl"
    assert main(["data", "cases", str(path), "--out", str(out), "--test", str(test)]) == 0
    assert (len(read_cases(out)), len(read_cases(test))) == (80, 10)
    assert "tools of the test, which no case to learn from offers: tool_" in capsys.readouterr().out
    assert main(["data", "cases", str(path), "--out", str(path)]) == 2
    assert "is the source itself" in capsys.readouterr().err

    command = ["data", "cases", str(path), "--out", str(tmp_path / "other.jsonl"), "--test", str(test)]
    assert main(command) == 0, "the same test cases"
    (tmp_path / "other.jsonl").unlink()
    test.write_text("mine\n")
    assert main(command) == 2
    assert "test.jsonl: exists and holds something else; pass --force to replace it." in capsys.readouterr().err
    assert test.read_text() == "mine\n"
    assert not (tmp_path / "other.jsonl").exists(), "both are written, or none"
    assert main([*command, "--force"]) == 0
    assert len(read_cases(test)) == 10


def test_the_two_files_of_cases_must_differ(
    write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows([row(f"{n}?", [f"tool_{n % 9}"], calls(f"tool_{n % 9}")) for n in range(90)])
    out = str(tmp_path / "cases.jsonl")
    assert main(["data", "cases", str(path), "--out", out, "--test", out]) == 2
    assert "--test" in (error := capsys.readouterr().err)
    assert "is the file of --out as well" in error
    rows = path.read_text()
    for command in (
        ["convert", str(path), out, "--json", str(path)],
        ["augment", str(path), out, "--kinds", "shuffle_tools", "--json", str(path)],
        ["check", str(path), "--json", str(path)],
        ["check", str(path), "--html", str(path)],
    ):
        assert main(["data", *command]) == 2
        assert "is the source itself" in capsys.readouterr().err
    assert path.read_text() == rows


def test_a_greeting_with_a_request_that_is_not_answered_is_no_case(write_rows: Write) -> None:
    greeting = row("One?", ["one"])
    greeting["messages"].insert(0, {"role": "assistant", "content": "Hello, how can I help?"})
    made = make_row_cases([str(write_rows([greeting, row("Two?", ["two"], "No.")]))])
    assert [case.questions for case in made.cases] == [("Two?",)]
    assert made.left_out.total() == 1


def test_records_that_open_with_the_same_greeting_are_of_several_runs(write_rows: Write) -> None:
    rows = [row(f"Question {n}?", ["one"], "No.") for n in range(3)]
    for one in rows:
        one["messages"].insert(0, {"role": "assistant", "content": "Hello, how can I help?"})
    made = make_row_cases([str(write_rows(rows))], fold="always")
    assert len({case.origin for case in made.cases}) == 3


def test_tools_of_a_file_are_those_of_rows_without_any(write_rows: Write, tmp_path: Path) -> None:
    rows = [row(f"{n}?", [], calls("one")) for n in range(5)]
    for one in rows:
        del one["tools"]
    path, tools = write_rows(rows), tmp_path / "tools.json"
    tools.write_text(json.dumps([tool("one"), tool("two")]))
    out, augmented = tmp_path / "cases.jsonl", tmp_path / "augmented.jsonl"
    assert main(["data", "cases", str(path), "--tools", str(tools), "--out", str(out)]) == 0
    assert [[tool.name for tool in case.prompt.tools] for case in read_cases(out)] == [["one", "two"]] * 5
    kinds = ["--kinds", "shuffle_tools", "--tools", str(tools)]
    assert main(["data", "augment", str(path), str(augmented), *kinds]) == 0
    written = [json.loads(line) for line in augmented.read_text().splitlines()]
    assert {len(one["tools"]) for one in written} == {2}


def test_converted_rows_stay_a_benchmarks_and_keep_how_they_were_generated(write_rows: Write, tmp_path: Path) -> None:
    generated = {"teacher": "m", "kind": "one_call"}
    marked = {"metadata": {"benchmark": "BFCL v4", "generated": generated, "note": "x"}}
    path, out = write_rows([row("One?", ["one"], calls("one")) | marked]), tmp_path / "converted.jsonl"
    assert main(["data", "convert", str(path), str(out)]) == 0
    assert json.loads(out.read_text())["metadata"] == {"generated": generated, "benchmark": "BFCL v4"}
    assert make_row_cases([str(out)]).benchmark == "BFCL v4"


def test_benchmark_questions_are_refused_and_marked_when_forced(
    write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows([{"id": "simple_python_3", **row("One?", ["one"], calls("one"))}])
    out, again = tmp_path / "cases.jsonl", tmp_path / "again.jsonl"
    assert main(["data", "cases", str(path), "--out", str(out)]) == 2
    assert "belongs to a benchmark (BFCL v4)" in capsys.readouterr().err
    assert not out.exists()
    assert main(["data", "cases", str(path), "--out", str(out), "--force-benchmark"]) == 0
    # The id is another now, and the mark remains.
    assert main(["data", "cases", str(out), "--out", str(again)]) == 2
    assert "belongs to a benchmark" in capsys.readouterr().err
    assert (
        main(["sample", "--model", "fctune/assets/tiny_base", "--cases", str(out), "--out", str(tmp_path / "s")]) == 2
    )
    assert "belongs to a benchmark" in capsys.readouterr().err
