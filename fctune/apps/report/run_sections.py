"""Sections of a run's page: success criteria, setup, events, time, evaluations, data and rollouts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.apps.report.eval_page import FACETS, make_case
from fctune.calls.metrics import rate
from fctune.config.intervals import format_count
from fctune.config.recipes import find_recipe
from fctune.config.sections.data import CHANGES
from fctune.pages.page import (
    NO_WRAP,
    Cases,
    Cell,
    Chart,
    Fold,
    Group,
    Heading,
    Interval,
    Link,
    Num,
    Page,
    Part,
    Series,
    Table,
    Tone,
    make_facts,
)
from fctune.pages.run_text import describe_method, format_bounds, format_number, format_seconds, format_value
from fctune.runs.figures import PART_DESCRIPTIONS, Figures
from fctune.runs.record import RunRecord
from fctune.runs.success import Criterion, CriterionStatus
from fctune.tasks.evaluation.accuracy import Accuracy
from fctune.tasks.evaluation.published import Published
from fctune.tasks.judge import is_valid
from fctune.tasks.opinions import Opinion, read_opinion, summarise_opinions

DATA_REPORT = "data_report.json"  # output of ``fctune data check --json``, if it was saved in the run directory

_NUM_SHOWN_STEPS = 6  # of which answers are shown
_STEP = re.compile(r'\{"step": (\d+),')
_MAX_CASES = 300
_MAX_EVENTS = 500
_MAX_OPEN_EVENTS = 30
_GATE_TONES: dict[str, Tone] = {"worse": "bad", "undecided": "warn", "safe": "good"}
_TONES: dict[CriterionStatus, Tone] = {"PASS": "good", "FAIL": "bad", "not measured": "warn"}
_REPORTED = ("rows", "conversations", "calls", "tools", "defects", "warnings", "duplicates", "near_duplicates")
_COUNTS = {
    "rows": "rows read",
    "invalid": "invalid rows, skipped",
    "overlong": "conversations dropped as too long",
    "cut": "conversations truncated",
    "split": "conversations divided into parts",
    "lost_turns": "turns too long for any part",
    "unsupervised": "conversations dropped, no supervised tokens",
    "changed": "conversations changed by data.augment",
    "added": "conversations added by data.augment",
    "replayed": "conversations of data.replay",
    "benchmark": "conversations of a benchmark, which the model must not be measured with",
    "supervised": "supervised tokens",
}


@dataclass(frozen=True, slots=True)
class GateResult:
    """The report of a run's gate, and where its page is.

    Attributes:
        report: Content of its ``gate.json``.
        page: Path of its page, relative to the page of the run.
    """

    report: Mapping[str, Any]
    page: str

    @property
    def tone(self) -> Tone:
        """Tone of the verdict."""
        return _GATE_TONES[self.report["verdict"]]

    @property
    def suites(self) -> set[str]:
        """Suites that it asked, whose mean over cases of all kinds says nothing."""
        return set(self.report["settings"]["cases_digests"])

    def describe(self) -> str:
        """Return the verdict in one sentence."""
        fallen = [str(line["title"]) for line in self.report["lines"] if line["verdict"] == "worse"]
        lines = f": {'; '.join(fallen)}" if fallen else ""
        blocked = " Blocked: fctune serve and fctune push refuse it." if self.report["is_blocked"] else ""
        return f"Gate: {self.report['verdict']}{lines}.{blocked}"


def add_gate(page: Page, gate: GateResult) -> None:
    """Add the lines of a gate, each before and after training, with a link to its page."""
    rows = [
        [
            Cell(line["verdict"], _GATE_TONES[line["verdict"]], NO_WRAP),
            Cell(line["title"], style="min-width:11em"),
            line["n"],
            f"{line['num_right_before'] / line['n']:.1%}",
            f"{line['num_right_after'] / line['n']:.1%}",
            line["note"],
        ]
        for line in gate.report["lines"]
    ]
    table = Table(["Verdict", "Line", Num("n"), Num("Before"), Num("After"), "Cases"], rows, is_stacked=True)
    link = Link("Page of the gate, with the answers that turned wrong and the remedies", gate.page)
    page.add_section("Gate", table, link, lead="Right items of each line, before and after training.")


def add_success(page: Page, criteria: Sequence[Criterion], suffix: str = "", is_over: bool = True) -> None:
    """Add the table of success criteria; for a run that is not over, with a note that they are provisional."""
    rows = [
        [
            Cell(one.status, classes=_TONES[one.status], style=NO_WRAP),
            Cell(one.name, style="min-width:6em"),
            Cell(one.threshold, style=NO_WRAP),
            Cell(one.detail, style="min-width:5em"),
        ]
        for one in criteria
    ]
    table = Table(["Status", "Criterion", "Threshold", "Result"], rows)
    lead = "" if is_over else "Provisional: the run has not ended."
    page.add_section(f"Success criteria{suffix}", table, lead=lead)


def add_setup(page: Page, record: RunRecord, suffix: str = "") -> None:
    """Add the model, data, command, machines and software versions of the run."""
    run, config = record.run, record.config
    data, versions = config.get("data", {}), run.get("versions", {})
    sources = [
        f"{source['path']}" + (f" x {source['weight']:g}" if source.get("weight", 1.0) != 1.0 else "")
        for source in data.get("sources", ())
    ]
    rows: list[list[object]] = [
        ["model", config.get("model", {}).get("path")],
        ["trained", describe_method(config.get("adapter")) if config else None],
        ["data", ", ".join(sources)],
        ["sequence length", data.get("seq_len")],
        ["global batch size", config.get("global_batch_size")],
        ["optimizer", format_value(config.get("optimizer")) if config else None],
        ["command", _format_command(record)],
        ["ranks", run.get("world_size")],
        ["device", run.get("device")],
        ["started", run.get("started_at")],
        ["ended or last write", record.ended_at.strftime("%Y-%m-%dT%H:%M:%SZ") if record.ended_at else None],
        ["git revision", run.get("git_revision")],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["directory", str(record.path)],
        ["profiles", _list_files(record.path, "profile/*.json.gz")],
        ["out-of-memory snapshots", _list_files(record.path, "out-of-memory-*.pickle")],
    ]
    facts = make_facts(row for row in rows if row[1] not in (None, ""))
    page.add_section(f"Setup{suffix}", facts, is_folded=bool(suffix))


def add_events(page: Page, record: RunRecord, suffix: str) -> None:
    """Add restarts, checkpoints, alerts, skipped updates and loss spikes, sorted by step."""
    events: list[tuple[int, str, str]] = []
    for segment in record.segments[1:]:
        ranks = f", {segment.world_size} rank{'s' * (segment.world_size > 1)}" if segment.world_size else ""
        at = f" at {segment.started_at:%Y-%m-%d %H:%M:%SZ}" if segment.started_at else ""
        events.append((segment.after_step, "restart", f"from {Path(segment.checkpoint or '').name}{ranks}{at}"))
    events += [(alert["step"], "alert", f"{alert['name']}: {alert.get('message', '')}") for alert in record.alerts]
    events += [(saved.step, "checkpoint", f"{saved.kind}, {saved.name}") for saved in record.checkpoints]
    losses = record.metrics.column("loss")
    for metric, meaning in (("is_skipped", "update skipped: not finite"), ("is_spike", "loss spike")):
        flags = record.metrics.column(metric)
        for step, flag, loss in zip(record.metrics.steps, flags, losses, strict=True):
            if flag:
                events.append((step, "step", f"{meaning}{'' if loss is None else f', loss {loss:.4f}'}"))
    if not events:
        return
    kept = events if len(events) <= _MAX_EVENTS else [e for e in events if e[1] != "step"][:_MAX_EVENTS]
    rows = [list(event) for event in sorted(kept, key=lambda event: event[0])]
    part: Part = Group([Table(["Step", "Event", "Details"], rows)], "events")
    if len(events) > _MAX_OPEN_EVENTS:
        rest = "" if kept is events else f", {len(rows):,} shown"
        part = Fold(f"{format_count(len(events), 'event')}{rest}", [part])
    page.add_section(f"Restarts, checkpoints and alerts{suffix}", part, is_folded=bool(suffix))


def add_time(page: Page, figures: Figures, suffix: str) -> None:
    """Add how the run's time was used, with GPU-hours and cost."""
    time = figures.time
    parts = {name: seconds for name, seconds in time.parts.items() if seconds > 0}
    if not parts:
        return
    total = time.elapsed_s or sum(parts.values())
    rows = [
        [PART_DESCRIPTIONS[name], format_seconds(seconds), f"{seconds / total:.1%}"] for name, seconds in parts.items()
    ]
    table = Table(["Use", Num("Time"), Num("Share")], rows)
    shares = [round(100 * seconds / total, 2) for seconds in parts.values()]
    chart = Chart("bars", list(parts), [Series("share of the time, %", shares)])
    if time.elapsed_s is None or time.goodput is None:
        lead = "Shares of the measured step time; the start or the end of the run was not recorded."
    else:
        lead = f"{format_seconds(time.elapsed_s)} from the first start to the end, goodput {time.goodput:.1%}"
        if time.gpu_hours is not None:
            lead += f", {format_number(time.gpu_hours)} GPU-hours"
            lead += " (one per rank)" if figures.cost is None else _describe_cost(figures, figures.cost)
        lead += ". Goodput is the share of the time spent on training steps that were kept."
    title = "Time" if figures.cost is None else "Time and cost"
    page.add_section(f"{title}{suffix}", chart, table, lead=lead)


