"""The benchmark of learning from verdicts, with commands that write what the real ones write."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning

NUM_CALLS, NUM_OTHERS = learning.NUM_CASES["test"]


class Commands:
    """Plays ``fctune``: the start and the controls answer half of the test right, other models all of it."""

    def __init__(self) -> None:
        self.called: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str) -> None:
        self.called.append(arguments)
        options = dict(itertools.pairwise(arguments))
        if arguments[0] == "data":
            kinds = ["call", "no_call"] * 3000
            for option in ("--out", "--test"):
                write(
                    Path(options[option]),
                    [
                        {"id": f"{option} {n}", "kind": kind, "tools": [{}] * (1 + n % 3 // 2)}
                        for n, kind in enumerate(kinds)
                    ],
                )
        elif arguments[0] == "train":
            folder = Path(find_value(arguments, "output_dir"))
            (folder / "export" / "merged").mkdir(parents=True)
            (folder / "export" / "merged" / "config.json").write_text("{}")
            times = {"step_time_s": 10.0}
            if "grpo" in folder.name:
                times |= {"generation_time_s": 6.5, "judging_time_s": 0.5}
            write(folder / "metrics.jsonl", [{"step": 1, **times}, {"step": 2, **times}])
        elif arguments[0] == "sample":
            out, keep = Path(options["--out"]), options["--keep"]
            write(out / "sft.jsonl", [{"row": n} for n in range(9 if keep == "best" else 40)])
            ids: dict[str, list[str]] = {"call": [], "no_call": []}
            for case in read(Path(options["--cases"])):
                ids[case["kind"]].append(case["id"])
            chosen = [*ids["call"][:38], *ids["no_call"][:2]] if keep == "best" else [*ids["no_call"], *ids["call"]]
            write(out / "pairs.jsonl", [{"keep": keep, "metadata": {"case": one}} for one in chosen])
        else:
            cases = [json.loads(line) for line in Path(options["--cases"]).read_text().splitlines()]
            is_better = not any(name in options["--model"] for name in ("start", "control"))
            rows = [
                {"id": case["id"], "category": case["kind"], "expected_calls": []}
                | {"verdict": "correct" if number % 2 or is_better else "wrong_name"}
                for number, case in enumerate(cases)
            ]
            write(Path(options["--out"]), rows)


def find_value(arguments: tuple[str, ...], key: str) -> str:
    return [word.partition("=")[2] for word in arguments if word.startswith(f"{key}=")][-1]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_each_method_and_its_control_are_compared_with_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands()
    monkeypatch.setattr(learning, "fctune", commands)
    command = ["--out", str(tmp_path), "--seeds", "1", "--control"]
    assert learning.main(command) == 0
    results = {result["model"]: result for result in json.loads((tmp_path / "test.json").read_text())}
    assert results["grpo"]["time_shares"] == {"generation": 0.6, "judging": 0.05}
    assert "time_shares" not in results["dpo"]
    found = {name: result["categories"] for name, result in results.items()}
    assert list(found) == [
        "start",
        *("dpo", "dpo-control", "grpo", "grpo-control", "rejection", "rejection-control"),
    ]
    n = NUM_CALLS + NUM_OTHERS
    assert (found["rejection"]["all"]["turned_right"], found["rejection"]["all"]["p_value"]) == (
        n // 2,
        2 / 2 ** (n // 2),
    )
    assert found["rejection-control"]["all"]["difference"][0] == 0
    assert f"| rejection | 1 | no_call ({NUM_OTHERS}) | 100.0% |" in capsys.readouterr().out

    folder = tmp_path / "seed1"
    rows = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in ("right", "random")}
    assert len(rows["right"]) == len(rows["random"]) == 9
    # The control's pairs are others, as many of each kind of case.
    kinds = {case["id"]: case["kind"] for case in read(folder / "prompts.jsonl")}
    for kind, num_pairs in (("call", 38), ("no_call", 2)):
        for prefix, keep in (("", "best"), ("random_", "random")):
            pairs = read(folder / f"{prefix}pairs_{kind}.jsonl")
            assert [pair["keep"] for pair in pairs] == [keep] * num_pairs
            assert {kinds[pair["metadata"]["case"]] for pair in pairs} == {kind}
    # Nothing is both trained on by the start and sampled, and no case is in two sets.
    lines = [
        line
        for name in ("start_rows", "prompts", "validation", "test")
        for line in (folder / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len(lines) == len(set(lines))
    # All methods start from the same model.
    trained = [arguments for arguments in commands.called if arguments[0] == "train"]
    assert {find_value(arguments, "model.path") for arguments in trained[1:]} == {str(folder / "start/export/merged")}
    # Pairs where no call is due have their share of the test.
    dpo = next(arguments for arguments in trained if find_value(arguments, "output_dir").endswith("dpo"))
    sources = json.loads(find_value(dpo, "data.sources"))
    assert [source["path"] for source in sources] == [
        str(folder / f"pairs_{kind}.jsonl") for kind in ("call", "no_call")
    ]
    assert [source["weight"] for source in sources] == [1.0, pytest.approx(38 / 2 * NUM_OTHERS / NUM_CALLS, abs=0.01)]
    # Run again, nothing is sampled, trained or measured.
    commands.called.clear()
    assert learning.main(command) == 0
    assert not commands.called


def test_other_settings_need_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "fctune", Commands())
    command = ["--out", str(tmp_path), "--seeds", "0", "--methods", "dpo", "--split", "validation"]
    with pytest.raises(SystemExit):
        learning.main([*command, "optimizer.lr=1e-3"])
    assert learning.main([*command, "--trial", "low", "optimizer.lr=1e-4"]) == 0
    with pytest.raises(SystemExit, match="was trained with different settings"):
        learning.main([*command, "--trial", "low", "optimizer.lr=1e-5"])
