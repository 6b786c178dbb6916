"""From a command line to an acceptance run, and from its verdict to an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rich.console import Console

from fctune.acceptance.config import load_acceptance
from fctune.acceptance.run import Acceptance
from fctune.acceptance.table import Progress
from fctune.distributed import read_launcher_environment
from fctune.errors import CheckpointError, ConfigError, DataError
from fctune.training.entry import read_command_line

_USAGE = "tune run recipes/cluster_acceptance --config FILE [profile=NAME] [key=value ...]"


def run_acceptance(argv: Sequence[str]) -> int:
    """Measure, judge and report; 0 where the verdict is PASS, 1 for any other, 2 for a config that does not hold.

    A run that ends early ends this process with 1 from within, and its result is written all the same.
    """
    launch = read_launcher_environment()
    logging.getLogger("fctune").setLevel(logging.WARNING)
    try:
        config = load_acceptance(*read_command_line(argv, _USAGE))
        acceptance = Acceptance(config, launch, Progress(Console(), config.output_dir))
        document = acceptance.run()
    except (ConfigError, DataError, CheckpointError) as error:
        if launch.rank == 0:
            print(f"\n{error}\n", file=sys.stderr, flush=True)
        return 2
    except ConnectionError as error:
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        return 1
    if acceptance.unwritten:
        print(f"\n{acceptance.unwritten}\n", file=sys.stderr, flush=True)
        return 1
    return 0 if document["verdict"] == "PASS" else 1
