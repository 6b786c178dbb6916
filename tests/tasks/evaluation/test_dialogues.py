"""Held-out dialogues are evaluated with real MCP servers: solved or not, and never wrong because a server failed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eval import compare, tool_calls
from fctune.cli.eval_options import parse_eval_arguments
from fctune.config.yaml_text import dump_yaml
from fctune.data.conversion import to_openai_row
from fctune.engines.local import LocalEngine
from fctune.tasks.environments.files import Files
from fctune.tasks.evaluation.results import read_rows
from tests.engines import faulty_stdio_server as faults
from tests.engines.fault_server import Handler, Log, serve
from tests.tasks.environments.faulty_worker import write_python
from tests.tasks.recorded_rows import make_row

Json = dict[str, Any]
Script = Callable[[str, Sequence[str]], Sequence[tuple[str, Json]] | str]

COUNTER = f"stdio: {shlex.quote(sys.executable)} -S {shlex.quote(str(Path(faults.__file__)))}"
BOOKINGS = (
    f"stdio: {shlex.quote(sys.executable)} {shlex.quote(str(Path(faults.__file__).with_name('booking_server.py')))}"
)
PATIENT = ["--dialogue", '{"call_timeout_s": 30}']


def count(by: int, split: str = "test", **more: Any) -> Json:
    return {"question": f"Add {by}.", "calls": [{"tool": "add", "arguments": {"by": by}}], "split": split, **more}


def write_tasks(folder: Path, tasks: Sequence[Json], server: str = COUNTER) -> str:
    path = folder / "counter.yaml"
    path.write_text(dump_yaml({"server": server, "tasks": list(tasks)}))
    return f"mcp:{path}"


@contextmanager
def serve_model(script: Script) -> Iterator[Log]:
    """Run a server whose answer is ``script(the user's last words, the results since)``: calls, or text."""

    def behave(handler: Handler, number: int, body: Json) -> None:
        messages = body["messages"]
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        answer = script(messages[last]["content"], [m["content"] for m in messages[last:] if m["role"] == "tool"])
        if isinstance(answer, str):
            handler.say(answer)
        else:
            calls = [
                {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for i, (name, arguments) in enumerate(answer)
            ]
            handler.say(None, tool_calls=calls)

    with serve(behave) as log:
        yield log


def evaluate(model: str, suite: str, out: Path, *options: str) -> int:
    arguments = ["--model", model, "--suite", suite, "--out", str(out), "--attempts", "1", *PATIENT, *options]
    return tool_calls.main(arguments)


def add(question: str, results: Sequence[str]) -> Sequence[tuple[str, Json]] | str:
    return "Done." if results else [("add", {"by": int(question.rstrip(".").split()[1])})]


def test_only_held_out_tasks_are_asked_and_each_is_solved_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(question: str, results: Sequence[str]) -> Sequence[tuple[str, Json]] | str:
        if question == "Add 2." and len(results) < 2:
            return [[("read", {})], [("add", {"by": 2})]][len(results)]  # one call more than needed
        if question == "Add 3.":
            return "I would rather not."
        if question == "Add 4.":
            return [("read", {})]  # forever
        return add(question, results)

    suite = write_tasks(tmp_path, [count(1), count(2), count(3), count(4), count(9, "train")])
    out, page = tmp_path / "out.jsonl", tmp_path / "out.html"
    with serve_model(act) as log:
        assert evaluate(log.url, suite, out, "--html", str(page)) == 0
        asked = {message["content"] for body in log.bodies for message in body["messages"] if message["role"] == "user"}
    assert asked == {f"Add {by}." for by in (1, 2, 3, 4)}
    rows = read_rows(out)
    assert [row["id"] for row in rows] == [f"counter/test/{number}" for number in (1, 2, 3, 4)]
    assert [row["verdict"] for row in rows] == ["correct", "correct", "wrong_answer", "wrong_answer"]
    assert [row["ended"] for row in rows] == ["answered", "answered", "answered", "max_turns"]
    assert [row["parts"]["economy"] for row in rows] == [1.0, 0.5, 0.0, 0.0]
    assert [row["parts"]["validity"] for row in rows] == [1.0, 1.0, 0.0, 1.0]
    assert rows[1]["messages"][-1]["content"] == "Done."
    assert rows[0]["expected_calls"] == [{"name": "add", "arguments": {"by": 1}}]
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    assert summary["scores"]["all"]["rates"]["accuracy"]["rate"] == 0.5
    assert summary["figures"]["values"]["economy"] == pytest.approx(1.5 / 4)
    assert summary["figures"]["table"] == {
        "answered": {"solved": 2, "unsolved": 1},
        "max turns": {"solved": 0, "unsolved": 1},
    }
    assert "counter/test/4" in page.read_text()
    assert "50.0%" in capsys.readouterr().out


def test_environments_of_verifiers_are_evaluated_by_their_own_reward(tmp_path: Path) -> None:
    path, out = tmp_path / "words.yaml", tmp_path / "out.jsonl"
    for fault, verdict, score in (("none", "correct", 1.0), ("constant", "wrong_answer", 0.5)):
        named = {"env": {"taskset": {"id": "words"}}, "python": write_python(tmp_path, fault), "test_share": 0.3}
        path.write_text(dump_yaml(named))
        with serve_model(add_once) as log:
            assert evaluate(log.url, f"verifiers:{path}", out, "--limit", "3", "--fresh") == 0
        rows = read_rows(out)
        assert [row["verdict"] for row in rows] == [verdict] * 3
        assert [(row["parts"]["score"], row["ended"]) for row in rows] == [(score, "answered")] * 3
        assert all(row["turns"][0][0]["results"] == ["1"] for row in rows)
    path.write_text(dump_yaml({**named, "python": write_python(tmp_path, "nan")}))
    with serve_model(add_once) as log:
        assert evaluate(log.url, f"verifiers:{path}", out, "--limit", "3", "--fresh") == 2  # none was measured


def add_once(question: str, results: Sequence[str]) -> Sequence[tuple[str, Json]] | str:
    return "Done." if results else [("add", {"by": 1})]


def test_two_models_are_compared_by_task_and_tasks_that_failed_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_it(question: str, results: Sequence[str]) -> Sequence[tuple[str, Json]] | str:
        return [("add", {"by": faults.EXIT})] if question == "Add 3." else add(question, results)

    suite = write_tasks(tmp_path, [count(by) for by in range(1, 9)])
    before, after, report = tmp_path / "before.jsonl", tmp_path / "after.jsonl", tmp_path / "difference.json"
    with serve_model(lambda question, results: "No.") as log:
        assert evaluate(log.url, suite, before) == 0
    with serve_model(break_it) as log:
        assert evaluate(log.url, suite, after) == 1
    assert [row["verdict"] for row in read_rows(after)] == ["correct"] * 2 + ["not_measured"] + ["correct"] * 5
    capsys.readouterr()
    page = tmp_path / "difference.html"
    assert compare.main([str(before), str(after), "--json", str(report), "--html", str(page)]) == 0
    assert "1 task is not compared" in capsys.readouterr().out
    found = json.loads(report.read_text())["all"]
    assert (found["n"], found["num_right_before"], found["num_right_after"]) == (7, 0, 7)
    assert found["p_value"] == pytest.approx(2 * 0.5**7)


def test_a_task_whose_server_fails_is_not_measured_and_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_well = False

    def act(question: str, results: Sequence[str]) -> Sequence[tuple[str, Json]] | str:
        if question == "Add 2." and not is_well:
            return [("add", {"by": faults.EXIT})]
        return add(question, results)

    suite, out = (
        write_tasks(tmp_path, [count(1), count(2), count(3, calls=[], check={"tool": "read", "result": "0"})]),
        tmp_path / "out.jsonl",
    )
    with serve_model(act) as log:
        assert evaluate(log.url, suite, out) == 1
        said = capsys.readouterr().out.replace("\n", " ")
        assert "2 tasks were not measured; re-run the same command to ask them again" in said
        assert "counter/test/2: turn 1: MCP server" in said
        good, failed, defect = read_rows(out)
        assert (good["verdict"], failed["verdict"], failed["parts"]) == ("correct", "not_measured", {})
        assert "its check is met before any call" in defect["error"]
        summary = json.loads(out.with_suffix(".summary.json").read_text())
        assert (summary["num_cases"], summary["num_not_measured"], summary["num_no_answer"]) == (1, 2, 0)
        assert summary["scores"]["all"]["rates"]["accuracy"]["n"] == 1
        num_asked, is_well = len(log.bodies), True
        assert evaluate(log.url, suite, out) == 1
        assert len(log.bodies) == num_asked + 2  # the first task keeps its answer; the third is never asked
    assert [row["verdict"] for row in read_rows(out)] == ["correct", "correct", "not_measured"]


@pytest.mark.thorough
def test_many_failing_tasks_end_the_evaluation_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    with serve_model(lambda *_: [("add", {"by": faults.INTERNAL})]) as log:
        assert evaluate(log.url, write_tasks(tmp_path, [count(1), count(2)]), out) == 2
        assert "none of 2 tasks could be measured, for example counter/test/1: turn 1: MCP" in capsys.readouterr().err
        assert evaluate(log.url, write_tasks(tmp_path, [count(by) for by in range(1, 26)]), out, "--fresh") == 2
        assert "all dialogues of 20 tasks in a row failed" in capsys.readouterr().err
        assert 2 + 20 <= len(log.bodies) <= 2 + 25


def test_a_model_without_an_answer_is_unsolved_and_not_unmeasured(tmp_path: Path) -> None:
    def behave(handler: Handler, number: int, body: Json) -> None:
        is_bad = "2" in body["messages"][-1]["content"]
        handler.send(400, "maximum context length exceeded" if is_bad else "no") if number else handler.say("No.")

    suite, out = write_tasks(tmp_path, [count(1), count(2), count(3)]), tmp_path / "out.jsonl"
    with serve(behave) as log:
        assert evaluate(log.url, suite, out, "--concurrency", "1") == 1
    by_end = {row["ended"]: row["verdict"] for row in read_rows(out)}
    assert by_end == {"answered": "wrong_answer", "context_full": "wrong_answer", "no_answer": "no_answer"}


def test_a_real_server_and_a_model_in_process(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"question": "Book it.", "calls": [{"tool": "book", "arguments": {"room": "blue", "day": "friday"}}]}
    suite, out = write_tasks(tmp_path, [{**task, "split": "test"}], BOOKINGS), tmp_path / "out.jsonl"
    command = ["--max-new-tokens", "16", "--html", str(tmp_path / "out.html")]
    assert evaluate(str(tiny_base), suite, out, *command) == 0
    (row,) = read_rows(out)
    assert row["verdict"] in ("wrong_answer", "malformed")
    assert {tool["function"]["name"] for tool in row["tools"]} == {"list_rooms", "book", "list_bookings", "clear"}
    monkeypatch.setattr(LocalEngine, "answer", lambda *_: 1 / 0)
    assert evaluate(str(tiny_base), suite, out, *command) == 0  # nothing is asked again


def test_environments_ask_their_held_out_tasks(tmp_path: Path) -> None:
    tasks = {task.question: task for task in (Files().make_task(seed, "test") for seed in range(3))}

    def solve(question: str, results: Sequence[str]) -> Sequence[tuple[str, Json]] | str:
        task = tasks[question]
        return task.calls if not results else f"Done: {', '.join(task.facts)}."

    out = tmp_path / "out.jsonl"
    with serve_model(solve) as log:
        assert evaluate(log.url, "environment:files:3", out) == 0
    rows = read_rows(out)
    assert [row["id"] for row in rows] == ["files/test/0", "files/test/1", "files/test/2"]
    assert [row["verdict"] for row in rows] == ["correct"] * 3
    assert all(row["category"].startswith("files: ") for row in rows)


def test_recorded_rows_are_followed_until_a_turn_differs(tmp_path: Path) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows = [make_row(), make_row("Where is everything?")]
    path.write_text("".join(json.dumps(to_openai_row(row)) + "\n" for row in rows))

    def act(question: str, results: Sequence[str]) -> Sequence[tuple[str, Json]] | str:
        if results:
            return "There."
        wanted = {"And my coat?": ["coat"], "Where are my keys and my hat?": ["hat", "keys"]}.get(question, ["shoes"])
        return [("find", {"what": what}) for what in wanted]

    with serve_model(act) as log:
        assert evaluate(log.url, f"recorded:{path}", out) == 0
    good, bad = read_rows(out)
    assert (good["verdict"], good["ended"], good["parts"]["progress"]) == ("correct", "answered", 1.0)
    assert (bad["verdict"], bad["ended"], bad["parts"]["progress"]) == ("wrong_answer", "deviated", 0.0)


@pytest.mark.parametrize(
    ("suite", "options", "reason"),
    [
        ("mcp:FILE", ["--categories", "all"], "--categories: not for mcp:"),
        ("mcp:FILE", ["--propose", "x.jsonl"], "--propose: not for mcp:"),
        ("mcp:FILE", ["--bfcl-mode", "prompt"], "--bfcl-mode: not for mcp:"),
        ("mcp:FILE", ["--dialogue", '{"max_turn": 3}'], "max_turn: unknown key; did you mean max_turns"),
        ("mcp:FILE", ["--dialogue", '{"replay": "x"}'], "replay has no results for the calls of another model"),
        ("mcp:no.yaml", [], "--suite mcp:no.yaml: no.yaml does not exist"),
        ("environment:files", [], "expected environment:NAMES:TASKS"),
        ("environment:files:9", ["--limit", "2"], "which names its number of tasks"),
        ("smoke", ["--dialogue", "{}"], "--dialogue: limits dialogues of environment:"),
    ],
    ids=range(9),
)
def test_options_without_a_meaning_are_refused(
    suite: str, options: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suite.replace("mcp:FILE", write_tasks(tmp_path, [count(1)]))
    command = ["--model", "http://127.0.0.1:9", "--suite", suite, "--out", str(tmp_path / "o.jsonl"), *options]
    assert tool_calls.main(command) == 2
    assert reason in capsys.readouterr().err


def test_limits_of_dialogues_may_be_in_the_file_of_options(tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(dump_yaml({"suite": "mcp:rooms.yaml", "dialogue": {"max_turns": 3}}))
    assert parse_eval_arguments(["--config", str(path)]).dialogue == {"max_turns": 3}
