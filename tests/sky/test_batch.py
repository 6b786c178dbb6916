"""The batch scripts around srun, with Slurm's commands replaced by ones that record their arguments."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fctune.base.exit_codes import EXIT_CODES, RESTARTED
from tests.conftest import ROOT

SCRIPTS = ["finetune_venv.sbatch", "finetune_container.sbatch"]

COMMANDS = {
    # Runs its command on this machine; scancel's signal reaches it through a file.
    "srun": """
        while [[ "$1" == --* ]]; do echo "$1" >> "$CALLS/srun"; shift; done
        exec "$@"
    """,
    "scancel": 'echo "$*" >> "$CALLS/scancel"; [ "$1" != --signal=USR1 ] || touch "$CALLS/usr1"',
    "scontrol": """
        echo "$*" >> "$CALLS/scontrol"
        case "$1 $2" in
          "show hostnames") case $3 in "node-[a-b]") printf 'node-a\\nnode-b\\n' ;; *) tr , '\\n' <<< "$3" ;; esac ;;
          "show job") echo "JobId=41 JobName=fctune ReqNodeList=(null) ExcNodeList=${EXCLUDED:-(null)}" ;;
        esac
    """,
    "sinfo": r"printf 'node-%s %s\n' ${NODES//=/ }",
}

# Replaces a run: exits with CODE, immediately or on a request to stop.
RUN_NODE = """
    names='CONFIG|MODEL|CASES|RUN|SUITE|STOP_IDLE|FCTUNE_|MASTER_ADDR|PREFLIGHT_WAIT_S|SEED|SRUN_'
    env | grep -E "^($names)" > "$CALLS/environment"
    echo "$@" > "$CALLS/arguments"
    basename "$0" > "$CALLS/script"
    touch "$CALLS/started"
    until [ -z "$WAIT" ] || [ -f "$CALLS/usr1" ] || [ -f "$CALLS/end" ]; do sleep 0.05; done
    [ -z "$ENDED" ] || { mkdir -p "$FCTUNE_SHARED/restarts"; echo "$ENDED" > "$FCTUNE_SHARED/restarts/slurm-41.ended"; }
    echo "step 7  loss 0.5"
    exit "$CODE"
"""


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + "\n".join(line.strip() for line in text.strip().splitlines()) + "\n")
    path.chmod(0o755)


def start(folder: Path, name: str, code: int, waits: bool, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Start the batch script the way Slurm does: as a copy in a separate tree, with its output in a file."""
    for script in ("batch.sh", name):
        (folder / "sky" / "slurm").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "sky" / "slurm" / script, folder / "sky" / "slurm")
    for path in (ROOT / "sky").glob("*_node.sh"):
        write_script(folder / "sky" / path.name, RUN_NODE)
    for command, text in COMMANDS.items():
        write_script(folder / "bin" / command, text)
    (folder / "calls").mkdir(exist_ok=True)
    spool = shutil.copy(folder / "sky" / "slurm" / name, folder / "slurm_script")
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "CALLS": str(folder / "calls"),
        "CODE": str(code),
        "WAIT": "1" if waits else "",
        "IMAGE": "image",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "FCTUNE_NETWORK": str(folder / "network"),
        **more,
    }
    with open(folder / "train_41.log", "a") as out, open(folder / "train_41.err", "a") as error:
        return subprocess.Popen(["bash", spool, *arguments], env=environment, stdout=out, stderr=error, text=True)


