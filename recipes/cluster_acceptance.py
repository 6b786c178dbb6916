"""Measure whether these GPUs, links and disks are fit for training, and name the ones that are not.

    tune run --nproc_per_node 4 recipes/cluster_acceptance --config configs/acceptance_cpu.yaml [key=value ...]

On two nodes with 8 GPUs, run this on each: ``--nnodes 2 --nproc_per_node 8 --config configs/acceptance_2x8_h100.yaml``.
``profile=quick`` selects a profile of the file. The result is ``<output_dir>/acceptance.json``;
``fctune/apps/acceptance/run.py`` runs the phases.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rich.console import Console

from fctune.apps.acceptance.config import load_acceptance
from fctune.apps.acceptance.run import Acceptance
from fctune.apps.acceptance.table import ProgressPrinter
from fctune.base.distributed import read_launcher_environment
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.training.entry import read_command_line

_USAGE = "tune run recipes/cluster_acceptance --config FILE [profile=NAME] [key=value ...]"


def run_acceptance(argv: Sequence[str]) -> int:
    """Run an acceptance run; return 0 for PASS, 1 for any other verdict and 2 for an invalid config.

    A run that ends early writes its result and exits this process with 1.
    """
    try:
        launch = read_launcher_environment()
    except ConfigError as error:
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        return 2
    logging.getLogger("fctune").setLevel(logging.WARNING)
    try:
        config = load_acceptance(*read_command_line(argv, _USAGE))
        acceptance = Acceptance(config, launch, ProgressPrinter(Console(), config.output_dir))
        result = acceptance.run()
    except (ConfigError, DataError, CheckpointError) as error:
        if launch.rank == 0:
            print(f"\n{error}\n", file=sys.stderr, flush=True)
        return 2
    except ConnectionError as error:
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        return 1
    if acceptance.write_error:
        print(f"\n{acceptance.write_error}\n", file=sys.stderr, flush=True)
        return 1
    return 0 if result["verdict"] == "PASS" else 1


def main() -> int:
    """Run the recipe from the command line."""
    return run_acceptance(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
