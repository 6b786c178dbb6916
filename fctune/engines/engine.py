"""The interface of engines: prompts in, a model's answers out, in this process or through a server.

Everything that lets a model answer goes through ``Engine``: evaluation, sampling, rollouts and chat. A prompt is a
conversation, which the engine renders, or the token ids to continue, which it takes as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fctune.calls.reasoning.base import Reasoning
from fctune.data.conversation import Conversation, Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request for one answer.

    Attributes:
        conversation: What the model answers; its ``source`` names the prompt in errors.
        max_new_tokens: Limit of the answer.
        sample: Number of the answer among those to equal conversations, so that sampled ones differ.
        ids: Token ids to continue without rendering the conversation; None: the chat template renders it.
        seed: Seed of the sampled tokens; None: the engine derives it from its own seed, conversation and sample.
        schema: JSON Schema that a server holds the answer to where it can; others, and engines in process, ignore it.
        choices: Answers to choose from: nothing is generated, and the answer is the most likely of them.
        is_continued: Another prompt may begin with this one and its answer, so an engine may keep what it has read.
    """

    conversation: Conversation
    max_new_tokens: int
    sample: int = 0
    ids: tuple[int, ...] | None = None
    seed: int | None = None
    schema: Mapping[str, Any] | None = None
    choices: tuple[Message, ...] = ()
    is_continued: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """How likely a model is to give one of the answers that it chooses from.

    Attributes:
        logprob: Sum of the log-probabilities of its tokens, in nats.
        num_tokens: Number of its tokens.
        num_characters: Number of characters of its text, as the chat template writes it.
    """

    logprob: float
    num_tokens: int
    num_characters: int

    @property
    def per_character(self) -> float:
        """The log-probability divided by the number of characters."""
        return self.logprob / self.num_characters


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
        version: Version of the policy that generated it; 0 if none was published.
        rejected: Kinds of the unusable answers that a server sent before it, or instead of it (``server_answers``).
        num_prompt_tokens: Number of tokens of the prompt, if a server reports it.
        is_refused: The server says that the model refused, or that a filter kept its answer back.
        choices: The scores of the prompt's choices, in their order; text and calls are then those of the best.
    """

    index: int
    text: str = ""
    is_cut: bool = False
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    error: str | None = None
    reasoning: Reasoning | None = None
    seconds: float | None = None
    num_tokens: int | None = None
    tokens: AnswerTokens | None = None
    version: int = 0
    rejected: tuple[str, ...] = ()
    num_prompt_tokens: int | None = None
    is_refused: bool = False
    choices: tuple[ChoiceScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of tokens: greedy at temperature 0, else sampled with ``seed``.

    In this process, an answer depends on the seed, the prompt and the number of the sample alone and not on the rest of
    its batch, so a resumed evaluation samples the same. A server receives a seed and may or may not respect it.
    """

    temperature: float = 0.0
    seed: int = 0


class Engine(Protocol):
    """Generates a model's answers, in any order."""

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Yield one answer per prompt in the order of completion; a failed one has its ``error`` set."""

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model and its settings; equal only if answers are comparable."""


class PolicyEngine(Engine, Protocol):
    """An engine whose model is replaced while it is trained; its answers have their tokens."""

    @property
    def version(self) -> int:
        """Version of the policy that answers new prompts; 0 before anything was published."""

    def publish(self, policy: Any, version: int) -> None:
        """Answer with this policy from now on.

        Args:
            policy: For a server the directory of a PEFT adapter, in process a transformers model.
            version: Number of updates that the policy has seen.
        """

    def close(self) -> None:
        """Release connections and memory."""


def make_prompts(
    conversations: Sequence[Conversation], max_new_tokens: int, samples: Sequence[int] = ()
) -> list[Prompt]:
    """Return a prompt for each conversation, with the numbers of their samples; without numbers, all are 0."""
    numbers = samples or [0] * len(conversations)
    return [Prompt(one, max_new_tokens, sample) for one, sample in zip(conversations, numbers, strict=True)]
