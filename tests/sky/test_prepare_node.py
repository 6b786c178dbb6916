"""Preparation on a node without GPUs: its script, and that the run which follows finds what it has prepared."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.data.synthetic import iter_conversations
from tests.apps.hub_server import COMMIT, HubServer, serve_hub
from tests.conftest import ROOT, TINY_BASE
from tests.ranks import find_port
from tests.sky.task_files import SKY, load
from tests.warm_interpreter import warm_python

TINY = str(ROOT / "configs" / "tiny_lora.yaml")
CARD = b"---\nconfigs:\n- config_name: small\n  data_files: rows.jsonl\n---\n"

# Opens the prepared set of a launch as rank 0 does, and does not write one.
OPEN_SET = """
import sys
from fctune.data import prepared_set
def refuse(*_): raise SystemExit("the rows are prepared again")
prepared_set._write = refuse
from fctune.base.terminal import Terminal
from fctune.cli.data import prepare_rows
from fctune.models.run_config import load_run_config
print(prepare_rows(load_run_config(sys.argv[1], sys.argv[2:]), Terminal()).path)
"""


def make_rows(count: int) -> bytes:
    return "".join(json.dumps(row.to_openai()) + "\n" for row in iter_conversations("train", count, 1)).encode()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serve_hub(HubServer()) as server:
        server.repositories["models/some/model"] = {file.name: file.read_bytes() for file in TINY_BASE.iterdir()}
        server.repositories["datasets/some/rows"] = {"README.md": CARD, "rows.jsonl": make_rows(80)}
        yield server


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Copy the scripts into a tree whose `tune` records its arguments; the rest is real."""
    folder = tmp_path / "clone"
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    (folder / "sky").mkdir()
    for name in ("prepare_node.sh", "run_node.sh"):
        shutil.copy(SKY / name, folder / "sky")
    commands = {"tune": f'printf "%s\\0" "$@" > {folder}/arguments', "python": f'exec {warm_python()} "$@"'}
    for name, line in commands.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "shared").mkdir()
    (tmp_path / "network").mkdir()
    return folder


