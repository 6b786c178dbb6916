"""Lengths within a run: steps, times and shares, and the warnings of lengths that do not suit the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fctune.base.errors import ConfigError
from fctune.config.intervals import format_count, parse_interval, parse_interval_or_auto, parse_share
from fctune.config.loading import load_config
from fctune.config.run_length import RunLength, find_length_warnings
from fctune.config.schema import LRSchedulerConfig
from fctune.training.setup import lr_factor
from tests.conftest import ROOT, TINY_BASE

CONFIG = ROOT / "configs" / "tiny_lora.yaml"


@pytest.mark.parametrize(
    ("value", "num_steps", "step_s", "steps"),
    [
        (500, 84, None, 500),
        ("500", 84, None, 500),
        (0, 84, None, 0),
        ("0%", 84, None, 0),
        ("5%", 84, None, 5),  # rounded up
        ("3%", 100, None, 3),
        ("3%", 10, None, 1),
        ("100%", 84, None, 84),
        ("10min", 84, None, None),
        ("10min", 84, 13.3, 46),
        ("90s", 84, 30.0, 3),
        ("1.5h", 84, 540.0, 10),
        ("1s", 84, 30.0, 1),
    ],
)
def test_an_interval_in_steps(value: int | str, num_steps: int, step_s: float | None, steps: int | None) -> None:
    assert parse_interval(value).in_steps(num_steps, step_s) == steps


@pytest.mark.parametrize("value", ["10m", "10 minutes", "-5%", "%", "", "1e3", -1, "200%"])
def test_what_is_no_interval_is_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_interval(value)


def test_auto_is_at_most_a_third_of_the_run() -> None:
    assert parse_interval_or_auto("auto").in_steps(300) == 100
    assert parse_interval_or_auto("auto").in_steps(2) == 1
    assert parse_interval_or_auto("5%").in_steps(100) == 5
    with pytest.raises(ConfigError, match=r"checkpoint\.elastic_every=often: expected .* or auto"):
        load_config(CONFIG, ["checkpoint.elastic_every=often"])
    with pytest.raises(ConfigError, match=r"checkpoint\.every=auto: expected"):
        load_config(CONFIG, ["checkpoint.every=auto"])


@pytest.mark.parametrize(("value", "share"), [("10%", 0.1), (0.1, 0.1), ("0.1", 0.1), (0, 0.0), ("100%", 1.0)])
def test_a_share_may_be_written_in_percent(value: float | str, share: float) -> None:
    assert parse_share(value) == pytest.approx(share)


@pytest.mark.parametrize("value", [10, "101%", -0.1, "ten", "nan", True])
def test_values_that_are_no_share_are_rejected_by_key(value: float | str) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_invalid_share=.*: expected"):
        load_config(CONFIG, [f"data.max_invalid_share={value}"])


def test_a_share_of_the_run_warms_up_whatever_its_length() -> None:
    for num_steps in (10, 84, 1000):
        factor = lr_factor(LRSchedulerConfig(name="constant", warmup="10%"), num_steps)
        below = [step for step in range(num_steps) if factor(step) < 1]
        assert below == list(range(-(-num_steps // 10)))


GOOD = ["global_batch_size=64", "lr_scheduler.warmup=3%", "validation.every=10%"]
NO_ELASTIC = ["checkpoint.elastic_every=0"]
GOOD_LENGTH = RunLength(300, packs=6400, step_s=10.0)


def warn(length: RunLength, *overrides: str) -> list[str]:
    return find_length_warnings(load_config(CONFIG, [*GOOD, *overrides]), length)


def test_a_run_that_suits_its_data_has_no_warning() -> None:
    assert warn(GOOD_LENGTH) == []
    assert warn(RunLength(300, packs=6400)) == []  # a run does not know its speed when it starts
    assert warn(GOOD_LENGTH, "data.validation_share=0", "gate.max_new_tokens=256") == []  # as tune does with --cases


@pytest.mark.parametrize(
    ("length", "overrides", "words"),
    [
        (RunLength(84, 4000, 13.0), ["lr_scheduler.warmup=100"], "the learning rate never reaches optimizer.lr"),
        (RunLength(84, 4000, 13.0), ["lr_scheduler.warmup=50"], "is below optimizer.lr for most of them"),
        (RunLength(84, 4000, 13.0), [*NO_ELASTIC, "checkpoint.every=500"], "nothing is saved before its end"),
        (RunLength(84, 4000), [*NO_ELASTIC, "checkpoint.every=500"], "nothing is saved before its end"),
        (GOOD_LENGTH, [*NO_ELASTIC, "checkpoint.every=0"], "nothing is saved before its end"),
        (RunLength(300, 6400, 10.0, save_s=900.0), [], "a save takes 15 min, so training would wait"),
        (GOOD_LENGTH, ["validation.every=400"], "validation loss is measured only at its end"),
        (GOOD_LENGTH, ["validation.every=0"], "validation loss is never measured"),
        (GOOD_LENGTH, ["data.validation_share=0"], "never measured; set data.validation_share=0.02"),
        (RunLength(300, 6400, 10.0, has_validation=False), [], "never measured; set it higher, or train on 20 rows"),
        (RunLength(49, 3136, 10.0), [], "only 49 optimizer steps; expect little change"),
        (RunLength(60, 310, 60.0), ["epochs=12"], "an epoch is only 5 steps; lower global_batch_size (64 packs)"),
        (
            RunLength(6, 380, is_upper_bound=True),
            ["data.max_samples=380"],
            "data.max_samples=380 leaves at most 6 optimizer steps",
        ),
    ],
)
def test_what_does_not_suit_the_length_is_said_with_its_remedy(
    length: RunLength, overrides: list[str], words: str
) -> None:
    warnings = warn(length, *overrides)
    assert len(warnings) == 1
    assert words in warnings[0]
    assert any(remedy in warnings[0] for remedy in ("; set ", "; lower "))


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        (
            "tiny_grpo",
            ["grpo.prompts_per_step=32"],
            "lower grpo.prompts_per_step (32 prompts) to 12 or so, or train on",
        ),
        (
            "tiny_lora",
            [f"distill={{teacher: {TINY_BASE}, on_policy_share: 0, answers_per_step: 16}}"],
            "lower distill.answers_per_step (16 answers) to 6 or so, or train on more rows",
        ),
        (
            "tiny_lora",
            [f"distill={{teacher: {TINY_BASE}, cases: 'synthetic:dev:9', answers_per_step: 2, on_policy_share: 0.5}}"],
            "train on more cases, or for more epochs",
        ),
    ],
)
def test_few_steps_of_answers_are_said_with_the_key_of_their_number(
    name: str, overrides: list[str], words: str
) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml", ["max_steps=null", *overrides])
    warnings = find_length_warnings(config, RunLength(40, packs=9))
    assert f"only 40 optimizer steps; expect little change; {words}" in warnings[0]
    assert not any("global_batch_size" in warning for warning in warnings)


def test_a_short_run_needs_no_checkpoint_and_a_trial_no_steps(tmp_path: Path) -> None:
    assert warn(RunLength(84, 4000, 2.0), "checkpoint.every=500") == []
    assert warn(RunLength(4, 4000), "max_steps=4", "checkpoint.every=0") == []


def test_one_step_is_no_steps() -> None:
    assert (str(parse_interval(1)), str(parse_interval(1000))) == ("1 step", "1,000 steps")
    assert [format_count(number, "checkpoint") for number in (0, 1, 2)] == [
        "0 checkpoints",
        "1 checkpoint",
        "2 checkpoints",
    ]
    assert format_count(1, "node is", "nodes are") == "1 node is"
    assert format_count(1_200, "node is", "nodes are") == "1,200 nodes are"
