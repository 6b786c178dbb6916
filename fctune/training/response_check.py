"""The check of an export's response template against the run's held-out conversations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.calls.response_template import Answer, check_answers, iter_answers
from fctune.config.intervals import format_count
from fctune.data.chat_template import ChatTemplate
from fctune.data.encoding import make_supervision
from fctune.models.export import choose_response
from fctune.tasks.evaluation.held_out import iter_held_out_conversations
from fctune.training.planned_run import PlannedRun

logger = logging.getLogger(__name__)

_MAX_CONVERSATIONS = 2000  # a few seconds


def check_response_template(planned: PlannedRun, export: Path) -> dict[str, Any]:
    """Read every call of the held-out conversations by an export's response template, and log what is wrong.

    Returns:
        What run.json records: ``origin`` of the template, None without one; ``note``, what it cannot read or why there
        is none; and the counts of ``check_answers``, without conversations to check none.
    """
    chosen = choose_response(planned.model_dir, planned.chat_template)
    record: dict[str, Any] = {"origin": None if chosen.spec is None else chosen.origin, "note": chosen.note}
    if chosen.spec is None:
        logger.warning(
            "%s: has no response_template, so transformers does not parse its answers: %s", export, chosen.note
        )
        return record
    try:
        record |= check_answers(export, _iter_calls(planned, export))
    except (ConfigError, DataError, OSError) as error:
        logger.warning("%s: its response_template is not checked: %s", export, error)
        return record
    if record["calls"] > record["read"]:
        logger.warning(
            "%s: its response_template reads %s of %s in held-out rows as written; others are %s",
            *(export, f"{record['read']:,}", format_count(record["calls"], "call"), "; ".join(record["wrong"])),
        )
    return record


def _iter_calls(planned: PlannedRun, export: Path) -> Iterator[Answer]:
    """Yield the answers with calls of the held-out conversations."""
    config, prepared = planned.config, planned.data.prepared
    if prepared is None or config.data.pairs or not len(prepared.packs["validation"][0]):
        return
    template = ChatTemplate(export, make_supervision(config.data))
    for conversation in islice(iter_held_out_conversations(config.data, prepared), _MAX_CONVERSATIONS):
        try:
            yield from (answer for answer in iter_answers(template, conversation) if answer.message.calls)
        except DataError:  # skipped in training, too
            continue
