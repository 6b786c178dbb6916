"""What a run trained, on what: from its record, not from its metrics."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from fctune.report.page import Page, make_table
from fctune.report.run_data import RunRecord

DATA_REPORT = "data_report.json"  # of ``fctune data check --json``, where someone put it into the run's directory
_REPORTED = ("rows", "conversations", "calls", "tools", "defects", "warnings", "duplicates", "near_duplicates")
_COUNTS = {
    "rows": "rows read",
    "invalid": "rows skipped as invalid",
    "overlong": "conversations dropped, too long",
    "cut": "conversations cut",
    "unsupervised": "conversations dropped, nothing to learn",
    "supervised": "tokens that are learnt",
}


def add_subject(page: Page, record: RunRecord, suffix: str = "") -> None:
    """Adds what was trained on what, by which command and versions."""
    run, config = record.run, record.config
    data, versions = config.get("data", {}), run.get("versions", {})
    sources = [
        f"{source['path']}" + (f" x {source['weight']:g}" if source.get("weight", 1.0) != 1.0 else "")
        for source in data.get("sources", ())
    ]
    rows: list[list[object]] = [
        ["model", config.get("model", {}).get("path")],
        ["trained", _describe_method(config.get("adapter")) if config else None],
        ["data", ", ".join(sources)],
        ["tokens a row", data.get("seq_len")],
        ["rows a step", config.get("global_batch_size")],
        ["optimizer", tell_value(config.get("optimizer")) if config else None],
        ["command", _command(record)],
        ["ranks", run.get("world_size")],
        ["device", run.get("device")],
        ["started", run.get("started_at")],
        ["ended, or last written", record.ended_at.strftime("%Y-%m-%dT%H:%M:%SZ") if record.ended_at else None],
        ["git revision", run.get("git_revision")],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["directory", str(record.path)],
        ["profiles in it", _list(record.path, "profile/*.json.gz")],
        ["memory when it was full", _list(record.path, "out-of-memory-*.pickle")],
    ]
    said = [row for row in rows if row[1] not in (None, "")]
    page.add_section(f"What was trained{suffix}", _make_facts(said))


def add_data(page: Page, record: RunRecord, suffix: str = "") -> None:
    """Adds where the rows came from, and what became of them."""
    prepared = record.run.get("data")
    if not isinstance(prepared, dict):
        return
    rows: list[list[object]] = [["fingerprint", prepared.get("fingerprint")], ["prepared in", prepared.get("path")]]
    inputs = prepared.get("inputs", {})
    for source in inputs.get("sources", ()):
        rows.append(["source", f"{source.get('path')}, content {source.get('content', 'not hashed')}"])
    counts = _read_json(Path(str(prepared.get("path"))) / "meta.json").get("counts", {})
    rows += [[_COUNTS.get(name, name), count] for name, count in counts.items() if count]
    if report := _read_json(record.path / DATA_REPORT):
        rows += [[f"{DATA_REPORT}: {name.replace('_', ' ')}", report[name]] for name in _REPORTED if name in report]
    page.add_section(f"Data{suffix}", _make_facts(rows))


def tell_value(value: Any) -> str:
    """A value of a config to its last digit, as JSON where it is no text."""
    return value if isinstance(value, str) else json.dumps(value)


def _make_facts(rows: list[list[object]]) -> str:
    """HTML of a table of what there is to say, whose first column is of words that stay whole on a phone."""
    return f'<div class="facts">{make_table([("What", False), ("Value", False)], rows)}</div>'


def _describe_method(adapter: dict[str, Any] | None) -> str:
    if not adapter:
        return "all weights"
    kinds = [adapter.get("scaling", "standard"), *(["DoRA"] if adapter.get("dora") else [])]
    base = f", base in {adapter['base']}" if "base" in adapter else ""
    return f"LoRA, rank {adapter['rank']}, alpha {adapter['alpha']:g} ({', '.join(kinds)}){base}"


def _list(folder: Path, pattern: str) -> str:
    return ", ".join(sorted(str(file.relative_to(folder)) for file in folder.glob(pattern)))


def _command(record: RunRecord) -> str:
    """As it was given; for runs that have not kept it, one that is as good, over the config below."""
    if isinstance(argv := record.run.get("command"), list):
        return shlex.join(map(str, argv))
    if not record.config:
        return ""
    recipe = "lora_fc_distributed" if record.config.get("adapter") else "full_fc_distributed"
    ranks = record.run.get("world_size") or 1
    return f"not kept; as good: tune run --nproc_per_node {ranks} recipes/{recipe} --config FILE, with the config here"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
