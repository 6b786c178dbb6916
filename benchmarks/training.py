"""Compare training on the CPU: fctune, torchtune's stock LoRA recipe, and TRL's SFTTrainer with PEFT.

    python -m benchmarks.training [--rows FILE] [--quick] [--out benchmarks/results/training_DATE.json]

All tools use the same rows, model (50 million parameters, vocabulary 32,000, random weights), adapters and optimizer. A
sweep first finds the best settings of each tool (micro-batch, dtype, compilation, and one process with two threads or
two ranks with one each). The best settings of all tools then alternate, and medians are reported. Every measurement is
a separate process. ``--rows`` adds a second comparison on rows of a file, with the settings from the sweep.

torchtune 0.6.1 cannot read tool calls, so it gets the same text as plain messages, with tool results as user turns.
It also trains on the header of each assistant turn, whose tokens are not counted as supervised. It runs unpacked, as
its stock config does, and packed. Its single-device recipe runs on the CPU unchanged; in the distributed one, three
calls that need a GPU are replaced. TRL runs packed and unpacked, and the faster of the two is reported; a forward
pass tests whether its packing lets a conversation attend to the one before it (``mixes_conversations``).

Losses are compared after equal numbers of supervised tokens, those of the tool that saw the fewest; the tools see the
rows in different orders.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.job import Job, run, to_json
from fctune.base.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "torchtune", "torchao", "transformers", "trl", "peft", "accelerate", "datasets")

# Tools by their name in tables, and the speed-up over each that is the target.
CONTESTANTS = {"fctune": None, "torchtune": 3.0, "torchtune packed": 1.5, "trl": 1.5}
TIMEOUT_S = 150


def measure(job: Job, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Measure a job in separate processes, all ranks together; the result has ``error`` if it failed.

    The ranks measure the same steps, so their counts are added and their times are not.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if job.ranks > 1 or job.distributed:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(job.ranks)]
        command += ["-m", "benchmarks.training", "--one", to_json(job), "--folder", folder]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(job.threads),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(Path(job.rows_dir) / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",
        }
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers
            try:
                output, _ = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            last = "\n".join(output.strip().splitlines()[-5:])
            return {"error": f"{last}\nnot done after {timeout_s:.0f} s"}
        files = sorted(Path(folder).glob("*.json"))
        if process.returncode or len(files) != job.ranks:
            return {"error": "\n".join(output.strip().splitlines()[-15:])}
        parts = [json.loads(file.read_text()) for file in files]
    counts = json.loads((Path(job.rows_dir) / "counts.json").read_text())
    return _join(parts, counts["supervised"] / counts["tokens"]) | {"wall_s": time.perf_counter() - started}


def _join(parts: list[dict[str, Any]], supervised_share: float) -> dict[str, Any]:
    """Merge the results of all ranks.

    The share of supervised tokens in a few steps varies by a third, so their rate is that of real tokens times their
    share in all rows; the counts themselves are kept.
    """
    joined = dict(parts[0])
    for key in ("places", "real", "supervised", "trained", "peak_mib", "start_mib"):
        joined[key] = sum(part[key] for part in parts)
    columns = zip(*(part["supervised_by_step"] for part in parts), strict=True)
    joined["supervised_by_step"] = [sum(column) for column in columns]
    seconds = joined["seconds"]
    joined["real_per_s"] = joined["real"] / seconds
    joined["supervised_per_s"] = joined["real_per_s"] * supervised_share
    if len(parts) > 1:
        joined["cpu_s"] = None  # not measured on every rank
    joined["padding_share"] = 1 - joined["real"] / joined["places"]
    return joined


def start_jobs(common: dict[str, Any], conversations: int, packs: int) -> dict[str, list[Job]]:
    """Return the first jobs of each contestant: its micro-batch sizes, in float32 and not compiled."""
    packed: dict[str, Any] = common | {"rows_a_step": packs, "packed": True}
    unpacked: dict[str, Any] = common | {"rows_a_step": conversations, "packed": False}
    sizes = [size for size in (1, 2, 4) if packs % size == 0]
    wide = [size for size in (4, 8, 16) if conversations % size == 0]
    return {
        "fctune": [Job(tool="fctune", **packed, micro_batch_size=size) for size in sizes],
        "torchtune": [Job(tool="torchtune", **unpacked, micro_batch_size=size) for size in wide],
        "torchtune packed": [Job(tool="torchtune", **packed, micro_batch_size=size) for size in sizes],
        "trl": [Job(tool="trl", **packed, micro_batch_size=size) for size in sizes]
        + [Job(tool="trl", **unpacked, micro_batch_size=wide[len(wide) // 2])],
    }


def vary(name: str, best: Job) -> list[Job]:
    """Return variations of the job with the best micro-batch: dtype, compilation, ranks instead of threads."""
    jobs = [best.replace(dtype="bf16"), best.replace(compile=True)]
    per_rank = best.rows_a_step // 2
    if per_rank:
        size = max(s for s in range(1, best.micro_batch_size + 1) if per_rank % s == 0)
        jobs.append(best.replace(ranks=2, threads=1, micro_batch_size=size))
    if name.startswith("torchtune"):
        jobs.append(best.replace(distributed=True))
    return jobs


def sweep(first: dict[str, list[Job]], is_quick: bool) -> tuple[dict[str, Job], list[dict[str, Any]]]:
    """Return the best settings of each contestant, and every measurement of the sweep."""
    best: dict[str, Job] = {}
    cells: list[dict[str, Any]] = []

    def rate(name: str, job: Job) -> float:
        found = measure(job)
        cells.append({"contestant": name, "settings": job.name, "job": json.loads(to_json(job)), **found})
        speed = found.get("supervised_per_s", 0.0)
        text = f"{speed:,.0f} supervised tokens/s" if speed else found["error"].strip().splitlines()[-1][:120]
        print(f"  {name:<17} {job.name:<60} {text}", flush=True)
        return float(speed)

    for name, jobs in first.items():
        speeds = [(rate(name, job), job) for job in (jobs[-1:] if is_quick else jobs)]
        speed, chosen = max(speeds, key=lambda pair: pair[0])
        varied = [(rate(name, job), job) for job in vary(name, chosen)[: 1 if is_quick else None]]
        by_gain = sorted((pair for pair in varied if pair[0] > speed), key=lambda pair: -pair[0])
        if len(by_gain) > 1 and not is_quick:  # the two best variations may combine
            both = _combine(chosen, by_gain[0][1], by_gain[1][1])
            by_gain = sorted([*by_gain, (rate(name, both), both)], key=lambda pair: -pair[0])
        if by_gain:
            speed, chosen = by_gain[0]
        if not speed:
            raise SystemExit(f"{name}: no measurement of the sweep succeeded; see the messages above")
        best[name] = chosen
    return best, cells


def _combine(base: Job, one: Job, other: Job) -> Job:
    of_base, of_one = json.loads(to_json(base)), json.loads(to_json(one))
    return other.replace(**{key: value for key, value in of_one.items() if value != of_base[key]})


def compare(best: dict[str, Job], repeats: int) -> dict[str, Any]:
    """Run the contestants in turn, ``repeats`` times, and summarise their results."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in best}
    for _ in range(repeats):
        for name, job in best.items():
            found = measure(job, timeout_s=3 * TIMEOUT_S)
            if "error" in found:
                print(f"  {name}: {found['error']}", flush=True)
            else:
                runs[name].append(found)
    missing = [name for name, found in runs.items() if not found]
    if missing:
        raise SystemExit(f"no run of {', '.join(missing)} succeeded; see the messages above")
    fewest = min(sum(one["supervised_by_step"]) for found in runs.values() for one in found)
    summary = {name: summarise(found, fewest) | {"settings": best[name].name} for name, found in runs.items()}
    return {"summary": summary, "equal_supervised_tokens": fewest, "runs": runs}


