"""The same answers get the same verdicts and rates from every entry: a model, a file, a server's parser, training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fctune.base.distributed import World
from fctune.calls.formats.base import CallFormat
from fctune.calls.formats.registry import FORMATS
from fctune.config.sections.evaluation import EvalConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call
from fctune.data.synthetic import iter_cases
from fctune.engines.engine import Answer, Prompt
from fctune.tasks.benchmarks.bfcl.suite import BfclSuite
from fctune.tasks.evaluation.live import RATES, LiveEvaluation
from fctune.tasks.evaluation.results import ResultsFile
from fctune.tasks.evaluation.run import run_suite
from fctune.tasks.evaluation.score_file import score_file
from fctune.tasks.evaluation.serving import parse_as_served
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from tests.conftest import TINY_BASE
from tests.ranks import run_ranks
from tests.tasks.benchmarks.bfcl.bfcl_wheel import data_dir, needs_wheel

HERMES = FORMATS["hermes"]
MALFORMED = "<tool_call>{"
WriteRows = Callable[..., Path]


class FixedEngine:
    """Gives each case, found by the source of its prompt, a fixed answer."""

    def __init__(self, answers: Mapping[str, Answer], template: Any = None) -> None:
        self.answers = answers
        self.template = template

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        for index, prompt in enumerate(prompts):
            answer = self.answers[prompt.conversation.source]
            yield Answer(index, answer.text, tool_calls=answer.tool_calls, error=answer.error)

    def describe(self) -> dict[str, Any]:
        return {"model": "fixed"}


def alter(number: int, expected: Sequence[Call]) -> list[Call] | None:
    """Change the expected calls by the case's number; None stands for a malformed call."""
    calls = [Call(call.name, dict(call.arguments)) for call in expected]
    if number % 7 == 1:
        return None
    if number % 7 == 2:
        return calls[:-1]
    if number % 7 == 3:
        return [*calls, Call("unknown_tool", {"a": 1})]
    if number % 7 == 4:
        for call in calls:
            call.arguments["unknown_argument"] = "x"
    return calls


def to_tool_calls(calls: list[Call] | None, is_text: bool) -> list[dict[str, Any]]:
    """Write calls as endpoints do: arguments as a string of JSON, or as an object."""
    if calls is None:
        return [{"type": "function", "function": {"name": "f", "arguments": "{"}}]
    arguments: Callable[[Any], Any] = json.dumps if is_text else dict
    return [{"type": "function", "function": {"name": c.name, "arguments": arguments(c.arguments)}} for c in calls]


def to_text(calls: list[Call] | None) -> str:
    return MALFORMED if calls is None else HERMES.render(calls) or "I cannot help with that."


