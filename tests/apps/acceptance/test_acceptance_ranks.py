"""Complete runs on four gloo ranks: healthy ones blame nobody, and each injected fault is blamed on its rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fctune.apps.acceptance.metrics import OPERATIONS
from fctune.apps.acceptance.result import read_result, read_schema
from tests.apps.acceptance.harness import SHORT, arguments, left_behind, run
from tests.ranks import run_ranks

# Fault -> the check that detects it, and the length of each delay in seconds.
SLOW = {"slow_compute": ("compute", 0.05), "slow_collectives": ("links", 0.01), "slow_disk": ("storage_node", 0.15)}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    done = run(folder, "training.steps=2", "training.warmup=1")
    assert done.codes == [0, 0, 0, 0]
    assert left_behind(folder) == []
    return folder / "out"


def test_a_healthy_run_passes_blames_nobody_and_matches_the_schema(healthy: Path) -> None:
    result = json.loads((healthy / "acceptance.json").read_text())
    jsonschema.Draft202012Validator.check_schema(read_schema())
    jsonschema.validate(result, read_schema())
    assert result["verdict"] == "PASS"
    assert not [culprit for check in result["checks"] for culprit in check["culprits"]]
    statuses = {check["name"]: check["status"] for check in result["checks"]}
    assert [name for name, status in statuses.items() if status == "SKIPPED"] == [
        "transfer",
        "health",
        "collectives_all",
        "storage_network",
        "training_all",
    ]
    assert json.loads((healthy / "exit.json").read_text())["code"] == 0
    assert read_result(healthy) == result


def test_the_result_contains_every_sample_of_every_rank(healthy: Path) -> None:
    samples = read_result(healthy)["samples"]
    for phase in (
        "hello",
        "identity",
        "compute",
        "pairs",
        "collectives_node",
        "storage",
        "training_node",
        "checkpoint",
    ):
        assert list(samples[phase]) == ["0", "1", "2", "3"], phase
    for sample in samples["collectives_node"].values():
        sizes = {(r["operation"], r["requested_bytes"]) for r in sample["results"] if not r["label"]}
        assert len(sizes) == len(OPERATIONS) * 3
        labels = {r["operation"] for r in sample["results"] if r["label"] == "one block of the model"}
        assert labels == {"all_gather", "reduce_scatter"}
    assert {len(v) for sample in samples["pairs"].values() for v in sample["seconds"].values()} == {20 * 5}


def mask_numbers(value: Any) -> Any:
    """Mask the parts of a result that differ between runs: numbers, times and process ids."""
    if isinstance(value, dict):
        return {
            k: mask_numbers(v)
            for k, v in value.items()
            if k not in ("pid", "started_at", "clock_offset_s", "rates", "windows")
        }
    if isinstance(value, list):
        return [mask_numbers(item) for item in value]
    return "a number" if isinstance(value, float) else value


@pytest.mark.slow
def test_two_runs_give_the_same_result_except_for_numbers(tmp_path: Path) -> None:
    # In the same folders, and with a time budget that never reduces the number of repetitions.
    first, second = (run(tmp_path, *SHORT, "collectives.max_s=60").result for _ in range(2))
    assert first is not None
    assert json.dumps(mask_numbers(first)) == json.dumps(mask_numbers(second))


@pytest.mark.parametrize(
    "kind",
    [
        "corrupt_compute",
        pytest.param("corrupt_send", marks=pytest.mark.slow),
        pytest.param("corrupt_receive", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_only_the_rank_that_corrupts_data_is_blamed(kind: str, rank: int, tmp_path: Path) -> None:
    done = run(tmp_path, *SHORT, f"faults=[{{kind: {kind}, rank: {rank}}}]")
    failed = [name for name, check in done.checks.items() if check["status"] == "FAIL"]
    assert failed == ["corruption" if kind == "corrupt_compute" else "collective_data"]
    assert done.blamed == [rank]
    assert set(done.codes) == {1}
    if kind != "corrupt_compute":
        assert done.result is not None
        found = done.result["samples"]["collectives_node"].values()
        wrong = {r["operation"] for sample in found for r in sample["results"] if r["wrong_elements"]}
        silent = {"broadcast"} if kind == "corrupt_send" and rank else set()  # in which only rank 0 sends
        assert wrong == set(OPERATIONS) - silent


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] if kind != "slow_compute" else []) for kind in SLOW],
)
def test_only_the_slow_rank_is_blamed(kind: str, tmp_path: Path) -> None:
    check, seconds = SLOW[kind]
    done = run(tmp_path, *SHORT, f"faults=[{{kind: {kind}, rank: 3, seconds: {seconds}}}]", "pairs.repetitions=5")
    assert done.checks[check]["status"] == "FAIL"
    assert done.blamed == [3]
    assert done.result is not None
    assert done.result["config"]["faults"][0]["kind"] == kind
    assert done.checks[check]["next_step"]


@pytest.mark.thorough
@pytest.mark.parametrize("rechecks", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_was_only_briefly_slow_is_measured_again_and_not_blamed(rechecks: int, tmp_path: Path) -> None:
    # All 5 windows and 40 copies of the first attempt, and one window of the second.
    fault = "faults=[{kind: slow_compute, rank: 1, seconds: 0.05, times: 46}]"
    done = run(tmp_path, *SHORT, f"rechecks={rechecks}", fault)
    assert done.blamed == ([] if rechecks else [1])
    assert done.result is not None
    copies = {len(s["copies"]["memory"]["rates"]) for s in done.result["samples"]["compute"].values()}
    assert copies == {40 * (1 + rechecks)}
    assert {len(s["checksums"]) for s in done.result["samples"]["compute"].values()} == {2 * (1 + rechecks)}


@pytest.mark.slow
def test_two_nodes_are_measured_separately_and_together(tmp_path: Path) -> None:
    required = "required=[arrival, collectives_node, collectives_all, training_node, training_all, checkpoint]"
    done = run(tmp_path, required, "nodes=2", "compute.sustain_s=0.2", "training.steps=2", ranks_per_node=2)
    assert done.codes == [0, 0, 0, 0]
    figures = {f["name"]: f["value"] for check in done.checks.values() for f in check["figures"]}
    assert figures["all_reduce_scaling"] == pytest.approx(
        figures["all_reduce_all_gb_s"] / figures["all_reduce_node_gb_s"]
    )
    assert figures["training_scaling"] > 0
    assert done.result is not None
    assert {f"storage_shared_{group}_write_gb_s" for group in ("one_rank", "one_node")} <= set(figures)
    disk = done.result["samples"]["storage"]
    assert [rank for rank, sample in disk.items() if sample["shared"]["one_node"]["write"]] == ["0", "1"]
    assert all(sample["shared"]["all"]["read"] for sample in disk.values())
    layouts = {scope: done.result["samples"][f"training_{scope}"]["0"]["layout"] for scope in ("node", "all")}
    assert "over 2" in layouts["node"]
    assert "over 4" in layouts["all"]


@pytest.mark.thorough
def test_ranks_that_share_rows_are_timed_on_their_parts(tmp_path: Path) -> None:
    shared = "training.overrides=[data.seq_len=128, parallel.mode=fsdp, parallel.context=2, micro_batch_size=1]"
    done = run(tmp_path, "required=[training_node]", shared, "training.steps=2", ranks=2)
    assert done.codes == [0, 0]
    assert done.result is not None
    for sample in done.result["samples"]["training_node"].values():
        assert "rows shared by 2 ranks" in sample["layout"]
        assert sample["tokens"] == 64


def _repeat(world: Any, argv: list[str], kind: str | None, count: int) -> list[tuple[list[int], dict[str, str]]]:
    """Run several times in the same processes; return whom each run blamed, and the status of its checks."""
    import torch.distributed as dist

    from fctune.apps.acceptance.config import FaultConfig, load_acceptance
    from fctune.apps.acceptance.run import Acceptance
    from fctune.base.distributed import read_launcher_environment

    dist.barrier()
    dist.destroy_process_group()
    found = []
    for number in range(count):
        config = load_acceptance(argv[1], argv[2:])
        if kind is not None:
            config.faults = [FaultConfig(kind=kind, rank=number % 4, seconds=SLOW[kind][1])]  # type: ignore[arg-type]
        launch = dataclasses.replace(read_launcher_environment(), restart=str(number))
        result = Acceptance(config, launch).run()
        culprits = [c for check in result["checks"] for c in check["culprits"]]
        named = sorted({rank for c in culprits for rank in c["ranks"]})
        found.append((named, {check["name"]: check["status"] for check in result["checks"]}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, *SLOW])
def test_twenty_of_twenty_runs_blame_only_the_faulty_rank(kind: str | None, tmp_path: Path) -> None:
    short = [*SHORT, "compute.copy_repetitions=10", "collectives.operations=[all_reduce]", "storage.num_flushes=3"]
    short += {"slow_collectives": ["pairs.repetitions=10"], "slow_disk": ["storage.repetitions=2"]}.get(str(kind), [])
    found = run_ranks(_repeat, 4, arguments(tmp_path, *short), kind, 20, timeout_s=560)[0]
    assert [named for named, _ in found] == [[] if kind is None else [number % 4] for number in range(20)]
    if kind is not None:
        assert {statuses[SLOW[kind][0]] for _, statuses in found} == {"FAIL"}
