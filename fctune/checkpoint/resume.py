"""Choosing the checkpoint to resume from, and checking that it belongs to this run."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune import distributed
from fctune.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint, verify
from fctune.distributed import World
from fctune.errors import CheckpointError

logger = logging.getLogger("fctune")

STATE_FILE = "trainer_state.json"

# Config keys that may differ when a run resumes: where and how it runs, how long, and what it writes.
_MAY_CHANGE = (
    *("output_dir", "resume", "checkpoint", "parallel", "micro_batch_size", "epochs", "max_steps", "log_every_n_steps"),
    *("validation", "eval", "activation_checkpointing", "compile", "on_nonfinite", "max_nonfinite", "step_timeout_s"),
    *("telemetry", "profile", "price_per_gpu_hour", "success"),
    *("data", "model"),  # compared by fingerprint instead
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Config and inputs of a run, which each of its checkpoints records."""

    config: dict[str, Any]
    base_digest: str  # of the base model's weights and config
    num_steps: int
    versions: dict[str, str]  # of Python and the main packages


@dataclass(frozen=True, slots=True)
class Resume:
    """Checkpoint that a run resumes from, with its recorded state.

    ``damaged`` has one line for each newer checkpoint that could not be used.
    """

    checkpoint: Checkpoint
    state: dict[str, Any]
    damaged: tuple[str, ...] = ()


def choose_checkpoint(resume: str, store: CheckpointStore, world: World) -> Resume | None:
    """Return the newest intact checkpoint, or the one that is named; None if there is none to resume from.

    Args:
        resume: ``auto``, ``never``, or the path of a checkpoint.
        store: checkpoints of the run.
        world: each rank verifies its share of the files.

    Raises:
        CheckpointError: the named checkpoint, or every existing one, is damaged.
    """
    if resume == "never":
        return None
    if resume == "auto":
        candidates = distributed.run_on_rank_0(store.list_complete)
    else:
        candidates = [distributed.run_on_rank_0(lambda: open_checkpoint(Path(resume)))]
    damaged: list[str] = []
    for candidate in candidates:
        try:
            state = distributed.run_on_all_ranks(lambda c=candidate: _verify_and_read(c, world))  # type: ignore[misc]
        except CheckpointError as error:
            damaged.append(str(error))
            if world.is_main:
                logger.warning("checkpoint skipped: %s", error)
        else:
            return Resume(candidate, state, tuple(damaged))
    if damaged:
        problems = "\n".join(f"  {problem}" for problem in damaged)
        raise CheckpointError(
            f"every checkpoint is corrupt or incomplete:\n{problems}\n"
            "Restore one from a backup, or start over with resume=never, which keeps the existing run under a new name."
        )
    return None


def check_same_run(resume: Resume, facts: RunFacts) -> None:
    """Check that a checkpoint was saved by this run; the loader checks the data.

    Raises:
        CheckpointError: base, adapter, optimizer, schedule, batch size or seed differ; each difference is listed.
    """
    saved, current = resume.state["config"], json.loads(json.dumps(facts.config))
    changes = [
        f"{key}: {_show(saved.get(key))} then, {_show(value)} now"
        for key, value in current.items()
        if key not in _MAY_CHANGE and saved.get(key) != value
    ]
    if resume.state["base_fingerprint"] != facts.base_digest:
        changes.append(f"model: weights {resume.state['base_fingerprint']} then, {facts.base_digest} now")
    if changes:
        shown = "\n".join(f"  {change}" for change in changes)
        raise CheckpointError(
            f"{resume.checkpoint.path}: was saved by a run with other settings:\n{shown}\n"
            "Restore those settings, or start a new run: another output_dir, or resume=never."
        )


def _verify_and_read(checkpoint: Checkpoint, world: World) -> dict[str, Any]:
    verify(checkpoint, world.rank, world.world_size)
    try:
        state: dict[str, Any] = json.loads((checkpoint.path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path / STATE_FILE}: damaged: {error}.") from None
    return state


def _show(value: Any) -> str:
    return json.dumps(value) if value is not None else "none"
