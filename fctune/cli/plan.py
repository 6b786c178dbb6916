"""``fctune plan``: estimate memory, time and cost of a run without launching it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigProblems
from fctune.base.terminal import Terminal
from fctune.cli.parser import add_config_arguments
from fctune.models.run_config import load_run_config

_GPUS = 8  # of a node, unless options say otherwise


def add_commands(commands: Any) -> None:
    """Add ``fctune plan`` to the command."""
    plan = commands.add_parser("plan", help="estimate memory, time and cost of a run; exit 1 if it does not fit")
    add_config_arguments(plan)
    plan.add_argument("--nodes", type=int, default=1, metavar="N", help="default: %(default)s")
    plan.add_argument("--gpus-per-node", type=int, default=_GPUS, metavar="N", help="default: %(default)s")
    plan.add_argument(
        "--gpu",
        default="h100",
        metavar="NAME[:N]",
        help="GPU model, and how many a node has; an unknown name lists them; default: %(default)s",
    )
    plan.add_argument(
        "--gpu-memory-gib",
        type=float,
        metavar="X",
        help="memory per GPU; overrides the table's, or describes a GPU that is not in it",
    )
    plan.add_argument("--tflops", type=float, metavar="X", help="override the table's dense bf16 rate")
    plan.add_argument("--memory-gb-s", type=float, metavar="X", help="override the table's memory bandwidth")
    plan.add_argument(
        "--link-gb-s", type=float, metavar="X", help="override the table's one-way bandwidth between GPUs of a node"
    )
    plan.add_argument(
        "--nic-gb-s", type=float, metavar="X", help="override the table's bandwidth between nodes, per GPU"
    )
    plan.add_argument("--model", metavar="DIR", help="directory with the model's config.json; weights are not needed")
    plan.add_argument("--rows", type=int, metavar="N", help="number of rows, if the data is not prepared")
    plan.add_argument("--mean-tokens", type=float, metavar="X", help="mean tokens per row, if the data is not prepared")
    plan.add_argument(
        "--price",
        type=float,
        metavar="X",
        help="price of a GPU-hour, in the config's currency; default: the config's, else the list price",
    )
    plan.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help="YAML with prices, in the config's currency, in place of those of fctune/runs/prices.yaml",
    )
    plan.add_argument(
        "--shared-gib", type=float, default=2000.0, metavar="X", help="size of the shared disk; default: %(default)s"
    )
    plan.add_argument(
        "--network-gib", type=float, default=2000.0, metavar="X", help="network disk of a node; default: %(default)s"
    )
    plan.add_argument(
        "--egress-gib",
        type=float,
        metavar="X",
        help="traffic to the internet; default: the size of the export, published once",
    )
    plan.add_argument(
        "--efficiency",
        type=float,
        metavar="X",
        help="share of the peak rate that a step reaches, if you have measured it; default: a rate for each kernel",
    )
    plan.add_argument(
        "--disk-gb-s", type=float, default=1.0, metavar="X", help="bandwidth of the shared disk; default: %(default)s"
    )
    plan.add_argument("--failures-per-gpu-day", type=float, metavar="X", help="default: Llama 3's training")
    plan.add_argument(
        "--server-gpus", type=int, metavar="N", help="GPUs of the server in reinforcement; default: those of one node"
    )
    plan.add_argument(
        "--download-gb-s",
        type=float,
        default=0.25,
        metavar="X",
        help="rate of downloads from the hub and the registry; default: %(default)s",
    )
    plan.add_argument(
        "--startup-min", type=float, metavar="X", help="minutes before the first step; default: an estimate by part"
    )
    plan.add_argument("--search", action="store_true", help="also try other numbers of nodes, and recommend one")
    plan.add_argument(
        "--deadline-hours",
        type=float,
        metavar="X",
        help="with --search: recommend the cheapest number of nodes that is done by then",
    )
    plan.add_argument("--json", action="store_true", help="print JSON: version 2, bytes and seconds")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from fctune.apps.plan.request import PlanRequest
    from fctune.base.gpus import GPUS, find_gpu
    from fctune.runs.prices import CURRENCY, Prices, read_prices

    options = {
        "--gpu-memory-gib": arguments.gpu_memory_gib,
        "--tflops": arguments.tflops,
        "--memory-gb-s": arguments.memory_gb_s,
        "--link-gb-s": arguments.link_gb_s,
        "--nic-gb-s": arguments.nic_gb_s,
    }
    problems = ConfigProblems()
    config = problems.collect(lambda: load_run_config(arguments.config, arguments.overrides))
    if arguments.model is not None and not Path(arguments.model).is_dir():  # before the slow imports
        problems.add(f"--model {arguments.model}: no such directory; pass the one with the model's config.json.")
    name, colon, count = arguments.gpu.partition(":")  # as in sky/*.yaml
    if colon and not (count.isdecimal() and arguments.gpus_per_node in (_GPUS, int(count))):
        problems.add(
            f"--gpu {arguments.gpu}: expected NAME, or NAME:N with the N of --gpus-per-node, if that is given."
        )
    elif colon:
        arguments.gpus_per_node = int(count)
    gpu = problems.collect(lambda: find_gpu(name, options))
    currency = CURRENCY if config is None else config.currency
    prices = problems.collect(lambda: read_prices(arguments.prices, currency))
    named = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(PlanRequest)}
    given = {name: value for name, value in named.items() if value is not None}
    given |= {"gpu": gpu or GPUS["h100"], "prices": prices or Prices(), "is_searching": arguments.search}
    request = problems.collect(lambda: PlanRequest(**given))
    problems.raise_all()
    assert config is not None
    assert request is not None
    from fctune.apps.plan.plan import make_plan  # imports torch, which takes seconds

    plan = make_plan(config, request)
    if arguments.json:
        print(json.dumps(_replace_infinity(plan.to_json()), indent=2))
    else:
        from fctune.apps.plan.table import print_plan

        print_plan(Terminal(), plan)
    return 0 if plan.fits else 1


def _replace_infinity(value: Any) -> Any:
    """Replace infinite numbers, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: _replace_infinity(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_infinity(item) for item in value]
    return None if value in (float("inf"), float("-inf")) else value
