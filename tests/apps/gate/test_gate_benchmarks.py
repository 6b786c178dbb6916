"""Lines of the public benchmarks that generate text: on few cases, with models that fall on all of them or on none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fctune.apps.gate import GateReport, run_gate
from fctune.apps.gate.plan import plan_cases
from fctune.cli.gate import print_report
from fctune.cli.tables import make_console
from fctune.config.sections.gate import GateConfig
from fctune.tasks.suite import Suite
from fctune.tasks.task import MultiTurnCase
from tests.engines.fault_server import Behave, Handler, serve
from tests.tasks.benchmarks.bfcl.bfcl_wheel import needs_wheel
from tests.tasks.benchmarks.ifeval.ifeval_rows import ASKED, NEEDS_DATA, write_rows

NUM_CASES = 10
QUIET: dict[str, Any] = {"log": lambda line: None}


def load_samples(config: GateConfig, options: dict[str, Any]) -> dict[str, Suite]:
    """Return the cases that a gate between servers asks, by line."""
    plan, _ = plan_cases(None, config, options, has_server=True)
    return {sample.name: suite for sample, suite in plan.samples}


def compare(
    config: GateConfig, options: dict[str, Any], out: Path, make: Callable[[bool], Behave]
) -> tuple[GateReport, dict[str, str]]:
    """Run the gate with a base that answers right and a result that does not; returns the verdicts as well."""
    with serve(make(False)) as base, serve(make(True)) as tuned:
        report = run_gate(base.url, tuned.url, out, config=config, options=options, **QUIET)
    return report, {line.line.name: line.verdict for line in report.lines}


@needs_wheel
def test_bfcl_gives_a_line_for_calls_out_of_place_and_one_for_several_turns(tmp_path: Path) -> None:
    config = GateConfig(benchmarks=["bfcl"], max_cases=NUM_CASES)
    talks = {
        talk.turns[0].messages[-1].content: talk for talk in load_samples(config, {})["bfcl_multi_turn"].multi_turn
    }
    assert len(talks) == NUM_CASES

    def make(is_tuned: bool) -> Behave:
        def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
            messages, tools = body["messages"], body["tools"]
            talk = talks.get(next(message["content"] for message in messages if message["role"] == "user"))
            if talk is None:  # irrelevance
                calls = [{"name": tools[0]["function"]["name"], "arguments": {}}] if is_tuned else []
            else:
                calls = play(talk, [message["role"] for message in messages], is_tuned)
            sent = [{"function": {**call, "arguments": json.dumps(call["arguments"])}} for call in calls]
            handler.say(None if sent else "Done.", tool_calls=sent)

        return behave

    report, verdicts = compare(config, {}, tmp_path, make)
    assert verdicts == {"bfcl_irrelevance": "worse", "bfcl_multi_turn": "worse"}
    assert report.is_blocked
    for line in report.lines:
        one = line.comparison
        assert (one.n, one.num_right_before, one.num_right_after) == (NUM_CASES, NUM_CASES, 0)
        assert line.remedies, line.line.name
        assert line.line.note.startswith("bfcl-eval "), "the release of the cases"


def play(talk: MultiTurnCase, roles: list[str], is_forgetful: bool) -> list[dict[str, Any]]:
    """Return the calls that are due, all of a turn in one answer; a forgetful model makes those of one turn."""
    turn, last = roles.count("user") - 1, len(roles) - 1 - roles[::-1].index("user")
    if "assistant" in roles[last:] or (is_forgetful and turn > 0):
        return []
    return [{"name": call.name, "arguments": call.arguments} for call in talk.expected[turn]]


@pytest.fixture
def nltk_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide NLTK's data that this machine may have."""
    pytest.importorskip("lm_eval", reason="needs fctune[ifeval]")
    monkeypatch.setattr(pytest.importorskip("nltk").data, "path", [])


@pytest.mark.usefixtures("nltk_data")
def test_ifeval_gives_a_line_that_names_the_prompts_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [ASKED[0]._replace(prompt=f"Describe lake {number} without commas.") for number in range(NUM_CASES)]
    data = write_rows(tmp_path / "prompts.jsonl", [*asked, *NEEDS_DATA])

    def make(is_tuned: bool) -> Behave:
        return lambda handler, number, body: handler.say("Wet, and deep." if is_tuned else "A lake is wet.")

    out = tmp_path / "out"
    config = GateConfig(benchmarks=["ifeval"])
    report, verdicts = compare(config, {"ifeval_data": str(data)}, out, make)
    assert verdicts == {"ifeval": "worse"}
    (line,) = report.lines
    assert (line.comparison.num_right_before, line.comparison.num_right_after) == (NUM_CASES, 0)
    print_report(make_console(), report, out)
    printed = " ".join(capsys.readouterr().out.split())
    written = json.loads((out / "gate.json").read_text())["lines"][0]["note"]
    (case,) = [one for one in ElementTree.parse(out / "gate.xml").getroot() if one.attrib["name"] == "ifeval"]
    shown = " ".join((out / "gate.html").read_text().split())
    for name in ("length_constraints:number_sentences", "change_case:capital_word_frequency"):
        named = f"left out: 1 prompt with {name} (needs NLTK"
        assert named in written
        assert named in printed
        assert named in case.findtext("system-out", "")
        assert named in shown


@pytest.mark.usefixtures("nltk_data")
def test_a_thorough_gate_asks_all_prompts_of_ifeval(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "prompts.jsonl", [ASKED[0]] * 541)
    for is_thorough, count in ((False, 200), (True, 541)):
        config = GateConfig(benchmarks=["ifeval"], thorough=is_thorough)
        assert len(load_samples(config, {"ifeval_data": str(data)})["ifeval"].cases) == count
