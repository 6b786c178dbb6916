"""What explains a fall is found in the rows, and treated by settings that a run accepts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.gate.history import RowProfile, TrainingHistory, find_history
from fctune.apps.gate.lines import JudgedLine, Line, judge_lines
from fctune.apps.gate.remedies import combine, find_remedies, make_commands
from fctune.config.intervals import parse_share
from fctune.config.loading import load_config
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.tasks.evaluation.paired import PairedOutcome
from tests.conftest import ROOT

USER, TEXT, QUESTION = Message("user", "Do it"), Message("assistant", "No."), Message("assistant", "Which one?")
CALL = Message("assistant", None, (Call("t1", {}),))
THOUGHT = Message("assistant", "No.", reasoning="Hm.")
TOOLS = tuple(Tool({"name": f"t{i}"}) for i in range(1, 4))


def make_row(*messages: Message, tools: tuple[Tool, ...] = TOOLS) -> Conversation:
    return Conversation(messages, tools)


def fallen(name: str, cause: str = "") -> JudgedLine:
    line = Line(name, name, [PairedOutcome(str(i), True, i > 60) for i in range(100)], cause=cause)
    return judge_lines([line], 0.1)[0]


def profile(*counted: tuple[int, Conversation], **augment: float) -> RowProfile:
    made = RowProfile("rows.jsonl", augment)
    for times, row in counted:
        for _ in range(times):
            made.add(row)
    return made


VARIED = [(10, make_row(USER, CALL, tools=(TOOLS[0], Tool({"name": f"other{i}"})))) for i in range(8)]
GENERAL = (40, make_row(USER, THOUGHT, tools=()))
TURNS = (30, make_row(USER, TEXT, USER, CALL))


@pytest.mark.parametrize(
    ("line", "rows", "words", "keys"),
    [
        ("over_calling", [(100, make_row(USER, CALL))], ["share of negatives", "no clarifications", "one tool set"], 6),
        ("over_calling", [*VARIED, (40, make_row(USER, QUESTION))], ["nothing that is searched for"], 2),
        ("over_refusing", [*VARIED, (200, make_row(USER, TEXT))], ["need no call, so that not calling"], 1),
        ("reasoning", VARIED, ["no reasoning"], 2),
        ("reasoning", [*VARIED, GENERAL], ["nothing that is searched for"], 2),
        ("bfcl_multi_turn", VARIED, ["one turn only", "tool calls only"], 2),
        ("bfcl_multi_turn", [*VARIED, GENERAL, TURNS], ["nothing that is searched for"], 2),
    ],
)
def test_each_fall_is_explained_by_what_the_rows_lack(
    line: str, rows: list[tuple[int, Conversation]], words: list[str], keys: int
) -> None:
    cause = "multi_turn" if "multi" in line else ""
    remedies = find_remedies(fallen(line, cause), profile(*rows))
    assert len(remedies) == len(words)
    for remedy, text in zip(remedies, words, strict=True):
        assert text in remedy.finding
    assert len({key for remedy in remedies for key in remedy.overrides}) == keys


def test_what_was_tried_is_tried_harder_and_unknown_rows_are_named() -> None:
    calls = (100, make_row(USER, CALL))
    (first, *_) = find_remedies(fallen("over_calling"), profile(calls))
    assert first.overrides == {"data.augment.take_away": "30%"}
    (first, *_) = find_remedies(fallen("over_calling"), profile(calls, take_away=0.1))
    assert first.overrides == {"data.augment.take_away": "30%"}
    tried = find_remedies(fallen("over_calling"), profile(calls, take_away=0.3, ask=0.1, mask_names=0.6))
    assert "23.1% with those of take_away" in tried[0].finding
    assert tried[0].overrides["data.augment.take_away"] == "60%"
    assert tried[1].overrides["data.augment.mask_names"] == "100%"
    enough = find_remedies(fallen("over_calling"), profile(calls, take_away=0.8, ask=0.1))
    assert not any("negatives" in one.finding for one in enough), "44 % of the rows are negatives by then"
    calls_made = profile(calls, take_away=0.3)
    calls_made.learning_rate = 4e-3
    assert find_remedies(fallen("over_calling"), calls_made)[0].overrides == {
        "data.augment.take_away": "60%",
        "optimizer.lr": "0.001",
    }
    (unknown,) = find_remedies(fallen("over_calling"), None)
    assert "--rows" in unknown.finding


def test_a_run_that_its_max_steps_cut_short_is_trained_on_first() -> None:
    cut = replace(profile((200, make_row(USER, CALL))), max_steps=64, num_passes=0.2, rows_needed=100, rows_read=40)
    first, *others = find_remedies(fallen("over_calling"), cut)
    assert "max_steps=64 ended the training after 20% of a pass" in first.finding
    assert first.overrides == {"max_steps": "320"}, "one pass"
    assert "share of negatives" in others[0].finding, "which the longer run needs as well"
    for complete in (replace(cut, num_passes=1.0, rows_read=200), replace(cut, max_steps=None, num_passes=None)):
        assert not any(remedy.overrides.get("max_steps") for remedy in find_remedies(fallen("over_calling"), complete))


def parse_rows(path: Path, rows: list[dict[str, Any]]) -> RowProfile:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TrainingHistory(str(path), None, (str(path),)).profile()


def test_a_result_that_calls_and_refuses_too_much_is_not_taught_to_refuse_more() -> None:
    rows = [(1, make_row(Message("user", f"Do {i}"), TEXT if i % 10 == 0 else CALL)) for i in range(100)]
    confused = profile(*rows, take_away=0.2)
    confused.called_share = 0.55
    for line in (fallen("over_calling"), fallen("over_calling", "missing_tool")):
        (remedy,) = find_remedies(line, confused)
        assert "calls nothing in 45% of the held-out requests that a tool on offer answers" in remedy.finding
        assert set(remedy.overrides) == {"data.replay.sources", "data.replay.share"}
    confused.replay = {"sources": [{"path": "own.jsonl"}], "share": "50%"}
    (remedy,) = find_remedies(fallen("over_calling"), confused)
    assert remedy.overrides["data.augment.mask_names"] == "30%"
    confused.called_share = 0.9
    assert find_remedies(fallen("over_calling"), confused)[0].overrides["data.augment.take_away"] == "33.3%"
    few = profile((100, make_row(USER, CALL)))
    few.called_share = 0.55
    assert find_remedies(fallen("over_calling"), few)[0].overrides == {"data.augment.take_away": "30%"}


def test_only_what_the_augmenter_can_do_to_the_rows_is_proposed(tmp_path: Path) -> None:
    def make(names: list[str], number: int) -> dict[str, Any]:
        call = {"name": names[0], "arguments": json.dumps({"order": f"A{number}"})}
        return {
            "tools": [
                {"type": "function", "function": {"name": n, "parameters": {"type": "object", "properties": {}}}}
                for n in names
            ],
            "messages": [
                {"role": "user", "content": f"Where is order A{number}?"},
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            ],
        }

    one = parse_rows(tmp_path / "one.jsonl", [make(["status"], i) for i in range(60)])
    (negatives, *others) = find_remedies(fallen("over_calling"), one)
    assert not negatives.overrides
    assert "cannot make more of these rows (all tools are needed, and no other is known)" in negatives.finding
    proposed = {key for remedy in others for key in remedy.overrides}
    assert proposed.isdisjoint({"data.augment.distract", "data.augment.shuffle_tools"}), "there is one tool"
    two = parse_rows(tmp_path / "two.jsonl", [make(["status", "weather"], i) for i in range(60)])
    proposed = {key for remedy in find_remedies(fallen("over_calling"), two) for key in remedy.overrides}
    assert {"data.augment.take_away", "data.augment.shuffle_tools"} <= proposed
    assert "data.augment.distract" not in proposed, "no row has other tools"


def test_rows_that_the_augmenter_leaves_alone_raise_the_share_of_the_others(tmp_path: Path) -> None:
    rows = []
    for i in range(60):
        request = f"Do {i}" if i % 3 == 0 else f"Use t1 for {i}"  # which names the tool, so that it cannot be missing
        rows.append(make_row(Message("user", request), CALL).to_openai())
    profiled = parse_rows(tmp_path / "rows.jsonl", rows)
    (remedy, *_) = find_remedies(fallen("over_calling"), profiled)
    assert remedy.overrides["data.augment.take_away"] == "90%", "30 rows without a call for 100 with tools"
    profiled.augment = {"take_away": 0.15}
    (remedy, *_) = find_remedies(fallen("over_calling"), profiled)
    assert "4.8% with those of take_away" in remedy.finding, "a third of 15 % was made"
    assert remedy.overrides["data.augment.take_away"] == "90%"


def test_a_share_that_did_not_suffice_is_doubled_although_commands_round_it(tmp_path: Path) -> None:
    rows = []
    for i in range(56):
        request = "Use t1" if i % 28 == 0 else "Do"  # of 28 rows, one names the tool
        rows.append(make_row(Message("user", f"{request} {i}"), CALL).to_openai())
    profiled = parse_rows(tmp_path / "rows.jsonl", rows)
    (first, *_) = find_remedies(fallen("over_calling"), profiled)
    assert first.overrides["data.augment.take_away"] == "31.1%", "30 rows without a call for 100, of 27 in 28"
    profiled.augment = {"take_away": 0.311}
    (second, *_) = find_remedies(fallen("over_calling"), profiled)
    assert second.overrides["data.augment.take_away"] == "62.2%"


def test_repeated_requests_are_few_negatives_however_many_rows_have_them(tmp_path: Path) -> None:
    rows = [make_row(Message("user", f"Do {i}"), CALL).to_openai() for i in range(60)]
    rows += [make_row(Message("user", f"Hello {i % 3}"), TEXT).to_openai() for i in range(30)]
    (remedy, *_) = find_remedies(fallen("over_calling"), parse_rows(tmp_path / "rows.jsonl", rows))
    assert "30 rows need no call and have 3 different requests, of 90 rows with tools (4.8% of" in remedy.finding
    (remedy, *_) = find_remedies(fallen("over_calling", "missing_tool"), profile((9, make_row(USER, QUESTION))))
    assert remedy.finding.startswith("missing tools: most of what is lost are requests whose tool was taken away")


def test_a_base_that_does_not_reason_loses_no_reasoning() -> None:
    rows = profile(*VARIED)
    assert any("no reasoning" in one.finding for one in find_remedies(fallen("abandoned"), rows))
    rows.base_reasons = False
    assert not any("no reasoning" in one.finding for one in find_remedies(fallen("abandoned"), rows))


def test_a_fall_that_the_rows_do_not_explain_asks_for_a_smaller_learning_rate() -> None:
    rows = profile(*VARIED, (40, make_row(USER, QUESTION)))
    rows.learning_rate = 2e-5
    (remedy,) = find_remedies(fallen("over_calling"), rows)
    assert remedy.overrides == {"optimizer.lr": "5e-06"}
    assert not remedy.note


def test_the_command_of_a_run_is_repeated_with_all_remedies(tmp_path: Path) -> None:
    rows = tmp_path / "calls.jsonl"
    lines = [make_row(Message("user", f"Do {i}"), CALL).to_openai() for i in range(40)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tmp_path / "run"
    (run / "export" / "merged").mkdir(parents=True)
    words = ["tiny_lora", f"data.sources=[{{path: {rows}}}]", f"output_dir={run}", "max_steps=9"]
    config: dict[str, Any] = load_config(ROOT / "configs" / "tiny_lora.yaml", words[1:]).to_dict()
    (run / "run.json").write_text(json.dumps({"config": config, "command": ["fctune", "train", *words]}))
    history = find_history(str(run / "export" / "merged"))
    assert history is not None
    found = history.profile()
    assert (found.num_rows, found.counts["call"], found.main_set_share) == (40, 40, 1.0)
    assert found.learning_rate == config["optimizer"]["lr"] == 4e-3
    judged = [fallen(name) for name in ("over_calling", "invented_tool")]
    judged = [
        JudgedLine(one.line, one.comparison, one.p_adjusted, 0.1, None, find_remedies(one, found)) for one in judged
    ]
    (command,) = make_commands(combine(judged), history, Path("gate"))
    _, _, name, *overrides = shlex.split(command)
    again = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    assert again.output_dir == f"{run}_mended"
    assert (again.max_steps, again.data.augment and again.data.augment.shares()["take_away"]) == (9, 0.3)


def test_the_passes_of_a_run_are_those_of_its_steps(tmp_path: Path) -> None:
    rows, run = tmp_path / "calls.jsonl", tmp_path / "run"
    lines = [make_row(Message("user", f"Do {i}"), CALL).to_openai() for i in range(40)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.mkdir()
    words = [f"data.sources=[{{path: {rows}}}]", f"output_dir={run}", "max_steps=9", "epochs=3"]
    config: dict[str, Any] = load_config(ROOT / "configs" / "tiny_lora.yaml", words).to_dict()
    record = {"config": config, "command": ["fctune", "train", "tiny_lora", *words], "num_steps": 9}
    for per_epoch, num_passes, rows_read in ((36, 0.25, 10), (None, None, 120)):  # unknown: those of the config
        counted = {} if per_epoch is None else {"steps_per_epoch": per_epoch}
        (run / "run.json").write_text(json.dumps(record | counted))
        history = find_history(str(run))
        assert history is not None
        assert (history.num_passes, history.profile().rows_read) == (num_passes, rows_read)
    (first, *_) = find_remedies(fallen("calls"), replace(history.profile(), num_passes=0.25))
    assert first.overrides == {"max_steps": "36"}


def read_replay(overrides: Mapping[str, str]) -> tuple[dict[str, float], float]:
    """Return the weight of each replayed source, and their share."""
    config = load_config(ROOT / "configs" / "tiny_lora.yaml", [f"{key}={value}" for key, value in overrides.items()])
    assert config.data.replay is not None
    weights = {source.path: source.weight for source in config.data.replay.sources}
    return weights, parse_share(config.data.replay.share)


def judge_with(profile: RowProfile, **causes: str) -> list[JudgedLine]:
    lines = [fallen(name, cause) for name, cause in causes.items()]
    return [replace(line, remedies=find_remedies(line, profile)) for line in lines]


def test_remedies_that_mix_in_different_rows_mix_in_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CALLS.jsonl", "GENERAL.jsonl"):
        (tmp_path / name).write_text("{}")
    confused = profile(*((1, make_row(Message("user", f"{i}"), TEXT if i % 5 == 0 else CALL)) for i in range(50)))
    confused.called_share = 0.5
    lines = judge_with(confused, over_calling="", bfcl_multi_turn="multi_turn")
    weights, share = read_replay(combine(lines))
    assert list(weights) == ["CALLS.jsonl", "GENERAL.jsonl"]
    parts = [weight / sum(weights.values()) for weight in weights.values()]
    # For each training row, as many of either as if it were mixed in alone: 33 of 67, and 10 of 90.
    assert [part * share / (1 - share) for part in parts] == pytest.approx([33 / 67, 10 / 90], rel=0.02)
    assert read_replay(combine(lines[:1])) == ({"CALLS.jsonl": 1.0}, 0.33)
    assert read_replay(combine([*lines[1:], *lines[1:]])) == ({"GENERAL.jsonl": 1.0}, 0.1)


OWN_REPLAY = {"sources": [{"path": "own.jsonl", "weight": 2.0, "where": "calls > 0"}], "share": "50%"}


@pytest.mark.parametrize(
    ("line", "cause", "rate"),
    [("bfcl_multi_turn", "multi_turn", 1e-4), ("reasoning", "", 1e-4), ("made_up", "made_up", None)],
)
def test_rows_that_the_user_mixes_in_stay_and_are_not_fewer(
    line: str, cause: str, rate: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own.jsonl", "GENERAL.jsonl"):
        (tmp_path / name).write_text("{}")
    mixed = profile(*VARIED)
    mixed.replay, mixed.learning_rate = OWN_REPLAY, rate
    overrides = combine(judge_with(mixed, **{line: cause}))
    config = load_config(ROOT / "configs" / "tiny_lora.yaml", [f"{key}={value}" for key, value in overrides.items()])
    assert config.data.replay is not None
    assert config.data.replay.sources[0].where == "calls > 0"
    weights, share = read_replay(overrides)
    assert list(weights) == ["own.jsonl", "GENERAL.jsonl"]
    odds = share / (1 - share)
    assert odds * weights["own.jsonl"] / sum(weights.values()) == pytest.approx(1.0, rel=0.02)
    assert odds * weights["own.jsonl"] / sum(weights.values()) <= 1.0, "its file may have no more rows"
    assert odds * weights["GENERAL.jsonl"] / sum(weights.values()) == pytest.approx(1 / 9, rel=0.05)

    typed = (
        "fctune",
        "tune",
        "--data",
        "rows.jsonl",
        "data.replay.sources=[{path: own.jsonl}]",
        "data.replay.share=50%",
    )
    trained = TrainingHistory("r", None, config={"output_dir": "r/run"}, command=typed)
    (command,) = make_commands(overrides, trained, Path("r/gate"))
    assert command.count("own.jsonl") == command.count("data.replay.sources") == command.count("data.replay.share") == 1


@pytest.mark.parametrize("named", [["--out", "runs/mine"], ["--out=runs/mine"], []])
def test_a_tune_is_repeated_in_another_directory_with_the_remedies(named: list[str]) -> None:
    command = ("fctune", "tune", "--data", "rows.jsonl", *named, "epochs=2", "gate.base_answers=runs/earlier/gate")
    history = TrainingHistory("runs/mine/run", None, config={"output_dir": "runs/mine/run"}, command=command)
    (again,) = make_commands({"data.augment.take_away": "30%"}, history, Path("runs/mine/gate"))
    assert again == (
        "fctune tune --data rows.jsonl epochs=2 --out runs/mine_mended data.augment.take_away=30% "
        "gate.base_answers=runs/mine/gate"
    )


def test_too_few_rows_are_the_first_finding(tmp_path: Path) -> None:
    few = replace(profile((14, make_row(USER, CALL))), rows_needed=10_000, rows_read=140)
    first, *others = find_remedies(fallen("over_calling"), few)
    assert "too few rows: 14 rows, 140 with repetitions, and this model needs about 10,000" in first.finding
    assert "fctune data generate" in first.finding
    assert not first.overrides
    assert others == list(find_remedies(fallen("over_calling"), replace(few, rows_read=9_000)))
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(make_row(Message("user", f"Do {i}"), CALL).to_openai()) + "\n" for i in range(14))
    )
    tiny = {"model": {"path": str(ROOT / "fctune/assets/tiny_base")}, "epochs": 10}
    for config, needed in ((tiny, 10_000), ({"epochs": 10}, 100)):
        found = TrainingHistory("rows.jsonl", None, (str(path),), config).profile()
        assert (found.num_rows, found.rows_read, found.rows_needed) == (14, 140, needed)
