"""GPU table: memory and rates from the datasheets, and the links of the machines they are commonly rented in."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from fctune.base.errors import ConfigError

GIB = 1024**3
# Unexpected interruptions of Llama 3's training: 419 in 54 days on 16,384 H100s (https://arxiv.org/abs/2407.21783).
FAILURES_PER_GPU_DAY = 419 / 54 / 16_384


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    ``memory_bytes`` is the capacity that torch reports, somewhat below the nominal one. Rates are for dense matrices
    (NVIDIA's datasheets print the doubled rates for sparse ones), with sums in float32; ``fp32_tflops`` is without
    TF32, torch's default. ``bf16_tflops`` is float16's rate if ``has_bf16`` is False: such a GPU trains in float32.
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
    has_bf16: bool = True

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
    has_bf16: bool = True,
) -> Gpu:
    memory_bytes = int(memory_gib * GIB)
    return Gpu(name, memory_bytes, bf16_tflops, fp8_tflops, fp32_tflops, *bandwidths, source, machine, has_bf16)


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_HOPPER = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_PRO = "https://www.nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000/"
_ADA_PRO = "https://www.nvidia.com/en-us/design-visualization/rtx-6000/"
_V100, _T4 = f"{_NVIDIA}v100/", f"{_NVIDIA}tesla-t4/"
_A10 = f"{_NVIDIA}products/a10-gpu/"
_HGX, _H200, _GRACE = f"{_NVIDIA}hgx/", f"{_NVIDIA}h200/", f"{_NVIDIA}grace-hopper-superchip/"
_A100, _L40S = f"{_NVIDIA}a100/", f"{_NVIDIA}l40s/"
_A10G = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
_AWS = "https://aws.amazon.com/ec2/instance-types/"
_NVLINK = "NVLink, 8 x 400 Gb/s per node"
_PCIE4 = "PCIe 4.0 x16"
_HOME = f"{_PCIE4}, 10 Gb/s per node (assumed)"
_HOME5 = "PCIe 5.0 x16, 10 Gb/s per node (assumed)"
_SERVER = f"{_PCIE4}, 100 Gb/s per node (assumed)"
_SERVER5 = "PCIe 5.0 x16, 100 Gb/s a GPU (assumed)"

# Memory as torch.cuda.get_device_properties reports it; a machine's network adapters are shared by its 8 GPUs.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b300", 267.5, 2250, 4500, 75, (8000, 900, 100), _HGX, "DGX B300: NVLink, 8 x 800 Gb/s per node"),
        _gpu("b200", 178.4, 2250, 4500, 75, (8000, 900, 50), _HGX, f"DGX B200: {_NVLINK}"),
        _gpu("gh200", 94.5, 989, 1979, 67, (4000, 450, 50), _GRACE, "400 Gb/s a GPU (assumed)"),
        _gpu("h200", 139.8, 989, 1979, 67, (4800, 450, 50), _H200, f"DGX H200: {_NVLINK}"),
        _gpu("h200-nvl", 139.8, 835, 1671, 60, (4800, 450, 12.5), _H200, "NVLink bridge, 100 Gb/s a GPU (assumed)"),
        _gpu("h100", 79.1, 989, 1979, 67, (3350, 450, 50), f"{_NVIDIA}h100/", f"DGX H100: {_NVLINK}"),
        _gpu("h100-nvl", 93.1, 835, 1671, 60, (3900, 64, 12.5), f"{_NVIDIA}h100/", _SERVER5),
        _gpu("h100-pcie", 79.1, 756, 1513, 51, (2000, 64, 12.5), _HOPPER, _SERVER5),
        _gpu("a100", 79.1, 312, None, 19.5, (2039, 300, 25), _A100, "DGX A100: NVLink, 8 x 200 Gb/s per node"),
        _gpu("a100-40gb", 39.4, 312, None, 19.5, (1555, 300, 6.25), _A100, f"{_AWS}p4/: NVLink, 400 Gb/s per node"),
        _gpu("a100-pcie", 79.1, 312, None, 19.5, (1935, 32, 1.56), _A100, _SERVER),
        _gpu("a100-pcie-40gb", 39.4, 312, None, 19.5, (1555, 32, 1.56), _A100, _SERVER),
        _gpu("l40s", 44.3, 362, 733, 91.6, (864, 32, 6.25), _L40S, f"{_AWS}g6e/: {_PCIE4}, 400 Gb/s per node"),
        _gpu("l40", 44.3, 181, 362, 90.5, (864, 32, 1.56), f"{_NVIDIA}l40/", _SERVER),
        _gpu("l4", 22.0, 121, 242, 30.3, (300, 32, 1.56), f"{_NVIDIA}l4/", f"{_AWS}g6/: {_PCIE4}, 100 Gb/s per node"),
        _gpu("a40", 44.3, 149.7, None, 37.4, (696, 32, 1.56), f"{_NVIDIA}a40/", _SERVER),
        _gpu("a30", 23.5, 165, None, 10.3, (933, 32, 1.56), f"{_NVIDIA}products/a30-gpu/", _SERVER),
        _gpu("a10", 22.0, 125, None, 31.2, (600, 32, 1.56), _A10, _SERVER),
        _gpu("a10g", 22.0, 70, None, 35, (600, 32, 1.56), _A10G, f"{_AWS}g5/: {_PCIE4}, 100 Gb/s per node"),
        _gpu("rtx-pro-6000", 94.9, 503.8, 1007.6, 126, (1792, 64, 12.5), _PRO, _SERVER5),
        _gpu("rtx6000-ada", 47.4, 364.2, 728.5, 91.1, (960, 32, 1.56), _ADA_PRO, _SERVER),
        _gpu("a6000", 47.4, 154.8, None, 38.7, (768, 32, 1.56), _GA102, _SERVER),
        _gpu("rtx5090", 31.3, 209.5, 419, 104.8, (1792, 64, 0.16), _BLACKWELL, _HOME5),
        _gpu("rtx5080", 15.4, 112.6, 225.1, 56.3, (960, 64, 0.16), _BLACKWELL, _HOME5),
        _gpu("rtx4090", 23.6, 165.2, 330.3, 82.6, (1008, 32, 0.16), _ADA, _HOME),
        _gpu("rtx4080", 15.6, 97.5, 194.9, 48.7, (717, 32, 0.16), _ADA, _HOME),
        _gpu("rtx3090", 23.6, 71, None, 35.6, (936, 32, 0.16), _GA102, _HOME),
        _gpu("v100", 15.7, 125, None, 15.7, (900, 150, 0.39), _V100, f"{_AWS}p3/: NVLink, 25 Gb/s per node", False),
        _gpu("v100-32gb", 31.7, 125, None, 15.7, (900, 150, 1.56), _V100, f"{_AWS}p3/: NVLink, 100 Gb/s a node", False),
        _gpu("t4", 14.6, 65, None, 8.1, (320, 16, 1.56), _T4, f"{_AWS}g4/: PCIe 3.0 x16, 100 Gb/s per node", False),
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


# Parts of a GPU's name that do not tell it from another of the table.
_FILLER = re.compile(
    r"nvidia|geforce|tesla|quadro|rtx|sxm\d?|hbm\d?e?|blackwell|generation|workstation edition|\bgpu\b"
)
_MEMORY = re.compile(r"(?<![a-z0-9])(\d+)\s*gi?b?\b")
_NOMINAL = (0.85, 1.02)  # memory that torch reports, in GiB, as a share of the nominal one


def _simplify(name: str) -> tuple[str, int | None]:
    """Return the letters and digits of a GPU's name without filler, and the nominal memory in it, if any."""
    name = name.lower()
    memory = _MEMORY.search(name)
    text = _FILLER.sub("", _MEMORY.sub("", name))
    return re.sub(r"[^a-z0-9]", "", text), int(memory[1]) if memory else None


