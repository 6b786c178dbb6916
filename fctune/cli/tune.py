"""``fctune tune``: from rows to a judged model in one command, by the steps that other commands do one at a time."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.apps.tune.progress import GATE_SETTINGS, Progress, split_settings
from fctune.base.errors import ConfigError, DataError, Interrupted
from fctune.base.terminal import Terminal, escape_controls
from fctune.cli.data_rows import (
    add_format_argument,
    add_selection_arguments,
    add_tools_argument,
    list_sources,
    read_columns,
    repeat_reading_options,
)
from fctune.cli.parser import is_override
from fctune.cli.tune_result import TuneResult, show_progress
from fctune.config.intervals import format_count, format_duration
from fctune.config.sections.data import REDACT_KINDS, SourceConfig
from fctune.config.shipped import resolve_shipped_path, shipped_dir
from fctune.runs.directory import RunFiles
from fctune.runs.tune_directory import RUN

if TYPE_CHECKING:
    from fctune.apps.plan.plan import Plan
    from fctune.apps.tune.choices import Draft, RowFacts
    from fctune.apps.tune.machine import Machine
    from fctune.apps.tune.rows import RowSurvey
    from fctune.config.schema import RunConfig
    from fctune.data.check import Report
    from fctune.data.conversation import Conversation
    from fctune.data.prepared_set import PreparedSet
    from fctune.data.row_lengths import RowLengths
    from fctune.tasks.task import Case

_TINY = "fctune/assets/tiny_base"
_CONFIG = "tune.yaml"
_ROWS = "rows"
_CLEANINGS = ("invalid", *REDACT_KINDS)
_CLEANED = ["invalid", "secrets"]  # by --clean alone
_MAX_MEASURED = 600  # answers, as many as are held out for a gate at most
_GIB = 1024**3
# Keys that options of the command set.
_OPTIONS = {"output_dir": "--out", "model.path": "--model", "data.sources": "--data", "gate.cases": "--cases"}
_SECTIONS = {"model": "--model", "data": "--data"}  # whose other keys are set one at a time


def add_commands(commands: Any) -> None:
    """Add ``fctune tune`` to the command."""
    tune = commands.add_parser(
        "tune",
        help="fine-tune a model on your rows and judge it: check, split, plan, train, gate, report",
        description="Fine-tune a model on your rows in one command: check the rows, hold some out, choose a config for "
        "the model and this machine, plan, train, compare the result with the base on the held-out rows, and report. "
        "Every choice is printed with its reason and written to DIR/tune.yaml, which fctune train runs again.",
        epilog="The same command resumes after Ctrl-C, a kill or an error. Exit codes: 0 done, 1 the result got worse "
        "or the run failed, 2 wrong usage, config or rows, or a model that does not fit, 74 the disk is full, 75 "
        "stopped and saved, 76 a GPU failed, 130 interrupted between steps.",
    )
    tune.add_argument(
        "--data",
        nargs="+",
        action="extend",
        required=True,
        metavar="PATH",
        help="rows: files, directories or hf:NAME, as for data check",
    )
    tune.add_argument(
        "--model",
        metavar="MODEL",
        help="Hugging Face model directory or hf:NAME[@REVISION]; default: the built-in tiny model, to try the way",
    )
    tune.add_argument(
        "--out",
        type=Path,
        default=Path("runs/tune"),
        metavar="DIR",
        help="directory of everything; default: %(default)s",
    )
    tune.add_argument("--gpus", type=int, metavar="N", help="GPUs to train on; default: all of this machine; 0: none")
    tune.add_argument(
        "--clean",
        type=_to_cleanings,
        nargs="?",
        const=_CLEANED,
        default=[],
        metavar="KIND,...",
        help=f"leave out unusable rows (invalid), and replace by placeholders: {', '.join(REDACT_KINDS)}; without a "
        "kind: invalid,secrets; default: unusable rows are an error, secrets a warning",
    )
    add_tools_argument(tune)
    tune.add_argument(
        "--cases", metavar="FILE", help="held-out cases or rows to judge with; default: some rows are held out"
    )
    tune.add_argument(
        "--plan-only", action="store_true", help="stop before training; the same command without it resumes"
    )
    add_format_argument(tune)
    add_selection_arguments(tune)
    tune.add_argument("settings", nargs="*", metavar="key=value", help="config keys to set yourself, such as epochs=2")
    tune.set_defaults(run=_tune, command_parser=tune)


def _to_cleanings(text: str) -> list[str]:
    """Return the kinds of a list; ``sort_words`` moves a ``key=value`` that follows --clean to where it belongs."""
    if is_override(text):
        return [text]
    words = [word.strip() for word in text.split(",")]
    if unknown := next((word for word in words if word not in _CLEANINGS), None):
        raise argparse.ArgumentTypeError(f"{unknown}: unknown kind (known: {', '.join(_CLEANINGS)})")
    return [kind for kind in _CLEANINGS if kind in words]


def sort_words(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    """Sort ``key=value`` words, which argparse leaves after options, into ``settings``; others are wrong usage."""
    words = [*arguments.settings, *rest]
    unknown = [word for word in words if not is_override(word)]
    tools = list(map(str, arguments.tools))
    arguments.settings = [word for word in (*arguments.clean, *arguments.data, *tools, *words) if is_override(word)]
    if any(map(is_override, arguments.clean)):
        arguments.clean = _CLEANED
    arguments.data = [word for word in arguments.data if not is_override(word)]
    arguments.tools = [Path(word) for word in tools if not is_override(word)]
    if unknown:
        arguments.command_parser.report_unknown(unknown)
    if not arguments.data:
        arguments.command_parser.error("argument --data: expected at least one PATH")
    if tools and not arguments.tools:
        arguments.command_parser.error("argument --tools: expected at least one FILE")


def _tune(arguments: argparse.Namespace) -> int:
    _check_arguments(arguments)
    progress = Progress(arguments.out)
    try:
        return _Tune(arguments, progress).run()
    except KeyboardInterrupt:
        raise Interrupted("the finished steps are kept; re-run the same command to resume") from None
    except OSError as error:
        raise ConfigError(
            f"{error.filename or arguments.out}: {error.strerror or error}. Free some space or correct the path; the "
            "same command resumes."
        ) from None
    finally:
        progress.release()


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Check what needs no slow import.

    Raises:
        ConfigError: An option is wrong.
        DataError: There are no such rows.
    """
    from fctune.config.parsing import suggest_hub_name
    from fctune.data.sources.reader import list_files

    for word in arguments.settings:
        _check_setting(word)
    if arguments.gpus is not None and arguments.gpus < 0:
        raise ConfigError(f"--gpus {arguments.gpus}: expected 0 or more.")
    for path in arguments.data:
        if not path.startswith(("hf:", "synthetic:")):
            list_files(path)
    model = arguments.model
    if model is not None and not model.startswith("hf:") and not Path(resolve_shipped_path(model)).is_dir():
        if model.startswith(("http://", "https://")):
            raise ConfigError(f"--model {model}: a server's model cannot be trained. Pass its directory, or hf:NAME.")
        raise ConfigError(
            f"--model {model}: no such directory{suggest_hub_name(model, '.')} Pass a Hugging Face model directory, or "
            "hf:NAME for one of the hub."
        )
    if arguments.cases is not None and not Path(arguments.cases).is_file():
        raise ConfigError(f"--cases {arguments.cases}: no such file. Pass cases or rows in JSONL, or a suite in YAML.")
    if arguments.out.exists() and not arguments.out.is_dir():
        raise ConfigError(f"--out {arguments.out}: is a file. Name a directory.")