def summarise(runs: list[dict[str, Any]], num_supervised: int) -> dict[str, Any]:
    """Return the medians over the repeats."""
    keys = ("supervised_per_s", "real_per_s", "padding_share", "peak_mib", "start_mib")
    summary: dict[str, Any] = {key: statistics.median(one[key] for one in runs) for key in keys}
    summary["spread"] = [min(one["supervised_per_s"] for one in runs), max(one["supervised_per_s"] for one in runs)]
    summary["loss"] = statistics.median(loss_after(one, num_supervised) for one in runs)
    flags = {one.get("mixes_conversations") for one in runs} - {None}
    return summary | ({"mixes_conversations": flags.pop()} if flags else {})


def loss_after(run: dict[str, Any], num_supervised: int) -> float:
    """Return the training loss after ``num_supervised`` tokens, interpolated linearly between steps."""
    seen = list(itertools.accumulate(run["supervised_by_step"]))
    losses = run["losses"]
    for index, count in enumerate(seen):
        if count >= num_supervised:
            if not index:
                return float(losses[0])
            share = (num_supervised - seen[index - 1]) / (count - seen[index - 1])
            return float(losses[index - 1] + share * (losses[index] - losses[index - 1]))
    raise AssertionError("the run saw fewer supervised tokens")


def print_table(title: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print a comparison; returns the speed ratios and whether they meet their targets."""
    summary = found["summary"]
    ours = summary["fctune"]
    print(f"\n{title}: loss after {found['equal_supervised_tokens']:,} supervised tokens")
    heads = f"{'supervised/s':>12} {'real/s':>8} {'padding':>8} {'peak MiB':>9} {'loss':>7} {'ours is':>8}"
    print(f"{'':<17} {heads}  settings")
    ratios: dict[str, Any] = {}
    for name, one in summary.items():
        ratio = ours["supervised_per_s"] / one["supervised_per_s"]
        target = CONTESTANTS[name]
        if target is not None:
            ratios[name] = {"ratio": round(ratio, 3), "target": target, "holds": ratio >= target}
        speedup = "" if target is None else f"{ratio:.2f}x"
        print(
            f"{name:<17} {one['supervised_per_s']:>12,.0f} {one['real_per_s']:>8,.0f} {one['padding_share']:>8.1%} "
            f"{one['peak_mib']:>9,.0f} {one['loss']:>7.3f} {speedup:>8}  {one['settings']}"
        )
    ratios["lowest_peak_memory"] = {"holds": ours["peak_mib"] <= min(one["peak_mib"] for one in summary.values())}
    for name, one in ratios.items():
        suffix = f" (target {one['target']}x)" if "target" in one else ""
        print(f"  {name}{suffix}: {'holds' if one['holds'] else 'MISSED'}")
    if summary["trl"].get("mixes_conversations"):
        print("  TRL's packing let conversations attend to one another, so its packed numbers are not comparable.")
    return ratios


def main() -> None:
    """Run the benchmark and write its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, help="real rows for a second comparison, in any supported row format")
    parser.add_argument("--num-rows", type=int, default=2_000, help="synthetic rows")
    parser.add_argument("--steps", type=int, default=8, help="steps of each compared run; the first is a warm-up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small model, few settings and steps")
    parser.add_argument("--folder", type=Path, help="directory for inputs (default: temporary)")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/training_DATE.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        found = run(Job(**json.loads(arguments.one)))
        (arguments.folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        return
    out = arguments.out or RESULTS / f"training_{datetime.date.today():%Y-%m-%d}.json"
    if arguments.quick and arguments.out is None:
        out = Path(tempfile.gettempdir()) / "training_quick.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for report in benchmark(arguments, arguments.folder or Path(temporary)):
            out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['minutes']} minutes; {out}")


