"""Results of tau2-bench and ACEBench, in the shapes that their packages write, and commands that show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.report.run_sections import add_published
from fctune.base.errors import DataError
from fctune.cli.eval_options import run_module
from fctune.pages.page import Page
from fctune.tasks.evaluation.published import Score, read_published


def simulation(task: int, trial: int, reward: float | None, ended: str = "user_stop") -> dict[str, Any]:
    rewarded = None if reward is None else {"reward": reward, "db_check": None, "reward_basis": ["DB"]}
    return {
        "id": f"{task}-{trial}",
        "task_id": str(task),
        "trial": trial,
        "termination_reason": ended,
        "reward_info": rewarded,
        "messages": [],
        "duration": 1.0,
    }


def tau2_results(simulations: list[dict[str, Any]], num_tasks: int, num_trials: int = 2) -> dict[str, Any]:
    """A results file as ``Results.save`` of tau2-bench writes it, without what no reader here looks at."""
    return {
        "timestamp": "2026-01-01T00:00:00",
        "info": {
            "git_commit": "0123456789abcdef",
            "num_trials": num_trials,
            "max_steps": 100,
            "max_errors": 10,
            "user_info": {"implementation": "user_simulator", "llm": "a-user"},
            "agent_info": {"implementation": "llm_agent", "llm": "a-model"},
            "environment_info": {"domain_name": "retail", "policy": ""},
            "seed": 300,
        },
        "tasks": [{"id": str(task)} for task in range(num_tasks)],
        "simulations": simulations,
    }


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def write_ace(directory: Path, scores: dict[str, dict[str, Any]]) -> Path:
    for category, header in scores.items():
        wrong = [{"id": f"{category}_{n}", "valid": False} for n in range(2)]
        write(directory / f"data_{category}_score.json", "\n".join(map(json.dumps, [header, *wrong])))
    return directory


def test_tau2_gives_the_share_of_trials_solved_averaged_over_tasks(tmp_path: Path) -> None:
    runs = [simulation(0, 0, 1.0), simulation(0, 1, 0.0), simulation(1, 0, 1.0), simulation(1, 1, 0.9999999)]
    found = read_published(write(tmp_path / "r.json", tau2_results(runs, 2)))
    assert found.scores == {"retail, pass^1": Score(0.75, 4)}
    assert (found.benchmark, found.model) == ("tau2-bench", "a-model")
    assert found.notes == ("commit 0123456789ab", "user simulated by a-user")


def test_tau2_leaves_out_the_endings_that_the_package_does_not_rate_and_counts_each(tmp_path: Path) -> None:
    endings = ["infrastructure_error", "context_window_exceeded", "context_window_exceeded", "max_steps", "agent_error"]
    runs = [simulation(task, 0, None, ending) for task, ending in enumerate(endings)]
    found = read_published(write(tmp_path / "r.json", tau2_results([*runs, simulation(5, 0, 1.0)], 6, num_trials=1)))
    assert found.scores == {"retail, pass^1": Score(1 / 3, 3)}
    assert found.notes[2:] == (
        "left out: 1 simulation that ended with an infrastructure error",
        "left out: 2 simulations that exceeded the context window",
    )


def test_tau2_says_how_many_simulations_are_missing(tmp_path: Path) -> None:
    found = read_published(write(tmp_path / "r.json", tau2_results([simulation(0, 0, 1.0), simulation(0, 1, 0.0)], 2)))
    assert found.scores == {"retail, pass^1": Score(0.5, 2)}
    assert found.notes[2:] == ("incomplete: 2 of 4 simulations",)


def test_tau2_stored_as_a_directory_is_read_by_its_index(tmp_path: Path) -> None:
    results = tau2_results([], 1)
    del results["simulations"]
    index = {"id": "x", "task_id": 0, "termination_reason": "agent_stop", "agent_cost": None, "duration": 1.0}
    results["simulation_index"] = [{**index, "trial": 0, "reward": 1.0}, {**index, "trial": 1, "reward": None}]
    write(tmp_path / "run" / "results.json", results)
    assert read_published(tmp_path / "run").scores == {"retail, pass^1": Score(0.5, 2)}


def test_acebench_gives_the_first_line_of_each_score(tmp_path: Path) -> None:
    directory = write_ace(
        tmp_path / "score_en" / "my-model",
        {
            "normal_atom_bool": {"accuracy": 0.9, "correct_count": 45, "total_count": 50},
            "agent_multi_step": {
                "end_to_end_accuracy": 0.2,
                "process_accuracy": 0.45,
                "correct_count": 4,
                "total_count": 20,
            },
        },
    )
    found = read_published(directory)
    assert found.scores == {
        "agent_multi_step": Score(0.2, 20),
        "agent_multi_step, process": Score(0.45, 20),
        "normal_atom_bool": Score(0.9, 50),
    }
    assert (found.benchmark, found.model, found.notes[0]) == ("ACEBench", "my-model", "language en")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"info": {"git_commit"', "not complete JSON"),
        ([{"task_id": 0, "reward": 1.0}], "expected an object, got list"),
        ({"model_name": "x", "results": {}}, "not results of tau2-bench 1.0"),
        (tau2_results([], 3), "contains no finished simulation"),
        ({**tau2_results([simulation(0, 0, 1.0)], 1), "info": None}, "not results of tau2-bench 1.0"),
    ],
    ids=["cut", "tau1", "leaderboard", "empty", "no-info"],
)
def test_other_files_are_named_in_one_sentence(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        read_published(write(tmp_path / "r.json", content))


def test_a_missing_file_and_a_broken_score_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"results\.json: cannot be read \(No such file or directory\)"):
        read_published(tmp_path)
    write(tmp_path / "m" / "data_normal_atom_bool_score.json", '{"accuracy": 1.5, "total_count": 3}\n')
    with pytest.raises(DataError, match="does not have ACEBench's accuracy"):
        read_published(tmp_path / "m")


def test_compare_shows_two_runs_and_names_what_one_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write_ace(tmp_path / "score_en" / "base", {"normal_atom_bool": {"accuracy": 0.5, "total_count": 50}})
    after = write_ace(
        tmp_path / "score_en" / "tuned",
        {
            "normal_atom_bool": {"accuracy": 0.75, "total_count": 50},
            "special_irrelevant": {"accuracy": 0.1, "total_count": 50},
        },
    )
    out = tmp_path / "compared.json"
    assert run_module("compare", "fctune compare", [str(before), str(after), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "+25.0%" in shown
    assert "not run" in shown
    assert json.loads(out.read_text())["after"]["scores"]["special_irrelevant"] == [0.1, 50]
    other = write(tmp_path / "tau2.json", tau2_results([simulation(0, 0, 1.0)], 1))
    assert run_module("compare", "fctune compare", [str(before), str(other)]) == 2
    assert "Pass results of one benchmark" in capsys.readouterr().err


def test_results_of_two_releases_of_the_benchmark_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for release in ("2026.3.23", "2027.1.1"):
        row = {"id": "a", "category": "c", "verdict": "correct", "lenient": {"verdict": "correct"}}
        paths.append(write(tmp_path / f"{release}.jsonl", json.dumps(row) + "\n"))
        write(tmp_path / f"{release}.settings.json", {"release": f"bfcl-eval {release}"})
    assert run_module("compare", "fctune compare", list(map(str, paths))) == 2
    assert "release is bfcl-eval 2026.3.23 in one and bfcl-eval 2027.1.1 in the other" in capsys.readouterr().err


def test_a_reports_page_shows_published_results(tmp_path: Path) -> None:
    page = Page("A run")
    add_published(page, [read_published(write(tmp_path / "r.json", tau2_results([simulation(0, 0, 1.0)], 1)))])
    page.write(tmp_path / "page.html", "")
    shown = (tmp_path / "page.html").read_text()
    assert "Published benchmarks" in shown
    assert "retail, pass^1" in shown
    assert "100.0%" in shown
    assert "incomplete: 1 of 2 simulations" in shown


def test_compare_gives_the_leaderboards_overall_number_and_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, num_right in (("before", 1), ("after", 3)):
        rows = []
        for number in range(4):
            bfcl = {"valid": number < num_right, "reason": ""}
            row = {"id": f"multiple_{number}", "category": "multiple", "verdict": "correct", "bfcl": bfcl}
            rows.append(json.dumps({**row, "lenient": row}))
        paths.append(write(tmp_path / f"{name}.jsonl", "\n".join(rows) + "\n"))
        write(tmp_path / f"{name}.settings.json", {"release": "bfcl-eval 2026.3.23"})
    assert run_module("compare", "fctune compare", list(map(str, paths))) == 0
    _, overall, missing, incomplete = capsys.readouterr().out.rstrip().rsplit("\n", 3)
    assert overall == "overall as the leaderboard weighs it (bfcl-eval 2026.3.23): before 0.62%, after 1.88%"
    assert missing.startswith("not measured, counted as 0 in it: simple_python, ")
    assert missing.endswith("web_search_base, web_search_no_snippet")
    assert incomplete == "measured on fewer cases than the leaderboard's: multiple"


def test_compare_says_if_the_version_of_the_leaderboards_cases_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"id": "multiple_0", "category": "multiple", "verdict": "correct", "bfcl": {"valid": True, "reason": ""}}
    path = write(tmp_path / "results.jsonl", {**row, "lenient": row})
    assert run_module("compare", "fctune compare", [str(path), str(path)]) == 0
    assert "as the leaderboard weighs it (version unknown)" in capsys.readouterr().out
