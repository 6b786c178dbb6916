"""The cases of When2Call, their judge and their figures.

H. Ross, A. Mahabaleshwarkar, Y. Suhara, When2Call: When (not) to Call Tools, NAACL 2025. The published evaluation is a
multiple-choice task of lm-evaluation-harness: an answer's log-likelihood given the prompt, divided by its number of
characters, decides ("acc_norm"). Prompt and calls are written for each family by hand there; here the model's own chat
template writes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fctune.base.errors import ConfigError
from fctune.calls.formats.base import Parsed
from fctune.calls.judge import BenchmarkVerdict, Judgement, judge, judge_failure
from fctune.calls.metrics import rate
from fctune.config.loading import format_problems
from fctune.config.parsing import parse_dataclass
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.tool_schema import TYPE_NAMES
from fctune.engines.engine import ChoiceScore
from fctune.tasks.benchmarks.rows import find_release, read_benchmark, require
from fctune.tasks.suite import Suite
from fctune.tasks.task import AnswerCase

NAME = "when2call"
TITLE = "When2Call"
CALL = "tool_call"
CLASSES = (CALL, "request_for_info", "cannot_answer", "direct")
_NO_ANSWER = "no_answer"
_SCHEMA_MAPS = ("properties", "$defs", "definitions")


@dataclass(frozen=True)
class When2CallCase(AnswerCase):
    """A question with four answers, of which ``category`` names the right one; ``labels`` are theirs."""

    labels: tuple[str, ...]
    benchmark_name: ClassVar[str] = NAME

    def judge_answer(self, content: str, scores: Sequence[ChoiceScore]) -> tuple[Judgement, Judgement]:
        """Judge a choice by its likelihood per character; both readings are the same.

        Raises:
            ValueError: There are no scores of the choices.
        """
        if len(scores) != len(self.labels):
            raise ValueError(f"{len(scores)} scores for {len(self.labels)} choices")
        order = range(len(scores))
        best = max(order, key=lambda position: scores[position].per_character)
        chosen, likeliest = self.labels[best], self.labels[max(order, key=lambda position: scores[position].logprob)]
        outcome = judge(self.expected, Parsed(self.choices[best].calls)).outcome
        is_right = chosen == self.category
        if outcome.is_correct and not is_right:
            outcome = outcome._replace(verdict="wrong_answer")
        reason = "" if is_right else f"chose {chosen} instead of {self.category}"
        verdict = BenchmarkVerdict(is_right, reason, self._details(chosen, likeliest))
        judgement = Judgement(outcome, reason, (reason,) if reason else (), verdict)
        return judgement, judgement

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a case without an answer."""
        failure = judge_failure(len(self.expected), reason)
        return failure._replace(benchmark=BenchmarkVerdict(False, reason, self._details(_NO_ANSWER, _NO_ANSWER)))

    def describe(self) -> Any:
        """Return each choice with its label, as JSON values."""
        return [[label, choice.to_openai()] for label, choice in zip(self.labels, self.choices, strict=True)]

    def _details(self, chosen: str, likeliest: str) -> dict[str, Any]:
        has_tools = bool(self.prompt.tools)
        return {"expected": self.category, "chosen": chosen, "likeliest": likeliest, "has_tools": has_tools}


@dataclass(frozen=True, slots=True)
class _Settings:
    """The value of ``when2call`` in a suite's YAML."""

    data: str


def load_when2call(settings: Any, where: str, categories: Sequence[str], data: str | None) -> Suite:
    """Load the suite of a YAML file.

    Args:
        settings: The value of ``when2call`` in the file.
        where: The file.
        categories: Right answers (``CLASSES``) whose cases to load; empty: all.
        data: The benchmark's file or data set; None: that of the settings.

    Raises:
        ConfigError: The settings are invalid, or no case has one of the categories.
        DataError: The data cannot be read, or have another form.
    """
    problems: list[str] = []
    parsed: _Settings | None = parse_dataclass(_Settings, settings, NAME, problems)
    if problems or parsed is None:
        raise ConfigError(format_problems(where, problems))
    path = data or parsed.data
    cases = read_benchmark(path, TITLE, _read_case)
    suite = Suite(NAME, tuple(cases), TITLE, release=find_release(path), measure=measure)
    return suite.select(categories)


