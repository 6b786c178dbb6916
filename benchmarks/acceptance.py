"""Compare the acceptance run's figures with independent measurements, taken alternately in one run.

    python -m benchmarks.acceptance --ranks 4 --out benchmarks/results/all_reduce.json
    python -m benchmarks.acceptance --compute --size 8192 --copy-mib 4096 --out benchmarks/results/compute.json
    python -m benchmarks.acceptance --machine [--toy] --out benchmarks/results/machine.json

Without a mode flag, both sides measure all_reduce ``--rounds`` times at each size and alternate in going first. Ours is
``measure_collective`` of ``fctune/apps/acceptance``, which times every repetition and verifies the data; theirs is a
loop of ``dist.all_reduce`` after a barrier, timed as one piece. It runs over NCCL on CUDA devices, otherwise over gloo.
``--nccl-tests FOLDER`` names the build directory of all_reduce_perf, to measure that too.

``--compute`` measures one device: products and copies compared with ``torch.utils.benchmark``, also alternately, each
time on new tensors because their position in memory affects the speed of copies; and checksums compared with those of
plain products.

``difference`` is the median over rounds of our rate divided by theirs, minus 1. ``spread`` is the interquartile range
of their rates relative to the median, which shows how much of a difference comes from a shared machine.

``--machine`` runs everything that this machine has devices for, and an acceptance run without thresholds; ``--toy``
uses small sizes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.utils.benchmark import Timer

from fctune.apps.acceptance.collectives import measure_collective
from fctune.apps.acceptance.config import CollectivesConfig, ComputeConfig, LimitsConfig
from fctune.apps.acceptance.devices import compute_checksums, measure_copies, measure_products
from fctune.apps.acceptance.fault_injection import FaultInjector
from fctune.apps.acceptance.metrics import CHECKS, compute_bandwidth
from fctune.apps.acceptance.session import Session
from fctune.base.distributed import read_launcher_environment

ROOT = Path(__file__).parents[1]
LIMITS = LimitsConfig(total_s=86_400.0)


def plain_loop(num_bytes: int, repetitions: int, device: torch.device) -> float:
    """Time an all_reduce with one clock around a loop; return the mean in seconds over repetitions and ranks."""
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


def read_nccl_tests(text: str) -> dict[int, float]:
    """Parse the output of all_reduce_perf into in-place busbw in GB/s, by bytes."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return {int(fields[0]): float(fields[11]) for fields in lines if len(fields) == 13}


def run_nccl_tests(folder: Path, num_bytes: int, num_gpus: int) -> float:
    """Run all_reduce_perf on this machine's GPUs and return the busbw of one size in GB/s."""
    command = [str(folder / "all_reduce_perf"), "-b", str(num_bytes), "-e", str(num_bytes), "-g", str(num_gpus)]
    done = subprocess.run([*command, "-w", "5", "-n", "20"], capture_output=True, text=True, check=True)
    return read_nccl_tests(done.stdout)[num_bytes]


def measure_all_reduce(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Measure both sides on one rank; rank 0 writes the result."""
    size = arguments.ranks
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    session = Session(read_launcher_environment(), LIMITS, arguments.out.parent, print)
    session.arrive()
    world = session.join_group("all", range(size), device)
    faults = FaultInjector([], rank)
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
                session.publish("found", found)
                session.barrier("found")
                samples = session.read("found").values()
                session.barrier("read")
                ours.append(statistics.fmean(s for sample in samples for s in sample["seconds"]))
                wrong += sum(sample["wrong_elements"] for sample in samples)
        rates = [[compute_bandwidth("all_reduce", num_bytes, size, s)[1] for s in side] for side in (ours, loops)]
        row = {"mib": mib, "unit": "GB/s busbw", **compare(*rates), "wrong_elements": wrong}
        if arguments.nccl_tests is not None and rank == 0:
            other = run_nccl_tests(arguments.nccl_tests, num_bytes, size)
            row |= {"nccl_tests": other, "difference_from_nccl_tests": round(row["ours"] / other - 1, 4)}
        session.barrier("the next size", LIMITS.build_s)
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
    session.leave_group()
    session.close()
    if rank == 0:
        sizes = " ".join(f"{mib:g}" for mib in arguments.mib)
        flags = f"--ranks {size} --mib {sizes} --rounds {arguments.rounds} --repetitions {arguments.repetitions}"
        backend = "nccl" if device.type == "cuda" else "gloo"
        write(arguments.out, flags, device, {"backend": backend, "rows": rows})


def compare(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Compare the rates of two sides round by round."""
    low, middle, high = statistics.quantiles(theirs, n=4)
    return {
        "ours": round(statistics.median(ours), 4),
        "theirs": round(middle, 4),
        "difference": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) - 1, 4),
        "spread": round((high - low) / middle, 4),
    }