def calls(folder: Path, command: str) -> list[str]:
    path = folder / "calls" / command
    return path.read_text().splitlines() if path.exists() else []


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_completed_run_gets_a_summary_and_ends_the_job(name: str, tmp_path: Path) -> None:
    assert start(tmp_path, name, 0, False, "seed=3").wait(30) == 0
    summary = (tmp_path / "train_41_summary.txt").read_text()
    assert "job        41 (restart 0) on 2 nodes" in summary
    assert "exit code  0\n" in summary
    assert "last line  step 7  loss 0.5" in summary
    assert calls(tmp_path, "arguments") == ["seed=3"]
    assert {"--kill-on-bad-exit=0", "--wait=120"} <= set(calls(tmp_path, "srun"))
    assert not [call for call in calls(tmp_path, "scontrol") if call.startswith("requeue")]
    assert (tmp_path / "network").is_dir()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_job_that_slurm_asks_to_stop_saves_and_is_requeued(name: str, tmp_path: Path) -> None:
    job = start(tmp_path, name, 75, True)
    wait_for(tmp_path / "calls" / "started")
    job.send_signal(signal.SIGUSR1)  # --signal=B:USR1@300
    assert job.wait(30) == 75
    assert calls(tmp_path, "scancel") == ["--signal=USR1 41"]
    assert calls(tmp_path, "scontrol")[-1] == "requeue 41"
    assert "exit code  75, stop requested by USR1" in (tmp_path / "train_41_summary.txt").read_text()


def test_a_run_that_ends_during_scancel_keeps_its_exit_code(tmp_path: Path) -> None:
    job = start(tmp_path, SCRIPTS[0], 75, True)
    wait_for(tmp_path / "calls" / "started")
    slow = 'touch "$CALLS/usr1"; sleep 0.7'  # the run ends before scancel does
    write_script(tmp_path / "bin" / "scancel", slow)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 75
    assert calls(tmp_path, "scontrol")[-1] == "requeue 41"


@pytest.mark.parametrize(
    ("code", "sent", "more"),
    [
        (75, signal.SIGTERM, {}),  # cancelled, or preempted, in which case Slurm requeues it
        (75, signal.SIGUSR1, {"ENDED": "1"}),  # no progress, according to the head
        (1, signal.SIGUSR1, {}),  # it failed
        (143, signal.SIGUSR1, {}),  # a node was killed
    ],
)
def test_a_cancelled_failed_or_exhausted_job_is_not_requeued(
    code: int, sent: signal.Signals, more: dict[str, str], tmp_path: Path
) -> None:
    job = start(tmp_path, SCRIPTS[0], code, True, **more)
    wait_for(tmp_path / "calls" / "started")
    job.send_signal(sent)
    time.sleep(0.3)
    (tmp_path / "calls" / "end").touch()
    assert job.wait(30) == (1 if code > 128 or more else code)
    assert not calls(tmp_path, "scontrol")


@pytest.mark.parametrize("code", [*EXIT_CODES, 137])
def test_only_the_exit_codes_that_restart_requeue_the_job(code: int, tmp_path: Path) -> None:
    assert start(tmp_path, SCRIPTS[0], code, False).wait(30) == (code if code in EXIT_CODES else 1)
    assert calls(tmp_path, "scontrol") == (["requeue 41"] if code in RESTARTED else [])


@pytest.mark.parametrize(
    ("nodes", "before", "excluded"),
    [
        ("a=allocated b=allocated c=idle", "", "node-b"),
        ("a=mixed b=mixed c=idle d=idle", "node-d", ""),  # three others are left, of which one is excluded already
        ("a=mixed b=drained c=idle~ d=idle e=completing", "node-d", "node-d,node-b"),
        ("a=mixed b=mixed", "", ""),
        *((f"a=mixed b=mixed c={state}", "", "") for state in ("down", "idle*", "drained", "draining", "failing")),
        *((f"a=mixed b=mixed c={state}", "", "") for state in ("maint", "idle$", "reserved", "unknown")),
    ],
)
def test_a_faulty_node_is_excluded_if_enough_others_are_left(
    nodes: str, before: str, excluded: str, tmp_path: Path
) -> None:
    more = {"ENDED": "76 1", "NODES": nodes, "EXCLUDED": before, "SLURM_JOB_NUM_NODES": "3" if before else "2"}
    assert start(tmp_path, SCRIPTS[0], 137, False, **more).wait(30) == 76, "srun has killed the node that was lost"
    changes = [call for call in calls(tmp_path, "scontrol") if not call.startswith("show")]
    assert changes == ["requeue 41", *([f"update JobId=41 ExcNodeList={excluded}"] if excluded else [])]
    assert "exit code  76" in (tmp_path / "train_41_summary.txt").read_text()
    assert not list((tmp_path / "fctune" / "restarts").iterdir())
    said = (tmp_path / "train_41.err").read_text()
    assert ("job continues on other nodes" if excluded else "has only") in said


