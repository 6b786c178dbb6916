"""Run the gate: ask both models, judge the lines, write the report, and mark or clear the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fctune import __version__
from fctune.apps.gate.history import TrainingHistory, find_history
from fctune.apps.gate.lines import JudgedLine, Line, judge_lines
from fctune.apps.gate.models import GateModel, ServerGoneError, open_models
from fctune.apps.gate.outcomes import make_lines
from fctune.apps.gate.page import Answers, write_gate_html
from fctune.apps.gate.plan import Plan, make_plan
from fctune.apps.gate.remedies import combine, find_remedies, make_commands
from fctune.apps.gate.report import NO_LINE, GateReport
from fctune.apps.gate.served import ask_served, check_servers, find_ignored, make_tables
from fctune.base.errors import ConfigError, DataError
from fctune.config.intervals import format_count
from fctune.config.sections.gate import GateConfig
from fctune.engines.model_files import is_on_disk
from fctune.runs.release import mark_not_released, read_mark, remove_mark
from fctune.tasks.evaluation.held_out import HELD_OUT_FILE, find_run
from fctune.tasks.evaluation.results import ResultsError
from fctune.tasks.judge import Row
from fctune.tasks.task import Case

logger = logging.getLogger("fctune")

_NUM_SHOWN = 5


def run_gate(
    base: str,
    tuned: str,
    out: str | Path,
    *,
    cases: str | Path | None = None,
    rows: Sequence[str] = (),
    config: GateConfig | None = None,
    base_name: str | None = None,
    tuned_name: str | None = None,
    options: Mapping[str, Any] | None = None,
    is_fresh: bool = False,
    log: Callable[[str], None] = logger.info,
) -> GateReport:
    """Compare a result with its base, line by line; writes the report to ``out`` and marks or clears the result.

    Args:
        base: The base: a directory, a run, an adapter, ``hf:NAME``, or a server's address.
        tuned: The result, likewise.
        out: Directory of the report and the answers; the same call resumes there.
        cases: JSONL file of held-out cases; None: the config's, or those that the run of the result held out.
        rows: Sources of the training rows, to look for the cases and for what explains a fall; none: those of the run
            of the result.
        config: Settings; None: the defaults.
        base_name: Name under which a server serves the base; None: the only one.
        tuned_name: Name under which a server serves the result.
        options: Options of the benchmarks, such as ``bfcl_data``.
        is_fresh: Discard answers of an earlier gate in ``out``.
        log: Called with lines on the progress.

    Raises:
        ConfigError: A model is missing, the chat templates differ, ``out`` has answers with other settings, or a server
            stops answering.
        DataError: The cases cannot be read, none is left, or the result was trained on some of them.
    """
    config = config or GateConfig()
    folder = Path(out)
    before, after = open_models(base, tuned, config, base_name, tuned_name)
    check_servers((before, after), config)
    path = _find_cases(cases or config.cases, tuned)
    plan, warnings = make_plan(path, config, options or {}, before.has_server or after.has_server)
    history = find_history(tuned, rows)
    if before.has_server or after.has_server:
        warnings.append("a server does not tell its chat template, so those of base and result are not compared")
    if plan.held_out is not None:
        warnings += _check_leaks(plan.held_out.given, path, tuned, history)
    answers = {model.side: _ask(model, plan, config, folder, is_fresh, log) for model in (before, after)}
    for name in answers[before.side].keys() - answers[after.side].keys():  # of a benchmark that only the base answered
        del answers[before.side][name]
    warnings += [_tell_kept(model) for model in (before, after) if model.num_kept]
    lines, not_run, missing = make_lines(plan, answers[before.side], answers[after.side])
    judged, commands = _judge(lines, config.accepted_fall, history, folder)
    blind = [f"{line.line.name}: {why}" for line in judged if (why := line.blindness or line.shortage) is not None]
    tables = make_tables(answers[before.side], answers[after.side])
    settings = _describe(config, path, plan)
    still_blocking = _find_still_blocking(tuned, judged)
    stopped = [
        f"{line['title']}: {line['verdict']} in an earlier gate of this result, and {line['reason']}, so that it still "
        "blocks"
        for line in still_blocking
    ]
    warnings = [*stopped, *blind, *warnings, *missing, *find_ignored(answers)]
    report = GateReport(
        base, tuned, tuple(judged), not_run, settings, tuple(warnings), commands, tables, still_blocking
    )
    _publish(report, answers, folder, tuned)
    return report


def _ask(
    model: GateModel, plan: Plan, config: GateConfig, folder: Path, is_fresh: bool, log: Callable[[str], None]
) -> dict[str, dict[str, Row]]:
    """Return a model's rows by suite and case; a benchmark that it cannot be asked is taken out of the plan."""
    asked: dict[str, dict[str, Row]] = {}
    try:
        if plan.held_out is not None:
            asked[plan.held_out.suite.name] = model.ask(plan.held_out.suite, config, folder, is_fresh, log)
            asked |= ask_served(model, plan.held_out, config, folder, is_fresh, log, plan.not_run)
        for sample, suite in list(plan.samples):
            try:
                asked[suite.name] = model.ask(suite, config, folder, is_fresh, log)
            except (ResultsError, ServerGoneError):  # no reason to leave a benchmark out
                raise
            except (ConfigError, DataError) as error:
                plan.samples.remove((sample, suite))
                plan.not_run[sample.name] = f"{model.side}: {' '.join(str(error).split())}"
    finally:
        model.close()
    return asked


