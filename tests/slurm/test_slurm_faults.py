"""Faults under a real Slurm: who restarts the run, what is lost, and that it ends equal to a run without a fault.

    make test-slurm-faults        # runs/slurm_faults.json has what was measured

Jobs have two of three nodes, and one rank per node where the case does not need more.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.faults.groups import run_group
from tests.faults.harness import arguments_for, differences, make_inputs
from tests.slurm.cluster import UID, Cluster, wait_until, workers
from tests.slurm.test_slurm_batch import Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

RESULTS = ROOT / "runs" / "slurm_faults.json"
SETTINGS = ("max_steps=30", "checkpoint.every=5", "checkpoint.elastic_every=0")
HANG_S = 30  # step_timeout_s where a rank hangs
LIMIT_S = 900  # of each start; seconds on an idle machine, minutes on a busy one
NOBODY, BATCH, SLURM = "nobody", "batch.sh", "Slurm"


class Trial:
    """A run of which the last rank, on the second node, waits at some steps for what a test does to it."""

    def __init__(self, cluster: Cluster, clone: Path, inputs: Path, name: str, steps: Sequence[int] = ()) -> None:
        self.cluster, self.clone, self.inputs, self.name, self.steps = cluster, clone, inputs, name, steps
        self.run = cluster.run_files(name)
        self.folder = inputs / name
        self.folder.mkdir()
        self.folder.chmod(0o777)
        self.job: Job
        self.struck = 0.0

    def submit(self, *overrides: str, ranks_per_node: int = 1) -> None:
        """Submit the job; again, once it has failed."""
        shared = Path("/mnt/shared") / self.inputs.name
        inputs = (shared / "model", shared / "rows.jsonl")
        _, _, _, *settings = arguments_for(self.run.folder, *inputs, *SETTINGS, *overrides)
        python_path = f"{shared}/python:{os.environ.get('PYTHONPATH', '')}"
        variables = {
            "PYTHONPATH": python_path.rstrip(":"),
            "FCTUNE_FAULTS": f"{shared}/{self.name}",
            "FCTUNE_FAULT_STEPS": ":".join(map(str, self.steps)),
            "FCTUNE_CPU_RANKS": str(ranks_per_node),
        }
        exported = ",".join(f"{name}={value}" for name, value in variables.items())
        options = f"--partition=spare --export=ALL,{exported}"
        words = map(shlex.quote, settings)
        self.job = Job(self.cluster, self.clone, "configs/tiny_lora.yaml", self.name, *words, options=options)

    def reach(self, step: int) -> str:
        """Wait until the last rank waits at a step, and return its node."""
        wait_until((self.folder / f"reached-{step}").exists, f"{self.name} reaches step {step}", LIMIT_S)
        hosts = self.cluster.ssh(f"scontrol show hostnames {self.job.facts()['NodeList']}").split()
        return hosts[-1]

    def strike(self, step: int, order: str = "") -> None:
        """Note the time of a fault; with an order, tell the waiting rank to cause it."""
        self.struck = time.time()
        if order:
            part = self.folder / "order"
            part.write_text(order)
            part.rename(self.folder / f"do-{step}")

    def last_rank(self) -> int:
        """Return the process of the last rank."""
        found = {int(process.environ.split(b"\0RANK=")[1].split(b"\0")[0]): process.pid for process in workers()}
        return found[max(found)]

    def seconds_until(self, at: str) -> int:
        """Return the seconds from the fault to a time that Slurm reports."""
        return round(datetime.fromisoformat(at).timestamp() - self.struck)

    def measure_restart(self, fault: str, step: int, restart: int) -> dict[str, Any]:
        """Wait until the run trains again after the ``restart``-th fault, which was at ``step``."""

        def find_resumed() -> Any:
            assert self.job.facts()["JobState"] != "FAILED", self.log()
            resumed = json.loads((self.run.folder / "run.json").read_text()).get("resumed", [])
            return resumed[restart - 1] if len(resumed) >= restart else None

        resumed = wait_until(find_resumed, f"{self.name} resumes", LIMIT_S)
        time.sleep(0.5)  # until later steps of the start before are deleted
        wait_until(lambda: self.run.last_step() > resumed["step"], f"{self.name} trains again", LIMIT_S)
        trains_s = round(time.time() - self.struck)
        facts, summary = self.job.facts(), self.job.path("_summary.txt")
        has_ended_itself = summary.exists() and f"(restart {restart - 1})" in summary.read_text()
        return {
            "fault": fault,
            "code": (resumed["before"]["exit"] or {}).get("code"),
            "restarted_by": BATCH if has_ended_itself else SLURM,
            "lost_steps": step - 1 - resumed["step"],
            "ended_s": None,
            "started_s": self.seconds_until(facts["StartTime"]),
            "trains_s": trains_s,
            "left_out": facts["ExcNodeList"].replace("(null)", ""),
            "nodes": facts["NodeList"],
        }

    def measure_end(self, fault: str, step: int) -> dict[str, Any]:
        """Wait until the job has failed, which loses the steps that a re-run repeats."""
        facts = self.job.wait_for_state("FAILED", timeout_s=LIMIT_S)
        return {
            "fault": fault,
            "code": int(facts["ExitCode"].split(":")[0]),
            "restarted_by": NOBODY,
            "lost_steps": max(0, step - 1 - self.run.newest_checkpoint()),
            "ended_s": self.seconds_until(facts["EndTime"]),
            "started_s": None,
            "trains_s": None,
            "left_out": facts["ExcNodeList"].replace("(null)", ""),
            "nodes": facts["NodeList"],
        }

    def finish(self) -> None:
        """Wait for the end of the job."""
        facts = self.job.wait_for_state("COMPLETED", "FAILED", timeout_s=LIMIT_S)
        assert facts["JobState"] == "COMPLETED", self.log()

    def log(self) -> str:
        """Return the end of the job's output."""
        return self.job.text(".log")[-3000:] + self.job.text(".err")[-2000:]


