"""An acceptance run: which phases run when and how often, and the result made from them."""

from __future__ import annotations

import functools
import gc
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fctune.apps.acceptance.checks import PHASES, SPEED_CHECKS, judge_run
from fctune.apps.acceptance.collectives import list_sizes, measure_collective, measure_pairs, verify_pairs
from fctune.apps.acceptance.config import AcceptanceConfig
from fctune.apps.acceptance.devices import (
    compute_checksums,
    count_xids,
    describe_rank,
    measure_clock,
    measure_copies,
    measure_products,
    read_kernel_log,
)
from fctune.apps.acceptance.fault_injection import FaultInjector
from fctune.apps.acceptance.metrics import DISKS, compute_bandwidth
from fctune.apps.acceptance.result import RESULT_FILE, make_result, read_result, write_result
from fctune.apps.acceptance.session import OutOfTime, Session
from fctune.apps.acceptance.storage import find_obstacle, list_groups, measure_disk, work_dir
from fctune.apps.acceptance.table import ProgressPrinter
from fctune.apps.acceptance.training import list_shard_sizes, load_run, measure_checkpoint, measure_steps
from fctune.apps.acceptance.watch import EarlyEnd
from fctune.base.distributed import LauncherEnvironment, World, use_expandable_segments
from fctune.base.errors import ConfigError
from fctune.checkpoint.state import TrainState

Sample = dict[str, Any]


