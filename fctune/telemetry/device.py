"""The one reader of a device: what it is, how large, and what NVML says of it."""

from __future__ import annotations

import importlib
import os
import re
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fctune.gpus import GPUS

# Names that drivers give, and what the planner calls them; the first that is found counts.
_KINDS = (
    (r"\bB200\b", "b200"),
    (r"\bH200\b(?!.*NVL)", "h200"),
    (r"\bH100\b.*PCIe", "h100-pcie"),
    (r"\bH100\b(?!.*NVL)", "h100"),
    (r"\bA100\b", "a100"),  # of every memory and board the same rate
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bA10G\b", "a10g"),
    (r"\bRTX A6000\b", "a6000"),
    (r"\bRTX 4090\b(?! (?:D|Laptop)\b)", "rtx4090"),
)
_EVERY_S = 1.0  # NVML samples every 1/6 s to 1 s

_SLICE = re.compile(r"\bMIG\b")  # a part of a GPU, which has a part of its rate


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """What NVML says of one GPU now; None where it does not say."""

    name: str
    utilization: float | None  # share of the last sample period in which a kernel ran
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    throttle_reasons: int | None  # NVML's bit mask; 0: none
    ecc_errors: int | None  # uncorrected, since the driver was loaded


def read_device(index: int) -> DeviceReading | None:
    """The reading of a GPU by its CUDA index; None without NVML: no GPU, no driver, or no ``nvidia-ml-py``."""
    nvml = _load_nvml()
    if nvml is None:
        return None
    handle = _ask(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}"))
    if handle is None:
        return None
    memory = _ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    return DeviceReading(
        name=str(_ask(lambda: nvml.nvmlDeviceGetName(handle))),
        utilization=None if rates is None else rates.gpu / 100,
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        power_w=_scaled(_ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle)), 1000),
        power_limit_w=_scaled(_ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle)), 1000),
        temperature_c=_scaled(_ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)), 1),
        sm_clock_mhz=_scaled(_ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), 1),
        throttle_reasons=_ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))),
        ecc_errors=_ask(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        ),
    )


def describe_device(device: torch.device) -> str:
    """What the device is, for a log and for messages."""
    if device.type != "cuda":
        return f"{device.type}, {os.cpu_count()} cores"
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)}, compute capability {capability}"


def peak_tflops(device: torch.device) -> float | None:
    """Dense bf16 rate of its datasheet; None on CPU, and of a GPU that is not known."""
    return lookup_peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def lookup_peak_tflops(name: str) -> float | None:
    """The same of a GPU by the name that its driver gives it."""
    kind = next((kind for pattern, kind in _KINDS if re.search(pattern, name) and not _SLICE.search(name)), None)
    return None if kind is None else GPUS[kind].bf16_tflops


def total_memory(device: torch.device, ranks_per_node: int) -> int:
    """Bytes of memory that one rank has: of its GPU, or its part of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability; None on CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _load_nvml() -> Any:
    """The NVML binding, started; None where there is none."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _ask(question: Any) -> Any:
    """An answer of NVML, or None where this GPU or driver has none to it."""
    try:
        return question()
    except Exception:  # NVMLError, or a function that this version of the binding lacks: a reading is never fatal
        return None


def _scaled(value: Any, divisor: float) -> float | None:
    return None if value is None else value / divisor


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """One GPU over a stretch of time; None where its driver does not say."""

    utilization: float | None  # mean share of the time in which a kernel ran
    temperature_c: float | None  # highest
    power_w: float | None  # mean


class DeviceSampler:
    """Reads a device again and again until it is closed.

    Args:
        read: asks the device; where the first answer is None there is nothing to ask, and it is not asked again.
        every_s: seconds between readings.
    """

    def __init__(self, read: Callable[[], DeviceReading | None], every_s: float = _EVERY_S):
        self._read, self._every_s = read, every_s
        self._readings: list[DeviceReading] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-probe", daemon=True)
        self._thread.start()

    def take(self) -> DeviceUsage | None:
        """What was read since it was last taken; None where nothing was."""
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
        """Ask no more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while (reading := self._read()) is not None:
            with self._lock:
                self._readings.append(reading)
            if self._stop.wait(self._every_s):
                return
