"""Training rows: sources, rendering, supervision and packing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fctune.config.conditions import parse_conditions
from fctune.config.fields import AT_LEAST_1, KEEPS_PREPARED, NotEmpty, Null, Range, SectionProblems, join_key
from fctune.config.intervals import PERCENTAGE, parse_share
from fctune.config.parsing import suggest_hub_name

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
DATA_SUFFIXES = (*(name + end for end in ("", ".gz", ".zst") for name in _JSON_SUFFIXES), ".parquet", ".csv")

Fold = Literal["auto", "always", "never"]
Failed = Literal["drop", "keep"]
WrongTurns = Literal["context", "train"]


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """A source of training rows."""

    path: str
    """JSON or JSONL file (also .gz and .zst), Parquet or CSV file, a directory of them or from `save_to_disk`,
    `hf:NAME[:CONFIG][:SPLIT][@REVISION]`, or `synthetic:SPLIT:ROWS[:SEED]` (of pairs: `synthetic:pairs:ROWS`)."""
    format: str = "auto"
    """Row format by the name of its reader; `auto` detects it from the rows."""
    weight: Annotated[float, Range(gt=0)] = 1.0
    """How often each row appears per epoch: 2.0 means twice, 0.5 means every second row (chosen by hash)."""
    columns: dict[str, str] = field(default_factory=dict)
    """The format's name for each column of another name, such as `{question: query}`; `ignore` leaves one out. Columns
    with text that nothing reads make a row invalid."""

    fold: Fold = "auto"
    """Records whose tools and messages are the beginning of another record's, as logs of an agent's model calls have
    them: leave them out `always`, `never`, or if the format is one of logs (`auto`). Branches stay apart."""

    where: str = ""
    """Conditions on the rows to train on, joined by `and`: `score >= 0.8 and tool == search`. `tool` is a tool that the
    conversation calls; `messages`, `calls` and `characters` are counts; other names are columns, or keys (also of
    `metadata`, `scores`, `feedback_stats`, `attributes`; joined by dots). Rows that lack one are left out."""
    failed: Failed = "drop"
    """Answers that the row marks as failed, cut off or rejected, and runs that did not solve their task: leave them out
    (`drop`), or read them as others (`keep`)."""
    wrong_turns: WrongTurns = "context"
    """Turns whose calls all have results that are marked as errors: only what the model reads (`context`), or trained
    (`train`)."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that a local source exists, that columns are mapped to distinct names, and the conditions."""
        try:
            parse_conditions(self.where)
        except ValueError as error:
            problems.add(("where",), f"{join_key(where, 'where')}: {error}")
        for own, name in self.columns.items():
            if not isinstance(name, str) or not name:
                key = join_key(where, "columns")
                problems.add(
                    ("columns",), f"{key}.{own}={name}: expected a column of the row format, such as query, or ignore"
                )
        names = [name for name in self.columns.values() if name != "ignore"]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            owns = " and ".join(own for own, name in self.columns.items() if name == repeated)
            problems.add(
                ("columns",), f"{join_key(where, 'columns')}: {owns} are both mapped to {repeated}; map one of them"
            )
        if not self.path.startswith(("hf:", "synthetic:")) and (problem := _find_path_problem(Path(self.path))):
            problems.add(("path",), f"{join_key(where, 'path')}={self.path}: {problem}")


def _find_path_problem(path: Path) -> str:
    """Return what is seen to be wrong with a source's file or directory without reading rows, or ""."""
    if not os.path.exists(path):
        return f"no such file or directory{suggest_hub_name(str(path))} (relative paths start at {Path.cwd()})"
    walked = os.walk(path, followlinks=True) if path.is_dir() else ()
    if path.is_dir() and not any(name.lower().endswith(DATA_SUFFIXES) for _, _, names in walked for name in names):
        return f"no data files in this directory; expected {', '.join(DATA_SUFFIXES)}"
    if path.is_file() and path.stat().st_size == 0:
        return "an empty file; expected rows"
    return ""


