"""Shares of a dataset's rows and turns that have reasoning, and what training on them would teach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fctune.config.intervals import format_count
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation


@dataclass(slots=True)
class ReasoningUse:
    """The reasoning in the conversations, and the switches that rows set."""

    rows: int  # conversations with reasoning
    rows_share: float  # rows / conversations
    turns: int  # assistant turns with reasoning
    turns_share: float  # turns / assistant turns
    characters: int
    tokens: int | None  # tokens of reasoning; null without a tokenizer
    rows_switched: int  # conversations that set a switch of the chat template
    warning: str | None  # what training on these rows would teach that the model's template does not expect

    def describe(self) -> str:
        """Return the shares as a phrase that follows the number of rows with reasoning."""
        tokens = "" if self.tokens is None else f", {format_count(self.tokens, 'token')}"
        turns = format_count(self.turns, "turn")
        return f"with reasoning ({self.rows_share:.0%}), in {turns} ({self.turns_share:.0%}){tokens}"


class ReasoningCount:
    """Counts the reasoning of conversations.

    Args:
        template: Template that they are rendered with, which already knows whether rows have reasoning; None: unknown.
    """

    def __init__(self, template: ChatTemplate | None):
        self._template = template
        self._count_tokens: Callable[[str], int] | None = None
        if template is not None:
            tokenizer = template.encoder.tokenizer
            self._count_tokens = lambda text: len(tokenizer.ids(text))
        self._num_rows = self._num_turns = self._num_assistant_turns = 0
        self._num_conversations = self._num_characters = self._num_tokens = self._num_switched = 0

    def add(self, conversation: Conversation) -> None:
        """Add the reasoning of a conversation, and the switches that it sets, to the counts."""
        turns = [message for message in conversation.messages if message.role == "assistant"]
        texts = [message.reasoning for message in turns if message.reasoning is not None]
        self._num_conversations += 1
        self._num_switched += bool(conversation.template_args)
        self._num_assistant_turns += len(turns)
        self._num_turns += len(texts)
        self._num_rows += bool(texts)
        self._num_characters += sum(map(len, texts))
        if self._count_tokens is not None:
            self._num_tokens += sum(map(self._count_tokens, texts))

    def report(self) -> ReasoningUse:
        """Return the counts and the warning."""
        return ReasoningUse(
            rows=self._num_rows,
            rows_share=self._num_rows / max(1, self._num_conversations),
            turns=self._num_turns,
            turns_share=self._num_turns / max(1, self._num_assistant_turns),
            characters=self._num_characters,
            tokens=None if self._count_tokens is None else self._num_tokens,
            rows_switched=self._num_switched,
            warning=self._find_warning(),
        )

    def _find_warning(self) -> str | None:
        """Return what training would teach a model that can think, unless the switches show that it is intended."""
        if self._template is None or self._template.reasoning.key is None or not self._num_conversations:
            return None
        supervision, switch = self._template.encoder.supervision, self._template.reasoning.switch
        num_rows = 0 if supervision.reasoning == "drop" else self._num_rows
        set_to = None if switch is None else self._template.template_args.get(switch)
        if not num_rows and set_to is not False:
            intended = "" if switch is None else f", or, if that is intended, set model.template_args.{switch}=false"
            return (
                "no row is trained with reasoning, and the chat template can print it: training teaches the model "
                f"never to think. Add rows with reasoning{intended}"
            )
        if switch is None or not num_rows or self._num_switched:
            return None
        if num_rows == self._num_conversations and set_to is not True:
            return (
                f"every row has reasoning, and the chat template can switch it off ({switch}): training teaches the "
                "model always to think. Add rows without reasoning, or, if that is intended, set "
                f"model.template_args.{switch}=true"
            )
        if num_rows < self._num_conversations and supervision.thinking != "auto":
            return (
                f"rows with and without reasoning are rendered alike, as data.thinking={supervision.thinking} says: "
                f"the model learns not to heed {switch}. Set data.thinking=auto"
            )
        return None
