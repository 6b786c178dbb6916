"""A Slurm cluster on this machine: a login node, nodes with 8 fake H100 each, and a desk, as Linux namespaces.

Users, hosts and mounts belong to the namespaces, so the machine itself is not changed, and killing the first process of
a node ends all of its processes. The GPUs are plain files: Slurm counts them, but nothing can run on them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.ranks import find_port

USER, UID = "trainer", 23456
DAEMONS = ("slurmctld", "slurmd", "munged", "sshd")

# srun listens on the address of its host's name, and nodes call back from 127.0.0.1. So the hosts that call srun have
# that address, and the other nodes, which must have different ones, do not.
HOSTS = {"login": "127.0.0.1", "desk": "127.0.0.1", "n0": "127.0.0.1", "n1": "127.0.0.12", "n2": "127.0.0.13"}
LOGIN_ADDRESS = "127.0.0.10"

SLURM_CONF = """
ClusterName=lab
SlurmctldHost=login(127.0.0.1)
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
# cred_expire is also how long a requeued job waits.
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
SlurmdTimeout=15
SlurmctldTimeout=30
KillWait=5
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n0 NodeHostname=n0 NodeAddr=127.0.0.1 CPUs=128 RealMemory=1600000 Gres=gpu:H100:8 State=UNKNOWN
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.12 CPUs=128 RealMemory=1600000 Gres=gpu:H100:8 State=UNKNOWN
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.13 CPUs=128 RealMemory=1600000 Gres=gpu:H100:8 State=UNKNOWN
PartitionName=h100 Nodes=n0,n1 Default=YES DefaultTime=1-00:00:00 MaxTime=7-00:00:00 State=UP
# A node to replace n1, for jobs of two nodes that ask for it.
PartitionName=spare Nodes=n0,n1,n2 Hidden=YES DefaultTime=1-00:00:00 MaxTime=7-00:00:00 State=UP
"""

SSHD_CONFIG = """
ListenAddress {address}
Port {ssh_port}
HostKey {root}/etc/host_key
PidFile {root}/run/sshd.pid
AllowUsers {user}
AuthorizedKeysFile {root}/etc/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
Subsystem sftp internal-sftp
MaxSessions 50
MaxStartups 100
"""


def why_not() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    if os.geteuid() != 0:
        return "Slurm's daemons and namespaces require root"
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"{', '.join(missing)} not installed; on Debian `make test-slurm` installs them"
    if subprocess.run(["unshare", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "this machine does not allow namespaces"
    return None


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float) -> Any:
    """Wait until ``holds`` returns a true value, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.2)
    return value