@dataclass(kw_only=True, slots=True)
class AugmentConfig:
    """Rows changed and added to strengthen the training rows. Each kind has the share of rows that it is applied to,
    of those that it can be applied to; a hash decides which. Held-out rows stay as they are.
    """

    mask_names: Annotated[float | str, PERCENTAGE] = 0.0
    """Change: tools and parameters that have a description get meaningless names, in calls as well, so that the model
    reads descriptions. Names that the user says, or that a value holds, are kept."""
    distract: Annotated[float | str, PERCENTAGE] = 0.0
    """Change: tools are added that cannot do what the calls do: of the same source, offered with the row's tools
    elsewhere, or described in similar words. The row then has 3 to `max_tools`."""
    shuffle_tools: Annotated[float | str, PERCENTAGE] = 0.0
    """Change: tools are in another order."""
    paraphrase: Annotated[float | str, PERCENTAGE] = 0.0
    """Change: tools' schemas are written with their keys and parameters in another order, and with or without keys that
    change nothing for the calls."""
    take_away: Annotated[float | str, PERCENTAGE] = 0.0
    """Added row: the request without the tools that it needs, answered by a text that says what is missing, in many
    wordings. The original row stays."""
    ask: Annotated[float | str, PERCENTAGE] = 0.0
    """Added row: the request without a value that a call requires, answered by a question for it; in half of the rows
    the user then gives it. The original row stays."""
    repeat: Annotated[float | str, PERCENTAGE] = 0.0
    """Added row: a request that takes several calls of one tool, from a row with one call and the values or requests of
    other rows for the same tool. The original row stays."""
    max_tools: Annotated[int, Range(ge=3)] = 8
    """Largest number of tools of a row that `distract` adds to."""
    seed: int = 0
    """Seed of all choices."""

    def shares(self) -> dict[str, float]:
        """Return the share of each kind that is above 0, in the order in which they are applied."""
        return {kind: share for kind in AUGMENT_KINDS if (share := parse_share(getattr(self, kind))) > 0}

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that a kind has a share; one that cannot be read is reported by its field."""
        try:
            shares = self.shares()
        except ValueError:
            return
        if not shares:
            problems.add(
                AUGMENT_KINDS,
                f"{where}: every share is 0; set one, such as {where}.take_away=10%, or remove the section",
            )


CHANGES = ("distract", "mask_names", "paraphrase", "shuffle_tools")
ADDITIONS = ("take_away", "ask", "repeat")
AUGMENT_KINDS = (*CHANGES, *ADDITIONS)


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    """General rows among the training rows, so that the model keeps what it can do."""

    sources: Annotated[list[SourceConfig], NotEmpty("[{path: general.jsonl}]")]
    """Sources of conversations, with tools or without. Rows are drawn at random, each once, in proportion to the
    sources' weights. They are never held out or augmented."""
    share: Annotated[float | str, PERCENTAGE] = "5%"
    """Share of the training conversations of an epoch that are these, counted after weights and `augment`."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that some conversations are these, and others are not."""
        try:
            share = parse_share(self.share)
        except ValueError:
            return  # reported by its field
        if not 0 < share < 1:
            problems.add(("share",), f"{where}.share={self.share}: expected more than 0 and less than 100%")


RedactKind = Literal["secrets", "emails", "phones", "paths"]
REDACT_KINDS: tuple[RedactKind, ...] = ("secrets", "emails", "phones", "paths")


