"""The order of an acceptance run: who measures what when, and what is made of it."""

from __future__ import annotations

import functools
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fctune.acceptance.checks import PHASES, judge
from fctune.acceptance.collectives import check_pair, measure_collective, measure_pairs, sizes_of
from fctune.acceptance.compute import checksum_products, measure_copies, measure_products
from fctune.acceptance.config import AcceptanceConfig
from fctune.acceptance.faults import Faults
from fctune.acceptance.identity import count_xids, describe_rank, measure_clock, read_kernel_log
from fctune.acceptance.result import make_document, write_document
from fctune.acceptance.session import Ending, Session
from fctune.acceptance.storage import find_obstacle, folder_in, measure_disk
from fctune.acceptance.training import (
    load_run,
    measure_checkpoint,
    measure_steps,
    sizes_of_shards,
)
from fctune.training.distributed import Launch, World
from fctune.training.loop import TrainState

Listener = Callable[[dict[str, Any]], None]


class Acceptance:
    """One run on one rank.

    Args:
        config: of the run.
        launch: what the launcher says of this process.
        listen: called on rank 0 with the document as it stands after each phase.
    """

    def __init__(self, config: AcceptanceConfig, launch: Launch, listen: Listener = lambda _: None):
        self.config, self.launch = config, launch
        self._listen = listen
        self._folder = Path(config.output_dir)
        self._started, self._started_at = time.monotonic(), time.time()
        self._faults = Faults(config.faults, launch.rank)
        self._skipped: dict[str, str] = {}
        self._mine: dict[str, Any] = {}  # this rank's samples
        self._state: TrainState | None = None
        self._session: Session | None = None
        if config.device == "cuda" and torch.cuda.is_available():
            self._device = torch.device("cuda", launch.local_rank)
            torch.cuda.set_device(self._device)
        else:
            self._device = torch.device("cpu")

    def run(self) -> dict[str, Any]:
        """The document, the same on all ranks; of a run that ends early, none comes back: its process ends too."""
        if self.config.training is not None:  # a config that does not hold is found before anything is measured
            with tempfile.TemporaryDirectory() as folder:
                load_run(self.config.training, Path(folder))
        self._session = session = Session(self.launch, self.config.limits, self._folder, self._write_early)
        session.arrive()
        try:
            return self._measure(session)
        except BaseException as error:
            session.fail(error)
            raise

    def _measure(self, session: Session) -> dict[str, Any]:
        launch = self.launch
        self._run_id = session.share("run", lambda: f"{self._started_at:.0f}-{launch.port}")
        go = session.share("start", lambda: not self._arrival_failed(session))
        if go:
            phases: dict[str, Callable[[World], dict[str, Any]]] = {
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
            scope, world = "", None
            for phase, measure in phases.items():
                reason = session.share(f"begin {phase}", functools.partial(self._find_reason, phase))
                if reason:
                    self._skipped[phase] = reason
                    continue
                wanted = "node" if phase in ("collectives_node", "training_node") else "all"
                wanted = "all" if self._num_nodes == 1 else scope if phase == "storage" and scope else wanted
                if world is None or wanted != scope:
                    scope, world = wanted, self._join(wanted, f"{wanted} for {phase}")
                session.enter(phase)
                self._faults.end(phase)
                self._put(phase, measure(world))
                session.meet(f"the end of {phase}", self.config.limits.build_s)
                if launch.rank == 0:
                    self._listen(self._document(self._samples(session), None))
            session.leave_group()
        document: dict[str, Any] = session.share("document", self._finish)
        session.close()
        return document

    @property
    def _num_nodes(self) -> int:
        return max(1, self.launch.world_size // self.launch.ranks_per_node)

    def _join(self, scope: str, name: str) -> World:
        assert self._session is not None
        self._state = None
        launch = self.launch
        first = launch.rank // launch.ranks_per_node * launch.ranks_per_node if scope == "node" else 0
        size = launch.ranks_per_node if scope == "node" else launch.world_size
        return self._session.join(name, range(first, first + size), self._device)

    def _arrival_failed(self, session: Session) -> bool:
        """Whether there are other nodes or devices than asked for: nothing measured there would be what was asked."""
        failed = bool(self._document(self._samples(session), None)["checks"][0]["status"] == "FAIL")
        if failed:
            self._skipped = dict.fromkeys(PHASES, "arrival failed")
        return failed

    def _find_reason(self, phase: str) -> str:
        """Why a phase is not to be run; empty where it is. What rank 0 finds holds for all."""
        config = self.config
        elapsed = time.monotonic() - self._started
        if elapsed > config.limits.total_s:
            return f"out of time: {elapsed:.0f} s of limits.total_s={config.limits.total_s:g} are over"
        if phase in ("collectives_all", "training_all") and self._num_nodes == 1:
            return "one node"
        if phase in ("pairs", "collectives_node") and self.launch.world_size == 1:
            return "one rank"
        if phase == "collectives_node" and self.launch.ranks_per_node == 1:
            return "one rank a node"
        if phase in ("training_node", "training_all", "checkpoint") and config.training is None:
            return "no training section in the config"
        if phase == "checkpoint" and config.training is not None:
            if not config.training.checkpoint:
                return "training.checkpoint=false"
            if config.storage.shared_dir is None:
                return "storage.shared_dir is not set"
            if self._state is None:
                return "no training before it"
        return ""

    # --- phases ---

    def _identify(self, world: World) -> dict[str, Any]:
        assert self._session is not None
        self._session.enter("identity")
        return describe_rank(world, self.launch.rank) | {"clock_offset_s": measure_clock(world)}

    def _compute(self, world: World) -> dict[str, Any]:
        assert self._session is not None
        session, config, device = self._session, self.config.compute, self._device
        session.enter("checksums")
        first = checksum_products(config, config.dtypes, device, self._faults)
        products = {dtype: measure_products(session, config, dtype, device, self._faults) for dtype in config.dtypes}
        copies = measure_copies(session, config, device, self._faults)
        session.enter("checksums")
        second = checksum_products(config, config.dtypes, device, self._faults)
        log = read_kernel_log() if device.type == "cuda" else None
        pci = json.loads(session.read("identity")[self.launch.rank])["pci"]
        xids = None if log is None or pci is None else count_xids(log, pci)
        return {"products": products, "copies": copies, "checksums": [first, second], "xids": xids}

    def _pairs(self, world: World) -> dict[str, Any]:
        assert self._session is not None
        config = self.config.pairs
        seconds = measure_pairs(self._session, config, world, self._faults)
        self._session.enter("checking messages")
        wrong = check_pair(world, self._faults, min(config.mib, 16.0))
        return {"seconds": seconds, "wrong": wrong, "bytes": max(1, int(config.mib * 2**18)) * 4}

    def _collectives(self, world: World) -> dict[str, Any]:
        assert self._session is not None
        extra: dict[str, int] = {}
        if self.config.training is not None:
            with tempfile.TemporaryDirectory() as folder:
                extra = sizes_of_shards(*load_run(self.config.training, Path(folder)), world)
        results: list[dict[str, Any]] = []
        scope = "node" if world.world_size < self.launch.world_size or self._num_nodes == 1 else "all"
        for operation in self.config.collectives.operations:
            sharded = list(extra.values()) if operation in ("all_gather", "reduce_scatter") else []
            for num_bytes in sizes_of(self.config.collectives, sharded):
                found = measure_collective(
                    self._session, self.config.collectives, operation, num_bytes, world, self._faults
                )
                label = next((name for name, size in extra.items() if size == num_bytes and size in sharded), "")
                results.append({"operation": operation, "asked": num_bytes, "label": label} | found)
                self._put(f"partial_collectives_{scope}", {"results": results})
        return {"results": results}

    def _storage(self, world: World) -> dict[str, Any]:
        assert self._session is not None
        session, config, found = self._session, self.config.storage, {}
        sees_shared = False
        for disk in ("node", "shared"):
            directory: str | None = getattr(config, f"{disk}_dir")
            if directory is None:
                found[disk] = {"skipped": f"storage.{disk}_dir is not set"}
                continue
            sharing = self.launch.ranks_per_node if disk == "node" else self.launch.world_size
            session.enter(f"looking at the {disk} disk")
            session.put(f"obstacle {disk}", find_obstacle(config, directory, sharing))
            session.meet(f"the {disk} disk", session.limits.build_s)
            obstacles = [json.loads(text) for _, text in sorted(session.read(f"obstacle {disk}").items())]
            obstacle = next((text for text in obstacles if text is not None), None)
            if obstacle is not None:
                found[disk] = {"skipped": obstacle}
                continue
            folder = folder_in(directory, self._run_id)
            found[disk] = measure_disk(session, config, folder, disk, self.launch.rank, self._faults)
            if disk == "shared":
                sees_shared = self._see_shared(session, folder)
            session.meet(f"leaving the {disk} disk", session.limits.build_s)
            session.clean()
        return found | {"sees_shared": sees_shared}

    def _see_shared(self, session: Session, folder: Path) -> bool:
        if self.launch.rank == 0:
            (folder / "seen").touch()
        session.meet("shared disk: a file is there")
        return (folder / "seen").exists()

    def _train(self, world: World) -> dict[str, Any]:
        assert self._session is not None
        assert self.config.training is not None
        self._state = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory() as folder:
            run, model_dir = load_run(self.config.training, Path(folder))
            found, self._state = measure_steps(self._session, self.config.training, run, model_dir, world, self._faults)
        return found

    def _checkpoint(self, world: World) -> dict[str, Any]:
        assert self._session is not None
        assert self._state is not None
        config = self.config.storage
        obstacle = find_obstacle(config, str(config.shared_dir), self.launch.world_size)
        if obstacle is not None:
            return {"skipped": obstacle}
        free = shutil.disk_usage(str(config.shared_dir)).free
        folder = folder_in(str(config.shared_dir), self._run_id) / "checkpoint"
        found = measure_checkpoint(self._session, self._state, folder, int(config.max_share_of_free * free))
        self._session.meet("the checkpoint is read", self._session.limits.build_s)
        self._session.clean()
        return found

    # --- what is made of it ---

    def _samples(self, session: Session) -> dict[str, dict[int, Any]]:
        names = ("hello", *PHASES, "partial_collectives_node", "partial_collectives_all")
        found = {name: {r: json.loads(text) for r, text in session.read(name).items()} for name in names}
        for scope in ("node", "all"):
            partial = found.pop(f"partial_collectives_{scope}")
            if len(found[f"collectives_{scope}"]) < len(partial):
                found[f"partial_collectives_{scope}"] = partial
        return {name: by_rank for name, by_rank in found.items() if by_rank}

    def _put(self, phase: str, value: dict[str, Any]) -> None:
        assert self._session is not None
        self._mine[phase] = value
        self._session.put(phase, value)

    def _document(self, samples: dict[str, dict[int, Any]], ending: Ending | None) -> dict[str, Any]:
        hosts = {rank: hello["host"] for rank, hello in samples.get("hello", {}).items()}
        launch, size = self.launch, self.launch.world_size
        checks = judge(self.config, samples, hosts, launch.ranks_per_node, size, ending, self._skipped)
        return make_document(
            self.config,
            checks,
            samples,
            world_size=size,
            ranks_per_node=launch.ranks_per_node,
            started_at=self._started_at,
            seconds=time.monotonic() - self._started,
        )

    def _finish(self) -> dict[str, Any]:
        assert self._session is not None
        document = self._document(self._samples(self._session), None)
        write_document(document, self._folder)
        return document

    def _write_early(self, ending: Ending) -> None:
        """Write what there is of a run that ends here."""
        is_alone = self._session is None or ending.kind == "lost"  # what the others measured is out of reach
        mine = {phase: {self.launch.rank: value} for phase, value in self._mine.items()}
        if self._session is not None:
            mine["hello"] = dict(self._session.hellos)
        document = self._document(mine if is_alone else self._samples(self._session), ending)  # type: ignore[arg-type]
        write_document(document, self._folder)
        self._listen(document)
