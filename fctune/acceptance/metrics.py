"""Every figure that a threshold can be set on: its unit, which way is better, and the check that judges it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "point_to_point")
DTYPES = ("fp32", "bf16", "fp8")
SCOPES = ("node", "all")  # each node by itself, all nodes together
DISKS = ("node", "shared")

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of the cluster: of its worst rank, pair or node."""

    check: str
    unit: str
    better: Better
    says: str


def _list_metrics() -> dict[str, Metric]:
    slower = "how much longer the slowest takes than the median of the others, as a share"
    found = {
        "clock_offset_s": Metric("clocks", "s", "lower", "largest offset of a rank's clock from rank 0's"),
        "checksum_mismatches": Metric("corruption", "ranks", "lower", "ranks whose products differ"),
        "memory_gb_s": Metric("memory", "GB/s", "higher", "copy on the device, reading and writing counted"),
        "memory_spread": Metric("memory", "", "lower", slower),
        "host_to_device_gb_s": Metric("transfer", "GB/s", "higher", "from pinned memory"),
        "device_to_host_gb_s": Metric("transfer", "GB/s", "higher", "to pinned memory"),
        "transfer_spread": Metric("transfer", "", "lower", slower),
        "temperature_c": Metric("health", "C", "lower", "hottest GPU under load"),
        "throttled_share": Metric("health", "", "lower", "of readings under load, by heat, power brake or hardware"),
        "ecc_errors": Metric("health", "errors", "lower", "uncorrected, of all GPUs"),
        "xids": Metric("health", "errors", "lower", "of the driver, in the kernel's log"),
        "pair_gb_s": Metric("links", "GB/s", "higher", "slowest pair, each way, both at once"),
        "pair_spread": Metric("links", "", "lower", slower),
        "wrong_elements": Metric("collective_data", "elements", "lower", "of all results of collectives"),
        "all_reduce_kept": Metric("collectives_all", "", "higher", "share of one node's busbw that all nodes keep"),
        "checkpoint_save_s": Metric("checkpoint", "s", "lower", "what trains and its optimizer, from the devices"),
        "checkpoint_load_s": Metric("checkpoint", "s", "lower", "the same, read back"),
        "training_kept": Metric(
            "training_all", "", "higher", "share of one node's tokens/s a rank that all nodes keep"
        ),
        "training_spread": Metric("training_node", "", "lower", "of nodes: " + slower),
    }
    for dtype in DTYPES:
        found[f"matmul_{dtype}_tflops"] = Metric("compute", "TFLOP/s", "higher", f"{dtype} products, slowest rank")
        found[f"matmul_{dtype}_spread"] = Metric("compute", "", "lower", slower)
    for scope in SCOPES:
        for operation in OPERATIONS:
            says = f"busbw of {operation} at the judged size"
            found[f"{operation}_{scope}_gb_s"] = Metric(f"collectives_{scope}", "GB/s", "higher", says)
        check = f"training_{scope}"
        found[f"training_{scope}_tokens_per_s"] = Metric(check, "tokens/s", "higher", "a rank, padding included")
        found[f"training_{scope}_mfu"] = Metric(check, "", "higher", "model FLOPs over the peak that the config names")
        found[f"training_{scope}_memory_gib"] = Metric(check, "GiB", "lower", "peak of a rank")
    for disk in DISKS:
        check = f"storage_{disk}"
        found[f"{check}_write_gb_s"] = Metric(check, "GB/s", "higher", "all ranks at once, summed, flushed")
        found[f"{check}_read_gb_s"] = Metric(check, "GB/s", "higher", "all ranks at once, summed")
        found[f"{check}_files_per_s"] = Metric(check, "files/s", "higher", "small ones, written and read, slowest rank")
        for group, who in (("one_rank", "rank 0 alone"), ("one_node", "the ranks of one node at once, summed")):
            found[f"{check}_{group}_write_gb_s"] = Metric(check, "GB/s", "higher", f"{who}, flushed")
            found[f"{check}_{group}_read_gb_s"] = Metric(check, "GB/s", "higher", who)
            says = "small ones, written and read, " + ("rank 0 alone" if group == "one_rank" else "slowest of one node")
            found[f"{check}_{group}_files_per_s"] = Metric(check, "files/s", "higher", says)
        found[f"{check}_fsync_s"] = Metric(check, "s", "lower", "99th percentile of flushing 4 kB, slowest rank")
        found[f"{check}_spread"] = Metric(check, "", "lower", slower)
    return found


METRICS = _list_metrics()

# In the order in which they are judged and shown; those after the first need all ranks to be there.
CHECKS = {
    "arrival": "every rank comes, on as many nodes and with such devices as asked, and stays to the end",
    "identity": "the same hardware and software everywhere",
    "clocks": "clocks agree",
    "compute": "matrix products, all at once",
    "corruption": "the same products everywhere, twice",
    "memory": "memory bandwidth",
    "transfer": "between host and device",
    "health": "temperature, throttling, ECC, Xid",
    "links": "every pair of ranks",
    "collectives_node": "collectives within each node",
    "collectives_all": "collectives of all nodes",
    "collective_data": "results of collectives are right",
    "storage_node": "the node's disk",
    "storage_shared": "the shared disk",
    "training_node": "training steps, each node by itself",
    "training_all": "training steps, all nodes",
    "checkpoint": "a checkpoint, saved and loaded",
}
