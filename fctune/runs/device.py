"""Device facts: name, memory, datasheet rate, and NVML readings, once or sampled in the background."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fctune.base.gpus import GPUS

# Pattern of the name reported by the driver -> key of ``fctune.base.gpus.GPUS``; the first match wins.
_KINDS = (
    (r"\bB300\b", "b300"),
    (r"\bB200\b", "b200"),
    (r"\bGH200\b", "gh200"),
    (r"\bH200\b.*NVL", "h200-nvl"),
    (r"\bH200\b", "h200"),
    (r"\bH100\b.*PCIe", "h100-pcie"),
    (r"\bH100\b.*NVL", "h100-nvl"),
    (r"\bH100\b", "h100"),
    (r"\bA100\b", "a100"),  # the same rate for every memory size and board
    (r"\bL40S\b", "l40s"),
    (r"\bL40\b", "l40"),
    (r"\bL4\b", "l4"),
    (r"\bA40\b", "a40"),
    (r"\bA30\b", "a30"),
    (r"\bA10G\b", "a10g"),
    (r"\bA10\b", "a10"),
    (r"\bRTX PRO 6000 Blackwell Workstation\b", "rtx-pro-6000"),  # the others have lower rates
    (r"\bRTX 6000 Ada\b", "rtx6000-ada"),
    (r"\bRTX A6000\b", "a6000"),
    (r"\bRTX 5090\b(?! (?:D|Laptop)\b)", "rtx5090"),
    (r"\bRTX 5080\b(?! Laptop\b)", "rtx5080"),
    (r"\bRTX 4090\b(?! (?:D|Laptop)\b)", "rtx4090"),
    (r"\bRTX 4080\b(?! (?:SUPER|Laptop)\b)", "rtx4080"),
    (r"\bRTX 3090\b(?! Ti\b)", "rtx3090"),
)
_MAX_LINKS = 36  # more than the NVLinks of any GPU so far
_EVERY_S = 1.0  # NVML samples every 1/6 s to 1 s

_SLICE = re.compile(r"\bMIG\b")  # a slice of a GPU has only a part of its rate


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """NVML reading of one GPU; None where the GPU or driver does not report a value."""

    name: str
    utilization: float | None  # share of the last sample period in which a kernel ran
    memory_used_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    throttle_reasons: int | None  # NVML bit mask, 0 for none
    ecc_errors: int | None  # uncorrected errors since the driver was loaded


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Lasting defects of one GPU, from NVML; None where the GPU or driver does not report a value."""

    is_remap_pending: bool | None  # rows of memory that a reset of the GPU replaces by spare ones
    has_remap_failed: bool | None  # no spare row was left
    num_links: int  # NVLinks whose state NVML reports; 0 without NVLink
    num_active_links: int
    has_switch: bool  # its NVLinks go to NVSwitches


def read_device(index: int) -> DeviceReading | None:
    """Read a GPU by its CUDA index; None without NVML (no GPU, no driver, or no ``nvidia-ml-py``)."""
    nvml, handle = _open_device(index)
    if handle is None:
        return None
    memory = _query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    return DeviceReading(
        name=str(_query(lambda: nvml.nvmlDeviceGetName(handle))),
        utilization=None if rates is None else rates.gpu / 100,
        memory_used_bytes=None if memory is None else int(memory.used),
        power_w=_scaled(_query(lambda: nvml.nvmlDeviceGetPowerUsage(handle)), 1000),
        temperature_c=_scaled(_query(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)), 1),
        sm_clock_mhz=_scaled(_query(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), 1),
        throttle_reasons=_query(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))),
        ecc_errors=_query(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        ),
    )


