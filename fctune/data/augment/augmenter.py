"""Changed and added forms of training rows, as ``data.augment`` asks for them, with their counts.

Everything about a row is decided by the seed and the row's digest, so the forms depend neither on the order of rows nor
on the process that makes them.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fctune.base.errors import DataError
from fctune.config.intervals import format_count, format_share
from fctune.config.sections.data import ADDITIONS, AUGMENT_KINDS, CHANGES, AugmentConfig
from fctune.data.augment.added_rows import (
    NO_CALLS,
    Turn,
    ask,
    find_askable,
    find_missing_tools,
    find_repetition,
    find_turn,
    has_no_call_turn,
    repeat,
    take_away,
)
from fctune.data.augment.rewriting import NameMask, draw_mask, order_arguments, paraphrase_schema, shuffle_tools
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.check.warnings import iter_warnings
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.sources import ParsedRow, RowReader, UnreadRow

MAX_POOL_ROWS = 20_000  # of each source, whose tools and values other rows get; more take minutes to read
_NEED_OTHER_ROWS = ("distract", "take_away", "repeat")

_INVALID = "not valid"
_READER = RowReader()
_NO_TOOLS = "no tools"
_IS_MADE = "made by data augment already"
_ALL_NEEDED = "all tools are needed, and no other is known"
_NO_OTHERS = "no other tool is known"
_NO_CALL_TURN = "a request that is answered without a call, which an added tool might fulfil"
_MIN_TOOLS = 3  # of a row with distractors
_TITLED_SHARE = 0.3  # of the rows whose schemas are paraphrased


@dataclass(slots=True)
class KindCounts:
    """Rows that a kind was tried on.

    rows = ``eligible`` + the sum of ``unsuitable``; ``chosen`` = ``made`` + the sum of ``left_out``.
    """

    eligible: int = 0
    chosen: int = 0
    made: int = 0
    unsuitable: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> KindCounts:
        """Return the counts that ``to_json`` returned."""
        plain = {name: values[name] for name in ("eligible", "chosen", "made")}
        return cls(**plain, unsuitable=Counter(values["unsuitable"]), left_out=Counter(values["left_out"]))

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        plain = {name: getattr(self, name) for name in ("rows", "eligible", "chosen", "made")}
        return {**plain, "unsuitable": dict(self.unsuitable), "left_out": dict(self.left_out)}

    @property
    def rows(self) -> int:
        """Number of rows that the kind was tried on."""
        return self.eligible + self.unsuitable.total()

    def add(self, other: KindCounts) -> None:
        """Add the counts of other rows in place."""
        self.eligible += other.eligible
        self.chosen += other.chosen
        self.made += other.made
        self.unsuitable.update(other.unsuitable)
        self.left_out.update(other.left_out)

    def lose(self, reason: str) -> None:
        """Count a row as left out that was counted as made."""
        self.made -= 1
        self.left_out[reason] += 1

    def describe(self, kind: str, share: float) -> str:
        """Return one line: the rows that were changed or added, and how many were eligible."""
        made = f"{self.made:,} changed" if kind in CHANGES else f"{self.made:,} added"
        line = f"{kind}={format_share(share)}: {made}, {self.eligible:,} of {format_count(self.rows, 'row')} eligible"
        return f"{line}; left out: {_list(self.left_out)}" if self.left_out else line


AugmentCounts = dict[str, KindCounts]


class Form(NamedTuple):
    """A row, changed or not, or a row that was made of it.

    Attributes:
        conversation: The form.
        kinds: What was done to the row, in the order of ``AUGMENT_KINDS``; empty for the row as it is.
    """

    conversation: Conversation
    kinds: tuple[str, ...] = ()

    @property
    def is_added(self) -> bool:
        """True for a row in addition to the original."""
        return any(kind in ADDITIONS for kind in self.kinds)


class Augmenter:
    """Makes the forms of rows.

    Args:
        config: Kinds, their shares and the seed.
        pool: Tools, values and requests of other rows.
    """

    def __init__(self, config: AugmentConfig, pool: ToolPool):
        self.config = config
        self.shares = config.shares()
        self.pool = pool
        self.counts = new_counts(self.shares)

    def expand(self, parsed: ParsedRow, group: str = "") -> list[Form]:
        """Return the forms of a row to train on, the row itself first, and count them as made.

        Args:
            parsed: The row.
            group: Source of the row, whose tools distract it.
        """
        row, digest = parsed.conversation, parsed.digest()
        if parsed.mark is not None:
            for counts in self.counts.values():
                counts.unsuitable[_IS_MADE] += 1
            return [Form(row)]
        turn = find_turn(row)
        plan = _Plan(self, row, digest, turn, group)
        added = list(self._iter_added(parsed, plan))
        mask_messages = [*row.messages, *(message for one in added for message in one.conversation.messages)]
        changes = plan.draw_changes(mask_messages)
        plain, forms = Form(row), [Form(plan.change(row), changes)] if changes else []
        forms += [Form(plan.change(one.conversation, one.removed), (*changes, one.kind)) for one in added]
        return [*([] if changes else [plain]), *self._keep_valid(parsed, forms)]

    def leave_out(self, form: Form, reason: str) -> None:
        """Count a form that cannot be used after all."""
        for kind in [kind for kind in form.kinds if kind in ADDITIONS] or form.kinds:
            self.counts[kind].lose(reason)

    def take_counts(self) -> AugmentCounts:
        """Return the counts since the last call."""
        counts, self.counts = self.counts, new_counts(self.shares)
        return counts

    def choose(self, kind: str, digest: str, problem: str | None) -> bool:
        """Return True if a kind is to be applied to a row; counts it, with the problem of one that is not eligible."""
        if kind not in self.shares:
            return False
        counts = self.counts[kind]
        if problem is not None:
            counts.unsuitable[problem] += 1
            return False
        counts.eligible += 1
        text = f"{self.config.seed}:{kind}:{digest}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        is_chosen = number < self.shares[kind] * 2**64
        counts.chosen += is_chosen
        counts.made += is_chosen
        return is_chosen

    def make_rng(self, kind: str, digest: str) -> random.Random:
        """Return the random generator of a kind for a row."""
        return random.Random(f"{self.config.seed}:{kind}:{digest}")

    def _iter_added(self, parsed: ParsedRow, plan: _Plan) -> Iterator[_Added]:
        row, turn, digest = parsed.conversation, plan.turn, plan.digest
        kinds = [kind for kind in ADDITIONS if kind in self.shares]
        if turn is None:
            for kind in kinds:
                self.choose(kind, digest, NO_CALLS if row.tools else _NO_TOOLS)
            return
        for kind in kinds:
            rng = self.make_rng(kind, digest)
            if kind == "take_away":
                missing = find_missing_tools(row, turn, self.pool)
                problem = missing if isinstance(missing, str) else None
                is_alone = problem is None and len(missing) == len(row.tools)
                if is_alone and not self.pool.has_others(row.tools, plan.group):
                    problem = _ALL_NEEDED
                if self.choose(kind, digest, problem) and not isinstance(missing, str):
                    made = plan.take_away(missing, rng)
                    if made is None:
                        self.counts[kind].lose(_ALL_NEEDED)
                    else:
                        yield made
            elif kind == "ask":
                askable = find_askable(row, turn)
                if self.choose(kind, digest, askable if isinstance(askable, str) else None):
                    parameter, remaining = rng.choice(askable)
                    yield _Added(kind, ask(row, turn, parameter, remaining, rng))
            else:
                one_only = parsed.raw.get("parallel_tool_calls") is False
                repetition = "only one call at a time allowed" if one_only else find_repetition(row, turn, self.pool)
                if self.choose(kind, digest, repetition if isinstance(repetition, str) else None):
                    assert not isinstance(repetition, str)
                    yield _Added(kind, repeat(row, turn, repetition, rng))

    def _keep_valid(self, parsed: ParsedRow, forms: list[Form]) -> Iterator[Form]:
        """Yield the forms that have no warning which the row does not have; in place of a changed row, the row."""
        if not forms:
            return
        before = _count_warnings(parsed.conversation)
        for form in forms:
            if _count_warnings(form.conversation) <= before:
                yield form
                continue
            self.leave_out(form, _INVALID)
            if not form.is_added:
                yield Form(parsed.conversation)


class _Added(NamedTuple):
    """A row to add, before the changes of its original; ``removed`` are names of tools that it does not offer."""

    kind: str
    conversation: Conversation
    removed: frozenset[str] = frozenset()


class _Plan:
    """The changes of a row, which its added rows share, so that these differ from it in nothing else.

    Args:
        augmenter: The augmenter.
        row: The row.
        digest: Its digest.
        turn: Its first turn with calls, if it has one.
        group: Source of the row.
    """

    def __init__(self, augmenter: Augmenter, row: Conversation, digest: str, turn: Turn | None, group: str):
        self.augmenter, self.row, self.digest, self.turn, self.group = augmenter, row, digest, turn, group
        self._mask: NameMask | None = None
        self._schema_seed = self._order_seed = ""
        self._tools = row.tools
        self._rewritten: dict[str, Tool] = {}
        self._masked: dict[str, Tool] = {}
        self._is_distracted = self._distract()

    def take_away(self, missing: tuple[Tool, ...], rng: random.Random) -> _Added | None:
        """Return the row without the tools that it needs; None if there is no other tool to offer."""
        assert self.turn is not None
        row, needed = self.row, self.turn.needed
        pool = self.augmenter.pool
        left = tuple(t for t in self._tools if not any(t is one or pool.are_alike(t, one) for one in needed))
        if not left:
            text = row.messages[self.turn.index - 1].content or ""
            left = tuple(pool.draw_others(needed, text, rng.choice((1, 1, 2, 3)), rng, self.group, self._tools))
            if not left:
                return None
        made = take_away(replace(row, tools=left), self.turn, needed, rng)
        return _Added("take_away", made, frozenset(tool.name for tool in missing))

    def draw_changes(self, messages: list[Message]) -> tuple[str, ...]:
        """Choose the changes of the row, and return their kinds.

        Args:
            messages: Messages of the row and of the rows that are added to it.
        """
        augmenter, row, digest = self.augmenter, self.row, self.digest
        kinds = ["distract"] if self._is_distracted else []
        if "mask_names" in augmenter.shares:
            mask = draw_mask(self._tools, messages, augmenter.make_rng("mask_names", digest))
            has_names = mask is not None and any(tool.name in mask.tools for tool in row.tools)
            problem = None if has_names else "no tool whose name can be replaced" if row.tools else _NO_TOOLS
            if augmenter.choose("mask_names", digest, problem):
                self._mask = mask
                kinds.append("mask_names")
        if augmenter.choose("paraphrase", digest, None if row.tools else _NO_TOOLS):
            self._schema_seed = "paraphrase"
            kinds.append("paraphrase")
        if augmenter.choose("shuffle_tools", digest, None if len(self._tools) > 1 else "fewer than two tools"):
            self._order_seed = "shuffle_tools"
            kinds.append("shuffle_tools")
        return tuple(kinds)

    def change(self, conversation: Conversation, removed: frozenset[str] = frozenset()) -> Conversation:
        """Return a form of the row with the changes."""
        tools = conversation.tools if removed else self._tools
        messages = conversation.messages
        if self._schema_seed:
            rewritten = {tool.name: self._rewrite(tool) for tool in tools}
            old = {tool.name: tool for tool in tools}
            tools = tuple(rewritten[tool.name] for tool in tools)
            messages = tuple(
                replace(m, calls=tuple(_order_arguments(call, old, rewritten) for call in m.calls)) if m.calls else m
                for m in messages
            )
        if self._order_seed and len(tools) > 1:
            tools = shuffle_tools(tools, self.augmenter.make_rng(self._order_seed, self.digest))
        if self._mask is not None:
            tools = tuple(map(self._mask_tool, tools))
            messages = tuple(map(self._mask.apply_to_message, messages))
        return replace(conversation, tools=tools, messages=messages)

    def _rewrite(self, tool: Tool) -> Tool:
        """Return a tool with its paraphrased schema, the same in each form of the row."""
        if tool.name not in self._rewritten:
            rng = self.augmenter.make_rng(f"{self._schema_seed}:{tool.name}", self.digest)
            titles = random.Random(f"titles:{self.digest}").random()  # of all tools of the row, or of none
            self._rewritten[tool.name] = paraphrase_schema(tool, rng, self._mask is None and titles < _TITLED_SHARE)
        return self._rewritten[tool.name]

    def _mask_tool(self, tool: Tool) -> Tool:
        assert self._mask is not None
        if tool.name not in self._masked:
            self._masked[tool.name] = self._mask.apply_to_tool(tool)
        return self._masked[tool.name]

    def _distract(self) -> bool:
        """Choose whether to add tools, and add them."""
        augmenter, row, turn = self.augmenter, self.row, self.turn
        most = augmenter.config.max_tools
        if turn is None:
            problem: str | None = NO_CALLS
        elif has_no_call_turn(row):
            problem = _NO_CALL_TURN
        else:
            problem = None if len(row.tools) < most else f"{most} tools or more"
        if not augmenter.choose("distract", self.digest, problem) or turn is None:
            return False
        rng = augmenter.make_rng("distract", self.digest)
        called = {call.name for message in row.messages for call in message.calls}
        needed = [tool for tool in row.tools if tool.name in called]
        wanted = rng.randint(max(_MIN_TOOLS, len(row.tools) + 1), most)
        text = row.messages[turn.index - 1].content or ""
        others = augmenter.pool.draw_others(needed, text, wanted - len(row.tools), rng, self.group, row.tools)
        if not others or len(row.tools) + len(others) < _MIN_TOOLS:
            augmenter.counts["distract"].lose(_NO_OTHERS)
            return False
        tools = [*row.tools, *others]
        rng.shuffle(tools)
        self._tools = tuple(tools)
        return True


def is_held_out(split: int, share: float) -> bool:
    """Return True if a row is in the validation split, by the hash that decides it; ``is_validation`` of one row."""
    return split >> 32 < share * 2**32


def make_augmenter(config: AugmentConfig, rows: Iterable[tuple[str, ParsedRow]]) -> Augmenter:
    """Return an augmenter that knows the tools of rows.

    Args:
        config: Kinds, their shares and the seed.
        rows: Rows that are trained on, with their groups; read only if a kind needs other rows.
    """
    pool = ToolPool()
    if not config.shares().keys().isdisjoint(_NEED_OTHER_ROWS):
        for group, parsed in rows:
            if parsed.mark is None:
                pool.add(parsed.conversation, group)
    return Augmenter(config, pool)


def new_counts(shares: Mapping[str, float]) -> AugmentCounts:
    """Return counts of nothing, for each kind that is applied."""
    return {kind: KindCounts() for kind in AUGMENT_KINDS if kind in shares}


class UnusedKindError(DataError):
    """A kind of augmentation was applied to no row."""


def check_counts(counts: AugmentCounts, shares: Mapping[str, float], prefix: str = "data.augment.") -> None:
    """Check that each kind was applied to a row.

    Raises:
        UnusedKindError: A kind was applied to none; says how many rows were eligible and why the others were not.
    """
    problems = []
    for kind, count in counts.items():
        if count.made or not count.rows:
            continue
        key = f"{prefix}{kind}={format_share(shares[kind])}"
        if not count.eligible:
            rows = format_count(count.rows, "row")
            problems.append(f"{key}: applies to none of the {rows} ({_list(count.unsuitable)}). Remove it.")
        elif not count.chosen:
            enough = format_share(min(1.0, 2 / count.eligible))
            problems.append(
                f"{key}: selects none of the {format_count(count.eligible, 'eligible row')} of {count.rows:,}. "
                f"Raise it to {enough} or more, or remove it."
            )
        else:
            problems.append(
                f"{key}: none of the {format_count(count.chosen, 'row')} chosen among {count.eligible:,} eligible ones "
                f"can be used ({_list(count.left_out)}). Remove it, or add rows."
            )
    if problems:
        raise UnusedKindError("\n".join(problems))


def _list(reasons: Counter[str]) -> str:
    return "; ".join(f"{reason}: {count:,}" for reason, count in reasons.most_common())


def _order_arguments(call: Call, before: Mapping[str, Tool], after: Mapping[str, Tool]) -> Call:
    return order_arguments(call, before[call.name], after[call.name]) if call.name in before else call


def _count_warnings(conversation: Conversation) -> Counter[str]:
    row = _READER.read(UnreadRow("", 0, conversation))
    assert isinstance(row, ParsedRow)
    return Counter(warning.kind for warning in iter_warnings(row))
