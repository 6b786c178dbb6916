"""Conversations and held-out cases over the target tools."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.synthetic.target_requests import draw_request, frame_target_request
from fctune.data.synthetic.target_tools import TargetTool, load_target_tools
from fctune.data.synthetic.values import RESULT_VALUES, Side, draw_target

KINDS = {"single": 0.18, "choice": 0.36, "parallel": 0.18, "multi_turn": 0.18, "no_call": 0.1}
# Kinds that the held-out cases show to be hard are trained on more often.
_TRAIN_KINDS = {"single": 0.08, "choice": 0.38, "parallel": 0.22, "multi_turn": 0.14, "no_call": 0.18}
_JOINERS: dict[Side, tuple[str, ...]] = {
    "train": (
        *(" and ", ". Then ", " and then ", ", then ", ". Also, ", "; ", ". And then ", ", and also "),
        " and please ",
    ),
    "held_out": (" and also ", ". And also ", "; then "),
}
_UNFIT = "I have no tool for that."
_SMALL_TALK: dict[Side, tuple[tuple[str, str], ...]] = {
    "train": (
        ("Thanks!", "You are welcome."),
        ("Thank you.", "You are welcome."),
        ("Hello!", "Hello, how can I help?"),
        ("Good evening.", "Hello, how can I help?"),
        ("What can you do?", "I can use the tools for you."),
        ("Nice work.", "You are welcome."),
    ),
    "held_out": (
        ("Thank you!", "You are welcome."),
        ("Hello.", "Hello, how can I help?"),
        ("Thanks, nice work.", "You are welcome."),
        ("What can you do for me?", "I can use the tools for you."),
    ),
}
_CHAIN_REQUESTS: dict[Side, tuple[str, ...]] = {
    "train": (
        "look up {person} and send them an email about {subject}",
        "find the address of {person}, then email them about {subject}",
        "email {person} with the subject {subject}, look up the address first",
    ),
    "held_out": (
        "look up {person}, then email them about {subject}",
        "find {person} and send them an email with the subject {subject}",
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out case: a conversation up to the assistant turn, and the calls expected there (possibly none)."""

    id: str
    kind: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    expected_calls: tuple[Call, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the row of a case file: messages and tools as OpenAI writes them, calls as name and arguments."""
        return {
            "id": self.id,
            "kind": self.kind,
            "messages": [message.to_openai() for message in self.messages],
            "tools": [tool.to_openai() for tool in self.tools],
            "expected_calls": [{"name": call.name, "arguments": call.arguments} for call in self.expected_calls],
        }


def _offer(due: list[TargetTool], num_others: int, rng: random.Random) -> tuple[Tool, ...]:
    """Return the expected tools and some others in random order."""
    tools = load_target_tools()
    names = {target.name for target in due}
    offered = [tools.find_called(name) for name in sorted(names)]
    offered += rng.sample([target for target in tools.called if target.name not in names], num_others)
    rng.shuffle(offered)
    return tuple(target.tool() for target in offered)


def _result_messages(target: TargetTool, rng: random.Random) -> tuple[Message, Message]:
    """Return the tool's result and the assistant's sentence about it."""
    record = {key: RESULT_VALUES[kind](rng) for key, kind in target.result.items()}
    return (
        Message("tool", json.dumps(record, ensure_ascii=False), name=target.name),
        Message("assistant", target.answer.format(**record)),
    )


def _make_single(kind: str, side: Side, rng: random.Random) -> Conversation:
    target = rng.choice(load_target_tools().called)
    clause, call = draw_request(target, side, rng)
    num_others = 0 if kind == "single" else rng.randint(1, 2)
    messages = (frame_target_request(clause, side, rng), Message("assistant", calls=(call,)))
    return Conversation(messages, _offer([target], num_others, rng))


def _make_parallel(kind: str, side: Side, rng: random.Random) -> Conversation:
    del kind
    num_calls = 2 if rng.random() < 0.85 else 3
    targets = load_target_tools().called
    due = [rng.choice(targets)] * num_calls if rng.random() < 0.4 else rng.sample(targets, 2)
    clauses, calls = zip(*[draw_request(target, side, rng) for target in due], strict=True)
    clause = rng.choice(_JOINERS[side]).join(clauses)
    messages = (frame_target_request(clause, side, rng), Message("assistant", calls=calls))
    return Conversation(messages, _offer(due, rng.randint(0, 1), rng))


def _make_chain(side: Side, rng: random.Random) -> Conversation:
    """Make one request that needs two calls, the second with a value from the result of the first."""
    person, subject = draw_target("person", side, rng), draw_target("title", side, rng)
    email = draw_target("email", side, rng)
    tools = load_target_tools()
    find, send = tools.find_called("find_contact"), tools.find_called("send_email")
    clause = rng.choice(_CHAIN_REQUESTS[side]).format(person=person, subject=subject)
    messages = (
        frame_target_request(clause, side, rng),
        Message("assistant", calls=(Call(find.name, {"person": person}),)),
        Message("tool", json.dumps({"email": email}), name=find.name),
        Message("assistant", calls=(Call(send.name, {"to": email, "subject": subject}),)),
    )
    return Conversation(messages, _offer([find, send], rng.randint(0, 1), rng))


def _make_multi_turn(kind: str, side: Side, rng: random.Random) -> Conversation:
    """Make two requests in turn; the first is answered from its result."""
    del kind
    if rng.random() < 0.2:
        return _make_chain(side, rng)
    first = rng.choice([target for target in load_target_tools().called if target.result])
    second = first if rng.random() < 0.3 else rng.choice(load_target_tools().called)
    (clause, call), (next_clause, next_call) = draw_request(first, side, rng), draw_request(second, side, rng)
    messages = (
        frame_target_request(clause, side, rng),
        Message("assistant", calls=(call,)),
        *_result_messages(first, rng),
        frame_target_request(next_clause, side, rng),
        Message("assistant", calls=(next_call,)),
    )
    return Conversation(messages, _offer([first, second], rng.randint(0, 1), rng))


def _make_no_call(kind: str, side: Side, rng: random.Random) -> Conversation:
    """Make small talk, a request that no offered tool fits, or a result that only needs a sentence."""
    del kind
    draw = rng.random()
    target = rng.choice([target for target in load_target_tools().called if target.result])
    clause, call = draw_request(target, side, rng)
    user = frame_target_request(clause, side, rng)
    if draw < 0.3:
        tools = _offer([target], rng.randint(0, 2), rng)
        return Conversation((user, Message("assistant", calls=(call,)), *_result_messages(target, rng)), tools)
    others = _offer([target], rng.randint(1, 3), rng)
    if draw < 0.75:
        tools = tuple(tool for tool in others if tool.name != target.name)
        return Conversation((user, Message("assistant", _UNFIT)), tools)
    remark, answer = rng.choice(_SMALL_TALK[side])
    return Conversation((Message("user", remark), Message("assistant", answer)), others)


_MAKERS: dict[str, Callable[[str, Side, random.Random], Conversation]] = {
    "single": _make_single,
    "choice": _make_single,
    "parallel": _make_parallel,
    "multi_turn": _make_multi_turn,
    "no_call": _make_no_call,
}


def iter_train(num_rows: int, seed: int) -> Iterator[Conversation]:
    """Yield fine-tuning rows: target tools in training phrasings with training values."""
    rng = random.Random(f"train:{seed}")
    for row in range(num_rows):
        kind = rng.choices(list(_TRAIN_KINDS), list(_TRAIN_KINDS.values()))[0]
        conversation = _MAKERS[kind](kind, "train", rng)
        yield replace(conversation, source=f"synthetic:{kind}:{row}")


def iter_reasoned(num_rows: int, seed: int) -> Iterator[Conversation]:
    """Yield the fine-tuning rows of this seed; in half of them, drawn at random, the assistant reasons in each turn."""
    rng = random.Random(f"reasoned:{seed}")
    for conversation in iter_train(num_rows, seed):
        yield _add_reasoning(conversation) if rng.random() < 0.5 else conversation


def _add_reasoning(conversation: Conversation) -> Conversation:
    messages: list[Message] = []
    for message in conversation.messages:
        if message.role == "assistant":
            previous = messages[-1].role
            message = replace(message, reasoning=_describe_step(message, previous))
        messages.append(message)
    return replace(conversation, messages=tuple(messages))


def _describe_step(message: Message, previous: str) -> str:
    """Return a true statement about the assistant's next step that contains the names of the calls in order."""
    names = [call.name for call in message.calls]
    if len(names) > 1:
        return f"I call {len(names)} tools: {', '.join(names)}."
    if names:
        return f"I call one tool: {names[0]}." if previous == "user" else f"Next I call {names[0]}."
    return "The result answers it." if previous == "tool" else "I call no tool."


def iter_shuffled(num_rows: int, seed: int) -> Iterator[Conversation]:
    """Yield the fine-tuning rows with every call turn replaced by another row's: same words, but nothing to learn."""
    rows = list(iter_train(num_rows, seed))
    turns = [(row, turn) for row, one in enumerate(rows) for turn, message in enumerate(one.messages) if message.calls]
    order = list(range(len(turns)))
    random.Random(f"shuffled:{seed}").shuffle(order)
    messages = [list(row.messages) for row in rows]
    for target, giver in zip(order, order[1:] + order[:1], strict=True):
        row, turn = turns[target]
        giver_row, giver_turn = turns[giver]
        messages[row][turn] = replace(messages[row][turn], calls=rows[giver_row].messages[giver_turn].calls)
    for conversation, changed in zip(rows, messages, strict=True):
        yield replace(conversation, messages=tuple(changed))


def iter_held_out(num_cases: int, seed: int) -> Iterator[Case]:
    """Yield held-out cases: the same tools in phrasings and with values that no training row has."""
    rng = random.Random(f"held_out:{seed}")
    kinds = [kind for kind, share in KINDS.items() for _ in range(round(share * num_cases))]
    kinds = (kinds + ["choice"] * num_cases)[:num_cases]
    rng.shuffle(kinds)
    for number, kind in enumerate(kinds):
        conversation = _MAKERS[kind](kind, "held_out", rng)
        *messages, last = conversation.messages
        yield Case(f"{kind}-{number}", kind, tuple(messages), conversation.tools, last.calls)
