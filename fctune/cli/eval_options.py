"""Options of ``fctune eval``, ``compare``, ``validate``, ``throughput`` and ``parser-accuracy``, without their imports.

``python -m eval.tool_calls`` and its siblings are these commands under another name. The modules that do the work
import torch, so each is imported when its command runs; ``--help`` and wrong usage are answered without it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.terminal import escape_controls
from fctune.cli.parser import Parser, add_template_args_argument, report_interrupt
from fctune.config.chat_templates import list_shipped_templates
from fctune.config.loading import read_environment
from fctune.config.sections.rollouts import AGENT, ENVIRONMENT, find_source_problems, is_dialogue_source
from fctune.config.shipped import resolve_shipped_path, shipped_dir
from fctune.config.yaml_text import parse_yaml
from fctune.engines.model_files import check_model_paths, is_server
from fctune.tasks.benchmarks import find_benchmarks, find_suite_files

_SERVERS = ("vllm", "sglang")


def add_commands(commands: Any) -> None:
    """Add the evaluation commands to ``fctune``."""
    for name, (summary, add_options, _) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        add_options(command)
        command.set_defaults(run=_runner(name), command_parser=command)


def run_module(name: str, prog: str, argv: Sequence[str] | None = None) -> int:
    """Run an evaluation command as ``python -m eval.<module>``; returns its exit code."""
    summary, add_options, _ = _COMMANDS[name]
    parser = Parser(prog=prog, description=summary)
    add_options(parser)
    parser.set_defaults(command_parser=parser)
    try:
        arguments = apply_options_file(parser, parser.parse_args(argv), argv)
        return _runner(name)(arguments)
    except (ConfigError, DataError, CheckpointError) as error:
        if read_environment().get("RANK", "0") == "0":  # every rank of torchrun raises it
            print(escape_controls(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        return report_interrupt(interrupt)


def parse_eval_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of ``fctune eval``, for commands that open a suite or query a model the same way."""
    parser = argparse.ArgumentParser(prog="fctune eval")
    _add_eval_options(parser)
    parser.set_defaults(command_parser=parser)
    return apply_options_file(parser, parser.parse_args(argv), argv)


