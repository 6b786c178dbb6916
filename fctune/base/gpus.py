"""GPU table: memory and rates from the datasheets, and the links of the machines they are commonly rented in."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fctune.base.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    ``memory_bytes`` is the capacity that torch reports, somewhat below the nominal one. Rates are for dense matrices
    (NVIDIA's datasheets print the doubled rates for sparse ones); ``fp32_tflops`` is without TF32, torch's default.
    ``link_gb_s`` is the one-way rate between GPUs of a node, ``nic_gb_s`` one GPU's share of the network between nodes,
    in the machines that this GPU is commonly rented in.
    """

    name: str
    memory_bytes: int
    bf16_tflops: float
    fp8_tflops: float | None
    fp32_tflops: float | None
    memory_gb_s: float
    link_gb_s: float
    nic_gb_s: float
    source: str  # of the GPU's figures
    machine: str  # machine that the link rates refer to

    def tflops(self, width: int) -> float:
        """Return the rate of matrix products with elements of ``width`` bytes; bfloat16's if that is unknown."""
        return self.fp32_tflops if width == 4 and self.fp32_tflops is not None else self.bf16_tflops


def _gpu(
    name: str,
    memory_gib: float,
    bf16_tflops: float,
    fp8_tflops: float | None,
    fp32_tflops: float,
    bandwidths: tuple[float, float, float],
    source: str,
    machine: str,
) -> Gpu:
    return Gpu(name, int(memory_gib * GIB), bf16_tflops, fp8_tflops, fp32_tflops, *bandwidths, source, machine)


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_HOPPER = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_A100, _L40S = f"{_NVIDIA}a100/", f"{_NVIDIA}l40s/"
_A10G = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
_AWS = "https://aws.amazon.com/ec2/instance-types/"
_NVLINK = "NVLink, 8 x 400 Gb/s per node"
_PCIE4 = "PCIe 4.0 x16"

# Memory as torch.cuda.get_device_properties reports it; a machine's network adapters are shared by its 8 GPUs.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 178.4, 2250, 4500, 75, (8000, 900, 50), f"{_NVIDIA}hgx/", f"DGX B200: {_NVLINK}"),
        _gpu("h200", 139.8, 989, 1979, 67, (4800, 450, 50), f"{_NVIDIA}h200/", f"DGX H200: {_NVLINK}"),
        _gpu("h100", 79.1, 989, 1979, 67, (3350, 450, 50), f"{_NVIDIA}h100/", f"DGX H100: {_NVLINK}"),
        _gpu("h100-pcie", 79.1, 756, 1513, 51, (2000, 64, 12.5), _HOPPER, "PCIe 5.0 x16, 100 Gb/s a GPU (assumed)"),
        _gpu("a100", 79.1, 312, None, 19.5, (2039, 300, 25), _A100, "DGX A100: NVLink, 8 x 200 Gb/s per node"),
        _gpu("a100-40gb", 39.4, 312, None, 19.5, (1555, 300, 6.25), _A100, f"{_AWS}p4/: NVLink, 400 Gb/s per node"),
        _gpu("l40s", 44.3, 362, 733, 91.6, (864, 32, 6.25), _L40S, f"{_AWS}g6e/: {_PCIE4}, 400 Gb/s per node"),
        _gpu("l4", 22.0, 121, 242, 30.3, (300, 32, 1.56), f"{_NVIDIA}l4/", f"{_AWS}g6/: {_PCIE4}, 100 Gb/s per node"),
        _gpu("a10g", 22.0, 70, None, 35, (600, 32, 1.56), _A10G, f"{_AWS}g5/: {_PCIE4}, 100 Gb/s per node"),
        _gpu("a6000", 47.4, 154.8, None, 38.7, (768, 32, 1.56), _GA102, f"{_PCIE4}, 100 Gb/s per node (assumed)"),
        _gpu("rtx4090", 23.6, 165.2, 330.3, 82.6, (1008, 32, 0.16), _ADA, f"{_PCIE4}, 10 Gb/s per node (assumed)"),
    )
}

# Option of ``fctune plan`` -> field that it overrides.
_OPTIONS = {
    "--gpu-memory-gib": "memory_bytes",
    "--tflops": "bf16_tflops",
    "--memory-gb-s": "memory_gb_s",
    "--link-gb-s": "link_gb_s",
    "--nic-gb-s": "nic_gb_s",
}

# Assumptions for a GPU that is described by options, by the option that would replace them.
_ASSUMED = {"--memory-gb-s": "memory of 2 TB/s", "--link-gb-s": f"{_PCIE4} in a node", "--nic-gb-s": "100 Gb/s a GPU"}


def find_gpu(name: str, options: dict[str, float | None] | None = None) -> Gpu:
    """Return the GPU of a name, with figures overridden by options, or a GPU described by options alone.

    Args:
        name: Key of ``GPUS``, in any case; any other name needs at least --gpu-memory-gib and --tflops.
        options: Option of ``fctune plan`` -> its value, None if it was not given.

    Raises:
        ConfigError: The name is unknown and the options do not describe the GPU, or a value is out of range.
    """
    given = {option: value for option, value in (options or {}).items() if value is not None}
    for option, value in given.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} {value:g}: expected a finite number greater than 0.")
    gpu = GPUS.get(name.lower())
    if gpu is None:
        if not {"--gpu-memory-gib", "--tflops"} <= given.keys():
            raise ConfigError(
                f"--gpu {name}: unknown GPU; known: {', '.join(GPUS)}. For another one, pass --gpu-memory-gib and "
                "--tflops (dense, bf16), and --memory-gb-s, --link-gb-s and --nic-gb-s if you know them."
            )
        assumed = ", ".join(text for option, text in _ASSUMED.items() if option not in given)
        machine = f"assumed: {assumed}" if assumed else "from options"
        gpu = Gpu(name, 0, 0, None, None, 2000, 32, 12.5, "from options", machine)
    elif "--tflops" in given:
        gpu = replace(gpu, fp8_tflops=None)
    figures: dict[str, Any] = {_OPTIONS[option]: value for option, value in given.items()}
    if "memory_bytes" in figures:
        figures["memory_bytes"] = int(figures["memory_bytes"] * GIB)
    if figures and gpu.source != "from options":
        figures["source"] = f"{gpu.source}; from options: {', '.join(given)}"
    return replace(gpu, **figures)
