"""Measure a model on the cases of ``benchmarks.real_model``: in process, through a server, or served for it."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.real_public_sets import PUBLIC_CATEGORIES
from benchmarks.real_rows import in_share
from benchmarks.real_server import link_with_template, serve
from benchmarks.real_summary import read_answers
from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import CallFormat, Parsed
from fctune.calls.formats.registry import detect_format
from fctune.calls.judge import Judgement
from fctune.cli.eval_options import find_suite
from fctune.data.chat_template import ChatTemplate, MissingTemplateError
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.conversation import Message
from fctune.data.template_args import read_template_args
from fctune.engines.engine import Engine
from fctune.engines.http_client import RetryPolicy
from fctune.engines.server import ServerEngine
from fctune.models.hub import digest_model
from fctune.tasks.benchmarks.bfcl.prompt_answers import BfclAnswer, join_tuples
from fctune.tasks.benchmarks.bfcl.single_turn import Mode, read_system_prompt
from fctune.tasks.evaluation.results import ResultsFile, read_settings
from fctune.tasks.evaluation.results import read_rows as read_results
from fctune.tasks.evaluation.run import run_suite
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.judge import Row
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from fctune.tasks.task import Case

CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance"),
)
UNSEEN = "unseen_tools"
NAMES = (*CATEGORIES, UNSEEN, *PUBLIC_CATEGORIES, "smoke")
VALIDATION_SHARE = 0.2
SplitName = Literal["validation", "test"]
_CONCURRENCY = 16
_ANSWER_LIMIT_S = 1800.0  # a server that shares two cores is slow; an answer that comes late counts
_CHANGES = {
    "cases_digest": "other cases, as by --limit, --rows or --vllm",
    "max_new_tokens": "another --max-new-tokens",
    "measured": "another model, chat template or server",
}


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        model_dir: Its directory.
        template: The chat template in place of its own; None: its own.
        template_args: Switches of that template.
        server: A server that has the model already; None: it is loaded, or served.
    """

    model_dir: Path
    template: ChosenTemplate | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None

    def describe(self) -> dict[str, Any]:
        """Return what the answers depend on, besides the cases and the length of an answer."""
        if self.server is not None:
            return {"server": self.server}
        template = hashlib.blake2b(self.template.source.encode(), digest_size=8).hexdigest() if self.template else None
        return {
            "model_digest": digest_model(self.model_dir),
            "chat_template_digest": template,
            "template_args": dict(self.template_args),
        }


def prompted_as(model_dir: Path, tuned: Path) -> Subject:
    """Return a base model that is asked with the chat template, and its switches, of the model trained from it."""
    file = tuned / "chat_template.jinja"
    return Subject(model_dir, ChosenTemplate(str(file), file.read_text("utf-8")), read_template_args(tuned))


def has_own_template(model_dir: Path) -> bool:
    """Return True if a model comes with a chat template, as instruct models do."""
    try:
        ChatTemplate(model_dir)
    except MissingTemplateError:
        return False
    return True


def answers_dir(out: Path, split: SplitName) -> Path:
    """Return the directory of the answers; those of the test are where a run's report looks for evaluations."""
    return out / ("eval" if split == "test" else "validation")


