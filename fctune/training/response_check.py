"""The check of an export's response template against the run's held-out conversations."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.calls.response_template import Answer, check_answers, iter_answers
from fctune.config.intervals import format_count
from fctune.config.sections.evaluation import VALIDATION_CASES
from fctune.config.sections.rollouts import is_dialogue_source
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message
from fctune.data.encoding import make_supervision
from fctune.models.export import choose_response
from fctune.tasks.evaluation.held_out import iter_held_out_conversations
from fctune.tasks.suite_files import load_suite
from fctune.training.planned_run import PlannedRun

logger = logging.getLogger(__name__)

_MAX_S = 300.0  # 2,000 conversations take a few seconds


def check_response_template(planned: PlannedRun, exports: Sequence[Path]) -> dict[str, Any]:
    """Read every held-out call by the response template of each export, and log what is wrong.

    Returns:
        What run.json records: ``origin`` of the template, None without one; ``note``, what it cannot read or why there
        is none; and the counts of ``check_answers`` of the export that reads the fewest calls.
    """
    chosen = choose_response(planned.model_dir, planned.chat_template)
    record: dict[str, Any] = {"origin": None if chosen.spec is None else chosen.origin, "note": chosen.note}
    if chosen.spec is None:
        logger.warning(
            "%s: has no response_template, so transformers does not parse its answers: %s", exports[0], chosen.note
        )
        return record
    for export in exports:
        answers = _Answers(planned, export)
        try:
            found = check_answers(export, answers)
        except (ConfigError, DataError, OSError) as error:
            logger.warning("%s: its response_template is not checked: %s", export, error)
            continue
        if not answers.num_conversations:
            logger.warning(
                "%s: its response_template is not checked: no row is held out, and no cases are named", export
            )
        if answers.is_cut:
            logger.warning(
                "%s: its response_template is checked on the first %s of the held-out rows, for which %.0f s are "
                "allowed",
                *(export, format_count(found["calls"], "call"), _MAX_S),
            )
        if found["read"] <= record.get("read", found["read"]):
            record |= found
        if found["calls"] > found["read"]:
            logger.warning(
                "%s: its response_template reads %s of %s in held-out rows as written; others are %s",
                *(export, f"{found['read']:,}", format_count(found["calls"], "call"), "; ".join(found["wrong"])),
            )
    return record


class _Answers:
    """The answers with calls of the held-out conversations, or of the run's cases if none are held out.

    Attributes:
        num_conversations: Conversations that were read.
        is_cut: The time was over before the last one.
    """

    def __init__(self, planned: PlannedRun, export: Path):
        self._planned, self._export = planned, export
        self.num_conversations, self.is_cut = 0, False

    def __iter__(self) -> Iterator[Answer]:
        template = ChatTemplate(self._export, make_supervision(self._planned.config.data))
        end_s = time.monotonic() + _MAX_S
        for conversation in _iter_conversations(self._planned):
            if time.monotonic() > end_s:
                self.is_cut = True
                return
            self.num_conversations += 1
            try:
                yield from (answer for answer in iter_answers(template, conversation) if answer.message.calls)
            except DataError:  # skipped in training, too
                continue


def _iter_conversations(planned: PlannedRun) -> Iterator[Conversation]:
    config, prepared = planned.config, planned.data.prepared
    if prepared is not None and len(prepared.packs["validation"][0]):
        yield from iter_held_out_conversations(config.data, prepared)
        return
    rollouts = config.rollouts
    named = [
        config.gate.cases if config.gate is not None else None,
        config.eval.cases if config.eval.cases != VALIDATION_CASES else None,
        rollouts.cases if rollouts is not None and not is_dialogue_source(rollouts.cases) else None,
    ]
    if (cases := next(filter(None, named), None)) is None:
        return
    for case in load_suite(cases).cases:
        earlier = (replace(message, weight=0.0) for message in case.prompt.messages)
        yield replace(case.prompt, messages=(*earlier, Message("assistant", None, case.expected)))