@pytest.fixture(scope="module")
def inputs(cluster: Cluster) -> Path:
    """Write a model, rows, and the module that makes ranks wait to the shared disk."""
    folder = cluster.shared / "faults"
    (folder / "python").mkdir(parents=True)
    make_inputs(folder)
    shutil.copy(Path(__file__).with_name("rank_faults.py"), folder / "python" / "sitecustomize.py")
    subprocess.run(["chown", "--recursive", f"{UID}:{UID}", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on two ranks of this machine without a fault."""
    run = tmp_path_factory.mktemp("reference") / "run"
    arguments = arguments_for(run, inputs / "model", inputs / "rows.jsonl", *SETTINGS)
    assert run_group(arguments, 2, limit_s=600).codes == (0, 0)
    return run


@pytest.fixture
def trial(cluster: Cluster, clone: Path, inputs: Path, request: pytest.FixtureRequest) -> Iterator[Trial]:
    """Return a run that is yet to be submitted; afterwards, cancel its job and free the nodes."""
    steps = getattr(request, "param", (14,))
    yield Trial(cluster, clone, inputs, f"fault-{time.monotonic_ns()}", steps)
    cluster.ssh("scancel --signal=KILL --user $USER", check=False)
    cluster.ssh("scancel --user $USER", check=False)
    cluster.wait_idle(LIMIT_S)


def keep_if_equal(trial: Trial, reference: Path, *records: dict[str, Any]) -> None:
    """Compare samples, losses and weights with the reference, in float64; then write what was measured to a file."""
    found = differences(trial.run.folder, reference, 1e-9)
    assert not found, (found, records)
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [one for one in known if one["fault"] not in {record["fault"] for record in records}]
    RESULTS.write_text(json.dumps([*kept, *records], indent=1) + "\n")


def cut_link(node: str) -> None:
    """Drop every packet that arrives on a connection between a node's processes and those of the other nodes.

    Slurm's own connections stay, as if the fast network had failed. A socket filter of the kernel drops the packets, so
    both ends see a peer that is silent.
    """
    own: dict[str, tuple[int, int]] = {}  # inode of a socket -> (process, descriptor)
    others: dict[str, tuple[int, int]] = {}
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or folder.stat().st_uid != UID:
                continue
            is_own = f"\0SLURMD_NODENAME={node}\0".encode() in (folder / "environ").read_bytes()
            for file in (folder / "fd").iterdir():
                kind, _, inode = os.readlink(file).partition(":")
                if kind == "socket":
                    (own if is_own else others)[inode.strip("[]")] = (int(folder.name), int(file.name))
        except OSError:  # the process has just ended
            continue
    ends = {}  # (address and port, those of the peer) -> inode
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            here, there = (field[-13:] for field in fields[1:3])  # of an IPv6 address, the IPv4 one in it
            ends[here, there] = fields[9]
    crossing = [(ends[here, there], ends.get((there, here))) for here, there in ends if ends[here, there] in own]
    crossing = [(inode, peer) for inode, peer in crossing if peer in others]
    assert crossing, "no connection between the nodes"
    for inode, peer in crossing:
        drop_packets(*own[inode])
        drop_packets(*others[peer])


def drop_packets(process: int, descriptor: int) -> None:
    """Make a process's socket drop all that arrives."""
    libc, pidfd_getfd = ctypes.CDLL(None, use_errno=True), 438
    of_process = os.pidfd_open(process)
    copy = libc.syscall(pidfd_getfd, of_process, descriptor, 0)
    os.close(of_process)
    if copy < 0:  # closed meanwhile
        return
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET: keep 0 bytes
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop))
    with socket.socket(fileno=copy) as made:
        made.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


