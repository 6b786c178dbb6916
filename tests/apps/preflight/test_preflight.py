"""Preflight: faults planted in a cluster, and how the nodes report them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fctune.apps.preflight import checks
from fctune.apps.preflight.checks import check_devices, estimate_disk_usage
from fctune.apps.preflight.preflight import find_faulty_nodes
from fctune.apps.preflight.rendezvous import Node, Rendezvous, RendezvousError
from fctune.config.loading import load_config
from tests.apps.preflight.preflight_nodes import OVERRIDES, TINY, NodeSpec, run_nodes
from tests.conftest import ROOT
from tests.ranks import find_port
from tests.warm_interpreter import warm_python

LARGE = {  # Llama 3.1 8B; only its shape is used
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def only(lines: list[str], word: str) -> str:
    (found,) = [line for line in lines if word in line]
    return found


def test_fit_nodes_receive_the_same_launch(tmp_path: Path) -> None:
    spec = NodeSpec(tmp_path, environment={"MAX_SAMPLES": "50", "DATASET": "synthetic:train:80:2", "MODEL": ""})
    head, other = run_nodes(tmp_path, spec, spec)
    assert (head.code, other.code) == (0, 0), head.lines + other.lines
    assert only(head.lines, "2 nodes are fit")
    assert other.lines == []
    assert head.shell is not None
    assert other.shell is not None
    assert head.shell.replace("node-0", "node-1") == other.shell
    assert f"output_dir={tmp_path}/shared/runs/tiny_lora\n" in head.shell
    assert "recipe=lora_fc_distributed\n" in head.shell
    assert "data.max_samples=50" in head.shell
    assert not list((tmp_path / "shared").glob(".fctune*")), "probe files are left behind"


def test_a_volume_that_is_not_shared_is_reported_by_both_nodes(tmp_path: Path) -> None:
    head, other = run_nodes(tmp_path, NodeSpec(tmp_path / "a", wait_s=6), NodeSpec(tmp_path / "b", wait_s=6))
    assert (head.code, other.code) == (1, 1)
    for outcome in (head, other):
        assert "not shared" in only(outcome.lines, "fault")
        assert "ReadWriteMany" in only(outcome.lines, "fault")


def test_each_fault_is_one_line_with_its_remedy_and_stops_all_nodes(tmp_path: Path) -> None:
    fit = NodeSpec(tmp_path)
    unfit = NodeSpec(
        tmp_path, network="missing", num_gpus=2, clock_s=90, versions={"torchtune": "9.9.9", "peft": "0.0.1"}
    )
    head, other = run_nodes(tmp_path, fit, unfit)
    assert (head.code, other.code) == (1, 1)
    differs = only(head.lines, "fault")
    assert "torchtune 9.9.9 where the head has" in differs
    assert "peft 0.0.1 where the head has" in differs
    assert "sky/setup.sh" in differs
    faults = [line for line in other.lines if "fault" in line]
    assert all(line.startswith("node 1 (") for line in faults)
    assert len(faults) == 3, faults
    assert "missing: does not exist. Mount" in faults[0]
    reason = "is built for CPUs only" if torch.version.cuda is None else "NVIDIA driver's library cannot be loaded"
    assert reason in faults[1]
    assert "the clock is 90 s ahead of the head's. Start time synchronization" in faults[2]


@pytest.mark.parametrize(
    ("severities", "has_bad_hardware", "faulty"),
    [
        ([[], ["fault"], ["note"]], [False, True, False], [1]),
        ([[], ["fault"]], [False, False], []),  # another fault, such as a disk that is not mounted
        ([["fault"], ["fault"]], [True, True], []),  # not one of the nodes but the set-up
        ([["fault"], ["fault"]], [False, True], []),  # the head's fault would stop another start, too
        ([["usage"], ["usage", "fault"]], [False, True], []),
        ([["fault"]], [True], []),
        ([[], []], [False, False], []),
    ],
)
def test_a_node_is_faulty_if_only_its_hardware_stops_the_launch(
    severities: list[list[str]], has_bad_hardware: list[bool], faulty: list[int]
) -> None:
    assert find_faulty_nodes(severities, has_bad_hardware) == faulty


def test_the_node_whose_gpus_failed_is_named_on_all_nodes(tmp_path: Path) -> None:
    head, other = run_nodes(tmp_path, NodeSpec(tmp_path), NodeSpec(tmp_path, num_gpus=2))
    assert (head.code, other.code) == (76, 76)
    assert head.faulty == other.faulty == [1]
    assert "torch" in only(other.lines, "fault") or "GPUs are visible" in only(other.lines, "fault")


def test_an_unwritable_disk_is_reported_once(tmp_path: Path) -> None:
    fit, unfit = NodeSpec(tmp_path), NodeSpec(tmp_path, shared="/proc")
    head, other = run_nodes(tmp_path, fit, unfit)
    assert (head.code, other.code) == (1, 1)
    assert "/proc: cannot be written" in only(other.lines, "fault")
    assert only(head.lines, "stopped").endswith("stopped: node 1 reported a fault")


def test_a_node_that_never_starts_is_named_within_the_timeout(tmp_path: Path) -> None:
    (head,) = run_nodes(tmp_path, NodeSpec(tmp_path, wait_s=2), count=3)
    assert (head.code, head.faulty) == (76, []), "it may only be late, or its machine may be lost"
    assert "node 1, 2 of 3 did not respond within 2 s" in only(head.lines, "did not respond")
    assert head.seconds < 10


def test_a_fault_of_a_node_itself_counts_more_than_a_node_that_never_starts(tmp_path: Path) -> None:
    (head,) = run_nodes(tmp_path, NodeSpec(tmp_path, wait_s=2, network="missing"), count=2)
    assert head.code == 1
    assert only(head.lines, "missing: does not exist")


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (head,) = run_nodes(tmp_path, NodeSpec(tmp_path, wait_s=2), count=2, port=port)
    assert head.code == 1
    assert f"port {port} of the head is in use" in only(head.lines, "in use")
    assert "MASTER_PORT" in only(head.lines, "in use")


def test_an_unreachable_head_is_reported_with_its_address() -> None:
    port = find_port()
    with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}: could not reach the head within 1 s"):
        Rendezvous(Node(1, 2, "127.0.0.1", port, wait_s=1))


def test_an_invalid_config_stops_both_nodes_with_exit_code_2(tmp_path: Path) -> None:
    spec = NodeSpec(tmp_path, overrides=(*OVERRIDES, "epochz=3"))
    for outcome in run_nodes(tmp_path, spec, spec):
        assert outcome.code == 2
        assert "did you mean epochs?" in "\n".join(outcome.lines)
    missing = NodeSpec(tmp_path, config=TINY.with_name("tiny_lorra.yaml"))
    (outcome,) = run_nodes(tmp_path, missing)
    assert outcome.code == 2
    assert "tiny_lora.yaml" in only(outcome.lines, "no such config file")


def test_disk_usage_is_estimated_from_the_models_shape(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LARGE))
    overrides = (f"model.path={model}", OVERRIDES[1], "~adapter", "precision=bf16_mixed", "checkpoint.keep_last=2")
    numel = 8_030_261_248
    usage = estimate_disk_usage(load_config(TINY, overrides), is_downloaded=False)
    assert usage.model == 2 * numel
    assert usage.export == 2 * numel
    assert usage.checkpoints == pytest.approx(6 * 12 * numel, rel=1e-3)  # float32 weights and two moments, 2 x 3 copies
    too_many = (*overrides[:-1], "checkpoint.keep_last=1000")
    (outcome,) = run_nodes(tmp_path, NodeSpec(tmp_path, overrides=too_many))
    assert outcome.code == 1
    assert "GiB free, but the run needs" in only(outcome.lines, "fault")
    assert "checkpoint.keep_last" in only(outcome.lines, "fault")


def test_a_missing_wandb_key_is_reported_and_a_given_one_never_shown(tmp_path: Path) -> None:
    wandb = NodeSpec(tmp_path, overrides=(*OVERRIDES, "telemetry.wandb.project=x"), environment={"HOME": str(tmp_path)})
    (without,) = run_nodes(tmp_path, wandb)
    assert without.code == 1
    assert "WANDB_API_KEY is empty" in only(without.lines, "fault")
    assert "--secret WANDB_API_KEY" in only(without.lines, "fault")
    (given,) = run_nodes(tmp_path, dataclasses.replace(wandb, environment={"WANDB_API_KEY": "of-a-test"}))
    assert given.code == 0, given.lines
    assert "of-a-test" not in f"{given.shell}{given.lines}"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    (logged_in,) = run_nodes(tmp_path, wandb)
    assert logged_in.code == 0, logged_in.lines


@pytest.mark.slow
def test_the_command_prints_the_fault_and_exits_with_its_code(tmp_path: Path) -> None:
    environment = os.environ | {"FCTUNE_SHARED": str(tmp_path), "FCTUNE_NETWORK": str(tmp_path / "none")}
    command = [warm_python(), "-m", "fctune.cli", "preflight", "--config", str(TINY), "--launch", str(tmp_path / "l")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "none: does not exist" in done.stdout
    assert not (tmp_path / "l").exists()


def check_devices_with_driver(folder: Path, cuda: int) -> str:
    """Check one GPU in a process whose NVIDIA driver supports a version of CUDA, such as 12040 for 12.4."""
    source = f"int cuDriverGetVersion(int *version) {{ *version = {cuda}; return 0; }}"
    library = folder / "libcuda.so.1"
    build = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"]
    subprocess.run(list(map(str, build)), input=source, text=True, check=True)
    code = """
