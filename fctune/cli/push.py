"""``fctune push``: upload a model to the Hugging Face hub."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError
from fctune.base.files import write_atomically
from fctune.base.terminal import escape_controls
from fctune.config.intervals import format_count
from fctune.config.loading import read_environment

if TYPE_CHECKING:
    from fctune.apps.push.upload import Upload
    from fctune.runs.record import RunRecord

_NUM_SKIPPED_SHOWN = 10


def add_commands(commands: Any) -> None:
    """Add ``fctune push`` to the command-line parser."""
    push = commands.add_parser(
        "push",
        help="upload a run's export and its model card to the Hugging Face hub, with the token in HF_TOKEN",
        description="Upload a run's export and its model card to the Hugging Face hub, with the token in HF_TOKEN. "
        "Only the files of an export are uploaded; they are listed first, and the upload is confirmed.",
    )
    push.add_argument("model", metavar="PATH", help="directory of a run or a tune, a model directory or an adapter")
    push.add_argument("name", metavar="OWNER/NAME", help="the repository; created if it does not exist")
    push.add_argument("--public", action="store_true", help="create a public repository; default: private")
    push.add_argument("--revision", metavar="BRANCH", help="default: main")
    push.add_argument("--yes", action="store_true", help="upload what is listed without asking; needed in scripts")
    push.add_argument(
        "--print-card", action="store_true", help="print the model card, and neither write nor upload anything"
    )
    push.add_argument(
        "--force", action="store_true", help="upload a model that fctune gate has stopped; its card says so"
    )
    push.set_defaults(run=_push)


def _push(arguments: argparse.Namespace) -> int:
    from fctune.apps.push.card import FILE_NAME, WRITTEN_BY, add_mark, make_model_card
    from fctune.apps.push.upload import find_export, find_local_base, find_visibility, plan_upload, push
    from fctune.runs.release import require_released
    from fctune.tasks.evaluation.accuracy import find_accuracies

    _require_repository_name(arguments.name)
    export = find_export(Path(arguments.model))
    if not arguments.print_card:
        require_released(export, "not uploaded", arguments.force)
    record = _find_run(export)
    card = make_model_card(export, arguments.name, record, find_accuracies(record) if record else ())
    if arguments.print_card:
        print(card, end="")
        return 0
    path = export / FILE_NAME
    try:
        is_inside = path.resolve().is_relative_to(export.resolve())  # a link elsewhere is not uploaded
        own = path.read_text(encoding="utf-8") if path.exists() and is_inside else ""
        is_ours = not path.exists() or WRITTEN_BY in own
    except (OSError, ValueError) as error:
        raise _unusable_card(path, error) from None
    environment = read_environment()
    uploaded = card if is_ours else add_mark(export, own)
    if not is_ours and uploaded != own:
        _note(f"{path}: uploaded with the lines on which fctune gate stopped the model added to it.")
    upload = plan_upload(export, None if uploaded == own else uploaded)
    visibility = find_visibility(arguments.name, environment)
    _list(upload, arguments.name, visibility, arguments.public)
    if (base := find_local_base(export)) is not None:
        _note(
            f"The base is published as {Path(base).resolve().name}, without its path. So that others can load the "
            f"adapter, set base_model_name_or_path in {export}/adapter_config.json to the base's name on the hub, and "
            "push again."
        )
    if not arguments.yes and not _confirm(arguments.name):
        _note("Nothing was uploaded.")
        return 1
    if is_ours:
        try:
            write_atomically(path, card)
        except OSError as error:
            raise _unusable_card(path, error) from None
    print(push(upload, arguments.name, not arguments.public, arguments.revision, environment))
    return 0


def _list(upload: Upload, name: str, visibility: str, is_made_public: bool) -> None:
    """Print where the files go, each with its size, and what stays behind."""
    from rich.filesize import decimal

    if visibility == "public":
        _note(f"{name} is an existing PUBLIC repository: anyone can download what is uploaded.")
    elif visibility == "private":
        _note(f"{name} is an existing private repository" + (", and stays private." if is_made_public else "."))
    else:
        _note(f"{name} will be created as a {'PUBLIC' if is_made_public else 'private'} repository.")
    sizes = upload.sizes()
    width = max(map(len, sizes))
    for file, size in sizes.items():
        _note(f"  {file:<{width}}  {decimal(size):>10}")
    _note(f"{format_count(len(sizes), 'file')}, {decimal(sum(sizes.values()))}.")
    if upload.skipped:
        others = ", ".join(upload.skipped[:_NUM_SKIPPED_SHOWN])
        more = len(upload.skipped) - _NUM_SKIPPED_SHOWN
        _note(f"Not part of an export, not uploaded: {others}" + (f" and {more} more." if more > 0 else "."))


def _confirm(name: str) -> bool:
    """Ask at the terminal.

    Raises:
        ConfigError: There is no terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{name}: not confirmed, so nothing was uploaded: standard input is not a terminal. Check the list above, "
            "then repeat the command with --yes."
        )
    print("Upload? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _note(line: str) -> None:
    """Print to standard error; standard output holds the commit's URL alone."""
    print(escape_controls(line), file=sys.stderr)


def _unusable_card(path: Path, error: Exception) -> ConfigError:
    remedy = "Make it writable, or remove it."
    return ConfigError(f"{path}: the model card cannot be read or written ({error}). {remedy}")


def _require_repository_name(name: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

    with suppress(HFValidationError):
        validate_repo_id(name)
        if "/" in name:
            return
    raise ConfigError(f"{name}: not a repository's name. Expected OWNER/NAME in letters, digits, '-', '_' and '.'.")


def _find_run(export: Path) -> RunRecord | None:
    """Return the record of the run whose ``export/`` holds the directory; None if there is none."""
    from fctune.runs.directory import RunFiles
    from fctune.runs.record import read_run

    for path in (export.absolute(), export.resolve()):  # the first may be a link to checkpoint.fallback_dir
        folder = path.parent.parent
        if RunFiles(folder).run.is_file():
            return read_run(folder)
    return None
