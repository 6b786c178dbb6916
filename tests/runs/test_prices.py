"""The cost of a run by part, and the table of prices."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import yaml

from fctune.base.errors import ConfigError
from fctune.base.gpus import GPUS
from fctune.runs.prices import LIST_PRICES, Price, Prices, compute_cost, read_prices


def test_every_list_price_has_a_date_and_a_source() -> None:
    raw = yaml.safe_load(LIST_PRICES.read_text())
    entries = [*raw["gpu_hour"].values(), *(value for key, value in raw.items() if key != "gpu_hour")]
    for entry in entries:
        assert entry["price"] >= 0
        assert entry["source"]
        assert isinstance(entry["date"], datetime.date)
    assert set(raw["gpu_hour"]) <= set(GPUS)


def test_the_parts_of_a_cost_add_up() -> None:
    prices = Prices({}, Price(0.1), Price(0.2), Price(0.05))
    cost = compute_cost(
        prices, gpu_price=3.0, hours=73.0, num_gpus=16, shared_gib=1000, network_gib=4000, egress_gib=20
    )
    # A tenth of a month.
    assert (cost.gpus, cost.shared_disk, cost.network_disks, cost.traffic) == pytest.approx((3504, 10, 80, 1))
    assert cost.total == pytest.approx(3595)
    unknown = compute_cost(Prices(), 3.0, 73.0, 16, 1000, 4000, 20)
    assert (unknown.shared_disk, unknown.network_disks, unknown.traffic, unknown.total) == (None, None, None, 3504)


def test_a_file_replaces_some_prices(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("gpu_hour: {h100: 1.5}\negress_gib: {price: 0.01, date: 2026-01-01, source: contract}\n")
    prices, listed = read_prices(file), read_prices()
    assert prices.gpu_hour["h100"].price == 1.5
    assert prices.gpu_hour["h200"] == listed.gpu_hour["h200"]
    assert prices.shared_gib_month == listed.shared_gib_month
    assert str(prices.egress_gib) == "0.01 (contract, 2026-01-01)"


def test_a_files_gpus_may_be_spelled_in_any_way_and_its_prices_count_in_any_currency(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("gpu_hour: {H100: 2.1, NVIDIA L40S: 0.9, mine: 4}\n")
    own = read_prices(file, "EUR")
    assert {gpu: price.price for gpu, price in own.gpu_hour.items()} == {"h100": 2.1, "l40s": 0.9, "mine": 4.0}
    assert own.shared_gib_month == Price(None), "list prices are in dollars"
    assert read_prices(currency="EUR") == Prices()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu_hours: {}", "gpu_hours: unknown key; expected gpu_hour, shared_gib_month"),
        ("gpu_hour: 3", "gpu_hour: expected a mapping of GPUs to prices, got 3"),
        ("gpu_hour: {h100: cheap}", "gpu_hour.h100='cheap': expected a price, 0 or more"),
        ("gpu_hour: {h100: 2, H100: 3}", "gpu_hour.H100: a second price of h100; keep one"),
        ("egress_gib: -1", "egress_gib=-1: expected a price, 0 or more"),
        ("egress_gib: .inf", "egress_gib=inf: expected a price"),
    ],
)
def test_a_wrong_price_is_named(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"prices\.yaml") as caught:
        read_prices(tmp_path / "prices.yaml")
    assert words in str(caught.value)
