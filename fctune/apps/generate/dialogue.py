"""One row: the teacher writes the user's messages, and answers them without seeing which calls it intended.

The row is kept if every answer's calls match their schemas, agree with each other and are the intended ones.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fctune.apps.generate.drafts import Draft, Drafter
from fctune.apps.generate.plan import RowPlan
from fctune.apps.generate.prompts import (
    ANSWERER,
    NUM_LISTED,
    VERDICT_SCHEMA,
    Turn,
    UnusableText,
    ask_for_request,
    ask_for_results,
    ask_for_rewording,
    ask_for_values,
    ask_for_verdict,
    read_request,
    read_results,
    read_rewording,
    read_values,
    read_verdict,
    request_schema,
    results_schema,
)
from fctune.apps.generate.teacher import SERVER_FAILURES, Asker, Dropped, Usage
from fctune.calls.formats.base import Parsed
from fctune.calls.matching import call_key, describe_differences, is_exact_match
from fctune.config.sections.data import RedactConfig
from fctune.data.augment.wordings import describe_ability, word_question, word_refusal
from fctune.data.check.overlap import MIN_WORDS, OverlapIndex
from fctune.data.check.similarity import WordHasher
from fctune.data.conversation import Call, Conversation, Message, Tool, to_encodable
from fctune.data.conversion import to_openai_row
from fctune.data.redaction import Redaction, Redactor
from fctune.data.sources.defects import Defect
from fctune.data.sources.reader import RowReader, UnreadRow
from fctune.data.sources.row_builder import ParsedRow
from fctune.data.sources.row_formats.base import LeftOut
from fctune.data.tool_schema import ToolSet
from fctune.engines.mcp_tools import McpTool, ToolError, call_mcp_tool

_SEED_STEP = 7_919
_MAX_LIST_TOKENS = 256
_MAX_FIRST_CALLS = 3
_MIN_REWORDED_WORDS = 5
_FEW_VALUES = 8
_MIN_LATER_WORDS = 3


class HeldOut:
    """The guard against held-out questions, for any number of threads.

    Args:
        items: Name and user turns of each held-out case, by the file that holds it.
    """

    def __init__(self, items: Mapping[str, Sequence[tuple[str, list[str]]]]):
        self._lock = threading.Lock()
        hasher = WordHasher()
        self._indices = [
            OverlapIndex(path, "eval", hasher, cases)
            for path, cases in items.items()
            if any(len(hasher.hash_words(text)) >= MIN_WORDS for _, texts in cases for text in texts)
        ]
        # Words of messages that are too short for runs of words; a later "Yes, please" is everybody's.
        self._messages = {
            words
            for cases in items.values()
            for _, texts in cases
            for number, words in enumerate(map(_list_words, texts))
            if words and (number == 0 or len(words) >= _MIN_LATER_WORDS)
        }

    def has(self, requests: Sequence[str]) -> bool:
        """Return True if one of a user's messages is a held-out one, or all hold half of a case's runs of words."""
        if not self._messages.isdisjoint(map(_list_words, requests)):
            return True
        row = Conversation(tuple(Message("user", request) for request in requests))
        with self._lock:
            return any(index.add(row) for index in self._indices)


@dataclass(frozen=True, slots=True)
class Writer:
    """Everything that rows are written with.

    Attributes:
        teacher: Writes and answers.
        votes: Answers to each message that are compared; 0: the calls of drafts are taken as they are.
        judge: Reads complete rows; None: nobody does.
        held_out: Guard against held-out questions.
        executed: Tools that are really called, by name.
        drafter: Drafts requests, which the teacher rewords; None: the teacher writes them.
        redactor: Replaces secrets in rows; None leaves them.
        result_redactor: Replaces secrets in results of executed tools, before the teacher reads them.
    """

    teacher: Asker
    votes: int
    judge: Asker | None = None
    held_out: HeldOut = field(default_factory=lambda: HeldOut({}))
    executed: Mapping[str, McpTool] = field(default_factory=dict)
    drafter: Drafter | None = None
    redactor: Redactor | None = None
    result_redactor: Redactor = field(default_factory=lambda: Redactor(RedactConfig()))


@dataclass(slots=True)
class Outcome:
    """A row, or the reason why there is none.

    Attributes:
        plan: What was asked for.
        verdict: ``kept``, or one of ``DROPPED``.
        reason: Why it was dropped.
        requests: The user's messages, as far as they were written.
        row: The row, if it is kept.
        usage: What it took.
    """

    plan: RowPlan
    verdict: str = "kept"
    reason: str = ""
    requests: tuple[str, ...] = ()
    row: dict[str, Any] | None = None
    usage: Usage = field(default_factory=Usage)


@dataclass(slots=True)
class ListedValues:
    """Values of a parameter that the teacher listed.

    Attributes:
        values: Different valid values.
        usage: What it took.
        is_final: They are worth keeping: there are some, or asking again would give none either.
    """

    values: list[Any] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    is_final: bool = True


def list_values(teacher: Asker, seed: int, tool: Tool, parameter: str) -> ListedValues:
    """Return values that the teacher lists for a parameter, asked once more, for fewer, if it lists hardly any.

    A weak teacher repeats itself without end, and no row starts before all lists are there: a list is short, and a
    request that reaches the time limit is not repeated as it is.
    """
    listed, failures = ListedValues(), set[str]()
    for attempt in range(len(NUM_LISTED)):
        messages, schema = ask_for_values(tool, parameter, attempt)
        try:
            text = teacher.ask(
                messages,
                schema,
                (seed + _SEED_STEP * attempt) % 2**31,
                listed.usage,
                max_new_tokens=_MAX_LIST_TOKENS,
                retries_timeouts=False,
            )
            found = read_values(text, tool, parameter)
        except UnusableText:
            continue
        except Dropped as error:
            failures.add(error.kind)
            continue
        listed.values += [value for value in found if value not in listed.values]
        if len(listed.values) >= _FEW_VALUES:
            break
    listed.is_final = bool(listed.values) or failures.isdisjoint(SERVER_FAILURES | {"budget"})
    return listed


def write_row(plan: RowPlan, writer: Writer) -> Outcome:
    """Return the row that the teacher writes to a plan, or why it fell."""
    outcome = Outcome(plan)
    dialogue = _Dialogue(plan, writer, outcome)
    try:
        outcome.row = dialogue.write()
    except (Dropped, UnusableText) as error:
        outcome.verdict, outcome.reason = error.kind, str(error)
    outcome.reason, *requests = dialogue.redact_texts([outcome.reason, *outcome.requests])
    outcome.requests = tuple(requests)
    return outcome


def read_made_row(row: Mapping[str, Any]) -> ParsedRow | Defect | LeftOut:
    """Return a row as training reads it."""
    return RowReader("openai").read(UnreadRow("generated", 0, json.dumps(row).encode()))


class _Dialogue:
    def __init__(self, plan: RowPlan, writer: Writer, outcome: Outcome):
        self._plan, self._writer, self._outcome = plan, writer, outcome
        self._tools = ToolSet(plan.tools)
        self._row = Conversation((), plan.tools)
        self._num_asked = self._num_calls = 0
        self._executed: set[str] = set()
        self._intended: tuple[Call, ...] = ()
        self._results: list[Message] = []  # of executed tools, as they are
        self._hidden: list[Redaction] = []  # what placeholders replace in them
        self._known_results: dict[Hashable, str] = {}  # of first calls, which drafts of later ones needed

    def write(self) -> dict[str, Any]:
        writer = self._writer
        turns = self._write_turns()
        self._outcome.requests = tuple(turn.request for turn in turns)
        self._intended = tuple(call for turn in turns for step in turn.steps for call in step)
        if writer.held_out.has(self._outcome.requests):
            raise Dropped("held_out", "it is in a file of --held-out")
        self._check(call for turn in turns for step in turn.steps[:1] for call in step)
        for turn in turns:
            self._answer(turn)
        if writer.judge is not None:
            self._hear(writer.judge)
        return self._finish()

    def _write_turns(self) -> Sequence[Turn]:
        plan, drafter = self._plan, self._writer.drafter
        if drafter is None or (plan.kind == "no_tool" and plan.hidden is None):
            return read_request(self._ask(ask_for_request(plan), request_schema(plan)), plan)
        if plan.kind == "dependent_calls":
            return [self._reword(self._draft_dependent(drafter))]
        if plan.kind == "small_talk":
            return [self._reword(drafter.draft_small_talk(plan))]
        calls = drafter.complete(plan)
        if calls is None:
            raise Dropped("no_values", "the schema and the teacher give none for a required argument")
        return [self._reword(draft) for draft in drafter.draft(plan, calls)]

    def _draft_dependent(self, drafter: Drafter) -> Draft:
        """Return a draft of two calls, the second of which needs the result of the first, which is found for it."""
        tools = sorted(self._plan.tools, key=lambda tool: tool.name not in self._writer.executed)
        for tool in tools[:_MAX_FIRST_CALLS]:
            if (call := drafter.draw_call(self._plan, tool)) is None:
                continue
            self._check([call])
            draft = drafter.draft_dependent(self._plan, call, self._find_result(tool, call))
            if draft is not None:
                return draft
        raise Dropped("wrong_kind", "no tool on offer requires what another returns")

    def _reword(self, draft: Draft) -> Turn:
        """Return the turn of a draft in the teacher's words, or in the draft's if those do not say the same."""
        if len(draft.text.split()) < _MIN_REWORDED_WORDS:
            return draft.to_turn()
        messages, schema = ask_for_rewording(self._plan, draft.text, draft.stated)
        text = ""
        try:
            text = read_rewording(self._ask(messages, schema))
        except UnusableText:
            pass
        except Dropped as error:
            if error.kind not in ("cut", "refused"):
                raise
        return draft.to_turn(text if draft.is_reworded_by(text, self._plan.tools, self._writer.votes > 0) else None)

    def _find_result(self, tool: Tool, call: Call) -> str:
        """Return the result of a call before it is made in the row, where it is the same."""
        self._add(Message("user", describe_ability(tool).topic))
        self._add(Message("assistant", None, (replace(call, id="call_1"),)))
        [result] = self._find_results([replace(call, id="call_1")])
        self._row = replace(self._row, messages=())
        self._known_results[call_key(call)] = result
        return result

    def _hear(self, judge: Asker) -> None:
        """Let the judge read the row."""
        try:
            text = judge.ask(ask_for_verdict(self._row), VERDICT_SCHEMA, self._plan.seed, self._outcome.usage)
            is_good, reason = read_verdict(text)
        except (Dropped, UnusableText) as error:
            # A judge that is gone says nothing about the row or its kind.
            if error.kind in SERVER_FAILURES:
                raise Dropped(error.kind, f"the judge: {error}") from None
            raise Dropped(error.kind if error.kind == "budget" else "judge_failed", str(error)) from None
        if not is_good:
            raise Dropped("judged_bad", reason)

    def _answer(self, turn: Turn) -> None:
        """Add a turn of the user, and all that the assistant and the tools say to it."""
        self._add(Message("user", to_encodable(turn.request)))
        for number, intended in enumerate(turn.steps):
            calls = self._vote(intended, has_arguments=turn.knows_all or number == 0).calls
            self._num_calls += len(calls)
            first = self._num_calls - len(calls) + 1
            calls = tuple(replace(call, id=f"call_{first + i}") for i, call in enumerate(calls))
            self._add(Message("assistant", None, calls))
            for call, result in zip(calls, self._find_results(calls), strict=True):
                self._add(Message("tool", to_encodable(result), call_id=call.id, name=call.name))
        # What is said after results is worded once; whether a first answer calls anything is voted on.
        said = self._vote((), has_arguments=True, is_after_results=bool(turn.steps))
        self._add(Message("assistant", to_encodable(said.prose.strip())))

    def _vote(self, intended: Sequence[Call], has_arguments: bool, is_after_results: bool = False) -> Parsed:
        """Return the first of several answers, which agree with each other and with what was intended.

        Args:
            intended: The calls that are due; none: a text is.
            has_arguments: Their arguments are known; otherwise only their names are.
            is_after_results: The text that ends a turn with calls, of which one answer is enough.
        """
        is_trusted = self._writer.votes == 0
        if is_trusted and (trusted := self._trust(intended, is_after_results)) is not None:
            return trusted
        first: Parsed | None = None
        for _ in range(1 if is_after_results else max(self._writer.votes, 1)):
            answer = self._writer.teacher.answer(
                ANSWERER, self._row, self._next_seed(), self._outcome.usage, words_only=is_after_results or is_trusted
            )
            self._check(answer.calls)
            if first is None:
                _compare(intended, answer.calls, has_arguments)
                first = answer
            elif not is_exact_match(first.calls, answer.calls):
                raise Dropped("disagreement", "; ".join(describe_differences(first.calls, answer.calls)))
            if not answer.calls and not answer.prose.strip():
                raise Dropped("garbage", "an empty answer")
        assert first is not None
        return first

    def _trust(self, intended: Sequence[Call], is_after_results: bool) -> Parsed | None:
        """Return the answer that a draft intends; None if the teacher words it."""
        plan = self._plan
        if intended:
            return Parsed(tuple(intended))
        rng = random.Random(self._next_seed())
        if plan.kind == "no_tool":
            missing = [plan.hidden] if plan.hidden is not None else []
            return Parsed((), prose=word_refusal(self._row.tools, missing, rng))
        if plan.kind == "missing_value" and not is_after_results:
            return Parsed((), prose=word_question(plan.targets[0], str(plan.missing), rng))
        return None

    def _check(self, calls: Any) -> None:
        for call in calls:
            # The tool that is missing in the row was on offer to the teacher that wrote the request.
            if problems := self._tools.find_errors(call):
                raise Dropped("invalid_call", "; ".join(problems))

    def _find_results(self, calls: Sequence[Call]) -> list[str]:
        """Return the results of calls: of really called tools, and of the others as the teacher imagines them."""
        results: dict[str | None, str] = {}
        raw: dict[str | None, str] = {}
        for call in calls:
            if (known := self._known_results.get(call_key(call))) is not None:
                results[call.id] = known
                continue
            if (tool := self._writer.executed.get(call.name)) is not None:
                try:
                    raw[call.id] = call_mcp_tool(tool, call)
                except ToolError as error:
                    *_, reason = self._hide_secrets([*raw.values(), str(error)])
                    raise Dropped("execution_failed", reason) from None
                self._executed.add(call.name)
        if raw:
            results |= zip(raw, self._hide_secrets(list(raw.values())), strict=True)
        imagined = [call for call in calls if call.id not in results]
        if imagined:
            text = self._ask(ask_for_results(self._row, imagined), results_schema(len(imagined)))
            for call, result in zip(imagined, read_results(text, len(imagined)), strict=True):
                results[call.id] = result
        return [results[call.id] for call in calls]

    def _hide_secrets(self, results: Sequence[str]) -> list[str]:
        """Return results of executed tools with placeholders; the teacher's server may be another's.

        A result may tell that an earlier one holds a secret, which is then replaced in the row so far, too.
        """
        redactor = self._writer.result_redactor
        num_before = len(self._results)
        self._results += [Message("tool", result) for result in results]
        redacted, redaction = redactor.redact_conversation(Conversation(tuple(self._results)))
        new = tuple(f"messages[{index}]" for index in range(num_before, len(self._results)))
        findings = [finding for finding in redaction.findings if finding.pointer.startswith(new)]
        self._row, late = redactor.replace_known(self._row, redaction.table)
        if findings or late:
            self._hidden.append(Redaction([*findings, *late], redaction.table))
        return [message.content or "" for message in redacted.messages[num_before:]]

    def _redact(self) -> tuple[Conversation, Redaction]:
        """Return the row as it is written, and what placeholders replace in it."""
        # The teacher may repeat what it read before a later result told that it is a secret.
        row, late = self._writer.result_redactor.replace_known(self._row, self._secrets)
        text = row.to_json()
        found = [one for one in self._hidden if any(placeholder in text for _, placeholder in one.table.values())]
        found.append(Redaction(late, {}))
        if self._writer.redactor is not None:
            row, more = self._writer.redactor.redact_conversation(row)
            found.append(more)
        findings = [finding for one in found for finding in one.findings]
        redaction = Redaction(findings, {form: kind for one in found for form, kind in one.table.items()})
        return self._writer.result_redactor.mute(row, redaction), redaction

    @property
    def _secrets(self) -> dict[str, tuple[str, str]]:
        """The kind and placeholder of each spelling of each secret of the results."""
        return {form: kind for one in self._hidden for form, kind in one.table.items()}

    def redact_texts(self, texts: Sequence[str]) -> list[str]:
        """Return texts about the row with placeholders; the row and its calls tell which values are secrets."""
        said = Conversation(tuple(Message("user", text) for text in texts))
        said, _ = self._writer.result_redactor.replace_known(said, self._secrets)
        if self._writer.redactor is not None:
            calls = Message("assistant", None, self._intended)
            said = Conversation((*said.messages, *self._row.messages, calls))
            said, _ = self._writer.redactor.redact_conversation(said)
        return [message.content or "" for message in said.messages[: len(texts)]]

    def _finish(self) -> dict[str, Any]:
        """Return the row with its provenance, if it is read back as it is."""
        plan, writer = self._plan, self._writer
        conversation, redaction = self._redact()
        row = to_openai_row(conversation)
        read = read_made_row(row)
        if not isinstance(read, ParsedRow):
            raise Dropped("invalid_row", read.reason if isinstance(read, Defect) else "its reader leaves it out")
        if to_openai_row(read.conversation)["messages"] != row["messages"]:
            raise Dropped("invalid_row", "it is read back as another conversation")
        made: dict[str, Any] = {
            "teacher": writer.teacher.engine.model,
            "kind": plan.kind,
            "seed": plan.seed,
            "index": plan.index,
            "votes": writer.votes,
        }
        if writer.drafter is not None:
            made["requests"] = "drafted"
        if writer.judge is not None:
            made["judge"] = writer.judge.engine.model
        if self._executed:
            made["executed"] = sorted(self._executed)
        metadata: dict[str, Any] = {"generated": made}
        if redaction.findings:
            metadata["redacted"] = redaction.make_mark(conversation)
        return {**row, "metadata": metadata}

    def _ask(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> str:
        return self._writer.teacher.ask(messages, schema, self._next_seed(), self._outcome.usage)

    def _next_seed(self) -> int:
        self._num_asked += 1
        return (self._plan.seed + _SEED_STEP * self._num_asked) % 2**31

    def _add(self, message: Message) -> None:
        self._row = replace(self._row, messages=(*self._row.messages, message))


def _compare(intended: Sequence[Call], calls: Sequence[Call], has_arguments: bool) -> None:
    """Compare the calls of an answer with those that are due.

    Raises:
        Dropped: They differ.
    """
    if has_arguments:
        is_same = is_exact_match(intended, calls)
    else:
        is_same = Counter(call.name for call in intended) == Counter(call.name for call in calls)
    if not is_same:
        raise Dropped("other_calls", "; ".join(describe_differences(intended, calls)))
    if len({call_key(call) for call in calls}) < len(calls):
        raise Dropped("other_calls", "one call is made twice")


def _list_words(text: str) -> tuple[str, ...]:
    """Return what is equal for all spellings of a message: its words, or the text if it has none."""
    text = text.casefold()
    return tuple(re.findall(r"\w+", text) or text.split())