def benchmark(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the report after the synthetic rows, and again after the real ones."""
    from benchmarks.workload import SHAPES, write_model, write_rows
    from fctune.data.conversation import Conversation
    from fctune.data.sources.reader import read_source
    from fctune.data.synthetic import iter_conversations

    started = time.perf_counter()
    shape = SHAPES["toy" if arguments.quick else "50m"]
    write_model(folder / "model", shape, has_weights=True)
    counts = write_rows(
        folder / "synthetic", folder / "model", iter_conversations("train", arguments.num_rows, 1), seq_len=1_024
    )
    packs = 4
    conversations = max(8, round(packs * 1_024 / (counts.tokens / counts.rows) / 8) * 8)
    common = {"model_dir": str(folder / "model"), "rows_dir": str(folder / "synthetic"), "seq_len": 1_024, "steps": 3}
    print(f"model: {shape.num_parameters:,} parameters; rows: {counts}", flush=True)
    best, cells = sweep(start_jobs(common, conversations, packs), arguments.quick)
    steps = 4 if arguments.quick else arguments.steps
    repeats = 1 if arguments.quick else arguments.repeats
    found = compare({name: job.replace(steps=steps) for name, job in best.items()}, repeats)
    report: dict[str, Any] = {
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "machine": describe_machine(),
        "versions": {name: version(name) for name in PACKAGES},
        "arguments": {
            key: value.name if isinstance(value, Path) else str(value)  # paths differ between machines
            for key, value in vars(arguments).items()
            if key not in ("one", "folder")
        },
        "parameters": shape.num_parameters,
        "sweep": cells,
        "synthetic": found | {"rows": str(counts), "ratios": print_table("synthetic rows", found)},
        "minutes": round((time.perf_counter() - started) / 60, 1),
    }
    yield report
    if arguments.rows is not None:
        seq_len = 2_048
        rows = [row for row in read_source(str(arguments.rows)) if isinstance(row, Conversation)]
        real = write_rows(folder / "real", folder / "model", rows, seq_len)
        print(f"\nreal rows: {real}", flush=True)
        jobs = {name: fit_to_rows(job, folder / "real", seq_len, real.tokens / real.rows) for name, job in best.items()}
        found = compare({name: job.replace(steps=steps) for name, job in jobs.items()}, repeats)
        report["real"] = found | {"rows": str(real), "ratios": print_table("real rows", found)}
        report["minutes"] = round((time.perf_counter() - started) / 60, 1)
        yield report


def fit_to_rows(job: Job, rows_dir: Path, seq_len: int, mean_tokens: float) -> Job:
    """Adapt a job to longer rows: about as many tokens per step, and a micro-batch that divides them."""
    rows = max(job.ranks, round(4_096 / (seq_len if job.packed else mean_tokens)))
    rows = -(-rows // job.ranks) * job.ranks
    share = seq_len if job.packed else mean_tokens
    ideal = max(1, round(job.micro_batch_size * 1_024 / share)) if job.packed else job.micro_batch_size
    size = max(s for s in range(1, min(ideal, rows // job.ranks) + 1) if (rows // job.ranks) % s == 0)
    return job.replace(rows_dir=str(rows_dir), seq_len=seq_len, rows_a_step=rows, micro_batch_size=size)


def keep(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a part of a benchmark, measured unless its file is there; a kill leaves no partial file."""
    if not path.exists():
        write_atomically(path, json.dumps(measure(), indent=2) + "\n")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def describe_machine() -> dict[str, Any]:
    """Return the CPU, cores, memory, load and Python version of this machine."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    flags = next((line.split(":")[1].split() for line in info.splitlines() if line.startswith("flags")), [])
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    python = platform.python_version()
    return {"cpu": model, "cores": cores, "gib": round(gib, 1), "simd": wide, "load_at_end": load, "python": python}


if __name__ == "__main__":
    main()