import torch
torch.version.cuda = "13.0"  # the tests' own torch may be the CPU build
from fctune.apps.preflight.checks import check_devices
print(*check_devices(1), sep="\\n")
"""
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is real here")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_a_driver_that_is_too_old_for_torch_is_reported_with_the_one_needed(tmp_path: Path) -> None:
    found = check_devices_with_driver(tmp_path, 12040)
    assert "the NVIDIA driver is too old: it supports CUDA 12.4, but torch" in found
    assert "is built for CUDA 13.0. Install driver 580 or newer" in found
    assert "too old" not in check_devices_with_driver(tmp_path, 13000)


GPUS_OF_WHICH_TWO_FAIL = """
import time
bfloat16 = None

class Product:
    def __matmul__(self, other): return self
    def sum(self): return self
    def item(self): return 64**3

def ones(*size, dtype, device):
    if device == "cuda:1":
        raise RuntimeError("CUDA error: no kernel image is available\\nCompile with TORCH_USE_CUDA_DSA")
    if device == "cuda:2":
        time.sleep(60)
    return Product()
"""


@pytest.mark.thorough
def test_a_gpu_on_which_no_kernel_runs_and_one_that_hangs_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(GPUS_OF_WHICH_TWO_FAIL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(checks, "_PROBE_S", 5.0)
    start = time.monotonic()
    failed, hung = checks._check_kernels(4)
    assert failed.message == "GPU 1: a kernel failed (CUDA error: no kernel image is available)"
    assert hung.message == "GPU 2: a kernel failed (no result after 5 s)"
    assert time.monotonic() - start < 30
    assert checks._check_kernels(1) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run here")
def test_kernels_fail_where_there_is_no_gpu() -> None:
    (problem,) = checks._check_kernels(1)
    assert problem.message.startswith("GPU 0: a kernel failed (")


@pytest.mark.gpu
def test_gpus_in_use_are_reported() -> None:
    count = torch.cuda.device_count()
    assert [fault for fault in check_devices(count) if fault.severity == "fault"] == []
    held = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    fault = check_devices(count)[0]
    assert "GPU 0: already in use" in fault.message
    del held
    (missing,) = check_devices(count + 1)
    assert missing.message == f"only {count} of {count + 1} GPUs are visible"
