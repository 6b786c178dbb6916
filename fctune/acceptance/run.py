"""The order of an acceptance run: which phase when and how often, and what is made of all of them."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from fctune.acceptance.checks import NAMED_BY_SPEED, PHASES, judge
from fctune.acceptance.config import AcceptanceConfig
from fctune.acceptance.ending import Ending
from fctune.acceptance.phases import Phases
from fctune.acceptance.result import NAME, make_document, read_document, write_document
from fctune.acceptance.session import OutOfTime, Session
from fctune.acceptance.training import load_run
from fctune.distributed import LauncherEnvironment, World
from fctune.errors import ConfigError


class Listener(Protocol):
    """Is told on rank 0 how a run goes."""

    def begin(self, phase: str, seconds: float) -> None:
        """A phase begins, so many seconds after the run did."""

    def tell(self, text: str) -> None:
        """What a piece of it came to on rank 0."""

    def show(self, document: dict[str, Any]) -> None:
        """The document as it stands after a phase."""

    def end(self, document: dict[str, Any]) -> None:
        """The document of a run that is over; of one that ended early, on the rank that writes it."""


class Acceptance:
    """One run on one rank.

    Args:
        config: of the run.
        launch: what the launcher says of this process.
        listener: to how it goes.
    """

    def __init__(self, config: AcceptanceConfig, launch: LauncherEnvironment, listener: Listener | None = None):
        self.config, self.launch = config, launch
        self._listener = listener
        self._folder = Path(config.output_dir)
        self._started, self._started_at = time.monotonic(), time.time()
        self._skipped: dict[str, str] = {}
        self._mine: dict[str, Any] = {}  # this rank's samples
        self._session: Session | None = None
        self.unwritten = ""  # why the result could not be written, where it could not
        if config.device == "cuda" and torch.cuda.is_available():
            self._device = torch.device("cuda", launch.local_rank)
            torch.cuda.set_device(self._device)
        else:
            self._device = torch.device("cpu")

    def run(self) -> dict[str, Any]:
        """The document, the same on all ranks; of a run that ends early, none comes back: its process ends too.

        Raises:
            ConfigError: the run to be trained does not hold, or the result cannot be written where it is wanted.
        """
        if self.config.training is not None:  # a config that does not hold is found before anything is measured
            with tempfile.TemporaryDirectory() as folder:
                load_run(self.config.training, Path(folder))
        self._session = session = Session(self.launch, self.config.limits, self._folder, self._write_early)
        session.arrive()
        if session.share("place for the result", lambda: self._write(self._document({}, None))):
            session.close()
            raise ConfigError(f"output_dir={self._folder}: cannot be written, or has no space. Choose another.")
        try:
            return self._measure(session)
        except BaseException as error:
            session.fail(error)
            raise

    def _measure(self, session: Session) -> dict[str, Any]:
        run_id = session.share("run", lambda: f"{self._started_at:.0f}-{self.launch.port}")
        if session.share("start", lambda: not self._arrival_failed(session)):
            phases = Phases(session, self.config, self._device, run_id, self._keep, self._tell)
            scope, world = "", None
            for phase in phases.by_name:
                reason = session.share(f"begin {phase}", functools.partial(self._find_reason, phase, session, phases))
                if reason:
                    self._skipped[phase] = reason
                    continue
                wanted = "node" if phase in ("collectives_node", "training_node") else "all"
                wanted = "all" if self._num_nodes == 1 else scope if phase == "storage" and scope else wanted
                if world is None or wanted != scope:
                    phases.let_go()
                    scope, world = wanted, self._join(session, wanted, f"{wanted} for {phase}")
                self._run_phase(session, phases, phase, world)
            session.end_of_time()
            session.leave_group()
        document: dict[str, Any] = session.share("document", lambda: self._finish(session))
        session.close()
        if self._listener is not None and self.launch.rank == 0:
            self._listener.end(document)
        return document

    def _run_phase(self, session: Session, phases: Phases, phase: str, world: World) -> None:
        """Measure a phase, and again where it would name someone for being slow: what passes is not the machine's."""
        if self._listener is not None and self.launch.rank == 0:
            self._listener.begin(phase, time.monotonic() - self._started)
        found: dict[str, Any] = {}
        for attempt in range(1 + self.config.rechecks):
            try:
                phases.begin(phase, world, found)
            except OutOfTime as error:
                if not attempt:
                    found["cut"] = str(error)
            self._put(phase, found)
            session.meet(f"the end of {phase}", self.config.limits.build_s)
            if not session.share(f"{phase} again", functools.partial(self._is_to_repeat, session, phase, attempt)):
                break
        if self.launch.rank == 0:
            document = self._document(self._samples(session), None)
            self._write(document)
            if self._listener is not None:
                self._listener.show(document)

    def _is_to_repeat(self, session: Session, phase: str, attempt: int) -> bool:
        if phase not in NAMED_BY_SPEED or attempt == self.config.rechecks or session.is_out_of_time:
            return False
        checks = self._document(self._samples(session), None)["checks"]
        suspects = [
            culprit
            for check in checks
            for culprit in check["culprits"]
            if check["name"] in NAMED_BY_SPEED[phase] and culprit["kind"] != "unknown"
        ]
        if suspects:
            self._tell(f"once more, for {suspects[0]['text']}")
        return bool(suspects)

    @property
    def _num_nodes(self) -> int:
        return max(1, self.launch.world_size // self.launch.ranks_per_node)

    def _join(self, session: Session, scope: str, name: str) -> World:
        launch = self.launch
        first = launch.rank // launch.ranks_per_node * launch.ranks_per_node if scope == "node" else 0
        size = launch.ranks_per_node if scope == "node" else launch.world_size
        return session.join(name, range(first, first + size), self._device)

    def _arrival_failed(self, session: Session) -> bool:
        """Whether there are other nodes or devices than asked for: nothing measured there would be what was asked."""
        failed = bool(self._document(self._samples(session), None)["checks"][0]["status"] == "FAIL")
        if failed:
            self._skipped = dict.fromkeys(PHASES, "arrival failed")
        return failed

    def _find_reason(self, phase: str, session: Session, phases: Phases) -> str:
        """Why a phase is not to be run; empty where it is. What rank 0 finds holds for all."""
        config = self.config
        if session.is_out_of_time:
            return f"out of time: limits.total_s={config.limits.total_s:g} over"
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
            if not phases.has_state:
                return "no training before it"
        return ""

    def _samples(self, session: Session) -> dict[str, dict[int, Any]]:
        found: dict[str, dict[int, Any]] = {}
        for name in ("hello", *PHASES):
            found[name] = {rank: json.loads(text) for rank, text in session.read(name).items()}
            if name == "hello" or len(found[name]) == self.launch.world_size:
                continue
            partial = {rank: json.loads(text) for rank, text in session.read(f"partial_{name}").items()}
            found[f"partial_{name}"] = {rank: value for rank, value in partial.items() if rank not in found[name]}
        return {name: by_rank for name, by_rank in found.items() if by_rank}

    def _put(self, phase: str, value: dict[str, Any]) -> None:
        assert self._session is not None
        self._mine[phase] = value
        self._mine.pop(f"partial_{phase}", None)
        self._session.put(phase, value)

    def _keep(self, phase: str, value: dict[str, Any]) -> None:
        self._put(f"partial_{phase}", value)

    def _tell(self, text: str) -> None:
        if self._listener is not None and self.launch.rank == 0:
            self._listener.tell(text)

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

    def _finish(self, session: Session) -> dict[str, Any]:
        document = self._document(self._samples(session), None)
        self._write(document)
        return document

    def _write(self, document: dict[str, Any]) -> str:
        """Write what is known: after each phase, so that it outlives whatever ends the run; why not, where not."""
        try:
            write_document(document, self._folder)
            self.unwritten = ""
        except OSError as error:
            self.unwritten = f"{self._folder}: the result cannot be written ({error.strerror})"
        return self.unwritten

    def _write_early(self, ending: Ending) -> None:
        """Write what there is of a run that ends here."""
        if self._session is None or ending.kind == "lost":  # what the others left with rank 0 is out of reach
            samples = self._recover()
            for phase, value in self._mine.items():
                samples.setdefault(phase, {})[self.launch.rank] = value
            if self._session is not None:
                samples["hello"] = dict(self._session.hellos)
        else:
            samples = self._samples(self._session)
        document = self._document(samples, ending)
        write_document(document, self._folder)
        if self._listener is not None:
            self._listener.end(document)

    def _recover(self) -> dict[str, dict[int, Any]]:
        """The samples that rank 0 wrote down after its last phase, where this rank sees the same disk."""
        try:
            if (self._folder / NAME).stat().st_mtime < self._started_at:  # of an earlier run
                return {}
            samples: dict[str, dict[str, Any]] = read_document(self._folder)["samples"]
        except (OSError, ConfigError):
            return {}
        return {phase: {int(rank): value for rank, value in found.items()} for phase, found in samples.items()}
