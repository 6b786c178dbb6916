"""``fctune tune``: rows to a judged model in one command, which resumes at each step and refuses what cannot work."""

from __future__ import annotations

import bisect
import json
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fctune.apps.gate.history import find_history
from fctune.apps.gate.lines import Line, judge_lines
from fctune.apps.gate.remedies import combine, find_remedies, make_commands
from fctune.apps.tune.choices import draft_config, find_fit
from fctune.apps.tune.machine import Machine
from fctune.base.gpus import GIB, GPUS
from fctune.cli import main
from fctune.config.intervals import parse_share
from fctune.config.loading import load_config
from fctune.config.sections.data import SourceConfig
from fctune.data.sources.tool_file import read_tool_files
from fctune.data.synthetic import iter_conversations
from fctune.models.planned_model import find_architecture
from fctune.models.run_config import load_run_config
from fctune.runs.directory import RunDirectory
from fctune.runs.release import mark_not_released, remove_mark
from fctune.tasks.evaluation.paired import PairedOutcome
from fctune.training import entry
from tests.cli.processes import wait_until
from tests.conftest import ROOT, TINY_BASE
from tests.warm_interpreter import warm_python

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
QUICK = ["epochs=1", "gate.max_new_tokens=48"]  # the result may be any; its steps are tested
CPU = Machine(0, replace(GPUS["h100"], name="CPU", memory_bytes=16 * GIB))
STEPS = ["check", "split", "plan", "train", "gate", "report"]


def write_synthetic(path: Path, num_rows: int, seed: int = 3) -> Path:
    rows = (conversation.to_openai() for conversation in iter_conversations("varied", num_rows, seed))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class Tuned:
    """A finished tune, and what it printed."""

    folder: Path
    command: list[str]
    output: str
    code: int


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    folder = tmp_path_factory.mktemp("tune")
    write_synthetic(folder / "rows.jsonl", 60)
    command = ["tune", "--data", "rows.jsonl", "--out", "out", *QUICK]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FCTUNE_CACHE", str(folder / "cache"))
        process = subprocess.run(
            [warm_python(), "-m", "fctune.cli", *command],
            cwd=folder,
            env={**ENVIRONMENT, "FCTUNE_CACHE": str(folder / "cache")},
            capture_output=True,
            text=True,
        )
        assert process.returncode in (0, 1), process.stdout + process.stderr
        assert "verdict:" in process.stdout, process.stderr  # an unexpected error is 1, too
        yield Tuned(folder, command, process.stdout, process.returncode)


def test_each_step_is_printed_with_its_findings_and_the_next_commands(tuned: Tuned) -> None:
    assert [line[:-1] for line in tuned.output.splitlines() if line.removesuffix(":") in STEPS] == [
        "check",
        "split",
        "plan",
        "gate",
        "report",
    ]
    assert "train: 1 process; Ctrl-C saves" in tuned.output
    assert "60 of 60 usable" in tuned.output
    assert "held out to judge with: 12 cases" in tuned.output
    assert "12 of 60 rows held out, 12 cases for the gate; never trained on" in tuned.output
    steps = {int(text) for text in re.findall(r"(?:;|for) (\d+) steps", tuned.output)}
    assert steps == {len((tuned.folder / "out" / "run" / "metrics.jsonl").read_text().splitlines())}
    assert "not run: bfcl" in tuned.output  # listed, never as passed
    verdict = json.loads((tuned.folder / "out" / "gate" / "gate.json").read_text())["verdict"]
    assert f"verdict: {verdict} (" in tuned.output
    assert tuned.code == int(verdict == "worse")
    assert ("serve it:     fctune serve out/run" in tuned.output) == (verdict != "worse")
    assert "fctune push" not in tuned.output, "the tiny model"


