"""Measure whether a model calls the right function with the right arguments: ``fctune eval``.

    python -m eval.tool_calls --model MODEL --suite smoke|synthetic|bfcl|FILE [--out FILE]
    torchrun --nproc_per_node 8 -m eval.tool_calls --model MODEL --suite bfcl
    tune run --nproc_per_node 8 eval/tool_calls --config FILE

MODEL is a Hugging Face directory, the output directory of a run or of an adapter, hf:NAME, or the URL of a server with
OpenAI's chat completions (its key in FCTUNE_API_KEY). Answers are read in the call format of the model's chat template,
strictly and as serving engines do, and compared with the expected calls: names and typed arguments, in any order. In
BFCL's multi-turn cases the calls are made on the benchmark's simulated classes, by name from an allow-list, until the
model makes no more. Code that a model writes is never executed.

Held-out dialogues are SUITEs too: environment:NAMES:TASKS, mcp:FILE, verifiers:FILE and recorded:ROWS, which
reinforcement trains on; and agent:FILE, all tasks of the file.

Each case is written to --out as it finishes; re-run the same command to resume.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, TaskID

from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.terminal import escape_controls
from fctune.calls.answers import LEFT_IN_TEXT
from fctune.calls.formats.base import CallFormat
from fctune.calls.formats.registry import FORMATS, get_format
from fctune.cli.eval_options import find_suite
from fctune.cli.tables import (
    make_console,
    make_reasoning_table,
    make_score_table,
    print_defects,
    print_figures,
    print_leaderboard,
    print_not_run,
)
from fctune.config.intervals import format_count
from fctune.config.loading import format_problems, read_environment
from fctune.config.parsing import parse_dataclass
from fctune.config.sections.rollouts import AGENT, DialogueConfig, is_dialogue_source
from fctune.engines.engine import Engine, Sampling
from fctune.engines.http_client import RetryPolicy
from fctune.engines.model_files import ModelFiles, is_server
from fctune.engines.opening import find_files
from fctune.engines.opening import open_engine as open_named_engine
from fctune.tasks.evaluation.held_out import find_leaks
from fctune.tasks.evaluation.results import ResultsFile
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.judge import Row, is_measured
from fctune.tasks.sampling.selection import write_proposals
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import benchmark_of, load_suite
from fctune.tasks.task import Task

if TYPE_CHECKING:
    from fctune.base.distributed import World
    from fctune.data.chat_template import ChatTemplate
    from fctune.tasks.episode import EpisodeLimits
    from fctune.tasks.rollouts import RolloutSettings, TaskSet

_NUM_SHOWN = 5
_MAX_NEW_TOKENS = 256


def run(arguments: argparse.Namespace) -> int:
    """Evaluate a model; 0 done, 1 below --min-accuracy or with unanswered cases, 2 wrong usage or input."""
    return run_in_world(lambda world: _run(arguments, world))


def run_in_world(work: Callable[[World | None], int]) -> int:
    """Join the other processes of torchrun, if any, work and leave them; returns the exit code, 2 after an error.

    An error that every rank raises is printed once.
    """
    world = None
    try:
        world = _join_world()
        code = work(world)
    except (ConfigError, DataError, CheckpointError) as error:
        if world is None or world.is_main:  # every rank raises it
            print(escape_controls(str(error)), file=sys.stderr)
        return 2
    if world is not None:
        from fctune.base.distributed import shutdown_distributed

        shutdown_distributed()
    return code


def _join_world() -> World | None:
    """Join the process group of torchrun; None if this is the only process."""
    if int(read_environment().get("WORLD_SIZE", "1")) == 1:
        return None
    from fctune.base.distributed import init_distributed

    return init_distributed()


def _run(arguments: argparse.Namespace, world: World | None) -> int:
    if is_dialogue_source(arguments.suite):
        return _run_dialogues(arguments, world)
    suite = open_suite(arguments, has_multi_turn=True)
    if arguments.propose is not None and (name := benchmark_of(suite)) is not None:
        raise ConfigError(
            f"--propose: {suite.name} belongs to a benchmark ({name}), which training on its failures would make "
            "useless. Propose from a suite of your own."
        )
    if _has_leaks(arguments, suite.all_cases, world) and arguments.strict_leaks:
        return 1
    rows, settings, results = ask(arguments, suite, world)
    if rows is None:
        return 0
    summary = {"model": arguments.model, "adapter": arguments.adapter, **summarise_run(suite, rows, settings)}
    return _report(arguments, suite, rows, summary, results, f"tool-call accuracy of {arguments.model} on {suite.name}")


def _report(
    arguments: argparse.Namespace,
    suite: Suite | None,
    rows: list[Row],
    summary: dict[str, Any],
    results: ResultsFile,
    title: str,
) -> int:
    """Write the summary and the other outputs, and print them; returns the exit code. Dialogues have no suite."""
    results.write_summary(summary)
    console = make_console()
    console.print(make_score_table(title, summary))
    if summary["reasoning"]:
        console.print(make_reasoning_table("reasoning", summary["reasoning"]))
    print_defects(console, summary["defects"])
    print_figures(console, summary.get("figures"))
    print_leaderboard(console, summary)
    print_not_run(console, summary["not_run"])
    console.print(f"results: {results.path}", soft_wrap=True)
    _write_exports(arguments, console, suite, rows, summary)
    _warn_of_unparsed_calls(console, rows, summary)
    return _judge_run(arguments, console, summary)


def _run_dialogues(arguments: argparse.Namespace, world: World | None) -> int:
    """Evaluate the held-out side of tasks that reinforcement trains on."""
    problems: list[str] = []
    config: DialogueConfig | None = parse_dataclass(DialogueConfig, arguments.dialogue or {}, "", problems)
    if config is None or problems:
        raise ConfigError(format_problems("--dialogue", problems))
    if config.replay is not None:
        raise ConfigError("--dialogue: replay has no results for the calls of another model. Leave it out.")
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = _MAX_NEW_TOKENS
    named, files = check_model(arguments, world)
    # torch is imported below; paths and names are checked by now.
    from fctune.tasks.episode import EpisodeLimits
    from fctune.tasks.evaluation.dialogues import (
        describe_dialogues,
        name_dialogues,
        run_dialogues,
        summarise_dialogues,
    )
    from fctune.tasks.rollouts import RolloutSettings

    name, console = name_dialogues(arguments.suite), make_console()
    rank, world_size = (world.rank, world.world_size) if world else (0, 1)
    results = ResultsFile(arguments.out or default_out(arguments, f"{name}.jsonl"), rank, world_size)
    is_agent = arguments.suite.startswith(AGENT)
    limits = EpisodeLimits(arguments.max_new_tokens, None if is_agent else config.max_turns)
    template = None
    if is_agent:  # which is kept as token ids, as in training
        assert files is not None
        template, limits = _prepare_agents(arguments, files, limits)
    tasks = _open_dialogues(arguments, config, RolloutSettings(template, limits), console, world)
    try:
        opened = _limit_tasks([tasks.open(task_id) for task_id in tasks.ids], arguments.limit)
        known = [task for task in opened if task.questions]  # an environment's are held out by their names
        if known and _has_leaks(arguments, known, world) and arguments.strict_leaks:
            return 1
        ids = [task.id for task in opened]
        engine, call_format = open_engine(arguments, files, named, world, keeps_tokens=is_agent)
        settings = describe_dialogues(name, tasks, len(ids), engine, call_format, arguments.max_new_tokens, config)
        show = console.is_terminal and rank == 0
        with Progress(console=console, transient=True) if show else nullcontext() as progress:
            shown = progress.add_task(format_count(len(ids), "dialogue")) if progress else TaskID(0)
            rows = run_dialogues(
                tasks,
                ids,
                engine,
                call_format,
                limits,
                results,
                settings,
                num_at_once=4 * arguments.concurrency if is_server(arguments.model) else arguments.batch_size,
                is_fresh=arguments.fresh,
                world=world,
                on_row=lambda row, done, total: (
                    progress.update(shown, completed=done, total=total) if progress else None
                ),
            )
    finally:
        tasks.close()
    if rows is None:
        return 0
    summary = {"model": arguments.model, "adapter": arguments.adapter, **summarise_dialogues(name, rows, settings)}
    measured = [row for row in rows if is_measured(row)]
    return _report(arguments, None, measured, summary, results, f"tasks of {name} that {arguments.model} solves")


def _prepare_agents(
    arguments: argparse.Namespace, files: ModelFiles, limits: EpisodeLimits
) -> tuple[ChatTemplate, EpisodeLimits]:
    """Return the model's chat template, and the limits with the model's context as that of an agent's prompts."""
    from fctune.data.chat_template import ChatTemplate
    from fctune.models.sources import read_architecture

    template = ChatTemplate(
        files.tokenizer_dir, template_args=arguments.template_args, chat_template=arguments.chat_template
    )
    return template, replace(limits, max_tokens=read_architecture(files.model_dir).max_position_embeddings)