def test_a_container_gets_the_volumes_and_the_heads_address(tmp_path: Path) -> None:
    assert start(tmp_path, SCRIPTS[1], 0, False).wait(30) == 0
    environment = dict(line.split("=", 1) for line in calls(tmp_path, "environment"))
    assert environment["FCTUNE_SHARED"] == "/mnt/shared"
    assert environment["MASTER_ADDR"] == "node-a"
    assert int(environment["PREFLIGHT_WAIT_S"]) >= 600, "one node may import the image minutes after the other"
    (mounts,) = [call for call in calls(tmp_path, "srun") if call.startswith("--container-mounts=")]
    assert f"{tmp_path}/fctune:/mnt/shared" in mounts
    assert f"{tmp_path}/network:/mnt/network" in mounts


def test_environment_overrides_reach_the_run(tmp_path: Path) -> None:
    assert start(tmp_path, SCRIPTS[0], 0, False, CONFIG="configs/x.yaml", SEED="5").wait(30) == 0
    environment = dict(line.split("=", 1) for line in calls(tmp_path, "environment"))
    assert environment["CONFIG"] == "configs/x.yaml"
    assert environment["SEED"] == "5"
    assert environment["FCTUNE_SHARED"] == str(tmp_path / "fctune")


def test_model_size_replaces_the_default_config(tmp_path: Path) -> None:
    assert start(tmp_path, SCRIPTS[0], 0, False).wait(30) == 0
    assert "CONFIG=configs/llama3_1_8b_lora.yaml" in calls(tmp_path, "environment")
    assert start(tmp_path, SCRIPTS[0], 0, False, MODEL_SIZE="70B").wait(30) == 0
    assert {"CONFIG=", "MODEL_SIZE=70B"} <= set(calls(tmp_path, "environment"))
    assert "config     of MODEL_SIZE=70B\n" in (tmp_path / "train_41_summary.txt").read_text()


@pytest.mark.parametrize("code", [0, 1])
def test_an_acceptance_job_measures_the_disks_of_its_cluster(code: int, tmp_path: Path) -> None:
    assert start(tmp_path, "acceptance.sbatch", code, False, "nodes=2").wait(30) == code
    assert calls(tmp_path, "script") == ["acceptance_node.sh"]
    shared, network = tmp_path / "fctune", tmp_path / "network"
    (words,) = calls(tmp_path, "arguments")
    config, out, *overrides = words.split()
    assert (config, out) == ("configs/acceptance_2x8_h100.yaml", f"{shared}/acceptance/41")
    disks = [f"storage.shared_dir={shared}/acceptance", "storage.node_dir=/tmp"]
    assert overrides == ["profile=full", *disks, f"storage.network_dir={network}/acceptance", "nodes=2"]
    assert "MASTER_ADDR=node-a" in calls(tmp_path, "environment")
    assert start(tmp_path, "acceptance.sbatch", code, False, PROFILE="quick").wait(30) == code
    assert calls(tmp_path, "arguments") == [f"configs/acceptance_2x8_h100.yaml {out} profile=quick"]
    assert not [call for call in calls(tmp_path, "scontrol") if call.startswith("requeue")]


def test_evaluation_and_serving_jobs_pass_their_variables_on(tmp_path: Path) -> None:
    assert start(tmp_path, "eval.sbatch", 1, False, RUN="runs/mine", SUITE="bfcl").wait(30) == 1
    assert calls(tmp_path, "script") == ["eval_node.sh"]
    assert {"RUN=runs/mine", "SUITE=bfcl", f"FCTUNE_SHARED={tmp_path / 'fctune'}"} <= {*calls(tmp_path, "environment")}
    assert start(tmp_path, "serve.sbatch", 0, False).wait(30) == 0
    assert calls(tmp_path, "script") == ["serve_node.sh"]
    assert {"RUN=runs/llama3_1_8b_lora", "STOP_IDLE=30"} <= {*calls(tmp_path, "environment")}
    assert ":8000/v1" in (tmp_path / "train_41.log").read_text()