def _describe_cost(figures: Figures, gpus: float) -> str:
    """Describe the cost of the GPU-hours, then the total with its parts."""
    price, currency, costs = figures.price, figures.currency, figures.costs
    listed = f" (list price of {price.date}, {price.source})" if price.source else ""
    text = f" at {price.price:g} {currency}: {gpus:,.2f} {currency}{listed}"
    if costs is None:
        return text
    nodes = f"{figures.num_nodes:,} x {figures.network_gib / figures.num_nodes:,.0f} GiB"
    parts = {
        "GPUs": costs.gpus,
        f"shared disk for its {figures.files_gib:,.2f} GiB of files": costs.shared_disk,
        f"network disks of {nodes}": costs.network_disks,
        f"traffic of its {figures.export_gib:,.2f} GiB of exports, published once,": costs.traffic,
    }
    known = [f"{name} {part:,.2f}" for name, part in parts.items() if part is not None]
    return f"{text}. Total {costs.total:,.2f} {currency} = {' + '.join(known)}" if len(known) > 1 else text


def add_accuracy(page: Page, accuracy: Accuracy) -> None:
    """Add the accuracy of one suite by category, compared with the base if it was evaluated, and the failures."""
    compared = {row.category: row for row in accuracy.compare()}
    bounds = Num("95 % interval")
    heads = ["Category", Num("n"), *([Num("Before"), bounds] if compared else [])]
    heads += [Num("After" if compared else "Correct"), bounds, "0 to 100 %"]
    heads += [Num("Difference"), bounds, Num("p")] if compared else []
    rows = []
    for category, after in accuracy.rates():
        cells: list[object] = [category, after["n"]]
        before = None
        if compared:
            row = compared[category]
            before = rate(row.num_right_before, row.n)
            cells += [f"{before['rate']:.1%}", format_bounds(before)]
        label = f"{after['rate']:.1%}, {format_bounds(after)}" + (f"; before {before['rate']:.1%}" if before else "")
        other = before["rate"] if before else None
        drawing = Interval(after["rate"], after["low"], after["high"], other, label, width_px=110)
        cells += [f"{after['rate']:.1%}", format_bounds(after), drawing]
        if compared:
            difference, low, high = row.difference
            p_value = "< 0.0001" if row.p_value < 0.0001 else f"{row.p_value:.4f}"
            cells += [f"{difference:+.1%}", f"{low:+.1%} to {high:+.1%}", p_value]
        rows.append(cells)
    lead = "Strict reading with Wilson intervals (dot and bar)."
    if compared:
        lead += " Before (ring) is the base on the same cases; differences are paired (Tango), p is McNemar's."
    table = Table(heads, rows, is_stacked=True)
    page.add_section(f"Tool-call accuracy: {accuracy.suite}", table, *_make_failures(accuracy), lead=lead)


