"""The prompts of IFEval as cases, judged by lm-eval's checkers, and their figures.

J. Zhou et al., Instruction-Following Evaluation for Large Language Models, arXiv:2311.07911. Accuracy is reported by
prompt, all of whose instructions must be followed, and by instruction; each strictly and loosely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fctune.base.errors import ConfigError
from fctune.calls.judge import BenchmarkVerdict, Judgement, Outcome, judge_failure
from fctune.calls.metrics import rate
from fctune.config.intervals import format_count
from fctune.config.loading import format_problems
from fctune.config.parsing import parse_dataclass
from fctune.data.conversation import Conversation, Message
from fctune.engines.engine import ChoiceScore
from fctune.tasks.benchmarks.ifeval.checkers import check, find_absent, load_checkers
from fctune.tasks.benchmarks.rows import find_release, read_benchmark, require
from fctune.tasks.suite import Suite
from fctune.tasks.task import AnswerCase

NAME = "ifeval"
TITLE = "IFEval"
CATEGORY = "all"
MAX_NEW_TOKENS = 1280
"""Limit of an answer in the published evaluation."""


@dataclass(frozen=True)
class IfevalCase(AnswerCase):
    """A prompt with the names and arguments of its instructions."""

    names: tuple[str, ...]
    arguments: tuple[Mapping[str, Any], ...]
    benchmark_name: ClassVar[str] = NAME

    def judge_answer(self, content: str, scores: Sequence[ChoiceScore]) -> tuple[Judgement, Judgement]:
        """Judge an answer; an empty one follows no instruction."""
        strict, loose = check(self.prompt.messages[-1].content or "", self.names, self.arguments, content)
        return self._judge(strict), self._judge(loose)

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a prompt without an answer: no instruction is followed."""
        verdict = BenchmarkVerdict(False, reason, self._details([False] * len(self.names)))
        return judge_failure(0, reason)._replace(benchmark=verdict)

    def describe(self) -> Any:
        """Return the names of the prompt's instructions and their arguments."""
        return [self.names, [dict(one) for one in self.arguments]]

    def _judge(self, followed: Sequence[bool]) -> Judgement:
        lines = tuple(
            f"does not follow {name}{_describe(arguments)}"
            for name, arguments, is_followed in zip(self.names, self.arguments, followed, strict=True)
            if not is_followed
        )
        verdict = BenchmarkVerdict(not lines, "; ".join(lines), self._details(followed))
        return Judgement(Outcome("wrong_answer" if lines else "correct", 0, 0), verdict.reason, lines, verdict)

    def _details(self, followed: Sequence[bool]) -> dict[str, Any]:
        return {"instructions": list(self.names), "followed": list(followed)}


@dataclass(frozen=True, slots=True)
class _Settings:
    """The value of ``ifeval`` in a suite's YAML."""

    data: str


def load_ifeval(settings: Any, where: str, categories: Sequence[str], data: str | None) -> Suite:
    """Load the suite of a YAML file, without the prompts that cannot be checked on this machine.

    Args:
        settings: The value of ``ifeval`` in the file.
        where: The file.
        categories: Only ``all``, or empty.
        data: The benchmark's file or data set; None: that of the settings.

    Raises:
        ConfigError: The settings are invalid, or lm-eval is not installed.
        DataError: The data cannot be read, or have another form.
    """
    problems: list[str] = []
    parsed: _Settings | None = parse_dataclass(_Settings, settings, NAME, problems)
    if problems or parsed is None:
        raise ConfigError(format_problems(where, problems))
    return open_ifeval(data or parsed.data).select(categories)


def open_ifeval(path: str) -> Suite:
    """Return the suite of a file or data set; see ``load_ifeval``."""
    load_checkers()  # before anything is downloaded
    absent: dict[str, str | None] = {}
    found = read_benchmark(path, TITLE, lambda row: _read_case(row, absent))
    cases = [case for case in found if not any(absent[name] for name in case.names)]
    left_out = [case.id for case in found if any(absent[name] for name in case.names)]
    if not cases:
        reasons = ", ".join({reason for reason in absent.values() if reason})
        raise ConfigError(f"{path}: none of its {format_count(len(found), 'prompt')} can be checked here ({reasons}).")
    counts = Counter(name for case in found for name in set(case.names) if absent[name])
    return Suite(
        NAME,
        tuple(cases),
        TITLE,
        {f"{format_count(times, 'prompt')} with {name}": absent[name] or "" for name, times in counts.items()},
        release=find_release(path),
        measure=_make_measure(left_out),
        max_new_tokens=MAX_NEW_TOKENS,
    )


def _make_measure(
    left_out: Sequence[str],
) -> Callable[[Sequence[BenchmarkVerdict], Sequence[BenchmarkVerdict]], dict[str, Any]]:
    def measure(strict: Sequence[BenchmarkVerdict], lenient: Sequence[BenchmarkVerdict]) -> dict[str, Any]:
        rates: dict[str, Any] = {}
        by_name: dict[str, Counter[str]] = {}
        for reading, verdicts in (("strict", strict), ("loose", lenient)):
            pairs = [pair for verdict in verdicts for pair in _iter_instructions(verdict)]
            rates[f"prompts_{reading}"] = rate(sum(verdict.valid for verdict in verdicts), len(verdicts))
            rates[f"instructions_{reading}"] = rate(sum(is_followed for _, is_followed in pairs), len(pairs))
            for name, is_followed in pairs:
                by_name.setdefault(name, Counter())[reading] += is_followed
                by_name[name]["of"] += reading == "strict"
        columns = ("strict", "loose", "of")
        table = {name: {column: by_name[name][column] for column in columns} for name in sorted(by_name)}
        return {"rates": rates, "table": table, "left_out": list(left_out)}

    return measure


def _iter_instructions(verdict: BenchmarkVerdict) -> list[tuple[str, bool]]:
    details = verdict.details or {}
    return list(zip(details.get("instructions", ()), details.get("followed", ()), strict=True))


def _describe(arguments: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{key}={value}" for key, value in arguments.items() if key != "prompt_to_repeat")
    return f" ({shown})" if shown else ""


def _read_case(row: Any, absent: dict[str, str | None]) -> IfevalCase:
    """Read a row; adds for each instruction the reason that it cannot be checked here, or None."""
    require(row, {"key": int, "prompt": str, "instruction_id_list": list, "kwargs": list})
    names, arguments = row["instruction_id_list"], row["kwargs"]
    if not row["prompt"].strip():
        raise ValueError("prompt: empty")
    if not names or len(names) != len(arguments):
        raise ValueError(f"kwargs: expected an object for each of {len(names)} instructions, got {len(arguments)}")
    kept = []
    for name, given in zip(names, arguments, strict=True):
        if not isinstance(name, str) or not isinstance(given, Mapping | None):
            raise ValueError("instruction_id_list and kwargs: expected texts and objects")
        # The hub's rows name every argument, null where an instruction has none of that name.
        kept.append({key: value for key, value in (given or {}).items() if value is not None})
        reason = find_absent(name, kept[-1])
        absent[name] = absent.get(name) or reason
    return IfevalCase(
        id=f"{NAME}-{row['key']}",
        category=CATEGORY,
        prompt=Conversation((Message("user", row["prompt"]),), source=f"{TITLE} {row['key']}"),
        expected=(),
        names=tuple(names),
        arguments=tuple(kept),
    )
