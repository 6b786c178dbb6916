"""Rollouts survive JSON unchanged, and seeds do not meet."""

from __future__ import annotations

import json
import math

import pytest

from fctune.tasks.episode import make_seed
from fctune.tasks.rollouts import Rollout

ROLLOUT = Rollout(
    *("case", 3, "no_call", 17, (1, 2), (5, 6, 7), (True, False, True), (-math.pi, 0.0, -1e-300)),
    is_cut=True,
    reward=1 / 3,
    parts={"strict": 0.1 + 0.2},
    text="a\ud800\n",
    judging_s=0.5,
)


def test_json_gives_back_an_equal_rollout() -> None:
    copy = Rollout.from_json(json.loads(json.dumps({"step": 4, **ROLLOUT.to_json()})))
    assert copy == ROLLOUT
    assert copy.logprobs == ROLLOUT.logprobs
    assert copy.judging_s == 0.5
    assert copy.num_generated == 2


def test_flags_and_logprobs_belong_to_ids() -> None:
    with pytest.raises(AssertionError, match="one flag"):
        Rollout("case", 0, "all", 0, (1,), (2, 3), (True,), (0.0, 0.0))


def test_seeds_of_neighbouring_samples_differ() -> None:
    seeds = {make_seed(42, case, sample, step) for case in "abc" for sample in range(8) for step in range(8)}
    assert len(seeds) == 3 * 8 * 8
    assert make_seed("a", 1) == make_seed("a", 1)