def _check_setting(word: str) -> None:
    """Check that the command takes a setting.

    Raises:
        ConfigError: An option sets it.
    """
    key = _read_key(word)
    if option := next((option for name, option in _OPTIONS.items() if f"{key}.".startswith(f"{name}.")), None):
        raise ConfigError(f"{word}: fctune tune sets this key by {option}. Pass that instead.")
    if key in _SECTIONS:
        raise ConfigError(
            f"{word}: fctune tune sets a part of {key} by {_SECTIONS[key]}. Set other keys one at a time, such as "
            f"{'data.seq_len=2048' if key == 'data' else 'model.chat_template=hermes'}."
        )
    if key == "adapter":
        raise ConfigError(f"{word}: fctune tune trains adapters. To train all weights, use fctune train.")


def _read_key(word: str) -> str:
    return word.removeprefix("~").partition("=")[0]


class _Tune:
    """One tune: its steps in order, each skipped if it is done."""

    def __init__(self, arguments: argparse.Namespace, progress: Progress):
        from fctune.apps.tune.rows import RowOptions
        from fctune.apps.tune.written_config import WrittenConfig

        self.arguments, self.progress = arguments, progress
        self.out: Path = arguments.out
        self.config = WrittenConfig(arguments.out / _CONFIG)
        self.model: str = arguments.model or _TINY
        self.console = Terminal(highlight=False, soft_wrap=True)
        self.sources = list_sources(arguments, arguments.data)
        self.options = RowOptions(arguments.clean, arguments.tools, arguments.cases, repeat_reading_options(arguments))

    def say(self, line: str = "", style: str | None = None) -> None:
        """Print a line; control characters of rows and paths are escaped."""
        self.console.print(escape_controls(line), style=style)

    def run(self) -> int:
        """Do the steps that are not done; returns the exit code."""
        from fctune.apps.tune.machine import find_machine

        for change in self.progress.accept(self._list_inputs()):
            how = "judging" if self.progress.has_training_begun else "starting"
            self.say(f"changed since the last time: {change}; {how} again", "yellow")
        self.machine = find_machine(self.arguments.gpus)
        self._forget_stale_plan()
        found: dict[str, Any] = {}
        for step, action in (("check", self.check), ("split", self.split), ("plan", self.plan)):
            found[step] = self._do(step, partial(action, found))
        if self.arguments.plan_only:
            self.say("not trained (--plan-only). Next: the same command without it")
            return 0
        self._check_config(found["plan"])
        self._update_gate(found)
        self._record_repeat(found["plan"])
        if (code := self._train(found["plan"])) != 0:
            return code
        result = TuneResult(self.config, self.out, self.options.cases, self.say)
        found["gate"] = self._do("gate", result.judge, result.verdict)
        self._do("report", result.report, result.page)
        return result.print_next(found["gate"], found["check"].get("tools"), self.progress, is_tiny=self.model == _TINY)

    def _do(self, step: str, action: Callable[[], dict[str, Any]], output: Path | None = None) -> dict[str, Any]:
        """Return what a step found: now, or when it was done, if its output is still there."""
        if (found := self.progress.find(step)) is not None and (output is None or output.exists()):
            self.say(f"{step}: done {self.progress.when(step)}; not repeated", "dim")
            for line in found.get("lines", []) if step == "gate" else []:
                self.say(line)
            return dict(found)
        self.say(f"{step}:", "bold")
        found = action()
        self.progress.finish(step, found)
        return found

    def _forget_stale_plan(self) -> None:
        """Have the plan made again, before training, if its config is gone or is for another machine and not edited."""
        planned, config = self.progress.find("plan"), self.config
        if planned is None or self.progress.has_training_begun:
            return
        is_other = planned.get("machine") != self.machine.name
        if not config.exists or (is_other and config.digest() == planned["config"]):
            other = f"was made for {planned.get('machine')}, and this machine has {self.machine.name}"
            reason = other if config.exists else f"{config.path} is gone"
            self.say(f"plan: {reason}; made again", "yellow")
            self.progress.forget("plan")

    def _list_inputs(self) -> dict[str, str]:
        """Return what the steps depend on, by a name for messages; files by their content."""
        from fctune.data.fingerprint import FileDigests
        from fctune.data.sources.reader import list_files
        from fctune.models.hub import digest_model

        given = self.arguments
        inputs = {
            "--model": self.model,
            "--data": " ".join(given.data),
            "--gpus": "" if given.gpus is None else str(given.gpus),
        }
        for name in ("format", "fold", "failed", "wrong_turns", "cases"):
            inputs[f"--{name.replace('_', '-')}"] = str(getattr(given, name) or "")
        inputs["--where"] = " and ".join(map(str, given.where))
        inputs["--columns"] = json.dumps(read_columns(given))
        inputs["--clean"] = ",".join(given.clean)
        inputs |= split_settings(given.settings)
        digests = FileDigests()
        local = [path for path in given.data if not path.startswith(("hf:", "synthetic:"))]
        files = [str(file) for path in local for file in list_files(path)]
        files += [*map(str, given.tools), *([given.cases] if given.cases else [])]
        for file in files:
            try:
                inputs[f"content of {file}"] = digests.digest(file)
            except OSError as error:
                raise DataError(f"{file}: cannot be read ({error.strerror}).") from None
        if not self.model.startswith("hf:"):
            inputs[f"content of {self.model}"] = digest_model(Path(resolve_shipped_path(self.model)))
        return inputs

    # The steps. Each returns what later steps, or a second start, need of it.

    def check(self, found: dict[str, Any]) -> dict[str, Any]:
        """Check the model and every row; refuse what cannot be trained on."""
        from fctune.apps.tune.choices import format_weights
        from fctune.apps.tune.rows import RowSurvey, add_tools, require_trainable
        from fctune.apps.tune.trial import TOOLS, render_tools
        from fctune.data.conversation import Conversation
        from fctune.data.redaction import Redactor
        from fctune.data.row_lengths import MIN_SEQ_LEN
        from fctune.models.architecture import count_weights
        from fctune.models.planned_model import find_architecture

        architecture, _, _ = find_architecture(resolve_shipped_path(self.model))
        self.say(f"  model: {self.model}, {format_weights(count_weights(architecture))} weights")
        if self.arguments.model is None:
            self.say(
                "  no --model, so the built-in tiny model is trained: it shows the way, and is of no use beyond it",
                "yellow",
            )
        self.say(f"  machine: {self.machine.describe()}")
        self._require_fit(architecture, None, self._draft_least(architecture, MIN_SEQ_LEN))  # before any download
        if self.options.tools:
            self.sources = add_tools(self.sources, self.options, self.out / _ROWS, lambda line: self.say(f"  {line}"))
        draft = self._draft(architecture)
        config = draft.parse()
        if config.data.validation_share == 0 and draft.is_given("data.validation_share") and not self.options.cases:
            raise ConfigError(
                "data.validation_share=0: holds out no row, so there is nothing to judge the result with. Leave it "
                "out, or pass --cases FILE."
            )
        survey = RowSurvey()
        report = self._check_rows(config, survey)
        require_trainable(report, self.options)
        tokens = report.tokens
        assert tokens is not None
        facts: dict[str, Any] = {"conversations": report.conversations, "tokens": tokens.total}
        facts["longest"] = survey.lengths.longest
        if not draft.is_given("data.seq_len"):
            overlong = config.data.overlong if draft.is_given("data.overlong") else None
            facts["seq_len"], facts["length_reason"] = self._choose_seq_len(architecture, survey.lengths, overlong)
        facts |= {"no_calls": report.classes.get("no_call", 0), "no_tools": report.classes.get("no_tools", 0)}
        facts |= {"requests": len(survey.requests.found), "no_call_requests": len(survey.requests.no_call)}
        tools_seen = tuple(survey.tools.values())
        if config.data.secrets == "redact":
            tools_seen = Redactor(config.data.redact).redact_conversation(Conversation((), tools_seen))[0].tools
        path = self.progress.write(TOOLS, render_tools(tools_seen))
        variants = format_count(len(survey.variants), "is", "are")
        others = f" ({variants} declared in several ways, of which it has the first)" if survey.variants else ""
        self.say(f"  tools: {len(survey.tools):,}, in {path}{others}")
        tools = {"count": len(survey.tools), "most_offered": survey.most_offered}
        return {"sources": [source.path for source in self.sources], "facts": facts, "tools": tools}

    def _choose_seq_len(self, architecture: Any, lengths: RowLengths, overlong: str | None) -> tuple[int, str]:
        """Choose the length of a training row by the rows and by what fits in this machine; returns it with the reason.

        It is kept from here on, as rows are prepared and memory is planned by it. ``overlong`` is None unless the user
        gave it: it is chosen by the length.
        """
        from fctune.apps.tune.choices import fit_config
        from fctune.data.row_lengths import choose_seq_len

        def find_obstacle(tokens: int) -> str | None:
            fits = fit_config(self._draft_least(architecture, tokens), architecture, None, self.machine) is not None
            return None if fits else f"rows of {tokens:,} tokens do not fit in this machine's memory"

        with self.console.status("planning"):
            return choose_seq_len(lengths, architecture.max_position_embeddings, overlong, find_obstacle)

    def _draft_least(self, architecture: Any, seq_len: int) -> Draft:
        """Draft the config that takes the least memory with rows of a length, unless the user gave another."""
        draft = self._draft(architecture)
        draft.choose("data.seq_len", seq_len, "the least")
        draft.choose("global_batch_size", self.machine.num_processes, "the least")
        return draft

    def _draft(self, architecture: Any) -> Draft:
        """Draft the config without what depends on the rows."""
        from fctune.apps.tune.choices import draft_config

        draft, _ = draft_config(
            self.model, architecture, self.machine, self.out / RUN, self.sources, self.arguments.settings
        )
        draft.choose("gate.chat_template", "tuned", "the base is asked in the form that it is trained in")
        if self.options.cases is not None:
            draft.choose("gate.cases", self.options.cases, "--cases")
        cleanings = self.options.clean
        kinds = [kind for kind in cleanings if kind != "invalid"]
        if "invalid" in cleanings:
            draft.choose("data.on_invalid", "skip", "--clean: unusable rows are left out, and counted")
            draft.choose("data.max_invalid_share", "100%", "--clean: the check has listed them")
        else:
            draft.choose("data.on_invalid", "fail", "every row can be used; --clean leaves unusable ones out")
        if kinds:
            draft.choose("data.secrets", "redact", "--clean: placeholders in their place")
            draft.choose("data.redact.kinds", kinds, "--clean")
        return draft

    def _check_rows(self, config: RunConfig, survey: RowSurvey) -> Report:
        """Check every row, print what was found, and write the page of the rows."""
        from fctune.apps.report.data_page import write_data_html
        from fctune.apps.tune.rows import check_rows, describe_findings, describe_rows
        from fctune.models.run_config import resolve_base

        with self.console.status("reading") as status:
            report = check_rows(
                config,
                resolve_base(config),
                self.options.cases,
                survey,
                lambda rows: status.update(f"{rows:,} rows read"),
            )
        page = self.out / "rows.html"
        write_data_html(report, page)
        self.say(f"  rows: {describe_rows(report)}; page: {page}")
        for line in describe_findings(report, survey, self.options):
            self.say(f"  {line}", "yellow")
        return report

    def split(self, found: dict[str, Any]) -> dict[str, Any]:
        """Choose what follows from the rows, encode them once, and hold some out; sessions stay together."""
        from fctune.data.augment.augmenter import UnusedKindError
        from fctune.data.prepared_set import describe_counts

        has_augment = True
        try:
            config, prepared = self._prepare(found)
        except UnusedKindError as error:
            if self._draft_sized(found)[0].is_given("data.augment.take_away"):
                raise
            reason = str(error).partition(". ")[0]  # without the advice to remove a key that the user has not set
            self.say(f"  no rows without a call can be made of these, so add some yourself: {reason}", "yellow")
            has_augment = False
            config, prepared = self._prepare(found | {"split": {"has_augment": False}})
        for line in describe_counts(prepared):
            self.say(f"  {line}")
        from fctune.data.conversation import Message
        from fctune.tasks.evaluation.held_out import (
            NothingHeldOutError,
            cut_after_answer,
            find_asked,
            iter_held_out_conversations,
            make_held_out_cases,
        )

        if self.options.cases is not None:
            from fctune.apps.tune.rows import require_unseen
            from fctune.tasks.suite_files import load_suite
            from fctune.tasks.task import Case

            given = load_suite(self.options.cases, has_multi_turn=True).all_cases
            require_unseen(len(find_asked(given, config.data)), self.options)
            answered = [
                replace(case.prompt, messages=(*case.prompt.messages, Message("assistant", None, case.expected)))
                for case in given
                if isinstance(case, Case) and case.expected
            ]
            counts = _count_prepared(prepared, len(given)) | self._measure_answers(config, answered)
            result = {"has_augment": has_augment, "prepared": counts}
            sized = self._draft_sized(found | {"split": result})[0].parse()
            self._check_gate([case for case in given if isinstance(case, Case)], sized)
            return result

        try:
            cases, num_leaked = make_held_out_cases(config.data, prepared)
        except NothingHeldOutError:
            raise DataError(
                "no held-out row has tools and an answer, so there is nothing to judge the result with. Add rows with "
                "tools, hold out more (data.validation_share=0.3), or pass --cases FILE."
            ) from None
        if not cases:
            raise DataError(
                "nothing is left to judge the result with: rows to train on ask the questions of all held-out rows, "
                "because rows repeat each other. Add rows with other questions, or pass --cases FILE."
            )
        calls = sum(bool(case.expected) for case in cases)
        self.say(f"  held out to judge with: {format_count(len(cases), 'case')}, {calls:,} with a call")
        if num_leaked:
            count = format_count(num_leaked, "held-out case")
            self.say(f"  left out of them: {count} whose questions rows to train on ask as well", "yellow")
        held_out = (cut_after_answer(row) for row in iter_held_out_conversations(config.data, prepared))
        measured = self._measure_answers(config, islice(filter(None, held_out), _MAX_MEASURED))
        result = {"has_augment": has_augment, "prepared": _count_prepared(prepared, len(cases)) | measured}
        self._check_gate(cases, self._draft_sized(found | {"split": result})[0].parse())
        return result

    def _measure_answers(self, config: RunConfig, conversations: Iterable[Conversation]) -> dict[str, Any]:
        """Return the fields of ``PreparedFacts`` on the answers to judge with, each the last one of a conversation."""
        from fctune.apps.tune.rows import measure_answers
        from fctune.models.run_config import resolve_base

        longest, prints_reasoning = measure_answers(config, resolve_base(config), conversations)
        return {"answer_tokens": longest, "prints_reasoning": prints_reasoning}

    def _prepare(self, found: dict[str, Any]) -> tuple[RunConfig, PreparedSet]:
        from fctune.cli.data import prepare_rows

        config = self._draft_sized(found)[0].parse()
        return config, prepare_rows(config, self.console)

    def _draft_sized(self, found: dict[str, Any]) -> tuple[Draft, Any, Path | None]:
        """Draft the config with what depends on the rows; returns it with the model's architecture and directory."""
        from fctune.apps.tune.choices import PreparedFacts, RowFacts, size_config
        from fctune.models.planned_model import find_architecture

        if self.options.tools:
            self.sources = [SourceConfig(path=path) for path in found["check"]["sources"]]
        architecture, model_dir, _ = find_architecture(resolve_shipped_path(self.model))
        draft = self._draft(architecture)
        facts: RowFacts = RowFacts(**found["check"]["facts"])
        if not found.get("split", {}).get("has_augment", True):
            facts = replace(facts, no_calls=facts.conversations, no_call_requests=facts.requests)
        counted = found.get("split", {}).get("prepared")
        prepared = PreparedFacts(**counted) if counted else None
        size_config(draft, facts, architecture, self.machine, self.options.cases is not None, prepared)
        return draft, architecture, model_dir

    def plan(self, found: dict[str, Any]) -> dict[str, Any]:
        """Choose the layout, print time and cost, and write the config; refuse what does not fit."""
        draft, architecture, model_dir = self._draft_sized(found)
        self._require_fit(architecture, model_dir, draft)
        config = draft.parse()
        plan = make_machine_plan(config, self.machine)
        width = max(len(key) for key, _, _ in draft.list_choices())
        for key, value, reason in draft.list_choices():
            self.say(f"  {key:<{width}} = {value}   ({reason})")
        for line in describe_plan(plan, self.machine):
            self.say(f"  {line}")
        self._require_space(plan)
        head = (
            f"Written by: {self._command()}\nThe comment after each value is the reason for it. To train again:\n\n"
            f"  fctune train {shlex.quote(str(self.out / _CONFIG))} output_dir=ANOTHER"
        )
        text = draft.render(head)
        path = self.progress.write(_CONFIG, text)
        self.say(f"  config: {path}")
        words = split_settings(self.arguments.settings)[GATE_SETTINGS]
        written = {"config": self.config.digest(), "values": draft.values}
        return {**written, "machine": self.machine.name, "gate": words}

    def _require_fit(self, architecture: Any, model_dir: Path | None, draft: Draft) -> None:
        """Choose a layout that fits; without the size of the rows, only see that there is one.

        Raises:
            ConfigError: Nothing fits; names smaller models that do.
        """
        from fctune.apps.tune.choices import find_smaller, fit_config, format_weights
        from fctune.models.architecture import count_weights

        with self.console.status("planning"):
            if fit_config(draft, architecture, model_dir, self.machine) is not None:
                return
            smaller = find_smaller(architecture, self.machine)
        smallest = " or ".join(f"--model {name}" for name in smaller)
        remedy = f"Choose a smaller model: {smallest}; or" if smaller else "Use"
        raise ConfigError(
            f"--model {self.model}: {format_weights(count_weights(architecture))} weights do not fit in this machine "
            f"({self.machine.describe()}) with rows of {draft.parse().data.row_tokens:,} tokens, whatever the layout. "
            f"{remedy} a machine with more or larger GPUs (docs/clusters.md)."
        )

    def _require_space(self, plan: Plan) -> None:
        storage = plan.estimate.storage
        needed, free = storage.checkpoints_bytes + storage.export_bytes, shutil.disk_usage(self.out).free
        self.say(f"  disk: about {needed / _GIB:.1f} GiB of {free / _GIB:.1f} GiB that are free")
        if needed > free:
            raise ConfigError(
                f"--out {self.out}: its disk has {free / _GIB:.1f} GiB free, and the run writes about "
                f"{needed / _GIB:.1f} GiB (checkpoints {storage.checkpoints_bytes / _GIB:.1f}, export "
                f"{storage.export_bytes / _GIB:.1f}). Free some space, or choose --out on another disk."
            )

    def _check_config(self, planned: dict[str, Any]) -> None:
        """Say that the config was edited, and refuse it if the result was trained without the edit."""
        config = self.config
        if not config.exists:
            raise ConfigError(f"{config.path}: is gone, and the result was trained with it. Choose another --out.")
        trained = self.progress.find("train")
        if trained is not None and trained["config"] not in (config.digest(), config.training_digest()):
            raise ConfigError(
                f"{config.path}: was edited after training. Train it with `fctune train "
                f"{shlex.quote(str(config.path))} output_dir=ANOTHER`, or undo the edit."
            )
        if trained is None and self._list_edits(planned) != []:
            self.say(f"{config.path} was edited: trained as it is", "yellow")
            self._check_gate()
        judged = self.progress.find("gate")
        if judged is not None and judged.get("settings") not in (None, config.gate_digest()):
            self.say(f"the gate section of {config.path} was edited: judged again", "yellow")
            self.progress.forget("gate")

    def _list_edits(self, planned: dict[str, Any]) -> list[str] | None:
        """Return overrides for what was edited in the config; None: unknown, of a plan by an older version."""
        if "values" in planned:
            return self.config.list_edits(planned["values"])
        return [] if planned["config"] == self.config.digest() else None

    def _record_repeat(self, planned: dict[str, Any]) -> None:
        """Record the command that trains again with the edits; what ``fctune tune`` cannot set, ``train`` can."""
        from fctune.runs.directory import find_typed_command

        if (typed := find_typed_command()) is None:
            return
        edits = self._list_edits(planned)
        try:
            for word in edits or ():
                _check_setting(word)
        except ConfigError:
            edits = None
        if edits is None:
            self.progress.set_repeat(["fctune", "train", str(self.config.path)])
            return
        keys = set(map(_read_key, edits))
        self.progress.set_repeat([*(word for word in typed if _read_key(word) not in keys), *edits])

    def _check_gate(self, cases: Sequence[Case] | None = None, config: RunConfig | None = None) -> None:
        """Check the settings of the gate, of the written config unless one is given.

        Raises:
            ConfigError: They would be refused after training.
        """
        from fctune.apps.gate.plan import check_settings
        from fctune.config.sections.gate import GateConfig
        from fctune.models.run_config import load_run_config
        from fctune.tasks.suite import Suite

        config = config or load_run_config(self.out / _CONFIG)
        suite = None if cases is None else Suite("held_out", tuple(cases))
        check_settings(config.gate or GateConfig(), suite)

    def _update_gate(self, found: dict[str, Any]) -> None:
        """Rewrite the gate section of the config if the command's settings of it changed after training began."""
        words = split_settings(self.arguments.settings)[GATE_SETTINGS]
        planned = found["plan"]
        if planned.get("gate", words) == words:
            return
        draft, _, _ = self._draft_sized(found)
        self._check_gate(config=draft.parse())
        was_edited = planned["config"] != self.config.digest()
        self.progress.write(_CONFIG, self.config.with_gate_of(draft.render("")))
        changed: dict[str, Any] = {"gate": words}
        if not was_edited:
            changed["config"] = self.config.digest()
        if "values" in planned:
            others = {name: value for name, value in planned["values"].items() if name != "gate"}
            changed["values"] = others | {name: value for name, value in draft.values.items() if name == "gate"}
        self.progress.amend("plan", **changed)
        found["plan"] = planned | changed
        if self.progress.find("train") is not None:
            self.progress.amend("train", config=self.config.training_digest())

    def _train(self, planned: dict[str, Any]) -> int:
        """Train, or resume training; returns the run's exit code."""
        path = self.out / _CONFIG
        if self.progress.find("train") is not None:
            if RunFiles(self.out / RUN).export.is_dir():
                self._do("train", dict)
                return 0
            self.say(f"train: {RunFiles(self.out / RUN).export} is gone; trained again", "yellow")
        from fctune.models.run_config import load_run_config
        from fctune.training.launcher import launch_recipe

        digest = self.config.training_digest()
        config = load_run_config(path)
        processes = self.machine.num_processes
        self.say(f"train: {format_count(processes, 'process', 'processes')}; Ctrl-C saves", "bold")
        recipe = shipped_dir("recipes") / f"{config.recipe}.py"
        code = launch_recipe(recipe, ["--config", str(path)], processes, self.out / RUN, show_progress)
        if code == 0:
            self.progress.finish("train", {"config": digest})
            if RunFiles(self.out / RUN).stop_file.exists():  # asked for too late to end the training
                raise KeyboardInterrupt
        else:
            why = "training was stopped" if code == 75 else f"training ended with code {code} (above)"
            how = (
                f"correct {path} or the command, and re-run it" if code == 2 else "re-run the same command to resume it"
            )
            show_progress(f"{why}; {how}")
        return code

    def _command(self) -> str:
        from fctune.runs.directory import find_typed_command

        typed = find_typed_command()
        return shlex.join(typed) if typed else f"fctune tune --data {' '.join(self.arguments.data)}"


