"""The checks of each phase: arrival, devices, storage, training and checkpoints."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from fctune.apps.acceptance.config import AcceptanceConfig
from fctune.apps.acceptance.devices import THROTTLED, UNIFORM
from fctune.apps.acceptance.judge import Check, Culprit, Judge, Samples, judge_collectives, judge_data, judge_pairs
from fctune.apps.acceptance.metrics import DISKS, compute_slowdowns, find_outliers, percentile
from fctune.apps.acceptance.storage import WORKLOADS
from fctune.apps.acceptance.watch import EarlyEnd

Ranks = Mapping[int, Any]

_MIN_DISK_S = 0.02  # denominator of disk slowdowns: differences below it are cache misses
_END_WORDS = {"absent": "did not start", "silent": "died", "stuck": "hangs", "crashed": "failed", "lost": "was lost"}


def judge_run(
    config: AcceptanceConfig,
    samples: Samples,
    hosts: Mapping[int, str],
    ranks_per_node: int,
    world_size: int,
    end: EarlyEnd | None = None,
    skipped: Mapping[str, str] | None = None,
) -> list[Check]:
    """Judge all checks of a run, in order.

    Args:
        config: Config of the run.
        samples: ``samples[phase][rank]``, possibly incomplete.
        hosts: Host names of the ranks that arrived.
        ranks_per_node: As launched.
        world_size: As launched.
        end: Why the run ended early, if it did.
        skipped: Phase -> why it was not run.
    """
    judge = Judge(config, hosts, ranks_per_node)
    _judge_arrival(judge, samples.get("hello", {}), world_size, end)
    for phase, (names, function) in _PHASES.items():
        of_phase = samples.get(phase, {})
        reason = (skipped or {}).get(phase) or next((s["skipped"] for s in of_phase.values() if "skipped" in s), None)
        if reason is None and len(of_phase) == world_size:
            function(judge, of_phase)
            for cut in {sample["cut_short"] for sample in of_phase.values() if "cut_short" in sample}:
                for name in names:
                    judge.checks[name].mark_partial(f"cut short: {cut}")
            continue
        if reason is None and end is not None:
            kinds = {"interrupted": "interrupted", "out_of_time": "cut short"}
            reason = f"{kinds.get(end.kind, 'the run ended before')} ({end.reason})"
        if reason is not None:
            for name in names:
                judge.skip(name, reason)
    judge_data(judge, samples)
    return list(judge.checks.values())


def _judge_arrival(judge: Judge, hellos: Ranks, world_size: int, end: EarlyEnd | None) -> None:
    config, check = judge.config, judge.start("arrival")
    for key, expected, launched in (
        ("nodes", config.nodes, world_size // judge.ranks_per_node),
        ("ranks_per_node", config.ranks_per_node, judge.ranks_per_node),
    ):
        if expected is not None and launched != expected:
            check.worsen("FAIL", f"launched with {key}={launched}, expected {expected}")
    if end is not None and end.is_failure:
        check.worsen("FAIL", end.reason)
        if len(end.ranks) == world_size and world_size > 1:
            judge.add_culprit(check, "unknown", list(end.ranks), f"all ranks alike: {end.reason}")
        else:
            for rank in end.ranks:
                host = judge.hosts.get(rank, "host unknown")
                reason = f"{_END_WORDS[end.kind]}: {end.reason}"
                check.culprits.append(Culprit("rank", (rank,), (host,), reason))
    without = sorted(rank for rank, hello in hellos.items() if not hello["gpus"])
    if config.device == "cuda" and without:
        check.worsen("FAIL", "device=cuda, but ranks see no CUDA device; on CPUs, use configs/acceptance_cpu.yaml")
        judge.blame(check, without, "sees no CUDA device")


def _judge_identity(judge: Judge, samples: Ranks) -> None:
    check = judge.start("identity")
    for name in UNIFORM:
        values = {rank: json.dumps(sample[name], sort_keys=True) for rank, sample in samples.items()}
        outliers = find_outliers(values)
        if outliers is None:
            check.worsen("FAIL", f"{name} differs, and no value has a majority")
            judge.add_culprit(check, "unknown", sorted(values), ", ".join(sorted(set(values.values())))[:300])
        elif outliers:
            common = next(value for rank, value in values.items() if rank not in outliers)
            check.worsen("FAIL", f"{name} differs")
            judge.blame(check, outliers, f"{name} {_format_difference(values[outliers[0]], common)}")
    gpu = judge.config.gpu
    if gpu is not None:
        other = [rank for rank, sample in samples.items() if gpu not in sample["device"]]
        if other:
            check.worsen("FAIL", f"expected gpu={gpu}")
            judge.blame(check, other, f"is {samples[other[0]]['device']}")
    if judge.config.distinct_hosts:
        names = [samples[ranks[0]]["host"] for ranks in judge.nodes.values()]
        if len(set(names)) < len(names):
            check.worsen("FAIL", f"{len(names)} nodes on {len(set(names))} hosts ({', '.join(sorted(set(names)))})")
    judge.start("clocks")
    judge.add_figure("clock_offset_s", {rank: abs(sample["clock_offset_s"]) for rank, sample in samples.items()})


def _format_difference(mine: str, common: str) -> str:
    """Format how two JSON values differ; for mappings, by key."""
    a, b = json.loads(mine), json.loads(common)
    if isinstance(a, dict):
        keys = [key for key in a if a[key] != b.get(key)]
        return "; ".join(f"{key} is {a[key]}, on most ranks {b.get(key)}" for key in keys[:5])
    return f"is {a}, on most ranks {b}"


def _judge_compute(judge: Judge, samples: Ranks) -> None:
    check = judge.start("compute")
    for dtype in judge.config.compute.dtypes:
        results = {rank: sample.get("products", {}).get(dtype, {}) for rank, sample in samples.items()}
        reason = next((r["skipped"] for r in results.values() if "skipped" in r), None)
        if reason is not None:
            check.mark_partial(f"{dtype}: {reason}")
            continue
        rates = _pick(results, "tflops")
        judge.add_figure(f"matmul_{dtype}_tflops", rates)
        judge.add_figure(f"matmul_{dtype}_spread", _slowdowns_of_rates(rates))
    copies = {rank: sample.get("copies", {}) for rank, sample in samples.items()}
    judge.start("memory")
    memory = _pick({rank: copy.get("memory", {}) for rank, copy in copies.items()}, "gb_s")
    judge.add_figure("memory_gb_s", memory)
    judge.add_figure("memory_spread", _slowdowns_of_rates(memory))
    judge.start("transfer")
    if judge.config.device == "cpu":
        judge.skip("transfer", "no GPU: the device is the host")
    slowdowns = dict.fromkeys(samples, 0.0)
    for direction in ("host_to_device", "device_to_host"):
        rates = _pick({rank: copy.get(direction, {}) for rank, copy in copies.items()}, "gb_s")
        judge.add_figure(f"{direction}_gb_s", rates)
        slowdowns |= {rank: max(slowdowns[rank], value) for rank, value in _slowdowns_of_rates(rates).items()}
    if judge.checks["transfer"].figures:
        judge.add_figure("transfer_spread", slowdowns)
    _judge_checksums(judge, samples)
    _judge_health(judge, samples)


def _pick(results: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    """Return a value of every rank; nothing if a rank has none, because its phase was cut short."""
    return {rank: result[name] for rank, result in results.items()} if all(name in r for r in results.values()) else {}


def _slowdowns_of_rates(rates: Mapping[int, float]) -> dict[int, float]:
    return compute_slowdowns({rank: 1 / rate for rank, rate in rates.items()})


def _judge_checksums(judge: Judge, samples: Ranks) -> None:
    check = judge.start("corruption")
    if not all(sample.get("checksums") for sample in samples.values()):
        return
    checksums = {rank: [json.dumps(c, sort_keys=True) for c in s["checksums"]] for rank, s in samples.items()}
    unstable = [rank for rank, mine in checksums.items() if len(set(mine)) > 1]
    stable = {rank: mine[0] for rank, mine in checksums.items() if rank not in unstable}
    outliers = find_outliers(stable) if stable else []
    mismatches = len(unstable) + len(stable if outliers is None else outliers)
    judge.add_figure("checksum_mismatches", {None: float(mismatches)})
    if unstable:
        check.worsen("FAIL", "the same product gave different results")
        judge.blame(check, unstable, "computes different results for the same product")
    if outliers is None:
        check.worsen("FAIL", "products differ between ranks, and no result has a majority")
        reason = "one of these computes wrong results, or their hardware differs"
        judge.add_culprit(check, "unknown", sorted(stable), reason)
    elif outliers:
        check.worsen("FAIL", "the same product differs between ranks")
        judge.blame(check, outliers, "always computes a result that differs from most ranks'")


def _judge_health(judge: Judge, samples: Ranks) -> None:
    readings = {
        rank: [r for product in sample.get("products", {}).values() for r in product.get("readings", ())]
        for rank, sample in samples.items()
    }
    if not any(readings.values()):
        judge.skip("health", "no readings: no GPU, or no NVML (nvidia-ml-py)")
        return
    check = judge.start("health")

    def read(name: str) -> dict[int, list[Any]]:
        known = {rank: [r[name] for r in mine if r[name] is not None] for rank, mine in readings.items()}
        return {rank: values for rank, values in known.items() if values}

    for name in ("temperature_c", "ecc_errors"):
        judge.add_figure(name, {rank: float(max(values)) for rank, values in read(name).items()})
    masks = read("throttle_reasons")
    judge.add_figure("throttled_share", {r: statistics.fmean(bool(m & THROTTLED) for m in v) for r, v in masks.items()})
    xids = {rank: float(sample["xids"]) for rank, sample in samples.items() if sample.get("xids") is not None}
    if xids:
        judge.add_figure("xids", xids)
    else:
        check.worsen("PASS", "Xids unknown: this process may not read the kernel log")


def _judge_storage(judge: Judge, samples: Ranks) -> None:
    for disk in DISKS:
        name = f"storage_{disk}"
        results = {rank: sample.get(disk, {}) for rank, sample in samples.items()}
        reason = next((r["skipped"] for r in results.values() if "skipped" in r), None)
        if reason is not None:
            judge.skip(name, reason)
            continue
        check = judge.start(name)
        for group, infix in (("one_rank", "_one_rank"), ("one_node", "_one_node"), ("all", "")):
            times = {rank: result[group] for rank, result in results.items() if any(result.get(group, {}).values())}
            _add_disk_rates(judge, f"{name}{infix}", times)
        together = {rank: result.get("all", {}) for rank, result in results.items()}
        flushes = {rank: times["flush"] for rank, times in together.items() if times.get("flush")}
        judge.add_figure(f"{name}_fsync_s", {rank: percentile(seconds, 0.99) for rank, seconds in flushes.items()})
        # The best time of each workload: a short disturbance is not the disk's fault.
        slowdowns: dict[int, float] = {}
        for workload in WORKLOADS:
            best = {rank: min(times[workload]) for rank, times in together.items() if times.get(workload)}
            for rank, value in compute_slowdowns(best, _MIN_DISK_S).items():
                slowdowns[rank] = max(slowdowns.get(rank, 0.0), value)
        judge.add_figure(f"{name}_spread", slowdowns)
        for rank, result in results.items():
            if "error" in result:
                check.worsen("FAIL", result["error"])
                judge.add_culprit(check, "rank", [rank], result["error"])
        blind = [rank for rank, sample in samples.items() if disk == "shared" and sample.get("sees_shared") is False]
        if blind:
            check.worsen("FAIL", "not shared: some ranks do not see rank 0's files")
            judge.blame(check, blind, "does not see rank 0's files")


def _add_disk_rates(judge: Judge, name: str, times: Mapping[int, Mapping[str, list[float]]]) -> None:
    """Add the total rates at which a group of ranks writes and reads, and the slowest rank's rate of small files."""
    config = judge.config.storage
    for direction in ("write", "read"):
        rounds = list(zip(*(mine[direction] for mine in times.values()), strict=False))  # those that all completed
        if rounds:
            size = len(times) * config.mib * 2**20 / 1e9
            rate = statistics.median(size / max(seconds) for seconds in rounds)
            judge.add_figure(f"{name}_{direction}_gb_s", {None: rate})
    files = {rank: config.num_small_files / min(mine["files"]) for rank, mine in times.items() if mine["files"]}
    judge.add_figure(f"{name}_files_per_s", files)


