"""Reasoning in answers: read, kept in rows and histories, counted, compared, shown folded, never judged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import compare
from fctune.apps.report.eval_page import write_eval_html
from fctune.calls.formats.registry import FORMATS
from fctune.calls.reasoning.base import Reasoning
from fctune.calls.reasoning.registry import REASONING_FORMATS
from fctune.data.conversation import Conversation, Message
from fctune.engines.engine import Answer, AnswerTokens, Prompt
from fctune.engines.local import LocalEngine
from fctune.engines.server import ServerEngine, to_messages
from fctune.tasks.episode import read_answer
from fctune.tasks.evaluation.results import ResultsFile
from fctune.tasks.evaluation.summary import summarise_reasoning, summarise_run
from fctune.tasks.judge import judge_answer, judge_row
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from fctune.tasks.task import Case, Step, to_results
from tests.conftest import ROOT
from tests.engines.fault_server import Handler, serve
from tests.tasks.benchmarks.bfcl.scripted_player import Player, run, sample
from tests.thinking_templates import HYBRID, write_thinking_model

HERMES = FORMATS["hermes"]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>'


@pytest.fixture(scope="module")
def smoke() -> Suite:
    return load_suite(ROOT / "eval" / "suites" / "smoke.yaml")


def answer(text: str, is_cut: bool = False, index: int = 0, num_tokens: int | None = None) -> Answer:
    found = REASONING_FORMATS["qwen3"].split(text, False)
    if found is not None:
        found = found._replace(num_tokens=len(found.text.split()) if num_tokens is None else num_tokens)
    return Answer(index, text, is_cut, reasoning=found)


def row_of(case: Case, text: str, is_cut: bool = False) -> dict[str, Any]:
    return judge_answer(case, answer(text, is_cut), HERMES).to_row()


def test_an_answer_is_judged_without_its_reasoning_and_the_row_keeps_both(smoke: Suite) -> None:
    case = smoke.cases[0]
    row = row_of(case, f"<think>\nNot {CALL.replace('Paris', 'Rome')}.\n</think>\n\n{CALL}")
    assert (row["verdict"], row["lenient"]["verdict"]) == ("correct", "correct")
    assert row["answer"].startswith("<think>")
    assert row["reasoning"]["text"].startswith("Not <tool_call>")
    assert (row["reasoning"]["is_closed"], row["reasoning"]["is_cut"]) == (True, False)
    assert judge_row(case, json.loads(json.dumps(row)))[0].outcome.verdict == "correct"
    inside = row_of(case, f"<think>\n{CALL}\n</think>\n\nNo.")
    assert (inside["verdict"], inside["lenient"]["verdict"], inside["calls"]) == ("missed_call", "missed_call", [])
    never = row_of(case, f"<think>\n{CALL}", is_cut=True)
    assert (never["verdict"], never["lenient"]["verdict"]) == ("missed_call", "missed_call")
    assert (never["reasoning"]["is_closed"], never["reasoning"]["is_cut"]) == (False, True)
    assert "reasoning" not in row_of(case, CALL)


def test_the_use_of_reasoning_is_summed_up_by_category_and_overall(smoke: Suite) -> None:
    cases = [replace(case, category=name) for case, name in zip(smoke.cases, "aabb", strict=True)]
    texts = ["<think>one two</think>" + CALL, "<think>a b c d", "<think>\n\n</think>\n\nNo.", "No."]
    rows = [row_of(case, text, is_cut=n == 1) for n, (case, text) in enumerate(zip(cases, texts, strict=True))]
    rows.append({**rows[0], "id": "lost", "error": "no connection", "reasoning": None})
    del rows[-1]["reasoning"]
    found = summarise_reasoning(rows, has_total=True)
    shares = {
        name: [use[key]["successes"] for key in ("reasoned", "unclosed", "cut")] + [use["reasoned"]["n"]]
        for name, use in found.items()
    }
    assert shares == {"a": [2, 1, 1, 2], "b": [0, 0, 0, 2], "all": [2, 1, 1, 4]}
    assert [found[name]["mean_tokens"] for name in ("a", "b", "all")] == [3.0, None, 3.0]
    assert "all" not in summarise_reasoning(rows, has_total=False)
    assert summarise_reasoning([row_of(cases[0], CALL)], has_total=True) == {}
    summary = summarise_run(Suite("x", tuple(cases)), rows[:4], {})
    assert summary["reasoning"] == found


BODIES: list[tuple[dict[str, Any], dict[str, Any] | None, Any]] = [
    ({"content": "Hi.", "reasoning": " Hm. "}, None, Reasoning("Hm.")),
    ({"content": "Hi.", "reasoning_content": "Hm."}, {"reasoning_tokens": 7}, Reasoning("Hm.", num_tokens=7)),
    ({"content": "Hi.", "reasoning": "Hm.", "reasoning_content": "Hm."}, {"reasoning_tokens": 0}, Reasoning("Hm.")),
    ({"content": None, "reasoning": "Hm."}, {"reasoning_tokens": "x"}, Reasoning("Hm.", is_closed=False)),
    ({"content": "<think>Hm.</think>Hi."}, None, Reasoning("Hm.", spans=((0, 18),))),
    ({"content": "Hi.", "reasoning": ""}, None, None),
    ({"content": "Hi.", "reasoning": None, "reasoning_content": 3}, None, None),
]


@pytest.mark.parametrize(("message", "details", "expected"), BODIES)
def test_reasoning_that_a_server_sends_is_read(
    message: dict[str, Any], details: dict[str, Any] | None, expected: Reasoning | None
) -> None:
    usage = {"completion_tokens": 9, "completion_tokens_details": details}

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        sent = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        handler.send(200, json.dumps(sent))

    with serve(behave) as log:
        engine = ServerEngine(log.url, "m")
        found = next(iter(engine.answer([Prompt(Conversation((Message("user", "Hi"),)), 8)])))
    assert (found.error, found.reasoning) == (None, expected)


def test_the_history_sent_to_a_server_has_the_reasoning_under_both_names() -> None:
    sent = to_messages([Message("user", "Hi"), Message("assistant", "Ho.", reasoning="Hm.")])
    assert "reasoning" not in sent[0]
    assert (sent[1]["reasoning"], sent[1]["reasoning_content"], sent[1]["content"]) == ("Hm.", "Hm.", "Ho.")


class Scripted(LocalEngine):
    """Generates given texts, with everything around them as in an evaluation."""

    texts: list[str]

    def continue_tokens(
        self, encoded: list[list[int]], seeds: list[int], max_new_tokens: int, keeps_prefixes: bool = False
    ) -> Iterator[tuple[int, AnswerTokens]]:
        self.encoded = encoded
        stop = min(self.template.stop_ids)
        for row, (prompt, text) in enumerate(zip(encoded, self.texts, strict=True)):
            ids = self.template.tokenizer.encode(text, add_special_tokens=False)
            yield row, AnswerTokens(tuple(prompt), (*ids, stop), ())


def test_in_process_the_reasoning_is_split_by_the_template_and_counted(tiny_base: Path, tmp_path: Path) -> None:
    prompt = Conversation((Message("user", "Hi"),))
    plain = write_thinking_model(tiny_base, tmp_path / "hybrid", HYBRID)
    engine = Scripted(plain)
    engine.texts = ["<think>\nOne two.\n</think>\n\nHo."]
    found = next(iter(engine.answer([Prompt(prompt, 64)])))
    assert found.text == engine.texts[0]
    assert found.reasoning is not None
    assert (found.reasoning.text, found.reasoning.is_closed) == ("One two.", True)
    assert found.reasoning.num_tokens == len(engine.template.tokenizer.encode("One two.", add_special_tokens=False)) > 1
    engine.texts = ["Ho </think> ho."]
    assert next(iter(engine.answer([Prompt(prompt, 64)]))).reasoning is None
    # A template that opens the reasoning in its prompt: only the end is in the text.
    opened = write_thinking_model(tiny_base, tmp_path / "opened", HYBRID)
    source = (opened / "chat_template.jinja").read_text()
    prompts = "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    assert source.count(prompts) == 1
    opening = "{%- if not (enable_thinking is defined and enable_thinking is false) %}{{- '<think>\\n' }}{%- endif %}"
    (opened / "chat_template.jinja").write_text(source.replace(prompts, prompts + opening))
    engine = Scripted(opened)
    engine.texts = ["One.\n</think>\n\nHo."]
    found = next(iter(engine.answer([Prompt(prompt, 64)])))
    assert engine.template.decode(engine.encoded[0]).endswith("<think>\n")
    assert found.reasoning is not None
    assert (found.reasoning.text, found.reasoning.blank(found.text).strip()) == ("One.", "Ho.")
    engine.texts = ["I never stop"]
    found = next(iter(engine.answer([Prompt(prompt, 64)])))
    assert found.reasoning is not None
    assert (found.reasoning.text, found.reasoning.is_closed) == ("I never stop", False)


def write_results(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    results = ResultsFile(path)
    for row in rows:
        results.append(row)
    results.close()


def test_a_comparison_shows_the_reasoning_of_both(
    smoke: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / "a.jsonl", [row_of(case, "No.") for case in smoke.cases])
    write_results(tmp_path / "b.jsonl", [row_of(case, "<think>one two</think>No.") for case in smoke.cases])
    command = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--json", str(tmp_path / "c.json")]
    assert compare.main(command) == 0
    printed = capsys.readouterr().out
    assert "reasoning after" in printed
    assert "reasoning before" not in printed
    found = json.loads((tmp_path / "c.json").read_text())["all"]["reasoning"]
    assert found.keys() == {"after"}
    assert (found["after"]["reasoned"]["rate"], found["after"]["mean_tokens"]) == (1.0, 2.0)


def test_the_page_shows_reasoning_folded_and_its_rates(smoke: Suite, tmp_path: Path) -> None:
    texts = ["<think>\nIt is <b>&\n</think>\n\nNo.", "<think>\nnever", "No.", "No."]
    rows = [row_of(case, text, is_cut=n == 1) for n, (case, text) in enumerate(zip(smoke.cases, texts, strict=True))]
    summary = {"model": "m", "adapter": None, **summarise_run(smoke, rows, {})}
    write_eval_html(summary, rows, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    start = page.index("data-cases>") + len("data-cases>")
    cases = json.loads(page[start : page.index("</script>", start)])
    folded = [part for case in cases for part in case["parts"] if part["kind"] == "folded"]
    assert [part["heading"] for part in folded] == ["Reasoning (3 tokens)", "Reasoning (1 token, never closed)"]
    assert folded[0]["text"] == "It is <b>&"
    assert "<h2>Reasoning</h2>" in page
    without = [row_of(case, "No.") for case in smoke.cases]
    write_eval_html({"model": "m", "adapter": None, **summarise_run(smoke, without, {})}, without, tmp_path / "b.html")
    assert "<h2>Reasoning</h2>" not in (tmp_path / "b.html").read_text()


def test_a_conversation_continues_with_the_reasoning_as_a_field_of_its_own() -> None:
    def step_of(text: str) -> Step:
        reading = read_answer(answer(text), HERMES)
        return Step(answer(text), reading, reading.lenient, reading.lenient.calls)

    step = step_of(f"<think>\nHm.\n</think>\n\nI look. {CALL}")
    message, (result,) = step.to_message(), to_results(step.calls, ['{"sky": "clear"}'])
    assert (message.reasoning, message.content, len(message.calls)) == ("Hm.", "I look.", 1)
    assert result.role == "tool"
    last = step_of("<think>\nHm.").to_message()
    assert (last.reasoning, last.content) == ("Hm.", "")


class Thinker(Player):
    """Reasons before every answer."""

    def say(self, index: int, prompt: Conversation) -> Answer:
        return answer(f"<think>\nHm.\n</think>\n\n{super().say(index, prompt).text}", index=index)


def test_each_step_of_a_conversation_keeps_its_reasoning(tmp_path: Path) -> None:
    suite = sample(200)
    (row, *_) = run(suite, Thinker(suite), tmp_path / "out.jsonl")
    assert row["bfcl"]["valid"]
    assert {step["reasoning"]["text"] for turn in row["turns"] for step in turn} == {"Hm."}
    thoughts = [message.get("reasoning") for message in row["messages"] if message["role"] == "assistant"]
    assert set(thoughts) <= {"Hm.", None}