def make_machine_plan(config: RunConfig, machine: Machine) -> Plan:
    """Plan a run on a machine. Of processors, the time is that of the arithmetic at the rate that was timed."""
    from fctune.apps.plan.plan import make_plan
    from fctune.apps.plan.request import PlanRequest

    if machine.num_gpus:
        request = PlanRequest(gpu=machine.gpu, gpus_per_node=machine.num_gpus, shared_gib=0, network_gib=0)
    else:
        request = PlanRequest(
            gpu=machine.gpu, gpus_per_node=1, shared_gib=0, network_gib=0, efficiency=1.0, price=0.0, startup_min=0.25
        )
    return make_plan(config, request)


def describe_plan(plan: Plan, machine: Machine) -> list[str]:
    """Return memory, time and cost of a plan, one line each."""
    footprint, memory = plan.peak.footprint.total / _GIB, machine.gpu.memory_bytes / _GIB
    each = "" if machine.num_gpus <= 1 else " on each GPU"
    lines = [f"memory: {footprint:.1f} of {memory:.1f} GiB{each}"]
    hours, steps = plan.estimate.hours, format_count(plan.num_steps or 0, "step")
    if hours is None or not machine.is_known:
        return [*lines, f"time: unknown for this GPU; {steps}"]
    if not machine.num_gpus:
        return [
            *lines,
            f"time: about {format_duration(3600 * hours)} for {steps}, if nothing else uses the processors; then the "
            "gate asks both models",
            "cost: that of this machine",
        ]
    low, high = (format_duration(3600 * bound) for bound in plan.hours_range or (hours, hours))
    lines.append(
        f"time: about {format_duration(3600 * hours)} for {steps} ({low} to {high}); then the gate asks both models"
    )
    if plan.estimate.cost is None:
        return [*lines, "cost: no list price is known for this GPU"]
    return [*lines, f"cost: {plan.estimate.cost.gpus:.2f} USD if rented, at {plan.request.price:g} USD per GPU-hour"]


def _count_prepared(prepared: PreparedSet, num_cases: int) -> dict[str, int]:
    """Return the fields of ``PreparedFacts``."""
    held_out, _ = prepared.packs["validation"]
    return {
        "packs": prepared.num_packs("train"),
        "tokens": prepared.num_tokens("train"),
        "held_out": len(held_out),
        "cases": num_cases,
    }
