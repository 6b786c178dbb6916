"""The phases of an acceptance run on one rank; each adds its measurements to a sample, piece by piece."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
from fctune.apps.acceptance.session import OutOfTime, Session
from fctune.apps.acceptance.storage import find_obstacle, list_groups, measure_disk, work_dir
from fctune.apps.acceptance.training import list_shard_sizes, load_run, measure_checkpoint, measure_steps
from fctune.base.distributed import World
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
        pci = json.loads(session.read("identity")[self._launch.rank])["pci"]
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
            obstacles = [json.loads(text) for _, text in sorted(session.read(f"obstacle {disk}").items())]
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