def _judge_training(judge: Judge, samples: Ranks, scope: str) -> None:
    judge.start(f"training_{scope}")
    if not all(sample.get("seconds") for sample in samples.values()):
        return
    groups = list(judge.nodes.values()) if scope == "node" else [sorted(samples)]
    seconds = {tuple(g): max(statistics.median(samples[r]["seconds"]) for r in g) for g in groups}
    sample, is_several = samples[0], len(groups) > 1
    rates = {(group if is_several else None): sample["tokens"] / s for group, s in seconds.items()}
    judge.add_figure(f"training_{scope}_tokens_per_s", rates)
    judge.add_figure(f"training_{scope}_memory_gib", {rank: s["peak_memory_gib"] for rank, s in samples.items()})
    training = judge.config.training
    if training is not None and training.peak_tflops is not None:
        mfu_of_rate = sample["flops"] / sample["tokens"] / training.peak_tflops / 1e12
        judge.add_figure(f"training_{scope}_mfu", {group: rate * mfu_of_rate for group, rate in rates.items()})
    if scope == "node" and is_several:
        judge.add_figure("training_spread", compute_slowdowns(seconds))
    if scope == "all":
        figures = judge.checks["training_node"].figures
        one = [figure.value for figure in figures if figure.name == "training_node_tokens_per_s"]
        judge.add_figure("training_scaling", {None: rates[None] / one[0]} if one else {})