def add_published(page: Page, published: Sequence[Published]) -> None:
    """Add the numbers of other packages' benchmarks as these packages scored them."""
    rows = [
        [one.benchmark, one.model or "unnamed", category, score.num_cases, f"{score.value:.1%}", "; ".join(one.notes)]
        for one in published
        for category, score in one.scores.items()
    ]
    heads = ["Benchmark", "Model", "Category", Num("n"), Num("Score"), "Notes"]
    lead = "Read from the result files of the benchmarks' own packages; nothing was asked or judged here."
    page.add_section("Published benchmarks", Table(heads, rows, is_stacked=True), lead=lead)


def add_data(page: Page, record: RunRecord, suffix: str = "") -> None:
    """Add the sources of the prepared set and the number of rows kept, dropped and supervised."""
    prepared = record.run.get("data")
    if not isinstance(prepared, dict):
        return
    rows: list[list[object]] = [["fingerprint", prepared.get("fingerprint")], ["prepared in", prepared.get("path")]]
    inputs = prepared.get("inputs", {})
    replayed = [("replayed source", source) for source in (inputs.get("replay") or {}).get("sources", ())]
    for name, source in [*(("source", source) for source in inputs.get("sources", ())), *replayed]:
        rows.append([name, f"{source.get('path')}, content {source.get('content', 'not hashed')}"])
    counts = _read_json(Path(str(prepared.get("path"))) / "meta.json").get("counts", {})
    counts |= {"benchmark": prepared.get("benchmark_rows", 0)}  # also if the prepared set is gone
    rows += [[_COUNTS.get(name, name), count] for name, count in counts.items() if count]
    for source in prepared.get("skipped", ()):
        rows.append(["skipped as invalid", f"{source['invalid']:,} of {source['rows']:,} rows of {source['path']}"])
        kinds = sorted(source["kinds"].items(), key=lambda item: -item[1])
        rows += [[f"skipped: {kind}", f"{count:,}, such as {source['examples'][kind]}"] for kind, count in kinds]
    for kind, made in prepared.get("augmented", {}).items():
        verb = "changed" if kind in CHANGES else "added"
        text = f"{made['made']:,} {verb}, {made['eligible']:,} of {made['rows']:,} rows eligible"
        lost = "; ".join(f"{reason}: {count:,}" for reason, count in made["left_out"].items())
        rows.append([f"augmented: {kind}", f"{text}; left out: {lost}" if lost else text])
    if secrets := prepared.get("secrets"):
        verb = "replaced by placeholders" if secrets["redacted"] else "found"
        rows.append(["rows with secrets", secrets["rows"]])
        rows += [[f"secrets {verb}: {kind}", count] for kind, count in secrets["kinds"].items()]
        rows += [["turns with placeholders, not supervised", secrets["turns"]]] if secrets["turns"] else []
    if report := _read_json(record.path / DATA_REPORT):
        rows += [[f"{DATA_REPORT}: {name.replace('_', ' ')}", report[name]] for name in _REPORTED if name in report]
    page.add_section(f"Data{suffix}", make_facts(rows), is_folded=bool(suffix))


