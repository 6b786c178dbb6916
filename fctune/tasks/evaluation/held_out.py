"""Cases of a run's own held-out conversations, which it measures itself on while training."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from fctune.base.errors import DataError
from fctune.base.files import write_atomically
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.conversation import Conversation
from fctune.data.prepared_set import PreparedSet
from fctune.data.sources.defects import Defect
from fctune.data.sources.reader import parse_source
from fctune.tasks.evaluation.leaks import HELD_OUT_FILE, find_leaks
from fctune.tasks.task import Case

_MAX_WRITTEN = 200
_MAX_COMPARED_ROWS = 100_000  # comparing more takes minutes


def write_held_out_cases(config: DataConfig, prepared: PreparedSet, run: Path) -> None:
    """Write the first cases of a run's held-out conversations to its directory, to evaluate its exports with.

    Of small sets, cases whose questions a training row asks as well are left out. Without cases, nothing is written.
    """
    if config.pairs or not len(prepared.packs["validation"][0]):
        return
    with contextlib.suppress(DataError, OSError):  # the file is a convenience; the run is complete without it
        cases = find_held_out_cases(config, prepared, _MAX_WRITTEN)
        _write(cases, run / HELD_OUT_FILE)
        leaks = find_leaks(cases, run) if prepared.counts.rows <= _MAX_COMPARED_ROWS else None
        if leaks is not None and leaks.case_ids:
            _write([case for case in cases if case.id not in leaks.case_ids], run / HELD_OUT_FILE)


def _write(cases: Sequence[Case], path: Path) -> None:
    if cases:
        write_atomically(path, "".join(json.dumps(_to_row(case), ensure_ascii=False) + "\n" for case in cases))
    else:
        path.unlink()


def _to_row(case: Case) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": call.arguments} for call in case.expected]
    return {"id": case.id, "kind": case.category, **case.prompt.to_openai(), "expected_calls": calls}


def find_held_out_cases(config: DataConfig, prepared: PreparedSet, max_cases: int | None = None) -> list[Case]:
    """Make a case of each conversation with tools in the validation split.

    The case is the first turn of the assistant that calls a function, else its last turn. With ``max_cases``, each
    source gives an equal share, and is read no further than that.

    Raises:
        DataError: Nothing with tools is held out, or a source cannot be read.
    """
    flat, _ = prepared.packs["validation"]
    held_out = {int(digest) for digest in prepared.digests[flat]}
    quota = None if max_cases is None else math.ceil(max_cases / len(config.sources))
    cases = [
        case for source in config.sources for case in islice(_iter_cases(source, config.max_samples, held_out), quota)
    ][:max_cases]
    if not cases:
        raise DataError(
            "eval.cases=validation: no held-out conversation has tools and an answer. Specify a JSONL file of cases, "
            "hold out more with data.validation_share, or set eval.every=0."
        )
    return cases


def _iter_cases(source: SourceConfig, max_rows: int | None, held_out: set[int]) -> Iterator[Case]:
    """Yield the cases of a source; conversations are taken out of ``held_out``, so that repeated ones count once."""
    for row in islice(parse_source(source.path, source.format, source.columns), max_rows):
        if isinstance(row, Defect):
            continue
        digest = row.conversation.digest()
        if int(digest, 16) not in held_out:
            continue
        held_out.remove(int(digest, 16))
        if (case := _make_case(row.conversation, digest)) is not None:
            yield case


def _make_case(conversation: Conversation, name: str) -> Case | None:
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message.role == "assistant" and index > 0]
    if not answers or not conversation.tools:
        return None
    index = next((index for index in answers if messages[index].calls), answers[-1])
    expected = messages[index].calls
    prompt = replace(conversation, messages=messages[:index])
    return Case(id=name, category="call" if expected else "no_call", prompt=prompt, expected=expected)