def _judge_checkpoint(judge: Judge, samples: Ranks) -> None:
    judge.start("checkpoint")
    for name in ("save_s", "load_s"):
        if all(name in sample for sample in samples.values()):
            judge.add_figure(f"checkpoint_{name}", {None: max(sample[name] for sample in samples.values())})


# Phase -> the checks that its samples answer, and the function that judges them; in the order of a run.
_PHASES: dict[str, tuple[tuple[str, ...], Callable[[Judge, Ranks], None]]] = {
    "identity": (("identity", "clocks"), _judge_identity),
    "compute": (("compute", "corruption", "memory", "transfer", "health"), _judge_compute),
    "pairs": (("links",), judge_pairs),
    "collectives_node": (("collectives_node",), functools.partial(judge_collectives, scope="node")),
    "collectives_all": (("collectives_all",), functools.partial(judge_collectives, scope="all")),
    "storage": (("storage_node", "storage_network", "storage_shared"), _judge_storage),
    "training_node": (("training_node",), functools.partial(_judge_training, scope="node")),
    "training_all": (("training_all",), functools.partial(_judge_training, scope="all")),
    "checkpoint": (("checkpoint",), _judge_checkpoint),
}
PHASES = tuple(_PHASES)

# Phase -> its checks that compare the speed of ranks.
SPEED_CHECKS = {
    "compute": ("compute", "memory", "transfer"),
    "pairs": ("links",),
    "storage": ("storage_node", "storage_network", "storage_shared"),
}
