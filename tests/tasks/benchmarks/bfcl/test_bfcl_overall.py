"""The overall number and its parts, against the wheel's own leaderboard function on made result sets."""

from __future__ import annotations

import random
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fctune.calls.judge import BenchmarkVerdict, Judgement, Outcome
from fctune.tasks.benchmarks import find_benchmarks
from fctune.tasks.benchmarks.bfcl.cases import CATEGORIES
from fctune.tasks.benchmarks.bfcl.overall import AGENTIC, NUM_CASES, WEIGHTS, weigh
from fctune.tasks.evaluation.summary import Tally
from fctune.tasks.suite import Measured, Suite
from tests.tasks.benchmarks.bfcl.bfcl_wheel import data_dir, needs_wheel

RIGHT = Judgement(Outcome("correct", 1, 1), "", (), BenchmarkVerdict(True, ""))
WRONG = Judgement(Outcome("missed_call", 1, 0), "x", (), BenchmarkVerdict(False, "x"))


def official_overall(measured: dict[str, Measured], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the wheel's numbers, before it rounds them, under the names of its columns."""
    pytest.importorskip("pandas")
    card = types.SimpleNamespace(
        display_name="m", url="", org="", license="", input_price=None, output_price=None, underscore_to_dot=False
    )
    table = types.ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {"m": card, "keeps-dots": card}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, table.__name__, table)
    monkeypatch.delitem(sys.modules, "bfcl_eval.eval_checker.eval_runner_helper", raising=False)
    from bfcl_eval.eval_checker import eval_runner_helper as helper

    written: dict[str, Any] = {}

    def keep(data: list[list[Any]], file_path: Path, header: list[str], **_: Any) -> None:
        if file_path.name == "data_overall.csv":
            written.update(zip(header, data[0], strict=True))
        if file_path.name in ("data_non_live.csv", "data_agentic.csv"):
            written[file_path.stem] = data[0][2]

    monkeypatch.setattr(helper, "write_score_csv_file", keep)
    scores = {name: {"accuracy": one.accuracy, "total_count": one.num_cases} for name, one in measured.items()}
    helper.generate_leaderboard_csv({"m": scores}, folder)
    return written


@pytest.mark.sample(1)
@needs_wheel
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(3, 6))])
def test_the_overall_number_is_the_leaderboards(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    share = (1.0, 0.7, 0.3)[seed % 3]
    measured = {
        name: Measured(rng.random(), n if rng.random() < 0.7 else rng.randint(1, n))
        for name, n in NUM_CASES.items()
        if rng.random() <= share
    }
    official = official_overall(measured, tmp_path, monkeypatch)
    ours = weigh(measured)
    assert ours["overall"] == pytest.approx(official["Overall Acc"], abs=1e-12)
    assert ours["parts"]["live"] == pytest.approx(official["Live Acc"], abs=1e-12)
    assert ours["parts"]["multi_turn"] == pytest.approx(official["Multi Turn Acc"], abs=1e-12)
    assert ours["parts"]["non_live"] == pytest.approx(official["data_non_live"], abs=1e-12)
    assert ours["parts"]["agentic"] == pytest.approx(official["data_agentic"], abs=1e-12)
    missing = {"irrelevance", "live_irrelevance"} - measured.keys()
    assert official["Irrelevance Detection"] == ("N/A" if missing else pytest.approx(ours["parts"]["irrelevance"]))


@needs_wheel
def test_the_numbers_of_cases_are_the_wheels() -> None:
    for name in CATEGORIES:
        path = data_dir() / f"BFCL_v4_{name}.json"
        assert sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip()) == NUM_CASES[name]
    assert sum(WEIGHTS.values()) == 100


def test_what_is_not_measured_counts_as_nothing_and_is_named() -> None:
    everything = {name: Measured(1.0, n) for name, n in NUM_CASES.items()}
    assert weigh(everything) | {"parts": None} == {
        "overall": 1.0, "parts": None, "weights": WEIGHTS, "not_measured": [], "incomplete": []
    }  # fmt: skip
    without = weigh({name: one for name, one in everything.items() if name not in AGENTIC})
    assert without["overall"] == pytest.approx(0.6)
    assert without["not_measured"] == list(AGENTIC)
    partly = weigh({**everything, "live_simple": Measured(1.0, 10)})
    assert partly["incomplete"] == ["live_simple"]
    assert weigh({name: one for name, one in everything.items() if name != "live_relevance"})["overall"] == 1.0


def test_a_summary_of_the_benchmarks_cases_has_its_overall_number() -> None:
    benchmark = find_benchmarks()["bfcl"]
    tally = Tally(Suite(benchmark.name, (), benchmark.title, weigh=benchmark.weigh))
    for judged in [RIGHT] * 3 + [WRONG]:
        tally.add("simple_python", judged, judged)
    found = tally.summarise()["leaderboard"]
    assert found["parts"]["non_live"] == pytest.approx(0.75 / 3 / 4)
    assert found["overall"] == pytest.approx(0.1 * 0.75 / 12)
    assert "simple_python" in found["incomplete"]
    assert Counter(found["not_measured"])["simple_python"] == 0


def test_other_cases_have_no_overall_number() -> None:
    tally = Tally(Suite("own", ()))
    judged = RIGHT._replace(benchmark=None)
    tally.add("simple_python", judged, judged)
    assert "leaderboard" not in tally.summarise()
