"""A run that goes on: which checkpoint it goes on from, whether it is the same run, and the state put back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fctune import distributed
from fctune.checkpoint.elastic import locate, read_tensor
from fctune.checkpoint.fault_hooks import reached
from fctune.checkpoint.sharded import names_in, read_shards_
from fctune.checkpoint.snapshot import collect_rng, init_optimizer_state_, named_trained, restore_rng, state_tensors
from fctune.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint, verify
from fctune.config.schema import RunConfig
from fctune.distributed import World
from fctune.errors import CheckpointError
from fctune.models.lora import copy_full_
from fctune.training.loop import TrainState
from fctune.training.schedule import move_schedule_

logger = logging.getLogger("fctune")

STATE = "trainer_state.json"

# Keys of a config that a run may go on with changed: where and how it runs, how long, and what it leaves.
_MAY_CHANGE = (
    *("output_dir", "resume", "checkpoint", "parallel", "micro_batch_size", "epochs", "max_steps", "log_every_n_steps"),
    *("validation", "eval", "activation_checkpointing", "compile", "on_nonfinite", "max_nonfinite", "step_timeout_s"),
    *("telemetry", "profile", "price_per_gpu_hour", "success"),
    *("data", "model"),  # these are held to their fingerprints instead
)


@dataclass(frozen=True, slots=True)
class Resume:
    """What a run goes on from; ``damaged`` names newer checkpoints that could not be used, and why."""

    checkpoint: Checkpoint
    state: dict[str, Any]
    damaged: tuple[str, ...] = ()


def choose_checkpoint(resume: str, store: CheckpointStore, world: World) -> Resume | None:
    """The newest checkpoint that is whole, or the one that is named; None where there is nothing to go on from.

    Args:
        resume: ``auto``, ``never``, or the path of a checkpoint.
        store: where the run's checkpoints are.
        world: each rank verifies its share of the files.

    Raises:
        CheckpointError: the named one, or every one there is, is damaged.
    """
    if resume == "never":
        return None
    if resume == "auto":
        candidates = distributed.run_on_rank_0(store.complete)
    else:
        candidates = [distributed.run_on_rank_0(lambda: open_checkpoint(Path(resume)))]
    damaged: list[str] = []
    for candidate in candidates:
        try:
            state = distributed.run_on_all_ranks(lambda c=candidate: _verify(c, world))  # type: ignore[misc]
        except CheckpointError as error:
            damaged.append(str(error))
            if world.is_main:
                logger.warning("NOT USED: %s", error)
        else:
            return Resume(candidate, state, tuple(damaged))
    if damaged:
        shown = "\n".join(f"  {problem}" for problem in damaged)
        raise CheckpointError(
            f"no checkpoint is whole:\n{shown}\n"
            "Restore one from a copy, or start over with resume=never, which keeps what is there under another name."
        )
    return None


def check_same_run(resume: Resume, config: RunConfig, base_fingerprint: str) -> None:
    """Hold a checkpoint to the run that would go on from it; data is held to it by the loader.

    Raises:
        CheckpointError: another base, adapter, optimizer, schedule, batch or seed, each difference named.
    """
    saved, mine = resume.state["config"], json.loads(json.dumps(config.to_dict()))
    changes = [
        f"{key}: {_show(saved.get(key))} then, {_show(value)} now"
        for key, value in mine.items()
        if key not in _MAY_CHANGE and saved.get(key) != value
    ]
    if resume.state["base_fingerprint"] != base_fingerprint:
        changes.append(f"model: weights {resume.state['base_fingerprint']} then, {base_fingerprint} now")
    if changes:
        shown = "\n".join(f"  {change}" for change in changes)
        raise CheckpointError(
            f"{resume.checkpoint.path}: saved by another run than the one that would go on from it:\n{shown}\n"
            "Put them back, or start a new run: another output_dir, or resume=never."
        )


def restore_(resume: Resume, state: TrainState, world: World, load_portable_: Callable[[Path], None]) -> None:
    """Put a run's state back, in place: weights that train, optimizer, schedule, random generators, step.

    Args:
        resume: of ``choose_checkpoint``.
        state: of a run that has not begun.
        world: this rank.
        load_portable_: fills the weights that train from a portable checkpoint's directory.

    Raises:
        CheckpointError: tensors are missing or of other shapes.
    """
    folder, step = resume.checkpoint.path, resume.checkpoint.step
    reached("read", folder.name)
    init_optimizer_state_(state.optimizer)
    states = list(state_tensors(state.model, state.optimizer))
    is_sharded = resume.checkpoint.kind == "sharded"
    stored = distributed.run_on_all_ranks(lambda: names_in(folder) if is_sharded else set(locate(folder, "optimizer")))
    optimizer = {name: tensor for one in states for name, tensor in one.to_read(stored).items()}
    has_rng = resume.state["world_size"] == world.world_size
    rng = collect_rng(world.rank) if has_rng else {}
    if is_sharded:
        tensors = optimizer | {f"model.{name}": p.detach() for name, p in named_trained(state.model).items()}
        distributed.run_on_all_ranks(lambda: _check_names(folder, set(tensors), stored))
        read_shards_(folder, tensors | rng)
    else:
        distributed.run_on_all_ranks(lambda: load_portable_(folder))
        distributed.run_on_all_ranks(lambda: _read_portable_(folder, optimizer))
        rng = {name: read_tensor(folder / f"rng-{world.rank}.safetensors", name) for name in rng}
    for one in states:
        one.take_(optimizer)
    if has_rng:
        restore_rng(rng, world.rank)
    move_schedule_(state.scheduler, step)
    state.step = step


def _verify(checkpoint: Checkpoint, world: World) -> dict[str, Any]:
    verify(checkpoint, world.rank, world.world_size)
    try:
        state: dict[str, Any] = json.loads((checkpoint.path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path / STATE}: damaged: {error}.") from None
    return state


def _check_names(folder: Path, wanted: set[str], found: set[str]) -> None:
    missing = sorted(wanted - found)
    extra = sorted(name for name in found - wanted if not name.startswith("rng."))
    if missing or extra:
        problems = [
            f"{len(names)} {what}: {names[0]}" for what, names in (("missing", missing), ("extra", extra)) if names
        ]
        raise CheckpointError(f"{folder}: not the state of this run's model and optimizer ({'; '.join(problems)}).")


def _read_portable_(folder: Path, tensors: dict[str, Tensor]) -> None:
    files = locate(folder, "optimizer")
    _check_names(folder, set(tensors), set(files))
    for name, tensor in tensors.items():
        copy_full_(tensor, read_tensor(files[name], name))


def _show(value: Any) -> str:
    return json.dumps(value) if value is not None else "none"
