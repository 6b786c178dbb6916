"""What each check asks of the samples of its phase."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from fctune.acceptance.compute import THROTTLED
from fctune.acceptance.config import AcceptanceConfig
from fctune.acceptance.disks import judge_storage
from fctune.acceptance.ending import Ending
from fctune.acceptance.identity import SAME
from fctune.acceptance.judge import Check, Culprit, Jury, Samples
from fctune.acceptance.statistics import excess, minority
from fctune.acceptance.traffic import judge_collectives, judge_data, judge_pairs

Ranks = Mapping[int, Any]


def judge(
    config: AcceptanceConfig,
    samples: Samples,
    hosts: Mapping[int, str],
    ranks_per_node: int,
    world_size: int,
    ending: Ending | None = None,
    skipped: Mapping[str, str] | None = None,
) -> list[Check]:
    """Every check of a run, in order.

    Args:
        config: of the run.
        samples: ``samples[phase][rank]``, as far as the run came.
        hosts: of the ranks that arrived.
        ranks_per_node: as launched.
        world_size: as launched.
        ending: why the run ended early, where it did.
        skipped: phase -> why it was not run.
    """
    jury = Jury(config, hosts, ranks_per_node)
    _judge_arrival(jury, world_size, ending)
    _judge_devices(jury, samples.get("hello", {}))
    for phase, (names, function) in _PHASES.items():
        found = samples.get(phase, {})
        reason = (skipped or {}).get(phase) or next((s["skipped"] for s in found.values() if "skipped" in s), None)
        if reason is not None:
            for name in names:
                jury.skip(name, reason)
        elif len(found) == world_size:
            function(jury, found)
            for cut in {sample["cut"] for sample in found.values() if "cut" in sample}:
                for name in names:
                    jury.checks[name].omit(f"cut short: {cut}")
        elif ending is not None:
            why = {"asked": "interrupted", "late": "cut short"}.get(ending.kind, "the run ended before")
            for name in names:
                jury.skip(name, f"{why} ({ending.says})")
    judge_data(jury, samples)
    return list(jury.checks.values())


def _judge_arrival(jury: Jury, world_size: int, ending: Ending | None) -> None:
    config, check = jury.config, jury.open("arrival")
    num_nodes = world_size // jury.ranks_per_node
    for wanted, found, what in (
        (config.nodes, num_nodes, "nodes"),
        (config.ranks_per_node, jury.ranks_per_node, "ranks a node"),
    ):
        if wanted is not None and found != wanted:
            check.worsen("FAIL", f"{found} {what} launched, {wanted} wanted ({what.replace(' a ', '_per_')}={wanted})")
    if ending is not None and ending.is_failure:
        check.worsen("FAIL", ending.says)
        known = {rank: jury.hosts.get(rank, "host unknown") for rank in range(world_size)}
        everyone = len(ending.ranks) == world_size and world_size > 1
        for rank in ending.ranks if not everyone else ():
            check.culprits.append(_culprit(rank, known[rank], ending))
        if everyone:
            jury.accuse(check, "unknown", list(ending.ranks), f"all ranks alike: {ending.says}")


def _culprit(rank: int, host: str, ending: Ending) -> Culprit:
    words = {"absent": "never arrived", "silent": "died", "stuck": "hangs", "crashed": "failed", "lost": "is gone"}
    return Culprit("rank", (rank,), (host,), f"{words[ending.kind]}: {ending.says}")


def _judge_devices(jury: Jury, found: Ranks) -> None:
    """Ranks without the device that the config wants; before anything is measured."""
    check = jury.checks["arrival"]
    without = sorted(rank for rank, hello in found.items() if not hello["gpus"])
    if jury.config.device == "cuda" and without:
        check.worsen("FAIL", "no CUDA device where device=cuda wants one; a machine without has acceptance_cpu.yaml")
        jury.blame(check, without, "sees no CUDA device")


def _judge_identity(jury: Jury, found: Ranks) -> None:
    check = jury.open("identity")
    for name in SAME:
        values = {rank: json.dumps(sample[name], sort_keys=True) for rank, sample in found.items()}
        odd = minority(values)
        if odd is None:
            check.worsen("FAIL", f"{name} differs, and no value is that of most ranks")
            jury.accuse(check, "unknown", sorted(values), ", ".join(sorted(set(values.values())))[:300])
        elif odd:
            common = next(value for rank, value in values.items() if rank not in odd)
            check.worsen("FAIL", f"{name} differs")
            jury.blame(check, odd, f"{name} {_difference(values[odd[0]], common)}")
    if jury.config.gpu is not None:
        other = [rank for rank, sample in found.items() if jury.config.gpu not in sample["device"]]
        if other:
            check.worsen("FAIL", f"gpu={jury.config.gpu} wanted")
            jury.blame(check, other, f"is {found[other[0]]['device']}")
    if jury.config.distinct_hosts:
        names = [found[ranks[0]]["host"] for ranks in jury.nodes.values()]
        if len(set(names)) < len(names):
            check.worsen("FAIL", f"{len(names)} nodes on {len(set(names))} hosts ({', '.join(sorted(set(names)))})")
    jury.open("clocks")
    jury.add("clock_offset_s", {rank: abs(sample["clock_offset_s"]) for rank, sample in found.items()})


def _difference(mine: str, common: str) -> str:
    """Two values in JSON, of mappings the keys that differ."""
    a, b = json.loads(mine), json.loads(common)
    if isinstance(a, dict):
        keys = [key for key in a if a[key] != b.get(key)]
        return "; ".join(f"{key} {a[key]}, most ranks {b.get(key)}" for key in keys[:5])
    return f"is {a}, of most ranks {b}"


def _judge_compute(jury: Jury, found: Ranks) -> None:
    check = jury.open("compute")
    for dtype in jury.config.compute.dtypes:
        results = {rank: sample.get("products", {}).get(dtype, {}) for rank, sample in found.items()}
        reason = next((r["skipped"] for r in results.values() if "skipped" in r), None)
        if reason is not None:
            check.omit(f"{dtype}: {reason}")
            continue
        rates = _pick(results, "tflops")
        jury.add(f"matmul_{dtype}_tflops", rates)
        jury.add(f"matmul_{dtype}_spread", _spread(rates))
    copies = {rank: sample.get("copies", {}) for rank, sample in found.items()}
    jury.open("memory")
    memory = _pick({rank: copy.get("memory", {}) for rank, copy in copies.items()}, "gb_s")
    jury.add("memory_gb_s", memory)
    jury.add("memory_spread", _spread(memory))
    jury.open("transfer")
    if jury.config.device == "cpu":
        jury.skip("transfer", "no GPU: the device is the host")
    over = dict.fromkeys(found, 0.0)
    for way in ("host_to_device", "device_to_host"):
        rates = _pick({rank: copy.get(way, {}) for rank, copy in copies.items()}, "gb_s")
        jury.add(f"{way}_gb_s", rates)
        for rank, value in _spread(rates).items():
            over[rank] = max(over[rank], value)
    if jury.checks["transfer"].figures:
        jury.add("transfer_spread", over)
    _judge_checksums(jury, found)
    _judge_health(jury, found)


def _pick(results: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    """A figure of each rank, where the run came as far on all."""
    return {rank: result[name] for rank, result in results.items()} if all(name in r for r in results.values()) else {}


def _spread(rates: Mapping[int, float]) -> dict[int, float]:
    return excess({rank: 1 / rate for rank, rate in rates.items()})


def _judge_checksums(jury: Jury, found: Ranks) -> None:
    check = jury.open("corruption")
    if not all(sample.get("checksums") for sample in found.values()):
        return
    unsteady = [rank for rank, s in found.items() if len({json.dumps(c, sort_keys=True) for c in s["checksums"]}) > 1]
    steady = {r: json.dumps(s["checksums"][0], sort_keys=True) for r, s in found.items() if r not in unsteady}
    odd = minority(steady) if steady else []
    jury.add("checksum_mismatches", {None: float(len(unsteady) + len(steady if odd is None else odd))})
    if unsteady:
        check.worsen("FAIL", "the same product came out differently the second time")
        jury.blame(check, unsteady, "does not compute the same twice")
    if odd is None:
        check.worsen("FAIL", "products differ, and no result is that of most ranks")
        jury.accuse(check, "unknown", sorted(steady), "one of these computes wrongly, or their hardware differs")
    elif odd:
        check.worsen("FAIL", "the same product differs between ranks")
        jury.blame(check, odd, "computes another result than most ranks, and does so every time")


def _judge_health(jury: Jury, found: Ranks) -> None:
    readings = {
        rank: [r for product in sample.get("products", {}).values() for r in product.get("readings", ())]
        for rank, sample in found.items()
    }
    xids = {rank: float(sample["xids"]) for rank, sample in found.items() if sample.get("xids") is not None}
    if not any(readings.values()):
        jury.skip("health", "no readings: no GPU, or no NVML (nvidia-ml-py) to ask")
        return
    check = jury.open("health")
    for name, key in (("temperature_c", "temperature_c"), ("ecc_errors", "ecc_errors")):
        known = {r: [x[key] for x in mine if x[key] is not None] for r, mine in readings.items()}
        jury.add(name, {rank: float(max(values)) for rank, values in known.items() if values})
    masks = {
        r: [x["throttle_reasons"] for x in mine if x["throttle_reasons"] is not None] for r, mine in readings.items()
    }
    jury.add(
        "throttled_share", {r: statistics.fmean(bool(m & THROTTLED) for m in mine) for r, mine in masks.items() if mine}
    )
    if xids:
        jury.add("xids", xids)
    else:
        check.worsen("PASS", "Xids not known: this process may not read the kernel's log")


def _judge_training(scope: str) -> Callable[[Jury, Ranks], None]:
    def judge_scope(jury: Jury, found: Ranks) -> None:
        jury.open(f"training_{scope}")
        if not all(sample.get("seconds") for sample in found.values()):
            return
        groups = list(jury.nodes.values()) if scope == "node" else [sorted(found)]
        seconds = {tuple(g): max(statistics.median(found[r]["seconds"]) for r in g) for g in groups}
        sample, is_several = found[0], len(groups) > 1
        rates = {(g if is_several else None): sample["tokens"] / s for g, s in seconds.items()}
        jury.add(f"training_{scope}_tokens_per_s", rates)
        jury.add(f"training_{scope}_memory_gib", {rank: s["peak_memory_gib"] for rank, s in found.items()})
        training = jury.config.training
        if training is not None and training.peak_tflops is not None:
            mfu = {
                key: rate / sample["tokens"] * sample["flops"] / training.peak_tflops / 1e12
                for key, rate in rates.items()
            }
            jury.add(f"training_{scope}_mfu", mfu)
        if scope == "node" and is_several:
            jury.add("training_spread", excess(seconds))
        if scope == "all":
            one = [f.value for f in jury.checks["training_node"].figures if f.name == "training_node_tokens_per_s"]
            jury.add("training_kept", {None: rates[None] / one[0]} if one else {})

    return judge_scope


def _judge_checkpoint(jury: Jury, found: Ranks) -> None:
    jury.open("checkpoint")
    for name in ("save_s", "load_s"):
        if all(name in sample for sample in found.values()):
            jury.add(f"checkpoint_{name}", {None: max(sample[name] for sample in found.values())})


# Phase -> the checks that its samples answer, and who asks; in the order of a run.
_PHASES: dict[str, tuple[tuple[str, ...], Callable[[Jury, Ranks], None]]] = {
    "identity": (("identity", "clocks"), _judge_identity),
    "compute": (("compute", "corruption", "memory", "transfer", "health"), _judge_compute),
    "pairs": (("links",), judge_pairs),
    "collectives_node": (("collectives_node",), judge_collectives("node")),
    "collectives_all": (("collectives_all",), judge_collectives("all")),
    "storage": (("storage_node", "storage_shared"), judge_storage),
    "training_node": (("training_node",), _judge_training("node")),
    "training_all": (("training_all",), _judge_training("all")),
    "checkpoint": (("checkpoint",), _judge_checkpoint),
}
PHASES = tuple(_PHASES)

# Phase -> the checks of it that compare ranks by their speed.
NAMED_BY_SPEED = {
    "compute": ("compute", "memory", "transfer"),
    "pairs": ("links",),
    "storage": ("storage_node", "storage_shared"),
}
