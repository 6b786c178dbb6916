"""Training rows from judged answers: right ones as supervised rows, pairs of right and wrong ones, and drafts."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fctune.base.errors import ConfigError
from fctune.calls.judge import ERROR_KINDS
from fctune.data.conversation import Call, Conversation, Message
from fctune.data.conversion import to_openai_row
from fctune.tasks.judge import Row, is_valid
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import benchmark_of
from fctune.tasks.task import Case

Keep = Literal["best", "shortest", "diverse", "random"]


def select_rows(
    case: Case, answers: Sequence[Row], keep: Keep = "best", num_rows: int = 1, benchmark: str | None = None
) -> list[dict[str, Any]]:
    """Return training rows in OpenAI's format from the answers to a case: its prompt, then one of the right answers.

    Earlier turns of the assistant have weight 0: only the chosen answer is supervised. Answers with equal text are
    chosen once.

    Args:
        case: The case.
        answers: Rows of answers, as ``fctune.tasks.sampling.run`` writes them.
        keep: ``best``: matching the schemas, then the most frequent, then the shortest; ``shortest``: with the fewest
            tokens; ``diverse``: the best, then those whose texts differ most from the chosen ones; ``random``: any
            answers, right or wrong, as a control.
        num_rows: The largest number of rows.
        benchmark: The benchmark that the case belongs to, which each row then names.
    """
    if keep == "random":
        chosen = sorted(_distinct(filter(_is_usable, answers)), key=_shuffle)[:num_rows]
    else:
        right = _rank_right(answers)
        if keep == "shortest":
            right.sort(key=_length)
        chosen = _spread(right, num_rows) if keep == "diverse" else right[:num_rows]
    return [_to_training_row(case, answer, keep, benchmark) for answer in chosen]


def select_pairs(
    case: Case, answers: Sequence[Row], keep: Keep = "best", num_pairs: int = 1, benchmark: str | None = None
) -> list[dict[str, Any]]:
    """Return preference pairs of a case: right answers against wrong ones, the nearest misses first.

    A pair has ``prompt``, ``chosen`` and ``rejected`` (messages in OpenAI's format), ``tools``, the token ids of both
    answers if the engine kept them, and ``metadata``. A wrong answer that cannot be read as calls becomes plain text.

    Args:
        case: The case.
        answers: Rows of answers, as ``fctune.tasks.sampling.run`` writes them.
        keep: ``random``: two different answers, whatever their verdicts, in random order, as a control; otherwise the
            right answers are ranked as for ``best``.
        num_pairs: The largest number of pairs; a wrong answer is in at most one, with ``random`` every answer.
        benchmark: The benchmark that the case belongs to, which each pair then names.
    """
    if keep == "random":
        shuffled = sorted(filter(_is_usable, answers), key=_shuffle)
        couples = zip(shuffled[::2], shuffled[1::2], strict=False)
        different = [(one, other) for one, other in couples if to_message(one) != to_message(other)]
        return [_to_pair(case, one, other, benchmark) for one, other in different[:num_pairs]]
    right = _rank_right(answers)
    wrong = _distinct(answer for answer in answers if _is_usable(answer) and not is_valid(answer))
    wrong.sort(key=lambda answer: (-answer["closeness"], answer["sample"]))
    if not right:
        return []
    return [
        _to_pair(case, right[number % len(right)], other, benchmark) for number, other in enumerate(wrong[:num_pairs])
    ]


def to_message(answer: Row) -> Message:
    """Return the answer as a message: text and calls of the strict reading, or its text if it cannot be read."""
    reasoning = (answer.get("reasoning") or {}).get("text") or None
    if answer["malformed"]:
        return Message("assistant", answer["text"], reasoning=reasoning)
    calls = tuple(Call(call["name"], call["arguments"]) for call in answer["calls"])
    return Message("assistant", answer["prose"] or (None if calls else ""), calls, reasoning=reasoning)


def group_by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of answers by the id of their case, in the order of their samples."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["sample"]):
        groups.setdefault(row["case"], []).append(row)
    return groups


def iter_selected(
    cases: Iterable[Case], groups: Mapping[str, Sequence[Row]], select: Callable[[Case, Sequence[Row]], list[Any]]
) -> Iterator[Any]:
    """Yield the results of ``select`` for each case's answers, in the order of the cases."""
    for case in cases:
        yield from select(case, groups.get(case.id, ()))


def _is_usable(answer: Row) -> bool:
    """Return True if there is something to train on or against."""
    return answer.get("error") is None and bool(answer["calls"] or answer["text"].strip())


def _rank_right(answers: Sequence[Row]) -> list[Row]:
    """Return the right answers, best first, except those that were cut off, which would teach the model not to stop."""
    right = [
        answer
        for answer in answers
        if _is_usable(answer) and is_valid(answer) and not answer["malformed"] and not answer["is_cut"]
    ]
    frequency = Counter(_key(answer) for answer in right)
    ranked = sorted(right, key=lambda answer: (-answer["scores"]["schema"], -frequency[_key(answer)], *_length(answer)))
    return _distinct(ranked)


def _distinct(answers: Iterable[Row]) -> list[Row]:
    return list({_key(answer): answer for answer in reversed(list(answers))}.values())[::-1]


def _key(answer: Row) -> str:
    return json.dumps([answer["text"], answer["calls"], (answer.get("reasoning") or {}).get("text")], sort_keys=True)


def _length(answer: Row) -> tuple[int, int]:
    num_tokens = answer["num_tokens"]
    return len(_key(answer)) if num_tokens is None else num_tokens, answer["sample"]


def _shuffle(answer: Row) -> bytes:
    return hashlib.blake2b(f"{answer['case']} {answer['sample']}".encode()).digest()


def _spread(ranked: Sequence[Row], num_rows: int) -> list[Row]:
    """Choose the first, then repeatedly the one whose text is least similar to those already chosen."""
    chosen, rest = list(ranked[:1]), list(ranked[1:])
    while rest and len(chosen) < num_rows:
        likeness = [
            max(difflib.SequenceMatcher(None, _key(one), _key(other), autojunk=False).ratio() for other in chosen)
            for one in rest
        ]
        chosen.append(rest.pop(likeness.index(min(likeness))))
    return chosen


def _to_training_row(case: Case, answer: Row, keep: Keep, benchmark: str | None) -> dict[str, Any]:
    context = tuple(replace(m, weight=0.0) if m.role == "assistant" else m for m in case.prompt.messages)
    row = to_openai_row(replace(case.prompt, messages=(*context, to_message(answer))))
    return {**row, "metadata": {"case": case.id, "sample": answer["sample"], "keep": keep, **_mark(benchmark)}}


def _to_pair(case: Case, chosen: Row, rejected: Row, benchmark: str | None) -> dict[str, Any]:
    num_prompt = len(case.prompt.messages)
    rows = [_write(case.prompt, answer) for answer in (chosen, rejected)]
    pair: dict[str, Any] = {
        "prompt": rows[0]["messages"][:num_prompt],
        "chosen": rows[0]["messages"][num_prompt:],
        "rejected": rows[1]["messages"][num_prompt:],
        **{key: value for key, value in rows[0].items() if key != "messages"},
    }
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if answer.get("token_ids") is not None:
            pair[f"{name}_token_ids"] = answer["token_ids"]
    pair["metadata"] = {
        "case": case.id,
        "chosen_sample": chosen["sample"],
        "rejected_sample": rejected["sample"],
        "closeness": round(rejected["closeness"], 4),
        "kind": rejected["verdict"],
        "chosen_text": chosen["answer"],
        "rejected_text": rejected["answer"],
        **_mark(benchmark),
    }
    return pair


def _write(prompt: Conversation, answer: Row) -> dict[str, Any]:
    return to_openai_row(replace(prompt, messages=(*prompt.messages, to_message(answer))))


def _mark(benchmark: str | None) -> dict[str, str]:
    return {} if benchmark is None else {"benchmark": benchmark}


def write_proposals(suite: Suite, rows: Sequence[Row], path: str | Path) -> int:
    """Write the failures as JSONL, sorted by kind of error, and return their count; see ``propose``.

    Raises:
        ConfigError: The file holds something else, perhaps drafts that were reviewed; or the suite is a benchmark.
    """
    drafts, path = propose(suite, rows), Path(path)
    text = "".join(json.dumps(draft, ensure_ascii=True) + "\n" for draft in drafts)
    if path.is_file() and path.read_bytes() != text.encode():
        raise ConfigError(f"--propose {path}: holds something else, perhaps reviewed drafts. Pass another file.")
    path.write_text(text, encoding="utf-8")
    return len(drafts)


def propose(suite: Suite, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the failures as rows in OpenAI's shape: ``messages``, including the expected answer, and ``tools``.

    Each row also has ``reviewed`` (false), ``error_class``, ``case``, ``suite`` and ``got``: the model's answer and
    what is wrong with it. If no call was due, the expected answer is empty and the row is rejected by every reader
    until a person has written one.

    Training on a case makes it useless for evaluation; ``fctune data check --eval-suite`` finds such cases.

    Raises:
        ConfigError: The suite is a benchmark.
    """
    if (name := benchmark_of(suite)) is not None:
        raise ConfigError(f"{suite.name}: belongs to a benchmark ({name}), which must not be trained on. Use others.")
    cases = {case.id: case for case in suite.cases}
    drafts = []
    for row in sorted(rows, key=lambda row: ERROR_KINDS.index(row["verdict"])):
        case = cases.get(row["id"])
        if case is None or row["verdict"] in ("correct", "no_answer"):
            continue
        calls = tuple(Call(c.name, c.arguments, f"call_{n}") for n, c in enumerate(case.expected, start=1))
        answer = Message("assistant", None, calls)
        draft = {
            "reviewed": False,
            "error_class": row["verdict"],
            "suite": suite.name,
            "case": case.id,
            "messages": [message.to_openai() for message in (*case.prompt.messages, answer)],
            "got": {"answer": row["answer"], "calls": row["calls"], "differences": row["differences"]},
        }
        if case.prompt.tools:
            draft["tools"] = [tool.to_openai() for tool in case.prompt.tools]
        drafts.append(draft)
    return drafts
