"""Prices of GPUs, disks and traffic, and the cost of a run by part."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.gpus import match_gpu
from fctune.config.loading import read_yaml_mapping

LIST_PRICES = Path(__file__).with_name("prices.yaml")
CURRENCY = "USD"  # of the list prices
NETWORK_GIB = 2000.0  # network disk that sky/finetune.yaml gives each node

_HOURS_PER_MONTH = 730
_KEYS = ("gpu_hour", "shared_gib_month", "network_gib_month", "egress_gib")


@dataclass(frozen=True, slots=True)
class Price:
    """A price; None if it is unknown, so that the part is left out."""

    price: float | None
    date: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.price:g}" + (f" ({self.source}, {self.date})" if self.source else "")


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of one cloud: of a GPU-hour, of a GiB-month of both disks, and of a GiB of outgoing traffic.

    ``gpu_hour`` is by key of ``fctune.base.gpus.GPUS``, or by the name of another GPU.
    """

    gpu_hour: dict[str, Price] = field(default_factory=dict)
    shared_gib_month: Price = Price(None)
    network_gib_month: Price = Price(None)
    egress_gib: Price = Price(None)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a run by part; parts without a price are None and not part of the total."""

    gpus: float
    shared_disk: float | None
    network_disks: float | None
    traffic: float | None

    @property
    def total(self) -> float:
        """Sum of the parts that have a price."""
        return self.gpus + sum(part or 0.0 for part in (self.shared_disk, self.network_disks, self.traffic))


def read_prices(path: Path | None = None, currency: str = CURRENCY) -> Prices:
    """Read the list prices, with those of a file of the same form in their place.

    Args:
        path: File with prices in ``currency``; None: the list prices alone.
        currency: The list prices count in their own only.

    Raises:
        ConfigError: The file cannot be read, has an unknown key, or a price that is not a number.
    """
    found = _parse(LIST_PRICES) if currency == CURRENCY else {}
    if path is not None:
        own = _parse(path)
        found |= own | {"gpu_hour": found.get("gpu_hour", {}) | own.get("gpu_hour", {})}
    return Prices(**found)


def compute_cost(
    prices: Prices,
    gpu_price: float,
    hours: float,
    num_gpus: int,
    shared_gib: float,
    network_gib: float,
    egress_gib: float = 0.0,
) -> Cost:
    """Compute the cost of a run.

    Args:
        prices: Prices of disks and traffic.
        gpu_price: Price of a GPU-hour.
        hours: Duration of the run.
        num_gpus: GPUs that are paid for.
        shared_gib: Space of the shared disk that is paid for, in GiB.
        network_gib: Size of all nodes' network disks together.
        egress_gib: Traffic to the internet.
    """

    def rent(price: Price, gib: float) -> float | None:
        return None if price.price is None else price.price * gib * hours / _HOURS_PER_MONTH

    return Cost(
        gpus=gpu_price * hours * num_gpus,
        shared_disk=rent(prices.shared_gib_month, shared_gib),
        network_disks=rent(prices.network_gib_month, network_gib),
        traffic=None if prices.egress_gib.price is None else prices.egress_gib.price * egress_gib,
    )


def _parse(path: Path) -> dict[str, Any]:
    raw = read_yaml_mapping(path)
    if unknown := sorted(map(str, raw.keys() - set(_KEYS))):
        raise ConfigError(f"{path}: {unknown[0]}: unknown key; expected {', '.join(_KEYS)}.")
    parsed: dict[str, Any] = {}
    for key, value in raw.items():
        if key != "gpu_hour":
            parsed[key] = _parse_price(path, key, value)
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: gpu_hour: expected a mapping of GPUs to prices, got {value!r}.")
        parsed[key] = {}
        for name, price in value.items():
            # Others may be described by options of fctune plan.
            gpu = known.name if (known := match_gpu(str(name))) is not None else str(name)
            if gpu in parsed[key]:
                raise ConfigError(f"{path}: gpu_hour.{name}: a second price of {gpu}; keep one.")
            parsed[key][gpu] = _parse_price(path, f"gpu_hour.{name}", price)
    return parsed


def _parse_price(path: Path, key: str, value: Any) -> Price:
    """Parse a number, or a mapping with a number, a date and a source."""
    entry = value if isinstance(value, dict) else {"price": value}
    number = entry.get("price")
    if number is not None:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not 0 <= number < math.inf:
            raise ConfigError(f"{path}: {key}={number!r}: expected a price, 0 or more, or null (left out).")
        number = float(number)
    return Price(number, str(entry.get("date") or ""), str(entry.get("source") or ""))
