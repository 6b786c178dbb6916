"""Measure whether these GPUs, links and disks are fit to train on, and name the one that is not.

    tune run --nproc_per_node 4 recipes/cluster_acceptance --config configs/acceptance_cpu.yaml [key=value ...]

On two nodes of 8 GPUs, on each of them: ``--nnodes 2 --nproc_per_node 8 --config configs/acceptance_2x8_h100.yaml``.
``profile=quick`` takes a profile of the file. The verdict is in ``<output_dir>/acceptance.json``; what is measured, in
which order, is in ``fctune/acceptance/run.py``.
"""

import sys

from fctune.acceptance.entry import run_acceptance


def main() -> int:
    """Run the recipe from the command line."""
    return run_acceptance(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
