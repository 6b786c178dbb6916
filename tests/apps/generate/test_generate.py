"""``fctune data generate``: rows that agree are kept, everything else is counted, and nothing is asked for twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.generate.dialogue import HeldOut
from fctune.apps.generate.kinds import KINDS
from fctune.apps.generate.plan import Planner
from fctune.apps.generate.run import WAVE
from fctune.data.check import check_sources
from fctune.data.conversation import Tool
from fctune.data.sources.reader import parse_source
from fctune.data.sources.row_builder import ParsedRow
from fctune.data.tool_schema import ToolSet
from tests.apps.generate.commands import generate, read_log, read_rows, read_summary
from tests.apps.generate.scripted_teacher import TOOLS, Teacher, make_answer, name_prompt, serve_teacher
from tests.conftest import ROOT
from tests.engines.fault_server import Handler


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    return file


def test_every_kind_of_row_is_written_and_read_back_without_a_defect(tools: Path, tmp_path: Path) -> None:
    out, teacher = tmp_path / "rows.jsonl", Teacher()
    with serve_teacher(teacher) as log:
        assert generate(log.url, tools, out, "--judge", log.url, "--html", str(tmp_path / "page.html"), num=50) == 0
    rows = read_rows(out)
    kinds = Counter(row["metadata"]["generated"]["kind"] for row in rows)
    assert kinds == {
        "one_call": 15, "several_calls": 6, "repeated_tool": 6, "dependent_calls": 6, "multi_turn": 6,
        "missing_value": 4, "no_tool": 5, "small_talk": 2,
    }  # fmt: skip
    report = check_sources([str(out)])
    assert report.is_usable("fail")
    for row, parsed in zip(rows, parse_source(str(out)), strict=True):
        assert isinstance(parsed, ParsedRow)
        checked = ToolSet(parsed.conversation.tools)
        calls = [call for message in parsed.conversation.messages for call in message.calls]
        assert all(checked.accepts(call) for call in calls)
        made = row["metadata"]["generated"]
        assert made["teacher"] == made["judge"] == "tiny"
        assert made["votes"] == 2
        assert (not calls) == (made["kind"] in ("no_tool", "small_talk"))
        if made["kind"] == "dependent_calls":
            assert [call.name for call in calls] == ["find_user", "send_note"]
            assert calls[1].arguments == {"user_id": "u-0"}, "it follows from the result"
        if made["kind"] == "missing_value":
            assert [bool(m.calls) for m in parsed.conversation.messages if m.role == "assistant"] == [
                False,
                True,
                False,
            ]
    assert read_summary(out)["kept"] == 50
    assert teacher.asked["judge"] == 50
    page = (tmp_path / "page.html").read_text()
    assert all(kind in page for kind in KINDS)


@pytest.mark.thorough
def test_a_teacher_without_tool_calling_answers_in_json(tools: Path, tmp_path: Path) -> None:
    with serve_teacher(Teacher()) as log:
        for name in ("calls", "json"):
            assert generate(log.url, tools, tmp_path / f"{name}.jsonl", "--answers", name, num=24) == 0
    as_calls, as_json = (
        [row["messages"] for row in read_rows(tmp_path / f"{name}.jsonl")] for name in ("calls", "json")
    )
    assert as_json == as_calls


def test_servers_are_given_schemas_and_those_that_refuse_them_are_asked_without(tools: Path, tmp_path: Path) -> None:
    def refuse(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        if "response_format" in body:
            handler.send(400, json.dumps({"error": {"message": "response_format is not supported"}}))
        return "response_format" in body

    for name, misbehave in (("given", None), ("refused", refuse)):
        teacher = Teacher(misbehave) if misbehave is not None else Teacher()
        with serve_teacher(teacher) as log:
            assert generate(log.url, tools, tmp_path / f"{name}.jsonl", "--judge", log.url, num=12) == 0
            kinds = {(name_prompt(body), "response_format" in body) for body in log.bodies}
        written = {("write", True), ("judge", True), ("results", True), ("answer", False)}
        refused = {("write", False), ("judge", False), ("results", False)}
        assert kinds == written | (refused if misbehave is not None else set())
    assert (tmp_path / "given.jsonl").read_bytes() == (tmp_path / "refused.jsonl").read_bytes()


@pytest.mark.parametrize("requests", ["written", "drafted"])
def test_tools_with_references_have_rows_and_schemas_without(requests: str, tmp_path: Path) -> None:
    """The server of this test is as strict as those that compile schemas: it refuses references that lead nowhere."""

    def compile_schema(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        is_refused = "$ref" in json.dumps(body.get("response_format", {}))
        if is_refused:
            handler.send(400, json.dumps({"error": {"message": "Cannot find field $defs"}}))
        return is_refused

    definitions: dict[str, Any] = {
        "City": {"type": "string"},
        "Hour": {"type": "integer"},
        "Person": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    }
    used = {"get_weather": ("city", "City"), "set_alarm": ("hour", "Hour")}
    given = json.loads(json.dumps(TOOLS))
    for tool in given[:2]:
        key, name = used[tool["name"]]
        tool["parameters"]["properties"][key] = {"$ref": f"#/$defs/{name}"}
        tool["parameters"]["properties"]["who"] = {"anyOf": [{"$ref": "#/$defs/Person"}, {"type": "null"}]}
        tool["parameters"]["$defs"] = definitions
    tools, out, teacher = tmp_path / "tools.json", tmp_path / "rows.jsonl", Teacher(compile_schema)
    tools.write_text(json.dumps(given))
    with serve_teacher(teacher) as log:
        votes = ["--votes", "0"] if requests == "drafted" else []
        assert generate(log.url, tools, out, "--requests", requests, *votes) == 0
        assert not any("response_format" not in body for body in log.bodies if name_prompt(body) in ("write", "list"))
    assert len(read_rows(out)) == 24
    assert "$ref" not in out.read_text()


def test_no_tool_rows_offer_no_tool_that_could_do_it(tools: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, out, "--kinds", "no_tool", num=12) == 0
    wished = [name for row in read_rows(out) for name in find_wished(row)]
    assert wished, "some requests are for a tool that was taken off offer"
    for row in read_rows(out):
        assert not set(find_wished(row)) & {tool["function"]["name"] for tool in row["tools"]}


@pytest.mark.parametrize("max_tools", [1, 2])
def test_rows_may_offer_fewer_tools_than_a_plan_would_by_itself(max_tools: int) -> None:
    tools = [Tool(function) for function in TOOLS]
    for num_tools in (1, 3, 4):
        planner = Planner(tools[:num_tools], None, seed=0, max_tools=max_tools)
        assert ("several_calls" in planner.shares) is (min(num_tools, max_tools) > 1)
        for kind in planner.shares:
            plans = [planner.plan(index, kind) for index in range(40)]
            assert all(1 <= len(plan.tools) <= max_tools for plan in plans)
            assert all(plan.calls and len(plan.targets) <= max_tools for plan in plans)


def find_wished(row: dict[str, Any]) -> list[str]:
    return [tool["name"] for tool in TOOLS if tool["name"] in row["messages"][0]["content"]]


@pytest.mark.thorough
def test_rows_depend_on_the_seed_and_not_on_the_number_of_requests_at_once(tools: Path, tmp_path: Path) -> None:
    with serve_teacher(Teacher()) as log:
        for name, options in (("a", ()), ("b", ("--concurrency", "1")), ("c", ("--seed", "1"))):
            assert generate(log.url, tools, tmp_path / f"{name}.jsonl", *options) == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert (tmp_path / "a.jsonl").read_bytes() != (tmp_path / "c.jsonl").read_bytes()


def spoil(kind: str, every: int, answer: Any) -> Any:
    """Return a misbehaviour for every n-th prompt of a kind."""
    count = Counter[str]()

    def misbehave(handler: Handler, asked: str, body: dict[str, Any]) -> bool:
        count[asked] += 1
        if asked != kind or count[asked] % every:
            return False
        answer(handler, body)
        return True

    return misbehave


def send_text(text: str, reason: str = "stop", **message: Any) -> Any:
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text, **message}}
    body = {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 5}}
    return lambda handler, _: handler.send(200, json.dumps(body))


def send_call(name: str, arguments: dict[str, Any]) -> Any:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return send_text("", tool_calls=[{"id": "x", "type": "function", "function": function}])


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("kind", "answer", "dropped"),
    [
        ("write", send_text("As an AI, I'd rather not."), "garbage"),
        ("write", send_text('{"turns": "none"}'), "garbage"),
        ("write", send_text('{"refuse": "not safe"}'), "refused"),
        ("write", send_text("", refusal="no"), "refused"),
        ("write", send_text("", "content_filter"), "refused"),
        ("write", send_text('{"turns": [{"req', "length"), "cut"),
        ("write", send_text('{"turns": [{"request": "hi", "steps": []}]}'), "wrong_kind"),
        ("write", lambda handler, _: handler.send(200, "{"), "garbage"),
        ("write", lambda handler, _: handler.send(500, "{}"), "server_error"),
        ("write", lambda handler, _: handler.send(429, "{}"), "rate_limited"),
        ("write", lambda handler, _: time.sleep(4), "no_answer"),
        ("answer", send_call("get_weather", {"town": "x"}), "invalid_call"),
        ("answer", send_call("rm_rf", {}), "invalid_call"),
        ("answer", send_text("What is a call?"), "other_calls"),
        ("results", send_text('{"results": []}'), "garbage"),
        ("results", send_text('{"results": [{"refuse": "no such city"}]}'), "refused"),
        ("judge", send_text('{"good": false, "reason": "wrong city"}'), "judged_bad"),
        ("judge", send_text("Looks good to me"), "judge_failed"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_counted_by_its_kind(
    kind: str, answer: Any, dropped: str, tools: Path, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    # Answers are asked for twice: the third is the first one to the second request.
    teacher = Teacher(spoil(kind, 4 if kind != "answer" else 7, answer))
    with serve_teacher(teacher) as log:
        # A loaded machine answers late, too.
        timeout = "3" if dropped == "no_answer" else "30"
        options = ["--kinds", "one_call", "--judge", log.url, "--timeout", timeout, "--concurrency", "1"]
        assert generate(log.url, tools, out, *options, num=8) == 0
    summary = read_summary(out)
    assert summary["kept"] == 8
    assert summary["dropped"].pop(dropped) >= 1
    assert set(summary["dropped"]) <= {"disagreement"}


def test_answers_that_differ_are_dropped_though_the_first_is_right(tools: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    # A row takes two answers to the request and one to the result: each fifth answer is a second one to a request.
    with serve_teacher(Teacher(spoil("answer", 5, send_call("set_alarm", {"hour": 99})))) as log:
        assert generate(log.url, tools, out, "--kinds", "one_call", "--concurrency", "1", num=8) == 0
    dropped = read_summary(out)["dropped"]
    assert dropped["disagreement"] >= 1
    assert set(dropped) <= {"disagreement", "invalid_call"}, "set_alarm is not always on offer"


@pytest.mark.parametrize(("status", "remedy"), [(401, "set FCTUNE_JUDGE_API_KEY"), (404, "see --judge-model")])
def test_a_judge_that_refuses_every_request_is_one_sentence_with_its_own_options(
    status: int, remedy: str, tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_teacher(Teacher(spoil("judge", 1, lambda handler, _: handler.send(status, "{}")))) as log:
        assert generate(log.url, tools, tmp_path / "rows.jsonl", "--judge", log.url, num=2) == 2
    assert remedy in capsys.readouterr().err


def test_a_key_of_the_judge_that_cannot_be_sent_is_named(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCTUNE_JUDGE_API_KEY", "two words")
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, tmp_path / "rows.jsonl", "--judge", log.url, num=2) == 2
    assert "FCTUNE_JUDGE_API_KEY: contains characters" in capsys.readouterr().err


def test_retry_after_is_respected(tools: Path, tmp_path: Path) -> None:
    waited: list[float] = []

    def limit(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        waited.append(time.monotonic())
        if len(waited) > 1:
            return False
        handler.send(429, "{}", {"Retry-After": "1"})
        return True

    out = tmp_path / "rows.jsonl"
    with serve_teacher(Teacher(limit)) as log:
        options = ["--kinds", "one_call", "--attempts", "2", "--concurrency", "1"]
        assert generate(log.url, tools, out, *options, num=1) == 0
    assert waited[1] - waited[0] >= 1
    assert read_summary(out)["dropped"] == {}


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.thorough) for number in (signal.SIGINT, signal.SIGTERM))],
)
def test_a_killed_run_resumes_without_asking_for_a_row_twice(
    number: signal.Signals, tools: Path, tmp_path: Path
) -> None:
    def slow(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        time.sleep(0.02)
        return False

    whole, out = tmp_path / "whole.jsonl", tmp_path / "rows.jsonl"
    with serve_teacher(Teacher(slow)) as log:
        assert generate(log.url, tools, whole, num=30) == 0
        arguments = ["--teacher", log.url, "--tools", str(tools), "--out", str(out), "--num", "30", "--votes", "2"]
        command = [sys.executable, "-m", "fctune.cli", "data", "generate", *arguments]
        process = subprocess.Popen(
            [*command, "--concurrency", "4"], cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True
        )
        lines = out.with_suffix(".generate") / "log.jsonl"
        while not lines.exists() or lines.read_bytes().count(b"\n") < 8:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate()
        num_finished = lines.read_bytes().count(b"\n")
        if number == signal.SIGKILL:
            assert not out.exists()
        else:
            assert process.returncode == 130
            assert f"{len(read_rows(out))} rows in {out}; run the same command to resume" in said
        time.sleep(0.3)  # for requests on their way
        log.bodies.clear()
        assert generate(log.url, tools, out, num=30) == 0
        written = [body for body in log.bodies if name_prompt(body) == "write"]
    summary = read_summary(out)
    assert 8 <= num_finished < summary["asked"] == read_summary(whole)["asked"]
    assert len(written) == summary["asked"] - num_finished, "no finished row is asked for again"
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_rows_that_are_finished_behind_a_slow_one_survive_a_kill(
    number: signal.Signals, tools: Path, tmp_path: Path
) -> None:
    is_released = threading.Event()
    is_released.set()

    def hang(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        if kind == "write" and body["seed"] == slow:
            is_released.wait(60)
        elif not is_released.is_set():
            time.sleep(0.02)
        return False

    whole, out = tmp_path / "whole.jsonl", tmp_path / "rows.jsonl"
    slow, teacher = -1, Teacher(hang)
    with serve_teacher(teacher) as log:
        assert generate(log.url, tools, whole, num=40) == 0
        seeds = [body["seed"] for body in log.bodies if name_prompt(body) == "write"]
        slow = seeds[0]
        is_released.clear()
        arguments = ["--teacher", log.url, "--tools", str(tools), "--out", str(out), "--num", "40", "--votes", "2"]
        command = [sys.executable, "-m", "fctune.cli", "data", "generate", *arguments]
        process = subprocess.Popen([*command, "--concurrency", "4"], cwd=ROOT, env=os.environ, stderr=subprocess.PIPE)
        lines = out.with_suffix(".generate") / "log.jsonl"
        deadline = time.monotonic() + 60
        while not lines.exists() or lines.read_bytes().count(b"\n") < 12:
            assert process.poll() is None
            assert time.monotonic() < deadline, "finished rows wait for the slow one"
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate()
        is_released.set()
        finished = {json.loads(line)["id"] for line in lines.read_bytes().splitlines()[:12]}
        if number == signal.SIGINT:
            assert len(read_rows(out)) > 4, "they are in the file of an interrupted run as well"
            read_summary(out)
        time.sleep(0.3)  # for requests on their way
        log.bodies.clear()
        assert generate(log.url, tools, out, num=40) == 0
        asked_again = [body["seed"] for body in log.bodies if name_prompt(body) == "write"]
    assert len(finished) == 12
    assert len(asked_again) <= read_summary(whole)["asked"] - len(finished)
    assert slow in asked_again
    assert out.read_bytes() == whole.read_bytes()
    assert read_summary(out)["usage"] == read_summary(whole)["usage"]
    assert read_log(out) == read_log(whole), "the log is put into the order of the plans"


@pytest.mark.thorough
def test_a_budget_ends_the_run_and_a_larger_one_resumes_it(tools: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with serve_teacher(Teacher()) as log:
        price = ["--price", "1000,10000"]  # 0.2 a request
        assert generate(log.url, tools, out, "--max-requests", "30") == 0
        first = read_summary(out)
        assert first["ending"] == "budget"
        assert first["usage"]["requests"] == 30 == len(log.bodies)
        assert 0 < first["kept"] < 24
        assert generate(log.url, tools, out, "--max-total-tokens", "8000", *price) == 0
        second = read_summary(out)
        tokens = second["usage"]["prompt_tokens"] + second["usage"]["completion_tokens"]
        assert 8000 <= tokens < 8000 + 4 * 110
        assert generate(log.url, tools, out, "--max-cost", "20", *price) == 0
        third = read_summary(out)
        num_priced = third["usage"]["requests"] - first["usage"]["requests"]
        assert third["usage"]["cost"] == pytest.approx(0.2 * num_priced)
        assert generate(log.url, tools, out) == 0
        last = read_summary(out)
    assert first["kept"] < last["kept"] == 24
    assert last["usage"]["requests"] == len(log.bodies)
    indices = [row["metadata"]["generated"]["index"] for row in read_rows(out)]
    assert len(set(indices)) == len(indices)


@pytest.mark.thorough
def test_a_budget_counts_the_requests_for_rows_that_were_cut_off(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        time.sleep(0.02)
        return False

    numbers = iter(range(1000))

    def interrupt(run: Any) -> None:
        if next(numbers) == 5:
            raise KeyboardInterrupt

    out = tmp_path / "rows.jsonl"
    with serve_teacher(Teacher(slow)) as log:
        with monkeypatch.context() as patch:
            patch.setattr("fctune.apps.generate.run._Run._judge_teacher", interrupt)
            assert generate(log.url, tools, out) == 130
        summary = read_summary(out)
        num_cut_off = summary["interrupted"]["requests"]
        total = summary["usage"]["requests"] + num_cut_off
        time.sleep(0.3)  # for requests on their way
        num_sent = len(log.bodies)
        assert num_cut_off > 0
        assert total >= num_sent
        assert generate(log.url, tools, out, "--max-requests", str(total)) == 0
        assert read_summary(out)["ending"] == "budget"
        assert len(log.bodies) == num_sent, "the budget was used up by the interrupted run"
        shown = capsys.readouterr().out
        assert f"{total} requests, " in shown
        assert f"; {num_cut_off} requests of them for rows that were cut off\n" in shown
        # A kill leaves neither the lines of unfinished rows nor a summary.
        lines = out.with_suffix(".generate") / "log.jsonl"
        lines.write_text("".join(json.dumps(line) + "\n" for line in read_log(out)[:2]))
        with (out.with_suffix(".generate") / "usage.jsonl").open("a") as file:
            file.write('{"requests": 9')
        assert generate(log.url, tools, out, "--max-requests", str(total)) == 0
        assert len(log.bodies) == num_sent
        assert generate(log.url, tools, out) == 0
    assert read_summary(out)["kept"] == 24


def test_tokens_that_no_server_reports_are_no_budget(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_teacher(Teacher(reports_tokens=False)) as log:
        assert generate(log.url, tools, tmp_path / "rows.jsonl", "--max-total-tokens", "100") == 2
    assert "does not report tokens" in capsys.readouterr().err


@pytest.mark.thorough
def test_near_duplicates_are_dropped(tools: Path, tmp_path: Path) -> None:
    texts = iter(range(10_000))

    def repeat(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        if kind != "write" or next(texts) % 2:
            return False
        first, *_ = (tool["name"] for tool in TOOLS if f"of {tool['name']}." in body["messages"][1]["content"])
        text, _ = make_answer(kind, {**body, "seed": sorted(tool["name"] for tool in TOOLS).index(first)})
        handler.say(text)
        return True

    out = tmp_path / "rows.jsonl"
    with serve_teacher(Teacher(repeat)) as log:
        assert generate(log.url, tools, out, "--kinds", "one_call", "--concurrency", "1", num=12) == 0
    assert read_summary(out)["dropped"]["near_duplicate"] >= 1
    questions = [row["messages"][0]["content"] for row in read_rows(out)]
    assert len(set(questions)) == 12


@pytest.mark.thorough
def test_a_log_with_gaps_has_the_same_near_duplicates_in_the_end(tools: Path, tmp_path: Path) -> None:
    def repeat(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        if kind != "write" or body["seed"] % 2:
            return False
        first, *_ = (tool["name"] for tool in TOOLS if f"of {tool['name']}." in body["messages"][1]["content"])
        handler.say(make_answer(kind, {**body, "seed": len(first)})[0])
        return True

    out = tmp_path / "rows.jsonl"
    lines = out.with_suffix(".generate") / "log.jsonl"
    with serve_teacher(Teacher(repeat)) as log:
        assert generate(log.url, tools, out, "--kinds", "one_call", num=12) == 0
        rows, outcomes = out.read_text(), read_log(out)
        near = [number for number, line in enumerate(outcomes) if line["verdict"] == "near_duplicate"]
        originals = [int(outcomes[number]["reason"].split()[-1]) - 1 for number in near]
        kept = [number for number, line in enumerate(outcomes) if line["verdict"] == "kept"]
        gaps = {kept[original] for original in originals} | {0}
        first_wave = [line for number, line in enumerate(outcomes[:12]) if number not in gaps]
        lines.write_text("".join(json.dumps(line) + "\n" for line in first_wave))
        assert generate(log.url, tools, out, "--kinds", "one_call", "--max-requests", "1", num=12) == 0
        assert read_summary(out)["ending"] == "budget"
        assert "kept" in {line["verdict"] for line in read_log(out) if int(line["id"]) in near}, "for now"
        assert generate(log.url, tools, out, "--kinds", "one_call", num=12) == 0
    assert near
    assert out.read_text() == rows
    assert read_log(out) == outcomes


def test_held_out_questions_are_dropped_and_a_teacher_of_nothing_else_is_given_up(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, out = tmp_path / "seen.jsonl", tmp_path / "rows.jsonl"
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, seen, num=8) == 0
        assert generate(log.url, tools, out, "--held-out", str(seen), num=8) == 0
        summary = read_summary(out)
        assert summary["dropped"]["held_out"] >= 8, "equal seeds write the same requests"
        known = {row["messages"][0]["content"] for row in read_rows(seen)}
        assert not known & {row["messages"][0]["content"] for row in read_rows(out)}
        question = min(known)

        def recite(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
            if kind == "write":
                handler.say(json.dumps({"turns": [{"request": f"{question}!", "steps": []}]}))
            return kind == "write"

    with serve_teacher(Teacher(recite)) as log:
        options = ["--held-out", str(seen), "--kinds", "small_talk", "--fresh"]
        assert generate(log.url, tools, out, *options, num=500) == 1
        assert 16 <= len(log.bodies) <= WAVE
    assert read_summary(out)["ending"] == "unusable"
    said = capsys.readouterr().out
    assert "nothing that the teacher answered was usable. held_out, 16 of the last 16" in said


@pytest.mark.parametrize(
    ("requests", "is_held_out"),
    [
        (["Water level at Dunmore?"], True),
        (["Good morning", "water level at  Dunmore"], True),
        (["And at Kells, please"], True),
        (["Water level at Kells?"], False),
        (["What is the weather?", "Yes"], False),
        (["Good evening", "?!"], False),
    ],
)
def test_short_held_out_questions_are_found_in_every_turn(requests: list[str], is_held_out: bool) -> None:
    cases = [("a", ["Water level at Dunmore?", "Yes."]), ("b", ["Hello", "And at Kells, please?"]), ("c", ["!", "?"])]
    assert HeldOut({"cases.jsonl": cases}).has(requests) is is_held_out


@pytest.mark.thorough
def test_rows_that_are_held_out_by_now_are_dropped_when_a_run_is_resumed(tools: Path, tmp_path: Path) -> None:
    held_out, out = tmp_path / "cases.jsonl", tmp_path / "rows.jsonl"
    held_out.write_text(json.dumps(make_own_row("Is there a ferry to the island on Sundays?")) + "\n")
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, out, "--held-out", str(held_out), num=24) == 0
        before, num_asked = out.read_bytes(), read_summary(out)["asked"]
        settings = json.loads((out.with_suffix(".generate") / "log.settings.json").read_text())
        leaked = [row["messages"][0]["content"] for row in read_rows(out)][3:20:4]
        unchanged = held_out.read_text()
        held_out.write_text("".join(json.dumps(make_own_row(text)) + "\n" for text in leaked[:1]))
        assert generate(log.url, tools, out, "--held-out", str(held_out), num=24) == 0
        assert read_summary(out)["dropped"]["held_out"] == 1
        changed = json.loads((out.with_suffix(".generate") / "log.settings.json").read_text())
        assert changed["held_out"] != settings["held_out"], "there is one item in both"
        assert {**changed, "held_out": None} == {**settings, "held_out": None}
        held_out.write_text("".join(json.dumps(make_own_row(text)) + "\n" for text in leaked))
        assert generate(log.url, tools, out, "--held-out", str(held_out), num=24) == 0
        summary, rows = read_summary(out), read_rows(out)
        assert summary["dropped"]["held_out"] == len(leaked) == 5
        assert summary["asked"] > num_asked
        assert summary["kept"] == 24 == sum(kind["wanted"] for kind in summary["kinds"].values())
        assert all(kind["kept"] == kind["wanted"] for kind in summary["kinds"].values())
        assert not {row["messages"][0]["content"] for row in rows} & set(leaked)
        written = len(log.bodies)
        held_out.write_text(unchanged)
        assert generate(log.url, tools, out, "--held-out", str(held_out), num=24) == 0
        assert len(log.bodies) == written, "all rows are there"
    assert out.read_bytes() == before


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("answer", "ending", "words"),
    [
        (send_text("Sure!"), "unusable", "garbage, 16 of the last 16: no JSON object"),
        (lambda handler, _: handler.send(503, '{"error": "overloaded"}'), "unreachable", "HTTP 503: overloaded"),
    ],
)
def test_a_teacher_of_no_use_is_given_up_early(
    answer: Any, ending: str, words: str, tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    with serve_teacher(Teacher(spoil("write", 1, answer))) as log:
        assert generate(log.url, tools, out, num=500) == 1
        assert 16 <= len(log.bodies) <= WAVE
    assert read_summary(out)["ending"] == ending
    assert words in capsys.readouterr().out
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, out, "--max-requests", "200", num=500) == 0, "a good teacher resumes it"
    assert read_summary(out)["kept"] > 0


@pytest.mark.parametrize("is_weak", [False, True], ids=["good teacher", "weak teacher"])
def test_a_judge_that_is_gone_ends_the_run_and_costs_no_plans(
    is_weak: bool, tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        if is_weak and kind == "write" and teacher.asked["write"] % 4 == 0:
            handler.say("no")
            return True
        if kind == "judge" and teacher.asked["judge"] > 4:
            handler.send(429, '{"error": "quota used up"}')
            return True
        return False

    out, teacher = tmp_path / "rows.jsonl", Teacher(refuse)
    with serve_teacher(teacher) as log:
        options = ["--judge", log.url, "--kinds", "one_call", "--concurrency", "1"]
        assert generate(log.url, tools, out, *options, num=8) == 1
        assert teacher.asked["judge"] <= 4 + 16 + 1, "16 failures in a row"
        summary = read_summary(out)
        assert (summary["ending"], summary["dropped"]["rate_limited"]) == ("unreachable", 16)
        assert set(summary["dropped"]) == ({"rate_limited", "garbage"} if is_weak else {"rate_limited"})
        assert "rate_limited, 16 of the last 16: the judge: HTTP 429: quota used up" in capsys.readouterr().out
        for _ in range(2):  # more failures than a kind of 8 rows has plans
            assert generate(log.url, tools, out, *options, num=8) == 1
        teacher.misbehave = lambda handler, kind, body: False
        assert generate(log.url, tools, out, *options, num=8) == 0
    assert read_summary(out)["kept"] == 8


def test_a_kind_that_never_works_does_not_run_for_ever(tools: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"

    def fail(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        is_talk = kind == "write" and "no call at all" in body["messages"][1]["content"]
        if is_talk:
            handler.say("no")
        return is_talk

    with serve_teacher(Teacher(fail)) as log:
        assert generate(log.url, tools, out, "--kinds", "one_call=50%,small_talk=50%", num=20) == 1
    summary = read_summary(out)
    assert summary["ending"] == "exhausted"
    assert summary["kinds"]["one_call"]["kept"] == 10
    assert 48 <= summary["kinds"]["small_talk"]["garbage"] <= 58


def test_requests_imitate_the_users_own_rows(tools: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    row = {
        "messages": [{"role": "user", "content": "gimme the weather, pronto"}, {"role": "assistant", "content": "No."}]
    }
    own.write_text(json.dumps(row))
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, tmp_path / "rows.jsonl", "--seed-rows", str(own), num=2) == 0
        written = [body for body in log.bodies if name_prompt(body) == "write"]
    assert all("gimme the weather, pronto" in body["messages"][1]["content"] for body in written)


def test_rows_that_are_not_imitated_are_counted(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jsonl"
    failed = {"request": {"messages": [{"role": "user", "content": "Hi"}]}, "response": None}
    silent = {"messages": [{"role": "assistant", "content": "Welcome."}]}
    rows = [make_own_row("gimme the weather, pronto"), {"messages": 3}, {"messages": 4}, failed, silent]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = "2 rows cannot be read (message_shape 2); 1 row left out (answer_failed 1); "
    counts += "1 row without a message of the user"
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, tmp_path / "a.jsonl", "--seed-rows", str(own), num=1) == 0
        assert f"--seed-rows {own}: {counts}\n" in capsys.readouterr().out
        own.write_text("".join(json.dumps(make_own_row(f"question {i}")) + "\n" for i in range(500)))
        assert generate(log.url, tools, tmp_path / "b.jsonl", "--seed-rows", str(own), num=1) == 0
        assert "--seed-rows" not in capsys.readouterr().out
        own.write_text("".join(json.dumps(make_own_row(f"question {i}")) + "\n" for i in range(501)))
        assert generate(log.url, tools, tmp_path / "c.jsonl", "--seed-rows", str(own), num=1) == 0
        assert f"--seed-rows {own}: only the first 500 rows are read\n" in capsys.readouterr().out


def test_requests_with_secrets_are_not_sent_to_the_teacher(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, token = tmp_path / "own.jsonl", "ghp_" + "kq81ZxPv30mNeTrWLsYu7b5AdFhJ2cQ9oXt4"
    said = {
        "asked": "gimme the weather, pronto",
        "token": f"use {token} for the weather",
        "url": "look at https://me:kJ8sQ2vLpX@db.firm.io/weather",
        "known from the call": "log in with kittens-Of-4Doors and tell me the weather",
    }
    call = {"name": "log_in", "arguments": {"password": "kittens-Of-4Doors"}}
    rows = [make_own_row(text, call if "call" in name else None) for name, text in said.items()]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, tmp_path / "rows.jsonl", "--seed-rows", str(own), num=8) == 0
        sent = json.dumps(log.bodies)
    assert said.pop("asked") in sent
    assert not any(json.dumps(text)[1:-1] in sent for text in said.values())
    line = f"--seed-rows {own}: left out 3 secrets in 3 rows (basic_auth 1, github_token 1, named_secret 1)"
    assert line in capsys.readouterr().out
    own.write_text(json.dumps(make_own_row(said["token"])))
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, tmp_path / "rows.jsonl", "--seed-rows", str(own), "--fresh", num=8) == 2
        assert not log.bodies
    assert "every request has a secret (1 secret in 1 row (github_token 1))" in capsys.readouterr().err


def make_own_row(request: str, call: dict[str, Any] | None = None) -> dict[str, Any]:
    answers: list[dict[str, Any]] = [{"role": "assistant", "content": "No."}]
    if call is not None:
        function = {**call, "arguments": json.dumps(call["arguments"])}
        answers[:0] = [
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
        ]
    tool = {"name": "log_in", "parameters": {"type": "object", "properties": {"password": {"type": "string"}}}}
    return {"messages": [{"role": "user", "content": request}, *answers], "tools": [tool]}


def test_secrets_of_the_teacher_are_counted_and_replaced_if_asked_for(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "gh" + "p_" + "kq81ZxPv30mNeTrWLsYu7b5AdFhJ2cQ9oXt4"

    def give_away(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        if kind == "write":
            handler.say((make_answer(kind, body)[0] or "").replace('"request": "', f'"request": "as {secret} '))
        return kind == "write"

    kept, out = tmp_path / "kept.jsonl", tmp_path / "rows.jsonl"
    with serve_teacher(Teacher(give_away)) as log:
        assert generate(log.url, tools, kept, "--kinds", "one_call", num=4) == 0
        assert "4 secrets in 4 rows (github_token 4); --redact replaces them" in capsys.readouterr().out
        options = ["--kinds", "one_call", "--redact", "--html", str(tmp_path / "page.html")]
        assert generate(log.url, tools, out, *options, num=4) == 0
        assert "4 secrets in 4 rows (github_token 4) replaced by placeholders" in capsys.readouterr().out
        assert generate(log.url, tools, out, *options, num=4) == 0, "a complete run is read as it was written"
        assert generate(log.url, tools, out, "--kinds", "one_call", num=4) == 2
    assert secret in kept.read_text()
    written = [out, tmp_path / "page.html", *out.with_suffix(".generate").glob("*.json*")]
    assert not any(secret[-20:] in path.read_text() for path in written)
    assert all("as ghp_REDACTED" in row["messages"][0]["content"] for row in read_rows(out))
    assert all("as ghp_REDACTED" in line["requests"][0] for line in read_log(out) if line["requests"])


def test_the_teacher_does_not_see_what_was_intended(tools: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, out, "--kinds", "one_call", num=3) == 0
        answered = [body for body in log.bodies if name_prompt(body) == "answer"]
    row = read_rows(out)[0]
    first = [body for body in log.bodies if body["messages"][-1]["content"] == row["messages"][0]["content"]]
    assert len(first) == 2, "it is asked as often as there are votes"
    assert len({body["seed"] for body in first}) == 2
    assert all([m["role"] for m in body["messages"]] == ["system", "user"] for body in first)
    assert first[0]["tools"] == row["tools"]
    assert "steps" not in json.dumps(answered)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ([], [], "no tools in it"),
        ([{"name": "x", "parameters": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}}], [],
         "x: its schema allows no arguments at all"),
        ([{"name": "x", "parameters": {"type": "object", "properties": {"a": {"type": 3}}}}], [],
         "x: its schema is unusable"),
        ([{"name": "x", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}}], [],
         "x: its schema refers to #/$defs/A, which is not in it"),
        ([{"name": "x", "parameters": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/a"}}}}], [],
         "x: its schema refers to http://127.0.0.1:9/a, which is not in it"),
        (TOOLS, ["--execute", "get_weather"], "not a tool of an MCP server"),
        (TOOLS, ["--execute", "get_wether"], "did you mean get_weather"),
        (TOOLS[:1], ["--kinds", "several_calls"], "needs two tools or more"),
        (TOOLS, ["--kinds", "several_calls", "--max-tools", "1"], "needs two tools in a row. Raise --max-tools"),
        (TOOLS, ["--kinds", "one_cal"], "did you mean one_call"),
        (TOOLS, ["--max-cost", "1"], "needs --price"),
        (TOOLS, ["--votes", "0"], "expected 1 or more"),
        (TOOLS, ["--answers", "json", "--format", "hermes"], "--answers json asks for none"),
        (TOOLS, ["--held-out", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    given: list[Any], options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(given))
    with serve_teacher(Teacher()) as log:
        try:
            code = generate(log.url, file, tmp_path / "rows.jsonl", *options)
        except SystemExit as end:
            code = int(end.code or 0)
        assert code == 2
        assert not log.bodies
    assert words in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_teacher_that_is_not_there_is_one_sentence(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("http://127.0.0.1:9", tools, tmp_path / "rows.jsonl") == 2
    assert "Is the server up, and the address right?" in capsys.readouterr().err
    assert generate("nowhere", tools, tmp_path / "rows.jsonl") == 2
    assert "--teacher: nowhere is not a server's address" in capsys.readouterr().err


def test_a_file_of_other_settings_or_of_others_is_kept(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("mine\n")
    with serve_teacher(Teacher()) as log:
        assert generate(log.url, tools, out, num=2) == 2
        assert "no run of this command has written it" in capsys.readouterr().err
        assert out.read_text() == "mine\n"
        assert generate(log.url, tools, out, "--fresh", num=2) == 0
        rows = out.read_text()
        assert generate(log.url, tools, out, "--seed", "5", num=2) == 2
        assert "seed: was 0, is now 5" in capsys.readouterr().err
        assert out.read_text() == rows
        asked = len(log.bodies)
        assert generate(log.url, tools, out, num=2) == 0
        assert len(log.bodies) == asked, "a complete run asks for nothing"
