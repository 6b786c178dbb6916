"""Preparation of a run on a node without GPUs, and the check that GPUs will not wait for it."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fctune.apps.preflight import checks
from fctune.apps.preflight.checks import (
    Mounts,
    Problem,
    count_partial_download,
    find_snapshot,
    list_hub_repositories,
    list_source_paths,
)
from fctune.apps.preflight.downloads import (
    download,
    find_downloads,
    is_being_downloaded,
    measure_repository,
    measure_snapshot,
)
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.exit_codes import DONE, FAILED
from fctune.base.files import format_bytes
from fctune.config.cache import prepared_root
from fctune.config.intervals import format_count
from fctune.config.schema import RunConfig
from fctune.data.chosen_template import read_chosen_template
from fctune.data.chunk_encoder import Counts
from fctune.data.data_size import find_prepared
from fctune.data.prepared_set import describe_counts, find_writer, prepare
from fctune.data.row_lengths import find_lengths
from fctune.data.sources.reader import list_files
from fctune.models.hub import resolve_model_dir
from fctune.models.planned_model import find_architecture
from fctune.models.run_config import load_run_config, resolve_base
from fctune.parallel.search import fit_seq_len, prepare_seq_len
from fctune.training.env_overrides import LaunchSpec

# What GPUs may wait for: a few minutes of reading and tokenising (benchmarks/data.py measures its rate), and two of
# downloads at the rate that `fctune plan` assumes.
_MAX_ROW_BYTES = 2**30
_MAX_DOWNLOAD_BYTES = 32 * 2**30
_FEW_ROWS = 50_000  # of each source, if max_samples limits them; read in seconds

_SET_BYTES = 2.0  # upper estimate of a prepared set's size, as a multiple of its rows': five bytes a token
_PROGRESS_S = 30.0

ALLOW_VARIABLE = "PREPARE_ON_GPUS"


@dataclasses.dataclass(frozen=True, slots=True)
class Unprepared:
    """Bytes that a run has yet to download, and those of the rows to prepare, as far as they are known."""

    downloads: dict[str, int]  # by model or data set; complete sizes, though a part may be there
    rows: int  # of sources to read and tokenise
    partial: int = 0  # of the downloads, what an interruption has left
    writer: str = ""  # who is at it now


def find_pinned_config(launch: LaunchSpec) -> RunConfig | None:
    """Return a launch's config with the commits that were downloaded; None if anything is not downloaded."""
    pinned = find_downloads(launch.config, launch.shared / "downloads")
    return None if pinned is None else load_run_config(launch.config_file, [*launch.arguments, *pinned])


def measure_unprepared(launch: LaunchSpec) -> Unprepared:
    """Measure what a run still has to download and prepare.

    Raises:
        DataError: Its prepared set is damaged.
    """
    config, folder = launch.config, launch.shared / "downloads"
    downloads: dict[str, int] = {}
    partial = rows = 0
    # Several sources may be parts of one repository.
    for kind, name, revision in dict.fromkeys(repository[:3] for repository in list_hub_repositories(config)):
        snapshot = find_snapshot(kind, name, revision)
        size = 0
        if snapshot is None:
            size = measure_repository(kind, name, revision, folder) or 0
            downloads[f"hf:{name}"] = size
            partial += count_partial_download(kind, name)
        elif kind == "dataset":
            size = measure_snapshot(snapshot)
        rows += size if kind == "dataset" else 0
    pinned = find_pinned_config(launch)
    if not config.data.sources or (pinned is not None and _is_prepared(pinned)):
        return Unprepared(downloads, 0, partial)
    for path in list_source_paths(config).values():
        if not path.startswith(("hf:", "synthetic:")):
            rows += sum(Path(file).stat().st_size for file in list_files(path))
    if pinned is None:
        writer = "another process is downloading them now" if is_being_downloaded(config, folder) else ""
    else:
        host = find_writer(pinned.data, prepared_root(pinned))
        writer = f"{host} is preparing rows of the same sources now" if host else ""
    return Unprepared(downloads, rows, partial, writer)


