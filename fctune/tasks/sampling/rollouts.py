"""Rollouts: the answers of a policy, token by token, with their rewards.

A ``RolloutEngine`` continues token ids, a ``TaskSet`` requests answers and rewards them, and training learns from the
resulting ``Rollout``. Tokens are never decoded and re-encoded on the way: the sampled tokens are trained.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer to a task, from the prompt to the end of its last turn.

    Attributes:
        case_id: Id of the task.
        sample: Number of the answer among those to the same task in a step.
        category: Category of the task.
        version: Oldest version of the policy that wrote a turn.
        prompt_ids: Token ids of the prompt.
        ids: Token ids after the prompt: the generated ones, including the stop token of each turn, and between turns
            those that the chat template adds, such as a tool's result.
        is_generated: True for each id that the policy generated; only these are trained.
        logprobs: Log-probability of each id under the policy that generated it, before the temperature is applied; 0
            for ids that were not generated.
        is_cut: True if the token limit ended the answer.
        reward: Weighted sum of the parts.
        parts: Parts of the reward, each from 0 to 1.
        text: The generated text, for display.
        error: Why there is no answer; ids are empty then.
        judging_s: Seconds that judging took; not compared.
        rejected: Kinds of unusable answers that a server sent to its requests (``server_answers``). After each the
            request was sent again, a bounded number of times; after the last, ``error`` is set.
    """

    case_id: str
    sample: int
    category: str
    version: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    is_generated: tuple[bool, ...]
    logprobs: tuple[float, ...]
    is_cut: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    error: str | None = None
    judging_s: float = field(default=0.0, compare=False)
    rejected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.is_generated) == len(self.logprobs), "one flag and one logprob for each id"

    @property
    def num_generated(self) -> int:
        """Number of generated ids, which are trained."""
        return sum(self.is_generated)

    def to_json(self) -> dict[str, Any]:
        """Return the rollout as plain values, which ``from_json`` reads back."""
        row = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        for name in ("prompt_ids", "ids", "logprobs", "rejected"):
            row[name] = list(row[name])
        return row | {"is_generated": [int(one) for one in self.is_generated], "parts": dict(self.parts)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Rollout:
        """Return the rollout from the plain values of ``to_json``; other keys are ignored."""
        values = {one.name: row[one.name] for one in dataclasses.fields(cls) if one.name != "rejected"}
        values["rejected"] = row.get("rejected", ())  # which earlier checkpoints lack
        for name in ("prompt_ids", "ids", "logprobs", "rejected"):
            values[name] = tuple(values[name])
        return cls(**values | {"is_generated": tuple(map(bool, values["is_generated"]))})


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one answer to a task: ``sample`` numbers the task's answers, ``seed`` determines its tokens."""

    case_id: str
    sample: int
    seed: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
        index: Position of the prompt among those of the request.
        ids: Generated token ids, with the stop token unless cut.
        logprobs: Log-probability of each id, before the temperature is applied.
        is_cut: True if the token limit ended it.
        version: Version of the policy that generated it.
        error: Why there is none; ids are empty then.
        rejected: Kinds of the unusable answers that came before it, or instead of it.
    """

    index: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    is_cut: bool = False
    version: int = 0
    error: str | None = None
    rejected: tuple[str, ...] = ()


class RolloutEngine(Protocol):
    """Continues token ids with the most recently published policy."""

    @property
    def version(self) -> int:
        """Version of the policy that generates now; 0 before anything was published."""

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_new_tokens: Sequence[int]
    ) -> Iterator[Generation]:
        """Yield the continuation of each prompt in the order of completion; a failed one has its ``error`` set.

        Args:
            prompts: Token ids of each prompt.
            seeds: Seed of each continuation; equal prompts with different seeds are continued differently.
            max_new_tokens: Limit of each continuation.
        """

    def publish(self, policy: Any, version: int) -> None:
        """Generate with this policy from now on.

        Args:
            policy: For a server the directory of a PEFT adapter, in process a transformers model.
            version: Number of updates that the policy has seen.
        """

    def describe(self) -> dict[str, Any]:
        """Return the values that identify the base model and its settings, without the policy."""

    def close(self) -> None:
        """Release connections and memory."""


class TaskSet(Protocol):
    """Tasks for a policy and the rewards of its answers: cases with one answer, or environments with several turns."""

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the tasks, in an order that does not change."""

    def digest(self) -> str:
        """Return a hex digest of everything that prompts and rewards depend on."""

    def play(self, engine: RolloutEngine, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Yield the rewarded rollout of each request, in the order of completion."""


def make_seed(*parts: Any) -> int:
    """Return a 48-bit seed derived from any values, such as the run's seed, a task, a sample and a step."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")
