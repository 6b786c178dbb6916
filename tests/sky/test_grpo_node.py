"""The script of a reinforcement task, with stand-ins for the server and the training: who does what, on which GPUs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sky.task_files import SKY

SERVER = """#!/usr/bin/env bash
echo "gpus=${CUDA_VISIBLE_DEVICES:-all} $*" >> "$TEST_DIR/served"
echo "${VLLM_API_KEY:-none}" >> "$TEST_DIR/keys"
[ -z "${SERVER_FAILS:-}" ] || exit 3
trap 'echo ended >> "$TEST_DIR/served"; exit 0' TERM
touch "$TEST_DIR/up"
while [ -z "${SERVER_DIES:-}" ] || [ ! -e "$TEST_DIR/training" ]; do sleep 0.1; done
exit 3
"""
TRAINING = """#!/usr/bin/env bash
echo "gpus=${CUDA_VISIBLE_DEVICES:-all} ranks=$SKYPILOT_NUM_GPUS_PER_NODE nodes=$SKYPILOT_NUM_NODES" \\
  "node=${SKYPILOT_NODE_RANK:-$SLURM_NODEID} ips=$(echo $SKYPILOT_NODE_IPS) $*" >> "$TEST_DIR/trained"
[ -z "${TRAINING_RUNS:-}" ] || {
  trap 'echo saving >> "$TEST_DIR/trained"; touch "$TEST_DIR/saving"
    until [ -z "${TRAINING_SAVES:-}" ] || [ -e "$TEST_DIR/saved" ]; do sleep 0.1; done
    sleep 0.5; exit "${STOPPED_CODE:-75}"' TERM
  touch "$TEST_DIR/training"
  while :; do sleep 0.1; done
}
exit "${TRAINING_CODE:-0}"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the script, and with stand-ins for what it starts."""
    (tmp_path / "sky").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(SKY / "grpo_node.sh", tmp_path / "sky")
    curl = '#!/usr/bin/env bash\n[ -e "$TEST_DIR/up" ]\n'
    sleep = '#!/usr/bin/env bash\nexec /bin/sleep "$([ "$1" = 5 ] && echo 0.1 || echo "$1")"\n'
    hosts = '#!/usr/bin/env bash\nfor ((i = 0; i < NUM_HOSTS; i++)); do echo "n$i"; done\n'
    files = {"sky/run_node.sh": TRAINING, "bin/python": SERVER, "bin/curl": curl, "bin/sleep": sleep}
    files["bin/scontrol"] = hosts
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(tree: Path, nodes: int, node: int, **more: Any) -> subprocess.Popen[str]:
    ips = "\n".join(f"10.0.0.{number}" for number in range(1, nodes + 1))
    own = {"SKYPILOT_NUM_NODES": nodes, "SKYPILOT_NODE_RANK": node, "SKYPILOT_NODE_IPS": ips}
    own |= {"SKYPILOT_NUM_GPUS_PER_NODE": 8, "SKYPILOT_TASK_ID": "task-1"}
    own |= {"GPUS_PER_SERVER": more.get("SERVER_GPUS", 4 if nodes == 1 else 8)}  # one server
    return run_script(tree, {**own, **more})


def start_in_slurm(tree: Path, nodes: int, node: int, **more: Any) -> subprocess.Popen[str]:
    own = {"SLURM_JOB_ID": 41, "SLURM_NNODES": nodes, "SLURM_NODEID": node, "SLURM_GPUS_ON_NODE": 8}
    own |= {"GPUS_PER_SERVER": 4 if nodes == 1 else 8}
    return run_script(tree, {**own, "SLURM_JOB_NODELIST": f"n[0-{nodes - 1}]", "NUM_HOSTS": nodes, **more})


def run_script(tree: Path, given: dict[str, Any]) -> subprocess.Popen[str]:
    own = {"FCTUNE_SHARED": tree / "shared", "MODEL": "/models/base", "CASES": "cases.jsonl", "TEST_DIR": tree, **given}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SKYPILOT_"))}
    environment = {**kept, "PATH": f"{tree / 'bin'}:{os.environ['PATH']}", **{k: str(v) for k, v in own.items()}}
    command = [tree / "sky" / "grpo_node.sh"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_one_node_splits_its_gpus_and_ends_its_server(tree: Path) -> None:
    process = start(tree, 1, 0, SERVER_GPUS=2, VLLM="--max-model-len 4096")
    assert process.wait(30) == 0
    served, ended = (tree / "served").read_text().splitlines()
    assert served.startswith("gpus=6,7 -m fctune.cli serve /models/base --adapters 32 --name policy ")
    assert served.endswith("--vllm=--host 127.0.0.1 --tensor-parallel-size 2 --max-model-len 4096")
    assert ended == "ended"
    trained = (tree / "trained").read_text()
    assert trained.startswith("gpus=0,1,2,3,4,5 ")
    assert "ranks=6 nodes=1 node=0" in trained
    assert "grpo.cases=cases.jsonl grpo.engine=server grpo.server.url=http://127.0.0.1:8000" in trained


def test_each_gpu_that_serves_has_a_server_unless_the_model_needs_more(tree: Path) -> None:
    process = start(tree, 1, 0, SERVER_GPUS=4, GPUS_PER_SERVER="")
    assert process.wait(30) == 0
    lines = (tree / "served").read_text().splitlines()
    served = sorted(line.replace("--vllm=", "").split() for line in lines if line != "ended")
    assert [(line[0], line[line.index("--port") + 1]) for line in served] == [
        ("gpus=4", "8000"),
        ("gpus=5", "8001"),
        ("gpus=6", "8002"),
        ("gpus=7", "8003"),
    ]
    assert not any("--tensor-parallel-size" in line for line in served)
    assert lines.count("ended") == 4, "all end with the training"
    urls = ",".join(f"http://127.0.0.1:{port}" for port in range(8000, 8004))
    assert f"grpo.server.url={urls} " in (tree / "trained").read_text()
    refused = start(tree, 1, 0, SERVER_GPUS=4, GPUS_PER_SERVER=3)
    assert refused.wait(30) == 2
    assert refused.stderr is not None
    assert "GPUS_PER_SERVER=3 does not divide the 4 GPUs that serve" in refused.stderr.read()


@pytest.mark.parametrize("key", ["", "ours"])
def test_servers_require_the_key_that_the_trainer_sends_and_no_other(key: str, tree: Path) -> None:
    process = start(tree, 1, 0, VLLM_API_KEY="of servers for users", FCTUNE_API_KEY=key)
    assert process.wait(30) == 0
    assert (tree / "keys").read_text().splitlines() == [key or "none"]


def test_the_last_of_several_nodes_serves_until_the_training_has_ended(tree: Path) -> None:
    server = start(tree, 3, 2)
    while not (tree / "up").exists():
        time.sleep(0.05)
    assert start(tree, 3, 1, TRAINING_CODE=75).wait(30) == 75, "the exit code is the training's"
    time.sleep(0.3)
    assert server.poll() is None, "another node's end is not the run's"
    assert start(tree, 3, 0).wait(30) == 0
    assert server.wait(30) == 0
    served, ended = (tree / "served").read_text().splitlines()
    assert served.startswith("gpus=0,1,2,3,4,5,6,7 ")
    assert ended == "ended"
    second, first = (tree / "trained").read_text().splitlines()
    assert "ranks=8 nodes=2 node=1 ips=10.0.0.1 10.0.0.2 " in second
    assert "nodes=2 node=0" in first
    assert "grpo.server.url=http://10.0.0.3:8000" in first


def test_slurms_variables_name_the_nodes_and_gpus(tree: Path) -> None:
    server = start_in_slurm(tree, 2, 1)
    while not (tree / "up").exists():
        time.sleep(0.05)
    assert start_in_slurm(tree, 2, 0).wait(30) == 0
    assert server.wait(30) == 0
    assert (tree / "served").read_text().startswith("gpus=0,1,2,3,4,5,6,7 ")
    trained = (tree / "trained").read_text()
    assert "ranks=8 nodes=1 node=0 ips=n0 " in trained
    assert "grpo.server.url=http://n1:8000" in trained
    assert (tree / "shared" / "grpo" / "slurm-41.done").read_text() == "0\n"


def test_a_stop_request_of_slurm_reaches_the_training_once_and_the_server_serves_until_it_has_saved(tree: Path) -> None:
    (tree / "sky" / "run_node.sh").write_text(TRAINING.replace("' TERM\n", "' TERM USR1\n"))
    server, trainer = start_in_slurm(tree, 2, 1), start_in_slurm(tree, 2, 0, TRAINING_RUNS=1, TRAINING_SAVES=1)
    while not (tree / "training").exists():
        time.sleep(0.05)
    for process in (server, trainer):  # every process of the job
        os.killpg(process.pid, signal.SIGUSR1)
    while not (tree / "saving").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    assert server.poll() is None
    assert "ended" not in (tree / "served").read_text()
    (tree / "saved").touch()
    assert (trainer.wait(30), server.wait(30)) == (75, 0)
    assert (tree / "trained").read_text().splitlines()[1:] == ["saving"], "a second request would end it at once"
    assert (tree / "served").read_text().splitlines()[-1] == "ended"


def test_a_restart_does_not_take_the_end_of_the_first_start_for_its_own(tree: Path) -> None:
    (tree / "shared" / "grpo").mkdir(parents=True)
    (tree / "shared" / "grpo" / "task-1.done").touch()
    time.sleep(0.05)
    server = start(tree, 2, 1)
    time.sleep(0.5)
    assert server.poll() is None
    assert start(tree, 2, 0).wait(30) == 0
    assert server.wait(30) == 0


def test_training_saves_and_ends_when_its_server_has_ended(tree: Path) -> None:
    process = start(tree, 1, 0, SERVER_DIES=1, TRAINING_RUNS=1)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 76
    assert "the server has ended, see its output; the training saves and ends" in said
    assert (tree / "trained").read_text().splitlines()[-1] == "saving"


def test_the_nodes_that_train_end_with_the_server_of_another(tree: Path) -> None:
    server, trainer = start(tree, 2, 1, SERVER_DIES=1), start(tree, 2, 0, TRAINING_RUNS=1)
    assert "the training saves and ends" in trainer.communicate(timeout=30)[1]
    assert "the server has ended; its output is above" in server.communicate(timeout=30)[1]
    assert (trainer.returncode, server.returncode) == (76, 76), "SkyPilot restarts the run if any code says so"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("training", "code"), [(1, 1), (74, 74), (75, 76)])
def test_a_node_that_loses_its_server_waits_for_the_training_and_repeats_its_end(
    training: int, code: int, tree: Path
) -> None:
    """SkyPilot ends all nodes when the first one fails, and restarts the run after 76 of any node."""
    server = start(tree, 2, 1, SERVER_DIES=1)
    trainer = start(tree, 2, 0, TRAINING_RUNS=1, TRAINING_SAVES=1, STOPPED_CODE=training)
    while not (tree / "saving").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    assert server.poll() is None, "the training has not saved yet"
    (tree / "saved").touch()
    assert (trainer.wait(30), server.wait(30)) == (code, code)


def test_a_node_whose_server_is_preempted_waits_for_the_training(tree: Path) -> None:
    server, trainer = start(tree, 2, 1), start(tree, 2, 0, TRAINING_RUNS=1)
    while not (tree / "training").exists():
        time.sleep(0.05)
    server.send_signal(signal.SIGTERM)
    assert (trainer.wait(30), server.wait(30)) == (76, 76)


@pytest.mark.parametrize("reaches_all", [False, True], ids=["script", "all"])
def test_a_stop_request_ends_both_and_is_no_loss_of_the_server(reaches_all: bool, tree: Path) -> None:
    process = start(tree, 1, 0, TRAINING_RUNS=1)
    while not (tree / "training").exists():
        time.sleep(0.05)
    (os.killpg if reaches_all else os.kill)(process.pid, signal.SIGTERM)
    assert "has ended" not in process.communicate(timeout=30)[1]
    assert process.returncode == 75
    assert (tree / "served").read_text().splitlines()[-1] == "ended"


@pytest.mark.parametrize(
    ("nodes", "node", "more", "code", "reason"),
    [
        (1, 0, {"SERVER_FAILS": 1}, 1, "the server has ended before it was ready"),
        (2, 1, {"SERVER_FAILS": 1}, 1, "the server has ended; its output is above"),
        (2, 0, {"SERVER_START_S": 0}, 1, "no server at 10.0.0.2:8000"),
        (1, 0, {"SKYPILOT_NUM_GPUS_PER_NODE": 1}, 2, "one node needs 2 GPUs or more"),
        (1, 0, {"MODEL": ""}, 1, "MODEL is empty; name the base"),
        (1, 0, {"CASES": ""}, 1, "CASES is empty; name what is asked"),
    ],
    ids=["server", "server_node", "no_server", "gpus", "model", "cases"],
)
def test_what_is_missing_is_named(
    tree: Path, nodes: int, node: int, more: dict[str, Any], code: int, reason: str
) -> None:
    process = start(tree, nodes, node, **more)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == code
    assert reason in said