def check_prepared(launch: LaunchSpec, num_gpus: int, environment: Mapping[str, str]) -> list[Problem]:
    """Check that all GPUs of a run will not wait long for its downloads and for its rows to be prepared.

    Args:
        launch: The run.
        num_gpus: GPUs of all nodes.
        environment: ``PREPARE_ON_GPUS=1`` lets them wait.
    """
    if environment.get(ALLOW_VARIABLE) == "1":
        return []
    try:
        left = measure_unprepared(launch)
    except (ConfigError, DataError, CheckpointError) as error:
        return [Problem(str(error), "", "usage")]
    except OSError as error:  # of a disk, or of rows that may not be read
        return [Problem(f"the rows or their preparation cannot be read ({error})", "Check permissions and the disk")]
    parts = []
    if sum(left.downloads.values()) - left.partial > _MAX_DOWNLOAD_BYTES:
        parts += [f"{format_bytes(size)} of {name} to download" for name, size in left.downloads.items() if size]
    limit = launch.config.data.max_samples
    if left.rows > _MAX_ROW_BYTES and (limit is None or limit > _FEW_ROWS):
        parts.append(f"{format_bytes(left.rows)} of rows to read and tokenise")
    if not parts:
        return []
    waiting = format_count(num_gpus, "GPU waits", "GPUs wait")
    message = f"the run is not prepared: {', '.join(parts)} while {waiting}"
    message += f"; {left.writer}" if left.writer else ""
    remedy = "Wait until that has ended"
    if not left.writer:
        scripts = "sky/prepare.yaml, sky/slurm/prepare.sbatch or sky/k8s/prepare-job.yaml"
        remedy = f"Prepare it on a node without GPUs, with the same variables ({scripts})"
    return [Problem(message, f"{remedy}, or set {ALLOW_VARIABLE}=1", "usage")]


def prepare_run(launch: LaunchSpec, environment: Mapping[str, str], show: Callable[[str], None]) -> int:
    """Download the models and data sets of a run and prepare its rows, where a launch with the same config finds them.

    After an interruption, downloads resume and an unfinished set is written again.

    Args:
        launch: The run.
        environment: Tokens, and settings of the hub's client.
        show: Receives each output line.

    Returns:
        DONE, or FAILED if a disk is missing or too small, or a download fails.

    Raises:
        DataError: The rows cannot be used, or the prepared set cannot be written.
    """
    problems = _check_node(launch, environment)
    for problem in problems:
        show(f"{'note' if problem.severity == 'note' else 'fault'}: {problem}")
    if any(problem.severity != "note" for problem in problems):
        return FAILED
    start = time.monotonic()
    try:
        pinned = download(launch.config, launch.shared / "downloads")
        launch = launch.with_arguments(pinned)
        config = load_run_config(launch.config_file, launch.arguments)
        base = resolve_base(config)
    except (ConfigError, DataError, CheckpointError) as error:
        show(f"fault: {error}")
        return FAILED
    if pinned:
        show(f"downloaded in {time.monotonic() - start:.0f} s: {', '.join(pinned)}")
    if config.data.sources:
        config = _prepare_rows(config, base, show)
        for note in checks.check_length(config):
            show(f"note: {note}")
    show("prepared: a launch with the same variables and overrides starts with these files")
    return DONE


def _check_node(launch: LaunchSpec, environment: Mapping[str, str]) -> list[Problem]:
    config, shared = launch.config, launch.shared
    mounts = Mounts(shared, shared)  # nothing is written to a disk of the node's own
    problems = checks.check_mounts(mounts)[:1]
    if problems:
        return problems
    problems = checks.check_space(dataclasses.replace(config, compile=False), mounts) or _check_space(launch)
    return [*problems, *checks.check_hub(config, environment)]


def _check_space(launch: LaunchSpec) -> list[Problem]:
    left, free = measure_unprepared(launch), shutil.disk_usage(launch.shared).free
    downloads, rows = max(0, sum(left.downloads.values()) - left.partial), int(_SET_BYTES * left.rows)
    if downloads + rows <= free:
        return []
    message = (
        f"{launch.shared}: {format_bytes(free)} free, but the downloads take {format_bytes(downloads)} and the "
        f"prepared rows about {format_bytes(rows)}"
    )
    return [Problem(message, "Free some space (fctune clean), or use a larger volume")]


def _is_prepared(config: RunConfig) -> bool:
    """Return True if the rows of a config whose repositories are downloaded are prepared."""
    # A base with added tokens would be written first, so that the set is known by its settings only.
    base = None if config.model.add_tokens else resolve_model_dir(config.model.path)
    if not isinstance(config.data.seq_len, int):
        if (lengths := find_lengths(config, base)) is None:
            return False
        architecture, _, _ = find_architecture(config.model.path, model_source=config.model.source)
        config, _ = fit_seq_len(config, lengths, architecture, None)
    return find_prepared(config, base) is not None


def _prepare_rows(config: RunConfig, base: Path, show: Callable[[str], None]) -> RunConfig:
    """Prepare the rows of a config; returns it with the length of its rows."""
    shown = time.monotonic()

    def show_progress(counts: Counts) -> None:
        nonlocal shown
        if time.monotonic() - shown > _PROGRESS_S:
            shown = time.monotonic()
            show(f"preparing: {counts.rows:,} rows read")

    if not isinstance(config.data.seq_len, int):
        config, note = prepare_seq_len(config, base, show_progress)
        show(note)
    root, switches = prepared_root(config), config.model.template_args
    prepared = prepare(config.data, base, root, show_progress, switches, read_chosen_template(config.model))
    for line in describe_counts(prepared):
        show(f"data: {line}")
    return config
