"""Rows of a tune: given the tools that they lack, checked as the model reads them, and refused if they cannot do."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fctune.base.errors import ConfigError, DataError
from fctune.calls.response_template import find_call_format, iter_answers
from fctune.config.intervals import format_count
from fctune.config.schema import RunConfig
from fctune.config.sections.data import REDACT_KINDS, SourceConfig
from fctune.data.chat_template import ChatTemplate, MissingTemplateError
from fctune.data.check import Report, check_sources
from fctune.data.chosen_template import read_chosen_template
from fctune.data.conversation import Conversation, Tool
from fctune.data.conversion import RowsSkippedError, convert_source
from fctune.data.encoding import make_supervision
from fctune.data.row_lengths import RowLengths
from fctune.data.sources import has_reasoning_rows
from fctune.data.sources.selection import Selection
from fctune.data.sources.tool_file import read_tool_files
from fctune.tasks.evaluation.held_out import DistinctRequests

MIN_CONVERSATIONS = 20  # fewer are too few to hold any out

_NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The user's options on how rows are read and held out.

    Attributes:
        clean: Unusable rows to leave out (``invalid``), and kinds of secrets to replace.
        tools: Files of tools for rows that name none.
        cases: File of held-out cases; None: some rows are held out.
        reading: Words of the command on how the rows are read, such as ``--columns``, for commands that are named.
    """

    clean: Sequence[str] = ()
    tools: Sequence[Path] = field(default_factory=tuple)
    cases: str | None = None
    reading: Sequence[str] = ()


def add_tools(
    sources: Sequence[SourceConfig], options: RowOptions, folder: Path, log: Callable[[str], None]
) -> list[SourceConfig]:
    """Write the rows with the tools that they lack to a folder; returns the sources to train on.

    Raises:
        ConfigError: The tools cannot be read.
        DataError: Rows cannot be read, and are not to be left out.
    """
    tools = read_tool_files(options.tools)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for index, source in enumerate(sources, start=1):
        path = folder / f"{index}.jsonl"
        try:
            report = convert_source(
                source.path,
                path,
                source.format,
                is_strict="invalid" not in options.clean,
                tools=tools,
                columns=source.columns,
                fold=source.fold,
                selection=Selection.from_config(source),
            )
        except RowsSkippedError as error:
            report = error.report
            examples = "".join(f"\n  {defect}" for defect in report.skipped[:_NUM_EXAMPLES])
            raise DataError(
                f"{source.path}: {report.num_skipped:,} of {format_count(report.rows, 'row')} cannot be trained on. "
                f"Correct them, or add --clean to leave them out.{examples}"
            ) from None
        log(f"{source.path}: {format_count(report.converted, 'row')} with the tools of --tools, in {path}")
        written.append(SourceConfig(path=str(path)))
    return written


@dataclass(slots=True)
class RowSurvey:
    """Counts of the rows that the report of the check does not have.

    Attributes:
        requests: Different requests of rows with tools.
        tools: The first tool of each name.
        variants: Names of tools that rows also declare in another way.
        most_offered: Largest number of tools that a row offers.
        lengths: Lengths of the conversations in tokens.
    """

    requests: DistinctRequests = field(default_factory=DistinctRequests)
    tools: dict[str, Tool] = field(default_factory=dict)
    variants: set[str] = field(default_factory=set)
    most_offered: int = 0
    lengths: RowLengths = field(default_factory=RowLengths)

    def add(self, conversation: Conversation) -> None:
        """Add the request and the tools of a row."""
        self.requests.add(conversation)
        self.most_offered = max(self.most_offered, len(conversation.tools))
        for tool in conversation.tools:
            known = self.tools.setdefault(tool.name, tool)
            if known is not tool and known.to_json() != tool.to_json():
                self.variants.add(tool.name)


def check_rows(
    config: RunConfig, model_dir: Path, cases: str | None, survey: RowSurvey, on_progress: Callable[[int], None]
) -> Report:
    """Read and render every row of a config's sources as training does.

    Args:
        config: Config of the run.
        model_dir: Directory of its model.
        cases: File of cases that no row may ask; None: there is none.
        survey: Counts every row that can be used.
        on_progress: Called with the number of rows read so far.

    Raises:
        ConfigError: The model has no chat template.
        DataError: Its chat template cannot be used, or the rows have an unknown format.
    """
    chosen = read_chosen_template(config.model)
    try:
        template = ChatTemplate(model_dir, make_supervision(config.data), config.model.template_args, chosen)
    except MissingTemplateError:
        raise ConfigError(
            f"--model {config.model.path}: has no chat template, as base models have none, so it is unknown how it "
            "reads tools and writes calls. Choose an instruct model, or add model.chat_template=hermes to the "
            "command: it comes with fctune, and writes calls in plain text (docs/templates.md lists others)."
        ) from None
    find_call_format(template)  # or the gate could not read the calls
    first = config.data.sources[0]  # the options of the command are those of every source
    named = [(source.path, source.format) for source in config.data.sources]
    template.resolve_thinking(lambda: has_reasoning_rows(named, None, first.columns))

    def count(conversation: Conversation) -> tuple[int, int]:
        samples = template.encode(conversation)
        survey.add(conversation)
        survey.lengths.add_samples(samples)
        return sum(len(sample.tokens) for sample in samples), sum(sample.num_supervised for sample in samples)

    return check_sources(
        [source.path for source in config.data.sources],
        row_format=first.format,
        encode=count,
        eval_suites=[cases] if cases else [],
        on_progress=on_progress,
        template=template,
        columns=first.columns,
        fold=first.fold,
        selection=Selection.from_config(first),
    )


