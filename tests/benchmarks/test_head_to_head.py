"""Both tools train the same rows, each part is done once, and the statistics count cases rather than seeds."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path

import pytest

from benchmarks.head_to_head import compare, main, sign_flip_p
from benchmarks.real_rows import to_cases, write_rows
from fctune.base.errors import DataError
from fctune.data.synthetic import iter_conversations
from fctune.tasks.evaluation.paired import mcnemar_p


@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (1, 0), (5, 1), (3, 3), (2, 9)])
def test_with_one_seed_the_test_is_mcnemars(right: int, wrong: int) -> None:
    assert sign_flip_p([1] * right + [-1] * wrong + [0] * 7) == pytest.approx(mcnemar_p(right, wrong))


def test_seeds_that_agree_add_no_evidence() -> None:
    differences = [1] * 6 + [-1] * 2
    assert sign_flip_p([3 * one for one in differences]) == pytest.approx(sign_flip_p(differences))
    # All sign choices of 3, 3, 1: only those of equal signs reach 7.
    assert sign_flip_p([3, 3, 1]) == pytest.approx(2 / 2**3)
    assert sign_flip_p([2] * 10) == pytest.approx(2 * comb(10, 0) / 2**10)


def make_results(tool: str, by_seed: list[list[bool]]) -> list[dict[str, object]]:
    verdicts = [{"c": {f"c-{i}": right for i, right in enumerate(one)}} for one in by_seed]
    return [{"tool": tool, "seed": seed, "verdicts": one} for seed, one in enumerate(verdicts, 1)]


def test_accuracies_are_means_over_seeds_with_the_interval_of_the_cases() -> None:
    ours = make_results("fctune", [[True] * 8 + [False] * 2, [True] * 6 + [False] * 4])
    theirs = make_results("trl", [[True] * 5 + [False] * 5, [True] * 5 + [False] * 5])
    once = compare(ours[:1], theirs[:1])["categories"]["c"]
    both = compare(ours, theirs)
    assert both["categories"]["c"]["fctune"]["accuracy"] == pytest.approx(0.7)
    assert both["categories"]["c"]["difference"][0] == pytest.approx(0.2)
    assert both["categories"]["c"]["n"] == once["n"] == 10
    assert both["categories"]["c"]["trl"] == once["trl"]
    assert both["mean_over_categories_by_seed"] == {"fctune": [0.8, 0.6], "trl": [0.5, 0.5]}
    with pytest.raises(DataError, match="different cases"):
        compare(ours[:1], make_results("trl", [[True] * 9]))


@pytest.mark.slow
def test_both_tools_train_the_same_tokens_and_an_ended_part_is_kept(chatml_base: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows", tmp_path / "out"
    write_rows(rows / "train.jsonl", (row.to_openai() for row in iter_conversations("train", 40, 0)))
    for split in ("test", "validation"):
        write_rows(rows / f"{split}.jsonl", to_cases(list(iter_conversations("train", 4, 1)), "unseen_tools"))
    words = ["--model", str(chatml_base), "--rows", str(rows), "--out", str(out), "--config", "configs/tiny_lora.yaml"]
    words += ["--tokens", "8000", "--seeds", "1", "--learning-rates", "1e-3", "--limit", "2", "--max-new-tokens", "8"]
    # Each step has all rows, so the tools' orders of rows do not matter.
    words += ["adapter.modules=all-linear", "adapter.train_tokens=off", "global_batch_size=16", "epochs=2"]
    words += ["lr_scheduler.warmup=1", "--categories", "unseen_tools"]
    assert main(words) == 0
    report = json.loads((out / "head_to_head.json").read_text())
    ours, theirs = (next(one["trained"] for one in report["trainings"] if (one["tool"], one["stage"]) == (tool, "full"))
                    for tool in ("fctune", "trl"))  # fmt: skip
    assert theirs["is_packed"]
    assert ours["steps"] == theirs["steps"] == 2
    assert ours["tokens"] == theirs["tokens"]
    assert ours["trained_parameters"] == theirs["trained_parameters"]
    in_trl = report["rows"]["in_trl"]["trl: objects, load_dataset, assistant_only_loss"]
    assert in_trl["kinds"] == {"equal": report["rows"]["counts"]["full"]["rows"]}  # apart from white space
    added = in_trl["tokens_trained"]["trl"] - in_trl["tokens_trained"]["fctune"]
    assert theirs["supervised_tokens"] == ours["supervised_tokens"] + 2 * added  # in each of two epochs
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=0.02)
    assert report["full"]["categories"]["unseen_tools"]["n"] == 2
    kept = {path: path.stat().st_mtime_ns for path in (out / "measured").iterdir()}
    assert not list((out / "trainings").glob("*/"))
    assert main(words) == 0
    assert kept == {path: path.stat().st_mtime_ns for path in (out / "measured").iterdir()}
    assert main([*words, "--tokens", "4000"]) == 2
