"""The gate from cases to report, against servers that are harmful in one way each."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fctune.apps.gate import GateReport, run_gate
from fctune.apps.gate.history import TrainingHistory, find_history
from fctune.apps.gate.models import GateModel, open_models
from fctune.base.errors import ConfigError, DataError
from fctune.base.terminal import Heartbeat
from fctune.cli import main
from fctune.cli.gate import print_report
from fctune.cli.tables import make_console
from fctune.config.sections.gate import GateConfig
from fctune.data.conversation import Conversation, Message
from fctune.data.sources.reader import parse_source
from fctune.data.sources.row_builder import ParsedRow
from fctune.data.synthetic import iter_conversations
from fctune.engines.opening import find_files
from fctune.engines.server import ServerEngine
from fctune.runs.release import mark_not_released, read_mark, remove_mark
from fctune.tasks.judge import Row
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case
from tests.apps.gate.rule_server import Calls, serve_rule, write_cases
from tests.engines.fault_server import Behave, Handler, serve
from tests.tasks.benchmarks.when2call.when2call_rows import ROWS, write_rows

QUIET: dict[str, Any] = {"log": lambda line: None}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate") / "cases.jsonl"
    path.with_suffix(".expected").write_text(json.dumps(write_cases(path, 60)))
    return path


@pytest.fixture(scope="module")
def expected(cases: Path) -> dict[str, Calls]:
    found: dict[str, Calls] = json.loads(cases.with_suffix(".expected").read_text())
    return found


def gate(cases: Path, out: Path, expected: dict[str, Calls], before: str, after: str, **settings: Any) -> GateReport:
    config = GateConfig(benchmarks=[], **settings)
    with serve_rule(expected, before) as base, serve_rule(expected, after) as tuned:
        return run_gate(base.url, tuned.url, out, cases=cases, config=config, **QUIET)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("rule", "worse"),
    [
        ("right", set()),
        ("eager", {"over_calling"}),
        ("timid", {"calls", "over_refusing"}),
        ("silent", {"abandoned"}),
        ("inventive", {"calls", "invented_tool", "invented_argument"}),
        ("textual", {"calls", "over_refusing", "abandoned", "malformed"}),
    ],
)
def test_each_harm_is_seen_on_its_own_lines(
    cases: Path, expected: dict[str, Calls], tmp_path: Path, rule: str, worse: set[str]
) -> None:
    report = gate(cases, tmp_path, expected, "right", rule)
    found = {line.line.name for line in report.lines if line.verdict == "worse"}
    assert found == worse
    assert report.verdict == ("worse" if worse else "safe")
    assert report.is_blocked == bool(worse)
    assert "reasoning" in report.not_run
    assert {"bfcl_irrelevance", "bfcl_multi_turn"} <= report.not_run.keys()
    for line in report.lines:
        assert bool(line.remedies) == line.has_fallen, line.line.name
    lines = {line.line.name: line for line in report.lines}
    assert lines["over_calling"].comparison.n >= 50, "cases without a call are made where the rows have few"
    assert set(lines["over_refusing"].comparison.turned_wrong) <= set(lines["calls"].comparison.turned_wrong)


def test_reasoning_is_a_line_where_the_base_reasons(cases: Path, expected: dict[str, Calls], tmp_path: Path) -> None:
    for rule, verdict in (("right", "worse"), ("thoughtful", "safe")):
        report = gate(cases, tmp_path / rule, expected, "thoughtful", rule)
        lines = {line.line.name: line for line in report.lines}
        assert {name: line.verdict for name, line in lines.items() if line.verdict != "safe"} == (
            {"reasoning": "worse"} if verdict == "worse" else {}
        )
        reasoning = lines["reasoning"]
        assert reasoning.verdict == verdict
        assert reasoning.comparison.num_right_before == reasoning.comparison.n > 100
        assert bool(reasoning.remedies) == (verdict == "worse")


def test_a_second_gate_asks_nothing_again_and_other_settings_are_named(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    with serve_rule(expected) as base, serve_rule(expected, "eager") as tuned:
        config = GateConfig(benchmarks=[], max_cases=20)
        first = run_gate(base.url, tuned.url, tmp_path, cases=cases, config=config, **QUIET)
        asked = len(base.bodies), len(tuned.bodies)
        lines: list[str] = []
        again = run_gate(base.url, tuned.url, tmp_path, cases=cases, config=config, log=lines.append)
        assert "40 of them answered before" in lines[0], "the server may have another model by now"
        assert (len(base.bodies), len(tuned.bodies)) == asked
        kept = [f"{side}: 40 answers are of an earlier gate" for side in ("base", "tuned")]
        assert [warning.partition(",")[0] for warning in again.warnings if warning not in first.warnings] == kept
        assert again.to_json() | {"warnings": None} == first.to_json() | {"warnings": None}
        other = GateConfig(benchmarks=[], max_cases=20, max_new_tokens=99)
        with pytest.raises(ConfigError, match=r"(?s)max_new_tokens.*--fresh"):
            run_gate(base.url, tuned.url, tmp_path, cases=cases, config=other, **QUIET)
        run_gate(base.url, tuned.url, tmp_path, cases=cases, config=other, is_fresh=True, **QUIET)
        assert len(base.bodies) == 2 * asked[0]


def test_answers_of_other_weights_at_the_same_address_are_not_judged(
    tiny_base: Path, copy_model: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    folder = copy_model(tiny_base, "served")
    models = json.dumps({"data": [{"id": "tiny", "root": str(folder)}]}).encode()
    suite = Suite("held_out", (Case("1", "call", Conversation((Message("user", "Hi"),), ()), ()),))
    with serve(lambda handler, number, body: handler.say("Hello."), models) as server:

        def ask(is_fresh: bool = False) -> GateModel:
            model = GateModel("tuned", server.url, None)
            model.ask(suite, GateConfig(), tmp_path / "out", is_fresh, lambda line: None)
            return model

        ask()
        assert ask().num_kept == 0, "the weights are known to be the same"
        (folder / "model.safetensors").write_bytes(b"other weights")
        with pytest.raises(ConfigError, match=r"(?s)served_digest: was .*--fresh"):
            ask()
        ask(is_fresh=True)
        assert len(server.bodies) == 2


def test_a_gate_tells_how_far_each_model_is(
    cases: Path, expected: dict[str, Calls], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fctune.apps.gate.models.Heartbeat", functools.partial(Heartbeat, interval_s=0.001))
    lines: list[str] = []
    with serve_rule(expected) as base, serve_rule(expected) as tuned:
        config = GateConfig(benchmarks=[], max_cases=20)
        run_gate(base.url, tuned.url, tmp_path, cases=cases, config=config, log=lines.append)
    for side in ("base", "tuned"):
        told = [match[1] for line in lines if (match := re.fullmatch(rf"{side}: held_out, (\d+) of 40 .*", line))]
        assert told
        assert sorted(map(int, told)) == list(map(int, told))


def test_a_gate_that_finds_nothing_says_so_first_and_is_undecided(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    report = gate(cases, tmp_path / "a", expected, "right", "right", max_cases=4)
    assert report.verdict == "undecided"
    assert not report.is_blocked
    assert all("too few" in warning for warning in report.warnings[: len(report.lines)]), report.warnings
    strict = gate(cases, tmp_path / "b", expected, "right", "right", max_cases=4, require_safe=True)
    assert strict.is_blocked


def test_the_token_budget_is_kept_by_asking_fewer_cases(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    config = GateConfig(benchmarks=[], max_tokens=10_000, max_new_tokens=100)
    with serve_rule(expected) as base, serve_rule(expected) as tuned:
        report = run_gate(base.url, tuned.url, tmp_path, cases=cases, config=config, **QUIET)
        bodies = [*base.bodies, *tuned.bodies]
        assert 8_000 < sum(body["max_tokens"] for body in bodies) <= 10_000
        assert any("token budget" in warning for warning in report.warnings)
        config = GateConfig(benchmarks=[], max_tokens=300, max_new_tokens=100)
        with pytest.raises(ConfigError, match="max_tokens=300: too few for one case"):
            run_gate(base.url, tuned.url, tmp_path, cases=cases, config=config, **QUIET)


def test_streams_and_guided_decoding_are_asked_and_compared(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    report = gate(cases, tmp_path / "a", expected, "right", "torn", streamed=True, max_cases=40)
    lines = {line.line.name: line.verdict for line in report.lines}
    assert lines.pop("calls_streamed") == "worse", "clients that stream get broken calls"
    assert set(lines.values()) == {"safe"}
    base, tuned = report.tables["Streaming"]["rows"]
    assert base[2] == 0
    assert tuned[2] > 20
    timid = gate(cases, tmp_path / "b", expected, "right", "timid", guided=True, max_cases=20)
    rows = {(row[0], row[1]): row for row in timid.tables["Guided decoding"]["rows"]}
    free, guided = rows["result", "free"], rows["result", "guided"]
    assert free[3] == 0
    assert guided[3] == guided[2] == guided[6], "all that the free answers lack is hidden by guiding them"


@pytest.mark.sample(2)
@pytest.mark.parametrize("sides", [("unguided", "right"), ("right", "unguided"), ("unguided", "unguided")])
@pytest.mark.parametrize("count", [60, 10])  # more and fewer than the requests after which a server counts as gone
def test_what_a_server_refuses_is_not_run_and_the_rest_is_judged(
    cases: Path, expected: dict[str, Calls], tmp_path: Path, sides: tuple[str, str], count: int
) -> None:
    report = gate(cases, tmp_path, expected, *sides, guided=True, max_cases=count)
    assert "calls" in {line.line.name for line in report.lines}
    refusing = "base" if sides[0] == "unguided" else "tuned"
    assert report.not_run["calls_guided"].startswith(f"{refusing}: the server does not answer such requests (")
    assert "not supported" in report.not_run["calls_guided"]
    assert report.tables == {}
    assert json.loads((tmp_path / "gate.json").read_text())["not_run"] == report.not_run


@pytest.mark.thorough
def test_streams_that_a_server_refuses_are_not_run(cases: Path, expected: dict[str, Calls], tmp_path: Path) -> None:
    report = gate(cases, tmp_path, expected, "right", "unstreamed", streamed=True, guided=True)
    assert "calls_streamed" in report.not_run
    assert report.verdict == "safe"
    assert list(report.tables) == ["Guided decoding"]


@pytest.mark.thorough
def test_streams_at_which_only_the_results_server_fails_are_no_pass(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    report = gate(cases, tmp_path, expected, "right", "crashing", streamed=True, max_cases=4)
    assert "calls_streamed" not in report.not_run
    assert {line.line.name: line.verdict for line in report.lines}["calls_streamed"] != "safe"


def test_a_server_that_ignores_guided_decoding_is_named(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    report = gate(cases, tmp_path, expected, "right", "heedless", guided=True, max_cases=20)
    (warning,) = [warning for warning in report.warnings if "ignores the request" in warning]
    assert warning.startswith("held_out_guided: 20 of 20 answers of the result with tool_choice=required are no calls")


def test_a_benchmark_that_a_server_cannot_be_asked_is_not_run(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    config = GateConfig(benchmarks=["when2call"], max_cases=12)
    options = {"when2call_data": str(write_rows(tmp_path / "rows.jsonl"))}
    with serve_rule(expected) as base, serve_rule(expected) as tuned:
        report = run_gate(base.url, tuned.url, tmp_path / "out", cases=cases, config=config, options=options, **QUIET)
    for name in ("when2call_call", "when2call_ask", "when2call_decline"):
        assert "sends no log-probabilities" in report.not_run[name]
        assert report.to_junit().count(f'name="{name}"') == 1
    assert not any(line.line.name.startswith("when2call") for line in report.lines)


def test_a_benchmark_that_only_the_base_answers_is_not_run_and_the_falls_are_shown(
    cases: Path, expected: dict[str, Calls], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = GateModel.ask

    def score(model: GateModel, suite: Suite, *rest: Any) -> dict[str, Row]:
        if model.side == "base" and suite.name.startswith("when2call"):  # as a server that sends prompt_logprobs
            return {case.id: {"id": case.id, "verdict": "correct"} for case in suite.cases}
        return ask(model, suite, *rest)

    monkeypatch.setattr(GateModel, "ask", score)
    config, out = GateConfig(benchmarks=["when2call"], max_cases=30), tmp_path / "out"
    options = {"when2call_data": str(write_rows(tmp_path / "rows.jsonl"))}
    with serve_rule(expected) as base, serve_rule(expected, "timid") as tuned:
        report = run_gate(base.url, tuned.url, out, cases=cases, config=config, options=options, **QUIET)
    assert report.not_run["when2call_call"].startswith("tuned: ")
    assert "Turned wrong" in (out / "gate.html").read_text()


def test_the_page_shows_the_answers_of_the_line_s_own_suite(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    gate(cases, tmp_path, expected, "right", "timid", guided=True, max_cases=30)
    shown = (tmp_path / "gate.html").read_text()
    turned = shown[shown.index("Turned wrong") :]
    assert "No tool does that." in turned, "the guided answers, which are right, have the same ids"


def fail_often(handler: Handler, number: int, body: dict[str, Any]) -> None:
    """Refuse the requests whose question has an even length."""
    if len(body["messages"][-1]["content"]) % 2:
        handler.say("No tool does that.")
    else:
        handler.send(400, '{"error": {"message": "too long"}}')


def test_cases_that_the_base_does_not_answer_hide_no_fall(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    config = GateConfig(benchmarks=[])
    with serve(fail_often) as base, serve_rule(expected) as tuned:
        report = run_gate(base.url, tuned.url, tmp_path / "a", cases=cases, config=config, **QUIET)
    lines = {line.line.name: line.comparison for line in report.lines}
    assert 0 < lines["abandoned"].n < 120
    assert lines["abandoned"].turned_right == (), "a failed request is no abandoned answer of the base"
    assert any("left out if the base did not answer" in warning for warning in report.warnings)
    with serve_rule(expected) as base, serve(fail_often) as tuned:
        report = run_gate(base.url, tuned.url, tmp_path / "b", cases=cases, config=config, **QUIET)
    lines = {line.line.name: line.comparison for line in report.lines}
    assert lines["abandoned"].turned_wrong, "to clients of the result, no answer is a wrong one"


def test_a_gate_with_a_case_that_is_too_long_can_be_repeated(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model("llama", max_position_embeddings=96)
    questions = ("Hi", "kalo " * 200, "Hello")
    cases = tuple(Case(str(i), "call", Conversation((Message("user", q),), ()), ()) for i, q in enumerate(questions))
    model, config, lines = GateModel("base", str(folder), find_files(str(folder))), GateConfig(max_new_tokens=8), []
    first = model.ask(Suite("held_out", cases), config, tmp_path, False, lines.append)
    assert [row.get("error") is None for row in first.values()] == [True, False, True]
    assert model.ask(Suite("held_out", cases), config, tmp_path, False, lines.append) == first
    assert "3 cases, 2 of them answered before" in lines[1]


def fail_always(handler: Handler, number: int, body: dict[str, Any]) -> None:
    handler.send(400, '{"error": {"message": "too long"}}')


def refuse(handler: Handler, number: int, body: dict[str, Any]) -> None:
    handler.send(400, "{}")


def die(handler: Handler, number: int, body: dict[str, Any]) -> None:
    """Answer 20 requests; then refuse the rest, and listen no longer."""
    if number >= 20:
        handler.server.server_close()
        handler.send(400, "{}", {"Connection": "close"})
    else:
        handler.say("No tool does that.")
    handler.close_connection = True


@pytest.mark.parametrize("behave", [refuse, pytest.param(die, marks=pytest.mark.thorough)])
def test_a_server_that_fails_as_a_whole_is_no_model_that_got_worse(
    behave: Behave, cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    config, out = GateConfig(benchmarks=[]), tmp_path / "out"
    with serve_rule(expected) as base, serve(behave) as tuned:
        with pytest.raises(ConfigError, match="the server of the result is gone: ") as error:
            run_gate(base.url, tuned.url, out, cases=cases, config=config, **QUIET)
        assert "cases of held_out have no answer, so nothing is judged" in str(error.value)
        assert not (out / "gate.json").exists()


def test_a_held_out_set_in_the_training_rows_is_refused_by_name(
    cases: Path, expected: dict[str, Calls], tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in cases.read_text().splitlines()]
    answer = {"role": "assistant", "content": "Done."}
    trained = tmp_path / "rows.jsonl"
    trained.write_text("".join(json.dumps({"messages": [*row["messages"], answer]}) + "\n" for row in rows[:2]))
    config = GateConfig(benchmarks=[])
    with (
        serve_rule(expected) as base,
        serve_rule(expected) as result,
        pytest.raises(DataError, match=r"2 of \d+ cases are in the training rows of .*rows.jsonl"),
    ):
        run_gate(base.url, result.url, tmp_path, cases=cases, rows=[str(trained)], config=config, **QUIET)
    assert not base.bodies, "nothing is asked before"


def test_named_rows_are_searched_to_the_end_and_without_those_that_the_run_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text("".join(json.dumps(row.to_openai()) + "\n" for row in iter_conversations("varied", 12, 3)))
    parsed = [row for row in parse_source(str(rows)) if isinstance(row, ParsedRow)]
    cases = [Case(row.digest(), "all", row.conversation, ()) for row in parsed]
    monkeypatch.setattr("fctune.apps.gate.history._MAX_ROWS", 5)
    unknown = TrainingHistory("rows", None, (str(rows),))
    assert unknown.find_cases(cases)[0] == [case.id for case in cases]
    run.mkdir()
    held_out = [json.dumps({"id": case.id, "text": "a\u2028b"}, ensure_ascii=False) for case in cases[:4]]
    (run / "held_out.jsonl").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    (run / "run.json").write_text(json.dumps({"config": {"data": {"sources": [{"path": str(rows)}]}}}))
    known = find_history(str(run), [str(rows)])
    assert known is not None
    assert known.find_cases(cases)[0] == [case.id for case in cases[4:]]


def test_a_folder_of_other_results_is_an_error_and_no_reason_to_leave_a_benchmark_out(
    tiny_base: Path, copy_model: Callable[[Path, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned, data, out = copy_model(tiny_base, "tuned"), tmp_path / "when2call.jsonl", tmp_path / "out"
    words = ["gate", "--base", str(tiny_base), "--tuned", str(tuned), "--out", str(out), "--max-new-tokens", "4"]
    words += ["--benchmarks", "when2call", "--when2call-data", str(data)]
    write_rows(data)
    assert main(words) == 0
    write_rows(data, ROWS[1:])
    assert main(words) == 2
    assert "results of different settings" in capsys.readouterr().err


def test_the_same_model_by_two_paths_is_refused(
    tiny_base: Path, copy_model: Callable[[Path, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = copy_model(tiny_base, "run/export/merged")
    words = ["--base", str(tmp_path / "run"), "--tuned", str(merged), "--out", str(tmp_path / "out")]
    assert main(["gate", *words]) == 2
    assert f"are both the model in {merged}" in capsys.readouterr().err


def test_paths_with_brackets_are_printed_as_they_are(
    cases: Path, expected: dict[str, Calls], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "[/x] [red]"
    report = gate(cases, out, expected, "right", "right", max_cases=3)
    report = replace(report, tuned="runs/[/b]", not_run={"one": "no data in [/b]"})
    print_report(make_console(), report, out)
    printed = capsys.readouterr().out
    assert "runs/[/b] against" in printed
    assert "not run: one (no data in [/b])" in printed
    assert f"page: {out}/gate.html" in printed


@pytest.mark.parametrize(
    ("end", "base_name", "tuned_name", "is_same"),
    [
        ("/v1", None, None, True),
        ("/", None, None, True),
        ("", None, "tiny", True),
        ("/v1/", "tiny", None, True),
        ("/v1", "tiny", "other", False),
    ],
)
def test_one_served_model_by_two_spellings_is_refused(
    end: str, base_name: str | None, tuned_name: str | None, is_same: bool
) -> None:
    with serve_rule({}) as server:
        for address in (server.url, server.url.replace("127.0.0.1", "LocalHost")):
            words = (server.url, address + end, GateConfig(), base_name, tuned_name)
            if not is_same:
                open_models(*words)
                continue
            with pytest.raises(ConfigError, match="are both the model tiny of one server"):
                open_models(*words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tuned", "x"], "no --base"),
        (["--base", "no/such", "--tuned", "no/such2"], "no/such: no such directory"),
        (["--base", "fctune/assets/tiny_base", "--tuned", "fctune/assets/tiny_base"], "are both"),
        (["--base", "fctune/assets/tiny_base", "--tuned", "x", "--tolerance", "0"], "gate.tolerance=0"),
        (["--base", "fctune/assets/tiny_base", "--tuned", "x", "--max-cases", "0"], "gate.max_cases=0"),
        (["--base", "fctune/assets/tiny_base", "--tuned", "x", "--cases", "none.jsonl"], "gate.cases=none.jsonl"),
        (["--base", "fctune/assets/tiny_base", "--tuned", "COPY", "--benchmarks", "mmlu"], "mmlu: no such benchmark"),
        (["--base", "fctune/assets/tiny_base", "--tuned", "COPY", "--benchmarks", "none"], "nothing to compare"),
        (["--base", "fctune/assets/tiny_base", "--tuned", "COPY", "--streamed"], "is no server"),
        (["--base", "fctune/assets/tiny_base", "--tuned", "OTHER"], "different chat templates"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str],
    message: str,
    tiny_base: Path,
    copy_model: Callable[[Path, str], Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def resolve(word: str) -> str:
        if word not in ("COPY", "OTHER"):
            return word
        copied = copy_model(tiny_base, "")
        if word == "OTHER":
            file = copied / "tokenizer_config.json"
            declared = json.loads(file.read_text())
            file.write_text(json.dumps(declared | {"chat_template": declared["chat_template"] + "{# another #}"}))
        return str(copied)

    assert main(["gate", *map(resolve, arguments), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def copy_model(tmp_path: Path) -> Callable[[Path, str], Path]:
    import shutil

    def copy(model: Path, name: str) -> Path:
        return Path(shutil.copytree(model, tmp_path / (name or "copy")))

    return copy


def test_the_command_blocks_in_process_and_marks_until_a_later_gate_passes(
    tiny_base: Path, copy_model: Callable[[Path, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned, cases, out = copy_model(tiny_base, "tuned"), tmp_path / "cases.jsonl", tmp_path / "out"
    write_cases(cases, 3)
    words = ["gate", "--base", str(tiny_base), "--tuned", str(tuned), "--cases", str(cases), "--out", str(out)]
    data = write_rows(tmp_path / "when2call.jsonl")
    words += ["--benchmarks", "when2call", "--when2call-data", str(data), "--max-new-tokens", "4"]
    assert main([*words, "--require-safe"]) == 1
    assert "blocked" in capsys.readouterr().out
    marked = json.loads((tuned / "not_released").read_text())
    assert {line["verdict"] for line in marked["lines"]} == {"undecided"}
    refused = (["serve", "--print"], ["push", "me/tuned"], ["export", "--to", "gguf"])
    for name, *options in refused:
        assert main([name, str(tuned), *options]) == 2
        assert "because the gate stopped it" in capsys.readouterr().err
    assert main(["serve", str(tuned), "--print", "--force"]) == 0
    assert main(["push", str(tuned), "me/tuned", "--print-card"]) == 0
    assert "## Not released" in capsys.readouterr().out
    report = json.loads((out / "gate.json").read_text())
    suite = ElementTree.parse(out / "gate.xml").getroot()
    assert int(suite.attrib["tests"]) == len(report["lines"]) + len(report["not_run"]) == len(suite)
    assert {"when2call_ask", "calls", "over_calling", "abandoned"} <= {line["name"] for line in report["lines"]}
    assert int(suite.attrib["failures"]) == len(suite.findall("*/failure")) == len(report["lines"])
    assert int(suite.attrib["skipped"]) == len(suite.findall("*/skipped")) == len(report["not_run"])
    assert (out / "gate.html").read_text().count("undecided") >= len(report["lines"])
    assert main(words) == 0
    assert not (tuned / "not_released").exists()


def test_a_gate_without_the_line_that_stopped_a_model_does_not_release_it(
    tiny_base: Path, copy_model: Callable[[Path, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, cases, out = tmp_path / "run", tmp_path / "cases.jsonl", tmp_path / "out"
    merged = copy_model(tiny_base, "run/export/merged")
    write_cases(cases, 3)
    mark_not_released(run, [{"name": "text", "title": "instructions", "verdict": "worse"}], tmp_path / "gate.json")
    words = ["gate", "--base", str(tiny_base), "--tuned", str(merged), "--cases", str(cases), "--out", str(out)]
    assert main([*words, "--benchmarks", "none", "--max-new-tokens", "4"]) == 1
    assert "instructions: worse in an earlier gate of this result, and not run in this one" in capsys.readouterr().out
    suite = ElementTree.parse(out / "gate.xml").getroot()
    assert int(suite.attrib["tests"]) == len(suite)
    assert [case.attrib["name"] for case in suite if case.find("failure") is not None] == ["text"]
    assert main(["serve", str(run), "--print"]) == 2
    assert "instructions (worse)" in capsys.readouterr().err


def test_a_gate_of_which_no_line_ran_is_named_as_such(
    tiny_base: Path, copy_model: Callable[[Path, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned, cases = copy_model(tiny_base, "tuned"), tmp_path / "cases.jsonl"
    write_cases(cases, 3)
    words = ["--cases", str(cases), "--out", str(tmp_path / "out"), "--benchmarks", "none", "--max-new-tokens", "4"]
    with serve(fail_always) as base:
        words = ["gate", "--base", base.url, "--tuned", str(tuned), *words]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ServerEngine, "find_outage", lambda engine: None)
            assert main([*words, "--require-safe"]) == 1
    assert "undecided: no line ran" in capsys.readouterr().out
    assert main(["serve", str(tuned), "--print"]) == 2
    assert "no line of the gate ran (undecided)" in capsys.readouterr().err


@pytest.mark.parametrize("tuned", ["http://127.0.0.1:9/v1", "hf:me/model"])
def test_a_result_that_is_no_path_is_of_no_run_in_this_directory(
    tuned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"config": {"model": {"path": "another"}}}))
    monkeypatch.chdir(tmp_path)
    assert find_history(tuned) is None
    named = find_history(tuned, ["rows.jsonl"])
    assert named is not None
    assert named.run is None


def test_a_smaller_gate_does_not_clear_a_line_that_got_worse(
    tiny_base: Path, copy_model: Callable[[Path, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned, cases, out = copy_model(tiny_base, "tuned"), tmp_path / "cases.jsonl", tmp_path / "out"
    write_cases(cases, 3)
    words = ["gate", "--base", str(tiny_base), "--tuned", str(tuned), "--cases", str(cases), "--out", str(out)]
    words += ["--benchmarks", "none", "--max-new-tokens", "4", "--max-cases", "2"]
    line = {"name": "abandoned", "title": "abandoned", "verdict": "worse"}
    for count, code in ((200, 1), (4, 0)):
        mark_not_released(tuned, [{**line, "n": count}], tmp_path / "gate.json")
        assert main(words) == code
        assert (tuned / "not_released").exists() == bool(code)
        told = "worse in an earlier gate of this result, and undecided on 4 items in this one, which had 200"
        assert (told in capsys.readouterr().out) == bool(code)
        suite = ElementTree.parse(out / "gate.xml").getroot()
        failed = [case.attrib["name"] for case in suite if case.find("failure") is not None]
        assert failed == (["abandoned"] if code else [])
        assert int(suite.attrib["failures"]) == len(failed)
        assert int(suite.attrib["tests"]) == len(suite)


def test_models_in_a_folder_named_export_do_not_share_a_mark(tmp_path: Path) -> None:
    first, second = tmp_path / "export" / "first", tmp_path / "export" / "second"
    for model in (first, second):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    mark_not_released(first, [{"name": "calls", "title": "calls", "verdict": "worse"}], tmp_path / "gate.json")
    assert read_mark(second) is None
    assert not remove_mark(second)
    assert remove_mark(first)
