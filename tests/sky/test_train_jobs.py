"""The JobSet and Kubeflow Trainer's runtime: valid for their APIs, and restarted after the codes that restart a run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models
from kubernetes_validate import validate

from fctune.base.exit_codes import EXIT_CODES, RESTARTED
from tests.conftest import ROOT
from tests.sky.task_files import SKY, load

JOBSET = load(SKY / "k8s" / "train-jobset.yaml")
RUNTIME, TRAIN_JOB = yaml.safe_load_all((SKY / "k8s" / "trainer.yaml").read_text())
SPECS = {"JobSet": JOBSET["spec"], "ClusterTrainingRuntime": RUNTIME["spec"]["template"]["spec"]}


def job_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of the only job."""
    (replicated,) = spec["replicatedJobs"]
    assert replicated["replicas"] == 1
    job: dict[str, Any] = replicated["template"]["spec"]
    return job


def container_of(spec: dict[str, Any]) -> dict[str, Any]:
    (container,) = job_of(spec)["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def respond(spec: dict[str, Any], code: int, is_disrupted: bool = False) -> str:
    """Return what the controllers of Jobs and JobSets do when a container ends with a code, by their documentation."""
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job_of(spec)["podFailurePolicy"]["rules"]):
        if is_disrupted and {"type": "DisruptionTarget", "status": "True"} in rule.get("onPodConditions", []):
            if rule["action"] != "FailJob":
                return str(rule["action"])
            reason = "PodFailurePolicy"
            message = (
                "Pod default/fctune-train-node-0-1-x7k2p has condition DisruptionTarget matching FailJob rule at index "
                f"{index}"
            )
            break
        if code in rule.get("onExitCodes", {"values": []})["values"]:
            assert rule["onExitCodes"]["operator"] == "In"
            # https://github.com/kubernetes/kubernetes/blob/v1.36.0/pkg/controller/job/pod_failure_policy.go
            reason = "PodFailurePolicy"
            message = (
                f"Container {rule['onExitCodes']['containerName']} for pod default/fctune-train-node-0-1-x7k2p failed "
                f"with exit code {code} matching {rule['action']} rule at index {index}"
            )
            break
    assert job_of(spec)["backoffLimit"] == 0
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return str(rule["action"])
    return "RestartJobSet"  # counted by maxRestarts


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pods_restart_together_after_the_codes_that_restart_and_never_after_others(spec: dict[str, Any]) -> None:
    for code in EXIT_CODES:
        expected = "RestartJobSetAndIgnoreMaxRestarts" if code in RESTARTED else "FailJobSet"
        assert code == 0 or respond(spec, code) == expected, code
    assert respond(spec, 137) == "RestartJobSet"
    assert 0 < spec["failurePolicy"]["maxRestarts"] < 10
    assert spec["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    for code in (137, 143, 75, 1):  # a preempted or drained pod, however it ends; alone, it could not resume
        assert respond(spec, code, is_disrupted=True) == "RestartJobSetAndIgnoreMaxRestarts"
    assert job_of(spec)["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy requires it"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_pod_has_time_to_save_and_what_a_node_needs(spec: dict[str, Any]) -> None:
    pod, container = job_of(spec)["template"]["spec"], container_of(spec)
    (hook,) = load(SKY / "finetune.yaml")["config"]["hooks"]
    assert pod["terminationGracePeriodSeconds"] >= hook["timeout"]
    resources = container["resources"]
    assert resources["limits"] == resources["requests"], "a guaranteed pod is evicted last"
    assert [name for name in resources["limits"] if name.startswith("rdma/")]
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {variables["FCTUNE_SHARED"], variables["FCTUNE_NETWORK"], "/dev/shm"} <= mounts
    (launch_id,) = [one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if one["name"] == "LAUNCH_ID"]
    assert variables["GPUS_PER_NODE"] == resources["limits"]["nvidia.com/gpu"] == "8", "known if the driver is dead"
    assert int(variables["PREFLIGHT_WAIT_S"] or 0) >= 600, "one pod may pull the image minutes after the other"
    assert launch_id == "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
    assert {"LAUNCH_ID", "MASTER_ADDR", "NODE_RANK", "NUM_NODES", "PREFLIGHT_WAIT_S", "GPUS_PER_NODE"} <= set(
        re.findall(r"\$\{(\w+):", (SKY / "run_node.sh").read_text())
    )


def test_the_jobset_runs_the_node_script_on_two_nodes() -> None:
    name, job, container = JOBSET["metadata"]["name"], job_of(JOBSET["spec"]), container_of(JOBSET["spec"])
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert job["completions"] == job["parallelism"] == int(variables["NUM_NODES"]) == 2
    assert job["completionMode"] == "Indexed"
    assert variables["MASTER_ADDR"] == f"{name}-node-0-0.{JOBSET['spec']['network']['subdomain']}"
    assert "NODE_RANK=$JOB_COMPLETION_INDEX" in container["args"][0]
    assert "exec sky/run_node.sh" in container["args"][0]
    assert (ROOT / variables["CONFIG"]).is_file()


def test_the_trainers_runtime_starts_the_same_pods() -> None:
    jobset, runtime = container_of(JOBSET["spec"]), container_of(SPECS["ClusterTrainingRuntime"])
    given = {one["name"] for one in TRAIN_JOB["spec"]["trainer"]["env"]}
    by_trainer = {"NUM_NODES", "MASTER_ADDR"}
    assert runtime | {"env": None, "args": None} == jobset | {"env": None, "args": None}
    assert [one for one in jobset["env"] if one["name"] not in given | by_trainer] == runtime["env"]
    assert set(re.findall(r"(\w+)=\$PET_\w+", runtime["args"][0])) == {"NODE_RANK", *by_trainer}
    assert runtime["args"][0].splitlines()[1] == jobset["args"][0].splitlines()[1]
    # Trainer finds its container by these names, and counts its pods from numNodes.
    (replicated,) = SPECS["ClusterTrainingRuntime"]["replicatedJobs"]
    assert replicated["name"] == runtime["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert TRAIN_JOB["spec"]["trainer"]["numNodes"] == RUNTIME["spec"]["mlPolicy"]["numNodes"] == 2
    reference = TRAIN_JOB["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (RUNTIME["kind"], RUNTIME["metadata"]["name"])
    assert f"{reference['apiGroup']}/v1alpha1" == RUNTIME["apiVersion"] == TRAIN_JOB["apiVersion"]


@pytest.mark.parametrize("manifest", [JOBSET, TRAIN_JOB], ids=lambda manifest: manifest["kind"])
def test_kueue_queues_it(manifest: dict[str, Any]) -> None:
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]


@pytest.mark.parametrize(
    ("manifest", "model"),
    [
        (JOBSET, "JobsetV1alpha2JobSet"),
        (RUNTIME, "TrainerV1alpha1ClusterTrainingRuntime"),
        (TRAIN_JOB, "TrainerV1alpha1TrainJob"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_api_has_every_field_with_its_type(manifest: dict[str, Any], model: str) -> None:
    # An unknown field would be missing from what the model holds.
    assert getattr(models, model).from_dict(manifest).to_dict() == manifest


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_kubernetes_accepts_the_job_that_the_controller_creates(spec: dict[str, Any]) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "fctune-train-node-0"}, "spec": job_of(spec)}
    for version in ("1.36", "1.37"):
        validate(job, version, strict=True)