def copy_project(folder: Path) -> Path:
    """Copy the working tree's tracked and untracked files, without benchmarks and tests."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    for name in names:
        if (ROOT / name).is_file() and not name.startswith(("benchmarks/", "tests/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@dataclass(frozen=True)
class RunFiles:
    """Reads a run's directory."""

    folder: Path

    def steps(self) -> list[int]:
        """Return the steps in metrics.jsonl, in order."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def last_step(self) -> int:
        """Return the last step; 0 before the first."""
        return (self.steps() or [0])[-1]

    def newest_checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint; 0 if there is none."""
        found = self.folder.glob("checkpoints/checkpoint-*/_SUCCESS")
        return max((int(path.parent.name.rpartition("-")[2]) for path in found), default=0)

    def ended(self) -> dict[str, Any] | None:
        """Return exit.json; None if the run has not ended."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "exit.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found


class Cluster:
    """The machines of a cluster, with their files in a temporary folder."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="fctune-slurm-", dir="/tmp"))
        self.root.chmod(0o755)
        self.home, self.shared, self.log = self.root / "home", self.root / "shared", self.root / "log"
        self.ssh_port = find_port()
        self.machines: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all machines and wait until all nodes are idle."""
        self._write_files()
        for name in HOSTS:
            self.start_machine(name)
        self.wait_idle()

    def start_machine(self, name: str) -> None:
        """Start a machine through its first process."""
        command = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.log / f"{name}.out", "ab") as out:
            self.machines[name] = subprocess.Popen(
                [*command, str(ROOT / "tests" / "slurm" / "machine.sh"), str(self.root), name],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            )

    def kill_machine(self, name: str) -> None:
        """Kill all processes of a machine at once, like a power failure."""
        machine = self.machines.pop(name)
        machine.kill()
        machine.wait()

    def stop(self) -> None:
        """Kill all machines and remove the folder."""
        for name in list(self.machines):
            self.kill_machine(name)
        shutil.rmtree(self.root, ignore_errors=True)

    def at_desk(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on the desk."""
        return self.on_machine("desk", words)

    def on_machine(self, name: str, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command as root on a machine."""
        outer = self.machines[name].pid
        (inner,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        return ["nsenter", "--target", inner, "--pid", "--mount", "--uts", "--", *words]

    def ssh(self, command: str, timeout_s: float = 60, check: bool = True) -> str:
        """Run a command as the user on the login node, and return its output."""
        words = ["ssh", "-F", str(self.root / "etc" / "ssh_config"), "lab", f"bash -lc {shlex.quote(command)}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def wait_idle(self, timeout_s: float = 90) -> None:
        """Wait until all nodes are idle."""
        seen = ""

        def is_idle() -> bool:
            nonlocal seen
            seen = self.ssh("sinfo --noheader --partition spare --format '%T %D'", check=False)
            return seen.split() == ["idle", "3"]

        wait_until(is_idle, f"all nodes idle: {seen!r}; see {self.log}", timeout_s)

    def run_files(self, name: str) -> RunFiles:
        """Return the reader of a run on the shared disk."""
        return RunFiles(self.shared / "runs" / name)

    def processes(self) -> list[str]:
        """List the command lines of the user's processes on all machines; one that is ending has none."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and folder.stat().st_uid == UID:
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:  # the process has just ended
                continue
        return [line for line in found if line]

    def _write_files(self) -> None:
        root, etc = self.root, self.root / "etc"
        for name in ("etc/slurm", "home", "shared", "log", "run", "state", "spool", "gpus"):
            (root / name).mkdir(parents=True)
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o1777)
        for i in range(8):
            (root / "gpus" / f"nvidia{i}").touch()
        for name in HOSTS:
            (root / f"network-{name}").mkdir()
        places = {
            "root": root,
            "controller_port": find_port(),
            "node_port": find_port(),
            "ssh_port": self.ssh_port,
            "address": LOGIN_ADDRESS,
            "user": USER,
        }
        (etc / "slurm" / "slurm.conf").write_text(SLURM_CONF.format(**places))
        gpus = f"NodeName=n[0-2] Name=gpu Type=H100 Count=8 File={root}/gpus/nvidia[0-7]\n"
        (etc / "slurm" / "gres.conf").write_text(gpus)
        (etc / "sshd_config").write_text(SSHD_CONFIG.format(**places))
        (etc / "munge.key").write_bytes(os.urandom(128))
        (etc / "munge.key").chmod(0o400)
        users = Path("/etc/passwd").read_text()
        (etc / "passwd").write_text(f"{users}{USER}:x:{UID}:{UID}::{self.home}:/bin/bash\n")
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in HOSTS.items()))
        paths = f'export PATH="{self.home}/bin:{ROOT}/.venv/bin:$PATH" OMP_NUM_THREADS=1\n'
        (etc / "profile").write_text(Path("/etc/profile").read_text() + paths)
        needed = [root, ROOT, Path(sys.base_prefix)]
        closed = {folder for path in needed for folder in path.parents if not folder.stat().st_mode & 0o001}
        hidden = [path for path in needed if (closed | {Path("/tmp")}) & set(path.parents)]
        (etc / "needed").write_text("".join(f"{path}\n" for path in hidden))
        (etc / "closed").write_text("".join(f"{folder}\n" for folder in sorted(closed)))
        for key in ("host_key", "client_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(etc / key)], check=True)
        shutil.copy(etc / "client_key.pub", etc / "authorized_keys")
        (etc / "authorized_keys").chmod(0o644)
        (etc / "ssh_config").write_text(
            f"Host lab\n  HostName {LOGIN_ADDRESS}\n  Port {self.ssh_port}\n  User {USER}\n"
            f"  IdentityFile {etc}/client_key\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
            "  LogLevel ERROR\n"
        )
        for folder in (self.home, self.shared, *(root / f"network-{name}" for name in HOSTS)):
            os.chown(folder, UID, UID)


class Process:
    """A process of this machine and its environment."""

    def __init__(self, folder: Path) -> None:
        self.pid, self.environ = int(folder.name), (folder / "environ").read_bytes()


def workers() -> list[Process]:
    """List the processes of the cluster's user that torchrun has started."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid == UID:
                found.append(Process(folder))
        except OSError:
            continue
    return [process for process in found if b"\0GROUP_RANK=" in process.environ]
