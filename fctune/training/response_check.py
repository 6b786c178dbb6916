"""The check of an export's response template against the run's held-out conversations."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.calls.response_template import Answer, check_answers, iter_answers
from fctune.config.intervals import format_count
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message
from fctune.data.encoding import make_supervision
from fctune.models.export import choose_response
from fctune.tasks.evaluation.held_out import iter_held_out_conversations
from fctune.tasks.suite_files import load_suite
from fctune.training.planned_run import PlannedRun

logger = logging.getLogger(__name__)

_MAX_CONVERSATIONS = 2000  # a few seconds


def check_response_template(planned: PlannedRun, exports: Sequence[Path]) -> dict[str, Any]:
    """Read every held-out call by the response template of each export, and log what is wrong.

    Returns:
        What run.json records: ``origin`` of the template, None without one; ``note``, what it cannot read or why there
        is none; and the counts of ``check_answers`` of the export that reads the fewest calls, without calls to check
        none.
    """
    chosen = choose_response(planned.model_dir, planned.chat_template)
    record: dict[str, Any] = {"origin": None if chosen.spec is None else chosen.origin, "note": chosen.note}
    if chosen.spec is None:
        logger.warning(
            "%s: has no response_template, so transformers does not parse its answers: %s", exports[0], chosen.note
        )
        return record
    try:
        answers = list(_iter_calls(planned, exports[0]))
    except (ConfigError, DataError, OSError) as error:
        logger.warning("%s: its response_template is not checked: %s", exports[0], error)
        return record
    for export in exports:
        try:
            found = check_answers(export, answers)
        except (ConfigError, DataError, OSError) as error:
            logger.warning("%s: its response_template is not checked: %s", export, error)
            continue
        if found["read"] <= record.get("read", found["read"]):
            record |= found
        if found["calls"] > found["read"]:
            logger.warning(
                "%s: its response_template reads %s of %s in held-out rows as written; others are %s",
                *(export, f"{found['read']:,}", format_count(found["calls"], "call"), "; ".join(found["wrong"])),
            )
    return record


def _iter_calls(planned: PlannedRun, export: Path) -> Iterator[Answer]:
    """Yield the answers with calls of the held-out conversations, or of the gate's cases if none are held out."""
    template = ChatTemplate(export, make_supervision(planned.config.data))
    for conversation in islice(_iter_conversations(planned), _MAX_CONVERSATIONS):
        try:
            yield from (answer for answer in iter_answers(template, conversation) if answer.message.calls)
        except DataError:  # skipped in training, too
            continue


def _iter_conversations(planned: PlannedRun) -> Iterator[Conversation]:
    config, prepared = planned.config, planned.data.prepared
    if prepared is None or config.data.pairs:
        return
    if len(prepared.packs["validation"][0]):
        yield from iter_held_out_conversations(config.data, prepared)
    elif config.gate is not None and config.gate.cases is not None:
        for case in load_suite(config.gate.cases).cases:
            earlier = (replace(message, weight=0.0) for message in case.prompt.messages)
            yield replace(case.prompt, messages=(*earlier, Message("assistant", None, case.expected)))
