"""The engine protocol: what every way of getting answers from a model offers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fctune.data.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said to one prompt.

    ``text`` is without the end-of-turn token; ``is_cut`` where the limit of tokens ended it. ``tool_calls`` is what a
    server read out of the model's text itself, as it sent them, or None where the text is all there is. ``error`` says
    why there is no answer; text and calls are empty then. ``seconds`` is how long it took, where it was asked alone.
    """

    index: int
    text: str = ""
    is_cut: bool = False
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    error: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: the likeliest at temperature 0, else drawn by ``seed``.

    In this process a prompt's draws depend on the seed and the prompt alone, not on what else is in its batch, so a run
    that was cut and resumed draws the same. A server is given the seed and does with it what it does.
    """

    temperature: float = 0.0
    seed: int = 0


class Engine(Protocol):
    """Something that answers conversations."""

    def answer(self, prompts: Sequence[Conversation], max_new_tokens: int) -> Iterator[Answer]:
        """An answer to each prompt, in any order, as they are ready; one that cannot be had is an ``error``."""

    def describe(self) -> dict[str, Any]:
        """What makes its answers those of this model: the same again only for the same model."""
