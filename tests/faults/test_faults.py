"""A run that is interrupted anywhere resumes as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.exit_codes import FAILED, NODE_FAULT
from fctune.checkpoint.store import CheckpointStore
from tests.faults.groups import FULL, LORA, Fault, run_group
from tests.faults.harness import (
    arguments_for,
    differences,
    final_weights,
    make_shifted_recipe,
    read_metrics,
    soak,
)

pytestmark = pytest.mark.timeout(600)

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def reference(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted run on two ranks."""
    run = tmp_path_factory.mktemp("reference") / "run"
    assert run_group(arguments_for(run, *inputs), 2).codes == (0, 0)
    return run


@pytest.fixture(scope="module")
def killed_reference(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on two ranks, killed at its 8th step."""
    run = tmp_path_factory.mktemp("killed") / "run"
    assert run_group(arguments_for(run, *inputs), 2, Fault("kill", "step", 0, 8)).fired
    return run


@pytest.fixture
def killed(killed_reference: Path, tmp_path: Path) -> Path:
    """Return a copy of that run that ``start`` continues."""
    return shutil.copytree(killed_reference, tmp_path / "run")


@pytest.fixture
def start(inputs: tuple[Path, Path], tmp_path: Path) -> Start:
    """Start or restart a run: ``start(*overrides, ranks=2, fault=None)``."""

    def start_(*overrides: str, ranks: int = 2, fault: Fault | None = None, **options: Any) -> Any:
        return run_group(arguments_for(tmp_path / "run", *inputs, *overrides), ranks, fault, **options)

    return start_


def read_exit(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "exit.json").read_text())
    return found


def read_not_started(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "not_started.json").read_text())
    return found


def read_record(run: Path) -> dict[str, bytes | None]:
    """Return the bytes of what a run has recorded, and the names of its checkpoints and exports."""
    files = {name: (run / name).read_bytes() for name in ("run.json", "metrics.jsonl")}
    files["exit.json"] = (run / "exit.json").read_bytes() if (run / "exit.json").exists() else b""
    folders = (entry for name in ("checkpoints", "export") for entry in sorted((run / name).glob("*")))
    return files | {str(entry): None for entry in folders}


def assert_same_bits(run: Path, reference: Path) -> None:
    keys = ("step", "loss", "lr", "grad_norm", "data_digest", "tokens_total")
    mine, theirs = read_metrics(run), read_metrics(reference)
    assert [[m[k] for k in keys] for m in mine] == [[m[k] for k in keys] for m in theirs]
    expected = final_weights(reference)
    assert all(torch.equal(weight, expected[name]) for name, weight in final_weights(run).items())


@pytest.mark.slow
def test_random_kills_on_changing_numbers_of_ranks_lose_and_repeat_nothing(tmp_path: Path) -> None:
    assert soak(num_kills=5, seed=2, folder=tmp_path) == 0


@pytest.mark.thorough
def test_a_data_cursor_that_is_off_by_one_is_detected(
    start: Start, reference: Path, killed: Path, tmp_path: Path
) -> None:
    assert start(make_recipe=make_shifted_recipe).codes == (0, 0)
    assert any("different samples" in found for found in differences(tmp_path / "run", reference, 1e-9))


@pytest.mark.parametrize(
    ("phase", "count"),
    [
        ("write", 3),
        pytest.param("prune", 1, marks=pytest.mark.thorough),
        *(
            pytest.param(*when, marks=pytest.mark.slow)
            for when in (("step", 6), ("update", 7), ("stage", 3), ("publish", 3))
        ),
    ],
)
def test_a_killed_and_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    phase: str, count: int, start: Start, reference: Path, tmp_path: Path
) -> None:
    ended = start(fault=Fault("kill", phase, 0, count))
    assert ended.fired, ended.output
    assert start().codes == (0, 0)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["resumed"]
    assert_same_bits(tmp_path / "run", reference)


def test_a_signal_on_one_rank_saves_after_the_step_and_stops_all_ranks(
    start: Start, reference: Path, tmp_path: Path
) -> None:
    assert start(fault=Fault("term", "step", 1, 3)).codes == (75, 75)
    why = read_exit(tmp_path / "run")
    assert why["code"] == 75
    assert why["step"] == 3
    assert "SIGTERM" in why["reason"]
    assert why["checkpoint"].endswith("checkpoint-3")
    assert start().codes == (0, 0)
    assert_same_bits(tmp_path / "run", reference)


def test_a_signal_before_the_first_step_stops_at_once(start: Start, killed: Path, tmp_path: Path) -> None:
    ended = start(fault=Fault("term", "read", 0))
    assert 75 in ended.codes
    assert "before the first step" in read_not_started(tmp_path / "run")["reason"]


def test_a_second_signal_records_the_step_and_the_newest_checkpoint(start: Start, tmp_path: Path) -> None:
    assert 75 in start(fault=Fault("term_twice", "step", 0, 7)).codes
    why = read_exit(tmp_path / "run")
    assert why["code"] == 75
    assert why["reason"] == "SIGTERM again"
    assert why["step"] == 6
    assert why["checkpoint"].rpartition("-")[2] in ("4", "5", "6"), "a save may be running"


def test_a_killed_rank_is_named_by_the_ranks_that_lose_it(start: Start, tmp_path: Path) -> None:
    ended = start(fault=Fault("kill", "step", 1, 6), grace_s=20)
    assert ended.codes[1] == -9
    why = read_exit(tmp_path / "run")
    is_known = "SIGKILL" in why["reason"]  # its launcher may have collected its exit status
    assert why["code"] == (FAILED if is_known else NODE_FAULT)
    assert why.get("is_consequence", False) == (not is_known)
    assert "faulty_node" not in why
    assert "rank 1 (process " in why["reason"], why
    assert why["step"] == 5


@pytest.mark.slow
def test_a_signal_during_compilation_takes_effect_after_the_step(start: Start, reference: Path, tmp_path: Path) -> None:
    ended = start("compile=true", fault=Fault("term_soon", "step", 1, 1))
    assert ended.codes == (75, 75), ended.output
    assert read_exit(tmp_path / "run")["step"] == 1
    assert start("compile=true").codes == (0, 0)
    assert not differences(tmp_path / "run", reference, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "mode", "kind"),
    [
        ("AdamW8bit", "ddp", "sharded"),
        ("AdamW8bit", "fsdp", "sharded"),
        ("AdamW8bit", "fsdp", "elastic"),
        ("AdamW4bit", "fsdp", "sharded"),
        ("AdamWFp8", "fsdp", "sharded"),
    ],
)
def test_a_quantized_optimizer_resumes_bit_identically(
    optimizer: str, mode: str, kind: str, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    chosen = f"optimizer={{_component_: torchao.optim.{optimizer}, lr: 1e-3}}"
    saves = {"sharded": ("2", "0"), "elastic": ("0", "2")}[kind]
    every = (f"checkpoint.every={saves[0]}", f"checkpoint.elastic_every={saves[1]}")
    options = ("precision=bf16_mixed", chosen, f"parallel.mode={mode}", *every)
    for name, faults in {"straight": [None], "cut": [Fault("kill", "step", 1, 8), None]}.items():
        for fault in faults:
            argv = arguments_for(tmp_path / name, *inputs, *options, config=FULL)
            ended = run_group(argv, 2, fault)
            assert ended.fired or ended.codes == (0, 0), ended.output
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["resumed"]
    assert_same_bits(tmp_path / "cut", tmp_path / "straight")


def test_an_error_on_one_rank_is_reported_and_the_run_can_resume(start: Start, reference: Path, tmp_path: Path) -> None:
    ended = start(fault=Fault("raise", "step", 1, 5))
    assert ended.codes[1] == 1
    assert "an injected fault" in ended.output
    assert start().codes == (0, 0)
    assert_same_bits(tmp_path / "run", reference)


@pytest.mark.thorough
def test_a_hanging_step_writes_the_stacks_of_every_thread(start: Start, tmp_path: Path) -> None:
    ended = start("step_timeout_s=3", fault=Fault("hang", "step", 1, 2))
    assert NODE_FAULT in ended.codes
    stacks = "".join(file.read_text() for file in (tmp_path / "run" / "stacks").iterdir())
    assert "longer than 3 s" in stacks
    assert "groups.py" in stacks


def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(
    start: Start, reference: Path, killed: Path, tmp_path: Path
) -> None:
    newest, before = CheckpointStore(tmp_path / "run" / "checkpoints").list_complete()[:2]
    victim = next(newest.path.glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    ended = start()
    assert ended.codes == (0, 0)
    assert f"checkpoint skipped: {victim}: damaged" in ended.output
    resumed = json.loads((tmp_path / "run" / "run.json").read_text())["resumed"][-1]
    assert resumed["step"] == before.step
    assert str(victim) in resumed["not_used"][0]
    assert not newest.path.with_name(f"{newest.path.name}.1").exists(), "deleted when the run has got as far again"
    assert_same_bits(tmp_path / "run", reference)


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(start: Start, killed: Path, tmp_path: Path) -> None:
    for checkpoint in CheckpointStore(tmp_path / "run" / "checkpoints").list_complete():
        (checkpoint.path / "manifest.json").write_text("{}")
    described = (tmp_path / "run" / "run.json").read_text()
    ended = start()
    assert set(ended.codes) == {2}
    assert "every checkpoint is corrupt or incomplete" in ended.output
    assert read_not_started(tmp_path / "run")["code"] == 2
    assert "every checkpoint is corrupt or incomplete" in read_not_started(tmp_path / "run")["reason"]
    assert (tmp_path / "run" / "run.json").read_text() == described


def test_a_checkpoint_that_lacks_only_its_marker_is_resumed_from_and_a_stale_stop_file_removed(
    start: Start, reference: Path, killed: Path, tmp_path: Path
) -> None:
    (tmp_path / "run" / "stop").touch()  # older than the start, so it belongs to the previous run
    checkpoints = CheckpointStore(tmp_path / "run" / "checkpoints").list_complete()
    for checkpoint in checkpoints:
        next(checkpoint.path.glob("_*SUCCESS")).unlink()
    assert start().codes == (0, 0)
    resumed = json.loads((tmp_path / "run" / "run.json").read_text())["resumed"][-1]
    assert resumed["step"] == checkpoints[0].step
    assert_same_bits(tmp_path / "run", reference)


def test_a_run_with_other_settings_is_not_resumed_and_each_of_them_is_named(
    start: Start, killed: Path, tmp_path: Path
) -> None:
    before = read_record(tmp_path / "run")
    changes = {
        "seed=4": "seed: was 3, is 4",
        "adapter.rank=4": "adapter",
        "optimizer.lr=1e-3": "optimizer",
        "lr_scheduler.name=linear": "lr_scheduler",
        "data.seq_len=600": "data.seq_len: was 512, is 600",
        "global_batch_size=6": "global_batch_size: was 4, is 6",
    }
    settings, data = list(changes)[:4], list(changes)[4:]  # the data is compared after the settings
    for overrides in (settings, *([one] for one in data)):
        ended = start(*overrides, ranks=1)
        assert ended.codes == (2,)
        for override in overrides:
            assert changes[override] in ended.output
            assert changes[override] in read_not_started(tmp_path / "run")["reason"]
        assert read_record(tmp_path / "run") == before


@pytest.mark.slow
def test_a_finished_run_can_be_extended(start: Start, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    constant = "lr_scheduler.name=constant"
    assert start(constant, "max_steps=5").codes == (0, 0)
    assert start(constant).codes == (0, 0)
    straight = tmp_path / "straight"
    assert run_group(arguments_for(straight, *inputs, constant), 2).codes == (0, 0)
    assert_same_bits(tmp_path / "run", straight)


@pytest.mark.thorough
def test_a_complete_run_says_so_and_a_refused_launch_leaves_it_as_it_was(
    start: Start, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert start("max_steps=3").codes == (0, 0)
    before = read_record(run)
    again = start("max_steps=3", ranks=1)
    assert again.codes == (0,)
    assert "already complete after step 3" in again.output
    assert read_record(run) == before
    (tmp_path / "bad.jsonl").write_text('{"messages": "none"}\n')
    for refused in ("seed=4", f"data.sources.0.path={tmp_path / 'bad.jsonl'}", "adapter.modules=[none]"):
        assert start("max_steps=3", refused, ranks=1).codes == (2,)
        assert read_not_started(run)["code"] == 2
        assert read_record(run) == before

    for export in (run / "export").iterdir():
        shutil.rmtree(export)
    assert start("max_steps=3").codes == (0, 0), "writes what is missing"
    assert (run / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]
    assert sorted(path.name for path in (run / "export").iterdir()) == ["adapter", "merged"]
    assert not (run / "not_started.json").exists()


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LORA, "elastic"),
        pytest.param(FULL, "sharded", marks=pytest.mark.slow),
        pytest.param(LORA, "sharded", marks=pytest.mark.slow),
        pytest.param(FULL, "elastic", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_in_another_mode_on_another_number_of_ranks(
    config: str, kind: str, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    saves = {"sharded": ("2", "0"), "elastic": ("0", "2")}[kind]
    every = (f"checkpoint.every={saves[0]}", f"checkpoint.elastic_every={saves[1]}")
    runs = {}
    for name, segments in {
        "straight": [(1, "auto", None)],
        "changing": [
            (2, "fsdp", Fault("kill", "step", 1, 5)),
            (4, "hsdp", Fault("kill", "step", 3, 4)),
            (3, "ddp", None),
        ],
    }.items():
        runs[name] = tmp_path / name
        for ranks, mode, fault in segments:
            argv = arguments_for(runs[name], *inputs, *every, f"parallel.mode={mode}", config=config)
            argv += ["parallel.replicate=2"] if mode == "hsdp" else []
            ended = run_group(argv, ranks, fault)
            assert ended.fired or ended.codes == (0,) * ranks, ended.output
    assert len(json.loads((runs["changing"] / "run.json").read_text())["resumed"]) == 2
    assert not differences(runs["changing"], runs["straight"], 1e-9)


@pytest.mark.thorough
def test_a_named_checkpoint_starts_another_run(start: Start, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    assert start("max_steps=5").codes == (0, 0)
    other = tmp_path / "other"
    argv = arguments_for(other, *inputs, f"resume={tmp_path / 'run' / 'checkpoints' / 'final'}")
    assert run_group(argv, 3).codes == (0, 0, 0)
    assert [m["step"] for m in read_metrics(other)] == list(range(6, 13))


@pytest.mark.thorough
def test_ranks_without_data_change_no_result(start: Start, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    few = ("global_batch_size=2", "max_steps=4")
    ended = start(*few, ranks=3)
    assert ended.codes == (0, 0, 0), ended.output
    assert "1 of 3 ranks have no data: a step has 2 packs" in ended.output
    one = tmp_path / "one"
    assert run_group(arguments_for(one, *inputs, *few), 1).codes == (0,)
    assert not differences(tmp_path / "run", one, 1e-9)