def measure_compute(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare one device's products and copies with ``torch.utils.benchmark``, and checksums with plain products."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = "bf16" if device.type == "cuda" else "fp32"
    duration_s = arguments.slice_s
    config = ComputeConfig(dtypes=[dtype], size=arguments.size, sustain_s=duration_s, copy_mib=arguments.copy_mib)
    config.checksum_size = min(arguments.size, config.checksum_size)
    session = Session(read_launcher_environment(), LIMITS, arguments.out.parent, print)
    session.arrive()
    faults = FaultInjector([], 0)
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    ours: dict[str, list[float]] = {"tflops": [], "memory_gb_s": []}
    theirs: dict[str, list[float]] = {"tflops": [], "memory_gb_s": []}
    source = torch.randn(arguments.copy_mib * 2**18, device=device)
    seconds = time_statement("b.copy_(a)", {"a": source, "b": torch.empty_like(source)}, duration_s)
    config.copy_repetitions = max(config.copy_repetitions, round(duration_s / seconds))  # for as long as the other side
    for number in range(arguments.rounds):
        for is_ours in (number % 2 == 0, number % 2 == 1):
            if is_ours:
                product: dict[str, Any] = {}
                measure_products(session, config, dtype, device, faults, product)
                ours["tflops"].append(product["tflops"])
                copies: dict[str, Any] = {}
                measure_copies(session, config, device, faults, copies)
                ours["memory_gb_s"].append(copies["memory"]["gb_s"])
                continue
            matrices = [torch.randn(arguments.size, arguments.size, device=device, dtype=torch_dtype) for _ in range(2)]
            seconds = time_statement("a @ b", dict(zip("ab", matrices, strict=True)), duration_s)
            theirs["tflops"].append(2 * arguments.size**3 / seconds / 1e12)
            source = torch.randn(arguments.copy_mib * 2**18, device=device)
            seconds = time_statement("b.copy_(a)", {"a": source, "b": torch.empty_like(source)}, duration_s)
            theirs["memory_gb_s"].append(2 * source.numel() * 4 / seconds / 1e9)
            del matrices, source
    checksums = [compute_checksums(config, device, faults)[dtype] for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(config.checksum_size, config.checksum_size, generator=generator) for _ in range(2)]
    result = torch.mm(*(matrix.to(device).to(torch_dtype) for matrix in plain)).contiguous()
    expected = xxhash.xxh3_64_hexdigest(result.view(torch.uint8).cpu().numpy().tobytes())
    session.close()
    figures = {name: compare(values, theirs[name]) for name, values in ours.items()}
    return {"dtype": dtype, "size": arguments.size, "checksums_equal": {*checksums} == {expected}, "figures": figures}


def time_statement(statement: str, tensors: dict[str, torch.Tensor], duration_s: float) -> float:
    """Return the median seconds of a statement, measured by ``torch.utils.benchmark``."""
    timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=duration_s).median)


