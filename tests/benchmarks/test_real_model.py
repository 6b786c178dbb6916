"""Parts and prompts of the real-model benchmark: what BFCL's prompt asks, and one result file for each part."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.real_arguments import make_parser
from benchmarks.real_measuring import Subject, has_own_template, load_suites, to_prompt_suite
from benchmarks.real_model import PARTS, Part, load_parts, measure_part
from benchmarks.real_rows import write_rows
from fctune.base.errors import ConfigError
from fctune.cli.eval_options import find_suite
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.engines.engine import Answer
from fctune.tasks.judge import is_valid, judge_answer
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from fctune.tasks.task import Case
from tests.conftest import TINY_BASE
from tests.ranks import find_port

TOOL = Tool({"name": "plot", "description": "Draw points.", "parameters": {"type": "object", "properties": {}}})


def make_case() -> Case:
    """Return a dialogue in which a tool was called once and is due again."""
    first = Call("plot", {"points": [1, 2]}, "1")
    messages = (
        Message("system", "Be brief."),
        Message("user", "Draw 1 and 2."),
        Message("assistant", None, (first,)),
        Message("tool", '"drawn"', call_id="1"),
        Message("user", "Now 3 and 4, in red."),
    )
    return Case("c-1", "c", Conversation(messages, (TOOL,)), (Call("plot", {"points": [3, 4], "color": "red"}),))


def test_the_prompt_has_the_tools_and_earlier_calls_as_text() -> None:
    (case,) = to_prompt_suite(Suite("c", (make_case(),))).cases
    system, *others = case.prompt.messages
    assert case.prompt.tools == ()
    assert "Draw points." in (system.content or "")
    assert (system.content or "").endswith("Be brief.")
    assert [message.content for message in others] == [
        "Draw 1 and 2.",
        "[plot(points=[1, 2])]",
        '"drawn"',
        "Now 3 and 4, in red.",
    ]
    assert not any(message.calls for message in others)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("[plot(points=[3, 4], color='red')]", True),
        ("plot(points=(3, 4), color='red')", True),
        ("[plot(points=[3, 4])]", False),
        ('{"name": "plot", "arguments": {"points": [3, 4], "color": "red"}}', False),
    ],
)
def test_an_answer_to_the_prompt_is_read_as_the_leaderboard_reads_it(text: str, is_right: bool) -> None:
    suite = to_prompt_suite(Suite("c", (make_case(),)))
    judged = judge_answer(suite.cases[0], Answer(0, text), suite.call_format).to_row()
    assert is_valid(judged) is is_valid(judged["lenient"]) is is_right


def test_both_ways_of_asking_have_the_same_questions(tmp_path: Path) -> None:
    write_rows(tmp_path / "toolalpaca.jsonl", [{"id": "toolalpaca-0", "kind": "toolalpaca", "expected_calls": [],
               "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL.to_openai()]}])  # fmt: skip
    names = ["simple_python", "live_irrelevance", "toolalpaca"]
    tools, prompt = (load_suites(tmp_path, "test", names, 5, mode=mode) for mode in ("tools", "prompt"))
    for first, second in zip(tools, prompt, strict=True):
        assert first.name == second.name
        assert [case.id for case in first.cases] == [case.id for case in second.cases]
        assert all(case.prompt.tools for case in first.cases)
        assert not any(case.prompt.tools for case in second.cases)
        assert second.call_format is not None
    assert len(tools[0].cases) == 5


def test_public_sets_are_measured_by_the_test_alone(tmp_path: Path) -> None:
    write_rows(tmp_path / "toolalpaca.jsonl", [])
    with pytest.raises(ConfigError, match="--categories toolalpaca: measured with --public-sets and --split test only"):
        load_suites(tmp_path, "validation", ["toolalpaca"])
    with pytest.raises(ConfigError, match="--categories api_bank: "):
        load_suites(tmp_path, "test", ["api_bank"])


def test_only_a_model_that_comes_with_a_template_is_asked_by_the_prompt(tmp_path: Path) -> None:
    shutil.copytree(TINY_BASE, tmp_path / "base")
    assert has_own_template(tmp_path / "base")
    path = tmp_path / "base" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    assert not has_own_template(tmp_path / "base")


def make_arguments(out: Path, *options: str) -> argparse.Namespace:
    """Parse options of ``--full``; the answers are short."""
    given = ["--model", str(TINY_BASE), "--max-new-tokens", "4", "--out", str(out), *options]
    arguments = make_parser("benchmarks.real_model", None).parse_args(given)
    arguments.parts, arguments.ifeval_data = list(PARTS), None
    return arguments


def test_a_part_that_cannot_be_measured_is_known_before_any_work(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, "--vllm", "python")
    with pytest.raises(ConfigError, match="the part public_sets needs --public-sets"):
        load_parts(arguments)
    arguments.parts, arguments.vllm = ["second_engine"], None
    with pytest.raises(ConfigError, match="the part second_engine needs --vllm"):
        load_parts(arguments)


@pytest.mark.thorough
def test_the_dialogues_and_the_cases_of_the_second_engine_are_always_the_same(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, "--vllm", "python")
    arguments.parts = ["multi_turn", "second_engine"]
    first, second = load_parts(arguments), load_parts(arguments)
    assert [[len(suite.all_cases) for suite in part.suites] for part in first] == [[50], [100]]
    assert [part.suites[0].digest() for part in first] == [part.suites[0].digest() for part in second]
    assert len({case.category for case in first[1].suites[0].cases}) > 5


def test_each_part_leaves_a_result_file_and_keeps_its_answers(tmp_path: Path) -> None:
    trained = shutil.copytree(TINY_BASE, tmp_path / "trained")
    suite = load_suite(find_suite("smoke"))
    arguments = make_arguments(tmp_path / "out")
    part = Part("test", [suite], [to_prompt_suite(suite)])
    table = measure_part(part, Subject(TINY_BASE), Subject(trained), arguments)
    result = json.loads((tmp_path / "out" / "full" / "test.json").read_text())
    assert "before, BFCL's prompt" in table
    assert result["summary"]["smoke"].keys() >= {"before", "before_prompt", "after", "difference", "compared_with"}
    assert result["cases_digests"] == {"smoke": suite.digest()}
    assert result["base"]["model_digest"] and result["machine"]  # noqa: PT018
    arguments.vllm = "/nowhere/python"  # nothing is left to ask
    assert measure_part(part, Subject(TINY_BASE), Subject(trained), arguments) == table


@pytest.mark.thorough
def test_the_second_engine_is_compared_case_by_case(tmp_path: Path) -> None:
    suite = load_suite(find_suite("smoke"))
    arguments = make_arguments(tmp_path / "out", "--vllm", "/nowhere/python", "--port", str(find_port()))
    folder = tmp_path / "out" / "full" / "second_engine"
    part, subject = Part("second_engine", [suite], []), Subject(TINY_BASE)
    with pytest.raises(ConfigError, match="the server ended"):  # after the answers in process
        measure_part(part, subject, subject, arguments)
    shutil.copytree(folder / "in_process", folder / "served", dirs_exist_ok=True)
    path = folder / "served" / "smoke.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["verdict"] = "wrong_name" if rows[0]["verdict"] == "correct" else "correct"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "1 of 4 verdicts differ" in measure_part(part, subject, subject, arguments)
    result = json.loads((tmp_path / "out" / "full" / "second_engine.json").read_text())
    assert result["verdicts_differ"] == [rows[0]["id"]]
    assert result["in_process"]["n"] == result["served"]["n"] == 4
