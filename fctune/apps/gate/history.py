"""How the result was trained: its rows, searched for the held-out cases and for what explains a fall."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.config.intervals import parse_share
from fctune.config.sections.data import AUGMENT_KINDS, AugmentConfig
from fctune.data.augment.augmenter import MAX_POOL_ROWS, Augmenter
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.check.overlap import OverlapIndex
from fctune.data.check.similarity import WordHasher
from fctune.data.conversation import Conversation
from fctune.data.sources import ParsedRow
from fctune.engines.model_files import is_on_disk
from fctune.models.architecture import TINY_ROWS, TINY_WEIGHTS, count_weights
from fctune.models.planned_model import find_architecture
from fctune.runs.directory import RunFiles
from fctune.runs.tune_directory import read_repeat
from fctune.tasks.evaluation.held_out import (
    DistinctRequests,
    QuestionSearch,
    find_leaks,
    find_run,
    iter_rows_of,
    iter_training_rows,
)
from fctune.tasks.task import AnyCase

_MAX_ROWS = 100_000  # that are profiled and compared by words; more take minutes
_MIN_ROWS = 100
_MAX_TRIED = 1_000  # rows that a kind of augmentation is tried on before it counts as one that applies to none


@dataclass
class RowProfile:
    """Counts and properties of the training rows that explain what a model loses.

    Attributes:
        source: The run or file that they are of.
        augment: Shares by kind of ``data.augment``, with which they were trained.
        replay: The config's ``data.replay``; empty: no rows were mixed in.
        learning_rate: The highest of the run; None: unknown.
        base_reasons: The base reasons on the cases, so that it can lose that.
        rows_needed: About the number of rows that a run has to read, repeated or not; 0: unknown.
        rows_read: Number of rows that it read, of each pass; 0: unknown.
        num_passes: Number of passes over them; None: unknown.
        max_steps: The config's limit.
        called_share: Share of the held-out requests with a fitting tool in which the result calls one; None: unknown.
        num_rows: Conversations.
        counts: Number of those with each property: ``tools``, ``call``, ``no_call`` (tools, and none is called),
            ``clarification`` (tools, and the assistant asks before it calls or instead), ``several_turns`` of the user,
            ``reasoning``, ``no_tools``.
        tool_sets: Number of rows by the names that they offer.
        requests: Different requests of the rows with tools.
        tried: The first rows, each with its source, that kinds of augmentation are tried on.
        pool: Tools and values of the rows, which augmentation draws from.
        max_tools: As in ``data.augment``.
    """

    source: str
    augment: Mapping[str, float] = field(default_factory=dict)
    replay: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    base_reasons: bool = True
    rows_needed: int = 0
    rows_read: int = 0
    num_passes: float | None = None
    max_steps: int | None = None
    called_share: float | None = None
    num_rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    tool_sets: Counter[frozenset[str]] = field(default_factory=Counter)
    requests: DistinctRequests = field(default_factory=DistinctRequests)
    tried: list[tuple[str, ParsedRow]] = field(default_factory=list)
    pool: ToolPool = field(default_factory=ToolPool)
    max_tools: int = field(default_factory=lambda: AugmentConfig().max_tools)
    _obstacles: dict[tuple[str, float], str | None] = field(default_factory=dict, init=False)
    _eligible: dict[str, float] = field(default_factory=dict, init=False)

    def add_parsed(self, source: str, row: ParsedRow) -> None:
        """Count a row, and keep it to try augmentation on."""
        self.add(row.conversation)
        if len(self.tried) < _MAX_TRIED:
            self.tried.append((source, row))
        if self.num_rows <= MAX_POOL_ROWS and row.mark is None:
            self.pool.add(row.conversation, source)

    def find_obstacle(self, kind: str, share: float) -> str | None:
        """Return why the augmenter cannot apply a kind to any row; None if it can, or no rows are kept to try it on."""
        if self.tried and (kind, share) not in self._obstacles:
            augmenter = self._make_augmenter(kind, share)
            counts = augmenter.counts[kind]
            is_made = any(augmenter.expand(row, source) and counts.made > 0 for source, row in self.tried)
            reasons = (counts.left_out + counts.unsuitable).most_common(1)
            self._obstacles[kind, share] = None if is_made else reasons[0][0] if reasons else "too few rows"
        return self._obstacles.get((kind, share))

    def added_share(self, kind: str, share: float) -> float:
        """Return the rows that a kind of augmentation adds for each row with tools.

        If no rows are kept to try it on, one for each row with calls.
        """
        if not self.tried:
            return share * self.share("call", "tools")
        if kind not in self._eligible:
            augmenter = self._make_augmenter(kind, 1.0)
            for source, row in self.tried:
                augmenter.expand(row, source)
            num_with_tools = sum(bool(row.conversation.tools) for _, row in self.tried)
            self._eligible[kind] = augmenter.counts[kind].made / max(1, num_with_tools)
        return share * self._eligible[kind]

    def _make_augmenter(self, kind: str, share: float) -> Augmenter:
        config = AugmentConfig(max_tools=self.max_tools)
        setattr(config, kind, share)
        return Augmenter(config, self.pool)

    def add(self, row: Conversation) -> None:
        """Count a row, its properties and the tools that it offers."""
        self.num_rows += 1
        answers = [message for message in row.messages if message.role == "assistant"]
        has_calls = any(message.calls for message in answers)
        found = {
            "tools": bool(row.tools),
            "no_tools": not row.tools,
            "call": has_calls,
            "no_call": bool(row.tools) and not has_calls,
            "clarification": bool(row.tools) and _asks(answers),
            "several_turns": sum(message.role == "user" for message in row.messages) > 1,
            "reasoning": any(message.reasoning for message in answers),
        }
        self.counts.update(name for name, is_so in found.items() if is_so)
        if row.tools:
            self.tool_sets[frozenset(tool.name for tool in row.tools)] += 1
            self.requests.add(row)

    def share(self, name: str, of: str | None = None) -> float:
        """Return the share of rows with a property, of all rows or of those with another; 0 if there are none."""
        total = self.num_rows if of is None else self.counts[of]
        return self.counts[name] / total if total else 0.0

    @property
    def main_set_share(self) -> float:
        """Share of the rows with tools that offer the most frequent set of them."""
        return max(self.tool_sets.values(), default=0) / self.counts["tools"] if self.counts["tools"] else 0.0


def _asks(answers: Sequence[Any]) -> bool:
    """Return True if the assistant asks the user something in a turn without a call, before any call."""
    for message in answers:
        if message.calls:
            return False
        if (message.content or "").rstrip().endswith(("?", "？")):
            return True
    return False


@dataclass(frozen=True)
class TrainingHistory:
    """The training rows of a result, and the command that trained it.

    Attributes:
        source: The run or the files, for people.
        run: The run; None: the rows were named.
        rows: Sources of rows that were named.
        config: The run's config; empty if unknown.
        command: The command that started the run, with what was edited in the config of a tune; None: unknown.
        num_passes: Passes over the rows that the run's steps were; None: unknown.
    """

    source: str
    run: Path | None
    rows: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    num_passes: float | None = None

    @property
    def output_dir(self) -> str | None:
        """The run's output directory."""
        return self.config.get("output_dir")

    def iter_rows(self) -> Iterator[tuple[str, ParsedRow]]:
        """Yield the rows with their sources, without those that the run holds out."""
        if self.rows or self.run is None:
            return iter_rows_of(self.rows, self.run)
        return iter_training_rows(self.run)

    def find_cases(self, cases: Sequence[AnyCase]) -> tuple[list[str], int, dict[str, str]]:
        """Look for cases in the rows.

        Returns:
            The ids of those that a row asks as well, the number of others that a row nearly asks, and the sources that
            cannot be compared, with the reason.
        """
        found, unread = set[str](), dict[str, str]()
        search = QuestionSearch(cases)
        if self.run is not None and (leaks := find_leaks(cases, self.run)) is not None:
            found, unread = set(leaks.case_ids), leaks.unread
        questions = [(case.id, [m.content for m in case.questions if m.role == "user" and m.content]) for case in cases]
        try:
            index = OverlapIndex("", "eval", WordHasher(), questions)
        except DataError:  # all are too short to be compared
            index = None
        compared = None if self.rows else _MAX_ROWS  # named rows are all searched, as those of a run are above
        for number, (_, row) in enumerate(islice(self.iter_rows(), compared)):
            if self.rows:
                found |= search.find(row.conversation.messages)
            if index is not None and number < _MAX_ROWS:
                index.add(row.conversation)
        similar = index.overlap.num_found if index is not None else 0
        return [case.id for case in cases if case.id in found], max(0, similar - len(found)), unread

    def profile(self) -> RowProfile:
        """Count what the rows contain."""
        data = self.config.get("data") or {}
        given = data.get("augment") or {}
        shares = {kind: parse_share(given[kind]) for kind in AUGMENT_KINDS if kind in given}
        rate = (self.config.get("optimizer") or {}).get("lr")
        profile = RowProfile(self.source, shares, data.get("replay") or {}, rate)
        profile.max_tools = given.get("max_tools", profile.max_tools)
        for source, row in islice(self.iter_rows(), _MAX_ROWS):
            profile.add_parsed(source, row)
        profile.rows_needed = TINY_ROWS if self._is_tiny() else _MIN_ROWS
        profile.num_passes, profile.max_steps = self.num_passes, self.config.get("max_steps")
        passes = max(1.0, float(self.config.get("epochs") or 1)) if self.num_passes is None else self.num_passes
        profile.rows_read = round(profile.num_rows * passes)
        return profile

    def _is_tiny(self) -> bool:
        """Return True if the base is on this machine, and has so few weights that it knows nothing yet."""
        model = self.config.get("model") or {}
        path = str(model.get("path") or "")
        if not is_on_disk(path):
            return False
        try:
            architecture, _, _ = find_architecture(path, None, model.get("source") or "auto")
        except (ConfigError, OSError):
            return False
        return count_weights(architecture) < TINY_WEIGHTS


def find_history(tuned: str, rows: Sequence[str] = ()) -> TrainingHistory | None:
    """Find out how a result was trained; None if it is of no run on this machine and no rows are named.

    Args:
        tuned: The result, as the user named it.
        rows: Sources of its training rows; none: those that its run names.
    """
    run = find_run(Path(tuned)) if is_on_disk(tuned) else None
    if run is None:
        return TrainingHistory(", ".join(rows), None, tuple(rows)) if rows else None
    try:
        record = json.loads(RunFiles(run).run.read_text(encoding="utf-8"))
        config, command = record["config"], read_repeat(run) or record.get("command")
        per_pass = record.get("steps_per_epoch")
        num_passes = record["num_steps"] / per_pass if per_pass else None
    except (OSError, ValueError, KeyError, TypeError):  # find_leaks reports it
        config, command, num_passes = {}, None, None
    source = ", ".join(rows) if rows else str(run)
    return TrainingHistory(source, run, tuple(rows), config, tuple(command) if command else None, num_passes)