def read_health(index: int) -> DeviceHealth | None:
    """Read the lasting defects of a GPU by its CUDA index; None without NVML."""
    nvml, handle = _open_device(index)
    if handle is None:
        return None
    # Corrected errors, uncorrected errors, pending, failed; supported from A100 on.
    remapped = _query(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    links = [_query(lambda link=link: nvml.nvmlDeviceGetNvLinkState(handle, link)) for link in range(_MAX_LINKS)]
    states = [state for state in links if state is not None]  # NVML refuses the numbers of links that it lacks
    return DeviceHealth(
        is_remap_pending=None if remapped is None else bool(remapped[2]),
        has_remap_failed=None if remapped is None else bool(remapped[3]),
        num_links=len(states),
        num_active_links=sum(map(bool, states)),
        has_switch=any(_query(lambda link=link: _is_switched(nvml, handle, link)) for link in range(len(states))),
    )


def are_linked(num_gpus: int) -> bool:
    """Return True if NVLink connects each pair of this node's first GPUs; False without NVML."""
    opened = [_open_device(index) for index in range(num_gpus)]

    def is_linked(nvml: Any, first: Any, second: Any) -> bool:
        index = nvml.NVML_P2P_CAPS_INDEX_NVLINK
        return bool(nvml.nvmlDeviceGetP2PStatus(first, second, index) == nvml.NVML_P2P_STATUS_OK)

    return all(
        None not in (first, second) and _query(lambda n=nvml, a=first, b=second: is_linked(n, a, b))
        for (nvml, first), (_, second) in itertools.combinations(opened, 2)
    )


def describe_device(device: torch.device) -> str:
    """Describe a device in a few words, for logs and messages."""
    if device.type != "cuda":
        return f"{device.type}, {os.cpu_count()} cores"
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)}, compute capability {capability}"


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's dense bf16 rate from its datasheet; None on CPU and for unknown GPUs."""
    return lookup_peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def lookup_peak_tflops(name: str) -> float | None:
    """Return the dense bf16 rate of a GPU by the name its driver reports; None if it is unknown or a MIG slice."""
    kind = find_gpu_kind(name)
    return None if kind is None else GPUS[kind].bf16_tflops


def find_gpu_kind(name: str) -> str | None:
    """Return the key of ``GPUS`` of a GPU by the name its driver reports; None if it is unknown or a MIG slice."""
    return next((kind for pattern, kind in _KINDS if re.search(pattern, name) and not _SLICE.search(name)), None)


def total_memory(device: torch.device, ranks_per_node: int) -> int:
    """Return the memory of one rank in bytes: its GPU's, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the CUDA compute capability; None on CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _open_device(index: int) -> tuple[Any, Any]:
    """Return the NVML binding and the handle of a GPU by its CUDA index; the handle is None if it cannot be read."""
    nvml = _load_nvml()
    if nvml is None:
        return None, None
    return nvml, _query(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}"))


def _is_switched(nvml: Any, handle: Any, link: int) -> bool:
    return bool(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)


def _load_nvml() -> Any:
    """Import and initialize the NVML binding; None if that fails."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _query(call: Any) -> Any:
    """Return the result of an NVML call; None if this GPU or driver does not support it."""
    try:
        return call()
    except Exception:  # NVMLError, or a function missing from this binding: a failed reading is never fatal
        return None


def _scaled(value: Any, divisor: float) -> float | None:
    return None if value is None else value / divisor


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """Readings of one GPU summarized over a period; None where the driver does not report a value."""

    utilization: float | None  # mean share of time in which a kernel was running
    temperature_c: float | None  # highest
    power_w: float | None  # mean


class DeviceSampler:
    """Reads a device periodically on a background thread, until it is closed or a reading is None."""

    def __init__(self, read: Callable[[], DeviceReading | None], every_s: float = _EVERY_S):
        self._read, self._every_s = read, every_s
        self._readings: list[DeviceReading] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-probe", daemon=True)
        self._thread.start()

    def take(self) -> DeviceUsage | None:
        """Summarize and clear the readings since the last call; None if there were none."""
        with self._lock:
            readings, self._readings = self._readings, []
        if not readings:
            return None
        busy = [r.utilization for r in readings if r.utilization is not None]
        heat = [r.temperature_c for r in readings if r.temperature_c is not None]
        power = [r.power_w for r in readings if r.power_w is not None]
        return DeviceUsage(
            statistics.fmean(busy) if busy else None,
            max(heat, default=None),
            statistics.fmean(power) if power else None,
        )

    def close(self) -> None:
        """Stop reading and wait for the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while (reading := self._read()) is not None:
            with self._lock:
                self._readings.append(reading)
            if self._stop.wait(self._every_s):
                return
