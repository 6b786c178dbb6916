"""``fctune config``: list, copy, show and check configs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from fctune.base.errors import ConfigError
from fctune.base.terminal import Terminal
from fctune.cli.parser import add_config_arguments
from fctune.config.composition import render_with_origins
from fctune.config.loading import compose_config, find_config
from fctune.config.parsing import suggest
from fctune.config.reference import json_schema
from fctune.config.schema import RunConfig
from fctune.config.shipped import find_shipped_config, list_shipped_configs, list_shipped_recipes
from fctune.models.run_config import load_run_config


def add_commands(commands: Any) -> None:
    """Add ``fctune config`` to the command."""
    group = commands.add_parser("config", help="list, copy, show and check configs").add_subparsers(
        required=True, metavar="COMMAND"
    )
    ls = group.add_parser("ls", help="list the configs and recipes that come with fctune")
    ls.set_defaults(run=_list)
    cp = group.add_parser("cp", help="copy a shipped config with those that it extends, or a recipe, to edit it")
    name = cp.add_argument("name", metavar="NAME", help="name of a config or recipe; see fctune config ls")
    name.completer = lambda **_: [path.stem for path in _list_shipped()]
    cp.add_argument(
        "destination", nargs="?", type=Path, default=Path(), help="file or directory; default: this directory"
    )
    cp.add_argument("--force", action="store_true", help="overwrite an existing file")
    cp.set_defaults(run=_copy)
    show = group.add_parser(
        "show", help="print a config with those that it extends and overrides applied, and where each value is from"
    )
    add_config_arguments(show)
    show.add_argument("--defaults", action="store_true", help="also print the keys that have their default")
    show.set_defaults(run=_show)
    schema = group.add_parser("schema", help="print the JSON Schema of a config, for editors")
    schema.set_defaults(run=_print_schema)
    check = group.add_parser("check", help="check a config without running it; exit 2 lists every problem")
    add_config_arguments(check)
    check.set_defaults(run=_check)


def _list_shipped() -> list[Path]:
    return [*list_shipped_configs(), *list_shipped_recipes()]


def _list(arguments: argparse.Namespace) -> int:
    table = Table(box=None, pad_edge=False)
    for column in ("name", "kind", "description"):
        table.add_column(column, no_wrap=column != "description")
    for path in _list_shipped():
        text = path.read_text(encoding="utf-8")
        comment = text.partition("\n\n")[0].partition("\n#\n")[0].replace("#", " ").strip('" ')
        sentence = " ".join(comment.split()).partition(". ")[0].rstrip(".")
        table.add_row(path.stem, "config" if path.suffix == ".yaml" else "recipe", sentence)
    Terminal(highlight=False).print(table)
    return 0


def _copy(arguments: argparse.Namespace) -> int:
    recipes = {path.stem: path for path in list_shipped_recipes()}
    source = find_shipped_config(arguments.name) or recipes.get(arguments.name.removesuffix(".py"))
    if source is None:
        close = suggest(arguments.name, [path.stem for path in _list_shipped()])
        raise ConfigError(f"{arguments.name}: no such config or recipe{close}. `fctune config ls` lists them.")
    target: Path = arguments.destination
    if target.is_dir() or not target.suffix:
        target = target / source.name
    if target.exists() and not arguments.force:
        raise ConfigError(f"{target}: exists; pass --force to overwrite it.")
    copies = {source: target}
    if source.suffix == ".yaml":
        for base in compose_config(source, RunConfig).files[:-1]:
            copy = target.parent / os.path.relpath(base, source.parent)
            if copy.exists() and copy.read_bytes() != base.read_bytes() and not arguments.force:
                raise ConfigError(f"{copy}: exists and differs from {base}; pass --force to overwrite it.")
            copies[base] = copy
    for original, copy in copies.items():
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, copy)
        except OSError as error:
            raise ConfigError(f"{copy}: cannot be written ({error.strerror}).") from None
        Terminal().print(str(copy), soft_wrap=True, highlight=False)
    has_rows = source.suffix == ".yaml" and "sources" in (compose_config(target, RunConfig).values.get("data") or {})
    if has_rows:
        print(f"to train on your rows: fctune train {shlex.quote(str(target))} --data FILE", file=sys.stderr)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    config = load_run_config(arguments.config, arguments.overrides)
    composition = compose_config(find_config(arguments.config), RunConfig)
    composition.apply_overrides(arguments.overrides, [])
    values = config.to_dict() if arguments.defaults else composition.values
    print(render_with_origins(values, composition), end="")
    return 0


def _print_schema(arguments: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    config = load_run_config(arguments.config, arguments.overrides)
    trains = "all weights" if config.adapter is None else "adapters"
    of = "" if config.preference is None else ", on preference pairs"
    of += "" if config.grpo is None else ", on verdicts on its own answers"
    of += "" if config.distill is None else ", on a teacher's distributions"
    print(f"{arguments.config}: valid (trains {trains} of {config.model.path}{of})")
    return 0
