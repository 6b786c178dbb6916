"""The interface of engines, which generate a model's answers to conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fctune.calls.reasoning.base import Reasoning
from fctune.data.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer to one prompt.

    Attributes:
        index: Position of the prompt among those of the request.
        text: The answer without its end-of-turn token; in process with its reasoning, as generated.
        is_cut: The answer was ended by the limit of tokens.
        tool_calls: Calls that a server parsed from the model's text, as it sent them; None if there is only text.
        error: Why there is no answer; text and calls are empty then.
        reasoning: The reasoning in the text, or sent apart from it by a server; None if there is none.
        seconds: Duration of the request; None for answers that were generated in a batch.
    """

    index: int
    text: str = ""
    is_cut: bool = False
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    error: str | None = None
    seconds: float | None = None
    reasoning: Reasoning | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of tokens: greedy at temperature 0, else sampled with ``seed``.

    In this process, a prompt's samples depend on the seed and the prompt alone and not on the rest of its batch, so a
    resumed evaluation samples the same. A server receives the seed and may or may not respect it.
    """

    temperature: float = 0.0
    seed: int = 0


class Engine(Protocol):
    """Generates a model's answers to conversations, in any order."""

    def answer(self, prompts: Sequence[Conversation], max_new_tokens: int) -> Iterator[Answer]:
        """Yield one answer per prompt in the order of completion; a failed one has its ``error`` set."""

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model and its settings; equal only if answers are comparable."""