def load_suites(
    folder: Path,
    split: SplitName,
    categories: Sequence[str] = (),
    limit: int | None = None,
    bfcl_data: str | None = None,
    has_plain_names: bool = False,
    mode: Mode = "tools",
) -> list[Suite]:
    """Load the cases to measure, in order: BFCL's categories and unseen tools, for the test also public sets and smoke.

    Args:
        folder: Where ``write_data`` wrote the cases; those of public sets are optional.
        split: Validation or test.
        categories: Names of what to measure; empty: everything.
        limit: Largest number of cases of each category.
        bfcl_data: The benchmark's data; None: that of the installed wheel.
        has_plain_names: Write underscores for dots in BFCL's names, as servers' protocols require.
        mode: Offer tools, or describe them in BFCL's own prompt for models without tool calls, which leaves smoke out.

    Raises:
        ConfigError: A public set is named whose cases were not written.
    """
    is_test = split == "test"
    suites = []
    for name in categories or NAMES:
        if name == "smoke":
            suites += [load_suite(find_suite("smoke"))] if is_test and mode == "tools" else []
        elif name in (UNSEEN, *PUBLIC_CATEGORIES):
            path = folder / f"{split if name == UNSEEN else name}.jsonl"
            if name in PUBLIC_CATEGORIES and not (is_test and path.is_file()):
                if name in categories:
                    raise ConfigError(f"--categories {name}: measured with --public-sets and --split test only.")
                continue
            suite = Suite(name, load_suite(path).cases).select(limit=limit)
            suites.append(suite if mode == "tools" else to_prompt_suite(suite))
        else:
            options = {"bfcl_data": bfcl_data, "bfcl_mode": mode}
            full = load_suite(find_suite("bfcl"), categories=[name], options=options, has_plain_names=has_plain_names)
            share = tuple(case for case in full.cases if in_share(case.id, VALIDATION_SHARE) != is_test)
            suite = Suite(name, share, full.benchmark, call_format=full.call_format)
            suites.append(suite.select(limit=limit))
    return suites


@dataclass(frozen=True)
class _PromptCase(Case):
    """A case asked by BFCL's prompt, whose answers may have Python's tuples for lists."""

    def judge(self, parsed: Parsed, decoded: Parsed | None = None) -> Judgement:
        """Judge one reading of an answer by the strict typed match."""
        calls = tuple(replace(call, arguments=join_tuples(call.arguments)) for call in parsed.calls)
        return super().judge(parsed._replace(calls=calls))


def to_prompt_suite(suite: Suite) -> Suite:
    """Return the cases of a suite as BFCL asks models without tool calls: tools in a system message, calls as text."""
    write, answer = read_system_prompt(), BfclAnswer()
    cases = []
    for case in suite.cases:
        system = write([tool.function for tool in case.prompt.tools])
        messages = list(case.prompt.messages)
        if messages[0].role == "system":
            system = f"{system}\n\n{messages.pop(0).content}"
        texts = (Message(m.role, answer.render(m.calls) if m.calls else m.content, name=m.name) for m in messages)
        prompt = replace(case.prompt, messages=(Message("system", system), *texts), tools=())
        cases.append(_PromptCase(case.id, case.category, prompt, case.expected))
    return Suite(suite.name, tuple(cases), suite.benchmark, call_format=answer)


def measure(subject: Subject, suites: Sequence[Suite], out: Path, arguments: argparse.Namespace) -> list[Row]:
    """Ask a model all cases and return the rows; answers that are there already are kept.

    Raises:
        ConfigError: The answers that are there are another model's, or to other cases.
    """
    measured = subject.describe()
    check_answers(suites, out, arguments.max_new_tokens, measured)
    if not is_measured(suites, out, arguments.max_new_tokens, measured):
        settings: dict[str, Any] = {"measured": measured}
        if subject.server is not None:
            _ask(suites, out, _connect(subject.server), None, settings, arguments)
        elif arguments.vllm is not None:
            served = link_with_template(subject.model_dir, subject.template, subject.template_args, out / "served")
            log = out / f"{out.name}.log"
            settings["model"] = str(subject.model_dir)  # not the address, as another --port serves the same
            with serve(served, arguments.vllm, arguments.vllm_options, arguments.port, log) as url:
                _ask(suites, out, _connect(url, log.stem), None, settings, arguments)
        else:
            from fctune.engines.local import LocalEngine

            engine = LocalEngine(
                subject.model_dir,
                batch_size=arguments.batch_size,
                chat_template=subject.template,
                template_args=dict(subject.template_args),
            )
            _ask(suites, out, engine, detect_format(engine.template.source), settings, arguments)
    for suite in suites:
        _write_summary(suite, ResultsFile(out / f"{suite.name}.jsonl"), subject)
    return read_answers(out, [suite.name for suite in suites])


