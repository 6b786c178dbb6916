"""Check an exported model: files, finite weights, chat template, call format, and a tool call: ``fctune validate``.

    python -m eval.validate DIR [--like MODEL] [--format NAME] [--suite smoke | --no-calls] [--json FILE]

DIR is a model directory, or the output directory of a run or a tune, whose export/merged is checked and compared with
export/adapter on the run's base. --like is a model, named as in eval.tool_calls, whose logits DIR should reproduce.
Exit code 0 if every check passes, 1 if one fails, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from fctune.base.errors import ConfigError
from fctune.cli import evaluate
from fctune.cli.eval_options import parse_eval_arguments
from fctune.cli.files import write_file
from fctune.cli.tables import make_console
from fctune.engines.model_files import ModelFiles, find_model
from fctune.runs.tune_directory import find_run_dir

if TYPE_CHECKING:
    from fctune.tasks.evaluation.validation import Check

_STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim"}


def run(arguments: argparse.Namespace) -> int:
    """Print the checks; 0 all pass, 1 one fails."""
    model_dir, like = _find(arguments)
    options = ["--num-cases", str(arguments.num_cases)] if arguments.num_cases else []
    eval_arguments = parse_eval_arguments(["--model", str(model_dir), "--suite", arguments.suite, *options])
    suite = None if arguments.no_calls else evaluate.open_suite(eval_arguments)
    # torch is imported here; paths and names are checked by now.
    from fctune.tasks.evaluation.validation import Validator

    validator = Validator(model_dir, like, arguments.format, suite, arguments.max_kl, arguments.max_new_tokens)
    console = make_console()
    checks: list[Check] = []
    for check in validator.run():
        checks.append(check)
        status = Text(f"{check.status:7}", _STYLES[check.status])
        console.print(status, f"{check.name:9} {check.detail}", soft_wrap=True, highlight=False)
    if arguments.json is not None:
        _write_json(arguments.json, checks)
    return 1 if any(check.status == "failed" for check in checks) else 0


def _find(arguments: argparse.Namespace) -> tuple[Path, ModelFiles | None]:
    """Return the model directory to check, and the model to compare it with."""
    path = find_run_dir(arguments.model)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory. Pass a model directory or a run's output directory.")
    merged, adapter = path / "export" / "merged", path / "export" / "adapter"
    model_dir = merged if merged.is_dir() else path
    if arguments.like is not None:
        return model_dir, find_model(arguments.like, arguments.like_adapter)
    if model_dir == merged and (adapter / "adapter_config.json").is_file():
        return model_dir, find_model(str(adapter))
    return model_dir, None


def _write_json(path: Path, checks: list[Check]) -> None:
    rows = [{"name": check.name, "status": check.status, "detail": check.detail} for check in checks]
    write_file(path, "--json", lambda: json.dumps(rows, indent=2) + "\n")