def test_a_reinforcement_job_is_requeued_as_a_training_job_is(tmp_path: Path) -> None:
    given = {"MODEL": "/models/base", "CASES": "cases.jsonl"}
    assert start(tmp_path, "grpo.sbatch", 76, False, **given).wait(30) == 76
    assert calls(tmp_path, "script") == ["grpo_node.sh"]
    expected = {"CONFIG=configs/llama3_1_8b_grpo.yaml", "MODEL=/models/base", "CASES=cases.jsonl"}
    assert expected <= {*calls(tmp_path, "environment")}
    assert calls(tmp_path, "scontrol") == ["requeue 41"]


# The module command of a cluster, which knows three modules and uses a variable that may be unset.
MODULES = """
    module() {
      case "$2" in
        cuda/12.8) export FCTUNE_CUDA=12.8$LMOD_UNSET ;;
        nccl) export FCTUNE_NCCL=1 ;;
        quiet) return 0 ;;
        *) echo "unknown module $2" >&2; return 1 ;;
      esac
    }
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_modules_are_loaded_before_the_run(name: str, tmp_path: Path) -> None:
    write_script(tmp_path / "modules" / "init" / "bash", MODULES)
    more = {"MODULESHOME": str(tmp_path / "modules"), "FCTUNE_MODULES": "cuda/12.8 nccl"}
    assert start(tmp_path, name, 0, False, **more).wait(30) == 0
    assert {"FCTUNE_CUDA=12.8", "FCTUNE_NCCL=1"} <= set(calls(tmp_path, "environment"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_task_for_each_gpu_is_refused_with_what_to_write(name: str, tmp_path: Path) -> None:
    assert start(tmp_path, name, 0, False, SLURM_NTASKS="16").wait(30) == 2
    said = (tmp_path / "train_41.err").read_text()
    assert said.startswith("16 tasks on 2 nodes, but")
    assert "Leave out --ntasks and --ntasks-per-node" in said
    assert not calls(tmp_path, "srun")
    assert start(tmp_path, name, 0, False, SLURM_NTASKS="2").wait(30) == 0


def test_a_module_that_fails_to_load_stops_the_job(tmp_path: Path) -> None:
    write_script(tmp_path / "modules" / "init" / "bash", MODULES)
    more = {"MODULESHOME": str(tmp_path / "modules"), "FCTUNE_MODULES": "cuda/12.8 ncl"}
    assert start(tmp_path, SCRIPTS[0], 0, False, **more).wait(30) == 2
    assert "FCTUNE_MODULES=cuda/12.8 ncl: module load ncl failed on" in (tmp_path / "train_41.err").read_text()
    assert not calls(tmp_path, "srun")


@pytest.mark.skipif(Path("/etc/profile.d/modules.sh").exists(), reason="this machine has modules")
def test_modules_without_a_module_command_stop_the_job(tmp_path: Path) -> None:
    assert start(tmp_path, SCRIPTS[0], 0, False, FCTUNE_MODULES="cuda").wait(30) == 2
    assert "FCTUNE_MODULES=cuda: this node has no module command" in (tmp_path / "train_41.err").read_text()
    assert not calls(tmp_path, "srun")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_task_of_a_sweeps_array_takes_the_config_of_its_run(name: str, tmp_path: Path) -> None:
    more = {"FCTUNE_SWEEP": "/shared/study", "SLURM_ARRAY_TASK_ID": "8", "CONFIG": "configs/x.yaml"}
    assert start(tmp_path, name, 0, False, **more).wait(30) == 0
    assert "CONFIG=/shared/study/configs/008.yaml" in calls(tmp_path, "environment")
