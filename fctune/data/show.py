"""One row as the model sees it: the rendered text, what is learnt of it in colour."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

from rich.text import Text

from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.data.sources import Defect, read_source
from fctune.data.supervision import Policy, TrainOn
from fctune.errors import DataError


def show_row(
    path: str,
    row: int,
    model_dir: str,
    format: str = "auto",
    train_on: TrainOn = "assistant",
    parallel_calls: Literal["error", "split"] = "error",
) -> Iterator[Text]:
    """The row's place and counts, then its text: learnt tokens in green, context plain.

    Args:
        path: source of rows.
        row: which row, from 1.
        model_dir: directory with the tokenizer and template.
        format: shape of the rows, or auto.
        train_on: which assistant turns are learnt.
        parallel_calls: as in ``data.parallel_calls``.

    Raises:
        DataError: there is no such row, it has a defect, or the template refuses it.
    """
    if row < 1:
        raise DataError(f"--row {row}: rows count from 1.")
    template = ChatTemplate(model_dir, Policy(train_on=train_on, parallel_calls=parallel_calls))
    item = next(itertools.islice(read_source(path, format, row), row - 1, row), None)
    if item is None:
        raise DataError(f"{path}: has fewer than {row:,} rows.")
    if isinstance(item, Defect):
        raise DataError(str(item))
    yield from _render(item, template)


def _render(conversation: Conversation, template: ChatTemplate) -> Iterator[Text]:
    try:
        encoded = template.encode(conversation)
    except DataError as error:
        raise DataError(f"{conversation.source}: {error}") from None
    num_tokens, num_learnt = len(encoded.tokens), encoded.num_supervised
    counts = f"{num_tokens:,} tokens, {num_learnt:,} of them learnt ({num_learnt / num_tokens:.0%})"
    yield Text(f"{conversation.source}: {counts}", style="bold")
    text = Text()
    learnt = [weight > 0 for weight in encoded.weights]
    for is_learnt, run in itertools.groupby(zip(encoded.tokens, learnt, strict=True), key=lambda pair: pair[1]):
        piece = template.tokenizer.decode([token for token, _ in run])
        text.append(piece, style="green" if is_learnt else "")
    yield text