def match_gpu(name: str) -> Gpu | None:
    """Return the GPU of the table that a name means, in any spelling; None if there is none.

    Case, separators, the maker and the form do not matter, and the memory may be named: ``NVIDIA H200``, ``rtx 4090``,
    ``A100-SXM4-80GB``.
    """
    text, memory = _simplify(name)
    if (gpu := GPUS.get(name.lower())) is not None or not text:
        return gpu
    alike = [gpu for key, gpu in GPUS.items() if _simplify(key)[0] == text]
    if memory is not None:
        alike = [gpu for gpu in alike if _NOMINAL[0] <= gpu.memory_bytes / GIB / memory <= _NOMINAL[1]]
    return alike[0] if alike else None


def _suggest_gpu(name: str) -> str:
    """Return the names nearest to an unknown one, as the end of a clause, or an empty string."""
    text, _ = _simplify(name)
    texts = {_simplify(key)[0] for key in GPUS}
    near = difflib.get_close_matches(text, texts, n=1, cutoff=0.6) if text else []
    names = [key for key in GPUS if near and _simplify(key)[0] == near[0]]
    return f"; did you mean {' or '.join(names)}?" if names else ";"


def find_gpu(name: str, options: dict[str, float | None] | None = None) -> Gpu:
    """Return the GPU of a name, with figures overridden by options, or a GPU described by options alone.

    Args:
        name: Key of ``GPUS``, in any spelling; any other name needs at least --gpu-memory-gib and --tflops.
        options: Option of ``fctune plan`` -> its value, None if it was not given.

    Raises:
        ConfigError: The name is unknown and the options do not describe the GPU, or a value is out of range.
    """
    given = {option: value for option, value in (options or {}).items() if value is not None}
    for option, value in given.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} {value:g}: expected a finite number greater than 0.")
    gpu = match_gpu(name)
    if gpu is None:
        if not {"--gpu-memory-gib", "--tflops"} <= given.keys():
            raise ConfigError(
                f"--gpu {name}: unknown GPU{_suggest_gpu(name)} known: {', '.join(GPUS)}. For another one, pass "
                "--gpu-memory-gib and --tflops (dense, bf16), and --memory-gb-s, --link-gb-s and --nic-gb-s if "
                "you know them."
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
