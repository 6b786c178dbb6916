"""Cases that a run was trained on are found, and named before their accuracy is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eval import tool_calls
from fctune.base.errors import DataError
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.conversation import Conversation, Message
from fctune.data.prepared_set import prepare
from fctune.data.redaction import Redactor
from fctune.data.sources.reader import parse_source
from fctune.data.sources.row_builder import ParsedRow
from fctune.data.synthetic import iter_cases
from fctune.tasks.evaluation.held_out import (
    HELD_OUT_FILE,
    find_asked,
    find_leaks,
    make_held_out_cases,
    write_held_out_cases,
)
from fctune.tasks.suite_files import load_suite
from fctune.tasks.task import Case

WriteRows = Callable[..., Path]


def make_run(folder: Path, *sources: Path, pairs: bool = False, cases: str | None = None) -> Path:
    (folder / "export" / "merged").mkdir(parents=True)
    (folder / "export" / "merged" / "config.json").write_text("{}")
    data = {"sources": [{"path": str(source), "format": "auto"} for source in sources], "pairs": pairs}
    config = {"data": data, "grpo": None if cases is None else {"cases": cases}}
    (folder / "run.json").write_text(json.dumps({"config": config}))
    return folder


@pytest.fixture
def rows(write_rows: WriteRows) -> tuple[Path, Path]:
    """Six cases, and training rows that hold the first two of them."""
    cases = [case.to_json() for case in iter_cases(6, 1)]
    answer = {"role": "assistant", "content": "Done."}
    trained = [{"messages": [*case["messages"], answer]} for case in cases[:2]]
    trained[1]["messages"] += [{"role": "user", "content": "Thanks."}, answer]
    return write_rows(cases, "cases.jsonl"), write_rows(trained, "train.jsonl")


def test_cases_in_the_training_data_are_found(rows: tuple[Path, Path], tmp_path: Path) -> None:
    cases, trained = rows
    suite = load_suite(cases)
    run = make_run(tmp_path / "run", trained)
    for model in (run, run / "export" / "merged"):
        leaks = find_leaks(suite.all_cases, model)
        assert leaks is not None
        assert leaks == (run, tuple(case.id for case in suite.cases[:2]), {})
    assert find_leaks(suite.all_cases, tmp_path) is None


def test_prompts_of_preference_pairs_are_compared(
    rows: tuple[Path, Path], write_rows: WriteRows, tmp_path: Path
) -> None:
    suite = load_suite(rows[0])
    answers = [{"role": "assistant", "content": text} for text in ("Done.", "No.")]
    trained = [case.to_json() for case in iter_cases(6, 1)][2:4]
    pairs = [
        {"prompt": case["messages"], "chosen": answers[:1], "rejected": answers[1:], "tools": case["tools"]}
        for case in trained
    ]
    both = {"chosen": [*pairs[1]["prompt"], answers[0]], "rejected": [*pairs[1]["prompt"], answers[1]]}
    pairs[1] = {**both, "tools": pairs[1]["tools"]}
    run = make_run(tmp_path / "run", write_rows(pairs, "pairs.jsonl"), pairs=True)
    assert find_leaks(suite.all_cases, run) == (run, tuple(case.id for case in suite.cases[2:4]), {})


def test_cases_of_reinforcement_are_compared(rows: tuple[Path, Path], write_rows: WriteRows, tmp_path: Path) -> None:
    suite = load_suite(rows[0])
    asked = write_rows([case.to_json() for case in iter_cases(6, 1)][3:5], "asked.jsonl")
    for name, cases, expected in (
        ("cases", str(asked), suite.cases[3:5]),
        ("recorded", f"recorded:{rows[1]}", suite.cases[:2]),
        ("tasks", "environment:files:10", ()),
    ):
        run = make_run(tmp_path / name, cases=cases)
        assert find_leaks(suite.all_cases, run) == (run, tuple(case.id for case in expected), {}), name
    gone = make_run(tmp_path / "gone", cases="no/cases.jsonl")
    leaks = find_leaks(suite.all_cases, gone)
    assert leaks is not None
    assert leaks.unread.keys() == {"no/cases.jsonl"}


@pytest.mark.parametrize("pairs", [False, True], ids=["rows", "pairs"])
def test_rows_that_a_run_left_out_are_not_in_its_training_data(
    pairs: bool, write_rows: WriteRows, tmp_path: Path
) -> None:
    texts = [f"What is {number} times 7?" for number in range(40)]
    questions = [{"role": "user", "content": text} for text in texts]
    cases = [Case(f"case-{n}", "all", Conversation((Message("user", text),)), ()) for n, text in enumerate(texts)]
    answers = [[{"role": "assistant", "content": text}] for text in ("Done.", "No.")]
    if pairs:
        rows = [{"prompt": [one], "chosen": answers[0], "rejected": answers[1]} for one in questions]
    else:
        rows = [{"messages": [one, *answers[0]]} for one in questions]
    run = make_run(tmp_path / "run", write_rows(rows, "rows.jsonl"), pairs=pairs)
    written = json.loads((run / "run.json").read_text())

    def find(**settings: float) -> tuple[str, ...]:
        data = written["config"]["data"]
        source = {**data["sources"][0], "weight": settings.pop("weight", 1.0)}
        config = {**written["config"], "data": {**data, **settings, "sources": [source]}}
        (run / "run.json").write_text(json.dumps({"config": config}))
        leaks = find_leaks(cases, run)
        assert leaks is not None
        return leaks.case_ids

    ids = find()
    assert ids == tuple(case.id for case in cases)
    assert find(max_samples=10) == ids[:10]
    some = find(weight=0.5)
    assert 8 < len(some) < 32
    assert set(some) < set(find(weight=0.9))
    assert find(weight=0.5, max_samples=10) == tuple(i for i in some if i in ids[:10])


def test_rows_that_a_run_drew_to_replay_count_whatever_their_weight(
    rows: tuple[Path, Path], write_rows: WriteRows, tmp_path: Path
) -> None:
    suite = load_suite(rows[0])
    run = make_run(tmp_path / "run", write_rows([], "empty.jsonl"))
    written = json.loads((run / "run.json").read_text())
    written["config"]["data"]["replay"] = {"sources": [{"path": str(rows[1]), "weight": 1e-9}], "share": "5%"}
    (run / "run.json").write_text(json.dumps(written))
    leaks = find_leaks(suite.all_cases, run)
    assert leaks is not None
    assert leaks.case_ids == tuple(case.id for case in suite.cases[:2])


def test_a_source_that_is_gone_is_named(rows: tuple[Path, Path], tmp_path: Path) -> None:
    leaks = find_leaks(load_suite(rows[0]).all_cases, make_run(tmp_path / "run", tmp_path / "gone.jsonl"))
    assert leaks is not None
    assert leaks.unread.keys() == {str(tmp_path / "gone.jsonl")}
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(DataError, match="does not name the run's training data"):
        find_leaks(load_suite(rows[0]).all_cases, tmp_path / "run")


def test_strict_leaks_exits_with_1_before_asking(
    rows: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", rows[1])
    arguments = ["--model", str(run), "--cases", str(rows[0]), "--strict-leaks", "--out", str(tmp_path / "out.jsonl")]
    assert tool_calls.main(arguments) == 1
    assert f"2 of 6 cases are in the training data of {run}" in capsys.readouterr().out
    assert not (tmp_path / "out.jsonl").exists()


def test_held_out_rows_that_a_run_wrote_as_cases_are_not_in_its_training_data(tiny_base: Path, tmp_path: Path) -> None:
    source = "synthetic:train:200:3"
    config = DataConfig(sources=[SourceConfig(path=source)], seq_len=512, validation_share=0.1)
    prepared = prepare(config, tiny_base, tmp_path / "prepared")
    run = make_run(tmp_path / "run", Path(source))
    write_held_out_cases(config, prepared, run)
    suite = load_suite(run / HELD_OUT_FILE)
    assert len(suite.cases) > 10
    assert {case.category for case in suite.cases} == {"call", "no_call"}
    num_held_out = len(prepared.packs["validation"][0])
    assert len(suite.cases) < num_held_out  # one asks what a training row asks, too
    assert find_leaks(suite.all_cases, run) == (run, (), {})
    large = replace(prepared, counts=replace(prepared.counts, rows=1_000_000))
    assert [case.id for case in make_held_out_cases(config, large)[0]] == [case.id for case in suite.cases]
    (run / HELD_OUT_FILE).unlink()  # which says that these rows did not train
    leaks = find_leaks(suite.all_cases, run)
    assert leaks is not None
    assert len(leaks.case_ids) == len(suite.cases)


def test_cases_with_placeholders_are_found_in_rows_with_the_secrets(tmp_path: Path) -> None:
    question = {"role": "user", "content": "Upload it with AKIA" + "IOSFODNN7EXAMPLA"}
    row = {"messages": [question, {"role": "assistant", "content": "Done."}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = DataConfig(sources=[SourceConfig(path=str(path))], secrets="redact")
    (parsed,) = parse_source(str(path))
    assert isinstance(parsed, ParsedRow)
    redacted, _ = Redactor(config.redact).redact(parsed)
    cases = [
        Case(name, "all", replace(found.conversation, messages=found.conversation.messages[:1]), ())
        for name, found in (("placeholder", redacted), ("secret", parsed))
    ]
    assert cases[0].prompt != cases[1].prompt
    assert find_asked(cases, config) == ("placeholder", "secret")


@pytest.mark.parametrize("cases", ["environment:files:10", "mcp:rooms.yaml"])
def test_tasks_without_rows_are_not_compared(rows: tuple[Path, Path], tmp_path: Path, cases: str) -> None:
    run = make_run(tmp_path / "run", cases=cases)
    assert find_leaks(load_suite(rows[0]).all_cases, run) == (run, (), {})
