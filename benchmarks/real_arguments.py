"""Command line of ``benchmarks.real_model`` and ``benchmarks.real_round``, and what is checked before any work."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real_measuring import NAMES
from benchmarks.real_rows import Mixture
from benchmarks.real_server import DEFAULT_OPTIONS, IS_SLOW_IN_BF16, wait_until_free
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.cli.parser import report_interrupt
from fctune.cli.serve import require_vllm
from fctune.config.loading import load_config
from fctune.data.chosen_template import open_chosen_template

_ROOT = Path(__file__).resolve().parents[1]
_SPARE_BYTES = 3 * 2**30


class ModelSettings(NamedTuple):
    """Defaults of the options by model, so that ``--model`` is enough.

    Attributes:
        config: Name of the shipped config, which also chooses the chat template.
        mixture: Numbers of rows in place of those of ``Mixture``.
        limit: Largest number of cases of each category.
    """

    config: str
    mixture: Mapping[str, int]
    limit: int


_GEMMA = ModelSettings("gemma3_270m_lora", {}, 100)
SETTINGS = {  # by model_type and hidden_size in config.json; others have those of Gemma 3 270M
    ("gemma3_text", 640): _GEMMA,
    # Each row and each case takes twice as long, and an hour on two cores is for both models and all prompts.
    ("qwen2", 896): ModelSettings(
        "qwen2_5_coder_0_5b_lora",
        {"public": 300, "guided": 20, "natural": 10, "seal_copies": 0, "glaive": 16, "no_call": 80, "twins": 55}
        | {"parallel": 15, "listed": 10, "joined": 10, "dialogues": 12, "synthetic": 10},
        40,
    ),
}


def check_inputs(arguments: argparse.Namespace) -> Path:
    """Check paths, disk and the model's tokenizer before any work, and return the model's directory.

    Raises:
        ConfigError: Something is missing; one sentence that says what, and what to do.
    """
    _check_options(arguments)
    return check_model(arguments, rows=("seal", "glaive"))


def check_model(arguments: argparse.Namespace, rows: Sequence[str] = ()) -> Path:
    """Set the options that follow from the model, check what measuring and training need, and return its directory.

    Args:
        arguments: The command line, whose config, limit, mixture and template are set.
        rows: Options that name rows.

    Raises:
        ConfigError: Something is missing; one sentence that says what, and what to do.
    """
    from fctune.data.chat_template import ChatTemplate
    from fctune.models.hub import resolve_model_dir

    _check_measuring(arguments)
    for option in rows:
        path = getattr(arguments, option)
        if path is None or not (path.startswith("hf:") or Path(path).exists()):
            raise ConfigError(
                f"--{option} {path}: no such rows. Pass a file of them in any row format that `fctune data check` "
                "reads, or hf:NAME."
            )
    model_dir = resolve_model_dir(arguments.model)
    if not (model_dir / "config.json").is_file() or not any(model_dir.glob("*.safetensors")):
        raise ConfigError(
            f"--model {arguments.model}: no config.json with *.safetensors next to it. Pass a Hugging Face model "
            "directory, or hf:NAME to download one."
        )
    _apply_settings(arguments, model_dir)
    # Rendering one prompt shows whether the tokenizer has what the template needs, such as an end-of-text token.
    template = ChatTemplate(model_dir, chat_template=open_chosen_template(arguments.chat_template, "--chat-template "))
    if not template.stop_ids:
        raise ConfigError(f"--chat-template {arguments.chat_template}: {model_dir} has no token that ends a turn.")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(arguments.out).free
    except OSError as error:
        raise ConfigError(f"--out {arguments.out}: cannot be written ({error.strerror}).") from None
    needed = 3 * sum(file.stat().st_size for file in model_dir.glob("*.safetensors")) + _SPARE_BYTES
    if free < needed:
        raise ConfigError(
            f"--out {arguments.out}: {free / 2**30:.1f} GiB are free, but checkpoints and exports need "
            f"{needed / 2**30:.1f}. Free some space, or pass a directory on another disk."
        )
    return model_dir


def _apply_settings(arguments: argparse.Namespace, model_dir: Path) -> None:
    """Set the options that were left out to those of the model."""
    raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    settings = SETTINGS.get((raw.get("model_type"), raw.get("hidden_size")), _GEMMA)
    arguments.config = arguments.config or _ROOT / "configs" / f"{settings.config}.yaml"
    if IS_SLOW_IN_BF16 and not any(key.startswith("precision=") for key in arguments.overrides):
        print("precision=fp32: this processor has no instructions for bfloat16", flush=True)
        arguments.overrides = ["precision=fp32", *arguments.overrides]
    arguments.limit = settings.limit if arguments.limit is None else arguments.limit
    if "mixture" in arguments:
        arguments.mixture = [*(f"{kind}={count}" for kind, count in settings.mixture.items()), *arguments.mixture]
    if arguments.chat_template is None:
        arguments.chat_template = load_config(arguments.config, arguments.overrides).model.chat_template


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.server is not None and arguments.only is None:
        raise ConfigError("--server: pass --only before or --only after to say which of the two models it serves.")
    if arguments.public_sets is not None and not arguments.public_sets.is_dir():
        raise ConfigError(
            f"--public-sets {arguments.public_sets}: no such directory. "
            "benchmarks/real_public_sets.py has the commands that make it."
        )
    if arguments.public_rows is not None and not arguments.public_rows.is_dir():
        raise ConfigError(
            f"--public-rows {arguments.public_rows}: no such directory. "
            "benchmarks/real_public_rows.py has the commands that make it."
        )


def _check_measuring(arguments: argparse.Namespace) -> None:
    for option, least in (("limit", 0), ("max_new_tokens", 1), ("batch_size", 1)):
        if (value := getattr(arguments, option)) is not None and value < least:
            raise ConfigError(f"--{option.replace('_', '-')} {value}: expected {least} or more.")
    if unknown := [name for name in arguments.categories if name not in NAMES]:
        raise ConfigError(f"--categories {unknown[0]}: expected {', '.join(NAMES)}.")
    if arguments.vllm is not None:
        if not 1 <= arguments.port <= 65535:
            raise ConfigError(f"--port {arguments.port}: expected 1 to 65535.")
        require_vllm(arguments.vllm, "--vllm")
        wait_until_free(arguments.port)


def run_benchmark(run: Callable[[], str]) -> int:
    """Run a benchmark and print what it returns, or in one sentence why it stopped.

    Returns:
        Exit code: 0 done, 2 wrong input or a failure, 130 interrupted.
    """
    try:
        print(run())
    except (ConfigError, DataError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename or 'a file'}: cannot be read or written ({error.strerror}).", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        return report_interrupt(interrupt)
    return 0


def make_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the options that ``benchmarks.real_model`` and ``benchmarks.real_round`` share."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=(description or "").split("\n")[0])
    add_model_options(parser)
    parser.add_argument("--seal", metavar="FILE", help="Seal-Tools rows")
    parser.add_argument("--glaive", metavar="FILE", help="Glaive rows")
    parser.add_argument("--public-rows", type=Path, metavar="DIR", help="clones of benchmarks/real_public_rows.py")
    parser.add_argument("--public-sets", type=Path, metavar="DIR", help="clones of benchmarks/real_public_sets.py")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="default: %(default)s")
    parser.add_argument("--only", choices=("before", "after"), help="measure only the base, or only the result")
    parser.add_argument("--server", metavar="URL", help="ask this server, not a model in process; needs --only")
    parser.add_argument("--rows", type=Path, metavar="DIR", help="rows and cases, shared by several runs")
    parser.add_argument("--mixture", nargs="*", default=[], metavar="KIND=N", help="rows by kind; see Mixture")
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of any benchmark that trains a real model and measures it, which ``check_model`` checks."""
    parser.add_argument("--model", required=True, metavar="DIR|hf:NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/real"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: that of the model, see SETTINGS")
    parser.add_argument("--chat-template", metavar="NAME", help="default: that of the config, or the model's own")
    limit = "at most N cases of each category; 0: all; default: see SETTINGS"
    parser.add_argument("--limit", type=int, metavar="N", help=limit)
    parser.add_argument("--categories", nargs="+", default=[], metavar="NAME", help="what to measure; default: all")
    parser.add_argument("--vllm", metavar="PYTHON", help="serve the models with the vLLM of this Python, and ask that")
    parser.add_argument("--vllm-options", default=DEFAULT_OPTIONS, metavar="OPTIONS", help='default: "%(default)s"')
    parser.add_argument("--port", type=int, default=8190, metavar="N", help="of that server; default: %(default)s")
    parser.add_argument("--bfcl-data", metavar="DIR", help="default: that of the installed bfcl-eval")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N", help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the config")


def parse_mixture(pairs: Sequence[str]) -> Mixture:
    """Return the mixture with the named numbers changed.

    Raises:
        ConfigError: A name is not a kind of row, or its value not a number.
    """
    kinds: dict[str, type] = {name: type(default) for name, default in dataclasses.asdict(Mixture()).items()}
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            changes[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise ConfigError(f"--mixture {pair}: expected KIND=NUMBER with one of {', '.join(kinds)}.") from None
    return Mixture(**changes)
