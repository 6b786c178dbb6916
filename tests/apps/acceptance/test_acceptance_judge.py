"""Verdicts on hand-written samples of 2 nodes with 2 ranks each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.acceptance.checks import PHASES, judge_run
from fctune.apps.acceptance.config import AcceptanceConfig, ThresholdConfig
from fctune.apps.acceptance.judge import Check, decide, list_bandwidths
from fctune.apps.acceptance.metrics import CHECKS, METRICS
from fctune.apps.acceptance.watch import EarlyEnd
from tests.apps.acceptance.samples import HOSTS, all_pairs, collectives, compute, disk, identity


def make_config(**thresholds: tuple[float | None, float]) -> AcceptanceConfig:
    made = AcceptanceConfig(output_dir="x", device="cuda", required=["arrival"])
    made.collectives.judged_mib = 1.0
    made.thresholds = {n: ThresholdConfig(fail=f, warn=w, source="here") for n, (w, f) in thresholds.items()}
    return made


def judge(settings: AcceptanceConfig, samples: dict[str, Any], ending: EarlyEnd | None = None) -> dict[str, Check]:
    return {check.name: check for check in judge_run(settings, samples, HOSTS, 2, 4, ending)}


def blamed(check: Check) -> list[tuple[str, tuple[int, ...]]]:
    return [(culprit.kind, culprit.ranks) for culprit in check.culprits]


def test_every_metric_has_a_check_and_every_check_a_next_step() -> None:
    assert {metric.check for metric in METRICS.values()} <= set(CHECKS)
    for name in CHECKS:
        check = Check(name, True, "FAIL")
        assert check.next_step


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ([("PASS", True), ("PASS", False)], "PASS"),
        ([("PASS", True), ("WARN", True)], "PASS"),
        ([("PASS", True), ("SKIPPED", False)], "PASS"),
        ([("PASS", True), ("SKIPPED", True)], "INCOMPLETE"),
        ([("FAIL", False), ("PASS", True)], "FAIL"),
        ([("FAIL", True), ("SKIPPED", True)], "FAIL"),
    ],
)
def test_the_verdict_is_pass_only_if_every_required_check_ran_and_passed(statuses: Any, verdict: str) -> None:
    checks = [Check(name, required, status) for name, (status, required) in zip(CHECKS, statuses, strict=False)]
    assert decide(checks)[0] == verdict


@pytest.mark.parametrize(
    ("rate", "status"), [(700.0, "PASS"), (650.0, "PASS"), (649.0, "WARN"), (600.0, "WARN"), (599.0, "FAIL")]
)
def test_the_worst_rank_is_compared_with_the_threshold(rate: float, status: str) -> None:
    samples = {"compute": {rank: compute() for rank in range(4)}}
    samples["compute"][1]["products"]["bf16"]["tflops"] = rate
    check = judge(make_config(matmul_bf16_tflops=(650.0, 600.0)), samples)["compute"]
    assert check.status == status
    assert blamed(check) == ([] if status == "PASS" else [("rank", (1,))])
    assert check.figures[0].value == rate


def test_all_slow_ranks_of_a_node_are_blamed_as_one_host() -> None:
    samples = {"compute": {rank: compute() for rank in range(4)}}
    for rank in (2, 3):
        samples["compute"][rank]["products"]["bf16"]["tflops"] = 300.0
    check = judge(make_config(matmul_bf16_tflops=(None, 600.0)), samples)["compute"]
    assert blamed(check) == [("host", (2, 3))]
    assert str(check.culprits[0]).startswith("b (ranks 2, 3)")


def test_nobody_is_blamed_when_all_ranks_are_slow() -> None:
    samples = {"compute": {rank: compute() for rank in range(4)}}
    for sample in samples["compute"].values():
        sample["products"]["bf16"]["tflops"] = 300.0
    check = judge(make_config(matmul_bf16_tflops=(None, 600.0), matmul_bf16_spread=(None, 0.05)), samples)["compute"]
    assert blamed(check) == [("unknown", (0, 1, 2, 3))]
    assert [figure.status for figure in check.figures] == ["FAIL", "PASS"]


@pytest.mark.parametrize(
    ("checksums", "culprits"),
    [
        ({3: [{"bf16": "ff"}, {"bf16": "ff"}]}, [("rank", (3,))]),
        ({1: [{"bf16": "aa"}, {"bf16": "ff"}]}, [("rank", (1,))]),
        ({2: [{"bf16": "ff"}, {"bf16": "ff"}], 3: [{"bf16": "ff"}, {"bf16": "ff"}]}, [("unknown", (0, 1, 2, 3))]),
        ({1: [{"bf16": "a"}, {"bf16": "b"}], 2: [{"bf16": "c"}, {"bf16": "c"}]}, [("rank", (1,)), ("rank", (2,))]),
    ],
)
def test_wrong_products_are_blamed_on_the_minority_and_on_unstable_ranks(checksums: Any, culprits: Any) -> None:
    samples = {"compute": {rank: compute(checksums=checksums.get(rank, compute()["checksums"])) for rank in range(4)}}
    check = judge(make_config(), samples)["corruption"]
    assert check.status == "FAIL"
    assert blamed(check) == culprits


def test_heat_throttling_and_errors_are_blamed_on_their_gpu_and_a_power_limit_is_accepted() -> None:
    samples = {"compute": {rank: compute() for rank in range(4)}}
    limits = make_config(
        temperature_c=(83.0, 90.0), throttled_share=(None, 0.2), ecc_errors=(None, 0.0), xids=(None, 0.0)
    )
    assert judge(limits, samples)["health"].status == "PASS"
    samples["compute"][2]["products"]["bf16"]["readings"][0] |= {"throttle_reasons": 0x40, "temperature_c": 91.0}
    samples["compute"][1]["xids"] = 2
    check = judge(limits, samples)["health"]
    assert check.status == "FAIL"
    assert blamed(check) == [("rank", (2,)), ("rank", (1,))]


def test_a_different_driver_is_blamed_on_the_rank_that_has_it() -> None:
    samples = {"identity": {rank: identity(rank) for rank in range(4)}}
    assert judge(make_config(), samples)["identity"].status == "PASS"
    samples["identity"][1]["driver"] = "570"
    assert blamed(judge(make_config(), samples)["identity"]) == [("rank", (1,))]
    for rank in (0, 1):
        samples["identity"][rank]["packages"] = {"torch": "2.11"}
    assert ("unknown", (0, 1, 2, 3)) in blamed(judge(make_config(), samples)["identity"])


def test_two_nodes_on_one_host_and_a_wrong_clock_are_found() -> None:
    samples = {"identity": {rank: identity(rank) | {"host": "a"} for rank in range(4)}}
    samples["identity"][2]["clock_offset_s"] = -5.0
    checks = judge(make_config(clock_offset_s=(None, 1.0)), samples)
    assert "2 nodes on 1 hosts" in checks["identity"].reason
    assert blamed(checks["clocks"]) == [("rank", (2,))]


def test_links_are_compared_with_their_own_kind() -> None:
    across = {(0, 2): 0.05, (0, 3): 0.05, (1, 2): 0.05, (1, 3): 0.05}
    limits = make_config(pair_spread=(None, 0.5))
    assert judge(limits, {"pairs": all_pairs(across)})["links"].status == "PASS"
    one_rank = all_pairs(across | {(0, 3): 0.2, (1, 3): 0.2})
    assert blamed(judge(limits, {"pairs": one_rank})["links"]) == [("rank", (3,))]
    everywhere = all_pairs(dict.fromkeys(((0, 3), (1, 3), (2, 3)), 9.9))
    assert blamed(judge(limits, {"pairs": everywhere})["links"]) == [("rank", (3,))]
    inside = all_pairs(across | {(2, 3): 0.2})
    assert blamed(judge(limits, {"pairs": inside})["links"]) == [("link", (2, 3))]
    one_link = all_pairs(across | {(0, 3): 0.2})
    assert blamed(judge(limits, {"pairs": one_link})["links"]) == [("link", (0, 3))]


def test_bandwidth_is_judged_by_node_and_scaling_by_the_ratio_of_all_nodes_to_one() -> None:
    settings = make_config(all_reduce_node_gb_s=(None, 0.4), all_reduce_scaling=(None, 0.9))
    samples = {"collectives_node": {r: collectives(0.002) for r in range(4)}}
    samples["collectives_all"] = {r: collectives(0.003) for r in range(4)}
    checks = judge(settings, samples)
    # 2 ranks per node: factor 1; 4 ranks: factor 1.5.
    assert checks["collectives_node"].figures[0].value == pytest.approx(2**20 / 0.002 / 1e9)
    assert checks["collectives_all"].figures[0].value == pytest.approx(1.5 * 2**20 / 0.003 / 1e9)
    assert checks["collectives_all"].figures[1].value == pytest.approx(1.0)
    samples["collectives_node"] |= {r: collectives(0.02) for r in (2, 3)}
    checks = judge(settings, samples)
    assert blamed(checks["collectives_node"]) == [("host", (2, 3))]


@pytest.mark.parametrize(
    ("by_rank", "culprits"),
    [
        ({0: {"1": 3}, 1: {"1": 3}, 2: {"1": 3}, 3: {"1": 3}}, [("rank", (1,))]),  # everything 1 sends
        ({2: {"0": 1, "1": 1, "3": 1}}, [("rank", (2,))]),  # everything 2 receives
        ({2: {"0": 1}}, [("link", (0, 2))]),
        ({2: {}}, [("rank", (2,))]),  # a sum that is wrong on one rank
        ({0: {}, 1: {}, 2: {}, 3: {}}, [("unknown", (0, 1, 2, 3))]),  # and on all of them: no single rank
    ],
)
def test_wrong_data_is_blamed_on_the_rank_that_explains_most_of_it(by_rank: Any, culprits: Any) -> None:
    samples = {
        "collectives_all": {
            rank: collectives(0.001, wrong=3 if rank in by_rank else 0, sources=by_rank.get(rank)) for rank in range(4)
        }
    }
    check = judge(make_config(), samples)["collective_data"]
    assert check.status == "FAIL"
    assert blamed(check) == culprits


def test_ranks_within_a_node_are_blamed_by_their_global_number() -> None:
    samples = {"collectives_node": {r: collectives(0.001) for r in range(4)}}
    samples["collectives_node"][2] = collectives(0.001, 4, {"1": 4})
    samples["collectives_node"][3] = collectives(0.001, 4, {"1": 4})
    assert blamed(judge(make_config(), samples)["collective_data"]) == [("rank", (3,))]


def test_a_slow_disk_is_blamed_on_its_rank_and_an_unshared_one_on_its_host() -> None:
    samples = {"storage": {r: {"node": disk(), "shared": disk(), "sees_shared": True} for r in range(4)}}
    limits = make_config(storage_node_spread=(None, 1.0), storage_shared_spread=(None, 1.0))
    assert {judge(limits, samples)[f"storage_{d}"].status for d in ("node", "shared")} == {"PASS"}
    worse = copy.deepcopy(samples)
    for rank in (2, 3):
        worse["storage"][rank] |= {"sees_shared": False}
    worse["storage"][1]["node"] = disk(write=[4.0, 4.0])
    checks = judge(limits, worse)
    assert blamed(checks["storage_node"]) == [("rank", (1,))]
    assert blamed(checks["storage_shared"]) == [("host", (2, 3))]


def test_a_rank_that_could_not_write_is_blamed_with_its_disks_error() -> None:
    samples = {"storage": {r: {"node": disk(), "shared": disk(), "sees_shared": True} for r in range(4)}}
    samples["storage"][2]["node"]["error"] = "node disk, all: write: No space left on device"
    checks = judge(make_config(), samples)
    assert checks["storage_node"].status == "FAIL"
    assert "No space left" in str(checks["storage_node"].culprits[0])
    assert blamed(checks["storage_node"]) == [("rank", (2,))]
    assert checks["storage_shared"].status == "PASS"


@pytest.mark.parametrize(("rate", "status"), [(700.0, "SKIPPED"), (640.0, "SKIPPED"), (500.0, "FAIL")])
def test_a_phase_cut_short_cannot_pass_but_can_fail(rate: float, status: str) -> None:
    samples = {"compute": {r: {"products": {"bf16": {"tflops": rate}}, "cut_short": "out of time"} for r in range(4)}}
    checks = judge(make_config(matmul_bf16_tflops=(650.0, 600.0)), samples)
    assert checks["compute"].status == status
    assert checks["compute"].figures[0].value == rate
    assert "cut short: out of time" in checks["compute"].reason
    for name in ("corruption", "memory", "transfer", "health"):
        assert checks[name].status == "SKIPPED"


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_cut_short_before_its_first_piece_is_skipped(phase: str) -> None:
    if phase == "identity":  # it has only one piece
        return
    checks = judge(make_config(), {phase: {rank: {"cut_short": "out of time"} for rank in range(4)}})
    skipped = [check for check in checks.values() if "cut short" in check.reason]
    assert skipped
    assert all(check.status == "SKIPPED" for check in skipped)


def test_all_reasons_to_blame_a_rank_are_listed_together() -> None:
    samples = {"compute": {rank: compute() for rank in range(4)}}
    samples["compute"][1]["products"]["bf16"]["tflops"] = 350.0
    limits = make_config(matmul_bf16_tflops=(None, 600.0), matmul_bf16_spread=(None, 0.05))
    (culprit,) = judge(limits, samples)["compute"].culprits
    assert culprit.reason == "matmul_bf16_tflops 350; matmul_bf16_spread: 2 times the median of the others"


def test_bandwidths_are_listed_for_each_node_and_for_all_with_percentiles() -> None:
    samples = {
        "collectives_node": {rank: collectives(0.002 if rank < 2 else 0.004) for rank in range(4)},
        "collectives_all": {rank: collectives(0.003, wrong=rank) for rank in range(4)},
    }
    rows = list_bandwidths(samples, 2, 4)
    assert [(row["scope"], row["first_rank"]) for row in rows] == [("node", 0), ("node", 2), ("all", 0)]
    assert [row["algbw_gb_s"] for row in rows] == pytest.approx([2**20 / s / 1e9 for s in (0.002, 0.004, 0.003)])
    assert rows[2]["busbw_gb_s"] == pytest.approx(1.5 * rows[2]["algbw_gb_s"])
    assert rows[2]["wrong_elements"] == 6
    assert rows[1]["p50_s"] == rows[1]["p99_s"] == 0.004
    assert list_bandwidths({"collectives_all": {0: collectives(1.0)}}, 2, 4) == []


def test_training_on_two_nodes_is_compared_with_one() -> None:
    sample = {"seconds": [1.0, 1.0], "tokens": 4096, "flops": 4e14, "peak_memory_gib": 60.0}
    samples = {
        "training_node": {r: dict(sample) for r in range(4)},
        "training_all": {r: dict(sample) for r in range(4)},
    }
    for step in samples["training_all"].values():
        step["seconds"] = [1.25, 1.25]
    checks = judge(make_config(training_scaling=(None, 0.9), training_node_tokens_per_s=(None, 500.0)), samples)
    assert checks["training_node"].status == "PASS"
    kept = next(figure for figure in checks["training_all"].figures if figure.name == "training_scaling")
    assert kept.value == pytest.approx(0.8)
    assert checks["training_all"].status == "FAIL"


@pytest.mark.parametrize(
    ("ending", "status"),
    [(EarlyEnd("silent", (3,), "gone"), "FAIL"), (EarlyEnd("interrupted", (), "SIGINT"), "PASS"), (None, "PASS")],
)
def test_unmeasured_checks_are_skipped_with_the_reason_of_the_early_end(ending: EarlyEnd | None, status: str) -> None:
    checks = judge(make_config(), {"compute": {0: compute(), 1: compute()}}, ending)
    assert checks["arrival"].status == status
    assert checks["compute"].status == "SKIPPED"
    assert (ending.reason if ending else "not measured") in checks["compute"].reason


def test_absent_ranks_are_blamed_although_their_host_is_unknown() -> None:
    ending = EarlyEnd("absent", (2, 3), "not there within 60 s")
    checks = judge_run(make_config(), {}, {0: "a", 1: "a"}, 2, 4, ending)
    assert [culprit.ranks for culprit in checks[0].culprits] == [(2,), (3,)]
    assert checks[0].culprits[0].hosts == ("host unknown",)


def test_the_h100_thresholds_accept_observed_figures(tmp_path: Path) -> None:
    from fctune.apps.acceptance.config import load_acceptance
    from tests.conftest import ROOT

    thresholds = load_acceptance(ROOT / "configs" / "acceptance_2x8_h100.yaml").thresholds
    observed = {"all_reduce_all_gb_s": 435.0, "all_reduce_scaling": 0.98, "training_all_tokens_per_s": 8573.0}
    for name, value in observed.items():
        assert value >= thresholds[name].fail, name
        assert thresholds[name].warn is None or value >= thresholds[name].warn