def measure_machine(is_toy: bool) -> dict[str, Any]:
    """Run everything this machine has devices for; ``ok`` if it all ran and every check of an acceptance run passed."""
    num_devices = torch.cuda.device_count() or 2
    small = ["--size", "256", "--copy-mib", "16", "--rounds", "4", "--slice-s", "0.1"]
    large = ["--size", "8192", "--copy-mib", "4096", "--rounds", "6", "--slice-s", "2"]
    found: dict[str, Any] = {"ok": True}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {"compute": ["--compute", *(small if is_toy else large)]}
        if num_devices > 1:
            sizes = ["0.25", "1"] if is_toy else ["1", "16", "256", "1024"]
            parts["all_reduce"] = ["--ranks", str(num_devices), "--rounds", "6", "--mib", *sizes]
        for part, flags in parts.items():
            out = folder / f"{part}.json"
            done = subprocess.run([sys.executable, "-m", "benchmarks.acceptance", *flags, "--out", str(out)], cwd=ROOT)
            found["ok"] &= done.returncode == 0
            found[part] = json.loads(out.read_text()) if out.exists() else None
        launch = [str(Path(sys.executable).with_name("tune")), "run", "--nproc_per_node", str(num_devices)]
        command = [
            *launch,
            "recipes/cluster_acceptance",
            *list_overrides(folder, num_devices, is_toy, torch.cuda.is_available()),
        ]
        code = subprocess.run(command, cwd=ROOT).returncode
        document = json.loads((folder / "run" / "acceptance.json").read_text())
    found["ok"] &= code == 0
    found["run"] = {name: document[name] for name in ("verdict", "reason", "seconds", "bandwidths")}
    found["run"]["figures"] = {f["name"]: f["value"] for check in document["checks"] for f in check["figures"]}
    found["run"]["skipped"] = {c["name"]: c["reason"] for c in document["checks"] if c["status"] == "SKIPPED"}
    return found


def list_overrides(folder: Path, num_devices: int, is_toy: bool, on_gpus: bool) -> list[str]:
    """Return the arguments of a short acceptance run on one node that measures every figure without thresholds."""
    absent = {"collectives_all", "training_all"}
    absent |= set() if on_gpus else {"transfer", "health"}
    absent |= {"links", "collectives_node", "collective_data"} if num_devices == 1 else set()
    required = [check for check in CHECKS if check not in absent]
    config = "configs/acceptance_2x8_h100.yaml" if on_gpus and not is_toy else "configs/acceptance_cpu.yaml"
    overrides = [f"device={'cuda' if on_gpus else 'cpu'}", "nodes=1", f"ranks_per_node={num_devices}", "gpu=null"]
    overrides += ["thresholds={}", f"required=[{', '.join(required)}]", f"output_dir={folder / 'run'}"]
    overrides += [f"storage.{disk}_dir={folder / disk}" for disk in ("node", "network", "shared")]
    if not is_toy:
        overrides += ["compute.sustain_s=8", "storage.mib=256", "limits.total_s=200"]
    elif on_gpus:
        overrides += ["compute.dtypes=[bf16, fp8]", "compute.size=1024"]
    return ["--config", config, *overrides]


def write(out: Path, flags: str, device: torch.device, found: dict[str, Any]) -> None:
    """Write a result with its command, date, device and load."""
    is_cuda = device.type == "cuda"
    made = {
        "command": f"python -m benchmarks.acceptance {flags}",
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "device": torch.cuda.get_device_name(device) if is_cuda else f"cpu, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "load": [round(load, 2) for load in os.getloadavg()],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(made | found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the benchmark that the command line selects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 1.0, 4.0, 16.0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--nccl-tests", type=Path, metavar="FOLDER", help="build directory of all_reduce_perf")
    parser.add_argument("--compute", action="store_true", help="compare one device with torch.utils.benchmark")
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the matrices")
    parser.add_argument("--copy-mib", type=int, default=4096)
    parser.add_argument("--slice-s", type=float, default=1.0, help="seconds per side in each round")
    parser.add_argument("--machine", action="store_true", help="everything this machine has devices for")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if arguments.machine or arguments.compute:
        found = measure_machine(arguments.toy) if arguments.machine else measure_compute(arguments)
        flags = f"--compute --size {arguments.size} --copy-mib {arguments.copy_mib} --rounds {arguments.rounds}"
        write(
            arguments.out, f"{flags} --slice-s {arguments.slice_s}" if arguments.compute else "--machine", device, found
        )
        print(json.dumps(found), flush=True)
        raise SystemExit(not found.get("ok", True))
    context = torch.multiprocessing.get_context("spawn")
    ranks = range(arguments.ranks)
    processes = [context.Process(target=measure_all_reduce, args=(r, arguments, arguments.port)) for r in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
