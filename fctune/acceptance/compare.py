"""Two results, and what has become slower between them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fctune.acceptance.identity import SAME


@dataclass(frozen=True, slots=True)
class Change:
    """A figure in both results; ``worse`` is the share by which it is worse now, negative where it is better."""

    name: str
    unit: str
    old: float
    new: float
    worse: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two results say of one another.

    ``slower`` are the changes beyond the tolerance, worst first. ``checks`` are those that passed then and do not now,
    ``different`` what of the hardware or software, or of what was measured, is not the same.
    """

    changes: list[Change]
    slower: list[Change]
    checks: list[str]
    lost: list[str]
    different: list[str]


def compare(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Comparison:
    """Compare two documents.

    Args:
        old: the earlier.
        new: the later.
        tolerance: share by which a figure may be worse without being named.
    """
    before, after = _figures(old), _figures(new)
    changes = []
    for name in before.keys() & after.keys():
        a, b = before[name]["value"], after[name]["value"]
        change = (a - b if after[name]["better"] == "higher" else b - a) / abs(a) if a else float(b > 0)
        # A spread, an error count or an offset near 0 has no share of its own: it is its growth that counts.
        if before[name]["unit"] == "" and after[name]["better"] == "lower":
            change = b - a
        changes.append(Change(name, after[name]["unit"], a, b, change))
    changes.sort(key=lambda change: (-change.worse, change.name))
    status = {check["name"]: check["status"] for check in old["checks"]}
    worse = [
        f"{check['name']}: {status[check['name']]} then, {check['status']} now"
        for check in new["checks"]
        if status.get(check["name"]) in ("PASS", "WARN") and check["status"] in ("FAIL", "SKIPPED")
    ]
    lost = sorted(before.keys() - after.keys())
    slower = [change for change in changes if change.worse > tolerance]
    return Comparison(changes, slower, worse, lost, _differences(old, new))


def _figures(document: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by name; and those of collectives at other sizes than the judged one, of the slowest node."""
    found = {figure["name"]: figure for check in document["checks"] for figure in check["figures"]}
    judged = int(document["config"]["collectives"]["judged_mib"] * 2**20)
    for row in document["bandwidths"]:
        if row["asked"] == judged:
            continue
        name = f"{row['operation']}_{row['scope']}_gb_s at {row['asked'] / 2**20:.4g} MiB"
        value = min(row["busbw_gb_s"], found.get(name, {}).get("value", math.inf))
        found[name] = {"value": value, "unit": "GB/s", "better": "higher"}
    return found


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = []
    for name in ("world_size", "ranks_per_node", "profile"):
        if old[name] != new[name]:
            found.append(f"{name}: {old[name]} then, {new[name]} now")
    for name in ("compute", "pairs", "collectives", "storage", "training"):
        if old["config"].get(name) != new["config"].get(name):
            found.append(f"the config's {name} section")
    first = [document["samples"].get("identity", {}).get("0", {}) for document in (old, new)]
    for name in SAME:
        a, b = (json.dumps(identity.get(name), sort_keys=True) for identity in first)
        if a != b:
            found.append(f"{name}: {a[:80]} then, {b[:80]} now")
    return found
