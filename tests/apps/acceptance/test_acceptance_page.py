"""The HTML page, the table and the comparison of acceptance results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fctune.apps.acceptance.checks import judge_run
from fctune.apps.acceptance.config import AcceptanceConfig, FaultConfig, ThresholdConfig
from fctune.apps.acceptance.metrics import CHECKS
from fctune.apps.acceptance.page import write_acceptance_html
from fctune.apps.acceptance.result import make_result, read_result, read_schema, write_result
from fctune.apps.acceptance.watch import EarlyEnd
from fctune.base.errors import ConfigError
from fctune.cli import main
from tests.apps.acceptance.samples import HOSTS, all_pairs, collectives, healthy
from tests.pages.browser import check_fit, needs_chromium, open_page, open_page_often, take_screenshot

HOSTILE = "</script><img src=x onerror=alert(1)>"


def make(samples: dict[str, Any], ending: EarlyEnd | None = None, **changes: Any) -> dict[str, Any]:
    config = AcceptanceConfig(output_dir="x", device="cuda", required=list(CHECKS))
    config.collectives.judged_mib = 1.0
    config.thresholds = {
        "matmul_bf16_tflops": ThresholdConfig(fail=600.0, warn=650.0, source=HOSTILE),
        "pair_spread": ThresholdConfig(fail=0.5, source="as it should be"),
    }
    for key, value in changes.items():
        setattr(config, key, value)
    hosts = {rank: hello["host"] for rank, hello in samples.get("hello", {}).items()}
    checks = judge_run(config, samples, hosts, 2, 4, ending)
    made = make_result(config, checks, samples, world_size=4, ranks_per_node=2, started_at=0.0, seconds=100.0)
    jsonschema.validate(made, read_schema())
    return json.loads(json.dumps(made))


def broken() -> dict[str, Any]:
    samples = healthy()
    samples["compute"][2]["products"]["bf16"]["tflops"] = 500.0
    samples["hello"][1]["host"] = samples["hello"][0]["host"] = HOSTILE
    samples["pairs"] = all_pairs({(0, 3): 0.2})
    return samples


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "acceptance.html"
    write_acceptance_html(make(broken(), faults=[FaultConfig(kind="slow_compute", rank=2)]), path)
    return path


def test_a_healthy_result_passes_and_does_not_depend_on_the_order_of_ranks() -> None:
    samples = healthy()
    shuffled = {phase: dict(reversed(list(by_rank.items()))) for phase, by_rank in samples.items()}
    assert make(samples)["verdict"] == "PASS"
    assert json.dumps(make(samples)) == json.dumps(make(shuffled))


def test_a_size_measured_for_one_collective_only_does_not_end_the_lines_of_the_others(page: Path) -> None:
    charts = [json.loads(found) for found in re.findall(r"data-chart=[^>]*>([^<]*)<", page.read_text("utf-8"))]
    assert charts
    for chart in charts:
        assert chart["is_log_size"], "the axis shows sizes, not their logarithms"
        assert all(series["is_sparse"] for series in chart["series"])


@needs_chromium
def test_the_page_fits_desktop_and_phone_in_light_and_dark_without_external_resources(page: Path) -> None:
    assert all(len(state.probe["inked"]) == 2 for state in check_fit(page))


@needs_chromium
def test_the_page_lists_culprits_and_next_steps(page: Path) -> None:
    act = 'document.querySelectorAll("details").forEach((d) => { d.open = true; });'
    text, opened = (state.probe["text"] for state in open_page_often(page, acts=("", act)))
    assert "rank 2 (b): matmul_bf16_tflops 500" in text
    assert "link between ranks 0 and 3" in text
    assert "Next: Compare the GPU's clocks" in text
    assert "Injected fault: slow_compute on rank 2" in text
    assert text.count("onerror=alert(1)") >= 2
    assert ">= 600 (warns: 650)" in text
    assert "all_reduce\t0\t1\t0.5243\t0.5243\t2,000\t2,000" in opened


@needs_chromium
def test_blamed_devices_and_slow_pairs_are_marked(page: Path) -> None:
    act = """
    const cells = [...document.querySelectorAll("b.bad, b.good")].filter((b) => !b.closest(".tile"));
    const red = cells.filter((b) => b.classList.contains("bad")).map((b) => b.textContent);
    const heats = [...document.querySelectorAll("td.heat")].map((td) => Number(td.style.getPropertyValue("--heat")));
    const hot = heats.filter((h) => h > 0.9).length;
    document.querySelector("main").prepend(`red: ${red.join(",")}; hot: ${hot} of ${heats.length}.`);
    """
    assert "red: 0,2,3; hot: 2 of 2." in open_page(page, act=act).probe["text"]


def test_pairs_that_pass_are_not_tinted(tmp_path: Path) -> None:
    samples = healthy()
    samples["pairs"] = all_pairs({(0, 3): 0.012})
    write_acceptance_html(make(samples), tmp_path / "a.html")
    assert "<h2>Pairs</h2>" in (tmp_path / "a.html").read_text("utf-8")
    assert 'class="num heat"' not in (tmp_path / "a.html").read_text("utf-8")


@needs_chromium
def test_a_run_that_ended_early_has_a_page(tmp_path: Path) -> None:
    samples = {"hello": {rank: {"host": host, "pid": 1, "gpus": 2} for rank, host in HOSTS.items() if rank != 3}}
    result = make(samples, EarlyEnd("absent", (3,), "did not start within 60 s"))
    write_acceptance_html(result, tmp_path / "early.html")
    state = open_page(tmp_path / "early.html")
    assert state.console == []
    assert "rank 3 (host unknown): did not start" in state.probe["text"]
    assert "absent" in state.probe["text"]
    take_screenshot(tmp_path / "early.html", tmp_path / "early.png")
    assert (tmp_path / "early.png").stat().st_size > 10_000


def write(folder: Path, name: str, result: dict[str, Any]) -> str:
    write_result(result, folder / name)
    return str(folder / name)


def test_report_prints_the_table_and_exits_with_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = write(tmp_path, "good", make(healthy())), write(tmp_path, "bad", make(broken()))
    assert main(["acceptance", "report", good]) == 0
    assert "PASS: all required checks passed" in capsys.readouterr().out
    assert main(["acceptance", "report", f"{bad}/acceptance.json", "--html", str(tmp_path / "x.html")]) == 1
    out = capsys.readouterr().out
    assert "FAIL: compute, links failed because of rank 2 (b); link between ranks 0 and 3" in out
    assert "next: Compare the GPU's clocks" in out
    assert "<h1>Cluster acceptance</h1>" in (tmp_path / "x.html").read_text()


def test_compare_lists_what_has_become_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = healthy()
    later["collectives_all"] = {rank: collectives(0.0033) for rank in HOSTS}
    later["compute"][1]["products"]["bf16"]["tflops"] = 690.0
    old, new = write(tmp_path, "old", make(healthy())), write(tmp_path, "new", make(later))
    assert main(["acceptance", "compare", old, old]) == 0
    assert "none of" in capsys.readouterr().out
    assert main(["acceptance", "compare", old, new]) == 1
    out = capsys.readouterr().out
    assert "all_reduce_all_gb_s" in out
    assert "9.1%" in out
    assert "matmul" not in out
    assert main(["acceptance", "compare", old, new, "--tolerance", "0.01"]) == 1
    assert "matmul_bf16_tflops" in capsys.readouterr().out
    assert main(["acceptance", "compare", new, old]) == 0


def test_compare_covers_every_size_of_the_slowest_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for slow in (1.0, 1.2):
        samples = healthy()
        for rank in HOSTS:
            (result,) = collectives(0.01)["results"]
            seconds = [0.01 * (slow if rank >= 2 else 1.0)] * 2
            samples["collectives_node"][rank]["results"].append(
                result | {"requested_bytes": 2**24, "bytes": 2**24, "seconds": seconds}
            )
        results.append(make(samples))
    old, new = (write(tmp_path, name, result) for name, result in zip(("old", "new"), results, strict=True))
    assert main(["acceptance", "compare", old, new]) == 1
    out = capsys.readouterr().out
    assert "all_reduce_node_gb_s at 16 MiB" in out
    assert "16.7%" in out
    assert out.count("GB/s") == 2


def test_compare_lists_new_failures_and_differences_in_setup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = healthy()
    for sample in later["identity"].values():
        sample["driver"] = "590"
    later["compute"][3]["checksums"] = [{"bf16": "ff"}, {"bf16": "ff"}]
    del later["checkpoint"]
    old, new = write(tmp_path, "old", make(healthy())), write(tmp_path, "new", make(later))
    assert main(["acceptance", "compare", old, new]) == 1
    out = capsys.readouterr().out
    assert 'driver: "580" before, "590" now' in out
    assert "corruption: PASS before, FAIL now" in out
    assert "checkpoint_load_s, checkpoint_save_s" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "top level: "),
        ('{"version": 1}', "result version 1 is not supported; this fctune reads version 2"),
        ('{"version": 2, "verdict": "FINE"}', "acceptance.json"),
    ],
)
def test_an_invalid_result_file_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "acceptance.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_result(tmp_path)
    assert message in str(error.value)
    assert main(["acceptance", "report", str(tmp_path)]) == 2
    assert main(["acceptance", "report", str(tmp_path / "none")]) == 2


def test_the_schema_rejects_malformed_results() -> None:
    result = make(healthy())
    for change in (
        lambda d: d.pop("samples"),
        lambda d: d["checks"][0].update(status="MAYBE"),
        lambda d: d["checks"][0].update(status="SKIPPED", reason=""),
        lambda d: d["checks"][3]["figures"][0]["threshold"].pop("source"),
        lambda d: d["samples"]["compute"].update(first={}),
        lambda d: d.update(more=1),
    ):
        changed = json.loads(json.dumps(result))
        change(changed)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed, read_schema())