def _open_dialogues(
    arguments: argparse.Namespace,
    config: DialogueConfig,
    settings: RolloutSettings,
    console: Console,
    world: World | None,
) -> TaskSet:
    """Open the held-out tasks on every rank; those of an agent are all that its file has."""
    from fctune.tasks.sampling.task_sets import open_dialogue_tasks

    def log(line: str) -> None:
        if world is None or world.is_main:
            console.print(line, style="yellow", soft_wrap=True, highlight=False)

    def open_here() -> TaskSet:
        tasks = open_dialogue_tasks(arguments.suite, config, settings, split="test", log=log)
        if world is not None and tasks.is_exclusive:
            tasks.close()
            raise ConfigError(
                f"--suite {arguments.suite}: dialogues reset one server, which {world.world_size} processes would "
                "share. Use one process."
            )
        return tasks

    if world is None:
        return open_here()
    from fctune.base.distributed import run_on_all_ranks

    return run_on_all_ranks(open_here)


def _limit_tasks(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """Return the first tasks of each category."""
    seen: Counter[str] = Counter()
    kept = []
    for task in tasks:
        seen[task.category] += 1
        if limit is None or seen[task.category] <= limit:
            kept.append(task)
    return kept


def _has_leaks(arguments: argparse.Namespace, cases: Sequence[Task], world: World | None) -> bool:
    """Report cases that are in the run's training data; True if there are any, or if that cannot be known.

    Only one process reads the training data; every one gets the answer.
    """
    if world is None:
        return _report_leaks(arguments, cases)
    from fctune.base.distributed import run_on_rank_0

    return run_on_rank_0(lambda: _report_leaks(arguments, cases))


def _report_leaks(arguments: argparse.Namespace, cases: Sequence[Task]) -> bool:
    if is_server(arguments.model) or (leaks := find_leaks(cases, arguments.model, arguments.adapter)) is None:
        return False
    lines = [f"{path}: cannot be compared with the cases ({reason})" for path, reason in leaks.unread.items()]
    if num_leaked := len(leaks.case_ids):
        more = ", ..." if num_leaked > _NUM_SHOWN else ""
        lines.append(
            f"{num_leaked:,} of {format_count(len(cases), 'case')} are in the training data of {leaks.run}: "
            f"{', '.join(leaks.case_ids[:_NUM_SHOWN])}{more}. Their accuracy says nothing about new questions."
        )
    console = make_console()
    for line in lines:
        console.print(line, style="bold red", soft_wrap=True, highlight=False)
    if not lines:
        console.print(f"none of the cases is in the training data of {leaks.run}", soft_wrap=True)
    return bool(lines)


def ask(
    arguments: argparse.Namespace, suite: Suite, world: World | None = None
) -> tuple[list[Row] | None, dict[str, Any], ResultsFile]:
    """Run a suite on the model; returns the rows (on the main process), their settings and their file."""
    named, files = check_model(arguments, world)
    if suite.call_format is not None:
        if named is not None:
            raise ConfigError(
                f"--format {arguments.format}: the prompts of {suite.name} ask for a format. Leave it out."
            )
        named = suite.call_format
    rank, world_size = (world.rank, world.world_size) if world else (0, 1)
    results = ResultsFile(arguments.out or default_out(arguments, f"{suite.name}.jsonl"), rank, world_size)
    # torch is imported below; paths and names are checked by now.
    from fctune.tasks.evaluation.run import describe_run, run_suite

    engine, call_format = open_engine(arguments, files, named, world)
    console = make_console()
    show = console.is_terminal and rank == 0
    with Progress(console=console, transient=True) if show else nullcontext() as progress:
        task = progress.add_task(f"{format_count(len(suite.all_cases), 'case')}") if progress else TaskID(0)
        rows = run_suite(
            suite,
            engine,
            call_format,
            results,
            max_new_tokens=arguments.max_new_tokens,
            # More conversations than requests in flight, so that the server stays busy during the slowest answers.
            num_at_once=4 * arguments.concurrency if is_server(arguments.model) else arguments.batch_size,
            is_fresh=arguments.fresh,
            world=world,
            on_row=lambda row, done, total: progress.update(task, completed=done, total=total) if progress else None,
        )
    return rows, describe_run(suite, engine, call_format, arguments.max_new_tokens), results


def check_model(arguments: argparse.Namespace, world: World | None) -> tuple[CallFormat | None, ModelFiles | None]:
    """Return the call format that was named, if any, and the model's files, None for a server; imports no torch."""
    if is_server(arguments.model) and world is not None:
        raise ConfigError(f"--model {arguments.model}: only one process can query a server; raise --concurrency.")
    named = get_format(arguments.format) if arguments.format else None
    return named, find_files(arguments.model, arguments.adapter)


def open_suite(arguments: argparse.Namespace, has_multi_turn: bool = False) -> Suite:
    """Load the suite that --suite names: a built-in one or a file."""
    suite = load_suite(
        find_suite(arguments.suite),
        seed=arguments.seed,
        num_cases=arguments.num_cases,
        categories=arguments.categories,
        options=vars(arguments),
        has_plain_names=is_server(arguments.model) and arguments.format is None,
        has_multi_turn=has_multi_turn,
    ).select(limit=arguments.limit)
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = suite.max_new_tokens or _MAX_NEW_TOKENS
    if arguments.min_accuracy is not None and suite.benchmark is not None:
        raise ConfigError(f"--min-accuracy: {suite.benchmark} has no accuracy over all its categories. Leave it out.")
    return suite


def open_engine(
    arguments: argparse.Namespace,
    files: ModelFiles | None,
    named: CallFormat | None,
    world: World | None,
    keeps_tokens: bool = False,
) -> tuple[Engine, CallFormat | None]:
    """Open the model or server on every rank.

    Returns it with the call format of its text, None if the server parses the calls.
    """

    def open_here() -> tuple[Engine, CallFormat | None]:
        return open_named_engine(
            arguments.model,
            files,
            named,
            sampling=Sampling(arguments.temperature, arguments.seed or 0),
            template_args=arguments.template_args,
            chat_template=arguments.chat_template,
            batch_size=arguments.batch_size,
            device=world.device if world else None,
            served_model=arguments.served_model,
            concurrency=arguments.concurrency,
            request=arguments.request,
            retry_policy=RetryPolicy(max_attempts=arguments.attempts, timeout_s=arguments.timeout),
            keeps_tokens=keeps_tokens,
        )

    if world is None:
        return open_here()
    from fctune.base.distributed import run_on_all_ranks

    return run_on_all_ranks(open_here)


def default_out(arguments: argparse.Namespace, file: str, kind: str = "eval") -> Path:
    """Return where the answers of a model are written by default."""
    name = str(arguments.model).split("://")[-1].strip("/").replace(":", "_").replace("/", "_")
    return Path("runs") / kind / (name + ("_adapter" if arguments.adapter else "")) / file


def _write_exports(
    arguments: argparse.Namespace, console: Console, suite: Suite | None, rows: list[Row], summary: dict[str, Any]
) -> None:
    if arguments.html is not None:
        from fctune.apps.report.eval_page import write_eval_html

        _write("--html", arguments.html, lambda path: write_eval_html(summary, rows, path))
        console.print(f"page: {arguments.html}", soft_wrap=True)
    if arguments.propose is not None and suite is not None:
        count = _write("--propose", arguments.propose, lambda path: write_proposals(suite, rows, path))
        console.print(f"{format_count(count, 'draft row')} to review: {arguments.propose}", soft_wrap=True)


def _write(option: str, path: Path, write: Any) -> Any:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(path)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}).") from None


