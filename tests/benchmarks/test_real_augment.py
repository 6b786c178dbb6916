"""Arms of the benchmark of augmentations: their shares, their table, and refused options."""

from __future__ import annotations

import re

import pytest

from benchmarks.real_augment import ARMS, SHARES, format_arms, main, make_augment, parse_shares
from benchmarks.real_summary import summarise
from fctune.base.errors import ConfigError
from fctune.config.sections.data import AUGMENT_KINDS, AugmentConfig


def test_each_kind_is_an_arm_of_its_own_with_its_share() -> None:
    shares = parse_shares(["ask=5%"])
    assert shares == SHARES | {"ask": 0.05}
    assert set(shares) == set(AUGMENT_KINDS) == set(ARMS) - {"none", "all"}
    assert make_augment("none", shares) is None
    for arm in ARMS[1:]:
        augment = AugmentConfig(**(make_augment(arm, shares) or {}))
        assert augment.shares() == (shares if arm == "all" else {arm: shares[arm]})


def test_the_table_gives_each_arm_with_its_interval_and_its_difference_to_none() -> None:
    def rows(num_right: int) -> list[dict[str, object]]:
        verdicts = ["correct"] * num_right + ["missed_call"] * (10 - num_right)
        made = [{"id": f"c{n}", "category": "c", "verdict": verdict} for n, verdict in enumerate(verdicts)]
        return [{**row, "lenient": {"verdict": row["verdict"]}} for row in made]

    none = rows(2)
    summaries = {"none": summarise(None, none), "ask": summarise(none, rows(8))}
    assert format_arms(summaries).splitlines() == [
        "| | cases | none | ask |",
        "|---|---|---|---|",
        "| c | 10 | 20% (6% - 51%) | 80% (49% - 94%), +60%, p = 0.03 |",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--shares", "aks=5%"], "--shares aks=5%: expected KIND=SHARE above 0 with one of distract, mask_names"),
        (["--shares", "ask=5"], "--shares ask=5: expected a share"),
        (["--shares", "ask=0"], "--shares ask=0: expected KIND=SHARE above 0"),
        (["--arms", "none", "foo"], "--arms foo: expected none, distract, mask_names"),
        (["--steps", "0"], "--steps 0: expected 1 or more"),
    ],
)
def test_wrong_options_are_one_sentence(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "fctune/assets/tiny_base", *options]) == 2
    assert says in capsys.readouterr().err


def test_a_share_without_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("--shares ask: expected a share")):
        parse_shares(["ask"])
