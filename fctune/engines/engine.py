"""The interface of engines, which generate a model's answers to conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fctune.calls.reasoning.base import Reasoning
from fctune.data.conversation import Conversation


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The token ids of a prompt and of its answer, as the engine had them; nothing needs to encode the text again.

    Attributes:
        prompt_ids: Token ids of the prompt.
        ids: Token ids of the answer, with its stop token unless it was cut off.
        logprobs: Log-probability of each id of the answer, before the temperature is applied.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


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
        num_tokens: Number of generated tokens, the stop token included; None if a server does not report it.
        tokens: The token ids and their log-probabilities, if the engine keeps them.
    """

    index: int
    text: str = ""
    is_cut: bool = False
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    error: str | None = None
    seconds: float | None = None
    reasoning: Reasoning | None = None
    num_tokens: int | None = None
    tokens: AnswerTokens | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of tokens: greedy at temperature 0, else sampled with ``seed``.

    In this process, an answer depends on the seed, the prompt and the number of the sample alone and not on the rest of
    its batch, so a resumed evaluation samples the same. A server receives a seed and may or may not respect it.
    """

    temperature: float = 0.0
    seed: int = 0


class Engine(Protocol):
    """Generates a model's answers to conversations, in any order."""

    def answer(
        self, prompts: Sequence[Conversation], max_new_tokens: int, samples: Sequence[int] = ()
    ) -> Iterator[Answer]:
        """Yield one answer per prompt in the order of completion; a failed one has its ``error`` set.

        ``samples`` has the number of each prompt's sample, so that answers to equal prompts differ; empty: all 0.
        """

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model and its settings; equal only if answers are comparable."""