def measure(strict: Sequence[BenchmarkVerdict], lenient: Sequence[BenchmarkVerdict]) -> dict[str, Any]:
    """Return the published figures, over-calling and over-refusing, and the choices by right answer.

    Over-calling is a call where none is due; over-refusing is any other choice where one is, which the table divides
    into questions back, refusals and direct answers. A tool is hallucinated if the model calls where it cannot answer
    and no tool is on offer. Macro F1 is the mean over the classes that are right or chosen somewhere.
    """
    details = [verdict.details for verdict in strict if verdict.details is not None]
    pairs = Counter((one["expected"], one["chosen"]) for one in details)
    columns = [*CLASSES, *([_NO_ANSWER] if any(chosen == _NO_ANSWER for _, chosen in pairs) else [])]
    expected = [name for name in CLASSES if any(due == name for due, _ in pairs)]
    due = sum(times for (right, _), times in pairs.items() if right == CALL)
    called = sum(times for (right, chosen), times in pairs.items() if right != CALL and chosen == CALL)
    toolless = [one for one in details if one["expected"] == "cannot_answer" and not one["has_tools"]]
    rates = {
        "accuracy": rate(sum(pairs[name, name] for name in CLASSES), len(details)),
        "accuracy_not_normalised": rate(sum(one["likeliest"] == one["expected"] for one in details), len(details)),
        "over_calling": rate(called, len(details) - due),
        "over_refusing": rate(due - pairs[CALL, CALL], due),
        "hallucinated_tools": rate(sum(one["chosen"] == CALL for one in toolless), len(toolless)),
    }
    return {
        "rates": rates,
        "values": {"macro_f1": _macro_f1(pairs)},
        "table": {due: {chosen: pairs[due, chosen] for chosen in columns} for due in expected},
        "notes": [
            "Log-likelihood per character decides. Over-calling is a call where none is due, over-refusing another "
            "choice where one is.",
            "The table has the right answers in rows and the model's choices in columns.",
        ],
    }


def _macro_f1(pairs: Counter[tuple[str, str]]) -> float:
    seen = {name for pair in pairs for name in pair} - {_NO_ANSWER}
    scores = []
    for name in seen:
        given = sum(times for (due, chosen), times in pairs.items() if name in (due, chosen))
        # 2 tp / (2 tp + fp + fn), where given = tp + fp + fn
        scores.append(2 * pairs[name, name] / (given + pairs[name, name]))
    return sum(scores) / len(scores) if scores else 0.0


def _read_case(row: Any) -> When2CallCase:
    require(row, {"uuid": str, "question": str, "correct_answer": str, "answers": Mapping, "tools": list})
    labels = tuple(name for name in CLASSES if name in row["answers"])
    if row["correct_answer"] not in labels or set(labels) != set(CLASSES):
        raise ValueError(f"correct_answer {row['correct_answer']!r} with answers {', '.join(row['answers'])}")
    choices = {name: _read_choice(name, row["answers"][name]) for name in CLASSES}
    messages = (Message("user", row["question"]),)
    prompt = Conversation(messages, tuple(map(_read_tool, row["tools"])), f"{TITLE} {row['uuid']}")
    expected = choices[CALL].calls if row["correct_answer"] == CALL else ()
    return When2CallCase(
        id=f"{NAME}-{row['uuid']}",
        category=row["correct_answer"],
        prompt=prompt,
        expected=expected,
        labels=CLASSES,
        choices=tuple(choices.values()),
    )


def _read_choice(label: str, text: Any) -> Message:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"answers.{label}: empty, or not a text")
    if label != CALL:
        return Message("assistant", text)
    call = _decode(f"answers.{label}", text)
    if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        raise ValueError(f"answers.{label}: not a call with a name and an object of arguments")
    return Message("assistant", None, (Call(call["name"], call["arguments"]),))


def _read_tool(text: Any) -> Tool:
    """Return a tool with the names of JSON Schema for its types, which chat templates expect."""
    function = _decode("tools", text)
    if not isinstance(function.get("name"), str):
        raise ValueError("tools: a tool without a name")
    return Tool({**function, "parameters": _rename_types(function.get("parameters") or {})})


def _decode(where: str, text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _rename_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_rename_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            renamed[key] = {name: _rename_types(inner) for name, inner in value.items()}
        elif key == "type" and isinstance(value, str):
            renamed[key] = TYPE_NAMES.get(value.lower(), "string")  # such as "any"
        else:
            renamed[key] = value if key in ("enum", "default", "const", "required") else _rename_types(value)
    return renamed
