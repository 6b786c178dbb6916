"""The page of runs shows the numbers of their files, and a browser renders it."""

from __future__ import annotations

import html
import json
import re
import shutil
import statistics
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.report.run_page import write_run_html
from fctune.apps.report.run_sections import GateResult
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.success import SuccessConfig
from fctune.runs.alerts import Alert
from fctune.runs.directory import RunDirectory
from fctune.runs.figures import Pricing, describe_run
from fctune.runs.prices import read_prices
from fctune.runs.record import read_run
from fctune.runs.sinks import AlertMonitor
from fctune.runs.success import judge_run
from fctune.tasks.evaluation.accuracy import find_accuracies, list_totals
from fctune.tasks.evaluation.paired import compare_rows
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from tests.conftest import ROOT
from tests.pages.browser import BINARY, check_fit, needs_chromium, open_page, open_page_often, take_screenshot
from tests.runs.sample_runs import (
    change_run,
    make_config,
    make_run,
    render_correct,
    tear,
    write_results,
    write_steps,
)

HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror=alert(1)>&amp;'


@pytest.fixture(scope="module")
def smoke() -> Suite:
    return load_suite(ROOT / "eval" / "suites" / "smoke.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, smoke: Suite) -> Path:
    """Write a run with a restart, an alert, a checkpoint, and evaluations before and after."""
    root = tmp_path_factory.mktemp("runs")
    path = root / "mine"
    tear(make_run(path, 500, code=None, success=SuccessConfig()))
    change_run(RunDirectory(path), started_at="2026-01-01T00:00:00Z")
    directory = RunDirectory(path)
    directory.resume(make_config(path, success=SuccessConfig()), 2, 480, path / "checkpoints" / "checkpoint-480", [])
    write_steps(directory, 481, 900)
    directory.describe(num_steps=900)
    directory.finish(0, "completed", 900)
    (path / "checkpoints" / "checkpoint-480").mkdir(parents=True)
    (path / "checkpoints" / "checkpoint-480" / "_SUCCESS").write_text("x")
    AlertMonitor(path).alert(Alert("data_wait", 333, 0.2, 0.1, f"waiting {HOSTILE}"))
    wrong = ["<tool_call>{", "No.", *render_correct(smoke)[2:]]
    mostly = [text.replace("Ana", HOSTILE.replace('"', "'")) for text in render_correct(smoke)]
    write_results(path / "eval" / "tuned.jsonl", smoke, mostly, str(path / "export" / "merged"))
    write_results(root / "eval" / "base" / "smoke.jsonl", smoke, wrong, "models/base")
    return path


def write_page(runs: list[Path], out: Path, price: float | None = None, prices: Path | None = None) -> str:
    records = [read_run(path) for path in runs]
    accuracies = [find_accuracies(record) for record in records]
    verdicts = [judge_run(r, None, list_totals(a), records) for r, a in zip(records, accuracies, strict=True)]
    write_run_html(records, out, accuracies, verdicts, Pricing(price, prices))
    return out.read_text("utf-8")


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_page([run], out, price=2.5)
    return out


@pytest.fixture(scope="module")
def page_of_two(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("other")
    make_run(root / "theirs", 300, scale=0.5, seed=7, adapter=AdapterConfig(rank=32, alpha=16.0))
    write_page([run, root / "theirs"], root / "report.html")
    return root / "report.html"


def charts_of(text: str) -> dict[str, dict[str, Any]]:
    """Return the charts of a page by title."""
    found = re.findall(
        r'aria-label="([^"]*)"></canvas></div><script type="application/json" data-chart="[^"]*">(.*?)</', text
    )
    return {html.unescape(title): json.loads(spec) for title, spec in found}


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def cells_of(text: str, title: str) -> list[list[str]]:
    """Return the rows of the first table in a section."""
    section = text[text.index(f"<h2>{title}") :]
    body = re.search(r"<tbody>(.*?)</tbody>", section, re.DOTALL)
    assert body
    rows = re.findall(r"<tr>(.*?)</tr>", body[1], re.DOTALL)
    return [[html.unescape(re.sub("<[^>]*>", "", c)) for c in re.findall(r"<td.*?>(.*?)</td>", r)] for r in rows]


def test_every_drawn_point_is_in_the_file(page: Path, run: Path) -> None:
    by_step = {line["step"]: line for line in lines_of(run)}
    charts = charts_of(page.read_text("utf-8"))
    names = {
        "Throughput": ("tokens_per_s",),
        "Step time": ("step_time_s", "data_time_s", "save_wait_s"),
        "Memory": ("peak_memory_gib", "peak_memory_max_gib", "memory_reserved_gib", "memory_active_gib"),
        "GPU utilization": ("gpu_utilization", "gpu_utilization_min"),
        "Model FLOPs utilization": ("mfu",),
        "Hottest GPU": ("gpu_temperature_c",),
        "Power of all GPUs": ("gpu_power_w",),
        "Gradient norm": ("grad_norm",),
        "Learning rate": ("lr",),
        "Slowest rank": ("compute_skew",),
    }
    assert set(charts) - {"Run: mine", "Loss"} == set(names)
    for title, metrics in names.items():
        for metric, series in zip(metrics, charts[title]["series"], strict=True):
            drawn = dict(zip(charts[title]["labels"], series["values"], strict=True))
            assert {by_step[step].get(metric) == value for step, value in drawn.items()} == {True}, metric
            every = [line[metric] for line in by_step.values() if metric in line]
            assert {min(every), max(every)} <= set(series["values"])
    smoothed, raw, validation = charts["Loss"]["series"]
    assert [raw["is_faint"], smoothed["is_faint"], validation["is_faint"]] == [True, False, False]
    drawn = dict(zip(charts["Loss"]["labels"], raw["values"], strict=True))
    assert {by_step[step].get("loss") == value for step, value in drawn.items()} == {True}
    drawn = validation["values"]
    assert [value for value in drawn if value is not None] == [
        line["validation_loss"] for line in by_step.values() if "validation_loss" in line
    ]


@pytest.mark.parametrize(("device", "has_hours"), [("cpu, 2 cores", False), ("NVIDIA H100", True)])
def test_a_run_on_cpus_has_neither_gpu_hours_nor_a_cost(device: str, has_hours: bool, tmp_path: Path) -> None:
    for name in ("a", "b"):
        change_run(make_run(tmp_path / name, 5, price_per_gpu_hour=2.0, currency="EUR"), device=device)
    single = write_page([tmp_path / "a"], tmp_path / "a.html")
    assert ("<span>GPU-hours</span>" in single) == has_hours
    for text in (single, write_page([tmp_path / "a", tmp_path / "b"], tmp_path / "b.html")):
        shown = re.sub(r"<script.*?</script>|<details>.*?</details>", "", text, flags=re.DOTALL)
        assert ("GPU-hours" in shown) == has_hours
        assert bool(re.search(r"[\d.]+ EUR", shown)) == has_hours


def test_a_short_run_beside_a_long_one_has_a_logarithmic_axis_of_steps(tmp_path: Path) -> None:
    for name, num_steps in (("long", 1000), ("short", 50), ("middle", 300)):
        make_run(tmp_path / name, num_steps)
    unequal = charts_of(write_page([tmp_path / "long", tmp_path / "short"], tmp_path / "a.html"))
    assert all(chart["is_log_labels"] for chart in unequal.values() if chart["kind"] == "lines")
    alike = charts_of(write_page([tmp_path / "long", tmp_path / "middle"], tmp_path / "b.html"))
    assert not any(chart["is_log_labels"] for chart in alike.values())


def test_figures_are_computed_from_the_file(page: Path, run: Path) -> None:
    text, lines = page.read_text("utf-8"), lines_of(run)
    for figure, what in (
        ("900", "steps"),
        (f"{statistics.fmean(line['loss'] for line in lines[-20:]):.4f}", "loss, mean of the last 20 steps"),
        (f"{lines[899]['validation_loss']:.4f}", "validation loss, latest"),
        (f"{statistics.median(line['tokens_per_s'] for line in lines):,.0f}", "tokens/s, median"),
        (f"{max(line['peak_memory_max_gib'] for line in lines if 'gpu_hours' in line):.2f} GiB", "peak memory"),
        (f"{statistics.fmean(x['gpu_utilization'] for x in lines if 'gpu_hours' in x):.1%}", "GPU utilization, mean"),
        ("50.0% \u2192 75.0%", "correct of 4 cases, smoke, before and after training"),
    ):
        assert f'<b class="">{figure}</b><span>{what}</span>' in text
    assert text.index("before and after training</span>") < text.index("<span>steps</span>")
    assert "Completed after step 900 of 900." in text


def test_restarts_checkpoints_and_alerts_are_marked(page: Path) -> None:
    text = page.read_text("utf-8")
    for title, chart in charts_of(text).items():
        due = {(480, "restart"), (480, "checkpoint")} if chart["kind"] == "lines" else set()
        due |= {(333, "alert")} if title == "Step time" else set()
        assert {(mark["at"], mark["kind"]) for mark in chart["marks"]} == due, title
    events = cells_of(text, "Restarts, checkpoints and alerts")
    assert [event[:2] for event in events] == [["333", "alert"], ["480", "restart"], ["480", "checkpoint"]]
    assert "from checkpoint-480, 2 ranks at 20" in events[1][2]


def test_accuracies_before_and_after_are_those_of_the_results(page: Path, run: Path, smoke: Suite) -> None:
    text = page.read_text("utf-8")
    shown = {row[0]: row for row in cells_of(text, "Tool-call accuracy: smoke")}
    (accuracy,) = find_accuracies(read_run(run))
    assert accuracy.before is not None
    compared = compare_rows(accuracy.before.rows, accuracy.after.rows)
    assert set(shown) == {row.category for row in compared}
    for row in compared:
        difference, low, high = row.difference
        cells = shown[row.category]
        assert cells[1] == str(row.n)
        assert (cells[2], cells[4]) == (f"{row.num_right_before / row.n:.1%}", f"{row.num_right_after / row.n:.1%}")
        assert cells[-3:-1] == [f"{difference:+.1%}", f"{low:+.1%} to {high:+.1%}"]
    assert shown["all"][2:6] == ["50.0%", "15.0% - 85.0%", "75.0%", "30.1% - 95.4%"]
    assert [case["title"].split(":")[0] for case in failures_in(text)] == [smoke.cases[1].id]


def test_the_page_of_a_judged_run_begins_with_the_gate_and_has_no_mean_of_its_cases(run: Path, tmp_path: Path) -> None:
    line = {"name": "calls", "verdict": "safe", "title": "calls", "n": 40, "note": ""}
    lines = [
        line | {"num_right_before": 0, "num_right_after": 38},
        line | {"title": "over-calling", "verdict": "worse", "num_right_before": 40, "num_right_after": 4},
    ]
    report = {"verdict": "worse", "is_blocked": True, "lines": lines, "settings": {"cases_digests": {"smoke": "x"}}}
    record, out = read_run(run), tmp_path / "report.html"
    write_run_html([record], out, [find_accuracies(record)], gate=GateResult(report, "gate/gate.html"))
    text = out.read_text()
    assert "Gate: worse: over-calling. Blocked: fctune serve and fctune push refuse it. Completed" in text
    assert text.index("<h2>Gate") < text.index('href="gate/gate.html"') < text.index('class="tiles"')
    assert [row[2:5] for row in cells_of(text, "Gate")] == [["40", "0.0%", "95.0%"], ["40", "100.0%", "10.0%"]]
    assert "correct of" not in text
    write_run_html([record], out, [find_accuracies(record)])
    assert "correct of" in out.read_text()


def test_results_of_an_earlier_run_in_the_same_directory_are_ignored(smoke: Suite, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    make_run(path, 3)
    write_results(
        tmp_path / "eval" / "mine" / "smoke.jsonl", smoke, render_correct(smoke), str(path / "export" / "merged")
    )
    assert len(find_accuracies(read_run(path))) == 1
    later = (datetime.now(UTC) + timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    RunDirectory(path).start(make_config(path), 2)
    change_run(RunDirectory(path), started_at=later)
    assert (tmp_path / "mine.1").is_dir()
    assert find_accuracies(read_run(path)) == []
    (criterion,) = (one for one in judge_run(read_run(path)) if one.name == "tool-call accuracy")
    assert criterion.status == "not measured"


def test_a_copied_run_keeps_the_results_inside_it_and_takes_no_others(smoke: Suite, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    make_run(path, 3)
    model = str(Path(make_config(path).output_dir) / "export" / "merged")
    write_results(path / "eval" / "smoke.jsonl", smoke, render_correct(smoke), model)
    write_results(tmp_path / "eval" / "mine" / "other.jsonl", smoke, render_correct(smoke), model)
    shutil.move(path, tmp_path / "copies" / "mine")
    (accuracy,) = find_accuracies(read_run(tmp_path / "copies" / "mine"))
    assert accuracy.after.path == tmp_path / "copies" / "mine" / "eval" / "smoke.jsonl"
    (tmp_path / "copies" / "mine").rename(tmp_path / "copy")
    (accuracy,) = find_accuracies(read_run(tmp_path / "copy"))
    assert accuracy.after.path == tmp_path / "copy" / "eval" / "smoke.jsonl"


@pytest.mark.parametrize(
    "summary", ["{", "[]", '{"model": 5, "suite": "x"}', '{"model": "a", "adapter": 5, "suite": 1}']
)
def test_other_summary_files_are_ignored(summary: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    (tmp_path / "run" / "x.summary.json").write_text(summary)
    (tmp_path / "run" / "x.jsonl").write_text("{}\n")
    assert find_accuracies(read_run(tmp_path / "run")) == []


def failures_in(text: str) -> list[dict[str, Any]]:
    start = text.index("data-cases>") + len("data-cases>")
    found: list[dict[str, Any]] = json.loads(text[start : text.index("</script>", start)])
    return found


def test_the_setup_shows_model_data_command_and_versions(run: Path, tmp_path: Path) -> None:
    text = write_page([run], tmp_path / "a.html")
    rows = dict(row[:2] for row in cells_of(text, "Setup"))
    assert rows["model"] == "models/base"
    assert rows["trained"] == "LoRA, rank 8, alpha 16 (standard)"
    assert rows["data"] == "synthetic:train:100:1"
    assert rows["ranks"] == "2"
    kept = json.loads((run / "run.json").read_text())
    assert all(f"{name} {version}" in rows["versions"] for name, version in kept["versions"].items())
    assert rows["command"].startswith("not recorded; equivalent, with the config below as FILE: tune run ")
    assert "--nproc_per_node 2 recipes/lora_fc_distributed --config FILE" in rows["command"]


def test_profiles_and_memory_snapshots_are_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    for name in ("profile/rank-0.steps-2-3.trace.json.gz", "out-of-memory-rank-1.pickle"):
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_bytes(b"")
    rows = dict(row[:2] for row in cells_of(write_page([tmp_path / "run"], tmp_path / "a.html"), "Setup"))
    assert rows["profiles"] == "profile/rank-0.steps-2-3.trace.json.gz"
    assert rows["out-of-memory snapshots"] == "out-of-memory-rank-1.pickle"


def test_the_default_price_is_the_configs(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 30, price_per_gpu_hour=3.0)
    change_run(directory, started_at="2026-01-01T00:00:00Z", finished_at="2026-01-01T01:00:00Z")
    assert "2 GPU-hours at 3 USD: 6.00 USD." in write_page([tmp_path / "run"], tmp_path / "a.html")
    assert "2 GPU-hours at 1.5 USD: 3.00 USD." in write_page([tmp_path / "run"], tmp_path / "b.html", price=1.5)


def test_the_cost_is_gpu_hours_times_price(run: Path, page: Path) -> None:
    text = page.read_text("utf-8")
    hours = re.search(r"([\d,.]+) GPU-hours at 2.5 USD: ([\d,.]+) USD\.", text)
    assert hours
    assert float(hours[2].replace(",", "")) == pytest.approx(2.5 * float(hours[1].replace(",", "")), rel=1e-3)
    shares = [float(row[2].rstrip("%")) for row in times_of(text)]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_the_cost_counts_both_disks_and_the_traffic_at_given_prices(tmp_path: Path) -> None:
    """Ten hours on two nodes: the parts add up, and list prices count in their own currency only."""
    ten_hours = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T10:00:00Z"}
    for name, currency in (("usd", "USD"), ("eur", "EUR")):
        directory = make_run(tmp_path / name, 30, price_per_gpu_hour=3.0, currency=currency)
        directory.describe(hosts=["n0", "n1"])
        change_run(directory, **ten_hours)
        export = tmp_path / name / "export" / "merged"
        export.mkdir(parents=True)
        with open(export / "model.safetensors", "wb") as file:
            file.truncate(2 << 30)  # no space on disk
    # Of the 730 hours of a month, ten.
    prices = tmp_path / "prices.yaml"
    prices.write_text("shared_gib_month: 73\nnetwork_gib_month: 0.73\negress_gib: 0.5\n")
    text = write_page([tmp_path / "usd"], tmp_path / "a.html", prices=prices)
    assert (
        "20 GPU-hours at 3 USD: 60.00 USD. Total 103.00 USD = GPUs 60.00 + shared disk for its 2.00 GiB of files 2.00 "
        "+ network disks of 2 x 2,000 GiB 40.00 + traffic of its 2.00 GiB of exports, published once, 1.00."
    ) in text
    assert "Total 103.00 EUR = " in write_page([tmp_path / "eur"], tmp_path / "b.html", prices=prices)
    assert "60.00 EUR. Goodput" in write_page([tmp_path / "eur"], tmp_path / "c.html")
    prices.write_text("egress_gib: 0.5\n")
    partly = write_page([tmp_path / "eur"], tmp_path / "d.html", prices=prices)
    assert "Total 61.00 EUR = GPUs 60.00 + traffic of its 2.00 GiB of exports, published once, 1.00." in partly


@pytest.mark.parametrize(
    ("device", "listed"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA H100 PCIe", None), ("NVIDIA A100", None)],
)
def test_a_run_without_a_price_is_counted_at_the_list_price_of_its_gpus(
    device: str, listed: str | None, tmp_path: Path
) -> None:
    an_hour = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T01:00:00Z"}
    change_run(make_run(tmp_path / "run", 30), device=device, **an_hour)
    text = write_page([tmp_path / "run"], tmp_path / "a.html")
    if listed is None:
        assert "(one per rank)" in text
        return
    price = read_prices().gpu_hour[listed]
    assert f" at {price.price:g} USD: " in text
    assert f"(list price of {price.date}, {price.source})" in text


@pytest.mark.parametrize(
    ("device", "key", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090", 0.5),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 0.5),
        ("NVIDIA A100-SXM4-40GB", "a100", 0.5),
        ("NVIDIA GH200 480GB", "gh200", 0.5),
        ("NVIDIA H100 80GB HBM3", "H100", 0.5),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100", None),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090", None),
    ],
)
def test_gpus_are_priced_by_the_name_that_their_driver_reports(
    device: str, key: str, expected: float | None, tmp_path: Path
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text(f"gpu_hour: {{{key}: 0.5}}\n")
    change_run(make_run(tmp_path / "run", 30), device=f"{device}, compute capability 8.9")
    assert describe_run(read_run(tmp_path / "run"), Pricing(prices_file=prices)).price.price == expected


def times_of(text: str) -> list[list[str]]:
    """Return the table of times, the second of its section after the chart's numbers."""
    section = text[text.index("<h2>Time and cost") :]
    return cells_of("<h2>x" + section[section.index("</details>") :], "x")


def test_several_runs_are_compared_with_their_config_differences(page_of_two: Path, run: Path) -> None:
    text = page_of_two.read_text("utf-8")
    theirs = page_of_two.parent / "theirs"
    by_step = [{line["step"]: line for line in lines_of(path)} for path in (run, theirs)]
    chart = charts_of(text)["Gradient norm"]
    assert [series["name"] for series in chart["series"]] == ["mine", "theirs"]
    for lines, series in zip(by_step, chart["series"], strict=True):
        known = {s: v for s, v in zip(chart["labels"], series["values"], strict=True) if v is not None}
        assert {lines[step]["grad_norm"] == value for step, value in known.items()} == {True}
        assert {min(known), max(known)} == {1, len(lines)}
        assert len(known) >= 200
    differ = {row[0]: row[1:] for row in cells_of(text, "Config differences")}
    assert differ == {"adapter.rank": ["8", "32"], "seed": ["42", "7"]}
    side = {row[0]: row[1:] for row in cells_of(text, "Comparison")}
    assert side["steps"] == ["900", "300"]
    assert side["tool-call accuracy, smoke"] == ["75.0% (30.1% - 95.4%)", ""]


def test_config_values_are_shown_exactly(tmp_path: Path) -> None:
    for name, lr in (("a", 0.00012345), ("b", 0.00012346)):
        make_run(tmp_path / name, 5, seed=20260101, optimizer={"lr": lr}, epochs=1000)
    text = write_page([tmp_path / "a", tmp_path / "b"], tmp_path / "two.html")
    differ = {row[0]: row[1:] for row in cells_of(text, "Config differences")}
    assert differ == {"optimizer.lr": ["0.00012345", "0.00012346"]}
    config = dict(cells_of(write_page([tmp_path / "a"], tmp_path / "one.html"), "Config"))
    assert (config["seed"], config["epochs"], config["optimizer.lr"]) == ("20260101", "1000", "0.00012345")


def test_runs_of_the_same_name_are_distinguished_by_path(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make_run(tmp_path / folder / "x", 5)
    text = write_page([tmp_path / "a" / "x", tmp_path / "b" / "x"], tmp_path / "out.html")
    assert f"2 runs: {tmp_path / 'a' / 'x'}, {tmp_path / 'b' / 'x'}" in text
    assert "<p>Only output_dir differs.</p>" in text


@pytest.mark.parametrize(
    ("code", "due"),
    [
        (None, "At step 5 of 5: still running, or killed."),
        (1, "Failed with code 1 after step 5 of 5: rank 0: ValueError: no"),
        (0, "Completed after step 5 of 5."),
    ],
)
def test_the_headline_is_the_outcome(code: int | None, due: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", 5, code=code)
    assert f">{due}</p>" in write_page([tmp_path / "run"], tmp_path / "a.html")


@pytest.mark.parametrize("code", [None, 0])
def test_criteria_of_an_unfinished_run_are_marked_provisional(code: int | None, tmp_path: Path) -> None:
    make_run(tmp_path / "run", 5, code=code)
    text = write_page([tmp_path / "run"], tmp_path / "a.html")
    assert "<h2>Success criteria</h2>" in text
    assert ("Provisional: the run has not ended." in text) is (code is None)


def test_a_multi_line_reason_is_summarized_and_shown_in_full(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 5, code=None)
    directory.finish(2, "66 of 400 rows cannot be trained on\n  a.jsonl:3: <292> tokens\nFix the rows.", 5)
    text = write_page([tmp_path / "run"], tmp_path / "a.html")
    assert ">Failed: invalid config or data: 66 of 400 rows cannot be trained on</p>" in text
    assert "<pre>66 of 400 rows cannot be trained on\n  a.jsonl:3: &lt;292&gt; tokens\nFix the rows.</pre>" in text


def test_the_comparison_gives_every_line_of_a_reason_and_folds_what_belongs_to_one_run(tmp_path: Path) -> None:
    make_run(tmp_path / "good", 5, code=0)
    make_run(tmp_path / "bad", 5, code=None).finish(1, "the checkpoint cannot be written:\n  No space left.", 5)
    text = write_page([tmp_path / "good", tmp_path / "bad"], tmp_path / "a.html")
    outcomes = {row[0]: row[1:] for row in cells_of(text, "Comparison")}["outcome"]
    assert outcomes[1].endswith("the checkpoint cannot be written: No space left.")
    assert "<details><summary><h2>Setup: good</h2></summary>" in text
    assert "<h2>Setup</h2>" in write_page([tmp_path / "good"], tmp_path / "b.html")


def test_runs_with_few_records_have_pages(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "empty").start(make_config(tmp_path / "empty"), 1)
    assert "contains no steps" in write_page([tmp_path / "empty"], tmp_path / "a.html")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n{"st')
    text = write_page([tmp_path / "old"], tmp_path / "b.html")
    assert "the last line is incomplete" in text
    assert charts_of(text).keys() >= {"Loss"}
    assert charts_of(text)["Loss"]["series"][0]["values"] == [2.5, 2.25]
    assert "2 runs" in write_page([tmp_path / "old", tmp_path / "empty"], tmp_path / "c.html")


def test_a_saved_data_check_is_on_the_page(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 5)
    change_run(directory, data={"path": str(tmp_path / "set"), "fingerprint": "abc", "inputs": {}})
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "meta.json").write_text('{"counts": {"rows": 123, "invalid": 4, "cut": 0}}')
    (tmp_path / "run" / "data_report.json").write_text('{"rows": 123, "defects": 4, "near_duplicates": 9}')
    rows = cells_of(write_page([tmp_path / "run"], tmp_path / "a.html"), "Data")
    assert ["invalid rows, skipped", "4"] in rows
    assert "conversations truncated" not in {row[0] for row in rows}
    assert ["data_report.json: near duplicates", "9"] in rows


def test_rows_skipped_as_invalid_are_on_the_page_by_kind_with_an_example(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 5)
    skipped = {"path": "a.jsonl", "rows": 1200, "invalid": 3, "kinds": {"not_json": 1, "unknown_role": 2}}
    skipped["examples"] = {"not_json": "a.jsonl:9: not JSON", "unknown_role": "a.jsonl:2: messages[1].role: 'robot'"}
    change_run(directory, data={"path": str(tmp_path / "set"), "fingerprint": "abc", "skipped": [skipped]})
    rows = cells_of(write_page([tmp_path / "run"], tmp_path / "a.html"), "Data")
    assert ["skipped as invalid", "3 of 1,200 rows of a.jsonl"] in rows
    assert rows[-2:] == [
        ["skipped: unknown_role", "2, such as a.jsonl:2: messages[1].role: 'robot'"],
        ["skipped: not_json", "1, such as a.jsonl:9: not JSON"],
    ]


@pytest.mark.parametrize(("is_redacted", "verb"), [(False, "found"), (True, "replaced by placeholders")])
def test_secrets_of_the_rows_are_on_the_page_by_kind(is_redacted: bool, verb: str, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 5)
    secrets = {"rows": 2, "turns": 3, "kinds": {"github_token": 4, "named_secret": 1}, "redacted": is_redacted}
    change_run(directory, data={"path": str(tmp_path / "set"), "fingerprint": "abc", "secrets": secrets})
    rows = cells_of(write_page([tmp_path / "run"], tmp_path / "a.html"), "Data")
    assert rows[-4:] == [
        ["rows with secrets", "2"],
        [f"secrets {verb}: github_token", "4"],
        [f"secrets {verb}: named_secret", "1"],
        ["turns with placeholders, not supervised", "3"],
    ]


@needs_chromium
@pytest.mark.parametrize("which", ["page", pytest.param("page_of_two", marks=pytest.mark.slow)])
def test_a_browser_shows_it_without_errors_or_network(which: str, request: pytest.FixtureRequest) -> None:
    for state in check_fit(request.getfixturevalue(which)):
        assert state.probe["inked"]
        assert "Loss" in state.probe["text"]


@needs_chromium
def test_names_in_the_setup_do_not_break_on_a_phone(page: Path) -> None:
    act = """
    const lines = (cell) => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      return range.getClientRects().length;
    };
    const words = [...document.querySelectorAll(".facts td:first-child")].filter((td) => !td.innerText.includes(" "));
    const cut = words.filter((td) => lines(td) > 1).map((td) => td.innerText);
    document.querySelector("main").prepend(`${words.length} words, cut: ${cut.join()}.`);
    """
    assert re.match(r"[1-9]\d* words, cut: \.", open_page(page, 390, act=act).probe["text"])


@needs_chromium
def test_marks_are_drawn_at_their_steps(run: Path, tmp_path: Path) -> None:
    write_page([run], tmp_path / "a.html")
    act = """
    const bad = (r, g, b) => Math.abs(r - 179) < 40 && Math.abs(g - 38) < 40 && Math.abs(b - 30) < 40;
    const [chart] = Object.values(Chart.instances);
    const { ctx, canvas, chartArea: area, scales: { x } } = chart;
    const scale = canvas.width / chart.width;
    const column = (step) => {
      const place = Math.round(x.getPixelForValue(step) * scale);
      const { data } = ctx.getImageData(place - 2, area.top * scale, 5, (area.bottom - area.top) * scale);
      let count = 0;
      for (let i = 0; i < data.length; i += 4) count += data[i + 3] > 150 && bad(data[i], data[i + 1], data[i + 2]);
      return count > 20;
    };
    document.querySelector("main").prepend(`restart at 480: ${column(480)}, at 700: ${column(700)}.`);
    """
    state = open_page(tmp_path / "a.html", act=act)
    assert "restart at 480: true, at 700: false." in state.probe["text"]


@needs_chromium
def test_printing_uses_the_light_theme_and_restores_the_screens(page: Path, tmp_path: Path) -> None:
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text("utf-8"), "utf-8")
    acts = [f'dispatchEvent(new Event("{name}print"));' for name in ("before", "after")]
    on_paper, restored = open_page_often(copy, dark=True, acts=(acts[0], "".join(acts)))
    assert (on_paper.probe["theme"], on_paper.console) == ("light", [])
    assert restored.probe["theme"] == "dark"


@needs_chromium
def test_it_prints(page: Path, tmp_path: Path) -> None:
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text("utf-8"), "utf-8")
    assert BINARY is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--virtual-time-budget=5000", f"--print-to-pdf={tmp_path / 'page.pdf'}", copy.as_uri()]
    subprocess.run([BINARY, *options], check=True, capture_output=True, timeout=120)
    pdf = (tmp_path / "page.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 3


@needs_chromium
def test_a_screenshot_shows_the_page(page: Path, tmp_path: Path) -> None:
    take_screenshot(page, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
