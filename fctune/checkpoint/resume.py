"""Choosing the checkpoint to resume from, and checking that it belongs to this run."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import CheckpointError
from fctune.checkpoint.store import Checkpoint, CheckpointStore, newest_first, open_checkpoint, verify
from fctune.config.fields import Field, iter_fields
from fctune.config.schema import RunConfig

logger = logging.getLogger("fctune")

STATE_FILE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Config and inputs of a run, which each of its checkpoints records."""

    config: dict[str, Any]
    base_digest: str  # of the base model's weights and config
    num_steps: int
    versions: dict[str, str]  # of Python and the main packages
    token_ids: tuple[int, ...] = ()  # tokens whose rows train


@dataclass(frozen=True, slots=True)
class Resume:
    """Checkpoint that a run resumes from, with its recorded state."""

    checkpoint: Checkpoint
    state: dict[str, Any]


def choose_checkpoint(resume: str, store: CheckpointStore, world: World) -> tuple[Resume | None, list[str]]:
    """Choose the newest intact checkpoint, or the one that is named.

    Args:
        resume: ``auto``, ``never``, or the path of a checkpoint.
        store: Checkpoints of the run.
        world: Each rank verifies its share of the files.

    Returns:
        The checkpoint, None if there is none to resume from; and for each newer one, why it is not used.

    Raises:
        CheckpointError: The named checkpoint, or every complete one, is damaged.
    """
    if resume == "never":
        return None, []
    unmarked: list[Checkpoint] = []
    if resume == "auto":
        marked, unmarked = distributed.run_on_rank_0(lambda: (store.list_complete(), store.list_unmarked()))
        candidates = newest_first([*marked, *unmarked])
    else:
        candidates = [distributed.run_on_rank_0(lambda: open_checkpoint(Path(resume)))]
    chosen: Resume | None = None
    not_used: list[str] = []
    is_damaged = False
    for candidate in candidates:
        try:
            state = distributed.run_on_all_ranks(lambda c=candidate: _verify_and_read(c, world))  # type: ignore[misc]
        except CheckpointError as error:
            not_used.append(f"{error} Its marker is missing, too." if candidate in unmarked else str(error))
            # A run that was killed before it marked its first checkpoint starts over.
            is_damaged |= candidate not in unmarked
        else:
            chosen = Resume(candidate, state)
            break
    if world.is_main:
        for problem in not_used:
            logger.warning("checkpoint skipped: %s", problem)
    if is_damaged and chosen is None:
        problems = "\n".join(f"  {problem}" for problem in not_used)
        raise CheckpointError(
            f"every checkpoint is corrupt or incomplete:\n{problems}\n"
            "Restore one from a backup, or start over with resume=never, which keeps the existing run under a new name."
        )
    return chosen, not_used


def check_same_run(resume: Resume, facts: RunFacts) -> None:
    """Check that a checkpoint was saved by this run; the loader checks the data.

    Raises:
        CheckpointError: Base, adapter, optimizer, schedule, batch size or seed differ; each difference is listed.
    """
    saved, current = resume.state["config"], json.loads(json.dumps(facts.config))
    changes = list(_iter_changes(saved, current))
    if resume.state["base_fingerprint"] != facts.base_digest:
        changes.append(f"model: weights were {resume.state['base_fingerprint']}, are {facts.base_digest}")
    if (trained := resume.state["trained_tokens"]) != list(facts.token_ids):
        changes.append(
            f"tokens with trained rows: were {trained}, are {list(facts.token_ids)}; list the former in "
            "adapter.train_tokens"
        )
    if changes:
        shown = "\n".join(f"  {change}" for change in changes)
        raise CheckpointError(
            f"{resume.checkpoint.path}: was saved by a run with different settings:\n{shown}\n"
            "Restore those settings, or start a new run: another output_dir, or resume=never."
        )


def _verify_and_read(checkpoint: Checkpoint, world: World) -> dict[str, Any]:
    verify(checkpoint, world.rank, world.world_size)
    try:
        state: dict[str, Any] = json.loads((checkpoint.path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path / STATE_FILE}: damaged: {error}.") from None
    return state


def _iter_changes(saved: dict[str, Any], current: dict[str, Any], section: str = "") -> Iterator[str]:
    """Yield a line for each key that differs and must not, sections key by key."""
    fields = _fields_by_key()
    names = {**saved, **current} if section else current  # an entire section that is gone comes from another version
    for name in names:
        key, before, value = f"{section}{name}", saved.get(name), current.get(name)
        if before == value or (key in fields and fields[key].change is not None):
            continue
        if isinstance(before, dict) and isinstance(value, dict):
            yield from _iter_changes(before, value, f"{key}.")
        else:
            yield f"{key}: was {_show(before)}, is {_show(value)}"


@functools.cache
def _fields_by_key() -> dict[str, Field]:
    return dict(iter_fields(RunConfig))


def _show(value: Any) -> str:
    return json.dumps(value) if value is not None else "none"
