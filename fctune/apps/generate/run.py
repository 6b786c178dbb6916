"""A run: rows are asked for in waves until each kind has its number, and each outcome is logged as it is known.

A wave's kinds depend on the outcomes of the waves before it, and outcomes count in the order of their plans, whatever
their order in the log. So the rows do not depend on the number of concurrent requests, and a killed run resumes with
its log alone, which may have gaps.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from fctune.apps.generate.dialogue import ListedValues, Outcome, Writer, list_values, read_made_row, write_row
from fctune.apps.generate.drafts import Drafter, list_unknown
from fctune.apps.generate.plan import Planner, RowPlan
from fctune.apps.generate.teacher import SERVER_FAILURES, Budget, Usage
from fctune.base.errors import ConfigError, Interrupted
from fctune.base.files import write_atomically
from fctune.base.terminal import Heartbeat
from fctune.config.intervals import format_count
from fctune.data.check.similarity import SeenTexts, WordHasher
from fctune.data.conversation import Tool
from fctune.data.secrets import SecretCounts, SecretScanner
from fctune.data.sources.row_builder import ParsedRow
from fctune.tasks.evaluation.results import ResultsFile, read_settings

Ending = Literal["complete", "budget", "unusable", "unreachable", "exhausted"]

WAVE = 64
_PATIENCE = 16  # outcomes after which a teacher that gave nothing is given up
# A kind gets at most this many plans for each row of it, and a few more.
_PLANS_PER_ROW = 4
_MORE_PLANS = 8
_NOT_THE_KINDS_FAULT = SERVER_FAILURES | {"budget"}
_JUDGED = frozenset({"kept", "near_duplicate", "invalid_row", "judged_bad", "judge_failed"})


@dataclass(slots=True)
class Report:
    """Counts of a run, those of earlier runs into the same file included.

    Attributes:
        wanted: Rows of each kind.
        kept: Rows that were kept, in order.
        verdicts: Number of outcomes by kind of row and verdict, ``kept`` included.
        fallen: Log rows of dropped outcomes.
        usage: What the requests for these rows took, and those for values.
        interrupted: What the requests for rows took that a Ctrl-C, a kill or the end of a run cut off.
        secrets: Secrets in the rows that were kept.
        redacted: Secrets that placeholders replace in them.
        ending: Why the run ended.
        problem: The commonest reason, if the teacher was given up.
        unlisted: Required parameters (``TOOL.NAME``) that neither the schema nor the teacher gave values for.
    """

    wanted: dict[str, int]
    kept: list[dict[str, Any]] = field(default_factory=list)
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    fallen: list[dict[str, Any]] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    interrupted: Usage = field(default_factory=Usage)
    secrets: SecretCounts = field(default_factory=SecretCounts)
    redacted: SecretCounts = field(default_factory=SecretCounts)
    ending: Ending = "complete"
    problem: str = ""
    unlisted: list[str] = field(default_factory=list)

    @property
    def asked(self) -> int:
        """Number of rows that the teacher was asked for: those kept and those dropped."""
        return sum(counts.total() for counts in self.verdicts.values())

    @property
    def spent(self) -> Usage:
        """Requests, tokens and cost of all rows, with those of rows that were cut off."""
        total = replace(self.usage)
        total.add(self.interrupted)
        return total

    def describe_secrets(self) -> list[str]:
        """Return counts of the secrets that were replaced, and of those that the rows have."""
        replaced = [self.redacted.describe(is_redacted=True)] if self.redacted.kinds else []
        return [*replaced, self.secrets.describe_with_option(is_redacted=False)]

    @property
    def dropped(self) -> Counter[str]:
        """Number of dropped rows by reason."""
        total = sum(self.verdicts.values(), Counter[str]())
        del total["kept"]
        return total

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {
            "asked": self.asked,
            "kept": len(self.kept),
            "dropped": dict(self.dropped),
            "kinds": {kind: {"wanted": wanted, **self.verdicts.get(kind, {})} for kind, wanted in self.wanted.items()},
            "usage": asdict(self.usage),
            "interrupted": asdict(self.interrupted),
            "secrets": self.secrets.to_json(),
            "redacted": self.redacted.to_json(),
            "ending": self.ending,
            "problem": self.problem,
            "unlisted": self.unlisted,
        }


def generate_rows(
    planner: Planner,
    writer: Writer,
    budget: Budget,
    num_rows: int,
    out: Path,
    *,
    concurrency: int = 16,
    drafts_requests: bool = False,
    settings: Mapping[str, Any] | None = None,
    is_fresh: bool = False,
    on_outcome: Callable[[Report], None] = lambda report: None,
    log: Callable[[str], None] = lambda line: None,
) -> Report:
    """Write rows to a file, and return what became of all that were asked for.

    The log, with its settings and summary, is in a directory next to the file. At the end, whatever ended the run, the
    file has the rows that were kept.

    Args:
        planner: Plans the rows.
        writer: Writes them.
        budget: Limits of the requests.
        num_rows: Rows to keep.
        out: JSONL file to write.
        concurrency: Rows that are written at the same time.
        drafts_requests: Draft the requests here, and let the teacher reword them.
        settings: Everything else that the rows depend on.
        is_fresh: Discard what earlier runs wrote.
        on_outcome: Called with the report after each row.
        log: Called with lines of progress, by any thread.

    Raises:
        ConfigError: The file has rows of other settings or of something else, or a server refuses every request.
        Interrupted: Ctrl-C, or SIGTERM where the caller raises it so.
    """
    results = ResultsFile(log_path(out))
    if out.exists() and not results.path.exists() and not is_fresh:
        raise ConfigError(
            f"--out {out}: exists, and no run of this command has written it. Pass --fresh to replace it."
        )
    values_path, usage_path = (log_path(out).with_name(name) for name in ("values.json", "usage.jsonl"))
    recorded = {"num": num_rows, **(settings or {})}
    # Other held-out files are no other rows: those that are there are checked against the present ones.
    earlier = None if is_fresh else read_settings(results.path)
    held_out = {"held_out": earlier["held_out"]} if earlier is not None and "held_out" in earlier else {}
    logged = results.start({**recorded, **held_out}, is_fresh)
    if held_out:
        write_atomically(results.settings_path, json.dumps(recorded, indent=2, ensure_ascii=False) + "\n")
    run = _Run(planner, writer, budget, results, planner.split(num_rows), on_outcome, log)
    budget.log = log
    try:
        if is_fresh:
            values_path.unlink(missing_ok=True)
            usage_path.unlink(missing_ok=True)
        run.open_budget(usage_path, values_path, logged)
        if drafts_requests:
            run.list_values(values_path, concurrency)
        rows = f"writing {format_count(num_rows, 'row')} for {format_count(len(planner.tools), 'tool')}"
        log(f"{rows}, {concurrency:,} at a time" + (f"; {len(logged):,} outcomes of an earlier run" if logged else ""))
        with Heartbeat(log, run.describe_progress):
            run.run(concurrency, logged)
    except KeyboardInterrupt:
        kept = len(run.report.kept)
        raise Interrupted(f"{kept:,} rows in {out}; run the same command to resume") from None
    finally:
        run.stop()
        results.close()
        run.report.interrupted = budget.used.subtract(run.report.usage)
        _write_rows(out, run.report.kept)
        results.write_summary(run.report.to_json())
        results.finish(sorted(run.ids, key=int))
    return run.report


def log_path(out: Path) -> Path:
    """Return the log of the run that writes a file."""
    return out.with_suffix(".generate") / "log.jsonl"


class _Run:
    def __init__(
        self,
        planner: Planner,
        writer: Writer,
        budget: Budget,
        results: ResultsFile,
        wanted: dict[str, int],
        on_outcome: Callable[[Report], None],
        log: Callable[[str], None],
    ):
        self._planner, self._writer, self._budget, self._results = planner, writer, budget, results
        self._on_outcome, self._log_line = on_outcome, log
        self._uncounted = Counter[str]()  # verdicts of rows that wait for those before them
        self._seen = SeenTexts(WordHasher())
        self._new: list[str] = []  # verdicts of this run
        self._scanner = SecretScanner() if writer.redactor is None else writer.redactor.scanner
        self.report = Report(wanted, secrets=SecretCounts(searched=list(self._scanner.kinds)))
        self.ids: set[str] = set()  # of the lines in the log
        self._counted: set[str] = set()

    def open_budget(self, path: Path, values_path: Path, logged: Mapping[str, Mapping[str, Any]]) -> None:
        """Take up what earlier runs used, and record what this one uses in a file, which a kill leaves complete.

        The log alone lacks the requests for rows that were cut off.
        """
        known = Usage()
        for row in logged.values():
            known.add(Usage(**row["usage"]))
        if values_path.is_file():
            known.add(Usage(**json.loads(values_path.read_text(encoding="utf-8"))["usage"]))
        known.add(_read_usage(path).subtract(known))
        self._budget.used.add(known)
        write_atomically(path, _to_line(self._budget.used))

        def record(used: Usage) -> None:
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(_to_line(used))
            except OSError as error:
                raise ConfigError(f"{path}: cannot be written ({error.strerror}).") from None

        self._budget.on_use = record

    def list_values(self, path: Path, concurrency: int) -> None:
        """Let the teacher list values that the schemas do not give, unless a file of an earlier run has them."""
        unknown = list_unknown(self._planner.tools)
        if not path.is_file():
            lists = self._ask_for_lists(unknown, concurrency)
            usage = Usage()
            for found in lists:
                usage.add(found.usage)
            listed: dict[str, Any] = {
                "values": [[tool.name, name, found.values] for (tool, name), found in zip(unknown, lists, strict=True)],
                "usage": asdict(usage),
            }
            if all(found.is_final for found in lists):
                write_atomically(path, json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
        else:
            listed = json.loads(path.read_text(encoding="utf-8"))
        self.report.usage.add(Usage(**listed["usage"]))
        self.report.unlisted = [f"{tool}.{name}" for tool, name, values in listed["values"] if not values]
        self._writer = replace(self._writer, drafter=Drafter({(tool, name): v for tool, name, v in listed["values"]}))

    def _ask_for_lists(self, unknown: Sequence[tuple[Tool, str]], concurrency: int) -> list[ListedValues]:
        parameters = format_count(len(unknown), "parameter")
        self._log_line(f"listing values for {parameters}" if unknown else "no parameter needs listed values")
        asked: list[Future[ListedValues]] = []

        def describe() -> str:
            done = f"values of {sum(one.done() for one in asked):,} of {parameters} listed"
            return ", ".join(filter(None, (done, self._budget.describe_waiting())))

        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="values")
        try:
            with Heartbeat(self._log_line, describe):
                for tool, name in unknown:
                    asked.append(pool.submit(list_values, self._writer.teacher, self._planner.seed, tool, name))
                return [one.result() for one in asked]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def describe_progress(self) -> str:
        """Return the number of kept rows, why others fell, and the requests that wait, on one line."""
        verdicts = Counter(dict(self._uncounted))  # copies, since another thread counts meanwhile
        for counts in list(self.report.verdicts.values()):
            verdicts.update(dict(counts))
        verdicts = +verdicts
        kept = verdicts.pop("kept", 0)
        reasons = ", ".join(f"{name} {count:,}" for name, count in verdicts.most_common())
        fell = f"{verdicts.total():,} fell" + (f" ({reasons})" if reasons else "")
        total = sum(self.report.wanted.values())
        return ", ".join(filter(None, (f"kept {kept:,} of {total:,}", fell, self._budget.describe_waiting())))

    def stop(self) -> None:
        """Send no more requests, and start no more attempts."""
        self._budget.is_stopped = True
        for asker in (self._writer.teacher, self._writer.judge):
            if asker is not None:
                asker.engine.stop()

    def run(self, concurrency: int, logged: Mapping[str, Mapping[str, Any]]) -> None:
        """Ask for rows until the run ends; sets how it ended in the report."""
        self.ids |= logged.keys()
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="generate")
        index = wave = 0
        try:
            while missing := self._find_missing():
                size = min(WAVE, sum(missing.values()))
                kinds = self._choose_kinds(missing, range(index, index + size), wave, logged)
                plans = [self._planner.plan(i, kind) for i, kind in kinds.items()]
                if (ending := self._run_wave(pool, plans, logged)) is not None:
                    self.report.ending = ending
                    return
                index, wave = index + size, wave + 1
            verdicts = self.report.verdicts
            if any(verdicts.get(kind, Counter())["kept"] < wanted for kind, wanted in self.report.wanted.items()):
                self.report.ending = "exhausted"
        finally:
            for line in logged.values():
                if line["id"] not in self._counted:  # it is not needed, as more rows before it are kept by now
                    self.report.usage.add(Usage(**line["usage"]))
            self.stop()
            pool.shutdown(wait=False, cancel_futures=True)

    def _choose_kinds(
        self, missing: Mapping[str, int], indices: Sequence[int], wave: int, logged: Mapping[str, Mapping[str, Any]]
    ) -> dict[int, str]:
        """Return the kinds of the next rows by their numbers; rows in the log have the kinds that they had.

        Those differ from the planned ones if rows of earlier waves were kept, and are held out by now.
        """
        planned = dict(zip(indices, self._planner.choose_kinds(missing, len(indices), wave), strict=True))
        known = {i: str(logged[str(i)]["category"]) for i in indices if str(i) in logged}
        if planned == {**planned, **known}:
            return planned
        counts = Counter(known.values())
        lacking = {kind: max(number - counts[kind], 0) for kind, number in missing.items()}
        free = [i for i in indices if i not in known][: sum(lacking.values())]
        others = self._planner.choose_kinds(lacking, len(free), wave) if free else []
        return dict(sorted({**known, **dict(zip(free, others, strict=True))}.items()))

    def _find_missing(self) -> dict[str, int]:
        """Return the rows that each kind still lacks, without kinds that have used up their plans."""
        missing = {}
        for kind, wanted in self.report.wanted.items():
            verdicts = self.report.verdicts.get(kind, Counter())
            num_plans = sum(count for verdict, count in verdicts.items() if verdict not in _NOT_THE_KINDS_FAULT)
            if verdicts["kept"] < wanted and num_plans < _PLANS_PER_ROW * wanted + _MORE_PLANS:
                missing[kind] = wanted - verdicts["kept"]
        return missing

    def _run_wave(
        self, pool: ThreadPoolExecutor, plans: Sequence[RowPlan], logged: Mapping[str, Mapping[str, Any]]
    ) -> Ending | None:
        """Take the outcomes of plans from the log or the teacher; returns how the run ends, None if it goes on."""
        known: dict[int, dict[str, Any] | None] = {
            plan.index: dict(logged[str(plan.index)]) for plan in plans if str(plan.index) in logged
        }
        waiting = deque(plan.index for plan in plans)
        futures = {pool.submit(write_row, plan, self._writer): plan.index for plan in plans if plan.index not in known}
        try:
            self._count_next(waiting, known, logged)
            for future in as_completed(futures):
                known[futures[future]] = self._log(future.result())
                if (ending := self._count_next(waiting, known, logged)) is not None:
                    return ending
        finally:
            # Rows that were finished behind an unfinished one count as well when the run ends.
            for future, index in futures.items():
                if index not in known and future.done() and not future.cancelled() and future.exception() is None:
                    known[index] = self._log(future.result())
            for index in waiting:
                if (line := known.get(index)) is not None:
                    self._count(line, is_new=line["id"] not in logged)
        return "budget" if futures and self._budget.spent is not None and self._find_missing() else None

    def _log(self, outcome: Outcome) -> dict[str, Any] | None:
        """Append an outcome to the log, and return its line; None if the teacher was not asked."""
        if outcome.verdict == "budget" and not outcome.usage.requests:
            return None
        line = _to_log(outcome)
        self._results.append(line)
        self.ids.add(line["id"])
        self._uncounted[line["verdict"]] += 1
        return line

    def _count_next(
        self,
        waiting: deque[int],
        known: Mapping[int, dict[str, Any] | None],
        logged: Mapping[str, Mapping[str, Any]],
    ) -> Ending | None:
        """Count outcomes as far as they are known without a gap; returns how the run ends, None if it goes on."""
        while waiting and waiting[0] in known:
            line = known[waiting.popleft()]
            if line is None:
                continue
            is_new = line["id"] not in logged
            self._count(line, is_new)
            if is_new:
                self._on_outcome(self.report)
                if (ending := self._judge_teacher()) is not None:
                    return ending
        return None

    def _count(self, line: dict[str, Any], is_new: bool) -> None:
        report = self.report
        if is_new:
            self._uncounted[line["verdict"]] -= 1
        line = self._settle(line, is_new)
        self._counted.add(line["id"])
        report.verdicts.setdefault(line["category"], Counter())[line["verdict"]] += 1
        report.usage.add(Usage(**line["usage"]))
        if line["verdict"] == "kept":
            report.kept.append(line["row"])
            self._count_secrets(line["row"])
        else:
            report.fallen.append(line)
        if is_new:
            self._new.append(line["verdict"])

    def _count_secrets(self, row: Mapping[str, Any]) -> None:
        if (mark := row["metadata"].get("redacted")) is not None:
            self.report.redacted.add(SecretCounts(1, mark["kinds"]))
        read = read_made_row(row)
        if isinstance(read, ParsedRow):
            self.report.secrets.count(self._scanner.locate(read))

    def _settle(self, line: dict[str, Any], is_new: bool) -> dict[str, Any]:
        """Return the line of a row with the verdict that it has now; the log gets it if it is another than before.

        The verdict follows from the rows before it, which may be more once gaps are filled, and from the present
        held-out files. So the log has the row whatever the verdict.
        """
        if line["row"] is None:
            return line
        verdict, reason = "kept", ""
        if not is_new and self._writer.held_out.has(line["requests"]):
            verdict, reason = "held_out", "it is in a file of --held-out"
        elif (earlier := self._seen.add(" ".join(line["requests"]))) is not None:
            verdict, reason = "near_duplicate", f"of the request of kept row {earlier + 1}"
        if (verdict, reason) != (line["verdict"], line["reason"]):
            line = {**line, "verdict": verdict, "reason": reason}
            self._results.append(line)
        return line

    def _judge_teacher(self) -> Ending | None:
        """Return the ending if the teacher has given nothing in this run, or a server does not answer any more."""
        if len(self._new) < _PATIENCE:
            return None
        # A row that fell before the judge read it does not show that the judge answers.
        answering = None if self._writer.judge is None else SERVER_FAILURES | _JUDGED
        told = (verdict for verdict in reversed(self._new) if answering is None or verdict in answering)
        latest = list(islice(told, _PATIENCE))
        is_gone = len(latest) == _PATIENCE and SERVER_FAILURES.issuperset(latest)
        if not is_gone and "kept" in self._new:
            return None
        failed = (line for line in reversed(self.report.fallen) if not is_gone or line["verdict"] in SERVER_FAILURES)
        recent = list(islice(failed, _PATIENCE))
        verdict, count = Counter(line["verdict"] for line in recent).most_common(1)[0]
        reason = next(line["reason"] for line in recent if line["verdict"] == verdict)
        self.report.problem = f"{verdict}, {count} of the last {len(recent)}: {reason}"
        return "unreachable" if is_gone else "unusable"


def _to_log(outcome: Outcome) -> dict[str, Any]:
    return {
        "id": str(outcome.plan.index),
        "category": outcome.plan.kind,
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "requests": list(outcome.requests),
        "usage": asdict(outcome.usage),
        "row": outcome.row if outcome.verdict == "kept" else None,
    }


def _to_line(usage: Usage) -> str:
    return json.dumps(asdict(usage)) + "\n"


def _read_usage(path: Path) -> Usage:
    """Return the total that a run recorded last; a line that a kill cut off is ignored."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return Usage(**json.loads(lines[-1])) if lines else Usage()


def _write_rows(out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    try:
        write_atomically(out, "".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}).") from None