class Phases:
    """The measurements by name, in the order of a run.

    Measuring a phase again with its earlier sample adds to it.

    Args:
        session: Session of the run.
        config: Config of the run.
        device: Device of this rank.
        run_id: Part of the names of the run's files on measured disks.
        save_partial: Called with a phase's name and its sample so far, after each piece.
        show: Called with a line that summarizes a piece.
    """

    def __init__(
        self,
        session: Session,
        config: AcceptanceConfig,
        device: torch.device,
        run_id: str,
        save_partial: Callable[[str, Sample], None],
        show: Callable[[str], None],
    ):
        self._session, self._config, self._device, self._run_id = session, config, device, run_id
        self._save_partial, self._show = save_partial, show
        self._name = ""
        self._launch = session.launch
        self._faults = FaultInjector(config.faults, session.launch.rank)
        self._state: TrainState | None = None
        self.by_name: dict[str, Callable[[World, Sample], None]] = {
            "identity": self._measure_identity,
            "compute": self._measure_compute,
            "pairs": self._measure_pairs,
            "collectives_node": self._measure_collectives,
            "storage": self._measure_storage,
            "training_node": self._measure_training,
            "collectives_all": self._measure_collectives,
            "training_all": self._measure_training,
            "checkpoint": self._measure_checkpoint,
        }

    @property
    def has_state(self) -> bool:
        """True if there is a trained state to save."""
        return self._state is not None

    def measure(self, name: str, world: World, sample: Sample) -> None:
        """Measure a phase, after injecting the faults configured for its start."""
        self._name = name
        self._session.enter(name)
        self._faults.interrupt(name)
        self.by_name[name](world, sample)

    def release(self) -> None:
        """Release the trained state, which is bound to the process group, and its memory."""
        self._state = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _save(self, sample: Sample) -> None:
        self._save_partial(self._name, sample)

    def _measure_identity(self, world: World, sample: Sample) -> None:
        sample |= describe_rank(world, self._launch.rank) | {"clock_offset_s": measure_clock(world)}

    def _measure_compute(self, world: World, sample: Sample) -> None:
        session, config, device = self._session, self._config.compute, self._device
        self._add_checksums(sample)
        for dtype in config.dtypes:
            product = sample.setdefault("products", {}).setdefault(dtype, {})
            measure_products(session, config, dtype, device, self._faults, product)
            self._save(sample)
        measure_copies(session, config, device, self._faults, sample.setdefault("copies", {}))
        self._add_checksums(sample)
        log = read_kernel_log() if device.type == "cuda" else None
        pci = session.read("identity")[self._launch.rank]["pci"]
        sample["xids"] = None if log is None or pci is None else count_xids(log, pci)

    def _add_checksums(self, sample: Sample) -> None:
        self._session.time_left()
        self._session.enter("checksums")
        checksums = compute_checksums(self._config.compute, self._device, self._faults)
        sample.setdefault("checksums", []).append(checksums)
        self._save(sample)

    def _measure_pairs(self, world: World, sample: Sample) -> None:
        config = self._config.pairs
        sample["bytes"] = max(1, int(config.mib * 2**18)) * 4
        measure_pairs(self._session, config, world, self._faults, sample.setdefault("seconds", {}))
        self._save(sample)
        self._session.time_left()
        self._session.enter("verifying messages")
        sample["wrong_elements"] = verify_pairs(world, self._faults, min(config.mib, 16.0))

    def _measure_collectives(self, world: World, sample: Sample) -> None:
        session, config = self._session, self._config.collectives
        shards: dict[str, int] = {}
        if self._config.training is not None:
            with tempfile.TemporaryDirectory() as folder:
                shards = list_shard_sizes(*load_run(self._config.training, Path(folder)), world)
        results = sample.setdefault("results", [])
        for operation in config.operations:
            labels = {size: name for name, size in shards.items()}
            labels = labels if operation in ("all_gather", "reduce_scatter") else {}
            shown = []
            for num_bytes in list_sizes(config, list(labels)):
                result = measure_collective(session, config, operation, num_bytes, world, self._faults)
                label = labels.get(num_bytes, "")
                results.append({"operation": operation, "requested_bytes": num_bytes, "label": label} | result)
                self._save(sample)
                seconds = sum(result["seconds"]) / len(result["seconds"])
                busbw = compute_bandwidth(operation, result["bytes"], world.world_size, seconds)[1]
                shown.append(f"{num_bytes / 2**20:.4g} MiB {busbw:.4g}")
            self._show(f"{operation}, busbw in GB/s: {', '.join(shown)}")

    def _measure_storage(self, world: World, sample: Sample) -> None:
        session, config, launch = self._session, self._config.storage, self._launch
        for disk in DISKS:
            directory: str | None = getattr(config, f"{disk}_dir")
            if directory is None:
                sample[disk] = {"skipped": f"storage.{disk}_dir is not set"}
                continue
            session.time_left()
            num_sharing = launch.world_size if disk == "shared" else launch.ranks_per_node
            session.enter(f"checking the {disk} disk")
            session.publish(f"obstacle {disk}", find_obstacle(config, directory, num_sharing))
            session.barrier(f"the {disk} disk", session.limits.build_s)
            obstacles = [found for _, found in sorted(session.read(f"obstacle {disk}").items())]
            obstacle = next((text for text in obstacles if text is not None), None)
            if obstacle is not None:
                sample[disk] = {"skipped": obstacle}
                continue
            folder = work_dir(directory, self._run_id)
            groups = list_groups(disk, launch.ranks_per_node, launch.world_size)
            times = sample.setdefault(disk, {})
            if "all" in times:  # a recheck: ranks are compared only while all of them use the disk
                groups = {"all": groups["all"]}
            out_of_time: OutOfTime | None = None
            try:
                measure_disk(session, config, folder, disk, groups, self._faults, times)
                if disk == "shared":
                    sample["sees_shared"] = self._check_visibility(folder)
            except OutOfTime as error:
                out_of_time = error
            self._save(sample)
            session.barrier(f"leaving the {disk} disk", session.limits.build_s)
            session.clean_up()
            if out_of_time is not None:
                raise out_of_time

    def _check_visibility(self, folder: Path) -> bool:
        if self._launch.rank == 0:
            (folder / "seen").touch()
        self._session.barrier("shared disk: rank 0's file exists")
        return (folder / "seen").exists()

    def _measure_training(self, world: World, sample: Sample) -> None:
        config = self._config.training
        assert config is not None
        self.release()
        with tempfile.TemporaryDirectory() as folder:
            run, model_dir = load_run(config, Path(folder))
            self._state = measure_steps(self._session, config, run, model_dir, world, self._faults, sample)

    def _measure_checkpoint(self, world: World, sample: Sample) -> None:
        assert self._state is not None
        session, config = self._session, self._config.storage
        directory, ranks = str(config.shared_dir), self._launch.world_size
        obstacle = session.broadcast("obstacles to a checkpoint", lambda: find_obstacle(config, directory, ranks))
        if obstacle is not None:
            sample["skipped"] = obstacle
            return
        free = session.broadcast("free space", lambda: shutil.disk_usage(directory).free)
        max_bytes = int(config.max_share_of_free * free)
        measure_checkpoint(session, self._state, work_dir(directory, self._run_id) / "checkpoint", max_bytes, sample)
        session.barrier("the checkpoint is loaded", session.limits.build_s)
        session.clean_up()


