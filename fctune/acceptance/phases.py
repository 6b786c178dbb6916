"""The phases of an acceptance run on one rank: each adds what it measures to a dict, piece by piece."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fctune.acceptance.collectives import check_pair, measure_collective, measure_pairs, sizes_of
from fctune.acceptance.compute import checksum_products, measure_copies, measure_products
from fctune.acceptance.config import AcceptanceConfig
from fctune.acceptance.fault_injection import Faults
from fctune.acceptance.identity import count_xids, describe_rank, measure_clock, read_kernel_log
from fctune.acceptance.session import OutOfTime, Session
from fctune.acceptance.statistics import bandwidth
from fctune.acceptance.storage import find_obstacle, folder_in, list_groups, measure_disk
from fctune.acceptance.training import load_run, measure_checkpoint, measure_steps, sizes_of_shards
from fctune.distributed import World
from fctune.training.loop import TrainState

Found = dict[str, Any]


class Phases:
    """What is measured, by name, in the order of a run.

    A phase that is called again, with what it found before, adds to it.

    Args:
        session: of the run.
        config: of the run.
        device: of this rank.
        run_id: names what the run writes on disks.
        keep: called with the name of a phase and what it has found so far, after each piece.
        tell: called with a line on what a piece came to.
    """

    def __init__(
        self,
        session: Session,
        config: AcceptanceConfig,
        device: torch.device,
        run_id: str,
        keep: Callable[[str, Found], None],
        tell: Callable[[str], None],
    ):
        self._session, self._config, self._device, self._run_id = session, config, device, run_id
        self._keep_of, self._tell = keep, tell
        self._name = ""
        self._launch = session.launch
        self._faults = Faults(config.faults, session.launch.rank)
        self._state: TrainState | None = None
        self.by_name: dict[str, Callable[[World, Found], None]] = {
            "identity": self._identify,
            "compute": self._compute,
            "pairs": self._pairs,
            "collectives_node": self._collectives,
            "storage": self._storage,
            "training_node": self._train,
            "collectives_all": self._collectives,
            "training_all": self._train,
            "checkpoint": self._checkpoint,
        }

    @property
    def has_state(self) -> bool:
        """Whether there is something trained to save."""
        return self._state is not None

    def begin(self, name: str, world: World, found: Found) -> None:
        """Measure one, and do what is done wrong on purpose at its beginning."""
        self._name = name
        self._session.enter(name)
        self._faults.end(name)
        self.by_name[name](world, found)

    def let_go(self) -> None:
        """Let go of what is bound to the process group, and of its memory."""
        self._state = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _keep(self, found: Found) -> None:
        self._keep_of(self._name, found)

    def _identify(self, world: World, found: Found) -> None:
        found |= describe_rank(world, self._launch.rank) | {"clock_offset_s": measure_clock(world)}

    def _compute(self, world: World, found: Found) -> None:
        session, config, device = self._session, self._config.compute, self._device
        self._add_checksums(found)
        for dtype in config.dtypes:
            product = found.setdefault("products", {}).setdefault(dtype, {})
            measure_products(session, config, dtype, device, self._faults, product)
            self._keep(found)
        measure_copies(session, config, device, self._faults, found.setdefault("copies", {}))
        self._add_checksums(found)
        log = read_kernel_log() if device.type == "cuda" else None
        pci = json.loads(session.read("identity")[self._launch.rank])["pci"]
        found["xids"] = None if log is None or pci is None else count_xids(log, pci)

    def _add_checksums(self, found: Found) -> None:
        config = self._config.compute
        self._session.time_left()
        self._session.enter("checksums")
        made = checksum_products(config, config.dtypes, self._device, self._faults)
        found.setdefault("checksums", []).append(made)
        self._keep(found)

    def _pairs(self, world: World, found: Found) -> None:
        config = self._config.pairs
        found["bytes"] = max(1, int(config.mib * 2**18)) * 4
        measure_pairs(self._session, config, world, self._faults, found.setdefault("seconds", {}))
        self._keep(found)
        self._session.time_left()
        self._session.enter("checking messages")
        found["wrong"] = check_pair(world, self._faults, min(config.mib, 16.0))

    def _collectives(self, world: World, found: Found) -> None:
        session, config = self._session, self._config.collectives
        extra: dict[str, int] = {}
        if self._config.training is not None:
            with tempfile.TemporaryDirectory() as folder:
                extra = sizes_of_shards(*load_run(self._config.training, Path(folder)), world)
        results = found.setdefault("results", [])
        for operation in config.operations:
            sharded = list(extra.values()) if operation in ("all_gather", "reduce_scatter") else []
            told = []
            for num_bytes in sizes_of(config, sharded):
                made = measure_collective(session, config, operation, num_bytes, world, self._faults)
                label = next((name for name, size in extra.items() if size == num_bytes and size in sharded), "")
                results.append({"operation": operation, "asked": num_bytes, "label": label} | made)
                self._keep(found)
                seconds = sum(made["seconds"]) / len(made["seconds"])
                rate = bandwidth(operation, made["bytes"], world.world_size, seconds)[1]
                told.append(f"{num_bytes / 2**20:.4g} MiB {rate:.4g}")
            self._tell(f"{operation}, GB/s: {', '.join(told)}")

    def _storage(self, world: World, found: Found) -> None:
        session, config, launch = self._session, self._config.storage, self._launch
        for disk in ("node", "shared"):
            directory: str | None = getattr(config, f"{disk}_dir")
            if directory is None:
                found[disk] = {"skipped": f"storage.{disk}_dir is not set"}
                continue
            session.time_left()
            sharing = launch.ranks_per_node if disk == "node" else launch.world_size
            session.enter(f"looking at the {disk} disk")
            session.put(f"obstacle {disk}", find_obstacle(config, directory, sharing))
            session.meet(f"the {disk} disk", session.limits.build_s)
            obstacles = [json.loads(text) for _, text in sorted(session.read(f"obstacle {disk}").items())]
            obstacle = next((text for text in obstacles if text is not None), None)
            if obstacle is not None:
                found[disk] = {"skipped": obstacle}
                continue
            folder = folder_in(directory, self._run_id)
            groups = list_groups(disk, launch.ranks_per_node, launch.world_size)
            times = found.setdefault(disk, {})
            if "all" in times:  # of all at once alone is it asked who is slower than the others
                groups = {"all": groups["all"]}
            over: OutOfTime | None = None
            try:
                measure_disk(session, config, folder, disk, groups, self._faults, times)
                if disk == "shared":
                    found["sees_shared"] = self._see_shared(folder)
            except OutOfTime as error:
                over = error
            self._keep(found)
            session.meet(f"leaving the {disk} disk", session.limits.build_s)
            session.clean()
            if over is not None:
                raise over

    def _see_shared(self, folder: Path) -> bool:
        if self._launch.rank == 0:
            (folder / "seen").touch()
        self._session.meet("shared disk: a file is there")
        return (folder / "seen").exists()

    def _train(self, world: World, found: Found) -> None:
        assert self._config.training is not None
        self.let_go()
        with tempfile.TemporaryDirectory() as folder:
            run, model_dir = load_run(self._config.training, Path(folder))
            self._state = measure_steps(
                self._session, self._config.training, run, model_dir, world, self._faults, found
            )

    def _checkpoint(self, world: World, found: Found) -> None:
        assert self._state is not None
        session, config = self._session, self._config.storage
        directory = str(config.shared_dir)
        ranks = self._launch.world_size
        found["skipped"] = session.share("what stands in the way", lambda: find_obstacle(config, directory, ranks))
        if found["skipped"] is not None:
            return
        del found["skipped"]
        most = session.share("the space", lambda: int(config.max_share_of_free * shutil.disk_usage(directory).free))
        measure_checkpoint(session, self._state, folder_in(directory, self._run_id) / "checkpoint", most, found)
        session.meet("the checkpoint is read", session.limits.build_s)
        session.clean()
