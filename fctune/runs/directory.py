"""The output directory of a run: the names of its files, its lock, and the writer of what the run records.

A launch changes what an earlier one left only once it is certain to train. One that ends before writes its code and
reason to not_started.json.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fctune.base.errors import ConfigError
from fctune.base.files import find_free_name, is_in_use, write_atomically
from fctune.base.processes import count_srun_tasks

if TYPE_CHECKING:
    from fctune.config.schema import RunConfig

logger = logging.getLogger("fctune")

# In this order: the first keeps the launch scripts from restarting the run.
STOP_FILES = ("stop-for-good", "stop")

# Deleted before exit.json is written, so that a full disk has room for it.
_RESERVE, _RESERVE_BYTES = ".reserve", 64 * 1024

_LOCK = ".lock"

# Variables that a launcher sets to the same value each time that it starts a run again.
_LAUNCH_IDS = ("LAUNCH_ID", "SKYPILOT_TASK_ID")

_LAUNCHERS = ("tune", "fctune", "torchrun")
_PACKAGES = ("fctune", "torch", "torchtune", "torchao", "transformers", "peft", "safetensors", "tokenizers", "numpy")

# A dead process on this machine frees its lock at once; one on a machine that died, when its lease at the file server
# expires (90 s, the default of Linux's NFS server).
_LOCAL_WAIT_S, _REMOTE_WAIT_S = 10.0, 120.0


class RunFiles:
    """Names of the files in a run's directory, and what other processes ask of a run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.run = self.path / "run.json"  # what the run was asked to do, and what it found out, as one JSON object
        self.exit = self.path / "exit.json"  # why it ended: code, reason, step, checkpoint; missing after a kill
        self.not_started = self.path / "not_started.json"  # why the last launch ended before it changed anything
        self.metrics = self.path / "metrics.jsonl"  # one object per step
        self.alerts = self.path / "alerts.jsonl"  # one object per alert
        self.rollouts = self.path / "rollouts.jsonl"  # one object per answer of reinforcement learning, each once
        self.mcp_calls = self.path / "mcp_calls"  # results of an MCP server's tools, a JSON Lines file of each rank
        self.agent_answers = self.path / "agent_answers"  # answers to agents, a JSON Lines file of each rank
        self.judge = self.path / "judge"  # scores of a language model that judges, a JSON Lines file of each rank
        self.checkpoints = self.path / "checkpoints"  # sharded and elastic
        self.export = self.path / "export"  # the exported models, ``merged`` and ``adapter``
        self.stop_file = self.path / "stop"  # asks the run to save and stop

    def is_locked(self) -> bool:
        """Return True if a process on this machine, or on one that shares its locks, is writing to the directory."""
        return is_in_use(self.path / _LOCK)

    def request_stop(self, reason: str = "", is_for_good: bool = False) -> None:
        """Ask the run to save and stop, even if the disk is full.

        Args:
            reason: Who asks, for the record; empty: the file.
            is_for_good: Keep the launch scripts from restarting it.

        Raises:
            OSError: The directory cannot be written.
        """
        if is_for_good:
            (self.path / STOP_FILES[0]).touch()
        try:
            write_atomically(self.stop_file, reason)
        except OSError:  # an empty file takes no space
            self.stop_file.touch()

    def read_exit(self) -> dict[str, Any] | None:
        """Return what ``exit`` holds, with its code; None if it is missing or damaged."""
        return _read_end(self.exit)

    def read_end(self) -> dict[str, Any] | None:
        """Return what ``exit`` holds, or why the last launch did not start; None if it left neither."""
        return _read_end(self.exit) or _read_end(self.not_started)

    def clear_ends(self) -> None:
        """Remove what an ended launch, or a request to stop it, left."""
        for file in (self.exit, self.not_started, *(self.path / name for name in STOP_FILES)):
            file.unlink(missing_ok=True)