class Acceptance:
    """An acceptance run on one rank.

    Args:
        config: Config of the run.
        launch: This process's launch.
        progress: Shows progress on rank 0, and the result of a run that ends early on the rank that writes it.
    """

    def __init__(self, config: AcceptanceConfig, launch: LauncherEnvironment, progress: ProgressPrinter | None = None):
        self.config, self.launch = config, launch
        self._early_progress = progress
        self._progress = progress if launch.rank == 0 else None
        self._folder = Path(config.output_dir)
        self._started, self._started_at = time.monotonic(), time.time()
        self._skipped: dict[str, str] = {}
        self._mine: dict[str, Any] = {}  # this rank's samples
        self._session: Session | None = None
        self.write_error = ""  # why the result could not be written; empty if it was
        if config.device == "cuda" and torch.cuda.is_available():
            self._device = torch.device("cuda", launch.local_rank)
            use_expandable_segments()
            torch.cuda.set_device(self._device)
        else:
            self._device = torch.device("cpu")

    def run(self) -> dict[str, Any]:
        """Run all phases and return the result, the same on all ranks; a run that ends early ends the process.

        Raises:
            ConfigError: The training run's config is invalid, or the result cannot be written.
        """
        if self.config.training is not None:  # report an invalid config before measuring anything
            with tempfile.TemporaryDirectory() as folder:
                load_run(self.config.training, Path(folder))
        self._session = session = Session(self.launch, self.config.limits, self._folder, self._write_early)
        session.arrive()
        if session.broadcast("writing a first result", lambda: self._write(self._make_result({}, None))):
            session.close()
            raise ConfigError(f"output_dir={self._folder}: not writable, or its disk is full. Choose another.")
        try:
            return self._measure(session)
        except BaseException as error:
            session.fail(error)
            raise

    def _measure(self, session: Session) -> dict[str, Any]:
        run_id = session.broadcast("run id", lambda: f"{self._started_at:.0f}-{self.launch.port}")
        if session.broadcast("arrival", lambda: self._has_arrival_passed(session)):
            phases = Phases(session, self.config, self._device, run_id, self._publish_partial, self._show)
            current, world = "", None
            for phase in phases.by_name:
                find_reason = functools.partial(self._find_skip_reason, phase, session, phases)
                reason = session.broadcast(f"begin {phase}", find_reason)
                if reason:
                    self._skipped[phase] = reason
                    continue
                scope = self._choose_scope(phase, current)
                if world is None or scope != current:
                    phases.release()
                    current, world = scope, self._join_group(session, scope, f"{scope} for {phase}")
                self._run_phase(session, phases, phase, world)
            session.lift_time_limit()
            session.leave_group()
        result: dict[str, Any] = session.broadcast("result", lambda: self._finish(session))
        session.close()
        if self._progress is not None:
            self._progress.show_result(result)
        return result

    def _run_phase(self, session: Session, phases: Phases, phase: str, world: World) -> None:
        """Measure a phase, and repeat it if it would blame someone for being slow, which may be a short disturbance."""
        if self._progress is not None:
            self._progress.show_phase(phase, time.monotonic() - self._started)
        sample: dict[str, Any] = {}
        for attempt in range(1 + self.config.rechecks):
            try:
                phases.measure(phase, world, sample)
            except OutOfTime as error:
                if not attempt:
                    sample["cut_short"] = str(error)
            self._publish(phase, sample)
            session.barrier(f"the end of {phase}", self.config.limits.build_s)
            needs_recheck = functools.partial(self._needs_recheck, session, phase, attempt)
            if not session.broadcast(f"recheck of {phase}", needs_recheck):
                break
        if self.launch.rank == 0:
            result = self._make_result(self._read_samples(session), None)
            self._write(result)
            if self._progress is not None:
                self._progress.show_checks(result)

    def _needs_recheck(self, session: Session, phase: str, attempt: int) -> bool:
        if phase not in SPEED_CHECKS or attempt == self.config.rechecks or session.is_out_of_time:
            return False
        suspects = [
            culprit
            for check in self._make_result(self._read_samples(session), None)["checks"]
            for culprit in check["culprits"]
            if check["name"] in SPEED_CHECKS[phase] and culprit["kind"] != "unknown"
        ]
        if suspects:
            self._show(f"measuring again because of {suspects[0]['text']}")
        return bool(suspects)

    @property
    def _num_nodes(self) -> int:
        return max(1, self.launch.world_size // self.launch.ranks_per_node)

    def _choose_scope(self, phase: str, current: str) -> str:
        """Choose the process group for a phase: all ranks, or those of each node; storage runs in either."""
        if self._num_nodes > 1 and phase == "storage" and current:
            return current
        return "node" if self._num_nodes > 1 and phase in ("collectives_node", "training_node") else "all"

    def _join_group(self, session: Session, scope: str, name: str) -> World:
        size = self.launch.ranks_per_node if scope == "node" else self.launch.world_size
        first = self.launch.rank // size * size
        return session.join_group(name, range(first, first + size), self._device)

    def _has_arrival_passed(self, session: Session) -> bool:
        """Check that the launched nodes and devices are those requested; otherwise skip all phases."""
        failed = bool(self._make_result(self._read_samples(session), None)["checks"][0]["status"] == "FAIL")
        if failed:
            self._skipped = dict.fromkeys(PHASES, "arrival failed")
        return not failed

    def _find_skip_reason(self, phase: str, session: Session, phases: Phases) -> str:
        """Return why a phase must be skipped, or an empty string; rank 0 decides for all."""
        training, launch = self.config.training, self.launch
        reasons = {
            f"out of time: limits.total_s={self.config.limits.total_s:g} exceeded": session.is_out_of_time,
            "only one node": phase in ("collectives_all", "training_all") and self._num_nodes == 1,
            "only one rank": phase in ("pairs", "collectives_node") and launch.world_size == 1,
            "only one rank per node": phase == "collectives_node" and launch.ranks_per_node == 1,
            "no training section in the config": phase in ("training_node", "training_all", "checkpoint")
            and training is None,
        }
        if phase == "checkpoint" and training is not None:
            reasons |= {
                "training.checkpoint=false": not training.checkpoint,
                "storage.shared_dir is not set": self.config.storage.shared_dir is None,
                "no training phase ran before": not phases.has_state,
            }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def _read_samples(self, session: Session) -> dict[str, dict[int, Any]]:
        samples: dict[str, dict[int, Any]] = {}
        for name in ("hello", *PHASES):
            samples[name] = session.read(name)
            if name == "hello" or len(samples[name]) == self.launch.world_size:
                continue
            partial = session.read(f"partial_{name}")
            samples[f"partial_{name}"] = {rank: value for rank, value in partial.items() if rank not in samples[name]}
        return {name: by_rank for name, by_rank in samples.items() if by_rank}

    def _publish(self, name: str, sample: dict[str, Any]) -> None:
        assert self._session is not None
        self._mine[name] = sample
        self._mine.pop(f"partial_{name}", None)
        self._session.publish(name, sample)

    def _publish_partial(self, phase: str, sample: dict[str, Any]) -> None:
        self._publish(f"partial_{phase}", sample)

    def _show(self, text: str) -> None:
        if self._progress is not None:
            self._progress.show_detail(text)

    def _make_result(self, samples: dict[str, dict[int, Any]], end: EarlyEnd | None) -> dict[str, Any]:
        hosts = {rank: hello["host"] for rank, hello in samples.get("hello", {}).items()}
        launch = self.launch
        checks = judge_run(self.config, samples, hosts, launch.ranks_per_node, launch.world_size, end, self._skipped)
        return make_result(
            self.config,
            checks,
            samples,
            world_size=launch.world_size,
            ranks_per_node=launch.ranks_per_node,
            started_at=self._started_at,
            seconds=time.monotonic() - self._started,
        )

    def _finish(self, session: Session) -> dict[str, Any]:
        result = self._make_result(self._read_samples(session), None)
        self._write(result)
        return result

    def _write(self, result: dict[str, Any]) -> str:
        """Write the current result, after each phase so that it survives any end; return the error, if any."""
        try:
            write_result(result, self._folder)
            self.write_error = ""
        except OSError as error:
            self.write_error = f"{self._folder}: the result cannot be written ({error.strerror})"
        return self.write_error

    def _write_early(self, end: EarlyEnd) -> None:
        """Write the result of a run that ends early."""
        if self._session is None or end.kind == "lost":  # the store with the other ranks' samples is out of reach
            samples = self._recover_samples()
            for name, sample in self._mine.items():
                samples.setdefault(name, {})[self.launch.rank] = sample
            if self._session is not None:
                samples["hello"] = dict(self._session.hellos)
        else:
            samples = self._read_samples(self._session)
        result = self._make_result(samples, end)
        write_result(result, self._folder)
        if self._early_progress is not None:
            self._early_progress.show_result(result)

    def _recover_samples(self) -> dict[str, dict[int, Any]]:
        """Read the samples that rank 0 wrote after its last phase, if this rank sees the same disk."""
        try:
            if (self._folder / RESULT_FILE).stat().st_mtime < self._started_at:  # of an earlier run
                return {}
            samples: dict[str, dict[str, Any]] = read_result(self._folder)["samples"]
        except (OSError, ConfigError):
            return {}
        return {name: {int(rank): value for rank, value in by_rank.items()} for name, by_rank in samples.items()}