@dataclass(kw_only=True, slots=True)
class RedactConfig:
    """Placeholders in place of secrets and personal data, with `secrets: redact`."""

    kinds: Annotated[list[RedactKind], NotEmpty("[secrets, emails]")] = field(default_factory=lambda: ["secrets"])
    """Texts to replace: credentials, email addresses, phone numbers, and the user's name in paths of home
    directories."""
    seed: int = 0
    """Seed of the placeholders: the same text has the same placeholder in all rows. With the seed, a guess of a text
    can be verified, so choose one of your own for phone numbers and email addresses."""
    supervise: bool = False
    """Supervise turns of the assistant in which a text was replaced. Otherwise they are context, so that the model
    learns no placeholder as a value."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Training rows: sources, rendering, supervision and packing."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Sources, read in this order. Required, except with a `grpo` section, or with `distill.on_policy_share: 1`."""
    validation_share: Annotated[float, Range(ge=0, lt=1)] = 0.02
    """Share of conversations held out for validation; chosen by hash, so a conversation keeps its split when rows are
    added. Of 20 or more, at least one is held out; 0: none."""
    max_samples: Annotated[int | None, AT_LEAST_1, Null("all rows")] = None
    """Rows to read from each source."""
    augment: Annotated[AugmentConfig | None, Null("rows as they are")] = None
    """Rows changed and added to strengthen the training rows."""
    replay: Annotated[ReplayConfig | None, Null("none")] = None
    """General rows among the training rows."""
    seq_len: Annotated[int | Literal["auto"], Range(ge=8)] = 4096
    """Length of a training row in tokens; no conversation may be longer (see `overlong`). `auto`: the smallest power of
    two, from 1,024, that holds the longest conversation, or all but 0.1% of them unless `overlong` is `fail`; at most
    the model's positions, and what fits on the devices; with `drop`, at most what the others need. The log has the
    reason, and the checkpoints have the length."""
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
    overlong: Literal["fail", "drop", "cut", "split_turns"] = "fail"
    """Conversations longer than `seq_len`: stop, drop them, cut them at the end of a turn, or divide them into parts.
    Each part keeps the tools, the system prompt, the request, and of the turns before as many as fit; each turn is
    trained in one part."""
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
    secrets: Literal["warn", "redact", "fail", "ignore"] = "warn"
    """Credentials in rows (keys of providers, private keys, passwords): `warn` counts them by kind, `redact` replaces
    them as `redact` says, `fail` stops before training, `ignore` does not look for them. No message shows a secret;
    `fctune data check` lists their places."""
    redact: RedactConfig = field(default_factory=RedactConfig)
    """Placeholders in place of secrets and personal data, with `secrets: redact`."""
    prepared_dir: Annotated[
        str | None, Null("`prepared` in FCTUNE_CACHE, which is ~/.cache/fctune by default"), KEEPS_PREPARED
    ] = None
    """Directory of prepared (tokenised and packed) sets, which all nodes share. `fctune clean` lists and removes
    them."""

    @property
    def row_tokens(self) -> int:
        """The number of tokens that ``seq_len`` is, once it is chosen if it was auto."""
        assert isinstance(self.seq_len, int), "seq_len is not chosen yet"
        return self.seq_len

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check keys that cannot be combined with others, most of them with preference pairs."""
        if self.secrets != "redact" and self.redact != RedactConfig():
            problems.add(
                ("redact", "secrets"),
                f"{where}.redact: has no effect with {where}.secrets={self.secrets}; set {where}.secrets=redact",
            )
        if self.overlong == "split_turns" and self.train_reasoning == "last":
            problems.add(
                ("overlong", "train_reasoning"),
                f"{where}.overlong=split_turns: a part does not have the last user message, which "
                f"{where}.train_reasoning=last looks for; set {where}.train_reasoning=all or none",
            )
        if not self.pairs:
            return
        if not self.packed:
            problems.add(
                ("packed", "pairs"),
                f"{where}.packed=false: the two answers of a pair share a packed row; set {where}.packed=true",
            )
        if self.overlong in ("cut", "split_turns"):
            problems.add(
                ("overlong", "pairs"),
                f"{where}.overlong={self.overlong}: an answer of a pair cannot be "
                f"{'cut' if self.overlong == 'cut' else 'divided'}; set {where}.overlong=drop",
            )
        if self.call_weight != 1.0:
            problems.add(
                ("call_weight", "pairs"),
                f"{where}.call_weight={self.call_weight:g}: all tokens of a pair's answers have the same weight; "
                "leave it out",
            )
        for key, what in (("augment", "changes and adds conversations"), ("replay", "mixes conversations in")):
            if getattr(self, key) is not None:
                problems.add((key, "pairs"), f"{where}.{key}: {what}, and the rows are preference pairs; remove it")
        for index, source in enumerate(self.sources):
            if source.format != "auto":
                problems.add(
                    ("sources", "pairs"),
                    f"{where}.sources.{index}.format={source.format}: pairs have one format, with prompt, chosen and "
                    "rejected; leave it out",
                )
