"""Training rows: sources, rendering, supervision and packing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fctune.config.fields import AT_LEAST_1, KEEPS_PREPARED, Null, Range, join_key
from fctune.config.intervals import PERCENTAGE
from fctune.config.parsing import suggest_hub_name

DATA_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".ndjson", ".parquet", ".csv")


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """A source of training rows."""

    path: str
    """JSON, JSONL, JSONL.gz, Parquet or CSV file, a directory of them or from `save_to_disk`,
    `hf:NAME[:CONFIG][:SPLIT][@REVISION]`, or `synthetic:SPLIT:ROWS[:SEED]` (of pairs: `synthetic:pairs:ROWS`)."""
    format: str = "auto"
    """Row format by the name of its reader; `auto` detects it from the rows."""
    weight: Annotated[float, Range(gt=0)] = 1.0
    """How often each row appears per epoch: 2.0 means twice, 0.5 means every second row (chosen by hash)."""
    columns: dict[str, str] = field(default_factory=dict)
    """The format's name for each column of another name, such as `{question: query}`; `ignore` leaves one out. Columns
    with text that nothing reads make a row invalid."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check that a local source exists, and that columns are mapped to distinct names."""
        for own, name in self.columns.items():
            if not isinstance(name, str) or not name:
                key = join_key(where, "columns")
                problems.append(f"{key}.{own}={name}: expected a column of the row format, such as query, or ignore")
        names = [name for name in self.columns.values() if name != "ignore"]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            owns = " and ".join(own for own, name in self.columns.items() if name == repeated)
            problems.append(f"{join_key(where, 'columns')}: {owns} are both mapped to {repeated}; map one of them")
        if not self.path.startswith(("hf:", "synthetic:")) and (problem := _find_path_problem(Path(self.path))):
            problems.append(f"{join_key(where, 'path')}={self.path}: {problem}")


def _find_path_problem(path: Path) -> str:
    """Return what is seen to be wrong with a source's file or directory without reading rows, or ""."""
    if not os.path.exists(path):
        return f"no such file or directory{suggest_hub_name(str(path))} (relative paths start at {Path.cwd()})"
    if path.is_dir() and not any(file.name.endswith(DATA_SUFFIXES) for file in path.iterdir()):
        return f"no data files in this directory; expected {', '.join(DATA_SUFFIXES)}"
    if path.is_file() and path.stat().st_size == 0:
        return "an empty file; expected rows"
    return ""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Training rows: sources, rendering, supervision and packing."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Sources, read in this order. Required, except with a `grpo` section."""
    validation_share: Annotated[float, Range(ge=0, lt=1)] = 0.02
    """Share of conversations held out for validation; chosen by hash, so a conversation keeps its split when rows are
    added. Of 20 or more, at least one is held out; 0: none."""
    max_samples: Annotated[int | None, AT_LEAST_1, Null("all rows")] = None
    """Rows to read from each source."""
    seq_len: Annotated[int, Range(ge=8)] = 4096
    """Length of a training row in tokens; no conversation may be longer (see `overlong`)."""
    pairs: bool = False
    """Rows are preference pairs: a `prompt` with a `chosen` and a `rejected` answer, for runs with a `preference`
    section. The two answers, each after the prompt, share a packed row and must fit in it together."""
    packed: bool = True
    """Pack several complete conversations into each row; attention never crosses them. Off: one conversation per
    row."""
    pad_to: Annotated[Literal["longest", "seq_len"], KEEPS_PREPARED] = "longest"
    """Length to pad unpacked rows to: the longest of the micro-batch, or `seq_len`."""
    train_on: Literal["assistant", "last_assistant", "calls"] = "assistant"
    """Supervised turns: all of the assistant's, its last one, or those that call a function."""
    train_reasoning: Literal["all", "last", "none"] = "all"
    """Supervised reasoning: that of every supervised turn, only that of turns after the last user message, or none.
    Unsupervised reasoning remains in the context. The empty block of a turn without reasoning is always supervised,
    unless it is part of the generation prompt."""
    call_weight: Annotated[float, Range(gt=0)] = 1.0
    """Loss weight of a token in a turn that calls a function, relative to 1.0 for other supervised tokens."""
    on_invalid: Literal["fail", "skip"] = "fail"
    """Unusable rows: stop with a report, or skip and count them, up to `max_invalid_share`."""
    max_invalid_share: Annotated[float | str, PERCENTAGE, KEEPS_PREPARED] = "10%"
    """With `on_invalid: skip`: stop if more of any source's rows than this are unusable. Conversations that `overlong`
    drops do not count."""
    overlong: Literal["fail", "drop", "cut"] = "fail"
    """Conversations longer than `seq_len`: stop, drop them, or cut them at the end of a turn."""
    parallel_calls: Literal["error", "split"] = "error"
    """Turns with several calls, if the chat template renders only one per turn: report the row as invalid, or split the
    turn."""
    content_with_calls: Literal["error", "drop"] = "error"
    """Text next to a call, if the chat template prints only the call: report the row as invalid, or drop the text."""
    reasoning: Literal["keep", "keep_printed", "in_content", "drop"] = "keep"
    """Reasoning of rows: `keep` passes it to the chat template under the template's own name for it, and reports rows
    whose reasoning the template does not print; `keep_printed` leaves such reasoning out; `in_content` writes it as
    `<think>...</think>` before the content of trained turns, for templates that read no reasoning; `drop` trains
    without any."""
    thinking: Literal["auto", "rows", "config"] = "auto"
    """Thinking switch of the chat template, such as `enable_thinking`. `auto`: if any row has reasoning, on for rows
    with reasoning and off for the others, so that a hybrid model remains one; a row's own switches take precedence.
    `rows`: only the rows' own switches; `config`: only `model.template_args`, for all rows."""
    special_tokens_in_content: Literal["fail", "escape", "keep"] = "fail"
    """Rows that spell a special token of the tokenizer, such as `<|im_end|>`, in a message, tool or argument: report
    them as invalid, encode the token as plain text, or keep it as the control token."""
    prepared_dir: Annotated[
        str | None, Null("`prepared` in FCTUNE_CACHE, which is ~/.cache/fctune by default"), KEEPS_PREPARED
    ] = None
    """Directory of prepared (tokenised and packed) sets, which all nodes share. `fctune clean` lists and removes
    them."""

    def check(self, where: str, problems: list[str]) -> None:
        """Check keys that cannot be combined with preference pairs."""
        if not self.pairs:
            return
        if not self.packed:
            problems.append(
                f"{where}.packed=false: the two answers of a pair share a packed row; set {where}.packed=true"
            )
        if self.overlong == "cut":
            problems.append(f"{where}.overlong=cut: an answer of a pair cannot be cut; set {where}.overlong=drop")
        if self.call_weight != 1.0:
            problems.append(
                f"{where}.call_weight={self.call_weight:g}: all tokens of a pair's answers have the same weight; "
                "leave it out"
            )
        for index, source in enumerate(self.sources):
            if source.format != "auto":
                problems.append(
                    f"{where}.sources.{index}.format={source.format}: pairs have one format, with prompt, chosen and "
                    "rejected; leave it out"
                )
