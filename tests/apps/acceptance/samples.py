"""Hand-written samples of a healthy run on 2 nodes with 2 ranks each."""

from __future__ import annotations

from typing import Any

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def identity(rank: int) -> dict[str, Any]:
    same = {"device": "H100", "memory_gib": 80.0, "capability": [9, 0], "driver": "580", "cuda": "13", "nccl": "2.28"}
    rest = {"torch": "2.13", "python": "3.11", "packages": {"torch": "2.13"}, "cores": 64, "clock_offset_s": 0.001}
    return {"rank": rank, "host": HOSTS[rank], **same, **rest}


def compute(**changes: Any) -> dict[str, Any]:
    reading = {
        "temperature_c": 60.0,
        "throttle_reasons": 0x4,
        "ecc_errors": 0,
        "power_w": 600.0,
        "sm_clock_mhz": 1900.0,
    }
    made: dict[str, Any] = {
        "products": {"bf16": {"tflops": 700.0, "readings": [dict(reading)]}},
        "copies": {n: {"gb_s": v} for n, v in (("memory", 3000.0), ("host_to_device", 50.0), ("device_to_host", 50.0))},
        "checksums": [{"bf16": "aa"}, {"bf16": "aa"}],
        "xids": 0,
    }
    return made | changes


def collectives(seconds: float, wrong: int = 0, sources: dict[str, int] | None = None) -> dict[str, Any]:
    result = {
        "operation": "all_reduce",
        "requested_bytes": 2**20,
        "bytes": 2**20,
        "label": "",
        "seconds": [seconds, seconds],
    }
    return {"results": [result | {"wrong_elements": wrong, "sources": sources or {}}]}


def all_pairs(slow: dict[tuple[int, int], float] | None = None) -> dict[int, Any]:
    seconds = {(a, b): (slow or {}).get((a, b), 0.01) for a in range(4) for b in range(a + 1, 4)}
    return {
        rank: {
            "seconds": {str(sum(p) - rank): [s, s * 1.1] for p, s in seconds.items() if rank in p},
            "wrong_elements": {},
            "bytes": 10**6,
        }
        for rank in range(4)
    }


def disk(**changes: list[float]) -> dict[str, Any]:
    made = {"write": [1.0, 1.1], "read": [0.5, 0.5], "files": [0.2, 0.2], "flush": [0.001] * 10}
    return {"one_rank": {kind: [] for kind in made}, "all": made | changes}


def healthy() -> dict[str, Any]:
    """Return samples of every phase."""
    step = {"seconds": [1.0, 1.0], "tokens": 4096, "flops": 4e14, "peak_memory_gib": 60.0, "layout": "DDP"}
    return {
        "hello": {rank: {"host": host, "pid": 1, "gpus": 2} for rank, host in HOSTS.items()},
        "identity": {rank: identity(rank) for rank in HOSTS},
        "compute": {rank: compute() for rank in HOSTS},
        "pairs": all_pairs(),
        "collectives_node": {rank: collectives(0.002) for rank in HOSTS},
        "collectives_all": {rank: collectives(0.003) for rank in HOSTS},
        "storage": {rank: {"node": disk(), "shared": disk(), "sees_shared": True} for rank in HOSTS},
        "training_node": {rank: dict(step) for rank in HOSTS},
        "training_all": {rank: dict(step) for rank in HOSTS},
        "checkpoint": {rank: {"bytes": 10**9, "save_s": 2.0, "load_s": 1.0} for rank in HOSTS},
    }
