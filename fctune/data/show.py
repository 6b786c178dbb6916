"""A dataset row as a conversation, or as the model sees it: the rendered text with its supervised tokens marked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.conversation import Conversation
from fctune.data.sources import Defect, has_reasoning_rows, read_source
from fctune.data.sources.columns import Columns
from fctune.data.supervision import SupervisionConfig

_OPEN, _CLOSE = "⟦", "⟧"


def show_row(
    path: str,
    row: int,
    model_dir: str,
    row_format: str = "auto",
    supervision: SupervisionConfig | None = None,
    template_args: dict[str, Any] | None = None,
    chat_template: ChosenTemplate | None = None,
    has_colour: bool = True,
    columns: Columns | None = None,
) -> Iterator[Text]:
    """Yield the row's source and token counts, then its text with supervised tokens in green or in brackets.

    Args:
        path: Source of rows.
        row: Number of the row, from 1.
        model_dir: Directory with the tokenizer and chat template.
        row_format: Format of the rows, or auto.
        supervision: Selects the supervised tokens.
        template_args: Switches of the chat template.
        chat_template: Template in place of the model's own, if any.
        has_colour: The output shows colours; without, brackets surround each run of supervised tokens.
        columns: The format's name for each column of another name, or ``ignore``.

    Raises:
        DataError: The row does not exist, has a defect, or is rejected by the template.
    """
    conversation = _read_row(path, row, row_format, columns)
    template = ChatTemplate(model_dir, supervision, template_args, chat_template)
    template.resolve_thinking(lambda: has_reasoning_rows([(path, row_format)], columns=columns))
    yield from _render(conversation, template, has_colour)


def show_conversation(path: str, row: int, row_format: str = "auto", columns: Columns | None = None) -> Iterator[Text]:
    """Yield the row's source, its tools and its messages; arguments as for ``show_row``."""
    conversation = _read_row(path, row, row_format, columns)
    yield Text(conversation.source, style="bold")
    if conversation.tools:
        yield Text(f"tools: {', '.join(tool.name for tool in conversation.tools)}")
    for message in conversation.messages:
        text = Text(style="bold")
        if message.reasoning:
            text.append("reasoning:").append(f" {message.reasoning}\n", style="not bold italic dim")
        text.append(f"{message.role}:")
        if message.content:
            text.append(f" {message.content}", style="not bold")
        for call in message.calls:
            text.append(f"\n  {call.name} {json.dumps(call.arguments, ensure_ascii=False)}", style="not bold green")
        yield text


def _read_row(path: str, row: int, row_format: str, columns: Columns | None) -> Conversation:
    if row < 1:
        raise DataError(f"--row {row}: rows are numbered from 1.")
    item = next(itertools.islice(read_source(path, row_format, row, columns), row - 1, row), None)
    if item is None:
        raise DataError(f"{path}: fewer than {format_count(row, 'row')}. Pass a smaller --row.")
    if isinstance(item, Defect):
        raise DataError(str(item))
    return item


def _render(conversation: Conversation, template: ChatTemplate, has_colour: bool) -> Iterator[Text]:
    try:
        samples = template.encode(conversation)
    except DataError as error:
        raise DataError(f"{conversation.source}: {error}") from None
    for number, sample in enumerate(samples, 1):
        num_tokens, num_supervised = len(sample.tokens), sample.num_supervised
        counts = f"{format_count(num_tokens, 'token')}, {num_supervised:,} of them supervised"
        counts += f" ({num_supervised / num_tokens:.0%})"
        counts += "" if has_colour else f", between {_OPEN} and {_CLOSE}"
        of = f"sample {number} of {len(samples)}, " if len(samples) > 1 else ""
        yield Text(f"{conversation.source}: {of}{counts}", style="bold")
        text = Text()
        for is_supervised, run in itertools.groupby(
            zip(sample.tokens, sample.weights, strict=True), key=lambda pair: pair[1] > 0
        ):
            words = template.decode([token for token, _ in run])
            if is_supervised and not has_colour:
                words = f"{_OPEN}{words}{_CLOSE}"
            text.append(words, style="green" if is_supervised else "")
        yield text
