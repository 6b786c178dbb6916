"""Time from the first paid minute of a run to its first step: image, downloads, preparation, loading, compilation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # options are checked before torch is imported
    from fctune.apps.plan.data_size import DataSize
    from fctune.apps.plan.memory_timeline import Setting
    from fctune.config.schema import RunConfig

# Gigabytes of the image, or of the packages, that a new node downloads; torch's CUDA wheels are most of it. An
# assumption, as no image was built yet.
IMAGE_GB = 8.0

# Gigabytes per second from the hub and the registry to a node. An assumption; ``--download-gb-s``.
DOWNLOAD_GB_S = 0.25

# Tokens per second that preparation reads, tokenizes, masks and packs: 633,269 on two cores
# (benchmarks/results/data_2026-11-22.json), assumed to grow up to its limit of 16 processes, which nodes of GPUs have
# cores for.
PREPARED_TOKENS_S = 633_000 // 2 * 16

# Seconds until the model is built, and for the compilation of each kind of block in the first step: medians of the rows
# measured on an H100 (benchmarks/results/gpu.json, ``setup_s`` and ``first_step_s``).
SETUP_S, COMPILE_S = 18.0, 17.0


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds before the first step, while all GPUs are paid for."""

    image_s: float
    download_s: float  # of the base, by one node to the shared disk
    prepare_s: float
    load_s: float  # of the base, from the shared disk into the GPUs
    setup_s: float
    compile_s: float
    given_s: float | None = None  # all of it, as given by the user

    @property
    def total_s(self) -> float:
        """All parts, one after the other, or what the user gave."""
        if self.given_s is not None:
            return self.given_s
        return self.image_s + self.download_s + self.prepare_s + self.load_s + self.setup_s + self.compile_s

    def to_json(self) -> dict[str, Any]:
        """Return the seconds by part, with their total."""
        return asdict(self) | {"total_s": self.total_s}


def estimate_startup(
    config: RunConfig,
    setting: Setting,
    nodes: int,
    rows: DataSize | None,
    base_bytes: int,
    num_kinds: int,
    disk_gb_s: float,
    download_gb_s: float,
    given_s: float | None = None,
) -> Startup:
    """Estimate the time before the first step on new nodes; a base or data that are there already cost nothing.

    Args:
        config: Config of the run.
        setting: Layout of the run.
        nodes: Number of nodes.
        rows: Size of the data; None if unknown, which counts as prepared.
        base_bytes: Size of the base.
        num_kinds: Kinds of blocks, each of which is compiled.
        disk_gb_s: Rate of the shared disk.
        download_gb_s: Rate of downloads from the hub and the registry.
        given_s: The user's figure for all of it.
    """
    is_on_hub = config.model.path.startswith("hf:")
    to_prepare = 0 if rows is None or rows.is_prepared else rows.tokens
    # Each node reads every weight that its GPUs hold.
    copies = max(1, min(nodes, setting.replicate))
    return Startup(
        image_s=IMAGE_GB / download_gb_s,
        download_s=base_bytes / (download_gb_s * 1e9) if is_on_hub else 0.0,
        prepare_s=to_prepare / PREPARED_TOKENS_S,
        load_s=copies * base_bytes / (disk_gb_s * 1e9),
        setup_s=SETUP_S,
        compile_s=COMPILE_S * num_kinds if config.compile else 0.0,
        given_s=given_s,
    )