@pytest.mark.parametrize("trial", [(8, 18)], indirect=True)
def test_a_run_survives_the_loss_of_its_second_node_twice(cluster: Cluster, trial: Trial, reference: Path) -> None:
    trial.submit()
    lost: list[str] = []
    records: list[dict[str, Any]] = []
    for number, step in enumerate(trial.steps, start=1):
        lost.append(trial.reach(step))
        trial.strike(step)
        cluster.kill_machine(lost[-1])
        fault = "node 1 of 2 is lost" if number == 1 else "its replacement is lost"
        records.append(trial.measure_restart(fault, step, number) | {"left_out": f"{lost[-1]} (down)"})
        cluster.start_machine(lost[-1])
        idle = f"sinfo --noheader --partition spare --nodes {lost[-1]} --format %T"
        wait_until(lambda: "idle" in cluster.ssh(idle), f"{lost[-1]} is back", 60)  # noqa: B023 (called at once)
    trial.finish()
    assert lost == ["n1", "n2"]
    assert records[0]["nodes"] == "n[0,2]"
    assert records[1]["nodes"] == "n[0-1]"
    keep_if_equal(trial, reference, *records)


@pytest.mark.parametrize("trial", [(8, 18)], indirect=True)
def test_ranks_that_hang_are_ended_on_both_nodes(trial: Trial, reference: Path) -> None:
    trial.submit(f"step_timeout_s={HANG_S}")
    trial.reach(8)
    trial.strike(8)
    os.kill(trial.last_rank(), signal.SIGSTOP)
    stopped = trial.measure_restart("a rank hangs (SIGSTOP)", 8, 1)
    node = trial.reach(18)
    cut_link(node)
    trial.strike(18, "continue")
    cut = trial.measure_restart("the link between the nodes is cut", 18, 2)
    trial.finish()
    assert [(record["code"], record["restarted_by"]) for record in (stopped, cut)] == [(76, BATCH)] * 2
    keep_if_equal(trial, reference, stopped, cut)


@pytest.mark.parametrize("trial", [(8, 18)], indirect=True)
def test_a_rank_that_a_signal_ends_is_replaced_and_its_node_if_the_fault_is_its_own(
    trial: Trial, reference: Path
) -> None:
    trial.submit(ranks_per_node=2)  # the other rank of the node sees the signal
    records: list[dict[str, Any]] = []
    for number, step in ((signal.SIGABRT, 8), (signal.SIGSEGV, 18)):
        trial.reach(step)
        trial.strike(step)
        os.kill(trial.last_rank(), number)
        records.append(trial.measure_restart(f"a rank ends by {number.name}", step, len(records) + 1))
    trial.finish()
    assert [(record["code"], record["restarted_by"]) for record in records] == [(76, BATCH)] * 2
    # NCCL aborts all ranks after a time-out, which may be any node's fault.
    assert [(record["left_out"], record["nodes"]) for record in records] == [("", "n[0-1]"), ("n1", "n[0,2]")]
    keep_if_equal(trial, reference, *records)


@pytest.mark.parametrize("trial", [(7, 12, 17, 22, 27)], indirect=True)
def test_a_rank_that_exits_without_a_word_is_restarted_whatever_its_code_and_so_is_a_job_that_is_asked_to_stop(
    trial: Trial, reference: Path
) -> None:
    trial.submit()
    records: list[dict[str, Any]] = []
    for step, code in zip(trial.steps, (1, 2, 74, 75), strict=False):
        trial.reach(step)
        trial.strike(step, f"exit {code}")
        records.append(trial.measure_restart(f"a rank calls exit({code})", step, len(records) + 1))
    trial.reach(27)
    trial.cluster.ssh(f"scancel --signal=USR1 --batch {trial.job.id}")  # as --signal=B:USR1@300 does
    time.sleep(1)
    trial.strike(27, "continue")
    stopped = trial.measure_restart("the time limit is near (USR1)", 28, 5)
    trial.finish()
    assert [(record["code"], record["restarted_by"]) for record in records] == [(76, BATCH)] * 4
    assert (stopped["code"], stopped["restarted_by"], stopped["lost_steps"]) == (75, BATCH, 0)
    keep_if_equal(trial, reference, *records, stopped)


@pytest.mark.parametrize("trial", [(8, 18)], indirect=True)
def test_an_error_a_wrong_config_and_a_full_disk_end_the_job_and_the_corrected_command_resumes(
    trial: Trial, reference: Path
) -> None:
    trial.submit()
    trial.reach(8)
    trial.strike(8, "raise")
    records = [trial.measure_end("a rank raises an error", 8)]
    trial.struck = time.time()
    trial.submit("optimizer.lrr=1")
    records.append(trial.measure_end("the config is wrong", 0))
    trial.submit("checkpoint.max_failed_saves=1")
    trial.reach(18)
    trial.strike(18, "full")
    trial.job.wait_for_state("FAILED", timeout_s=LIMIT_S)
    ended = trial.run.ended()
    assert ended is not None
    records.append(trial.measure_end("the shared disk is full", ended["step"] + 1))
    assert [record["code"] for record in records] == [1, 2, 74]
    trial.submit("checkpoint.max_failed_saves=1")
    trial.finish()
    keep_if_equal(trial, reference, *records)
