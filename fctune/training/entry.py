"""Running a recipe from a command line: opening the run, reporting how it ended, and the exit code."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import secrets
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fctune.base import distributed
from fctune.base.distributed import USER_ERRORS, World
from fctune.base.errors import ConfigError, DataError, DiskError
from fctune.base.exit_codes import DONE, FAILED, INVALID, NODE_FAULT, SAVE_FAILED, STOPPED
from fctune.base.files import run_within
from fctune.base.launcher_watch import end_with_launcher, watch_launcher
from fctune.base.terminal import LogHandler, escape_controls
from fctune.checkpoint.resume import Resume, choose_checkpoint
from fctune.checkpoint.store import CheckpointStore
from fctune.config.components import allow_components
from fctune.config.schema import RunConfig
from fctune.models.run_config import load_run_config
from fctune.runs.device import describe_device, total_memory
from fctune.runs.directory import RunDirectory, RunFiles, find_typed_command
from fctune.runs.record import read_run
from fctune.runs.success import format_criteria, judge_run
from fctune.tasks.evaluation.held_out import HELD_OUT_FILE
from fctune.training.callbacks.checkpoint import SaveError
from fctune.training.callbacks.stop import Stopped, StopRequest
from fctune.training.host_memory import reuse_freed_memory
from fctune.training.loop import NonFiniteError
from fctune.training.out_of_memory import is_out_of_memory
from fctune.training.peers import RankEnd, RankProcess, describe_process, find_killed_rank, is_lost_connection

logger = logging.getLogger("fctune")

_RECORD_S = 30.0  # limit for recording the end, because a disk may hang
_DEATH_S = 2.0  # a killed rank closes its connections before it ends
# Errors that torch and Triton raise as a plain RuntimeError.
_UNTYPED_GPU_FAULTS = ("CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED", "Triton Error [CUDA]")
# Errors of a GPU or of NCCL that every start would meet again: an index out of range, a wrong build, a wrong call.
_REPEATED = (
    "device-side assert",
    "no kernel image",
    "kernel image is invalid",
    "ncclInvalidUsage",
    "ncclInvalidArgument",
    "invalid usage",
)
_USAGE = "tune run recipes/<recipe> --config FILE [key=value ...]"


class Recipe(Protocol):
    """The methods of torchtune's recipe interface that are called here."""

    step: int  # optimizer steps taken

    def setup(self) -> None:
        """Prepare everything before the first step."""

    def train(self) -> None:
        """Train from the restored step to the end, with saves and measurements when they are due."""

    def save_checkpoint(self) -> None:
        """Save the last state and write the exports."""

    def suggest_less_memory(self) -> str:
        """Return settings that need less memory."""

    def cleanup(self) -> None:
        """Release files, threads and signal handlers; not called after a crash."""


class AlreadyComplete(Exception):
    """The run in the output directory is complete, and the launch asks for nothing more."""


