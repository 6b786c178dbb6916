"""A dataset row as a conversation, or as the model sees it: the rendered text with its supervised tokens marked."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.config.sections.data import AugmentConfig
from fctune.data.augment.augmented_file import open_augmenter
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.conversation import Conversation, Message, Tool
from fctune.data.secrets import SecretScanner, list_counts
from fctune.data.sources import Defect, ParsedRow, has_reasoning_rows, parse_source
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
    augment: AugmentConfig | None = None,
    tools: tuple[Tool, ...] = (),
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
        augment: Show all forms that this augmentation makes of the row; None shows the row.
        tools: Tools of a row that has none.

    Raises:
        DataError: The row does not exist, has a defect, or is rejected by the template.
    """
    parsed = _read_row(path, row, row_format, columns, tools)
    template = ChatTemplate(model_dir, supervision, template_args, chat_template)
    template.resolve_thinking(lambda: has_reasoning_rows([(path, row_format)], columns=columns))
    for conversation, label in _iter_forms(parsed, path, row_format, columns, augment, tools):
        yield from [label] if label is not None else []
        yield from _render(conversation, template, has_colour) if conversation is not None else []


def show_conversation(
    path: str,
    row: int,
    row_format: str = "auto",
    columns: Columns | None = None,
    augment: AugmentConfig | None = None,
    tools: tuple[Tool, ...] = (),
) -> Iterator[Text]:
    """Yield the row's source, its tools and its messages; arguments as for ``show_row``."""
    parsed = _read_row(path, row, row_format, columns, tools)
    for conversation, label in _iter_forms(parsed, path, row_format, columns, augment, tools):
        yield from [label] if label is not None else []
        if conversation is None:
            continue
        yield Text(conversation.source, style="bold")
        if conversation.tools:
            yield Text(f"tools: {', '.join(tool.name for tool in conversation.tools)}")
        yield from map(_show_message, conversation.messages)


def _show_message(message: Message) -> Text:
    text = Text(style="bold")
    if message.reasoning:
        text.append("reasoning:").append(f" {message.reasoning}\n", style="not bold italic dim")
    text.append(f"{message.role}:")
    if message.content:
        text.append(f" {message.content}", style="not bold")
    for call in message.calls:
        text.append(f"\n  {call.name} {json.dumps(call.arguments, ensure_ascii=False)}", style="not bold green")
    return text


def _iter_forms(
    parsed: ParsedRow,
    path: str,
    row_format: str,
    columns: Columns | None,
    augment: AugmentConfig | None,
    tools: tuple[Tool, ...],
) -> Iterator[tuple[Conversation | None, Text | None]]:
    """Yield what secrets the row has; it, or what augmentation makes of it, with how it was made; then why not more."""
    if kinds := Counter(finding.kind for finding in SecretScanner().locate(parsed)):
        yield None, Text(f"secrets in this row: {list_counts(kinds, ())}", style="yellow")
    mark = parsed.mark
    if augment is None:
        made = None if mark is None else f"{', '.join(mark['kinds'])} of {mark.get('from', 'another row')}"
        yield parsed.conversation, None if made is None else Text(f"augmented: {made}", style="yellow")
        return
    augmenter = open_augmenter(path, augment, row_format, columns, tools=tools)
    for form in augmenter.expand(parsed, path):
        how = "added" if form.is_added else "changed"
        yield form.conversation, Text(f"{how}: {', '.join(form.kinds)}" if form.kinds else "as it is", style="yellow")
    for kind, counts in augmenter.take_counts().items():
        for reason in [*counts.unsuitable, *counts.left_out]:
            yield None, Text(f"no {kind}: {reason}", style="yellow")


def _read_row(path: str, row: int, row_format: str, columns: Columns | None, tools: tuple[Tool, ...]) -> ParsedRow:
    if row < 1:
        raise DataError(f"--row {row}: rows are numbered from 1.")
    item = next(itertools.islice(parse_source(path, row_format, columns, tools=tools), row - 1, row), None)
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
