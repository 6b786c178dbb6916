"""Reasoning in chat templates: the name under which one reads it, the switches it takes, and how rows fit both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from fctune.base.errors import ConfigError, DataError
from fctune.config.parsing import suggest
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.tracing import IN_CONTENT, TracedTemplate

ReasoningMode = Literal["keep", "keep_printed", "in_content", "drop"]
ThinkingMode = Literal["auto", "rows", "config"]

# Names of an assistant message's reasoning in public templates, the most common first.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

# Names of the variable that switches thinking on and off in public templates.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ReasoningSupport:
    """A chat template's use of reasoning and its switches.

    Args:
        key: Name under which it reads a message's reasoning: a key of the message, ``content`` or ``last_content`` for
            a ``<think>`` block before the content, or None if it prints none.
        switch: Variable that turns thinking on (True) and off (False), or None.
        variables: Names of the variables that it reads, apart from messages, tools and special tokens.
    """

    key: str | None
    switch: str | None
    variables: tuple[str, ...]

    def fit(self, conversation: Conversation, reasoning: ReasoningMode, thinking: ThinkingMode) -> Conversation:
        """Return the conversation with the reasoning and the switches that it is rendered with.

        Args:
            conversation: A row.
            reasoning: Use of its reasoning, ``data.reasoning``.
            thinking: Source of its switches, ``data.thinking``; auto sets the thinking switch of every row.

        Raises:
            DataError: The template prints no reasoning, or does not read a switch that the row sets.
        """
        has_reasoning = any(message.reasoning for message in conversation.messages)
        if has_reasoning and (reasoning == "drop" or (reasoning == "keep_printed" and self.key is None)):
            conversation = drop_reasoning(conversation)
            has_reasoning = False
        if has_reasoning and self.key is None:
            index = next(i for i, message in enumerate(conversation.messages) if message.reasoning)
            raise DataError(
                f"messages[{index}] has reasoning, which the chat template does not read; set "
                "data.reasoning=drop to train without it, data.reasoning=in_content to write it before the content as "
                "<think>...</think>, or use a template that prints reasoning"
            )
        if thinking == "config":
            return replace(conversation, template_args={}) if conversation.template_args else conversation
        for name in conversation.template_args:
            if name not in self.variables:
                raise DataError(
                    f"sets {name}, {self._describe_unread(name)}; remove it from the row, or set data.thinking=config "
                    "to ignore the rows' own switches"
                )
        if thinking == "auto" and self.switch is not None and self.switch not in conversation.template_args:
            template_args = {**conversation.template_args, self.switch: has_reasoning}
            conversation = replace(conversation, template_args=template_args)
        return conversation

    def check_args(self, template_args: dict[str, Any]) -> None:
        """Check that the template reads each switch.

        Raises:
            ConfigError: It does not; suggests the nearest of those that it reads.
        """
        for name in template_args:
            if name not in self.variables:
                raise ConfigError(f"template_args sets {name}, {self._describe_unread(name)}.")

    def _describe_unread(self, name: str) -> str:
        known = ", ".join(self.variables) or "none"
        hint = suggest(name, self.variables)
        return f"a switch that the chat template does not read{hint} (it reads: {known})"


def drop_reasoning(conversation: Conversation) -> Conversation:
    """Return the conversation without reasoning."""
    messages = tuple(replace(message, reasoning=None) for message in conversation.messages)
    return replace(conversation, messages=messages)


def find_reasoning_support(template: TracedTemplate) -> ReasoningSupport:
    """Find out what a template does with reasoning, from its source and by rendering probes."""
    switch = next((n for n in _THINKING_SWITCHES if n in template.facts.variables and _is_switch(template, n)), None)
    named = [key for key in REASONING_KEYS if key in template.source]
    if any("think>" in text for text in template.facts.literals):
        named.append(IN_CONTENT)
    key = next((key for key in named if _prints_reasoning(template, key, switch)), None)
    return ReasoningSupport(key, switch, tuple(sorted(template.facts.variables)))


def _is_switch(template: TracedTemplate, name: str) -> bool:
    """Return True if a boolean variable changes the prompt of a question, or an answer to it with reasoning."""
    for probe in (Conversation(_ANSWER.messages[:1]), _ANSWER):
        texts = set()
        for value in (True, False):
            try:
                is_prompt = len(probe.messages) == 1
                texts.add(template.render(probe, add_generation_prompt=is_prompt, **{name: value})[0])
            except DataError:
                texts.add("")
        if len(texts) > 1:
            return True
    return False


def _prints_reasoning(template: TracedTemplate, key: str, switch: str | None) -> bool:
    """Return True if the template prints the reasoning of an answer or of a call that is passed as ``key``."""
    before, template.reasoning_key = template.reasoning_key, key
    try:
        for probe in (_ANSWER, _CALL):
            try:
                text = template.render(probe, **({switch: True} if switch else {}))[0]
            except DataError:
                continue
            if _WORD in text:
                return True
        return False
    finally:
        template.reasoning_key = before


_WORD = "fctprobereasoning"
_QUESTION = Message("user", "Find it in Oslo.")
_TOOL = Tool({"name": "find_probe", "description": "Find it.", "parameters": {"type": "object", "properties": {}}})
_ANSWER = Conversation((_QUESTION, Message("assistant", "It is there.", reasoning=_WORD)))
_CALL = Conversation(
    (_QUESTION, Message("assistant", None, (Call("find_probe", {}, id="call00001"),), reasoning=_WORD)), (_TOOL,)
)
