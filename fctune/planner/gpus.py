"""What GPUs can do, by their makers' datasheets, and the networks they commonly come with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fctune.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    ``memory_bytes`` is what torch reports as its capacity, somewhat less than is printed on it. Rates are dense:
    datasheets of NVIDIA print twice as much, for sparse matrices. ``link_gb_s`` is one way within a node, ``nic_gb_s``
    the network's share of one GPU between nodes, in the machines this GPU is rented in.
    """

    name: str
    memory_bytes: int
    bf16_tflops: float
    fp8_tflops: float | None
    memory_gb_s: float
    link_gb_s: float
    nic_gb_s: float
    source: str


def _gpu(
    name: str,
    memory_gib: float,
    bf16_tflops: float,
    fp8_tflops: float | None,
    bandwidths: tuple[float, float, float],
    source: str,
) -> Gpu:
    return Gpu(name, int(memory_gib * GIB), bf16_tflops, fp8_tflops, *bandwidths, source)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 178.4, 2250, 4500, (8000, 900, 50), "NVIDIA HGX B200 datasheet; 8 x 400 Gb/s a node"),
        _gpu("h200", 139.8, 989, 1979, (4800, 450, 50), "NVIDIA H200 SXM datasheet; 8 x 400 Gb/s a node"),
        _gpu("h100", 79.1, 989, 1979, (3350, 450, 50), "NVIDIA H100 SXM datasheet; 8 x 400 Gb/s a node"),
        _gpu("h100-pcie", 79.1, 756, 1513, (2000, 50, 12.5), "NVIDIA H100 PCIe datasheet; PCIe 5.0 x16, 100 Gb/s"),
        _gpu("a100", 79.1, 312, None, (2039, 300, 25), "NVIDIA A100 80 GB SXM datasheet; 8 x 200 Gb/s a node"),
        _gpu("a100-40gb", 39.4, 312, None, (1555, 300, 12.5), "NVIDIA A100 40 GB SXM datasheet; 8 x 100 Gb/s a node"),
        _gpu("l40s", 44.3, 362, 733, (864, 25, 12.5), "NVIDIA L40S datasheet; PCIe 4.0 x16, 100 Gb/s"),
        _gpu("l4", 22.0, 121, 242, (300, 25, 6), "NVIDIA L4 datasheet; PCIe 4.0 x16, 50 Gb/s"),
        _gpu("a10g", 22.0, 70, None, (600, 25, 6), "AWS G5 instances; PCIe 4.0 x16, 50 Gb/s"),
        _gpu("a6000", 47.4, 154.8, None, (768, 25, 12.5), "NVIDIA RTX A6000 datasheet; PCIe 4.0 x16, 100 Gb/s"),
        _gpu("rtx4090", 23.6, 165.2, 330, (1008, 25, 1.25), "NVIDIA Ada whitepaper; PCIe 4.0 x16, 10 Gb/s"),
    )
}


def find_gpu(name: str, memory_gib: float | None = None, tflops: float | None = None) -> Gpu:
    """The GPU of that name, or one described by hand; figures by hand replace those of the table.

    Raises:
        ConfigError: a name that is not known, without both figures.
    """
    for option, value in (("--gpu-memory-gib", memory_gib), ("--tflops", tflops)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} {value}: expected a finite number over 0.")
    gpu = GPUS.get(name.lower())
    if gpu is None:
        if memory_gib is None or tflops is None:
            raise ConfigError(
                f"--gpu {name}: not known; known: {', '.join(GPUS)}. "
                "For another, give --gpu-memory-gib and --tflops (dense, bf16)."
            )
        by_hand = "given by hand; bandwidths as of PCIe 4.0 x16 and 100 Gb/s, 2 TB/s of memory"
        return Gpu(name, int(memory_gib * GIB), tflops, None, 2000, 25, 12.5, by_hand)
    if memory_gib is not None:
        gpu = replace(gpu, memory_bytes=int(memory_gib * GIB), source=f"{gpu.source}; memory by hand")
    if tflops is not None:
        gpu = replace(gpu, bf16_tflops=tflops, fp8_tflops=None, source=f"{gpu.source}; rate by hand")
    return gpu


def under_power_cap(gpu: Gpu, watts: float, rated_watts: float) -> Gpu:
    """A GPU held under its rated power: dynamic power goes with the cube of the clock (P = C V^2 f, V with f).

    Source: Chandrakasan, Sheng, Brodersen, Low-power CMOS digital design, IEEE JSSC 27(4), 1992.
    """
    share = (watts / rated_watts) ** (1 / 3)
    fp8 = None if gpu.fp8_tflops is None else gpu.fp8_tflops * share
    return replace(gpu, bf16_tflops=gpu.bf16_tflops * share, fp8_tflops=fp8, source=f"{gpu.source}; at {watts:g} W")