def environment_of(folder: Path, hub: HubServer | None = None, **more: str) -> dict[str, str]:
    dropped = ("SKYPILOT_", "SLURM_", "FCTUNE_CACHE", "HF_", "HUGGING")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    client = {"HF_HUB_OFFLINE": "1"} if hub is None else {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    disks = {"FCTUNE_SHARED": str(folder / "shared"), "FCTUNE_NETWORK": str(folder / "network")}
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CONFIG": "", "MODEL_SIZE": ""}
    return kept | client | disks | common | more


def run(script: Path, environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [str(script), *overrides]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def prepare(clone: Path, environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    return run(clone / "sky" / "prepare_node.sh", environment, *overrides)


def list_sets(folder: Path) -> list[Path]:
    return sorted(file.parent for file in (folder / "shared" / "cache" / "prepared").glob("*/meta.json"))


HUB_MODEL = {"MODEL": "hf:some/model"}
FORMS: dict[str, tuple[dict[str, str], list[str]]] = {
    "a data set of the hub": ({"CONFIG": TINY, "DATASET": "some/rows"} | HUB_MODEL, []),
    "a part of one": ({"CONFIG": TINY, "DATASET": "hf:some/rows:small:train", "MAX_SAMPLES": "40"} | HUB_MODEL, []),
    "a size": ({"MODEL_SIZE": "8B", "DATASET": "some/rows", "OVERRIDES": "data.seq_len=1024"} | HUB_MODEL, []),
    "the sources of a config": ({"CONFIG": TINY} | HUB_MODEL, ["data.sources.0.path=hf:some/rows@main"]),
    "a file": ({"CONFIG": TINY, "DATASET": "ROWS", "MODEL": str(TINY_BASE)}, []),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_run_with_the_same_variables_opens_the_set_that_was_prepared(
    form: str, hub: HubServer, clone: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(make_rows(80))
    variables, overrides = FORMS[form]
    variables = {name: value.replace("ROWS", str(tmp_path / "rows.jsonl")) for name, value in variables.items()}
    environment = environment_of(tmp_path, hub, **variables, MASTER_PORT=str(find_port()))
    done = prepare(clone, environment, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    (prepared,) = list_sets(tmp_path)
    if form == "a part of one":
        assert json.loads((prepared / "meta.json").read_text())["counts"]["rows"] == 40
    sent = hub.sent.copy()
    assert ("MODEL" in variables and "hf:" in variables["MODEL"]) == bool(sent["model.safetensors"])
    # The hub has a newer commit by now, which the run does not switch to.
    hub.commit = "f" * 40
    started = run(clone / "sky" / "run_node.sh", environment | {"FCTUNE_CPU_RANKS": "1"}, *overrides)
    assert started.returncode == 0, started.stdout + started.stderr
    assert hub.sent == sent, "nothing is downloaded again"
    words = (clone / "arguments").read_text().split("\0")[:-1]
    launch = words[words.index("--config") + 1 :]
    if sent["model.safetensors"]:
        assert f"model.path=hf:some/model@{COMMIT}" in launch
    caches = {"FCTUNE_CACHE": f"{tmp_path}/shared/cache", "HF_HOME": f"{tmp_path}/shared/huggingface"}
    assert open_set(environment_of(tmp_path, None, **caches), launch) == prepared


def open_set(environment: dict[str, str], launch: list[str]) -> Path:
    """Return the directory of the prepared set that a launch opens."""
    command = [warm_python(), "-c", OPEN_SET, *launch]
    opened = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert opened.returncode == 0, opened.stderr
    return Path(opened.stdout.strip())


def test_a_run_finds_what_was_prepared_where_the_disk_is_mounted_elsewhere_and_also_rows_to_replay(
    hub: HubServer, clone: Path, tmp_path: Path
) -> None:
    hub.repositories["datasets/some/general"] = {"rows.jsonl": make_rows(120)}
    rows = tmp_path / "shared" / "rows.jsonl"
    rows.write_bytes(make_rows(80))
    replay = "data.replay={share: 20%, sources: [{path: ROWS}, {path: 'hf:some/general'}]}"
    variables = {"CONFIG": TINY, "DATASET": "some/rows", "MASTER_PORT": str(find_port())} | HUB_MODEL
    environment = environment_of(tmp_path, hub, **variables)
    done = prepare(clone, environment, replay.replace("ROWS", str(rows)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conversations of data.replay" in done.stdout
    assert "data.replay.sources.1.path=hf:" in done.stdout
    (prepared,) = list_sets(tmp_path)
    sent = hub.sent.copy()
    hub.commit = "f" * 40
    moved = tmp_path / "elsewhere"
    (tmp_path / "shared").rename(moved)
    there = {"FCTUNE_SHARED": str(moved), "FCTUNE_CPU_RANKS": "1"}
    replay = replay.replace("ROWS", str(moved / "rows.jsonl"))
    started = run(clone / "sky" / "run_node.sh", environment | there, replay)
    assert started.returncode == 0, started.stdout + started.stderr
    assert hub.sent == sent, "nothing is downloaded again"
    words = (clone / "arguments").read_text().split("\0")[:-1]
    launch = words[words.index("--config") + 1 :]
    assert any(re.fullmatch(rf"data\.replay\.sources\.1\.path=hf:{moved}/.*/{COMMIT}", word) for word in launch)
    caches = {"FCTUNE_CACHE": f"{moved}/cache", "HF_HOME": f"{moved}/huggingface"}
    assert open_set(environment_of(tmp_path, None, **caches), launch) == moved / prepared.relative_to(
        tmp_path / "shared"
    )


def test_what_does_not_exist_is_named_and_nothing_is_written(hub: HubServer, clone: Path, tmp_path: Path) -> None:
    variables = {"CONFIG": TINY, "MODEL": "hf:some/modle", "DATASET": "some/row"}
    done = prepare(clone, environment_of(tmp_path, hub, **variables))
    assert done.returncode == 1
    assert "fault: model.path: the hub has no model some/modle" in done.stdout
    assert "fault: data.sources.0.path: the hub has no dataset some/row" in done.stdout
    assert not hub.sent
    done = prepare(clone, environment_of(tmp_path, hub, MODEL_SIZE="11B"))
    assert done.returncode == 2
    assert "MODEL_SIZE=11B" in done.stderr
    done = prepare(clone, environment_of(tmp_path, hub, CONFIG=TINY, DATASET="missing/rows.jsonl"))
    assert done.returncode == 2
    assert "no such file or directory" in done.stderr
    done = prepare(clone, environment_of(tmp_path, hub, CONFIG=TINY, DATASET="hf:some/rows:large", **HUB_MODEL))
    assert done.returncode == 2
    assert "BuilderConfig 'large' not found" in done.stderr
    assert not list_sets(tmp_path)


def test_a_missing_shared_disk_is_a_fault(clone: Path, tmp_path: Path) -> None:
    environment = environment_of(tmp_path, CONFIG=TINY, MODEL=str(TINY_BASE), DATASET="synthetic:train:80:1")
    done = prepare(clone, environment | {"FCTUNE_SHARED": str(tmp_path / "none")})
    assert done.returncode == 1
    assert done.stdout.count("fault: ") == 1
    assert f"fault: {tmp_path}/none: does not exist. Mount the volume shared by all nodes" in done.stdout
    assert not (tmp_path / "none").exists()


def launch(clone: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start the script in a group of processes of its own."""
    return subprocess.Popen(
        [clone / "sky" / "prepare_node.sh"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def start_preparing(clone: Path, environment: dict[str, str]) -> tuple[subprocess.Popen[str], Path]:
    """Start to prepare, and return the process with the directory of its unfinished set."""
    environment = environment | {"PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{environment['PATH']}"}
    process = launch(clone, environment)
    prepared = Path(environment["FCTUNE_SHARED"]) / "cache" / "prepared"
    deadline = time.monotonic() + 90
    while not (found := [path for path in prepared.glob(".*.*") if (path / "tokens.bin").is_file()]):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, found[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("ended", ["SIGKILL", "SIGTERM"])
def test_a_preparation_that_was_killed_is_completed_by_the_next_one(ended: str, clone: Path, tmp_path: Path) -> None:
    environment = environment_of(tmp_path, CONFIG=TINY, MODEL=str(TINY_BASE), DATASET="synthetic:train:3000:1")
    process, unfinished = start_preparing(clone, environment)
    os.killpg(process.pid, signal.Signals[ended])
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert list_sets(tmp_path) == []
    if ended == "SIGTERM":
        assert "interrupted: run the same command again" in output
        assert not unfinished.exists()
    done = prepare(clone, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data: 3,000 conversations from 3,000 rows" in done.stdout
    assert len(list_sets(tmp_path)) == 1


def test_of_two_preparations_at_once_one_writes_and_the_other_waits_for_it(clone: Path, tmp_path: Path) -> None:
    environment = environment_of(tmp_path, CONFIG=TINY, MODEL=str(TINY_BASE), DATASET="synthetic:train:3000:1")
    first, _ = start_preparing(clone, environment)
    os.killpg(first.pid, signal.SIGSTOP)
    second = launch(clone, environment)
    assert second.stdout is not None
    waiting = next(line for line in second.stdout if "waits for it" in line)
    assert "another process is preparing the same rows" in waiting
    os.killpg(first.pid, signal.SIGCONT)
    assert first.wait(90) == second.wait(90) == 0
    (prepared,) = list_sets(tmp_path)
    assert sorted(path.name for path in prepared.parent.iterdir() if path.name.startswith(".")) == []


def test_the_task_the_batch_script_and_the_job_run_the_same_script_with_the_runs_variables() -> None:
    task, training = load(SKY / "prepare.yaml"), load(SKY / "finetune.yaml")
    assert "accelerators" not in task["resources"]
    assert (task["num_nodes"], task["volumes"], task["setup"]) == (1, training["volumes"], training["setup"])
    # The variables that change what is prepared have the same names and values.
    only_training = {"FCTUNE_NETWORK", "MAX_RESTARTS", "PREPARE_ON_GPUS", "MIRROR_CHECKPOINTS", "EXPECT_INFINIBAND"}
    assert task["envs"] == {name: value for name, value in training["envs"].items() if name not in only_training}
    assert task["run"].splitlines() == [
        *(line for line in training["run"].splitlines() if "export CONFIG" in line),
        "sky/prepare_node.sh",
    ]
    (job,) = yaml.safe_load_all((SKY / "k8s" / "prepare-job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["sky/prepare_node.sh"]
    assert "sky/prepare_node.sh" in (SKY / "slurm" / "prepare.sbatch").read_text()


def test_the_job_has_the_disk_and_settings_of_the_training_pods_and_no_gpu() -> None:
    (job,) = yaml.safe_load_all((SKY / "k8s" / "prepare-job.yaml").read_text())
    (replicated,) = load(SKY / "k8s" / "train-jobset.yaml")["spec"]["replicatedJobs"]
    pod, training = job["spec"]["template"]["spec"], replicated["template"]["spec"]["template"]["spec"]
    (container,), (trainer,) = pod["containers"], training["containers"]
    volumes = {volume["name"]: volume for volume in training["volumes"]}
    assert pod["volumes"] == [volumes["shared"]]
    assert container["volumeMounts"] == [mount for mount in trainer["volumeMounts"] if mount["name"] == "shared"]
    assert container["envFrom"] == trainer["envFrom"]
    assert all(variable in trainer["env"] for variable in container["env"])
    assert pod["securityContext"] == training["securityContext"]
    assert not [name for name in container["resources"]["requests"] if "gpu" in name]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    assert rules[1]["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert pod["restartPolicy"] == "Never", "podFailurePolicy requires it"
    validate = pytest.importorskip("kubernetes_validate").validate
    for version in ("1.36", "1.37"):
        validate(job, version, strict=True)


def test_the_batch_script_prepares_on_one_node_where_the_training_job_finds_it(tmp_path: Path) -> None:
    """With stand-ins for srun and the node's script: Slurm itself is in tests/slurm."""
    text = (SKY / "slurm" / "prepare.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.M))
    assert (options["nodes"], options["ntasks-per-node"], "requeue" in options) == ("1", "1", True)
    assert not [name for name in options if "gpu" in name]
    folder, tools = tmp_path / "clone", tmp_path / "bin"
    (folder / "sky" / "slurm").mkdir(parents=True)
    tools.mkdir()
    shutil.copy(SKY / "slurm" / "batch.sh", folder / "sky" / "slurm")
    show = '#!/usr/bin/env bash\necho "$0 CONFIG=$CONFIG FCTUNE_SHARED=$FCTUNE_SHARED $*"\n'
    for path in (folder / "sky" / "prepare_node.sh", tools / "srun"):
        path.write_text(show)
        path.chmod(0o755)
    environment: dict[str, Any] = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(folder)}
    command = ["bash", str(SKY / "slurm" / "prepare.sbatch"), "epochs=2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    given = f"CONFIG=configs/llama3_1_8b_lora.yaml FCTUNE_SHARED={tmp_path}/fctune"
    assert done.stdout.splitlines()[-1] == f"{folder}/sky/prepare_node.sh {given} epochs=2"
    done = subprocess.run(command, env=environment | {"IMAGE": "x"}, capture_output=True, text=True, check=True)
    last = done.stdout.splitlines()[-1]
    assert f"--container-image=x --container-mounts={tmp_path}/fctune:/mnt/shared," in last
    assert last.endswith("env FCTUNE_SHARED=/mnt/shared sky/prepare_node.sh epochs=2")
