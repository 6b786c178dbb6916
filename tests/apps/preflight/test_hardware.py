"""Preflight of GPUs and links: what NVML and sysfs report, and an all_reduce of real ranks."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from fctune.apps.preflight import all_reduce, checks, links, preflight
from fctune.apps.preflight.all_reduce import Measured, measure_all_reduce, read_bandwidths
from fctune.apps.preflight.checks import Mounts
from fctune.apps.preflight.links import Devices, check_network, compare_ports, describe_ports, judge_all_reduce
from fctune.apps.preflight.preflight import Request, run_preflight
from fctune.apps.preflight.rendezvous import Node, Rendezvous
from fctune.base.errors import ConfigError
from fctune.runs.device import are_linked, read_health
from tests.apps.preflight.preflight_nodes import OVERRIDES, TINY
from tests.conftest import ROOT
from tests.ranks import find_port

LINKED = Devices(8, "NVIDIA H100 80GB HBM3", are_linked=True)
PORTS = [{f"mlx5_{index}:1": 50.0 for index in range(8)}] * 2
EXPECTED = {"EXPECT_INFINIBAND": "1"}


@dataclass
class FakeGpu:
    """A GPU of the fake NVML: remapped rows (corrected, uncorrected, pending, failed) and the state of each NVLink."""

    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    links: list[int] = field(default_factory=lambda: [1] * 18)
    switch: bool = True  # its links go to NVSwitches
    bridge: int = 0  # without switches, the bridge that its links go to


class FakeNvml:
    """The part of pynvml that a preflight uses, for idle GPUs."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_NVLINK_DEVICE_TYPE_SWITCH = 2, 0, 2
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0

    class NVMLError(Exception):
        """Raised for what a GPU does not support."""

    def __init__(self, gpus: list[FakeGpu]):
        self.gpus = gpus

    def nvmlInit(self) -> None:
        """Succeed."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        """Return a GPU by the number in its UUID."""
        return self.gpus[int(uuid.removeprefix("GPU-"))]

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        """Return the memory of an idle GPU."""
        return SimpleNamespace(used=600 * 2**20)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        """Return the load of an idle GPU."""
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:
        """Return no error."""
        return 0

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:
        """Return the remapped rows, as pynvml does."""
        if gpu.rows is None:
            raise self.NVMLError
        return gpu.rows

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        """Return 1 for an active link."""
        if link >= len(gpu.links):
            raise self.NVMLError
        return gpu.links[link]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: FakeGpu, link: int) -> int:
        """Return what a link goes to: 0 for a GPU, 2 for a switch."""
        if not self.nvmlDeviceGetNvLinkState(gpu, link):
            raise self.NVMLError
        return 2 * gpu.switch

    def nvmlDeviceGetP2PStatus(self, first: FakeGpu, second: FakeGpu, index: int) -> int:
        """Return 0 if NVLink connects two GPUs, and otherwise 1 for an unsupported chipset."""
        return int(not (first.switch and second.switch) and first.bridge != second.bridge)


def install_nvml(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(list(gpus)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index))


def test_rows_of_memory_that_wait_for_a_remap_and_those_without_a_spare_are_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = FakeGpu(), FakeGpu(rows=(1, 1, 1, 0)), FakeGpu(rows=(512, 3, 1, 1)), FakeGpu(rows=(2, 1, 0, 0))
    install_nvml(monkeypatch, *gpus)
    pending, failed = checks._check_readings(4)
    assert pending.message.startswith("GPU 1: defective rows of memory wait for a reset")
    assert failed.message.startswith("GPU 2: a defective row of memory could not be remapped")
    assert pending.severity == failed.severity == "fault"


def test_a_gpu_with_fewer_active_nvlinks_than_another_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, FakeGpu(), FakeGpu(links=[1] * 16 + [0, 0]), FakeGpu())
    (problem,) = checks._check_readings(3)
    assert problem.message == "GPU 1: 16 of 18 NVLinks are active, but 18 on another GPU of this node"
    assert problem.severity == "fault"


def test_a_gpu_without_active_nvlinks_is_a_fault_only_among_nvswitches(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch, severity in ((False, "note"), (True, "fault")):
        bridged, alone = FakeGpu(links=[1] * 12, switch=switch), FakeGpu(links=[0] * 12, switch=switch)
        install_nvml(monkeypatch, bridged, bridged, alone)
        (problem,) = checks._check_readings(3)
        assert problem.message == "GPU 2: 0 of 12 NVLinks are active, but 12 on another GPU of this node"
        assert problem.severity == severity


def test_nvlinks_that_are_inactive_on_all_gpus_are_a_note_and_none_at_all_are_fine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = FakeGpu(links=[1] * 6 + [0] * 6)
    install_nvml(monkeypatch, half, half)
    assert [problem.severity for problem in checks._check_readings(2)] == ["note", "note"]
    unused, without = FakeGpu(links=[0] * 12), FakeGpu(rows=None, links=[])
    install_nvml(monkeypatch, unused, unused)
    assert checks._check_readings(2) == []
    install_nvml(monkeypatch, without)
    assert checks._check_readings(1) == []
    health = read_health(0)
    assert health is not None
    assert (health.is_remap_pending, health.num_links) == (None, 0)


Ports = dict[str, tuple[str, str]]
FAST: Ports = {f"mlx5_{index}": ("4: ACTIVE", "400 Gb/sec (4X NDR)") for index in range(8)}
DOWN = ("1: DOWN", "10 Gb/sec (1X SDR)")


def plant_ports(folder: Path, monkeypatch: pytest.MonkeyPatch, ports: Ports) -> None:
    """Write a tree like /sys/class/infiniband, with one port for each adapter."""
    root = folder / f"infiniband-{len(list(folder.iterdir()))}"
    for name, (state, rate) in ports.items():
        port = root / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    monkeypatch.setattr(links, "_INFINIBAND", root)


def test_tcp_is_a_fault_where_infiniband_is_expected_and_otherwise_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_ports(tmp_path, monkeypatch, {})
    assert check_network(1, 8, EXPECTED) == []
    assert check_network(2, 0, EXPECTED) == []
    (note,) = check_network(2, 8, {})
    assert note.severity == "note"
    for environment in (EXPECTED, {"NCCL_IB_HCA": "mlx5"}, EXPECTED | {"NCCL_IB_DISABLE": "1"}):
        (fault,) = check_network(2, 8, environment)
        assert fault.severity == "fault", environment
        assert "TCP" in fault.message
        assert "EXPECT_INFINIBAND=0" in fault.remedy
    for environment in ({"NCCL_IB_DISABLE": "1"}, {"EXPECT_INFINIBAND": "0", "NCCL_IB_HCA": "mlx5"}):
        (note,) = check_network(2, 8, environment)
        assert note.severity == "note", environment


def test_ports_that_are_all_down_are_a_fault_and_one_of_several_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hca = EXPECTED | {"NCCL_IB_HCA": "mlx5"}
    plant_ports(tmp_path, monkeypatch, FAST)
    assert check_network(2, 8, hca) == []
    plant_ports(tmp_path, monkeypatch, FAST | {"mlx5_8": DOWN, "irdma0": DOWN})
    (note,) = check_network(2, 8, hca)
    assert (note.message, note.severity) == ("InfiniBand port mlx5_8:1 is not active", "note")
    (fault,) = check_network(2, 8, EXPECTED | {"NCCL_IB_HCA": "=mlx5_0,mlx5_8:1"})
    assert fault.severity == "fault", "this port is asked for by its name"
    (fault,) = check_network(2, 8, EXPECTED | {"NCCL_IB_HCA": "irdma"})
    assert "no InfiniBand port is active of NCCL_IB_HCA=irdma (this node has irdma0:1, mlx5_0:1" in fault.message
    assert fault.severity == "fault"


@pytest.mark.parametrize(
    ("names", "selected"),
    [
        ("", {"mlx5_0:1", "mlx5_10:1", "irdma0:1"}),
        ("mlx5", {"mlx5_0:1", "mlx5_10:1"}),
        ("mlx5_1", {"mlx5_10:1"}),
        ("=mlx5_1", set()),
        ("=mlx5_0:1,irdma0:2", {"mlx5_0:1"}),
        ("^mlx5_1,irdma", {"mlx5_0:1"}),
        ("^=mlx5_1", {"mlx5_0:1", "mlx5_10:1", "irdma0:1"}),
    ],
)
def test_ports_are_selected_as_nccl_does(
    names: str, selected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_ports(tmp_path, monkeypatch, dict.fromkeys(("mlx5_0", "mlx5_10", "irdma0"), FAST["mlx5_0"]))
    assert set(describe_ports({"NCCL_IB_HCA": names})) == selected


def test_a_node_whose_ports_are_slower_than_those_of_another_is_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_ports(tmp_path, monkeypatch, FAST)
    hca = {"NCCL_IB_HCA": "mlx5"}
    fit = describe_ports(hca)
    plant_ports(tmp_path, monkeypatch, FAST | {"mlx5_2": DOWN, "mlx5_5": ("4: ACTIVE", "100 Gb/sec (1X NDR)")})
    unfit = describe_ports(hca)
    assert compare_ports(0, [fit, unfit, fit], hca) == compare_ports(2, [fit, unfit, fit], hca) == []
    (fault,) = compare_ports(1, [fit, unfit, fit], hca)
    assert fault.severity == "fault"
    assert "2,500 Gb/s together, where node 0 has 3,200; compare mlx5_2:1, mlx5_5:1" in fault.message
    (note,) = compare_ports(1, [fit, unfit, fit], EXPECTED)
    assert note.severity == "note", "NCCL may not use the ports that differ"
    assert compare_ports(1, [{}, {}], hca) == []
    for variable in ({"NCCL_IB_DISABLE": "1"}, {"EXPECT_INFINIBAND": "0"}):
        assert describe_ports(hca | variable) == {}


@pytest.mark.thorough
def test_two_nodes_run_an_all_reduce_and_one_alone_gives_up_in_time() -> None:
    port = find_port()
    nodes = [Node(rank, 2, "127.0.0.1", port, 60) for rank in range(2)]
    stores = [Rendezvous(node) for node in nodes]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda node: measure_all_reduce(node, 1), nodes)
    assert first.failed is second.failed is None, (first, second)
    assert set(first.gb_s) == set(second.gb_s) == {"all"}
    stores[1].close()
    stores[0].close()
    alone = Rendezvous(Node(0, 2, "127.0.0.1", find_port(), 60))
    lost = measure_all_reduce(alone.node, 1, limit_s=6)
    assert lost.failed == "all"
    assert (lost.error, lost.is_late) == ("rank 0: no result after 6 s", True)


def test_lines_of_nccl_do_not_hide_the_bandwidths() -> None:
    output = '{"node": 250.5}\nhost-1:71:90 [0] NCCL INFO Using network IB\n{"all": 200.0}\n'
    assert read_bandwidths(output) == {"node": 250.5, "all": 200.0}


def test_low_bandwidth_is_a_fault_where_the_links_are_known_and_otherwise_a_note() -> None:
    fit, inside = Measured({"node": 250.0, "all": 200.0}), Measured({"node": 20.0, "all": 18.0})
    across = Measured({"node": 250.0, "all": 5.0})
    assert judge_all_reduce(0, [fit, fit], LINKED, PORTS, EXPECTED) == []
    (fault,) = judge_all_reduce(1, [fit, inside], LINKED, PORTS, EXPECTED)  # over host memory
    assert "reached 20 GB/s, less than 10% of the 450 of its links" in fault.message
    assert fault.severity == "fault"
    (note,) = judge_all_reduce(1, [fit, inside], replace(LINKED, are_linked=False), PORTS, EXPECTED)
    assert "of the 450 of its usual machine" in note.message
    assert note.severity == "note"
    (fault,) = judge_all_reduce(1, [fit, across], LINKED, PORTS, EXPECTED)  # over TCP
    assert "reached 5 GB/s, less than 10% of the 250 of the ports" in fault.message
    assert fault.severity == "fault"
    for ports, environment in ((PORTS, {}), ([{}, {}], EXPECTED)):
        (note,) = judge_all_reduce(1, [fit, across], LINKED, ports, environment)
        assert note.severity == "note", environment
    assert judge_all_reduce(1, [fit, across], LINKED, [{"mlx5_0:1": 50.0}] * 2, EXPECTED) == []
    assert judge_all_reduce(0, [Measured({"all": 40.0})] * 2, replace(LINKED, count=1), [{}, {}], EXPECTED) == []
    assert judge_all_reduce(1, [fit, across], LINKED, PORTS, EXPECTED | {"PREFLIGHT_MIN_BANDWIDTH": "0"}) == []
    assert judge_all_reduce(1, [fit, across], replace(LINKED, name="Unknown GPU"), PORTS, EXPECTED) == []
    with pytest.raises(ConfigError, match="PREFLIGHT_MIN_BANDWIDTH=10%: expected a share"):
        judge_all_reduce(0, [fit], LINKED, PORTS, {"PREFLIGHT_MIN_BANDWIDTH": "10%"})


@pytest.mark.parametrize(
    ("gpu", "inside", "across", "port"),
    [("A100 80GB PCIe", 12.0, 8.0, 25.0), ("A100-SXM4-40GB", 230.0, 12.0, 12.5), ("H200 NVL", 40.0, 30.0, 50.0)],
)
def test_healthy_machines_with_fewer_links_than_usual_are_fit(
    gpu: str, inside: float, across: float, port: float
) -> None:
    nodes = [Measured({"node": inside, "all": across})] * 2
    devices = Devices(8, f"NVIDIA {gpu}", are_linked="SXM" in gpu)
    problems = judge_all_reduce(0, nodes, devices, [{f"mlx5_{i}:1": port for i in range(4)}] * 2, EXPECTED)
    assert {problem.severity for problem in problems} <= {"note"}


def test_gpus_are_linked_if_nvlink_connects_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, *[FakeGpu()] * 4)
    assert are_linked(4)
    bridge = FakeGpu(switch=False)
    install_nvml(monkeypatch, bridge, bridge, FakeGpu(switch=False, bridge=1))
    assert are_linked(2)
    assert not are_linked(3), "NVML shows all links of all three as active"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not are_linked(2)


def test_a_node_that_fails_by_itself_is_blamed_alone() -> None:
    bad, waiting = Measured({}, "node", "rank 3: NCCL error"), Measured({"node": 250.0}, "all", "no result after 48 s")
    assert judge_all_reduce(0, [waiting, bad], LINKED, PORTS, EXPECTED) == []
    (fault,) = judge_all_reduce(1, [waiting, bad], LINKED, PORTS, EXPECTED)
    assert "among the GPUs of this node failed (rank 3: NCCL error)" in fault.message
    (fault,) = judge_all_reduce(0, [waiting, waiting], LINKED, PORTS, EXPECTED)
    assert "over all nodes failed (no result after 48 s)" in fault.message


@pytest.mark.thorough
def test_a_preflight_ends_with_the_bandwidth_or_with_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "check_devices", lambda num_gpus: [])  # this machine has none
    request = Request(TINY, OVERRIDES, 2, Mounts(tmp_path, tmp_path), {})
    lines: list[str] = []
    code, launch, _ = run_preflight(Node(0, 1, "127.0.0.1", find_port(), 300), request, lines.append)
    assert (code, len(lines)) == (0, 1), lines
    assert launch is not None
    assert "1 node is fit" in lines[0]
    assert "all_reduce of 64 MiB: " in lines[0]
    assert lines[0].endswith("GB/s inside a node"), "two real ranks"
    failed = Measured({}, "node", "rank 1: NCCL error")
    monkeypatch.setattr(preflight, "measure_all_reduce", lambda node, num_gpus: failed)
    code, launch, unfit = run_preflight(Node(0, 1, "127.0.0.1", find_port()), request, lines.append)
    assert (code, launch, unfit) == (1, None, [])
    assert "fault: an all_reduce among the GPUs of this node failed (rank 1: NCCL error)" in lines[-1]
    request = replace(request, environment={"PREFLIGHT_MIN_BANDWIDTH": "0"})
    assert run_preflight(Node(0, 1, "127.0.0.1", find_port()), request, lines.append)[0] == 0, "it is left out"


@pytest.mark.parametrize(("is_late", "excluded"), [(False, [1]), (True, [])])
def test_a_node_that_was_only_late_is_not_excluded(
    is_late: bool, excluded: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = Measured({}, "node", "rank 3: no result after 48 s", is_late)

    class Exchanged:
        """A rendezvous of two nodes, of which the second one's all_reduce fails."""

        node = Node(0, 2, "127.0.0.1", 0)

        def gather(self, name: str, value: object) -> list[object]:
            return [value, asdict(failed) if name == "all_reduce" else ["fault"]]

    monkeypatch.setattr(preflight, "measure_all_reduce", lambda node, num_gpus: Measured({"node": 250.0}))
    request = Request(TINY, OVERRIDES, 8, Mounts(tmp_path, tmp_path), {})
    described = [{"host": f"host-{rank}", "ports": {}} for rank in range(2)]
    exchanged = cast(Rendezvous, Exchanged())
    code, unfit, _ = preflight._check_all_reduce(exchanged, request, described, print)
    assert (code, unfit) == (76, excluded)


@pytest.mark.parametrize(("wait_s", "limit_s"), [(60, 48), (900, 300), (200, 160)])
def test_the_time_of_an_all_reduce_follows_that_of_the_preflight(
    wait_s: float, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def record(command: list[str], limit_s: float) -> None:
        limits.append(limit_s)
        raise OSError("not started")

    monkeypatch.setattr(all_reduce, "run_command", record)
    with pytest.raises(OSError, match="not started"):
        measure_all_reduce(Node(0, 1, "127.0.0.1", 0, wait_s), 1)
    assert limits == [limit_s]


def test_a_rank_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    measured = all_reduce.measure_all_reduce(Node(0, 1, "127.0.0.1", find_port(), 60), 2)
    assert measured.failed == "node"
    assert measured.error == "rank 0: ImportError: libcudart.so.12: cannot open shared object file"
