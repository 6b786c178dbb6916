"""Lengths of the conversations to train on, and the length of a training row that is chosen by them.

The lengths are those of the samples that training reads, so all rows are encoded once to measure them. The result is
kept next to the prepared sets, by the same fingerprint of what they depend on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fctune.base.errors import ConfigError, DataError
from fctune.config.cache import prepared_root
from fctune.config.intervals import choose_noun, format_count, format_share
from fctune.config.schema import RunConfig
from fctune.config.sections.data import DataConfig
from fctune.data.chosen_template import read_chosen_template
from fctune.data.chunk_encoder import Counts, EncodedChunk
from fctune.data.conversation_encoder import Encoded
from fctune.data.data_size import find_set
from fctune.data.encoding import encode_sources
from fctune.data.fingerprint import FileDigests, fingerprint_inputs
from fctune.data.loader import ROW_MULTIPLE
from fctune.data.long_conversations import measure
from fctune.data.prepared_set import explain_no_rows, write_once

MIN_SEQ_LEN = 1024  # shorter rows save next to no memory
# Share of the conversations that a row holds, unless it must hold all. A few very long ones would take the memory, and
# the steps, of all others.
HELD_SHARE = 0.999

_UNLIMITED = 2**31 - 1  # tokens of a row while lengths are measured
_FILE = "meta.json"


@dataclass(slots=True)
class RowLengths:
    """Number of conversations, and of their supervised tokens, by the tokens that a row needs to hold them.

    A conversation of several samples needs those of the longest one, a preference pair those of both answers.
    """

    counts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, tokens: int, supervised: int) -> None:
        """Count a conversation of so many supervised tokens under the tokens that it needs."""
        number, total = self.counts.get(tokens, (0, 0))
        self.counts[tokens] = number + 1, total + supervised

    def add_samples(self, samples: Sequence[Encoded]) -> None:
        """Add a conversation with the samples that it is encoded to."""
        self.add(measure(samples), sum(sample.num_supervised for sample in samples))

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return max(self.counts)

    def find_holding(self, share: float) -> int:
        """Return the fewest tokens that hold a share of the conversations."""
        lengths = sorted(self.counts)
        held = np.cumsum([self.counts[length][0] for length in lengths])
        return lengths[int(np.searchsorted(held, share * held[-1] - 1e-9))]

    def describe_longer(self, tokens: int) -> str:
        """Return how many conversations are longer than a row of so many tokens, and their supervised tokens."""
        num_all, supervised = map(sum, zip(*self.counts.values(), strict=True))
        num_longer = sum(number for length, (number, _) in self.counts.items() if length > tokens)
        lost = sum(total for length, (_, total) in self.counts.items() if length > tokens)
        are, share = choose_noun(num_longer, "is", "are"), format_share(lost / max(1, supervised))
        of_all = f"{num_longer:,} of {format_count(num_all, 'conversation')} {are} longer"
        return f"{of_all}, with {share} of the supervised tokens"


def choose_seq_len(
    lengths: RowLengths,
    max_tokens: int,
    overlong: str | None = None,
    find_obstacle: Callable[[int], str | None] = lambda tokens: None,
) -> tuple[int, str]:
    """Return the length of a training row in tokens, with the reason.

    It is the smallest power of two, from 1,024, that holds the longest conversation; unless ``overlong`` is fail or
    None, all but 0.1 % of them. It is lower where the model has fewer positions, or something stands in the way; and if
    ``overlong`` is drop, no longer than what is not dropped needs.

    Args:
        lengths: Lengths of the conversations.
        max_tokens: Positions of the model.
        overlong: ``data.overlong``; None: it is decided after the length.
        find_obstacle: Returns why rows of so many tokens cannot be trained on; None if they can.

    Raises:
        ConfigError: No length can be trained on, or a conversation is longer than all of them and ``overlong`` is fail.
    """
    limit = find_longest_row(max_tokens)
    wanted = lengths.longest if overlong in (None, "fail") else lengths.find_holding(HELD_SHARE)
    choices = [min(MIN_SEQ_LEN, limit)]
    while choices[-1] < min(wanted, limit):
        choices.append(min(2 * choices[-1], limit))
    why = f"the model reads {max_tokens:,} tokens" if wanted > limit else f"holds {HELD_SHARE:.1%} of the rows"
    for tokens in reversed(choices):
        if (obstacle := find_obstacle(tokens)) is None:
            break
        why = obstacle
    else:
        raise ConfigError(
            f"data.seq_len=auto: no length can be trained on: {why}. `fctune plan` with data.seq_len={choices[0]} says "
            "what helps."
        )
    if lengths.longest <= tokens:
        return tokens, f"holds the longest row, {format_count(lengths.longest, 'token')}"
    held = max((length for length in lengths.counts if length <= tokens), default=tokens)
    shortest = next(choice for choice in choices if choice >= held)
    if overlong == "drop" and shortest < tokens:
        tokens, why = shortest, f"{why}, and more than {shortest:,} would hold no other row"
    reason = f"{why}; the longest row has {lengths.longest:,}, and {lengths.describe_longer(tokens)}"
    if overlong == "fail":
        raise ConfigError(
            f"data.seq_len=auto: rows of at most {tokens:,} tokens can be trained on: {reason}. Let data.overlong "
            "divide or leave out longer ones (split_turns, cut, drop), or train on more or larger devices, or a model "
            "with more positions."
        )
    return tokens, reason


def find_longest_row(max_tokens: int) -> int:
    """Return the most tokens of a row that a model with so many positions can be trained on."""
    return max_tokens // ROW_MULTIPLE * ROW_MULTIPLE or max_tokens


def measure_lengths(config: RunConfig, model_dir: Path, on_progress: Callable[[Counts], None]) -> RowLengths:
    """Return the lengths of a run's conversations, which are measured unless they are known.

    Args:
        config: Config of the run.
        model_dir: Directory of its base.
        on_progress: Called with the counts of the rows read so far.

    Raises:
        DataError: Rows are invalid, or none is left; see ``encode_sources``.
    """
    data, root = _without_limit(config.data), prepared_root(config)
    chosen, switches = read_chosen_template(config.model), config.model.template_args
    digests = FileDigests(root / "file_digests.json")
    name, inputs = fingerprint_inputs(data, model_dir, digests, switches, chosen)

    def write(folder: Path) -> None:
        lengths, counts = RowLengths(), Counts()
        for part in encode_sources(data, model_dir, counts, template_args=switches, chat_template=chosen):
            _add(lengths, part, data.pairs)
            on_progress(counts)
        if not lengths.counts:
            raise DataError(explain_no_rows(counts, data))
        (folder / _FILE).write_text(json.dumps({"inputs": inputs, "lengths": lengths.counts}) + "\n", encoding="utf-8")

    write_once(root / name, data, write)
    digests.save()
    return _read(root / name)


def find_lengths(config: RunConfig, model_dir: Path | None) -> RowLengths | None:
    """Return the lengths of a config's conversations if they are known; without the model's tokenizer, by settings."""
    found = find_set(replace(config, data=_without_limit(config.data)), model_dir)
    return None if found is None else _read(found[0])


def _without_limit(config: DataConfig) -> DataConfig:
    """Return a config whose rows hold everything; lengths depend on none of the replaced keys."""
    return replace(config, seq_len=_UNLIMITED, overlong="fail", packed=True)


def _add(lengths: RowLengths, part: EncodedChunk, is_paired: bool) -> None:
    ends = np.cumsum(part.samples)
    starts = ends - part.samples
    if not len(starts):
        return
    tokens = (np.add if is_paired else np.maximum).reduceat(part.lengths, starts)
    before = np.concatenate([[0], np.cumsum(part.weights > 0)])
    sample_ends = np.concatenate([[0], np.cumsum(part.lengths)])
    supervised = before[sample_ends[ends]] - before[sample_ends[starts]]
    for pair in zip(tokens.tolist(), supervised.tolist(), strict=True):
        lengths.add(*pair)


def _read(folder: Path) -> RowLengths:
    try:
        counts = json.loads((folder / _FILE).read_text(encoding="utf-8"))["lengths"]
        return RowLengths({int(tokens): (int(number), int(total)) for tokens, (number, total) in counts.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder}: damaged ({error}). Delete the directory; it will be written again.") from None