def check_answers(suites: Sequence[Suite], out: Path, max_new_tokens: int, measured: Mapping[str, Any]) -> None:
    """Check that answers which are there already belong to these cases and this model.

    Args:
        suites: The cases.
        out: Where the answers are.
        max_new_tokens: Maximum length of an answer.
        measured: ``Subject.describe`` of the model; empty: not compared.

    Raises:
        ConfigError: They do not; says what differs.
    """
    for suite in suites:
        path = out / f"{suite.name}.jsonl"
        if path.is_file() and (changed := _find_changes(suite, path, max_new_tokens, measured)):
            raise ConfigError(
                f"{path}: contains answers of {'; '.join(changed)}. Pass another --out, or delete {out} to measure "
                "again."
            )


def is_measured(suites: Sequence[Suite], out: Path, max_new_tokens: int, measured: Mapping[str, Any]) -> bool:
    """Return True if every case has its answer by this model, so that none needs to be loaded."""
    for suite in suites:
        path = out / f"{suite.name}.jsonl"
        try:
            rows = read_results(path)
        except DataError:
            return False
        if read_settings(path) is None or _find_changes(suite, path, max_new_tokens, measured):
            return False
        if len(rows) < len(suite.all_cases) or any(row.get("error") is not None for row in rows):
            return False
    return True


def _find_changes(suite: Suite, path: Path, max_new_tokens: int, measured: Mapping[str, Any]) -> list[str]:
    """Return what answers on disk differ in from those asked for; nothing if their settings are not recorded."""
    found = read_settings(path)
    limit = _limit_answer(suite, max_new_tokens)
    expected: dict[str, Any] = {"cases_digest": suite.digest(), "max_new_tokens": limit}
    if measured:
        expected["measured"] = dict(measured)
    return [] if found is None else [_CHANGES[key] for key in expected if found.get(key) != expected[key]]


def _limit_answer(suite: Suite, max_new_tokens: int) -> int:
    """Return the maximum length of an answer: a benchmark's own limit may be longer."""
    return max(max_new_tokens, suite.max_new_tokens or 0)


def _connect(url: str, served_name: str | None = None) -> ServerEngine:
    retry_policy = RetryPolicy(timeout_s=_ANSWER_LIMIT_S)
    return ServerEngine(url, model=served_name, concurrency=_CONCURRENCY, retry_policy=retry_policy)


def _ask(
    suites: Sequence[Suite],
    out: Path,
    engine: Engine,
    call_format: CallFormat | None,
    settings: Mapping[str, Any],
    arguments: argparse.Namespace,
) -> None:
    for suite in suites:
        started = time.perf_counter()
        results = ResultsFile(out / f"{suite.name}.jsonl")
        limit = _limit_answer(suite, arguments.max_new_tokens)
        form = suite.call_format or call_format
        found = run_suite(suite, engine, form, results, max_new_tokens=limit, settings=settings)
        assert found is not None
        if num_missing := sum(row.get("error") is not None for row in found):
            raise ConfigError(
                f"{results.path}: {num_missing} of {len(found)} cases have no answer; the server did not give one. "
                "Re-run the same command to retry them."
            )
        print(f"{out.name}: {suite.name}: {len(found):,} cases in {time.perf_counter() - started:.0f} s", flush=True)


def _write_summary(suite: Suite, results: ResultsFile, subject: Subject) -> None:
    """Write what ``fctune report`` and ``fctune push`` read of an evaluation."""
    rows, settings = read_results(results.path), read_settings(results.path) or {}
    results.write_summary({"model": str(subject.model_dir), "adapter": None, **summarise_run(suite, rows, settings)})