def evaluate(
    suite: Suite, answers: Mapping[str, Answer], call_format: CallFormat | None, out: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = run_suite(suite, FixedEngine(answers), call_format, ResultsFile(out))
    assert rows is not None
    return rows, summarise_run(suite, rows, {})


def score(suite: Suite, rows: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    out = rows.with_name(f"{rows.stem}.out.jsonl")
    summary = score_file(suite, rows, out, "hermes")
    return [json.loads(line) for line in out.read_text().splitlines()], summary


def make_parser_python(folder: Path, calls_by_id: Mapping[str, list[dict[str, Any]]]) -> Path:
    """Write an executable that takes the place of a Python with a server, whose parser gives these calls."""
    (folder / "calls.json").write_text(json.dumps(calls_by_id))
    script = folder / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        f"calls = json.load(open({str(folder / 'calls.json')!r}))\n"
        "print(json.dumps({'version': 'vLLM 0'}))\n"
        "for line in sys.stdin:\n"
        "    case_id = json.loads(line)['id']\n"
        "    print(json.dumps({'id': case_id, 'calls': calls[case_id]}))\n"
    )
    script.chmod(0o755)
    return script


class FixedLiveEvaluation(LiveEvaluation):
    """Evaluation while training, with fixed answers in place of the model's."""

    engine: FixedEngine

    def _engine(self, model: Any) -> Any:
        return self.engine


def evaluate_live(world: World, cases: str, texts: dict[str, str]) -> dict[str, Any]:
    live = FixedLiveEvaluation(EvalConfig(every=1, cases=cases), TINY_BASE, world)
    answers = {source: Answer(0, text) for source, text in texts.items()}
    live.engine = FixedEngine(answers, SimpleNamespace(source=ChatTemplate(TINY_BASE).source))
    return live.measure(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_text", [True, False], ids=["arguments as text", "arguments as objects"])
def test_all_four_entries_agree_on_verdicts_and_rates(is_text: bool, tmp_path: Path, write_rows: WriteRows) -> None:
    cases = write_rows([case.to_json() for case in iter_cases(60, 5)], "cases.jsonl")
    suite = load_suite(cases)
    calls = {case.id: alter(number + number // 7, case.expected) for number, case in enumerate(suite.cases)}
    sent = {case_id: to_tool_calls(made, is_text) for case_id, made in calls.items()}
    texts = {case.prompt.source: Answer(0, to_text(calls[case.id])) for case in suite.cases}
    served = {case.prompt.source: Answer(0, tool_calls=tuple(sent[case.id])) for case in suite.cases}

    rows, summary = evaluate(suite, texts, HERMES, tmp_path / "texts.jsonl")
    verdicts = [row["verdict"] for row in rows]
    assert {"correct", "malformed", "missed_call", "wrong_count", "wrong_arguments", "false_call"} <= set(verdicts)

    served_rows, served_summary = evaluate(suite, served, None, tmp_path / "served.jsonl")
    text_file = write_rows([{"id": i, "text": to_text(made)} for i, made in calls.items()], "texts_in.jsonl")
    calls_file = write_rows([{"id": i, "calls": made} for i, made in sent.items()], "calls_in.jsonl")
    scored = [score(suite, text_file), score(suite, calls_file)]
    assert [row["verdict"] for row in served_rows] == verdicts
    for out, out_summary in scored:
        assert [row["verdict"] for row in out] == verdicts
        assert [row["valid"] for row in out] == [verdict == "correct" for verdict in verdicts]
        lenient = [row["lenient"]["verdict"] == "correct" for row in rows]
        assert [row.get("valid_lenient", row["valid"]) for row in out] == lenient
        assert (out_summary["scores"], out_summary["lenient"]) == (summary["scores"], summary["lenient"])
    assert (served_summary["scores"], served_summary["lenient"]) == (summary["scores"], summary["lenient"])

    python = make_parser_python(tmp_path, {i: [call["function"] for call in made] for i, made in sent.items()})
    checked = parse_as_served("vllm", suite, rows, TINY_BASE, "hermes", str(python))
    assert [checked.judgements[case.id].outcome.verdict for case in suite.cases] == verdicts
    assert checked.scores == summary["scores"]

    (metrics,) = run_ranks(evaluate_live, 1, str(cases), {source: answer.text for source, answer in texts.items()})
    rates = summary["scores"]["all"]["rates"]
    assert metrics["eval_accuracy"] == rates["accuracy"]["rate"]
    assert metrics["eval_num_cases"] == len(suite.cases)
    for name in RATES:
        assert metrics[f"eval_{name}"] == rates[name]["rate"], name
    for category in summary["scores"].keys() - {"all"}:
        accuracy = summary["scores"][category]["rates"]["accuracy"]["rate"]
        assert metrics[f"eval_accuracy/{category}"] == accuracy


@needs_wheel
def test_a_model_and_a_file_get_the_same_verdicts_and_rates_on_the_leaderboard(
    tmp_path: Path, write_rows: WriteRows
) -> None:
    categories = ["live_relevance", "irrelevance", "simple_python", "simple_java", "parallel_multiple"]
    suite = BfclSuite(data_dir(), categories)
    calls: dict[str, list[Call] | None] = {}
    for number, case in enumerate(suite.cases):
        is_relevance = case.category == "live_relevance"
        calls[case.id] = alter(number, [Call("any", {"a": 1})] if is_relevance else case.expected)
    answers = {case.prompt.source: Answer(0, to_text(calls[case.id])) for case in suite.cases}
    rows, summary = evaluate(suite, answers, HERMES, tmp_path / "results.jsonl")
    out, scored = score(BfclSuite(data_dir()), write_rows([{"id": i, "text": to_text(c)} for i, c in calls.items()]))
    assert [row["verdict"] for row in out] == [row["verdict"] for row in rows]
    for scored_row, row in zip(out, rows, strict=True):
        assert scored_row["valid"] == row["bfcl"]["valid"]
    for name in ("scores", "lenient", "typed"):
        assert scored[name] == summary[name], name
    assert set(summary["scores"]["live_relevance"]["rates"]) == {
        "accuracy", "well_formed", "missed_call", "schema_valid",
    }  # fmt: skip


@needs_wheel
def test_a_case_without_an_answer_has_the_same_rates_everywhere(tmp_path: Path, write_rows: WriteRows) -> None:
    """Also in live_relevance, where one call is due although none is named."""
    suite = BfclSuite(data_dir(), ["live_relevance"])
    answers = {case.prompt.source: Answer(0, error="timed out") for case in suite.cases}
    _, summary = evaluate(suite, answers, HERMES, tmp_path / "results.jsonl")
    _, scored = score(suite, write_rows([{"id": case.id, "error": "timed out"} for case in suite.cases]))
    assert scored["scores"] == summary["scores"]
    assert summary["scores"]["live_relevance"]["rates"]["missed_call"]["n"] == len(suite.cases)
