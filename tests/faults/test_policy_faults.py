"""A run of reinforcement that is interrupted anywhere resumes, and each answer counts once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.groups import Fault, run_group
from tests.faults.policy_soak import (
    SETTINGS,
    arguments_for,
    find_record_problems,
    read_answers,
    read_saved_answers,
    soak_policies,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(("engine", "is_lying"), [("in_process", False), ("server", False), ("server", True)])
def test_random_kills_count_no_answer_twice_and_lose_none(engine: str, is_lying: bool, tmp_path: Path) -> None:
    settings = [one for one in SETTINGS if (one.engine, one.is_lying) == (engine, is_lying)]
    assert soak_policies(num_kills=3, seed=2, folder=tmp_path, settings=settings) == 0


def test_records_of_a_run_that_counted_or_lost_an_answer_are_rejected(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    setting = next(one for one in SETTINGS if one.engine == "in_process" and one.updates == 2)
    run = tmp_path / "run"
    arguments = [*arguments_for(run, inputs[0], setting, ""), "checkpoint.async_save=false"]
    assert run_group(arguments, 1, Fault("kill", "step", 0, 4)).fired
    saved = read_saved_answers(run)
    assert run_group(arguments, 1).codes == (0,)
    of_second = {(row["case_id"], row["sample"]) for row in read_answers(run) if row["batch"] == 2}
    assert saved.keys() <= of_second, "the checkpoint of step 3 is in the middle of a batch"
    assert saved
    assert find_record_problems(run, setting, saved) == []
    log = run / "rollouts.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]

    def find(changed: list[dict[str, object]]) -> str:
        log.write_text("".join(json.dumps(row) + "\n" for row in changed))
        return "; ".join(find_record_problems(run, setting, saved))

    assert "1 answer counted twice" in find([*rows, rows[0]])
    assert "answers in all and trained" in find(rows[:-1])
    key = next(iter(saved))
    asked_again = [
        row | {"version": row["version"] + 1} if (row["case_id"], row["sample"]) == key else row for row in rows
    ]
    assert "1 of" in find(asked_again)
    assert "were lost or asked again" in find(asked_again)
    stale = [row | {"version": max(0, row["version"] - 3)} for row in rows]
    assert "updates old" in find(stale)
    weighed = next(index for index, row in enumerate(rows) if row["advantage"])
    for name, value, said in (
        ("advantage", rows[weighed]["advantage"] * 1.01, "advantage"),
        ("advantage", None, "advantage None"),
        ("reward", rows[weighed]["reward"] + 0.25, "and its parts make"),
        ("error", "unusable answer", "failed, and is trained"),
        ("logprobs", [float("nan")] * len(rows[weighed]["ids"]), "ids with log-probabilities"),
        ("logprobs", [0.5] * len(rows[weighed]["ids"]), "ids with log-probabilities"),
        ("ids", [10**6] * len(rows[weighed]["ids"]), "ids [1000000"),
    ):
        assert said in find([*rows[:weighed], rows[weighed] | {name: value}, *rows[weighed + 1 :]]), name