def _warn_of_unparsed_calls(console: Console, rows: list[Row], summary: dict[str, Any]) -> None:
    """Warn of calls that a server left in its text: all of them, without its parser, or some that it could not read."""
    if summary["settings"]["format"] != "served":
        return
    matching = []
    if not any(row["calls"] for row in rows):
        texts = [row["answer"] for row in rows if row["answer"] and row["tools"]]
        matching = [name for name, one in FORMATS.items() if any(one.parse(text).calls for text in texts)]
    num_left = sum(any(one["reason"] == LEFT_IN_TEXT for one in row["malformed"]) for row in rows)
    if matching:
        option = f"--format {matching[0]}" if len(matching) == 1 else "that of the model's template with --format"
        message = (
            f"The server sent no calls, only text that can be parsed as calls in {', '.join(matching)}: "
            f"pass {option}, or start the server with its tool-call parser."
        )
    elif num_left:
        holds = format_count(num_left, "answer holds", "answers hold")
        message = f"{holds} a call that the server sent as content: judged malformed, since clients get no call."
    else:
        return
    console.print(message, style="yellow", soft_wrap=True)


def _judge_run(arguments: argparse.Namespace, console: Console, summary: dict[str, Any]) -> int:
    code = 0
    if num_unanswered := summary["num_no_answer"]:
        hint = "; re-run the same command to ask them again" if is_server(arguments.model) else ""
        message = f"{num_unanswered:,} of {summary['num_cases']:,} cases have no answer and count as wrong{hint}"
        console.print(message, style="bold red", soft_wrap=True)
        code = 1 if is_server(arguments.model) else 0
    if num_failed := summary.get("num_not_measured"):
        tasks = format_count(num_failed, "task was", "tasks were")
        message = f"{tasks} not measured; re-run the same command to ask them again"
        console.print(message, style="bold red", soft_wrap=True)
        code = 1
    if arguments.min_accuracy is not None:
        accuracy = summary["scores"]["all"]["rates"]["accuracy"]["rate"]
        if accuracy < arguments.min_accuracy:
            console.print(
                f"accuracy {accuracy:.1%} is below --min-accuracy {arguments.min_accuracy:.0%}", style="bold red"
            )
            code = 1
    return code