@pytest.mark.parametrize("command", ["tune", "train"])
def test_a_run_offers_to_serve_its_result_only_if_no_gate_follows(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(entry, "find_typed_command", lambda: ["fctune", command])
    monkeypatch.setattr(entry.logger, "info", lambda text, *values: lines.append(text % values))
    entry._log_next_steps(RunDirectory(tmp_path), load_config(ROOT / "configs" / "tiny_lora.yaml"))
    assert any("fctune serve" in line for line in lines) == (command == "train")


def test_it_ends_with_a_chat_that_works_and_the_remedies_which_a_second_start_prints_again(tuned: Tuned) -> None:
    commands = json.loads((tuned.folder / "out" / "gate" / "gate.json").read_text())["commands"]
    lines = tuned.output.splitlines()
    assert lines[-1] == (f"remedy:       {commands[0]}" if commands else lines[-1])
    assert sum(command in line for command in commands for line in lines) == len(commands)
    assert "the same command" in lines[-1] or commands
    (chat,) = (line for line in lines if line.startswith("try it:"))
    words = shlex.split(chat.removeprefix("try it:"))
    assert words[:3] == ["fctune", "chat", "out/run"]
    rows = [json.loads(line) for line in (tuned.folder / "rows.jsonl").read_text().splitlines()]
    tools = {tool["function"]["name"] for row in rows for tool in row["tools"]}
    assert {tool.name for tool in read_tool_files([tuned.folder / "out" / "tools.json"])} == tools
    (question,) = (line.partition("for example: ")[2] for line in lines if "for example: " in line)
    (case,) = (row for row in rows if question in (message["content"] for message in row["messages"]))
    offered = read_tool_files([tuned.folder / words[words.index("--tools") + 1]])
    assert {tool["function"]["name"] for tool in case["tools"]} <= {tool.name for tool in offered}
    report = (tuned.folder / "out" / "report.html").read_text()
    assert report.index('href="gate/gate.html"') < report.index('class="tiles"')


def test_the_files_are_where_the_commands_look_for_them(tuned: Tuned) -> None:
    out = tuned.folder / "out"
    for file in ("rows.html", "tune.yaml", "tune.json", "run/export/merged/config.json", "run/held_out.jsonl"):
        assert (out / file).is_file(), file
    held_out = [json.loads(line)["id"] for line in (out / "run" / "held_out.jsonl").read_text().splitlines()]
    assert 1 <= len(held_out) <= 12
    assert "Tool-call accuracy: held_out" in (out / "report.html").read_text()  # before and after, from the gate


def test_the_written_config_is_that_of_the_run(tuned: Tuned) -> None:
    config = load_run_config("out/tune.yaml")
    recorded = json.loads((tuned.folder / "out" / "run" / "run.json").read_text())["config"]
    assert json.loads(json.dumps(config.to_dict())) == recorded
    assert [source.path for source in config.data.sources] == ["rows.jsonl"]


@pytest.mark.thorough
def test_fctune_train_repeats_the_written_config(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCTUNE_CACHE", str(tuned.folder / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["train", "out/tune.yaml", "--nproc", "1", "output_dir=again"]) == 0

    def read_losses(run: Path) -> list[float]:
        return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]

    assert read_losses(tuned.folder / "again") == read_losses(tuned.folder / "out" / "run")


def test_a_second_run_repeats_nothing_and_a_changed_one_is_refused(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCTUNE_CACHE", str(tuned.folder / "cache"))
    assert main(tuned.command) == tuned.code
    output = capsys.readouterr().out
    assert [line.partition(":")[0] for line in output.splitlines() if line.endswith("not repeated")] == STEPS
    end = tuned.output[tuned.output.index("verdict:") :]
    assert output.endswith(end)

    assert main([*tuned.command, "epochs=2"]) == 2
    errors = capsys.readouterr().err
    assert "--out out: was trained with other rows or settings." in errors
    assert "settings: was epochs=1, is epochs=1 epochs=2" in errors

    rows = tuned.folder / "rows.jsonl"
    before = rows.read_text()
    try:
        rows.write_text(before.partition("\n")[2])
        assert main(tuned.command) == 2
        assert "rows.jsonl has changed" in capsys.readouterr().err
    finally:
        rows.write_text(before)

    path = tuned.folder / "out" / "tune.yaml"
    text = path.read_text()
    try:
        path.write_text(text.replace("epochs: 1 ", "epochs: 2 "))
        assert main(tuned.command) == 2
        assert "out/tune.yaml: was edited after training" in capsys.readouterr().err
        path.unlink()
        assert main(tuned.command) == 2
        assert "out/tune.yaml: is gone, and the result was trained with it" in capsys.readouterr().err
    finally:
        path.write_text(text)


@pytest.mark.thorough
def test_a_step_whose_output_is_gone_is_repeated(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCTUNE_CACHE", str(tuned.folder / "cache"))
    out = tuned.folder / "out"
    (out / "report.html").unlink()
    assert main(tuned.command) == tuned.code
    assert (out / "report.html").is_file()

    (out / "gate" / "gate.json").unlink()
    settings = out / "gate" / "base.held_out.settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"fctune": "0.0"}))
    assert main(tuned.command) == tuned.code
    assert "or another fctune; asking again" in capsys.readouterr().err
    assert (out / "gate" / "gate.json").is_file()

    export, kept = out / "run" / "export", out / "run" / "kept"
    export.rename(kept)

    def train(*_: object) -> int:
        kept.rename(export)
        return 0

    monkeypatch.setattr("fctune.training.launcher.launch_recipe", train)
    assert main(tuned.command) == tuned.code
    output = capsys.readouterr().out
    assert "train: out/run/export is gone; trained again" in output
    assert [line.partition(":")[0] for line in output.splitlines() if line.endswith("not repeated")] == STEPS[:3]


@pytest.mark.thorough
def test_a_result_that_a_later_gate_stopped_is_not_offered(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCTUNE_CACHE", str(tuned.folder / "cache"))
    passing, run = [*tuned.command, "gate.tolerance=95%"], tuned.folder / "out" / "run"
    try:
        assert main(passing) == 0
        assert "serve it:" in capsys.readouterr().out
        mark_not_released(run, [{"name": "text", "title": "instructions", "verdict": "worse"}], run / "gate.json")
        assert main(passing) == 1
        output = capsys.readouterr().out
        assert "stopped since then by fctune gate, so serve and push refuse the result: instructions (worse)" in output
        assert "serve it:" not in output
    finally:
        remove_mark(run)
        assert main(tuned.command) == tuned.code


@pytest.mark.thorough
def test_a_result_that_a_later_gate_cleared_is_offered(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCTUNE_CACHE", str(tuned.folder / "cache"))
    strict = [*tuned.command, "gate.require_safe=true"]  # which so few cases cannot be
    blocked = re.compile("^blocked, so serve and push refuse the result: .*and require_safe is set", re.MULTILINE)
    try:
        for _ in range(2):
            assert main(strict) == 1
            output = capsys.readouterr().out
            assert blocked.search(output), "the second start says why, as the first one does"
            assert "serve it:" not in output
        gate = ["gate", "--base", str(TINY_BASE), "--tuned", "out/run", "--out", "other", "--tolerance", "95%"]
        assert main(gate) == 0
        capsys.readouterr()
        for _ in range(2):
            assert main(strict) == 0
            output = capsys.readouterr().out
            assert "cleared since then by fctune gate, so serve and push take the result" in output
            assert "serve it:     fctune serve out/run" in output
            assert "refuse the result" not in output
            assert "remedy:" not in output
    finally:
        assert main(tuned.command) == tuned.code


@pytest.mark.thorough
def test_a_result_that_an_earlier_gate_still_blocks_is_told_at_each_start(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCTUNE_CACHE", str(tuned.folder / "cache"))
    run = tuned.folder / "out" / "run"
    mark_not_released(run, [{"name": "text", "title": "instructions", "verdict": "worse", "n": 9}], run / "gate.json")
    try:
        for _ in range(2):
            assert main([*tuned.command, "gate.tolerance=95%"]) == 1
            output = capsys.readouterr().out
            assert "blocked, so serve and push refuse the result: " in output
            assert "instructions (worse in an earlier gate; not run in this one)" in output
            assert "serve it:" not in output
    finally:
        remove_mark(run)
        assert main(tuned.command) == tuned.code


def test_the_directory_of_a_tune_is_taken_wherever_a_run_is(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tuned.folder / "out" / "run"
    was_marked = bool(tuned.code)
    serve, push, export = ["serve", "out", "--print"], ["push", "out", "me/mine"], ["export", "out", "--to", "gguf"]
    if not was_marked:
        mark_not_released(run, [{"name": "text", "title": "instructions", "verdict": "worse"}], run / "gate.json")
    try:
        for words in (serve, [*push, "--yes"], export):
            assert main(words) == 2
            assert "because the gate stopped it" in capsys.readouterr().err, words
    finally:
        if not was_marked:
            remove_mark(run)
    assert main([*serve, "--force"]) == 0
    options = shlex.split(capsys.readouterr().out)
    assert options[options.index("--model") + 1] == "out/run/export/merged"
    assert options[options.index("--served-model-name") + 1] == "out"
    for words in ([*push, "--print-card"], ["watch", "out", "--once"], ["report", "out", "--out", "page.html"]):
        assert main(words) == 0
    assert main(["eval", "--model", "out", "--suite", "out/run/held_out.jsonl", "--limit", "1"]) == 0
    assert "training data" not in capsys.readouterr().err
    history = find_history("out")
    assert history is not None
    assert history.run == run


@pytest.mark.thorough
def test_the_gate_s_settings_can_be_changed_after_training(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCTUNE_CACHE", str(tuned.folder / "cache"))
    record, path = tuned.folder / "out" / "gate" / "gate.json", tuned.folder / "out" / "tune.yaml"
    before = path.read_text()
    changed = [*(word for word in tuned.command if not word.startswith("gate.")), "gate.max_new_tokens=8"]
    changed += ["gate.max_cases=2"]
    assert main([*changed, "gate.benchmarks=[mmlu]"]) == 2
    assert "mmlu: no such benchmark" in capsys.readouterr().err
    assert main(changed) in (0, 1)
    output = capsys.readouterr().out
    assert "is gate.max_new_tokens=8 gate.max_cases=2; judging again" in output
    assert "train: done" in output
    assert json.loads(record.read_text())["settings"]["max_new_tokens"] == 8
    path.write_text(path.read_text().replace("max_cases: 2", "max_cases: 3"))
    assert main(changed) in (0, 1)
    assert "the gate section of out/tune.yaml was edited: judged again" in capsys.readouterr().out
    assert json.loads(record.read_text())["settings"]["max_cases"] == 3
    assert main(tuned.command) == tuned.code
    assert sorted(path.read_text().splitlines()) == sorted(before.splitlines())


def stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have training stop as by Ctrl-C in its first step."""

    def launch(recipe: Path, words: list[str], processes: int, run: Path, log: object) -> int:
        run.mkdir(exist_ok=True)
        config = load_run_config(words[1]).to_dict()
        (run / "run.json").write_text(json.dumps({"config": config, "command": ["fctune", *TYPED]}))
        return 75

    monkeypatch.setattr("fctune.training.launcher.launch_recipe", launch)


TYPED: list[str] = []  # words that the user typed, of the tune that runs


def tune_as_typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    TYPED[:] = words
    monkeypatch.setattr("fctune.runs.directory.find_typed_command", lambda: ["fctune", *TYPED])
    return main(list(words))


@pytest.mark.thorough
def test_gate_settings_that_change_while_training_is_stopped_are_no_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stop_training(monkeypatch)
    write_synthetic(tmp_path / "rows.jsonl", 40)
    command, config = ["tune", "--data", "rows.jsonl", "--out", "out"], tmp_path / "out" / "tune.yaml"
    assert main(command) == 75
    for _ in range(2):
        assert main([*command, "gate.max_cases=2"]) == 75
        assert load_run_config(config).gate.max_cases == 2  # type: ignore[union-attr]
        assert "was edited" not in capsys.readouterr().out
    config.write_text(config.read_text().replace("max_cases: 2", "max_cases: 3"))
    for _ in range(2):
        assert main([*command, "gate.max_cases=2"]) == 75
        assert "out/tune.yaml was edited: trained as it is" in capsys.readouterr().out
    assert main([*command, "gate.max_cases=4"]) == 75
    assert main([*command, "gate.max_cases=4"]) == 75
    assert load_run_config(config).gate.max_cases == 4  # type: ignore[union-attr]
    assert capsys.readouterr().out.count("was edited") == 1, "the command's setting replaced the edit"


def mend(run: str) -> list[str]:
    """Return the words of the remedy of a run that calls too much, and has lost several turns and its reasoning."""
    history = find_history(run)
    assert history is not None
    profile = history.profile()
    causes = {"over_calling": "", "bfcl_multi_turn": "multi_turn", "reasoning": ""}
    lines = [
        Line(name, name, [PairedOutcome(str(i), True, i > 60) for i in range(100)], cause=causes[name])
        for name in causes
    ]
    judged = [replace(line, remedies=find_remedies(line, profile)) for line in judge_lines(lines, 0.1)]
    (command,) = make_commands(combine(judged), history, Path("out/gate"))
    return shlex.split(command)


@pytest.mark.thorough
def test_a_gate_takes_over_the_answers_of_the_base_that_an_earlier_one_asked_for(
    tuned: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, earlier = str(tuned.folder / "out" / "run"), tmp_path / "earlier"
    shutil.copytree(tuned.folder / "out" / "gate", earlier)
    path = earlier / "base.held_out.jsonl"
    rows = [{**json.loads(line), "answer": "An answer that no model gives."} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def gate(name: str, *options: str) -> list[str]:
        out = tmp_path / name
        command = ["gate", "--base", str(TINY_BASE), "--tuned", run, "--out", str(out), "--base-answers", str(earlier)]
        assert main([*command, *options]) in (0, 1)
        return [json.loads(line)["answer"] for line in (out / "base.held_out.jsonl").read_text().splitlines()]

    assert set(gate("same")) == {"An answer that no model gives."}
    assert f"base: held_out, {len(rows)} cases, {len(rows)} of them answered before" in capsys.readouterr().err
    assert "An answer that no model gives." not in gate("shorter", "--max-new-tokens", "8")
    assert "no answers taken over" in (errors := capsys.readouterr().err)
    assert "(max_new_tokens: was 48, is now 8)" in errors
    path.unlink()
    assert "An answer that no model gives." not in gate("absent", "--max-new-tokens", "8")
    assert f"base: held_out, no answers taken over from {path} (it has none)" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_remedy_is_a_command_of_tune_that_keeps_the_edits_and_the_rows_that_were_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stop_training(monkeypatch)
    rows = [json.loads(line) for line in write_synthetic(tmp_path / "rows.jsonl", 80).read_text().splitlines()]
    one_turn = [row for row in rows if [message["role"] for message in row["messages"]].count("user") == 1]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in one_turn))
    write_synthetic(tmp_path / "own.jsonl", 30, seed=4)
    write_synthetic(tmp_path / "GENERAL.jsonl", 30, seed=5)
    replay = ["data.replay.sources=[{path: own.jsonl}]", "data.replay.share=20%"]
    command = ["tune", "--data", "rows.jsonl", "--out", "out", "log_every_n_steps=3", *replay]
    assert main([*command, "--plan-only"]) == 0
    path = tmp_path / "out" / "tune.yaml"
    text = re.sub(r"^epochs: \d+", "epochs: 7", path.read_text(), flags=re.MULTILINE)
    path.write_text(text.replace("log_every_n_steps: 3", "log_every_n_steps: 4"))
    assert tune_as_typed(monkeypatch, *command) == 75
    assert "was edited: trained as it is" in capsys.readouterr().out
    name, *words = mend("out/run")
    assert (name, words[0], words[words.index("--out") + 1]) == ("fctune", "tune", "out_mended")
    assert main([*words, "--plan-only"]) == 0
    mended = load_run_config("out_mended/tune.yaml")
    assert (mended.epochs, mended.log_every_n_steps) == (7, 4)
    assert mended.data.augment is not None
    assert mended.data.replay is not None
    assert [source.path for source in mended.data.replay.sources] == ["own.jsonl", "GENERAL.jsonl"]
    assert parse_share(mended.data.replay.share) > 0.2


@pytest.mark.thorough
def test_a_remedy_trains_the_edited_config_if_tune_has_no_option_for_the_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stop_training(monkeypatch)
    write_synthetic(tmp_path / "rows.jsonl", 40)
    write_synthetic(tmp_path / "GENERAL.jsonl", 40, seed=5)
    command, path = ["tune", "--data", "rows.jsonl", "--out", "out"], tmp_path / "out" / "tune.yaml"
    assert main([*command, "--plan-only"]) == 0
    path.write_text(path.read_text().replace("- path: rows.jsonl # --data", "- {path: rows.jsonl, weight: 2.0}"))
    assert tune_as_typed(monkeypatch, *command) == 75
    name, train, config, *overrides = mend("out/run")
    assert (name, train, config) == ("fctune", "train", "out/tune.yaml")
    again = load_config(config, overrides)
    assert (again.data.sources[0].weight, again.output_dir) == (2.0, "out/run_mended")


def test_the_directory_of_the_rows_may_hold_that_of_the_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    monkeypatch.chdir(tmp_path / "rows")
    monkeypatch.setenv("FCTUNE_CACHE", str(tmp_path / "cache"))
    write_synthetic(Path("rows.jsonl"), 40)
    command = ["tune", "--data", ".", "--plan-only"]
    assert main(command) == 0
    assert " 40 rows " in capsys.readouterr().out
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "changed since" not in output
    assert [line.partition(":")[0] for line in output.splitlines() if line.endswith("not repeated")] == STEPS[:3]


def test_before_training_the_plan_follows_the_machine_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_synthetic(tmp_path / "rows.jsonl", 40)
    command, config = ["tune", "--data", "rows.jsonl", "--out", "out", "--plan-only"], tmp_path / "out" / "tune.yaml"
    monkeypatch.setattr("fctune.apps.tune.machine.find_machine", lambda _: CPU)
    assert main(command) == 0
    written = config.read_text()
    config.unlink()
    assert main(command) == 0
    assert config.read_text() == written
    assert "plan: out/tune.yaml is gone; made again" in capsys.readouterr().out

    monkeypatch.setattr("fctune.apps.tune.machine.find_machine", lambda _: Machine(1, GPUS["h100"]))
    assert main(command) == 0
    assert "plan: was made for no GPU, and this machine has 1 GPU (h100)" in capsys.readouterr().out
    assert load_run_config("out/tune.yaml").precision != "fp32", "that of processors"

    (tmp_path / "out" / "run").mkdir()
    (tmp_path / "out" / "run" / "exit.json").write_text('{"code": 2, "reason": "refused", "step": 0}')
    assert main([*command, "epochs=2"]) == 0, "a launch that was refused has trained nothing"
    assert load_run_config("out/tune.yaml").epochs == 2

    (tmp_path / "out" / "tune.json").write_text("{")
    assert main(command) == 2
    assert "delete the directory to start again" in capsys.readouterr().err


@pytest.mark.parametrize("has_memory", [True, False])
def test_rows_are_as_long_as_the_longest_conversation_or_as_fit_in_the_machine(
    has_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write_synthetic(tmp_path / "rows.jsonl", 40)
    row = json.loads(rows.read_text().splitlines()[0])
    talk = [row["messages"][0], *({"role": role, "content": "word " * 200} for role in ("assistant", "user") * 4)]
    rows.write_text(rows.read_text() + json.dumps(row | {"messages": talk[:-1]}) + "\n")
    architecture, _, _ = find_architecture(str(TINY_BASE))
    given = ["data.seq_len=4096", "global_batch_size=1"]
    draft, _ = draft_config(str(TINY_BASE), architecture, CPU, Path("out"), [SourceConfig(path="rows.jsonl")], given)

    def make_machine(mib: int) -> Machine:
        return Machine(0, replace(CPU.gpu, memory_bytes=mib * 2**20))

    def fits(mib: int) -> bool:
        return find_fit(draft.parse(), architecture, None, make_machine(mib)) is not None

    least = bisect.bisect_left(range(4096), True, key=fits)
    machine = make_machine(least if has_memory else least - 1)
    monkeypatch.setattr("fctune.apps.tune.machine.find_machine", lambda _: machine)
    assert main(["tune", "--data", "rows.jsonl", "--out", "out", "--plan-only", "data.seq_len=auto"]) == 0
    written, output = load_run_config("out/tune.yaml"), " ".join(capsys.readouterr().out.split())
    if has_memory:
        assert (written.data.seq_len, written.data.overlong) == (4096, "fail")
        assert "data.seq_len = 4096 (holds the longest row, 2," in output
    else:
        assert (written.data.seq_len, written.data.overlong) == (2048, "split_turns")
        assert (
            "data.seq_len = 2048 (rows of 4,096 tokens do not fit in this machine's memory; the longest row has 2,"
            in output
        )
        assert "and 1 of 41 conversations is longer" in output


def test_a_row_that_the_user_lets_drop_lengthens_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write_synthetic(tmp_path / "rows.jsonl", 40)
    row = json.loads(rows.read_text().splitlines()[0])
    talk = [row["messages"][0], {"role": "assistant", "content": "word " * 20_000}]
    rows.write_text(rows.read_text() + json.dumps(row | {"messages": talk}) + "\n")
    monkeypatch.setattr("fctune.apps.tune.machine.find_machine", lambda _: CPU)
    assert main(["tune", "--data", "rows.jsonl", "--out", "out", "--plan-only", "data.overlong=drop"]) == 0
    written = load_run_config("out/tune.yaml")
    assert (written.data.seq_len, written.data.overlong) == (1024, "drop")
    assert "and more than 1,024 would hold no other row" in " ".join(capsys.readouterr().out.split())


def change(conversation: dict[str, object], **values: object) -> dict[str, object]:
    return {key: value for key, value in (conversation | values).items() if value is not None}


def drop_calls(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]
    path.write_text("".join(json.dumps(change(row, messages=talk)) + "\n" for row in rows))


def keep_few(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:7]))


def repeat_few(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:7] * 6))


def add_talk(path: Path) -> None:
    """One row with tools among 60 without, which is not held out."""
    talk = [
        [{"role": "user", "content": f"What is {i} plus {i}?"}, {"role": "assistant", "content": f"{2 * i}"}]
        for i in range(60)
    ]
    rows = path.read_text().splitlines(keepends=True)
    call = [row for row in rows if "tool_calls" in row][1]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talk) + call)


def break_one(path: Path) -> None:
    path.write_text(path.read_text() + '{"messages": [{"role": "robot", "content": "x"}]}\n')


def repeat_questions(path: Path) -> None:
    """One question with forty results, so that each held-out one is trained on, too."""
    row = next(row for row in map(json.loads, path.read_text().splitlines()) if row["messages"][1].get("tool_calls"))
    question, answer = row["messages"][:2]
    lines = []
    for number in range(40):
        results = [{"role": "tool", "content": f"{number}"} for _ in answer["tool_calls"]]
        messages = [question, answer, *results, {"role": "assistant", "content": f"Result {number}."}]
        lines.append(json.dumps({"tools": row["tools"], "messages": messages}) + "\n")
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("prepare", "arguments", "expected"),
    [
        (None, ["--data", "absent.jsonl"], "absent.jsonl: no such file or directory"),
        (None, ["--data", "rows.jsonl", "--model", "Qwen/Qwen3-8B"], "did you mean hf:Qwen/Qwen3-8B?"),
        (None, ["--data", "rows.jsonl", "--model", "http://host/v1"], "Pass its directory, or hf:NAME"),
        (None, ["--data", "rows.jsonl", "--gpus", "64"], "--gpus 64: there is"),
        (None, ["--data", "rows.jsonl", "--out", "rows.jsonl"], "is a file. Name a directory"),
        (None, ["--data", "rows.jsonl", "epoch=2"], "epoch: unknown key"),
        (None, ["--data", "rows.jsonl", "output_dir=x"], "fctune tune sets this key by --out. Pass that instead"),
        (None, ["--data", "rows.jsonl", "adapter=null"], "To train all weights, use fctune train"),
        (None, ["--data", "rows.jsonl", "--cases", "rows.jsonl"], "to train on, so the result would be judged by what"),
        (None, ["--data", "rows.jsonl", "gate.cases=rows.jsonl"], "fctune tune sets this key by --cases"),
        (None, ["--data", "rows.jsonl", "model={path: x}"], "fctune tune sets a part of model by --model"),
        (None, ["--data", "rows.jsonl", "data.validation_share=0"], "holds out no row, so there is nothing to judge"),
        (repeat_few, ["--data", "rows.jsonl"], "7 different usable rows, too few to hold some out"),
        (add_talk, ["--data", "rows.jsonl"], "no held-out row has tools and an answer, so there is nothing to judge"),
        (drop_calls, ["--data", "rows.jsonl"], "no row has a call, so a model trained on them would learn never to"),
        (keep_few, ["--data", "rows.jsonl"], "7 usable rows, too few to hold some out"),
        (
            break_one,
            ["--data", "rows.jsonl"],
            "1 of 41 rows cannot be trained on (above). Correct them, or add --clean",
        ),
        (None, ["--data", "rows.jsonl", "gate.benchmarks=[mmlu]"], "gate.benchmarks: mmlu: no such benchmark"),
        (None, ["--data", "rows.jsonl", "gate.streamed=true"], "gate.streamed: needs servers"),
        (None, ["--data", "rows.jsonl", "gate.max_tokens=10"], "max_tokens=10: too few for one case on each line"),
        (repeat_questions, ["--data", "rows.jsonl"], "Add rows with other questions, or pass --cases FILE"),
    ],
)
def test_bad_input_is_one_sentence_that_says_what_to_do(
    prepare: Callable[[Path], None] | None,
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write_synthetic(tmp_path / "rows.jsonl", 40)
    if prepare is not None:
        prepare(rows)
    assert main(["tune", "--out", "out", *arguments]) == 2
    errors = capsys.readouterr().err
    assert expected in errors
    assert "Traceback" not in errors


def test_cases_that_are_like_a_row_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tool = {"name": "weather", "description": "Weather", "parameters": {"type": "object", "properties": {"city": {}}}}

    def write(path: Path, cities: Iterable[str]) -> None:
        rows = []
        for city in cities:
            call = {"name": "weather", "arguments": json.dumps({"city": city})}
            question = {"role": "user", "content": f"Please tell me what the current weather is like in {city}"}
            answer = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}
            rows.append({"tools": [{"type": "function", "function": tool}], "messages": [question, answer]})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(tmp_path / "rows.jsonl", map(str, range(40)))
    write(tmp_path / "cases.jsonl", map(str, range(50, 60)))
    assert main(["tune", "--data", "rows.jsonl", "--cases", "cases.jsonl", "--out", "out", "--plan-only"]) == 0
    assert "cases.jsonl: 10 cases nearly repeat a row to train on" in capsys.readouterr().out


def test_clean_leaves_out_unusable_rows_and_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    break_one(write_synthetic(tmp_path / "rows.jsonl", 40))
    command = ["tune", "--data", "rows.jsonl", "--out", "out", "--plan-only"]
    assert main([*command, "--clean", "epochs=3"]) == 0
    output = capsys.readouterr().out
    assert "40 of 41 usable" in output
    assert "rows.jsonl:41: messages[0].role" in output
    config = load_run_config("out/tune.yaml")
    assert (config.data.on_invalid, config.data.secrets, config.epochs) == ("skip", "redact", 3)
    # Before training, changed rows or settings are said, and the steps are repeated.
    write_synthetic(tmp_path / "rows.jsonl", 40)
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "changed since the last time: rows.jsonl has changed; starting again" in output
    assert "changed since the last time: --clean: was invalid,secrets, is not given" in output
    assert "not repeated" not in output


@pytest.mark.thorough
def test_rows_that_take_away_cannot_change_are_trained_without_it_whatever_else_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["query,tool,arguments"] + [f'Play {i},play,"{{""song"": ""{i}""}}"' for i in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    play = {"name": "play", "parameters": {"type": "object", "properties": {"song": {"type": "string"}}}}
    (tmp_path / "own.json").write_text(json.dumps([play]))
    command = ["tune", "--data", "rows.csv", "--tools", "own.json", "--out", "out", "--plan-only"]
    assert main([*command, "data.augment.paraphrase=50%"]) == 0
    assert "no rows without a call can be made of these, so add some yourself" in capsys.readouterr().out
    augment = load_run_config("out/tune.yaml").data.augment
    assert augment is not None
    assert augment.shares() == {"paraphrase": 0.5}
    assert main([*command, "data.augment.take_away=50%"]) == 2
    assert "applies to none of the" in capsys.readouterr().err


def test_the_tools_for_a_chat_have_no_secret_that_the_rows_are_cleaned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in write_synthetic(tmp_path / "rows.jsonl", 40).read_text().splitlines()]
    key = "ghp_" + "aB3dE5gH7j" * 3 + "K9mN1p"
    for row in rows:
        for tool in row["tools"]:
            tool["function"]["description"] += f" Key {key}."
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["tune", "--data", "rows.jsonl", "--out", "out", "--clean", "--plan-only"]) == 0
    text = (tmp_path / "out" / "tools.json").read_text()
    assert key not in text
    assert " Key ghp_" in text


def test_rows_of_an_agent_get_the_tools_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in write_synthetic(tmp_path / "rows.jsonl", 40).read_text().splitlines()]
    offered = {tool["function"]["name"]: tool["function"] for row in rows for tool in row["tools"]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(change(row, tools=None)) + "\n" for row in rows))
    command = ["tune", "--data", "rows.jsonl", "--out", "out", "--plan-only"]
    assert main(command) == 2
    errors = capsys.readouterr().err
    (draft,) = re.findall(r"`fctune (data tools .*?)`", errors)
    assert main(draft.split()) == 0
    (following,) = re.findall(r"Then: fctune (tune .*)", capsys.readouterr().out)
    for tool in json.loads((tmp_path / "tools.json").read_text()):
        known = offered[tool["function"]["name"]]["parameters"]["properties"]
        found = tool["function"]["parameters"]["properties"]
        assert {name: known[name]["type"] for name in found} == {name: found[name]["type"] for name in found}
    assert main([*following.split(), "--out", "out", "--plan-only"]) == 0
    assert load_run_config("out/tune.yaml").data.sources[0].path == "out/rows/1.jsonl"


@pytest.mark.thorough
def test_the_commands_that_are_named_read_the_rows_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["question,function,arguments"]
    lines += [f'Play song {i} now,play,"{{""song"": ""{i}""}}"' for i in range(30)]
    (tmp_path / "my rows.csv").write_text("\n".join(lines) + "\n")
    columns = ["--columns", "question=query,function=tool", "--where", "characters > 3"]
    assert main(["tune", "--data", "my rows.csv", "--out", "out", *columns]) == 2
    draft, check = re.findall(r"`fctune (data .*?)`", capsys.readouterr().err)
    assert main(shlex.split(draft)) == 0
    (following,) = re.findall(r"Then: fctune (tune .*)", capsys.readouterr().out)
    assert main(shlex.split(check)) == 1
    assert "call_without_tools" in capsys.readouterr().out
    assert main([*shlex.split(following), "epochs=2", "--out", "out", "--plan-only"]) == 0
    assert load_run_config("out/tune.yaml").epochs == 2


@pytest.mark.thorough
def test_a_model_that_does_not_fit_or_lacks_a_template_or_is_gated_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_synthetic(tmp_path / "rows.jsonl", 40)
    base = shutil.copytree(TINY_BASE, tmp_path / "base")
    tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    command = ["tune", "--data", "rows.jsonl", "--out", "out", "--model"]
    assert main([*command, "base"]) == 2
    assert "has no chat template, as base models have none" in capsys.readouterr().err

    assert main([*command, "hf:google/gemma-3-270m"]) == 2  # without a network, as without a token
    assert "a gated model needs its licence accepted and HF_TOKEN set" in capsys.readouterr().err

    small = Machine(1, replace(GPUS["l4"], name="small", memory_bytes=3 * GIB))
    monkeypatch.setattr("fctune.apps.tune.machine.find_machine", lambda _: small)
    assert main([*command, "hf:Qwen/Qwen3-8B"]) == 2
    errors = capsys.readouterr().err
    assert "--model hf:Qwen/Qwen3-8B: 8.2B weights do not fit in this machine (1 GPU (small, 3.0 GiB))" in errors
    assert "Choose a smaller model: --model hf:Qwen/Qwen3-0.6B" in errors
    assert not (tmp_path / "out" / "run").exists()


def test_a_full_disk_and_a_directory_of_another_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_synthetic(tmp_path / "rows.jsonl", 40)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    command = ["tune", "--data", "rows.jsonl", "--out"]
    assert main([*command, "other"]) == 2
    assert "--out other: holds a run of fctune train (run.json), no tune. Choose another" in capsys.readouterr().err
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1024))
    assert main([*command, "out"]) == 2
    assert "Free some space, or choose --out on another disk" in capsys.readouterr().err


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [warm_python(), "-m", "fctune.cli", "tune", "--data", "rows.jsonl", "--out", "out", *QUICK, *more]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**ENVIRONMENT, "FCTUNE_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.thorough
def test_a_tune_killed_in_each_step_resumes_there(tmp_path: Path) -> None:
    """Killed as each step begins, and stopped by Ctrl-C in training and in the gate; every step ends once."""
    write_synthetic(tmp_path / "rows.jsonl", 60)
    slow = ("checkpoint.every=20", "epochs=8")  # so many that training outlasts the way of a request to stop
    for number, step in enumerate(STEPS):
        process = start(tmp_path, *slow)
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            has_begun = line.startswith(f"{step}:") if step != "train" else line.startswith("step ")
            if has_begun and not line.rstrip().endswith("not repeated"):
                break
        else:
            pytest.fail("".join(seen))
        is_stopped = step in ("train", "gate")
        process.send_signal(signal.SIGINT if is_stopped else signal.SIGKILL)
        rest, _ = process.communicate(timeout=300)
        if is_stopped:
            assert process.returncode in (75, 130, -signal.SIGINT), rest
            assert "re-run the same command to resume" in rest
        repeated = [line for line in seen if line.rstrip().endswith("not repeated")]
        # The step that the last run was killed in is done by this one, and those before it are not repeated.
        assert [line.partition(":")[0] for line in repeated] == STEPS[: max(0, number - 1)]
    process = start(tmp_path, *slow)
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (0, 1), output
    assert [line.partition(":")[0] for line in output.splitlines() if line.endswith("not repeated")] == STEPS[:-1]
    assert "verdict:" in output
    steps = [json.loads(line)["step"] for line in (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.thorough
def test_a_stop_in_the_last_step_keeps_the_training_and_begins_nothing_more(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "rows.jsonl", 60)
    process = start(tmp_path, "max_steps=2")
    assert process.stdout is not None
    assert any(line.startswith("step 2/2") for line in process.stdout)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 130, rest
    assert "re-run the same command to resume" in rest
    assert not (tmp_path / "out/gate").exists()
    assert "train: done" in start(tmp_path, "max_steps=2").communicate(timeout=300)[0]


@pytest.mark.thorough
def test_two_tunes_of_one_directory_are_refused(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "rows.jsonl", 60)
    first = start(tmp_path)
    wait_until(lambda: (tmp_path / "out" / "tune.json").exists(), first)
    second = start(tmp_path)
    output, _ = second.communicate(timeout=120)
    first.kill()
    first.communicate()
    assert second.returncode == 2, output
    assert "another run is writing to it" in output
