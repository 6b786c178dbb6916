"""SkyPilot's command line on a real Slurm: launch, logs, evaluation, a failing rank, a dying node, teardown."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.sky.kubernetes import SECRET
from tests.sky.task_files import INFRASTRUCTURE, SKY, find_differing_keys, load
from tests.slurm.client import SkyPilot
from tests.slurm.cluster import Cluster, wait_until, workers

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

NAME = "fct"
TASK = "sky/slurm/finetune.yaml"


def list_envs(trial: str, **more: str) -> list[str]:
    """List the --env options of a trial run with one CPU rank per node."""
    envs = {"CONFIG": trial, "DATASET": "synthetic:train:2000:1", "FCTUNE_CPU_RANKS": "1", "OMP_NUM_THREADS": "1"}
    return [word for name, value in (envs | more).items() for word in ("--env", f"{name}={value}")]


@pytest.fixture(scope="module")
def launched(sky: SkyPilot, trial: str) -> str:
    """Launch the task, which differs from Kubernetes' only in infrastructure; return the SkyPilot cluster's name."""
    assert find_differing_keys(load(SKY / "finetune.yaml"), load(sky.project / TASK)) == INFRASTRUCTURE
    checked = sky.run("check", "slurm", timeout_s=120)
    assert "Slurm: enabled" in checked.stdout
    env_options = list_envs(trial, OUTPUT_DIR="runs/launched", MAX_STEPS="40")
    words = ["launch", "--yes", "--detach-run", "--cluster", NAME, TASK, *env_options, "--secret", "HF_TOKEN"]
    sky.run(*words, timeout_s=300)
    return NAME


def test_a_launch_trains_on_two_nodes_while_its_logs_are_followed(
    cluster: Cluster, sky: SkyPilot, launched: str
) -> None:
    run = cluster.run_files("launched")
    following = sky.start("logs", "--follow", launched)
    assert following.stdout is not None
    shown, before_the_end = [], False
    try:
        for line in following.stdout:
            shown.append(line)
            if re.search(r"step +\d+", line) and run.ended() is None:
                before_the_end = True
        code = following.wait(60)
    finally:
        following.kill()
    text = "".join(shown)
    assert code == 0, text
    assert before_the_end, text
    assert "preflight: 2 nodes are fit (n0, n1)" in text
    assert run.steps() == list(range(1, 41))
    assert (run.folder / "export" / "merged" / "model.safetensors").is_file()
    assert run.newest_checkpoint() == 30
    assert (run.folder / "checkpoints" / "final").is_dir()
    assert sky.run("logs", launched, "--status", check=False).returncode == 0


def test_secrets_are_not_written_to_any_file(cluster: Cluster, sky: SkyPilot, launched: str) -> None:
    for folder in (cluster.shared, cluster.log, sky.home / "sky_logs", sky.home / ".sky" / "generated"):
        for path in folder.rglob("*"):
            if path.is_file():
                assert SECRET.encode() not in path.read_bytes(), path


def test_exec_evaluates_the_trained_run(cluster: Cluster, sky: SkyPilot, launched: str) -> None:
    original = load(SKY / "eval.yaml")
    task = json.loads(json.dumps(original))
    task["resources"]["infra"] = "slurm"
    del task["volumes"]
    assert find_differing_keys(original, task) == {"resources.infra", "volumes"}
    name = sky.write_task("sky/slurm-eval.yaml", task)
    done = sky.run("exec", launched, name, "--env", "RUN=runs/launched", timeout_s=180)
    answers = cluster.shared / "runs" / "launched" / "eval" / "smoke.jsonl"
    assert "of 4" in done.stdout or "tool-call accuracy" in done.stdout, done.stdout
    assert len(answers.read_text().splitlines()) == 4
    assert answers.with_suffix(".html").is_file()


def test_the_documented_commands_inspect_a_cluster(sky: SkyPilot, launched: str) -> None:
    shown = {}
    for command in re.findall(r"^\$ sky exec fctune '(.*?)'", (SKY.parent / "docs" / "clusters.md").read_text(), re.M):
        if command.startswith(("df", "tail")):
            shown[command] = sky.run("exec", launched, command).stdout
    df, logs, metrics = shown.values()
    assert "/mnt/shared" in df
    assert "/mnt/network" in df
    assert "tokens/s" in logs
    assert '"loss"' in metrics


def test_a_run_is_inspected_and_stopped_while_its_job_runs(
    cluster: Cluster, sky: SkyPilot, launched: str, trial: str
) -> None:
    run = cluster.run_files("stopped")
    sky.run("exec", "--detach-run", launched, TASK, *list_envs(trial, OUTPUT_DIR="runs/stopped", EPOCHS="50"))
    wait_until(lambda: run.last_step() >= 3, "three steps", 120)
    job = cluster.ssh("squeue --noheader --format %A").strip()
    assert "n0" in cluster.ssh(f"srun --overlap --jobid={job} --nodes=2 --ntasks-per-node=1 hostname")
    cluster.ssh("touch /mnt/shared/runs/stopped/stop")
    ended = wait_until(run.ended, "the run ends", 60)
    assert ended["code"] == 75
    assert "stop file" in ended["reason"]
    assert Path(ended["checkpoint"]).name == f"checkpoint-{ended['step']}"


def test_a_failing_rank_fails_the_job_with_its_reason(
    cluster: Cluster, sky: SkyPilot, launched: str, trial: str
) -> None:
    run = cluster.run_files("failing")
    env_options = list_envs(trial, OUTPUT_DIR="runs/failing", EPOCHS="50")
    sky.run("exec", "--detach-run", launched, TASK, *env_options)
    wait_until(lambda: run.last_step() >= 10, "ten steps", 120)
    (victim,) = [process for process in workers() if b"\0GROUP_RANK=1\0" in process.environ]
    os.kill(victim.pid, signal.SIGKILL)
    done = sky.run("logs", launched, check=False, timeout_s=120)
    assert done.returncode == 100, done.stdout
    assert "Signal 9 (SIGKILL)" in done.stdout
    ended = wait_until(run.ended, "the run writes exit.json", 30)
    assert ended["code"] == 76, "nobody on the other node knows why"
    assert ended["reason"].startswith("another rank ended first"), ended


def test_an_invalid_config_fails_the_job_with_one_line(cluster: Cluster, sky: SkyPilot, launched: str) -> None:
    start = time.monotonic()
    words = ["exec", launched, TASK, "--env", "CONFIG=configs/tiny_lorra.yaml", "--env", "FCTUNE_CPU_RANKS=1"]
    done = sky.run(*words, check=False, timeout_s=120)
    assert done.returncode == 100
    assert "tiny_lora.yaml" in done.stdout
    assert time.monotonic() - start < 120


def test_down_leaves_no_jobs_processes_or_files(cluster: Cluster, sky: SkyPilot, launched: str) -> None:
    sky.run("down", "--yes", launched)
    cluster.wait_idle()
    assert cluster.ssh("squeue --noheader").strip() == ""
    # SkyPilot keeps a connection open, and leaves its job watcher to cgroups, which this cluster does not have.
    left = [line for line in cluster.processes() if not re.search("^sshd|sky/skylet/subprocess_daemon", line)]
    assert not left
    assert not [path for path in (cluster.home / ".sky_clusters").glob("*") if path.is_dir()]
    assert "No existing clusters" in sky.run("status").stdout


def test_a_managed_job_whose_node_dies_recovers_and_resumes_at_the_right_step(
    cluster: Cluster, sky: SkyPilot, trial: str
) -> None:
    run = cluster.run_files("managed")
    sky.run("down", "--all", "--yes")  # where an earlier test that should have done so did not run, no node is free
    env_options = list_envs(trial, OUTPUT_DIR="runs/managed", MAX_STEPS="60")
    sky.run("jobs", "launch", "--yes", "--detach-run", "--name", "managed", TASK, *env_options, timeout_s=180)
    saved = wait_until(run.newest_checkpoint, "a checkpoint", 240)
    cluster.kill_machine("n1")
    stopped_at = run.last_step()
    assert stopped_at < 60
    wait_until(lambda: not cluster.ssh("squeue --noheader"), "Slurm ends the job of the dead node", 90)
    cluster.start_machine("n1")
    wait_until(lambda: (run.ended() or {}).get("code") == 0, "the job succeeds", 300)
    assert run.steps() == list(range(1, 61))
    log = (cluster.shared / "logs" / "managed" / "node-0.log").read_text()
    (step,) = re.findall(r"resuming from \S+, after step (\d+)", log)
    assert saved <= int(step) <= stopped_at
    queue = wait_until(lambda: succeeded(sky), "the job is done", 90)
    assert re.search(r"managed .* 1 +SUCCEEDED", queue), queue


def test_a_managed_job_with_an_invalid_config_is_not_run_again(cluster: Cluster, sky: SkyPilot) -> None:
    before = {path.name for path in (cluster.shared / "restarts").glob("*.final")}
    env_options = list_envs("configs/tiny_lorra.yaml")
    sky.run("jobs", "launch", "--yes", "--detach-run", "--name", "wrong", TASK, *env_options, timeout_s=180)

    def failed() -> str:
        shown = sky.run("jobs", "queue", "--all").stdout
        return shown if re.search(r"wrong .* FAILED", shown) else ""

    queue = wait_until(failed, "the job has failed", 300)
    # Once more if SkyPilot has seen only the kill of the other node; that start ends in the set-up.
    assert re.search(r"wrong .* (0 +FAILED|1 +FAILED_SETUP)\b", queue), queue
    (final,) = [path for path in (cluster.shared / "restarts").glob("*.final") if path.name not in before]
    assert final.read_text() == "2\n"


def succeeded(sky: SkyPilot) -> str:
    shown = sky.run("jobs", "queue", "--all").stdout
    return shown if "SUCCEEDED" in shown else ""