@dataclass(slots=True)
class Run:
    """A recipe's output directory, the checkpoint to resume from, and requests to stop."""

    config: RunConfig
    directory: RunDirectory
    store: CheckpointStore
    world: World
    peers: Sequence[RankProcess]
    resume: Resume | None = None
    not_used: list[str] = field(default_factory=list)  # problems of newer checkpoints
    recipe: Recipe | None = None
    is_open: bool = False  # this run has locked the directory, so ranks may write to it
    request: StopRequest = field(init=False)

    def __post_init__(self) -> None:
        stop_file = self.directory.stop_file if self.world.is_main else None
        self.request = StopRequest(stop_file, self._record_stop)
        watch_launcher(self._record_lost_launcher)

    @property
    def step(self) -> int:
        """Number of optimizer steps that the run has taken."""
        return self.recipe.step if self.recipe else 0

    @property
    def has_trained(self) -> bool:
        """True if this launch has taken a step."""
        return self.step > (self.resume.checkpoint.step if self.resume else 0)

    @property
    def resumes_own(self) -> bool:
        """True if the run resumes from a checkpoint of its own output directory."""
        resume = self.resume
        return resume is not None and resume.checkpoint.path.parent.resolve() == self.store.root.resolve()

    @property
    def fallback_dir(self) -> Path | None:
        """Directory of this run on the other disk, if there is one."""
        folder = self.config.checkpoint.fallback_dir
        return None if folder is None else Path(folder) / self.directory.path.resolve().name

    @property
    def fallback_store(self) -> CheckpointStore | None:
        """Store of the last checkpoint on the other disk."""
        return None if self.fallback_dir is None else CheckpointStore(self.fallback_dir / "checkpoints")

    def begin(self) -> None:
        """Start the run, or resume the one in its directory, once all checks have passed. Every rank calls it.

        Raises:
            ConfigError: The directory cannot be written.
        """
        config, directory, resume, world_size = self.config, self.directory, self.resume, self.world.world_size

        def begin_on_rank_0() -> tuple[Path | None, list[str], list[str]]:
            if resume is not None and self.resumes_own:
                step, path = resume.checkpoint.step, resume.checkpoint.path
                # Before run.json says that the run has resumed: a launch that dies in between does this again.
                swept, aside = self._clear_newer(resume)
                directory.resume(config, world_size, step, path, self.not_used)
                return None, swept, aside
            return directory.start(config, world_size, self.not_used), [], []

        moved, swept, aside = distributed.run_on_rank_0(begin_on_rank_0)
        directory.has_begun = True
        if moved is not None:
            reason = "" if config.resume != "auto" else ", because it has no complete checkpoint to resume from"
            logger.info("%s held an earlier run, which was moved to %s%s", directory.path, moved, reason)
        if swept:
            logger.info("checkpoints: deleted the incomplete ones of an earlier run: %s", ", ".join(swept))
        if aside:
            logger.info(
                "checkpoints: set aside %s; to use one again, remove the number from its name", ", ".join(aside)
            )
        if resume is not None:
            logger.info("resuming from %s, after step %d", resume.checkpoint.path, resume.checkpoint.step)

    def _clear_newer(self, resume: Resume) -> tuple[list[str], list[str]]:
        """Delete incomplete checkpoints, and set aside those that would be used before the one to resume from.

        Returns:
            Names of the deleted ones, and of those set aside.

        Raises:
            ConfigError: The directory cannot be written.
        """
        try:
            swept = self.store.sweep()
            aside = self.store.set_aside_newer(resume.checkpoint)
            best = resume.state["best"]
            if aside and best is not None:
                for checkpoint in self.store.list_complete():
                    if (checkpoint.kind, checkpoint.step) == ("elastic", best["step"]):
                        self.store.link(checkpoint, "best")
        except OSError as error:
            raise ConfigError(
                f"{self.store.root}: cannot be written ({error.strerror}). Make it writable, or set another output_dir."
            ) from None
        return swept, aside

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint that a re-run would resume from."""
        complete = self.store.list_complete()
        return complete[0].path if complete else None

    def record_crash(
        self,
        reason: str,
        code: int = FAILED,
        is_consequence: bool = False,
        is_out_of_memory: bool = False,
        is_nodes_fault: bool = False,
    ) -> None:
        """Write exit.json unless another rank gave a cause already; ``is_nodes_fault`` blames this rank's node."""
        if self.is_open:
            self.directory.finish(
                code,
                reason,
                self.step,
                self.newest_checkpoint(),
                is_crash=True,
                is_consequence=is_consequence,
                is_out_of_memory=is_out_of_memory,
                faulty_node=_describe_node() if is_nodes_fault else None,
            )

    def record_hang(self, reason: str, code: int, late_ranks: Sequence[int] = ()) -> None:
        """Write exit.json of a process that hangs and is about to be ended.

        If the ranks that hold up the others are all of one node, it names this node.
        """
        nodes = {rank // self.world.ranks_per_node for rank in late_ranks}
        node = None
        if len(nodes) == 1 and self.world.world_size > self.world.ranks_per_node:
            hosts = [peer.host for peer in self.peers if peer.rank == late_ranks[0]]
            node = {"rank": nodes.pop(), "host": hosts[0] if hosts else ""}
        if late_ranks:
            named = ", ".join(map(str, late_ranks))
            reason += f"; held up by rank {named}" + (f" on {node['host']}" if node is not None else "")
        checkpoint = self.newest_checkpoint()
        self.directory.finish(code, reason, self.step, checkpoint, is_crash=True, faulty_node=node)

    def _record_stop(self, reason: str) -> None:
        killed = find_killed_rank(self.peers)
        if killed is not None:  # the launcher stops the other ranks
            _record_killed_rank(self, killed)
        else:  # the launcher also stops this rank after another one's error, whose record stays
            self.record_crash(reason, STOPPED)

    def _record_lost_launcher(self) -> None:
        self.record_crash(f"rank {self.world.rank} on {os.uname().nodename}: its launcher died")


def run_recipe(make: Callable[[RunConfig, World, Run], Recipe], argv: Sequence[str]) -> int:
    """Run a recipe and return the exit code.

    ``EXIT_CODES`` lists them. Wrong usage, config or data is INVALID only if nothing was trained.

    All ranks agree on a user's error, and rank 0 reports it once; any other error is a traceback of the rank that
    raised it. In every case ``exit.json`` records why the run ended, or ``not_started.json`` why an earlier run in the
    directory was not resumed.
    """
    end_with_launcher()
    try:
        world = distributed.init_distributed()
    except ConfigError as error:
        _mark_ranks_met()
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        return INVALID
    except Exception as error:
        traceback.print_exc()
        get_error_handler().record_exception(error)
        if not isinstance(error, RuntimeError):  # as which torch raises all errors of connections
            _mark_ranks_met()
        return NODE_FAULT if is_node_fault(error) else FAILED
    _mark_ranks_met()
    if world.device.type == "cpu":
        reuse_freed_memory()
    _start_logging(world)
    run: Run | None = None
    recipe: Recipe | None = None
    checkpoint: Path | None = None
    is_untouched = False
    try:
        config = distributed.run_on_all_ranks(lambda: load_run_config(*read_command_line(argv, _USAGE)))
        run = open_run(config, world)
        choose_start(run, config)
        if world.is_main:
            _record_start(run.directory, world, argv)
        run.recipe = recipe = make(config, world, run)
        recipe.setup()
        recipe.train()
        recipe.save_checkpoint()
        code, reason = DONE, "completed"
    except USER_ERRORS as error:
        has_trained = run is not None and run.has_trained
        code, reason = (SAVE_FAILED if isinstance(error, DiskError) else FAILED) if has_trained else INVALID, str(error)
    except NonFiniteError as error:
        code, reason = FAILED, str(error)
    except Stopped as stopped:
        code, reason, checkpoint = STOPPED, str(stopped), stopped.checkpoint
    except SaveError as error:
        code, reason, checkpoint = SAVE_FAILED, str(error), error.checkpoint
    except AlreadyComplete as complete:
        code, reason, is_untouched = DONE, str(complete), True
    except Exception as error:  # a bug, here or in a library: other ranks may be waiting in a collective
        traceback.print_exc()
        get_error_handler().record_exception(error)  # for the launcher, which reports the first rank to fail
        if run is not None:
            run_within(_RECORD_S, functools.partial(_record_crash, run, world, error))
        return NODE_FAULT if is_node_fault(error) else FAILED
    if recipe is not None:
        recipe.cleanup()
    if world.is_main:
        if code:
            print(f"\n{escape_controls(reason)}\n", file=sys.stderr, flush=True)
        if is_untouched:
            logger.info("%s", reason)
        elif run is not None:
            _record_end(run, code, reason, checkpoint)
        if run is not None:
            run.directory.unlock()
    distributed.shutdown_distributed()
    return code


def _mark_ranks_met() -> None:
    """Tell ``sky/run_node.sh`` that a failure without a record is not one of the ranks to reach each other."""
    if file := os.environ.get("FCTUNE_RANKS_MET"):
        Path(file).touch()


def open_run(config: RunConfig, world: World) -> Run:
    """Lock the output directory, and start listening for stop requests. Every rank calls it.

    Raises:
        ConfigError: The directory cannot be written or is in use by another run.
    """
    store = CheckpointStore(
        RunFiles(config.output_dir).checkpoints, config.checkpoint.keep_last, config.checkpoint.keep_every_n_steps
    )
    peers = distributed.all_gather_objects(describe_process(world.rank))
    run = Run(config, RunDirectory(config.output_dir), store, world, peers)
    distributed.run_on_rank_0(run.directory.lock)
    run.is_open = True
    return run


def choose_start(run: Run, config: RunConfig) -> None:
    """Choose the checkpoint to resume from, if there is one. Every rank calls it.

    Raises:
        ConfigError: The directory is not shared by all nodes.
        CheckpointError: There are checkpoints, and all are damaged.
    """
    _check_shared(run.directory.path, run.world)
    distributed.run_on_rank_0(lambda: _check_fallback(run.fallback_dir))
    resume = config.resume
    if resume != "auto" and distributed.run_on_rank_0(
        lambda: bool(run.store.list_complete()) and run.directory.has_applied(resume)
    ):
        logger.info("resume=%s was applied before; resuming from this run's newest checkpoint", resume)
        resume = "auto"
    run.resume, run.not_used = choose_checkpoint(resume, run.store, run.world)


def read_command_line(argv: Sequence[str], usage: str) -> tuple[Path, list[str]]:
    """Return the config file and the overrides of a recipe's command line.

    Raises:
        ConfigError: No config is named, or a flag is malformed.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--allow-component", action="append", default=[])
    try:
        known, overrides = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. Usage: {usage}") from None
    if known.config is None:
        raise ConfigError(f"--config is missing. Usage: {usage}")
    allow_components(known.allow_component)
    return Path(known.config), overrides


def _start_logging(world: World) -> None:
    """Log everything on rank 0 and only warnings on other ranks."""
    logger.handlers = [LogHandler(erases_line=not world.is_main)]
    logger.propagate = False
    logger.setLevel(logging.INFO if world.is_main else logging.WARNING)


def _record_start(directory: RunDirectory, world: World, argv: Sequence[str]) -> None:
    memory_gib = total_memory(world.device, world.ranks_per_node) / 2**30 if world.device.type == "cuda" else None
    device = describe_device(world.device)
    directory.describe(
        command=find_typed_command() or [sys.argv[0], *argv], device=device, device_memory_gib=memory_gib
    )


def is_node_fault(error: Exception) -> bool:
    """Return True for errors of a GPU or of the communication between ranks, after which another start may succeed.

    An error of a GPU may also be a defect of a kernel. A run that fails in the same way each time saves no new
    checkpoint, so it is not started again forever.
    """
    message = str(error)
    if is_out_of_memory(error) or any(sign in message for sign in _REPEATED):
        return False
    is_communication = isinstance(error, DistError) or is_lost_connection(error)
    is_untyped = isinstance(error, RuntimeError) and any(sign in message for sign in _UNTYPED_GPU_FAULTS)
    return is_communication or is_untyped or isinstance(error, torch.AcceleratorError)


def _describe_node() -> dict[str, Any]:
    return {"rank": int(os.environ.get("GROUP_RANK", "0")), "host": os.uname().nodename}


def _record_killed_rank(run: Run, killed: RankEnd, consequence: str = "") -> None:
    """Record a rank of this node that was killed: by the kernel for lack of memory, else by a driver or by NCCL."""
    run.record_crash(
        f"{killed.reason}. {consequence}" if consequence else killed.reason,
        FAILED if killed.is_out_of_memory else NODE_FAULT,
        is_out_of_memory=killed.is_out_of_memory,
        is_nodes_fault=killed.is_nodes_fault,
    )


def _record_crash(run: Run, world: World, error: Exception) -> None:
    reason = f"rank {world.rank}: {type(error).__name__}: {error}"
    code = NODE_FAULT if is_node_fault(error) else FAILED
    if is_lost_connection(error):
        ended = find_killed_rank(run.peers, _DEATH_S)
        if ended is not None and ended.is_killed:
            _record_killed_rank(run, ended, reason)
        else:  # a rank of this node that is gone may itself have ended because of another node
            first = "another rank ended first; its log has the cause" + (f". {ended.reason}" if ended else "")
            run.record_crash(f"{first}. {reason}", code, is_consequence=True)
    else:
        ran_out = is_out_of_memory(error)
        if run.recipe is not None and ran_out:
            reason += f"\n{run.recipe.suggest_less_memory()}"
            print(f"\n{escape_controls(reason)}\n", file=sys.stderr, flush=True)
        is_nodes_fault = code == NODE_FAULT and not isinstance(error, DistError)  # not the fault of any known node
        run.record_crash(reason, code, is_out_of_memory=ran_out, is_nodes_fault=is_nodes_fault)
    run.directory.unlock()


def _record_end(run: Run, code: int, reason: str, checkpoint: Path | None) -> None:
    """Write exit.json, and in run.json when the run ended and, if they are configured, the success criteria it met."""
    directory = run.directory

    def record() -> None:
        directory.finish(code, reason, run.step, checkpoint or run.newest_checkpoint())
        if directory.has_begun:
            directory.describe(finished_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    if not run_within(_RECORD_S, record):
        logger.error("%s: its disk does not answer, so the end of the run is not recorded", directory.path)
    elif code == 0:
        if run.config.success is not None:  # reading all metrics again takes time
            _judge(directory)
        _log_next_steps(directory, run.config)


def _judge(directory: RunDirectory) -> None:
    try:
        record = read_run(directory.path)
    except DataError as error:
        logger.warning("success: not judged: %s", error)
        return
    criteria = judge_run(record)
    directory.describe(success=[asdict(criterion) for criterion in criteria])
    for line in format_criteria(criteria):
        logger.info("success: %s", line)


def _log_next_steps(directory: RunDirectory, config: RunConfig) -> None:
    """Log where the exports of a completed run are, and commands that evaluate, report and serve it.

    The cases are the run's own: a model of its size need not be able to answer any others. ``fctune tune`` evaluates
    and reports itself, and says only then whether the result may be served.
    """
    for name, content in (("merged", "merged model"), ("adapter", "adapter")):
        if (directory.export / name).is_dir():
            logger.info("%s: %s", content, directory.export / name)
    adapter = _read_adapter_config(directory.export / "adapter")
    if adapter.get("trainable_token_indices"):
        logger.info("the adapter has trained token rows, which PEFT loads and vLLM does not: serve the merged model")
    if adapter.get("target_parameters"):
        logger.info(
            "the adapter changes experts, in the form of PEFT 0.18, which servers ignore: serve the merged model"
        )
    if (find_typed_command() or [])[:2] == ["fctune", "tune"]:
        return
    run = shlex.quote(str(directory.path))
    named = [
        str(directory.path / HELD_OUT_FILE),
        config.eval.cases,
        "" if config.rollouts is None else config.rollouts.cases,
    ]
    cases = next((shlex.quote(path) for path in named if Path(path).is_file()), None)
    logger.info("evaluate it: fctune eval --model %s %s", run, "--suite smoke" if cases is None else f"--cases {cases}")
    logger.info("report on it: fctune report %s --out %s", run, shlex.quote(str(directory.path / "report.html")))
    logger.info("serve it: fctune serve %s", run)


def _read_adapter_config(adapter: Path) -> dict[str, Any]:
    """Read PEFT's config of an exported adapter; empty if there is none."""
    file = adapter / "adapter_config.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content


def _check_shared(path: Path, world: World) -> None:
    """Check that every node sees the directory that rank 0 writes to."""
    name = distributed.run_on_rank_0(lambda: _create_probe(path))

    def check() -> None:
        if not (path / name).exists():
            raise ConfigError(
                f"output_dir={path}: rank {world.rank} on {os.uname().nodename} does not see what rank 0 writes there. "
                "Use a directory that all nodes share."
            )

    try:
        distributed.run_on_all_ranks(check)
    finally:
        if world.is_main:
            (path / name).unlink(missing_ok=True)


def _check_fallback(path: Path | None) -> None:
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            (path / _create_probe(path)).unlink()
    except OSError as error:
        raise ConfigError(
            f"checkpoint.fallback_dir: {path} cannot be written ({error.strerror}). Set another one."
        ) from None


def _create_probe(path: Path) -> str:
    name = f".probe-{secrets.token_hex(4)}"
    try:
        (path / name).touch()
    except OSError as error:
        raise ConfigError(f"output_dir={path}: cannot be written ({error.strerror}). Set another one.") from None
    return name
