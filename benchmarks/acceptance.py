"""The acceptance run's figures beside independent ones, taken by turns in one run.

    python -m benchmarks.acceptance --ranks 4 --out benchmarks/results/all_reduce.json
    python -m benchmarks.acceptance --compute --size 8192 --copy-mib 4096 --out benchmarks/results/compute.json

``--compute`` measures one device: products, copies and checksums beside ``torch.utils.benchmark``.

Without it, all_reduce is measured ``--rounds`` times at each size by each side, which goes first by turns. Ours is
``measure_collective`` of ``fctune/acceptance``, which times every repetition and checks the data; the other a loop of
``dist.all_reduce`` with one clock around it and a barrier before. On CUDA devices it runs over NCCL, else over gloo.
Compared is the mean time of a repetition by round: ``difference`` is the median over rounds of the loop's over ours,
less 1. ``loop_spread`` is how far the loop's own quartiles lie apart, as a share of its median: on a machine that is
shared it shows how much of a difference is the machine's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.utils.benchmark import Timer

from fctune.acceptance.collectives import measure_collective
from fctune.acceptance.compute import checksum_products, measure_copies, measure_products
from fctune.acceptance.config import CollectivesConfig, ComputeConfig, LimitsConfig
from fctune.acceptance.faults import Faults
from fctune.acceptance.session import Session
from fctune.acceptance.statistics import bandwidth
from fctune.training.distributed import read_launch


def plain_loop(num_bytes: int, repetitions: int, device: torch.device) -> float:
    """Seconds of an all_reduce, by one clock around a loop; the mean over ranks."""
    tensor = torch.ones(num_bytes // 4, device=device)
    for _ in range(5):
        dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repetitions):
        dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize()
    mean = torch.tensor((time.perf_counter() - started) / repetitions, dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def measure(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """One rank's part; rank 0 writes."""
    size = arguments.ranks
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    session = Session(read_launch(), LimitsConfig(), arguments.out.parent, lambda ending: print(ending))
    session.arrive()
    world = session.join("all", range(size), device)
    faults = Faults([], rank)
    rows: list[dict[str, Any]] = []
    for mib in arguments.mib:
        num_bytes = int(mib * 2**20)
        config = CollectivesConfig(repetitions=arguments.repetitions, warmup=5, max_s=60.0)
        ours: list[float] = []
        loops: list[float] = []
        wrong = 0
        for number in range(arguments.rounds):
            for is_ours in (number % 2 == 0, number % 2 == 1):
                if not is_ours:
                    loops.append(plain_loop(num_bytes, arguments.repetitions, device))
                    continue
                found = measure_collective(session, config, "all_reduce", num_bytes, world, faults)
                session.put(f"{mib} {number}", found)
                session.meet(f"{mib} {number}")
                samples = [json.loads(text) for text in session.read(f"{mib} {number}").values()]
                ours.append(statistics.fmean(s for sample in samples for s in sample["seconds"]))
                wrong += sum(sample["wrong"] for sample in samples)
        mine, loop = statistics.median(ours), statistics.median(loops)
        low, _, high = statistics.quantiles(loops)
        rows.append(
            {
                "mib": mib,
                "busbw_gb_s": round(bandwidth("all_reduce", num_bytes, size, mine)[1], 4),
                "loop_busbw_gb_s": round(bandwidth("all_reduce", num_bytes, size, loop)[1], 4),
                "difference": round(statistics.median(b / a for a, b in zip(ours, loops, strict=True)) - 1, 4),
                "loop_spread": round((high - low) / loop, 4),
                "wrong_elements": wrong,
            }
        )
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    session.leave_group()
    session.close()
    if rank == 0:
        command = f"--ranks {size} --rounds {arguments.rounds} --repetitions {arguments.repetitions}"
        result = {"command": f"python -m benchmarks.acceptance {command}", **describe(device)}
        result |= {"backend": "nccl" if device.type == "cuda" else "gloo", "rows": rows}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure_compute(arguments: argparse.Namespace) -> dict[str, Any]:
    """Products and copies of one device beside ``torch.utils.benchmark``, and checksums beside plain products."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = "bf16" if device.type == "cuda" else "fp32"
    config = ComputeConfig(dtypes=[dtype], size=arguments.size, sustain_s=2.0, copy_mib=arguments.copy_mib)
    config.checksum_size = min(arguments.size, config.checksum_size)
    session = Session(read_launch(), LimitsConfig(), arguments.out.parent, lambda ending: print(ending))
    session.arrive()
    faults, size = Faults([], 0), arguments.size
    format = torch.bfloat16 if dtype == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=format) for _ in range(2))
    source = torch.randn(config.copy_mib * 2**18, device=device)
    target = torch.empty_like(source)
    threads = torch.get_num_threads()
    product = Timer("a @ b", globals={"a": a, "b": b}, num_threads=threads)
    copy = Timer("target.copy_(source)", globals={"target": target, "source": source}, num_threads=threads)
    ours: dict[str, list[float]] = {"tflops": [], "memory_gb_s": []}
    theirs: dict[str, list[float]] = {"tflops": [], "memory_gb_s": []}
    for _ in range(arguments.rounds):
        ours["tflops"].append(measure_products(session, config, dtype, device, faults)["tflops"])
        theirs["tflops"].append(2 * size**3 / product.blocked_autorange(min_run_time=2.0).median / 1e12)
        ours["memory_gb_s"].append(measure_copies(session, config, device, faults)["memory"]["gb_s"])
        seconds = copy.blocked_autorange(min_run_time=0.5).median
        theirs["memory_gb_s"].append(2 * source.numel() * 4 / seconds / 1e9)
    checksums = [checksum_products(config, [dtype], device, faults)[dtype] for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(config.checksum_size, config.checksum_size, generator=generator) for _ in range(2)]
    result = torch.mm(*(matrix.to(device).to(format) for matrix in plain)).contiguous()
    expected = xxhash.xxh3_64_hexdigest(result.view(torch.uint8).cpu().numpy().tobytes())
    session.close()
    figures = {
        name: {
            "ours": round(statistics.median(values), 4),
            "torch.utils.benchmark": round(statistics.median(theirs[name]), 4),
            "difference": round(statistics.median(x / y for x, y in zip(values, theirs[name], strict=True)) - 1, 4),
        }
        for name, values in ours.items()
    }
    return {"dtype": dtype, "size": size, "checksums_equal": {*checksums} == {expected}, "figures": figures}


def describe(device: torch.device) -> dict[str, Any]:
    """What the numbers are of."""
    is_cuda = device.type == "cuda"
    return {
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "device": torch.cuda.get_device_name(device) if is_cuda else f"cpu, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def main() -> None:
    """Start the ranks on this machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 1.0, 4.0, 16.0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--compute", action="store_true", help="one device, beside torch.utils.benchmark")
    parser.add_argument("--size", type=int, default=8192, help="of the matrices")
    parser.add_argument("--copy-mib", type=int, default=4096)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.compute:
        command = f"--compute --size {arguments.size} --copy-mib {arguments.copy_mib} --rounds {arguments.rounds}"
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        result = {"command": f"python -m benchmarks.acceptance {command}", **describe(device)}
        result |= measure_compute(arguments)
        print(json.dumps(result, indent=1))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return
    context = torch.multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=measure, args=(rank, arguments, arguments.port)) for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
