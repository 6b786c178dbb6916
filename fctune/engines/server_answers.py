"""The one reader of what model servers answer. It trusts nothing: a server may be broken, or lie.

Each function returns checked values or raises ``UnusableAnswer``, whose kind is counted; the client then asks again.
"""

from __future__ import annotations

import json
import math
import reprlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from fctune.calls.reasoning.base import Reasoning
from fctune.calls.reasoning.registry import find_reasoning
from fctune.data.chat_template import ChatTemplate
from fctune.engines.engine import Answer, AnswerTokens
from fctune.engines.http_client import UnusableAnswer

# A log-probability that rounding, not a broken server, leaves above 0.
_ROUNDING = 1e-3
# vLLM sends this for minus infinity, which JSON lacks; no token of that probability is ever sampled.
_MINUS_INFINITY = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Bounds of the tokens of an answer: their number, and the ids of the vocabulary; None: not known."""

    max_new_tokens: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds to the first token and to the end of a streamed answer, and its number of tokens.

    If the server does not report its tokens, ``num_tokens`` counts the events, of which servers send one a token.
    """

    first_s: float
    total_s: float
    num_tokens: int


def count_vocabulary(template: ChatTemplate) -> int:
    """Return the number of token ids of a model: rows of its embedding, which may exceed the tokenizer's tokens."""
    try:
        config = json.loads((template.model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    sizes = [config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size")]
    return max(len(template.tokenizer), *(size for size in sizes if _is_count(size)))


def read_completion(body: Any, prompt: Sequence[int], limits: TokenLimits) -> tuple[AnswerTokens, bool]:
    """Return the tokens of a completion's body, and True if the limit ended it.

    Args:
        body: vLLM's answer to a request with ``return_token_ids`` and ``logprobs``.
        prompt: Token ids that were sent.
        limits: Bounds of the answer's tokens.

    Raises:
        UnusableAnswer: Tokens are missing, impossible, or belong to another prompt, or the answer was aborted.
    """
    choice = _read_choice(body)
    listed = choice.get("logprobs")
    logprobs = listed.get("token_logprobs") if isinstance(listed, dict) else None
    tokens = _check_tokens(prompt, choice.get("token_ids"), logprobs, limits)
    sent = choice.get("prompt_token_ids")
    if sent is not None and sent != list(prompt):
        count = f"{len(sent):,}" if isinstance(sent, list) else _show(sent)
        raise UnusableAnswer(
            "other_prompt", f"a prompt of {count} token ids that differ from the {len(prompt):,} that were sent"
        )
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise UnusableAnswer("unfinished", f"finish_reason {_show(reason)}; expected stop or length")
    return tokens, reason == "length"


def read_chat_answer(body: Any, limits: TokenLimits | None = None) -> Answer:
    """Return the answer, of index 0, in a chat completion's body, with its tokens if their limits are given.

    Raises:
        UnusableAnswer: Its message has another form, its tokens are missing or impossible, or it was aborted.
    """
    choice = _read_choice(body)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise UnusableAnswer("malformed", f"no choices[0].message in {_show(body)}")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str | None) or not isinstance(calls, list | None):
        raise UnusableAnswer("malformed", f"content or tool_calls of the wrong type in {_show(message)}")
    sent = tuple(call if isinstance(call, dict) else {} for call in calls or ())
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    tokens = None
    if limits is not None:
        listed = choice.get("logprobs")
        pairs = listed.get("content") if isinstance(listed, dict) else None
        if isinstance(pairs, list):
            pairs = [token.get("logprob") if isinstance(token, dict) else None for token in pairs]
        tokens = _check_tokens(body.get("prompt_token_ids"), choice.get("token_ids"), pairs, limits)
    num_tokens, num_prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
    return Answer(
        0,
        content or "",
        choice.get("finish_reason") == "length",
        sent,
        reasoning=_read_reasoning(message, content or "", sent, usage),
        num_tokens=num_tokens if _is_count(num_tokens) else None,
        tokens=tokens,
        num_prompt_tokens=num_prompt_tokens if _is_count(num_prompt_tokens) else None,
        is_refused=bool(message.get("refusal")) or choice.get("finish_reason") == "content_filter",
    )


def read_chat_events(events: Iterator[Any]) -> Answer:
    """Return the answer, of index 0, of a streamed chat completion, as a client puts its pieces together.

    Raises:
        UnusableAnswer: The stream broke off, was aborted or reports an error, or has events of another form.
    """
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    usage, finish_reason, is_complete = None, None, False
    for event in events:
        if not isinstance(event, dict):
            is_complete |= event is None
            continue
        usage = event.get("usage") or usage
        choice = _read_event(event)
        finish_reason = choice.get("finish_reason") or finish_reason
        delta = choice.get("delta")
        for key, piece in (delta if isinstance(delta, dict) else {}).items():
            if key == "tool_calls":
                _add_call_pieces(calls, piece)
            elif isinstance(piece, str) and key != "role":
                texts[key] = texts.get(key, "") + piece
    # Not every server ends with [DONE].
    if not is_complete and finish_reason is None:
        raise UnusableAnswer("unfinished", "the stream ended before its [DONE]")
    message = {**texts, "tool_calls": [calls[position] for position in sorted(calls)]}
    return read_chat_answer({"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage})


def _add_call_pieces(calls: dict[int, dict[str, Any]], pieces: Any) -> None:
    """Add the pieces of an event to the calls: each names its call by number, and the arguments come in parts."""
    for piece in pieces if isinstance(pieces, list) else [pieces] if pieces else ():
        function = piece.get("function") if isinstance(piece, dict) else None
        position = piece.get("index") if isinstance(piece, dict) else None
        if not _is_count(position) or not isinstance(function, dict | None):
            raise UnusableAnswer("malformed", f"a streamed call is {_show(piece)}")
        call = calls.setdefault(position, {"type": "function", "function": {"name": None, "arguments": ""}})["function"]
        for key in ("name", "arguments"):
            if isinstance(part := (function or {}).get(key), str):
                call[key] = (call[key] or "") + part


def read_models(body: Any) -> list[dict[str, Any]]:
    """Return the models of a server's list, each with a text as ``id``; none if the list has another form."""
    rows = body.get("data") if isinstance(body, dict) else None
    rows = rows if isinstance(rows, list) else []
    return [row | {"id": str(row["id"])} for row in rows if isinstance(row, dict) and "id" in row]


def read_token_ids(body: Any) -> list[int]:
    """Return the token ids of vLLM's ``/tokenize``.

    Raises:
        UnusableAnswer: There are none.
    """
    ids = body.get("tokens") if isinstance(body, dict) else None
    if not isinstance(ids, list) or not all(map(_is_count, ids)):
        raise UnusableAnswer("malformed", f"no token ids in {_show(body)}")
    return ids


def read_text(body: Any) -> str:
    """Return the text of vLLM's ``/detokenize``.

    Raises:
        UnusableAnswer: There is none.
    """
    text = body.get("prompt") if isinstance(body, dict) else None
    if not isinstance(text, str):
        raise UnusableAnswer("malformed", f"no text in {_show(body)}")
    return text


def read_prompt_logprobs(body: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token id of a prompt, in nats; 0 for the first, which has none.

    Args:
        body: vLLM's answer to a completion's request with ``prompt_logprobs``.
        ids: Token ids that were sent.

    Raises:
        UnusableAnswer: They are missing, impossible, or belong to other tokens.
    """
    listed = _read_choice(body).get("prompt_logprobs")
    if not isinstance(listed, list) or len(listed) != len(ids):
        raise UnusableAnswer("malformed", f"no prompt_logprobs of {len(ids):,} token ids")
    logprobs = [0.0]
    for token, entry in zip(ids[1:], listed[1:], strict=True):
        found = entry.get(str(token)) if isinstance(entry, dict) else None
        logprobs.append(_check_logprob(found.get("logprob") if isinstance(found, dict) else None))
    return logprobs


def read_top_logprobs(
    body: Any, ids: Sequence[int], positions: Sequence[int], top_k: int, vocab_size: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the most likely tokens at positions of a prompt, best first, and their log-probabilities in nats.

    Args:
        body: vLLM's answer to a completion's request with ``prompt_logprobs``.
        ids: Token ids that were sent.
        positions: Positions of ids whose distribution, given the ids before, is read; all after the first id.
        top_k: Number of tokens of each position.
        vocab_size: Number of token ids.

    Raises:
        UnusableAnswer: Log-probabilities are missing, impossible, or fewer than ``top_k``, or belong to other tokens.
    """
    listed = _read_choice(body).get("prompt_logprobs")
    if not isinstance(listed, list) or len(listed) != len(ids):
        raise UnusableAnswer("malformed", f"no prompt_logprobs of {len(ids):,} token ids")
    all_ids: list[list[int]] = []
    all_logprobs: list[list[float]] = []
    for position in positions:
        entry = listed[position]
        if not isinstance(entry, dict) or str(ids[position]) not in entry:
            raise UnusableAnswer("malformed", f"no log-probability of token {ids[position]} at position {position:,}")
        found: dict[int, float] = {}
        for key, value in entry.items():
            token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
            if not 0 <= token < vocab_size:
                raise UnusableAnswer(
                    "unknown_token", f"token id {_show(key)} is outside the vocabulary of {vocab_size:,} tokens"
                )
            found[token] = _check_logprob(value.get("logprob") if isinstance(value, dict) else None)
        best = sorted(found, key=lambda token: (-found[token], token))[:top_k]
        if len(best) < top_k:
            raise UnusableAnswer("too_few", f"{len(best):,} log-probabilities of a position; {top_k:,} were requested")
        logprobs = [found[token] for token in best]
        if (mass := math.fsum(map(math.exp, logprobs))) > 1 + _ROUNDING:
            raise UnusableAnswer("no_distribution", f"probabilities of a position sum to {mass:g}; expected at most 1")
        all_ids.append(best)
        all_logprobs.append(logprobs)
    return all_ids, all_logprobs


def time_events(events: Iterator[Any], start: float) -> Timing:
    """Return the timing of a streamed chat completion that was requested at ``start``.

    Raises:
        UnusableAnswer: The stream broke off, was aborted or reports an error, or has events of another form.
    """
    first_s, num_events, num_reported, is_complete = None, 0, None, False
    for event in events:
        if not isinstance(event, dict):
            is_complete |= event is None
            continue
        choice = _read_event(event)
        # Not every server ends with [DONE].
        is_complete |= choice.get("finish_reason") is not None
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(delta.get(key) for key in _GENERATED):
            first_s = first_s or time.perf_counter() - start
            num_events += 1
        if isinstance(usage := event.get("usage"), dict):
            num_reported = usage.get("completion_tokens")
    if not is_complete:
        raise UnusableAnswer("unfinished", "the stream ended before its [DONE]")
    total_s = time.perf_counter() - start
    return Timing(first_s or total_s, total_s, num_reported if _is_count(num_reported) else num_events)


_GENERATED = ("content", "tool_calls", "reasoning", "reasoning_content")


def _read_choice(body: Any) -> dict[str, Any]:
    """Return the first choice of a body or event; raises if there is none, or its answer was aborted."""
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UnusableAnswer("malformed", f"no choices in {_show(body)}")
    # Other values than OpenAI's are accepted, as some servers send their own for an answer that is complete.
    if (reason := choices[0].get("finish_reason")) in ("abort", "error"):
        raise UnusableAnswer("unfinished", f"finish_reason {reason}: the server gave the answer up")
    return choices[0]


def _read_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return the choice in an event of a stream; empty if it has none, as the event of the usage.

    A server that fails in a stream has already sent its status: it reports the error in an event, then ``[DONE]``.
    """
    if error := event.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise UnusableAnswer(
            "unfinished", f"the server sent an error: {message if isinstance(message, str) else _show(error)}"
        )
    return _read_choice(event) if event.get("choices") else {}


def _check_tokens(prompt: Any, ids: Any, logprobs: Any, limits: TokenLimits) -> AnswerTokens:
    """Return tokens that training can rely on; everything else raises."""
    if not isinstance(ids, list) or not isinstance(prompt, Sequence) or not isinstance(logprobs, list):
        raise UnusableAnswer(
            "malformed", "no token ids or no log-probabilities, which vLLM from 0.10.2 on sends on request"
        )
    if limits.max_new_tokens is not None and len(ids) > limits.max_new_tokens:
        raise UnusableAnswer("too_long", f"{len(ids):,} token ids; the limit is {limits.max_new_tokens:,}")
    if len(ids) != len(logprobs):
        raise UnusableAnswer("malformed", f"{len(ids):,} token ids with {len(logprobs):,} log-probabilities")
    for token in (*prompt, *ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise UnusableAnswer("malformed", f"a token id is {_show(token)}; expected an integer")
        if token < 0 or token >= (limits.vocab_size or math.inf):
            size = "" if limits.vocab_size is None else f" of {limits.vocab_size:,} tokens"
            raise UnusableAnswer("unknown_token", f"token id {_show(token)} is outside the vocabulary{size}")
    return AnswerTokens(tuple(prompt), tuple(ids), tuple(map(_check_logprob, logprobs)))


def _check_logprob(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnusableAnswer("malformed", f"a log-probability is {_show(value)}; expected a number")
    if not _MINUS_INFINITY < value < math.inf:  # NaN compares False
        raise UnusableAnswer("nonfinite_logprob", f"a log-probability is {_show(value)}, which is not finite")
    if value > _ROUNDING:
        raise UnusableAnswer("positive_logprob", f"a log-probability is {_show(value)}; expected 0 or less")
    return min(float(value), 0.0)


def _read_reasoning(
    message: Mapping[str, Any], content: str, calls: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]
) -> Reasoning | None:
    """Return the reasoning that a server sent apart from the content, or left in it if it has no reasoning parser."""
    texts = [message.get(key) for key in ("reasoning", "reasoning_content")]
    text = next((text for text in texts if isinstance(text, str) and text.strip()), None)
    if text is None:
        return find_reasoning(content)
    # Without anything after it, the reasoning was cut off or never closed.
    is_closed = bool(content.strip() or calls)
    details = usage.get("completion_tokens_details")
    num_tokens = details.get("reasoning_tokens") if isinstance(details, dict) else None
    # vLLM counts 0 if the prompt opened the reasoning.
    return Reasoning(text.strip(), is_closed, num_tokens=num_tokens if _is_count(num_tokens) and num_tokens else None)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _show(value: Any) -> str:
    """Return a short form of any JSON value, however large or deep."""
    return reprlib.repr(value)[:120]