def _tell_kept(model: GateModel) -> str:
    count = format_count(model.num_kept, "answer is", "answers are")
    return (
        f"{model.side}: {count} of an earlier gate, and {model.model} does not tell its weights: if they have changed "
        "since, pass --fresh"
    )


def _judge(
    lines: Sequence[Line], tolerance: float, history: TrainingHistory | None, folder: Path
) -> tuple[list[JudgedLine], tuple[str, ...]]:
    """Judge the lines; returns them with remedies for falls, and the command that treats the worse ones (or all)."""
    judged = judge_lines(lines, tolerance)
    if not any(line.has_fallen for line in judged):
        return judged, ()
    profile = history.profile() if history is not None else None
    if profile is not None:
        profile.base_reasons = any(line.name == "reasoning" for line in lines)
        for line in lines:
            if line.name == "over_refusing":
                profile.called_share = sum(outcome.after for outcome in line.outcomes) / len(line.outcomes)
    judged = [replace(one, remedies=find_remedies(one, profile)) if one.has_fallen else one for one in judged]
    worse = [one for one in judged if one.verdict == "worse"]
    return judged, tuple(make_commands(combine(worse or judged), history, folder))


def _find_cases(named: str | Path | None, tuned: str) -> Path | None:
    """Return the file of held-out cases; None if none is named and the result is of no run that held some out."""
    if named is not None:
        return Path(named)
    run = find_run(Path(tuned)) if is_on_disk(tuned) else None
    return found if run is not None and (found := run / HELD_OUT_FILE).is_file() else None


def _check_leaks(cases: Sequence[Case], path: Path | None, tuned: str, history: TrainingHistory | None) -> list[str]:
    """Refuse held-out cases that the result was trained on; returns warnings about what cannot be compared."""
    if history is None:
        return [f"{tuned}: its training rows are not known, so the held-out cases may be among them; name them: --rows"]
    found, similar, unread = history.find_cases(cases)
    if found:
        more = ", ..." if len(found) > _NUM_SHOWN else ""
        raise DataError(
            f"{path}: {len(found):,} of {format_count(len(cases), 'case')} are in the training rows of "
            f"{history.source}: {', '.join(found[:_NUM_SHOWN])}{more}. A gate needs cases that the result has not "
            "seen: take them out of the file, or split the rows with fctune data cases --test FILE and train again."
        )
    warnings = [f"{source}: cannot be compared with the held-out cases ({why})" for source, why in unread.items()]
    if similar:
        count = format_count(similar, "held-out question nearly repeats", "held-out questions nearly repeat")
        warnings.append(f"{count} a training row, so the lines of held-out cases are optimistic")
    return warnings


def _describe(config: GateConfig, path: Path | None, plan: Plan) -> dict[str, Any]:
    return {
        "fctune": __version__,
        "cases": None if path is None else str(path),
        "cases_digests": {suite.name: suite.digest() for suite in plan.suites},
        "tolerance": config.accepted_fall,
        "thorough": config.thorough,
        "require_safe": config.require_safe,
        "max_cases": config.line_size,
        "max_tokens": config.max_tokens,
        "max_new_tokens": config.max_new_tokens,
        "chat_template": config.chat_template,
        "temperature": config.temperature,
        "seed": config.seed,
    }


def _publish(report: GateReport, answers: Answers, folder: Path, tuned: str) -> None:
    """Write the report and its page, and mark the result or remove its mark."""
    try:
        path = report.write(folder)
        if is_on_disk(tuned):  # before the page, without which the result is marked all the same
            if report.is_blocked:
                counts = {line["name"]: line.get("n", 0) for line in read_mark(tuned) or ()}
                kept = {line["name"]: line for line in report.still_blocking}
                lines = {line.line.name: _describe_line(line, counts) for line in report.blocking}
                if report.has_no_line and report.settings["require_safe"]:
                    lines[NO_LINE] = {"name": NO_LINE, "title": "no line of the gate ran", "verdict": "undecided"}
                mark_not_released(tuned, list((lines | kept).values()), path)
            else:
                remove_mark(tuned)
        write_gate_html(report, answers, folder / "gate.html")
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written ({error.strerror}).") from None


def _describe_line(line: JudgedLine, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return a line for the mark, with the larger of its own number of items and that of an earlier mark."""
    name = line.line.name
    n = max(line.comparison.n, counts.get(name, 0))
    return {"name": name, "title": line.line.title, "verdict": line.verdict, "n": n}


def _find_still_blocking(tuned: str, judged: Sequence[JudgedLine]) -> tuple[dict[str, Any], ...]:
    """Return the lines for which an earlier gate marked the result and which this one does not clear, with the reason.

    A line is cleared if it is safe, or not worse on at least as many items: fewer would clear what they cannot see.
    """
    lines, kept = {line.line.name: line for line in judged}, list[dict[str, Any]]()
    for marked in (read_mark(tuned) if is_on_disk(tuned) else None) or ():
        line, num_before = lines.get(marked["name"]), marked.get("n")
        if marked["name"] == NO_LINE and judged:
            continue
        if line is None:
            kept.append({**marked, "reason": "not run in this one"})
        elif line.verdict == "undecided" and (num_before is None or line.comparison.n < num_before):
            before = "" if num_before is None else f", which had {num_before:,}"
            count = format_count(line.comparison.n, "item")
            kept.append({**marked, "reason": f"undecided on {count} in this one{before}"})
    return tuple(kept)