def _make_failures(accuracy: Accuracy) -> list[Part]:
    failures = [row for row in accuracy.after.rows if not is_valid(row)]
    if not failures:
        return [Heading("Failures"), "None."]
    parts: list[Part] = [Heading(f"Failures: {len(failures):,}")]
    if len(failures) > _MAX_CASES:
        name = accuracy.after.path.name
        parts.append(f"The first {_MAX_CASES:,} of {len(failures):,} are shown; {name} contains all of them.")
    try:
        return [*parts, Cases([make_case(row) for row in failures[:_MAX_CASES]], FACETS)]
    except KeyError:  # results of an older version, whose rows have fewer fields
        rows = [[row["id"], row["category"], row["verdict"]] for row in failures[:_MAX_CASES]]
        return [*parts, Table(["Case", "Category", "Error"], rows)]


def _list_files(folder: Path, pattern: str) -> str:
    return ", ".join(sorted(str(file.relative_to(folder)) for file in folder.glob(pattern)))


def _format_command(record: RunRecord) -> str:
    """Return the command as it was given; where it was not recorded, an equivalent one."""
    if isinstance(argv := record.run.get("command"), list):
        return shlex.join(map(str, argv))
    if not record.config:
        return ""
    ranks = record.run.get("world_size") or 1
    command = f"tune run --nproc_per_node {ranks} recipes/{find_recipe(record.config)} --config FILE"
    return f"not recorded; equivalent, with the config below as FILE: {command}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def add_rollouts(page: Page, record: RunRecord, suffix: str = "") -> None:
    """Add the time shares and examples of a run with rollouts; nothing for other runs."""
    if not record.metrics.has("generation_time_s"):
        return
    page.add_section(
        f"Time of learning from answers{suffix}",
        Table(["Part", Num("Seconds"), Num("Share of all steps")], _make_shares(record)),
        lead="Generation may overlap with training: what training waits for is the first line. Judging is a sum over "
        "ranks and part of generation.",
    )
    if record.metrics.has("judge_calls"):
        page.add_section(
            f"Judge{suffix}",
            Table(["Scores of answers in words", Num("Value")], _make_judge_rows(record)),
            lead="Exact verdicts come first. Where both exist, a score of at least a half counts as right; kappa is "
            "the agreement beyond chance.",
        )
    if examples := list(_iter_examples(record)):
        page.add_section(
            f"Answers over time{suffix}",
            Cases(examples, {"step": "Step", "reward": "Reward"}),
            lead="Of some steps, the best and the worst answer of one group.",
        )


