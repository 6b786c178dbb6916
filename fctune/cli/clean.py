"""``fctune clean``: list and remove prepared sets, earlier runs and compiled kernels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError

if TYPE_CHECKING:
    from fctune.runs.leftovers import Leftover


def add_commands(commands: Any) -> None:
    """Add ``fctune clean`` to the command line."""
    clean = commands.add_parser("clean", help="list prepared sets, earlier runs and caches, and remove them with --yes")
    clean.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="default: %(default)s")
    clean.add_argument(
        "--prepared", type=Path, metavar="DIR", help="directory of prepared sets; default: prepared/ in FCTUNE_CACHE"
    )
    clean.add_argument(
        "--older-than", default="0h", metavar="TIME", help="keep what was used since: 12h, 30min; default: %(default)s"
    )
    clean.add_argument("--all-runs", action="store_true", help="also runs that no later run of their name has replaced")
    clean.add_argument("--yes", action="store_true", help="remove what is listed; without it nothing is removed")
    clean.set_defaults(run=_clean)


def _clean(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from fctune.base.terminal import Terminal, print_full_width
    from fctune.config.cache import cache_root
    from fctune.config.intervals import format_duration, parse_interval
    from fctune.config.loading import read_environment
    from fctune.runs.leftovers import find_leftovers

    age = parse_interval(_check_age(arguments.older_than)).seconds or 0.0
    for option, path in (("--runs", arguments.runs), ("--prepared", arguments.prepared)):
        if path is not None and path.exists() and not path.is_dir():
            raise ConfigError(f"{option} {path}: is a file; choose a directory.")
    environment = read_environment()
    kernels = [environment[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if environment.get(name)]
    prepared = arguments.prepared or cache_root() / "prepared"
    found = find_leftovers(prepared, arguments.runs, [Path(path) for path in kernels], age, arguments.all_runs)
    console = Terminal(highlight=False)
    table = Table("kind", "size", "last used", "path", "", box=None, pad_edge=False)
    freed: list[Leftover] = []
    for one in found:
        state = f"kept: {one.keep}" if one.keep else "removed" if arguments.yes else "can be removed"
        try:
            if not one.keep and arguments.yes:
                one.remove()
            if not one.keep:
                freed.append(one)
        except OSError as error:  # what was removed before is still shown
            state = f"not removed: {error.strerror}"
        size, used = f"{one.num_bytes / 1e9:,.2f} GB", f"{format_duration(one.age_s)} ago"
        table.add_row(one.kind, size, used, str(one.path), state)
    if found:
        print_full_width(console, table)
    total = sum(one.num_bytes for one in freed) / 1e9
    what = "removed" if arguments.yes else "can be removed; repeat with --yes to remove them"
    console.print(
        f"{len(freed)} of {len(found)} in {prepared} and {arguments.runs}, {total:,.2f} GB, {what}", soft_wrap=True
    )
    return 0 if len(freed) == sum(not one.keep for one in found) else 1


def _check_age(text: str) -> str:
    from fctune.config.intervals import parse_interval

    try:
        age = parse_interval(text)
    except ValueError:
        age = None
    if age is None or (age.seconds is None and not age.is_never):
        raise ConfigError(f"--older-than {text}: expected a time, such as 30min or 48h.")
    return text