def measure_answers(config: RunConfig, model_dir: Path, conversations: Iterable[Conversation]) -> tuple[int, bool]:
    """Return the tokens of the longest last answer of conversations, and True if the template prints reasoning."""
    chosen = read_chosen_template(config.model)
    template = ChatTemplate(model_dir, make_supervision(config.data), config.model.template_args, chosen)
    longest = 0
    for conversation in conversations:
        *earlier, last = conversation.messages
        messages = (*(replace(message, weight=0.0) for message in earlier), last)
        try:
            for answer in iter_answers(template, replace(conversation, messages=messages)):
                longest = max(longest, len(template.tokenizer.encode(answer.text, add_special_tokens=False)))
        except DataError:  # not trained on either
            continue
    return longest, template.reasoning.key is not None


def describe_rows(report: Report) -> str:
    """Return the counts of a check in one line."""
    tokens = report.tokens
    assert tokens is not None
    parts = [
        f"{report.conversations:,} of {report.rows:,} usable",
        format_count(report.calls, "call"),
        format_count(report.tools, "tool"),
        f"{format_count(tokens.total, 'token')} (at most {tokens.lengths.max:,} a row)",
        *([format_count(report.duplicates, "duplicate")] if report.duplicates else []),
    ]
    return ", ".join(parts)


def describe_findings(report: Report, survey: RowSurvey, options: RowOptions) -> list[str]:
    """Return lines on what is wrong with rows: defects with examples, warnings, secrets, and repetitions."""
    lines = []
    for defects in report.defect_kinds:
        lines.append(f"{defects.count:,} x {defects.kind}: {defects.meaning}")
        lines += [f"  {example}" for example in defects.examples[:_NUM_EXAMPLES]]
    warnings = [warned for warned in report.warning_kinds if warned.kind != "secret"]  # told below
    lines += [f"{warned.count:,} x {warned.kind}: {warned.meaning}" for warned in warnings]
    if report.secrets.kinds and not {*options.clean} & {*REDACT_KINDS}:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.secrets.kinds.items())
        lines.append(f"secrets in the rows: {kinds}; --clean replaces them by placeholders")
    num_no_calls, num_requests = report.classes.get("no_call", 0), len(survey.requests.no_call)
    if options.cases is None and num_no_calls > 1 and 2 * num_requests <= num_no_calls:
        lines.append(
            f"{num_no_calls:,} rows need no call, but have only {format_count(num_requests, 'different request')}; no "
            "held-out case has a request that is trained on as well, so few are left without a call"
        )
    if near := sum(overlap.num_found for overlap in report.overlaps):
        cases = format_count(near, "case nearly repeats", "cases nearly repeat")
        lines.append(f"{options.cases}: {cases} a row to train on, so that the result is judged too well")
    if report.near_duplicates:
        rows = format_count(report.near_duplicates, "row nearly repeats", "rows nearly repeat")
        lines.append(f"{rows} another; held-out ones among them are easier than new requests")
    return lines


def require_trainable(report: Report, options: RowOptions) -> None:
    """Refuse rows that a model cannot be trained and judged on.

    Raises:
        DataError: With what to do.
    """
    paths = [source.path for source in report.sources]
    names = ", ".join(paths)
    read_as_here = shlex.join([*paths, *(() if options.tools else options.reading)])
    if report.errors:
        raise DataError("\n".join(report.errors))
    if report.defects and "invalid" not in options.clean:
        hint = ""
        if any(defects.kind == "call_without_tools" for defects in report.defect_kinds) and not options.tools:
            command = f"fctune data tools {read_as_here} --out tools.json"
            hint = f", name the agent's tools with --tools FILE (`{command}` drafts them from the calls)"
        raise DataError(
            f"{names}: {report.defects:,} of {format_count(report.rows, 'row')} cannot be trained on (above). Correct "
            f"them{hint}, or add --clean to leave them out; `fctune data check {read_as_here}` lists all of them."
        )
    if not report.calls:
        raise DataError(
            f"{names}: no row has a call, so a model trained on them would learn never to call. Rows need the tools on "
            "offer and an assistant's tool_calls (docs/data.md). Calls in a column of another name: --columns OWN=NAME."
        )
    distinct = report.conversations - report.duplicates
    if distinct < MIN_CONVERSATIONS and options.cases is None:
        rows = format_count(distinct, "different usable row" if report.duplicates else "usable row")
        raise DataError(
            f"{names}: {rows}, too few to hold some out and judge the result with them; {MIN_CONVERSATIONS} is the "
            "least, and some hundreds are usual. Add rows (`fctune data generate` has a larger model write them), or "
            "pass --cases FILE with cases of their own."
        )


def require_unseen(num_found: int, options: RowOptions) -> None:
    """Refuse cases that rows to train on ask.

    Raises:
        DataError: With what to do.
    """
    if num_found:
        raise DataError(
            f"--cases {options.cases}: {format_count(num_found, 'case is', 'cases are')} among the rows to train on, "
            "so the result would be judged by what it has seen. Take them out of one of the two files."
        )