def _make_shares(record: RunRecord) -> list[list[object]]:
    def total(name: str) -> float:
        return sum(value or 0.0 for value in record.metrics.column(name)) if record.metrics.has(name) else 0.0

    steps_s, waiting_s = total("step_time_s"), total("data_time_s")
    parts = {
        "waiting for answers": waiting_s,
        "training": steps_s - waiting_s,
        "generation and judging": total("generation_time_s"),
        "judging": total("judging_time_s"),
        "publishing the policy": total("publish_time_s"),
    }
    return [[name, f"{seconds:,.1f}", f"{seconds / steps_s:.2%}"] for name, seconds in parts.items()]


def _make_judge_rows(record: RunRecord) -> list[list[object]]:
    totals = summarise_opinions(_iter_opinions(record.files.rollouts))
    shown = {
        "answers asked about": "judge_calls",
        "answers whose score was known": "judge_cache_hits",
        "answers without a score": "judge_failures",
        "tokens": "judge_tokens",
        "answers with an exact verdict as well": "judge_compared",
    }
    rows: list[list[object]] = [[label, f"{totals[name]:,}"] for label, name in shown.items()]
    if "judge_agreement" in totals:
        rows.append(["agreement with exact verdicts", f"{totals['judge_agreement']:.1%}"])
    if "judge_kappa" in totals:
        rows.append(["Cohen's kappa", f"{totals['judge_kappa']:.2f}"])
    return rows


def _iter_opinions(path: Path) -> Iterator[Opinion]:
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                opinion = read_opinion(json.loads(line).get("opinion"))
            except ValueError:  # truncated by a kill
                continue
            if opinion is not None:
                yield opinion


def _iter_examples(record: RunRecord) -> Iterator[dict[str, Any]]:
    answered = [
        step
        for step, answers in zip(record.metrics.steps, record.metrics.column("answers"), strict=True)
        if answers is not None
    ]
    last = len(answered) - 1
    places = range(_NUM_SHOWN_STEPS) if answered else ()
    wanted = sorted({answered[round(i * last / (_NUM_SHOWN_STEPS - 1))] for i in places})
    for step, rows in _read_groups(record.files.rollouts, wanted).items():
        best = max(rows, key=lambda row: row["reward"])
        worst = min(rows, key=lambda row: row["reward"])
        for row in (best, worst) if worst["reward"] < best["reward"] else (best,):
            parts = ", ".join(f"{name} {value:g}" for name, value in row["parts"].items())
            yield {
                "title": f"step {step}, {row['case_id']}",
                "tags": [f"reward {row['reward']:g}", *(["cut off"] if row["is_cut"] else [])],
                "facets": {"step": str(step), "reward": f"{row['reward']:g}"},
                "parts": [
                    {"heading": "Answer", "text": row["text"] or row["error"] or "(empty)", "kind": "text"},
                    {"heading": "Parts of the reward", "text": parts, "kind": "text"},
                ],
            }


def _read_groups(path: Path, steps: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the first trained group of each step, without holding the complete log of answers in memory."""
    groups: dict[int, list[dict[str, Any]]] = {}
    if not path.is_file():
        return groups
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found = _STEP.match(line)
            if found is None or (step := int(found[1])) not in steps:
                continue
            try:
                row = json.loads(line)
            except ValueError:  # truncated by a kill
                continue
            group = groups.setdefault(step, [])
            if row["advantage"] is not None and (not group or group[0]["case_id"] == row["case_id"]):
                group.append(row)
    return {step: group for step, group in groups.items() if group}