def apply_options_file(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parse ``argv`` again with the options of its ``--config`` file as defaults; the command line wins.

    Raises:
        ConfigError: The file cannot be read, or holds an unknown option.
    """
    if getattr(arguments, "options_file", None) is None:
        return arguments
    arguments.command_parser.set_defaults(**_read_options(arguments.options_file, arguments.command_parser))
    return parser.parse_args(argv)


def find_suite(name: str) -> Path:
    """Find an evaluation suite by the name of one that comes with fctune, or by its path.

    Raises:
        ConfigError: There is no such suite.
    """
    if is_dialogue_source(name):
        raise ConfigError(f"--suite {name}: dialogues are asked by fctune eval only. Pass a suite or a file of cases.")
    built_in = {path.stem: path for path in (shipped_dir("eval") / "suites").glob("*.yaml")} | find_suite_files()
    path = built_in.get(name, Path(name))
    if not path.exists():
        known = ", ".join(sorted(built_in))
        raise ConfigError(f"--suite {name}: no such file, and no suite of that name; known: {known}.")
    return path


def _check_inputs(name: str, arguments: argparse.Namespace) -> None:
    """Check paths before the imports of the command that uses them, which take seconds."""
    if name == "compare":
        return
    for model in arguments.model if isinstance(arguments.model, list) else [arguments.model]:
        if name == "validate":  # which reports what an incomplete directory lacks
            if not Path(model).is_dir():
                raise ConfigError(f"{model}: no such directory. Pass a model directory.")
        else:
            check_model_paths(model, getattr(arguments, "adapter", None))
    if name == "eval" and is_dialogue_source(arguments.suite):
        _check_dialogue_options(arguments)
    elif name == "eval" and arguments.dialogue is not None:
        raise ConfigError(
            "--dialogue: limits dialogues of environment:, mcp:, verifiers: or recorded: tasks only. Leave it out."
        )
    else:
        find_suite(arguments.suite)


def _check_dialogue_options(arguments: argparse.Namespace) -> None:
    """Check the source of dialogues, and that no option is given that they do not have."""
    if problems := find_source_problems(arguments.suite, "--suite "):
        raise ConfigError(f"{problems[0]}.")
    donor = argparse.ArgumentParser(add_help=False)
    add_benchmark_options(donor)
    refused = {option for action in donor._actions for option in action.option_strings}
    refused |= {option for benchmark in find_benchmarks().values() for option in benchmark.eval_only_options}
    refused |= {"--categories", "--num-cases", "--propose"}
    refused |= {"--limit"} if arguments.suite.startswith(ENVIRONMENT) else set()
    if arguments.suite.startswith(AGENT):
        refused |= {"--dialogue", "--request", "--seed"}  # limits are the file's, seeds those of the tasks
        if is_server(arguments.model):
            raise ConfigError(
                f"--model {arguments.model}: agents are evaluated with a model in this process. Pass its directory."
            )
    defaults = argparse.ArgumentParser(add_help=False)
    _add_eval_options(defaults)
    for action in defaults._actions:
        if refused.intersection(action.option_strings) and getattr(arguments, action.dest) != action.default:
            hint = ", which names its number of tasks" if "--limit" in action.option_strings else ""
            raise ConfigError(f"{action.option_strings[0]}: not for {arguments.suite}{hint}. Leave it out.")


def _runner(name: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        for option in ("model", "suite") if name == "eval" else ():
            if getattr(arguments, option) is None:
                arguments.command_parser.error(f"the following arguments are required: --{option}")
        _check_inputs(name, arguments)
        code: int = import_module(_COMMANDS[name][2]).run(arguments)
        return code

    return run


def _add_eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", dest="options_file", metavar="FILE", help="YAML of these options; the command line wins"
    )
    parser.add_argument(
        "--model", type=resolve_shipped_path, help="directory, run, adapter, hf:NAME or http(s)://HOST:PORT"
    )
    suite = parser.add_argument_group("cases")
    suite.add_argument(
        "--suite",
        "--cases",
        dest="suite",
        help=f"{_describe_suites()}, or held-out dialogues: environment:NAMES:TASKS, mcp:FILE, verifiers:FILE, "
        "recorded:ROWS or agent:FILE",
    )
    suite.add_argument("--categories", type=_to_names, default=[], help="only these categories, comma-separated")
    suite.add_argument("--limit", type=int, metavar="N", help="only the first N cases of each category")
    suite.add_argument("--num-cases", type=int, metavar="N", help="number of cases of a synthetic suite")
    suite.add_argument(
        "--dialogue", type=_to_object, metavar="JSON", help='limits of dialogues, as grpo.dialogue: {"max_turns": 12}'
    )
    suite.add_argument("--seed", type=int, help="seed of a synthetic suite's cases and of sampling")
    for benchmark in find_benchmarks().values():
        benchmark.add_eval_options(suite)
    generation = parser.add_argument_group("generation and parsing")
    generation.add_argument("--adapter", metavar="DIR", help="PEFT adapter directory to load on top of --model")
    names = ", ".join(list_shipped_templates())
    generation.add_argument(
        "--chat-template", metavar="NAME", help=f"template in place of the model's own: {names}, or a file"
    )
    add_template_args_argument(generation)
    generation.add_argument(
        "--format", help="call format; default: detected from the chat template, or parsed by the server"
    )
    generation.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="most tokens of an answer; default: the benchmark's, or 256"
    )
    generation.add_argument("--temperature", type=float, default=0.0, help="0: greedy; default: %(default)s")
    generation.add_argument("--batch-size", type=int, default=64, help="prompts per batch, in process; default: 64")
    server = parser.add_argument_group("servers")
    server.add_argument("--served-model", metavar="NAME", help="model name to request; default: the one it serves")
    server.add_argument("--concurrency", type=int, default=16, help="requests in flight; default: %(default)s")
    server.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="limit of one attempt")
    server.add_argument("--attempts", type=int, default=5, help="attempts per request; default: %(default)s")
    server.add_argument(
        "--request", type=_to_object, metavar="JSON", help='merged into each request: {"tool_choice": "none"}'
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", metavar="FILE", help="one JSON line per case, summary next to it; default: runs/eval/MODEL/SUITE.jsonl"
    )
    output.add_argument("--fresh", action="store_true", help="discard existing results and query every case again")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page of the results")
    output.add_argument("--propose", type=Path, metavar="FILE", help="write failures as draft rows for review (JSONL)")
    output.add_argument("--min-accuracy", type=float, metavar="X", help="exit 1 below this accuracy, e.g. 0.85")
    output.add_argument(
        "--strict-leaks", action="store_true", help="exit 1, before asking, if the run was trained on any of the cases"
    )


def _describe_suites() -> str:
    return f"smoke, synthetic, {', '.join(find_benchmarks())}, or a file (YAML, or JSONL cases)"


def _add_compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="BEFORE.jsonl", help="results of fctune eval --out, tau2-bench or ACEBench")
    parser.add_argument("after", metavar="AFTER.jsonl", help="results to compare with them")
    parser.add_argument("--lenient", action="store_true", help="compare the lenient reading")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="list N changed cases of each category")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison with every changed case")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as one self-contained page")


def _add_validate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=resolve_shipped_path, metavar="DIR", help="model directory, or a run's output directory"
    )
    parser.add_argument("--like", metavar="MODEL", help="model whose logits the export must reproduce")
    parser.add_argument("--like-adapter", metavar="DIR", help="adapter to load on top of --like")
    parser.add_argument("--max-kl", type=float, help="largest KL divergence; default: 1e-6 in fp32, 5e-3 in bf16")
    parser.add_argument("--format", help="call format its chat template must use")
    parser.add_argument("--suite", "--cases", dest="suite", default="smoke", help="cases to run; default: %(default)s")
    parser.add_argument("--num-cases", type=int, metavar="N", help="number of cases of a synthetic suite")
    parser.add_argument("--no-calls", action="store_true", help="check the files only; generate nothing")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the checks")


def _add_throughput_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=resolve_shipped_path,
        action="append",
        required=True,
        help="directory, run, hf:NAME or http(s)://HOST:PORT; repeatable",
    )
    parser.add_argument(
        "--widths", type=_to_widths, default=[1, 8, 32], help="concurrent prompts, comma-separated; default: 1,8,32"
    )
    parser.add_argument("--suite", "--cases", dest="suite", default="smoke", help="source of prompts; default: smoke")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="default: the largest width; repeated as needed")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per answer; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--served-model", metavar="NAME", help="model name to request; default: the one it serves")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")


def _add_parser_accuracy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=resolve_shipped_path, metavar="DIR", help="model directory, or a run's output directory"
    )
    parser.add_argument("--results", metavar="FILE", help="results of fctune eval for DIR; default: query DIR now")
    _add_eval_options_of_parser_accuracy(parser)
    for server in _SERVERS:
        variable = f"FCTUNE_{server.upper()}_PYTHON"
        python = read_environment().get(variable) or sys.executable
        parser.add_argument(
            f"--{server}-python",
            default=python,
            metavar="PATH",
            help=f"Python with {server}; default: {variable}, or this one",
        )
        parser.add_argument(
            f"--{server}-parser", metavar="NAME", help="the server's --tool-call-parser; default: the call format's"
        )
        parser.add_argument(
            f"--{server}-reasoning-parser",
            metavar="NAME",
            help="the server's --reasoning-parser; default: that of the template's reasoning, if it writes any",
        )


def add_case_and_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fctune eval`` that choose cases, the model or server, and generation."""
    left_out = {"--out", "--fresh", "--html", "--propose", "--min-accuracy", "--strict-leaks", "--dialogue"}
    _copy_eval_options(parser, left_out)
    parser.set_defaults(max_new_tokens=256)


def add_benchmark_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmarks, such as where their data is."""
    donor = argparse.ArgumentParser(add_help=False)
    for benchmark in find_benchmarks().values():
        benchmark.add_eval_options(donor.add_argument_group("cases"))
    _copy_options(parser, donor, set())


def _copy_eval_options(parser: argparse.ArgumentParser, left_out: set[str]) -> None:
    """Add the options of ``fctune eval`` but for some, and without dialogues, which only it asks."""
    donor = argparse.ArgumentParser(add_help=False)
    _add_eval_options(donor)
    for action in donor._actions:
        if action.dest == "suite":
            action.help = _describe_suites()
    _copy_options(parser, donor, left_out)


def _copy_options(parser: argparse.ArgumentParser, donor: argparse.ArgumentParser, left_out: set[str]) -> None:
    """Add the options of ``donor`` but for some, and the defaults of those that only ``fctune eval`` has."""
    eval_only = {option for benchmark in find_benchmarks().values() for option in benchmark.eval_only_options}
    for action in donor._actions:
        if eval_only.intersection(action.option_strings):
            parser.set_defaults(**{action.dest: action.default})
        elif not left_out.intersection(action.option_strings):
            parser._add_action(action)


def _add_eval_options_of_parser_accuracy(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fctune eval`` that choose cases and generation, with a default suite."""
    left_out = {"--model", "--config", "--html", "--propose", "--min-accuracy", "--strict-leaks", "--dialogue"}
    _copy_eval_options(parser, left_out)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each case's verdicts")
    parser.set_defaults(suite="smoke", min_accuracy=None)


def _to_names(text: str) -> list[str]:
    return text.split(",")


def _to_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _to_widths(text: str) -> list[int]:
    widths = [int(part) for part in text.split(",")]
    if min(widths) < 1:
        raise ValueError
    return widths


def _read_options(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read a YAML file of options as defaults of ``parser``."""
    try:
        options = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({' '.join(str(error).split())}).") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--config {path}: expected a mapping of options, such as model: and suite:.")
    defaults: dict[str, Any] = {}
    for key, value in options.items():
        action = parser._option_string_actions.get(f"--{str(key).replace('_', '-')}")
        if action is None:
            raise ConfigError(f"--config {path}: {key}: unknown option; see {parser.prog} --help.")
        if value is None:
            continue
        if isinstance(value, bool):
            defaults[action.dest] = value
        else:  # as text, which argparse converts and checks like the command line's
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            defaults[action.dest] = json.dumps(text) if isinstance(text, dict) else str(text)
    return defaults


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], str]] = {
    "eval": (
        "Measure whether a model calls the right function with the right arguments.",
        _add_eval_options,
        "fctune.cli.evaluate",
    ),
    "compare": (
        "Compare two evaluations of the same cases, such as a base model and its fine-tune.",
        _add_compare_options,
        "fctune.cli.compare",
    ),
    "validate": (
        "Check an exported model: files, weights, chat template, and whether it calls a tool.",
        _add_validate_options,
        "fctune.cli.validate",
    ),
    "throughput": (
        "Measure inference speed: time to first token, tokens per second, memory.",
        _add_throughput_options,
        "fctune.cli.throughput",
    ),
    "parser-accuracy": (
        "Measure accuracy as vLLM's and SGLang's own tool-call parsers read a model's answers.",
        _add_parser_accuracy_options,
        "fctune.cli.serving_accuracy",
    ),
}
