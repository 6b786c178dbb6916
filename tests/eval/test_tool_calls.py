"""The evaluation as a user starts it: right verdicts, one sentence for each wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import compare, tool_calls
from fctune.calls.cases import read_cases
from fctune.data.conversation import Conversation, Message
from fctune.data.synthetic import iter_cases
from fctune.data.template import ChatTemplate
from fctune.errors import DataError
from fctune.generation.engine import InProcessEngine


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(case.to_json()) + "\n" for case in iter_cases(6, 3)))
    return path


def test_each_case_gets_a_verdict_and_the_summary_counts_them(cases: Path, tiny_base: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "answers.jsonl"
    arguments = ["--model", str(tiny_base), "--cases", str(cases), "--out", str(out), "--max-new-tokens", "24"]
    assert tool_calls.main(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [case.id for case in read_cases(cases)]
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    overall = summary["scores"]["all"]
    assert overall["n"] == 6
    assert sum(overall["verdicts"].values()) == 6
    rate = overall["rates"]["accuracy"]
    assert rate["low"] <= rate["rate"] <= rate["high"]
    assert tool_calls.main([*arguments, "--min-accuracy", "1.01"]) == 1
    assert compare.main([str(out), str(out)]) == 0


def test_batched_answers_equal_those_one_at_a_time(tiny_base: Path, cases: Path) -> None:
    prompts = [case.prompt for case in read_cases(cases)]
    together = {a.index: a.text for a in InProcessEngine(tiny_base, batch_size=6).answer(prompts, 24)}
    alone = {a.index: a.text for a in InProcessEngine(tiny_base, batch_size=1).answer(prompts, 24)}
    assert together == alone


def test_an_answer_is_the_greedy_continuation_of_the_prompt(tiny_base: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = Conversation((Message("user", "Say kalo menu."),))
    answer = next(iter(InProcessEngine(tiny_base).answer([prompt], 12)))
    template = ChatTemplate(tiny_base)
    model = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
    tokens = template.encode_prompt(prompt)
    said: list[int] = []
    with torch.no_grad():
        while len(said) < 12:
            token = int(model(torch.tensor([tokens + said])).logits[0, -1].argmax())
            if token in template.stop_ids:
                break
            said.append(token)
    assert answer.text == template.tokenizer.decode(said)
    assert answer.is_cut == (len(said) == 12)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", "holds no cases"),
        ("{", "not JSON"),
        ('{"messages": 3}', "expected an object with messages"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "no expected_calls"),
        ('{"messages": [{"role": "user", "content": "Hi"}], "expected_calls": {}}', "expected a list of calls"),
        ('{"messages": [{"role": "user", "content": "Hi"}], "expected_calls": [{"nam": 1}]}', "1 row is no case"),
        ('{"id": 1, "messages": [{"role": "user", "content": "Hi"}], "expected_calls": []}\n' * 2, "ids must differ"),
    ],
)
def test_a_file_that_holds_no_cases_is_named(rows: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(rows)
    with pytest.raises(DataError, match=words):
        read_cases(path)


def test_an_answer_in_place_of_expected_calls_is_what_is_expected(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]}
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(row))
    (case,) = read_cases(path)
    assert [m.role for m in case.prompt.messages] == ["user"]
    assert [(c.name, c.arguments) for c in case.expected] == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such"], "not a model directory"),
        (["--cases", "no/such.jsonl"], "no such file"),
        (["--format", "hermess"], "did you mean hermes?"),
        (["--adapter", "no/such"], "cannot be loaded"),
        (["--max-new-tokens", "999999"], "over the model's"),
        (["--out", "/proc/nowhere/x.jsonl"], "cannot be written"),
    ],
)
def test_wrong_input_is_a_sentence(
    arguments: list[str], words: str, cases: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--model", str(tiny_base), "--cases", str(cases), "--max-new-tokens", "4"]
    assert tool_calls.main([*base, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_results_of_other_cases_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, identity in (("a", "1"), ("b", "2")):
        row = {"id": identity, "category": "x", "verdict": "correct"}
        (tmp_path / name).write_text(json.dumps(row))
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "same cases" in capsys.readouterr().err