class RunDirectory(RunFiles):
    """The output directory of one run; only rank 0 writes to it."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.has_begun = False  # what it holds is of this launch; set on every rank
        self._run: dict[str, Any] = {}
        self._lock: DirectoryLock | None = None

    def lock(self) -> None:
        """Keep other runs out until ``unlock`` or the end of this process.

        Raises:
            ConfigError: Another run holds the lock, or the directory cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(self.path)
            for file in (self.not_started, *(self.path / name for name in STOP_FILES)):  # of the launch before
                file.unlink(missing_ok=True)
            if not self.run.exists():  # the launch before ended before it had a run.json
                self.exit.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from None

    def unlock(self) -> None:
        """Let other runs use the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def start(self, config: RunConfig, world_size: int, not_used: Sequence[str] = ()) -> Path | None:
        """Create the directory and run.json; an earlier run in it is renamed, never overwritten.

        Args:
            config: The run's config.
            world_size: Number of ranks.
            not_used: Problems of the earlier run's checkpoints, if this run could resume from none of them.

        Returns:
            New path of the earlier run; None if there was none.

        Raises:
            ConfigError: The directory cannot be created or written.
        """
        moved: Path | None = None
        try:
            if self.run.exists():
                moved, is_locked = find_free_name(self.path), self._lock is not None
                self.path.rename(moved)
                if is_locked:  # the lock file moved with the directory
                    self.unlock()
                    self.lock()
            self.path.mkdir(parents=True, exist_ok=True)
            self.exit.unlink(missing_ok=True)  # of an attempt that ended before it had a run.json
            self._run = {
                "config": config.to_dict(),
                "seed": config.seed,
                "world_size": world_size,
                "git_revision": _git_revision(),
                "versions": installed_versions(),
                "started_at": _format_time(datetime.now(UTC)),
                "launch": find_launch(),
                **self._run,  # with the config's chosen values
            }
            if not_used:
                self._run["not_used"] = list(not_used)
            self.has_begun = True
            self._write(self.run, self._run)
            (self.path / _RESERVE).write_bytes(os.urandom(_RESERVE_BYTES))
        except OSError as error:
            raise self._cannot_write(error) from None
        return moved

    def resume(self, config: RunConfig, world_size: int, step: int, checkpoint: Path, damaged: Sequence[str]) -> None:
        """Continue the run in this directory after ``step``: extend run.json and drop metrics of later steps.

        Args:
            config: Config from now on.
            world_size: Number of ranks from now on.
            step: Optimizer steps that the checkpoint contains.
            checkpoint: The checkpoint to resume from.
            damaged: Problems of newer checkpoints that could not be used.

        Raises:
            ConfigError: The directory cannot be read or written.
        """
        try:
            described, self._run = self._run, {}
            if self.run.exists():
                self._run = json.loads(self.run.read_text(encoding="utf-8"))
            resumed = {
                "step": step,
                "checkpoint": str(checkpoint),
                "not_used": list(damaged),
                "world_size": world_size,
                "at": _format_time(datetime.now(UTC)),
                "before": self._describe_segment(),
            }
            for key in ("closing", "finished_at", "success"):  # the run continues after all
                self._run.pop(key, None)
            self._run |= {"config": config.to_dict(), "world_size": world_size, "versions": installed_versions()}
            self._run |= described
            self._run["resumed"] = [*self._run.get("resumed", []), resumed]
            self.exit.unlink(missing_ok=True)  # before this launch may write one
            self.has_begun = True
            self._write(self.run, self._run)
            (self.path / _RESERVE).write_bytes(os.urandom(_RESERVE_BYTES))
            for file in (self.metrics, self.rollouts, self.alerts):
                _drop_steps_after(file, step)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"output_dir={self.path}: the run in it cannot be resumed ({error}). Fix the cause, or set another "
                "output_dir."
            ) from None

    def has_applied(self, resume: str) -> bool:
        """Return True if the unfinished run in this directory was already started as ``resume`` says.

        Such a start is repeated to continue the run. For ``never``, that is so only for a launcher that has started it
        again: a user who repeats the command may mean another new run.

        Args:
            resume: ``never``, or the path of a checkpoint.
        """
        ended = self.read_exit()
        try:
            run = json.loads(self.run.read_text(encoding="utf-8"))
            is_same = run["config"]["resume"] == resume
            is_restart = resume != "never" or _is_restart_of(run.get("launch"))
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return is_same and is_restart and (ended is None or ended["code"] != 0)

    def describe(self, **details: Any) -> None:
        """Add details to run.json; those known before the start or restart are written by it.

        A disk that is full must not end a run here, so it is only logged.
        """
        self._run |= details
        if self.has_begun:
            try:
                self._write(self.run, self._run)
            except OSError as error:
                logger.error("%s: cannot be written (%s)", self.run, error.strerror)

    def finish(
        self,
        code: int,
        reason: str,
        step: int,
        checkpoint: Path | None = None,
        is_crash: bool = False,
        is_consequence: bool = False,
        is_out_of_memory: bool = False,
        faulty_node: Mapping[str, Any] | None = None,
    ) -> None:
        """Write exit.json: why the run ended, since torchrun turns every exit code into 1.

        A launch that has changed nothing of an earlier run writes not_started.json instead.

        Args:
            code: Exit code of the run.
            reason: Reason in words, for people.
            step: Optimizer steps taken.
            checkpoint: Checkpoint that a re-run resumes from; None if there is none.
            is_crash: The run crashed on this rank. An existing exit.json is kept: the first crash is the cause, and
                other ranks fail because of it.
            is_consequence: The crash was caused by another rank, whose own record replaces this one.
            is_out_of_memory: Memory ran out, or the kernel killed a rank as it does then.
            faulty_node: Rank and host of the node that failed, if it is known; launchers that can, exclude it.
        """
        is_refused = not self.has_begun and self.run.exists()
        file = self.not_started if is_refused else self.exit
        if not self.path.is_dir() or (is_crash and file.exists() and (is_consequence or not _has_consequence(file))):
            return
        shown = None if checkpoint is None else str(checkpoint)
        record: dict[str, Any] = {"code": code, "reason": reason, "step": step, "checkpoint": shown}
        if is_consequence:
            record["is_consequence"] = True
        if is_crash:
            record["is_out_of_memory"] = is_out_of_memory
        if faulty_node is not None:
            record["faulty_node"] = dict(faulty_node)
        try:
            (self.path / _RESERVE).unlink(missing_ok=True)
            self._write(file, record)
        except OSError as error:  # probably a full disk; the reason was printed, and the exit code is unaffected
            logger.error("%s: cannot be written (%s)", file, error.strerror)

    def is_complete(self, exports: Iterable[str]) -> bool:
        """Return True if the run in this directory has ended well and its exports are there."""
        ended = self.read_exit()
        return ended is not None and ended["code"] == 0 and all((self.export / name).is_dir() for name in exports)

    def gpu_hours(self) -> float:
        """Return the hours of all ranks so far, over restarts, without the time between them."""
        resumed = self._run.get("resumed", [])
        befores = [one.get("before") or {} for one in resumed]
        starts = [self._run.get("started_at"), *(one["at"] for one in resumed)]
        ends = [*(before.get("until") for before in befores), _format_time(datetime.now(UTC))]
        sizes = [*(before.get("world_size") for before in befores), self._run.get("world_size")]
        seconds = 0.0
        for start, end, size in zip(starts, ends, sizes, strict=True):
            if start and end and size:
                duration = datetime.fromisoformat(end) - datetime.fromisoformat(start)
                seconds += max(0.0, duration.total_seconds()) * size
        return seconds / 3600

    def _describe_segment(self) -> dict[str, Any]:
        """Return the ranks of the segment that just ended, and when and how it ended, as far as known."""
        segment: dict[str, Any] = {"world_size": self._run.get("world_size"), "until": None, "exit": None}
        for file in (self.exit, self.metrics):
            if file.exists():
                segment["until"] = _format_time(datetime.fromtimestamp(file.stat().st_mtime, UTC))
                break
        if self.exit.exists():
            try:
                ended = json.loads(self.exit.read_text(encoding="utf-8"))
                if "before" in ended:  # versions before not_started.json wrote a refused launch to exit.json
                    return segment | {key: ended["before"][key] for key in ("until", "exit")}
                segment["exit"] = {"code": ended["code"], "reason": ended["reason"]}
                if "is_out_of_memory" in ended:
                    segment["exit"]["is_out_of_memory"] = ended["is_out_of_memory"]
            except (ValueError, KeyError, TypeError):  # informative only, so no reason to fail
                segment["exit"] = {"code": None, "reason": "exit.json cannot be read"}
        return segment

    def _cannot_write(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"output_dir={self.path}: cannot be written ({error.strerror}). Choose a directory you can write to."
        )

    def _write(self, file: Path, value: dict[str, Any]) -> None:
        write_atomically(file, json.dumps(value, indent=2) + "\n")


def find_launch() -> dict[str, Any] | None:
    """Return the launch that this process belongs to, and how often it was started before; None if it has no name.

    Within one start of a Slurm job, a user may start several runs, and only the job's restarts start one again.
    """
    for name in _LAUNCH_IDS:
        if os.environ.get(name):
            return {"id": os.environ[name], "restarts": None}
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "")
    return {"id": f"slurm-{job}", "restarts": int(restarts) if restarts.isdigit() else 0} if job else None


def _is_restart_of(launch: Mapping[str, Any] | None) -> bool:
    """Return True if this process is of a later start of a recorded launch."""
    current = find_launch()
    if launch is None or current is None or current["id"] != launch["id"]:
        return False
    return current["restarts"] is None or bool(current["restarts"] > launch["restarts"])


def _read_end(file: Path) -> dict[str, Any] | None:
    try:
        ended: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return ended | {"code": int(ended["code"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_consequence(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("is_consequence"))
    except (OSError, ValueError, AttributeError):
        return False


class DirectoryLock:
    """Lock on ``.lock`` in a directory, held from construction to ``release`` or the end of the process.

    Args:
        folder: An existing directory.
        wait_s: Seconds to wait for a holder that may be dead already; None: 10 s for one on this machine, 120 s for one
            on another machine.

    Raises (at construction):
        ConfigError: Another live process holds the lock.
    """

    def __init__(self, folder: Path, wait_s: float | None = None):
        self._file: IO[str] = open(folder / _LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (held until release)
        try:
            self._acquire(folder, wait_s)
        except BaseException:
            self._file.close()
            raise
        holder = {"process": os.getpid(), "host": platform.node(), "since": datetime.now(UTC).isoformat("T", "seconds")}
        self._file.truncate(0)
        self._file.write(json.dumps(holder) + "\n")
        self._file.flush()

    def release(self) -> None:
        """Release the lock, so that another run may use the directory."""
        self._file.close()

    def _acquire(self, folder: Path, wait_s: float | None) -> None:
        started, is_logged = time.monotonic(), False
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = self._read_holder()
            except OSError as error:
                logger.warning(
                    "%s: its file system has no locks (%s); make sure that only one run uses it", folder, error
                )
                return
            is_local = holder.get("host") == platform.node()
            limit_s = wait_s if wait_s is not None else _LOCAL_WAIT_S if is_local else _REMOTE_WAIT_S
            if (is_local and _is_alive(holder.get("process"))) or time.monotonic() - started >= limit_s:
                remedy = ", or let srun start one task per node" if count_srun_tasks() > 1 else ""
                raise ConfigError(
                    f"output_dir={folder}: another run is writing to it ({_describe_holder(holder)}). "
                    f"Use another directory, or stop that run first{remedy}."
                )
            if not is_logged:
                is_logged = True
                logger.info("%s is locked by %s; waiting up to %.0f s", folder, _describe_holder(holder), limit_s)
            time.sleep(0.2)

    def _read_holder(self) -> dict[str, Any]:
        self._file.seek(0)
        try:
            holder = json.loads(self._file.read())
        except ValueError:  # not written yet
            return {}
        return holder if isinstance(holder, dict) else {}


def _describe_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return "unknown process"
    return f"process {holder.get('process')} on {holder.get('host')}, since {holder.get('since')}"


def _is_alive(process: Any) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, TypeError, ValueError):
        return True
    return True


def find_typed_command(command_lines: Sequence[Sequence[str]] | None = None) -> list[str] | None:
    """Return the command that launched this rank, as typed; None if no launcher is known.

    Args:
        command_lines: Command lines of this process and its parent, which is the launcher if there is one; None: ask
            the system.
    """
    if command_lines is None:
        import psutil

        own = psutil.Process()
        with contextlib.suppress(psutil.Error):
            command_lines = [process.cmdline() for process in (own, own.parent()) if process is not None]
    for words in command_lines or ():
        for index, word in enumerate(words[:2]):  # a script follows its interpreter
            if Path(word).name in _LAUNCHERS:
                return [Path(word).name, *words[index + 1 :]]
        if list(words[1:3]) == ["-m", "fctune.cli"]:
            return ["fctune", *words[3:]]
    return None


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _git_revision() -> str | None:
    """Return the commit of the code, with ``+`` if files differ from it; None outside of a repository."""
    root = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def _drop_steps_after(file: Path, step: int) -> None:
    """Keep only the lines of steps up to ``step``; the later steps are repeated and written again."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # truncated by a kill, or not a step
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    write_atomically(file, "".join(kept))


def _format_time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
